"""check_format: our own formats pass, and planted mistakes are each caught."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from dlp.quant import recipe as recipes
from dlp.quant.fp8 import CurrentScaling, Fp8Tensor
from dlp.quant.fp8_rowwise import Fp8Rowwise, RowwiseScaling
from dlp.quant.quantizer import caps_of
from dlp.quant.tensor import SHARED, QuantizedTensor
from dlp.testing import check_format
from tests import pool as worker
from tests.cases import RECIPES

OURS = sorted(
    {
        quantizer
        for name in RECIPES
        for quantizer in recipes.load(name).quantizers()
        if not caps_of(quantizer).slot and not quantizer.format.keeps_source
    },
    key=str,
)


@pytest.mark.parametrize("quantizer", OURS, ids=str)
def test_our_formats(quantizer):
    floor = 13.0 if quantizer.format.elements_per_code == 2 else None
    check_format(quantizer, compiles=quantizer == OURS[0], floor=floor)
    assert type(quantizer.format) in torch.serialization.get_safe_globals(), "what is saved can be read afterwards, too"


def on_ranks(quantizer: Any) -> None:
    check_format(quantizer, mesh=worker.mesh(tp=2)["tp"], device=worker.device(), compiles=False, floor=13.0)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
@pytest.mark.ranks(2)
def test_our_formats_over_ranks(ranks, recipe):
    ranks(2).run(on_ranks, recipes.load(recipe).w.rowwise)


@dataclass(frozen=True)
class WrongScale(CurrentScaling):
    """scale_inv is 5 % off."""

    def cast(self, x, amax, *, out=None, **more):
        q = super().cast(x, amax, out=out, **more)
        return QuantizedTensor(q.format, (q.parts[0], q.parts[1].mul_(1.05)))


@dataclass(frozen=True)
class Standing(Fp8Rowwise):
    """Says that scales of rows are equal on all ranks."""

    @property
    def parts(self):
        codes, scale = super().parts
        return codes, replace(scale, rows=SHARED)


@dataclass(frozen=True)
class StandingScaling(RowwiseScaling):
    @property
    def format(self):
        return Standing(self.element)


@dataclass(frozen=True)
class Strided(CurrentScaling):
    """Codes lie as x does."""

    def cast(self, x, amax, *, out=None, **more):
        q = super().cast(x, amax, out=out, **more)
        return q if x.is_contiguous() else QuantizedTensor(q.format, (q.parts[0].t().contiguous().t(), q.parts[1]))


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (WrongScale(), "basic: SQNR of values"),
        (Strided(), "basic: parts .'codes'. of a matrix that lies transposed are not contiguous"),
        (StandingScaling(), "pieces: part scale_inv says that it is shared along 0"),
    ],
    ids=["scale", "strides", "part"],
)
def test_planted_mistakes_are_caught(planted, said):
    with pytest.raises(AssertionError, match=said):
        check_format(planted)


@dataclass(frozen=True)
class Peeking(Fp8Tensor):
    """Looks at values while a graph is made."""

    def part_shapes(self, shape):
        if torch.compiler.is_compiling():
            raise RuntimeError("peeked")
        return super().part_shapes(shape)

    @property
    def elements_per_code(self):
        return 2 if torch.compiler.is_compiling() else 1

    def __hash__(self):
        if torch.compiler.is_compiling():
            raise RuntimeError("hashed while a graph is made")
        return 1


@dataclass(frozen=True)
class PeekingScaling(CurrentScaling):
    @property
    def format(self):
        return Peeking(self.element)


def test_a_format_that_does_not_survive_compile_is_caught():
    check_format(PeekingScaling(), compiles=False)
    with pytest.raises(AssertionError, match="compile"):
        check_format(PeekingScaling())


def test_histories_are_refused():
    with pytest.raises(ValueError, match="scales by history"):
        check_format(recipes.load("fp8_delayed").x.rowwise)
