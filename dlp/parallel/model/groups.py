"""Layer groups: assignment of recipe, style and overlap to layers by name.

A group has a name, patterns and fields. Groups are ordered: for each layer and field, the last matching group that sets the
field wins. The functions here read only layer names and container lengths, so a configuration can be checked without weights or
a GPU. The result (`Resolved`) also tells which groups won, and which groups were overridden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlp.parallel.linear.spec import OPTIONS, LayerOptions
from dlp.quant.patterns import must_match, parse
from dlp.quant.recipe import Recipe

STYLES = ("column", "row", "local")


@dataclass(frozen=True, kw_only=True)
class LayerFields(LayerOptions):
    """Fields that a group can set for a layer; None: not set.

    recipe             a recipe's name, a table {"name": ..., option: value}, or a Recipe
    style              "column", "row" or "local"
    sequence_parallel  whether the layer's tokens are sharded over tp
    siblings           whether layers that read the same x run as one layer
    overlap            a strategy's name, or a table by GEMM {"fprop": ..., "dgrad": ..., "wgrad": ...}
    return_bias        forward returns (y without bias, bias)
    convert            False: matching modules, and all modules in them, are left out: they run their own code, replicated on
                       tp. True: a subclass of nn.Linear is converted, and loses its own forward

    The fields of the base class `LayerOptions` can be set, too.
    """

    recipe: str | Mapping[str, Any] | Recipe | None = None
    style: str | None = None
    sequence_parallel: bool | None = None
    siblings: bool | None = None
    overlap: str | Mapping[str, str] | None = None
    return_bias: bool | None = None
    convert: bool | None = None


FIELDS = (*LayerFields.__annotations__, *(each.name for each in OPTIONS))
OF_LINEARS = tuple(name for name in FIELDS if name not in ("style", "sequence_parallel", "convert"))


@dataclass(frozen=True)
class LayerGroup(LayerFields):
    """Layers that match a pattern, and the options that are set for these layers.

    Groups are ordered: for each layer and option the last matching group that sets the option wins.

    Args:
        name: name in plans and messages.
        match: pattern of module names, or several; "*" matches inside one component, "**" matches any number of components.
        delay_wgrad: compute wgrad in `dlp.backward_dw` instead of in backward.
        save_original_input: save x in high precision for wgrad, and quantize x again in backward.
        recipe: name of a recipe, a dict {"name": ..., option: value}, or a `Recipe`.
        style: "column", "row" or "local".
        sequence_parallel: whether these layers work on token shards.
        siblings: run the matching linears of one parent module as one layer; these linears must read the same x.
        overlap: "auto", "serial" or "chunked", or a dict {"fprop": ..., "dgrad": ..., "wgrad": ...} of these.
        return_bias: return (y, bias) instead of adding the bias.
        convert: False: leave these modules out of the conversion, replicated on tp. True: also convert subclasses of nn.Linear.

    Raises:
        ValueError: for a group without patterns or options, an unknown style, or a malformed pattern.

    Examples:
        >>> mesh = dlp.build_mesh()
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        >>> groups = [dlp.LayerGroup("all", "**", recipe="fp8_current"), dlp.LayerGroup("last", "2", recipe="bf16")]
        >>> plan = dlp.convert(model, groups, mesh)
        >>> [layer.recipe.name for layer in plan.layers]
        ['fp8_current', 'bf16']
    """

    name: str
    match: Sequence[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "match", (self.match,) if isinstance(self.match, str) else tuple(self.match))
        if not self.match:
            raise ValueError(
                f'layer group {self.name!r} has no pattern: set match = ["layers.**"], or remove the group'
            )
        if not self.fields():
            raise ValueError(
                f"layer group {self.name!r} sets nothing: set one of {', '.join(FIELDS)}, or remove the group"
            )
        if self.style is not None and self.style not in STYLES:
            raise ValueError(f"layer group {self.name!r}: style {self.style!r} is not one of {', '.join(STYLES)}")
        for pattern in self.match:
            parse(pattern)

    def fields(self) -> dict[str, Any]:
        """Return the fields that this group sets, by name."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Resolved(LayerFields):
    """The fields of one layer (None: no group sets the field), and the groups that set them.

    groups    names of all groups that match the layer, in order
    won       field -> the group whose value is used
    overrode  field -> the earlier groups that also set the field, in order (absent if no group sets the field)
    """

    groups: tuple[str, ...] = ()
    won: Mapping[str, str] = field(default_factory=dict)
    overrode: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def resolve(
    groups: Sequence[LayerGroup], layer_names: Sequence[str], lengths: Mapping[str, int], prefix: str = "", *,
    aliases: Mapping[str, str] | None = None, modules: Sequence[str] = (),
) -> dict[str, Resolved]:  # fmt: skip
    """Decide every field of every layer. A layer without a matching group gets Resolved(), in which no field is set.

    layer_names  dotted names of the layers that can be converted
    lengths      dotted name of each container (ModuleList, Sequential; "" is the model) -> number of its children
    prefix       Hugging Face's `base_model_prefix`: a name also matches without this prefix
    aliases      further name -> layer name, for layers that are registered more than once; patterns may match any of
                 the names
    modules      names of all modules, which a group with convert = false may match; the group then covers all layers in
                 the module

    Raises ValueError for groups with equal names, for a pattern that matches no layer (the message lists similar names), and
    for a group whose fields later groups override on every layer.
    """
    names = [group.name for group in groups]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"layer groups need different names; given twice: {', '.join(map(repr, sorted(twice)))}")
    layers = {name: name for name in layer_names} | dict(aliases or {})
    matched = {group.name: _layers_of(group, layers, modules, lengths, prefix) for group in groups}
    resolved = {
        layer: _resolve_layer([group for group in groups if layer in matched[group.name]]) for layer in layer_names
    }
    for group in groups:
        _check_not_shadowed(group, [resolved[layer] for layer in layer_names if layer in matched[group.name]])
    return resolved


def _layers_of(
    group: LayerGroup, layers: Mapping[str, str], modules: Sequence[str], lengths: Mapping[str, int], prefix: str
) -> set[str]:
    """Return the layers that a group matches. `layers`: each name or alias of a layer -> the first name of the layer.
    Raises ValueError for a pattern that matches nothing, and for a group with convert = false whose modules have no
    parameters."""
    whole = group.convert is False
    names = list(dict.fromkeys([*layers, *modules])) if whole else list(layers)
    asked_by = f"layer group {group.name!r}"
    found = {name for pattern in group.match for name in must_match(names, lengths, pattern, prefix, asked_by=asked_by)}
    matched = {
        layer
        for name, layer in layers.items()
        if name in found or (whole and any(name.startswith(f"{module}.") for module in found))
    }
    if not matched:
        raise ValueError(
            f"{asked_by}: the modules that the group leaves out have no parameters: {min(found)}; remove the group"
        )
    return matched


def _resolve_layer(groups: Sequence[LayerGroup]) -> Resolved:
    """Return the fields of a layer. `groups`: the groups that match the layer, in order."""
    setters = {name: [group for group in groups if name in group.fields()] for name in FIELDS}
    return Resolved(
        **{name: getattr(by[-1], name) for name, by in setters.items() if by},
        groups=tuple(group.name for group in groups),
        won={name: by[-1].name for name, by in setters.items() if by},
        overrode={name: tuple(group.name for group in by[:-1]) for name, by in setters.items() if by},
    )


def _check_not_shadowed(group: LayerGroup, layers: Sequence[Resolved]) -> None:
    """Raise ValueError if no field that `group` sets is used on any of the matching layers."""
    winners = list(dict.fromkeys(layer.won[name] for layer in layers for name in group.fields()))
    if group.name not in winners:
        takers = ", ".join(map(repr, winners))
        raise ValueError(
            f"group {group.name!r} has no effect: on every matching layer, its fields are overridden by {takers}; "
            f"move this group after them, narrow their patterns, or remove this group"
        )
