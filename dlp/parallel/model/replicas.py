"""A look at the gradients of parameters that tp does not cut: replicas that get different ones drift apart.

A module that is replicated on tp but reads features that tp cuts (a norm over head_dim behind a column-parallel q) gets on
each rank the gradient of its own features. Shapes do not show it; the first gradients that are not zero do. Replicas that
drifted all the same are found by their values when a checkpoint is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from dlp.comm import observer
from dlp.comm.collectives import all_gather
from dlp.comm.mesh import TP, placement_on
from dlp.parallel.model.grads import local_grad

PROBES = 4
SAMPLE = 1024
TOLERANCE = 1e-2
ALWAYS, THEN = 10, 100  # looks: in the first ten steps, and in every hundredth


def looks(step: int) -> bool:
    """Whether before step number `step`, from 0, somebody takes a look for which the device must be waited for."""
    return step < ALWAYS or step % THEN == 0


class Replicas:
    """The replicated parameters of a model whose gradients have not been seen yet. `partial`: the names of those that are
    summed over tp, and need no look."""

    def __init__(self, model: nn.Module, partial: set[str], group: ProcessGroup) -> None:
        self._model, self._group = model, group
        self._unseen = dict.fromkeys(name for name, _ in replicated(model) if name not in partial)

    def look(self, step: int) -> None:
        """Before step number `step`, from 0: compare over the tp group the gradients that are not zero for the first time;
        all its ranks call it. RuntimeError, on all of them, naming the first whose ranks disagree by more than TOLERANCE
        of its norm."""
        found = {name: p for name, p in replicated(self._model) if name in self._unseen and p.requires_grad}
        if self._group.size() == 1 or not found or not looks(step):
            return
        with observer.label(layer="replicas", direction="other"):
            (seen,) = all_gather((torch.stack([_probe(p) for p in found.values()])[None],), (0,), self._group).wait()
        spread, norm = seen.amax(0) - seen.amin(0), seen[..., 0].amax(0)
        differ = (spread > TOLERANCE * norm[:, None]).any(1).tolist()
        for name, bad, norms in zip(found, differ, seen[..., 0].t().tolist(), strict=True):
            if bad:
                raise RuntimeError(
                    f"{name} is replicated on tp, but its gradient differs between tp ranks (norms "
                    f"{', '.join(f'{value:.4g}' for value in norms)}), so that its replicas would drift apart. If its module "
                    f"reads features that tp cuts, as a norm behind a column-parallel q does, add it to a layer group with "
                    f"style = 'column': its gradients are then summed over tp"
                )
            if max(norms) > 0:
                del self._unseen[name]


@torch.no_grad()
def check_equal(model: nn.Module, group: ProcessGroup) -> None:
    """Compare what tp ranks hold of each replicated parameter; all of them call it. RuntimeError, on all of them, naming the
    first whose replicas have drifted apart by more than TOLERANCE of its norm, in a sample of SAMPLE values."""
    found = dict(replicated(model))
    if group.size() == 1 or not found:
        return
    samples = [_sample(parameter) for parameter in found.values()]
    with observer.label(layer="replicas", direction="other"):
        (seen,) = all_gather((torch.cat(samples)[None],), (0,), group).wait()
    pieces = seen.split([len(sample) for sample in samples], 1)
    distances = [(its - its[:1]).norm(dim=1).amax() / its.norm(dim=1).amax().clamp(min=1e-30) for its in pieces]
    for name, apart in zip(found, torch.stack(distances).tolist(), strict=True):
        if apart > TOLERANCE:
            raise RuntimeError(
                f"{name} is replicated on tp, but its replicas have drifted {apart:.2%} apart: its gradients differ between "
                f"tp ranks. If its module reads features that tp cuts, add it to a layer group with style = 'column'; start "
                f"anew from a checkpoint in which they are equal"
            )


def replicated(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """The parameters that are whole on every tp rank (shards over dp count as whole)."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and isinstance(placement_on(TP, parameter), Replicate):
            yield name, parameter


def _sample(parameter: DTensor) -> Tensor:
    """fp32, up to SAMPLE of this rank's values, evenly spaced."""
    flat = parameter._local_tensor.reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)].float()


def _probe(parameter: DTensor) -> Tensor:
    """Of its gradient: fp32 [1 + PROBES]: the norm, and sums of interleaved parts, each over the root of its count. Zeros
    where there is none."""
    grad = local_grad(parameter)
    if grad is None:
        return torch.zeros(1 + PROBES, device=parameter.device)
    flat = grad.detach().float().reshape(-1)
    parts = torch.nn.functional.pad(flat, (0, -len(flat) % PROBES)).view(-1, PROBES)
    return torch.cat([flat.norm()[None], parts.sum(0) / max(len(parts), 1) ** 0.5])
