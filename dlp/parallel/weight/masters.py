"""with_master_weights: fp32 weights beside the optimizer's states, wherever these live, for weights that are held quantized.

    before a step   gradients move from the placeholders to the masters
    step            on the masters, as on any parameters
    behind it       the masters are quantized into the layers

Weights that are loaded become the masters, so that the next step begins from them; `dlp.state_dict` holds the masters in
full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from dlp.parallel.model.closures import Arguments, closure_of, with_closure
from dlp.parallel.weight.held import QuantizedOnly, local_values


def with_master_weights(model: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer:
    """`make`'s optimizer over the model's parameters, with fp32 weights of its own for those that are held quantized:
    the preserved initial values, or the decoded ones. Its step moves gradients there, and quantizes what comes out.

    They are part of `dlp.state_dict`; weights that are loaded without them become them. The optimizer's `zero_grad` clears
    the gradients of the model's held parameters as well."""
    held = _held(model)
    for only in held:
        only.masters = only.masters or [_master(p, only, i) for i, p in enumerate(only.parameters)]
    masters = {id(p): master for only in held for p, master in zip(only.parameters, only.masters, strict=True)}
    optimizer = make([masters.get(id(p), p) for p in model.parameters()])
    _MasterSteps(optimizer, held)
    return optimizer


class _MasterSteps:
    """The hooks of an optimizer that steps on the masters of held weights."""

    def __init__(self, optimizer: Optimizer, held: Sequence[QuantizedOnly]) -> None:
        self._held, self._clear = held, optimizer.zero_grad
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        for only in self._held:
            yield from zip(only.parameters, only.masters, strict=True)

    def _move(self) -> None:
        for parameter, master in self._pairs():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    def _write(self) -> None:
        for only in self._held:
            only.write([local_values(master) for master in only.masters])

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        closure = closure_of(args, kwargs)
        if closure is None:
            self._move()
            return None

        def evaluate() -> Any:
            self._write()
            loss = closure()
            self._move()
            return loss

        return with_closure(args, kwargs, evaluate)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._write()
        for parameter, master in self._pairs():
            master.grad = None  # it has been used
            torch.autograd.graph.increment_version(parameter)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._clear(set_to_none)
        for parameter, _ in self._pairs():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def masters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The masters of held weights, by layer."""
    return {
        name: master
        for only in _held(model)
        if only.masters
        for name, master in zip(only.core.spec.members, only.masters, strict=True)
    }


@torch.no_grad()
def load_masters(model: nn.Module, saved: Mapping[str, Tensor]) -> list[str]:
    """Take back what `masters_of` gave, on this or another mesh; returns the names of those that it lacks."""
    for only in _held(model):
        names = only.core.spec.members if only.masters else ()
        for name, master in zip(names, only.masters, strict=True):
            if name in saved:
                whole = _whole(saved[name])
                if isinstance(master, DTensor):
                    whole = distribute_tensor(whole, master.device_mesh, master.placements)
                master.copy_(whole)
        if any(name in saved for name in names):
            only.write([local_values(master) for master in only.masters])
    return [name for name in masters_of(model) if name not in saved]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _held(model: nn.Module) -> list[QuantizedOnly]:
    found = (getattr(getattr(module, "core", None), "cast_weights", None) for module in model.modules())
    return list(dict.fromkeys(each for each in found if isinstance(each, QuantizedOnly)))


def _master(parameter: nn.Parameter, only: QuantizedOnly, index: int) -> nn.Parameter:
    values = (only.initial or only.decoded())[index].to(parameter.device, torch.float32)
    if not isinstance(parameter, DTensor):
        return nn.Parameter(values.clone())
    whole = DTensor.from_local(
        values.clone(), parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
    return nn.Parameter(whole)
