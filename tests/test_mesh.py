"""make_mesh and Mesh: values, groups, fakes, and errors."""

import itertools
import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsharding import _compat
from fsharding.annotate.mesh import agree, make_mesh, mesh_of
from fsharding.errors import ShardingError

C10D = torch.ops._c10d_functional


def message(make):
    with pytest.raises(ShardingError) as error:
        make()
    return str(error.value)


# ---- one process ---------------------------------------------------------------------------------------------------
def test_values():
    mesh = make_mesh({"replicate": 2, "efsdp": 4, "tp": 2}, model_axes=("tp",), fake=True)
    assert dict(mesh.shape) == {"replicate": 2, "efsdp": 4, "tp": 2}
    assert mesh.axis_names == ("replicate", "efsdp", "tp")
    assert mesh.data_axes == ("replicate", "efsdp")
    assert (mesh.model_axes, mesh.size, mesh.fake, mesh.rank) == (("tp",), 16, True, 0)
    assert mesh.device == torch.device("cpu")
    assert mesh.device_mesh.shape == (2, 4, 2)
    assert mesh.device_mesh.mesh_dim_names == mesh.axis_names
    assert mesh.device_mesh == mesh.leaf_mesh and mesh.device_mesh is not mesh.leaf_mesh
    assert mesh_of(mesh.leaf_mesh) == mesh_of(mesh.device_mesh) == mesh
    with pytest.raises(TypeError):
        mesh.shape["efsdp"] = 3


def test_equal_and_hashable_by_value_and_survives_pickling():
    one = make_mesh({"a": 2, "b": 2}, fake=True)
    assert one == make_mesh({"a": 2, "b": 2}, fake=True)
    assert one != make_mesh({"b": 2, "a": 2}, fake=True)
    assert one != make_mesh({"a": 2, "b": 2}, fake=True, model_axes=("b",))
    assert pickle.loads(pickle.dumps(one)) == one
    assert len({one, make_mesh({"a": 2, "b": 2}, fake=True)}) == 1
    assert eval(repr(one)) == one


def test_coordinates_are_row_major_last_axis_fastest():
    mesh = make_mesh({"a": 2, "b": 3, "c": 2}, fake=True)
    for rank, place in enumerate(itertools.product(range(2), range(3), range(2))):
        assert mesh.coordinates(rank) == dict(zip("abc", place, strict=True))
    assert mesh.coordinates() == {"a": 0, "b": 0, "c": 0}


def test_group_ranks_cover_the_mesh():
    mesh = make_mesh({"a": 2, "b": 2, "c": 2}, fake=True)
    assert mesh.group_ranks(("a", "b")) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert mesh.group_ranks(("b", "a")) == mesh.group_ranks(("a", "b", "a"))
    assert mesh.group_ranks(("c",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.group_ranks(()) == [[rank] for rank in range(8)]
    assert mesh.group_ranks("abc") == [list(range(8))]
    assert (mesh.axes_size("ab"), mesh.axes_size(())) == (4, 1)
    assert mesh.sort_axes(["c", "a", "c"]) == ("a", "c")


def test_fake_mesh_of_thousands_is_quick_and_needs_no_world():
    start = time.perf_counter()
    mesh = make_mesh({"replicate": 2, "efsdp": 256, "ep": 8}, fake=True)
    sizes = [mesh.group(axes).size() for axes in (("ep",), ("efsdp", "ep"), mesh.axis_names)]
    assert time.perf_counter() - start < 0.9
    assert sizes == [8, 2048, 4096]
    assert not dist.is_initialized()


def test_aliases_resolve_on_a_fake_mesh():
    mesh = make_mesh({"efsdp": 4, "ep": 2}, fake=True)
    assert mesh.alias(("ep",)) == "fs-fake[efsdp=4,ep=2]/ep"
    assert mesh.alias(("ep", "efsdp")) == "fs-fake[efsdp=4,ep=2]/efsdp,ep"
    for _ in range(2):
        name = mesh.register_alias(("ep", "efsdp"))
        assert C10D.wait_tensor(C10D.all_gather_into_tensor(torch.ones(3), 8, name)).shape == (24,)


def test_a_fake_mesh_is_not_equal_to_a_real_one_for_dtensor():
    """DTensor caches by mesh equality: equal meshes could exchange their groups."""
    real, fake = make_mesh({"a": 1, "b": 1}), make_mesh({"a": 1, "b": 1}, fake=True)
    assert real.leaf_mesh != fake.leaf_mesh
    assert real != fake


def test_a_mesh_of_one_needs_nothing():
    mesh = make_mesh({"replicate": 1, "efsdp": 1, "ep": 1})
    assert (mesh.size, mesh.rank, mesh.fake) == (1, 0, False)
    assert not dist.is_initialized()
    x = DTensor.from_local(torch.arange(5.0), mesh.leaf_mesh, [Shard(0), Replicate(), Shard(0)], run_check=False)
    assert torch.equal(x.full_tensor(), torch.arange(5.0))
    assert (x * 2 + x).sum().full_tensor() == 30
    name = mesh.register_alias(("efsdp",))
    assert torch.equal(C10D.wait_tensor(C10D.all_gather_into_tensor(torch.arange(3.0), 1, name)), torch.arange(3.0))
    assert agree(mesh, "test", "text") == {"text": [0]}


@pytest.mark.parametrize(("axes", "words"), [
    ({}, ["no axes"]), ({"a": 0}, ['"a" has size 0', "start at 1"]), ({"a": -2}, ["size -2"]),
    ({"a": 2.0}, ["2.0", "positive int"]), ({"a": True}, ["True"]), ({"a": "2"}, ["'2'"]), ({"": 2}, ["''"]),
    ({"a b": 2}, ["'a b'"]), ({3: 2}, ["name 3"]), ([("a", 2), ("a", 2)], ["dict"])])
def test_bad_axes(axes, words):
    text = message(lambda: make_mesh(axes, fake=True))
    assert all(word in text for word in words), text


def test_bad_model_axes_and_unknown_axes():
    assert '"tp"' in message(lambda: make_mesh({"a": 2}, model_axes=("tp",), fake=True))
    assert "twice" in message(lambda: make_mesh({"a": 2}, model_axes=("a", "a"), fake=True))
    assert make_mesh({"a": 2, "tp": 2}, model_axes="tp", fake=True).model_axes == ("tp",)
    mesh = make_mesh({"efsdp": 2, "ep": 2}, fake=True)
    assert 'mean "efsdp"' in message(lambda: mesh.group(("efsd",)))


def test_world_size_errors_name_both_numbers_and_the_way_out(monkeypatch):
    text = message(lambda: make_mesh({"efsdp": 2, "ep": 2}))
    assert "needs 4 ranks" in text and "one process" in text and "--nproc-per-node 4" in text and "fake=True" in text
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    text = message(lambda: make_mesh({"efsdp": 2, "ep": 2}))
    assert "has 4 ranks" in text and "has 8" in text and "efsdp=4 or ep=4" in text
    text = message(lambda: make_mesh({"efsdp": 2, "ep": 3}))
    assert "has 6 ranks" in text and "ep=4" in text and "WORLD_SIZE" in text
    assert "has 1 ranks" in message(lambda: make_mesh({"data": 1}))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make_mesh({"data": 1}).rank == 0


def test_missing_gpu_is_an_error():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "no GPU" in message(lambda: make_mesh({"a": 1}, device="cuda"))
    assert make_mesh({"a": 2}, device="cuda", fake=True).device == torch.device("cuda")


# ---- several processes ---------------------------------------------------------------------------------------------
def groups_work(rank, world):
    created, new_group = [], dist.new_group
    dist.new_group = lambda ranks, **options: created.append(tuple(ranks)) or new_group(ranks, **options)
    mesh = make_mesh({"a": 2, "b": 2, "c": 2})
    assert mesh.rank == rank and not mesh.fake
    first = list(created)
    for axes in (("a", "b"), ("c", "a"), ("a", "b", "c"), ("b",)):
        group = mesh.group(axes)
        mine = next(ranks for ranks in mesh.group_ranks(axes) if rank in ranks)
        assert dist.get_process_group_ranks(group) == mine
        total = torch.tensor(rank)
        dist.all_reduce(total, group=group)
        assert total == sum(mine)
        name = mesh.register_alias(axes)
        assert mesh.register_alias(axes) == name and str(rank) not in name.replace("=2", "")
        gathered = C10D.wait_tensor(C10D.all_gather_into_tensor(torch.tensor([rank]), len(mine), name))
        assert gathered.tolist() == mine
    assert mesh.group("abc") is not dist.group.WORLD  # which has two workers, see below
    assert mesh.group(("b",)) is mesh.device_mesh.get_group("b")
    count = len(created)
    # the same shape again, other names, other model axes, axes of size 1: nothing new but the groups of one rank
    again = make_mesh({"a": 2, "b": 2, "c": 2}, model_axes=("c",))
    other = make_mesh({"x": 2, "y": 2, "z": 2})
    assert again.group("ab") is mesh.group("ab") is other.group("xy")
    assert len(created) == count
    flat = make_mesh({"dp": 4, "one": 1, "tp": 2})
    assert flat.group(("dp",)) is mesh.group("ab") and flat.group(("tp", "one")) is mesh.group("c")
    assert created[count:] == [(r,) for r in range(world)]
    # a user may slice and flatten device_mesh: leaf_mesh does not know
    assert mesh.device_mesh["b"].size() == 2
    mesh.device_mesh["a", "b"]._flatten("ab")
    assert "ab" in mesh.device_mesh._flatten_mapping and not mesh.leaf_mesh._flatten_mapping
    dist.new_group = new_group
    answers = agree(mesh, "test", "same"), agree(mesh, "test", f"odd {rank % 2}"), agree(mesh, "test", "same")
    return first, created, answers


def test_groups_are_created_once_by_all_ranks_in_one_order():
    results = run_ranks(8, groups_work)
    assert all(result == results[0] for result in results)
    first, created, answers = results[0]
    assert len(first) == 12 and len(created) == 12 + 2 + 2 + 1 + 8
    assert answers == ({"same": list(range(8))}, {"odd 0": [0, 2, 4, 6], "odd 1": [1, 3, 5, 7]},
                       {"same": list(range(8))})


def workers(group):
    return group._get_backend(torch.device("cpu")).options._threads


def flight_work(rank, world, seconds):
    mesh = make_mesh({"a": world})
    name = mesh.register_alias("a")
    x, end, stop = [torch.full((8,), float(rank)), torch.full((3,), float(rank))], time.monotonic() + seconds, False
    while not stop:
        for _ in range(500):
            flying = [C10D.all_gather_into_tensor_coalesced(x, world, name) for _ in range(4)]
            for out in flying:
                assert [C10D.wait_tensor(o)[-1].item() for o in out] == [world - 1] * 2
        stop = torch.tensor(float(time.monotonic() > end))
        dist.all_reduce(stop)  # all stop together
    return workers(dist.group.WORLD), workers(mesh.group("a")), workers(mesh.group("a", "other"))


@pytest.mark.parametrize("seconds", [0, pytest.param(12, marks=pytest.mark.slow)])
def test_collectives_in_flight_together_do_not_corrupt_the_heap(seconds):
    """Two workers of a gloo group free one string twice (PyTorch's, see `_compat.in_order`): on groups with two this
    ended in "malloc(): unaligned tcache chunk" within 3 to 6 seconds. Ours have one."""
    assert run_ranks(2, flight_work, seconds) == [(2, 1, 1)] * 2


class Witness:
    def __init__(self):
        self.seen = []

    def end(self):
        self.seen.append(dist.is_initialized())


def end_work(rank, world):
    kept, gone = Witness(), Witness()
    for one in (kept, gone):
        _compat.before_the_world_ends(one.end)
    seen = gone.seen
    del gone, one
    dist.barrier()
    dist.destroy_process_group()
    return kept.seen, seen


def test_what_holds_communicators_is_told_before_they_go():
    """A captured graph must: a communicator that it holds waits for it for ever. Nothing is kept alive for that."""
    assert run_ranks(2, end_work) == [([True], [])] * 2


def start_work(rank, world):
    mesh = make_mesh({"efsdp": 2, "ep": 1}, timeout_s=15)
    text = message(lambda: make_mesh({"efsdp": 4}))
    assert "has 4 ranks" in text and "running process group has 2" in text and "efsdp=2" in text, text
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.group(("efsdp",)))
    before = mesh.group(("efsdp",)), mesh.leaf_mesh
    names = dist.get_backend(), mesh.size, total.item(), mesh.device.type
    assert before[0] is dist.group.WORLD and workers(before[0]) == 1, "a world that the mesh starts is good for it"
    fake = make_mesh({"efsdp": 64}, fake=True)
    assert (dist.get_world_size(), fake.rank, fake.size) == (2, 0, 64)
    dist.barrier()
    dist.destroy_process_group()
    # the launcher's store is the same one, so the keys of a second world need a prefix
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=world)
    # all caches belong to the group that is gone; a new world starts afresh, and a fake mesh lives on
    name = fake.register_alias(("efsdp",))
    assert C10D.wait_tensor(C10D.all_gather_into_tensor(torch.ones(1), 64, name)).shape == (64,)
    mesh = make_mesh({"efsdp": 2, "ep": 1}, timeout_s=15)
    dist.all_reduce(total, group=mesh.group(("efsdp",)))
    assert mesh.group(("efsdp",)) is not before[0] and mesh.leaf_mesh is not before[1]
    return *names, total.item()


def test_launcher_environment_starts_gloo_and_a_new_world_drops_the_caches():
    assert run_ranks(2, start_work, process_group=False) == [("gloo", 2, 2.0, "cpu", 4.0)] * 2


def late_work(rank, world):
    mesh = make_mesh({"a": world})
    return message(lambda: agree(mesh, "batch", "text", timeout_s=0.5)) if rank == 0 else None


def test_a_rank_that_does_not_come_is_named():
    text = run_ranks(2, late_work)[0]
    assert "rank 1 did not come" in text and "Rank 0 has text" in text
