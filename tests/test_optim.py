"""Optimizers against ``torch.optim`` on one device, traced, and on DTensor leaves over four ranks."""

from __future__ import annotations

import math
from collections import OrderedDict

import optree
import pytest
import torch
from helpers import run_ranks
from torch.fx.experimental.proxy_tensor import make_fx

import fsharding as fs
import fsharding.optim as optim
from fsharding import P
from fsharding.errors import ShardingError

CLOSE = dict(rtol=2e-6, atol=1e-8)


def tree(seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    def make(*shape):
        return torch.randn(shape, generator=g).to(dtype)
    return {"embed": make(7, 4), "layers": [{"w": make(4, 5), "b": make(5)}, {"w": make(5, 3), "b": None}], "s": make()}


def assert_trees(a, b, **tolerance):
    optree.tree_map(lambda x, y: torch.testing.assert_close(x, y, **(tolerance or CLOSE)), a, b)


def steps(transform, params, count=6):
    state = transform.init(params)
    for i in range(count):
        updates, state = transform.update(tree(i + 1), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def torch_steps(make, params, count=6, after=lambda opt, i: None):
    params = optree.tree_map(lambda x: x.clone().requires_grad_(), params)
    leaves = optree.tree_leaves(params)
    opt = make(leaves)
    for i in range(count):
        after(opt, i)
        for p, g in zip(leaves, optree.tree_leaves(tree(i + 1)), strict=True):
            p.grad = g
        opt.step()
    return optree.tree_map(torch.Tensor.detach, params)


@pytest.mark.parametrize("hyper", [{}, dict(b1=0.0, b2=0.95, eps=1e-3, weight_decay=0.3), dict(weight_decay=0.0)])
def test_adamw_is_torch_adamw(hyper):
    ours, state = steps(optim.adamw(3e-2, **hyper), tree())
    betas = (hyper.get("b1", 0.9), hyper.get("b2", 0.999))
    rest = {k: v for k, v in hyper.items() if k in ("eps", "weight_decay")}
    assert_trees(ours, torch_steps(lambda p: torch.optim.AdamW(p, 3e-2, betas=betas, **rest), tree()))
    assert state.step.dtype == torch.int64 and state.step.item() == 6


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torch_sgd(momentum, nesterov):
    ours, _ = steps(optim.sgd(0.1, momentum, nesterov), tree())
    def make(p):
        return torch.optim.SGD(p, 0.1, momentum=momentum, nesterov=nesterov)
    assert_trees(ours, torch_steps(make, tree()))


def test_a_schedule_counts_from_zero_as_lambda_lr_does():
    schedule = optim.warmup_cosine(0.1, 2, 5, end=0.01)
    expected = [0.0, 0.05, 0.1, 0.01 + 0.09 * 0.75, 0.01 + 0.09 * 0.25, 0.01, 0.01]
    got = [schedule(torch.tensor(i)).item() for i in range(7)]
    assert got == pytest.approx(expected)

    def set_rate(opt, i):
        opt.param_groups[0]["lr"] = expected[i]

    ours, _ = steps(optim.adamw(schedule), tree())
    assert_trees(ours, torch_steps(lambda p: torch.optim.AdamW(p, 1.0), tree(), after=set_rate))


def test_plain_schedules():
    line = optim.linear(1.0, 0.0, 4)
    assert [line(torch.tensor(i)).item() for i in (0, 1, 4, 9)] == pytest.approx([1.0, 0.75, 0.0, 0.0])
    assert optim.constant(0.5)(torch.tensor(3)).item() == 0.5
    assert optim.warmup_cosine(1.0, 0, 2)(torch.tensor(0)).item() == 1.0
    for bad in (lambda: optim.linear(1.0, 0.0, 0), lambda: optim.warmup_cosine(1.0, 5, 5)):
        with pytest.raises(ShardingError, match="must be"):
            bad()


def test_mask_as_tree_and_as_function():
    params = tree()
    mask = optree.tree_map(lambda x: x.ndim >= 2, params)
    zeros = optree.tree_map(torch.zeros_like, params)
    for given in (mask, lambda p: optree.tree_map(lambda x: x.ndim >= 2, p)):
        opt = optim.adamw(0.1, weight_decay=0.5, mask=given)
        updates, _ = opt.update(zeros, opt.init(params), params)
        expected = optree.tree_map(lambda x, m: -0.05 * x if m else 0 * x, params, mask)
        assert_trees(updates, expected)
    prefix = optim.adamw(0.1, weight_decay=0.5, mask={"embed": True, "layers": False, "s": False})
    updates, _ = prefix.update(zeros, prefix.init(params), params)
    assert updates["embed"].abs().max() > 0 and updates["layers"][0]["w"].abs().max() == 0
    with pytest.raises(ShardingError, match=r"no entry for embed"):
        bad = optim.adamw(0.1, mask={"layers": mask["layers"], "s": True})
        bad.update(zeros, bad.init(params), params)


def test_global_norm_and_clip():
    grads = tree(3)
    flat = torch.cat([x.reshape(-1) for x in optree.tree_leaves(grads)])
    norm = optim.global_norm(grads)
    torch.testing.assert_close(norm, flat.norm())
    for limit in (norm.item() / 3, norm.item() * 3):
        clip = optim.clip_by_global_norm(limit)
        clipped, state = clip.update(grads, clip.init(grads))
        assert torch.equal(state.norm, norm)
        assert optim.global_norm(clipped).item() == pytest.approx(min(norm.item(), limit), rel=1e-6)
    assert_trees(clipped, grads, rtol=0, atol=0)
    assert optim.global_norm({"a": None}).item() == 0.0


def test_zero_gradients_stay_finite():
    params, zeros = tree(), optree.tree_map(torch.zeros_like, tree())
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, weight_decay=0.0))
    updates, _ = opt.update(zeros, opt.init(params), params)
    assert_trees(updates, zeros, rtol=0, atol=0)


def test_low_precision_gradients_are_summed_in_float32():
    grads = {"a": torch.full((4096,), 2.0**-5, dtype=torch.bfloat16), "b": torch.ones(1, dtype=torch.bfloat16)}
    assert optim.global_norm(grads).item() == pytest.approx(math.sqrt(5.0), rel=1e-6)
    clipped, _ = optim.clip_by_global_norm(1.0).update(grads, ())
    assert clipped["a"].dtype == torch.bfloat16


def test_chain_equals_its_parts():
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, 0.9))
    params, grads = tree(), tree(9)
    updates, state = opt.update(grads, opt.init(params), params)
    clipped, _ = optim.clip_by_global_norm(0.5).update(grads, ())
    assert_trees(updates, optree.tree_map(lambda g: -0.1 * g, clipped))
    assert isinstance(state, tuple) and len(state) == 2 and state[1].step.item() == 1
    with pytest.raises(ShardingError, match="tuple of 2 states"):
        opt.update(grads, (), params)


def test_bf16_parameters_with_float32_state():
    params = tree(dtype=torch.bfloat16)
    opt = optim.adamw(1e-2, state_dtype=torch.float32)
    state = opt.init(params)
    updates, state = opt.update(tree(1, torch.bfloat16), state, params)
    new = optim.apply_updates(params, updates)
    assert {x.dtype for x in optree.tree_leaves(state.m)} == {torch.float32}
    assert {x.dtype for x in optree.tree_leaves(new)} == {torch.bfloat16}
    wide = optree.tree_map(torch.Tensor.float, params)
    expected, _ = opt.update(optree.tree_map(torch.Tensor.float, tree(1, torch.bfloat16)), opt.init(wide), wide)
    assert_trees(new, optree.tree_map(lambda p, u: (p + u).bfloat16(), wide, expected), rtol=0, atol=0)


def test_inputs_are_not_changed():
    params, grads = tree(), tree(1)
    opt = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1))
    state = opt.init(params)
    before = optree.tree_map(torch.clone, (params, grads, state))
    opt.update(grads, state, params)
    assert_trees((params, grads, state), before, rtol=0, atol=0)


def test_trees_are_matched_by_path():
    params, grads = tree(), tree(1)
    backwards = OrderedDict((k, grads[k]) for k in ("s", "layers", "embed"))
    opt = optim.adamw(0.1)
    a, _ = opt.update(grads, opt.init(params), params)
    b, _ = opt.update(backwards, opt.init(params), params)
    assert_trees(a, b, rtol=0, atol=0)


def lacking(path):
    grads = tree(1)
    grads["layers"][0][path] = None
    return grads


@pytest.mark.parametrize(
    "grads, message",
    [
        (lacking("w"), r"nothing at layers\[0\]\.w"),
        ({**tree(1), "head": torch.ones(2)}, r"has head, which params has not"),
        ({**tree(1), "embed": torch.ones(7)}, r"grads\.embed has shape \(7,\)"),
        ({**tree(1), "s": 1.0}, r"grads\.s is a float"),
        ({**tree(1), "s": torch.ones((), dtype=torch.int64)}, r"grads\.s has dtype torch.int64"),
    ],
)
def test_mismatches_name_the_leaf(grads, message):
    opt, params = optim.adamw(0.1), tree()
    with pytest.raises(ShardingError, match=message):
        opt.update(grads, opt.init(params), params)
    with pytest.raises(ShardingError, match=message):
        optim.sgd(0.1).update(grads, optim.sgd(0.1).init(params), params)


def test_bad_hyperparameters_and_states():
    for bad in (
        lambda: optim.adamw(-1.0),
        lambda: optim.adamw(0.1, b1=1.0),
        lambda: optim.adamw(0.1, weight_decay=-1.0),
        lambda: optim.sgd(0.1, nesterov=True),
        lambda: optim.clip_by_global_norm(0.0),
        lambda: optim.adamw(0.1).update(tree(), (), tree()),
        lambda: optim.adamw(0.1).update(tree(), optim.adamw(0.1).init(tree())),
    ):
        with pytest.raises(ShardingError):
            bad()


def test_traces_to_functional_ops_without_host_reads():
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(0.1, 2, 9)))

    def step(params, state, grads):
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    params, grads = tree(), tree(1)
    args = (params, opt.init(params), grads)
    leaves, spec = optree.tree_flatten(args)
    def flat(*x):
        return optree.tree_leaves(step(*optree.tree_unflatten(spec, x)))
    graph = make_fx(flat, tracing_mode="fake")(*leaves)
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    targets = [t for t in targets if hasattr(t, "_schema")]
    assert targets and not any(t._schema.is_mutable for t in targets)
    assert torch.ops.aten._local_scalar_dense.default not in targets
    later = (params, (args[1][0], args[1][1]._replace(step=torch.tensor(5))), tree(2))
    for given in (args, later):
        got = graph(*optree.tree_leaves(given))
        for x, y in zip(got, optree.tree_leaves(step(*given)), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


# ---- DTensor leaves, outside of `shard` ----
def placed_tree(values, meshes):
    """One kind of placement a leaf: split, on a second mesh, replicated, hybrid, with empty shards, and plain."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line, square = meshes
    how = {
        "line": (line, [Shard(0)]),
        "square": (square, [Shard(1), Shard(0)]),
        "hybrid": (square, [Replicate(), Shard(0)]),
        "copies": (line, [Replicate()]),
        "short": (line, [Shard(0)]),
        "uneven": (square, [Shard(0), Replicate()]),
    }
    return {
        k: distribute_tensor(v, *how[k], src_data_rank=None) if k in how else v.clone() for k, v in values.items()
    }


def many(seed):
    g = torch.Generator().manual_seed(seed)
    shapes = dict(line=(8, 3), square=(4, 6), hybrid=(6, 2), copies=(3,), short=(2, 2), uneven=(5, 3), plain=(3,))
    return {k: torch.randn(*s, generator=g) for k, s in shapes.items()}


def full(tree):
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in tree.items()}


def check_dtensors(rank, world):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    meshes = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    transform = optim.chain(optim.clip_by_global_norm(1.5), optim.adamw(0.05, weight_decay=0.1))
    params, oracle = placed_tree(many(0), meshes), many(0)
    state, oracle_state = transform.init(params), transform.init(oracle)
    for i in range(5):
        grads = placed_tree(many(i + 1), meshes)
        torch.testing.assert_close(optim.global_norm(grads), optim.global_norm(many(i + 1)), rtol=1e-6, atol=0)
        updates, state = transform.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        updates, oracle_state = transform.update(many(i + 1), oracle_state, oracle)
        oracle = optim.apply_updates(oracle, updates)
    assert_trees(full(params), oracle, rtol=1e-5, atol=1e-7)
    assert_trees(full(state[1].v), oracle_state[1].v, rtol=1e-5, atol=1e-9)
    for key, like in placed_tree(many(0), meshes).items():
        if isinstance(like, DTensor):
            assert params[key].placements == state[1].m[key].placements == like.placements
            assert params[key].to_local().shape == like.to_local().shape

    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda *a, **k: (calls.append(a[0].shape), real(*a, **k))[1]
    optim.global_norm([placed_tree(many(i), meshes) for i in range(10)])
    dist.all_reduce = real
    assert len(calls) == 3, calls  # one for the line, two for the square, however many leaves

    pending = DTensor.from_local(torch.ones(2), meshes[0], [Partial()])
    for bad in (
        lambda: optim.global_norm({"a": pending}),
        lambda: optim.apply_updates({"a": distribute_tensor(torch.ones(4), meshes[0], [Replicate()])}, {"a": pending}),
        lambda: optim.apply_updates(params, {**params, "line": torch.ones(8, 3)}),
    ):
        with pytest.raises(ShardingError):
            bad()


def check_our_leaves(rank, world):
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2})
    specs = dict(line=P(("ep", "efsdp")), square=P("ep", "efsdp"), hybrid=P("efsdp"), copies=P(),
                 short=P(("efsdp", "ep")), uneven=P(("efsdp", "ep")), plain=P("ep"))
    transform = optim.chain(optim.clip_by_global_norm(1.5), optim.adamw(0.05))
    params, oracle = fs.device_put(many(0), mesh, specs), many(0)
    state, oracle_state = transform.init(params), transform.init(oracle)
    for i in range(3):
        grads = fs.device_put(many(i + 1), mesh, specs)
        updates, state = transform.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        updates, oracle_state = transform.update(many(i + 1), oracle_state, oracle)
        oracle = optim.apply_updates(oracle, updates)
        torch.testing.assert_close(state[0].norm, oracle_state[0].norm, rtol=1e-6, atol=0)
    assert_trees(fs.device_get((params, state[1].m)), (oracle, oracle_state[1].m), rtol=1e-5, atol=1e-7)
    assert all(x.placements == params[k].placements for k, x in state[1].v.items())


def check_inside_shard(rank, world, kind):
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2})
    specs = {"w": P(("efsdp", "ep")), "uneven": P("efsdp"), "short": P(("efsdp", "ep")), "whole": P(), "none": None}
    g = torch.Generator().manual_seed(0)
    shapes = {"w": (6, 8), "uneven": (5,), "short": (2,), "whole": (3,)}
    params = {k: torch.randn(s, generator=g) for k, s in shapes.items()} | {"none": None}
    rows = torch.randn(8, 6, generator=g)
    core = {"adamw": optim.adamw(optim.warmup_cosine(0.1, 2, 6)), "sgd": optim.sgd(0.1, 0.9, nesterov=True)}[kind]
    transform = optim.chain(optim.clip_by_global_norm(0.5), core)

    def loss(p, x):
        y = torch.tanh(x @ p["w"])
        return (y[:, :5] * p["uneven"]).pow(2).mean() + (y[:, 5:] * p["whole"]).mean() + (y[:, :2] * p["short"]).sum()

    def step(p, state, x):
        value, grads = fs.value_and_grad(loss)(p, x)
        updates, state = transform.update(grads, state, p)
        return optim.apply_updates(p, updates), state, value

    placed = fs.device_put(params, mesh, specs)
    x = fs.from_local(rows[2 * rank : 2 * rank + 2].clone(), mesh, P(mesh.data_axes))
    sharded = fs.shard(step, mesh, donate_argnums=(0, 1))
    state, oracle_state = transform.init(placed), transform.init(params)
    collectives = sharded.lower(placed, state, x).collectives()
    for _ in range(5):
        placed, state, value = sharded(placed, state, x)
        params, oracle_state, expected = step(params, oracle_state, rows)
        torch.testing.assert_close(fs.device_get(value), expected, rtol=1e-5, atol=1e-7)
    assert_trees(fs.device_get((placed, state)), (params, oracle_state), rtol=1e-5, atol=1e-6)
    moments = state[1].m if kind == "adamw" else state[1].momentum
    assert all(fs.spec_of(moments[k]) == fs.spec_of(placed[k]) for k in shapes)
    # the norm is all that the update sends: one all-reduce for each set of axes
    sent = [(c.kind, c.axes) for c in collectives if c.phase == "update"]
    assert sorted(sent) == [("all_reduce", ("efsdp",)), ("all_reduce", ("efsdp", "ep"))], sent


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_inside_shard_with_donation(kind):
    run_ranks(4, check_inside_shard, kind)


def test_leaves_of_our_own_meshes_out_of_order_and_uneven():
    run_ranks(4, check_our_leaves)


def test_dtensor_leaves_on_two_meshes_beside_plain_ones():
    run_ranks(4, check_dtensors)
