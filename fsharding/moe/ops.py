"""The routed steps of a mixture of experts as differentiable ops: what they mean on one device.

Legend: T tokens, k experts a token, R = T·k routed rows, E experts, D model dim, N, X any feature dim. Row r of the
routed order is slot ``perm[r]`` of the flattened [T, k] choices, token ``perm[r] // k``; ``inverse`` is the inverse
permutation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsharding.errors import ShardingError
from fsharding.moe import fast, grouped
from fsharding.oplib import multilinear, raw_op


def check_ids(ids, num_experts):
    """Raise ShardingError for ids out of range; on the CPU only, as elsewhere a look at the values would stall the
    device."""
    if ids.device.type == "cpu" and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= num_experts:
            raise ShardingError(
                f"`fs.moe.route` got expert ids from {low} to {high}, but there are {num_experts} experts: "
                f"ids must lie in [0, {num_experts})."
            )


def _route(ids, num_experts):
    flat = ids.reshape(-1)
    check_ids(flat, num_experts)
    perm = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.numel(), device=perm.device)
    return perm, inverse, choices(flat, num_experts)


def choices(flat, num_experts):
    """int32 [E] of ids [R]. A comparison and a sum instead of ``bincount``: deterministic, without a host sync on
    CUDA."""
    hits = flat[:, None] == torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    return hits.sum(0, dtype=torch.int32)


def _route_cuda(ids, num_experts):
    if not fast.present():
        return _route(ids, num_experts)
    # ids out of range come last, past every group: they are dropped, and nothing else is disturbed
    ends, perm, inverse, _ = fast.kernel("routing", "sort_launch")(ids, num_experts)
    return perm.long(), inverse.reshape(-1).long(), torch.diff(ends, prepend=ends.new_zeros(1))


route = raw_op(
    "route(Tensor ids, int num_experts) -> (Tensor, Tensor, Tensor)",
    _route,
    lambda ids, num_experts: (
        ids.new_empty(ids.numel(), dtype=torch.int64),
        ids.new_empty(ids.numel(), dtype=torch.int64),
        ids.new_empty(num_experts, dtype=torch.int32),
    ),
    cuda=_route_cuda,
)


def _rows_of_tokens(y_RD, inverse, k):
    return y_RD[inverse].view(inverse.shape[0] // k, k, y_RD.shape[1])


def wide(x):
    """Half-precision rows are summed in float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def dispatch_kernel(x, perm, inverse, k):
    """[T, D] -> [R, D], row r from token ``perm[r] // k``."""
    if fast.serves(x):
        return fast.kernel("combine", "gather_launch")(x, perm // k)
    return x[perm // k]


def dispatch_t_kernel(g, perm, inverse, k):
    """[R, D] -> [T, D], the sum of each token's rows."""
    if fast.serves(g):
        return fast.kernel("combine", "combine_launch")(g, None, inverse.view(-1, k))
    return wide(_rows_of_tokens(g, inverse, k)).sum(1).to(g.dtype)


def combine_kernel(y, w, perm, inverse):
    """[R, D], [T, k] -> [T, D], the weighted sum of each token's rows."""
    if fast.serves(y):
        return fast.kernel("combine", "combine_launch")(y, w, inverse.view(w.shape))
    rows = wide(_rows_of_tokens(y, inverse, w.shape[1]))
    return torch.einsum("tkd,tk->td", rows, w.to(rows.dtype)).to(y.dtype)


dispatch_raw = raw_op(
    "dispatch(Tensor x, Tensor perm, Tensor inverse, int k) -> Tensor",
    dispatch_kernel,
    lambda x, perm, inverse, k: x.new_empty(perm.shape[0], x.shape[1]),
)
dispatch_t_raw = raw_op(
    "dispatch_t(Tensor g, Tensor perm, Tensor inverse, int k) -> Tensor",
    dispatch_t_kernel,
    lambda g, perm, inverse, k: g.new_empty(perm.shape[0] // k, g.shape[1]),
)
combine_raw = raw_op(
    "combine(Tensor y, Tensor w, Tensor perm, Tensor inverse) -> Tensor",
    combine_kernel,
    lambda y, w, perm, inverse: y.new_empty(w.shape[0], y.shape[1]),
)
combine_t_raw = raw_op(
    "combine_t(Tensor g, Tensor w, Tensor perm, Tensor inverse) -> Tensor",
    lambda g, w, perm, inverse: (wide(g)[perm // w.shape[1]] * w.reshape(-1)[perm, None]).to(g.dtype),
    lambda g, w, perm, inverse: g.new_empty(perm.shape[0], g.shape[1]),
)
combine_w_raw = raw_op(
    "combine_w(Tensor g, Tensor y, Tensor perm, Tensor inverse, int k) -> Tensor",
    lambda g, y, perm, inverse, k: torch.einsum(
        "tkd,td->tk", wide(_rows_of_tokens(y, inverse, k)), g.to(wide(y).dtype)
    ),
    lambda g, y, perm, inverse, k: g.new_empty(g.shape[0], k, dtype=_wide_dtype(y.dtype)),
)


def _wide_dtype(dtype):
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


ragged_dot_raw = raw_op(
    "ragged_dot(Tensor x, Tensor w, Tensor group_sizes) -> Tensor",
    grouped.ragged_dot_loop,
    lambda x, w, group_sizes: x.new_empty(x.shape[0], w.shape[2]),
    cuda=grouped.ragged_dot_cuda,
)
ragged_dw_raw = raw_op(
    "ragged_dw(Tensor x, Tensor g, Tensor group_sizes) -> Tensor",
    grouped.ragged_dw_loop,
    lambda x, g, group_sizes: x.new_empty(group_sizes.shape[0], x.shape[1], g.shape[1]),
    cuda=grouped.ragged_dw_cuda,
)


def _expert_of_row(group_sizes, rows):
    ends = group_sizes.cumsum(0)
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)


def _expand(b, group_sizes, rows):
    expert = _expert_of_row(group_sizes, rows)
    inside = expert < b.shape[0]  # rows past the last group are zero
    return torch.where(inside[:, None], b[expert.clamp(max=b.shape[0] - 1)], b.new_zeros(()))


def _segment_sum(g, group_sizes):
    # One product with a 0/1 matrix: deterministic, unlike a scattered add.
    member = (
        _expert_of_row(group_sizes, g.shape[0])[None] == torch.arange(group_sizes.shape[0], device=g.device)[:, None]
    )
    return (member.to(wide(g).dtype) @ wide(g)).to(g.dtype)


expand_raw = raw_op(
    "expand(Tensor b, Tensor group_sizes, SymInt rows) -> Tensor",
    _expand,
    lambda b, group_sizes, rows: b.new_empty(rows, b.shape[1]),
)
segment_sum_raw = raw_op(
    "segment_sum(Tensor g, Tensor group_sizes) -> Tensor",
    _segment_sum,
    lambda g, group_sizes: g.new_empty(group_sizes.shape[0], g.shape[1]),
)

# Each op and its transposes; every one is multilinear, so the family is closed under differentiation.
dispatch: Callable = multilinear(dispatch_raw, 1, lambda: [lambda g, x, *r: dispatch_t(g, *r)])
dispatch_t: Callable = multilinear(dispatch_t_raw, 1, lambda: [lambda g, x, *r: dispatch(g, *r)])
combine: Callable = multilinear(
    combine_raw,
    2,
    lambda: [lambda g, y, w, *r: combine_t(g, w, *r), lambda g, y, w, *r: combine_w(g, y, *r, w.shape[1])],
)
combine_t: Callable = multilinear(
    combine_t_raw,
    2,
    lambda: [lambda h, g, w, *r: combine(h, w, *r), lambda h, g, w, *r: combine_w(g, h, *r, w.shape[1])],
)
combine_w: Callable = multilinear(
    combine_w_raw,
    2,
    lambda: [lambda c, g, y, p, i, k: combine(y, c, p, i), lambda c, g, y, p, i, k: combine_t(g, c, p, i)],
)
ragged_dot: Callable = multilinear(
    ragged_dot_raw,
    2,
    lambda: [lambda g, x, w, n: ragged_dot(g, w.mT, n), lambda g, x, w, n: ragged_dw(x, g, n)],
)
ragged_dw: Callable = multilinear(
    ragged_dw_raw,
    2,
    lambda: [lambda c, x, g, n: ragged_dot(g, c.mT, n), lambda c, x, g, n: ragged_dot(x, c, n)],
)
expand: Callable = multilinear(expand_raw, 1, lambda: [lambda g, b, n, rows: segment_sum(g, n)])
segment_sum: Callable = multilinear(segment_sum_raw, 1, lambda: [lambda b, g, n: expand(b, n, g.shape[0])])
