"""Random numbers that depend on a key and on the *global* index of an element, and on nothing else.

So the same key gives the same array on every layout, device and number of ranks, a block of it can be drawn alone,
and a recomputation replays it. There is no state: split a key, or fold a number into it, to get independent streams.

The generator is the splitmix64 finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA
2014; constants by Stafford, "variant 13") applied twice, the key entering before each pass:

    bits(key, i) = mix(mix(i * GOLDEN + key) ^ mix(key + SALT))

One pass alone would make the streams of two keys shifted copies of each other. Tested in ``tests/test_random.py``:
moments, tails and chi-square of uniform and normal, each single bit, flips of output bits per flipped index and key
bit, correlation of neighbouring keys, splits and indices, and distinctness of 2^20 values. Normal numbers are Box and
Muller's (1958), rounded to float32. Not for cryptography.

A key is a 0-d int64 tensor. Everything here is plain tensor arithmetic on it (int64 wraps), so it traces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .errors import ShardingError
from .oplib import operands, raw_op

__all__ = ["bits", "dropout", "fold_in", "key", "normal", "normal_block", "split", "uniform", "uniform_block"]

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64; 2^64 / golden ratio
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)
_SALT, _SPLIT, _FOLD = 0x632BE59BD9B4E019, 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D  # keep the uses of a key apart
# A draw keeps no more bits than the dtype's mantissa holds, or values near 1 would round up to 1.
_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


# ---- keys ----------------------------------------------------------------------------------------------------------
def key(seed: int, device: torch.device | str | None = None) -> torch.Tensor:
    """A key, a 0-d int64 tensor, from a seed (an int; all 64 bits count)."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ShardingError(f"fs.random.key takes an int as its seed, not {type(seed).__name__}.")
    wrapped = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    return _mix(torch.tensor(wrapped, dtype=torch.int64, device=device) + _GOLDEN)


def split(key: torch.Tensor, n: int = 2) -> torch.Tensor:
    """``n`` independent keys, int64 of shape (n,); unpack it: ``a, b = split(key)``. Do not use ``key`` again."""
    return _hash(_key(key) ^ _SPLIT, torch.arange(n, dtype=torch.int64, device=key.device))


def fold_in(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    """A key for the stream number ``data`` (an int or a 0-d integer tensor) of this key, such as a step or a layer."""
    if not isinstance(data, torch.Tensor):
        data = torch.full((), (data + (1 << 63)) % (1 << 64) - (1 << 63), dtype=torch.int64, device=key.device)
    return _hash(_key(key) ^ _FOLD, data.to(torch.int64))


# ---- whole arrays --------------------------------------------------------------------------------------------------
def _draw(key: torch.Tensor, kind: str, shape: Sequence[int], dtype: torch.dtype, device) -> torch.Tensor:
    """One node of a traced program, so that a partition draws each rank's block alone."""
    (key,) = operands(_key(key) if device is None else _key(key).to(device))
    return draw_raw(key.detach(), list(shape), kind, dtype)


def bits(key: torch.Tensor, shape: Sequence[int], device: torch.device | str | None = None) -> torch.Tensor:
    """64 random bits an element, int64, on the key's device by default."""
    return _draw(key, "bits", shape, torch.int64, device)


def uniform(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32,
            device: torch.device | str | None = None) -> torch.Tensor:
    """Uniform numbers in [0, 1), never 1 in any dtype; on the key's device by default."""
    if dtype not in _MANTISSA:
        raise ShardingError(f"Uniform numbers come in {', '.join(map(str, _MANTISSA))}, not in {dtype}.")
    return _draw(key, "uniform", shape, dtype, device)


def normal(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32,
           device: torch.device | str | None = None) -> torch.Tensor:
    """Numbers of mean 0 and variance 1, rounded to float32 (the largest is 6.7), then to ``dtype``; on the key's
    device by default."""
    if not dtype.is_floating_point:
        raise ShardingError(f"Normal numbers come in floating dtypes, not in {dtype}.")
    return _draw(key, "normal", shape, dtype, device)


def dropout(key: torch.Tensor, x: torch.Tensor, rate: float) -> torch.Tensor:
    """Zero each element with probability ``rate`` and scale the rest by 1 / (1 - rate); keeps shape and dtype."""
    if not 0 <= rate < 1:
        raise ShardingError(f"The dropout rate is {rate}; it lies in [0, 1).")
    keep = uniform(key, x.shape, device=x.device) >= rate
    return torch.where(keep, x * (1 / (1 - rate)), torch.zeros_like(x))


# ---- blocks of the same arrays -------------------------------------------------------------------------------------
def bits_block(key: torch.Tensor, global_shape: Sequence[int], starts: Sequence[int], local_shape: Sequence[int],
               device: torch.device | str | None = None) -> torch.Tensor:
    """The block of ``bits(key, global_shape)`` that begins at ``starts`` and has ``local_shape``."""
    return _hash(_key(key).to(device) if device is not None else _key(key),
                 _indices(global_shape, starts, local_shape, key.device if device is None else device))


def uniform_block(key: torch.Tensor, global_shape: Sequence[int], starts: Sequence[int], local_shape: Sequence[int],
                  dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> torch.Tensor:
    """A block of ``uniform(key, global_shape, dtype)``: bit for bit the slice of the whole, drawn alone."""
    if dtype not in _MANTISSA:
        raise ShardingError(f"Uniform numbers come in {', '.join(map(str, _MANTISSA))}, not in {dtype}.")
    kept = _MANTISSA[dtype]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    raw = _shift(bits_block(key, global_shape, starts, local_shape, device), 64 - kept)
    return (raw.to(wide) * 2.0 ** -kept).to(dtype)


def normal_block(key: torch.Tensor, global_shape: Sequence[int], starts: Sequence[int], local_shape: Sequence[int],
                 dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> torch.Tensor:
    """A block of ``normal(key, global_shape, dtype)``: bit for bit the slice of the whole, drawn alone."""
    if not dtype.is_floating_point:
        raise ShardingError(f"Normal numbers come in floating dtypes, not in {dtype}.")
    raw = bits_block(key, global_shape, starts, local_shape, device)
    # In float64, although float32 holds the result: logarithms and cosines of float32 differ in the last bit between
    # CPU and GPU (a quarter of all values on an H200), and a seed should mean the same numbers on both. Half a step
    # keeps the logarithm finite.
    radius = torch.sqrt(-2.0 * torch.log((_shift(raw, 32).to(torch.float64) + 0.5) * 2.0 ** -32))
    angle = (raw & 0xFFFFFFFF).to(torch.float64) * (2.0 * math.pi * 2.0 ** -32)
    return (radius * torch.cos(angle)).to(torch.float32).to(dtype)


# ---- the generator -------------------------------------------------------------------------------------------------
def _hash(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return _mix(_mix(index * _GOLDEN + key) ^ _mix(key + _SALT))


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_A
    z = (z ^ _shift(z, 27)) * _MIX_B
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, places: int) -> torch.Tensor:
    # >> on int64 copies the sign; a logical shift drops the copies
    return (z >> places) & ((1 << (64 - places)) - 1)


def _indices(global_shape: Sequence[int], starts: Sequence[int], local_shape: Sequence[int], device) -> torch.Tensor:
    """Row-major global indices of a block, int64, contiguous."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    step = 1
    for dim in reversed(range(len(global_shape))):
        along = torch.arange(starts[dim], starts[dim] + local_shape[dim], dtype=torch.int64, device=device) * step
        index = along.view(-1, *(1,) * (len(global_shape) - 1 - dim)) + index
        step *= global_shape[dim]
    return index


def _key(key: torch.Tensor) -> torch.Tensor:
    if not isinstance(key, torch.Tensor) or key.dtype != torch.int64 or key.dim() != 0:
        have = f"{key.dtype} of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else type(key).__name__
        raise ShardingError(f"A random key is a 0-d int64 tensor, not {have}. Make one with fs.random.key(seed), and "
                            "unpack or index what split returns.")
    return key


# ---- as one op -----------------------------------------------------------------------------------------------------
def draw_block(key, kind, global_shape, starts, local_shape, dtype) -> torch.Tensor:
    """A block of "bits", "uniform" or "normal" numbers; see the functions of these names."""
    if kind == "bits":
        return bits_block(key, global_shape, starts, local_shape)
    return (uniform_block if kind == "uniform" else normal_block)(key, global_shape, starts, local_shape, dtype)


draw_raw = raw_op(
    "draw(Tensor key, int[] shape, str kind, ScalarType dtype) -> Tensor",
    lambda key, shape, kind, dtype: draw_block(key, kind, shape, (0,) * len(shape), shape, dtype),
    lambda key, shape, kind, dtype: key.new_empty(shape, dtype=dtype),
)
