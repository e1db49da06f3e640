"""Two equal models whose results are compared bit for bit: the first may replay captured launches, the second never
does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.kernels import gemm_sm90
from dlp.parallel.linear.state import cores
from dlp.runtime import capture as captured
from dlp.runtime.capture import PASSES, CapturedLaunches, CapturedPasses
from tests.metrics import assert_bit_equal

# Sizes with several tiles in every kernel on GPUs. The emulated device has no tiles, so its sizes are smaller.
K, N, M = (256, 640, 256) if torch.cuda.is_available() else (128, 256, 128)
Results = dict[str, Tensor]


@contextmanager
def of_any_size() -> Iterator[None]:
    """Let dlp's GEMM for Hopper run for every size that the kernel accepts; by default cuBLASLt runs small problems."""

    def taken(a: Tensor, b: Tensor, *problem: Any) -> bool:
        out_dtype, bias, accumulate, _ = problem
        return gemm_sm90.can_take(a, b, out_dtype, bias=bias, accumulate=accumulate)

    with patch.object(gemm_sm90, "takes", taken):
        yield


class PairedModels:
    """Two equal models, each with an optimizer. The second model never captures launches."""

    def __init__(
        self, make: Callable[[], nn.Module], *, attached: bool = True, device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.model = nn.Sequential(make()).to(device, dtype)
        self.other = copy.deepcopy(self.model)
        self.optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (self.model, self.other)]
        if attached:
            for model, optimizer in zip((self.model, self.other), self.optimizers, strict=True):
                dlp.attach(model, optimizer)

    def step(self, run: Callable[[nn.Module, int], Results], seed: int) -> None:
        """Run one optimizer step of both models, and assert that results and weights have equal bits."""
        with without_programs():
            expected = run(self.other, seed)
            self.optimizers[1].step()
        results = run(self.model, seed)
        self.optimizers[0].step()
        results |= dict(self.model.named_parameters())
        expected |= dict(self.other.named_parameters())
        for name, tensor in expected.items():
            assert_bit_equal(results[name], tensor, f"{name}, step {seed}")
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@contextmanager
def without_programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "runs_kernels", lambda x: False)
        yield


def compiles(model: nn.Module) -> None:
    """Let torch.compile trace the model at its next call; a linear becomes opaque ops."""
    torch._dynamo.reset()  # graphs of other tests would count towards torch's limit of graphs per function
    model.compile(backend="aot_eager", fullgraph=True)


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def forward_backward(model: nn.Module, seed: int, shape: tuple[int, ...] = (M,), learns: bool = True) -> Results:
    device = next(model.parameters()).device
    x = values(seed, *shape, K).to(device).requires_grad_(learns)
    ys = model(x)
    ys = ys if isinstance(ys, tuple) else (ys,)
    torch.autograd.backward(ys, [values(seed + 1 + i, *y.shape).to(device) for i, y in enumerate(ys)])
    found = {f"y{i}": y.detach() for i, y in enumerate(ys)} | {"dx": x.grad if learns else x.detach()}
    return found | {f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def programs(model: nn.Module) -> dict[str, list[CapturedLaunches | str]]:
    """Return, for each pass, the captured launches or the reason why the pass is not captured."""
    found: dict[str, list[CapturedLaunches | str]] = {way: [] for way in PASSES}
    for core in cores(model):
        calls = [*core.bound.calls.values(), *(core.weights.parts.calls.values() if core.weights.parts else ())]
        for call in calls:
            kept = call if isinstance(call, CapturedPasses) else call.captured
            for key, made in kept.found.items():
                found[key[0]].append(made)
    return found


def check_used(model: nn.Module, *ways: str) -> None:
    found = programs(model)
    for way in PASSES:
        there = any(isinstance(made, CapturedLaunches) for made in found[way])
        assert there == (way in ways), f"{way}: {found[way]}"
