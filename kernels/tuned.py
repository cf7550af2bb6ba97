"""Measured choices, written by `python -m kernels.tune`; empty entries fall back to the defaults of `table.py`."""

TUNED: dict[tuple[str, int, int, int, int], dict] = {}
