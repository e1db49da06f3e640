"""Weights of which each data-parallel rank keeps some rows: cast shard by shard, gathered as codes and scales.

    step boundary   every rank casts its rows [n, K]; amaxes that span rows are agreed over dp_shard, in one all-reduce
    forward         the casts are gathered rowwise                                       ─► fprop
    backward        they are gathered columnwise, or rowwise again and transposed here   ─► dgrad

What is gathered equals the cast of the whole weight, bit for bit; a weight whose shards would not (see `ways.obstacle`)
travels in high precision and is cast where it is used. Who moves the bytes is not known here: a transfer asks `depart`
for what to send in the pass that runs now, and hands `arrive` what came.

A pass may need more than its transfer brought: backward runs a forward again (activation checkpointing), or the weights
stay gathered from one pass to the next. The missing orientation is then gathered when it is read, and from the next time
on it travels with the other. A layer that runs under another recipe than its own (`dlp.autocast`, or a backward whose
forward came before a swap) gathers the values and casts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer
from dlp.comm.collectives import all_gather
from dlp.parallel.casts import COLUMNWISE, NOBODY, ROWWISE, Cast, Groups, Read, agrees
from dlp.parallel.linear.operands import quantize
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.model.session import in_backward
from dlp.parallel.weight.boundary import Values
from dlp.parallel.weight.local import LayerWeights, Use
from dlp.parallel.weight.ways import VALUES, Way, Ways, reads, travel
from dlp.quant.quantizer import ScaleSlot, Wanted, caps_of
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import SHARED, QuantizedTensor, Shape


@dataclass(frozen=True)
class Layout:
    """Where a weight is. shape: [N, K] on this tp rank. shard: hands out the rows of this rank, with zero rows up to the
    same number on all ranks. dtype: what shards are rounded to before their cast, and what they travel in otherwise.
    from_master: the cast reads them unrounded. refused: why they must not travel quantized."""

    shape: tuple[int, int]
    group: ProcessGroup
    shard: Callable[[], Tensor]
    dtype: torch.dtype
    from_master: bool = False
    refused: str | None = None


class ShardedWeight:
    """One weight of a layer. `travel`: how its orientations travel, None: as FSDP would by itself. `fresh`: the casts
    are those of the weight as it is."""

    managed = gathered = True

    def __init__(
        self,
        owner: LayerWeights,
        index: int,
        layout: Layout,
        stored: Callable[[], Tensor],
        hook: Callable[[bool], None],
    ) -> None:
        self.owner, self.index, self.layout, self._stored, self._hook = owner, index, layout, stored, hook
        self.travel: Ways | None = None
        self.parts: list[Tensor] = []  # nothing outlives a pass
        self.num_rowwise = 0
        self.why: str | None = None
        self.told: str | None = None
        self.fresh = False
        self.mine: dict[Way, QuantizedTensor] = {}
        self._arrived: dict[Way, tuple[Tensor, ...]] = {}
        self._more: dict[bool, list[Way]] = {False: [], True: []}
        self._backward = False
        self.decide()

    @property
    def bound(self) -> BoundSpec:
        return self.owner.layer.bound

    @property
    def name(self) -> str:
        return self.bound.spec.members[self.index]

    @property
    def stored(self) -> Tensor:
        return self._stored()

    def check(self, recipe: Recipe) -> None:
        """What cannot travel as a recipe says travels as values."""

    def serves(self, spec: LinearSpec) -> bool:
        return False

    def drop(self, *, retyped: bool = False) -> None:
        """Rows are cast anew before they are next gathered, and may travel otherwise. The dtype of x is nothing to them."""
        if not retyped:
            self._hook(self.decide())

    def shown(self, *, written: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def take_grad(self, wgrad: Callable[[], Tensor], *, may_wait: bool) -> Tensor:
        """FSDP reduces what backward returns, and passes over parameters without a gradient."""
        return wgrad()

    def casts(self, values: Values) -> list[Cast]:
        """Of this rank's rows, in the order of `reads`."""
        layout, bound = self.layout, self.bound
        if not self.reads:
            return []
        rows = layout.shard().detach()
        dtype = rows.dtype if layout.from_master else layout.dtype
        matrix = values.of(self.name, rows, dtype, (rows.shape[0], rows.shape[1]))
        flag, made = bound.session.flag(bound.spec.members, "w", self.name, matrix.device), []
        for ways in self.reads:
            row, col = (None if way is None else way.quantizer for way in ways)
            out, out_t = (None if way is None else self.mine.get(way) for way in ways)
            read = Read(row, col, (self._agree(ways[0]), self._agree(ways[1])))
            made.append(Cast(read, matrix, self._slot(ways[0] or ways[1]), (), (out, out_t), flag))
        return made

    def _agree(self, way: Way | None) -> Groups:
        """Who agrees on what one cast observes: dp_shard, where it spans the rows of other ranks, then a group with a wider
        say."""
        if way is None:
            return NOBODY
        spec = self.bound.spec
        own_group = spec.amax_group is not None
        wider = agrees(spec.style, spec.recipe, "w", way.quantizer, way.flipped, own_group=own_group)
        return self.layout.group if way.spans_rows else None, (spec.amax_group or spec.group) if wider else None

    def _slot(self, way: Way | None) -> ScaleSlot | None:
        """The delayed scale that one cast reads, if it has one."""
        if way is None or caps_of(way.quantizer).slot is None:
            return None
        return self.bound.session.slot(self.bound.slot_name("w", self.name, way.columnwise), True)

    def staged(self) -> tuple[ProcessGroup, list[Tensor]] | None:
        """Those of this rank's rows, where the ranks that share delayed scales are not all those that share the weight."""
        slots = [slot for row, col in self.reads if (slot := self._slot(row or col)) is not None]
        sharing, keeping = self.bound.session.amax_group, self.layout.group
        if sharing is not None and self.bound.spec.recipe.reduce_amax:
            if set(dist.get_process_group_ranks(keeping)) <= set(dist.get_process_group_ranks(sharing)):
                return None
        return (keeping, [slot.staging for slot in slots]) if slots else None

    def decide(self) -> bool:
        """Read the layer's recipe, which is new or unchanged; whether the weight travels otherwise now. Casts are made
        anew in any case."""
        recipe, layout, before = self.bound.spec.recipe, self.layout, self.travel
        own_group = self.bound.spec.amax_group is not None
        ways, why = travel(recipe, layout.shape, layout.group.size(), refused=layout.refused, own_group=own_group)
        self.fresh, self.mine, self.why = False, {}, why
        self.travel = (VALUES, VALUES) if why is not None and layout.from_master else ways
        if self.travel != before:
            self._arrived, self._more = {}, {False: [], True: []}
        return self.travel != before

    @property
    def reads(self) -> list[tuple[Way | None, Way | None]]:
        """What the step boundary casts."""
        return reads(self.travel or ())

    def rows(self, as_stored: bool) -> Tensor:
        """This rank's rows, as they are or rounded."""
        values = self.layout.shard().detach()
        return values if as_stored else values.to(self.layout.dtype)

    def take(self, made: Sequence[Wanted]) -> None:
        """What the casts of `reads` have made."""
        for ways, operands in zip(self.reads, made, strict=True):
            self.mine |= {w: q for w, q in zip(ways, operands, strict=True) if w is not None and q is not None}

    def _cast(self, way: Way) -> QuantizedTensor:
        if not way.format.keeps_source:
            return self.mine[way]
        return way.quantizer.cast(self.rows(self.layout.from_master and way is VALUES), None)

    def depart(self) -> tuple[tuple[Tensor, ...], tuple[Way, ...]]:
        """What this rank sends in the pass that runs now, and which ways that are."""
        assert self.travel is not None
        self._backward = in_backward()
        ways = tuple(dict.fromkeys((self.travel[self._backward], *self._more[self._backward])))
        return tuple(part for way in ways for part in self._moving(way)), ways

    def _moving(self, way: Way) -> list[Tensor]:
        """The parts of the shard that travel; FP8 as bytes, since gloo carries no such type."""
        parts = zip(self._cast(way).parts, way.dims, strict=True)
        return [_as_wire(part) for part, dim in parts if dim is not SHARED]

    def arrive(self, received: Sequence[Tensor], ways: Sequence[Way]) -> None:
        """What came of them: each moving part of all ranks along its first dimension. Valid until the next `depart`."""
        rest = iter(received)
        self._arrived = {way: tuple(next(rest) for dim in way.dims if dim is not SHARED) for way in ways}

    def rowwise(self, use: Use) -> QuantizedTensor:
        return self._read(use, columnwise=False)

    def columnwise(self, use: Use) -> QuantizedTensor:
        return self._read(use, columnwise=True)

    def _read(self, use: Use, *, columnwise: bool) -> QuantizedTensor:
        """One operand of the whole weight. RuntimeError where FSDP has freed what came."""
        bound, layer = use.bound, self.owner.layer
        if bound is not layer.bound and (self.travel is not None or bound not in layer.bounds()):
            bound.session.note(
                f"layers that run under {bound.spec.recipe}, not their own recipe, gather their weights once more"
            )
            return self._at_use(use, self._fetch(VALUES).payload, columnwise)
        if self.travel is None:
            self._check_there(use.value)
            return self._at_use(use, use.value, columnwise)
        if VALUES in self.travel and self.why is not None:
            return self._at_use(use, self._operand(VALUES).payload, columnwise)
        way = self.travel[columnwise]
        made = self._operand(way)
        return _kept_in(made.transpose() if columnwise and not way.flipped else made, use.dtype)

    def _at_use(self, use: Use, values: Tensor, columnwise: bool) -> QuantizedTensor:
        """The whole weight, cast here."""
        values = values if self.layout.from_master else values.to(use.dtype)
        orientations = COLUMNWISE if columnwise else ROWWISE
        (made,) = quantize(use.bound, "w", [values], orientations, members=[self.name], record=use.record)
        return _kept_in(made.at(columnwise=columnwise), use.dtype)

    def _operand(self, way: Way) -> QuantizedTensor:
        """What arrived, as one operand; gathered now where it did not travel."""
        if way not in self._arrived:
            self._more[self._backward].append(way)
            return self._fetch(way)
        for part in self._arrived[way]:
            self._check_there(part)
        received, world = iter(self._arrived[way]), self.layout.group.size()
        mine = self._cast(way) if SHARED in way.dims else None
        parts = [
            mine.parts[i]
            if dim is SHARED and mine
            else _join(next(received), world, dim).view(part.dtype or self._dtype(way))
            for i, (part, dim) in enumerate(zip(way.format.parts, way.dims, strict=True))
        ]
        return self._trim(way, parts)

    def _check_there(self, gathered: Tensor) -> None:
        """Kernels would read memory that is no more."""
        if gathered.numel() and not gathered.untyped_storage().size():
            raise RuntimeError(
                f"{self.name}: FSDP has freed its gathered weight, which this pass reads; backward must begin at what the "
                f"module returned that was given to fully_shard, or that must not reshard (reshard_after_forward=False)"
            )

    def _dtype(self, way: Way) -> torch.dtype:
        return self.layout.shard().dtype if self.layout.from_master and way is VALUES else self.layout.dtype

    def _fetch(self, way: Way) -> QuantizedTensor:
        """Gather one orientation now."""
        with observer.label(direction="weights", precision="" if way.format.keeps_source else way.format.name):
            return self._trim(way, all_gather(self._cast(way).parts, way.dims, self.layout.group).wait())

    def _trim(self, way: Way, parts: Sequence[Tensor]) -> QuantizedTensor:
        """Without the zero rows behind the last shard."""
        shapes = way.format.part_shapes(way.of(self.layout.shape))
        return QuantizedTensor(
            way.format, tuple(_first(part, shape) for part, shape in zip(parts, shapes, strict=True))
        )


def _kept_in(q: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """A high-precision operand in the dtype that GEMMs multiply."""
    return QuantizedTensor(q.format, (q.payload.to(dtype),)) if q.format.keeps_source else q


def _as_wire(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8) if part.itemsize == 1 else part.contiguous()


def _join(received: Tensor, world: int, dim: int | None) -> Tensor:
    """[R*s0, ...] as it arrived -> the R pieces concatenated along `dim`."""
    return torch.cat(received.unflatten(0, (world, -1)).unbind(0), dim) if dim else received


def _first(part: Tensor, shape: Shape) -> Tensor:
    return part if part.shape == shape else part[tuple(slice(size) for size in shape)]
