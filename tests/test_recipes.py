"""Recipes: options, checks, a recipe in a user's file, CustomRecipe, user-defined formats, and the table of supported
GEMMs.

No ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlp
from dlp.quant import __main__ as support_table
from dlp.quant.custom import ROLES, CustomRecipe
from dlp.quant.fp8 import CurrentScaling, DelayedScaling
from dlp.quant.fp8_block import BlockScaling
from dlp.quant.gemm import DEVICES, Gemm, GemmOptions, kernel_name, support
from dlp.quant.integers import IntScaling
from dlp.quant.mxfp8 import MxScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from dlp.quant.quantizer import KeepHighPrecision, Quantizer, caps_of
from dlp.quant.recipe import GEMMS, OPERANDS, Operand, Recipe, as_recipe, both, load, names, source
from dlp.quant.tensor import Format, Part, QuantizedTensor, Shape
from tests.command import command
from tests.metrics import relative_error

STOCK = ["bf16", "fp8_block", "fp8_current", "fp8_delayed", "fp8_rowwise", "int8", "mxfp8", "nvfp4", "qat"]


@pytest.mark.parametrize("name", STOCK)
def test_every_recipe_runs_on_no_tokens(name):
    layer = dlp.Linear(64, 32, recipe=name)
    x = torch.zeros(0, 64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 32) and x.grad is not None and x.grad.shape == (0, 64)
    assert not layer.weight.grad.any()


def test_every_recipe_loads_by_name_and_is_a_value():
    assert names() == STOCK
    for name in names():
        recipe = load(name)
        assert str(recipe) == recipe.name == name
        assert recipe == load(name) and hash(recipe) == hash(load(name))
        assert recipe.for_layer("layers.0.mlp") is recipe


ELEMENTS = {
    ("fp8_current", "HYBRID"): "e5m2", ("fp8_current", "E4M3"): "e4m3", ("fp8_delayed", "HYBRID"): "e5m2",
    ("fp8_rowwise", "HYBRID"): "e5m2", ("fp8_block", "HYBRID"): "e5m2", ("mxfp8", "HYBRID"): "e5m2",
    ("mxfp8", "E4M3"): "e4m3", ("fp8_block", "E4M3"): "e4m3",
}  # fmt: skip


@pytest.mark.parametrize("name, fp8_format", ELEMENTS)
def test_fp8_format_sets_the_elements(name: str, fp8_format: str):
    recipe = load(name, fp8_format=fp8_format)
    assert recipe.x.rowwise.format.element == recipe.w.columnwise.format.element == "e4m3"
    assert recipe.dy.rowwise.format.element == recipe.dy.columnwise.format.element == ELEMENTS[name, fp8_format]


def test_defaults_are_those_of_the_papers():
    assert load("fp8_current").dy.rowwise == CurrentScaling("e5m2") and load("fp8_current").fprop.fast_accumulation
    assert not load("fp8_current").dgrad.fast_accumulation and not load("fp8_current").wgrad.fast_accumulation
    assert load("fp8_delayed").x.rowwise == DelayedScaling("e4m3", 0, 1024, "max") and load("fp8_delayed").reduce_amax
    assert load("fp8_block").x == both(BlockScaling()) and load("fp8_block").w == both(BlockScaling(tile=True))
    assert load("mxfp8").w == both(MxScaling()) and load("mxfp8").dy == both(MxScaling())
    nvfp4 = load("nvfp4")
    assert nvfp4.x == Operand(Nvfp4Scaling(), Nvfp4Scaling(rht=True))
    assert nvfp4.w == both(Nvfp4Scaling(tile=True))
    assert nvfp4.dy == Operand(Nvfp4Scaling(stochastic=True), Nvfp4Scaling(rht=True, stochastic=True))
    assert load("int8").x == load("int8").w == load("int8").dy == both(IntScaling(8, narrow=True))


def test_which_columnwise_operands_are_derived():
    derived = {name: [operand for operand in OPERANDS if getattr(load(name), operand).derived] for name in names()}
    everything = ["x", "w", "dy"]
    assert derived == {
        "bf16": everything, "fp8_current": everything, "fp8_delayed": everything, "fp8_rowwise": [], "mxfp8": [],
        "fp8_block": ["w"], "nvfp4": ["w"], "int8": [], "qat": everything,
    }  # fmt: skip
    assert load("mxfp8", enable_2d_quantization=True).w.derived
    assert not load("nvfp4", disable_2d_quantization=True).w.derived
    assert not load("fp8_current", high_precision=["dgrad"]).w.derived


def test_what_quantizers_say_they_need():
    assert caps_of(load("nvfp4").dy.rowwise).origin and not caps_of(load("nvfp4").x.rowwise).origin
    assert not caps_of(load("nvfp4", disable_stochastic_rounding=True).dy.columnwise).origin
    options = caps_of(load("fp8_delayed", margin=2, amax_history_len=4).dy.rowwise).slot
    assert options is not None and (options.fp8_max, options.margin, options.amax_history_len) == (57344.0, 2, 4)
    assert not any(caps_of(load(name).x.rowwise).slot for name in names() if name != "fp8_delayed")


def test_shared_options_apply_to_every_recipe():
    for name in names():
        recipe = load(
            name, accumulation={"fprop": "split", "dgrad": "fast"}, out_dtype={"wgrad": "fp32"},
            high_precision=["wgrad"], amax_scope="all", wire={"dgrad": "fp8"},
        )  # fmt: skip
        assert recipe.fprop == GemmOptions() and recipe.dgrad == GemmOptions(fast_accumulation=True, wire="fp8")
        assert recipe.wgrad == GemmOptions(out_dtype=torch.float32)
        assert recipe.amax_scope == "all"
        assert recipe.operands("wgrad") == (KeepHighPrecision(), KeepHighPrecision())
        assert recipe.operands("fprop") == load(name).operands("fprop")
    assert str(load("mxfp8", high_precision=["dgrad"])) == "mxfp8(high_precision=('dgrad',))"
    assert str(load("fp8_current", power_of_two=False)) == "fp8_current", "a default is not worth a word"
    assert hash(load("bf16", accumulation={"fprop": "fast"})) is not None


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("fp8_curent", {}, "unknown recipe 'fp8_curent': .* did you mean 'fp8_current'"),
        ("fp8", {}, "did you mean 'fp8_block' or 'fp8_current' or 'fp8_delayed' or 'fp8_rowwise'\\?$"),
        ("x" * 5000, {}, "^unknown recipe 'x{59}: the recipes are bf16, [a-z0-9_, ]*$"),
        ("mxfp8", {"margin": 1}, "recipe mxfp8 has no option 'margin'; the options are fp8_format, .*amax_scope"),
        ("mxfp8", {"scale_rounding": "up"}, "recipe mxfp8: scale_rounding must be one of ceil, floor; got 'up'"),
        ("fp8_current", {"power_of_two": 1}, "power_of_two must be true or false; got 1"),
        ("fp8_current", {"epsilon": "0"}, "epsilon must be a number; got '0'"),
        ("fp8_delayed", {"margin": 0.5}, "margin must be an integer; got 0.5"),
        ("fp8_delayed", {"amax_history_len": 0}, "amax_history_len must be at least 1"),
        ("fp8_delayed", {"amax_compute_algo": "mean"}, "must be one of max, most_recent or a function; got 'mean'"),
        ("fp8_current", {"fp8_format": "E5M2"}, "fp8_format must be one of HYBRID, E4M3; got 'E5M2'"),
        ("fp8_block", {"x_block_dim": 3}, "x_block_dim must be one of 1, 2; got 3"),
        ("fp8_block", {"x_block_dim": 2}, "fprop: no unit multiplies 128x128 tiles by 128x128 tiles"),
        ("fp8_block", {"dy_block_dim": 2}, "dgrad: no unit multiplies"),
        ("bf16", {"high_precision": "dgrad"}, "high_precision must be a list, each one of fprop, dgrad, wgrad; got"),
        ("bf16", {"out_dtype": {"fprop": "fp8"}}, "out_dtype must be a table whose keys are one of fprop"),
        ("bf16", {"amax_scope": "tp"}, "amax_scope must be one of table, all; got 'tp'"),
        ("bf16", {"wire": {"wgrad": "fp8"}}, "wire must be a table whose keys are one of fprop, dgrad and"),
        ("bf16", {"wire": {"dgrad": "fp4"}}, "whose values are one of hp, bf16, fp8; got"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(name: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load(name, **options)


@pytest.mark.parametrize(
    "operand, quantizers, message",
    [
        (
            "x",
            Operand(Nvfp4Scaling(), Nvfp4Scaling()),
            "wgrad: the operands have different transforms along the contraction",
        ),
        ("dy", both(KeepHighPrecision()), "wgrad: the operands have different transforms"),
        ("w", both(Nvfp4Scaling(rht=True)), "fprop: the operands have different transforms"),
    ],
)
def test_the_transform_must_be_on_both_sides(operand: str, quantizers: Operand, message: str):
    with pytest.raises(ValueError, match=message):
        replace(load("nvfp4"), **{operand: quantizers})


def test_e5m2_meets_no_e5m2():
    with pytest.raises(ValueError, match="wgrad: no unit multiplies E5M2 by E5M2"):
        e5m2 = CurrentScaling("e5m2")
        Recipe("mine", Operand(CurrentScaling(), e5m2), both(CurrentScaling()), both(e5m2))


# --- a recipe in one file

FILE = '''"""mine: MXFP8 in forward only."""

from dlp.quant.mxfp8 import MxScaling
from dlp.quant.quantizer import KeepHighPrecision
from dlp.quant.recipe import Operand, Recipe, both


def recipe(*, element: str = "e4m3") -> Recipe:
    """element: of x and w."""
    forward = Operand(MxScaling(element), KeepHighPrecision())
    return Recipe("mine", forward, forward, both(KeepHighPrecision()))
'''


def test_a_recipe_is_one_file(tmp_path: Path):
    (tmp_path / "mine.py").write_text(FILE)
    assert names(tmp_path) == sorted([*STOCK, "mine"]) and names() == STOCK
    recipe = load("mine", recipes_path=tmp_path, element="e4m3", amax_scope="all")
    assert recipe.x.rowwise == MxScaling() and recipe.amax_scope == "all"
    assert load("mine", recipes_path=tmp_path) == load("mine", recipes_path=str(tmp_path))
    assert load("mxfp8", recipes_path=tmp_path) == load("mxfp8")
    paths = [source({"name": name, "recipes_path": tmp_path}) for name in ("mine", "mxfp8")]
    assert paths == [tmp_path.resolve() / "mine.py", None], "mxfp8 is imported from no file of the user"
    with pytest.raises(ValueError, match="unknown recipe 'mine'"):
        load("mine")
    with pytest.raises(ValueError, match="recipe mine has no option 'block'; the options are element, accumulation"):
        load("mine", recipes_path=tmp_path, block=32)
    with pytest.raises(ValueError, match="nowhere' is not a folder"):
        names(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="^recipes_path must be the path of a folder; got 3$"):
        as_recipe({"name": "mine", "recipes_path": 3})
    for value in (None, 5, ["nvfp4"]):
        with pytest.raises(ValueError, match=r'a recipe must be a name, a dict {"name": .*} or a recipe; got '):
            as_recipe(value)
    assert "mine         fprop emulated (reference), dgrad native (torch mm)" in support_table.table(tmp_path)


def test_a_recipe_file_defines_dataclasses_with_postponed_annotations(tmp_path: Path):
    """The standard library looks up the module of a class in sys.modules: dataclasses for annotations that are strings, and
    pickle for the class. Two folders may have files with one name."""
    for folder, levels in (("one", 31), ("two", 15)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "levels.py").write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "from dlp.quant.mxfp8 import MxScaling\nfrom dlp.quant.recipe import Recipe, both\n"
            f"@dataclass(frozen=True)\nclass Mine(MxScaling):\n    levels: int = {levels}\n"
            "def recipe() -> Recipe:\n    return Recipe('levels', both(Mine()), both(Mine()), both(Mine()))\n"
        )
    one, two = (load("levels", recipes_path=tmp_path / folder) for folder in ("one", "two"))
    assert (one.x.rowwise.levels, two.x.rowwise.levels) == (31, 15)
    assert pickle.loads(pickle.dumps(one)) == one != two


def test_a_recipe_cannot_take_a_name_that_exists(tmp_path: Path):
    (tmp_path / "mxfp8.py").write_text(FILE)
    with pytest.raises(ValueError, match="recipe 'mxfp8' exists already; rename the file"):
        load("mxfp8", recipes_path=tmp_path)


# --- the support table


def test_the_support_table_has_every_recipe_and_device():
    lines = support_table.table().splitlines()
    assert lines[0].split() == ["recipe", *DEVICES]
    assert [line.split()[0] for line in lines[1:]] == STOCK
    cells = {line.split()[0]: line for line in lines[1:]}
    assert cells["fp8_current"].split()[1::2][:1] == ["emulated"]
    assert "native (cublaslt fp8 rowwise)" in cells["fp8_rowwise"] and "emulated (decode + bf16 mm)" in cells["nvfp4"]
    assert cells["bf16"].count("native") == len(DEVICES)


def test_the_table_is_a_command():
    code, printed, _ = command("dlp.quant")
    assert code == 0 and printed.strip() == support_table.table()


def test_kernel_names_say_what_runs():
    fp8, mx, hp = CurrentScaling().format, MxScaling().format, KeepHighPrecision().format
    assert kernel_name(fp8, fp8, "cpu") == "reference" and kernel_name(hp, hp, "cpu") == "torch mm"
    assert kernel_name(fp8, fp8, "sm_90") == kernel_name(fp8, fp8, "sm_100") == "cublaslt fp8 tn"
    assert kernel_name(fp8, fp8, "cuda") == "torch._scaled_mm" or torch.cuda.is_available()
    assert kernel_name(hp, fp8, "cpu") == "decode one + mm"
    assert kernel_name(mx, fp8, "sm_100") == "decode + bf16 mm"


# --- CustomRecipe


def test_a_custom_recipe_asks_once_per_role():
    asked: list[str] = []

    def qfactory(role: str) -> Quantizer | None:
        asked.append(role)
        return {"linear_input": CurrentScaling(), "linear_weight": CurrentScaling(), "linear_output": MxScaling()}.get(
            role
        )

    custom = CustomRecipe(qfactory, name="mine", fprop=GemmOptions(fast_accumulation=True), amax_scope="all")
    recipe = custom.for_layer("layers.3.mlp.up")
    assert asked == list(ROLES) and str(custom) == "mine(qfactory)"
    assert recipe.x == recipe.w == both(CurrentScaling()) and recipe.dy == both(KeepHighPrecision())
    assert recipe.y == MxScaling() and recipe.dx is None
    assert recipe.fprop.fast_accumulation and recipe.amax_scope == "all" and recipe.name == "mine"


def test_an_operand_of_a_custom_recipe_may_leave_an_orientation_in_high_precision():
    recipe = CustomRecipe(lambda role: Operand(CurrentScaling(), None) if role in ROLES[:2] else None).for_layer("any")
    assert recipe.w == Operand(CurrentScaling(), KeepHighPrecision())
    with pytest.raises(
        ValueError, match="returned an Operand for linear_output in 'any', which is cast in one orientation"
    ):
        CustomRecipe(lambda role: both(CurrentScaling())).for_layer("any")


@pytest.mark.parametrize("name", ["amax_scope", "gather_dy"])
def test_a_mistaken_field_of_a_recipe_is_refused(name: str):
    with pytest.raises(ValueError, match=f"recipe bf16: {name} must be one of .*; got 'al'"):
        replace(load("bf16"), **{name: "al"})
    if name == "amax_scope":
        with pytest.raises(ValueError, match="recipe custom: amax_scope must be one of table, all; got 'al'"):
            CustomRecipe(lambda role: None, amax_scope="al").for_layer("any")


def test_a_recipe_file_returns_a_recipe_and_may_leave_annotations_out(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from dlp import CustomRecipe\nfrom dlp.quant.fp8 import CurrentScaling\n"
        "def recipe(element='e4m3', custom=False):\n"
        "    made = CustomRecipe(lambda role: CurrentScaling(element) if role == 'linear_input' else None)\n"
        "    return made if custom else made.for_layer('mine')\n"
    )
    assert load("mine", recipes_path=tmp_path, element="e5m2").x == both(CurrentScaling("e5m2"))
    with pytest.raises(ValueError, match="must return a Recipe; got CustomRecipe: call custom.for_layer"):
        load("mine", recipes_path=tmp_path, custom=True)


def by_layer(role: str, name: str) -> Quantizer | None:
    return MxScaling() if name.startswith("layers.0.") else None


def by_optional_layer(role: str, layer: str = "") -> Quantizer | None:
    return by_layer(role, layer)


@pytest.mark.parametrize("qfactory", [by_layer, by_optional_layer])
def test_a_custom_recipe_may_choose_by_layer(qfactory: Callable[..., Quantizer | None]):
    custom = CustomRecipe(qfactory)
    assert custom.for_layer("layers.0.mlp").x == both(MxScaling())
    assert custom.for_layer("layers.1.mlp").x == both(KeepHighPrecision())


def test_a_default_that_is_no_layer_is_left_alone():
    custom = CustomRecipe(lambda role, chosen=MxScaling(): chosen)  # noqa: B008
    assert custom.for_layer("layers.0.mlp").x == both(MxScaling())


@pytest.mark.parametrize("answer", ["mxfp8", MxScaling, Operand(MxScaling(), "mxfp8")])  # type: ignore[arg-type]
def test_an_answer_that_is_no_quantizer_is_refused(answer: Any):
    with pytest.raises(ValueError, match="qfactory returned .* for linear_input in 'layers.7'; return a quantizer"):
        CustomRecipe(lambda role: answer).for_layer("layers.7")


def test_current_scaling_forward_and_mxfp8_backward():
    """A custom recipe from the quantizers of two recipes of dlp: each GEMM uses the kernel for its pair of formats."""
    current, mx = CurrentScaling(), MxScaling()
    answers = {
        "linear_input": Operand(current, mx), "linear_weight": Operand(current, mx), "linear_grad_output": mx,
    }  # fmt: skip
    recipe = CustomRecipe(answers.get).for_layer("any")
    kernels = [support(a.format, b.format, "sm_90").kernel for a, b in map(recipe.operands, GEMMS)]
    assert kernels == ["cublaslt fp8 tn", "decode + bf16 mm", "decode + bf16 mm"]
    assert not any(getattr(recipe, operand).derived for operand in ("x", "w", "dy"))


def test_a_custom_recipe_whose_operands_do_not_fit_names_the_gemm():
    answers = {"linear_input": Nvfp4Scaling(), "linear_grad_output": Operand(Nvfp4Scaling(), Nvfp4Scaling(rht=True))}
    with pytest.raises(ValueError, match="wgrad: the operands have different transforms"):
        CustomRecipe(answers.get).for_layer("any")


# --- a user's format


@dataclass(frozen=True)
class Int6(Format):
    """Integers -31..31 with one fp32 scale per row. It does not declare how shards of its parts concatenate."""

    name = "int6"
    parts = (Part("codes", torch.int8), Part("scale_inv", torch.float32))
    block = (1, 0)

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        return shape, (shape[0], 1)

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        return (q.parts[0] * q.parts[1]).to(dtype)


class Int6WithGemm(Int6):
    """Int6 with a GEMM that multiplies the integer codes."""

    name = "int6 own"

    def gemm(
        self, which: str, a: QuantizedTensor, b: QuantizedTensor, *, out_dtype: torch.dtype, bias: Tensor | None = None,
        accumulate: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert which in GEMMS and accumulate is None
        y = (a.parts[0].int() @ b.parts[0].int().t()) * a.parts[1] * b.parts[1].t()
        return (y if bias is None else y + bias).to(out_dtype)


@dataclass(frozen=True)
class Int6Scaling:
    format: Format = Int6()
    reduces: tuple[int, ...] = (1,)

    def observe(self, x: Tensor) -> Tensor | None:
        return x.float().abs().amax(1, keepdim=True)

    def cast(self, x: Tensor, amax: Tensor | None, *, out: QuantizedTensor | None = None) -> QuantizedTensor:
        assert amax is not None
        scale_inv = (amax / 31).clamp(min=1e-30)
        return self.format.fill(out, (x / scale_inv).round().to(torch.int8), scale_inv)


@pytest.mark.parametrize("fmt", [Int6(), Int6WithGemm()], ids=lambda fmt: fmt.name)
def test_a_users_format_decodes_or_brings_its_own_gemm(fmt: Format):
    quantizer = Int6Scaling(fmt)
    assert isinstance(quantizer, Quantizer) and not fmt.concatenates(0, 128)
    x, w = torch.randn(8, 64), torch.randn(16, 64)
    a, b = (quantizer.cast(t, quantizer.observe(t)) for t in (x, w))
    expected = a.dequantize() @ b.dequantize().t()
    assert relative_error(Gemm("fprop", b, torch.float32)(a), expected) < 1e-6
    bias = torch.randn(16)
    assert relative_error(Gemm("fprop", b, torch.float32, bias=bias)(a), expected + bias) < 1e-6
    own = fmt.name == "int6 own"
    assert support(fmt, fmt, "cpu").status == ("own" if own else "emulated")
    assert kernel_name(fmt, fmt, "cpu") == ("Int6WithGemm.gemm" if own else "decode + fp32 mm")
    high = KeepHighPrecision().format
    assert kernel_name(fmt, high, "cpu") == kernel_name(high, fmt, "cpu") == "decode + fp32 mm"


def test_a_users_gemm_is_given_the_options_it_takes():
    seen = []

    class WithOptions(Int6WithGemm):
        def gemm(self, *args: Any, options: GemmOptions, **finish: Any) -> Tensor:
            seen.append(options)
            return super().gemm(*args, **finish)

    class WithAll(Int6WithGemm):
        def gemm(self, *args: Any, **finish: Any) -> Tensor:
            seen.append(finish.pop("options"))
            return super().gemm(*args, **finish)

    x, options = torch.randn(8, 64), GemmOptions(fast_accumulation=True)
    for fmt in (WithOptions(), WithAll()):
        quantizer = Int6Scaling(fmt)
        a = quantizer.cast(x, quantizer.observe(x))
        assert Gemm("fprop", a, torch.float32, options=options)(a).shape == (8, 8)
    assert seen == [options, options]


def test_a_format_that_lacks_something_says_what():
    @dataclass(frozen=True)
    class Empty(Format):
        pass

    for attribute in ("name", "parts", "block"):
        with pytest.raises(NotImplementedError, match=f"Empty must define {attribute}"):
            getattr(Empty(), attribute)


def test_the_recipes_folder_is_listed_once(monkeypatch: pytest.MonkeyPatch):
    """The folder of recipes is listed once, and not for each of the thousands of layers of a model."""
    load("fp8_current")
    listed = []
    monkeypatch.setattr("dlp.quant.recipe.pkgutil.iter_modules", lambda path: listed.append(path) or [])
    for _ in range(3):
        load("fp8_current", power_of_two=True)
    assert not listed
