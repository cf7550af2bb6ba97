"""The differentiable grouped products: forward, gradient of the rows and gradient of the weights are each other's
transposes, so every one of them can be differentiated again.

Legend: R rows grouped by expert, T tokens, E experts, w [E, K, N].
"""

import torch

from .combine import Sum
from .registry import refuse_vmap
from .routing import Routing
from .rows import rows_op
from .wgrad import wgrad_op


class Rows(torch.autograd.Function):
    """y[r] = x[r] @ w[e], or @ w[e].T."""

    vmap = refuse_vmap("grouped_mm")

    @staticmethod
    def forward(x, w, offsets, blocks, order, transposed):
        return rows_op(x, w, offsets, blocks, transposed=transposed)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:-1])
        ctx.transposed = inputs[-1]

    @staticmethod
    def backward(ctx, g):
        x, w, offsets, blocks, order = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = Rows.apply(g, w, offsets, blocks, order, not ctx.transposed)
        if ctx.needs_input_grad[1]:
            a, b = (g, x) if ctx.transposed else (x, g)
            dw = Reduce.apply(a, b, offsets, blocks, order)
        return dx, dw, None, None, None, None


class Reduce(torch.autograd.Function):
    """dw[e] = x[rows of e].T @ g[rows of e]."""

    vmap = refuse_vmap("grouped_mm")

    @staticmethod
    def forward(x, g, offsets, blocks, order):
        return wgrad_op(x, g, offsets, order)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dw):
        x, g, offsets, blocks, order = ctx.saved_tensors
        dx = dg = None
        if ctx.needs_input_grad[0]:
            dx = Rows.apply(g, dw, offsets, blocks, order, True)
        if ctx.needs_input_grad[1]:
            dg = Rows.apply(x, dw, offsets, blocks, order, False)
        return dx, dg, None, None, None


class Gather(torch.autograd.Function):
    """y[r] = x[token of r] @ w[e]; the rows are never copied, forward or backward."""

    vmap = refuse_vmap("gather_mm")

    @staticmethod
    def forward(x, w, offsets, blocks, order, inverse, index):
        return rows_op(x, w, offsets, blocks, index)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w, offsets, blocks, order, inverse, index = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = Sum.apply(Rows.apply(g, w, offsets, blocks, order, True), inverse, index)
        if ctx.needs_input_grad[1]:
            dw = GatherReduce.apply(x, g, offsets, blocks, order, inverse, index)
        return dx, dw, None, None, None, None, None


class GatherReduce(torch.autograd.Function):
    """dw[e] = x[tokens of e].T @ g[rows of e]."""

    vmap = refuse_vmap("gather_mm")

    @staticmethod
    def forward(x, g, offsets, blocks, order, inverse, index):
        return wgrad_op(x, g, offsets, order, index)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dw):
        x, g, offsets, blocks, order, inverse, index = ctx.saved_tensors
        dx = dg = None
        if ctx.needs_input_grad[0]:
            dx = Sum.apply(Rows.apply(g, dw, offsets, blocks, order, True), inverse, index)
        if ctx.needs_input_grad[1]:
            dg = Gather.apply(x, dw, offsets, blocks, order, inverse, index)
        return dx, dg, None, None, None, None, None


class Affine(torch.autograd.Function):
    """y[r] = scale[r]·(x[r] @ w[e] + bias[e]), bias and scale in the epilogue of the product."""

    vmap = refuse_vmap("grouped_mm")

    @staticmethod
    def forward(x, w, bias, scale, offsets, blocks, order):
        return rows_op(x, w, offsets, blocks, None, bias, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w, bias, scale, offsets, blocks, order = ctx.saved_tensors
        dz = g if scale is None else (g * scale[:, None]).to(g.dtype)
        dx = dw = dbias = dscale = None
        if ctx.needs_input_grad[0]:
            dx = Rows.apply(dz, w, offsets, blocks, order, True)
        if ctx.needs_input_grad[1]:
            dw = Reduce.apply(x, dz, offsets, blocks, order)
        if bias is not None and ctx.needs_input_grad[2]:
            ones = dz.new_ones((dz.shape[0], 8))  # a group sum is a product with ones: fp32 and deterministic
            dbias = Reduce.apply(ones, dz, offsets, blocks, order)[:, 0].to(bias.dtype)
        if scale is not None and ctx.needs_input_grad[3]:
            z = Affine.apply(x, w, bias, None, offsets, blocks, order)
            dscale = (g.float() * z.float()).sum(1).to(scale.dtype)
        return dx, dw, dbias, dscale, None, None, None


def grouped_mm(x: torch.Tensor, w: torch.Tensor, routing: Routing, *, bias=None, scale=None) -> torch.Tensor:
    """x [R, K] rows grouped by expert, w [E, K, N] of one dtype -> [R, N]: x[r] @ w[e], fp32 accumulation.

    Optional bias [E, N], then scale [R] fp32, inside the kernel. Rows past the last group are zero, and so are their
    gradients and those of experts without rows. Any strides; zero rows are legal; differentiable any number of times.

    Example: sizes [1, 2], x = [[1.], [1.], [2.]], w = [[[3.]], [[5.]]]: [[3.], [5.], [10.]].
    """
    o, b, r = routing.offsets, routing.blocks, routing.order
    if bias is None and scale is None:
        return Rows.apply(x, w, o, b, r, False)
    return Affine.apply(x, w, bias, scale, o, b, r)


def gather_mm(x: torch.Tensor, w: torch.Tensor, routing: Routing) -> torch.Tensor:
    """`grouped_mm(gather(x, routing), w, routing)` for tokens x [T, K], without the copy of the rows. [R, N]."""
    return Gather.apply(x, w, routing.offsets, routing.blocks, routing.order, routing.inverse, routing.rows)
