"""To JAX and back. JAX runs in this process, on 8 CPU devices."""

import os

import pytest
import torch

pytest.importorskip("jax", reason="needs jax (the extra `jax`)")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import collections  # noqa: E402
import dataclasses  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import fsharding as fs  # noqa: E402
from fsharding import P  # noqa: E402

bridge = fs.interop.jax
SPECS = [P(), P("a"), P(None, "b"), P(("b", "a")), P("a", "b"), P(None), P("a", None)]


def refused(match, fn):
    with pytest.raises(fs.ShardingError, match=match):
        fn()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_specs(spec):
    theirs = bridge.to_spec(spec)
    assert isinstance(theirs, PartitionSpec) and tuple(theirs) == tuple(spec) and bridge.from_spec(theirs) == spec


def test_specs_that_have_no_counterpart():
    refused("UNCONSTRAINED", lambda: bridge.from_spec(PartitionSpec(PartitionSpec.UNCONSTRAINED)))
    refused("unreduced over", lambda: bridge.from_spec(PartitionSpec("a", unreduced={"b"})))
    refused("takes a jax.sharding.PartitionSpec", lambda: bridge.from_spec(P("a")))


def test_meshes_and_shardings():
    ours = fs.make_mesh({"a": 4, "b": 2}, fake=True)
    theirs = bridge.to_mesh(ours)
    assert dict(theirs.shape) == {"a": 4, "b": 2} and [d.id for d in theirs.devices.flat] == list(range(8))
    assert bridge.from_mesh(theirs, fake=True) == ours
    sharding = bridge.to_sharding(ours, P("b", None))
    assert isinstance(sharding, NamedSharding)
    assert bridge.from_sharding(sharding) == ({"a": 4, "b": 2}, P("b", None))
    refused("has 16 ranks, but JAX has 8 devices", lambda: bridge.to_mesh(fs.make_mesh({"a": 16}, fake=True)))
    refused("takes a jax.sharding.NamedSharding", lambda: bridge.from_sharding(jnp.ones(2).sharding))
    kinds = {m.kind for m in jax.devices()[0].addressable_memories()} - {jax.devices()[0].default_memory().kind}
    for kind in kinds:
        refused("memory kind", lambda kind=kind: bridge.from_sharding(sharding.with_memory_kind(kind)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool])
def test_arrays_share_memory(dtype):
    x = torch.arange(24).reshape(4, 6).to(dtype)
    array = bridge.to_tree(x)
    assert str(array.dtype) == str(dtype).removeprefix("torch.") and np.array_equal(
        np.asarray(array), np.asarray(jnp.array(array))
    )
    back = bridge.from_tree(array)
    assert torch.equal(back, x) and back.dtype == dtype
    assert back.data_ptr() == array.unsafe_buffer_pointer()
    if dtype != torch.bool:
        assert array.unsafe_buffer_pointer() == x.data_ptr()


def test_awkward_arrays():
    for x in (torch.tensor(3.0), torch.ones(3, 4).t(), torch.ones(0, 3), torch.arange(12.0)[::2]):
        assert torch.equal(bridge.from_tree(bridge.to_tree(x)), x)
    refused("float64.*jax_enable_x64", lambda: bridge.to_tree({"a": torch.ones(2, dtype=torch.float64)}))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:  # what an equinox module is to JAX: fields that are leaves, fields that are not
    weight: jax.Array
    bias: jax.Array
    name: str = dataclasses.field(metadata={"static": True}, default="linear")


def module():
    return {"layers": [Linear(jnp.ones((2, 3)) * k, jnp.zeros(2)) for k in range(2)], "scale": 2.5}


def test_modules_by_path():
    theirs = module()
    ours = bridge.from_tree({"layers": theirs["layers"]})
    assert sorted(ours["layers"][1]) == ["bias", "weight"] and torch.equal(
        ours["layers"][1]["weight"], torch.ones(2, 3)
    )
    changed = {"layers": [{"bias": p["bias"] + 1, "weight": p["weight"] * 3} for p in ours["layers"]]}
    back = bridge.to_tree(changed, like=theirs)
    assert back["scale"] == 2.5 and back["layers"][1].name == "linear"
    assert np.array_equal(back["layers"][1].weight, np.full((2, 3), 3.0)) and np.array_equal(
        back["layers"][0].bias, [1, 1]
    )


def test_order_does_not_matter_names_do():
    flax = {"params": collections.OrderedDict(kernel=jnp.ones((3, 2)), bias=jnp.zeros(2))}
    like = {"params": {"bias": torch.empty(2, dtype=torch.bfloat16), "kernel": fs.ShapeDtype((3, 2))}}
    ours = bridge.from_tree(flax, like=like)
    assert ours["params"]["bias"].dtype == torch.bfloat16 and ours["params"]["kernel"].shape == (3, 2)
    refused(r"has no params.kernel", lambda: bridge.from_tree(flax, like={"params": {"bias": torch.empty(2)}}))
    refused(
        r"lacks params.scale",
        lambda: bridge.from_tree(flax, like={"params": {**like["params"], "scale": torch.ones(1)}}),
    )
    wrong = {"params": {**like["params"], "bias": torch.empty(3)}}
    refused(
        r"params.bias: the template has shape \(3,\), the JAX tree \(2,\)", lambda: bridge.from_tree(flax, like=wrong)
    )


def test_sharded_arrays_go_block_by_block():
    x = torch.randn(8, 4)
    with fs.simulate(8):
        mesh = fs.make_mesh({"a": 4, "b": 2})
        theirs = bridge.to_mesh(mesh)
        for spec in SPECS:
            leaf = fs.device_put(x, mesh, spec)
            array = bridge.to_tree({"x": leaf}, mesh=theirs)["x"]
            assert array.sharding.is_equivalent_to(bridge.to_sharding(theirs, spec), 2)
            assert np.array_equal(np.asarray(array), x.numpy())
            for shard, block in zip(
                sorted(array.addressable_shards, key=lambda s: s.device.id), leaf.to_local(), strict=True
            ):
                assert np.array_equal(np.asarray(shard.data), block.numpy())
            back = bridge.from_tree({"x": array}, mesh=mesh)["x"]
            assert fs.spec_of(back) == fs.spec_of(leaf) and torch.equal(back.full_tensor(), x)
            assert torch.equal(bridge.from_tree(array), x) and np.array_equal(bridge.to_tree(leaf), x.numpy())
        placed = bridge.from_tree({"x": jnp.asarray(x.numpy())}, like={"x": fs.device_put(x, mesh, P("b"))})["x"]
        assert fs.spec_of(placed) == P("b") and torch.equal(placed.full_tensor(), x)
        uneven = fs.device_put(torch.ones(6, 4), mesh, P("a"))
        refused("uneven blocks", lambda: bridge.to_tree({"x": uneven}, mesh=theirs))
        other = fs.make_mesh({"c": 8})
        refused("is sharded over the mesh", lambda: bridge.from_tree({"x": array}, mesh=other))
