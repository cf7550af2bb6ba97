"""What ``fs.remat`` keeps: ``nothing``, ``dots``, ``names(...)``, ``offload(...)``, ``everything``."""

from fsharding.program.remat import Policy, dots, everything, names, nothing, offload

__all__ = ["Policy", "dots", "everything", "names", "nothing", "offload"]
