"""Routed compute: the user's functions (see ``routing``)."""

from fsharding.moe.routing import Routing, combine, dispatch, expand, ragged_dot, route

__all__ = ["Routing", "combine", "dispatch", "expand", "ragged_dot", "route"]
