"""The dispatchers pass one suite; what is special to ``gather``: no look of the host, one crossing a token and rank."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import run_ranks
from programs import TOLERANCE, D, E, K, batch, factorisations, init, loss, simulate, specs, summed_loss, trainer, worst
from test_layout_invariance import _state_specs, mesh_id
from test_moe_mlp import ROWS, TOKENS, composed, data, fused, objective, penalty, placed, routed

import fsharding as fs
from fsharding import P
from fsharding import tree as trees
from fsharding.comm import groups
from fsharding.moe import exchange, expert_ops, gather
from fsharding.moe.all_to_all import DISPATCHERS
from fsharding.program import capture
from fsharding.program.cost import node_flops
from fsharding.program.source import phase_of

GATHER = fs.Experts("ep", "gather")
C = torch.ops._c10d_functional
MESHES = [m for n in (2, 4, 8) for m in factorisations(n) if m["ep"] > 1]
SAMPLE = [dict(zip(("replicate", "efsdp", "ep"), n, strict=True)) for n in ((1, 1, 2), (2, 2, 2), (1, 1, 8))]
HOT = torch.zeros(E)
HOT[:K] = 100.0


def sharded(fn, shape=None, dispatcher="gather", **kwargs):
    mesh = fs.make_mesh(shape or {"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)
    return fs.shard(fn, mesh, experts=fs.Experts("ep", dispatcher), **kwargs)


def meshes():
    return [pytest.param(m, id=mesh_id(m), marks=[] if m in SAMPLE else [pytest.mark.slow])
            for m in MESHES]  # fmt: skip


# ---- one device is right ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("shape", meshes())
def test_a_language_model(shape, dispatcher):
    """Dispatch, ragged products, per-expert biases, combine, a balancing loss over the counts; nothing falls back."""
    params, b = init(), batch()
    fn = fs.value_and_grad(loss)
    want = fn(params, b)
    for layout in ("dp2ep", "legacy_ep"):
        got, _ = simulate(sharded(fn, shape, dispatcher, strict=True), (params, b), (specs(params, layout), ROWS))
        assert worst(got, want) <= TOLERANCE, layout


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("bias", [0.0, HOT], ids=["free", "one-hot"])
def test_the_fused_layer(bias, dispatcher):
    """Under one-hot routing most ranks serve no token and one serves all."""
    args = data()
    want = objective(composed, bias=bias)(*args)
    for shape in MESHES:
        got, _ = simulate(sharded(objective(fused, bias=bias), shape, dispatcher), args, (placed("dp2ep"), ROWS))
        assert worst(got, want) <= TOLERANCE, shape


def test_exact_in_float64_and_uneven():
    for where in (P("ep", "efsdp"), P(("ep", "efsdp")), P("ep", None, "efsdp")):
        args = data(torch.float64, d=15, h=7)
        spec = {"router": P(), "w_in": where, "w_out": where}
        got, _ = simulate(sharded(objective(fused)), args, (spec, ROWS))
        assert worst(got, objective(composed)(*args)) <= 1e-9


@pytest.mark.parametrize("rows", [P(), P("efsdp"), P(("efsdp", "ep")), P(("ep", "efsdp"))], ids=str)
@pytest.mark.parametrize("layer", [fused, composed])
def test_tokens_wherever_they_are(rows, layer):
    args = data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # P(): every rank computes everything
        got, _ = simulate(sharded(objective(layer)), args, (placed("dp2ep"), rows))
    assert worst(got, objective(composed)(*args)) <= TOLERANCE


@pytest.mark.parametrize("tokens, rows", [(0, ROWS), (4, ROWS), (4, P("efsdp")), (2, P())], ids=str)
@pytest.mark.parametrize("layer", [fused, composed])
def test_few_tokens(tokens, rows, layer):
    """None, and one a rank."""
    args = data(tokens=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, _ = simulate(sharded(objective(layer)), args, (placed("dp2ep"), rows))
    assert worst(got, objective(composed)(*args)) <= TOLERANCE


def test_rows_of_no_expert_never_count():
    """What a row-wise op makes of the zeros of rows that chose another rank's experts: infinities here, also in its
    derivative, and in the sums for per-expert values."""

    def layer(p, x):
        w, r = routed(p, x)
        h = fs.ragged_dot(fs.moe.dispatch(x, r), p["w_in"], r.group_sizes)
        h = h.abs().log() + fs.moe.expand(p["w_in"].sum(1), r)
        gate, up = h.chunk(2, -1)
        return fs.moe.combine(fs.ragged_dot(F.silu(gate) * up, p["w_out"], r.group_sizes), w, r)

    args = data(torch.float64)
    want = objective(layer)(*args)
    assert all(x.isfinite().all() for x in trees.flatten(list(want))[0])
    for shape in SAMPLE:
        got, _ = simulate(sharded(objective(layer), shape), args, (placed("dp2ep"), ROWS))
        assert worst(got, want) <= 1e-9


def test_second_derivatives_recomputation_and_micro_batches():
    args = data(torch.float64)

    where = placed("dp2ep"), ROWS
    assert worst(simulate(sharded(penalty(fused)), args, where)[0], penalty(composed)(*args)) <= 1e-9
    remat = sharded(objective(fs.remat(fused)))
    assert worst(simulate(remat, args, where)[0], objective(composed)(*args)) <= 1e-9
    params, b = init(), batch(rows=16)
    for plan in (fs.Schedule(), fs.Schedule(hold="layer"), fs.Schedule(prefetch=0, pack_mib=0)):
        fn = sharded(fs.accumulate(summed_loss, 2), schedule=plan)
        got, _ = simulate(fn, (params, b), (specs(params, "dp2ep"), ROWS))
        assert worst(got, fs.accumulate(summed_loss, 1)(params, b)) <= TOLERANCE


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_trajectories(name):
    rule = fs.optim.sgd(0.1, momentum=0.9) if name == "sgd" else fs.optim.adamw(1e-2, eps=1e-4)
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), rule)
    params = trees.map_with_path(lambda _, x: x.double(), init(layers=1))
    step, state, b, low = trainer(optimizer), optimizer.init(params), batch(), None
    where = (specs(params, "dp2ep"), _state_specs(state, params, specs(params, "dp2ep")), ROWS)
    ours = theirs = (params, state)
    fn = sharded(step, stored_argnums=(0, 1))
    for _ in range(5):
        (*ours, got), low = simulate(fn, (*ours, b), where, low)
        *theirs, want = step(*theirs, b)
        assert worst([ours, got], [theirs, want]) <= 1e-9


def ranks(rank, world):
    mesh, (p, x) = fs.make_mesh({"replicate": 1, "efsdp": 1, "ep": world}), data()
    args = fs.device_put(p, mesh, placed("dp2ep")), fs.device_put(x, mesh, ROWS)
    got = {}
    for name, layer in (("fused", fused), ("composed", composed)):
        got[name] = fs.device_get(fs.shard(objective(layer), mesh, experts=GATHER)(*args))
    args = trees.map_with_path(lambda _, v: v.requires_grad_(), list(args))
    fs.shard(lambda p, x: fused(p, x).sin().sum(), mesh, experts=GATHER)(*args).backward()
    got["outside"] = fs.device_get([{k: v.grad for k, v in args[0].items()}, args[1].grad])
    return got


def test_on_real_ranks():
    want = objective(composed)(*data())
    for got in run_ranks(2, ranks):
        assert worst(got.pop("outside"), [want[1][0], want[1][1]]) <= TOLERANCE
        assert all(worst(found, want) <= TOLERANCE for found in got.values())


# ---- what travels ----------------------------------------------------------------------------------------------------
def lowered(fn, **kwargs):
    args = data()
    return simulate(sharded(fn, **kwargs), args, (placed("dp2ep"), ROWS))[1]


def test_the_host_looks_at_nothing():
    """Neither sizes nor rows depend on the data: the program can be captured, where that of `all_to_all` cannot."""
    device, names = torch.device("cuda"), {}
    for dispatcher in DISPATCHERS:
        low = lowered(objective(fused), dispatcher=dispatcher)
        names[dispatcher] = {n.target for n in low.local.graph.nodes}
        if dispatcher == "gather":
            capture.refuse_host_sync(low.local.graph, device)
        else:
            with pytest.raises(fs.ShardingError, match="gather"):
                capture.refuse_host_sync(low.local.graph, device)
    assert exchange.host_sizes in names["all_to_all"] and not {exchange.host_sizes, exchange.exchange} & names["gather"]


def test_a_token_crosses_once():
    """Forward: ids, tokens and weights come, sums go; backward: the gradient comes, those of tokens and weights go. The
    tokens that came are kept, and no expert is gathered over ep."""
    low = lowered(objective(fused))
    notes = [(n, n.meta["custom"]) for n in low.local.graph.nodes if "collective" in n.meta.get("custom", {})]
    operands = [(n.args[0].meta["val"], note) for n, note in notes if not note.get("param") and note["axes"] == ("ep",)]
    seen = [(note["phase"], note["collective"], tuple(x.shape)) for x, note in operands if x.is_floating_point()]
    per_rank = TOKENS // 4
    assert sorted(seen) == sorted([
        ("forward", "all_gather", (per_rank, D)), ("forward", "all_gather", (per_rank, K)),
        ("forward", "reduce_scatter", (2 * per_rank, D)),
        ("backward", "all_gather", (per_rank, D)),
        ("backward", "reduce_scatter", (2 * per_rank, D)), ("backward", "reduce_scatter", (2 * per_rank, K)),
    ])  # fmt: skip
    assert not [c for c in low.collectives() if c.param and "w_" in c.param and "ep" in c.axes]


def test_tokens_start_to_travel_before_they_are_routed():
    """And are waited for where the experts read them. A collective of leaves starts beside a product: never between the
    two where no product is."""
    params, b = init(), batch()
    low = simulate(sharded(fs.value_and_grad(loss)), (params, b), (specs(params, "dp2ep"), ROWS))[1]
    nodes = list(low.local.graph.nodes)
    at = {n: i for i, n in enumerate(nodes)}
    moved = [n for n in nodes if n.meta.get("custom", {}).get("tokens") and "collective" in n.meta["custom"]]
    assert moved and all("#tokens" in a for n in moved for a in n.args if isinstance(a, str) and a.startswith("fs"))
    tokens = [n for n in moved if n.target is C.all_gather_into_tensor.default and n.meta["val"].shape[1] == D
              and phase_of(n) == "forward"]  # fmt: skip
    sorts = [n for n in nodes if n.target is gather.route_mine]
    for start, sort in zip(tokens, sorts, strict=True):
        (wait,) = start.users
        assert at[start] < at[sort] < at[wait] and at[wait] < min(at[u] for u in wait.users)
    for start in moved:
        (wait,) = start.users
        between = [n for n in nodes[at[start] + 1 : at[wait]] if n.op == "call_function"]
        leaves = [n for n in between if n.meta["custom"].get("param") and "collective" in n.meta["custom"]]
        assert not leaves or any(map(node_flops, between))


def test_work_is_counted_once():
    """There is room for the rows of all ranks; the products work on this rank's."""
    pairs = [(layer, name) for layer in (fused, composed) for name in DISPATCHERS]
    counted = [lowered(objective(layer), dispatcher=name).cost_analysis() for layer, name in pairs]
    assert len({c["flops"] for c in counted}) == 1 and counted[0]["parallel_efficiency"] == pytest.approx(1.0)
    low = lowered(objective(fused))
    (node,) = (n for n in low.local.graph.nodes if n.target is expert_ops.mlp_raw)
    assert node.meta["val"][1].shape[0] == 2 * (TOKENS // 4) * K
    assert low.memory_analysis()["workspace"] > 0


def test_mistakes():
    def wrong(p, x):
        ids = torch.full((x.shape[0], K), E) + (x[:, :K] > 1e9)
        return fs.moe.mlp(x, p["w_in"], p["w_out"], fs.moe.route(ids, E), x[:, :K])

    with pytest.raises(fs.ShardingError, match=rf"ids from {E} to {E}, but there are {E} experts"):
        lowered(wrong)
    with pytest.raises(fs.ShardingError, match="unknown dispatcher 'agrs': one of .*all_to_all.*gather"):
        fs.shard(loss, experts=fs.Experts("ep", "agrs"))
    with pytest.raises(fs.ShardingError, match="8 experts cannot be split over the 3 ranks"):
        args = data(tokens=18), (placed("dp2ep"), ROWS)
        simulate(sharded(objective(fused), {"replicate": 1, "efsdp": 1, "ep": 3}), *args)


def test_the_raw_ops():
    """Own slots by expert, the others behind; rows past the groups are zero whatever they hold."""
    ids, rows = torch.tensor([[0, 5], [6, 1], [4, 4]]), torch.full((6, 2), torch.nan)
    with groups.as_rank(1):
        perm, inverse, sizes = gather.route_mine(ids, 4, "fs[ep=2]/ep")
    assert sizes.tolist() == [2, 1, 1, 0] and perm[:4].tolist() == [4, 5, 1, 2]
    assert inverse[perm].tolist() == list(range(6))
    rows[:4] = 1.0
    assert torch.equal(gather.valid_rows(rows, sizes), torch.tensor([1.0] * 4 + [0.0] * 2)[:, None].expand(6, 2))
    assert gather.choices(ids, 8).tolist() == [1, 1, 0, 0, 2, 1, 1, 0]
