"""The example: its text helpers against brute force, and a very short run of the script on two ranks."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import text_data  # noqa: E402  (a script's neighbour, not a package)


def as_text(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("smoothing", [1.0, 0.25])
def test_bigram_entropy_is_the_brute_force_one(smoothing):
    train, held = b"abracadabra, said abraham", b"a bad cab had a rabid bard"
    total = 0.0
    for a, b in zip(held, held[1:], strict=False):
        pairs = sum(x == a and y == b for x, y in zip(train, train[1:], strict=False))
        firsts = sum(x == a for x in train[:-1])
        total -= math.log((pairs + smoothing) / (firsts + 256 * smoothing))
    got = text_data.bigram_entropy(as_text(train), as_text(held), smoothing)
    assert got == pytest.approx(total / (len(held) - 1), rel=1e-12)


def test_bigram_entropy_of_known_texts():
    assert text_data.bigram_entropy(as_text(b"x"), as_text(b"any text")) == pytest.approx(math.log(256))
    assert text_data.bigram_entropy(as_text(b"ab" * 10**5), as_text(b"abab")) < 0.01


def test_the_text_is_the_same_each_time_and_held_out_files_are_apart():
    train, held = text_data.standard_library(limit=200_000)
    again, _ = text_data.standard_library(limit=200_000)
    assert torch.equal(train, again)
    assert len(train) == 200_000 and len(held) == 20_000
    line = bytes(held[:400].tolist())
    assert line not in bytes(train.tolist())


def test_batches_depend_on_step_and_seed_alone():
    text = torch.arange(251, dtype=torch.uint8)
    a, b = (text_data.batch_at(text, 3, 5, 16, seed=1) for _ in range(2))
    assert torch.equal(a["tokens"], b["tokens"]) and a["tokens"].dtype == torch.int64
    assert a["tokens"].shape == a["labels"].shape == (5, 16)
    assert torch.equal(a["labels"], a["tokens"] + 1)
    for other in (text_data.batch_at(text, 4, 5, 16, seed=1), text_data.batch_at(text, 3, 5, 16, seed=2)):
        assert not torch.equal(other["tokens"], a["tokens"])


SMALL = "--layers 1 --hidden 16 --heads 2 --kv-heads 1 --experts 4 --expert-hidden 16 --batch 8 --seq 32 --steps 4"


TENSOR = "--tp 2 --heads 4 --kv-heads 2"


@pytest.mark.parametrize("extra", ["", "--layout hsdp --micro-batches 2", "--dispatcher gather",
                                   pytest.param(TENSOR, marks=pytest.mark.slow)])  # fmt: skip
def test_a_short_run_on_two_ranks_equals_one_process(extra):
    command = [sys.executable, str(EXAMPLES / "train_moe.py"), "--ranks", "2", "--device", "cpu", *SMALL.split()]
    run = subprocess.run([*command, *extra.split()], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    parity = re.search(r"parity: max \|Δloss\| (\S+)  max \|Δgrad_norm\| (\S+)", run.stdout)
    assert parity, run.stdout
    assert max(map(float, parity.groups())) <= 1e-5
    for text in ("collectives of one step", "held-out loss", "bigram entropy", "sample:"):
        assert text in run.stdout
