"""Values on a mesh: from plain tensors to DTensor leaves and back, and from any spec to any other.

All leaves that we make are DTensors on ``mesh.leaf_mesh`` with explicit global shape and contiguous strides. Bytes
move by our own code on our own groups: DTensor's multi-axis redistribute is not trusted for uneven dims.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from .. import _compat
from .. import tree as trees
from ..errors import ShardingError
from . import worlds
from .blocks import BlockLayout, as_bytes, exchange_blocks, keep_overlap
from .mesh import Mesh, agree, mesh_of
from .simulate import PerRank, SimulatedTensor, blocks_of, simulated
from .spec import (
    Dims,
    P,
    axes_of,
    check_sizes,
    from_placements,
    inside,
    local_slices,
    normalize,
    padded_shape,
    short_dtype,
    to_placements,
)

__all__ = ["block_of", "describe", "device_get", "device_put", "dims_of", "from_local", "reshard", "spec_of",
           "spec_leaves", "wrap_blocks", "wrap_local"]

Number = (bool, int, float, complex)


# ---- public --------------------------------------------------------------------------------------------------------
def device_put(tree: Any, mesh: Mesh, specs: Any = None) -> Any:
    """Place global values, present on every rank, onto a mesh: tensors become DTensors that hold this rank's block.

    ``specs`` is a P or a prefix tree of them (None means P()). Each block is a contiguous copy on the mesh's device,
    so that the full value can be freed; nothing is communicated, nor is it checked that ranks hold the same values.
    Numbers and None pass through. A DTensor that has this mesh and spec already is returned as it is.

    Raises ShardingError, with the key path, for specs that do not fit, for a DTensor with another mesh or spec (use
    ``reshard``), for leaves that are no tensors or numbers, and for one tensor at two paths with two specs.
    """
    paths, leaves, treedef, dims = spec_leaves(tree, mesh, specs)
    placed: dict[int, tuple[str, Dims, DTensor]] = {}  # one tensor at two places stays one: a tie is not cut silently
    out = []
    for path, leaf, axes in zip(paths, leaves, dims, strict=True):
        if id(leaf) in placed and isinstance(leaf, torch.Tensor):
            first, before, new = placed[id(leaf)]
            if before != axes:
                raise ShardingError(f"{path} and {first} are the same tensor but have two specs, {_spec(axes)} and "
                                    f"{_spec(before)}. Give both one spec, or clone the tensor to untie them.")
            out.append(new)
            continue
        new = _put(leaf, mesh, axes, path)
        placed[id(leaf)] = path, axes, new
        out.append(new)
    return trees.unflatten(treedef, out)


def from_local(tree: Any, mesh: Mesh, specs: Any = None) -> Any:
    """Join every rank's own piece to one global value, a DTensor: ``from_local(batch, mesh, P(mesh.data_axes))``.

    All ranks bring the same shapes: a dim of n cut over axes of k ranks becomes k * n. Pieces are not copied if they
    are contiguous and on the mesh's device; under P() all ranks promise the same value. Numbers and None pass
    through. New shapes are compared over the ranks, once.

    Raises ShardingError on all ranks, naming leaf, ranks and shapes, when they differ.
    """
    first = trees.map_with_path(lambda _, leaf: leaf[0] if isinstance(leaf, PerRank) else leaf, tree)
    paths, leaves, treedef, dims = spec_leaves(first, mesh, specs, local=True)
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, DTensor):
            raise ShardingError(f"{_at(path)} is a DTensor already; from_local takes each rank's own plain tensor. "
                                "Pass leaf.to_local(), or reshard(...) to change a placement.")
    if mesh.world:
        return trees.unflatten(treedef, _simulated_pieces(tree, paths, leaves, dims, mesh))
    _compare_pieces(paths, leaves, dims, mesh)
    out = [leaf if isinstance(leaf, Number) else _wrap_piece(leaf, mesh, axes)
           for leaf, axes in zip(leaves, dims, strict=True)]
    return trees.unflatten(treedef, out)


def device_get(tree: Any) -> Any:
    """The full values, as plain tensors on every rank; plain tensors, numbers and None pass through.

    Collective: all ranks call it with the same leaves. Needs memory for each full leaf, and twice for one at a time.

    Raises ShardingError on a fake mesh of more than one rank, which holds the block of one rank only.
    """
    return trees.map_with_path(lambda path, leaf: _gather(path, leaf) if isinstance(leaf, DTensor) else leaf, tree)


def check_alive(path: str, leaf: Any) -> None:
    """Raises ShardingError for a leaf that was donated to a sharded function, whose value is gone."""
    if isinstance(leaf, SimulatedTensor):
        worlds.refuse_closed(leaf._world, path or "the leaf")
    taker = getattr(leaf, "_fsharding_donated", None)
    if taker:
        raise ShardingError(f"{path or 'The tensor'} was donated to {taker} and no longer holds a value: use the "
                            "result that took its place, or leave the argument out of `donate_argnums`.")


def reshard(tree: Any, mesh: Mesh, specs: Any = None) -> Any:
    """Move leaves to other specs, also to another mesh over the same ranks; plain tensors are placed as ``device_put``.

    Collective. Only the overlaps of old and new blocks travel, in one all-to-all a leaf (none if every rank holds what
    it needs); no rank ever holds more than its old and new blocks. A leaf that has the mesh and spec is returned as it
    is.

    Raises ShardingError, with the key path, for specs that do not fit and for values on a fake mesh.
    """
    paths, leaves, treedef, dims = spec_leaves(tree, mesh, specs)
    return trees.unflatten(treedef, [_reshard(*row, mesh) for row in zip(paths, leaves, dims, strict=True)])


def spec_of(leaf: Any) -> P:
    """The spec of a leaf, without trailing Nones. Plain tensors and numbers are P(). Axes of size 1 come in mesh order.

    Raises ShardingError for placements that no P describes (pending sums, strides of views).
    """
    if not isinstance(leaf, DTensor):
        return P()
    names = leaf.device_mesh.mesh_dim_names
    if names is None:
        raise ShardingError("The tensor lives on a DeviceMesh without dim names, so it has no P. Name the dims: "
                            "init_device_mesh(..., mesh_dim_names=...).")
    return from_placements(leaf.placements, names, dict(zip(names, leaf.device_mesh.shape, strict=True)), leaf.ndim)


def describe(leaf: Any) -> str:
    """A short text for a leaf: ``f32[64@(ep,efsdp), 2048]``; a dim without ``@`` is whole on every rank."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return repr(leaf)
    spec = spec_of(leaf) if isinstance(leaf, DTensor) else getattr(leaf, "spec", None) or P()
    entries = tuple(spec) + (None,) * (len(leaf.shape) - len(spec))

    def cut(entry) -> str:
        return "" if entry is None else f"@{entry}" if isinstance(entry, str) else f"@({','.join(entry)})"

    sizes = ", ".join(f"{size}{cut(entry)}" for size, entry in zip(leaf.shape, entries, strict=True))
    return f"{short_dtype(leaf.dtype)}[{sizes}]"


# ---- for the rest of the library -----------------------------------------------------------------------------------
def wrap_local(local: torch.Tensor, mesh: Mesh, dims: Dims, shape: Sequence[int]) -> DTensor:
    """A DTensor on ``mesh.leaf_mesh`` from this rank's block of a global value of this shape; no checks, no copy if
    the block is contiguous."""
    shape = torch.Size(shape)
    return DTensor.from_local(local.contiguous(), mesh.leaf_mesh, to_placements(dims, mesh.axis_names, mesh.shape),
                              run_check=False, shape=shape, stride=_strides(shape))


def wrap_blocks(make: Callable[[int], torch.Tensor], mesh: Mesh, dims: Dims, shape: Sequence[int]) -> DTensor:
    """A leaf of the blocks ``make(rank)``: this rank's, or in ``fs.simulate`` those of all ranks."""
    if not mesh.world:
        return wrap_local(make(mesh.rank), mesh, dims, shape)
    worlds.refuse_closed(mesh.world, repr(mesh))
    blocks = [make(rank).contiguous() for rank in range(mesh.size)]
    return simulated(blocks, wrap_local(blocks[0], mesh, dims, shape), mesh.world)


def dims_of(leaf: Any) -> Dims:
    """The spec of a leaf in normal form: one tuple of axes per dim."""
    names = leaf.device_mesh.mesh_dim_names if isinstance(leaf, DTensor) else ()
    return normalize(spec_of(leaf), getattr(leaf, "ndim", 0), names or ())


def block_of(tensor: torch.Tensor, mesh: Mesh, dims: Dims, rank: int | None = None) -> torch.Tensor:
    """A contiguous copy, on the mesh's device, of one rank's block (this rank's by default) of a full plain tensor."""
    view = tensor.detach()[local_slices(tensor.shape, dims, mesh.shape, mesh.coordinates(rank))]
    return torch.empty(view.shape, dtype=view.dtype, device=mesh.device).copy_(view)


def spec_leaves(tree: Any, mesh: Mesh, specs: Any, what: str = "specs",
                local: bool = False) -> tuple[list[str], list[Any], Any, list[Dims]]:
    """Paths, leaves, structure and the checked normal spec of each leaf of a tree of tensors and numbers.

    ``local``: shapes are those of one rank's piece, so that divisibility does not arise.
    """
    paths, leaves, treedef = trees.flatten_with_paths(tree)
    dims = []
    for path, leaf, spec in zip(paths, leaves, trees.broadcast_prefix(specs, tree, what), strict=True):
        check_alive(path, leaf)
        if not isinstance(leaf, (torch.Tensor, *Number)):
            hint = " Use torch.from_numpy." if type(leaf).__module__ == "numpy" else ""
            raise ShardingError(f"{_at(path)} is a {type(leaf).__name__}; leaves are tensors, numbers or None.{hint}")
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()
        axes = normalize(spec, len(shape), mesh.axis_names, _at(path))
        if not local:
            check_sizes(shape, axes, mesh.shape, mesh.model_axes, _at(path))
        dims.append(axes)
    return paths, leaves, treedef, dims


# ---- placing -------------------------------------------------------------------------------------------------------
def _put(leaf: Any, mesh: Mesh, dims: Dims, path: str) -> Any:
    if isinstance(leaf, Number):
        return leaf
    if not isinstance(leaf, DTensor):
        block = lambda rank: block_of(leaf, mesh, dims, rank)
        return wrap_blocks(block, mesh, dims, leaf.shape).requires_grad_(leaf.requires_grad)
    if not _is_on(leaf, mesh, dims):
        raise ShardingError(f"{_at(path)} is already sharded: it is {describe(leaf)} on {_mesh_text(leaf)}, but the "
                            f"spec asks for {_spec(dims)} on {mesh!r}. Call reshard(...) to move it.")
    return _own(leaf, mesh, dims)


def _is_on(leaf: DTensor, mesh: Mesh, dims: Dims) -> bool:
    if leaf.device_mesh != mesh.leaf_mesh:
        return False
    now = to_placements(dims_of(leaf), mesh.axis_names, mesh.shape)
    return now == to_placements(dims, mesh.axis_names, mesh.shape)


def _own(leaf: DTensor, mesh: Mesh, dims: Dims) -> DTensor:
    """The leaf itself, or the same shard on our private mesh if a user's DeviceMesh object came in."""
    if leaf.device_mesh is mesh.leaf_mesh:
        return leaf
    return wrap_local(_compat.local_of(leaf), mesh, dims, leaf.shape).requires_grad_(leaf.requires_grad)


def _wrap_piece(leaf: torch.Tensor, mesh: Mesh, dims: Dims) -> DTensor:
    local = leaf.detach().to(mesh.device)
    return wrap_local(local, mesh, dims, _joined(leaf, mesh, dims)).requires_grad_(leaf.requires_grad)


def _simulated_pieces(tree, paths, leaves, dims, mesh: Mesh) -> list:
    out = []
    for path, given, leaf, axes in zip(paths, trees.flatten(tree)[0], leaves, dims, strict=True):
        if isinstance(leaf, Number):
            out.append(leaf)
            continue
        if not isinstance(given, PerRank):
            if axes_of(axes):
                raise ShardingError(f"{_at(path)} is one tensor, but in fs.simulate from_local needs each rank's own "
                                    "piece: pass world.each(f), or place the full value with device_put.")
            given = PerRank([leaf] * mesh.size)
        for rank, piece in enumerate(given):
            if piece.shape != leaf.shape or piece.dtype != leaf.dtype:
                raise ShardingError(f"The ranks give from_local different pieces of {_at(path)}: rank 0 has "
                                    f"{describe(leaf)}, rank {rank} has {describe(piece)}. All ranks must bring the "
                                    "same shape, dtype and spec: pad the last batch or drop it.")
        out.append(wrap_blocks(lambda rank, g=given: g[rank].detach(), mesh, axes, _joined(leaf, mesh, axes)))
    return out


def _joined(piece: torch.Tensor, mesh: Mesh, dims: Dims) -> list[int]:
    return [size * mesh.axes_size(axes) for size, axes in zip(piece.shape, dims, strict=True)]


def _compare_pieces(paths, leaves, dims, mesh: Mesh) -> None:
    rows = [[path, str(_spec(axes)), short_dtype(leaf.dtype), list(leaf.shape)]
            for path, leaf, axes in zip(paths, leaves, dims, strict=True) if isinstance(leaf, torch.Tensor)]
    answers = agree(mesh, "from_local", json.dumps(rows))
    if len(answers) < 2:
        return
    (first, first_ranks), *others = ((json.loads(text), ranks) for text, ranks in answers.items())
    for other, ranks in others:
        if [row[0] for row in first] != [row[0] for row in other]:
            raise ShardingError(f"The ranks give from_local different trees: rank {first_ranks[0]} has the leaves "
                                f"{[row[0] for row in first]}, rank {ranks[0]} has {[row[0] for row in other]}. "
                                "All ranks must pass the same structure.")
        for one, two in zip(first, other, strict=True):
            if one != two:
                _, spec, *mine = one
                raise ShardingError(
                    f"The ranks give from_local different pieces of {_at(one[0])} (spec {spec}): rank {first_ranks[0]} "
                    f"has {mine[0]}{mine[1]}, rank {ranks[0]} has {two[2]}{two[3]} with {two[1]}. All ranks must bring "
                    "the same shape, dtype and spec: pad the last batch or drop it.")


# ---- gathering -----------------------------------------------------------------------------------------------------
def _gather(path: str, leaf: DTensor) -> torch.Tensor:
    check_alive(path, leaf)
    if isinstance(leaf, SimulatedTensor):
        return _join(blocks_of(leaf), mesh_of(leaf.device_mesh), dims_of(leaf), leaf.shape)
    mesh = mesh_of(leaf.device_mesh)
    if mesh is None:
        return _foreign_full(leaf)
    dims, local = dims_of(leaf), _compat.local_of(leaf)
    cut = [axis for axis in mesh.sort_axes(axes_of(dims)) if mesh.shape[axis] > 1]
    _check_local(path, leaf, mesh, dims)
    if not cut:
        return local.clone(memory_format=torch.contiguous_format)
    _refuse_fake(path, mesh, "device_get")
    blocks = _all_gather(local, math.prod(padded_shape(leaf.shape, dims, mesh.shape)), mesh.group(cut))
    out = local.new_empty(leaf.shape)
    for member, block in zip(_members(mesh, cut), blocks, strict=True):
        target = out[local_slices(leaf.shape, dims, mesh.shape, member)]
        target.copy_(block[:target.numel()].view(target.shape))
    return out


def _join(blocks: Sequence[torch.Tensor], mesh: Mesh, dims: Dims, shape: Sequence[int]) -> torch.Tensor:
    out = blocks[0].new_empty(shape)
    for rank, block in enumerate(blocks):
        out[local_slices(shape, dims, mesh.shape, mesh.coordinates(rank))] = block
    return out


def _all_gather(local: torch.Tensor, width: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Every member's block, flat and padded to ``width``, as rows. Bytes travel: backends know few dtypes."""
    padded = local.new_zeros(width)
    padded[:local.numel()].copy_(local.reshape(-1))
    out = local.new_empty(group.size() * width)
    if width:
        _compat.all_gather_flat(as_bytes(out), as_bytes(padded), group)
    return out.view(group.size(), width)


def _members(mesh: Mesh, axes: Sequence[str]) -> list[dict[str, int]]:
    """The coordinates of the members of this rank's group over these axes, in the group's order."""
    rank = mesh.rank
    ranks = next(ranks for ranks in mesh.group_ranks(axes) if rank in ranks)
    return [mesh.coordinates(member) for member in ranks]


def _foreign_full(leaf: DTensor) -> torch.Tensor:
    # One mesh dim at a time, minor ones first: flattened dims would merge into one gather, wrong for uneven ones.
    placements = list(leaf.placements)
    for index in reversed(range(len(placements))):
        placements[index] = Replicate()
        leaf = leaf.redistribute(placements=placements)
    return leaf.to_local().detach().clone(memory_format=torch.contiguous_format)


# ---- resharding ----------------------------------------------------------------------------------------------------
def _reshard(path: str, leaf: Any, dims: Dims, mesh: Mesh) -> Any:
    if not isinstance(leaf, DTensor):
        return _put(leaf, mesh, dims, path)
    if _is_on(leaf, mesh, dims):
        return _own(leaf, mesh, dims)
    old = mesh_of(leaf.device_mesh)
    if old is None:
        raise ShardingError(f"{_at(path)} lives on {_mesh_text(leaf)}, which make_mesh did not make. Get its full "
                            "value with device_get(...) and place that, or join local pieces with from_local(...).")
    if old.fake != mesh.fake or old.size != mesh.size:
        raise ShardingError(f"{_at(path)} lives on {old!r}; reshard moves it only to a mesh over the same ranks, and "
                            f"{mesh!r} is not. Use device_get(...) and device_put(...).")
    _refuse_fake(path, mesh, "reshard")
    if isinstance(leaf, SimulatedTensor):
        return _put(_gather(path, leaf), mesh, dims, path)
    _check_local(path, leaf, old, dims_of(leaf))
    source, target = BlockLayout(leaf.shape, old, dims_of(leaf)), BlockLayout(leaf.shape, mesh, dims)
    local, rank = _compat.local_of(leaf), mesh.rank
    if all(inside(target.block(r), source.block(r)) for r in range(mesh.size)):
        new = keep_overlap(local, source.block(rank), target.block(rank))
    else:
        new = exchange_blocks(local, source, target, rank, old)
    return wrap_local(new.to(mesh.device), mesh, dims, leaf.shape).requires_grad_(leaf.requires_grad)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def _check_local(path: str, leaf: DTensor, mesh: Mesh, dims: Dims) -> None:
    want = tuple(s.stop - s.start for s in local_slices(leaf.shape, dims, mesh.shape, mesh.coordinates()))
    have = tuple(_compat.local_of(leaf).shape)
    if want != have:
        raise ShardingError(f"{_at(path)} is {describe(leaf)}, so rank {mesh.rank} should hold a block of {want}, but "
                            f"it holds {have}. It was wrapped with a wrong global shape; use device_put or from_local.")


def _refuse_fake(path: str, mesh: Mesh, what: str) -> None:
    if mesh.fake and mesh.size > 1:
        raise ShardingError(f"{what} needs the other ranks' blocks of {_at(path)}, but {mesh!r} has no processes. Keep "
                            "the plain values that were placed, or run on a real mesh.")


def _spec(dims: Dims) -> P:
    entries = list(dims)
    while entries and not entries[-1]:
        entries.pop()
    return P(*entries)


def _mesh_text(leaf: DTensor) -> str:
    return repr(mesh_of(leaf.device_mesh) or leaf.device_mesh)


def _at(path: str) -> str:
    return path or "the value"
