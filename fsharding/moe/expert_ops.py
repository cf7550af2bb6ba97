"""Raw ops of the fused expert MLP: references that define them on any device, Triton kernels for bfloat16 on CUDA.

Legend: T tokens, k experts a token, R = T·k rows, E experts, D model dim, H expert hidden. ``w_in`` [E, D, 2H] rests as
``[gate | up]`` along its last dim, ``w_out`` is [E, H, D]. ``rows`` [R] says where row r of the expert order stands in
the tensor that holds it: the token of r, or its place among rows that arrived from other ranks in another order.

What is kept for the backward pass is x, the pre-activation h [R, 2H], weights and integers. The activation is computed
again, and the gradient of a routing weight is ``<g @ w_out.T, a>``, so that the down-product's result is not needed.
"""

from __future__ import annotations

import torch

from fsharding.errors import ShardingError
from fsharding.moe import fast, grouped, ops
from fsharding.oplib import raw_op

ACTIVATIONS = ("swiglu", "geglu", "glu")
TILE = 128  # rows of one tile of the kernels' schedule; equal to theirs (a test compares)


# ---- activations, on plain tensors, differentiable to any order ------------------------------------------------------
def gate(z: torch.Tensor, activation: str, order: int = 0) -> torch.Tensor:
    """f, f' or f'' (``order`` 0, 1, 2) of the gate: SiLU, exact GELU or the identity, elementwise."""
    if activation == "swiglu":
        s = torch.sigmoid(z)
        if order == 0:
            return z * s
        return s * (1 + z * (1 - s)) if order == 1 else s * (1 - s) * (2 + z * (1 - 2 * s))
    if activation == "geglu":
        cdf, density = 0.5 * (1 + torch.erf(z * 0.5**0.5)), torch.exp(-0.5 * z * z) * (0.5 / torch.pi) ** 0.5
        return (z * cdf, cdf + z * density, density * (2 - z * z))[order]
    return z if order == 0 else torch.ones_like(z) if order == 1 else torch.zeros_like(z)


def activate(h: torch.Tensor, activation: str) -> torch.Tensor:
    """[R, 2H] -> f(gate) · up [R, H]; half precision is computed in float32."""
    z, up = ops.wide(h).chunk(2, -1)
    return (gate(z, activation) * up).to(h.dtype)


# ---- references ------------------------------------------------------------------------------------------------------
def _dot(x, w, group_sizes):
    return (grouped.ragged_dot_cuda if x.is_cuda else grouped.ragged_dot_loop)(x, w, group_sizes)


def _dw(x, g, group_sizes):
    return (grouped.ragged_dw_cuda if x.is_cuda else grouped.ragged_dw_loop)(x, g, group_sizes)


def _forward(x, w_in, w_out, group_sizes, rows, activation, out):
    """(rows of the result in expert order, h)"""
    h = _dot(x.index_select(0, rows), w_in, group_sizes)
    return _dot(activate(h, activation), w_out, group_sizes) if out else h.new_empty(0, w_out.shape[2]), h


def _backward(g, x, w_in, w_out, scale, h, group_sizes, rows, activation, needs):
    """Gradients of (x's rows, w_in, w_out, scale) in expert order; rows are scaled by ``scale`` [R] behind w_out."""
    empty, g = x.new_empty(0), g.index_select(0, rows)
    wide = ops.wide(_dot(g, w_out.mT, group_sizes))
    z, up = ops.wide(h).chunk(2, -1)
    value = gate(z, activation)
    scaled = wide * scale[:, None]
    dh = torch.cat([scaled * up * gate(z, activation, 1), scaled * value], -1).to(x.dtype)
    dx = _dot(dh, w_in.mT, group_sizes) if needs[0] else empty
    dw_in = _dw(x.index_select(0, rows), dh, group_sizes) if needs[1] else empty
    dw_out = _dw((value * up * scale[:, None]).to(x.dtype), g, group_sizes) if needs[2] else empty
    return dx, dw_in, dw_out, (wide * value * up).sum(-1) if needs[3] else scale.new_empty(0)


def _to_sources(y, rows):
    """Rows in expert order back to where ``rows``, a permutation, found them."""
    return torch.empty_like(y).index_copy_(0, rows.long(), y) if y.numel() else y


# ---- the schedule ----------------------------------------------------------------------------------------------------
def _tiles(perm, group_sizes, k):
    rows = (perm // k).to(torch.int32)
    # a routing that was changed by hand must not lead a kernel out of its operands
    ends = group_sizes.cumsum(0, dtype=torch.int32).clamp_(0, perm.shape[0])
    if perm.is_cuda and fast.present():
        return rows, ends, *fast.kernel("routing", "schedule_launch")(ends, perm.shape[0])
    sizes, groups = group_sizes.long(), group_sizes.shape[0]
    counts = (sizes + TILE - 1) // TILE
    lines = -(-perm.shape[0] // TILE) + groups
    tile = torch.arange(lines, device=perm.device)
    last = counts.cumsum(0)
    used = tile < last[-1]
    group = torch.searchsorted(last, tile, right=True).clamp(max=groups - 1)
    first = (sizes.cumsum(0) - sizes)[group] + (tile - (last - counts)[group]) * TILE
    end = torch.minimum(first + TILE, ends.long()[group])
    body = torch.stack([group, first, end, torch.zeros_like(end)], 1)
    body = torch.where(used[:, None], body, torch.tensor([-1, 0, 0, 0], device=perm.device))
    head = torch.stack([last[-1], ends[-1].long(), *torch.zeros_like(last[-1:]).expand(2)])
    blocks = torch.cat([head[None], body]).to(torch.int32)
    return rows, ends, blocks, torch.argsort(sizes, descending=True, stable=True).to(torch.int32)


tiles_raw = raw_op(
    "moe_tiles(Tensor perm, Tensor group_sizes, int k) -> (Tensor, Tensor, Tensor, Tensor)",
    _tiles,
    lambda perm, group_sizes, k: (
        perm.new_empty(perm.shape[0], dtype=torch.int32),
        perm.new_empty(group_sizes.shape[0], dtype=torch.int32),
        perm.new_empty((1 + (perm.shape[0] + TILE - 1) // TILE + group_sizes.shape[0], 4), dtype=torch.int32),
        perm.new_empty(group_sizes.shape[0], dtype=torch.int32),
    ),
)
"""What all products of a routing share, int32: (``perm // k`` [R], ends of the groups [E], tiles of at most ``TILE``
rows that the kernels work through [1 + tiles, 4], groups from the largest to the smallest [E])."""


# ---- tokens: the layer where every rank holds the experts of its tokens ----------------------------------------------
def _mlp(x, w_in, w_out, weights, perm, inverse, group_sizes, rows, ends, blocks, largest, activation, out, keep):
    if fast.serves(x):
        slots = inverse.view(weights.shape)
        if not out:
            h = fast.kernel("rows", "rows_launch")(x, w_in, ends, blocks, rows)
            return x.new_empty(0, x.shape[1]), h
        return fast.kernel("experts", "forward_launch")(
            x, w_in, w_out, weights, ends, perm, slots, rows, blocks, largest, activation, keep
        )
    y, h = _forward(x, w_in, w_out, group_sizes, rows, activation, out)
    return ops.combine_kernel(y, weights, perm, inverse) if out else y, h if keep else h[:0].clone()


def _mlp_fake(x, w_in, w_out, weights, perm, inverse, group_sizes, rows, ends, blocks, largest, activation, out, keep):
    return (
        x.new_empty(x.shape[0] if out else 0, x.shape[1]),
        x.new_empty(perm.shape[0] if keep else 0, w_in.shape[2]),
    )


def _mlp_backward(
    g, x, w_in, w_out, weights, h, perm, inverse, group_sizes, rows, ends, blocks, largest, activation, needs
):
    if fast.serves(x):
        slots = inverse.view(weights.shape)
        return fast.kernel("experts", "backward_launch")(
            g, x, w_in, w_out, weights, h, ends, perm, slots, rows, blocks, largest, activation, needs
        )
    scale = row_weights(weights, perm, x.dtype)
    dx, dw_in, dw_out, dscale = _backward(g, x, w_in, w_out, scale, h, group_sizes, rows, activation, needs)
    if needs[0]:
        dx = ops.dispatch_t_kernel(dx, perm, inverse, weights.shape[1])
    return dx, dw_in, dw_out, dscale[inverse].view(weights.shape).to(weights.dtype) if needs[3] else dscale


def row_weights(weights, perm, dtype):
    """[T, k] in the order of rows [R], in float32 or better."""
    return weights.to(torch.promote_types(dtype, torch.float32)).reshape(-1).index_select(0, perm)


def _gradients_fake(values, needs):
    return tuple(v.new_empty(v.shape if need else 0) for v, need in zip(values, needs, strict=True))


_ROUTING = "Tensor perm, Tensor inverse, Tensor group_sizes, Tensor rows, Tensor ends, Tensor blocks, Tensor largest"
mlp_raw = raw_op(
    f"moe_mlp(Tensor x, Tensor w_in, Tensor w_out, Tensor weights, {_ROUTING}, str activation, bool out, bool keep) "
    "-> (Tensor, Tensor)",
    _mlp,
    _mlp_fake,
)
"""x [T, D], weights [T, k] -> (out [T, D] if ``out``, h [R, 2H] if ``keep``); what is not wanted has no rows."""
mlp_backward_raw = raw_op(
    f"moe_mlp_backward(Tensor g, Tensor x, Tensor w_in, Tensor w_out, Tensor weights, Tensor h, {_ROUTING}, "
    "str activation, bool[4] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    _mlp_backward,
    lambda g, x, w_in, w_out, weights, *rest: _gradients_fake((x, w_in, w_out, weights), rest[-1]),
)
"""Gradients of (x, w_in, w_out, weights); what is not needed has no elements."""


# ---- rows: the experts' side of an exchange --------------------------------------------------------------------------
def _mlp_rows(x, w_in, w_out, group_sizes, rows, ends, blocks, largest, activation, out, keep):
    _whole(x, rows)
    if fast.serves(x):
        if not out:
            h = fast.kernel("rows", "rows_launch")(x, w_in, ends, blocks, rows)
            return x.new_empty(0, x.shape[1]), h
        return fast.kernel("experts", "rows_forward_launch")(
            x, w_in, w_out, ends, rows, blocks, largest, activation, keep
        )
    y, h = _forward(x, w_in, w_out, group_sizes, rows, activation, out)
    return _to_sources(y, rows), h if keep else h[:0].clone()


def _mlp_rows_backward(g, x, w_in, w_out, scale, h, group_sizes, rows, ends, blocks, largest, activation, needs):
    _whole(x, rows)
    scale = scale.index_select(0, rows)
    if fast.serves(x):
        dx, *dw, dscale = fast.kernel("experts", "rows_backward_launch")(
            g, x, w_in, w_out, scale, h, ends, rows, blocks, largest, activation, needs
        )
    else:
        dx, *dw, dscale = _backward(g, x, w_in, w_out, scale, h, group_sizes, rows, activation, needs)
        dx = _to_sources(dx, rows)
    return dx, *dw, _to_sources(dscale, rows)


def _whole(x, rows):
    if x.shape[0] != rows.shape[0]:
        raise ShardingError(
            f"the expert MLP got {x.shape[0]} rows for a routing of {rows.shape[0]}: they come from different routings."
        )


_ORDER = "Tensor group_sizes, Tensor rows, Tensor ends, Tensor blocks, Tensor largest"
mlp_rows_raw = raw_op(
    f"moe_mlp_rows(Tensor x, Tensor w_in, Tensor w_out, {_ORDER}, str activation, bool out, bool keep) "
    "-> (Tensor, Tensor)",
    _mlp_rows,
    lambda x, w_in, w_out, sizes, rows, ends, blocks, largest, activation, out, keep: (
        x.new_empty(x.shape[0] if out else 0, x.shape[1]),
        x.new_empty(x.shape[0] if keep else 0, w_in.shape[2]),
    ),
)
"""Rows x [R, D] in the order of ``rows`` (a permutation) -> (unweighted rows y [R, D] in the same order if ``out``, h
[R, 2H] in expert order if ``keep``)."""
mlp_rows_backward_raw = raw_op(
    f"moe_mlp_rows_backward(Tensor g, Tensor x, Tensor w_in, Tensor w_out, Tensor scale, Tensor h, {_ORDER}, "
    "str activation, bool[4] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    _mlp_rows_backward,
    lambda g, x, w_in, w_out, scale, *rest: _gradients_fake((x, w_in, w_out, scale), rest[-1]),
)
"""Gradients of (x, w_in, w_out, scale) where row r of the result counts ``scale[r]`` times; g, x, dx, scale and d scale
[R] are in the order of ``rows``."""


def _forward_flops(w_out, rows, out):
    product = 2 * rows * w_out.shape[1] * w_out.shape[2]
    return product * (3 if out else 2)


def _backward_flops(w_out, rows, needs):
    product = 2 * rows * w_out.shape[1] * w_out.shape[2]
    return product * (1 + 2 * needs[0] + 2 * needs[1] + needs[2])


FLOPS = {
    mlp_raw: lambda x, w_in, w_out, weights, perm, *rest: _forward_flops(w_out, perm.shape[0], rest[-2]),
    mlp_rows_raw: lambda x, w_in, w_out, *rest: _forward_flops(w_out, x.shape[0], rest[-2]),
    mlp_backward_raw: lambda g, x, w_in, w_out, weights, h, *rest: _backward_flops(w_out, h.shape[0], rest[-1]),
    mlp_rows_backward_raw: lambda g, x, w_in, w_out, scale, h, *rest: _backward_flops(w_out, h.shape[0], rest[-1]),
}
"""Floating-point operations of the products (2 a multiply-add) from the arguments; elementwise work is not counted."""


def _forward_bytes(w_out, rows, out, summed):
    hidden, width = w_out.shape[1:]
    return rows * (hidden + summed * width) * w_out.itemsize if out else 0


def _backward_bytes(w_out, rows):
    hidden, width = w_out.shape[1:]
    return rows * (width + 3 * hidden) * w_out.itemsize  # g's rows, dh, the activation; later dh and dx's rows


WORKSPACE = {
    mlp_raw: lambda x, w_in, w_out, weights, perm, *rest: _forward_bytes(w_out, perm.shape[0], rest[-2], True),
    mlp_rows_raw: lambda x, w_in, w_out, *rest: _forward_bytes(w_out, x.shape[0], rest[-2], False),
    mlp_backward_raw: lambda g, x, w_in, w_out, weights, h, *rest: _backward_bytes(w_out, h.shape[0]),
    mlp_rows_backward_raw: lambda g, x, w_in, w_out, scale, h, *rest: _backward_bytes(w_out, h.shape[0]),
}
"""Bytes that the kernels allocate and free while they run: activations, and rows before they are summed."""
