"""Views by strides and assignments to them: what autograd writes for in-place code, in terms of the base's memory.

Where the strides describe a slice of the base they are read as one; else the whole value is laid out as one device
would have it in memory.
"""

from __future__ import annotations

import torch

from fsharding.program.rules_views import need_whole, reshaped_dims, result, view_rule
from fsharding.program.values import Const, Placed

A = torch.ops.aten


def strided_cuts(shape, strides, size, stride, offset):
    """``as_strided`` as slices and selections: per dim of a base of this shape and strides (start, length, step) or an
    index; and the dims of the base that the view's dims show, in the view's order.

    None where the strides say anything else. Autograd writes such views, in terms of the memory of the base, for
    in-place assignments to slices; the base may be transposed in memory. Dims of size 1 of the view are left out.
    """
    dims = sorted((d for d, n in enumerate(shape) if n != 1), key=lambda d: -strides[d])
    dense = all(strides[a] >= strides[b] * shape[b] for a, b in zip(dims, dims[1:], strict=False))
    if not dense or any(strides[d] <= 0 for d in dims):
        return None
    wanted = [i for i, n in enumerate(size) if n != 1]
    cuts: list = [0] * len(shape)
    found: dict[int, int] = {}
    for d in dims:
        start, offset = divmod(offset, strides[d])
        fits = [
            i
            for i in wanted
            if stride[i] > 0
            and stride[i] % strides[d] == 0
            and start + (size[i] - 1) * (stride[i] // strides[d]) < shape[d]
        ]
        if len(fits) > 1 or start >= shape[d]:
            return None
        cuts[d] = (start, size[fits[0]], stride[fits[0]] // strides[d]) if fits else start
        if fits:
            found[d] = fits[0]
            wanted.remove(fits[0])
    return (cuts, sorted(found, key=found.get)) if not wanted and not offset else None


def memory_shape(n: int, size, stride) -> tuple[int, ...] | None:
    """The shape of which a view by strides of ``n`` numbers in a row takes slices, None where there is none."""
    steps = sorted({s for m, s in zip(size, stride, strict=True) if m != 1}, reverse=True)
    steps = [*steps, *([] if steps and steps[-1] == 1 else [1])]
    wide = [n, *steps]
    if steps and any(s <= 0 or a % s for a, s in zip(wide, steps, strict=False)):
        return None
    return tuple(a // s for a, s in zip(wide, steps, strict=False))


@view_rule
def as_strided(p, node, x, size, stride, offset=None):
    """A slice, where the strides describe one; else of the whole value, laid out as one device has it in memory."""
    x, found = _sliced(p, node, x, size, stride, offset)
    if found is None:
        return _strided_by_memory(p, node, x, lambda y: p.emit.call(A.as_strided.default, y, size, stride, offset or 0))
    cuts, order = found
    cut = _permuted(p, _cut_view(p, x, cuts), [d for d, c in enumerate(cuts) if not isinstance(c, int)], order)
    dims = iter(cut.dims)
    dims = tuple(next(dims) if n != 1 else () for n in size)
    return result(p, p.emit.reshape(cut.node, p.local_shape(size, dims)), size, dims, x)


def _sliced(p, node, x, size, stride, offset):
    """The base (a flat one in the shape that the strides speak of) and how the view is cut from it, or None."""
    base = node.args[0].meta["val"]  # what one device would have in memory
    shape = memory_shape(base.numel(), size, stride) if base.ndim == 1 and base.stride() == (1,) else None
    if shape is None or len(shape) == 1:
        return x, strided_cuts(base.shape, base.stride(), size, stride, offset or 0)
    strides = torch.empty(shape, device="meta").stride()
    return _reshaped(p, x, shape), strided_cuts(shape, strides, size, stride, offset or 0)


def _reshaped(p, x, shape):
    if isinstance(x, Const):
        return Const(x.value, tuple(shape), x.dtype)
    x = p.placed(x)
    dims = reshaped_dims(p, x.shape, shape, x.dims)
    return result(p, p.emit.reshape(x.node, p.local_shape(shape, dims)), shape, dims, x)


def _permuted(p, x, have, want):
    """``x``, whose dims stand for ``have``, with its dims in the order ``want``."""
    order = [have.index(d) for d in want]
    return result(p, p.emit.permute(x.node, order), [x.shape[d] for d in order], [x.dims[d] for d in order], x)


def _strided_by_memory(p, node, x, take):
    """A view by strides that is no slice: of the whole value, laid out as one device would have it in memory."""
    if any(map(p._real, x.dims)):
        p.refuse("a view by strides that is no slice")
    return result(p, take(_in_memory(p, node, x)), node.meta["val"].shape, ((),) * node.meta["val"].ndim, x)


def _memory_order(p, base) -> list[int]:
    order = sorted(range(base.ndim), key=lambda d: -base.stride(d) if base.shape[d] != 1 else 1)
    expected = 1
    for d in reversed(order):
        if base.shape[d] != 1 and base.stride(d) != expected:
            p.fail("a view by strides of a value with gaps in memory: write it with slices, `select` or `unfold`")
        expected *= base.shape[d]
    return order


def _in_memory(p, node, x):
    out = p.emit.permute(x.node, _memory_order(p, node.args[0].meta["val"]))
    return p.emit.call(A.clone.default, out, memory_format=torch.contiguous_format)


def _cut_view(p, x, cuts):
    for dim in reversed(range(x.ndim)):
        cut = cuts[dim]
        if isinstance(cut, int):
            need_whole(p, x, dim, "an index")
            out = p.emit.call(A.select.int, x.node, dim, cut)
            x = result(p, out, x.shape[:dim] + x.shape[dim + 1 :], x.dims[:dim] + x.dims[dim + 1 :], x)
        elif cut != (0, x.shape[dim], 1):
            need_whole(p, x, dim, "a slice")
            start, length, step = cut
            out = p.emit.call(A.slice.Tensor, x.node, dim, start, start + (length - 1) * step + 1, step)
            x = result(p, out, (*x.shape[:dim], length, *x.shape[dim + 1 :]), x.dims, x)
    return x


def as_strided_scatter(p, node, args, kwargs):
    """``src`` written into the slice of ``x`` that the strides describe: nested slice and select scatters."""
    x, src, size, stride = args[:4]
    offset = args[4] if len(args) > 4 else kwargs.get("storage_offset")
    shape = node.meta["val"].shape
    x, found = _sliced(p, node, x, size, stride, offset)
    if found is None:
        return _scatter_by_memory(p, node, p.total(x), p.total(src), size, stride, offset or 0)
    cuts, order = found
    kept = [d for d, c in enumerate(cuts) if not isinstance(c, int)]
    src = _permuted(p, _squeezed(p, src), order, kept)
    whole = [d for d, c in enumerate(cuts) if isinstance(c, int) or c != (0, x.shape[d], 1)]
    labels = [None if d in whole else d for d in range(len(cuts))]
    (x, src), _ = p.align([(x, labels), (src, [labels[d] for d in kept])])
    todo = [c if d in whole else None for d, c in enumerate(cuts)]
    return _reshaped(p, result(p, _scatter(p, x.node, src.node, todo, 0), x.shape, x.dims, x), shape)


def _scatter_by_memory(p, node, x, src, size, stride, offset):
    if any(map(p._real, (*x.dims, *src.dims))):
        p.refuse("an assignment by strides that is no slice")
    order = _memory_order(p, node.args[0].meta["val"])
    out = p.emit.call(A.as_strided_scatter.default, _in_memory(p, node, x), src.node, size, stride, offset)
    return result(p, p.emit.permute(out, [order.index(d) for d in range(x.ndim)]), x.shape, x.dims, x)


def _squeezed(p, value) -> Placed:
    x = p.placed(value)
    keep = [d for d in range(x.ndim) if x.shape[d] != 1]
    out = p.emit.reshape(x.node, [p.local_size(x.shape[d], x.dims[d]) for d in keep])
    return Placed(out, tuple(x.shape[d] for d in keep), tuple(x.dims[d] for d in keep), x.partial)


def _scatter(p, x, src, cuts, dim):
    """Write ``src`` into ``x`` at the cuts of dims ``dim``, ``dim + 1``, ...; None: nothing is cut."""
    while dim < len(cuts) and cuts[dim] is None:
        dim += 1
    if dim == len(cuts):
        return src
    cut = cuts[dim]
    if isinstance(cut, int):
        inner = p.emit.call(A.select.int, x, dim, cut)
        rest = cuts[:dim] + cuts[dim + 1 :]
        return p.emit.call(A.select_scatter.default, x, _scatter(p, inner, src, rest, dim), dim, cut)
    start, length, step = cut
    end = start + (length - 1) * step + 1
    inner = p.emit.call(A.slice.Tensor, x, dim, start, end, step)
    rest = [*cuts[:dim], None, *cuts[dim + 1 :]]
    return p.emit.call(A.slice_scatter.default, x, _scatter(p, inner, src, rest, dim), dim, start, end, step)
