"""What one layer keeps: of a spec that it runs under, a `BoundSpec`.

The opaque ops take tensors and two names: a `spec_id`, a tensor, says which `BoundSpec` a call runs; a `trace_id`, an integer,
is the same for all specs of equal style, recipe, tp, options and prologue, and is all that results depend on in shape and
number. torch.compile sees the trace_id as a constant and the spec_id as an input, so that equal blocks share one compiled
graph.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dlp.comm.transport import mapped_memory
from dlp.parallel import fit
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.model.session import Session, cannot_pickle
from dlp.parallel.transfer import TransferPlan
from dlp.quant.recipe import Operand
from dlp.quant.stats import plain

Answer = TypeVar("Answer")
Asked = ParamSpec("Asked")

# What numbers name. A model's own go with it (its session keeps them, for a backward that is still to come when a layer has
# another already); a spec of each trace stays, with no model behind it.
_BOUND: WeakValueDictionary[int, BoundSpec] = WeakValueDictionary()
_TRACES: dict[tuple[Any, ...], int] = {}
_SPEC_OF_TRACE: dict[int, LinearSpec] = {}
_NUMBERS = itertools.count()


def remembered(
    ask: Callable[Concatenate[BoundSpec, Asked], Answer],
) -> Callable[Concatenate[BoundSpec, Asked], Answer]:
    """A method of a bound spec, or a function of one, whose answers are kept: a spec never changes, and is asked the same with
    every call of its layer."""

    @wraps(ask)
    def answer(bound: BoundSpec, *args: Asked.args, **none: Asked.kwargs) -> Answer:
        key = (ask, *args)
        try:
            found: Answer = bound.cache[key]
        except KeyError:
            found = bound.cache[key] = ask(bound, *args, **none)
        except TypeError:  # a symbolic size, while something traces
            found = ask(bound, *args, **none)
        return found

    return answer


class BoundSpec:
    """A spec as one layer of one session runs it.

    session    what changes between steps, shared by the layers of a model
    weights    `LayerWeights` of the layer
    spec_id    names it to the opaque ops, int64 []; `trace_id`: see above
    cache      what has been decided for calls of it (`remembered`)
    calls      bound calls and captured directions (`dlp.parallel.linear.autograd`)
    """

    def __init__(self, spec: LinearSpec, session: Session, weights: Any = None) -> None:
        self.spec, self.session, self.weights = spec, session, weights
        if spec.slots:
            spec.check_group(session.amax_group)
        session.made.append(self)
        session.draws |= spec.draws
        self._enter()

    def _enter(self) -> None:
        """Take a number, in this process."""
        number, spec = next(_NUMBERS), self.spec
        _BOUND[number] = self
        self.spec_id = torch.tensor(number, device="cpu")  # whatever the default device is
        self.trace_id = _TRACES.setdefault((spec.style, spec.recipe, spec.tp, spec.options, spec.prologue), number)
        _SPEC_OF_TRACE.setdefault(self.trace_id, spec)
        self.cache: dict[Any, Any] = {}
        self.calls: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundSpec:
        """A copied layer has scales of its own, which begin as these are, and is not measured."""
        spec = replace(self.spec, recipe=plain(self.spec.recipe))
        new = memo[id(self)] = BoundSpec(spec, copy.deepcopy(self.session, memo))
        new.weights = copy.deepcopy(self.weights, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """ValueError, where a model is pickled, for a layer that is spread over ranks."""
        if self.spec.group is not None or self.spec.amax_group is not None:
            cannot_pickle(self.spec.name)
        return {
            "spec": replace(self.spec, recipe=plain(self.spec.recipe)),
            "session": self.session,
            "weights": self.weights,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._enter()

    @remembered
    def quantizers(self, tensor: str) -> Operand | None:
        """Those of an operand x, w, dy; of a result y, dx, which both orientations share, or None if it has none."""
        return fit.quantizers(self.spec.recipe, tensor)

    @remembered
    def slot_name(self, tensor: str, member: str, columnwise: bool) -> str:
        """The name of the delayed scale of one tensor."""
        return self.spec.slot_name(tensor, member, columnwise)

    @remembered
    def transfers(self, tokens: int) -> TransferPlan:
        """What travels, with so many rows of x on this rank."""
        return self.spec.transfers(tokens)

    @remembered
    def transfers_back(self, dy_tokens: int) -> TransferPlan:
        """The same, with so many rows of dy on this rank."""
        return self.spec.transfers_back(dy_tokens)

    def kept_memory(self) -> list[Tensor]:
        """What kernels of this layer read and write that is no operand; it stays where it is while `calls` do."""
        groups = {group for group in (self.spec.group, self.spec.amax_group) if group is not None}
        mapped = [span for group in groups for span in mapped_memory(group)]
        return [*self.session.kept_memory(self.spec), *mapped]


def bound_of(spec_id: Tensor) -> BoundSpec:
    """What a `spec_id` names."""
    return _BOUND[int(spec_id)]


def spec_of(trace_id: int) -> LinearSpec:
    """One that stands for all specs of a trace."""
    return _SPEC_OF_TRACE[trace_id]
