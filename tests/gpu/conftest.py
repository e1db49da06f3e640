"""Tests of the CUDA kernels. Without a CUDA device the tests are skipped with a message; with `--emulated` the CPU is
the device.

The fixture `poisoned` fills an output with a poison value before a kernel writes to it, and checks guard bytes around
the output after the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import pytest
import torch
from torch import Tensor

from tests.cuda_on_cpu import build as cuda_on_cpu
from tests.emulated import OnGpu, emulation

GUARD, POISON = 256, 0xA5  # guard bytes on each side, and the value of guards and output before the kernel runs
Allocate = Callable[..., Tensor]
# Test files of this folder that run with `--emulated`, because they compare with the reference. The other files need
# a GPU, or compare with CPU tensors, which under emulation take the code paths of GPU tensors.
EMULATED = (
    "amax cast_block cast_mxfp8 cast_nvfp4 cast_tensor codes flags gate_grads golden int4 loss producers rowwise wire"
).split()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--emulated"):
        emulated = [
            item for item in items if item.path.parent.name != "gpu" or item.path.stem.removeprefix("test_") in EMULATED
        ]
        items[:] = [item for item in emulated if item.get_closest_marker("needs_gpu") is None]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.config.getoption("--emulated"):
        with emulation(cuda_on_cpu.load()), OnGpu():
            yield "cpu"
    elif torch.cuda.is_available():
        yield "cuda"
    else:
        pytest.skip("needs a CUDA device; torch sees none")


@pytest.fixture
def poisoned(device: str) -> Iterator[Allocate]:
    """Return a function: `poisoned(shape, dtype, offset=0)` is an output that starts `offset` bytes after an aligned
    address, between guard bytes that must not change."""
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
