"""What a row of logits adds to the cross entropy, and its gradient: by the CUDA kernels where the device has them, else by
the reference, as logits do whose columns are not adjacent or whose dtype is neither bf16 nor fp32.

torch.compile and fake tensors get the reference, too, which is plain torch for inductor to fuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from dlp.kernels import cuda_loss, reference
from dlp.kernels.cuda import readable
from dlp.kernels.registry import operation


def _traced(logits: Tensor) -> bool:
    return torch.compiler.is_compiling() or isinstance(logits, FakeTensor)


def is_readable(logits: Tensor, *_: Any) -> bool:
    return readable(logits)


def log_sum_exp(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, C], target int64 [M] -> log(sum(exp(logits))) and the logit at the target, fp32 [M]; see the reference."""
    return (reference.log_sum_exp if _traced(logits) else _log_sum_exp)(logits, target)


def softmax_gradient(logits: Tensor, target: Tensor, log_sum: Tensor, weight: Tensor) -> Tensor:
    """logits [M, C], target int64 [M], log_sum and weight fp32 [M] -> the gradient [M, C] in the dtype of logits."""
    return (reference.softmax_gradient if _traced(logits) else _softmax_gradient)(logits, target, log_sum, weight)


_log_sum_exp, _softmax_gradient = operation(reference.log_sum_exp), operation(reference.softmax_gradient)


def log_sum_exp_kernel(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_sum, picked = (torch.empty(len(logits), device=logits.device) for _ in range(2))
    cuda_loss.log_sum_exp(logits, target.contiguous(), log_sum, picked)
    return log_sum, picked


def softmax_gradient_kernel(logits: Tensor, target: Tensor, log_sum: Tensor, weight: Tensor) -> Tensor:
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    cuda_loss.softmax_gradient(logits, target.contiguous(), log_sum, weight, gradient)
    return gradient
