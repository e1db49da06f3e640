"""Layouts of scales for GEMM kernels, computed from compact scales right before the GEMM.

A compact tensor of scales [row blocks, C blocks] can be sliced, gathered and transposed, unlike these layouts. Padding is zero
and is never used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pad_scales(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return scales [R, C], bytes or fp32, zero-padded to multiples of `rows` and `columns`."""
    return F.pad(scales, (0, -scales.shape[1] % columns, 0, -scales.shape[0] % rows))


def block_1d_layout(scale_inv: Tensor) -> Tensor:
    """Return 1x128 FP8 scales [rows, C blocks] as [C blocks, rows padded to a multiple of 4] (cuBLASLt's VEC128_32F)."""
    return pad_scales(scale_inv.t(), 1, 4).contiguous()


def block_2d_layout(scale_inv: Tensor) -> Tensor:
    """Return 128x128 FP8 scales [row tiles, C tiles] as [row tiles, C tiles padded to a multiple of 4] (cuBLASLt's
    BLK128x128_32F)."""
    return pad_scales(scale_inv, 1, 4).contiguous()


def swizzle_128x4(scales: Tensor, lines: int | None = None, lines_each: int = 1) -> Tensor:
    """Return MX or NVFP4 scale bytes [row blocks, C blocks] as the flat tensor of 128x4 tiles that block-scaled GEMMs read.

    lines        number of lines (rows) of the operand; None: number of rows of `scales` times `lines_each`
    lines_each   number of lines that share a scale

    The scale of line r and block c is at ((r/128) * tiles across + c/4) * 512 + (r%32) * 16 + ((r%128)/32) * 4 + c%4. (cuBLAS
    documentation, "scaling factors layouts".)
    """
    each = scales.repeat_interleave(lines_each, 0)[:lines] if lines_each > 1 else scales[:lines]
    padded = pad_scales(each, 128, 4)
    down, across = padded.shape[0] // 128, padded.shape[1] // 4
    return padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_128x4(tiles: Tensor, lines: int, blocks: int) -> Tensor:
    """Return the scales [lines, blocks], one scale for every line, of a flat tensor of 128x4 tiles: the inverse of
    `swizzle_128x4`."""
    across = -(-blocks // 4)
    return tiles.view(-1, across, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(-1, 4 * across)[:lines, :blocks]


def mx_from_block_scales(scale_inv: Tensor, contraction: int) -> Tensor:
    """Return power-of-two fp32 scales of 128 elements [row blocks, ceil(C/128)] as E8M0 bytes of 32 elements [row blocks,
    ceil(C/32)].

    The byte is the exponent field of the fp32 scale. The denormal 2^-127 has the field 0, which E8M0 also reads as 2^-127.
    """
    byte = (scale_inv.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return byte.repeat_interleave(4, 1)[:, : -(-contraction // 32)].contiguous()
