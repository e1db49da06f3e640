"""Cross entropy of logits whose columns may be some of a vocabulary: what a row adds to it, and its gradient.

fp32 logits exist for a chunk of rows at a time. Exponentials and sums are torch's own, so bits differ between devices; the
kernels lie within a bound of float64, as this does.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1024  # rows whose logits are in fp32 at a time


def log_sum_exp(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, C], target int64 [M] -> log(sum(exp(logits))) of each row and its logit at the target, fp32 [M] both; 0
    for a target that is no column."""
    column, here = _columns(target, logits.shape[1])
    log_sum, picked = torch.empty((2, len(logits)), device=logits.device).unbind()
    for rows in range(0, len(logits), CHUNK):
        chunk = slice(rows, rows + CHUNK)
        wide = logits[chunk].float()
        log_sum[chunk] = wide.logsumexp(1)
        picked[chunk] = torch.where(here[chunk], wide.gather(1, column[chunk, None])[:, 0], 0.0)
    return log_sum, picked


def softmax_gradient(logits: Tensor, target: Tensor, log_sum: Tensor, weight: Tensor) -> Tensor:
    """(exp(logits - log_sum) - one at the target) * weight: logits [M, C], target int64 [M], log_sum and weight fp32 [M] ->
    [M, C] in the dtype of logits; rows of weight 0 are 0, whatever the logits are."""
    column, here = _columns(target, logits.shape[1])
    gradient = torch.empty_like(logits)
    for rows in range(0, len(logits), CHUNK):
        chunk = slice(rows, rows + CHUNK)
        softmax = (logits[chunk].float() - log_sum[chunk, None]).exp_()
        softmax.scatter_add_(1, column[chunk, None], -here[chunk, None].float())
        gradient[chunk] = torch.where(weight[chunk, None] == 0, 0.0, softmax * weight[chunk, None])
    return gradient


def _columns(target: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Targets as columns that can be read, and whether they are."""
    here = (target >= 0) & (target < cols)
    return torch.where(here, target, 0), here
