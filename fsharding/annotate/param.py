"""``Param``: a parameter described before it is allocated; ``init`` then builds the shards alone.

    tree = {"embed": Param((vocab, width), axes=("vocab", "embed")), "norm": Param((width,), init="ones")}
    params = init(tree, mesh, specs, seed=0)
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import random
from .. import tree as trees
from ..errors import ShardingError
from .mesh import Mesh
from .place import wrap_blocks
from .spec import P, check_sizes, local_slices, normalize

__all__ = ["Param", "ShapeDtype", "as_dtype", "init"]

_CHUNK = 1 << 22  # elements drawn at once: the int64 temporaries of a draw are several times its result
_SHORT = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16", "f32": "float32",
          "fp32": "float32", "float": "float32", "f64": "float64", "fp64": "float64", "double": "float64"}


def find_dtype(dtype: object) -> torch.dtype | None:
    """A torch dtype from itself or from its name: ``"bfloat16"``, ``"bf16"``; None for anything else."""
    found = getattr(torch, _SHORT.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) else None


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """As :func:`find_dtype`. Raises ShardingError where that is None."""
    found = find_dtype(dtype)
    if found is None:
        raise ShardingError(f"The dtype {dtype!r} is not known. Use a torch.dtype or its name, such as torch.bfloat16, "
                            '"bfloat16", "bf16", "float32".')
    return found


@dataclasses.dataclass(frozen=True)
class ShapeDtype:
    """The shape, dtype and, if placed, spec of a value without its data, for lowering."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    spec: P | None = None

    def __post_init__(self):
        object.__setattr__(self, "shape", _shape(self.shape))
        object.__setattr__(self, "dtype", as_dtype(self.dtype))

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter: shape, dtype, one logical axis name (or None) per dim for layouts, and how it starts.

    ``init`` is one of

    * ``"normal"`` (standard deviation 0.02), ``("normal", std)``; ``("uniform", bound)``, over [-bound, bound);
    * ``"zeros"``, ``"ones"``, ``("constant", value)``;
    * a function ``f(key, global_shape, starts, local_shape, dtype, device)`` that returns the block of the global value
      that begins at ``starts``, such as ``fs.random.normal_block``. It must depend on global indices only.

    Raises ShardingError for names that do not match the shape, and for an unknown dtype or init.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    axes: tuple[str | None, ...] | None = None
    init: str | tuple[str, float] | Callable[..., torch.Tensor] = "normal"

    def __post_init__(self):
        object.__setattr__(self, "shape", _shape(self.shape))
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        axes = (None,) * len(self.shape) if self.axes is None else self.axes
        if isinstance(axes, str) or not all(axis is None or isinstance(axis, str) for axis in axes):
            raise ShardingError(f"Param.axes is {axes!r}; it is a tuple with a logical name or None per dim.")
        if len(axes) != len(self.shape):
            raise ShardingError(f"Param.axes {tuple(axes)} has {len(axes)} names for the {len(self.shape)} dims of "
                                f"{self.shape}. Give one name, or None, per dim.")
        object.__setattr__(self, "axes", tuple(axes))
        _filler(self.init)

    @property
    def ndim(self) -> int:
        return len(self.shape)


def init(axes_tree: Any, mesh: Mesh, specs: Any = None, seed: int = 0) -> Any:
    """Build the parameters that a tree of ``Param`` describes, as DTensor leaves; each rank makes its shards only.

    The values depend on ``seed`` and on each leaf's key path, shape and global index, not on mesh, specs or world size,
    nor on the other leaves. ``specs`` is a P or a prefix tree of them. Nothing is communicated.

    Raises ShardingError, with the key path, for leaves that are no Param and for specs that do not fit.
    """
    paths, leaves, treedef = trees.flatten_with_paths(axes_tree)
    key, out = random.key(seed), []
    for path, param, spec in zip(paths, leaves, trees.broadcast_prefix(specs, axes_tree, "specs"), strict=True):
        if not isinstance(param, Param):
            raise ShardingError(f"{path or 'The value'} is a {type(param).__name__}, not a Param. Describe it with "
                                "Param(shape, ...); place tensors that exist with device_put.")
        dims = normalize(spec, param.ndim, mesh.axis_names, path)
        check_sizes(param.shape, dims, mesh.shape, mesh.model_axes, path)
        own = random.fold_in(key, _number(path))

        def draw(rank, param=param, dims=dims, own=own, path=path):
            block = local_slices(param.shape, dims, mesh.shape, mesh.coordinates(rank))
            return _draw(param, own, block, mesh.device, path)

        out.append(wrap_blocks(draw, mesh, dims, param.shape))
    return trees.unflatten(treedef, out)


def _draw(param: Param, key: torch.Tensor, block: tuple[slice, ...], device: torch.device, path: str) -> torch.Tensor:
    starts, shape = [s.start for s in block], [s.stop - s.start for s in block]
    fill = _filler(param.init)
    local = torch.empty(shape, dtype=param.dtype, device=device)
    row = math.prod(shape[1:])
    rows = max(1, _CHUNK // max(row, 1)) if shape else 1
    for first in range(0, shape[0] if shape else 1, rows):
        if shape:
            part = local[first:first + rows]
            new = fill(key, param.shape, [starts[0] + first, *starts[1:]], list(part.shape), param.dtype, device)
        else:
            part, new = local, fill(key, (), [], [], param.dtype, device)
        if tuple(new.shape) != tuple(part.shape):
            raise ShardingError(f"The init function of {path} returned the shape {tuple(new.shape)} for a block of "
                                f"{tuple(part.shape)}. It gets (key, global_shape, starts, local_shape, dtype, device) "
                                "and returns a tensor of local_shape.")
        part.copy_(new)
    return local


def _filler(kind: Any) -> Callable[..., torch.Tensor]:
    if callable(kind):
        return kind
    name, value = kind if isinstance(kind, tuple) and len(kind) == 2 else (kind, None)
    constants = {"zeros": 0.0, "ones": 1.0, "constant": value}
    if name in constants and (value is None) == (name != "constant"):
        return lambda key, shape, starts, local, dtype, device: torch.full(
            local, constants[name], dtype=dtype, device=device)
    if name == "normal":
        std = 0.02 if value is None else value
        return lambda key, shape, starts, local, dtype, device: random.normal_block(
            key, shape, starts, local, torch.float32, device).mul_(std)
    if name == "uniform" and value is not None:
        return lambda key, shape, starts, local, dtype, device: random.uniform_block(
            key, shape, starts, local, torch.float32, device).mul_(2).sub_(1).mul_(value)
    raise ShardingError(f'Param.init is {kind!r}. Use "normal", ("normal", std), ("uniform", bound), "zeros", "ones", '
                        '("constant", value) or a function (key, global_shape, starts, local_shape, dtype, device).')


def _number(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "little", signed=True)


def _shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, int) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise ShardingError(f"The shape {shape!r} is not a tuple of sizes (ints that are not negative).")
    return tuple(shape)
