"""``scan``: one function over many layers. In a sharded program its body is traced once and stamped.

The body and its gradient are traced as one graph, split where the forward pass ends, and the whole loop is one opaque
op each way; after the outer trace those are replaced by copies. What a layer costs is then a copy and its partition,
not a trace. Under ``vmap``, forward mode or second derivatives the body is traced for every layer, as a
loop would be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fsharding import _compat as compat
from fsharding import oplib
from fsharding import tree as trees
from fsharding.errors import ShardingError
from fsharding.program import stamp
from fsharding.program.composites import Rewrite

CARRY = "must keep its structure, shapes and dtypes from step to step"


def scan(
    body: Callable, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """``carry, y = body(carry, x)`` for each x in turn; returns the last carry and the stacked ys. JAX's ``lax.scan``.

    Args:
        body: a pure function; ``carry`` keeps its structure, shapes and dtypes. It is called once to be traced, so
            Python side effects happen once.
        init: the first carry, any tree.
        xs: a tree whose leaves are stacked along dim 0; or a list of equal trees, one a step, which is how layers of
            parameters are best kept: no stacked copy of all gradients is ever made. None with ``length``.
        length: the number of steps, needed where ``xs`` does not tell it.
        reverse: from the last x to the first; the ys stand where their xs stood.

    Returns: ``(carry, ys)``; leaves of ys are stacked along a new dim 0.

    Raises:
        ShardingError: xs that differ in structure, shapes or dtypes, a length that does not fit, or a carry that
            changes, with the key path.
    """
    items = _items(xs, length)
    order = range(len(items))[::-1] if reverse else range(len(items))
    loop = _stamped(body, init, items) if len(items) > 1 else None
    if loop is not None:
        return loop([items[i] for i in order], order)
    carry, ys = init, [None] * len(items)
    for i in order:
        new, ys[i] = body(carry, items[i])
        _same("the carry", carry, new, CARRY)
        carry = new
    return carry, _stack(ys)


# ---- arguments -------------------------------------------------------------------------------------------------------
def _items(xs: Any, length: int | None) -> list[Any]:
    """One tree a step."""
    if isinstance(xs, list) and xs and not any(isinstance(x, torch.Tensor) for x in xs):
        for i, x in enumerate(xs[1:], 1):
            _same(f"xs[{i}]", xs[0], x, "must be like xs[0]: one tree a step, all of one kind")
        items = xs
    else:
        items = _unstacked(xs, length)
    if length is not None and length != len(items):
        raise ShardingError(f"`fs.scan` was given length={length}, but xs has {len(items)} steps.")
    return items


def _unstacked(xs: Any, length: int | None) -> list[Any]:
    paths, leaves, treedef = trees.flatten_with_paths(xs)
    for path, x in zip(paths, leaves, strict=True):
        if not isinstance(x, torch.Tensor) or not x.ndim:
            raise ShardingError(
                f"`fs.scan`: {path or 'xs'} must be a tensor that is stacked along dim 0, got {x!r:.80}."
            )
    sizes = {x.shape[0] for x in leaves}
    if len(sizes) > 1:
        shown = ", ".join(f"{path or 'xs'} has {x.shape[0]}" for path, x in zip(paths, leaves, strict=True))
        raise ShardingError(f"`fs.scan`: all leaves of xs have one number of steps in dim 0, but {shown}.")
    if not sizes and length is None:
        raise ShardingError("`fs.scan` without xs needs `length`.")
    count = sizes.pop() if sizes else length
    assert count is not None
    columns = [x.unbind(0) for x in leaves]
    return [trees.unflatten(treedef, [c[i] for c in columns]) for i in range(count)]


def _same(what: str, a: Any, b: Any, why: str) -> None:
    paths, left, one = trees.flatten_with_paths(a)
    _, right, other = trees.flatten_with_paths(b)
    if one != other:
        raise ShardingError(f"`fs.scan`: {what} {why}, but the structure is {other}, not {one}.")
    for path, x, y in zip(paths, left, right, strict=True):
        if _kind(x) != _kind(y):
            raise ShardingError(f"`fs.scan`: {what} {why}, but {path or 'it'} is {_kind(y)}, not {_kind(x)}.")


def _kind(x: Any):
    return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__


def _stack(ys: list[Any]) -> Any:
    if not ys:
        return None
    _, _, treedef = trees.flatten_with_paths(ys[0])
    columns = zip(*(trees.flatten_with_paths(y)[1] for y in ys), strict=True)
    return trees.unflatten(treedef, [torch.stack([torch.as_tensor(x) for x in column]) for column in columns])


# ---- one trace for all steps -----------------------------------------------------------------------------------------
def _stamped(body: Callable, init: Any, items: Sequence[Any]) -> Callable | None:
    """The loop over a body that was traced by itself; None where the body must be traced step by step."""
    levels = compat.functorch_levels()
    plain = oplib.in_region() or len(levels) > 1 or any(level != "Grad" for level in levels)
    if compat.current_tracer() is None or plain:
        return None
    _, leaves, treedef = trees.flatten_with_paths((init, items[0]))
    if not all(isinstance(x, torch.Tensor) for x in leaves):
        return None
    one = _Body(body, init, treedef)
    try:
        one.trace(leaves, bool(levels))
    except ShardingError:
        raise
    except Exception:  # what cannot be traced by itself is traced step by step, and says there what is wrong
        return None
    return one


@dataclass
class _Body:
    """The graphs of one body.

    Attributes:
        foreign: tensors of the outer trace that the body closes over, in order of their first use.
        forward, backward: keys of the stamped graphs; no ``backward`` where no gradient is asked for.
    """

    body: Callable
    init: Any
    treedef: Any
    foreign: list[torch.Tensor] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    forward: stamp.Stamp | None = None
    backward: stamp.Stamp | None = None
    constants: tuple = ()

    def trace(self, leaves: list[torch.Tensor], gradients: bool) -> None:
        from fsharding.program import trace as tracing

        tracer = compat.current_tracer()
        with compat.outside_of_the_trace():
            self._find_foreign(leaves, tracer)
            kinds = [_meta(x) for x in (*leaves, *self.foreign)]
            outs = self.result["kinds"]
            cotangents = [torch.empty(s, dtype=d, device="meta") for s, d in outs if d.is_floating_point]
            joint = self._joint(len(leaves), gradients)
            program = tracing.trace(joint, [*kinds, *cotangents] if gradients else kinds, inner=self._lift)
        primals = len(kinds)
        self.forward, self.backward = stamp.split(program, primals, len(outs), gradients)
        self.constants = tuple(program.constants)

    # -- the body as a function of flat tensors
    def _run(self, xs: Sequence[torch.Tensor], count: int, swaps: dict[int, torch.Tensor]):
        swaps.update({id(x): y for x, y in zip(self.foreign, xs[count:], strict=True)})
        out = self.body(*trees.unflatten(self.treedef, list(xs[:count])))
        if not isinstance(out, tuple) or len(out) != 2:
            raise ShardingError(f"the body of `fs.scan` returns a pair (carry, y), got {type(out).__name__}.")
        _, leaves, self.result["treedef"] = trees.flatten_with_paths(out)
        leaves = [torch.as_tensor(x) for x in leaves]
        self.result["kinds"] = [(tuple(x.shape), x.dtype) for x in leaves]
        return leaves

    def _find_foreign(self, leaves: list[torch.Tensor], tracer) -> None:
        """Run the body once on fakes: what it meets of the outer trace becomes an input."""
        fakes, swaps = compat.new_fake_mode(), {}

        def lift(x):
            if id(x) not in swaps and not compat.is_plain_fake(x, tracer):
                if compat.belongs_to(x, tracer):
                    self.foreign.append(x)
                with compat.no_modes(), fakes:
                    fake = torch.empty(x.shape, dtype=x.dtype, device="cpu")
                swaps[id(x)] = (fake, x)  # keeps x alive: its id stands for it
            return swaps[id(x)][0] if id(x) in swaps else x

        with fakes:
            xs = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in leaves]
        with fakes, oplib.lifting(lift), Rewrite(lift):
            self._run(xs, len(leaves), {})

    def _lift(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.result.get("swaps", {}).get(id(x))

    def _joint(self, count: int, gradients: bool) -> Callable:
        primals = count + len(self.foreign)

        def forward(*xs):
            self.result["swaps"] = swaps = {}
            return self._run(xs, count, swaps)

        def both(*flat):
            xs, cotangents = flat[:primals], flat[primals:]
            floating = [i for i, x in enumerate(xs) if x.is_floating_point()]

            def f(*floats):
                full = list(xs)
                for i, x in zip(floating, floats, strict=True):
                    full[i] = x
                outs = forward(*full)
                return tuple(x for x in outs if x.is_floating_point()), tuple(outs)

            _, pull, outs = torch.func.vjp(f, *(xs[i] for i in floating), has_aux=True)
            with torch.no_grad(), stamp.unmarked():
                grads = pull(tuple(cotangents))
            return [*outs, *grads]

        return both if gradients else forward

    def __call__(self, items: Sequence[Any], order: Sequence[int]) -> tuple[Any, Any]:
        """The last carry and the stacked ys of the loop over ``items``; step k's y stands at ``order[k]``."""
        carry, *xs = (trees.flatten_with_paths(tree)[1] for tree in (self.init, *items))
        run = stamp.Run(
            self.forward, self.backward, steps=len(items), carry=len(carry), item=len(xs[0]),
            shared=len(self.foreign), results=len(self.result["kinds"]),
        )  # fmt: skip
        constants = oplib.operands(*self.constants)
        last, ys = stamp.call(run, [*carry, *itertools.chain(*xs), *self.foreign], constants)
        steps = [trees.unflatten(self.result["treedef"], [*last, *y]) for y in ys]
        _same("the carry", self.init, steps[-1][0], CARRY)
        placed: list[Any] = [None] * len(items)
        for at, (_, y) in zip(order, steps, strict=True):
            placed[at] = y
        return steps[-1][0], _stack(placed)


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")
