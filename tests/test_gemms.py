"""Every GEMM of every recipe compared with the float64 product of its decoded operands. No ranks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlp.kernels import gemms, loader, ops, reference
from dlp.kernels.gemm_entries import _int8_sums_on_gpu, int8_rowwise_by_torch, int8_rowwise_reference
from dlp.kernels.reference import gemm_hp
from dlp.kernels.registry import DEFAULT_OPTIONS, GemmLaunch
from dlp.quant.fp8 import CurrentScaling
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.gemm import Gemm, support
from dlp.quant.integers import Int, IntScaling
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import KeepHighPrecision, Quantizer
from dlp.quant.recipe import GEMM_OPERANDS, GEMMS, Recipe
from dlp.quant.tensor import QuantizedTensor
from tests.metrics import assert_bit_equal, relative_error
from tests.quantizers import EXPONENTS, SEEDS, every_recipe, matrix, quantize


def operands(recipe: Recipe, which: str, a: Tensor, b: Tensor) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return A and B of one GEMM of the recipe. Columnwise operands are cast from a transposed view, as in a linear."""
    quantizers, sides = recipe.operands(which), GEMM_OPERANDS[which][1::2]
    views = (x if side == "rowwise" else x.t().contiguous().t() for x, side in zip((a, b), sides, strict=True))
    made = [quantize(quantizer, view) for quantizer, view in zip(quantizers, views, strict=True)]
    return made[0], made[1]


def exact(a: QuantizedTensor, b: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return the float64 product of the decoded operands, and the product of their magnitudes."""
    left, right = a.dequantize().double(), b.dequantize().double()
    return left @ right.t(), left.abs() @ right.abs().t()


@every_recipe
@pytest.mark.parametrize("which", GEMMS)
@given(seed=SEEDS, exponent=st.integers(-8, 8), contraction=st.sampled_from([64, 160, 256]))
def test_a_gemm_is_the_float64_product_within_its_sums(
    recipe: Recipe, which: str, seed: int, exponent: int, contraction: int
):
    """The error is at most (K + 8) * 2^-24 * sum |a||b|, where K is the contraction and 8 allows for the rounding of
    scales; a bf16 result may have an error of 2^-8 of the result in addition. Bias and accumulate are added once, in fp32."""
    a, b = operands(recipe, which, matrix(seed, 32, contraction, exponent), matrix(seed + 1, 64, contraction))
    product, magnitude = exact(a, b)
    bound = (contraction + 8) * 2**-24 * magnitude
    y = Gemm(which, b, torch.float32, options=getattr(recipe, which))(a)
    assert y.dtype == torch.float32 and ((y.double() - product).abs() <= bound).all()
    half = Gemm(which, b, torch.bfloat16)(a)
    assert half.dtype == torch.bfloat16 and ((half.double() - product).abs() <= bound + product.abs() * 2**-8).all()
    bias, into = torch.randn(64), torch.randn(32, 64)
    biased = Gemm(which, b, torch.float32, bias=bias)(a)
    assert torch.equal(biased, y + bias)
    before = into.clone()
    assert Gemm(which, b, torch.float32, accumulate=into)(a) is into
    assert torch.equal(into, before + y)


@every_recipe
@pytest.mark.parametrize("which", GEMMS)
def test_a_gemm_of_small_integers_is_exact(recipe: Recipe, which: str):
    """Every format represents these values exactly. Where scales are powers of two, the float64 product must be equal
    in every bit."""
    generator = torch.Generator().manual_seed(0)
    signs = (torch.randint(0, 2, (32, 128), generator=generator) * 2 - 1 for _ in range(2))
    a, b = (sign.bfloat16() * 2.0 ** (torch.arange(32) % 2)[:, None] for sign in signs)
    if recipe.operands(which)[0].format.basis:
        return  # transformed values are not small integers
    qa, qb = operands(recipe, which, a, b)
    y, product = Gemm(which, qb, torch.float32)(qa), a.double() @ b.double().t()
    assert relative_error(y, product) < 1e-6
    if all(q.format.keeps_source or getattr(q, "power_of_two", q.format.bf16_exact) for q in recipe.operands(which)):
        assert torch.equal(y.double(), product)


@pytest.mark.parametrize("scale_bytes", [(0x30, 0x34, 0x38, 0x3C), (0x7E, 0x7D)])
def test_nvfp4_is_exact_in_any_order_of_summation(scale_bytes: tuple[int, ...]):
    """Block scales are within a few binades and K <= 1024, so every partial sum is exact, and fp32 gives the float64
    product."""
    generator = torch.Generator().manual_seed(1)
    fmt, parts = Nvfp4Scaling().format, []
    for _ in range(2):
        codes = torch.randint(0, 256, (16, 128), generator=generator, dtype=torch.uint8)
        chosen = torch.randint(0, len(scale_bytes), (16, 16), generator=generator)
        parts.append((codes, torch.tensor(scale_bytes, dtype=torch.uint8)[chosen].view(torch.float8_e4m3fn)))
    unit = torch.tensor(2688.0)
    a, b = (fmt.wrap([*part, unit]) for part in parts)
    values = [ops.decode_nvfp4(*part, (1, 16)).double() for part in parts]
    alpha = ops.nvfp4_alpha(unit, unit)
    assert torch.equal(Gemm("fprop", b, torch.float32)(a), (values[0] @ values[1].t()).float() * alpha)


def test_int8_sums_are_exact_however_long():
    """The sum of products exceeds the range of int32, and is rounded once to fp32. The padding that GPUs need does not
    change the sum."""
    fmt = IntScaling().format
    a, b = (torch.full((rows, 2**17 + 24), -128, dtype=torch.int8) for rows in (2, 3))
    a[1, ::3] = 127
    expected = a.double() @ b.double().t()
    y = Gemm("wgrad", fmt.wrap((b, torch.full((3,), 0.5))), torch.float32)(fmt.wrap((a, torch.tensor([1.0, 0.25]))))
    assert torch.equal(y, expected.float() * torch.tensor([[0.5], [0.125]])) and expected[0, 0] > 2**31
    for rows, cols, contraction in ((1, 3, 13), (16, 8, 8), (17, 9, 16)):
        left, right = (torch.randint(-128, 128, (size, contraction), dtype=torch.int8) for size in (rows, cols))
        with mock.patch.object(reference, "int8_sums", wraps=reference.int8_sums) as sums:
            filled = _int8_sums_on_gpu(left, right)
        assert torch.equal(filled.long(), left.long() @ right.long().t()) and filled.shape == (rows, cols)
        (lines, along), others = (each.shape for each in sums.call_args.args)
        assert lines > 16 and along % 8 == others[0] % 8 == others[1] % 8 == 0, "sizes that torch requires on CUDA"


@pytest.mark.parametrize("run", [int8_rowwise_reference, int8_rowwise_by_torch], ids=["cpu", "gpu"])
@pytest.mark.parametrize("contraction", [64, 100, 2**16 + 24])
@pytest.mark.parametrize(("left", "right"), [(False, True), (True, False), (False, False)])
def test_zero_points_are_folded_into_exact_sums(run: GemmLaunch, contraction: int, left: bool, right: bool):
    """The result is the exact product of codes minus zero points, rounded once to fp32, times the scales. Row 0 has extreme
    values: with two zero points and the longest contraction, the sum exceeds int32."""
    a, b = (torch.randint(-128, 128, (rows, contraction), dtype=torch.int8) for rows in (3, 5))
    a[0], b[0] = 127, 127
    a_zero, b_zero = (torch.randint(-128, 128, (rows,), dtype=torch.int8) for rows in (3, 5))
    a_zero[0] = b_zero[0] = -128
    a_scale, b_scale = torch.rand(3) + 1, torch.rand(5) + 1
    parts = [(a, a_scale, a_zero)[: 3 - left], (b, b_scale, b_zero)[: 3 - right]]
    values = [p[0].double() - (p[2].double()[:, None] if len(p) > 2 else 0) for p in parts]
    expected = (values[0] @ values[1].t()).float() * a_scale[:, None] * b_scale
    made = [Int(symmetric=len(p) == 2).wrap(p) for p in parts]
    assert_bit_equal(run(*parts, torch.float32, None, None, DEFAULT_OPTIONS), expected)
    assert_bit_equal(Gemm("fprop", made[1], torch.float32)(made[0]), expected)
    kernel = support(made[0].format, made[1].format, "sm_90")
    assert (kernel.kernel, kernel.status) == ("torch._int_mm + zero points", "native")


KINDS: list[Quantizer] = [
    KeepHighPrecision(), CurrentScaling(), RowwiseScaling(power_of_two=False), BlockScaling(), BlockScaling(power_of_two=False),
    MxScaling("e5m2"), Nvfp4Scaling(tile=True), IntScaling(), IntScaling(4, symmetric=False), IntScaling(4, 32),
]  # fmt: skip
# Formats that cannot be decoded exactly to bf16, because scales within the contraction are not powers of two
NEVER = {BlockScaling(power_of_two=False), IntScaling(4, 32)}
MIXED = [
    (left, right) for left in KINDS for right in KINDS
    if left != right and not left.format.gemm_kind == right.format.gemm_kind == "fp8_block_1d"  # this pair is native
]  # fmt: skip


@pytest.mark.parametrize("left, right", MIXED, ids=str)
def test_a_mixed_pair_is_decoded_to_bf16_where_that_is_exact(left: Quantizer, right: Quantizer):
    """The result differs from the float64 product of the decoded operands by at most the error of fp32 sums, whether the GEMM
    multiplies in bf16 or in fp32. The plan names the dtype."""
    a, b = quantize(left, matrix(1, 32, 96)), quantize(right, matrix(2, 48, 96))
    product, magnitude = exact(a, b)
    bound = 104 * 2**-24 * magnitude
    kernel = support(a.format, b.format, "cpu")
    recording: list[torch.dtype] = []
    with mock.patch.object(reference, "gemm_hp", lambda x, y, out: recording.append(x.dtype) or gemm_hp(x, y, out)):
        y = Gemm("dgrad", b, torch.float32)(a)
        bias, into = torch.randn(48), torch.ones(32, 48)
        assert torch.equal(Gemm("dgrad", b, torch.float32, bias=bias)(a), y + bias)
        assert Gemm("dgrad", b, torch.float32, accumulate=into, alpha=0.5)(a) is into
    assert ((y.double() - product).abs() <= bound).all() and (
        (into.double() - 1 - product / 2).abs() <= bound + 1e-6
    ).all()
    in_bf16 = not NEVER & {left, right}
    assert set(recording) == {torch.bfloat16 if in_bf16 else torch.float32}
    how = "decode one + mm" if KeepHighPrecision() in (left, right) else "decode + bf16 mm"
    assert (kernel.kernel, kernel.status) == (how if in_bf16 else "decode + fp32 mm", "emulated")


@pytest.mark.parametrize("right", [CurrentScaling(), RowwiseScaling(), MxScaling()], ids=str)
def test_values_in_fp32_are_multiplied_there(right: Quantizer):
    a, b = quantize(KeepHighPrecision(), matrix(1, 32, 96, dtype=torch.float32)), quantize(right, matrix(2, 48, 96))
    product, magnitude = exact(a, b)
    assert ((Gemm("fprop", b, torch.float32)(a).double() - product).abs() <= 104 * 2**-24 * magnitude).all()
    narrow = quantize(KeepHighPrecision(), a.payload.bfloat16())
    assert relative_error(Gemm("fprop", b, torch.float32)(narrow), product) > 1e-4, "bf16 would change the result"


@pytest.mark.parametrize("quantizer", [kind for kind in KINDS if kind not in NEVER], ids=str)
@given(seed=SEEDS, exponent=EXPONENTS)
def test_what_is_factored_is_what_is_decoded(quantizer: Quantizer, seed: int, exponent: int):
    q = quantize(quantizer, matrix(seed, 32, 64, exponent))
    values, scale = q.format.factored(q)
    assert values.dtype == torch.bfloat16
    kinds = {None: "", (): "tensor", (32,): "row"}
    assert q.format.keeps_source or q.format.factors == kinds[None if scale is None else tuple(scale.shape)]
    whole = values.double() if scale is None else values.double() * scale.double().reshape(-1, 1)
    assert ((whole - q.dequantize().double()).abs() <= 2**-23 * whole.abs()).all()


def test_operands_of_different_contraction_are_refused():
    for quantizer in (KeepHighPrecision(), CurrentScaling(), MxScaling(), Nvfp4Scaling()):
        a, b = quantize(quantizer, matrix(1, 32, 96)), quantize(quantizer, matrix(2, 48, 64))
        with pytest.raises(ValueError, match="share their last dimension"):
            Gemm("fprop", b, torch.float32)(a)


def test_a_missing_cublaslt_is_named(tmp_path: Path):
    """The binding opens the library by name, and the message lists the names. The test compiles the binding alone,
    without CUDA."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    main = tmp_path / "main.cpp"
    main.write_text(
        '#include <cstdio>\n#include <exception>\n#include "cublaslt.h"\n'
        'int main() { try { dlp::open_cublaslt({"libno-such-1.so", "/no/such-2.so"}); return 0; }'
        " catch (const std::exception& error) { std::puts(error.what()); return 3; } }"
    )
    program, source = tmp_path / "main", loader.CSRC / "cublaslt.cpp"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{loader.CSRC}"]
    subprocess.run(["c++", *flags, str(main), str(source), "-o", str(program), "-ldl"], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout.startswith("GEMMs need cuBLASLt, a part of CUDA that torch brings:")
    assert all(f"{name}: cannot open" in done.stdout for name in ("libno-such-1.so", "/no/such-2.so"))


def test_the_words_of_a_problem_are_those_the_binding_takes():
    """The C++ binding expects as many fields of GemmProblem, and as many addresses per run, as Python passes."""
    a, b = torch.empty(8, 32, dtype=torch.float8_e4m3fn), torch.empty(16, 32, dtype=torch.float8_e5m2)
    one = torch.ones(())
    job = gemms.prepare(a, b, torch.bfloat16, gemms.Scales(one, one), bias=torch.empty(16, dtype=torch.bfloat16))
    bindings = (loader.CSRC / "bindings.cpp").read_text()
    assert f"ProblemWords = std::array<int64_t, {len(job.problem)}>" in bindings
    assert job.problem[:-2] == (28, 29, 14, 14, 8, 16, 32, 32, 32, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert job.problem.segments == 0
    run = bindings.split("void run_gemm(")[1].split("uintptr_t workspace")[0]
    assert run.count("uintptr_t") == len(job.addresses)
    flipped = gemms.prepare(torch.empty(32, 8).t(), torch.empty(16, 64)[:, :32], torch.float32)
    assert flipped.problem[7:12] == (8, 64, 16, 1, 0)
    assert gemms.prepare(a.view(torch.uint8)[:, :16].view(a.dtype), b[:, :16], torch.float32).problem[7:9] == (32, 32)


@pytest.mark.parametrize("lines, across, tile", [(8, 3, False), (5, 2, False), (2, 4, True), (3, 5, True)])
def test_block_scales_come_in_the_layout_of_the_gemm(lines: int, across: int, tile: bool):
    scales = torch.arange(lines * across, dtype=torch.float32).view(lines, across)
    expected = ops.block_2d_layout(scales) if tile else ops.block_1d_layout(scales)
    made = gemms.block_scales(scales, tile)
    assert torch.equal(made, expected) and made.is_contiguous()
    if not tile:  # scales that already have the layout are not copied
        view = expected[:, :lines].t()
        assert gemms.block_scales(view, False).data_ptr() == expected.data_ptr()


def test_measured_choices_are_kept_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Module:
        version = 130101

        def cublaslt_version(self) -> int:
            return self.version

    module = Module()
    monkeypatch.setattr(gemms, "_module", lambda: module)
    monkeypatch.setattr(gemms, "choice_file", lambda device: tmp_path / "gpu.json")
    gemms.choices.cache_clear()
    assert gemms.choices(0) == {}
    gemms.save_choices(0, {"1 2": 3})
    gemms.save_choices(0, {"4 5": 6})
    assert gemms.choices(0) == {"1 2": 3, "4 5": 6}
    module.version = 130200
    gemms.choices.cache_clear()
    assert gemms.choices(0) == {}
    gemms.choices.cache_clear()
