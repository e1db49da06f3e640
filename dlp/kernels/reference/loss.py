"""Cross entropy of rows of logits, forward and backward; the columns may be a shard of the vocabulary.

fp32 logits exist for one chunk of rows at a time. Exponentials and sums are torch operations, whose bits differ between
devices: the reference and the kernels are not bitwise equal, but both are within an error bound of float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1024  # number of rows with fp32 logits at a time


def log_sum_exp(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return log(sum(exp(logits))) of each row and the logit at the target, fp32 [M], of logits [M, C] and target int64 [M];
    the logit is 0 for a target outside the columns."""
    column, here = _columns(target, logits.shape[1])
    log_sum, picked = torch.empty((2, len(logits)), device=logits.device).unbind()
    for rows in range(0, len(logits), CHUNK):
        chunk = slice(rows, rows + CHUNK)
        wide = logits[chunk].float()
        log_sum[chunk] = wide.logsumexp(1)
        picked[chunk] = torch.where(here[chunk], wide.gather(1, column[chunk, None])[:, 0], 0.0)
    return log_sum, picked


def softmax_gradient(logits: Tensor, target: Tensor, log_sum: Tensor, weight: Tensor) -> Tensor:
    """Return (exp(logits - log_sum) - one_hot(target)) * weight [M, C], in the dtype of logits [M, C]; target int64 [M],
    log_sum and weight fp32 [M]. Rows with weight 0 are 0, also for non-finite logits."""
    column, here = _columns(target, logits.shape[1])
    gradient = torch.empty_like(logits)
    for rows in range(0, len(logits), CHUNK):
        chunk = slice(rows, rows + CHUNK)
        softmax = (logits[chunk].float() - log_sum[chunk, None]).exp_()
        softmax.scatter_add_(1, column[chunk, None], -here[chunk, None].float())
        gradient[chunk] = torch.where(weight[chunk, None] == 0, 0.0, softmax * weight[chunk, None])
    return gradient


def _columns(target: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Return targets as valid columns, and whether each target is a column."""
    here = (target >= 0) & (target < cols)
    return torch.where(here, target, 0), here
