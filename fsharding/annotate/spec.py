"""``P``: which mesh axes cut which dims of a tensor, and its exact mapping to slices and to DTensor placements.

Below, ``dims`` is the normal form of a spec: one tuple of axis names per tensor dim, major to minor. A dim of n
elements cut by axes of sizes (k1, k2) is chunked by k1 first, then each chunk by k2; a chunk has ceil(n / k)
elements, trailing ones are shorter or empty. That is what DTensor does, so uneven leaves agree with it.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
)

from .._compat import StridedShard
from ..errors import ShardingError

__all__ = ["P", "axes_of", "check_sizes", "from_placements", "inside", "local_slices", "normalize", "numel", "overlap",
           "padded_shape", "relative", "shard_sizes", "short_dtype", "to_placements"]

Entry = None | str | tuple[str, ...]
Dims = tuple[tuple[str, ...], ...]


class P:
    """A partition spec: per tensor dim None, a mesh axis, or a tuple of axes (major to minor).

    Axes that are not mentioned replicate; dims past the last entry are whole. Frozen and hashable, with the equality of
    ``jax.sharding.PartitionSpec``: ``P(("a",)) == P("a")``, ``P(()) == P(None)``, ``P("a") != P("a", None)``.

    Raises ShardingError for an entry of another type and for an axis that occurs twice.
    """

    __slots__ = ("_entries",)

    def __init__(self, *entries: Entry):
        entries = tuple(_entry(entry, entries) for entry in entries)
        seen: set[str] = set()
        for axis in itertools.chain.from_iterable(map(_axes, entries)):
            if axis in seen:
                raise ShardingError(f'{_show(entries)} names axis "{axis}" twice. An axis can cut one dim only, once.')
            seen.add(axis)
        object.__setattr__(self, "_entries", entries)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("P is frozen; make a new one")

    def __reduce__(self):
        return P, self._entries

    def __repr__(self) -> str:
        return _show(self._entries)

    def __eq__(self, other: object) -> bool:
        return self._entries == other._entries if isinstance(other, P) else NotImplemented

    def __hash__(self) -> int:
        return hash((P, self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __getitem__(self, index):
        return self._entries[index]


def _entry(entry: object, entries: tuple) -> Entry:
    if isinstance(entry, tuple):
        for axis in entry:
            if not isinstance(axis, str):
                raise ShardingError(f"P got the entry {entry!r}: a tuple holds axis names (strings), not {axis!r}.")
        return entry if len(entry) > 1 else (entry[0] if entry else None)
    if entry is None or isinstance(entry, str):
        return entry
    hint = " Write it as a tuple." if isinstance(entry, (list, set, frozenset)) else ""
    raise ShardingError(f"P got the entry {entry!r}: an entry is None, an axis name or a tuple of axis names.{hint}")


def _show(entries: tuple) -> str:
    def show(entry):
        if isinstance(entry, tuple):
            return "(" + ", ".join(map(show, entry)) + ("," if len(entry) == 1 else "") + ")"
        return f'"{entry}"' if isinstance(entry, str) else repr(entry)

    return f"P({', '.join(map(show, entries))})"


def _axes(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def axes_of(spec: P | Dims | None) -> tuple[str, ...]:
    """All axes that a spec (or its normal form) names, in the order of its dims, major to minor."""
    return tuple(axis for entry in (spec or ()) for axis in _axes(entry))


@functools.lru_cache(maxsize=4096)
def _normal(spec: P, ndim: int, axis_names: tuple[str, ...], where: str) -> Dims:
    at = f" of {where}" if where else ""
    if len(spec) > ndim:
        raise ShardingError(f"The spec {spec}{at} has {len(spec)} entries but the tensor has {ndim} dims. Remove "
                            + ("all of them: a 0-d value is replicated, P()." if ndim == 0 else "the surplus entries."))
    for axis in axes_of(spec):
        if axis not in axis_names:
            close = difflib.get_close_matches(axis, axis_names, 1)
            hint = f'did you mean "{close[0]}"?' if close else "use one of these."
            raise ShardingError(f'The spec {spec}{at} names the axis "{axis}", which the mesh does not have. '
                                f"The mesh has {', '.join(axis_names)}: {hint}")
    return tuple(_axes(entry) for entry in spec) + ((),) * (ndim - len(spec))


def normalize(spec: P | None, ndim: int, axis_names: Sequence[str], where: str = "") -> Dims:
    """The normal form of a spec: one tuple of axes for each of ``ndim`` dims. None means P().

    Raises ShardingError (naming ``where``, the key path) for an unknown axis, too many entries, or no spec at all.
    """
    if spec is None:
        spec = P()
    if not isinstance(spec, P):
        hint = f' Write P("{spec}").' if isinstance(spec, str) else " Write P(...)."
        raise ShardingError(f"The spec{f' of {where}' if where else ''} is {spec!r}, not a P.{hint}")
    return _normal(spec, ndim, tuple(axis_names), where)


def shard_sizes(size: int, axis_sizes: Sequence[int]) -> list[int]:
    """Sizes of all blocks of one dim that is cut by axes of these sizes, major to minor."""
    sizes = [size]
    for parts in axis_sizes:
        sizes = [stop - start for n in sizes for start, stop in (_chunk(n, parts, i) for i in range(parts))]
    return sizes


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def local_slices(shape: Sequence[int], dims: Dims, mesh_shape: Mapping[str, int],
                 coordinates: Mapping[str, int]) -> tuple[slice, ...]:
    """The block of the global tensor at these mesh coordinates, as one slice (with explicit ends) per dim."""
    out = []
    for size, axes in zip(shape, dims, strict=True):
        start, stop = 0, size
        for axis in axes:
            low, high = _chunk(stop - start, mesh_shape[axis], coordinates[axis])
            start, stop = start + low, start + high
        out.append(slice(start, stop))
    return tuple(out)


def padded_shape(shape: Sequence[int], dims: Dims, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the largest block (the first one), to which shorter ones are padded for a collective."""
    out = []
    for size, axes in zip(shape, dims, strict=True):
        for axis in axes:
            size = -(-size // mesh_shape[axis])
        out.append(size)
    return tuple(out)


# ---- arithmetic of blocks --------------------------------------------------------------------------------------
def overlap(a: tuple[slice, ...], b: tuple[slice, ...]) -> tuple[slice, ...] | None:
    """The part that two blocks share, None if it is empty."""
    cut = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return cut if all(s.start < s.stop for s in cut) else None


def inside(a: tuple[slice, ...], b: tuple[slice, ...]) -> bool:
    """Whether block a lies in block b; an empty one lies anywhere."""
    return any(x.start >= x.stop for x in a) or all(
        y.start <= x.start and x.stop <= y.stop for x, y in zip(a, b, strict=True))


def relative(cut: tuple[slice, ...], block: tuple[slice, ...]) -> tuple[slice, ...]:
    """A cut in global indices as slices of the block that holds it."""
    return tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(cut, block, strict=True))


def numel(cut: tuple[slice, ...] | None) -> int:
    """The number of elements of a block; 0 for None."""
    return 0 if cut is None else math.prod(s.stop - s.start for s in cut)


# ---- legality and placements ------------------------------------------------------------------------------------
def check_sizes(shape: Sequence[int], dims: Dims, mesh_shape: Mapping[str, int], model_axes: Sequence[str] = (),
                where: str = "", even: bool = False) -> None:
    """Refuse what cannot be stored: an indivisible dim over a model axis (with ``even`` over any axis), and an uneven
    dim over axes in other than mesh order, which DTensor has no reliable placement for.

    Raises ShardingError that names the leaf, dim, size and axes.
    """
    order = {axis: index for index, axis in enumerate(mesh_shape)}
    for dim, (size, axes) in enumerate(zip(shape, dims, strict=True)):
        parts = 1
        for axis in axes:
            parts *= mesh_shape[axis]
        if size % parts == 0:
            continue
        cut = " and ".join(f"{axis}={mesh_shape[axis]}" for axis in axes)
        at = f"Dim {dim} of {where or 'the tensor'} has size {size}, which"
        if even or any(axis in model_axes for axis in axes):
            why = "must divide it" if even else f"must divide it, as {_first(axes, model_axes)} is a model axis"
            below, above = size - size % parts, size - size % parts + parts
            near = f"{below} or {above}" if below else f"{above}"
            raise ShardingError(f"{at} is not divisible by {parts} ({cut}): they {why}. The nearest sizes that "
                                f"work are {near}; or cut another dim.")
        real = [order[axis] for axis in axes if mesh_shape[axis] > 1]
        if real != sorted(real):
            inorder = ", ".join(f'"{axis}"' for axis in sorted(axes, key=order.get))
            raise ShardingError(f"{at} is not divisible by {parts} ({cut}), and the axes are not in mesh order. An "
                                f"uneven dim needs mesh order, ({inorder}), or a size that {parts} divides.")


def _first(axes: Sequence[str], among: Sequence[str]) -> str:
    return next(axis for axis in axes if axis in among)


def to_placements(dims: Dims, axis_names: Sequence[str], mesh_shape: Mapping[str, int]) -> list[Placement]:
    """The DTensor placements of a spec, one for each mesh axis.

    DTensor cuts in mesh order. An axis that comes earlier in the mesh than axes which are major to it in the tuple
    becomes a strided shard; its split factor is the product of those axes' sizes. Axes of size 1 never stride.
    """
    return list(_placements(tuple(dims), tuple(axis_names), tuple(mesh_shape[axis] for axis in axis_names)))


@functools.lru_cache(maxsize=4096)
def _placements(dims: Dims, axis_names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Placement, ...]:
    where = {axis: index for index, axis in enumerate(axis_names)}
    out: list[Placement] = [Replicate()] * len(axis_names)
    for dim, axes in enumerate(dims):
        for position, axis in enumerate(axes):
            factor = 1
            for major in axes[:position]:
                factor *= sizes[where[major]] if where[major] > where[axis] else 1
            strided = factor > 1 and sizes[where[axis]] > 1
            out[where[axis]] = StridedShard(dim, split_factor=factor) if strided else Shard(dim)
    return tuple(out)


def from_placements(placements: Sequence[Placement], axis_names: Sequence[str], mesh_shape: Mapping[str, int],
                    ndim: int) -> P:
    """The spec of DTensor placements, without trailing Nones; axes of size 1 come in mesh order.

    Raises ShardingError for pending sums and for strides that no tuple of axes explains (they come from views).
    """
    return _spec(tuple(placements), tuple(axis_names), tuple(mesh_shape[axis] for axis in axis_names), ndim)


@functools.lru_cache(maxsize=4096)
def _spec(placements: tuple[Placement, ...], axis_names: tuple[str, ...], sizes: tuple[int, ...], ndim: int) -> P:
    mesh_shape = dict(zip(axis_names, sizes, strict=True))
    dims: list[list[str]] = [[] for _ in range(ndim)]
    # From the last mesh axis to the first: all axes that may be major to this one and come later in the mesh are
    # already in place, so its split factor says before which of them it stands.
    for axis, placement in reversed(list(zip(axis_names, placements, strict=True))):
        if isinstance(placement, Replicate):
            continue
        dim, factor = _shard_of(placement, axis)
        order, position = dims[dim], 0
        while factor > 1 and position < len(order) and factor % mesh_shape[order[position]] == 0:
            factor //= mesh_shape[order[position]]
            position += 1
        if factor != 1:
            raise ShardingError(f'The placement {placement} over axis "{axis}" is a stride that no P describes; it '
                                "comes from a view of a sharded dim. Redistribute the tensor to Shard or Replicate.")
        order.insert(position, axis)
    while dims and not dims[-1]:
        dims.pop()
    return P(*(tuple(axes) for axes in dims))


def _shard_of(placement: Placement, axis: str) -> tuple[int, int]:
    # A strided shard is a subclass of Shard on torch 2.11 and is not on torch 2.12 and later: ask for it first.
    if isinstance(placement, StridedShard):
        return placement.dim, placement.split_factor
    if isinstance(placement, Shard):
        return placement.dim, 1
    if isinstance(placement, Partial):
        raise ShardingError(f'The tensor is a pending sum ({placement}) over axis "{axis}", which no P describes. '
                            "Redistribute it to Shard or Replicate first.")
    raise ShardingError(f'The placement {placement} over axis "{axis}" has no P. Use Shard or Replicate.')


def short_dtype(dtype) -> str:
    """``torch.bfloat16`` -> ``bf16``."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long).replace("_", "")
    return name
