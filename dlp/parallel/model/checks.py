"""Checks for errors that would otherwise stay silent. Errors and log lines name the tensor.

    compare, check_gathered   find scales that differ between ranks although all ranks must have equal scales
    StaleWeights              finds weights that changed without a step of an attached optimizer, so that their casts are old
    NonFiniteWatch            finds tensors that were not finite when they were cast

`dlp.parallel.model.replicas` checks replicas of parameters.

Checks over ranks are collective: all ranks of the group call them together. Checks before an optimizer step that wait for the
device run in the first ten steps, and then in every hundredth step (`looks`).

**Stale weights** are found in two ways. The user must call `end_step` after a change that neither way finds.

    marks     find in-place operations (by torch's version counters), steps of unattached optimizers, and replaced parameters
              or memory. Marks are compared before each forward of the model. The casts of a changed weight are dropped; until
              the next boundary each forward and backward casts the weight. A model that is compiled as a whole raises
    samples   find writes that no version counter counts, for example into `.data` or into the local tensor of a detached
              DTensor. Some values of each weight are compared before each forward without gradients, and before the
              optimizer steps that `looks` selects. A difference raises RuntimeError

**Non-finite values.** `NonFiniteWatch` reads the flags of a step (`dlp.parallel.linear.step`) one step later
(`dlp.attach(on_nonfinite=...)`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlp.comm.transport import agree
from dlp.kernels.launches import capturing
from dlp.parallel.linear.state import LayerWeights, Weight
from dlp.parallel.linear.step import FORWARD, CastName, Flags, bad_casts
from dlp.parallel.weight.local import local_tensor, local_values
from dlp.quant.tensor import SHARED, QuantizedTensor

LOG = logging.getLogger("dlp")
ACTIONS = ("raise", "warn", "ignore")
WEIGHT_SAMPLE = 64  # minimum number of values that `evenly` samples of a shard; smaller shards are compared completely
ALWAYS, THEN = 10, 100  # checks run in steps below ALWAYS, and then in each multiple of THEN
Named = dict[str, Tensor]
Mark = tuple[int, int, int, int]


def looks(step: int) -> bool:
    """Whether checks that wait for the device run before step number `step`, counted from 0. False while a CUDA graph
    captures the step."""
    return (step < ALWAYS or step % THEN == 0) and not capturing()


# ---- numbers that ranks share


def compare(scales: Named, group: ProcessGroup) -> None:
    """Raise RuntimeError on all ranks of `group` unless `scales`, as fp32, have equal bits on all ranks."""
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
            f"{high:g}; the amax group lacks ranks, or the scaling states of ranks have diverged"
        )


def check_gathered(layer: str, gemm: str, mine: QuantizedTensor, dim: int, group: ProcessGroup) -> None:
    """Compare over `group` those parts of a GEMM operand that a gather along `dim` does not send. Raises RuntimeError as
    `compare` does."""
    compare({f"{layer} {gemm} {name}": tensor for name, tensor in not_sent(mine, dim).items()}, group)


def not_sent(mine: QuantizedTensor, dim: int) -> Named:
    """Return, by name, the parts that a gather along `dim` does not send because all ranks hold equal copies."""
    parts: Sequence[Tensor] = mine.parts
    return {
        part.name: tensor
        for part, tensor in zip(mine.format.parts, parts, strict=True)
        if part.moves_along(dim) is SHARED
    }


# ---- weights that were changed after their casts


def _mark(parameter: Any) -> Mark:
    """Return numbers that change if a parameter or its memory is replaced, or if an in-place operation of torch changes the
    parameter."""
    tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return id(parameter), parameter._version, tensor._version, tensor.data_ptr()


class StaleWeights:
    """Marks and sampled values of the weights of one model at the time of the last cast."""

    def __init__(self) -> None:
        self._marks: dict[LayerWeights, list[Mark]] = {}
        self._views: dict[LayerWeights, list[Tensor]] = {}
        self._seen: list[Tensor] = []  # samples at the last cast, one tensor for each dtype
        self._whole: list[Weight] = []  # weights that FSDP does not manage
        self._managed = False  # whether FSDP manages some of the weights
        self._whole_marks: list[Mark | None] = []  # marks of `_whole` at the last cast

    @torch.no_grad()
    def cast(self, layers: Sequence[LayerWeights]) -> None:
        """Renew marks and samples of the weights of these layers, which were cast just now."""
        for weights in layers:
            parameters = weights.stored()
            marks, before = list(map(_mark, parameters)), self._marks.get(weights)
            if before is None or any(old[::3] != new[::3] for old, new in zip(before, marks, strict=True)):
                self._views[weights] = [evenly(parameter, WEIGHT_SAMPLE) for parameter in parameters]
            self._marks[weights] = marks
        everyone = [weight for weights in self._marks for weight in weights]
        self._whole = [weight for weight in everyone if not weight.managed]
        self._managed = len(self._whole) < len(everyone)
        self._whole_marks = self._now()
        seen = [torch.cat(views) for views in self._by_dtype().values()]
        # Copy into the old tensors: a CUDA graph of the step boundary writes samples to the memory of the capture
        if list(map(_kind, seen)) == list(map(_kind, self._seen)):
            for old, new in zip(self._seen, seen, strict=True):
                old.copy_(new)
        else:
            self._seen = seen

    def _now(self) -> list[Mark | None]:
        """Return the current marks of `_whole`."""
        return [None if (stored := weight.stored) is None else _mark(stored) for weight in self._whole]

    def moved(self, weights: LayerWeights) -> bool:
        """Whether the marks of a layer's weights have changed since the last cast."""
        marks = self._marks.get(weights)
        return marks is not None and marks != list(map(_mark, weights.stored()))

    def may_have_moved(self) -> bool:
        """Quick test before each forward: False if no mark can have changed since the last cast."""
        return self._managed or self._now() != self._whole_marks

    def drop_moved(self) -> None:
        """Drop the casts of weights whose marks have changed."""
        for weights in self._moved():
            weights.drop()

    def refuse_moved(self) -> None:
        """Raise RuntimeError if the marks of a weight have changed since its cast. Called by compiled code, in which the layers
        read the casts that existed when the code was entered."""
        for weights in self._moved() if self.may_have_moved() else ():
            raise RuntimeError(
                f"{weights.members[0].name}: the weight was changed outside of the step of an attached optimizer, and a model "
                f"that is compiled as a whole reads casts of the old weight: call dlp.end_step(model) after such a change, "
                f"attach the optimizer that made it (dlp.attach), or compile block by block"
            )

    def _moved(self) -> list[LayerWeights]:
        return [each for each in self._marks if each.parts is not None and self.moved(each)]

    @torch.no_grad()
    def check_values(self) -> None:
        """Raise RuntimeError if sampled values of a weight have changed since the current cast of the weight, but its marks
        have not. Waits for the device."""
        if not self._seen or capturing():
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
                    f"{name}: the weight was changed without torch's version counter, for example by writing into "
                    f".data, and the layer computes with casts of the old weight: call dlp.end_step(model) after such "
                    f"a change, and after undoing it"
                )

    def _by_dtype(self) -> dict[torch.dtype, list[Tensor]]:
        found: dict[torch.dtype, list[Tensor]] = {}
        for views in self._views.values():
            for view in views:
                found.setdefault(view.dtype, []).append(view)
        return found

    def count_step(self, optimizer: Optimizer, layers: Sequence[LayerWeights]) -> bool:
        """Increment the version counters of all weights in `layers` that `optimizer` holds. Returns whether there are any.

        Called after a step of an optimizer that is not attached, because fused optimizers, and optimizers of DTensors, do not
        increment version counters."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        changed = [p for weights in layers for p in weights.stored() if id(p) in held]
        torch.autograd.graph.increment_version([local_tensor(p) for p in changed])
        return bool(changed)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def evenly(parameter: Tensor, count: int) -> Tensor:
    """Return a view of evenly spaced values of this rank's tensor: between `count` and 2 * `count` values, or all values if
    there are fewer than `count`."""
    flat = local_values(parameter).reshape(-1)
    return flat[:: max(1, len(flat) // count)]


def _bits(values: Tensor) -> Tensor:
    """View values as integers, so that NaN equals NaN."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


# ---- non-finite values


class FirstBad(NamedTuple):
    """First cast of a step that read a NaN or Inf. Casts of forward come before casts of backward.

    backward  whether this is a cast of backward
    place     index of the cast in forward or backward; the smallest index over all ranks is the first cast
    rank      rank of the cast
    name      layer and tensor
    total     number of casts in this forward or backward that read a NaN or Inf
    """

    backward: bool
    place: int
    rank: int
    name: CastName
    total: int

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        others = f", the first of {self.total} in {way}" if self.total > 1 else f", in {way}"
        before = "; all x and w that were cast were finite" if self.backward else ""
        return f"{self.name} held a NaN or Inf when it was cast on rank {self.rank}{others}{before}"


def first_bad(names: Sequence[CastName | None], flags: Sequence[float], rank: int) -> FirstBad | None:
    """Return the first cast of a step that read a NaN or Inf, see `FirstBad`; None if all values were finite.

    names, flags   name and flag of each cast, in the order of forward; layers of backward run in reverse order
    """
    found = bad_casts(names, flags)
    forward = [(place, name) for place, name in found if name.tensor in FORWARD]
    if forward:
        return FirstBad(False, forward[0][0], rank, forward[0][1], len(forward))
    return FirstBad(True, len(flags) - found[-1][0], rank, found[-1][1], len(found)) if found else None


class OnTheWay:
    """Asynchronous copy of a few numbers from the device to the host.

    `read` waits only for this copy; `tensor.tolist()` would also wait for all later launches."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrival: torch.cuda.Event | None = None
        if not numbers.is_cuda:
            self._host = numbers.clone()
        else:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def read(self) -> list[float]:
        """Wait for the copy, and return the numbers."""
        if self._arrival is not None:
            self._arrival.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


class NonFiniteWatch:
    """Read the non-finite flags of a model at step boundaries. `action`: one of ACTIONS."""

    def __init__(self, flags: Flags, action: str) -> None:
        self._flags, self._action = flags, action
        self._coming: tuple[int, list[OnTheWay]] | None = None

    def look(self, steps: int) -> None:
        """Start the copy of this step's flags to the host, and read the flags of the previous step: raise FloatingPointError or
        log a warning if a flag is set. `steps`: number of this step, whose boundary has run.

        Nothing happens if `action` is "ignore", or while a CUDA graph captures the boundary."""
        if self._action == "ignore" or capturing():
            return
        before = self._coming
        self._coming = steps, [OnTheWay(closed) for closed in self._flags.closed]
        if before is not None:
            step, coming = before
            self._tell(step, [flag for part in coming for flag in part.read()])

    def _tell(self, step: int, flags: list[float]) -> None:
        found = first_bad(self._flags.names, flags, dist.get_rank() if dist.is_initialized() else 0)
        if found is None:
            return
        if self._action == "raise":
            raise FloatingPointError(
                f"step {step}: {found}; to continue after such a step, use dlp.attach(..., on_nonfinite='warn')"
            )
        LOG.warning("step %d: %s", step, found)
