"""The examples of the local view compare themselves with one device: here on simulated and on real ranks."""

import importlib.util
import os
import subprocess
import sys

import pytest
from helpers import run_ranks

import fsharding as fs

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXAMPLES = ["data_parallel", "fsdp", "tensor_parallel", "ring_attention"]


def load(name):
    spec = importlib.util.spec_from_file_location(name, os.path.join(ROOT, "examples", f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", EXAMPLES)
def test_simulated(name, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with fs.simulate(8):
        load(name).main()
    assert "as on one device" in capsys.readouterr().out
    with open(os.path.join(ROOT, "examples", f"{name}.py")) as file:
        assert len(file.readlines()) <= 80


def on_ranks(rank, world):
    for name in EXAMPLES:
        load(name).main()
    return True


def test_on_real_ranks():
    assert run_ranks(2, on_ranks, timeout=200) == [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_as_scripts(name):
    environment = {**os.environ, "PYTHONPATH": ROOT, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("WORLD_SIZE", None)
    script = os.path.join(ROOT, "examples", f"{name}.py")
    launchers = [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]]
    for launcher in launchers:
        done = subprocess.run([sys.executable, *launcher, script], env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0 and b"as on one device" in done.stdout, done.stderr.decode()[-2000:]
