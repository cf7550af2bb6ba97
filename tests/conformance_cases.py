"""The conformance table: functions that must equal one device on every layout, and how each of them gets there.

A case is a function of ``w``, a stored parameter, ``x``, 24 floating rows, and ``y``, 24 integer rows below 8. The
functions stand in ``cases_*.py``, by what they are given (``KINDS``). Each is expected to be partitioned by rules
alone where the batch is split over data axes, but for those in ``FALLBACK`` (right, recorded, warned about, an error
under ``strict``) and ``REFUSED`` (an error that names the op and the line).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cases_algebra as algebra
import cases_indexing as indexing
import cases_losses as losses
import cases_nn as nn
import torch

ROWS = 24
KINDS = {  # what a case takes, the sizes of w and x, the dim of w that a model axis cuts
    "product": (lambda f: lambda w, x, y: f(x @ w, y), (6, 8), (ROWS, 6), 1),
    "parameter": (lambda f: f, (6, 8), (ROWS, 6), 1),
    "matrices": (lambda f: lambda w, x, y: f(x, w, y), (4, 4), (ROWS, 4, 4), 1),
    "images": (lambda f: lambda w, x, y: f(x, w, y), (4, 4, 3, 3), (ROWS, 4, 6, 6), 0),
    "sequences": (lambda f: lambda w, x, y: f(x, w, y), (8, 24), (ROWS, 5, 8), 1),
}
GROUPS = {
    "losses": ("product", losses.LOSSES),
    "statistics": ("product", losses.STATISTICS),
    "indexing": ("product", indexing.INDEXING),
    "shapes": ("product", indexing.SHAPES),
    "order": ("product", indexing.ORDERED),
    "in place": ("product", indexing.IN_PLACE),
    "products": ("parameter", algebra.PRODUCTS),
    "elementwise": ("parameter", algebra.POINTWISE),
    "transforms": ("parameter", algebra.TRANSFORMS),
    "linear algebra": ("matrices", algebra.ALGEBRA),
    "images": ("images", nn.IMAGES),
    "sequences": ("sequences", nn.SEQUENCES),
}
FALLBACK: set[str] = set()
REFUSED: dict[str, tuple[str, str]] = {}


@dataclass(frozen=True)
class Case:
    """``run(w, x, y)``, its kind (see ``KINDS``) and what it is expected to be: "rule", "fallback" or "refused"."""

    name: str
    group: str
    kind: str
    run: Callable
    expected: str

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same numbers in every dtype: all of them are exact in bfloat16."""
        _, w, x, _ = KINDS[self.kind]
        g = torch.Generator().manual_seed(1)
        w, x = (torch.randn(*n, generator=g).bfloat16().to(dtype) for n in (w, x))
        return w, x, (torch.arange(ROWS) * 5 + 3) % 8


def _expected(name: str) -> str:
    return "refused" if name in REFUSED else "fallback" if name in FALLBACK else "rule"


CASES: dict[str, Case] = {}
for _group, (_kind, _functions) in GROUPS.items():
    for _name, _f in _functions.items():
        assert _name not in CASES, f"two cases are called {_name}"
        CASES[_name] = Case(_name, _group, _kind, KINDS[_kind][0](_f), _expected(_name))
