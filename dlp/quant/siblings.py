"""Operands of siblings as one operand, so that dx = sum over i of dy_i @ w_i is one GEMM where the kernel table has a kernel.

    A [M, N_1 + N_2 + ...]    dy_i rowwise       parts of dy_1, then parts of dy_2, ...
    B [K, N_1 + N_2 + ...]    w_i columnwise     parts of w_1, then parts of w_2, ...

Nothing is copied: each sibling keeps its codes and its scale. Rows may be cut, as in any other operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import table
from dlp.quant.gemm import Gemm, own_gemm
from dlp.quant.tensor import Format, Part, QuantizedTensor


@dataclass(frozen=True)
class Siblings(Format):
    """Format of an operand whose contraction is the contractions of operands in the formats `of`, one after the other. The
    payload is the payload of the first sibling."""

    of: tuple[Format, ...]

    @property
    def name(self) -> str:
        return f"{self.of[0].name} of {len(self.of)} siblings"

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for each in self.of for part in each.parts)

    @property
    def block(self) -> tuple[int, int]:
        return self.of[0].block

    @property
    def multiple(self) -> tuple[int, int]:
        return self.of[0].multiple

    @property
    def element(self) -> str:
        return self.of[0].element

    @property
    def gemm_kind(self) -> str:
        """The kind of the siblings, if all have the same format; else no row of the kernel table has the kind."""
        return f"{self.of[0].gemm_kind}_siblings" if len(set(self.of)) == 1 else "mixed_siblings"

    def split(self, q: QuantizedTensor) -> Iterator[QuantizedTensor]:
        """The operand of each sibling."""
        parts = iter(q.parts)
        for each in self.of:
            yield each.wrap([next(parts) for _ in each.parts])

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        return torch.cat([each.dequantize(dtype) for each in self.split(q)], 1)


_format_of = cache(Siblings)


def stacked(operands: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return the operands of siblings, which have equal numbers of rows, as one operand."""
    return _format_of(tuple(each.format for each in operands)).wrap([part for each in operands for part in each.parts])


@table.remembered
def has_kernel(a: Format, b: Format, device: str) -> bool:
    """Return whether the kernel table names the pair of operands in these formats, `Siblings`."""
    pair, members = (a.gemm_kind, b.gemm_kind), zip(getattr(a, "of", ()), getattr(b, "of", ()), strict=True)
    named = any(pair in entry.formats for entry in table.gemm_entries(device))
    return named and all(own_gemm(*each) is None for each in members)


def as_one(
    operands: Sequence[Any], gemms: Sequence[Gemm], dtype: torch.dtype
) -> tuple[Sequence[Any], Sequence[Gemm]]:  # fmt: skip
    """Return the operands and GEMMs of siblings as one operand and one GEMM into `dtype`, if the kernel table has a kernel for
    the pair of formats; else the arguments.

    An operand that is being gathered, a factor and an accumulator leave the GEMMs as they are.
    """
    plain = all(gemm.alpha == 1.0 and gemm.accumulate is None and gemm.bias is None for gemm in gemms)
    if not plain or not all(isinstance(each, QuantizedTensor) for each in operands):
        return operands, gemms
    a, b = stacked(operands), stacked([gemm.b for gemm in gemms])
    if not has_kernel(a.format, b.format, table.device_of(a.payload)):
        return operands, gemms
    return [a], [replace(gemms[0], b=b, out_dtype=dtype)]
