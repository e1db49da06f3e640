"""Users' quantizers and formats in parallel layers: the format in which operands are sent, decoded operands, rounded
results, and logged differences from the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dlp
from dlp.parallel.linear.modules import ColumnParallelLinear, Linear, RowParallelLinear
from dlp.parallel.model.session import session_of
from dlp.quant.custom import CustomRecipe
from dlp.quant.fp8 import CurrentScaling, DelayedScaling
from dlp.quant.quantizer import KeepHighPrecision
from dlp.quant.recipe import GEMMS, load
from dlp.quant.tensor import Format, Part, QuantizedTensor
from tests import pool as worker
from tests.cases import matrix, nightly
from tests.metrics import assert_bit_equal, assert_close, relative_error
from tests.net import net, train, weights
from tests.observe import Collectives

OPERANDS = ("linear_input", "linear_weight", "linear_grad_output")


@dataclass(frozen=True)
class Silent(Format):
    """Format that stores bf16 values unchanged, with blocks of 8 x 16. It does not declare how shards of its parts
    concatenate, so operands cannot be gathered quantized."""

    name = "silent"
    block = (8, 16)
    parts = (Part("values", torch.bfloat16),)

    def part_shapes(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        return (shape,)

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        return q.payload.to(dtype)


@dataclass(frozen=True)
class SilentCast:
    format: Format = Silent()
    reduces: tuple[int, ...] = ()

    def observe(self, x: Tensor) -> Tensor | None:
        return None

    def cast(self, x: Tensor, amax: Tensor | None, **_: Any) -> QuantizedTensor:
        return QuantizedTensor(self.format, (x.bfloat16(),))


def silent(role: str) -> Any:
    return SilentCast() if role in OPERANDS else None


def trained(recipe: str, sizes: dict[str, int], fsdp: bool) -> tuple[dict[str, Tensor], str]:
    mesh = worker.mesh(**sizes)
    made = {"silent": CustomRecipe(silent), "mixed": CustomRecipe(mixed)}[recipe]
    model = net(made, mesh, fsdp=fsdp)
    train(model, mesh, range(3))
    return weights(model), "\n".join(sorted(session_of(model).noted))


def mixed(role: str, layer: str) -> Any:
    """Return the quantizer of a role: current scaling in the first block, delayed scaling in the second block, and E5M2
    rounding of dx in both."""
    if role == "linear_grad_input":
        return CurrentScaling("e5m2")
    if role not in OPERANDS:
        return None
    return CurrentScaling() if layer.startswith("blocks.0") else DelayedScaling(amax_history_len=2)


def moved(after: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(after)])


def initial(sizes: dict[str, int]) -> dict[str, Tensor]:
    return weights(net("bf16", worker.mesh(**sizes)))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["silent", nightly("mixed")])
def test_a_custom_recipe_trains_under_tp_sp_and_fsdp_as_on_one_rank(ranks, recipe):
    (start,) = ranks(1).run(initial, {"tp": 1})
    ((one, _),) = ranks(1).run(trained, recipe, {"tp": 1}, False)
    for world, sizes, fsdp in ((2, {"tp": 2}, False), (4, {"tp": 2, "dp_shard": 2}, True)):
        for result, noted in ranks(world).run(trained, recipe, sizes, fsdp):
            bound = 0.02 if recipe == "silent" else 0.1  # with `mixed`, shards have other amaxes than full tensors
            assert_close(moved(result, start), moved(one, start), bound, f"{recipe} {sizes}")
            assert ("the parts of silent do not declare how they concatenate" in noted) == (recipe == "silent")


def travelling(recipe: Any, tokens: int) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Run forward and backward of both sequence-parallel styles (column and row) on 2 ranks, and of an unsharded layer.
    Return the relative differences of y, dx and dw from the unsharded layer, the logged differences from the plan, and
    the launched collectives."""
    tp = worker.mesh(tp=2)["tp"]
    device = worker.device()
    x, w, dy = (matrix("gauss", rows, 64, seed).to(device) for rows, seed in ((tokens, 1), (64, 2), (tokens, 3)))
    whole = step(Linear(64, 64, recipe=recipe, device=device), x, w, dy)
    said, errors, launched = [], {}, []
    for cls, cut_x, cut_w, cut_dy in ((ColumnParallelLinear, 0, 0, 1), (RowParallelLinear, 1, 1, 0)):
        layer = cls(64, 64, tp=tp, sequence_parallel=True, recipe=recipe, device=device)
        mine = [t.chunk(2, dim)[tp.get_local_rank()].contiguous() for t, dim in ((x, cut_x), (w, cut_w), (dy, cut_dy))]
        with Collectives() as seen:
            part = step(layer, *mine)
        launched += seen.names
        cuts = {"y": cut_dy, "dx": cut_x, "dw": cut_w}
        expected = {name: t.chunk(2, cuts[name])[tp.get_local_rank()] for name, t in whole.items()}
        errors |= {f"{cls.__name__} {name}": torch.tensor(relative_error(part[name], expected[name])) for name in part}
        said += sorted(layer.core.session.noted)
    return errors, said, launched


def step(layer: Linear, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    local = getattr(layer.weight, "_local_tensor", layer.weight)
    with torch.no_grad():
        local.copy_(w)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert layer.weight.grad is not None and x.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw": getattr(layer.weight.grad, "_local_tensor", layer.weight.grad)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "unit"), [("fp8_block", 128), ("mxfp8", 32), ("nvfp4", 16), ("fp8_current", None), ("bf16", None)]
)
def test_odd_tokens_travel_in_high_precision_alike_on_every_rank_and_it_is_said(ranks, name, unit):
    recipe = load(name, amax_scope="all", **({"disable_stochastic_rounding": True} if name == "nvfp4" else {}))
    for errors, said, _ in ranks(2).run(travelling, recipe, 2 * 43):
        for what, error in errors.items():
            assert error < 2**-13, f"{name} {what}: {error}"  # on two ranks, sums of FP8 units keep 13 bits
        expected = [
            f"{t} columnwise ({name}) is gathered in high precision: 43 tokens per rank are not a multiple of {unit}"
            for t in ("x", "dy")
        ]
        assert [text.partition(", the block")[0] for text in said] == (expected if unit else [])


@pytest.mark.ranks(2)
def test_whole_blocks_travel_quantized_and_nothing_is_said(ranks):
    for errors, said, _ in ranks(2).run(travelling, load("mxfp8"), 2 * 64):
        assert said == [] and max(errors.values()) < 1e-6


@pytest.mark.ranks(2)
def test_a_silent_format_travels_in_high_precision_with_as_many_transfers_as_bf16(ranks):
    recipe = CustomRecipe(silent).for_layer("any")
    for (errors, said, launched), (_, _, of_bf16) in zip(
        ranks(2).run(travelling, recipe, 2 * 43), ranks(2).run(travelling, load("bf16"), 2 * 43), strict=True
    ):
        assert len(said) == 4 and all(
            "the parts of silent do not declare how they concatenate" in text for text in said
        )
        assert launched == of_bf16
        assert max(errors.values()) < 2e-3


def plan_of(factory: Any) -> str:
    group = {"name": "all", "match": ["*"], "style": "row", "sequence_parallel": True, "recipe": CustomRecipe(factory)}
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64)})
    return str(dlp.make_plan(model, [group], 2, batch=(2, 64)))


def test_the_plan_says_what_travels_what_is_decoded_and_what_is_rounded():
    text = plan_of(silent)
    assert (
        "note: dy rowwise is gathered in high precision: the parts of silent do not declare how they concatenate [a]"
        in text
    )
    text = plan_of(lambda role: CurrentScaling() if role in ("linear_weight", "linear_output") else None)
    assert "note: fprop decodes w (fp8_tensor[e4m3]): the other operand is in high precision [a]" in text
    assert "note: dgrad decodes w" in text and "wgrad decodes" not in text
    assert "note: y is rounded to fp8_tensor[e4m3] and returned decoded [a]" in text


def test_a_gemm_with_one_high_precision_operand_decodes_the_other():
    factory = {"linear_weight": CurrentScaling()}.get
    layer = Linear(64, 64, recipe=CustomRecipe(factory))
    x, w, dy = (matrix("gauss", 64, 64, seed) for seed in (1, 2, 3))
    found = step(layer, x, w, dy)
    quantizer = CurrentScaling()
    decoded = quantizer.cast(w, quantizer.observe(w)).dequantize()
    assert_close(found["y"], x @ decoded.t(), 1e-6)
    assert_close(found["dx"], dy @ decoded, 1e-6)
    assert_close(found["dw"], dy.t() @ x, 1e-6)


@pytest.mark.parametrize("role", ["linear_output", "linear_grad_input"])
def test_results_are_rounded_where_a_role_asks_for_it(role):
    layers = [Linear(64, 64, recipe=CustomRecipe({role: answer}.get)) for answer in (None, CurrentScaling("e5m2"))]
    x, w, dy = (matrix("gauss", 64, 64, seed) for seed in (1, 2, 3))
    plain, rounded = (step(layer, x, w, dy) for layer in layers)
    changed = {"linear_output": "y", "linear_grad_input": "dx"}[role]
    quantizer = CurrentScaling("e5m2")
    expected = quantizer.cast(plain[changed], quantizer.observe(plain[changed])).dequantize()
    assert not torch.equal(rounded[changed], plain[changed])
    for name in plain:
        assert_bit_equal(rounded[name], expected if name == changed else plain[name], name)


def test_out_dtypes_are_those_of_the_results_and_sums():
    x, w, dy = (matrix("gauss", 64, 64, seed).bfloat16() for seed in (1, 2, 3))
    layer = Linear(
        64, 64, recipe=load("fp8_current", out_dtype={"fprop": "fp32", "dgrad": "fp32"}), dtype=torch.bfloat16
    )
    found = step(layer, x, w, dy.float())
    plain = step(Linear(64, 64, recipe=load("fp8_current"), dtype=torch.bfloat16), x, w, dy)
    assert (found["y"].dtype, found["dx"].dtype, found["dw"].dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert_bit_equal(found["y"].bfloat16(), plain["y"])
    assert not torch.equal(found["y"], plain["y"].float())


def test_a_factory_is_asked_for_every_role_and_told_the_layer():
    asked = []

    def factory(role: str, layer: str) -> Any:
        asked.append((layer, role))
        return KeepHighPrecision()

    model = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64)})
    plan = dlp.make_plan(model, [{"name": "all", "match": ["*"], "recipe": CustomRecipe(factory)}], 1)
    assert asked == [("a", role) for role in (*OPERANDS, "linear_output", "linear_grad_input")]
    assert all(plan.layers[0].recipe.operands(gemm) == (KeepHighPrecision(), KeepHighPrecision()) for gemm in GEMMS)
