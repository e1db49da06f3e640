"""One typed wrapper per operation: checks, then the implementation for the operands' device.

On CUDA, amaxes and the FP8 casts per tensor and block run kernels of this package (see `dlp.kernels.casts`), and the
per-tensor and rowwise FP8 GEMMs run `torch._scaled_mm`. Everything else runs `reference` on every device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import reference
from dlp.kernels.casts import (
    amax,
    cast_fp8_block,
    cast_fp8_block_batch,
    cast_fp8_block_both,
    cast_fp8_tensor,
    cast_fp8_tensor_batch,
    cast_fp8_tensor_both,
    has_batches,
    quantizer_kernels,
)
from dlp.kernels.reference import (
    AMAX_ALGORITHMS,
    FLT_MAX,
    FP8_MAX,
    Fp8Scale,
    block_1d_layout,
    block_2d_layout,
    cast_fp8,
    cast_mxfp8,
    cast_nvfp4,
    decode_e2m1,
    decode_e8m0,
    decode_fp8,
    decode_fp8_block,
    decode_mxfp8,
    decode_nvfp4,
    delayed_scale,
    delayed_update,
    encode_e2m1,
    encode_e2m1_stochastic,
    encode_e8m0,
    encode_fp8,
    mx_scale,
    nvfp4_alpha,
    nvfp4_block_scale,
    nvfp4_encode_scale,
    nvfp4_tensor_scale,
    pack_e2m1,
    pad_scales,
    random_bytes,
    rht16,
    scale_from_amax,
    swizzle_128x4,
    unpack_e2m1,
)

__all__ = [
    "AMAX_ALGORITHMS", "FLT_MAX", "FP8_MAX", "Fp8Scale", "amax", "block_1d_layout", "block_2d_layout", "cast_fp8",
    "cast_fp8_block", "cast_fp8_block_batch", "cast_fp8_block_both", "cast_fp8_tensor", "cast_fp8_tensor_batch",
    "cast_fp8_tensor_both", "cast_mxfp8", "cast_nvfp4", "decode_e2m1", "decode_e8m0", "decode_fp8",
    "decode_fp8_block", "decode_mxfp8", "decode_nvfp4", "delayed_scale", "delayed_update", "encode_e2m1",
    "encode_e2m1_stochastic", "encode_e8m0", "encode_fp8", "gemm_fp8_block", "gemm_fp8_rowwise", "gemm_fp8_tensor",
    "gemm_hp", "gemm_mxfp8", "gemm_nvfp4", "has_batches", "mx_scale", "nvfp4_alpha", "nvfp4_block_scale",
    "nvfp4_encode_scale", "nvfp4_tensor_scale", "pack_e2m1", "pad_scales", "quantizer_kernels", "random_bytes",
    "rht16", "scale_from_amax", "swizzle_128x4", "unpack_e2m1",
]  # fmt: skip

Block = tuple[int, int]


def _finish(result: Tensor, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None) -> Tensor:
    """Add the bias in fp32, round once to `out_dtype`; or add into `accumulate`, in its dtype, and return it."""
    if bias is not None:
        result = result.float() + bias.float()
    if accumulate is not None:
        return accumulate.add_(result)
    return result.to(out_dtype)


def _check_contraction(a: Tensor, b: Tensor) -> None:
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"GEMM operands must share their last dimension; got {tuple(a.shape)} and {tuple(b.shape)}")


def gemm_hp(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None
) -> Tensor:
    """High-precision GEMM: a [rows, C], b [cols, C] bf16 or fp32 -> [rows, cols] in `out_dtype`, or into `accumulate`.

    Raises ValueError when the contractions differ.
    """
    _check_contraction(a, b)
    wide = out_dtype if bias is None and accumulate is None else torch.float32
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and wide == torch.float32:
        return _finish(torch.mm(a, b.t(), out_dtype=torch.float32), out_dtype, bias, accumulate)
    return _finish(reference.gemm_hp(a, b, wide), out_dtype, bias, accumulate)


def _pad_to_16(codes: Tensor) -> Tensor:
    """Zero codes appended to both dimensions of [rows, C] up to multiples of 16; a zero code is the value 0."""
    rows, cols = (-size % 16 for size in codes.shape)
    if rows == cols == 0:
        return codes.contiguous()
    return F.pad(codes.view(torch.uint8), (0, cols, 0, rows)).view(codes.dtype)


def _scaled_mm(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, fast_accumulation: bool
) -> Tensor:
    """FP8 codes a [rows, C], b [cols, C], scalar scales -> [rows, cols] by the GPU's FP8 tensor cores."""
    result = torch._scaled_mm(
        _pad_to_16(a), _pad_to_16(b).t(), scale_a=a_scale_inv, scale_b=b_scale_inv, out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )  # fmt: skip
    return result[: a.shape[0], : b.shape[0]]


def gemm_fp8_tensor(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, *, out_dtype: torch.dtype,
    bias: Tensor | None = None, accumulate: Tensor | None = None, fast_accumulation: bool = False,
) -> Tensor:  # fmt: skip
    """Per-tensor FP8 GEMM: codes a [rows, C], b [cols, C], scalar fp32 scale_inv -> [rows, cols] in `out_dtype`.

    On CUDA sizes that are not multiples of 16 are zero-padded; E5M2 times E5M2 is refused there (no such unit).
    """
    _check_contraction(a, b)
    if not a.is_cuda:
        return _finish(reference.gemm_fp8_tensor(a, b, a_scale_inv, b_scale_inv), out_dtype, bias, accumulate)
    wide = torch.float32 if bias is not None or accumulate is not None else out_dtype
    return _finish(_scaled_mm(a, b, a_scale_inv, b_scale_inv, wide, fast_accumulation), out_dtype, bias, accumulate)


def gemm_fp8_rowwise(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, *, out_dtype: torch.dtype,
    bias: Tensor | None = None, accumulate: Tensor | None = None, fast_accumulation: bool = False,
) -> Tensor:  # fmt: skip
    """Rowwise FP8 GEMM: codes a [rows, C], b [cols, C], fp32 scale_inv [rows] and [cols] -> [rows, cols].

    On CUDA the tensor cores multiply the codes and the two vectors are applied to the fp32 result: torch's own rowwise
    mode gives bf16 only. E5M2 times E5M2 is refused there.
    """
    _check_contraction(a, b)
    if not a.is_cuda:
        return _finish(reference.gemm_fp8_rowwise(a, b, a_scale_inv, b_scale_inv), out_dtype, bias, accumulate)
    one = torch.ones((), device=a.device)
    acc = _scaled_mm(a, b, one, one, torch.float32, fast_accumulation)
    return _finish(acc * a_scale_inv[:, None] * b_scale_inv, out_dtype, bias, accumulate)


def gemm_fp8_block(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, a_block: Block, b_block: Block, *,
    power_of_two: bool, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """FP8 GEMM with compact fp32 block scales: codes a [rows, C], b [cols, C], blocks (1 or 128, 128) -> [rows, cols].

    `power_of_two`: all scales are. Otherwise every 128 of the contraction are promoted to fp32 with their scales.
    """
    _check_contraction(a, b)
    result = reference.gemm_fp8_block(a, b, a_scale_inv, b_scale_inv, a_block, b_block, power_of_two=power_of_two)
    return _finish(result, out_dtype, bias, accumulate)


def gemm_mxfp8(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_block: Block, b_block: Block, *, out_dtype: torch.dtype,
    bias: Tensor | None = None, accumulate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """MXFP8 GEMM with compact E8M0 bytes: codes a [rows, C], b [cols, C], blocks (1 or 32, 32) -> [rows, cols]."""
    _check_contraction(a, b)
    result = reference.gemm_mxfp8(a, b, a_scale, b_scale, a_block, b_block)
    return _finish(result, out_dtype, bias, accumulate)


def gemm_nvfp4(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_amax: Tensor, b_amax: Tensor, a_block: Block,
    b_block: Block, *, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """NVFP4 GEMM: packed codes a [rows, C/2], b [cols, C/2], compact E4M3 scales, tensor amaxes, blocks (1 or 16, 16)
    -> [rows, cols]; the amaxes are applied to the fp32 accumulator."""
    _check_contraction(a, b)
    result = reference.gemm_nvfp4(a, b, a_scale, b_scale, a_amax, b_amax, a_block, b_block)
    return _finish(result, out_dtype, bias, accumulate)
