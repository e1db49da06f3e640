"""Quantizers: how to make the bits of a format from a high-precision matrix.

A quantizer always works along the last dimension of the matrix [rows, contraction] it is given. There is no
orientation inside: the rowwise operand of x [M, K] is `cast(x)`, the columnwise one is `cast(x.t())`, a strided view.
A quantizer never sees a process group: `observe` returns what ranks must agree on before the cast, `cast` takes the
agreed value, and the reduction happens between the two, elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from dlp.kernels import ops, table
from dlp.quant.tensor import Format, HighPrecision, QuantizedTensor

# Of a matrix and of its transpose, that is, rowwise and columnwise.
Operands = tuple[QuantizedTensor, QuantizedTensor]
Wanted = tuple[QuantizedTensor | None, QuantizedTensor | None]  # None: not wanted, or not there yet
Amaxes = tuple[Tensor | None, Tensor | None]  # one tensor may serve both


@dataclass(frozen=True)
class ScaleSlot:
    """The delayed scale of one tensor, as views of the model's table. scale: fp32 [], the multiplier that the last update set;
    staging: fp32 [], max |x| of all casts since then, which a cast updates in the same read."""

    scale: Tensor
    staging: Tensor

    def record(self, x: Tensor) -> None:
        """Update staging by max |x|."""
        self.staging.copy_(torch.maximum(self.staging, ops.amax(x)))


LARGEST_MARGIN = (
    64  # powers of two; half of fp32's exponents, so that fp8_max x 2^-margin / amax is one for usual amaxes
)


@dataclass(frozen=True)
class SlotOptions:
    """How delayed scaling turns the amaxes of one tensor into its scale. `amax_compute_algo`: "max", "most_recent", or
    a function of the window of amaxes fp32 [L, n], oldest first, that returns one amax a slot [n].

    Raises ValueError for an empty history, an unknown algorithm, or a margin that leaves no fp32 scale.
    """

    fp8_max: float
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"

    def __post_init__(self) -> None:
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len must be at least 1, the step itself; got {self.amax_history_len}")
        if not -LARGEST_MARGIN <= self.margin <= LARGEST_MARGIN:
            raise ValueError(f"margin must be between -{LARGEST_MARGIN} and {LARGEST_MARGIN}; got {self.margin}")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ops.AMAX_ALGORITHMS:
            raise ValueError(
                f"amax_compute_algo must be one of {', '.join(ops.AMAX_ALGORITHMS)} or a function of the window of amaxes; "
                f"got {self.amax_compute_algo!r}"
            )


@dataclass(frozen=True)
class Origin:
    """Where a shard lies in the unsharded matrix, for the random bits of stochastic rounding.

    row, column     of the shard's first element in the unsharded matrix
    rows, columns   of the unsharded matrix; where rows are tokens, those of all data-parallel ranks
    seed            with tensor_id and counter the key of the random bits
    counter         int64 [] on the device, which advances once per microbatch
    direction       0 rowwise, 1 columnwise
    """

    row: int
    column: int
    rows: int
    columns: int
    seed: int
    tensor_id: int
    counter: Tensor
    direction: int = 0

    def t(self) -> Origin:
        """The origin of the transposed shard, which has other random bits."""
        return replace(
            self, row=self.column, column=self.row, rows=self.columns, columns=self.rows, direction=1 - self.direction
        )


@dataclass(frozen=True)
class QuantizerCaps:
    """Abilities and needs of a quantizer besides `observe` and `cast`.

    A quantizer declares a class attribute or property `caps`; without `caps` the quantizer has none of these abilities.
    `check_caps` raises where a declared method or argument is missing.

    Args:
        one_read: methods `both` and `observe_both` return the operands of x and of x.t() from one read (`OneRead`), for an
            equal columnwise quantizer.
        one_read_with: further columnwise quantizers that these methods accept.
        gate_grads: methods `observe_grads` and `both_grads` return the operands of both gradients of a gate (`ops.GatedGrads`)
            and of their transposes from one read, for an equal columnwise quantizer.
        one_launch: a method `batch(xs, outs, slots, flags)` prepares launches of `cast`, or `both`, for several matrices, into
            existing operands; None for an operand that is not needed.
        slot: casts take `slot`: delayed scaling, with these options.
        origin: casts take `at`: stochastic rounding.
        flag: casts take `flag`, fp32 [], and set the flag to NaN where a value of x is not finite.
        values: a method `values(x)` returns the matrix that is quantized, where this is not x.
        op: name of the cast in `dlp.kernels.ops`, by which plans say whether a kernel exists.
        pure: methods run only operations of `dlp.kernels.ops` and depend only on their arguments, so that their launches may be
            captured and replayed.
        lazy: methods take an `ops.LazyMatrix` as x, whose elements the cast computes.
        clips: a method `clipped(x, amax)` returns where a cast of x clips; training on decoded values passes no gradient there.

    Examples:
        >>> from dlp.quant.fp8 import CurrentScaling
        >>> CurrentScaling().caps.op
        'cast_fp8_tensor'
    """

    one_read: bool = False
    one_read_with: tuple[Quantizer, ...] = ()
    gate_grads: bool = False
    one_launch: bool = False
    slot: SlotOptions | None = None
    origin: bool = False
    flag: bool = False
    values: bool = False
    op: str = ""
    pure: bool = False
    lazy: bool = False
    clips: bool = False

    def of_casts(self) -> QuantizerCaps:
        """The caps of a quantizer that wraps this one's casts: those that speak of `cast` alone."""
        return QuantizerCaps(slot=self.slot, origin=self.origin, flag=self.flag, values=self.values, op=self.op)


METHODS = {
    "one_read": ("both", "observe_both"),
    "gate_grads": ("both_grads", "observe_grads"),
    "one_launch": ("batch",),
    "values": ("values",),
    "clips": ("clipped",),
}  # by what declares them
ARGUMENTS = {"slot": "slot", "origin": "at", "flag": "flag"}  # of casts, by what declares them
_PLAIN = QuantizerCaps()


@runtime_checkable
class Quantizer(Protocol):
    """Protocol of quantizers, which make `QuantizedTensor` objects of one format.

    A quantizer is a frozen dataclass, so that equal settings compare equal. Optional abilities are declared as `caps`, see
    `QuantizerCaps`.

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
        """The amaxes, fp32, that ranks must agree on (by MAX) before the cast of x [rows, contraction]; None: there are
        none."""
        ...

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        """x [rows, contraction] -> quantized by the agreed amax, into `out` if that is given."""
        ...


def parts_of(out: QuantizedTensor | None) -> ops.Parts | None:
    """The parts of an operand's storage; None: the cast allocates."""
    return None if out is None else out.parts


def parts_of_both(outs: Operands | None) -> ops.Outs:
    """`parts_of` for both orientations."""
    return None if outs is None else (outs[0].parts, outs[1].parts)


def wanted_parts(outs: Sequence[Wanted]) -> list[ops.Wanted]:
    """`parts_of` for each matrix of a batch."""
    return [(parts_of(row), parts_of(col)) for row, col in outs]


def caps_of(quantizer: Quantizer) -> QuantizerCaps:
    """The caps of a quantizer. A subclass that declares none inherits what its parent's casts take, and nothing that speaks of
    other methods, which it may have overridden."""
    if "caps" in type(quantizer).__dict__:
        caps: QuantizerCaps = quantizer.caps  # type: ignore[attr-defined]
        return caps
    declared = getattr(quantizer, "caps", None)
    return _PLAIN if declared is None else _inherited(declared)


@cache
def _inherited(caps: QuantizerCaps) -> QuantizerCaps:
    return caps.of_casts()


def check_caps(quantizer: Quantizer) -> None:
    """ValueError, naming the quantizer and the cap, for a method or argument that it declares and does not have."""
    declared = getattr(quantizer, "caps", _PLAIN)
    if not isinstance(declared, QuantizerCaps):
        raise ValueError(f"{quantizer}: its caps must be a QuantizerCaps(...); got {declared!r}")
    caps = caps_of(quantizer)
    for member, methods in METHODS.items():
        for method in methods if getattr(caps, member) else ():
            if not callable(getattr(quantizer, method, None)):
                raise ValueError(
                    f"{quantizer} declares {member} and has no method {method}: add it, or do not declare it"
                )
    casts = ("cast", "both") if caps.one_read else ("cast",)
    for member, argument in ARGUMENTS.items():
        for method in casts if getattr(caps, member) else ():
            found = getattr(quantizer, method)
            if not _takes(getattr(found, "__func__", found), argument):
                raise ValueError(
                    f"{quantizer} declares {member} and its {method} takes no argument {argument}: add it, or do not declare it"
                )
    if caps.one_read_with and not caps.one_read:
        raise ValueError(f"{quantizer} declares one_read_with and not one_read: declare both, or neither")
    if caps.op and not table.entries(caps.op, "cpu"):
        raise ValueError(
            f"{quantizer} declares op {caps.op!r}, which the table of kernels lacks: register it, or name one that it has"
        )


@cache
def _takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function has a parameter of this name, or takes any keyword."""
    parameters = inspect.signature(function).parameters
    return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def flagged(quantizer: Quantizer, x: Any, flag: Tensor | None) -> dict[str, Any]:
    """The arguments with which a cast of x sets `flag`, fp32 [], to NaN if a value of x is not finite: the flag, where the
    quantizer's casts take one. For others x is checked here by a read of its own, unless the quantizer keeps it in high
    precision."""
    if flag is None or quantizer.format.keeps_source:
        return {}
    if caps_of(quantizer).flag:
        return {"flag": flag}
    ops.watched(ops.stored(x), flag)
    return {}


@dataclass(frozen=True)
class Wrapped:
    """A quantizer around another one, whose format, caps and amaxes it has; a subclass says what its casts do. It offers
    neither both orientations in one read nor a batch, so that every cast goes through it."""

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
        """What the wrapped quantizer quantizes."""
        inner: Any = self.inner
        quantized: Tensor = inner.values(x) if caps_of(inner).values else x
        return quantized


@dataclass(frozen=True)
class OneRead:
    """The operands of x and of x.t() from one read, with the bits of `rowwise.cast(x)` and of `columnwise.cast(x.t())`."""

    rowwise: Any
    columnwise: Quantizer

    def observe(self, x: Tensor) -> Amaxes:
        """The amaxes of both operands; the same tensor twice where one value serves both."""
        row, col = self.rowwise.observe_both(x, self.columnwise)
        return row, col

    def cast(
        self, x: Tensor, amaxes: Amaxes, *, outs: Operands | None = None, slot: ScaleSlot | None = None,
        at: tuple[Origin, Origin] | None = None, **flag: Any,
    ) -> Operands:  # fmt: skip
        """x and the agreed amaxes -> both operands, into `outs` if given. `at`: the origins of x and of x.t(). `flag`: see
        `flagged`."""
        row, col = self.rowwise.both(x, amaxes, columnwise=self.columnwise, outs=outs, slot=slot, at=at, **flag)
        return row, col


def one_read(rowwise: Quantizer, columnwise: Quantizer) -> OneRead | None:
    """The `OneRead` of two quantizers; None: the rowwise one does not offer it for this columnwise one."""
    caps = caps_of(rowwise)
    offered = caps.one_read and (columnwise == rowwise or columnwise in caps.one_read_with)
    return OneRead(rowwise, columnwise) if offered else None


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
    caps: ClassVar[QuantizerCaps] = QuantizerCaps(pure=True)

    def observe(self, x: Tensor) -> Tensor | None:
        return None

    def cast(self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, **_: Any) -> QuantizedTensor:
        return self.format.fill(out, x)
