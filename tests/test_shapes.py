"""`python -m bench.shapes`: the GEMMs of one rank, from the plan alone."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn

import dlp
from bench import shapes
from bench.shapes import decoded_to, main, of_config, of_model
from dlp.quant.fp8 import CurrentScaling
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.gemm import support
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import KeepHighPrecision
from dlp.quant.recipe import load as load_recipe
from launch.config.run_config import load
from tests.command import command


def problems(tp: int, recipe: str = "fp8_current") -> list[tuple[dict, int]]:
    config = load("tiny", ["--mesh.tp", str(tp), "--recipe", recipe])
    return [(json.loads(text), count) for text, count in of_config(config, tp, "sm_90")[0].items()]


@pytest.mark.parametrize("tp", [1, 2])
def test_all_gemms_of_a_microbatch_are_there(tp: int):
    """Summed over the tp ranks, the GEMMs have 6 operations per token and weight. Problems that accumulate are left out."""
    config = load("tiny")
    model, train = config.model, config.train
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    block = model.hidden * (2 * q + 2 * kv + 3 * model.ffn)
    weights = model.layers * block + model.hidden * model.vocab
    work = sum(2 * prod(each[size] for size in ("rows", "cols", "contraction")) * count
               for each, count in problems(tp) if not each["accumulate"])  # fmt: skip
    assert work * tp == 6 * weights * train.global_batch * train.sequence


def test_what_a_gemm_reads_and_writes():
    found = {(each["gemm"], each["kernel"]): each for each, _ in problems(1) if "fp8" in each["kernel"]}
    alone, together = "cublaslt fp8 tn", "cublaslt fp8 tn of each, aligned: gemm_sum_sm90"
    assert found.keys() == {("fprop", alone), ("dgrad", alone), ("dgrad", together), ("wgrad", alone)}
    assert not any(each["accumulate"] for each in found.values()), "dgrads of siblings are one GEMM"
    fprop, dgrad, wgrad = (found[which, alone] for which in ("fprop", "dgrad", "wgrad"))
    assert (fprop["a_dtype"], fprop["out_dtype"], fprop["fast_accumulation"]) == ("float8_e4m3fn", "bfloat16", True)
    assert (dgrad["a_dtype"], dgrad["b_dtype"], dgrad["out_dtype"]) == ("float8_e5m2", "float8_e4m3fn", "bfloat16")
    assert (wgrad["out_dtype"], wgrad["fast_accumulation"]) == ("float32", False)  # no FSDP: fp32 master weights
    high = [each for each, _ in problems(1) if each["kernel"] == "cublaslt hp"]
    assert {each["gemm"]: (each["a_flipped"], each["b_flipped"]) for each in high} == {
        "fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True),
    }  # fmt: skip


def test_dgrads_of_siblings_one_by_one_are_added_in_fp32():
    found = [each for each, _ in problems(1, "fp8_rowwise") if each["gemm"] == "dgrad" and "fp8" in each["kernel"]]
    assert {(each["accumulate"], each["out_dtype"]) for each in found} == {
        (False, "bfloat16"), (False, "float32"), (True, "float32"),
    }  # fmt: skip


def test_what_a_block_scaled_gemm_reads():
    config = load("tiny", ["--mesh.tp", "1", "--recipe", "nvfp4"])
    found = [json.loads(text) for text in of_config(config, 1, "sm_100")[0]]
    coded = [each for each in found if each["kernel"] == "cublaslt nvfp4 block-scaled"]
    assert {each["gemm"] for each in coded} == {"fprop", "dgrad", "wgrad"}
    for each in coded:
        assert each["alpha"] and each["a_dtype"] == each["b_dtype"] == "uint8"
        assert each["a_block"] == [1, 16] and each["b_block"] == ([1, 16] if each["gemm"] == "wgrad" else [16, 16])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_is_decoded_has_the_dtype_that_is_multiplied(dtype):
    config = load("tiny", ["--mesh.tp", "1", "--recipe", "mxfp8", "--train.dtype", dtype])
    found = [json.loads(text) for text in of_config(config, 1, "sm_90")[0]]
    assert {(each["kernel"], each["a_dtype"], each["b_dtype"]) for each in found} == {
        ("decode + bf16 mm", "bfloat16", "bfloat16"), ("cublaslt hp", *[{"bf16": "bfloat16", "fp32": "float32"}[dtype]] * 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "left", "right", "dtype"),
    [
        ("decode + fp32 mm", BlockScaling(power_of_two=False), MxScaling(), torch.float32),
        ("decode + bf16 mm", CurrentScaling(), MxScaling(), torch.bfloat16),
        ("decode + bf16 mm", Nvfp4Scaling(), Nvfp4Scaling(), torch.bfloat16),
        ("cublaslt fp8 tn", CurrentScaling(), CurrentScaling(), None),
    ],
    ids=str,
)
def test_a_pair_is_decoded_to_bf16_where_that_is_exact(kernel, left, right, dtype):
    assert decoded_to(kernel, (left.format, right.format), torch.float32) == dtype
    assert support(left.format, right.format, "sm_90").kernel == kernel


@pytest.mark.parametrize(
    ("weights", "alpha", "out"),
    [("fp8_current", True, "bfloat16"), ("fp8_rowwise", False, "float32"), ("mxfp8", False, "bfloat16")],
)
def test_scales_beside_bf16_values_are_in_the_problem(weights, alpha, out):
    """If w is quantized and x is bf16, a scale per tensor is the factor `alpha` of the GEMM. Scales per row are
    applied after the GEMM, to its fp32 result."""
    plan = dlp.make_plan(
        nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16)),
        [{"name": "all", "match": ["*"], "recipe": replace(load_recipe("bf16"), w=load_recipe(weights).w)}], tp=1,
    )  # fmt: skip
    first = next(shapes.problems(plan.layers[0], (32, 64, 64), torch.bfloat16, torch.bfloat16))
    assert (first["gemm"], first["alpha"], first["out_dtype"]) == ("fprop", alpha, out)
    assert first["a_dtype"] == first["b_dtype"] == "bfloat16"


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
def test_values_as_they_are_meet_decoded_ones_in_their_own_dtype(source):
    for other in (MxScaling(), CurrentScaling()):
        pair = KeepHighPrecision().format, other.format
        assert decoded_to(support(*pair, "sm_90").kernel, pair, source) == source


def test_it_is_a_command(capsys):
    arguments = ["tiny", "--world", "2", "--recipe", "nvfp4"]
    main(arguments)
    printed = capsys.readouterr().out
    assert "decode + bf16 mm" in printed and printed.splitlines()[-1].startswith('make bench-linear ARGS="--shapes ')
    main([*arguments, "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert any(each["alpha"] and each["a_dtype"] == "bfloat16" for each in listed)
    code, _, err = command("bench.shapes", *arguments, "--world", "3")
    assert code == 1 and "world size 3" in err and err.count("\n") == 1


class Reader(nn.Module):
    """Model with two linears that run twice, and a head that is called as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(100, 16), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for _ in range(2):
            x = self.down(self.up(x))
        return nn.functional.linear(x, weight=self.embedding.weight)


def of_floats():
    return nn.Linear(16, 32), (torch.ones(2, 3, 16),)


def values():
    """Return a module whose forward reads a value, which is impossible on the meta device."""

    class Asking(nn.Module):
        def forward(self, tokens):
            return tokens.sum().item()

    return Asking()


def test_linears_of_any_model(capsys):
    assert of_model(f"{__name__}:Reader", [4, 8]) == {"32x16x48": 2, "32x48x16": 2, "32x16x100": 1}
    assert of_model(f"{__name__}:of_floats", [1]) == {"6x16x32": 1}
    main(["--model", f"{__name__}:Reader", "--input", "2x4"])
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].split() == ["8", "16", "48", "2"]
    assert 'make bench-linear ARGS="--shapes 8x16x48 8x48x16 8x16x100"' in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "torch.nn"], r"--model torch\.nn: expected package\.module:function"),
        (["--model", "nowhere:to_go"], "No module named 'nowhere'"),
        (["--model", f"{__name__}:values"], r"does not run on the meta device: .*: return \(module, inputs\)"),
        (["--model", f"{__name__}:Reader", "--input", "4by8"], "expected sizes as in 4x2048"),
        (["--model", "torch.nn:Identity"], "calls no torch.nn.functional.linear"),
        (["--model", "builtins:int"], "expected a module or"),
    ],
)
def test_models_that_do_not_run_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        main(arguments)
