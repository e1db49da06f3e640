"""Planned bytes on the wire, compared with formulas in this file. No ranks."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import dlp
from dlp.comm.mesh import ParallelDims, ranks_of_host
from dlp.parallel.traffic.predict import Sent, Unpredictable, Workload, in_bf16, step_traffic
from dlp.quant.recipe import both
from dlp.quant.tensor import HighPrecision
from launch.config.run_config import load
from launch.estimate import memory_check
from launch.ranks import links
from launch.train import plan_text
from launch.training import wire_bytes
from tests.refusals import refuses

M, K, N = 512, 128, 256  # tokens, in_features, out_features


def traffic(recipe: Any, style: str, *, sp: bool = True, tp: int = 2, **more: Any) -> dict[tuple[str, str], int]:
    """Return {(purpose, precision): bytes} of one linear K -> N on tp ranks."""
    group = dlp.LayerGroup("all", "0", style=style, sequence_parallel=sp, recipe=recipe)
    plan = dlp.make_plan(nn.Sequential(nn.Linear(K, N, bias=False)), [group], tp, batch=(1, M))
    sent = step_traffic(plan, Workload({"tp": tp}, M, **more))
    assert all((key.group, key.layer) in (("tp", "0"), ("tp", "")) for key in sent)
    return {(key.purpose, key.precision): nbytes for key, nbytes in sent.items()}


def test_column_sp_gathers_x_twice_and_scatters_dx():
    m = M // 2
    assert traffic("fp8_block", "column") == {
        ("fprop", "fp8_block[e4m3, 1x128]"): m * K + m * 4,
        ("wgrad", "fp8_block[e4m3, 1x128]"): m * K + K * (m // 128) * 4,
        ("dgrad", "bfloat16"): M * K * 2 // 2,
    }


def test_row_sp_gathers_dy_and_scatters_y():
    m = M // 2
    assert traffic("fp8_current", "row") == {
        ("fprop", "bfloat16"): M * N * 2 // 2,
        ("dgrad", "fp8_tensor[e5m2]"): m * N,
        ("amax", "float32"): 2 * 4,
    }
    twice = traffic("mxfp8", "row")
    assert twice["dgrad", "mxfp8[e4m3, 1x32]"] == twice["wgrad", "mxfp8[e4m3, 1x32]"] == m * N + m * N // 32
    once = traffic({"name": "mxfp8", "gather_dy": "high_precision"}, "row")
    assert once == {("fprop", "bfloat16"): M * N, ("dgrad", "bfloat16"): m * N * 2}


@pytest.mark.parametrize("tp", [2, 4])
def test_without_sequence_parallelism_only_reductions(tp):
    assert traffic("nvfp4", "column", sp=False, tp=tp) == {("dgrad", "bfloat16"): 2 * (tp - 1) * (M * K // tp) * 2}
    assert traffic("nvfp4", "row", sp=False, tp=tp) == {("fprop", "bfloat16"): 2 * (tp - 1) * (M * N // tp) * 2}


def test_microbatches_and_recomputation_multiply():
    once, more = traffic("nvfp4", "column"), traffic("nvfp4", "column", microbatches=3, recomputed=("0",))
    row, col = "nvfp4[1x16]", "nvfp4[1x16, rht]"
    assert more["fprop", row] == 6 * once["fprop", row]
    assert more["wgrad", col] == 3 * once["wgrad", col]
    assert once["amax", "float32"] == 2 * 1 * 4  # both amaxes, one part for each rank
    assert more["amax", "float32"] == 6 * once["amax", "float32"]


def test_tokens_off_the_block_travel_in_high_precision():
    group = dlp.LayerGroup("all", "0", style="column", sequence_parallel=True, recipe="fp8_block")
    plan = dlp.make_plan(nn.Sequential(nn.Linear(K, N)), [group], 2, batch=(1, 100))
    sent = step_traffic(plan, Workload({"tp": 2}, 100))
    assert sent[Sent("tp", "0", "wgrad", "bfloat16")] == 50 * K * 2
    assert sent[Sent("tp", "0", "fprop", "fp8_block[e4m3, 1x128]")] == 50 * K + 50 * 4


def test_fsdp_units():
    """Planned bytes of two linears. The first linear is an FSDP unit, and the second belongs to the root unit. The
    first weight has 5 rows, which FSDP pads on 2 ranks to 3 rows each."""
    plan = dlp.make_plan(nn.Sequential(nn.Linear(8, 5, bias=False), nn.Linear(5, 4, bias=False)), [], 1)
    load = Workload({"dp_shard": 2, "dp_replicate": 2}, M, 3, weight_dtype=torch.bfloat16, units=("0", ""))
    shards = 3 * 8, 2 * 5
    assert step_traffic(plan, load) == {
        Sent("dp_shard", "", "weights", "bfloat16"): (2 * shards[0] + shards[1]) * 2 * 3,
        Sent("dp_shard", "", "grads", "float32"): sum(shards) * 4,
        Sent("dp_replicate", "", "grads", "float32"): sum(shards) * 4,
    }


def over_dp(recipe: Any, shape: tuple[int, int] = (N, K), **more: Any) -> dict[tuple[str, str], int]:
    """Return {(purpose, precision): bytes} of one linear K -> N that is an FSDP unit over 2 ranks, without gradients."""
    group = dlp.LayerGroup("all", "0", recipe=recipe)
    plan = dlp.make_plan(nn.Sequential(nn.Linear(shape[1], shape[0], bias=False)), [group], 1)
    options: dict[str, Any] = {"weight_dtype": torch.bfloat16, "units": ("0", "")} | more
    sent = step_traffic(plan, Workload({"dp_shard": 2}, M, **options))
    return {(key.purpose, key.precision): n for key, n in sent.items() if key.purpose != "grads"}


def test_weights_over_dp_shard_travel_as_each_pass_needs_them():
    """Forward and backward each gather the orientation that they need, and each rank sends its half of the codes and
    scales. A scale per tensor is not sent, because all ranks know it."""
    n = N // 2
    assert over_dp("fp8_current") == {("weights", "fp8_tensor[e4m3]"): 2 * n * K, ("amax", "float32"): 2 * 4}
    assert over_dp("fp8_block") == {("weights", "fp8_block[e4m3, 128x128]"): 2 * (n * K + 4)}
    row, col = n * K + n * K // 32, K * n + K * n // 32
    assert over_dp("mxfp8") == {("weights", "mxfp8[e4m3, 1x32]"): row + col}
    assert over_dp("mxfp8", recomputed=("0",)) == {("weights", "mxfp8[e4m3, 1x32]"): row + 2 * col}
    assert over_dp("mxfp8", microbatches=3) == {("weights", "mxfp8[e4m3, 1x32]"): 3 * (row + col)}
    assert over_dp("mxfp8", units=("",)) == {("weights", "mxfp8[e4m3, 1x32]"): row + col}
    assert over_dp("fp8_current", units=("",))["weights", "fp8_tensor[e4m3]"] == n * K
    mixed = over_dp({"name": "fp8_current", "high_precision": ["dgrad"]})
    assert mixed["weights", "fp8_tensor[e4m3]"] == n * K and mixed["weights", "bfloat16"] == n * K * 2


def test_weights_that_cannot_be_cast_apart_travel_as_values():
    values = {("weights", "bfloat16"): 2 * 2 * (N // 2) * K}
    assert over_dp("bf16") == over_dp("fp8_current", gather=False) == values
    assert over_dp("fp8_block", (128, K)) == {("weights", "bfloat16"): 2 * 2 * 64 * K}
    agreed = over_dp("fp8_current", gather=False, amax_group="world")
    assert agreed == values | {("amax", "float32"): 4 * 2 * 4}  # x and w in forward, dy and w in backward


def test_a_weight_that_two_linears_share_travels_as_values():
    layers = nn.Sequential(nn.Linear(K, K, bias=False), nn.Linear(K, K, bias=False))
    layers[1].weight = layers[0].weight
    plan = dlp.make_plan(layers, [dlp.LayerGroup("all", "**", recipe="fp8_current")], 1)
    sent = step_traffic(plan, Workload({"dp_shard": 2}, M, weight_dtype=torch.bfloat16, units=("",)))
    assert {key.precision: n for key, n in sent.items() if key.purpose == "weights"} == {"bfloat16": K * K}


@pytest.mark.parametrize(("carried", "nbytes"), [(None, 4 * K * N // 2), ("bf16", K * N), ("fp8", K * N // 2 + 512)])
def test_gradients_over_dp_shard_on_their_wire(carried, nbytes):
    """With fp8, codes are followed by one scale per 128 elements of the flat shard; both are padded to a multiple of 256
    bytes."""
    plan = dlp.make_plan(nn.Sequential(nn.Linear(K, N, bias=False)), [], 1)
    load = Workload({"dp_shard": 2}, M, units=("",), grad_wire=carried)
    assert sum(n for key, n in step_traffic(plan, load).items() if key.purpose == "grads") == nbytes


def test_sums_over_tp_on_the_wire_of_their_recipe():
    """With fp8, a rank sends codes and then scales, each padded to a multiple of 256 bytes. Without sequence parallelism,
    the sum is then gathered in bf16."""
    fp8 = {"name": "bf16", "wire": {"fprop": "fp8"}}
    m = M // 2
    assert traffic(fp8, "row")["fprop", "float8_e4m3fn"] == m * N + m * (N // 128) * 4
    whole = traffic(fp8, "row", sp=False)
    assert whole == {("fprop", "float8_e4m3fn"): m * N + m * (N // 128) * 4, ("fprop", "bfloat16"): m * N * 2}


@dataclass(frozen=True)
class Hesitant:
    """Quantizer that cannot predict bytes without values."""

    format = HighPrecision()
    reduces = (0, 1)

    def observe(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([x.max().item()])

    def cast(self, x: torch.Tensor, amax: Any, **_: Any) -> Any:
        return self.format.fill(None, x)


def test_a_quantizer_that_cannot_be_asked_makes_its_layer_unforeseen():
    recipe = replace(dlp.recipe("bf16"), x=both(Hesitant()))
    with pytest.raises(Unpredictable, match="the bytes of 0 cannot be predicted: .*meta"):
        traffic(recipe, "column")


def test_delayed_scales_are_agreed_by_all():
    layers = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K))
    plan = dlp.make_plan(layers, [dlp.LayerGroup("all", "**", recipe="fp8_delayed")], 2)
    load = Workload({"tp": 2, "dp_shard": 2}, M)
    # 6 slots, each sent twice with 4 bytes
    assert step_traffic(plan, load) == {Sent("world", "", "amax", "float32"): 2 * 3 * 2 * 4}


def test_bf16_and_one_rank():
    plan = dlp.make_plan(
        nn.Sequential(nn.Linear(K, N)), [dlp.LayerGroup("all", "0", style="column", recipe="nvfp4")], 2
    )
    assert {row.recipe.name for row in in_bf16(plan).layers} == {"bf16"}
    assert step_traffic(plan, Workload({"tp": 1}, M)) == {}


def test_groups_have_one_name():
    assert ParallelDims(tp=2, dp_shard=1).name_of("world") == "tp"
    assert ParallelDims(tp=2, dp_shard=2).name_of("world") == "world"
    assert ParallelDims(tp=2, dp_shard=2).name_of("dp_shard") == "dp_shard"


def test_the_plan_prints_the_wire_and_names_how_dy_travels():
    text = plan_text(load("tiny", ["--recipe", "mxfp8"]), 4, "cpu")
    lines = [line.split() for line in text.splitlines()]
    assert re.search("^wire: each rank sends 14.0 MB a step, 0.784 of bf16, 11.2 ms at the nominal speed", text, re.M)
    assert any(line[:2] == ["tp", "dgrad"] for line in lines) and any(
        line[:2] == ["dp_shard", "weights"] for line in lines
    )
    assert "note: dy is gathered in two orientations, 1.03x the bytes of bf16; gather_dy = 'high_precision'" in text
    asked = plan_text(load("tiny", ["--groups.default.recipe", "{name='mxfp8', gather_dy='high_precision'}"]), 4, "cpu")
    reason = 'the recipe has gather_dy = "high_precision"'
    assert f"note: dy is gathered once, in high precision, and quantized after the gather: {reason}" in asked
    assert "two orientations" not in asked + plan_text(load("tiny", ["--recipe", "nvfp4"]), 4, "cpu")
    alone = plan_text(load("tiny", ["--mesh.tp=1"]), 1, "cpu")
    assert "wire: one rank, nothing is sent" in alone


def calls(blocks: int) -> int:
    """Return the number of function calls (including C functions) that print the plan of a model with `blocks` blocks
    on 16 ranks, with recomputation and a recipe change."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    settings = ["--train.checkpointing=full", "--groups.default.swap=[{at_step = 2, recipe = 'bf16'}]"]
    config = load("tiny", [*settings, "--train.global_batch=32", f"--model.layers={blocks}"])
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        plan_text(config, 16, "cpu")
    finally:
        sys.setprofile(before)
    return counted


@pytest.mark.slow
def test_the_work_of_a_plan_grows_with_its_blocks_and_not_with_their_square():
    calls(1)  # fills the caches that all blocks share
    some, more, most = calls(4), calls(8), calls(16)
    assert most - more == pytest.approx(2 * (more - some), rel=0.02)


def test_seconds_are_those_of_the_slowest_link_that_a_group_crosses():
    dims = ParallelDims(2, 4, 2)
    names = [links.link_of(group, dims, "sm_90").name for group in ("tp", "dp_shard", "dp_replicate", "world")]
    assert names == ["NVLink 4", "NVLink 4", "400 Gb/s network", "400 Gb/s network"]
    assert links.link_of("dp_shard", ParallelDims(dp_shard=2, tp=8), "sm_100").speed == 50e9
    assert links.link_of("tp", ParallelDims(dp_shard=4, tp=3), "sm_90").speed == 50e9, "ranks 6, 7 and 8 share no host"
    assert links.link_of("tp", ParallelDims(dp_shard=2, tp=3), "sm_90").name == "NVLink 4", "one host has all"
    lines = plan_text(load("llama3_1b", ["--mesh.tp=4"]), 16, "sm_90").splitlines()
    grads = next(line for line in lines if line.startswith("dp_shard  grads"))
    assert grads.split()[2:9] == ["927", "MB", "1.000", "18.5", "ms", "400", "Gb/s"], (
        "1.24 billion / 4 in fp32, of 4 shards"
    )


WIDE = "--model.layers=3", "--model.kv_heads=32", "--mesh.dp_shard=1", "--mesh.tp=16"


def test_a_plan_warns_of_tp_that_leaves_a_host_and_names_the_way_out(monkeypatch):
    lines = plan_text(load("llama3_8b", WIDE), 32, "sm_90").splitlines()
    of_tp = [line.split() for line in lines if line.startswith("tp  ")]
    gigabytes = sum(float(row[2]) * {"GB": 1, "MB": 1e-3, "kB": 1e-6, "B": 1e-9}[row[3]] for row in of_tp)
    (said,) = (line for line in lines if line.startswith("WARNING: tp"))
    sent, slow, fast = re.match(
        r"WARNING: tp = 16 spans several hosts of 8 GPUs: each rank sends ([\d.]+) GB per step over tp without "
        r"overlap, which takes ([\d.]+) s on a 400 Gb/s network, where NVLink 4 takes ([\d.]+) ms; --mesh.tp 8, with 2 "
        r"times as many ranks in "
        r"dp_shard or dp_replicate, stays within a host$",
        said,
    ).groups()
    expected = gigabytes, gigabytes / 50, 1e3 * gigabytes / 450
    assert tuple(map(float, (sent, slow, fast))) == pytest.approx(expected, rel=0.01)
    assert "WARNING: tp" not in plan_text(load("llama3_8b", [*WIDE[:3], "--mesh.tp=8"]), 32, "sm_90")
    assert not links.slow_tp(ParallelDims(tp=4), "sm_90", 1e9, host=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = memory_check.planned(load("llama3_8b", [*WIDE[:3], "--mesh.tp=8"]), 32, "sm_90")
    (of_four,) = wire_bytes.warn_of_tp(found.plan, found.load, "adamw", ranks_of_host())
    assert (
        "tp = 8 spans several hosts of 4 GPUs: each rank sends " in of_four and "--mesh.tp 4, with 2 times" in of_four
    )


@pytest.mark.parametrize("settings", [WIDE, ["--mesh.tp=2", "--mesh.transport=nccl"]], ids=["hosts", "nccl"])
def test_a_plan_says_where_chunks_go_by_nccl(settings):
    asked = ["--groups.default.overlap=chunked:2", *settings]
    said = plan_text(load("llama3_8b", asked), 32, "sm_90")
    why = "NCCL (the ranks are on several hosts)" if settings is WIDE else "NCCL (transport = 'nccl'); dp_shard 8: NCCL"
    assert f"{why}" in said and "transport: tp " in said
    assert "chunked:2 uses NCCL, whose kernels take SMs" in said
    copied = ["--mesh.tp=2", "--mesh.transport=mapped", "--groups.default.overlap=chunked:2"]
    said = plan_text(load("llama3_8b", copied), 32, "sm_90")
    assert "uses NCCL" not in said and "transport: tp 2: mapped memory (all ranks on one host;" in said
    with refuses(r"^\[mesh\] transport = 'mapped': a tp group of 16 ranks spans several hosts of 8 GPUs"):
        plan_text(load("llama3_8b", [*WIDE, "--mesh.transport=mapped"]), 32, "sm_90")


def test_amounts_have_three_digits_and_a_unit():
    assert [links.said_bytes(n) for n in (7, 999, 999_600, 31_164_887_040, 2.5e12)] == [
        "7 B", "999 B", "1.00 MB", "31.2 GB", "2.50 TB",
    ]  # fmt: skip
    assert [links.said_seconds(s) for s in (1.5, 0.0642, 2.1e-6, 1e-9)] == ["1.50 s", "64.2 ms", "2.10 us", "<1 us"]
