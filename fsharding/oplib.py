"""How the library registers its own operators.

A *raw* op is one opaque node of a traced graph: a kernel, a fake (shapes only) and an Autograd kernel that refuses to
be differentiated, because PyTorch would otherwise return a wrong gradient with no more than a warning. Differentiable
ops are built from raw ops by :func:`multilinear`, whose transposes are again such ops, so that derivatives of any order
work.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence

import torch

from fsharding._compat import below_autograd, no_torch_function
from fsharding.errors import ShardingError

# A fragment may be opened again (a reloaded module); a "DEF" of the same namespace may not.
LIB = torch.library.Library("fsharding", "FRAGMENT")

_lifter: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("fsharding_lifter", default=None)

_aligner: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("fsharding_aligner", default=None)


@contextlib.contextmanager
def lifting(function: Callable):
    """While a trace runs: ``function(tensor)`` stands in for each real tensor that a public op of ours receives."""
    token = _lifter.set(function)
    try:
        yield
    finally:
        _lifter.reset(token)


@contextlib.contextmanager
def aligning(function: Callable):
    """In the body of a ``shard_map``: ``function(values)`` makes the operands of a public op of ours alike in type."""
    token = _aligner.set(function)
    try:
        yield
    finally:
        _aligner.reset(token)


def in_region() -> bool:
    """Are we in the body of a ``shard_map``?"""
    return _aligner.get() is not None


def lifted(*values):
    """Tensors that a function closes over replaced by inputs of the program that is being traced."""
    lift = _lifter.get()
    if lift is None:
        return values
    with no_torch_function():  # recording a tensor is no call of the function that is traced
        return tuple(lift(v) if isinstance(v, torch.Tensor) else v for v in values)


def operands(*values):
    """Operands of a public op as the running trace needs them: lifted, and in a ``shard_map`` of one type."""
    values, align = lifted(*values), _aligner.get()
    return values if align is None else tuple(align(values))


def tensors_in(values):
    """The tensors in nested lists, tuples and dicts."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from tensors_in(value)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and moments are computed: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def raw_op(schema: str, kernel: Callable, fake: Callable, *, cuda: Callable | None = None, tags: Sequence = ()):
    """Register one raw op and return its overload.

    Args:
        schema: ``"name(Tensor x, int k) -> Tensor"``.
        kernel: what runs on any device (on CPU only if ``cuda`` is given).
        fake: the same signature, returns empty tensors of the right shape.
        cuda: the kernel for CUDA tensors, where it differs.
        tags: of ``torch.Tag``.
    """
    name = schema.split("(")[0]
    LIB.define(schema, tags=tags)
    if cuda is None:
        LIB.impl(name, kernel, "CompositeExplicitAutograd")
    else:
        LIB.impl(name, kernel, "CPU")
        LIB.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"fsharding::{name}", fake, lib=LIB)
    overload = getattr(torch.ops.fsharding, name).default

    def refuse(keys, *args, **kwargs):
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(args)):
            raise ShardingError(
                f"`fsharding::{name}` has no derivative of this order. Call the public function instead of the raw op, "
                "or stop the gradient with `.detach()`."
            )
        with below_autograd():
            return overload(*args, **kwargs)

    LIB.impl(name, refuse, "Autograd", with_keyset=True)
    return overload


def _split(args: Sequence) -> tuple[list[int], list[torch.Tensor]]:
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    return where, [args[i] for i in where]


def _join(args: Sequence, where: Sequence[int], tensors: Sequence[torch.Tensor]) -> list:
    full = list(args)
    for i, x in zip(where, tensors, strict=True):
        full[i] = x
    return full


def multilinear(raw: Callable, linear: int, transposes: Callable[[], Sequence[Callable]]) -> Callable:
    """A differentiable op that is linear in each of its first ``linear`` arguments.

    Args:
        raw: the raw op; one tensor out.
        linear: how many leading arguments it is linear in.
        transposes: returns, per such argument, ``f(cotangent, *args) -> cotangent of that argument``, made of
            differentiable ops. A thunk, because an op and its transpose name each other.

    Reverse and forward mode of any order work; ``vmap`` runs the op once per batch entry.
    """

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return raw(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.where, tensors = _split(inputs)
            ctx.args = [None if isinstance(a, torch.Tensor) else a for a in inputs]
            ctx.save_for_backward(*tensors)
            ctx.save_for_forward(*tensors)

        @staticmethod
        def backward(ctx, cotangent):
            args = _join(ctx.args, ctx.where, ctx.saved_tensors)
            pulls = transposes()
            grads = [
                pulls[i](cotangent, *args).to(args[i].dtype) if ctx.needs_input_grad[i] else None for i in range(linear)
            ]
            return *grads, *(None for _ in args[linear:])

        @staticmethod
        def jvp(ctx, *tangents):
            args = _join(ctx.args, ctx.where, ctx.saved_tensors)
            terms = [Op.apply(*args[:i], t, *args[i + 1 :]) for i, t in enumerate(tangents[:linear]) if t is not None]
            return sum(terms[1:], terms[0])

        @staticmethod
        def vmap(info, in_dims, *args):
            pick = lambda b: [a if d is None else a.select(d, b) for a, d in zip(args, in_dims, strict=True)]
            return torch.stack([Op.apply(*pick(b)) for b in range(info.batch_size)]), 0

    Op.__name__ = raw.name().split("::")[-1].split(".")[0]
    return Op.apply
