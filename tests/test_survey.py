"""Modules that conversion refuses, skips or warns about, according to the plan, without ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlp.parallel.model.plan import Plan, make_plan
from tests.refusals import must_raise, refuses


class LoRA(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x))


class FakeQuantized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.round(), self.bias)


class Conv1D(nn.Module):
    """GPT-2's linear with a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class ReadsList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(16)) for _ in range(2)])
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x * self.gains[0] * self.gains[1])


def block(**modules: nn.Module) -> nn.Module:
    """Return a model with one block, which contains a plain linear and the given modules."""
    return nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(16, 16), **modules})])})


def changed(change: Callable[[nn.Linear], Any]) -> nn.Linear:
    linear = nn.Linear(16, 16)
    change(linear)
    return linear


def patched(linear: nn.Linear) -> None:
    linear.forward = partial(linear.forward)  # type: ignore[method-assign]


def own_parameter(linear: nn.Linear) -> None:
    class Mine(nn.Parameter):
        pass

    linear.weight = Mine(linear.weight.detach())


def with_gradient(linear: nn.Linear) -> None:
    linear(torch.ones(1, 16)).sum().backward()


def plan(model: nn.Module, *groups: dict[str, Any], tp: int = 2) -> Plan:
    return make_plan(model, [{"name": str(i), **group} for i, group in enumerate(groups)], tp)


FP8 = {"match": "blocks.**", "recipe": "fp8_current"}
LEAVE = "leave the module out by a layer group with convert = false"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (LoRA(), "a LoRA is not exactly nn.Linear, and conversion would replace its own forward: " + LEAVE),
        (FakeQuantized(16, 16), "a FakeQuantized is not exactly nn.Linear"),
        (nn.LazyLinear(16), "the parameter has no shape yet: call the model once before dlp.convert"),
        (changed(nn.utils.parametrizations.weight_norm), "weight is parametrized, for example by weight_norm; call torch."),
        (changed(nn.utils.parametrizations.spectral_norm), "weight is parametrized"),
        (changed(nn.utils.spectral_norm), "the weight is computed by a hook"),
        (changed(patched), "its forward was replaced on the instance; replace it after dlp.convert, or " + LEAVE),
        (changed(own_parameter), "the parameter is a Mine, which conversion would replace by a plain parameter; " + LEAVE),
        (changed(with_gradient), "the parameter has a gradient, which would be lost; call optimizer.zero_grad() before "
            "dlp.convert"),
        (
            changed(lambda linear: linear.weight.register_hook(print)),
            "the parameter has gradient hooks, which would be lost; register them after dlp.convert",
        ),
        (
            changed(lambda linear: linear.bias.register_post_accumulate_grad_hook(print)),
            "the parameter has gradient hooks, which would be lost; register them after dlp.convert",
        ),
        (nn.MultiheadAttention(16, 2), "a MultiheadAttention reads the weights of its linears instead of calling them"),
        (nn.TransformerEncoderLayer(16, 2), "a TransformerEncoderLayer reads the weights of its linears"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value[:30],
)  # fmt: skip
def test_a_module_that_would_compute_something_else_is_refused_by_name(module, message):
    said = must_raise(ValueError, plan, block(odd=module))
    assert said.split(": ", 1)[0].startswith("blocks.0.odd") and message in said


def test_parameters_that_another_module_reads_are_refused_by_its_name():
    assert must_raise(ValueError, plan, block(odd=ReadsList())).startswith(
        "blocks.0.odd.gains: a ParameterList has no forward, so that blocks.0.odd reads its parameters, and would read "
        "DTensors: leave the module out by a layer group with convert = false"
    )
    left = plan(block(odd=ReadsList()), {"match": "blocks.*.odd", "convert": False})
    assert left.left_out["blocks.0.odd"] == ("blocks.0.odd.gains", "blocks.0.odd.proj")
    assert [row.name for row in left.layers] == ["blocks.0.up"]


def test_a_group_takes_another_class_of_linear_all_the_same():
    anyway = {"match": "blocks.**", "convert": True}
    assert [row.name for row in plan(block(odd=FakeQuantized(16, 16)), anyway).layers] == [
        "blocks.0.up",
        "blocks.0.odd",
    ]
    with refuses(r"blocks.0.odd: a LoRA has parameters other than weight and bias \(a.weight\)"):
        plan(block(odd=LoRA()), anyway)


def test_what_is_left_out_stands_in_the_plan():
    model = block(odd=LoRA(), mha=nn.MultiheadAttention(16, 2))
    made = plan(
        model, {"match": ["blocks.0.odd", "blocks.0.mha"], "convert": False}, {"match": "**", "recipe": "fp8_current"}
    )
    assert [row.name for row in made.layers] == ["blocks.0.up"]
    assert {row.name: row.style for row in made.others} == dict.fromkeys(
        [*(f"blocks.0.odd{inner}" for inner in ("", ".a", ".b")), "blocks.0.mha", "blocks.0.mha.out_proj"], "left out"
    )
    assert "LoRA" in str(made) and "left out" in str(made)


def test_the_last_group_decides_what_is_left_out():
    nothing_but = [{"match": "**", "convert": False}, {"match": "blocks.*.up", "convert": True, "style": "column"}]
    made = plan(block(odd=LoRA()), *nothing_but)
    assert [(row.name, row.style) for row in made.layers] == [("blocks.0.up", "column")]
    with refuses("layer group '0': the modules that the group leaves out have no parameters: blocks.0.act"):
        plan(block(act=nn.GELU()), {"match": "blocks.*.act", "convert": False})


@pytest.mark.parametrize("setting", [{"recipe": "fp8_current"}, {"overlap": "serial"}, {"siblings": True}], ids=str)
def test_a_setting_that_reaches_no_linear_is_refused(setting):
    group = {"match": ["blocks.*.{odd,norm}"], **setting}
    assert must_raise(ValueError, plan, block(odd=Conv1D(), norm=nn.LayerNorm(16)), group) == (
        f"layer group '0': {next(iter(setting))} is for linears, and the group matches none: the matched modules "
        f"(blocks.0.odd, ...) are Conv1D, LayerNorm; replace these by nn.Linear, or remove {next(iter(setting))} from the group"
    )


def test_matrices_that_a_recipe_does_not_reach_are_warned_of():
    warning = "the recipe of group '0' does not apply to blocks.0.odd and 1 more: a Conv1D is not an nn.Linear"
    made = plan(block(odd=Conv1D(), more=Conv1D(), norm=nn.LayerNorm(16), table=nn.Embedding(4, 16)), FP8)
    assert made.warnings == (warning,) and f"warning: {warning}" in str(made)


def test_nvfp4_in_the_last_block_is_warned_of():
    def made(*groups):
        blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(16, 16), "down": nn.Linear(16, 16)}) for _ in range(3))
        return plan(
            nn.ModuleDict({"blocks": blocks, "head": nn.Linear(16, 16)}), {"match": "**", "recipe": "nvfp4"}, *groups
        )

    said = (
        "nvfp4 covers 2 of 2 linears of the last block, blocks.2: the published runs keep the last blocks in bf16; add a group "
        'with match = ["blocks.-1.**"] and recipe = "bf16"'
    )
    assert made().warnings == (said,) and f"warning: {said}" in str(made())
    assert made({"match": "blocks.-1.**", "recipe": "bf16"}).warnings == ()
    assert made({"match": "blocks.-1.down", "recipe": "mxfp8"}).warnings == (said.replace("2 of 2", "1 of 2"),)
    assert made({"match": "blocks.**", "recipe": "mxfp8"}).warnings == ()


def test_a_group_may_name_a_linear_by_any_of_its_names():
    linear = nn.Linear(16, 16)
    model = nn.ModuleDict({"first": linear, "second": linear})
    for name in ("first", "second"):
        assert [(row.name, row.style) for row in plan(model, {"match": name, "style": "column"}).layers] == [
            ("first", "column")
        ]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"scale_grad_by_freq": True}, "an embedding with scale_grad_by_freq cannot be sharded along the vocabulary; "
            "set style"),
        ({"sparse": True}, "an embedding with sparse gradients cannot be a DTensor: replace the module by an embedding "
            "without max_norm and sparse before dlp.convert"),
        ({"max_norm": 1.0}, "an embedding with max_norm, which rewrites its weight in forward, cannot be a DTensor"),
    ],
    ids=str,
)  # fmt: skip
def test_an_embedding_that_tp_cannot_cut_is_refused(option, message):
    model = nn.ModuleDict({"table": nn.Embedding(8, 4, **option)})
    assert must_raise(ValueError, plan, model, {"match": "table", "style": "column"}).startswith(f"table: {message}")
