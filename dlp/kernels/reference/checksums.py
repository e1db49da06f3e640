"""Checksums of the bits of tensors, which detect a flipped bit and exchanged words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW = 1024  # number of 8-byte words in a row of the computation


def checksums(*tensors: Tensor) -> Tensor:
    """Return a checksum of the bits of each tensor, int64 [number of tensors]; the tensors are on one device.

        sum_i (2 i + 1) w_i  modulo 2^64,     w_i: the i-th word of 8 bytes of the elements in row-major order

    The last word is filled up with zero bytes. As in Fletcher's checksum, the position has a weight, so that words in another
    order change the sum. Weights are odd, so that any single flipped bit changes the sum."""
    return torch.stack([_checksum(tensor) for tensor in tensors])


def _checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of one tensor. The words are summed by rows and by columns, which needs no products of the size of
    the tensor: the word with index ROW * r + c has the weight 2 * ROW * r + (2 * c + 1)."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(data) % (8 * ROW) or data.storage_offset() % 8:
        data = F.pad(data, (0, -len(data) % (8 * ROW)))
    words = data.view(torch.int64).view(-1, ROW)
    rows, columns = (torch.arange(count, device=words.device) for count in words.shape)
    return (2 * ROW * rows * words.sum(1)).sum() + ((2 * columns + 1) * words.sum(0)).sum()
