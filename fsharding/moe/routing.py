"""What a user writes for a mixture of experts: route, dispatch, ragged_dot, expand, combine.

On one device these are a stable sort, a row gather, grouped products and a weighted sum; under ``shard`` a dispatcher
turns them into exchanges between ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsharding.errors import ShardingError
from fsharding.moe import ops
from fsharding.oplib import operands


class Routing(NamedTuple):
    """Where each routed row comes from. Made by :func:`route`; integers only.

    Fields: ``perm`` and ``inverse`` int64 [T·k], ``group_sizes`` int32 [E] (rows per expert; used outside of the MoE
    ops it is the global count), ``num_experts``, ``top_k``.
    """

    perm: torch.Tensor
    inverse: torch.Tensor
    group_sizes: torch.Tensor
    num_experts: int
    top_k: int


def route(ids: torch.Tensor, num_experts: int) -> Routing:
    """Sort token choices by expert (stable).

    Args:
        ids: integer [T, k], the experts that each token chose. An expert may be named twice; both slots then count.
        num_experts: E.

    Raises:
        ShardingError: wrong rank or dtype, k > E, or (on CPU) ids outside [0, E).
    """
    (ids,) = operands(ids)
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ShardingError(
            f"`fs.moe.route` takes integer ids of shape [tokens, k], got {ids.dtype} {tuple(ids.shape)}."
        )
    if not isinstance(num_experts, int) or num_experts < 1:
        raise ShardingError(f"`num_experts` must be a positive int, got {num_experts!r}.")
    if ids.shape[1] > num_experts:
        raise ShardingError(
            f"each token chooses k = {ids.shape[1]} experts, but there are only {num_experts}: lower k."
        )
    perm, inverse, group_sizes = ops.route(ids.detach(), num_experts)
    return Routing(perm, inverse, group_sizes, num_experts, ids.shape[1])


def dispatch(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Rows grouped by expert: [T, D] -> [T·k, D]. Between this and :func:`combine` only row-wise ops are legal."""
    x, *way = operands(x, *routing[:3])
    routing = Routing(*way, *routing[3:])
    tokens = routing.perm.shape[0] // routing.top_k
    if x.ndim != 2 or x.shape[0] != tokens:
        raise ShardingError(f"`dispatch` takes x of shape [{tokens}, D] for this routing, got {tuple(x.shape)}.")
    return ops.dispatch(x, routing.perm, routing.inverse, routing.top_k)


def combine(y: torch.Tensor, weights: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Back to token order, weighted: [T·k, D], [T, k] -> [T, D]; sums in float32, returns ``y``'s dtype."""
    y, weights, *way = operands(y, weights, *routing[:3])
    routing = Routing(*way, *routing[3:])
    rows = routing.perm.shape[0]
    if y.ndim != 2 or y.shape[0] != rows or tuple(weights.shape) != (rows // routing.top_k, routing.top_k):
        raise ShardingError(
            f"`combine` takes y [{rows}, D] and weights [{rows // routing.top_k}, {routing.top_k}] for this routing, "
            f"got {tuple(y.shape)} and {tuple(weights.shape)}."
        )
    return ops.combine(y, weights, routing.perm, routing.inverse)


def expand(b: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Per-expert values to rows, as for biases: [E, X] -> [T·k, X]."""
    b, *way = operands(b, *routing[:3])
    routing = Routing(*way, *routing[3:])
    if b.ndim != 2 or b.shape[0] != routing.num_experts:
        raise ShardingError(f"`expand` takes [{routing.num_experts}, X] for this routing, got {tuple(b.shape)}.")
    return ops.expand(b, routing.group_sizes, routing.perm.shape[0])


def ragged_dot(x: torch.Tensor, w: torch.Tensor, group_sizes: torch.Tensor) -> torch.Tensor:
    """Multiply consecutive groups of rows with one matrix each: [R, K], [E, K, N], int [E] -> [R, N].

    Rows past ``group_sizes.sum()`` are zero, values and gradients (``jax.lax.ragged_dot``). Differentiable in ``x`` and
    ``w`` to any order.
    """
    x, w, group_sizes = operands(x, w, group_sizes)
    if x.ndim != 2 or w.ndim != 3 or group_sizes.ndim != 1:
        raise ShardingError(
            "`ragged_dot` takes x [rows, K], w [groups, K, N] and group_sizes [groups], got "
            f"{tuple(x.shape)}, {tuple(w.shape)} and {tuple(group_sizes.shape)}."
        )
    if x.shape[1] != w.shape[1] or w.shape[0] != group_sizes.shape[0] or x.dtype != w.dtype:
        raise ShardingError(
            f"`ragged_dot` operands do not fit: x {x.dtype} {tuple(x.shape)}, w {w.dtype} {tuple(w.shape)}, "
            f"group_sizes {tuple(group_sizes.shape)}; K, the number of groups and the dtypes must agree."
        )
    if group_sizes.is_floating_point():
        raise ShardingError(f"`group_sizes` must be integers, got {group_sizes.dtype}.")
    return ops.ragged_dot(x, w, group_sizes)
