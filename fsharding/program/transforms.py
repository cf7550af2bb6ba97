"""Gradients, micro-batches and precision: plain function transforms, meaningful with and without ``shard``."""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsharding import _compat as compat
from fsharding import oplib
from fsharding import tree as trees
from fsharding.annotate.param import find_dtype
from fsharding.errors import ShardingError
from fsharding.program.bundle import casts


def floating(value: Any, what: str) -> torch.dtype | None:
    """A floating dtype from itself or its name, None from None. Raises ShardingError with the names that work."""
    dtype = find_dtype(value)
    if value is None:
        return None
    if dtype is None or not dtype.is_floating_point:
        raise ShardingError(f"{what}={value!r} is no floating dtype: use bfloat16, float16, float32 or float64.")
    return dtype


@dataclass(frozen=True)
class Precision:
    """Mixed precision of a sharded function.

    Floating leaves of the differentiated (stored) argument and of the batch are cast to ``compute`` where the
    differentiated function begins: stored leaves before their gather, so that fewer bytes travel. Gradients come in
    each leaf's own dtype; what is summed over ranks is summed in ``reduce``. A function without ``fs.grad`` inside is
    cast at its entry.

    Args:
        compute: dtype of the forward and backward pass (name or ``torch.dtype``).
        reduce: dtype of gradient reduce-scatters; None: the dtype that the gradient has.
        keep: exceptions, path pattern (``fnmatch``, as in ``"layers*.router"``) -> dtype.
    """

    compute: Any = "bfloat16"
    reduce: Any = "float32"
    keep: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "compute", floating(self.compute, "Precision.compute"))
        object.__setattr__(self, "reduce", floating(self.reduce, "Precision.reduce"))
        object.__setattr__(self, "keep", {k: floating(v, f"Precision.keep[{k!r}]") for k, v in dict(self.keep).items()})

    def __hash__(self):
        return hash((self.compute, self.reduce, tuple(sorted(self.keep.items(), key=lambda kv: kv[0]))))

    def dtype_of(self, path: str) -> torch.dtype:
        for pattern, dtype in self.keep.items():
            if fnmatch.fnmatchcase(path, pattern):
                return dtype
        return self.compute

    def cast(self, tree: Any) -> Any:
        """The tree with its floating leaves in compute dtype."""
        paths, leaves, treedef = trees.flatten_with_paths(tree)
        where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        dtypes = [self.dtype_of(paths[i]) for i in where]
        if compat.current_tracer() is not None and not oplib.in_region():  # in a region each leaf has its own type
            made = casts(oplib.lifted(*(leaves[i] for i in where)), dtypes)
        else:
            made = [leaves[i].to(d) for i, d in zip(where, dtypes, strict=True)]
        new = dict(zip(where, made, strict=True))
        return trees.unflatten(treedef, [new.get(i, x) for i, x in enumerate(leaves)])


class PrecisionScope:
    """Where the casts of one call of a sharded function happen; ``used`` tells whether any ``fs.grad`` took them."""

    def __init__(self, precision: Precision | None):
        self.precision, self.used, self.depth = precision, False, 0


_scope: contextvars.ContextVar[PrecisionScope | None] = contextvars.ContextVar("fsharding_precision", default=None)


@contextlib.contextmanager
def precision_scope(precision: Precision | None):
    scope = PrecisionScope(precision)
    token = _scope.set(scope)
    try:
        yield scope
    finally:
        _scope.reset(token)


def with_precision(fn: Callable, precision: Precision | None) -> Callable:
    """``fn`` with the casts of ``precision``: inside its ``fs.grad``, or at its entry if it has none."""
    if precision is None:
        return fn

    @functools.wraps(fn)
    def run(*args, **kwargs):
        with precision_scope(precision) as scope:
            out = fn(*args, **kwargs)
        if scope.used:
            return out
        with precision_scope(None):
            return fn(*(precision.cast(a) for a in args), **precision.cast(kwargs))

    return run


def differentiated(fn: Callable, precision: Precision | None) -> Callable:
    """``fn`` as the function of a gradient that begins here: its arguments are cast, those of gradients inside not
    again."""

    @functools.wraps(fn)
    def run(*args, **kwargs):
        with precision_scope(precision) as scope, _casting(scope, args, kwargs) as (a, kw):
            return fn(*a, **kw)

    return run


def check_gradient_scope(grad, x):
    """Refuse ``torch.func.grad`` under a precision: it would train on rounded parameters without a word."""
    scope = _scope.get()
    if scope is not None and scope.precision is not None and not scope.depth:
        raise ShardingError(
            "`precision=` casts where `fs.grad` or `fs.value_and_grad` begins; this function differentiates with "
            "`torch.func`. Use `fs.value_and_grad`, or cast by hand."
        )


def value_and_grad(fn: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """A function that returns ``(value, grads)``, or ``((value, aux), grads)``: JAX's results.

    Args:
        fn: returns a 0-d floating tensor, with ``has_aux`` a pair of it and any tree.
        argnums: which positional arguments to differentiate; an int gives one tree of gradients, a sequence a tuple.

    Gradients have the structure, shapes and dtypes of the arguments. The pull-back runs without recording unless it is
    itself differentiated, so fused backward kernels stay fused.

    Raises:
        ShardingError: leaves that are not floating tensors, a value that is not 0-d, DTensor leaves outside of
            ``shard``.
    """
    lifted = getattr(fn, "_transformed", None)
    if lifted is not None:  # the gradient of a sharded function is the sharded gradient
        return lifted(lambda f: value_and_grad(f, argnums, has_aux))
    single = isinstance(argnums, int)
    numbers = (argnums,) if single else tuple(argnums)

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        for n in numbers:
            if not -len(args) <= n < len(args):
                raise ShardingError(
                    f"`argnums` names argument {n}, but the function got {len(args)} positional arguments."
                )
        where = tuple(n % len(args) for n in numbers)
        if len(set(where)) < len(where):
            raise ShardingError(
                f"`argnums={argnums!r}` names an argument twice: its gradient would be split between them."
            )
        paths, leaves, treedef = trees.flatten_with_paths(tuple(args[n] for n in where))
        _check_leaves(paths, leaves)
        scope = _scope.get()

        aux_tree: dict[str, Any] = {}

        def inner(*xs):
            full = list(args)
            for n, tree in zip(where, trees.unflatten(treedef, xs), strict=True):
                full[n] = tree
            with _casting(scope, full, kwargs) as (a, kw):
                out = _scalar(fn(*a, **kw), has_aux)
            return (out[0], _tensors_of(out[1], aux_tree)) if has_aux else out

        if not leaves:
            out = inner()
            out = (out[0], _with_tensors(out[1], aux_tree)) if has_aux else out
            return out, trees.unflatten(treedef, ()) if not single else args[where[0]]
        value, pull, *aux = torch.func.vjp(inner, *leaves, has_aux=has_aux)
        outer = compat.under_functorch() or any(x.requires_grad for x in leaves)
        with torch.set_grad_enabled(outer), _pulling(scope):
            grads = pull(torch.ones_like(value))
        grads = trees.unflatten(treedef, grads)
        return (value, _with_tensors(aux[0], aux_tree)) if has_aux else value, grads[0] if single else grads

    return wrapped


def _tensors_of(aux: Any, tree: dict) -> tuple:
    """The tensors of an auxiliary result; the rest of it (numbers, strings, structure) is kept in ``tree``."""
    _, leaves, tree["def"] = trees.flatten_with_paths(aux)
    tree["leaves"] = [None if isinstance(x, torch.Tensor) else x for x in leaves]
    return tuple(x for x in leaves if isinstance(x, torch.Tensor))


def _with_tensors(tensors, tree: dict) -> Any:
    it = iter(tensors)
    return trees.unflatten(tree["def"], [next(it) if x is None else x for x in tree["leaves"]])


def grad(fn: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """As :func:`value_and_grad`, returning ``grads``, or ``(grads, aux)``."""
    lifted = getattr(fn, "_transformed", None)
    if lifted is not None:
        return lifted(lambda f: grad(f, argnums, has_aux))
    both = value_and_grad(fn, argnums, has_aux)

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


@contextlib.contextmanager
def _casting(scope, args, kwargs):
    """The arguments in compute dtype, once, at the outermost gradient."""
    if scope is None or scope.precision is None or scope.depth:
        yield args, kwargs
        return
    scope.used = True
    scope.depth += 1
    try:
        yield [scope.precision.cast(a) for a in args], scope.precision.cast(kwargs)
    finally:
        scope.depth -= 1


@contextlib.contextmanager
def _pulling(scope):
    if scope is None:
        yield
        return
    scope.depth += 1
    try:
        yield
    finally:
        scope.depth -= 1


def _check_leaves(paths, leaves):
    for path, x in zip(paths, leaves, strict=True):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            kind = f"a tensor of dtype {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise ShardingError(
                f"cannot differentiate with respect to {_argument(path)}: it is {kind}, not a floating tensor. Keep "
                "integers and settings in another argument, or close over them."
            )
        if isinstance(x, DTensor):
            raise ShardingError(
                f"{_argument(path)} is a sharded tensor, outside of a sharded function. Wrap the whole: "
                "`fs.shard(fs.value_and_grad(loss), mesh)`."
            )


def _argument(path):
    return f"the argument at {path}" if path else "the argument"


def _scalar(out, has_aux):
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ShardingError(f"with `has_aux=True` the function returns a pair (value, aux), got {type(out).__name__}.")
    value = out[0] if has_aux else out
    if not isinstance(value, torch.Tensor) or value.ndim or not value.is_floating_point():
        what = (
            f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        )
        raise ShardingError(
            f"a differentiated function returns one floating 0-d value, got {what}. Sum or average it (for extra "
            "results use `has_aux=True`)."
        )
    return out


def microbatches(batch: Any, n: int) -> list[Any]:
    """The batch in ``n`` equal parts, a list of trees: row r of part i is row ``r·n + i``.

    Strided, so that each part is split over the mesh as the batch is and no row moves. Numbers and 0-d leaves are
    repeated.

    Raises:
        ShardingError: a leading dim that ``n`` does not divide, naming the leaf.
    """
    if not isinstance(n, int) or n < 1:
        raise ShardingError(f"the number of micro-batches must be a positive int, got {n!r}.")

    def part(i):
        def leaf(path, x):
            if not isinstance(x, torch.Tensor) or not x.ndim:
                return x
            if x.shape[0] % n:
                raise ShardingError(
                    f"{path or 'the batch'} has {x.shape[0]} rows, which {n} micro-batches do not divide."
                )
            return x.unflatten(0, (x.shape[0] // n, n)).select(1, i) if n > 1 else x

        return trees.map_with_path(leaf, batch)

    return [part(i) for i in range(n)]


def accumulate(fn: Callable, n: int = 1) -> Callable:
    """Loss and gradients over ``n`` micro-batches with one normalisation for all.

    Args:
        fn: ``fn(params, *batch) -> (loss_sum, weight)``: the *sum* of the losses of valid tokens and their number (or
            weight).

    Returns:
        ``run(params, *batch) -> (loss, grads)`` with ``loss = Σ loss_sum / Σ weight`` and its gradient: ragged and
        masked batches, ranks and micro-batches give what one device gives for the whole batch. A weight of zero in all
        gives zeros. Gradients of half-precision leaves are accumulated in float32.
    """
    lifted = getattr(fn, "_transformed", None)
    if lifted is not None:
        return lifted(lambda f: accumulate(f, n))
    both = value_and_grad(fn, has_aux=True)

    @functools.wraps(fn)
    def run(params, *batch):
        total = weight = grads = None
        for part in microbatches(batch, n):
            (loss, w), g = both(params, *part)
            w = torch.as_tensor(w, dtype=loss.dtype, device=loss.device).detach()
            g = trees.map_with_path(lambda _, x: _wide(x), g)
            total, weight = (loss, w) if total is None else (total + loss, weight + w)
            grads = g if grads is None else trees.map_with_path(lambda _, a, b: a + b, grads, g)
        weight = torch.where(weight == 0, torch.ones_like(weight), weight)
        scaled = trees.map_with_path(lambda _, g, p: (g / weight).to(p.dtype), grads, params)
        return total / weight, scaled

    return run


def _wide(x):
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
