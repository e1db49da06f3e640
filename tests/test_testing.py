"""check_format: dlp's formats pass, and each planted mistake is detected."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
import torch

from dlp import testing
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
    """Faulty quantizer: scale_inv is 5 % too large."""

    def cast(self, x, amax, *, out=None, **more):
        q = super().cast(x, amax, out=out, **more)
        return QuantizedTensor(q.format, (q.parts[0], q.parts[1].mul_(1.05)))


@dataclass(frozen=True)
class Standing(Fp8Rowwise):
    """Faulty format: declares that scales of rows are equal on all ranks."""

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
    """Faulty quantizer: codes have the strides of x."""

    def cast(self, x, amax, *, out=None, **more):
        q = super().cast(x, amax, out=out, **more)
        return q if x.is_contiguous() else QuantizedTensor(q.format, (q.parts[0].t().contiguous().t(), q.parts[1]))


@dataclass(frozen=True)
class Unturned(Fp8Tensor):
    """Faulty format: declares that it can be transposed, and reshapes instead."""

    def transpose(self, q):
        codes, scale_inv = q.parts
        return QuantizedTensor(self, (codes.view(torch.uint8).reshape(codes.shape[::-1]).view(codes.dtype), scale_inv))


@dataclass(frozen=True)
class Unfactored(Fp8Tensor):
    """Faulty format: `factored` values already contain the scale, so a GEMM applies it twice."""

    def factored(self, q):
        values, scale = super().factored(q)
        return values * scale.bfloat16(), scale


@dataclass(frozen=True)
class Unsaved(Fp8Tensor):
    """Faulty format: has a field that saving and loading lose."""

    noted: int = field(default=0, init=False)


@dataclass(frozen=True, eq=False)
class Listed(Fp8Tensor):
    """Faulty format: its __eq__ reads values of a tensor, which torch.compile does not know during tracing."""

    levels: Any = field(default_factory=lambda: torch.arange(4.0))

    def __eq__(self, other):
        return type(other) is Listed and torch.equal(self.levels, other.levels)

    def __hash__(self):
        return hash(self.element)


@dataclass(frozen=True)
class In(CurrentScaling):
    """Quantizer that casts to a format of the class `kind`."""

    kind: Any = Fp8Tensor

    @cached_property
    def format(self):
        made = self.kind(self.element)
        if self.kind is Unsaved:
            object.__setattr__(made, "noted", 1)
        return made


PLANTED = {
    "scale": (WrongScale(), "basic: SQNR of values is 2.* dB, below the floor of 30.0"),
    "strides": (Strided(), "basic: parts .'codes'. of a transposed matrix are not contiguous"),
    "part": (StandingScaling(), "pieces: part scale_inv is declared SHARED along 0, and differs between pieces"),
    "transpose": (In(kind=Unturned), "transpose: the transpose has other values"),
    "factors": (In(kind=Unfactored), "linear: SQNR of y is .* dB, below the floor of 29.0"),
    "saving": (In(kind=Unsaved), "saving: the loaded tensor differs from the saved tensor"),
    "compile": (In(kind=Listed), "compile: a linear with this weight cannot be compiled: (?s:.)*aten.equal"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_mistakes_are_caught(planted, monkeypatch):
    """Each mistake is detected by the suite for this kind of mistake. The mistakes in transposing, factors, saving and
    compiling are detected by no other suite."""
    quantizer, said = PLANTED[planted]
    with pytest.raises(AssertionError, match=f"^check_format, {said}"):
        check_format(quantizer)
    if planted in ("transpose", "factors", "saving", "compile"):
        suite = {"factors": "linear", "saving": "saved"}.get(planted, planted)
        monkeypatch.setattr(testing, f"check_{suite}", lambda weight, *_: weight)
        check_format(quantizer, compiles=planted == "compile")


def test_histories_are_refused():
    with pytest.raises(ValueError, match="uses delayed scaling"):
        check_format(recipes.load("fp8_delayed").x.rowwise)
