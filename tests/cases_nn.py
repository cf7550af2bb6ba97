"""Convolution, pooling, images, normalisation, attention: see ``conformance_cases.py``.

``IMAGES``: ``(x, w, y)``, x [24, 4, 6, 6] rows, w [4, 4, 3, 3] a stored parameter, y [24] integer rows.
``SEQUENCES``: ``(h, w, y)``, h [24, 5, 8] rows, w [8, 24] a stored parameter.
"""

import torch
import torch.nn.functional as F

MEAN = torch.linspace(0, 0.5, 4)  # frozen statistics
THETA = torch.tensor([[0.8, 0.1, 0.1], [-0.1, 0.9, 0.0]])


def image(f):
    """After a product with the parameter, so that the gradients of both are seen."""
    return lambda x, w, y: f(torch.einsum("bchw,cd->bdhw", x, w[:, :, 1, 1]))


def signal(f):
    return lambda x, w, y: f(x.flatten(2)[:, :, :12], w.flatten(2)[:, :, :3])


IMAGES = {
    "conv1d": signal(F.conv1d),
    "conv1d_bias": signal(lambda x, w: F.conv1d(x, w, w[0, :, 0], padding=1)),
    "conv1d_dilated": signal(lambda x, w: F.conv1d(x, w, stride=2, dilation=2, padding=2)),
    "conv1d_same": signal(lambda x, w: F.conv1d(x, w, padding="same")),
    "conv1d_causal": signal(lambda x, w: F.conv1d(F.pad(x, (2, 0)), w)),
    "conv2d": lambda x, w, y: F.conv2d(x, w),
    "conv2d_bias": lambda x, w, y: F.conv2d(x, w, w[0, 0, 0, :1].expand(4), padding=1),
    "conv2d_stride": lambda x, w, y: F.conv2d(x, w, stride=2, padding=1),
    "conv2d_dilated": lambda x, w, y: F.conv2d(x, w, dilation=2, padding=2),
    "conv2d_grouped": lambda x, w, y: F.conv2d(x, w[:, :2], groups=2),
    "conv2d_depthwise": lambda x, w, y: F.conv2d(x, w[:, :1], groups=4, padding=1),
    "conv2d_chain": lambda x, w, y: F.conv2d(F.relu(F.conv2d(x, w, padding=1)), w),
    "conv2d_residual": lambda x, w, y: x + F.conv2d(F.silu(x), w, padding=1),
    "conv2d_of_rows_as_channels": lambda x, w, y: F.conv2d(
        x.flatten(0, 1)[None], w[:, :1].repeat(24, 1, 1, 1), groups=96
    ),
    "conv3d": lambda x, w, y: F.conv3d(x[:, :, None].expand(-1, -1, 2, -1, -1), w[:, :, None]),
    "conv_transpose1d": signal(F.conv_transpose1d),
    "conv_transpose2d": lambda x, w, y: F.conv_transpose2d(x[..., :3, :3], w, stride=2, padding=1, output_padding=1),
    "conv_transpose2d_grouped": lambda x, w, y: F.conv_transpose2d(x[..., :3, :3], w[:, :2], groups=2),
    "conv_transpose3d": lambda x, w, y: F.conv_transpose3d(x[:, :, None, :3, :3], w[:, :, None]),
    "conv_tbc": lambda x, w, y: torch.conv_tbc(
        x[:, 0].transpose(0, 1).contiguous(), w[:3].flatten(1)[:, :12].view(3, 6, 2), w[0, 0, 0, :2]
    ),
    "fold": lambda x, w, y: F.fold(x.flatten(2)[:, :, :9], (4, 4), 2),
    "unfold_patches": lambda x, w, y: F.unfold(x, 3, stride=2).mT @ w.reshape(4, 36).T,
    "patchify": lambda x, w, y: (
        x.view(24, 4, 2, 3, 2, 3).permute(0, 2, 4, 1, 3, 5).reshape(24, 4, 36) @ w.reshape(4, 36).T
    ),
    "max_pool1d": image(lambda x: F.max_pool1d(x.flatten(2), 3, 2)),
    "max_pool2d": image(lambda x: F.max_pool2d(x, 2)),
    "max_pool2d_overlapping": image(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True)),
    "max_pool2d_indices": image(lambda x: F.max_pool2d(x, 2, return_indices=True)[1] * F.max_pool2d(x, 2)),
    "max_pool3d": image(lambda x: F.max_pool3d(x[:, None], 2)),
    "max_unpool2d": image(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
    "avg_pool1d": image(lambda x: F.avg_pool1d(x.flatten(2), 3, 2)),
    "avg_pool2d": image(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "avg_pool3d": image(lambda x: F.avg_pool3d(x[:, None], 2)),
    "lp_pool1d": image(lambda x: F.lp_pool1d(x.flatten(2).abs() + 0.1, 2, 3)),
    "lp_pool2d": image(lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 2)),
    "adaptive_avg_pool1d": image(lambda x: F.adaptive_avg_pool1d(x.flatten(2), 5)),
    "adaptive_avg_pool2d": image(lambda x: F.adaptive_avg_pool2d(x, 4)),
    "adaptive_avg_pool3d": image(lambda x: F.adaptive_avg_pool3d(x[:, None], 2)),
    "adaptive_max_pool1d": image(lambda x: F.adaptive_max_pool1d(x.flatten(2), 5)),
    "adaptive_max_pool2d": image(lambda x: F.adaptive_max_pool2d(x, 4)),
    "global_average": image(lambda x: x.mean((2, 3))),
    "interpolate_nearest": image(lambda x: F.interpolate(x, scale_factor=2)),
    "interpolate_nearest_exact": image(lambda x: F.interpolate(x, 4, mode="nearest-exact")),
    "interpolate_bilinear": image(lambda x: F.interpolate(x, (9, 4), mode="bilinear")),
    "interpolate_corners": image(lambda x: F.interpolate(x, (9, 4), mode="bilinear", align_corners=True)),
    "interpolate_antialias": image(lambda x: F.interpolate(x, (3, 4), mode="bilinear", antialias=True)),
    "interpolate_bicubic": image(lambda x: F.interpolate(x, (9, 4), mode="bicubic")),
    "interpolate_linear": image(lambda x: F.interpolate(x.flatten(2), 20, mode="linear")),
    "interpolate_trilinear": image(lambda x: F.interpolate(x[:, None], (3, 4, 5), mode="trilinear")),
    "interpolate_area": image(lambda x: F.interpolate(x, (4, 3), mode="area")),
    "pixel_shuffle": image(lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": image(lambda x: F.pixel_unshuffle(x, 2)),
    "grid_sample": image(
        lambda x: F.grid_sample(x, F.affine_grid(THETA.expand(24, 2, 3), (24, 4, 5, 5), False), align_corners=False)
    ),
    "grid_sample_of_rows": image(lambda x: F.grid_sample(x, torch.tanh(x[:, :2]).movedim(1, -1), align_corners=True)),
    "affine_grid_of_rows": image(lambda x: F.affine_grid(x.flatten(1)[:, :6].view(24, 2, 3), (24, 1, 3, 3), False)),
    "pad_reflect_2d": image(lambda x: F.pad(x, (1, 2, 1, 0), mode="reflect")),
    "pad_replicate_2d": image(lambda x: F.pad(x, (1, 2, 1, 0), mode="replicate")),
    "pad_circular_2d": image(lambda x: F.pad(x, (1, 2, 1, 0), mode="circular")),
    "batch_norm": image(lambda x: F.batch_norm(x, None, None, training=True)),
    "batch_norm_affine": lambda x, w, y: F.batch_norm(x, None, None, w[0, :, 0, 0], w[1, :, 0, 0], training=True),
    "batch_norm_eval": lambda x, w, y: F.batch_norm(x, MEAN.to(x), MEAN.to(x) + 1, w[0, :, 0, 0], w[1, :, 0, 0]),
    "instance_norm": image(lambda x: F.instance_norm(x)),
    "group_norm": lambda x, w, y: F.group_norm(x, 2, w[0, :, 0, 0], w[1, :, 0, 0]),
    "layer_norm_images": lambda x, w, y: F.layer_norm(x, (4, 6, 6)) * w[0, 0, 0, 0],
    "local_response_norm": image(lambda x: F.local_response_norm(x, 3)),
    "channel_shuffle_images": image(lambda x: F.channel_shuffle(x, 2)),
    "squeeze_excite": image(lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()),
    "total_variation": image(
        lambda x: (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
    ),
    "upsample_then_conv": lambda x, w, y: F.conv2d(F.interpolate(x[..., :3, :3], scale_factor=2), w),
    "temporal_shift": image(lambda x: torch.cat([x[:, :2].roll(1, -1), x[:, 2:]], 1)),
    "dropout2d": image(lambda x: F.dropout2d(x, 0.5)),
}


def heads(h, w, n=2):
    """Queries, keys and values [24, n, 5, 8 / n]."""
    return (part.unflatten(-1, (n, -1)).transpose(1, 2) for part in (h @ w).chunk(3, -1))


def attention(**options):
    return lambda h, w, y: F.scaled_dot_product_attention(*heads(h, w), **options).transpose(1, 2).flatten(2)


def grouped(h, w, y):
    q, k, v = heads(h, w, 4)
    return F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], is_causal=True, enable_gqa=True)


def cross(h, w, y):
    q, k, v = heads(h, w)
    return F.scaled_dot_product_attention(q[:, :, :3], k, v)


def rows_mask(h, w, y):
    """Each row has its own number of valid keys."""
    mask = (torch.arange(5) <= y[:, None] % 5)[:, None, None]
    return F.scaled_dot_product_attention(*heads(h, w), attn_mask=mask)


def learned_bias(h, w, y):
    return F.scaled_dot_product_attention(*heads(h, w), attn_mask=w[:5, :5])


def written_out(h, w, y):
    q, k, v = heads(h, w)
    scores = (q @ k.mT / 2).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(scores, -1) @ v


def multi_head(h, w, y):
    qkv = F.multi_head_attention_forward(
        *[h.transpose(0, 1)] * 3, 8, 2, w.T, w[0], None, None, False, 0.0, w[:, :8], w[0, :8], need_weights=False
    )
    return qkv[0]


def linear_attention(h, w, y):
    q, k, v = heads(h, w)
    return F.elu(q).add(1) @ (F.elu(k).add(1).mT @ v)


def recurrent(h, w, y):
    state, out = torch.zeros(24, 8), []
    for t in range(5):
        gates = h[:, t] @ w + state.repeat(1, 3)
        state = torch.sigmoid(gates[:, :8]) * state + torch.tanh(gates[:, 8:16])
        out.append(state)
    return torch.stack(out, 1)


def state_space(h, w, y):
    return (h.cumsum(1) * 0.1).exp() * (h @ w[:, :8]) / (h.cumsum(1) * 0.1).exp().cumsum(1)


def rotary(h, w, y):
    q, k, v = heads(h, w)
    angle = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1])
    turn = lambda u: torch.cat([u[..., :2] * angle.cos() - u[..., 2:] * angle.sin(), u[..., 2:]], -1)
    return F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)


def packed(h, w, y):
    """Documents in one sequence: attention within each."""
    documents = (torch.arange(5) > y[:, None] % 5).long()
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    return F.scaled_dot_product_attention(*heads(h, w), attn_mask=mask)


def transformer_layer(h, w, y):
    h = h + attention()(F.layer_norm(h, (8,)), w, y)
    return h + F.gelu(F.rms_norm(h, (8,)) @ w) @ w.T


def across_rows(h, w, y):
    """Attention between rows: every row reads all of them."""
    q, k, v = (part[:, 0] for part in (h @ w).chunk(3, -1))
    return torch.softmax(q @ k.T, -1) @ v


SEQUENCES = {
    "attention": attention(),
    "attention_causal": attention(is_causal=True),
    "attention_scale": attention(scale=0.1),
    "attention_mask": attention(attn_mask=torch.ones(5, 5, dtype=torch.bool).tril(1)),
    "attention_additive": attention(attn_mask=torch.linspace(-1, 1, 25).view(5, 5)),
    "attention_row_mask": rows_mask,
    "attention_learned_bias": learned_bias,
    "attention_grouped": grouped,
    "attention_cross": cross,
    "attention_packed": packed,
    "attention_3d": lambda h, w, y: F.scaled_dot_product_attention(*(h @ w).chunk(3, -1), is_causal=True),
    "attention_written_out": written_out,
    "attention_rotary": rotary,
    "attention_linear": linear_attention,
    "attention_across_rows": across_rows,
    "attention_of_vmap": lambda h, w, y: torch.func.vmap(
        lambda r: F.scaled_dot_product_attention(*(r @ w).chunk(3, -1))
    )(h),
    "attention_dropout": attention(dropout_p=0.1),
    "multi_head_attention": multi_head,
    "transformer_layer": transformer_layer,
    "recurrent": recurrent,
    "state_space": state_space,
    "layer_norm": lambda h, w, y: F.layer_norm(h, (8,), w[:, 0], w[:, 1]),
    "layer_norm_2d": lambda h, w, y: F.layer_norm(h @ w, (5, 24)),
    "rms_norm": lambda h, w, y: F.rms_norm(h, (8,), w[:, 0]),
    "group_norm_tokens": lambda h, w, y: F.group_norm(h.transpose(1, 2), 4),
    "batch_norm_tokens": lambda h, w, y: F.batch_norm((h @ w).flatten(0, 1), None, None, training=True),
    "qk_norm": lambda h, w, y: torch.matmul(
        *(F.normalize(p, dim=-1) for p in ((h @ w)[..., :8], (h @ w)[..., 8:16].mT))
    ),
    "mean_pool": lambda h, w, y: h.mean(1) @ w,
    "masked_mean_pool": lambda h, w, y: masked_mean(h @ w, torch.arange(5) <= y[:, None] % 5),
    "last_token": lambda h, w, y: h[torch.arange(24), y % 5] @ w,
    "last_token_gather": lambda h, w, y: h.gather(1, (y % 5)[:, None, None].expand(24, 1, 8))[:, 0] @ w,
    "tokens_flat": lambda h, w, y: h.reshape(-1, 8) @ w,
    "cross_entropy_tokens": lambda h, w, y: F.cross_entropy(
        (h @ w).flatten(0, 1), (y[:, None] + torch.arange(5)).flatten()
    ),
    "next_token_loss": lambda h, w, y: F.cross_entropy((h @ w)[:, :-1].mT, (y[:, None] + torch.arange(4)) % 24),
    "causal_convolution": lambda h, w, y: F.conv1d(F.pad(h.mT, (2, 0)), w[:, None, :3], groups=8),
    "token_shift": lambda h, w, y: (h + F.pad(h, (0, 0, 1, 0))[:, :-1]) @ w,
    "cumulative_mean": lambda h, w, y: (h @ w).cumsum(1) / torch.arange(1, 6)[:, None],
    "relative_bias": lambda h, w, y: h @ w + w[0][torch.arange(5)[:, None] % 3],
    "learned_positions": lambda h, w, y: (h + w.T[:5]) @ w,
    "expert_choice": lambda h, w, y: torch.einsum("bte,btd->bed", (h @ w[:, :3]).softmax(1), h),
    "dense_experts": lambda h, w, y: torch.einsum(
        "bte,btd,edf->btf", (h @ w[:, :3]).softmax(-1), h, w.reshape(8, 3, 8).movedim(1, 0)
    ),
    "gumbel": lambda h, w, y: F.gumbel_softmax(h @ w),
}


def masked_mean(h, mask):
    return (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
