"""The state of one layer.

    LayerState   a layer's weights, and the specs that it runs under: its own, and those that autocast regions ask for
    BoundSpec    one such spec, with the session, and with all that was decided for calls under it
    quantize     casts x, w, dy, y or dx of a layer, with the scales, flags and random origins of its session

The opaque ops take tensors and two identifiers. `spec_id`, an int64 tensor [], identifies the `BoundSpec` that a call runs.
`trace_id`, an integer, is equal for all specs of equal style, recipe, tp and options, on which number and shapes of
results depend, and nothing else. torch.compile sees trace_id as a constant and spec_id as an input, so that equal blocks share
one compiled graph.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial, wraps
from hashlib import sha256
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from dlp.comm.transport import mapped_memory
from dlp.parallel.casts import (
    BOTH,
    NOWHERE,
    Cast,
    CastContext,
    CastPlan,
    Operands,
    Orientations,
    Values,
    cast,
    cast_plan,
)
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.model.session import Session, cannot_pickle
from dlp.parallel.transfer import TransferPlan, transfer_plan, x_tokens_of
from dlp.quant.quantizer import Origin, Wanted
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.stats import StatsTable, measured, plain

Result = TypeVar("Result")
Params = ParamSpec("Params")

# The `BoundSpec` of each spec_id, as long as its model lives: the session holds it, since a backward may still need the spec of
# its forward when the layer has another already. Of each trace_id one spec stays, which belongs to no model.
_BOUND: WeakValueDictionary[int, BoundSpec] = WeakValueDictionary()
_TRACES: dict[tuple[Any, ...], int] = {}
_SPEC_OF_TRACE: dict[int, LinearSpec] = {}
_NUMBERS = itertools.count()


def remembered(
    compute: Callable[Concatenate[BoundSpec, Params], Result],
) -> Callable[Concatenate[BoundSpec, Params], Result]:
    """Cache a method of a bound spec, or a function whose first argument is one, in `BoundSpec.cache`: by its positional
    arguments, since a spec never changes."""

    @wraps(compute)
    def cached(bound: BoundSpec, *args: Params.args, **none: Params.kwargs) -> Result:
        key = (compute, *args)
        try:
            result: Result = bound.cache[key]
        except KeyError:
            result = bound.cache[key] = compute(bound, *args, **none)
        except TypeError:  # a symbolic size has no hash: something traces
            result = compute(bound, *args, **none)
        return result

    return cached


class BoundSpec:
    """A spec as one layer of one session runs it.

    session      what the layers of the model share, and the step boundary changes
    weights      `LayerWeights` of the layer
    clips        operands of x say where codes were clipped (`Operand.clips`)
    spec_id      int64 [], identifies it to the opaque ops; trace_id: see the module
    cache        results of functions that are `remembered`
    calls        `BoundCall`s and captured directions (`dlp.parallel.linear.autograd`)
    """

    def __init__(self, spec: LinearSpec, session: Session, weights: Any = None) -> None:
        self.spec, self.session, self.weights = spec, session, weights
        if spec.slots:
            spec.check_group(session.amax_group)
        session.bounds.append(self)
        session.draws |= spec.draws
        self._register()

    def _register(self) -> None:
        """Take a spec_id, which is of this process, and start with empty caches."""
        number, spec = next(_NUMBERS), self.spec
        _BOUND[number] = self
        self.spec_id = torch.tensor(number, device="cpu")  # whatever the default device is
        self.trace_id = _trace_of(spec)
        self.clips = spec.recipe.x.clips  # looked up here, since torch.compile cannot trace a cached_property
        self.cache: dict[Any, Any] = {}
        self.calls: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundSpec:
        """The bound spec of a copied layer, whose session is a copy, too. The copy's casts are not measured
        (`record_stats`)."""
        spec = replace(self.spec, recipe=plain(self.spec.recipe))
        new = memo[id(self)] = BoundSpec(spec, copy.deepcopy(self.session, memo))
        new.weights = copy.deepcopy(self.weights, memo)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """ValueError for a layer with a process group, which cannot be pickled."""
        if self.spec.group is not None or self.spec.amax_group is not None:
            cannot_pickle(self.spec.name)
        return {
            "spec": replace(self.spec, recipe=plain(self.spec.recipe)),
            "session": self.session,
            "weights": self.weights,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._register()

    @remembered
    def transfers(self, tokens: int) -> TransferPlan:
        """The plan for this number of rows of x on this rank."""
        return transfers(self.spec, tokens)

    @remembered
    def transfers_back(self, dy_tokens: int) -> TransferPlan:
        """The plan for this number of rows of dy on this rank."""
        return self.transfers(x_tokens_of(self.spec.style, self.spec.tp, dy_tokens))

    def kept_memory(self) -> list[Tensor]:
        """The tensors besides operands that launches of this layer read and write. Their addresses do not change as long as
        `calls` is not cleared."""
        return [*self.session.kept_memory(self.spec), *mapped_memory()]


def transfers(spec: LinearSpec, tokens: int) -> TransferPlan:
    """The plan of a layer with this spec, for this number of rows of x on this rank."""
    group = spec.amax_group or spec.group
    return transfer_plan(
        spec.recipe, spec.style, spec.tp, tokens, kept=spec.options.keeps, own_group=spec.amax_group is not None,
        group=None if group is None or group.size() == 1 else group,
    )  # fmt: skip


def bound_of(spec_id: Tensor) -> BoundSpec:
    """The bound spec with this id."""
    return _BOUND[int(spec_id)]


def spec_of(trace_id: int) -> LinearSpec:
    """A spec that stands for all with this trace_id."""
    return _SPEC_OF_TRACE[trace_id]


def _trace_of(spec: LinearSpec) -> int:
    """The trace_id of a spec. It is a hash and not a count, since inductor finds compiled graphs on disk by such constants: a
    process with other recipes, or with another version of this package, must not find one that was compiled for other
    shapes."""
    key = spec.style, spec.recipe, spec.tp, spec.options
    if key not in _TRACES:
        digest = sha256(repr(key).encode() + _sources())
        _TRACES[key] = int.from_bytes(digest.digest()[:7], "little")
        _SPEC_OF_TRACE[_TRACES[key]] = spec
    return _TRACES[key]


@cache
def _sources() -> bytes:
    """A hash of the Python sources of this package."""
    files = sorted(Path(__file__).parents[2].rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).digest()


class LayerState:
    """One layer: its weights and the specs that it runs under.

    bound      its own spec, bound
    variants   specs of autocast regions, bound, by what the region asks for
    members    module and parameter names of each weight (`dlp.parallel.weight.base.Member`)
    weights    `LayerWeights`: where the weights live
    stats      the table that statistics of its casts go to; None: they are not measured
    """

    weights: Any

    def __init__(self, spec: LinearSpec, session: Session, members: Sequence[Any]) -> None:
        self.bound, self.members = BoundSpec(spec, session), list(members)
        self.variants: dict[Any, BoundSpec] = {}
        self.stats: StatsTable | None = None

    def __getstate__(self) -> dict[str, Any]:
        anew: dict[str, Any] = {"variants": {}, "stats": None}
        return vars(self) | anew

    @property
    def spec(self) -> LinearSpec:
        """The layer's own spec."""
        return self.bound.spec

    @property
    def session(self) -> Session:
        return self.bound.session

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        device: torch.device = getattr(self.members[0].module, self.members[0].weight).device
        return device

    def bounds(self) -> list[BoundSpec]:
        """The layer's own, and those it has run under in autocast regions."""
        return [self.bound, *self.variants.values()]

    def specs(self) -> list[LinearSpec]:
        return [bound.spec for bound in self.bounds()]

    def with_recipe(self, recipe: Recipe) -> LinearSpec:
        """The spec that this layer has under another recipe."""
        self.weights.check(recipe)
        stats = self.stats
        chosen = recipe if stats is None else measured(recipe, self.spec.members[0], stats)
        return replace(self.spec, recipe=chosen)

    def set_spec(self, spec: LinearSpec, session: Session | None = None) -> None:
        """Change the layer's own spec, at a step boundary. `session`: one that the layer moves to."""
        self.bound = BoundSpec(spec, session or self.session, self.weights)
        self.variants.clear()
        self.weights.drop()


def cores(model: nn.Module) -> Iterator[Any]:
    """Every core (`dlp.parallel.linear.modules`) of a model, each once."""
    seen = set()
    for module in model.modules():
        core = getattr(module, "core", None)
        if isinstance(core, LayerState) and id(core) not in seen:
            seen.add(id(core))
            yield core


# Casts of one layer


def quantize(
    bound: BoundSpec, tensor: str, values: Sequence[Values], orientations: Orientations, *,
    members: Sequence[str] | None = None, record: bool = True, whole: bool = False, into: Wanted = NOWHERE,
) -> list[Operands]:  # fmt: skip
    """Values [rows, columns] of x, w, dy, y or dx -> their operands, with one amax agreement for all.

    members    to which members the values belong; None: one value for each that has this tensor
    record     amaxes count for delayed scales
    whole      x or dy has been gathered, so that this rank has all of it
    into       storage of `operand_shape` for the operands of a single value; None for an orientation: the cast allocates
    """
    plan = _plan(bound, tensor, orientations, whole, values[0].shape[0])
    owners = members or bound.spec.owners(tensor)
    return cast(plan, orientations, values, owners, partial(cast_context, bound), record=record, into=into)


def accepted(bound: BoundSpec, value: Any, tensor: str) -> Any:
    """An x or dy that arrives quantized (`dlp.ops.handed.Handed`): itself, where this layer would have made the same operands;
    else its decoded values, which the layer quantizes again, with a note in the log. ValueError where it is `strict`, which
    forbids that."""
    spec, record = bound.spec, value.cast_record
    theirs, options = record.quantizers, spec.options
    quantized = not (theirs.rowwise.format.keeps_source or theirs.columnwise.format.keeps_source)
    same = theirs == spec.recipe.of(tensor) and not options.save_original_input and quantized
    shared = spec.tp == 1 or (spec.amax_group is None and spec.recipe.amax_scope == "table")
    if same and shared and spec.style.gathers == tensor and spec.tp > 1:
        rows = value.numel() // value.shape[-1]
        plan = bound.transfers(rows) if tensor == "x" else bound.transfers_back(rows)
        shared = plan.sends_codes(tensor, record.group, spec.tp_group)
    if same and shared:
        return value
    why = f"{spec.name}: {tensor} is quantized twice: " + (
        "its ranks must share its scales, and have whole blocks of it"
        if same else f"it came as {value.operands.at(columnwise=False).format.name}, and {spec.recipe} casts it otherwise"
    )  # fmt: skip
    if record.strict:
        remedy = "process_group=, the ranks that gather it" if same else "this recipe"
        raise ValueError(f"{why}; give Quantize {remedy}, or leave strict away")
    bound.session.note(why)
    return value.tensor()


@remembered
def _plan(bound: BoundSpec, tensor: str, orientations: Orientations, whole: bool, rows: int) -> CastPlan:
    """`rows`: of the stored matrices, for x and dy the number of tokens."""
    spec = bound.spec
    group = spec.amax_group or spec.group
    return cast_plan(
        spec.style, spec.recipe, tensor, orientations, rows, whole=whole, own_group=spec.amax_group is not None,
        group=None if group is None or group.size() == 1 else group,
    )  # fmt: skip


def cast_context(
    bound: BoundSpec, plan: CastPlan, member: str, shape: torch.Size, device: torch.device, record: bool
) -> CastContext:
    """Flag, slots and origins for the casts of one matrix of this shape. Flag and origins are cached; slots are looked up at
    each call, since an autocast region may have scales of its own."""
    key = id(plan), member, shape, device  # the entry holds the plan, so that no other one gets its id
    found = bound.cache.get(key)
    if found is None:
        flag = bound.session.flag(bound.spec.members, plan.tensor, member, device) if plan.quantizes else None
        origins = [
            tuple([_origin(bound, plan, member, shape, given, each) for each in read.origins])
            for read, given in zip(plan.reads, plan.shapes(shape), strict=True)
        ]
        names = [
            bound.spec.slot_name(plan.tensor, member, read.rowwise is None) if read.has_slot else None
            for read in plan.reads
        ]
        found = bound.cache[key] = plan, CastContext(flag, (None,) * len(names), origins), names
    _, context, names = found
    if not plan.scaled_by_slots:
        return context
    slots = [None if name is None else bound.session.slot(name, bound.spec, record) for name in names]
    return CastContext(context.flag, slots, context.origins)


def weight_casts(bound: BoundSpec, member: str, weight: Tensor, value: Tensor, into: Wanted = NOWHERE) -> list[Cast]:
    """The casts that `quantize(bound, "w", [weight], BOTH)` would run, to be run together with those of other layers. `value`:
    the weight, padded to its `operand_shape`."""
    plan = _plan(bound, "w", BOTH, False, value.shape[0])
    matrices = [value] * len(plan.reads)
    return plan.casts(matrices, cast_context(bound, plan, member, weight.shape, value.device, True), into)


@cache
def _tensor_id(name: str) -> int:
    """32 bits of a hash: the same for a name on every rank and in every run."""
    return int.from_bytes(sha256(name.encode()).digest()[:4], "little")


def _origin(
    bound: BoundSpec, plan: CastPlan, member: str, shape: Sequence[int], padded: Sequence[int], columnwise: bool
) -> Origin:
    """Where this rank's matrix lies in the unsharded one, which tp cuts along a dimension and data parallelism along the
    tokens; `columnwise`: where its transpose lies in the transposed one."""
    spec, session, tensor = bound.spec, bound.session, plan.tensor
    cut = None if plan.whole else spec.style.cut(tensor)

    def span(dim: int, size: int) -> tuple[int, int]:
        """First index and size in the unsharded matrix, along a dimension of this size here."""
        index, count = (spec.tp_group.rank(), spec.tp) if cut == dim and spec.tp > 1 else (0, 1)
        if dim == 0 and tensor != "w":
            index, count = index + session.dp[0] * count, count * session.dp[1]
        return index * size, count * size

    row_dim, column_dim = int(columnwise), 1 - int(columnwise)
    row, rows = span(row_dim, shape[row_dim])
    column, columns = span(column_dim, padded[column_dim])
    name = f"{member}.{tensor}"
    return Origin(row, column, rows, columns, session.seed, _tensor_id(name), session.counter, row_dim)


def weights_agree(spec: LinearSpec) -> bool:
    """Whether scales of this rank's weights may be agreed with other ranks."""
    return spec.amax_group is not None or (spec.group is not None and spec.recipe.amax_scope == "all")


def flatten(operands: Sequence[Operands]) -> list[Tensor]:
    """The parts of both orientations of each operand, rowwise first."""
    return [part for both in operands for columnwise in (False, True) for part in both.at(columnwise).parts]


def unflatten(quantizers: Operand, parts: Sequence[Tensor], count: int) -> list[Operands]:
    """The inverse of `flatten` for `count` operands of these quantizers."""
    row, col = quantizers.rowwise.format, quantizers.columnwise.format
    size = len(row.parts) + len(col.parts)
    starts = range(0, count * size, size)
    return [Operands(row.wrap(parts[i:]), col.wrap(parts[i + len(row.parts) :])) for i in starts]
