"""Reduction-grouped product: dw[e] = x[rows of e].T @ g[rows of e], the gradient of the weights.

Legend: R rows, E experts, x [R, K], g [R, N], dw [E, K, N]. Either side may come through a row gather.
"""

import math

import torch
import triton
import triton.language as tl

from . import tiles
from .combine import gather_launch
from .registry import define, dense_rows, programs, tma_ready
from .table import Config, bucket, configure
from .tiles import GATHER, TMA, load_ragged, load_rows, swizzle

JOIN = 4096  # numbers that one program of `join_kernel` adds up
MOST_CUTS = 16
WORKSPACE = 2**28  # bytes at most for the parts of a product


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
    x, g, dw, parts, x_index, g_index, offsets, order, units, E, K, N, x_stride, g_stride, dw_expert, dw_row,
    X_MODE: tl.constexpr, G_MODE: tl.constexpr, DW_TMA: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
    PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Tiles run from the expert with the most rows to the one with the fewest: the long ones start first.

    With CUT the rows come as `units`, an expert with very many rows as several, whose products go to `parts`.
    """
    m_tiles, n_tiles = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_unit = m_tiles * n_tiles
    if CUT:
        steps = unit_steps(units, per_unit, PAD, BLOCK_K)
    else:
        steps = reduction_steps(offsets, order, per_unit, E, PAD, BLOCK_K)
    tile, left = tl.program_id(0) - tl.num_programs(0), 0
    expert, slot, start, size, row_block, col_block, row = 0, -1, 0, 0, 0, 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, steps):
        # what the loads need is settled first, so that the loads can run several steps ahead of the products
        left -= 1
        row += BLOCK_K
        if left < 0:  # a new tile
            tile += tl.num_programs(0)
            row_block, col_block = swizzle(tile % per_unit, m_tiles, n_tiles, GROUP)
            if CUT:
                line = units + 4 + tile // per_unit * 4
                expert, start, size, slot = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
            else:
                expert = tl.load(order + tile // per_unit)
                start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
                size = tl.load(offsets + expert) - start
            left = tl.maximum(tl.cdiv(size, BLOCK_K), 1) - 1
            row = 0
        m, n = row_block * BLOCK_M, col_block * BLOCK_N
        a = load_side(x, x_index, start, size, row, m, x_stride, K, X_MODE, EVEN, BLOCK_K, BLOCK_M)
        b = load_side(g, g_index, start, size, row, n, g_stride, N, G_MODE, EVEN, BLOCK_K, BLOCK_N)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
        if left == 0:
            if CUT and slot >= 0:
                store_part(parts + slot.to(tl.int64) * K * N, m, n, K, N, acc, BLOCK_N // 8)
            else:
                store_weight(dw, expert, m, n, dw_expert, dw_row, K, N, acc, SPLIT, DTYPE, DW_TMA)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def reduction_steps(offsets, order, per_expert, E, PAD: tl.constexpr, BLOCK_K: tl.constexpr):
    """Steps of all tiles of this program: tiles p, p + P, p + 2P, ... of which each takes its expert's row blocks.

    One flat loop over them lets the loads of the next tile start before the stores of this one. An expert without rows
    takes one step, on zeros.
    """
    place = tl.arange(0, PAD)
    expert = tl.load(order + place, mask=place < E, other=0)
    start = tl.load(offsets + expert - 1, mask=(place < E) & (expert > 0), other=0)
    size = tl.load(offsets + expert, mask=place < E, other=0) - start
    each = tl.maximum((size + BLOCK_K - 1) // BLOCK_K, 1)
    return taken_steps(tl.where(place < E, each, 0), per_expert, PAD)


@triton.jit
def unit_steps(units, per_unit, PAD: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same over units."""
    place, count = tl.arange(0, PAD), tl.load(units)
    size = tl.load(units + 4 + place * 4 + 2, mask=place < count, other=0)
    each = tl.maximum((size + BLOCK_K - 1) // BLOCK_K, 1)
    return taken_steps(tl.where(place < count, each, 0), per_unit, PAD)


@triton.jit
def taken_steps(each, tiles, PAD: tl.constexpr):
    """Sum of `each` over the tiles of this program, `tiles` of them at each place."""
    place = tl.arange(0, PAD)
    p, step = tl.program_id(0), tl.num_programs(0)
    # tiles of this program below t: those p + i·step < t
    below = (tl.maximum(place * tiles - p, 0) + step - 1) // step
    upto = (tl.maximum((place + 1) * tiles - p, 0) + step - 1) // step
    return tl.sum((upto - below) * each, 0)


@triton.jit(do_not_specialize=["E", "rows"])
def units_kernel(offsets, order, units, joins, E, rows, PAD: tl.constexpr, BLOCK_K: tl.constexpr):
    """The experts in `order`, those with more than `rows` rows in equal parts of at most so many.

    units[0] = (number of units, number of divided experts, 0, 0); then a unit a line: (expert, first row, rows, slot in
    the workspace, or -1 for a whole expert). joins: a divided expert a line: (expert, first slot, parts, 0).
    """
    place = tl.arange(0, PAD)
    valid = place < E
    expert = tl.load(order + place, mask=valid, other=0)
    start = tl.load(offsets + expert - 1, mask=valid & (expert > 0), other=0)
    size = tl.load(offsets + expert, mask=valid, other=0) - start
    parts = tl.maximum((size + rows - 1) // rows, 1)
    length = tl.maximum(((size + parts - 1) // parts + BLOCK_K - 1) // BLOCK_K, 1) * BLOCK_K
    parts = tl.where(valid, tl.maximum((size + length - 1) // length, 1), 0)
    first = tl.cumsum(parts, 0) - parts
    for part in range(0, tl.max(parts, 0)):
        line, mask = units + 4 + (first + part) * 4, part < parts
        tl.store(line, expert, mask=mask)
        tl.store(line + 1, start + part * length, mask=mask)
        tl.store(line + 2, tl.minimum(size - part * length, length), mask=mask)
        tl.store(line + 3, tl.where(parts > 1, first + part, -1), mask=mask)  # the divided ones come first
    divided = (parts > 1).to(tl.int32)
    tl.store(joins + place * 4, expert, mask=divided > 0)
    tl.store(joins + place * 4 + 1, first, mask=divided > 0)
    tl.store(joins + place * 4 + 2, parts, mask=divided > 0)
    tl.store(units, tl.sum(parts, 0))
    tl.store(units + 1, tl.sum(divided, 0))


@triton.jit
def store_part(out, row, col, rows, cols, acc, WIDTH: tl.constexpr):
    """Write an fp32 tile of a [rows, cols] product, WIDTH columns at a time: they pass through shared memory."""
    BLOCK_R: tl.constexpr = acc.shape[0]
    BLOCK_C: tl.constexpr = acc.shape[1]
    if BLOCK_C > WIDTH:
        HALF: tl.constexpr = BLOCK_C // 2
        left, right = acc.reshape(BLOCK_R, 2, HALF).permute(0, 2, 1).split()
        store_part(out, row, col, rows, cols, left, WIDTH)
        store_part(out, row, col + HALF, rows, cols, right, WIDTH)
    else:
        r, c = row + tl.arange(0, BLOCK_R), col + tl.arange(0, BLOCK_C)
        place = out + r.to(tl.int64)[:, None] * cols + c[None, :]
        tl.store(place, acc, mask=(r[:, None] < rows) & (c[None, :] < cols))


@triton.jit
def join_kernel(parts, dw, units, joins, size, dw_expert, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK numbers of every divided expert's dw: the sum of its parts, in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for i in range(0, tl.load(units + 1)):
        expert, first, count = tl.load(joins + i * 4), tl.load(joins + i * 4 + 1), tl.load(joins + i * 4 + 2)
        total = tl.zeros((BLOCK,), tl.float32)
        for part in range(0, count):
            total += tl.load(parts + (first + part).to(tl.int64) * size + at, mask=at < size, other=0.0)
        tl.store(dw + expert.to(tl.int64) * dw_expert + at, total.to(DTYPE), mask=at < size)


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


def pad(experts: int, cuts: int) -> int:
    """Power of two that holds all units."""
    return max(128, triton.next_power_of_2(experts + 2 * max(cuts, 0)))


def cut_launch(offsets, order, rows, cuts, block_k, size):
    """(units, joins, workspace) for experts of more than rows / cuts rows in parts: at most 2·cuts parts in all."""
    experts = offsets.shape[0]
    units = offsets.new_empty((1 + experts + 2 * cuts, 4))
    joins, parts = offsets.new_empty((experts, 4)), offsets.new_empty((2 * cuts, size), dtype=torch.float32)
    limit = triton.cdiv(rows, cuts)
    units_kernel[(1,)](offsets, order, units, joins, experts, limit, PAD=pad(experts, 0), BLOCK_K=block_k, num_warps=4)
    return units, joins, parts


def choose_cuts(tiles_each: int, many: int, rows: int, experts: int, size: int) -> int:
    """Into how many parts one expert with all rows is cut; 1 where cutting does not pay.

    Measured on an H200: where the tiles of one expert fill at least half of the `many` programs, cutting loses one or
    two percent under balanced and Zipf routing; below, it gains up to 12 % under Zipf and twofold under one-hot
    routing. Estimated time, a perfect division of labour being 1: idle programs in the last round of one expert's
    tiles, half a tile of unevenness for skewed routing, and the parts' way through memory (8 bytes an element at about
    4 TB/s, where a product of r rows takes 2·r flops an element at about 700 TFLOP/s). Depends on the bucket of rows
    only.
    """
    typical = bucket(rows, experts) * experts
    limit = min(MOST_CUTS, WORKSPACE // (8 * size))
    if typical < 8192 or 2 * tiles_each > many:
        return 1

    def time(cuts):
        rounds = cuts * tiles_each / many
        return math.ceil(rounds) / rounds + 0.5 / rounds + (cuts * 700 / typical if cuts > 1 else 0)

    return min(range(1, max(limit, 1) + 1), key=time)


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
        x = x if x_index is None else gather_launch(x, x_index, offsets[-1:])
        g = g if g_index is None else gather_launch(g, g_index, offsets[-1:])
        x_index, g_index, config = None, None, configure("wgrad", x, n, k, experts, rows)
    x, g = dense_rows(x), dense_rows(g)
    if config.impl == "torch" and x_index is None and g_index is None and tma_ready(x, g, dw):
        return torch._grouped_mm(x.mT, g, offs=offsets)
    x_mode, g_mode, dw_tma = tiles.mode(x, x_index, tma > 1), tiles.mode(g, g_index, tma > 1), tma > 0 and tma_ready(dw)
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    tiles_each = triton.cdiv(k, block_m) * triton.cdiv(n, block_n)
    many = config.per_sm * programs(x.device)
    cuts = config.cuts if config.cuts >= 0 else choose_cuts(tiles_each, many, rows, experts, k * n)
    units, joins, parts = cut_launch(offsets, order, rows, cuts, block_k, k * n) if cuts > 1 else (None,) * 3
    split = max(config.split, 2) if cuts > 1 else config.split  # the parts' stores need shared memory, too
    wgrad_kernel[(min((experts + max(cuts, 0)) * tiles_each, many),)](
        tiles.ragged(x, block_k, block_m) if x_mode == 1 else x,
        tiles.ragged(g, block_k, block_n) if g_mode == 1 else g,
        tiles.weight(dw, block_m, block_n >> split) if dw_tma else dw, parts,
        x_index, g_index, offsets, order, units, experts, k, n, x.stride(0), g.stride(0), dw.stride(0), dw.stride(1),
        X_MODE=x_mode, G_MODE=g_mode, DW_TMA=dw_tma, EVEN=k % block_m == 0 and n % block_n == 0,
        DTYPE=tiles.dtype(x), PAD=pad(experts, cuts), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        GROUP=config.group, SPLIT=split, CUT=cuts > 1, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if cuts > 1:
        join_kernel[(triton.cdiv(k * n, JOIN),)](
            parts, dw, units, joins, k * n, dw.stride(0), DTYPE=tiles.dtype(x), BLOCK=JOIN, num_warps=4
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
