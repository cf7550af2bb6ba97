"""Run by the suite in a process of its own: JAX on 8 CPU devices evaluates all cases and writes what it got.

python jax_side.py OUT CASES_PER_BODY SEED
"""

from __future__ import annotations

import os
import pickle
import sys

# Small programs, each run once: compiling them well would be most of the time.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import itertools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cases  # noqa: E402

jax.config.update("jax_enable_x64", True)


def spec(dims):
    return P(*dims)


class L:
    sin, cos, tanh, exp, where, concatenate = jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.where, jnp.concatenate
    psum, pmean, pmax, all_gather, psum_scatter = lax.psum, lax.pmean, lax.pmax, lax.all_gather, lax.psum_scatter
    all_to_all, ppermute, axis_index, stop_gradient = lax.all_to_all, lax.ppermute, lax.axis_index, lax.stop_gradient
    grad, vmap, amax = jax.grad, jax.vmap, jnp.max

    @staticmethod
    def nested(fn, in_specs, out_spec, names):
        return jax.shard_map(fn, in_specs=tuple(map(spec, in_specs)), out_specs=spec(out_spec), axis_names=names)


def transforms(fn, args):
    scalar = lambda *a: jnp.cos(fn(*a)).sum()
    every = tuple(range(len(args)))
    grad = jax.grad(scalar, argnums=every)
    squares = lambda *a: sum((g * g).sum() for g in grad(*a))
    batch = [jnp.stack([args[0], args[0] * 0.5]), *args[1:]]
    in_axes = (0, *(None,) * (len(args) - 1))
    return {
        "value": lambda: fn(*args),
        "grad": lambda: grad(*args),
        "grad2": lambda: jax.grad(squares, argnums=every)(*args),
        "jvp": lambda: jax.jvp(fn, tuple(args), tuple(a * 0.5 for a in args))[1],
        "vmap": lambda: jax.vmap(fn, in_axes)(*batch),
        "vmapgrad": lambda: jax.vmap(jax.grad(scalar), in_axes)(*batch),
    }


def on_mesh(mesh, body, in_specs, out_spec, names=None):
    kwargs = {} if names is None else {"axis_names": names}
    return jax.shard_map(
        lambda *xs: body(L, *xs), mesh=mesh, in_specs=tuple(map(spec, in_specs)), out_specs=spec(out_spec), **kwargs
    )


def run(mesh, case):
    args = [jnp.asarray(a) for a in case.data()]
    fn = on_mesh(mesh, case.body, case.in_specs, case.out_spec, cases.AXIS_NAMES.get(case.name.rsplit("_", 1)[0]))
    wanted = {k: f for k, f in transforms(fn, args).items() if k in case.transforms}
    out = evaluate(wanted)
    sharding = NamedSharding(mesh, spec(case.out_spec))
    blocks = [None] * 8
    for shard in jax.device_put(out["value"], sharding).addressable_shards:
        blocks[shard.device.id] = np.asarray(shard.data)
    return {"out": jax.tree.map(lambda x: x if isinstance(x, str) else np.asarray(x), out), "blocks": blocks}


def evaluate(wanted):
    try:
        return jax.jit(lambda: {k: f() for k, f in wanted.items()})()
    except Exception:
        return {k: attempt(f) for k, f in wanted.items()}


def attempt(f):
    try:
        return jax.jit(f)()
    except Exception as error:  # JAX's own gaps, such as the transpose of a stacking all_to_all
        return f"{type(error).__name__}: {error}"


def refused(mesh, program):
    body, shapes, in_specs, out_spec = program
    try:
        y = on_mesh(mesh, body, in_specs, out_spec)(*(jnp.ones(s) for s in shapes))
    except Exception as error:  # whatever type JAX chose
        return f"{type(error).__name__}: {error}"
    return np.asarray(y)


def device_maps():
    """Which rank holds which block, for every spec of a matrix over three axes."""
    mesh, found = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3), {}
    for dims in cases.specs_of(2, ("a", "b", "c")):
        index = NamedSharding(mesh, spec(dims)).devices_indices_map((8, 16))
        found[dims] = {d.id: [s.indices(n)[:2] for s, n in zip(cut, (8, 16), strict=True)] for d, cut in index.items()}
    return found


def main(path, per_body, seed):
    mesh = jax.make_mesh(tuple(cases.MESH.values()), cases.AXES, axis_types=(AxisType.Auto,) * 2)
    result = {"maps": device_maps(), "cases": {}, "wrong": {}}
    for case in cases.sampled(int(per_body), int(seed)):
        result["cases"][case.name] = run(mesh, case)
    for name, program in itertools.chain(cases.WRONG.items(), cases.RIGHT_AFTER_ALL.items()):
        result["wrong"][name] = refused(mesh, program)
    with open(path, "wb") as file:
        pickle.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
