"""Base class of the optimizers of dlp. Two tensors on the device control clipping and skipped steps, so the host does not wait:

    grad_scale   fp32 []; a step divides gradients by this number
    found_inf    fp32 []; if 1, a step changes neither parameters nor states

`clip_` or the user sets both attributes before `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlp.optim.encodings import AVERAGES


class ScaledOptimizer(Optimizer):
    """Optimizer of parameters on one device. A subclass updates the parameters of a group in `step_of_group`, where it applies
    `grad_scale` and `found_inf`."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        options: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        self.grad_scale, self.found_inf = torch.ones((), **options), torch.zeros((), **options)

    @property
    def device(self) -> torch.device:
        """Device of the parameters; the CPU for an optimizer without parameters."""
        devices = (parameter.device for group in self.param_groups for parameter in group["params"])
        return next(devices, torch.device("cpu"))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or pickle. Optimizers of torch copy only defaults, states and parameter groups."""
        return super().__getstate__() | {"grad_scale": self.grad_scale, "found_inf": self.found_inf}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.check_group(self.param_groups[-1])

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a learning rate, eps or weight decay that is negative or not finite, and for betas outside
        [0, 1)."""
        name = type(self).__name__
        for key in ("lr", "eps", "weight_decay"):
            value = group.get(key, 0.0)
            if getattr(value, "is_meta", False):
                continue
            if not 0 <= float(value) < float("inf"):
                raise ValueError(f"{name}: {key} must be a finite number >= 0; got {float(value)}")
        betas = tuple(group["betas"])
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{name}: betas must be two numbers in [0, 1); got {betas}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as torch does, and move steps to the device, where the update reads them: torch leaves steps on the
        device of the state dict, which is the CPU after `torch.load(map_location="cpu")`."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.step_of_group(group)
        return loss

    def step_of_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a parameter group that have gradients."""
        raise NotImplementedError

    def make_state(self) -> None:
        """Create the state of all parameters, so that a checkpoint can be loaded before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state_of(parameter, group)

    def state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter of this group, which the first call creates."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= self.new_state(parameter, group)
        return state

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter before its first step: by default step and averages of AdamW, all zero."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, **{name: torch.zeros_like(parameter) for name in AVERAGES}}
