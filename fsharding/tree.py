"""Trees of arguments: key paths, prefix trees and errors that say where. A thin layer over optree.

JAX's rules hold: ``None`` is an empty node, dict keys are sorted, whatever is not a registered container is a leaf. Two
trees match when their key paths match, so a list fits a tuple and an ``OrderedDict`` fits a dict.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import optree

from .errors import ShardingError

__all__ = ["broadcast_prefix", "flatten", "flatten_with_paths", "map_with_path", "unflatten"]

IsLeaf = Callable[[Any], bool] | None


def flatten_with_paths(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """Flatten a tree into readable key paths, leaves and its structure.

    A path reads as one would type it after the tree's name, without a leading dot: ``layers[0].w_in``, ``embed``, and
    the empty string for a tree that is a bare leaf. ``is_leaf(node)`` makes more nodes leaves.
    """
    accessors, leaves, treedef = optree.tree_flatten_with_accessor(tree, is_leaf=is_leaf)
    return [_path(accessor) for accessor in accessors], leaves, treedef


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure, without the paths: for what runs at every step."""
    return optree.tree_flatten(tree)


def unflatten(treedef: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The inverse of ``flatten_with_paths``: a tree of this structure with these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """``fn(path, leaf, *leaves_of_rest)`` for each leaf; the result has the structure of ``tree``.

    Raises ShardingError, with the path, where a tree of ``rest`` lacks a leaf or has one too many.
    """
    paths, leaves, treedef = flatten_with_paths(tree, is_leaf)
    columns = [leaves]
    for number, other in enumerate(rest, start=2):
        other_paths, other_leaves, _ = flatten_with_paths(other, is_leaf)
        by_path = dict(zip(other_paths, other_leaves, strict=True))
        _same_paths(paths, by_path, f"tree {number}")
        columns.append([by_path[path] for path in paths])
    return unflatten(treedef, [fn(path, *row) for path, *row in zip(paths, *columns, strict=True)])


def broadcast_prefix(prefix_tree: Any, full_tree: Any, what: str, is_leaf: IsLeaf = None) -> list[Any]:
    """One leaf of ``prefix_tree`` for each leaf of ``full_tree``, in the order of the latter's leaves.

    A leaf of the prefix stands for the whole subtree at its place; ``None`` does so as well (for specs it means P()).
    ``what`` names the prefix in errors, such as "specs". ``is_leaf`` applies to both trees.

    Raises ShardingError, with the path, where the prefix goes deeper than the tree or has other children.
    """
    out: list[Any] = []
    _broadcast(prefix_tree, full_tree, what, is_leaf, optree.PyTreeAccessor(), out)
    return out


def _broadcast(prefix, full, what, is_leaf, at, out) -> None:
    prefix_children = None if prefix is None else _children(prefix, is_leaf)
    if prefix_children is None:
        out.extend([prefix] * len(optree.tree_leaves(full, is_leaf=is_leaf)))
        return
    full_children = _children(full, is_leaf)
    if full_children is None:
        where = _path(at) or "the top"
        kind = "an empty node (None)" if full is None else f"a leaf ({type(full).__name__})"
        raise ShardingError(
            f"{what} do not fit the tree at {where}: {what} have a {type(prefix).__name__} there, the tree has {kind}. "
            f"Give one entry for {where}" + (', and write a spec as P("a", None), not as a tuple.'
                                             if isinstance(prefix, (tuple, list)) else "."))
    if prefix_children.keys() != full_children.keys():
        raise ShardingError(_children_error(prefix_children, full_children, what, at))
    for key, (entry, child) in full_children.items():
        _broadcast(prefix_children[key][1], child, what, is_leaf, at + entry, out)


def _children(node: Any, is_leaf: IsLeaf) -> dict[Any, tuple[Any, Any]] | None:
    """Children by key, each with its accessor entry; None for a leaf."""
    if node is None or (is_leaf is not None and is_leaf(node)) or optree.tree_is_leaf(node):
        return None
    flat = optree.tree_flatten_one_level(node)
    entries = [flat.path_entry_type(key, type(node), flat.kind) for key in flat.entries]
    return {_entry(entry): (entry, child) for entry, child in zip(entries, flat.children, strict=True)}


def _children_error(prefix: dict, full: dict, what: str, at: optree.PyTreeAccessor) -> str:
    def names(items: dict, keys) -> str:
        return ", ".join(_path(at + items[key][0]) for key in items if key in keys)

    missing, extra = full.keys() - prefix.keys(), prefix.keys() - full.keys()
    message = f"{what} do not fit the tree at {_path(at) or 'the top'}:"
    if missing:
        message += f" no entry for {names(full, missing)};"
    if extra:
        message += f" the tree has no {names(prefix, extra)}{_close(names(prefix, extra), full, at)};"
    return message[:-1] + ". One entry above it may stand for all leaves below."


def _close(name: str, full: dict, at: optree.PyTreeAccessor) -> str:
    match = difflib.get_close_matches(name, [_path(at + entry) for entry, _ in full.values()], 1)
    return f" (did you mean {match[0]}?)" if match else ""


def _same_paths(paths: list[str], others: dict[str, Any], what: str) -> None:
    if others.keys() == (known := set(paths)):
        return
    missing = [path for path in paths if path not in others]
    extra = [path for path in others if path not in known]
    said = ([f"it lacks {_some(missing)}"] if missing else []) + ([f"it has {_some(extra)} besides"] if extra else [])
    raise ShardingError(f"{what} differs in structure from the first tree: {' and '.join(said)}. Both need the same "
                        "key paths.")


def _some(paths: list[str]) -> str:
    shown = ", ".join(path or "a bare leaf" for path in paths[:4])
    return shown + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def _path(accessor: optree.PyTreeAccessor) -> str:
    return "".join(_entry(entry) for entry in accessor).removeprefix(".")


def _entry(entry: Any) -> str:
    if isinstance(entry, optree.NamedTupleEntry):
        return f".{entry.field}"
    key = entry.entry
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    return f"[{key!r}]"
