"""AdamW with optimizer states in 8 or 4 bits: the update of torchao, with `grad_scale` and `found_inf` of `ScaledOptimizer`.

torchao's own optimizers ignore both attributes, and count steps on the host. The optimizers here do not wait for the device,
so a CUDA graph can capture a step. On GPUs, the step is compiled once for each number of elements of a parameter on a rank. On
CPUs the step is not compiled, since the compilation takes longer than it saves.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dlp.optim.encodings import AVERAGES, ENCODINGS, Average, Encoding, Wrap, encoding_of, flat
from dlp.optim.scaled import ScaledOptimizer
from dlp.parallel.weight.local import local_values


class LowBitAdamW(ScaledOptimizer):
    """AdamW of fp32 parameters on one device, with averages stored in `encoding`. The learning rate of a group is a tensor,
    which every step reads."""

    def __init__(
        self, params: Iterable[Any], encoding: Encoding, *, lr: float, betas: tuple[float, float], eps: float,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        self.encoding = encoding
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"encoding": self.encoding}

    @cached_property
    def _wraps(self) -> dict[str, Wrap]:
        return {name: self.encoding.wrap(signed, self.device) for name, signed in AVERAGES.items()}

    @cached_property
    def _step(self) -> Callable[..., None]:
        return compiled(step_of_one) if self.device.type == "cuda" else step_of_one

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["lr"] = self._rate(group).clone()  # a tensor for each group, since schedules write into tensors

    def _rate(self, group: dict[str, Any]) -> Tensor:
        """Return the learning rate of a group as a tensor on the device: a number, which a schedule of the user may write into
        the group, would compile the step anew for each value."""
        return torch.as_tensor(group["lr"], dtype=torch.float32, device=self.device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as torch does, but cast codes back to their dtype: torch casts states to the dtype of the
        parameter. Raises ValueError for codes of another encoding."""
        for state in state_dict["state"].values():
            for name in AVERAGES:
                if isinstance(state.get(name), dict) and (found := encoding_of(**state[name])) != self.encoding:
                    raise ValueError(
                        f"{type(self).__name__}: the state dict has codes of {found.name}, and this optimizer has codes of "
                        f"{self.encoding.name}: load the state dict into an optimizer of the class that saved it"
                    )
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["lr"] = self._rate(group)
        for state in self.state.values():
            for name in AVERAGES:
                if isinstance(state.get(name), dict):
                    state[name]["codes"] = state[name]["codes"].to(self.encoding.dtype)

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, **{name: self.encoding.zeros(parameter) for name in AVERAGES}}

    def step_of_group(self, group: dict[str, Any]) -> None:
        settings = (*group["betas"], group["weight_decay"], group["eps"])
        on_device = (self._rate(group), self.grad_scale, self.found_inf)
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state_of(parameter, group)
                averages = {name: flat(state[name]) for name in AVERAGES}
                values, grad = local_values(parameter), local_values(parameter.grad).reshape(-1)
                updated = values.reshape(-1)  # a copy of strided values, such as weights in channels_last
                self._step(updated, grad, state["step"], averages, self._wraps, on_device, settings)
                if not values.is_contiguous():
                    values.copy_(updated.view_as(values))


class _ByName(LowBitAdamW):
    """Base class of AdamW8bit, AdamW4bit and AdamWFp8. `kind`: key of ENCODINGS."""

    kind: str

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        if importlib.util.find_spec("torchao") is None:
            raise ModuleNotFoundError(
                f"{type(self).__name__} stores averages in encodings of torchao, which is not installed: pip install 'dlp[ao]'"
            )
        super().__init__(params, ENCODINGS[self.kind], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        for parameter in group["params"]:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"{type(self).__name__}: parameters must be fp32; got {parameter.dtype}: keep master weights in fp32"
                )


class AdamW8bit(_ByName):
    """AdamW whose averages are stored in 8 bits (blocks of 256) by torchao, for fp32 parameters on one device.

    Averages stay fp32 for parameters with fewer than 4096 elements on a rank, with rows that are not complete blocks on a rank,
    or with shards of unequal size.

    Args:
        params: parameters, or groups of parameters.
        lr: learning rate; `group["lr"]` is a tensor on the device, into which a schedule writes with `fill_`.
        betas: decay rates of the averages of the gradient and of its square.
        eps: number added to the denominator.
        weight_decay: decoupled weight decay.

    Raises:
        ModuleNotFoundError: if torchao is not installed.
        ValueError: for parameters that are not fp32, for lr, eps or weight_decay that is negative or not finite, and for betas
            outside [0, 1).

    Examples:
        >>> optimizer = dlp.optim.AdamW8bit(nn.Linear(64, 64).parameters(), lr=1e-3)
    """

    kind = "adamw8bit"


class AdamW4bit(_ByName):
    """AdamW whose averages are stored in 4 bits (blocks of 128) by torchao, for fp32 parameters on one device.

    Averages stay fp32 for parameters with fewer than 4096 elements on a rank, with rows that are not complete blocks on a rank,
    or with shards of unequal size.

    Args:
        params: parameters, or groups of parameters.
        lr: learning rate; `group["lr"]` is a tensor on the device, into which a schedule writes with `fill_`.
        betas: decay rates of the averages of the gradient and of its square.
        eps: number added to the denominator.
        weight_decay: decoupled weight decay.

    Raises:
        ModuleNotFoundError: if torchao is not installed.
        ValueError: for parameters that are not fp32, for lr, eps or weight_decay that is negative or not finite, and for betas
            outside [0, 1).

    Examples:
        >>> optimizer = dlp.optim.AdamW4bit(nn.Linear(64, 64).parameters(), lr=1e-3)
    """

    kind = "adamw4bit"


class AdamWFp8(_ByName):
    """AdamW whose averages are stored in float8 e4m3 (blocks of 256) by torchao, for fp32 parameters on one device.

    Averages stay fp32 for parameters with fewer than 4096 elements on a rank, with rows that are not complete blocks on a rank,
    or with shards of unequal size.

    Args:
        params: parameters, or groups of parameters.
        lr: learning rate; `group["lr"]` is a tensor on the device, into which a schedule writes with `fill_`.
        betas: decay rates of the averages of the gradient and of its square.
        eps: number added to the denominator.
        weight_decay: decoupled weight decay.

    Raises:
        ModuleNotFoundError: if torchao is not installed.
        ValueError: for parameters that are not fp32, for lr, eps or weight_decay that is negative or not finite, and for betas
            outside [0, 1).

    Examples:
        >>> optimizer = dlp.optim.AdamWFp8(nn.Linear(64, 64).parameters(), lr=1e-3)
    """

    kind = "adamwfp8"


def step_of_one(
    values: Tensor, grad: Tensor, step: Tensor, averages: dict[str, Average], wraps: dict[str, Wrap],
    on_device: tuple[Tensor, Tensor, Tensor], settings: tuple[float, float, float, float],
) -> None:  # fmt: skip
    """Update one parameter, `step` and `averages` in place; nothing changes if found_inf is 1.

    values, grad   this rank's shards of the parameter and its gradient [n]
    step           number of steps before this step, fp32 []
    averages       name -> average, see AVERAGES
    wraps          name -> result of `Encoding.wrap`
    on_device      lr, grad_scale, found_inf, fp32 [] each
    settings       both betas, weight decay, eps
    """
    from torchao.optim.adam import single_param_adam

    lr, grad_scale, found_inf = on_device
    parts = [part for each in averages.values() for part in ([each] if isinstance(each, Tensor) else each.values())]
    written = [as_bytes(tensor) for tensor in (values, step, *parts)]
    before = [tensor.clone() for tensor in written]
    step += 1
    moments = (
        each if isinstance(each, Tensor) else wraps[name](each["codes"], each["scale"])
        for name, each in averages.items()
    )
    single_param_adam(values, grad / grad_scale, step, *moments, None, lr, *settings, True, False)
    for tensor, old in zip(written, before, strict=True):
        tensor.copy_(torch.where(found_inf > 0, old, tensor))


def as_bytes(tensor: Tensor) -> Tensor:
    """View a float8_e4m3fn tensor as bytes, since torch.where in compiled code does not support float8. Other tensors are
    returned unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def compiled(step: Callable[..., None]) -> Callable[..., None]:
    """Return the step compiled by torch.compile, once for each shape and for up to 1000 shapes."""
    made = torch.compile(step, fullgraph=True, dynamic=False)

    def run(*arguments: Any) -> None:
        with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
            made(*arguments)

    return run
