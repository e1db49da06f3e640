"""attach(main_grads=...): gradients that the wgrad GEMM accumulates have the bits of autograd's sums.

The tests run with and without captured launches, with delayed wgrads and with recomputation. Where the GEMM cannot
accumulate, autograd accumulates, and the plan has a note. No ranks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.parallel.linear import functional
from dlp.parallel.linear.spec import LayerOptions
from dlp.parallel.model.session import session_of
from dlp.runtime.capture import CapturedLaunches
from tests.cases import RECIPES
from tests.emulated import emulated  # noqa: F401
from tests.metrics import assert_all_bit_equal, assert_bit_equal
from tests.paired_models import programs, values

K, N, M = 128, 256, 128
MICROBATCHES = 3


def linear(recipe: str = "fp8_current", **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(dlp.Linear(K, N, recipe=recipe, **options))


def attached(model: nn.Module, main_grads: str = "off") -> nn.Module:
    model = copy.deepcopy(model)
    model.optimizer = torch.optim.SGD(model.parameters(), 0.1)  # type: ignore[assignment]
    dlp.attach(model, model.optimizer, main_grads=main_grads)  # type: ignore[arg-type]
    return model


def step(model: nn.Module, seed: int, call: Callable[..., Any] = lambda model, x: model(x)) -> dict[str, Tensor]:
    """Run all microbatches of one optimizer step, then the optimizer step. Return dx of each microbatch, and the
    weight gradients."""
    found = {}
    for micro in range(MICROBATCHES):
        x = values(10 * seed + micro, M, K).requires_grad_()
        ys = call(model, x)
        ys = ys if isinstance(ys, tuple) else (ys,)
        torch.autograd.backward(ys, [values(100 + micro + i, *y.shape) for i, y in enumerate(ys)])
        found[f"dx{micro}"] = x.grad
    dlp.backward_dw(model)
    found |= {f"d{name}": p.grad.clone() for name, p in model.named_parameters()}
    model.optimizer.step()
    model.optimizer.zero_grad()
    return found


class Adds:
    """Count, in `count`, the wgrad GEMMs that accumulate into a gradient."""

    def __init__(self) -> None:
        self.count, contract = 0, functional.contract_gemm

        def counted(*args: Any) -> Tensor:
            self.count += len(args) > 6 and args[6] is not None
            return contract(*args)

        self.patch = patch.object(functional, "contract_gemm", counted)

    def __enter__(self) -> Adds:
        self.patch.start()
        return self

    def __exit__(self, *args: Any) -> None:
        self.patch.stop()


def recomputed(model: nn.Module, x: Tensor) -> Any:
    return checkpoint(model, x, use_reentrant=False)


CASES = {"alone": N, "siblings": (N, K), "padded": 136, "recomputed": N, "waiting": N}


@pytest.mark.parametrize(
    ("recipe", "case"),
    [*((recipe, "alone") for recipe in RECIPES), *(("fp8_current", case) for case in CASES if case != "alone")],
)
def test_sums_have_autograds_bits(recipe: str, case: str):
    torch.manual_seed(0)
    model = nn.Sequential(dlp.Linear(K, CASES[case], bias=True, recipe=recipe))
    plain, adding = attached(model), attached(model, "grad")
    for each in (plain, adding):
        core = each[0].core
        core.set_spec(replace(core.spec, options=LayerOptions(delay_wgrad=case == "waiting")))
    call = recomputed if case == "recomputed" else nn.Module.__call__
    with Adds() as adds:
        expected = [step(plain, seed, call) for seed in range(2)]
        assert adds.count == 0
        for seed in range(2):
            assert_all_bit_equal(step(adding, seed, call), expected[seed])
    assert adds.count == 2 * (2 if case == "siblings" else 1) * (MICROBATCHES - 1)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_block"])
def test_captured_directions_add(recipe: str):
    """Replays of captured passes accumulate correctly although the gradients have new addresses in each step."""
    model = linear(recipe)
    plain, adding = attached(model), attached(model, "grad")
    held = []
    for seed in range(3):
        held.append(torch.empty(N, K))
        assert_all_bit_equal(step(adding, seed), step(plain, seed))
    backward = [made for made in programs(adding)["backward"] if isinstance(made, CapturedLaunches)]
    assert len(backward) == 3, "with a gradient to add to, before the boundary casts weights and after, and without one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_megatrons_main_grad(dtype: torch.dtype):
    model = linear()
    plain, adding = attached(model), attached(model, "main_grad")
    weight = adding[0].weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(N, K, dtype=dtype), False
    weight.overwrite_main_grad = True
    dw = [torch.autograd.grad(plain(values(i, M, K)), weight_of(plain), values(9, M, N))[0] for i in range(3)]
    expected = torch.ones(N, K)
    for i in range(3):
        adding(values(i, M, K)).backward(values(9, M, N))
        expected = dw[0].to(dtype) if i == 0 else (expected.float() + dw[i]).to(dtype)
        assert_bit_equal(weight.main_grad, expected)
        assert weight.grad is None and weight.grad_added_to_main_grad is True
        weight.overwrite_main_grad = False
    weight.zero_out_wgrad = True
    adding(values(0, M, K)).backward(values(9, M, N))
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(
    "recipe", ["bf16", "qat"], ids=["by the GEMM", "after the GEMM"]
)  # fmt: skip
def test_a_main_grad_is_overwritten_where_that_is_asked(recipe: str):
    """With `overwrite_main_grad` the old content of main_grad is replaced. In bf16 the GEMM itself overwrites
    main_grad. In qat, the elements of the GEMM's result with clipped codes are first set to 0, and the result then
    replaces main_grad."""
    model = linear(recipe)
    plain, adding = attached(model), attached(model, "main_grad")
    weight = weight_of(adding)
    weight.main_grad, weight.overwrite_main_grad = torch.full((N, K), 7.0), True
    for i in range(2):
        (expected,) = torch.autograd.grad(plain(values(i, M, K)), weight_of(plain), values(9, M, N))
        adding(values(i, M, K)).backward(values(9, M, N))
        assert_bit_equal(weight.main_grad, expected.float())


def test_a_hook_of_a_parameter_is_given_its_gradient():
    """If a weight has a hook, autograd accumulates instead of the GEMM, so that the hook gets the gradient and can
    replace it."""
    model = linear()
    plain, adding = attached(model), attached(model, "grad")
    found: dict[str, list[Tensor]] = {"plain": [], "adding": []}
    for name, each in (("plain", plain), ("adding", adding)):
        weight_of(each).register_hook(lambda grad, name=name: found[name].append(grad.clone()) or 2 * grad)
        for i in range(3):
            each(values(i, M, K)).backward(values(9, M, N))
    for a, b in zip(found["adding"], found["plain"], strict=True):
        assert_bit_equal(a, b)
    assert len(found["plain"]) == 3
    assert_bit_equal(weight_of(adding).grad, weight_of(plain).grad)


def weight_of(model: nn.Module) -> Tensor:
    return model[0].weight  # type: ignore[index]


def test_a_main_grad_that_does_not_fit_is_refused_by_name():
    adding = attached(linear(), "main_grad")
    weight_of(adding).main_grad = torch.zeros(K, N)
    refusal = "0: main_grad must be contiguous, fp32 or bf16, and [256, 128] on this rank; got float32 [128, 256]"
    with pytest.raises(ValueError, match=f"^{re.escape(refusal)}$"):
        adding(values(0, M, K)).backward(values(9, M, N))
    with pytest.raises(ValueError, match="^main_grads must be one of off, grad, main_grad; got 'on'$"):
        attached(linear(), "on")


def test_gradients_that_are_taken_are_not_added():
    """torch.autograd.grad, and a backward with `inputs`, must not accumulate into the gradients of weights."""
    adding = attached(linear(), "grad")
    weight = weight_of(adding)
    adding(values(0, M, K)).backward(values(9, M, N))
    before = weight.grad.clone()
    (dw,) = torch.autograd.grad(adding(values(0, M, K)), weight, values(9, M, N))
    assert_bit_equal(dw, before)
    x = values(0, M, K).requires_grad_()
    adding(x).backward(values(9, M, N), inputs=[x])
    assert_bit_equal(weight.grad, before)


def test_what_autograd_adds_the_plan_says():
    def notes(model: nn.Module) -> str:
        return " ".join(sorted(session_of(attached(model, "grad")).noted))

    tied = nn.Sequential(dlp.Linear(K, K, recipe="bf16"), dlp.Linear(K, K, recipe="bf16"))
    tied[1].weight = tied[0].weight
    assert "autograd accumulates the gradients of 0 and 1 more: several modules share the weights" in notes(tied)
    assert "autograd accumulates the gradients of 0: the gradients are bfloat16, not fp32" in notes(linear().bfloat16())
    frozen = linear()
    weight_of(frozen).requires_grad_(False)
    assert "autograd accumulates the gradients of 0: the weights do not require gradients" in notes(
        nn.Sequential(frozen[0], dlp.Linear(N, K))
    )
    assert notes(linear()) == ""
