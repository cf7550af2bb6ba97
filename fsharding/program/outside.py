"""``loss = sharded(params, batch); loss.backward()``: gradients of a sharded function from outside.

The function and its pull-back are traced as one joint program, partitioned and scheduled once, then cut in two
(``split.py``). The forward graph runs in the forward of one ``autograd.Function`` over the leaves that require grad,
the backward graph in its backward: PyTorch's engine, hooks, accumulation and optimizers see DTensor leaves and DTensor
gradients of the same placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate

from fsharding import _compat as compat
from fsharding.annotate.mesh import Mesh
from fsharding.annotate.place import check_alive, device_get, dims_of, reshard
from fsharding.annotate.spec import Dims, P, local_slices
from fsharding.comm.storage import real_axes
from fsharding.errors import ShardingError
from fsharding.program.call import Call
from fsharding.program.donate import write_back
from fsharding.program.execute import set_device
from fsharding.program.lowered import Lowered, Program, runner_of
from fsharding.program.partition import Input, LocalProgram, same_dims
from fsharding.program.rules_outside import cotangent_raw
from fsharding.program.schedule import Schedule, schedule
from fsharding.program.split import Halves, split, stamp
from fsharding.program.trace import GlobalProgram

Reach = list[set[int]]  # per result, which of the leaves that require grad it depends on, by their number among those


# ---- which calls -----------------------------------------------------------------------------------------------------
def wanted(call: Call) -> tuple[int, ...]:
    """The leaves with respect to which autograd wants gradients of this call, by number."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(i for i, x in enumerate(call.leaves) if isinstance(x, torch.Tensor) and x.requires_grad)


def check(call: Call, leaves: Sequence[int], donated: set[int], backend: str) -> None:
    """Raise ShardingError where gradients from outside are asked for and not available. ``donated`` are arguments."""
    first, inside = call.paths[leaves[0]], "Use `fs.shard(fs.value_and_grad(loss), mesh)`, or call it"
    for i in leaves:
        if call.argnums[i] in donated:
            raise ShardingError(
                f"{call.paths[i]} requires grad and is donated: its gradient would be that of a value that is gone. "
                "Leave its argument out of `donate_argnums`, or call the function under `torch.no_grad()`."
            )
    if backend == "cudagraph":
        raise ShardingError(
            f"{first} requires grad, and backend='cudagraph' captures a whole step: gradients from outside need "
            f"'eager' or 'inductor'. {inside} under `torch.no_grad()`."
        )
    if call.mesh.world:
        raise ShardingError(
            f"{first} requires grad: gradients from outside are not simulated, because autograd would add up the "
            f"blocks of one rank only. {inside} under `torch.no_grad()`."
        )


# ---- the joint program -----------------------------------------------------------------------------------------------
def joint(flat: Callable, leaves: Sequence[int], reach: Reach) -> Callable:
    """``flat(*tensors) -> list of tensors`` and its pull-back as one function: the results, then the gradients of those
    leaves that any result depends on. Fills ``reach``."""

    def run(*xs):
        def inner(*ys):
            full = list(xs)
            for i, y in zip(leaves, ys, strict=True):
                full[i] = y
            out = flat(*full)
            reach[:] = _reach(out, ys)
            live = tuple(x for x, on in zip(out, reach, strict=True) if on)
            return live or (ys[0],), tuple(x for x, on in zip(out, reach, strict=True) if not on)

        live, pull, rest = torch.func.vjp(inner, *(xs[i] for i in leaves), has_aux=True)
        if not any(reach):
            return list(rest)
        live, rest = iter(live), iter(rest)
        out = [next(live) if on else next(rest) for on in reach]
        with torch.no_grad():  # it is not differentiated again: backward kernels stay whole
            grads = pull(tuple(cotangent_raw(x, i) for i, x in enumerate(out) if reach[i]))
        reached = set().union(*reach)
        return [*out, *(g for k, g in enumerate(grads) if k in reached)]

    return run


def _reach(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> Reach:
    """Which results autograd connects with which leaves: it, too, gives no gradient to a leaf that nothing reads."""
    edge = torch.autograd.graph.get_gradient_edge
    known: dict[Any, int] = {edge(y).node: 1 << k for k, y in enumerate(leaves)}
    roots = [edge(x).node if x.requires_grad else None for x in results]
    stack = [r for r in roots if r is not None]
    while stack:
        node = stack[-1]
        below = [n for n, _ in node.next_functions if n is not None]
        missing = [n for n in below if n not in known]
        if node not in known and missing:
            stack += missing
            continue
        if node not in known:
            known[node] = 0
            for n in below:
                known[node] |= known[n]
        stack.pop()
    bits = [0 if r is None else known[r] for r in roots]
    return [{k for k in range(len(leaves)) if b >> k & 1} for b in bits]


def with_gradients(out_dims: list | None, call: Call, inputs: Sequence[Input], leaves: Sequence[int], reach: Reach):
    """Where the outputs of a joint program live: a gradient as its leaf does, whole for a plain tensor."""
    grads = []
    for i in (leaves[k] for k in sorted(set().union(*reach))):
        plain = isinstance(call.leaves[i], torch.Tensor) and not isinstance(call.leaves[i], DTensor)
        grads.append(((),) * len(inputs[i].shape) if plain else inputs[i].dims)
    return [*(out_dims or [None] * len(reach)), *grads]


def refuse_watched(program: GlobalProgram, name: str) -> None:
    """A closed-over tensor is a constant of the program: it would silently get no gradient."""
    if program.watched:
        raise ShardingError(
            f"`{name}` closes over a tensor that requires grad, which would get no gradient: pass it as an argument, "
            "or `.detach()` it."
        )


def halved(program: LocalProgram, reach: Reach, plan: Schedule) -> Halves:
    """Schedule a joint program, in place, and cut it."""
    results = len(reach)
    stamp(program.graph, results)
    schedule(program, plan, apart=True)
    write_back(program, (), ())  # nothing is donated: only results that would share memory are copied
    return split(program, results, sum(map(bool, reach)))


class Joint(Lowered):
    """A joint program, planned and cut in two.

    Attributes:
        halves: the forward and the backward graph.
        leaves: numbers of the leaves that require grad.
        reach: per result, on which of them it depends.
    """

    def __init__(self, *args, halves: Halves, leaves: Sequence[int], reach: Reach):
        super().__init__(*args)
        self.halves, self.leaves, self.reach = halves, tuple(leaves), reach

    def ready(self) -> Program:
        return Outside(self)


# ---- running ---------------------------------------------------------------------------------------------------------
class Outside(Program):
    """A joint program that runs: calls give results that ``backward`` can be called on."""

    def __init__(self, lowered: Joint):
        local, halves, count = lowered.local, lowered.halves, len(lowered.reach)
        self.mesh, self.cotangents = local.mesh, local.inputs[len(local.inputs) - sum(map(bool, lowered.reach)) :]
        self.gradients = local.outputs[count:]
        given = local.inputs[: len(local.inputs) - len(self.cotangents)]
        nodes = list(list(halves.forward.nodes)[-1].args[0])[:count]
        super().__init__(lowered, LocalProgram(halves.forward, given, local.outputs[:count], local.mesh, nodes))
        set_device(halves.backward, local.mesh.device)
        self.pull = runner_of(halves.backward, local.mesh, lowered.backend, spend=True)
        self._shapes = [tuple(n.meta["val"].shape) for n in _holders(halves.backward)[-len(self.cotangents) :]]
        self._leaves: list[Any] = []  # what a gradient of each is to look like

    def run(self, leaves: Sequence[Any]) -> Any:
        out = _Apply.apply(self, leaves, *(leaves[i] for i in self.lowered.leaves))
        if self.lowered.donated:
            self._retire(leaves)
        return self.tree(list(out))

    def forward(self, leaves: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
        """Results, and what is saved: tensors and numbers."""
        blocks, halves = self.blocks(leaves), self.lowered.halves
        if not self._leaves:
            self._leaves = [_template(leaves[i]) for i in self.lowered.leaves]
        out = self.runner(self.padded(blocks))
        count, tensors = len(self.lowered.reach), len(halves.tensors)
        saved = [*(blocks[i] for i in halves.inputs), *out[count : count + tensors]]
        return self.wrap(out[:count]), saved, out[count + tensors :]

    def versions(self, leaves: Sequence[Any]) -> list[tuple[str, DTensor, int]]:
        """The DTensors that ``backward`` will read: an op on a DTensor does not tell its block that it changed."""
        read = [i for i in self.lowered.halves.inputs if i < len(leaves) and i not in self.lowered.donated]
        named = [(self.local.inputs[i].name, leaves[i]) for i in read if isinstance(leaves[i], DTensor)]
        return [(path, x, x._version) for path, x in named if not x.is_inference()]

    def check_versions(self, read: list[tuple[str, DTensor, int]]) -> None:
        for path, x, version in read:
            check_alive(path, x)
            if x._version != version:
                raise ShardingError(
                    f"{path} was changed in place between the call of `{self.lowered.name}` and its `backward`, which "
                    "reads it. Call `backward` before the optimizer steps."
                )

    def backward(self, saved: list, numbers: Sequence[int], cotangents: Sequence[torch.Tensor | None]) -> list:
        """The gradient of each leaf that requires grad, None where no cotangent reaches it. Empties ``saved``."""
        known = [g is not None for g in cotangents]
        reached = set().union(*(on for on, k in zip(self.lowered.reach, known, strict=True) if k))
        grads: list[Any] = [None] * len(self.lowered.leaves)
        if not reached:
            return grads
        for j, i in enumerate(self.lowered.halves.inputs):
            saved[j] = F.pad(saved[j], self._pads[i]) if self._pads[i] else saved[j]
        given = [g for g, on in zip(cotangents, self.lowered.reach, strict=True) if on]
        saved += numbers
        saved += [self._incoming(*row) for row in zip(given, self.cotangents, self._shapes, strict=True)]
        out = self.pull(saved)
        for k, x, spec in zip(sorted(set().union(*self.lowered.reach)), out, self.gradients, strict=True):
            if k in reached:
                grads[k] = self._gradient(x, spec, self._leaves[k])
        return grads

    def _incoming(self, g: torch.Tensor | None, spec: Input, shape: tuple[int, ...]) -> torch.Tensor:
        """A cotangent as the backward graph takes it: this rank's padded block."""
        if g is None:
            return torch.zeros(shape, dtype=spec.dtype, device=self.mesh.device)
        where = local_slices(spec.shape, spec.dims, self.mesh.shape, self.mesh.coordinates())
        if isinstance(g, DTensor):
            block = _block(g, self.mesh, spec.dims)
        else:
            block = g.detach().to(self.mesh.device)[where]
        block = block.contiguous()  # an expanded one, such as that of a sum
        if tuple(block.shape) == shape:
            return block
        out = block.new_zeros(shape)
        out[tuple(slice(0, n) for n in block.shape)] = block
        return out

    def _gradient(self, x: torch.Tensor, spec: tuple[str, Dims, tuple[int, ...]], leaf: torch.Tensor) -> torch.Tensor:
        _, dims, shape = spec
        where = local_slices(shape, dims, self.mesh.shape, self.mesh.coordinates())
        x = x[tuple(slice(0, s.stop - s.start) for s in where)].contiguous()
        return compat.wrapped_like(x, leaf) if isinstance(leaf, DTensor) else x.to(leaf.device)


def _holders(graph) -> list:
    return [n for n in graph.nodes if n.op == "placeholder"]


def _template(leaf: torch.Tensor) -> torch.Tensor:
    """What a gradient of ``leaf`` looks like, without keeping the leaf alive."""
    if isinstance(leaf, DTensor):
        return compat.wrapped_like(torch.empty_like(compat.local_of(leaf), device="meta"), leaf)
    return torch.empty(0, dtype=leaf.dtype, device=leaf.device)


def _block(g: DTensor, mesh: Mesh, dims: Dims) -> torch.Tensor:
    """This rank's block of a cotangent that DTensor's own autograd made, whatever placements it chose."""
    pending = [name for name, p in zip(mesh.axis_names, g.placements, strict=True) if isinstance(p, Partial)]
    if pending:
        if any(isinstance(p, Partial) and p.reduce_op != "sum" for p in g.placements):
            raise ShardingError(f"the cotangent of a result is pending in a way that is no sum: {g.placements}.")
        local = compat.local_of(g).clone(memory_format=torch.contiguous_format)
        if axes := real_axes(mesh, mesh.sort_axes(pending)):
            dist.all_reduce(local, group=mesh.group(axes))
        whole = [Replicate() if isinstance(p, Partial) else p for p in g.placements]
        stride = torch.empty(g.shape, device="meta").stride()
        g = DTensor.from_local(local, g.device_mesh, whole, run_check=False, shape=g.shape, stride=stride)
    if not any(dims):
        return device_get(g)
    if not same_dims(mesh, dims_of(g), dims):
        g = reshard(g, mesh, P(*(axes or None for axes in dims)))
    return compat.local_of(g)


class _Apply(torch.autograd.Function):
    """One sharded function, as autograd sees it."""

    @staticmethod
    def forward(ctx, program: Outside, leaves: Sequence[Any], *_):
        ctx.set_materialize_grads(False)
        out, saved, ctx.numbers = program.forward(leaves)
        ctx.program, ctx.read = program, program.versions(leaves)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(x for x, on in zip(out, program.lowered.reach, strict=True) if not on))
        return tuple(out)

    @staticmethod
    def backward(ctx, *cotangents):
        again, program = torch.is_grad_enabled(), ctx.program  # create_graph=True
        with torch.no_grad():
            saved = list(ctx.saved_tensors)
            program.check_versions(ctx.read)
            if not compat.release_saved(ctx):
                ctx.read = ()
            grads = program.backward(saved, ctx.numbers, cotangents)
        if again:
            grads = [None if g is None else _Once.apply(program.lowered.name, g.requires_grad_()) for g in grads]
        return None, None, *grads


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated: says so, where PyTorch would take it for a constant."""

    @staticmethod
    def forward(ctx, name: str, g: torch.Tensor):
        ctx.name = name
        return g.detach()

    @staticmethod
    def backward(ctx, _):
        raise ShardingError(
            f"a second derivative of `{ctx.name}` from outside of the sharded function. Put the inner gradient inside: "
            "`fs.shard` a function that calls `fs.grad`."
        )
