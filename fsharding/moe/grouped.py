"""Grouped products of rows sorted by group: the loop that defines them; on CUDA in bfloat16 our kernels or PyTorch's
grouped GEMM, whichever is faster.

Legend: R rows, E groups, K and N the dims of one group's matrix. Rows past the last group are zero, values and
gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fsharding.errors import ShardingError
from fsharding.moe import fast


def _groups(group_sizes, rows):
    sizes = group_sizes.tolist()
    if min(sizes, default=0) < 0 or sum(sizes) > rows:
        raise ShardingError(
            f"`ragged_dot` got group sizes {sizes} for {rows} rows: sizes must not be negative nor exceed the rows in "
            "all."
        )
    end = 0
    for group, size in enumerate(sizes):
        yield group, slice(end, end + size)
        end += size


def ragged_dot_loop(x, w, group_sizes):
    """[R, K], [E, K, N], [E] -> [R, N], one product per non-empty group."""
    out = x.new_zeros(x.shape[0], w.shape[2])
    for group, rows in _groups(group_sizes, x.shape[0]):
        if rows.stop > rows.start:
            torch.mm(x[rows], w[group], out=out[rows])
    return out


def ragged_dw_loop(x, g, group_sizes):
    """[R, K], [R, N], [E] -> [E, K, N]: per group the product of its rows' transposes."""
    out = x.new_zeros(group_sizes.shape[0], x.shape[1], g.shape[1])
    for group, rows in _groups(group_sizes, x.shape[0]):
        if rows.stop > rows.start:
            torch.mm(x[rows].T, g[rows], out=out[group])
    return out


WORTH = 2e11  # floating-point operations from which on the kernels' speed outweighs their launch (a third of a ms)


def _fast(x, *dims):
    """PyTorch's grouped GEMM takes bfloat16 with 16-byte rows, and refuses operands without rows."""
    return x.dtype == torch.bfloat16 and x.shape[0] > 0 and all(d % 8 == 0 for d in dims)


def _ours(x, k, n):
    """Our kernels where they are faster: on products that last, and on what PyTorch does not take."""
    return fast.serves(x) and (2 * x.shape[0] * k * n >= WORTH or not _fast(x, k, n))


def _dense(x, row_major_ok=True):
    """A layout that the grouped GEMM takes: one of the last two dims has stride 1, nothing expanded or misaligned."""
    rows, cols = x.stride()[-2:]
    fine = (cols == 1 and rows % 8 == 0 and rows >= x.shape[-1]) or (
        rows == 1 and cols % 8 == 0 and cols >= x.shape[-2]
    )
    return x if fine and x.data_ptr() % 16 == 0 else x.contiguous()


def _offsets(group_sizes, rows):
    """Ends of the groups, int32. Sizes cannot be checked without a host sync: what they say of rows that do not exist
    is cut off, so that no kernel reads or writes outside of its operands."""
    return group_sizes.cumsum(0, dtype=torch.int32).clamp_(0, rows)


def _schedule(group_sizes, rows):
    """(ends, tiles, order) for the kernels."""
    ends = _offsets(group_sizes, rows)
    return ends, *fast.kernel("routing", "schedule_launch")(ends, rows)


def ragged_dot_cuda(x, w, group_sizes):
    """As :func:`ragged_dot_loop`, without a host sync in bfloat16."""
    if _ours(x, *w.shape[1:]):
        ends, blocks, _ = _schedule(group_sizes, x.shape[0])
        turned = w.stride(-1) != 1 and w.stride(-2) == 1  # a gradient's `w.mT`: the kernel reads it as it rests
        return fast.kernel("rows", "rows_launch")(x, w.mT if turned else w, ends, blocks, transposed=turned)
    if not _fast(x, x.shape[1], w.shape[2]):
        return ragged_dot_loop(x, w, group_sizes)
    offsets = _offsets(group_sizes, x.shape[0])
    out = F.grouped_mm(x.contiguous(), _dense(w), offs=offsets)
    tail = torch.arange(x.shape[0], device=x.device) >= offsets[-1]
    return out.masked_fill_(tail[:, None], 0)  # rows past the last group are not written by the kernel


def ragged_dw_cuda(x, g, group_sizes):
    """As :func:`ragged_dw_loop`, without a host sync in bfloat16."""
    if _ours(x, x.shape[1], g.shape[1]):
        ends, _, order = _schedule(group_sizes, x.shape[0])
        return fast.kernel("wgrad", "wgrad_launch")(x, g, ends, order)
    if not _fast(x, x.shape[1], g.shape[1]):
        return ragged_dw_loop(x, g, group_sizes)
    out = F.grouped_mm(x.contiguous().T, g.contiguous(), offs=_offsets(group_sizes, x.shape[0]))
    return out.masked_fill_((group_sizes == 0)[:, None, None], 0)
