"""The benchmark of host time of layers under tp runs for a column and a row linear. This process acts as one of
two ranks; collectives send nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import host_parallel
from bench.host_parallel import PLAIN


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_pair_is_measured_beside_plain_torch(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(host_parallel, "shutdown", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [
        "--quick",
        "--recipes",
        "bf16",
        "fp8_current",
        "--ways",
        "fsdp",
        "--tokens",
        "32",
        "--features",
        "64",
        "--json",
        str(tmp_path / "found"),
    ]
    assert host_parallel.main(arguments) == 0
    plain, nn_linear, bf16, bf16_sharded, fp8, fp8_sharded = json.loads((tmp_path / "found").read_text())
    assert nn_linear["subject"] == f"{PLAIN} fsdp" and nn_linear["calls_ratio"] == 1.0
    assert (bf16_sharded["subject"], fp8_sharded["subject"]) == ("bf16 fsdp", "fp8_current fsdp")
    assert fp8_sharded["calls_ratio"] == fp8_sharded["calls"] / nn_linear["calls"]
    assert (plain["subject"], plain["calls_ratio"], plain["host_ratio"]) == (PLAIN, 1.0, 1.0) and plain["calls"] > 20
    assert bf16["subject"] == "bf16" and bf16["calls_ratio"] > 1.0 and bf16["host"] > 0 and bf16["all"] > 0
    assert bf16["calls"] < 500, "bf16 makes too many Python calls"
    assert fp8["calls"] < 657, "fp8_current makes too many Python calls"
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("fp8_current fsdp") and not any("MISSED" in line for line in said), (
        "targets are for GPUs"
    )


def test_targets_are_those_of_recipe_and_way() -> None:
    subjects = ("bf16", "fp8_block chunked", "mxfp8", "nvfp4 chunked", "fp8_current compiled", "bf16 fsdp")
    assert [host_parallel.limit(subject) for subject in subjects] == [2.0, 2.0, 2.5, 2.5, 2.5, 2.5]
    slow, plain = (host_parallel.Line(name, 1.0, 2.6, 1.0, 1.0, 1, 1.0) for name in ("mxfp8", PLAIN))
    assert host_parallel.verdict(slow, True) == "  MISSED (2.5)" and host_parallel.verdict(slow, False) == ""
    assert host_parallel.verdict(plain, True) == ""


def test_without_ranks_it_starts_some(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(host_parallel.subprocess, "call", lambda command: started.append(command) or 7)
    assert host_parallel.main(["--quick", "--recipes", "bf16"]) == 7
    assert started[0][:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert started[0][-4:] == ["bench.host_parallel", "--quick", "--recipes", "bf16"]
