"""LinearSpec: everything a parallel linear is besides its tensors, frozen and numbered.

The opaque ops take tensors and two names of a spec: its `ticket`, a tensor, says which spec a call runs; its `kind`, an
integer, is the same for all specs of equal style, recipe, tp, `delay_wgrad` and prologue, and is all that results depend
on in shape and number. torch.compile sees the kind as a constant and the ticket as an input, so that equal blocks share one
compiled graph. Changing a layer's recipe or overlap makes a new spec, so a spec in flight (a forward whose backward is
still to come) never changes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.parallel import fit
from dlp.parallel.linear.prologue import Prologue
from dlp.parallel.model.runtime import Runtime, cannot_pickle
from dlp.parallel.overlap import Overlap
from dlp.parallel.style import ParallelStyle
from dlp.parallel.transfer import TransferPlan, transfer_plan, x_tokens_of
from dlp.quant.quantizer import SlotOptions, caps_of
from dlp.quant.recipe import OPERANDS, RESULTS, Operand, Recipe
from dlp.quant.stats import plain
from dlp.quant.tensor import Format

Answer = TypeVar("Answer")
Asked = ParamSpec("Asked")

# Intern tables: specs are values and are never changed. A model's own go with it (its runtime keeps them, for a backward
# that is still to come when a layer has another already); one of each kind stays, with no model behind it.
_SPECS: WeakValueDictionary[int, LinearSpec] = WeakValueDictionary()
_OF_KIND: dict[int, LinearSpec] = {}
_KINDS: dict[tuple[Any, ...], int] = {}
_NUMBERS = itertools.count()


def remembered(
    ask: Callable[Concatenate[LinearSpec, Asked], Answer],
) -> Callable[Concatenate[LinearSpec, Asked], Answer]:
    """A method of a spec, or a function of one, whose answers are kept: a spec never changes, and is asked the same with
    every call of its layer."""

    @wraps(ask)
    def answer(spec: LinearSpec, *args: Asked.args, **none: Asked.kwargs) -> Answer:
        key = (ask, *args)
        try:
            found: Answer = spec.known[key]
        except KeyError:
            found = spec.known[key] = ask(spec, *args, **none)
        except TypeError:  # a symbolic size, while something traces
            found = ask(spec, *args, **none)
        return found

    return answer


@dataclass(frozen=True)
class Overlaps:
    """The overlap strategy of each GEMM."""

    fprop: Overlap
    dgrad: Overlap
    wgrad: Overlap


@dataclass(frozen=True, eq=False)
class LinearSpec:
    """`group`: the tp group, None for a layer without one. `amax_group`: when given, every observed amax is agreed over
    it, a superset of what the style asks. `tokens`: B*S of a microbatch, which sequence-parallel layers check x
    against, None where it is not known. `runtime`: what changes between steps, shared by the layers of a model.
    `members`: a name for each weight, under which its scales are kept and its random bits drawn. `variant`: sets the
    scales of a recipe that overrides the layer's own apart. `delay_wgrad`: backward leaves wgrad to `backward_dw`.
    `prologue`: what makes x of what the layer is called with; None: that is x."""

    name: str
    style: ParallelStyle
    recipe: Recipe
    overlap: Overlaps
    group: ProcessGroup | None = None
    amax_group: ProcessGroup | None = None
    tokens: int | None = None
    runtime: Runtime = field(default_factory=Runtime)
    members: tuple[str, ...] = ("linear",)
    variant: str = ""
    delay_wgrad: bool = False
    prologue: Prologue | None = None
    ticket: Tensor = field(init=False)
    kind: int = field(init=False)
    known: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)
    calls: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)  # see `dlp.parallel.linear.direct`

    def __post_init__(self) -> None:
        fit.check(self.name, self.style, self.recipe)
        if self.prologue is not None:
            self.prologue.check(self.name, self.style, self.tp)
        self._check_group(self.amax_group)
        if self.slots:
            self._check_group(self.runtime.amax_group)
        self.runtime.made.append(self)
        self.runtime.draws |= self.draws
        self._enter()

    def _enter(self) -> None:
        """Take a number, in this process."""
        number = next(_NUMBERS)
        _SPECS[number] = self
        object.__setattr__(self, "ticket", torch.tensor(number, device="cpu"))  # whatever the default device is
        alike = self.style, self.recipe, self.tp, self.delay_wgrad, self.prologue
        object.__setattr__(self, "kind", _KINDS.setdefault(alike, number))
        if self.kind == number:
            _OF_KIND[number] = alone = object.__new__(LinearSpec)
            vars(alone).update(vars(self) | {"runtime": Runtime(), "known": {}, "calls": {}})

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearSpec:
        """A copied layer has scales of its own, which begin as these are, and is not measured."""
        return replace(self, recipe=plain(self.recipe), runtime=copy.deepcopy(self.runtime, memo))

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None or self.amax_group is not None:
            cannot_pickle(self.name)
        apart = {"recipe": plain(self.recipe), "known": {}, "calls": {}}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init} | apart

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._enter()

    def _check_group(self, amax_group: ProcessGroup | None) -> None:
        """Ranks whose shards are gathered must share scales. ValueError for a group without some of them."""
        if amax_group is None or self.style.gathers is None:
            return
        shared, tp = (dist.get_process_group_ranks(group) for group in (amax_group, self.tp_group))
        if not set(tp) <= set(shared):
            raise ValueError(
                f"{self.name}: its amax group has ranks {shared}, but sequence parallelism gathers {self.style.gathers} "
                f"over the tp ranks {tp}, which must share scales; use a group that contains them, or 'auto'"
            )

    @property
    def tp(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def num_axes(self) -> int:
        """Over how many axes of a mesh its parameters are spread where it computes: tp, if it was given one."""
        return int(self.group is not None)

    @property
    def tp_group(self) -> ProcessGroup:
        assert self.group is not None, f"{self.name}: {self.style.name} communicates and needs a tp group"
        return self.group

    @remembered
    def quantizers(self, tensor: str) -> Operand | None:
        """Those of an operand x, w, dy; of a result y, dx, which both orientations share, or None if it has none."""
        return fit.quantizers(self.recipe, tensor)

    def owners(self, tensor: str) -> tuple[str, ...]:
        """The members that have this tensor."""
        return owners(self.members, tensor)

    @remembered
    def slot_name(self, tensor: str, member: str, columnwise: bool) -> str:
        """The name of the delayed scale of one tensor."""
        return _slot_name(self.recipe, tensor, member, columnwise) + self.variant

    @cached_property
    def slots(self) -> dict[str, tuple[str, SlotOptions]]:
        """Slot name -> (tensor, options) for all that this layer casts with a delayed scale."""
        return {f"{name}{self.variant}": found for name, found in delayed_slots(self.recipe, self.members).items()}

    @cached_property
    def weight_formats(self) -> tuple[tuple[Format, Format], tuple[int, int]]:
        """The formats of w, rowwise and columnwise, and how many parts they have."""
        formats = self.recipe.w.rowwise.format, self.recipe.w.columnwise.format
        return formats, (len(formats[0].parts), len(formats[1].parts))

    @cached_property
    def draws(self) -> bool:
        """Whether a cast of this layer rounds by chance."""
        return any(caps_of(quantizer).origin for quantizer in self.recipe.quantizers())

    def kept_memory(self) -> list[Tensor]:
        """What kernels of this layer read and write that is no operand; it stays where it is while `calls` do."""
        table = self.runtime.slots.table if self.slots else None
        kept = [*self.runtime.flags.now, *([] if table is None else [table.scale, table.staging])]
        return [*kept, self.runtime.counter] if self.draws else kept

    @remembered
    def transfers(self, tokens: int) -> TransferPlan:
        """What travels, with so many rows of x on this rank."""
        return transfer_plan(self.recipe, self.style, self.tp, tokens)

    @remembered
    def transfers_back(self, dy_tokens: int) -> TransferPlan:
        """The same, with so many rows of dy on this rank."""
        return self.transfers(x_tokens_of(self.style, self.tp, dy_tokens))


def num_inputs(spec: LinearSpec) -> int:
    """How many tensors the layer is called with."""
    return 1 if spec.prologue is None else len(spec.prologue.reads)


def owners(members: tuple[str, ...], tensor: str) -> tuple[str, ...]:
    """The members that have this tensor; siblings share x, and so dx, which goes by the first one's name."""
    return members[:1] if tensor in ("x", "dx") else members


def _slot_name(recipe: Recipe, tensor: str, member: str, columnwise: bool) -> str:
    """The name of the delayed scale of one tensor; its orientations share it where their quantizers are equal."""
    quantizers = fit.quantizers(recipe, tensor)
    apart = columnwise and quantizers is not None and quantizers.rowwise != quantizers.columnwise
    return f"{member}.{tensor}{'.columnwise' * apart}"


def delayed_slots(recipe: Recipe, members: tuple[str, ...]) -> dict[str, tuple[str, SlotOptions]]:
    """Slot name -> (tensor, options) for all that a layer of these members casts with a delayed scale."""
    found: dict[str, tuple[str, SlotOptions]] = {}
    for tensor in (*OPERANDS, *RESULTS):
        quantizers = fit.quantizers(recipe, tensor)
        ways = [] if quantizers is None else [(False, quantizers.rowwise), (True, quantizers.columnwise)]
        for columnwise, quantizer in ways:
            options = caps_of(quantizer).slot
            if options is not None:
                names = [_slot_name(recipe, tensor, member, columnwise) for member in owners(members, tensor)]
                found |= {name: (tensor, options) for name in names}
    return found


def spec_of(name: Tensor | int) -> LinearSpec:
    """The spec of a ticket; of a kind, one that stands for all of it."""
    number = int(name)
    return _SPECS.get(number) or _OF_KIND[number]
