"""GEMM kernel for Hopper (csrc/gemm_sm90.cu): FP8 codes, A scaled in blocks of 1x128, B in tiles of 128x128.

The kernel runs for large GEMMs, where measurements show an advantage over cuBLASLt (bench/results/gemm.md). `takes` is this
rule together with the requirements of the kernel. Small GEMMs leave SMs idle, because a pair of SMs computes 256 x 192
elements.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dlp.kernels import gemms
from dlp.kernels.gemms import ALIGNMENT, Scales
from dlp.kernels.launches import launch
from dlp.kernels.registry import DEFAULT_OPTIONS, GemmLaunchOptions

PAIR = (256, 192)  # rows and columns that a pair of SMs computes at a time
FILLED = 0.9  # minimum of (elements of the result) / (elements that all waves can compute)
CONTRACTION = 4096  # minimum C of a GEMM that counts as large
WORK = 65536  # minimum work per pair of SMs: C times the number of output tiles per pair
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_large(rows: int, cols: int, contraction: int, sms: int) -> bool:
    """Return whether a GEMM of this size is faster by this kernel, on a device with this number of SMs."""
    at_once = sms // 2
    pairs = -(-rows // PAIR[0]) * -(-cols // PAIR[1])
    filled = rows * cols / (-(-pairs // at_once) * at_once * PAIR[0] * PAIR[1])
    return contraction >= CONTRACTION and pairs * contraction >= WORK * at_once and filled >= FILLED


def takes(a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None,
          options: GemmLaunchOptions = DEFAULT_OPTIONS) -> bool:  # fmt: skip
    """Return whether this kernel multiplies codes a [rows, C] and b [cols, C] on Hopper. False for GEMMs on fewer SMs
    (`options.sms`) and with `options.alpha`, which cuBLASLt runs."""
    rows, contraction = a.shape
    if options.sms or options.alpha != 1.0 or contraction < CONTRACTION:
        return False  # most GEMMs return here, before the device properties are read
    large = is_large(rows, b.shape[0], contraction, _multiprocessors(a.get_device()))
    return large and can_take(a, b, out_dtype, bias=bias, accumulate=accumulate)


def can_take(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, bias: Tensor | None = None,
             accumulate: Tensor | None = None) -> bool:  # fmt: skip
    """Return whether the kernel supports this GEMM: E4M3 codes (A also E5M2), rows aligned to 16 bytes, a number of columns
    that is a multiple of 8, a result in bf16 or fp32, a bias in the dtype of the result, an accumulator in fp32."""
    if a.dtype not in CODES or b.dtype != CODES[0] or b.shape[0] % 8 or not all(map(is_aligned, (a, b))):
        return False
    if out_dtype not in (torch.bfloat16, torch.float32):
        return False
    if accumulate is not None and not (accumulate.dtype == torch.float32 and is_aligned(accumulate)):
        return False
    result = out_dtype if accumulate is None else torch.float32
    return bias is None or (
        bias.dtype == result and bias.is_contiguous() and bias.device == a.device and bias.data_ptr() % ALIGNMENT == 0
    )


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: Scales, *, bias: Tensor | None = None,
            accumulate: Tensor | None = None, options: GemmLaunchOptions = DEFAULT_OPTIONS) -> Tensor:  # fmt: skip
    """Multiply A [rows, C] by B [cols, C] -> [rows, cols]: sums of 128 products in the tensor core are scaled by fl(sa * sb)
    and added in fp32, plus bias [cols], and rounded once to `out_dtype`; or add the product to `accumulate` and return
    `accumulate`.

    `can_take` must hold, and no size may be 0.
    """
    out = gemms.room_for(a, (len(a), len(b)), out_dtype, options) if accumulate is None else accumulate
    a_scale, b_scale = gemms.aligned_scale(scales[0]), gemms.aligned_scale(scales[1])
    job = _job(a, b, out, a_scale, b_scale, bias, accumulate is not None)
    launch("gemm_fp8_blocks", a, job, a.dtype == torch.float8_e5m2, out.dtype == torch.float32)
    return out


def _job(a: Tensor, b: Tensor, out: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None,
         adds: bool) -> tuple[int, ...]:  # fmt: skip
    """Pack the kernel arguments (struct BlockGemmJob)."""
    (rows, contraction), cols = a.shape, b.shape[0]
    return (
        a.data_ptr(), b.data_ptr(), out.data_ptr(), a_scale.data_ptr(), b_scale.data_ptr(),
        0 if bias is None else bias.data_ptr(), rows, cols, contraction, a.stride(0), b.stride(0), out.stride(0),
        rows + -rows % 4, a_scale.stride(0), -(-cols // 128), b_scale.stride(0), int(adds),
    )  # fmt: skip


def is_aligned(x: Tensor) -> bool:
    """Return whether rows are contiguous and aligned to 16 bytes."""
    stride, step = x.stride()
    return step == 1 and stride >= x.shape[1] and (stride * x.itemsize | x.data_ptr()) % ALIGNMENT == 0


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
