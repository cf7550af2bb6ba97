"""device_put, from_local, device_get, reshard: in one process, on fake meshes, and over gloo ranks.

Values are index tensors, so that a misplaced element names itself.
"""

import copy
import math
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import run_ranks
from test_spec import all_specs, blocks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

from fsharding.annotate import place
from fsharding.annotate.mesh import make_mesh
from fsharding.annotate.param import ShapeDtype
from fsharding.annotate.place import (
    block_of,
    describe,
    device_get,
    device_put,
    dims_of,
    from_local,
    reshard,
    spec_of,
    wrap_local,
)
from fsharding.annotate.spec import P
from fsharding.errors import ShardingError


def index(*shape, dtype=torch.float32):
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


def message(make):
    with pytest.raises(ShardingError) as error:
        make()
    return str(error.value)


# ---- one rank ------------------------------------------------------------------------------------------------------
def test_a_mesh_of_one_round_trips():
    mesh = make_mesh({"efsdp": 1, "ep": 1})
    tree = {"w": index(5, 3), "s": index(), "n": 3, "f": 1.5, "none": None, "ids": torch.arange(4)}
    specs = {"w": P(("ep", "efsdp")), "s": P(), "n": None, "f": P(), "none": P(), "ids": P("ep")}
    placed = device_put(tree, mesh, specs)
    assert (placed["n"], placed["f"], placed["none"]) == (3, 1.5, None)
    assert isinstance(placed["s"], DTensor) and spec_of(placed["s"]) == P()
    assert placed["w"].device_mesh is mesh.leaf_mesh
    assert torch.equal(placed["w"].full_tensor(), tree["w"])
    moved = reshard(placed, mesh, P())
    for got in (device_get(placed), device_get(moved), device_get(tree)):
        assert got.keys() == tree.keys()
        assert all(torch.equal(got[key], tree[key]) for key in ("w", "s", "ids"))
    assert spec_of(moved["w"]) == P() and device_get(moved)["n"] == 3
    assert device_get(placed)["w"].data_ptr() != placed["w"].to_local().data_ptr()


def test_specs_are_prefixes():
    mesh = make_mesh({"a": 2, "b": 2}, fake=True)
    tree = {"x": [index(4, 2), index(8)], "y": index(4)}
    placed = device_put(tree, mesh, {"x": P("a"), "y": None})
    assert [spec_of(leaf) for leaf in (*placed["x"], placed["y"])] == [P("a"), P("a"), P()]
    assert spec_of(device_put(index(4), mesh, P(("a", "b"))).detach()) == P(("a", "b"))


def test_shards_are_copies_that_free_the_full_leaf():
    mesh = make_mesh({"a": 4}, fake=True)
    full = index(8, 6)
    ref = weakref.ref(full)
    for spec in (P("a"), P(None, "a"), P()):
        placed = device_put(full, mesh, spec)
        local = placed.to_local()
        assert local.is_contiguous() and local.untyped_storage().nbytes() == local.numel() * 4
        assert local.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
        assert placed.stride() == (6, 1) and placed.shape == (8, 6)
    transposed = device_put(full.T, mesh, P("a"))
    assert transposed.stride() == (8, 1) and transposed.to_local().is_contiguous()
    del full
    assert ref() is None


def test_requires_grad_is_kept_and_dtypes_too():
    mesh = make_mesh({"a": 2}, fake=True)
    placed = device_put({"w": torch.nn.Parameter(index(4)), "b": torch.ones(4, dtype=torch.bool)}, mesh, P("a"))
    assert placed["w"].requires_grad and placed["w"].is_leaf and not placed["b"].requires_grad
    assert placed["b"].dtype == torch.bool


def test_a_tied_tensor_stays_tied():
    mesh = make_mesh({"a": 2}, fake=True)
    w = index(4)
    placed = device_put({"embed": w, "head": w}, mesh, P("a"))
    assert placed["embed"] is placed["head"]
    text = message(lambda: device_put({"embed": w, "head": w}, mesh, {"embed": P("a"), "head": P()}))
    assert "embed" in text and "head" in text and "clone" in text


def test_placed_leaves_pass_or_point_to_reshard():
    mesh, other = make_mesh({"a": 2, "b": 2}, fake=True), make_mesh({"a": 4}, fake=True)
    w = device_put(index(4, 4), mesh, P("a"))
    assert device_put(w, mesh, P("a", None)) is w and reshard(w, mesh, P("a")) is w
    text = message(lambda: device_put({"w": w}, mesh, P("b")))
    assert "w is already sharded" in text and 'P("b")' in text and "reshard" in text and "f32[4@a, 4]" in text
    assert "reshard" in message(lambda: device_put(w, other, P("a")))
    assert "over the same ranks" in message(lambda: reshard(w, make_mesh({"a": 8}, fake=True), P("a")))
    # the same value on the user's own DeviceMesh object comes home to the private one, uncopied
    theirs = DTensor.from_local(w.to_local(), mesh.device_mesh, w.placements, run_check=False)
    mine = device_put(theirs, mesh, P("a"))
    assert mine.device_mesh is mesh.leaf_mesh and mine.to_local().data_ptr() == w.to_local().data_ptr()


@pytest.mark.parametrize(("tree", "specs", "words"), [
    ({"w": index(4)}, P("x"), ["w", '"x"', "a, b, tp"]), ({"w": index(4)}, P(None, "a"), ["w", "2 entries"]),
    ({"w": 3}, P("a"), ["w", "0 dims", "P()"]), ({"w": index()}, P("a"), ["w", "P()"]),
    ({"w": "text"}, P(), ["w is a str", "tensors, numbers or None"]), ({"w": np.ones(3)}, P(), ["from_numpy"]),
    ({"w": index(5)}, P("tp"), ["Dim 0 of w has size 5", "tp=2", "model axis", "4 or 6"]),
    ({"w": index(5)}, P(("b", "a")), ["w has size 5", "mesh order", '("a", "b")']),
    ({"w": index(4)}, {"v": P()}, ["no entry for w"]), ({"w": index(4)}, {"w": "a"}, ['Write P("a")'])])
def test_device_put_refuses(tree, specs, words):
    mesh = make_mesh({"a": 2, "b": 2, "tp": 2}, model_axes=("tp",), fake=True)
    text = message(lambda: device_put(tree, mesh, specs))
    assert all(word in text for word in words), text


def test_fake_meshes_of_many_ranks_have_no_values_to_give():
    mesh = make_mesh({"a": 4}, fake=True)
    placed = device_put({"w": index(4), "r": index(3)}, mesh, {"w": P("a"), "r": P()})
    assert torch.equal(device_get(placed["r"]), index(3))
    for act in (lambda: device_get(placed), lambda: reshard(placed, mesh, P())):
        text = message(act)
        assert "of w" in text and "no processes" in text
    assert from_local(index(3, 2), mesh, P("a")).shape == (12, 2)


def test_describe():
    mesh = make_mesh({"efsdp": 2, "ep": 2}, fake=True)
    assert describe(device_put(index(64, 8), mesh, P(("ep", "efsdp")))) == "f32[64@(ep,efsdp), 8]"
    assert describe(device_put(index(4, 4, dtype=torch.bfloat16), mesh, P(None, "ep"))) == "bf16[4, 4@ep]"
    assert describe(torch.ones(3, dtype=torch.int64)) == "i64[3]"
    assert describe(ShapeDtype((4, 2), "float16", P("ep"))) == "f16[4@ep, 2]"
    assert (describe(torch.tensor(True)), describe(3)) == ("bool[]", "3")


def test_spec_of_refuses_what_no_p_says():
    mesh = make_mesh({"a": 2}, fake=True)
    pending = DTensor.from_local(torch.ones(2), mesh.leaf_mesh, [Partial()], run_check=False)
    assert "pending sum" in message(lambda: spec_of(pending))
    assert dims_of(device_put(index(4, 2), mesh, P(None, "a"))) == ((), ("a",))


def test_a_leaf_with_a_wrong_global_shape_is_refused():
    mesh = make_mesh({"a": 1})
    wrong = DTensor.from_local(torch.ones(2), mesh.leaf_mesh, [Shard(0)], run_check=False, shape=(5,), stride=(1,))
    text = message(lambda: device_get({"w": wrong}))
    assert "w is f32[5@a]" in text and "(5,)" in text and "(2,)" in text


@pytest.mark.parametrize("axes", [{"replicate": 2, "efsdp": 2, "ep": 2}, {"replicate": 2, "efsdp": 4, "ep": 8},
                                  {"replicate": 2, "efsdp": 32, "ep": 8}])
def test_blocks_on_8_64_and_512_ranks_cover_each_element_once_a_replica(axes):
    mesh = make_mesh(axes, fake=True)
    cases = [((96, 10), P(("efsdp", "ep"))), ((512, 4), P(("ep", "efsdp"))), ((8, 32, 3), P("ep", "efsdp")),
             ((5, 7), P(("efsdp", "ep"))), ((3,), P(("replicate", "efsdp", "ep"))), ((6, 9), P(None, "efsdp")),
             ((4, 4), P())]
    for shape, spec in cases:
        full = index(*shape, dtype=torch.int64)
        dims = dims_of(device_put(full, mesh, spec))
        largest = math.prod(place.padded_shape(shape, dims, mesh.shape))
        count = torch.zeros(math.prod(shape), dtype=torch.int64)
        sizes = []
        for rank in range(mesh.size):
            block = block_of(full, mesh, dims, rank)
            count.index_add_(0, block.reshape(-1), torch.ones(block.numel(), dtype=torch.int64))
            sizes.append(block.numel())
        copies = mesh.size // mesh.axes_size(axis for axes in dims for axis in axes)
        assert (count == copies).all(), (shape, spec)
        assert max(sizes) == sizes[0] == largest
        assert sum(sizes) == copies * full.numel()
        assert device_put(full, mesh, spec).to_local().numel() == sizes[0]


# ---- several ranks -------------------------------------------------------------------------------------------------
def ordered(spec, mesh):
    order = mesh.axis_names
    return all(list(entry) == sorted(entry, key=order.index) for entry in spec if isinstance(entry, tuple))


def legal(shape, spec, mesh):
    """Out-of-order tuples must divide."""
    for size, entry in zip(shape, spec, strict=False):
        axes = tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry or ()) if mesh.shape[axis] > 1)
        if size % mesh.axes_size(axes) and not ordered(P(axes), mesh):
            return False
    return True


def check_value(full, spec, mesh, rank):
    placed = device_put({"w": full}, mesh, {"w": spec})["w"]
    want = blocks(full.numpy(), spec, dict(mesh.shape))[rank]
    assert placed.shape == full.shape and placed.stride() == full.contiguous().stride()
    assert placed.to_local().is_contiguous() and (placed.to_local().numpy() == want).all()
    assert torch.equal(device_get(placed), full), (spec, full.shape)
    assert torch.equal(placed.full_tensor(), full), (spec, full.shape)
    return placed


def values_work(rank, world, axes, flatten, every):
    mesh = make_mesh(axes)
    if flatten:  # what breaks DTensor's own gather of uneven dims (pytorch#194457)
        mesh.device_mesh._flatten("flat")
        theirs = distribute_tensor(index(5, 3), mesh.device_mesh, [Shard(0)] * len(axes), src_data_rank=None)
        theirs.full_tensor(), theirs * 2  # fill DTensor's caches with the flattened mesh
    names, shapes, count = mesh.axis_names, [(5, 3), (3,), (6, 2), (7,), (9, 4), (8, 24), (1, 1), (0, 3)], 0
    for shape in shapes:
        for spec in all_specs(len(shape), names)[::every]:
            if legal(shape, spec, mesh):
                placed = check_value(index(*shape), spec, mesh, rank)
                assert torch.equal(device_get(placed * 2), index(*shape) * 2)
                count += 1
            else:
                assert "mesh order" in message(lambda spec=spec, shape=shape: device_put(index(*shape), mesh, spec))
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int16, torch.float64):
        full = (index(5, 3) % 3).to(dtype)
        assert torch.equal(device_get(device_put(full, mesh, P(names))), full)
    return count


def reshard_work(rank, world, axes, other_axes):
    mesh, other, count = make_mesh(axes), make_mesh(other_axes), 0
    for shape in [(6, 4), (5, 3), (9,), (0, 2)]:
        full = index(*shape)
        specs = [spec for spec in all_specs(len(shape), mesh.axis_names) if legal(shape, spec, mesh)]
        targets = [(mesh, spec) for spec in specs[::3]] + [
            (other, spec) for spec in all_specs(len(shape), other.axis_names) if legal(shape, spec, other)]
        for spec in specs[::2 if world < 8 else 5]:
            placed = device_put(full, mesh, spec)
            for to, target in targets:
                moved = reshard({"w": placed}, to, {"w": target})["w"]
                want = blocks(full.numpy(), target, dict(to.shape))[rank]
                local = moved.to_local()
                assert (local.numpy() == want).all() and local.shape == want.shape, (shape, spec, target)
                assert moved.device_mesh is to.leaf_mesh and local.is_contiguous()
                assert local.untyped_storage().nbytes() == local.numel() * 4 or moved is placed
                count += 1
    mixed = {"b": torch.ones(4, dtype=torch.bfloat16), "i": torch.arange(7), "n": 3, "none": None}
    specs = {key: P(mesh.axis_names[0]) if key in "bi" else P() for key in mixed}
    moved = reshard(device_put(mixed, mesh, specs), mesh, P())
    assert torch.equal(device_get(moved)["i"], mixed["i"]) and moved["n"] == 3
    return count


def bytes_work(rank, world):
    """Resharding moves overlaps only, and a purely local change moves nothing."""
    mesh, sent, real = make_mesh({"a": 2, "b": 2}), [], dist.all_to_all_single
    dist.all_to_all_single = lambda out, x, *rest, **kw: sent.append(x.numel()) or real(out, x, *rest, **kw)
    full = index(8, 8)
    replicated = device_put(full, mesh, P())
    halves = reshard(replicated, mesh, P("a"))
    quarters = reshard(halves, mesh, P(("a", "b")))
    assert sent == []
    turned = reshard(quarters, mesh, P(None, ("a", "b")))
    assert sum(sent) == 12 * 4  # 16 elements a rank, of which 4 stay
    reshard(turned, mesh, P())
    assert sent[1] == 3 * 16 * 4
    sent.clear()
    reshard(halves, mesh, P())  # each half is on two ranks, which share the work of serving the others
    return sum(sent)


def local_work(rank, world):
    mesh = make_mesh({"dp": 2, "one": 1, "ep": 2})
    spec = P(mesh.data_axes)
    batch = {"x": index(3, 2) + 100 * rank, "y": torch.full((1,), rank), "step": 7}
    placed = from_local(batch, mesh, {"x": spec, "y": spec, "step": P()})
    assert placed["x"].shape == (12, 2) and placed["step"] == 7
    assert torch.equal(device_get(placed)["x"], torch.cat([index(3, 2) + 100 * r for r in range(world)]))
    assert placed["y"].full_tensor().tolist() == [0, 1, 2, 3]
    assert placed["x"].to_local().data_ptr() == batch["x"].data_ptr()
    swapped = from_local(torch.tensor([rank]), mesh, P(("ep", "dp")))
    assert device_get(swapped).tolist() == [0, 2, 1, 3]
    columns = from_local(torch.full((2, 1), rank), mesh, P("dp", "ep"))
    assert device_get(columns).tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    odd = torch.float64 if rank else torch.float32
    texts = [message(lambda: from_local({"a": {"x": torch.ones(3 - rank % 2, 2)}}, mesh, spec)),
             message(lambda: from_local({"x": torch.ones(2, dtype=odd)}, mesh, spec)),
             message(lambda: from_local([1.0, *[torch.ones(1)] * (rank + 1)], mesh, P())),
             message(lambda: from_local({"x": placed["x"]}, mesh, spec))]
    # after the errors all ranks are still in step
    dist.barrier()
    assert from_local(torch.ones(2), mesh, spec).shape == (8,)
    return texts


def foreign_work(rank, world):
    """DTensors of other makers: read, refused by name, or taken in when the mesh is ours by value."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = make_mesh({"a": 2, "b": 2})
    twin = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    strange = init_device_mesh("cpu", (4,), mesh_dim_names=("z",))
    full = index(5, 3)
    one = distribute_tensor(full, twin, [Shard(0), Shard(0)], src_data_rank=None)
    twin._flatten("both")
    assert torch.equal(device_get(one), full)
    assert spec_of(reshard(one, mesh, P("b"))) == P("b")
    two = distribute_tensor(full, strange, [Shard(0)], src_data_rank=None)
    assert torch.equal(device_get({"x": two})["x"], full) and spec_of(two) == P("z")
    assert "which make_mesh did not make" in message(lambda: reshard({"x": two}, mesh, P()))
    assert torch.equal(device_get(copy.deepcopy(device_put(full, mesh, P(("a", "b"))))), full)
    partial = DTensor.from_local(torch.ones(2), strange, [Partial()], run_check=False)
    assert device_get(partial).tolist() == [4.0, 4.0]
    # an optimizer steps our leaves in place, and they stay right and stay ours
    leaf = device_put(torch.nn.Parameter(full.clone()), mesh, P(("a", "b")))
    leaf.grad = device_put(torch.ones(5, 3), mesh, P(("a", "b")))
    torch.optim.SGD([leaf], lr=1.0).step()
    assert torch.equal(leaf.full_tensor(), full - 1) and torch.equal(device_get(leaf), full - 1)
    # explicit shape and stride: no rank infers the global size from its own block
    five = wrap_local(torch.full((2 if rank == 0 else 1,), rank), mesh, (("a", "b"),), (5,))
    return tuple(five.shape), five.stride(), [str(Replicate())]


@pytest.mark.parametrize(("axes", "flatten"), [
    ({"a": 2, "b": 2}, True), ({"a": 2, "b": 2}, False), ({"a": 1, "b": 2}, False), ({"a": 2, "b": 1}, True)])
def test_values_on_small_meshes(axes, flatten):
    world = math.prod(axes.values())
    counts = run_ranks(world, values_work, axes, flatten, 1 if flatten else 2)
    assert min(counts) == max(counts) > 30


def test_values_on_8_ranks():
    counts = run_ranks(8, values_work, {"a": 2, "b": 2, "c": 2}, True, 17)
    assert min(counts) == max(counts) > 15


@pytest.mark.parametrize(("axes", "other"), [({"a": 2, "b": 2}, {"x": 4}), ({"a": 2, "one": 1}, {"p": 1, "q": 2}),
                                             ({"a": 4, "b": 2}, {"b": 2, "a": 2, "c": 2})])
def test_reshard_any_to_any(axes, other):
    counts = run_ranks(math.prod(axes.values()), reshard_work, axes, other)
    assert min(counts) == max(counts) > 30


def test_reshard_moves_overlaps_only():
    assert sum(run_ranks(4, bytes_work)) == 4 * 32 * 4  # every rank lacks one half


def test_from_local_and_its_errors_are_the_same_on_all_ranks():
    results = run_ranks(4, local_work)
    assert all(result == results[0] for result in results)
    shape, dtype, structure, placed = results[0]
    assert "a.x" in shape and "rank 0 has f32[3, 2]" in shape and "rank 1 has f32[2, 2]" in shape and "pad" in shape
    assert "f64" in dtype and "x" in dtype
    assert "different trees" in structure and "[2]" in structure
    assert "x is a DTensor already" in placed and "to_local" in placed


def test_foreign_dtensors_and_torch_optimizers():
    results = run_ranks(4, foreign_work)
    assert all(result[:2] == ((5,), (1,)) for result in results)


def test_files_of_leaves_hold_nothing_of_ours(tmp_path):
    """So that torch.load, which refuses unknown classes, reads them anywhere."""
    mesh = make_mesh({"a": 1})
    torch.save({"w": device_put(index(4, 2), mesh, P("a"))}, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert torch.equal(device_get(loaded)["w"], index(4, 2)) and spec_of(loaded["w"]) == P("a")
    assert device_put(loaded["w"], mesh, P("a")).device_mesh is mesh.leaf_mesh


def test_placing_fake_tensors():
    mesh = make_mesh({"a": 4}, fake=True)
    with FakeTensorMode() as mode:
        placed = device_put({"w": mode.from_tensor(index(8, 2))}, mesh, P("a"))["w"]
        assert placed.shape == (8, 2) and placed.to_local().shape == (2, 2)
