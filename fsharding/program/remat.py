"""Recomputation: ``remat`` tags what a function computes, one pass over the global program copies what backward reads.

The copies stand right before the first node that reads one of them, so that the originals die where the forward pass
ends. Never copied: integers (routing decisions, indices), ``topk`` and ``sort`` (a score that rounds otherwise could
pick another expert), and what the policy saves. Random numbers of ``fs.random`` are functions of their key and come out
alike. Works under any ``torch.func`` transform, nested, and on closures, because it only reads the graph.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fsharding import _compat as compat
from fsharding import oplib
from fsharding import tree as trees
from fsharding.errors import ShardingError
from fsharding.moe import expert_ops
from fsharding.moe import ops as moe_ops
from fsharding.program.attention import attention_raw

A = torch.ops.aten
OUT = "remat.out"

mark_raw = oplib.raw_op(
    "mark(Tensor x, str key) -> Tensor", lambda x, key: x.clone(), lambda x, key: torch.empty_like(x)
)
offload_raw = oplib.raw_op(
    "offload(Tensor x) -> Tensor",
    lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True),
    lambda x: torch.empty_like(x, device="cpu" if x.device.type != "meta" else "meta"),
)
"""To (pinned) host memory, in the order of the stream."""
reload_raw = oplib.raw_op(
    "reload(Tensor x, *, Device device) -> Tensor",
    lambda x, *, device: x.to(device, non_blocking=True) if x.device != device else x.clone(),
    lambda x, *, device: torch.empty_like(x, device=device),
)
"""And back."""


class _Mark(torch.autograd.Function):
    """An identity that the pass can see: the border of a region, or a named value."""

    @staticmethod
    def forward(x, key):
        return mark_raw(x, key)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.key = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g, None

    @staticmethod
    def jvp(ctx, t, _):
        return _Mark.apply(t, ctx.key)  # tangents are outputs of a region, too

    @staticmethod
    def vmap(info, in_dims, x, key):
        return _Mark.apply(x, key), in_dims[0]


# ---- policies --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Policy:
    """What a recomputed function keeps for the backward pass; see ``fs.policies``."""

    kind: str
    keys: tuple[str, ...] = ()

    def __repr__(self):
        return f"policies.{self.kind}({', '.join(map(repr, self.keys))})" if self.keys else f"policies.{self.kind}"


def names(*keys: str) -> Policy:
    """Keep the values that ``fs.name`` gave one of these names; recompute the rest from them."""
    return Policy("names", _checked(keys))


def offload(*keys: str) -> Policy:
    """As :func:`names`, the named values wait in host memory."""
    return Policy("offload", _checked(keys))


def _checked(keys) -> tuple[str, ...]:
    if not keys or not all(isinstance(k, str) and k for k in keys):
        raise ShardingError(f"a policy of names takes one or more names as `fs.name` gives them, got {keys!r}.")
    return keys


nothing = Policy("nothing")
"""Keep only what the function is called with."""
dots = Policy("dots")
"""Keep the results of matrix products, grouped products and attention; recompute what is elementwise."""
everything = Policy("everything")
"""Recompute nothing."""

_PRODUCTS = {
    A.mm.default, A.bmm.default, A.addmm.default, A.baddbmm.default, A.mv.default, A.dot.default,
    moe_ops.ragged_dot_raw, expert_ops.mlp_raw, attention_raw,
}  # fmt: skip
_CHOICES = {A.topk.default, A.sort.default, A.sort.stable, A.argsort.stable, A.kthvalue.default}


# ---- what users call -------------------------------------------------------------------------------------------------
def name(x: torch.Tensor, key: str) -> torch.Tensor:
    """``x``, under a name that ``policies.names`` and ``policies.offload`` know. Any shape and floating dtype."""
    if not isinstance(key, str) or not key or key == OUT:
        raise ShardingError(f"`fs.name` takes a tensor and a name, got {key!r}.")
    if not isinstance(x, torch.Tensor):
        raise ShardingError(f"`fs.name(x, {key!r})` takes a tensor, got {type(x).__name__}.")
    if compat.current_tracer() is None or not x.is_floating_point():
        return x
    (x,) = oplib.operands(x)
    return _Mark.apply(x, key)


def remat(fn: Callable, policy: Policy = nothing) -> Callable:
    """``fn``, whose intermediate values are recomputed for the backward pass instead of kept.

    Same results and gradients (bit for bit where the kernels are deterministic), less memory, more work. Takes effect
    in sharded functions; elsewhere ``fn`` runs as it is.

    Args:
        fn: any function of trees of tensors; closed-over tensors are fine.
        policy: what to keep nevertheless: ``fs.policies.nothing``, ``dots``, ``names(...)``, ``offload(...)`` or
            ``everything``.

    Raises:
        ShardingError: ``policy`` is none.
    """
    if not isinstance(policy, Policy):
        raise ShardingError(f"`policy` must come from `fs.policies` (nothing, dots, names, offload), got {policy!r}.")

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        tracer = compat.current_tracer()
        if tracer is None or policy.kind == "everything":
            return fn(*args, **kwargs)
        graph, region = tracer.graph, (_Region(), policy)
        last = _last(graph)
        paths, leaves, treedef = trees.flatten_with_paths(fn(*args, **kwargs))
        marked = [_Mark.apply(x, OUT) if _floats(x) else x for x in leaves]
        node = _last(graph)
        while node is not last:
            note = node.meta.setdefault("custom", {})
            note["remat"] = (region, *note.get("remat", ()))
            node = node.prev
        return trees.unflatten(treedef, marked)

    return wrapped


class _Region:
    """The identity of one call of a recomputed function; a copy of the program's notes keeps it."""

    def __deepcopy__(self, memo):
        return self


def _floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _last(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


# ---- the pass --------------------------------------------------------------------------------------------------------
def recompute(graph: fx.Graph) -> None:
    """Copy, in every tagged region, what its backward pass reads; then forget marks and tags. Outer regions first: the
    copy of one holds copies of the inner ones."""
    if any(n.target is mark_raw for n in graph.nodes):
        depth = 0
        while regions := _regions(graph, depth):
            for (_, policy), nodes in regions.items():
                _Copy(graph, nodes, policy, depth).run()
            depth += 1
    for node in list(graph.nodes):
        node.meta.get("custom", {}).pop("remat", None)
        if node.target is mark_raw:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _tags(node: fx.Node) -> tuple:
    return node.meta.get("custom", {}).get("remat", ())


def _regions(graph: fx.Graph, depth: int) -> dict:
    found: dict = {}
    for node in graph.nodes:
        if len(_tags(node)) > depth:
            found.setdefault(_tags(node)[depth], []).append(node)
    return found


def _marked(node: fx.Node, keys) -> bool:
    return node.target is mark_raw and node.args[1] in keys


class _Copy:
    """One region: ``inside`` are its nodes; what autograd reads of it from outside is computed again."""

    def __init__(self, graph: fx.Graph, nodes: list[fx.Node], policy: Policy, depth: int):
        self.graph, self.policy, self.depth = graph, policy, depth
        self.inside = set(nodes)
        self.order = {n: i for i, n in enumerate(graph.nodes)}

    def run(self) -> None:
        read = [(user, n) for n in self.inside for user in n.users if user not in self.inside]
        read = [(user, n) for user, n in read if not _marked(n, (OUT,))]  # results: theirs whoever reads them
        late = [(user, n) for user, n in read if not self._kept(n)]
        if late:
            copies = self._copies([n for _, n in late], min((u for u, _ in late), key=self.order.__getitem__))
            for user, n in late:
                user.replace_input_with(n, copies[n])
        if self.policy.kind == "offload":
            self._offload()

    def _copies(self, wanted, before: fx.Node) -> dict[fx.Node, fx.Node]:
        need, stack = set(), list(wanted)
        while stack:
            node = stack.pop()
            if node in self.inside and not self._kept(node) and node not in need:
                need.add(node)
                stack += node.all_input_nodes
        made: dict[fx.Node, fx.Node] = {}
        fresh: dict[Any, Any] = {}
        with self.graph.inserting_before(before):
            for node in sorted(need, key=self.order.__getitem__):
                copy = made[node] = self.graph.node_copy(node, lambda a: made.get(a, a))
                inner = tuple((fresh.setdefault(t, _Region()), p) for t, p in _tags(node)[self.depth + 1 :])
                outer = ((None, nothing),) * (self.depth + 1) if inner else ()
                note = {**node.meta.get("custom", {}), "phase": "backward", "remat": outer + inner, "recomputed": True}
                copy.meta = {**node.meta, "custom": note}
        return made

    def _kept(self, node: fx.Node) -> bool:
        """Is this value kept, and not computed again?"""
        if node.op != "call_function" or node.target in _CHOICES:
            return True
        if self.policy.kind in ("names", "offload") and any(_marked(n, self.policy.keys) for n in (node, *node.users)):
            return True
        source = node.args[0] if node.target is operator.getitem else node
        if self.policy.kind == "dots" and source.target in _PRODUCTS:
            return True
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return True
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return not (value.is_floating_point() or value.dtype == torch.bool or value.is_complex())
        return not isinstance(value, tuple | list)

    def _offload(self) -> None:
        """Named values leave for the host behind their mark and come back before the first node that reads them."""
        for node in [n for n in self.graph.nodes if n in self.inside and _marked(n, self.policy.keys)]:
            value = node.args[0]
            late = [(u, v) for v in (node, value) for u in v.users if u not in self.inside]
            late += [(u, v) for v in (node, value) for u in v.users if u in self.inside and self._is_copy(u)]
            late = [(u, v) for u, v in late if u.meta.get("custom", {}).get("phase") == "backward"]
            if not late:
                continue
            with self.graph.inserting_after(node):
                away = self._node(offload_raw, (value,), {}, node, "forward")
            first = min((u for u, _ in late), key=lambda n: list(self.graph.nodes).index(n))
            with self.graph.inserting_before(first):
                back = self._node(reload_raw, (away,), {"device": torch.device("cpu")}, node, "backward")
            for user, v in late:
                user.replace_input_with(v, back)

    def _is_copy(self, node: fx.Node) -> bool:
        return bool(node.meta.get("custom", {}).get("recomputed"))

    def _node(self, target, args, kwargs, like: fx.Node, phase: str) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {**like.meta, "custom": {**like.meta.get("custom", {}), "phase": phase, "remat": ()}}
        return node
