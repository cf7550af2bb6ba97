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


def replace_uses(new: dict[fx.Node, fx.Node]) -> None:
    """Let all users read other nodes instead: each user is written once, however many of its operands change."""
    for user in dict.fromkeys(user for node in new for user in node.users):
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda n: new.get(n, n))
