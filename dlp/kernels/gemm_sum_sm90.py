"""GEMM kernel for Hopper (csrc/gemm_sum_sm90.cu): the sum of products of FP8 operands with one scale each, in one launch.

    D [rows, cols] = sum over i of scale_inv(A_i) scale_inv(B_i) A_i [rows, C_i] @ B_i [cols, C_i].T

The tensor core sums 128 products, and these sums are scaled and added in fp32 registers, term after term, as in
`reference.gemm_fp8_tensor_sum`. The bits of a row do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlp.kernels import gemms
from dlp.kernels.gemm_sm90 import CODES, is_aligned
from dlp.kernels.launches import launch
from dlp.kernels.registry import DEFAULT_OPTIONS, GemmLaunchOptions

TERMS = 4  # largest number of products (kSumTerms of csrc/kernels.h)
NO_TERM = (0,) * 7
Parts = Sequence[Tensor]  # codes and scale_inv of each term


def takes(a: Parts, b: Parts, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None,
          options: GemmLaunchOptions = DEFAULT_OPTIONS) -> bool:  # fmt: skip
    """Return whether this kernel computes the sum: up to four terms, E4M3 codes (A also E5M2), rows aligned to 16 bytes, a
    number of columns that is a multiple of 8, a result in bf16 or fp32. The kernel does not support a bias, an accumulator
    or `alpha`, and runs on all SMs."""
    if bias is not None or accumulate is not None or options.alpha != 1.0 or options.sms or len(a) > 2 * TERMS:
        return False
    if out_dtype not in (torch.bfloat16, torch.float32) or len(b[0]) % 8:
        return False
    known = a[0].dtype in CODES and all(each.dtype == CODES[0] for each in b[::2])
    same = all(each.dtype == a[0].dtype for each in a[::2])
    return known and same and all(map(is_aligned, (*a[::2], *b[::2]))) and all(each.numel() for each in a[::2])


def product(a: Parts, b: Parts, out_dtype: torch.dtype, options: GemmLaunchOptions = DEFAULT_OPTIONS) -> Tensor:
    """Return the sum, rounded once to `out_dtype`. `takes` must hold."""
    rows, cols = len(a[0]), len(b[0])
    out = gemms.room_for(a[0], (rows, cols), out_dtype, options)
    terms = [
        (*(each.data_ptr() for each in (left, right, a_scale, b_scale)), left.shape[1], left.stride(0), right.stride(0))
        for left, right, a_scale, b_scale in zip(a[::2], b[::2], a[1::2], b[1::2], strict=True)
    ]
    job = out.data_ptr(), len(terms), rows, cols, out.stride(0)
    four = (*terms, *[NO_TERM] * (TERMS - len(terms)))
    launch("gemm_fp8_sum", a[0], job, *four, a[0].dtype == torch.float8_e5m2, out.dtype == torch.float32)
    return out
