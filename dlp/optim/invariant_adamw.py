"""AdamW whose update of an element has the same bits wherever FSDP or tp cuts the parameter.

The fused AdamW of torch updates the last elements of a tensor on CPUs by other instructions than the elements before, and the
last bits differ. So shards of 4 elements have other bits than the whole parameter of 32 elements. Here every operation rounds
once, in a vector and alone. The square root is taken in fp64, since roots of torch on CPUs are not always the nearest fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dlp.optim.encodings import AVERAGES
from dlp.optim.scaled import ScaledOptimizer
from dlp.parallel.weight.local import local_values


class InvariantAdamW(ScaledOptimizer):
    """AdamW for runs with `invariant=True` on CPUs, where shards must have the bits of the whole parameter.

    A step divides gradients by `grad_scale` and keeps every bit where `found_inf` is 1, fp32 [] each, as in the fused
    AdamW of torch, which computes every element by the same instructions on GPUs, and is faster there.

    Args:
        params: fp32 parameters, or groups of them, on one device; sharded and replicated parameters as well.
        lr: learning rate.
        betas: decay rates of the averages of the gradient and of its square.
        eps: number added to the denominator.
        weight_decay: decoupled weight decay.

    Raises:
        ValueError: for a setting outside of its range.

    Examples:
        >>> model = nn.Linear(16, 16)
        >>> optimizer = dlp.optim.InvariantAdamW(model.parameters(), lr=1e-3)
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step_of_group(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(parameter, local_values(parameter.grad), group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state |= {name: torch.zeros_like(parameter) for name in AVERAGES}
        (beta1, beta2), lr, skipped = group["betas"], group["lr"], self.found_inf > 0
        values, first, second = (local_values(each) for each in (parameter, *(state[name] for name in AVERAGES)))
        grad, step = gradient / self.grad_scale, state["step"] + 1
        mean = first * beta1 + grad * (1 - beta1)
        square = second * beta2 + grad * grad * (1 - beta2)
        root = (square / (1 - beta2**step)).double().sqrt().float()
        moved = values * (1 - lr * group["weight_decay"]) - mean / (1 - beta1**step) / (root + group["eps"]) * lr
        for old, new in ((values, moved), (first, mean), (second, square), (state["step"], step)):
            old.copy_(torch.where(skipped, old, new))
