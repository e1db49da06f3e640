"""Checksums of the bits of tensors, which detect a flipped bit and words in another order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def checksums(*tensors: Tensor) -> Tensor:
    """Return a checksum of the bits of each tensor, int64 [number of tensors]; the tensors are on one device.

        sum_i (2 i + 1) w_i  modulo 2^64,     w_i: the i-th word of 8 bytes of the elements in row-major order

    The last word is filled up with zero bytes. As in Fletcher's checksum, the position has a weight, so that words in another
    order change the sum. Weights are odd, so that any single flipped bit changes the sum."""
    return torch.stack([_checksum(tensor) for tensor in tensors])


def _checksum(tensor: Tensor) -> Tensor:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = F.pad(data, (0, -len(data) % 8)).view(torch.int64)
    return (words * (2 * torch.arange(len(words), device=words.device) + 1)).sum()
