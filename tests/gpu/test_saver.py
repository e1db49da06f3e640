"""Copies of tensors for a checkpoint: on the device if memory suffices, else on the host. A copy has the values from
before the copy was requested, also if the tensors change during the copy."""

from __future__ import annotations

import pytest
import torch

from launch.checkpoint.background_saver import Copies
from launch.checkpoint.save_load import Snapshot

pytestmark = pytest.mark.needs_gpu


@pytest.mark.parametrize("free", [0, 2 * 5 << 20, 1 << 40], ids=["host", "one of two", "device"])
def test_what_is_fetched_is_what_was_taken(device, monkeypatch, free):
    copies = Copies(torch.device(device, torch.cuda.current_device()))
    monkeypatch.setattr(copies, "_free_device_memory", lambda: free)
    source = {"a": torch.full((1 << 20,), 1.0, device=device), "b": {"c": torch.full((1 << 20,), 2.0, device=device)}}
    for save in range(2):
        taken = copies.take(Snapshot(save, dict(source), {}))
        left = [each.is_cuda for each in (taken.tensors["a"], taken.tensors["b"]["c"])]
        assert left == {0: [False, False], 1 << 40: [True, True]}.get(free, [True, False])
        torch.cuda.current_stream().wait_event(copies.done)
        source["a"] += 10
        source["b"]["c"] += 10
        copies.fetch(taken)
        found = taken.tensors["a"], taken.tensors["b"]["c"]
        assert all(each.is_pinned() for each in found)
        assert [each.unique().tolist() for each in found] == [[1.0 + 10 * save], [2.0 + 10 * save]]
