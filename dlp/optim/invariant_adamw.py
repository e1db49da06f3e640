"""AdamW whose update of an element has the same bits for every sharding of the parameter by FSDP or tp.

On CPUs, torch's fused AdamW updates most elements of a tensor by vector instructions and the last elements by scalar
instructions, whose results differ in the last bits. A shard of 4 elements thus gets other bits than the same elements of a
parameter of 32 elements. Here, vector and scalar instructions round every operation equally. The square root is computed in
fp64, since fp32 square roots of torch on CPUs are not always correctly rounded.
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
    """AdamW for runs with `invariant=True` on CPUs: a shard gets the bits of an update of the full parameter.

    On GPUs use torch's fused AdamW, which updates all elements by the same instructions and is faster. A step divides gradients
    by `grad_scale`, and changes nothing if `found_inf` is 1; both are fp32 [] tensors.

    Args:
        params: fp32 parameters (plain, sharded or replicated) on one device, or parameter groups.
        lr: learning rate.
        betas: decay rates of the averages of the gradient and of its square.
        eps: number added to the denominator.
        weight_decay: decoupled weight decay.

    Raises:
        ValueError: for lr, eps or weight_decay that is negative or not finite, and for betas outside [0, 1).

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
        state = self.state_of(parameter, group)
        (beta1, beta2), lr, skipped = group["betas"], group["lr"], self.found_inf > 0
        values, first, second = (local_values(each) for each in (parameter, *(state[name] for name in AVERAGES)))
        grad, step = gradient / self.grad_scale, state["step"] + 1
        mean = first * beta1 + grad * (1 - beta1)
        square = second * beta2 + grad * grad * (1 - beta2)
        root = (square / (1 - beta2**step)).double().sqrt().float()
        moved = values * (1 - lr * group["weight_decay"]) - mean / (1 - beta1**step) / (root + group["eps"]) * lr
        for old, new in ((values, moved), (first, mean), (second, square), (state["step"], step)):
            old.copy_(torch.where(skipped, old, new))
