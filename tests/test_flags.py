"""A cast reports whether its input was finite, and the step boundary reports the layer. No ranks."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.parallel.linear.step import CastName, Flags
from dlp.parallel.model import checks
from dlp.quant.quantizer import KeepHighPrecision, flagged, one_read
from dlp.quant.recipe import load
from tests.emulated import emulated, emulation  # noqa: F401
from tests.ops_models import Watched
from tests.paired_models import K, M, check_used, values
from tests.quantizers import QUANTIZERS, a_slot, matrix, origin
from tests.recorded_casts import RecordingQuantizer
from tests.refusals import must_raise

CASTING = [quantizer for quantizer in QUANTIZERS if quantizer != KeepHighPrecision()]
RECIPES = ("fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
FEATURES, TOKENS = 64, 32


def a_flag() -> Tensor:
    return torch.zeros(())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, torch.finfo(torch.bfloat16).max], ids=str)
@pytest.mark.parametrize("by", ["reference", "kernels"])
@pytest.mark.parametrize("quantizer", CASTING, ids=str)
def test_a_cast_sets_its_flag_where_a_value_is_not_finite(quantizer: Any, by: str, value: float):
    x = matrix(1, 128, 128)
    x[77, 31] = value
    x[3, 5] = -torch.finfo(torch.bfloat16).max  # finite, although a sum of such values overflows
    both, finite = one_read(quantizer, quantizer), abs(value) < torch.inf
    rowwise, columnwise, together = a_flag(), a_flag(), a_flag()
    with emulation() if by == "kernels" else nullcontext():
        for made, flag in ((x, rowwise), (x.t(), columnwise)):
            quantizer.cast(
                made, quantizer.observe(made), slot=a_slot(), at=origin(made), **flagged(quantizer, made, flag)
            )
        if both is not None:
            at = origin(x), origin(x.t())
            both.cast(x, both.observe(x), slot=a_slot(), at=at, **flagged(quantizer, x, together))
    for flag in (rowwise, columnwise, together) if both else (rowwise, columnwise):
        assert flag.isnan() != finite


@dataclass(frozen=True)
class Rounding(KeepHighPrecision):
    """User-defined quantizer without a parameter `flag`."""

    format: Any = load("fp8_current").x.rowwise.format

    def cast(self, x: Tensor, amax: Tensor | None, *, out: Any = None) -> Any:  # type: ignore[override]
        return self.format.fill(out, x.to(torch.float8_e4m3fn), torch.ones(()))


def test_for_a_quantizer_that_takes_no_flag_x_is_looked_at_and_high_precision_is_left_alone():
    x, flag = torch.tensor([[1.0, torch.inf]]), a_flag()
    assert flagged(KeepHighPrecision(), x, flag) == {} and flag == 0
    assert flagged(Rounding(), x, None) == {}
    assert flagged(Rounding(), x, flag) == {} and flag.isnan()
    assert flagged(Rounding(), torch.ones(0, 4), flag := a_flag()) == {} and flag == 0
    inner = load("fp8_current").x.rowwise
    assert flagged(RecordingQuantizer(inner, []), x, flag) == {"flag": flag}


def test_flags_lie_layer_after_layer_stay_where_they_are_and_begin_anew_with_a_step():
    made, cpu = Flags(), torch.device("cpu")
    made.reserve(("q", "k"), cpu, 3)
    first_piece = made.now[0].data_ptr()
    made.reserve(("o",), cpu, 3)
    made.reserve(("late",), cpu, 4)
    assert list(map(str, filter(None, made.names)))[:9] == [
        "w of q", "w of k", "x of q", "y of q", "y of k", "dx of q", "dy of q", "dy of k", "w of o",
    ]  # fmt: skip
    assert made.now[0].data_ptr() == first_piece and len(made.now) == 2
    for name in (("late", "w"), ("q", "dy"), ("o", "dx")):
        made.views[*name, cpu].fill_(torch.nan)
    found = [flag for closed in made.now for flag in closed.tolist()]
    assert (
        str(checks.first_bad(made.names, found, 3))
        == "w of late held a NaN or Inf when it was cast on rank 3, in forward"
    )
    made.views["late", "w", cpu].zero_()
    found = [flag for closed in made.now for flag in closed.tolist()]
    assert str(checks.first_bad(made.names, found, 0)) == (
        "dx of o held a NaN or Inf when it was cast on rank 0, the first of 2 in backward; all x and w that were cast "
        "were finite"
    )
    made.close()
    assert not any(now.isnan().any() for now in made.now)
    found = [flag for closed in made.closed for flag in closed.tolist()]
    assert checks.bad_casts(made.names, found)[0][1] == CastName("dy", "q")
    made.close()
    assert checks.first_bad(made.names, [flag for closed in made.closed for flag in closed.tolist()], 0) is None


def model_of(recipe: Any, on_nonfinite: str = "raise") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(dlp.Linear(FEATURES, FEATURES, recipe=recipe) for _ in range(3)))
    model.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dlp.attach(model, model.optimizer, on_nonfinite=on_nonfinite)
    return model


def step(model: Any, into: str = "", value: float = torch.inf) -> None:
    """Run one optimizer step. Write `value` into x or dy, or into the gradient of the weight, so that the step boundary
    casts a weight that is not finite. `into`: "x", "dy", "w", or "" for none."""
    x, dy = torch.randn(TOKENS, FEATURES), torch.randn(TOKENS, FEATURES)
    if into in ("x", "dy"):
        {"x": x, "dy": dy}[into][7, 3] = value
    model(x).backward(dy)
    if into == "w":
        model[1].weight.grad[2, 2] = value
    model.optimizer.step()
    model.optimizer.zero_grad()


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("into", "of", "late"), [("x", "x of 0", 0), ("dy", "dy of 2", 0), ("w", "w of 1", 1)], ids=["x", "dy", "w"]
)
def test_an_inf_is_told_one_step_late(recipe: str, into: str, of: str, late: int, value: float):
    model = model_of(recipe)
    for i in (1, 2, 3):
        step(model, into if i == 3 else "", value)
    if late:  # the gradient of step 3 changes the weight that is cast for step 4
        step(model)
    said = must_raise(FloatingPointError, step, model)
    assert said.startswith(f"step {3 + late}: {of} held a NaN or Inf when it was cast on rank 0, ")
    assert ("; all x and w that were cast were finite" in said) == (into == "dy")
    assert said.endswith("; to continue after such a step, use dlp.attach(..., on_nonfinite='warn')")


def test_a_warning_goes_on_and_what_is_ignored_can_be_asked_for(caplog: pytest.LogCaptureFixture):
    model = model_of("fp8_block", "warn")
    with caplog.at_level(logging.WARNING, "dlp"):
        for into in ("x", "", "", ""):
            step(model, into)
    (said,) = [record.message for record in caplog.records]
    assert said == "step 1: x of 0 held a NaN or Inf when it was cast on rank 0, in forward"

    model = model_of("fp8_block", "ignore")
    assert dlp.not_finite(model) == []
    for into in ("x", "dy"):
        step(model, into)
    assert dlp.not_finite(model) == ["dy of 2"]
    model(torch.full((TOKENS, FEATURES), torch.inf))
    assert dlp.not_finite(model) == ["x of 0", "dy of 2"]

    with pytest.raises(ValueError, match=r"on_nonfinite must be one of raise, warn, ignore; got 'stop'"):
        model_of("bf16", "stop")


def test_high_precision_has_no_flags():
    model = model_of("bf16")
    for into in ("x", "dy", ""):
        step(model, into)
    assert model.dlp_session.flags.now == []


@pytest.mark.parametrize("how", ["recompute", "inference first", "opaque", "weights cast at use"])
def test_however_a_layer_is_called(how: str):
    torch.manual_seed(0)
    model: Any = nn.Sequential(dlp.Linear(FEATURES, FEATURES, recipe="fp8_current"), nn.SiLU())
    optimizer = torch.optim.SGD(model.parameters())
    dlp.attach(model, optimizer, weight_cache="forward" if how == "weights cast at use" else "step")
    x = torch.randn(TOKENS, FEATURES)
    if how == "inference first":
        with torch.inference_mode():
            model(x)
    for i in range(2):
        given = x.clone().requires_grad_()
        with Watched() if how == "opaque" else nullcontext():
            y = (
                torch.utils.checkpoint.checkpoint(model, given, use_reentrant=False)
                if how == "recompute"
                else model(given)
            )
        y.sum().backward()
        if i == 0 and how == "weights cast at use":
            model[0].weight.data[3, 3] = torch.inf
            dlp.end_step(model)
        elif i == 0:
            optimizer.step()
            x[1, 1] = torch.inf
    assert dlp.not_finite(model)[0] == ("w of 0" if how == "weights cast at use" else "x of 0")


@pytest.mark.parametrize("kind", ["alone", "siblings"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block"])
def test_programs_tell_it_too(recipe: str, kind: str, emulated: None):  # noqa: F811
    """Replays also report values that are not finite, although all values were finite during the capture."""
    sizes = (K, K) if kind == "siblings" else K
    model: Any = nn.Sequential(dlp.Linear(K, sizes, recipe=recipe)).bfloat16()
    dlp.attach(model, torch.optim.SGD(model.parameters()), on_nonfinite="ignore")
    dlp.end_step(model)
    name = "0.weight_0" if kind == "siblings" else "0"

    def run(x: Tensor, into_dy: bool) -> list[str]:
        for flag in model.dlp_session.flags.now:
            flag.zero_()
        ys = model(x.requires_grad_())
        ys = ys if isinstance(ys, tuple) else (ys,)
        dys = [values(3, *y.shape) for y in ys]
        dys[0][9, 9] = torch.inf if into_dy else 1.0
        torch.autograd.backward(ys, dys)
        return dlp.not_finite(model)

    for _ in range(3):
        assert run(values(1, M, K), False) == []
    check_used(model, "forward", "backward")
    bad = values(1, M, K)
    bad[100, 100] = -torch.inf
    assert run(bad, False)[0] == f"x of {name}"
    assert run(values(1, M, K), True)[0] == f"dy of {name}"
    check_used(model, "forward", "backward")
