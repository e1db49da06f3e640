"""Around the step of an attached optimizer: what must hold before it, and the step boundary behind it.

before   no backward runs; no wgrad waits; partial gradients are summed; replicas got equal gradients
step     of a closure: the same behind each evaluation, before which weights are cast as they are
after    tensors that a backward may still want count as modified, as torch counts them; then the step boundary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlp.parallel.model.closures import Arguments, Closure, closure_of, with_closure
from dlp.parallel.model.delayed_wgrad import check_none_waits
from dlp.parallel.model.replicas import looks
from dlp.parallel.model.runtime import Runtime, in_backward
from dlp.parallel.weight.fsdp2 import Managed


def check_owns(model: nn.Module, optimizer: Optimizer, held: Sequence[Tensor]) -> None:
    """ValueError for an optimizer that would train nothing of a model. `held`: what stands for parameters there."""
    own = {id(parameter): name for name, parameter in model.named_parameters()} | {id(master): "" for master in held}
    if own and not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"dlp.attach: this {type(optimizer).__name__} holds none of the model's {len(own)} parameters "
            f"({next(iter(own.values()))}, ...), so that its step trains nothing; dlp.convert and dlp.fully_shard replace "
            f"parameters: make the optimizer after them"
        )


class AttachedOptimizer:
    """The hooks of one optimizer. `recast`: casts the model's weights as they are; `end`: the step boundary. `fsdp`:
    FSDP2's records of the model's parameters."""

    def __init__(
        self, optimizer: Optimizer, runtime: Runtime, fsdp: Sequence[Managed], recast: Callable[[], None],
        end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._runtime, self._fsdp = runtime, fsdp
        self._recast, self._end = recast, end
        self._sums = 0 if runtime.sums is None else runtime.sums.num_sums
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if in_backward():
            raise RuntimeError(
                "an attached optimizer steps inside of a backward, where gradients are not complete and layers still need "
                "their weights as they were: step after backward()"
            )
        closure = closure_of(args, kwargs)
        if closure is None:
            self._check()
            return None
        return with_closure(args, kwargs, self._checked(closure))

    def _checked(self, closure: Closure) -> Closure:
        """The closure; an optimizer may call it several times, at other weights each time."""

        def evaluate() -> Any:
            self._recast()
            loss = closure()
            self._check()
            return loss

        return evaluate

    def _check(self) -> None:
        if looks(self._runtime.steps):
            self._runtime.watch.check_values()
        check_none_waits(self._runtime)
        if self._runtime.sums is not None:
            self._sums = self._runtime.sums.check_summed(self._sums)
        if self._runtime.replicas is not None:
            self._runtime.replicas.look(self._runtime.steps)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        changed = [p for group in optimizer.param_groups for p in group["params"]]
        known = {id(parameter) for parameter in changed}
        changed += [record.gathered for record in self._fsdp if id(record.stored) in known]
        torch.autograd.graph.increment_version([p._local_tensor if isinstance(p, DTensor) else p for p in changed])
        self._runtime.count_step(optimizer)
        self._end()
