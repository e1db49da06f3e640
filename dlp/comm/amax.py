"""agree: the maxima over ranks of everything observed so far, in one transfer.

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
    """fp32 tensors of any shapes, the same shapes on all ranks -> their elementwise maxima over `group`: by one kernel
    where its ranks map each other's memory (`dlp.comm.mapped`), by one all-reduce elsewhere.

    The inputs are left as they are. Every rank of the group must call it, one with an empty shard too.
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
    """The maxima over `group`, in the memory of `maxima`."""
    work = group.allreduce([maxima], _MAX)
    if work is not None:
        work.wait()
    return maxima


def _start_maxima(group: ProcessGroup, maxima: Tensor) -> list[Any]:
    work = group.allreduce([maxima], _MAX)
    return [] if work is None else [work]
