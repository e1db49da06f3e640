"""A run whose steps are a CUDA graph has the losses of one whose steps are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 8


def losses(folder: Path, *arguments: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a short run on one GPU, and the validation loss."""
    command = [
        sys.executable, "-m", "launch.train", "tiny", "--mesh.tp", "1", "--train.steps", str(STEPS), "--run.dir", str(folder),
        "--train.eval_every", "4", "--checkpoint.every", "100", "--train.deterministic", "true", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [(record["loss"], record["gradient_norm"]) for record in records if "loss" in record]
    assert len(steps) == STEPS
    return [*steps, *((record["validation_loss"], 0.0) for record in records if "validation_loss" in record)]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed", "fp8_block"])
def test_a_captured_step_computes_what_a_step_does(device, recipe, tmp_path):
    eager = losses(tmp_path / "eager", "--recipe", recipe)
    graph = losses(tmp_path / "graph", "--recipe", recipe, "--train.cuda_graph", "true")
    assert graph == eager
