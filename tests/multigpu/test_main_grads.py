"""attach(main_grads="grad") on 2 ranks: under tp, wgrad GEMMs accumulate with the bits of autograd; for weights that
FSDP shards, autograd accumulates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dlp
from dlp.parallel.model.grads import local_grad
from dlp.parallel.model.session import session_of
from tests import pool as worker
from tests import training
from tests.metrics import assert_all_bit_equal
from tests.net import batch, gradients, net
from tests.test_main_grads import Adds

LOCAL = {"name": "local", "match": ["blocks.1.{gate,up,down}"], "style": "local", "sequence_parallel": True}


def three_microbatches(
    sizes: dict[str, int], main_grads: str, fsdp: bool = False
) -> tuple[dict[str, Tensor], int, list[str]]:
    mesh = worker.mesh(**sizes)
    groups = [LOCAL] if sizes.get("tp") else []
    model = net("fp8_current", mesh, *groups, fsdp=fsdp)
    dlp.attach(model, torch.optim.SGD(model.parameters()), main_grads=main_grads)
    with Adds() as adds:
        for step in range(3):
            gradients(model, *batch(step, mesh))
    found: dict[str, Any] = {name: local_grad(p) for name, p in model.named_parameters()}
    return found, adds.count, [note for note in sorted(session_of(model).noted) if note.startswith("main_grads")]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sizes", "fsdp", "added", "left"),
    [
        ({"tp": 2}, False, 2 * 3, "blocks.1.gate and 2 more: the gradients are partial sums over tp"),
        ({"dp_shard": 2}, True, 0, "blocks.0.gate and 5 more: FSDP manages the weights"),
    ],
)
def test_gradients_have_autograds_bits(ranks, sizes, fsdp, added, left):
    expected = ranks(2).run(three_microbatches, sizes, "off", fsdp)
    for (found, count, notes), (plain, _, _) in zip(
        ranks(2).run(three_microbatches, sizes, "grad", fsdp), expected, strict=True
    ):
        assert count == added and notes == [f"main_grads = 'grad': autograd accumulates the gradients of {left}"]
        assert_all_bit_equal(found, plain)


@pytest.mark.slow
@pytest.mark.full  # test_raw_gradients.py compares gradients of such a run
@pytest.mark.ranks(2)
def test_a_run_has_the_same_losses(ranks, tmp_path):
    data = training.shards(tmp_path)
    found = {}
    for mode in ("off", "grad"):
        options = (f"--train.main_grads={mode}", "--train.micro_batch=2", f"--run.dir={tmp_path}/{mode}")
        config = training.config(tmp_path, data, *options, "--train.steps=3")
        ranks(2).run(training.run, config)
        found[mode] = [training.metrics(config, key) for key in ("loss", "gradient_norm", "validation_loss")]
    assert found["grad"] == found["off"]
