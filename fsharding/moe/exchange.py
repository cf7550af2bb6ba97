"""Raw ops that move routed rows between the ranks of an expert axis, with exact splits.

Legend: P ranks of the axis, E experts (rank r owns E/P consecutive ones), R rows. Before the exchange rows are sorted
by expert, so that rank r's rows are one run; after it they arrive by source rank and are sorted by local expert.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsharding._compat import resolve_group
from fsharding.comm import groups
from fsharding.errors import ShardingError
from fsharding.moe import fast
from fsharding.oplib import raw_op


def _exchange_counts(counts, alias):
    out = torch.empty_like(counts)
    dist.all_to_all_single(out, counts.contiguous(), group=resolve_group(alias))
    return out.view(groups.axes_size(alias), -1)


exchange_counts = raw_op(
    "exchange_counts(Tensor counts, str group) -> Tensor",
    _exchange_counts,
    lambda counts, group: counts.new_empty(groups.axes_size(group), counts.shape[0] // groups.axes_size(group)),
)
"""int32 [E] rows per expert that I send -> [P, E/P] rows per source rank and local expert that I receive."""


def _host_sizes(counts, received):
    parts = received.shape[0]
    both = torch.stack([counts.view(parts, -1).sum(1), received.sum(1)])
    splits = both.to("cpu", torch.int64)  # the one look of the host at the data, for all exchanges of the layer
    return splits, int(splits[1].sum())


host_sizes = raw_op(
    "host_sizes(Tensor counts, Tensor received) -> (Tensor, SymInt)",
    _host_sizes,
    lambda counts, received: (
        torch.empty(2, received.shape[0], dtype=torch.int64, device="cpu"),
        torch.library.get_ctx().new_dynamic_size(),
    ),
)
"""Split sizes on the host, int64 [2, P] (sent, received), and the number of rows received."""


def _expert_order(received, rows):
    parts, local = received.shape
    ids = torch.arange(local, device=received.device).repeat(parts)
    ids = ids.repeat_interleave(received.reshape(-1).long(), output_size=rows)
    if ids.is_cuda and fast.present():
        _, order, inverse, _ = fast.kernel("routing", "sort_launch")(ids[:, None], local)
        return order.long(), inverse.reshape(-1).long(), received.sum(0, dtype=torch.int32)
    order = torch.argsort(ids, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(rows, device=order.device)
    return order, inverse, received.sum(0, dtype=torch.int32)


expert_order = raw_op(
    "expert_order(Tensor received, SymInt rows) -> (Tensor, Tensor, Tensor)",
    _expert_order,
    lambda received, rows: (
        received.new_empty(rows, dtype=torch.int64),
        received.new_empty(rows, dtype=torch.int64),
        received.new_empty(received.shape[1], dtype=torch.int32),
    ),
)
"""Arrival order -> expert order: the permutation, its inverse, rows per local expert."""


def _exchange(x, splits, rows, alias, back):
    send, receive = splits.tolist()
    if back:
        send, receive = receive, send
    if sum(send) != x.shape[0] or sum(receive) != rows:
        raise ShardingError(
            f"expert exchange over {alias}: rank {groups.current_rank()} holds {x.shape[0]} rows to send as {send} and "
            f"expects {rows} rows as {receive}. The counts and the rows come from different routings."
        )
    out = x.new_empty(rows, *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=resolve_group(alias))
    return out


exchange = raw_op(
    "exchange(Tensor x, Tensor splits, SymInt rows, str group, bool back) -> Tensor",
    _exchange,
    lambda x, splits, rows, group, back: x.new_empty(rows, *x.shape[1:]),
)
"""Rows to their experts' ranks (or ``back``): [R, D] -> [rows, D]. Sizes are checked on both sides before anything
moves."""
