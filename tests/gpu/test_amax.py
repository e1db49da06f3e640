"""amax kernels against the reference: one matrix, many in one launch, more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from dlp.kernels import cuda, reference
from tests.gpu.inputs import DATA, DTYPES, SHAPES, STRIDES, place, values
from tests.metrics import assert_bit_equal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DATA)
def test_amax_is_the_reference(device, poisoned, dtype, data):
    for shape in [*SHAPES, (70, 3000), (1, 100_003)]:
        x = values(data, *shape, dtype)
        for stride in STRIDES:
            out = poisoned((), torch.float32)
            cuda.amax(place(x, stride, device), out)
            assert_bit_equal(out.cpu(), reference.amax(x), f"amax of {data} {dtype} {shape} {stride}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_place_counts(device, poisoned, dtype):
    """The kernel finds the largest element at every position."""
    x = values("gauss", 45, 1000, dtype).to(device)
    for row, col in [(0, 0), (0, 999), (44, 0), (44, 999), (17, 503)]:
        y, out = x.clone(), poisoned((), torch.float32)
        y[row, col] = -3e5
        cuda.amax(y, out)
        assert out.item() == y[row, col].abs().item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_is_each_alone(device, poisoned, dtype):
    matrices = [values("gauss", rows, cols, dtype, seed) * (seed + 1) for seed, (rows, cols) in enumerate(SHAPES * 3)]
    matrices.append(values("gauss", 200, 2000, dtype))
    out = poisoned((len(matrices),), torch.float32)
    batch = cuda.amax_batch([place(x, STRIDES[i % 3], device) for i, x in enumerate(matrices)], out)
    for _ in range(2):  # a prepared launch can be repeated
        batch()
    assert_bit_equal(out.cpu(), torch.stack([reference.amax(x) for x in matrices]))


@pytest.mark.needs_gpu
def test_more_than_2_to_the_31_elements(device):
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    x = torch.zeros(65537, 32768 + 8, dtype=torch.bfloat16, device=device)
    out = torch.empty((), device=device)
    for row, col, value in [(65536, 32775, 3.0), (40000, 5, 5.0)]:
        x[row, col] = -value
        cuda.amax(x, out)
        assert out.item() == value
        cuda.amax(x[:, : 32768 + 6], out)  # strided rows
        assert out.item() == (5.0 if row == 40000 else 0.0)


def test_what_kernels_refuse(device):
    x, out = torch.zeros(4, 8, device=device), torch.zeros((), device=device)
    with pytest.raises(ValueError, match="columns are adjacent and whose rows are disjoint; got strides"):
        cuda.amax(x.t(), out)
    with pytest.raises(ValueError, match="bf16 or fp32; got torch.float16"):
        cuda.amax(x.half(), out)
    with pytest.raises(ValueError, match=r"out must be a contiguous \[\] of torch.float32"):
        cuda.amax(x, out.double())
    with pytest.raises(ValueError, match="share the input dtype"):
        cuda.amax_batch([x, x.bfloat16()], torch.zeros(2, device=device))
