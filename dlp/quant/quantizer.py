"""Quantizers: how to make the bits of a format from a high-precision matrix.

A quantizer always works along the last dimension of a matrix [rows, contraction] and knows no orientation: the rowwise operand
of x [M, K] is `cast(x)`, the columnwise operand is `cast(x.t())` of a strided view. A quantizer never sees a process group:
`observe` returns the amaxes on which ranks must agree before the cast, `cast` takes the agreed amaxes, and `dlp.parallel`
reduces them between the two calls.
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

# Pairs for a matrix and the transposed matrix, that is, rowwise and columnwise.
Operands = tuple[QuantizedTensor, QuantizedTensor]
Wanted = tuple[QuantizedTensor | None, QuantizedTensor | None]  # None: not requested, or not allocated yet
Amaxes = tuple[Tensor | None, Tensor | None]  # both may be the same tensor


@dataclass(frozen=True)
class ScaleSlot:
    """Delayed scale of one tensor, as views of the model's table.

    scale     fp32 [], the multiplier that the last update set; of several numbers fp32 [numbers] (`SlotOptions`)
    staging   fp32 [], max |x| over all casts since the last update; a cast updates `staging` in the same read
    """

    scale: Tensor
    staging: Tensor

    def record(self, x: Tensor) -> None:
        """Raise `staging` to max |x|."""
        self.staging.copy_(torch.maximum(self.staging, ops.amax(x)))


LARGEST_MARGIN = (
    64  # largest exponent: half of the exponents of fp32, so that fp8_max x 2^-margin / amax is a normal number
)


@dataclass(frozen=True)
class SlotOptions:
    """Options by which delayed scaling computes a scale from the amaxes of earlier steps.

    fp8_max             largest value of the format
    margin              scales are 2^margin below the largest scale that fits
    amax_history_len    number of steps in the history
    amax_compute_algo   "max", "most_recent", or a function of the window of amaxes fp32 [L, n], oldest first, that returns one
                        amax per slot [n]
    numbers             length of the scale: 1, or 2 for a static range with zero points (`dlp.quant.static`)

    Raises ValueError for an empty history, an unknown algorithm, or a margin without an fp32 scale.
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
    rows, columns   sizes of the unsharded matrix; token rows count over all data-parallel ranks
    seed            part of the key of the random bits, as are `tensor_id` and `counter`
    counter         int64 [] on the device, which advances once per microbatch
    orientation       0: rowwise, 1: columnwise
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
        """Return the origin of the transposed shard, which draws other random bits."""
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
    """Abilities and needs of a quantizer that its methods do not show.

    A quantizer declares a class attribute or property `caps`; without `caps` the defaults hold. `check_caps` raises where a
    declared argument is missing. Optional methods need no declaration: see `Quantizer`.

    Args:
        op: name of the cast in `dlp.kernels.ops`, by which plans say whether a kernel exists.
        slot: options of delayed scaling; casts take `slot`.
        origin: casts take `at`: stochastic rounding.
        native: methods run only operations of `dlp.kernels.ops` and depend only on their arguments, so that their launches may
            be captured and replayed; methods take an `ops.LazyMatrix` as x.

    Examples:
        >>> from dlp.quant.fp8 import CurrentScaling
        >>> CurrentScaling().caps.op
        'cast_fp8_tensor'
    """

    op: str = ""
    slot: SlotOptions | None = None
    origin: bool = False
    native: bool = False

    def of_casts(self) -> QuantizerCaps:
        """Return the caps of a quantizer with another `cast`, whose launches are unknown."""
        return replace(self, native=False)


PAIRED = {"both": "observe_both", "both_grads": "observe_grads"}  # optional methods that need a second method
ARGUMENTS = {"slot": "slot", "origin": "at"}  # member of QuantizerCaps -> argument of casts
_DEFAULTS = QuantizerCaps()


@runtime_checkable
class Quantizer(Protocol):
    """Protocol of quantizers, which make `QuantizedTensor` objects of one format.

    A quantizer is a frozen dataclass, so that equal settings compare equal. A quantizer may have further methods. A class that
    overrides `cast` or `observe` does not inherit these methods: the inherited methods do not call the new ones.

        both, observe_both             operands of x and of x.t() from one read (`OneRead`)
        pairs_with(columnwise)         whether `both` accepts this columnwise quantizer; default: an equal one
        both_grads, observe_grads      the same for both gradients of a gate (`ops.GatedGrads`)
        batch(xs, outs, slots, flags)  prepare launches of `cast`, or of `both`, for several matrices into existing operands;
                                       not called for rotated formats and for stochastic rounding
        values(x)                      the matrix that is quantized, if this is not x
        clipped(x, amax)               where a cast of x clips; training on decoded values passes no gradient there

    If `cast` has a parameter `flag`, fp32 [], the cast sets the flag to NaN where a value of x is not finite.

    Attributes:
        format: format of the results.
        reduces: dimensions of the matrix that one observed value spans: () for block scales, (1,) for one scale per row, (0, 1)
            for one scale per tensor. Ranks that shard such a dimension agree on the observed value.

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
        """Return the fp32 amaxes on which ranks agree, by MAX, before the cast of x [rows, contraction]; None: no amaxes."""
        ...

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        """Quantize x [rows, contraction] by the agreed amax, into `out` if given. An unknown keyword raises TypeError."""
        ...


def wanted_parts(outs: Sequence[Wanted]) -> list[ops.Wanted]:
    """Return the parts of the storage of each matrix of a batch, in both orientations."""
    return [(None if row is None else row.parts, None if col is None else col.parts) for row, col in outs]


def outs_of(outs: Operands | None) -> ops.Outs:
    """Return the parts of the storage of both operands of one matrix; None without storage."""
    return None if outs is None else (outs[0].parts, outs[1].parts)


def offers(quantizer: Quantizer, method: str) -> bool:
    """Return whether a quantizer has an optional method of `Quantizer` that fits the quantizer's `cast` and `observe`."""
    return _offers(type(quantizer), method)


@cache
def _offers(kind: type, member: str) -> bool:
    for cls in kind.__mro__:
        if member in vars(cls):
            return True
        # Optional methods of base classes were written for other casts
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
    return caps.of_casts()


def takes_flag(quantizer: Quantizer) -> bool:
    """Return whether casts of a quantizer take `flag`."""
    while isinstance(quantizer, Wrapped):
        quantizer = quantizer.inner
    return "flag" in _parameters(type(quantizer).cast)


def batches(quantizer: Quantizer) -> bool:
    """Return whether `batch` may cast the matrices of a quantizer."""
    return offers(quantizer, "batch") and not caps_of(quantizer).origin and not quantizer.format.basis


def check_caps(quantizer: Quantizer) -> None:
    """Check that a quantizer has what its methods and caps need.

    Raises:
        ValueError: for a missing method or argument, naming the quantizer.
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
    needed = {argument: member for member, argument in ARGUMENTS.items() if getattr(caps, member)}
    if takes_flag(quantizer):
        needed["flag"] = "flag"
    for argument, member in needed.items():
        for method in casts:
            if not _accepts(getattr(type(quantizer), method), argument):
                raise ValueError(
                    f"{quantizer}: {method} takes no argument {argument}, and "
                    + (
                        "cast takes one: add the argument"
                        if member == "flag"
                        else f"caps declare {member}: add the argument"
                    )
                )
    if caps.op and not table.entries(caps.op, "cpu"):
        raise ValueError(
            f"{quantizer}: caps declare op {caps.op!r}, and the kernel table has no such operation: register the operation, or "
            f"name another one"
        )


@cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _accepts(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function has a parameter of this name, or accepts any keyword."""
    parameters = _parameters(function)
    return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def flagged(quantizer: Quantizer, x: Any, flag: Tensor | None) -> dict[str, Any]:
    """Return the keywords with which a cast of x sets `flag`, fp32 [], to NaN if a value of x is not finite.

    For a quantizer whose casts take no flag, this function checks x by a separate read, unless the quantizer keeps x in high
    precision.
    """
    if flag is None or quantizer.format.keeps_source:
        return {}
    if takes_flag(quantizer):
        return {"flag": flag}
    ops.watched(ops.stored(x), flag)
    return {}


@dataclass(frozen=True)
class Wrapped:
    """Base of quantizers around another quantizer, with its format, caps and amaxes. A subclass defines `cast`, which every
    cast calls: a wrapper has no `both` and no `batch`."""

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
    """Return the matrix that a cast of x quantizes: x, or x transformed by the method `values` of the quantizer."""
    values: Callable[[Tensor], Tensor] | None = getattr(quantizer, "values", None)
    return x if values is None else values(x)


@dataclass(frozen=True)
class OneRead:
    """The casts of x and x.t() in one read, bitwise equal to `rowwise.cast(x)` and `columnwise.cast(x.t())` of two quantizers.

    observe   `observe_both` of the rowwise quantizer: x [rows, contraction] -> amaxes of both operands, twice the same tensor
              if both share one amax
    cast      `both` of the rowwise quantizer: (x, agreed amaxes) -> both operands. Keywords: outs (storage of both
              operands), slot (delayed scale), at (origins of x and of x.t()), and the keywords of `flagged`
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
    """Quantizer that keeps the values in their own dtype.

    Args:
        format: format of the results.
        reduces: dimensions that one observed value spans; none.

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
