"""Arguments of GEMMs that layers pass to cuBLASLt for each recipe, read on an emulated device; and refused arguments.
No ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dlp
from dlp.kernels import gemm_entries, gemms, ops, reference
from dlp.kernels.ops import GemmLaunchOptions
from dlp.quant.gemm import Gemm
from dlp.quant.quantizer import KeepHighPrecision
from dlp.quant.recipe import GEMMS, Operand
from tests.emulated import emulated  # noqa: F401
from tests.quantizers import every_recipe, matrix
from tests.test_gemms import operands

M, N, K = 64, 128, 256
SIZES = {(M, N, K): "fprop", (M, K, N): "dgrad", (N, K, M): "wgrad"}
FAST, SMS = 16, 18  # indices of fast accumulation and the number of SMs in the arguments of a GEMM (csrc/cublaslt.h)
SPLIT_BUT_FPROP = {"fprop": 1, "dgrad": 0, "wgrad": 0}


def planned(recipe: dlp.Recipe) -> dict[str, tuple[gemms.GemmProblem, bool]]:
    """Return, for fprop, dgrad and wgrad of a linear, the arguments of the GEMM, and whether it may use a measured
    algorithm."""
    linear = dlp.Linear(K, N, recipe=recipe, dtype=torch.bfloat16)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    linear(x).sum().backward()
    return {SIZES[words[4:7]]: (words, tuned) for words, _, tuned in gemms.plans()}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("recipe", "options", "fast"),
    [
        ("bf16", {}, {"fprop": 0, "dgrad": 0, "wgrad": 0}),
        ("fp8_current", {}, SPLIT_BUT_FPROP),
        ("fp8_delayed", {}, SPLIT_BUT_FPROP),
        ("fp8_block", {}, {"fprop": 0, "dgrad": 0, "wgrad": 0}),
        ("fp8_current", {"accumulation": dict.fromkeys(GEMMS, "fast")}, {"fprop": 1, "dgrad": 1, "wgrad": 1}),
        ("fp8_delayed", {"accumulation": {"fprop": "split", "wgrad": "fast"}}, {"fprop": 0, "dgrad": 0, "wgrad": 1}),
    ],
    ids=str,
)
def test_the_recipe_says_how_each_gemm_accumulates(recipe: str, options: dict[str, Any], fast: dict[str, int]):
    found = planned(dlp.recipe(recipe, **options))
    assert {which: words[FAST] for which, (words, _) in found.items()} == fast
    assert all(tuned for _, tuned in found.values())


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("operand", ["x", "w"])
def test_only_fp8_accumulates_fast(operand: str):
    """If one operand of a GEMM is in high precision, the GEMM runs in high precision, for which cuBLASLt has no fast
    accumulation."""
    kept = Operand(KeepHighPrecision(), KeepHighPrecision())
    mixed = replace(
        dlp.recipe("fp8_current", accumulation=dict.fromkeys(GEMMS, "fast")), name="mixed", **{operand: kept}
    )
    with_fp8 = {"x": "dgrad", "w": "wgrad"}[operand]
    assert {which: words[FAST] for which, (words, _) in planned(mixed).items()} == {
        which: int(which == with_fp8) for which in GEMMS
    }


@pytest.mark.usefixtures("emulated")
def test_the_recipe_declines_measured_choices():
    found = planned(dlp.recipe("fp8_current", tuned=False))
    assert set(found) == set(GEMMS) and not any(tuned for _, tuned in found.values())


@pytest.mark.usefixtures("emulated")
def test_a_gemm_may_be_limited_to_some_multiprocessors():
    a, b = operands(dlp.recipe("fp8_current"), "fprop", matrix(0, 32, 64), matrix(1, 48, 64))
    for sms in (0, 64):
        Gemm("fprop", b, torch.bfloat16, sms=sms)(a)
    assert sorted(words[SMS] for words, _, _ in gemms.plans()) == [0, 64]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "fp8_block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_are_multiplied_into_aligned_memory(recipe: str, dtype: torch.dtype):
    """FP8 GEMMs of cuBLASLt need a result that is aligned to 16 bytes. `out` may start at any element of a buffer, for example
    the main_grad of a weight."""
    a, b = operands(dlp.recipe(recipe), "wgrad", matrix(0, 32, 64), matrix(1, 48, 64))
    for first in (0, 1):
        out = torch.zeros(1 + 32 * 48, dtype=dtype)[first : first + 32 * 48].view(32, 48)
        assert Gemm("wgrad", b, dtype, out=out)(a) is out
        assert torch.equal(out, Gemm("wgrad", b, dtype)(a))
    assert all(problem.alignment % gemms.ALIGNMENT == 0 for problem, _, _ in gemms.plans())


@pytest.mark.parametrize("on", ["cpu", "emulated"])
@every_recipe
@pytest.mark.parametrize("which", GEMMS)
def test_a_product_of_nothing_is_zero(recipe: dlp.Recipe, which: str, on: str, request: pytest.FixtureRequest):
    full = [matrix(seed, 64, 128) for seed in range(2)]
    if recipe.operands(which)[0].format.basis:
        return  # the Hadamard transform needs complete blocks
    a, b = operands(recipe, which, *full)
    none = operands(recipe, which, full[0][:0], full[1])[0]
    if on == "emulated":
        request.getfixturevalue("emulated")
    bias, into = torch.randn(64), torch.ones(0, 64)
    assert Gemm(which, b, torch.bfloat16, options=getattr(recipe, which))(none).shape == (0, 64)
    assert Gemm(which, b, torch.float32, accumulate=into)(none) is into
    nothing = [type(q)(q.format, tuple(part[..., :0] if part.dim() == 2 else part for part in q.parts)) for q in (a, b)]
    made = Gemm(which, nothing[1], torch.float32, bias=bias)(nothing[0])
    assert torch.equal(made, bias.expand(64, 64))


@pytest.mark.usefixtures("emulated")
def test_other_dtypes_are_multiplied_by_cublaslt_too(monkeypatch: pytest.MonkeyPatch):
    """cuBLASLt, and not the reference, multiplies if the output has another dtype than the operands or fp32, or if the
    operands have two dtypes. dlp converts the output or the operands to dtypes that cuBLASLt supports."""
    monkeypatch.setattr(reference, "gemm_hp", lambda *_: pytest.fail("the reference multiplied"))
    a, b = torch.randn(32, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    product = a.float() @ b.float().t()
    assert torch.equal(ops.gemm_hp(a, b, out_dtype=torch.float16), product.half())
    assert torch.equal(ops.gemm_hp(a, b.float(), out_dtype=torch.bfloat16), product.bfloat16())
    assert all(each.d_type in (each.a_type, gemms.TYPES[torch.float32]) for each, _, _ in gemms.plans()), "no such GEMM"


def test_the_reference_runs_on_a_gpu_only_where_that_was_allowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    operand: Any = SimpleNamespace(is_cuda=True, device=None)
    with pytest.raises(ValueError, match="some GPU has no kernel for this GEMM"):
        gemm_entries.check_reference(operand, GemmLaunchOptions())
    gemm_entries.check_reference(operand, GemmLaunchOptions(allow_reference=True))


def test_a_gpu_without_fp8_tensor_cores_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    codes, scale = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    with pytest.raises(ValueError, match=r"some GPU has no FP8 tensor cores, which need compute capability 8\.9"):
        gemm_entries._scaled_mm(codes, codes, scale, scale, torch.float32, False)


@pytest.mark.usefixtures("emulated")
def test_operands_lie_on_one_device():
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    for bad in ({"bias": torch.empty(48, device="meta")}, {"accumulate": torch.empty(32, 48, device="meta")}):
        with pytest.raises(ValueError, match="a GEMM has operands on cpu and meta: move all operands to one device"):
            gemms.prepare(a, b, torch.float32, **bad)


@pytest.mark.parametrize("name", ["bf16", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_a_layer_refuses_what_nothing_computes_in(name: str, dtype: torch.dtype):
    linear = dlp.Linear(64, 64, recipe=name)
    with pytest.raises(ValueError, match=rf"x must be bf16, fp16 or fp32; got {dtype}: convert it before the layer"):
        linear(torch.ones(32, 64, dtype=dtype))


@pytest.mark.usefixtures("emulated")
def test_casts_of_fp16_are_in_the_plan_of_a_gpu():
    for recipe, notes in (("bf16", 0), ("fp8_current", 1)):
        linear = dlp.Linear(64, 64, recipe=recipe, dtype=torch.float16)
        linear(torch.ones(32, 64, dtype=torch.float16))
        found = [note for note in linear.core.session.noted if "casts of fp16 run the plain-torch reference" in note]
        assert len(found) == notes


def test_a_layer_refuses_tensors_that_lie_elsewhere():
    linear = dlp.Linear(64, 64, recipe="fp8_current")
    with pytest.raises(ValueError, match="x is on meta and the parameters are on cpu: move x or the layer"):
        linear(torch.ones(32, 64, device="meta"))


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_torchs_newer_setting_of_tf32_is_read(precision: str):
    """dlp must not read `allow_tf32` after this setting was used, because `allow_tf32` then raises."""
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = precision
        dlp.Linear(64, 64, recipe="fp8_current")(torch.randn(32, 64))
        assert gemms.tf32() == (precision == "tf32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_torchs_older_setting_of_tf32_is_read():
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        assert gemms.tf32()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert not gemms.tf32()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_linear_in_16_bits_has_the_bits_of_torchs(dtype: torch.dtype):
    """The test runs on CPUs, with a bias, forward and backward. An fp32 product would sum in another order: 1 of 10,000
    elements differs."""
    ours, theirs = dlp.Linear(128, 256, bias=True, dtype=dtype), torch.nn.Linear(128, 256, dtype=dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        theirs.bias.normal_(std=1e-2)
    ours.load_state_dict(theirs.state_dict())
    x, dy = torch.randn(1024, 128, dtype=dtype), torch.randn(1024, 256, dtype=dtype)
    results = []
    for layer in (ours, theirs):
        given = x.clone().requires_grad_()
        y = layer(given)
        results.append((y, *torch.autograd.grad(y, (given, layer.weight, layer.bias), dy)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
