"""Private torch APIs that tracing needs, one function each; ``tests/test_torch_contract.py`` asserts every one of them.

Seen to hold on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

import torch
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes

TORCH_ROOT = os.path.dirname(torch.__file__)


def current_tracer():
    """The fx tracer of the ``make_fx`` that is running, or None."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


def backward_sequence() -> int | None:
    """Sequence number of the forward op whose derivative is running now; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_sequence() -> int:
    return torch.autograd._get_sequence_nr()


def under_functorch() -> bool:
    """Is a ``torch.func`` transform running around us?"""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(x: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_fake(x: torch.Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


def new_fake_mode(symbolic: bool = False):
    """A fake mode; ``symbolic`` allows data-dependent sizes made by our own ops."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv() if symbolic else None
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True, shape_env=env, static_shapes=True)


@contextlib.contextmanager
def no_modes():
    """Leave every dispatch mode and ``torch.func`` level, as for making a tensor that no trace should see."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def track_constant(fake: torch.Tensor, real: torch.Tensor, name: str):
    """Record ``fake`` in the running trace as the module attribute ``name`` that holds ``real``."""
    tracer = current_tracer()
    setattr(tracer.root, name, real)
    proxy = tracer.create_proxy("get_attr", name, (), {})
    proxy_tensor.track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
    return fake


@contextlib.contextmanager
def watch_gradients(after: Callable):
    """``after(gradient, input)`` replaces each gradient that a ``torch.func`` transform computes."""
    inner = eager_transforms._autograd_grad

    def outer(outputs, inputs, *args, **kwargs):
        grads = inner(outputs, inputs, *args, **kwargs)
        return tuple(after(g, x) for g, x in zip(grads, inputs, strict=True))

    eager_transforms._autograd_grad = outer
    try:
        yield
    finally:
        eager_transforms._autograd_grad = inner


FAKE_ERRORS = (
    torch._subclasses.fake_tensor.DataDependentOutputException,
    torch._subclasses.fake_tensor.DynamicOutputShapeException,
    torch._subclasses.fake_tensor.UnsupportedOperatorException,
)


def frame(depth: int = 1):
    return sys._getframe(depth + 1)
