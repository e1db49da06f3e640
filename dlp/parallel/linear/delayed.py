"""Delayed wgrads: backward leaves their operands, and `dlp.backward_dw` runs the GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from dlp.kernels.ranges import named_range
from dlp.parallel.linear import functional
from dlp.parallel.linear.plan import GradsWanted
from dlp.parallel.linear.state import BoundSpec, waits


def num_left(bound: BoundSpec, wanted: GradsWanted) -> int:
    """How many tensors at the end of what `linear_backward` returns are operands of delayed wgrads."""
    if not (waits(bound.spec.options.delay_wgrad, wanted.dx) and any(wanted.dw)):
        return 0
    dy, x = (len(operand.columnwise.format.parts) for operand in (bound.spec.recipe.dy, bound.spec.recipe.x))
    return sum(wanted.dw) * dy + x


def leave_wgrads(
    bound: BoundSpec, wanted: GradsWanted, weights: Sequence[Tensor], results: list[Tensor], alpha: float = 1.0
) -> list[Tensor]:  # fmt: skip
    """`results`: of `linear_backward`, or their end. Returns them without the operands of delayed wgrads, which are queued for
    `backward_dw`."""
    start = len(results) - num_left(bound, wanted)
    if start == len(results):
        return results
    dy_format, x_format = bound.spec.recipe.dy.columnwise.format, bound.spec.recipe.x.columnwise.format
    size, at = len(dy_format.parts), start
    x = x_format.wrap(results[len(results) - len(x_format.parts) :])
    for i, w, needed in zip(wanted.used, weights, wanted.dw, strict=True):
        if needed:
            dy = dy_format.wrap(results[at : at + size])
            wgrad = partial(_run, bound, dy, x, w.shape, w.dtype, alpha)
            bound.session.waiting.append((bound.weights.members[i], wgrad))
            at += size
    return results[:start]


def _run(bound: BoundSpec, *arguments: Any, **more: Any) -> Tensor:
    """`contract_gemm`, in the named range of wgrad."""
    with named_range(f"{bound.spec.name}.wgrad"):
        return functional.contract_gemm(bound, *arguments, **more)
