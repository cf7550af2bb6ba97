"""Programs as text and numbers: listings, collectives, memory and cost. Needs no processes and no data."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from fsharding.program.cost import flops, workspace
from fsharding.program.donate import memory_of
from fsharding.program.partition import LocalProgram
from fsharding.program.remat import offload_raw
from fsharding.program.source import line_of, phase_of

A = torch.ops.aten
C = torch.ops._c10d_functional
_SHORT = {
    "float32": "f32",
    "float64": "f64",
    "bfloat16": "bf16",
    "float16": "f16",
    "int64": "i64",
    "int32": "i32",
    "bool": "b1",
}


@dataclass(frozen=True)
class Collective:
    """One collective of a local program.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce or all_to_all; fallback for the gather of an op without a rule.
        axes: mesh axes of its group, in mesh order.
        bytes: of the larger side of the operation on one rank (the gathered result, the tensor that is scattered or
            reduced, the rows exchanged under balanced routing).
        dtype: what travels.
        phase: forward, backward or update.
        param: key path of the leaf that it serves, or None.
        source: the user's line, or None.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    dtype: torch.dtype
    phase: str
    param: str | None
    source: str | None


def collectives(program: LocalProgram) -> list[Collective]:
    """All collectives in program order; those that travel in one call are one entry each."""
    found = []
    for node in program.graph.nodes:
        note = node.meta.get("custom", {})
        if "collective" not in note:
            continue
        kind = "fallback" if note.get("fallback") else note["collective"]
        for member in note.get("members") or [_member(node, note)]:
            entry = Collective(
                kind, tuple(note["axes"]), member["bytes"], _dtype(node), note["phase"], member["param"], member["line"]
            )
            found.append(entry)
    return found


def _member(node: fx.Node, note: dict) -> dict:
    tensors = [node.meta["val"], *(a.meta["val"] for a in node.all_input_nodes)]
    sizes = [num_bytes(t) for t in tensors if isinstance(t, torch.Tensor)]
    return {"param": note.get("param"), "bytes": max(sizes), "line": note["line"]}


def _dtype(node: fx.Node) -> torch.dtype:
    val = node.meta["val"]
    return (val[0] if isinstance(val, tuple | list) else val).dtype


def num_bytes(x: torch.Tensor) -> int:
    return x.numel() * x.dtype.itemsize


# ---- text ------------------------------------------------------------------------------------------------------------
def _tensor_text(val) -> str:
    if isinstance(val, torch.Tensor):
        name = str(val.dtype).removeprefix("torch.")
        return f"{_SHORT.get(name, name)}[{', '.join(str(n) for n in val.shape)}]"
    if isinstance(val, tuple | list):
        return f"({', '.join(_tensor_text(v) for v in val)})"
    return "int" if isinstance(val, int) else type(val).__name__


def _op_text(target) -> str:
    if target is operator.getitem:
        return "item"
    name = target.name() if hasattr(target, "name") else str(target)
    return (
        name.replace("_c10d_functional::", "comm.")
        .replace("fsharding::", "fs.")
        .replace("aten::", "")
        .removesuffix(".default")
    )


def _arg_text(value) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_arg_text(v) for v in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _short_line(line: str | None) -> str:
    return line.rsplit("/", 1)[-1] if line else ""


def graph_text(graph: fx.Graph, header: str, specs: dict[str, str] | None = None) -> str:
    """One line a node: name, dtype and shape, op and arguments, phase and source; collectives stand out."""
    lines, phase = [header], None
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_arg_text(node.args[0])}")
            continue
        note = node.meta.get("custom", {})
        if node.op == "placeholder":
            spec = (specs or {}).get(node.name, "")
            lines.append(f"  %{node.name}: {_tensor_text(node.meta['val'])}{spec} = input")
            continue
        if phase_of(node) != phase:
            phase = phase_of(node)
            lines.append(f"{phase}:")
        args = ", ".join([_arg_text(a) for a in node.args] + [f"{k}={_arg_text(v)}" for k, v in node.kwargs.items()])
        mark = ""
        if "collective" in note:
            mark = f" <== {note['collective']} over ({', '.join(note['axes'])})"
            params = [m["param"] for m in note.get("members", ())] or [note.get("param")]
            mark += f" for {', '.join(map(str, params))}" if params[0] else ""
        source = f"  # {_short_line(line_of(node))}" if line_of(node) else ""
        lines.append(
            f"  %{node.name}: {_tensor_text(node.meta['val'])} = {_op_text(node.target)}({args}){mark}{source}"
        )
    return "\n".join(lines)


def dims_text(dims) -> str:
    parts = [f"@({','.join(axes)})" if axes else "whole" for axes in dims]
    return f" {{{', '.join(parts)}}}" if any(dims) else ""


def local_text(program: LocalProgram) -> str:
    holders = [n for n in program.graph.nodes if n.op == "placeholder"]
    specs = {
        n.name: f"{dims_text(i.dims)} {i.kind}"
        + (" padded" if tuple(n.meta["val"].shape) != _even(i, program.mesh) else "")
        for n, i in zip(holders, program.inputs, strict=True)
    }
    axes = ", ".join(f"{a}={n}" for a, n in program.mesh.shape.items())
    header = (
        f"local program of one rank on the mesh ({axes}); routed rows are shown as balanced routing would have them"
    )
    return graph_text(program.graph, header, specs)


def _even(spec, mesh):
    return tuple(
        n // mesh.axes_size(a) if n % mesh.axes_size(a) == 0 else -1 for n, a in zip(spec.shape, spec.dims, strict=True)
    )


# ---- memory ----------------------------------------------------------------------------------------------------------
def memory_analysis(program: LocalProgram) -> dict[str, int]:
    """Bytes on one rank, by liveness over the local program as it runs (each value freed after its last use).

    Returns:
        ``arguments`` (inputs as they rest), ``outputs`` (new memory in results, donation taken into account),
        ``gathered``, ``gradients``, ``temporaries`` and ``workspace`` (each one's own peak; the last is what kernels of
        ours allocate while they run), and ``peak``, the peak of all together, arguments included. Routed rows count as
        under balanced routing.
    """
    peaks = {"total": 0}
    for _, now in _liveness(program):
        peaks["total"] = max(peaks["total"], sum(now.values()))
        for kind, size in now.items():
            peaks[kind] = max(peaks.get(kind, 0), size)
    peak = peaks.pop("total")
    outputs = sum(_new_bytes(n) for n in _bases(program)[1] if n.op != "placeholder")
    return {"arguments": peaks.pop("arguments"), "outputs": outputs, **peaks, "peak": peak}


def peak_after_backward(program: LocalProgram) -> int:
    """The most bytes alive once no node of the backward pass is left to run, arguments included."""
    alive = [(phase_of(node), sum(now.values())) for node, now in _liveness(program) if node.op == "call_function"]
    last = max((i for i, (phase, _) in enumerate(alive) if phase == "backward"), default=-1)
    return max((size for _, size in alive[last + 1 :]), default=0)


def _bases(program: LocalProgram):
    """Per node the node whose memory it shows; and those that the outputs show."""
    owner = memory_of(program.graph)
    output = next(iter(reversed(list(program.graph.nodes))))
    return owner, {owner[n] for n in output.all_input_nodes}


def _liveness(program: LocalProgram):
    """After each node: bytes alive by category, each value freed after its last use."""
    owner, _ = _bases(program)
    nodes = list(program.graph.nodes)
    expiry: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes, *_awaited(node)):
            expiry[owner[used]] = i
    ends: dict[int, list[fx.Node]] = {}
    for node, i in expiry.items():
        ends.setdefault(i, []).append(node)
    now = dict.fromkeys(("arguments", "gathered", "gradients", "temporaries", "workspace"), 0)
    for i, node in enumerate(nodes):
        now["workspace"] = workspace(node)
        if owner[node] is node:
            now[_category(node)] += _new_bytes(node)
        yield node, now
        for done in ends.get(i, ()):
            if done.op != "placeholder":
                now[_category(done)] -= _new_bytes(done)


def _awaited(node: fx.Node) -> list[fx.Node]:
    """What a collective reads until it is waited for here."""
    if node.target is not C.wait_tensor.default:
        return []
    started = node.args[0].args[0] if node.args[0].target is operator.getitem else node.args[0]
    return started.all_input_nodes


def _new_bytes(node: fx.Node) -> int:
    if node.op == "output" or node.target is offload_raw:  # the latter lies in host memory
        return 0
    val = node.meta.get("val")
    values = val if isinstance(val, tuple | list) else [val]
    return sum(num_bytes(v) for v in values if isinstance(v, torch.Tensor))


def _category(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "arguments"
    note = node.meta.get("custom", {})
    if note.get("param"):
        return "gathered" if note["phase"] == "forward" else "gradients"
    return "gradients" if note.get("phase") == "update" else "temporaries"


# ---- cost ------------------------------------------------------------------------------------------------------------
def cost_analysis(program: LocalProgram, global_graph: fx.Graph) -> dict[str, float]:
    """``flops`` of one rank, ``global_flops`` of the whole program, ``parallel_efficiency`` = global / (ranks · local),
    and ``comm_bytes`` per kind of collective."""
    local, whole = flops(program.graph), flops(global_graph)
    out: dict[str, float] = {"flops": local, "global_flops": whole}
    out["parallel_efficiency"] = whole / (local * program.mesh.size) if local else 1.0
    for c in collectives(program):
        out[f"{c.kind}_bytes"] = out.get(f"{c.kind}_bytes", 0) + c.bytes
    return out
