"""Cross entropy of rows of logits, forward and backward: CUDA kernels, or the plain-torch reference.

The reference runs on other devices, for logits with non-adjacent columns or other dtypes than bf16 and fp32, and under
torch.compile and fake tensors, where inductor fuses plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from dlp.kernels import cuda_loss, reference
from dlp.kernels.registry import operation


def _traced(logits: Tensor) -> bool:
    return torch.compiler.is_compiling() or isinstance(logits, FakeTensor)


def log_sum_exp(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return log(sum(exp(logits))) of each row and the logit at the target, fp32 [M], of logits [M, C] and target int64 [M];
    the logit is 0 for a target outside the columns."""
    return (reference.log_sum_exp if _traced(logits) else _log_sum_exp)(logits, target)


def softmax_gradient(logits: Tensor, target: Tensor, log_sum: Tensor, weight: Tensor) -> Tensor:
    """Return (exp(logits - log_sum) - one_hot(target)) * weight [M, C], the gradient of the cross entropy with one weight per
    row, in the dtype of logits [M, C]; target int64 [M], log_sum and weight fp32 [M]."""
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
