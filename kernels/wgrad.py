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

JOIN_ROWS = 16  # rows of a tile that one program of `join_kernel` adds up


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


@triton.jit(do_not_specialize=["E", "slack"])
def wgrad_kernel(
    x, g, dw, parts, x_index, g_index, offsets, order, E, K, N, x_stride, g_stride, dw_expert, dw_row, slack,
    X_MODE: tl.constexpr, G_MODE: tl.constexpr, DW_TMA: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
    E_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Tiles run from the expert with the most rows to the one with the fewest: the long ones start first.

    Programs take whole tiles in turn, p, p + P, p + 2P, ...; where that leaves them too uneven they take equal runs of
    steps instead, and the sums of a tile that runs across programs go to `parts`, which `join_kernel` adds up.
    """
    m_tiles, n_tiles = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_expert = m_tiles * n_tiles
    program, count = tl.program_id(0), tl.num_programs(0)
    each = tile_steps(offsets, order, E, E_PAD, BLOCK_K)
    tile, left, steps, stride, done = program - count, 0, 0, count, 0
    if STREAM and uneven(each, per_expert, count, slack, E_PAD):
        total = tl.sum(each, 0) * per_expert
        begin, end = border(program, count, total), border(program + 1, count, total)
        tile, done, length = find(each, per_expert, begin, E_PAD)
        left, steps, stride = tl.where(done > 0, length - done, 0), end - begin, 1
        tile -= tl.where(done > 0, 0, 1)
    else:
        steps = turn_steps(each, per_expert, program, count, E_PAD)
    expert = tl.load(order + tl.maximum(tile // per_expert, 0))
    row_block, col_block = swizzle(tl.maximum(tile, 0) % per_expert, m_tiles, n_tiles, GROUP)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    size = tl.load(offsets + expert) - start
    row = (done - 1) * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, steps):
        # what the loads need is settled first, so that the loads can run several steps ahead of the products
        left -= 1
        row += BLOCK_K
        if left < 0:  # a new tile
            tile += stride
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
            if STREAM and done > 0:  # the end of a tile that another program began
                store_part(parts, program * 2, acc, 0, BLOCK_N)
            else:
                store_weight(dw, expert, m, n, dw_expert, dw_row, K, N, acc, SPLIT, DTYPE, DW_TMA)
            done = 0
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if STREAM and left > 0:  # a tile that another program ends
        store_part(parts, program * 2 + 1, acc, 0, BLOCK_N)


@triton.jit
def tile_steps(offsets, order, E, E_PAD: tl.constexpr, BLOCK_K: tl.constexpr):
    """Steps of one tile of each expert, in `order`; one, on zeros, for an expert without rows; none past the last."""
    place = tl.arange(0, E_PAD)
    expert = tl.load(order + place, mask=place < E, other=0)
    start = tl.load(offsets + expert - 1, mask=(place < E) & (expert > 0), other=0)
    size = tl.load(offsets + expert, mask=place < E, other=0) - start
    return tl.where(place < E, tl.maximum((size + BLOCK_K - 1) // BLOCK_K, 1), 0)


@triton.jit
def turn_steps(each, per_expert, program, count, E_PAD: tl.constexpr):
    """Steps of the tiles program, program + count, ... of which each takes its expert's row blocks.

    One flat loop over them lets the loads of the next tile start before the stores of this one.
    """
    place = tl.arange(0, E_PAD)
    # tiles of this program below t: those p + i·count < t
    below = (tl.maximum(place * per_expert - program, 0) + count - 1) // count
    upto = (tl.maximum((place + 1) * per_expert - program, 0) + count - 1) // count
    return tl.sum((upto - below) * each, 0)


@triton.jit
def uneven(each, per_expert, count, slack, E_PAD: tl.constexpr):
    """Whether the busiest program, the first, would take `slack` steps more than an equal share."""
    total = tl.sum(each, 0) * per_expert
    return turn_steps(each, per_expert, 0, count, E_PAD) - total // count > slack


@triton.jit
def border(program, count, total):
    """First of the equal run of steps that a program takes."""
    return (program.to(tl.int64) * total // count).to(tl.int32)


@triton.jit
def find(each, per_expert, step, E_PAD: tl.constexpr):
    """(tile, steps of it before `step`, its steps) of a step of the whole work."""
    place = tl.arange(0, E_PAD)
    ends = tl.cumsum(each, 0) * per_expert
    at = tl.sum(((ends <= step) & (each > 0)).to(tl.int32), 0)
    length = tl.maximum(tl.sum(tl.where(place == at, each, 0), 0), 1)
    inside = step - tl.sum(tl.where(place == at, ends - each * per_expert, 0), 0)
    return at * per_expert + inside // length, inside % length, length


@triton.jit
def store_part(parts, slot, acc, col: tl.constexpr, STRIDE: tl.constexpr):
    """Write an fp32 tile to its place in the workspace, 32 columns at a time: they pass through shared memory."""
    BLOCK_R: tl.constexpr = acc.shape[0]
    BLOCK_C: tl.constexpr = acc.shape[1]
    if BLOCK_C > 32:
        HALF: tl.constexpr = BLOCK_C // 2
        left, right = acc.reshape(BLOCK_R, 2, HALF).permute(0, 2, 1).split()
        store_part(parts, slot, left, col, STRIDE)
        store_part(parts, slot, right, col + HALF, STRIDE)
    else:
        r, c = tl.arange(0, BLOCK_R), col + tl.arange(0, BLOCK_C)
        base = parts + slot.to(tl.int64) * (BLOCK_R * STRIDE)
        tl.store(base + r[:, None] * STRIDE + c[None, :], acc)


@triton.jit(do_not_specialize=["E", "slack", "count"])
def join_kernel(
    parts, dw, offsets, order, E, K, N, dw_expert, dw_row, slack, count, DTYPE: tl.constexpr,
    E_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the tile that the border between two programs cuts, summed in the order of the programs.

    A tile that several borders cut is the first one's. The search is that of `wgrad_kernel`.
    """
    m_tiles, n_tiles = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_expert = m_tiles * n_tiles
    each = tile_steps(offsets, order, E, E_PAD, BLOCK_K)
    total = tl.sum(each, 0) * per_expert
    owner = tl.program_id(0)  # the program before the border
    step = border(owner + 1, count, total)
    tile, done, length = find(each, per_expert, step, E_PAD)
    begun = border(owner, count, total) <= step - done
    if uneven(each, per_expert, count, slack, E_PAD) and begun and done > 0:
        r, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
        at = r[:, None] * BLOCK_N + c[None, :]
        acc = tl.load(parts + (owner * 2 + 1).to(tl.int64) * (BLOCK_M * BLOCK_N) + at)
        last = step - done + length
        reached = step
        while reached < last:
            owner += 1
            reached = border(owner + 1, count, total)
            slot = owner * 2 + tl.where(reached < last, 1, 0)
            acc += tl.load(parts + slot.to(tl.int64) * (BLOCK_M * BLOCK_N) + at)
        row_block, col_block = swizzle(tile % per_expert, m_tiles, n_tiles, GROUP)
        expert = tl.load(order + tile // per_expert).to(tl.int64)
        r, c = row_block * BLOCK_M + r, col_block * BLOCK_N + c
        place = dw + expert * dw_expert + r.to(tl.int64)[:, None] * dw_row + c[None, :]
        tl.store(place, acc.to(DTYPE), mask=(r[:, None] < K) & (c[None, :] < N))


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
    parts = x.new_empty((grid, 2, block_m, block_n), dtype=torch.float32) if config.stream else None
    same = dict(
        DTYPE=tiles.dtype(x), E_PAD=max(128, triton.next_power_of_2(experts)), BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, GROUP=config.group,
    )  # fmt: skip
    wgrad_kernel[(grid,)](
        tiles.ragged(x, block_k, block_m) if x_mode == 1 else x,
        tiles.ragged(g, block_k, block_n) if g_mode == 1 else g,
        tiles.weight(dw, block_m, block_n >> config.split) if dw_tma else dw, parts,
        x_index, g_index, offsets, order, experts, k, n, x.stride(0), g.stride(0), dw.stride(0), dw.stride(1),
        config.stream, X_MODE=x_mode, G_MODE=g_mode, DW_TMA=dw_tma, EVEN=k % block_m == 0 and n % block_n == 0,
        SPLIT=config.split, STREAM=config.stream > 0, num_warps=config.warps, num_stages=config.stages, **same,
    )  # fmt: skip
    if config.stream and grid > 1:
        join_kernel[(grid - 1, block_m // JOIN_ROWS)](
            parts, dw, offsets, order, experts, k, n, dw.stride(0), dw.stride(1), config.stream, grid,
            ROWS=JOIN_ROWS, num_warps=4, **same,
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
