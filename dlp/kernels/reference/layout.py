"""Scale layouts that GEMM kernels read, made from compact scales right before the GEMM.

A compact scale tensor is [row blocks, C blocks]: it can be sliced, gathered and transposed; these layouts cannot.
Padding is zero and its content is never used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pad_scales(scales: Tensor, rows: int, columns: int) -> Tensor:
    """scales [R, C] of one byte or fp32 each -> both dimensions filled up to multiples of `rows` and `columns`."""
    return F.pad(scales, (0, -scales.shape[1] % columns, 0, -scales.shape[0] % rows))


def block_1d_layout(scale_inv: Tensor) -> Tensor:
    """1x128 FP8 scales [rows, C blocks] -> [C blocks, rows filled up to a multiple of 4], as VEC128_32F wants them."""
    return pad_scales(scale_inv.t(), 1, 4).contiguous()


def block_2d_layout(scale_inv: Tensor) -> Tensor:
    """128x128 FP8 scales [row tiles, C tiles] -> [row tiles, C tiles filled up to a multiple of 4] (BLK128x128_32F)."""
    return pad_scales(scale_inv, 1, 4).contiguous()


def swizzle_128x4(scales: Tensor, lines: int | None = None, lines_each: int = 1) -> Tensor:
    """MX or NVFP4 scale bytes [row blocks, C blocks] -> the flat tensor of 128x4 tiles that block-scaled GEMMs read, of an
    operand of so many lines (by default as many as there are scales), of which `lines_each` share a scale.

    The scale of line r and block c lies at ((r/128) * tiles across + c/4) * 512 + (r%32) * 16 + ((r%128)/32) * 4 + c%4.
    (cuBLAS documentation, "scaling factors layouts".)
    """
    each = scales.repeat_interleave(lines_each, 0)[:lines] if lines_each > 1 else scales[:lines]
    padded = pad_scales(each, 128, 4)
    down, across = padded.shape[0] // 128, padded.shape[1] // 4
    return padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_128x4(tiles: Tensor, lines: int, blocks: int) -> Tensor:
    """The inverse: the flat tensor of 128x4 tiles -> [lines, blocks], a scale for every line."""
    across = -(-blocks // 4)
    return tiles.view(-1, across, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(-1, 4 * across)[:lines, :blocks]


def mx_from_block_scales(scale_inv: Tensor, contraction: int) -> Tensor:
    """Power-of-two fp32 scales of 128 elements [row blocks, ceil(C/128)] -> E8M0 bytes of 32 [row blocks, ceil(C/32)].

    The byte is the exponent field: 2^-127, a denormal, has the field 0, which E8M0 reads as 2^-127.
    """
    byte = (scale_inv.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return byte.repeat_interleave(4, 1)[:, : -(-contraction // 32)].contiguous()
