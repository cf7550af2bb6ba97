"""``fs.simulate``: many ranks in one process on the CPU, for notebooks and tests, with the code that torchrun runs.

Inside, ``make_mesh`` gives a mesh over simulated ranks, a placed leaf holds the blocks of all of them, and sharded
functions run for all ranks in lockstep: node by node, a collective as a function from all ranks' operands to all
ranks' results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import _compat
from .. import tree as trees
from ..errors import ShardingError
from . import worlds

__all__ = ["PerRank", "SimulatedTensor", "simulate"]

_numbers = itertools.count(1)


class simulate:
    """``with fs.simulate(8) as world:`` one process stands for 8 ranks.

    The same code as under torchrun: ``make_mesh`` (whose sizes must multiply to the number of ranks), ``init``,
    ``device_put``, ``device_get``, ``reshard``, sharded functions, ``full_tensor()``. Only what each rank would bring
    or see of its own is asked for by rank: ``world.each(f)`` calls ``f(rank)`` for all of them, for ``from_local``, and
    ``leaf.to_local()`` gives all blocks. Results are those of real ranks, up to the order in which a backend sums.
    Plain values leave the block, placed ones do not.

    Raises ShardingError for a number of ranks below 1 and inside of another ``simulate``.
    """

    def __init__(self, ranks: int):
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ShardingError(f"fs.simulate takes a number of ranks, at least 1; it got {ranks!r}.")
        self.ranks, self._token = ranks, None

    def __enter__(self) -> simulate:
        if worlds.current() is not None:
            raise ShardingError(
                f"fs.simulate({self.ranks}) inside of fs.simulate({worlds.current().ranks}): the ranks "
                "of one process belong to one block. Leave the outer block first."
            )
        self._token = worlds.entered.set(worlds.World(next(_numbers), self.ranks))
        return self

    def __exit__(self, *error) -> None:
        worlds.entered.reset(self._token)

    def each(self, fn: Callable[[int], Any]) -> Any:
        """``fn(rank)`` for every rank: a tree of :class:`PerRank` leaves, for ``fs.from_local``.

        Raises ShardingError if the ranks return different structures.
        """
        made = [trees.flatten_with_paths(fn(rank)) for rank in range(self.ranks)]
        for rank, (paths, _, treedef) in enumerate(made):
            if treedef != made[0][2]:
                raise ShardingError(f"world.each: rank {rank} returns the leaves {paths}, rank 0 returns {made[0][0]}.")
        rows = zip(*(leaves for _, leaves, _ in made), strict=True)
        return trees.unflatten(made[0][2], [PerRank(row) if _any_tensor(row) else row[0] for row in rows])


def _any_tensor(row) -> bool:
    return any(isinstance(x, torch.Tensor) for x in row)


class PerRank:
    """One plain tensor for each simulated rank: ``x[rank]``, in rank order."""

    def __init__(self, blocks: Sequence[torch.Tensor]):
        self.blocks = tuple(blocks)

    def __getitem__(self, rank: int) -> torch.Tensor:
        return self.blocks[rank]

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.blocks)

    def __repr__(self) -> str:
        return "\n".join(f"rank {rank}: {block}" for rank, block in enumerate(self.blocks))


# Functions of a leaf that read no element of it.
_READS = set(
    """size dim stride numel nelement ndimension element_size
    requires_grad_ __len__ __get__ __set__ __hash__""".split()
)
# Functions of elements at one place: what they do to each block, they do to the value.
_ELEMENTWISE = set(
    """detach clone to float double half bfloat16 int long bool contiguous neg add sub mul div true_divide
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __neg__ __pow__ pow abs sqrt square exp log
    zeros_like ones_like full_like empty_like rsub""".split()
)


class SimulatedTensor(DTensor):
    """A placed leaf inside of ``fs.simulate``: mesh, placements and shape of a DTensor, with the blocks of all ranks.

    Outside of sharded functions only elementwise ops of leaves of one layout work; others raise ShardingError.
    """

    __slots__ = ["_blocks", "_world"]

    def full_tensor(self, *, grad_placements=None) -> torch.Tensor:
        """The full value."""
        from .place import device_get

        return device_get(self)

    def to_local(self, *, grad_placements=None) -> PerRank:  # type: ignore[override]
        """The blocks of all ranks."""
        return PerRank(blocks_of(self))

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        from .place import describe

        return describe(self)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in _READS or name.startswith(("is_", "_is_")):
            with _compat.without_torch_function():
                return func(*args, **kwargs)
        leaves = [a for a in args if isinstance(a, SimulatedTensor)]
        others = [a for a in args if isinstance(a, torch.Tensor) and not isinstance(a, SimulatedTensor)]
        first = leaves[0] if leaves else None
        alike = (
            first is not None and all(_layout(x) == _layout(first) for x in leaves) and all(x.ndim == 0 for x in others)
        )
        if name not in _ELEMENTWISE or not alike or any(isinstance(v, torch.Tensor) for v in kwargs.values()):
            raise ShardingError(
                f"`{name}` on a placed leaf outside of a sharded function, in `fs.simulate`: only "
                "elementwise ops of leaves of one layout are simulated there. Put it into `fs.shard`, "
                "or use `fs.device_get`."
            )
        pick = lambda rank: [blocks_of(a)[rank] if isinstance(a, SimulatedTensor) else a for a in args]
        return simulated([func(*pick(rank), **kwargs) for rank in range(len(blocks_of(first)))], first, first._world)


def _layout(x: DTensor):
    return x.device_mesh, tuple(x.placements), tuple(x.shape)


def simulated(blocks: Sequence[torch.Tensor], template: DTensor, world: int) -> SimulatedTensor:
    """A leaf of these blocks, one a rank, with the mesh, placements and shape of the leaf that rank 0 would hold."""
    leaf = _compat.leaf_of_class(SimulatedTensor, blocks[0], template)
    leaf._blocks, leaf._world = tuple(blocks), world
    return leaf


def blocks_of(leaf: SimulatedTensor) -> tuple[torch.Tensor, ...]:
    """The blocks of all ranks. Raises ShardingError after its ``fs.simulate`` block."""
    worlds.refuse_closed(leaf._world, f"the leaf {leaf!r}")
    return leaf._blocks
