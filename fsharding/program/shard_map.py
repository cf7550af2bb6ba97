"""``shard_map``: the local view. The body sees its rank's blocks; specs say how blocks and global values correspond.

It is always traced. Inside ``fs.shard`` it is a *manual region* of the global program: ``to_local`` and ``to_global``
mark its border, its collectives are ops between, and the partition strips the manual axes from what is in it. Called
alone it is a sharded function of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsharding import _compat as compat
from fsharding import tree as trees
from fsharding.annotate.mesh import Mesh
from fsharding.annotate.param import ShapeDtype
from fsharding.annotate.place import dims_of
from fsharding.annotate.spec import P, axes_of, check_sizes, normalize
from fsharding.comm import manual
from fsharding.comm import varying as v
from fsharding.comm.shards import encode_dims
from fsharding.errors import ShardingError
from fsharding.oplib import lifted
from fsharding.program.call import Call, abstract, argument_names, is_wide, locate
from fsharding.program.checks import check_leaves
from fsharding.program.partition import Input
from fsharding.program.shard import Sharded, shard
from fsharding.program.source import error_line


def shard_map(
    fn: Callable,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    *,
    check: bool = True,
    axis_names: Iterable[str] | None = None,
) -> ShardMapped:
    """``fn`` on each rank's blocks: JAX's ``shard_map``, traced, differentiable to any order.

    Args:
        fn: sees blocks, may call the collectives (``fs.psum`` and the others) and ``torch.func`` transforms.
        mesh: its mesh; in ``fs.shard`` that of the program around it.
        in_specs: a tree prefix of the positional arguments: how each is cut. Axes that are not named hold equal
            copies. Arguments passed by keyword take the entry of their position; keyword-only ones need one spec for
            all. Sharded arguments that rest in another way are moved.
        out_specs: a tree prefix of the result: how the blocks join. Never moves data: an axis that is not named is a
            promise that its ranks hold the same.
        check: refuse a promise that the types do not prove. With ``check=False`` it is believed; gradients stay those
            of the function that it promises.
        axis_names: the axes over which ranks are seen; None: all (in another ``shard_map``: all that are left). Over
            the others the body is a global program.

    Returns:
        a function of the same arguments, to be called alone, in ``fs.shard``, or in another ``shard_map`` over
        different axes. It has ``lower`` as sharded functions do, and ``fs.grad`` takes it.

    Raises:
        ShardingError: specs that do not fit their values, dims that the axes do not divide, unproven promises; with
            the function, the path, the axis and the source line.
    """
    if not isinstance(mesh, Mesh):
        raise ShardingError(f"`mesh` must come from `fs.make_mesh`, got {type(mesh).__name__}.")
    names = None if axis_names is None else mesh.sort_axes({axis_names} if isinstance(axis_names, str) else axis_names)
    return ShardMapped(_Body(fn, mesh, in_specs, out_specs, check, names))


class ShardMapped(Sharded):
    """A function of the local view; see :func:`shard_map`."""

    def __init__(self, body: _Body, fn: Callable | None = None):
        fn = body.function if fn is None else fn
        super().__init__(fn, shard(fn, body.mesh, stored_argnums=()).options)
        self.body = body

    def _call(self, args, kwargs):
        if compat.current_tracer() is not None:
            return self._function()(*args, **kwargs)
        call = self._bind(args, kwargs)
        check_leaves(call)
        # Also under `disable_jit`: what each rank computes is no single-device program.
        return self._program(call).checked(call)

    def _transformed(self, transform: Callable) -> ShardMapped:
        return ShardMapped(self.body, transform(self.fn))

    def _inputs(self, call: Call) -> tuple[list[Input], list[torch.Tensor]]:
        """Plain tensors come in cut as the specs say; sharded ones as they rest, to be moved by the program."""
        mesh, wide, inputs, fakes = call.mesh, is_wide(call.leaves), [], []
        for path, x, spec in zip(call.paths, call.leaves, self._leaf_specs(call), strict=True):
            shape, dtype = abstract(path, x, wide)
            own = getattr(x, "spec", None) if isinstance(x, ShapeDtype) else None
            placed = isinstance(x, DTensor) or own is not None
            dims = dims_of(x) if isinstance(x, DTensor) else normalize(own or spec, len(shape), mesh.axis_names, path)
            check_sizes(shape, dims, mesh.shape, mesh.model_axes, path, even=not placed)
            inputs.append(Input(path, shape, dtype, dims, "stored" if placed else "rows"))
            fakes.append(torch.empty(shape, dtype=dtype, device="meta"))
        return inputs, fakes

    def _leaf_specs(self, call: Call) -> list:
        positional, named = trees.unflatten(call.treedef, call.leaves)
        return self.body.specs(tuple(positional), named)


class _Body:
    """The user's function with its specs: ``function`` is the region as a part of a global program."""

    def __init__(self, fn, mesh: Mesh, in_specs, out_specs, check: bool, axes: tuple[str, ...] | None):
        self.fn, self.mesh, self.in_specs, self.out_specs = fn, mesh, in_specs, out_specs
        self.check, self.axes = check, axes
        self.name = getattr(fn, "__name__", type(fn).__name__)

        @functools.wraps(fn)
        def function(*args, **kwargs):
            return self._run(args, kwargs)

        self.function = function

    # ---- specs ----------------------------------------------------------------------------------------------------
    def specs(self, args: tuple, kwargs: dict) -> list:
        """One spec per leaf of ``(args, kwargs)``, in the order of its leaves."""
        prefix = self.in_specs
        if prefix is None or isinstance(prefix, P):
            return [prefix] * len(trees.flatten((args, kwargs))[0])
        if not isinstance(prefix, tuple | list):
            raise ShardingError(
                f"`in_specs` of `{self.name}` is {prefix!r}: it is a P, or a tuple with one entry for each argument."
            )
        names = argument_names(self.fn, len(prefix))
        where = {name: i for i, name in enumerate(names)}
        unknown = sorted(k for k in kwargs if k not in where)
        if unknown:
            raise ShardingError(
                f"`{self.name}` got the keyword argument {unknown[0]!r}, for which `in_specs` has no entry: entries "
                f"belong to {', '.join(names)}. Give one spec for all arguments, or make it positional."
            )
        if len(args) + len(kwargs) != len(prefix):
            raise ShardingError(
                f"`in_specs` of `{self.name}` has {len(prefix)} entries, but it got {len(args) + len(kwargs)} "
                "arguments: give one entry for each."
            )
        found = []
        for entry, arg, name in zip(prefix, args, names, strict=False):
            found += trees.broadcast_prefix(entry, arg, f"the in_specs of `{name}`")
        for name, arg in sorted(kwargs.items()):
            found += trees.broadcast_prefix(prefix[where[name]], arg, f"the in_specs of `{name}`")
        return found

    def _manual(self, outer: v.Region | None) -> tuple[str, ...]:
        taken = () if outer is None else outer.manual
        axes = tuple(a for a in self.mesh.axis_names if a not in taken) if self.axes is None else self.axes
        if outer is not None and outer.mesh != self.mesh:
            raise ShardingError(f"`{self.name}` is on {self.mesh!r}, the `shard_map` around it on {outer.mesh!r}.")
        if not axes or set(axes) & set(taken):
            raise ShardingError(
                f"`{self.name}` would be manual over {', '.join(axes) or 'no axis'} inside of `{outer.name}`, which is "
                f"manual over {', '.join(taken)}: nested `shard_map`s name different axes in `axis_names`."
                if outer is not None
                else f"`{self.name}`: `axis_names` is empty. Name the axes over which the body sees ranks."
            )
        return axes

    def _dims(self, spec, ndim: int, axes, what: str):
        dims = normalize(spec, ndim, self.mesh.axis_names, what)
        for axis in axes_of(dims):
            if axis not in axes:
                raise ShardingError(
                    f"the spec {spec} of {what} names {axis!r}, over which `{self.name}` is not manual: it is over "
                    f"{', '.join(axes)}. Specs of a `shard_map` name axes of `axis_names` only."
                )
        return dims

    # ---- the region -----------------------------------------------------------------------------------------------
    def _run(self, args, kwargs):
        if compat.current_tracer() is None:
            raise ShardingError(f"`{self.name}`: the body of a `shard_map` runs in a traced program only.")
        outer = v.region()
        axes = self._manual(outer)
        group = self.mesh.alias(axes)
        specs = self.specs(args, kwargs)
        paths, leaves, treedef = trees.flatten_with_paths((list(args), kwargs))
        names = argument_names(self.fn, len(args))
        paths = [locate(path, list(range(len(args))), names)[1] for path in paths]
        enter = lambda x: manual.to_local(x, encode_dims(((),) * x.ndim), group)
        inner = v.Region(self.name, self.mesh, axes, outer, enter)  # before its blocks are made
        rows = zip(paths, leaves, specs, strict=True)
        blocks = [self._block(path, x, spec, axes, group) for path, x, spec in rows]
        positional, named = trees.unflatten(treedef, blocks)
        with v.entering(inner):
            out = self._with_line(lambda: self.fn(*positional, **named))
            return self._with_line(lambda: self._leave(out, axes, group, inner))

    def _block(self, path, x, spec, axes, group):
        what = f"{path} of `{self.name}`"
        if not isinstance(x, torch.Tensor):
            if isinstance(x, bool | int | float) and not axes_of(spec):
                return x
            raise ShardingError(
                f"{what} is a {type(x).__name__} under the spec {spec}: arguments are tensors and numbers."
            )
        (x,) = lifted(x)
        if (outer := v.region()) is not None:
            x = outer.inside(x)
        dims = self._dims(spec, x.ndim, axes, what)
        check_sizes(x.shape, dims, self.mesh.shape, (), what, even=True)
        return manual.to_local(x, encode_dims(dims), group)

    def _leave(self, out, axes, group, inner: v.Region):
        paths, leaves, treedef = trees.flatten_with_paths(out)
        specs = trees.broadcast_prefix(self.out_specs, out, f"the out_specs of `{self.name}`")
        rows = zip(paths, leaves, specs, strict=True)
        return trees.unflatten(treedef, [self._global(path, y, spec, axes, group, inner) for path, y, spec in rows])

    def _global(self, path, y, spec, axes, group, inner: v.Region):
        what = f"result{_at(path)} of `{self.name}`"
        if isinstance(y, bool | int | float):
            y = torch.tensor(y)
        if not isinstance(y, torch.Tensor):
            raise ShardingError(f"{what} is a {type(y).__name__}: results are tensors, numbers and containers of them.")
        (y,) = lifted(y)
        y = inner.inside(y)
        dims = self._dims(spec, y.ndim, axes, what)
        have, named = v.types().of(y) & set(axes), set(axes_of(dims))
        if extra := have - named:
            if self.check:
                self._unproven(what, spec, extra)
            y = manual.promise(y, self.mesh.alias(extra))
        return manual.to_global(v.pvary(y, named - have, group), encode_dims(dims), group)

    def _unproven(self, what, spec, extra):
        shown, axis = ", ".join(map(repr, sorted(extra))), sorted(extra)[0]
        raise ShardingError(
            f"{what} may differ between the ranks of {shown}, but `out_specs` has {P() if spec is None else spec} for "
            f"it, which promises that they hold the same. Make them equal with `fs.psum(y, {axis!r})` or `fs.pmean`, "
            f"name {axis!r} in its out-spec, or, if you know that they are equal, pass `check=False`."
        )

    def _with_line(self, run):
        """The user's line is added once, where an error leaves the body."""
        try:
            return run()
        except ShardingError as error:
            line = error_line(error) or self._defined()
            if line is None or ".py:" in str(error).split(" ")[0] or line in str(error):
                raise
            raise ShardingError(f"{line}: {error}") from None

    def _defined(self) -> str | None:
        code = getattr(inspect.unwrap(self.fn), "__code__", None)
        return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _at(path: str) -> str:
    return "" if not path else path if path.startswith("[") else f".{path}"
