"""Gradient accumulation under FSDP: both settings of `reduce_gradients` (after each microbatch, or once per step) give
losses that are equal within rounding, and store and send the planned bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import dlp
from dlp.parallel.weight import fsdp2 as fsdp
from launch.config.rules import Batch
from launch.config.run_config import Config, load
from launch.train import plan_text
from launch.training.gradient_accumulation import Accumulation, accumulation
from launch.training.wire_bytes import WARM
from tests import training
from tests.cases import nightly

WAYS = ("step", "microbatch")


def whole_gradients(model: nn.Module) -> Iterator[int]:
    """Yield, for each parameter that FSDP manages, the bytes of its unsharded gradient; 0 if there is none."""
    for module in model.modules():
        for param in fsdp._fsdp_params(module) if isinstance(module, torch.distributed.fsdp.FSDPModule) else ():
            kept = param.unsharded_accumulated_grad
            if kept is None and hasattr(param, "_unsharded_param"):
                kept = param._unsharded_param.grad
            kept = getattr(kept, "_local_tensor", kept)
            yield 0 if kept is None else kept.numel() * kept.element_size()


def trained(config: Config) -> tuple[list[float], list[int], Accumulation]:
    """Train three steps. Return the losses, the bytes of unsharded gradients after each microbatch of the first step,
    and the planned accumulation. In the last step the ledger compares bytes with the plan."""
    trainer, _ = training.trainer(config)
    held: list[int] = []
    losses = []
    with patch.object(dlp, "backward_dw", lambda model: held.append(sum(whole_gradients(model)))):
        for step in range(WARM + 1):
            losses.append(trainer.watched_step(step).numbers.read()[0])
    return losses, held[: trainer.built.batch.num_micro], trainer.built.accumulation


CASES = {
    2: ["--mesh.tp=1", "--train.micro_batch=2", "--train.dtype=fp32", "--recipe=bf16"],
    4: ["--train.micro_batch=1", "--train.global_batch=4", "--train.dtype=fp32", "--recipe=bf16"],
}
REPLICAS = ["--mesh.tp=1", "--train.micro_batch=2", "--mesh.dp_replicate=2", "--mesh.dp_shard=1"]


def both_ways(ranks, tmp_path, data, world, options):
    found = {}
    for way in WAYS:
        folder = f"--run.dir={tmp_path}/{way}"
        config = training.config(tmp_path, data, *options, f"--train.reduce_gradients={way}", folder)
        found[way] = ranks(world).run(trained, config)
    return found


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("world", "options"), [(2, CASES[2]), nightly(4, CASES[4]), nightly(2, REPLICAS)], ids=["fsdp", "tp", "replicas"]
)
def test_both_ways_train_alike_and_keep_what_was_said(ranks, tmp_path, data, world, options):
    """The two settings differ only in the order in which gradients are added, so the losses of the first step are equal.
    The relative difference of later losses is at most 1e-6 in fp32, and 1e-3 if weights are rounded to bf16 and
    quantized."""
    most = 1e-6 if "--train.dtype=fp32" in options else 1e-3
    found = both_ways(ranks, tmp_path, data, world, options)
    for (step, whole, asked), (each, none, decided) in zip(*found.values(), strict=True):
        assert step[0] == each[0] and each == pytest.approx(step, rel=most)
        assert whole == [*[asked.whole] * (len(whole) - 1), 0] and asked.whole == decided.whole
        assert none == [0] * len(whole) and (asked.reductions, decided.reductions) == (1, len(whole))


def planned(parameters: int, device: str = "sm_90") -> dlp.Plan:
    plan = dlp.make_plan(nn.Linear(4, 4, bias=False).to("meta"), [dlp.LayerGroup("all", "**", recipe="bf16")], 1)
    layer, weight = replace(plan.layers[0], parameters=parameters), replace(plan.weights[0], shape=(parameters,))
    return replace(plan, layers=(layer,), weights=(weight,), device_type=device)


def test_auto_keeps_whole_gradients_where_they_fit():
    config, batch = load("tiny"), Batch(1, 4, 8)
    large = planned(8_689_033_216)  # 70B at tp 8
    chosen = accumulation(config, large, batch, 8)
    assert (chosen.reductions, chosen.whole, chosen.shard) == (4, 34_756_132_864, 4_344_516_608)
    assert chosen.why == "with weights and optimizer 52.1 GB, more than half of a rank's 80.0 GB (assumed)"
    chosen = accumulation(config, large, batch, 8, memory=141e9)
    assert chosen.reductions == 1 and chosen.why.endswith(", no more than half of a rank's 141 GB")
    assert accumulation(config, planned(10**6, "cpu"), batch, 8).reductions == 1
    eight_bit = load("tiny", ["--train.optimizer=adamw8bit"])
    assert accumulation(eight_bit, large, batch, 8).why.startswith("with weights and optimizer 45.7 GB, more than half")
    for asked, reductions in (("step", 1), ("microbatch", 4)):
        chosen = accumulation(load("tiny", [f"--train.reduce_gradients={asked}"]), large, batch, 8)
        assert (chosen.reductions, chosen.why) == (reductions, "as reduce_gradients asks")
    for nothing in (Batch(1, 1, 8), Batch(1, 4, 1)):
        assert accumulation(config, large, nothing, 8) == Accumulation(1, nothing.num_micro)


def test_the_plan_prints_what_both_ways_keep_and_send():
    (line,) = (
        each
        for each in plan_text(load("tiny", ["--train.micro_batch=1"]), 8, "cpu").splitlines()
        if "accumulated" in each
    )
    assert line == (
        "gradients of 2 microbatches are accumulated unsharded, in fp32: 8.27 MB a rank, 1 reduction a step, 6.20 MB "
        "sent (with weights and optimizer 16.5 MB, no more than half of a rank's 8.00 GB (assumed)); with "
        "reduce_gradients = 'microbatch' as shards: 2.07 MB a rank, 2 reductions a step, 12.4 MB sent"
    )
    assert "wait" not in plan_text(load("tiny"), 8, "cpu")
