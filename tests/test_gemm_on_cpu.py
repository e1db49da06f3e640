"""The source of dlp's Hopper GEMM (csrc/gemm_sm90.cu), compiled for the CPU and run on a simulated GPU with clusters,
barriers, TMA copies and tensor-core products (tests/cuda_on_cpu)."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cuda_on_cpu.hopper_gemm import NEEDS, Multiply, assert_near, in_one_order

pytestmark = [pytest.mark.slow, NEEDS]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Case(NamedTuple):
    rows: int
    cols: int
    contraction: int
    code: torch.dtype = E4M3
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    adds: bool = False


class Problem:
    """Operands of a case, with `scales` of A [rows, blocks], and `b_scales` of B in the layout that the kernel reads. `exact`:
    the float64 result; `sums`: the product of the magnitudes."""

    def __init__(self, case: Case) -> None:
        rows, cols, along, code, dtype, bias, self.adds = case
        generator = torch.Generator().manual_seed(rows + cols + along)
        blocks, tiles = -(-along // 128), -(-cols // 128)
        self.a, self.b = (
            torch.randn(n, along, generator=generator).to(kind) for n, kind in ((rows, code), (cols, E4M3))
        )
        self.scales = torch.rand(rows, blocks, generator=generator) + 0.5
        self.b_scales = torch.rand(tiles, blocks + -blocks % 4, generator=generator) + 0.5
        self.bias = torch.randn(cols, generator=generator).to(dtype) if bias else None
        self.into = (
            torch.randn(rows, cols, generator=generator)
            if self.adds
            else torch.full((rows, cols), torch.nan, dtype=dtype)
        )
        left = self.a.double() * self.scales.repeat_interleave(128, 1)[:, :along]
        right = self.b.double() * self.b_scales.repeat_interleave(128, 0)[:cols].repeat_interleave(128, 1)[:, :along]
        self.exact, self.sums = left @ right.t(), left.abs() @ right.abs().t()
        self.exact += sum(term.double() for term in (self.bias, self.into if self.adds else None) if term is not None)

    def laid_scales(self) -> Tensor:
        """Scales of A in the layout that the kernel reads, [blocks, rows padded to a multiple of 4]."""
        rows, blocks = self.scales.shape
        lies = torch.full((blocks, rows + -rows % 4), torch.nan)
        lies[:, :rows] = self.scales.t()
        return lies

    def words(self, scales: Tensor, d: Tensor) -> list[int]:
        """Packed arguments of the kernel, `BlockGemmJob` of csrc/kernels.h."""
        (rows, along), cols = self.a.shape, len(self.b)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return [
            *(each.data_ptr() for each in (self.a, self.b, d, scales, self.b_scales)), bias, rows, cols, along,
            self.a.stride(0), self.b.stride(0), d.stride(0), rows + -rows % 4, scales.stride(0), len(self.b_scales),
            self.b_scales.stride(0), self.adds,
        ]  # fmt: skip


class Library:
    def __init__(self) -> None:
        job, launch = "const BlockGemmJob* job", "gemm_fp8_blocks(*job"
        self._multiply = Multiply("gemm_sm90.cu", job, launch)

    def product(self, problem: Problem) -> Tensor:
        made, scales = problem.into.clone(), problem.laid_scales()
        self._multiply([problem.words(scales, made)], problem.a.dtype, made.dtype)
        return made


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


CASES = [
    Case(128, 256, 128), Case(1, 128, 256), Case(257, 200, 384, dtype=torch.float32), Case(130, 8, 16, bias=True),
    Case(400, 104, 1040, adds=True, bias=True, dtype=torch.float32), Case(640, 264, 144, E5M2),
]  # fmt: skip


@pytest.mark.parametrize(("case", "order"), in_one_order(CASES), ids=str)
def test_it_is_the_product(library, monkeypatch, case, order):
    monkeypatch.setenv("EMULATOR_ORDER", order)
    problem = Problem(case)
    assert_near(library.product(problem), problem.exact, problem.sums)
