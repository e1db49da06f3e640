"""A run whose steps are a CUDA graph has the losses of one whose steps are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.graph import WARM_UP

ROOT = Path(__file__).parents[2]
STEPS = 8


def losses(folder: Path, *arguments: str, captured: bool = False) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a short run on one GPU, and the validation loss. `captured`: whether its steps
    are to be a graph, but for the first ones; that they were is told by what their time was spent on."""
    command = [
        sys.executable, "-m", "launch.train", "tiny", "--mesh.tp", "1", "--train.steps", str(STEPS), "--run.dir", str(folder),
        "--train.eval_every", "4", "--checkpoint.every", "100", "--train.deterministic", "true",
        "--train.cuda_graph", str(captured).lower(), *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
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
