"""Capture the forward or the backward of a fuser: record its launches once, then replay them as one native call.

    first call      runs the ops
    second call     records the launches of the ops (`dlp.runtime.capture`), and runs them
    later calls     allocate the results and replay the launches in one native call; collectives and operations of torch split
                    the replay into several native calls

A pass can be captured if each op only launches kernels of this package, takes views, and calls collectives and operations of
torch by `dlp.kernels.launches`. Otherwise the printed plan states the reason. `dlp.parallel.linear.capture` captures the passes
of a single linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlp.kernels.launches import is_recording
from dlp.kernels.ranges import named_range
from dlp.ops.context import OWN
from dlp.parallel.linear.capture import captured_passes
from dlp.runtime.capture import SEEN, CapturedLaunches, CapturedPasses, NotPlain
from dlp.runtime.function import multiplies_tf32, shape_key, shape_keys

Flat = list[Tensor | None]
Key = tuple[Any, ...]
# Index of a result. i >= 0: tensor i that the launches allocate; i < 0: tensor -1 - i that the launches read; None: the
# result is None.
Place = int | None
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ReplayResults:
    """Description of the results of captured launches, from which `flat` builds the results of a replay. It holds no tensors.

    places       for each result: its index among the allocated tensors or the tensors read (`Place`)
    shapes       (index, shape) of each result that is a view of a tensor in `places`, with another shape than this tensor
    dirty        indices of the tensors that the ops wrote to, among the tensors that the launches read
    attributes   for each context: the attributes that its op has set
    """

    places: list[Place]
    shapes: list[tuple[int, Shape]]
    dirty: tuple[int, ...]
    attributes: tuple[dict[str, Any], ...]

    def flat(self, allocated: Sequence[Tensor], reads: Sequence[Tensor]) -> Flat:
        """Return the flat list of results, taken from the tensors that the launches allocated and read."""
        flat = [None if at is None else allocated[at] if at >= 0 else reads[-1 - at] for at in self.places]
        for i, shape in self.shapes:
            flat[i] = flat[i].view(shape)  # type: ignore[union-attr]
        return flat


class ReplayEntry(NamedTuple):
    """Captured launches with the description of their results. The entry is valid as long as `BoundSpec.calls` of each linear
    holds `passes`."""

    passes: CapturedPasses
    launches: CapturedLaunches
    results: ReplayResults


class PlanPass:
    """The forward or the backward of a `FuserPlan`, with its captured launches.

    name       "forward" or "backward"
    ops        the names of the ops, for messages
    obstacle   reason why this pass is never captured; "": the pass can be captured
    range      name of the profiler range around a replay: the linears (without linears the ops) and the pass
    captured   the captured launches; None before the first run. Each linear also holds this object, in `BoundSpec.calls`, and
               drops it when memory that the launches read moves, for example a table of scales. Then the pass is captured again
    bounds     the specs of the linears that hold `captured`
    entries    the captured launches that can be replayed, by a key of everything that they depend on
    """

    def __init__(self, name: str, ops: str, obstacle: str, linears: str) -> None:
        self.name, self.ops, self.obstacle = name, ops, obstacle
        self.range = f"{linears or ops}.{name}"
        self.captured: CapturedPasses | None = None
        self.bounds: Sequence[Any] = ()
        self.entries: dict[Key, ReplayEntry] = {}

    def replay(
        self, entry: ReplayEntry, bounds: Sequence[Any], reads: Sequence[Tensor], addresses: Sequence[int]
    ) -> Flat | None:
        """Replay captured launches on these tensors and return the flat list of results. Return None, without a replay, if a
        linear has dropped the launches, or if they cannot run at this moment (`CapturedPasses.obstacle`)."""
        for bound in bounds:
            if bound.calls.get(self) is not entry.passes:
                return None
        why = entry.passes.obstacle()
        if why:
            entry.passes.skipped[self.name] = why
            return None
        with named_range(self.range):
            return entry.results.flat(entry.launches(reads, addresses), reads)

    def run(
        self, ctxs: Sequence[Any], bounds: Sequence[Any], reads: Sequence[Tensor], addresses: Sequence[int], key: Key,
        compute: Callable[[], Flat],
    ) -> tuple[Flat, ReplayEntry | None]:  # fmt: skip
        """Run this pass, by captured launches if possible, else by `compute`. Return the flat list of results, and the captured
        launches that ran (None: `compute` ran).

        ctxs               the contexts of the ops
        bounds             the specs of the linears
        reads, addresses   the tensors that the ops read, without repetition, and their addresses
        key                values that the launches depend on, besides the shapes, strides, dtypes and alignment of `reads`
        compute            runs the ops and returns the flat list of results
        """
        captured = self._passes(bounds, reads[0])
        if not captured.possible[self.name]:
            return compute(), None
        rounds = reads[0].dtype is torch.float32 and multiplies_tf32(reads[0])
        key = (self.name, key, rounds, *shape_keys(reads, addresses))
        entry = self.entries.get(key)
        if entry is not None:
            flat = self.replay(entry, bounds, reads, addresses)
            if flat is None:
                return compute(), None
            for ctx, own in zip(ctxs, entry.results.attributes, strict=True):
                vars(ctx).update(own)
            return flat, entry
        found = captured.found.get(key)
        if isinstance(found, str) and found is not SEEN:
            return compute(), None
        computed, recorded = list[Flat](), list[ReplayResults]()

        def run() -> list[Tensor]:
            before = [set(vars(ctx)) for ctx in ctxs]
            flat = compute()
            if not is_recording():
                computed.append(flat)
                return []
            results, allocated = _results_of(flat, ctxs, before, reads)
            recorded.append(results)
            return allocated

        allocated = captured.run(key, reads, run)
        if computed:
            return computed[0], None
        if not recorded:  # another thread has recorded these launches in the meantime
            return compute(), None
        launches = captured.found[key]
        assert isinstance(launches, CapturedLaunches)
        entry = self.entries[key] = ReplayEntry(captured, launches, recorded[0])
        return recorded[0].flat(allocated, reads), entry

    def _passes(self, bounds: Sequence[Any], x: Tensor) -> CapturedPasses:
        """Return `captured`; create it in the first run, and again if a linear has dropped it."""
        captured = self.captured
        if captured is not None:
            for bound in bounds:
                if bound.calls.get(self) is not captured:
                    break
            else:
                return captured
        captured = self.captured = captured_passes(self.ops, bounds, {self.name: self.obstacle}, x)
        self.bounds = bounds
        self.entries.clear()
        for bound in bounds:
            bound.calls[self] = captured
        return captured

    def forget(self) -> None:
        """Drop all captured launches."""
        for bound in self.bounds:
            bound.calls.pop(self, None)
        self.captured = None
        self.entries.clear()

    def describe(self) -> list[str]:
        """Return lines for the printed plan: the number of native calls if this pass is captured, else the reason why it runs
        op by op; no lines before the first run."""
        captured = self.captured
        if captured is None:
            return []
        segments = [each.segments for each in captured.found.values() if isinstance(each, CapturedLaunches)]
        if not segments:
            return [f"op by op: {self.name}: {why}" for why in dict.fromkeys(captured.states(self.name))]
        return [
            f"captured: {self.name}, native calls: {letters.count('L')}" + ", others between" * ("C" in letters)
            for letters in dict.fromkeys(segments)
        ]


def _results_of(
    flat: Flat, ctxs: Sequence[Any], before: Sequence[set[str]], reads: Sequence[Tensor]
) -> tuple[ReplayResults, list[Tensor]]:
    """Describe the results of recorded ops; return the description, and the results that are newly allocated tensors.

    before: for each context, the names of the attributes that it had before the op ran. Raises NotPlain for ops with effects
    that a replay cannot repeat.
    """
    allocated = list[Tensor]()
    places = [_place(result, allocated, reads) for result in flat]
    shapes = []
    for i, (result, at) in enumerate(zip(flat, places, strict=True)):
        if result is not None and at is not None:
            tensor = allocated[at] if at >= 0 else reads[-1 - at]
            if result.shape != tensor.shape:
                shapes.append((i, tuple(result.shape)))
    return ReplayResults(places, shapes, *_left_in(ctxs, before, reads)), allocated


def _left_in(
    ctxs: Sequence[Any], before: Sequence[set[str]], reads: Sequence[Tensor]
) -> tuple[tuple[int, ...], tuple[dict[str, Any], ...]]:
    """Return the changes that the ops made to their contexts: the indices in `reads` of the tensors marked dirty, and the new
    attributes of each context. Raises NotPlain for an attribute that is a tensor, and for a dirty tensor that is not in
    `reads`."""
    dirty, attributes = list[int](), []
    for ctx, had in zip(ctxs, before, strict=True):
        own = {name: value for name, value in vars(ctx).items() if name not in had and name not in OWN}
        if any(isinstance(value, Tensor) for value in own.values()):
            raise NotPlain("an op stores a tensor in its context without save_for_backward")
        attributes.append(own)
        dirty += [_index_of(tensor, reads) for tensor in ctx.dirty]
    return tuple(dirty), tuple(attributes)


def _index_of(tensor: Tensor, reads: Sequence[Tensor]) -> int:
    at = next((i for i, each in enumerate(reads) if each is tensor), None)
    if at is None:
        raise NotPlain("an op writes to a tensor that is not an input")
    return at


def _place(result: Tensor | None, allocated: list[Tensor], reads: Sequence[Tensor]) -> Place:
    """Return the index (`Place`) of a result in `reads` or in `allocated`. A result that is in neither list is appended to
    `allocated`."""
    if result is None:
        return None
    for tensors, first, step in ((reads, -1, -1), (allocated, 0, 1)):
        for i, tensor in enumerate(tensors):
            begins = tensor.data_ptr() == result.data_ptr() and tensor.dtype == result.dtype
            reshaped = begins and tensor.is_contiguous() and result.is_contiguous() and tensor.numel() == result.numel()
            if tensor is result or reshaped or (begins and shape_key(tensor) == shape_key(result)):
                return first + step * i
    allocated.append(result)
    return len(allocated) - 1
