"""Over which manual axes does a value vary? Types of values inside ``shard_map``, as properties of the traced graph.

Inside a region every rank computes on its own block. The *type* of a value is the set of manual axes over which its
ranks may hold different numbers: those of its in-spec for an argument, the union of its operands' for a result, and
what the table of collectives says for those. Operands of one call that differ in type are made alike by ``pvary``, an
identity whose transpose sums over the axes that are added: so cotangents come out right for any function of the body,
and what is equal on all ranks is known without looking at a number (JAX's "varying manual axes").
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable

import torch
import torch.fx as fx
from torch.overrides import TorchFunctionMode

from fsharding import _compat as compat
from fsharding import oplib
from fsharding.comm import groups
from fsharding.errors import ShardingError

Axes = frozenset
A = torch.ops.aten
TRANSFER: dict[Callable, Callable] = {}
"""Raw op -> (type of its operands, arguments) -> type of its result. Any other op: the union."""

# Results that hold nothing of their operand's values.
_FRESH = {A.new_zeros.default, A.new_ones.default, A.new_full.default, A.new_empty.default,
          A.new_empty_strided.default}  # fmt: skip
# Methods that read the shape, dtype or device of their second operand only.
_SHAPE_ONLY = {torch.Tensor.expand_as, torch.Tensor.view_as, torch.Tensor.reshape_as, torch.Tensor.type_as,
               torch.Tensor.to}  # fmt: skip
_NO_OPS = {"__get__", "__set__", "size", "dim", "stride"}
_BACKWARD = {torch.autograd.backward, torch.Tensor.backward}
_NONE: Axes = frozenset()


class Types:
    """Types of the nodes of one running trace, and of the tensors that stand for them."""

    def __init__(self):
        self._known: dict[fx.Node, Axes] = {}

    def of(self, x: torch.Tensor) -> Axes:
        """The type of a traced tensor, whatever ``torch.func`` levels wrap it. Of others (constants): unvarying."""
        node = compat.node_of(x)
        return _NONE if node is None else self.of_node(node)

    def of_node(self, node: fx.Node) -> Axes:
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [n for n in top.all_input_nodes if n not in self._known]
            if top not in self._known and missing:
                stack += missing
                continue
            self._known[top] = self._known.get(top, self._derive(top) if top not in self._known else _NONE)
            stack.pop()
        return self._known[node]

    def _derive(self, node: fx.Node) -> Axes:
        if node.target in _FRESH:
            return _NONE
        union = _NONE.union(*(self._known[n] for n in node.all_input_nodes))
        transfer = TRANSFER.get(node.target)
        return union if transfer is None else transfer(union, node.args)


def types() -> Types:
    """The types of the trace that is running; they live as long as it."""
    tracer = compat.current_tracer()
    found = getattr(tracer, "fsharding_types", None)
    if found is None:
        found = tracer.fsharding_types = Types()
    return found


# ---- regions ---------------------------------------------------------------------------------------------------------
class Region:
    """One ``shard_map`` body that is being traced.

    Attributes:
        name: of the user's function.
        mesh: its mesh.
        axes: its manual axes, and ``manual`` those of the regions around it as well.
        enter: ``f(outer tensor) -> block`` under ``P()``, for values that the body closes over.
    """

    def __init__(self, name: str, mesh, axes: tuple[str, ...], outer: Region | None, enter: Callable):
        self.name, self.mesh, self.axes, self.enter = name, mesh, axes, enter
        self.manual: tuple[str, ...] = axes if outer is None else mesh.sort_axes((*axes, *outer.manual))
        self.level = compat.functorch_level()
        self.before = set(compat.current_tracer().graph.nodes)
        self._entered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def alias(self, axes) -> str:
        """The group alias over a set of axes."""
        return self.mesh.alias(axes)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        """A value of the body as it is; one from outside as an argument that every rank holds whole."""
        node = compat.node_of(x)
        if node is None or not (is_placed(node) or (node in self.before and node.op != "get_attr")):
            return x
        if compat.functorch_level() != self.level:  # what is made in an inner transform does not outlive it
            return self.enter(x)
        if id(x) not in self._entered:
            self._entered[id(x)] = (x, self.enter(x))  # keeps x alive: its id stands for it
        return self._entered[id(x)][1]


PLACED = "placed_"


def is_placed(node: fx.Node) -> bool:
    """Is this a closed-over value that rests on a mesh, not a constant that all ranks hold?"""
    return node.op in ("get_attr", "placeholder") and PLACED in node.target


_region: contextvars.ContextVar[Region | None] = contextvars.ContextVar("fsharding_region", default=None)


def region() -> Region | None:
    """The innermost region whose body is being traced."""
    return _region.get()


@contextlib.contextmanager
def entering(inner: Region):
    """While the body of ``inner`` runs: its calls get operands of one type each."""
    token = _region.set(inner)
    try:
        with oplib.aligning(lambda values: align(inner, values)), _Align(inner):
            yield
    finally:
        _region.reset(token)


class _Align(TorchFunctionMode):
    """Gives each call of the body operands that are inside and of one type."""

    def __init__(self, inner: Region):
        super().__init__()
        self.inner = inner

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Below the trace (an op that runs on the values behind it) there are no nodes, and nothing to align.
        if name in _NO_OPS or compat.current_tracer() is None:
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            raise ShardingError(f"`{self.inner.name}`: `{name}` writes into `out=`. Use the value that it returns.")
        if func in _BACKWARD:
            raise ShardingError(f"`{self.inner.name}` calls `.backward()`: use `torch.func.grad` or `fs.grad`.")
        if func is torch.autograd.grad:  # its operands are found by identity
            return _checked(func(*args, **kwargs), kwargs.get("inputs", args[1] if len(args) > 1 else ()))
        found = list(oplib.tensors_in((args, kwargs)))
        new = dict(zip(map(id, found), align(self.inner, oplib.lifted(*found), func), strict=True))
        if any(new[id(x)] is not x for x in found):
            args, kwargs = _swap(args, new), _swap(kwargs, new)
        return func(*args, **kwargs)


def _checked(grads, inputs):
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    return tuple(None if g is None else conform(g, x, "a gradient") for g, x in zip(grads, inputs, strict=True))


def _swap(value, new):
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if isinstance(value, dict):
        return {k: _swap(v, new) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_swap(v, new) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def align(inner: Region, values, func: Callable | None = None) -> list:
    """The tensors of one call, inside and floating ones of the type of all together."""
    values = [inner.inside(v) if isinstance(v, torch.Tensor) else v for v in values]
    table = types()
    have = [table.of(v) if isinstance(v, torch.Tensor) else _NONE for v in values]
    union = _NONE.union(*have)
    if all(h == union for h in have) or func in _SHAPE_ONLY:
        return values
    many = getattr(func, "__name__", "").startswith("_foreach")
    if func is not None and _writes(func) and (have[0] != union or many):
        raise ShardingError(
            f"`{inner.name}`: `{func.__name__}` writes a value that varies over {_shown(union - have[0])} into one "
            "that does not. Use the op that returns a new value, or make the tensor varying first: "
            f"`x = fs.pvary(x, {tuple(sorted(union - have[0]))!r})`."
        )
    return [
        pvary(v, union - h, inner.alias(())) if isinstance(v, torch.Tensor) else v
        for v, h in zip(values, have, strict=True)
    ]


def _writes(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    )  # fmt: skip


def _shown(axes) -> str:
    return ", ".join(map(repr, sorted(axes)))


def pvary(x: torch.Tensor, axes, alias: str) -> torch.Tensor:
    """``x`` as a value that may vary over these axes too; integers and booleans have no cotangent and stay as they are.

    ``alias`` is that of any group of the mesh.
    """
    from fsharding.comm.manual import vary  # its ops have types, which this module derives

    if not axes or not (x.is_floating_point() or x.is_complex()):
        return x
    return vary(x, groups.over(alias, axes))


# ---- cotangents ------------------------------------------------------------------------------------------------------
def conform(cotangent: torch.Tensor, primal: torch.Tensor, what: str) -> torch.Tensor:
    """A cotangent in the type of its primal, in the body of a region; elsewhere values have no types.

    Raises:
        ShardingError: it varies where the primal does not: some op mixed types unseen, and a sum would be missing.
    """
    if region() is None or compat.current_tracer() is None:
        return cotangent
    return conform_to(cotangent, types().of(primal), region().alias(()), what)


def conform_to(cotangent: torch.Tensor, want: Axes, alias: str, what: str) -> torch.Tensor:
    """As :func:`conform`, to a known type."""
    have = types().of(cotangent)
    if have - want:
        raise ShardingError(
            f"{what} varies over {_shown(have - want)}, the value itself does not. An operation that `fs.shard_map` "
            "cannot see (a `torch.autograd.Function`?) combines varying and unvarying values, so that a sum over "
            f"{_shown(have - want)} is missing. Give it operands of one type: `fs.pvary(x, "
            f"{tuple(sorted(have - want))!r})`."
        )
    return pvary(cotangent, want - have, alias)


# ---- the finished graph ----------------------------------------------------------------------------------------------
def mark_regions(graph: fx.Graph, free) -> None:
    """Note on each node of a region its manual axes, for rules that would use those axes on their own.

    Args:
        free: placeholders that may be used anywhere: constants, which all ranks hold.

    Raises:
        ShardingError: a value from outside meets a block unseen, or a block has left its body other than by return.
    """
    # Manual axes by node. What was made of constants alone fits any region that has at least its axes.
    exact: dict[fx.Node, Axes] = {}
    loose: dict[fx.Node, Axes] = dict.fromkeys(free, _NONE)
    for node in graph.nodes:
        if node.op != "call_function":
            if node not in loose:
                exact[node] = _NONE
            continue
        sure = {exact[n] for n in node.all_input_nodes if n in exact}
        union = _NONE.union(*sure, *(loose[n] for n in node.all_input_nodes if n in loose))
        border = BORDER.get(node.target, lambda node, inside, sure: inside)
        found = border(node, union, bool(sure)) if len(sure) <= 1 and union in (sure or {union}) else None
        if found is None:
            line = node.meta.get("custom", {}).get("line")
            raise ShardingError(
                f"{line}: a value from outside of a `shard_map` meets a block of its body where `fs` cannot see it (in "
                "a `torch.autograd.Function`?), or a block has left the body other than as a result. Pass the one as "
                "an argument, and return the other."
            )
        (exact if sure else loose)[node] = found
        if found:
            node.meta["custom"] = {**node.meta.get("custom", {}), "manual": tuple(sorted(found))}


BORDER: dict[Callable, Callable] = {}
"""Raw op -> (node, manual axes of its operand, are they sure) -> those of its result; None: it is out of place."""
