"""The memory that a rank holds between steps equals the plan, tensor by tensor. `bench.memory` measures other memory on
GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook

from bench import memory as bench_memory
from dlp.comm import transport
from dlp.comm.mapped import Transport
from dlp.comm.slots import mapped_bytes
from launch.config.run_config import Config, load
from launch.estimate.memory_check import planned
from tests import hf_models
from tests import pool as worker
from tests.cases import nightly
from tests.shared_slot import SharedSlot

SMALL = [
    "--model.layers=2", "--model.hidden=256", "--model.ffn=512", "--model.heads=4", "--model.kv_heads=2",
    "--model.head_dim=64", "--model.vocab=512", "--train.sequence=16", "--train.global_batch=4",
    "--train.micro_batch=1", "--train.compile=false", "--train.checkpointing=none",
]  # fmt: skip
MESHES = {"tp": ["--mesh.tp=2", "--train.global_batch=2"], "fsdp": ["--mesh.tp=1"]}  # two microbatches


def counted(config: Config) -> dict[str, tuple[float, float]]:
    """Return (counted bytes, planned bytes) of each row of the memory plan between steps, and of the gathered weights
    during forward (their maximum)."""
    sizes, units, gathered = config.mesh, {}, [0]

    def look(module: nn.Module, args: Any) -> None:
        if isinstance(module, FSDPModule):
            units[module] = module._get_fsdp_state()._fsdp_param_group
        held = [t for unit in units.values() if unit for each in unit.fsdp_params for t in each.all_gather_outputs]
        gathered.append(sum(tensor.untyped_storage().size() for tensor in held))

    mesh = worker.mesh(dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, tp=sizes.tp)
    handle = register_module_forward_pre_hook(look)
    try:
        found = bench_memory.measure("", config, mesh, 2, torch.device(worker.device()))
    finally:
        handle.remove()
    real = found.counted | {"gathered": max(gathered)}
    return {name: (nbytes, found.predicted[name]["loss"]) for name, nbytes in real.items()}


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mesh", "recipe", "settings"),
    [
        nightly("tp", "fp8_current", []),
        nightly("fsdp", "nvfp4", []),
        ("fsdp", "{name='nvfp4', high_precision=['fprop']}", []),  # FSDP gathers values in forward, codes in backward
        ("fsdp", "fp8_current", ["--train.invariant=true", "--model.fused=false"]),
        nightly("fsdp", "mxfp8", ["--mesh.reshard_after_forward=false"]),  # blocks stay gathered in both orientations
    ],
)
def test_what_stays_was_planned(ranks, mesh, recipe, settings):
    config = load("tiny", [*SMALL, *MESHES[mesh], f"--recipe={recipe}", *settings])
    for found in ranks(2).run(counted, config):
        for name, (real, predicted) in found.items():
            assert predicted == pytest.approx(real, rel=0.01, abs=2048), name


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("architecture", "mesh"),
    [("LlamaForCausalLM", "tp"), nightly("MixtralForCausalLM", "fsdp"), nightly("GPT2LMHeadModel", "fsdp")],
)
def test_what_stays_of_a_model_of_transformers_was_planned(ranks, architecture, mesh, tmp_path):
    pytest.importorskip("transformers")
    hf_models.make(architecture, vocab_size=384).save_pretrained(tmp_path)
    small = ["--train.sequence=16", "--train.global_batch=4", "--train.micro_batch=1", "--train.compile=false"]
    match = ["--groups.default.match", '["lm_head"]'] if architecture.startswith("GPT2") else []
    config = load("transformers", ["--model", str(tmp_path), *small, *match, *MESHES[mesh]])
    for found in ranks(2).run(counted, config):
        for name, (real, predicted) in found.items():
            assert predicted == pytest.approx(real, rel=0.01, abs=2048), name


def mapped(config: Config) -> int:
    """Return the total bytes of the peer buffers of a run, each rounded up to the multiple in which GPUs map memory."""
    mesh = worker.mesh(tp=2)
    moves = Transport(mesh["tp"].get_group(), worker.device(), SharedSlot)
    transport.use(moves.group, moves)
    bench_memory.measure("", config, mesh, 1, torch.device(worker.device()))
    transport.destroy()
    return sum(mapped_bytes(slot.payload.nbytes) for slot in moves.slots)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_no_more_is_mapped_than_was_planned(ranks, device_type):
    """The run needs all peer buffers that the plan knows: transfers of dy in both orientations, one of them in chunks,
    and agreements on scales."""
    if device_type == "cuda":
        pytest.skip("emulated on CPU ranks")
    options = ["--mesh.transport=mapped", "--recipe=nvfp4", "--groups.default.overlap=chunked:4", "--model.layers=1"]
    config = load("tiny", [*SMALL, *MESHES["tp"], *options])
    (bound,) = set(planned(config, 2, "sm_90").memory.rows["symmetric memory"].values())  # type: ignore[union-attr]
    for found in ranks(2).run(mapped, config):
        assert found == bound
