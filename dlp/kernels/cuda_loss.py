"""CUDA kernels of the cross entropy. Results lie within a bound of float64, with equal bits in every run; see cuda.py."""

from __future__ import annotations

import torch
from torch import Tensor

from dlp.kernels.cuda import _matrix, _output
from dlp.kernels.launches import launch


def _vector(tensor: Tensor, x: Tensor, name: str, dtype: torch.dtype = torch.float32) -> int:
    """Return the pointer of a vector with one element for each row of x."""
    return _output(tensor, [len(x)], [dtype], name)


def log_sum_exp(logits: Tensor, target: Tensor, log_sum: Tensor, picked: Tensor) -> None:
    """Write log(sum(exp(logits))) to log_sum and the logits at target to picked: logits [M, C], target int64 [M], outputs fp32
    [M]."""
    words = (
        *_matrix(logits), 0, _vector(target, logits, "target", torch.int64), _vector(log_sum, logits, "log_sum"),
        _vector(picked, logits, "picked"),
    )  # fmt: skip
    launch("log_sum_exp", logits, words, logits.dtype == torch.float32)


def softmax_gradient(logits: Tensor, target: Tensor, log_sum: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """Write `reference.softmax_gradient` to gradient [M, C]: logits [M, C], target int64 [M], log_sum and weight fp32 [M]."""
    words = (
        *_matrix(logits), 0, _vector(target, logits, "target", torch.int64), _vector(log_sum, logits, "log_sum"),
        _vector(weight, logits, "weight"), _output(gradient, logits.shape, [logits.dtype], "gradient"),
    )  # fmt: skip
    launch("softmax_gradient", logits, words, logits.dtype == torch.float32)
