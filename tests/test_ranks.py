"""The same programs on real processes (gloo), a sample: what lockstep cannot show is that bytes really move, that
memory is really taken over, and that an error ends all ranks. One spawn a world size."""

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from programs import TOLERANCE, V, batch, init, loss, specs, summed_loss, trainer, worst

import fsharding as fs
from fsharding import P
from fsharding import tree as trees

ROWS = P(("replicate", "efsdp", "ep"))


def raised(fn, *args):
    """The message of the ShardingError that a call raises."""
    try:
        fn(*args)
    except fs.ShardingError as error:
        return str(error)
    return "no error"


def step_on(mesh, layout, precision=None, steps=3):
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.optim.adamw(1e-2, eps=1e-4))
    step, params, b = trainer(optimizer), init(), batch()
    state, theirs = optimizer.init(params), []
    p = params
    for _ in range(steps):
        p, state, want = step(p, state, b)
        theirs.append(want)
    p = fs.device_put(params, mesh, specs(params, layout))
    s = fs.shard(optimizer.init, mesh)(p)
    sharded = fs.shard(step, mesh, donate_argnums=(0, 1), precision=precision)
    rows = fs.device_put(b, mesh, ROWS)
    pointers, worst_seen = addresses(p), 0.0
    for want in theirs:
        p, s, got = sharded(p, s, rows)
        got = fs.device_get(got)
        keys = ["loss"] if precision else ["loss", "norm"]  # bfloat16 routes some tokens elsewhere, which a norm shows
        worst_seen = max(worst_seen, worst([got[k] for k in keys], [want[k] for k in keys]))
    moved = [a != b for a, b, even in zip(pointers, addresses(p), evenly(p), strict=True) if even]
    return worst_seen, any(moved), spec_texts(p) == spec_texts(fs.device_put(params, mesh, specs(params, layout)))


def addresses(tree):
    return [x.to_local().data_ptr() for x in trees.flatten_with_paths(tree)[1]]


def evenly(tree):
    return [all(n % 8 == 0 for n in x.shape) for x in trees.flatten_with_paths(tree)[1]]


def spec_texts(tree):
    return [str(fs.spec_of(x)) for x in trees.flatten_with_paths(tree)[1]]


def gradients(mesh, layout, experts="auto"):
    params, b = init(), batch()
    want = fs.value_and_grad(loss)(params, b)
    args = fs.device_put(params, mesh, specs(params, layout)), fs.device_put(b, mesh, ROWS)
    got = fs.shard(fs.value_and_grad(loss), mesh, experts=experts)(*args)
    assert [fs.spec_of(g) for g in trees.flatten_with_paths(got[1])[1]] == [
        fs.spec_of(x) for x in trees.flatten_with_paths(args[0])[1]
    ]
    full = trees.map_with_path(lambda _, g: g.full_tensor(), got[1])
    assert worst(full, want[1]) <= TOLERANCE
    plain = fs.grad(fs.shard(loss, mesh, experts=experts))(*args)  # the gradient of the sharded is the sharded gradient
    assert worst(fs.device_get(plain), want[1]) <= TOLERANCE
    return worst(fs.device_get(got), want)


def two(rank, world):
    out = {}
    for shape in (
        {"replicate": 1, "efsdp": 1, "ep": 2},
        {"replicate": 1, "efsdp": 2, "ep": 1},
        {"replicate": 2, "efsdp": 1, "ep": 1},
    ):
        out[str(shape)] = gradients(fs.make_mesh(shape), "dp2ep")
    mesh = fs.make_mesh({"efsdp": 2})
    out["faults"] = faults(rank, mesh)
    return out


def faults(rank, mesh):
    """Mistakes that need processes to show."""
    out = {}
    w = fs.device_put(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), mesh, P("efsdp"))
    x = fs.from_local(torch.full((2, 5), float(rank)), mesh, P("efsdp"))
    f = fs.shard(lambda w, x: (x @ w).sum(), mesh, donate_argnums=())
    out["value"] = float(f(w, x))

    # plain tensors are global values, cut by in_specs
    whole = torch.cat([torch.full((2, 5), 0.0), torch.full((2, 5), 1.0)])
    plain = fs.shard(lambda w, x: (x @ w).sum(), mesh, in_specs=(P("efsdp"), P("efsdp")))
    out["plain"] = float(plain(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), whole))

    # different programs on different ranks: an error on all of them instead of a hang
    scale = 2.0 if rank else 3.0
    out["programs"] = raised(fs.shard(lambda w, x: (x @ w).sum() * scale, mesh), w, x)

    # closures are read by reference at each call
    c = torch.ones(4)
    g = fs.shard(lambda w, x: ((x @ w) * c).sum(), mesh)
    before = float(g(w, x))
    c.fill_(2.0)
    out["closure"] = float(g(w, x)) / before

    # a donated leaf is gone
    def keep(w):
        return w * 2

    h = fs.shard(keep, mesh, donate_argnums=(0,))
    new = h(w)
    out["donated"] = raised(h, w)
    out["new"] = float(new.full_tensor().sum())
    twice = {"a": new, "b": new}
    out["tied"] = raised(fs.shard(lambda p: p, mesh), twice)
    other = fs.make_mesh({"ep": 2})
    out["other mesh"] = raised(fs.shard(lambda w: w, other), new)
    out["requires grad"] = raised(h, new.detach().requires_grad_())
    return out


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, two, timeout=150)


def test_two_ranks(two_ranks):
    for result in two_ranks:
        assert all(v <= TOLERANCE for k, v in result.items() if k != "faults")


def test_faults_on_two_ranks(two_ranks):
    for result in two_ranks:
        faults = result["faults"]
        w = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        x = torch.cat([torch.full((2, 5), 0.0), torch.full((2, 5), 1.0)])
        assert faults["value"] == pytest.approx((x @ w).sum().item(), rel=1e-5)
        assert faults["plain"] == pytest.approx((x @ w).sum().item(), rel=1e-5)
        assert "traced different programs" in faults["programs"] and "ranks [1]" in faults["programs"]
        assert faults["closure"] == pytest.approx(2.0)
        assert "w was donated to `keep`" in faults["donated"]
        assert faults["new"] == pytest.approx(2 * w.sum().item(), rel=1e-5)
        assert "p.a and p.b are one tensor" in faults["tied"]
        assert "w lives on" in faults["other mesh"] and "fs.reshard" in faults["other mesh"]
        assert "w requires grad and is donated" in faults["requires grad"]


def four(rank, world):
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2})
    out = {"gradients": {}, "steps": {}}
    for layout in ("dp2ep", "legacy_ep", "fsdp", "hsdp"):
        out["gradients"][layout] = gradients(mesh, layout, "auto" if "ep" in layout else None)
    out["steps"]["dp2ep"] = step_on(mesh, "dp2ep")
    out["bf16"] = step_on(mesh, "dp2ep", precision=fs.Precision("bf16"))[0]

    params, b = init(), batch(rows=16)
    args = fs.device_put(params, mesh, specs(params, "dp2ep")), fs.device_put(b, mesh, ROWS)
    want = fs.accumulate(summed_loss, 1)(params, b)
    out["accumulate"] = worst(fs.device_get(fs.shard(fs.accumulate(summed_loss, 2), mesh)(*args)), want)
    with fs.disable_jit():
        sharded = fs.shard(fs.value_and_grad(loss), mesh)
        got = sharded(*args)
    out["disabled"] = worst(fs.device_get(got), fs.value_and_grad(loss)(params, b))
    out["disabled specs"] = spec_texts(got[1]) == spec_texts(args[0])
    return out


def bad_ids(rank, world):
    """Rank 1's inputs name a token past the vocabulary: every rank raises, the others name rank 1."""
    mesh = fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2})
    params, b = init(layers=1), batch()
    local = trees.map_with_path(lambda _, x: x[2 * rank : 2 * rank + 2].clone(), b)
    if rank == 1:
        local["x"][0, 0] = V + 3
    args = fs.device_put(params, mesh, specs(params, "dp2ep")), fs.from_local(local, mesh, ROWS)
    message = raised(fs.shard(loss, mesh), *args)
    if rank == 1:
        dist.destroy_process_group()  # as when the process ends
    return message


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(4, four, timeout=200)


def test_four_ranks_every_layout(four_ranks):
    for result in four_ranks:
        assert set(result["gradients"]) == {"dp2ep", "legacy_ep", "fsdp", "hsdp"}
        assert all(v <= TOLERANCE for v in result["gradients"].values()), result["gradients"]
        assert result["accumulate"] <= TOLERANCE
        assert result["disabled"] <= TOLERANCE and result["disabled specs"]


def test_four_ranks_steps_in_place(four_ranks):
    for result in four_ranks:
        error, moved, same = result["steps"]["dp2ep"]
        assert error <= TOLERANCE and not moved and same
        assert 1e-5 < result["bf16"] < 0.05  # half precision is on, and near


def test_an_id_past_the_vocabulary_ends_all_ranks():
    messages = run_ranks(4, bad_ids, timeout=60, survives=False)
    assert "programs.py" in messages[1] and "embedding" in messages[1]
    for rank in (0, 2, 3):
        assert "rank 1 failed" in messages[rank], messages[rank]


def eight(rank, world):
    mesh = fs.make_mesh({"replicate": 2, "efsdp": 2, "ep": 2})
    return {"gradients": gradients(mesh, "dp2ep"), "steps": step_on(mesh, "dp2ep", steps=2)}


@pytest.mark.slow
def test_eight_ranks():
    for result in run_ranks(8, eight, timeout=280):
        assert result["gradients"] <= TOLERANCE
        error, moved, same = result["steps"]
        assert error <= TOLERANCE and not moved and same
