"""Casts in both orientations at once, and the way to the kernels: pure tests, with kernels that the reference plays.

`played` puts functions in the kernels' place that fill a job's outputs from the reference, on the CPU. What is tested is
what lies around the kernels: which matrix they get, and which output is which operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dlp.kernels import casts, cuda, loader, ops, reference
from dlp.kernels.cuda import BlockJob, TensorJob
from dlp.kernels.reference import Fp8Scale
from dlp.parallel import notes, operands, weight_batch
from dlp.parallel.style import STYLES
from dlp.quant.quantizer import cast_op, one_read, slot_options
from dlp.quant.recipe import load
from tests.gpu.inputs import views
from tests.gpu.trained import trained
from tests.metrics import assert_bit_equal
from tests.quantizers import QUANTIZERS, a_slot, assert_same, matrix
from tests.test_operands import make_spec

OFFERING = [quantizer for quantizer in QUANTIZERS if one_read(quantizer) is not None]
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Kernels on the CPU; the list of their jobs."""
    jobs: list[object] = []

    def cast_tensor(job: TensorJob, **options: bool | float) -> None:
        jobs.append(job)
        source = Fp8Scale(job.amax, job.scale, job.staging, **options)  # type: ignore[arg-type]
        codes, scale_inv = reference.cast_fp8_tensor(job.x, _code_dtype(job), source)
        _fill((job.codes, job.codes_t, job.scale_inv), (codes, codes.t(), scale_inv))

    def cast_block(job: BlockJob, *, tile: bool, **options: bool | float) -> None:
        jobs.append(job)
        for source, out in ((job.x, job[1:3]), (job.x.t(), job[3:5])):
            made = reference.cast_fp8_block(source, (128 if tile else 1, 128), _code_dtype(job), **options)  # type: ignore[arg-type]
            _fill(out, made)

    def amax(x: Tensor, out: Tensor) -> None:
        jobs.append(x)
        out.copy_(reference.amax(x))

    def batched(kernel):
        return lambda made, *more, **options: lambda: [kernel(_readable(job), *more, **options) for job in made]

    def amax_batch(xs: Sequence[Tensor], out: Tensor):
        return lambda: [amax(_readable(x), out[i]) for i, x in enumerate(xs)]

    monkeypatch.setattr(cuda, "amax_batch", amax_batch)
    monkeypatch.setattr(cuda, "cast_tensor_batch", batched(cast_tensor))
    monkeypatch.setattr(cuda, "cast_block_batch", batched(cast_block))
    for name, kernel in (("cast_tensor", cast_tensor), ("cast_block", cast_block), ("amax", amax)):
        monkeypatch.setattr(cuda, name, lambda job, *more, kernel=kernel, **kw: kernel(_readable(job), *more, **kw))
    monkeypatch.setattr(casts, "_has_kernel", lambda x: True)
    return jobs


def _readable(job: Tensor | TensorJob | BlockJob) -> Tensor | TensorJob | BlockJob:
    cuda._matrix(job if isinstance(job, Tensor) else job.x)  # raises for what no kernel reads
    return job


def _code_dtype(job: TensorJob | BlockJob) -> torch.dtype:
    return next(codes for codes in (job.codes, job.codes_t) if codes is not None).dtype


def _fill(outputs: tuple[Tensor | None, ...], made: tuple[Tensor, ...]) -> None:
    for out, value in zip(outputs, made, strict=True):
        if out is not None:
            assert out.shape == value.shape and out.is_contiguous()
            out.copy_(value)


def quantized(quantizer, x):
    slot = a_slot()
    return quantizer.cast(x, quantizer.observe(x), slot=slot), slot.staging


@pytest.mark.parametrize("quantizer", OFFERING, ids=str)
def test_both_are_two_casts(quantizer):
    for x in views(matrix(3, 200, 300)).values():
        slot, amax = a_slot(), quantizer.observe(x)
        row, col = one_read(quantizer)(x, amax, slot=slot)
        one, staging = quantized(quantizer, x)
        assert_same(row, one)
        assert_same(col, quantized(quantizer, x.t())[0])
        recorded = ops.amax(x) if slot_options(quantizer) is not None else torch.zeros(())
        for found in (slot.staging, staging):
            assert_bit_equal(found, recorded, "staging")


@pytest.mark.parametrize("quantizer", OFFERING, ids=str)
def test_kernels_get_what_they_read_and_give_what_was_asked(quantizer, played):
    for how, x in views(matrix(4, 200, 300)).items():
        played.clear()
        (mine, staging), both = quantized(quantizer, x), one_read(quantizer)(x, ops.amax(x), slot=a_slot())
        assert played, how
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(casts, "_has_kernel", lambda x: False)
            one, recorded = quantized(quantizer, x)
            assert_same(mine, one)
            assert_same(both[0], one)
            assert_same(both[1], quantized(quantizer, x.t())[0])
            assert_bit_equal(staging, recorded, how)


def test_a_transposed_view_is_not_copied(played):
    x = matrix(5, 128, 256)
    for view in (x, x.t()):
        ops.cast_fp8_block(view, (1, 128), E4M3, power_of_two=True)
        ops.cast_fp8_tensor(view, E4M3, Fp8Scale(amax=ops.amax(view)))
    assert {(job if isinstance(job, Tensor) else job.x).data_ptr() for job in played} == {x.data_ptr()}
    assert len(played) == 6


def test_blocks_without_a_kernel_run_the_reference(played):
    ops.cast_fp8_block(matrix(6, 64, 64), (1, 32), E4M3, power_of_two=True)
    assert not played


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_operands_do_not_depend_on_what_is_asked_with_them(recipe):
    """Rowwise and columnwise, alone and together."""
    for tensor in ("x", "w", "dy"):
        made = {}
        for row, col in ((True, False), (False, True), (True, True)):
            spec = make_spec(STYLES["local", False], load(recipe))
            spec.runtime.cores[0] = SimpleNamespace(weights=lambda: [torch.zeros(1)], specs=lambda spec=spec: [spec])
            (made[row, col],) = operands.quantize(spec, tensor, [matrix(7, 96, 160)], row=row, col=col)
        assert_same(made[True, True].rowwise(), made[True, False].rowwise())
        assert_same(made[True, True].columnwise(), made[False, True].columnwise())


def test_one_read_makes_both_operands(played):
    spec = make_spec(STYLES["local", False], load("fp8_block"))
    operands.quantize(spec, "x", [matrix(8, 128, 128)], row=True, col=True)
    (job,) = played
    assert job.codes is not None and job.codes_t is not None


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block"])
def test_weights_cast_together_are_those_cast_alone(recipe, played):
    losses, runtime = trained(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(casts, "_has_kernel", lambda x: False)
        expected, alone = trained(recipe)
    assert_bit_equal(losses, expected, recipe)
    assert len(expected.unique()) == len(expected), "the weights change"
    assert runtime.weight_batch._launches and not alone.weight_batch._launches


def test_a_step_in_between_only_launches(played, monkeypatch):
    prepared = []
    prepare = weight_batch._prepare
    monkeypatch.setattr(weight_batch, "_prepare", lambda jobs: prepared.append(len(jobs)) or prepare(jobs))
    trained("fp8_current", steps=8)
    assert prepared == [2, 0, 2], "tables are written anew where something has moved: at first, and after the load"


def test_agreed_weights_are_cast_by_their_layer(played):
    spec = make_spec(STYLES["column", False], load("fp8_current", amax_scope="all"))
    assert operands.weights_agree(spec)
    assert not operands.weights_agree(make_spec(STYLES["column", False], load("fp8_current")))


def test_what_is_missing_is_said_once_and_in_the_plan(monkeypatch, caplog):
    sentence = "native kernels need nvcc, which is not on PATH: the plain-torch reference runs instead"

    def load_nothing() -> None:
        raise loader.MissingError(sentence)

    loader.missing.cache_clear()
    monkeypatch.setattr(loader, "load", load_nothing)
    monkeypatch.setattr(notes, "device_kind", lambda device_type: "sm_90")
    try:
        plans = {name: notes.support_note(load(name), "cuda") for name in ("bf16", "fp8_current", "mxfp8")}
    finally:
        loader.missing.cache_clear()
    assert caplog.messages == [sentence]
    assert plans["fp8_current"].endswith(f"; casts by reference ({sentence})")
    assert plans["mxfp8"].endswith("; casts by reference")
    assert "casts" not in plans["bf16"]


def test_what_has_kernels_is_named(monkeypatch):
    monkeypatch.setattr(loader, "missing", lambda: "")
    assert {ops.quantizer_kernels(op, "cuda") for op in casts.WITH_KERNELS} == {"kernel"}
    assert ops.quantizer_kernels("cast_mxfp8", "cuda") == ops.quantizer_kernels("amax", "cpu") == "reference"
    for quantizer in QUANTIZERS:
        assert bool(cast_op(quantizer)) == (quantizer in OFFERING)
        assert cast_op(quantizer) in ("", *casts.WITH_KERNELS)


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
        with pytest.raises(ValueError, match="rows are apart; got strides"):
            cuda._matrix(x)
