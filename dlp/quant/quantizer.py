"""Quantizers: how to make the bits of a format from a high-precision matrix.

A quantizer always works along the last dimension of the matrix [rows, contraction] it is given. There is no
orientation inside: the rowwise operand of x [M, K] is `cast(x)`, the columnwise one is `cast(x.t())`, a strided view.
A quantizer never sees a process group: `observe` returns what ranks must agree on before the cast, `cast` takes the
agreed value, and the reduction happens between the two, elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.tensor import Format, HighPrecision, QuantizedTensor

# Of a matrix and of its transpose, that is, rowwise and columnwise.
Operands = tuple[QuantizedTensor, QuantizedTensor]
Wanted = tuple[QuantizedTensor | None, QuantizedTensor | None]  # None: not wanted, or not there yet
Amaxes = tuple[Tensor | None, Tensor | None]  # one tensor may serve both


@dataclass(frozen=True)
class ScaleSlot:
    """Delayed scaling's state for one tensor: views into the model's slot table. `scale` fp32 [], the multiplier left
    by the last update; `staging` fp32 [], the running max of |x| since then, maxed in the cast's own read."""

    scale: Tensor
    staging: Tensor

    def record(self, x: Tensor) -> None:
        """max |x| enters staging."""
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
    """Where a shard lies in the unsharded matrix [rows, columns], for stochastic rounding: its first row and column,
    and what keys the random bits: seed, tensor id, direction (0 rowwise, 1 columnwise) and an int64 device counter []
    that advances once per microbatch. `rows` counts the tokens of all data-parallel ranks, where rows are tokens."""

    row: int
    column: int
    rows: int
    columns: int
    seed: int
    tensor_id: int
    counter: Tensor
    direction: int = 0

    def t(self) -> Origin:
        """The origin of the transposed shard, whose random bits are others."""
        return replace(
            self, row=self.column, column=self.row, rows=self.columns, columns=self.rows, direction=1 - self.direction
        )


@runtime_checkable
class Quantizer(Protocol):
    """Makes QuantizedTensors of one format; a frozen dataclass, so equal settings compare equal.

    `reduces` holds the dimensions of the matrix that one observed value spans: () for block scales, (1,) for one scale
    a row, (0, 1) for one scale a tensor. Ranks that cut such a dimension must agree.

    Some attributes are there where they are needed, see `slot_options`, `needs_origin`, `flagged`, `one_read`, `one_launch`
    and `cast_op`.
    """

    @property
    def format(self) -> Format: ...

    @property
    def reduces(self) -> tuple[int, ...]: ...

    def observe(self, x: Tensor) -> Tensor | None:
        """What ranks must agree on (by MAX) before the cast of x [rows, contraction], fp32; None: nothing."""
        ...

    def cast(
        self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, slot: ScaleSlot | None = None,
        at: Origin | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        """x [rows, contraction] -> quantized, with the agreed amax, into `out` when given."""
        ...


def parts_of(out: QuantizedTensor | None) -> ops.Parts | None:
    """Where a cast is to be written, if that is given."""
    return None if out is None else out.parts


def parts_of_both(outs: Operands | None) -> ops.Outs:
    """The same for both orientations."""
    return None if outs is None else (outs[0].parts, outs[1].parts)


def wanted_parts(outs: Sequence[Wanted]) -> list[ops.Wanted]:
    """The same for each matrix of a batch."""
    return [(parts_of(row), parts_of(col)) for row, col in outs]


def slot_options(quantizer: Quantizer) -> SlotOptions | None:
    """What a quantizer with an attribute `delayed` keeps between steps: it casts with a `slot` of these options."""
    return getattr(quantizer, "delayed", None)


def needs_origin(quantizer: Quantizer) -> bool:
    """Whether a quantizer says, by an attribute `stochastic`, that its rounding depends on where a shard lies."""
    return getattr(quantizer, "stochastic", False)


def flagged(quantizer: Quantizer, x: Any, flag: Tensor | None) -> dict[str, Any]:
    """What a cast of x is called with so that `flag`, fp32 [], becomes NaN if a value of x is not finite: the flag, for a
    quantizer that says by an attribute `takes_flag` that its casts take one. For another x is looked at here, unless it is
    kept as it is, which hands Inf and NaN on."""
    if flag is None or quantizer.format.keeps_source:
        return {}
    if getattr(quantizer, "takes_flag", False):
        return {"flag": flag}
    ops.watched(ops.stored(x), flag)
    return {}


@dataclass(frozen=True)
class Wrapped:
    """A quantizer around another one, which it observes and asks as; a subclass says what its casts do. It offers neither
    both orientations in one read nor a batch, so that every cast passes through it."""

    inner: Quantizer

    @property
    def format(self) -> Format:
        return self.inner.format

    @property
    def reduces(self) -> tuple[int, ...]:
        return self.inner.reduces

    @property
    def delayed(self) -> Any:
        return slot_options(self.inner)

    @property
    def stochastic(self) -> bool:
        return needs_origin(self.inner)

    @property
    def takes_flag(self) -> bool:
        return getattr(self.inner, "takes_flag", False)

    def observe(self, x: Tensor) -> Tensor | None:
        return self.inner.observe(x)


@dataclass(frozen=True)
class OneRead:
    """The operands of x and of x.t() in one read, the bits of `rowwise.cast(x)` and of `columnwise.cast(x.t())`."""

    rowwise: Any
    columnwise: Quantizer

    def observe(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What ranks must agree on for each of the two; one tensor where one value serves both."""
        if hasattr(self.rowwise, "observe_both"):
            row, col = self.rowwise.observe_both(x, self.columnwise)
            return row, col
        amax = self.rowwise.observe(x)
        return amax, amax

    def cast(
        self, x: Tensor, amaxes: tuple[Tensor | None, Tensor | None], *,
        outs: tuple[QuantizedTensor, QuantizedTensor] | None = None, slot: ScaleSlot | None = None,
        at: tuple[Origin, Origin] | None = None, **flag: Any,
    ) -> tuple[QuantizedTensor, QuantizedTensor]:  # fmt: skip
        """x and the agreed amaxes -> both operands, into `outs` when given. `at`: of x, of x.t(). `flag`: see `flagged`."""
        row, col = self.rowwise.both(x, amaxes, columnwise=self.columnwise, outs=outs, slot=slot, at=at, **flag)
        return row, col


def one_read(rowwise: Quantizer, columnwise: Quantizer) -> OneRead | None:
    """How both orientations come from one read, where the rowwise quantizer offers that by a method `both`: with an equal
    one, or with one that its `pairs_with` accepts. What it observes for the two, if that is not one value, its
    `observe_both` says."""
    pairs = getattr(rowwise, "pairs_with", rowwise.__eq__)
    return OneRead(rowwise, columnwise) if hasattr(rowwise, "both") and pairs(columnwise) is True else None


def one_launch(quantizer: Quantizer) -> Callable[..., ops.Launches] | None:
    """The attribute `batch(xs, outs, slots, flags)` of a quantizer that has it, for matrices that `ops.has_batches`: prepares
    `cast` or `both` of all of them, into operands that exist, (of x, of x.t()), None where one is not wanted."""
    return getattr(quantizer, "batch", None)


def cast_op(quantizer: Quantizer) -> str:
    """The attribute `op`: the cast of `dlp.kernels.ops` that a quantizer runs, where that may have a kernel; else ''."""
    return getattr(quantizer, "op", "")


def runs_op(quantizer: Quantizer) -> bool:
    """Whether a quantizer only observes and casts by ops of `dlp.kernels.ops`: one of this package with a `cast_op`. What
    wraps one, or a user's, may do anything."""
    return type(quantizer).__module__.startswith("dlp.quant.") and cast_op(quantizer) != ""


@dataclass(frozen=True)
class KeepHighPrecision:
    """The identity: hands the values on in the dtype they have."""

    format: Format = HighPrecision()
    reduces: tuple[int, ...] = ()

    def observe(self, x: Tensor) -> Tensor | None:
        return None

    def cast(self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None, **_: Any) -> QuantizedTensor:
        return self.format.fill(out, x)
