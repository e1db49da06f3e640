"""Agree on amaxes: compute the maxima over ranks of all observed amaxes in one transfer.

The reduction sits between a quantizer's `observe` and its `cast`, so every rank of the group derives the same scale.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllreduceOptions

from dlp.comm import observer
from dlp.comm.slots import MAXIMA
from dlp.comm.transport import transport_of
from dlp.kernels.cuda_codes import end_to_end
from dlp.kernels.launches import call, is_recording

_MAX = AllreduceOptions()
_MAX.reduceOp, _MAX.asyncOp = dist.ReduceOp.MAX, False  # type: ignore[assignment]


def agree(observed: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return the elementwise maxima over `group` of fp32 tensors, which have the same shapes on all ranks.

    One kernel computes the maxima where the ranks map each other's memory (`dlp.comm.mapped`), one all-reduce elsewhere. The
    inputs are not changed. Every rank of the group must call `agree`, also a rank with an empty shard.
    """
    if group.size() == 1 or not observed:
        return list(observed)
    transport = transport_of(group)
    with observer.label(direction="amax", precision=""):
        if transport is not None and all(value.numel() <= MAXIMA for value in observed):
            return transport.agree(observed)
        if is_recording():
            flat = end_to_end(observed)
            for work in call(partial(_start_maxima, group), flat):
                work.wait()
        elif len(observed) == 1:
            return [_reduced(observed[0].clone(), group)]
        else:
            flat = _reduced(torch.cat([value.reshape(-1) for value in observed]), group)
    pieces = flat.split([value.numel() for value in observed])
    return [piece.view(value.shape) for piece, value in zip(pieces, observed, strict=True)]


def _reduced(maxima: Tensor, group: ProcessGroup) -> Tensor:
    """Maxima over `group`, stored in the memory of `maxima`."""
    work = group.allreduce([maxima], _MAX)
    if work is not None:
        work.wait()
    return maxima


def _start_maxima(group: ProcessGroup, maxima: Tensor) -> list[Any]:
    work = group.allreduce([maxima], _MAX)
    return [] if work is None else [work]
