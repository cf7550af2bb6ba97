"""Reductions, products and ops along one dim."""

from __future__ import annotations

import operator

import torch

from fsharding.comm import shards
from fsharding.program.emit import dtype_of
from fsharding.program.partition import Partition
from fsharding.program.source import phase_of
from fsharding.program.values import VALUES, GroupSizes, Placed, Stored, is_routed

A = torch.ops.aten


# ---- reductions ------------------------------------------------------------------------------------------------------
def _dims(args, kwargs, position, ndim, name="dim"):
    dims = args[position] if len(args) > position else kwargs.get(name)
    if dims is None or list(dims if not isinstance(dims, int) else [dims]) == []:
        return list(range(ndim))
    dims = [dims] if isinstance(dims, int) else dims
    return [d % ndim for d in dims] if ndim else []


def _keep(args, kwargs):
    return bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))


def sum_(p: Partition, node, args, kwargs):
    """Local sums, pending over the axes that split a summed dim. Stored values: a local sum of the block, nothing
    moves."""
    x, dtype = args[0], kwargs.get("dtype")
    dims = _dims(args, kwargs, 1, len(shape_of(x)))
    if isinstance(x, Stored):
        return _stored_sum(p, node, x, dims, _keep(args, kwargs), dtype)
    x = p.placed(x)
    return _sum(p, node, x, dims, _keep(args, kwargs), dtype)


def shape_of(x):
    return x.placed.shape if isinstance(x, GroupSizes) else x.shape


def _sum(p, node, x: Placed, dims, keepdim, dtype):
    _no_forward_routed(p, node, x, dims)
    split = {a for d in dims for a in p.row_axes(x.dims[d])}
    if split & x.partial:
        x = p.total(x)
    if dtype is not None and x.partial and dtype.itemsize < dtype_of(x.node).itemsize:
        x = p.total(x)
    kw = {"dtype": dtype} if dtype is not None else {}
    out = (
        p.emit.call(A.sum.dim_IntList, x.node, dims, keepdim, **kw)
        if x.ndim
        else p.emit.call(A.sum.default, x.node, **kw)
    )
    partial = x.partial | frozenset(p.mesh.sort_axes(split))
    return Placed(out, p.shape_of_meta(), left_dims(x.dims, dims, keepdim), frozenset(partial))


def _no_forward_routed(p, node, x, dims):
    if phase_of(node) == "forward" and any(is_routed(x.dims[d]) for d in dims):
        p.fail(
            "a reduction over routed rows. Between `dispatch` and `combine` only row-wise ops are legal: reduce after "
            "`combine`"
        )


def left_dims(dims, gone, keepdim):
    if keepdim:
        return tuple(() if d in gone else axes for d, axes in enumerate(dims))
    return tuple(axes for d, axes in enumerate(dims) if d not in gone)


def _stored_sum(p, node, x: Stored, dims, keepdim, dtype):
    cut = [d for d, axes in enumerate(x.dims) if p._real(axes)]
    if any(d in dims for d in cut) and not all(d in dims for d in cut):
        return _sum(p, node, p.placed(x), dims, keepdim, dtype)
    local = _masked(p, x, 0)
    kw = {"dtype": dtype} if dtype is not None else {}
    out = (
        p.emit.call(A.sum.dim_IntList, local, dims, keepdim, **kw)
        if x.shape
        else p.emit.call(A.sum.default, local, **kw)
    )
    left = left_dims(x.dims, dims, keepdim)
    if any(d in dims for d in cut):
        return Placed(out, p.shape_of_meta(), ((),) * len(left), frozenset(a for d in cut for a in p._real(x.dims[d])))
    return Stored(out, p.shape_of_meta(), left)


def _masked(p, x: Stored, value):
    """The block with its padding set to ``value``."""
    even = all(n % p.mesh.axes_size(axes) == 0 for n, axes in zip(x.shape, x.dims, strict=True))
    if even:
        return x.node
    mesh = p.mesh.alias(())
    return p.emit.call(shards.mask_padding, x.node, list(x.shape), shards.encode_dims(x.dims), mesh, value)


def mean(p: Partition, node, args, kwargs):
    """A sum over the global number of elements: a mean of local means would weigh ranks, not elements."""
    x, dtype = args[0], kwargs.get("dtype")
    shape = shape_of(x)
    dims = _dims(args, kwargs, 1, len(shape))
    keepdim = _keep(args, kwargs)
    if isinstance(x, Placed) and not x.partial and not any(p._real(x.dims[d]) for d in dims):
        kw = {"dtype": dtype} if dtype is not None else {}
        out = p.emit.call(A.mean.dim, x.node, dims, keepdim, **kw)
        return Placed(out, p.shape_of_meta(), left_dims(x.dims, dims, keepdim))
    count = 1
    for d in dims:
        count *= shape[d]
    out_dtype = node.meta["val"].dtype
    wide = torch.float32 if out_dtype in (torch.bfloat16, torch.float16) else out_dtype
    x = x if isinstance(x, Stored) else p.placed(x)
    total = (
        _stored_sum(p, node, x, dims, keepdim, wide) if isinstance(x, Stored) else _sum(p, node, x, dims, keepdim, wide)
    )
    out = p.emit.call(A.div.Tensor, total.node, count)
    if out_dtype != wide and isinstance(total, Placed):
        total = p.total(Placed(out, total.shape, total.dims, total.partial))
        return Placed(p.emit.cast(total.node, out_dtype), total.shape, total.dims)
    out = p.emit.cast(out, out_dtype)
    return (
        Stored(out, total.shape, total.dims)
        if isinstance(total, Stored)
        else Placed(out, total.shape, total.dims, total.partial)
    )


_REDUCTIONS = {"amax": "max", "amin": "min", "max": "max", "min": "min", "any": "max", "all": "min"}


def extremum(p: Partition, node, args, kwargs):
    """amax, amin, any, all: locally, then one all-reduce over the axes that split a reduced dim."""
    name = node.target.name().split("::")[1].split(".")[0]
    x = p.total(args[0])
    dims = _dims(args, kwargs, 1, x.ndim)
    if (
        name in ("any", "all")
        and len(args) > 1
        and args[1] is not None
        and not isinstance(args[1], int)
        and not len(args[1])
    ):
        dims = []  # here, and only here, PyTorch reads no dims as none
    _no_forward_routed(p, node, x, dims)
    if any(is_routed(x.dims[d]) for d in dims):
        p.refuse("an extremum over routed rows")
    out = p.emit.call(node.target, x.node, *args[1:], **kwargs)
    axes = p.mesh.sort_axes([a for d in dims for a in p._real(x.dims[d])])
    if axes:
        dtype = dtype_of(out)
        if dtype.is_floating_point:  # max and min of the collectives lose a NaN: gather each rank's, reduce here
            gathered = p.emit.all_gather(p.emit.call(A.unsqueeze.default, out, 0), axes)
            over = A.amin.default if _REDUCTIONS[name] == "min" else A.amax.default
            keepdim = node.meta["val"].ndim == x.ndim
            return Placed(p.emit.call(over, gathered, [0]), p.shape_of_meta(), left_dims(x.dims, dims, keepdim))
        out = p.emit.cast(out, torch.int32) if dtype == torch.bool else out
        out = p.emit.cast(p.emit.all_reduce(out, axes, _REDUCTIONS[name]), dtype)
    keepdim = node.meta["val"].ndim == x.ndim
    return Placed(out, p.shape_of_meta(), left_dims(x.dims, dims, keepdim))


def whole_reduction(p: Partition, node, args, kwargs):
    """argmax, var, prod and the like: the reduced dims must be whole."""
    x = p.total(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = _dims((None, dim), {}, 1, x.ndim)
    need_whole(p, x, dims, "a reduction")
    out = p.emit.call(node.target, x.node, *args[1:], **kwargs)
    values = node.meta["val"]
    first = values[0] if isinstance(values, tuple | list) else values
    left = left_dims(x.dims, dims, first.ndim == x.ndim and x.ndim > 0)
    if isinstance(values, tuple | list):
        return tuple(Placed(p.emit.item(out, i), tuple(v.shape), left) for i, v in enumerate(values))
    return Placed(out, p.shape_of_meta(), left)


def need_whole(p, x, dims, what):
    for d in dims:
        if p._real(x.dims[d]):
            p.refuse(f"{what} along a dim that is split over {x.dims[d]}")


# ---- products --------------------------------------------------------------------------------------------------------
def mm(p, node, args, kwargs):
    """Split over m and n; a split k leaves a pending sum."""
    return p.contract(A.mm.default, [(args[0], "mk"), (args[1], "kn")], "mn")


def bmm(p, node, args, kwargs):
    """Split over b, m and n; a split k leaves a pending sum."""
    return p.contract(A.bmm.default, [(args[0], "bmk"), (args[1], "bkn")], "bmn")


def mv(p, node, args, kwargs):
    """Split over m; a split k leaves a pending sum."""
    return p.contract(A.mv.default, [(args[0], "mk"), (args[1], "k")], "m")


def dot(p, node, args, kwargs):
    """A split k leaves a pending sum."""
    return p.contract(A.dot.default, [(args[0], "k"), (args[1], "k")], "")


def addmm(p: Partition, node, args, kwargs):
    """bias · beta + alpha · product; the product's pending sums must be settled before the bias is added."""
    bias, a, b = args
    labels = [("bmk", "bkn", "bmn"), ("mk", "kn", "mn")][node.target is A.addmm.default]
    target = A.mm.default if node.target is A.addmm.default else A.bmm.default
    out = p.total(p.contract(target, [(a, labels[0]), (b, labels[1])], labels[2]))
    if kwargs.get("alpha", 1) != 1:
        out = Placed(p.emit.call(A.mul.Tensor, out.node, kwargs["alpha"]), out.shape, out.dims)
    have, shape = shape_of(bias), out.shape
    names = list(labels[2])[len(shape) - len(have) :]
    names = [
        n if size == shape[len(shape) - len(have) + i] else None
        for i, (n, size) in enumerate(zip(names, have, strict=True))
    ]
    (bias, out), found = p.align([(bias, names), (out, labels[2])])
    beta = bias.node if kwargs.get("beta", 1) == 1 else p.emit.call(A.mul.Tensor, bias.node, kwargs["beta"])
    return Placed(p.emit.call(A.add.Tensor, out.node, beta), shape, out.dims)


# ---- along one dim ---------------------------------------------------------------------------------------------------
def along(positions, dim_of, outputs=None):
    """A rule for ops whose tensor operands (at ``positions``) share all dims, of which those in ``dim_of`` must be
    whole."""

    def rule(p: Partition, node, args, kwargs):
        values = [args[i] for i in positions]
        ndim = len(shape_of(values[0]))
        whole = {d % ndim for d in dim_of(args, kwargs)} if ndim else set()
        shapes = [shape_of(v) for v in values]
        labels = [
            [None if d in whole or any(s[d] != shapes[0][d] for s in shapes) else d for d in range(ndim)]
            for _ in values
        ]
        placed, found = p.align(list(zip(values, labels, strict=True)))
        full = list(args)
        for i, x in zip(positions, placed, strict=True):
            full[i] = x.node
        out = p.emit.call(node.target, *full, **kwargs)
        dims = tuple(found.get(d, ()) for d in range(ndim))
        if isinstance(node.meta["val"], tuple | list):
            return tuple(Placed(p.emit.item(out, i), tuple(v.shape), dims) for i, v in enumerate(node.meta["val"]))
        return Placed(out, p.shape_of_meta(), dims)

    rule.__doc__ = "Local in all dims but those it runs along, which must be whole."
    return rule


def arg(position, name="dim", default=-1):
    return lambda args, kwargs: [args[position] if len(args) > position else kwargs.get(name, default)]


def getitem(p, node, args, kwargs):
    """One of several results."""
    return args[0][args[1]]


def embedding(p: Partition, node, args, kwargs):
    """Split over the ids' dims and the feature dim; the vocabulary must be whole."""
    weight, ids = args[0], args[1]
    ndim = len(shape_of(ids))
    labels = [("i", d) for d in range(ndim)]
    (w, i), found = p.align([(weight, [None, "d"]), (ids, labels)])
    out = p.emit.call(A.embedding.default, w.node, i.node, *args[2:], **kwargs)
    return Placed(out, p.shape_of_meta(), tuple(found.get(n, ()) for n in [*labels, "d"]))


def embedding_backward(p: Partition, node, args, kwargs):
    """Split over the feature dim; rows that are split leave a pending sum."""
    grad, ids = args[0], args[1]
    if args[4]:
        p.refuse("`embedding` with `scale_grad_by_freq`: the frequencies are those of one rank")
    ndim = len(shape_of(ids))
    labels = [("i", d) for d in range(ndim)]
    (g, i), found = p.align([(grad, [*labels, "d"]), (ids, labels)])
    out = p.emit.call(A.embedding_dense_backward.default, g.node, i.node, *args[2:])
    partial = {a for n in labels for a in p.row_axes(found.get(n, ()))}
    return Placed(out, p.shape_of_meta(), ((), found.get("d", ())), frozenset(a for a in partial if p._real((a,))))


def replicated(p: Partition, node, args, kwargs):
    """Any op, on operands that every rank holds whole."""
    flat = [a for a in walk((args, kwargs)) if isinstance(a, VALUES)]
    values = {id(v): p.total(v) for v in flat}
    if any(p._real(axes) for v in values.values() for axes in v.dims):
        p.refuse(
            "an operand is split over "
            + ", ".join(sorted({a for v in values.values() for x in v.dims for a in p._real(x)}))
        )
    # Contiguous: the program's own copies were dropped as needless, but a kernel without a rule may insist.
    args, kwargs = substitute((args, kwargs), {i: p.emit.contiguous(v.node) for i, v in values.items()})
    out = p.emit.call(node.target, *args, **kwargs)
    return whole_results(p, node, out)


def whole_results(p, node, out):
    val = node.meta["val"]
    if isinstance(val, tuple | list):
        return tuple(
            Placed(p.emit.item(out, i), tuple(v.shape), ((),) * v.ndim) if isinstance(v, torch.Tensor) else v
            for i, v in enumerate(val)
        )
    return Placed(out, tuple(val.shape), ((),) * val.ndim)


def walk(tree):
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from walk(item)
    elif isinstance(tree, dict):
        yield from walk(list(tree.values()))
    else:
        yield tree


def substitute(tree, by_id):
    if isinstance(tree, tuple | list):
        return type(tree)(substitute(item, by_id) for item in tree)
    if isinstance(tree, dict):
        return {k: substitute(v, by_id) for k, v in tree.items()}
    return by_id.get(id(tree), tree)


def replace_tensors(args, kwargs, slots, placed):
    """The arguments with the tensors at ``slots`` (``labels.tensor_slots``) replaced by local ones, in order."""
    full, named, local = list(args), dict(kwargs), iter(placed)
    for where, value in slots:
        if value is not None:
            (full if isinstance(where, int) else named)[where] = next(local).node
    return full, named


OPERATORS = {operator.getitem: getitem}
