"""Every private torch API that the library leans on, wrapped once. Supported: torch 2.11 to 2.13."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["StridedShard", "all_gather_flat", "before_the_world_ends", "build_device_mesh", "default_store", "in_order",
           "local_of", "one_gloo_worker", "phantom_group", "process_group_timeout", "register_group", "serves",
           "world_token"]


# ---- process groups ------------------------------------------------------------------------------------------------
def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Make ``name`` resolve to ``group`` for ``_c10d_functional`` ops; a name of an earlier group is taken over."""
    try:
        if c10d._resolve_process_group(name) is group:
            return
    except (RuntimeError, ValueError):  # never registered, or its group is gone
        pass
    try:
        c10d._unregister_process_group(name)  # the name of a group that is gone stays taken
    except (RuntimeError, ValueError):
        pass
    c10d._register_process_group(name, group)


def phantom_group(name: str, rank: int, size: int) -> dist.ProcessGroup:
    """A group without processes or communication, resolvable by ``name``. The caller keeps it alive."""
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    backend = c10d.FakeProcessGroup._create_internal(rank, size, c10d.FakeProcessGroup.Options())
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)
    register_group(name, group)
    return group


def world_token() -> weakref.ref | None:
    """A weak reference to the default process group, None if there is none. It dies or changes with a new world."""
    return weakref.ref(distributed_c10d._get_default_group()) if dist.is_initialized() else None


class _AtTheEnd:
    """In PyTorch's list of what is finalised before communicators go."""

    def __init__(self, method: weakref.WeakMethod):
        self.method = method

    def finalize(self) -> None:
        method = self.method()
        if method is not None:
            method()


def before_the_world_ends(method: Callable) -> None:
    """Call a bound method when ``destroy_process_group()`` ends the world, unless its object is gone by then."""
    if dist.is_initialized():
        distributed_c10d._world.comms.append(_AtTheEnd(weakref.WeakMethod(method)))


def all_gather_flat(out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill the 1-D ``out`` with every member's ``part``, in group order. torch 2.13 renames the function."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


def default_store() -> dist.Store:
    """The key-value store of the default process group, shared by all ranks."""
    return distributed_c10d._get_default_store()


def serves(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether a group has a backend for tensors of this device."""
    return any(device.type == device_type for device in group._device_types)


class _OneWorkerGloo(dist.ProcessGroupGloo):
    """Gloo whose collectives run on one thread, in the order in which they were asked for."""

    def __init__(self, store, rank: int, size: int, timeout: datetime.timedelta, **more):
        options = dist.ProcessGroupGloo._Options()
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        make = dist.ProcessGroupGloo
        options._devices = [make.create_device(interface=name) for name in names] or [make.create_default_device()]
        options._timeout, options._threads = timeout, 1
        for name, value in more.items():  # torch 2.14: enable_reconfigure
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


@contextlib.contextmanager
def one_gloo_worker():
    """Gloo groups that are made inside get one thread each, see :func:`in_order`."""
    found = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = _OneWorkerGloo
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = found


def in_order(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of a group may be in flight together, because one thread or the device orders them.

    Gloo's own default is two threads, and each writes the name of what it completed last into one string of the
    group, without a lock (``ProcessGroupGloo::runLoop``, torch 2.11 to 2.14). Names of over 15 letters, such as
    ALLGATHER_COALESCED, lie on the heap: two that complete at once free one block twice.
    """
    backend = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return not isinstance(backend, dist.ProcessGroupGloo) or backend.options._threads == 1


def process_group_timeout(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta | None:
    """The timeout of a group's backend for this device, None where it does not tell."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None


# ---- device meshes and DTensor -------------------------------------------------------------------------------------
def build_device_mesh(device_type: str, sizes: Sequence[int], names: Sequence[str], groups: Sequence[dist.ProcessGroup],
                      rank: int, phantom: bool) -> DeviceMesh:
    """A row-major DeviceMesh over ranks 0..n-1 on groups that exist already: it creates none and needs no world.

    A phantom mesh never equals a mesh with processes, so that DTensor's caches, which are keyed by mesh equality,
    cannot hand the groups of one to tensors of the other.
    """
    ranks = torch.arange(torch.Size(sizes).numel()).view(*sizes)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names), _init_backend=False, _rank=rank)
    mesh._dim_group_names = [group.group_name for group in groups]
    if hasattr(mesh, "_pg_registry"):  # torch >= 2.13
        mesh._pg_registry.update({group.group_name: group for group in groups})
    if phantom:
        mesh._thread_id = -1  # part of a DeviceMesh's identity, otherwise set for threaded test worlds only
        mesh._hash = None
    return mesh


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, outside autograd; waits if a collective still fills it."""
    local = tensor._local_tensor.detach()
    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local


# ---- tracing ---------------------------------------------------------------------------------------------------------
TORCH_ROOT = os.path.dirname(torch.__file__)


def current_tracer():
    """The fx tracer of the ``make_fx`` that is running, or None."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


def node_of(x: torch.Tensor):
    """The node that made a tensor in the running trace, seen through ``torch.func`` levels; None for any other."""
    tracer = current_tracer()
    if tracer is None:
        return None
    return proxy_tensor.get_proxy_slot(innermost(x), tracer, None, lambda held: held.proxy.node)


def backward_sequence() -> int | None:
    """Sequence number of the forward op whose derivative is running now; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_sequence() -> int:
    return torch.autograd._get_sequence_nr()


def under_functorch() -> bool:
    """Is a ``torch.func`` transform running around us?"""
    return torch._C._functorch.peek_interpreter_stack() is not None


def functorch_level() -> int:
    """The number of the innermost ``torch.func`` level around us, 0 without one."""
    top = torch._C._functorch.peek_interpreter_stack()
    return 0 if top is None else top.level()


def functorch_levels() -> list[str]:
    """Names of the ``torch.func`` transforms that run around us, such as "Grad" or "Vmap", outermost first."""
    return [str(level.key()).rpartition(".")[2] for level in torch._C._functorch.get_interpreter_stack() or ()]


@contextlib.contextmanager
def outside_of_the_trace():
    """Leave every ``torch.func`` level, dispatch mode and function mode, as for a trace within a trace."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with temporarily_clear_interpreter_stack(), _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def is_plain_fake(x: torch.Tensor, tracer) -> bool:
    """A fake tensor that the trace of ``tracer`` did not make, at whatever ``torch.func`` level: what runs right now
    made it."""
    return is_fake(innermost(x)) and not belongs_to(x, tracer)


def belongs_to(x: torch.Tensor, tracer) -> bool:
    """Was this tensor made in the trace of ``tracer``, at whatever ``torch.func`` level?"""
    return proxy_tensor.get_proxy_slot(innermost(x), tracer, None, lambda held: held) is not None


def has_tangent(x: torch.Tensor) -> bool:
    """Does a tensor carry a forward-mode tangent?"""
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def innermost(x: torch.Tensor) -> torch.Tensor:
    """The tensor below all ``torch.func`` levels."""
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def is_wrapped(x: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_fake(x: torch.Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


def fakes_alike(mode, like: Sequence[tuple[torch.Tensor, torch.dtype]]) -> list[torch.Tensor]:
    """Fake tensors of these shapes, strides and dtypes; an op of the mode for each would take three times as long."""
    with no_modes():
        metas = [torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta") for x, dtype in like]
        pairs = zip(metas, like, strict=True)
        return [torch._subclasses.FakeTensor(mode, meta, x.device) for meta, (x, _) in pairs]


def new_fake_mode(symbolic: bool = False):
    """A fake mode; ``symbolic`` allows data-dependent sizes made by our own ops."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv() if symbolic else None
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True, shape_env=env, static_shapes=True)


@contextlib.contextmanager
def no_modes():
    """Leave every dispatch mode and ``torch.func`` level, as for making a tensor that no trace should see."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def track_constant(fake: torch.Tensor, real: torch.Tensor, name: str):
    """Record ``fake`` in the running trace as the module attribute ``name`` that holds ``real``."""
    tracer = current_tracer()
    setattr(tracer.root, name, real)
    proxy = tracer.create_proxy("get_attr", name, (), {})
    proxy_tensor.track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
    return fake


@contextlib.contextmanager
def watch_gradients(after: Callable, before: Callable | None = None):
    """``after(gradients, inputs)`` replaces the gradients that a ``torch.func`` transform computes, and
    ``before(cotangent, output)`` each cotangent that it starts from."""
    inner = eager_transforms._autograd_grad

    def outer(outputs, inputs, grad_outputs=None, *args, **kwargs):
        if grad_outputs is not None and before is not None:
            grad_outputs = tuple(before(g, y) for g, y in zip(grad_outputs, outputs, strict=True))
        grads = inner(outputs, inputs, grad_outputs, *args, **kwargs)
        return tuple(after(grads, inputs))

    eager_transforms._autograd_grad = outer
    try:
        yield
    finally:
        eager_transforms._autograd_grad = inner


@contextlib.contextmanager
def without_saved_hooks():
    """Leave every ``saved_tensors_hooks`` of the user, which ``torch.func`` refuses to run under."""
    autograd, hooks = torch._C._autograd, []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


FAKE_ERRORS = (
    torch._subclasses.fake_tensor.DataDependentOutputException,
    torch._subclasses.fake_tensor.DynamicOutputShapeException,
    torch._subclasses.fake_tensor.UnsupportedOperatorException,
)


# ---- operators -------------------------------------------------------------------------------------------------------
def below_autograd():
    """Dispatch to an op's kernel below the Autograd key."""
    return torch._C._AutoDispatchBelowAutograd()


def resolve_group(name: str) -> dist.ProcessGroup:
    """The group that was registered under a name."""
    return c10d._resolve_process_group(name)


def placement_key(tensor: torch.Tensor):
    """A hashable description of a DTensor's mesh, placements, shape and dtype."""
    return tensor._spec


def address_of(x) -> tuple:
    """Where a leaf lies: address and size in memory of its local block; () for what is no tensor."""
    if not isinstance(x, torch.Tensor):
        return ()
    local = x._local_tensor if isinstance(x, DTensor) else x
    return local.data_ptr(), local.nbytes, local.stride()


def wrapped_like(local: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """A DTensor of ``local`` with the mesh, placements and global shape of a DTensor that has them already.

    ``DTensor.from_local`` checks and derives all of that anew, some 20 times as long for each leaf of each step.
    """
    return DTensor(local, template._spec, requires_grad=False)


def leaf_of_class(cls, local: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """As :func:`wrapped_like`, of a subclass of DTensor, and with the local value's dtype."""
    if template.dtype != local.dtype:
        template = DTensor.from_local(local, template.device_mesh, template.placements, run_check=False,
                                      shape=template.shape, stride=template.stride())
    return DTensor.__new__(cls, local, template._spec, requires_grad=False)


def without_torch_function():
    """A tensor subclass's own ``__torch_function__`` is left out."""
    return torch._C.DisableTorchFunctionSubclass()


_opaque: dict[Callable, Callable] = {}  # a dict: `functools.cache` makes the compiler warn


def opaque(function: Callable) -> Callable:
    """The function as one that ``torch.compile`` around it leaves alone: it would trace our tracer, frame by frame."""
    if "torch._dynamo" not in sys.modules:  # nothing compiles
        return function
    if function not in _opaque:
        _opaque[function] = torch.compiler.disable(function)
    return _opaque[function]


def no_torch_function():
    """No ``__torch_function__`` runs, neither of modes nor of subclasses."""
    return torch._C.DisableTorchFunction()


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two tensors show one memory? Also told of meta tensors."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def release_saved(ctx) -> bool:
    """What an ``autograd.Function`` saved may go while its backward still runs, unless the graph is retained. Is it?"""
    ctx.maybe_clear_saved_tensors()
    return torch._C._autograd._get_current_graph_task_keep_graph()


def retire(tensor: torch.Tensor) -> None:
    """Take a DTensor's local value away: a later use fails instead of reading what took its place."""
    tensor._local_tensor = torch.empty_like(tensor._local_tensor, device="meta")
    if hasattr(tensor, "_blocks"):  # of simulated ranks
        tensor._blocks = ()


# ---- Inductor --------------------------------------------------------------------------------------------------------
def inductor_compile(module: torch.fx.GraphModule, inputs: list) -> Callable:
    """``module`` compiled for inputs like these; returns a function of them that gives a tuple."""
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        return compile_fx(module, inputs)


def progress(text: str) -> None:
    """One line on standard error, from the first rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
