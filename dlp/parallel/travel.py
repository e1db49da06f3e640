"""x and dy on their way: gathered quantized where the shards concatenate to the quantized whole, one transfer an
orientation, or one for both where the payload may be transposed on arrival. Otherwise they travel in high precision
and are quantized on arrival, the same on every rank.

    x    [M/R, K]  rowwise for fprop; again, from what forward kept, columnwise for wgrad
    dy   [M/R, N]  rowwise for dgrad, columnwise for wgrad

An operand that only travels is quantized straight into its lease, its segment of what is gathered. One that forward
keeps is not: it would keep the whole. Each function starts its transfers and returns at once what waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from torch import Tensor

from dlp.comm import wire
from dlp.kernels.ops import Produced, stored
from dlp.parallel import fit
from dlp.parallel.operands import Pair, Values, operand_shape, quantize
from dlp.parallel.overlap import Gather, Lease, Overlap
from dlp.parallel.scales import check_gathered
from dlp.parallel.spec import LinearSpec
from dlp.quant.tensor import HighPrecision, QuantizedTensor

Rowwise = QuantizedTensor | Gather
Columnwise = Callable[[], QuantizedTensor]


def x_of_forward(spec: LinearSpec, x: Values, keep: bool, record: bool) -> tuple[Rowwise, list[Tensor]]:
    """x [M, K] of this rank -> fprop's operand, and the parts of x kept for wgrad: none where it reads x itself, and
    nobody has to keep that."""
    tokens, gathered = len(x), spec.style.gathers == "x"
    parts = keep and not spec.saves_x(tokens)
    columnwise = parts and not spec.saves_rowwise(tokens)
    quantized = not gathered or spec.travels("x", False, tokens)
    keeps_rowwise = parts and not columnwise
    lease = _lease(spec, "x", x, False, "fprop") if gathered and quantized and not keeps_rowwise else None
    (mine,) = quantize(spec, "x", [x], row=quantized, col=columnwise, record=record, into=_room(lease))
    kept = list((mine.columnwise() if columnwise else mine.rowwise()).parts) if parts else []
    if keep and not parts and isinstance(x, Produced):
        kept = [x.value]
    if not gathered:
        return mine.rowwise(), kept
    if quantized:
        return _start(spec, "fprop", mine.rowwise(), lease, 0), kept
    return _on_arrival(spec, "x", stored(x), "fprop", row=True, col=False, record=record)().rowwise(), kept


def x_of_backward(spec: LinearSpec, saved: Sequence[Tensor], tokens: int) -> Columnwise:
    """wgrad's operand of x from what forward kept: parts, or x itself [..., K], `tokens` on this rank."""
    gathered = spec.style.gathers == "x"
    if spec.saves_x(tokens):
        x = saved[0].reshape(-1, saved[0].shape[-1])
        if gathered:
            arrived = _on_arrival(spec, "x", x, "wgrad", row=False, col=True, record=True)
            return lambda: arrived().columnwise()
        return lambda: quantize(spec, "x", [x], row=False, col=True)[0].columnwise()
    kept = spec.recipe.x.columnwise.format.wrap(saved)
    if gathered:
        return _joined(spec, kept, None, 0 if spec.saves_rowwise(tokens) else 1)
    return lambda: kept


def dy_of_backward(spec: LinearSpec, dy: Values, row: bool, col: bool) -> tuple[Rowwise | None, Columnwise]:
    """This rank's tokens of dy [M/R, N] -> dgrad's and wgrad's operands, as far as they are asked for."""
    tokens = len(dy)
    if not (row or col):
        return None, _nothing
    if spec.derived("dy", tokens) and spec.travels("dy", False, tokens):
        lease = _lease(spec, "dy", dy, False, "dgrad")
        (mine,) = quantize(spec, "dy", [dy], row=True, col=False, into=_room(lease))
        both = _start(spec, "dgrad", mine.rowwise(), lease, 0)
        return both, lambda: both.whole().transpose()
    here = [row and spec.travels("dy", False, tokens), col and spec.travels("dy", True, tokens)]
    there = [row and not here[0], col and not here[1]]
    first, second = (_lease(spec, "dy", dy, bool(way), gemm) if here[way] else None
                     for way, gemm in enumerate(("dgrad", "wgrad")))  # fmt: skip
    (mine,) = quantize(spec, "dy", [dy], row=here[0], col=here[1], into=_room(first, second))
    rowwise: Rowwise | None = _start(spec, "dgrad", mine.rowwise(), first, 0) if here[0] else None
    columnwise: Columnwise | None = _joined(spec, mine.columnwise(), second, 1) if here[1] else None
    if any(there):
        which = "dgrad" if there[0] else "wgrad"
        arrived = _on_arrival(spec, "dy", stored(dy), which, row=there[0], col=there[1], record=True)
        rowwise = arrived().rowwise() if there[0] else rowwise
        columnwise = columnwise or (lambda: arrived().columnwise())
    assert columnwise is not None or not col
    return rowwise, columnwise or _nothing


def _nothing() -> QuantizedTensor:
    raise AssertionError("wgrad was not asked for")


def _overlap(spec: LinearSpec, which: str) -> Overlap:
    """The strategy of GEMM `which`."""
    overlap: Overlap = getattr(spec.overlap, which)
    return overlap


def _lease(spec: LinearSpec, tensor: str, values: Values, columnwise: bool, which: str) -> Lease | None:
    """Room for what is gathered, for GEMM `which`, of the operand of values [M/R, features]; None for values that travel
    themselves."""
    quantizers = spec.quantizers(tensor)
    assert quantizers is not None
    fmt = (quantizers.columnwise if columnwise else quantizers.rowwise).format
    if fmt.keeps_source:
        return None
    shape = operand_shape(spec.recipe, tensor, values.shape, columnwise)
    overlap = _overlap(spec, which)
    return overlap.lease(fmt, shape, int(columnwise), spec.tp_group, dtype=values.dtype, device=values.device)


def _room(row: Lease | None, col: Lease | None = None) -> Pair:
    """What to quantize into, by orientation."""
    return Pair(None if row is None else row.mine, None if col is None else col.mine)


def _start(spec: LinearSpec, which: str, mine: QuantizedTensor, lease: Lease | None, dim: int) -> Gather:
    """Start gathering an operand of GEMM `which` along `dim`: where it has been leased, or from where it is."""
    if spec.runtime.watches_scales:
        check_gathered(spec, which, mine, dim)
    with wire.label(direction=which, precision="" if mine.format.keeps_source else mine.format.name):
        return lease.gather() if lease else _overlap(spec, which).gather(mine, dim, spec.tp_group)


def _joined(spec: LinearSpec, mine: QuantizedTensor, lease: Lease | None, dim: int) -> Columnwise:
    """Start gathering wgrad's operand along `dim`; a rowwise one (0) is transposed on arrival."""
    gather = _start(spec, "wgrad", mine, lease, dim)
    return gather.whole if dim else lambda: gather.whole().transpose()


def _on_arrival(
    spec: LinearSpec, tensor: str, values: Tensor, which: str, *, row: bool, col: bool, record: bool
) -> Callable[[], Pair]:
    """Start gathering values [M/R, features]; they are quantized when they are first asked for."""
    for columnwise in (False, True):
        why = fit.obstacle(spec.recipe, tensor, columnwise, len(values))
        if (row, col)[columnwise] and why not in (None, fit.ASKED):
            way = ("rowwise", "columnwise")[columnwise]
            spec.runtime.note(f"{tensor} {way} ({spec.recipe.name}) travels in high precision: {why}")
    gather = _start(spec, which, QuantizedTensor(HighPrecision(), (values,)), None, 0)

    @cache
    def arrived() -> Pair:
        (pair,) = quantize(spec, tensor, [gather.whole().payload], row=row, col=col, record=record, whole=True)
        return pair

    return arrived
