"""The six styles: the table, and the properties derived from it. No ranks."""

from __future__ import annotations

import pytest

from dlp.parallel.style import STYLES, GemmComm, shard_sizes, style
from tests.refusals import must_raise

# style -> shard_dim of w, then (gather, reduce) of fprop, dgrad and wgrad
TABLE = {
    "LOCAL": (None, (None, None), (None, None), (None, None)),
    "LOCAL_SP": (None, (None, None), (None, None), (None, "all")),
    "COLUMN": (0, (None, None), (None, "all"), (None, None)),
    "ROW": (1, (None, "all"), (None, None), (None, None)),
    "COLUMN_SP": (0, ("x", None), (None, "scatter"), ("x", None)),
    "ROW_SP": (1, (None, "scatter"), ("dy", None), ("dy", None)),
}
# style -> the dimension of x, of w and of dy that is sharded over tp; the gathered operand; whether dw covers only the
# tokens of one rank; whether db covers only the tokens of one rank
READ_OFF = {
    "LOCAL": (None, None, None, None, False, False),
    "LOCAL_SP": (0, None, 0, None, True, True),
    "COLUMN": (None, 0, 1, None, False, False),
    "ROW": (1, 1, None, None, False, False),
    "COLUMN_SP": (0, 0, 1, "x", False, False),
    "ROW_SP": (1, 1, 0, "dy", False, True),
}


@pytest.mark.parametrize("row", STYLES.values(), ids=lambda row: row.name)
def test_rows_are_the_table(row):
    comms = (row.fprop, row.dgrad, row.wgrad)
    assert (row.shard_dim, *((comm.gather, comm.reduce) for comm in comms)) == TABLE[row.name]


@pytest.mark.parametrize("row", STYLES.values(), ids=lambda row: row.name)
def test_the_rest_is_read_off(row):
    cuts = tuple(row.cut(operand) for operand in ("x", "w", "dy"))
    assert (*cuts, row.gathers, row.partial_weight_grad, row.partial_bias_grad) == READ_OFF[row.name]
    assert row.sequence_parallel == row.name.endswith("_SP")


@pytest.mark.parametrize("row", STYLES.values(), ids=lambda row: row.name)
def test_cuts_and_communication_are_consistent(row):
    """If the contraction of a GEMM is sharded over tp, and no operand of the GEMM is gathered, the results are partial
    sums, so the GEMM must have a reduction. Other GEMMs must not have a reduction."""
    for comm, contraction in ((row.fprop, row.cut_x == 1), (row.dgrad, row.cut_dy == 1), (row.wgrad, row.cut_x == 0)):
        partial = contraction and comm.gather is None
        assert (comm.reduce is not None) == partial
    assert GemmComm() == GemmComm(None, None)


def test_there_are_six():
    assert {row.name for row in STYLES.values()} == set(TABLE)
    assert len(STYLES) == 6


def test_an_unknown_style_is_refused():
    with pytest.raises(ValueError, match="unknown parallel style 'diagonal': choose from local, column, row"):
        style("diagonal", False)


def test_shard_sizes():
    assert shard_sizes(style("local", False), 7, 5, 4, "layer") == (7, 5)
    assert shard_sizes(style("column", True), 8, 5, 4, "layer") == (2, 5)
    assert shard_sizes(style("row", False), 7, 8, 4, "layer") == (7, 2)


@pytest.mark.parametrize(
    ("name", "feature", "size"), [("column", "out_features", 6), ("row", "in_features", 10)], ids=["column", "row"]
)
def test_an_indivisible_size_names_the_layer_the_numbers_and_the_way_out(name, feature, size):
    row = style(name, True)
    assert must_raise(ValueError, shard_sizes, row, 6, 10, 4, "layers.0.mlp.up_proj") == (
        f"layers.0.mlp.up_proj: {row.name} shards {feature} over tp 4, which does not divide {size}; "
        f"choose a tp that divides {feature}, or style = 'local' for this layer"
    )
