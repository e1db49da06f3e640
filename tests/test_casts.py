"""Casts for both orientations at once, with the reference and with emulated kernels. No ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlp.kernels import cuda, loader, ops, table
from dlp.kernels.reference import Fp8Scale
from dlp.parallel import casts as cast_engine
from dlp.parallel.casts import BOTH
from dlp.parallel.linear import quantize as operands
from dlp.parallel.model import rows
from dlp.parallel.style import STYLES
from dlp.quant.integers import IntScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import KeepHighPrecision, batches, caps_of, one_read
from dlp.quant.recipe import load
from tests.emulated import emulation, recorded
from tests.gpu.batched import BATCHED, check_batch
from tests.gpu.inputs import views
from tests.gpu.trained import trained
from tests.metrics import assert_bit_equal
from tests.quantizers import QUANTIZERS, RECIPES, a_slot, assert_same, matrix, origin
from tests.test_operands import make_bound

PAIRS = list({(q.rowwise, q.columnwise): None for recipe in RECIPES for q in (recipe.x, recipe.w, recipe.dy)})
OFFERING = [pair for pair in PAIRS if one_read(*pair) is not None]
E4M3 = torch.float8_e4m3fn


CASTS = ("cast_fp8_tensor", "cast_fp8_rowwise", "cast_fp8_block", "cast_mxfp8", "cast_nvfp4")


@contextmanager
def on_kernels() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """Context in which emulated kernels (tests.emulated) run. Yields the list of their launches."""
    with emulation(kind="sm_100", batches=True), recorded() as launches:
        yield launches


@pytest.fixture
def launches():
    with on_kernels() as launches:
        yield launches


def quantized(quantizer, x, at):
    slot = a_slot()
    return quantizer.cast(x, quantizer.observe(x), slot=slot, at=at), slot.staging


def matrices(pair, seed: int) -> dict[str, Tensor]:
    """Return views of a matrix, by name: only the views whose sizes both formats support."""
    unit = max(max(quantizer.format.multiple) for quantizer in pair)
    made = views(matrix(seed, *((200, 300) if unit == 1 else (192, 288))))
    return {how: x for how, x in made.items() if all(size % unit == 0 for size in x.shape)}


def ways(pair, x):
    """Cast x and x.t() separately with the two quantizers; return both operands, and the staged amax of the first
    cast."""
    at = origin(x, 3, 32)
    (one, staging), (other, _) = quantized(pair[0], x, at), quantized(pair[1], x.t(), at_t(x))
    return one, other, staging


def at_t(x):
    return origin(x.t(), 5, 48)


def together(pair, x, outs=None):
    slot, both = a_slot(), one_read(*pair)
    return (*both.cast(x, both.observe(x), slot=slot, at=(origin(x, 3, 32), at_t(x)), outs=outs), slot.staging)


@pytest.mark.parametrize("pair", OFFERING, ids=str)
def test_both_are_two_casts(pair):
    for how, x in matrices(pair, 3).items():
        row, col, staging = together(pair, x)
        one, other, recorded = ways(pair, x)
        assert_same(row, one)
        assert_same(col, other)
        expected = ops.amax(x) if caps_of(pair[0]).slot is not None else torch.zeros(())
        for found in (staging, recorded):
            assert_bit_equal(found, expected, how)


@pytest.mark.parametrize("pair", OFFERING, ids=str)
def test_kernels_get_what_they_read_and_give_what_was_asked(pair):
    for how, x in matrices(pair, 4).items():
        expected = ways(pair, x)
        with on_kernels() as launches:
            mine, both = ways(pair, x), together(pair, x)
        assert launches, how
        for made in (mine, both):
            assert_same(made[0], expected[0])
            assert_same(made[1], expected[1])
            assert_bit_equal(made[2], expected[2], how)


@pytest.mark.parametrize("on_kernels", [False, True], ids=["reference", "kernels"])
@pytest.mark.parametrize("pair", OFFERING, ids=str)
def test_casts_write_where_they_are_told(pair, on_kernels, request):
    """Casts write into the given output, such as a rank's segment of a gathered buffer."""
    if on_kernels:
        request.getfixturevalue("launches")
    x = next(iter(matrices(pair, 5).values()))
    one, other, _ = ways(pair, x)

    def leased(q):
        whole = [torch.zeros(3, *part.shape).to(part.dtype) for part in q.parts]
        return q.format.wrap([part[1] for part in whole])

    for q, quantizer, values, at in ((one, pair[0], x, origin(x, 3, 32)), (other, pair[1], x.t(), at_t(x))):
        out = leased(q)
        assert quantizer.cast(values, quantizer.observe(values), slot=a_slot(), at=at, out=out) is out
        assert_same(out, q)
    outs = leased(one), leased(other)
    made = together(pair, x, outs)
    for q, out, new in zip((one, other), outs, made, strict=False):
        assert_same(out, q)
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(new.parts, out.parts, strict=True))


def test_a_transposed_view_is_not_copied(launches):
    x = matrix(5, 128, 256)
    for view in (x, x.t()):
        ops.cast_fp8_block(view, (1, 128), E4M3, power_of_two=True)
        ops.cast_fp8_tensor(view, E4M3, Fp8Scale(amax=ops.amax(view)))
    assert [words[0] for _, (words, *_) in launches] == [x.data_ptr()] * 6


@pytest.mark.parametrize("shape", [(2, 2), (300, 2), (2, 300), (48, 64), (0, 16), (16, 0)])
def test_packed_codes_transposed(shape):
    codes = torch.arange(shape[0] * shape[1]).view(shape).remainder(13).to(torch.uint8)
    turned = ops.transpose_e2m1(ops.pack_e2m1(codes))
    assert turned.shape == (shape[1], shape[0] // 2)
    assert torch.equal(ops.unpack_e2m1(turned), codes.t())


def test_blocks_without_a_kernel_run_the_reference(launches):
    ops.cast_fp8_block(matrix(6, 64, 64), (1, 32), E4M3, power_of_two=True)
    assert not launches


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_operands_do_not_depend_on_what_is_asked_with_them(recipe):
    """Rowwise and columnwise operands have the same bits separately and together."""
    for tensor in ("x", "w", "dy"):
        made = {}
        for row, col in ((True, False), (False, True), (True, True)):
            bound = make_bound(STYLES["local", False], load(recipe))
            bound.session.cores[0] = SimpleNamespace(
                device=torch.device("cpu"), members=[None], specs=lambda bound=bound: [bound.spec]
            )
            (made[row, col],) = operands.quantize(bound, tensor, [matrix(7, 96, 160)], (row, col))
        assert_same(made[True, True].rowwise, made[True, False].rowwise)
        assert_same(made[True, True].columnwise, made[False, True].columnwise)
        assert made[True, False].columnwise is None and made[False, True].rowwise is None


@pytest.mark.parametrize(
    ("recipe", "reads"),
    [("fp8_current", 2), ("fp8_delayed", 1), ("fp8_rowwise", 2), ("fp8_block", 1), ("mxfp8", 1), ("nvfp4", 2)],
)
def test_one_read_makes_both_operands(launches, recipe, reads):
    """One launch casts both operands. If the quantizers need amaxes, one more launch computes the amaxes first."""
    for tensor in ("x", "w", "dy"):
        bound = make_bound(STYLES["local", False], load(recipe))
        bound.session.cores[0] = SimpleNamespace(
            device=torch.device("cpu"), members=[None], specs=lambda bound=bound: [bound.spec]
        )
        launches.clear()
        (made,) = operands.quantize(bound, tensor, [matrix(8, 128, 128)], BOTH)
        assert len(launches) == reads, launches
        assert made.rowwise is not None and made.columnwise is not None


@pytest.mark.parametrize("quantizer", BATCHED, ids=str)
def test_a_batch_makes_what_casts_make_alone(quantizer, launches):
    check_batch(quantizer, torch.bfloat16, "cpu")


def test_what_is_transformed_or_rounded_by_chance_has_no_batch():
    offering = {quantizer for quantizer in QUANTIZERS if batches(quantizer)}
    without = {quantizer for quantizer in QUANTIZERS if getattr(quantizer, "rht", False) or caps_of(quantizer).origin}
    plain = {each for each in QUANTIZERS if isinstance(each, IntScaling)}  # casts in plain torch, without batches
    assert offering == set(QUANTIZERS) - without - plain - {KeepHighPrecision()} and len(without) >= 3


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_weights_cast_together_are_those_cast_alone(recipe):
    with emulation(batches=True):
        losses, runtime = trained(recipe)
    with emulation():
        expected, alone = trained(recipe)
    assert_bit_equal(losses, expected, recipe)
    assert len(expected.unique()) == len(expected), "the weights change"
    assert runtime.weight_batch.casts._prepared.launches and not alone.weight_batch.casts._prepared.launches


def test_a_step_in_between_only_launches(monkeypatch):
    prepared = []
    prepare = cast_engine._launches
    monkeypatch.setattr(
        cast_engine, "_launches", lambda quantizer, casts: prepared.append(len(casts)) or prepare(quantizer, casts)
    )
    with emulation(batches=True):
        trained("fp8_current", steps=8)
    assert prepared == [2, 2], "tables are written anew where something has moved: at first, and after the load"


def test_agreed_weights_are_cast_by_their_layer():
    spec = make_bound(STYLES["column", False], load("fp8_current", amax_scope="all")).spec
    assert operands.weights_agree(spec)
    assert not operands.weights_agree(make_bound(STYLES["column", False], load("fp8_current")).spec)


def test_what_is_missing_is_said_once_and_in_the_plan(monkeypatch, caplog):
    sentence = f"native kernels need nvcc, which is not on PATH; {loader.INSTEAD}"

    def load_nothing() -> None:
        raise loader.MissingError(sentence)

    loader.missing.cache_clear()
    monkeypatch.setattr(loader, "load", load_nothing)
    monkeypatch.setattr(rows, "device_kind", lambda device_type: "sm_90")
    try:
        plans = {name: rows.support_note(load(name), "cuda") for name in ("bf16", "fp8_current", "mxfp8")}
    finally:
        loader.missing.cache_clear()
    assert caplog.messages == [sentence]
    assert plans["fp8_current"].endswith(f"; casts by reference ({sentence})")
    assert plans["mxfp8"].endswith(f"; casts by reference ({sentence})")
    assert "casts" not in plans["bf16"]


def test_a_command_without_kernels_names_no_fallback(monkeypatch, capsys):
    def load_nothing() -> None:
        raise loader.MissingError(f"native kernels need nvcc, which is not on PATH; {loader.INSTEAD}")

    monkeypatch.setattr(loader, "load", load_nothing)
    assert loader.load_or_explain() == 2
    assert capsys.readouterr().err == "native kernels need nvcc, which is not on PATH\n"


def test_what_has_kernels_is_named(monkeypatch):
    monkeypatch.setattr(loader, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert {table.cast_kernel(op, "cuda") for op in ("amax", *CASTS)} == {"kernel"}
    assert table.cast_kernel("cast_of_mine", "cuda") == table.cast_kernel("amax", "cpu") == "reference"
    for quantizer in QUANTIZERS:
        assert bool(caps_of(quantizer).op) != isinstance(quantizer, KeepHighPrecision | IntScaling)
        assert caps_of(quantizer).op in ("", *CASTS)


@pytest.mark.parametrize("tile", [False, True])
@pytest.mark.parametrize("rht", [False, True])
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_cast_of_nvfp4_is_named_where_its_kernel_takes_it(tile, rht, stochastic, launches):
    quantizer = Nvfp4Scaling(tile, rht, stochastic)
    draw = object() if stochastic else None
    found = table.choose("cast_nvfp4", torch.ones(16, 16), None, quantizer.format.block, rht=rht, draw=draw)
    assert bool(caps_of(quantizer).op) == (found.name == "kernel")


def test_a_build_that_fails_is_not_passed_over(monkeypatch):
    def fail() -> None:
        raise loader.BuildError("native kernels do not compile")

    loader.missing.cache_clear()
    monkeypatch.setattr(loader, "load", fail)
    with pytest.raises(loader.BuildError, match="do not compile"):
        loader.missing()


def test_rows_that_overlap_are_refused():
    row = torch.zeros(1, 8)
    for x in (row.expand(3, 8), row.t().expand(8, 3), torch.zeros(32).as_strided((3, 8), (4, 1))):
        with pytest.raises(ValueError, match="rows are disjoint; got strides"):
            cuda._matrix(x)


def test_a_matrix_without_rows_is_readable_however_it_was_expanded():
    """Example: an expanded dy without tokens. `contiguous` returns it unchanged, with its strides."""
    assert cuda.readable(torch.ones(1).expand(0, 256))
    assert not cuda.readable(torch.ones(1).expand(16, 256))
