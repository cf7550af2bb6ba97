"""Collectives of the local view, inside ``fs.shard_map``: JAX's names, defaults and meanings.

Types: a value is *varying* over a manual axis or not (``comm/varying.py``); ``{V:i}`` below is a value that varies over
axis i. In the pictures, columns are the ranks of the axis, and letters the values or blocks that they hold.

All take trees of tensors, one axis name or a tuple of names (major to minor: ranks are numbered in the tuple's order),
and any dtype that the backend reduces. They are linear (but for ``pmax``, ``pmin``), so ``torch.func`` transforms of
any order, ``vmap`` and forward mode apply. An unvarying operand is taken as varying with equal values. All raise
ShardingError for axes that the region around them does not have, and outside of a ``shard_map``.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch

from fsharding import tree as trees
from fsharding.comm import manual
from fsharding.comm import varying as v
from fsharding.comm.shards import encode_dims
from fsharding.errors import ShardingError
from fsharding.oplib import operands

AxisName = str | Sequence[str]


# ---- reductions ------------------------------------------------------------------------------------------------------
def psum(x: Any, axis_name: AxisName) -> Any:
    """The sum over the ranks of an axis, on each of them.

    Forward ``{V:i}`` to unvarying; backward: the cotangent, which is the same on all ranks, as it is. ::

        [a] [b] [c]   ->   [a+b+c] [a+b+c] [a+b+c]

    Shapes and dtypes stay; booleans are counted in int64. A Python number gives itself times the size of the axis.

    Raises:
        ShardingError: the operand varies over some of the axes only (as JAX: sum over those, or ``pvary`` it first).
    """
    return _reduce("psum", x, axis_name)


def pmean(x: Any, axis_name: AxisName) -> Any:
    """The mean over the ranks of an axis, on each of them: ``psum(x) / axis_size``.

    Forward ``{V:i}`` to unvarying; backward: the cotangent over the number of ranks. ::

        [a] [b]   ->   [(a+b)/2] [(a+b)/2]

    Integers become the default floating dtype. Raises as :func:`psum`.
    """
    size = axis_size(axis_name, _caller="pmean")
    return _map(lambda y: y / size, _reduce("pmean", x, axis_name))


def pmax(x: Any, axis_name: AxisName) -> Any:
    """The largest value over the ranks of an axis, elementwise; ``{V:i}`` to unvarying. No derivative, as in JAX. ::

        [3] [7] [5]   ->   [7] [7] [7]

    Raises:
        ShardingError: it is differentiated.
    """
    return _extreme("pmax", "max", x, axis_name)


def pmin(x: Any, axis_name: AxisName) -> Any:
    """The smallest value over the ranks of an axis, elementwise; ``{V:i}`` to unvarying. No derivative, as in JAX. ::

        [3] [7] [5]   ->   [3] [3] [3]

    Raises:
        ShardingError: it is differentiated.
    """
    return _extreme("pmin", "min", x, axis_name)


def _reduce(name: str, x: Any, axis_name: AxisName) -> Any:
    axes = _axes(name, axis_name)
    size, group = _size(axes), _group(axes)

    def leaf(path, y):
        if not isinstance(y, torch.Tensor):
            return y * size
        (y,) = operands(y)
        have = v.types().of(y) & set(axes)
        if have and have != set(axes):
            raise ShardingError(
                f"`{name}` over {tuple(axes)}, but {_named(path)} varies over {tuple(sorted(have))} only: the other "
                "axes hold equal copies, which a sum would count. Sum over the axes it varies over, or make it "
                f"varying first: `fs.pvary(x, {tuple(a for a in axes if a not in have)!r})`."
            )
        y = y.long() if y.dtype == torch.bool else y
        return manual.total(_varying(y, axes), "sum", group)

    return trees.map_with_path(leaf, x)


def _extreme(name: str, op: str, x: Any, axis_name: AxisName) -> Any:
    axes = _axes(name, axis_name)
    group = _group(axes)
    return _map(lambda y: manual.extreme(_varying(*operands(y), axes), op, group), x, keep_numbers=True)


# ---- moving blocks ---------------------------------------------------------------------------------------------------
def all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = False) -> Any:
    """The values of all ranks of an axis, on each of them: stacked along a new dim ``axis``, or, ``tiled``, joined
    along the dim ``axis``.

    Forward ``{V:i}`` to ``{V:i}`` (for an unvarying result sum, or return it under an out-spec that names the axis);
    backward :func:`psum_scatter`. ::

        [a] [b] [c]   ->   [a b c] [a b c] [a b c]
    """
    axes = _axes("all_gather", axis_name)

    def leaf(y):
        dim = _dim("all_gather", axis, y.ndim + (not tiled))
        return _gather(_varying(*operands(y), axes), axes, dim, tiled)

    return _map(leaf, x)


def psum_scatter(x: Any, axis_name: AxisName, *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """The sum over the ranks of an axis, cut into pieces: rank r holds piece r. The dim is as long as the axis and
    goes, or, ``tiled``, is divided by the size of the axis.

    Forward ``{V:i}`` to ``{V:i}``; backward :func:`all_gather`. ::

        [a0 a1] [b0 b1]   ->   [a0+b0] [a1+b1]

    Raises:
        ShardingError: a dim of another size; an operand that varies over some of the axes only.
    """
    axes = _axes("psum_scatter", axis_name)

    def leaf(y):
        (y,) = operands(y)
        have = v.types().of(y) & set(axes)
        if have and have != set(axes):
            raise ShardingError(
                f"`psum_scatter` over {axes}, but its operand varies over {tuple(sorted(have))} only. Make it varying "
                f"first: `fs.pvary(x, {tuple(a for a in axes if a not in have)!r})`."
            )
        dim = _dim("psum_scatter", scatter_dimension, y.ndim)
        return _scatter(_split("psum_scatter", _varying(y, axes), axes, dim, tiled), axes, dim, tiled)

    return _map(leaf, x)


def all_to_all(x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, *, tiled: bool = False) -> Any:
    """Pieces change hands: piece s of rank r goes to rank s. The dim ``split_axis`` is as long as the axis and goes,
    and a dim ``concat_axis`` of that size appears; ``tiled``, the one is divided and the other multiplied by it.

    Forward ``{V:i}`` to ``{V:i}``; backward the same with the two dims swapped. ::

        [a0 a1] [b0 b1]   ->   [a0 b0] [a1 b1]

    Raises:
        ShardingError: a dim of another size.
    """
    axes = _axes("all_to_all", axis_name)

    def leaf(y):
        split = _dim("all_to_all", split_axis, y.ndim)
        concat = _dim("all_to_all", concat_axis, y.ndim)
        blocks = _split("all_to_all", _varying(*operands(y), axes), axes, split, tiled)
        got = _order(manual.exchange(_order(blocks, axes, True), _group(axes)), axes, False)
        if not tiled:
            return got.movedim(0, concat)
        return got.movedim(0, concat).flatten(concat, concat + 1)

    return _map(leaf, x)


def ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Any:
    """Each pair (source, target) sends the source's value to the target; who receives nothing holds zeros.

    Forward ``{V:i}`` to ``{V:i}``; backward the inverse pairs. With ``[(0, 1), (1, 2), (2, 0)]``::

        [a] [b] [c]   ->   [c] [a] [b]

    Raises:
        ShardingError: a source or a target twice, or one that the axis does not have.
    """
    axes = _axes("ppermute", axis_name)
    targets = _targets(perm, axes)
    return _map(lambda y: manual.permute(_varying(*operands(y), axes), targets, _group(axes)), x)


def _gather(y, axes, dim, tiled):
    stacked = _order(manual.gather(y, _group(axes)), axes, False).movedim(0, dim)
    return stacked.flatten(dim, dim + 1) if tiled else stacked


def _split(name, y, axes, dim, tiled):
    """The dim's pieces for the ranks, in front: [n, ...]."""
    n, size = _size(axes), y.shape[dim]
    if tiled and size % n:
        raise ShardingError(
            f"`{name}` over {axes} with `tiled=True`: dim {dim} of {tuple(y.shape)} has size {size}, which the {n} "
            "ranks of the axis must divide."
        )
    if not tiled and size != n:
        raise ShardingError(
            f"`{name}` over {axes}: dim {dim} of {tuple(y.shape)} has size {size}, but the axis has {n} ranks, and "
            "each takes one entry. With `tiled=True` each takes a piece."
        )
    return (y.unflatten(dim, (n, size // n)) if tiled else y).movedim(dim, 0)


def _scatter(blocks, axes, dim, tiled):
    return manual.scatter(_order(blocks, axes, True), _group(axes))


def _targets(perm, axes) -> list[int]:
    n, pairs = _size(axes), [(int(s), int(t)) for s, t in perm]
    sources, ends = [s for s, _ in pairs], [t for _, t in pairs]
    if len(set(sources)) < len(sources) or len(set(ends)) < len(ends):
        raise ShardingError(
            f"`ppermute` sends from or to a rank twice: sources and targets must be unique, got {pairs}."
        )
    if any(not 0 <= r < n for r in sources + ends):
        raise ShardingError(f"`ppermute` over {axes}: ranks lie in [0, {n}), got {pairs}.")
    if axes != (ordered := v.region().mesh.sort_axes(axes)):
        # JAX numbers the ranks in mesh order here, and in the tuple's order everywhere else.
        raise ShardingError(f"`ppermute` over {axes}: name the axes in mesh order, {ordered}.")
    targets = [-1] * n
    for s, t in pairs:
        targets[s] = t
    return targets


# ---- where am I ------------------------------------------------------------------------------------------------------
def axis_index(axis_name: AxisName) -> torch.Tensor:
    """This rank's number on an axis (or in a tuple of axes, major to minor): int64, 0-d, ``{V:i}``. ::

    [0] [1] [2]
    """
    axes = _axes("axis_index", axis_name)
    group = v.region().alias(v.region().manual)
    return manual.to_local(torch.arange(_size(axes)), encode_dims((axes,)), group).reshape(())


def axis_size(axis_name: AxisName, *, _caller: str = "axis_size") -> int:
    """The number of ranks of an axis, or of a tuple of axes: a Python int."""
    return _size(_axes(_caller, axis_name))


def pvary(x: Any, axis_name: AxisName) -> Any:
    """``x`` itself, as a value that may vary over these axes. Calls in a region do it by themselves where needed.

    Forward unvarying to ``{V:i}``; backward :func:`psum`: every rank's use of the one value counts. ::

        [a] [a] [a]   ->   [a] [a] [a]

    Raises:
        ShardingError: it varies over one of the axes already.
    """
    axes = _axes("pvary", axis_name)

    def leaf(y):
        (y,) = operands(y)
        have = v.types().of(y) & set(axes)
        if have:
            raise ShardingError(f"`pvary` over {axes}, but the value varies over {tuple(sorted(have))} already.")
        return _varying(y, axes)

    return _map(leaf, x)


# ---- axes ------------------------------------------------------------------------------------------------------------
def _axes(name: str, axis_name: AxisName) -> tuple[str, ...]:
    """The named axes, checked against the region."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    inner = v.region()
    if inner is None:
        raise ShardingError(
            f"`fs.{name}` is called outside of `fs.shard_map`: it speaks to the ranks of an axis, which only the body "
            "of a `shard_map` has. In `fs.shard` write the global value, for instance `x.sum()`."
        )
    for axis in axes:
        if axis not in inner.manual:
            known = "is an axis of the mesh, but not in `axis_names`" if axis in inner.mesh.shape else "is unknown"
            close = difflib.get_close_matches(str(axis), inner.manual, 1)
            raise ShardingError(
                f"`fs.{name}` over {axis!r}, which {known}: `{inner.name}` is manual over {', '.join(inner.manual)}."
                + (f" Did you mean {close[0]!r}?" if close else "")
            )
    if len(set(axes)) < len(axes) or not axes:
        raise ShardingError(f"`fs.{name}` takes one axis or a tuple of different ones, got {axis_name!r}.")
    return axes


def _size(axes) -> int:
    return v.region().mesh.axes_size(axes)


def _group(axes) -> str:
    return v.region().alias(axes)


def _varying(y, axes):
    return v.pvary(y, set(axes) - v.types().of(y), v.region().alias(()))


def _order(blocks, axes, into_mesh_order: bool):
    """Dim 0 from the tuple's order of ranks to the mesh's, in which groups are numbered, or back."""
    inner = v.region()
    ordered = inner.mesh.sort_axes(axes)
    have, want = (axes, ordered) if into_mesh_order else (ordered, axes)
    if have == want:
        return blocks
    sizes = [inner.mesh.shape[a] for a in have]
    rest = range(len(axes), len(axes) + blocks.ndim - 1)
    split = blocks.unflatten(0, sizes).permute(*(have.index(a) for a in want), *rest)
    return split.flatten(0, len(axes) - 1)


def _dim(name, dim, ndim) -> int:
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise ShardingError(f"`{name}`: dim {dim!r} is out of bounds for a result or operand of {ndim} dims.")
    return dim % ndim


def _map(fn, tree, keep_numbers=False):
    def leaf(path, y):
        if isinstance(y, torch.Tensor):
            return fn(y)
        return y if keep_numbers else fn(torch.as_tensor(y)) if isinstance(y, bool | int | float) else y

    return trees.map_with_path(leaf, tree)


def _named(path):
    return f"its operand {path}" if path else "its operand"
