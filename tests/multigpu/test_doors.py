"""Every entry point (convert, freeze, quantize_, ...) refuses unsupported weights and modules with the same message."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dlp
from tests import pool as worker
from tests.refusals import may_raise

Change = Callable[[nn.Module], Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.up, self.head = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.up(self.embedding(tokens)))
        return y


def groups(recipe: Any) -> list[dict[str, Any]]:
    return [{"name": "all", "match": ["**"], "recipe": recipe}]


def convert(model: nn.Module, recipe: Any) -> None:
    dlp.convert(model, groups(recipe), worker.mesh())


def hold(model: nn.Module, recipe: Any) -> None:
    with dlp.quantized_model_init():
        convert(model, recipe)


def hold_by_region(model: nn.Module, recipe: Any) -> None:
    with dlp.quantized_model_init(recipe=recipe):
        dlp.convert(model, [{"name": "all", "match": ["up"], "style": "local"}], worker.mesh())


def freeze(model: nn.Module, recipe: Any) -> None:
    convert(model, "bf16")
    dlp.freeze(model, "**", recipe)


def freeze_only(model: nn.Module, recipe: Any) -> None:
    dlp.freeze(model, "**", recipe)


def quantize(model: nn.Module, recipe: Any) -> None:
    dlp.quantize_(model, recipe)


def set_recipe(model: nn.Module, recipe: Any) -> None:
    dlp.set_recipe(model, "**", recipe)


def attach(model: nn.Module, recipe: Any) -> None:
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.1))


def shard(model: nn.Module, recipe: Any = None) -> None:
    dlp.fully_shard(model, mesh=worker.mesh())


def tie_embedding(model: nn.Module) -> None:
    model.head.weight = model.embedding.weight


def tie_linear(model: nn.Module) -> None:
    model.head.weight = model.up.weight


def hand_made(model: nn.Module) -> None:
    with dlp.quantized_model_init():
        model.up, model.head = (dlp.Linear(64, 64, recipe="fp8_current") for _ in range(2))


def frozen(model: nn.Module) -> None:
    freeze(model, "fp8_current")


def integers(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().to(torch.int8), requires_grad=False)


def nothing(model: nn.Module) -> None:
    pass


ALL: list[Callable[[nn.Module, Any], None]] = [convert, hold, quantize, freeze]
CODES: list[Callable[[nn.Module, Any], None]] = [hold, hold_by_region, quantize, freeze]
SHARED = (
    "share a parameter, which would become quantized-only for both: untie the parameter, or leave both modules in high"
)
ALREADY = (
    r"(up|head): the weight is quantized-only already \(.*codes\): quantize a layer once, from high-precision values"
)
HISTORY = (
    r"\w+: fp8_delayed uses delayed scaling for weights, and a quantized-only weight has no amax history: choose "
    "fp8_current or another"
)
NOT_FINITE = "(up|head): the weight has NaN or Inf, which codes would hide: restore a checkpoint from before"
# Rows: function that makes the model unsupported, recipe, entry points that refuse the model, message of the refusal
TABLE: list[tuple[Change, str, list[Callable[[nn.Module, Any], None]], str]] = [
    (tie_embedding, "fp8_current", CODES, f"embedding and head {SHARED}"),
    (tie_linear, "mxfp8", CODES, f"up and head {SHARED}"),
    (lambda m: nn.utils.parametrizations.weight_norm(m.head), "fp8_current", [*ALL, hold_by_region],
     "head: weight is parametrized, for example by weight_norm; call torch.nn.utils.*, or leave the layer out"),
    (lambda m: nn.utils.spectral_norm(m.head), "fp8_current", ALL, "head: the weight is computed by a hook"),
    (nothing, "fp8_delayed", CODES, HISTORY),
    (lambda m: dlp.quantize_(m, "fp8_current"), "fp8_current", ALL, ALREADY),
    (hand_made, "mxfp8", [freeze_only], ALREADY),
    (frozen, "mxfp8", [freeze_only], ALREADY),
    (frozen, "mxfp8", [set_recipe], "which cannot be requantized to mxfp8; .* or call dlp.freeze with mxfp8 on a"),
    (lambda m: (convert(m, "bf16"), shard(m)), "bf16", [shard],
     "dlp.fully_shard was called on this FSDPModel already; call this function once for each"),
    (hand_made, "mxfp8", [convert, set_recipe], "the weights are quantized-only codes of fp8_current, which cannot be"),
    (hand_made, "", [attach], "this SGD holds up.weight, which is a quantized-only weight, .*: create the optimizer with "
        "dlp.with_master_weights"),
    (lambda m: m.to("meta"), "fp8_current", [hold, freeze], "the weight is on the meta device and has no values to quantize"),
    (lambda m: fully_shard(m, mesh=worker.mesh()["dp_shard"]), "fp8_current", [*ALL, hold_by_region],
     r"the weight is a DTensor already: call dlp.convert and dlp.quantize_ before fully_shard and other parallelism"),
    (lambda m: m.head.weight.data[0].fill_(torch.inf), "fp8_current", CODES, NOT_FINITE),
    (lambda m: m.head.weight.data[0].fill_(torch.nan), "nvfp4", CODES, NOT_FINITE),
    (integers, "fp8_current", ALL, r"head: the weight is torch.int8; layers take dense bf16, fp16 or fp32"),
    (nothing, "bf16", [quantize, freeze], "bf16 keeps weights in high precision; choose a recipe that quantizes weights"),
]  # fmt: skip


def through_all_doors() -> list[str]:
    """Return a description of each case of TABLE that an entry point does not refuse with the expected message."""
    wrong = []
    for change, recipe, doors, said in TABLE:
        for door in doors:
            model = Model().to(worker.device())
            change(model)
            found = may_raise(ValueError, door, model, recipe) or "it is not refused"
            if not re.search(said, found):
                wrong.append(f"{door.__name__}: {found}, not {said}")
    return wrong


@pytest.mark.ranks(1)
def test_doors_refuse_the_same_with_the_same_words(ranks):
    assert ranks(1).run(through_all_doors) == [[]]


def a_region_around_convert() -> tuple[dict[str, str], str, list[bool]]:
    """Convert inside a `quantized_model_init` region; a layer group sets the recipe of the head. Return the planned
    recipe of each layer, the plan, and whether the weights of up and head are quantized-only."""
    model = Model().to(worker.device())
    with dlp.quantized_model_init(recipe="fp8_current"):
        plan = dlp.convert(model, [{"name": "edges", "match": ["head"], "recipe": "bf16"}], worker.mesh())
    with torch.no_grad():
        assert model(torch.arange(8, device=worker.device())).isfinite().all()
    assert {row.name: str(row.recipe) for row in plan.layers} == {
        name: str(getattr(model, name).core.spec.recipe) for name in ("up", "head")
    }
    held = [bool(getattr(model, name).weight.isnan().all()) for name in ("up", "head")]
    return {row.name: str(row.recipe) for row in plan.layers}, str(plan), held


@pytest.mark.ranks(1)
def test_a_layer_group_decides_inside_of_a_region(ranks):
    ((recipes, plan, held),) = ranks(1).run(a_region_around_convert)
    assert recipes == {"up": "fp8_current", "head": "bf16"} and held == [True, False]
    assert "quantized_model_init (recipe)" in plan
    assert "note: the weight is quantized-only (quantized_model_init) [up]" in plan


def adopted() -> tuple[bool, bool]:
    """Whether an explicitly constructed quantized-only layer computes the same inside a converted model, and trains
    there."""
    model = Model().to(worker.device())
    with dlp.quantized_model_init():
        model.head = dlp.Linear(64, 64, recipe="mxfp8", device=worker.device())
    x = torch.randn(32, 64, device=worker.device())
    before = model.head(x).detach()
    convert(model, "mxfp8")
    same = torch.equal(model.head(x), before)
    optimizer = dlp.with_master_weights(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    dlp.attach(model, optimizer)
    model.head(x).square().mean().backward()
    optimizer.step()
    return same, not torch.equal(model.head(x), before)


@pytest.mark.ranks(1)
def test_held_layers_join_a_converted_model(ranks):
    assert ranks(1).run(adopted) == [(True, True)]
