"""A direction of a whole fuser as captured launches, like that of one linear (`dlp.parallel.linear.capture`).

    first call      the ops, as everywhere else
    second call     the same, watched: what they launch is taken down (`dlp.kernels.captured`), and the launches run
    further calls   memory for the results, one call into C++; with collectives, one for each stretch of launches

It needs ops of which all is launches of this package, and collectives between them. Why a direction is none, its plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlp.kernels.captured import CapturedLaunches, NotPlain
from dlp.kernels.launches import is_recording
from dlp.kernels.ranges import named_range
from dlp.ops.context import OWN
from dlp.parallel.linear.autograd import layout_keys, multiplies_tf32, shape_key, shape_keys
from dlp.parallel.linear.capture import SEEN, CapturedDirections

Flat = list[Tensor | None]
Key = tuple[Any, ...]
Place = int | None  # among what launches make (>= 0), among what they are given (-1 - place), or nowhere
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Returned:
    """Of captured launches: the place of each flat result, and the shapes of those that are seen in another; of each context,
    the places of what was written to, and what the ops have set in it beside tensors."""

    places: list[Place]
    shapes: list[tuple[int, Shape]]
    dirty: tuple[tuple[int, ...], ...]
    attributes: tuple[dict[str, Any], ...]


class Direction:
    """One direction of one plan. `why`: why it is not captured, whatever comes. `bounds`: of the linears in it; its launches
    go when any of these forgets its own: a table of scales has moved."""

    def __init__(self, name: str, ops: str, why: str) -> None:
        self.name, self.ops, self.why, self.range = name, ops, why, f"{ops}.{name}"
        self.captured: CapturedDirections | None = None
        # by all that they depend on, and, of a backward, by less beside how the launches of its forward were
        self.returned: dict[Key | None, tuple[CapturedLaunches, Returned]] = {}

    def run(
        self, ctxs: Sequence[Any], bounds: Sequence[Any], given: Sequence[Tensor], key: Key, compute: Callable[[], Flat],
        like: Returned | None = None,
    ) -> tuple[Flat, Returned | None]:  # fmt: skip
        """What `compute` returns, which reads the tensors given, and how its launches were, where they ran. `key`: what it
        depends on beside them; `like`: of the forward that belongs to it, which says the shapes of all that is given."""
        captured = self._captured(bounds, given[0])
        if not captured.possible[self.name]:
            return compute(), None
        addresses, reads, same = [tensor.data_ptr() for tensor in given], given, tuple[int, ...]()
        everyone = addresses
        if len(set(addresses)) < len(addresses):
            distinct = dict(zip(addresses, given, strict=True))
            order = {address: i for i, address in enumerate(distinct)}
            same, reads = tuple([order[address] for address in addresses]), list(distinct.values())
            addresses = list(distinct)
        rounds = given[0].dtype is torch.float32 and multiplies_tf32(given[0])
        short = None if like is None else (like, key, same, rounds, *layout_keys(given, everyone))
        kept = self.returned.get(short)
        if kept is None:
            key = (self.name, key, same, rounds, *shape_keys(given, everyone))
            kept = self.returned.get(key)
            if kept is not None and short is not None:
                self.returned[short] = kept
        if kept is not None:
            why = captured.obstacle()
            if why:
                captured.passed[self.name] = why
                return compute(), None
            launches, returned = kept
            with named_range(self.range):
                return self._flat(ctxs, reads, launches(reads, addresses), returned), returned
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
        captured_now = captured.found[key]
        assert isinstance(captured_now, CapturedLaunches)
        self.returned[key] = captured_now, noted[0]
        return self._flat(ctxs, reads, made, noted[0]), noted[0]

    @staticmethod
    def _flat(ctxs: Sequence[Any], reads: Sequence[Tensor], made: Sequence[Tensor], returned: Returned) -> Flat:
        """Results that launches made, and tensors that they were given, as the ops return them."""
        for ctx, dirty, own in zip(ctxs, returned.dirty, returned.attributes, strict=True):
            vars(ctx).update(own)
            if dirty:
                ctx.dirty = tuple([reads[at] for at in dirty])
        flat = [None if at is None else made[at] if at >= 0 else reads[-1 - at] for at in returned.places]
        for i, shape in returned.shapes:
            flat[i] = flat[i].view(shape)  # type: ignore[union-attr]
        return flat

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
) -> tuple[tuple[tuple[int, ...], ...], tuple[dict[str, Any], ...]]:
    """What the ops have left in their contexts: tensors that they were given and wrote to, and attributes. NotPlain for other
    tensors."""
    dirty, attributes = [], []
    for ctx, had in zip(ctxs, before, strict=True):
        own = {name: value for name, value in vars(ctx).items() if name not in had and name not in OWN}
        if any(isinstance(value, Tensor) for value in own.values()):
            raise NotPlain("an op keeps a tensor that it does not save")
        attributes.append(own)
        dirty.append(tuple([_given(tensor, reads) for tensor in ctx.dirty]))
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
