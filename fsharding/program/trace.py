"""From a user's function to one graph of core ops: the *global program*, independent of device and mesh.

Two phases. First the function runs once on fake CPU tensors under ``make_fx`` with ``torch.func`` transforms and all;
composites are rewritten (``composites.py``), closed-over tensors become inputs, every node notes the user's line and
its phase. Then the *graph* is functionalised and decomposed to a small core. (Functionalising the function itself fails
on any ``autograd.Function``.)
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
import torch.fx.traceback as fx_traceback
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from fsharding import _compat as compat
from fsharding import oplib
from fsharding.comm.varying import PLACED, conform, is_placed, mark_regions, region
from fsharding.errors import ShardingError
from fsharding.program import decompositions
from fsharding.program.bundle import like_raw, likes, unbundle
from fsharding.program.composites import Rewrite
from fsharding.program.graphs import drop_dead, replace_uses
from fsharding.program.remat import recompute
from fsharding.program.source import annotate, error_line, line_of, phase_of
from fsharding.program.stamp import inline, marks

A = torch.ops.aten


@dataclass
class GlobalProgram:
    """A traced function.

    Attributes:
        graph: placeholders are the flat inputs, then ``constants``; one output, a list.
        constants: the tensors that the function closes over, read at each call.
        num_inputs: how many of the placeholders are inputs.
    """

    graph: fx.GraphModule
    constants: list[torch.Tensor]
    num_inputs: int
    watched: bool = False  # does a closed-over tensor require grad?


# Kernels that are kept whole: they matter for speed, and their rules are as simple as those of their parts.
_KEEP = """unbind sum mean _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data silu silu_backward
gelu gelu_backward
    native_layer_norm native_layer_norm_backward embedding_dense_backward t split split_with_sizes addmm _to_copy
    baddbmm stack transpose sigmoid_backward tanh_backward reflection_pad1d reflection_pad2d reflection_pad3d
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d replication_pad2d
    replication_pad3d""".split()


# Identities once nothing is mutated.
_IDENTITIES = (A.lift_fresh_copy.default, A.lift_fresh.default, A.alias.default, A.detach.default)


@functools.cache
def _table() -> dict:
    table = dict(core_aten_decompositions())
    table.update(get_decompositions([A.linalg_vector_norm, A.native_group_norm, A.dist, A.addmv]))
    table.update(decompositions.TABLE)
    for op in list(table):
        name = op.name().split("::")[-1].split(".")[0] if hasattr(op, "name") else str(op)
        # The decomposed flash forward would hand its backward something that is no logsumexp: a wrong gradient.
        if name in _KEEP or "scaled_dot" in name:
            del table[op]
    return table


def decomposed() -> list[str]:
    """Names of the ops that are rewritten into others when a function is traced."""
    ops = [op for op in _table() if isinstance(op, torch._ops.OpOverload) and not op._schema.is_mutable]
    return sorted({op.name() for op in ops if op.namespace == "aten"})


class _Constants:
    """Closed-over tensors, each recorded once as an attribute of the traced graph."""

    def __init__(self, fakes: torch._subclasses.FakeTensorMode):
        self.fakes, self.seen = fakes, {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if compat.is_fake(x) or compat.is_wrapped(x) or compat.current_tracer() is None:
            return x
        placed = isinstance(x, torch.distributed.tensor.DTensor)
        if placed and region() is None:
            raise ShardingError(
                f"the function closes over a sharded tensor {tuple(x.shape)}: pass it as an argument (closed-over "
                "tensors are constants that every rank holds in full)."
            )
        if id(x) not in self.seen:
            with compat.no_modes():
                real = x if placed else x.detach()
                with self.fakes:
                    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            compat.track_constant(fake, real, f"{PLACED if placed else 'closed_over_'}{len(self.seen)}")
            self.seen[id(x)] = (fake, x)  # keeps x alive: its id stands for it
        return self.seen[id(x)][0]


def trace(
    fn: Callable,
    inputs: Sequence[torch.Tensor],
    on_gradient: Callable | None = None,
    inner: Callable | None = None,
) -> GlobalProgram:
    """Trace ``fn(*flat tensors) -> list of tensors``.

    Args:
        inputs: tensors (of any device, or meta) that give shapes and dtypes; their values are not read.
        on_gradient: called with each (gradient, input) that a transform computes; may raise.
        inner: for a trace within a trace: a tensor of the outer one -> what stands for it here, or None.

    Raises:
        ShardingError: data-dependent control flow or sizes, host reads, random numbers; with the user's line.
    """
    fakes = compat.new_fake_mode()
    with fakes:
        args = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in inputs]
    constants_of = _Constants(fakes)

    def lift(x):
        known = inner(x) if inner is not None else None
        return constants_of(x) if known is None else known

    def at_rest(grads, xs):
        if not marks():
            return grads
        if on_gradient is not None:
            for g, x in zip(grads, xs, strict=True):
                on_gradient(g, x)
        if region() is None:
            return likes(grads, xs)
        return tuple(likes([conform(g, x, "a gradient")], [x])[0] for g, x in zip(grads, xs, strict=True))

    def started(g, y):
        return conform(g, y, "a cotangent that a pull-back was given")

    def run(*xs):
        annotate(compat.current_tracer())
        with compat.watch_gradients(at_rest, started), oplib.lifting(lift), Rewrite(lift):
            return fn(*xs)

    with _readable(), warnings.catch_warnings(), compat.without_saved_hooks():
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
        traced = make_fx(run, decomposition_table=_table(), tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
        inline(traced.graph)
        for node in traced.graph.nodes:
            _refuse_host_read(node)
        _refuse_hidden_mutation(traced)
        constants = _lift_attributes(sweep(traced))
        _refuse_mutated_inputs(traced)
        program = _functionalise(traced, args, constants, fakes) if any(map(_mutates, traced.graph.nodes)) else traced
    finished = _finish(program)
    holders = [n for n in finished.graph.nodes if n.op == "placeholder"]
    mark_regions(finished.graph, [n for n in holders[len(args) :] if not is_placed(n)])
    watched = any(x.requires_grad for _, x in constants_of.seen.values())
    return GlobalProgram(finished, constants, len(args), watched)


def _refuse_host_read(node: fx.Node) -> None:
    if node.target in (A._local_scalar_dense.default, A.item.default, A.equal.default, A.is_nonzero.default):
        raise ShardingError(
            f"{line_of(node)}: `{node.target}` reads a tensor's value on the host, inside a function that is traced "
            "for all ranks. Keep it a tensor, return it, or compute it before the call."
        )


class _readable:
    """Turns what tracing raises into an error that names the user's line."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, tb):
        if error is None or isinstance(error, ShardingError):
            return False
        name = kind.__name__
        data_dependent = isinstance(error, compat.FAKE_ERRORS) or "DataDependent" in name
        if data_dependent:
            raise ShardingError(
                f"{error_line(error)}: the shape of a result, or which way Python goes, depends on the data here "
                f"({name}: {str(error).splitlines()[0]}). A sharded function is traced once: use `torch.where`, a "
                "fixed size, or compute this before the call."
            ) from error
        if (line := error_line(error)) is not None:
            error.add_note(f"while `fs.shard` traced the function, at {line}")
        return False


def _functionalise(traced: fx.GraphModule, args, constants, fakes) -> fx.GraphModule:
    """The same graph without in-place ops and with nothing that depends on them being views."""
    with fakes:
        fake_constants = [torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device="cpu") for c in constants]
    run = torch.func.functionalize(lambda *xs: fx.Interpreter(traced).run(*xs))
    with fx_traceback.preserve_node_meta(), torch.no_grad():
        return make_fx(run, decomposition_table=_table(), tracing_mode="fake")(*args, *fake_constants)


def _finish(gm: fx.GraphModule) -> fx.GraphModule:
    unbundle(gm.graph)
    same: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.target in _IDENTITIES:
            same[node] = same.get(node.args[0], node.args[0])
    replace_uses(same)
    sweep(gm)
    for node in filter(_mutates, gm.graph.nodes):
        raise ShardingError(
            f"{line_of(node)}: `{_short_name(node)}` writes in place in a way that cannot be traced. Use the op that "
            "returns a new value."
        )
    recompute(gm.graph)
    sweep(gm)
    _mark_updates(gm)
    return gm


def _lift_attributes(gm: fx.GraphModule) -> list[torch.Tensor]:
    graph, found = gm.graph, {}
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        if node.target not in found:
            with graph.inserting_before(first):
                found[node.target] = graph.placeholder("const_" + node.target.lstrip("_"))
            x = getattr(gm, node.target)
            found[node.target].meta["val"] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        node.replace_all_uses_with(found[node.target])
        graph.erase_node(node)
    return [getattr(gm, name) for name in found]


def _refuse_hidden_mutation(gm: fx.GraphModule) -> None:
    """``batch_norm`` with running statistics mutates without saying so in its schema: it would be silently lost."""
    for node in gm.graph.nodes:
        name = str(node.target)
        if "batch_norm" in name and any(isinstance(a, fx.Node) for a in node.args[3:5]):
            raise ShardingError(
                f"{line_of(node)}: `batch_norm` with running statistics changes its arguments. Compute the statistics "
                "with `mean` and `var` and return the new running values from the function."
            )


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _refuse_mutated_inputs(gm: fx.GraphModule) -> None:
    """An argument, or a view of one, that is written in place."""
    for node in gm.graph.nodes:
        for base in _written(node) if _mutates(node) else ():
            while is_view(base):
                base = base.args[0]
            if base.op == "placeholder":
                raise ShardingError(
                    f"{line_of(node)}: the function changes one of its arguments or a closed-over tensor in place "
                    f"(`{_short_name(node)}`). Return the new value instead."
                )


def _written(node: fx.Node) -> list[fx.Node]:
    """The operands that an op writes, by its schema."""
    found = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, fx.Node)]
    return found


def is_view(node: fx.Node) -> bool:
    """May the result show the memory of the first operand? Views, and ops that return what they wrote, say so in their
    schema."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    schema = getattr(node.target, "_schema", None)
    return node.target is operator.getitem or (
        schema is not None and any(r.alias_info is not None for r in schema.returns)
    )


def _short_name(node: fx.Node) -> str:
    return node.target.name().split("::")[-1].split(".")[0] if hasattr(node.target, "name") else ""


def _mark_updates(gm: fx.GraphModule) -> None:
    """Phase "update": what is computed from gradients once they are at rest."""
    after = set()
    for node in gm.graph.nodes:
        if node.target is like_raw or any(a in after for a in node.all_input_nodes):
            after.add(node)
            if node.target is not like_raw and phase_of(node) == "forward":
                node.meta.setdefault("custom", {})["phase"] = "update"
    for node in reversed(list(gm.graph.nodes)):  # and what serves nothing but that, such as the decay of a moment
        users = [phase_of(u) for u in node.users if u.op != "output"]
        if node.op == "call_function" and phase_of(node) == "forward" and users and set(users) == {"update"}:
            node.meta.setdefault("custom", {})["phase"] = "update"


def sweep(gm: fx.GraphModule) -> fx.GraphModule:
    """Drop every node that no output needs, except those that write."""
    drop_dead(gm.graph, keep=_mutates)
    return gm
