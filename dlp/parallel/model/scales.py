"""Whether ranks that must share scales do.

    check_scales(model)              what is kept between steps: delayed scales, cast weights whose scale is agreed, and
                                     of cast shards of weights what is not sent because all ranks have it
    with watch_scales(model): ...    every operand that is gathered inside: parts that are not sent are equal on all ranks

The first is cheap, one reduction, and runs whenever a checkpoint is made. The second is for debugging: one small reduction
and a wait for the device per gather. Both are collective: all ranks call them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dlp.comm.amax import agree
from dlp.parallel.linear.operands import unflatten, weights_agree
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.model.runtime import Runtime, runtime_of
from dlp.parallel.weight.sharded import ShardedWeight
from dlp.quant.tensor import SHARED, QuantizedTensor

if TYPE_CHECKING:
    from dlp.parallel.linear.modules import LinearCore

Named = dict[str, Tensor]


def check_scales(model: nn.Module) -> int:
    """Compare the scales that ranks keep; returns how many. Raises RuntimeError, on all ranks of the group, for one that
    differs."""
    runtime = runtime_of(model)
    by_group: dict[ProcessGroup, Named] = {}
    if runtime.amax_group is not None and runtime.has_slots():
        by_group.setdefault(runtime.amax_group, {}).update(_slots(runtime))
    for core in runtime.cores:
        group = core.spec.amax_group or core.spec.group
        if group is not None and weights_agree(core.spec):
            by_group.setdefault(group, {}).update(_weights(core))
    for weight in runtime.weights():
        if isinstance(weight, ShardedWeight):
            by_group.setdefault(weight.layout.group, {}).update(_shards(weight))
    for group, scales in by_group.items():
        compare(scales, group)
    return sum(len(scales) for scales in by_group.values())


def _slots(runtime: Runtime) -> Named:
    """The delayed scales that the group agrees on, by name."""
    slots = runtime.slots
    agreed = slots.agreed.tolist()
    return {name: slots.table.scale[i] for i, name in enumerate(slots.table.names) if agreed[i]}


def _weights(core: LinearCore) -> Named:
    """The scales of persistent weights that span the whole tensor."""
    found: Named = {}
    kept = core.weights.parts
    held = [] if kept is None else unflatten(core.spec.recipe.w, kept.parts, len(core.members))
    for member, operands in zip(core.spec.members if kept else (), held, strict=True):
        for columnwise, way in enumerate(("rowwise", "columnwise")):
            operand = operands.at(bool(columnwise))
            for part, tensor in zip(operand.format.parts, operand.parts, strict=True):
                if part.rows is SHARED and part.contraction is SHARED:
                    found[f"{member}.w {way} {part.name}"] = tensor
    return found


def _shards(weight: ShardedWeight) -> Named:
    """What ranks that gather a weight take for equal."""
    return {
        f"{weight.name}.w {name} of {mine.format.name}": tensor
        for way, mine in weight.mine.items()
        for name, tensor in _shared(mine, int(way.flipped)).items()
    }


def compare(scales: Named, group: ProcessGroup) -> None:
    """All ranks of `group` hold these numbers, with the same bits. Raises RuntimeError on all of them where not."""
    if group.size() == 1 or not scales:
        return
    bits = torch.cat([tensor.detach().reshape(-1).float() for tensor in scales.values()]).view(torch.int32)
    most, not_least = agree([bits, ~bits], group)
    wrong = torch.nonzero(most != ~not_least).flatten().tolist()
    if wrong:
        names = [name for name, tensor in scales.items() for _ in range(tensor.numel())]
        low, high = ((~not_least).view(torch.float32)[wrong[0]].item(), most.view(torch.float32)[wrong[0]].item())
        raise RuntimeError(
            f"{len(wrong)} scales differ between ranks that must share them, first {names[wrong[0]]}: from {low:g} to "
            f"{high:g}; the amax group lacks ranks, or their states have parted"
        )


@contextmanager
def watch_scales(model: nn.Module) -> Iterator[None]:
    """Inside, each gather first compares the parts that are not sent because all ranks have them. Raises RuntimeError
    on all ranks of the tp group where they differ."""
    runtime = runtime_of(model)
    runtime.watches_scales = True
    try:
        yield
    finally:
        runtime.watches_scales = False


def check_gathered(spec: LinearSpec, which: str, mine: QuantizedTensor, dim: int) -> None:
    """The parts of an operand of GEMM `which` that a gather along `dim` takes for equal."""
    shared = _shared(mine, dim)
    compare({f"{spec.name} {which} {name}": tensor for name, tensor in shared.items()}, spec.tp_group)


def _shared(mine: QuantizedTensor, dim: int) -> Named:
    """The parts that a gather along `dim` does not send."""
    parts: Sequence[Tensor] = mine.parts
    return {
        part.name: tensor
        for part, tensor in zip(mine.format.parts, parts, strict=True)
        if part.moves_along(dim) is SHARED
    }
