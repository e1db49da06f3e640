"""GEMMs on a GPU against the float64 product of their decoded operands: every recipe, odd sizes, bias, accumulation.

Bounds, in terms of m = sum |a||b| and the size C of the contraction: bf16 products are exact, and fp32 sums lose less
than (C + 8) 2^-24 m. FP8 units of Hopper keep about 14 bits of the sum of 32 products: 2^-11 m is allowed with promotion
to fp32 after every 128 products (split accumulation, and block scales), 2^-10 m without promotion (fast accumulation).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dlp.kernels import gemms, loader
from dlp.kernels.table import GemmLaunchOptions, device_kind
from dlp.quant.gemm import Gemm, support
from dlp.quant.quantizer import Origin, ScaleSlot
from dlp.quant.recipe import GEMM_OPERANDS, GEMMS, Recipe, load
from dlp.quant.tensor import QuantizedTensor

RECIPES = [
    load("bf16"), load("fp8_current"), load("fp8_current", fp8_format="E4M3"), load("fp8_delayed"), load("fp8_rowwise"),
    load("fp8_rowwise", fp8_format="HYBRID"), load("fp8_block"), load("fp8_block", power_of_two=False),
    load("fp8_block", fp8_format="HYBRID"), load("mxfp8"), load("nvfp4"),
    replace(load("fp8_current"), name="fp8_current with bf16 weights", w=load("bf16").w), load("int8"),
    replace(load("bf16"), name="bf16 with fp8_rowwise weights", w=load("fp8_rowwise").w),
    replace(load("bf16"), name="bf16 with nvfp4 weights", w=load("nvfp4").w),
    replace(load("int8"), name="int8 with fp8_current weights", w=load("fp8_current").w),
]  # fmt: skip
SHAPES = [(256, 384, 512), (64, 80, 96), (1040, 208, 2064), (8, 16, 128)]
EXACT = 2.0**-24  # error per term of a sum with exact products
ODD = [(37, 51, 200), (129, 1, 130), (1, 136, 24)]


def quantized(quantizer, x: Tensor) -> QuantizedTensor:
    slot = ScaleSlot(torch.tensor(40.0, device="cuda"), torch.zeros((), device="cuda"))
    counter = torch.zeros((), dtype=torch.int64, device="cuda")
    at = Origin(0, 0, *x.shape, seed=0, tensor_id=1, counter=counter)
    return quantizer.cast(x, quantizer.observe(x), slot=slot, at=at)


def operands(
    recipe: Recipe, which: str, rows: int, cols: int, contraction: int
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return A and B of one GEMM of the recipe, cast as in a linear: columnwise operands from a transposed view, and
    both padded to complete blocks."""
    contraction += -contraction % max(quantizer.format.multiple[1] for quantizer in recipe.operands(which))
    generator = torch.Generator("cuda").manual_seed(rows + cols + contraction)
    made = []
    for lines, quantizer, side in zip((rows, cols), recipe.operands(which), GEMM_OPERANDS[which][1::2], strict=True):
        x = (
            torch.randn(lines, contraction, device="cuda", generator=generator)
            * torch.logspace(-2, 2, lines, device="cuda")[:, None]
        )
        x = quantizer.format.padded(x.bfloat16())
        made.append(quantized(quantizer, x if side == "rowwise" else x.t().contiguous().t()))
    return made[0], made[1]


def unit(recipe: Recipe, which: str, contraction: int) -> float:
    """Error bound of the GEMM relative to sum |a||b|."""
    kernel = support(*(quantizer.format for quantizer in recipe.operands(which)), device_kind("cuda")).kernel
    if "fp8" not in kernel:
        return (contraction + 8) * EXACT
    return 2.0**-10 if getattr(recipe, which).fast_accumulation else 2.0**-11


def excess(made: Tensor, exact: Tensor, bound: Tensor) -> float:
    """The amount by which the error exceeds the bound, in units of the bound. At most 0 is correct."""
    return float((((made.double() - exact).abs() - bound) / bound.clamp(min=1e-30)).max())


def test_the_gemms_run_by_cublaslt(device):
    assert loader.missing() == "" and device_kind("cuda") in ("sm_90", "sm_100")
    assert gemms._module().cublaslt_version() >= 120900


@pytest.mark.parametrize("shape", [*SHAPES, *ODD], ids=str)
@pytest.mark.parametrize("which", GEMMS)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_gemm_is_the_float64_product_within_its_bound(device, recipe, which, shape, record_property):
    a, b = operands(recipe, which, *shape)
    left, right = a.dequantize().double(), b.dequantize().double()
    exact, sums = left @ right.t(), left.abs() @ right.abs().t()
    share = unit(recipe, which, a.shape[1])
    options = getattr(recipe, which)
    wide = Gemm(which, b, torch.float32, options=options)(a)
    worst = float(((wide.double() - exact).abs() / sums.clamp(min=1e-30)).max())
    record_property("worst", worst / share)
    print(f"WORST {recipe} {which} {shape}: {worst:.2e} of sum |a||b|, {worst / share:.3f} of the bound")
    assert wide.dtype == torch.float32 and worst <= share
    rounding = exact.abs() * 2.0**-8
    half = Gemm(which, b, torch.bfloat16, options=options)(a)
    assert half.dtype == torch.bfloat16 and excess(half, exact, share * sums + rounding) <= 0
    bias = torch.randn(b.shape[0], device=device)
    for dtype in (torch.bfloat16, torch.float32):
        biased = Gemm(which, b, dtype, bias=bias.to(dtype), options=options)(a)
        target = exact + bias.to(dtype).double()
        assert (
            excess(biased, target, share * sums + target.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-22))
            <= 0
        )
        into = torch.randn_like(wide).to(dtype)
        target = exact + into.double()
        assert Gemm(which, b, dtype, accumulate=into, options=options)(a) is into
        assert (
            excess(into, target, share * sums + target.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-22)) <= 0
        )


@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise", "fp8_block", "bf16"])
def test_the_same_call_gives_the_same_bits(device, name):
    recipe = load(name)
    a, b = operands(recipe, "wgrad", 512, 768, 1024)
    gemm = Gemm("wgrad", b, torch.float32, options=recipe.wgrad)
    assert torch.equal(gemm(a), gemm(a))


def test_strided_operands_and_results_are_taken_as_they_lie(device):
    big = torch.randn(64, 512, device=device).bfloat16()
    a, b = big[:, 128:384], torch.randn(96, 512, device=device).bfloat16()[:, 256:]
    whole = torch.full((64, 256), 1e30, device=device)
    into = whole[:, :96].normal_()
    exact = a.double() @ b.double().t() + into.double()
    bound = EXACT * 264 * (a.double().abs() @ b.double().abs().t()) + exact.abs() * 2.0**-22
    assert gemms.prepare(a, b, torch.float32, accumulate=into).problem[7:12] == (512, 512, 256, 0, 0)
    assert gemms.product(a, b, torch.float32, accumulate=into) is into
    assert excess(into, exact, bound) <= 0
    assert bool((whole[:, 96:] == 1e30).all()), "beside the result"


def test_transposed_operands_are_taken_as_they_lie(device):
    """A GEMM accepts a transposed matrix, on either side, without a copy, also with gaps between the columns."""
    a, b = (torch.randn(256, 128, device=device).bfloat16()[:, :lines].t() for lines in (64, 96))
    exact, sums = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    for left, right, flipped in [(a, b, (1, 1)), (a, b.contiguous(), (1, 0)), (a.contiguous(), b, (0, 1))]:
        assert gemms.prepare(left, right, torch.float32).problem[10:12] == flipped
        assert excess(gemms.product(left, right, torch.float32), exact, EXACT * 264 * sums) <= 0, flipped


def test_fewer_multiprocessors_give_the_same_product(device, monkeypatch):
    """The product of a GEMM on fewer multiprocessors is within the bound, but may have other bits, because cuBLASLt may
    choose an algorithm that sums in another order."""
    recipe = load("fp8_current")
    a, b = operands(recipe, "fprop", 1024, 1024, 1024)
    left, right = a.dequantize().double(), b.dequantize().double()
    bound = unit(recipe, "fprop", 1024) * (left.abs() @ right.abs().t())
    monkeypatch.setattr(gemms, "_PLANS", {})
    for sms in (0, 64):
        made = Gemm("fprop", b, torch.float32, options=recipe.fprop, sms=sms)(a)
        assert excess(made, left @ right.t(), bound) <= 0
    assert [words[18] for words, _, _ in gemms.plans()] == [0, 64], "multiprocessors are part of the problem"


def test_every_stream_has_a_workspace_of_its_own(device):
    """Concurrent GEMMs on different streams do not share a workspace, and the workspace of a stream does not move."""
    streams = [torch.cuda.Stream().cuda_stream for _ in range(2)]
    found = [gemms.workspace(0, stream) for stream in (*streams, *streams)]
    assert found[0] != found[1] and found[:2] == found[2:]
    assert abs(found[0] - found[1]) >= gemms.WORKSPACE


def test_a_gemm_is_captured_and_replayed(device):
    recipe = load("fp8_block")
    a, b = operands(recipe, "fprop", 256, 256, 256)
    gemm = Gemm("fprop", b, torch.bfloat16)
    before, graph = gemm(a), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = gemm(a)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, before)


def test_what_cublaslt_cannot_do_is_refused(device):
    codes = torch.zeros(64, 64, device=device, dtype=torch.float8_e5m2)
    one = torch.ones((), device=device)
    with pytest.raises(ValueError, match="has no algorithm 0 for the GEMM"):
        gemms.product(codes, codes, torch.bfloat16, gemms.Scales(one, one))


@pytest.mark.parametrize("mode", [gemms.MX_BLOCKS, gemms.NVFP4_BLOCKS])
def test_cublaslt_knows_block_scaled_problems_and_says_that_hopper_has_no_units_for_them(device, mode):
    """cuBLASLt accepts descriptors, types, modes and sizes of block-scaled problems, and its heuristics find no
    algorithm on any GPU before Blackwell."""
    codes, tiles = torch.zeros(128, 128, device=device, dtype=torch.uint8), torch.zeros(1024, device=device).byte()
    codes = codes.view(gemms.FP4 if mode == gemms.NVFP4_BLOCKS else torch.float8_e4m3fn)
    alpha = torch.ones((), device=device) if mode == gemms.NVFP4_BLOCKS else None
    if device_kind("cuda") == "sm_100":
        pytest.skip("needs a GPU without units for MXFP8 and NVFP4; this one has them")
    job = gemms.prepare(codes, codes, torch.bfloat16, gemms.Scales(tiles, tiles, mode, mode), alpha=alpha)
    assert gemms.new_plan(job.problem, 0, 1).candidates == 0
    with pytest.raises(ValueError, match="has no algorithm 0 for the GEMM"):
        gemms.launch(job, 0)


def test_candidates_agree(device):
    """Every algorithm that a measurement can choose gives correct results."""
    recipe = load("fp8_current")
    a, b = operands(recipe, "dgrad", 512, 512, 1024)
    left, right = a.dequantize().double(), b.dequantize().double()
    exact, bound = left @ right.t(), unit(recipe, "dgrad", 1024) * (left.abs() @ right.abs().t())
    options = GemmLaunchOptions(recipe.dgrad.fast_accumulation)
    job = gemms.prepare(a.payload, b.payload, torch.float32, gemms.Scales(a.parts[1], b.parts[1]), options=options)
    plan = gemms.new_plan(job.problem, 0, gemms.CANDIDATES)
    assert plan.candidates >= 1
    for candidate in range(plan.candidates):
        job.out.fill_(torch.nan)
        plan.choose(candidate)
        plan.run(*job.addresses, gemms.workspace(0, 0), 0)
        torch.cuda.synchronize()
        assert excess(job.out, exact, bound) <= 0, f"candidate {candidate} of {plan.candidates}"
