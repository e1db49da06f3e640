"""Recipe qat on a GPU. Results and gradients are within a bound of those on a CPU. Gradients of clipped elements are zero.
Compiled and eager gradients have equal bits. The exported and quantized model has the same y within a bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dlp
from dlp.quant.integers import IntScaling
from tests.metrics import assert_bit_equal, relative_error
from tests.test_qat import K, N, layer, results, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_trained_exported_quantized(device: str, dtype: torch.dtype):
    x, w, b, dy = tensors(dtype)
    on_cpu, model = results(layer("qat", w, b), x, dy), layer("qat", w, b).to(device)
    x, dy = x.to(device), dy.to(device)
    for _ in range(3):  # repeated calls may replay captured launches
        model.zero_grad()
        found = results(model, x, dy)
    for name, value in found.items():
        assert relative_error(value.cpu(), on_cpu[name]) < (1e-5 if dtype == torch.float32 else 1e-2), name
    clipped = IntScaling(4, 32).clipped(model.weight.detach(), None)
    assert clipped.sum() >= 10 and not found["dw"][clipped].any() and not found["dx"][0, 0]

    torch.compiler.reset()
    compiled, given = torch.compile(model, fullgraph=True), x.clone().requires_grad_()
    model.zero_grad()
    compiled(given).backward(dy)
    torch.compiler.reset()
    assert_bit_equal(given.grad, found["dx"])
    assert_bit_equal(model.weight.grad, found["dw"])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    model(x).backward(dy)
    optimizer.step()
    with torch.no_grad():
        y = model(x)
        plain = dlp.export(nn.Sequential(model), nn.Sequential(nn.Linear(K, N, dtype=dtype)).to(device))
        dlp.quantize_(plain, "qat", mode="dynamic")
        assert relative_error(plain(x), y) < (2e-6 if dtype == torch.float32 else 1e-2)
