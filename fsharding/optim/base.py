"""What all optimizers share: the pair, composition, and one way to walk over several trees at once.

Trees are matched by key path, never by position, so dicts in another order and OrderedDicts are the same tree; ``None``
is an empty node. A leaf is a plain tensor or a DTensor; DTensors are computed on their local shards and wrapped again,
which is exact because everything here but the global norm is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fsharding import _compat as compat
from fsharding.errors import ShardingError
from fsharding.oplib import wide_dtype
from fsharding.tree import broadcast_prefix, flatten_with_paths, unflatten


class GradientTransformation(NamedTuple):
    """``init(params) -> state`` and ``update(grads, state, params) -> (updates, state)``, both pure functions.

    ``updates`` has the structure of ``grads``; what leaves the last transformation is added to the parameters.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


def chain(*transforms: GradientTransformation) -> GradientTransformation:
    """One transformation that applies several in order; its state is the tuple of their states.

    Raises ShardingError when it is called with a state of another length.
    """

    def init(params):
        return tuple(t.init(params) for t in transforms)

    def update(grads, state, params=None):
        if not isinstance(state, tuple) or len(state) != len(transforms):
            raise ShardingError(
                f"chain.update: state must be a tuple of {len(transforms)} states, as returned by chain(...).init"
            )
        news = []
        for transform, old in zip(transforms, state, strict=True):
            grads, new = transform.update(grads, old, params)
            news.append(new)
        return grads, tuple(news)

    return GradientTransformation(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
    """``params + updates`` leaf by leaf, added in the wider dtype and rounded once to each parameter's own dtype.

    Raises ShardingError, with the key path, where the trees or the shapes differ.
    """

    def leaf(p, u):
        return ((p + u).to(p.dtype),)

    return map_leaves("apply_updates", leaf, 1, dict(params=params, updates=updates))[0]


def map_leaves(where: str, fn: Callable, count: int, trees: dict[str, Any], flags: Any = None) -> tuple[Any, ...]:
    """Call ``fn`` on the leaves at each key path; return its ``count`` results as trees like the first of ``trees``.

    ``flags``, a tree of bools with the same key paths or a prefix of it, adds a last argument. Raises ShardingError
    for trees that differ in structure or shapes, leaves that are not floating tensors, and DTensors placed differently.
    """
    names = tuple(trees)
    paths, first, treespec = flatten(where, trees[names[0]], names[0])
    columns = [first] + [_aligned(where, paths, trees[n], names[0], n) for n in names[1:]]
    if flags is not None:
        columns.append(_flags(where, paths, flags, trees[names[0]]))
    results = [
        _on_local_shards(where, names, path, fn, leaves) for path, *leaves in zip(paths, *columns, strict=True)
    ]
    return tuple(unflatten(treespec, [r[i] for r in results]) for i in range(count))


def flatten(where: str, tree: Any, name: str = "tree"):
    """Key paths as the user would index them, leaves, and the structure. Raises unless leaves are floating tensors."""
    paths, leaves, treespec = flatten_with_paths(tree)
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise ShardingError(f"{where}: {dotted(name, path)} is a {type(leaf).__name__}; leaves must be tensors")
        if not leaf.is_floating_point():
            raise ShardingError(f"{where}: {dotted(name, path)} has dtype {leaf.dtype}; leaves must be floating")
    return paths, leaves, treespec


def zeros_like_tree(where: str, tree: Any, dtype: torch.dtype | None = None) -> Any:
    """Zeros of each leaf's shape and placement."""
    _, leaves, treespec = flatten(where, tree, "params")
    return unflatten(treespec, [torch.zeros_like(x, dtype=dtype) for x in leaves])


def step_count(params: Any) -> torch.Tensor:
    """A 0-d int64 zero beside the parameters: on their device, so that no step crosses to the host."""
    return torch.zeros((), dtype=torch.int64, device=device_of(params))


def device_of(params: Any) -> torch.device | None:
    """The device of the first leaf; None (the default device) for an empty tree."""
    _, leaves, _ = flatten_with_paths(params)
    return leaves[0].device if leaves else None


def dotted(name: str, path: str) -> str:
    """A key path after the name of its tree, as one would type it."""
    return name + path if not path or path.startswith("[") else f"{name}.{path}"


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype that sums and moments are computed in: float64 as it is, everything else float32."""
    return x.to(wide_dtype(x.dtype))


class Scalars:
    """0-d values that all leaves meet, cast once for each wide dtype: they do not change the dtype of a 0-d leaf."""

    def __init__(self, *values: float | torch.Tensor):
        self.values, self.cast = values, {}

    def like(self, leaf: torch.Tensor) -> tuple[float | torch.Tensor, ...]:
        """The values in the dtype that ``wide(leaf)`` has; Python floats as they are."""
        dtype = wide_dtype(leaf.dtype)
        if dtype not in self.cast:
            self.cast[dtype] = tuple(v.to(dtype) if isinstance(v, torch.Tensor) else v for v in self.values)
        return self.cast[dtype]


def is_part_of_a_program(*leaves: torch.Tensor) -> bool:
    """Is a program being traced, in which no transform differentiates or maps these leaves?"""
    if compat.current_tracer() is None or compat.under_functorch():
        return False
    return not any(x.requires_grad or isinstance(x, DTensor) for x in leaves)


def local(leaf: torch.Tensor) -> torch.Tensor:
    """The piece of a DTensor that this rank holds; a plain tensor as it is. Optimizers are not differentiated."""
    return leaf.detach().to_local() if isinstance(leaf, DTensor) else leaf


def _aligned(where, paths, tree, first, name):
    """The leaves of ``tree`` in the order of ``paths``."""
    found_paths, leaves, _ = flatten(where, tree, name)
    found = dict(zip(found_paths, leaves, strict=True))
    missing = [p for p in paths if p not in found]
    extra = sorted(set(found) - set(paths))
    if missing or extra:
        what = f"has nothing at {missing[0]}" if missing else f"has {extra[0]}, which {first} has not"
        more = len(missing) + len(extra) - 1
        raise ShardingError(
            f"{where}: {name} {what}{f' (and {more} more differences)' if more else ''}; "
            f"{name} must have the structure of {first}"
        )
    return [found[p] for p in paths]


def _flags(where, paths, flags, tree):
    """The flags in the order of ``paths``. By path if they match (any dict order), else as a prefix tree."""
    found_paths, leaves, _ = flatten_with_paths(flags)
    if set(found_paths) == set(paths):
        found = dict(zip(found_paths, leaves, strict=True))
        leaves = [found[p] for p in paths]
    else:
        leaves = broadcast_prefix(flags, tree, f"{where}: mask entries")
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, bool):
            raise ShardingError(f"{where}: {dotted('mask', path)} is {leaf!r}; give a bool for each parameter")
    return leaves


def _on_local_shards(where, names, path, fn, leaves):
    tensors = leaves[: len(names)]
    for name, x in zip(names, tensors, strict=True):
        if x.shape != tensors[0].shape:
            raise ShardingError(
                f"{where}: {dotted(name, path)} has shape {tuple(x.shape)}, "
                f"{dotted(names[0], path)} has {tuple(tensors[0].shape)}"
            )
    if not any(isinstance(x, DTensor) for x in tensors):
        return fn(*leaves)
    placed = [(x.device_mesh, x.placements) if isinstance(x, DTensor) else None for x in tensors]
    for name, place in zip(names, placed, strict=True):
        if place != placed[0]:
            raise ShardingError(
                f"{where}: {dotted(name, path)} is placed as {place}, {dotted(names[0], path)} as {placed[0]}; "
                "redistribute one of them first"
            )
    mesh, placements = placed[0]
    if any(p.is_partial() for p in placements):
        raise ShardingError(f"{where}: {dotted(names[0], path)} has pending sums ({placements}); redistribute it first")
    shape, stride = tensors[0].shape, tensors[0].stride()
    return tuple(
        DTensor.from_local(y, mesh, placements, run_check=False, shape=shape, stride=stride)
        for y in fn(*map(local, tensors), *leaves[len(names) :])
    )
