"""The source of the Hopper GEMM of siblings (csrc/gemm_sum_sm90.cu) on a simulated device on the CPU (tests/cuda_on_cpu)."""

from __future__ import annotations

import ctypes
import shutil
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cases import nightly
from tests.cuda_on_cpu import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("nvcc") and shutil.which("c++")), reason="needs c++, and CUDA's headers, which nvcc knows"
    ),
]
CALLED = """
#include <stdexcept>

#include "kernels.h"

using namespace dlp;

// Return the error message; empty if the launch succeeded.
extern "C" __attribute__((visibility("default"))) const char* multiply(const GemmSumJob* job, const GemmTerm* terms, int e5m2,
                                                                       int wide) {
    static std::string said;
    said = "";
    try {
        gemm_fp8_sum(*job, terms, e5m2 ? Code::kE5m2 : Code::kE4m3, wide ? Input::kFp32 : Input::kBf16, 0);
    } catch (const std::runtime_error& error) {
        said = error.what();
    }
    return said.c_str();
}
"""
ORDERS = ("forward", "backward", "3")  # order in which threads run
E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32


class Case(NamedTuple):
    rows: int
    cols: int
    contractions: tuple[int, ...]
    code: torch.dtype = E5M2
    dtype: torch.dtype = BF16


class Problem:
    """Operands of a case: for each term codes A and B, and both scales."""

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
        found = ctypes.CDLL(str(build.build(("gemm_sum_sm90.cu",), CALLED)))
        self._multiply = found.multiply
        self._multiply.restype = ctypes.c_char_p

    def product(self, problem: Problem, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of the sum."""
        (rows, cols), terms = problem.exact[start:stop].shape, []
        made = torch.full((rows, cols), torch.nan, dtype=problem.dtype)
        for a, b, a_scale, b_scale in problem.terms:
            part = a[start:stop]
            addresses = (each.data_ptr() for each in (part, b, a_scale, b_scale))
            terms += [*addresses, a.shape[1], a.stride(0), b.stride(0)]
        job = made.data_ptr(), len(problem.terms), rows, cols, made.stride(0)
        words = [(ctypes.c_int64 * len(each))(*each) for each in (job, terms)]
        said = self._multiply(*words, int(problem.terms[0][0].dtype == E5M2), int(made.dtype == FP32))
        if said:
            raise RuntimeError(said.decode())
        return made


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


CASES = [
    Case(256, 256, (128, 128)), Case(1, 128, (16, 256, 144)), Case(257, 264, (384, 128), E4M3, FP32),
    Case(130, 8, (16,) * 4), Case(300, 1000, (272, 640), E4M3), Case(520, 136, (1040, 16, 16), dtype=FP32),
]  # fmt: skip


# One order for each case; `--all-cases` runs all pairs
PAIRS = [
    (case, order) if number % len(ORDERS) == place else nightly(case, order)
    for number, case in enumerate(CASES)
    for place, order in enumerate(ORDERS)
]


@pytest.mark.parametrize(("case", "order"), PAIRS, ids=str)
def test_it_is_the_sum_of_products(library, monkeypatch, case, order):
    monkeypatch.setenv("EMULATOR_ORDER", order)
    problem = Problem(case)
    made = library.product(problem)
    rounding = problem.exact.abs() * (2.0**-8 if made.dtype == BF16 else 2.0**-22)
    assert ((made.double() - problem.exact).abs() <= 2.0**-18 * problem.sums + rounding).all()


def test_bits_do_not_depend_on_the_number_of_rows(library):
    problem = Problem(Case(300, 136, (144, 256), dtype=FP32))
    whole = library.product(problem)
    chunks = [library.product(problem, start, stop) for start, stop in ((0, 17), (17, 256), (256, 300))]
    assert torch.equal(torch.cat(chunks), whole)
