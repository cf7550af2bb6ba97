"""The ``inductor`` back end: runs of plain PyTorch ops between our ops and collectives, compiled once for each distinct
one.

Collectives, waits, our kernels and writes to donated memory stay where the schedule put them. A region is compiled the
first time it runs, for the shapes and strides that it meets; equal regions (a layer is met many times) share the
result. Ops on routed rows, whose number changes from step to step, run as they are.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from fsharding import _compat as compat
from fsharding.moe import exchange, ops
from fsharding.program.trace import is_view

A = torch.ops.aten
C = torch.ops._c10d_functional
# What they make has as many rows as there are tokens or experts, whatever they read.
_CLOSING = {ops.combine_raw, ops.combine_w_raw, ops.dispatch_t_raw, ops.ragged_dw_raw, ops.segment_sum_raw}
# Inductor divides the last windows by the wrong size under `ceil_mode` (pytorch#198119, up to torch 2.14).
_LEFT_OUT = {A.avg_pool2d.default, A.avg_pool2d_backward.default, A.avg_pool3d.default, A.avg_pool3d_backward.default}
_PRODUCTS = {A.mm.default, A.bmm.default, A.addmm.default}


_KNOWN: dict = {}  # text, shapes and strides -> compiled function: equal regions of all programs share one


class Region:
    """One run of ops as a function of its inputs; ``compile`` happens at the first call."""

    def __init__(self, module: fx.GraphModule, text: str, known: dict, progress: Callable[[str], None]):
        self.module, self.text, self.known, self.progress = module, text, known, progress
        self.function: Callable | None = None

    __name__ = "compiled_region"

    def __call__(self, *inputs):
        if self.function is None:
            self.function = self._compile(inputs)
        return self.function(*inputs)

    def _compile(self, inputs) -> Callable:
        metas = tuple((tuple(x.shape), x.stride(), x.dtype, x.device.type) for x in inputs)
        key = (self.text, metas)
        if key not in self.known:
            self.progress(f"compiling region {len(self.known) + 1} ({len(self.module.graph.nodes)} nodes)")
            self.known[key] = compat.inductor_compile(self.module, list(inputs))
        return self.known[key]


def compile_regions(graph: fx.Graph, least: int = 2) -> int:
    """Replace, in place, every run of at least ``least`` computing ops by one call. Returns how many runs there are."""
    dynamic, progress = _dynamic(graph), _Progress()
    runs = list(_runs(graph, dynamic, least))
    for nodes in runs:
        _replace(graph, nodes, _KNOWN, progress)
    graph.lint()
    return len(runs)


class _Progress:
    """A line on standard error now and then, for work that takes seconds."""

    def __init__(self):
        self.start = self.last = 0.0

    def __call__(self, text: str) -> None:
        now = time.perf_counter()
        self.start = self.start or now
        if now - self.last >= 5:
            self.last = now
            compat.progress(f"fsharding: {text}, {now - self.start:.0f} s so far")


def _dynamic(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose shapes depend on how many rows a rank receives."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is exchange.host_sizes:
            found.add(node)
        elif node.target in _CLOSING or (node.target is exchange.exchange and not isinstance(node.args[2], fx.Node)):
            continue
        elif any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def _fits(node: fx.Node, dynamic: set[fx.Node]) -> bool:
    if node.op != "call_function" or node in dynamic:
        return False
    if node.target is operator.getitem:
        return _fits(node.args[0], dynamic)
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    return not node.target._schema.is_mutable and node.target not in _LEFT_OUT and node.target is not A.full.default


def _runs(graph: fx.Graph, dynamic: set[fx.Node], least: int):
    run: list[fx.Node] = []
    for node in [*graph.nodes]:
        if _fits(node, dynamic):
            run.append(node)
            continue
        if _worth(run) >= least:
            yield run
        run = []


def _worth(run: Sequence[fx.Node]) -> int:
    return sum(n.target not in _PRODUCTS and not is_view(n) for n in run)


def _replace(graph: fx.Graph, nodes: list[fx.Node], known: dict, progress) -> None:
    inside = set(nodes)
    inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    results = [n for n in nodes if any(u not in inside for u in n.users) and isinstance(n.meta["val"], torch.Tensor)]
    body, env = fx.Graph(), {}
    for i, node in enumerate(inputs):
        env[node] = body.placeholder(f"x{i}")
    for node in nodes:
        env[node] = body.node_copy(node, env.__getitem__)
    body.output(tuple(env[n] for n in results))
    text = "\n".join(_line(n, number) for number in [{n: i for i, n in enumerate(body.nodes)}] for n in body.nodes)
    region = Region(fx.GraphModule(torch.nn.Module(), body), text, known, progress)
    with graph.inserting_after(nodes[-1]):
        call = graph.call_function(region, tuple(inputs))
    call.meta = {"val": tuple(n.meta["val"] for n in results), "custom": dict(nodes[-1].meta.get("custom", {}))}
    call.meta["custom"]["region"] = [str(n.target) for n in nodes]
    last = call
    for i, node in enumerate(results):
        with graph.inserting_after(last):
            last = item = graph.call_function(operator.getitem, (call, i))
        item.meta = dict(node.meta)
        for user in [u for u in node.users if u not in inside]:
            user.replace_input_with(node, item)
    for node in reversed(nodes):
        graph.erase_node(node)


def _line(node: fx.Node, number: dict) -> str:
    args = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
    return f"{node.op} {node.target if node.op == 'call_function' else ''} {args}"
