"""Helpers of the GPU tests: random groups, the error metric, poisoned memory."""

import torch

import kernels
from kernels.rows import rows_reference
from kernels.wgrad import wgrad_reference

TOLERANCE = 1e-5  # of `distance`, bf16 results against an fp32 reference on unit-variance data


def distance(x, y) -> float:
    """1 - 2<x, y> / (|x|² + |y|²); 0 for equal, 1 for unrelated, NaN never passes."""
    x, y = x.double().flatten(), y.double().flatten()
    norms = x.square().sum() + y.square().sum()
    return 0.0 if norms == 0 else (1 - 2 * (x @ y) / norms).item()


def close(got, want, offsets=None, tolerance=TOLERANCE):
    """`distance` below the tolerance, for each group of rows if `offsets` are given; zeros where wanted are exact."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert torch.isfinite(got).all(), "non-finite numbers"
    ends = [got.shape[0]] if offsets is None else [*offsets.tolist(), got.shape[0]]
    start = 0
    for group, end in enumerate(ends):
        d = distance(got[start:end], want[start:end])
        assert d < tolerance, f"group {group}, rows {start}:{end}: distance {d:.2e}"
        start = max(start, end)
    if offsets is not None:
        assert (got[start:] == 0).all(), "rows past the last group must be zero"


def poison(gib=0.5):
    """Leave NaN in the memory that the allocator hands out next."""
    sizes = [int(gib * 2**30 / 2), 2**22, 2**20, 2**18, 2**16, 2**12]
    keep = [torch.full((n,), float("nan"), dtype=torch.bfloat16, device="cuda") for n in sizes for _ in range(4)]
    torch.cuda.synchronize()
    del keep


def groups(sizes, rows):
    """Routing of grouped rows on the GPU from python sizes."""
    offsets = torch.tensor(sizes, dtype=torch.int32).cumsum(0).to(torch.int32).cuda()
    return kernels.from_offsets(offsets, rows)


def normal(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def on_cpu(fn):
    """A plain-torch reference in fp32, run on the GPU's numbers (the references only need `.tolist()`)."""

    def run(*tensors, **kwargs):
        high = [t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors]
        return fn(*high, **kwargs)

    return run


rows_oracle, wgrad_oracle = on_cpu(rows_reference), on_cpu(wgrad_reference)
