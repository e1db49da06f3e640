"""delay_wgrad: delayed gradients, computed by `dlp.backward_dw`, have the bits of ordinary gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dlp
from dlp.parallel.model.grads import local_grad
from dlp.parallel.model.session import session_of
from tests import pool as worker
from tests.cases import BY_SCALES, few
from tests.metrics import assert_all_bit_equal, assert_bit_equal
from tests.net import Net, batch, gradients, net
from tests.refusals import may_raise

DELAY = {"name": "delay", "match": ["blocks.**"], "delay_wgrad": True}
LINEARS = 2 * 3  # linears in two blocks


def grads(model: Net) -> dict[str, Tensor | None]:
    found = {name: local_grad(p) for name, p in model.named_parameters()}
    return {name: None if grad is None else grad.clone() for name, grad in found.items()}


def two_microbatches(recipe: Any, sizes: dict[str, int], delay: bool, each: bool, **options: Any) -> dict[str, Any]:
    """Return the gradients summed over two microbatches ("grads"), the gradients after the first backward and before
    `backward_dw` ("before"), the number of wgrads of each `backward_dw` ("waited"), and the logged differences
    from the plan ("said"). `each`: call `backward_dw` after each microbatch, not only after the second."""
    mesh = worker.mesh(**sizes)
    model = net(recipe, mesh, *([DELAY] if delay else []), dtype=torch.bfloat16, **options)
    waited, before = [], {}
    for step in range(2):
        gradients(model, *batch(step, mesh))
        before = before or grads(model)
        if each or step == 1:
            waited.append(dlp.backward_dw(model))
    return {"grads": grads(model), "before": before, "waited": waited, "said": sorted(session_of(model).noted)}


@pytest.mark.parametrize(
    ("recipe", "sizes", "world"),
    few(
        [*((recipe, {"tp": 1}, 1) for recipe in BY_SCALES), ("fp8_delayed", {"tp": 2}, 2), ("nvfp4", {"tp": 2}, 2)],
        ("fp8_block", "nvfp4"),
    ),
    ids=str,
)
def test_the_bits_are_those_of_wgrads_that_do_not_wait(ranks, recipe, sizes, world):
    expected = ranks(world).run(two_microbatches, recipe, sizes, False, True)
    for each in (True, False):
        for found, reference in zip(
            ranks(world).run(two_microbatches, recipe, sizes, True, each), expected, strict=True
        ):
            assert found["waited"] == ([LINEARS] * 2 if each else [2 * LINEARS]) and reference["waited"] == [0, 0]
            for name, gradient in reference["grads"].items():
                waits = "norm" not in name and "bias" not in name
                assert (found["before"][name] is None) == waits, name
                assert_bit_equal(found["grads"][name], gradient, name)


@pytest.mark.ranks(2)
def test_under_fsdp_nothing_waits_and_the_plan_says_so(ranks):
    for found, expected in zip(*(ranks(2).run(sharded, delay) for delay in (True, False)), strict=True):
        assert found["waited"] == [0, 0]
        assert "wgrad is not delayed under FSDP, which reduces gradients within backward" in found["said"]
        assert_all_bit_equal(found["grads"], expected["grads"])


def sharded(delay: bool) -> dict[str, Any]:
    return two_microbatches("fp8_current", {"dp_shard": 2}, delay, True, fsdp=True)


def compiled_gradients(delay: bool) -> tuple[int, dict[str, Tensor | None]]:
    """Return the number of delayed wgrads, and the gradients. With `delay`, wgrads are delayed and the first block is
    compiled."""
    mesh = worker.mesh(dp_shard=1)
    model = net("fp8_current", mesh, *([DELAY] if delay else []), dtype=torch.bfloat16)
    if delay:
        model.blocks[0].compile(backend="aot_eager", fullgraph=True)
    gradients(model, *batch(0, mesh))
    waited = dlp.backward_dw(model)
    torch._dynamo.reset()
    return waited, grads(model)


@pytest.mark.ranks(1)
@pytest.mark.slow
@pytest.mark.full  # other tests compile blocks, or delay wgrads of captured launches
def test_compiled_blocks_leave_theirs_too(ranks):
    ((now, expected),), ((waited, found),) = (ranks(1).run(compiled_gradients, delay) for delay in (False, True))
    assert (now, waited) == (0, LINEARS)
    assert_all_bit_equal(found, expected)


def forgotten() -> str:
    mesh = worker.mesh(dp_shard=1)
    model = net("fp8_current", mesh, DELAY)
    gradients(model, *batch(0, mesh))
    return may_raise(RuntimeError, model.optimizer.step)


@pytest.mark.ranks(1)
def test_an_optimizer_step_before_it_is_an_error(ranks):
    (said,) = ranks(1).run(forgotten)
    assert "6 wgrads are still delayed, the first of blocks.1.down" in said and "dlp.backward_dw(model)" in said


def after_an_exception() -> tuple[int, dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return the number of wgrads of a backward that raises an exception, and the gradients of a next backward, of this
    model and of a model without the exception."""
    mesh, found = worker.mesh(dp_shard=1), []
    for fails in (True, False):
        model = net("fp8_current", mesh, DELAY)
        if fails:
            with model.blocks[0].register_forward_hook(fail_in_backward):
                assert may_raise(ArithmeticError, gradients, model, *batch(0, mesh))
            found.append(dlp.backward_dw(model))
            model.zero_grad()
        gradients(model, *batch(1, mesh))
        dlp.backward_dw(model)
        found.append(grads(model))
    return tuple(found)


def fail_in_backward(block: torch.nn.Module, args: Any, y: Tensor) -> None:
    def fail(grad: Tensor) -> None:
        raise ArithmeticError("the backward of this block fails")

    y.register_hook(fail)


@pytest.mark.ranks(1)
def test_wgrads_of_a_backward_that_raises_are_dropped(ranks):
    ((waited, found, expected),) = ranks(1).run(after_an_exception)
    assert waited == 0
    assert_all_bit_equal(found, expected)


def without_dx() -> tuple[int, bool]:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, device=worker.device()))
    dlp.convert(model, [{"name": "first", "match": ["0"], "delay_wgrad": True}], worker.mesh(dp_shard=1), batch=(2, 8))
    model(torch.ones(2, 8, 16, device=worker.device())).sum().backward()
    return dlp.backward_dw(model), model[0].weight.grad is not None


@pytest.mark.ranks(1)
def test_a_layer_without_dx_keeps_nobody_waiting(ranks):
    assert ranks(1).run(without_dx) == [(0, True)]


def partial_sum() -> tuple[int, list[tuple[str, ...]]]:
    mesh = worker.mesh(tp=2)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, device=worker.device()))
    plan = dlp.convert(
        model, [{"name": "mix", "match": ["0"], "sequence_parallel": True, "delay_wgrad": True}], mesh, batch=(2, 8)
    )
    x = dlp.scatter_tokens(torch.ones(2, 8, 16, device=worker.device(), requires_grad=True), mesh["tp"])
    dlp.gather_tokens(model(x), mesh["tp"]).sum().backward()
    return dlp.backward_dw(model), [row.notes for row in plan.layers]


def partial_sum_of_an_explicit_layer() -> tuple[int, float, str]:
    """Return the number of delayed wgrads, the element of dw that 2 ranks with 8 tokens of ones have, and the note."""
    mesh = worker.mesh(tp=2)
    layer = dlp.Linear(16, 16, tp=mesh["tp"], sequence_parallel=True, delay_wgrad=True, device=worker.device())
    model = torch.nn.Sequential(layer)
    (said,) = layer.core.session.noted
    dlp.attach(model, torch.optim.SGD(model.parameters()))
    model(torch.ones(8, 16, device=worker.device(), requires_grad=True)).sum().backward()
    return dlp.backward_dw(model), local_grad(layer.weight)[0, 0].item(), said


@pytest.mark.ranks(2)
def test_parts_of_a_sum_over_tp_do_not_wait(ranks):
    for waited, (notes,) in ranks(2).run(partial_sum):
        assert waited == 0 and any("wgrad is not delayed" in note for note in notes)
    for waited, element, said in ranks(2).run(partial_sum_of_an_explicit_layer):
        assert (waited, element) == (0, 2 * 8.0) and said.startswith("Linear: wgrad is not delayed: ")
