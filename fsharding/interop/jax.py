"""To JAX and back: specs, meshes, named shardings, and trees of arrays (the extra ``jax``).

Arrays travel by DLPack, without a copy where both sides allow it; sharded ones go block by block. Trees are matched by
key path, never by position: ``params["layers"][0]["w"]``, a flax dict and an equinox module's ``.layers[0].w`` are one
path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsharding import tree as trees
from fsharding.annotate.mesh import Mesh, make_mesh
from fsharding.annotate.place import device_get, device_put, dims_of, spec_of, wrap_blocks
from fsharding.annotate.simulate import SimulatedTensor, blocks_of
from fsharding.annotate.spec import P, local_slices
from fsharding.errors import ShardingError

__all__ = ["from_mesh", "from_sharding", "from_spec", "from_tree", "to_mesh", "to_sharding", "to_spec", "to_tree"]


def _jax():
    try:
        import jax
    except ImportError as error:
        raise ShardingError("fs.interop.jax needs JAX: install the extra, `pip install fsharding[jax]`.") from error
    return jax


# ---- specs, meshes, shardings ----------------------------------------------------------------------------------------
def to_spec(spec: P) -> Any:
    """``jax.sharding.PartitionSpec`` of a ``P``, entry by entry."""
    return _jax().sharding.PartitionSpec(*spec)


def from_spec(spec: Any) -> P:
    """``P`` of a ``jax.sharding.PartitionSpec``.

    Raises ShardingError for ``UNCONSTRAINED`` entries and for unreduced or reduced axes, which a ``P`` cannot say.
    """
    jax = _jax()
    if not isinstance(spec, jax.sharding.PartitionSpec):
        raise ShardingError(f"from_spec takes a jax.sharding.PartitionSpec, got {type(spec).__name__}.")
    for kind in ("unreduced", "reduced"):
        if getattr(spec, kind, None):
            raise ShardingError(f"{spec} is {kind} over {tuple(getattr(spec, kind))}, which a P cannot say: sum first.")
    if any(entry is jax.sharding.PartitionSpec.UNCONSTRAINED for entry in spec):
        raise ShardingError(f"{spec} leaves a dim UNCONSTRAINED, which a P cannot: name its axes, or None.")
    return P(*(tuple(entry) if isinstance(entry, list) else entry for entry in spec))


def to_mesh(mesh: Mesh, devices: Sequence[Any] | None = None) -> Any:
    """A ``jax.sharding.Mesh`` with the axes of a mesh: rank r is ``devices[r]``, by default JAX's first devices.

    Raises ShardingError if there are fewer devices than ranks.
    """
    jax, devices = _jax(), list(devices) if devices is not None else None
    devices = jax.devices()[: mesh.size] if devices is None else devices
    if len(devices) != mesh.size:
        raise ShardingError(f"{mesh!r} has {mesh.size} ranks, but JAX has {len(devices)} devices for them.")
    import numpy

    return jax.sharding.Mesh(numpy.array(devices, dtype=object).reshape(mesh.sizes), mesh.axis_names)


def from_mesh(mesh: Any, *, model_axes: Sequence[str] = (), fake: bool = False) -> Mesh:
    """``make_mesh`` with the axes and sizes of a ``jax.sharding.Mesh`` (or ``AbstractMesh``); ranks are numbered
    row-major, whatever devices it names. Raises as ``make_mesh``."""
    return make_mesh(dict(mesh.shape), model_axes=model_axes, fake=fake)


def to_sharding(mesh: Any, spec: P) -> Any:
    """``jax.sharding.NamedSharding`` of a mesh (ours or JAX's) and a ``P``."""
    return _jax().sharding.NamedSharding(to_mesh(mesh) if isinstance(mesh, Mesh) else mesh, to_spec(spec))


def from_sharding(sharding: Any) -> tuple[dict[str, int], P]:
    """Axis sizes and ``P`` of a ``jax.sharding.NamedSharding``.

    Raises ShardingError for other shardings and for a memory kind other than the device's own.
    """
    jax = _jax()
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise ShardingError(f"from_sharding takes a jax.sharding.NamedSharding, got {type(sharding).__name__}.")
    kind = sharding.memory_kind
    usual = next(iter(sharding.device_set)).default_memory().kind
    if kind is not None and kind != usual:
        raise ShardingError(
            f"the sharding asks for the memory kind {kind!r}; a P says where values lie on devices, in "
            f"{usual!r}. Move the array there first."
        )
    return dict(sharding.mesh.shape), from_spec(sharding.spec)


# ---- trees -----------------------------------------------------------------------------------------------------------
def to_tree(tree: Any, like: Any = None, mesh: Any = None) -> Any:
    """A tree of tensors as one of JAX arrays.

    Args:
        tree: tensors, numbers and None; placed leaves become their full values.
        like: a JAX tree (a flax dict, an equinox module, shapes): the result has its structure, leaves are matched by
            key path, and shapes must agree. What is no array in it stays as it is.
        mesh: a ``jax.sharding.Mesh`` (see :func:`to_mesh`): placed leaves become arrays sharded over it as they are.

    Plain tensors share their memory with the result where DLPack can: do not write into them afterwards.

    Raises ShardingError, with the key path, for leaves that do not match and for uneven blocks under ``mesh``.
    """
    paths, leaves, treedef = trees.flatten_with_paths(tree)
    arrays = [
        _to_array(path, x, mesh) if isinstance(x, torch.Tensor) else x for path, x in zip(paths, leaves, strict=True)
    ]
    if like is None:
        return trees.unflatten(treedef, arrays)
    jax, by_path = _jax(), dict(zip(paths, arrays, strict=True))
    entries, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted = [(_path(keys), x) for keys, x in entries]
    _compare({p: x for p, x in wanted if _is_array(x)}, by_path, "the JAX tree", "the tensors")
    return jax.tree_util.tree_unflatten(structure, [by_path[p] if _is_array(x) else x for p, x in wanted])


def from_tree(tree: Any, like: Any = None, mesh: Mesh | None = None) -> Any:
    """A tree of JAX arrays as one of tensors.

    Args:
        tree: any JAX pytree. Modules and other classes become dicts of their fields; leaves that are no arrays are left
            out of those.
        like: a tree of tensors, ``Param`` or ``ShapeDtype``: the result has its structure, leaves are matched by key
            path, shapes must agree, values take its dtypes, and where its leaf is placed the result is placed alike.
        mesh: arrays with a NamedSharding become placed leaves of the same spec on this mesh, block by block.

    Arrays share their memory with the result where DLPack can: JAX takes them for constant, so do not write into them.

    Raises ShardingError, with the key path, for leaves that do not match.
    """
    entries, _ = _jax().tree_util.tree_flatten_with_path(tree)
    arrays = {_path(keys): _to_tensor(_path(keys), x, mesh) for keys, x in entries if _is_array(x)}
    if like is None:
        return _nested([(keys, arrays[_path(keys)]) for keys, x in entries if _is_array(x)])
    paths, leaves, treedef = trees.flatten_with_paths(like)
    _compare(dict(zip(paths, leaves, strict=True)), arrays, "the template", "the JAX tree")
    rows = zip(paths, leaves, strict=True)
    return trees.unflatten(treedef, [_placed_like(path, arrays[path], x) for path, x in rows])


def _placed_like(path, value, template):
    if isinstance(template, DTensor):
        from fsharding.annotate.mesh import mesh_of

        full = device_get(value) if isinstance(value, DTensor) else value
        return device_put(full.to(template.dtype), mesh_of(template.device_mesh), spec_of(template))
    return value.to(template.dtype)


def _compare(wanted: dict, given: dict, first: str, second: str) -> None:
    missing, extra = [p for p in wanted if p not in given], [p for p in given if p not in wanted]
    if missing or extra:
        said = [f"{second} lack{'s' if 'tree' in second else ''} {_some(missing)}"] if missing else []
        said += [f"{first} has no {_some(extra)}"] if extra else []
        raise ShardingError(f"the trees do not match by key path: {'; '.join(said)}.")
    for path, x in wanted.items():
        if tuple(x.shape) != tuple(given[path].shape):
            raise ShardingError(f"{path}: {first} has shape {tuple(x.shape)}, {second} {tuple(given[path].shape)}.")


def _some(paths) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def _is_array(x) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _path(keys) -> str:
    """A JAX key path as ours reads: fields and dict keys alike as ``.name``."""
    names = map(_name, keys)
    parts = [f".{n}" if isinstance(n, str) and n.isidentifier() else f"[{n!r}]" for n in names]
    return "".join(parts).removeprefix(".")


def _name(key):
    """Field, dict key or position: one step of a JAX key path."""
    return next(getattr(key, kind) for kind in ("name", "key", "idx") if hasattr(key, kind))


def _nested(rows) -> Any:
    """Dicts, and lists where the keys are positions."""
    if len(rows) == 1 and not rows[0][0]:
        return rows[0][1]
    groups: dict[Any, list] = {}
    for (head, *rest), x in rows:
        groups.setdefault((hasattr(head, "idx"), _name(head)), []).append((tuple(rest), x))
    if groups and all(position for position, _ in groups):
        return [_nested(part) for _, part in sorted(groups.items(), key=lambda item: item[0][1])]
    return {name: _nested(part) for (_, name), part in groups.items()}


# ---- arrays ----------------------------------------------------------------------------------------------------------
def _to_array(path: str, x: torch.Tensor, mesh: Any):
    if not isinstance(x, DTensor):
        return _by_dlpack(path, x)
    if mesh is None or not isinstance(x, SimulatedTensor):
        full = _by_dlpack(path, device_get(x))
        return full if mesh is None else _jax().device_put(full, to_sharding(mesh, spec_of(x)))
    jax, blocks = _jax(), blocks_of(x)
    if len({tuple(block.shape) for block in blocks}) > 1:
        raise ShardingError(f"{path} has uneven blocks over {spec_of(x)}, which JAX arrays cannot: pass mesh=None.")
    pieces = [jax.device_put(_by_dlpack(path, b), d) for b, d in zip(blocks, mesh.devices.flat, strict=True)]
    return jax.make_array_from_single_device_arrays(tuple(x.shape), to_sharding(mesh, spec_of(x)), pieces)


def _by_dlpack(path: str, x: torch.Tensor):
    jax = _jax()
    if x.dtype in (torch.float64, torch.int64, torch.complex128) and not jax.config.jax_enable_x64:
        raise ShardingError(
            f"{path or 'the value'} is {x.dtype}, and JAX runs without 64 bits: it would be rounded. Cast "
            'it, or `jax.config.update("jax_enable_x64", True)`.'
        )
    x = x.detach().contiguous()
    return jax.numpy.asarray(x.numpy()) if not x.numel() else jax.dlpack.from_dlpack(x)


def _to_tensor(path: str, x: Any, mesh: Mesh | None) -> torch.Tensor:
    jax = _jax()
    if isinstance(x, jax.Array) and mesh is not None and isinstance(x.sharding, jax.sharding.NamedSharding):
        return _by_blocks(path, x, mesh)
    if isinstance(x, jax.Array) and len(x.devices()) > 1:
        if not x.is_fully_addressable:
            raise ShardingError(f"{path} is sharded over other processes: pass mesh=, so that its blocks stay apart.")
        x = jax.device_put(x, next(iter(x.devices())))
    return _tensor(x)


def _tensor(x: Any) -> torch.Tensor:
    if not hasattr(x, "__dlpack__"):
        x = _jax().numpy.asarray(x)
    return torch.from_dlpack(x) if x.size else torch.from_dlpack(x.copy()).clone()


def _by_blocks(path: str, x: Any, mesh: Mesh) -> DTensor:
    sizes, spec = from_sharding(x.sharding)
    if sizes != dict(mesh.shape):
        raise ShardingError(f"{path} is sharded over the mesh {sizes}, not over {mesh!r}.")
    dims = tuple(() if e is None else (e,) if isinstance(e, str) else e for e in spec)
    dims += ((),) * (x.ndim - len(dims))
    held = {_ends(shard.index, x.shape): shard.data for shard in x.addressable_shards}

    def block(rank: int) -> torch.Tensor:
        where = local_slices(x.shape, dims, mesh.shape, mesh.coordinates(rank))
        found = held.get(_ends(where, x.shape))
        if found is None:
            raise ShardingError(f"{path}: rank {rank}'s block is not on this process's JAX devices.")
        return _tensor(found)

    leaf = wrap_blocks(block, mesh, dims, x.shape)
    assert dims_of(leaf) == dims or mesh.size == 1
    return leaf


def _ends(index, shape):
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
