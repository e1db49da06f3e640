"""Our own GEMM of blocks on Hopper: odd sizes, types, bias, accumulation against float64, and when it runs.

Bounds as in test_gemms.py: 2^-11 of sum |a||b|, since 128 products are summed to some 14 bits.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from bench.arrivals import Arrivals
from dlp.comm.slots import RANKS
from dlp.kernels import gemm_sm90, gemms, loader
from dlp.kernels.launches import recording
from dlp.kernels.table import Sending
from dlp.quant.gemm import Gemm
from dlp.quant.recipe import load
from tests.gpu.test_gemms import excess, operands

SHAPES = [
    (128, 256, 128), (1, 128, 256), (257, 200, 384), (384, 1024, 1040), (1000, 264, 144), (130, 8, 16), (2048, 1536, 1024),
]  # fmt: skip
UNIT = 2.0**-11
OPTIONS = list(itertools.product((torch.bfloat16, torch.float32), (False, True), (False, True)))


@pytest.fixture(autouse=True)
def hopper(device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def scaled(a, b) -> gemms.Scales:
    layouts = gemms.block_scales(a.parts[1], tile=False), gemms.block_scales(b.parts[1], tile=True)
    return gemms.Scales(*layouts, gemms.BLOCK_1D, gemms.BLOCK_2D)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize(("which", "fp8_format"), [("fprop", "E4M3"), ("dgrad", "HYBRID")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_float64_product_within_its_bound(device, poisoned, shape, which, fp8_format, power_of_two):
    recipe = load("fp8_block", fp8_format=fp8_format, power_of_two=power_of_two)
    a, b = operands(recipe, which, *shape)
    left, right = a.dequantize().double(), b.dequantize().double()
    exact, sums = left @ right.t(), left.abs() @ right.abs().t()
    for dtype, biased, adds in OPTIONS:
        bias = torch.randn(b.shape[0], device=device).to(dtype) * 30 if biased else None
        into = poisoned(tuple(exact.shape), torch.float32) if adds else None
        target = exact + (0 if bias is None else bias.double())
        if into is not None:
            target += into.normal_().double()
        into_takes_bias = not (adds and biased and dtype != torch.float32)  # the bias has the dtype of the result
        assert gemm_sm90.can_take(a.payload, b.payload, dtype, bias=bias, accumulate=into) == into_takes_bias
        if not into_takes_bias:
            continue
        made = gemm_sm90.product(a.payload, b.payload, dtype, scaled(a, b), bias=bias, accumulate=into)
        rounding = target.abs() * (2.0**-8 if made.dtype == torch.bfloat16 else 2.0**-22)
        assert made is into if adds else made.dtype == dtype
        assert excess(made, target, UNIT * sums + rounding) <= 0, (dtype, biased, adds)


def test_nothing_is_written_beside_a_result(device):
    a, b = operands(load("fp8_block"), "fprop", 130, 200, 256)
    whole = torch.full((140, 256), 7.0, device=device)
    gemm_sm90.product(a.payload, b.payload, torch.float32, scaled(a, b), accumulate=whole[:130, :200])
    assert bool((whole[130:] == 7).all()) and bool((whole[:, 200:] == 7).all()) and bool((whole[:130, :200] != 7).any())


@pytest.mark.parametrize(("rows", "cols", "own"), [(8192, 4096, True), (2048, 2048, False)])
def test_large_gemms_run_here_and_agree_with_cublaslt(device, rows, cols, own):
    a, b = operands(load("fp8_block"), "fprop", rows, cols, 8192)
    gemm = Gemm("fprop", b, torch.bfloat16)
    with recording() as launched:
        gemm(a)
    assert ([name for name, _, _ in launched] == ["gemm_fp8_blocks"]) == own
    made = gemm(a)
    theirs = gemms.product_fp8(a.payload, b.payload, torch.bfloat16, scaled(a, b)).float()
    assert torch.equal(made, gemm(a))
    assert float((made.float() - theirs).norm() / theirs.norm()) < 2.0**-7


def test_it_is_captured_and_replayed(device):
    a, b = operands(load("fp8_block"), "fprop", 304, 400, 512)
    before, graph = gemm_sm90.product(a.payload, b.payload, torch.bfloat16, scaled(a, b)), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = gemm_sm90.product(a.payload, b.payload, torch.bfloat16, scaled(a, b))
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, before)


ARRIVALS = [  # rows of a rank, ranks, cols, contraction; the word at first, and once rows are here
    ((256, 2, 200, 512), 0, 7), ((512, 4, 1024, 1424), -3, 5), ((256, 3, 264, 400), 0x7FFFFFFF, 0x80000001),
    ((2048, 2, 7168, 4096), 0, 1), ((1024, 8, 4096, 512), 2**32 - 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("by_engine", [True, False])
@pytest.mark.parametrize(("size", "began", "use"), ARRIVALS, ids=str)
def test_rows_that_arrive_late_are_awaited(device, size, began, use, by_engine):
    rows, world, cols, along = size
    a, b = operands(load("fp8_block"), "fprop", world * rows, cols, along)
    for rank, dtype in ((0, torch.bfloat16), (world - 1, torch.float32)):
        expected = gemm_sm90.product(a.payload, b.payload, dtype, scaled(a, b))
        for delay in (0, 4_000_000):
            late = Arrivals(a, world, rank, began, use, by_engine=by_engine, spare=0 if by_engine else 4)
            beside = torch.cuda.Stream(priority=-1)
            run = late.gemm(a, b, dtype)
            with torch.cuda.stream(beside):
                late.bring(delay)
            made = run(late.arriving)
            torch.cuda.synchronize()
            assert torch.equal(made, expected), (rank, delay)
            assert not late.report.any()


def test_late_rows_are_added_to_what_is_there_and_replayed(device):
    """In a CUDA graph the kernel begins behind an event."""
    a, b = operands(load("fp8_block", fp8_format="HYBRID"), "dgrad", 1024, 264, 512)
    late, total = Arrivals(a, 2, 1, 0, 3), torch.randn(1024, 264, device=device)
    bias, whole = torch.randn(264, device=device), total.clone()
    expected = gemm_sm90.product(a.payload, b.payload, torch.float32, scaled(a, b), accumulate=total.clone(), bias=bias)
    run = late.gemm(a, b, torch.float32, accumulate=whole, bias=bias)
    late.bring()
    event, graph = late.arriving.rows[2], torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        loader.load().mark(event, torch.cuda.current_stream().cuda_stream)
        run(late.arriving)
    graph.replay()
    assert torch.equal(whole, expected)


SENT = [(256, 2, 200, 256), (512, 4, 1024, 1040), (256, 3, 264, 144), (2048, 2, 7168, 4096), (1024, 8, 4096, 512)]
MARGIN = 256  # lines before and behind the rows of a rank: a pair of tiles


def places(rows: int, cols: int, rank: int, world: int) -> tuple[list[torch.Tensor], Sending]:
    """Memory in place of that of so many ranks, NaN at first, and where this rank's rows for each go in it."""
    memory = [torch.full((rows + 2 * MARGIN, cols), torch.nan, device="cuda").bfloat16() for _ in range(world)]
    bases = [each.data_ptr() for each in memory] + [0] * (RANKS - world)
    return memory, Sending((*bases, rank, world), (memory[0][:MARGIN].nbytes, rows))


def check_stored(memory: list[torch.Tensor], expected: torch.Tensor) -> None:
    """Each rank has its rows, and no others."""
    for each, shard in zip(memory, expected.chunk(len(memory)), strict=True):
        assert torch.equal(each[MARGIN:-MARGIN], shard)
        assert bool(each[:MARGIN].isnan().all()) and bool(each[-MARGIN:].isnan().all())


@pytest.mark.parametrize("fp8_format", ["E4M3", "HYBRID"])
@pytest.mark.parametrize("size", SENT, ids=str)
def test_rows_are_stored_in_the_memory_of_their_rank_and_nowhere_else(device, size, fp8_format):
    rows, world, cols, along = size
    a, b = operands(load("fp8_block", fp8_format=fp8_format), "dgrad", world * rows, cols, along)
    for rank, bias in ((0, None), (world - 1, torch.randn(cols, device=device).bfloat16())):
        expected = gemm_sm90.product(a.payload, b.payload, torch.bfloat16, scaled(a, b), bias=bias)
        run = gemm_sm90.sending(a.payload, b.payload, rows, torch.bfloat16, scaled(a, b), bias=bias)
        memory, to = places(rows, cols, rank, world)
        for _ in range(3):
            run(to)
            check_stored(memory, expected)
    total = torch.randn(world * rows, cols, device=device)
    expected = gemm_sm90.product(a.payload, b.payload, torch.float32, scaled(a, b), accumulate=total.clone()).bfloat16()
    run = gemm_sm90.sending(a.payload, b.payload, rows, torch.float32, scaled(a, b), accumulate=total)
    before, (memory, to) = total.clone(), places(rows, cols, 0, world)
    run(to)
    check_stored(memory, expected)
    assert torch.equal(total, before)


def test_stored_rows_are_stored_again_by_a_graph(device):
    a, b = operands(load("fp8_block"), "fprop", 1024, 264, 384)
    expected = gemm_sm90.product(a.payload, b.payload, torch.bfloat16, scaled(a, b))
    run = gemm_sm90.sending(a.payload, b.payload, 512, torch.bfloat16, scaled(a, b))
    memory, to = places(512, 264, 1, 2)
    run(to)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run(to)
    for each in memory:
        each.fill_(torch.nan)
    graph.replay()
    check_stored(memory, expected)


def wait_in_vain() -> None:
    """For rows that do not come: prints what is said."""
    a, b = operands(load("fp8_block"), "fprop", 512, 256, 512)
    late = Arrivals(a, 2, 1, 4, 6, patience=300)
    late.gemm(a, b, torch.bfloat16)(late.arriving)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(late.report.tolist()[:7], str(error).split("\n")[0], flush=True)


def test_a_wait_ends_and_says_for_whom(device):
    code = "from tests.gpu.test_gemm_sm90 import wait_in_vain; wait_in_vain()"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert said.stdout.startswith("[1, 1, 0, 1, 6, 4, 6] CUDA error"), said
