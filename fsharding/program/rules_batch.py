"""Ops that are local in their batch dims: convolution, pooling, resizing, linear algebra, FFT; and ops along one dim.

A convolution's weight gradient is a sum over rows, so each rank's is one term of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fsharding.comm import storage
from fsharding.program import rules_pointwise as pw
from fsharding.program import rules_reduce as red
from fsharding.program.labels import label_rule, tensor_slots
from fsharding.program.partition import Partition
from fsharding.program.values import Placed, is_routed

A = torch.ops.aten


# ---- leading dims ----------------------------------------------------------------------------------------------------
def leading(core: str | Callable, sizes: int | None = None) -> Callable:
    """A rule for ops that do the same for every index of their leading dims, which broadcast.

    Args:
        core: as ``"2 2 -> 2 0"``: how many trailing dims of each tensor operand (None where one is left out) and of
            each result belong to one piece of work; or a function of the op's arguments that returns that.
        sizes: the argument that lists the sizes of a result, whose leading ones become local.
    """

    def rule(p: Partition, node, args, kwargs):
        ins, outs = _counts(core, node)
        slots = tensor_slots(node.target, args, kwargs)
        given = [(v, c) for (_, v), c in zip(slots, ins, strict=True) if v is not None]
        lead = torch.broadcast_shapes(*(tuple(red.shape_of(v))[: len(red.shape_of(v)) - c] for v, c in given))
        placed, found = p.align([(v, _lead_labels(red.shape_of(v), c, lead) + [None] * c) for v, c in given])
        if node.target in _ROW_MAJOR:
            placed = [replace(x, node=p.emit.call(A.contiguous.default, x.node)) for x in placed]
        local = red.replace_tensors(args, kwargs, slots, placed)
        if sizes is not None:
            full = list(local[0])
            own = p.local_shape(lead, tuple(found.get(d, ()) for d in range(len(lead))))
            full[sizes] = [*own, *list(full[sizes])[len(own) :]]
            local = (full, local[1])
        return _lead_results(p, node, p.emit.call(node.target, *local[0], **local[1]), outs, lead, found)

    rule.__doc__ = "local in the leading dims"
    return rule


# CUDA's kernel gives a wrong gradient for padded windows on channels-last memory (pytorch#188344, in torch 2.11).
_ROW_MAJOR = {A.avg_pool2d_backward.default, A.avg_pool2d.default}


def _counts(core, node) -> tuple[list[int], list[int]]:
    if callable(core):
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        core = core(*args, **kwargs)
    return tuple([int(c) for c in side.split()] for side in core.split("->"))


def _lead_labels(shape, core: int, lead) -> list:
    offset = len(lead) - (len(shape) - core)
    return [offset + d if n == lead[offset + d] else None for d, n in enumerate(shape[: len(shape) - core])]


def _lead_results(p, node, out, outs, lead, found):
    values = node.meta["val"]
    many = isinstance(values, tuple | list)
    made = []
    for i, (value, core) in enumerate(zip(values if many else [values], outs, strict=True)):
        if value is None:
            made.append(None)
            continue
        labels = _lead_labels(tuple(value.shape), core, lead)
        dims = tuple(found.get(n, ()) for n in labels) + ((),) * core
        made.append(Placed(p.emit.item(out, i) if many else out, tuple(value.shape), dims))
    return tuple(made) if many else made[0]


def _is_vector(a, b) -> bool:
    return len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])


def _solve_counts(a, b, **kwargs) -> str:
    right = 1 if _is_vector(tuple(a.shape), tuple(b.shape)) else 2
    return f"2 {right} -> {right} 2 1 0"


_solve_leading = leading(_solve_counts)


def solve(p: Partition, node, args, kwargs):
    """local in the leading dims"""
    a, b = args[:2]
    missing = len(red.shape_of(a)) - len(red.shape_of(b))
    if missing > 0 and not _is_vector(tuple(red.shape_of(a)), tuple(red.shape_of(b))):
        # One matrix for all: with its own leading dims no block of it can be mistaken for a batch of vectors.
        x = p.total(b)
        out = p.emit.reshape(x.node, [1] * missing + p.local_shape(x.shape, x.dims))
        b = Placed(out, (1,) * missing + x.shape, ((),) * missing + x.dims)
    return _solve_leading(p, node, (a, b, *args[2:]), kwargs)


_LINEAR_ALGEBRA = {
    "linalg_inv_ex": "2 -> 2 0",
    "linalg_cholesky_ex": "2 -> 2 0",
    "linalg_qr": "2 -> 2 2",
    "_linalg_svd": "2 -> 2 1 2",
    "_linalg_eigh": "2 -> 1 2",
    "linalg_eig": "2 -> 1 2",
    "_linalg_det": "2 -> 0 2 1",
    "_linalg_slogdet": "2 -> 0 0 2 1",
    "linalg_lu": "2 -> 2 2 2",
    "linalg_lu_factor_ex": "2 -> 2 1 0",
    "lu_unpack": "2 1 -> 2 2 2",
    "linalg_lu_solve": "2 1 2 -> 2",
    "linalg_ldl_factor_ex": "2 -> 2 1 0",
    "linalg_matrix_exp": "2 -> 2",
    "linalg_householder_product": "2 1 -> 2",
    "linalg_pinv.atol_rtol_tensor": "2 0 0 -> 2",
    "linalg_solve_triangular": "2 2 -> 2",
    "triangular_solve": "2 2 -> 2 2",
    "cholesky_solve": "2 2 -> 2",
    "cholesky_inverse": "2 -> 2",
}
_POOLING = {
    "max_pool2d_with_indices": "2 -> 2 2",
    "max_pool2d_with_indices_backward": "2 2 2 -> 2",
    "max_pool3d_with_indices": "3 -> 3 3",
    "max_pool3d_with_indices_backward": "3 3 3 -> 3",
    "avg_pool2d": "2 -> 2",
    "avg_pool2d_backward": "2 2 -> 2",
    "avg_pool3d": "3 -> 3",
    "avg_pool3d_backward": "3 3 -> 3",
    "_adaptive_avg_pool2d": "2 -> 2",
    "_adaptive_avg_pool2d_backward": "2 2 -> 2",
    "_adaptive_avg_pool3d": "3 -> 3",
    "_adaptive_avg_pool3d_backward": "3 3 -> 3",
    "adaptive_max_pool2d": "2 -> 2 2",
    "adaptive_max_pool2d_backward": "2 2 2 -> 2",
    "adaptive_max_pool3d": "3 -> 3 3",
    "adaptive_max_pool3d_backward": "3 3 3 -> 3",
    **{f"{kind}_pad{n}d": f"{n} -> {n}" for kind in ("reflection", "replication") for n in (1, 2, 3)},
    **{f"{kind}_pad{n}d_backward": f"{n} {n} -> {n}" for kind in ("reflection", "replication") for n in (1, 2, 3)},
}
_RESIZE = {
    **{f"{kind}{n}d": n for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)},
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
    "upsample_trilinear3d": 3,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}


# ---- convolution, sampling, distances --------------------------------------------------------------------------------
def _conv_terms(x, weight, bias) -> tuple[str, str, str, str]:
    space = range(weight.ndim - 2)
    return (
        "n [c] " + " ".join(f"[x{i}]" for i in space),
        "[o] [i] " + " ".join(f"[k{i}]" for i in space),
        "[b]",
        "n [d] " + " ".join(f"[y{i}]" for i in space),
    )


def convolution(x, weight, bias, *rest) -> str:
    """local in the batch dim"""
    at_x, at_w, at_b, at_y = _conv_terms(x, weight, bias)
    return f"{at_x}, {at_w}, {at_b} -> {at_y}"


def convolution_backward(g, x, weight, *rest) -> str:
    """local in the batch dim; the gradients of weight and bias are sums over it"""
    at_x, at_w, at_b, at_y = _conv_terms(x, weight, None)
    return f"{at_y}, {at_x}, {at_w} -> {at_x}, {at_w}, {at_b}"


def grid_sampler(x, grid, *rest) -> str:
    """local in the batch and channel dims"""
    space = x.ndim - 2
    ins, outs = (" ".join(f"[{c}{i}]" for i in range(space)) for c in "xy")
    return f"n c {ins}, n {outs} [k] -> n c {outs}"


def grid_sampler_backward(g, x, grid, *rest) -> str:
    """local in the batch and channel dims; the grid's gradient is a sum over channels"""
    space = x.ndim - 2
    ins, outs = (" ".join(f"[{c}{i}]" for i in range(space)) for c in "xy")
    return f"n c {outs}, n c {ins}, n {outs} [k] -> n c {ins}, n {outs} [k]"


# ---- along one dim ---------------------------------------------------------------------------------------------------
def selected(position: int, default: int = -1) -> Callable:
    """Ops such as ``kthvalue`` that reduce one dim: it must be whole."""

    def rule(p: Partition, node, args, kwargs):
        x = args[0]
        ndim = len(red.shape_of(x))
        dim = red.arg(position, default=default)(args, kwargs)[0] % ndim if ndim else 0
        ((x,), found) = p.align([(x, [None if d == dim else d for d in range(ndim)])])
        out = p.emit.call(node.target, x.node, *args[1:], **kwargs)
        values = node.meta["val"]
        keep = values[0].ndim == ndim
        dims = tuple(found.get(d, ()) for d in range(ndim) if keep or d != dim)
        return tuple(Placed(p.emit.item(out, i), tuple(v.shape), dims) for i, v in enumerate(values))

    rule.__doc__ = "along one whole dim"
    return rule


def extreme(p: Partition, node, args, kwargs):
    """argmax, argmin, ``max`` and ``min`` over a dim: of each block, then of what the blocks gave."""
    x = p.total(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is None or not x.ndim or not p._real(x.dims[dim % x.ndim]) or is_routed(x.dims[dim % x.ndim]):
        return red.whole_reduction(p, node, args, kwargs)
    dim %= x.ndim
    axes, block = p._real(x.dims[dim]), p.local_size(x.shape[dim], x.dims[dim])
    name = node.target.name().split("::")[1].split(".")[0].removeprefix("arg")
    over = getattr(A, name).dim
    best = p.emit.call(over, x.node, dim, True)
    count = p.mesh.axes_size(axes)
    shape = [count if d == dim else n for d, n in enumerate(p.local_shape(x.shape, x.dims))]
    extra = ((),) * dim + (axes,) + ((),) * (x.ndim - dim - 1)
    values, places = (storage.gather(p.emit, p.emit.item(best, i), shape, extra) for i in (0, 1))
    first = p.emit.call(over, values, dim, True)  # of equal ones the first, as among the elements of one block
    where = p.emit.item(first, 1)
    place = p.emit.call(A.gather.default, places, dim, where)
    place = p.emit.call(A.add.Tensor, place, p.emit.call(A.mul.Tensor, where, block))
    results = [p.emit.item(first, 0), place] if node.target in (A.max.dim, A.min.dim) else [place]
    made = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
    keep = made[0].ndim == x.ndim
    dims = red.left_dims(x.dims, [dim], keep)
    results = [Placed(r if keep else p.emit.call(A.squeeze.dim, r, dim), tuple(v.shape), dims)
               for r, v in zip(results, made, strict=True)]  # fmt: skip
    return tuple(results) if isinstance(node.meta["val"], tuple | list) else results[0]


def _fft_dims(args, kwargs) -> Sequence[int]:
    return [args[1]] if isinstance(args[1], int) else args[1]


def bucketize(x, boundaries, **kwargs) -> str:
    """elementwise; the boundaries are whole"""
    return "..., [k] -> ..."


def searchsorted(ordered, x, *, sorter=None, **kwargs) -> str:
    """local in the leading dims; the sorted dim is whole"""
    if ordered.ndim == 1:
        return "[k], ..., [k] -> ..."
    return "... [k], ... [v], ... [k] -> ... [v]"


# ---- windows and diagonals -------------------------------------------------------------------------------------------
def diagonal(p: Partition, node, args, kwargs):
    """the two dims of the diagonal are whole"""
    x = args[0]
    ndim, a, b = _diagonal_dims(x, args[1:], kwargs)
    ((x,), found) = p.align([(x, [None if d in (a, b) else d for d in range(ndim)])])
    out = p.emit.call(node.target, x.node, *args[1:], **kwargs)
    dims = (*(found.get(d, ()) for d in range(ndim) if d not in (a, b)), ())
    return Placed(out, p.shape_of_meta(), dims)


def diagonal_scatter(p: Partition, node, args, kwargs):
    """the two dims of the diagonal are whole"""
    x, src = args[:2]
    ndim, a, b = _diagonal_dims(x, args[2:], kwargs)
    rest = [d for d in range(ndim) if d not in (a, b)]
    labels = [d if d in rest else None for d in range(ndim)]
    ((x, src), found) = p.align([(x, labels), (src, [*rest, None])])
    out = p.emit.call(node.target, x.node, src.node, *args[2:], **kwargs)
    return Placed(out, p.shape_of_meta(), tuple(found.get(d, ()) for d in range(ndim)))


def _diagonal_dims(x, rest, kwargs):
    ndim = len(red.shape_of(x))
    a, b = (
        rest[i] if len(rest) > i else kwargs.get(name, default) for i, name, default in ((1, "dim1", 0), (2, "dim2", 1))
    )
    return ndim, a % ndim, b % ndim


def unfold(p: Partition, node, args, kwargs):
    """the unfolded dim is whole"""
    x, dim = args[:2]
    ndim = len(red.shape_of(x))
    ((x,), found) = p.align([(x, [None if d == dim % ndim else d for d in range(ndim)])])
    out = p.emit.call(node.target, x.node, *args[1:])
    return Placed(out, p.shape_of_meta(), (*(found.get(d, ()) for d in range(ndim)), ()))


def unfold_backward(p: Partition, node, args, kwargs):
    """the unfolded dim is whole"""
    g, shape, dim = args[:3]
    ndim = len(shape)
    ((g,), found) = p.align([(g, [None if d == dim % ndim else d for d in range(ndim)] + [None])])
    dims = tuple(found.get(d, ()) for d in range(ndim))
    out = p.emit.call(node.target, g.node, p.local_shape(shape, dims), *args[2:])
    return Placed(out, tuple(shape), dims)


def _op(name: str):
    packet, _, overload = name.partition(".")
    found = getattr(A, packet, None)
    return None if found is None else getattr(found, overload or "default", None)


RULES = {
    **{_op(name): leading(core) for name, core in {**_LINEAR_ALGEBRA, **_POOLING}.items()},
    **{_op(name): leading(f"{n} -> {n}") for name, n in _RESIZE.items()},
    **{_op(name + "_backward"): leading(f"{n} -> {n}", sizes=2) for name, n in _RESIZE.items()},
    A._linalg_solve_ex.default: solve,
    A.convolution.default: label_rule(convolution),
    A.convolution_backward.default: label_rule(convolution_backward),
    A.grid_sampler_2d.default: label_rule(grid_sampler),
    A.grid_sampler_3d.default: label_rule(grid_sampler),
    A.grid_sampler_2d_backward.default: label_rule(grid_sampler_backward),
    A.grid_sampler_3d_backward.default: label_rule(grid_sampler_backward),
    A._cdist_forward.default: label_rule("... p [d], ... r [d] -> ... p r"),
    A._cdist_backward.default: label_rule("... p r, ... p [d], ... r [d], ... p r -> ... p [d]"),
    A.bucketize.Tensor: label_rule(bucketize),
    A.searchsorted.Tensor: label_rule(searchsorted),
    A.view_as_complex.default: label_rule("... [k] -> ..."),
    A.view_as_real.default: label_rule("... -> ... [k]"),
    **{op: pw.pointwise for op in (A.complex.default, A.polar.default)},
    **{op: pw.pointwise for op in (A.hardshrink_backward.default, A.softshrink_backward.default)},
    **{op: red.along([0], _fft_dims) for op in (A._fft_r2c.default, A._fft_c2r.default, A._fft_c2c.default)},
    **{op: red.along([0], red.arg(1)) for op in (A.cummax.default, A.cummin.default)},
    A.scatter_reduce.two: red.along([0, 2, 3], red.arg(1)),
    **{op: selected(1) for op in (A.median.dim, A.nanmedian.dim, A.mode.default)},
    A.kthvalue.default: selected(2),
    **{op: extreme for op in (A.argmax.default, A.argmin.default, A.max.dim, A.min.dim)},
    A.diagonal.default: diagonal,
    A.diagonal_scatter.default: diagonal_scatter,
    A.unfold.default: unfold,
    A.unfold_backward.default: unfold_backward,
}
RULES.pop(None, None)  # ops that this version of PyTorch does not have
