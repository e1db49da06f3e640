"""What a step sends, foretold from the plan alone: bytes by group, layer, direction and precision.

    plan      styles, recipes and shapes      ─┐
    Workload  mesh, microbatches, FSDP, dtypes ┴─► step_traffic ──► {Sent(group, layer, direction, precision): bytes}

A layer's row of the style table says which GEMM gathers what and reduces how; the recipe's formats say what an operand
weighs and which of its parts move; its quantizers say, asked with a tensor without memory, what ranks must agree on. What
is sent is then counted by somebody else (`dlp.comm.observer`), and the two are compared (`dlp.parallel.traffic.ledger`).

Bytes are those one rank sends, as `dlp.comm.observer` defines them. All parameters are taken to have gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod

import torch

from dlp.comm import observer
from dlp.comm.mesh import DP_SHARD, TP, WORLD
from dlp.parallel import fit
from dlp.parallel import overlap as overlaps
from dlp.parallel.casts import BOTH, COLUMNWISE, ROWWISE, Orientations, cast_plan, operand_shape
from dlp.parallel.linear.spec import delayed_slots
from dlp.parallel.model.plan import LayerPlan, OtherPlan, Plan
from dlp.parallel.style import ParallelStyle, shard_sizes
from dlp.parallel.traffic.fsdp import fsdp_traffic, linear_weights, travels_as
from dlp.parallel.traffic.workload import Sent, Workload, foretelling, moved, nothing, precision_of
from dlp.parallel.transfer import Reduction, Route, TransferPlan, transfer_plan
from dlp.parallel.wires import WIRES
from dlp.quant import recipe as recipes
from dlp.quant.recipe import GEMMS, Recipe


def step_traffic(plan: Plan, load: Workload) -> dict[Sent, int]:
    """The bytes of one optimizer step, from the first forward through the step boundary, without the loss and what a
    program adds. Groups of one rank send nothing and are not there. Raises Unforeseen."""
    total: Counter[Sent] = Counter()
    for layer in _layers(plan, load):
        with foretelling(layer.name):
            forwards = load.microbatches * (1 + load.recomputes(layer.name))
            total.update(_times(_forward(layer), forwards))
            total.update(_times(_backward(layer), load.microbatches))
    for other in plan.others:
        total.update(_times(_embedding(plan, other, load), load.microbatches))
    total.update(_cached_weights(plan, load))
    total.update(dict(_delayed(plan, load)))
    total.update(_partial_gradients(plan, load))
    total.update(fsdp_traffic(plan, load))
    return {sent: nbytes for sent, nbytes in total.items() if nbytes}


def cross_entropy(load: Workload) -> dict[Sent, int]:
    """Of the vocab-parallel loss: two fp32 numbers a token."""
    nbytes = observer.gathered(2 * load.tokens * 4, load.ranks(TP)) * load.microbatches
    return {Sent(load.named(TP), "cross_entropy", "fprop", "float32"): nbytes} if nbytes else {}


def in_bf16(plan: Plan) -> Plan:
    """The same plan without quantization, to compare with."""
    bf16 = recipes.load("bf16")
    return replace(plan, layers=tuple(replace(row, recipe=bf16) for row in plan.layers))


def _times(sent: Iterator[tuple[Sent, int]], count: int) -> Counter[Sent]:
    total: Counter[Sent] = Counter()
    for key, nbytes in sent:
        total[key] += nbytes * count
    return total


@dataclass(frozen=True)
class _Layer:
    """A linear, or siblings, as one rank runs it. `features` K and `outs` N_i of its shard of the weights; `dtype` of x;
    `overlap`: the name of each GEMM's strategy; `cached`: weights are cast once, at the step boundary; `at_use`: those
    that are cast where they are used, by what is cast together."""

    name: str
    style: ParallelStyle
    recipe: Recipe
    features: int
    outs: tuple[int, ...]
    dtype: torch.dtype
    overlap: Mapping[str, str]
    cached: bool
    at_use: tuple[tuple[tuple[int, int], ...], ...]
    load: Workload

    @cached_property
    def transfers(self) -> TransferPlan:
        return transfer_plan(self.recipe, self.style, self.load.ranks(TP), self.tokens("x"))

    def tokens(self, tensor: str) -> int:
        """Rows of x or dy, or of y or dx, on this rank."""
        return self.load.tokens // (self.load.ranks(TP) if self.style.cut(tensor) == 0 else 1)

    def weight_shapes(self) -> list[tuple[int, int]]:
        return [(out, self.features) for out in self.outs]

    def agreement(
        self, tensor: str, shapes: Sequence[tuple[int, int]], cast: Orientations, *, whole: bool = False
    ) -> Iterator[tuple[Sent, int]]:
        """The all-reduce of what the casts of values of these shapes observe. `whole`: they have been gathered."""
        group = self.load.amax_group or TP
        nbytes = observer.reduced(self.observed(tensor, shapes, cast, whole), 4, self.load.ranks(group))
        yield Sent(self.load.named(group), self.name, "amax", "float32"), nbytes

    def observed(
        self, tensor: str, shapes: Sequence[tuple[int, int]], cast: Orientations, whole: bool = False
    ) -> int:  # fmt: skip
        """How many numbers ranks agree on before those casts."""
        own_group = self.load.amax_group is not None
        return sum(_numbers_agreed(self.style, self.recipe, tensor, cast, shape, whole, own_group) for shape in shapes)

    def gather(self, gemm: str, tensor: str, columnwise: bool, features: int) -> tuple[Sent, int]:
        """An operand of x or dy [tokens, features] that travels quantized for `gemm`."""
        quantizers = fit.quantizers(self.recipe, tensor)
        assert quantizers is not None
        fmt = (quantizers.columnwise if columnwise else quantizers.rowwise).format
        shape = operand_shape(self.recipe, tensor, (self.tokens(tensor), features), columnwise)
        dtype = self.dtype if tensor == "x" else self.y_dtype
        return self._over_tp(gemm, precision_of(fmt, dtype), moved(fmt, shape, int(columnwise), dtype))

    def gather_hp(self, gemm: str, tensor: str, features: int) -> tuple[Sent, int]:
        """x or dy itself that travels for `gemm`, and perhaps for another."""
        dtype = self.dtype if tensor == "x" else self.y_dtype
        return self._over_tp(gemm, observer.dtype_name(dtype), self.tokens(tensor) * features * dtype.itemsize)

    def _over_tp(self, gemm: str, precision: str, shard: int) -> tuple[Sent, int]:
        """A gather by any strategy: the shard goes to each other rank."""
        self._reduction(gemm)
        return Sent(self.load.named(TP), self.name, gemm, precision), observer.gathered(shard, self.load.ranks(TP))

    def _reduction(self, gemm: str) -> Callable[..., overlaps.Sent]:
        """`sent` of the GEMM's strategy. Raises ValueError where there is none."""
        found: Callable[..., overlaps.Sent] | None = getattr(overlaps.load(self.overlap[gemm]), "sent", None)
        if found is None:
            raise ValueError(f"the overlap strategy {self.overlap[gemm]!r} does not say what it sends")
        return found

    def reduction(self, gemm: str, reduce: Reduction | None, features: int) -> Iterator[tuple[Sent, int]]:
        """The sum over tp of fprop's or dgrad's result, the tokens of a microbatch x `features`."""
        if reduce is None:
            return
        y = nothing((self.load.tokens, features), self.result_dtype(gemm))
        sent = self._reduction(gemm)(y, self.load.ranks(TP), reduce=reduce.how, codec=WIRES[reduce.codec])
        for dtype, nbytes in sent:
            yield Sent(self.load.named(TP), self.name, gemm, observer.dtype_name(dtype)), nbytes

    def result_dtype(self, gemm: str) -> torch.dtype:
        """What a reduction of this GEMM's result carries."""
        chosen: torch.dtype | None = getattr(self.recipe, gemm).out_dtype
        return chosen or self.dtype

    @property
    def y_dtype(self) -> torch.dtype:
        """Also that of dy."""
        return self.result_dtype("fprop")

    def rounding(self, tensor: str, features: int) -> Iterator[tuple[Sent, int]]:
        """The agreement for a result that its recipe rounds."""
        quantizers = fit.quantizers(self.recipe, tensor)
        if quantizers is not None:
            padded = quantizers.rowwise.format.padded(nothing((self.tokens(tensor), features)))
            yield from self.agreement(tensor, [(padded.shape[0], padded.shape[1])], ROWWISE)


@cache
def _numbers_agreed(
    style: ParallelStyle, recipe: Recipe, tensor: str, cast: Orientations, shape: tuple[int, int], whole: bool,
    own_group: bool,
) -> int:  # fmt: skip
    plan = cast_plan(style, recipe, tensor, cast, shape[0], whole=whole, own_group=own_group)
    return plan.numbers_agreed(nothing(shape))


def _layers(plan: Plan, load: Workload) -> Iterator[_Layer]:
    rows, weights = {row.name: row for row in plan.layers}, linear_weights(plan)
    by_fsdp = bool(load.units) and load.ranks(DP_SHARD) > 1
    for names in dict.fromkeys(row.siblings or (row.name,) for row in plan.layers):
        members: list[LayerPlan] = [rows[name] for name in names]
        first, tp = members[0], load.ranks(TP)
        sizes = tuple(shard_sizes(row.row, *row.shape, tp, row.name) for row in members)
        cached = not by_fsdp and load.weight_cache == "step"
        at_use: tuple[tuple[tuple[int, int], ...], ...] = () if cached else (sizes,)
        if by_fsdp:  # each by itself, unless its shards have been cast
            found = [weights.get(row.weight) for row in members]
            with foretelling(first.name):
                apart = [not (its and travels_as(*its, load)) for its in found]
            at_use = tuple((size,) for size, whole in zip(sizes, apart, strict=True) if whole)
        overlap = first.overlap if isinstance(first.overlap, dict) else dict.fromkeys(GEMMS, first.overlap)
        yield _Layer(
            first.name, first.row, first.recipe, sizes[0][1], tuple(n for n, _ in sizes),
            load.dtypes.get(first.name, load.dtype), dict.fromkeys(GEMMS, "serial") | overlap, cached, at_use, load,
        )  # fmt: skip


def _forward(layer: _Layer) -> Iterator[tuple[Sent, int]]:
    """One forward of a layer with a wgrad to come: x as its transfers say, and y is reduced."""
    yield from _routed(layer, layer.transfers.x[True], [layer.features])
    for shapes in layer.at_use:
        yield from layer.agreement("w", shapes, ROWWISE)
    unit = fit.units(layer.recipe)[1]
    for out in layer.outs:
        yield from layer.reduction("fprop", layer.transfers.fprop, out + -out % unit)
        yield from layer.rounding("y", out)


def _backward(layer: _Layer) -> Iterator[tuple[Sent, int]]:
    """One backward of a layer: dy and x as its transfers say, and dx is reduced."""
    yield from _routed(layer, layer.transfers.dy(True, True), layer.outs)
    yield from _routed(layer, layer.transfers.x_again, [layer.features])
    for shapes in layer.at_use:
        yield from layer.agreement("w", shapes, COLUMNWISE)
    features = layer.features + -layer.features % fit.units(layer.recipe)[2]
    yield from layer.reduction("dgrad", layer.transfers.dgrad, features)
    yield from layer.rounding("dx", layer.features)


def _routed(layer: _Layer, route: Route, features: Sequence[int]) -> Iterator[tuple[Sent, int]]:
    """Matrices [tokens, features] that go this way."""
    tensor, tokens = route.tensor, layer.tokens(route.tensor)
    yield from layer.agreement(tensor, [(tokens, size) for size in features], route.here)
    for each in route.gathers:
        (size,) = features  # siblings share x, and a layer that gathers dy has none
        if each.columnwise is None:
            yield layer.gather_hp(each.gemm, tensor, size)
        else:
            yield layer.gather(each.gemm, tensor, each.columnwise, size)
    if any(route.there):
        yield from layer.agreement(tensor, [(layer.load.tokens, features[0])], route.there, whole=True)


def _embedding(plan: Plan, other: OtherPlan, load: Workload) -> Iterator[tuple[Sent, int]]:
    """A vocab-parallel embedding: rows that one rank has are summed over tp; their gradients are gathered."""
    if other.style != "vocab":
        return
    hidden = next(p.shape[1] for p in plan.weights if p.name == f"{other.name}.weight")
    ranks, size = load.ranks(TP), load.weight_dtype.itemsize
    numel, key = load.tokens * hidden, (load.named(TP), other.name)
    precision = observer.dtype_name(load.weight_dtype)
    if not other.sequence_parallel:
        yield Sent(*key, "fprop", precision), observer.reduced(numel, size, ranks)
        return
    yield Sent(*key, "fprop", precision), observer.scattered(numel * size, ranks)
    yield Sent(*key, "dgrad", precision), observer.gathered(numel // ranks * size, ranks)


def _cached_weights(plan: Plan, load: Workload) -> dict[Sent, int]:
    """The step boundary of weights that are whole on a rank: what all their casts observe, agreed on at once."""
    elements = 0
    for layer in _layers(plan, load):
        with foretelling(layer.name):
            elements += layer.observed("w", layer.weight_shapes(), BOTH) if layer.cached else 0
    group = load.amax_group or TP
    return {Sent(load.named(group), "", "amax", "float32"): observer.reduced(elements, 4, load.ranks(group))}


def _delayed(plan: Plan, load: Workload) -> Iterator[tuple[Sent, int]]:
    """The step boundary of delayed scaling: one amax a slot, all slots of the model at once."""
    sets = dict.fromkeys(row.siblings or (row.name,) for row in plan.layers)
    recipe = {row.name: row.recipe for row in plan.layers}
    slots = [(recipe[names[0]], delayed_slots(recipe[names[0]], names)) for names in sets]
    if any(found and made.reduce_amax for made, found in slots):
        group = load.amax_group or WORLD
        elements = sum(len(found) for _, found in slots)
        yield Sent(load.named(group), "", "amax", "float32"), observer.reduced(elements, 4, load.ranks(group))


def _partial_gradients(plan: Plan, load: Workload) -> dict[Sent, int]:
    """Gradients that cover a rank's own tokens, summed over tp in fp32 at the end of each backward that leaves some, with a
    word for each parameter that says whether it has one. Under FSDP those do that reduce."""
    partial = [p for p in plan.weights if p.partial]
    numel = len(partial) + sum(prod(load.shard(p.shape)) if load.units else prod(p.shape) for p in partial)
    nbytes = observer.reduced(numel, 4, load.ranks(TP)) * (load.reductions if load.units else load.microbatches)
    return {Sent(load.named(TP), "", "grads", "float32"): nbytes if partial else 0}
