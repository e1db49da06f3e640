"""The golden vectors of tests/test_golden.py with every tensor on the GPU, computed by the kernels and cuBLASLt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.test_golden import check_case, pytest_generate_tests

__all__ = ["pytest_generate_tests"]


def test_golden_on_the_gpu(device: str, golden_group: str, golden_case: dict[str, Any]) -> None:
    if golden_group == "gemm_exact" and device == "cpu":
        pytest.skip("GEMMs are not played")
    with torch.device(device):
        check_case(golden_group, golden_case)
