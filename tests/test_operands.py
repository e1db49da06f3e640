"""Agreements on amaxes, and operands that are saved for backward. The tests need no ranks: `FakeGroup` has a size,
but does not communicate.

Rule: ranks agree on a scale over tp iff the operand is gathered and the scale spans a dimension that is sharded over
tp. With `amax_scope="all"` ranks also agree for operands that are not gathered. With a user-defined amax group, ranks
always agree. CUT states which dimensions are sharded over tp in each style.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from bench.saved_bytes import of_layer
from dlp.parallel import casts as cast_engine
from dlp.parallel import overlap
from dlp.parallel.casts import BOTH
from dlp.parallel.linear import quantize as operands
from dlp.parallel.linear.modules import Linear
from dlp.parallel.linear.spec import LinearSpec, Overlaps
from dlp.parallel.linear.state import BoundSpec, LayerWeights
from dlp.parallel.model.session import Session
from dlp.parallel.style import STYLES
from dlp.quant import recipe as recipes
from dlp.quant.recipe import Recipe
from tests.cases import RECIPES

SIZE = 64
GATHERED = {"COLUMN_SP": "x", "ROW_SP": "dy"}
# style -> {operand: dimension that is sharded over tp}
CUT = {
    "LOCAL": {}, "LOCAL_SP": {"x": 0, "dy": 0}, "COLUMN": {"w": 0, "dy": 1}, "ROW": {"w": 1, "x": 1},
    "COLUMN_SP": {"x": 0, "w": 0, "dy": 1}, "ROW_SP": {"x": 1, "w": 1, "dy": 0},
}  # fmt: skip


class FakeGroup:
    """Stand-in for a group of tp ranks, without communication."""

    def __init__(self, name: str, size: int = 2) -> None:
        self.name = name
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


class Agreements(list[tuple[str, int]]):
    """Replacement for `agree` that records the group and the number of amaxes, and returns the amaxes unchanged."""

    def __call__(self, observed: list[Tensor], group: Any) -> list[Tensor]:
        self.append((group.name, len(observed)))
        return observed


def make_bound(row: Any, recipe: Recipe, amax_group: Any = None, **options: Any) -> BoundSpec:
    serial = Overlaps(*[overlap.load("serial")] * 3)
    with patch("torch.distributed.get_process_group_ranks", lambda group: list(range(group.size()))):
        spec = LinearSpec("layer", row, recipe, serial, FakeGroup("tp"), amax_group, **options)  # type: ignore[arg-type]
    bound = BoundSpec(spec, Session(), LayerWeights(None))  # type: ignore[arg-type]
    bound.session.cores = [SimpleNamespace(device=torch.device("cpu"), members=[None], specs=lambda: [spec])]  # type: ignore[list-item]
    return bound


def agreements(bound: BoundSpec, operand: str) -> Agreements:
    """Quantize one operand in both orientations; return the agreements on amaxes."""
    agreed = Agreements()
    with patch.object(cast_engine, "agree", agreed):
        operands.quantize(bound, operand, [torch.randn(SIZE, SIZE)], BOTH)
    return agreed


def spanned(recipe: Recipe, operand: str) -> list[tuple[int, ...]]:
    """Return, for each cast of the operand that observes amaxes, the dimensions of the tensor that one amax spans."""
    pair = getattr(recipe, operand)
    ways = [(pair.rowwise, (0, 1))] + [(pair.columnwise, (1, 0))] * (not pair.derived)
    observing = [(q, dims) for q, dims in ways if q.observe(torch.ones(SIZE, SIZE)) is not None]
    return [tuple(dims[d] for d in q.reduces) for q, dims in observing]


@pytest.mark.parametrize(
    ("recipe", "operand"),
    [(recipe, operand) for recipe in ("fp8_current", "fp8_rowwise") for operand in ("x", "w", "dy")],
)
@pytest.mark.parametrize("row", STYLES.values(), ids=lambda row: row.name)
def test_fp8_current_and_fp8_rowwise_agree_exactly_where_formats_says(row, recipe, operand):
    """In fp8_current, ranks agree on the scale of a complete tensor only for x of COLUMN_SP and dy of ROW_SP. In
    fp8_rowwise, ranks agree on the scales of a gathered columnwise operand, because these scales span the tokens. Each
    scale of a rowwise operand belongs to one token, so that no agreement is needed."""
    expected = [("tp", 1)] if GATHERED.get(row.name) == operand else []
    assert agreements(make_bound(row, recipes.load(recipe)), operand) == expected


@pytest.mark.parametrize("scope", ["table", "all"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("row", STYLES.values(), ids=lambda row: row.name)
def test_every_recipe_agrees_by_the_rule(row, recipe, scope):
    loaded = recipes.load(recipe, amax_scope=scope)
    for operand in ("x", "w", "dy"):
        cut = CUT[row.name].get(operand)
        wanted = GATHERED.get(row.name) == operand or scope == "all"
        count = sum(cut in dims for dims in spanned(loaded, operand)) if wanted else 0
        assert agreements(make_bound(row, loaded), operand) == [("tp", count)] * (count > 0), operand


@pytest.mark.parametrize("row", STYLES.values(), ids=lambda row: row.name)
def test_a_group_of_the_users_agrees_on_everything(row):
    for operand in ("x", "w", "dy"):
        bound = make_bound(row, recipes.load("fp8_current"), FakeGroup("mine", 8))
        assert agreements(bound, operand) == [("mine", 1)]


def test_one_agreement_serves_all_siblings():
    agreed = Agreements()
    members = ("q", "k", "v")
    bound = make_bound(STYLES["column", False], recipes.load("fp8_current"), FakeGroup("mine", 8), members=members)
    values = [torch.randn(SIZE, SIZE) for _ in range(3)]
    with patch.object(cast_engine, "agree", agreed):
        operands.quantize(bound, "dy", values, BOTH)
    assert agreed == [("mine", 3)]


def test_operands_flatten_and_come_back():
    for name in ("bf16", "fp8_current", "fp8_block"):
        recipe = recipes.load(name)
        originals = operands.quantize(make_bound(STYLES["local", False], recipe), "w", [torch.randn(SIZE, 128)], BOTH)
        back = operands.unflatten(recipe.w, operands.flatten(originals * 2), 2)
        for both in back:
            for made, original in zip(both, originals[0], strict=True):
                assert made.format == original.format
                assert torch.equal(made.dequantize(), original.dequantize())


def saved_bytes(recipe: str, dtype: torch.dtype, siblings: int = 1, tokens: int = 256) -> int:
    """Return the bytes that the forward of a linear saves for backward, without the weights."""
    layer = Linear(128, (64,) * siblings if siblings > 1 else 64, recipe=recipe, dtype=dtype)
    return of_layer(layer, torch.randn(tokens, 128, dtype=dtype, requires_grad=True))


SMALL = 64  # bound on the bytes of saved tensors whose size does not depend on the tokens, such as scales


def test_what_is_saved_for_backward_is_quantized():
    tokens, features = 256, 128
    assert 0 <= saved_bytes("bf16", torch.bfloat16) - 2 * tokens * features <= SMALL
    assert 0 <= saved_bytes("fp8_current", torch.bfloat16) - tokens * features <= SMALL
    assert 0 <= saved_bytes("fp8_current", torch.float32) - tokens * features <= SMALL


def test_siblings_save_their_x_once():
    for recipe in ("bf16", "fp8_current"):
        one, three = (saved_bytes(recipe, torch.bfloat16, siblings) for siblings in (1, 3))
        assert abs(three - one) <= SMALL


def test_nothing_is_saved_where_nothing_needs_it():
    """If the weight is frozen, x is not saved for backward, because only wgrad reads x."""
    layer = Linear(128, 64, recipe="fp8_current")
    layer.weight.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer(torch.randn(256, 128, requires_grad=True))
    assert 256 * 128 not in kept
