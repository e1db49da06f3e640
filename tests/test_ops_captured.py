"""All ops of an `ops.Sequential` run as captured launches on an emulated device. The bits equal those of passes that
are not captured, and each pass is one native call."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlp
from dlp import ops
from dlp.kernels import gemms, reference, table
from dlp.kernels.table import registered
from dlp.parallel.linear.capture import describe
from dlp.runtime.capture import CapturedLaunches
from tests.emulated import emulated  # noqa: F401
from tests.paired_models import K, M, PairedModels, forward_backward

pytestmark = pytest.mark.usefixtures("emulated")


def mlp(recipe: str) -> nn.Module:
    return ops.Sequential(
        ops.RMSNorm(K),
        ops.Linear(K, (K, K), bias=False, recipe=recipe),
        ops.SwiGLU(),
        ops.Linear(K, K, bias=False, recipe=recipe),
    )


def slow_pair(recipe: str, make: Any = mlp, **options: Any) -> PairedModels:
    """Return two equal models with a small learning rate, so that random gradients do not make the weights diverge."""
    pair = PairedModels(lambda: make(recipe), **options)
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["lr"] = 1e-4
    return pair


def recorded(model: nn.Module) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for plan in model._groups_now()[0].plans.values():
        for plan_pass in plan.captured:
            found.setdefault(plan_pass.name, []).extend(plan_pass.captured.found.values())
    return found


@pytest.mark.parametrize("attached", [True, False], ids=["cast at the boundary", "cast at use"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed", "fp8_block"])
def test_captured_ops_give_the_bits_of_the_ops(recipe: str, attached: bool):
    pair = slow_pair(recipe, attached=attached)
    pair.model[0][0].weight.data = pair.model[0][0].weight.data.float()
    pair.other[0][0].weight.data = pair.other[0][0].weight.data.float()
    for seed in range(5):
        pair.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    found = recorded(pair.model[0])
    for pass_name in ("forward", "backward"):
        assert any(isinstance(made, CapturedLaunches) for made in found[pass_name]), found[pass_name]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that gets, for each captured pass, the names of its launches."""
    made, init = list[list[str]](), CapturedLaunches.__init__

    def note(self: Any, launches: Any, *more: Any) -> None:
        made.append([name for name, *_ in launches])
        init(self, launches, *more)

    monkeypatch.setattr(CapturedLaunches, "__init__", note)
    return made


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8"])
def test_both_gradients_of_a_gate_are_cast_in_one_launch(recipe: str, launched: list[list[str]]):
    pair = slow_pair(recipe)
    for seed in range(4):
        pair.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    names = Counter(next(names for names in launched if "rms_norm_backward" in names and "gemm" in names))
    assert sum(count for name, count in names.items() if name.startswith("cast_gate_grads")) == (recipe != "mxfp8")
    observed = names["swiglu_backward"], names["amax"]
    assert observed == {"fp8_current": (1, 1), "mxfp8": (1, 0)}.get(recipe, (0, 0)), names


def test_a_kernel_from_outside_still_casts_each_gradient_of_a_gate(launched: list[list[str]]):
    """If a user has registered a kernel for the cast, this kernel casts the two gradients of the gate separately. dlp
    must not use its own kernel, which casts both in one launch."""
    ours = table.choose("cast_fp8_block_both", torch.zeros(1, 1), (1, 128), torch.float8_e4m3fn)
    with registered(replace(ours, name="mine", run=lambda *given, **more: ours.run(*given, **more))):
        pair = slow_pair("fp8_block")
        for seed in range(4):
            pair.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    assert launched and not any(name.startswith("cast_gate_grads") for names in launched for name in names)


def test_an_op_that_torch_computes_is_called_alone():
    """No kernel of dlp computes a sum, so the captured pass is one call of torch."""
    alone, x, extra = ops.AddExtraInput(), torch.randn(M, K), torch.randn(M, K)
    fuser = ops.Sequential(alone)
    for model in (alone, fuser):
        for _ in range(4):
            a, b = x.clone().requires_grad_(), extra.clone().requires_grad_()
            y = model(a, b)
            y.backward(x)
            assert torch.equal(y, x + extra) and torch.equal(a.grad, x) and torch.equal(b.grad, x)
    forward = [made for made in recorded(fuser)["forward"] if isinstance(made, CapturedLaunches)]
    assert [made.segments for made in forward] == ["C"]


@pytest.mark.parametrize("swapped", ["**", "0.1"], ids=["all", "another layer"])
def test_a_swap_forgets_what_was_captured(swapped: str):
    """After a recipe change of any layer all layers are captured again, because their delayed scales move to a new table."""
    pair = slow_pair("fp8_delayed", make=lambda recipe: nn.Sequential(mlp(recipe), dlp.Linear(K, K, recipe=recipe)))
    for seed in range(8):
        if seed == 4:
            for model in (pair.model, pair.other):
                dlp.set_recipe(model, swapped, {"name": "fp8_delayed", "margin": 1})
        pair.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    assert torch.isfinite(pair.model[0][0][1].weight_0).all()


SLOW_ACTS = [pytest.param(act, marks=pytest.mark.slow) for act in ("relu", "srelu", "silu", "reglu", "glu")]


@pytest.mark.parametrize("act", ["gelu", "geglu", *SLOW_ACTS])
def test_norms_and_activations_are_launched_with_the_rest(act: str):
    norm = "LayerNorm" if act == "gelu" else "RMSNorm"

    def make() -> nn.Module:
        return ops.LayerNormMLP(K, K, bias=False, normalization=norm, activation=act, recipe="fp8_current")

    pair = PairedModels(make)
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["lr"] = 1e-5
    for model in (pair.model, pair.other):
        model[0][0].float()
    for seed in range(4):
        pair.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    found = recorded(pair.model[0])
    assert all(any(isinstance(made, CapturedLaunches) for made in found[way]) for way in ("forward", "backward")), found


class Branches(nn.Module):
    """Two `ops.Sequential`: the first returns the output of its norm as an extra output, and the GEMM of the second
    adds into this tensor."""

    def __init__(self, bias: bool, recipe: str) -> None:
        super().__init__()
        self.first = ops.Sequential(
            ops.RMSNorm(K, zero_centered_gamma=True),
            ops.MakeExtraOutput(in_place=True),
            ops.Linear(K, (K, K), bias=bias, recipe=recipe),
            ops.SwiGLU(),
        )
        self.last = ops.Sequential(ops.Linear(K, K, bias=bias, recipe=recipe), ops.AddExtraInput(in_place=True))

    def forward(self, x: Tensor) -> Tensor:
        y, residual = self.first(x)
        residual = residual.clone()
        y = self.last(y, residual)
        assert residual._version == 1 and residual.grad_fn is y.grad_fn, (
            "autograd must know that residual was written to"
        )
        return y  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_residuals_and_biases_are_launched_with_the_rest(recipe: str, bias: bool):
    pair = slow_pair(recipe, make=lambda recipe: Branches(bias, recipe))
    for model in (pair.model, pair.other):
        model[0].first[0].weight.data = model[0].first[0].weight.data.float()
    for seed in range(4):
        pair.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    for part in (pair.model[0].first, pair.model[0].last):
        assert "captured: forward, native calls: 1" in part.plan().lines[0]
        assert "op by op" not in part.plan().lines[0], "a sum of torch is called between launches"
    assert describe(pair.model) == ["forward: captured in 2 layers", "backward: captured in 2 layers"]


class Added(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.inner = ops.Sequential(
            ops.AddExtraInput(), ops.MakeExtraOutput(), ops.RMSNorm(K), ops.Linear(K, K, bias=False, recipe=recipe)
        )

    def forward(self, x: Tensor) -> Tensor:
        y, total = self.inner(x, 2.0 * x)
        return y + total  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_block"])
def test_a_sum_and_its_norm_are_one_launch(recipe: str):
    pair = slow_pair(recipe, make=Added)
    for model in (pair.model, pair.other):
        model[0].inner[2].float()
    for seed in range(4):
        pair.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    plan = pair.model[0].inner.plan().lines[0]
    assert "forward  ForwardAddNorm[AddExtraInput, MakeExtraOutput, RMSNorm] | Linear" in plan
    assert plan.count("native calls: 1") == 2 and "op by op" not in plan, plan


def test_wgrads_that_wait_are_left_behind_the_launches():
    """With `delay_wgrad`, passes are captured without the wgrads, which `backward_dw` computes afterwards."""

    def make(recipe: str) -> nn.Module:
        model = mlp(recipe)
        for linear in (model[1], model[3]):
            spec = linear.core.spec
            linear.core.set_spec(replace(spec, options=replace(spec.options, delay_wgrad=True)))
        return model

    def run(model: nn.Module, seed: int) -> dict[str, Tensor]:
        found = forward_backward(model, seed, (M,))
        assert model[0][1].weight_0.grad is None and dlp.backward_dw(model) == 3
        return found | {f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}

    pair = slow_pair("fp8_current", make=make)
    for model in (pair.model, pair.other):
        model[0][0].weight.data = model[0][0].weight.data.float()
    for seed in range(4):
        pair.step(run, seed)
    assert str(pair.model[0].plan()).count("native calls: 1") == 2


@pytest.mark.parametrize("mode", ["grad", "main_grad"])
def test_wgrads_are_added_by_launches_where_they_are(mode: str):
    def run(model: nn.Module, seed: int) -> dict[str, Tensor]:
        for i in range(6):
            for parameter in model.parameters():
                parameter.overwrite_main_grad = i == 4
                parameter.grad_added_to_main_grad = False
            found = forward_backward(model, seed, (M,))
        if mode == "main_grad":
            assert model[0][3].weight.grad_added_to_main_grad
            found |= {
                f"m{name}": p.main_grad.clone() for name, p in model.named_parameters() if hasattr(p, "main_grad")
            }
        return found

    pair = slow_pair("bf16", dtype=torch.float32, attached=False)
    for model, optimizer in zip((pair.model, pair.other), pair.optimizers, strict=True):
        if mode == "main_grad":
            for linear in (model[0][1], model[0][3]):
                for parameter in linear.parameters():
                    parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        dlp.attach(model, optimizer, main_grads=mode)
    pair.step(run, 0)
    assert str(pair.model[0].plan()).count("native calls: 1") == 2, pair.model[0].plan()


def test_what_no_launch_does_is_said():
    model = ops.Sequential(ops.RMSNorm(K), ops.Linear(K, K, bias=False), ops.Dropout(0.1)).bfloat16()
    model(torch.zeros(M, K, dtype=torch.bfloat16))
    assert model.plan().lines[0].endswith("op by op: forward: 2 (Dropout): it computes by torch")


PACKAGE, REFERENCE = (f"{Path(each.__file__).parent}{os.sep}" for each in (dlp, reference))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_four_captured_ops_are_few_calls_of_python(recipe: str):
    """The replayed forward and backward of four fused ops make at most 60 calls of Python functions of dlp, and less than
    1.6 times as many calls as those of one linear."""

    def calls(model: nn.Module) -> int:
        dlp.attach(model.bfloat16(), torch.optim.SGD(model.parameters(), 0.0))
        count = Counter[bool]()

        def seen(frame: Any, event: str, argument: Any) -> None:
            # inner: comprehensions and lambdas, which do not count, because newer Pythons inline comprehensions
            where, inner = frame.f_code.co_filename, frame.f_code.co_name.startswith("<")
            count[event == "call" and where.startswith(PACKAGE) and not (inner or where.startswith(REFERENCE))] += 1

        with torch.autograd.set_multithreading_enabled(False):
            for seed in range(6):
                sys.setprofile(seen if seed == 5 else None)
                forward_backward(model, seed, (M,))
                sys.setprofile(None)
                dlp.end_step(model)
        return count[True]

    alone = nn.Sequential(dlp.Linear(K, K, bias=False, recipe=recipe))
    found = calls(mlp(recipe)), calls(alone)
    assert found[0] <= 60 and found[0] < 1.6 * found[1], f"{found}: a call reads from the ops what the FuserCall stores"


SET = {  # attribute of an op between two linears -> (function that makes the op, new value)
    "eps": (lambda: ops.RMSNorm(K), 0.5),
    "zero_centered_gamma": (lambda: ops.LayerNorm(K), True),
    "scale": (lambda: ops.ConstantScale(2.0), 3.0),
}


@pytest.mark.parametrize("name", SET)
def test_an_op_that_is_set_otherwise_forgets_what_was_captured(name: str):
    make, value = SET[name]
    pair = slow_pair("fp8_current", lambda recipe: ops.Sequential(
        ops.Linear(K, K, bias=False, recipe=recipe), make(), ops.Linear(K, K, bias=False, recipe=recipe)
    ))  # fmt: skip
    before = len(pair.model[0][0].core.bound.calls)
    for seed in range(8):
        if seed == 4:
            for model in (pair.model, pair.other):
                setattr(model[0][1], name, value)
        pair.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    found = recorded(pair.model[0])
    assert all(isinstance(made, CapturedLaunches) for made in (*found["forward"], *found["backward"]))
    assert len(pair.model[0][0].core.bound.calls) == before + 2  # the two passes of one plan


def test_an_extra_input_that_is_x_is_another_call():
    """If the extra input is x itself, launches are captured separately, because launches that were recorded for
    two tensors cannot be replayed for one."""

    def run(model: nn.Module, seed: int) -> dict[str, Tensor]:
        x, extra = (torch.randn(M, K, generator=torch.Generator().manual_seed(seed + i)).bfloat16() for i in (0, 99))
        x, extra = x.requires_grad_(), (x if seed % 2 else extra).requires_grad_()
        model.zero_grad()
        y = model[0](x, extra)
        y.backward(torch.ones(M, K, dtype=torch.bfloat16))
        return {"y": y, "dx": x.grad, "d extra": extra.grad}  # type: ignore[dict-item]

    pair = slow_pair("fp8_current", lambda recipe: ops.Sequential(
        ops.RMSNorm(K), ops.Linear(K, K, bias=False, recipe=recipe), ops.AddExtraInput()
    ))  # fmt: skip
    for seed in range(8):
        pair.step(run, seed)
    captured = [isinstance(made, CapturedLaunches) for made in recorded(pair.model[0])["forward"]]
    assert captured == [False, True, True]  # first call, which casts weights; two tensors; one tensor


def test_gemms_that_round_to_tf32_are_other_launches(monkeypatch: pytest.MonkeyPatch):
    model, x = ops.Sequential(ops.RMSNorm(K), ops.Linear(K, K, bias=False)), torch.ones(M, K)
    with torch.no_grad():
        for rounds in (False, True, False):
            monkeypatch.setattr(gemms, "tf32", lambda its=rounds: its)
            for _ in range(3):
                model(x)
    (plan,) = model._groups_now()[0].plans.values()
    found = plan.captured[0].captured.found.values()
    assert [isinstance(made, CapturedLaunches) for made in found] == [True, True]


def test_a_thread_that_captures_a_direction_beside_another():
    """If two threads are ready to capture a pass, the first thread captures, and the second replays. The test has one
    thread: the call of the first thread runs inside of the call of the second."""
    model, x = mlp("fp8_current").bfloat16(), torch.zeros(M, K, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        (plan,) = model._groups_now()[0].plans.values()
        passes = plan.captured[0].captured
        run = passes.run

        def late(*given: Any) -> Any:
            passes.run = run
            assert torch.equal(model(x), expected)  # the other thread has captured the pass
            return run(*given)

        passes.run = late
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)


def test_saved_tensors_that_come_back_otherwise_are_read_as_they_are():
    """Code that offloads saved tensors may restore them with other strides. Backward must read these tensors with their
    strides, although launches were captured for other strides."""

    def back(saved: Tensor) -> Tensor:
        return saved.t().contiguous().t() if saved.dim() == 2 else saved.clone()

    def run(model: nn.Module, seed: int) -> dict[str, Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), back) if seed > 3 else nullcontext():
            return forward_backward(model, seed, (M,))

    pair = slow_pair("fp8_current")
    for model in (pair.model, pair.other):
        model[0][0].float()
    for seed in range(7):
        pair.step(run, seed)


def test_a_forward_that_records_is_another_one():
    """A forward with gradients enabled records amaxes for delayed scales, and a forward under no_grad does not. The two
    have separate plans, even if no tensor needs a gradient."""
    model = ops.Sequential(ops.Linear(K, K, bias=False, recipe="fp8_delayed")).bfloat16().requires_grad_(False)
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
    model(torch.zeros(M, K, dtype=torch.bfloat16))
    with torch.no_grad():
        model(torch.zeros(M, K, dtype=torch.bfloat16))
    assert len(model._groups_now()[0].plans) == 2


class HandedOver(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.quantize = ops.Sequential(ops.Quantize(recipe=recipe))
        self.linear = ops.Sequential(ops.Linear(K, K, bias=False, recipe=recipe))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.quantize(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_x_that_came_quantized_is_read_by_each_call_anew(recipe: str):
    pair = slow_pair(recipe, HandedOver)
    for seed in range(5):
        pair.step(lambda model, seed: forward_backward(model, seed, (M,)), seed)
    found = recorded(pair.model[0].linear)
    assert not any(isinstance(made, CapturedLaunches) for made in found["forward"])
    assert any(isinstance(made, CapturedLaunches) for made in found["backward"])
