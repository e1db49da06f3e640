"""Sum of the losses of all microbatches that is bitwise equal on every mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dlp.comm import observer
from dlp.comm.mesh import TP, ParallelDims
from dlp.kernels.canonical import pairwise
from launch.ranks.links import OWN


def sum_of_pieces(losses: Sequence[Tensor], dims: ParallelDims) -> Tensor:
    """Return a number whose sum over all ranks is tp times the loss of the global batch, fp32 []: that value on the first rank
    of the mesh, 0 on all other ranks, so that the sum over ranks does not round.

    losses: losses of the microbatches of this rank. The losses of all data-parallel ranks are added pairwise as a binary tree,
    in the order of the global batch: microbatch g of data-parallel rank d is number g * dp_size + d.
    """
    own = torch.stack(list(losses))
    every = own.new_empty(dist.get_world_size(), len(own))
    with observer.label(**OWN):
        dist.all_gather(list(every.unbind()), own)
    total = pairwise(every[:: dims.tp].t().flatten().unbind())  # ranks of tp have equal losses
    first = dims.dp_rank == 0 and dims.rank(TP) == 0
    return total * dims.tp if first else torch.zeros_like(total)
