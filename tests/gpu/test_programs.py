"""Captured launches on a GPU: a linear that replays captured launches has the bits of a linear that never does, in
every recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dlp
from dlp.kernels import cuda, ops, reference
from dlp.runtime.capture import PASSES
from tests.cases import BY_SCALES
from tests.gpu.inputs import values as special
from tests.metrics import assert_bit_equal
from tests.paired_models import K, M, N, PairedModels, check_used, compiles, forward_backward, values

CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "tokens of two sequences": {"shape": (2, M // 2)}, "siblings": {"sizes": (N, K)}, "bias": {"bias": True},
    "cast at use": {"attached": False}, "compiled": {"compiled": True},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", BY_SCALES)
def test_a_program_gives_the_bits_of_the_functions(device: str, recipe: str, case: str):
    options = dict(CASES[case])
    sizes, bias, attached = options.pop("sizes", N), options.pop("bias", False), options.pop("attached", True)
    compiled = options.pop("compiled", False)
    pair = PairedModels(lambda: dlp.Linear(K, sizes, bias, recipe=recipe), attached=attached, device=device)
    if compiled:
        compiles(pair.model[0])
    for seed in range(4):
        pair.step(lambda model, seed: forward_backward(model, seed, **options), seed)
    check_used(pair.model, *PASSES)


@pytest.mark.parametrize("recipe", BY_SCALES)
def test_inductor_takes_the_ops_as_they_are(device: str, recipe: str):
    """Code compiled by inductor checks the strides of the results of dlp's ops, including scales in the layout of the
    GEMMs."""
    torch.compiler.reset()
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe=recipe), device=device)
    pair.model[0].compile(fullgraph=True)
    for seed in range(2):
        pair.step(forward_backward, seed)


@pytest.mark.parametrize("recipe", BY_SCALES)
def test_no_tokens_are_no_trouble(device: str, recipe: str):
    """A layer without tokens works, also between calls with tokens, as for an expert that gets no tokens."""
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe=recipe), device=device)
    for seed, tokens in enumerate((M, 0, 0, 0, M)):
        pair.step(lambda model, seed, m=tokens: forward_backward(model, seed, (m,)), seed)
    found = forward_backward(pair.model, 5, (0,))
    assert not found["d0.weight"].any() and found["dx"].shape == (0, K) and found["y0"].shape == (0, N)


def test_on_another_stream_and_in_a_graph(device: str):
    """Captured launches are not bound to a stream: launches that were recorded on one stream run on another stream, and
    in a CUDA graph."""
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe="fp8_current"), device=device)
    for seed in range(3):
        pair.step(forward_backward, seed)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for seed in range(3, 5):
            pair.step(forward_backward, seed)
    stream.synchronize()
    x, dy = values(7, M, K).to(device).requires_grad_(), values(8, M, N).to(device)
    weight = next(pair.model.parameters())

    def both() -> tuple[Any, ...]:
        return torch.autograd.grad(pair.model(x), (x, weight), dy)

    expected, graph = both(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    graph.replay()
    for made, wanted in zip(captured, expected, strict=True):
        assert_bit_equal(made.cpu(), wanted.cpu())
    check_used(pair.model, *PASSES)


def kernels(run: Callable[[], object]) -> list[str]:
    """The names of the kernels that `run` launches, except copies and memsets."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    names = [event.name for event in events if not getattr(event, "is_user_annotation", False)]
    return [name for name in names if "emcpy" not in name and "emset" not in name]


def kind(kernel: str) -> str:
    """Kind of a kernel of a linear: "cast", "gemm", "sum" (of the parts of a GEMM), or the name of any other kernel."""
    for word, found in (("cast_block", "cast"), ("splitkreduce", "sum"), ("gemm", "gemm"), ("nvjet", "gemm")):
        if word in kernel.lower():
            return found
    return kernel


def test_nothing_small_is_launched_between_casts_and_gemms(device: str):
    """A pass launches only casts and GEMMs. Block scales are cast in the layout that GEMMs read, so one iteration has a
    cast of x and a cast of dy, each for both orientations with one read, and three GEMMs. The step boundary casts w,
    also for both orientations with one read."""
    layer = nn.Sequential(dlp.Linear(K, N, recipe="fp8_block", device=device, dtype=torch.bfloat16))
    dlp.attach(layer, torch.optim.SGD(layer.parameters()))

    def step() -> None:
        forward_backward(layer, 0)
        layer.zero_grad()

    for _ in range(3):
        step()
        dlp.end_step(layer)
    found = Counter(map(kind, kernels(step)))
    del found["sum"]
    assert found == {"cast": 2, "gemm": 3}
    found = Counter(map(kind, kernels(lambda: dlp.end_step(layer))))
    assert (found["cast"], found["gemm"]) == (1, 0), found


@pytest.mark.parametrize("count", [1, 7, 8, 4097])
def test_rounding_to_bf16_is_torchs(device: str, count: int):
    x = special("specials", 1, count, torch.float32).to(device)
    assert_bit_equal(ops.rounded(x, torch.bfloat16).cpu(), x.to(torch.bfloat16).cpu())


def test_the_factor_of_nvfp4_is_the_references(device: str):
    amaxes = torch.tensor([0.0, 1e-38, 3.7, 448.0, 3e38], device=device)
    for a in amaxes:
        for b in amaxes:
            assert_bit_equal(ops.nvfp4_alpha(a, b).cpu(), reference.nvfp4_alpha(a.cpu(), b.cpu()))


def test_setting_to_zero(poisoned):
    x = poisoned((3, 5), torch.float32)
    cuda.set_zero(x)
    assert not x.any()
