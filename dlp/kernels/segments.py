"""Canonical sums (`dlp.kernels.canonical`) of GEMMs by the tensor cores of GPUs.

Each segment is a GEMM of bf16 values with a fixed order of addition: for each length of a segment, an algorithm of cuBLASLt
that does not split the contraction is chosen once, for 4096 rows and columns, and used for all numbers of rows, columns and
segments. So the bits of an element do not depend on the other rows and columns. A kernel adds the segments by the tree.

The bits depend on the version of cuBLASLt and on the kind of GPU, and differ from the bits of `canonical.products`, which
computes canonical sums of operands whose values are not exact in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import gemms
from dlp.kernels.codes import sum_by_tree
from dlp.kernels.registry import NATIVE, device_of

ROOM = 2**26  # number of fp32 sums of segments in memory at a time, exceeded only if ROW_UNIT rows have more sums
ROW_UNIT = 8  # number of bf16 elements in 16 bytes, the alignment of rows for cuBLASLt


class Factored(NamedTuple):
    """Operand [rows, C]: values that are exact in bf16, and a scale, fp32 [] or [rows]; None: 1."""

    values: Tensor
    scale: Tensor | None = None


def takes(pairs: Sequence[tuple[Factored, Factored]], segments: int) -> bool:
    """Return whether `products` supports these operands. The answer is equal on all ranks that share the segments."""
    operands = [operand for pair in pairs for operand in pair]
    return device_of(operands[0].values) in NATIVE and all(
        operand.values.dtype == torch.bfloat16
        and operand.values.shape[1] % (segments * ROW_UNIT) == 0
        and (operand.scale is None or operand.scale.dim() == 0)
        for operand in operands
    )


def products(pairs: Sequence[tuple[Factored, Factored]], segments: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum over i of a_i [rows, C_i] @ b_i [cols, C_i].T, [rows, cols], rounded once to `dtype`; each C_i is cut into
    `segments` segments. The products of one segment are added in the order of i, then the segments by the tree."""
    rows, cols = (len(operand.values) for operand in pairs[0])
    if not rows * cols * sum(a.values.shape[1] for a, _ in pairs):
        return torch.zeros(rows, cols, dtype=dtype, device=pairs[0][0].values.device)
    ready = [(_aligned(a.values), _aligned(b.values), _alpha(a.scale, b.scale)) for a, b in pairs]
    left, right = ready[0][:2]
    height, device, totals = max(ROOM // (segments * len(right)) & -ROW_UNIT, ROW_UNIT), left.get_device(), []
    for part in range(0, len(left), height):
        here = slice(part, part + height)
        sums = torch.empty(segments, len(left[here]), len(right), device=left.device)
        for i, (a, b, alpha) in enumerate(ready):
            gemms.launch(gemms.segment_job(a[here], b, sums, adds=i > 0, alpha=alpha), device)
        totals.append(sum_by_tree(sums, dtype))
    total = totals[0] if len(totals) == 1 else torch.cat(totals)
    return total[:rows, :cols].contiguous()


def _aligned(values: Tensor) -> Tensor:
    """Return the matrix as contiguous rows at an aligned address, with zeros up to a multiple of ROW_UNIT rows, since cuBLASLt
    has no algorithm with a fixed order of addition for other numbers of rows."""
    short = -len(values) % ROW_UNIT
    values = F.pad(values, (0, 0, 0, short)) if short else values.contiguous()
    return values if values.data_ptr() % gemms.ALIGNMENT == 0 else values.clone()


def _alpha(*scales: Tensor | None) -> Tensor | None:
    """Return the product of the scales that are not None; None if both are None."""
    there = [scale for scale in scales if scale is not None]
    return there[0] * there[1] if len(there) == 2 else there[0] if there else None
