"""Routing: from expert ids to row order and tile schedule, on the device, once for all products of a layer.

Legend: T tokens, k experts a token, R = T·k rows, E experts. A *row* is one (token, slot) pair; rows are ordered by
expert, stable in the token order. Ids outside of [0, E) mark dropped slots: their rows come last, past every group.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .registry import define

BLOCK_M = 128  # rows of one tile of every row-grouped product; the schedule is made for it
CHUNK = 128  # ids that one program of the sort ranks


class Routing(NamedTuple):
    """One routing, shared by the forward and backward products of a layer. All int32, on the device.

    Example, ids [[1, 0], [1, 1]] and 3 experts: offsets [1, 4, 4], perm [1, 0, 2, 3], inverse [[1, 0], [2, 3]],
    rows [0, 0, 1, 1].
    """

    offsets: torch.Tensor  # [E] inclusive ends, as `torch.nn.functional.grouped_mm` wants them
    perm: torch.Tensor  # [R] row -> flat slot t·k + j
    inverse: torch.Tensor  # [T, k] slot -> row
    rows: torch.Tensor  # [R] row -> token
    blocks: torch.Tensor  # [1 + capacity, 4] tile schedule, see `schedule`
    order: torch.Tensor  # [E] experts, most rows first

    @property
    def group_sizes(self) -> torch.Tensor:
        """[E] int32 rows of every expert."""
        return torch.diff(self.offsets, prepend=self.offsets.new_zeros(1))


def route(ids: torch.Tensor, num_experts: int) -> Routing:
    """Sort the slots of `ids` [T, k] (any integer dtype) by expert and build the tile schedule. No host sync.

    Raises ValueError for ids that are not two-dimensional integers or for `num_experts` < 1.
    """
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"`ids` must be [tokens, k] integers, got {tuple(ids.shape)} of {ids.dtype}")
    if num_experts < 1:
        raise ValueError(f"`num_experts` must be positive, got {num_experts}")
    offsets, perm, inverse, rows = sort_op(ids, num_experts)
    blocks, order = schedule(offsets, perm.shape[0])
    return Routing(offsets, perm, inverse, rows, blocks, order)


def from_offsets(offsets: torch.Tensor, rows: int) -> Routing:
    """The routing of `rows` rows that are grouped already by the inclusive ends `offsets` [E] int32: no permutation."""
    blocks, order = schedule(offsets, rows)
    index = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    return Routing(offsets, index, index.clone().unsqueeze(1), index.clone(), blocks, order)


def schedule(offsets: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of BLOCK_M rows, none across two experts: (blocks [1 + capacity, 4], order [E]), int32.

    blocks[0] = (number of tiles, rows in groups, 0, 0); then a tile a line: (expert, first row, end row, 0), unused
    lines have expert -1. Example: offsets [130, 130, 140], 150 rows -> blocks[0] = (3, 140, 0, 0), then
    (0, 0, 128, 0), (0, 128, 130, 0), (2, 130, 140, 0); order [0, 2, 1].
    """
    return schedule_op(offsets, rows)


def capacity(rows, experts):
    """Most tiles that `rows` rows in `experts` groups can need; known on the host."""
    return (rows + BLOCK_M - 1) // BLOCK_M + experts


# ---------------------------------------------------------------------------------------------------- stable sort by id


@triton.jit(do_not_specialize=["total", "chunks"])
def count_kernel(ids, counts, total, chunks, E: tl.constexpr, E_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """counts[e, chunk] = ids of the chunk that name expert e; anything outside of [0, E) counts as E."""
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + at, mask=at < total, other=E_PAD - 1).to(tl.int32)
    expert = tl.where((expert < 0) | (expert >= E), E, expert)
    expert = tl.where(at < total, expert, E_PAD - 1)  # E_PAD > E + 1, so the padding has a bin of its own
    bins = tl.arange(0, E_PAD)
    tl.store(counts + bins * chunks + chunk, tl.histogram(expert, E_PAD), mask=bins <= E)


@triton.jit(do_not_specialize=["chunks"])
def scan_kernel(counts, totals, chunks, BLOCK: tl.constexpr):
    """Exclusive prefix over the chunks of one expert, in place; the sum goes to totals."""
    expert = tl.program_id(0)
    base = tl.zeros((), tl.int32)
    for first in range(0, chunks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(counts + expert * chunks + at, mask=at < chunks, other=0)
        tl.store(counts + expert * chunks + at, tl.cumsum(value, 0) - value + base, mask=at < chunks)
        base += tl.sum(value, 0)
    tl.store(totals + expert, base)


@triton.jit(do_not_specialize=["total", "chunks", "slots"])
def place_kernel(
    ids, counts, totals, offsets, perm, inverse, rows, total, chunks, slots,
    E: tl.constexpr, E_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """row = start of the expert + earlier chunks + earlier ids of this chunk that name the same expert."""
    chunk = tl.program_id(0)
    bins = tl.arange(0, E_PAD)
    sizes = tl.load(totals + bins, mask=bins <= E, other=0)
    ends = tl.cumsum(sizes, 0)
    if chunk == 0:
        tl.store(offsets + bins, ends, mask=bins < E)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    valid = at < total
    expert = tl.load(ids + at, mask=valid, other=E).to(tl.int32)
    expert = tl.where((expert < 0) | (expert >= E), E, expert)
    # the second load, along the other dim, spares a layout conversion of the first
    other = tl.load(ids + at, mask=valid, other=E).to(tl.int32)
    other = tl.where((other < 0) | (other >= E), E, other)
    lane = tl.arange(0, CHUNK)
    same = (expert[:, None] == other[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(same.to(tl.int32), 1)
    start = tl.gather(ends - sizes, expert, 0)
    row = start + tl.load(counts + expert * chunks + chunk, mask=valid, other=0) + rank
    tl.store(inverse + at, row, mask=valid)
    tl.store(perm + row, at, mask=valid)
    tl.store(rows + row, at // slots, mask=valid)


def sort_launch(ids: torch.Tensor, experts: int):
    """The three launches of the stable sort. ids [T, k] -> offsets [E], perm [T·k], inverse [T, k], rows [T·k]."""
    ids = ids.contiguous()
    total, chunks = ids.numel(), triton.cdiv(ids.numel(), CHUNK)
    new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=ids.device)  # noqa: E731
    offsets, perm, inverse, rows = new(experts), new(total), new(*ids.shape), new(total)
    if total == 0:
        return offsets.zero_(), perm, inverse, rows
    counts, totals = new(experts + 1, chunks), new(experts + 1)
    pad = triton.next_power_of_2(experts + 2)
    count_kernel[(chunks,)](ids, counts, total, chunks, E=experts, E_PAD=pad, CHUNK=CHUNK, num_warps=4)
    scan_kernel[(experts + 1,)](counts, totals, chunks, BLOCK=1024, num_warps=4)
    place_kernel[(chunks,)](
        ids, counts, totals, offsets, perm, inverse, rows, total, chunks, ids.shape[1],
        E=experts, E_PAD=pad, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    return offsets, perm, inverse, rows


def sort_reference(ids: torch.Tensor, experts: int):
    """Plain torch: one stable sort, the inverse by a scatter."""
    flat = ids.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    perm = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(perm).scatter_(0, perm, torch.arange(perm.numel(), device=perm.device))
    sizes = torch.zeros(experts + 1, dtype=torch.long, device=ids.device).index_add_(0, flat, torch.ones_like(flat))
    int32 = lambda x: x.to(torch.int32)  # noqa: E731
    rows = perm // max(ids.shape[1], 1)
    return int32(sizes.cumsum(0)[:-1]), int32(perm), int32(inverse).reshape(ids.shape), int32(rows)


def sort_fake(ids: torch.Tensor, experts: int):
    new = lambda *shape: ids.new_empty(shape, dtype=torch.int32)  # noqa: E731
    return new(experts), new(ids.numel()), new(*ids.shape), new(ids.numel())


sort_op = define(
    "route(Tensor ids, int experts) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=sort_reference, cuda=sort_launch, fake=sort_fake,
)  # fmt: skip


# -------------------------------------------------------------------------------------------------------- tile schedule


@triton.jit(do_not_specialize=["capacity"])
def schedule_kernel(
    offsets, blocks, order, capacity,
    E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program finds the experts of CHUNK tiles by counting the experts that end before; program 0 ranks them."""
    chunk = tl.program_id(0)
    bins = tl.arange(0, E_PAD)
    ends = tl.load(offsets + bins, mask=bins < E, other=0)
    starts = tl.load(offsets + bins - 1, mask=(bins < E) & (bins > 0), other=0)
    sizes = tl.maximum(ends - starts, 0)
    tile_ends = tl.cumsum((sizes + BLOCK_M - 1) // BLOCK_M, 0)
    total = tl.max(tile_ends, 0)
    tile = chunk * CHUNK + tl.arange(0, CHUNK)
    before = (tile_ends[None, :] <= tile[:, None]) & (bins[None, :] < E)
    expert = tl.minimum(tl.sum(before.to(tl.int32), 1), E - 1)
    used = tile < total
    first_tile = tl.gather(tile_ends - (sizes + BLOCK_M - 1) // BLOCK_M, expert, 0)
    start = tl.gather(starts, expert, 0) + (tile - first_tile) * BLOCK_M
    end = tl.minimum(start + BLOCK_M, tl.gather(ends, expert, 0))
    line = blocks + 4 + tile * 4
    mask = tile < capacity
    tl.store(line, tl.where(used, expert, -1), mask=mask)
    tl.store(line + 1, tl.where(used, start, 0), mask=mask)
    tl.store(line + 2, tl.where(used, end, 0), mask=mask)
    tl.store(line + 3, tl.zeros_like(tile), mask=mask)
    if chunk == 0:
        head = tl.arange(0, 4)
        tl.store(blocks + head, tl.where(head == 0, total, tl.where(head == 1, tl.max(ends, 0), 0)))
        for first in range(0, E, CHUNK):
            mine = first + tl.arange(0, CHUNK)
            low = tl.load(offsets + mine - 1, mask=(mine < E) & (mine > 0), other=0)
            size = tl.maximum(tl.load(offsets + mine, mask=mine < E, other=0) - low, 0)
            larger = sizes[None, :] > size[:, None]
            tie = (sizes[None, :] == size[:, None]) & (bins[None, :] < mine[:, None])
            rank = tl.sum(((larger | tie) & (bins[None, :] < E)).to(tl.int32), 1)
            tl.store(order + rank, mine, mask=mine < E)


def schedule_launch(offsets: torch.Tensor, rows: int):
    experts = offsets.shape[0]
    lines = capacity(rows, experts)
    blocks = torch.empty((1 + lines, 4), dtype=torch.int32, device=offsets.device)
    order = torch.empty(experts, dtype=torch.int32, device=offsets.device)
    chunk = 32
    schedule_kernel[(triton.cdiv(lines, chunk),)](
        offsets.contiguous(), blocks, order, lines,
        E=experts, E_PAD=triton.next_power_of_2(experts), BLOCK_M=BLOCK_M, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    return blocks, order


def schedule_reference(offsets: torch.Tensor, rows: int):
    ends = offsets.tolist()
    lines, start = [], 0
    for expert, end in enumerate(ends):
        lines += [(expert, r, min(r + BLOCK_M, end), 0) for r in range(start, end, BLOCK_M)]
        start = end
    lines = [(len(lines), max(ends), 0, 0), *lines]
    lines += [(-1, 0, 0, 0)] * (1 + capacity(rows, len(ends)) - len(lines))
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    order = torch.argsort(sizes, descending=True, stable=True)
    to = dict(dtype=torch.int32, device=offsets.device)
    return torch.tensor(lines, **to), order.to(torch.int32)


def schedule_fake(offsets: torch.Tensor, rows: int):
    experts = offsets.shape[0]
    new = lambda *shape: offsets.new_empty(shape, dtype=torch.int32)  # noqa: E731
    return new(1 + capacity(rows, experts), 4), new(experts)


schedule_op = define(
    "schedule(Tensor offsets, SymInt rows) -> (Tensor, Tensor)",
    cpu=schedule_reference, cuda=schedule_launch, fake=schedule_fake,
)  # fmt: skip
