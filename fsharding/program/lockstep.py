"""Run one local program for all ranks of a mesh in one process, node by node: no process groups, exact.

The text of a local program is the same on every rank, so the ranks advance together; a collective is a function from
all ranks' arguments to all ranks' results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from fsharding.annotate.mesh import Mesh
from fsharding.annotate.spec import local_slices, padded_shape
from fsharding.comm import groups, manual
from fsharding.errors import ShardingError
from fsharding.moe import exchange as moe_exchange
from fsharding.program.partition import Input, LocalProgram
from fsharding.program.source import line_of

C = torch.ops._c10d_functional
REDUCE = {
    "sum": lambda xs: torch.stack(xs).sum(0).to(xs[0].dtype),
    "max": lambda xs: torch.stack(xs).amax(0),
    "min": lambda xs: torch.stack(xs).amin(0),
}


def _all_gather(args):
    out = torch.cat([a[0] for a in args])
    return [out.clone() for _ in args]


def _reduce_scatter(args):
    total = REDUCE[args[0][1]]([a[0] for a in args])
    return [part.clone() for part in total.chunk(len(args))]


def _all_reduce(args):
    total = REDUCE[args[0][1]]([a[0] for a in args])
    return [total.clone() for _ in args]


def _exchange_counts(args):
    parts = [a[0].view(len(args), -1) for a in args]
    return [torch.stack([p[r] for p in parts]) for r in range(len(args))]


def _exchange(args):
    send = [(a[1][1] if a[4] else a[1][0]).tolist() for a in args]
    expect = [(a[1][0] if a[4] else a[1][1]).tolist() for a in args]
    for r, (a, sizes) in enumerate(zip(args, send, strict=True)):
        assert a[0].shape[0] == sum(sizes), f"rank {r} holds {a[0].shape[0]} rows to send as {sizes}"
        assert expect[r] == [s[r] for s in send], f"rank {r} expects {expect[r]}, is sent {[s[r] for s in send]}"
    pieces = [list(a[0].split(sizes)) for a, sizes in zip(args, send, strict=True)]
    return [torch.cat([p[r] for p in pieces]) for r in range(len(args))]


def _all_to_all(args):
    pieces = [a[0].chunk(len(args)) for a in args]
    return [torch.cat([p[r] for p in pieces]) for r in range(len(args))]


def _send(args):
    out = [torch.zeros_like(a[0]) for a in args]
    for source, target in enumerate(args[0][1]):
        if target >= 0:
            out[target] = args[source][0].clone()
    return out


def _coalesced(single):
    """A group call: the same collective on each of a list of operands."""

    def run(args):
        many = [single([(a[0][i], *a[1:]) for a in args]) for i in range(len(args[0][0]))]
        return [[one[r] for one in many] for r in range(len(args))]

    return run


COLLECTIVES: dict[Callable, Callable] = {
    C.all_gather_into_tensor_coalesced.default: _coalesced(_all_gather),
    C.reduce_scatter_tensor_coalesced.default: _coalesced(_reduce_scatter),
    C.all_reduce_coalesced.default: _coalesced(_all_reduce),
    C.all_gather_into_tensor.default: _all_gather,
    C.reduce_scatter_tensor.default: _reduce_scatter,
    C.all_reduce.default: _all_reduce,
    moe_exchange.exchange_counts: _exchange_counts,
    moe_exchange.exchange: _exchange,
    C.all_to_all_single.default: _all_to_all,
    manual.send: _send,
}
"""Op -> (arguments of each rank of one group, in group order) -> result of each."""


def run(graph: fx.Graph, mesh: Mesh, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Per rank, the outputs of ``graph`` on that rank's ``inputs``."""
    holders = [n for n in graph.nodes if n.op == "placeholder"]
    env = [dict(zip(holders, own, strict=True)) for own in inputs]
    left = {n: len(n.users) for n in graph.nodes}
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        args = [fx.node.map_arg((node.args, node.kwargs), e.__getitem__) for e in env]
        if node.op == "output":
            return [list(a[0][0]) for a in args]
        try:
            _step(node, mesh, env, args)
        except (ShardingError, AssertionError):
            raise
        except Exception as error:
            raise ShardingError(f"{line_of(node)}: `{node.target}` failed: {error}") from error
        for used in node.all_input_nodes:
            left[used] -= 1
            if not left[used]:
                for e in env:
                    del e[used]
    raise AssertionError("a graph ends with its output")


def _step(node, mesh, env, args):
    if node.target is C.wait_tensor.default:
        for e, (a, _) in zip(env, args, strict=True):
            e[node] = a[0]
        return
    if node.target in COLLECTIVES:
        alias = next(a for a in node.args if isinstance(a, str) and a.startswith("fs"))
        for ranks in mesh.group_ranks(groups.parse(alias)[1]):
            for r, y in zip(ranks, COLLECTIVES[node.target]([args[r][0] for r in ranks]), strict=True):
                env[r][node] = y
        return
    for rank, (e, (a, kw)) in enumerate(zip(env, args, strict=True)):
        with groups.as_rank(rank):
            e[node] = node.target(*a, **kw)


def evaluate(lowered, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Global values in, global values out: cut for every rank, run in lockstep, put together again.

    Padding of uneven blocks is filled with NaN, so that a program that reads it shows. Raises AssertionError where
    ranks that must hold the same block differ in a bit.
    """
    local, mesh = lowered.local, lowered.local.mesh
    flat = [torch.as_tensor(x) for x in leaves] + list(lowered.program.constants)
    blocks = [
        [cut(x, spec, mesh, rank) for x, spec in zip(flat, local.inputs, strict=True)] for rank in range(mesh.size)
    ]
    return join(local, run(local.graph, mesh, blocks))


def join(local: LocalProgram, out: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The global values of which ``out`` holds the ranks' blocks, as :func:`run` gives them."""
    return [
        _join([own[i] for own in out], shape, dims, local.mesh, i) for i, (_, dims, shape) in enumerate(local.outputs)
    ]


def cut(x: torch.Tensor, spec: Input, mesh: Mesh, rank: int) -> torch.Tensor:
    """The block that a rank holds, its padding NaN."""
    own = x[local_slices(x.shape, spec.dims, mesh.shape, mesh.coordinates(rank))]
    block = torch.full(
        padded_shape(x.shape, spec.dims, mesh.shape), torch.nan if x.is_floating_point() else 1, dtype=x.dtype
    )
    block[tuple(slice(0, n) for n in own.shape)] = own
    return block


def _join(blocks, shape, dims, mesh, number):
    out = blocks[0].new_zeros(shape)
    filled = torch.zeros(shape, dtype=torch.bool)
    for rank, block in enumerate(blocks):
        where = local_slices(shape, dims, mesh.shape, mesh.coordinates(rank))
        own = block[tuple(slice(0, s.stop - s.start) for s in where)]
        known = filled[where]
        same = (out[where] == own) | ((out[where] != out[where]) & (own != own))
        assert bool((same | ~known).all()), f"result {number}: rank {rank} holds another value than an earlier replica"
        out[where] = own
        filled[where] = True
    assert bool(filled.all()), f"result {number}: no rank holds some of its elements"
    return out
