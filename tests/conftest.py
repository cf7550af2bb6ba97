"""One thread a process: the machine has few cores, and small ops lose more to handing work over than they gain."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

torch.set_num_threads(1)
sys.path.insert(0, os.path.dirname(__file__))
