"""Casts of one layer: x, w, dy, y and dx, with the delayed scales, flags and random origins of its model.

`quantize` casts operands while a pass runs. `weight_casts` returns the casts of one weight, which the step boundary runs
together with the casts of all weights of the model. The cast engine, `dlp.parallel.casts`, does not depend on layers: a
`CastContext` contains the state of the model that a cast reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer, transport
from dlp.comm.collectives import Pending
from dlp.kernels.ops import LazyMatrix, Produced, rounded, stored
from dlp.parallel.casts import (
    BOTH,
    COLUMNWISE,
    HP,
    NOWHERE,
    ROWWISE,
    Cast,
    CastContext,
    CastPlan,
    Operands,
    Orientations,
    Values,
    cast,
    cast_plan,
    casts_of,
)
from dlp.parallel.linear.plan import Gathered, LinearPlan, Route
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec, remembered
from dlp.parallel.overlap import Gather, Lease
from dlp.quant.quantizer import Origin, Wanted
from dlp.quant.recipe import Operand
from dlp.quant.tensor import QuantizedTensor

OPERANDS = "operands"  # attribute with the operands of an x or dy that arrives quantized (`dlp.ops.handed.Handed`)
NOTHING = Operands(None, None)
LayerInput = Values | Produced  # x or dy: a stored tensor, or a lazy matrix
# an operand on this rank, or an operand whose gather has started
Rowwise = QuantizedTensor | Gather
Columnwise = QuantizedTensor | Callable[[], QuantizedTensor]


def quantize(
    bound: BoundSpec, tensor: str, values: Sequence[Values], orientations: Orientations, *,
    members: Sequence[str] | None = None, record: bool = True, whole: bool = False, into: Wanted = NOWHERE,
) -> list[Operands]:  # fmt: skip
    """Quantize values [rows, columns] of x, w, dy, y or dx, with one amax agreement for all values.

    members    the members to which the values belong, in this order; None: `LinearSpec.owners` of the tensor
    record     whether amaxes are recorded for delayed scales
    whole      whether x or dy has been gathered, so that this rank has the full tensor
    into       storage of `operand_shape` for the operands of a single value; None for an orientation: the cast allocates
    """
    plan = _plan(bound, tensor, orientations, whole, values[0].shape[0])
    owners = members or bound.spec.owners(tensor)
    return cast(plan, orientations, values, owners, partial(cast_context, bound), record=record, into=into)


# Routes of x and dy


class Quantized(NamedTuple):
    """x or dy after the casts.

    rowwise      the operand, or the started gather of its codes; None: this orientation was not requested
    columnwise   the operand, or a function that waits for a gather and returns the operand; None: it was not requested
    own          the operands that were cast from the tokens of this rank, before gathers
    """

    rowwise: Rowwise | None
    columnwise: Columnwise | None
    own: Operands


def quantize_route(
    bound: BoundSpec,
    plan: LinearPlan,
    route: Route,
    values: Sequence[Values],
    members: Sequence[str],
    record: bool = True,
) -> list[Quantized]:
    """Quantize x or dy_i [M/R, features] of this rank, with one amax agreement for all values, and start the gathers.

    An operand is cast directly into the output buffer of its gather if `Gathered.leased` is true. Nothing is cast if all values
    already have operands (`OPERANDS`).
    """
    leases, own = list[Lease | None](), [getattr(value, OPERANDS, NOTHING) for value in values]
    if route.before is not None and any([each is NOTHING for each in own]):
        leases, into = _leases(plan, route, values[0]) if route.leases else (leases, NOWHERE)
        context = partial(cast_context, bound)
        own = cast(route.before, route.cast_before, values, members, context, record=record, into=into)
    if not route.gathers:
        return [Quantized(each.rowwise, each.columnwise, each) for each in own]
    rowwise: Rowwise | None = own[0].rowwise
    columnwise: Columnwise | None = own[0].columnwise
    for i, gathered in enumerate(route.gathers):
        if gathered.format is None:
            arrived = _gather_values(bound, plan, route, gathered, stored(values[0]), record)
            rowwise = arrived().rowwise if route.cast_after[0] else rowwise
            columnwise = partial(_columnwise_of, arrived) if route.cast_after[1] else columnwise
            continue
        mine = own[0][bool(gathered.columnwise)]
        assert mine is not None, "a gather sends an operand that was cast before"
        started = start_gather(bound, plan, route.tensor, gathered, mine, leases[i] if leases else None)
        rowwise = rowwise if gathered.columnwise else started
        columnwise = started.whole if gathered.columnwise else partial(_transposed, started)
    return [Quantized(rowwise, columnwise, own[0])]


def _leases(plan: LinearPlan, route: Route, values: Values) -> tuple[list[Lease | None], Wanted]:
    """Return the lease (output buffer) of each gather of the route, and for each orientation the storage into which `values`
    [M/R, features] are cast; None: the cast allocates the storage."""
    leases = [_lease(plan, route, each, values) for each in route.gathers]
    storage: list[QuantizedTensor | None] = [None, None]
    for each, lease in zip(route.gathers, leases, strict=True):
        if lease is not None:
            storage[bool(each.columnwise)] = lease.mine
    return leases, (storage[0], storage[1])


def _lease(plan: LinearPlan, route: Route, gathered: Gathered, values: Values) -> Lease | None:
    """Return the output buffer of a gather. The cast of values [M/R, features] is written into this rank's segment of the
    buffer. None: the operand is cast into separate storage, since `Gathered.leased` is false."""
    if not gathered.leased:
        return None
    assert gathered.format is not None and gathered.overlap is not None and plan.spec is not None
    key = route.tensor, values.shape, bool(gathered.columnwise)
    shape = plan.shapes.get(key) or plan.shard_shape(*key)
    group = plan.spec.group
    assert group is not None
    return gathered.overlap.lease(gathered.format, shape, gathered.dim, group, dtype=values.dtype, device=values.device)


def start_gather(
    bound: BoundSpec,
    plan: LinearPlan,
    tensor: str,
    gathered: Gathered,
    own: QuantizedTensor,
    lease: Lease | None = None,
) -> Gather:
    """Start gathering this rank's operand `own`. If `lease` is given, `own` has been cast into the lease."""
    group, overlap = bound.spec.group, gathered.overlap
    assert overlap is not None and group is not None
    if bound.session.before_gather is not None:
        bound.session.before_gather(bound.spec.name, gathered.gemm, own, gathered.dim, group)
    with plan.observed(tensor, gathered) if observer.counting() else plan.scope[f"gather_{tensor}"]():
        return lease.gather() if lease else overlap.gather(own, gathered.dim, group)


def _gather_values(
    bound: BoundSpec, plan: LinearPlan, route: Route, gathered: Gathered, values: Tensor, record: bool
) -> Callable[[], Operands]:
    """Start gathering values in high precision. Return a function that waits for the values, casts them in the first call, and
    returns the same operands in each call."""
    casts = route.after
    assert casts is not None
    for remark in route.remarks(plan.recipe):
        bound.session.note(remark)
    started = start_gather(bound, plan, route.tensor, gathered, QuantizedTensor(HP, (values,)))

    def operands() -> Operands:
        arrived, owner = started.whole().payload, bound.spec.owners(route.tensor)
        return cast(casts, route.cast_after, [arrived], owner, partial(cast_context, bound), record=record)[0]

    return Pending((), operands).wait


def as_matrix(x: LayerInput) -> Any:
    """View x [..., K] as a matrix [M, K]. Lazy matrices, and tensors with operands, are matrices already."""
    if isinstance(x, Produced):
        return x.matrix
    if isinstance(x, LazyMatrix) or hasattr(x, OPERANDS) or x.dim() == 2:
        return x
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def saved_x(bound: BoundSpec, plan: LinearPlan, saved: Sequence[Tensor]) -> Columnwise:
    """Return x columnwise, the operand of wgrad, from the parts or the x [..., K] that forward saved. If x is gathered, start
    the gather, and return a function that waits for the gather."""
    route = plan.x_again
    if plan.kept == "values":
        (quantized,) = quantize_route(bound, plan, route, [as_matrix(saved[0])], bound.spec.members[:1])
        assert quantized.columnwise is not None
        return quantized.columnwise
    kept = plan.recipe.x.columnwise.format.wrap(saved)
    if not route.gathers:
        return kept.transpose() if plan.kept == "rowwise" else kept
    gathered = route.gathers[0]
    started = start_gather(bound, plan, "x", gathered, kept)
    return started.whole if gathered.columnwise else partial(_transposed, started)


def whole(operand: Columnwise | None) -> QuantizedTensor:
    """Wait for an operand that may be in a gather, and return the operand."""
    assert operand is not None, "this orientation was not requested"
    return operand if isinstance(operand, QuantizedTensor) else operand()


def outliving(operand: Columnwise | None, group: ProcessGroup | None) -> QuantizedTensor:
    """Wait for an operand that will be read after this pass, and return it. A gathered operand is copied if `group` has a
    transport, because the transport reuses the memory for later gathers."""
    arrived = whole(operand)
    if isinstance(operand, QuantizedTensor) or group is None:
        return arrived
    return arrived.format.wrap(transport.kept(group, arrived.parts))


def _columnwise_of(operands: Callable[[], Operands]) -> QuantizedTensor:
    return operands().at(columnwise=True)


def _transposed(gather: Gather) -> QuantizedTensor:
    arrived = gather.whole()
    return arrived.format.transpose(arrived)


def other_microbatch(tokens: int, expected: int) -> str:
    """Return the part of an error message that applies if the microbatch has `tokens` tokens, and the batch that `dlp.convert`
    was called with has `expected` tokens."""
    return (
        f"If x is a shard of a microbatch of {tokens} tokens: dlp.convert was called with batch = (B, S) of {expected} "
        f"tokens, and every microbatch must have this number of tokens. Drop a smaller last batch "
        f"(DataLoader(drop_last=True)), or pad the batch and give padded positions the target -100. Otherwise: "
    )


def plan_of(bound: BoundSpec, shape: torch.Size) -> LinearPlan:
    """Return the plan for x of this shape [..., K], and store it in `bound.plans`. Raises ValueError if sequence parallelism
    needs another shape or number of tokens."""
    spec, style, tokens = bound.spec, bound.spec.style, prod(shape[:-1])
    unsplit = spec.tokens is not None and tokens * spec.tp != spec.tokens
    if style.cut_x == 0 and (len(shape) != 2 or unsplit):
        expected = "B*S/tp" if spec.tokens is None else f"{spec.tokens // spec.tp}"
        other = len(shape) == 2 and spec.tokens is not None and tokens != spec.tokens
        raise ValueError(
            f"{spec.name}: sequence parallelism expects token shards [{expected}, K]; got x of shape {tuple(shape)} with "
            f"tp {spec.tp}. {other_microbatch(tokens * spec.tp, spec.tokens or 0) if other else ''}Split the tokens with "
            f"dlp.scatter_tokens before the first sequence-parallel layer, join them with dlp.gather_tokens after the last, "
            f"and view heads with B and S from configuration"
        )
    if style.fprop.reduce == "scatter" and tokens % spec.tp:
        raise ValueError(
            f"{spec.name}: sequence parallelism shards {tokens} tokens over tp {spec.tp}, which does not divide this "
            f"number; choose micro_batch x sequence divisible by tp"
        )
    bound.plans[shape] = plan = bound.plan(tokens)
    return plan


# Weights and results


def cast_weights(
    bound: BoundSpec, members: Sequence[str], weights: Sequence[Tensor], dtype: torch.dtype, wanted: Orientations,
    record: bool,
) -> list[QuantizedTensor]:  # fmt: skip
    """Round the weights to `dtype` and cast them in one orientation, with one amax agreement for all weights."""
    operands = quantize(bound, "w", [rounded(w, dtype) for w in weights], wanted, members=members, record=record)
    return [each.at(columnwise=wanted == COLUMNWISE) for each in operands]


def through_format(bound: BoundSpec, tensor: str, member: str, values: Tensor, record: bool = True) -> Tensor:
    """Round the result y or dx to the values of a format: cast it by the recipe's quantizer of y or dx, and decode it."""
    quantizers = bound.spec.recipe.of(tensor)
    assert quantizers is not None
    padded = quantizers.rowwise.format.padded(values)
    (operands,) = quantize(bound, tensor, [padded], ROWWISE, members=[member], record=record)
    return trimmed(operands.at(columnwise=False).dequantize(values.dtype), values.shape[1], values.shape[0])


def trimmed(values: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """Remove the rows and columns that padding of operands added to a result; return a contiguous tensor."""
    if values.shape[1] != columns or (rows is not None and values.shape[0] != rows):
        values = values[:rows, :columns]
    return values.contiguous()


def accepted(bound: BoundSpec, value: Any, tensor: str) -> Any:
    """Check an x or dy that arrives quantized (`dlp.ops.handed.Handed`).

    If this layer cast the tensor, or would cast it to the same operands, return the tensor unchanged. Otherwise log a line and
    return the decoded tensor, which the layer quantizes a second time, or raise ValueError if the tensor is `strict`, which
    forbids a second quantization."""
    spec, record = bound.spec, value.cast_record
    if record.bound is bound:
        return value
    theirs, options = record.quantizers, spec.options
    quantized = not (theirs.rowwise.format.keeps_source or theirs.columnwise.format.keeps_source)
    cast_by = record.bound
    any_layer = cast_by is None or (cast_by.session is bound.session and cast_by.spec.members == spec.members)
    same = theirs == spec.recipe.of(tensor) and not options.save_original_input and quantized and any_layer
    shared = spec.tp == 1 or (spec.amax_group is None and spec.recipe.amax_scope == "table")
    if same and shared and spec.style.gathers == tensor and spec.tp > 1:
        rows = value.numel() // value.shape[-1]
        plan = bound.plan(rows) if tensor == "x" else bound.plan_back(rows)
        shared = plan.sends_codes(tensor, record.group, spec.tp_group)
    if same and shared:
        return value
    why = f"{spec.name}: {tensor} is quantized twice: " + (
        "the ranks must share scales, and each rank must have complete blocks"
        if same else f"the input is {value.operands.at(columnwise=False).format.name}, and {spec.recipe} casts {tensor} "
            "differently"
    )  # fmt: skip
    if record.strict:
        remedy = "process_group= with the ranks that gather the tensor" if same else "this recipe"
        raise ValueError(f"{why}; give Quantize {remedy}, or omit strict")
    bound.session.note(why)
    return value.tensor()


@remembered
def _plan(bound: BoundSpec, tensor: str, orientations: Orientations, whole: bool, rows: int) -> CastPlan:
    """Return the cast plan of a tensor. `rows`: number of rows of the matrices that are cast; for x and dy the tokens."""
    spec = bound.spec
    group = spec.amax_group or spec.group
    return cast_plan(
        spec.style, spec.recipe, tensor, orientations, rows, whole=whole, own_group=spec.amax_group is not None,
        group=None if group is None or group.size() == 1 else group,
    )  # fmt: skip


def cast_context(
    bound: BoundSpec, plan: CastPlan, member: str, shape: torch.Size, device: torch.device, record: bool
) -> CastContext:
    """Return the flag, the slots and the origins for the casts of one matrix of this shape. `plan.contexts` caches contexts
    without slots. `record`: whether amaxes are recorded for delayed scales."""
    context = plan.contexts.get((member, shape, device))
    if context is None:
        flag = bound.session.flag(bound.spec.members, plan.tensor, member, device) if plan.quantizes else None
        origins = [
            tuple([_origin(bound, plan, member, shape, given, each) for each in read.origins])
            for read, given in zip(plan.reads, plan.shapes(shape), strict=True)
        ]
        names = [
            bound.spec.slot_name(plan.tensor, member, read.rowwise is None) if read.has_slot else None
            for read in plan.reads
        ]
        context = plan.contexts[member, shape, device] = CastContext(flag, (None,) * len(names), origins, names)
    if not plan.scaled_by_slots:
        return context
    slots = [None if name is None else bound.session.slot(name, bound.spec, record) for name in context.slot_names]
    return context._replace(slots=slots)


def weight_casts(bound: BoundSpec, member: str, weight: Tensor, value: Tensor, into: Wanted = NOWHERE) -> list[Cast]:
    """Return the casts that `quantize(bound, "w", [weight], BOTH)` would run, so that they can run in one batch with casts of
    other layers. `value`: the weight, rounded to the dtype of x and padded to `operand_shape`."""
    plan = _plan(bound, "w", BOTH, False, value.shape[0])
    return casts_of(plan, value, cast_context(bound, plan, member, weight.shape, value.device, True), into)


@cache
def _tensor_id(name: str) -> int:
    """Return 32 bits of a hash of the name, which are the same on every rank and in every run."""
    return int.from_bytes(sha256(name.encode()).digest()[:4], "little")


def _origin(
    bound: BoundSpec, plan: CastPlan, member: str, shape: Sequence[int], padded: Sequence[int], columnwise: bool
) -> Origin:
    """Return the position of this rank's matrix in the unsharded matrix. tp shards the matrix along one dimension, and data
    parallelism along the tokens (except w). `columnwise`: return the position in the transposed matrix."""
    spec, session, tensor = bound.spec, bound.session, plan.tensor
    cut = None if plan.whole else spec.style.cut(tensor)

    def span(dim: int, size: int) -> tuple[int, int]:
        """Return the first index of this rank and the full size of dimension `dim`, whose size on this rank is `size`."""
        index, count = (spec.tp_group.rank(), spec.tp) if cut == dim and spec.tp > 1 else (0, 1)
        if dim == 0 and tensor != "w":
            index, count = index + session.dp[0] * count, count * session.dp[1]
        return index * size, count * size

    row_dim, column_dim = int(columnwise), 1 - int(columnwise)
    row, rows = span(row_dim, shape[row_dim])
    column, columns = span(column_dim, padded[column_dim])
    name = f"{member}.{tensor}"
    return Origin(row, column, rows, columns, session.seed, _tensor_id(name), session.counter, row_dim)


def weights_agree(spec: LinearSpec) -> bool:
    """Whether this rank may have to agree with other ranks on scales of weights."""
    return spec.amax_group is not None or (spec.group is not None and spec.recipe.amax_scope == "all")


def flatten(operands: Sequence[Operands]) -> list[Tensor]:
    """Return the parts of all operands as one list: for each tensor the rowwise parts, then the columnwise parts."""
    return [part for both in operands for columnwise in (False, True) for part in both.at(columnwise).parts]


def unflatten(quantizers: Operand, parts: Sequence[Tensor], count: int) -> list[Operands]:
    """Invert `flatten` for `count` tensors that these quantizers cast."""
    row, col = quantizers.rowwise.format, quantizers.columnwise.format
    size = len(row.parts) + len(col.parts)
    starts = range(0, count * size, size)
    return [Operands(row.wrap(parts[i:]), col.wrap(parts[i + len(row.parts) :])) for i in starts]
