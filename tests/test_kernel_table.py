"""The table of kernels: which entry is chosen, its name in plans, and kernels that users register. No ranks, no
device."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp.kernels import ops, registry, table
from dlp.kernels.launches import NotPlain
from dlp.kernels.reference import Fp8Scale
from dlp.kernels.table import DEVICES, GEMM, GemmEntry, KernelEntry, operation, registered
from dlp.parallel.model import rows
from dlp.quant.gemm import Gemm, kernel_name, support
from dlp.quant.quantizer import QuantizerCaps
from dlp.quant.recipe import GEMMS, load, names
from dlp.runtime import capture as captured
from tests.emulated import emulated  # noqa: F401
from tests.metrics import assert_bit_equal, relative_error
from tests.quantizers import matrix, quantize
from tests.refusals import refuses
from tests.test_recipes import Int6, Int6Scaling

E4M3 = torch.float8_e4m3fn


# --- entries of dlp


def test_every_operation_ends_in_plain_torch_on_every_device():
    for name in registry._ON.keys() - {GEMM}:
        for device in DEVICES:
            *kernels, last = table.entries(name, device)
            assert last.name == "reference" and last.takes is None and not last.reads, name
            assert not kernels or device in table.NATIVE, f"{name} has a kernel on {device}"


def test_every_gemm_of_every_recipe_has_a_kernel_that_takes_all_problems():
    for name in names():
        recipe = load(name)
        for a, b in map(recipe.operands, GEMMS):
            for device in DEVICES:
                found = support(a.format, b.format, device)
                assert found.entries[-1].takes is None and found.kernel.split(", ")[0] == found.entries[-1].name


def test_names_of_kernels_that_run_at_times_stand_behind():
    recipe = load("fp8_block")
    a, b = recipe.operands("fprop")
    assert kernel_name(a.format, b.format, "sm_90") == "cublaslt fp8 blocks, large: gemm_sm90"


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("large", [False, True])
def test_a_gemm_asks_the_rule_of_each_problem(large: bool, monkeypatch: pytest.MonkeyPatch):
    ran = []
    monkeypatch.setattr("dlp.kernels.gemm_sm90.takes", lambda a, b, *problem: large and len(a) > 64)
    monkeypatch.setattr("dlp.kernels.gemm_sm90.product", lambda a, b, *_, **__: ran.append("ours") or torch.zeros(1))
    monkeypatch.setattr("dlp.kernels.gemms.product_fp8", lambda a, *_, **__: ran.append("theirs") or torch.zeros(1))
    left, right = load("fp8_block").operands("fprop")
    b = quantize(right, matrix(1, 128, 256))
    for tokens in (64, 128):
        Gemm("fprop", b, torch.bfloat16)(quantize(left, matrix(0, tokens, 256)))
    assert ran == (["theirs", "ours"] if large else ["theirs", "theirs"])


def rows_of(name: str) -> list[ast.Call]:
    """Return the calls in the tuple `name`, parsed from the source of the table."""
    tree = ast.parse(Path(table.__file__).read_text())
    (found,) = [
        each.value for each in tree.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name
    ]
    assert isinstance(found, ast.Tuple)
    return [each for each in found.elts if isinstance(each, ast.Call)]


def test_the_table_can_be_listed_without_running_it():
    """A reader sees all entries in the source: each row is one call with constants and names as arguments, and the rows
    are all entries except the references."""
    for name, fields in (("KERNELS", table.Kernel._fields), ("GEMMS", table.Gemm._fields)):
        for row in rows_of(name):
            columns = [*row.args, *(each.value for each in row.keywords)]
            assert all(isinstance(each, ast.Constant | ast.Name | ast.Attribute | ast.Tuple) for each in columns), (
                ast.unparse(row)
            )
            assert {each.arg for each in row.keywords} <= set(fields)
    printed = {ast.literal_eval(row.args[2]) for row in rows_of("GEMMS")}
    registered = {entry for device in DEVICES for entry in table.entries(GEMM, device)}
    assert printed == {entry.name for entry in registered} and len(rows_of("GEMMS")) == len(registered)
    kernels = {(ast.literal_eval(row.args[0]), ast.unparse(row.args[1]).split(".")[1]) for row in rows_of("KERNELS")}
    entries = [(name, entry) for name in registry._ON.keys() - {GEMM} for entry in table.entries(name, "sm_90")]
    assert kernels == {(name, entry.run.__name__) for name, entry in entries if entry.name != "reference"}


# --- a user's GEMM


class Int6OnKernels(Int6):
    """The format Int6 with a `gemm_kind`, for which tests register GEMMs."""

    gemm_kind = "int6"


def int6_gemm(
    a: Sequence[Tensor], b: Sequence[Tensor], out_dtype: Any, bias: Any, accumulate: Any, options: Any
) -> Tensor:
    y = (a[0].int() @ b[0].int().t()) * a[1] * b[1].t()
    y = y if bias is None else y + bias
    return y.to(out_dtype) if accumulate is None else accumulate.add_(y)


INT6 = GemmEntry(name="int6 mm", run=int6_gemm, formats=(("int6", "int6"),), devices=("cpu", "sm_90"))


def test_a_users_gemm_runs_for_its_format_and_stands_in_the_plan():
    quantizer = Int6Scaling(Int6OnKernels())
    a, b = (quantizer.cast(x, quantizer.observe(x)) for x in (torch.randn(8, 64), torch.randn(16, 64)))
    decoded, bias, into = Gemm("fprop", b, torch.float32)(a), torch.randn(16), torch.ones(8, 16)
    roles = ("linear_input", "linear_weight", "linear_grad_output")
    recipe = dlp.CustomRecipe(lambda role: quantizer if role in roles else None)
    with registered(INT6):
        found = support(a.format, b.format, "cpu")
        assert (found.status, found.kernel) == ("own", "int6 mm")
        assert kernel_name(a.format, b.format, "sm_100") == "decode + fp32 mm", "where it does not run"
        product = Gemm("fprop", b, torch.float32)(a)
        assert_bit_equal(product, int6_gemm(a.parts, b.parts, torch.float32, None, None, None))
        assert relative_error(product, decoded) < 1e-6 and not torch.equal(product, decoded)
        assert torch.equal(Gemm("fprop", b, torch.float32, bias=bias)(a), product + bias)
        assert Gemm("fprop", b, torch.float32, accumulate=into)(a) is into and torch.equal(into, 1 + product)
        group = {"name": "all", "match": ["*"], "recipe": recipe}
        assert "int6 mm" in str(dlp.make_plan(nn.Sequential(nn.Linear(64, 64)), [group], tp=1))
    assert_bit_equal(Gemm("fprop", b, torch.float32)(a), decoded, "it is gone")


def test_a_users_gemm_goes_before_those_of_the_package_as_far_as_it_takes_a_problem():
    ran = []

    def mine(a: Sequence[Tensor], b: Sequence[Tensor], *_: Any) -> Tensor:
        ran.append(len(a[0]))
        return torch.zeros(len(a[0]), len(b[0]))

    entry = GemmEntry(
        name="mine", run=mine, formats=(("hp", "hp"),), devices=("cpu",), takes=lambda a, *_: len(a[0]) > 8, when="tall"
    )
    left, right = load("bf16").operands("fprop")
    b = quantize(right, matrix(1, 16, 32))
    with registered(entry):
        for tokens in (8, 9):
            Gemm("fprop", b, torch.float32)(quantize(left, matrix(0, tokens, 32)))
        assert kernel_name(left.format, right.format, "cpu") == "torch mm, tall: mine"
    assert ran == [9]


def test_a_gemm_may_be_prepared_for_its_layouts():
    asked = []

    def prepare(a: Any, b: Any) -> Any:
        asked.append((a.gemm_kind, a.block, b.bf16_exact))
        return int6_gemm

    entry = GemmEntry(name="prepared", prepare=prepare, formats=INT6.formats)
    quantizer = Int6Scaling(Int6OnKernels())
    q = quantizer.cast(torch.randn(16, 64), torch.ones(16, 1))
    with registered(entry):
        for _ in range(3):
            Gemm("fprop", q, torch.float32)(q)
    assert asked == [("int6", (1, 0), False)], "once for a pair and device"


# --- a user's cast


@operation
def cast_to_int6(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Cast x [rows, cols] with the amaxes of its rows [rows, 1] -> codes int8 [rows, cols], scale_inv fp32 [rows, 1]."""
    scale_inv = (amax / 31).clamp(min=1e-30)
    return (x / scale_inv).round().to(torch.int8), scale_inv


@dataclass(frozen=True)
class Int6OnTable(Int6Scaling):
    caps: ClassVar[QuantizerCaps] = QuantizerCaps(op="cast_to_int6")

    def cast(self, x: Tensor, amax: Tensor | None, *, out: Any = None) -> Any:
        return self.format.fill(out, *cast_to_int6(x, amax))


def test_a_users_cast_runs_where_it_takes_the_matrix_and_stands_in_the_plan(monkeypatch: pytest.MonkeyPatch):
    ran = []

    def fast(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        ran.append(tuple(x.shape))
        return cast_to_int6.__wrapped__(x, amax)

    entry = KernelEntry(
        operation="cast_to_int6", name="int6 cast", run=fast, devices=("cpu", "sm_90"), reads=(torch.bfloat16,),
        takes=lambda x, amax: x.shape[1] % 32 == 0,
    )  # fmt: skip
    quantizer = Int6OnTable()
    recipe = dlp.CustomRecipe(lambda role: quantizer, name="int6").for_layer("any")
    plain = dlp.Linear(64, 64, recipe=dlp.CustomRecipe(lambda role: Int6Scaling()), dtype=torch.bfloat16)
    linear = dlp.Linear(64, 64, recipe=dlp.CustomRecipe(lambda role: quantizer), dtype=torch.bfloat16)
    linear.load_state_dict(plain.state_dict())
    monkeypatch.setattr("dlp.kernels.loader.missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with registered(entry):
        for shape, dtype in (((8, 64), torch.bfloat16), ((8, 60), torch.bfloat16), ((8, 64), torch.float32)):
            quantizer.cast(torch.ones(shape, dtype=dtype), torch.ones(8, 1))
        assert ran == [(8, 64)]
        assert rows.support_note(recipe, "cuda").endswith("; casts by int6 cast")
        x = torch.randn(32, 64).bfloat16()
        assert_bit_equal(linear(x), plain(x))
    assert ran[1:] and rows.support_note(recipe, "cuda").endswith("; casts by reference")


def test_a_users_kernel_for_a_cast_of_the_package_goes_first():
    ran = []

    def mine(x: Tensor, dtype: torch.dtype, source: Fp8Scale, *, out: Any = None, flag: Any = None) -> Any:
        ran.append(x)
        return stock.run(x, dtype, source, out=out, flag=flag)

    stock, x = table.choose("cast_fp8_tensor", torch.ones(1)), matrix(2, 32, 64)
    source = Fp8Scale(amax=ops.amax(x))
    expected = ops.cast_fp8_tensor(x, E4M3, source)
    with registered(KernelEntry(operation="cast_fp8_tensor", name="mine", run=mine)):
        assert_bit_equal(ops.cast_fp8_tensor(x, E4M3, source)[0], expected[0])
        assert table.cast_kernel("cast_fp8_tensor", "cpu") == "mine"
        with refuses("cast_fp8_tensor by mine has no batched launch for .* cast matrix by matrix"):
            ops.cast_fp8_tensor_batch([x], [(None, None)], [source], [None])
    assert len(ran) == 1 and stock.name == "reference"


# --- captured launches


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("says_so", [False, True])
def test_a_kernel_that_launches_by_itself_is_not_captured(says_so: bool):
    """A layer whose kernel launches by itself is not captured: dlp records only launches by its own functions, so a
    replay would omit others."""
    x, ran = torch.ones(4, 4).bfloat16(), []

    def mine(x: Tensor, dim: Any = None) -> Tensor:
        ran.append(x)
        return torch.empty(())

    with registered(KernelEntry(operation="amax", name="mine", run=mine, captured=says_so)):
        ops.amax(x)
        if says_so:
            captured.record(lambda: [ops.amax(x)], [x], [])
        else:
            with pytest.raises(NotPlain, match="runs mine, which is not captured"):
                captured.record(lambda: [ops.amax(x)], [x], [])
    assert len(ran) == 1 + says_so


@pytest.mark.usefixtures("emulated")
def test_a_layer_with_such_a_gemm_runs_it_every_time():
    ran = []

    def mine(a: Sequence[Tensor], b: Sequence[Tensor], out_dtype: Any, *_: Any) -> Tensor:
        ran.append(1)
        return (a[0].float() @ b[0].float().t()).to(out_dtype)

    linear = dlp.Linear(64, 64, recipe="bf16", dtype=torch.bfloat16)
    with registered(GemmEntry(name="mine", run=mine, formats=(("hp", "hp"),))), torch.no_grad():
        for _ in range(5):
            linear(torch.ones(8, 64).bfloat16())
    assert len(ran) == 5


# --- refusals


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            KernelEntry(operation="amax", name="x", run=abs, devices=("sm_80",)),
            "there is no device 'sm_80'; choose from cpu",
        ),
        (
            KernelEntry(operation="amax", name="a, b", run=abs),
            "plans join names by commas; choose a name without a comma",
        ),
        (KernelEntry(operation="amax", name="kernel", run=abs), "amax has a kernel 'kernel' on sm_100, sm_90 already"),
        (GemmEntry(name="torch mm", run=abs, formats=(("hp", "hp"),)), "gemm has a kernel 'torch mm' on cpu already"),
    ],
    ids=["device", "comma", "twice", "gemm twice"],
)
def test_entries_that_cannot_be_told_apart_are_refused(entry: KernelEntry, message: str):
    with pytest.raises(ValueError, match=message):
        table.register(entry)


def test_the_example_of_the_table_registers_a_kernel():
    (example,) = (line.strip() for line in (table.__doc__ or "").splitlines() if line.startswith("    register("))
    with table.registered(eval(example.removeprefix("register"), {"GemmEntry": GemmEntry, "int6_gemm": abs})):
        assert table.entries(GEMM, "cpu")[0].name == "int6 mm"


def test_a_pair_that_nothing_multiplies_says_how_to_help(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(registry._ON[GEMM], "cpu", ())
    fmt = Int6OnKernels()
    with pytest.raises(ValueError, match="no kernel multiplies int6 by int6 on cpu: register a kernel"):
        support(fmt, fmt, "cpu")


def test_an_operation_has_one_reference():
    def amax(x: Tensor) -> Tensor:
        return x

    with pytest.raises(ValueError, match="amax has a kernel 'reference' on cpu, cuda, sm_100, sm_90 already"):
        operation(amax)
