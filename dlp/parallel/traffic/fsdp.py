"""What FSDP sends in a step, foretold: weights, what their casts agree on, gradients.

    forward      each unit's weights, as `dlp.parallel.weight.sharded` lets them travel: codes and scales, or values
    backward     the same, but for the root's, which stay: the other orientation, and that of a forward that runs again
    step         gradients over dp_shard and dp_replicate; one agreement on the amaxes of all shards

A pass that needed more than its transfer brought has gathered it apart, once; from then on both travel together. That is
what is foretold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from torch import Tensor

from dlp.comm import collectives, observer
from dlp.comm.mesh import DP_REPLICATE, DP_SHARD, TP, WORLD
from dlp.parallel.casts import Read, agrees
from dlp.parallel.model.plan import LayerPlan, Plan
from dlp.parallel.model.rows import ParameterPlan
from dlp.parallel.style import ParallelStyle
from dlp.parallel.traffic.workload import Sent, Workload, foretelling, moved, nothing, precision_of
from dlp.parallel.weight.ways import VALUES, Way, Ways, reads, travel
from dlp.parallel.wires import WIRES
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import Recipe


def fsdp_traffic(plan: Plan, load: Workload) -> dict[Sent, int]:
    """All that FSDP sends, and what our hooks send for it. Raises Unforeseen."""
    total: Counter[Sent] = Counter()
    linears = linear_weights(plan)
    for unit, own in _units(plan, load).items():
        for parameter in own:
            with foretelling(f"the gathers of {parameter.name}"):
                total.update(_gathers(linears.get(parameter.name), parameter, load, bool(unit)))
    total.update(fsdp_gradients(plan, load))
    with foretelling("what the casts of shards agree on"):
        total.update(_agreements(plan, load))
    return dict(total)


def fsdp_gradients(plan: Plan, load: Workload) -> Counter[Sent]:
    """The reductions of all units' gradients."""
    total: Counter[Sent] = Counter()
    for own in _units(plan, load).values():
        total.update(_gradients(sum(prod(load.shard(p.shape, padded=True)) for p in own), load))
    return total


def _units(plan: Plan, load: Workload) -> dict[str, list[ParameterPlan]]:
    """FSDP's units and the parameters that lie in each."""
    units: dict[str, list[ParameterPlan]] = {unit: [] for unit in load.units}
    for parameter in plan.weights if units else ():
        units[load.unit_of(parameter.name)].append(parameter)
    return units


def travels_as(row: LayerPlan, parameter: ParameterPlan, load: Workload) -> Ways | None:
    """How the orientations of a linear's weight travel; None: as values."""
    refused = "other modules share it" if parameter.shared else None if load.gather else "it was asked for"
    shape, own_group = (parameter.shape[0], parameter.shape[1]), load.amax_group is not None
    return travel(row.recipe, shape, load.ranks(DP_SHARD), refused=refused, own_group=own_group)[0]


def linear_weights(plan: Plan) -> dict[str, tuple[LayerPlan, ParameterPlan]]:
    """The weights of linears, by parameter name."""
    weights = {p.name: p for p in plan.weights}
    named = ((row.weight, row) for row in plan.layers)
    return {name: (row, weights[name]) for name, row in named if name in weights}


def _gathers(
    found: tuple[LayerPlan, ParameterPlan] | None, parameter: ParameterPlan, load: Workload, again: bool
) -> Counter[Sent]:
    """A parameter's shard on its way to all ranks, in all passes of a step. `found`: its linear, if it is the weight of
    one; `again`: backward gathers it once more."""
    row, col = (found and travels_as(*found, load)) or (VALUES, VALUES)
    passes = [(row,), (col, row) if load.recomputes(parameter.name) else (col,)] if again else [(row, col)]
    first, *rest = load.shard(parameter.shape, padded=True)
    total: Counter[Sent] = Counter()
    for way in (way for ways in passes for way in dict.fromkeys(ways)):
        shape = way.of((first, prod(rest)))
        nbytes = observer.gathered(moved(way.format, shape, int(way.flipped), load.weight_dtype), load.ranks(DP_SHARD))
        precision = precision_of(way.format, load.weight_dtype)
        total[Sent(load.named(DP_SHARD), "", "weights", precision)] += nbytes * load.microbatches
    return total


def _gradients(numel: int, load: Workload) -> Counter[Sent]:
    """A unit's gradients, `numel` of them for each rank: over dp_shard, then over dp_replicate, in each reduction."""
    ranks, dtype = load.ranks(DP_SHARD), load.reduce_dtype
    flat = nothing((ranks, numel), dtype)
    parts: tuple[Tensor, ...] = (flat,) if load.grad_wire is None else WIRES[load.grad_wire].pack(flat)
    scattered = Sent(load.named(DP_SHARD), "", "grads", observer.dtype_name(parts[0].dtype))
    summed = Sent(load.named(DP_REPLICATE), "", "grads", observer.dtype_name(dtype))
    total = Counter({scattered: observer.gathered(collectives.record(parts), ranks)})
    total[summed] += observer.reduced(numel, dtype.itemsize, load.ranks(DP_REPLICATE))
    return Counter({sent: nbytes * load.reductions for sent, nbytes in total.items()})


def _agreements(plan: Plan, load: Workload) -> Counter[Sent]:
    """The step boundary's all-reduces of what the casts of all shards observed: over dp_shard, over the group that has a
    wider say, and over dp_shard of delayed amaxes that no wider group agrees on."""
    shards, wider, staged = 0, 0, 0
    for (style, recipe, ways, shape), count in Counter(_reads(plan, load)).items():
        delayed = [caps_of(way.quantizer).slot is not None for way in ways if way is not None]
        covered = recipe.reduce_amax and load.amax_group in (None, WORLD, DP_SHARD)
        staged += count * (delayed[0] and not covered)
        shard, wide = dict[int, Tensor](), dict[int, Tensor]()  # by identity: one value may serve both ways
        by_row, by_col = (None if way is None else way.quantizer for way in ways)
        amaxes = Read(by_row, by_col).observe(nothing(shape))
        own_group = load.amax_group is not None
        for way, amax in zip(ways, amaxes, strict=True):
            if way is not None and amax is not None:
                agreed = agrees(style, recipe, "w", way.quantizer, way.flipped, own_group=own_group)
                shard |= {id(amax): amax} if way.spans_rows else {}
                wide |= {id(amax): amax} if agreed else {}
        shards += count * sum(amax.numel() for amax in shard.values())
        wider += count * sum(amax.numel() for amax in wide.values())
    total: Counter[Sent] = Counter()
    for group, elements in ((DP_SHARD, shards), (load.amax_group or TP, wider), (DP_SHARD, staged)):
        total[Sent(load.named(group), "", "amax", "float32")] += observer.reduced(elements, 4, load.ranks(group))
    return total


def _reads(
    plan: Plan, load: Workload
) -> Iterator[tuple[ParallelStyle, Recipe, tuple[Way | None, Way | None], tuple[int, ...]]]:
    """The casts that a step boundary makes of weights over dp_shard: style and recipe of the linear, the ways, and the
    shape of the shard. Those of equal layers are equal."""
    if not load.units or load.ranks(DP_SHARD) == 1:
        return
    for row, parameter in linear_weights(plan).values():
        shape = load.shard(parameter.shape, padded=True)
        for ways in reads(travels_as(row, parameter, load) or ()):
            yield row.row, row.recipe, ways, shape
