"""The promise: on every mesh and layout, loss and every gradient leaf equal one device.

All factorisations of 1, 2, 4 and 8 ranks run in lockstep in this process (the same local programs that ranks run, with
NaN in every padding); ``test_ranks.py`` runs a sample on real processes.
"""

import pytest
import torch
from programs import (
    TOLERANCE,
    batch,
    factorisations,
    init,
    loss,
    simulate,
    specs,
    summed_loss,
    trainer,
    worst,
)

import fsharding as fs
from fsharding import P
from fsharding import tree as trees

ROWS = P(("replicate", "efsdp", "ep"))
MESHES = [m for n in (1, 2, 4, 8) for m in factorisations(n)]
SAMPLE = [m for m in MESHES if tuple(m.values()) in {(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2), (1, 1, 8), (1, 8, 1)}]


def mesh_id(m):
    return "x".join(map(str, m.values()))


def meshes():
    return [pytest.param(m, id=mesh_id(m), marks=[] if m in SAMPLE else [pytest.mark.slow]) for m in MESHES]


def reference(fn, *args):
    return fn(*args)


@pytest.mark.parametrize("shape", meshes())
@pytest.mark.parametrize("moe", [True, False], ids=["moe", "dense"])
def test_loss_and_every_gradient(shape, moe):
    params, b = init(moe=moe), batch()
    mesh = fs.make_mesh(shape, fake=True)
    fn = fs.value_and_grad(loss)
    want = fn(params, b)
    for layout in ("dp2ep", "fsdp", "hsdp") if moe else ("fsdp", "hsdp"):
        experts = "auto" if layout == "dp2ep" else None
        got, low = simulate(fs.shard(fn, mesh, experts=experts), (params, b), (specs(params, layout), ROWS))
        assert worst(got, want) <= TOLERANCE, layout
        assert trees.flatten_with_paths(got)[0] == trees.flatten_with_paths(want)[0]


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "dp2ep", "legacy_ep"])
def test_one_function_under_four_layouts(layout):
    params, b = init(), batch()
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)
    experts = "auto" if layout in ("dp2ep", "legacy_ep") else None
    fn = fs.value_and_grad(loss)
    got, _ = simulate(fs.shard(fn, mesh, experts=experts), (params, b), (specs(params, layout), ROWS))
    assert worst(got, fn(params, b)) <= TOLERANCE


def test_experts_without_tokens():
    """All tokens choose the same two experts: the others' gradients are exact zeros, on the ranks that hold them."""
    params, b = init(), batch()
    for layer in params["layers"]:
        layer["router"] = torch.zeros_like(layer["router"])
        layer["router"][:, :2] = 5.0
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 4}, fake=True)
    fn = fs.value_and_grad(loss)
    want = fn(params, b)
    got, _ = simulate(fs.shard(fn, mesh), (params, b), (specs(params, "dp2ep"), ROWS))
    assert worst(got, want) <= TOLERANCE
    counts = sum((g != 0).flatten(1).any(1).sum().item() for g in (got[1]["layers"][0]["w_in"],))
    assert counts < 8


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("shape", [p for p in meshes() if p.values[0]["ep"] * p.values[0]["efsdp"] > 2])
def test_trajectories(shape, name):
    """Five steps with clipping stay with one device (SGD shows errors of scale, which Adam hides).

    In float32 rounding alone moves single gradient leaves of one device by 1e-5 to 1e-4 from float64 here, so losses
    and norms are held to 1e-5 there, and every gradient, parameter and state leaf to 1e-9 in float64.
    """
    for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.float64, 1e-9)):
        rule = fs.optim.sgd(0.1, momentum=0.9) if name == "sgd" else fs.optim.adamw(1e-2, eps=1e-4)
        optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), rule)
        step, b = trainer(optimizer), batch()
        params = trees.map_with_path(lambda _, x, d=dtype: x.to(d), init(layers=1))
        state = optimizer.init(params)
        mesh = fs.make_mesh(shape, fake=True)
        where = (specs(params, "dp2ep"), _state_specs(state, params, specs(params, "dp2ep")), ROWS)
        sharded = fs.shard(step, mesh, stored_argnums=(0, 1))
        ours, theirs, low = (params, state), (params, state), None
        for _ in range(5):
            (*ours, got), low = simulate(sharded, (*ours, b), where, low)
            *theirs, want = step(*theirs, b)
            exact = dtype == torch.float64
            keys = ("loss", "norm", "grads") if exact else ("loss", "norm")
            assert worst([got[k] for k in keys], [want[k] for k in keys]) <= tolerance
            assert not exact or worst(ours, theirs) <= tolerance


def _state_specs(state, params, where):
    paths, leaves, _ = trees.flatten_with_paths(params)
    flat = trees.broadcast_prefix(where, params, "specs")
    known = dict(zip(paths, flat, strict=True))

    def one(path, x):
        return next((s for p, s in known.items() if path.endswith("." + p) and x.ndim), P())

    return trees.map_with_path(one, state)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_one_normalisation_for_micro_batches_and_ranks(n):
    """Ragged labels, a rank without any: the sum over all over the weight of all, whatever the split."""
    params, b = init(), batch(rows=16)
    want = fs.accumulate(summed_loss, 1)(params, b)
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)
    got, _ = simulate(fs.shard(fs.accumulate(summed_loss, n), mesh), (params, b), (specs(params, "dp2ep"), ROWS))
    assert worst(got, want) <= TOLERANCE
    assert worst(fs.accumulate(summed_loss, n)(params, b), want) <= TOLERANCE


def test_a_batch_without_valid_tokens_gives_zeros():
    params, b = init(), batch()
    b["y"][:] = -100
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)
    (value, grads), _ = simulate(
        fs.shard(fs.accumulate(summed_loss, 2), mesh), (params, b), (specs(params, "dp2ep"), ROWS)
    )
    assert value.item() == 0
    assert all(not g.any() for g in trees.flatten_with_paths(grads)[1])


def test_the_same_layout_twice_is_bitwise_equal():
    params, b = init(), batch()
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}, fake=True)
    sharded = fs.shard(fs.value_and_grad(loss), mesh)
    one, two = (simulate(sharded, (params, b), (specs(params, "dp2ep"), ROWS))[0] for _ in range(2))
    assert worst(one, two) == 0.0
