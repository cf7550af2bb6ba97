"""A compiled program of simulated ranks: all of them in lockstep, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fsharding import tree as trees
from fsharding.annotate import worlds
from fsharding.annotate.place import check_alive, wrap_blocks
from fsharding.annotate.simulate import SimulatedTensor, blocks_of
from fsharding.annotate.spec import local_slices, padded_shape
from fsharding.errors import ShardingError
from fsharding.program import lockstep
from fsharding.program.lowered import Lowered, Program


class SimulatedProgram(Program):
    """As :class:`Program`, on leaves that hold the blocks of all ranks."""

    def __init__(self, lowered: Lowered):
        self.lowered, self.local = lowered, lowered.local
        self._addresses: tuple = ()

    def run(self, leaves: Sequence[Any]) -> Any:
        mesh = self.local.mesh
        worlds.refuse_closed(mesh.world, repr(mesh))
        for x in self.lowered.program.constants:
            check_alive("a tensor that the function closes over", x)
        given = [*leaves, *self.lowered.program.constants]
        ranks = range(mesh.size)
        blocks = [[self._block(x, spec, r) for x, spec in zip(given, self.local.inputs, strict=True)] for r in ranks]
        with torch.no_grad():
            out = lockstep.run(self.local.graph, mesh, blocks)
        if self.lowered.donated:
            self._retire(leaves)
        return self._collect(out)

    def _block(self, x, spec, rank: int) -> torch.Tensor:
        """What the program of one rank gets for an argument, padded if it is at rest."""
        mesh = self.local.mesh
        where = local_slices(spec.shape, spec.dims, mesh.shape, mesh.coordinates(rank))
        if isinstance(x, SimulatedTensor):
            x = blocks_of(x)[rank]
        else:
            x = x.detach()[where] if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=spec.dtype)
        full = padded_shape(spec.shape, spec.dims, mesh.shape) if spec.kind == "stored" else x.shape
        widths = [w for n, m in zip(reversed(x.shape), reversed(full), strict=True) for w in (0, m - n)]
        return F.pad(x, widths) if any(widths) else x

    def _collect(self, out: list[list[torch.Tensor]]):
        result = self.lowered.result
        made = iter([self._result(i, [own[i] for own in out]) for i in range(len(self.local.outputs))])
        count = len(self.local.outputs) + len(result["fixed"])
        leaves = [result["fixed"][i] if i in result["fixed"] else next(made) for i in range(count)]
        return trees.unflatten(result["treedef"], leaves)

    def _result(self, number: int, blocks: list[torch.Tensor]):
        mesh, (kind, dims, shape) = self.local.mesh, self.local.outputs[number]
        if kind == "whole":
            for rank, block in enumerate(blocks):
                if not torch.equal(block.nan_to_num(), blocks[0].nan_to_num()):
                    raise ShardingError(
                        f"`{self.lowered.name}`: the ranks should hold the same result number {number}, but rank "
                        f"{rank} holds another than rank 0. A `shard_map` with `check=False` promised what does not "
                        "hold."
                    )
            return blocks[0].detach()

        def own(rank):
            where = local_slices(shape, dims, mesh.shape, mesh.coordinates(rank))
            return blocks[rank][tuple(slice(0, s.stop - s.start) for s in where)].detach()

        return wrap_blocks(own, mesh, dims, shape)
