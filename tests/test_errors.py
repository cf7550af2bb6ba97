"""Every mistake that this surface can meet: a ShardingError with the leaf or the user's line, the reason and the way
out."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from programs import abstract, batch, init, specs, summed_loss

import fsharding as fs
from fsharding import P

ROWS = P(("replicate", "efsdp", "ep"))
HERE = r"test_errors\.py:\d+: "


@pytest.fixture(scope="module")
def mesh():
    return fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)


def S(*shape, spec=None, dtype=torch.float32):
    return fs.ShapeDtype(shape, dtype, spec)


W, X = S(6, 6, spec=P(("efsdp", "ep"))), S(8, 6, spec=ROWS)


def routing(x, experts=4):
    return fs.moe.route((x[:, :1] > 0).long(), experts)


def branches(w, x):
    if x.sum() > 0:
        return x
    return -x


def in_place(w, x):
    return x.add_(1)


def in_place_view(w, x):
    x[:, 0] = 1.0
    return x


def experts_apply(w, x):
    r = routing(x, w.shape[0])
    return fs.moe.combine(fs.ragged_dot(fs.moe.dispatch(x, r), w, r.group_sizes), torch.ones(8, 1), r)


def routed(use):
    def f(w, x):
        r = routing(x)
        return use(fs.moe.dispatch(x, r), r)

    return f


INSIDE = {
    "item": (lambda w, x: x.sum().item(), "reads a tensor's value"),
    "tolist": (lambda w, x: x.tolist(), "reads a tensor's value"),
    "float": (lambda w, x: float(x.sum()), "reads a tensor's value"),
    "branch": (branches, "`torch.where` instead of `if`"),
    "data-dependent shape": (lambda w, x: x[x > 0], "depends on the data"),
    "unique": (lambda w, x: torch.unique(x), "depends on the data"),
    "randn": (lambda w, x: x + torch.randn(8, 6), "fs.random"),
    "dropout": (lambda w, x: F.dropout(x, 0.5), "fs.random"),
    "in place": (in_place, "Return the new value"),
    "in place on a view": (in_place_view, "Return the new value"),
    "running statistics": (
        lambda w, x: F.batch_norm(x, torch.zeros(6), torch.ones(6), training=True),
        "running statistics",
    ),
    "op without a rule": (
        lambda w, x: F.pdist(x),
        "pdist.*is split over.*shard_map",
    ),
    "sort over rows": (lambda w, x: x.sort(0).values, "shard_map"),
    "rows against rows": (lambda w, x: x @ x.T, "two dims that meet.*shard_map"),
    "reshape of rows": (lambda w, x: x.reshape(6, 8), "does not divide"),
    "interleaved reshape": (lambda w, x: x.T.reshape(-1), "interleave"),
    "one-hot without classes": (lambda w, x: F.one_hot((x > 0).long()), "num_classes"),
    "reduction of routed rows": (routed(lambda xs, r: xs.sum()), "only row-wise ops are legal"),
    "index of routed rows": (routed(lambda xs, r: xs[:3]), "only row-wise ops are legal"),
    "reshape of routed rows": (routed(lambda xs, r: xs.reshape(-1)), "only row-wise ops are legal"),
    "returned routed rows": (routed(lambda xs, r: xs), "routed rows are returned"),
    "routed rows meet others": (routed(lambda xs, r: xs + torch.arange(8.0)[:, None]), "routed rows meet"),
    "permutation read": (routed(lambda xs, r: r.perm * 2), "only for `dispatch` and `combine`"),
    "sizes of another routing": (
        routed(lambda xs, r: fs.ragged_dot(xs, torch.ones(4, 6, 6), torch.full((4,), 2))),
        "their own `routing.group_sizes`",
    ),
}


STRICT = {
    "op without a rule",
    "sort over rows",
    "rows against rows",
    "reshape of rows",
    "interleaved reshape",
}  # else a fallback, which warns


@pytest.mark.parametrize("name", sorted(INSIDE))
def test_inside_the_function(mesh, name):
    fn, words = INSIDE[name]
    with pytest.raises(fs.ShardingError, match=f"(?s){HERE}.*({words})"):
        fs.shard(fn, mesh, strict=name in STRICT).lower(W, X)


def test_expert_weights_must_lead_with_the_axis(mesh):
    for spec in (P("efsdp", None, "ep"), P()):
        with pytest.raises(fs.ShardingError, match=r'experts of w are split over.*lead with that axis.*P\("ep"'):
            fs.shard(experts_apply, mesh).lower(S(4, 6, 6, spec=spec), X)
    fs.shard(experts_apply, mesh).lower(S(4, 6, 6, spec=P("ep", "efsdp")), X)


def test_experts_not_divisible_by_ep():
    mesh = fs.make_mesh({"efsdp": 1, "ep": 4}, fake=True)
    with pytest.raises(fs.ShardingError, match="6 experts cannot be split over the 4 ranks of axis 'ep'"):
        fs.shard(experts_apply, mesh).lower(S(6, 6, 6, spec=P(None, "ep")), S(8, 6, spec=P(("efsdp", "ep"))))


ROUTING = [
    (lambda: fs.moe.route(torch.zeros(4, 9, dtype=torch.int64), 8), "k = 9"),
    (lambda: fs.moe.route(torch.full((4, 2), 8), 8), "from 8 to 8, but there are 8 experts"),
    (lambda: fs.moe.route(torch.full((4, 2), -1), 8), r"\[0, 8\)"),
    (lambda: fs.moe.route(torch.zeros(4, 2), 8), "integer ids"),
    (lambda: fs.moe.dispatch(torch.zeros(3, 2), fs.moe.route(torch.zeros(4, 1, dtype=torch.int64), 2)), r"\[4, D\]"),
    (lambda: fs.ragged_dot(torch.zeros(4, 3), torch.zeros(2, 3, 3), torch.tensor([3, 2])), "exceed the rows"),
    (lambda: fs.ragged_dot(torch.zeros(4, 3), torch.zeros(2, 3, 3), torch.tensor([3, -1])), "negative"),
    (lambda: fs.ragged_dot(torch.zeros(4, 3), torch.zeros(2, 4, 3), torch.tensor([3, 1])), "do not fit"),
    (lambda: fs.ragged_dot(torch.zeros(4, 3), torch.zeros(2, 3, 3), torch.tensor([3.0, 1.0])), "integers"),
]


@pytest.mark.parametrize("case", range(len(ROUTING)))
def test_routing_arguments(case):
    call, words = ROUTING[case]
    with pytest.raises(fs.ShardingError, match=words):
        call()


ARGUMENTS = [
    (
        lambda m: fs.shard(lambda w, x: x @ w, m).lower(W, S(6, 6, spec=ROWS)),
        "x has size 6.*not divisible by 4.*4 or 8",
    ),
    (lambda m: fs.shard(lambda w, x: x @ w, m).lower(W, S(8, 6, spec=P("epp"))), '"epp".*did you mean "ep"'),
    (lambda m: fs.shard(lambda w, x: x @ w, m).lower(W, S(8, 6, spec=P(None, None, "ep"))), "x has 3 entries.*2 dims"),
    (lambda m: fs.shard(lambda w, x, s: x, m).lower(W, X, "relu"), "s is a str.*static_argnums"),
    (lambda m: fs.shard(lambda w, x, s: x, m).lower(W, X, s=object()), "s is a object.*optree"),
    (lambda m: fs.shard(lambda w, x, c: x, m, static_argnums=2).lower(W, X, [1]), "hashable"),
    (lambda m: fs.shard(lambda w, x: {"y": object()}, m).lower(W, X), "returns a object at y"),
    (lambda m: fs.shard(fs.grad(lambda p, x: x.sum()), m).lower({"n": S(4, dtype=torch.int64)}, X), r"\[0\]\.n.*int64"),
    (lambda m: fs.shard(fs.grad(lambda w, x: x @ w), m).lower(W, X), "one floating 0-d value"),
    (lambda m: fs.shard(fs.grad(lambda w, x: x.sum(), argnums=3), m).lower(W, X), "argument 3"),
    (lambda m: fs.shard(lambda w, x: x @ w, m, in_specs=(P("ep"),)).lower(W, X), "one entry for each of the 2"),
    (lambda m: fs.shard(lambda w, x: x, m, backend="xla"), "'eager', 'inductor', 'cudagraph'"),
    (lambda m: fs.shard(lambda w, x: x, m, experts=fs.Experts("ep", "magic")), "magic.*all_to_all"),
    (lambda m: fs.shard(lambda w, x: x, m, experts=fs.Experts("tp")).lower(W, X), "'tp'.*replicate, efsdp, ep"),
    (lambda m: fs.shard(lambda w, x: x, m, experts="gather").lower(W, X), r"mean fs.Experts\('ep', 'gather'\)\?"),
    (lambda m: fs.shard(lambda w, x: x, m, precision="int8"), "bfloat16"),
    (lambda m: fs.shard(lambda w, x: x).lower(W, X), "no mesh"),
    (lambda m: fs.shard(lambda w, x: x, "mesh"), "make_mesh"),
    (lambda m: fs.shard(lambda w, x: x @ w, m).lower(W, X).compile(), "fake"),
    (lambda m: fs.Schedule(prefetch=-1), "number of layers"),
    (lambda m: fs.Schedule(hold="step"), "'layer'"),
    (lambda m: fs.Schedule(in_flight=0), "number of buckets"),
    (lambda m: fs.shard(lambda w, x: x, m, schedule="fast"), "fs.Schedule"),
    (lambda m: fs.remat(torch.sin, policy="dots"), "fs.policies"),
    (lambda m: fs.policies.names(), "one or more names"),
    (lambda m: fs.name(torch.ones(2), 3), "a name"),
    (lambda m: fs.microbatches({"x": torch.zeros(8, 2)}, 3), "x has 8 rows.*3 micro-batches"),
    (lambda m: fs.microbatches(torch.zeros(8), 0), "positive int"),
    (
        lambda m: fs.shard(lambda w, x: torch.func.grad(lambda v: (x @ v).sum())(w), m, precision="bf16").lower(W, X),
        "fs.value_and_grad",
    ),
    (lambda m: fs.value_and_grad(lambda w: w.sum())(fs.device_put(torch.ones(4), m, P("ep"))), "fs.shard"),
]


@pytest.mark.parametrize("case", range(len(ARGUMENTS)))
def test_arguments_and_options(mesh, case):
    call, words = ARGUMENTS[case]
    with pytest.raises(fs.ShardingError, match=f"(?s){words}"):
        call(mesh)


def test_rows_split_in_two_ways(mesh):
    for other in (S(8, 6, spec=P(None, "ep")), S(8, 6, spec=P("ep"))):
        with pytest.raises(fs.ShardingError, match=f"{HERE}.*(Rows never move|agree)"):
            fs.shard(lambda w, x, y: x + y, mesh).lower(W, X, other)


def test_a_closed_over_sharded_tensor(mesh):
    d = fs.device_put(torch.ones(6, 6), mesh, P("efsdp"))
    with pytest.raises(fs.ShardingError, match="closes over a sharded tensor.*pass it as an argument"):
        fs.shard(lambda w, x: x @ d, mesh).lower(W, X)


def test_a_call_without_rows_warns(mesh):
    with pytest.warns(UserWarning, match="every rank computes everything"):
        fs.shard(lambda w, x: x @ w, mesh).lower(W, S(8, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.shard(lambda w: w * 2, mesh).lower(W)  # arithmetic at rest is no such call


def test_the_users_own_error_passes_with_a_note(mesh):
    with pytest.raises(RuntimeError) as info:
        fs.shard(lambda w, x: x @ w[:3], mesh).lower(W, X)
    assert any("test_errors.py" in note for note in info.value.__notes__)


def test_batch_rows_named_in_micro_batches(mesh):
    params, b = init(layers=1), batch()
    with pytest.raises(fs.ShardingError, match=r"x has 8 rows, which 3 micro-batches do not divide"):
        fs.shard(fs.accumulate(summed_loss, 3), mesh).lower(abstract(params, specs(params, "dp2ep")), abstract(b, ROWS))
