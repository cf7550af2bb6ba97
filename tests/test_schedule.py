"""When a program communicates, as facts about its graph; and that no schedule changes a number."""

from collections import Counter

import pytest
import torch
from programs import TOLERANCE, abstract, batch, expert_leaf, init, loss, simulate, specs, worst
from test_remat import model

import fsharding as fs
from fsharding import P
from fsharding.program.chains import Chains
from fsharding.program.source import phase_of

C = torch.ops._c10d_functional
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.fsharding.ragged_dot.default, torch.ops.fsharding.ragged_dw.default}
SHAPE = {"replicate": 2, "efsdp": 2, "ep": 2}
LAYOUTS = ("fsdp", "hsdp", "dp2ep", "legacy_ep")
SINGLE = fs.Schedule(pack_mib=0)  # one collective a leaf: simple to find


def lowered(fn, layout="dp2ep", layers=3, shape=SHAPE, between=(), **options):
    """``fn(params, *between, batch)``, lowered."""
    mesh, params = fs.make_mesh(shape, fake=True), init(layers=layers)
    options.setdefault("experts", "auto" if layout in ("dp2ep", "legacy_ep") else None)
    where = abstract(params, specs(params, layout))
    return fs.shard(fn, mesh, **options).lower(where, *between, abstract(batch(16), P(("replicate", "efsdp", "ep"))))


def nodes_of(low):
    return list(low.local.graph.nodes)


def started(low, kind):
    """(position, param, phase) of each collective of this kind that serves a leaf."""
    found = []
    for i, n in enumerate(nodes_of(low)):
        note = n.meta.get("custom", {})
        if note.get("collective") == kind and (note.get("param") or note.get("members")):
            names = [m["param"] for m in note.get("members", ())] or [note["param"]]
            found += [(i, name, phase_of(n)) for name in names]
    return found


def layer(name):
    return name[: name.index("]") + 1] if "]" in name else None


# ---- gathers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", [fs.Schedule(), SINGLE, fs.Schedule(prefetch=0)], ids=str)
def test_each_leaf_is_gathered_once_a_direction_at_most(layout, plan):
    low = lowered(fs.value_and_grad(loss), layout, schedule=plan)
    count = Counter((c.param, c.phase) for c in low.collectives() if c.kind == "all_gather")
    assert count and set(count.values()) == {1}
    assert all(param and phase in ("forward", "backward") for param, phase in count)
    forward = {param for param, phase in count if phase == "forward"}
    assert {param for param, phase in count if phase == "backward"} <= forward
    if layout == "dp2ep":
        assert not [c for c in low.collectives() if c.kind == "all_gather" and expert_leaf(c.param) and "ep" in c.axes]


@pytest.mark.parametrize("plan", [fs.Schedule(), SINGLE], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_layers_gather_is_issued_before_this_layers_first_product(layout, plan):
    low = lowered(fs.value_and_grad(loss), layout, schedule=plan)
    nodes = nodes_of(low)
    issued, used = {}, {}
    for i, name, phase in started(low, "all_gather"):
        issued[phase, layer(name)] = max(issued.get((phase, layer(name)), 0), i)  # all of the layer's buckets
    for i, n in enumerate(nodes):
        if n.target in PRODUCTS:
            for name in leaves_read(n):
                used.setdefault((phase_of(n), layer(name)), i)
    order = [f"params.layers[{i}]" for i in range(3)]
    for phase, layers in (("forward", order), ("backward", order[::-1])):
        for this, following in zip(layers, layers[1:], strict=False):
            assert issued[phase, following] < used[phase, this], (phase, following)
            assert issued[phase, following] > issued[phase, this]
    early = issued["forward", order[2]]
    assert early > used["forward", order[0]], "no further ahead than one layer"


def leaves_read(node):
    """The parameters whose gathered or local form a node reads."""
    found, stack = set(), list(node.all_input_nodes)
    moving = ("all_gather", "wait_tensor", "reshape", "permute", "unpad", "item", "slice", "transpose", "t.default")
    while stack:
        n = stack.pop()
        if n.op == "placeholder":
            found.add(n.name.replace("params_layers_", "params.layers["))
        elif any(word in str(n.target) for word in moving) or "getitem" in str(n.target):
            stack += n.all_input_nodes
    return {name.split("__")[0].rstrip("_") + "]" for name in found if name.startswith("params.layers[")}


def test_no_gathered_weight_outlives_its_last_use_in_a_direction():
    low = lowered(fs.value_and_grad(loss), "dp2ep", schedule=SINGLE)
    chains, both = Chains(low.local), set()
    for node in chains.gathers():
        phases = {phase_of(u) for u in chains.users(node)}
        if len(phases) > 1:
            both.add(node.meta["custom"]["param"])
    assert both == {"params.head"}  # what the forward pass uses last
    kept = lowered(fs.value_and_grad(loss), "dp2ep", schedule=fs.Schedule(pack_mib=0, regather=False))
    assert kept.memory_analysis()["gathered"] > low.memory_analysis()["gathered"]


def test_waits_stand_right_before_the_first_use():
    low = lowered(fs.value_and_grad(loss), "dp2ep", schedule=SINGLE)
    nodes, chains = nodes_of(low), Chains(low.local)
    for node in chains.gathers():
        (wait,) = node.users
        used = min(chains.position[u] for u in chains.users(node))
        between = [n for n in nodes[chains.position[wait] : used] if n.target in PRODUCTS]
        assert not between, node


# ---- reductions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reductions_start_when_the_gradient_is_there_and_nothing_waits_in_between(layout):
    low = lowered(fs.value_and_grad(loss), layout, schedule=fs.Schedule(pack_mib=0, in_flight=None))
    nodes = nodes_of(low)
    position = {n: i for i, n in enumerate(nodes)}
    last_product = max(i for i, n in enumerate(nodes) if n.target in PRODUCTS)
    scatters = started(low, "reduce_scatter")
    assert scatters
    for i, name, _ in scatters:
        if layer(name) == "params.layers[2]":  # the first that the backward pass meets
            assert i < last_product
        (wait,) = nodes[i].users
        if layout == "fsdp":  # elsewhere a second reduction follows
            assert position[wait] > last_product, name
    firsts = [min(i for i, name, _ in scatters if layer(name) == f"params.layers[{k}]") for k in (2, 1, 0)]
    assert firsts == sorted(firsts)
    assert any(n.target in PRODUCTS for n in nodes[firsts[0] : firsts[1]])


def test_at_most_so_many_reductions_are_in_flight():
    low = lowered(fs.value_and_grad(loss), "fsdp", layers=6, schedule=fs.Schedule(in_flight=2))
    nodes = nodes_of(low)
    running, most = set(), 0
    for n in nodes:
        note = n.meta.get("custom", {})
        if note.get("collective") == "reduce_scatter":
            running.add(n)
            most = max(most, len({layer_of_note(x) for x in running}))
        if n.target is C.wait_tensor.default:
            source = n.args[0].args[0] if "getitem" in str(n.args[0].target) else n.args[0]
            running.discard(source)
    assert most <= 3  # two and the one that just started
    free = lowered(fs.value_and_grad(loss), "fsdp", layers=6, schedule=fs.Schedule(in_flight=None))
    assert free.memory_analysis()["peak"] >= low.memory_analysis()["peak"]


OPTIMIZERS = {
    "clipped adamw": lambda: fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3)),
    "sgd": lambda: fs.optim.sgd(0.1),
}


@pytest.mark.parametrize("precision", [None, "bfloat16"], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_a_whole_step_reductions_run_beside_the_backward_pass(layout, optimizer, precision):
    """Also where gradients are cast, and where a norm or an update reads them: nothing pulls a wait up to its start."""
    opt = OPTIMIZERS[optimizer]()

    def step(p, state, b):
        value, grads = fs.value_and_grad(loss)(p, b)
        updates, state = opt.update(grads, state, p)
        return fs.optim.apply_updates(p, updates), state, value

    low = lowered(step, layout, layers=6, between=(opt.init(init(layers=6)),), precision=precision)
    nodes = nodes_of(low)
    position = {n: i for i, n in enumerate(nodes)}
    products = [i for i, n in enumerate(nodes) if n.target in PRODUCTS and phase_of(n) == "backward"]
    starts = [n for n in nodes if n.meta.get("custom", {}).get("collective") == "reduce_scatter"]
    assert starts
    hidden = 0
    for n in starts:
        waits = [w for u in n.users for w in (u, *u.users) if w.target is C.wait_tensor.default]
        after = [i for i in products if i > position[n]]
        if len(after) > 20:  # two layers' products and more are still to come
            least = 4 if layout == "fsdp" else 1  # elsewhere a second reduction starts where the next bucket does
            assert sum(i < position[waits[0]] for i in after) >= least, n.name
            hidden += 1
    assert hidden
    pending = [n for n in nodes if n.meta.get("custom", {}).get("collective") == "all_reduce"]
    assert not [n for n in pending if phase_of(n) == "backward" and n.meta["custom"].get("param") is None
                and n.meta["val"].ndim == 1 and n.meta["val"].dtype.is_floating_point]  # a norm's gradient  # fmt: skip


def layer_of_note(node):
    note = node.meta["custom"]
    return layer([m["param"] for m in note.get("members", ())][0] if note.get("members") else note["param"])


def test_the_second_reduction_of_hsdp_runs_beside_compute():
    low = lowered(fs.value_and_grad(loss), "hsdp", schedule=SINGLE)
    nodes = nodes_of(low)
    for i, name, _ in started(low, "all_reduce"):
        if layer(name) != "params.layers[2]":
            continue
        scatter = next(j for j, other, _ in started(low, "reduce_scatter") if other == name)
        assert any(n.target in PRODUCTS for n in nodes[scatter:i]), name


# ---- buckets ---------------------------------------------------------------------------------------------------------
def test_a_layers_leaves_travel_in_one_call_a_group():
    low = lowered(fs.value_and_grad(loss), "dp2ep")
    calls = [n for n in nodes_of(low) if n.meta.get("custom", {}).get("collective") == "all_gather"]
    forward = [n for n in calls if phase_of(n) == "forward"]
    layers = Counter((layer_of_note(n), n.meta["custom"]["axes"]) for n in forward)
    for i in range(3):  # dense leaves over (efsdp, ep), experts over efsdp
        assert layers[f"params.layers[{i}]", ("efsdp", "ep")] == 1
        assert layers[f"params.layers[{i}]", ("efsdp",)] == 1
    large = lowered(fs.value_and_grad(loss), "dp2ep", schedule=fs.Schedule(pack_mib=1e-4))
    names = Counter(str(n.target) for n in nodes_of(large))
    assert names["_c10d_functional.all_gather_into_tensor_coalesced.default"] >= 3  # without copies


def test_gathers_and_reductions_have_groups_of_their_own():
    low = lowered(fs.value_and_grad(loss), "dp2ep")
    groups = {}
    for n in nodes_of(low):
        note = n.meta.get("custom", {})
        if "collective" in note:
            alias = next(a for a in n.args if isinstance(a, str) and a.startswith("fs"))
            groups.setdefault(note["collective"], set()).add(alias.partition("#")[2])
    assert groups["all_gather"] == {"gather"} and groups["reduce_scatter"] == {"reduce"}
    assert groups["all_to_all"] == {""}


# ---- numbers ---------------------------------------------------------------------------------------------------------
PLANS = [
    fs.Schedule(prefetch=0, regather=False, pack_mib=0),
    fs.Schedule(prefetch=3, pack_mib=1e-3),
    fs.Schedule(prefetch=1, in_flight=None),
    fs.Schedule(prefetch=2, in_flight=1, hold="layer"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_schedule_changes_the_numbers(layout):
    params, b = init(), batch(16)
    mesh = fs.make_mesh(SHAPE, fake=True)
    args, where = (params, b), (specs(params, layout), P(("replicate", "efsdp", "ep")))
    experts = "auto" if layout in ("dp2ep", "legacy_ep") else None
    fn = fs.value_and_grad(model(fs.policies.nothing))
    results = [simulate(fs.shard(fn, mesh, schedule=plan, experts=experts), args, where)[0] for plan in PLANS]
    assert worst(results[0], fn(params, b)) <= TOLERANCE
    for got, plan in zip(results[1:], PLANS[1:], strict=True):
        assert worst(got, results[0]) <= 1e-6, plan  # a sum over ranks may add in another order in a packed buffer


# ---- micro-batches ---------------------------------------------------------------------------------------------------
def summed(p, b):
    return model(fs.policies.nothing)(p, b) * (b["y"] != -100).sum().float()


def test_layer_major_micro_batches_cost_two_gathers_a_leaf():
    fn = fs.accumulate(lambda p, b: (summed(p, b), (b["y"] != -100).sum()), 4)
    params, b = init(layers=3), batch(32)
    shape = {"replicate": 1, "efsdp": 2, "ep": 2}
    mesh = fs.make_mesh(shape, fake=True)
    args, where = (params, b), (specs(params, "dp2ep"), P(("replicate", "efsdp", "ep")))
    counts, peaks, results = {}, {}, {}
    for hold in (None, "layer"):
        got, low = simulate(fs.shard(fn, mesh, schedule=fs.Schedule(hold=hold)), args, where)
        results[hold] = got
        assert worst(got, fn(params, b)) <= TOLERANCE
        gathers = Counter(c.param for c in low.collectives() if c.kind == "all_gather")
        scatters = Counter(c.param for c in low.collectives() if c.kind == "reduce_scatter")
        counts[hold], peaks[hold] = (gathers, scatters), low.memory_analysis()["peak"]
        text = low.as_text()
        assert sum(line.count(" p.") for line in text.splitlines() if "<== all_gather" in line) == gathers.total()
    experts = [name for name in counts["layer"][0] if expert_leaf(name)]
    assert experts and all(counts["layer"][0][name] <= 2 for name in counts["layer"][0])
    assert all(counts["layer"][1][name] == 1 for name in experts), "four gradients are added before they travel"
    assert all(counts[None][1][name] == 4 for name in experts)
