"""Which configuration runs a product: a measured table, and a default where nothing was measured.

The key is (op, N, K, E, bucket of rows per expert), never the exact number of rows: a data change must not change the
kernel. `tuned.py` is written by `tune.py`; every entry was the fastest of its candidates in that run.
"""

import functools
from typing import NamedTuple

from .tuned import TUNED


class Config(NamedTuple):
    """How one op is launched. `impl` "torch" means `torch._grouped_mm` (only for the plain products)."""

    impl: str = "triton"  # or "torch"; "copy" gathers rows first; "split" runs the activation as a pass of its own
    block_m: int = 128  # of the weight gradient; row-grouped products have the schedule's BLOCK_M
    block_n: int = 256
    block_k: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8  # row blocks that run side by side, for the L2 cache
    split: int = 1  # the epilogue goes in 2**split column pieces
    flatten: bool = True  # one pipelined loop over tiles and reduction
    per_sm: int = 1  # resident programs a multiprocessor
    cuts: int = -1  # of the weight gradient: parts of an expert that has all rows; -1 as `choose_cuts` says, 1 none


DEFAULT = {
    "forward": Config(),
    "dgrad": Config(),
    "gather": Config(flatten=False),
    "wgrad": Config(),
    "wgrad_gather": Config(impl="copy", stages=5),
    "glu": Config(impl="split", block_n=128, flatten=False),
    "glu_only": Config(block_n=128, flatten=False),
    "glu_backward": Config(impl="split", block_n=128, split=3, flatten=False),
}
WIDE = Config(block_m=64, block_n=64, block_k=32, warps=4, stages=2, split=0, flatten=False)


def bucket(rows: int, experts: int) -> int:
    """Rows per expert, rounded down to a power of 8 between 64 and 4096: 0 (fewer than 64), 64, 512 or 4096."""
    average = rows // max(experts, 1)
    return max((b for b in (64, 512, 4096) if b <= average), default=0)


def choose(op: str, n: int, k: int, experts: int, rows: int) -> Config:
    """The configuration of `op` for N = n result columns, K = k (reduction; for the weight gradient dw is [K, N])."""
    return _chosen(op, n, k, experts, bucket(rows, experts))


@functools.cache
def _chosen(op: str, n: int, k: int, experts: int, size: int) -> Config:
    found = TUNED.get((op, n, k, experts, size))
    return DEFAULT[op] if found is None else DEFAULT[op]._replace(**found)


def configure(op: str, x, n: int, k: int, experts: int, rows: int) -> Config:
    """`choose`, or `WIDE` for operands of four bytes, whose tiles would not fit the shared memory."""
    return WIDE if x.element_size() == 4 else choose(op, n, k, experts, rows)
