"""Whether the styles of a model's layers fit each other: what one leaves cut, another must take.

                            tokens          features
    LOCAL  LOCAL_SP         as they come    whole -> whole
    COLUMN                  whole           whole -> cut
    ROW                     whole           cut   -> whole
    COLUMN_SP               cut -> whole    whole -> cut
    ROW_SP                  whole -> cut    cut   -> whole

A plan knows no dataflow, so this looks at blocks, the children of a ModuleList: in each, columns and rows come together
and agree on whether tokens are cut between blocks. Outside of blocks a model may split and join tokens where it likes; there,
and for what a block cannot show, style and sequence_parallel count as one choice, which a later group makes anew as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from dlp.parallel.model.groups import LayerGroup, Resolved
from dlp.parallel.model.rows import LayerPlan


def blocks(model: nn.Module) -> list[str]:
    """The names of what is checked by itself: each child of a ModuleList of equal children, else the whole list."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            alike = len({type(child) for child in module}) == 1
            found += [f"{name}.{i}".lstrip(".") for i in range(len(module))] if alike else [name]
    return found


def check_flow(
    layers: Sequence[LayerPlan], names: Sequence[str], groups: Sequence[LayerGroup], resolved: Mapping[str, Resolved]
) -> None:
    """ValueError, naming a layer, for styles that no block can run. `names`: of blocks."""
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
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _check_one_choice(
    row: LayerPlan, chosen: Resolved, order: Mapping[str, int], groups: Mapping[str, LayerGroup]
) -> None:
    """Style and sequence_parallel, of which a later group has overridden one that an earlier group set with the other."""
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
        f"group {late.name!r} overrides {what} alone by {now!r}; let it set both, as its inputs and outputs now are, or neither"
    )


def _check_features(block: str, rows: Sequence[LayerPlan]) -> None:
    """Columns leave features cut, rows take them."""
    columns, takes = ([row for row in rows if row.style == style] for style in ("column", "row"))
    if takes and not columns:
        raise ValueError(
            f"{takes[0].name}: style 'row' takes features that tp cuts, and no linear of {block} leaves any; set style = "
            f"'column' for the linear before it, or 'local' for this one"
        )
    followed = [row for row in columns if row.name not in (rows[-1].siblings or (rows[-1].name,))]
    if followed and not takes:
        raise ValueError(
            f"{followed[0].name}: style 'column' leaves features cut over tp, and no linear of {block} takes them; set style = "
            f"'row' for the linear behind it, or 'local' for this one"
        )


def _check_tokens(block: str, rows: Sequence[LayerPlan], resolved: Mapping[str, Resolved]) -> None:
    """Tokens between blocks are cut, or they are whole; and where they are cut something gathers them."""
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
                f"{row.name}: under sequence parallelism its tokens are cut over tp, and no linear of {block} gathers them, as "
                f"attention needs; set style = 'column' and 'row', or, if nothing there looks at other tokens, style = 'local' "
                f"and sequence_parallel = true in one group"
            )


def _partners(row: LayerPlan, rows: Sequence[LayerPlan]) -> list[LayerPlan]:
    """The columns that a row may take features from: those in the nearest module that has some."""
    for owner in reversed(_parents(row.name)):
        near = [other for other in rows if other.style == "column" and other.name.startswith(f"{owner}.")]
        if near:
            return near
    return []


def _refuse(block: str, row: LayerPlan, other: LayerPlan) -> None:
    what, whats = ("token shards" if its.sequence_parallel else "whole tokens" for its in (row, other))
    raise ValueError(
        f"{row.name}: it works on {what} and {other.name} in {block} on {whats}; set sequence_parallel alike for both"
    )
