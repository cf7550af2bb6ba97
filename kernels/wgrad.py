"""Reduction-grouped product: dw[e] = x[rows of e].T @ g[rows of e], the gradient of the weights.

Legend: R rows, E experts, x [R, K], g [R, N], dw [E, K, N]. Either side may come through a row gather.
"""

import torch
import triton
import triton.language as tl

from . import tiles
from .combine import gather_launch
from .registry import define, dense_rows, programs, tma_ready
from .table import Config, configure
from .tiles import GATHER, TMA, load_ragged, load_rows, swizzle


@triton.jit
def load_side(
    x, index, start, size, row, col, stride, cols, MODE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, BLOCK] elements of one operand; rows past the group are zero on both sides, so that no NaN slips in."""
    if MODE == TMA:
        return load_ragged(x, start, size, row, col, BLOCK_K, BLOCK)
    else:
        at = row + tl.arange(0, BLOCK_K)
        valid = at < size
        at = start + at
        if MODE == GATHER:
            at = tl.load(index + at, mask=valid, other=0)
        return load_rows(x, at, valid, col, stride, cols, BLOCK, EVEN, True)


@triton.jit(do_not_specialize=["E"])
def wgrad_kernel(
    x, g, dw, x_index, g_index, offsets, order, E, K, N, x_stride, g_stride, dw_expert, dw_row,
    X_MODE: tl.constexpr, G_MODE: tl.constexpr, DW_TMA: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
    E_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Tiles run from the expert with the most rows to the one with the fewest: the long ones start first."""
    m_tiles, n_tiles = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_expert = m_tiles * n_tiles
    steps = reduction_steps(offsets, order, per_expert, E, E_PAD, BLOCK_K)
    tile, left = tl.program_id(0) - tl.num_programs(0), 0
    expert, start, size, row_block, col_block, row = 0, 0, 0, 0, 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, steps):
        # what the loads need is settled first, so that the loads can run several steps ahead of the products
        left -= 1
        row += BLOCK_K
        if left < 0:  # a new tile
            tile += tl.num_programs(0)
            expert = tl.load(order + tile // per_expert)
            row_block, col_block = swizzle(tile % per_expert, m_tiles, n_tiles, GROUP)
            start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
            size = tl.load(offsets + expert) - start
            left = tl.maximum(tl.cdiv(size, BLOCK_K), 1) - 1
            row = 0
        m, n = row_block * BLOCK_M, col_block * BLOCK_N
        a = load_side(x, x_index, start, size, row, m, x_stride, K, X_MODE, EVEN, BLOCK_K, BLOCK_M)
        b = load_side(g, g_index, start, size, row, n, g_stride, N, G_MODE, EVEN, BLOCK_K, BLOCK_N)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
        if left == 0:
            store_weight(dw, expert, m, n, dw_expert, dw_row, K, N, acc, SPLIT, DTYPE, DW_TMA)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def reduction_steps(offsets, order, per_expert, E, E_PAD: tl.constexpr, BLOCK_K: tl.constexpr):
    """Steps of all tiles of this program: tiles p, p + P, p + 2P, ... of which each takes its expert's row blocks.

    One flat loop over them lets the loads of the next tile start before the stores of this one. An expert without rows
    takes one step, on zeros.
    """
    place = tl.arange(0, E_PAD)
    expert = tl.load(order + place, mask=place < E, other=0)
    start = tl.load(offsets + expert - 1, mask=(place < E) & (expert > 0), other=0)
    size = tl.load(offsets + expert, mask=place < E, other=0) - start
    each = tl.maximum((size + BLOCK_K - 1) // BLOCK_K, 1)
    p, step = tl.program_id(0), tl.num_programs(0)
    # tiles of this program below t: those p + i·step < t
    below = (tl.maximum(place * per_expert - p, 0) + step - 1) // step
    upto = (tl.maximum((place + 1) * per_expert - p, 0) + step - 1) // step
    return tl.sum(tl.where(place < E, (upto - below) * each, 0), 0)


@triton.jit
def store_weight(
    dw, expert, row, col, expert_stride, row_stride, rows, cols, acc,
    SPLIT: tl.constexpr, DTYPE: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Write a tile of dw[expert] in 2**SPLIT column pieces; what passes the edges is dropped."""
    BLOCK_R: tl.constexpr = acc.shape[0]
    BLOCK_C: tl.constexpr = acc.shape[1]
    if SPLIT > 0:
        HALF: tl.constexpr = BLOCK_C // 2
        left, right = acc.reshape(BLOCK_R, 2, HALF).permute(0, 2, 1).split()
        store_weight(
            dw, expert, row, col, expert_stride, row_stride, rows, cols, left, SPLIT - 1, DTYPE, USE_TMA
        )  # fmt: skip
        store_weight(
            dw, expert, row, col + HALF, expert_stride, row_stride, rows, cols, right, SPLIT - 1, DTYPE, USE_TMA
        )  # fmt: skip
    elif USE_TMA:
        dw.store([expert, row, col], acc.to(DTYPE).reshape(1, BLOCK_R, BLOCK_C))
    else:
        r, c = row + tl.arange(0, BLOCK_R), col + tl.arange(0, BLOCK_C)
        pointers = dw + expert.to(tl.int64) * expert_stride + r.to(tl.int64)[:, None] * row_stride + c[None, :]
        tl.store(pointers, acc.to(DTYPE), mask=(r[:, None] < rows) & (c[None, :] < cols))


def wgrad_launch(
    x, g, offsets, order, x_index=None, g_index=None, *, config: Config | None = None, tma: int = 2
):  # fmt: skip
    """x [R, K], g [R, N] (or token rows with an index [R]) -> dw [E, K, N] in the dtype of x."""
    rows = shapes(x, g, x_index, g_index)
    experts, k, n = offsets.shape[0], x.shape[1], g.shape[1]
    dw = x.new_empty((experts, k, n))
    if dw.numel() == 0 or rows == 0:
        return dw.zero_()
    gathered = x_index is not None or g_index is not None
    config = config or configure("wgrad_gather" if gathered else "wgrad", x, n, k, experts, rows)
    if gathered and config.impl == "copy":
        x = x if x_index is None else gather_launch(x, x_index)
        g = g if g_index is None else gather_launch(g, g_index)
        x_index, g_index, config = None, None, configure("wgrad", x, n, k, experts, rows)
    x, g = dense_rows(x), dense_rows(g)
    if config.impl == "torch" and x_index is None and g_index is None and tma_ready(x, g, dw):
        return torch._grouped_mm(x.mT, g, offs=offsets)
    x_mode, g_mode, dw_tma = tiles.mode(x, x_index, tma > 1), tiles.mode(g, g_index, tma > 1), tma > 0 and tma_ready(dw)
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    bound = experts * triton.cdiv(k, block_m) * triton.cdiv(n, block_n)
    grid = min(bound, config.per_sm * programs(x.device)) if config.per_sm else bound
    wgrad_kernel[(grid,)](
        tiles.ragged(x, block_k, block_m) if x_mode == 1 else x,
        tiles.ragged(g, block_k, block_n) if g_mode == 1 else g,
        tiles.weight(dw, block_m, block_n >> config.split) if dw_tma else dw,
        x_index, g_index, offsets, order, experts, k, n, x.stride(0), g.stride(0), dw.stride(0), dw.stride(1),
        X_MODE=x_mode, G_MODE=g_mode, DW_TMA=dw_tma, EVEN=k % block_m == 0 and n % block_n == 0,
        DTYPE=tiles.dtype(x), E_PAD=max(128, triton.next_power_of_2(experts)), BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, GROUP=config.group, SPLIT=config.split, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return dw


def shapes(x, g, x_index, g_index) -> int:
    """Number of rows, checked."""
    rows = x.shape[0] if x_index is None else x_index.shape[0]
    other = g.shape[0] if g_index is None else g_index.shape[0]
    if x.dim() != 2 or g.dim() != 2 or rows != other or x.dtype != g.dtype:
        raise ValueError(
            f"weight gradient of x {tuple(x.shape)} {x.dtype} ({rows} rows) and g {tuple(g.shape)} {g.dtype} ({other} "
            "rows): both need the same rows and dtype"
        )
    return rows


def wgrad_reference(x, g, offsets, order, x_index=None, g_index=None):
    """Plain torch, accumulating in fp32 (fp64 stays fp64)."""
    shapes(x, g, x_index, g_index)
    high = torch.promote_types(x.dtype, torch.float32)
    a = (x if x_index is None else x[x_index.long()]).to(high)
    b = (g if g_index is None else g[g_index.long()]).to(high)
    dw, start = a.new_zeros((offsets.shape[0], a.shape[1], b.shape[1])), 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            dw[expert] = a[start:end].mT @ b[start:end]
        start = max(start, end)
    return dw.to(x.dtype)


def wgrad_fake(x, g, offsets, order, x_index=None, g_index=None):
    return x.new_empty((offsets.shape[0], x.shape[1], g.shape[1]))


wgrad_op = define(
    "grouped_wgrad(Tensor x, Tensor g, Tensor offsets, Tensor order, Tensor? x_index=None, Tensor? g_index=None) "
    "-> Tensor",
    cpu=wgrad_reference, cuda=wgrad_launch, fake=wgrad_fake,
)  # fmt: skip
