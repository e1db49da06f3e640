"""Layer groups on plain names: patterns, precedence, and refusals (no device, no module)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dlp
from dlp.parallel.linear.spec import OPTIONS, LayerOptions
from dlp.parallel.model.groups import FIELDS, LayerGroup, Resolved, resolve
from dlp.parallel.style import style
from dlp.quant.patterns import match_names, must_match
from launch.config.groups import Group
from tests.refusals import refuses

ROOT = Path(__file__).parent.parent

LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
LAYERS = 6
NAMES = [f"model.layers.{i}.{linear}" for i in range(LAYERS) for linear in LINEARS] + ["lm_head"]
LENGTHS = {"model.layers": LAYERS}


def found(pattern: str, prefix: str = "model") -> list[str]:
    return match_names(NAMES, LENGTHS, pattern, prefix)


def of_layers(indices: range | list[int], linears: tuple[str, ...] = LINEARS) -> list[str]:
    return [f"model.layers.{i}.{linear}" for i in indices for linear in linears]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("lm_head", ["lm_head"]),
        ("**", NAMES),
        ("*", ["lm_head"]),
        ("layers.**", of_layers(range(LAYERS))),
        ("model.layers.**", of_layers(range(LAYERS))),
        ("layers.0.**", of_layers([0])),
        ("layers.0.**.mlp.up_proj", of_layers([0], ("mlp.up_proj",))),
        ("layers.-1.**", of_layers([5])),
        ("layers.2:5.**", of_layers([2, 3, 4])),
        ("layers.-2:.**", of_layers([4, 5])),
        ("layers.:2.**", of_layers([0, 1])),
        ("layers.:.**", of_layers(range(LAYERS))),
        ("layers.-8:.**", of_layers(range(LAYERS))),
        ("layers.-2:-1.**", of_layers([4])),
        ("layers.6.**", []),
        ("layers.-7.**", []),
        ("layers.{0,-1}.**", of_layers([0, 5])),
        ("layers.0.self_attn.{q,k}_proj", of_layers([0], ("self_attn.q_proj", "self_attn.k_proj"))),
        ("layers.0.{self_attn.o,mlp.down}_proj", of_layers([0], ("self_attn.o_proj", "mlp.down_proj"))),
        ("layers.0.{self_attn.{q, k},mlp.up}_proj", of_layers([0], LINEARS[:2] + ("mlp.up_proj",))),
        ("layers.0.*.[qk]_proj", of_layers([0], ("self_attn.q_proj", "self_attn.k_proj"))),
        ("layers.0.mlp.*", of_layers([0], ("mlp.up_proj", "mlp.down_proj"))),
        ("layers.0.*", []),
        ("layers.*.up_proj", []),
        ("**.o_*", [name for name in NAMES if name.endswith("o_proj")]),
        ("q_proj", []),
        ("Layers.**", []),
    ],
)
def test_patterns(pattern, expected):
    assert found(pattern) == expected


def test_without_the_prefix_names_match_from_the_root_only():
    assert found("layers.0.**", prefix="") == []
    assert found("model.layers.0.**", prefix="") == of_layers([0])
    assert found("layers.0.**", prefix="mod") == []


def test_indices_belong_to_the_container_they_stand_in():
    names = ["0.a", "1.a", "1.b.0", "1.b.1", "2.a"]
    lengths = {"": 3, "1.b": 2}
    assert match_names(names, lengths, "-1.**") == ["2.a"]
    assert match_names(names, lengths, "1.b.-1") == ["1.b.1"]
    assert match_names(names, {}, "-1.**") == []
    assert match_names(names, {}, "2.a") == ["2.a"]


@given(st.data())
def test_a_name_matches_itself_with_any_component_starred(data):
    name = data.draw(st.sampled_from(NAMES))
    parts = name.split(".")
    stars = data.draw(st.lists(st.sampled_from(["keep", "*", "**"]), min_size=len(parts), max_size=len(parts)))
    pattern = ".".join(part if star == "keep" else star for part, star in zip(parts, stars, strict=True))
    as_regex = r"\.".join(re.escape(p) if s == "keep" else r"[^.]+" for p, s in zip(parts, stars, strict=True))
    matched = match_names(NAMES, LENGTHS, pattern)
    assert name in matched
    if "**" not in stars:
        assert matched == [other for other in NAMES if re.fullmatch(as_regex, other)]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers..x", "empty component"),
        ("", "empty component"),
        ("layers.a**", r"'\*\*' matches whole components only; inside 'a\*\*'"),
        ("layers.{0,1.x", "unpaired brace"),
        ("layers.0}.x", "unpaired brace"),
    ],
)
def test_malformed_patterns_are_refused_at_construction(pattern, message):
    with pytest.raises(ValueError, match=message):
        LayerGroup("g", [pattern], recipe="bf16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"match": [], "recipe": "bf16"}, "layer group 'g' has no pattern"),
        ({"match": ["**"]}, "layer group 'g' sets nothing: set one of recipe, style, sequence_parallel, siblings"),
        ({"match": ["**"], "style": "colum"}, "style 'colum' is not one of column, row, local"),
    ],
)
def test_empty_or_unknown_settings_are_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        LayerGroup("g", **arguments)


def test_one_pattern_may_stand_alone_and_false_is_a_setting():
    group = LayerGroup("g", "layers.**", siblings=False)
    assert group.match == ("layers.**",)
    assert group.fields() == {"siblings": False}


def test_the_last_match_wins_field_by_field():
    groups = [
        LayerGroup("default", ["layers.**"], recipe="fp8_current", sequence_parallel=True),
        LayerGroup("columns", ["layers.*.self_attn.{q,k}_proj", "**.up_proj"], style="column", siblings=True),
        LayerGroup("edges", ["layers.{0,-1}.**", "lm_head"], recipe="bf16", sequence_parallel=False),
        LayerGroup("head", ["lm_head"], recipe={"name": "fp8_current", "power_of_two": True}),
    ]
    resolved = resolve(groups, NAMES + ["extra"], LENGTHS, prefix="model")
    assert list(resolved) == NAMES + ["extra"]
    assert resolved["model.layers.0.self_attn.q_proj"] == Resolved(
        recipe="bf16",
        style="column",
        sequence_parallel=False,
        siblings=True,
        groups=("default", "columns", "edges"),
        won={"recipe": "edges", "style": "columns", "sequence_parallel": "edges", "siblings": "columns"},
        overrode={"recipe": ("default",), "style": (), "sequence_parallel": ("default",), "siblings": ()},
    )
    assert resolved["model.layers.1.mlp.down_proj"] == Resolved(
        recipe="fp8_current",
        sequence_parallel=True,
        groups=("default",),
        won={"recipe": "default", "sequence_parallel": "default"},
        overrode={"recipe": (), "sequence_parallel": ()},
    )
    assert resolved["lm_head"].recipe == {"name": "fp8_current", "power_of_two": True}
    assert resolved["lm_head"].overrode["recipe"] == ("edges",)
    assert resolved["extra"] == Resolved()
    assert not any(getattr(resolved["extra"], name) for name in FIELDS)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.*.self_attn.q_porj", r"nearest: 'model\.layers\.0\.self_attn\.q_proj', "),
        ("lm_haed", r"nearest: 'lm_head'"),
        ("layers.6.mlp.up_proj", r"nearest: 'model\.layers\.0\.mlp\.up_proj'.*; 'model\.layers' has children 0\.\.5"),
    ],
)
def test_a_pattern_without_layers_names_the_nearest(pattern, message):
    groups = [LayerGroup("default", ["**"], recipe="bf16"), LayerGroup("mine", ["lm_head", pattern], style="column")]
    with refuses(rf"layer group 'mine': pattern '{re.escape(pattern)}' matches no layer; {message}"):
        resolve(groups, NAMES, LENGTHS, prefix="model")


def test_a_model_without_layers_says_so():
    with refuses("set_recipe: pattern 'x' matches no layer; nearest: none, the model has no layer"):
        must_match([], {}, "x", asked_by="set_recipe")


def test_a_group_left_with_no_layer_is_refused():
    default = LayerGroup("default", ["layers.**"], recipe="fp8_current")
    edges = LayerGroup("edges", ["layers.{0,-1}.**"], recipe="bf16")
    two = [name for name in NAMES if ".0." in name or ".1." in name]
    message = "group 'default' has no effect: on every matching layer, its fields are overridden by 'edges'"
    with pytest.raises(ValueError, match=message):
        resolve([default, edges], two, {"model.layers": 2}, prefix="model")
    kept = LayerGroup("default", ["layers.**"], recipe="fp8_current", siblings=True)
    assert resolve([kept, edges], two, {"model.layers": 2}, prefix="model")[two[0]].siblings is True


def test_two_groups_of_one_name_are_refused():
    with pytest.raises(ValueError, match="need different names; given twice: 'a'"):
        resolve([LayerGroup("a", "**", recipe="bf16"), LayerGroup("a", "lm_head", style="column")], NAMES, LENGTHS)


def files_naming(option: str) -> set[str]:
    return {
        str(file.relative_to(ROOT))
        for folder in ("dlp", "launch")
        for file in (ROOT / folder).rglob("*.py")
        if re.search(rf"\b{option}\b", file.read_text())
    }


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_switch_of_layers_is_declared_once(option):
    """Groups, plans, specs and settings pass all switches (`LayerOptions`) as one object. Only code that declares or
    implements a switch names it."""
    found = files_naming(option.name)
    assert "dlp/parallel/linear/spec.py" in found
    # Files with the arguments of LayerGroup, the arguments of Transformer Engine, and the settings of TOML
    documented = (
        "dlp/parallel/model/groups.py",
        "dlp/te",
        "launch/config/sections.py",
    )
    own = "dlp/parallel/linear/", "dlp/parallel/weight/", "dlp/ops/", *documented
    elsewhere = {name for name in found if not name.startswith(own)}
    assert len(elsewhere) <= 3, elsewhere  # code that implements or refuses the switch
    group = LayerGroup("g", ["**"], **{option.name: True})
    assert group.fields() == {option.name: True} and getattr(resolve([group], NAMES, LENGTHS)[NAMES[0]], option.name)
    assert Group(name="g", match=("**",), **{option.name: True}).layer_fields() == {option.name: True}
    assert f"| `{option.name}` | {option.metadata['doc']}" in (ROOT / "docs" / "layer-groups.md").read_text()


def test_what_nobody_chose_is_off():
    column = style("column", False)
    settled = LayerOptions().settled(column)
    assert not any(getattr(settled, option.name) for option in OPTIONS) and not LayerOptions().notes(column)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_graph_is_compiled_for_each_switch(option):
    core = dlp.Linear(16, 16).core
    before = core.bound.trace_id
    core.set_spec(replace(core.spec, options=LayerOptions(**{option.name: True})))
    assert core.bound.trace_id != before


def test_a_switch_that_a_style_cannot_have_is_off_and_the_plan_says_why():
    asked, row, summed = LayerOptions(delay_wgrad=True), style("row", True), style("local", True)
    assert asked.settled(row).delay_wgrad is True and asked.notes(row) == ("wgrad is delayed until dlp.backward_dw",)
    assert asked.settled(summed).delay_wgrad is False
    assert asked.notes(summed) == (
        "wgrad is not delayed: the partial weight gradient is summed over tp at the end of backward",
    )
