"""The table of delayed scales: casts write amaxes to the table, an update computes new scales, and a checkpoint
contains the table. No ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlp.quant.fp8 import DelayedScaling
from dlp.quant.quantizer import SlotOptions
from dlp.quant.state import ScalingState, SlotTable, SlotUse
from tests.metrics import assert_bit_equal

E4M3, E5M2 = SlotOptions(448.0, amax_history_len=4), SlotOptions(57344.0, amax_history_len=4)


def amaxes(**values: float) -> dict[str, float]:
    return values


def step(table: SlotTable, values: dict[str, float]) -> None:
    """Stage the given amaxes in their slots, as casts do, and update the scales."""
    for name, value in values.items():
        slot = table.slot(name)
        slot.staging.copy_(torch.maximum(slot.staging, torch.tensor(value)))
    table.update(table.staging.clone())


def test_the_scale_of_a_step_follows_from_the_amaxes_before():
    table = SlotTable({"x": E4M3, "dy": E5M2})
    assert table.scale.tolist() == [1.0, 1.0]
    step(table, amaxes(x=2.0, dy=4.0))
    assert table.scale.tolist() == [224.0, 14336.0] and table.staging.tolist() == [0.0, 0.0]
    step(table, amaxes(x=1.0))
    assert table.slot("x").scale == 224.0, "the largest of the window counts"
    assert table.slot("dy").scale == 14336.0, "a slot that was not cast keeps its scale"
    for _ in range(4):
        step(table, amaxes(x=1.0))
    assert table.slot("x").scale == 448.0, "the 2.0 has left the window of 4"


def test_slots_are_views_that_stay():
    table = SlotTable({"x": E4M3})
    slot = table.slot("x")
    q = DelayedScaling(amax_history_len=4).cast(torch.tensor([[1.0, -7.0]]), None, slot=slot)
    assert table.staging.item() == 7.0
    table.update(table.staging.clone())
    assert slot.scale == 64.0 and slot.staging == 0.0
    assert q.parts[1] == 1.0, "a tensor cast before keeps the scale_inv of its cast"


def test_each_slot_has_its_own_options():
    def mean(window: Tensor) -> Tensor:
        assert window.shape == (2, 1)
        return window.mean(0)

    table = SlotTable(
        {
            "a": SlotOptions(448.0, margin=1, amax_history_len=2), "b": SlotOptions(448.0, amax_history_len=1),
            "c": SlotOptions(448.0, amax_history_len=2, amax_compute_algo="most_recent"),
            "d": SlotOptions(448.0, amax_history_len=2, amax_compute_algo=mean), "e": E5M2,
        }
    )  # fmt: skip
    step(table, amaxes(a=4.0, b=4.0, c=4.0, d=4.0, e=4.0))
    step(table, amaxes(a=1.0, b=1.0, c=1.0, d=2.0, e=1.0))
    scales = {name: table.slot(name).scale.item() for name in table.names}
    assert scales == {"a": 56.0, "b": 448.0, "c": 448.0, "d": pytest.approx(448 / 3), "e": 14336.0}


def test_state_goes_by_name_into_another_order():
    table = SlotTable({"x": E4M3, "w": E4M3, "dy": E5M2})
    step(table, amaxes(x=2.0, w=3.0, dy=4.0))
    step(table, amaxes(x=1.0, w=5.0, dy=8.0))
    state = table.state_dict()
    other = SlotTable({"dy": E5M2, "w": E4M3, "x": E4M3})
    other.load_merged([state])
    for name in table.names:
        assert_bit_equal(other.slot(name).scale, table.slot(name).scale)
    for both in (table, other):
        step(both, amaxes(x=0.5, w=0.5, dy=0.5))
    assert all(torch.equal(other.state_dict()[n]["history"], table.state_dict()[n]["history"]) for n in table.names)
    assert state["x"]["history"].tolist() == [0.0, 0.0, 2.0, 1.0], "a copy: steps after it do not change it"


def test_slots_that_do_not_fit_are_not_loaded():
    table = SlotTable({"x": E4M3, "w": E4M3, "dy": E5M2})
    step(table, amaxes(x=2.0, w=2.0, dy=2.0))
    state = table.state_dict()
    other = SlotTable({"x": E4M3, "w": SlotOptions(448.0, amax_history_len=8), "dy": SlotOptions(57344.0, 1, 4)})
    assert other.load_known(state | {"y": state["x"]}).keys() == {"w", "dy", "y"}
    assert [other.slot(name).scale.item() for name in ("x", "w", "dy")] == [224.0, 1.0, 1.0]


def test_merging_takes_the_largest_histories_and_recomputes_scales():
    tables = [SlotTable({"x": E4M3, "y": SlotOptions(448.0, amax_history_len=1)}) for _ in range(2)]
    step(tables[0], amaxes(x=2.0, y=2.0))
    step(tables[1], amaxes(x=4.0, y=4.0))
    merged = SlotTable({"x": E4M3, "y": SlotOptions(448.0, amax_history_len=1)})
    merged.load_merged([table.state_dict() for table in tables])
    assert merged.state_dict()["x"]["history"].tolist() == [0.0, 0.0, 0.0, 4.0]
    assert merged.scale.tolist() == [112.0, 112.0]


@pytest.mark.parametrize(
    ("algorithm", "amax"), [(lambda window: window.mean(0), 3.5), ("max", 4.0), ("most_recent", 3.0)]
)
def test_merged_scales_follow_from_merged_histories_by_the_slots_own_algorithm(algorithm, amax):
    """Two ranks have the histories (2, 3) and (4, 1). The merged scale follows from the elementwise maxima (4, 3), and
    differs from the scale of each rank."""
    options = SlotOptions(448.0, amax_history_len=3, amax_compute_algo=algorithm)
    states = []
    for values in ((2.0, 2.0, 3.0), (2.0, 4.0, 1.0)):
        table = SlotTable({"x": options})
        for value in values:
            step(table, amaxes(x=value))
        states.append(table.state_dict())
    merged = SlotTable({"x": options})
    merged.load_merged(states)
    assert merged.state_dict()["x"]["history"].tolist() == [0.0, 4.0, 3.0]
    assert merged.scale.item() == pytest.approx(448.0 / amax)


@pytest.mark.parametrize(
    "options, message",
    [({"amax_history_len": 0}, "at least 1"), ({"amax_compute_algo": "mean"}, "one of max, most_recent or a function")],
)
def test_wrong_options_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DelayedScaling(**options)


def scaling(**changed: SlotUse) -> ScalingState:
    """Return a scaling state with three slots: x (cast in forward, shared by ranks), w (cast in forward, not shared) and
    dy (cast in backward, shared by ranks)."""
    uses = {"x": SlotUse(E4M3, True, True), "w": SlotUse(E4M3, True, False), "dy": SlotUse(E5M2, False, True)}
    return ScalingState(uses | changed)


def stage(state: ScalingState, **values: float) -> None:
    for name, value in values.items():
        state.slot(name, True).staging.clamp_(min=value)  # as casts write amaxes


def scales(state: ScalingState) -> dict[str, float]:
    return dict(zip(state.table.names, state.table.scale.tolist(), strict=True))


def test_only_the_scales_that_ranks_share_follow_the_maximum_over_them():
    state, other = scaling(), scaling()
    for each in (state, other):
        stage(each, x=1.0, w=1.0, dy=1.0)
    state.update(lambda staged: staged * 2)
    other.update(None)
    assert scales(state) == {"x": 224.0, "w": 448.0, "dy": 28672.0}
    assert scales(other) == {"x": 448.0, "w": 448.0, "dy": 57344.0}


def test_the_scales_of_one_pass_change_without_those_of_the_other():
    state = scaling()
    stage(state, x=1.0, w=2.0, dy=4.0)
    state.update(None, forward=True)
    assert scales(state) == {"x": 448.0, "w": 224.0, "dy": 1.0} and state.table.staging.tolist() == [0.0, 0.0, 4.0]
    state.update(None, forward=False)
    assert scales(state) == {"x": 448.0, "w": 224.0, "dy": 14336.0}, "a slot that was not cast keeps its scale"


@pytest.mark.parametrize("forward", [None, True, False])
def test_a_forward_keeps_the_scales_it_ran_with_over_updates(forward):
    state = scaling()
    held = state.hold("a region")
    assert state.hold("a region") is held and state.hold(None) is not held
    stage(state, x=2.0, dy=2.0)
    assert state.slot("x", True, held).scale.data_ptr() == state.slot("x", True).scale.data_ptr(), (
        "nothing has changed yet"
    )
    state.update(None, forward)
    changes = forward is not False  # an update of backward slots leaves the scales of forward slots unchanged
    assert state.slot("x", True, held).scale == 1.0, "held scale" if changes else "scale in the table"
    assert state.slot("x", True).scale == (224.0 if changes else 1.0)
    assert state.slot("dy", True, held).scale == state.slot("dy", True).scale, (
        "backward casts dy with the scale in the table"
    )
    if not changes:
        assert state.hold("a region") is held and held.values is None
    else:
        state.slot("x", True, held).staging.fill_(9.0)
        assert state.table.staging[0] == 0.0, "a held slot adds no amax to the table"
        assert state.hold("a region") is not held, "later forwards use the new scales"


def test_what_is_not_recorded_or_is_forgotten_does_not_count():
    state = scaling()
    state.slot("x", False).staging.fill_(2.0)
    stage(state, w=2.0, dy=2.0)
    state.forget({"w"})
    state.update(None)
    assert scales(state) == {"x": 1.0, "w": 1.0, "dy": 28672.0}


def test_amaxes_of_a_second_cast_take_the_place_of_those_of_the_first():
    state = scaling()
    stage(state, x=4.0, w=4.0)
    with state.restaging():
        stage(state, w=2.0)
    assert state.table.staging.tolist() == [4.0, 2.0, 0.0]


def test_slots_that_stay_keep_their_state_when_others_come():
    state, held = scaling(), None
    stage(state, x=2.0, w=2.0)
    state.update(None)
    held = state.hold(None)
    stage(state, x=1.0)
    new = state.replaced_by(scaling(w=SlotUse(E5M2, True, False)))
    assert scales(new) == {"x": 224.0, "w": 1.0, "dy": 1.0} and new.table.staging.max() == 1.0
    assert new.slot("w", True, held).scale == 224.0, "an earlier forward keeps its scales"
