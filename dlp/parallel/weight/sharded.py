"""Weights of which each data-parallel rank keeps some rows: cast shard by shard, gathered as codes and scales.

    step boundary   every rank casts its rows [n, K]; amaxes that span rows are agreed over dp_shard, in one all-reduce
    forward         the casts are gathered rowwise                                       ─► fprop
    backward        they are gathered columnwise, or rowwise again and transposed here   ─► dgrad

What is gathered equals the cast of the whole weight, bit for bit; a weight whose shards would not (see `weight_obstacle`)
travels in high precision and is cast where it is used. Who moves the bytes is not known here: a transfer asks `depart`
for what to send in the pass that runs now, and hands `arrive` what came.

A pass may need more than its transfer brought: backward runs a forward again (activation checkpointing), or the weights
stay gathered from one pass to the next. The missing orientation is then gathered when it is read, and from the next time
on it travels with the other. A layer that runs under another recipe than its own (`dlp.autocast`, or a backward whose
forward came before a swap) gathers the values and casts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer
from dlp.comm.collectives import all_gather
from dlp.parallel.casts import COLUMNWISE, NOBODY, ROWWISE, Cast, Groups, Read, agrees
from dlp.parallel.linear.state import quantize
from dlp.parallel.model.session import in_backward
from dlp.parallel.style import ParallelStyle
from dlp.parallel.weight.base import LayerWeights, MemberWeight, Use, Values
from dlp.quant.quantizer import KeepHighPrecision, Quantizer, ScaleSlot, Wanted, caps_of, one_read
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.tensor import SHARED, UNSAID, Format, QuantizedTensor, Shape

# ---- how orientations travel: for layers, and for the plan that predicts it


@dataclass(frozen=True)
class ShardLayout:
    """How one orientation of a weight travels whose rows are spread over ranks.

    quantizer    casts the shard [n, K] of a rank
    transposed   it casts the transposed shard; else a columnwise operand is the gathered one, transposed
    columnwise   the orientation; equal layouts of both are one cast and one transfer
    """

    quantizer: Quantizer
    transposed: bool = False
    columnwise: bool = field(default=False, compare=False)

    @property
    def format(self) -> Format:
        return self.quantizer.format

    @property
    def dims(self) -> list[int | None]:
        """Along which dimension each part of the shards concatenates."""
        return self.format.moves_along(int(self.transposed))

    @property
    def spans_rows(self) -> bool:
        """What the quantizer observes covers rows of other ranks too."""
        return int(self.transposed) in self.quantizer.reduces

    def of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the matrix that is cast, from that of w."""
        return (shape[1], shape[0]) if self.transposed else shape


VALUES = ShardLayout(KeepHighPrecision())
ShardLayouts = tuple[ShardLayout, ShardLayout]  # rowwise, columnwise
ShardRead = tuple[ShardLayout | None, ShardLayout | None]  # of the rows of a shard, of its columns


def shard_layouts(w: Operand) -> ShardLayouts:
    """Those of the rowwise and the columnwise operand."""
    columnwise = w.columnwise
    return ShardLayout(w.rowwise), ShardLayout(columnwise, not columnwise.format.transposable, True)


def shard_reads(layouts: Iterable[ShardLayout]) -> list[ShardRead]:
    """The casts of a shard that make these: of its rows, of its columns, or of both in one read."""
    chosen = [each for each in dict.fromkeys(layouts) if not each.format.keeps_source]
    if len(chosen) == 2 and not chosen[0].transposed and chosen[1].transposed:
        if one_read(chosen[0].quantizer, chosen[1].quantizer) is not None:
            return [(chosen[0], chosen[1])]
    return [(None, each) if each.transposed else (each, None) for each in chosen]


def read_of(layouts: ShardRead, groups: tuple[Groups, Groups] = (NOBODY, NOBODY)) -> Read:
    """One of `shard_reads` as a cast makes it."""
    row, col = (None if layout is None else layout.quantizer for layout in layouts)
    return Read(row, col, groups)


def agreed_over(layout: ShardLayout | None, style: ParallelStyle, recipe: Recipe, own_group: bool) -> tuple[bool, bool]:
    """Who has a say in what one cast of rows observes: other ranks of dp_shard, where it spans their rows; those of a wider
    group after them. `own_group`: of `agrees`."""
    if layout is None:
        return False, False
    return layout.spans_rows, agrees(style, recipe, "w", layout.quantizer, layout.transposed, own_group=own_group)


def weight_obstacle(recipe: Recipe, shape: tuple[int, int], ranks: int, own_group: bool = False) -> str | None:
    """Why the rows of a weight [N, K] (of one tp rank) over `ranks` cannot be cast apart; None if they can.

    own_group: the user's own group agrees on what was observed.
    """
    rows, uneven = -(-shape[0] // ranks), shape[0] % ranks > 0
    _, *multiples = recipe.units
    if any(size % unit for size, unit in zip(shape, multiples, strict=True)):
        return f"its {shape[0]} x {shape[1]} are padded to multiples of {multiples[0]} x {multiples[1]}"
    for layout in shard_layouts(recipe.w):
        fmt = layout.format
        if UNSAID in layout.dims:
            return f"the parts of {fmt.name} do not say how they concatenate"
        if caps_of(layout.quantizer).origin:
            return f"{fmt.name} is rounded stochastically"
        if own_group and layout.quantizer.reduces and not layout.spans_rows:
            return f"its amax group would mix the scales of different rows of {fmt.name}"
        if uneven and not _keeps_shape(layout, (rows, shape[1])):
            return (
                f"{shape[0]} rows over {ranks} ranks leave shards of different sizes, and {fmt.name} has parts to move"
            )
        if not uneven and not fmt.concatenates(int(layout.transposed), rows):
            return f"{rows} rows a rank are no multiple of the {fmt.block[layout.transposed]} in a block of {fmt.name}"
    return None


def weight_layouts(
    recipe: Recipe, shape: tuple[int, int], ranks: int, *, refused: str | None, own_group: bool
) -> tuple[ShardLayouts | None, str | None]:
    """How the orientations of a weight [N, K] (of one tp rank) travel over `ranks`, None: as values; and why they do so
    where the recipe quantizes them. `refused`: why they must;
    `own_group`: of `weight_obstacle`."""
    if recipe.w.keeps_source:
        return None, None
    why = refused or weight_obstacle(recipe, shape, ranks, own_group)
    return (shard_layouts(recipe.w) if why is None else None), why


def _keeps_shape(layout: ShardLayout, shape: tuple[int, int]) -> bool:
    """All that moves has the shape of the weight, so that shards may be padded."""
    shapes = zip(layout.format.part_shapes(shape), layout.dims, strict=True)
    return not layout.transposed and all(part == shape for part, dim in shapes if dim is not SHARED)


# ---- a weight


@dataclass(frozen=True)
class RowShards:
    """Where a weight is. shape: [N, K] on this tp rank. shard: hands out the rows of this rank, with zero rows up to the
    same number on all ranks. dtype: what shards are rounded to before their cast, and what they travel in otherwise.
    from_master: the cast reads them unrounded. refused: why they must not travel quantized."""

    shape: tuple[int, int]
    group: ProcessGroup
    shard: Callable[[], Tensor]
    dtype: torch.dtype
    from_master: bool = False
    refused: str | None = None


class ShardedWeight(MemberWeight):
    """One weight of a layer. `travel`: how its orientations travel, None: as FSDP would by itself. `fresh`: the casts
    are those of the weight as it is."""

    managed = gathered = True

    def __init__(
        self,
        owner: LayerWeights,
        index: int,
        rows: RowShards,
        stored: Callable[[], Tensor],
        hook: Callable[[bool], None],
    ) -> None:
        super().__init__(owner, index)  # without parts, since nothing outlives a pass
        self.rows, self._stored, self._hook = rows, stored, hook
        self.travel: ShardLayouts | None = None
        self.mine: dict[ShardLayout, QuantizedTensor] = {}
        self._arrived: dict[ShardLayout, tuple[Tensor, ...]] = {}
        self._more: dict[bool, list[ShardLayout]] = {False: [], True: []}
        self._backward = False
        self.decide()

    @property
    def stored(self) -> Tensor:
        return self._stored()

    def drop(self, *, retyped: bool = False) -> None:
        """Rows are cast anew before they are next gathered, and may travel otherwise. The dtype of x is nothing to them."""
        if not retyped:
            self._hook(self.decide())

    def casts(self, values: Values) -> list[Cast]:
        """Of this rank's rows, in the order of `reads`."""
        if not self.reads:
            return []
        bound, mine = self.bound, self.rows.shard().detach()
        dtype = mine.dtype if self.rows.from_master else self.rows.dtype
        matrix = values.of(self.name, mine, dtype, (mine.shape[0], mine.shape[1]))
        flag, made = bound.session.flag(bound.spec.members, "w", self.name, matrix.device), []
        for layouts in self.reads:
            out, out_t = (None if each is None else self.mine.get(each) for each in layouts)
            read = read_of(layouts, (self._agree(layouts[0]), self._agree(layouts[1])))
            made.append(Cast(read, matrix, self._slot(layouts[0] or layouts[1]), (), (out, out_t), flag))
        return made

    def _agree(self, layout: ShardLayout | None) -> Groups:
        """Who agrees on what one cast observes: see `agreed_over`."""
        spec = self.bound.spec
        shards, wider = agreed_over(layout, spec.style, spec.recipe, spec.amax_group is not None)
        return self.rows.group if shards else None, (spec.amax_group or spec.group) if wider else None

    def _slot(self, layout: ShardLayout | None) -> ScaleSlot | None:
        """The delayed scale that one cast reads, if it has one."""
        if layout is None or caps_of(layout.quantizer).slot is None:
            return None
        return self.bound.session.slot(self.bound.spec.slot_name("w", self.name, layout.columnwise), True)

    def staged(self) -> tuple[ProcessGroup, list[Tensor]] | None:
        """Those of this rank's rows, where the ranks that share delayed scales are not all those that share the weight."""
        slots = [slot for row, col in self.reads if (slot := self._slot(row or col)) is not None]
        sharing, keeping = self.bound.session.amax_group, self.rows.group
        if sharing is not None and self.bound.spec.recipe.reduce_amax:
            if set(dist.get_process_group_ranks(keeping)) <= set(dist.get_process_group_ranks(sharing)):
                return None
        return (keeping, [slot.staging for slot in slots]) if slots else None

    def decide(self) -> bool:
        """Read the layer's recipe, which is new or unchanged; whether the weight travels otherwise now. Casts are made
        anew in any case."""
        recipe, rows, before = self.bound.spec.recipe, self.rows, self.travel
        own_group = self.bound.spec.amax_group is not None
        layouts, why = weight_layouts(recipe, rows.shape, rows.group.size(), refused=rows.refused, own_group=own_group)
        self.fresh, self.mine, self.why = False, {}, why
        self.travel = (VALUES, VALUES) if why is not None and rows.from_master else layouts
        if self.travel != before:
            self._arrived, self._more = {}, {False: [], True: []}
        return self.travel != before

    @property
    def reads(self) -> list[ShardRead]:
        """What the step boundary casts."""
        return shard_reads(self.travel or ())

    def _values(self, as_stored: bool) -> Tensor:
        """This rank's rows, as they are or rounded."""
        values = self.rows.shard().detach()
        return values if as_stored else values.to(self.rows.dtype)

    def take(self, made: Sequence[Wanted]) -> None:
        """What the casts of `reads` have made."""
        for layouts, operands in zip(self.reads, made, strict=True):
            self.mine |= {w: q for w, q in zip(layouts, operands, strict=True) if w is not None and q is not None}

    def _cast(self, layout: ShardLayout) -> QuantizedTensor:
        if not layout.format.keeps_source:
            return self.mine[layout]
        return layout.quantizer.cast(self._values(self.rows.from_master and layout is VALUES), None)

    def depart(self) -> tuple[tuple[Tensor, ...], tuple[ShardLayout, ...]]:
        """What this rank sends in the pass that runs now, and in which layouts."""
        assert self.travel is not None
        self._backward = in_backward()
        layouts = tuple(dict.fromkeys((self.travel[self._backward], *self._more[self._backward])))
        return tuple(part for layout in layouts for part in self._moving(layout)), layouts

    def _moving(self, layout: ShardLayout) -> list[Tensor]:
        """The parts of the shard that travel; FP8 as bytes, since gloo carries no such type."""
        parts = zip(self._cast(layout).parts, layout.dims, strict=True)
        return [_as_wire(part) for part, dim in parts if dim is not SHARED]

    def arrive(self, received: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> None:
        """What came of them: each moving part of all ranks along its first dimension. Valid until the next `depart`."""
        rest = iter(received)
        self._arrived = {layout: tuple(next(rest) for dim in layout.dims if dim is not SHARED) for layout in layouts}

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
        layout = self.travel[columnwise]
        made = self._operand(layout)
        return _kept_in(made.transpose() if columnwise and not layout.transposed else made, use.dtype)

    def _at_use(self, use: Use, values: Tensor, columnwise: bool) -> QuantizedTensor:
        """The whole weight, cast here."""
        values = values if self.rows.from_master else values.to(use.dtype)
        orientations = COLUMNWISE if columnwise else ROWWISE
        (made,) = quantize(use.bound, "w", [values], orientations, members=[self.name], record=use.record)
        return _kept_in(made.at(columnwise=columnwise), use.dtype)

    def _operand(self, layout: ShardLayout) -> QuantizedTensor:
        """What arrived, as one operand; gathered now where it did not travel."""
        if layout not in self._arrived:
            self._more[self._backward].append(layout)
            return self._fetch(layout)
        for part in self._arrived[layout]:
            self._check_there(part)
        received, world = iter(self._arrived[layout]), self.rows.group.size()
        mine = self._cast(layout) if SHARED in layout.dims else None
        parts = [
            mine.parts[i]
            if dim is SHARED and mine
            else _join(next(received), world, dim).view(part.dtype or self._dtype(layout))
            for i, (part, dim) in enumerate(zip(layout.format.parts, layout.dims, strict=True))
        ]
        return self._trim(layout, parts)

    def _check_there(self, gathered: Tensor) -> None:
        """Kernels would read memory that is no more."""
        if gathered.numel() and not gathered.untyped_storage().size():
            raise RuntimeError(
                f"{self.name}: FSDP has freed its gathered weight, which this pass reads; backward must begin at what the "
                f"module returned that was given to fully_shard, or that must not reshard (reshard_after_forward=False)"
            )

    def _dtype(self, layout: ShardLayout) -> torch.dtype:
        return self.rows.shard().dtype if self.rows.from_master and _holds_values(layout.format) else self.rows.dtype

    def _fetch(self, layout: ShardLayout) -> QuantizedTensor:
        """Gather one orientation now."""
        with observer.label(direction="weights", precision="" if layout.format.keeps_source else layout.format.name):
            return self._trim(layout, all_gather(self._cast(layout).parts, layout.dims, self.rows.group).wait())

    def _trim(self, layout: ShardLayout, parts: Sequence[Tensor]) -> QuantizedTensor:
        """Without the zero rows behind the last shard."""
        shapes = layout.format.part_shapes(layout.of(self.rows.shape))
        return QuantizedTensor(
            layout.format, tuple(_first(part, shape) for part, shape in zip(parts, shapes, strict=True))
        )


def _kept_in(q: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """A high-precision operand in the dtype that GEMMs multiply."""
    if not _holds_values(q.format) or q.payload.dtype == dtype:
        return q
    return QuantizedTensor(q.format, (q.payload.to(dtype), *q.parts[1:]))


def _holds_values(fmt: Format) -> bool:
    """In the dtype of their source."""
    return fmt.parts[0].dtype is None


def _as_wire(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8) if part.itemsize == 1 else part.contiguous()


def _join(received: Tensor, world: int, dim: int | None) -> Tensor:
    """[R*s0, ...] as it arrived -> the R pieces concatenated along `dim`."""
    return torch.cat(received.unflatten(0, (world, -1)).unbind(0), dim) if dim else received


def _first(part: Tensor, shape: Shape) -> Tensor:
    return part if part.shape == shape else part[tuple(slice(size) for size in shape)]
