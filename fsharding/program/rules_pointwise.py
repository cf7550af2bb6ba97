"""Elementwise ops: operands cut alike, stored values at rest, pending sums passed through where the op is linear."""

from __future__ import annotations

import functools

import torch
import torch.fx as fx

from fsharding.program.bundle import like_raw
from fsharding.program.emit import dtype_of
from fsharding.program.partition import Partition, same_dims
from fsharding.program.values import VALUES, Const, Lazy, Pending, Placed, Spread, Stored, Viewed
from fsharding.program.whole import reconcile

A = torch.ops.aten
LINEAR_UNARY = {A.neg.default, A.mul.Scalar, A.div.Scalar, A.positive.default}
SUMS = {A.add.Tensor, A.sub.Tensor}


def pointwise(p: Partition, node: fx.Node, args, kwargs):
    """Any op whose result element depends on the elements of its operands at the same (broadcast) place."""
    kwargs = {
        k: v for k, v in kwargs.items() if k not in ("memory_format", "layout", "device", "pin_memory", "non_blocking")
    }
    operands = [a for a in args if isinstance(a, VALUES)]
    if all(isinstance(a, Const) for a in operands):
        return _fold(p, node, args, kwargs)
    if all(isinstance(a, Const | Lazy) for a in operands):
        return _later(p, node, args, kwargs)
    if node.target in SUMS and any(_pends(a) for a in operands):
        result = _linear(p, node, args, kwargs)
        if result is not None:
            return result
    if any(isinstance(a, Stored) for a in operands):
        result = _stored(p, node, args, kwargs)
        if result is not None:
            return result
    result = _linear(p, node, args, kwargs)
    return _placed(p, node, args, kwargs) if result is None else result


def identity(p, node, args, kwargs):
    """``clone`` and the like: nothing is mutated, so nothing needs a copy."""
    return args[0]


def to_copy(p, node, args, kwargs):
    """Elementwise; a pending sum stays pending where the cast loses nothing, or where it is a gradient that is summed
    over the ranks right afterwards, in the dtype of ``Precision.reduce``."""
    dtype = kwargs.get("dtype")
    x = args[0]
    if dtype is None or (isinstance(x, Placed | Stored) and dtype_of(x.node) == dtype):
        return x
    if isinstance(x, Placed) and x.partial and dtype.is_floating_point and _comes_to_rest(node):
        return Placed(p.emit.cast(x.node, dtype), x.shape, x.dims, x.partial)
    made = pointwise(p, node, args, {"dtype": dtype})
    if isinstance(made, Stored) and isinstance(x, Stored):
        made.name = x.name  # the same leaf, in another dtype
    return made


def _comes_to_rest(node: fx.Node) -> bool:
    """Is this value only cast and marked as a gradient?"""

    def rests(user: fx.Node) -> bool:
        if user.target is A._to_copy.default:
            return _comes_to_rest(user)
        return user.target is like_raw and user.args[0] is node

    return bool(node.users) and all(map(rests, node.users))


def copy(p, node, args, kwargs):
    """``dst.copy_(src)`` in functional form: ``src`` in the shape and dtype of ``dst``."""
    from fsharding.program.rules_views import expand

    shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
    source = args[1]
    if isinstance(source, Const):
        return Const(source.value, tuple(shape), dtype)
    if not isinstance(source, Stored) or tuple(source.shape) != tuple(shape):
        source = expand(p, node, (source, list(shape)), {})
    if isinstance(source, Stored | Placed) and dtype_of(source.node) != dtype:
        return _emit(p, A._to_copy.default, source, dtype=dtype)
    if isinstance(source, Spread):
        base = source.base
        return Spread(Placed(p.emit.cast(base.node, dtype), base.shape, base.dims, base.partial), source.shape)
    return source


def _emit(p, target, x, *args, **kwargs):
    node = p.emit.call(target, x.node, *args, **kwargs)
    return Stored(node, x.shape, x.dims) if isinstance(x, Stored) else Placed(node, x.shape, x.dims, x.partial)


def _fold(p, node, args, kwargs):
    """All operands are constants: so is the result."""
    one = [torch.full([1] * a.ndim, a.value, dtype=a.dtype) if isinstance(a, Const) else a for a in args]
    value = node.target(*one, **kwargs)
    hint = next((a.dims for a in args if isinstance(a, Const) and a.dims and a.shape == p.shape_of_meta()), None)
    return Const(value.reshape(()).item(), p.shape_of_meta(), value.dtype, hint)


def _later(p: Partition, node, args, kwargs):
    """Random numbers alone: the op waits with them until their block is known."""

    def make(dims):
        def block(x):
            own = dims[len(dims) - x.ndim :]
            return p.relayout(x, tuple(axes if n != 1 else () for n, axes in zip(x.shape, own, strict=True)))

        before, p.node = p.node, node
        try:
            out = _placed(p, node, [block(a) if isinstance(a, Lazy) else a for a in args], kwargs)
            return p.relayout(out, dims)  # an expansion, if the numbers were fewer than the result
        finally:
            p.node = before

    return Lazy(make, p.shape_of_meta(), node.meta["val"].dtype)


# ---- stored values ---------------------------------------------------------------------------------------------------
def _stored(p: Partition, node, args, kwargs):
    """Arithmetic among values at rest stays at rest, if no operand is made of rows."""
    shape = p.shape_of_meta()
    operands = [a for a in args if isinstance(a, VALUES)]
    lead = next((a for a in operands if isinstance(a, Stored) and a.shape == shape), None)
    if lead is None or any(isinstance(a, Placed | Spread) and _has_rows(p, a) for a in operands):
        return None
    local = [_at_rest(p, a, lead) if isinstance(a, VALUES) else a for a in args]
    return Stored(p.emit.call(node.target, *local, **kwargs), shape, lead.dims)


def _has_rows(p, value):
    base = value.base if isinstance(value, Spread) else value
    data = set(p.mesh.data_axes)
    return any(p._real(axes) and (not set(axes) <= set(p.mesh.model_axes)) for axes in base.dims if axes) and bool(data)


def _at_rest(p, value, lead: Stored) -> fx.Node:
    """A node that broadcasts against the lead's block."""
    if isinstance(value, Stored) and value.shape == lead.shape and same_dims(p.mesh, value.dims, lead.dims):
        return value.node
    if isinstance(value, Const):
        return p.scalar(value, value.ndim)
    x = value.base if isinstance(value, Spread) else value
    x = p.total(x) if isinstance(x, Pending) else p.placed(x)
    offset = len(lead.shape) - x.ndim
    want = tuple(lead.dims[offset + d] if x.shape[d] == lead.shape[offset + d] else () for d in range(x.ndim))
    if x.shape == lead.shape and x.partial:
        return p.rest(x, want).node
    return p.rest(p.total(x), want).node


# ---- pending sums ----------------------------------------------------------------------------------------------------
def _linear(p, node, args, kwargs):
    """The op commutes with the sum over ranks: leave it pending. None where it does not."""
    target = node.target
    if target is A._to_copy.default or target in LINEAR_UNARY:
        return _linear_unary(p, node, args, kwargs)
    if target in (A.mul.Tensor, A.div.Tensor) and not kwargs:
        return _scaled(p, node, args)
    if target in SUMS:
        return _sum_of_sums(p, node, args, kwargs)
    return None


def _linear_unary(p, node, args, kwargs):
    x = args[0]
    if not isinstance(x, Placed) or not x.partial:
        return None
    if node.target is A._to_copy.default:
        old, new = dtype_of(x.node), kwargs.get("dtype")
        if not (old.is_floating_point and new.is_floating_point and new.itemsize >= old.itemsize):
            return None  # rounding before the sum would be another number
    return Placed(p.emit.call(node.target, x.node, *args[1:], **kwargs), x.shape, x.dims, x.partial)


def _scaled(p, node, args):
    """A pending sum times (or over) a value that is not pending."""
    a, b = args
    if node.target is A.div.Tensor or not (isinstance(b, Placed) and b.partial):
        x, factor, swap = a, b, False
    else:
        x, factor, swap = b, a, True
    if not isinstance(x, Placed) or not x.partial or not dtype_of(x.node).is_floating_point:
        return None
    if isinstance(factor, VALUES):
        if isinstance(factor, Pending) or (isinstance(factor, Placed) and factor.partial):
            factor = p.total(factor)
        if isinstance(factor, Stored | Viewed):
            return None
        if isinstance(factor, Spread) and factor.base.partial:
            return None
        axes = {a for dims in (_dims(factor)) for a in p.row_axes(dims)}
        if axes & x.partial:
            return None  # the factor differs between the ranks that are summed over
    bare = Placed(x.node, x.shape, x.dims)
    out = _placed(p, node, (factor, bare) if swap else (bare, factor), {})
    if isinstance(out, Spread):
        return Spread(Placed(out.base.node, out.base.shape, out.base.dims, x.partial), out.shape)
    return Placed(out.node, out.shape, out.dims, x.partial)


def _dims(value):
    if isinstance(value, Placed):
        return value.dims
    return value.base.dims if isinstance(value, Spread) else ()


def _sum_of_sums(p, node, args, kwargs):
    a, b = args[0], args[1]
    if not isinstance(b, VALUES):
        return (
            a
            if b == 0 and isinstance(a, Placed | Pending) and a.shape == p.shape_of_meta() and _same_dtype(node, a)
            else None
        )
    if isinstance(a, Placed) and isinstance(b, Placed) and a.partial and a.partial == b.partial and a.shape == b.shape:
        found = p.merge([(a, range(a.ndim)), (b, range(b.ndim))])
        dims = tuple(found.get(d, ()) for d in range(a.ndim))
        axes = {axis for d in dims for axis in p.row_axes(d)}
        if axes & a.partial:
            return None
        left, right = (p.relayout(x, dims) for x in (a, b))
        return Placed(p.emit.call(node.target, left.node, right.node, **kwargs), a.shape, dims, a.partial)
    if node.target is A.add.Tensor and not kwargs:
        return _pending(p, a, b)
    return None


def _same_dtype(node, x):
    return not isinstance(x, Placed) or dtype_of(x.node) == node.meta["val"].dtype


def _pending(p, a, b):
    parts = [_parts(x) for x in (a, b)]
    if None in parts or not any(axes for part in parts for axes in part) or a.shape != b.shape:
        return None
    if len({dtype_of(n) for part in parts for n in part.values()}) > 1:
        return None
    merged = dict(parts[0])
    for axes, n in parts[1].items():
        merged[axes] = p.emit.call(A.add.Tensor, merged[axes], n) if axes in merged else n
    return Pending(merged, a.shape)


def _pends(x) -> bool:
    return isinstance(x, Pending) or (isinstance(x, Placed) and bool(x.partial))


def _parts(x):
    if isinstance(x, Stored) and not x.shape:
        return {frozenset(): x.node}
    if isinstance(x, Pending):
        return x.parts
    if isinstance(x, Placed) and x.whole and not x.shape:
        return {x.partial: x.node}
    return None


# ---- placed values ---------------------------------------------------------------------------------------------------
def _placed(p: Partition, node, args, kwargs):
    shape = p.shape_of_meta()
    values = [_effective(p, a) if isinstance(a, VALUES) else a for a in args]
    bases = [v for v in values if isinstance(v, Placed | Lazy)]
    agreed = reconcile(p, [(v, _labels(v.shape, shape)) for v in bases])
    found = p.merge(agreed)
    values = substitute(values, bases, [v for v, _ in agreed])
    bases = [v for v, _ in agreed]
    local = []
    for v in values:
        if isinstance(v, Placed | Lazy):
            dims = tuple(found.get(n, ()) if n is not None else () for n in _labels(v.shape, shape))
            local.append(p.relayout(v, dims).node)
        else:
            local.append(p.scalar(v, v.ndim) if isinstance(v, Const) else v)
    out = p.emit.call(node.target, *local, **kwargs)
    reached = _broadcast(*(tuple(v.shape) for v in bases))
    reached = (1,) * (len(shape) - len(reached)) + reached
    dims = tuple(found.get(d, ()) for d in range(len(shape)))
    if out.meta["val"].ndim < len(shape):
        out = p.emit.reshape(
            out, [1] * (len(shape) - out.meta["val"].ndim) + p.local_shape(reached, dims)[-out.meta["val"].ndim :]
        )
    result = Placed(out, reached, dims)
    return result if reached == shape else Spread(result, shape)


@functools.cache
def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))


def substitute(values, old, new):
    return [next((b for a, b in zip(old, new, strict=True) if a is v), v) for v in values]


def _effective(p, value):
    """The smallest placed value that broadcasts to the operand, or the constant itself."""
    if isinstance(value, Const | Lazy):
        return value
    return p.total(value.base) if isinstance(value, Spread) else p.total(value)


def _labels(have, shape):
    offset = len(shape) - len(have)
    return [offset + d if n == shape[offset + d] else None for d, n in enumerate(have)]
