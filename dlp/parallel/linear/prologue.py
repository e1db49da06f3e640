"""Prologues: what makes a linear's x from what the layer is given, so that x itself need not be stored.

    rms_norm   layer(x, weight)    x * rstd * weight         x [..., K], weight [K]
    swiglu     layer(gate, up)     silu(gate) * up           gate, up [..., K]

The cast of x belongs to the linear, whose recipe and ranks it follows, so a norm or an activation that is to run inside of it
runs inside the linear: forward makes the matrix on the way to its operands (`ops.LazyMatrix`), backward turns dx into the
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

Matrix = Tensor | ops.LazyMatrix


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

    def make(self, layer: str, first: Tensor, second: Tensor) -> ops.Produced:
        """What was given -> x [..., K]. ValueError where they do not fit."""
        ...

    def kept(self, x: Any) -> list[Tensor]:
        """What backward needs beside what was given; `x`: what `make` returned, after its casts."""
        ...

    def gradients(self, dx: Tensor, kept: Sequence[Tensor], first: Tensor, second: Tensor) -> list[Tensor]:
        """dx [..., K] -> the gradients of what was given, in its shapes and dtypes."""
        ...


def rows(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


# What both a prologue and an op of its own (`dlp.ops.basic`) compute


def norm_gradients(
    dy: Matrix, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy [M, K] of `RmsNormed` -> dx like x, to which `add` [M, K] is added, and dweight."""
    dx, dweight = ops.rms_norm_backward(ops.stored(dy), rows(x), weight, rstd, add)
    return dx.view(x.shape), ops.rounded(dweight, weight.dtype)


def gated(gate: Tensor, up: Tensor, act: str) -> ops.Produced:
    """act(gate) * up, of [..., K] each."""
    pair = rows(gate), rows(up)
    return ops.Produced(ops.Gated(*pair) if act == "silu" else ops.GatedBy(*pair, act), gate.shape)


def gate_gradients(dh: Matrix, gate: Tensor, up: Tensor, act: str) -> tuple[ops.Produced, ops.Produced]:
    """dh [M, K] -> the gradients of gate and up, made together when either is read."""
    grads = ops.GatedGrads(dh, rows(gate), rows(up), act)
    return ops.Produced(ops.GatedGrad(grads, 0), gate.shape), ops.Produced(ops.GatedGrad(grads, 1), up.shape)


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

    def make(self, layer: str, first: Tensor, second: Tensor) -> ops.Produced:
        if second.shape != first.shape[-1:]:
            raise ValueError(
                f"{layer}: prologue rms_norm reads x [..., {first.shape[-1]}] and weight [{first.shape[-1]}]; got a weight "
                f"of shape {tuple(second.shape)}"
            )
        return ops.Produced(ops.RmsNormed(rows(first), second, self.eps), first.shape)

    def kept(self, x: Any) -> list[Tensor]:
        return [x.matrix.rstd]

    def gradients(self, dx: Tensor, kept: Sequence[Tensor], first: Tensor, second: Tensor) -> list[Tensor]:
        return list(norm_gradients(rows(dx), first, second, kept[0]))


@dataclass(frozen=True)
class SwiGlu:
    """silu(gate) * up."""

    name: ClassVar[str] = "swiglu"
    reads: ClassVar[tuple[str, str]] = "gate", "up"
    keeps: ClassVar[int] = 0

    def check(self, layer: str, style: ParallelStyle, tp: int) -> None:
        """It is the same on any shard."""

    def make(self, layer: str, first: Tensor, second: Tensor) -> ops.Produced:
        if second.shape != first.shape or second.dtype != first.dtype:
            raise ValueError(
                f"{layer}: prologue swiglu reads gate and up of one shape and dtype; got {first.dtype} {tuple(first.shape)} "
                f"and {second.dtype} {tuple(second.shape)}"
            )
        return gated(first, second, "silu")

    def kept(self, x: Any) -> list[Tensor]:
        return []

    def gradients(self, dx: Tensor, kept: Sequence[Tensor], first: Tensor, second: Tensor) -> list[Tensor]:
        return [grad.tensor() for grad in gate_gradients(rows(dx), first, second, "silu")]


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
