"""What quantizers declare beside observe and cast, what is refused, and what wrappers and subclasses hand on. No ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import dlp
from dlp.quant.custom import CustomRecipe
from dlp.quant.fp8 import FORMATS, CurrentScaling, DelayedScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import QuantizerCaps, SlotOptions, Wrapped, caps_of, one_read
from dlp.quant.recipe import Recipe, both, load
from dlp.quant.stats import Measured, StatsTable, measured, plain, summary
from dlp.quant.tensor import QuantizedTensor
from tests.quantizers import a_slot, every_quantizer, matrix


@dataclass(frozen=True)
class Mine:
    """A user's, that declares what it is told to, whether or not it has it."""

    caps: Any = None
    format: ClassVar[Any] = FORMATS["e4m3"]
    reduces: ClassVar[tuple[int, ...]] = ()

    def observe(self, x: Tensor) -> Tensor | None:
        return None

    def cast(self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None) -> QuantizedTensor:
        return self.format.fill(out, x.to(torch.float8_e4m3fn), torch.ones(()))


@dataclass(frozen=True)
class Bare:
    """A user's, that declares nothing."""

    format = FORMATS["e4m3"]
    reduces = ()
    observe, cast = Mine.observe, Mine.cast


def test_a_quantizer_that_declares_nothing_has_the_plain_default():
    assert caps_of(Bare()) == QuantizerCaps()
    assert one_read(Bare(), Bare()) is None
    y = dlp.Linear(16, 16, recipe=CustomRecipe(lambda role: Bare() if role == "linear_input" else None))(
        torch.ones(4, 16)
    )
    assert y.shape == (4, 16)


def recipes_with(quantizer: Any) -> list[Any]:
    """Every place of a recipe that a quantizer can be in."""
    current = load("fp8_current")
    return [lambda name=name: replace(current, **{name: both(quantizer)}) for name in ("x", "w", "dy")] + [
        lambda: replace(current, y=quantizer),
        lambda: CustomRecipe(lambda role: quantizer if role == "linear_grad_input" else None).for_layer("any"),
    ]


@pytest.mark.parametrize(
    ("caps", "said"),
    [
        (QuantizerCaps(one_read=True), "declares one_read and has no method both: add it, or do not declare it"),
        (QuantizerCaps(one_launch=True), "declares one_launch and has no method batch"),
        (QuantizerCaps(values=True), "declares values and has no method values"),
        (QuantizerCaps(slot=SlotOptions(448.0)), "declares slot and its cast takes no argument slot"),
        (QuantizerCaps(origin=True), "declares origin and its cast takes no argument at"),
        (QuantizerCaps(flag=True), "declares flag and its cast takes no argument flag"),
        (QuantizerCaps(one_read_with=(CurrentScaling(),)), "declares one_read_with and not one_read"),
        (QuantizerCaps(op="cast_int6"), "declares op 'cast_int6', which the table of kernels lacks"),
        ({"flag": True}, "its caps must be a QuantizerCaps(...); got {'flag': True}"),
    ],
)
def test_what_is_declared_and_not_there_is_refused_by_name(caps: Any, said: str):
    for build in recipes_with(Mine(caps)):
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            build()
        assert str(caught.value).startswith("Mine(caps=")


@dataclass(frozen=True)
class HalfBoth(CurrentScaling):
    """Casts that take a flag, and a `both` that takes none."""

    caps: ClassVar[QuantizerCaps] = CurrentScaling.caps

    def both(
        self, x: Tensor, amaxes: Any, *, columnwise: Any, outs: Any = None, slot: Any = None, at: Any = None
    ) -> Any:
        raise AssertionError


def test_both_takes_what_casts_take():
    with pytest.raises(ValueError, match="HalfBoth.* declares flag and its both takes no argument flag"):
        replace(load("fp8_current"), x=both(HalfBoth()))


@dataclass(frozen=True)
class Half(CurrentScaling):
    """Half of the range; it declares nothing of its own."""

    def cast(self, x: Tensor, amax: Tensor | None, **more: Any) -> QuantizedTensor:
        assert amax is not None
        return super().cast(x, 2 * amax, **more)


@dataclass(frozen=True)
class OneReadHalf(Half):
    caps: ClassVar[QuantizerCaps] = replace(CurrentScaling.caps, one_launch=False)
    reads: list[str] = field(default_factory=list, compare=False)

    def both(self, x: Tensor, amaxes: Any, **more: Any) -> Any:
        self.reads.append("both")
        amax = 2 * amaxes[0]
        return super().both(x, (amax, amax), **more)


def test_a_subclass_that_casts_otherwise_is_not_passed_by():
    """Its base's `both` and `batch` know nothing of its cast."""
    assert caps_of(Half()) == QuantizerCaps(flag=True, op="cast_fp8_tensor")
    assert caps_of(DelayedSubclass()) == QuantizerCaps(flag=True, op="cast_fp8_tensor", slot=DelayedScaling().caps.slot)
    x, w, dy = (matrix(seed, 32, 32).float() for seed in (1, 2, 3))
    ys = {}
    declares = OneReadHalf()
    for name, quantizer in (("inherits", Half()), ("declares", declares), ("base", CurrentScaling())):
        layer = dlp.Linear(
            32, 32, recipe=replace(load("fp8_current"), name="own", x=both(quantizer), w=both(quantizer))
        )
        with torch.no_grad():
            layer.weight.copy_(w)
        given = x.clone().requires_grad_()
        y = layer(given)
        y.backward(dy)
        ys[name] = torch.cat([y.detach(), given.grad, layer.weight.grad])  # type: ignore[list-item]
    assert torch.equal(ys["inherits"], ys["declares"]) and not torch.equal(ys["inherits"], ys["base"])
    assert declares.reads


class DelayedSubclass(DelayedScaling):
    pass


@every_quantizer
def test_what_is_around_a_quantizer_declares_what_its_casts_take(quantizer: Any):
    own = caps_of(quantizer)
    table = StatsTable(["l.x"], torch.device("cpu"))
    for outer in (Wrapped(quantizer), Measured(quantizer, "l.x", table), Measured(Wrapped(quantizer), "l.x", table)):
        assert caps_of(outer) == own.of_casts()
        assert (caps_of(outer).slot, caps_of(outer).origin, caps_of(outer).flag) == (own.slot, own.origin, own.flag)
        assert not any((caps_of(outer).one_read, caps_of(outer).one_launch, caps_of(outer).pure, caps_of(outer).lazy))


@dataclass(frozen=True)
class Doubled(Wrapped):
    def cast(self, x: Tensor, amax: Tensor | None, **more: Any) -> QuantizedTensor:
        return self.inner.cast(x, amax, **more)


def test_what_is_transformed_is_measured_so_around_a_wrapper_too():
    x, quantizer = matrix(3, 32, 32), Nvfp4Scaling(rht=True)
    found = []
    for each in (quantizer, Doubled(quantizer)):
        table = StatsTable(["l.x"], torch.device("cpu"))
        Measured(each, "l.x", table).cast(x, quantizer.observe(x), slot=a_slot())
        found.append(summary(table.sums[0], table.maxima[0]))
    assert found[0] == found[1] and found[0]["sqnr_db"] > 8


def test_measuring_stops_and_a_users_wrapper_stays():
    recipe: Recipe = replace(load("fp8_current"), x=both(Doubled(CurrentScaling())))
    table = StatsTable([f"l.{name}" for name in ("x", "w", "dy")], torch.device("cpu"))
    assert plain(measured(recipe, "l", table)) == recipe == plain(recipe)


def test_the_page_on_custom_recipes_has_a_row_for_each_member():
    page = (Path(__file__).parent.parent / "docs" / "custom-recipes.md").read_text()
    lacking = [member.name for member in fields(QuantizerCaps) if f"\n| `{member.name}` |" not in page]
    assert not lacking
