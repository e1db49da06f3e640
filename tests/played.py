"""Kernels on the CPU: functions in the kernels' place that fill a job's outputs from the reference.

What is tested with them is what lies around the kernels: which matrix they get, which output is which operand, what is
prepared for many matrices and when it is prepared anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import casts, cuda, cuda_fp4, cuda_producers, cuda_rowwise, dispatch, reference, table
from dlp.kernels.cuda import BlockJob, TensorJob
from dlp.kernels.cuda_fp4 import Nvfp4Job
from dlp.kernels.cuda_rowwise import RowwiseJob
from dlp.kernels.reference import Fp8Scale

CASTS = ("cast_fp8_tensor", "cast_fp8_rowwise", "cast_fp8_block", "cast_mxfp8", "cast_nvfp4")
PLAYED = (
    "amax", "amax_lines", "amax_nvfp4", "amax_nvfp4_both", *CASTS, *(f"{cast}_both" for cast in CASTS), "rms_norm", "swiglu",
    "column_sums",
)  # fmt: skip


@contextmanager
def by_reference() -> Iterator[None]:
    """Inside `playing`, the references run all the same."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dispatch, "has_kernel", lambda x: False)
        for operation in PLAYED:
            monkeypatch.setitem(table._ON[operation], "cpu", table.entries(operation, "cpu")[-1:])
        yield


@contextmanager
def playing() -> Iterator[list[object]]:
    """Inside, kernels run on the CPU; the list of their jobs."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield _play(monkeypatch)


def _play(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    jobs: list[object] = []

    def cast_tensor(job: TensorJob, source: Any = cuda.MATRIX, **options: bool | float) -> None:
        jobs.append(job)
        job = _made(job, source)
        source = Fp8Scale(job.amax, job.scale, job.staging, **options)  # type: ignore[arg-type]
        codes, scale_inv = reference.cast_fp8_tensor(job.x, _code_dtype(job), source)
        _fill((job.codes, job.codes_t, job.scale_inv), (codes, codes.t(), scale_inv))

    def cast_block(
        job: BlockJob, *, tile: bool, gemm_layout: bool, source: Any = cuda.MATRIX, **options: bool | float
    ) -> None:
        jobs.append(job)
        job = _made(job, source)
        for source, out in ((job.x, job[1:3]), (job.x.t(), job[3:5])):
            made = reference.cast_fp8_block(source, (128 if tile else 1, 128), _code_dtype(job), **options)  # type: ignore[arg-type]
            _fill(out, made)

    def cast_mxfp8(job: BlockJob, *, tile: bool, rule: str, blocks_first: bool, source: Any = cuda.MATRIX) -> None:
        jobs.append(job)
        job = _made(job, source)
        for source, out in ((job.x, job[1:3]), (job.x.t(), job[3:5])):
            codes, scale = reference.cast_mxfp8(source, (32 if tile else 1, 32), _code_dtype(job), rule=rule)
            _fill(out, (codes, F.pad(scale.t(), (0, -len(scale) % 4)) if blocks_first else scale))

    def amax(x: Tensor, out: Tensor) -> None:
        jobs.append(x)
        out.copy_(reference.amax(x))

    def amax_lines(x: Tensor, rows: Tensor | None, cols: Tensor | None, source: Any = cuda.MATRIX) -> None:
        jobs.append(x)
        x = _made_matrix(x, source)
        _fill((rows, cols), (reference.amax(x, 1), reference.amax(x, 0)))

    def amax_lines_batch(xs: Sequence[Tensor], outs: Sequence[tuple[Tensor, Tensor]]):
        return lambda: [amax_lines(_readable(x), *out) for x, out in zip(xs, outs, strict=True)]

    def cast_rowwise(job: RowwiseJob, *, power_of_two: bool, epsilon: float, source: Any = cuda.MATRIX) -> None:
        jobs.append(job)
        job = _made(job, source)
        for source, (codes, amax, scale_inv) in ((job.x, job[1:4]), (job.x.t(), job[4:7])):
            if codes is not None:
                made = casts._rowwise_by_reference(source, amax, codes.dtype, power_of_two, epsilon)
                _fill((codes, scale_inv), made)

    def amax_rht(x: Tensor, out: Tensor) -> None:
        jobs.append(x)
        out.copy_(torch.stack([reference.amax(x), reference.amax(reference.rht16(x.t()))]))

    def cast_nvfp4(
        job: Nvfp4Job, *, rht: bool = False, draws: tuple[Any, Any] = (None, None), tile: bool = False,
        source: Any = cuda.MATRIX, four_over_six: bool = False,
    ) -> None:  # fmt: skip
        jobs.append(job)
        job = _made(job, source)
        for turned, draw, source, (codes, scale, amax, out) in (
            (False, draws[0], job.x, job[1:5]), (rht, draws[1], job.x.t(), job[5:9]),
        ):  # fmt: skip
            if codes is not None:
                random = None if draw is None else draw.bytes(*source.shape)
                values = reference.rht16(source) if turned else source
                made = reference.cast_nvfp4(
                    values, amax, (16 if tile else 1, 16), random=random, four_over_six=four_over_six
                )
                stored = reference.nvfp4_stored_amax(amax, four_over_six=four_over_six)
                _fill((codes, scale, out), (*made, stored))

    def cast_nvfp4_tile(job: Nvfp4Job, *, four_over_six: bool = False) -> None:
        cast_nvfp4(job, tile=True, four_over_six=four_over_six)

    def batched(kernel):
        return lambda made, *more, **options: lambda: [kernel(_readable(job), *more, **options) for job in made]

    def amax_batch(xs: Sequence[Tensor], out: Tensor):
        return lambda: [amax(_readable(x), out[i]) for i, x in enumerate(xs)]

    monkeypatch.setattr(cuda, "set_zero", Tensor.zero_)
    monkeypatch.setattr(cuda, "amax_batch", amax_batch)
    monkeypatch.setattr(cuda, "cast_tensor_batch", batched(cast_tensor))
    monkeypatch.setattr(cuda, "cast_block_batch", batched(cast_block))
    kernels = {cuda: [cast_tensor, cast_block, cast_mxfp8, amax], cuda_rowwise: [amax_lines, cast_rowwise],
               cuda_fp4: [amax_rht, cast_nvfp4, cast_nvfp4_tile]}  # fmt: skip
    for module, functions in kernels.items():
        for kernel in functions:
            run = partial(lambda kernel, job, *more, **kw: kernel(_readable(job), *more, **kw), kernel)
            monkeypatch.setattr(module, kernel.__name__, run)
    monkeypatch.setattr(cuda, "cast_mxfp8_batch", batched(cast_mxfp8))
    monkeypatch.setattr(cuda_rowwise, "cast_rowwise_batch", batched(cast_rowwise))
    monkeypatch.setattr(cuda_rowwise, "amax_lines_batch", amax_lines_batch)
    monkeypatch.setattr(cuda_fp4, "cast_nvfp4_batch", batched(cast_nvfp4))
    monkeypatch.setattr(dispatch, "has_kernel", lambda x: x.dim() == 2 and x.dtype in cuda.INPUTS)
    monkeypatch.setattr(table, "kind_of", lambda device: "sm_100")  # of a played kernel, whose scales no GEMM reads
    for operation in PLAYED:
        monkeypatch.setitem(table._ON[operation], "cpu", table.entries(operation, "sm_90"))
    _play_producers(monkeypatch)
    return jobs


def _play_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of words, a source is a function that makes the matrix; see `_made`."""

    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, rstd: Tensor, *, y: Any = None, amax: Any = None, more: Any = None,
        total: Any = None,
    ) -> None:  # fmt: skip
        x = x if more is None else total.copy_(x + more)
        value, found = reference.rms_norm(x, weight, eps)
        _fill((rstd, y, amax), (found, value, reference.amax(value)))

    def swiglu(gate: Tensor, up: Tensor, *, h: Any = None, amax: Any = None) -> None:
        value = reference.swiglu(gate, up)
        _fill((h, amax), (value, reference.amax(value)))

    def normed(x: Tensor, weight: Tensor, rstd: Tensor) -> Any:
        return lambda x: (x.float() * rstd[:, None] * weight.float()).to(x.dtype)

    def summed(x: Tensor, parts: Tensor) -> Any:
        def take(x: Tensor) -> Tensor:
            parts.zero_()[0] = reference.column_sums(x)
            return x

        return take

    def activation(x: Tensor, name: str, out: Any = None, dy: Any = None, *, amax: Any = None) -> None:
        value = reference.activation(x, name) if dy is None else reference.activation_backward(dy, x, name)
        _fill((out, amax), (value, reference.amax(value)))

    def gate(gate: Tensor, up: Tensor, name: str, h: Any = None, *, amax: Any = None) -> None:
        value = reference.gated(gate, up, name)
        _fill((h, amax), (value, reference.amax(value)))

    def beside(x: Tensor, up: Tensor, name: str, *, slope: bool = False, parts: Any = None) -> Any:
        def make(x: Tensor) -> Tensor:
            made = reference.activation_backward(up, x, name) if slope else reference.gated(x, up, name)
            return made if parts is None else summed(made, parts)(made)

        return make

    played = {
        "activation": activation, "gate": gate, "beside_source": beside,
        "activation_source": lambda name: lambda x: reference.activation(x, name),
        "rms_norm": rms_norm, "swiglu": swiglu, "rms_norm_source": normed, "column_sums_source": summed,
        "swiglu_source": lambda gate, up: lambda x: reference.swiglu(x, up),
        "column_sums": lambda x, out: out.copy_(reference.column_sums(x)),
        "empty_parts": lambda x: torch.empty(max(1, -(-len(x) // 128)), x.shape[1]),
        "sum_parts": lambda parts, out: out.copy_(reference.sum_parts(parts)),
    }  # fmt: skip
    for name, play in played.items():
        monkeypatch.setattr(cuda_producers, name, play)


def _made_matrix(x: Tensor, source: Any) -> Tensor:
    return source(x) if callable(source) else x


def _made(job: Any, source: Any) -> Any:
    """The job as a kernel casts it."""
    made = job._replace(x=_made_matrix(job.x, source))
    reference.watched(made.x, made.flag)
    return made


def _readable(job: Any) -> Any:
    cuda._matrix(job if isinstance(job, Tensor) else job.x)  # raises for what no kernel reads
    return job


def _code_dtype(job: TensorJob | BlockJob | RowwiseJob) -> torch.dtype:
    return next(codes for codes in (job.codes, job.codes_t) if codes is not None).dtype


def _fill(outputs: tuple[Tensor | None, ...], made: tuple[Tensor, ...]) -> None:
    for out, value in zip(outputs, made, strict=True):
        if out is not None:
            assert out.shape == value.shape and out.is_contiguous()
            out.copy_(value)
