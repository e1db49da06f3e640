"""LinearSpec: the definition of a parallel linear without tensors, as a frozen value.

Two specs with equal fields are equal. A change of recipe or overlap replaces the spec of a layer; the backward of an earlier
forward still uses the old spec. A `BoundSpec` (`dlp.parallel.linear.state`) contains the caches of a layer for one spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.parallel import overlap as overlaps
from dlp.parallel.overlap import Overlap
from dlp.parallel.style import ParallelStyle
from dlp.quant.fake import is_fake
from dlp.quant.quantizer import SlotOptions, caps_of
from dlp.quant.recipe import GEMMS, OPERANDS, RESULTS, Recipe
from dlp.quant.tensor import Format, QuantizedTensor


@dataclass(frozen=True)
class Overlaps:
    """The overlap strategy of each GEMM."""

    fprop: Overlap
    dgrad: Overlap
    wgrad: Overlap

    @classmethod
    def named(cls, chosen: str | Mapping[str, str]) -> Overlaps:
        """Load the strategies from one name, or from names by GEMM; a GEMM without a name gets "serial". Raises ValueError for
        an unknown name."""
        names = dict.fromkeys(GEMMS, chosen) if isinstance(chosen, str) else chosen
        return cls(**{gemm: overlaps.load(names.get(gemm, "serial")) for gemm in GEMMS})


def _allowed(style: ParallelStyle) -> None:
    return None


def _switch(doc: str, note: str, refused: Callable[[ParallelStyle], str | None] = _allowed) -> Any:
    """Return a field of `LayerOptions`, None by default.

    doc       description of the option in the settings
    note      note in the plan of a layer with the option
    refused   function that returns the note for a style that does not support the option, and None for other styles
    """
    return field(default=None, metadata={"doc": doc, "note": note, "refused": refused})


def _sums_at_the_end(style: ParallelStyle) -> str | None:
    if style.partial_weight_grad:
        return "wgrad is not delayed: the partial weight gradient is summed over tp at the end of backward"
    return None


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of a linear besides style, recipe and overlap. Layer groups, the rows of a plan and `LinearSpec` contain a
    LayerOptions, so that an option is declared only here. True, False: set on or off; None: not set, which is off unless
    another layer group sets the option."""

    delay_wgrad: bool | None = _switch(
        "weight gradients are computed in `dlp.backward_dw(model)` instead of in backward",
        "wgrad is delayed until dlp.backward_dw",
        _sums_at_the_end,
    )

    save_original_input: bool | None = _switch(
        "save x in high precision and quantize x again for wgrad; for layers whose x another operation saves anyway",
        "x is saved in high precision, and quantized again in backward",
    )

    @property
    def keeps(self) -> str:
        """The form of x that forward must save for wgrad, as in `LinearPlan.kept`; "": the plan decides."""
        return "values" if self.save_original_input else ""

    def settled(self, style: ParallelStyle) -> LayerOptions:
        """Return the options of a layer of this style, each True or False: options that the style does not support are off."""
        return LayerOptions(**{
            each.name: bool(getattr(self, each.name)) and each.metadata["refused"](style) is None for each in OPTIONS
        })  # fmt: skip

    def refusals(self, style: ParallelStyle) -> list[str]:
        """Return the reason for each option that is set and that the style does not support."""
        reasons = [each.metadata["refused"](style) for each in OPTIONS if getattr(self, each.name)]
        return [reason for reason in reasons if reason is not None]

    def notes(self, style: ParallelStyle) -> tuple[str, ...]:
        """Return a note of the plan for each option that is set: the effect, or the reason why the style does not support
        it."""
        chosen = [each.metadata for each in OPTIONS if getattr(self, each.name)]
        return tuple(each["refused"](style) or each["note"] for each in chosen)


OPTIONS, OFF = fields(LayerOptions), LayerOptions()


@dataclass(frozen=True)
class LinearSpec:
    """Definition of a parallel linear without tensors.

    name          name of the layer in messages
    style         a row of the style table
    recipe        quantizers of the operands and options of the GEMMs
    overlap       the strategy of each GEMM
    group         the tp group; None: the layer has no tp group
    amax_group    the group over which every amax is agreed; None: ranks agree where `dlp.parallel.casts.agrees` requires it
    tokens        B*S of a microbatch, by which sequence-parallel layers check the shape of x; None: not known
    members       a name for each weight, by which its delayed scales and random bits are identified
    variant       suffix of the names of delayed scales under a recipe of an autocast region; "": the recipe of the layer
    options       further options
    return_bias   whether forward returns (y without bias, bias)
    invariant     whether GEMMs and sums are bitwise equal on every mesh (`dlp.parallel.linear.canonical`)

    Raises ValueError for a style, a recipe, options and groups that exclude each other.
    """

    name: str
    style: ParallelStyle
    recipe: Recipe
    overlap: Overlaps
    group: ProcessGroup | None = None
    amax_group: ProcessGroup | None = None
    tokens: int | None = None
    members: tuple[str, ...] = ("linear",)
    variant: str = ""
    options: LayerOptions = OFF
    return_bias: bool = False
    invariant: bool = False

    def __post_init__(self) -> None:
        check_recipe(self.name, self.style.gathers, self.recipe)
        check_extras(self.name, self.recipe, self.options, self.return_bias)
        self.check_group(self.amax_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearSpec:
        """Return self: frozen values need no copies, and groups cannot be copied."""
        return self

    def check_group(self, amax_group: ProcessGroup | None) -> None:
        """Raise ValueError if shards are gathered over tp ranks, which must share scales, and the amax group lacks some of
        these ranks."""
        if amax_group is None or self.style.gathers is None:
            return
        shared, tp = (dist.get_process_group_ranks(group) for group in (amax_group, self.tp_group))
        if not set(tp) <= set(shared):
            raise ValueError(
                f"{self.name}: the amax group has ranks {shared}, but sequence parallelism gathers "
                f"{self.style.gathers} over the tp ranks {tp}, which must share scales; use a group that contains "
                f"these ranks, or 'auto'"
            )

    def check_unattached(self) -> None:
        """Raise ValueError if the layer has `save_original_input`, which delayed scales do not support without an attached
        optimizer."""
        if self.options.save_original_input:
            raise ValueError(
                f"{self.name}: without an attached optimizer, scales of {self.recipe} differ between forward and "
                f"backward, and save_original_input = true would quantize x to other codes in backward; call "
                f"dlp.attach, or leave save_original_input out"
            )

    def check_recipe_may_change(self, remedy: str) -> None:
        """Raise ValueError for an invariant layer, whose recipe cannot change; `remedy` ends the message."""
        if self.invariant:
            raise ValueError(
                f"{self.name}: invariant = true: dlp.convert checks where tp cuts blocks of a recipe, and recipes do not "
                f"change afterwards; {remedy}"
            )

    @property
    def tp(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def num_axes(self) -> int:
        """Number of mesh axes of the parameters while the layer computes: 1 (tp), or 0 without a tp group."""
        return int(self.group is not None)

    @property
    def tp_group(self) -> ProcessGroup:
        assert self.group is not None, f"{self.name}: {self.style.name} communicates and needs a tp group"
        return self.group

    def owners(self, tensor: str) -> tuple[str, ...]:
        """Return the members to which `tensor` belongs; see the function `owners`."""
        return owners(self.members, tensor)

    def slot_name(self, tensor: str, member: str, columnwise: bool) -> str:
        """Return the name of the delayed scale of one tensor in one orientation."""
        return _slot_name(self.recipe, tensor, member, columnwise) + self.variant

    @cached_property
    def slots(self) -> dict[str, tuple[str, SlotOptions]]:
        """(tensor, options) by slot name, for each tensor that this layer casts with a delayed scale."""
        return {f"{name}{self.variant}": found for name, found in delayed_slots(self.recipe, self.members).items()}

    @cached_property
    def weight_formats(self) -> tuple[tuple[Format, Format], tuple[int, int]]:
        """The rowwise and the columnwise format of w, and the number of parts of each."""
        formats = self.recipe.w.rowwise.format, self.recipe.w.columnwise.format
        return formats, (len(formats[0].parts), len(formats[1].parts))

    def weight_operands(self, parts: Sequence[Tensor], *, columnwise: bool) -> list[QuantizedTensor]:
        """Wrap the parts of all weights in one orientation, given as one list, as an operand for each weight."""
        formats, sizes = self.weight_formats
        fmt, size = formats[columnwise], sizes[columnwise]
        return [QuantizedTensor(fmt, tuple(parts[i : i + size])) for i in range(0, len(parts), size)]

    @cached_property
    def draws(self) -> bool:
        """Whether a cast of this layer rounds stochastically."""
        return any(caps_of(quantizer).origin for quantizer in self.recipe.quantizers())


def check_recipe(layer: str, gathers: str | None, recipe: Recipe) -> None:
    """Raise ValueError if ranks would gather shards with different scales: the style gathers the operand `gathers` (None: no
    operand), and the recipe has delayed scales and does not share them over ranks (`reduce_amax`)."""
    delayed = any(caps_of(quantizer).slot is not None for quantizer in recipe.quantizers())
    if gathers is not None and delayed and not recipe.reduce_amax:
        raise ValueError(
            f"{layer}: {recipe} has reduce_amax=False, so tp ranks would gather shards of {gathers} with different "
            f"scales; set reduce_amax=True, or sequence_parallel=False for this layer"
        )


def check_extras(layer: str, recipe: Recipe, options: LayerOptions, return_bias: bool) -> None:
    """Raise ValueError for an option that the recipe excludes: `return_bias` if y is quantized, `save_original_input` if x is
    clipped, `delay_wgrad` if w is clipped."""
    if return_bias and recipe.y is not None:
        raise ValueError(
            f"{layer}: {recipe} quantizes y, and return_bias = true returns y before the bias is added; leave "
            f"return_bias out, or remove the quantizer of y from the recipe"
        )
    if options.save_original_input and recipe.x.clips:
        raise ValueError(
            f"{layer}: {recipe} needs the clip mask of x in backward, and save_original_input = true saves x alone; "
            f"leave save_original_input out"
        )
    if options.delay_wgrad and recipe.w.clips:
        raise ValueError(
            f"{layer}: {recipe} needs the clip mask of w in backward, and w may have changed before a delayed wgrad; "
            f"leave delay_wgrad out"
        )


def check_blocks(layer: str, recipe: Recipe, style: ParallelStyle, shape: Sequence[int], tp: int) -> None:
    """Raise ValueError if tp would cut a quantization block of x or w under a recipe of quantization-aware training, which
    trains for the codes of the unsharded tensor. `shape`: shape of the unsharded weight [N, K]."""
    if tp == 1 or not is_fake(recipe):
        return
    features = ("out_features", "in_features")
    for tensor, cut in (("w", style.shard_dim), ("x", style.cut_x if style.cut_x == 1 else None)):
        fmt = getattr(recipe, tensor).rowwise.format
        if cut is not None and not fmt.concatenates(cut, shape[cut] // tp):
            raise ValueError(
                f"{layer}: {recipe} trains for the codes of the unsharded tensor, and {style.name} gives each of {tp} "
                f"ranks {shape[cut] // tp} {features[cut]} of {tensor}, not a multiple of the {fmt.block[cut]} in a "
                f"block of {fmt.name}; choose smaller blocks, a smaller tp, or another style for this layer"
            )


def owners(members: tuple[str, ...], tensor: str) -> tuple[str, ...]:
    """Return the members to which `tensor` belongs: the first member for x and dx, which siblings share; all members for other
    tensors."""
    return members[:1] if tensor in ("x", "dx") else members


def _slot_name(recipe: Recipe, tensor: str, member: str, columnwise: bool) -> str:
    """Return the name of the delayed scale of one tensor in one orientation; both orientations share a name if their quantizers
    are equal."""
    quantizers = recipe.of(tensor)
    separate = columnwise and quantizers is not None and quantizers.rowwise != quantizers.columnwise
    return f"{member}.{tensor}{'.columnwise' * separate}"


def delayed_slots(recipe: Recipe, members: tuple[str, ...]) -> dict[str, tuple[str, SlotOptions]]:
    """Return (tensor, options) by slot name, for each tensor that a layer with these members casts with a delayed
    scale. A tensor whose scale has two numbers also has a slot with the suffix ".second"."""
    slots: dict[str, tuple[str, SlotOptions]] = {}
    for tensor in (*OPERANDS, *RESULTS):
        quantizers = recipe.of(tensor)
        orientations = [] if quantizers is None else [(False, quantizers.rowwise), (True, quantizers.columnwise)]
        for columnwise, quantizer in orientations:
            options = caps_of(quantizer).slot
            if options is not None:
                for member in owners(members, tensor):
                    name = _slot_name(recipe, tensor, member, columnwise)
                    slots[name] = tensor, options
                    if options.numbers == 2:  # follows `name` in the table, since both slots have equal amax options
                        slots[f"{name}.second"] = tensor, replace(options, numbers=1)
    return slots


# Identifiers for torch.compile

_TRACES: dict[tuple[Any, ...], int] = {}
_SPEC_OF_TRACE: dict[int, LinearSpec] = {}  # for each trace_id the first spec that had it


def spec_of(trace_id: int) -> LinearSpec:
    """Return a spec that represents all specs with this trace_id."""
    return _SPEC_OF_TRACE[trace_id]


def trace_of(spec: LinearSpec) -> int:
    """Return the trace_id of a spec: a hash of style, recipe, tp, options and the sources of dlp. For all specs with equal
    trace_id, an op on inputs of equal shapes returns the same number of tensors, with the same shapes.

    The trace_id is a hash and not a counter, because inductor uses such constants in the keys of the cache on disk: a process
    with other recipes, or with another version of this package, must not find a graph that was compiled for other shapes."""
    key = spec.style, spec.recipe, spec.tp, spec.options
    if key not in _TRACES:
        digest = sha256(repr(key).encode() + _sources())
        _TRACES[key] = int.from_bytes(digest.digest()[:7], "little")
        _SPEC_OF_TRACE[_TRACES[key]] = spec
    return _TRACES[key]


@cache
def _sources() -> bytes:
    """Return a hash of the Python sources of dlp."""
    files = sorted(Path(__file__).parents[2].rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).digest()
