"""Routed compute: the user's functions (see ``routing`` and ``expert_mlp``)."""

from fsharding.moe.expert_mlp import mlp
from fsharding.moe.routing import Routing, combine, dispatch, expand, ragged_dot, route

__all__ = ["Routing", "combine", "dispatch", "expand", "mlp", "ragged_dot", "route"]
