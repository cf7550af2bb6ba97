"""Walks over fx graphs that several passes need."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.fx as fx


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
