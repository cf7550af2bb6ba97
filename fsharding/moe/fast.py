"""The bridge to the Triton kernels (``fsharding.kernels``): found once, used for bfloat16 on CUDA."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

PACKAGE = "fsharding.kernels"


@functools.cache
def _package() -> ModuleType | None:
    """The kernels' package, None where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
    # A checkout that is not installed: the folder lies beside the package (pyproject maps it into place).
    folder = Path(__file__).resolve().parents[2] / "kernels"
    if not (folder / "registry.py").is_file():
        return None
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[PACKAGE] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def kernel(module: str, name: str):
    """A function of the kernels' package, such as ``kernel("rows", "rows_launch")``.

    Triton launches on the current device, whatever its operands' device is; this makes the two the same.
    """
    launch = getattr(importlib.import_module(f"{_package().__name__}.{module}"), name)

    @functools.wraps(launch)
    def run(first, *args, **kwargs):
        if first.device.index == torch.cuda.current_device():
            return launch(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return launch(first, *args, **kwargs)

    return run


def serves(x: torch.Tensor) -> bool:
    """Do the kernels take operands like ``x``? bfloat16 on CUDA; everything else runs by the references."""
    return x.is_cuda and x.dtype == torch.bfloat16 and _package() is not None


def present() -> bool:
    """Are the kernels there at all? Those for integers do not ask for a dtype."""
    return _package() is not None
