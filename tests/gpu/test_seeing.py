"""On a GPU: a failed allocation writes a memory snapshot, and a step with NVTX ranges has equal bits."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from launch.report import out_of_memory
from launch.report.nvtx_ranges import marked

pytestmark = pytest.mark.usefixtures("device")

GPU = torch.device("cuda")


def test_a_failed_allocation_leaves_what_was_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory.dist, "get_rank", lambda: 0)
    out_of_memory.watch_memory(tmp_path, GPU, history=False)
    live = torch.ones(7 << 20, dtype=torch.uint8, device=GPU)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 45, dtype=torch.uint8, device=GPU)
    with out_of_memory.snapshot_path(tmp_path).open("rb") as file:
        found = pickle.load(file)
    sizes = {block["size"] for segment in found["segments"] for block in segment["blocks"]}
    assert live.numel() in sizes
    assert "out of memory in step 1" in out_of_memory.sentence(caught.value, "step 1", tmp_path, 0)


def test_a_marked_step_is_the_same_step() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda()
    x = torch.randn(8, 64, device=GPU)
    assert torch.equal(marked(lambda: model(x), model, GPU), model(x))
