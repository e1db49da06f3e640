"""Grouped GEMM of rowwise FP8: groups of rows of A, each times the matrix B of the group, in one launch.

    D [rows, cols]   rows of group i = A [rows of i, C] @ B[i] [cols, C].T * scale_inv of the rows of A and of B[i]

torch's kernel (CUTLASS, for sm_90 alone) reads the ends of the groups on the device and returns bf16. C and cols must be
multiples of 16; a group may have any number of rows, including 0. This operation does not serve wgrad, whose groups lie along
the contraction, because there the kernel needs groups of a multiple of 16 rows, and cannot return fp32 or add to a main
gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import reference
from dlp.kernels.registry import REFERENCE, device_of, entries, operation

MULTIPLE = 16  # C and cols must be multiples of this number: 16 FP8 elements are 16 bytes, the alignment of TMA
MOST_GROUPS = 1023  # largest number of groups: one thread block prepares all groups, with one thread per group

grouped_fp8_rowwise = operation(reference.grouped_fp8_rowwise)


def grouped_fp8_rowwise_kernel(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, ends: Tensor, fast_accumulation: bool = False
) -> Tensor:
    rowwise, plain = F.ScalingType.RowWise, F.SwizzleType.NO_SWIZZLE
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a, b.transpose(1, 2), a_scale_inv, rowwise, b_scale_inv, rowwise, plain, plain, offs=ends,
        output_dtype=torch.bfloat16, use_fast_accum=fast_accumulation,
    )  # fmt: skip


def takes_grouped(a: Tensor, b: Tensor, *more: object) -> bool:
    return a.dtype == b.dtype == torch.float8_e4m3fn and not _misfit(len(a), *b.shape)


def why_not_grouped(x: Tensor, groups: int, cols: int, contraction: int) -> str:
    """Return the reason why no kernel multiplies rows of x by matrices [groups, cols, contraction] of E4M3 in one launch, or ""
    if a kernel does."""
    if entries("grouped_fp8_rowwise", device_of(x))[0].name == REFERENCE:
        return "this device has no grouped GEMM of rowwise FP8"
    return _misfit(len(x), groups, cols, contraction)


def _misfit(rows: int, groups: int, cols: int, contraction: int) -> str:
    if cols % MULTIPLE or contraction % MULTIPLE:
        return f"the grouped GEMM needs features that are multiples of {MULTIPLE}; got {cols} x {contraction}"
    if groups > MOST_GROUPS:
        return f"the grouped GEMM takes up to {MOST_GROUPS} experts; got {groups}"
    return "" if rows else "x has no rows"
