"""Layer groups: which layers get which recipe, style and overlap, decided by name.

A group is a name, some patterns and the fields it sets; groups are ordered, and for each layer and each field the last
matching group that sets it wins. Everything here is a pure function of layer names and container lengths, so a
configuration is checked without a model on any device, and the answer (`Resolved`) can be printed: what won, what lost.

Patterns speak about dotted components, from the root of the model:

    *         one component; inside a component as in a shell: q_*, layer?, [qk]_proj
    **        any number of components, also none
    {a,b}     alternatives, anywhere: {q,k,v}_proj, layers.{0,-1}.**
    -1  2:5  -8:   a child, or a slice of children, of the container (ModuleList, Sequential) it stands in

The road not taken: regular expressions. They cannot count from the end of a container, dots need escapes, and a
pattern that is right for 4 layers is silently wrong for 40.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlp.quant.recipe import Recipe

FIELDS = ("recipe", "style", "sequence_parallel", "siblings", "overlap", "delay_wgrad", "prologue", "convert")
OF_LINEARS = ("recipe", "siblings", "overlap", "delay_wgrad", "prologue")  # fields that say nothing of other modules
STYLES = ("column", "row", "local")

_ALTERNATIVES = re.compile(r"\{([^{}]*)\}")
_INDEX = re.compile(r"-?\d+|(-?\d+)?:(-?\d+)?")


@dataclass(frozen=True)
class LayerGroup:
    """Some layers and what is set for them; a field left at None is not set, and an earlier group's value stands.

    match              one pattern or several (see the module's docstring); kept as a tuple
    recipe             a recipe's name, a table {"name": ..., option: value}, or a Recipe
    style              "column", "row" or "local"
    sequence_parallel  whether the layer's tokens are cut over tp
    siblings           whether layers that read the same x become one layer
    overlap            a strategy's name, or a table by GEMM {"fprop": ..., "dgrad": ..., "wgrad": ...}
    delay_wgrad        whether weight gradients wait in backward until `dlp.backward_dw(model)`
    prologue           what makes x in the layer's own cast, of the two tensors that it is then called with: "rms_norm",
                       {"name": "rms_norm", "eps": ...} or "swiglu"
    convert            False: the modules that match are left out with all that is in them: they run their own code, whole on
                       every tp rank. True: a linear of a class of its own is converted all the same, without its forward

    Raises ValueError for a group without patterns or without fields, an unknown style, or a malformed pattern.
    """

    name: str
    match: Sequence[str]
    recipe: str | Mapping[str, Any] | Recipe | None = None
    style: str | None = None
    sequence_parallel: bool | None = None
    siblings: bool | None = None
    overlap: str | Mapping[str, str] | None = None
    delay_wgrad: bool | None = None
    prologue: str | Mapping[str, Any] | None = None
    convert: bool | None = None

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
            _parse(pattern)

    def fields(self) -> dict[str, Any]:
        """The fields that this group sets, by name."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Resolved:
    """What the groups say about one layer: a value per field (None: no group sets it) and where it comes from.

    groups    names of all groups that match the layer, in order
    won       field -> the group whose value stands
    overrode  field -> the earlier groups that set it too, in order (absent where no group sets the field)
    """

    recipe: str | Mapping[str, Any] | Recipe | None = None
    style: str | None = None
    sequence_parallel: bool | None = None
    siblings: bool | None = None
    overlap: str | Mapping[str, str] | None = None
    delay_wgrad: bool | None = None
    prologue: str | Mapping[str, Any] | None = None
    convert: bool | None = None
    groups: tuple[str, ...] = ()
    won: Mapping[str, str] = field(default_factory=dict)
    overrode: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def resolve(
    groups: Sequence[LayerGroup], layer_names: Sequence[str], lengths: Mapping[str, int], prefix: str = "", *,
    aliases: Mapping[str, str] | None = None, modules: Sequence[str] = (),
) -> dict[str, Resolved]:  # fmt: skip
    """Decides every field of every layer; a layer that no group matches gets a Resolved() of Nones.

    layer_names  dotted names of the layers that can be converted
    lengths      dotted name of each container (ModuleList, Sequential; "" is the model) -> number of its children
    prefix       Hugging Face's `base_model_prefix`: a name also matches with it dropped
    aliases      further name -> layer name, for layers that are registered more than once: any of their names will do
    modules      names of all modules: what a group with convert = false may match, to speak for all layers in them

    Raises ValueError for two groups of one name, a pattern that matches no layer (with the nearest names), and a group
    of which later groups have overridden every field on every layer.
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
    """The layers that a group speaks about. `layers`: every name of a layer -> its first."""
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
        raise ValueError(f"{asked_by}: what it leaves out has no parameters: {min(found)}; remove the group")
    return matched


def match_names(names: Iterable[str], lengths: Mapping[str, int], pattern: str, prefix: str = "") -> list[str]:
    """The names that `pattern` matches, in their order; arguments as in `resolve`. ValueError if it is malformed."""
    alternatives = _parse(pattern)
    return [
        name
        for name in names
        if any(
            _matches(name.split("."), start, alternative, lengths)
            for start in _starts(name, prefix)
            for alternative in alternatives
        )
    ]


def must_match(
    names: Sequence[str], lengths: Mapping[str, int], pattern: str, prefix: str = "", *, asked_by: str
) -> list[str]:
    """`match_names`, raising ValueError with the nearest names where it finds none; `asked_by` opens the message."""
    found = match_names(names, lengths, pattern, prefix)
    if not found:
        near = ", ".join(map(repr, _nearest(pattern, names, prefix))) or "none, the model has no layer to match"
        raise ValueError(
            f"{asked_by}: pattern {pattern!r} matches no layer; nearest: {near}{_ranges(pattern, lengths)}"
        )
    return found


def _resolve_layer(groups: Sequence[LayerGroup]) -> Resolved:
    """What `groups`, all of which match the layer, say about it."""
    setters = {name: [group for group in groups if name in group.fields()] for name in FIELDS}
    return Resolved(
        **{name: getattr(by[-1], name) for name, by in setters.items() if by},
        groups=tuple(group.name for group in groups),
        won={name: by[-1].name for name, by in setters.items() if by},
        overrode={name: tuple(group.name for group in by[:-1]) for name, by in setters.items() if by},
    )


def _check_not_shadowed(group: LayerGroup, layers: Sequence[Resolved]) -> None:
    """Raises ValueError if nothing that `group` sets stands on any of the layers it matches."""
    winners = list(dict.fromkeys(layer.won[name] for layer in layers for name in group.fields()))
    if group.name not in winners:
        takers = ", ".join(map(repr, winners))
        raise ValueError(
            f"group {group.name!r} is left with no layer: every layer it matches is taken by {takers}; "
            f"move it after them, narrow their patterns, or remove it"
        )


def _parse(pattern: str) -> list[list[str]]:
    """The components of each alternative of `pattern`. ValueError if it is malformed."""
    alternatives = [expanded.split(".") for expanded in _expand(pattern)]
    for component in (component for alternative in alternatives for component in alternative):
        if not component:
            raise ValueError(f"pattern {pattern!r} has an empty component: write the dots between names only")
        if "**" in component and component != "**":
            raise ValueError(f"pattern {pattern!r}: '**' stands for whole components; inside {component!r} write '*'")
    return alternatives


def _expand(pattern: str) -> list[str]:
    """`a.{b,c}` -> `a.b`, `a.c`, innermost braces first."""
    braces = _ALTERNATIVES.search(pattern)
    if braces is None:
        if "{" in pattern or "}" in pattern:
            raise ValueError(f"pattern {pattern!r} has an unpaired brace: alternatives are written {{a,b}}")
        return [pattern]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [full for option in braces[1].split(",") for full in _expand(before + option.strip() + after)]


def _starts(name: str, prefix: str) -> list[int]:
    """The components of `name` at which a pattern may begin."""
    return [0, prefix.count(".") + 1] if prefix and name.startswith(prefix + ".") else [0]


def _matches(parts: Sequence[str], at: int, pattern: Sequence[str], lengths: Mapping[str, int]) -> bool:
    """Whether `pattern` matches exactly parts[at:]; parts[:at] is only the path that indices are resolved under."""
    if not pattern:
        return at == len(parts)
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(_matches(parts, end, rest, lengths) for end in range(at, len(parts) + 1))
    return at < len(parts) and _component_matches(parts, at, head, lengths) and _matches(parts, at + 1, rest, lengths)


def _component_matches(parts: Sequence[str], at: int, head: str, lengths: Mapping[str, int]) -> bool:
    if not _INDEX.fullmatch(head):
        return fnmatchcase(parts[at], head)
    length = lengths.get(".".join(parts[:at]))
    if length is None or not parts[at].isdigit():
        return parts[at] == head
    return int(parts[at]) in _indices(head, length)


def _indices(index: str, length: int) -> Sequence[int]:
    """The children that `0`, `-1`, `2:5` or `-8:` names in a container of `length`; Python's rules."""
    if ":" in index:
        start, stop = (int(bound) if bound else None for bound in index.split(":"))
        return range(length)[start:stop]
    return (int(index) + length if index.startswith("-") else int(index),)


def _nearest(pattern: str, names: Sequence[str], prefix: str) -> list[str]:
    """Up to three names that look most like `pattern`, each from another shape: repeated blocks count once."""

    def shape(name: str) -> str:
        dropped = name.removeprefix(prefix + ".") if prefix else name
        return ".".join("*" if _INDEX.fullmatch(part) else part for part in dropped.split("."))

    first_of_shape = {shape(name): name for name in reversed(names)}
    return [first_of_shape[near] for near in difflib.get_close_matches(shape(pattern), first_of_shape, n=3, cutoff=0.0)]


def _ranges(pattern: str, lengths: Mapping[str, int]) -> str:
    """The containers' index ranges, if `pattern` uses an index; a wrong index is the likeliest mistake then."""
    if not any(_INDEX.fullmatch(component) for alternative in _parse(pattern) for component in alternative):
        return ""
    return "".join(
        f"; {name or 'the model'!r} has children 0..{length - 1}" for name, length in lengths.items() if length
    )
