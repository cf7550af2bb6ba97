"""Library calls that are rewritten while a function is traced.

A composite such as a loss would reach the graph as whatever kernels one device picks; some of those hide a mean or a
mask over the whole batch. Here each becomes a few elementary ops (right under any partition) or one op of ours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fsharding.errors import ShardingError
from fsharding.program import composites_nn as nn
from fsharding.program.attention import scaled_dot_product_attention
from fsharding.program.source import user_line


def rms_norm(input, normalized_shape, weight=None, eps=None):
    """x / sqrt(mean(x²) + eps) · weight over the trailing dims (Zhang & Sennrich 2019), in float32 for half
    precision."""
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if list(input.shape[input.ndim - len(shape) :]) != shape:
        raise ShardingError(f"`rms_norm` over {shape}, but the input ends in {tuple(input.shape)}.")
    x = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    dims = list(range(-len(shape), 0))
    y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    if weight is not None:
        y = y * weight
    return y.to(input.dtype)


def cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    """Per-row losses, then one global sum over one global weight: a mean of local means would be another number."""
    if size_average is not None or reduce is not None:
        raise ShardingError("`size_average` and `reduce` are deprecated: use `reduction`.")
    dim = 1 if input.ndim > 1 else 0
    log_p, classes = F.log_softmax(input, dim), input.shape[dim]
    per_class = None if weight is None else weight.view([-1 if d == dim else 1 for d in range(input.ndim)])
    if target.is_floating_point():
        target = target * (1 - label_smoothing) + label_smoothing / classes
        loss = -(log_p * target if per_class is None else log_p * target * per_class).sum(dim)
        rows = loss.numel()
        return _reduce(loss, loss.new_full((), rows), reduction)
    loss, row_weight = _nll(log_p, target, weight, ignore_index, dim)
    if label_smoothing:
        smooth = -(log_p if per_class is None else log_p * per_class).sum(dim)
        smooth = torch.where(target != ignore_index, smooth, 0.0)
        loss = (1 - label_smoothing) * loss + (label_smoothing / classes) * smooth
    return _reduce(loss, row_weight.sum(), reduction)


def _nll(log_p, target, weight, ignore_index, dim):
    valid = target != ignore_index
    safe = torch.where(valid, target, 0)
    row_weight = valid.to(log_p.dtype) if weight is None else torch.where(valid, weight[safe], 0.0)
    picked = log_p.gather(dim, safe.unsqueeze(dim)).squeeze(dim)
    return torch.where(valid, -picked * row_weight, 0.0), row_weight


def nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    """As :func:`cross_entropy`, from log-probabilities."""
    if size_average is not None or reduce is not None:
        raise ShardingError("`size_average` and `reduce` are deprecated: use `reduction`.")
    loss, row_weight = _nll(input, target, weight, ignore_index, 1 if input.ndim > 1 else 0)
    return _reduce(loss, row_weight.sum(), reduction)


def _reduce(loss, total, reduction):
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ShardingError(f"unknown reduction {reduction!r}: one of 'mean', 'sum', 'none'.")
    return loss.sum() / total if reduction == "mean" else loss.sum()


def one_hot(tensor, num_classes=-1):
    """``F.one_hot`` for a known number of classes: its own range check would read values on the host."""
    if num_classes < 0:
        raise ShardingError("`F.one_hot` without `num_classes` looks at the values: give `num_classes`.")
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


def _refuse(message):
    def refuse(*args, **kwargs):
        raise ShardingError(message)

    return refuse


_RANDOM = (
    "torch's random numbers depend on the number of ranks and cannot be repeated by a recomputation. "
    "Use `fs.random` (`key`, `split`, `normal`, `uniform`, `dropout`) inside `shard`."
)
_VALUE = (
    "reads a tensor's value on the host, inside a function that is traced for all ranks. Keep it a tensor "
    "(`torch.where` instead of `if`), return it, or compute it before the call."
)

REWRITES = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    F.one_hot: one_hot,
    **nn.REWRITES,
    **{
        f: _refuse(f"`{getattr(f, '__name__', f)}` inside a sharded function: {_RANDOM}")
        for f in (
            *(
                getattr(torch, n)
                for n in ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like")
            ),
            *(getattr(torch, n) for n in ("bernoulli", "multinomial", "normal", "poisson")),
            *(
                getattr(torch.Tensor, n)
                for n in ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "bernoulli")
            ),
        )
    },
    **{
        f: _refuse(f"`{f.__name__}` {_VALUE}")
        for f in (
            torch.Tensor.item,
            torch.Tensor.tolist,
            torch.Tensor.numpy,
            torch.Tensor.__bool__,
            torch.Tensor.__float__,
        )
    },
    **{f: _refuse(f"`{f.__name__}` {_VALUE}") for f in (torch.Tensor.__int__, torch.Tensor.__index__)},
}
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)


def _dropout_probability(args, kwargs):
    return kwargs.get("p", args[1] if len(args) > 1 else 0.5), kwargs.get(
        "training", args[2] if len(args) > 2 else True
    )


class Rewrite(TorchFunctionMode):
    """Applies :data:`REWRITES`, lifts closed-over tensors and forgets devices while a function is traced."""

    def __init__(self, lift):
        super().__init__()
        self.lift = lift

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        args = self._lifted(args)
        kwargs = {k: self._lifted(v) for k, v in kwargs.items()}
        if func in _DROPOUTS:
            p, training = _dropout_probability(args, kwargs)
            if p and training:
                _at_line(_refuse(f"`{func.__name__}` inside a sharded function: {_RANDOM}"))
            return args[0]
        if func in REWRITES:
            return _at_line(REWRITES[func], *args, **kwargs)
        args, kwargs = _without_device(func, args, kwargs)
        if nn.is_open(func):
            with self:  # what it calls is rewritten as well
                return _at_line(nn.opened(func), *args, **kwargs)
        return func(*args, **kwargs)

    def _lifted(self, value):
        if isinstance(value, torch.Tensor):
            return self.lift(value)
        if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor | list | tuple) for v in value):
            items = [self._lifted(v) for v in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value


def _at_line(func, *args, **kwargs):
    try:
        return func(*args, **kwargs)
    except ShardingError as error:
        line = user_line()
        if line is None or line in str(error):
            raise
        raise ShardingError(f"{line}: {error}") from None


def _without_device(func, args, kwargs):
    """The trace runs on CPU fakes; the program is given its device when it is lowered."""
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if func in (torch.Tensor.cuda, torch.Tensor.cpu):
        return args[:1], {}
    if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
        args = (args[0], torch.device("cpu"), *args[2:])
    return args, kwargs
