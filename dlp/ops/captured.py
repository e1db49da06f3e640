"""A direction of a whole fuser as captured launches, like that of one linear (`dlp.parallel.linear.capture`).

    first call      the ops, as everywhere else
    second call     the same, watched: what they launch is taken down (`dlp.kernels.captured`), and the launches run
    further calls   memory for the results, one call into C++

It needs ops of which all is launches of this package: linears that communicate nothing, or through memory that ranks map, and
norms, activations and sums where their kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dlp.comm import observer
from dlp.kernels import captured
from dlp.kernels.captured import CapturedLaunches, NotPlain
from dlp.parallel.linear.autograd import shape_key
from dlp.parallel.linear.capture import LIMIT, SEEN

Flat = list[Tensor | None]
Key = tuple[Any, ...]


class Recorded(NamedTuple):
    """launches; of each flat result: its place among what they make (>= 0), among what they are given (-1 - place), or None;
    attributes: what the ops have written into their contexts beside tensors."""

    launches: CapturedLaunches
    places: tuple[int | None, ...]
    attributes: tuple[dict[str, Any], ...]


class Direction:
    """The captured launches of one direction of one plan, by what they depend on beside addresses. A string says why there are
    none: not yet, or for this reason."""

    def __init__(self, name: str, launches: bool) -> None:
        self.name, self.launches = name, launches
        self.found: dict[Key, Recorded | str] = {}

    def run(
        self, ctxs: Sequence[Any], bounds: Sequence[Any], given: Sequence[Tensor], key: Key, compute: Callable[[], Flat]
    ) -> Flat:
        """What `compute` returns, which reads the tensors given. `bounds`: of the linears in it."""
        if not self.launches or not captured.possible(given[0]) or any(_runs_here(bound) for bound in bounds):
            return compute()
        distinct = {tensor.data_ptr(): tensor for tensor in reversed(given)}
        order = list(distinct)
        same = tuple([order.index(tensor.data_ptr()) for tensor in given])
        reads = list(distinct.values())
        key = (key, same, *map(shape_key, given))
        found = self._found(key, bounds)
        if isinstance(found, Recorded):
            return _replayed(found, ctxs, reads)
        if found is None and len(self.found) < LIMIT:
            self._keep(key, bounds, SEEN)
        if found is not SEEN or not captured.disjoint(reads):
            return compute()
        return self._record(key, ctxs, bounds, reads, compute)

    def _record(
        self, key: Key, ctxs: Sequence[Any], bounds: Sequence[Any], reads: list[Tensor], compute: Callable[[], Flat]
    ) -> Flat:
        fixed = [memory for bound in bounds for memory in bound.kept_memory()]
        before, places = [set(vars(ctx)) for ctx in ctxs], list[int | None]()

        def run() -> list[Tensor]:
            made: list[Tensor] = []
            places.clear()
            for result in compute():
                places.append(_place(result, made, reads))
            return made

        unique = list({memory.data_ptr(): memory for memory in fixed}.values())
        try:
            launches = captured.record(run, reads, unique)
        except NotPlain as why:
            self._keep(key, bounds, str(why))
            return compute()
        attributes = tuple(
            [
                {name: value for name, value in vars(ctx).items() if name not in had}
                for ctx, had in zip(ctxs, before, strict=True)
            ]
        )
        if any(isinstance(value, Tensor) for own in attributes for value in own.values()):
            self._keep(key, bounds, "an op keeps a tensor that it does not save")
            return compute()
        recorded = Recorded(launches, tuple(places), attributes)
        self._keep(key, bounds, recorded)
        return _replayed(recorded, ctxs, reads)

    def _found(self, key: Key, bounds: Sequence[Any]) -> Recorded | str | None:
        """Launches go when any linear forgets its own: a table of scales has moved."""
        found = self.found.get(key)
        if found is not None and all((self, key) in bound.calls for bound in bounds):
            return found
        return None

    def _keep(self, key: Key, bounds: Sequence[Any], made: Recorded | str) -> None:
        self.found[key] = made
        for bound in bounds:
            bound.calls[self, key] = made


def _runs_here(bound: Any) -> bool:
    """It reads delayed scales that are not those of the table, or what it sends is counted."""
    scales = bound.session.scales
    elsewhere = scales is not None and scales.values is not None
    return elsewhere or (bound.spec.group is not None and bool(observer.counting()))


def _place(result: Tensor | None, made: list[Tensor], given: Sequence[Tensor]) -> int | None:
    if result is None:
        return None
    for i, tensor in enumerate(given):
        if tensor is result or (tensor.data_ptr() == result.data_ptr() and shape_key(tensor) == shape_key(result)):
            return -1 - i
    for i, tensor in enumerate(made):
        if tensor is result:
            return i
    made.append(result)
    return len(made) - 1


def _replayed(recorded: Recorded, ctxs: Sequence[Any], reads: Sequence[Tensor]) -> Flat:
    made = recorded.launches(reads)
    for ctx, own in zip(ctxs, recorded.attributes, strict=True):
        vars(ctx).update(own)
    return [None if at is None else made[at] if at >= 0 else reads[-1 - at] for at in recorded.places]
