"""Our own GEMM on Hopper (csrc/gemm_sm90.cu): FP8 codes, A scaled in blocks of 1x128, B in tiles of 128x128.

It runs where it was measured to be faster than cuBLASLt's, in large GEMMs (bench/results/gemm.md); `takes` is that rule, and
what the kernel asks of its operands. Small ones leave multiprocessors idle: its tiles come in pairs, 256 x 192 together. Rows
of A may arrive from other ranks while it runs (`while_arriving`), and rows of the result go straight to them (`sending`).
"""

from __future__ import annotations

import functools
from functools import partial

import torch
from torch import Tensor

from dlp.kernels import gemms
from dlp.kernels.gemms import ALIGNMENT, Scales
from dlp.kernels.launches import launch
from dlp.kernels.table import DEFAULT_OPTIONS, Arriving, GemmLaunchOptions, Sending, Sends, WhileArriving

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
    laid = _aligned_scales(scales)
    out, job = _job(a, b, out_dtype, laid, bias, accumulate, options)
    launch("gemm_fp8_blocks", a, job, a.dtype == torch.float8_e5m2, out.dtype == torch.float32)
    return out


def while_arriving(a: Tensor, b: Tensor, rows: int, out_dtype: torch.dtype, scales: tuple[Tensor, Tensor], *,
                   bias: Tensor | None = None, accumulate: Tensor | None = None,
                   options: GemmLaunchOptions = DEFAULT_OPTIONS) -> WhileArriving | None:  # fmt: skip
    """What gives the bits of `product` of all rows while those of other ranks arrive, `rows` of each rank, one after the other
    in A; None where these are no whole pairs of tiles, or lines of scales are not aligned. `scales`: of A compact, [rows of
    all, blocks], of B as `product` reads them."""
    if rows == 0 or rows % PAIR[0] or not _is_aligned(scales[0]):
        return None
    return partial(_product_arriving, a, b, out_dtype, scales, bias, accumulate, options)


def _product_arriving(a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: tuple[Tensor, Tensor], bias: Tensor | None,
                      accumulate: Tensor | None, options: GemmLaunchOptions, arriving: Arriving) -> Tensor:  # fmt: skip
    out, job = _job(a, b, out_dtype, scales, bias, accumulate, options)
    e5m2, wide = a.dtype == torch.float8_e5m2, out.dtype == torch.float32
    launch("gemm_fp8_arriving", a, job, arriving.rows, arriving.waiting, e5m2, wide)
    return out


def sending(a: Tensor, b: Tensor, rows: int, out_dtype: torch.dtype, scales: Scales, *, bias: Tensor | None = None,
            accumulate: Tensor | None = None, options: GemmLaunchOptions = DEFAULT_OPTIONS) -> Sends | None:  # fmt: skip
    """What stores `product`, rounded to bf16, `rows` for each rank, where it is told to; what it is added to stays as it is.
    None where these are no whole pairs of tiles, and where the kernel would not read the bias, or `accumulate`."""
    if rows == 0 or rows % PAIR[0] or options.out is not None:
        return None
    if not (bias is None or bias.dtype == torch.bfloat16) or not (accumulate is None or accumulate.is_contiguous()):
        return None
    return partial(_product_sent, a, b, scales, bias, accumulate)


def _product_sent(a: Tensor, b: Tensor, scales: Scales, bias: Tensor | None, accumulate: Tensor | None,
                  to: Sending) -> None:  # fmt: skip
    laid, added = _aligned_scales(scales), 0 if accumulate is None else accumulate.data_ptr()
    job = _words(a, b, (added, b.shape[0]), laid, bias, accumulate is not None)
    launch("gemm_fp8_sending", a, job, to.slots, to.rows, a.dtype == torch.float8_e5m2)


def _aligned_scales(scales: Scales) -> tuple[Tensor, Tensor]:
    return scales[0] if scales[0].data_ptr() % ALIGNMENT == 0 else scales[0].clone(), scales[1]


def _job(a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: tuple[Tensor, Tensor], bias: Tensor | None,
         accumulate: Tensor | None, options: GemmLaunchOptions) -> tuple[Tensor, tuple[int, ...]]:  # fmt: skip
    """Where the result is written, and the words of `BlockGemmJob`."""
    out = gemms.room_for(a, (len(a), len(b)), out_dtype, options) if accumulate is None else accumulate
    return out, _words(a, b, (out.data_ptr(), out.stride(0)), scales, bias, accumulate is not None)


def _words(a: Tensor, b: Tensor, out: tuple[int, int], scales: tuple[Tensor, Tensor], bias: Tensor | None,
           adds: bool) -> tuple[int, ...]:  # fmt: skip
    """Of `BlockGemmJob`. `out`: an address and a stride."""
    (rows, contraction), cols = a.shape, b.shape[0]
    a_scale, b_scale = scales[0], scales[1] if scales[1].data_ptr() % ALIGNMENT == 0 else scales[1].clone()
    return (
        a.data_ptr(), b.data_ptr(), out[0], a_scale.data_ptr(), b_scale.data_ptr(), 0 if bias is None else bias.data_ptr(),
        rows, cols, contraction, a.stride(0), b.stride(0), out[1], rows + -rows % 4, a_scale.stride(0), -(-cols // 128),
        b_scale.stride(0), int(adds),
    )  # fmt: skip


def _is_aligned(x: Tensor) -> bool:
    """Whether rows are adjacent elements, and begin at multiples of 16 bytes."""
    stride, step = x.stride()
    return step == 1 and stride >= x.shape[1] and (stride * x.itemsize | x.data_ptr()) % ALIGNMENT == 0


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
