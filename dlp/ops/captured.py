"""Forward or backward of a complete fuser as captured launches; `dlp.parallel.linear.capture` does this for one linear.

    first call      runs the ops
    second call     records the launches of the ops (`dlp.runtime.capture`), and runs them
    further calls   allocate the results and replay the launches in one native call; collectives and operations of torch split
                    the replay into several native calls

All ops must only launch kernels of this package, call collectives and operations of torch by `dlp.kernels.launches`, and take
views. The printed plan states why a pass is not captured.
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
# Where a result is: i >= 0: tensor i that launches allocate; -1 - i: tensor i that they read; None: there is no result.
Place = int | None
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ReplayResults:
    """Results of the ops when their launches were recorded, without tensors.

    places       place of each result of the flat list
    shapes       (index, shape) of the results that are views of another shape
    dirty        indices of the tensors, among those read, that the ops wrote to
    attributes   by context: attributes that the op has set, except tensors
    """

    places: list[Place]
    shapes: list[tuple[int, Shape]]
    dirty: tuple[int, ...]
    attributes: tuple[dict[str, Any], ...]

    def flat(self, allocated: Sequence[Tensor], reads: Sequence[Tensor]) -> Flat:
        """The results in the form that the ops return, built from the tensors that launches allocated and read."""
        flat = [None if at is None else allocated[at] if at >= 0 else reads[-1 - at] for at in self.places]
        for i, shape in self.shapes:
            flat[i] = flat[i].view(shape)  # type: ignore[union-attr]
        return flat


class ReplayEntry(NamedTuple):
    """Captured launches and their results; valid while the caches of the layers contain these `passes`."""

    passes: CapturedPasses
    launches: CapturedLaunches
    results: ReplayResults


class Direction:
    """One pass of one plan, and its captured launches.

    name       "forward" or "backward"
    ops        the names of the ops, for messages
    obstacle   reason why this pass is never captured; empty: it can be captured
    linears    the names of the linears, for the named range of the launches
    captured   the captured launches so far. Each linear holds the same object in the cache of calls, and drops it when memory
               that launches read moves, for example a table of scales; then this pass is captured again
    entries    captured launches, by all that the launches depend on
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
        """Run captured launches on these tensors and return their results; None if they may not run now."""
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
        """The results of `compute`, which runs the ops, or of captured launches; and the captured launches in the second case.

        reads, addresses   the tensors that the ops read, without repetition
        key                values that the launches depend on, besides the shapes, strides, dtypes and alignment of `reads`
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
        if not recorded:  # another thread has captured these launches meanwhile
            return compute(), None
        launches = captured.found[key]
        assert isinstance(launches, CapturedLaunches)
        entry = self.entries[key] = ReplayEntry(captured, launches, recorded[0])
        return recorded[0].flat(allocated, reads), entry

    def _passes(self, bounds: Sequence[Any], x: Tensor) -> CapturedPasses:
        """Captured launches so far; a new object if a linear has dropped the old object."""
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
        """Lines for the printed plan: whether this pass is captured, or the reason why not; no lines before the first
        run."""
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
    """The results of recorded ops without tensors, and the allocated tensors among the results. before: names of the
    attributes of each context before the op ran. Raises NotPlain for ops with effects that launches cannot repeat."""
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
    """Return the changes that the ops made to their contexts: the indices of written tensors, and the new attributes of each
    context. Raises NotPlain for an attribute that is a tensor, and for a write to a tensor outside of `reads`."""
    dirty, attributes = list[int](), []
    for ctx, had in zip(ctxs, before, strict=True):
        own = {name: value for name, value in vars(ctx).items() if name not in had and name not in OWN}
        if any(isinstance(value, Tensor) for value in own.values()):
            raise NotPlain("an op keeps a tensor without save_for_backward")
        attributes.append(own)
        dirty += [_index_of(tensor, reads) for tensor in ctx.dirty]
    return tuple(dirty), tuple(attributes)


def _index_of(tensor: Tensor, reads: Sequence[Tensor]) -> int:
    at = next((i for i, each in enumerate(reads) if each is tensor), None)
    if at is None:
        raise NotPlain("an op writes to a tensor outside of its inputs")
    return at


def _place(result: Tensor | None, allocated: list[Tensor], reads: Sequence[Tensor]) -> Place:
    """Place of a result: among the tensors that are read, or among the allocated tensors, to which a new tensor is
    appended."""
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
