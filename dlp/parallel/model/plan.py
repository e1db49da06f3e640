"""The plan: a printable record of the conversion of each layer, decided and checked from the model without ranks.

    Plan           rows (`dlp.parallel.model.rows`) of linears, other modules and parameters; `print` shows the first two
    make_plan      modules and groups ──► rows ──► checks that rows fit each other
    check_flow     checks that the styles of layers fit each other

No rank, device or process group is needed, so a plan for any world can be printed on a laptop. Styles fit if each sharded
output is the input of a layer that expects this sharding:

                            tokens          features
    LOCAL  LOCAL_SP         unchanged       full -> full
    COLUMN                  full            full -> sharded
    ROW                     full            sharded -> full
    COLUMN_SP               sharded -> full  full -> sharded
    ROW_SP                  full -> sharded  sharded -> full

The plan does not know the dataflow, so `check_flow` checks each block (see `blocks`): a block with row layers needs column
layers, a block with column layers before its last layer needs row layers, and both must agree on whether tokens are sharded
between blocks. Outside of blocks a model may split and join tokens anywhere. If a group sets both style and sequence_parallel
of a layer, a later group that changes one of the two must set both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from dlp.parallel import auto
from dlp.parallel.auto import Times
from dlp.parallel.linear.spec import OPTIONS
from dlp.parallel.model.groups import LayerGroup, Resolved, resolve
from dlp.parallel.model.rows import (
    LayerPlan,
    OtherPlan,
    ParameterPlan,
    Place,
    plan_linear,
    plan_made,
    plan_other,
    plan_parameters,
    support_note,
    with_siblings,
    with_strategies,
)
from dlp.parallel.model.survey import check, check_readers, left_out, made_by_hand, survey, unreached
from dlp.parallel.style import shard_sizes
from dlp.quant.recipe import GEMMS


@dataclass(frozen=True)
class Plan:
    """Every decision of a conversion; `print(plan)` shows tables in which equal consecutive children of a container share rows.

    Args:
        layers: one row for each linear.
        others: one row for each other module with parameters.
        tp: number of tensor-parallel ranks.
        device_type: "cpu", "cuda", or a kind of `dlp.quant.gemm.DEVICES`.
        weights: one entry for each parameter.
        left_out: name of each left-out module -> names of this module and the modules in it, as far as they have parameters.
        warnings: recipes that groups set for modules other than linears, and nvfp4 in the last block of a model.
        times: measured times from which overlap = "auto" was decided; None: there were none.
        invariant: whether results are bitwise equal on every mesh.

    Examples:
        >>> plan = dlp.make_plan(nn.Sequential(nn.Linear(64, 64)), [dlp.LayerGroup("all", "**", recipe="mxfp8")], tp=1)
        >>> [(layer.name, layer.recipe.name) for layer in plan.layers]
        [('0', 'mxfp8')]
    """

    layers: tuple[LayerPlan, ...]
    others: tuple[OtherPlan, ...]
    tp: int
    device_type: str = "cpu"
    weights: tuple[ParameterPlan, ...] = ()
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    times: Times | None = None
    invariant: bool = False

    @property
    def parameters(self) -> int:
        """Number of parameters per tp rank, before FSDP."""
        return sum(prod(parameter.shape) for parameter in self.weights)

    def __str__(self) -> str:
        counts = [(row.recipe.name, row.style) for row in self.layers]
        summary = ", ".join(f"{counts.count(key)} {' '.join(key)}" for key in dict.fromkeys(counts))
        lines = [
            f"plan: {len(self.layers)} linears ({summary}); {self.parameters:,} parameters per tp rank of {self.tp}",
            "",
        ]
        lines += table(_LAYER_HEADER, fold([_layer_cells(row) for row in self.layers]))
        lines += ["", *table(_OTHER_HEADER, fold([_other_cells(row) for row in self.others]))]
        lines += ["", INVARIANT] if self.invariant else self._chosen()
        used = dict.fromkeys(row.recipe for row in self.layers)
        lines += ["", *(support_note(recipe, self.device_type) for recipe in used)]
        return "\n".join([*lines, *_note_lines(self.layers), *(f"warning: {text}" for text in self.warnings)])

    def _chosen(self) -> list[str]:
        """Return lines that list the strategies that "auto" chose, with times or reasons."""
        rows = [
            (row.name, each)
            for row in self.layers
            for each in row.choices
            if each.why not in (auto.NOTHING, auto.ONE_GEMM)
        ]
        whys = dict.fromkeys(each.why for _, each in rows)
        if not rows or (len(whys) == 1 and rows[0][1].why):
            return [f"\noverlap: serial for layers without a strategy from a group: {why}" for why in whys]
        said = [
            f"overlap chosen by the times of {self.times}; measured times are for a forward or backward, predicted times for "
            f"one GEMM and its transfer"
        ]
        return ["", *said, *table(auto.HEADER, fold([auto.cells(*row) for row in rows]))]

    def choices(self) -> list[dict[str, Any]]:
        """Return the decisions of "auto", one dict for each layer and GEMM."""
        return [{"layer": row.name, **each._asdict()} for row in self.layers for each in row.choices]


def make_plan(
    model: nn.Module, groups: Sequence[LayerGroup | Mapping[str, Any]], tp: int, *, device_type: str = "cpu",
    batch: tuple[int, int] | None = None, overlap_table: Times | str | Path | None = None, transport: str = "", board: str = "",
) -> Plan:  # fmt: skip
    """Decide and check a conversion without changing the model, which may be on the meta device.

    Args:
        model: plain modules.
        groups: ordered layer groups.
        tp: number of tensor-parallel ranks.
        device_type: "cpu" or "cuda" for this machine; a kind of `dlp.quant.gemm.DEVICES` for another machine.
        batch: (B, S) of a microbatch; required with sequence parallelism.
        overlap_table: times of `dlp.parallel.tune`, from which overlap = "auto" is decided; None: the shipped table of the GPU.
        transport: carrier of transfers over tp: "mapped", "nccl" or "gloo"; "": the transport of the table.
        board: a word of the GPU's name, if `device_type` is a kind of `dlp.quant.gemm.DEVICES`; "": not known.

    Returns:
        The printable `Plan`.

    Raises:
        ValueError: as `dlp.convert`.

    Examples:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.make_plan(model, [dlp.LayerGroup("all", "**", recipe="nvfp4", style="column")], tp=2)
        >>> plan.tp
        2
    """
    typed = [group if isinstance(group, LayerGroup) else LayerGroup(**group) for group in groups]
    seen = survey(model)
    modules, prefix = seen.modules, getattr(model, "base_model_prefix", "")
    resolved = resolve(typed, list(modules), seen.lengths, prefix, aliases=seen.aliases, modules=seen.names)
    left = left_out(model, {name for name, chosen in resolved.items() if chosen.convert is False}, modules)
    check_readers(model, left)
    for name, module in modules.items():
        check(name, module, resolved[name].convert)
    here = auto.machine(device_type, board)
    if overlap_table is None:
        times, why = auto.shipped(here, tp, transport)
    else:
        times = auto.load(overlap_table) if isinstance(overlap_table, str | Path) else overlap_table
        why = times.obstacle(here, tp, transport) or ""
    place = Place(tp, device_type, batch, None if why else times, why, transport)
    layers, others = _rows(modules, resolved, place)
    _check_ties(modules, layers, others)
    if tp > 1:
        check_flow(layers, blocks(model), typed, resolved)
    layers, others = _counted_once(modules, layers, others, tp)
    styles, vocabulary = {row.module: row.row for row in layers}, {row.name for row in others if row.style == "vocab"}
    partial = {row.name for row in others if row.partial}
    parameters = plan_parameters(modules, styles, vocabulary, partial, tp)
    warnings = (*unreached(typed, resolved, modules, styles.keys()), *_fp4_in_last_block(model, layers))
    return Plan(tuple(layers), tuple(others), tp, device_type, parameters, left, warnings, times)


def _rows(
    modules: Mapping[str, nn.Module], resolved: Mapping[str, Resolved], place: Place
) -> tuple[list[LayerPlan], list[OtherPlan]]:
    layers: list[LayerPlan] = []
    others: list[OtherPlan] = []
    for name, module in modules.items():
        chosen = resolved[name]
        if made_by_hand(module):
            layers += plan_made(name, module, chosen, place)
        elif isinstance(module, nn.Linear) and chosen.convert is not False:
            layers.append(plan_linear(name, module, chosen, place))
        else:
            others.append(plan_other(name, module, chosen, place.tp))
    sets = _sibling_sets([row for row in layers if not made_by_hand(modules[row.module])], resolved)
    layers = [with_siblings(row, sets.get(row.name, row.siblings), place.device_type) for row in layers]
    return with_strategies(layers, place), others


def _counted_once(
    modules: Mapping[str, nn.Module], layers: Sequence[LayerPlan], others: Sequence[OtherPlan], tp: int
) -> tuple[list[LayerPlan], list[OtherPlan]]:
    """Return the rows without parameters that are tied to an earlier module: a linear with a tied weight counts only its bias
    and gets a note."""
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
    tied = {
        name: sum(p.numel() for p in module._parameters.values() if p is not None and owners[id(p)] != name)
        for name, module in modules.items()
    }
    counted = [
        replace(row, parameters=row.parameters - tied[row.name] // (tp if row.style == "vocab" else 1))
        for row in others
    ]
    return rows, counted


def _sibling_sets(layers: Sequence[LayerPlan], resolved: Mapping[str, Resolved]) -> dict[str, tuple[str, ...]]:
    """Map each layer that has siblings to the names of all its siblings, including the layer. Siblings are linears of
    one parent whose option `siblings` the same group sets to True."""
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
            ("return_bias", row.return_bias, first.return_bias),
            *((each.name, getattr(row.options, each.name), getattr(first.options, each.name)) for each in OPTIONS),
        ):  # fmt: skip
            if value != other:
                raise ValueError(
                    f"{row.name} and {first.name} are siblings and run as one layer, but differ in {what}: {value} and "
                    f"{other}; give them equal values, or set siblings = false for their group"
                )
    if len(rows) > 1 and first.style == "row":
        raise ValueError(f"{first.name}: siblings read the same x and are column-parallel or local; style is 'row'")


def _check_ties(modules: Mapping[str, nn.Module], layers: Sequence[LayerPlan], others: Sequence[OtherPlan]) -> None:
    """Raise ValueError if modules share a parameter, but the plan shards the parameter differently in these modules."""
    cuts = {row.module: row.row.shard_dim for row in layers}
    cuts |= {row.name: 0 if row.style == "vocab" else None for row in others}
    first: dict[int, str] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            owner = first.setdefault(id(parameter), name)
            if parameter is not None and cuts[owner] != cuts[name]:
                styles = {row.module: row.style for row in layers} | {row.name: row.style for row in others}
                raise ValueError(
                    f"{name} and {owner} share a parameter, but tp shards the parameter differently ({styles[name]} "
                    f"and {styles[owner]}); "
                    f"give both the same style"
                )


def blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks that `check_flow` checks: each child of a ModuleList if all children have the same class,
    else the list as one block."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            alike = len({type(child) for child in module}) == 1
            found += [f"{name}.{i}".lstrip(".") for i in range(len(module))] if alike else [name]
    return found


def _fp4_in_last_block(model: nn.Module, layers: Sequence[LayerPlan]) -> list[str]:
    """Return a warning for each outermost ModuleList of several blocks whose last block has linears in nvfp4."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    warnings = []
    for name in outer:
        last = f"{name}.{len(model.get_submodule(name)) - 1}"  # type: ignore[arg-type]
        inside = [row for row in layers if row.module == last or row.module.startswith(f"{last}.")]
        four = [row for row in inside if any(q.format.gemm_kind == "nvfp4" for q in row.recipe.quantizers())]
        if four:
            warnings.append(
                f"{four[0].recipe.name} covers {len(four)} of {len(inside)} linears of the last block, {last}: the published "
                f'runs keep the last blocks in bf16; add a group with match = ["{name}.-1.**"] and recipe = "bf16"'
            )
    return warnings


def check_flow(
    layers: Sequence[LayerPlan], names: Sequence[str], groups: Sequence[LayerGroup], resolved: Mapping[str, Resolved]
) -> None:
    """Raise ValueError, naming a layer, if the styles of a block do not fit each other. `names`: names of the blocks."""
    order = {group.name: place for place, group in enumerate(groups)}
    by_name = {group.name: group for group in groups}
    for row in layers:
        _check_one_choice(row, resolved[row.module], order, by_name)
    inside: dict[str, list[LayerPlan]] = {name: [] for name in names}
    for row in layers:
        for owner in _parents(row.name):
            if owner in inside:
                inside[owner].append(row)
    for name, rows in inside.items():
        _check_features(name, rows)
        _check_tokens(name, rows, resolved)


def _parents(name: str) -> list[str]:
    """Return the names of the modules around a module, from the outermost."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _check_one_choice(
    row: LayerPlan, chosen: Resolved, order: Mapping[str, int], groups: Mapping[str, LayerGroup]
) -> None:
    """Raise ValueError if one group sets style and sequence_parallel together, and a later group overrides only one of them by
    another value. Nothing is checked unless one of the two groups sets sequence_parallel = true."""
    by = [chosen.won.get("style"), chosen.won.get("sequence_parallel")]
    if by[0] is None or by[1] is None or by[0] == by[1]:
        return
    early, late = sorted((groups[name] for name in by if name), key=lambda group: order[group.name])
    what, kept = ("style", "sequence_parallel") if by[0] == late.name else ("sequence_parallel", "style")
    before, now = getattr(early, what), getattr(late, what)
    if before in (None, now) or not (early.sequence_parallel or late.sequence_parallel):
        return
    raise ValueError(
        f"{row.name}: group {early.name!r} chose {what} = {before!r} together with {kept} = {getattr(early, kept)!r}, and "
        f"group {late.name!r} overrides only {what} by {now!r}; set both in {late.name!r}, or neither"
    )


def _check_features(block: str, rows: Sequence[LayerPlan]) -> None:
    """Raise ValueError for a block with row layers and no column layer, or with column layers before its last layer and no row
    layer."""
    columns, takes = ([row for row in rows if row.style == style] for style in ("column", "row"))
    if takes and not columns:
        raise ValueError(
            f"{takes[0].name}: style 'row' expects features sharded over tp, and no linear of {block} produces sharded "
            f"features; set style = "
            f"'column' for the linear before it, or 'local' for this one"
        )
    followed = [row for row in columns if row.name not in (rows[-1].siblings or (rows[-1].name,))]
    if followed and not takes:
        raise ValueError(
            f"{followed[0].name}: style 'column' produces features sharded over tp, and no linear of {block} consumes "
            f"them; set style = 'row' for the linear after it, or 'local' for this one"
        )


def _check_tokens(block: str, rows: Sequence[LayerPlan], resolved: Mapping[str, Resolved]) -> None:
    """Raise ValueError for a block whose row layers differ in sequence_parallel from each other, or in which a row layer
    differs from all of its column layers (`_partners`).
    Raise ValueError also for a block of several linears that all work on token shards without a gather, unless for each linear
    one group sets both style and sequence_parallel."""
    takes = [row for row in rows if row.style == "row"]
    for row in takes:
        near = _partners(row, rows)
        if row.sequence_parallel != takes[0].sequence_parallel:
            _refuse(block, row, takes[0])
        if near and row.sequence_parallel not in {column.sequence_parallel for column in near}:
            _refuse(block, near[0], row)
    alone = all(row.row.name == "LOCAL_SP" for row in rows)
    for row in rows if alone and len(rows) > 1 else ():
        won = resolved[row.module].won
        if not row.made_by_hand and won.get("style", "") != won.get("sequence_parallel"):
            raise ValueError(
                f"{row.name}: under sequence parallelism the tokens are sharded over tp, and no linear of {block} "
                f"gathers them, which attention requires; set style = 'column' and 'row', or, if no module of {block} "
                f"reads other tokens, style = 'local' and sequence_parallel = true in one group"
            )


def _partners(row: LayerPlan, rows: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Return the column layers that may produce the input of a row layer: the column layers in the innermost module that
    contains both this row layer and column layers."""
    for owner in reversed(_parents(row.name)):
        near = [other for other in rows if other.style == "column" and other.name.startswith(f"{owner}.")]
        if near:
            return near
    return []


def _refuse(block: str, row: LayerPlan, other: LayerPlan) -> None:
    what, whats = ("token shards" if its.sequence_parallel else "all tokens" for its in (row, other))
    raise ValueError(
        f"{row.name}: this layer works on {what} and {other.name} in {block} on {whats}; set the same "
        f"sequence_parallel for both"
    )


INVARIANT = (
    "invariant = true: results are bitwise equal on every mesh; GEMMs add 8 segments in a fixed order, and partial sums and "
    "gradients are sent in fp32"
)
_LAYER_HEADER = (
    "layer", "N x K", "style", "siblings", "recipe", "overlap", "fprop / dgrad / wgrad", "params/rank", "group", "overrode",
)  # fmt: skip
_OTHER_HEADER = ("module", "kind", "style", "tp gradient", "params/rank")


def _note_lines(layers: Sequence[LayerPlan]) -> list[str]:
    """Return each note once, with the layers that have this note."""
    names: dict[str, list[str]] = {}
    for row in layers:
        for note in row.notes:
            names.setdefault(note, []).append(row.name)
    return [f"note: {note} [{_some(holds_for)}]" for note, holds_for in names.items()]


def _some(names: Sequence[str]) -> str:
    """Return the only name, or "NAME and N more"."""
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
    style = row.style + "_SP" * row.sequence_parallel + " on sharded features" * row.reads_cut
    return row.name, row.kind, style, gradient, f"{row.parameters:,}"


Row = tuple[str, ...]  # the first cell is a dotted name
_Path = tuple[tuple[str, ...], Row]  # components of the name, the other cells


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format header and rows as lines of text, with a line of dashes below the header."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *rows)
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def fold(rows: Sequence[Row]) -> list[Row]:
    """Merge consecutive children of a container whose rows are equal: rows of name.3, name.4 and name.5 become one row
    "name.3:6", which is also a pattern of layer groups. Other rows stay, in order."""
    paths = [(tuple(row[0].split(".")), tuple(row[1:])) for row in rows]
    return [(".".join(parts), *cells) for parts, cells in _fold(paths)]


def _fold(paths: Sequence[_Path]) -> list[_Path]:
    # (first component of the name, number of merged children, folded rows below the component)
    runs: list[tuple[str, int, list[_Path]]] = []
    for head, group in groupby(paths, key=lambda path: path[0][0]):
        below = [(parts[1:], cells) for parts, cells in group]
        folded = [path for path in below if not path[0]] + _fold([path for path in below if path[0]])
        first, count, before = runs[-1] if runs else ("", 0, [])
        if first.isdecimal() and head == str(int(first) + count) and folded == before:
            runs[-1] = first, count + 1, before
        else:
            runs.append((head, 1, folded))
    return [
        ((head if count == 1 else f"{head}:{int(head) + count}", *parts), cells)
        for head, count, folded in runs
        for parts, cells in folded
    ]
