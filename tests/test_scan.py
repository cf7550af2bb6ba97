"""scan against a Python loop: one trace, the same graph, the same numbers; JAX's results and readable errors."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from programs import TOLERANCE, D, T, V, attention, batch, init, mlp, moe, simulate, specs, worst

import fsharding as fs
from fsharding import P
from fsharding import tree as trees
from fsharding.program import scan as scanning


def model(use, policy=None, reverse=False):
    """The model of ``programs`` over its layers, by ``fs.scan`` or by a loop; closes over a leaf and a constant."""

    def loss(params, b):
        gain, places = params["gain"], torch.arange(T).float()[:, None] * 0.01

        def layer(carry, p):
            h, balance = carry
            h = h + attention(p, F.rms_norm(h + places, (D,), p["norm"]))
            if "router" in p:
                y, extra = moe(p, F.rms_norm(h, (D,)))
            else:
                y, extra = mlp(p, F.rms_norm(h, (D,))), h.mean()
            return (h + y * gain, balance + extra), extra

        body = fs.remat(layer, policy) if policy else layer
        carry = (F.embedding(b["x"], params["embed"]), torch.zeros(()))
        if use:
            carry, extras = fs.scan(body, carry, params["layers"], reverse=reverse)
        else:
            found = {}
            order = range(len(params["layers"]))
            for i in reversed(order) if reverse else order:
                carry, found[i] = body(carry, params["layers"][i])
            extras = torch.stack([found[i] for i in order])
        z = carry[0] @ params["head"]
        steps = (extras * torch.arange(1.0, 1 + len(extras))).sum()
        return F.cross_entropy(z.reshape(-1, V), b["y"].reshape(-1)) + 0.01 * carry[1] + 0.001 * steps

    return loss


@pytest.fixture
def traces(monkeypatch):
    """How many bodies were traced by themselves."""
    made = []
    original = scanning._Body.trace
    monkeypatch.setattr(scanning._Body, "trace", lambda self, *a: (made.append(self), original(self, *a))[1])
    return made


def lowered(fn, params, layout="dp2ep", shape=None, **options):
    mesh = fs.make_mesh(shape or {"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)
    experts = "auto" if layout in ("dp2ep", "legacy_ep") else None
    sharded = fs.shard(fn, mesh, experts=experts, strict=True, **options)
    return simulate(sharded, (params, batch()), (specs(params, layout), P(("replicate", "efsdp", "ep"))))


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "dp2ep", "legacy_ep"])
@pytest.mark.parametrize("policy", [None, fs.policies.nothing, fs.policies.dots], ids=str)
def test_the_same_program_as_a_loop(layout, policy, traces):
    params = init(layers=3)
    want = fs.value_and_grad(model(False))(params, batch())
    shape = {"replicate": 2, "efsdp": 2, "ep": 2} if layout == "hsdp" else None
    loop, plain = lowered(fs.value_and_grad(model(False, policy)), params, layout, shape)
    assert not traces
    got, low = lowered(fs.value_and_grad(model(True, policy)), params, layout, shape)
    assert len(traces) == 1 and traces[0].forward is not None
    assert worst(got, want) <= TOLERANCE and worst(got, loop) <= 1e-6
    count = lambda low: Counter(str(n.target) for n in low.program.graph.graph.nodes)  # noqa: E731
    ours, theirs = count(low), count(plain)
    for op in ("aten.mm.default", "fsharding.ragged_dot.default", "fsharding.route.default", "aten.topk.default"):
        assert ours[op] == theirs[op], op
    assert not ours["fsharding.stamp.default"]
    gathers = lambda low: Counter((c.kind, c.param, c.phase) for c in low.collectives())  # noqa: E731
    assert gathers(low) == gathers(plain)


def test_reverse_and_no_gradient(traces):
    params = init(layers=3, moe=False)
    for fn in (lambda use: fs.value_and_grad(model(use, reverse=True)), lambda use: model(use, reverse=True)):
        got, _ = lowered(fn(True), params, "fsdp")
        assert worst(got, fn(False)(params, batch())) <= TOLERANCE
    assert len(traces) == 2 and traces[1].backward is None


def test_stacked_leaves_rest_and_are_gathered_one_by_one():
    params = init(layers=4, moe=False)
    stacked = trees.map_with_path(lambda _, *x: torch.stack(x), *params["layers"])

    def loss(p, b):
        return model(True)({**p, "layers": p["stack"]}, b)

    want = fs.value_and_grad(model(False))(params, batch())
    rest = {k: v for k, v in params.items() if k != "layers"}
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 1}, fake=True)
    where = {k: P() if v.ndim == 0 else P("efsdp") for k, v in rest.items()}
    where["stack"] = trees.map_with_path(lambda _, x: P(None, "efsdp"), stacked)
    args = ({**rest, "stack": stacked}, batch())
    got, low = simulate(fs.shard(fs.value_and_grad(loss), mesh, strict=True), args, (where, P("efsdp")))
    assert abs(got[0] - want[0]) <= 1e-5 * want[0]
    for i in range(4):
        mine = trees.map_with_path(lambda _, x, i=i: x[i], got[1]["stack"])
        assert worst(mine, want[1]["layers"][i]) <= TOLERANCE
    gathers = [c.param for c in low.collectives() if c.kind == "all_gather" and c.phase == "forward"]
    assert "p.stack.qkv[2]" in gathers and "p.stack.qkv" not in gathers
    scatters = Counter(c.param for c in low.collectives() if c.kind == "reduce_scatter")
    assert scatters["p.stack.qkv"] == 1  # one for all layers, of the stacked gradient


# ---- anywhere --------------------------------------------------------------------------------------------------------
def cumulative(carry, x):
    return carry + x, carry * x


XS = torch.arange(1.0, 6.0)


def test_on_one_device_as_jax_says():
    carry, ys = fs.scan(cumulative, torch.tensor(0.0), XS)
    assert carry == 15 and ys.tolist() == [0, 2, 9, 24, 50]  # hand-computed: carry before times x
    carry, ys = fs.scan(cumulative, torch.tensor(0.0), XS, reverse=True)
    assert carry == 15 and ys.tolist() == [14, 24, 27, 18, 0][0:0] + [14 * 1, 12 * 2, 9 * 3, 5 * 4, 0 * 5]
    carry, ys = fs.scan(lambda c, _: (c * 2, None), torch.tensor(1.0), None, length=3)
    assert carry == 8 and ys is None
    carry, ys = fs.scan(lambda c, x: (c, {"twice": x["a"] * 2}), torch.tensor(0.0), {"a": XS})
    assert ys["twice"].tolist() == (XS * 2).tolist()
    carry, ys = fs.scan(cumulative, torch.tensor(7.0), torch.zeros(0))
    assert carry == 7 and ys is None


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f),
    "grad of grad": lambda f: lambda w: torch.func.grad(lambda v: torch.func.grad(f)(v).square().sum())(w),
    "jvp": lambda f: lambda w: torch.func.jvp(f, (w,), (torch.ones_like(w),))[1],
    "vmap": lambda f: lambda w: torch.func.vmap(lambda v: f(w + v))(torch.eye(3)),
    "vmap of grad": lambda f: lambda w: torch.func.vmap(lambda v: torch.func.grad(f)(w + v))(torch.eye(3)),
    "inner gradient": lambda f: lambda w: f(torch.func.grad(f)(w)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name):
    w = torch.tensor([0.3, -0.2, 0.5])

    def f(use):
        def g(v):
            body = lambda c, x: (torch.tanh(c * v + x), c.square().sum())  # noqa: E731
            c, ys = v, []
            if use:
                c, ys = fs.scan(body, v, XS)
            else:
                for x in XS:
                    c, y = body(c, x)
                    ys.append(y)
                ys = torch.stack(ys)
            return c.sum() + (ys * XS).sum()

        return TRANSFORMS[name](g)

    mesh = fs.make_mesh({"d": 1}, fake=True)
    got, _ = simulate(fs.shard(f(True), mesh), (w,), (P(),))
    assert worst(got, f(False)(w)) <= TOLERANCE


def test_a_gradient_inside_of_the_body(traces):
    def loss(w, x):
        def body(c, v):
            inner = fs.grad(lambda u: (torch.sin(u) * c).sum())(v)
            return c + inner, inner.sum()

        c, ys = fs.scan(body, x.mean(0), w)
        return (c.sum() + ys.square().sum()) * x.sum()

    w, x = torch.randn(4, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    mesh = fs.make_mesh({"d": 2}, fake=True)
    got, _ = simulate(fs.shard(loss, mesh), (w, x), (P(None, "d"), P("d")))
    assert worst(got, loss(w, x)) <= TOLERANCE
    fn = fs.value_and_grad(loss)
    got, _ = simulate(fs.shard(fn, mesh), (w, x), (P(None, "d"), P("d")))
    assert worst(got, fn(w, x)) <= TOLERANCE


def test_a_pull_back_used_twice_and_one_never_used(traces):
    def f(w, x):
        body = lambda c, v: (torch.tanh(c * v), c.sum())  # noqa: E731
        y, pull = torch.func.vjp(lambda v: fs.scan(body, x.mean(0), v)[0], w)
        torch.func.vjp(lambda v: fs.scan(body, x.sum(0), v)[0], w)
        return y, pull(torch.ones_like(y))[0], pull(2 * y)[0]

    w, x = torch.randn(4, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    got, _ = simulate(fs.shard(f, fs.make_mesh({"d": 2}, fake=True)), (w, x), (P(None, "d"), P("d")))
    assert len(traces) == 2
    assert worst(got, f(w, x)) <= TOLERANCE


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: fs.scan(cumulative, torch.tensor(0.0)), "needs `length`"),
        (lambda: fs.scan(cumulative, torch.tensor(0.0), XS, length=3), "xs has 5 steps"),
        (lambda: fs.scan(cumulative, torch.tensor(0.0), {"a": XS, "b": XS[:3]}), "b has 3"),
        (lambda: fs.scan(cumulative, torch.tensor(0.0), {"a": 1.5}), "a must be a tensor"),
        (lambda: fs.scan(lambda c, x: (c.double(), x), torch.tensor(0.0), XS), "float64"),
        (lambda: fs.scan(lambda c, x: ((c, c), x), torch.tensor(0.0), XS), "structure"),
        (lambda: fs.scan(lambda c, x: c, torch.tensor(0.0), [{"a": XS}, {"b": XS}]), r"xs\[1\]"),
        (
            lambda: fs.scan(lambda c, x: (c, x), torch.tensor(0.0), [{"a": XS}, {"a": XS[:2]}]),
            r"xs\[1\].*a is \(\(2,\)",
        ),
    ],
)
def test_mistakes(call, words):
    with pytest.raises(fs.ShardingError, match=words):
        call()


def test_mistakes_in_a_program_name_the_path():
    mesh = fs.make_mesh({"d": 1}, fake=True)
    with pytest.raises(fs.ShardingError, match=r"pair \(carry, y\)"):
        simulate(fs.shard(lambda w: fs.scan(lambda c, x: c + x, w.sum(), w)[0], mesh), (XS,), (P(),))
    with pytest.raises(fs.ShardingError, match="the carry must keep"):
        simulate(fs.shard(lambda w: fs.scan(lambda c, x: (w, x), w.sum(), w)[0], mesh), (XS,), (P(),))
