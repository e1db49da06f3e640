"""Prologues: make a linear's x of the tensors that the layer is called with, in the read of x's cast, so that x is not stored.

    rms_norm     layer(x, weight)         x * rstd * weight                    x [..., K], weight [K]
    layer_norm   layer(x, weight, bias)   (x - mean) * rstd * weight + bias    x [..., K], weight and bias [K]
    swiglu       layer(gate, up)          silu(gate) * up                      gate, up [..., K]
    geglu        layer(gate, up)          gelu(gate) * up                      gate, up [..., K]

The cast of x belongs to the linear, since it depends on its recipe and ranks; so a norm or an activation that is fused with
that cast runs inside the linear. In forward a prologue makes a lazy matrix (`ops.LazyMatrix`), which the cast computes as it
reads. In backward it turns dx into the gradients of its inputs. Saved for that are the inputs and, by norms, rstd and mean. The
bits are those of `ops.rms_norm` and so on before a linear without prologue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from torch import Tensor

from dlp.kernels import ops
from dlp.kernels.lazy_activations import IN_CASTS
from dlp.parallel.style import ParallelStyle

Matrix = Tensor | ops.LazyMatrix


class Prologue(Protocol):
    """A frozen value.

    reads     the names of the tensors that the layer is called with, the first of which has the shape of x
    keeps     how many further tensors backward needs
    in_cast   there are casts that compute x
    """

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def keeps(self) -> int: ...
    @property
    def in_cast(self) -> bool: ...

    def check(self, layer: str, style: ParallelStyle, tp: int) -> None:
        """ValueError for a layer that cannot have it."""
        ...

    def make(self, layer: str, *given: Tensor) -> ops.Produced:
        """Inputs -> x [..., K], lazy. ValueError for inputs that do not fit each other."""
        ...

    def kept(self, x: Any) -> list[Tensor]:
        """The `keeps` further tensors that backward needs; `x`: returned by `make`, after its casts."""
        ...

    def gradients(self, dx: Tensor, kept: Sequence[Tensor], *given: Tensor) -> list[Tensor]:
        """dx [..., K], the tensors of `kept`, the inputs -> the gradients of the inputs, in their shapes and dtypes."""
        ...


def rows(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


# What both a prologue and an op of its own (`dlp.ops.basic`) compute


def norm_gradients(
    dy: Matrix, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy [M, K] of `RmsNormed` -> dx, in the shape of x, to which `add` [M, K] is added; and dweight."""
    dx, dweight = ops.rms_norm_backward(ops.stored(dy), rows(x), weight, rstd, add)
    return dx.view(x.shape), ops.rounded(dweight, weight.dtype)


def layer_norm_gradients(
    dy: Matrix, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dy [M, K] of `LayerNormed` -> dx, in the shape of x; dweight and dbias, in the dtype of the weight."""
    dx, dweight, dbias = ops.layer_norm_backward(ops.stored(dy), rows(x), weight, mean, rstd)
    return dx.view(x.shape), ops.rounded(dweight, weight.dtype), ops.rounded(dbias, weight.dtype)


def gated(gate: Tensor, up: Tensor, act: str) -> ops.Produced:
    """act(gate) * up, lazy, of gate and up [..., K]."""
    pair = rows(gate), rows(up)
    return ops.Produced(ops.Gated(*pair) if act == "silu" else ops.GatedBy(*pair, act), gate.shape)


def gate_gradients(dh: Matrix, gate: Tensor, up: Tensor, act: str) -> tuple[ops.Produced, ops.Produced]:
    """dh [M, K] -> the gradients of gate and up, lazy: both are computed when one is first read."""
    grads = ops.GatedGrads(dh, rows(gate), rows(up), act)
    return ops.Produced(ops.GatedGrad(grads, 0), gate.shape), ops.Produced(ops.GatedGrad(grads, 1), up.shape)


@dataclass(frozen=True)
class _Norm:
    """A norm over the features of a row."""

    eps: float = 1e-5
    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]

    def check(self, layer: str, style: ParallelStyle, tp: int) -> None:
        if style.cut_x == 1 and tp > 1:
            raise ValueError(
                f"{layer}: prologue {self.name} takes the mean over all features, and {style.name} cuts them over tp {tp}; "
                f"norm before the layer, or make it column-parallel"
            )

    def check_vectors(self, layer: str, x: Tensor, *vectors: Tensor) -> None:
        """ValueError for a weight or bias of another shape or dtype than the norm needs."""
        for name, vector in zip(self.reads[1:], vectors, strict=True):
            if vector.shape != x.shape[-1:] or vector.dtype != vectors[0].dtype:
                said = " and ".join(f"{each} [{x.shape[-1]}]" for each in self.reads[1:])
                alike = ", in one dtype" if len(vectors) > 1 else ""
                raise ValueError(
                    f"{layer}: prologue {self.name} reads x [..., {x.shape[-1]}] and {said}{alike}; got a {name} of shape "
                    f"{tuple(vector.shape)} in {vector.dtype}"
                )


@dataclass(frozen=True)
class RmsNorm(_Norm):
    """x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps) of each row."""

    name: ClassVar[str] = "rms_norm"
    reads: ClassVar[tuple[str, ...]] = "x", "weight"
    keeps: ClassVar[int] = 1
    in_cast: ClassVar[bool] = True

    def make(self, layer: str, *given: Tensor) -> ops.Produced:
        self.check_vectors(layer, *given)
        x, weight = given
        return ops.Produced(ops.RmsNormed(rows(x), weight, self.eps), x.shape)

    def kept(self, x: Any) -> list[Tensor]:
        return [x.matrix.rstd]

    def gradients(self, dx: Tensor, kept: Sequence[Tensor], *given: Tensor) -> list[Tensor]:
        return list(norm_gradients(rows(dx), *given, *kept))


@dataclass(frozen=True)
class LayerNorm(_Norm):
    """(x - mean) * rstd * weight + bias, rstd = 1 / sqrt(var(x) + eps) of each row."""

    name: ClassVar[str] = "layer_norm"
    reads: ClassVar[tuple[str, ...]] = "x", "weight", "bias"
    keeps: ClassVar[int] = 2
    in_cast: ClassVar[bool] = False  # no kernel does both

    def make(self, layer: str, *given: Tensor) -> ops.Produced:
        self.check_vectors(layer, *given)
        x, weight, bias = given
        return ops.Produced(ops.LayerNormed(rows(x), weight, bias, self.eps), x.shape)

    def kept(self, x: Any) -> list[Tensor]:
        return [x.matrix.mean, x.matrix.rstd]

    def gradients(self, dx: Tensor, kept: Sequence[Tensor], *given: Tensor) -> list[Tensor]:
        x, weight, _ = given
        return list(layer_norm_gradients(rows(dx), x, weight, *kept))


@dataclass(frozen=True)
class SwiGlu:
    """silu(gate) * up."""

    name: ClassVar[str] = "swiglu"
    act: ClassVar[str] = "silu"
    reads: ClassVar[tuple[str, ...]] = "gate", "up"
    keeps: ClassVar[int] = 0
    in_cast: ClassVar[bool] = True

    def check(self, layer: str, style: ParallelStyle, tp: int) -> None:
        """It is the same on any shard."""

    def make(self, layer: str, *given: Tensor) -> ops.Produced:
        gate, up = given
        if up.shape != gate.shape or up.dtype != gate.dtype:
            raise ValueError(
                f"{layer}: prologue {self.name} reads gate and up of one shape and dtype; got {gate.dtype} {tuple(gate.shape)} "
                f"and {up.dtype} {tuple(up.shape)}"
            )
        return gated(gate, up, self.act)

    def kept(self, x: Any) -> list[Tensor]:
        return []

    def gradients(self, dx: Tensor, kept: Sequence[Tensor], *given: Tensor) -> list[Tensor]:
        gate, up = given
        return [grad.tensor() for grad in gate_gradients(rows(dx), gate, up, self.act)]


@dataclass(frozen=True)
class GeGlu(SwiGlu):
    """gelu(gate) * up, GELU by tanh."""

    name: ClassVar[str] = "geglu"
    act: ClassVar[str] = "gelu"
    in_cast: ClassVar[bool] = IN_CASTS


PROLOGUES: dict[str, Any] = {each.name: each for each in (RmsNorm, LayerNorm, SwiGlu, GeGlu)}


def load(asked: str | Mapping[str, Any] | Prologue | None) -> Prologue | None:
    """A prologue from what users write: a name, a table {"name": ..., option: value}, or None for none. ValueError for an
    unknown name or option."""
    if asked is None or not isinstance(asked, str | Mapping):
        return asked
    options = {"name": asked} if isinstance(asked, str) else dict(asked)
    name = options.pop("name", None)
    if name not in PROLOGUES:
        raise ValueError(f"unknown prologue {name!r:.60}: it is one of {', '.join(PROLOGUES)}")
    known = {field.name for field in fields(PROLOGUES[name])}
    if unknown := options.keys() - known:
        raise ValueError(
            f"prologue {name} has no option {', '.join(sorted(unknown))}; its options are {', '.join(known) or 'none'}"
        )
    prologue: Prologue = PROLOGUES[name](**options)
    return prologue
