"""A direction of a whole fuser as captured launches, like that of one linear (`dlp.parallel.linear.capture`).

    first call      the ops, as everywhere else
    second call     the same, watched: what they launch is taken down (`dlp.kernels.captured`), and the launches run
    further calls   memory for the results, one call into C++; with collectives, one for each stretch of launches

It needs ops of which all is launches of this package, and collectives between them. Why a direction is none, its plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlp.kernels.captured import CapturedLaunches, NotPlain
from dlp.kernels.launches import is_recording
from dlp.kernels.ranges import named_range
from dlp.ops.context import OWN
from dlp.parallel.linear.autograd import multiplies_tf32, shape_key, shape_keys
from dlp.parallel.linear.capture import SEEN, CapturedDirections

Flat = list[Tensor | None]
Key = tuple[Any, ...]
Place = int | None  # among what launches make (>= 0), among what they are given (-1 - place), or nowhere
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Returned:
    """Of captured launches: the place of each flat result, and the shapes of those that are seen in another; the places of what
    was written to; and of each context, what its op has set in it beside tensors."""

    places: list[Place]
    shapes: list[tuple[int, Shape]]
    dirty: tuple[int, ...]
    attributes: tuple[dict[str, Any], ...]

    def flat(self, made: Sequence[Tensor], reads: Sequence[Tensor]) -> Flat:
        """Results that launches made, and tensors that they were given, as the ops return them."""
        flat = [None if at is None else made[at] if at >= 0 else reads[-1 - at] for at in self.places]
        for i, shape in self.shapes:
            flat[i] = flat[i].view(shape)  # type: ignore[union-attr]
        return flat


class Kept(NamedTuple):
    """Captured launches, which are good for as long as their directions are."""

    directions: CapturedDirections
    launches: CapturedLaunches
    returned: Returned


class Direction:
    """One direction of one plan. `why`: why it is not captured, whatever comes; `linears`: those in it, which name the range of
    its launches. `bounds`: theirs; its launches go when any of these forgets its own: a table of scales has moved."""

    def __init__(self, name: str, ops: str, why: str, linears: str) -> None:
        self.name, self.ops, self.why = name, ops, why
        self.range = f"{linears or ops}.{name}"
        self.captured: CapturedDirections | None = None
        self.returned: dict[Key, Kept] = {}  # by all that they depend on

    def again(
        self, kept: Kept, bounds: Sequence[Any], reads: Sequence[Tensor], addresses: Sequence[int]
    ) -> Flat | None:
        """What launches return that were captured of tensors like these; None: they may not run."""
        directions, launches, returned = kept
        for bound in bounds:
            if bound.calls.get(self) is not directions:
                return None
        why = directions.obstacle()
        if why:
            directions.passed[self.name] = why
            return None
        with named_range(self.range):
            return returned.flat(launches(reads, addresses), reads)

    def run(
        self, ctxs: Sequence[Any], bounds: Sequence[Any], reads: Sequence[Tensor], addresses: Sequence[int], key: Key,
        compute: Callable[[], Flat],
    ) -> tuple[Flat, Kept | None]:  # fmt: skip
        """What `compute` returns, which reads these tensors, and its launches, where they ran. `key`: what it depends on beside
        these tensors."""
        captured = self._captured(bounds, reads[0])
        if not captured.possible[self.name]:
            return compute(), None
        rounds = reads[0].dtype is torch.float32 and multiplies_tf32(reads[0])
        key = (self.name, key, rounds, *shape_keys(reads, addresses))
        kept = self.returned.get(key)
        if kept is not None:
            flat = self.again(kept, bounds, reads, addresses)
            if flat is None:
                return compute(), None
            for ctx, own in zip(ctxs, kept.returned.attributes, strict=True):
                vars(ctx).update(own)
            return flat, kept
        found = captured.found.get(key)
        if isinstance(found, str) and found is not SEEN:
            return compute(), None
        by_ops, noted = list[Flat](), list[Returned]()

        def run() -> list[Tensor]:
            before = [set(vars(ctx)) for ctx in ctxs]
            flat, made = compute(), list[Tensor]()
            if not is_recording():
                by_ops.append(flat)
                return made
            places = [_place(result, made, reads) for result in flat]
            found = zip(places, flat, strict=True)
            lie_in = [None if at is None else made[at] if at >= 0 else reads[-1 - at] for at, _ in found]
            shapes = [
                (i, tuple(result.shape))
                for i, (result, its) in enumerate(zip(flat, lie_in, strict=True))
                if result is not None and its is not None and result.shape != its.shape
            ]
            noted.append(Returned(places, shapes, *_written(ctxs, before, reads)))
            return made

        made = captured.run(key, reads, run)
        if by_ops:
            return by_ops[0], None
        if not noted:  # another thread has captured them meanwhile
            return compute(), None
        recorded = captured.found[key]
        assert isinstance(recorded, CapturedLaunches)
        kept = self.returned[key] = Kept(captured, recorded, noted[0])
        return noted[0].flat(made, reads), kept

    def _captured(self, bounds: Sequence[Any], x: Tensor) -> CapturedDirections:
        kept = self.captured
        if kept is not None:
            for bound in bounds:
                if bound.calls.get(self) is not kept:
                    break
            else:
                return kept
        kept = self.captured = CapturedDirections(self.ops, bounds, {self.name: self.why}, x)
        self.returned.clear()
        for bound in bounds:
            bound.calls[self] = kept
        return kept

    def forget(self) -> None:
        """Drop what is captured."""
        for bound in self.captured.bounds if self.captured is not None else ():
            bound.calls.pop(self, None)
        self.captured = None
        self.returned.clear()

    def said(self) -> list[str]:
        """Whether it is captured, or why not, in lines; none before it has run."""
        captured = self.captured
        if captured is None:
            return []
        made = [each.segments for each in captured.found.values() if isinstance(each, CapturedLaunches)]
        if not made:
            return [f"op by op: {self.name}: {why}" for why in dict.fromkeys(captured.states(self.name))]
        return [
            f"captured: {self.name}, native calls: {segments.count('L')}" + ", others between" * ("C" in segments)
            for segments in dict.fromkeys(made)
        ]


def _written(
    ctxs: Sequence[Any], before: Sequence[set[str]], reads: Sequence[Tensor]
) -> tuple[tuple[int, ...], tuple[dict[str, Any], ...]]:
    """What the ops have left in their contexts: tensors that they were given and wrote to, and attributes. NotPlain for other
    tensors."""
    dirty, attributes = list[int](), []
    for ctx, had in zip(ctxs, before, strict=True):
        own = {name: value for name, value in vars(ctx).items() if name not in had and name not in OWN}
        if any(isinstance(value, Tensor) for value in own.values()):
            raise NotPlain("an op keeps a tensor that it does not save")
        attributes.append(own)
        dirty += [_given(tensor, reads) for tensor in ctx.dirty]
    return tuple(dirty), tuple(attributes)


def _given(tensor: Tensor, reads: Sequence[Tensor]) -> int:
    at = next((i for i, each in enumerate(reads) if each is tensor), None)
    if at is None:
        raise NotPlain("an op writes to a tensor that it was not given")
    return at


def _place(result: Tensor | None, made: list[Tensor], given: Sequence[Tensor]) -> Place:
    if result is None:
        return None
    for tensors, first, step in ((given, -1, -1), (made, 0, 1)):
        for i, tensor in enumerate(tensors):
            here = tensor.data_ptr() == result.data_ptr() and tensor.dtype == result.dtype
            flat = here and tensor.is_contiguous() and result.is_contiguous() and tensor.numel() == result.numel()
            if tensor is result or flat or (here and shape_key(tensor) == shape_key(result)):
                return first + step * i
    made.append(result)
    return len(made) - 1
