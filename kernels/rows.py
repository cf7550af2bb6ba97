"""Row-grouped product: y[r] = x[r] @ w[expert of r], or with the weights transposed (the gradient of x).

Legend: M rows, E experts, w [E, K, N]. Forward maps [M, K] -> [M, N]; transposed maps [M, N] -> [M, K].
"""

import torch
import triton
import triton.language as tl

from . import tiles
from .combine import gather_launch
from .registry import define, dense_rows, programs, tma_ready
from .routing import BLOCK_M, capacity
from .table import Config, configure
from .tiles import (
    GATHER,
    POINTER,
    TMA,
    load_rows,
    load_weight,
    scatter_parts,
    store_parts,
    swizzle,
    zero_scattered,
    zero_tail,
)


@triton.jit(do_not_specialize=["M"])  # a data change must not compile anew
def rows_kernel(
    x, w, y, y_tail, index, target, bias, scale, blocks, M, N, K, x_stride, w_expert, w_row, y_stride, bias_stride,
    X_MODE: tl.constexpr, W_TMA: tl.constexpr, Y_TMA: tl.constexpr, SCATTER: tl.constexpr, TRANSPOSED: tl.constexpr,
    TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, EVEN_K: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """N result columns, K reduction, whichever way the weights lie. Persistent: the number of tiles is read here."""
    m_tiles, n_tiles = tl.load(blocks), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = swizzle(tile, m_tiles, n_tiles, GROUP)
        line = blocks + 4 + m * 4
        expert, start, end = tl.load(line), tl.load(line + 1), tl.load(line + 2)
        col = n * BLOCK_N
        row = start + tl.arange(0, BLOCK_M)
        valid = row < end
        if X_MODE == GATHER:
            row = tl.load(index + row, mask=valid, other=0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if X_MODE == TMA:
                a = x.load([start, k])
            else:
                a = load_rows(x, row, valid, k, x_stride, K, BLOCK_K, EVEN_K, X_MODE == POINTER)
            if TRANSPOSED:
                b = load_weight(w, expert, col, k, w_expert, w_row, N, K, BLOCK_N, BLOCK_K, W_TMA).T
            else:
                b = load_weight(w, expert, k, col, w_expert, w_row, K, N, BLOCK_K, BLOCK_N, W_TMA)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if HAS_BIAS:
            at = col + tl.arange(0, BLOCK_N)
            place = bias + expert.to(tl.int64) * bias_stride + at
            acc += tl.load(place, mask=at < N, other=0.0).to(tl.float32)[None, :]
        if HAS_SCALE:
            acc *= tl.load(scale + start + tl.arange(0, BLOCK_M), mask=valid, other=0.0)[:, None]
        if SCATTER:
            place = tl.load(target + start + tl.arange(0, BLOCK_M), mask=valid, other=0)
            scatter_parts(y, place, valid, col, y_stride, N, acc, SPLIT, DTYPE)
        else:
            store_parts(y, start, end, col, y_stride, N, acc, SPLIT, DTYPE, Y_TMA)
    if TAIL:
        if SCATTER:
            zero_scattered(y_tail, target, tl.load(blocks + 1), M, N, y_stride, DTYPE, 1024)
        else:
            zero_tail(y_tail, tl.load(blocks + 1), M, N, y_stride, DTYPE, 1024)


def rows_launch(
    x, w, offsets, blocks, index=None, bias=None, scale=None, transposed=False, target=None,
    tail=True, *, config: Config | None = None, tma: int = 2,
):  # fmt: skip
    """Launch on x [M, K] (or [T, K] with `index` [M]), w [E, K, N]; `transposed` swaps K and N. Returns [M, N].

    With `target` [M], a permutation, row r of the product is written to row target[r] of the result. Rows past the last
    group are zero, or without `tail` uninitialised.
    `config` and `tma` override the table and the use of the copy engine: 0 nowhere, 1 without the descriptors whose
    bounds wrap around (Triton's interpreter refuses those), 2 everywhere.
    """
    count, cols, inner = shapes(x, w, blocks, index, transposed)
    y = x.new_empty((count, cols))
    if y.numel() == 0 or inner == 0:
        return y.zero_()
    plain = "dgrad" if transposed else "forward"
    config = config or configure("gather" if index is not None else plain, x, cols, inner, w.shape[0], count)
    if index is not None and config.impl == "copy":  # gather first, then the copy engine can load the rows
        x, index = gather_launch(x, index, offsets[-1:]), None
        config = configure(plain, x, cols, inner, w.shape[0], count)
    x = dense_rows(x)
    if w.stride(-1) != 1 and w.stride(-2) == 1:  # [E, K, N] that rests as [E, N, K]: read it the other way round
        w, transposed = w.mT, not transposed
    w = dense_rows(w)
    bare = index is None and bias is None and scale is None and target is None
    if config.impl == "torch" and bare and tma_ready(x, w, y):
        return library_rows(x, w.mT if transposed else w, offsets, blocks)
    n, k = config.block_n, config.block_k
    x_mode, w_tma = tiles.mode(x, index, tma > 0), tma > 0 and tma_ready(w)
    y_tma = tma > 1 and target is None and tma_ready(y)
    rows_kernel[(launch_grid(config, count, w.shape[0], cols, x.device),)](
        tiles.matrix(x, BLOCK_M, k) if x_mode == 1 else x,
        (tiles.weight(w, n, k) if transposed else tiles.weight(w, k, n)) if w_tma else w,
        tiles.ragged(y, BLOCK_M, n >> config.split) if y_tma else y,
        y, index, target, bias, scale, blocks, count, cols, inner, x.stride(0), w.stride(0), w.stride(1), y.stride(0),
        0 if bias is None else bias.stride(0),
        X_MODE=x_mode, W_TMA=w_tma, Y_TMA=y_tma, SCATTER=target is not None, TRANSPOSED=transposed,
        TAIL=tail,
        HAS_BIAS=bias is not None, HAS_SCALE=scale is not None, EVEN_K=inner % k == 0, DTYPE=tiles.dtype(x),
        BLOCK_M=BLOCK_M, BLOCK_N=n, BLOCK_K=k, GROUP=config.group, SPLIT=config.split, FLATTEN=config.flatten,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return y


def shapes(x, w, blocks, index, transposed):
    """(result rows, result columns, reduction), checked."""
    inner, cols = (w.shape[2], w.shape[1]) if transposed else (w.shape[1], w.shape[2])
    count = x.shape[0] if index is None else index.shape[0]
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != inner or x.dtype != w.dtype:
        raise ValueError(
            f"grouped product of x {tuple(x.shape)} {x.dtype} with w {tuple(w.shape)} {w.dtype}"
            f"{' transposed' if transposed else ''}: need x [rows, {inner}] of the dtype of w"
        )
    if blocks.shape[0] != 1 + capacity(count, w.shape[0]):
        raise ValueError(f"the schedule has {blocks.shape[0] - 1} tiles, {count} rows in {w.shape[0]} groups need "
                         f"{capacity(count, w.shape[0])}: build it with `schedule(offsets, rows)`")  # fmt: skip
    return count, cols, inner


def launch_grid(config: Config, rows: int, experts: int, cols: int, device) -> int:
    """Persistent programs, never more than there can be tiles."""
    bound = capacity(rows, experts) * triton.cdiv(cols, config.block_n)
    return min(bound, config.per_sm * programs(device)) if config.per_sm else bound


@triton.jit(do_not_specialize=["M"])
def tail_kernel(y, blocks, M, N, stride, DTYPE: tl.constexpr):
    """Zero the rows past the last group."""
    zero_tail(y, tl.load(blocks + 1), M, N, stride, DTYPE, 1024)


def library_rows(x, w, offsets, blocks):
    """`torch._grouped_mm`, whose rows past the last group are uninitialised, with those rows zeroed."""
    y = torch._grouped_mm(x, w, offs=offsets)
    grid = (programs(x.device),)
    tail_kernel[grid](y, blocks, y.shape[0], y.shape[1], y.stride(0), DTYPE=tiles.dtype(y), num_warps=4)
    return y


def rows_reference(x, w, offsets, blocks, index=None, bias=None, scale=None, transposed=False, target=None):
    """Plain torch, accumulating in fp32 (fp64 stays fp64); one product a group."""
    count, cols, _ = shapes(x, w, blocks, index, transposed)
    high = torch.promote_types(x.dtype, torch.float32)
    x = (x if index is None else x[index.long()]).to(high)
    y, start = x.new_zeros((count, cols)), 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            matrix = w[expert].to(high)
            y[start:end] = x[start:end] @ (matrix.mT if transposed else matrix)
            if bias is not None:
                y[start:end] += bias[expert].to(high)
        start = max(start, end)
    if scale is not None:
        y[:start] *= scale[:start, None].to(high)
    y = y.to(w.dtype)
    return y if target is None else torch.empty_like(y).index_copy_(0, target.long(), y)


def rows_fake(x, w, offsets, blocks, index=None, bias=None, scale=None, transposed=False, target=None):
    count = x.shape[0] if index is None else index.shape[0]
    return x.new_empty((count, w.shape[1] if transposed else w.shape[2]))


rows_op = define(
    "grouped(Tensor x, Tensor w, Tensor offsets, Tensor blocks, Tensor? index=None, Tensor? bias=None, "
    "Tensor? scale=None, bool transposed=False, Tensor? target=None) -> Tensor",
    cpu=rows_reference, cuda=rows_launch, fake=rows_fake,
)  # fmt: skip
