"""The table of amax agreements over tp, for every style and recipe.

    tensor  COLUMN  COLUMN_SP  ROW   ROW_SP
    x       none    tp         none  none
    w       none    none       none  none
    dy      none    none       none  tp

Ranks agree on a scale iff their shards are concatenated into one operand, and the scale spans the sharded dimension.
"""

from __future__ import annotations

import pytest

from dlp.parallel.casts import agrees
from dlp.parallel.style import STYLES
from dlp.quant import recipe as recipes
from dlp.quant.recipe import OPERANDS
from tests.cases import RECIPES

AGREED = {("COLUMN_SP", "x"), ("ROW_SP", "dy")}
PER_TENSOR = {"fp8_delayed", "fp8_current", "nvfp4"}  # scales that span both dimensions
# Recipes with one scale per row: only the scales of the transposed operand span tokens.
COLUMNWISE_ONLY = {"fp8_rowwise", "int8"}


@pytest.mark.parametrize("row", STYLES.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("name", RECIPES)
def test_amaxes_are_agreed_where_the_table_says(name, row):
    recipe = recipes.load(name)
    for tensor in OPERANDS:
        operand = getattr(recipe, tensor)
        in_table = (row.name, tensor) in AGREED
        for flipped, quantizer in ((False, operand.rowwise), (True, operand.columnwise)):
            spans = name in PER_TENSOR or (name in COLUMNWISE_ONLY and flipped)
            assert agrees(row, recipe, tensor, quantizer, flipped) == (in_table and spans), (tensor, flipped)
            assert not agrees(row, recipe, tensor, quantizer, flipped, whole=True), "no rank has a part of it"
            assert agrees(row, recipe, tensor, quantizer, flipped, whole=True, own_group=True), (
                "the user's group always does"
            )


@pytest.mark.parametrize("row", STYLES.values(), ids=lambda row: row.name)
def test_scope_all_agrees_wherever_tp_cuts_what_a_scale_spans(row):
    recipe = recipes.load("fp8_current", amax_scope="all")
    for tensor in OPERANDS:
        quantizer = getattr(recipe, tensor).rowwise
        assert agrees(row, recipe, tensor, quantizer, False) == (row.cut(tensor) is not None)
