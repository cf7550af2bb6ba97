"""Faults that a hunt for wrong numbers found, each kept as a test."""

import pytest
import torch
from helpers import run_ranks
from programs import TOLERANCE, simulate, worst

import fsharding as fs
from fsharding import P

G = torch.Generator().manual_seed(0)
W, X, S, KEY = torch.randn(6, 8, generator=G), torch.randn(8, 6, generator=G), torch.tensor(0.5), fs.random.key(3)


def equal(f, args, specs, shape, **options):
    got, _ = simulate(fs.shard(f, fs.make_mesh(shape, fake=True), **options), args, specs)
    assert worst(got, f(*args)) <= TOLERANCE


@pytest.mark.parametrize("rows", [P("d"), P(("d", "one")), P(("one", "d"))], ids=str)
def test_rows_that_name_an_axis_of_size_one(rows):
    equal(fs.grad(lambda w, x: (w + x).sin().sum(), argnums=(0, 1)), (X, X * 2), (P("d"), rows), {"d": 2, "one": 1})
    f = fs.value_and_grad(lambda w, x: (w + x).sin().sum())
    equal(f, (W[:, :4], W[0, :4]), (P(None, ("d", "b")), P(("b", "one"))), {"d": 2, "one": 1, "b": 2})


def test_views_of_expansions_of_stored_values():
    f = fs.grad(lambda w, x: torch.cat([torch.log_softmax(w, 0), torch.ones(6, 8)]).sum() + w.sum())
    equal(f, (W, X), (P(), P("d")), {"d": 2})
    equal(lambda w, x: w.expand(2, 6, 8) + (w * 2).sum(), (W, X), (P(), P("d")), {"d": 2})


REDUCTIONS = {
    "sum": lambda s: s.sum(0),
    "mean": lambda s: s.mean(-1),
    "amax": lambda s: s.amax(0),
    "logsumexp": lambda s: torch.logsumexp(s, 0),
    "argmax": lambda s: s.argmax(0),
    "max": lambda s: s.max(0).values,
    "any": lambda s: (s > 0).any(0),
}


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
def test_reductions_of_0d_values_over_a_dim(name):
    equal(lambda x, s: x * REDUCTIONS[name](s), (X, S), (P("d"), P()), {"d": 2}, stored_argnums=())


def test_any_over_no_dims_is_elementwise():
    equal(lambda w, x: torch.any(x > 0, dim=()), (W, X), (P(), P("d")), {"d": 2})


IN_PLACE = {
    "split": lambda x: x.split([3, 3], 1)[0].add_(1),
    "diagonal": lambda x: x.diagonal().add_(1),
    "out": lambda x: torch.mul(x * 1, 2, out=x),
    "as_strided": lambda x: x.as_strided((2,), (1,)).add_(1),
    "unfold": lambda x: x.unfold(1, 2, 2).add_(1),
    "foreach": lambda x: torch._foreach_add_([x], 1),
}


@pytest.mark.parametrize("name", sorted(IN_PLACE))
def test_arguments_written_through_views(name):
    def f(w, x):
        IN_PLACE[name](x)
        return x

    with pytest.raises(fs.ShardingError, match=r"test_found\.py:\d+.*Return the new value"):
        fs.shard(f, fs.make_mesh({"d": 2}, fake=True)).lower(W, fs.ShapeDtype((8, 6), torch.float32, P("d")))


def test_out_into_a_fresh_tensor_is_legal():
    equal(lambda w, x: torch.mul(x, 2, out=torch.empty_like(x)), (W, X), (P(), P("d")), {"d": 2})


def test_random_numbers_that_broadcast():
    equal(lambda w, x, k: fs.random.normal(k, (1, 6)) * torch.ones(8, 6) + x, (W, X, KEY), (P(), P("d"), P()), {"d": 2})
    equal(lambda w, x, k: fs.random.normal(k, ()) * x, (W, X, KEY), (P(), P("d"), P()), {"d": 2})
    equal(
        lambda w, x, k: fs.random.uniform(k, (8, 6)) * w[:, :6].sum() + x, (W, X, KEY), (P("d"), P("d"), P()), {"d": 4}
    )


def test_transforms_around_a_sharded_function_are_refused():
    mesh = fs.make_mesh({"d": 1}, device="cpu")
    sharded = fs.shard(lambda w: w.sin().sum(), mesh)
    sharded(W)
    for transform in (
        lambda: torch.func.jvp(sharded, (W,), (W,)),
        lambda: torch.func.vmap(sharded)(W),
        lambda: torch.func.grad(sharded)(W),
        lambda: dual(sharded),
    ):
        with pytest.raises(fs.ShardingError, match="Put the transform inside"):
            transform()
    assert torch.equal(fs.device_get(sharded(W)), W.sin().sum())


def dual(f):
    import torch.autograd.forward_ad as fw

    with fw.dual_level():
        return f(fw.make_dual(W, W))


def test_static_arguments_of_another_type_are_another_program():
    sharded = fs.shard(lambda w, k: w * k, fs.make_mesh({"d": 1}, device="cpu"), static_argnums=1)
    w = torch.arange(3)
    assert fs.device_get(sharded(w, 1)).dtype == torch.int64
    assert fs.device_get(sharded(w, 1.0)).dtype == torch.float32
    positive, negative = (torch.signbit(fs.device_get(sharded(w.float(), zero))).any() for zero in (0.0, -0.0))
    assert negative and not positive


def nan_ranks(rank, world):
    mesh = fs.make_mesh({"d": world})
    x = torch.ones(2, 3)
    if rank == 1:
        x[1, 1] = torch.nan
    x = fs.from_local(x, mesh, P("d"))
    f = fs.shard(lambda w, x: (x.amax(), x.amin(), x.abs().max(), x.amax(0)), mesh)
    return [y.isnan().any().item() for y in f(torch.ones(1), x)]


def test_a_nan_on_one_rank_reaches_every_extremum():
    assert run_ranks(2, nan_ranks) == [[True] * 4] * 2
