"""Planned and counted bytes of complete training steps are equal on every mesh and in every case that the plan
predicts. If bytes that are not in the plan are sent, all ranks raise. Tests of the share of bf16 use counted bytes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import dlp
from bench.ledger import COLUMNS, gather_shares, rows, watch, weight_share
from dlp.parallel.linear import quantize as quantization
from dlp.parallel.model.session import session_of
from dlp.parallel.overlap.serial import Serial
from dlp.parallel.traffic.ledger import Ledger, LedgerError, plan_of
from dlp.parallel.traffic.predict import in_bf16, step_traffic
from dlp.parallel.weight.sharded import VALUES
from dlp.quant.tensor import HighPrecision, QuantizedTensor
from launch.config.run_config import Config
from launch.training.trainer import Step, Trainer
from launch.training.wire_bytes import WARM, planned
from tests import pool as worker
from tests import training
from tests.cases import BY_SCALES, RECIPES, few, nightly, of_these
from tests.refusals import may_raise

# Largest bytes of one gathered orientation, relative to a gather in bf16. Recipes that are not listed gather nothing
# quantized.
MOST = {
    "fp8_current": 0.501,
    "fp8_delayed": 0.501,
    "fp8_rowwise": 0.52,
    "int8": 0.52,
    "fp8_block": 0.52,
    "mxfp8": 0.52,
    "nvfp4": 0.285,
}


def steps(config: Config, count: int = WARM + 1) -> Trainer:
    """Train `count` steps and return the trainer. Raises if counted and planned bytes differ."""
    made, _ = training.trainer(config)
    for step in range(count):
        made.run.say(*made.watched_step(step).remarks)
    assert made.wire.seen().sent
    return made


def shares(config: Config) -> tuple[list[float], list[float]]:
    """Return the gathered bytes as shares of the bytes in bf16, for x and dy over tp, and for weights over dp_shard."""
    made = steps(config)
    seen, plan, load = made.wire.seen(), plan_of(made.built.model), made.wire.load()
    ours, bf16 = planned(plan, load), planned(in_bf16(plan), load)
    return gather_shares(seen, bf16, "tp"), weight_share(seen, ours, bf16, "dp_shard")


# Complete scaling blocks of 128 in every operand
WHOLE_BLOCKS = ["--model.hidden=128", "--model.ffn=256", "--model.head_dim=32"]
OVER_DP = ["--mesh.tp=1", "--mesh.dp_shard=2", "--train.micro_batch=2"]  # two microbatches


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", few(RECIPES, ("nvfp4",)))
def test_every_recipe_sends_what_its_plan_says_and_gathers_its_share_of_bf16(ranks, tmp_path, data, recipe):
    config = training.config(tmp_path, data, "--groups.default.recipe", recipe, *WHOLE_BLOCKS)
    for found, _ in ranks(2).run(shares, config):
        assert max(found, default=0.0) <= MOST.get(recipe, 0.0)
        # Six gathers: x of qkv and x of gate/up, each in forward and in backward; dy of o and dy of down
        assert len(found) >= 6 or recipe not in MOST
        print(f"{recipe}: {len(found)} gathers of {sorted(set(found))} of bf16")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", few(BY_SCALES, ("nvfp4",)))
def test_every_recipe_gathers_its_share_of_weights_over_dp_shard(ranks, tmp_path, data, recipe):
    """Bytes of the embedding, the head and the norms are not counted. `hidden` is 256, so that each shard consists of
    complete scaling blocks in every recipe."""
    wide = [option.replace("hidden=128", "hidden=256").replace("head_dim=32", "head_dim=64") for option in WHOLE_BLOCKS]
    config = training.config(
        tmp_path, data, "--groups.default.recipe", recipe, *wide, *OVER_DP, "--train.micro_batch=4"
    )
    for _, found in ranks(2).run(shares, config):
        assert len(found) == (recipe in MOST) and 0.25 <= max(found, default=0.25) <= MOST.get(recipe, 0.25)


CHUNKED = "--groups.default.overlap=chunked"
IN_FP8 = "--groups.default.recipe={name='fp8_current', wire={fprop='fp8', dgrad='fp8'}}"
TWO_BLOCKS = "--model.layers=2"  # transformer blocks: FSDP gathers the second while the first computes
OVER_TP = {
    "fp8 sums of microbatches": [IN_FP8, "--train.micro_batch=2"],
    "fp8 sums of whole tokens": [IN_FP8, "--mesh.sequence_parallel=false"],
    "chunked": [CHUNKED, "--groups.default.recipe=mxfp8"],
    "chunked fp8 sums, x is kept as it is": [CHUNKED, IN_FP8, "--groups.default.save_original_input=true"],
    "chunked fp8 sums of whole tokens": [CHUNKED, IN_FP8, "--mesh.sequence_parallel=false"],
    "odd tokens, and the world agrees": [
        "--train.sequence=66",
        "--mesh.amax_group=world",
        "--groups.default.recipe=nvfp4",
    ],
    "scope": ["--groups.default.recipe={name='fp8_rowwise', amax_scope='all'}"],
    "fp32 results, recomputed": [
        "--train.checkpointing=full",
        "--groups.default.recipe={name='fp8_current', out_dtype={fprop='fp32', dgrad='fp32'}}",
    ],
    "whole tokens, one gemm in bf16, tied": [
        "--mesh.sequence_parallel=false",
        "--groups.default.recipe={name='nvfp4', high_precision=['dgrad']}",
        "--model.tie_embeddings=true",
    ],
    "dy as it is, and so is the x that is kept": [
        "--groups.default.recipe={name='mxfp8', gather_dy='high_precision'}",
        "--groups.default.save_original_input=true",
    ],
    "weights cast at use": [
        "--train.weight_cache=forward",
        "--groups.default.recipe={name='fp8_current', amax_scope='all'}",
    ],
}
OVER_DATA = {
    "fsdp in both orientations at once, with a quantized head": [
        *OVER_DP,
        *WHOLE_BLOCKS,
        "--train.checkpointing=full",
        "--groups.default.match=['**']",
        "--groups.default.recipe=mxfp8",
    ],
    "fsdp of four microbatches and scales of rows": [
        *OVER_DP,
        "--train.micro_batch=1",
        "--groups.default.recipe=fp8_rowwise",
    ],
    "fsdp tied and one gemm in bf16": [
        *OVER_DP,
        "--model.tie_embeddings=true",
        "--groups.default.match=['**']",
        "--groups.default.recipe={name='nvfp4', high_precision=['dgrad']}",
    ],
    "fsdp and the world agrees": [*OVER_DP, "--mesh.amax_group=world"],
    "fsdp of values in fp32 and the world agrees": [
        *OVER_DP,
        "--mesh.quantized_gather=false",
        "--train.dtype=fp32",
        "--mesh.amax_group=world",
    ],
    "fsdp with gradients in bf16 and scales of one rank": [
        *OVER_DP,
        "--mesh.grad_wire=bf16",
        "--mesh.sequence_parallel=false",
        "--groups.default.recipe={name='fp8_delayed', reduce_amax=false}",
    ],
    "fsdp and shards that cut blocks, with gradients in fp8": [
        *OVER_DP,
        "--mesh.grad_wire=fp8",
        "--groups.default.recipe=fp8_block",
    ],
    "replicas that agree": ["--mesh.tp=1", "--mesh.dp_replicate=2", "--mesh.dp_shard=1", "--mesh.amax_group=world"],
}
CASES = OVER_TP | {case: [TWO_BLOCKS, *options] for case, options in OVER_DATA.items()}
FOR_ALL = [  # cases that also run without `--all-cases`, because no other test covers their terms of the plan
    "fp8 sums of microbatches",
    "odd tokens, and the world agrees",
    "whole tokens, one gemm in bf16, tied",
]
ON_FOUR = {
    "fsdp and tp": ["--train.micro_batch=1", "--groups.default.recipe=fp8_delayed"],
    "fsdp and tp in fp32 agree everywhere": [
        "--train.micro_batch=2",
        "--train.dtype=fp32",
        "--groups.default.recipe={name='fp8_current', amax_scope='all'}",
    ],
    "hsdp with gradients in fp8": ["--mesh.tp=1", "--mesh.dp_replicate=2", "--mesh.dp_shard=2", "--mesh.grad_wire=fp8"],
    "hsdp": ["--mesh.tp=1", "--mesh.dp_replicate=2", "--mesh.dp_shard=2"],
}


def goes_through(config: Config) -> int:
    return sum(steps(config).wire.seen().sent.values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", of_these(FOR_ALL, CASES))
def test_cases_send_what_their_plan_says(ranks, tmp_path, data, case):
    assert min(ranks(2).run(goes_through, training.config(tmp_path, data, *CASES[case]))) > 0


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", of_these(["hsdp with gradients in fp8"], ON_FOUR))
def test_cases_on_four_ranks_send_what_their_plan_says(ranks, tmp_path, data, case):
    assert min(ranks(4).run(goes_through, training.config(tmp_path, data, *ON_FOUR[case]))) > 0


class Stray(Trainer):
    """Trainer in which, in the third step, one rank sends bytes that are not in the plan."""

    def train_step(self, step: int) -> Step:
        if step == WARM:
            dist.broadcast(torch.ones(100, device=worker.device()), src=1)
        return super().train_step(step)


def message_of(config: Config, cls: type[Trainer]) -> str:
    made, _ = training.trainer(config, cls)
    return may_raise(LedgerError, lambda: [made.watched_step(step) for step in range(WARM + 1)])


@pytest.mark.ranks(2)
def test_a_stray_collective_raises_on_all_ranks_with_both_numbers(ranks, tmp_path, data):
    config = training.config(tmp_path, data)
    expected = (
        "counted bytes differ from planned bytes: on rank 1, tp other: planned 0 bytes, counted 400 (first in no single "
        "layer)"
    )
    assert ranks(2).run(message_of, config, Stray) == [expected, expected]


class Silent(Trainer):
    """Trainer whose fprop gathers in bf16 in the third step, instead of in the format of the recipe."""

    def train_step(self, step: int) -> Step:
        start = quantization.start_gather

        def silent(bound: Any, plan: Any, tensor: str, gathered: Any, mine: QuantizedTensor, lease: Any = None) -> Any:
            whole = QuantizedTensor(HighPrecision(), (mine.dequantize(torch.bfloat16),))
            return start(bound, plan, tensor, gathered, *((whole, None) if gathered.gemm == "fprop" else (mine, lease)))

        with patch.object(quantization, "start_gather", silent if step == WARM else start):
            return super().train_step(step)


@pytest.mark.ranks(2)
def test_a_silent_gather_in_bf16_raises(ranks, tmp_path, data):
    x = 256 * 64 * 2  # tokens of this rank x hidden size x gathers (qkv, gate/up)
    expected = (
        f"counted bytes differ from planned bytes: on rank 0, tp fprop: planned {x:,} bytes, counted {2 * x:,} (first "
        f"in model.layers.0.mlp.gate_proj)"
    )
    assert ranks(2).run(message_of, training.config(tmp_path, data), Silent) == [expected, expected]


class SilentWeights(Trainer):
    """Trainer in which FSDP gathers one weight in bf16 in the third step, instead of in the format of the recipe."""

    def train_step(self, step: int) -> Step:
        if step == WARM:
            weights = {weight.name: weight for weight in session_of(self.built.model).weights()}
            weight = weights["model.layers.0.mlp.down_proj"]
            weight.layouts, weight.why = (VALUES, VALUES), "this test asks for it"
        return super().train_step(step)


@pytest.mark.ranks(2)
@pytest.mark.slow
@pytest.mark.full  # the test above has a silent gather over tp
def test_a_weight_that_silently_travels_in_bf16_raises(ranks, tmp_path, data):
    config = training.config(tmp_path, data, *OVER_DP)
    made = ranks(2).run(by_dp_shard, config)[0]
    # bf16 instead of codes: one more byte for each element of half of [64, 128], in two passes of 2 microbatches
    more = made + 64 * 128 // 2 * 2 * 2
    told = ranks(2).run(message_of, config, SilentWeights)
    assert told[0] == told[1]
    assert f"dp_shard weights: planned {made:,} bytes, counted {more:,} (first in no single layer)" in told[0]


def by_dp_shard(config: Config) -> int:
    """Train, and return the counted bytes of weights that are gathered over dp_shard."""
    seen = steps(config).wire.seen()
    return sum(n for key, n in seen.sent.items() if (key.group, key.purpose) == ("dp_shard", "weights"))


def untold(config: Config) -> tuple[str, int, dict[str, int]]:
    """Run with an overlap strategy that has no method `sent`, which predicts bytes; return the warning, the counted bytes
    and the planned bytes."""
    with patch.object(Serial, "sent", None):
        made = steps(config)
        return made.wire.said(), sum(made.wire.seen().sent.values()), made.wire.bytes()


@pytest.mark.ranks(2)
def test_what_cannot_be_predicted_is_said_and_stops_no_run(ranks, tmp_path, data):
    config = training.config(tmp_path, data)
    for said, counted, predicted in ranks(2).run(untold, config):
        assert (
            counted > 0
            and not predicted
            and said
            == (
                "WARNING: bytes on the wire were counted, but not compared with the plan: the bytes of "
                "model.layers.0.self_attn.q_proj cannot be predicted: the overlap strategy 'serial' has no method "
                "'sent', which predicts transfers"
            )
        )
    assert sum("not compared with the plan" in line for line in training.said(config)) == 1


def watches(config: Config) -> bool:
    made, _ = training.trainer(config)
    for step in range(WARM + 1):
        made.watched_step(step)
    return made.wire.watches


@pytest.mark.ranks(1)
def test_one_rank_watches_nothing(ranks, tmp_path, data):
    assert ranks(1).run(watches, training.config(tmp_path, data, "--mesh.tp=1")) == [False]


def watched(config: Config) -> tuple[list[int], list[int]]:
    """Train eight steps; return the numbers of the steps in which the ledger counts bytes, and the planned bytes of
    each step over tp."""
    made, _ = training.trainer(config)
    seen, sent = [], []
    for step in range(8):
        sent.append(made.watched_step(step).wire.get("tp", 0))
        seen += [step + 1] * made.wire.watches
    return seen, sent


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("mode", "steps"), [("first", [3, 7]), nightly("always", [3, 7, 8]), nightly("off", [])])
@pytest.mark.slow
def test_which_steps_are_watched(ranks, tmp_path, data, mode, steps):
    swap = "[{at_step = 4, recipe = 'fp8_block'}]"
    config = training.config(tmp_path, data, f"--train.ledger={mode}", "--train.steps=8", "--groups.default.swap", swap)
    for seen, sent in ranks(2).run(watched, config):
        assert seen == steps
        assert len(set(sent[:4])) == len(set(sent[4:])) == 1 and sent[4] > sent[3]  # fp8_block sends more


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_steps_after_a_swap_of_weights_over_dp_shard(ranks, tmp_path, data):
    """In the first steps after a recipe change, the orientation that recomputation needs is gathered separately. From
    the third step on it is part of the regular gather."""
    swap = "[{at_step = 4, recipe = 'mxfp8'}]"
    one = ["--mesh.tp=1", "--mesh.dp_shard=2", "--train.global_batch=2", "--train.sequence=32"]  # one microbatch
    options = [*one, *WHOLE_BLOCKS, "--train.checkpointing=full", "--train.steps=8", "--train.ledger=always"]
    config = training.config(tmp_path, data, *options, "--groups.default.swap", swap)
    assert [seen for seen, _ in ranks(2).run(watched, config)] == [[3, 7, 8]] * 2


def after_validation(config: Config) -> int:
    made, _ = training.trainer(config)
    for step in range(WARM):
        made.watched_step(step)
    made.validate()
    made.watched_step(WARM)
    return sum(made.wire.seen().sent.values())


@pytest.mark.ranks(2)
def test_a_step_after_a_validation_gathers_like_any_other(ranks, tmp_path, data):
    assert min(ranks(2).run(after_validation, training.config(tmp_path, data, "--mesh.tp=1"))) > 0


def report(config: Config) -> tuple[dict[str, dict[str, int]], int]:
    made = steps(config)
    load = made.wire.load()
    return dlp.wire_report(made.built.model, load), sum(step_traffic(plan_of(made.built.model), load).values())


@pytest.mark.ranks(2)
def test_the_report_has_bytes_by_layer_and_pass(ranks, tmp_path, data):
    for found, total in ranks(2).run(report, training.config(tmp_path, data, "--groups.default.recipe=fp8_block")):
        assert sum(sum(passes.values()) for passes in found.values()) == total
        m, k = 256, 64
        down = found["model.layers.0.mlp.down_proj"]
        quantized = m * k + m * 4  # a row of 64 elements is one (partial) block with one scale
        assert down == {"fprop": m * k * 2, "dgrad": quantized, "wgrad": m * k + 2 * k * 4}


def by_hand() -> str:
    mesh = worker.mesh(tp=2)
    layer = dlp.ColumnParallelLinear(16, 16, tp=mesh["tp"], device=worker.device())
    dlp.attach(layer, torch.optim.SGD(layer.parameters()))
    with pytest.raises(ValueError, match="this model has no plan: the layers were constructed explicitly") as error:
        plan_of(layer)
    Ledger(mesh)
    return str(error.value)


@pytest.mark.ranks(2)
def test_layers_made_by_hand_have_no_plan(ranks):
    assert all("call dlp.convert on a plain model" in message for message in ranks(2).run(by_hand))


def table(config: Config, cls: type[Trainer]) -> tuple[str, list[dict[str, str]]]:
    made, _ = training.trainer(config, cls)
    differs = watch(made)
    return differs, [dict(zip(COLUMNS, row.split("\t"), strict=True)) for row in rows("fp8_current", "tp=2", made)]


@pytest.mark.ranks(2)
def test_rows_of_the_ledger_program(ranks, tmp_path, data):
    config = training.config(tmp_path, data)
    for differs, (row,) in ranks(2).run(table, config, Trainer):
        # Four agreements (on two x and two dy) of 8 bytes
        assert not differs and row["planned"] == row["counted"] and int(row["amax"]) == 4 * 8
        assert row["group"] == "tp" and float(row["share_of_bf16"]) < 0.9 and row["gathers_of_bf16"] == "0.5000"
    told = ranks(2).run(table, config, Stray)
    assert all("planned 0 bytes, counted 400" in differs for differs, _ in told)
    assert [int(row["counted"]) - int(row["planned"]) for _, (row,) in told] == [0, 400]


def labels_of_gathers(config: Config) -> set[Any]:
    made = steps(config)
    return {(key.purpose, key.precision) for key in made.wire.seen().sent if "o_proj" in key.layer}


@pytest.mark.ranks(2)
def test_dy_travels_once_where_its_recipe_asks(ranks, tmp_path, data):
    recipe = "--groups.default.recipe={name='fp8_block', gather_dy='high_precision'}"
    for found in ranks(2).run(labels_of_gathers, training.config(tmp_path, data, recipe)):
        assert found == {("fprop", "bfloat16"), ("dgrad", "bfloat16")}
