"""Bridges to other libraries. Each is imported only when one of its functions is called."""

from fsharding.interop import jax

__all__ = ["jax"]
