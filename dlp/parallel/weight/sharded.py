"""Weights whose rows FSDP shards over dp_shard: each rank casts its shard, and FSDP gathers codes and scales.

    w [N, K]       weight of one tp rank
    shard [n, K]   rows of w on one of D ranks, n = ceil(N / D)

    step boundary   each rank casts its shard; amaxes that span rows are agreed over dp_shard, in one all-reduce
    forward         rowwise operands are gathered                                                ─► w [N, K]    for fprop
    backward        columnwise operands are gathered, or rowwise operands, which are transposed  ─► w.T [K, N]  for dgrad

The gathered operand is bitwise equal to the cast of the full weight. Weights for which this is not possible (`weight_obstacle`)
are gathered in high precision and cast in each pass. FSDP's hooks (`dlp.parallel.weight.fsdp2`) run the gather: before the
gather they call `depart`, which returns this rank's parts, and after the gather `arrive` with the parts of all ranks.

A pass may read an orientation that FSDP did not gather for this pass: with activation checkpointing a backward runs forwards
again, and weights may stay gathered from forward to backward. The orientation is then gathered when it is read, and from the
next pass on together with the other orientation. A layer that runs under another spec than `LayerState.bound` (in
`dlp.autocast`, or in a backward whose forward ran before a recipe change) gathers the values and casts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import observer
from dlp.comm.collectives import all_gather
from dlp.parallel.casts import COLUMNWISE, NOBODY, ROWWISE, Cast, Groups, Read, agrees
from dlp.parallel.linear.quantize import quantize
from dlp.parallel.linear.state import LayerWeights, Use, Weight
from dlp.parallel.linear.step import in_backward
from dlp.parallel.style import ParallelStyle
from dlp.parallel.weight.base import Values
from dlp.quant.quantizer import KeepHighPrecision, Quantizer, ScaleSlot, Wanted, caps_of, one_read
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.tensor import SHARED, UNSAID, Format, QuantizedTensor, Shape, as_bytes

# ---- how each orientation is cast and gathered; also used by the prediction of bytes


@dataclass(frozen=True)
class ShardLayout:
    """How one orientation of a weight with sharded rows is cast and gathered.

    quantizer    casts the shard [n, K] of a rank, or the transposed shard [K, n]
    transposed   whether the quantizer casts the transposed shard. If the payload of the format can be transposed, a columnwise
                 operand is cast and gathered as [n, K], and transposed afterwards
    columnwise   the orientation; not compared, so that equal layouts of both orientations share one cast and one gather
    """

    quantizer: Quantizer
    transposed: bool = False
    columnwise: bool = field(default=False, compare=False)

    @cached_property
    def format(self) -> Format:
        return self.quantizer.format

    @cached_property
    def dims(self) -> list[int | None]:
        """For each part the dimension along which shards concatenate. SHARED: the part is equal on all ranks and not
        gathered."""
        return self.format.moves[int(self.transposed)]

    @property
    def spans_rows(self) -> bool:
        """Whether one scale spans the rows of all ranks."""
        return int(self.transposed) in self.quantizer.reduces

    def of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the matrix that is cast, from the shape of w or of a shard."""
        return (shape[1], shape[0]) if self.transposed else shape


VALUES = ShardLayout(KeepHighPrecision())  # the weight itself, in high precision
ShardLayouts = tuple[ShardLayout, ShardLayout]  # rowwise, columnwise
# Layouts that one read of a shard produces: (cast of the shard [n, K], cast of the transposed shard [K, n]); None: no such cast
ShardRead = tuple[ShardLayout | None, ShardLayout | None]


def shard_layouts(w: Operand) -> ShardLayouts:
    """Return the layouts of the rowwise and the columnwise operand of w."""
    columnwise = w.columnwise
    return ShardLayout(w.rowwise), ShardLayout(columnwise, not columnwise.format.transposable, True)


def shard_reads(layouts: Iterable[ShardLayout]) -> list[ShardRead]:
    """Return the reads of a shard that produce these layouts: one read for both if the quantizers support this. Layouts in high
    precision need no read."""
    chosen = [each for each in dict.fromkeys(layouts) if not each.format.keeps_source]
    if len(chosen) == 2 and not chosen[0].transposed and chosen[1].transposed:
        if one_read(chosen[0].quantizer, chosen[1].quantizer) is not None:
            return [(chosen[0], chosen[1])]
    return [(None, each) if each.transposed else (each, None) for each in chosen]


def read_of(layouts: ShardRead, groups: tuple[Groups, Groups] = (NOBODY, NOBODY)) -> Read:
    """Convert a read of `shard_reads` to a `Read` of the cast engine. `groups`: ranks that agree on amaxes, for each layout."""
    row, col = (None if layout is None else layout.quantizer for layout in layouts)
    return Read(row, col, groups)


def agreed_over(layout: ShardLayout | None, style: ParallelStyle, recipe: Recipe, own_group: bool) -> tuple[bool, bool]:
    """Return two booleans for one layout: whether the ranks of dp_shard agree on amaxes, because a scale spans their rows; and
    whether the ranks of the layer's amax group, or of tp, then agree as well (`agrees`)."""
    if layout is None:
        return False, False
    return layout.spans_rows, agrees(style, recipe, "w", layout.quantizer, layout.transposed, own_group=own_group)


def weight_obstacle(recipe: Recipe, shape: tuple[int, int], ranks: int, own_group: bool = False) -> str | None:
    """Return the reason why shards of a weight [N, K] (of one tp rank) over `ranks` ranks cannot be cast separately, with the
    same result as a cast of the full weight. None: they can be cast separately.

    own_group: whether the user named an amax group, which agrees on every scale.
    """
    rows, uneven = -(-shape[0] // ranks), shape[0] % ranks > 0
    _, *multiples = recipe.units
    if any(size % unit for size, unit in zip(shape, multiples, strict=True)):
        return f"the shape {shape[0]} x {shape[1]} is padded to multiples of {multiples[0]} x {multiples[1]}"
    for layout in shard_layouts(recipe.w):
        fmt = layout.format
        if UNSAID in layout.dims:
            return f"the parts of {fmt.name} do not declare how they concatenate"
        if caps_of(layout.quantizer).origin:
            return f"{fmt.name} is rounded stochastically"
        if own_group and layout.quantizer.reduces and not layout.spans_rows:
            return f"the amax group would mix the scales of different rows of {fmt.name}"
        if uneven and not _keeps_shape(layout, (rows, shape[1])):
            return (
                f"{shape[0]} rows over {ranks} ranks leave shards of different sizes, which the parts of {fmt.name} do "
                f"not support"
            )
        if not uneven and not fmt.concatenates(int(layout.transposed), rows):
            return f"{rows} rows per rank are not a multiple of the {fmt.block[layout.transposed]} in a block of {fmt.name}"
    return None


def weight_layouts(
    recipe: Recipe, shape: tuple[int, int], ranks: int, *, refused: str | None, own_group: bool
) -> tuple[ShardLayouts | None, str | None]:
    """Return (layouts, reason) for a weight [N, K] (of one tp rank) that is gathered over `ranks` ranks.

    (layouts, None)   the weight is gathered quantized, in these layouts
    (None, reason)    the weight is gathered in high precision, although the recipe quantizes w
    (None, None)      the recipe does not quantize w

    `refused`: a reason against a quantized gather that does not depend on the recipe; `own_group`: see `weight_obstacle`."""
    if recipe.w.keeps_source:
        return None, None
    why = refused or weight_obstacle(recipe, shape, ranks, own_group)
    return (shard_layouts(recipe.w) if why is None else None), why


def _keeps_shape(layout: ShardLayout, shape: tuple[int, int]) -> bool:
    """Whether the shard is not transposed and all gathered parts have the shape of the shard, so that shards can be padded to
    equal numbers of rows."""
    shapes = zip(layout.format.part_shapes(shape), layout.dims, strict=True)
    return not layout.transposed and all(part == shape for part, dim in shapes if dim is not SHARED)


# ---- a weight


@dataclass(frozen=True)
class RowShards:
    """The parameter of a sharded weight.

    shape         [N, K] of the weight on this tp rank
    group         the dp_shard group
    shard         function that returns this rank's rows [n, K], zero-padded to the same n on all ranks
    dtype         dtype to which shards are rounded before a cast or a gather in high precision
    from_master   if true, shards are cast, or gathered in high precision, in the dtype in which they are stored
    refused       reason why the weight must not be gathered quantized; None: it can be gathered quantized
    """

    shape: tuple[int, int]
    group: ProcessGroup
    shard: Callable[[], Tensor]
    dtype: torch.dtype
    from_master: bool = False
    refused: str | None = None


class ShardedWeight(Weight):
    """A weight whose rows FSDP shards.

    rows      the parameter
    layouts   layouts of both orientations that FSDP's hooks gather; None: FSDP gathers the values without hooks
    own       operands of this rank's shard that the step boundary cast, by layout
    fresh     whether the step boundary has cast the current values
    """

    managed = gathered = True

    def __init__(
        self,
        owner: LayerWeights,
        index: int,
        rows: RowShards,
        stored: Callable[[], Tensor],
        hook: Callable[[bool], None],
    ) -> None:
        super().__init__(owner, index)  # `parts` stay empty, because gathered operands exist only during a pass
        self.rows, self._stored, self._hook = rows, stored, hook
        self.layouts: ShardLayouts | None = None
        self.own: dict[ShardLayout, QuantizedTensor] = {}
        self._arrived: dict[ShardLayout, tuple[Tensor, ...]] = {}
        # for forward (False) and backward (True), layouts that earlier passes read besides the layout of the pass's own GEMM
        self._more: dict[bool, list[ShardLayout]] = {False: [], True: []}
        self._backward = False  # whether the last gather was in a backward
        self.decide()

    @property
    def stored(self) -> Tensor:
        return self._stored()

    @property
    def no_values(self) -> str:
        """End of the error message of a placeholder, see `Valueless`."""
        return (
            "FSDP has gathered as codes only: call reshard() of the modules that were given to dlp.fully_shard and "
            "use their sharded parameters, or gather values (dlp.fully_shard(..., quantized_gather=False))"
        )

    def drop(self, *, retyped: bool = False) -> None:
        """Discard the casts: shards are cast again before the next gather, possibly in other layouts.

        With `retyped` (the dtype of x changed) do nothing: casts of shards do not depend on the dtype of x."""
        if not retyped:
            self._hook(self.decide())

    def casts(self, values: Values) -> list[Cast]:
        """Return the casts of this rank's shard, in the order of `reads`."""
        if not self.reads:
            return []
        bound, shard = self.bound, self.rows.shard().detach()
        dtype = shard.dtype if self.rows.from_master else self.rows.dtype
        matrix = values.of(self.name, shard, dtype, (shard.shape[0], shard.shape[1]))
        flag, casts = bound.session.flag(bound.spec.members, "w", self.name, matrix.device), []
        for layouts in self.reads:
            out, out_t = (None if each is None else self.own.get(each) for each in layouts)
            read = read_of(layouts, (self._groups(layouts[0]), self._groups(layouts[1])))
            casts.append(Cast(read, matrix, self._slot(layouts[0] or layouts[1]), (), (out, out_t), flag))
        return casts

    def _groups(self, layout: ShardLayout | None) -> Groups:
        """Return the groups that agree on the amaxes of one layout, see `agreed_over`."""
        spec = self.bound.spec
        shards, wider = agreed_over(layout, spec.style, spec.recipe, spec.amax_group is not None)
        return self.rows.group if shards else None, (spec.amax_group or spec.group) if wider else None

    def _slot(self, layout: ShardLayout | None) -> ScaleSlot | None:
        """Return the slot of the delayed scale of one layout; None: its scale is not delayed."""
        if layout is None or caps_of(layout.quantizer).slot is None:
            return None
        spec = self.bound.spec
        return self.bound.session.slot(spec.slot_name("w", self.name, layout.columnwise), spec, True)

    def staged(self) -> tuple[ProcessGroup, list[Tensor]] | None:
        """Return the amaxes that the casts of this shard recorded for delayed scaling, with the dp_shard group that must agree
        on them. None: `ScalingState` agrees on them, over a group that contains dp_shard, or no scale is delayed."""
        slots = [slot for row, col in self.reads if (slot := self._slot(row or col)) is not None]
        scales_group, shards_group = self.bound.session.amax_group, self.rows.group
        if scales_group is not None and self.bound.spec.recipe.reduce_amax:
            if set(dist.get_process_group_ranks(shards_group)) <= set(dist.get_process_group_ranks(scales_group)):
                return None
        return (shards_group, [slot.staging for slot in slots]) if slots else None

    def decide(self) -> bool:
        """Derive `layouts` from the layer's recipe, and discard all casts. Returns whether the layouts changed."""
        recipe, rows, before = self.bound.spec.recipe, self.rows, self.layouts
        own_group = self.bound.spec.amax_group is not None
        layouts, why = weight_layouts(recipe, rows.shape, rows.group.size(), refused=rows.refused, own_group=own_group)
        self.fresh, self.own, self.why = False, {}, why
        self.layouts = (VALUES, VALUES) if why is not None and rows.from_master else layouts
        if self.layouts != before:
            self._arrived, self._more = {}, {False: [], True: []}
        return self.layouts != before

    @property
    def reads(self) -> list[ShardRead]:
        """The reads of the shard at the step boundary."""
        return shard_reads(self.layouts or ())

    def take(self, operands: Sequence[Wanted]) -> None:
        """Store the operands that the casts of `reads` returned."""
        for layouts, pair in zip(self.reads, operands, strict=True):
            self.own |= {w: q for w, q in zip(layouts, pair, strict=True) if w is not None and q is not None}

    def _operand_of_shard(self, layout: ShardLayout) -> QuantizedTensor:
        """Return this rank's operand in one layout. A high-precision operand is the shard, rounded to `rows.dtype` unless
        `from_master` is true."""
        if not layout.format.keeps_source:
            return self.own[layout]
        values = self.rows.shard().detach()
        if not (self.rows.from_master and layout is VALUES):
            values = values.to(self.rows.dtype)
        return layout.quantizer.cast(values, None)

    def depart(self) -> tuple[tuple[Tensor, ...], tuple[ShardLayout, ...]]:
        """Return the parts that this rank sends for the running pass, and the layouts of these parts."""
        assert self.layouts is not None
        self._backward = in_backward()
        layouts = tuple(dict.fromkeys((self.layouts[self._backward], *self._more[self._backward])))
        return tuple(part for layout in layouts for part in self._sent(layout)), layouts

    def _sent(self, layout: ShardLayout) -> list[Tensor]:
        """Return the parts of the shard that are gathered; FP8 as bytes, since gloo has no FP8 dtype."""
        parts = zip(self._operand_of_shard(layout).parts, layout.dims, strict=True)
        return [as_bytes(part.contiguous()) for part, dim in parts if dim is not SHARED]

    def arrive(self, received: Sequence[Tensor], layouts: Sequence[ShardLayout]) -> None:
        """Store the gathered parts of these layouts, each concatenated over ranks along the first dimension. They are
        valid until FSDP frees or overwrites their memory."""
        rest = iter(received)
        self._arrived = {layout: tuple(next(rest) for dim in layout.dims if dim is not SHARED) for layout in layouts}

    def read(self, use: Use, *, columnwise: bool) -> QuantizedTensor:
        """Return one operand of the full weight. Raises RuntimeError if FSDP has freed the gathered parts."""
        bound, layer = use.bound, self.owner.layer
        if bound is not layer.bound and (self.layouts is not None or bound not in layer.bounds()):
            bound.session.note(
                f"layers that run under the recipe {bound.spec.recipe} of an autocast region gather their weights a "
                f"second time"
            )
            return self._cast_whole(use, self._gather_now(VALUES).payload, columnwise)
        if self.layouts is None:
            self._check_not_freed(use.value)
            return self._cast_whole(use, use.value, columnwise)
        if VALUES in self.layouts and self.why is not None:
            return self._cast_whole(use, self._gathered(VALUES).payload, columnwise)
        layout = self.layouts[columnwise]
        operand = self._gathered(layout)
        return _values_in(operand.transpose() if columnwise and not layout.transposed else operand, use.dtype)

    def _cast_whole(self, use: Use, values: Tensor, columnwise: bool) -> QuantizedTensor:
        """Cast gathered values [N, K] in one orientation, in the running pass."""
        values = values if self.rows.from_master else values.to(use.dtype)
        orientations = COLUMNWISE if columnwise else ROWWISE
        (operands,) = quantize(use.bound, "w", [values], orientations, members=[self.name], record=use.record)
        return _values_in(operands.at(columnwise=columnwise), use.dtype)

    def _gathered(self, layout: ShardLayout) -> QuantizedTensor:
        """Return the full operand in one layout, from the parts that FSDP gathered. If FSDP did not gather this layout, gather
        it now, and let FSDP gather it too from the next pass of the same kind (forward or backward) on. Raises RuntimeError if
        FSDP has freed the parts."""
        if layout not in self._arrived:
            self._more[self._backward].append(layout)
            return self._gather_now(layout)
        for part in self._arrived[layout]:
            self._check_not_freed(part)
        received, world = iter(self._arrived[layout]), self.rows.group.size()
        own = self._operand_of_shard(layout) if SHARED in layout.dims else None
        parts = [
            own.parts[i]
            if dim is SHARED and own
            else _join(next(received), world, dim).view(part.dtype or self._dtype(layout))
            for i, (part, dim) in enumerate(zip(layout.format.parts, layout.dims, strict=True))
        ]
        return self._trim(layout, parts)

    def _check_not_freed(self, gathered: Tensor) -> None:
        """Raise RuntimeError if FSDP has freed the memory of a gathered tensor."""
        if gathered.numel() and not gathered.untyped_storage().size():
            raise RuntimeError(
                f"{self.name}: FSDP has freed the gathered weight that this backward reads; begin backward at the "
                f"output of the module that was given to fully_shard, or pass reshard_after_forward=False to "
                f"fully_shard"
            )

    def _dtype(self, layout: ShardLayout) -> torch.dtype:
        """Return the dtype of parts for which the format defines no dtype, because they have the dtype of the values."""
        return self.rows.shard().dtype if self.rows.from_master and _holds_values(layout.format) else self.rows.dtype

    def _gather_now(self, layout: ShardLayout) -> QuantizedTensor:
        """Return the full operand in one layout, by a gather that FSDP does not run."""
        with observer.label(purpose="weights", precision="" if layout.format.keeps_source else layout.format.name):
            parts = self._operand_of_shard(layout).parts
            return self._trim(layout, all_gather(parts, layout.dims, self.rows.group).wait())

    def _trim(self, layout: ShardLayout, parts: Sequence[Tensor]) -> QuantizedTensor:
        """Return the operand of these gathered parts, without the zero rows that pad the last shard."""
        shapes = layout.format.part_shapes(layout.of(self.rows.shape))
        return QuantizedTensor(
            layout.format, tuple(_first(part, shape) for part, shape in zip(parts, shapes, strict=True))
        )


def _values_in(q: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """Convert the payload to this dtype, if the payload has values instead of codes; else return the operand unchanged."""
    if not _holds_values(q.format) or q.payload.dtype == dtype:
        return q
    return QuantizedTensor(q.format, (q.payload.to(dtype), *q.parts[1:]))


def _holds_values(fmt: Format) -> bool:
    """Whether the payload has high-precision values, in the dtype of the source, instead of codes."""
    return fmt.parts[0].dtype is None


def _join(received: Tensor, world: int, dim: int | None) -> Tensor:
    """Concatenate the parts of `world` ranks along `dim`. `received`: the parts, concatenated along the first dimension."""
    return torch.cat(received.unflatten(0, (world, -1)).unbind(0), dim) if dim else received


def _first(part: Tensor, shape: Shape) -> Tensor:
    return part if part.shape == shape else part[tuple(slice(size) for size in shape)]
