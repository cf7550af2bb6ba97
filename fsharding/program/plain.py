"""Sharded functions without tracing: plain single-device PyTorch over gathered values, for a debugger."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsharding import tree as trees
from fsharding.annotate.place import device_get, device_put, spec_of
from fsharding.program.call import Call, abstract, below_argument, is_wide, tails

_disabled: contextvars.ContextVar[bool] = contextvars.ContextVar("fsharding_disable_jit", default=False)


@contextlib.contextmanager
def disable_jit():
    """Inside, sharded functions run as plain single-device PyTorch over gathered values, for ``pdb`` and prints.

    Every rank computes everything. Results that correspond to a stored argument (same key path, shape and dtype) are
    placed as it was.
    """
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


def is_disabled() -> bool:
    return _disabled.get()


def run(call: Call, fn: Callable) -> Any:
    """``fn`` on the full values of a call's arguments, on the mesh's device."""
    device, wide = call.mesh.device, is_wide(call.leaves)
    leaves = [
        x.to(device)
        if isinstance(x, torch.Tensor)
        else torch.tensor(x, dtype=abstract(path, x, wide)[1], device=device)
        for path, x in zip(call.paths, device_get(call.leaves), strict=True)
    ]
    with torch.device(device):
        out = call.apply(fn, leaves)
    known = {
        (below_argument(p), tuple(x.shape), x.dtype): spec_of(x)
        for p, x, at_rest in zip(call.paths, call.leaves, call.stored, strict=True)
        if at_rest and isinstance(x, DTensor)
    }

    def place(path, x):
        keys = [(t, tuple(x.shape), x.dtype) for t in tails(path)] if isinstance(x, torch.Tensor) else []
        spec = next((known[k] for k in keys if k in known), None)
        return x if spec is None else device_put(x, call.mesh, spec)

    return trees.map_with_path(place, out)
