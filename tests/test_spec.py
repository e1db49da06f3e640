"""A LinearSpec is a value, separate from the state of a layer. The tests call pure functions and run layers on the
CPU."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import torch

import dlp
from dlp.parallel.linear.spec import LayerOptions, LinearSpec, Overlaps, spec_of
from dlp.parallel.linear.state import bound_of
from dlp.parallel.style import COLUMN_SP
from dlp.quant.recipe import load
from tests.cases import RECIPES


def spec(recipe: str = "fp8_current") -> LinearSpec:
    return LinearSpec("layer", COLUMN_SP, load(recipe), Overlaps.named("serial"))


def test_specs_are_compared_by_value():
    for recipe in RECIPES:
        assert spec(recipe) == spec(recipe) and hash(spec(recipe)) == hash(spec(recipe)), recipe
    assert (
        spec() != spec("bf16") != replace(spec("bf16"), options=LayerOptions(delay_wgrad=True))
        and len({spec(), spec(), spec("bf16")}) == 2
    )
    again = pickle.loads(pickle.dumps(spec()))
    assert copy.deepcopy(spec()) == spec() == replace(again, overlap=spec().overlap), (
        "strategies are compared by identity"
    )


def test_running_a_layer_changes_nothing_of_its_spec():
    layer = dlp.Linear(64, 64, recipe="fp8_delayed")
    layer.core.spec.slots, layer.core.spec.draws, layer.core.spec.weight_formats  # noqa: B018  (derived values, cached by the spec)
    before = dict(vars(layer.core.spec))
    layer(torch.randn(4, 64, requires_grad=True)).sum().backward()
    after = vars(layer.core.spec)
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert layer.core.bound.cache and layer.core.bound.calls, "decisions are cached in the BoundSpec"


def test_equal_specs_share_a_trace_and_no_state():
    one, two = (dlp.Linear(64, 64, recipe="fp8_current").core.bound for _ in range(2))
    assert one.spec == two.spec and one.trace_id == two.trace_id
    stands = spec_of(one.trace_id)  # an equal spec, possibly of another layer
    assert all(getattr(stands, each) == getattr(one.spec, each) for each in ("style", "recipe", "tp", "options"))
    assert int(one.spec_id) != int(two.spec_id) and bound_of(two.spec_id) is two and one.session is not two.session


def test_a_trace_is_named_by_what_it_stands_for(monkeypatch):
    """The name of a trace depends only on the spec, and not on the order in which a process creates specs, because
    inductor caches graphs on disk that contain these names."""

    def names(of: list[str]) -> dict[str, int]:
        monkeypatch.setattr("dlp.parallel.linear.spec._TRACES", {})
        return {recipe: dlp.Linear(64, 64, recipe=recipe).core.bound.trace_id for recipe in of}

    first, again = names(RECIPES), names(RECIPES[::-1])
    assert first == again and len(set(first.values())) == len(RECIPES)
