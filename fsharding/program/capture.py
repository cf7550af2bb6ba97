"""The ``cudagraph`` back end: the whole step of one rank as one captured CUDA graph.

The first call runs as it is (kernels are compiled, communicators start); the second captures and replays. Stored
arguments stay where they are, which donation guarantees from step to step; other arguments are copied into the buffers
that the graph reads; results that do not live in donated memory are copied out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from fsharding import _compat as compat
from fsharding.errors import ShardingError
from fsharding.moe import exchange
from fsharding.program.source import line_of

_SYNCS = {exchange.host_sizes: "the split sizes of its exchange are read by the host"}


def refuse_host_sync(graph: fx.Graph, device: torch.device) -> None:
    """Raise ShardingError where a program cannot be captured, naming the node."""
    if device.type != "cuda":
        raise ShardingError(f"backend='cudagraph' needs a GPU, the mesh is on {device}. Use 'eager' or 'inductor'.")
    for node in graph.nodes:
        if node.target in _SYNCS:
            raise ShardingError(
                f"{line_of(node) or 'fs.shard'}: `{node.name}` cannot be captured into a CUDA graph: "
                f"{_SYNCS[node.target]}. "
                "Use a dispatcher without a host sync, `experts=fs.Experts(dispatcher='gather')`, `experts=None`, or "
                "backend='inductor'."
            )


class Captured:
    """A program's function, captured at its second call.

    Args:
        function: inputs (a list of tensors) -> list of tensors; writes only donated inputs.
        fixed: per input whether it lies at the same address in every call (it is donated).
        kept: per output whether it lives in donated memory.
    """

    def __init__(self, function: Callable, fixed: Sequence[bool], kept: Sequence[bool]):
        self.function, self.fixed, self.kept = function, list(fixed), list(kept)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.warm = False

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self.warm:
            self.warm = True
            return self.function(inputs)
        moved = [own.data_ptr() != x.data_ptr() for own, x in zip(self.inputs, inputs, strict=False)]
        if self.graph is None or any(m and f for m, f in zip(moved, self.fixed, strict=True)):
            self._capture(inputs)
        for own, x, fixed in zip(self.inputs, inputs, self.fixed, strict=True):
            if not fixed and own is not x:
                own.copy_(x, non_blocking=True)
        assert self.graph is not None
        self.graph.replay()
        return [x if kept else x.clone() for x, kept in zip(self.outputs, self.kept, strict=True)]

    def _capture(self, inputs: Sequence[torch.Tensor]) -> None:
        self.inputs = [x if fixed else x.clone() for x, fixed in zip(inputs, self.fixed, strict=True)]
        torch.cuda.synchronize()
        if self.graph is None:
            compat.before_the_world_ends(self.release)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.function(self.inputs)

    def release(self) -> None:
        """Let go of the graph and its memory. A communicator that a graph still holds waits for it for ever when it is
        destroyed."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.outputs, self.inputs = [], []
            self.graph.reset()
            self.graph = None
