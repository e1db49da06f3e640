"""Comparators of tensors: relative Frobenius error, SQNR, and bitwise equality with a message that names the first
difference.

Low-precision tensors are not compared element by element with a tolerance: the tolerance would have to allow one
rounding to another code, and would hide real errors in all other elements. Tests require equal bits, or bound the error
of the full tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm, computed in float64; if `expected` is
    zero, 0 if `actual` is zero, else infinity."""
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    difference = (actual.detach().double() - expected.detach().double()).norm().item()
    norm = expected.detach().double().norm().item()
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / norm


def factor(actual: Tensor, expected: Tensor) -> float:
    """Return the constant c for which c * expected is closest to `actual`. Rounding noise averages out in c, so c shows
    a constant factor that a relative error of noisy values would hide."""
    found, wanted = actual.detach().double().flatten(), expected.detach().double().flatten()
    return (found @ wanted / (wanted @ wanted)).item()


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal to quantization noise in dB, 20 log10(|expected| / |actual - expected|); infinite if they are equal."""
    error = relative_error(actual, expected)
    return math.inf if error == 0 else -20 * math.log10(error)


def assert_close(actual: Tensor, expected: Tensor, at_most: float, name: str = "tensor") -> None:
    """Fail if the relative error exceeds `at_most`, or if there is a NaN."""
    error = relative_error(actual, expected)
    assert error <= at_most, f"{name}: relative error {error:.3e} is over {at_most:g}"


def assert_bit_equal(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    """Fail unless dtype, shape and every bit are equal; -0.0 differs from 0.0, and so do NaNs with different bits.
    Supports every dtype, including fp8 and fp4."""
    message = bit_difference(actual, expected)
    assert message is None, f"{name}: {message}"


def assert_all_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], at_most: float) -> None:
    """Fail unless the names are equal, and `assert_close` holds for each name."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, at_most, name)


def assert_all_bit_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail unless the names are equal, and `assert_bit_equal` holds for each name."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bit_equal(actual[name], tensor, name)


def bit_difference(actual: Tensor, expected: Tensor) -> str | None:
    """Describe the first difference between two tensors (index, values, bytes with the most significant first), or
    return None if there is none."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{actual.dtype} {tuple(actual.shape)} is not {expected.dtype} {tuple(expected.shape)}"
    a, b = _bytes(actual), _bytes(expected)
    differing = (a != b).any(dim=-1).nonzero().flatten().tolist()
    if not differing:
        return None
    first = differing[0]
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), actual.shape))
    return (
        f"{len(differing)} of {a.shape[0]} elements differ, first at {index}: "
        f"{_value(actual, first)} (0x{_hex(a[first])}) is not {_value(expected, first)} (0x{_hex(b[first])})"
    )


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [elements, bytes per element], little-endian, on the CPU."""
    # Copy: `view` below needs adjacent elements, and a dimension of size one may have any stride
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach().cpu())
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _hex(element: Tensor) -> str:
    return bytes(reversed(element.tolist())).hex()


def _value(tensor: Tensor, position: int) -> str:
    if tensor.dtype == torch.float4_e2m1fn_x2:  # torch cannot read this dtype; the byte identifies the value
        return "two fp4"
    return repr(tensor.detach().cpu().contiguous().reshape(-1)[position].item())
