"""Composites of ``torch.nn.functional`` and statistics, written out: their kernels look at values on the host, hide a
statistic over the whole batch, or exist on some devices only."""

from __future__ import annotations

import functools
import math
import types

import torch
import torch.nn.functional as F

from fsharding.errors import ShardingError


def reduced(loss, reduction):
    """A loss's ``reduction``."""
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ShardingError(f"unknown reduction {reduction!r}: one of 'mean', 'sum', 'none'.")
    return loss.mean() if reduction == "mean" else loss.sum()


def _current(size_average, reduce):
    if size_average is not None or reduce is not None:
        raise ShardingError("`size_average` and `reduce` are deprecated: use `reduction`.")


# ---- normalisation ---------------------------------------------------------------------------------------------------
def _wide(x):
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _per_channel(v, x):
    return v.view(1, -1, *[1] * (x.ndim - 2))


def _normalised(x, mean, var, weight, bias, eps, dtype):
    y = (x - mean) * torch.rsqrt(var + eps)
    y = y if weight is None else y * _per_channel(weight, y)
    return (y if bias is None else y + _per_channel(bias, y)).to(dtype)


def _over(x, dims):
    mean = x.mean(dims, keepdim=True)
    return mean, (x - mean).square().mean(dims, keepdim=True)


def batch_norm(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
):  # fmt: skip
    """Statistics over the whole batch, whatever splits it (Ioffe & Szegedy 2015); running ones are only read."""
    x = _wide(input)
    if not training:
        mean, var = (_per_channel(v, x) for v in (running_mean, running_var))
    elif running_mean is not None or running_var is not None:
        raise ShardingError(
            "`batch_norm` with running statistics changes its arguments. Compute the statistics with `mean` and `var` "
            "and return the new running values from the function."
        )
    else:
        mean, var = _over(x, [d for d in range(x.ndim) if d != 1])
    return _normalised(x, mean, var, weight, bias, eps, input.dtype)


def instance_norm(
    input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    """Statistics of each row and channel (Ulyanov et al. 2016)."""
    if not use_input_stats or running_mean is not None:
        return batch_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    x = _wide(input)
    return _normalised(x, *_over(x, list(range(2, x.ndim))), weight, bias, eps, input.dtype)


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    """Statistics of each row and group of channels (Wu & He 2018)."""
    if input.shape[1] % num_groups:
        raise ShardingError(f"`group_norm`: {input.shape[1]} channels do not form {num_groups} groups.")
    x = _wide(input).unflatten(1, (num_groups, -1))
    mean, var = _over(x, list(range(2, x.ndim)))
    y = ((x - mean) * torch.rsqrt(var + eps)).flatten(1, 2)
    y = y if weight is None else y * _per_channel(weight, y)
    return (y if bias is None else y + _per_channel(bias, y)).to(input.dtype)


# ---- losses ----------------------------------------------------------------------------------------------------------
def multi_margin_loss(
    input, target, p=1, margin=1.0, weight=None, size_average=None, reduce=None, reduction="mean"
):  # fmt: skip
    """Σ over the wrong classes j of max(0, margin - x[y] + x[j])ᵖ · weight[y] / classes."""
    _current(size_average, reduce)
    classes = input.shape[-1]
    wrong = target.unsqueeze(-1) != torch.arange(classes, device=input.device)
    hinge = (margin - input.gather(-1, target.unsqueeze(-1)) + input).clamp(min=0) ** p
    loss = torch.where(wrong, hinge, 0.0).sum(-1) / classes
    return reduced(loss if weight is None else loss * weight[target], reduction)


def multilabel_margin_loss(input, target, size_average=None, reduce=None, reduction="mean"):
    """Σ over the labels (those before the first -1) and the other classes of max(0, 1 - x[label] + x[other]) /
    classes."""
    _current(size_average, reduce)
    classes = input.shape[-1]
    listed = (target >= 0).to(torch.int64).cumprod(-1).bool()
    safe = torch.where(listed, target, 0)
    is_label = ((safe.unsqueeze(-1) == torch.arange(classes, device=input.device)) & listed.unsqueeze(-1)).any(-2)
    hinge = (1 - input.gather(-1, safe).unsqueeze(-1) + input.unsqueeze(-2)).clamp(min=0)
    counted = listed.unsqueeze(-1) & ~is_label.unsqueeze(-2)
    return reduced(torch.where(counted, hinge, 0.0).sum((-2, -1)) / classes, reduction)


def soft_margin_loss(input, target, size_average=None, reduce=None, reduction="mean"):
    """log(1 + exp(-target · input)), in the input's dtype."""
    _current(size_average, reduce)
    return reduced(F.softplus(-target * input).to(input.dtype), reduction)


def gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
    """½ (log var + (input - target)² / var), var at least ``eps`` but for its gradient (Nix & Weigend 1994)."""
    if not isinstance(var, torch.Tensor):
        var = torch.full_like(input, var)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


# ---- statistics, products --------------------------------------------------------------------------------------------
def cov(input, *, correction=1, fweights=None, aweights=None):
    """The covariance of the rows of a matrix, over its columns."""
    if fweights is not None or aweights is not None:
        raise ShardingError("`torch.cov` with weights looks at their values: write the weighted sums out.")
    x = input.unsqueeze(0) if input.ndim < 2 else input
    x = x - x.mean(1, keepdim=True)
    return (x @ x.mH / max(x.shape[1] - correction, 0)).squeeze()


def corrcoef(input):
    """The correlation of the rows of a matrix, over its columns."""
    c = cov(input)
    if not c.ndim:
        return c / c
    scale = c.diagonal().sqrt()
    return (c / scale[:, None] / scale).clamp(-1, 1)


def quantile(input, q, dim=None, keepdim=False, *, interpolation="linear"):
    """Of sorted values, interpolated; a NaN makes a NaN. PyTorch's own compares ``q`` on the host before 2.13."""
    if not isinstance(q, float | int) or interpolation != "linear" or (dim is None and keepdim):
        return torch.ops.aten.quantile.default(
            input, torch.as_tensor(q, dtype=input.dtype), dim, keepdim, interpolation=interpolation
        )
    if not 0 <= q <= 1:
        raise ShardingError(f"`quantile` takes numbers from 0 to 1, got {q}.")
    x, dim = (input.flatten(), 0) if dim is None else (input, dim)
    place = q * (x.shape[dim] - 1)
    low, ordered = math.floor(place), x.sort(dim).values
    below, above = (ordered.narrow(dim, i, 1) for i in (low, math.ceil(place)))
    y = torch.where(x.isnan().any(dim, keepdim=True), math.nan, torch.lerp(below, above, place - low))
    return y if keepdim else y.squeeze(dim)


def rrelu(input, lower=1.0 / 8, upper=1.0 / 3, training=False, inplace=False):
    """Its mean slope; in training it draws random ones."""
    if training:
        raise ShardingError(
            "`rrelu` draws random slopes from torch's generator: use `F.leaky_relu`, or `fs.random.uniform` slopes."
        )
    return F.leaky_relu(input, (lower + upper) / 2)


def bilinear(input1, input2, weight, bias=None):
    """x1 · weight[o] · x2 for each output o."""
    y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias


REWRITES = {
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.group_norm: group_norm,
    F.multi_margin_loss: multi_margin_loss,
    F.multilabel_margin_loss: multilabel_margin_loss,
    F.soft_margin_loss: soft_margin_loss,
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.rrelu: rrelu,
    F.bilinear: bilinear,
    **dict.fromkeys((torch.quantile, torch.Tensor.quantile), quantile),
    **dict.fromkeys((torch.cov, torch.Tensor.cov), cov),
    **dict.fromkeys((torch.corrcoef, torch.Tensor.corrcoef), corrcoef),
}


# ---- functions that call others --------------------------------------------------------------------------------------
def is_open(func) -> bool:
    """Is this a Python function of ``torch.nn.functional``, which may call others of these?"""
    return isinstance(func, types.FunctionType) and func.__globals__ is vars(F)


@functools.cache
def opened(func):
    """The function with its own question "does anybody override me?" answered by no.

    What a mode sees of such a function is the outermost call: the attention and the dropout inside
    ``multi_head_attention_forward`` would pass unseen. Under this one they ask the mode in their turn.
    """
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(asks, lambda *args: False)}
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
