"""Stochastic rounding in layers: random bits depend only on the position, the tensor and the microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.parallel.linear.modules import Linear
from dlp.parallel.linear.quantize import quantize
from dlp.parallel.model.invariant import InvariantSession
from dlp.parallel.model.session import session_of
from tests import pool as worker
from tests.cases import matrix
from tests.metrics import assert_bit_equal
from tests.net import net, train, weights

SIZE = 64


def layer(**options: Any) -> Linear:
    torch.manual_seed(0)
    return Linear(SIZE, SIZE, recipe=dlp.recipe("nvfp4", **options))


def weight_grad(linear: Linear, recompute: bool = False) -> Tensor:
    """Run a microbatch, always with the same x and dy, and return the weight gradient."""
    linear.weight.grad = None
    x = matrix("gauss", SIZE, SIZE, 1).requires_grad_()
    y = checkpoint(linear, x, use_reentrant=False) if recompute else linear(x)
    y.backward(matrix("gauss", SIZE, SIZE, 2))
    assert linear.weight.grad is not None
    return linear.weight.grad


def test_each_microbatch_draws_fresh_bits_and_a_repeated_run_the_same():
    first, again = layer(), layer()
    grads = [weight_grad(first) for _ in range(3)]
    assert not any(torch.equal(grads[i], grads[j]) for i in range(3) for j in range(i))
    for grad in grads:
        assert_bit_equal(weight_grad(again), grad)


def test_evaluation_draws_nothing_and_recomputation_the_same_bits():
    plain, other = layer(), layer()
    for _ in range(2):
        with torch.no_grad():
            other(torch.ones(SIZE, SIZE))
        assert_bit_equal(weight_grad(other, recompute=True), weight_grad(plain))


@pytest.mark.parametrize(("attached", "recompute"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("make", [layer, lambda: dlp.ops.Sequential(dlp.ops.GELU(), layer())], ids=["layer", "ops"])
def test_the_counter_is_copied_only_for_a_pending_backward(monkeypatch, make, attached, recompute):
    """Copies would take host time in each forward, so the counter is copied only when another forward begins before the
    backward."""
    copies, clone = list[Tensor](), Tensor.clone

    def watched(self: Tensor, **options: Any) -> Tensor:
        if self.dtype == torch.int64 and self.dim() == 0:
            copies.append(self)
        return clone(self, **options)

    monkeypatch.setattr(Tensor, "clone", watched)
    model = torch.nn.Sequential(make())
    if attached:
        dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = matrix("gauss", SIZE, SIZE, 1).requires_grad_()

    def run() -> Tensor:
        return checkpoint(model, x, use_reentrant=False) if recompute else model(x)

    for _ in range(4):
        run().backward(matrix("gauss", SIZE, SIZE, 2))
    assert not copies
    y = run()
    run().backward(matrix("gauss", SIZE, SIZE, 2))
    assert len(copies) == 1
    y.backward(matrix("gauss", SIZE, SIZE, 2))


class Interrupt(TorchDispatchMode):
    """Dispatch mode that raises KeyboardInterrupt in the backward of a linear."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if "linear_bwd" in str(function):
            raise KeyboardInterrupt
        return function(*arguments, **(options or {}))


def fails_in_backward(model: torch.nn.Module, y: Tensor) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt():
        y.backward(matrix("gauss", SIZE, SIZE, 2), retain_graph=True)


def traces_with_fake_tensors(model: torch.nn.Module, y: Tensor) -> None:
    make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(SIZE, SIZE))


def ends_an_invariant_step(model: torch.nn.Module, y: Tensor) -> None:
    """End a step as one of two ranks: the end of a step counts the microbatch of the other rank, too."""
    session_of(model).end_step()


@pytest.mark.parametrize("event", [fails_in_backward, traces_with_fake_tensors, ends_an_invariant_step])
def test_pending_backwards_keep_their_bits_after(event):
    grads = []
    for pending in (False, True):
        model = torch.nn.Sequential(layer())
        dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
        session = session_of(model)
        if event is ends_an_invariant_step:
            session.__class__, session.place = InvariantSession, (0, 2)
        x = matrix("gauss", SIZE, SIZE, 1).requires_grad_()
        ys = [model(x), model(x)]
        if pending:
            event(model, ys[0])
        ys.append(model(x))
        for y in ys[:2]:
            model.zero_grad()
            y.backward(matrix("gauss", SIZE, SIZE, 2))
            grads.append(model[0].weight.grad)
    assert not torch.equal(grads[0], grads[1])
    for found, expected in zip(grads[2:], grads[:2], strict=True):
        assert_bit_equal(found, expected)


@pytest.mark.parametrize("attached", [True, False])
def test_evaluation_of_a_model_draws_nothing(attached):
    """Attached models and layers without a model count microbatches in different code, so both are tested."""
    models = [torch.nn.Sequential(layer()) for _ in range(2)]
    for model in models:
        dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
        if not attached:
            session_of(model).attached = False
    plain, other = models
    for _ in range(2):
        with torch.no_grad():
            other(torch.ones(SIZE, SIZE))
        grads = []
        for model in models:
            model.zero_grad()
            model(matrix("gauss", SIZE, SIZE, 1)).backward(matrix("gauss", SIZE, SIZE, 2))
            grads.append(model[0].weight.grad)
        assert_bit_equal(*grads)
    assert int(session_of(plain).counter) == int(session_of(other).counter) == 2


@pytest.mark.slow
def test_the_gradient_is_unbiased_and_with_rounding_to_nearest_it_is_not():
    """For x = identity matrix, dw is dy.T. One element 6.0 in each block makes the scale 1, so that 0.6 is between the
    representable values 0.5 and 1."""
    x, dy = torch.eye(SIZE), torch.full((SIZE, SIZE), 0.6)
    dy[::16] = 6.0
    bias = {}
    for disabled, draws in ((False, 256), (True, 1)):  # rounding to nearest gives the same result each time
        linear = layer(disable_stochastic_rounding=disabled, disable_rht=True)
        for _ in range(draws):
            linear(x).backward(dy)
        assert linear.weight.grad is not None
        error = linear.weight.grad.double() / draws - dy.t().double()
        bias[disabled] = error[:, torch.arange(SIZE) % 16 != 0].mean().item()
    deviation = 0.2 / (256 * SIZE * SIZE) ** 0.5
    assert abs(bias[False]) < 0.5 / 256 + 4 * deviation, bias
    assert bias[True] == pytest.approx(-0.1), bias


def test_seed_and_name_choose_the_bits():
    grads = []
    for name, seed in (("a", 0), ("b", 0), ("a", 1), ("a", 0)):
        model = torch.nn.ModuleDict({name: layer()})
        dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=seed)
        session_of(model).advance()
        grads.append(weight_grad(model[name]))
    assert_bit_equal(grads[3], grads[0])
    assert not torch.equal(grads[1], grads[0]) and not torch.equal(grads[2], grads[0])


@pytest.mark.parametrize("way", ["row", "col"])
def test_data_parallel_ranks_draw_the_bits_of_their_own_tokens(way):
    dy = matrix("gauss", 2 * SIZE, SIZE, 3)
    dy[[0, SIZE]] = dy.abs().amax()  # both halves have the same amax
    linear = layer(disable_rht=True)

    def codes(values: Tensor, dp: tuple[int, int]) -> Tensor:
        linear.core.session.dp = dp  # only this test changes `dp` of a session, so it must clear the cache
        linear.core.bound.cache.clear()
        (made,) = quantize(linear.core.bound, "dy", [values], (way == "row", way == "col"))
        return made.at(columnwise=way == "col").payload

    whole = codes(dy, (0, 1))
    halves = [codes(half, (rank, 2)) for rank, half in enumerate(dy.chunk(2))]
    assert_bit_equal(torch.cat(halves, 0 if way == "row" else 1), whole)
    strangers = [codes(half, (0, 2)) for half in dy.chunk(2)]
    assert not torch.equal(torch.cat(strangers, 0 if way == "row" else 1), whole)


@pytest.mark.ranks(4)
def test_a_network_rounds_alike_however_it_is_cut(ranks):
    """All ranks share all scales, so weights after some steps differ only by the order of sums."""
    recipe = {"name": "nvfp4", "amax_scope": "all", "disable_rht": True}
    (one,) = ranks(1).run(trained, recipe, {"tp": 1})
    (other,) = ranks(1).run(trained, recipe, {"tp": 1}, 1)
    spread = distance(other, one)
    for world, sizes in ((2, {"tp": 2}), (4, {"tp": 4})):
        for result in ranks(world).run(trained, recipe, sizes):
            assert distance(result, one) < 0.1 * spread, (sizes, distance(result, one), spread)


def trained(recipe: dict[str, Any], sizes: dict[str, int], seed: int = 0) -> dict[str, Tensor]:
    mesh = worker.mesh(**sizes)
    model = net(recipe, mesh, seed=seed)
    train(model, mesh, range(1))
    return weights(model)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum((a[name] - b[name]).norm().item() for name in a)
