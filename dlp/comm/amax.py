"""agree: one coalesced MAX all-reduce for everything observed so far.

The reduction sits between a quantizer's `observe` and its `cast`, so every rank of the group derives the same scale.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer


def agree(observed: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """fp32 tensors of any shapes, the same shapes on all ranks -> their elementwise maxima over `group`; one all-reduce.

    The inputs are left as they are. Every rank of the group must call it, one with an empty shard too.
    """
    if group.size() == 1 or not observed:
        return list(observed)
    flat = torch.cat([value.reshape(-1) for value in observed])
    with observer.label(direction="amax", precision=""):
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
    pieces = flat.split([value.numel() for value in observed])
    return [piece.view(value.shape) for piece, value in zip(pieces, observed, strict=True)]
