"""Prologues: what makes a linear's x from what the layer is given, so that x itself need not be stored.

    rms_norm   layer(x, weight)    x * rstd * weight         x [..., K], weight [K]
    swiglu     layer(gate, up)     silu(gate) * up           gate, up [..., K]

A `QuantizedTensor` does not travel on an autograd edge, so a norm or an activation that is to run inside the cast of x has
to run inside the linear: forward makes the matrix on the way to its operands (`ops.LazyMatrix`), backward turns dx into the
gradients of what was given. Kept for that are the tensors given and, of RMSNorm, rstd. The bits are those of `ops.rms_norm`
or `ops.swiglu` before a linear without prologue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from torch import Tensor

from dlp.kernels import ops
from dlp.parallel.style import ParallelStyle


class Prologue(Protocol):
    """Frozen. `reads`: the two tensors that the layer is called with, of which the first is like x; `keeps`: how many
    further ones backward needs."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> tuple[str, str]: ...
    @property
    def keeps(self) -> int: ...

    def check(self, layer: str, style: ParallelStyle, tp: int) -> None:
        """ValueError where the layer cannot have it."""
        ...

    def make(self, layer: str, first: Tensor, second: Tensor) -> ops.LazyMatrix:
        """first [M, K], second as given -> x [M, K]. ValueError where they do not fit."""
        ...

    def kept(self, made: Any) -> list[Tensor]:
        """What backward needs beside what was given; `made`: what `make` returned, after its casts."""
        ...

    def gradients(self, dx: Tensor, kept: Sequence[Tensor], first: Tensor, second: Tensor) -> list[Tensor]:
        """dx [M, K] -> the gradients of what was given, in its shapes and dtypes."""
        ...


@dataclass(frozen=True)
class RmsNorm:
    """x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps) of each row."""

    eps: float = 1e-5
    name: ClassVar[str] = "rms_norm"
    reads: ClassVar[tuple[str, str]] = "x", "weight"
    keeps: ClassVar[int] = 1

    def check(self, layer: str, style: ParallelStyle, tp: int) -> None:
        if style.cut_x == 1 and tp > 1:
            raise ValueError(
                f"{layer}: prologue rms_norm takes the mean over all features, and {style.name} cuts them over tp {tp}; norm "
                f"before the layer, or make it column-parallel"
            )

    def make(self, layer: str, first: Tensor, second: Tensor) -> ops.RmsNormed:
        if second.shape != first.shape[1:]:
            raise ValueError(
                f"{layer}: prologue rms_norm reads x [..., {first.shape[1]}] and weight [{first.shape[1]}]; got a weight of "
                f"shape {tuple(second.shape)}"
            )
        return ops.RmsNormed(first, second, self.eps)

    def kept(self, made: ops.RmsNormed) -> list[Tensor]:
        return [made.rstd]

    def gradients(self, dx: Tensor, kept: Sequence[Tensor], first: Tensor, second: Tensor) -> list[Tensor]:
        dfirst, dweight = ops.rms_norm_backward(dx, first.reshape(dx.shape), second, kept[0])
        return [dfirst.view(first.shape), ops.rounded(dweight, second.dtype)]


@dataclass(frozen=True)
class SwiGlu:
    """silu(gate) * up."""

    name: ClassVar[str] = "swiglu"
    reads: ClassVar[tuple[str, str]] = "gate", "up"
    keeps: ClassVar[int] = 0

    def check(self, layer: str, style: ParallelStyle, tp: int) -> None:
        """It is the same on any shard."""

    def make(self, layer: str, first: Tensor, second: Tensor) -> ops.Gated:
        rows = second.reshape(-1, second.shape[-1])
        if rows.shape != first.shape or second.dtype != first.dtype:
            raise ValueError(
                f"{layer}: prologue swiglu reads gate and up of one shape and dtype; got {first.dtype} {tuple(first.shape)} "
                f"and {second.dtype} {tuple(rows.shape)}"
            )
        return ops.Gated(first, rows)

    def kept(self, made: ops.Gated) -> list[Tensor]:
        return []

    def gradients(self, dx: Tensor, kept: Sequence[Tensor], first: Tensor, second: Tensor) -> list[Tensor]:
        gate, up = first.reshape(dx.shape), second.reshape(dx.shape)
        return [grad.view(first.shape) for grad in ops.swiglu_backward(dx, gate, up)]


PROLOGUES = {"rms_norm": RmsNorm, "swiglu": SwiGlu}


def load(asked: str | Mapping[str, Any] | Prologue | None) -> Prologue | None:
    """What users write: a name, a table {"name": ..., option: value}, or None for none. ValueError for another name or
    option."""
    if asked is None or not isinstance(asked, str | Mapping):
        return asked
    options = {"name": asked} if isinstance(asked, str) else dict(asked)
    name = options.pop("name", None)
    if name not in PROLOGUES:
        raise ValueError(f"unknown prologue {name!r}: it is one of {', '.join(PROLOGUES)}")
    known = {field.name for field in fields(PROLOGUES[name])}
    if unknown := options.keys() - known:
        raise ValueError(
            f"prologue {name} has no option {', '.join(sorted(unknown))}; its options are {', '.join(known) or 'none'}"
        )
    made: Prologue = PROLOGUES[name](**options)
    return made
