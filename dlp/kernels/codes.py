"""Operations on codes, scales and results of GEMMs: CUDA kernels, or the plain-torch reference.

decode_fp8_block, decode_mxfp8, decode_nvfp4    decode to fp32 or bf16; the kernels decode only to bf16
transpose_codes, transpose_e2m1                 transpose the codes of an operand
transposed                                      transpose a matrix of fp32, such as scales of blocks
nvfp4_alpha                                     compute the factor by which an NVFP4 GEMM multiplies its sums
rounded                                         round the result of a GEMM
swizzle_128x4                                   rearrange scales into the tiles that block-scaled GEMMs read
delayed_updates                                 update all delayed scales of a model
sum_in_order, sum_by_tree                       sum the contributions of ranks to a reduction
checksums                                       sum the bits of tensors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlp.kernels import cuda, cuda_codes, reference
from dlp.kernels.cuda_codes import DelayedJob
from dlp.kernels.reference.fp8 import AmaxAlgorithm, Block
from dlp.kernels.registry import REFERENCE, KernelEntry, choose, operation, register

ON_DEVICE = ("max", "most_recent")  # algorithms of delayed scaling that the kernel implements


def is_contiguous(x: Tensor, *_: Any) -> bool:
    """Return whether a matrix of codes is contiguous, which kernels for codes require."""
    return x.is_contiguous()


def takes_decode(codes: Tensor, scale: Tensor, block: Block, dtype: torch.dtype = torch.float32) -> bool:
    return dtype == torch.bfloat16 and block[1] % 16 == 0 and codes.is_contiguous()


def takes_decode_nvfp4(
    packed: Tensor, scale: Tensor, block: Block, amax: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> bool:
    return dtype == torch.bfloat16 and packed.is_contiguous()


def decode_nvfp4_kernel(
    packed: Tensor, scale: Tensor, block: Block, amax: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return decode_to_bf16_kernel(packed, scale, block, dtype, amax)


def decode_to_bf16_kernel(
    codes: Tensor, scale: Tensor, block: Block, dtype: torch.dtype = torch.bfloat16, amax: Tensor | None = None
) -> Tensor:
    cols = codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    out = torch.empty(codes.shape[0], cols, dtype=torch.bfloat16, device=codes.device)
    cuda_codes.decode(codes, scale, block, out, amax)
    return out


@operation
def decode_fp8_block(codes: Tensor, scale_inv: Tensor, block: Block, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode codes [rows, C] with fp32 scale_inv [row blocks, C blocks] -> values [rows, C], rounded once to `dtype`."""
    return reference.decode_fp8_block(codes, scale_inv, block).to(dtype)


@operation
def decode_mxfp8(codes: Tensor, scale: Tensor, block: Block, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode codes [rows, C] with E8M0 bytes [row blocks, C blocks] -> values [rows, C], rounded once to `dtype`."""
    return reference.decode_mxfp8(codes, scale, block).to(dtype)


@operation
def decode_nvfp4(
    packed: Tensor, scale: Tensor, block: Block, amax: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Decode packed codes [rows, C/2] with E4M3 scales [row blocks, C/16] -> values [rows, C], rounded once to `dtype`.

    Without `amax` the result is e2m1 * scale, which is exact in bf16; a GEMM multiplies these values and applies the amaxes to
    the sums.
    """
    return reference.decode_nvfp4(packed, scale, block, amax).to(dtype)


@operation
def transpose_codes(codes: Tensor) -> Tensor:
    """Return the contiguous transpose [C, rows] of FP8 codes [rows, C]."""
    return codes.t().contiguous()


def transpose_codes_kernel(codes: Tensor) -> Tensor:
    out = torch.empty(codes.shape[::-1], dtype=codes.dtype, device=codes.device)
    cuda_codes.transpose(codes, out)
    return out


transpose_e2m1 = operation(reference.transpose_e2m1)


def transpose_e2m1_kernel(packed: Tensor) -> Tensor:
    out = torch.empty(2 * packed.shape[1], packed.shape[0] // 2, dtype=torch.uint8, device=packed.device)
    cuda_codes.transpose(packed, out)
    return out


@operation
def transposed(matrix: Tensor) -> Tensor:
    """Return the contiguous transpose [C, rows] of a matrix fp32 [rows, C], such as the scales of blocks."""
    return matrix.t().contiguous()


def takes_transposed(matrix: Tensor) -> bool:
    return matrix.is_contiguous() and matrix.numel() > 0


def transposed_kernel(matrix: Tensor) -> Tensor:
    out = matrix.new_empty(matrix.shape[::-1])
    cuda_codes.transpose_words(matrix, out)
    return out


nvfp4_alpha = operation(reference.nvfp4_alpha)


def nvfp4_alpha_kernel(a_amax: Tensor, b_amax: Tensor) -> Tensor:
    out = torch.empty_like(a_amax)
    cuda_codes.nvfp4_alpha(a_amax, b_amax, out)
    return out


@operation
def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x rounded to `dtype`, or x itself if x has that dtype."""
    return x.to(dtype)


def takes_rounded(x: Tensor, dtype: torch.dtype) -> bool:
    return (x.dtype, dtype) == (torch.float32, torch.bfloat16) and x.is_contiguous() and x.data_ptr() % 16 == 0


def rounded_kernel(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    cuda_codes.round_to_bf16(x, out)
    return out


@operation
def swizzle_128x4(scales: Tensor, lines: int | None = None, lines_each: int = 1) -> Tensor:
    """Rearrange scale bytes [row blocks, C blocks] into flat uint8 tiles of 128x4 (`reference.swizzle_128x4`).

    lines        number of rows of the codes; None: number of rows of `scales` times `lines_each`
    lines_each   number of rows of the codes that share a scale
    """
    lines = len(scales) * lines_each if lines is None else lines
    return reference.swizzle_128x4(scales.view(torch.uint8), lines, lines_each)


def swizzle_128x4_kernel(scales: Tensor, lines: int | None = None, lines_each: int = 1) -> Tensor:
    scales = scales.view(torch.uint8)
    lines = len(scales) * lines_each if lines is None else lines
    out = torch.empty(cuda_codes.swizzled_bytes(lines, scales.shape[1]), dtype=torch.uint8, device=scales.device)
    cuda_codes.swizzle(scales, lines, lines_each, out)
    return out


class DelayedSlots(NamedTuple):
    """Delayed scales with the same history length and algorithm: history fp32 [L, n], other tensors [n]
    (`reference.delayed_update`)."""

    history: Tensor
    scale: Tensor
    reduced: Tensor
    target: Tensor
    staging: Tensor
    algorithm: str | AmaxAlgorithm


def delayed_updates(slots: Sequence[DelayedSlots]) -> Callable[[], None]:
    """Return a function that updates all slots in place (`reference.delayed_update`) and sets staging to 0. Slots whose
    algorithm the kernel implements share one launch."""
    by_entry: dict[KernelEntry, list[DelayedSlots]] = {}
    for each in slots:
        by_entry.setdefault(choose("delayed_update", each.history, each.algorithm), []).append(each)
    updates = [entry.prepare(together) for entry, together in by_entry.items() if entry.prepare]

    def update() -> None:
        for part in updates:
            part()

    return update


def _update_by_reference(slots: Sequence[DelayedSlots]) -> None:
    for each in slots:
        made = reference.delayed_update(each.history, each.scale, each.reduced, each.target, each.algorithm)
        for old, new in zip((each.history, each.scale), made, strict=True):
            old.copy_(new)
        each.staging.zero_()


def prepare_update(slots: Sequence[DelayedSlots]) -> Callable[[], None]:
    return cuda_codes.delayed_update_batch(
        [DelayedJob(*each[:5], most_recent=each.algorithm == "most_recent") for each in slots]
    )


def delayed_update_kernel(slots: Sequence[DelayedSlots]) -> None:
    prepare_update(slots)()


def takes_delayed_update(history: Tensor, algorithm: str | AmaxAlgorithm) -> bool:
    return algorithm in ON_DEVICE and history.is_contiguous()


register(KernelEntry(operation="delayed_update", name=REFERENCE, run=_update_by_reference, captured=True,
                     prepare=lambda slots: partial(_update_by_reference, slots)))  # fmt: skip


sum_by_tree = operation(reference.sum_by_tree)


def takes_sum_by_tree(parts: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    return (
        len(parts) in (1, 2, 4, 8) and parts.is_contiguous() and parts.dtype == torch.float32 and dtype in cuda.INPUTS
    )


def sum_by_tree_kernel(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    cuda_codes.sum_by_tree(parts, out)
    return out


sum_in_order = operation(reference.sum_in_order)


def takes_sum_in_order(
    contributions: Tensor, dtype: torch.dtype | None = None, own: tuple[int, Tensor] | None = None, divisor: int = 1,
    out: Tensor | None = None,
) -> bool:  # fmt: skip
    lies = (
        contributions.is_contiguous()
        and (own is None or own[1].is_contiguous())
        and (out is None or out.is_contiguous())
    )
    return lies and contributions.dtype in cuda.INPUTS and (dtype is None or dtype in cuda.INPUTS)


def sum_in_order_kernel(
    contributions: Tensor, dtype: torch.dtype | None = None, own: tuple[int, Tensor] | None = None, divisor: int = 1,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if out is None:
        out = torch.empty(contributions.shape[1:], dtype=dtype or contributions.dtype, device=contributions.device)
    cuda_codes.sum_in_order(contributions, out, own, divisor)
    return out


checksums = operation(reference.checksums)


def takes_checksums(*tensors: Tensor) -> bool:
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)  # other classes may have no memory


def checksums_kernel(*tensors: Tensor) -> Tensor:
    out = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    cuda_codes.add_checksums([tensor.detach().contiguous() for tensor in tensors], out)
    return out
