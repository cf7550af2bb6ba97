"""The local view: alone, in ``fs.shard``, nested; closures, types, replication checks; what is refused, in which words.

Values against JAX are in ``tests/oracle``; here is what JAX has no counterpart for, and our own words.
"""

import pytest
import torch
import torch.nn.functional as F
from programs import close, randn, refused

import fsharding as fs
from fsharding import P

MESH = {"i": 4, "j": 2}


@pytest.fixture
def mesh():
    with fs.simulate(8):
        yield fs.make_mesh(MESH)


# ---- alone -----------------------------------------------------------------------------------------------------------
def test_alone_with_plain_and_placed_arguments(mesh):
    x, w = randn(8, 6), randn(6, 4)
    f = fs.shard_map(lambda x, w: fs.psum(x @ w, "j"), mesh, (P("i", "j"), P("j")), P("i"))
    y = f(x, w)
    assert fs.spec_of(y) == P("i") and y.to_local()[3].shape == (2, 4)
    close(y, x @ w)
    placed = fs.device_put(x, mesh, P(None, "i")), fs.device_put(w, mesh, P(("i", "j")))  # relaid; w is uneven there
    close(f(*placed), x @ w)
    close(f(fs.device_put(x, mesh, P("i", "j")), w), x @ w)
    assert len(f._programs) == 3
    f(x, w)
    assert len(f._programs) == 3
    assert not [c for c in f.lower(x, w).collectives() if c.kind != "all_reduce"]


def test_trees_keywords_numbers_and_none(mesh):
    def body(p, scale, *, extra=None):
        return {"a": p["a"] * scale, "b": (p["b"] + 1, None)}, scale * 2

    specs = ({"a": P("i"), "b": None}, P())
    f = fs.shard_map(body, mesh, specs, ({"a": P("i"), "b": P()}, P()))
    p = {"a": randn(8), "b": randn(3)}
    for out in (f(p, 2.0), f(p, scale=2.0), f(scale=2.0, p=p)):
        close(out[0]["a"], p["a"] * 2)
        close(out[0]["b"][0], p["b"] + 1)
        assert out[0]["b"][1] is None and out[1] == 4.0
    refused("keyword argument 'extra', for which `in_specs` has no entry", lambda: f(p, 2.0, extra=randn(2)))
    refused("has 2 entries, but it got 1", f, p)
    refused("in_specs of `p` do not fit", f, {"a": p["a"]}, 2.0)


def test_gradient_of_it(mesh):
    x, w = randn(8, 3), randn(3)
    loss = fs.shard_map(lambda w, x: fs.pmean((x @ w).square().mean(), "i"), mesh, (P(), P("i")), P())
    want = fs.value_and_grad(lambda w, x: (x @ w).square().mean())(w, x)
    close(fs.value_and_grad(loss)(w, x), want)
    close(fs.grad(loss, argnums=1)(w, x), torch.func.grad(lambda w, x: (x @ w).square().mean(), argnums=1)(w, x))
    refused("called inside a transform", lambda: torch.func.grad(lambda w: loss(w, x))(w))


# ---- in a global program ---------------------------------------------------------------------------------------------
def test_a_region_in_a_training_step(mesh):
    """Gathered by hand in the region: the gradient is scattered, and rests as the parameter does."""
    params, x = {"w": randn(8, 6), "v": randn(6)}, randn(16, 8)

    def loss(params, x, layer):
        return (layer(params["w"], x) @ params["v"]).square().mean()

    def gathered(w, x):
        return torch.tanh(x @ fs.all_gather(w, ("i", "j"), tiled=True))

    axes = ("i", "j")
    layer = fs.shard_map(gathered, mesh, (P(axes), P(axes)), P(axes))
    step = fs.shard(fs.value_and_grad(lambda p, x: loss(p, x, layer)), mesh)
    placed = fs.device_put(params, mesh, {"w": P(axes), "v": P("i")}), fs.device_put(x, mesh, P(axes))
    value, grads = step(*placed)
    close((value, grads), fs.value_and_grad(lambda p, x: loss(p, x, lambda w, x: torch.tanh(x @ w)))(params, x))
    assert fs.spec_of(grads["w"]) == P(axes) and fs.spec_of(grads["v"]) == P("i")
    kinds = [(c.kind, c.phase, c.axes) for c in step.lower(*placed).collectives() if c.bytes >= 8 * 6 * 4]
    assert kinds == [("all_gather", "forward", axes), ("reduce_scatter", "backward", axes)]


def test_values_of_every_kind_enter_and_leave(mesh):
    """Rows, sums that are pending, constants, random numbers, views of stored values."""
    w, x = randn(8, 6), randn(8, 5)

    def fn(region, p, x):
        key = fs.random.key(3)
        total = region(x.sum(0).expand(8, 5))
        drawn = region(fs.random.normal(key, (8, 5)))
        constant = region(torch.full((8, 5), 2.0)) + region(torch.zeros(8, 5))
        return total + drawn + constant, region(p.t()[:5].t()), region(x * 2).mean()

    region = fs.shard_map(lambda y: torch.sin(y) * 2, mesh, P("i"), P("i"))
    got = fs.shard(lambda p, x: fn(region, p, x), mesh)(
        fs.device_put(w, mesh, P(("i", "j"))), fs.device_put(x, mesh, P(("i", "j")))
    )
    close(got, fn(lambda y: torch.sin(y) * 2, w, x))


def test_manual_over_some_axes_only(mesh):
    """Rows that are split over an axis which the body does not see stay split, and other rules serve them."""
    x, w = randn(16, 6), randn(6, 8)

    def loss(region, w, x):
        a, y = region(x, w)
        return a + y.sin().mean()

    wrong = fs.shard_map(lambda x, w: x, mesh, (P("i"), P(None, "j")), P("i"), axis_names={"i"})
    refused("names 'j', over which `<lambda>` is not manual", fs.shard(wrong, mesh), x, w)

    def body(x, w):
        y = F.layer_norm(x @ fs.all_gather(w, "i", axis=1, tiled=True), (8,))
        return fs.pmean(y.square().mean(), "i"), y

    region = fs.shard_map(body, mesh, (P("i"), P(None, "i")), (P(), P("i")), axis_names={"i"})
    step = fs.shard(fs.value_and_grad(lambda w, x: loss(region, w, x)), mesh)

    def alone(x, w):
        y = F.layer_norm(x @ w, (8,))
        return y.square().mean(), y

    want = fs.value_and_grad(lambda w, x: loss(alone, w, x))(w, x)
    args = fs.device_put(w, mesh, P(None, ("i", "j"))), fs.device_put(x, mesh, P(("i", "j")))
    close(step(*args), want)
    assert not [
        c for c in step.lower(*args).collectives() if "all_gather" in c.kind and c.param is None and c.bytes > 256
    ]


def test_nested_over_different_axes(mesh):
    x = randn(8, 4)

    def inner(y):
        return fs.psum(y.sin(), "j") * fs.axis_size(("i", "j"))

    def outer(y):
        return fs.psum(fs.shard_map(inner, mesh, P(None, "j"), P(), axis_names="j")(y), "i")

    f = fs.shard_map(outer, mesh, P("i"), P(), axis_names={"i"})
    want = lambda x: (x.sin().view(4, 2, 2, 2).sum((0, 2))) * 8
    close(f(x), want(x))
    got = fs.shard(fs.grad(lambda x: f(x).square().sum()), mesh)(x)
    close(got, fs.grad(lambda x: want(x).square().sum())(x))
    same = fs.shard_map(fs.shard_map(lambda y: y, mesh, P("i"), P("i")), mesh, P("i"), P("i"))
    refused("nested `shard_map`s name different axes", same, x)


# ---- closures --------------------------------------------------------------------------------------------------------
def test_closures(mesh):
    x, w, b = randn(8, 3), randn(3, 5), randn(5)
    placed = fs.device_put(w, mesh, P(None, "i"))  # uneven, at rest
    f = fs.shard_map(lambda x: fs.all_gather(x @ placed + b, "i", tiled=True), mesh, P("i"), P("i"))
    close(f(x), (x @ w + b).repeat(4, 1))
    b += 1  # read by reference
    close(f(x), (x @ w + b).repeat(4, 1))

    def traced(w, x):
        v = w * 2
        return fs.shard_map(lambda x: fs.psum((x @ v).sin().sum(), "i"), mesh, P("i"), P())(x)

    close(fs.shard(fs.grad(traced), mesh)(placed, x), fs.grad(lambda w, x: (x @ (w * 2)).sin().sum())(w, x))
    other = fs.make_mesh({"a": 8})
    away = fs.device_put(w, other, P())
    refused("does not live on", fs.shard_map(lambda x: x @ away, mesh, P("i"), P("i")), x)


def test_blocks_must_not_leak(mesh):
    kept, x = [], randn(8)

    def body(x):
        kept.append(x * 2)
        return x

    region = fs.shard_map(body, mesh, P("i"), P("i"))
    refused("has left the body other than as a result", fs.shard(lambda x: region(x)[:2] + kept[-1], mesh), x)
    again = fs.shard_map(lambda x: x + kept[-1], mesh, P("i"), P("i"))
    refused("has left the body", fs.shard(lambda x: region(x) + again(x), mesh), x)


# ---- what the body calls ---------------------------------------------------------------------------------------------
def test_moe_in_a_region_is_the_ranks_own(mesh):
    """Also where tokens would travel over a manual axis in the global view."""
    ep = fs.make_mesh({"efsdp": 4, "ep": 2})
    x, w, router = randn(16, 6), randn(4, 6, 5, seed=1), randn(6, 4, seed=2)

    def moe(x, w, router):
        scores, ids = torch.topk(torch.softmax(x @ router, -1), 2)
        r = fs.moe.route(ids, 4)
        return fs.moe.combine(fs.ragged_dot(fs.moe.dispatch(x, r), w, r.group_sizes), scores, r).square().sum()

    rows = P(("efsdp", "ep"))
    region = fs.shard_map(lambda *a: fs.psum(moe(*a), ("efsdp", "ep")), ep, (rows, P(), P()), P())
    got = fs.shard(fs.value_and_grad(region, argnums=(0, 1, 2)), ep)(x, w, router)
    close(got, fs.value_and_grad(moe, argnums=(0, 1, 2))(x, w, router))


def test_random_numbers_follow_their_key(mesh):
    key = fs.random.key(0)

    def body():
        same = fs.random.normal(key, (3,))
        own = fs.random.normal(fs.random.fold_in(key, fs.axis_index("i")), (3,))
        return same, own[None]

    same, own = fs.shard_map(body, mesh, (), (P(), P("i")))()
    close(same, fs.random.normal(key, (3,)))
    close(own, torch.stack([fs.random.normal(fs.random.fold_in(key, torch.tensor(k)), (3,)) for k in range(4)]))


def test_remat_in_a_region(mesh):
    x, w = randn(8, 4), randn(4, 4)
    layer = lambda x, w: torch.tanh(x @ fs.all_gather(w, "j", tiled=True)).sin()
    for wrap in (lambda f: f, fs.remat):
        body = lambda x, w, wrap=wrap: fs.psum(wrap(layer)(x, w).square().sum(), "i")
        loss = fs.shard_map(lambda x, w, body=body: fs.pmean(body(x, w), "j"), mesh, (P("i"), P("j")), P())
        got = fs.shard(fs.grad(loss, argnums=(0, 1)), mesh)(x, w)
        close(got, torch.func.grad(lambda x, w: torch.tanh(x @ w).sin().square().sum(), argnums=(0, 1))(x, w))


# ---- checks and errors -----------------------------------------------------------------------------------------------
def test_replication_errors_name_function_path_axis_and_line(mesh):
    def my_layer(x):
        return {"loss": fs.psum(x, "i"), "rows": [x * 2]}

    layer = fs.shard_map(my_layer, mesh, P(("i", "j")), {"loss": P("j"), "rows": P("j")})
    message = refused(r"result.rows\[0\] of `my_layer` may differ between the ranks of 'i'", layer, randn(8))
    for part in ("test_shard_map.py:", "`out_specs` has", "fs.psum(y, 'i')", "out-spec", "check=False"):
        assert part in message


def test_a_broken_promise_shows(mesh):
    good = fs.shard_map(lambda x: fs.all_gather(x, "i", tiled=True), mesh, P("i"), P(), check=False)
    close(good(randn(8)), randn(8))
    close(fs.shard(fs.grad(lambda x: good(x).sin().sum()), mesh)(randn(8)), randn(8).cos())
    bad = fs.shard_map(lambda x: x * 2, mesh, P("i"), P(), check=False)
    refused("promised what does not hold", bad, randn(8))


def test_other_refusals(mesh):
    x = randn(8)
    f = lambda body, **kw: fs.shard_map(body, kw.pop("mesh", mesh), P("i"), P("i"), **kw)
    message = refused(
        "`fs.psum` over 'ii', which is unknown: `body` is manual over i, j. Did you mean 'i'", f(_unknown), x
    )
    assert "test_shard_map.py:" in message
    refused(
        "'j', which is an axis of the mesh, but not in `axis_names`", f(lambda x: fs.psum(x, "j"), axis_names="i"), x
    )
    refused("has no axis", lambda: f(_unknown, axis_names={"k"}))
    refused("axis_names` is empty", f(_unknown, axis_names=()), x)
    refused("must come from `fs.make_mesh`", lambda: f(_unknown, mesh=None))
    refused("give both the same mesh", fs.shard(f(lambda x: x, mesh=fs.make_mesh({"i": 8})), mesh), x)
    refused("Dim 0 of x has size 6, which is not divisible by 4", f(lambda x: x), randn(6))
    refused("results are tensors", f(lambda x: "text"), x)
    refused("has no derivative, as in JAX", f(lambda x: torch.func.grad(lambda z: fs.pmax(z, "i").sum())(x)), x)
    refused("calls `.backward", f(lambda x: (x * 2).requires_grad_().sum().backward()), x)
    refused("name the axes in mesh order", f(lambda x: fs.ppermute(x, ("j", "i"), [(0, 1)])), x)


def _unknown(x):
    return fs.psum(x, "ii")


_unknown.__name__ = "body"


def test_without_jit_it_still_speaks_of_ranks(mesh):
    f = fs.shard_map(lambda x: fs.psum(x, "i"), mesh, P("i"), P())
    with fs.disable_jit():
        close(f(torch.arange(8.0)), torch.tensor([12.0, 16.0]))
        close(fs.shard(lambda x: f(x * 2), mesh)(torch.arange(8.0)), torch.tensor([24.0, 32.0]))


def test_a_compiled_caller_stops_at_a_sharded_function(mesh):
    """`torch.compile` of derivatives over such ops is silently wrong on torch 2.13: it does not get to see them."""
    f = fs.shard_map(lambda x: fs.psum(x.sin(), "i"), mesh, P("i"), P())
    x = randn(8)
    compiled = torch.compile(lambda x: f(x * 2) + 1, backend="eager")
    close(compiled(x), (x * 2).sin().view(4, 2).sum(0) + 1)
    twice = torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).sum())
    refused("called inside a transform of its result", torch.compile(twice, backend="eager"), x)


def test_closures_in_inner_transforms(mesh):
    """What is entered within an inner transform must not outlive it."""
    x, w = randn(8, 3), randn(3)

    def of(region):
        def outer(x, w):
            v = w * 2

            def body(x):
                g = torch.func.grad(lambda z: (z * v).sin().sum())(x)
                h = torch.func.vmap(lambda row: (row * v).sum())(x)
                return (g * v).sum() + h.sum()

            return region(body)(x)

        return torch.func.grad(outer, argnums=(0, 1))

    by_hand = lambda body: fs.shard_map(lambda x: fs.psum(body(x), "i"), mesh, P("i"), P())
    close(fs.shard(of(by_hand), mesh)(x, w), of(lambda body: body)(x, w))


def test_constants_fit_every_region(mesh):
    def inner(c, y):
        return c * fs.axis_index("j") + y, torch.ones(2)

    def outer(x):
        region = fs.shard_map(inner, mesh, (P("j"), P()), (P("j"), P()), axis_names={"j"})
        a, b = region(torch.arange(2.0), x.sum()[None])
        return fs.psum(a + b, "i") * fs.axis_index("i")

    x = randn(8)
    want = torch.cat([(torch.tensor([0.0, 1.0]) * 4 + x.sum() + 4) * k for k in range(4)])
    close(fs.shard_map(outer, mesh, P("i"), P("i"), axis_names={"i"})(x), want)
    kept = []
    region = fs.shard_map(lambda x: kept.append(fs.axis_index("i")) or x, mesh, P("i"), P("i"))
    refused("has left the body", fs.shard(lambda x: region(x) + kept[-1], mesh), x)
