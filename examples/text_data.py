"""Real text that every machine has: the source of Python's own standard library, as bytes.

Nothing is downloaded. Files are read in sorted order, so that every process sees the same text, and whole files are
held out, so that no held-out line was trained on.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

VOCABULARY = 256
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def standard_library(limit: int = 2_000_000, held_every: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out text, uint8 tensors of at most ``limit`` and ``limit // held_every`` bytes.

    Top-level modules and packages of the standard library, tests and installed packages left out; every
    ``held_every``-th file is held out. Raises FileNotFoundError where Python came without its source.
    """
    root = sysconfig.get_paths()["stdlib"]
    files = list(_sources(root))
    held = files[held_every - 1 :: held_every]
    train = [p for i, p in enumerate(files) if i % held_every != held_every - 1]
    if not held:
        raise FileNotFoundError(f"no source text in the folder of the standard library, {root}")
    return _read(_spread(train), limit), _read(_spread(held), limit // held_every)


def _sources(root: str) -> Iterator[Path]:
    """Python files below a folder, in an order that depends on names alone."""
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(set(inner) - LEFT_OUT)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _spread(files: list[Path], stride: int = 7) -> list[Path]:
    """Neighbours apart, so that a cut after some bytes is a sample of the whole library."""
    return [p for start in range(stride) for p in files[start::stride]]


def _read(files: list[Path], limit: int) -> torch.Tensor:
    parts, size = [], 0
    for path in files:
        if size >= limit:
            break
        parts.append(path.read_bytes()[: limit - size])
        size += len(parts[-1])
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def batch_at(text: torch.Tensor, step: int, rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """The batch of one step: ``rows`` windows at random places; tokens and the byte after each, int64 [rows, length].

    A function of (text, step, seed) alone: every rank and every layout cuts its rows from the same batch.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (rows,), generator=generator)
    return windows(text, starts, length)


def windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> dict[str, torch.Tensor]:
    """Windows of ``length`` bytes at ``starts``, and the byte after each of their positions."""
    pieces = text[starts[:, None] + torch.arange(length + 1)].long()
    return {"tokens": pieces[:, :-1].contiguous(), "labels": pieces[:, 1:].contiguous()}


def bigram_entropy(train: torch.Tensor, held: torch.Tensor, smoothing: float = 1.0) -> float:
    """What a table of byte pairs achieves: the mean negative log-probability of a held-out byte given the one before.

    In nats per byte, with p(b | a) = (count(a, b) + s) / (count(a) + 256 s) counted in the training text (Lidstone's
    smoothing; s = 1 is Laplace's add-one). A model that is worse uses no more than one byte of context.
    """
    pairs = train[:-1].long() * VOCABULARY + train[1:].long()
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double() + smoothing
    logs = (counts / counts.sum(1, keepdim=True)).log()
    return -logs[held[:-1].long(), held[1:].long()].mean().item()
