"""How a raw op is made: schema, CPU reference, CUDA kernel, fake, and an Autograd kernel that refuses gradients.

A raw op without an autograd kernel returns a silently wrong gradient under `torch.func.grad`. So every raw op of this
package raises when a differentiable operand reaches it; the differentiable functions (`autograd.Function`s with
`setup_context`) are the only way in.
"""

import functools
from collections.abc import Callable

import torch

NAMESPACE = "fskernels"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(schema: str, *, cpu: Callable, cuda: Callable, fake: Callable):
    """Register one raw op and return its overload.

    Example: `define("twice(Tensor x) -> Tensor", cpu=lambda x: 2 * x, cuda=..., fake=torch.empty_like)` gives an op
    with `op(torch.ones(2)) == [2, 2]` that raises where `x.requires_grad`.
    """
    name = schema.split("(")[0]
    known = getattr(getattr(torch.ops, NAMESPACE), name, None)
    if known is not None:  # the package is importable under two names (`kernels`, `fsharding.kernels`): one set of ops
        return known.default
    LIBRARY.define(schema)
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def guard(keyset, *args, **kwargs):
        operands = (*args, *kwargs.values())
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in operands):
            raise RuntimeError(
                f"`{NAMESPACE}::{name}` is a raw op without a gradient. Call the differentiable function of `kernels` "
                "(`grouped_mm`, `gather_mm`, `combine`, `expert_mlp`) instead."
            )
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    LIBRARY.impl(name, guard, "Autograd", with_keyset=True)
    return overload


def refuse_vmap(name: str):
    """The `vmap` rule of an op whose rows are already a batch: raises, and says what to do."""

    def vmap(info, in_dims, *args):
        raise NotImplementedError(
            f"`{name}` has no vmap rule: its rows are the batch already. Flatten the mapped dim into the rows (and the "
            "experts, if the weights are mapped too), or loop."
        )

    return staticmethod(vmap)


@functools.lru_cache
def processors(device_index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def programs(device: torch.device) -> int:
    """How many persistent programs fill `device`; 4 on the CPU, where only Triton's interpreter launches kernels."""
    if device.type != "cuda":
        return 4
    return processors(torch.cuda.current_device() if device.index is None else device.index)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` itself, or a copy where its inner stride is not 1 or an outer stride is 0 (an expanded gradient)."""
    if x.is_contiguous():  # the usual case, at once: each launch asks
        return x
    inner = x.stride(-1) == 1 or x.shape[-1] == 1
    expanded = any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))
    return x if inner and not expanded else x.contiguous()


def tma_ready(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can address all `tensors`: 16-byte aligned base and outer strides, inner stride 1."""
    for x in tensors:
        *outer, inner = x.stride()
        if inner != 1 or x.data_ptr() % 16 or x.numel() == 0:
            return False
        size = x.element_size()
        for s in outer:
            if s <= 0 or s * size % 16:
                return False
    return True
