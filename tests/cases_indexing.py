"""Indexing, slices, reshapes and order, along and across the split rows; in-place code.

Every function takes ``(z, y)``: z [24, 8] floating rows, y [24] integer rows below 8. See ``conformance_cases.py``.
"""

import einops
import torch
import torch.nn.functional as F

I3 = torch.tensor([3, 3, 0])
ORDER = (torch.arange(24) * 5) % 24  # a permutation of the rows
M = torch.tensor([1, 1, 0, 1, 0, 1] * 4, dtype=torch.bool)
RAMP = torch.linspace(-1, 1, 24)[:, None]  # differs from row to row

INDEXING = {
    "index_columns": lambda z, y: z[:, I3],
    "index_rows": lambda z, y: z[ORDER],
    "index_rows_by_rows": lambda z, y: z[y],
    "index_pairs": lambda z, y: z[torch.arange(24), y],
    "index_nested": lambda z, y: z.view(24, 2, 4)[:, :, I3],
    "index_none": lambda z, y: z[:, None, :, None][..., 0],
    "index_ellipsis": lambda z, y: z.view(24, 2, 4)[..., 1],
    "index_list": lambda z, y: z[:, [0, -1]],
    "index_outer": lambda z, y: z.view(24, 2, 4)[:, torch.tensor([[0], [1]]), I3],
    "index_select_features": lambda z, y: z.index_select(1, I3),
    "index_select_rows": lambda z, y: z.index_select(0, ORDER[:6]),
    "gather_features": lambda z, y: z.gather(1, y[:, None]),
    "gather_rows": lambda z, y: z.gather(0, ORDER[:, None].expand(24, 8)),
    "take": lambda z, y: z.take(y),
    "take_along": lambda z, y: torch.take_along_dim(z, z.argsort(1)[:, :3], 1),
    "take_along_rows": lambda z, y: torch.take_along_dim(z, ORDER[:, None], 0),
    "one_hot": lambda z, y: F.one_hot(y, 8) * z,
    "embedding_of_rows": lambda z, y: F.embedding(y, z),
    "embedding_bag": lambda z, y: F.embedding_bag(torch.stack([y, 7 - y], 1), z[:8] + 0, mode="sum"),
    "where_mask": lambda z, y: torch.where(M[:, None], z, 0.5),
    "where_rows": lambda z, y: torch.where(z > z.mean(0), z, -z),
    "masked_fill": lambda z, y: z.masked_fill(~M[:, None], -1.0),
    "masked_scatter": lambda z, y: z.masked_scatter(z > 0, z.flip(1)),
    "masked_assign": lambda z, y: assigned(z, lambda u: u.__setitem__(u > 0.5, 0.25)),
    "masked_rows_assign": lambda z, y: assigned(z, lambda u: u.__setitem__(M, 0.25)),
    "masked_select": lambda z, y: z.masked_select(z > 0).sum(),
    "nonzero": lambda z, y: z[(z > 0).nonzero()[:, 0]],
    "index_add_features": lambda z, y: z.index_add(1, I3, z[:, :3]),
    "index_add_rows": lambda z, y: z.new_zeros(8, 8).index_add(0, y, z),
    "index_copy": lambda z, y: z.index_copy(1, I3[1:], z[:, 4:6] * 2),
    "index_copy_rows": lambda z, y: z.index_copy(0, ORDER[:8], z[:8] * 2),
    "index_fill": lambda z, y: z.index_fill(1, I3, 0.3),
    "index_fill_rows": lambda z, y: z.index_fill(0, ORDER[:5], 0.3),
    "index_put_rows": lambda z, y: z.index_put((ORDER[:8],), z[:8] * 2),
    "index_put_add": lambda z, y: z.new_zeros(8, 8).index_put((y,), z, accumulate=True),
    "index_put_columns": lambda z, y: z.index_put((torch.arange(24), y), z[:, 0]),
    "index_reduce": lambda z, y: z.index_reduce(1, I3, z[:, :3], "mean"),
    "put": lambda z, y: z.put(ORDER[:4], z[0, :4] * 0 + 0.5),
    "scatter_value": lambda z, y: z.scatter(1, y[:, None], 0.5),
    "scatter_features": lambda z, y: z.scatter(1, z.argsort(1)[:, :2], z[:, :2]),
    "scatter_rows": lambda z, y: z.scatter(0, ORDER[:, None].expand(24, 8), z.sin()),
    "scatter_add": lambda z, y: torch.zeros_like(z).scatter_add(1, z.argsort(1), z),
    "scatter_reduce_features": lambda z, y: z.scatter_reduce(1, z.argsort(1) // 2, z.flip(1), "amax"),
    "scatter_reduce_rows": lambda z, y: z.scatter_reduce(0, y[:, None].expand(24, 8), z, "sum"),
    "segment_mean": lambda z, y: z.new_zeros(8, 8).index_add(0, y, z) / F.one_hot(y, 8).sum(0)[:, None].clamp(min=1),
    "select_features": lambda z, y: z.select(1, 2),
    "select_row": lambda z, y: z[5],
    "slice_features": lambda z, y: z[:, 2:7:2],
    "slice_rows": lambda z, y: z[:6],
    "slice_last_rows": lambda z, y: z[-2:] * 2,
    "stride_rows": lambda z, y: z[::2],
    "shifted_rows": lambda z, y: z[1:] - z[:-1],
    "next_token": lambda z, y: (z.view(24, 4, 2)[:, 1:] * z.view(24, 4, 2)[:, :-1]).sum((1, 2)),
    "narrow": lambda z, y: z.narrow(1, 2, 3),
    "narrow_rows": lambda z, y: z.narrow(0, 2, 3),
    "diagonal": lambda z, y: z.diagonal(),
    "diagonal_of_features": lambda z, y: z.view(24, 2, 4).diagonal(dim1=1, dim2=2),
    "diag_embed": lambda z, y: torch.diag_embed(z),
    "diag": lambda z, y: torch.diag(z[:8]),
    "select_scatter": lambda z, y: z.select_scatter(z[:, 0] * 2, 1, 3),
    "slice_scatter": lambda z, y: z.slice_scatter(z[:, :2] * 2, 1, 4, 6),
    "slice_scatter_rows": lambda z, y: z.slice_scatter(z[:2] * 2, 0, 4, 6),
    "diagonal_scatter": lambda z, y: z.view(24, 2, 4).diagonal_scatter(z[:, :2], dim1=1, dim2=2),
    "tril": lambda z, y: z.view(24, 2, 4).tril(),
    "triu_rows": lambda z, y: z.triu(1),
    "tril_indices": lambda z, y: z[:, torch.tril_indices(8, 8)[0]].sum(1),
    "unravel_index": lambda z, y: z[torch.arange(24)[:, None], torch.stack(torch.unravel_index(y, (2, 4)), 1)],
}

SHAPES = {
    "view_heads": lambda z, y: z.view(24, 2, 4).transpose(1, 2).reshape(24, 8),
    "flatten_rows": lambda z, y: z.view(24, 2, 4).reshape(48, 4).sin().view(24, 8),
    "split_rows_dim": lambda z, y: z.view(4, 6, 8) * torch.arange(6)[:, None],
    "split_rows_outer": lambda z, y: z.view(6, 4, 8).mean(1),
    "flat": lambda z, y: z.reshape(-1),
    "flat_transposed": lambda z, y: z.T.reshape(-1),
    "odd_reshape": lambda z, y: z.reshape(64, 3),
    "ravel": lambda z, y: z.ravel() * 2,
    "flatten": lambda z, y: z.view(24, 2, 2, 2).flatten(1, 2),
    "unflatten": lambda z, y: z.unflatten(-1, (2, -1)),
    "view_as": lambda z, y: z.view_as(RAMP.expand(24, 8)),
    "transpose": lambda z, y: z.T,
    "movedim": lambda z, y: z.view(24, 2, 4).movedim(0, -1),
    "swapaxes": lambda z, y: z.swapaxes(0, 1) * 2,
    "permute": lambda z, y: z.view(24, 2, 4).permute(2, 0, 1),
    "squeeze": lambda z, y: z[:, None].squeeze(1),
    "expand": lambda z, y: z[:, None].expand(24, 3, 8),
    "broadcast_to": lambda z, y: z.broadcast_to(2, 24, 8),
    "broadcast_tensors": lambda z, y: torch.broadcast_tensors(z[:, :1], z)[0],
    "stack_features": lambda z, y: torch.stack([z, z.sin()], 1).flatten(1),
    "stack_front": lambda z, y: torch.stack([z, z.sin()]),
    "cat_features": lambda z, y: torch.cat([z, RAMP, torch.ones(24, 1)], -1),
    "cat_rows": lambda z, y: torch.cat([z, z.sin()]),
    "cat_of_one": lambda z, y: torch.cat([z[:, :0], z], 1),
    "hstack": lambda z, y: torch.hstack([z, z.cos()]),
    "vstack": lambda z, y: torch.vstack([z, z.cos()]),
    "dstack": lambda z, y: torch.dstack([z, z.cos()]),
    "column_stack": lambda z, y: torch.column_stack([z[:, 0], z]),
    "chunk": lambda z, y: torch.mul(*z.chunk(2, -1)),
    "chunk_rows": lambda z, y: torch.mul(*z.chunk(2, 0)),
    "split": lambda z, y: sum(part.sum(1) for part in z.split([2, 1, 5], 1)),
    "split_rows": lambda z, y: z.split(10)[2],
    "tensor_split": lambda z, y: z.tensor_split(3, 1)[1],
    "unbind": lambda z, y: torch.mul(*z.view(24, 2, 4).unbind(1)),
    "unbind_rows": lambda z, y: torch.maximum(*z.view(2, 12, 8).unbind(0)),
    "flip_features": lambda z, y: z.flip(-1),
    "flip_rows": lambda z, y: z.flip(0),
    "fliplr": lambda z, y: torch.fliplr(z),
    "rot90": lambda z, y: torch.rot90(z),
    "roll_features": lambda z, y: z.roll(3, -1),
    "roll_rows": lambda z, y: z.roll(5, 0),
    "roll_flat": lambda z, y: z.roll(5),
    "tile": lambda z, y: z.tile(2),
    "repeat_features": lambda z, y: z.repeat(1, 2),
    "repeat_rows": lambda z, y: z.repeat(2, 1),
    "repeat_interleave": lambda z, y: z.repeat_interleave(2, 1),
    "repeat_interleave_rows": lambda z, y: z.repeat_interleave(2, 0),
    "unfold": lambda z, y: z.unfold(1, 3, 2),
    "unfold_rows": lambda z, y: z.unfold(0, 4, 4),
    "as_strided": lambda z, y: z.clone().as_strided((24, 2), (8, 1)),
    "pad_features": lambda z, y: F.pad(z, (1, 2), value=0.5),
    "pad_rows": lambda z, y: F.pad(z, (0, 0, 1, 0)),
    "pad_reflect": lambda z, y: F.pad(z[:, None], (2, 1), mode="reflect"),
    "pad_replicate": lambda z, y: F.pad(z[:, None], (2, 1), mode="replicate"),
    "pad_circular": lambda z, y: F.pad(z[:, None], (2, 1), mode="circular"),
    "block_diag": lambda z, y: torch.block_diag(z[:, :2], z[:, 2:4]),
    "meshgrid": lambda z, y: torch.meshgrid(z[:, 0], z[:, 0], indexing="ij")[0],
    "cartesian_prod": lambda z, y: torch.cartesian_prod(z[:, 0], torch.arange(2.0)),
    "combinations": lambda z, y: torch.combinations(z[:6, 0]),
    "einops_heads": lambda z, y: einops.rearrange(z, "b (h d) -> b h d", h=2).softmax(-1),
    "einops_merge": lambda z, y: einops.rearrange(z, "b (h d) -> (b h) d", h=2) * 2,
    "einops_to_front": lambda z, y: einops.rearrange(z, "b (h d) -> h b d", h=2),
    "einops_micro": lambda z, y: einops.rearrange(z, "(b n) d -> n b d", n=3)[1],
    "einops_reduce": lambda z, y: einops.reduce(z, "b (h d) -> b h", "max", h=2),
    "einops_reduce_rows": lambda z, y: einops.reduce(z, "b d -> d", "mean"),
    "einops_repeat": lambda z, y: einops.repeat(z, "b d -> b (d r)", r=2),
    "einops_einsum": lambda z, y: einops.einsum(z, z, "b i, b j -> b i j"),
    "channel_shuffle": lambda z, y: F.channel_shuffle(z[..., None], 2),
    "view_dtype": lambda z, y: z.detach().view(torch.int16).sum(-1) * z.sum(1),
}

ORDERED = {
    "sort_features": lambda z, y: z.sort(-1).values,
    "sort_descending": lambda z, y: z.sort(-1, descending=True).values,
    "sort_stable": lambda z, y: z.sort(stable=True, dim=-1).values * torch.arange(8),
    "sort_rows": lambda z, y: z.sort(0).values,
    "argsort_features": lambda z, y: z * z.argsort(-1),
    "argsort_rows": lambda z, y: z * z.argsort(0),
    "msort": lambda z, y: z.T.msort() * 2,
    "topk_features": lambda z, y: z.topk(3, -1).values,
    "topk_smallest": lambda z, y: z.topk(2, -1, largest=False).values,
    "topk_rows": lambda z, y: z.topk(3, 0).values,
    "topk_mask": lambda z, y: torch.where(z >= z.topk(3, -1).values[:, -1:], z, -1e4).softmax(-1),
    "rank_rows": lambda z, y: z[:, 0].argsort().argsort() * z[:, 0],
    "searchsorted": lambda z, y: torch.searchsorted(torch.linspace(-1, 1, 5), z.detach()) * z,
    "searchsorted_rows": lambda z, y: torch.searchsorted(z.detach().sort(-1).values, z.detach()) * z,
    "bucketize": lambda z, y: torch.bucketize(z.detach(), torch.linspace(-1, 1, 5)) * z,
    "isin": lambda z, y: torch.isin(y, I3)[:, None] * z,
    "compare_rows": lambda z, y: (z[:, :1] > z[:, 0]).to(z).sum(1, keepdim=True) * z,
    "equal_rows": lambda z, y: (y[:, None] == y).to(z) @ z,
    "dedupe": lambda z, y: (y[:, None] == y).tril(-1).any(1)[:, None] * z,
}


def assigned(z, write):
    z = z.clone()
    write(z)
    return z


def put(*index):
    """Assign twice the last feature, or a number, at an index."""
    return lambda z, y: assigned(z, lambda u: u.__setitem__(index, 0.5))


def block(z):
    z[:, 1:3] = 0.5
    z[:, 0] = z[:, 4] * 2
    z[:, 5:] += z[:, :3]


def alternating(z, y):
    even, odd = z[:, ::2].clone(), z[:, 1::2].clone()
    z = z.clone()
    z[:, ::2], z[:, 1::2] = odd, even * 2
    return z


def loop(z, y):
    state, out = torch.zeros_like(z[:, 0]), []
    for column in z.unbind(1):
        state = torch.tanh(state * 0.5 + column)
        out.append(state)
    return torch.stack(out, 1)


def filled(z, y):
    out = torch.empty(24, 8)
    for i in range(8):
        out[:, i] = z[:, i] * i
    return out


IN_PLACE = {
    "chain_in_place": lambda z, y: (z * 1).mul_(2).add_(1).relu_(),
    "add_alpha": lambda z, y: (z * 1).add_(z, alpha=2).sub_(RAMP),
    "assign_block": lambda z, y: assigned(z, block),
    "assign_feature": put(slice(None), 3),
    "assign_row": put(5),
    "assign_rows": put(slice(2, 5)),
    "assign_strided_rows": put(slice(None, None, 2)),
    "assign_corner": put(slice(0, 3), slice(0, 3)),
    "assign_columns": put(slice(None), I3),
    "assign_by_rows": lambda z, y: assigned(z, lambda u: u.__setitem__((torch.arange(24), y), 0.5)),
    "assign_alternating": alternating,
    "add_to_view": lambda z, y: assigned(z, lambda u: u[:, 2:4].add_(1)),
    "add_to_transpose": lambda z, y: assigned(z, lambda u: u.T.mul_(2)),
    "write_into_view": lambda z, y: assigned(z, lambda u: u.view(24, 2, 4)[:, 0].fill_(0.5)),
    "write_diagonal": lambda z, y: assigned(z, lambda u: u.view(24, 2, 4).diagonal(dim1=1, dim2=2).add_(1)),
    "fill_empty": filled,
    "copy_into": lambda z, y: torch.empty(24, 8).copy_(z) * 2,
    "copy_feature": lambda z, y: assigned(z, lambda u: u[:, 0].copy_(u[:, 1].detach())),
    "zero_then_add": lambda z, y: torch.zeros(24, 8).add_(z),
    "clamp_in_place": lambda z, y: (z * 1).clamp_(-1, 0.5),
    "masked_fill_in_place": lambda z, y: (z * 1).masked_fill_(z > 0.5, 0.1),
    "scatter_in_place": lambda z, y: (z * 1).scatter_(1, y[:, None], 0.2),
    "scatter_add_in_place": lambda z, y: torch.zeros(24, 8).scatter_add_(1, z.argsort(1), z),
    "index_add_in_place": lambda z, y: z.new_zeros(8, 8).index_add_(0, y, z),
    "index_fill_in_place": lambda z, y: (z * 1).index_fill_(1, I3, 0.2),
    "index_put_in_place": lambda z, y: z.new_zeros(8, 8).index_put_((y,), z, accumulate=True),
    "cumsum_in_place": lambda z, y: (z * 1).cumsum_(1),
    "squeeze_in_place": lambda z, y: (z * 1).unsqueeze_(1).squeeze_(1).t_().t_(),
    "lerp_in_place": lambda z, y: (z * 1).lerp_(z.flip(1), 0.3),
    "addcmul_in_place": lambda z, y: (z * 1).addcmul_(z, z, value=0.5).addcdiv_(z, z.square() + 1),
    "baddbmm_in_place": lambda z, y: torch.zeros(24, 2, 2).baddbmm_(z.view(24, 2, 4), z.view(24, 4, 2)),
    "out_argument": lambda z, y: torch.mul(z.detach(), 2, out=torch.empty(24, 8)) * z,
    "foreach": lambda z, y: torch._foreach_add(torch._foreach_mul([z, z.sin()], 2), 1)[1],
    "chain_of_functions_in_place": lambda z, y: (z * 0.1).neg_().add_(1).clamp_(max=2).mul_(3).cos_(),
    "loop_over_features": loop,
    "accumulate_rows": lambda z, y: sum((z[:, i] * i for i in range(8)), torch.zeros(24)),
}
