"""Recomputation on the graph: the same numbers, fewer values kept, routing decided once."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from programs import TOLERANCE, D, V, abstract, attention, batch, init, mlp, moe, simulate, specs, worst

import fsharding as fs
from fsharding import P
from fsharding.program.trace import trace

POLICIES = {
    "nothing": fs.policies.nothing,
    "dots": fs.policies.dots,
    "names": fs.policies.names("normed"),
    "offload": fs.policies.offload("normed"),
    "everything": fs.policies.everything,
}
PRODUCTS = ("aten.mm.default", "fsharding.ragged_dot.default", "fsharding.ragged_dw.default")


def model(policy):
    """The model of ``programs`` with one remat a layer, and a named value."""

    def layer(p, h):
        h = h + attention(p, F.rms_norm(h, (D,), p["norm"]))
        normed = fs.name(F.rms_norm(h, (D,)), "normed")
        if "router" in p:
            y, extra = moe(p, normed)
            return h + y, extra
        return h + mlp(p, normed), 0.0

    def loss(params, b):
        h, balance = F.embedding(b["x"], params["embed"]), 0.0
        for p in params["layers"]:
            h, extra = (layer if policy is None else fs.remat(layer, policy))(p, h)
            balance = balance + extra
        z = (h * params["gain"]) @ params["head"]
        return F.cross_entropy(z.reshape(-1, V), b["y"].reshape(-1)) + 0.01 * balance

    return loss


def lowered(fn, params, shape=None, layout="dp2ep", **options):
    mesh = fs.make_mesh(shape or {"efsdp": 2, "ep": 2}, fake=True)
    args, where = (params, batch()), (specs(params, layout), P(mesh.data_axes))
    got, low = simulate(fs.shard(fn, mesh, strict=True, **options), args, where)
    return got, low


def targets(low, *wanted):
    names = Counter(str(n.target) for n in low.program.graph.graph.nodes)
    return sum(names[w] for w in wanted)


@pytest.mark.parametrize("kind", POLICIES)
def test_equal_to_one_device_under_every_policy(kind):
    params = init()
    want = fs.value_and_grad(model(None))(params, batch())
    for layout, shape in (("dp2ep", {"efsdp": 2, "ep": 2}), ("fsdp", {"replicate": 1, "efsdp": 4, "ep": 1})):
        got, low = lowered(fs.value_and_grad(model(POLICIES[kind])), params, shape, layout)
        assert worst(got, want) <= TOLERANCE
        assert not [n for n in low.program.graph.graph.nodes if "mark" in str(n.target)]


def test_bitwise_equal_to_the_same_program_without_remat():
    params = init()
    plain, _ = lowered(fs.value_and_grad(model(None)), params)
    for kind, policy in POLICIES.items():
        got, _ = lowered(fs.value_and_grad(model(policy)), params)
        assert worst(got, plain) == 0, kind


def test_each_policy_recomputes_what_it_says():
    params = init(layers=3)
    made = {}
    for kind, policy in {"none": None, **POLICIES}.items():
        _, low = lowered(fs.value_and_grad(model(policy)), params)
        made[kind] = (
            targets(low, *PRODUCTS),
            targets(low, "aten.topk.default"),
            targets(low, "fsharding.route.default"),
        )
    assert made["none"] == made["everything"] == made["dots"]  # a product is never computed twice under `dots`
    # A layer: qkv, out, router, two ragged; `out` and the second ragged product are read by no one but their results.
    assert made["nothing"] == (made["none"][0] + 3 * 5, 3, 3), "routing is decided once"
    assert made["names"] == made["nothing"] and made["offload"] == made["nothing"]


def test_peak_memory_falls():
    params = init(layers=6, moe=False)
    size = {}
    for kind, policy in {"none": None, **POLICIES}.items():
        fn = fs.value_and_grad(model(policy))
        mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 1}, fake=True)
        big = {k: fs.ShapeDtype((64, 96), torch.int64, P("efsdp")) for k in "xy"}
        low = fs.shard(fn, mesh, schedule=fs.Schedule(pack_mib=0)).lower(abstract(params, specs(params, "fsdp")), big)
        size[kind] = low.memory_analysis()["peak"]
    assert size["everything"] == size["none"]
    assert size["nothing"] < size["dots"] < size["none"]
    assert size["offload"] < size["names"] < size["none"]
    assert size["nothing"] < 0.6 * size["none"]


def test_recomputed_exchanges_show_as_backward_and_counts_travel_once():
    params = init(layers=2)
    _, plain = lowered(fs.value_and_grad(model(None)), params)
    _, low = lowered(fs.value_and_grad(model(fs.policies.nothing)), params)
    sent = lambda low, phase: sum(c.kind == "all_to_all" and c.phase == phase for c in low.collectives())  # noqa: E731
    assert sent(low, "forward") == sent(plain, "forward")
    assert sent(low, "backward") == sent(plain, "backward") + 2 * 2  # rows out and back again, a layer
    names = Counter(str(n.target) for n in low.local.graph.nodes)
    assert names["fsharding.exchange_counts.default"] == 2


# ---- under transforms ------------------------------------------------------------------------------------------------
def products(fn, *args):
    program = trace(lambda *xs: [fn(*xs)], args)
    names = Counter(str(n.target) for n in program.graph.graph.nodes)
    return names["aten.mm.default"] + names["aten.bmm.default"]


W, X = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)), torch.randn(4, 6)


def chain(remat, inner=False):
    def block(w, x):
        return torch.tanh(torch.tanh(x @ w) @ w)

    def two(w, x):
        step = fs.remat(block) if inner else block
        return step(w, step(w, x))

    wrap = fs.remat if remat else lambda f: f
    return lambda w, x: wrap(two)(w, x).square().sum()


TRANSFORMS = {
    "grad": lambda f: lambda w, x: torch.func.grad(f)(w, x),
    "grad of grad": lambda f: lambda w, x: torch.func.grad(lambda v: torch.func.grad(f)(v, x).square().sum())(w),
    "vmap of grad": lambda f: lambda w, x: torch.func.vmap(torch.func.grad(f), (None, 0))(w, x[:, None]).sum(0),
    "grad of vmap": lambda f: (
        lambda w, x: torch.func.grad(lambda v: torch.func.vmap(f, (None, 0))(v, x[:, None]).sum())(w)
    ),
    "jvp": lambda f: lambda w, x: torch.func.jvp(lambda v: f(v, x), (w,), (torch.ones_like(w),))[1],
    "closure": lambda f: lambda w, x: torch.func.grad(lambda z: fs.remat(lambda y: f(w, y))(z))(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("inner", [False, True], ids=["flat", "nested"])
def test_under_transforms(name, inner):
    mesh = fs.make_mesh({"d": 2}, fake=True)
    apply = TRANSFORMS[name]
    want = apply(chain(False))(W, X)
    for remat in (False, True):
        fn = apply(chain(remat, inner))
        got, _ = simulate(fs.shard(fn, mesh), (W, X), (P("d"), P("d")))
        assert worst(got, want) <= TOLERANCE, (name, remat)


def test_how_much_is_computed_again():
    plain = products(torch.func.grad(chain(False)), W, X)
    assert products(torch.func.grad(chain(True)), W, X) == plain + 4
    assert products(torch.func.grad(chain(True, inner=True)), W, X) > plain + 4  # an inner region again, in its turn
    forward = products(chain(True), W, X)
    assert forward == products(chain(False), W, X) == 4  # without a gradient nothing is


def test_random_numbers_come_out_alike_and_statistics_are_counted_once():
    key = fs.random.key(3)

    def loss(w, x, remat):
        def layer(w, x):
            h = fs.random.dropout(key, torch.relu(x @ w), 0.5)
            return h @ w, (h > 0).sum()

        y, count = (fs.remat(layer) if remat else layer)(w, x)
        return y.square().sum(), count

    mesh = fs.make_mesh({"d": 2}, fake=True)
    run = lambda remat: fs.value_and_grad(lambda w, x: loss(w, x, remat), has_aux=True)  # noqa: E731
    want = run(False)(W, X)
    got, _ = simulate(fs.shard(run(True), mesh), (W, X), (P("d"), P("d")))
    assert worst(got, want) <= TOLERANCE and int(got[0][1]) == int(want[0][1])


def test_outside_of_shard_it_is_the_function_itself():
    f = fs.remat(lambda x: fs.name(x * 2, "double"))
    assert torch.equal(f(X), X * 2)
    assert repr(fs.policies.names("a", "b")) == "policies.names('a', 'b')" and repr(fs.policies.dots) == "policies.dots"
