"""Products, linear algebra, elementwise functions, transforms, closures: see ``conformance_cases.py``.

``PRODUCTS``, ``POINTWISE``, ``TRANSFORMS``: ``(w, x, y)``, w [6, 8] a stored parameter, x [24, 6] floating rows, y [24]
integer rows. ``ALGEBRA``: ``(a, w, y)``, a [24, 4, 4] rows of matrices, w [4, 4] a stored parameter.
"""

import einops
import torch
import torch.nn.functional as F

import fsharding as fs

RAMP = torch.linspace(-1, 1, 24)[:, None]
EYE = torch.eye(4)
TABLE = {"scale": torch.linspace(0.5, 1.5, 8), "parts": [torch.ones(8), torch.arange(8.0)]}


def einsum(equation, *operands):
    return lambda w, x, y: torch.einsum(equation, *(dict(w=w, x=x, z=x @ w)[name] for name in operands))


PRODUCTS = {
    "matmul": lambda w, x, y: x @ w,
    "matmul_chain": lambda w, x, y: torch.tanh(x @ w) @ w.T @ w,
    "matmul_batched": lambda w, x, y: x.view(24, 2, 3) @ w.reshape(2, 3, 8)[1],
    "matmul_left": lambda w, x, y: w.T @ x.T,
    "matmul_broadcast": lambda w, x, y: x.reshape(24, 1, 2, 3) @ w.reshape(4, 3, 4),
    "matmul_rows_of_rows": lambda w, x, y: x @ x.T @ x,
    "matvec": lambda w, x, y: x @ w[:, 0],
    "vecmat": lambda w, x, y: x[:, 0] @ (x @ w),
    "dot": lambda w, x, y: torch.dot(x[:, 0], (x @ w)[:, 1]) * w,
    "inner": lambda w, x, y: torch.inner(x, w.T),
    "vdot": lambda w, x, y: torch.vdot(x.reshape(-1), x.sin().reshape(-1)) * w,
    "vecdot": lambda w, x, y: torch.linalg.vecdot(x @ w, (x @ w).cos()),
    "outer": lambda w, x, y: torch.outer(x[:, 0], w[0]),
    "outer_of_rows": lambda w, x, y: torch.outer(x[:, 0], x[:, 1]),
    "ger_parameters": lambda w, x, y: torch.outer(w[0], w[1]) + (x @ w)[:, :, None],
    "gram": lambda w, x, y: x.T @ (x @ w),
    "gram_of_rows": lambda w, x, y: x @ x.T,
    "linear": lambda w, x, y: F.linear(x, w.T, torch.arange(8.0).to(x)),
    "linear_bias": lambda w, x, y: F.linear(x, w.T, w.sum(0)),
    "linear_3d": lambda w, x, y: F.linear((x @ w).view(24, 4, 2).transpose(1, 2), w[:, :4]),
    "bilinear": lambda w, x, y: F.bilinear(x, x.sin(), torch.stack([w[:, :6], w[:, 2:]]), w[0, :2]),
    "addmm": lambda w, x, y: torch.addmm(w.sum(0), x, w, alpha=0.5, beta=2.0),
    "addmv": lambda w, x, y: torch.addmv(x[:, 0], x, w[:, 0], beta=0.5),
    "addr": lambda w, x, y: torch.addr(x @ w, x[:, 0], w[0]),
    "addbmm": lambda w, x, y: torch.addbmm(w[:4, :4], *halves(x @ w)),
    "baddbmm": lambda w, x, y: torch.baddbmm(w[:4, :4], *halves(x @ w), beta=0.5, alpha=2),
    "bmm": lambda w, x, y: torch.bmm(*halves(x @ w)),
    "tensordot": lambda w, x, y: torch.tensordot(x.view(24, 2, 3), w.reshape(2, 3, 8), 2),
    "tensordot_rows": lambda w, x, y: torch.tensordot(x, x @ w, ([0], [0])),
    "kron": lambda w, x, y: torch.kron(x, w[:2, :2]),
    "kron_parameters": lambda w, x, y: x @ torch.kron(w[:2, :2], w[:3, :2]),
    "chain_matmul": lambda w, x, y: torch.linalg.multi_dot([x, w, w.T, w]),
    "cross": lambda w, x, y: torch.linalg.cross(x[:, :3], x[:, 3:]),
    "cdist": lambda w, x, y: torch.cdist(x, w.T),
    "cdist_of_rows": lambda w, x, y: torch.cdist(x, x.sin()),
    "cdist_batched": lambda w, x, y: torch.cdist((x @ w).view(24, 4, 2), (x @ w).view(24, 4, 2).sin(), p=1.0),
    "pdist": lambda w, x, y: F.pdist(x),
    "einsum_linear": einsum("bi,ij->bj", "x", "w"),
    "einsum_chain": einsum("bi,ij,kj->bk", "x", "w", "w"),
    "einsum_gram": einsum("bi,bj->ij", "x", "z"),
    "einsum_gram_of_rows": einsum("bi,ci->bc", "x", "x"),
    "einsum_outer": einsum("bi,bj->bij", "x", "z"),
    "einsum_rowwise": einsum("bi,bi->b", "z", "z"),
    "einsum_total": einsum("bi,bi->", "z", "z"),
    "einsum_sum_rows": einsum("bi->i", "z"),
    "einsum_transpose": einsum("bi->ib", "z"),
    "einsum_scale": lambda w, x, y: torch.einsum("bi,i->bi", x, w[:, 0]),
    "einsum_bilinear": lambda w, x, y: torch.einsum("bi,kij,bj->bk", x[:, :4], w.reshape(3, 4, 4), x[:, 2:]),
    "einsum_heads": lambda w, x, y: torch.einsum("bhd,hde->bhe", x.view(24, 2, 3), w.reshape(2, 3, 8)),
    "einsum_attention": lambda w, x, y: torch.einsum("bqd,bkd->bqk", *2 * [(x @ w).view(24, 4, 2)]).softmax(-1),
    "einsum_diagonal": lambda w, x, y: torch.einsum("bii->bi", (x @ w)[:, :4].reshape(24, 2, 2)),
    "einsum_ellipsis": lambda w, x, y: torch.einsum("...i,ij->...j", x.view(12, 2, 6), w),
    "low_rank": lambda w, x, y: x @ w[:, :2] @ w[:2] + x @ w,
}


def halves(z):
    return z.view(24, 4, 2), z.view(24, 4, 2).mT + 1


def definite(a):
    return a @ a.mT + 2 * EYE.to(a)


ALGEBRA = {
    "inv": lambda a, w, y: torch.linalg.inv(definite(a)),
    "inv_parameter": lambda a, w, y: a @ torch.linalg.inv(definite(w)),
    "pinv": lambda a, w, y: torch.linalg.pinv(definite(a)),
    "solve": lambda a, w, y: torch.linalg.solve(definite(a), w),
    "solve_rows": lambda a, w, y: torch.linalg.solve(definite(w), a),
    "solve_vector": lambda a, w, y: torch.linalg.solve(definite(a), a[:, :, 0] @ w),
    "solve_triangular": lambda a, w, y: torch.linalg.solve_triangular(
        definite(a).tril(), w.expand(24, 4, 4), upper=False
    ),
    "triangular_solve": lambda a, w, y: torch.triangular_solve(a @ w, definite(a).triu())[0],
    "lstsq": lambda a, w, y: torch.linalg.lstsq(definite(a), a @ w).solution,
    "cholesky": lambda a, w, y: torch.linalg.cholesky(definite(a @ w)),
    "cholesky_solve": lambda a, w, y: torch.cholesky_solve(a @ w, torch.linalg.cholesky(definite(a))),
    "cholesky_inverse": lambda a, w, y: torch.cholesky_inverse(torch.linalg.cholesky(definite(a @ w))),
    "qr": lambda a, w, y: torch.linalg.qr(definite(a @ w))[1].abs(),
    "svdvals": lambda a, w, y: torch.linalg.svdvals(a @ w),
    "svd_low_rank": lambda a, w, y: rebuilt(*torch.linalg.svd(a @ w)),
    "eigvalsh": lambda a, w, y: torch.linalg.eigvalsh(definite(a @ w)),
    "eigh": lambda a, w, y: spectral(*torch.linalg.eigh(definite(a @ w))),
    "eigvals": lambda a, w, y: torch.linalg.eigvals(definite(a)).real.sort(-1).values @ w,
    "det": lambda a, w, y: torch.linalg.det(definite(a @ w) / 4),
    "slogdet": lambda a, w, y: torch.linalg.slogdet(definite(a @ w))[1],
    "logdet": lambda a, w, y: torch.logdet(definite(a @ w)),
    "lu": lambda a, w, y: torch.linalg.lu(definite(a @ w))[2],
    "lu_factor": lambda a, w, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(definite(a)), a @ w),
    "ldl": lambda a, w, y: torch.linalg.ldl_factor(definite(a @ w))[0].detach() * a,
    "matrix_power": lambda a, w, y: torch.linalg.matrix_power(a @ w / 3, 3),
    "matrix_power_negative": lambda a, w, y: torch.linalg.matrix_power(definite(a), -2) @ w,
    "matrix_exp": lambda a, w, y: torch.linalg.matrix_exp(a @ w / 5),
    "matrix_norm": lambda a, w, y: torch.linalg.matrix_norm(a @ w),
    "matrix_norm_nuclear": lambda a, w, y: torch.linalg.matrix_norm(a @ w, "nuc"),
    "matrix_norm_2": lambda a, w, y: torch.linalg.matrix_norm(a @ w, 2),
    "matrix_norm_1": lambda a, w, y: torch.linalg.matrix_norm(a @ w, 1),
    "matrix_norm_inf": lambda a, w, y: torch.linalg.matrix_norm(a @ w, torch.inf),
    "matrix_rank": lambda a, w, y: torch.linalg.matrix_rank(a.detach())[:, None, None] * (a @ w),
    "cond": lambda a, w, y: torch.linalg.cond(definite(a @ w)),
    "trace": lambda a, w, y: torch.func.vmap(torch.trace)(a @ w),
    "trace_parameter": lambda a, w, y: a * torch.trace(w),
    "multi_dot": lambda a, w, y: a[:, 0] @ torch.linalg.multi_dot([w, w.T, w]),
    "vander": lambda a, w, y: torch.linalg.vander((a @ w)[:, 0], N=3),
    "householder": lambda a, w, y: torch.linalg.householder_product(a @ w, a[:, 0].sigmoid()),
    "tensorinv": lambda a, w, y: a @ torch.linalg.tensorinv(definite(w).view(4, 2, 2), 1).reshape(4, 4),
    "gram_schmidt": lambda a, w, y: gram_schmidt(definite(a @ w)),
    "newton_schulz": lambda a, w, y: newton_schulz(definite(a @ w)),
    "rotation": lambda a, w, y: torch.linalg.cross(a[:, :3, 0], a[:, :3, 1] + w[0, :3]),
    "mahalanobis": lambda a, w, y: torch.einsum("bi,bij,bj->b", a[:, 0], torch.linalg.inv(definite(a)), a[:, 1] @ w),
}


def rebuilt(u, s, vh):
    return u @ torch.diag_embed(s.log1p()) @ vh


def spectral(values, vectors):
    return vectors @ torch.diag_embed(values.sqrt()) @ vectors.mT


def gram_schmidt(a):
    out = []
    for v in a.unbind(-1):
        for u in out:
            v = v - (u * v).sum(-1, keepdim=True) * u
        out.append(F.normalize(v, dim=-1))
    return torch.stack(out, -1)


def newton_schulz(a):
    x = a / a.norm(dim=(-2, -1), keepdim=True)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


def unary(f):
    return lambda w, x, y: f(x @ w)


_INPLACE_SAFE = """relu relu6 elu selu celu gelu silu mish softplus hardtanh hardswish hardsigmoid leaky_relu logsigmoid
softsign tanhshrink hardshrink softshrink sigmoid tanh""".split()
_MATH = """sin cos tan asinh atan sinh cosh exp expm1 square abs neg sigmoid tanh erf erfc sinc round floor ceil trunc
frac sign sgn exp2 deg2rad digamma signbit isfinite""".split()
_POSITIVE = "reciprocal log log2 log10 log1p sqrt rsqrt acosh lgamma".split()

POINTWISE = {
    **{name: unary(getattr(F, name)) for name in _INPLACE_SAFE},
    "gelu_tanh": unary(lambda z: F.gelu(z, approximate="tanh")),
    "threshold": unary(lambda z: F.threshold(z, 0.1, -0.5)),
    "prelu": lambda w, x, y: F.prelu(x @ w, w[0]),
    "rrelu_eval": unary(lambda z: F.rrelu(z, training=False)),
    "glu": unary(F.glu),
    "swiglu": unary(lambda z: F.silu(z[:, :4]) * z[:, 4:]),
    "dropout_eval": unary(lambda z: F.dropout(z, 0.5, training=False)),
    **{f"torch_{name}": unary(lambda z, name=name: getattr(torch, name)(z * 0.7) * z) for name in _MATH},
    **{f"torch_{name}": unary(lambda z, name=name: getattr(torch, name)(z.square() + 1.1)) for name in _POSITIVE},
    "asin_acos_atanh": unary(lambda z: (z * 0.1).asin() + (z * 0.1).acos() + (z * 0.1).atanh()),
    "erfinv": unary(lambda z: torch.erfinv(z.tanh() * 0.9)),
    "bessel": unary(lambda z: torch.special.i0(z) + torch.special.i0e(z) + torch.special.i1(z)),
    "special": unary(lambda z: torch.special.entr(z.sigmoid()) + torch.special.ndtr(z) + torch.special.log_ndtr(z)),
    "xlogy": unary(lambda z: torch.xlogy(z, z.square() + 1) + torch.special.xlog1py(z, z.square())),
    "logit": unary(lambda z: torch.logit(z.sigmoid() * 0.9 + 0.05)),
    "polygamma": unary(lambda z: torch.polygamma(1, z.square() + 1)),
    "pow": unary(lambda z: z.pow(3) + (z.square() + 0.5).pow(0.5) + 2**z),
    "pow_of_rows": unary(lambda z: (z.square() + 0.5).pow(z)),
    "clamp": unary(lambda z: z.clamp(-1, 1) + z.clamp(min=RAMP)),
    "where": unary(lambda z: torch.where(RAMP > 0, z, z.square())),
    "lerp": unary(lambda z: torch.lerp(z, z.flip(1), 0.3)),
    "atan2": unary(lambda z: torch.atan2(z, z.flip(1).abs() + 1)),
    "hypot": unary(lambda z: torch.hypot(z, RAMP + 2)),
    "logaddexp": unary(lambda z: torch.logaddexp(z, RAMP) + torch.logaddexp2(z, z * 0.5)),
    "maximum": unary(lambda z: torch.maximum(z, RAMP) + torch.fmin(z, z.flip(1))),
    "fmod_remainder": unary(lambda z: torch.fmod(z, 0.7) + torch.remainder(z, RAMP.abs() + 0.5)),
    "floor_divide": unary(lambda z: torch.floor_divide(z.detach(), 0.4) * z),
    "div_rounded": unary(lambda z: torch.div(z, 0.3, rounding_mode="trunc") + z),
    "copysign": unary(lambda z: torch.copysign(z, RAMP)),
    "heaviside": unary(lambda z: torch.heaviside(z.detach(), torch.tensor(0.5)) * z),
    "addcmul": unary(lambda z: torch.addcmul(z, z, RAMP, value=0.5)),
    "addcdiv": unary(lambda z: torch.addcdiv(z, z, z.square() + 1, value=0.5)),
    "nan_to_num": unary(lambda z: torch.nan_to_num(torch.where(z > 1, torch.nan, z), 0.3)),
    "frexp": unary(lambda z: torch.frexp(z.detach())[0] * z),
    "ldexp": unary(lambda z: torch.ldexp(z, torch.tensor([1, 2] * 4))),
    "nextafter": unary(lambda z: torch.nextafter(z.detach(), torch.tensor(9.0)) * z),
    "comparisons": unary(lambda z: ((z > 0) & (z <= RAMP) | (z == 0) ^ (z != 1)).to(z) * z),
    "isclose": unary(lambda z: torch.isclose(z.detach(), z.detach().round(), atol=0.2) * z),
    "logical": unary(lambda z: torch.logical_xor(z > 0, RAMP > 0).logical_not() * z),
    "bitwise": lambda w, x, y: (((y & 3) | 4) ^ (y << 1) & ~(y >> 1))[:, None] * (x @ w),
    "integers": lambda w, x, y: (y // 2 * 3 - y % 3 + torch.gcd(y, torch.tensor(4)))[:, None] * (x @ w),
    "cast": lambda w, x, y: (x.double() @ w.double()).to(x.dtype),
    "half": lambda w, x, y: (x @ w).to(torch.float64).float().to(x),
    "to_int": unary(lambda z: z.detach().long() * z),
    "complex_abs": unary(lambda z: torch.complex(z.float(), z.float().flip(1)).abs()),
    "complex_mul": unary(lambda z: torch.view_as_real(torch.view_as_complex(z.float().view(24, 4, 2)).square())),
    "polar": unary(lambda z: torch.polar(z.float().square(), z.float()).real),
    "fft": unary(lambda z: torch.fft.rfft(z.float()).abs()),
    "fft_rows": unary(lambda z: torch.fft.fft(z.float(), dim=0).real),
    "fft_convolution": unary(
        lambda z: torch.fft.irfft(torch.fft.rfft(z.float()) * torch.fft.rfft(TABLE["scale"]), n=8)
    ),
    "rope": unary(lambda z: z * RAMP.cos() + torch.cat([-z[:, 4:], z[:, :4]], 1) * RAMP.sin()),
    "fake_quantize": unary(lambda z: torch.fake_quantize_per_tensor_affine(z.float(), 0.1, 0, -8, 7)),
    "straight_through": unary(lambda z: z + (z.round() - z).detach()),
    "broadcast_parameter": lambda w, x, y: (x @ w) * w[0] + w.mean(0) + w.sum(),
    "penalty": lambda w, x, y: (x @ w).sum(0) + 0.1 * w.square().sum(),
    "weight_norm": lambda w, x, y: x @ (w / w.norm(dim=0, keepdim=True)),
    "weight_standardised": lambda w, x, y: x @ ((w - w.mean(0)) / w.std(0)),
    "spectral_norm": lambda w, x, y: x @ (w / (w @ w.T @ torch.ones_like(w[:, 0])).norm()),
    "tied": lambda w, x, y: torch.tanh(x @ w) @ w.T,
    "embedding": lambda w, x, y: F.embedding(y % 6, w) * 2,
    "embedding_padding": lambda w, x, y: F.embedding(y % 6, w, padding_idx=2) * 2,
    "embedding_max_norm": lambda w, x, y: F.embedding(y % 6, w / w.norm(dim=1, keepdim=True).clamp(min=1)),
    "parameter_index": lambda w, x, y: w[y % 6] + 1,
    "parameter_of_sorted": lambda w, x, y: x @ w.sort(0).values,
    "parameter_softmax": lambda w, x, y: x @ torch.softmax(w, 0),
    "parameter_in_place": lambda w, x, y: x @ w.clone().mul_(2).add_(1),
    "parameter_flat": lambda w, x, y: x @ w.reshape(-1)[:12].view(6, 2),
}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return g * 3 * ctx.saved_tensors[0]  # on purpose not the derivative


def loss(v, x):
    return torch.tanh(x @ v).square().mean()


def per_row(w):
    return lambda row: torch.tanh(row @ w)


def scaled(w, x, y):
    for part in TABLE["parts"]:
        x = torch.tanh(x @ w * part.to(x)) @ w.T
    return x * TABLE["scale"][:6]


TRANSFORMS = {
    "grad": lambda w, x, y: torch.func.grad(loss)(w, x),
    "grad_of_rows": lambda w, x, y: torch.func.grad(loss, argnums=1)(w, x),
    "fs_grad": lambda w, x, y: fs.grad(loss, argnums=1)(w, x),
    "grad_and_value": lambda w, x, y: torch.func.grad_and_value(loss)(w, x)[0],
    "grad_of_grad": lambda w, x, y: torch.func.grad(lambda v: torch.func.grad(loss)(v, x).square().sum())(w),
    "fs_grad_of_grad": lambda w, x, y: fs.grad(lambda v: fs.grad(loss)(v, x).square().sum())(w),
    "gradient_penalty": lambda w, x, y: fs.grad(
        lambda u: (fs.grad(lambda u: loss(w, u))(u).norm(dim=1) - 1).square().sum()
    )(x),
    "inner_step": lambda w, x, y: x @ (w - 0.1 * torch.func.grad(loss)(w, x)),
    "vjp": lambda w, x, y: torch.func.vjp(lambda v: x @ v, w)[1](torch.ones_like(x @ w))[0],
    "jvp": lambda w, x, y: torch.func.jvp(lambda v: (x @ v).tanh(), (w,), (torch.ones_like(w),))[1],
    "jvp_of_rows": lambda w, x, y: torch.func.jvp(lambda u: (u @ w).tanh(), (x,), (x.cos(),))[1],
    "hessian_vector": lambda w, x, y: torch.func.jvp(
        torch.func.grad(lambda v: loss(v, x)), (w,), (torch.ones_like(w),)
    )[1],
    "vmap_columns": lambda w, x, y: torch.func.vmap(lambda c: torch.tanh(x @ c), in_dims=1, out_dims=1)(w),
    "vmap_rows": lambda w, x, y: torch.func.vmap(per_row(w))(x),
    "vmap_of_grad": lambda w, x, y: torch.func.vmap(torch.func.grad(lambda r: per_row(w)(r).sum()))(x),
    "grad_of_vmap": lambda w, x, y: torch.func.grad(lambda v: torch.func.vmap(per_row(v))(x).sum())(w),
    "per_sample_norms": lambda w, x, y: torch.func.vmap(torch.func.grad(lambda v, r: loss(v, r)), (None, 0))(w, x).norm(
        dim=(1, 2)
    ),
    "jacrev": lambda w, x, y: torch.func.vmap(torch.func.jacrev(per_row(w)))(x),
    "jacfwd": lambda w, x, y: torch.func.vmap(torch.func.jacfwd(per_row(w)))(x),
    "jacrev_of_sum": lambda w, x, y: torch.func.jacrev(lambda v: torch.tanh(x @ v).sum(0))(w[:, :2]),
    "hessian": lambda w, x, y: torch.func.vmap(torch.func.hessian(lambda r: per_row(w)(r).sum()))(x),
    "hessian_of_bias": lambda w, x, y: torch.func.hessian(lambda b: torch.tanh(x @ w + b).mean())(w[0]),
    "laplacian": lambda w, x, y: torch.func.vmap(
        lambda r: torch.func.hessian(lambda u: per_row(w)(u).sum())(r).trace()
    )(x),
    "functional_call": lambda w, x, y: torch.func.functional_call(LINEAR, {"weight": w.T, "bias": w[0]}, (x,)),
    "autograd_function": lambda w, x, y: Square.apply(x @ w),
    "detach": lambda w, x, y: (x @ w).detach() * (x @ w),
    "stop_gradient_target": lambda w, x, y: F.mse_loss(x @ w, (x @ w.flip(1)).detach()),
    "no_grad": lambda w, x, y: without_gradient(x, w) * (x @ w),
    "closure": lambda w, x, y: (x @ w) * TABLE["scale"] + RAMP,
    "closure_in_loop": scaled,
    "linspace": lambda w, x, y: x @ w + torch.linspace(0, 1, 8),
    "arange_positions": lambda w, x, y: (x @ w) * torch.arange(24)[:, None],
    "logspace": lambda w, x, y: (x @ w) * torch.logspace(-1, 1, 8),
    "eye": lambda w, x, y: x @ torch.eye(6).to(x) @ w,
    "full_like": lambda w, x, y: torch.full_like(x, 0.5) @ w,
    "hann_window": lambda w, x, y: (x @ w) * torch.hann_window(8),
    "scalar_tensor": lambda w, x, y: (x @ w) * torch.tensor(2.0) + torch.scalar_tensor(0.5),
    "checkpoint_free_mlp": lambda w, x, y: einops.rearrange(F.gelu(x @ w), "b (n k) -> b n k", n=2).sum(1) @ w[:4],
}
LINEAR = torch.nn.Linear(6, 8)


def without_gradient(x, w):
    with torch.no_grad():
        return torch.tanh(x @ w)
