"""``fs.simulate``: the code that real ranks run, in one process."""

import copy
import pickle

import pytest
import torch
from helpers import run_ranks
from programs import TOLERANCE, batch, init, loss, specs, trainer, worst

import fsharding as fs
from fsharding import P
from fsharding import tree as trees

ROWS = P(("replicate", "efsdp", "ep"))


def training(mesh, layout, steps=2):
    """A few steps of a MoE; all that users see of it, gathered."""
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.optim.adamw(1e-2, eps=1e-4))
    params = fs.device_put(init(layers=1), mesh, specs(init(layers=1), layout))
    step = fs.shard(trainer(optimizer), mesh, donate_argnums=(0, 1))
    state, rows, out = fs.shard(optimizer.init, mesh)(params), fs.device_put(batch(), mesh, ROWS), None
    first = step.lower(params, state, rows)
    for _ in range(steps):
        params, state, out = step(params, state, rows)
    moved = fs.reshard(params, mesh, P())
    assert worst(fs.device_get(moved), fs.device_get(params)) == 0
    assert worst(trees.map_with_path(lambda _, x: x.full_tensor(), params), fs.device_get(params)) == 0
    return fs.device_get((params, out)), [str(fs.spec_of(x)) for x in trees.flatten(params)[0]], first.fingerprint()


def on_ranks(rank, world):
    return training(fs.make_mesh({"replicate": 1, "efsdp": 2, "ep": 2}), "dp2ep")


def test_training_as_on_real_ranks():
    real = run_ranks(4, on_ranks)
    with fs.simulate(4):
        values, where, text = on_ranks(0, 4)
    for got, specs_, fingerprint in real:
        assert specs_ == where and fingerprint == text
        assert worst(got, values) <= TOLERANCE  # a backend sums in another order
    optimizer = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.optim.adamw(1e-2, eps=1e-4))
    params, state = init(layers=1), optimizer.init(init(layers=1))
    for _ in range(2):
        params, state, out = trainer(optimizer)(params, state, batch())
    assert worst(values, (params, out)) <= TOLERANCE


@pytest.fixture
def world():
    with fs.simulate(8) as found:
        yield found


@pytest.fixture
def mesh(world):
    return fs.make_mesh({"efsdp": 4, "ep": 2})


def test_leaves(mesh):
    x = torch.arange(90.0).reshape(10, 9)
    leaf = fs.device_put(x, mesh, P(("efsdp", "ep")))
    assert repr(leaf) == "f32[10@(efsdp,ep), 9]" == f"{leaf}" and fs.spec_of(leaf) == P(("efsdp", "ep"))
    assert [len(block) for block in leaf.to_local()] == [2, 1, 2, 1, 2, 1, 1, 0]
    assert torch.equal(leaf.full_tensor(), x) and torch.equal(fs.device_get(leaf), x)
    assert (leaf.dtype, leaf.shape, leaf.requires_grad) == (torch.float32, (10, 9), False)
    assert torch.equal((leaf * 2 + leaf).double().full_tensor(), x.double() * 3)
    assert torch.equal(torch.zeros_like(leaf).full_tensor(), x * 0)
    other = fs.reshard(leaf, mesh, P(None, "efsdp"))
    assert torch.equal(other.full_tensor(), x) and repr(other) == "f32[10, 9@efsdp]"
    for bad in (lambda: leaf.sum(), lambda: leaf @ leaf.T, lambda: leaf + other, lambda: torch.softmax(leaf, 0)):
        with pytest.raises(fs.ShardingError, match="only elementwise ops of leaves of one layout"):
            bad()


def test_init_does_not_depend_on_the_ranks(mesh):
    axes = {"w": fs.Param((10, 6)), "b": fs.Param((5,), init="ones")}
    alone = fs.init(axes, fs.make_mesh({"efsdp": 1}, fake=True), seed=3)
    assert worst(fs.device_get(fs.init(axes, mesh, P(("efsdp", "ep")), seed=3)), fs.device_get(alone)) == 0


def test_each_rank_brings_its_own_piece(world, mesh):
    made = world.each(lambda rank: {"x": torch.full((2, 3), float(rank)), "n": 4})
    leaf = fs.from_local(made, mesh, {"x": P(("efsdp", "ep")), "n": None})
    assert leaf["n"] == 4 and torch.equal(leaf["x"].full_tensor()[::2, 0], torch.arange(8.0))
    assert fs.device_get(fs.from_local(torch.ones(2), mesh, P())).sum() == 2
    with pytest.raises(fs.ShardingError, match="world.each"):
        fs.from_local(torch.ones(2, 3), mesh, P("ep"))
    with pytest.raises(fs.ShardingError, match=r"rank 0 has f32\[1\], rank 1 has f32\[2\]"):
        fs.from_local(world.each(lambda rank: torch.ones(rank + 1)), mesh, P("ep"))
    with pytest.raises(fs.ShardingError, match="rank 3 returns"):
        world.each(lambda rank: [torch.ones(2)] * (1 if rank == 3 else 2))


def test_donated_leaves_are_taken_over(mesh):
    leaf = fs.device_put(torch.arange(16.0), mesh, P(("efsdp", "ep")))
    held = leaf.to_local()
    new = fs.shard(lambda p: p * 2 + 1, mesh, donate_argnums=0)(leaf)
    assert [a.data_ptr() == b.data_ptr() for a, b in zip(held, new.to_local(), strict=True)] == [True] * 8
    with pytest.raises(fs.ShardingError, match="was donated"):
        fs.device_get(leaf)


def test_without_jit(mesh):
    params, rows = fs.device_put(init(), mesh, P()), fs.device_put(batch(), mesh, P(("efsdp", "ep")))
    with fs.disable_jit():
        assert worst(fs.shard(loss, mesh)(params, rows), loss(init(), batch())) <= TOLERANCE


def test_a_failing_rank_names_the_line(mesh):
    ids = fs.device_put(torch.full((8, 2), 9), mesh, P("efsdp"))
    with pytest.raises(fs.ShardingError, match="expert ids from 9 to 9"):
        fs.shard(lambda ids: fs.moe.route(ids, 4).group_sizes, mesh, stored_argnums=())(ids)
    rows = fs.device_put(torch.full((8, 2), 9), mesh, P("efsdp"))
    with pytest.raises(fs.ShardingError, match="test_simulate.py:.*index_select|test_simulate.py:.*embedding"):
        fs.shard(lambda r: torch.nn.functional.embedding(r, torch.ones(4, 2)), mesh, stored_argnums=())(rows)


def test_what_is_refused():
    for ranks in (0, -1, 2.0, True):
        with pytest.raises(fs.ShardingError, match="at least 1"):
            fs.simulate(ranks)
    with fs.simulate(8):
        with pytest.raises(fs.ShardingError, match=r"has 4 ranks, but fs.simulate has 8.*enter fs.simulate\(4\)"):
            fs.make_mesh({"a": 4})
        with pytest.raises(fs.ShardingError, match="runs on the CPU"):
            fs.make_mesh({"a": 8}, device="cuda")
        with pytest.raises(fs.ShardingError, match="inside of fs.simulate"), fs.simulate(2):
            pass
        mesh = fs.make_mesh({"a": 8})
        fake = fs.make_mesh({"a": 64}, fake=True)  # planning goes on as ever
        leaf, f = fs.device_put(torch.ones(8), mesh, P("a")), fs.shard(lambda x: x * 2, mesh)
        f(leaf)
        assert fs.shard(lambda x: x * 2, fake).lower(fs.ShapeDtype((64,), spec=P("a"))).as_text()
    with fs.simulate(8):
        for use in (
            lambda: fs.device_get(leaf),
            lambda: f(leaf),
            lambda: leaf * 2,
            lambda: leaf.to_local(),
            lambda: leaf.full_tensor(),
            lambda: fs.device_put(torch.ones(8), mesh, P("a")),
            lambda: fs.reshard(leaf, mesh, P()),
            lambda: f(torch.ones(8)),
            lambda: fs.init({"w": fs.Param((8,))}, mesh, P("a")),
            lambda: fs.device_put(leaf, fs.make_mesh({"a": 8}), P("a")),
        ):
            with pytest.raises(fs.ShardingError, match="belongs to an `fs.simulate` block that has ended"):
                use()
    assert repr(leaf) == "f32[8@a]"


def test_copies_of_leaves(mesh):
    leaf = fs.device_put(torch.arange(8.0), mesh, P("efsdp"))
    assert torch.equal(leaf.clone().full_tensor(), torch.arange(8.0))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(fs.ShardingError, match="device_get"):
            copied(leaf)
