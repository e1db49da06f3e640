"""The source of the Hopper GEMM that sums the dgrads of siblings (csrc/gemm_sum_sm90.cu), compiled for the CPU and run
on a simulated GPU (tests/cuda_on_cpu)."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cuda_on_cpu.hopper_gemm import NEEDS, Multiply, assert_near, in_one_order

pytestmark = [pytest.mark.slow, NEEDS]
E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32


class Case(NamedTuple):
    rows: int
    cols: int
    contractions: tuple[int, ...]
    code: torch.dtype = E5M2
    dtype: torch.dtype = BF16


class Problem:
    """Operands of a case: `terms` has the codes A and B and both scales of each sibling. `exact`: the float64 result; `sums`:
    the sum of the products of magnitudes."""

    def __init__(self, case: Case) -> None:
        rows, cols, contractions, code, self.dtype = case
        generator = torch.Generator().manual_seed(rows + cols + sum(contractions))
        self.terms = [
            tuple(torch.randn(n, along, generator=generator).to(kind) for n, kind in ((rows, code), (cols, E4M3)))
            + tuple(torch.rand((), generator=generator) + 0.5 + i for _ in range(2))
            for i, along in enumerate(contractions)
        ]
        pairs = [(a.double() * sa * sb, b.double()) for a, b, sa, sb in self.terms]
        self.exact = sum(a @ b.t() for a, b in pairs)
        self.sums = sum(a.abs() @ b.abs().t() for a, b in pairs)


class Library:
    def __init__(self) -> None:
        jobs, launch = "const GemmSumJob* job, const GemmTerm* terms", "gemm_fp8_sum(*job, terms"
        self._multiply = Multiply("gemm_sum_sm90.cu", jobs, launch)

    def product(self, problem: Problem, start: int = 0, stop: int | None = None) -> Tensor:
        """Run the kernel for rows [start, stop) of the sum."""
        (rows, cols), terms = problem.exact[start:stop].shape, []
        made = torch.full((rows, cols), torch.nan, dtype=problem.dtype)
        for a, b, a_scale, b_scale in problem.terms:
            part = a[start:stop]
            addresses = (each.data_ptr() for each in (part, b, a_scale, b_scale))
            terms += [*addresses, a.shape[1], a.stride(0), b.stride(0)]
        job = made.data_ptr(), len(problem.terms), rows, cols, made.stride(0)
        self._multiply((job, terms), problem.terms[0][0].dtype, made.dtype)
        return made


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


CASES = [
    Case(256, 256, (128, 128)), Case(1, 128, (16, 256, 144)), Case(257, 264, (384, 128), E4M3, FP32),
    Case(130, 8, (16,) * 4), Case(300, 1000, (272, 640), E4M3), Case(520, 136, (1040, 16, 16), dtype=FP32),
]  # fmt: skip


@pytest.mark.parametrize(("case", "order"), in_one_order(CASES), ids=str)
def test_it_is_the_sum_of_products(library, monkeypatch, case, order):
    monkeypatch.setenv("EMULATOR_ORDER", order)
    problem = Problem(case)
    assert_near(library.product(problem), problem.exact, problem.sums)


def test_bits_do_not_depend_on_the_number_of_rows(library):
    problem = Problem(Case(300, 136, (144, 256), dtype=FP32))
    whole = library.product(problem)
    chunks = [library.product(problem, start, stop) for start, stop in ((0, 17), (17, 256), (256, 300))]
    assert torch.equal(torch.cat(chunks), whole)
