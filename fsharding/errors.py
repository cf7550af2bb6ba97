"""The one error that users of the library see."""

from __future__ import annotations


class ShardingError(ValueError):
    """A mistake in specs, sizes, meshes or in what a function does under ``shard``.

    The message says what is wrong, where (key path of the leaf or the user's source line), why, and what to do.
    """
