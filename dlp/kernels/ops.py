"""One typed wrapper per operation: checks, then the implementation for the operands' device.

On CUDA, amaxes, casts, decoding to bf16 and transposes run kernels of this package (see `dlp.kernels.casts`, `casts_fp4`
and `codes`), and GEMMs run cuBLASLt (`dlp.kernels.gemms`): FP8 codes as they are; MXFP8 and NVFP4 as they are where the GPU
has units for them (Blackwell), elsewhere decoded to bf16, which is exact. Where this package's kernels cannot be built,
GEMMs run torch's. Everything else runs `reference` on every device.

All GEMMs take bias [cols], which is added in fp32, `accumulate` [rows, cols], to which the product is added instead of
being returned in `out_dtype`, and `how` it shall run (`How`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import gemm_sm90, gemms, reference
from dlp.kernels.casts import (
    amax,
    amax_lines,
    cast_fp8_block,
    cast_fp8_block_batch,
    cast_fp8_block_both,
    cast_fp8_rowwise,
    cast_fp8_rowwise_batch,
    cast_fp8_rowwise_both,
    cast_fp8_tensor,
    cast_fp8_tensor_batch,
    cast_fp8_tensor_both,
    cast_mxfp8,
    cast_mxfp8_batch,
    cast_mxfp8_both,
    empty_block_scales,
    empty_mx_scales,
    has_batches,
    quantizer_kernels,
)
from dlp.kernels.casts_fp4 import amax_nvfp4, amax_nvfp4_both, cast_nvfp4, cast_nvfp4_batch, cast_nvfp4_both
from dlp.kernels.codes import (
    DelayedSlots,
    decode_fp8_block,
    decode_mxfp8,
    decode_nvfp4,
    delayed_updates,
    nvfp4_alpha,
    rounded,
    sum_in_order,
    swizzle_128x4,
    transpose_codes,
    transpose_e2m1,
)
from dlp.kernels.dispatch import Flags, Launches, Outs, Parts, Wanted
from dlp.kernels.gemms import AS_USUAL, BLOCK_1D, BLOCK_2D, FP4, MX_BLOCKS, NVFP4_BLOCKS, ROWWISE, How, Scales, finish
from dlp.kernels.loss import log_sum_exp, softmax_gradient
from dlp.kernels.produced import ACTIVATION_CODES, Gated, Produced, RmsNormed, Summed, stored
from dlp.kernels.producers import column_sums, rms_norm, rms_norm_backward, swiglu, swiglu_backward
from dlp.kernels.reference import (
    AMAX_ALGORITHMS,
    FLT_MAX,
    FP8_MAX,
    Draw,
    Fp8Scale,
    block_1d_layout,
    block_2d_layout,
    cast_fp8,
    decode_e2m1,
    decode_e8m0,
    decode_fp8,
    delayed_scale,
    delayed_update,
    encode_e2m1,
    encode_e2m1_stochastic,
    encode_e8m0,
    encode_fp8,
    mx_scale,
    nvfp4_block_scale,
    nvfp4_encode_scale,
    nvfp4_tensor_scale,
    pack_e2m1,
    pad_scales,
    random_bytes,
    rht16,
    scale_from_amax,
    unpack_e2m1,
    unswizzle_128x4,
    watched,
)

__all__ = [
    "ACTIVATION_CODES", "AMAX_ALGORITHMS", "FLT_MAX", "FP8_MAX", "DelayedSlots", "Draw", "Flags", "Fp8Scale", "Gated", "How",
    "Launches", "Outs", "Parts", "Produced", "RmsNormed", "Summed", "Wanted", "amax", "amax_lines", "amax_nvfp4",
    "amax_nvfp4_both", "block_1d_layout", "block_2d_layout", "cast_fp8", "cast_fp8_block", "cast_fp8_block_batch",
    "cast_fp8_block_both", "cast_fp8_rowwise", "cast_fp8_rowwise_batch", "cast_fp8_rowwise_both", "cast_fp8_tensor",
    "cast_fp8_tensor_batch", "cast_fp8_tensor_both", "cast_mxfp8", "cast_mxfp8_batch", "cast_mxfp8_both", "cast_nvfp4",
    "cast_nvfp4_batch", "cast_nvfp4_both", "column_sums", "decode_e2m1", "decode_e8m0", "decode_fp8",
    "decode_fp8_block", "decode_mxfp8", "decode_nvfp4", "delayed_scale", "delayed_update", "delayed_updates",
    "empty_block_scales", "empty_mx_scales", "encode_e2m1", "encode_e2m1_stochastic", "encode_e8m0", "encode_fp8",
    "gemm_fp8_block", "gemm_fp8_rowwise", "gemm_fp8_tensor", "gemm_hp", "gemm_mxfp8", "gemm_nvfp4", "has_batches",
    "log_sum_exp", "mx_scale", "nvfp4_alpha", "nvfp4_block_scale", "nvfp4_encode_scale", "nvfp4_tensor_scale",
    "pack_e2m1", "pad_scales", "quantizer_kernels", "random_bytes", "rht16", "rms_norm", "rms_norm_backward", "rounded",
    "scale_from_amax", "softmax_gradient", "stored", "sum_in_order", "swiglu", "swiglu_backward", "swizzle_128x4",
    "transpose_codes", "transpose_e2m1", "unpack_e2m1", "unswizzle_128x4", "watched",
]  # fmt: skip

Block = tuple[int, int]
FP8_CORES = (8, 9)  # the least compute capability that has them


Multiply = TypeVar("Multiply", bound=Callable[..., Tensor])


def _gemm(multiply: Multiply) -> Multiply:
    """A GEMM whose operands share their contraction, ValueError if they do not, and are not empty, which cuBLASLt refuses:
    sums of nothing are made here."""

    @functools.wraps(multiply)
    def checked(a: Tensor, b: Tensor, *scales: Any, out_dtype: torch.dtype, **options: Any) -> Tensor:
        if a.shape[-1] != b.shape[-1]:
            raise ValueError(
                f"GEMM operands must share their last dimension; got {tuple(a.shape)} and {tuple(b.shape)}"
            )
        if a.numel() and b.numel():
            return multiply(a, b, *scales, out_dtype=out_dtype, **options)
        zeros = torch.zeros(a.shape[0], b.shape[0], device=a.device)
        return finish(zeros, out_dtype, options.get("bias"), options.get("accumulate"))

    return checked  # type: ignore[return-value]


@_gemm
def gemm_hp(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None,
    alpha: Tensor | None = None, how: How = AS_USUAL,
) -> Tensor:  # fmt: skip
    """High-precision GEMM: a [rows, C], b [cols, C] bf16 or fp32 -> [rows, cols] in `out_dtype`, or into `accumulate`;
    `alpha` fp32 [] multiplies the sums.

    Raises ValueError when the contractions differ.
    """
    if gemms.available(a):
        return _by_cublaslt(a, b, out_dtype, bias, accumulate, alpha, how)
    wide = out_dtype if bias is None and accumulate is None and alpha is None else torch.float32
    product = reference.gemm_hp(a, b, wide)
    return finish(product if alpha is None else product * alpha, out_dtype, bias, accumulate)


def _by_cublaslt(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None, alpha: Tensor | None,
    how: How,
) -> Tensor:  # fmt: skip
    """`gemm_hp` on a GPU. Operands of two dtypes are multiplied in the wider one; a result that is neither in theirs nor in
    fp32 is rounded apart."""
    if a.dtype != b.dtype:
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(dtype)
    result = out_dtype if accumulate is None else accumulate.dtype
    if result in (a.dtype, torch.float32):
        return gemms.product(a, b, out_dtype, bias=bias, accumulate=accumulate, alpha=alpha, how=how)
    return finish(gemms.product(a, b, torch.float32, alpha=alpha, how=how), out_dtype, bias, accumulate)


def _pad_to_16(codes: Tensor) -> Tensor:
    """Zero codes appended to both dimensions of [rows, C] up to multiples of 16; a zero code is the value 0."""
    rows, cols = (-size % 16 for size in codes.shape)
    if rows == cols == 0:
        return codes.contiguous()
    return F.pad(codes.view(torch.uint8), (0, cols, 0, rows)).view(codes.dtype)


def _scaled_mm(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, fast_accumulation: bool
) -> Tensor:
    """FP8 codes a [rows, C], b [cols, C], scalar scales -> [rows, cols] by the GPU's FP8 tensor cores, through torch.
    ValueError where it has none."""
    if torch.cuda.get_device_capability(a.device) < FP8_CORES:
        raise ValueError(
            f"{torch.cuda.get_device_name(a.device)} has no FP8 tensor cores, which come with compute capability 8.9: use a "
            f"recipe that multiplies decoded values there, mxfp8 or nvfp4, or bf16"
        )
    result = torch._scaled_mm(
        _pad_to_16(a), _pad_to_16(b).t(), scale_a=a_scale_inv, scale_b=b_scale_inv, out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )  # fmt: skip
    return result[: a.shape[0], : b.shape[0]]


@_gemm
def gemm_fp8_tensor(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, *, out_dtype: torch.dtype,
    bias: Tensor | None = None, accumulate: Tensor | None = None, how: How = AS_USUAL,
) -> Tensor:  # fmt: skip
    """Per-tensor FP8 GEMM: codes a [rows, C], b [cols, C], scalar fp32 scale_inv -> [rows, cols] in `out_dtype`.

    On CUDA sizes that are not multiples of 16 are zero-padded; E5M2 times E5M2 is refused there (no such unit).
    """
    if gemms.available(a):
        scales = Scales(a_scale_inv, b_scale_inv)
        return gemms.product_fp8(a, b, out_dtype, scales, bias=bias, accumulate=accumulate, how=how)
    if not a.is_cuda:
        return finish(reference.gemm_fp8_tensor(a, b, a_scale_inv, b_scale_inv), out_dtype, bias, accumulate)
    wide = torch.float32 if bias is not None or accumulate is not None else out_dtype
    result = _scaled_mm(a, b, a_scale_inv, b_scale_inv, wide, how.fast_accumulation)
    return finish(result, out_dtype, bias, accumulate)


@_gemm
def gemm_fp8_rowwise(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, *, out_dtype: torch.dtype,
    bias: Tensor | None = None, accumulate: Tensor | None = None, how: How = AS_USUAL,
) -> Tensor:  # fmt: skip
    """Rowwise FP8 GEMM: codes a [rows, C], b [cols, C], fp32 scale_inv [rows] and [cols] -> [rows, cols].

    Hopper applies the two vectors itself. Elsewhere on CUDA the tensor cores multiply the codes, and the vectors are
    applied to the fp32 result. E5M2 times E5M2 is refused there.
    """
    if not a.is_cuda:
        return finish(reference.gemm_fp8_rowwise(a, b, a_scale_inv, b_scale_inv), out_dtype, bias, accumulate)
    if gemms.available(a) and gemms.is_hopper(a):
        scales = Scales(a_scale_inv, b_scale_inv, ROWWISE, ROWWISE)
        return gemms.product_fp8(a, b, out_dtype, scales, bias=bias, accumulate=accumulate, how=how)
    one = gemms.one(a.device)
    sums = gemm_fp8_tensor(a, b, one, one, out_dtype=torch.float32, how=how)
    return finish(sums.mul_(a_scale_inv[:, None]).mul_(b_scale_inv), out_dtype, bias, accumulate)


@_gemm
def gemm_fp8_block(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, a_block: Block, b_block: Block, *,
    power_of_two: bool, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None,
    how: How = AS_USUAL,
) -> Tensor:  # fmt: skip
    """FP8 GEMM with compact fp32 block scales: codes a [rows, C], b [cols, C], blocks (1 or 128, 128) -> [rows, cols].

    Every 128 of the contraction are promoted to fp32 with their scales: on Hopper, whose tensor cores sum 128 products
    to about 14 bits, by cuBLASLt or by our own kernel (`gemm_sm90.takes`). Elsewhere, where all scales are powers of two
    (`power_of_two`), they are MXFP8 scales of four blocks each to Blackwell, and other GPUs multiply decoded values, exact
    in bf16; else the reference runs, which CUDA refuses with ValueError unless `how` allows it.
    """
    if gemms.available(a) and gemms.is_hopper(a):
        tiled = a_block[0] > 1, b_block[0] > 1
        layouts = gemms.block_scales(a_scale_inv, tiled[0]), gemms.block_scales(b_scale_inv, tiled[1])
        modes = [BLOCK_2D if tile else BLOCK_1D for tile in tiled]
        scales = Scales(layouts[0], layouts[1], modes[0], modes[1])
        if gemm_sm90.takes(a, b, out_dtype, scales, bias=bias, accumulate=accumulate, how=how):
            return gemm_sm90.product(a, b, out_dtype, scales, bias=bias, accumulate=accumulate)
        return gemms.product_fp8(a, b, out_dtype, scales, bias=bias, accumulate=accumulate, how=how)
    if power_of_two and gemms.available(a) and gemms.is_blackwell(a):
        bytes_of = [reference.mx_from_block_scales(scale, a.shape[1]) for scale in (a_scale_inv, b_scale_inv)]
        scales = _block_scales(a, b, bytes_of[0], bytes_of[1], a_block, b_block, MX_BLOCKS)
        return gemms.product_blocks(a, b, out_dtype, scales, bias=bias, accumulate=accumulate, how=how)
    if a.is_cuda and power_of_two:
        bf16 = torch.bfloat16
        values = (
            decode_fp8_block(a, a_scale_inv, a_block, dtype=bf16),
            decode_fp8_block(b, b_scale_inv, b_block, dtype=bf16),
        )
        return gemm_hp(*values, out_dtype=out_dtype, bias=bias, accumulate=accumulate, how=how)
    check_reference(a, how)
    result = reference.gemm_fp8_block(a, b, a_scale_inv, b_scale_inv, a_block, b_block, power_of_two=power_of_two)
    return finish(result, out_dtype, bias, accumulate)


def check_reference(a: Tensor, how: How) -> None:
    """ValueError where the reference would multiply on a GPU and nobody said that it may."""
    if a.is_cuda and not how.allow_reference:
        raise ValueError(
            f"{torch.cuda.get_device_name(a.device)} has no kernel for this GEMM, and the plain-torch reference is slow: "
            f"give the recipe another option, or allow_reference = true"
        )


def _block_scales(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_block: Block, b_block: Block, mode: int
) -> Scales:
    """Compact scale bytes as the units of a block-scaled GEMM read them."""
    tiles = swizzle_128x4(a_scale, a.shape[0], a_block[0]), swizzle_128x4(b_scale, b.shape[0], b_block[0])
    return Scales(*tiles, mode, mode)


@_gemm
def gemm_mxfp8(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_block: Block, b_block: Block, *, out_dtype: torch.dtype,
    bias: Tensor | None = None, accumulate: Tensor | None = None, how: How = AS_USUAL,
) -> Tensor:  # fmt: skip
    """MXFP8 GEMM with compact E8M0 bytes: codes a [rows, C], b [cols, C], blocks (1 or 32, 32) -> [rows, cols]. By
    Blackwell's units, or on decoded values."""
    if gemms.available(a) and gemms.is_blackwell(a):
        scales = _block_scales(a, b, a_scale, b_scale, a_block, b_block, MX_BLOCKS)
        return gemms.product_blocks(a, b, out_dtype, scales, bias=bias, accumulate=accumulate, how=how)
    if a.is_cuda:
        bf16 = torch.bfloat16
        values = decode_mxfp8(a, a_scale, a_block, dtype=bf16), decode_mxfp8(b, b_scale, b_block, dtype=bf16)
        return gemm_hp(*values, out_dtype=out_dtype, bias=bias, accumulate=accumulate, how=how)
    result = reference.gemm_mxfp8(a, b, a_scale, b_scale, a_block, b_block)
    return finish(result, out_dtype, bias, accumulate)


@_gemm
def gemm_nvfp4(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_amax: Tensor, b_amax: Tensor, a_block: Block,
    b_block: Block, *, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None,
    how: How = AS_USUAL,
) -> Tensor:  # fmt: skip
    """NVFP4 GEMM: packed codes a [rows, C/2], b [cols, C/2], compact E4M3 scales, tensor amaxes, blocks (1 or 16, 16)
    -> [rows, cols]; the amaxes are applied to the fp32 accumulator. By Blackwell's units, or on decoded values."""
    if gemms.available(a) and gemms.is_blackwell(a):
        scales, alpha = (
            _block_scales(a, b, a_scale, b_scale, a_block, b_block, NVFP4_BLOCKS),
            nvfp4_alpha(a_amax, b_amax),
        )
        more: dict[str, Any] = {"bias": bias, "accumulate": accumulate, "alpha": alpha, "how": how}
        return gemms.product_blocks(a.view(FP4), b.view(FP4), out_dtype, scales, **more)
    if a.is_cuda:
        bf16, alpha = torch.bfloat16, nvfp4_alpha(a_amax, b_amax)
        values = decode_nvfp4(a, a_scale, a_block, dtype=bf16), decode_nvfp4(b, b_scale, b_block, dtype=bf16)
        return gemm_hp(*values, out_dtype=out_dtype, bias=bias, accumulate=accumulate, alpha=alpha, how=how)
    result = reference.gemm_nvfp4(a, b, a_scale, b_scale, a_amax, b_amax, a_block, b_block)
    return finish(result, out_dtype, bias, accumulate)
