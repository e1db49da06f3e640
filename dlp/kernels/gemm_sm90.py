"""Our own GEMM on Hopper (csrc/gemm_sm90.cu): FP8 codes, A scaled in blocks of 1x128, B in tiles of 128x128.

It runs where it was measured to be faster than cuBLASLt's, in large GEMMs (bench/results/gemm.md); `takes` is that rule, and
what the kernel asks of its operands. Small ones leave multiprocessors idle: its tiles come in pairs, 256 x 192 together.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dlp.kernels import gemms
from dlp.kernels.gemms import ALIGNMENT, Scales
from dlp.kernels.launches import launch
from dlp.kernels.registry import DEFAULT_OPTIONS, GemmLaunchOptions

PAIR = (256, 192)  # rows and columns that a pair of multiprocessors computes at once
FILLED = 0.9  # share of all tiles of all waves that is result, at the least
CONTRACTION = 4096  # at the least
WORK = 65536  # of a pair of multiprocessors, at the least: elements of the contraction in all of its tiles
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_large(rows: int, cols: int, contraction: int, sms: int) -> bool:
    """Whether a GEMM of this size is faster here, on a device of so many multiprocessors."""
    at_once = sms // 2
    pairs = -(-rows // PAIR[0]) * -(-cols // PAIR[1])
    filled = rows * cols / (-(-pairs // at_once) * at_once * PAIR[0] * PAIR[1])
    return contraction >= CONTRACTION and pairs * contraction >= WORK * at_once and filled >= FILLED


def takes(a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None,
          options: GemmLaunchOptions = DEFAULT_OPTIONS) -> bool:  # fmt: skip
    """Whether codes a [rows, C], b [cols, C] are multiplied here on Hopper. Asked for fewer multiprocessors (`options.sms`), or
    to scale its sums, it is cuBLASLt that does."""
    rows, contraction = a.shape
    if (
        options.sms or options.alpha != 1.0 or contraction < CONTRACTION
    ):  # most are refused here, without asking the device
        return False
    large = is_large(rows, b.shape[0], contraction, _multiprocessors(a.get_device()))
    return large and can_take(a, b, out_dtype, bias=bias, accumulate=accumulate)


def can_take(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, bias: Tensor | None = None,
             accumulate: Tensor | None = None) -> bool:  # fmt: skip
    """Whether the kernel computes this GEMM: codes E4M3, A's also E5M2, lines aligned to 16 bytes and columns a multiple of 8;
    a result in bf16 or fp32, a bias in its dtype, an accumulator in fp32."""
    if a.dtype not in CODES or b.dtype != CODES[0] or b.shape[0] % 8 or not all(map(_is_aligned, (a, b))):
        return False
    if out_dtype not in (torch.bfloat16, torch.float32):
        return False
    if accumulate is not None and not (accumulate.dtype == torch.float32 and _is_aligned(accumulate)):
        return False
    result = out_dtype if accumulate is None else torch.float32
    return bias is None or (
        bias.dtype == result and bias.is_contiguous() and bias.device == a.device and bias.data_ptr() % ALIGNMENT == 0
    )


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: Scales, *, bias: Tensor | None = None,
            accumulate: Tensor | None = None, options: GemmLaunchOptions = DEFAULT_OPTIONS) -> Tensor:  # fmt: skip
    """A [rows, C] @ B [cols, C].T, each 128 of C summed in the tensor core, scaled by fl(sa * sb) and added up in fp32, plus
    bias [cols] -> [rows, cols], rounded once to `out_dtype`; or added to `accumulate`, which is returned. For what
    `can_take` allows, of any size but none."""
    out = gemms.room_for(a, (len(a), len(b)), out_dtype, options) if accumulate is None else accumulate
    a_scale, b_scale = _aligned(scales[0]), _aligned(scales[1])
    job = _job(a, b, out, a_scale, b_scale, bias, accumulate is not None)
    launch("gemm_fp8_blocks", a, job, a.dtype == torch.float8_e5m2, out.dtype == torch.float32)
    return out


def _aligned(scale: Tensor) -> Tensor:
    """The scales at an address that the kernel can read; a copy if need be."""
    return scale if scale.data_ptr() % ALIGNMENT == 0 else scale.clone()


def _job(a: Tensor, b: Tensor, out: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None,
         adds: bool) -> tuple[int, ...]:  # fmt: skip
    """Pack the kernel arguments (struct BlockGemmJob)."""
    (rows, contraction), cols = a.shape, b.shape[0]
    return (
        a.data_ptr(), b.data_ptr(), out.data_ptr(), a_scale.data_ptr(), b_scale.data_ptr(),
        0 if bias is None else bias.data_ptr(), rows, cols, contraction, a.stride(0), b.stride(0), out.stride(0),
        rows + -rows % 4, a_scale.stride(0), -(-cols // 128), b_scale.stride(0), int(adds),
    )  # fmt: skip


def _is_aligned(x: Tensor) -> bool:
    """Whether rows are adjacent elements, and begin at multiples of 16 bytes."""
    stride, step = x.stride()
    return step == 1 and stride >= x.shape[1] and (stride * x.itemsize | x.data_ptr()) % ALIGNMENT == 0


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
