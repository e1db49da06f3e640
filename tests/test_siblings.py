"""The first sibling that is called computes the outputs of all siblings. The other siblings return these outputs, or
compute again if the outputs would be wrong, for example because x has changed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dlp
from dlp.parallel.linear.modules import ConvertedLinear, LinearCore, Member
from dlp.parallel.linear.spec import LinearSpec, Overlaps
from dlp.parallel.model.session import Session
from dlp.parallel.style import LOCAL
from dlp.quant.recipe import load
from tests.metrics import assert_bit_equal, assert_close

NAMES = ("q", "k", "v")


class Three(nn.Module):
    """Siblings q, k and v that read one x, as conversion makes them, on one rank."""

    def __init__(self, recipe: str = "bf16") -> None:
        super().__init__()
        torch.manual_seed(0)
        for i, name in enumerate(NAMES):
            self.add_module(name, nn.Linear(16, 16, bias=False))
            getattr(self, name).__class__ = ConvertedLinear
            vars(getattr(self, name)).update(name=name, index=i)
        members = [Member(getattr(self, name), "weight", "bias") for name in NAMES]
        self.runs = 0
        self.core = Counted(
            LinearSpec("q and siblings", LOCAL, load(recipe), Overlaps.named("serial"), members=NAMES),
            Session(lone=True),
            members,
        )
        for name in NAMES:
            getattr(self, name).core = self.core

    def exact(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, getattr(self, name).weight)


class Counted(LinearCore):
    """Layer that counts its computations."""

    runs = 0

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.runs += 1
        return super().__call__(*inputs)


@pytest.fixture
def three() -> Three:
    return Three()


def values(seed: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def test_all_are_computed_once(three):
    x = values(0)
    for name in NAMES:
        assert_close(getattr(three, name)(x), three.exact(name, x), 1e-5)
    assert three.core.runs == 1
    assert three.core.shared._of_thread == {}, "x is kept although everything was collected"


def test_one_without_gradients_leaves_the_others_theirs(three):
    x = values(0)
    with torch.no_grad():
        q = three.q(x)
    k, v = three.k(x), three.v(x)
    assert (q.requires_grad, k.requires_grad, v.requires_grad) == (False, True, True)
    assert three.core.runs == 2
    (k.sum() + v.sum()).backward()
    assert three.q.weight.grad is None or not three.q.weight.grad.any()
    assert three.k.weight.grad.any() and three.v.weight.grad.any()


def test_x_changed_in_place_is_another_x(three):
    x = values(0)
    three.q(x)
    x.copy_(values(1))  # a static buffer, overwritten before k and v were called
    assert_close(three.k(x), three.exact("k", values(1)), 1e-5)
    x.mul_(3)
    assert_close(three.v(x), three.exact("v", 3 * values(1)), 1e-5)


def test_a_region_is_not_left_with_what_was_computed_in_it(three):
    x = values(0)
    with dlp.autocast(recipe="fp8_current"):
        three.q(x)
    assert_bit_equal(three.k(x), three.exact("k", x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert three.v(x).dtype == torch.bfloat16


def test_a_step_and_a_load_forget_what_nobody_collected(three):
    optimizer = torch.optim.SGD(three.parameters(), lr=0.1)
    dlp.attach(three, optimizer)
    x = values(0)
    three.q(x).sum().backward()
    optimizer.step()
    three.q.load_state_dict({"weight": torch.ones(16, 16)})
    assert_close(three.q(x), x.sum(1, keepdim=True).expand(8, 16), 1e-5)
    three.k.load_state_dict({"weight": torch.ones(16, 16)})
    assert_close(three.k(x), x.sum(1, keepdim=True).expand(8, 16), 1e-5)
    optimizer.step()
    assert three.core.shared._of_thread == {}


def test_in_inference_mode_all_are_computed_once(three):
    with torch.inference_mode():
        x = values(0)
        for name in NAMES:
            assert_close(getattr(three, name)(x), three.exact(name, x), 1e-5)
    assert three.core.runs == 1


def test_another_tensor_is_refused_by_name(three):
    three.q(values(0))
    with pytest.raises(ValueError, match="k: siblings must read the same tensor, but x differs"):
        three.k(values(0))


@pytest.mark.parametrize("hooked", NAMES)
def test_a_full_backward_hook_on_one_changes_nothing(three, hooked):
    """For a module with a full backward hook, torch passes another tensor object with the memory of x. The siblings
    must recognize this tensor as x."""
    expected, seen = values(0).requires_grad_(), []
    sum(3**i * three.exact(name, expected).sum() for i, name in enumerate(NAMES)).backward()
    gradients = {name: getattr(three, name).weight.grad.clone() for name in NAMES}
    three.zero_grad()
    getattr(three, hooked).register_full_backward_hook(lambda module, given, grads: seen.append(given[0]))
    for _ in range(2):
        x = values(0).requires_grad_()
        sum(3**i * getattr(three, name)(x).sum() for i, name in enumerate(NAMES)).backward()
        assert_close(x.grad, expected.grad, 1e-5)
    own = 3 ** NAMES.index(hooked) * torch.ones(8, 16) @ getattr(three, hooked).weight
    assert_close(seen[0], own, 1e-5, "the gradient of this layer alone")
    for name in NAMES:
        assert_close(getattr(three, name).weight.grad, 2 * gradients[name], 1e-5, name)


def test_each_thread_has_its_own_tensors(three):
    barrier = threading.Barrier(2)

    def serve(seed: int) -> float:
        worst = 0.0
        for call in range(10):
            x = values(2 * call + seed)
            for name in NAMES:
                barrier.wait(10)
                with torch.no_grad():
                    worst = max(worst, float((getattr(three, name)(x) - three.exact(name, x)).abs().max()))
        return worst

    with ThreadPoolExecutor(2) as threads:
        assert max(threads.map(serve, range(2))) < 1e-5
    assert three.core.shared._of_thread == {}
