"""Prediction of the bytes that a step sends, from the plan alone, by group, layer, purpose and precision.

    plan      styles, recipes and shapes      ─┐
    Workload  mesh, microbatches, FSDP, dtypes ┴─► step_traffic ──► {Sent(group, layer, purpose, precision): bytes}

The prediction sums these parts:

    linears      gathers of x and dy and reductions of y and dx, from the `LinearPlan` of each layer; amax agreements of casts
                 in passes
    others       sums of vocab-parallel embeddings over tp; keys and values over cp
    backward     sums of tp-partial gradients at the end
    boundary     amax agreements of weights that FSDP does not shard; delayed scales
    FSDP         gathers of weights, rowwise in forward and columnwise in backward; gradients; amax agreements of shards

Formats define the bytes of an operand and the parts that are gathered. Quantizers, called with meta tensors, define the amaxes
on which ranks agree. Strategies define the bytes of their reductions. Separate code counts the bytes that are sent
(`dlp.comm.observer`), and the ledger compares both (`dlp.parallel.traffic.ledger`).

All numbers are the bytes that one rank sends, as `dlp.comm.observer` defines them. The prediction assumes that every parameter
has a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.comm import collectives, observer
from dlp.comm.mesh import CP, CP_TP, DP_REPLICATE, TP, WORLD, ParallelDims
from dlp.parallel import overlap as overlaps
from dlp.parallel.casts import BOTH, COLUMNWISE, HP, ROWWISE, Cast, CastPlan, Orientations, cast_plan, numbers_in
from dlp.parallel.linear.plan import WIRES, LinearPlan, Reduction, Route, linear_plan
from dlp.parallel.linear.spec import delayed_slots
from dlp.parallel.model.context import LAYER as KEYS
from dlp.parallel.model.plan import LayerPlan, OtherPlan, Plan
from dlp.parallel.model.rows import ParameterPlan
from dlp.parallel.style import ParallelStyle, shard_sizes
from dlp.parallel.weight.sharded import (
    VALUES,
    ShardLayout,
    ShardLayouts,
    ShardRead,
    agreed_over,
    read_of,
    shard_reads,
    weight_layouts,
)
from dlp.quant import recipe as recipes
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import Format

Shape = tuple[int, int]


class Unpredictable(ValueError):
    """Raised if bytes cannot be predicted: a user-defined format, quantizer or strategy does not define them, or the model is
    invariant."""


@contextmanager
def predicting(what: str) -> Iterator[None]:
    """Context that raises any error of a format, quantizer or strategy as Unpredictable. `what`: the bytes, for the message."""
    try:
        yield
    except Exception as error:  # user code may raise any exception
        raise Unpredictable(f"the bytes of {what} cannot be predicted: {error or type(error).__name__}") from error


class Sent(NamedTuple):
    """Key of planned bytes: process group, layer ("": no single layer), purpose and precision of a transfer, as in
    `dlp.comm.observer.Key`."""

    group: str
    layer: str
    purpose: str
    precision: str


Traffic = Mapping[Sent, int]
Sends = Iterator[tuple[Sent, int]]


@dataclass(frozen=True)
class Workload:
    """Sizes of a training step that a `Plan` does not contain, for the prediction of bytes on the wire.

    Args:
        sizes: number of ranks of "dp_replicate", "dp_shard", "cp" and "tp"; 1 if left out.
        tokens: tokens of a microbatch on a rank, before tp: B*S/cp.
        microbatches: microbatches of one rank in a step.
        dtype: dtype of activations.
        dtypes: dtype of x by layer name, where the dtype differs from `dtype`.
        weight_dtype: dtype in which embeddings read weights and FSDP gathers weights that are not quantized.
        reduce_dtype: dtype in which FSDP reduces gradients.
        units: module names of the FSDP units, "" for the root; () without FSDP.
        gather: whether FSDP gathers weights quantized (`quantized_gather` of `dlp.fully_shard`).
        weight_cache: "step" or "forward", as of `dlp.attach`.
        reductions: number of FSDP gradient reductions in a step: 1, or one for each microbatch.
        grad_wire: codec of FSDP gradients over dp_shard; None: the reduce-scatter of FSDP.
        recomputed: names of modules whose forward runs again in backward.
        resharded: whether FSDP units other than the root gather again in backward.
        amax_group: mesh axis, or "world", that agrees on every scale; None: ranks agree as the style requires.
        keys_gathered: number of features of keys and values that attention gathers over cp in a microbatch, summed over
            modules and forwards; a recomputed forward counts again.
        keys_reduced: number of features of keys and values whose gradients attention sums over cp in a microbatch.
        dp_shard_rank: rank on FSDP's axis whose bytes are predicted; ranks differ if parameters are sharded unevenly.

    Examples:
        >>> plan = dlp.make_plan(nn.Sequential(nn.Linear(64, 64)), [dlp.LayerGroup("all", "**", style="column")], tp=2)
        >>> report = dlp.wire_report(plan, dlp.Workload({"dp_replicate": 1, "dp_shard": 1, "tp": 2}, tokens=32))
        >>> report["0"]["dgrad"] > 0
        True
    """

    sizes: Mapping[str, int]
    tokens: int
    microbatches: int = 1
    dtype: torch.dtype = torch.bfloat16
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    weight_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    units: tuple[str, ...] = ()
    gather: bool = True
    weight_cache: str = "step"
    reductions: int = 1
    grad_wire: str | None = None
    recomputed: tuple[str, ...] = ()
    resharded: bool = True
    amax_group: str | None = None
    keys_gathered: int = 0
    keys_reduced: int = 0
    dp_shard_rank: int = 0

    @cached_property
    def dims(self) -> ParallelDims:
        return ParallelDims.of(self.sizes)

    def ranks(self, group: str) -> int:
        return self.dims.size(group)

    @property
    def shards(self) -> int:
        """Number of ranks over which FSDP shards parameters."""
        return self.dims.shards

    @property
    def covers_shards(self) -> bool:
        """Whether the group that agrees on delayed scales contains the ranks over which FSDP shards parameters."""
        return self.amax_group in (None, WORLD, self.dims.shard_axis) or (
            self.amax_group == CP_TP and self.dims.dp_shard == 1
        )

    def named(self, group: str) -> str:
        return self.dims.name_of(group)

    def unit_of(self, name: str) -> str:
        """Return the name of the innermost FSDP unit that contains a parameter."""
        return next(module for module in _around(name) if module in self._unit_names)

    def recomputes(self, name: str) -> bool:
        """Whether a module or parameter is inside a module whose forward runs again in backward."""
        return any(module in self._recomputed_names for module in _around(name))

    @cached_property
    def _unit_names(self) -> frozenset[str]:
        return frozenset(self.units)

    @cached_property
    def _recomputed_names(self) -> frozenset[str]:
        return frozenset(self.recomputed)

    def shard(self, shape: Sequence[int], *, padded: bool = False) -> tuple[int, ...]:
        """Return the shape of this rank's FSDP shard of a parameter with this shape. The last ranks have fewer rows if the rows
        do not divide evenly; `padded`: the shape with padding to equal numbers of rows."""
        first, *rest = shape
        rows = -(-first // self.shards)
        here = rows if padded else min(max(first - rows * self.dp_shard_rank, 0), rows)
        return here, *rest


def _around(name: str) -> Iterator[str]:
    """Yield the name of a module or parameter, then of all enclosing modules: "a.b.c", "a.b", "a", ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def nothing(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a meta tensor of this shape and dtype."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def precision_of(fmt: Format, dtype: torch.dtype) -> str:
    """Return the name of the precision under which an operand in format `fmt` is counted; for high precision the name of
    `dtype`."""
    return observer.dtype_name(dtype) if fmt.keeps_source else fmt.name


# The whole step


def step_traffic(plan: Plan, load: Workload) -> dict[Sent, int]:
    """Predict the bytes of one optimizer step, from the first forward through the step boundary, without the loss and without
    collectives of the user's program.

    Groups of one rank are left out. Raises Unpredictable if bytes cannot be predicted."""
    total: Counter[Sent] = Counter()
    if plan.invariant:
        raise Unpredictable(
            "invariant = true: the bytes of partial sums in fp32 are not predicted; leave invariant out to predict them"
        )

    def add(sends: Sends, times: int = 1) -> None:
        for sent, nbytes in sends:
            total[sent] += nbytes * times

    layers = list(linears_of(plan, load))
    for layer in layers:
        with predicting(layer.name):
            add(layer.forward(), load.microbatches * (1 + load.recomputes(layer.name)))
            add(layer.backward(), load.microbatches)
    for other in plan.others:
        add(_embedding(plan, other, load), load.microbatches)
    add(_keys(load), load.microbatches)
    add(_cached_weights(layers, load))
    add(_delayed(plan, load))
    add(_partial_gradients(plan, load))

    linears = linear_weights(plan)
    for unit, own in units_of(plan, load).items():
        for parameter in own:
            with predicting(f"the gathers of {parameter.name}"):
                again = bool(unit) and load.resharded
                add(_gathers(linears.get(parameter.name), parameter, load, again), load.microbatches)
    total.update(fsdp_gradients(plan, load))
    with predicting("the agreement on scales of shards"):
        add(_agreements(plan, load))
    return {sent: nbytes for sent, nbytes in total.items() if nbytes}


def cross_entropy(load: Workload) -> dict[Sent, int]:
    """Predict the bytes of the vocab-parallel loss, which gathers two fp32 numbers per token."""
    nbytes = observer.gathered(2 * load.tokens * 4, load.ranks(TP)) * load.microbatches
    return {Sent(load.named(TP), "cross_entropy", "fprop", "float32"): nbytes} if nbytes else {}


def in_bf16(plan: Plan) -> Plan:
    """Return the same plan with the recipe bf16 in all layers, for comparison."""
    bf16 = recipes.load("bf16")
    return replace(plan, layers=tuple(replace(row, recipe=bf16) for row in plan.layers))


# Layers


@dataclass(frozen=True)
class LinearTraffic:
    """A linear, or siblings, as one rank runs it.

    rows      rows of the plan, one for each weight
    shapes    shapes [N_i, K] of the weights on this rank
    cached    whether the step boundary casts complete weights; False if FSDP shards the weights or each pass casts them
    at_use    shapes of the weights that are cast in passes; the weights of one list share one amax agreement
    load      sizes of the step
    """

    rows: Sequence[LayerPlan]
    shapes: Sequence[Shape]
    cached: bool
    at_use: Sequence[Sequence[Shape]]
    load: Workload

    @property
    def name(self) -> str:
        return self.rows[0].name

    @property
    def style(self) -> ParallelStyle:
        return self.rows[0].row

    @property
    def recipe(self) -> Recipe:
        return self.rows[0].recipe

    @property
    def x_dtype(self) -> torch.dtype:
        return self.load.dtypes.get(self.name, self.load.dtype)

    @cached_property
    def plan(self) -> LinearPlan:
        ranks = self.load.ranks(TP)
        tokens = self.load.tokens // (ranks if self.style.cut_x == 0 else 1)
        kept, own_group = self.rows[0].options.keeps, self.load.amax_group is not None
        return linear_plan(self.recipe, self.style, ranks, tokens, kept=kept, own_group=own_group)

    def forward(self) -> Sends:
        """Bytes of a forward whose backward computes wgrad: the gathers of x, the reduction of each y_i, and the amax
        agreements of casts."""
        yield from self._routed(self.plan.x[True], [self.shapes[0][1]], self.x_dtype)
        for shapes in self.at_use:
            yield self._agreement(self.casts("w", ROWWISE), shapes)
        for out, _ in self.shapes:
            yield from self._reduced("fprop", "y", out)

    def backward(self) -> Sends:
        """Bytes of the backward: the gathers of dy_i and x, the reduction of dx, and the amax agreements of casts."""
        features = self.shapes[0][1]
        outs, dtype = [out for out, _ in self.shapes], self.plan.result_dtype("fprop", self.x_dtype)
        yield from self._routed(self.plan.dys[True, True], outs, dtype)
        yield from self._routed(self.plan.x_again, [features], self.x_dtype)
        for shapes in self.at_use:
            yield self._agreement(self.casts("w", COLUMNWISE), shapes)
        yield from self._reduced("dgrad", "dx", features)

    def casts(self, tensor: str, orientations: Orientations) -> CastPlan:
        """Return the cast plan of w, y or dx, which does not depend on the number of rows."""
        own_group = self.load.amax_group is not None
        return cast_plan(self.style, self.recipe, tensor, orientations, 0, own_group=own_group)

    def _routed(self, route: Route, features: Sequence[int], dtype: torch.dtype) -> Sends:
        """Bytes of a route of x or dy: amax agreements of casts, and gathers. `features`: number of columns of each matrix."""
        plan, tokens = self.plan, self.plan.rows(route.tensor)
        if route.before is not None:
            yield self._agreement(route.before, [(tokens, size) for size in features])
        for each in route.gathers:
            (size,) = features  # one matrix: siblings share x, and a layer that gathers dy has no siblings
            self._strategy(
                each.gemm
            )  # only for its check: in a gather every strategy sends the shard to each other rank
            sent = Sent(self.load.named(TP), self.name, each.gemm, precision_of(each.format or HP, dtype))
            yield sent, observer.gathered(plan.sends(route, each, size, dtype), self.load.ranks(TP))
        if route.after is not None:
            yield self._agreement(route.after, [(self.load.tokens, features[0])])

    def _agreement(self, casts: CastPlan, shapes: Sequence[Shape]) -> tuple[Sent, int]:
        """Bytes of the amax all-reduce that precedes casts of values with these shapes."""
        group, elements = self.load.amax_group or TP, sum(_numbers_agreed(casts, shape) for shape in shapes)
        nbytes = observer.reduced(elements, 4, self.load.ranks(group))
        return Sent(self.load.named(group), self.name, "amax", "float32"), nbytes

    def _reduced(self, gemm: str, tensor: str, features: int) -> Sends:
        """Bytes of the reduction of y or dx over tp, and of the amax agreement if the recipe quantizes the result."""
        reduce: Reduction | None = getattr(self.plan, gemm)
        if reduce is not None:
            partial = nothing(*self.plan.contribution(gemm, features, self.x_dtype))
            send = self._strategy(gemm)
            for dtype, nbytes in send(partial, self.load.ranks(TP), reduce=reduce.how, codec=WIRES[reduce.codec]):
                yield Sent(self.load.named(TP), self.name, gemm, observer.dtype_name(dtype)), nbytes
        quantizers = self.recipe.of(tensor)
        if quantizers is not None:
            rows, columns = quantizers.rowwise.format.padded(nothing((self.plan.rows(tensor), features))).shape
            yield self._agreement(self.casts(tensor, ROWWISE), [(rows, columns)])

    def _strategy(self, gemm: str) -> Callable[..., overlaps.Sent]:
        """Return the method `sent` of the GEMM's strategy. Raises ValueError for a strategy without this method."""
        chosen = self.rows[0].overlap
        name = chosen if isinstance(chosen, str) else chosen.get(gemm, "serial")
        found: Callable[..., overlaps.Sent] | None = getattr(overlaps.load(name), "sent", None)
        if found is None:
            raise ValueError(f"the overlap strategy {name!r} has no method 'sent', which predicts transfers")
        return found


@cache
def _numbers_agreed(casts: CastPlan, shape: Shape) -> int:
    return casts.numbers_agreed(nothing(shape))


def linears_of(plan: Plan, load: Workload) -> Iterator[LinearTraffic]:
    rows, weights = {row.name: row for row in plan.layers}, linear_weights(plan)
    by_fsdp = bool(load.units) and load.shards > 1
    for names in dict.fromkeys(row.siblings or (row.name,) for row in plan.layers):
        members = [rows[name] for name in names]
        shapes = [shard_sizes(row.row, *row.shape, load.ranks(TP), row.name) for row in members]
        cached = not by_fsdp and load.weight_cache == "step"
        at_use = [] if cached else [shapes]
        if by_fsdp:  # each weight is cast separately in passes, unless FSDP gathers quantized shards
            with predicting(names[0]):
                found = [weights.get(row.weight) for row in members]
                at_use = [[s] for s, its in zip(shapes, found, strict=True) if not (its and travels_as(*its, load))]
        yield LinearTraffic(members, shapes, cached, at_use, load)


def _embedding(plan: Plan, other: OtherPlan, load: Workload) -> Sends:
    """Bytes of a vocab-parallel embedding: rows are summed over tp; with sequence parallelism their gradients are gathered."""
    if other.style != "vocab":
        return
    hidden = next(p.shape[1] for p in plan.weights if f"{other.name}.weight" in (p.name, *p.others))
    ranks, size = load.ranks(TP), load.weight_dtype.itemsize
    numel, key = load.tokens * hidden, (load.named(TP), other.name)
    precision = observer.dtype_name(load.weight_dtype)
    if not other.sequence_parallel:
        yield Sent(*key, "fprop", precision), observer.reduced(numel, size, ranks)
        return
    yield Sent(*key, "fprop", precision), observer.scattered(numel * size, ranks)
    yield Sent(*key, "dgrad", precision), observer.gathered(numel // ranks * size, ranks)


def _keys(load: Workload) -> Sends:
    """Bytes of attention over cp (`dlp.Context`): keys and values are gathered, and their gradients are summed."""
    ranks, precision = load.ranks(CP), observer.dtype_name(load.dtype)
    for purpose, features in (("fprop", load.keys_gathered), ("dgrad", load.keys_reduced)):
        nbytes = observer.gathered(load.tokens * features * load.dtype.itemsize, ranks)
        yield Sent(load.named(CP), KEYS, purpose, precision), nbytes


# The step boundary


def _cached_weights(layers: Sequence[LinearTraffic], load: Workload) -> Sends:
    """Bytes of the amax agreement of weights that FSDP does not shard: one all-reduce for all weights."""
    elements = 0
    for layer in layers:
        with predicting(layer.name):
            casts = layer.casts("w", BOTH)
            elements += sum(_numbers_agreed(casts, shape) for shape in layer.shapes) if layer.cached else 0
    group = load.amax_group or TP
    yield Sent(load.named(group), "", "amax", "float32"), observer.reduced(elements, 4, load.ranks(group))


def _delayed(plan: Plan, load: Workload) -> Sends:
    """Bytes of delayed scaling: one all-reduce of one amax per slot, for all slots of the model, if any recipe shares delayed
    scales over ranks."""
    sets = dict.fromkeys(row.siblings or (row.name,) for row in plan.layers)
    recipe = {row.name: row.recipe for row in plan.layers}
    slots = [(recipe[names[0]], delayed_slots(recipe[names[0]], names)) for names in sets]
    if any(found and each.reduce_amax for each, found in slots):
        group = load.amax_group or WORLD
        elements = sum(len(found) for _, found in slots)
        yield Sent(load.named(group), "", "amax", "float32"), observer.reduced(elements, 4, load.ranks(group))


def _partial_gradients(plan: Plan, load: Workload) -> Sends:
    """Bytes of partial gradients, which are summed over tp in fp32 at the end of a backward, with one flag per parameter for
    whether it has a gradient. Under FSDP only backwards that reduce gradients sum partial gradients."""
    partial = [p for p in plan.weights if p.partial]
    if not partial:
        return
    numel = len(partial) + sum(prod(load.shard(p.shape)) if load.units else prod(p.shape) for p in partial)
    nbytes = observer.reduced(numel, 4, load.ranks(TP)) * (load.reductions if load.units else load.microbatches)
    yield Sent(load.named(TP), "", "grads", "float32"), nbytes


# FSDP. When a pass first reads an orientation that FSDP did not gather, the pass gathers this orientation separately; in later
# steps FSDP gathers both orientations together. Only later steps are predicted here.


def units_of(plan: Plan, load: Workload) -> dict[str, list[ParameterPlan]]:
    """Return the parameters of each FSDP unit, by name of the unit."""
    units: dict[str, list[ParameterPlan]] = {unit: [] for unit in load.units}
    for parameter in plan.weights if units else ():
        units[load.unit_of(parameter.name)].append(parameter)
    return units


def linear_weights(plan: Plan) -> dict[str, tuple[LayerPlan, ParameterPlan]]:
    """Map the parameter name of each weight of a linear to (row of the layer, row of the parameter)."""
    weights = {p.name: p for p in plan.weights}
    named = ((row.weight, row) for row in plan.layers)
    return {name: (row, weights[name]) for name, row in named if name in weights}


def travels_as(row: LayerPlan, parameter: ParameterPlan, load: Workload) -> ShardLayouts | None:
    """Return the layouts in which FSDP gathers a linear's weight; None: FSDP gathers the weight in high precision."""
    refused = "other modules share the weight" if parameter.shared else None if load.gather else "gather=False"
    shape, own_group = (parameter.shape[0], parameter.shape[1]), load.amax_group is not None
    return weight_layouts(row.recipe, shape, load.shards, refused=refused, own_group=own_group)[0]


def gather_passes(
    found: tuple[LayerPlan, ParameterPlan] | None, parameter: ParameterPlan, load: Workload, again: bool
) -> list[list[ShardLayout]]:
    """Return the layouts that FSDP gathers of a parameter: a list for forward and a list for backward; one list with both
    orientations if backward does not gather `again`.

    A backward gathers the columnwise operand, and also the rowwise operand if it recomputes the forward. found: the linear and
    the parameter; None: the parameter is not a weight of a linear."""
    row, col = (found and travels_as(*found, load)) or (VALUES, VALUES)
    passes = [(row,), (col, row) if load.recomputes(parameter.name) else (col,)] if again else [(row, col)]
    return [list(dict.fromkeys(layouts)) for layouts in passes]


def _gathers(
    found: tuple[LayerPlan, ParameterPlan] | None, parameter: ParameterPlan, load: Workload, again: bool
) -> Sends:
    """Bytes of the gathers of a parameter's shards in forward and backward of a microbatch; arguments as for
    `gather_passes`."""
    first, *rest = load.shard(parameter.shape, padded=True)
    for layout in (each for layouts in gather_passes(found, parameter, load, again) for each in layouts):
        shape = layout.of((first, prod(rest)))
        nbytes = layout.format.nbytes(shape, load.weight_dtype, along=int(layout.transposed))
        precision = precision_of(layout.format, load.weight_dtype)
        yield Sent(load.named(load.dims.shard_axis), "", "weights", precision), observer.gathered(nbytes, load.shards)


def fsdp_gradients(plan: Plan, load: Workload) -> Counter[Sent]:
    """Bytes of the reductions of all units' gradients, over dp_shard, then over dp_replicate."""
    total: Counter[Sent] = Counter()
    ranks, dtype = load.shards, load.reduce_dtype
    for own in units_of(plan, load).values():
        numel = sum(prod(load.shard(p.shape, padded=True)) for p in own)  # elements on each rank
        flat = nothing((ranks, numel), dtype)
        parts: tuple[Tensor, ...] = (flat,) if load.grad_wire is None else WIRES[load.grad_wire].pack(flat)
        scattered = Sent(load.named(load.dims.shard_axis), "", "grads", observer.dtype_name(parts[0].dtype))
        total[scattered] += observer.gathered(collectives.record(parts), ranks) * load.reductions
        summed = Sent(load.named(DP_REPLICATE), "", "grads", observer.dtype_name(dtype))
        total[summed] += observer.reduced(numel, dtype.itemsize, load.ranks(DP_REPLICATE)) * load.reductions
    return total


def _agreements(plan: Plan, load: Workload) -> Sends:
    """Bytes of the step boundary's all-reduces of amaxes of shards: over dp_shard, then over the amax group or tp, and over
    dp_shard for amaxes of delayed scaling on which no group that contains dp_shard agrees."""
    shards, wider, staged = 0, 0, 0
    for (style, recipe, layouts, shape), count in Counter(_reads(plan, load)).items():
        delayed = [caps_of(layout.quantizer).slot is not None for layout in layouts if layout is not None]
        covered = recipe.reduce_amax and load.covers_shards
        staged += count * (delayed[0] and not covered)
        amaxes = Cast(read_of(layouts), nothing(shape)).observe()
        says = [agreed_over(layout, style, recipe, load.amax_group is not None) for layout in layouts]
        shards += count * numbers_in(amax for amax, (by_shards, _) in zip(amaxes, says, strict=True) if by_shards)
        wider += count * numbers_in(amax for amax, (_, by_others) in zip(amaxes, says, strict=True) if by_others)
    own = load.dims.shard_axis
    for group, elements in ((own, shards), (load.amax_group or TP, wider), (own, staged)):
        yield Sent(load.named(group), "", "amax", "float32"), observer.reduced(elements, 4, load.ranks(group))


def _reads(plan: Plan, load: Workload) -> Iterator[tuple[ParallelStyle, Recipe, ShardRead, tuple[int, ...]]]:
    """Yield the reads of sharded weights at a step boundary, as (style, recipe, layouts of the read, shape of the shard). Equal
    layers yield equal tuples, which `_agreements` counts."""
    if not load.units or load.shards == 1:
        return
    for row, parameter in linear_weights(plan).values():
        shape = load.shard(parameter.shape, padded=True)
        for layouts in shard_reads(travels_as(row, parameter, load) or ()):
            yield row.row, row.recipe, layouts, shape
