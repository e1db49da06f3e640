"""int4 weights in the layout of torch's CPU kernel: bounds against the decoded weights, zero points, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dlp
from dlp.quant.integers import IntScaling
from dlp.quant.parameter import QuantizedParameter
from tests.refusals import refuses


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_linears_multiply_the_codes(group: int, symmetric: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 48).bfloat16()
    weight = QuantizedParameter.from_float(layer.weight + 0.02, IntScaling(4, group, symmetric))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    model, x = nn.Sequential(layer, nn.Linear(48, 8).bfloat16()), torch.randn(2, 3, 256).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        assert dlp.pack_int4(model) == ["0"] and type(model[1]) is nn.Linear
        y = model[0](x)
    assert y.shape == (2, 3, 48) and y.dtype == torch.bfloat16
    assert 0 < (y - expected).float().norm() < 0.02 * expected.float().norm()


def test_packed_linears_run_without_tokens() -> None:
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    dlp.pack_int4(dlp.quantize_(model, dlp.recipe("qat", weight="int4 group 32")))
    for shape in ((0,), (2, 0)):
        assert model(torch.randn(*shape, 64).bfloat16()).shape == (*shape, 32)


def test_y_is_bf16_for_an_fp32_bias() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    dlp.pack_int4(dlp.quantize_(model, dlp.recipe("qat", weight="int4 group 32")))
    assert model(torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16


def test_what_the_kernel_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantized(weight: str, rows: int = 64, mode: str = "weight_only") -> nn.Module:
        model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, rows)).bfloat16()
        return dlp.quantize_(model, dlp.recipe("qat", weight=weight), mode=mode)

    with pytest.raises(ValueError, match="no nn.Linear has int4 weights in groups; call dlp.quantize_"):
        dlp.pack_int4(quantized("int8 channel"))
    for model, said in (
        (quantized("int4 group 16"), r"0 has a weight \[64, 256\] in groups of 16; torch's kernel takes groups of 32"),
        (quantized("int4 group 32", 40), r"1 has a weight \[40, 64\] in groups of 32; .* multiples of 16"),
        (quantized("int4 group 32", mode="dynamic"), "0 has .*, and its x is quantized; .* quantize with another"),
    ):
        with pytest.raises(ValueError, match=said):
            dlp.pack_int4(model)
        assert type(model[0]) is nn.Linear
    with (
        monkeypatch.context() as context,
        pytest.raises(ValueError, match="pack_int4: 0 is on a GPU, .*: leave pack_int4 out"),
    ):
        context.setattr(QuantizedParameter, "is_cuda", True)
        dlp.pack_int4(quantized("int4 group 32"))
    packed = quantized("int4 group 32")
    dlp.pack_int4(packed)
    with refuses("packed int4 weights must be bf16 on a CPU; got torch.float32 on cpu, .*: convert x"):
        packed(torch.randn(1, 256))
