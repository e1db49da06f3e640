"""dlp.ops: `ops.Sequential` compared with plain torch modules; user-defined ops and fusions.

The tests need one rank; `tests/test_ops_ranks.py` tests tensor parallelism.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dlp
from dlp import ops
from dlp.kernels import lazy_matrix
from dlp.kernels import ops as kernels
from dlp.ops import fuser
from dlp.quant.recipe import both, load
from tests.cases import RECIPES, nightly
from tests.metrics import assert_all_bit_equal, assert_bit_equal, assert_close
from tests.ops_models import FFN, NAMES, H, M, Recomputed, Twice, Watched, linear, mlp, run, same, values
from tests.ops_programs import PROGRAMS, LearnableScale, ScaleAdd, fuse_scale_add
from tests.restored_tables import restored_fusions


class PlainMlp(nn.Module):
    """The model `mlp`, built from torch's modules, with the same parameters."""

    def __init__(self, model: ops.Sequential) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(parameter.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        own = self._parameters
        h = F.layer_norm(x, (H,), own["0_weight"], own["0_bias"])
        gate, up = F.linear(h, own["1_weight"], own["1_bias"]).chunk(2, -1)  # type: ignore[arg-type]
        return F.linear(F.silu(gate) * up, own["3_weight"], own["3_bias"])  # type: ignore[arg-type]


# Six example programs


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


@restored_fusions()
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


@pytest.mark.parametrize("whole", [False, True], ids=["", "bias named"])
def test_a_fused_op_of_a_linear_has_its_bias(whole: bool):
    """A fused op adds the bias once, whether the linear is one op or is expanded into a BasicLinear and a Bias. This
    holds in an `ops.Sequential` and if the fused op is called directly."""
    first = ops.Linear(H, H)
    nn.init.normal_(first.bias)
    ops_of = [*(first.expanded if whole else [first]), ops.ConstantScale(2.0)]
    fused, x = ops.FusedOperation(ops_of), values(0, M, H)
    expected = 2 * F.linear(x, first.weight, first.bias)
    for found in (ops.Sequential(ops.Identity(), fused)(x), fused(x)):
        assert_close(found, expected, 1e-6)


class Window(ops.FusedOperation):
    """User-defined fusion of a ConstantScale and a GELU, which fuses only the backward."""

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any) -> Any:
        scale, gelu = self.basic_ops
        dx, _ = gelu.op_backward(basic_op_ctxs[1], grad_output)
        return scale.op_backward(basic_op_ctxs[0], dx.tensor())[0], [(), ()], [(), ()]


@pytest.mark.parametrize("pass_name", ["backward", "both"])
@restored_fusions()
def test_a_fusion_of_one_direction_leaves_the_other(pass_name: str):
    model = ops.Sequential(ops.ConstantScale(0.5), ops.GELU())
    expected = run(model)
    register = {"backward": ops.register_backward_fusion, "both": ops.register_forward_backward_fusion}[pass_name]
    register(lambda basic, *, recipe: [Window(basic)])
    assert_all_bit_equal(run(model), expected)
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
@restored_fusions()
def test_a_fusion_must_keep_the_basic_ops(returned: Any, said: str):
    model = ops.Sequential(ops.ConstantScale(0.5), ops.Identity())
    ops.register_forward_backward_fusion(lambda basic, *, recipe: returned(basic))
    with pytest.raises(RuntimeError, match=r"expand to \[ConstantScale, Identity\]; it returned .*" + said):
        model(values(0, M, H))


# Counts, dtypes and devices


def test_a_wrong_number_of_extra_inputs_is_refused():
    model = ops.Sequential(ops.Identity(), ops.AddExtraInput())
    with pytest.raises(ValueError, match=r"take 1 extra inputs \(of 1 \(AddExtraInput\)\); got 0"):
        model(values(0, M, H))
    with pytest.raises(ValueError, match="got 2"):
        model(values(0, M, H), values(0, M, H), values(0, M, H))


LACKS = ("extra outputs", "gradients of parameters", "gradients of extra inputs", "tuples of gradients of extra inputs")


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
@pytest.mark.parametrize("lacks", LACKS)
def test_an_op_that_returns_too_few_tensors_is_named(lacks: str, watched: bool):
    with Watched() if watched else nullcontext():
        said = rf"^branch \(Branch\): the op returned 0 {lacks}; expected 1"
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


@pytest.mark.slow
@pytest.mark.parametrize("lacks", [LACKS[0], *map(nightly, LACKS[1:3])])
def test_an_op_that_returns_too_few_tensors_is_named_by_compiled_code(lacks: str):
    torch.compiler.reset()
    model = Twice(lacks)
    model.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=rf"branch \(Branch\): the op returned 0 {lacks}; expected 1"):
        run(model)


def test_an_error_inside_of_an_op_says_its_name_and_place():
    model = ops.Sequential(ops.Identity(), ops.RMSNorm(H + 1), ops.Linear(H + 1, H))
    with pytest.raises(ValueError, match=r"^1 \(RMSNorm\): expected 33 features; got 32"):
        model(values(0, M, H))
    with Watched(), pytest.raises(ValueError, match=r"^1 \(RMSNorm\): expected 33 features; got 32"):
        model(values(0, M, H))
    with pytest.raises(ValueError, match=r"^op 1 \(RMSNorm\): expected 33 features; got 32"):
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
    with pytest.raises(ValueError, match=r"1 \(Reshape\): expected one tensor; got 2"):
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


@pytest.mark.parametrize("kind", [ops.RMSNorm, ops.LayerNorm])
@pytest.mark.parametrize("centered", [True, False], ids=["zero-centered", "around one"])
@pytest.mark.parametrize("way", ["eager", "watched", "compiled"])
def test_norms_do_not_round_their_factor(kind: Any, centered: bool, way: str):
    """A factor 1 + 2^-9, which bf16 cannot represent, scales an output in bf16: as 1 + weight of a bf16 weight, and as an fp32
    weight. The gradient has the dtype of the weight."""
    norm, one = kind(H, zero_centered_gamma=centered, dtype=torch.bfloat16 if centered else torch.float32), kind(H)
    norm.weight.data += 2**-9
    x = values(0, 64, H).bfloat16()
    torch.compiler.reset()
    call = torch.compile(norm, backend="eager", fullgraph=True) if way == "compiled" else norm
    with Watched() if way == "watched" else nullcontext():
        y = call(x)
        y.float().square().sum().backward()
    ratio = y.double().norm() / one(x).double().norm()
    assert 1 + 2**-10 < ratio < 1 + 2**-8
    assert norm.weight.grad.dtype == norm.weight.dtype


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
    assert_all_bit_equal(last, first)


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
    """An `ops.Sequential` makes a new plan for each state (dtype, training mode, trainable parameters, whether there
    is a backward), and reuses the plan if the state recurs."""
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
    """In a CUDA graph an `ops.Sequential` can run only in states for which it has a plan. In another state it raises
    an error that says to run the ops once before the capture."""
    model, x = mlp("fp8_current"), values(0, M, H)
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
    expected = model(x)
    monkeypatch.setattr(fuser, "capturing", lambda: True)
    assert_bit_equal(model(x), expected)
    for other in (x.bfloat16(), x.clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"^0 \(LayerNorm\) and the following ops have no plan"):
            model(other)
    with dlp.autocast(recipe="bf16"), pytest.raises(ValueError, match="run the ops once before the capture"):
        model(x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_x_that_is_kept_as_it_is_gives_the_same_bits(recipe: str):
    """`save_original_input` changes no bits, whether x is the output of a norm or the input of the model. With the
    option the linear saves x itself. Without the option, it saves x itself only in the bf16 recipe."""
    for inner in ([ops.RMSNorm(H)], []):
        models = [
            ops.Sequential(*copy.deepcopy(inner), linear(recipe, save_original_input=kept)) for kept in (True, False)
        ]
        models[1].load_state_dict(models[0].state_dict())
        for model in models:
            dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
        found, expected = (run(model, dtype=torch.bfloat16) for model in models)
        assert_all_bit_equal(found, expected)
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
    """With main_grads, the gradients of three microbatches have the bits of autograd's sums."""
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
@restored_fusions()
def test_recomputation_gives_the_same_bits(program: str):
    """The second run with recomputation has the bits of a run without recomputation."""
    ops.register_forward_fusion(fuse_scale_add, prepend=True)
    torch.manual_seed(0)
    model = PROGRAMS[program]()
    expected = run(model)
    run(Recomputed(model))
    found = run(Recomputed(model))
    for name, tensor in expected.items():
        assert_bit_equal(found.get(name, found.get(name.replace("d", "dinner.", 1))), tensor, name)  # type: ignore[arg-type]


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


def test_parameters_begin_anew_where_memory_came_later():
    """A user constructs a model on meta, and then calls `reset_parameters` of all modules that have the method, as with
    torch's modules. All parameters then have their initial values."""
    with torch.device("meta"):
        model = ops.Sequential(
            ops.LayerNorm(H), ops.Linear(H, (FFN, FFN)), ops.SwiGLU(), ops.BasicLinear(FFN, H), ops.Bias(H),
            ops.RMSNorm(H, zero_centered_gamma=True),
        )  # fmt: skip
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    found = dict(model.named_parameters())
    for name, value in (("0.weight", 1), ("0.bias", 0), ("4.bias", 0), ("5.weight", 0)):
        assert (found[name] == value).all(), name
    for name, size in (("1.weight_0", H), ("1.bias_1", H), ("3.weight", FFN)):
        assert 0.7 * size**-0.5 < found[name].abs().amax() <= size**-0.5, name


def test_an_op_with_hooks_ends_its_group():
    model, seen = mlp(), list[int]()
    expected = model(values(0, M, H))
    model[2].register_forward_hook(lambda *args: seen.append(1))
    assert_close(model(values(0, M, H)), expected, 0)
    assert seen and "2 (SwiGLU): a module with hooks ends a group" in str(model.plan())


@pytest.mark.parametrize("backward_inside", [False, True], ids=["", "backward inside"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_autocast_gives_x_its_dtype_as_it_does_to_linears(recipe: str, backward_inside: bool):
    """Under torch.autocast, forward and backward have the bits of a run whose x was cast to the dtype of autocast
    before. Gradients have the dtypes of their tensors."""
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
    said = "x is first cast from torch.float32 to torch.bfloat16, by torch.autocast"
    assert said in str(model.plan()) and said not in str(other.plan())
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert_bit_equal(y, expected)
    assert_bit_equal(x.grad, cast.grad.float())  # type: ignore[union-attr]
    for (name, mine), its in zip(model.named_parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.dtype == mine.dtype
        assert_bit_equal(mine.grad, its.grad, name)


def test_a_user_s_quantizer_is_given_a_tensor():
    class Watching(load("fp8_current").x.rowwise.__class__):  # type: ignore[misc]
        def cast(self, x: Tensor, amax: Any, **more: Any) -> Any:
            assert isinstance(x, Tensor)
            return super().cast(x, amax, **more)

        def both(self, x: Tensor, amaxes: Any, **more: Any) -> Any:
            assert isinstance(x, Tensor)
            return super().both(x, amaxes, **more)

    recipe = replace(load("fp8_current"), x=both(Watching()))
    model = ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 32, recipe=recipe))
    model(torch.randn(8, 32, requires_grad=True)).sum().backward()


def test_bias_gradients_are_sums_of_columns():
    """A bias gradient is the sum of dy in fp32, in a fixed order. It is computed only if the bias is trainable."""
    layer, dy = dlp.Linear(32, 64, True, recipe="fp8_current"), torch.randn(300, 64)
    with patch.object(lazy_matrix.Summed, "sums", autospec=True, side_effect=lazy_matrix.Summed.sums) as sums:
        layer(torch.randn(300, 32)).backward(dy)
        assert torch.equal(layer.bias.grad, kernels.column_sums(dy)) and sums.call_count == 1
        layer.bias.requires_grad_(False)
        layer(torch.randn(300, 32)).backward(dy)
        assert sums.call_count == 1


def test_the_gradient_of_a_layer_norms_bias_has_the_dtype_of_the_bias():
    """The weight is bf16 and the bias is fp32. The gradient of the bias must not be rounded to bf16 before it is
    fp32."""
    norm = ops.LayerNorm(H, dtype=torch.bfloat16)
    norm.bias = torch.nn.Parameter(torch.zeros(H))
    sequence, x = ops.Sequential(norm, ops.GELU()), values(0, M, H).bfloat16()
    expected = torch.nn.functional.layer_norm(x.float(), (H,), norm.weight.float(), norm.bias)
    y = torch.nn.functional.gelu(expected, approximate="tanh")
    (whole,) = torch.autograd.grad(y.sum(), norm.bias)
    for run_norm in (sequence, lambda x: torch.nn.functional.gelu(norm.plain(x), approximate="tanh")):
        (found,) = torch.autograd.grad(run_norm(x).float().sum(), norm.bias)
        assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())
        assert (found - whole).norm() < 0.02 * whole.norm()
