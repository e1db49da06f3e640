"""x and dy on their way: gathered quantized where the shards concatenate to the quantized whole, one transfer an
orientation, or one for both where the payload may be transposed on arrival. Otherwise they travel in high precision
and are quantized on arrival, the same on every rank.

    x    [M/R, K]  rowwise for fprop; again, from what forward kept, columnwise for wgrad
    dy   [M/R, N]  rowwise for dgrad, columnwise for wgrad

Each function starts its transfers and returns at once what waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from torch import Tensor

from dlp.parallel import fit
from dlp.parallel.operands import Pair, quantize
from dlp.parallel.overlap import Gather, Overlap
from dlp.parallel.spec import LinearSpec
from dlp.quant.tensor import HighPrecision, QuantizedTensor

Rowwise = QuantizedTensor | Gather
Columnwise = Callable[[], QuantizedTensor]


def x_of_forward(spec: LinearSpec, x: Tensor, keep: bool, record: bool) -> tuple[Rowwise, list[Tensor]]:
    """x [M, K] of this rank -> fprop's operand, and the parts of x kept for wgrad: none where it reads x itself."""
    tokens, gathered = len(x), spec.style.gathers == "x"
    parts = keep and not spec.saves_x(tokens)
    columnwise = parts and not spec.saves_rowwise(tokens)
    quantized = not gathered or spec.travels("x", False, tokens)
    (mine,) = quantize(spec, "x", [x], row=quantized, col=columnwise, record=record)
    kept = list((mine.columnwise() if columnwise else mine.rowwise()).parts) if parts else []
    if not gathered:
        return mine.rowwise(), kept
    if quantized:
        return spec.overlap.fprop.gather(mine.rowwise(), 0, spec.tp_group), kept
    return _on_arrival(spec, "x", x, spec.overlap.fprop, row=True, col=False, record=record)().rowwise(), kept


def x_of_backward(spec: LinearSpec, saved: Sequence[Tensor], tokens: int) -> Columnwise:
    """wgrad's operand of x from what forward kept: parts, or x itself [..., K], `tokens` on this rank."""
    gathered = spec.style.gathers == "x"
    if spec.saves_x(tokens):
        x = saved[0].reshape(-1, saved[0].shape[-1])
        if gathered:
            arrived = _on_arrival(spec, "x", x, spec.overlap.wgrad, row=False, col=True, record=True)
            return lambda: arrived().columnwise()
        return lambda: quantize(spec, "x", [x], row=False, col=True)[0].columnwise()
    kept = spec.recipe.x.columnwise.format.wrap(saved)
    if gathered:
        return _joined(spec, kept, spec.overlap.wgrad, 0 if spec.saves_rowwise(tokens) else 1)
    return lambda: kept


def dy_of_backward(spec: LinearSpec, dy: Tensor, row: bool, col: bool) -> tuple[Rowwise | None, Columnwise]:
    """This rank's tokens of dy [M/R, N] -> dgrad's and wgrad's operands, as far as they are asked for."""
    tokens, overlap = len(dy), spec.overlap
    if not (row or col):
        return None, _nothing
    if spec.derived("dy", tokens) and spec.travels("dy", False, tokens):
        (mine,) = quantize(spec, "dy", [dy], row=True, col=False)
        both = overlap.dgrad.gather(mine.rowwise(), 0, spec.tp_group)
        return both, lambda: both.whole().transpose()
    here = [row and spec.travels("dy", False, tokens), col and spec.travels("dy", True, tokens)]
    there = [row and not here[0], col and not here[1]]
    (mine,) = quantize(spec, "dy", [dy], row=here[0], col=here[1])
    rowwise: Rowwise | None = overlap.dgrad.gather(mine.rowwise(), 0, spec.tp_group) if here[0] else None
    columnwise: Columnwise | None = _joined(spec, mine.columnwise(), overlap.wgrad, 1) if here[1] else None
    if any(there):
        first = overlap.dgrad if there[0] else overlap.wgrad
        arrived = _on_arrival(spec, "dy", dy, first, row=there[0], col=there[1], record=True)
        rowwise = arrived().rowwise() if there[0] else rowwise
        columnwise = columnwise or (lambda: arrived().columnwise())
    assert columnwise is not None or not col
    return rowwise, columnwise or _nothing


def _nothing() -> QuantizedTensor:
    raise AssertionError("wgrad was not asked for")


def _joined(spec: LinearSpec, mine: QuantizedTensor, overlap: Overlap, dim: int) -> Columnwise:
    """Start gathering an operand along `dim`; a rowwise one (0) is transposed on arrival."""
    gather = overlap.gather(mine, dim, spec.tp_group)
    return gather.whole if dim else lambda: gather.whole().transpose()


def _on_arrival(
    spec: LinearSpec, tensor: str, values: Tensor, overlap: Overlap, *, row: bool, col: bool, record: bool
) -> Callable[[], Pair]:
    """Start gathering values [M/R, features]; they are quantized when they are first asked for."""
    for columnwise in (False, True):
        why = fit.obstacle(spec.recipe, tensor, columnwise, len(values))
        if (row, col)[columnwise] and why is not None:
            way = ("rowwise", "columnwise")[columnwise]
            spec.runtime.note(f"{tensor} {way} ({spec.recipe.name}) travels in high precision: {why}")
    gather = overlap.gather(QuantizedTensor(HighPrecision(), (values,)), 0, spec.tp_group)

    @cache
    def arrived() -> Pair:
        (pair,) = quantize(spec, tensor, [gather.whole().payload], row=row, col=col, record=record, whole=True)
        return pair

    return arrived
