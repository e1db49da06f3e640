"""The plan: what conversion will do to each layer, decided and checked from the model alone, and printable.

No rank, device or process group is needed, so a plan for any world can be printed on a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.linear.spec import OPTIONS
from dlp.parallel.model.flow import blocks, check_flow
from dlp.parallel.model.groups import LayerGroup, Resolved, resolve
from dlp.parallel.model.notes import support_note
from dlp.parallel.model.parameters import ParameterPlan, plan_parameters
from dlp.parallel.model.rows import LayerPlan, OtherPlan, Place, plan_linear, plan_made, plan_other
from dlp.parallel.model.survey import check, check_readers, left_out, survey, unreached
from dlp.parallel.model.tables import fold, table
from dlp.parallel.style import shard_sizes
from dlp.quant.recipe import GEMMS


@dataclass(frozen=True)
class Plan:
    """All layers of a converted model; `print(plan)` shows them as tables, equal blocks as one. `weights`: every
    parameter, once. `left_out`: by module, the modules with parameters that are left out with it. `warnings`: what groups
    ask for and will not get."""

    layers: tuple[LayerPlan, ...]
    others: tuple[OtherPlan, ...]
    tp: int
    device_type: str = "cpu"
    weights: tuple[ParameterPlan, ...] = ()
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

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
        return "\n".join([*lines, *_note_lines(self.layers), *(f"warning: {text}" for text in self.warnings)])


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
    seen = survey(model)
    modules, prefix = seen.modules, getattr(model, "base_model_prefix", "")
    resolved = resolve(typed, list(modules), seen.lengths, prefix, aliases=seen.aliases, modules=seen.names)
    left = left_out(model, {name for name, chosen in resolved.items() if chosen.convert is False}, modules)
    check_readers(model, left)
    for name, module in modules.items():
        check(name, module, resolved[name].convert)
    layers, others = _rows(modules, resolved, Place(tp, device_type, batch))
    _check_ties(modules, layers, others)
    if tp > 1:
        check_flow(layers, blocks(model), typed, resolved)
    layers = _counted_once(modules, layers, tp)
    styles, vocabulary = {row.module: row.row for row in layers}, {row.name for row in others if row.style == "vocab"}
    partial = {row.name for row in others if row.partial}
    parameters = plan_parameters(modules, styles, vocabulary, partial, tp)
    warnings = unreached(typed, resolved, modules, styles.keys())
    return Plan(tuple(layers), tuple(others), tp, device_type, parameters, left, warnings)


def _rows(
    modules: Mapping[str, nn.Module], resolved: Mapping[str, Resolved], place: Place
) -> tuple[list[LayerPlan], list[OtherPlan]]:
    layers: list[LayerPlan] = []
    others: list[OtherPlan] = []
    for name, module in modules.items():
        chosen = resolved[name]
        if isinstance(module, ParallelLinear):
            layers += plan_made(name, module, chosen, place)
        elif isinstance(module, nn.Linear) and chosen.convert is not False:
            layers.append(plan_linear(name, module, chosen, place))
        else:
            others.append(plan_other(name, module, chosen, place.tp))
    sets = _sibling_sets([row for row in layers if not isinstance(modules[row.module], ParallelLinear)], resolved)
    return [replace(row, siblings=sets.get(row.name, row.siblings)) for row in layers], others


def _counted_once(modules: Mapping[str, nn.Module], layers: Sequence[LayerPlan], tp: int) -> list[LayerPlan]:
    """A linear whose weight belongs to an earlier module counts its bias only, and says whose it is."""
    owners: dict[int, str] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), name)
    rows = []
    for row in layers:
        owner = owners[id(modules[row.module]._parameters[row.weight.rpartition(".")[2]])]
        if owner != row.module:
            n, k = shard_sizes(row.row, *row.shape, tp, row.name)
            row = replace(row, parameters=row.parameters - n * k, notes=(*row.notes, f"weight tied to {owner}"))
        rows.append(row)
    return rows


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
            ("prologue", row.prologue, first.prologue),
            *((each.name, getattr(row.options, each.name), getattr(first.options, each.name)) for each in OPTIONS),
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
    cuts = {row.module: row.row.shard_dim for row in layers}
    cuts |= {row.name: 0 if row.style == "vocab" else None for row in others}
    first: dict[int, str] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            owner = first.setdefault(id(parameter), name)
            if parameter is not None and cuts[owner] != cuts[name]:
                styles = {row.module: row.style for row in layers} | {row.name: row.style for row in others}
                raise ValueError(
                    f"{name} and {owner} share a parameter, but tp cuts it otherwise ({styles[name]} and {styles[owner]}); "
                    f"give both the same style"
                )
