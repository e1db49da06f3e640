"""Tests of the CUDA kernels: they need a CUDA device, and say so where there is none.

Every output is poisoned before a kernel writes it and lies between guard bytes that are looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import pytest
import torch
from torch import Tensor

GUARD, POISON = 256, 0xA5  # bytes on either side, and what they and the output hold before
Allocate = Callable[..., Tensor]


@pytest.fixture(scope="session")
def device() -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch sees none")
    return "cuda"


@pytest.fixture
def poisoned(device: str) -> Iterator[Allocate]:
    """`poisoned(shape, dtype, offset=0)`: an output whose surroundings must not change, `offset` bytes off alignment."""
    buffers: list[tuple[Tensor, int, int]] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        start, size = GUARD + offset, prod(shape) * dtype.itemsize
        buffer = torch.full((start + size + GUARD,), POISON, dtype=torch.uint8, device=device)
        buffers.append((buffer, start, start + size))
        return buffer[start : start + size].view(dtype).view(shape)

    yield allocate
    for buffer, start, end in buffers:
        outside = torch.cat([buffer[:start], buffer[end:]])
        assert bool((outside == POISON).all()), f"a kernel wrote outside of its output of {end - start} bytes"
