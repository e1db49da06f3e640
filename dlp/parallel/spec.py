"""LinearSpec: everything a parallel linear is besides its tensors, frozen and numbered.

The opaque ops take tensors and two names of a spec: its `ticket`, a tensor, says which spec a call runs; its `kind`, an
integer, is the same for all specs of equal style, recipe and tp, and is all that shapes depend on. torch.compile sees
the kind as a constant and the ticket as an input, so that equal blocks share one compiled graph. Changing a layer's
recipe or overlap makes a new spec, so a spec in flight (a forward whose backward is still to come) never changes.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.parallel import fit
from dlp.parallel.overlap import Overlap
from dlp.parallel.runtime import Runtime
from dlp.parallel.style import ParallelStyle
from dlp.quant.quantizer import SlotOptions, slot_options
from dlp.quant.recipe import OPERANDS, RESULTS, Operand, Recipe, both

_SPECS: dict[int, LinearSpec] = {}  # an intern table: specs are values and are never changed
_KINDS: dict[tuple[Any, ...], int] = {}
_NUMBERS = itertools.count()


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
    scales of a recipe that overrides the layer's own apart."""

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
    ticket: Tensor = field(init=False)
    kind: int = field(init=False)

    def __post_init__(self) -> None:
        fit.check(self.name, self.style, self.recipe)
        self._check_group(self.amax_group)
        if self.slots:
            self._check_group(self.runtime.amax_group)
        number = next(_NUMBERS)
        _SPECS[number] = self
        object.__setattr__(self, "ticket", torch.tensor(number, device="cpu"))  # whatever the default device is
        object.__setattr__(self, "kind", _KINDS.setdefault((self.style, self.recipe, self.tp), number))

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearSpec:
        """A copied layer has scales of its own."""
        return replace(self, runtime=copy.deepcopy(self.runtime, memo))

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
    def tp_group(self) -> ProcessGroup:
        assert self.group is not None, f"{self.name}: {self.style.name} communicates and needs a tp group"
        return self.group

    def quantizers(self, tensor: str) -> Operand | None:
        """Those of an operand x, w, dy; of a result y, dx, which both orientations share, or None if it has none."""
        if tensor in OPERANDS:
            operand: Operand = getattr(self.recipe, tensor)
            return operand
        quantizer = getattr(self.recipe, tensor)
        return None if quantizer is None else both(quantizer)

    def owners(self, tensor: str) -> tuple[str, ...]:
        """The members that have this tensor; siblings share x, and so dx, which goes by the first one's name."""
        return self.members[:1] if tensor in ("x", "dx") else self.members

    def slot_name(self, tensor: str, member: str, columnwise: bool) -> str:
        """The name of the delayed scale of one tensor; its orientations share it where their quantizers are equal."""
        quantizers = self.quantizers(tensor)
        apart = columnwise and quantizers is not None and quantizers.rowwise != quantizers.columnwise
        return f"{member}.{tensor}{'.columnwise' * apart}{self.variant}"

    @cached_property
    def slots(self) -> dict[str, tuple[str, SlotOptions]]:
        """Slot name -> (tensor, options) for all that this layer casts with a delayed scale."""
        found: dict[str, tuple[str, SlotOptions]] = {}
        for tensor in (*OPERANDS, *RESULTS):
            quantizers = self.quantizers(tensor)
            ways = [] if quantizers is None else [(False, quantizers.rowwise), (True, quantizers.columnwise)]
            for columnwise, quantizer in ways:
                options = slot_options(quantizer)
                if options is not None:
                    names = [self.slot_name(tensor, member, columnwise) for member in self.owners(tensor)]
                    found |= {name: (tensor, options) for name in names}
        return found

    @property
    def units(self) -> fit.Units:
        return fit.units(self.recipe)

    def derived(self, operand: str, tokens: int) -> bool:
        """The columnwise operand is the transposed rowwise one. `tokens`: of the matrix at hand."""
        return fit.derived(self.recipe, operand, tokens)

    def travels(self, operand: str, columnwise: bool, tokens: int) -> bool:
        """Whether the shards of x or dy, `tokens` each, concatenate to the quantized whole, so that they are gathered
        quantized; otherwise they travel in high precision and are quantized on arrival."""
        return fit.obstacle(self.recipe, operand, columnwise, tokens) is None

    def saves_x(self, tokens: int) -> bool:
        """Forward keeps x itself and no operand of it: wgrad reads it in high precision, or it travels so. `tokens`: of
        this rank."""
        if self.recipe.x.columnwise.format.keeps_source:
            return True
        columnwise = not self.derived("x", tokens)
        return self.style.gathers == "x" and not self.travels("x", columnwise, tokens)

    def saves_rowwise(self, tokens: int) -> bool:
        """x is kept for wgrad rowwise and transposed when wgrad consumes it: x itself, or an operand that travels
        again in backward and whose payload may be transposed on arrival."""
        return self.saves_x(tokens) or (self.derived("x", tokens) and self.style.gathers == "x")


def spec_of(name: Tensor | int) -> LinearSpec:
    """The spec of a ticket; of a kind, one that stands for all of it."""
    return _SPECS[int(name)]
