"""Grouped products and the fused expert layer for mixtures of experts, on Triton. Needs only torch and triton."""

from .combine import combine, gather
from .experts import expert_mlp
from .grouped import gather_mm, grouped_mm
from .routing import Routing, from_offsets, route, schedule

__all__ = [
    "Routing", "combine", "expert_mlp", "from_offsets", "gather", "gather_mm", "grouped_mm", "route", "schedule",
]  # fmt: skip
