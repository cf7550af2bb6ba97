"""Walks over fx graphs that several passes need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch.fx as fx


def add_call(graph: fx.Graph, target: Callable, args: tuple, kwargs: dict[str, Any] | None = None) -> fx.Node:
    """As ``graph.call_function``, in half the time: that one walks over the operands that it is given, to warn of
    symbolic numbers, and makes the target's name anew. Programs of 48 layers have 20,000 nodes."""
    node = graph.create_node("call_function", target, name=_name(target))
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


def copy_call(graph: fx.Graph, node: fx.Node, of: Callable[[fx.Node], Any]) -> fx.Node:
    """The call of ``node`` once more, on what ``of`` gives for its operands; without its meta."""
    return add_call(graph, node.target, *fx.node.map_arg((node.args, node.kwargs), of))


@functools.lru_cache(maxsize=4096)
def _name(target: Callable) -> str:
    return fx.Graph().call_function(target).name


def ancestors(nodes: Iterable[fx.Node], stop: Callable[[fx.Node], bool] = lambda node: False) -> set[fx.Node]:
    """These nodes and all that they are computed from. Nodes for which ``stop`` holds are found, not looked behind."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if not stop(node):
                stack += node.all_input_nodes
    return found


def drop_dead(graph: fx.Graph, keep: Callable[[fx.Node], bool] = lambda node: False) -> None:
    """Remove what no result needs, but for nodes to ``keep``. Collectives included: every op of a local program is
    functional, on all ranks alike."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not keep(node):
            graph.erase_node(node)


def replace_uses(new: dict[fx.Node, fx.Node]) -> None:
    """Let all users read other nodes instead: each user is written once, however many of its operands change."""
    for user in dict.fromkeys(user for node in new for user in node.users):
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda n: new.get(n, n))
