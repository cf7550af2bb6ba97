"""When a local program communicates: gathers ahead of their use, reductions behind their gradient, waits late.

Pure passes over the graph; nothing here knows a process. The compute of a program keeps its order. Around it move

* *gathers* of stored leaves (a chain of casts, the collective, its wait, reshapes): one bucket per layer and direction,
  issued ``prefetch`` buckets ahead, waited for at the first use;
* *reductions* of gradients: issued when the bucket's last gradient is there, waited for where the result is used;
* collectives of *tokens*: issued where these are made, waited for where they are read.

Gathers and reductions start right before a product, so that they hide behind work and do not share the wires with what
is waited for meanwhile. A leaf that both directions use is gathered for each (``regather``, in ``chains.py``), so that
its whole form lives only while it is used.
"""

from __future__ import annotations

import bisect
import heapq
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.fx as fx

from fsharding.errors import ShardingError
from fsharding.moe import exchange
from fsharding.moe.expert_ops import tiles_raw
from fsharding.program.chains import GATHER, PRODUCTS, REDUCE, WAIT, Chains, layer_of, regather
from fsharding.program.coalesce import coalesce
from fsharding.program.cost import node_flops
from fsharding.program.graphs import drop_dead
from fsharding.program.hold import layer_major, merge_reductions
from fsharding.program.partition import LocalProgram
from fsharding.program.source import phase_of

_PLANS = {exchange.expert_order, tiles_raw}


@dataclass(frozen=True)
class Schedule:
    """When parameters are gathered and gradients reduced.

    Args:
        prefetch: how many layers ahead of its first use a layer's gather is issued; 0 issues it where it is used.
        regather: gather a leaf again for the backward pass instead of keeping it whole: less memory, more traffic. What
            the forward pass uses last is kept.
        pack_mib: leaves of up to this size, gathered, travel packed in one buffer; larger ones in one group call
            without copies. 0 switches both off: one collective a leaf.
        in_flight: at most this many buckets of reductions run before the oldest is waited for; None: no bound. Their
            unreduced gradients stay alive as long.
        hold: "layer" runs all micro-batches of a layer before the next layer (in both directions), so that one gather
            serves them all; None keeps the order in which the function computes.
    """

    prefetch: int = 1
    regather: bool = True
    pack_mib: float = 4.0
    in_flight: int | None = 2
    hold: str | None = None

    def __post_init__(self):
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ShardingError(f"`prefetch` is a number of layers, 0 or more, got {self.prefetch!r}.")
        if self.in_flight is not None and (not isinstance(self.in_flight, int) or self.in_flight < 1):
            raise ShardingError(f"`in_flight` is a number of buckets, 1 or more, or None, got {self.in_flight!r}.")
        if not self.pack_mib >= 0:
            raise ShardingError(f"`pack_mib` is a size in MiB, 0 or more, got {self.pack_mib!r}.")
        if self.hold not in (None, "layer"):
            raise ShardingError(f"`hold` is None or 'layer', got {self.hold!r}.")


def schedule(program: LocalProgram, plan: Schedule, apart: bool = False) -> None:
    """Rewrite the graph in place. Values do not change: only when things run, and how collectives are grouped.

    ``apart``: the two directions will run at two times, so nothing gathered is kept between them.
    """
    graph = program.graph
    chains = Chains(program)
    if plan.hold == "layer":
        layer_major(graph, chains, chains.layers(), _sort)
        merge_reductions(graph, chains)
        chains = Chains(program)
    if plan.regather:
        regather(graph, chains, apart)
        chains = Chains(program)
    buckets = _order(graph, chains, plan)
    if plan.pack_mib:
        order = {n: i for i, n in enumerate(graph.nodes)}
        for members in buckets:
            coalesce(graph, members, int(plan.pack_mib * 2**20), order)
    _channels(graph)
    drop_dead(graph)
    program.nodes = list(list(graph.nodes)[-1].args[0])  # waits were replaced
    graph.lint()


# ---- order -----------------------------------------------------------------------------------------------------------
_PREP, _LATE, _COMPUTE, _REST, _REDUCE = range(5)  # at one place, in this order


def _order(graph: fx.Graph, chains: Chains, plan: Schedule) -> list[list[fx.Node]]:
    """Move chains and reductions; returns the buckets: collectives of one layer, direction and group, side by side."""
    keys: dict[fx.Node, tuple] = {n: (i, _COMPUTE, i) for n, i in chains.position.items()}
    works = [i for n, i in chains.position.items() if node_flops(n)]
    gathers = _gather_buckets(graph, chains, keys, plan.prefetch, works)
    reductions = _reduce_buckets(graph, chains, keys, plan.in_flight, works)
    _sync_late(graph, chains, keys)
    _tokens_early(graph, keys)
    _sort(graph, keys)
    return gathers + reductions


def _beside(works: list[int], place: int) -> int | None:
    """Where the next product behind a place is: a collective that starts right before it has work to hide behind, and
    does not share the wires with one that is waited for in between."""
    i = bisect.bisect_right(works, place)
    return works[i] if i < len(works) else None


def _gather_buckets(graph, chains: Chains, keys, prefetch: int, works: list[int]) -> list[list[fx.Node]]:
    position = chains.position
    use = {n: min((position[u] for u in chains.users(n)), default=len(position)) for n in chains.moves}
    names, layers = chains.layers(), {}
    for node in sorted(chains.gathers(), key=lambda n: (use[n], position[n])):
        layers.setdefault((phase_of(node) == "backward", names[node]), []).append(node)
    spans = {at: (len(position), -1) for at in layers} | _spans(graph, chains, names)  # a leaf may be read by no op
    heavy = [i for n, i in position.items() if _computes(n)]
    order = sorted(layers, key=lambda at: min(use[n] for n in layers[at]))
    issue = {}
    for i, at in enumerate(order):
        own = min(use[n] for n in layers[at])
        place = _place(_ahead(i, order, spans, heavy, prefetch), order, spans) if prefetch else own
        work = _beside(works, place - 1) if place >= 0 else None
        issue.update(dict.fromkeys(layers[at], min(place if work is None else work, own)))
    for node in chains.moves:
        if node.target is GATHER:
            keys[node] = (issue[node], _LATE, len(position), position[node])
        elif node in chains.whole:
            keys[node] = (use[node], _LATE, position[node])
        else:  # in front of a gather, or no gather at all
            ahead = [issue[g] for g in _gathers_behind(node, chains)]
            keys[node] = (min([use[node], *ahead]), _PREP if ahead else _LATE, position[node])
    return _same_group(layers[at] for at in order)


def _sync_late(graph: fx.Graph, chains: Chains, keys) -> None:
    """The host looks at the split sizes right before the exchange that needs them, and what only the experts need is
    planned behind it: the device has work while the host waits, and while it launches."""
    late = set()
    for node in graph.nodes:
        planned = node.target is operator.getitem or node.target in _PLANS
        if node.target is exchange.host_sizes or (planned and any(a in late for a in node.all_input_nodes)):
            late.add(node)
    for node in sorted(late, key=chains.position.__getitem__, reverse=True):
        used = min((keys[u] for u in node.users), default=keys[node])
        keys[node] = (used[0], _LATE, chains.position[node])


def _tokens_early(graph: fx.Graph, keys) -> None:
    """Collectives of tokens start where these are made and are waited for where they are read."""
    for node in graph.nodes:
        note = node.meta.get("custom", {})
        if "collective" in note and note.get("tokens"):
            keys[node] = (keys[node.args[0]][0], _REDUCE, keys[node][-1])
            for wait in node.users:
                used = min((keys[u][0] for u in wait.users), default=keys[wait][0])
                keys[wait] = (used, _LATE, keys[wait][-1])


def _spans(graph: fx.Graph, chains: Chains, layers: dict[fx.Node, str]) -> dict[tuple, tuple[int, int]]:
    """Of each direction and layer the first and the last place where one of its leaves is read, gathered or not."""
    found: dict[tuple, tuple[int, int]] = {}
    for node in graph.nodes:
        if node in chains.moves or node.op != "call_function" or phase_of(node) == "update":
            continue
        for a in node.all_input_nodes:
            if a in layers:
                at, i = (phase_of(node) == "backward", layers[a]), chains.position[node]
                first, last = found.get(at, (i, i))
                found[at] = min(first, i), max(last, i)
    return found


def _computes(node: fx.Node) -> bool:
    """Does a node work long enough to hide a gather? Products, attention, experts."""
    target = node.target
    return target in PRODUCTS or (isinstance(target, torch._ops.OpOverload) and target.namespace == "fsharding")


def _ahead(i: int, order: list[tuple], spans, heavy: list[int], layers: int) -> int:
    """The layer during which the gather of layer ``i`` runs: ``layers`` back, those without work not counted."""
    while i >= 0 and layers:
        i -= 1
        if i >= 0:
            start, stop = spans[order[i]][0], spans[order[i + 1]][0]
            layers -= any(start <= at < stop for at in heavy)
    return i


def _place(i: int, order: list[tuple], spans) -> int:
    """Where layer ``i`` begins: behind the last use of the one before, at the latest where its own leaves are read."""
    if i < 0:
        return -1
    first = spans[order[i]][0]
    return min(first, spans[order[i - 1]][1] + 1) if i else first


def _gathers_behind(node: fx.Node, chains: Chains):
    for user in node.users:
        if user.target is GATHER and user in chains.moves:
            yield user
        elif user in chains.moves:
            yield from _gathers_behind(user, chains)


def _reduce_buckets(graph, chains: Chains, keys, in_flight: int | None, works: list[int]) -> list[list[fx.Node]]:
    position = chains.position
    stages, waits = _stages(graph, chains)
    buckets: dict[tuple, list[fx.Node]] = {}
    for node in sorted((n for n in stages if n.target in REDUCE), key=position.__getitem__):
        buckets.setdefault((stages[node], layer_of(node), node.target, _group(node)), []).append(node)
    ready = {n: max((position[a] for a in _sources(n, chains)), default=0) for n in stages}
    firsts = sorted({max(ready[n] for n in nodes) for key, nodes in buckets.items() if key[0] == 0})
    for (stage, *_), nodes in buckets.items():
        at = max(ready[n] for n in nodes)
        if stage:  # a second reduction starts where the next bucket does, when the first has long run
            at = next((f for f in firsts if f > at), len(position) - 1)
        work, last = _beside(works, at), len(position) + 2 * stage
        front, start = (at, _REST, stage), (at, _REDUCE, stage)
        if work is not None:  # behind all that is waited for there
            front, start = (work, _LATE, last + 1), (work, _LATE, last + 2)
        for node in nodes:
            keys[node] = (*start, position[node])
            for before in _before(node, chains):
                keys[before] = (*front, position[before])
    due = _due(chains, buckets, firsts, waits, in_flight, ready)
    for node in sorted(stages, key=position.__getitem__, reverse=True):
        if keys[node][1] == _COMPUTE:  # behind its collective: as late as it is used
            used = min((keys[u] for u in node.users if phase_of(u) != "update"), default=(len(position),))
            keys[node] = (min(used[0], due.get(node, len(position))), _LATE, position[node])
    _updates_behind(graph, chains, keys, stages)
    return _same_group(buckets.values())


def _updates_behind(graph, chains: Chains, keys, stages) -> None:
    """What an optimizer computes of a gradient waits for its reduction where that is due, not before."""
    moved = set(stages)
    for node in graph.nodes:
        if node.op == "call_function" and phase_of(node) == "update" and any(a in moved for a in node.all_input_nodes):
            place = max(keys[a][0] for a in node.all_input_nodes if a in moved)
            if place > keys[node][0]:
                keys[node] = (place, _LATE, chains.position[node])
            moved.add(node)


def _stages(graph, chains: Chains) -> tuple[dict[fx.Node, int], dict[fx.Node, fx.Node]]:
    """Of each node on the way to rest how many collectives are behind it; and of each collective its wait."""
    stages: dict[fx.Node, int] = {}
    waits: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in chains.rests:
            before = [stages[a] + (a.target is WAIT) for a in node.all_input_nodes if a in stages]
            stages[node] = max(before, default=0)
            if node.target is WAIT:
                waits[node.args[0]] = node
    return stages, waits


def _sources(node: fx.Node, chains: Chains):
    """What is computed of which a chain to rest is made."""
    for a in node.all_input_nodes:
        if a in chains.rests:
            yield from _sources(a, chains)
        else:
            yield a


def _before(node: fx.Node, chains: Chains):
    """The casts and reshapes right in front of a reduction, up to the wait of an earlier one."""
    for a in node.all_input_nodes:
        if a in chains.rests and a.target not in REDUCE:
            yield a
            if a.target is not WAIT:
                yield from _before(a, chains)


def _due(chains: Chains, buckets, firsts, waits, in_flight: int | None, ready) -> dict[fx.Node, int]:
    """Of each wait, and of what leads from it to rest, where it comes at the latest: where the bucket ``in_flight``
    further starts, so that unreduced gradients can go; a second reduction one bucket later."""
    found: dict[fx.Node, int] = {}
    for (stage, *_), nodes in buckets.items():
        later = [f for f in firsts if f > max(ready[n] for n in nodes)]
        if in_flight is None or len(later) < in_flight + stage:
            continue
        stack = [waits[n] for n in nodes]
        while stack:
            node = stack.pop()
            found[node] = later[in_flight + stage - 1]
            stack += [u for u in node.users if u in chains.rests and u.target not in REDUCE]
    return found


def _group(node: fx.Node) -> tuple:
    return node.args[1:]


def _same_group(layers: Iterable[list[fx.Node]]) -> list[list[fx.Node]]:
    """Per layer one list for each op, group and dtype: what one call can carry."""
    found: list[list[fx.Node]] = []
    for nodes in layers:
        kinds: dict[tuple, list[fx.Node]] = {}
        for node in nodes:
            kinds.setdefault((node.target, _group(node), node.meta["val"].dtype), []).append(node)
        found += [members for members in kinds.values() if len(members) > 1]
    return found


def _sort(graph: fx.Graph, keys) -> None:
    """A topological order that follows the keys where the dependencies allow."""
    nodes = list(graph.nodes)
    left = {n: len(n.all_input_nodes) for n in nodes}
    number = {n: i for i, n in enumerate(nodes)}
    holders = [n for n in nodes if n.op == "placeholder"]
    heap: list[tuple] = []
    for node in nodes:
        if not left[node] and node.op not in ("placeholder", "output"):
            heapq.heappush(heap, (*_padded(keys[node]), number[node]))
    ordered, output = list(holders), nodes[-1]
    done = iter(holders)
    while len(ordered) < len(nodes) - 1:
        for node in done:
            for user in node.users:
                left[user] -= 1
                if not left[user] and user.op != "output":
                    heapq.heappush(heap, (*_padded(keys[user]), number[user]))
        node = nodes[heapq.heappop(heap)[-1]]
        ordered.append(node)
        done = iter((node,))
    for before, after in zip(ordered, [*ordered[1:], output], strict=True):
        if before.next is not after:
            before.append(after)


def _padded(key: tuple) -> tuple:
    return (key + (0, 0, 0))[:4]


def _channels(graph: fx.Graph) -> None:
    """Gathers of leaves, reductions of gradients, tokens and the rest travel in groups of their own, which may run at
    once."""
    for node in graph.nodes:
        note = node.meta.get("custom", {})
        if "collective" in note and (note.get("param") or note.get("tokens")):
            channel = "#gather" if note["collective"] == "all_gather" else "#reduce"
            channel = channel if note.get("param") else "#tokens"
            node.args = tuple(a + channel if isinstance(a, str) and a.startswith("fs") else a for a in node.args)
