"""The plan: what conversion will do to each layer, decided and checked from the model alone, and printable.

No rank, device or process group is needed, so a plan for any world can be printed on a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dlp.parallel import fit
from dlp.parallel import overlap as overlaps
from dlp.parallel import prologue as prologues
from dlp.parallel.embedding import VocabParallelEmbedding
from dlp.parallel.linear import ParallelLinear
from dlp.parallel.notes import layer_notes, prologue_note, support_note
from dlp.parallel.parameters import ParameterPlan, plan_parameters
from dlp.parallel.prologue import Prologue
from dlp.parallel.style import ParallelStyle, shard_sizes, style
from dlp.parallel.tables import fold, table
from dlp.quant import recipe as recipes
from dlp.quant.gemm import check_kernel, kernel_name
from dlp.quant.groups import LayerGroup, Resolved, resolve
from dlp.quant.recipe import GEMMS, Recipe


@dataclass(frozen=True)
class LayerPlan:
    """One linear. `shape` (N, K) of the full weight; `siblings` all members of its set, itself included; `kernels` per
    GEMM; `parameters` on this rank (before FSDP); `group` what won, `overrode` what lost, field by field; `notes` what
    the row does not show."""

    name: str
    shape: tuple[int, int]
    style: str
    sequence_parallel: bool
    siblings: tuple[str, ...]
    recipe: Recipe
    overlap: str | dict[str, str]
    delay_wgrad: bool
    prologue: Prologue | None
    kernels: tuple[str, str, str]
    parameters: int
    group: str
    overrode: str
    notes: tuple[str, ...] = ()

    @property
    def row(self) -> ParallelStyle:
        return style(self.style, self.sequence_parallel)


@dataclass(frozen=True)
class OtherPlan:
    """A module with parameters that is no linear: style "vocab" or "replicated". `reads_cut`: it reads features that tp
    cuts."""

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
class Plan:
    """All layers of a converted model; `print(plan)` shows them as tables, equal blocks as one. `weights`: every
    parameter, once."""

    layers: tuple[LayerPlan, ...]
    others: tuple[OtherPlan, ...]
    tp: int
    device_type: str = "cpu"
    weights: tuple[ParameterPlan, ...] = ()

    @property
    def parameters(self) -> int:
        """Parameters per tp rank, before FSDP."""
        return sum(row.parameters for row in self.layers) + sum(row.parameters for row in self.others)

    def __str__(self) -> str:
        counts = [(row.recipe.name, row.style) for row in self.layers]
        summary = ", ".join(f"{counts.count(key)} {' '.join(key)}" for key in dict.fromkeys(counts))
        lines = [
            f"plan: {len(self.layers)} linears ({summary}); {self.parameters:,} parameters per tp rank of {self.tp}",
            "",
        ]
        lines += table(_LAYER_HEADER, fold([_layer_cells(row) for row in self.layers]))
        lines += ["", *table(_OTHER_HEADER, fold([_other_cells(row) for row in self.others]))]
        used = dict.fromkeys(row.recipe for row in self.layers)
        lines += ["", *(support_note(recipe, self.device_type) for recipe in used)]
        return "\n".join(lines + _note_lines(self.layers))


_LAYER_HEADER = (
    "layer", "N x K", "style", "siblings", "recipe", "overlap", "fprop / dgrad / wgrad", "params/rank", "group", "overrode",
)  # fmt: skip
_OTHER_HEADER = ("module", "kind", "style", "tp gradient", "params/rank")


def _note_lines(layers: Sequence[LayerPlan]) -> list[str]:
    """Each note once, with the layers it holds for."""
    names: dict[str, list[str]] = {}
    for row in layers:
        for note in row.notes:
            names.setdefault(note, []).append(row.name)
    return [f"note: {note} [{_some(holds_for)}]" for note, holds_for in names.items()]


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _layer_cells(row: LayerPlan) -> tuple[str, ...]:
    siblings = ",".join(name.rpartition(".")[2] for name in row.siblings) or "-"
    overlap = row.overlap if isinstance(row.overlap, str) else "/".join(row.overlap.get(g, "serial") for g in GEMMS)
    kernels = row.kernels[0] if len(set(row.kernels)) == 1 else " / ".join(row.kernels)
    return (
        row.name, f"{row.shape[0]} x {row.shape[1]}", row.row.name, siblings, str(row.recipe), overlap, kernels,
        f"{row.parameters:,}", row.group, row.overrode or "-",
    )  # fmt: skip


def _other_cells(row: OtherPlan) -> tuple[str, ...]:
    gradient = "summed at the end of backward" if row.partial else "-"
    style = row.style + "_SP" * row.sequence_parallel + " on cut features" * row.reads_cut
    return row.name, row.kind, style, gradient, f"{row.parameters:,}"


def make_plan(
    model: nn.Module, groups: Sequence[LayerGroup | Mapping[str, Any]], tp: int, *, device_type: str = "cpu",
    batch: tuple[int, int] | None = None,
) -> Plan:  # fmt: skip
    """Decide and check the conversion of a model (meta device will do). Raises ValueError as `convert` does."""
    typed = [group if isinstance(group, LayerGroup) else LayerGroup(**group) for group in groups]
    names = [name for name, module in model.named_modules() if _converts(module)]
    lengths = {
        name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    resolved = resolve(typed, names, lengths, getattr(model, "base_model_prefix", ""))
    modules = {name: model.get_submodule(name) for name in names}
    linears = [name for name in names if isinstance(modules[name], nn.Linear)]
    layers = [_plan_linear(name, modules[name], resolved[name], tp, device_type, batch) for name in linears]  # type: ignore[arg-type]
    sets = _sibling_sets(layers, resolved)
    layers = [replace(row, siblings=sets.get(row.name, ())) for row in layers]
    others = [
        _plan_other(name, module, resolved[name], tp)
        for name, module in modules.items()
        if not isinstance(module, nn.Linear)
    ]
    _check_ties(modules, layers, others)
    layers = _counted_once(modules, layers, tp)
    styles, vocabulary = {row.name: row.row for row in layers}, {row.name for row in others if row.style == "vocab"}
    partial = {row.name for row in others if row.partial}
    parameters = plan_parameters(modules, styles, vocabulary, partial, tp)
    return Plan(tuple(layers), tuple(others), tp, device_type, parameters)


def _counted_once(modules: Mapping[str, nn.Module], layers: Sequence[LayerPlan], tp: int) -> list[LayerPlan]:
    """A linear whose weight belongs to an earlier module counts its bias only, and says whose it is."""
    owners: dict[int, str] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), name)
    rows = []
    for row in layers:
        owner = owners[id(modules[row.name].weight)]
        if owner != row.name:
            n, k = shard_sizes(row.row, *row.shape, tp, row.name)
            row = replace(row, parameters=row.parameters - n * k, notes=(*row.notes, f"weight tied to {owner}"))
        rows.append(row)
    return rows


def _converts(module: nn.Module) -> bool:
    """It owns parameters and is not one of our layers, which a model made by hand may have."""
    ours = isinstance(module, ParallelLinear | VocabParallelEmbedding)
    return not ours and any(parameter is not None for parameter in module._parameters.values())


def _plan_linear(
    name: str, module: nn.Linear, chosen: Resolved, tp: int, device_type: str, batch: tuple[int, int] | None
) -> LayerPlan:
    sequence_parallel = bool(chosen.sequence_parallel)
    if sequence_parallel and batch is None:
        raise ValueError(
            f"{name}: sequence parallelism needs the shape of a microbatch: pass batch=(B, S) to convert, split tokens with "
            f"dlp.scatter_tokens before the first such layer and join them with dlp.gather_tokens after the last"
        )
    if sequence_parallel and batch is not None and batch[0] * batch[1] % tp:
        raise ValueError(
            f"{name}: sequence parallelism cuts B*S = {batch[0]}*{batch[1]} tokens over tp {tp}, which does not divide them"
        )
    style_name = chosen.style or "local"
    row = style(style_name, sequence_parallel)
    shape = (module.out_features, module.in_features)
    local = shard_sizes(row, *shape, tp, name)
    bias = 0 if module.bias is None else local[0]
    recipe = _recipe(chosen.recipe, name)
    fit.check(name, row, recipe)
    tokens = batch[0] * batch[1] // tp if batch is not None else None
    delay, prologue = bool(chosen.delay_wgrad) and not row.partial_weight_grad, prologues.load(chosen.prologue)
    if prologue is not None:
        prologue.check(name, row, tp)
    overrode = [f"{f}: {', '.join(lost)}" for f, lost in chosen.overrode.items() if lost]
    return LayerPlan(
        name, shape, style_name, sequence_parallel, (), recipe, _overlap(chosen.overlap, name), delay,
        prologue, _kernels(recipe, device_type, name), local[0] * local[1] + bias, _winners(chosen),
        "; ".join(overrode),
        (*layer_notes(recipe, row, tokens, bool(chosen.delay_wgrad)), *prologue_note(prologue, recipe, device_type)),
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


def _sibling_sets(layers: Sequence[LayerPlan], resolved: Mapping[str, Resolved]) -> dict[str, tuple[str, ...]]:
    """Layer name -> the names it runs as one with: the same parent module, and siblings set by the same group."""
    sets: dict[tuple[str, str], list[LayerPlan]] = {}
    for row in layers:
        if resolved[row.name].siblings:
            key = (row.name.rpartition(".")[0], resolved[row.name].won["siblings"])
            sets.setdefault(key, []).append(row)
    for rows in sets.values():
        _check_siblings(rows)
    return {row.name: tuple(r.name for r in rows) for rows in sets.values() if len(rows) > 1 for row in rows}


def _check_siblings(rows: Sequence[LayerPlan]) -> None:
    first = rows[0]
    for row in rows:
        for what, value, other in (
            ("in_features", row.shape[1], first.shape[1]), ("style", row.row.name, first.row.name),
            ("recipe", row.recipe, first.recipe), ("overlap", row.overlap, first.overlap),
            ("delay_wgrad", row.delay_wgrad, first.delay_wgrad), ("prologue", row.prologue, first.prologue),
        ):  # fmt: skip
            if value != other:
                raise ValueError(
                    f"{row.name} and {first.name} are siblings and run as one layer, but differ in {what}: {value} and "
                    f"{other}; give them the same, or set siblings = false for their group"
                )
    if len(rows) > 1 and first.style == "row":
        raise ValueError(f"{first.name}: siblings read the same x and are column-parallel or local; style is 'row'")


def _check_ties(modules: Mapping[str, nn.Module], layers: Sequence[LayerPlan], others: Sequence[OtherPlan]) -> None:
    """A parameter that several modules share stays one parameter, so all of them must cut it alike."""
    cuts = {row.name: row.row.shard_dim for row in layers}
    cuts |= {row.name: 0 if row.style == "vocab" else None for row in others}
    first: dict[int, str] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            owner = first.setdefault(id(parameter), name)
            if parameter is not None and cuts[owner] != cuts[name]:
                styles = {row.name: row.style for row in layers} | {row.name: row.style for row in others}
                raise ValueError(
                    f"{name} and {owner} share a parameter, but tp cuts it otherwise ({styles[name]} and {styles[owner]}); "
                    f"give both the same style"
                )


def _plan_other(name: str, module: nn.Module, chosen: Resolved, tp: int) -> OtherPlan:
    count = sum(p.numel() for p in module._parameters.values() if p is not None)
    sequence_parallel = bool(chosen.sequence_parallel)
    if isinstance(module, nn.Embedding) and chosen.style == "column":
        if module.num_embeddings % tp:
            raise ValueError(
                f"{name}: a vocabulary of {module.num_embeddings} cannot be cut over tp {tp}, which does not divide it; pad it"
            )
        return OtherPlan(name, "Embedding", "vocab", sequence_parallel, count // tp)
    if chosen.style == "row":
        raise ValueError(
            f"{name}: style 'row' is for linears; {type(module).__name__} is replicated: 'column' where it reads features "
            f"that tp cuts, else 'local'"
        )
    reads_cut = chosen.style == "column"  # behind a column-parallel linear, where tokens are whole
    return OtherPlan(name, type(module).__name__, "replicated", sequence_parallel and not reads_cut, count, reads_cut)
