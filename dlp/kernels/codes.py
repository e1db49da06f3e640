"""Codes after their cast, and what ends a step: by the CUDA kernels where the device has them, else by the reference.

decode_fp8_block, decode_mxfp8, decode_nvfp4    to fp32, or to bf16, which is what has kernels
transpose_codes, transpose_e2m1                 of operands that may be transposed
nvfp4_alpha, rounded                            factors and results of GEMMs
swizzle_128x4                                   scales to the tiles that block-scaled GEMMs read
delayed_updates                                 of all delayed scales of a model
sum_in_order                                    the contributions of the ranks of a reduction
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.kernels import cuda, cuda_codes, loader, reference
from dlp.kernels.cuda_codes import DelayedJob
from dlp.kernels.reference.scales import AmaxAlgorithm, Block

ON_DEVICE = ("max", "most_recent")  # algorithms of delayed scaling that the kernel knows


def _has_kernel(*tensors: Tensor) -> bool:
    """Scales are read by their strides and need not be asked about."""
    return all(x.is_cuda and x.is_contiguous() for x in tensors) and not loader.missing()


def _decode_bf16(codes: Tensor, scale: Tensor, block: Block) -> Tensor:
    cols = codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    out = torch.empty(codes.shape[0], cols, dtype=torch.bfloat16, device=codes.device)
    cuda_codes.decode(codes, scale, block, out)
    return out


def decode_fp8_block(codes: Tensor, scale_inv: Tensor, block: Block, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes [rows, C], fp32 scale_inv [row blocks, C blocks] -> [rows, C], rounded once to `dtype`."""
    if dtype == torch.bfloat16 and block[1] % 16 == 0 and _has_kernel(codes):
        return _decode_bf16(codes, scale_inv, block)
    return reference.decode_fp8_block(codes, scale_inv, block).to(dtype)


def decode_mxfp8(codes: Tensor, scale: Tensor, block: Block, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes [rows, C], E8M0 bytes [row blocks, C blocks] -> [rows, C], rounded once to `dtype`; see the reference."""
    if dtype == torch.bfloat16 and block[1] % 16 == 0 and _has_kernel(codes):
        return _decode_bf16(codes, scale, block)
    return reference.decode_mxfp8(codes, scale, block).to(dtype)


def decode_nvfp4(
    packed: Tensor, scale: Tensor, block: Block, amax: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Packed codes [rows, C/2], E4M3 scales [row blocks, C/16] -> [rows, C], rounded once to `dtype`: with the tensor amax
    the values, without it e2m1 * scale, what a GEMM multiplies, exact in bf16."""
    if amax is None and dtype == torch.bfloat16 and _has_kernel(packed):
        return _decode_bf16(packed, scale, block)
    return reference.decode_nvfp4(packed, scale, block, amax).to(dtype)


def transpose_codes(codes: Tensor) -> Tensor:
    """FP8 codes [rows, C] -> contiguous [C, rows]."""
    if not _has_kernel(codes):
        return codes.t().contiguous()
    out = torch.empty(codes.shape[::-1], dtype=codes.dtype, device=codes.device)
    cuda_codes.transpose(codes, out)
    return out


def transpose_e2m1(packed: Tensor) -> Tensor:
    """Packed codes [rows, C/2] of a matrix [rows, C], rows even -> [C, rows/2], of its transpose."""
    if not _has_kernel(packed):
        return reference.transpose_e2m1(packed)
    out = torch.empty(2 * packed.shape[1], packed.shape[0] // 2, dtype=torch.uint8, device=packed.device)
    cuda_codes.transpose(packed, out)
    return out


def transposed(matrix: Tensor) -> Tensor:
    """fp32 [rows, C] -> contiguous [C, rows]; a scale of each block, say."""
    if not _has_kernel(matrix) or not matrix.numel():
        return matrix.t().contiguous()
    out = matrix.new_empty(matrix.shape[::-1])
    cuda_codes.transpose_words(matrix, out)
    return out


def nvfp4_alpha(a_amax: Tensor, b_amax: Tensor) -> Tensor:
    """fp32 []: what the sums of a GEMM of operands with these amaxes are multiplied by."""
    if not _has_kernel(a_amax, b_amax):
        return reference.nvfp4_alpha(a_amax, b_amax)
    out = torch.empty_like(a_amax)
    cuda_codes.nvfp4_alpha(a_amax, b_amax, out)
    return out


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to `dtype`; x itself where it has that."""
    if (x.dtype, dtype) != (torch.float32, torch.bfloat16) or not _has_kernel(x) or x.data_ptr() % 16:
        return x.to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    cuda_codes.round_to_bf16(x, out)
    return out


def swizzle_128x4(scales: Tensor, lines: int | None = None, lines_each: int = 1) -> Tensor:
    """Scale bytes [row blocks, C blocks] of `lines` lines, `lines_each` of which share one -> uint8 tiles of 128x4, flat;
    see the reference."""
    scales = scales.view(torch.uint8)
    lines = len(scales) * lines_each if lines is None else lines
    out = torch.empty(cuda_codes.swizzled_bytes(lines, scales.shape[1]), dtype=torch.uint8, device=scales.device)
    if not _has_kernel(out):
        return reference.swizzle_128x4(scales, lines, lines_each)
    cuda_codes.swizzle(scales, lines, lines_each, out)
    return out


class DelayedSlots(NamedTuple):
    """Slots of one history length and algorithm: fp32 history [L, n], the others [n]; see `reference.delayed_update`."""

    history: Tensor
    scale: Tensor
    reduced: Tensor
    target: Tensor
    staging: Tensor
    algorithm: str | AmaxAlgorithm


def delayed_updates(slots: Sequence[DelayedSlots]) -> Callable[[], None]:
    """Prepares `reference.delayed_update` of all slots, in place, after which staging starts again at 0: one launch for
    those whose algorithm the kernel knows."""
    jobs, updates = [], list[Callable[[], None]]()
    for kind in slots:
        if kind.algorithm in ON_DEVICE and _has_kernel(kind.history):
            jobs.append(DelayedJob(*kind[:5], most_recent=kind.algorithm == "most_recent"))
        else:
            updates.append(partial(_update_by_reference, kind))
    if jobs:
        updates.append(cuda_codes.delayed_update_batch(jobs))

    def update() -> None:
        for part in updates:
            part()

    return update


def _update_by_reference(kind: DelayedSlots) -> None:
    made = reference.delayed_update(kind.history, kind.scale, kind.reduced, kind.target, kind.algorithm)
    for kept, new in zip(kind[:2], made, strict=True):
        kept.copy_(new)
    kind.staging.zero_()


def sum_in_order(contributions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[R, ...] -> [...]: the fp32 sum of contributions 0, 1, ..., rounded once to `dtype`, by default theirs."""
    kept = dtype in (None, contributions.dtype)
    if not kept or contributions.dtype not in cuda.INPUTS or not _has_kernel(contributions):
        return reference.sum_in_order(contributions, dtype)
    out = torch.empty(contributions.shape[1:], dtype=contributions.dtype, device=contributions.device)
    cuda_codes.sum_in_order(contributions, out)
    return out
