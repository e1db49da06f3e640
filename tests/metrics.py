"""How tests compare tensors: relative Frobenius error, SQNR, and equality of bits that names the first difference.

Low precision is never compared element by element with a tolerance: one flipped rounding would need a bound that hides
real errors everywhere else. Either the bits are equal, or the error of the whole tensor is bounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm, computed in float64; 0 if both are zero."""
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    difference = (actual.detach().double() - expected.detach().double()).norm().item()
    norm = expected.detach().double().norm().item()
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / norm


def factor(actual: Tensor, expected: Tensor) -> float:
    """The constant c for which c * expected is closest to `actual`. Rounding noise averages out in c. A relative error
    of noisy values would hide c."""
    found, wanted = actual.detach().double().flatten(), expected.detach().double().flatten()
    return (found @ wanted / (wanted @ wanted)).item()


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal to quantization noise in dB, 20 log10(|expected| / |actual - expected|); infinite if they are equal."""
    error = relative_error(actual, expected)
    return math.inf if error == 0 else -20 * math.log10(error)


def assert_close(actual: Tensor, expected: Tensor, at_most: float, name: str = "tensor") -> None:
    """Fails unless the relative error is at most `at_most`; a NaN anywhere fails."""
    error = relative_error(actual, expected)
    assert error <= at_most, f"{name}: relative error {error:.3e} is over {at_most:g}"


def assert_bit_equal(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    """Fails unless dtype, shape and every bit agree (-0.0 is not 0.0, NaN payloads count); any dtype, also fp8, fp4."""
    message = bit_difference(actual, expected)
    assert message is None, f"{name}: {message}"


def bit_difference(actual: Tensor, expected: Tensor) -> str | None:
    """First difference between two tensors (index, values, bytes most significant first), or None."""
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
    """[elements, bytes of one element], little-endian, on the CPU."""
    # Makes elements adjacent, also if a dimension of size one has another stride
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.view(tensor.shape).copy_(tensor.detach().cpu())
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _hex(element: Tensor) -> str:
    return bytes(reversed(element.tolist())).hex()


def _value(tensor: Tensor, position: int) -> str:
    if tensor.dtype == torch.float4_e2m1fn_x2:  # torch cannot read this dtype; the byte identifies the value
        return "two fp4"
    return repr(tensor.detach().cpu().contiguous().reshape(-1)[position].item())
