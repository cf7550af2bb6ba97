"""What is checked of the arguments of every call of a sharded function."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fsharding import _compat as compat
from fsharding.annotate.place import check_alive
from fsharding.comm.storage import real_axes
from fsharding.errors import ShardingError
from fsharding.program.call import Call
from fsharding.program.partition import Input, LocalProgram
from fsharding.program.trace import GlobalProgram


def check_leaves(call: Call) -> None:
    """Refuse transforms from outside, dead leaves, one tensor at two places."""
    if compat.under_functorch() or any(compat.has_tangent(x) for x in call.leaves if isinstance(x, torch.Tensor)):
        raise ShardingError(
            f"the sharded function `{call.name}` is called inside a transform of its result (`torch.func`, `vmap`, "
            "forward mode). Put the transform inside: `fs.shard(torch.func.vmap(f), mesh)`; `fs.grad` and "
            "`fs.value_and_grad` also take a sharded function as it is."
        )
    seen: dict[int, str] = {}
    for path, x, at_rest in zip(call.paths, call.leaves, call.stored, strict=True):
        if not isinstance(x, torch.Tensor):
            continue
        check_alive(path, x)
        if at_rest and seen.setdefault(identity_of(x), path) != path:
            raise ShardingError(
                f"{seen[identity_of(x)]} and {path} are one tensor in a stored tree. Tie weights by using one leaf "
                "twice in the function; or clone it to have two."
            )


def refuse_gradients(call: Call, why: str) -> None:
    """Where autograd cannot follow: a leaf that requires grad would get none without a word."""
    for path, x in zip(call.paths, call.leaves, strict=True):
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise ShardingError(f"{path} requires grad: {why}. Use `torch.no_grad()`, or `.detach()` it.")


def warn_if_replicated(name: str, program: GlobalProgram, local: LocalProgram, inputs: Sequence[Input]) -> None:
    """A program that gathers weights for rows that every rank holds computes everything everywhere."""
    if any("manual" in n.meta.get("custom", {}) for n in program.graph.graph.nodes):
        return  # a `shard_map` says itself what each rank computes
    rows = any(i.kind == "rows" and any(real_axes(local.mesh, axes) for axes in i.dims) for i in inputs)
    gathers = any(n.meta.get("custom", {}).get("collective") == "all_gather" for n in local.graph.nodes)
    if local.mesh.size > 1 and not rows and gathers:
        warnings.warn(
            f"`{name}` got no argument whose rows are split over the mesh: every rank computes everything. Place the "
            "batch with `fs.device_put(batch, mesh, P(mesh.data_axes))` or `fs.from_local`.",
            stacklevel=4,
        )


def check_memory(call: Call, donated: Sequence[int], constants: Sequence[torch.Tensor]) -> None:
    """A donated leaf is written: nothing else that the program reads may lie there."""
    if not donated:
        return
    written = set(donated)
    tensors = [
        (p, x, i in written)
        for i, (p, x) in enumerate(zip(call.paths, call.leaves, strict=True))
        if isinstance(x, torch.Tensor)
    ]
    tensors += [("a tensor that the function closes over", c, False) for c in constants]
    if (found := overlapping(tensors)) is not None:
        raise ShardingError(
            f"{found[0]} and {found[1]} share memory, and one of them is donated: the result would overwrite the "
            "other. Clone one of them, or leave the argument out of `donate_argnums`."
        )


def overlapping(tensors: list[tuple[str, torch.Tensor, bool]]) -> tuple[str, str] | None:
    """Names of two tensors that share memory, one of which (the flag) is to be written; None if there are none."""
    spans: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, x, written in tensors:
        local = compat.local_of(x) if isinstance(x, DTensor) else x
        if local.numel() and local.device.type != "meta":
            size = 1 + sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True))
            start = local.data_ptr()
            span = (start, start + size * local.element_size(), name, written)
            spans.setdefault(local.untyped_storage().data_ptr(), []).append(span)
    for group in spans.values():
        group.sort()
        for (_, end, first, one), (start, _, second, other) in zip(group, group[1:], strict=False):
            if start < end and (one or other):
                return first, second
    return None


def identity_of(x) -> int:
    """What two arguments share if they are one tensor: its object, or the memory of its local block."""
    local = compat.local_of(x) if isinstance(x, DTensor) else None
    return id(x) if local is None or not local.numel() else local.data_ptr()
