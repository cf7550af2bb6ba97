"""Scaled dot-product attention as one op: local in the batch and head dims, the same graph on every device.

Legend: B batch, H query heads, G key/value heads (H a multiple of G), Q query positions, S key positions, D head dim.
"""

from __future__ import annotations

import functools
import math

import torch

from fsharding.errors import ShardingError
from fsharding.oplib import raw_op, wide_dtype

A = torch.ops.aten


def _wide(x):
    return x.to(wide_dtype(x.dtype))


def _scores(q, k, mask, causal, scale):
    scores = (_wide(q) @ _wide(k).mT) * scale
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    return scores if mask is None else scores + mask


def _repeat(x, heads):
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sum_heads(g, groups):
    return g if g.shape[1] == groups else g.unflatten(1, (groups, -1)).sum(2)


def _math_forward(q, k, v, mask, causal, scale):
    scores = _scores(q, _repeat(k, q.shape[1]), mask, causal, scale)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)  # a fully masked row attends to nothing
    return (weights @ _wide(_repeat(v, q.shape[1]))).to(q.dtype), lse


def _math_backward(g, q, k, v, out, lse, mask, causal, scale):
    heads, groups = q.shape[1], k.shape[1]
    kk, vv = _wide(_repeat(k, heads)), _wide(_repeat(v, heads))
    weights = torch.exp(_scores(q, kk, mask, causal, scale) - lse.unsqueeze(-1)).nan_to_num(0.0)
    g = _wide(g)
    inner = (g @ vv.mT) - (g * _wide(out)).sum(-1, keepdim=True)
    d_scores = weights * inner * scale
    dk, dv = d_scores.mT @ _wide(q), weights.mT @ g
    return (d_scores @ kk).to(q.dtype), _sum_heads(dk, groups).to(k.dtype), _sum_heads(dv, groups).to(v.dtype)


def _cpu_forward(q, k, v, mask, causal, scale):
    heads = q.shape[1]
    return A._scaled_dot_product_flash_attention_for_cpu(
        q,
        _repeat(k, heads),
        _repeat(v, heads),
        0.0,
        causal,
        attn_mask=None if mask is None else mask.to(q.dtype),
        scale=scale,
    )


def _cpu_backward(g, q, k, v, out, lse, mask, causal, scale):
    heads, groups = q.shape[1], k.shape[1]
    mask = None if mask is None else mask.to(q.dtype)
    dq, dk, dv = A._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, _repeat(k, heads), _repeat(v, heads), out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq, _sum_heads(dk, groups), _sum_heads(dv, groups)


def _flash(q, mask):
    return mask is None and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _cuda_forward(q, k, v, mask, causal, scale):
    if not _flash(q, mask):
        return _math_forward(q, k, v, mask, causal, scale)
    if _cudnn(q, k, causal):
        return _cudnn_forward(q, k, v, causal, scale)
    return A._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _cuda_backward(g, q, k, v, out, lse, mask, causal, scale):
    if not _flash(q, mask):
        return _math_backward(g, q, k, v, out, lse, mask, causal, scale)
    if _cudnn(q, k, causal):
        return _cudnn_backward(g, q, k, v, out, lse, causal, scale)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout: read by nobody
    length = (q.shape[2], k.shape[2])
    return A._scaled_dot_product_flash_attention_backward(
        g.contiguous(), q, k, v, out, lse, None, None, *length, 0.0, causal, seed, seed[0], scale=scale
    )


# ---- cuDNN: the fastest kernels on Hopper, if this build has them and they agree with the formula -------------------
def _cudnn_forward(q, k, v, causal, scale):
    out, lse = A._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(g, q, k, v, out, lse, causal, scale):
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout: read by nobody
    length = (q.shape[2], k.shape[2])
    if _cudnn_lse_dims(q.device) == 4:
        lse = lse.unsqueeze(-1)
    return A._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out, lse, seed, seed, None, None, None, *length, 0.0, causal, scale=scale
    )


@functools.cache
def _cudnn_lse_dims(device) -> int:
    q = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return A._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, True, False, scale=1.0)[1].ndim


def _cudnn(q, k, causal) -> bool:
    if q.shape[2] != k.shape[2] or q.shape[2] % 64 or torch.cuda.get_device_capability(q.device)[0] < 9:
        return False
    return _cudnn_agrees(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[3], causal)


@functools.cache
def _cudnn_agrees(device, dtype, heads, groups, dim, causal) -> bool:
    """A small trial, forward and backward, against the formula; once for each kind of call. Never inside a capture."""
    if torch.cuda.is_current_stream_capturing():
        return False
    g = torch.Generator(device=device).manual_seed(0)
    shape = lambda n: (1, 128, n, dim)  # noqa: E731 - as the callers' tensors lie in memory
    make = lambda n: torch.randn(shape(n), generator=g, device=device).to(dtype).transpose(1, 2)  # noqa: E731
    q, k, v, cotangent = make(heads), make(groups), make(groups), make(heads)
    scale = 1.0 / math.sqrt(dim)
    try:
        out, lse = _cudnn_forward(q, k, v, causal, scale)
        got = (out, lse, *_cudnn_backward(cotangent, q, k, v, out, lse, causal, scale))
    except (RuntimeError, TypeError, AttributeError):
        return False
    out, lse = _math_forward(q, k, v, None, causal, scale)
    want = (out, lse, *_math_backward(cotangent, q, k, v, out, lse, None, causal, scale))
    pairs = zip(got, want, strict=True)
    return all(a.shape == b.shape and bool((a - b).abs().max() <= 0.03 * b.abs().max()) for a, b in pairs)


def _rows_first(x):
    """[B, H, S, D] laid out as [B, S, H, D] in memory: what the kernels write, and what the next reshape takes for
    free."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _laid_out(kernel):
    """The strides that the fakes promise, whatever a device's kernel chose."""

    def run(*args):
        return tuple(_rows_first(x) if x.ndim == 4 else x.contiguous() for x in kernel(*args))

    return run


def _fake_like(x):
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


attention_raw = raw_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> (Tensor, Tensor)",
    _laid_out(_cpu_forward),
    lambda q, k, v, mask, causal, scale: (_fake_like(q), q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))),
    cuda=_laid_out(_cuda_forward),
)
attention_backward_raw = raw_op(
    "attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, bool causal, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    _laid_out(_cpu_backward),
    lambda g, q, k, v, *rest: (_fake_like(q), _fake_like(k), _fake_like(v)),
    cuda=_laid_out(_cuda_backward),
)


class _Backward(torch.autograd.Function):
    """The backward pass as an op of its own, so that asking for a second derivative raises and nothing else does."""

    @staticmethod
    def forward(*args):
        return attention_backward_raw(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *cotangents):
        raise ShardingError(
            "a second derivative through `scaled_dot_product_attention`: its kernels have none. Write the attention "
            "out (`softmax(q @ k.mT * scale) @ v`) where you differentiate twice."
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, mask, causal, scale):
        return attention_raw(q, k, v, mask, causal, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):
        q, k, v, mask, out, lse = ctx.saved_tensors
        return *_Backward.apply(g, q, k, v, out, lse, mask, ctx.causal, ctx.scale), None, None, None


def _additive(mask, q, k):
    """A boolean or additive mask as float32 [B, H, Q, S]."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -math.inf)
    return mask.float().expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def written_out(q, k, v, mask, causal, scale):
    """The same formula in elementary ops: for any rank, forward mode and masks that are differentiated."""
    scores = (q @ k.mT) * scale
    if causal:
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = torch.where(keep, scores, -math.inf)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, -1) @ v


def scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """What stands for ``torch.nn.functional.scaled_dot_product_attention`` inside a traced function."""
    if dropout_p:
        raise ShardingError(
            "`scaled_dot_product_attention` with dropout draws from torch's generator, which no layout can repeat: "
            "write the attention out and use `fs.random.dropout`."
        )
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if not enable_gqa and q.ndim == 4 and q.shape[1] != k.shape[1]:
        raise ShardingError(f"attention with {q.shape[1]} query and {k.shape[1]} key heads needs `enable_gqa=True`.")
    square = not is_causal or q.shape[-2] == k.shape[-2]
    mask_grad = attn_mask is not None and attn_mask.requires_grad
    if q.ndim != 4 or not square or mask_grad or q.shape[-1] != v.shape[-1]:
        if enable_gqa and q.ndim >= 3:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        return written_out(q, k, v, attn_mask, is_causal, scale)
    mask = None if attn_mask is None else _additive(attn_mask, q, k)
    return _Attention.apply(q, k, v, mask, bool(is_causal), scale)[0]
