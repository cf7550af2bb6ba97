"""Runs a local program: straight-line Python made of its nodes, each value freed after its last use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.fx as fx

from fsharding import _compat
from fsharding.annotate.mesh import Mesh
from fsharding.comm import groups
from fsharding.errors import ShardingError
from fsharding.program.emit import FACTORIES
from fsharding.program.source import line_of

_FAULT = "fsharding/fault"


def set_device(graph: fx.Graph, device: torch.device) -> None:
    """Make the factories of a program, which was lowered on CPU fakes, create on ``device``."""
    for node in graph.nodes:
        if node.target in FACTORIES or (node.op == "call_function" and "device" in node.kwargs):
            node.kwargs = {**node.kwargs, "device": device}


def aliases(graph: fx.Graph) -> list[str]:
    """Group names that the program's collectives use, in order of first use (the same on all ranks)."""
    found = {}
    for node in graph.nodes:
        if "collective" in node.meta.get("custom", {}):
            found.update(dict.fromkeys(a for a in node.args if isinstance(a, str) and a.startswith("fs")))
    return list(found)


class Runner:
    """A local program as a Python function of this rank's input tensors.

    ``spend``: the list of inputs is emptied, so that each can be freed after its last use.
    """

    def __init__(self, graph: fx.Graph, mesh: Mesh, spend: bool = False):
        self.mesh, self.nodes, self.spend = mesh, [], spend
        self.file = f"<sharded program {id(self):x}>"
        self.function = self._generate(graph)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad(), _compat.below_autograd():  # our ops' autograd kernels are Python: half of a launch
            try:
                return self.function(inputs)
            except Exception as error:
                raise self._fault(error) from error

    # ---- code -----------------------------------------------------------------------------------------------------
    def _generate(self, graph: fx.Graph) -> Callable:
        names: dict[fx.Node, str] = {}
        values: dict[str, object] = {}
        lines, count = ["def program(inputs):"], 0
        self.nodes = [None]
        last_use = {used: node for node in graph.nodes for used in node.all_input_nodes}
        given = sum(node.op == "placeholder" for node in graph.nodes)
        for node in graph.nodes:
            names[node] = f"v{len(names)}"
            if node.op == "placeholder":
                count += 1
                spent = "; inputs.clear()" if self.spend and count == given else ""
                lines.append(f" {names[node]} = inputs[{count - 1}]{spent}")
            elif node.op == "output":
                lines.append(f" return {_code(node.args[0], names, values)}")
            else:
                lines.append(self._line(node, names, values, last_use))
            self.nodes.append(node)
        exec(compile("\n".join(lines), self.file, "exec"), values)
        return values["program"]

    def _line(self, node, names, values, last_use):
        function = f"f{len(values)}"
        values[function] = node.target
        args = [_code(a, names, values) for a in node.args]
        args += [f"{k}={_code(v, names, values)}" for k, v in node.kwargs.items()]
        done = [names[a] for a in node.all_input_nodes if last_use[a] is node]
        free = "".join(f"; {name} = None" for name in done)
        if node not in last_use:
            free += f"; {names[node]} = None"
        return f" {names[node]} = {function}({', '.join(args)}){free}"

    # ---- faults ---------------------------------------------------------------------------------------------------
    def _fault(self, error: Exception) -> ShardingError:
        """What to raise, with the user's line; tell the other ranks through the store, and listen to what they told."""
        node, frame = None, error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == self.file:
                node = self.nodes[frame.tb_lineno - 1]
            frame = frame.tb_next
        where = f"{line_of(node)}: " if node is not None and line_of(node) else ""
        name = node.target.name() if hasattr(getattr(node, "target", None), "name") else "the program"
        collective = node is not None and "collective" in node.meta.get("custom", {})
        waits = "wait_tensor" in name
        rank = groups.current_rank()
        told = self._told(rank) if collective or waits or isinstance(error, dist.DistError) else None
        if told:
            return ShardingError(f"{where}stopped because {told}")
        text = str(error) if isinstance(error, ShardingError) else f"{where}`{name}` failed: {error}"
        if self.mesh.size > 1 and dist.is_initialized() and not (collective or waits):
            _compat.default_store().set(f"{_FAULT}/{rank}", f"rank {rank} failed: {text}")
        return ShardingError(text)

    def _told(self, rank) -> str | None:
        if not dist.is_initialized() or self.mesh.phantom:
            return None
        store = _compat.default_store()
        try:
            for other in range(self.mesh.size):
                if other != rank and store.check([f"{_FAULT}/{other}"]):
                    return store.get(f"{_FAULT}/{other}").decode()
        except RuntimeError:  # the store went down with its host
            return None
        return None


def _code(value, names: dict, values: dict) -> str:
    """Python text of one argument; what has no literal becomes a global of the generated function."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, bool | None) or (isinstance(value, int | str) and type(value) in (int, str)):
        return repr(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, tuple | list):
        items = ", ".join(_code(v, names, values) for v in value)
        return f"[{items}]" if isinstance(value, list) else f"({items},)" if value else "()"
    key = f"c{len(values)}"
    values[key] = value
    return key
