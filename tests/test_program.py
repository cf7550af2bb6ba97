"""Programs are data: what a program gathers, sends and computes is read off its graph, without processes."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from programs import E, V, abstract, batch, expert_leaf, init, loss, specs, trainer

import fsharding as fs
from fsharding import P
from fsharding import tree as trees
from fsharding.annotate.spec import normalize
from fsharding.models import qwen3_moe
from fsharding.program import explain

ROWS = P(("replicate", "efsdp", "ep"))


def lowered(shape, fn=None, layout="dp2ep", params=None, rows=None, **options):
    mesh = fs.make_mesh(shape, fake=True)
    params = init() if params is None else params
    b = batch(rows or max(8, mesh.size))
    fn = fs.value_and_grad(loss) if fn is None else fn
    return fs.shard(fn, mesh, **options).lower(abstract(params, specs(params, layout)), abstract(b, ROWS))


def count(low, kind, **have):
    return [c for c in low.collectives() if c.kind == kind and all(getattr(c, k) == v for k, v in have.items())]


def test_no_expert_leaf_is_gathered_over_ep_and_each_leaf_once_a_direction():
    low = lowered({"replicate": 2, "efsdp": 2, "ep": 2})
    gathers = count(low, "all_gather")
    for c in gathers:
        assert c.axes == (("efsdp",) if expert_leaf(c.param) else ("efsdp", "ep")), c
    assert set(Counter((c.param, c.phase) for c in gathers).values()) == {1}
    assert sum(c.phase == "forward" for c in gathers) == sum(x.ndim > 0 for x in trees.flatten_with_paths(init())[1])
    kept = lowered({"replicate": 2, "efsdp": 2, "ep": 2}, schedule=fs.Schedule(regather=False))
    assert set(Counter(c.param for c in count(kept, "all_gather")).values()) == {1}


def test_gradients_leave_with_their_parameters_spec_by_one_reduce_scatter():
    params = init()
    low = lowered({"replicate": 2, "efsdp": 2, "ep": 2}, params=params)
    where = specs(params, "dp2ep")
    mesh = low.local.mesh
    outputs = [o for o, path in zip(low.local.outputs, low.result["paths"], strict=True) if path.startswith("[1]")]
    wanted = trees.broadcast_prefix(where, params, "specs")
    shapes = [tuple(x.shape) for x in trees.flatten_with_paths(params)[1]]
    assert len(outputs) == len(wanted)
    for (kind, dims, shape), spec, full in zip(outputs, wanted, shapes, strict=True):
        normal = normalize(spec, len(full), mesh.axis_names)
        assert (kind, dims, shape) == ("stored", normal, full)
    scatters = count(low, "reduce_scatter")
    assert set(Counter(c.param for c in scatters).values()) == {1}
    for c in scatters:
        assert c.axes == (("efsdp",) if expert_leaf(c.param) else ("efsdp", "ep"))
        assert c.phase == "backward"
    reduced = count(low, "all_reduce", axes=("replicate",))
    assert {c.param for c in scatters} <= {c.param for c in reduced}


def test_no_scaling_factor_but_the_token_weight():
    """Nothing in the program multiplies or divides by a number of ranks."""
    low = lowered({"replicate": 1, "efsdp": 3, "ep": 4}, rows=12, params=init(layers=1))
    sizes = {3, 4, 12, 1 / 3, 1 / 4, 1 / 12}

    def factors(graph):
        products = [n for n in graph.nodes if any(word in str(n.target) for word in ("mul", "div"))]
        return Counter(a for n in products for a in n.args if isinstance(a, int | float) and a in sizes)

    mine, theirs = factors(low.local.graph), factors(low.program.graph.graph)
    assert mine == theirs


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "dp2ep"])
def test_every_rank_does_its_share(layout):
    low = lowered({"replicate": 1, "efsdp": 2, "ep": 2}, layout=layout, experts="auto" if layout == "dp2ep" else None)
    cost = low.cost_analysis()
    assert cost["flops"] * 4 <= 1.05 * cost["global_flops"]
    kinds = {c.kind for c in low.collectives()}
    assert kinds <= {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert all(c.param for c in low.collectives() if c.kind in ("all_gather", "reduce_scatter")), "rows were gathered"


def test_the_examples_step_is_parallel_in_every_layout():
    """The Qwen3-MoE step of the training example: no rank does more than its share, no rows are gathered."""
    cfg = qwen3_moe.Config(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=96, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)
    axes = qwen3_moe.axes(cfg)
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3))

    def step(params, state, b):
        def mean(params):
            total, weight = qwen3_moe.loss(params, b, cfg)
            return total / weight

        value, grads = fs.value_and_grad(mean)(params)
        updates, state = optimizer.update(grads, state, params)
        return fs.optim.apply_updates(params, updates), state, value

    tokens = fs.ShapeDtype((16, 64), torch.int64, ROWS)
    for layout in ("fsdp", "hsdp", "dp2ep", "legacy_ep"):
        params = fs.init(axes, mesh, getattr(fs.layouts, layout)(mesh)(axes))
        experts = "auto" if "ep" in layout else None
        step_on_mesh = fs.shard(step, mesh, donate_argnums=(0, 1), experts=experts)
        low = step_on_mesh.lower(params, optimizer.init(params), {"tokens": tokens, "labels": tokens})
        cost = low.cost_analysis()
        assert cost["flops"] * mesh.size <= 1.05 * cost["global_flops"], layout
        assert all(c.param for c in low.collectives() if c.kind == "all_gather"), layout
        if layout == "dp2ep":
            gathers = [c for c in low.collectives() if c.kind == "all_gather"]
            assert not [c for c in gathers if "w_in" in c.param or "w_out" in c.param if "ep" in c.axes]
            assert len({(c.param, c.phase) for c in gathers}) == len(gathers)


def test_a_routing_costs_one_plan_and_four_exchanges():
    low = lowered({"replicate": 1, "efsdp": 2, "ep": 2}, params=init(layers=3))
    names = Counter(str(n.target) for n in low.local.graph.nodes)
    assert names["fsharding.exchange.default"] == 4 * 3
    assert names["fsharding.exchange_counts.default"] == names["fsharding.host_sizes.default"] == 3
    rows = {n.args[2] for n in low.local.graph.nodes if str(n.target) == "fsharding.exchange.default" and not n.args[4]}
    assert len(rows) == 3  # one number of rows a layer, for all exchanges of it


def test_size_one_axes_cost_nothing():
    low = lowered({"replicate": 1, "efsdp": 1, "ep": 1})
    assert low.collectives() == []
    assert lowered({"replicate": 1, "efsdp": 4, "ep": 1}).cost_analysis()["parallel_efficiency"] == 1.0


def test_the_norm_costs_one_all_reduce_for_each_set_of_axes():
    params = init()
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3))
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)

    def update(params, grads, state):
        updates, state = opt.update(grads, state, params)
        return fs.optim.apply_updates(params, updates), state

    where = specs(params, "dp2ep")
    state = opt.init(params)
    flat = dict(zip(trees.flatten_with_paths(params)[0], trees.broadcast_prefix(where, params, ""), strict=True))
    at = trees.map_with_path(
        lambda path, x: next((s for k, s in flat.items() if path.endswith("." + k) and x.ndim), P()), state
    )
    low = fs.shard(update, mesh, stored_argnums=(0, 1, 2)).lower(
        abstract(params, where), abstract(params, where), abstract(state, at)
    )
    assert Counter(c.kind for c in low.collectives()) == {
        "all_reduce": 1
    }  # ("ep", "efsdp") and ("efsdp", "ep") are one set
    assert all(c.bytes == 4 for c in low.collectives())


def test_updates_run_leaf_by_leaf_and_in_place():
    """Donation: no second copy of parameters and state, each leaf is written as soon as its update is known."""
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3))
    params = {f"w{i}": torch.zeros(64, 64) for i in range(16)}
    state = opt.init(params)
    mesh = fs.make_mesh({"efsdp": 4}, fake=True)

    def step(params, state, x):
        def f(p):
            return sum((x @ w).square().sum() for w in p.values())

        grads = fs.grad(f)(params)
        updates, state = opt.update(grads, state, params)
        return fs.optim.apply_updates(params, updates), state

    at = trees.map_with_path(lambda _, x: P("efsdp") if x.ndim else P(), state)
    args = (abstract(params, P("efsdp")), abstract(state, at), fs.ShapeDtype((8, 64), torch.float32, P("efsdp")))
    donated = fs.shard(step, mesh, donate_argnums=(0, 1)).lower(*args)
    kept = fs.shard(step, mesh, stored_argnums=(0, 1)).lower(*args)
    block, stored = 64 * 64, 3 * 16 * 64 * 64  # bytes: a quarter of each leaf in float32
    assert donated.memory_analysis()["outputs"] == 0
    assert kept.memory_analysis()["outputs"] >= stored
    copies = [n for n in donated.local.graph.nodes if str(n.target) == "aten.copy_.default"]
    assert len(copies) == 2  # the step count and the norm; all else is written by one op
    fused = [n for n in donated.local.graph.nodes if str(n.target) == "fsharding.adamw_.default"]
    assert len(fused) == 1 and len(fused[0].args[0]) == 16 and fused[0].args[5] is not None  # it clips as well
    # After the backward pass a few blocks at a time are alive besides the arguments and the gradients.
    assert explain.peak_after_backward(donated.local) <= stored + 16 * block + 12 * block
    assert explain.peak_after_backward(kept.local) >= 2 * stored


def test_a_program_for_4096_ranks_is_no_larger_than_one_for_8():
    """Nothing is written per rank (``examples/benchmarks/lowering.py`` times it)."""
    small = lowered({"replicate": 1, "efsdp": 4, "ep": 2}, params=init(layers=1), rows=4096)
    twice = lowered({"replicate": 2, "efsdp": 2, "ep": 2}, params=init(layers=1), rows=4096)
    large = lowered({"replicate": 8, "efsdp": 64, "ep": 8}, params=init(layers=1), rows=4096)
    assert large.local.mesh.size == 4096
    # Leaves of 16 rows are uneven over 512 ranks: padding adds a node here and there.
    assert len(large.local.graph.nodes) <= 1.2 * len(twice.local.graph.nodes)
    assert len(large.as_text()) < 1.3 * len(twice.as_text()) and len(small.as_text()) < len(twice.as_text())
    assert large.cost_analysis()["parallel_efficiency"] > 0.99


def test_text_is_for_people_and_hides_no_collective():
    low = lowered({"replicate": 1, "efsdp": 2, "ep": 2})
    text = low.as_text()
    marks = [line.partition("<== ")[2].partition("  #")[0] for line in text.splitlines() if "<==" in line]
    assert sum(max(1, mark.count("params")) for mark in marks) == len(low.collectives())
    assert "all_gather over (efsdp, ep) for params.embed" in text
    assert "all_gather over (efsdp, ep) for params.layers[0].norm, params.layers[0].qkv" in text  # in one call
    assert "forward:" in text and "backward:" in text
    assert "programs.py:" in text
    assert f"f32[{V}, 16]" in low.global_text()
    assert low.fingerprint() == lowered({"replicate": 1, "efsdp": 2, "ep": 2}).fingerprint()
    assert low.fingerprint() != lowered({"replicate": 1, "efsdp": 4, "ep": 1}).fingerprint()


def test_phases_and_sources_of_collectives():
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.sgd(0.1))
    params = init(layers=1)
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)
    low = fs.shard(trainer(opt), mesh, donate_argnums=(0, 1)).lower(
        abstract(params, specs(params, "dp2ep")), opt.init(params), abstract(batch(), ROWS)
    )
    phases = Counter((c.kind, c.phase) for c in low.collectives())
    assert phases["all_gather", "forward"] and phases["reduce_scatter", "backward"] and phases["all_reduce", "update"]
    assert all(c.source and "programs.py" in c.source for c in low.collectives() if c.phase == "forward")


def test_precision_casts_before_the_gather_and_sums_in_float32():
    low = lowered(
        {"replicate": 1, "efsdp": 2, "ep": 2}, precision=fs.Precision("bf16", keep={"layers*.router": "float32"})
    )
    gathers = {c.param: c.dtype for c in count(low, "all_gather")}
    assert gathers.pop("params.layers[0].router") == gathers.pop("params.layers[1].router") == torch.float32
    assert set(gathers.values()) == {torch.bfloat16}
    assert {c.dtype for c in count(low, "reduce_scatter")} == {torch.float32}
    low = lowered({"replicate": 1, "efsdp": 2, "ep": 2}, precision=fs.Precision("bf16", reduce="bf16"))
    assert {c.dtype for c in count(low, "reduce_scatter")} == {torch.bfloat16}
    outputs = [n.meta["val"].dtype for n in low.local.nodes]
    assert set(outputs[1:]) == {torch.float32}  # gradients in each leaf's own dtype


def test_constants_and_random_numbers_are_made_at_local_size():
    def f(p, x, key):
        x = fs.random.dropout(key, x @ p, 0.5)
        x = torch.where(x > 0, x, torch.full_like(x, 0.1)) * torch.ones(4096, 8)
        return F.one_hot((x[:, :1] > 0).long().squeeze(1), 8).float().sum()

    mesh = fs.make_mesh({"efsdp": 64}, fake=True)
    low = fs.shard(fs.grad(f), mesh).lower(
        fs.ShapeDtype((8, 8), torch.float32, P("efsdp")),
        fs.ShapeDtype((4096, 8), torch.float32, P("efsdp")),
        fs.ShapeDtype((), torch.int64),
    )
    largest = max(n.meta["val"].numel() for n in low.local.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    assert largest <= 4096 // 64 * 8 * 8


def test_experts_none_gathers_experts_as_any_weight():
    low = lowered({"replicate": 1, "efsdp": 2, "ep": 2}, layout="dp2ep", experts=None)
    assert {c.kind for c in low.collectives()} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(c.axes == ("efsdp", "ep") for c in count(low, "all_gather"))
    assert E % 2 == 0
