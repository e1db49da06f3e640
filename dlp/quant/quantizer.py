"""Quantizers, which compute codes and scales of a format from a high-precision matrix.

A quantizer casts along the last dimension of a matrix [rows, contraction], and does not depend on the orientation: the rowwise
operand of x [M, K] is `cast(x)`, and the columnwise operand is `cast(x.t())` of a strided view. A quantizer has no process
group: `observe` returns the amaxes on which ranks must agree, `dlp.parallel` reduces these amaxes over ranks, and `cast` takes
the agreed amaxes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from dlp.kernels import ops, table
from dlp.quant.tensor import Format, HighPrecision, QuantizedTensor

# Pairs of a rowwise and a columnwise object. Wanted: storage for a cast; None: not requested, or not allocated yet. Amaxes: the
# two may be one tensor.
Operands = tuple[QuantizedTensor, QuantizedTensor]
Wanted = tuple[QuantizedTensor | None, QuantizedTensor | None]
Amaxes = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class ScaleSlot:
    """Delayed scale of one tensor, as views of the table of the model (`dlp.quant.state.SlotTable`).

    scale     fp32 [], the scale that casts read; fp32 [2] for a static range with zero points (`SlotOptions.numbers`)
    staging   in the shape of `scale`: max |x| over all casts since the last update. A cast updates `staging` while it reads x
    """

    scale: Tensor
    staging: Tensor

    def record(self, x: Tensor) -> None:
        """Write max(staging, max |x|) to `staging`."""
        self.staging.copy_(torch.maximum(self.staging, ops.amax(x)))


# Largest absolute margin: about half of the exponent range of fp32, so that fp8_max * 2^-margin / amax is a normal number
LARGEST_MARGIN = 64


@dataclass(frozen=True)
class SlotOptions:
    """Options by which delayed scaling computes a scale from the amaxes of earlier steps: fp8_max * 2^-margin / amax.

    fp8_max             largest value of the format
    margin              exponent of the safety factor 2^margin, by which the scale is smaller than fp8_max / amax
    amax_history_len    number of steps in the history
    amax_compute_algo   how the amax is computed from the history: "max", "most_recent", or a function from amaxes fp32 [L, n],
                        oldest first, to one amax for each slot, fp32 [n]
    numbers             number of fp32 values of the scale: 1, or 2 for a static range with zero points (`dlp.quant.static`)

    Raises ValueError for an empty history, an unknown algorithm, or a margin beyond LARGEST_MARGIN.
    """

    fp8_max: float
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    numbers: int = 1

    def __post_init__(self) -> None:
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len must be at least 1, for the current step; got {self.amax_history_len}")
        if not -LARGEST_MARGIN <= self.margin <= LARGEST_MARGIN:
            raise ValueError(f"margin must be between -{LARGEST_MARGIN} and {LARGEST_MARGIN}; got {self.margin}")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ops.AMAX_ALGORITHMS:
            raise ValueError(
                f"amax_compute_algo must be one of {', '.join(ops.AMAX_ALGORITHMS)} or a function of the window of amaxes; "
                f"got {self.amax_compute_algo!r}"
            )


@dataclass(frozen=True)
class Origin:
    """Position of a shard in the unsharded matrix, for the random bits of stochastic rounding.

    row, column     position of the first element of the shard
    rows, columns   sizes of the unsharded matrix; tokens are counted over all data-parallel ranks
    seed            seed of the random bits
    tensor_id       number of the tensor; different tensors have different random bits
    counter         int64 [] on the device, which is increased once per microbatch
    orientation     0: rowwise, 1: columnwise; the two have different random bits
    """

    row: int
    column: int
    rows: int
    columns: int
    seed: int
    tensor_id: int
    counter: Tensor
    orientation: int = 0

    def t(self) -> Origin:
        """Return the origin of the transposed shard in the other orientation."""
        return replace(
            self,
            row=self.column,
            column=self.row,
            rows=self.columns,
            columns=self.rows,
            orientation=1 - self.orientation,
        )


Origins = tuple[Origin, Origin]  # origin of a shard, and origin of the transposed shard


@dataclass(frozen=True)
class QuantizerCaps:
    """Capabilities of a quantizer, and arguments that its casts need.

    A quantizer declares them as a class attribute or property `caps`; without `caps` the defaults hold. `check_caps` raises
    ValueError if a cast lacks an argument that `caps` declare. Optional methods (`Quantizer`) need no declaration.

    Args:
        op: name of the cast in `dlp.kernels.ops`, by which plans tell whether a kernel exists; "": no kernel.
        slot: options of delayed scaling; casts then get the argument `slot`. None: no delayed scale.
        origin: whether casts round stochastically; casts then get the argument `at`.
        native: whether the methods run only operations of `dlp.kernels.ops`, depend only on their arguments, and accept an
            `ops.LazyMatrix` as x. Only the launches of such methods are captured.

    Examples:
        >>> from dlp.quant.fp8 import CurrentScaling
        >>> CurrentScaling().caps.op
        'cast_fp8_tensor'
    """

    op: str = ""
    slot: SlotOptions | None = None
    origin: bool = False
    native: bool = False


PAIRED = {"both": "observe_both", "both_grads": "observe_grads"}  # optional method -> second method that it needs
ARGUMENTS = {"slot": "slot", "origin": "at"}  # member of QuantizerCaps -> argument that casts then need
_DEFAULTS = QuantizerCaps()


@runtime_checkable
class Quantizer(Protocol):
    """Protocol of quantizers, which cast matrices to `QuantizedTensor` objects of one format.

    A quantizer is a frozen dataclass, so that quantizers with equal settings compare equal. The following methods are optional:

        both, observe_both             cast x and x.t() by one read (`OneRead`)
        pairs_with(columnwise)         return whether `both` accepts this columnwise quantizer; by default an equal quantizer
        both_grads, observe_grads      the same as `both` and `observe_both`, for both gradients of a gate (`ops.GatedGrads`)
        batch(xs, outs, slots, flags)  return the launches of `cast`, or of `both`, for several matrices into existing operands;
                                       not used for formats with a transform, and for stochastic rounding
        values(x)                      return the matrix that `cast` quantizes, if this is not x
        clipped(x, amax)               return the mask of values that a cast of x clips; in training on decoded values their
                                       gradient is 0

    If a subclass overrides `cast` or `observe`, optional methods of its base classes are ignored, because they do not call the
    new `cast` or `observe`. If `cast` has a parameter `flag`, fp32 [], the cast sets `flag` to NaN if a value of x is not
    finite.

    Attributes:
        format: format of the results.
        reduces: dimensions of the matrix that an observed amax spans: () for block scales, (1,) for one scale per row, (0, 1)
            for one scale per tensor. Ranks that shard such a dimension agree on the amax.

    Examples:
        >>> from dlp.quant.fp8 import CurrentScaling
        >>> quantizer, x = CurrentScaling(), torch.randn(16, 64)
        >>> quantizer.cast(x, quantizer.observe(x)).format.name
        'fp8_tensor[e4m3]'
    """

    @property
    def format(self) -> Format: ...

    @property
    def reduces(self) -> tuple[int, ...]: ...

    def observe(self, x: Tensor) -> Tensor | None:
        """Return the fp32 amaxes of x [rows, contraction], whose maxima over ranks are computed before the cast; None if the
        cast needs no amax. Ranks may compare the bits of amaxes, so no amax is negative or -0.0."""
        ...

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        """Quantize x [rows, contraction].

        Args:
            x: the matrix.
            amax: result of `observe`, after the maximum over ranks.
            out: operand into which the result is written; None: a new operand.
            slot: delayed scale, if `caps.slot` is set.
            at: origin of x, if `caps.origin` is set.
        """
        ...


def wanted_parts(outs: Sequence[Wanted]) -> list[ops.Wanted]:
    """Return the parts of the rowwise and of the columnwise operand of each matrix of a batch; None for a missing operand."""
    return [(None if row is None else row.parts, None if col is None else col.parts) for row, col in outs]


def outs_of(outs: Operands | None) -> ops.Outs:
    """Return the parts of both operands, the argument `outs` of casts in `dlp.kernels.ops`; None for None."""
    return None if outs is None else (outs[0].parts, outs[1].parts)


def offers(quantizer: Quantizer, method: str) -> bool:
    """Return whether a quantizer has this optional method of `Quantizer`, and no subclass of the class that defines the method
    overrides `cast` or `observe`."""
    return _offers(type(quantizer), method)


@cache
def _offers(kind: type, member: str) -> bool:
    for cls in kind.__mro__:
        if member in vars(cls):
            return True
        # An optional method of a base class belongs to the `cast` and `observe` of the base class
        if "cast" in vars(cls) or "observe" in vars(cls):
            return False
    return False


def caps_of(quantizer: Quantizer) -> QuantizerCaps:
    """Return the caps of a quantizer. A subclass that overrides `cast` or `observe` and declares no caps inherits all members
    except `native`."""
    declared: QuantizerCaps | None = getattr(quantizer, "caps", None)
    if declared is None:
        return _DEFAULTS
    return declared if offers(quantizer, "caps") else _inherited(declared)


@cache
def _inherited(caps: QuantizerCaps) -> QuantizerCaps:
    return replace(caps, native=False)


def takes_flag(quantizer: Quantizer) -> bool:
    """Return whether `cast` of a quantizer has the parameter `flag`; for a `Wrapped` quantizer, of the inner quantizer."""
    while isinstance(quantizer, Wrapped):
        quantizer = quantizer.inner
    return "flag" in _parameters(type(quantizer).cast)


def batches(quantizer: Quantizer) -> bool:
    """Return whether `batch` of a quantizer may be used: `batch` exists, casts do not round stochastically, and the format has
    no transform."""
    return offers(quantizer, "batch") and not caps_of(quantizer).origin and not quantizer.format.basis


def check_caps(quantizer: Quantizer) -> None:
    """Check that a quantizer has all methods and arguments that its `caps` and its optional methods need.

    Raises:
        ValueError: for a missing method or argument; the message names the quantizer.
    """
    declared = getattr(quantizer, "caps", _DEFAULTS)
    if not isinstance(declared, QuantizerCaps):
        raise ValueError(f"{quantizer}: caps must be a QuantizerCaps(...); got {declared!r}")
    caps = caps_of(quantizer)
    for method, second in PAIRED.items():
        if offers(quantizer, method) and not callable(getattr(quantizer, second, None)):
            raise ValueError(
                f"{quantizer} has a method {method} and no method {second}: add {second}, or remove {method}"
            )
    casts = ("cast", "both") if offers(quantizer, "both") else ("cast",)
    needed = {argument: f"caps declares {member}" for member, argument in ARGUMENTS.items() if getattr(caps, member)}
    if takes_flag(quantizer):
        whose = "cast of the inner quantizer" if isinstance(quantizer, Wrapped) else "cast"
        needed["flag"] = f"{whose} has the parameter flag"
    for argument, reason in needed.items():
        for method in casts:
            if not _accepts(getattr(type(quantizer), method), argument):
                raise ValueError(f"{quantizer}: {method} has no parameter {argument}: add it, because {reason}")
    if caps.op and not table.entries(caps.op, "cpu"):
        raise ValueError(
            f"{quantizer}: caps declare op {caps.op!r}, and the kernel table has no such operation: register the operation, or "
            f"name another one"
        )


@cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _accepts(function: Callable[..., Any], argument: str) -> bool:
    """Return whether a function has a parameter of this name, or accepts any keyword."""
    parameters = _parameters(function)
    return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def flagged(quantizer: Quantizer, x: Any, flag: Tensor | None) -> dict[str, Any]:
    """Return the keywords by which a cast of x sets `flag`, fp32 [], to NaN if a value of x is not finite.

    If casts of the quantizer take no flag, this function sets `flag` by a separate read of x, and returns no keywords. For a
    quantizer that keeps x in high precision x is not checked.
    """
    if flag is None or quantizer.format.keeps_source:
        return {}
    if takes_flag(quantizer):
        return {"flag": flag}
    ops.watched(ops.stored(x), flag)
    return {}


@dataclass(frozen=True)
class Wrapped:
    """Base of quantizers that wrap another quantizer `inner`, with the format, the amaxes and (except `native`) the caps of
    `inner`.

    A subclass defines `cast`. A wrapper has no `both` and no `batch`, so that all casts call `cast`."""

    inner: Quantizer

    @property
    def format(self) -> Format:
        return self.inner.format

    @property
    def reduces(self) -> tuple[int, ...]:
        return self.inner.reduces

    @property
    def caps(self) -> QuantizerCaps:
        return _inherited(caps_of(self.inner))

    def observe(self, x: Tensor) -> Tensor | None:
        return self.inner.observe(x)

    def values(self, x: Tensor) -> Tensor:
        """Return the matrix that the inner quantizer quantizes."""
        return quantized_values(self.inner, x)


def quantized_values(quantizer: Quantizer, x: Tensor) -> Tensor:
    """Return the matrix that a cast of x quantizes: the result of the method `values` of the quantizer, else x."""
    values: Callable[[Tensor], Tensor] | None = getattr(quantizer, "values", None)
    return x if values is None else values(x)


@dataclass(frozen=True)
class OneRead:
    """Functions that cast x and x.t() by one read, bitwise equal to `rowwise.cast(x)` and `columnwise.cast(x.t())`.

    observe   x [rows, contraction] -> amaxes of both operands; the same tensor twice if both operands have one amax
    cast      (x, agreed amaxes) -> both operands. Keywords: outs (storage of both operands), slot (delayed scale), at (origins
              of x and of x.t()), and the keywords of `flagged`
    """

    observe: Callable[[Any], Amaxes]
    cast: Callable[..., Operands]


def one_read(rowwise: Quantizer, columnwise: Quantizer) -> OneRead | None:
    """Return the `OneRead` of two quantizers, or None if the rowwise quantizer does not support this pair."""
    if not offers(rowwise, "both"):
        return None
    pairs_with: Callable[[Quantizer], bool] | None = getattr(rowwise, "pairs_with", None)
    accepted = columnwise == rowwise if pairs_with is None else pairs_with(columnwise)
    if not accepted:
        return None
    chosen: Any = rowwise
    return OneRead(partial(chosen.observe_both, columnwise=columnwise), partial(chosen.both, columnwise=columnwise))


@dataclass(frozen=True)
class KeepHighPrecision:
    """Quantizer that does not quantize: the operand is the source tensor.

    Args:
        format: format of the results.
        reduces: (), since no amaxes are observed.

    Examples:
        >>> layer = dlp.Linear(64, 64, recipe=dlp.CustomRecipe(lambda role: dlp.quant.quantizer.KeepHighPrecision()))
        >>> layer(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    format: Format = HighPrecision()
    reduces: tuple[int, ...] = ()
    caps: ClassVar[QuantizerCaps] = QuantizerCaps(native=True)

    def observe(self, x: Tensor) -> Tensor | None:
        return None

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        return self.format.fill(out, x)
