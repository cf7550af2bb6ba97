"""The activation of a gated layer as passes of its own, for shapes where a fused epilogue costs more than it saves.

Legend: M rows, I expert hidden, h [M, 2I] as [gate | up].
"""

import torch
import triton
import triton.language as tl

from . import tiles
from .tiles import activate

ROWS, COLS = 8, 256  # one tile: 16-byte accesses, a few of them in flight per thread


@triton.jit(do_not_specialize=["M"])
def activation_kernel(
    h, a, M, N, h_stride, a_stride,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """a = f(gate)·up on one tile; rows past the groups are zero in h, hence in a."""
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (row[:, None] < M) & (col[None, :] < N)
    place = h + row.to(tl.int64)[:, None] * h_stride + col[None, :]
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + N, mask=mask, other=0.0).to(tl.float32)
    value, _ = activate(gate, ACTIVATION)
    tl.store(a + row.to(tl.int64)[:, None] * a_stride + col[None, :], (value * up).to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["M"])
def activation_backward_kernel(
    da, h, scale, blocks, dh, score, M, N, da_stride, h_stride, dh_stride,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ROWS rows: reads da and h, writes dh, scale·a over da, and each row's <da, a>."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < tl.minimum(tl.load(blocks + 1), M)
    s = tl.load(scale + row, mask=used, other=0.0)[:, None]
    line = row.to(tl.int64)[:, None]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, N, COLS):
        col = first + tl.arange(0, COLS)
        mask = (row[:, None] < M) & (col[None, :] < N)
        live = mask & used[:, None]
        place = h + line * h_stride + col[None, :]
        grad = tl.load(da + line * da_stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        gate = tl.load(place, mask=live, other=0.0).to(tl.float32)
        up = tl.load(place + N, mask=live, other=0.0).to(tl.float32)
        value, slope = activate(gate, ACTIVATION)
        total += grad * (value * up)
        tl.store(da + line * da_stride + col[None, :], (value * up * s).to(DTYPE), mask=mask)
        grad *= s
        target = dh + line * dh_stride + col[None, :]
        tl.store(target, (grad * up * slope).to(DTYPE), mask=mask)
        tl.store(target + N, (grad * value).to(DTYPE), mask=mask)
    tl.store(score + row, tl.sum(total, 1), mask=row < M)


def activation_launch(h: torch.Tensor, activation: str) -> torch.Tensor:
    """h [M, 2I] -> a [M, I]."""
    rows, inner = h.shape[0], h.shape[1] // 2
    a = h.new_empty((rows, inner))
    activation_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(inner, COLS))](
        h, a, rows, inner, h.stride(0), a.stride(0),
        ACTIVATION=activation, DTYPE=tiles.dtype(h), ROWS=ROWS, COLS=COLS, num_warps=4,
    )  # fmt: skip
    return a


def activation_backward_launch(da, h, scale, blocks, activation: str):
    """da [M, I] (overwritten), h [M, 2I], scale [M] fp32 -> (dh [M, 2I], scale·a [M, I] in place of da, d scale [M]).
    """
    rows, inner = da.shape
    dh, score = h.new_empty(h.shape), torch.empty_like(scale)
    activation_backward_kernel[(triton.cdiv(rows, ROWS),)](
        da, h, scale, blocks, dh, score, rows, inner, da.stride(0), h.stride(0), dh.stride(0),
        ACTIVATION=activation, DTYPE=tiles.dtype(h), ROWS=ROWS, COLS=COLS, num_warps=4,
    )  # fmt: skip
    return dh, da, score
