"""The CUDA kernels of the cross entropy, see cuda.py; within a bound of float64, and the same bits in every run."""

from __future__ import annotations

import torch
from torch import Tensor

from dlp.kernels.cuda import _matrix, _output
from dlp.kernels.launches import launch


def _vector(tensor: Tensor, x: Tensor, name: str, dtype: torch.dtype = torch.float32) -> int:
    """The pointer of a vector with an element for each row of x."""
    return _output(tensor, [len(x)], [dtype], name)


def log_sum_exp(logits: Tensor, target: Tensor, log_sum: Tensor, picked: Tensor) -> None:
    """logits [M, C], target int64 [M] -> log_sum, picked fp32 [M]; see the reference."""
    words = (
        *_matrix(logits), 0, _vector(target, logits, "target", torch.int64), _vector(log_sum, logits, "log_sum"),
        _vector(picked, logits, "picked"),
    )  # fmt: skip
    launch("log_sum_exp", logits, words, logits.dtype == torch.float32)


def softmax_gradient(logits: Tensor, target: Tensor, log_sum: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """logits [M, C], target int64 [M], log_sum, weight fp32 [M] -> gradient [M, C]; see the reference."""
    words = (
        *_matrix(logits), 0, _vector(target, logits, "target", torch.int64), _vector(log_sum, logits, "log_sum"),
        _vector(weight, logits, "weight"), _output(gradient, logits.shape, [logits.dtype], "gradient"),
    )  # fmt: skip
    launch("softmax_gradient", logits, words, logits.dtype == torch.float32)
