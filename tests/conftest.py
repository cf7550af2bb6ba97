"""One thread a process: the machine has few cores, and small ops lose more to handing work over than they gain."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
sys.path.insert(0, os.path.dirname(__file__))


@pytest.fixture(autouse=True)
def _on_cpu(request, monkeypatch):
    """All but the kernel tests run on the CPU, also on a machine with GPUs: what is exact is tested there."""
    if "kernels" not in request.path.parts:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def _seeded():
    """The same numbers in every run, whatever ran before."""
    torch.manual_seed(0)
