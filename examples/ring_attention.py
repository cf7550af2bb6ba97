"""Ring attention (Liu et al. 2023): the sequence is cut over the ranks, keys and values travel around a ring.

    python examples/ring_attention.py                              # 8 simulated ranks in one process
    torchrun --nproc-per-node 4 examples/ring_attention.py         # real ones

Each rank keeps its queries and meets one block of keys and values at a time; softmax is accumulated as blocks come
(Milakov & Gimelshein 2018). No rank ever holds the whole sequence. The backward pass is the ring turned around: it is
derived, not written.
"""

import contextlib
import math
import os

import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding import P

RANKS = int(os.environ.get("WORLD_SIZE", 8))
BATCH, HEADS, SEQUENCE, DIM = 2, 3, 8 * RANKS, 16
RING = [(rank, (rank + 1) % RANKS) for rank in range(RANKS)]


def ring_attention(q, k, v):
    """Causal attention over blocks [batch, heads, sequence / ranks, dim] of one sequence."""
    block, me = q.shape[2], fs.axis_index("seq")
    rows = me * block + torch.arange(block)
    top = torch.full(q.shape[:3], -math.inf)
    total, out = torch.zeros(q.shape[:3]), torch.zeros_like(q)
    for turn in range(RANKS):
        owner = (me - turn) % RANKS
        columns = owner * block + torch.arange(block)
        scores = q @ k.mT / math.sqrt(DIM)
        scores = scores.masked_fill(columns[None, :] > rows[:, None], -math.inf)
        new_top = torch.maximum(top, scores.detach().amax(-1))
        shrink = torch.exp(top - new_top)
        weights = torch.exp(scores - new_top[..., None])
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + weights @ v
        top = new_top
        if turn < RANKS - 1:
            k, v = fs.ppermute((k, v), "seq", RING)
    return out / total[..., None]


def whole_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def main():
    q, k, v = (fs.random.normal(key, (BATCH, HEADS, SEQUENCE, DIM)) for key in fs.random.split(fs.random.key(0), 3))

    def with_gradients(attention):
        loss = lambda q, k, v: torch.sin(attention(q, k, v)).sum()
        return lambda q, k, v: (attention(q, k, v), fs.grad(loss, argnums=(0, 1, 2))(q, k, v))

    want = with_gradients(whole_attention)(q, k, v)
    mesh, spec = fs.make_mesh({"seq": RANKS}), P(None, None, "seq")
    ring = fs.shard_map(ring_attention, mesh, in_specs=spec, out_specs=spec)
    step = fs.shard(with_gradients(ring), mesh, stored_argnums=())
    placed = [fs.device_put(x, mesh, spec) for x in (q, k, v)]
    got = fs.device_get(step(*placed))
    for name, ours, one in zip(("out", "dq", "dk", "dv"), (got[0], *got[1]), (want[0], *want[1]), strict=True):
        assert torch.allclose(ours, one, rtol=1e-4, atol=1e-5), name
    kinds = [c.kind for c in step.lower(*placed).collectives()]
    assert set(kinds) <= {"ppermute"}
    print(f"{RANKS} ranks, {SEQUENCE} tokens: output and gradients as on one device; {len(kinds)} sends, nothing else")


if __name__ == "__main__":
    with contextlib.nullcontext() if "WORLD_SIZE" in os.environ else fs.simulate(RANKS):
        main()
