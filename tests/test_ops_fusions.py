"""Arguments that ops and fusions receive, and the equality of every fusion with the basic ops."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp import ops
from dlp.ops.fusions import REGISTERED
from dlp.quant.recipe import Operand
from tests.cases import RECIPES, nightly
from tests.emulated import emulation, recorded
from tests.metrics import assert_bit_equal, assert_close
from tests.ops_models import FFN, H, M, Watched, linear, run, values
from tests.refusals import refuses
from tests.restored_tables import restored_fusions

SHIPPED = [fusion.__name__ for fusion in REGISTERED.forward]  # no test has registered a fusion yet

# Arguments of ops and fusions


class Told(ops.BasicOperation):
    """Op that multiplies x by `factor` and stores the arguments of op_forward."""

    def op_forward(
        self, ctx: Any, input_: Tensor, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any,
        factor: float = 1.0,
    ) -> Tensor:  # fmt: skip
        self.quantizers = prev_op_grad_output_quantizer, next_op_input_quantizer
        self.needs, ctx.factor = (ctx.requires_grad, ctx.needs_dx), factor
        return factor * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        return ctx.factor * grad_output, ()


def test_an_op_is_told_who_casts_what_it_returns():
    """The op gets the quantizers of dy of the previous linear, also through a bias, and of x of the next linear."""
    before, behind = ops.Linear(H, H, recipe="fp8_current"), ops.Linear(H, H, recipe="fp8_block")
    told = [Told() for _ in range(3)]
    ops.Sequential(told[0], before, told[1], ops.Identity(), behind, told[2])(values(0, M, H))
    recipes = [linear.core.spec.recipe for linear in (before, behind)]

    def quantizers(op: Told) -> tuple[Any, Any]:
        return tuple(given and Operand(given.rowwise, given.columnwise) for given in op.quantizers)

    assert [quantizers(op) for op in told] == [
        (None, recipes[0].x), (recipes[0].dy, None), (recipes[1].dy, None),
    ]  # fmt: skip  # before an Identity, the op gets no quantizer of the next linear
    ops.Sequential(before, told[1], behind)(values(0, M, H))
    assert quantizers(told[1]) == (recipes[0].dy, recipes[1].x)


def test_an_op_is_told_whether_there_is_a_backward():
    first, second = Told(), Told()
    model, x = ops.Sequential(first, ops.Linear(H, H), second), values(0, M, H)
    model(x)
    assert (first.needs, second.needs) == ((False, False), (True, True))
    model(x.requires_grad_())
    assert (first.needs, second.needs) == ((True, True), (True, True))
    with torch.no_grad():
        model(x)
    assert (first.needs, second.needs) == ((False, False), (False, False))


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
def test_keywords_reach_their_ops(watched: bool):
    x, told = values(0, M, H).requires_grad_(), Told()
    with Watched() if watched else nullcontext():
        y = told(x, factor=3.0)
        assert_bit_equal(y, 3 * x)
        both = ops.OperationFuser([ops.ConstantScale(0.5), told])
        assert_bit_equal(both(x, basic_op_kwargs=[{}, {"factor": 4.0}]), 2 * x)
        assert_bit_equal(both(x), 0.5 * x)
    y.sum().backward()
    assert_bit_equal(x.grad, torch.full_like(x, 3))


@restored_fusions()
def test_what_is_registered_first_stands_where_it_was_asked_to():
    """A user's fusion is registered before (`prepend`) or after all fusions of dlp."""
    assert "LinearIntoExtraInput" in SHIPPED and "ForwardLinearBias" in SHIPPED
    with restored_fusions():
        for name, prepend in (("last", False), ("first", True)):
            func = lambda found, *, recipe: found  # noqa: E731
            func.__name__ = name
            ops.register_forward_fusion(func, prepend)
        ops.Sequential(ops.GELU())(values(0, M, H))
        assert [fusion.__name__ for fusion in REGISTERED.forward] == ["first", *SHIPPED, "last"]


def test_a_fusion_is_told_the_recipe_of_the_first_linear():
    told = []
    ops.register_forward_fusion(lambda basic, *, recipe: [told.append(recipe), basic][1])
    ops.Sequential(ops.Identity(), linear("fp8_block"), linear("fp8_current"))(values(0, M, H))
    ops.Sequential(ops.Identity())(values(0, M, H))
    assert [recipe and str(recipe) for recipe in told] == ["fp8_block", None]


def test_extra_tensors_pass_groups_in_their_order():
    """Extra inputs and outputs are in the order of the ops, although a plain module and an op with hooks split the
    `ops.Sequential` into separately fused groups."""
    hooked = ops.AddExtraInput()
    hooked.register_forward_hook(lambda *args: None)
    model = ops.Sequential(
        ops.AddExtraInput(), ops.MakeExtraOutput(), nn.Tanh(), hooked, ops.MakeExtraOutput(), ops.ConstantScale(2.0)
    )
    x, a, b = (values(seed, M, H) for seed in range(3))
    y, first, second = model(x, a, b)
    assert_bit_equal(first, x + a)
    assert_bit_equal(second, (x + a).tanh() + b)
    assert_bit_equal(y, 2 * second)
    for given in ((a,), (a, b, b)):
        with refuses(f"the ops take 2 extra inputs; got {len(given)}: pass the extra inputs of all ops"):
            model(x, *given)


@pytest.mark.parametrize("behind", [[], [ops.GELU()], [ops.MakeExtraOutput()], [ops.Reshape((-1,)), ops.SiLU()]])
def test_an_extra_input_is_written_to_wherever_its_sum_goes(behind: list[nn.Module]):
    """With in_place=True the sum is written into the memory of the extra input, whichever ops follow. If backward needs
    the overwritten values, it raises an error."""
    x, leaf = values(0, M, H).requires_grad_(), values(1, M, H).requires_grad_()
    found = []
    for in_place in (True, False):
        extra = 2 * leaf
        outputs = ops.Sequential(ops.AddExtraInput(in_place=in_place), *behind)(x, extra)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert torch.equal(extra, x + 2 * leaf) == in_place
        found.append([*outputs, *torch.autograd.grad([y.square().sum() for y in outputs], (x, leaf))])
    for mine, its in zip(*found, strict=True):
        assert_close(mine, its, 1e-6)
    extra = leaf.exp()
    outputs = ops.Sequential(ops.AddExtraInput(in_place=True), *behind, ops.Identity())(x, extra)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()


# Every fusion compared with its basic ops


class Residual(nn.Module):
    """Ops with a residual connection, by MakeExtraOutput before and AddExtraInput after the ops. `factor` multiplies
    the output of the ops; if it is not 1, the ops and the residual get different gradient tensors."""

    def __init__(self, *inner: nn.Module, in_place: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.inner = ops.Sequential(ops.MakeExtraOutput(in_place=in_place), *inner)
        self.add = ops.Sequential(ops.Identity(), ops.AddExtraInput())

    def forward(self, x: Tensor) -> Tensor:
        y, residual = self.inner(1.0 * x)
        return self.add(y if self.factor == 1 else self.factor * y, residual)  # type: ignore[no-any-return]


class IntoInput(nn.Module):
    """Ops that end with AddExtraInput(in_place=True)."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = ops.Sequential(*inner, ops.AddExtraInput(in_place=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, 2.0 * x)  # type: ignore[no-any-return]


class Added(nn.Module):
    """Model that computes s = x + 2x and returns behind(RMSNorm(s)) + s. s is an extra output of the ops."""

    def __init__(self, *behind: nn.Module) -> None:
        super().__init__()
        self.inner = ops.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput(), ops.RMSNorm(H), *behind)

    def forward(self, x: Tensor) -> Tensor:
        y, total = self.inner(x, 2.0 * x)
        return y + total  # type: ignore[no-any-return]


# description in the plan -> (function that makes the model for a recipe, error bound; 0 requires equal bits)
FUSED: dict[str, tuple[Any, float]] = {
    "ForwardLinearBias[Linear, Bias]": (lambda r: ops.Sequential(ops.RMSNorm(H), linear(r)), 4e-3),
    "LinearIntoExtraInput[Linear, Bias, AddExtraInput]": (lambda r: IntoInput(linear(r)), 8e-3),
    "LinearIntoExtraInput[Linear, ConstantScale, AddExtraInput]":
        (lambda r: IntoInput(linear(r, bias=False), ops.ConstantScale(0.5)), 8e-3),
    "BackwardLinearIntoResidual[MakeExtraOutput, Linear]": (lambda r: Residual(linear(r), in_place=True), 8e-3),
    "backward BackwardLinearIntoResidual[MakeExtraOutput, Linear]":  # the GEMM adds the gradient, if no other op reads it
        (lambda r: Residual(linear(r), in_place=True, factor=2.0), 8e-3),
    "BackwardScaledLinear[Linear, ConstantScale]":
        (lambda r: ops.Sequential(linear(r, bias=False), ops.ConstantScale(0.5)), 0.0),
    "ForwardAddNorm[AddExtraInput, MakeExtraOutput, RMSNorm]": (lambda r: Added(linear(r, bias=False)), 0.0),
    "BackwardNormResidual[MakeExtraOutput, RMSNorm]": (lambda r: Residual(ops.RMSNorm(H), linear(r, bias=False)), 0.0),
} | {  # the Identity prevents a fusion in forward, so that forward rounds equally
    f"BackwardBiasActivation[Bias, {act.__name__}]":
        (lambda r, act=act: ops.Sequential(linear(r, bias=False), ops.Identity(), ops.Bias(H), act()), 0.0)
    for act in (ops.GELU, ops.ReLU, ops.SiLU, ops.SReLU)
}  # fmt: skip


ALL, NONE = "weight bias", ""
SOME = [(recipe, learns) for recipe in ("fp8_current", "fp8_block") for learns in (NONE, "weight", "bias")]


@pytest.mark.parametrize(("recipe", "learns"), [(recipe, ALL) for recipe in RECIPES] + SOME)
@pytest.mark.parametrize("said", FUSED)
def test_a_fusion_equals_its_basic_ops(said: str, recipe: str, learns: str):
    make, bound = FUSED[said]
    torch.manual_seed(0)
    fused = make(recipe).bfloat16()
    for name, parameter in fused.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[2] in learns.split())
    basic = copy.deepcopy(fused)
    found = run(fused, dtype=torch.bfloat16)
    sequences = [module for module in fused.modules() if isinstance(module, ops.Sequential)]
    assert any(said in str(each.plan()) for each in sequences), [str(each.plan()) for each in sequences]
    with restored_fusions(none=True):
        expected = run(basic, dtype=torch.bfloat16)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if bound == 0.0:
            assert_bit_equal(found[name], tensor, name)
        else:
            assert_close(found[name], tensor, bound, name)


# Norms and activations before the cast of a linear

BEFORE_CASTS: dict[str, Any] = {
    "linear": lambda r: [ops.LayerNorm(H), linear(r)],
    "zero-centered": lambda r: [ops.LayerNorm(H, zero_centered_gamma=True), linear(r, bias=False)],
    "siblings": lambda r: [
        ops.LayerNorm(H), ops.Linear(H, (FFN, FFN), bias=False, recipe=r), ops.SwiGLU(), ops.Linear(FFN, H, recipe=r),
    ],
    "two norms": lambda r: [ops.LayerNorm(H), linear(r), ops.GELU(), ops.LayerNorm(H), linear(r)],
}  # fmt: skip


@pytest.mark.parametrize("tokens", [M, M + 16], ids=["whole blocks", "padded"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("program", BEFORE_CASTS)
@pytest.mark.parametrize("device", [nullcontext, emulation], ids=["reference", "emulated kernels"])
def test_a_layer_norm_in_a_sequence_has_the_bits_of_ops_one_by_one(device: Any, program: str, recipe: str, tokens: int):
    torch.manual_seed(0)
    sequence = ops.Sequential(*BEFORE_CASTS[program](recipe)).bfloat16()
    for parameter in sequence.parameters():
        nn.init.normal_(parameter, std=0.5)
    alone = nn.Sequential(*copy.deepcopy(sequence))
    with device():
        for step in range(2):  # the second step reads delayed scales
            found, expected = (run(each, tokens, H, seed=3 * step, dtype=torch.bfloat16) for each in (sequence, alone))
            for (name, tensor), other in zip(found.items(), expected.values(), strict=True):
                assert_bit_equal(tensor, other, name)
            dlp.end_step(sequence)
            dlp.end_step(alone)


TRACED = [("fp8_delayed", "linear"), ("nvfp4", "zero-centered")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "program"),
    [each if each in TRACED else nightly(*each) for each in itertools.product(RECIPES, BEFORE_CASTS)],
)
def test_a_traced_layer_norm_has_the_bits_of_ops_one_by_one(recipe: str, program: str):
    """Compiled code computes norms with torch, so it is compared with separately compiled ops; code under a dispatch
    mode is compared with eager code."""
    torch.compiler.reset()
    torch.manual_seed(0)
    compiled = ops.Sequential(*BEFORE_CASTS[program](recipe)).bfloat16()
    for parameter in compiled.parameters():
        nn.init.normal_(parameter, std=0.5)
    fused, watched = copy.deepcopy(compiled), copy.deepcopy(compiled)
    alone = nn.Sequential(*copy.deepcopy(compiled))
    for model in (compiled, fused, watched, alone):
        dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))  # so that dy of nvfp4 gets equal random bits
    for model in (compiled, *alone):
        model.compile(backend="aot_eager", fullgraph=True)
    for step in range(2):  # the second step reads delayed scales
        found = {model: run(model, M, H, seed=3 * step, dtype=torch.bfloat16) for model in (compiled, fused, alone)}
        with Watched():
            found[watched] = run(watched, M, H, seed=3 * step, dtype=torch.bfloat16)
        for mine, other in ((compiled, alone), (watched, fused)):
            for (name, tensor), expected in zip(found[mine].items(), found[other].values(), strict=True):
                assert_bit_equal(tensor, expected, name)
        for model in found:
            dlp.end_step(model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_cast_computes_a_layer_norm_unless_it_reads_stored_values(recipe: str):
    """If the cast computes the norm, the kernel of the norm computes only mean and rstd, which the backward needs,
    and stores no y. With bf16, nvfp4 and int8 the kernel stores y."""
    model = ops.Sequential(ops.LayerNorm(128), linear(recipe, 128), ops.GELU(), ops.LayerNorm(128), linear(recipe, 128))
    with emulation(), recorded() as launched:
        model.bfloat16()(values(0, 128, 128).bfloat16())
    stores = [bool(arguments[0][10]) for name, arguments in launched if name == "layer_norm"]
    assert stores == [recipe in ("bf16", "nvfp4", "int8")] * 2


STORED = "stores y, which the cast of"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_says_which_outputs_casts_read_from_memory(recipe: str):
    """The plan names each output that a cast reads from memory, and the reason: no cast computes the activation, the
    casts of the recipe (nvfp4, int8) read stored values, or x is not bf16."""
    model = ops.Sequential(
        ops.LayerNorm(H), linear(recipe), ops.GELU(), linear(recipe), ops.RMSNorm(H), linear(recipe)
    ).bfloat16()
    model(values(0, 128, H).bfloat16())
    norms = [
        f"{place} ({norm}) {STORED} {place + 1} (Linear) reads: the casts of {recipe} read stored values"
        for place, norm in ((0, "LayerNorm"), (4, "RMSNorm"))
    ] * (recipe in ("nvfp4", "int8"))
    expected = [*norms[:1], f"2 (GELU) {STORED} 3 (Linear) reads: no cast computes GELU", *norms[1:]] * (
        recipe != "bf16"
    )
    assert [line.strip() for line in str(model.plan()).splitlines() if STORED in line] == expected
    model.float()(values(0, 128, H))
    for place, norm in ((0, "LayerNorm"), (4, "RMSNorm")):
        said = (
            f"({norm}) {STORED} {place + 1} (Linear) reads: casts compute {norm} in torch.bfloat16; got torch.float32"
        )
        assert (said in str(model.plan())) == (recipe != "bf16")
