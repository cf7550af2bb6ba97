"""Runs `interpreter_cases.py` under Triton's interpreter, which must be chosen before the kernels are imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def test_kernels_under_the_interpreter():
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "interpreter_cases.py"]
    done = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
