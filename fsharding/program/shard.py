"""``shard``: the public transform. Binds arguments, caches programs, runs them on this rank's blocks."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsharding import _compat as compat
from fsharding import tree as trees
from fsharding.annotate.mesh import Mesh, agree, mesh_of
from fsharding.annotate.param import ShapeDtype
from fsharding.annotate.place import describe, dims_of, spec_of
from fsharding.annotate.spec import P, check_sizes, normalize
from fsharding.errors import ShardingError
from fsharding.moe.all_to_all import DISPATCHERS
from fsharding.program import outside, plain
from fsharding.program.call import (
    Call,
    abstract,
    argument_names,
    captured,
    is_wide,
    locate,
)
from fsharding.program.checks import check_leaves, refuse_gradients, warn_if_replicated
from fsharding.program.donate import pull_updates_forward, write_back
from fsharding.program.graphs import drop_dead
from fsharding.program.lowered import BACKENDS, Lowered, Program
from fsharding.program.partition import Experts, Input, LocalProgram, Partition, same_dims
from fsharding.program.schedule import Schedule
from fsharding.program.schedule import schedule as scheduled
from fsharding.program.trace import GlobalProgram, trace
from fsharding.program.transforms import Precision, check_gradient_scope, differentiated, with_precision
from fsharding.program.update import fuse_updates, in_place


def _without_collector(fn: Callable) -> Callable:
    """``fn`` with the garbage collector paused: a graph of many nodes makes it walk the heap again and again."""

    @functools.wraps(fn)
    def run(*args, **kwargs):
        was = gc.isenabled()
        gc.disable()
        try:
            return fn(*args, **kwargs)
        finally:
            if was:
                gc.enable()

    return run


@dataclass(frozen=True)
class Options:
    """The settings of one ``shard``; see there."""

    mesh: Mesh | None
    in_specs: Any
    out_specs: Any
    stored_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    precision: Precision | None
    experts: Any
    strict: bool
    schedule: Schedule
    backend: str


def shard(
    fn: Callable,
    mesh: Mesh | None = None,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    stored_argnums: int | Sequence[int] = (0,),
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    precision: Precision | str | torch.dtype | None = None,
    experts: Experts | str | None = "auto",
    schedule: Schedule | None = None,
    backend: str = "eager",
    strict: bool = False,
) -> Sharded:
    """``fn`` on a mesh: the same arguments and the same result as on one device.

    Args:
        fn: a pure function of trees of tensors and numbers. It is traced once per structure, shapes, dtypes and specs.
        mesh: where it runs; None takes the mesh of the first sharded argument.
        in_specs: a tree prefix of the positional arguments (one entry each); None lets every DTensor leaf bring its
            spec, plain tensors being global values that every rank holds.
        out_specs: a tree prefix of the result that overrides where results live.
        stored_argnums: arguments at rest (parameters, optimizer state): gathered where they meet rows. Donated
            arguments too.
        donate_argnums: arguments whose memory the results take over. They must not be used afterwards.
        static_argnums, static_argnames: arguments that are part of the program: hashable settings, strings, callables.
        precision: a :class:`Precision`, or just its compute dtype.
        experts: :class:`Experts`; "auto" means ``Experts("ep")`` where the mesh has that axis; None gathers experts as
            any weight.
        schedule: when parameters are gathered and gradients reduced: a :class:`Schedule`.
        backend: how a rank runs its program. "eager": op by op. "inductor": what lies between our ops and collectives
            is compiled, at the first call (seconds to a minute; a line on standard error says so). "cudagraph": the
            same, and the whole step is captured as one CUDA graph at the second call; refused where the host must look
            at data, as the all-to-all dispatcher's does.
        strict: refuse ops without a rule for their operands, which otherwise run on gathered operands: right, but slow;
            they warn once and show as ``kind="fallback"`` in ``collectives()``.

    With arguments that require grad the results can be differentiated from outside, by ``backward``.

    Raises:
        ShardingError: on all ranks alike, before anything moves; it names the leaf or the user's source line.
    """
    if backend not in BACKENDS:
        raise ShardingError(f"unknown backend {backend!r}: one of {', '.join(map(repr, BACKENDS))}.")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ShardingError(f"`mesh` must come from `fs.make_mesh`, got {type(mesh).__name__}.")
    if precision is not None and not isinstance(precision, Precision):
        precision = Precision(compute=precision)
    if schedule is not None and not isinstance(schedule, Schedule):
        raise ShardingError(f"`schedule` must be an `fs.Schedule`, got {schedule!r}.")
    if isinstance(experts, Experts) and experts.dispatcher not in DISPATCHERS:
        raise ShardingError(f"unknown dispatcher {experts.dispatcher!r}: one of {sorted(DISPATCHERS)}.")
    if isinstance(static_argnames, str):
        static_argnames = (static_argnames,)
    options = Options(
        mesh, in_specs, out_specs, _numbers(stored_argnums), _numbers(donate_argnums), _numbers(static_argnums),
        tuple(static_argnames), precision, experts, strict, schedule or Schedule(), backend,
    )  # fmt: skip
    return Sharded(fn, options)


def _typed(value):
    """Static arguments that compare equal are still different programs: 1, 1.0 and True; 0.0 and -0.0."""
    if isinstance(value, tuple):
        return tuple(map(_typed, value))
    return type(value), value, repr(value) if isinstance(value, float | complex) else None


def _constant(number: int, x: torch.Tensor, mesh: Mesh) -> Input:
    """What a closed-over tensor is to the program: a constant that every rank holds, or (in a ``shard_map``) a value
    at rest."""
    shape = tuple(x.shape)
    if not isinstance(x, DTensor):
        return Input(f"const_{number}", shape, x.dtype, ((),) * x.ndim, "constant")
    if mesh_of(x.device_mesh) != mesh:
        raise ShardingError(f"a closed-over tensor {describe(x)} does not live on {mesh!r}. Move it with `fs.reshard`.")
    return Input(f"const_{number}", shape, x.dtype, dims_of(x), "stored")


def _from_start(numbers: Sequence[int], count: int) -> set[int]:
    """Argument numbers, negative ones counted from the end of ``count`` positional arguments."""
    return {n + count if n < 0 else n for n in numbers}


def _numbers(value) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


class Sharded:
    """A function on a mesh; see :func:`shard`. ``lower(*args)`` gives the program without running it."""

    def __init__(self, fn: Callable, options: Options):
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.options = fn, options
        self._programs: dict[Any, Program] = {}
        self._labels: dict[Any, tuple[list[str], list[int], list[bool]]] = {}

    def __call__(self, *args, **kwargs):
        return compat.opaque(type(self)._call)(self, args, kwargs)

    def _call(self, args, kwargs):
        if compat.current_tracer() is not None:
            # Inside another sharded function: a part of its global program, partitioned by that one's settings.
            return self._function()(*args, **kwargs)
        call = self._bind(args, kwargs)
        check_leaves(call)
        if plain.is_disabled():
            refuse_gradients(call, "under `fs.disable_jit` the function runs on gathered copies")
            return plain.run(call, self._function())
        return self._program(call).checked(call)

    def _program(self, call: Call) -> Program:
        wanted = outside.wanted(call)
        key = (self._key(call), wanted)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._lower_together(call, wanted).compile()
        return program

    def lower(self, *args, **kwargs) -> Lowered:
        """The program for these arguments (tensors or :class:`ShapeDtype` leaves). No data is read, nothing is sent."""
        return self._lower(self._bind(args, kwargs))

    def _transformed(self, transform: Callable) -> Sharded:
        """The sharded transform of the function: ``fs.grad(fs.shard(f))`` is ``fs.shard(fs.grad(f))``."""
        return Sharded(transform(self.fn), replace(self.options, out_specs=None))

    # ---- arguments ------------------------------------------------------------------------------------------------
    def _bind(self, args, kwargs) -> Call:
        o = self.options
        where = {n % len(args) if args else n for n in o.static_argnums}
        dynamic = {i: a for i, a in enumerate(args) if i not in where}
        named = {k: v for k, v in sorted(kwargs.items()) if k not in o.static_argnames}
        static = (
            tuple((i, args[i]) for i in sorted(where) if i < len(args)),
            tuple((k, v) for k, v in sorted(kwargs.items()) if k in o.static_argnames),
        )
        try:
            hash(static)
        except TypeError as error:
            raise ShardingError(f"static arguments must be hashable: {error}.") from None
        tree = (list(dynamic.values()), named)
        leaves, treedef = trees.flatten(tree)
        known = (treedef, len(args))
        if known not in self._labels:
            self._labels[known] = self._label(tree, list(dynamic), len(args))
        paths, argnums, stored = self._labels[known]
        mesh = self._mesh(leaves, paths)
        return Call(
            paths, leaves, treedef, argnums, static, mesh, stored, len(args), getattr(self.fn, "__name__", "fn")
        )

    def _label(self, tree, numbers: list[int], count: int) -> tuple[list[str], list[int], list[bool]]:
        """Per leaf its key path as the user would write it, its positional argument (or -1), and whether it is
        stored."""
        names = argument_names(self.fn, count)
        places = [locate(path, numbers, names) for path in trees.flatten_with_paths(tree)[0]]
        argnums = [number for number, _ in places]
        return [label for _, label in places], argnums, self._stored(argnums, count)

    def _mesh(self, leaves, paths) -> Mesh:
        mesh, first = self.options.mesh, None
        for path, x in zip(paths, leaves, strict=True):
            if isinstance(x, DTensor):
                found = mesh_of(x.device_mesh)
                if found is None:
                    raise ShardingError(
                        f"{path} is a DTensor on a mesh that `fs.make_mesh` did not make. Move it with "
                        "`fs.device_put(x.full_tensor(), mesh, spec)`."
                    )
                if mesh is not None and found != mesh:
                    other = f"that of {first}" if first else "the function's"
                    raise ShardingError(
                        f"{path} lives on {found!r}, which is not {other} mesh {mesh!r}. Move it with `fs.reshard`."
                    )
                mesh, first = found, first or path
        if mesh is None:
            raise ShardingError("no mesh: pass `mesh=` to `fs.shard`, or arguments placed with `fs.device_put`.")
        return mesh

    def _stored(self, argnums: list[int], count: int) -> list[bool]:
        stored = _from_start((*self.options.stored_argnums, *self.options.donate_argnums), count)
        return [n in stored for n in argnums]

    def _function(self) -> Callable:
        return with_precision(self.fn, self.options.precision)

    def _key(self, call: Call):
        leaves = tuple(
            compat.placement_key(x)
            if isinstance(x, DTensor)
            else (x.shape, x.dtype)
            if isinstance(x, torch.Tensor)
            else type(x)
            for x in call.leaves
        )
        return call.treedef, leaves, _typed(call.static), call.mesh, captured(self.fn)

    # ---- lowering -------------------------------------------------------------------------------------------------
    def _inputs(self, call: Call) -> tuple[list[Input], list[torch.Tensor]]:
        mesh, specs = call.mesh, self._specs(call)
        inputs, fakes, wide = [], [], is_wide(call.leaves)
        rows = zip(call.paths, call.leaves, specs, call.stored, strict=True)
        for path, x, spec, at_rest in rows:
            shape, dtype = abstract(path, x, wide)
            dims = normalize(spec, len(shape), mesh.axis_names, path)
            if isinstance(x, DTensor):
                have = dims_of(x)
                if spec is not None and not same_dims(mesh, have, dims):
                    raise ShardingError(
                        f"{path} is placed as {spec_of(x)}, but `in_specs` says {spec}. Leave `in_specs` out, or "
                        "`fs.reshard` it."
                    )
                dims = have
            check_sizes(shape, dims, mesh.shape, mesh.model_axes, path, even=not at_rest)
            inputs.append(Input(path, shape, dtype, dims, "stored" if at_rest else "rows"))
            fakes.append(torch.empty(shape, dtype=dtype, device="meta"))
        return inputs, fakes

    def _specs(self, call: Call) -> list:
        own = [getattr(x, "spec", None) if isinstance(x, ShapeDtype) else None for x in call.leaves]
        if self.options.in_specs is None:
            return own
        positional, _ = trees.unflatten(call.treedef, call.leaves)
        prefix = self.options.in_specs
        if isinstance(prefix, P) or prefix is None or len(prefix) != len(positional):
            if not isinstance(prefix, P):
                raise ShardingError(
                    f"`in_specs` has one entry for each of the {len(positional)} positional arguments, got {prefix!r}."
                )
            prefix = [prefix] * len(positional)
        given = [s for p, a in zip(prefix, positional, strict=True) for s in trees.broadcast_prefix(p, a, "in_specs")]
        given += [None] * (len(call.leaves) - len(given))
        return [s if s is not None else o for s, o in zip(given, own, strict=True)]

    def _flat_function(self, call: Call, fn: Callable, result: dict) -> Callable:
        def flat(*xs):
            out = call.apply(fn, xs)
            paths, leaves, treedef = trees.flatten_with_paths(out)
            result.update(paths=paths, treedef=treedef, fixed={})
            tensors = []
            for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
                if isinstance(x, torch.Tensor):
                    tensors.append(x)
                elif isinstance(x, bool | int | float | str):
                    result["fixed"][i] = x
                else:
                    raise ShardingError(
                        f"the function returns a {type(x).__name__} at {path or 'the top'}: results are tensors, "
                        "numbers, strings, None and containers of them."
                    )
            return tensors

        return flat

    def _experts(self, mesh: Mesh) -> Experts | None:
        experts = self.options.experts
        if experts == "auto":
            return Experts("ep") if "ep" in mesh.shape else None
        if isinstance(experts, str):
            experts = Experts(experts)
        if experts is not None and experts.axis not in mesh.shape:
            meant = f" Did you mean fs.Experts('ep', {experts.axis!r})?" if experts.axis in DISPATCHERS else ""
            raise ShardingError(
                f"`experts` names axis {experts.axis!r}, which the mesh does not have ({', '.join(mesh.axis_names)})."
                f"{meant}"
            )
        return experts

    def _lower_together(self, call: Call, wanted: tuple[int, ...]) -> Lowered:
        """Lower; a rank that fails says so where the others compare their programs, so that they do not wait for it."""
        try:
            return self._lower_joint(call, wanted) if wanted else self._lower(call)
        except Exception as error:
            if not call.mesh.phantom:
                with contextlib.suppress(ShardingError):
                    agree(call.mesh, "program", f"`{call.name}` failed: {type(error).__name__}: {error}", timeout_s=20)
            raise

    @_without_collector
    def _lower(self, call: Call) -> Lowered:
        inputs, fakes = self._inputs(call)
        result: dict[str, Any] = {}
        program = trace(self._flat_function(call, self._function(), result), fakes, check_gradient_scope)
        local = self._partition(call.mesh, program, inputs, self._out_dims(call.mesh, result, program))
        fuse_updates(local.graph)
        pull_updates_forward(local.graph)
        scheduled(local, self.options.schedule)
        donated = self._taken(call)
        write_back(local, donated, [p for i, p in enumerate(result["paths"]) if i not in result["fixed"]])
        in_place(local.graph)
        warn_if_replicated(call.name, program, local, inputs)
        return Lowered(program, local, result, donated, call, self._bind, self.options.backend)

    @_without_collector
    def _lower_joint(self, call: Call, wanted: tuple[int, ...]) -> Lowered:
        """The function with its pull-back to the leaves that require grad: see ``outside.py``."""
        outside.check(call, wanted, self._donated(call), self.options.backend)
        inputs, fakes = self._inputs(call)
        result, reach = {}, []
        flat = self._flat_function(call, differentiated(self.fn, self.options.precision), result)
        program = trace(outside.joint(flat, wanted, reach), fakes, check_gradient_scope)
        outside.refuse_watched(program, call.name)
        if not any(reach):
            return self._lower(call)
        out_dims = self._out_dims(call.mesh, result, program)
        out_dims = outside.with_gradients(out_dims, call, inputs, wanted, reach)
        local = self._partition(call.mesh, program, inputs, out_dims)
        halves = outside.halved(local, reach, self.options.schedule)
        warn_if_replicated(call.name, program, local, inputs)
        lowered = (program, local, result, self._taken(call), call, self._bind, self.options.backend)
        return outside.Joint(*lowered, halves=halves, leaves=wanted, reach=reach)

    def _partition(self, mesh: Mesh, program: GlobalProgram, inputs: list[Input], out_dims) -> LocalProgram:
        constants = [_constant(i, c, mesh) for i, c in enumerate(program.constants)]
        reduce = self.options.precision.reduce if self.options.precision else None
        partition = Partition(mesh, self._experts(mesh), reduce, self.options.strict)
        local = partition.run(program.graph, inputs + constants, out_dims)
        drop_dead(local.graph)
        return local

    def _donated(self, call: Call) -> set[int]:
        return _from_start(self.options.donate_argnums, call.count)

    def _taken(self, call: Call) -> list[int]:
        """The leaves that are donated. A plain tensor cannot be taken away from its owner, who would read the new value
        in it: it is left alone."""
        donated, rows = self._donated(call), enumerate(zip(call.argnums, call.leaves, strict=True))
        return [i for i, (n, x) in rows if n in donated and isinstance(x, DTensor | ShapeDtype)]

    def _out_dims(self, mesh, result, program: GlobalProgram):
        if self.options.out_specs is None:
            return None
        output = next(n for n in program.graph.graph.nodes if n.op == "output").args[0]
        leaves = iter(n.meta["val"] for n in output)
        full = [None if i in result["fixed"] else next(leaves) for i in range(len(result["paths"]))]
        tree = trees.unflatten(result["treedef"], [0 if v is None else v for v in full])
        specs = trees.broadcast_prefix(self.options.out_specs, tree, "out_specs")
        return [
            None if s is None else normalize(s, v.ndim, mesh.axis_names, f"result {p}")
            for s, v, p in zip(specs, full, result["paths"], strict=True)
            if v is not None
        ]
