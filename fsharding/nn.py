"""Functions that models are made of, where PyTorch's own would hold or move too much: ``cross_entropy``."""

from fsharding.program.cross_entropy import cross_entropy

__all__ = ["cross_entropy"]
