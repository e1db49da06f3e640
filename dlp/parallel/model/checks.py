"""Checks: comparisons that find what would otherwise go wrong in silence. Each raises RuntimeError that names the tensor.

    compare, check_gathered   numbers that ranks must share are equal on all of them: scales, parts that a gather leaves out
    Replicas, check_replicas  parameters that tp does not cut get equal gradients, and hold equal values
    StaleWeights              weights that something else than the step of an attached optimizer has changed, so that the
                              casts of them are stale

Those of ranks are collective: all ranks of the group call them together. Those that wait for the device run in the first
ten steps, and in every hundredth (`looks`).

Of stale weights,

    seen at once    in-place operations (torch's version counters), the steps of other optimizers, exchanged parameters and
                    memory: looked at before each forward of the model; the casts are dropped, and weights are cast where
                    they are used until the next step boundary
    seen by values  writes that no counter sees, as those into `.data` or into the local tensor of a detached DTensor: a
                    sample of each weight, compared before forwards without gradients and, at times, before the optimizer's
                    step

What neither sees has to be told by `end_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from dlp.comm import observer
from dlp.comm.amax import agree
from dlp.comm.collectives import all_gather
from dlp.comm.mesh import TP, placement_on
from dlp.quant.tensor import SHARED, QuantizedTensor

PROBES = 4  # sums of parts of a gradient
REPLICA_SAMPLE = 1024  # values of a replica
TOLERANCE = 1e-2
WEIGHT_SAMPLE = 64  # values of a weight
ALWAYS, THEN = 10, 100
Named = dict[str, Tensor]
Mark = tuple[int, int, int, int]


def looks(step: int) -> bool:
    """Whether before step number `step`, from 0, somebody takes a look for which the device must be waited for."""
    return step < ALWAYS or step % THEN == 0


# ---- numbers that ranks share


def compare(scales: Named, group: ProcessGroup) -> None:
    """All ranks of `group` hold these numbers, with the same bits. Raises RuntimeError on all of them where not."""
    if group.size() == 1 or not scales:
        return
    bits = torch.cat([tensor.detach().reshape(-1).float() for tensor in scales.values()]).view(torch.int32)
    most, not_least = agree([bits, ~bits], group)
    wrong = torch.nonzero(most != ~not_least).flatten().tolist()
    if wrong:
        names = [name for name, tensor in scales.items() for _ in range(tensor.numel())]
        low, high = ((~not_least).view(torch.float32)[wrong[0]].item(), most.view(torch.float32)[wrong[0]].item())
        raise RuntimeError(
            f"{len(wrong)} scales differ between ranks that must share them, first {names[wrong[0]]}: from {low:g} to "
            f"{high:g}; the amax group lacks ranks, or their states have parted"
        )


def check_gathered(layer: str, gemm: str, mine: QuantizedTensor, dim: int, group: ProcessGroup) -> None:
    """The parts of an operand of this GEMM that a gather along `dim` takes for equal."""
    compare({f"{layer} {gemm} {name}": tensor for name, tensor in not_sent(mine, dim).items()}, group)


def not_sent(mine: QuantizedTensor, dim: int) -> Named:
    """The parts that a gather along `dim` does not send, since all ranks have them."""
    parts: Sequence[Tensor] = mine.parts
    return {
        part.name: tensor
        for part, tensor in zip(mine.format.parts, parts, strict=True)
        if part.moves_along(dim) is SHARED
    }


# ---- replicas on tp


class Replicas:
    """A look at the gradients of parameters that tp does not cut: replicas that get different ones drift apart.

    A module that is replicated on tp but reads features that tp cuts (a norm over head_dim behind a column-parallel q) gets on
    each rank the gradient of its own features. Shapes do not show it; the first gradients that are not zero do. `partial`: the
    names of parameters that are summed over tp, and need no look."""

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
def check_replicas(model: nn.Module, group: ProcessGroup) -> None:
    """Compare what tp ranks hold of each replicated parameter; all of them call it. RuntimeError, on all of them, naming the
    first whose replicas have drifted apart by more than TOLERANCE of its norm, in a sample of REPLICA_SAMPLE values."""
    found = dict(replicated(model))
    if group.size() == 1 or not found:
        return
    samples = [_evenly(parameter, REPLICA_SAMPLE).float() for parameter in found.values()]
    with observer.label(layer="replicas", direction="other"):
        (seen,) = all_gather((torch.cat(samples)[None],), (0,), group).wait()
    pieces = seen.split([len(sample) for sample in samples], 1)
    distances = [(its - its[:1]).norm(dim=1).amax() / its.norm(dim=1).amax().clamp(min=1e-30) for its in pieces]
    for name, drift in zip(found, torch.stack(distances).tolist(), strict=True):
        if drift > TOLERANCE:
            raise RuntimeError(
                f"{name} is replicated on tp, but its replicas have drifted {drift:.2%} apart: its gradients differ between "
                f"tp ranks. If its module reads features that tp cuts, add it to a layer group with style = 'column'; start "
                f"anew from a checkpoint in which they are equal"
            )


def replicated(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """The parameters that are whole on every tp rank (shards over dp count as whole)."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and isinstance(placement_on(TP, parameter), Replicate):
            yield name, parameter


def _probe(parameter: DTensor) -> Tensor:
    """Of its gradient: fp32 [1 + PROBES]: the norm, and sums of interleaved parts, each over the root of its count. Zeros
    where there is none."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros(1 + PROBES, device=parameter.device)
    flat = (grad._local_tensor if isinstance(grad, DTensor) else grad).detach().float().reshape(-1)
    parts = torch.nn.functional.pad(flat, (0, -len(flat) % PROBES)).view(-1, PROBES)
    return torch.cat([flat.norm()[None], parts.sum(0) / max(len(parts), 1) ** 0.5])


# ---- weights that were changed after their casts


class CastWeight(Protocol):
    """What is read of a weight here; see `dlp.parallel.weight.base.Weight`."""

    managed: bool

    @property
    def name(self) -> str: ...

    @property
    def stored(self) -> Tensor | None: ...


class LayerWeights(Protocol):
    """Those of one layer; see `dlp.parallel.weight.base.LayerWeights`."""

    parts: Any

    @property
    def members(self) -> Sequence[CastWeight]: ...

    def __iter__(self) -> Iterator[Any]: ...

    def stored(self) -> list[Tensor]: ...

    def in_use(self) -> bool: ...

    def drop(self) -> None: ...


def _mark(parameter: Any) -> Mark:
    """What changes when it is exchanged, or written to by an operation that torch counts."""
    tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return id(parameter), parameter._version, tensor._version, tensor.data_ptr()


class StaleWeights:
    """The weights of one model as they were cast last: their marks, views of their samples, and what those held."""

    def __init__(self) -> None:
        self._marks: dict[LayerWeights, list[Mark]] = {}
        self._views: dict[LayerWeights, list[Tensor]] = {}
        self._seen: list[Tensor] = []
        self._whole: list[CastWeight] = []  # whose parameters layers hold as they are
        self._whole_marks: list[Mark] = []

    @torch.no_grad()
    def cast(self, layers: Sequence[LayerWeights]) -> None:
        """The weights of these layers have just been cast."""
        for weights in layers:
            parameters = weights.stored()
            marks, before = list(map(_mark, parameters)), self._marks.get(weights)
            if before is None or any(old[::3] != new[::3] for old, new in zip(before, marks, strict=True)):
                self._views[weights] = [_evenly(parameter, WEIGHT_SAMPLE) for parameter in parameters]
            self._marks[weights] = marks
        self._whole = [weight for weights in self._marks for weight in weights if not weight.managed]
        self._whole_marks = self._now()
        self._seen = [torch.cat(views) for views in self._by_dtype().values()]

    def _now(self) -> list[Mark]:
        return [_mark(weight.stored) for weight in self._whole]

    def moved(self, weights: LayerWeights) -> bool:
        """Whether its weights are others than those that were cast, as far as torch counts that."""
        marks = self._marks.get(weights)
        return marks is not None and marks != list(map(_mark, weights.stored()))

    def drop_moved(self) -> None:
        """Forget the casts of weights that have moved."""
        if self._now() != self._whole_marks or any(weight.managed for weights in self._marks for weight in weights):
            for weights in [each for each in self._marks if each.parts is not None and self.moved(each)]:
                weights.drop()

    @torch.no_grad()
    def check_values(self) -> None:
        """RuntimeError where a sample says that casts in use are of other weights. It waits for the device."""
        if not self._seen or (self._seen[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        now = [torch.cat(views) for views in self._by_dtype().values()]
        if all(bool((_bits(a) == _bits(b)).all()) for a, b in zip(now, self._seen, strict=True)):
            return
        before = {dtype: list(seen.split([len(view) for view in views])) for (dtype, views), seen in
                  zip(self._by_dtype().items(), self._seen, strict=True)}  # fmt: skip
        for weights, views in self._views.items():
            same = [torch.equal(_bits(view), _bits(before[view.dtype].pop(0))) for view in views]
            if not all(same) and weights.in_use() and not self.moved(weights):
                name = weights.members[same.index(False)].name
                raise RuntimeError(
                    f"{name}: its weight was changed in a way that torch does not count, as by writing into .data, and "
                    f"layers compute with casts of the old one: call dlp.end_step(model) after such a change, and after "
                    f"undoing it"
                )

    def _by_dtype(self) -> dict[torch.dtype, list[Tensor]]:
        found: dict[torch.dtype, list[Tensor]] = {}
        for views in self._views.values():
            for view in views:
                found.setdefault(view.dtype, []).append(view)
        return found

    def count_step(self, optimizer: Optimizer, layers: Sequence[LayerWeights]) -> bool:
        """An optimizer that is not attached has stepped; whether it holds weights of these layers. They count as changed:
        fused optimizers, and those of DTensors, do not tell torch."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        changed = [p for weights in layers for p in weights.stored() if id(p) in held]
        torch.autograd.graph.increment_version([p._local_tensor if isinstance(p, DTensor) else p for p in changed])
        return bool(changed)


def _evenly(parameter: Tensor, count: int) -> Tensor:
    """A view of so many of this rank's values, up to twice as many, evenly spaced; all where there are fewer."""
    flat = (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach().reshape(-1)
    return flat[:: max(1, len(flat) // count)]


def _bits(values: Tensor) -> Tensor:
    """As integers, so that NaN equals itself."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
