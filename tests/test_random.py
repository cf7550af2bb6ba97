"""The counter-based generator: blocks, tracing, and statistics with bounds that a good generator passes by far."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fsharding import random
from fsharding.errors import ShardingError

N = 1 << 18
Z_LIMIT = 4.5  # standard deviations; about 1 in 150,000 for one test, and the seeds are fixed


def z_of_mean(sample, mean, std):
    return abs(sample.double().mean().item() - mean) / (std / math.sqrt(sample.numel()))


def chi_square_z(counts, expected):
    """Chi-square of counts, as standard deviations from its mean."""
    freedom = counts.numel() - 1
    chi = (((counts.double() - expected) ** 2) / expected).sum().item()
    return (chi - freedom) / math.sqrt(2 * freedom)


def correlation_z(x, y):
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return abs((x * y).mean() / (x.std() * y.std())).item() * math.sqrt(x.numel())


# ---- keys ----------------------------------------------------------------------------------------------------------
def test_keys_are_0d_int64_and_reproducible():
    key = random.key(7)
    assert key.dtype == torch.int64 and key.shape == () and key == random.key(7)
    assert random.key(0).item() != 0
    a, b, c = random.split(key, 3)
    assert a.shape == () and len({key.item(), a.item(), b.item(), c.item()}) == 4
    assert torch.equal(random.split(key, 5)[:3], random.split(key, 3))
    assert random.fold_in(key, 3) == random.fold_in(key, torch.tensor(3, dtype=torch.int32))
    assert random.key(1 << 64) == random.key(0) and random.key(-1) == random.key((1 << 64) - 1)


def test_the_values_are_pinned():
    """A change of the generator changes every initialisation and dropout mask that users have: it must be seen."""
    key = random.key(0)
    assert random.bits(key, (3,)).tolist() == PINNED_BITS
    assert torch.allclose(random.normal(key, (3,)), torch.tensor(PINNED_NORMAL), atol=1e-6)


PINNED_BITS = [2121578133758229616, -858685409235394690, 7761156670824373392]
PINNED_NORMAL = [-1.956394, -0.30384, 0.658678]


def test_keys_do_not_collide():
    keys = torch.stack([random.key(seed) for seed in range(-2000, 2000)])
    many = torch.cat([keys, *(random.split(key, 32) for key in keys[:200]), random.split(keys[0], 100_000)[32:],
                      *(random.fold_in(key, 5).view(1) for key in keys)])
    assert many.unique().numel() == many.numel()


@pytest.mark.parametrize("bad", [5, torch.tensor([1, 2]), torch.tensor(1.0), torch.tensor(1, dtype=torch.int32)])
def test_what_is_no_key_is_refused(bad):
    with pytest.raises(ShardingError, match="0-d int64.*fs.random.key"):
        random.uniform(bad, (2,))


def test_other_errors():
    with pytest.raises(ShardingError, match="int as its seed"):
        random.key(1.5)
    with pytest.raises(ShardingError, match="rate is 1"):
        random.dropout(random.key(0), torch.ones(2), 1)
    with pytest.raises(ShardingError, match="floating"):
        random.normal(random.key(0), (2,), torch.int64)
    with pytest.raises(ShardingError, match="int32"):
        random.uniform(random.key(0), (2,), torch.int32)


# ---- blocks --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(), (1,), (13,), (7, 5), (6, 1, 9), (3, 4, 5, 6), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_block_is_the_slice_of_the_whole(shape, dtype):
    key, generator = random.key(3), torch.Generator().manual_seed(0)
    for whole_of, block_of in ((random.uniform, random.uniform_block), (random.normal, random.normal_block)):
        whole = whole_of(key, shape, dtype)
        assert whole.shape == shape and whole.dtype == dtype and whole.is_contiguous()
        for _ in range(8):
            starts = [int(torch.randint(0, n + 1, (), generator=generator)) for n in shape]
            sizes = [int(torch.randint(0, n - s + 1, (), generator=generator))
                     for n, s in zip(shape, starts, strict=True)]
            cut = whole[tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))]
            assert torch.equal(block_of(key, shape, starts, sizes, dtype), cut)


def test_large_blocks_are_the_slice_too():
    """Vectorised and scalar paths of log and cos could round differently at the ends of a block."""
    key = random.key(11)
    whole = random.normal(key, (257, 129))
    for start in range(1, 40):
        assert torch.equal(random.normal_block(key, (257, 129), (start, 3), (100, 1 + start)),
                           whole[start:start + 100, 3:4 + start])


# ---- tracing -------------------------------------------------------------------------------------------------------
def test_it_traces_with_the_key_as_an_input():
    def draw(key, x):
        a, b = random.split(random.fold_in(key, 3))
        return random.normal(a, (4, 3)) + random.uniform(b, (4, 3)), random.dropout(b, x, 0.5)

    x = torch.ones(6, 2)
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(draw, tracing_mode=mode)(random.key(0), x)
        for seed in (0, 1, 2):
            want, got = draw(random.key(seed), x), graph(random.key(seed), x)
            assert all(torch.equal(one, two) for one, two in zip(want, got, strict=True))
        assert not any("_local_scalar_dense" in str(node.target) for node in graph.graph.nodes)


def test_fake_keys_and_vmap():
    with FakeTensorMode() as mode:
        out = random.normal(mode.from_tensor(random.key(0)), (5, 2), torch.bfloat16)
    assert out.shape == (5, 2) and out.dtype == torch.bfloat16
    keys = random.split(random.key(0), 3)
    mapped = torch.func.vmap(lambda key: random.uniform(key, (4,)))(keys)
    assert torch.equal(mapped, torch.stack([random.uniform(key, (4,)) for key in keys]))


# ---- statistics ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_uniform(seed):
    u = random.uniform(random.key(seed), (N,))
    assert u.min() >= 0 and u.max() < 1
    for power in (1, 2, 3, 4):
        mean, second = 1 / (power + 1), 1 / (2 * power + 1)
        assert z_of_mean(u.double() ** power, mean, math.sqrt(second - mean ** 2)) < Z_LIMIT
    counts = torch.bincount((u * 1024).long(), minlength=1024)
    assert abs(chi_square_z(counts, N / 1024)) < Z_LIMIT
    pairs = torch.bincount((u[::2] * 32).long() * 32 + (u[1::2] * 32).long(), minlength=1024)
    assert abs(chi_square_z(pairs, N / 2 / 1024)) < Z_LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_uniform_of_other_dtypes_never_reaches_one(dtype):
    u = random.uniform(random.key(2), (N,), dtype)
    assert u.dtype == dtype and u.min() >= 0 and u.max() < 1
    # only the bits that the dtype holds are drawn, so the mean is half a step below one half
    step = {torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -11}.get(dtype, 0.0)
    assert z_of_mean(u, 0.5 - step / 2, math.sqrt(1 / 12)) < Z_LIMIT


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_normal(seed):
    x = random.normal(random.key(seed), (N,)).double()
    for power, mean, std in ((1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))):
        assert z_of_mean(x ** power, mean, std) < Z_LIMIT
    quantile = torch.special.ndtr(x)
    assert abs(chi_square_z(torch.bincount((quantile * 512).long().clamp(max=511), minlength=512), N / 512)) < Z_LIMIT
    tail, chance = (x.abs() > 4).sum().item(), math.erfc(4 / math.sqrt(2))
    assert abs(tail - N * chance) < Z_LIMIT * math.sqrt(N * chance)
    assert x.abs().max() < 6.8 and correlation_z(x[1:], x[:-1]) < Z_LIMIT


def test_two_to_the_twenty_values_are_distinct():
    assert random.bits(random.key(0), (1 << 20,)).unique().numel() == 1 << 20


def test_every_bit_is_fair_and_flips_half_the_others():
    index, key = torch.arange(1 << 14), random.key(5)
    raw = random.bits(key, index.shape)
    for place in range(64):
        ones = ((raw >> place) & 1).sum().item()
        assert abs(ones - raw.numel() / 2) < Z_LIMIT * math.sqrt(raw.numel()) / 2
    for flip in range(0, 14, 3):  # one bit of the index
        check_avalanche(raw, raw[index ^ (1 << flip)])
    for flip in range(0, 63, 7):  # one bit of the key
        check_avalanche(raw, random.bits(key ^ (1 << flip), index.shape))


def check_avalanche(one, two):
    flipped = one ^ two
    for place in range(0, 64, 5):
        rate = ((flipped >> place) & 1).double().mean().item()
        assert abs(rate - 0.5) < Z_LIMIT * 1.5 / math.sqrt(one.numel())  # an index flip counts each pair twice


def test_neighbouring_streams_are_not_correlated():
    def draw(key):
        return random.uniform(key, (1 << 14,))

    key = random.key(0)
    streams = [draw(random.key(seed)) for seed in range(12)] + [draw(k) for k in random.split(key, 12)] + [
        draw(random.fold_in(key, step)) for step in range(12)] + [draw(key + step) for step in range(1, 12)]
    worst = 0.0
    for first in range(len(streams)):
        for second in range(first):
            worst = max(worst, correlation_z(streams[first], streams[second]),
                        correlation_z(streams[first][1:], streams[second][:-1]))
    assert worst < 5.5  # the largest of two thousand


def test_dropout():
    x = torch.randn(400, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = random.dropout(random.key(1), x, 0.25)
    kept = y != 0
    assert torch.allclose(y[kept], x[kept] / 0.75)
    assert abs(kept.double().mean().item() - 0.75) < Z_LIMIT * math.sqrt(0.75 * 0.25 / x.numel())
    assert torch.equal(random.dropout(random.key(1), x, 0.0), x)
    assert random.dropout(random.key(1), x.bfloat16(), 0.5).dtype == torch.bfloat16
