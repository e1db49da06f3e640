"""Only the rank that has a non-finite value reports the value: ranks share scales, but not the flags that casts set."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dlp
from tests import pool as worker
from tests.cases import nightly
from tests.emulated import emulation
from tests.refusals import may_raise

# TOKENS of each rank, and FFN / 2, are multiples of 128, so that every operand is gathered as codes in complete scaling blocks
TOKENS, HIDDEN, FFN = 128, 64, 256
CULPRIT = 1  # the rank with the Inf


class Net(nn.Module):
    """A column layer and a row layer: x [tokens, 64] -> [tokens, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


def made(recipe: str, held: str, on_nonfinite: str) -> tuple[Net, torch.optim.Optimizer]:
    """Return the network and its optimizer. `held`: "tp" (tensor and sequence parallelism) or "fsdp"."""
    torch.manual_seed(0)
    model, sizes = Net().to(worker.device()), {"dp_shard": 2} if held == "fsdp" else {"tp": 2}
    mesh, groups = worker.mesh(**sizes), [dlp.LayerGroup("all", "**", recipe=recipe)]
    if held == "tp":
        groups += [
            dlp.LayerGroup("up", "up", style="column", sequence_parallel=True),
            dlp.LayerGroup("down", "down", style="row", sequence_parallel=True),
        ]
    dlp.convert(model, groups, mesh, batch=(1, 2 * TOKENS))
    if held == "fsdp":
        dlp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dlp.attach(model, optimizer, on_nonfinite=on_nonfinite)
    return model, optimizer


def step(model: Net, optimizer: torch.optim.Optimizer, into: str, value: float) -> None:
    """Run one step. On rank CULPRIT, `value` is written into x ("x"), into dy ("dy") or into the gradient of a weight
    ("w"), as `into` says; "": nowhere."""
    x, dy = (torch.randn(TOKENS, HIDDEN, device=worker.device()) for _ in range(2))
    mine = dist.get_rank() == CULPRIT
    if mine and into in ("x", "dy"):
        {"x": x, "dy": dy}[into][TOKENS // 2, 3] = value
    model(x).backward(dy)
    if mine and into == "w":
        model.up.weight.grad._local_tensor.view(-1)[5] = value
    optimizer.step()
    optimizer.zero_grad()


def told(recipe: str, held: str, into: str, value: float) -> list[str]:
    """Run a step without and a step with a non-finite value; return the first tensor that this rank reports, or an
    empty list."""
    with ExitStack() as kernels:
        if worker.device().type == "cpu":
            kernels.enter_context(emulation())
        model, optimizer = made(recipe, held, "ignore")
        for now in ("", into):
            step(model, optimizer, now, value)
        return dlp.not_finite(model)[:1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block", nightly("fp8_rowwise")])
@pytest.mark.parametrize(
    ("held", "into", "of"), [("tp", "x", "x of up"), ("tp", "dy", "dy of down"), ("fsdp", "w", "w of up")]
)
def test_the_rank_that_has_it_tells(ranks, recipe: str, held: str, into: str, of: str):
    found = ranks(2).run(told, recipe, held, into, torch.inf)
    assert found[CULPRIT] == [of]
    assert found[1 - CULPRIT] == []


def raised(into: str) -> tuple[str, int]:
    """Run up to 3 steps, with an Inf in the second step; return the message of the error ("" if there is none), and the
    number of steps that began."""
    model, optimizer = made("fp8_current", "fsdp", "raise")
    for i in range(3):  # in a real run, a rank that continues would wait for the other until torchrun ends it
        if message := may_raise(FloatingPointError, step, model, optimizer, into if i == 1 else "", torch.inf):
            return message, i + 1
    return "", 3


@pytest.mark.ranks(2)
def test_it_raises_there_one_step_late_with_its_rank(ranks):
    found: Any = ranks(2).run(raised, "x")
    message, steps = found[CULPRIT]
    assert message.startswith("step 2: x of up held a NaN or Inf when it was cast on rank 1, ") and steps == 3
