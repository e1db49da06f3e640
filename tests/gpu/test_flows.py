"""Frozen layers and quantized parameters on a GPU: results and compilation."""

from __future__ import annotations

import pytest
import torch

import dlp
from tests.test_flows import batch, converted, error, net

pytestmark = pytest.mark.usefixtures("device")

CASES = [
    (recipe, mode)
    for recipe in ("fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "int8")
    for mode in ("weight_only", "dynamic", "static")
    if mode != "static" or recipe == "fp8_current"
]


@pytest.mark.parametrize(("recipe", "mode"), CASES)
@pytest.mark.parametrize("plain", [True, False])
@torch.no_grad()
def test_quantized_for_forward(device, plain, recipe, mode):
    model, x = (net() if plain else converted()).to(device), batch().to(device)
    expected = model(x)
    with dlp.calibrate(model):
        model(x)
    if plain:
        dlp.quantize_(model, recipe, mode=mode)
    else:
        dlp.freeze(model, "**", recipe, mode)
    y = model(x)
    assert 0 < error(y, expected) < (0.25 if recipe == "nvfp4" else 0.06)
    for _ in range(2):  # the second call of a layer may replay captured launches
        assert torch.equal(model(x), y)
    torch.compiler.reset()
    assert torch.equal(torch.compile(model)(x), y)
    state = dlp.quantized_state_dict(model)
    dlp.load_quantized_state_dict(model, state)
    assert torch.equal(model(x), y)
