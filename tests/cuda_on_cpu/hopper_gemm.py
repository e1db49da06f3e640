"""Helpers for tests of the Hopper GEMMs on the simulated device: calls by ctypes, orders of threads, error bounds."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import nightly
from tests.cuda_on_cpu import build

NEEDS = pytest.mark.skipif(
    not (shutil.which("nvcc") and shutil.which("c++")), reason="needs c++, and CUDA's headers, which nvcc knows"
)
CALLED = """
#include <stdexcept>

#include "kernels.h"

using namespace dlp;

// Return the error message; empty if the launch succeeded.
extern "C" __attribute__((visibility("default"))) const char* multiply(PARAMETERS, int e5m2, int wide) {
    static std::string said;
    said = "";
    try {
        LAUNCH, e5m2 ? Code::kE5m2 : Code::kE4m3, wide ? Input::kFp32 : Input::kBf16, 0);
    } catch (const std::runtime_error& error) {
        said = error.what();
    }
    return said.c_str();
}
"""
ORDERS = ("forward", "backward", "3")  # order in which threads run


class Multiply:
    """Launcher of the GEMM in one source file. `launch`: the call in C++ without the last arguments (dtypes and
    stream); `parameters`: the C++ parameters that the call uses."""

    def __init__(self, source: str, parameters: str, launch: str) -> None:
        called = CALLED.replace("PARAMETERS", parameters).replace("LAUNCH", launch)
        self._multiply = ctypes.CDLL(str(build.build((source,), called))).multiply
        self._multiply.restype = ctypes.c_char_p

    def __call__(self, words: Sequence[Sequence[int]], code: torch.dtype, result: torch.dtype) -> None:
        """Launch with packed arguments. Raises RuntimeError with the message of a failed check."""
        packed = [(ctypes.c_int64 * len(each))(*each) for each in words]
        said = self._multiply(*packed, int(code == torch.float8_e5m2), int(result == torch.float32))
        if said:
            raise RuntimeError(said.decode())


def in_one_order(cases: Sequence[Any]) -> list[Any]:
    """Return all pairs of a case and an order of threads. By default each case runs in only one order; `--all-cases`
    runs all pairs."""
    return [
        (case, order) if number % len(ORDERS) == place else nightly(case, order)
        for number, case in enumerate(cases)
        for place, order in enumerate(ORDERS)
    ]


def assert_near(made: Tensor, exact: Tensor, sums: Tensor) -> None:
    """Assert that the error of `made` is within the bound of fp32 sums that are rounded once. `sums`: sum |a||b| of
    each element."""
    rounding = exact.abs() * (2.0**-8 if made.dtype == torch.bfloat16 else 2.0**-22)
    assert ((made.double() - exact).abs() <= 2.0**-18 * sums + rounding).all()
