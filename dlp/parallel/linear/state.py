"""What one layer keeps: a `LayerState`, a `BoundSpec` of each spec that it runs under; and what its casts take of its model.

The opaque ops take tensors and two names: a `spec_id`, a tensor, says which `BoundSpec` a call runs; a `trace_id`, an integer,
is the same for all specs of equal style, recipe, tp, options and prologue, and is all that results depend on in shape and
number. torch.compile sees the trace_id as a constant and the spec_id as an input, so that equal blocks share one compiled
graph.
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
from dlp.parallel.casts import BOTH, NOWHERE, Beside, Cast, CastPlan, Operands, Orientations, Values, cast, cast_plan
from dlp.parallel.linear.prologue import Prologue
from dlp.parallel.linear.prologue import load as load_prologue
from dlp.parallel.linear.spec import LinearSpec, num_inputs
from dlp.parallel.model.session import Session, cannot_pickle
from dlp.parallel.transfer import TransferPlan, transfer_plan, x_tokens_of
from dlp.quant.quantizer import Origin, Wanted
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.stats import StatsTable, measured, plain

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
    num_inputs  how many tensors the layer is called with
    clips      its x says where it was clipped (`Operand.clips`)
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
        self.trace_id = _trace_of(spec)
        self.num_inputs = num_inputs(spec)
        self.clips = spec.recipe.x.clips  # here, since torch.compile cannot compute what is computed once
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
    def transfers(self, tokens: int) -> TransferPlan:
        """What travels, with so many rows of x on this rank."""
        return transfers(self.spec, tokens)

    @remembered
    def transfers_back(self, dy_tokens: int) -> TransferPlan:
        """The same, with so many rows of dy on this rank."""
        return self.transfers(x_tokens_of(self.spec.style, self.spec.tp, dy_tokens))

    def kept_memory(self) -> list[Tensor]:
        """What kernels of this layer, and what is captured with it, read and write that is no operand; it stays where it is
        while `calls` do."""
        return [*self.session.kept_memory(self.spec), *mapped_memory()]


def transfers(spec: LinearSpec, tokens: int) -> TransferPlan:
    """What travels under a spec, with so many rows of x on this rank."""
    group = spec.amax_group or spec.group
    return transfer_plan(
        spec.recipe, spec.style, spec.tp, tokens, kept=spec.options.keeps, own_group=spec.amax_group is not None,
        group=None if group is None or group.size() == 1 else group,
    )  # fmt: skip


def bound_of(spec_id: Tensor) -> BoundSpec:
    """What a `spec_id` names."""
    return _BOUND[int(spec_id)]


def spec_of(trace_id: int) -> LinearSpec:
    """One that stands for all specs of a trace."""
    return _SPEC_OF_TRACE[trace_id]


def _trace_of(spec: LinearSpec) -> int:
    """A hash of what it stands for, not a count: inductor keeps compiled graphs on disk and finds them by such constants, and
    another process, of other recipes or another version of this package, must not take what was compiled for other shapes."""
    key = spec.style, spec.recipe, spec.tp, spec.options, spec.prologue
    if key not in _TRACES:
        digest = sha256(repr(key).encode() + _sources())
        _TRACES[key] = int.from_bytes(digest.digest()[:7], "little")
        _SPEC_OF_TRACE[_TRACES[key]] = spec
    return _TRACES[key]


@cache
def _sources() -> bytes:
    """Of this package."""
    files = sorted(Path(__file__).parents[2].rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).digest()


@torch.compiler.assume_constant_result
def trace_with(trace_id: int, prologue: str, *options: tuple[str, Any]) -> int:
    """Of the specs of a trace, but with this prologue. A function of constants, so that equal blocks share a graph."""
    return _trace_of(replace(spec_of(trace_id), prologue=load_prologue({"name": prologue, **dict(options)})))


def under_trace(bound: BoundSpec, trace_id: int) -> BoundSpec:
    """The same under a trace of its own, or of its own but for a prologue (`trace_with`)."""
    return bound if bound.trace_id == trace_id else _with_prologue(bound, spec_of(trace_id).prologue)


@remembered
def _with_prologue(bound: BoundSpec, prologue: Prologue | None) -> BoundSpec:
    return BoundSpec(replace(bound.spec, prologue=prologue), bound.session, bound.weights)


class LayerState:
    """One layer: its weights and the specs that it runs under.

    bound      its own spec; `variants`: others, by what an autocast region asks for
    members    its weights' modules and names, in order; `weights`: where they live (`dlp.parallel.weight`)
    stats      what measures its tensors, if something does
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
        """The layer's own."""
        return self.bound.spec

    @property
    def session(self) -> Session:
        return self.bound.session

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
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
        """Change the layer's own spec, at a step boundary. `session`: another than it has been in."""
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


# What casts of a layer take


def quantize(
    bound: BoundSpec, tensor: str, values: Sequence[Values], orientations: Orientations, *,
    members: Sequence[str] | None = None, record: bool = True, whole: bool = False, into: Wanted = NOWHERE,
) -> list[Operands]:  # fmt: skip
    """Values [rows, cols] of x, w, dy, y or dx -> their operands, with one amax agreement for all.

    members    whose values they are, where not every member has some
    record     their amaxes count for delayed scales
    whole      x or dy has been gathered: no rank has a part of it
    into       storage of `operand_shape` for the one operand there is, in the orientations that have some
    """
    plan = _plan(bound, tensor, orientations, whole, values[0].shape[0])
    owners = members or bound.spec.owners(tensor)
    return cast(plan, orientations, values, owners, partial(beside, bound), record=record, into=into)


def accepted(bound: BoundSpec, value: Any, tensor: str) -> Any:
    """x or dy that came quantized (`dlp.ops.Handed`): as it is, where this layer would have cast it alike, else decoded, with a
    note. ValueError where it must not be decoded."""
    spec, making = bound.spec, value.making
    own, options = making.quantizers, spec.options
    whole = not (own.rowwise.format.keeps_source or own.columnwise.format.keeps_source)
    same = own == spec.recipe.of(tensor) and not options.save_original_input and spec.prologue is None and whole
    shared = spec.tp == 1 or (spec.amax_group is None and spec.recipe.amax_scope == "table")
    if same and shared and spec.style.gathers == tensor and spec.tp > 1:
        rows = value.numel() // value.shape[-1]
        plan = bound.transfers(rows) if tensor == "x" else bound.transfers_back(rows)
        shared = plan.sends_codes(tensor, making.group, spec.tp_group)
    if same and shared:
        return value
    why = f"{spec.name}: {tensor} is quantized twice: " + (
        "its ranks must share its scales, and have whole blocks of it"
        if same else f"it came as {value.operands.at(columnwise=False).format.name}, and {spec.recipe} casts it otherwise"
    )  # fmt: skip
    if making.strict:
        way = "process_group=, the ranks that gather it" if same else "this recipe"
        raise ValueError(f"{why}; give Quantize {way}, or leave strict away")
    bound.session.note(why)
    return value.tensor()


@remembered
def _plan(bound: BoundSpec, tensor: str, orientations: Orientations, whole: bool, rows: int) -> CastPlan:
    """`rows`: of the matrices, as many as tokens in x and dy."""
    spec = bound.spec
    group = spec.amax_group or spec.group
    return cast_plan(
        spec.style, spec.recipe, tensor, orientations, rows, whole=whole, own_group=spec.amax_group is not None,
        group=None if group is None or group.size() == 1 else group,
    )  # fmt: skip


def beside(
    bound: BoundSpec, plan: CastPlan, member: str, shape: torch.Size, device: torch.device, record: bool
) -> Beside:
    """What the casts of one matrix of this shape read and write of the layer's model: always the same, but for slots."""
    key = id(plan), member, shape, device  # the entry keeps the plan
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
        found = bound.cache[key] = plan, Beside(flag, (None,) * len(names), origins), names
    _, its, names = found
    if not plan.scaled_by_slots:
        return its
    slots = [None if name is None else bound.session.slot(name, record) for name in names]
    return Beside(its.flag, slots, its.origins)


def weight_casts(bound: BoundSpec, member: str, weight: Tensor, value: Tensor, into: Wanted = NOWHERE) -> list[Cast]:
    """What `quantize(bound, "w", [weight], BOTH)` casts and agrees on, to be made with the casts of other layers. `value`: the
    weight, padded to its `operand_shape`."""
    plan = _plan(bound, "w", BOTH, False, value.shape[0])
    matrices = [value] * len(plan.reads)
    return plan.casts(matrices, beside(bound, plan, member, weight.shape, value.device, True), into)


@cache
def _tensor_id(name: str) -> int:
    """32 bits that are the same for this name everywhere and always."""
    return int.from_bytes(sha256(name.encode()).digest()[:4], "little")


def _origin(
    bound: BoundSpec, plan: CastPlan, member: str, shape: Sequence[int], padded: Sequence[int], columnwise: bool
) -> Origin:
    """Where this rank's matrix lies in the unsharded one, over tp and, along the tokens, over data-parallel ranks;
    `columnwise`: its transpose in the transposed one."""
    spec, session, tensor = bound.spec, bound.session, plan.tensor
    cut = None if plan.whole else spec.style.cut(tensor)

    def span(dim: int, size: int) -> tuple[int, int]:
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
    """Whether other ranks may have a say in the scales of this rank's weights."""
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
