"""Weights that something else than the step of an attached optimizer has changed, so that the casts of them are stale.

    seen at once    in-place operations (torch's version counters), the steps of other optimizers, exchanged parameters and
                    memory: looked at before each forward of the model; the casts are dropped, and weights are cast where
                    they are used until the next step boundary
    seen by values  writes that no counter sees, as those into `.data` or into the local tensor of a detached DTensor: a
                    sample of each weight, compared before forwards without gradients and, in the first ten steps and in
                    every hundredth, before the optimizer's; an error names the layer

What neither sees has to be told by `end_step`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from dlp.parallel.weight.local import LayerWeights, Weight

SAMPLE = 64  # values of each weight
Mark = tuple[int, int, int, int]


def _mark(parameter: Any) -> Mark:
    """What changes when it is exchanged, or written to by an operation that torch counts."""
    tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return id(parameter), parameter._version, tensor._version, tensor.data_ptr()


class Watch:
    """The weights of one model as they were cast last: their marks, views of their samples, and what those held."""

    def __init__(self) -> None:
        self._marks: dict[LayerWeights, list[Mark]] = {}
        self._views: dict[LayerWeights, list[Tensor]] = {}
        self._seen: list[Tensor] = []
        self._whole: list[Weight] = []  # whose parameters layers hold as they are
        self._whole_marks: list[Mark] = []

    @torch.no_grad()
    def cast(self, layers: Sequence[LayerWeights]) -> None:
        """The weights of these layers have just been cast."""
        for weights in layers:
            parameters = weights.stored()
            marks, before = list(map(_mark, parameters)), self._marks.get(weights)
            if before is None or any(old[::3] != new[::3] for old, new in zip(before, marks, strict=True)):
                self._views[weights] = [_sample(parameter) for parameter in parameters]
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


def watch_optimizers(model: nn.Module, after: Callable[[Optimizer], None]) -> None:
    """Call `after`, a method, behind the step of any optimizer, as long as there is this model. It keeps neither alive."""
    method = weakref.WeakMethod(after)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        call = method()
        if call is not None:
            call(optimizer)

    weakref.finalize(model, register_optimizer_step_post_hook(hook).remove)


def _sample(parameter: Tensor) -> Tensor:
    """A view of up to SAMPLE values of this rank's, evenly spaced."""
    flat = (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE]


def _bits(values: Tensor) -> Tensor:
    """As integers, so that NaN equals itself."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
