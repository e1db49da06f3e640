"""Steps that replay a CUDA graph on a mesh have the losses of launched steps, also after a resume and after recipe
changes.

GPUs run real graphs. CPU ranks simulate a graph, to test the surrounding decisions: which steps are replayed, that a
step is captured again after a recipe change, and that the ledger counts a capture once for each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dlp.comm import transport
from dlp.parallel.model.graph import WARM_UP, Replays
from launch.config.run_config import Config
from tests import pool as worker
from tests import training
from tests.cases import nightly

Batch = tuple[Tensor, ...]
Work = Callable[[Sequence[Batch]], Tensor]

pytestmark = pytest.mark.ranks(2)


class PlayedGraph:
    """Simulated graph on the CPU. The constructor runs the step, which counts as the first replay. Later replays run
    the step without dispatch modes, so that observers do not see it."""

    def __init__(self, work: Work, like: Sequence[Batch]) -> None:
        self._work, self._batches, self._fresh = work, [tuple(t.clone() for t in batch) for batch in like], True
        self._numbers = work(self._batches)

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        for into, new in zip(self._batches, batches, strict=True):
            for kept, each in zip(into, new, strict=True):
                kept.copy_(each)
        if not self._fresh:
            with _disable_current_modes():
                self._numbers = self._work(self._batches)
        self._fresh = False
        return self._numbers


class PlayedReplays(Replays):
    capture = PlayedGraph  # type: ignore[assignment]
    made = 0

    def make(self, work: Work, like: Sequence[Batch]) -> None:
        self.made += 1
        super().make(work, like)

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        (session,) = self.sessions
        steps = session.steps
        numbers = super().__call__(batches)
        session.steps = steps + 1  # a simulated replay runs host code, which counts steps again
        return numbers


def run(config: Config, graph: bool) -> int:
    """Run a training; with `graph`, simulate graphs. Return the number of simulated graphs."""
    made, done = training.trainer(config)
    if graph:
        made.built, made.replays = replace(made.built, graph=True), PlayedReplays([made.recipes], None)
    made.train(done)
    return getattr(made.replays, "made", 0)


def numbers(config: Config) -> list[Any]:
    return [training.metrics(config, key) for key in ("loss", "gradient_norm", "validation_loss")]


def replayed(config: Config) -> list[int]:
    return [step for step, split in training.metrics(config, "split").items() if "graph" in split]


SWAP = "[{at_step = 6, recipe = 'fp8_current'}]"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [nightly("tp"), "dp_shard"])
def test_a_swap_is_a_step_as_it_is_and_steps_are_captured_anew(ranks, data: Path, tmp_path: Path, mesh: str):
    """Steps have two microbatches, and the ledger runs in every step: the bytes sent in a capture are counted for each
    replay."""
    if ranks(2).device_type != "cpu":
        pytest.skip("graphs are emulated on CPU ranks only")
    sizes = ["--mesh.tp=2"] if mesh == "tp" else ["--mesh.tp=1", "--mesh.dp_shard=2"]
    options = [*sizes, "--train.steps=10", "--train.sequence=16", "--train.global_batch=4",
               f"--train.micro_batch={2 if mesh == 'tp' else 1}", "--train.ledger=always", "--checkpoint.every=20",
               "--train.eval_every=20", "--groups.default.recipe=fp8_delayed", "--groups.default.swap", SWAP]  # fmt: skip
    found = []
    for graph in (False, True):
        folder = tmp_path / str(graph)
        folder.mkdir()
        config = training.config(folder, data, *options)
        made = ranks(2).run(run, config, graph)
        found.append(numbers(config))
        assert made == [2 * graph] * 2
        counted = training.metrics(config, "ledger")
        assert counted
    assert found[1] == found[0] and len(found[0][0]) == 10
    assert replayed(config) == [WARM_UP + 1, WARM_UP + 2, 6 + WARM_UP + 1]


SP, WHOLE = ["--mesh.tp=2"], ["--mesh.tp=2", "--mesh.sequence_parallel=false"]
SHARDED = ["--mesh.tp=1", "--mesh.dp_shard=2", "--train.micro_batch=2"]  # two microbatches
REPLICATED = ["--mesh.tp=1", "--mesh.dp_replicate=2", "--mesh.dp_shard=1"]
BLOCKS = ["--model.hidden=128", "--model.ffn=256", "--model.head_dim=32"]
RECIPE, CLIPPED, COMPILED = "--groups.default.recipe", "--train.clip=0.05", "--train.compile=true"
CHUNKS = "--groups.default.overlap=chunked:2"
SWAPPED = [f"{RECIPE}=fp8_delayed", "--groups.default.swap", SWAP]
REAL = {  # with "mapped" in the name: transfers over tp use mapped memory
    "tp": [*SP, "--train.ledger=always"],
    "tp, mapped": SP,
    "tp, whole tokens, two microbatches, clipped": [*WHOLE, "--train.micro_batch=2", CLIPPED],
    "tp, mapped, two microbatches, clipped": [*SP, "--train.micro_batch=2", CLIPPED, f"{RECIPE}=fp8_block", *BLOCKS],
    "tp, mapped, compiled": [*SP, COMPILED],
    "tp, mapped, in chunks": [*SP, CHUNKS],
    "tp, in chunks": [*SP, CHUNKS],
    "tp, mapped, a swap": [*SP, *SWAPPED],
    "tp, by chance": [*SP, f"{RECIPE}=nvfp4", *BLOCKS],
    "dp_shard, clipped": [*SHARDED, CLIPPED, "--train.ledger=always"],
    "dp_shard, a swap": [*SHARDED, *SWAPPED],
    "dp_shard, by chance": [*SHARDED, f"{RECIPE}=nvfp4", *BLOCKS],
    "dp_shard, compiled": [*SHARDED, COMPILED, f"{RECIPE}=fp8_delayed"],
    "dp_shard, kept gathered, bf16": [*SHARDED, "--mesh.reshard_after_forward=false", f"{RECIPE}=bf16"],
    "dp_replicate": [*REPLICATED, f"{RECIPE}=fp8_delayed"],
}


def real(config: Config, mapped: bool) -> None:
    """Run a training on GPUs. mapped: transfers over tp use mapped memory."""
    sizes = config.mesh
    mesh = worker.mesh(dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, tp=sizes.tp)
    if mapped:
        transport.ask_for(mesh["tp"].get_group(), "cuda")
    try:
        training.run(config)
    finally:
        transport.destroy()
        training.end_determinism()


@pytest.mark.parametrize("case", REAL)
def test_a_graph_on_a_mesh_has_the_losses_of_launches(ranks, data: Path, tmp_path: Path, case: str):
    """Compare 50 steps, the last 20 of which belong to a run that resumes from a checkpoint."""
    if ranks(2).device_type != "cuda":
        pytest.skip("needs 2 GPUs")
    found = []
    for graph in (False, True):
        folder = tmp_path / str(graph)
        folder.mkdir()
        for steps in (30, 50):
            options = [*REAL[case], f"--train.steps={steps}", "--train.eval_every=10", "--checkpoint.every=10",
                       f"--train.cuda_graph={str(graph).lower()}"]  # fmt: skip
            config = training.config(folder, data, *options)
            ranks(2).run(real, config, "mapped" in case)
        found.append(numbers(config))
    assert found[1] == found[0] and len(found[0][0]) == 50
    launched = {1, 2, 3, 31, 32, 33} | ({6, 7, 8, 9} if "swap" in case else set())
    assert set(range(1, 51)) - set(replayed(config)) == launched


SERIAL = "--groups.default.overlap=serial"  # because `chunked` runs GEMMs of fewer rows, which have other last bits
FOUR_RANKS = {
    "tp": ["--mesh.tp=4", "--model.kv_heads=4"],
    "tp x dp_shard": ["--mesh.tp=2", "--mesh.dp_shard=2"],
    "dp_replicate x dp_shard": ["--mesh.tp=1", "--mesh.dp_replicate=2", "--mesh.dp_shard=2", "--train.micro_batch=1"],
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", FOUR_RANKS)
def test_graphs_launches_and_nccl_have_equal_losses_on_four_gpus(ranks, data: Path, tmp_path: Path, mesh: str):
    if ranks(4).device_type != "cuda":
        pytest.skip("needs 4 GPUs")
    found = {}
    for graph, mapped in ((True, True), (False, True), (False, False)):
        folder = tmp_path / f"{graph}-{mapped}"
        folder.mkdir()
        options = [*FOUR_RANKS[mesh], SERIAL, "--train.steps=20", f"--train.cuda_graph={str(graph).lower()}"]
        config = training.config(folder, data, *options)
        ranks(4).run(real, config, mapped)
        found[graph, mapped] = numbers(config)
    assert found[True, True] == found[False, True] == found[False, False] and len(found[True, True][0]) == 20
