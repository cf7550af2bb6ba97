"""Faults that a hunt for wrong numbers found, each kept as a test."""

import inspect

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


# ---- second round ----------------------------------------------------------------------------------------------------
def test_padding_of_constants():
    f = lambda w, x: (
        x + torch.nn.functional.pad(torch.ones(8, 5), (1, 0)) + torch.nn.functional.pad(x[:, :5], (0, 1), value=2)
    )
    equal(f, (W, X), (P(), P("d")), {"d": 2})


def written(z):
    z[:, 0].copy_(z[:, 1] * 2)
    z[0] = 0.5
    z[..., -1].add_(z[..., 0])
    return z


TRANSPOSED = {
    "product": lambda w, x: written(w.T * 2),
    "clone": lambda w, x: written(w.T.clone()),
    "pointwise": lambda w, x: written(w.T.exp() + 1),
    "select": lambda w, x: (z := (w.T * 2), z.select(1, 1).mul_(2), z)[-1],
    "contiguous": lambda w, x: written(w * 2),
    "heads": lambda w, x: (z := (x @ w).reshape(8, 2, 4).transpose(1, 2) * 2, z[:, :, 0].mul_(3), z)[-1],
    "one row": lambda w, x: (z := x @ w, z[:, 2:3].mul_(3), z)[-1],
}


@pytest.mark.parametrize("name", sorted(TRANSPOSED))
@pytest.mark.parametrize("shape", [{"d": 1}, {"d": 2}], ids=str)
def test_gradients_of_in_place_writes_follow_memory(name, shape):
    f = fs.value_and_grad(lambda w, x: (TRANSPOSED[name](w, x).sin()).sum())
    equal(f, (W, X), (P(None, "d"), P("d")), shape)


def test_a_view_that_is_no_slice_of_its_base_is_taken_from_memory():
    def f(w, x):
        z = (x @ w).T.clone().T
        z[:, 1::3].mul_(3)
        return z.sin().sum()

    def g(w, x):
        return (x @ w).as_strided((5, 3), (9, 2), 4).sin().sum()

    equal(fs.value_and_grad(f, argnums=(0, 1)), (W, X), (P(), P("d")), {"d": 2})
    with pytest.warns(UserWarning, match=r"test_found\.py:\d+: `as_strided.* has no rule"):
        equal(fs.value_and_grad(g, argnums=(0, 1)), (W, X), (P(), P("d")), {"d": 2})


def test_strided_views_are_decoded_whatever_the_memory():
    """Every slice of contiguous and transposed tensors, against the view itself."""
    import itertools

    from fsharding.program.rules_strided import strided_cuts

    checked = 0
    for shape, order in (((4, 5), (1, 0)), ((4, 5), (0, 1)), ((3, 1, 4), (2, 0, 1)), ((2, 3, 4), (1, 2, 0))):
        base = torch.arange(torch.Size(shape).numel()).view(shape).permute(order)
        options = [
            [slice(None), *range(n), *(slice(a, b, c) for a in range(n) for b in range(a + 1, n + 1) for c in (1, 2))]
            for n in base.shape
        ]
        for index in itertools.islice(itertools.product(*options), 0, None, 5):
            view = base[index]
            found = strided_cuts(base.shape, base.stride(), view.shape, view.stride(), view.storage_offset())
            if found is None:
                continue
            cuts, shown = found
            slices = (c if isinstance(c, int) else slice(c[0], c[0] + (c[1] - 1) * c[2] + 1, c[2]) for c in cuts)
            kept = [d for d, c in enumerate(cuts) if not isinstance(c, int)]
            again = base[tuple(slices)].permute([kept.index(d) for d in shown])
            assert torch.equal(again.reshape(view.shape), view), (shape, order, index)
            checked += 1
    assert checked > 500


def test_closed_over_tensors_that_index_each_other():
    table, ids = torch.randn(8, 6, generator=G), torch.tensor([2, 0])
    equal(lambda w, x: x + table[ids].sum() + table[ids % 3, ids % 2].sum(), (W, X), (P(), P("d")), {"d": 2})


def test_auxiliary_results_of_any_kind():
    f = lambda w, x: ((x @ w).square().sum(), {"n": 3, "name": "loss", "none": None, "rows": x @ w})
    (value, aux), grad = fs.value_and_grad(f, has_aux=True)(W, X)
    assert aux["n"] == 3 and aux["name"] == "loss" and aux["none"] is None and torch.equal(aux["rows"], X @ W)
    equal(lambda w, x: fs.value_and_grad(f, has_aux=True)(w, x)[0][1]["rows"], (W, X), (P("d"), P("d")), {"d": 2})


def test_numbers_keep_their_precision_beside_float64():
    sharded = fs.shard(lambda w, c: w * c, fs.make_mesh({"d": 1}, device="cpu"))
    wide = torch.ones(1, dtype=torch.float64)
    assert fs.device_get(sharded(wide, 0.1)).item() == 0.1
    assert fs.device_get(sharded(wide, 1e300)).item() == 1e300
    assert fs.device_get(sharded(torch.ones(1), 0.1)).dtype == torch.float32
    with fs.disable_jit():
        assert fs.device_get(sharded(wide, 0.1)).item() == 0.1


def test_arguments_that_no_program_can_take():
    mesh = fs.make_mesh({"d": 1}, device="cpu")
    with pytest.raises(fs.ShardingError, match="sparse"):
        fs.shard(lambda w: w * 2, mesh)(torch.eye(3).to_sparse())
    with pytest.raises(fs.ShardingError, match="twice"):
        fs.grad(lambda w: w.sum(), argnums=(0, 0))(W)
    got = fs.shard(lambda *, w: w * 2, mesh, stored_argnums=-1)(w=W)
    assert torch.equal(fs.device_get(got), W * 2)


def test_the_gradient_of_rows_through_a_model_axis():
    mesh = fs.make_mesh({"d": 2, "tp": 2}, model_axes=("tp",), fake=True)
    f = fs.value_and_grad(lambda w, x: (x @ w).sin().sum(), argnums=(0, 1))
    for spec in (P("tp"), P(None, "tp"), P("d", "tp")):
        got, _ = simulate(fs.shard(f, mesh), (W, X), (spec, P("d")))
        assert worst(got, f(W, X)) <= TOLERANCE


# ---- third round -----------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*has no rule")
@pytest.mark.parametrize("name", sorted(TRANSPOSED))
def test_in_place_writes_along_a_split_dim_fall_back_by_meaning(name):
    """The gathered operand lies in memory in another way than one device's: the fallback must not run the raw op."""
    f = fs.value_and_grad(lambda w, x: (TRANSPOSED[name](w, x).sin()).sum(), argnums=(0, 1))
    equal(f, (W, X), (P(), P("d")), {"d": 2}, stored_argnums=())
    if "x @ w" not in inspect.getsource(TRANSPOSED[name]):
        equal(f, (W, X), (P("d"), P("d")), {"d": 2}, stored_argnums=())


def test_an_op_without_a_shape_rule_is_an_error_with_the_line():
    f = fs.grad(lambda w, x: torch.fake_quantize_per_tensor_affine(x @ w, 0.1, 0, -8, 7).sum())
    with pytest.raises(fs.ShardingError, match=r"test_found\.py:\d+: `aten.fake_quantize.*cannot be planned"):
        equal(f, (W, X), (P(), P("d")), {"d": 2})


def test_names_that_are_bound_anew_trace_anew():
    mesh = fs.make_mesh({"d": 1}, device="cpu")
    factor, offset = 2.0, torch.ones(3)
    sharded = fs.shard(lambda w: w * factor + offset, mesh)
    assert fs.device_get(sharded(torch.ones(3))).tolist() == [3.0] * 3
    factor = 5.0
    assert fs.device_get(sharded(torch.ones(3))).tolist() == [6.0] * 3
    offset = torch.zeros(3)
    assert fs.device_get(sharded(torch.ones(3))).tolist() == [5.0] * 3
    offset.fill_(7.0)
    assert fs.device_get(sharded(torch.ones(3))).tolist() == [12.0] * 3


def rank_constants(rank, world):
    mesh = fs.make_mesh({"d": world})
    x = fs.from_local(torch.ones(2, 3), mesh, P("d"))
    try:
        fs.shard(lambda w, x: (x * torch.tensor(rank + 1.0)).sum(), mesh)(torch.ones(1), x)
    except fs.ShardingError as error:
        return str(error)


def test_constants_that_differ_between_ranks_are_an_error():
    assert all("traced different programs" in message for message in run_ranks(2, rank_constants))


def one_rank_fails(rank, world):
    import time

    mesh = fs.make_mesh({"d": world})
    x = fs.from_local(torch.ones(2, 3), mesh, P("d"))

    def f(w, x):
        if rank == 1:
            raise KeyError("a typo on this rank")
        return x.sum()

    start = time.perf_counter()
    try:
        fs.shard(f, mesh)(torch.ones(1), x)
    except Exception as error:
        return type(error).__name__, str(error), time.perf_counter() - start


def test_a_trace_that_fails_on_one_rank_ends_all():
    (kind, text, waited), (own, message, _) = run_ranks(2, one_rank_fails)
    assert kind == "ShardingError" and "a typo on this rank" in text and "ranks [1]" in text and waited < 15
    assert own == "KeyError" and "a typo" in message


def test_gradients_of_rows_that_a_dispatch_cuts():
    """Tokens that every rank of the expert axis holds are served once; their gradient comes back whole."""

    def f(w, x):
        r = fs.moe.route((x[:, :2] > 0).long() * 2 + torch.arange(2), 4)
        return (
            fs.moe.combine(fs.ragged_dot(fs.moe.dispatch(x, r), w, r.group_sizes), torch.full((8, 2), 0.5), r)
            .sin()
            .sum()
        )

    w = torch.randn(4, 6, 6, generator=G)
    equal(fs.value_and_grad(f, argnums=(0, 1)), (w, X), (P("ep", "efsdp"), P("efsdp")), {"efsdp": 2, "ep": 2})
    equal(fs.value_and_grad(f, argnums=(0, 1)), (w, X), (P("ep", "efsdp"), P()), {"efsdp": 2, "ep": 2})


def test_a_compiled_program_takes_what_it_was_lowered_for():
    mesh = fs.make_mesh({"d": 1}, device="cpu")
    sharded = fs.shard(lambda w, x, k: (x @ w) * k, mesh, static_argnums=2)
    w, x = fs.device_put(W, mesh, P("d")), fs.device_put(X, mesh, P("d"))
    exe = sharded.lower(w, x, 2).compile()
    assert torch.equal(fs.device_get(exe(w, x, 2)), X @ W * 2)
    for args, words in (
        ((w, fs.device_put(X[:4], mesh, P("d")), 2), "x is"),
        ((w.double(), x, 2), "w is"),
        ((fs.device_put(W, mesh, P(None, "d")), x, 2), "w is"),
        ((w, x, 3), "static"),
        (([w], x, 2), "structure"),
    ):
        with pytest.raises(fs.ShardingError, match=words):
            exe(*args)


def test_a_sharded_function_inside_another_keeps_its_precision():
    mesh = fs.make_mesh({"d": 1}, device="cpu")
    inner = fs.shard(lambda w, x: x @ w, mesh, precision="bf16")
    assert fs.device_get(fs.shard(lambda w, x: inner(w, x), mesh)(W, X)).dtype == torch.bfloat16


def test_0d_values_are_summed_and_turned_like_others():
    for stored in ((), (1,)):
        count = lambda x, s: x + (s > 0).sum() + (s > 0).sum(0, keepdim=True) + torch.count_nonzero(s, 0)
        equal(count, (X, S), (P("d"), P()), {"d": 2}, stored_argnums=stored)
        got, _ = simulate(
            fs.shard(
                lambda x, s: ((s > 0).sum(), s.int().sum(0)), fs.make_mesh({"d": 2}, fake=True), stored_argnums=stored
            ),
            (X, S),
            (P("d"), P()),
        )
        assert [g.dtype for g in got] == [torch.int64, torch.int64]
        equal(lambda x, s: s.transpose(0, 0), (X, S), (P("d"), P()), {"d": 2}, stored_argnums=stored)
        equal(lambda x, s: s.flip(0) * x, (X, S), (P("d"), P()), {"d": 2}, stored_argnums=stored)


# ---- found by the conformance table ----------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_rows_that_meet_rows_gather_one_operand_once():
    """`x @ x.T` over split rows was an error. The first operand stays split; so does the result."""
    f = fs.value_and_grad(lambda w, x: torch.nn.functional.cross_entropy(x @ w @ (x @ w).T, torch.arange(8)))
    args, specs, mesh = (W, X), (P("d"), P("d")), fs.make_mesh({"d": 2}, fake=True)
    with pytest.warns(UserWarning, match=r"test_found\.py:\d+: `mm` has no rule"):
        got, low = simulate(fs.shard(f, mesh), args, specs)
    assert worst(got, f(*args)) <= TOLERANCE
    gathers = [c for c in low.collectives() if c.kind == "fallback" and c.phase == "forward"]
    assert len(gathers) == 1
    _, low = simulate(fs.shard(lambda w, x: x @ x.T, mesh), (W, X), (P(), P("d")))
    assert low.local.outputs[0][1] == (("d",), ())


def test_rows_of_other_specs_still_do_not_move():
    square = torch.randn(8, 8, generator=G)
    for f in (lambda x, y: x @ y, lambda x, y: x + y):
        with pytest.raises(fs.ShardingError, match=r"test_found\.py:\d+.*agree"):
            equal(f, (square, square * 2), (P("d"), P(None, "d")), {"d": 2}, stored_argnums=())


def test_views_of_stored_values_that_a_model_axis_cuts():
    mesh = fs.make_mesh({"d": 2, "tp": 2}, model_axes=("tp",), fake=True)
    f = fs.value_and_grad(lambda w, x: ((x @ w[:, 1:4]).sin() + w.view(3, 16)[0, :3]).sum(), argnums=(0, 1))
    with pytest.warns(UserWarning, match="has no rule"):
        got, _ = simulate(fs.shard(f, mesh), (W, X), (P("d", "tp"), P("d")))
    assert worst(got, f(W, X)) <= TOLERANCE


def test_what_a_library_function_calls_is_seen_too():
    """Dropout inside of attention inside of `multi_head_attention_forward`."""
    weights = (torch.ones(18, 6), None, None, None, False, 0.5, torch.ones(6, 6), None)
    f = lambda w, x: torch.nn.functional.multi_head_attention_forward(x, x, x, 6, 2, *weights)[0]
    with pytest.raises(fs.ShardingError, match=r"test_found\.py:\d+: .*fs.random"):
        equal(f, (W, X), (P(), P("d")), {"d": 2})


def test_each_row_looks_into_itself_without_moving():
    y = torch.tensor([3, 0, 1, 5, 2, 2, 4, 1])
    f = fs.value_and_grad(lambda w, x, y: torch.log_softmax(x @ w, -1)[torch.arange(8), y].mean())
    got, low = simulate(fs.shard(f, fs.make_mesh({"d": 4}, fake=True), strict=True), (W, X, y), (P(), P("d"), P("d")))
    assert worst(got, f(W, X, y)) <= TOLERANCE and {c.kind for c in low.collectives()} <= {"all_reduce"}


def test_a_block_of_matrices_is_not_taken_for_vectors():
    """24 rows over 6 ranks leave 4 systems of 4 equations: `solve` would read one right-hand side as 4 vectors."""
    a, b = torch.eye(4) * 3 + torch.randn(24, 4, 4, generator=G), torch.randn(4, 4, generator=G)
    f = fs.value_and_grad(lambda b, a: torch.linalg.solve(a, b).sin().sum(), argnums=(0, 1))
    got, _ = simulate(fs.shard(f, fs.make_mesh({"d": 6}, fake=True), strict=True), (b, a), (P(), P("d")))
    assert worst(got, f(b, a)) <= 10 * TOLERANCE


def test_a_kernel_that_insists_on_contiguous_operands_gets_them():
    f = fs.value_and_grad(lambda w, x: torch.nn.functional.pdist((x @ w).T).sum(), argnums=(0, 1))
    with pytest.warns(UserWarning, match="_pdist_forward` has no rule"):
        equal(f, (W, X), (P(), P("d")), {"d": 2})
