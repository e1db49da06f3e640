"""dlp.ops: sequences of operations beside the same thing built of plain torch modules; ops and fusions of a user's own.

Single rank; `tests/test_ops_ranks.py` has tensor parallelism.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dlp
from bench import ops as bench
from dlp import ops
from dlp.ops import fuser
from dlp.parallel.linear import core
from dlp.parallel.linear.state import cores
from tests.cases import RECIPES
from tests.kept import fusions_kept
from tests.metrics import assert_bit_equal, assert_close
from tests.ops_programs import PROGRAMS, LearnableScale, ScaleAdd, fuse_scale_add

H, FFN, M = 32, 64, 32
NAMES = ("y", "dx")


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp(recipe: Any = "bf16", bias: bool = True, act: type = ops.SwiGLU) -> ops.Sequential:
    torch.manual_seed(0)
    wide = FFN if issubclass(act, ops.SwiGLU) else FFN // 2
    return ops.Sequential(
        ops.LayerNorm(H), ops.Linear(H, wide, bias, recipe=recipe), act(), ops.Linear(FFN // 2, H, bias, recipe=recipe)
    )


def run(model: nn.Module, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Forward and backward; y, dx and the gradients of the parameters, which are emptied before."""
    x = values(seed, *(shape or (M, H))).to(dtype).requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(values(seed + 1, *y.shape).to(dtype))
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {
        f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("prologue", ["rms_norm", "swiglu"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_a_layer_with_a_prologue_is_two_ops(recipe: str, prologue: str):
    """One linear behind what makes its x: equal bits, of a batch of sequences and with a bias."""
    torch.manual_seed(0)
    layer = dlp.Linear(H, FFN, bias=True, recipe=recipe, prologue=prologue)
    before = (ops.RMSNorm(H) if prologue == "rms_norm" else ops.SwiGLU()).bfloat16()
    two = ops.Sequential(before, ops.Linear(H, FFN, recipe=recipe))
    two[1].load_state_dict(layer.state_dict())
    found = []
    for model in (layer, two):
        model.bfloat16()
        given = [values(seed, 2, M, H).bfloat16().requires_grad_() for seed in (1, 2)]
        if prologue == "rms_norm":
            given[1] = before.weight
            y = model(given[0], given[1]) if model is layer else model(given[0])
        else:
            y = model(*given) if model is layer else model(tuple(given))
        y.backward(values(3, 2, M, FFN).bfloat16())
        found.append(
            [y.detach(), *[each.grad for each in (*given, *(layer if model is layer else two[1]).parameters())]]
        )
        before.zero_grad()
    for name, one, other in zip(("y", *layer.core.spec.prologue.reads, "weight", "bias"), *found, strict=True):
        assert_bit_equal(one, other, name)


class PlainMlp(nn.Module):
    """`mlp` of torch's modules, with its parameters."""

    def __init__(self, model: ops.Sequential) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(parameter.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        own = self._parameters
        h = F.layer_norm(x, (H,), own["0_weight"], own["0_bias"])
        gate, up = F.linear(h, own["1_weight"], own["1_bias"]).chunk(2, -1)  # type: ignore[arg-type]
        return F.linear(F.silu(gate) * up, own["3_weight"], own["3_bias"])  # type: ignore[arg-type]


def same(found: dict[str, Tensor], expected: dict[str, Tensor], at_most: float = 1e-6) -> None:
    assert [name.replace(".", "_") for name in found] == [name.replace(".", "_") for name in expected]
    for (name, tensor), other in zip(found.items(), expected.values(), strict=True):
        assert_close(tensor, other, at_most, name)


# The six programs


@pytest.mark.parametrize("shape", [(M, H), (2, M // 2, H)], ids=["tokens", "sequences"])
def test_a_sequence(shape: tuple[int, ...]):
    model = mlp()
    same(run(model, *shape), run(PlainMlp(model), *shape))
    assert "forward  LayerNorm | " in str(model.plan())
    forward, backward = (
        line for line in str(model.plan()).splitlines() if line.strip().startswith(("forward", "backward"))
    )
    assert forward.split()[1:] != backward.split()[1:]


def test_quantized_parameters_and_a_region_around_the_forward():
    with dlp.quantized_model_init(recipe="fp8_current"):
        model = mlp("fp8_current")
    plain = mlp("fp8_current")
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(model.state_dict()[name])
    x = values(1, M, H).requires_grad_()
    with dlp.autocast(recipe="fp8_current"):
        y = model(x)
    y.backward(values(2, M, H))
    assert_close(y, plain(x.detach()), 0.1)
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.any()


def branching() -> tuple[ops.Sequential, ops.Sequential]:
    torch.manual_seed(0)
    first = ops.Sequential(ops.LayerNorm(H), ops.MakeExtraOutput(), ops.Linear(H, FFN), ops.SwiGLU())
    return first, ops.Sequential(ops.Linear(FFN // 2, H), ops.AddExtraInput())


def test_branches():
    fc1, fc2 = branching()
    x = values(1, M, H).requires_grad_()
    y, residual = fc1(x)
    y = fc2(y, residual)
    y.backward(values(2, M, H))
    other = x.detach().clone().requires_grad_()
    p, q = dict(fc1.named_parameters()), dict(fc2.named_parameters())
    h = F.layer_norm(other, (H,), p["0.weight"], p["0.bias"])
    gate, up = F.linear(h, p["2.weight"], p["2.bias"]).chunk(2, -1)
    expected = F.linear(F.silu(gate) * up, q["0.weight"], q["0.bias"]) + h
    expected.backward(values(2, M, H))
    same({"y": y, "dx": x.grad}, {"y": expected, "dx": other.grad})  # type: ignore[dict-item]


@pytest.mark.parametrize("used", ["output", "extra output"])
def test_a_gradient_that_nobody_has_is_none(used: str):
    fc1, _ = branching()
    x = values(1, M, H).requires_grad_()
    y, residual = fc1(x)
    (y if used == "output" else residual).sum().backward()
    assert x.grad is not None and x.grad.any()


def test_a_basic_op_of_the_users():
    model = ops.Sequential(ops.RMSNorm(H), LearnableScale(), ops.Linear(H, H))
    model[1].scale.data.fill_(3.0)
    found = run(model)
    x = values(1, M, H).requires_grad_()
    norm, scale, weight, bias = (p.detach().clone().requires_grad_() for p in model.parameters())
    y = F.linear(scale * F.rms_norm(x, (H,), norm, 1e-5), weight, bias)
    y.backward(values(2, M, H))
    same(
        found,
        {
            "y": y,
            "dx": x.grad,
            "d0.weight": norm.grad,
            "d1.scale": scale.grad,
            "d2.weight": weight.grad,
            "d2.bias": bias.grad,
        },
    )  # type: ignore[dict-item]
    assert_close(LearnableScale()(x), x, 0)


@fusions_kept()
def test_a_fused_op_of_the_users():
    model = ops.Sequential(ops.ConstantScale(0.5), ops.AddExtraInput(), ops.GELU())
    x, extra = values(1, M, H).requires_grad_(), values(2, M, H).requires_grad_()
    unfused = model(x, extra)
    ScaleAdd.runs = 0
    ops.register_forward_fusion(fuse_scale_add, prepend=True)
    y = model(x, extra)
    assert ScaleAdd.runs == 1
    assert_close(y, unfused, 0)
    y.square().sum().backward()
    own = [tensor.detach().clone().requires_grad_() for tensor in (x, extra)]
    expected = F.gelu(0.5 * own[0] + own[1], approximate="tanh")
    expected.square().sum().backward()
    for found, its in ((y, expected), (x.grad, own[0].grad), (extra.grad, own[1].grad)):
        assert_close(found, its, 1e-6)  # type: ignore[arg-type]
    assert "forward  ScaleAdd[ConstantScale, AddExtraInput] | GELU" in str(model.plan())
    assert "backward ConstantScale | AddExtraInput | GELU" in str(model.plan())


class Window(ops.FusedOperation):
    """Backward only: of a ConstantScale and a GELU."""

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        scale, gelu = self.basic_ops
        dx, _ = gelu.op_backward(basic_op_ctxs[1], grad_output)
        return scale.op_backward(basic_op_ctxs[0], dx.tensor())[0], [(), ()], [(), ()]


@pytest.mark.parametrize("direction", ["backward", "both"])
@fusions_kept()
def test_a_fusion_of_one_direction_leaves_the_other(direction: str):
    model = ops.Sequential(ops.ConstantScale(0.5), ops.GELU())
    expected = run(model)
    register = {"backward": ops.register_backward_fusion, "both": ops.register_forward_backward_fusion}[direction]
    register(lambda basic, *, recipe: [Window(basic)])
    for name, tensor in run(model).items():
        assert_bit_equal(tensor, expected[name], name)
    assert "forward  ConstantScale | GELU\n" in str(model.plan())
    assert "backward Window[ConstantScale, GELU]" in str(model.plan())


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda basic: basic[:1], r"\[ConstantScale\], which expand to \[ConstantScale\]: op 1 is"),
        (lambda basic: basic[::-1], r"\[Identity, ConstantScale\], .*\[Identity, ConstantScale\]: op 0 is"),
        (lambda basic: [*basic, ops.Identity()], r"\[.*, Identity, Identity\]: op 2 is"),
        (lambda basic: [basic[0], ops.Identity()], r"\[ConstantScale, Identity\]: op 1 is"),
        (lambda basic: [], r"\[\], which expand to \[\]: op 0 is"),
    ],
    ids=["lost", "moved", "added", "replaced", "nothing"],
)
@fusions_kept()
def test_a_fusion_must_keep_the_basic_ops(returned: Any, said: str):
    model = ops.Sequential(ops.ConstantScale(0.5), ops.Identity())
    ops.register_forward_backward_fusion(lambda basic, *, recipe: returned(basic))
    with pytest.raises(RuntimeError, match=r"expand to \[ConstantScale, Identity\]; it returned .*" + said):
        model(values(0, M, H))


# What ops and fusions are told


class Told(ops.BasicOperation):
    """x times `factor`; keeps what it was told."""

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
    """The dy of the linear before, through its bias, and the x of the one behind."""
    before, behind = ops.Linear(H, H, recipe="fp8_current"), ops.Linear(H, H, recipe="fp8_block")
    told = [Told() for _ in range(3)]
    ops.Sequential(told[0], before, told[1], ops.Identity(), behind, told[2])(values(0, M, H))
    recipes = [linear.core.spec.recipe for linear in (before, behind)]
    assert [op.quantizers for op in told] == [
        (None, recipes[0].x), (recipes[0].dy, None), (recipes[1].dy, None),
    ]  # fmt: skip  # an Identity may do anything with it
    ops.Sequential(before, told[1], behind)(values(0, M, H))
    assert told[1].quantizers == (recipes[0].dy, recipes[1].x)


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


@fusions_kept()
def test_a_fusion_is_told_the_recipe_of_the_first_linear():
    told = []
    ops.register_forward_fusion(lambda basic, *, recipe: [told.append(recipe), basic][1])
    ops.Sequential(ops.Identity(), linear("fp8_block"), linear("fp8_current"))(values(0, M, H))
    ops.Sequential(ops.Identity())(values(0, M, H))
    assert [recipe and str(recipe) for recipe in told] == ["fp8_block", None]


def test_extra_tensors_pass_groups_in_their_order():
    """Of two fusers, with a plain module and an op with hooks between."""
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
        with pytest.raises(ValueError, match=f"its ops take 2 extra inputs; got {len(given)}: pass those of all ops"):
            model(x, *given)


@pytest.mark.parametrize("behind", [[], [ops.GELU()], [ops.MakeExtraOutput()], [ops.Reshape((-1,)), ops.SiLU()]])
def test_an_extra_input_is_written_to_wherever_its_sum_goes(behind: list[nn.Module]):
    """Into the output, what an op keeps, or a view that it keeps; who needs it as it was is told so in backward."""
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


# Counts, kinds and places


def test_a_wrong_number_of_extra_inputs_is_refused():
    model = ops.Sequential(ops.Identity(), ops.AddExtraInput())
    with pytest.raises(ValueError, match=r"take 1 extra inputs \(of 1 \(AddExtraInput\)\); got 0"):
        model(values(0, M, H))
    with pytest.raises(ValueError, match="got 2"):
        model(values(0, M, H), values(0, M, H), values(0, M, H))


class Branch(ops.BasicOperation):
    """x, extra -> scale * x + extra, x; with `lacks`, one of what it is to return."""

    num_extra_inputs = num_extra_outputs = 1

    def __init__(self, lacks: str = "") -> None:
        super().__init__()
        self.lacks, self.weight = lacks, nn.Parameter(torch.ones(1))

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **rest: Any) -> Any:
        ctx = basic_op_ctxs[0]
        ctx.factor = 2.0
        ctx.save_for_backward(input_, self.weight)
        more = () if self.lacks == "extra outputs" else (input_.clone(),)
        return ctx.factor * self.weight * input_ + basic_op_extra_inputs[0][0], [more]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        ctx = basic_op_ctxs[0]
        x, weight = ctx.saved_tensors
        of_weight = () if self.lacks == "gradients of parameters" else ((ctx.factor * x * grad_output).sum().view(1),)
        of_extra = () if self.lacks == "gradients of extra inputs" else (grad_output,)
        dx = ctx.factor * weight * grad_output + basic_op_grad_extra_outputs[0][0]
        return dx, [of_weight], [] if self.lacks == "tuples of gradients of extra inputs" else [of_extra]


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Twice(nn.Module):
    """A Branch between other ops; its extra output is added to the output."""

    def __init__(self, lacks: str = "") -> None:
        super().__init__()
        self.inner = ops.Sequential({"a": ops.Identity(), "branch": Branch(lacks), "act": ops.GELU()})

    def forward(self, x: Tensor) -> Tensor:
        y, more = self.inner(x, 3.0 * x)
        return y + more  # type: ignore[no-any-return]


LACKS = ("extra outputs", "gradients of parameters", "gradients of extra inputs", "tuples of gradients of extra inputs")


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
@pytest.mark.parametrize("lacks", LACKS)
def test_an_op_that_returns_too_few_tensors_is_named(lacks: str, watched: bool):
    with Watched() if watched else nullcontext():
        said = rf"^branch \(Branch\): it returned 0 {lacks}; it declares 1"
        with pytest.raises(RuntimeError, match=said):
            run(Twice(lacks))


def test_an_op_of_the_users_with_extra_tensors_runs_where_torch_watches():
    model = Twice()
    expected = run(model)
    with Watched():
        found = run(model)
    x = values(1, M, H).requires_grad_()
    (F.gelu(2 * x + 3 * x, approximate="tanh") + x).backward(values(2, M, H))
    assert_close(expected["dx"], x.grad, 1e-6)  # type: ignore[arg-type]
    same(found, expected)


@pytest.mark.slow
def test_an_op_of_the_users_with_extra_tensors_compiles():
    model = Twice()
    expected = run(model)
    model.compile(backend="aot_eager", fullgraph=True)
    same(run(model), expected)
    for lacks in LACKS[:3]:
        torch.compiler.reset()
        model = Twice(lacks)
        model.compile(backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=rf"branch \(Branch\): it returned 0 {lacks}; it declares 1"):
            run(model)


def test_an_error_inside_of_an_op_says_its_name_and_place():
    model = ops.Sequential(ops.Identity(), ops.RMSNorm(H + 1), ops.Linear(H + 1, H))
    with pytest.raises(ValueError, match=r"^1 \(RMSNorm\): RMSNorm\(33\): it is given 32 features"):
        model(values(0, M, H))
    with Watched(), pytest.raises(ValueError, match=r"^1 \(RMSNorm\), 2 \(Linear\): .*x of shape"):
        model(values(0, M, H))
    with pytest.raises(ValueError, match=r"^op 1 \(RMSNorm\): RMSNorm\(33\): it is given 32 features"):
        ops.OperationFuser(list(model))(values(0, M, H))

    class Fails(LearnableScale):
        def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            raise FloatingPointError("too small")

    with pytest.raises(FloatingPointError, match="too small") as found:
        ops.Sequential({"a": ops.Identity(), "scale": Fails()})(values(0, M, H).requires_grad_()).sum().backward()
    assert found.value.__notes__ == ["in scale (Fails)"]


@pytest.mark.parametrize("out", [H, (H, 2 * H)], ids=["one", "siblings"])
def test_a_bias_that_is_returned_is_added_by_whoever_is_called_next(out: Any):
    torch.manual_seed(0)
    model = ops.Linear(H, out, return_bias=True)
    plain = copy.deepcopy(model.state_dict())
    for name, parameter in model.named_parameters():
        if "bias" in name:
            parameter.data.normal_()
            plain[name].copy_(parameter)
    other = ops.Linear(H, out)
    other.load_state_dict(plain)
    x, x_other = values(1, M, H).requires_grad_(), values(1, M, H).requires_grad_()
    y, *biases = model(x)
    added = [one + bias for one, bias in zip(y if isinstance(y, tuple) else (y,), biases, strict=True)]
    expected = other(x_other)
    for one, its in zip(added, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert_close(one, its, 1e-6)
    sum((one.square().sum() for one in added), torch.zeros(())).backward()
    sum(
        (one.square().sum() for one in (expected if isinstance(expected, tuple) else (expected,))), torch.zeros(())
    ).backward()
    assert_close(x.grad, x_other.grad, 1e-6)  # type: ignore[arg-type]
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(mine.grad, its.grad, 1e-6)  # type: ignore[arg-type]


def test_siblings_go_to_gates_and_to_nothing_else():
    model = ops.Sequential(ops.Linear(H, (FFN, FFN)), ops.SwiGLU())
    assert model(values(0, M, H)).shape == (M, FFN)
    with pytest.raises(ValueError, match=r"1 \(Reshape\): it takes one tensor and is given 2"):
        ops.Sequential(ops.Linear(H, (FFN, FFN)), ops.Reshape((-1,)))(values(0, M, H))


@pytest.mark.parametrize(
    ("op", "plain"),
    [
        (ops.GELU(), lambda x: F.gelu(x, approximate="tanh")), (ops.ReLU(), F.relu), (ops.SiLU(), F.silu),
        (ops.SReLU(), lambda x: F.relu(x) ** 2), (ops.GLU(), F.glu), (ops.GEGLU(), None), (ops.ReGLU(), None),
        (ops.L2Normalization(), lambda x: x * torch.rsqrt((x**2).sum(-1, keepdim=True) + 1e-6)),
        (ops.RMSNorm(H, zero_centered_gamma=True), lambda x: F.rms_norm(x, (H,), eps=1e-5)),
        (ops.ConstantScale(3.0), lambda x: 3 * x), (ops.Reshape((-1, 4)), lambda x: x.reshape(-1, 4)),
        (ops.AllReduce(), lambda x: x), (ops.Dropout(0.0), lambda x: x), (ops.Bias(H), lambda x: x),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)  # fmt: skip
def test_a_basic_op_by_itself(op: Any, plain: Any):
    if isinstance(op, ops.GLU):

        def plain(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, -1)
            return gate.sigmoid() * up
    elif plain is None:

        def plain(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, -1)
            return (F.relu(gate) if isinstance(op, ops.ReGLU) else F.gelu(gate, approximate="tanh")) * up

    same({name: tensor for name, tensor in run(op).items() if name in NAMES}, run(_Plain(plain)))


class _Plain(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


def test_dropout_drops_the_same_in_backward_and_nothing_in_evaluation():
    op = ops.Dropout(0.5)
    found = run(op)
    zeros = found["y"] == 0
    assert 0.3 < zeros.float().mean() < 0.7
    assert ((found["dx"] == 0) == zeros).all()
    op.eval()
    assert_close(run(op)["y"], values(1, M, H), 0)


# State: recipes, regions, recomputation, gradients that are not needed


def test_a_recipe_that_changes_makes_another_plan_and_finds_the_old_one_again():
    model = mlp("fp8_current")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    dlp.attach(model, optimizer)
    first = run(model)
    found = model._groups_now()[0].plans
    for recipe, plans in (({"name": "fp8_current", "power_of_two": True}, 2), ("bf16", 3), ("fp8_current", 3)):
        dlp.set_recipe(model, "*", recipe)
        optimizer.step()
        last = run(model)
        assert len(found) in (plans, plans + 1)
    for name, tensor in first.items():
        assert_bit_equal(last[name], tensor, name)


def test_nested_regions_run_under_the_innermost_and_find_their_plans_again():
    model = mlp("fp8_current")
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
    recipes = ["fp8_current", "bf16", dlp.recipe("fp8_current", power_of_two=True), "bf16", "fp8_current"]
    expected = [mlp(recipe)(values(0, M, H)) for recipe in recipes]
    for _ in range(2):
        found = [model(values(0, M, H))]
        with dlp.autocast(recipe=recipes[1]):
            found += [model(values(0, M, H))]
            with dlp.autocast(recipe=recipes[2]):
                found += [model(values(0, M, H))]
            found += [model(values(0, M, H))]
        found += [model(values(0, M, H))]
        for its, other in zip(found, expected, strict=True):
            assert_bit_equal(its, other)
        assert len(model._groups_now()[0].plans) == 3


def test_a_plan_for_each_state():
    """Dtype, training, who learns, whether there is a backward; a state that returns finds its plan."""
    model = mlp("fp8_current")
    plans, x = model._groups_now()[0].plans, values(0, M, H)
    counts = []
    for _ in range(2):
        for given in (x, x.bfloat16(), x.clone().requires_grad_()):
            model(given)
            counts.append(len(plans))
        with torch.no_grad():
            model(x)
        counts.append(len(plans))
        model.eval()(x)
        counts.append(len(plans))
        model.train()[1].weight.requires_grad_(False)
        model(x)
        counts.append(len(plans))
        model[1].weight.requires_grad_(True)
    assert counts == [1, 2, 3, 4, 5, 6] + [6] * 6


def test_nothing_is_fused_anew_inside_of_a_graph(monkeypatch: pytest.MonkeyPatch):
    """A state that has run before runs; another one says what is missing."""
    model, x = mlp("fp8_current"), values(0, M, H)
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
    expected = model(x)
    monkeypatch.setattr(fuser, "capturing", lambda: True)
    assert_bit_equal(model(x), expected)
    for other in (x.bfloat16(), x.clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"^0 \(LayerNorm\) and the ops behind it have not run like this before"):
            model(other)
    with dlp.autocast(recipe="bf16"), pytest.raises(ValueError, match="run them once before its capture"):
        model(x)


def test_there_is_no_second_derivative():
    x = values(0, M, H).requires_grad_()
    (dx,) = torch.autograd.grad(mlp()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_x_that_is_kept_as_it_is_gives_the_same_bits(recipe: str):
    """Of what a norm makes, and of an input, which is what is kept."""
    for inner in ([ops.RMSNorm(H)], []):
        models = [
            ops.Sequential(*copy.deepcopy(inner), linear(recipe, save_original_input=kept)) for kept in (True, False)
        ]
        models[1].load_state_dict(models[0].state_dict())
        for model in models:
            dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
        found, expected = (run(model, dtype=torch.bfloat16) for model in models)
        for name, tensor in expected.items():
            assert_bit_equal(found[name], tensor, name)
    for model, kept in zip(models, (True, recipe == "bf16"), strict=True):
        x, memory = values(0, M, H).bfloat16().requires_grad_(), set[int]()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=memory: seen.add(t.data_ptr()) or t, lambda t: t):
            model(x)
        assert (x.data_ptr() in memory) == kept


def test_statistics_of_linears_in_a_sequence():
    model = mlp("fp8_current")
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
    assert dlp.record_stats(model, "1") == ["1"]
    run(model)
    found = dlp.read_stats(model)
    assert set(found) == {"1.x", "1.w", "1.dy"}
    normed = F.layer_norm(values(1, M, H), (H,))
    assert found["1.x"]["amax"] == pytest.approx(normed.abs().amax().item(), rel=1e-6)


@pytest.mark.parametrize("mode", ["grad", "main_grad"])
def test_gradients_are_added_where_they_are(mode: str):
    """With the bits of autograd's sums of three microbatches."""
    models = []
    for main_grads in ("off", mode):
        model = mlp("fp8_current")
        dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0), main_grads=main_grads)
        if main_grads == "main_grad":
            for op in (model[1], model[3]):
                op.weight.main_grad = torch.zeros_like(op.weight)  # type: ignore[assignment]
        for seed in range(3):
            model(values(seed, M, H)).backward(values(seed + 9, M, H))
        models.append(model)
    for expected, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        main = getattr(found, "main_grad", None)
        assert main is None or found.grad is None
        assert_bit_equal(found.grad if main is None else main, expected.grad)


@pytest.mark.parametrize("program", PROGRAMS)
@fusions_kept()
def test_recomputation_gives_the_same_bits(program: str):
    """The bits of the first run, twice."""
    ops.register_forward_fusion(fuse_scale_add, prepend=True)
    torch.manual_seed(0)
    model = PROGRAMS[program]()
    expected = run(model)
    run(_Recomputed(model))
    found = run(_Recomputed(model))
    for name, tensor in expected.items():
        assert_bit_equal(found.get(name, found.get(name.replace("d", "dinner.", 1))), tensor, name)  # type: ignore[arg-type]


class _Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_gradients_are_made_of_what_needs_them():
    model = mlp()
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    x = values(1, M, H)
    model(x).sum().backward()
    assert model[3].weight.grad.any() and model[1].weight.grad is None
    with torch.no_grad():
        assert not model(x).requires_grad


def test_copies_states_and_lists():
    model = mlp()
    other = copy.deepcopy(model)
    assert_close(other(values(0, M, H)), model(values(0, M, H)), 0)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    edited = other[:]
    edited.extend([ops.GELU(), ops.ReLU()])
    edited[4] = ops.SiLU()
    del edited[5]
    del edited[:2]
    assert [type(m).__name__ for m in edited] == ["SwiGLU", "Linear", "SiLU"]
    other.append(nn.Tanh()).insert(0, ops.Identity())
    assert [type(m).__name__ for m in other] == ["Identity", "LayerNorm", "Linear", "SwiGLU", "Linear", "Tanh"]
    assert_close(other(values(0, M, H)), model(values(0, M, H)).tanh(), 0)
    assert len(other[1:3]) == 2 and isinstance(other[1:3], ops.Sequential)
    assert "5 (Tanh): no op: it ends a group" in str(other.plan())
    named = ops.Sequential({"norm": ops.RMSNorm(H), "linear": ops.Linear(H, H)})
    assert list(named.state_dict()) == ["norm.weight", "linear.weight", "linear.bias"]


def test_an_op_with_hooks_ends_its_group():
    model, seen = mlp(), list[int]()
    expected = model(values(0, M, H))
    model[2].register_forward_hook(lambda *args: seen.append(1))
    assert_close(model(values(0, M, H)), expected, 0)
    assert seen and "2 (SwiGLU): it has hooks: it ends a group" in str(model.plan())


# Every fusion beside its basic ops


class Residual(nn.Module):
    """Ops between a MakeExtraOutput and an AddExtraInput."""

    def __init__(self, *inner: nn.Module, in_place: bool = False) -> None:
        super().__init__()
        self.inner = ops.Sequential(ops.MakeExtraOutput(in_place=in_place), *inner)
        self.add = ops.Sequential(ops.Identity(), ops.AddExtraInput())

    def forward(self, x: Tensor) -> Tensor:
        y, residual = self.inner(1.0 * x)
        return self.add(y, residual)  # type: ignore[no-any-return]


class IntoInput(nn.Module):
    """Ops that end in an AddExtraInput(in_place=True)."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = ops.Sequential(*inner, ops.AddExtraInput(in_place=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, 2.0 * x)  # type: ignore[no-any-return]


class Added(nn.Module):
    """A sum that is normed, and goes on beside."""

    def __init__(self, *behind: nn.Module) -> None:
        super().__init__()
        self.inner = ops.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput(), ops.RMSNorm(H), *behind)

    def forward(self, x: Tensor) -> Tensor:
        y, total = self.inner(x, 2.0 * x)
        return y + total  # type: ignore[no-any-return]


def linear(recipe: str, size: int = H, **options: Any) -> ops.Linear:
    return ops.Linear(size, size, recipe=recipe, **options)


# what it says in the plan -> the model of a recipe, and the bound where it rounds less often than its ops
FUSED: dict[str, tuple[Any, float]] = {
    "ForwardLinearBias[Linear, Bias]": (lambda r: ops.Sequential(ops.RMSNorm(H), linear(r)), 4e-3),
    "LinearIntoExtraInput[Linear, Bias, AddExtraInput]": (lambda r: IntoInput(linear(r)), 8e-3),
    "LinearIntoExtraInput[Linear, ConstantScale, AddExtraInput]":
        (lambda r: IntoInput(linear(r, bias=False), ops.ConstantScale(0.5)), 8e-3),
    "BackwardLinearIntoResidual[MakeExtraOutput, Linear]": (lambda r: Residual(linear(r), in_place=True), 8e-3),
    "BackwardScaledLinear[Linear, ConstantScale]":
        (lambda r: ops.Sequential(linear(r, bias=False), ops.ConstantScale(0.5)), 0.0),
    "ForwardAddNorm[AddExtraInput, MakeExtraOutput, RMSNorm]": (lambda r: Added(linear(r, bias=False)), 0.0),
    "BackwardNormResidual[MakeExtraOutput, RMSNorm]": (lambda r: Residual(ops.RMSNorm(H), linear(r, bias=False)), 0.0),
} | {  # an Identity, so that forward rounds alike
    f"BackwardBiasActivation[Bias, {act.__name__}]":
        (lambda r, act=act: ops.Sequential(linear(r, bias=False), ops.Identity(), ops.Bias(H), act()), 0.0)
    for act in (ops.GELU, ops.ReLU, ops.SiLU, ops.SReLU)
}  # fmt: skip


FROZEN = [("fp8_current", False), ("fp8_block", False)]


@pytest.mark.parametrize(("recipe", "learns"), [(recipe, True) for recipe in RECIPES] + FROZEN)
@pytest.mark.parametrize("said", FUSED)
def test_a_fusion_equals_its_basic_ops(said: str, recipe: str, learns: bool):
    make, bound = FUSED[said]
    torch.manual_seed(0)
    fused = make(recipe).bfloat16().requires_grad_(learns)
    basic = copy.deepcopy(fused)
    found = run(fused, dtype=torch.bfloat16)
    sequences = [module for module in fused.modules() if isinstance(module, ops.Sequential)]
    assert any(said in str(each.plan()) for each in sequences), [str(each.plan()) for each in sequences]
    with fusions_kept(none=True):
        expected = run(basic, dtype=torch.bfloat16)
    for name, tensor in expected.items():
        if bound == 0.0:
            assert_bit_equal(found[name], tensor, name)
        else:
            assert_close(found[name], tensor, bound, name)


# Split sequences, and what travels between them


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "fp8_rowwise"])
@pytest.mark.parametrize("shape", [(128, 128), (2, 64, 128)], ids=["tokens", "sequences"])
def test_a_quantized_tensor_goes_to_the_next_sequence_and_is_cast_once(
    recipe: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    norm = ops.Sequential(ops.LayerNorm(128), ops.Quantize(recipe=recipe)).bfloat16()
    fc1 = ops.Sequential(ops.Linear(128, 128, bias=False, recipe=recipe)).bfloat16()
    whole = ops.Sequential(norm[0], fc1[0])
    x = values(1, *shape).bfloat16().requires_grad_()
    handed = norm(x)
    assert isinstance(handed, ops.Handed) and handed.shape == shape and handed.dtype == torch.bfloat16
    cast: list[str] = []
    quantize = core.quantize
    monkeypatch.setattr(
        core, "quantize", lambda bound, tensor, *a, **k: [cast.append(tensor), quantize(bound, tensor, *a, **k)][1]
    )
    monkeypatch.setattr(core.BoundRoute, "send", lambda self, *a, **k: pytest.fail("x is cast once more"))
    y = fc1(handed)
    monkeypatch.undo()
    dy = values(2, *y.shape).bfloat16()
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "dw": fc1[0].weight.grad}
    x.grad = fc1[0].weight.grad = None
    other = whole(x)
    other.backward(dy)
    for name, tensor in {"y": other.detach(), "dx": x.grad, "dw": fc1[0].weight.grad}.items():
        assert_bit_equal(found[name], tensor, name)  # type: ignore[arg-type]
    assert "x" not in cast


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8"])
def test_split_sequences_compute_what_torch_does(recipe: str):
    """Within what the recipe rounds."""
    torch.manual_seed(0)
    norm, fc1 = (
        ops.Sequential(ops.LayerNorm(128), ops.Quantize(recipe=recipe)),
        ops.Sequential(linear(recipe, size=128)),
    )
    x, dy = values(1, 128, 128).requires_grad_(), values(2, 128, 128)
    y = fc1(norm(x))
    y.backward(dy)
    own = [p.detach().clone().requires_grad_() for p in (x, *norm.parameters(), *fc1.parameters())]
    expected = F.linear(F.layer_norm(own[0], (128,), own[1], own[2]), own[3], own[4])
    expected.backward(dy)
    for found, its in zip((x, *norm.parameters(), *fc1.parameters()), own, strict=True):
        assert_close(found.grad, its.grad, 0.08)  # type: ignore[arg-type]
    assert_close(y, expected, 0.08)


def test_a_quantized_tensor_of_another_recipe_is_decoded_or_refused(caplog: pytest.LogCaptureFixture):
    x = values(1, 128, 128)
    linear = ops.Linear(128, 128, recipe="fp8_block")
    handed = ops.Quantize(recipe="fp8_current")(x)
    assert_close(linear(handed), linear(x), 0.1)
    assert "x is quantized twice: it came as" in caplog.text
    with pytest.raises(ValueError, match="give Quantize this recipe, or leave strict away"):
        linear(ops.Quantize(recipe="fp8_current", strict=True)(x))
    assert_close(handed + 1, x + 1, 0.1)
    for recipe in ("fp8_block", "fp8_current"):  # not an op, but reads it alike
        layer = dlp.Linear(128, 128, recipe=recipe)
        y = layer(handed)
        y.sum().backward()
        assert_close(y, layer(x), 0.1 if recipe == "fp8_block" else 0.0, recipe)
    assert ops.Quantize()(x) is not None and type(ops.Quantize()(x)) is Tensor


def test_a_quantized_gradient_goes_back():
    torch.manual_seed(0)
    first = ops.Sequential(ops.Linear(128, 128, bias=False, recipe="fp8_current"))
    second = ops.Sequential(ops.Quantize(forward=False, backward=True, recipe="fp8_current"), ops.RMSNorm(128))
    x = values(1, 128, 128).requires_grad_()
    y = first(x)
    seen: list[Any] = []
    y.register_hook(lambda grad: seen.append(type(grad)))
    second(y).sum().backward()
    assert seen == [ops.Handed]
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.any()


@pytest.mark.parametrize("inside", [False, True], ids=["two sequences", "one"])
def test_a_linear_hands_on_y_and_dx_quantized(inside: bool):
    torch.manual_seed(0)
    recipes = "fp8_block", "fp8_rowwise" if inside else "fp8_block"  # inside, each casts by its own
    first = ops.Linear(128, 128, recipe=recipes[0], output="quantized")
    second = ops.Linear(128, 128, recipe=recipes[1], grad_input="quantized")
    plain = [ops.Linear(128, 128, recipe=recipe) for recipe in recipes]
    for mine, other in zip((first, second), plain, strict=True):
        other.load_state_dict(mine.state_dict())
    found, seen, x = [], list[Any](), values(1, 128, 128)
    for pair in ((first, second), plain):
        given = x.clone().requires_grad_()
        if inside:
            y = ops.Sequential(*pair)(given)
        else:
            between = pair[0](given)
            between.register_hook(lambda grad: seen.append(type(grad)))
            seen.append(type(between))
            y = pair[1](between)
        y.backward(values(2, 128, 128))
        assert given.grad is not None
        found.append([y.detach(), given.grad, *[p.grad for layer in pair for p in layer.parameters()]])
    for name, mine, other in zip(("y", "dx", "dw", "db", "dw", "db"), *found, strict=True):
        if name == "db":  # the sums of what came, which was rounded
            assert_close(mine, other, 0.05)
        else:
            assert_bit_equal(mine, other, name)
    assert seen == ([] if inside else [ops.Handed, ops.Handed, Tensor, Tensor])
    with pytest.raises(ValueError, match='output must be "values" or "quantized"; got \'fp8\''):
        ops.Linear(8, 8, output="fp8")
    with pytest.raises(ValueError, match="siblings go to a gate"):
        ops.Linear(8, (8, 8), output="quantized")


# What torch traces


def test_what_is_traced_hands_on_values_and_the_plan_says_so():
    split = PROGRAMS["Split"]()
    with Watched():
        assert type(split.norm(values(0, M, H))) is Tensor  # type: ignore[operator]
    expected = "compiled or watched, 1 (Quantize) hands on values, which the linear that reads them casts"
    assert expected in str(split.norm.plan()) and "compiled or watched" not in str(split.fc1.plan())  # type: ignore[operator]


def mlp_like(model: nn.Module) -> ops.Sequential:
    """The same in bf16, not compiled."""
    made = ops.Sequential(ops.RMSNorm(H), ops.Linear(H, (FFN, FFN)), ops.SwiGLU(), ops.Linear(FFN, H), ops.GELU())
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@fusions_kept()
def test_programs_of_users_compile(program: str):
    """Into one graph, of the ops one by one; a region inside of it is refused."""
    ops.register_forward_fusion(fuse_scale_add, prepend=True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = PROGRAMS[program]()
    expected = run(model)
    model.compile(backend="aot_eager", fullgraph=True)
    if program == "Quantized":
        with pytest.raises(Exception, match="dlp.autocast does not reach into torch.compile"):
            run(model)
    else:
        same(run(model), expected, 1e-6)


@pytest.mark.slow
def test_compiled_code_refuses_what_was_quantized_outside_of_it():
    split = PROGRAMS["Split"]()
    handed = split.norm(values(0, M, H))  # type: ignore[operator]
    split.fc1.compile(backend="aot_eager", fullgraph=True)  # type: ignore[operator]
    with pytest.raises(Exception, match=r"0 \(Linear\): compiled code reads values, and is given a Handed"):
        split.fc1(handed)  # type: ignore[operator]
    split.fc1(handed.tensor())  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: ops.Linear(H, H), lambda: ops.BasicLinear(H, H, recipe="fp8_current"), lambda: ops.RMSNorm(H),
             ops.GELU, LearnableScale], ids=["linear", "basic", "norm", "activation", "own"]
)  # fmt: skip
def test_an_op_by_itself_compiles_before_it_has_run(make: Any):
    torch._dynamo.reset()
    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    models[0].compile(backend="aot_eager", fullgraph=True)
    same(run(models[0]), run(models[1]), 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "nvfp4"])
def test_frozen_linears_compile(recipe: str):
    """Only dx is made, by layers that have not run before."""
    torch._dynamo.reset()
    for before in ([], [ops.RMSNorm(H)]):
        model = ops.Sequential(*before, linear(recipe), ops.GELU())
        model.requires_grad_(False)
        fresh = copy.deepcopy(model)
        fresh.compile(backend="aot_eager", fullgraph=True)
        same(run(fresh), run(model), 0.02 if recipe == "fp8_current" else 1e-5)


@pytest.mark.slow
def test_compiled_code_is_one_graph():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ops.Sequential(
        ops.RMSNorm(H), ops.Linear(H, (FFN, FFN), recipe="fp8_current"), ops.SwiGLU(),
        ops.Linear(FFN, H, recipe="fp8_current"), ops.GELU(),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    dlp.attach(model, optimizer)
    other = copy.deepcopy(model)
    model.compile(backend="aot_eager", fullgraph=True)
    same(run(model), run(other), 0.02)
    dlp.set_recipe(model, "*", "bf16")
    optimizer.step()
    same(run(model), run(mlp_like(model)), 1e-5)


def test_equal_blocks_share_a_graph():
    """One in the first step, one more for operands that the step boundary has cast, however many blocks there are."""
    torch.compiler.reset()
    counters.clear()
    blocks = [ops.Sequential(ops.RMSNorm(H), ops.Linear(H, H, recipe="fp8_delayed")) for _ in range(3)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dlp.attach(model, optimizer)
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(3):
        run(model)
        optimizer.step()
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.LayerNorm])
@pytest.mark.parametrize("gate", [ops.SwiGLU, ops.GEGLU])
def test_what_watches_sees_ops_one_by_one(norm: type[nn.Module], gate: type[nn.Module]):
    """Norms and gates as prologues of the linears behind them."""
    given = []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given.extend([len(args[0])] if func is torch.ops.dlp.linear_fwd.default else [])
            return func(*args, **(kwargs or {}))

    linears = [ops.Linear(H, sizes, recipe="fp8_current") for sizes in ((H, H), H)]
    model = ops.Sequential(norm(H), linears[0], gate(), linears[1])
    expected = run(model)
    with Counts():
        same(run(model), expected, 0.02)
    assert given == [1 + len(list(model[0].parameters())), 2]


# Modules made of ops


def test_a_transformer_layer_is_that_of_torch():
    torch.manual_seed(0)
    layer = ops.TransformerLayer(H, FFN, 4, 2, normalization="RMSNorm", activation="swiglu", bias=False)
    x = values(1, 2, 16, H).requires_grad_()
    y = layer(x)
    y.backward(values(2, 2, 16, H))
    p = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    other = x.detach().clone().requires_grad_()
    n = F.rms_norm(other, (H,), p["qkv.0.weight"], 1e-5)
    q, k, v = (
        F.linear(n, p[f"qkv.1.weight_{i}"]).view(2, 16, heads, 8).transpose(1, 2) for i, heads in enumerate((4, 2, 2))
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    h = other + F.linear(attended, p["proj.0.weight"])
    m = F.rms_norm(h, (H,), p["mlp.0.weight"], 1e-5)
    gated = F.silu(F.linear(m, p["mlp.1.weight_0"])) * F.linear(m, p["mlp.1.weight_1"])
    expected = h + F.linear(gated, p["mlp.3.weight"])
    expected.backward(values(2, 2, 16, H))
    same({"y": y, "dx": x.grad}, {"y": expected, "dx": other.grad})  # type: ignore[dict-item]
    assert_close(layer(x.flatten(0, 1), batch=2), y.flatten(0, 1), 1e-6)
    with pytest.raises(ValueError, match="pass batch=B"):
        layer(x.flatten(0, 1))
    with pytest.raises(ValueError, match="choose num_gqa_groups"):
        ops.TransformerLayer(H, FFN, 4, 3)


def test_modules_return_the_norm_and_the_bias_where_asked():
    """The bias, which nobody has added, before the norm; of a gate's siblings in front it is added."""
    x, both = values(1, M, H), {"return_layernorm_output": True, "return_bias": True}
    for out in (FFN, (FFN, H)):
        module = ops.LayerNormLinear(H, out, **both)
        y, *biases, normed = module(x)
        assert_close(normed, F.layer_norm(x, (H,)), 1e-6)
        for i, (one, bias) in enumerate(zip(y if isinstance(y, tuple) else (y,), biases, strict=True)):
            weight, its = ((f"{name}_{i}" if isinstance(y, tuple) else name) for name in ("weight", "bias"))
            assert_close(one, F.linear(normed, getattr(module[2], weight)), 1e-6)
            assert_bit_equal(bias, getattr(module[2], its))
    plain = ops.LayerNormMLP(H, FFN, activation="swiglu", normalization="RMSNorm")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
    module = ops.LayerNormMLP(H, FFN, activation="swiglu", normalization="RMSNorm", **both)
    module.load_state_dict({_behind(name): tensor for name, tensor in plain.state_dict().items()})
    y, bias, normed = module(x)
    assert_close(y + bias, plain(x), 1e-6)
    assert_close(normed, F.rms_norm(x, (H,), plain[0].weight, 1e-5), 1e-6)
    y, bias = ops.LayerNormMLP(H, FFN, return_bias=True)(x)
    assert y.shape == x.shape and bias.shape == (H,)
    y, normed = ops.LayerNormLinear(H, FFN, return_layernorm_output=True)(x)
    assert y.shape == (M, FFN) and normed.shape == x.shape


def _behind(name: str) -> str:
    """With a MakeExtraOutput behind the norm."""
    place, _, rest = name.partition(".")
    return f"{int(place) + (place != '0')}.{rest}"


TE = [
    (lambda: ops.LayerNormLinear(H, FFN), "layer_norm_weight layer_norm_bias weight bias"),
    (lambda: ops.LayerNormLinear(H, (H, FFN), normalization="RMSNorm", return_layernorm_output=True, bias=False),
        "layer_norm_weight weight"),
    (lambda: ops.LayerNormMLP(H, FFN, activation="swiglu", return_layernorm_output=True),
        "layer_norm_weight layer_norm_bias fc1_weight fc1_bias fc2_weight fc2_bias"),
    (lambda: ops.TransformerLayer(H, FFN, 4, 2, hidden_dropout=0.1),
        "self_attention.layernorm_qkv.layer_norm_weight self_attention.layernorm_qkv.layer_norm_bias "
        "self_attention.layernorm_qkv.query_weight self_attention.layernorm_qkv.key_weight "
        "self_attention.layernorm_qkv.value_weight self_attention.layernorm_qkv.query_bias "
        "self_attention.layernorm_qkv.key_bias self_attention.layernorm_qkv.value_bias "
        "self_attention.proj.weight self_attention.proj.bias layernorm_mlp.layer_norm_weight "
        "layernorm_mlp.layer_norm_bias layernorm_mlp.fc1_weight layernorm_mlp.fc1_bias "
        "layernorm_mlp.fc2_weight layernorm_mlp.fc2_bias"),
]  # fmt: skip


@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize(("make", "names"), TE, ids=["linear", "siblings", "mlp", "layer"])
def test_states_of_transformer_engine_load_and_go_back(make: Any, names: str, nested: bool):
    """By the names of there, in both directions, the same bits."""
    models = [nn.ModuleDict({"a": make(), "b": nn.Linear(2, 2)}) if nested else make() for _ in range(2)]
    prefix = "a." if nested else ""
    state = {name: torch.randn_like(tensor) for name, tensor in ops.to_te(models[0]).items()}
    assert {name for name in state if not name.startswith("b.")} == {prefix + name for name in names.split()}
    found = ops.from_te(models[0], state | {f"{prefix}_extra_state": torch.zeros(1)})
    models[0].load_state_dict(found)
    for name, tensor in ops.to_te(models[0]).items():
        assert_bit_equal(tensor, state[name], name)
    models[1].load_state_dict(ops.from_te(models[1], ops.to_te(models[0])))
    for name, tensor in models[0].state_dict().items():
        assert_bit_equal(models[1].state_dict()[name], tensor, name)
    weight = prefix + next(
        name for name in names.split() if not name.endswith("layer_norm_weight") and "bias" not in name
    )
    with pytest.raises(ValueError, match=rf"^{weight} is \(3, 2\); here it must be \(\d+, 32\)"):
        ops.from_te(models[0], state | {weight: torch.zeros(3, 2)})


@pytest.mark.parametrize("interleaved", [False, True])
def test_q_k_and_v_of_transformer_engine_may_be_one_tensor(interleaved: bool):
    """Of 4 heads of 8 features in 2 groups: one group behind the other, in each its q, then k, then v; or all q, k and v."""
    layer, qkv = ops.TransformerLayer(H, FFN, 4, 2, bias=False), "self_attention.layernorm_qkv.weight"
    state = ops.to_te(layer, fuse_qkv_params=True, qkv_weight_interleaved=interleaved)
    q, k, v = (getattr(layer.qkv[1], f"weight_{i}").detach() for i in range(3))
    pairs = ((q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]), (q, k, v))
    assert_bit_equal(state[qkv], torch.cat(pairs[0 if interleaved else 1]))
    for which, part in (("query", q), ("key", k), ("value", v)):
        assert_bit_equal(ops.to_te(layer)[qkv.replace("weight", f"{which}_weight")], part, which)
    other = ops.TransformerLayer(H, FFN, 4, 2, bias=False)
    other.load_state_dict(ops.from_te(other, state, qkv_weight_interleaved=interleaved))
    for name, tensor in layer.state_dict().items():
        assert_bit_equal(other.state_dict()[name], tensor, name)


def test_options_that_modules_do_not_have_are_refused():
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        ops.LayerNormMLP(H, FFN, activation="tanh")
    with pytest.raises(TypeError, match="unknown option ub_overlap"):
        ops.LayerNormMLP(H, FFN, ub_overlap=True)


@pytest.mark.parametrize("backward_inside", [False, True], ids=["", "backward inside"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_autocast_gives_x_its_dtype_as_it_does_to_linears(recipe: str, backward_inside: bool):
    """The bits of x in that dtype, forward and backward, in the dtypes of what is differentiated."""
    model, dy = mlp(recipe), values(2, M, H).bfloat16()
    other = copy.deepcopy(model)
    x, cast = values(1, M, H).requires_grad_(), values(1, M, H).bfloat16().requires_grad_()
    region = torch.autocast("cpu", torch.bfloat16)
    with region:
        y = model(x)
        if backward_inside:
            y.backward(dy)
    if not backward_inside:
        y.backward(dy)
    expected = other(cast)
    expected.backward(dy)
    assert y.dtype == torch.bfloat16
    said = "x is cast from torch.float32 to torch.bfloat16 first, as torch.autocast says"
    assert said in str(model.plan()) and said not in str(other.plan())
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert_bit_equal(y, expected)
    assert_bit_equal(x.grad, cast.grad.float())  # type: ignore[union-attr]
    for (name, mine), its in zip(model.named_parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.dtype == mine.dtype
        assert_bit_equal(mine.grad, its.grad, name)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_compiled_code_is_given_the_dtype_of_torch_autocast(recipe: str):
    model = mlp(recipe)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(model)
        model.compile(backend="aot_eager", fullgraph=True)
        found = run(model)
    assert expected["y"].dtype == found["y"].dtype == torch.bfloat16
    same(found, expected, 0.02)


@pytest.mark.parametrize("words", [["--host"], ["--shapes", "64x64", "--only", "mlp"]])
def test_the_benchmark_says_that_it_needs_a_gpu(words: list[str], capsys: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("it would run")
    assert bench.main(words) == 3
    assert "needs a GPU" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["mlp", "layer"])
def test_the_subjects_of_the_benchmark_compute_the_same(kind: str):
    torch.manual_seed(0)
    make = bench.mlp if kind == "mlp" else bench.layer
    fused = make(1024, 64, "fp8_current", None)
    apart = bench.unfused(copy.deepcopy(fused))
    x, more = values(1, 4, 1024), {} if kind == "mlp" else {"batch": 2}
    assert_close(apart(x, **more), fused(x, **more), 1e-6)
    plain = (bench.PlainMlp if kind == "mlp" else bench.PlainLayer)(1024, 64)
    assert plain(x, **more).shape == fused(x, **more).shape


def test_the_host_is_measured_between_two_steps():
    for name, module in bench.tiny("fp8_current", "cpu").items():
        assert all(each.weights.parts is not None for each in cores(module)), f"{name}: passes cast its weights"
