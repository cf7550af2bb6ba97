"""Tile order, loads and stores that the product kernels share.

Every operand comes either as a raw pointer (with strides) or as a tensor descriptor of the copy engine (TMA); a
constexpr says which. Row offsets are int64 before they meet a stride: one stack of weights may pass 2**31 elements.

Bounds of one group inside a bigger tensor come from the hardware: a descriptor with two extra outer dims, whose strides
cancel in 64-bit address arithmetic, makes coordinate `LAST` of the row dim the end of *this* group. Loads past it give
zero, stores past it are dropped.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .registry import tma_ready

LAST = tl.constexpr(2**30)  # row bound of a ragged descriptor; host mirror below
POINTER, TMA, GATHER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def swizzle(tile, m_tiles, n_tiles, GROUP: tl.constexpr):
    """Tile number -> (m, n), GROUP row blocks at a time, so that concurrent tiles share operands in the L2 cache.

    Example with m_tiles = 3, n_tiles = 2, GROUP = 2: (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    span = GROUP * n_tiles
    first = tile // span * GROUP
    height = tl.minimum(m_tiles - first, GROUP)
    return first + tile % span % height, tile % span // height


@triton.jit
def load_rows(x, index, valid, col, stride, cols, BLOCK: tl.constexpr, EVEN: tl.constexpr, CHECK: tl.constexpr):
    """[len(index), BLOCK] elements at rows `index` and columns from `col`; zero where a checked bound is passed."""
    at = col + tl.arange(0, BLOCK)
    pointers = x + index.to(tl.int64)[:, None] * stride + at[None, :]
    if EVEN and not CHECK:
        return tl.load(pointers)
    elif EVEN:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=(at[None, :] < cols) & valid[:, None], other=0.0)


@triton.jit
def load_weight(
    w, expert, row, col, expert_stride, row_stride, rows, cols,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """[BLOCK_R, BLOCK_C] tile of w[expert]; zero past the edges, never the next expert's numbers (0·NaN is NaN)."""
    if USE_TMA:
        return w.load([expert, row, col]).reshape(BLOCK_R, BLOCK_C)
    else:
        r, c = row + tl.arange(0, BLOCK_R), col + tl.arange(0, BLOCK_C)
        base = w + expert.to(tl.int64) * expert_stride
        pointers = base + r.to(tl.int64)[:, None] * row_stride + c[None, :]
        return tl.load(pointers, mask=(r[:, None] < rows) & (c[None, :] < cols), other=0.0)


@triton.jit
def load_ragged(x, start, size, row, col, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows `row`.. of the group that starts at row `start` and has `size` rows; zero past its end."""
    return x.load([LAST, start + size, LAST - size + row, col]).reshape(BLOCK_R, BLOCK_C)


@triton.jit
def load_tile(
    x, start, end, col, stride, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Rows [start, end) and columns from `col` as a tile; zero past `end` or `cols`."""
    if USE_TMA:
        return x.load([LAST, end, LAST - end + start, col]).reshape(BLOCK_R, BLOCK_C)
    else:
        r, c = start + tl.arange(0, BLOCK_R), col + tl.arange(0, BLOCK_C)
        pointers = x + r.to(tl.int64)[:, None] * stride + c[None, :]
        return tl.load(pointers, mask=(r[:, None] < end) & (c[None, :] < cols), other=0.0)


@triton.jit
def store_tile(out, start, end, col, stride, cols, tile, USE_TMA: tl.constexpr):
    """Write a tile to rows [start, end) and columns from `col`; what passes `end` or `cols` is dropped."""
    BLOCK_R: tl.constexpr = tile.shape[0]
    BLOCK_C: tl.constexpr = tile.shape[1]
    if USE_TMA:
        out.store([LAST, end, LAST - end + start, col], tile.reshape(1, 1, BLOCK_R, BLOCK_C))
    else:
        r, c = start + tl.arange(0, BLOCK_R), col + tl.arange(0, BLOCK_C)
        pointers = out + r.to(tl.int64)[:, None] * stride + c[None, :]
        tl.store(pointers, tile, mask=(r[:, None] < end) & (c[None, :] < cols))


@triton.jit
def store_parts(
    out, start, end, col, stride, cols, acc,
    SPLIT: tl.constexpr, DTYPE: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """`store_tile` in 2**SPLIT column pieces, one after the other: a smaller staging buffer leaves room for stages."""
    if SPLIT == 0:
        store_tile(out, start, end, col, stride, cols, acc.to(DTYPE), USE_TMA)
    else:
        HALF: tl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape(acc.shape[0], 2, HALF).permute(0, 2, 1).split()
        store_parts(out, start, end, col, stride, cols, left, SPLIT - 1, DTYPE, USE_TMA)
        store_parts(out, start, end, col + HALF, stride, cols, right, SPLIT - 1, DTYPE, USE_TMA)


@triton.jit
def zero_tail(out, first, rows, cols, stride, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """Write zeros to rows [first, rows) of `out` (a pointer): the rows past the last group. Programs share the rows."""
    begin = first + tl.program_id(0)
    line = out + begin.to(tl.int64) * stride
    for _ in range(begin, rows, tl.num_programs(0)):
        for col in range(0, cols, BLOCK):
            at = col + tl.arange(0, BLOCK)
            tl.store(line + at, tl.zeros((BLOCK,), dtype), mask=at < cols)
        line += tl.num_programs(0).to(tl.int64) * stride


@triton.jit
def scatter_parts(
    out, row, valid, col, stride, cols, acc, SPLIT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`store_parts` with each row at a place of its own, `row`; the copy engine cannot scatter, so by pointer."""
    BLOCK_C: tl.constexpr = acc.shape[1]
    if SPLIT == 0:
        c = col + tl.arange(0, BLOCK_C)
        pointers = out + row.to(tl.int64)[:, None] * stride + c[None, :]
        tl.store(pointers, acc.to(DTYPE), mask=valid[:, None] & (c[None, :] < cols))
    else:
        left, right = acc.reshape(acc.shape[0], 2, BLOCK_C // 2).permute(0, 2, 1).split()
        scatter_parts(out, row, valid, col, stride, cols, left, SPLIT - 1, DTYPE)
        scatter_parts(out, row, valid, col + BLOCK_C // 2, stride, cols, right, SPLIT - 1, DTYPE)


@triton.jit
def zero_scattered(out, index, first, rows, cols, stride, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """`zero_tail` where row r rests at row index[r]."""
    begin = first + tl.program_id(0)
    for row in range(begin, rows, tl.num_programs(0)):
        line = out + tl.load(index + row).to(tl.int64) * stride
        for col in range(0, cols, BLOCK):
            at = col + tl.arange(0, BLOCK)
            tl.store(line + at, tl.zeros((BLOCK,), dtype), mask=at < cols)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """(f(gate), f'(gate)) in fp32: SiLU for "swiglu", exact GELU for "geglu", the identity for "glu"."""
    if ACTIVATION == "swiglu":
        sigmoid = tl.sigmoid(gate)
        value = gate * sigmoid
        return value, sigmoid + value * (1.0 - sigmoid)
    elif ACTIVATION == "geglu":
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        density = tl.exp(-0.5 * gate * gate) * 0.3989422804014327
        return gate * cdf, cdf + gate * density
    else:
        return gate, tl.full(gate.shape, 1.0, gate.dtype)


# ------------------------------------------------------------------------------------------------------- on the host


def dtype(x: torch.Tensor):
    """Triton's name of `x.dtype`."""
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[x.dtype]


def mode(x: torch.Tensor, index, use_tma: bool) -> int:
    """How the rows of `x` are addressed: 0 by pointer, 1 by the copy engine, 2 by pointer through `index`."""
    return 2 if index is not None else int(use_tma and tma_ready(x))


def matrix(x: torch.Tensor, rows: int, cols: int):
    """Descriptor of x [M, N] in blocks [rows, cols]."""
    return _descriptor(x, x.shape, x.stride(), [rows, cols])


def weight(w: torch.Tensor, rows: int, cols: int):
    """Descriptor of w [E, R, C] in blocks [1, rows, cols]."""
    return _descriptor(w, w.shape, w.stride(), [1, rows, cols])


def ragged(x: torch.Tensor, rows: int, cols: int):
    """Descriptor of x [M, N] whose row bound is chosen by the coordinates: address = base + row·stride (mod 2**64).

    The coordinates are (2**30, end, 2**30 - end + row, col) with strides (2**34 - s, s, s, 1) in elements:
    2**30·(2**34 - s) + end·s + (2**30 - end + row)·s = 2**64 + row·s. For elements of two bytes that is 2**65.
    """
    step, far = x.stride(0), 0x7FFF0000
    shape = [far, far, 2**30, x.shape[1]]
    return _descriptor(x, shape, [2**34 - step, step, step, 1], [1, 1, rows, cols])


def _descriptor(x, shape, strides, block):
    return TensorDescriptor(x, list(shape), list(strides), list(block))
