"""Layouts said by hand: numbers stay, bytes move as asked, and sequence-parallel norms beside a model axis."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from programs import simulate, worst

import fsharding as fs
from fsharding import P

D, H, T = 8, 16, 6
MESH = fs.make_mesh({"data": 2, "tp": 2}, model_axes=("tp",), fake=True)


def params(layers=2):
    g = torch.Generator().manual_seed(0)
    n = lambda *s: torch.randn(*s, generator=g) * 0.3  # noqa: E731
    return [{"norm": torch.ones(D), "up": n(D, H), "down": n(H, D)} for _ in range(layers)]


WHERE = {"norm": P("data"), "up": P("data", "tp"), "down": P("tp", "data")}


def model(sequence):
    def loss(p, x):
        for layer in p:
            x = fs.constrain(x, (..., "tp")) if sequence else x
            h = F.rms_norm(x, (D,), layer["norm"])
            h = fs.constrain(h, (..., None)) if sequence else h
            y = F.silu(h @ layer["up"]) @ layer["down"]  # columns, then rows: a sum over tp is pending
            x = x + (fs.constrain(y, (..., "tp")) if sequence else y)
        return x.square().mean()

    return loss


def test_sequence_parallel_norms_equal_one_device():
    p, x = params(), torch.randn(4, T, D, generator=torch.Generator().manual_seed(1))
    fn = fs.value_and_grad(model(True))
    got, low = simulate(fs.shard(fn, MESH, strict=True), (p, x), ([WHERE] * 2, P("data")))
    assert worst(got, fs.value_and_grad(model(False))(p, x)) <= 1e-5
    kinds = Counter((c.kind, c.phase) for c in low.collectives() if c.axes == ("tp",) and c.param is None)
    assert kinds["reduce_scatter", "forward"] == 2 and kinds["all_gather", "forward"] == 2
    assert not kinds["all_reduce", "forward"]  # of rows: the loss is reduced over both axes
    norms = [n for n in low.local.graph.nodes if "rsqrt" in str(n.target)]
    assert norms and all(n.meta["val"].shape[1] == T // 2 for n in norms), "each rank of tp norms half of the sequence"


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(None, "data"), P("tp", "data"), P(("data", "tp")), (..., "tp"), P("tp")]
)
def test_values_and_gradients_do_not_change(spec):
    w, x = torch.randn(D, 4), torch.randn(4, T, D)

    def fn(w, x, move):
        y = torch.tanh(x) @ w
        z = fs.constrain(y, spec) if move and T % 2 == 0 else y
        return (z * torch.arange(4.0)).sin().sum() + z.sum(0).square().sum()

    want = fs.value_and_grad(lambda w, x: fn(w, x, False), argnums=(0, 1))(w, x)
    grad = fs.value_and_grad(lambda w, x: fn(w, x, True), argnums=(0, 1))
    got, _ = simulate(fs.shard(grad, MESH), (w, x), (P("data"), P("data")))
    assert worst(got, want) <= 1e-5
    batched = lambda w, x: torch.func.vmap(lambda v: fs.constrain(x[:, 0] @ v, P("data")), 1, 1)(w)  # noqa: E731
    got, _ = simulate(fs.shard(batched, MESH), (w, x), (P("data"), P("data")))
    assert worst(got, x[:, 0] @ w) <= 1e-5


def test_outside_it_is_the_value_itself():
    x = torch.randn(3)
    assert fs.constrain(x, P("data")) is x


@pytest.mark.parametrize(
    "spec, words",
    [
        (P("rows"), "does not have"),
        (P(None, None, None, None), "4 entries"),
        (P(None, None, ("data", "tp")), "3 would be split"),
        ("data", "takes a tensor and a spec"),
        ((1,), "no axis"),
    ],
)
def test_mistakes_name_the_line(spec, words):
    with pytest.raises(fs.ShardingError, match=words):
        simulate(
            fs.shard(lambda w, x: fs.constrain(x, spec).sum() + w.sum(), MESH),
            (torch.ones(2), torch.ones(4, 2, 3)),
            (P(), P("data")),
        )
