"""Decompositions of our own, beside PyTorch's: into ops whose rules are easy to trust."""

from __future__ import annotations

import torch

A = torch.ops.aten


def _moments(x, dim=None, *, correction=None, keepdim=False):
    """Mean and variance in two passes, as the kernels do: two sums, which any split leaves sums."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    dims = list(range(x.ndim)) if dim is None or not len(dim) else [d % max(x.ndim, 1) for d in dim]
    dims = dims if x.ndim else []
    count = 1
    for d in dims:
        count *= x.shape[d]
    mean = wide.mean(dims, keepdim=True) if dims else wide
    total = (wide - mean).square().sum(dims, keepdim=True) if dims else (wide - mean).square()
    var = total / max(count - (1 if correction is None else correction), 0)
    if not keepdim and dims:
        mean, var = (v.squeeze(dims) for v in (mean, var))
    return mean.to(x.dtype), var.to(x.dtype)


def _var(x, dim=None, *, correction=None, keepdim=False):
    return NotImplemented if x.is_complex() else _moments(x, dim, correction=correction, keepdim=keepdim)[1]


def _var_mean(x, dim=None, *, correction=None, keepdim=False):
    return NotImplemented if x.is_complex() else _moments(x, dim, correction=correction, keepdim=keepdim)[::-1]


def _addbmm(x, a, b, *, beta=1, alpha=1):
    return x * beta + torch.bmm(a, b).sum(0) * alpha


def _index_put(x, indices, values, accumulate=False):
    """``x[mask] = number`` is a choice, element by element."""
    mask = indices[0]
    one = len(indices) == 1 and mask is not None and mask.dtype == torch.bool and values.numel() == 1
    if not one or accumulate:
        return NotImplemented
    mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
    return torch.where(mask, values.reshape(()).to(x.dtype), x)


def _zero_tangent(size, *, dtype=None, layout=None, device=None, pin_memory=None):
    """Forward mode's zeros that take no memory: in a second derivative they lose their device while it is traced."""
    return torch.zeros(size, dtype=dtype, device=device)


TABLE = {
    A.var.correction: _var,
    A.var_mean.correction: _var_mean,
    A.addbmm.default: _addbmm,
    A.index_put.default: _index_put,
    A._conj.default: lambda x: torch.ops.aten._conj_physical(x),
    # PyTorch's decompositions leave it behind in half precision.
    torch.ops.prims.convert_element_type.default: lambda x, dtype: A._to_copy.default(x, dtype=dtype),
    A._efficientzerotensor.default: _zero_tangent,
}
