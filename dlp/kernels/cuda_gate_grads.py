"""CUDA kernels that cast both gradients of a SwiGLU from one read of dh, gate and up; see cuda.py.

dh, gate and up are bf16 [rows, cols]. The first job of a pair casts dgate, the second job casts dup. The kernels use only the
shape of the field x of a job.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlp.kernels.cuda import (
    BlockJob,
    TensorJob,
    Words,
    _block_words,
    _code_dtype,
    _matrix,
    _output,
    _same,
    _tensor_words,
    scale_rule,
)
from dlp.kernels.cuda_producers import _beside
from dlp.kernels.launches import launch


def amaxes(dh: Tensor, gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Write max |dgate| and max |dup| to out, fp32 [2]; the gradients are not stored."""
    launch("swiglu_backward", gate, (*_read(dh, gate, up), 0, 0, _output(out, [2], [torch.float32], "out")), False)


def _read(dh: Tensor, gate: Tensor, up: Tensor) -> Words:
    return *_matrix(gate), 0, *_beside(up, gate, "up"), *_beside(dh, gate, "dh")


def cast_tensor(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    jobs: tuple[TensorJob, TensorJob],
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
) -> None:
    """Cast both gradients to per-tensor FP8, as `cuda.cast_tensor`."""
    words = [_tensor_words(job, _matrix(job.x)) for job in jobs]
    dtype = _same([_code_dtype(job) for job in jobs], "the dtype of codes")
    observe = _same([job.staging is not None for job in jobs], "the presence of staging")
    rule = scale_rule(dtype, power_of_two, epsilon)
    given = (*_read(dh, gate, up), 0, 0, 0)
    launch("cast_gate_grads_tensor", gate, given, *words, dtype == torch.float8_e5m2, rule, observe)


def cast_block(
    dh: Tensor, gate: Tensor, up: Tensor, jobs: tuple[BlockJob, BlockJob], *, power_of_two: bool = True, epsilon: float = 0.0,
    gemm_layout: bool = False,
) -> None:  # fmt: skip
    """Cast both gradients to FP8 with one scale per 128 elements of the contraction, as `cuda.cast_block`."""
    words = [_block_words(job, False, gemm_layout) for job in jobs]
    dtype = _same([_code_dtype(job) for job in jobs], "the dtype of codes")
    rule = scale_rule(dtype, power_of_two, epsilon, torch.finfo(gate.dtype).max)
    given = (*_read(dh, gate, up), 0, 0, 0)
    launch("cast_gate_grads_block", gate, given, *words, dtype == torch.float8_e5m2, rule, gemm_layout)
