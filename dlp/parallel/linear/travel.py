"""x and dy on their way, as the layer's `TransferPlan` says (`transfer`).

    x    [M/R, K]  rowwise for fprop; again, from what forward kept, columnwise for wgrad
    dy   [M/R, N]  rowwise for dgrad, columnwise for wgrad

Each function starts its transfers and returns at once what waits for them. Leases are this rank's segments of what is
gathered: an operand that only travels is quantized straight into one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

from torch import Tensor

from dlp.comm import observer
from dlp.kernels.ops import Produced, stored
from dlp.parallel import fit
from dlp.parallel.casts import NOWHERE, Values, operand_shape
from dlp.parallel.linear.operands import Operands, quantize
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.model.scales import check_gathered
from dlp.parallel.overlap import Gather, Lease, Overlap
from dlp.parallel.transfer import Gathered, Route
from dlp.quant.quantizer import Wanted
from dlp.quant.tensor import HighPrecision, QuantizedTensor

Rowwise = QuantizedTensor | Gather
Columnwise = Callable[[], QuantizedTensor]


def x_of_forward(bound: BoundSpec, x: Values, keep: bool, record: bool) -> tuple[Rowwise, list[Tensor]]:
    """x [M, K] of this rank -> fprop's operand, and the parts of x kept for wgrad: none where it reads x itself, and
    nobody has to keep that."""
    plan = bound.transfers(len(x))
    rowwise, _, mine = _send(bound, plan.x[keep], x, record)
    assert rowwise is not None
    if not keep:
        return rowwise, []
    if plan.kept == "values":
        return rowwise, [x.value] if isinstance(x, Produced) else []
    return rowwise, list(mine.at(columnwise=plan.kept == "columnwise").parts)


def x_of_backward(bound: BoundSpec, saved: Sequence[Tensor], dy_tokens: int) -> Columnwise:
    """wgrad's operand of x from what forward kept: parts, or x itself [..., K]. `dy_tokens`: rows of dy on this rank."""
    plan = bound.transfers_back(dy_tokens)
    route = plan.x_again
    if plan.kept == "values":
        return _send(bound, route, saved[0].reshape(-1, saved[0].shape[-1]))[1]
    kept = bound.spec.recipe.x.columnwise.format.wrap(saved)
    if not route.gathers:
        return lambda: kept
    return _columnwise(route.gathers[0], _start(bound, route.gathers[0], kept, None))


def dy_of_backward(bound: BoundSpec, dy: Values, row: bool, col: bool) -> tuple[Rowwise | None, Columnwise]:
    """This rank's tokens of dy [M/R, N] -> dgrad's and wgrad's operands, as far as they are asked for."""
    plan = bound.transfers_back(len(dy))
    rowwise, columnwise, _ = _send(bound, plan.dy(row, col), dy)
    return rowwise, columnwise


def _send(
    bound: BoundSpec, route: Route, values: Values, record: bool = True
) -> tuple[Rowwise | None, Columnwise, Operands]:  # fmt: skip
    """Cast what the route casts of this rank's tokens, and start its transfers -> the rowwise operand, the columnwise one,
    as far as they are asked for, and this rank's own."""
    leases = {each.columnwise: _lease(bound, route.tensor, values, each) for each in route.gathers if each.leased}
    mine = Operands(None, None)
    if any(route.here):
        (mine,) = quantize(bound, route.tensor, [values], route.here, record=record, into=_room(leases))
    rowwise: Rowwise | None = mine.rowwise
    columnwise: Columnwise = partial(mine.at, columnwise=True)
    for each in route.gathers:
        if each.columnwise is None:
            arrived = _on_arrival(bound, route, each, stored(values), record)
            rowwise = arrived().rowwise if route.there[0] else rowwise
            columnwise = partial(_columnwise_of, arrived) if route.there[1] else columnwise
            continue
        gather = _start(bound, each, mine.at(each.columnwise), leases.get(each.columnwise))
        rowwise = rowwise if each.columnwise else gather
        columnwise = _columnwise(each, gather)
    return rowwise, columnwise, mine


def _columnwise_of(arrived: Callable[[], Operands]) -> QuantizedTensor:
    return arrived().at(columnwise=True)


def _columnwise(gathered: Gathered, gather: Gather) -> Columnwise:
    """The columnwise operand of a transfer; a rowwise one is transposed on arrival."""
    return gather.whole if gathered.columnwise else lambda: gather.whole().transpose()


def _overlap(bound: BoundSpec, which: str) -> Overlap:
    """The strategy of GEMM `which`."""
    overlap: Overlap = getattr(bound.spec.overlap, which)
    return overlap


def _lease(bound: BoundSpec, tensor: str, values: Values, gathered: Gathered) -> Lease | None:
    """Room for what is gathered of the operand of values [M/R, features]; None for values that travel themselves."""
    quantizers, columnwise = bound.quantizers(tensor), bool(gathered.columnwise)
    assert quantizers is not None
    fmt = (quantizers.columnwise if columnwise else quantizers.rowwise).format
    if fmt.keeps_source:
        return None
    shape = operand_shape(bound.spec.recipe, tensor, values.shape, columnwise)
    overlap = _overlap(bound, gathered.gemm)
    return overlap.lease(fmt, shape, gathered.dim, bound.spec.tp_group, dtype=values.dtype, device=values.device)


def _room(leases: Mapping[bool | None, Lease | None]) -> Wanted:
    """What to quantize into, by orientation."""
    if not leases:
        return NOWHERE
    row, col = leases.get(False), leases.get(True)
    return None if row is None else row.mine, None if col is None else col.mine


def _start(bound: BoundSpec, gathered: Gathered, mine: QuantizedTensor, lease: Lease | None) -> Gather:
    """Start gathering an operand: where it has been leased, or from where it is."""
    if bound.session.watches_scales:
        check_gathered(bound.spec, gathered.gemm, mine, gathered.dim)
    with observer.label(direction=gathered.gemm, precision="" if mine.format.keeps_source else mine.format.name):
        return (
            lease.gather() if lease else _overlap(bound, gathered.gemm).gather(mine, gathered.dim, bound.spec.tp_group)
        )


def _on_arrival(
    bound: BoundSpec, route: Route, gathered: Gathered, values: Tensor, record: bool
) -> Callable[[], Operands]:  # fmt: skip
    """Start gathering values [M/R, features]; they are quantized when they are first asked for."""
    for orientation, why in zip(("rowwise", "columnwise"), route.why, strict=True):
        if why not in (None, fit.ASKED):
            bound.session.note(
                f"{route.tensor} {orientation} ({bound.spec.recipe.name}) travels in high precision: {why}"
            )
    gather = _start(bound, gathered, QuantizedTensor(HighPrecision(), (values,)), None)

    @cache
    def arrived() -> Operands:
        whole = gather.whole().payload
        (operands,) = quantize(bound, route.tensor, [whole], route.there, record=record, whole=True)
        return operands

    return arrived
