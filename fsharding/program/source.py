"""Where the user's code stands: source lines and phases for every node of a trace."""

from __future__ import annotations

import bisect
import functools
import os
import sys
import traceback

import einops
import optree

from fsharding import _compat as compat

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MODELS = os.path.join(_OURS, "models")
_STANDARD = os.path.dirname(os.__file__)
# Code that programs write; other names in angle brackets are what a user typed (a prompt, a notebook, an ``exec``).
_GENERATED = ("<frozen", "<string", "<eval_with_key", "<sharded program", "<__array_function__")
_SKIP = (
    compat.TORCH_ROOT,
    *(os.path.dirname(module.__spec__.origin or "") for module in (optree, einops)),
    *(os.path.join(_STANDARD, name) for name in ("contextlib", "functools")),
)


@functools.cache
def is_user_file(name: str) -> bool:
    """Is this a file of the user's (or of a model, which is code that a user could have written)?"""
    if name.startswith(_GENERATED):
        return False
    if name.startswith(_OURS):
        return name.startswith(_MODELS)
    return not name.startswith(_SKIP)


def user_line(frame=None) -> str | None:
    """``file:line`` of the innermost user frame, or None."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def error_line(error: BaseException) -> str | None:
    """``file:line`` of the innermost user frame that an exception passed through."""
    lines = [f"{s.filename}:{s.lineno}" for s in traceback.extract_tb(error.__traceback__) if is_user_file(s.filename)]
    return lines[-1] if lines else None


def annotate(tracer) -> None:
    """Make ``tracer`` note the user's line and the phase of every node that it creates.

    A backward node has no user frame: it takes the line of the forward op with the autograd sequence number that the
    engine says it is the derivative of.
    """
    create, numbers, lines = tracer.create_node, [], {}

    def create_node(*args, **kwargs):
        node = create(*args, **kwargs)
        backward = compat.backward_sequence()
        if backward is None:
            number, line = compat.next_sequence() - 1, user_line()
            if number not in lines:
                bisect.insort(numbers, number)
                lines[number] = line
        else:
            at = bisect.bisect_left(numbers, backward)
            line = lines[numbers[at]] if at < len(numbers) else None
        node.meta["custom"] = {"phase": "forward" if backward is None else "backward", "line": line}
        return node

    tracer.create_node = create_node


def line_of(node) -> str | None:
    return node.meta.get("custom", {}).get("line")


def phase_of(node) -> str:
    return node.meta.get("custom", {}).get("phase", "forward")
