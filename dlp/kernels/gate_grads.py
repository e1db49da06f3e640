"""Amaxes and casts of the gradients dgate and dup of a gated activation h = act(gate) * up, given dh. A kernel reads dh, gate
and up once and does not store the gradients. Without a kernel, two separate operations give bitwise equal results.

    amax_gate_grads               max |dgate| and max |dup|
    cast_gate_grads_fp8_tensor    `cast_fp8_tensor_both` of dgate and of dup
    cast_gate_grads_fp8_block     `cast_fp8_block_both` of dgate and of dup

Kernels exist for SwiGLU in bf16, in complete tiles of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import cuda_gate_grads, registry
from dlp.kernels.casts import _empty_tensor_both, _tensor_job, amax, cast_fp8_tensor_both, cast_fp8_tensor_both_kernel
from dlp.kernels.casts_blocks import (
    _as_gemms_read,
    _empty_block,
    _laid_out,
    cast_fp8_block_both,
    cast_fp8_block_both_kernel,
)
from dlp.kernels.dispatch import Flags
from dlp.kernels.lazy_activations import GatedGrad, GatedGrads
from dlp.kernels.lazy_matrix import GRADIENT_CODES, fuses, stored
from dlp.kernels.reference import Fp8Scale
from dlp.kernels.reference.fp8 import Block, Parts
from dlp.kernels.registry import operation

TILE = 128
Pair = tuple[Any, Any]  # results for dgate and for dup


def _each(grads: GatedGrads) -> tuple[GatedGrad, GatedGrad]:
    return GatedGrad(grads, 0), GatedGrad(grads, 1)


def _reads(grads: GatedGrads) -> tuple[Tensor, Tensor, Tensor]:
    return stored(grads.dh), grads.gate, grads.up


def takes_gate_grads(grads: GatedGrads, dtype: torch.dtype = GRADIENT_CODES[0]) -> bool:
    """Return whether the kernels support these gradients: of SwiGLU in bf16, in complete tiles, with aligned rows, cast to E4M3
    or E5M2."""
    rows, cols = grads.gate.shape
    whole = rows > 0 and cols > 0 and rows % TILE == 0 and cols % TILE == 0
    given = _reads(grads)
    aligned = all(x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in given)
    return grads.name == "silu" and whole and aligned and fuses(dtype, *given, casts=GRADIENT_CODES)


def takes_cast_tensor(grads: GatedGrads, dtype: torch.dtype, *_: Any) -> bool:
    """Return whether the kernel supports these gradients; False if a user-defined kernel casts a single gradient, so that the
    user-defined kernel runs."""
    ours = registry.choose("cast_fp8_tensor_both", grads.gate, dtype).run is cast_fp8_tensor_both_kernel
    return ours and takes_gate_grads(grads, dtype)


def takes_cast_block(grads: GatedGrads, block: Block, dtype: torch.dtype, *_: Any, **__: Any) -> bool:
    ours = registry.choose("cast_fp8_block_both", grads.gate, block, dtype).run is cast_fp8_block_both_kernel
    return ours and block == (1, 128) and takes_gate_grads(grads, dtype)


@operation
def amax_gate_grads(grads: GatedGrads) -> Pair:
    """Return max |dgate| and max |dup|, fp32 []."""
    of_gate, of_up = _each(grads)
    return amax(of_gate), amax(of_up)


def amax_gate_grads_kernel(grads: GatedGrads) -> Pair:
    out = torch.empty(2, device=grads.gate.device)
    cuda_gate_grads.amaxes(*_reads(grads), out)
    return out[0], out[1]


@operation
def cast_gate_grads_fp8_tensor(
    grads: GatedGrads, dtype: torch.dtype, sources: Sequence[Fp8Scale], flags: Flags
) -> Pair:  # fmt: skip
    """Return the parts of dgate and dgate.t(), and of dup and dup.t(); `sources` and `flags` have one entry per gradient."""
    first, second = (
        cast_fp8_tensor_both(grad, dtype, source, flag=flag)
        for grad, source, flag in zip(_each(grads), sources, flags, strict=True)
    )
    return first, second


def cast_gate_grads_fp8_tensor_kernel(
    grads: GatedGrads, dtype: torch.dtype, sources: Sequence[Fp8Scale], flags: Flags
) -> Pair:  # fmt: skip
    x, made, jobs = grads.gate, list[tuple[Parts, Parts]](), []
    for source, flag in zip(sources, flags, strict=True):
        both = _empty_tensor_both(x, dtype)
        made.append(both)
        jobs.append(_tensor_job(x, *both, source, flag))
    source = sources[0]
    cuda_gate_grads.cast_tensor(
        *_reads(grads), (jobs[0], jobs[1]), power_of_two=source.power_of_two, epsilon=source.epsilon
    )
    return made[0], made[1]


@operation
def cast_gate_grads_fp8_block(
    grads: GatedGrads, block: Block, dtype: torch.dtype, flags: Flags, *, power_of_two: bool, epsilon: float = 0.0
) -> Pair:
    """Return the parts of dgate and dgate.t(), and of dup and dup.t(), with one scale per block."""
    first, second = (
        cast_fp8_block_both(grad, block, dtype, power_of_two=power_of_two, epsilon=epsilon, flag=flag)
        for grad, flag in zip(_each(grads), flags, strict=True)
    )
    return first, second


def cast_gate_grads_fp8_block_kernel(
    grads: GatedGrads, block: Block, dtype: torch.dtype, flags: Flags, **options: Any
) -> Pair:  # fmt: skip
    x, made, jobs, layouts = grads.gate, list[tuple[Parts, Parts]](), [], []
    for flag in flags:
        row, col = (_empty_block(x, False, dtype, shape) for shape in (x.shape, x.shape[::-1]))
        job, gemm_layout = _laid_out(x, row, col, flag, partial(_as_gemms_read, tile=False))
        made.append((row, col))
        jobs.append(job)
        layouts.append(gemm_layout)
    assert layouts[0] == layouts[1], "both gradients have newly allocated scales"
    cuda_gate_grads.cast_block(*_reads(grads), (jobs[0], jobs[1]), gemm_layout=layouts[0], **options)
    return made[0], made[1]
