"""GEMMs of all pairs of formats: D = A @ B.T, contraction last in both operands, exact products, sums in fp32.

If both decoded operands are exact in bf16, bf16 and fp32 units compute exact products, and only the order of the fp32 sums is
unspecified. Scales that are not powers of two are applied to fp32 sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from dlp.kernels.reference.fp8 import Block, decode_fp8, decode_fp8_block
from dlp.kernels.reference.mx import decode_mxfp8
from dlp.kernels.reference.nvfp4 import decode_nvfp4, nvfp4_alpha

PROMOTION = 128  # number of products that are summed before the scales are applied
INT8_PRODUCTS = 2**17 - 8  # largest number of products of two int8 whose sum fits int32; a multiple of 8
FOLDED_PRODUCTS = 2**15 - 8  # sums of this number of products of two int8 differences, such as code - zero, fit int32


def matmul_bf16_exact(a: Tensor, b: Tensor) -> Tensor:
    """Return a [rows, C] @ b [cols, C].T in fp32 [rows, cols], for fp32 operands whose values are exact in bf16.

    bf16 units compute exact products of such values and sum them in fp32, so that a CPU may use its bf16 units too. These may
    treat bf16 denormals (below 2^-126) as 0.
    """
    if a.is_cuda:
        return torch.mm(a.bfloat16(), b.bfloat16().t(), out_dtype=torch.float32)
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return a @ b.t()
    finally:
        matmul.fp32_precision = before


def finish(result: Tensor, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None) -> Tensor:
    """Return the result plus bias, added in fp32 and rounded once to `out_dtype`. If `accumulate` is given, add this sum to
    `accumulate` instead, and return `accumulate`."""
    if bias is not None:
        result = result.float() + bias.float()
    if accumulate is not None:
        return accumulate.add_(result)
    return result.to(out_dtype)


def gemm_launch(sums: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the GEMM launch of a reference: `sums` gets the parts of A and B alternately, then the blocks of their layouts (if
    the launch has the layouts as first arguments), and returns fp32 sums [rows, cols]."""

    @functools.wraps(sums)
    def launch(*problem: Any) -> Tensor:
        *layouts, a, b, out_dtype, bias, accumulate, _ = problem
        parts = chain.from_iterable(zip(a, b, strict=True))
        return finish(sums(*parts, *[layout.block for layout in layouts]), out_dtype, bias, accumulate)

    return launch


def gemm_hp(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return a [rows, C] @ b [cols, C].T with fp32 accumulation, rounded once to `out_dtype`."""
    if a.dtype == b.dtype == out_dtype:
        return a @ b.t()
    if a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32:
        return matmul_bf16_exact(a.float(), b.float())
    return (a.float() @ b.float().t()).to(out_dtype)


def gemm_fp8_tensor(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor) -> Tensor:
    """Multiply FP8 codes a [rows, C] and b [cols, C] with one fp32 scale_inv each -> fp32 [rows, cols] = acc * fl(sa * sb)."""
    return matmul_bf16_exact(decode_fp8(a), decode_fp8(b)) * (a_scale_inv * b_scale_inv)


def gemm_fp8_tensor_sum(terms: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> Tensor:
    """Return the sum of products of FP8 codes a [rows, C_i] and b [cols, C_i] with scale_inv sa and sb, for terms (a, b, sa,
    sb) -> fp32 [rows, cols]. Sums of PROMOTION products are multiplied by fl(sa * sb) and added in fp32, term after term."""
    total = torch.zeros(len(terms[0][0]), len(terms[0][1]), device=terms[0][0].device)
    for a, b, a_scale_inv, b_scale_inv in terms:
        for left, right in zip(a.split(PROMOTION, 1), b.split(PROMOTION, 1), strict=True):
            total.addcmul_(matmul_bf16_exact(decode_fp8(left), decode_fp8(right)), a_scale_inv * b_scale_inv)
    return total


def gemm_fp8_rowwise(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor) -> Tensor:
    """Multiply FP8 codes a [rows, C] and b [cols, C] with scale_inv [rows] and [cols] -> fp32 [rows, cols] =
    fl(fl(acc * sa) * sb)."""
    return matmul_bf16_exact(decode_fp8(a), decode_fp8(b)) * a_scale_inv[:, None] * b_scale_inv


def grouped_fp8_rowwise(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, ends: Tensor, fast_accumulation: bool = False
) -> Tensor:
    """Multiply each group of rows of FP8 codes a [rows, C] by one matrix of b [groups, cols, C], with scale_inv [rows] and
    [groups, cols] -> bf16 [rows, cols]. ends: int32 [groups], the end of the rows of each group."""
    ends_before = [0, *ends.tolist()]
    products = [
        gemm_fp8_rowwise(a[start:end], b[i], a_scale_inv[start:end], b_scale_inv[i])
        for i, (start, end) in enumerate(pairwise(ends_before))
    ]
    return torch.cat(products).bfloat16()


def gemm_int4_group(x: Tensor, codes: Tensor, scale_inv: Tensor, zero: Tensor | None = None) -> Tensor:
    """Multiply x [tokens, K] by packed int4 codes [N, K/2] with scale_inv and zero point int8 (None: 0) [N, K / group] -> fp32
    [tokens, N]: the sum over groups of scale_inv times the sum of x * (code - zero). Products are exact, and the order of the
    fp32 sums is unspecified: two results differ by at most 2^-18 times the sum of the magnitudes of all terms."""
    groups = scale_inv.shape[1]
    counted = torch.stack([codes & 15, codes >> 4], -1).flatten(1).unflatten(1, (groups, -1)).float() - 8
    counted = counted if zero is None else counted - zero[..., None]
    sums = torch.einsum("mgk,ngk->mng", x.float().unflatten(1, (groups, -1)), counted)
    return (sums * scale_inv).sum(-1)


def gemm_int8_rowwise(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, sums: Callable[[Tensor, Tensor], Tensor], *,
    a_zero: Tensor | None = None, b_zero: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply int8 codes a [rows, C] and b [cols, C] with scale_inv [rows] and [cols] and zero points int8 [rows] and [cols]
    (None: 0) -> fp32 [rows, cols] = fl(fl(acc * sa) * sb), where acc is the exact sum of (a - za) * (b - zb), rounded to fp32.
    `sums`: function that returns int32 sums of at most INT8_PRODUCTS products."""
    folds = a_zero is not None or b_zero is not None
    most = FOLDED_PRODUCTS if folds else INT8_PRODUCTS
    pieces = zip(a.split(most, 1), b.split(most, 1), strict=True)
    made = [_less_zero_points(sums(*piece), *piece, a_zero, b_zero) for piece in pieces]
    total = made[0] if len(made) == 1 else torch.stack([each.long() for each in made]).sum(0)
    return (total * a_scale_inv[:, None]).mul_(b_scale_inv)


def _less_zero_points(total: Tensor, a: Tensor, b: Tensor, a_zero: Tensor | None, b_zero: Tensor | None) -> Tensor:
    """Turn `total`, the sums of a * b, int32 [rows, cols], into sums of (a - za) * (b - zb) in place: subtract zb * sum(a) and
    za * sum(b - zb)."""
    if b_zero is not None:
        total.addcmul_(a.sum(1, dtype=torch.int32)[:, None], b_zero.int(), value=-1)
    if a_zero is not None:
        of_b = b.sum(1, dtype=torch.int32)
        of_b = of_b if b_zero is None else of_b - b.shape[1] * b_zero.int()
        total.addcmul_(a_zero.int()[:, None], of_b, value=-1)
    return total


def int8_sums(a: Tensor, b: Tensor) -> Tensor:
    """Return int8 a [rows, C] @ b [cols, C].T as int32 [rows, cols].

    `torch._int_mm` hands strides to oneDNN as leading dimensions. The stride of a dimension of size 1 is arbitrary, and oneDNN
    leaves the result uninitialized if the leading dimension is shorter than a row: such operands get the strides of rows.
    """
    return torch._int_mm(_row_strides(a), _row_strides(b.t()))


def _row_strides(x: Tensor) -> Tensor:
    """Return x with the strides of a contiguous matrix if one of the two sizes is 1, else x."""
    return x.contiguous().view(-1).view(x.shape) if 1 in x.shape else x


def gemm_fp8_block(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, a_block: Block, b_block: Block, *,
    power_of_two: bool,
) -> Tensor:  # fmt: skip
    """Multiply FP8 codes a [rows, C] and b [cols, C] in blocks of 128 along C -> fp32 [rows, cols].

    With power-of-two scales the decoded operands are exact in bf16, and one GEMM computes the result. Otherwise the sums of 128
    products are multiplied by fl(sa * sb) and added in fp32.
    """
    if power_of_two:
        return matmul_bf16_exact(decode_fp8_block(a, a_scale_inv, a_block), decode_fp8_block(b, b_scale_inv, b_block))
    a_rows = a_scale_inv.repeat_interleave(a_block[0], 0)[: a.shape[0]]
    b_rows = b_scale_inv.repeat_interleave(b_block[0], 0)[: b.shape[0]]
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    steps = zip(decode_fp8(a).split(PROMOTION, 1), decode_fp8(b).split(PROMOTION, 1), strict=True)
    for k, (a_k, b_k) in enumerate(steps):
        total += matmul_bf16_exact(a_k, b_k) * (a_rows[:, k, None] * b_rows[:, k])
    return total


def gemm_mxfp8(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_block: Block, b_block: Block) -> Tensor:
    """Multiply MXFP8 codes a [rows, C] and b [cols, C] with E8M0 bytes -> fp32 [rows, cols]; decoded operands are exact in
    bf16."""
    return matmul_bf16_exact(decode_mxfp8(a, a_scale, a_block), decode_mxfp8(b, b_scale, b_block))


def gemm_nvfp4(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_amax: Tensor, b_amax: Tensor, a_block: Block,
    b_block: Block,
) -> Tensor:  # fmt: skip
    """Multiply packed NVFP4 codes a [rows, C/2] and b [cols, C/2] with E4M3 scales and amaxes [] -> fp32 [rows, cols] =
    alpha * acc."""
    acc = matmul_bf16_exact(decode_nvfp4(a, a_scale, a_block), decode_nvfp4(b, b_scale, b_block))
    return acc * nvfp4_alpha(a_amax, b_amax)
