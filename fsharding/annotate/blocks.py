"""Moving the overlaps of old and new blocks between ranks: what ``reshard`` does for one value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .mesh import Mesh
from .spec import Dims, axes_of, local_slices, numel, overlap, relative

__all__ = ["BlockLayout", "as_bytes", "exchange_blocks", "keep_overlap"]


class BlockLayout:
    """Which rank holds which block of one value."""

    def __init__(self, shape: Sequence[int], mesh: Mesh, dims: Dims):
        self.shape, self.mesh, self.dims = tuple(shape), mesh, dims
        self.cut = mesh.sort_axes(axes_of(dims))
        self.free = tuple(axis for axis in mesh.axis_names if axis not in self.cut)
        self.copies = mesh.axes_size(self.free)

    def block(self, rank: int) -> tuple[slice, ...]:
        return local_slices(self.shape, self.dims, self.mesh.shape, self.mesh.coordinates(rank))

    def sends(self, sender: int, receiver: int) -> bool:
        """Of all ranks that hold the sender's block, is this the one that serves the receiver?

        The receiver itself if it is among them, else one by the receiver's number, so that copies share the work.
        """
        mine, theirs = self.mesh.coordinates(sender), self.mesh.coordinates(receiver)
        if all(mine[axis] == theirs[axis] for axis in self.cut):
            return sender == receiver
        place = 0
        for axis in self.free:
            place = place * self.mesh.shape[axis] + mine[axis]
        return place == receiver % self.copies


def keep_overlap(local: torch.Tensor, held: tuple[slice, ...], wanted: tuple[slice, ...]) -> torch.Tensor:
    """A new block with what this rank holds of it already."""
    new = local.new_empty([s.stop - s.start for s in wanted])
    if cut := overlap(held, wanted):
        new[relative(cut, wanted)].copy_(local[relative(cut, held)])
    return new


def exchange_blocks(local: torch.Tensor, source: BlockLayout, target: BlockLayout, rank: int,
                    mesh: Mesh) -> torch.Tensor:
    """This rank's new block: what it holds of it, and what others send, in one all-to-all."""
    held, wanted = source.block(rank), target.block(rank)
    out_cuts = [overlap(held, target.block(r)) if r != rank and source.sends(rank, r) else None
                for r in range(mesh.size)]
    in_cuts = [overlap(wanted, source.block(r)) if r != rank and source.sends(r, rank) else None
               for r in range(mesh.size)]
    pieces = [local[relative(cut, held)].reshape(-1) for cut in out_cuts if cut]
    width = local.element_size()
    sent = as_bytes(torch.cat(pieces)) if pieces else local.new_empty(0, dtype=torch.uint8)
    send_sizes, get_sizes = ([numel(cut) * width for cut in cuts] for cuts in (out_cuts, in_cuts))
    got = sent.new_empty(sum(get_sizes))
    dist.all_to_all_single(got, sent, get_sizes, send_sizes, group=mesh.group(mesh.axis_names))
    new = keep_overlap(local, held, wanted)
    for cut, piece in zip(in_cuts, got.split(get_sizes), strict=True):
        if cut:
            view = new[relative(cut, wanted)]
            view.copy_(piece.view(local.dtype).view(view.shape))
    return new


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """A contiguous 1-D tensor as bytes: backends know few dtypes."""
    return flat.view(torch.uint8)
