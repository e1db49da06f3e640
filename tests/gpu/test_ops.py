"""dlp.ops on a GPU: fusions compared with the basic ops, ops with and without captured launches, and training with an
MLP of dlp.ops or a linear in a CUDA graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp import ops
from dlp.runtime.capture import CapturedLaunches
from tests.metrics import assert_bit_equal, assert_close
from tests.restored_tables import restored_fusions

H, FFN, M = 512, 1024, 512
RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")


def values(seed: int, *shape: int, device: Any) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def run(model: nn.Module, device: Any) -> dict[str, Tensor]:
    model.zero_grad()
    x = values(1, M, H, device=device).requires_grad_()
    y = model(x)
    y.backward(values(2, *y.shape, device=device))
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {
        f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None
    }


class IntoInput(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = ops.Sequential(*inner, ops.AddExtraInput(in_place=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, 2.0 * x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = ops.Sequential(ops.MakeExtraOutput(in_place=True), *inner)

    def forward(self, x: Tensor) -> Tensor:
        y, residual = self.inner(1.0 * x)
        return 2.0 * y + 3.0 * residual  # type: ignore[no-any-return]


MODELS = {
    "mlp": lambda r: ops.LayerNormMLP(H, FFN, normalization="RMSNorm", activation="swiglu", recipe=r),
    "gelu mlp": lambda r: ops.LayerNormMLP(H, FFN, recipe=r),
    "add": lambda r: IntoInput(ops.Linear(H, H, recipe=r)),
    "scale and add": lambda r: IntoInput(ops.Linear(H, H, bias=False, recipe=r), ops.ConstantScale(0.5)),
    "residual": lambda r: Residual(ops.Linear(H, H, bias=False, recipe=r)),
    "norm residual": lambda r: Residual(ops.RMSNorm(H), ops.Linear(H, H, bias=False, recipe=r)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("what", MODELS)
def test_fusions_equal_their_basic_ops(what: str, recipe: str, device: Any):
    torch.manual_seed(0)
    fused = MODELS[what](recipe).bfloat16().to(device)
    basic = copy.deepcopy(fused)
    found = run(fused, device)
    with restored_fusions(none=True):
        expected = run(basic, device)
    for name, tensor in expected.items():
        assert_close(found[name], tensor, 0.08 if recipe != "bf16" else 0.02, f"{what} {name}")


@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_captured_ops_give_the_same_bits(recipe: str, device: Any):
    torch.manual_seed(0)
    model = ops.LayerNormMLP(H, FFN, bias=False, normalization="RMSNorm", activation="swiglu", recipe=recipe).bfloat16()
    model.to(device)
    model[0].weight.data = model[0].weight.data.float()
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
    run(model, device)
    first = run(model, device)
    for _ in range(3):
        last = run(model, device)
    for name, tensor in first.items():
        assert_bit_equal(last[name], tensor, name)
    found = {
        d.name: list(d.captured.found.values()) for plan in model._groups_now()[0].plans.values() for d in plan.captured
    }
    assert all(any(isinstance(each, CapturedLaunches) for each in its) for its in found.values()), found


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed", "fp8_block"])
@pytest.mark.parametrize("what", ["sequence", "layer"])
def test_graphed_callables_train_as_they_do_without_a_graph(what: str, recipe: str, device: Any):
    """Training with graphed callables: three microbatches per step. The step boundary casts the weights, and the next
    replay reads the new operands."""

    def train(graphed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        inner = MODELS["mlp"](recipe) if what == "sequence" else dlp.Linear(H, H, recipe=recipe)
        model = nn.Sequential(inner).bfloat16().to(device)  # without hooks, as make_graphed_callables requires
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        dlp.attach(model, optimizer)
        found = []
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)  # a replay returns the buffers of the graph
            for micro in range(3):
                x = values(3 * step + micro, M, H, device=device).requires_grad_()
                y = model(x)
                y.backward(values(50 + micro, *y.shape, device=device))
                found += [y.detach().clone(), x.grad.clone()]  # type: ignore[union-attr]
            optimizer.step()
            if step == 1 and graphed:
                del y  # the autograd graph of y accumulates on the stream that is current now
                with dlp.graphing(model):
                    model[0] = torch.cuda.make_graphed_callables(model[0], (x.detach().clone().requires_grad_(),))
        if graphed:
            with pytest.raises(ValueError, match="is captured in a CUDA graph"):
                dlp.set_recipe(model, "**", "bf16" if recipe != "bf16" else "fp8_block")
        return [*found, *[p.detach().clone() for p in model.parameters()]]

    for place, (found, expected) in enumerate(zip(train(True), train(False), strict=True)):
        assert_bit_equal(found, expected, f"{what} {recipe} {place}")
