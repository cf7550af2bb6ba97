"""Ops that rearrange: reshapes, permutations, slices, joins. Pending sums pass through; a view of a stored value
waits."""

from __future__ import annotations

import functools

import torch

from fsharding.program.partition import NoRule, Partition
from fsharding.program.values import Const, GroupSizes, Pending, Placed, Spread, Stored, Viewed, is_routed
from fsharding.program.whole import gather_loudly

A = torch.ops.aten


def view_rule(rule):
    """A rule of one operand, ``rule(p, node, x: Placed, *args) -> Placed | Spread``; other domains are dealt with
    here."""

    @functools.wraps(rule)
    def wrapped(p: Partition, node, args, kwargs):
        x, rest = args[0], args[1:]
        shape = node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else None
        if isinstance(x, Const) and shape is not None:
            return Const(x.value, tuple(shape), x.dtype)
        if isinstance(x, Stored | Viewed) and shape is not None:
            return _later(p, node, x, lambda y: rule(p, node, y, *rest, **kwargs), tuple(shape))
        if isinstance(x, GroupSizes):
            x = x.placed
        return rule(p, node, p.placed(x), *rest, **kwargs)

    return wrapped


def _later(p: Partition, node, x: Stored | Viewed, apply, shape) -> Viewed:
    """Take a view only once the stored value is gathered, so that all its views share one gather."""

    def at(y):
        before = p.node
        p.node = node  # rules and errors speak of this op
        try:
            return apply(y)
        except NoRule as why:  # a model axis is in the way
            return apply(gather_loudly(p, y, y.dims, str(why).rstrip(".")))
        finally:
            p.node = before

    if isinstance(x, Viewed):
        return Viewed(x.base, lambda y, inner=x.apply: at(p.placed(inner(y))), shape)
    return Viewed(x, at, shape)


def result(p, out, shape, dims, x):
    return Placed(out, tuple(shape), tuple(dims), x.partial)


@view_rule
def reshape(p, node, x, sizes, *rest, **kwargs):
    """Axes follow their dims; a split that would interleave blocks is refused."""
    shape = tuple(node.meta["val"].shape)
    dims = reshaped_dims(p, x.shape, shape, x.dims)
    return result(p, p.emit.reshape(x.node, p.local_shape(shape, dims)), shape, dims, x)


def reshaped_dims(p: Partition, before, after, dims):
    """Where the axes go. Within a group of dims with one product, a block is a contiguous run if only major dims are
    cut."""
    out = [()] * len(after)
    for ins, outs in groups(before, after):
        ins, wide = [d for d in ins if before[d] != 1], [d for d in outs if after[d] != 1]
        if any(is_routed(dims[d]) for d in ins):
            if len(ins) != 1 or len(wide) != 1:
                p.fail(
                    "reshaping the rows between `dispatch` and `combine`: they are routed, only row-wise ops are legal"
                )
            out[wide[0]] = dims[ins[0]]
            continue
        flat, whole = [], False
        for d in ins:
            axes = dims[d]
            if whole and p._real(axes):
                p.refuse(f"reshape from {tuple(before)} to {tuple(after)} would interleave blocks split over {axes}")
            flat += axes
            whole = whole or p.mesh.axes_size(axes) != before[d]
        _spread_axes(p, flat, wide, before, after, out)
    return tuple(out)


def _spread_axes(p, flat, outs, before, after, out):
    position, left = 0, after[outs[0]] if outs else 1
    for axis in flat:
        n = p.mesh.shape[axis]
        while left == 1 and position + 1 < len(outs):
            position, left = position + 1, after[outs[position + 1]]
        if left % n:
            p.refuse(
                f"reshape from {tuple(before)} to {tuple(after)}: axis {axis!r} of size {n} would split a dim that it "
                "does not divide"
            )
        if outs:
            out[outs[position]] += (axis,)
        left //= n


def groups(before, after):
    """Minimal groups of dims of two shapes with equal products: ``[(dims before, dims after)]``."""
    i, j, out = 0, 0, []
    while i < len(before) or j < len(after):
        ins, outs = [], []
        a = b = 1
        while True:
            if i < len(before) and (a <= b or j >= len(after)) and (a != b or not ins):
                a *= before[i]
                ins.append(i)
                i += 1
            elif j < len(after) and (b < a or not outs or i >= len(before)):
                b *= after[j]
                outs.append(j)
                j += 1
            else:
                break
            if a == b and ins and outs:
                break
        out.append((ins, outs))
    return out


@view_rule
def permute(p, node, x, order):
    """Axes go with their dims."""
    order = [d % x.ndim for d in order]
    return result(p, p.emit.permute(x.node, order), [x.shape[d] for d in order], [x.dims[d] for d in order], x)


@view_rule
def transpose(p, node, x, a, b):
    """Axes go with their dims."""
    order = list(range(x.ndim))
    if order:  # a 0-d value may be transposed as well
        order[a], order[b] = order[b], order[a]
    return result(p, p.emit.permute(x.node, order), [x.shape[d] for d in order], [x.dims[d] for d in order], x)


@view_rule
def matrix_transpose(p, node, x):
    """Axes go with their dims."""
    order = list(range(x.ndim))[::-1]
    return result(p, p.emit.permute(x.node, order), x.shape[::-1], x.dims[::-1], x)


@view_rule
def unsqueeze(p, node, x, dim):
    """The new dim is whole."""
    dim %= x.ndim + 1
    shape, dims = list(x.shape), list(x.dims)
    shape.insert(dim, 1)
    dims.insert(dim, ())
    return result(p, p.emit.call(A.unsqueeze.default, x.node, dim), shape, dims, x)


@view_rule
def squeeze(p, node, x, dim=None):
    """Axes of the dims that are left stay."""
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    drop = {d % x.ndim for d in dims if x.ndim and x.shape[d % x.ndim] == 1}
    keep = [d for d in range(x.ndim) if d not in drop]
    out = p.emit.call(A.squeeze.dims, x.node, sorted(drop)) if drop else x.node
    return result(p, out, [x.shape[d] for d in keep], [x.dims[d] for d in keep], x)


def expand(p, node, args, kwargs):
    """A dim that is expanded stays small until it meets a value that is split there."""
    value = args[0]
    shape = tuple(node.meta["val"].shape)
    if isinstance(value, Const):
        return Const(value.value, shape, value.dtype)
    if isinstance(value, Stored | Viewed):
        if isinstance(value, Stored) and value.shape == shape:
            return value
        return _later(p, node, value, lambda y: _expand(p, y, shape), shape)
    if isinstance(value, Spread):
        return _expand(p, value.base, shape)
    if isinstance(value, Pending):
        value = p.total(value)
    return _expand(p, p.placed(value), shape)


def _expand(p, x: Placed, shape):
    missing = len(shape) - x.ndim
    node = x.node
    if missing:
        node = p.emit.reshape(node, [1] * missing + p.local_shape(x.shape, x.dims))
    base = Placed(node, (1,) * missing + x.shape, ((),) * missing + x.dims, x.partial)
    return base if base.shape == shape else Spread(base, shape)


def need_whole(p, x, dim, what):
    if p._real(x.dims[dim]):
        if is_routed(x.dims[dim]):
            p.fail(f"{what} of the rows between `dispatch` and `combine`: they are routed, only row-wise ops are legal")
        p.refuse(f"{what} along a dim that is split over {x.dims[dim]}")


@view_rule
def select(p, node, x, dim, index):
    """The dim that is selected from must be whole."""
    dim %= x.ndim
    need_whole(p, x, dim, "an index (of micro-batches: each needs rows for every rank that splits them)")
    out = p.emit.call(A.select.int, x.node, dim, index)
    return result(p, out, x.shape[:dim] + x.shape[dim + 1 :], x.dims[:dim] + x.dims[dim + 1 :], x)


@view_rule
def slice_(p, node, x, dim=0, start=None, end=None, step=1):
    """Local if the sliced dim is whole, or not cut short."""
    dim %= x.ndim
    shape = tuple(node.meta["val"].shape)
    if shape == x.shape:
        return x
    need_whole(p, x, dim, "a slice")
    return result(p, p.emit.call(A.slice.Tensor, x.node, dim, start, end, step), shape, x.dims, x)


def split(p, node, args, kwargs):
    """``split`` and ``split_with_sizes``: a list of views."""
    x, sizes, dim = args[0], args[1], (args[2] if len(args) > 2 else kwargs.get("dim", 0))
    shapes = [tuple(v.shape) for v in node.meta["val"]]
    if isinstance(x, Const):
        return [Const(x.value, s, x.dtype) for s in shapes]
    if isinstance(x, Stored | Viewed):
        make = lambda i: _later(p, node, x, lambda y: _split(p, node, y, sizes, dim, shapes)[i], shapes[i])  # noqa: E731
        return [make(i) for i in range(len(shapes))]
    return _split(p, node, p.placed(x), sizes, dim, shapes)


def _split(p, node, x, sizes, dim, shapes):
    dim %= x.ndim
    need_whole(p, x, dim, "a split")
    out = p.emit.call(node.target, x.node, sizes, dim)
    return [result(p, p.emit.item(out, i), s, x.dims, x) for i, s in enumerate(shapes)]


def unbind(p, node, args, kwargs):
    """The dim that is unbound must be whole; of a stored value the parts rest as it does, and are gathered one by
    one."""
    x, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if isinstance(x, Stored) and not p._real(x.dims[dim % len(x.shape)]):
        return _at_rest_parts(p, x, dim % len(x.shape))
    x = p.placed(x)
    dim %= x.ndim
    need_whole(p, x, dim, "unbind")
    out = p.emit.call(A.unbind.int, x.node, dim)
    shape, dims = x.shape[:dim] + x.shape[dim + 1 :], x.dims[:dim] + x.dims[dim + 1 :]
    return [result(p, p.emit.item(out, i), shape, dims, x) for i in range(x.shape[dim])]


def _at_rest_parts(p: Partition, x: Stored, dim: int) -> list[Stored]:
    shape, dims = x.shape[:dim] + x.shape[dim + 1 :], x.dims[:dim] + x.dims[dim + 1 :]
    parts = p.emit.call(A.unbind.int, x.node, dim)
    return [
        Stored(p.emit.item(parts, i), shape, dims, f"{x.name}[{i}]" if x.name else None) for i in range(x.shape[dim])
    ]


def join(p, node, args, kwargs):
    """``cat`` along a whole dim, and ``stack``; sums that are pending over the same axes stay pending."""
    values, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0))
    stacked = node.target is A.stack.default
    shape = tuple(node.meta["val"].shape)
    dim %= len(shape)
    # A 1-d empty tensor is skipped by `cat`, whatever the rank of the others.
    values = [v for v in values if stacked or len(_shape(v)) == len(shape)]
    labels = list(range(len(shape) - stacked)) if stacked else [None if d == dim else d for d in range(len(shape))]
    values = [v.placed if isinstance(v, GroupSizes) else v for v in values]
    pending = {v.partial if isinstance(v, Placed) else frozenset() for v in values}
    partial = pending.pop() if len(pending) == 1 else frozenset()
    if partial:
        values = [Placed(v.node, v.shape, v.dims) for v in values]
    placed, found = p.align([(v, labels) for v in values])
    out = p.emit.call(node.target, [x.node for x in placed], dim)
    dims = [found.get(d, ()) for d in range(len(shape) - stacked)]
    if stacked:
        dims.insert(dim, ())
    return Placed(out, shape, tuple(dims), partial)


def _shape(value):
    return value.shape if not isinstance(value, GroupSizes) else value.placed.shape


@view_rule
def flip(p, node, x, over):
    """The flipped dims must be whole."""
    for dim in over if x.ndim else ():
        need_whole(p, x, dim % x.ndim, "a flip")
    return result(p, p.emit.call(A.flip.default, x.node, list(over)), x.shape, x.dims, x)


def pad(p, node, args, kwargs):
    """The padded dims must be whole."""
    x, value = args[0], (args[2] if len(args) > 2 else kwargs.get("value", 0))
    if isinstance(x, Const) and x.value != value:
        args = (p.placed(x), *args[1:])  # no longer one number everywhere
    return _pad(p, node, args, kwargs)


@view_rule
def _pad(p, node, x, widths, value=0):
    for i in range(len(widths) // 2):
        if widths[2 * i] or widths[2 * i + 1]:
            need_whole(p, x, x.ndim - 1 - i, "padding")
    if value and x.partial:
        x = p.total(x)
    out = p.emit.call(A.constant_pad_nd.default, x.node, list(widths), value)
    return result(p, out, node.meta["val"].shape, x.dims, x)


@view_rule
def repeat(p, node, x, times):
    """Repeated dims must be whole."""
    shape = tuple(node.meta["val"].shape)
    missing = len(shape) - x.ndim
    for d in range(x.ndim):
        if times[missing + d] != 1:
            need_whole(p, x, d, "a repetition")
    return result(p, p.emit.call(A.repeat.default, x.node, list(times)), shape, ((),) * missing + x.dims, x)


def select_scatter(p, node, args, kwargs):
    """The dim that is written to must be whole."""
    x, src, dim, index = args
    shape = node.meta["val"].shape
    dim %= len(shape)
    labels = [None if d == dim else d for d in range(len(shape))]
    (x, src), _ = p.align([(x, labels), (src, [d for d in labels if d is not None])])
    return result(p, p.emit.call(A.select_scatter.default, x.node, src.node, dim, index), shape, x.dims, x)
