"""The joint program of a function and its pull-back: its two halves, what is saved between them, and their numbers."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from programs import TOLERANCE, D, V, abstract, batch, init, logits, loss, relative, specs
from test_remat import model

import fsharding as fs
from fsharding import P
from fsharding import tree as trees
from fsharding.program import lockstep
from fsharding.program.chains import Chains
from fsharding.program.explain import collectives, num_bytes
from fsharding.program.partition import LocalProgram
from fsharding.program.source import phase_of

SHAPE = {"replicate": 2, "efsdp": 2, "ep": 2}
LAYOUTS = ("fsdp", "hsdp", "dp2ep", "legacy_ep")
ROWS = P(("replicate", "efsdp", "ep"))


def lowered(fn, layout="dp2ep", shape=SHAPE, moe=True, only=lambda path: True, **options):
    """The joint program with respect to the parameters, for a mesh without processes."""
    options.setdefault("experts", "auto" if layout in ("dp2ep", "legacy_ep") else None)
    params = init(moe=moe)
    sharded = fs.shard(fn, fs.make_mesh(shape, fake=True), **options)
    call = sharded._bind((abstract(params, specs(params, layout)), abstract(batch(16), ROWS)), {})
    leaves = tuple(i for i, (n, p) in enumerate(zip(call.argnums, call.paths, strict=True)) if n == 0 and only(p))
    return sharded._lower_joint(call, leaves)


def blocks_of(low, leaves, cotangents):
    """Per rank, its blocks of the arguments and of the cotangents; padding is NaN."""
    local, given = low.local, [*leaves, *low.program.constants]
    count = len(local.inputs) - len(cotangents)
    mine = lambda xs, specs, rank: [lockstep.cut(x, s, local.mesh, rank) for x, s in zip(xs, specs, strict=True)]
    ranks = range(local.mesh.size)
    return [mine(given, local.inputs[:count], r) for r in ranks], [
        mine(cotangents, local.inputs[count:], r) for r in ranks
    ]


def in_halves(low, blocks, cotangents):
    """Per rank results and gradients: all ranks forward, then all backward."""
    halves, mesh, count = low.halves, low.local.mesh, len(low.reach)
    front = lockstep.run(halves.forward, mesh, blocks)
    given = [
        [*(own[i] for i in halves.inputs), *out[count:], *g]
        for own, out, g in zip(blocks, front, cotangents, strict=True)
    ]
    back = lockstep.run(halves.backward, mesh, given)
    return [[*out[:count], *grads] for out, grads in zip(front, back, strict=True)]


def leaves_of(*args):
    return trees.flatten(list(args))[0]


def cotangents_of(results, reach, seed=3):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=g) for x, on in zip(results, reach, strict=True) if on]


def one_device(fn, params, b, seed=3):
    """Results, and the gradients of the parameters under the same random cotangents, by PyTorch's own autograd."""
    own = trees.map_with_path(lambda _, x: x.clone().requires_grad_(), params)
    results = [x for x in leaves_of(fn(own, b)) if isinstance(x, torch.Tensor)]
    live = [x for x in results if x.requires_grad]
    torch.autograd.backward(live, cotangents_of(results, [x.requires_grad for x in results], seed))
    return [x.detach() for x in results], [x.grad for x in leaves_of(own)]


def several(p, b):
    """Results of all kinds: a value, rows, a value at rest, integers, and one that no parameter reaches."""
    z, balance = logits(p, b["x"])
    return {
        "loss": F.cross_entropy(z.reshape(-1, V), b["y"].reshape(-1)) + 0.01 * balance,
        "rows": z.square().mean(-1),
        "decayed": p["head"] * 0.5,
        "free": b["x"].float().mean(),
        "count": (b["y"] != -100).sum(),
        "name": "several",
    }


# ---- the split -------------------------------------------------------------------------------------------------------
def penalised(p, b):
    """With a gradient inside, which belongs to the forward half."""
    g = fs.grad(lambda w: F.rms_norm(F.embedding(b["x"], w), (D,)).sin().mean())(p["embed"])
    return loss(p, b) + 100 * g.square().sum()


FUNCTIONS = {
    "loss": loss,
    "penalised": penalised,
    "several": several,
    "remat": model(fs.policies.nothing),
    "offload": model(fs.policies.offload("router")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("plan", [fs.Schedule(), fs.Schedule(regather=False, pack_mib=0)], ids=("regather", "kept"))
def test_the_halves_give_what_the_joint_program_gives(name, plan):
    low, params, b = lowered(FUNCTIONS[name], schedule=plan), init(), batch(16)
    want, gradients = one_device(FUNCTIONS[name], params, b)
    blocks, cotangents = blocks_of(low, leaves_of(params, b), cotangents_of(want, low.reach))
    got = in_halves(low, blocks, cotangents)
    joint = lockstep.run(low.local.graph, low.local.mesh, [x + g for x, g in zip(blocks, cotangents, strict=True)])
    for mine, whole in zip(got, joint, strict=True):
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(mine, whole, strict=True))
    for x, y in zip(lockstep.join(low.local, got), [*want, *gradients], strict=True):
        assert relative(x, y) <= TOLERANCE


def test_every_node_is_in_one_half_and_no_collective_twice():
    for plan in (fs.Schedule(), fs.Schedule(regather=False), fs.Schedule(pack_mib=0)):
        low = lowered(model(fs.policies.nothing), schedule=plan)
        halves, whole = low.halves, Counter(collectives(low.local))
        parts = [
            Counter(collectives(LocalProgram(g, [], [], low.local.mesh, []))) for g in (halves.forward, halves.backward)
        ]
        assert parts[0] + parts[1] == whole
        for phase, graph in (("forward", halves.forward), ("backward", halves.backward)):
            noted = [n for n in graph.nodes if "collective" in n.meta.get("custom", {})]
            assert noted and {phase_of(n) for n in noted} == {phase}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_gathered_is_saved_and_each_leaf_travels_once_a_direction(layout):
    low = lowered(loss, layout)
    assert not set(low.halves.tensors) & Chains(low.local).whole
    count = Counter((c.param, c.phase) for c in low.collectives() if c.kind == "all_gather")
    assert count and set(count.values()) == {1}
    assert {phase for _, phase in count} == {"forward", "backward"} and ("params.head", "backward") in count
    kept = lowered(loss, layout, schedule=fs.Schedule(regather=False))
    assert set(kept.halves.tensors) & Chains(kept.local).whole
    assert saved_bytes(kept) > saved_bytes(low)


def saved_bytes(low):
    return sum(num_bytes(n.meta["val"]) for n in low.halves.tensors)


def test_what_is_saved():
    low = lowered(loss, moe=False)
    blocks, _ = blocks_of(low, leaves_of(init(moe=False), batch(16)), [torch.ones(())])
    saved = lockstep.run(low.halves.forward, low.local.mesh, blocks)[0][1:]
    assert len(saved) == len(low.halves.tensors) and all(isinstance(x, torch.Tensor) for x in saved)
    assert len({x.untyped_storage().data_ptr() for x in saved}) == len(saved), "no view beside its base"
    assert saved_bytes(low) == sum(x.untyped_storage().nbytes() for x in saved)
    routed = lowered(loss)
    assert len(routed.halves.numbers) == 2, "the rows that a rank receives, once a layer"
    recomputed = lowered(model(fs.policies.nothing))
    assert saved_bytes(recomputed) < 0.6 * saved_bytes(routed)
    names = {low.local.inputs[i].name for i in low.halves.inputs}
    assert "b.x" in names and "params.layers[0].qkv" in names and "params.embed" not in names


def test_cotangents_are_laid_out_as_their_results():
    low = lowered(several)
    given = {i.name: i for i in low.local.inputs if i.name.startswith("cotangent")}
    kinds = {name: (i.kind, i.dims) for name, i in given.items()}
    where = dict(zip(low.result["paths"], range(9), strict=False))
    tensors = [p for p in low.result["paths"] if p != "name"]
    number = {p: tensors.index(p) for p in tensors}
    assert len(where) == 6 and [bool(on) for on in low.reach] == [p in ("decayed", "loss", "rows") for p in tensors]
    assert kinds[f"cotangent[{number['loss']}]"] == ("rows", ())
    assert kinds[f"cotangent[{number['rows']}]"] == ("rows", (("replicate", "efsdp", "ep"), ()))
    assert kinds[f"cotangent[{number['decayed']}]"] == ("stored", (("efsdp", "ep"), ()))


# ---- numbers, many ranks in lockstep ---------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["dense", "moe", "remat"])
def test_gradients_are_those_of_one_device(layout, kind):
    fn, moe = (model(fs.policies.nothing) if kind == "remat" else loss), kind != "dense"
    params, b = init(moe=moe), batch(16)
    low = lowered(fn, layout, moe=moe)
    want, gradients = one_device(fn, params, b)
    got = in_halves(low, *blocks_of(low, leaves_of(params, b), cotangents_of(want, low.reach)))
    for x, y in zip(lockstep.join(low.local, got), [*want, *gradients], strict=True):
        assert relative(x, y) <= TOLERANCE


def test_a_subset_of_the_leaves():
    params, b = init(), batch(16)
    low = lowered(loss, only=lambda path: "router" in path or path.endswith("gain"))
    want, gradients = one_device(loss, params, b)
    got = in_halves(low, *blocks_of(low, leaves_of(params, b), cotangents_of(want, low.reach)))
    got = lockstep.join(low.local, got)[1:]
    paths = trees.flatten_with_paths(params)[0]
    chosen = [g for p, g in zip(paths, gradients, strict=True) if "router" in p or p == "gain"]
    assert len(got) == len(chosen) == 3 and all(relative(x, y) <= TOLERANCE for x, y in zip(got, chosen, strict=True))


def test_casts_are_those_of_fs_grad():
    precision = fs.Precision("bfloat16", keep={"gain": "float32"})
    params, b = init(), batch(16)
    low = lowered(loss, precision=precision)
    blocks, cotangents = blocks_of(low, leaves_of(params, b), [torch.ones(())])
    got = lockstep.join(low.local, in_halves(low, blocks, cotangents))
    mesh, args = fs.make_mesh(SHAPE, fake=True), (params, b)
    where = (abstract(params, specs(params, "dp2ep")), abstract(b, ROWS))
    inside = fs.shard(fs.value_and_grad(loss), mesh, precision=precision).lower(*where)
    want = lockstep.evaluate(inside, leaves_of(*args))
    value, grads = trees.unflatten(inside.result["treedef"], want)
    assert got[0].dtype == value.dtype and all(g.dtype == torch.float32 for g in got[1:])
    assert relative(got[0], value) <= 1e-6
    assert max(relative(x, y) for x, y in zip(got[1:], leaves_of(grads), strict=True)) <= 1e-6
    travels = {c.dtype for c in low.collectives() if c.kind == "all_gather"}
    assert travels == {torch.bfloat16}


def test_the_local_view_alone():
    mesh = fs.make_mesh({"a": 2, "b": 2}, fake=True)
    f = fs.shard_map(
        lambda x, w: (fs.psum((x @ w).sin().sum(), ("a", "b")), x * 2),
        mesh, in_specs=(P(("a", "b")), P()), out_specs=(P(), P(("a", "b"))),
    )  # fmt: skip
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    cotangents, own = [torch.tensor(1.7), torch.randn(4, 3)], [t.clone().requires_grad_() for t in (x, w)]
    want = ((own[0] @ own[1]).sin().sum(), own[0] * 2)
    torch.autograd.backward(want, cotangents)
    for args in ((x, w), (fs.ShapeDtype((4, 3), x.dtype, P("a")), fs.ShapeDtype((3, 2), x.dtype, P("b")))):
        low = f._lower_joint(f._bind(args, {}), (0, 1))
        got = lockstep.join(low.local, in_halves(low, *blocks_of(low, [x, w], cotangents)))
        for a, b in zip(got, [*(t.detach() for t in want), own[0].grad, own[1].grad], strict=True):
            assert relative(a, b) <= TOLERANCE
