"""The public quantizers and operations give the results of the golden files. A test runs each case; its id is
`group/id`. No ranks.

    pytest tests/test_golden.py --golden FILE        # another file of the same schema

A group that is not in GROUPS, or a field that its check does not know, fails.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.quant.fp8 import ELEMENTS, CurrentScaling, DelayedScaling, Fp8Tensor
from dlp.quant.fp8_block import BlockScaling, Fp8Block
from dlp.quant.fp8_rowwise import RowwiseScaling
from dlp.quant.gemm import Gemm
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import Quantizer
from dlp.quant.state import SlotTable
from dlp.quant.tensor import QuantizedTensor

SHIPPED = sorted((Path(__file__).parent / "data").glob("golden_*.json"))
Case = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def floats(bits: Iterable[str]) -> Tensor:
    """An fp32 tensor [n] from bit patterns."""
    return torch.tensor([int(pattern, 16) for pattern in bits], dtype=torch.int64).to(torch.int32).view(torch.float32)


def one(bits: str) -> Tensor:
    return floats([bits])[0]


def codes(texts: Iterable[str]) -> list[int]:
    return [int(text, 16) for text in texts]


def raw(x: Tensor) -> list[Any]:
    """Return nested lists of integers: the bit patterns of an fp32 tensor, in which all NaNs have one pattern, or the
    bytes of a tensor of another dtype."""
    if x.dtype == torch.float32:
        return torch.where(torch.isnan(x), torch.nan, x).view(torch.int32).tolist()
    return x.view(torch.uint8).tolist()


def same(got: Tensor, expected: Tensor) -> bool:
    return raw(got) == raw(expected)


def quantize(quantizer: Quantizer, x: Tensor) -> QuantizedTensor:
    return quantizer.cast(x, quantizer.observe(x))


def block_of(case: Case) -> Tensor:
    """Return x [1, n]: the values `x_prefix`, then the value `fill` in all other elements."""
    prefix = floats(case["x_prefix"])
    x = torch.cat([prefix, one(case["fill"]).expand(case["n"] - len(prefix))])
    return x.to(DTYPES[case["dtype"]])[None]


def filled(case: Case, prefix: str) -> list[int]:
    expected = codes(case[prefix])
    return expected + codes([case["code_fill"]]) * (case["n"] - len(expected))


def cast_fp8(element: str) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        code = ops.encode_fp8(one(case["x"])[None], ELEMENTS[element])
        assert raw(code) == codes([case["code"]])
        check_value(ops.decode_fp8(code)[0], case["value"])

    return check


def check_value(got: Tensor, expected: str) -> None:
    assert same(got, torch.tensor(float(expected)))


def cast_e2m1(case: Case) -> None:
    code = ops.encode_e2m1(one(case["x"])[None])
    assert raw(code) == codes([case["code"]])
    check_value(decode_one_e2m1(code), case["value"])


def decode_one_e2m1(code: Tensor) -> Tensor:
    return ops.decode_e2m1(ops.pack_e2m1(torch.cat([code, code])[None]))[0, 1]


def cast_e8m0(case: Case) -> None:
    x = one(case["x"])
    up = ops.encode_e8m0(x, round_up=True)
    assert up.item() == int(case["round_up"], 16)
    assert ops.encode_e8m0(x, round_up=False).item() == int(case["round_zero"], 16)
    decoded = ops.decode_e8m0(up).item()
    assert (None if math.isnan(decoded) else math.log2(decoded)) == case["decoded_log2"]


def decode_fp8(element: str) -> Callable[[Case], None]:
    def check(case: Case) -> None:
        code = torch.tensor(codes([case["code"]]), dtype=torch.uint8).view(ELEMENTS[element])
        check_value(ops.decode_fp8(code)[0], case["value"])

    return check


def decode_e2m1(case: Case) -> None:
    check_value(decode_one_e2m1(torch.tensor(codes([case["code"]]), dtype=torch.uint8)), case["value"])


def pack_e2m1x2(case: Case) -> None:
    pair = ops.encode_e2m1(torch.tensor([float(case["x_even"]), float(case["x_odd"])]))
    packed = ops.pack_e2m1(pair)
    assert raw(packed) == codes([case["byte"]])
    assert torch.equal(ops.unpack_e2m1(packed), pair)


def mx_scale(case: Case) -> None:
    amax = one(case["amax"])
    for element, dtype in ELEMENTS.items():
        assert ops.mx_scale(amax, dtype, "ceil").item() == int(case[f"{element}_rceil"], 16)
        assert ops.mx_scale(amax, dtype, "floor").item() == int(case[f"{element}_ocp_floor"], 16)


def delayed_scaling(case: Case) -> None:
    element = {448.0: "e4m3", 57344.0: "e5m2"}[case["fp8_max"]]
    quantizer = DelayedScaling(element, case["margin"], len(case["history_before"]), case["algo"])
    table = SlotTable({"x": quantizer.caps.slot}, torch.get_default_device())
    table.load_merged([{"x": {"scale": one(case["scale_before"]), "history": floats(case["history_before"])}}])
    table.update(floats([case["reduced_amax"]]))
    state = table.state_dict()["x"]
    assert same(state["history"], floats(case["history_after"]))
    assert same(state["scale"], one(case["scale_after"]))
    cast = quantizer.cast(torch.ones(1, 4), None, slot=table.slot("x"))
    assert same(cast.parts[1], one(case["scale_inv_next"]))


def current_scaling(case: Case) -> None:
    quantizer = CurrentScaling(case["format"], case["pow2"], case["eps"])
    q = quantizer.cast(floats(case["x"])[None], one(case["amax"]))
    assert q.format == Fp8Tensor(case["format"])
    assert raw(q.payload[0]) == codes(case["codes"])
    assert same(q.parts[1], one(case["scale_inv"]))
    scale = ops.scale_from_amax(
        one(case["amax"]), ops.FP8_MAX[ELEMENTS[case["format"]]], power_of_two=case["pow2"], epsilon=case["eps"]
    )
    assert same(scale, one(case["scale"]))


def fp8_block(case: Case) -> None:
    x, expected = block_of(case), filled(case, "codes_prefix")
    assert same(ops.amax(x), one(case["amax"]))
    for tile in (False, True):
        matrix = torch.cat([x, torch.zeros(Fp8Block.SIZE - 1, Fp8Block.SIZE, dtype=x.dtype)]) if tile else x
        q = quantize(BlockScaling(case["format"], tile, case["pow2"]), matrix)
        assert raw(q.payload[0]) == expected
        assert same(q.parts[1][:1, :1], floats([case["scale_inv"]])[None])
    scale = ops.scale_from_amax(
        one(case["amax"]), ops.FP8_MAX[ELEMENTS[case["format"]]], power_of_two=case["pow2"],
        inf_scale=torch.finfo(x.dtype).max,
    )  # fmt: skip
    assert same(scale, one(case["scale"]))


def mxfp8(case: Case) -> None:
    x = block_of(case)
    assert same(ops.amax(x), one(case["amax"]))
    up, floor = (quantize(MxScaling(case["format"], rounding), x) for rounding in ("ceil", "floor"))
    assert raw(up.payload[0]) == filled(case, "codes_prefix")
    assert raw(up.parts[1]) == [codes([case["scale_e8m0"]])]
    assert raw(floor.parts[1]) == [codes([case["ocp_floor_scale"]])]
    if "ocp_floor_codes_prefix" in case:
        assert raw(floor.payload[0])[: len(case["x_prefix"])] == codes(case["ocp_floor_codes_prefix"])
    tile = torch.cat([x, torch.zeros(x.shape[1] - 1, x.shape[1], dtype=x.dtype)])
    assert raw(quantize(MxScaling(case["format"], tile=True), tile).payload[:1]) == raw(up.payload)


def nvfp4_1d(case: Case) -> None:
    x, amax = floats(case["x"]).to(DTYPES[case["dtype"]])[None], one(case["tensor_amax"])
    q = Nvfp4Scaling().cast(x, amax)
    assert raw(q.payload)[0] == list(bytes.fromhex(case["packed"]))
    assert raw(ops.unpack_e2m1(q.payload))[0] == codes(case["codes"])
    assert raw(q.parts[1]) == [codes([case["scale_e4m3"]])]
    assert same(q.parts[2], amax)
    encode, decode = ops.nvfp4_tensor_scale(amax)
    assert same(encode, one(case["S_enc"])) and same(decode, one(case["S_dec"]))
    assert same(ops.amax(x), one(case["block_amax"]))
    assert same(ops.nvfp4_block_scale(ops.amax(x), encode), one(case["scale_f32"]))
    assert same(ops.nvfp4_encode_scale(q.parts[1], decode)[0, 0], one(case["enc_scale"]))


def entries(formula: str, rows: int, columns: int) -> list[list[float]]:
    """Evaluate a formula of i and j in the syntax of the files: ^ is a power, and adjacent factors are multiplied."""
    product = re.sub(r"(?<=[\dij)])(?=[ij(])", "*", formula)
    code = compile(product.replace("^", "**"), "formula", "eval")
    assert set(code.co_names) <= {"i", "j"}, formula
    return [[float(eval(code, {"i": i, "j": j})) for j in range(columns)] for i in range(rows)]


def nvfp4_2d(case: Case) -> None:
    rows, cols = case["shape"]
    x = torch.tensor(entries(case["formula"], rows, cols)).bfloat16()
    quantizer = Nvfp4Scaling(tile=True)
    assert same(ops.amax(x), one(case["tensor_amax"]))
    row = quantize(quantizer, x)
    assert raw(row.payload) == [list(bytes.fromhex(line)) for line in case["row_packed"]]
    assert raw(row.parts[1]) == [codes(line) for line in case["tile_scales_e4m3"]]
    for column in (row.transpose(), quantize(quantizer, x.t())):
        assert raw(column.payload) == [list(bytes.fromhex(line)) for line in case["col_packed"]]
        assert same(column.parts[1], row.parts[1].t())


def sr_e2m1(case: Case) -> None:
    code = ops.encode_e2m1_stochastic(one(case["x"])[None], torch.tensor([case["rbits8"]], dtype=torch.uint8))
    assert raw(code) == codes([case["code"]])
    check_value(decode_one_e2m1(code), case["value"])


def rht16(case: Case) -> None:
    y = ops.rht16(torch.tensor([case["x"]], dtype=torch.bfloat16))
    assert same(y.float()[0], floats(case["y_bits"]))
    assert y[0].tolist() == [float(text) for text in case["y"]]
    assert Nvfp4Scaling(rht=True).observe(torch.tensor([case["x"]], dtype=torch.bfloat16)) == float(case["amax"])


def scale_swizzle_128x4(case: Case) -> None:
    scales = torch.zeros(case["row"] + 1, case["n_scale_cols"], dtype=torch.uint8)
    scales[case["row"], case["col"]] = 1
    assert ops.swizzle_128x4(scales).nonzero().tolist() == [[case["offset"]]]


def scale_shapes(case: Case) -> None:
    x = torch.zeros(case["M"], case["K"], dtype=torch.bfloat16)
    for name, (quantizer, layout) in LAYOUTS.items():
        if name not in case:
            continue
        expected = case[name]
        for side, matrix in (("row", x), ("col", x.t())):
            q = quantize(quantizer, matrix)
            data, scale = list(q.payload.shape), list(layout(q.parts[1]).shape)
            if name == "mxfp8" and side == "col":  # dlp stores this operand transposed
                data, scale = data[::-1], scale[::-1]
            assert data == expected.get(f"{side}_data", expected.get(f"{side}_data_bytes"))
            assert scale == expected[f"{side}_scale"]
        assert set(expected) <= {
            f"{side}_{what}" for side in ("row", "col") for what in ("data", "data_bytes", "scale")
        }


LAYOUTS: dict[str, tuple[Quantizer, Callable[[Tensor], Tensor]]] = {
    "nvfp4": (Nvfp4Scaling(), lambda scales: ops.pad_scales(scales.view(torch.uint8), 128, 4)),
    "mxfp8": (MxScaling(), lambda scales: ops.pad_scales(scales, 128, 4)),
    "fp8_block_1d": (BlockScaling(), ops.block_1d_layout),
    "fp8_block_2d": (BlockScaling(tile=True), ops.block_2d_layout),
}


def gemm_exact(case: Case) -> None:
    quantizer: Quantizer = {"nvfp4": Nvfp4Scaling(), "mxfp8": MxScaling()}[case["recipe"]]
    a, w = (
        quantize(quantizer, torch.tensor([[float(v) for v in row] for row in case[name]]).bfloat16())
        for name in ("A_bf16", "W_bf16")
    )
    assert a.shape == w.shape == (4, case["K"])
    y = Gemm("fprop", w, torch.float32)(a)
    for name, q in (("A", a), ("W", w)):
        assert raw(q.parts[1]) == [codes(row) for row in case[f"{name}_scales"]]
        digits = ops.unpack_e2m1(q.payload) if case["recipe"] == "nvfp4" else q.payload
        width = 1 if case["recipe"] == "nvfp4" else 2
        assert ["".join(f"{code:0{width}x}" for code in row) for row in raw(digits)] == case[f"{name}_codes"]
        if f"amax_{name}" in case:
            assert same(q.parts[2], one(case[f"amax_{name}"]))
    acc = torch.tensor([[float(v) for v in row] for row in case["acc_exact"]])
    if case["recipe"] == "mxfp8":
        assert same(y, acc)
        return
    alpha = ops.nvfp4_alpha(a.parts[2], w.parts[2])
    assert same(alpha, one(case["alpha"]))
    assert same(y, alpha * acc)
    assert same(y, torch.stack([floats(row) for row in case["y_fp32"]]))


def fp8_rowwise(case: Case) -> None:
    x = floats(case["x"]).to(DTYPES[case["dtype"]])[None]
    quantizer = RowwiseScaling(case["format"], case["pow2"], case["eps"])
    others = torch.cat([torch.zeros_like(x), x, x.nan_to_num() * 0 + 1e30])  # rows must not depend on each other
    q = quantize(quantizer, others)
    assert raw(q.payload)[1] == codes(case["codes"])
    assert same(q.parts[1][1], one(case["scale_inv"]))
    assert same(ops.amax(x, dim=1)[0], one(case["amax"]))
    scale = ops.scale_from_amax(
        one(case["amax"]), ops.FP8_MAX[ELEMENTS[case["format"]]], power_of_two=case["pow2"], epsilon=case["eps"]
    )
    assert same(scale, one(case["scale"]))


def fp8_rowwise_gemm(case: Case) -> None:
    a, w = (
        quantize(RowwiseScaling(), torch.tensor([[float(v) for v in row] for row in case[name]]).bfloat16())
        for name in ("A_bf16", "W_bf16")
    )
    assert a.shape == w.shape == (4, case["K"])
    for name, q in (("A", a), ("W", w)):
        assert raw(q.payload) == [list(bytes.fromhex(row)) for row in case[f"{name}_codes"]]
        assert same(q.parts[1], floats(case[f"{name}_scale_inv"]))
    assert same(Gemm("fprop", w, torch.float32)(a), torch.stack([floats(row) for row in case["y_fp32"]]))


X = ("x", "x_dec")
CAST = (*X, "code", "value", "note")
BLOCKS = ("x_prefix", "x_prefix_dec", "fill", "n", "dtype", "format", "amax", "codes_prefix", "code_fill", "note")
SCALED = ("dtype", "format", "pow2", "eps", "scale", "scale_dec", "scale_inv", "note")
# group -> (check, fields that a case may have besides id). Not all fields are checked: *_dec, note, name, torchao_*, te_*
# and paper_* are repetitions or comments.
GROUPS: dict[str, tuple[Callable[[Case], None], tuple[str, ...]]] = {
    "cast_e4m3": (cast_fp8("e4m3"), CAST),
    "cast_e5m2": (cast_fp8("e5m2"), CAST),
    "cast_e2m1": (cast_e2m1, CAST),
    "cast_e8m0": (cast_e8m0, (*X, "round_up", "round_zero", "decoded_log2")),
    "decode_e4m3": (decode_fp8("e4m3"), ("code", "value")),
    "decode_e5m2": (decode_fp8("e5m2"), ("code", "value")),
    "decode_e2m1": (decode_e2m1, ("code", "value")),
    "pack_e2m1x2": (pack_e2m1x2, ("x_even", "x_odd", "byte")),
    "mx_scale": (
        mx_scale,
        ("amax", "amax_dec", "e4m3_rceil", "e4m3_ocp_floor", "e5m2_rceil", "e5m2_ocp_floor", "torchao_rceil_differs"),
    ),
    "delayed_scaling": (
        delayed_scaling,
        ("history_before", "history_before_dec", "scale_before", "reduced_amax", "reduced_amax_dec", "fp8_max",
         "margin", "algo", "history_after", "history_after_dec", "scale_after", "scale_after_dec",
         "scale_inv_next", "note", "te_unfused_python_agrees"),
    ),
    "current_scaling": (current_scaling, (*X, *SCALED, "amax", "amax_dec", "codes")),
    "fp8_block": (fp8_block, (*BLOCKS, "pow2", "scale", "scale_dec", "scale_inv")),
    "mxfp8": (mxfp8, (*BLOCKS, "scale_e8m0", "ocp_floor_scale", "ocp_floor_codes_prefix")),
    "nvfp4_1d": (
        nvfp4_1d,
        (*X, "tensor_amax", "tensor_amax_dec", "dtype", "S_enc", "S_dec", "block_amax", "scale_f32", "scale_e4m3",
         "enc_scale", "codes", "packed", "note", "paper_order_scale_e4m3", "torchao_scale_e4m3", "torchao_packed"),
    ),
    "nvfp4_2d": (
        nvfp4_2d,
        ("formula", "shape", "dtype", "tensor_amax", "tile_scales_e4m3", "row_packed", "col_packed"),
    ),
    "sr_e2m1": (sr_e2m1, (*X, "rbits8", "code", "value")),
    "rht16": (rht16, ("name", "x", "y", "y_bits", "amax")),
    "scale_swizzle_128x4": (scale_swizzle_128x4, ("row", "col", "n_scale_cols", "offset")),
    "scale_shapes": (scale_shapes, ("M", "K", "nvfp4", "mxfp8", "fp8_block_1d", "fp8_block_2d")),
    "gemm_exact": (
        gemm_exact,
        ("recipe", "K", "A_bf16", "W_bf16", "A_codes", "W_codes", "A_scales", "W_scales", "amax_A", "amax_W",
         "acc_exact", "alpha", "y_fp32"),
    ),
    "fp8_rowwise": (fp8_rowwise, (*X, *SCALED, "amax", "codes")),
    "fp8_rowwise_gemm": (
        fp8_rowwise_gemm,
        ("K", "A_bf16", "W_bf16", "A_codes", "W_codes", "A_scale_inv", "W_scale_inv", "y_fp32"),
    ),
}  # fmt: skip


def check_case(group: str, case: Case) -> None:
    """Fail for a wrong number, an unknown group or an unknown field."""
    assert group in GROUPS, f"unknown golden group {group!r}"
    check, known = GROUPS[group]
    unknown = case.keys() - {"id", *known}
    assert not unknown, f"golden group {group!r} has unknown fields {sorted(unknown)}"
    check(case)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_case" in metafunc.fixturenames:
        files = metafunc.config.getoption("--golden") or SHIPPED
        cases = [
            pytest.param(group, case, id=f"{group}/{case['id']}")
            for file in files
            for group, content in json.loads(Path(file).read_text())["groups"].items()
            for case in content["cases"]
        ]
        metafunc.parametrize("golden_group,golden_case", cases)


def test_golden(golden_group: str, golden_case: Case) -> None:
    check_case(golden_group, golden_case)


def test_shipped_files_are_whole() -> None:
    sizes = {"golden_formats.json": 409, "golden_rowwise.json": 58, "golden_tile.json": 3}
    assert [file.name for file in SHIPPED] == list(sizes)
    for file in SHIPPED:
        content = json.loads(file.read_text())
        cases = sum(len(group["cases"]) for group in content["groups"].values())
        assert content["total_cases"] == cases == sizes[file.name]


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("((31i+17j)%29-14)/4", 3.0),
        ("(-1)^(i+j)*2^((ij)%7-3)", -8.0),
        ("(i-15.5)(j-15.5)/16", 10.546875),
        ("2j", 6.0),
    ],
)
def test_a_formula_is_read_as_it_is_written(formula: str, value: float) -> None:
    assert entries(formula, 3, 4)[2][3] == value


@pytest.mark.parametrize(
    "group, case, message",
    [
        ("cast_e3m4", {"id": "0"}, "unknown golden group"),
        ("decode_e4m3", {"id": "0", "code": "0x38", "value": "1.0", "sign": 0}, "unknown fields"),
        ("decode_e4m3", {"id": "0", "code": "0x38", "value": "2.0"}, None),
    ],
)
def test_a_foreign_or_wrong_case_fails(group: str, case: Case, message: str | None) -> None:
    with pytest.raises(AssertionError, match=message):
        check_case(group, case)
