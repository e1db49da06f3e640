"""Declared capabilities of quantizers: wrong declarations are refused, and wrappers and subclasses have the right
capabilities. No ranks."""

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
from dlp.quant.quantizer import QuantizerCaps, SlotOptions, Wrapped, batches, caps_of, offers, one_read, takes_flag
from dlp.quant.recipe import Recipe, both, load
from dlp.quant.stats import Measured, StatsTable, measured, plain, summary
from dlp.quant.tensor import QuantizedTensor
from tests.quantizers import a_slot, every_quantizer, matrix


@dataclass(frozen=True)
class Mine:
    """User-defined quantizer that declares the given capabilities, even without the methods that they require."""

    caps: Any = None
    format: ClassVar[Any] = FORMATS["e4m3"]
    reduces: ClassVar[tuple[int, ...]] = ()

    def observe(self, x: Tensor) -> Tensor | None:
        return None

    def cast(self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None) -> QuantizedTensor:
        return self.format.fill(out, x.to(torch.float8_e4m3fn), torch.ones(()))


@dataclass(frozen=True)
class Bare:
    """User-defined quantizer that declares nothing."""

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
    """Return functions that each construct a recipe with the quantizer for one of x, w, dy, y and dx."""
    current = load("fp8_current")
    return [lambda name=name: replace(current, **{name: both(quantizer)}) for name in ("x", "w", "dy")] + [
        lambda: replace(current, y=quantizer),
        lambda: CustomRecipe(lambda role: quantizer if role == "linear_grad_input" else None).for_layer("any"),
    ]


class OnlyBoth(Mine):
    def both(self, x: Tensor, amaxes: Any, **more: Any) -> Any:
        raise AssertionError


class OnlyBothGrads(Mine):
    def both_grads(self, grads: Any, amaxes: Any, slots: Any, flags: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("quantizer", "said"),
    [
        (OnlyBoth(), "has a method both and no method observe_both: add observe_both, or remove both"),
        (OnlyBothGrads(), "has a method both_grads and no method observe_grads"),
        (
            Mine(QuantizerCaps(slot=SlotOptions(448.0))),
            "cast has no parameter slot: add it, because caps declares slot",
        ),
        (Mine(QuantizerCaps(origin=True)), "cast has no parameter at: add it, because caps declares origin"),
        (
            Mine(QuantizerCaps(op="cast_int6")),
            "caps declare op 'cast_int6', and the kernel table has no such operation",
        ),
        (Mine({"flag": True}), "caps must be a QuantizerCaps(...); got {'flag': True}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_declared_and_not_there_is_refused_by_name(quantizer: Any, said: str):
    if quantizer.caps is None:
        quantizer = replace(quantizer, caps=QuantizerCaps())
    for build in recipes_with(quantizer):
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            build()
        assert str(caught.value).startswith(f"{type(quantizer).__name__}(caps=")


@every_quantizer
@pytest.mark.parametrize("method", ["cast", "both"])
def test_a_cast_refuses_an_unknown_keyword_by_name(quantizer: Any, method: str):
    x = matrix(0, 32, 32)
    if method == "both":
        if (pair := one_read(quantizer, quantizer)) is None:
            return
        with pytest.raises(TypeError, match="flga"):
            pair.cast(x, pair.observe(x), slot=a_slot(), flga=torch.zeros(()))
    else:
        with pytest.raises(TypeError, match="flga"):
            quantizer.cast(x, quantizer.observe(x), slot=a_slot(), flga=torch.zeros(()))


@dataclass(frozen=True)
class HalfBoth(CurrentScaling):
    """Quantizer whose `cast` has a parameter `flag`, and whose `both` has none."""

    caps: ClassVar[QuantizerCaps] = CurrentScaling.caps

    def both(
        self, x: Tensor, amaxes: Any, *, columnwise: Any, outs: Any = None, slot: Any = None, at: Any = None
    ) -> Any:
        raise AssertionError


def test_both_takes_what_casts_take():
    with pytest.raises(
        ValueError, match="HalfBoth.*: both has no parameter flag: add it, because cast has the parameter flag"
    ):
        replace(load("fp8_current"), x=both(HalfBoth()))


class Unflagged(Wrapped):
    """Wrapper whose `cast` has no parameter `flag`."""

    def cast(self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None) -> QuantizedTensor:  # type: ignore[override]
        raise AssertionError


def test_cast_of_a_wrapper_takes_what_the_inner_cast_takes():
    reason = "because cast of the inner quantizer has the parameter flag"
    with pytest.raises(ValueError, match=f"Unflagged.*: cast has no parameter flag: add it, {reason}"):
        replace(load("fp8_current"), x=both(Unflagged(CurrentScaling())))


@dataclass(frozen=True)
class Half(CurrentScaling):
    """Quantizer that uses half of the range of codes. The class declares no capabilities itself."""

    def cast(self, x: Tensor, amax: Tensor | None, **more: Any) -> QuantizedTensor:
        assert amax is not None
        return super().cast(x, 2 * amax, **more)


@dataclass(frozen=True)
class OneReadHalf(Half):
    reads: list[str] = field(default_factory=list, compare=False)

    def both(self, x: Tensor, amaxes: Any, **more: Any) -> Any:
        self.reads.append("both")
        amax = 2 * amaxes[0]
        return super().both(x, (amax, amax), **more)

    def observe_both(self, x: Tensor, columnwise: Any) -> Any:
        return super().observe_both(x, columnwise)


def test_a_subclass_that_casts_otherwise_is_not_passed_by():
    """`both` and `batch` of the base class do not call the new `cast`, so they are not used."""
    assert caps_of(Half()) == QuantizerCaps(op="cast_fp8_tensor")
    assert not any(offers(Half(), method) for method in ("both", "batch", "both_grads"))
    assert caps_of(DelayedSubclass()) == DelayedScaling().caps and offers(DelayedSubclass(), "both")
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
        assert caps_of(outer) == replace(own, native=False)
        assert (caps_of(outer).slot, caps_of(outer).origin) == (own.slot, own.origin)
        assert takes_flag(outer) == takes_flag(quantizer)
        assert not (caps_of(outer).native or batches(outer)) and one_read(outer, outer) is None


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
    members = [member.name for member in fields(QuantizerCaps)]
    lacking = [name for name in members if f"\n| `{name}` |" not in page]
    assert not lacking
