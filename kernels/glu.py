"""Gated up-projection in one kernel: h = x[rows] @ w, a = f(h gate) · (h up); and the backward of the two together.

Legend: T tokens, R rows, H hidden, I expert hidden, E experts, w_in [E, H, 2I] at rest as [gate | up], h [R, 2I],
a [R, I], w_out [E, I, H]. The two halves of w_in and h are addressed as two matrices of I columns with bounds of their
own, so that nothing has to be interleaved and a column tail of the gate never runs into the up half.
"""

import torch
import triton
import triton.language as tl

from . import tiles
from .activation import activation_backward_launch, activation_launch
from .registry import define, dense_rows, tma_ready
from .routing import BLOCK_M
from .rows import launch_grid, rows_launch, rows_reference
from .rows import shapes as product_shapes
from .table import Config, configure
from .tiles import GATHER, POINTER, TMA, activate, load_rows, load_tile, load_weight, store_tile, swizzle, zero_tail


@triton.jit(do_not_specialize=["M"])
def glu_kernel(
    x, w_gate, w_up, h_gate, h_up, a, h_tail, a_tail, index, blocks, M, N, K,
    x_stride, w_expert, w_row, h_stride, a_stride,
    X_MODE: tl.constexpr, W_TMA: tl.constexpr, Y_TMA: tl.constexpr, KEEP: tl.constexpr, TAIL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """N = I columns; a tile holds BLOCK_N gate and the same BLOCK_N up columns in two accumulators."""
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
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if X_MODE == TMA:
                b = x.load([start, k])
            else:
                b = load_rows(x, row, valid, k, x_stride, K, BLOCK_K, EVEN_K, X_MODE == POINTER)
            wg = load_weight(w_gate, expert, k, col, w_expert, w_row, K, N, BLOCK_K, BLOCK_N, W_TMA)
            wu = load_weight(w_up, expert, k, col, w_expert, w_row, K, N, BLOCK_K, BLOCK_N, W_TMA)
            gate = tl.dot(b, wg, gate, input_precision="ieee")
            up = tl.dot(b, wu, up, input_precision="ieee")
        low_gate, low_up = gate.to(DTYPE), up.to(DTYPE)
        if KEEP:
            store_tile(h_gate, start, end, col, h_stride, N, low_gate, Y_TMA)
        # from the rounded numbers, so that the backward, which only has h, recomputes the very same a
        value, _ = activate(low_gate.to(tl.float32), ACTIVATION)
        if KEEP:
            store_tile(h_up, start, end, col, h_stride, N, low_up, Y_TMA)
        store_tile(a, start, end, col, a_stride, N, (value * low_up.to(tl.float32)).to(DTYPE), Y_TMA)
    if TAIL:
        if KEEP:
            zero_tail(h_tail, tl.load(blocks + 1), M, 2 * N, h_stride, DTYPE, 1024)
        zero_tail(a_tail, tl.load(blocks + 1), M, N, a_stride, DTYPE, 1024)


@triton.jit
def glu_backward_tile(
    acc, scale, h_gate, h_up, dh_gate, dh_up, a, start, end, col, N, h_stride, dh_stride, a_stride,
    ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, Y_TMA: tl.constexpr,
):  # fmt: skip
    """Epilogue on acc = g @ w_out.T: writes dh and scale·a, returns each row's part of <acc, a>, fp32."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    gate = load_tile(h_gate, start, end, col, h_stride, N, BLOCK_M, BLOCK_N, Y_TMA).to(tl.float32)
    up = load_tile(h_up, start, end, col, h_stride, N, BLOCK_M, BLOCK_N, Y_TMA).to(tl.float32)
    value, slope = activate(gate, ACTIVATION)
    score = tl.sum(acc * (value * up), 1)
    store_tile(a, start, end, col, a_stride, N, (value * up * scale[:, None]).to(DTYPE), Y_TMA)
    da = acc * scale[:, None]
    store_tile(dh_up, start, end, col, dh_stride, N, (da * value).to(DTYPE), Y_TMA)
    store_tile(dh_gate, start, end, col, dh_stride, N, (da * up * slope).to(DTYPE), Y_TMA)
    return score


@triton.jit
def glu_backward_parts(
    acc, scale, h_gate, h_up, dh_gate, dh_up, a, start, end, col, N, h_stride, dh_stride, a_stride,
    SPLIT: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, Y_TMA: tl.constexpr,
):  # fmt: skip
    """`glu_backward_tile` on 2**SPLIT column pieces one after the other: a whole tile would not fit the registers."""
    if SPLIT == 0:
        return glu_backward_tile(
            acc, scale, h_gate, h_up, dh_gate, dh_up, a, start, end, col, N, h_stride, dh_stride, a_stride,
            ACTIVATION, DTYPE, Y_TMA,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape(acc.shape[0], 2, HALF).permute(0, 2, 1).split()
        part = glu_backward_parts(
            left, scale, h_gate, h_up, dh_gate, dh_up, a, start, end, col, N, h_stride, dh_stride, a_stride,
            SPLIT - 1, ACTIVATION, DTYPE, Y_TMA,
        )  # fmt: skip
        return part + glu_backward_parts(
            right, scale, h_gate, h_up, dh_gate, dh_up, a, start, end, col + HALF, N, h_stride, dh_stride, a_stride,
            SPLIT - 1, ACTIVATION, DTYPE, Y_TMA,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "parts"])
def glu_backward_kernel(
    g, w, h_gate, h_up, dh_gate, dh_up, a, dh_tail, a_tail, score, index, scale, blocks, M, N, K,
    g_stride, w_expert, w_row, h_stride, dh_stride, a_stride, parts,
    X_MODE: tl.constexpr, W_TMA: tl.constexpr, Y_TMA: tl.constexpr, TAIL: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """N = I columns, K = H reduction: acc = g[rows] @ w_out.T is the gradient of a before the routing weight."""
    m_tiles, n_tiles = tl.load(blocks), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = swizzle(tile, m_tiles, n_tiles, GROUP)
        line = blocks + 4 + m * 4
        expert, start, end = tl.load(line), tl.load(line + 1), tl.load(line + 2)
        col = n * BLOCK_N
        row = start + tl.arange(0, BLOCK_M)
        valid = row < end
        source = row
        if X_MODE == GATHER:
            source = tl.load(index + row, mask=valid, other=0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if X_MODE == TMA:
                b = g.load([start, k])
            else:
                b = load_rows(g, source, valid, k, g_stride, K, BLOCK_K, EVEN_K, X_MODE == POINTER)
            wt = load_weight(w, expert, col, k, w_expert, w_row, N, K, BLOCK_N, BLOCK_K, W_TMA).T
            acc = tl.dot(b, wt, acc, input_precision="ieee")
        s = tl.load(scale + row, mask=valid, other=0.0)
        part = glu_backward_parts(
            acc, s, h_gate, h_up, dh_gate, dh_up, a, start, end, col, N, h_stride, dh_stride, a_stride,
            SPLIT, ACTIVATION, DTYPE, Y_TMA,
        )  # fmt: skip
        tl.store(score + row.to(tl.int64) * parts + n, part, mask=valid)
    used = tl.load(blocks + 1)
    if TAIL:
        zero_tail(dh_tail, used, M, 2 * N, dh_stride, DTYPE, 1024)
        zero_tail(a_tail, used, M, N, a_stride, DTYPE, 1024)
    zero_tail(score, used, M, parts, parts, tl.float32, 128)


def glu_launch(
    x, w, offsets, blocks, index=None, activation="swiglu", keep=True, tail=True, *, config: Config | None = None,
    tma: int = 2,
):  # fmt: skip
    """x [M, H] (or [T, H] with `index` [M]), w [E, H, 2I] -> (h [M, 2I], or [0, 2I] unless `keep`; a [M, I]).

    Rows past the last group are zero, or without `tail` uninitialised.
    """
    rows, inner, width = shapes(x, w, blocks, index, activation)
    h, a = x.new_empty((rows if keep else 0, 2 * inner)), x.new_empty((rows, inner))
    if a.numel() == 0 or width == 0:
        return h.zero_(), a.zero_()
    x, w = dense_rows(x), dense_rows(w)
    config = config or configure("glu" if keep else "glu_only", x, inner, width, w.shape[0], rows)
    if config.impl == "split":  # two passes: the product, then the activation
        h = rows_launch(x, w, offsets, blocks, index, tma=tma)
        return h if keep else h[:0], activation_launch(h, activation)
    n, k = config.block_n, config.block_k
    w_gate, w_up, h_gate, h_up = w[:, :, :inner], w[:, :, inner:], h[:, :inner], h[:, inner:]
    x_mode, w_tma = tiles.mode(x, index, tma > 0), tma > 0 and tma_ready(w_gate, w_up)
    y_tma = tma > 1 and tma_ready(a, *((h_gate, h_up) if keep else ()))
    describe = (lambda y: tiles.ragged(y, BLOCK_M, n)) if y_tma else (lambda y: y)
    glu_kernel[(launch_grid(config, rows, w.shape[0], inner, x.device),)](
        tiles.matrix(x, BLOCK_M, k) if x_mode == 1 else x,
        tiles.weight(w_gate, k, n) if w_tma else w_gate, tiles.weight(w_up, k, n) if w_tma else w_up,
        describe(h_gate) if keep else None, describe(h_up) if keep else None, describe(a), h if keep else None, a,
        index, blocks, rows, inner, width, x.stride(0), w.stride(0), w.stride(1), h.stride(0), a.stride(0),
        X_MODE=x_mode, W_TMA=w_tma, Y_TMA=y_tma, KEEP=keep, TAIL=tail, ACTIVATION=activation, EVEN_K=width % k == 0,
        DTYPE=tiles.dtype(x), BLOCK_M=BLOCK_M, BLOCK_N=n, BLOCK_K=k, GROUP=config.group, FLATTEN=config.flatten,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return h, a


def glu_backward_launch(
    g, w, h, scale, offsets, blocks, index=None, activation="swiglu", tail=True, *, config: Config | None = None,
    tma: int = 2,
):  # fmt: skip
    """g [M, H] (or [T, H] with `index` [M]), w [E, I, H], h [M, 2I], scale [M] fp32.

    Returns dh [M, 2I], scale·a [M, I] (for the gradient of w) and d scale [M] fp32; the rows of y = scale·(a @ w) have
    the gradient g. Rows past the last group are zero, but for dh and a without `tail`: uninitialised.
    """
    rows, inner, width = backward_shapes(g, w, h, scale, blocks, index, activation)
    dh, a, experts = g.new_empty((rows, 2 * inner)), g.new_empty((rows, inner)), w.shape[0]
    if a.numel() == 0 or width == 0:
        return dh.zero_(), a.zero_(), torch.zeros_like(scale)
    g, w, h = dense_rows(g), dense_rows(w), dense_rows(h)
    config = config or configure("glu_backward", g, inner, width, experts, rows)
    if config.impl == "split":
        da = rows_launch(g, w, offsets, blocks, index, transposed=True, tma=tma)
        return activation_backward_launch(da, h, scale.contiguous(), blocks, activation)
    n, k = config.block_n, config.block_k
    parts = triton.cdiv(inner, n)
    score = g.new_empty((rows, parts), dtype=torch.float32)
    g_mode, w_tma = tiles.mode(g, index, tma > 0), tma > 0 and tma_ready(w)
    h_gate, h_up, dh_gate, dh_up = h[:, :inner], h[:, inner:], dh[:, :inner], dh[:, inner:]
    y_tma = tma > 1 and tma_ready(a, h_gate, h_up, dh_gate, dh_up)
    describe = (lambda y: tiles.ragged(y, BLOCK_M, n >> config.split)) if y_tma else (lambda y: y)
    glu_backward_kernel[(launch_grid(config, rows, experts, inner, g.device),)](
        tiles.matrix(g, BLOCK_M, k) if g_mode == 1 else g, tiles.weight(w, n, k) if w_tma else w,
        describe(h_gate), describe(h_up), describe(dh_gate), describe(dh_up), describe(a), dh, a, score,
        index, scale.contiguous(), blocks, rows, inner, width,
        g.stride(0), w.stride(0), w.stride(1), h.stride(0), dh.stride(0), a.stride(0), parts,
        X_MODE=g_mode, W_TMA=w_tma, Y_TMA=y_tma, TAIL=tail, ACTIVATION=activation, EVEN_K=width % k == 0,
        DTYPE=tiles.dtype(g), BLOCK_M=BLOCK_M, BLOCK_N=n, BLOCK_K=k, GROUP=config.group, SPLIT=config.split,
        FLATTEN=config.flatten, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return dh, a, score.sum(1)


ACTIVATIONS = ("swiglu", "geglu", "glu")


def shapes(x, w, blocks, index, activation):
    """(rows, I, H), checked."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if w.dim() != 3 or w.shape[2] % 2:
        raise ValueError(f"`w` must be [experts, hidden, gate | up], an even last dim, got {tuple(w.shape)}")
    rows, columns, width = product_shapes(x, w, blocks, index, False)
    return rows, columns // 2, width


def backward_shapes(g, w, h, scale, blocks, index, activation):
    """(rows, I, H), checked."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    rows, inner, width = product_shapes(g, w, blocks, index, True)
    if h.shape != (rows, 2 * inner) or scale.shape != (rows,) or h.dtype != g.dtype:
        raise ValueError(f"need h [{rows}, {2 * inner}] {g.dtype} and scale [{rows}], got {tuple(h.shape)} {h.dtype} "
                         f"and {tuple(scale.shape)}")  # fmt: skip
    return rows, inner, width


def gate_reference(gate, activation):
    """(f(gate), f'(gate)), plain torch."""
    if activation == "swiglu":
        sigmoid = torch.sigmoid(gate)
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    if activation == "geglu":
        cdf = 0.5 * (1 + torch.erf(gate * 0.5**0.5))
        return gate * cdf, cdf + gate * torch.exp(-0.5 * gate * gate) * (0.5 / torch.pi) ** 0.5
    return gate, torch.ones_like(gate)


def glu_reference(x, w, offsets, blocks, index=None, activation="swiglu", keep=True):
    """Plain torch: the product, then the activation in fp32 on the rounded pre-activation."""
    shapes(x, w, blocks, index, activation)
    h = rows_reference(x, w, offsets, blocks, index)
    gate, up = h.to(torch.promote_types(h.dtype, torch.float32)).chunk(2, 1)
    a = (gate_reference(gate, activation)[0] * up).to(h.dtype)
    return h if keep else h[:0].clone(), a


def glu_backward_reference(g, w, h, scale, offsets, blocks, index=None, activation="swiglu"):
    """Plain torch, in fp32."""
    backward_shapes(g, w, h, scale, blocks, index, activation)
    high = torch.promote_types(g.dtype, torch.float32)
    acc = rows_reference(g.to(high), w.to(high), offsets, blocks, index, transposed=True)
    gate, up = h.to(high).chunk(2, 1)
    value, slope = gate_reference(gate, activation)
    used = torch.arange(h.shape[0], device=h.device)[:, None] < blocks[0, 1]
    a, s = torch.where(used, value * up, 0), torch.where(used, scale[:, None].to(high), 0)
    dh = torch.where(used, torch.cat([acc * s * up * slope, acc * s * value], 1), 0)
    return dh.to(g.dtype), torch.where(used, a * s, 0).to(g.dtype), (acc * a).sum(1)


def glu_fake(x, w, offsets, blocks, index=None, activation="swiglu", keep=True):
    rows = x.shape[0] if index is None else index.shape[0]
    return x.new_empty((rows if keep else 0, w.shape[2])), x.new_empty((rows, w.shape[2] // 2))


def glu_backward_fake(g, w, h, scale, offsets, blocks, index=None, activation="swiglu"):
    rows = h.shape[0]
    return h.new_empty(h.shape), g.new_empty((rows, w.shape[1])), g.new_empty((rows,), dtype=scale.dtype)


glu_op = define(
    "grouped_glu(Tensor x, Tensor w, Tensor offsets, Tensor blocks, Tensor? index=None, str activation='swiglu', "
    "bool keep=True) -> (Tensor, Tensor)",
    cpu=glu_reference, cuda=glu_launch, fake=glu_fake,
)  # fmt: skip
glu_backward_op = define(
    "grouped_glu_backward(Tensor g, Tensor w, Tensor h, Tensor scale, Tensor offsets, Tensor blocks, "
    "Tensor? index=None, str activation='swiglu') -> (Tensor, Tensor, Tensor)",
    cpu=glu_backward_reference, cuda=glu_backward_launch, fake=glu_backward_fake,
)  # fmt: skip
