"""All weights of a model cast in one launch: those whose quantizer offers it and whose device has kernels for it.

A launch reads a table of addresses in device memory. It is written when a weight, an operand or a delayed scale has
moved, which happens in the first steps, after a load and after a swap; a step in between only launches, so it can be
captured in a CUDA graph. Weights that are rounded or padded before their cast, and those whose amax is agreed with other
ranks, are cast layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.parallel.linear import LinearCore
from dlp.parallel.operands import Pair, unflatten, weights_agree
from dlp.parallel.runtime import Runtime
from dlp.parallel.shard_casts import cast_shards
from dlp.quant.quantizer import Quantizer, ScaleSlot, one_launch, slot_options


class _Job(NamedTuple):
    """One weight [N, K], its operands, and its delayed scale if it has one."""

    quantizer: Quantizer
    weight: Tensor
    pair: Pair
    slot: ScaleSlot | None

    def addresses(self) -> tuple[int, ...]:
        parts = [*self.pair.rowwise().parts, *self.pair.columnwise().parts]
        scales = [self.slot.scale, self.slot.staging] if self.slot else []
        return tuple(tensor.data_ptr() for tensor in (self.weight, *parts, *scales))


class WeightBatch:
    """The prepared launches of one model."""

    def __init__(self) -> None:
        self._made_for: list[tuple[Quantizer, tuple[int, ...]]] = []
        self._launches: list[Callable[[], None]] = []

    @torch.no_grad()
    def refresh(self, cores: Iterable[LinearCore]) -> set[LinearCore]:
        """Cast the weights of all of `cores` that can be cast together, in place; returns those."""
        jobs = {core: made for core in cores if (made := _jobs(core))}
        flat = [job for made in jobs.values() for job in made]
        wanted = [(job.quantizer, job.addresses()) for job in flat]
        if wanted != self._made_for:
            self._launches, self._made_for = _prepare(flat), wanted
        for launch in self._launches:
            launch()
        return set(jobs)


def refresh(runtime: Runtime, cores: Sequence[LinearCore]) -> None:
    """Cast the weights of these layers, together where that is possible; called at the step boundary."""
    runtime.weight_batch = batch = runtime.weight_batch or WeightBatch()
    done = batch.refresh(cores)
    for core in cores:
        if core not in done:
            core.refresh()
    cast_shards(list(runtime.shards.values()))


def _jobs(core: LinearCore) -> list[_Job]:
    """The casts of one layer; none where it casts by itself, or at use."""
    spec, parts = core.spec, core.cast_weights.parts
    quantizer, dtype = spec.recipe.w.rowwise, core.dtype
    if not (core.caches and parts and one_launch(quantizer) and quantizer == spec.recipe.w.columnwise):
        return []
    weights = [weight.detach() for weight in core.weights()]
    pairs = unflatten(spec.recipe.w, parts, len(weights))
    if weights_agree(spec) or any(
        weight.dtype != dtype or weight.shape != pair.rowwise().shape or not ops.has_batches(weight)
        for weight, pair in zip(weights, pairs, strict=True)
    ):
        return []
    delayed = slot_options(quantizer) is not None
    slots = [spec.runtime.slot(spec, "w", member, False, True) if delayed else None for member in spec.members]
    return [_Job(quantizer, *job) for job in zip(weights, pairs, slots, strict=True)]


def _prepare(jobs: Iterable[_Job]) -> list[Callable[[], None]]:
    """Launches over jobs of one quantizer and dtype."""
    alike: dict[tuple[Quantizer, torch.dtype], list[_Job]] = {}
    for job in jobs:
        alike.setdefault((job.quantizer, job.weight.dtype), []).append(job)
    launches: list[Callable[[], None]] = []
    for (quantizer, _), group in alike.items():
        prepare = one_launch(quantizer)
        assert prepare is not None
        pairs = [(job.pair.rowwise(), job.pair.columnwise()) for job in group]
        launches += prepare([job.weight for job in group], pairs, [job.slot for job in group])
    return launches
