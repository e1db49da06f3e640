"""The parallel linear, forward and backward, for every style, recipe and overlap strategy.

    y  [M, N] = x [M, K] @ w [N, K].T + b [N]     fprop    x rowwise [M, K]      w rowwise [N, K]
    dx [M, K] = dy [M, N] @ w [N, K]              dgrad    dy rowwise [M, N]     w columnwise [K, N]
    dw [N, K] = dy [M, N].T @ x [M, K]            wgrad    dy columnwise [N, M]  x columnwise [K, M]
    db [N]    = dy [M, N].sum(0)

    M  tokens of all ranks in operands that are gathered, else of this rank;   K  in_features, N  out_features, of this rank's w
    x  [M/R, K] where sequence parallelism gathers it, dy [M/R, N] likewise, R ranks;   y, dx  [M/R, ...] where it scatters them

    forward   quantize x, start its gather;  y = token_gemm(x rowwise, w rowwise);  keep this rank's tokens of x, quantized
    backward  quantize dy; start the gathers in order of need (what dgrad consumes first)
              dx = token_gemm(dy rowwise, w columnwise); its reduction runs under wgrad
              dw = contract_gemm(dy columnwise, x columnwise); now, or in `backward_dw`

Several weights that read the same x (siblings) share one quantization, one amax agreement, one gather and one saved operand of
x, and their dgrads accumulate into one fp32 buffer that is reduced once. x, and dy, may be matrices that are still to be made
(`ops.Produced`): an op of `dlp.ops` hands them on, and so does a prologue (`dlp.parallel.linear.prologue`) in a layer that is
called with what x is made of (`layer_forward`).

What is cast, agreed on, sent and kept, the `TransferPlan` of the layer's tokens says; `BoundRoute` carries it out.
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
from dlp.parallel.linear.state import BoundSpec, beside, quantize, remembered
from dlp.parallel.model.checks import check_gathered
from dlp.parallel.overlap import Gather, Lease, Overlap
from dlp.parallel.transfer import ASKED, WIRES, Gathered, Reduction, Route, TransferPlan
from dlp.parallel.weight.base import Target
from dlp.quant.gemm import Gemm
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import Format, QuantizedTensor

Given = Values | Produced
OPERANDS = "operands"  # what x or dy has that came quantized
Rowwise = QuantizedTensor | Gather
Columnwise = QuantizedTensor | Callable[[], QuantizedTensor]


class GradsWanted(NamedTuple):
    """The gradients that one backward makes. used: the members whose y has a gradient (a sibling whose y nobody used has none);
    dx: that of x, in `dtype`, that of x; dw, db: by used member; shape: of dx, None for [M, K]."""

    used: tuple[int, ...]
    dx: bool
    dw: tuple[bool, ...]
    db: tuple[bool, ...]
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None


class Finish(NamedTuple):
    """What the GEMM of fprop or dgrad does to its sums: times `alpha`, added into `into` [rows, columns], which it returns."""

    alpha: float = 1.0
    into: Tensor | None = None


NO_FINISH = Finish()


# Forward


def run_forward(
    bound: BoundSpec, x: Given, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    parts: Sequence[Tensor], save: bool, record: bool, finish: Finish = NO_FINISH,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """x and w -> y.

    x         [..., K], as it is, or still to be made, or with `operands`
    weights   w_i [N_i, K] and biases b_i [N_i] of this rank; parts: of their rowwise operands, none: they are cast here
    save      backward will read x (`keeps_x`)
    record    gradients are enabled, so amaxes count for delayed scales
    finish    of the one member there is, where its y is not reduced
    returns   y_i [..., N_i] (token shards [M/R, N_i] where x is gathered or y scattered), and what is kept for backward: the
              parts of x, or x itself where wgrad reads that and it was made here
    """
    spec = bound.spec
    transport.start(spec.group, spec.style.name, (spec.name, "forward"))
    values = as_matrix(x)
    transfers = _transfers(bound, x.shape)
    plan, reduce = transfers.plan, transfers.plan.fprop

    mine = getattr(values, OPERANDS, None)
    operand: Rowwise | None = mine.rowwise if mine is not None else None
    if mine is None or transfers.x[save].gathers:
        with named_range(f"{spec.name}.cast_x"):
            operand, _, mine = transfers.x[save].send(values, record)
    assert operand is not None
    kept: list[Tensor] = []
    if save and plan.kept == "values":
        kept = [values.value] if isinstance(values, LazyMatrix) else []
    elif save:
        kept = list(mine.at(columnwise=plan.kept == "columnwise").parts)

    ws = _weight_operands(bound, spec.members, weights, parts, x.dtype, ROWWISE, record)
    options, dtype, ys = spec.recipe.fprop, spec.recipe.fprop.out_dtype or x.dtype, []
    for member, weight, w, bias in zip(spec.members, weights, ws, biases, strict=True):
        features, inside = weight.shape[0], None
        if bias is not None and reduce is None:  # else it is added once, behind the sum
            appended = w.shape[0] - features
            inside = F.pad(bias, (0, appended)) if appended else bias
        gemm = Gemm("fprop", w, dtype, inside, finish.into, options, alpha=finish.alpha, rounds=True)
        with named_range(f"{spec.name}.fprop"):
            y = trimmed(arrived(token_gemm(spec, reduce, spec.overlap.fprop, [operand], [gemm], dtype)), features)
        if bias is not None and reduce is not None:
            y = y + bias.to(y.dtype)
        if spec.recipe.y is not None:
            y = _through_format(bound, "y", member, y, record)
        ys.append(y if x.dim() == 2 or spec.style.gathers is not None else y.view(*x.shape[:-1], features))
    transport.finish(spec.group)
    return ys, kept


def layer_forward(
    bound: BoundSpec, inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    parts: Sequence[Tensor], save: bool, record: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """The same of a whole layer, which is called with x, or with what its prologue makes x of: kept for backward is then what
    that keeps, too."""
    prologue = bound.spec.prologue
    if prologue is None:
        return run_forward(bound, inputs[0], weights, biases, parts, save, record)
    x = prologue.make(bound.spec.name, *inputs)
    ys, kept = run_forward(bound, x, weights, biases, parts, save, record)
    return ys, [*kept, *(prologue.kept(x) if record else ())]


def keeps_x(recipe: Recipe, dx: bool, dw: bool) -> bool:
    """Whether a backward that makes these gradients reads what forward kept of x: for dw, and to see where x was clipped."""
    return dw or (dx and recipe.x.clips)


def reads_w(recipe: Recipe, dx: bool, dw: bool) -> bool:
    """Whether a backward that makes these gradients reads weights: for dx, and to see where w was clipped."""
    return dx or (dw and recipe.w.clips)


def to_save(inputs: Sequence[Tensor], kept: Sequence[Tensor], save: bool) -> list[Tensor]:
    """What backward reads of a forward that was called with `inputs` and returned `kept`: parts of x, or x itself; where a
    prologue made x, then what that keeps, and what it was given."""
    if len(inputs) > 1:
        return [*kept, *inputs]
    return list(kept or inputs) if save else []


# Backward


def run_backward(
    bound: BoundSpec, dys: Sequence[Given], saved: Sequence[Tensor], weights: Sequence[Tensor], parts: Sequence[Tensor],
    wanted: GradsWanted, finish: Finish = NO_FINISH, into: Sequence[Target | None] = (),
) -> list[Tensor]:  # fmt: skip
    """dy -> dx, dw and db.

    dys       dy_i [..., N_i] of the used members, as their y are, or [M, N_i] that are still to be made
    saved     what forward saved (`to_save`)
    weights   w_i [N_i, K] of the used members; parts: of their columnwise operands, none: they are cast here
    finish    of dgrad, where dx is not reduced; its `alpha` of wgrad, too
    into      where dw_i are written; none, or None: they are returned
    returns   what is wanted, in the order dx [M, K], dw_i [N_i, K], db_i [N_i]; without dw_i that are written. Where wgrads
              wait: what they will read instead of dw_i, at the end, for `leave_wgrads` to take
    """
    spec, learns = bound.spec, any(wanted.dw)
    transport.start(spec.group, spec.style.name, (spec.name, "backward"))
    members = spec.members if len(wanted.used) == len(spec.members) else [spec.members[i] for i in wanted.used]
    rows: list[Any] = list(map(as_matrix, dys))
    if any(wanted.db):  # the cast of dy sums its rows on the way
        rows = [Summed(dy) if needed else dy for dy, needed in zip(rows, wanted.db, strict=True)]
    transfers = _transfers_back(bound, rows[0].shape[0])
    plan = transfers.plan

    x_col = transfers.x_kept(saved) if learns else None  # on its way while dy is cast, if it travels
    dy_rows, dy_cols = _operands_of_dy(bound, transfers, rows, members, (wanted.dx, learns))

    dx: Tensor | Pending[Tensor] | None = None
    ws: list[QuantizedTensor] = []
    if reads_w(spec.recipe, wanted.dx, learns):
        ws = _weight_operands(bound, members, weights, parts, wanted.dtype, COLUMNWISE, True)
    if wanted.dx:
        options = spec.recipe.dgrad
        dtype = options.out_dtype or wanted.dtype
        gemms = [Gemm("dgrad", w, dtype if len(rows) == 1 else torch.float32, options=options) for w in ws]
        if finish is not NO_FINISH:
            gemms[0] = replace(gemms[0], alpha=finish.alpha, accumulate=finish.into, rounds=True)
        with named_range(f"{spec.name}.dgrad"):
            dx = token_gemm(spec, plan.dgrad, spec.overlap.dgrad, dy_rows, gemms, dtype)

    grads: list[Tensor] = []
    later: list[Tensor] = []
    if x_col is not None:
        keep = waits(spec.options.delay_wgrad, wanted.dx)
        x = _here(x_col, bound, keep)
        targets = into or [None] * len(weights)
        clips = [q.parts[-1].t() for q in ws] if spec.recipe.w.clips else [None] * len(weights)
        for dy, w, needed, target, clipped in zip(dy_cols, weights, wanted.dw, targets, clips, strict=True):
            if needed:
                assert dy is not None
                dy = _here(dy, bound, keep)
                if keep:
                    later += dy.parts
                    continue
                dw = contract_gemm(bound, dy, x, w.shape, w.dtype, finish.alpha, target, clipped)
                grads += [dw] if target is None else []
        later += x.parts if keep else ()
    grads += [rounded(dy.sums(), w.dtype) for dy, w, db in zip(rows, weights, wanted.db, strict=True) if db]
    if dx is None:  # then nothing waits
        transport.finish(spec.group)
        return grads

    whole = trimmed(arrived(dx), weights[0].shape[1])
    transport.finish(spec.group)
    return [_finished(bound, whole, saved, wanted), *grads, *later]


def _operands_of_dy(
    bound: BoundSpec, transfers: BoundTransfers, rows: Sequence[Any], members: Sequence[str], reads: tuple[bool, bool]
) -> tuple[Sequence[Any], Sequence[Columnwise | None]]:  # fmt: skip
    """dy_i [M, N_i] cast, rowwise for dgrad and columnwise for wgrad, here or on their way; as they came, if they came
    quantized. `reads`: which of the two there will be."""
    with named_range(f"{bound.spec.name}.cast_dy"):
        if bound.spec.style.gathers == "dy":  # of such a layer there are no siblings
            sent = transfers.dy(*reads).send(rows[0])
            return [sent.rowwise], [sent.columnwise]
        given = [found for dy in rows if (found := getattr(dy, OPERANDS, None)) is not None]
        made = given if len(given) == len(rows) else quantize(bound, "dy", rows, reads, members=members)
        rowwise, columnwise = zip(*made, strict=True)
        return rowwise, columnwise


def _finished(bound: BoundSpec, dx: Tensor, saved: Sequence[Tensor], wanted: GradsWanted) -> Tensor:
    """dx [M, K] of the GEMM -> 0 where x was clipped, through its format, in the dtype and the shape of x."""
    recipe = bound.spec.recipe
    if bound.clips:
        clipped = recipe.x.rowwise.format.wrap(saved).parts[-1]
        dx = dx.masked_fill_(trimmed(clipped, dx.shape[1]), 0)
    if recipe.dx is not None:
        dx = _through_format(bound, "dx", bound.spec.members[0], dx)
    dx = dx if dx.dtype == wanted.dtype else rounded(dx, wanted.dtype)
    return dx if wanted.shape is None else dx.view(wanted.shape)


def layer_backward(
    bound: BoundSpec, dys: Sequence[Tensor], saved: Sequence[Tensor], weights: Sequence[Tensor], parts: Sequence[Tensor],
    wanted: GradsWanted, into: Sequence[Target | None] = (),
) -> list[Tensor]:  # fmt: skip
    """The same of a whole layer, with the gradients of what its prologue read in the place of dx."""
    prologue = bound.spec.prologue
    if prologue is None:
        return run_backward(bound, dys, saved, weights, parts, wanted, into=into)
    kept = len(saved) - prologue.keeps - len(prologue.reads)
    made = run_backward(bound, dys, saved[:kept], weights, parts, wanted, into=into)
    if wanted.dx:
        given = kept + prologue.keeps
        made[:1] = prologue.gradients(made[0], saved[kept:given], *saved[given:])
    return made


def num_left(bound: BoundSpec, wanted: GradsWanted) -> int:
    """How many tensors at the end of what `run_backward` makes are for waiting wgrads."""
    if not (waits(bound.spec.options.delay_wgrad, wanted.dx) and any(wanted.dw)):
        return 0
    dy, x = (len(operand.columnwise.format.parts) for operand in (bound.spec.recipe.dy, bound.spec.recipe.x))
    return sum(wanted.dw) * dy + x


def leave_wgrads(
    bound: BoundSpec, wanted: GradsWanted, weights: Sequence[Tensor], made: list[Tensor], alpha: float = 1.0
) -> list[Tensor]:  # fmt: skip
    """What `run_backward` made, or the end of it, without what waiting wgrads read: they are left to `backward_dw`, if any
    wait."""
    start = len(made) - num_left(bound, wanted)
    if start == len(made):
        return made
    formats = [operand.columnwise.format for operand in (bound.spec.recipe.dy, bound.spec.recipe.x)]
    sizes = [len(fmt.parts) for fmt in formats]
    x, at = formats[1].wrap(made[len(made) - sizes[1] :]), start
    for i, w, needed in zip(wanted.used, weights, wanted.dw, strict=True):
        if needed:
            dy = formats[0].wrap(made[at : at + sizes[0]])
            wgrad = partial(contract_gemm, bound, dy, x, w.shape, w.dtype, alpha)
            bound.session.waiting.append((bound.weights.members[i], wgrad))
            at += sizes[0]
    return made[:start]


def waits(delay: bool | None, needs_dx: bool) -> bool:
    """Whether wgrad is left to `backward_dw`. Nobody waits for a layer without dx, and an op without a result would be
    dropped from a compiled graph."""
    return bool(delay) and needs_dx


# GEMMs


def token_gemm(
    spec: LinearSpec, reduce: Reduction | None, overlap: Overlap, operands: Sequence[Rowwise], gemms: Sequence[Gemm],
    dtype: torch.dtype,
) -> Tensor | Pending[Tensor]:  # fmt: skip
    """fprop and dgrad, where tokens are rows of the result: the sum over i of GEMM i on operand i, reduced over tp once,
    where `reduce` says how.

    `dtype`: of the result, and of the contributions to a reduction before they are packed for its wire.
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
    """The GEMM on an operand that is here, or on its way."""
    return gemm(a) if isinstance(a, QuantizedTensor) else a.gemm(gemm)


def contract_gemm(
    bound: BoundSpec, dy: QuantizedTensor, x: QuantizedTensor, shape: Sequence[int], dtype: torch.dtype,
    alpha: float = 1.0, into: Target | None = None, clipped: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """wgrad, where tokens are contracted: dy columnwise [N, M], x columnwise [K, M], which may be padded -> the gradient of a
    weight of this shape [N, K] and dtype, one GEMM over all tokens; written to `into`, where that is given; zero where the
    weight was `clipped`, bool [N, K], which may be padded."""
    options = bound.spec.recipe.wgrad
    gemm = Gemm("wgrad", x, options.out_dtype or dtype, options=options, alpha=alpha)
    with named_range(f"{bound.spec.name}.wgrad"):
        return _wgrad(gemm, dy, shape, dtype, into, clipped)


def _wgrad(
    gemm: Gemm, dy: QuantizedTensor, shape: Sequence[int], dtype: torch.dtype, into: Target | None, clipped: Tensor | None
) -> Tensor:  # fmt: skip
    options, x = gemm.options, gemm.b
    whole = (dy.payload.shape[0], x.payload.shape[0]) == tuple(shape) and clipped is None
    if into is not None and whole and options.out_dtype in (None, into.tensor.dtype):
        out = None if into.overwrite else into.tensor
        written = into.tensor if into.overwrite else None
        return replace(gemm, out_dtype=into.tensor.dtype, accumulate=out, out=written)(dy)
    dw = trimmed(gemm(dy), shape[1], shape[0])
    dw = dw if dw.dtype == dtype else rounded(dw, dtype)
    if clipped is not None:
        dw = dw.masked_fill_(trimmed(clipped, shape[1], shape[0]), 0)
    if into is None:
        return dw
    return into.tensor.copy_(dw) if into.overwrite else into.tensor.add_(dw)


def as_matrix(x: Given) -> Any:
    """[..., K] -> [M, K]."""
    if isinstance(x, Produced):
        return x.matrix
    return x if isinstance(x, LazyMatrix) or hasattr(x, OPERANDS) or x.dim() == 2 else x.reshape(-1, x.shape[-1])


def trimmed(values: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """The values without what was appended to their operands; they are contiguous."""
    if values.shape[1] != columns or (rows is not None and values.shape[0] != rows):
        values = values[:rows, :columns]
    return values.contiguous()


def _weight_operands(
    bound: BoundSpec, members: Sequence[str], weights: Sequence[Tensor], parts: Sequence[Tensor], dtype: torch.dtype,
    wanted: Orientations, record: bool,
) -> list[QuantizedTensor]:  # fmt: skip
    """One orientation of the weights: of flat parts that exist, or cast here, with one agreement."""
    columnwise = wanted == COLUMNWISE
    if not parts:
        made = quantize(bound, "w", [rounded(w, dtype) for w in weights], wanted, members=members, record=record)
        return [operands.at(columnwise=columnwise) for operands in made]
    formats, sizes = bound.spec.weight_formats
    fmt, size = formats[columnwise], sizes[columnwise]
    found = []
    for i in range(0, len(parts), size):
        found.append(QuantizedTensor(fmt, tuple(parts[i : i + size])))
    return found


def _through_format(bound: BoundSpec, tensor: str, member: str, values: Tensor, record: bool = True) -> Tensor:
    """The result y or dx, rounded by its quantizer."""
    quantizers = bound.spec.recipe.of(tensor)
    assert quantizers is not None
    padded = quantizers.rowwise.format.padded(values)
    (operands,) = quantize(bound, tensor, [padded], ROWWISE, members=[member], record=record)
    return trimmed(operands.at(columnwise=False).dequantize(values.dtype), values.shape[1], values.shape[0])


# Transfers


class Sent(NamedTuple):
    """An operand that is here or on its way, in the orientations that were asked for, and this rank's own part of it."""

    rowwise: Rowwise | None
    columnwise: Columnwise | None
    mine: Operands


def _here(operand: Columnwise, bound: BoundSpec, keep: bool) -> QuantizedTensor:
    """An operand that is here or on its way; in memory of its own, where it is kept for longer than this direction."""
    if isinstance(operand, QuantizedTensor):
        return operand
    arrived = operand()
    return arrived.format.wrap(transport.kept(bound.spec.group, arrived.parts)) if keep else arrived


class BoundGather:
    """One transfer of a route: whose strategy moves it, over whom, as which format (None: the values travel)."""

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
        """This rank's segment of what is gathered of the operand of values [M/R, features]; None where it is not leased."""
        if not self.leased:
            return None
        assert self.format is not None
        shape = self._shapes.get(values.shape)
        if shape is None:
            shape = operand_shape(self.bound.spec.recipe, self.tensor, values.shape, self.columnwise)
            self._shapes[values.shape] = shape
        return self.overlap.lease(self.format, shape, self.dim, self.group, dtype=values.dtype, device=values.device)

    def start(self, mine: QuantizedTensor, lease: Lease | None = None) -> Gather:
        """Start gathering an operand: where it has been leased, or from where it is."""
        if self.bound.session.watches_scales:
            check_gathered(self.bound.spec.name, self.gemm, mine, self.dim, self.bound.spec.tp_group)
        with observer.label(direction=self.gemm, precision=self.precision), named_range(self.range):
            return lease.gather() if lease else self.overlap.gather(mine, self.dim, self.group)


class BoundRoute:
    """A route of one layer's x or dy with so many tokens: how it is cast here and on arrival, and its transfers. Made once."""

    def __init__(self, bound: BoundSpec, plan: TransferPlan, route: Route) -> None:
        self.bound, self.route = bound, route
        self.casts = plan.casts(route) if any(route.here) else None
        self.arrived = plan.casts(route, arrived=True) if any(route.there) else None
        self.gathers = [BoundGather(bound, route.tensor, each, plan.format(route, each)) for each in route.gathers]
        self.owner, self.beside = bound.spec.owners(route.tensor), partial(beside, bound)
        self.leases = any(gather.leased for gather in self.gathers)
        self.remarks = [
            f"{route.tensor} {orientation} ({bound.spec.recipe.name}) travels in high precision: {why}"
            for orientation, why in zip(("rowwise", "columnwise"), route.why, strict=True) if why not in (None, ASKED)
        ]  # fmt: skip

    def send(self, values: Values, record: bool = True) -> Sent:
        """Values [M/R, features] of this rank: cast what is cast of them, straight into leases, and start all transfers; of
        what came quantized, those of its operands."""
        route, given = self.route, getattr(values, OPERANDS, None)
        leases: list[Lease | None] = [None] * len(self.gathers)
        into: list[QuantizedTensor | None] = [None, None]
        if self.leases and given is None:
            for i, gather in enumerate(self.gathers):
                lease = leases[i] = gather.lease(values)
                if lease is not None:
                    into[gather.columnwise] = lease.mine
        mine = given or NOTHING
        if self.casts is not None and given is None:
            room = (into[0], into[1]) if self.leases else NOWHERE
            (mine,) = cast(self.casts, route.here, [values], self.owner, self.beside, record=record, into=room)
        rowwise: Rowwise | None = mine.rowwise
        columnwise: Columnwise | None = mine.columnwise
        for gather, lease in zip(self.gathers, leases, strict=True):
            if gather.format is None:
                operands = self._on_arrival(gather, stored(values), record)
                rowwise = operands().rowwise if route.there[0] else rowwise
                columnwise = partial(_columnwise_of, operands) if route.there[1] else columnwise
                continue
            started = gather.start(mine.at(gather.columnwise), lease)
            rowwise = rowwise if gather.columnwise else started
            columnwise = started.whole if gather.columnwise else partial(_transposed, started)
        return Sent(rowwise, columnwise, mine)

    def _on_arrival(self, gather: BoundGather, values: Tensor, record: bool) -> Callable[[], Operands]:
        """Start gathering values; they are quantized when they are first asked for."""
        bound, route, casts = self.bound, self.route, self.arrived
        assert casts is not None
        for remark in self.remarks:
            bound.session.note(remark)
        started = gather.start(QuantizedTensor(HP, (values,)))

        def operands() -> Operands:
            whole = started.whole().payload
            return cast(casts, route.there, [whole], self.owner, self.beside, record=record)[0]

        return Pending((), operands).wait


NOTHING = Operands(None, None)


def _columnwise_of(operands: Callable[[], Operands]) -> QuantizedTensor:
    return operands().at(columnwise=True)


def _transposed(gather: Gather) -> QuantizedTensor:
    return gather.whole().transpose()


class BoundTransfers:
    """The routes of one layer with so many tokens."""

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
        """wgrad's operand of x from what forward kept: parts, or x itself [..., K]; it may travel again."""
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


@remembered
def _transfers(bound: BoundSpec, shape: torch.Size) -> BoundTransfers:
    """Of x of this shape [..., K]. ValueError where sequence parallelism gets something else than equal token shards."""
    spec, style, tokens = bound.spec, bound.spec.style, prod(shape[:-1])
    unsplit = spec.tokens is not None and tokens * spec.tp != spec.tokens
    if style.cut_x == 0 and (len(shape) != 2 or unsplit):
        expected = "B*S/tp" if spec.tokens is None else f"{spec.tokens // spec.tp}"
        raise ValueError(
            f"{spec.name}: sequence parallelism over tp {spec.tp} expects token shards [{expected}, K]; got x of shape "
            f"{tuple(shape)}. Split the tokens with dlp.scatter_tokens before the first sequence-parallel layer, join "
            f"them with dlp.gather_tokens after the last, and view heads with B and S from configuration"
        )
    if style.fprop.reduce == "scatter" and tokens % spec.tp:
        raise ValueError(
            f"{spec.name}: sequence parallelism cuts {tokens} tokens over tp {spec.tp}, which does not divide them; "
            f"choose micro_batch x sequence divisible by tp"
        )
    return BoundTransfers(bound, bound.transfers(tokens))


@remembered
def _transfers_back(bound: BoundSpec, dy_tokens: int) -> BoundTransfers:
    """Of dy with so many rows."""
    return BoundTransfers(bound, bound.transfers_back(dy_tokens))
