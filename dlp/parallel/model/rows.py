"""The rows of a plan: what conversion will do to one layer, from its module and what its groups say.

A linear of the model, or a layer of dlp that was made by hand: that keeps its style and prologue, and its recipe and
overlap where no group sets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dlp.parallel import fit
from dlp.parallel import overlap as overlaps
from dlp.parallel.linear import prologue as prologues
from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.linear.prologue import Prologue
from dlp.parallel.linear.spec import LayerOptions
from dlp.parallel.model.embedding import check_cut
from dlp.parallel.model.groups import Resolved
from dlp.parallel.model.notes import layer_notes, prologue_note, scope_notes
from dlp.parallel.style import STYLES, ParallelStyle, shard_sizes, style
from dlp.quant import recipe as recipes
from dlp.quant.gemm import check_kernel, kernel_name
from dlp.quant.recipe import GEMMS, Recipe

BY_HAND = "made by hand: layer groups reach its recipe and overlap"


@dataclass(frozen=True)
class LayerPlan:
    """One linear. `shape` (N, K) of the full weight; `siblings` all members of its set, itself included; `kernels` per
    GEMM; `parameters` on this rank (before FSDP); `group` what won, `overrode` what lost, field by field; `weight` the
    parameter's name; `notes` what the row does not show."""

    name: str
    shape: tuple[int, int]
    style: str
    sequence_parallel: bool
    siblings: tuple[str, ...]
    recipe: Recipe
    overlap: str | dict[str, str]
    options: LayerOptions
    prologue: Prologue | None
    kernels: tuple[str, str, str]
    parameters: int
    group: str
    overrode: str
    weight: str
    notes: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Its name: that of the row, but where a layer made by hand has several weights."""
        return self.weight.rpartition(".")[0]

    @property
    def made_by_hand(self) -> bool:
        return BY_HAND in self.notes

    @property
    def row(self) -> ParallelStyle:
        return style(self.style, self.sequence_parallel)


@dataclass(frozen=True)
class OtherPlan:
    """A module with parameters that does not become a linear: style "vocab", "replicated" or "left out". `reads_cut`: it
    reads features that tp cuts."""

    name: str
    kind: str
    style: str
    sequence_parallel: bool
    parameters: int
    reads_cut: bool = False

    @property
    def partial(self) -> bool:
        """Its gradients on each tp rank are parts of a sum."""
        return self.style != "vocab" and (self.sequence_parallel or self.reads_cut)


@dataclass(frozen=True)
class Place:
    """Where a plan is for: ranks of tp, the kind of device, (B, S) of a microbatch."""

    tp: int
    device_type: str
    batch: tuple[int, int] | None


def plan_linear(name: str, module: nn.Linear, chosen: Resolved, place: Place) -> LayerPlan:
    """The row of an nn.Linear."""
    if chosen.sequence_parallel and place.batch is None:
        raise ValueError(
            f"{name}: sequence parallelism needs the shape of a microbatch: pass batch=(B, S) to convert, split tokens with "
            f"dlp.scatter_tokens before the first such layer and join them with dlp.gather_tokens after the last"
        )
    shape = (module.out_features, module.in_features)
    return _row(name, f"{name}.weight", shape, module.bias is not None, chosen, place)


def plan_made(name: str, module: ParallelLinear, chosen: Resolved, place: Place) -> Iterator[LayerPlan]:
    """The rows of a layer made by hand, one for each of its weights."""
    spec, members = module.core.spec, module.core.members
    style_name, sequence_parallel = next(key for key, row in STYLES.items() if row is spec.style)
    for what, asked, its in (
        ("style", chosen.style, style_name), ("sequence_parallel", chosen.sequence_parallel, sequence_parallel),
        ("prologue", prologues.load(chosen.prologue), spec.prologue),
    ):  # fmt: skip
        if asked is not None and asked != its:
            raise ValueError(
                f"{name}: it was made by hand with {what} = {its}, and a layer group asks for {asked}; make it so, or leave "
                f"{what} out of its groups"
            )
    if spec.group is not None and spec.tp != place.tp:
        raise ValueError(
            f"{name}: it was made by hand for tp {spec.tp}, and the mesh has tp {place.tp}; make both equal"
        )
    own = {gemm: getattr(spec.overlap, gemm).name for gemm in GEMMS}
    chosen = replace(
        chosen, style=style_name, sequence_parallel=sequence_parallel, recipe=chosen.recipe or spec.recipe,
        overlap=chosen.overlap or (own if len(set(own.values())) > 1 else own[GEMMS[0]]), prologue=spec.prologue,  # type: ignore[arg-type]
    )  # fmt: skip
    names = [name if len(members) == 1 else f"{name}.{member.weight}" for member in members]
    for row_name, member in zip(names, members, strict=True):
        n, k = module.get_parameter(member.weight).shape
        bias = module._parameters[member.bias] is not None
        row = _row(row_name, f"{name}.{member.weight}", (n, k), bias, chosen, place)
        yield replace(row, siblings=tuple(names) if len(names) > 1 else (), notes=(*row.notes, BY_HAND))


def _row(name: str, weight: str, shape: tuple[int, int], has_bias: bool, chosen: Resolved, place: Place) -> LayerPlan:
    batch, tp = place.batch, place.tp
    sequence_parallel = bool(chosen.sequence_parallel)
    if sequence_parallel and batch is not None and batch[0] * batch[1] % tp:
        raise ValueError(
            f"{name}: sequence parallelism cuts B*S = {batch[0]}*{batch[1]} tokens over tp {tp}, which does not divide them"
        )
    style_name = chosen.style or "local"
    row = style(style_name, sequence_parallel)
    local = shard_sizes(row, *shape, tp, name)
    bias = local[0] if has_bias else 0
    recipe = _recipe(chosen.recipe, name)
    fit.check(name, row, recipe)
    tokens = batch[0] * batch[1] // tp if batch is not None else None
    prologue = prologues.load(chosen.prologue)
    if prologue is not None:
        prologue.check(name, row, tp)
    overrode = [f"{f}: {', '.join(lost)}" for f, lost in chosen.overrode.items() if lost]
    return LayerPlan(
        name, shape, style_name, sequence_parallel, (), recipe, _overlap(chosen.overlap, name), chosen.settled(row),
        prologue, _kernels(recipe, place.device_type, name), local[0] * local[1] + bias, _winners(chosen),
        "; ".join(overrode), weight,
        (
            *layer_notes(recipe, row, tokens),
            *chosen.notes(row),
            *(scope_notes(recipe, row, local, tokens) if tp > 1 else ()),
            *prologue_note(prologue, recipe, place.device_type),
        ),
    )  # fmt: skip


def _winners(chosen: Resolved) -> str:
    """ "edges" when one group set everything, else "recipe: edges, style: qkv"; what nobody set stays at its default."""
    unset = [f"{field} default" for field in ("style", "recipe") if field not in chosen.won]
    by_group = dict.fromkeys(chosen.won.values())
    named = [f"{group} ({', '.join(f for f, g in chosen.won.items() if g == group)})" for group in by_group]
    return ", ".join(named + unset)


def _recipe(value: Any, layer: str) -> Recipe:
    """The recipe of one layer from what its group sets: a name, a table, or a recipe made in Python."""
    return recipes.made(value or "bf16").for_layer(layer)


def _overlap(value: str | Mapping[str, str] | None, layer: str) -> str | dict[str, str]:
    """What was chosen, after a look at whether it exists."""
    chosen = dict(value) if isinstance(value, Mapping) else value or "serial"
    for gemm, strategy in chosen.items() if isinstance(chosen, dict) else [(GEMMS[0], chosen)]:
        if gemm not in GEMMS:
            raise ValueError(f"{layer}: an overlap strategy is chosen for {', '.join(GEMMS)}; got {gemm!r}")
        overlaps.load(strategy)
    return chosen


def _kernels(recipe: Recipe, device_type: str, layer: str) -> tuple[str, str, str]:
    names = []
    for gemm in GEMMS:
        a, b = (quantizer.format for quantizer in recipe.operands(gemm))
        check_kernel(f"{layer}: {gemm}", a, b, device_type, getattr(recipe, gemm))
        names.append(kernel_name(a, b, device_type))
    return names[0], names[1], names[2]


def plan_other(name: str, module: nn.Module, chosen: Resolved, tp: int) -> OtherPlan:
    """The row of a module that is no linear, or is left out."""
    count = sum(p.numel() for p in module._parameters.values() if p is not None)
    sequence_parallel = bool(chosen.sequence_parallel)
    if chosen.convert is not False and isinstance(module, nn.Embedding) and chosen.style == "column":
        check_cut(name, module, tp)
        return OtherPlan(name, type(module).__name__, "vocab", sequence_parallel, count // tp)
    if chosen.style == "row" or (isinstance(module, nn.EmbeddingBag) and chosen.style == "column"):
        raise ValueError(
            f"{name}: style {chosen.style!r} is for linears; {type(module).__name__} is replicated: 'column' where it reads "
            f"features that tp cuts, else 'local'"
        )
    reads_cut = chosen.style == "column"  # behind a column-parallel linear, where tokens are whole
    style = "left out" if chosen.convert is False else "replicated"
    return OtherPlan(name, type(module).__name__, style, sequence_parallel and not reads_cut, count, reads_cut)
