"""Cross entropy of rows of logits, and the gradient: within a bound of the float64 result, and with equal bits in every
run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dlp
from dlp.kernels import cuda_loss, ops, reference
from tests.gpu.inputs import DTYPES, SHAPES, STRIDES, place
from tests.metrics import assert_bit_equal

# The first shapes have more columns than a thread block reads at once;
# the last shape has more rows than a chunk of rows
LONG = [(3, 9001), (5, 20000), (2, 128256), (1100, 520)]
NONE = -100
EXACT = 2e-6  # relative bound of a sum of exponentials, and absolute bound of its logarithm
# Absolute error of the fp32 logarithm, which is the relative error of the softmax
ULP = 2.0**-23
ROUNDED = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def logits(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Logits of different magnitude in each row. The logits are far from zero, so that exponentials without subtracting
    the maximum overflow."""
    generator = torch.Generator().manual_seed(rows + cols)
    x = torch.randn(rows, cols, generator=generator) * torch.exp2(torch.arange(rows) % 5 - 1.0)[:, None]
    return (x + 120).to(dtype)


def targets(rows: int, cols: int) -> Tensor:
    """Targets: columns of this rank, columns of the ranks before and after, and the ignored target."""
    target = torch.randint(0, max(cols, 1), (rows,), generator=torch.Generator().manual_seed(rows))
    target[1::4], target[2::8], target[3::8] = NONE, -1, cols
    return target


def float64(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log_sum, picked, gradient) in float64.

    log_sum     logarithm of the sum of exponentials of each row
    picked      logit of the target, 0 if the target is not a column of x
    gradient    gradient of the loss, times `weight`
    """
    wide = x.double()
    log_sum = wide.logsumexp(1)
    here = (target >= 0) & (target < x.shape[1])
    one = torch.zeros_like(wide)
    one[here, target[here]] = 1
    return log_sum, (wide * one).sum(1), ((wide - log_sum[:, None]).exp() - one) * weight.double()[:, None]


@dtypes
def test_rows_and_gradients_are_those_of_float64(device, poisoned, dtype):
    for number, shape in enumerate([*SHAPES, *LONG]):
        rows, cols = shape
        if cols == 0:
            continue
        x, target = logits(*shape, dtype), targets(*shape)
        weight = torch.linspace(-3, 5, rows)
        expected, expected_picked, expected_gradient = float64(x, target, weight)
        on_device = place(x, STRIDES[number % 3], device), target.to(device)
        log_sum, picked = poisoned((rows,), torch.float32), poisoned((rows,), torch.float32)
        cuda_loss.log_sum_exp(*on_device, log_sum, picked)
        what = f"{dtype} {shape}"
        assert_bit_equal(picked.cpu(), expected_picked.float(), f"picked, {what}")
        assert bool(((log_sum.cpu() - expected).abs() <= EXACT + ULP * expected.abs()).all()), f"log_sum, {what}"

        gradient = poisoned(shape, dtype)
        cuda_loss.softmax_gradient(*on_device, log_sum, weight.to(device), gradient)
        error = (EXACT + ULP * expected.abs()) * weight.double().abs()
        bound = ROUNDED[dtype] * expected_gradient.abs() + error[:, None]
        assert bool(((gradient.cpu().double() - expected_gradient).abs() <= bound).all()), f"gradient, {what}"
        again = torch.empty_like(gradient)
        cuda_loss.softmax_gradient(*on_device, log_sum, weight.to(device), again)
        assert_bit_equal(again, gradient, f"a second time, {what}")


@dtypes
def test_inf_and_nan_are_where_the_reference_has_them(device, dtype):
    inf, nan = float("inf"), float("nan")
    x = torch.zeros(8, 300, dtype=dtype)
    x[0, 7], x[1, 299], x[2], x[3, :299], x[4, 0], x[5] = inf, -inf, -inf, -inf, nan, nan
    x[6, 3], x[6, 4], x[7] = inf, nan, torch.finfo(dtype).min
    target, weight = torch.arange(8), torch.ones(8)
    log_sum, picked = ops.log_sum_exp(x.to(device), target.to(device))
    expected = reference.log_sum_exp(x, target)
    for made, right in zip((log_sum, picked), expected, strict=True):
        torch.testing.assert_close(made.cpu(), right, rtol=ULP, atol=EXACT, equal_nan=True)
    gradient = ops.softmax_gradient(x.to(device), target.to(device), log_sum, weight.to(device)).cpu()
    right = reference.softmax_gradient(x, target, expected[0], weight)
    assert torch.equal(gradient.isnan(), right.isnan()) and torch.equal(gradient.isinf(), right.isinf())


def test_each_column_counts_once(device):
    """One large logit moves through every column of a row: this logit alone determines the sum, and the gradient there
    is zero."""
    cols = 8 * 256 * 4 + 21
    x = torch.zeros(cols, cols, dtype=torch.bfloat16, device=device).fill_diagonal_(64)
    target = torch.arange(cols, device=device)
    log_sum, picked = ops.log_sum_exp(x, target)
    assert bool((log_sum == 64).all()) and bool((picked == 64).all())
    gradient = ops.softmax_gradient(x, target, log_sum, torch.ones(cols, device=device))
    assert not gradient.diagonal().any() and float(gradient.max()) < 1e-27 and float(gradient.min()) >= 0


@dtypes
def test_the_loss_of_a_gpu_is_that_of_torch(device, dtype):
    x, target = logits(70, 1000, dtype), torch.arange(70)
    target[::3] = NONE
    theirs, ours = x.float().clone().to(device).requires_grad_(), x.to(device).requires_grad_()
    loss = dlp.cross_entropy(ours, target.to(device))
    expected = torch.nn.functional.cross_entropy(theirs, target.to(device), reduction="sum")
    torch.autograd.backward([loss / 7, expected / 7])
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=0)
    torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=2 * ROUNDED[dtype], atol=1e-5)


@pytest.mark.needs_gpu
def test_logits_of_more_than_2_to_the_31_elements(device):
    rows, cols = 2**31 // 128256 + 2, 128256
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device=device)
    x[-1] = logits(1, cols, torch.bfloat16)[0].to(device)
    target, weight = torch.full((rows,), cols - 1, device=device), torch.ones(rows, device=device)
    log_sum, picked = ops.log_sum_exp(x, target)
    gradient = ops.softmax_gradient(x, target, log_sum, weight)
    alone = ops.log_sum_exp(x[-1:].clone(), target[-1:])
    assert_bit_equal(log_sum[-1:], alone[0], "log_sum of the last row")
    assert_bit_equal(picked[-1:], alone[1], "picked of the last row")
    last = ops.softmax_gradient(x[-1:].clone(), target[-1:], alone[0], weight[-1:])
    assert_bit_equal(gradient[-1:], last, "gradient of the last row")


def test_what_the_loss_refuses(device):
    x, target = torch.zeros(4, 8, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    rows = torch.empty(4, device=device)
    with pytest.raises(ValueError, match="target must be a contiguous"):
        cuda_loss.log_sum_exp(x, target.int(), rows, rows)
    with pytest.raises(ValueError, match="log_sum must be a contiguous"):
        cuda_loss.log_sum_exp(x, target, rows[:3], rows)
    with pytest.raises(ValueError, match="gradient must be a contiguous"):
        cuda_loss.softmax_gradient(x, target, rows, rows, x.bfloat16())
