"""``Mesh``: named axes over ranks, and the process groups of every set of axes.

Ranks are row-major: the last axis is the fastest. A ``Mesh`` is a small frozen value; what belongs to the running
process group (communicators, DeviceMeshes) lives in one cache per process group and is dropped with it.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import functools
import hashlib
import math
import os
import types
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _compat
from ..errors import ShardingError
from . import worlds

__all__ = ["Mesh", "agree", "make_mesh", "mesh_of"]


def make_mesh(axes: Mapping[str, int], *, model_axes: Sequence[str] = (), device: str | torch.device | None = None,
              fake: bool = False, timeout_s: float = 600, backend: str | None = None) -> Mesh:
    """Name the axes of the machine: ``make_mesh({"efsdp": 4, "ep": 2})``; the sizes multiply to the number of ranks.

    All axes are data axes except those in ``model_axes``. Under a launcher (``torchrun``) the process group is started
    if there is none: NCCL with GPUs, else gloo, with this timeout in seconds; ``backend`` overrides. A mesh of size 1
    needs neither launcher nor process group. With ``fake=True`` no processes exist: the mesh, seen from rank 0, serves
    to place, lower and simulate, at any size, and nothing on it communicates.

    ``device`` defaults to the rank's GPU where there is one, else the CPU; for a fake mesh to the CPU.

    Raises ShardingError for bad names or sizes, unknown model axes, and a world size other than the mesh's size.
    """
    axes, simulated = _checked_axes(axes), None if fake else worlds.current()
    if isinstance(model_axes, str):
        model_axes = (model_axes,)
    for axis in model_axes:
        if axis not in axes:
            raise ShardingError(f'model_axes names "{axis}", which is not an axis of the mesh ({", ".join(axes)}). '
                                "Add it to the axes with its size, or leave it out of model_axes.")
    if len(set(model_axes)) != len(model_axes):
        raise ShardingError(f"model_axes {tuple(model_axes)} names an axis twice. Name each once.")
    size = math.prod(axes.values())
    if simulated is not None:
        _check_simulated(axes, size, simulated, device)
    if fake or simulated is not None:
        device = torch.device(device or "cpu")
    else:
        world, source = _world_size()
        if world != size and not (size == 1 and world is None):
            raise ShardingError(_world_message(axes, size, world, source))
        device = _device(device)
        if size > 1 and not dist.is_initialized():
            _start(device, backend, timeout_s)
    order = tuple(axis for axis in axes if axis in model_axes)
    number = 0 if simulated is None else simulated.number
    mesh = Mesh(tuple(axes), tuple(axes.values()), order, bool(fake), device.type, timeout_s, number)
    mesh.leaf_mesh  # noqa: B018  (creates the groups now: all ranks are here, in the same order)
    return mesh


@dataclasses.dataclass(frozen=True, repr=False)
class Mesh:
    """Named axes over ranks; made by ``make_mesh``. Equal and hashable by value, the same on all ranks."""

    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    model_axes: tuple[str, ...] = ()
    fake: bool = False
    device_type: str = "cpu"
    timeout_s: float = dataclasses.field(default=600, compare=False)
    world: int = 0  # the number of the `fs.simulate` block whose ranks it names; 0 outside of one

    def __repr__(self) -> str:
        axes = ", ".join(f'"{axis}": {size}' for axis, size in self.shape.items())
        model = f", model_axes={self.model_axes}" if self.model_axes else ""
        return f"make_mesh({{{axes}}}{model}{', fake=True' if self.fake else ''})"

    # ---- what users read ------------------------------------------------------------------------------------------
    def __reduce__(self):
        return Mesh, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @functools.cached_property
    def shape(self) -> Mapping[str, int]:
        """Axis name -> size, in mesh order, read-only."""
        return types.MappingProxyType(dict(zip(self.axis_names, self.sizes, strict=True)))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which batches are split and stored parameters rest."""
        return tuple(axis for axis in self.axis_names if axis not in self.model_axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def phantom(self) -> bool:
        """Whether no process group stands behind the mesh: a fake or simulated mesh, or one of size 1 alone."""
        return self.fake or self.world > 0 or (self.size == 1 and not dist.is_initialized())

    @property
    def rank(self) -> int:
        """This process's rank; 0 without processes."""
        return 0 if self.phantom else dist.get_rank()

    @property
    def device(self) -> torch.device:
        """The device of this rank's shards."""
        if self.device_type == "cuda" and not self.fake:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The torch DeviceMesh with the same dims and names, for use with other libraries."""
        return _state(self).device_mesh

    @property
    def leaf_mesh(self) -> DeviceMesh:
        """A private twin of ``device_mesh`` (equal, same groups) on which our DTensor leaves live.

        Flattening axes of a DeviceMesh makes DTensor gather an uneven dim wrongly; users may flatten ``device_mesh``,
        nobody flattens this one.
        """
        return _state(self).leaf_mesh

    # ---- ranks and axes -------------------------------------------------------------------------------------------
    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Axis name -> coordinate of a rank (of this process by default)."""
        rank = self.rank if rank is None else rank
        out = {}
        for axis, size in zip(reversed(self.axis_names), reversed(self.sizes), strict=True):
            rank, out[axis] = divmod(rank, size)
        return {axis: out[axis] for axis in self.axis_names}

    def axes_size(self, axes: Iterable[str]) -> int:
        """The product of the sizes of these axes."""
        return math.prod(self.shape[axis] for axis in axes)

    def sort_axes(self, axes: Iterable[str]) -> tuple[str, ...]:
        """These axes in mesh order, without repeats. Raises ShardingError for one that the mesh does not have."""
        wanted = set(axes)
        for axis in wanted:
            if axis not in self.shape:
                close = difflib.get_close_matches(axis, self.axis_names, 1)
                hint = f' Did you mean "{close[0]}"?' if close else ""
                raise ShardingError(f'The mesh has no axis "{axis}"; it has {", ".join(self.axis_names)}.{hint}')
        return tuple(axis for axis in self.axis_names if axis in wanted)

    def group_ranks(self, axes: Iterable[str]) -> list[list[int]]:
        """All rank lists that cover the mesh for this set of axes: ranks that differ in these coordinates only."""
        inside = tuple(self.axis_names.index(axis) for axis in self.sort_axes(axes))
        return [list(ranks) for ranks in _partition(self.sizes, inside)]

    def group(self, axes: Iterable[str], channel: str = "") -> dist.ProcessGroup:
        """The process group of this rank over a set of axes, members in mesh order.

        Created once per partition of the ranks and channel, by all ranks together: all must ask for a new one in the
        same order. Groups of different channels may communicate at the same time.
        """
        return _state(self).group(self, self.sort_axes(axes), channel)

    def alias(self, axes: Iterable[str]) -> str:
        """A name for the groups over a set of axes that reads the same on every rank, such as ``fs[dp=2,ep=2]/ep``."""
        axes = self.sort_axes(axes)
        shape = ",".join(f"{axis}={size}" for axis, size in self.shape.items())
        return f"fs{'-fake' if self.fake else ''}[{shape}]/{','.join(axes)}"

    def register_alias(self, axes: Iterable[str], channel: str = "") -> str:
        """Make ``alias(axes)`` resolvable for functional collectives; returns it. Repeating it does nothing.

        With a channel, ``alias#channel``: another group of the same ranks.
        """
        axes = self.sort_axes(axes)
        name = self.alias(axes) + (f"#{channel}" if channel else "")
        _compat.register_group(name, self.group(axes, channel))
        return name


@functools.lru_cache(maxsize=256)
def _partition(sizes: tuple[int, ...], inside: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    outside = [dim for dim in range(len(sizes)) if dim not in inside]
    members = math.prod(sizes[dim] for dim in inside)
    return tuple(map(tuple, ranks.permute(*outside, *inside).reshape(-1, members).tolist()))


def mesh_of(device_mesh: DeviceMesh) -> Mesh | None:
    """The Mesh on whose ``device_mesh`` or ``leaf_mesh`` a DTensor lives; None for a foreign DeviceMesh.

    A DeviceMesh that equals one of ours counts as it: DTensor's caches, copies and files may swap equal meshes.
    """
    known = [(mesh, state) for world in _worlds.values() for mesh, state in world.meshes.items()]
    for mesh, state in known:  # meshes that differ in their model axes have equal DeviceMeshes: identity first
        if device_mesh is state.leaf_mesh or device_mesh is state.device_mesh:
            return mesh
    return next((mesh for mesh, state in known if state.leaf_mesh == device_mesh), None)


# ---- the cache of one process group --------------------------------------------------------------------------------
class _World:
    """Groups by how they partition the ranks (so that meshes share them), and what each mesh is built of."""

    def __init__(self, token):
        self.token = token
        self.groups: dict[tuple, dist.ProcessGroup] = {}
        self.meshes: dict[Mesh, _MeshState] = {}
        self.agreed: dict[tuple[Mesh, str], set[str]] = {}
        self.rounds: dict[str, int] = {}


class _MeshState:
    def __init__(self, mesh: Mesh, world: _World):
        self.world, self.by_axes = world, {}
        groups = [self.group(mesh, (axis,)) for axis in mesh.axis_names]
        args = mesh.device_type, mesh.sizes, mesh.axis_names, groups, mesh.rank, mesh.fake or mesh.world > 0
        self.device_mesh, self.leaf_mesh = _compat.build_device_mesh(*args), _compat.build_device_mesh(*args)

    def group(self, mesh: Mesh, axes: tuple[str, ...], channel: str = "") -> dist.ProcessGroup:
        if (axes, channel) not in self.by_axes:
            ranks = mesh.group_ranks(axes)
            key = mesh.fake, mesh.device_type, channel, tuple(map(tuple, ranks))
            if key not in self.world.groups:
                name = f"{mesh.alias(axes)}/phantom#{channel}"
                self.world.groups[key] = (_compat.phantom_group(name, 0, len(ranks[0])) if mesh.phantom else
                                          _new_group(mesh, ranks, own=bool(channel)))
            self.by_axes[axes, channel] = self.world.groups[key]
        return self.by_axes[axes, channel]


_worlds: dict[bool, _World] = {}  # one for phantom groups, one for the running default process group


def _state(mesh: Mesh) -> _MeshState:
    phantom = mesh.phantom
    token = None if phantom else _compat.world_token()
    world = _worlds.get(phantom)
    if world is None or world.token != token:
        world = _worlds[phantom] = _World(token)
    if mesh not in world.meshes:
        world.meshes[mesh] = _MeshState(mesh, world)
    state = world.meshes[mesh]
    if phantom:  # the end of a real world unregisters every group name, ours included
        for group in state.by_axes.values():
            _compat.register_group(group.group_name, group)
    return state


def _new_group(mesh: Mesh, ranks: list[list[int]], own: bool = False) -> dist.ProcessGroup:
    world, device = dist.group.WORLD, torch.device(mesh.device_type)
    serves = _compat.serves(world, mesh.device_type)
    if len(ranks) == 1 and serves and not own and _compat.in_order(world, device):
        return world
    backend = None if serves else "nccl" if mesh.device_type == "cuda" else "gloo"
    limit = datetime.timedelta(seconds=mesh.timeout_s)
    known = _compat.process_group_timeout(world, device)
    mine = None
    with _compat.one_gloo_worker():
        for members in ranks:
            group = dist.new_group(members, timeout=min(limit, known or limit), backend=backend)
            if mesh.rank in members:
                mine = group
    assert mine is not None
    return mine


# ---- checks and start ----------------------------------------------------------------------------------------------
def _checked_axes(axes: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(axes, Mapping):
        raise ShardingError(f'make_mesh takes a dict of axis names and sizes, such as {{"efsdp": 2, "ep": 2}}; it got '
                            f"{axes!r}.")
    if not axes:
        raise ShardingError('The mesh has no axes. Name at least one, such as {"data": 1}.')
    for axis, size in axes.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ShardingError(f"The axis name {axis!r} is not a plain name. Use letters, digits and underscores.")
        if isinstance(size, bool) or not isinstance(size, int):
            raise ShardingError(f'Axis "{axis}" has size {size!r}; a size is a positive int.')
        if size < 1:
            raise ShardingError(f'Axis "{axis}" has size {size}; sizes start at 1 (1 switches an axis off).')
    return dict(axes)


def _world_size() -> tuple[int | None, str]:
    if dist.is_initialized():
        return dist.get_world_size(), "the running process group"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"]), "the launcher (WORLD_SIZE)"
    return None, ""


def _world_message(axes: dict[str, int], size: int, world: int | None, source: str) -> str:
    shown = " * ".join(f"{axis}={n}" for axis, n in axes.items())
    if world is None:
        return (f"The mesh {shown} needs {size} ranks, but there is one process. Launch with torchrun "
                f"--nproc-per-node {size} (on one host), or pass fake=True to place and lower without processes.")
    fits = [f"{axis}={world // (size // n)}" for axis, n in axes.items() if world % (size // n) == 0]
    if not fits:  # no single axis can absorb it: the nearest divisors, axis by axis
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        fits = [f"{axis}={min(divisors, key=lambda d, n=n: (abs(d - n), d))}" for axis, n in axes.items()
                if world % n] or [f"sizes that multiply to {world}"]
    return (f"The mesh {shown} has {size} ranks, but {source} has {world}. Nearest choices that fit: "
            f"{' or '.join(fits)}; or launch {size} processes.")


def _check_simulated(axes: dict[str, int], size: int, world: worlds.World, device) -> None:
    if size != world.ranks:
        shown = " * ".join(f"{axis}={n}" for axis, n in axes.items())
        raise ShardingError(f"The mesh {shown} has {size} ranks, but fs.simulate has {world.ranks}. Make the sizes "
                            f"multiply to {world.ranks}, or enter fs.simulate({size}).")
    if torch.device(device or "cpu").type != "cpu":
        raise ShardingError(f"fs.simulate runs on the CPU; the mesh asks for device {str(device)!r}. Leave it out.")


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ShardingError('The mesh asks for device "cuda", but this process sees no GPU. Pass device="cpu".')
        if device.index is not None:
            torch.cuda.set_device(device)
        elif "LOCAL_RANK" in os.environ and not dist.is_initialized():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return device


def _start(device: torch.device, backend: str | None, timeout_s: float) -> None:
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with _compat.one_gloo_worker():
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))


# ---- agreement over the ranks --------------------------------------------------------------------------------------
def agree(mesh: Mesh, topic: str, text: str, timeout_s: float = 60) -> dict[str, list[int]]:
    """Compare a text over all ranks: text -> the ranks that gave it, in rank order, the same on every rank.

    Goes through the store, a few round trips of one rank each, so it serves any device. Each text is compared once; a
    repeated one returns at once. Raises ShardingError naming the ranks that did not come within the timeout: a rank
    whose text was compared before does not take part again.
    """
    if mesh.phantom or mesh.size == 1:
        return {text: [mesh.rank]}
    world = _state(mesh).world
    seen = world.agreed.setdefault((mesh, topic), set())
    if text in seen:
        return {text: list(range(mesh.size))}
    world.rounds[topic] = world.rounds.get(topic, 0) + 1
    store, prefix = _compat.default_store(), f"fsharding/{topic}/{world.rounds[topic]}"
    mine = hashlib.sha1(text.encode()).hexdigest()
    store.set(f"{prefix}/text/{mesh.rank}", text)
    store.add(f"{prefix}/same/{mine}", 1)
    if store.add(f"{prefix}/here", 1) == mesh.size:
        store.set(f"{prefix}/done", "1")
    try:
        store.wait([f"{prefix}/done"], datetime.timedelta(seconds=min(timeout_s, mesh.timeout_s)))
    except (RuntimeError, ValueError) as error:
        late = [rank for rank in range(mesh.size) if not store.check([f"{prefix}/text/{rank}"])]
        raise ShardingError(f"Rank {mesh.rank} compares a new {topic} over the ranks, but rank {_few(late)} did not "
                            f"come within {timeout_s:g} s: they are elsewhere in the program, or passed something "
                            f"they had passed before. Rank {mesh.rank} has {text[:200]}.") from error
    if store.add(f"{prefix}/same/{mine}", 0) == mesh.size:
        seen.add(text)
        return {text: list(range(mesh.size))}
    answers: dict[str, list[int]] = {}
    for rank in range(mesh.size):
        answers.setdefault(store.get(f"{prefix}/text/{rank}").decode(), []).append(rank)
    return answers


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
