"""Wgrads that wait: layers with `delay_wgrad` queue them in backward, `backward_dw` runs them.

    backward       dx of every such layer, and both operands of its wgrad, quantized and gathered
    backward_dw    dw = dy.T @ x of all that wait, in the order of their backwards, into the parameters' gradients

A pipeline stage so hands dx to the stage before it and multiplies again while that one works. What waits holds dy and x
as wgrad reads them, in the low precision of the recipe. The gradients have the bits they would have had in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlp.parallel.linear.autograd import no_autocast
from dlp.parallel.model.grads import local_grad, set_grad
from dlp.parallel.model.runtime import Runtime, runtime_of


@torch.no_grad()
def backward_dw(model: nn.Module) -> int:
    """Run all wgrads that wait in `model` and add them to its parameters' `grad`, as backward would have; returns how
    many there were. Hooks on a parameter's gradient are not called.

    Call it after backward, of one microbatch or of several, and before gradients are clipped or read. ValueError for a
    model that was not converted.
    """
    runtime = runtime_of(model)
    count = len(runtime.waiting)
    if count == 0:
        return 0
    while runtime.waiting:
        weight, wgrad = runtime.waiting.popleft()
        parameter = getattr(weight.member.module, weight.member.weight)
        with no_autocast([parameter]):
            _accumulate(parameter, wgrad())
    return count


def _accumulate(parameter: Tensor, dw: Tensor) -> None:
    """As autograd does: the first gradient is kept, later ones are added in place."""
    grad = local_grad(parameter)
    if grad is not None:
        grad.add_(dw)
    else:
        set_grad(parameter, dw)


def check_none_waits(runtime: Runtime) -> None:
    """Before an optimizer step: RuntimeError when gradients are not complete."""
    if runtime.waiting:
        raise RuntimeError(
            f"{len(runtime.waiting)} wgrads still wait, the first of {runtime.waiting[0][0].name} (delay_wgrad = true): call "
            f"dlp.backward_dw(model) between backward and the optimizer's step"
        )
