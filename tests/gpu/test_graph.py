"""A run with steps in a CUDA graph has the losses of a run without a graph, and stops at the same steps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlp.parallel.model.graph import WARM_UP
from launch.report.metrics import read_metrics

ROOT = Path(__file__).parents[2]
STEPS, BAD = 8, 5  # BAD: after this step, which is replayed, a weight is not finite
CULPRIT = "model.layers.2.mlp.down_proj"
POISONED = f"""
from launch import train
from launch.training.trainer import Trainer

class Poisoned(Trainer):
    def train_step(self, step):
        if step + 1 == {BAD}:  # AdamW's average, which the graph reads as it reads the learning rate
            weight = self.built.model.get_parameter("{CULPRIT}.weight")
            self.built.optimizer.state[weight]["exp_avg"][3, 5] = float("inf")
        return super().train_step(step)

train.Trainer = Poisoned
train.main()
"""


def run(folder: Path, *arguments: str, program: Sequence[str] = ("-m", "launch.train")) -> tuple[int, str]:
    """Run a short training on one GPU; return the exit code and the end of the output."""
    command = [
        sys.executable, *program, "tiny", "--mesh.tp", "1", "--train.steps", str(STEPS), "--run.dir", str(folder),
        "--train.eval_every", "4", "--checkpoint.every", "100", "--train.deterministic", "true", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout[-2000:] + done.stderr[-4000:]


def steps_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if "loss" in record]


def losses(folder: Path, *arguments: str, captured: bool = False) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step of a short run on one GPU, then (validation loss, 0.0) of each validation.
    `captured`: whether all steps but the first WARM_UP should be replays of a graph. Check this in the time categories of
    each step: a replay has "graph" and no "forward"."""
    code, said = run(folder, "--train.cuda_graph", str(captured).lower(), *arguments)
    assert code == 0, said
    records = read_metrics(folder / "metrics.jsonl")
    steps = steps_of(records)
    assert ["graph" in step["split"] for step in steps] == [captured and i >= WARM_UP for i in range(STEPS)]
    assert ["forward" in step["split"] for step in steps] == [not captured or i < WARM_UP for i in range(STEPS)]
    validation = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert len(validation) == STEPS // 4
    return [*((step["loss"], step["gradient_norm"]) for step in steps), *((loss, 0.0) for loss in validation)]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"])
def test_a_captured_step_computes_what_a_step_does(device, recipe, tmp_path):
    eager = losses(tmp_path / "eager", "--recipe", recipe)
    graph = losses(tmp_path / "graph", "--recipe", recipe, captured=True)
    assert graph == eager


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_an_inf_in_a_weight_stops_a_run(device, recipe, captured, tmp_path):
    """An Inf in a weight ends a run although a scale turns the Inf into a finite value, because the cast sets a
    flag."""
    graph = ("--train.cuda_graph", str(captured).lower(), "--train.eval_every", "100")
    code, said = run(tmp_path / "run", "--recipe", recipe, *graph, program=("-c", POISONED))
    found = f"\nstep {BAD + 1}: loss .*: w of {CULPRIT} held a NaN or Inf when it was cast on rank 0"
    assert code == 1 and re.search(found, f"\n{said}"), said
    steps = steps_of(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert len(steps) == BAD and ("graph" in steps[-1]["split"]) == captured
