"""Combine: every token's weighted sum of its k rows, gathered (no atomics), in fp32; and its transpose.

Legend: T tokens, k slots a token, R = T·k rows, D columns.
"""

import torch
import triton
import triton.language as tl

from . import tiles
from .registry import define, dense_rows, refuse_vmap

BLOCK = 1024  # columns that one program sums


@triton.jit
def combine_kernel(
    y, weights, inverse, used, out, D, y_stride,
    SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, CUT: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token; the loads of all its slots are in flight together. CUT: rows from `used` on count as
    zero and are not read."""
    parts = tl.cdiv(D, BLOCK)
    token = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    mask = at < D
    total = tl.zeros((BLOCK,), tl.float32)
    if CUT:
        rows = tl.load(used)
    for slot in tl.static_range(SLOTS):
        row = tl.load(inverse + token * SLOTS + slot).to(tl.int64)
        inside = mask
        if CUT:
            inside = at < tl.where(row < rows, D, 0)
        value = tl.load(y + row * y_stride + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * SLOTS + slot).to(tl.float32)
        total += value
    tl.store(out + token * D + at, total.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["R"])
def gather_kernel(x, index, used, out, R, D, x_stride, CUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[r] = x[index[r]] on ROWS rows and BLOCK columns. CUT: rows from `used` on are left as they are."""
    parts = tl.cdiv(D, BLOCK)
    if CUT:
        R = tl.load(used)
    row = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row, mask=row < R, other=0).to(tl.int64)
    mask = (row[:, None] < R) & (at[None, :] < D)
    tile = tl.load(x + source[:, None] * x_stride + at[None, :], mask=mask)
    tl.store(out + row.to(tl.int64)[:, None] * D + at[None, :], tile, mask=mask)


@triton.jit
def combine_transpose_kernel(
    g, y, weights, inverse, dy, dweights, D, g_stride, y_stride,
    SLOTS: tl.constexpr, DTYPE: tl.constexpr, W_DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: its gradient row is read once per slot (from the cache), each y row once, each dy row written once."""
    token = tl.program_id(0).to(tl.int64)
    for slot in tl.static_range(SLOTS):
        row = tl.load(inverse + token * SLOTS + slot).to(tl.int64)
        weight = tl.load(weights + token * SLOTS + slot).to(tl.float32)
        part = tl.zeros((BLOCK,), tl.float32)
        for col in range(0, D, BLOCK):
            at = col + tl.arange(0, BLOCK)
            mask = at < D
            grad = tl.load(g + token * g_stride + at, mask=mask, other=0.0).to(tl.float32)
            part += grad * tl.load(y + row * y_stride + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(dy + row * D + at, (grad * weight).to(DTYPE), mask=mask)
        tl.store(dweights + token * SLOTS + slot, tl.sum(part, 0).to(W_DTYPE))


def combine_launch(y, weights, inverse, used=None):
    """y [R, D], weights [T, k] or None (ones), inverse [T, k] int32 -> [T, D] in the dtype of y.

    With ``used`` [1] int32, on the device, rows from there on count as zero, whatever they hold.
    """
    tokens, slots = shapes(y, weights, inverse)
    y = dense_rows(y)
    out = y.new_empty((tokens, y.shape[1]))
    if out.numel() == 0 or slots == 0:
        return out.zero_()
    block = min(BLOCK, triton.next_power_of_2(y.shape[1]))
    items = tokens * triton.cdiv(y.shape[1], block)
    combine_kernel[(items,)](
        y, None if weights is None else weights.contiguous(), inverse.contiguous(), used, out, y.shape[1], y.stride(0),
        SLOTS=slots, WEIGHTED=weights is not None, CUT=used is not None, DTYPE=tiles.dtype(y), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def gather_launch(x, index, used=None):
    """x [T, D], index [R] int32 -> x[index] [R, D]; with ``used`` [1] int32 only so many rows, the others are left
    uninitialised."""
    x = dense_rows(x)
    out = x.new_empty((index.shape[0], x.shape[1]))
    if out.numel() == 0:
        return out
    block = min(BLOCK, triton.next_power_of_2(x.shape[1]))
    items = triton.cdiv(index.shape[0], 8) * triton.cdiv(x.shape[1], block)
    gather_kernel[(items,)](
        x, index, used, out, index.shape[0], x.shape[1], x.stride(0), CUT=used is not None, ROWS=8, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def combine_transpose_launch(g, y, weights, inverse):
    """g [T, D] -> (dy [R, D] = weights·g at each slot's row, dweights [T, k] = <g, y row>)."""
    tokens, slots = shapes(y, weights, inverse)
    g, y = dense_rows(g), dense_rows(y)
    dy, dweights = torch.empty_like(y, memory_format=torch.contiguous_format), torch.empty(
        weights.shape, dtype=weights.dtype, device=weights.device
    )  # fmt: skip
    if dy.numel() == 0 or slots == 0:
        return dy.zero_(), dweights.zero_()
    combine_transpose_kernel[(tokens,)](
        g, y, weights.contiguous(), inverse.contiguous(), dy, dweights, y.shape[1], g.stride(0), y.stride(0),
        SLOTS=slots, DTYPE=tiles.dtype(y), W_DTYPE=tiles.dtype(weights),
        BLOCK=min(BLOCK, triton.next_power_of_2(y.shape[1])), num_warps=4,
    )  # fmt: skip
    return dy, dweights


def shapes(y, weights, inverse):
    """(T, k), checked: each row has exactly one slot."""
    if inverse.dim() != 2 or y.dim() != 2 or y.shape[0] != inverse.numel():
        raise ValueError(f"need y [T·k, D] and inverse [T, k], got {tuple(y.shape)} and {tuple(inverse.shape)}")
    if weights is not None and weights.shape != inverse.shape:
        raise ValueError(f"`weights` must be {tuple(inverse.shape)} like `inverse`, got {tuple(weights.shape)}")
    return inverse.shape


def combine_reference(y, weights, inverse):
    """Plain torch, summed in fp32."""
    shapes(y, weights, inverse)
    high = torch.promote_types(y.dtype, torch.float32)
    rows = y.to(high)[inverse.long()]
    return (rows if weights is None else rows * weights.to(high)[..., None]).sum(1).to(y.dtype)


def combine_transpose_reference(g, y, weights, inverse):
    """Plain torch."""
    shapes(y, weights, inverse)
    high = torch.promote_types(y.dtype, torch.float32)
    dy = y.new_empty(y.shape)
    dy[inverse.long()] = (g.to(high)[:, None] * weights.to(high)[..., None]).to(y.dtype)
    return dy, (g.to(high)[:, None] * y.to(high)[inverse.long()]).sum(-1).to(weights.dtype)


combine_op = define(
    "combine(Tensor y, Tensor? weights, Tensor inverse) -> Tensor",
    cpu=combine_reference, cuda=combine_launch,
    fake=lambda y, weights, inverse: y.new_empty((inverse.shape[0], y.shape[1])),
)  # fmt: skip
combine_transpose_op = define(
    "combine_transpose(Tensor g, Tensor y, Tensor weights, Tensor inverse) -> (Tensor, Tensor)",
    cpu=combine_transpose_reference, cuda=combine_transpose_launch,
    fake=lambda g, y, weights, inverse: (y.new_empty(y.shape), weights.new_empty(weights.shape)),
)  # fmt: skip


gather_op = define(
    "gather(Tensor x, Tensor index) -> Tensor",
    cpu=lambda x, index: x.index_select(0, index), cuda=gather_launch,
    fake=lambda x, index: x.new_empty((index.shape[0], x.shape[1])),
)  # fmt: skip


class Combine(torch.autograd.Function):
    """Gather-sum; its transpose is `CombineTranspose`."""

    vmap = refuse_vmap("combine")

    @staticmethod
    def forward(y, weights, inverse):
        return combine_op(y, weights, inverse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        y, weights, inverse = ctx.saved_tensors
        return *CombineTranspose.apply(g, y, weights, inverse), None


class CombineTranspose(torch.autograd.Function):
    """(g, y, weights) -> (dy, dweights): linear in g, so its own transpose is two gather-sums and one more pass."""

    vmap = refuse_vmap("combine")

    @staticmethod
    def forward(g, y, weights, inverse):
        return combine_transpose_op(g, y, weights, inverse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, a, b):
        g, y, weights, inverse = ctx.saved_tensors
        dg = Combine.apply(a, weights, inverse) + Combine.apply(y, b, inverse)
        _, dweights = CombineTranspose.apply(g, a, weights, inverse)
        dy, _ = CombineTranspose.apply(g, y, b, inverse)
        return dg, dy, dweights, None


class Sum(torch.autograd.Function):
    """Unweighted gather-sum; its transpose repeats every token's gradient at the token's rows."""

    vmap = refuse_vmap("combine")

    @staticmethod
    def forward(y, inverse, rows):
        return combine_op(y, None, inverse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, g):
        inverse, rows = ctx.saved_tensors
        return Repeat.apply(g, inverse, rows), None, None


class Repeat(torch.autograd.Function):
    """x[rows], whose transpose is `Sum`: no atomic additions."""

    vmap = refuse_vmap("gather")

    @staticmethod
    def forward(x, inverse, rows):
        return gather_op(x, rows)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, g):
        inverse, rows = ctx.saved_tensors
        return Sum.apply(g, inverse, rows), None, None


def combine(y, weights, routing):
    """Tokens [T, D] from rows y [R, D]: out[t] = sum over j of weights[t, j] · y[routing.inverse[t, j]], in fp32.

    weights [T, k] floating, or None for ones. Differentiable any number of times in y and weights. Example, rows
    [[1.], [2.], [3.], [4.]], inverse [[1, 0], [2, 3]], weights 0.5: [[1.5], [3.5]].
    """
    if weights is None:
        return Sum.apply(y, routing.inverse, routing.rows)
    return Combine.apply(y, weights, routing.inverse)


def gather(x, routing):
    """Rows [R, D] in expert order from tokens x [T, D]; the transpose is a gather-sum."""
    return Repeat.apply(x, routing.inverse, routing.rows)
