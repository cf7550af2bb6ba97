"""A planned program (``Lowered``) and one that runs (``Program``)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from fsharding import _compat as compat
from fsharding import tree as trees
from fsharding.annotate import worlds
from fsharding.annotate.mesh import Mesh, agree
from fsharding.annotate.place import check_alive, describe, dims_of, wrap_local
from fsharding.annotate.spec import local_slices, padded_shape
from fsharding.errors import ShardingError
from fsharding.program import explain
from fsharding.program.call import Call, abstract, is_wide
from fsharding.program.capture import Captured, refuse_host_sync
from fsharding.program.checks import check_leaves, check_memory, refuse_gradients
from fsharding.program.donate import memory_of
from fsharding.program.execute import Runner, aliases, set_device
from fsharding.program.partition import Input, LocalProgram
from fsharding.program.regions import compile_regions
from fsharding.program.trace import GlobalProgram

BACKENDS = ("eager", "inductor", "cudagraph")


class Lowered:
    """A program that was planned but not run: text, collectives, memory and cost, for any mesh, without processes."""

    def __init__(
        self,
        program: GlobalProgram,
        local: LocalProgram,
        result: dict,
        donated: list[int],
        call: Call,
        bind: Callable,
        backend: str = "eager",
    ):
        self.program, self.local, self.result, self.donated = program, local, result, donated
        self.backend = backend
        self.name, self.treedef, self.static, self.bind = call.name, call.treedef, call.static, bind

    def as_text(self) -> str:
        """The local program of a rank, the same on every rank; collectives are marked."""
        return explain.local_text(self.local)

    def global_text(self) -> str:
        """The traced single-device program."""
        return explain.graph_text(self.program.graph.graph, "global program")

    def collectives(self) -> list[explain.Collective]:
        """All collectives, in order; see :class:`Collective`."""
        return explain.collectives(self.local)

    def memory_analysis(self) -> dict[str, int]:
        """Bytes on one rank by category; see ``explain.memory_analysis``."""
        return explain.memory_analysis(self.local)

    def cost_analysis(self) -> dict[str, float]:
        """FLOPs of a rank and of the whole, bytes on the wire; see ``explain.cost_analysis``."""
        return explain.cost_analysis(self.local, self.program.graph.graph)

    def fingerprint(self) -> str:
        """A hash of the local program's text without source lines: equal on all ranks."""
        lines = [line.split("  # ")[0] for line in self.as_text().splitlines()]
        return hashlib.sha1("\n".join([*lines, str(self.local.outputs)]).encode()).hexdigest()

    def compile(self) -> Program:
        """Make it callable: compares the program over the ranks, creates its process groups.

        Raises:
            ShardingError: the ranks traced different programs; or the mesh is fake.
        """
        from fsharding.program.simulated import SimulatedProgram  # a Program itself

        mesh = self.local.mesh
        if mesh.world:
            worlds.refuse_closed(mesh.world, repr(mesh))
            return SimulatedProgram(self)
        if mesh.fake and mesh.size > 1:
            raise ShardingError(
                "the mesh is fake: its programs can be lowered and read, not run. Make it with `fake=False`."
            )
        # As long as a collective would wait: a rank may come late, from loading its data.
        text = f"{self.name} {self.fingerprint()} {_digest(self.program.constants)}"
        texts = agree(mesh, "program", text, timeout_s=mesh.timeout_s)
        if len(texts) > 1:
            listed = "; ".join(f"{text} on ranks {ranks[:8]}" for text, ranks in texts.items())
            raise ShardingError(
                f"the ranks traced different programs for `{self.name}`: {listed}. Call it with the same shapes, "
                "dtypes, specs and settings on every rank, and do not branch on the rank inside."
            )
        return self.ready()

    def ready(self) -> Program:
        """What runs it, on this rank."""
        return Program(self)


def _digest(tensors) -> str:
    """A hash of the values that a function closes over: they, too, must be the same on every rank."""
    found = hashlib.sha1()
    for x in tensors:
        if isinstance(x, DTensor):  # each rank has its own block; where it lies is in the program's text
            continue
        found.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return found.hexdigest()[:12]


def runner_of(graph: fx.Graph, mesh: Mesh, backend: str, spend: bool = False) -> Runner:
    """A rank's graph as a function, op by op or with compiled regions; ``spend`` as in :class:`Runner`."""
    if backend != "eager":
        copied, copies = fx.Graph(), {}
        copied.output(copied.graph_copy(graph, copies))
        compile_regions(copied)
        graph = copied
    return Runner(graph, mesh, spend)


def _runner(lowered: Lowered, local: LocalProgram) -> Callable:
    """The back end's way to run a rank's program: a function from input tensors to output tensors."""
    if lowered.backend == "cudagraph":
        refuse_host_sync(local.graph, local.mesh.device)
    run = runner_of(local.graph, local.mesh, lowered.backend)
    if lowered.backend != "cudagraph":
        return run
    owner = memory_of(local.graph)
    results = list(local.graph.nodes)[-1].args[0]
    sizes = [n.meta["val"].nbytes for n in local.graph.nodes if n.op == "placeholder"]
    # Donated memory is written by the graph itself; other large stored values are read where they are, and small ones
    # copied, wherever each call brings them.
    fixed = [
        i in lowered.donated or (given.kind == "stored" and size > 2**20)
        for i, (given, size) in enumerate(zip(local.inputs, sizes, strict=True))
    ]
    return Captured(run, fixed, [owner[n].op == "placeholder" for n in results])


class Program:
    """A compiled program: ``program(*args)`` runs it on arguments of the shapes and specs that it was lowered for."""

    def __init__(self, lowered: Lowered, local: LocalProgram | None = None):
        self.lowered, self.local = lowered, local or lowered.local
        mesh = self.local.mesh
        for alias in aliases(lowered.local.graph):
            axes, _, channel = alias.partition("/")[2].partition("#")
            mesh.register_alias(axes.split(","), channel)
        set_device(self.local.graph, mesh.device)
        self.runner = _runner(lowered, self.local)
        coordinates = mesh.coordinates()
        self._cuts = [
            local_slices(i.shape, i.dims, mesh.shape, coordinates) if any(i.dims) else None for i in self.local.inputs
        ]
        self._pads = [_pad_of(i, mesh) for i in self.local.inputs]
        self._own = [
            _block_shape(shape, dims, mesh, coordinates) if kind == "stored" else None
            for kind, dims, shape in self.local.outputs
        ]
        self._templates: dict[int, DTensor] = {}
        self._addresses: tuple = ()

    def __call__(self, *args, **kwargs):
        """Run on arguments of the same structure, shapes, dtypes and specs. Raises ShardingError for any others."""
        call = self.lowered.bind(args, kwargs)
        check_leaves(call)
        refuse_gradients(call, "a compiled program gives results only; call the sharded function itself for `backward`")
        if call.treedef != self.lowered.treedef or call.static != self.lowered.static:
            raise ShardingError(
                f"the compiled program of `{self.lowered.name}` got arguments of another structure or other static "
                "arguments than it was lowered for: lower it again, or call the sharded function."
            )
        wide = is_wide(call.leaves)
        for path, x, spec in zip(call.paths, call.leaves, self.local.inputs, strict=False):
            shape, dtype = abstract(path, x, wide)
            dims = dims_of(x) if isinstance(x, DTensor) else spec.dims
            if (shape, dtype, dims) != (spec.shape, spec.dtype, spec.dims):
                raise ShardingError(
                    f"{path} is {describe(x)}, but the program of `{self.lowered.name}` was lowered for {spec.dtype} "
                    f"{spec.shape} over {spec.dims}: lower it again, or call the sharded function."
                )
        return self.checked(call)

    def checked(self, call: Call) -> Any:
        """Run on a call's leaves, unless a donated one shares memory with another; looked up once for each set of
        addresses."""
        if self.lowered.donated:
            addresses = tuple(compat.address_of(x) for x in call.leaves)
            if addresses != self._addresses:
                check_memory(call, self.lowered.donated, self.lowered.program.constants)
                self._addresses = addresses
        return self.run(call.leaves)

    def run(self, leaves: Sequence[Any]) -> Any:
        out = self.runner(self.padded(self.blocks(leaves)))
        if self.lowered.donated:
            self._retire(leaves)
        return self.tree(self.wrap(out))

    def blocks(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """This rank's blocks of the arguments, then of the closed-over tensors."""
        device = self.local.mesh.device
        local = []
        for x, cut, spec in zip(leaves, self._cuts, self.local.inputs, strict=False):
            if isinstance(x, DTensor):
                x = compat.local_of(x)
            elif isinstance(x, torch.Tensor):  # a global value: this rank's block of it
                x = (x[cut] if cut else x).to(device)
            else:
                x = torch.tensor(x, dtype=spec.dtype, device=device)
            local.append(x)
        return local + [self._constant(c, device) for c in self.lowered.program.constants]

    def padded(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [F.pad(x, pad) if pad else x for x, pad in zip(blocks, self._pads, strict=True)]

    @staticmethod
    def _constant(x, device):
        if isinstance(x, DTensor):
            check_alive("a tensor that the function closes over", x)
            x = compat.local_of(x)
        return x if x.device == device else x.to(device)

    def wrap(self, out: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's blocks of the results as the caller gets them."""
        mesh = self.local.mesh
        wrapped = []
        for i, (x, (kind, dims, shape), own) in enumerate(zip(out, self.local.outputs, self._own, strict=True)):
            if kind == "whole":
                wrapped.append(x.detach())  # a new object, should it be the (retired) input itself
                continue
            if own is not None and tuple(x.shape) != own:
                x = x[tuple(slice(0, n) for n in own)].contiguous()
            if i not in self._templates:
                # On the meta device, so that no result is kept alive.
                self._templates[i] = wrap_local(x.to("meta"), mesh, dims, shape)
            wrapped.append(compat.wrapped_like(x.contiguous(), self._templates[i]))
        return wrapped

    def tree(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The function's result around its tensors."""
        result, it = self.lowered.result, iter(tensors)
        count = len(tensors) + len(result["fixed"])
        leaves = [result["fixed"][i] if i in result["fixed"] else next(it) for i in range(count)]
        return trees.unflatten(result["treedef"], leaves)

    def _retire(self, leaves) -> None:
        """Donated leaves hold no value any more: a later use fails instead of reading what took their place."""
        for i in self.lowered.donated:
            x = leaves[i]
            if not isinstance(x, torch.Tensor):
                continue
            x._fsharding_donated = f"`{self.lowered.name}`"
            if isinstance(x, DTensor):
                compat.retire(x)


def _pad_of(spec: Input, mesh: Mesh) -> list[int]:
    """``F.pad`` widths from this rank's block to the padded block, empty if it is full."""
    if spec.kind != "stored":
        return []
    own = _block_shape(spec.shape, spec.dims, mesh, mesh.coordinates())
    widths = [(0, b - n) for n, b in zip(own, padded_shape(spec.shape, spec.dims, mesh.shape), strict=True)]
    return [w for pair in reversed(widths) for w in pair] if any(b for _, b in widths) else []


def _block_shape(shape, dims, mesh, coordinates) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in local_slices(shape, dims, mesh.shape, coordinates))
