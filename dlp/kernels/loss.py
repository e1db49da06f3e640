"""What a row of logits adds to the cross entropy, and its gradient: by the CUDA kernels where the device has them, else by
the reference, as logits do whose columns are not adjacent or whose dtype is neither bf16 nor fp32.

torch.compile and fake tensors get the reference, too, which is plain torch for inductor to fuse.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from dlp.kernels import cuda_loss, reference
from dlp.kernels.producers import has_kernel


def _by_kernel(logits: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or isinstance(logits, FakeTensor)) and has_kernel(logits)


def log_sum_exp(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, C], target int64 [M] -> log(sum(exp(logits))) and the logit at the target, fp32 [M]; see the reference."""
    if not _by_kernel(logits):
        return reference.log_sum_exp(logits, target)
    log_sum, picked = (torch.empty(len(logits), device=logits.device) for _ in range(2))
    cuda_loss.log_sum_exp(logits, target.contiguous(), log_sum, picked)
    return log_sum, picked


def softmax_gradient(logits: Tensor, target: Tensor, log_sum: Tensor, weight: Tensor) -> Tensor:
    """logits [M, C], target int64 [M], log_sum and weight fp32 [M] -> the gradient [M, C] in the dtype of logits."""
    if not _by_kernel(logits):
        return reference.softmax_gradient(logits, target, log_sum, weight)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    cuda_loss.softmax_gradient(logits, target.contiguous(), log_sum, weight, gradient)
    return gradient
