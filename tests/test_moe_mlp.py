"""``fs.moe.mlp`` is the composed layer, on one device and on every layout; what travels and what is kept."""

import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import run_ranks
from programs import TOLERANCE, D, E, H, K, factorisations, simulate, specs, worst

import fsharding as fs
from fsharding import P
from fsharding.moe import expert_ops, ops
from fsharding.moe.exchange import exchange
from fsharding.program.source import phase_of

ROWS = P(("replicate", "efsdp", "ep"))
LAYOUTS = ("fsdp", "hsdp", "dp2ep", "legacy_ep")
MESHES = [m for n in (2, 4, 8) for m in factorisations(n)]
ACTIVATE = {"swiglu": F.silu, "geglu": F.gelu, "glu": lambda z: z}
TOKENS = 16


def data(dtype=torch.float32, tokens=TOKENS, d=D, h=H):
    g = torch.Generator().manual_seed(0)
    n = lambda *shape, s=1.0: (torch.randn(*shape, generator=g) * s).to(dtype)
    params = {"router": n(d, E, s=2.0), "w_in": n(E, d, 2 * h, s=0.3), "w_out": n(E, h, d, s=0.3)}
    return params, n(tokens, d)


def routed(p, x, bias=0.0):
    scores = torch.softmax(x @ p["router"], -1)
    ids = torch.topk(scores + bias, K).indices
    return scores.gather(1, ids), fs.moe.route(ids, E)


def fused(p, x, activation="swiglu", bias=0.0):
    w, r = routed(p, x, bias)
    return fs.moe.mlp(x, p["w_in"], p["w_out"], r, w, activation)


def composed(p, x, activation="swiglu", bias=0.0):
    w, r = routed(p, x, bias)
    gate, up = fs.ragged_dot(fs.moe.dispatch(x, r), p["w_in"], r.group_sizes).chunk(2, -1)
    return fs.moe.combine(fs.ragged_dot(ACTIVATE[activation](gate) * up, p["w_out"], r.group_sizes), w, r)


def objective(layer, **kwargs):
    return fs.value_and_grad(lambda p, x: layer(p, x, **kwargs).sin().sum(), argnums=(0, 1))


def penalty(layer):
    """The gradient of the squared norm of a gradient."""
    return lambda p, x: fs.grad(
        lambda q: sum(g.square().sum() for g in fs.grad(lambda v: layer(v, x).sin().sum())(q).values())
    )(p)


def placed(layout):
    return specs(data()[0], layout) | {"router": P()}


def sharded(fn, shape, layout="dp2ep", **kwargs):
    experts = "auto" if layout in ("dp2ep", "legacy_ep") else None
    return fs.shard(fn, fs.make_mesh(shape, fake=True), experts=experts, **kwargs)


# ---- one device ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, TOLERANCE), (torch.float64, 1e-9)])
def test_equals_the_composed_layer(activation, dtype, tolerance):
    args = data(dtype)
    got, want = (objective(f, activation=activation)(*args) for f in (fused, composed))
    assert worst(got, want) <= tolerance
    assert worst(fused(*args, activation), composed(*args, activation)) <= tolerance  # no gradient wanted


def test_bfloat16_and_weights_of_another_dtype():
    (p, x), low = data(), torch.bfloat16
    w, r = routed(p, x)
    leaves = [t.to(low).requires_grad_() for t in (x, p["w_in"], p["w_out"])] + [w.requires_grad_()]
    out = fs.moe.mlp(*leaves[:3], r, leaves[3])
    grads = torch.autograd.grad(out.float().sin().sum(), leaves)
    assert out.dtype == low and [g.dtype for g in grads] == [low, low, low, torch.float32]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad(fs.moe.mlp(*exact[:3], r, exact[3]).sin().sum(), exact)
    for g, e in zip(grads, want, strict=True):
        assert (g.double() - e).norm() / e.norm() < 2e-2


def small():
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(5)])  # expert 3 of 4 gets nothing
    n = lambda *shape: torch.randn(*shape, dtype=torch.double)
    return fs.moe.route(ids, 4), (n(5, 3), n(4, 3, 4), n(4, 2, 3), n(5, 2))


@pytest.mark.parametrize("activation", ACTIVATE)
def test_derivatives_of_every_order_and_mode(activation):
    r, values = small()
    leaves = [v.requires_grad_() for v in values]
    f = lambda x, a, b, w: fs.moe.mlp(x, a, b, r, w, activation)
    assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(
        f, leaves, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    )


def test_transforms():
    r, values = small()
    layers = [lambda x, a, b, w: fs.moe.mlp(x, a, b, r, w).sin().sum()]
    swiglu = lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]
    dot = lambda x, w: fs.ragged_dot(x, w, r.group_sizes)
    layers += [lambda x, a, b, w: fs.moe.combine(dot(swiglu(dot(fs.moe.dispatch(x, r), a)), b), w, r).sin().sum()]
    every = lambda f: torch.func.grad(f, argnums=(0, 1, 2, 3))
    ones = tuple(map(torch.ones_like, values))
    stacked = (torch.stack([values[0], 2 * values[0]]), *values[1:])
    views = (
        lambda f: every(f)(*values),
        lambda f: torch.func.vjp(f, *values)[1](torch.ones((), dtype=torch.double)),
        lambda f: torch.func.jvp(f, values, ones)[1],
        lambda f: torch.func.jvp(every(f), values, ones)[1],
        lambda f: every(lambda *v: sum(g.square().sum() for g in every(f)(*v)))(*values),
        lambda f: torch.func.vmap(every(f), in_dims=(0, None, None, None))(*stacked),
        lambda f: every(lambda *v: every(lambda *u: every(f)(*u)[0].square().sum())(*v)[1].square().sum())(*values),
    )
    for view in views:
        got, want = (view(f) for f in layers)
        assert worst(got, want) <= 1e-9


@pytest.mark.parametrize("which", range(4))
def test_gradient_of_one_leaf_only(which):
    r, values = small()
    f = lambda v: fs.moe.mlp(*[v if i == which else x for i, x in enumerate(values)][:3], r,
                             v if which == 3 else values[3]).sin().sum()  # fmt: skip
    want = torch.func.grad(lambda *v: fs.moe.mlp(*v[:3], r, v[3]).sin().sum(), argnums=which)(*values)
    assert worst(torch.func.grad(f)(values[which]), want) <= 1e-12


def test_no_tokens():
    p, x = data(tokens=0)
    value, (grads, dx) = objective(fused)(p, x)
    assert value == 0 and dx.shape == (0, D) and not any(g.any() for g in grads.values())


def test_the_schedule_is_the_kernels():
    kernels = pytest.importorskip("triton") and expert_ops.fast._package()
    assert kernels.routing.BLOCK_M == expert_ops.TILE
    for sizes in ([0, 0], [300], [0, 257, 0], [128, 128], [1] * 40):
        counts = torch.tensor(sizes, dtype=torch.int32)
        rows, ends, blocks, largest = expert_ops.tiles_raw(torch.arange(sum(sizes)), counts, 1)
        want = kernels.routing.schedule_reference(ends, sum(sizes))
        assert torch.equal(blocks, want[0]) and torch.equal(largest, want[1])
        assert rows.tolist() == list(range(sum(sizes))) and ends.tolist() == counts.cumsum(0).tolist()


# ---- every layout ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", ["free", "one-hot"])
def test_right_on_every_mesh(layout, bias):
    """All factorisations of 2, 4 and 8 ranks; under one-hot routing most ranks of ``ep`` serve no token."""
    hot = torch.zeros(E)
    hot[:K] = 100.0 * (bias == "one-hot")
    args = data()
    want = objective(composed, bias=hot)(*args)
    for shape in MESHES:
        got, _ = simulate(sharded(objective(fused, bias=hot), shape, layout), args, (placed(layout), ROWS))
        assert worst(got, want) <= TOLERANCE, shape


def test_exact_in_float64():
    args = data(torch.float64)
    got, _ = simulate(sharded(objective(fused), MESHES[-2]), args, (placed("dp2ep"), ROWS))
    assert worst(got, objective(composed)(*args)) <= 1e-9


@pytest.mark.parametrize("spec", [P("ep", "efsdp"), P(("ep", "efsdp")), P("ep", None, "efsdp")])
def test_uneven_leaves(spec):
    """Dims that the storage axes do not divide, and expert dims split over two axes."""
    args = data(d=15, h=7)
    where = {"router": P(), "w_in": spec, "w_out": spec}
    got, _ = simulate(sharded(objective(fused), {"replicate": 1, "efsdp": 2, "ep": 2}), args, (where, ROWS))
    assert worst(got, objective(composed)(*args)) <= TOLERANCE


@pytest.mark.parametrize("rows", [P(), P("efsdp"), P(("efsdp", "ep"))])
def test_tokens_that_all_ranks_of_the_axis_hold(rows):
    args = data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # P(): every rank computes everything
        fn = sharded(objective(fused), {"replicate": 1, "efsdp": 2, "ep": 2})
        got, _ = simulate(fn, args, (placed("dp2ep"), rows))
    assert worst(got, objective(composed)(*args)) <= TOLERANCE


@pytest.mark.parametrize("experts", ["auto", None])
def test_model_axes_are_gathered(experts):
    """Gate and up would not be split alike by an axis along 2H: each rank of it computes the whole."""
    args = data()
    mesh = fs.make_mesh({"ep": 2, "tp": 2}, model_axes=("tp",), fake=True)
    where = {"router": P(), "w_in": P("ep", None, "tp"), "w_out": P("ep", "tp")}
    got, _ = simulate(fs.shard(objective(fused), mesh, experts=experts), args, (where, P("ep")))
    assert worst(got, objective(composed)(*args)) <= TOLERANCE


def test_second_derivatives_are_right_on_ranks():
    args = data(torch.float64)

    got, _ = simulate(
        sharded(penalty(fused), {"replicate": 1, "efsdp": 2, "ep": 2}), args, (placed("dp2ep"), ROWS)
    )
    assert worst(got, penalty(composed)(*args)) <= 1e-9


def ranks(rank, world):
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 1, "ep": 2})
    p, x = data()
    where = placed("dp2ep")
    got = fs.shard(objective(fused), mesh)(fs.device_put(p, mesh, where), fs.device_put(x, mesh, ROWS))
    return fs.device_get(got)


def test_on_real_ranks():
    want = objective(composed)(*data())
    for got in run_ranks(2, ranks):
        assert worst(got, want) <= TOLERANCE


# ---- what travels, what is kept --------------------------------------------------------------------------------------
def lowered(fn, shape=None, layout="dp2ep", **kwargs):
    args = data()
    _, low = simulate(sharded(fn, shape or {"replicate": 1, "efsdp": 2, "ep": 2}, layout, **kwargs), args,
                      (placed(layout), ROWS))  # fmt: skip
    return low


def count(low, target, phase=None):
    return sum(n.target is target and phase in (None, phase_of(n)) for n in low.local.graph.nodes)


def test_exchanges_of_a_layer():
    """Rows there and back; backward gradients and weights there, two gradients back; no expert is gathered over ep."""
    low = lowered(objective(fused))
    rows = [c for c in low.collectives() if c.kind == "all_to_all" and c.dtype == torch.float32]
    wide = TOKENS // 4 * K * D * 4
    assert [(c.phase, c.bytes) for c in rows] == [
        ("forward", wide), ("forward", wide),
        ("backward", wide // D), ("backward", wide), ("backward", wide), ("backward", wide // D),
    ]  # fmt: skip
    assert not [c for c in low.collectives() if c.param and "w_" in c.param and "ep" in c.axes]
    assert count(low, expert_ops.tiles_raw) == 1 and count(low, expert_ops.mlp_rows_raw) == 1
    assert count(lowered(objective(fused), layout="fsdp"), exchange) == 0


def kept_rows(low):
    """(op, shape) of what has a row per routed slot and is made before and read after the backward pass begins."""
    nodes = [n for n in low.local.graph.nodes if n.op == "call_function"]
    backward = {expert_ops.mlp_backward_raw, expert_ops.mlp_rows_backward_raw, ops.ragged_dw_raw}
    start = next(i for i, n in enumerate(nodes) if n.target in backward)
    late = set(nodes[start:])
    found = []
    for node in nodes[:start]:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and phase_of(node) == "forward":
            if value.ndim == 2 and value.shape[0] == TOKENS // 4 * K and late & set(node.users):
                name = "h" if node.target is operator.getitem else node.target.name().split("::")[1]
                found.append((name, tuple(value.shape)))
    return sorted(found)


def test_little_is_kept():
    rows = TOKENS // 4 * K
    assert kept_rows(lowered(objective(fused))) == [("exchange", (rows, D)), ("h", (rows, 2 * H))]
    assert kept_rows(lowered(objective(fused), layout="fsdp")) == [("h", (rows, 2 * H))]
    assert len(kept_rows(lowered(objective(composed)))) > 3


def test_without_gradients_nothing_is_kept():
    low = lowered(fused)
    (node,) = (n for n in low.local.graph.nodes if n.target is expert_ops.mlp_rows_raw)
    assert node.args[-2:] == (True, False) and node.meta["val"][1].shape[0] == 0


def test_recomputed_it_needs_no_result():
    """A recomputed layer sends tokens again and makes h again, but no down-product and nothing on the way back."""
    plain, again = lowered(objective(fused)), lowered(objective(fs.remat(fused)))
    nodes = [n for n in again.local.graph.nodes if n.target is expert_ops.mlp_rows_raw]
    assert [n.args[-2:] for n in nodes] == [(True, False), (False, True)]
    assert count(again, exchange) == count(plain, exchange) + 1
    args = data()
    remat = sharded(objective(fs.remat(fused)), {"replicate": 1, "efsdp": 2, "ep": 2})
    assert worst(simulate(remat, args, (placed("dp2ep"), ROWS))[0], objective(composed)(*args)) <= TOLERANCE


def test_flops_are_counted():
    low = lowered(objective(fused), layout="fsdp").cost_analysis()
    want = lowered(objective(composed), layout="fsdp").cost_analysis()
    assert low["global_flops"] == want["global_flops"] and low["flops"] == want["flops"]


# ---- errors ----------------------------------------------------------------------------------------------------------
def call(x=None, w_in=None, w_out=None, routing=None, weights=None, activation="swiglu"):
    r, values = small()
    given = [v if g is None else g for g, v in zip((x, w_in, w_out, weights), values, strict=True)]
    return fs.moe.mlp(*given[:3], routing or r, given[3], activation)


@pytest.mark.parametrize("kwargs,text", [
    (dict(x=torch.ones(4, 3)), r"x \[5, D\].*got \(4, 3\)"),
    (dict(w_in=torch.ones(4, 3, 5)), r"w_in \[4, D, 2H\].*\(4, 3, 5\)"),
    (dict(w_out=torch.ones(4, 3, 2)), r"w_out \[4, H, D\]"),
    (dict(w_out=torch.ones(3, 2, 3)), r"w_out \[4, H, D\]"),
    (dict(weights=torch.ones(5, 3)), r"weights \[5, 2\].*\(5, 3\)"),
    (dict(weights=torch.ones(5, 2, dtype=torch.int64)), "floating weights"),
    (dict(x=torch.ones(5, 3)), "one floating dtype.*float32.*float64"),
    (dict(activation="relu"), "unknown activation 'relu'; one of swiglu, geglu, glu"),
    (dict(routing=(1, 2)), "`fs.moe.route` returned, got tuple"),
])  # fmt: skip
def test_refusals(kwargs, text):
    with pytest.raises(fs.ShardingError, match=text):
        call(**kwargs)


def test_a_changed_routing_is_refused():
    def f(p, x):
        w, r = routed(p, x)
        return fs.moe.mlp(x, p["w_in"], p["w_out"], r._replace(group_sizes=r.group_sizes.flip(0)), w)

    def g(p, x):
        (w, r), (_, other) = routed(p, x), routed(p, -x)
        return fs.moe.mlp(x, p["w_in"], p["w_out"], r._replace(inverse=other.inverse), w)

    for fn in (f, g):
        with pytest.raises(fs.ShardingError, match="test_moe_mlp.py.*the routing was changed"):
            lowered(fn)


def test_rows_of_another_routing_are_refused():
    sizes = torch.tensor([2, 1], dtype=torch.int32)
    schedule = expert_ops.tiles_raw(torch.arange(3), sizes, 1)
    with pytest.raises(fs.ShardingError, match="4 rows for a routing of 3"):
        expert_ops.mlp_rows_raw(torch.ones(4, 2), torch.ones(2, 2, 2), torch.ones(2, 1, 2), sizes, *schedule, "glu",
                                True, True)  # fmt: skip


def test_experts_must_lead_with_their_axis():
    where = {"router": P(), "w_in": P("efsdp", "ep"), "w_out": P("ep")}
    with pytest.raises(fs.ShardingError, match=r"experts of p.w_in are split over.*lead with that axis"):
        simulate(sharded(fused, {"replicate": 1, "efsdp": 2, "ep": 2}), data(), (where, ROWS))
