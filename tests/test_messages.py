"""Errors that no other test provokes: each is provoked once, and its message is checked. No ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import dlp
from dlp.comm import mesh
from dlp.parallel.model.state import _saved_swaps
from dlp.quant.quantizer import SlotOptions
from launch import plot
from tests.refusals import must_raise


def one_gpu(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("LOCAL_RANK", "1")
    environment.setattr(torch.cuda, "device_count", lambda: 1)
    mesh.init_process_group("cuda")


def foreign_swaps(_: object) -> None:
    _saved_swaps(torch.tensor(list(b'[{"step": 1}]'), dtype=torch.uint8), ())


PROVOKED: list[tuple[Callable[[pytest.MonkeyPatch], object], str]] = [
    (one_gpu, "local rank 1 has no GPU, since this machine has 1; start fewer ranks"),
    (
        lambda _: dlp.LayerGroup("a", "layers..up", recipe="bf16"),
        "pattern 'layers..up' has an empty component: write the dots between names only",
    ),
    (
        lambda _: dlp.LayerGroup("a", "layers.{0,1", recipe="bf16"),
        "pattern 'layers.{0,1' has an unpaired brace: alternatives are written {a,b}",
    ),
    (
        lambda _: dlp.recipe("fp8_current", power_of_two="yes"),
        "recipe fp8_current: power_of_two must be true or false; got 'yes'",
    ),
    (
        lambda _: SlotOptions(fp8_max=448.0, amax_compute_algo="mean"),
        "amax_compute_algo must be one of max, most_recent or a function of the window of amaxes; got 'mean'",
    ),
    (
        lambda _: dlp.recipe("fp8_delayed", margin=1000000),
        "margin must be between -64 and 64; got 1000000",
    ),
    (lambda _: plot.main(["a", "b", "--stats", "--out", "c.png"]), "--stats: expected one run, got 2"),
    (
        foreign_swaps,
        "the saved recipe changes cannot be read (KeyError: 'layers'); load another checkpoint",
    ),
    (
        lambda _: dlp.state_dict(nn.Linear(4, 4)),
        "this model has no step boundary yet: call dlp.convert or dlp.attach on the model first",
    ),
]


@pytest.mark.parametrize(("provoke", "message"), [pytest.param(*pair, id=pair[1][:40]) for pair in PROVOKED])
def test_message(provoke, message, monkeypatch):
    assert must_raise(ValueError, provoke, monkeypatch) == message
