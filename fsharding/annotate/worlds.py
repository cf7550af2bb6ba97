"""Which simulated world this code runs in: the ranks that one process stands for inside of ``fs.simulate``."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass

from ..errors import ShardingError

__all__ = ["World", "current", "entered", "refuse_closed"]


@dataclass(frozen=True)
class World:
    """One ``fs.simulate`` block: a number of its own, and how many ranks it has."""

    number: int
    ranks: int


entered: contextvars.ContextVar[World | None] = contextvars.ContextVar("fsharding_world", default=None)


def current() -> World | None:
    """The world of the innermost ``fs.simulate`` block; None outside of one."""
    return entered.get()


def refuse_closed(number: int, what: str) -> None:
    """Raises ShardingError for what belongs to a ``fs.simulate`` block other than the one that is running."""
    world = current()
    if number and (world is None or world.number != number):
        raise ShardingError(
            f"{what} belongs to an `fs.simulate` block that has ended: its ranks are gone. Use it "
            "inside of the block, and take plain values out with `fs.device_get`."
        )
