"""RotaryPositionEmbedding: the angles that `TransformerLayer` takes as rotary_pos_emb."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryPositionEmbedding(nn.Module):
    """Compute the angles of rotary position embedding (Su et al., arXiv 2104.09864).

    Angle i of a position is position * rotary_base^(-2 i / dim). Each angle rotates a pair of features, and is returned for
    both features.

    Args:
        dim: number of features of a head.
        rotary_base: base of the angles.
        interleaved: True: a pair consists of features 2 i and 2 i + 1. False: a pair consists of features i and
            i + dim / 2.

    Shape:
        - output of forward(max_seq_len): fp32 [max_seq_len, 1, 1, dim]

    Raises:
        ValueError: for an odd dim.
    """

    inv_freq: Tensor

    def __init__(self, dim: int, *, rotary_base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"RotaryPositionEmbedding: dim must be even; got {dim}")
        self.interleaved = interleaved
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", rotary_base**-exponents, persistent=False)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of positions `offset` to `offset` + `max_seq_len` - 1."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        angles = torch.outer(positions, self.inv_freq)
        both = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return both.reshape(max_seq_len, 1, 1, -1)
