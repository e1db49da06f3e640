"""A look at the gradients of parameters that tp does not cut: replicas that get different ones drift apart.

A module that is replicated on tp but reads features that tp cuts (a norm over head_dim behind a column-parallel q) gets on
each rank the gradient of its own features. Shapes do not show it; the first gradients do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from dlp.comm import wire
from dlp.comm.collectives import all_gather

PROBES = 4
TOLERANCE = 1e-2


def check_replicas(model: nn.Module, partial: set[str], group: ProcessGroup) -> None:
    """Compare this step's gradients of replicated parameters over the tp group; all its ranks call it. RuntimeError, on
    all of them, naming the first whose ranks disagree by more than TOLERANCE of its norm. `partial`: the names of those
    that have been summed over tp."""
    found = [(name, grad) for name, grad in _replicated_grads(model) if name not in partial]
    if group.size() == 1 or not found:
        return
    with wire.label(layer="replicas", direction="other"):
        (seen,) = all_gather((torch.stack([_probe(grad) for _, grad in found])[None],), (0,), group).wait()
    spread, norm = seen.amax(0) - seen.amin(0), seen[..., 0].amax(0)
    differ = (spread > TOLERANCE * norm[:, None]).any(1).tolist()
    for (name, _), bad, norms in zip(found, differ, seen[..., 0].t().tolist(), strict=True):
        if bad:
            raise RuntimeError(
                f"{name} is replicated on tp, but its gradient differs between tp ranks (norms "
                f"{', '.join(f'{value:.4g}' for value in norms)}), so that its replicas would drift apart. If its module reads "
                f"features that tp cuts, as a norm behind a column-parallel q does, add it to a layer group with "
                f"style = 'column': its gradients are then summed over tp"
            )


def _replicated_grads(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """This rank's gradients of the parameters that are whole on every tp rank (shards over dp count as whole)."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ()
            if "tp" in axes and isinstance(parameter.placements[axes.index("tp")], Replicate):
                yield name, parameter.grad._local_tensor


def _probe(grad: Tensor) -> Tensor:
    """fp32 [1 + PROBES]: the norm, and sums of interleaved parts, each over the root of its count."""
    flat = grad.detach().float().reshape(-1)
    parts = torch.nn.functional.pad(flat, (0, -len(flat) % PROBES)).view(-1, PROBES)
    return torch.cat([flat.norm()[None], parts.sum(0) / max(len(parts), 1) ** 0.5])
