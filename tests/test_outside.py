"""``loss.backward()`` from outside: what PyTorch's autograd and optimizers make of a sharded function."""

import pytest
import torch
import torch.nn.functional as F
from helpers import run_ranks
from programs import TOLERANCE, D, batch, init, loss, relative, specs, worst
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fsharding as fs
from fsharding import P
from fsharding import tree as trees


def leaves_of(*args):
    return trees.flatten(list(args))[0]


# ---- one rank: PyTorch's own behaviour -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mesh():
    return fs.make_mesh({"replicate": 1, "efsdp": 1, "ep": 1})


def placed(mesh, tree, layout="dp2ep", grad=True):
    where = specs(tree, layout)
    return trees.map_with_path(lambda _, x: x.requires_grad_(grad), fs.device_put(tree, mesh, where))


def small(mesh, fn, **options):
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(5, 4, generator=g), torch.randn(6, 5, generator=g)
    w, x = fs.device_put(w, mesh, P("efsdp")).requires_grad_(), fs.device_put(x, mesh, P(mesh.data_axes))
    return fs.shard(fn, mesh, **options), w, x


def full(x):
    return x.detach().full_tensor().clone()


def test_backward_accumulates_and_hooks_see_dtensors(mesh):
    f, w, x = small(mesh, lambda w, x: (x @ w).sin().sum())
    seen = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements))
    value = f(w, x)
    assert value.requires_grad and type(value) is torch.Tensor and value.grad_fn is not None
    value.backward()
    once = full(w.grad)
    assert torch.equal(once, full(x).T @ (full(x) @ full(w)).cos())
    assert w.grad.placements == w.placements and w.grad.device_mesh == w.device_mesh and not w.grad.requires_grad
    (f(w, x) * 3).backward()
    assert torch.allclose(full(w.grad), 4 * once) and seen == [w.placements] * 2


def test_results_of_any_shape_and_cotangents_from_dtensor_ops(mesh):
    f, w, x = small(mesh, lambda w, x: {"rows": x @ w, "rest": w * w, "sum": w.sum(), "ids": x.argmax(-1), "n": 3})
    own, rows = full(w).requires_grad_(), full(x)
    out = f(w, x)
    assert out["n"] == 3 and not out["ids"].requires_grad and fs.spec_of(out["rest"]) == P("efsdp")
    (out["rows"].square().mean() + out["rest"].sum() + out["sum"] * 2).backward()
    ((rows @ own).square().mean() + (own * own).sum() + own.sum() * 2).backward()
    assert torch.allclose(full(w.grad), own.grad)
    w.grad = None
    f(w, x)["sum"].backward()
    assert torch.equal(full(w.grad), torch.ones(5, 4))


def test_no_grad_and_leaves_that_do_not_ask(mesh):
    f, w, x = small(mesh, lambda w, x: (x @ w).sum())
    with torch.no_grad():
        assert not f(w, x).requires_grad
    assert not f(w.detach(), x).requires_grad
    assert f(w, x).requires_grad and len(f._programs) == 2
    cut = fs.shard(lambda w, x: (x @ w.detach()).sum(), mesh)
    assert not cut(w, x).requires_grad


def test_leaves_that_a_result_does_not_depend_on_get_none(mesh):
    f = fs.shard(lambda p, x: {"a": (x @ p["a"]).sum(), "b": (x @ p["b"]).sum(), "c": p["d"].floor().sum()}, mesh)
    p = {k: fs.device_put(torch.randn(5, 4), mesh, P("efsdp")).requires_grad_() for k in "abcd"}
    out = f(p, torch.randn(6, 5))
    out["a"].backward(retain_graph=True)
    assert p["a"].grad is not None and all(p[k].grad is None for k in "bcd")
    out["c"].backward()
    assert p["d"].grad is not None and not full(p["d"].grad).any() and p["c"].grad is None, "zeros, as on one device"


def test_plain_leaves_and_rows_that_require_grad(mesh):
    f = fs.shard(lambda w, x: (x @ w).square().sum(), mesh, in_specs=(P("efsdp"), P(("efsdp", "ep"))))
    w, x = torch.randn(5, 4, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    f(w, x).backward()
    dw, dx = torch.autograd.grad((x @ w).square().sum(), (w, x))
    assert type(w.grad) is torch.Tensor and torch.allclose(w.grad, dw) and torch.allclose(x.grad, dx)
    rows = fs.device_put(x.detach(), mesh, P(("efsdp", "ep"))).requires_grad_()
    fs.shard(lambda w, x: (x @ w).square().sum(), mesh)(w, rows).backward()
    assert rows.grad.placements == rows.placements and torch.allclose(full(rows.grad), dx)
    assert torch.allclose(w.grad, 2 * dw)


def test_the_local_view(mesh):
    f = fs.shard_map(lambda x, w: fs.psum((x @ w).sin().sum(), "ep"), mesh, in_specs=(P("ep"), P()), out_specs=P())
    x, w = torch.randn(4, 3, requires_grad=True), fs.device_put(torch.randn(3, 2), mesh, P("efsdp")).requires_grad_()
    f(x, w).backward()
    want = torch.autograd.grad((x @ (own := full(w).requires_grad_())).sin().sum(), (x, own))
    assert torch.allclose(x.grad, want[0]) and torch.allclose(full(w.grad), want[1])


def test_autograd_grad_of_a_non_leaf(mesh):
    f, w, x = small(mesh, lambda w, x: (x @ w).exp().mean())
    half = w * 0.5  # DTensor's own autograd in front
    (got,) = torch.autograd.grad(f(half, x), w)
    own = full(w).requires_grad_()
    (want,) = torch.autograd.grad((full(x) @ (own * 0.5)).exp().mean(), own)
    assert torch.allclose(full(got), want)


def test_pytorchs_own_errors(mesh):
    f, w, x = small(mesh, lambda w, x: (x @ w).sin().sum())
    value = f(w, x)
    value.backward(retain_graph=True)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_what_backward_reads_may_not_change(mesh):
    square = fs.shard(lambda p, x: (p["w"] * p["w"]).sum() * x, mesh)
    w = fs.device_put(torch.randn(5, 4), mesh, P("efsdp")).requires_grad_()
    changes = {
        "an op of DTensor": lambda: w.mul_(2),
        "its block": lambda: w.to_local().mul_(2),
        "an optimizer": torch.optim.SGD([w], lr=0.1).step,
        "a sharded function": lambda: fs.shard(lambda w: w * 2, mesh, donate_argnums=0)(w),
    }
    for change in changes.values():
        value = square({"w": w}, 1.0)
        with torch.no_grad():
            w.grad = w.detach().clone()
            change()
        with pytest.raises((fs.ShardingError, RuntimeError), match=r"p\.w|inplace operation"):
            value.backward()


def test_what_is_saved_goes_through_pytorchs_hooks(mesh):
    f, w, x = small(mesh, lambda w, x: (x @ w).sin().sum())
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        value = f(w, x)
    value.backward()
    assert packed and all(type(t) is torch.Tensor for t in packed)


def test_what_is_saved_is_freed_while_backward_runs(mesh):
    p, b = placed(mesh, init(layers=4, moe=False)), fs.device_put(batch(8), mesh, P(mesh.data_axes))
    value, alive, saved = fs.shard(loss, mesh)(p, b), [], []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            alive.append(sum(not x.expired() for x in saved))
            return func(*args, **(kwargs or {}))

    program = value.grad_fn.program
    run, inputs = program.backward, len(program.lowered.halves.inputs)

    def watched(tensors, numbers, cotangents):
        saved.extend(StorageWeakRef(x.untyped_storage()) for x in tensors[inputs:])
        with Count():
            return run(tensors, numbers, cotangents)

    program.backward = watched
    value.backward()
    assert not value.grad_fn.read, "who keeps a loss keeps no batch"
    assert len(saved) > 40 and alive[0] == len(saved) and alive[len(alive) // 2] < 0.6 * len(saved) and not alive[-1]


def test_errors(mesh):
    f, w, x = small(mesh, lambda w, x: (x @ w).sin().sum())
    (g,) = torch.autograd.grad(f(w, x), w, create_graph=True)
    assert g.requires_grad
    with pytest.raises(fs.ShardingError, match="second derivative of `<lambda>` from outside.*fs.grad"):
        (g.square().sum()).backward()
    f(w, x).backward(create_graph=True)
    with pytest.raises(fs.ShardingError, match="w requires grad and is donated"):
        fs.shard(lambda w, x: w * 2, mesh, donate_argnums=0)(w, x)
    with pytest.raises(fs.ShardingError, match="w requires grad, and backend='cudagraph'"):
        fs.shard(lambda w, x: (x @ w).sum(), mesh, backend="cudagraph")(w, x)
    with pytest.raises(fs.ShardingError, match="w requires grad: a compiled program"):
        f.lower(w, x).compile()(w, x)
    with fs.disable_jit(), pytest.raises(fs.ShardingError, match="w requires grad: under `fs.disable_jit`"):
        f(w, x)
    free = torch.ones(4, requires_grad=True)
    with pytest.raises(fs.ShardingError, match="closes over a tensor that requires grad"):
        fs.shard(lambda w, x: (x @ w * free).sum(), mesh)(w, x)
    with fs.simulate(2):
        other = fs.make_mesh({"efsdp": 2})
        v = fs.device_put(torch.randn(5, 4), other, P("efsdp")).requires_grad_()
        with pytest.raises(fs.ShardingError, match="w requires grad: gradients from outside are not simulated"):
            fs.shard(lambda w: w.sum(), other)(v)


def test_a_donated_argument_beside_leaves_that_require_grad(mesh):
    f, w, x = small(mesh, lambda w, s, x: ((x @ w).sum() * s.sum(), s + 1), donate_argnums=1)
    s = fs.device_put(torch.ones(4), mesh, P("efsdp"))
    value, state = f(w, s, x)
    value.backward()
    assert torch.allclose(full(w.grad), 4 * full(x).sum(0)[:, None].expand(5, 4)) and full(state).eq(2).all()
    with pytest.raises(fs.ShardingError, match="s was donated"):
        f(w, s, x)


def test_inductor_and_a_compiled_step_agree_with_eager(mesh):
    f, w, x = small(mesh, lambda w, x: F.gelu(x @ w).square().mean())
    f(w, x).backward()
    want, w.grad = full(w.grad), None
    fs.shard(f.fn, mesh, backend="inductor")(w, x).backward()
    assert torch.allclose(full(w.grad), want, atol=1e-6)
    w.grad = None
    step = torch.compile(lambda w, x: f(w, x) * 2, backend="eager")
    step(w, x).backward()
    assert torch.allclose(full(w.grad), 2 * want)


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, foreach=False),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1, fused=True),
}


def train(fn, params, batches, make, steps=5):
    """Losses of a plain PyTorch loop, two backward calls a step."""
    optimizer, losses = make([x for x in leaves_of(params) if x.requires_grad]), []
    for _ in range(steps):
        for b in batches:
            value = fn(params, b) / len(batches)
            value.backward()
            losses.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def trajectories(mesh, names, layout, frozen=()):
    """Per optimizer the worst difference from one device: of the losses, and of the parameters at the end."""
    batches, found = [batch(8, seed=s, masked=False) for s in (1, 2)], {}
    rows = fs.device_put(batches, mesh, P(mesh.data_axes))
    f = fs.shard(loss, mesh, experts="auto" if layout == "dp2ep" else None)
    for name in names:
        own, mine = (trees.map_with_path(lambda _, x: x.clone(), init()) for _ in "ab")
        mine = fs.device_put(mine, mesh, specs(mine, layout))
        for tree in (own, mine):
            trees.map_with_path(lambda path, x: x.requires_grad_(path not in frozen), tree)
        want = train(loss, own, batches, OPTIMIZERS[name])
        got = train(f, mine, rows, OPTIMIZERS[name])
        after = trees.map_with_path(lambda _, x: fs.device_get(x.detach()), mine)
        found[name] = (relative(got, want), worst(after, trees.map_with_path(lambda _, x: x.detach(), own)))
        assert all(x.grad is None for x in leaves_of(mine))
    return found


def test_optimizers_step_as_on_one_device(mesh):
    for name, errors in trajectories(mesh, OPTIMIZERS, "dp2ep", frozen=("layers[0].qkv",)).items():
        assert max(errors) <= 1e-4, (name, errors)


# ---- real ranks ------------------------------------------------------------------------------------------------------
def work(rank, world, shape, cases):
    mesh = fs.make_mesh(shape)
    out = {case: trajectories(mesh, *case) for case in cases}
    # uneven blocks, results that DTensor's own autograd goes on with: its cotangents have placements of its own choice
    g = torch.Generator().manual_seed(0)
    w, s, x = torch.randn(5, D, generator=g), torch.randn(D, generator=g), torch.randn(8, 5, generator=g)
    f = fs.shard(lambda p, x: (x @ p[0], p[0] * p[0], p[1] * 3), mesh)
    params = [fs.device_put(w, mesh, P(("efsdp", "ep"))).requires_grad_(), fs.device_put(s, mesh).requires_grad_()]
    rows, rest, scale = f(params, fs.device_put(x, mesh, P(mesh.data_axes)))
    pending = (rows.detach() * scale).sum()  # the cotangent of `scale` is a sum over the ranks
    torch.autograd.backward([rows.square().mean(), rest.sum(), pending])
    own = [t.clone().requires_grad_() for t in (w, s)]
    rows = x @ own[0]
    (rows.square().mean() + (own[0] * own[0]).sum() + (rows.detach() * own[1] * 3).sum()).backward()
    out["dtensor"] = max(relative(fs.device_get(p.grad), q.grad) for p, q in zip(params, own, strict=True))
    return out


def check_ranks(world, shape, cases):
    for result in run_ranks(world, work, shape, cases, timeout=200):
        assert result.pop("dtensor") <= TOLERANCE
        for case, found in result.items():
            for name, errors in found.items():
                assert max(errors) <= 1e-4, (case, name, errors)


def test_two_ranks():
    check_ranks(2, {"replicate": 1, "efsdp": 1, "ep": 2}, [(("sgd", "adamw foreach"), "dp2ep", ("layers[0].qkv",))])


@pytest.mark.slow
def test_four_ranks():
    shape = {"replicate": 1, "efsdp": 2, "ep": 2}
    check_ranks(4, shape, [(("sgd foreach", "adamw", "adamw fused"), "dp2ep"), (("adamw foreach",), "fsdp")])
