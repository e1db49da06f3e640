"""The parallel linear, forward and backward, for every style, recipe and overlap strategy.

    y  [M, N] = x [M, K] @ w [N, K].T + b [N]     fprop    x rowwise [M, K]      w rowwise [N, K]
    dx [M, K] = dy [M, N] @ w [N, K]              dgrad    dy rowwise [M, N]     w columnwise [K, N]
    dw [N, K] = dy [M, N].T @ x [M, K]            wgrad    dy columnwise [N, M]  x columnwise [K, M]
    db [N]    = dy [M, N].sum(0)

    M  tokens: those of all R ranks of tp in an operand that has been gathered, else this rank's
    N, K  out_features and in_features of this rank's w
    COLUMN_SP   is called with x [M/R, K], which is gathered;  dx [M/R, K] is scattered
    ROW_SP      returns y [M/R, N], which is scattered;  its backward is called with dy [M/R, N], which is gathered

    forward   quantize x, start its gather
              y = token_gemm(x rowwise, w rowwise)
              save this rank's tokens of x, quantized
    backward  quantize dy, start the gathers in order of need: dgrad's operand first
              dx = token_gemm(dy rowwise, w columnwise); its reduction runs under wgrad
              dw = contract_gemm(dy columnwise, x columnwise), now or in `backward_dw`

Several weights that read the same x (siblings) share one quantization, one amax agreement, one gather and one saved operand of
x, and their dgrads accumulate into one fp32 buffer that is reduced once.

x and dy may be lazy (`ops.Produced`), as ops of `dlp.ops` pass them: the cast computes such a matrix from the tensors it is
made of.

The `TransferPlan` of a number of tokens decides what is cast, agreed on, sent and saved; `BoundRoute` executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.comm import observer, transport
from dlp.comm.collectives import Pending
from dlp.kernels.ops import LazyMatrix, Produced, Summed, rounded, stored
from dlp.kernels.ranges import named_range
from dlp.parallel.casts import COLUMNWISE, HP, NOWHERE, ROWWISE, Operands, Orientations, Values, cast, operand_shape
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, cast_context, quantize, remembered
from dlp.parallel.overlap import Gather, Lease, Overlap
from dlp.parallel.transfer import ASKED, WIRES, Gathered, Reduction, Route, TransferPlan
from dlp.parallel.weight.base import Target
from dlp.quant.gemm import Gemm
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import Format, QuantizedTensor

LayerInput = Values | Produced  # x or dy: stored, or lazy
OPERANDS = "operands"  # the attribute of an x or dy that arrives quantized (`dlp.ops.handed.Handed`)
# an operand that is on this rank, or one whose gather has been started
Rowwise = QuantizedTensor | Gather
Columnwise = QuantizedTensor | Callable[[], QuantizedTensor]


class GradsWanted(NamedTuple):
    """Which gradients a backward computes.

    used     the members whose y has a gradient; a sibling whose y is not used has none
    dx       whether that of x is wanted, in `dtype`, the dtype of x
    dw, db   the same of weight and bias, by used member
    shape    what dx is returned in; None: [M, K]
    """

    used: tuple[int, ...]
    dx: bool
    dw: tuple[bool, ...]
    db: tuple[bool, ...]
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None


class Finish(NamedTuple):
    """The epilogue of fprop or dgrad: alpha A @ B.T, added to `into` [rows, columns] if that is given, which is then the
    result."""

    alpha: float = 1.0
    into: Tensor | None = None


NO_FINISH = Finish()


# Forward


def run_forward(
    bound: BoundSpec, x: LayerInput, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    parts: Sequence[Tensor], save: bool, record: bool, finish: Finish = NO_FINISH,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """y_i = x @ w_i.T + b_i, for every member i.

    x         [..., K]: stored, lazy, or quantized already
    weights   w_i [N_i, K] of this rank; biases: b_i [N_i], or None
    parts     the parts of the rowwise operands of all w_i; empty: the weights are cast here
    save      backward will read x (`keeps_x`)
    record    gradients are enabled, so amaxes count for delayed scales
    finish    the epilogue, of a layer with one member whose y is not reduced
    returns   y_i [..., N_i]; [M, N_i] where x is gathered, [M/R, N_i] where y is scattered
              and what backward needs of x: its parts, or x itself where wgrad reads that and x was lazy
    """
    spec = bound.spec
    transport.start(spec.group, spec.style.name, (spec.name, "forward"))
    values = as_matrix(x)
    transfers = _transfers(bound, x.shape)
    plan, reduce = transfers.plan, transfers.plan.fprop

    own = getattr(values, OPERANDS, None)  # this rank's operands of x
    x_row: Rowwise | None = own.rowwise if own is not None else None
    if own is None or transfers.x[save].gathers:
        with named_range(f"{spec.name}.cast_x"):
            x_row, _, own = transfers.x[save].send(values, record)
    assert x_row is not None
    kept: list[Tensor] = []
    if save and plan.kept == "values":  # a stored x is saved by the caller (`to_save`)
        kept = [values.value] if isinstance(values, LazyMatrix) else []
    elif save:
        kept = list(own.at(columnwise=plan.kept == "columnwise").parts)

    ws = _weight_operands(bound, spec.members, weights, parts, x.dtype, ROWWISE, record)
    options, dtype, ys = spec.recipe.fprop, spec.recipe.fprop.out_dtype or x.dtype, []
    for member, weight, w, bias in zip(spec.members, weights, ws, biases, strict=True):
        features, gemm_bias = weight.shape[0], None
        if bias is not None and reduce is None:  # else each rank would add it: it is added once, after the sum
            appended = w.shape[0] - features  # zeros of a padded operand
            gemm_bias = F.pad(bias, (0, appended)) if appended else bias
        gemm = Gemm("fprop", w, dtype, gemm_bias, finish.into, options, alpha=finish.alpha, rounds=True)
        with named_range(f"{spec.name}.fprop"):
            y = trimmed(arrived(token_gemm(spec, reduce, spec.overlap.fprop, [x_row], [gemm], dtype)), features)
        if bias is not None and reduce is not None:
            y = y + bias.to(y.dtype)
        if spec.recipe.y is not None:
            y = _through_format(bound, "y", member, y, record)
        ys.append(y if x.dim() == 2 or spec.style.gathers is not None else y.view(*x.shape[:-1], features))
    transport.finish(spec.group)
    return ys, kept


def keeps_x(recipe: Recipe, dx: bool, dw: bool) -> bool:
    """Whether a backward that computes these gradients reads x: for dw, and for dx where x was clipped."""
    return dw or (dx and recipe.x.clips)


def reads_w(recipe: Recipe, dx: bool, dw: bool) -> bool:
    """Whether a backward that computes these gradients reads the weights: for dx, and for dw where w was clipped."""
    return dx or (dw and recipe.w.clips)


def to_save(x: Tensor, kept: Sequence[Tensor], save: bool) -> list[Tensor]:
    """Tensors of x that autograd saves after a forward that returned `kept`: the parts of x, or x itself; none where backward
    does not read x."""
    return list(kept or [x]) if save else []


# Backward


def run_backward(
    bound: BoundSpec, dys: Sequence[LayerInput], saved: Sequence[Tensor], weights: Sequence[Tensor], parts: Sequence[Tensor],
    wanted: GradsWanted, finish: Finish = NO_FINISH, into: Sequence[Target | None] = (),
) -> list[Tensor]:  # fmt: skip
    """dx = sum over i of dy_i @ w_i,   dw_i = dy_i.T @ x,   db_i = dy_i.sum(0),   for the used members i.

    dys       dy_i [..., N_i], shaped as y_i was, or lazy [M, N_i]
    saved     what forward saved (`to_save`)
    weights   w_i [N_i, K] of the used members
    parts     the parts of their columnwise operands; empty: the weights are cast here
    finish    the epilogue of dgrad, where dx is not reduced; its `alpha` scales wgrad as well
    into      where each dw_i is written; empty, or None: it is returned
    returns   what is wanted of dx [M, K], then dw_i [N_i, K], then db_i [N_i]; no dw_i that was written `into`. Of delayed
              wgrads the operands are returned instead, at the end of the list, for `leave_wgrads`
    """
    spec, any_dw = bound.spec, any(wanted.dw)
    transport.start(spec.group, spec.style.name, (spec.name, "backward"))
    members = spec.members if len(wanted.used) == len(spec.members) else [spec.members[i] for i in wanted.used]
    rows: list[Any] = list(map(as_matrix, dys))
    if any(wanted.db):  # db is summed in the read that casts dy
        rows = [Summed(dy) if needed else dy for dy, needed in zip(rows, wanted.db, strict=True)]
    transfers = _transfers_back(bound, rows[0].shape[0])

    # where x travels again, its gather starts first and runs under the cast of dy
    x_col = transfers.x_kept(saved) if any_dw else None
    dy_rows, dy_cols = _operands_of_dy(bound, transfers, rows, members, (wanted.dx, any_dw))
    ws: list[QuantizedTensor] = []
    if reads_w(spec.recipe, wanted.dx, any_dw):
        ws = _weight_operands(bound, members, weights, parts, wanted.dtype, COLUMNWISE, True)

    # dgrad first: its reduction runs under wgrad
    dx = _dgrad(bound, transfers.plan, dy_rows, ws, wanted, finish) if wanted.dx else None
    grads: list[Tensor] = []
    delayed: list[Tensor] = []
    if x_col is not None:
        grads, delayed = _wgrads(bound, dy_cols, x_col, weights, ws, wanted, finish.alpha, into)
    grads += [rounded(dy.sums(), w.dtype) for dy, w, db in zip(rows, weights, wanted.db, strict=True) if db]
    if dx is None:
        transport.finish(spec.group)
        return grads  # without dx no wgrad is delayed (`waits`)

    whole = trimmed(arrived(dx), weights[0].shape[1])
    transport.finish(spec.group)
    return [_finish_dx(bound, whole, saved, wanted), *grads, *delayed]


def _operands_of_dy(
    bound: BoundSpec, transfers: BoundTransfers, rows: Sequence[Any], members: Sequence[str], orientations: Orientations
) -> tuple[Sequence[Any], Sequence[Columnwise | None]]:  # fmt: skip
    """dy_i [M, N_i] -> their rowwise operands, for dgrad, and their columnwise ones, for wgrad, as `orientations` asks: on this
    rank, or with a gather that has started. A dy that arrives quantized is not cast."""
    with named_range(f"{bound.spec.name}.cast_dy"):
        if bound.spec.style.gathers == "dy":  # a row-parallel layer, which has one member
            sent = transfers.dy(*orientations).send(rows[0])
            return [sent.rowwise], [sent.columnwise]
        quantized = [operands for dy in rows if (operands := getattr(dy, OPERANDS, None)) is not None]
        if len(quantized) < len(rows):
            quantized = quantize(bound, "dy", rows, orientations, members=members)
        rowwise, columnwise = zip(*quantized, strict=True)
        return rowwise, columnwise


def _dgrad(
    bound: BoundSpec, plan: TransferPlan, dy_rows: Sequence[Any], ws: Sequence[QuantizedTensor], wanted: GradsWanted,
    finish: Finish,
) -> Tensor | Pending[Tensor]:  # fmt: skip
    """dy_i rowwise [M, N_i], w_i columnwise [K, N_i] -> dx [M, K], which may be padded, or its reduction in flight. The dgrads
    of siblings are summed in fp32."""
    spec, options = bound.spec, bound.spec.recipe.dgrad
    dtype = options.out_dtype or wanted.dtype
    gemms = [Gemm("dgrad", w, dtype if len(ws) == 1 else torch.float32, options=options) for w in ws]
    if finish is not NO_FINISH:
        gemms[0] = replace(gemms[0], alpha=finish.alpha, accumulate=finish.into, rounds=True)
    with named_range(f"{spec.name}.dgrad"):
        return token_gemm(spec, plan.dgrad, spec.overlap.dgrad, dy_rows, gemms, dtype)


def _wgrads(
    bound: BoundSpec, dy_cols: Sequence[Columnwise | None], x_col: Columnwise, weights: Sequence[Tensor],
    ws: Sequence[QuantizedTensor], wanted: GradsWanted, alpha: float, into: Sequence[Target | None],
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """dy_i columnwise [N_i, M], x columnwise [K, M] -> the wanted dw_i [N_i, K] that are not written `into` a target; or, where
    wgrads are delayed, the parts of their operands: those of each dy_i, then those of x."""
    spec, grads, operands = bound.spec, list[Tensor](), list[Tensor]()
    delayed = waits(spec.options.delay_wgrad, wanted.dx)
    x = x_col if isinstance(x_col, QuantizedTensor) else _gathered(x_col, bound, delayed)
    targets = into or [None] * len(weights)
    clips = [w.parts[-1].t() for w in ws] if spec.recipe.w.clips else [None] * len(weights)
    for dy_col, w, needed, target, clipped in zip(dy_cols, weights, wanted.dw, targets, clips, strict=True):
        if not needed:
            continue
        assert dy_col is not None
        dy = dy_col if isinstance(dy_col, QuantizedTensor) else _gathered(dy_col, bound, delayed)
        if delayed:
            operands += dy.parts
            continue
        dw = contract_gemm(bound, dy, x, w.shape, w.dtype, alpha, target, clipped)
        grads += [dw] if target is None else []
    return grads, [*operands, *x.parts] if delayed else operands


def _finish_dx(bound: BoundSpec, dx: Tensor, saved: Sequence[Tensor], wanted: GradsWanted) -> Tensor:
    """dx [M, K] of the GEMM -> dx as autograd gets it: 0 where x was clipped, rounded by the recipe's quantizer of dx, in the
    dtype and shape of x."""
    recipe = bound.spec.recipe
    if bound.clips:
        clipped = recipe.x.rowwise.format.wrap(saved).parts[-1]
        dx = dx.masked_fill_(trimmed(clipped, dx.shape[1]), 0)
    if recipe.dx is not None:
        dx = _through_format(bound, "dx", bound.spec.members[0], dx)
    dx = dx if dx.dtype == wanted.dtype else rounded(dx, wanted.dtype)
    return dx if wanted.shape is None else dx.view(wanted.shape)


def num_left(bound: BoundSpec, wanted: GradsWanted) -> int:
    """How many tensors at the end of what `run_backward` returns are operands of delayed wgrads."""
    if not (waits(bound.spec.options.delay_wgrad, wanted.dx) and any(wanted.dw)):
        return 0
    dy, x = (len(operand.columnwise.format.parts) for operand in (bound.spec.recipe.dy, bound.spec.recipe.x))
    return sum(wanted.dw) * dy + x


def leave_wgrads(
    bound: BoundSpec, wanted: GradsWanted, weights: Sequence[Tensor], results: list[Tensor], alpha: float = 1.0
) -> list[Tensor]:  # fmt: skip
    """`results`: of `run_backward`, or their end. Returns them without the operands of delayed wgrads, which are queued for
    `backward_dw`."""
    start = len(results) - num_left(bound, wanted)
    if start == len(results):
        return results
    dy_format, x_format = bound.spec.recipe.dy.columnwise.format, bound.spec.recipe.x.columnwise.format
    size, at = len(dy_format.parts), start
    x = x_format.wrap(results[len(results) - len(x_format.parts) :])
    for i, w, needed in zip(wanted.used, weights, wanted.dw, strict=True):
        if needed:
            dy = dy_format.wrap(results[at : at + size])
            wgrad = partial(contract_gemm, bound, dy, x, w.shape, w.dtype, alpha)
            bound.session.waiting.append((bound.weights.members[i], wgrad))
            at += size
    return results[:start]


def waits(delay: bool | None, needs_dx: bool) -> bool:
    """Whether wgrads are delayed until `backward_dw`: where that was chosen, and dx is wanted. Without dx nothing waits for
    this backward, so that a delay gains nothing, and torch.compile would drop an op that returns nothing."""
    return bool(delay) and needs_dx


# GEMMs


def token_gemm(
    spec: LinearSpec, reduce: Reduction | None, overlap: Overlap, operands: Sequence[Rowwise], gemms: Sequence[Gemm],
    dtype: torch.dtype,
) -> Tensor | Pending[Tensor]:  # fmt: skip
    """sum over i of gemm_i(operand_i) [M, features]: fprop or dgrad, where tokens are rows of the result.

    reduce   how the sum is then reduced over tp; None: it is not
    dtype    of the result, and of each rank's contribution to a reduction before the codec packs it
    returns  the result; where it is reduced, a reduction in flight
    """
    total: Tensor | None = None
    for a, gemm in zip(operands[:-1], gemms[:-1], strict=True):
        total = _run(a, gemm if total is None else replace(gemm, accumulate=total))
    a, last = operands[-1], gemms[-1] if total is None else replace(gemms[-1], accumulate=total)
    if reduce is None:
        result = _run(a, last)
        return result if result.dtype == dtype else rounded(result, dtype)
    assert isinstance(a, QuantizedTensor), "no style both gathers and reduces in one GEMM"
    return overlap.gemm_reduce(a, last, spec.tp_group, reduce=reduce.how, dtype=dtype, codec=WIRES[reduce.codec])


def arrived(result: Tensor | Pending[Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else result.wait()


def _run(a: Rowwise, gemm: Gemm) -> Tensor:
    """The GEMM on an operand that is on this rank, or as the strategy of its gather schedules it."""
    return gemm(a) if isinstance(a, QuantizedTensor) else a.gemm(gemm)


def contract_gemm(
    bound: BoundSpec, dy: QuantizedTensor, x: QuantizedTensor, shape: Sequence[int], dtype: torch.dtype,
    alpha: float = 1.0, into: Target | None = None, clipped: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """dw [N, K] = dy.T @ x: wgrad, one GEMM over all tokens, which are contracted.

    dy, x         columnwise operands [N, M] and [K, M], which may be padded
    shape, dtype  of the weight
    into          where dw is written or added; None: it is returned
    clipped       bool [N, K], which may be padded: where the weight was clipped, dw is 0
    """
    options = bound.spec.recipe.wgrad
    gemm = Gemm("wgrad", x, options.out_dtype or dtype, options=options, alpha=alpha)
    with named_range(f"{bound.spec.name}.wgrad"):
        exact = (dy.payload.shape[0], x.payload.shape[0]) == tuple(shape) and clipped is None
        if into is not None and exact and options.out_dtype in (None, into.tensor.dtype):  # the GEMM writes it itself
            added, written = (None, into.tensor) if into.overwrite else (into.tensor, None)
            return replace(gemm, out_dtype=into.tensor.dtype, accumulate=added, out=written)(dy)
        dw = trimmed(gemm(dy), shape[1], shape[0])
        dw = dw if dw.dtype == dtype else rounded(dw, dtype)
        if clipped is not None:
            dw = dw.masked_fill_(trimmed(clipped, shape[1], shape[0]), 0)
        if into is None:
            return dw
        return into.tensor.copy_(dw) if into.overwrite else into.tensor.add_(dw)


def as_matrix(x: LayerInput) -> Any:
    """[..., K] -> [M, K]; lazy matrices and operands are matrices already."""
    if isinstance(x, Produced):
        return x.matrix
    return (
        x
        if isinstance(x, LazyMatrix) or hasattr(x, OPERANDS) or x.dim() == 2
        else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    )


def trimmed(values: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """The result without the rows and columns that padded operands added to it, contiguous."""
    if values.shape[1] != columns or (rows is not None and values.shape[0] != rows):
        values = values[:rows, :columns]
    return values.contiguous()


def _weight_operands(
    bound: BoundSpec, members: Sequence[str], weights: Sequence[Tensor], parts: Sequence[Tensor], dtype: torch.dtype,
    wanted: Orientations, record: bool,
) -> list[QuantizedTensor]:  # fmt: skip
    """The operands of the weights in one orientation: wrapped from their flat `parts`, or, where there are none, cast here from
    `dtype`, with one amax agreement for all."""
    columnwise = wanted == COLUMNWISE
    if not parts:
        cast_here = quantize(bound, "w", [rounded(w, dtype) for w in weights], wanted, members=members, record=record)
        return [operands.at(columnwise=columnwise) for operands in cast_here]
    formats, sizes = bound.spec.weight_formats
    fmt, size = formats[columnwise], sizes[columnwise]
    wrapped = []
    for i in range(0, len(parts), size):
        wrapped.append(QuantizedTensor(fmt, tuple(parts[i : i + size])))
    return wrapped


def _through_format(bound: BoundSpec, tensor: str, member: str, values: Tensor, record: bool = True) -> Tensor:
    """The result y or dx, cast by the recipe's quantizer of it and decoded again."""
    quantizers = bound.spec.recipe.of(tensor)
    assert quantizers is not None
    padded = quantizers.rowwise.format.padded(values)
    (operands,) = quantize(bound, tensor, [padded], ROWWISE, members=[member], record=record)
    return trimmed(operands.at(columnwise=False).dequantize(values.dtype), values.shape[1], values.shape[0])


# Transfers


class Sent(NamedTuple):
    """x or dy after its casts: each orientation whole on this rank or with its gather started, None where it was not asked for;
    `own`: the operands of this rank's tokens alone."""

    rowwise: Rowwise | None
    columnwise: Columnwise | None
    own: Operands


def _gathered(wait: Callable[[], QuantizedTensor], bound: BoundSpec, keep: bool) -> QuantizedTensor:
    """Wait for an operand's gather. `keep`: copy it out of memory that the transport will use for the next gather, since it is
    read after this direction."""
    operand = wait()
    return operand.format.wrap(transport.kept(bound.spec.group, operand.parts)) if keep else operand


class BoundGather:
    """One gather of a route, bound to a strategy, a group and a format; format None: the values are gathered, unquantized."""

    def __init__(self, bound: BoundSpec, tensor: str, gathered: Gathered, fmt: Format | None) -> None:
        self.bound, self.tensor, self.dim, self.columnwise = bound, tensor, gathered.dim, bool(gathered.columnwise)
        overlap: Overlap = getattr(bound.spec.overlap, gathered.gemm)
        self.overlap = overlap.at_once if gathered.at_once else overlap
        self.group, self.format, self.gemm = bound.spec.tp_group, fmt, gathered.gemm
        self.leased = gathered.leased and fmt is not None and not fmt.keeps_source
        self.range = f"{bound.spec.name}.gather_{tensor}"
        self.precision = "" if fmt is None or fmt.keeps_source else fmt.name  # the observer's; "": the dtype sent
        self._shapes: dict[Any, tuple[int, int]] = {}

    def lease(self, values: Values) -> Lease | None:
        """This rank's segment of the gathered operand's storage, which values [M/R, features] are cast into; None where the
        operand has storage of its own (`Gathered.leased`)."""
        if not self.leased:
            return None
        assert self.format is not None
        shape = self._shapes.get(values.shape)
        if shape is None:
            shape = operand_shape(self.bound.spec.recipe, self.tensor, values.shape, self.columnwise)
            self._shapes[values.shape] = shape
        return self.overlap.lease(self.format, shape, self.dim, self.group, dtype=values.dtype, device=values.device)

    def start(self, own: QuantizedTensor, lease: Lease | None = None) -> Gather:
        """Start gathering this rank's operand, which lies in `lease` if one is given."""
        if (watch := self.bound.session.watches_scales) is not None:
            watch(self.bound.spec.name, self.gemm, own, self.dim, self.bound.spec.tp_group)
        with observer.label(direction=self.gemm, precision=self.precision), named_range(self.range):
            return lease.gather() if lease else self.overlap.gather(own, self.dim, self.group)


class BoundRoute:
    """A `Route` of x or dy, for one layer and number of tokens: the casts before and after its gathers, and the gathers. Built
    once, then executed by each `send`."""

    def __init__(self, bound: BoundSpec, plan: TransferPlan, route: Route) -> None:
        self.bound, self.route = bound, route
        self.casts_before = plan.casts(route) if any(route.cast_before) else None
        self.casts_after = plan.casts(route, arrived=True) if any(route.cast_after) else None
        self.gathers = [BoundGather(bound, route.tensor, each, plan.format(route, each)) for each in route.gathers]
        self.owner, self.context = bound.spec.owners(route.tensor), partial(cast_context, bound)
        self.leases = any(gather.leased for gather in self.gathers)
        self.remarks = [
            f"{route.tensor} {orientation} ({bound.spec.recipe.name}) travels in high precision: {why}"
            for orientation, why in zip(("rowwise", "columnwise"), route.reasons, strict=True) if why not in (None, ASKED)
        ]  # fmt: skip

    def send(self, values: Values, record: bool = True) -> Sent:
        """Values [M/R, features] of this rank: cast them, straight into leased memory where that is gathered, and start all
        gathers. Values that arrive quantized are not cast again."""
        route, quantized = self.route, getattr(values, OPERANDS, None)
        leases: list[Lease | None] = [None] * len(self.gathers)
        into: list[QuantizedTensor | None] = [None, None]
        if self.leases and quantized is None:
            for i, gather in enumerate(self.gathers):
                lease = leases[i] = gather.lease(values)
                if lease is not None:
                    into[gather.columnwise] = lease.mine
        own = quantized or NOTHING
        if self.casts_before is not None and quantized is None:
            storage = (into[0], into[1]) if self.leases else NOWHERE
            (own,) = cast(
                self.casts_before, route.cast_before, [values], self.owner, self.context, record=record, into=storage
            )
        rowwise: Rowwise | None = own.rowwise
        columnwise: Columnwise | None = own.columnwise
        for gather, lease in zip(self.gathers, leases, strict=True):
            if gather.format is None:
                operands = self._gather_values(gather, stored(values), record)
                rowwise = operands().rowwise if route.cast_after[0] else rowwise
                columnwise = partial(_columnwise_of, operands) if route.cast_after[1] else columnwise
                continue
            started = gather.start(own.at(gather.columnwise), lease)
            rowwise = rowwise if gather.columnwise else started
            columnwise = started.whole if gather.columnwise else partial(_transposed, started)
        return Sent(rowwise, columnwise, own)

    def _gather_values(self, gather: BoundGather, values: Tensor, record: bool) -> Callable[[], Operands]:
        """Start gathering values unquantized. Returns what waits for them, casts them at its first call, and keeps that."""
        bound, route, casts = self.bound, self.route, self.casts_after
        assert casts is not None
        for remark in self.remarks:
            bound.session.note(remark)
        started = gather.start(QuantizedTensor(HP, (values,)))

        def operands() -> Operands:
            whole = started.whole().payload
            return cast(casts, route.cast_after, [whole], self.owner, self.context, record=record)[0]

        return Pending((), operands).wait


NOTHING = Operands(None, None)


def _columnwise_of(operands: Callable[[], Operands]) -> QuantizedTensor:
    return operands().at(columnwise=True)


def _transposed(gather: Gather) -> QuantizedTensor:
    return gather.whole().transpose()


class BoundTransfers:
    """The routes of one layer's x and dy, for one number of tokens: `x` without and with a wgrad to come, `x_again` in
    backward, `dy` by the orientations that backward reads."""

    def __init__(self, bound: BoundSpec, plan: TransferPlan) -> None:
        self.bound, self.plan = bound, plan
        self.x = [BoundRoute(bound, plan, route) for route in plan.x]
        self.x_again = BoundRoute(bound, plan, plan.x_again)
        self._dys: dict[Orientations, BoundRoute] = {}

    def dy(self, row: bool, col: bool) -> BoundRoute:
        found = self._dys.get((row, col))
        if found is None:
            found = self._dys[row, col] = BoundRoute(self.bound, self.plan, self.plan.dy(row, col))
        return found

    def x_kept(self, saved: Sequence[Tensor]) -> Columnwise:
        """x columnwise, wgrad's operand, from what forward saved: parts, or x itself [..., K]. Where x is gathered, the gather
        starts here."""
        if self.plan.kept == "values":
            columnwise = self.x_again.send(as_matrix(saved[0])).columnwise
            assert columnwise is not None
            return columnwise
        kept = self.bound.spec.recipe.x.columnwise.format.wrap(saved)
        if not self.x_again.gathers:
            return kept.transpose() if self.plan.kept == "rowwise" else kept
        gather = self.x_again.gathers[0]
        started = gather.start(kept)
        return started.whole if gather.columnwise else partial(_transposed, started)


def other_microbatch(tokens: int, expected: int) -> str:
    """What to do about a token shard of a microbatch of another size, for the message of a layer that gets one."""
    return (
        f"If that is a shard of a microbatch of {tokens} tokens: dlp.convert was called with batch = (B, S) of {expected} "
        f"tokens, and every microbatch needs as many. Leave out a smaller last one (DataLoader(drop_last=True)), or pad it "
        f"and give the padding the target -100. Otherwise: "
    )


@remembered
def _transfers(bound: BoundSpec, shape: torch.Size) -> BoundTransfers:
    """For x of this shape [..., K]. ValueError where sequence parallelism gets anything but equal token shards."""
    spec, style, tokens = bound.spec, bound.spec.style, prod(shape[:-1])
    unsplit = spec.tokens is not None and tokens * spec.tp != spec.tokens
    if style.cut_x == 0 and (len(shape) != 2 or unsplit):
        expected = "B*S/tp" if spec.tokens is None else f"{spec.tokens // spec.tp}"
        other = len(shape) == 2 and spec.tokens is not None and tokens != spec.tokens
        raise ValueError(
            f"{spec.name}: sequence parallelism over tp {spec.tp} expects token shards [{expected}, K]; got x of shape "
            f"{tuple(shape)}. {other_microbatch(tokens * spec.tp, spec.tokens or 0) if other else ''}Split the tokens with "
            f"dlp.scatter_tokens before the first sequence-parallel layer, join them with dlp.gather_tokens after the last, "
            f"and view heads with B and S from configuration"
        )
    if style.fprop.reduce == "scatter" and tokens % spec.tp:
        raise ValueError(
            f"{spec.name}: sequence parallelism cuts {tokens} tokens over tp {spec.tp}, which does not divide them; "
            f"choose micro_batch x sequence divisible by tp"
        )
    return BoundTransfers(bound, bound.transfers(tokens))


@remembered
def _transfers_back(bound: BoundSpec, dy_tokens: int) -> BoundTransfers:
    """For dy with this number of rows."""
    return BoundTransfers(bound, bound.transfers_back(dy_tokens))
