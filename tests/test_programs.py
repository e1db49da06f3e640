"""Captured launches of a linear without communication, recorded once and replayed, on an emulated device.

Most tests compare with an equal model that never captures launches, and the bits must be equal. No ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dlp
from dlp.kernels import cuda
from dlp.parallel.linear import autograd
from dlp.parallel.linear.capture import describe
from dlp.parallel.linear.modules import LinearCore
from dlp.parallel.linear.spec import OFF, LayerOptions
from dlp.parallel.model.boundary import end_step
from dlp.quant.fp8 import CurrentScaling
from dlp.quant.quantizer import QuantizerCaps
from dlp.quant.recipe import both, load
from dlp.runtime import capture as captured
from dlp.runtime import function
from dlp.runtime.capture import PASSES, CapturedLaunches, NotPlain
from tests.cases import few, nightly
from tests.emulated import emulated  # noqa: F401
from tests.metrics import assert_all_bit_equal, assert_bit_equal
from tests.ops_models import Recomputed, Watched
from tests.paired_models import (
    K,
    M,
    N,
    PairedModels,
    Results,
    check_used,
    compiles,
    forward_backward,
    programs,
    values,
    without_programs,
)

pytestmark = pytest.mark.usefixtures("emulated")
RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_block")


def compare(
    recipe: str, steps: int, *, siblings: bool = False, bias: bool = False, attached: bool = True, frozen: bool = False,
    compiled: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Compare steps of a linear that may replay captured launches with steps of a linear that never captures, and check
    that every pass is captured. options: arguments of `forward_backward`."""
    pair = PairedModels(lambda: dlp.Linear(K, (N, K) if siblings else N, bias, recipe=recipe), attached=attached)
    if frozen:
        for parameter in (*pair.model.parameters(), *pair.other.parameters()):
            parameter.requires_grad_(False)
    if compiled:
        compiles(pair.model)
    for seed in range(steps):
        pair.step(lambda model, seed: forward_backward(model, seed, **options), seed)
    check_used(pair.model, *PASSES)


@pytest.mark.parametrize("attached", [True, False], ids=["cast at the boundary", "cast at use"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_program_gives_the_bits_of_the_functions(recipe: str, attached: bool):
    compare(recipe, 5, attached=attached)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "case",
    [{"shape": (2, M // 2)}, {"learns": False}, {"siblings": True}, {"bias": True}, {"frozen": True}],
    ids=lambda case: next(iter(case)),
)
def test_so_it_does_for_every_kind_of_layer(recipe: str, case: dict[str, Any]):
    compare(recipe, 4, **case)


@pytest.mark.parametrize(
    ("recipe", "case"),
    [
        *few(((recipe, {}) for recipe in RECIPES), ("fp8_block",)), nightly("fp8_current", {"learns": False}),
        nightly("fp8_block", {"siblings": True}), ("fp8_delayed", {"siblings": True}), ("fp8_delayed", {"attached": False}),
        nightly("bf16", {"bias": True}), nightly("fp8_current", {"bias": True}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.slow
def test_so_it_does_in_compiled_code(recipe: str, case: dict[str, Any]):
    """A compiled model that replays captured launches has the bits of an eager model that never captures."""
    compare(recipe, 5, compiled=True, **case)


def test_nothing_is_kept_of_tensors_that_are_gone():
    """Captured launches have no reference to tensors of the recording. Replays are correct although other tensors get
    the memory of these tensors."""
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe="fp8_current"))
    held = []
    for seed in range(6):
        held.append(torch.full((M, K), seed, dtype=torch.bfloat16))
        pair.step(forward_backward, seed)
    (found,) = [made for made in programs(pair.model)["forward"] if isinstance(made, CapturedLaunches)]
    assert not [value for value in vars(found).values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.slow), "watched"])
def test_another_shape_dtype_or_stride_is_another_program(way: str):
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe="fp8_current"))
    if way == "compiled":
        compiles(pair.model)

    def strided(model: nn.Module, seed: int) -> Results:
        x = values(seed, M, 2 * K)[:, :K].requires_grad_()
        model(x).backward(values(seed + 1, M, 2 * N)[:, :N])
        return {"dx": x.grad}

    for seed in range(3):
        for run in (forward_backward, lambda m, s: forward_backward(m, s, (2 * M,)), strided):
            with Watched() if way == "watched" else nullcontext():
                pair.step(run, seed)
    assert sum(isinstance(made, CapturedLaunches) for made in programs(pair.model)["forward"]) == 3


def test_gradients_of_a_sum_are_expanded_and_run_without_a_program():
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe="fp8_current"))

    def summed(model: nn.Module, seed: int) -> Results:
        x = values(seed, M, K).requires_grad_()
        model(x).sum().backward()
        return {"dx": x.grad}

    for seed in range(3):
        pair.step(summed, seed)
    check_used(pair.model, "forward")
    assert "runs aten::clone" in programs(pair.model)["backward"]
    assert describe(pair.model)[-1] == "backward: launched one by one in 0: runs aten::clone"


def test_siblings_given_one_gradient():
    """Two siblings get the same dy. Captured launches could not distinguish the two gradients, so such a backward is
    not captured."""
    pair = PairedModels(lambda: dlp.Linear(K, (N, N), recipe="fp8_current"))

    def shared(model: nn.Module, seed: int) -> Results:
        x, dy = values(seed, M, K).requires_grad_(), values(seed + 1, M, N)
        torch.autograd.backward(model(x), [dy, dy if seed < 4 else values(seed + 2, M, N)])
        return {"dx": x.grad}

    for seed in range(6):
        pair.step(shared, seed)
    check_used(pair.model, *PASSES)


def test_some_siblings_without_a_gradient():
    pair = PairedModels(lambda: dlp.Linear(K, (N, K), recipe="fp8_current"))

    def one(model: nn.Module, seed: int) -> Results:
        x = values(seed, M, K).requires_grad_()
        y = model(x)[1]
        y.backward(values(seed + 1, *y.shape))
        return {"dx": x.grad}

    for seed in range(4):
        pair.step(one, seed)
    check_used(pair.model, *PASSES)


@pytest.mark.parametrize("compiled", [False, nightly(True)], ids=["eager", "compiled"])
def test_evaluation_between_steps(compiled: bool):
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe="fp8_delayed"))
    if compiled:
        compiles(pair.model)

    def with_evaluation(model: nn.Module, seed: int) -> Results:
        with torch.no_grad():
            seen = model(2 * values(seed, M, K))
        return {"seen": seen} | forward_backward(model, seed)

    for seed in range(4):
        pair.step(with_evaluation, seed)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block"])
def test_recomputation_and_saved_tensors_elsewhere(recipe: str):
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe=recipe))

    def recomputed(model: nn.Module, seed: int) -> Results:
        return forward_backward(Recomputed(model), seed)

    def packed(model: nn.Module, seed: int) -> Results:
        moved = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.contiguous())
        with moved if seed % 2 else nullcontext():
            return forward_backward(model, seed)

    for seed in range(4):
        pair.step(recomputed, seed)
        pair.step(packed, seed)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_a_swap_a_load_and_new_operands(compiled: bool):
    """Captured launches are discarded after a recipe change, after a load that creates new scales, and when weights are
    cast to new memory."""
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe="fp8_delayed"))
    if compiled:
        compiles(pair.model)
    for seed in range(8):
        if seed == 3:
            for model in (pair.model, pair.other):
                state = {name: value / 2 for name, value in model.state_dict().items()}
                model.load_state_dict(state)
                end_step(model)
        if seed == 5:
            for model in (pair.model, pair.other):
                core: LinearCore = model[0].core
                core.set_spec(replace(core.spec, recipe=load("fp8_delayed", margin=1)))
                core.session.rebuild()
                end_step(model)
        pair.step(forward_backward, seed)
    check_used(pair.model, *PASSES)


def test_a_region_that_makes_a_new_table_of_scales():
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe="fp8_delayed"))
    for seed in range(7):
        with dlp.autocast(recipe=load("fp8_delayed", margin=2)) if seed == 4 else nullcontext():
            pair.step(forward_backward, seed)
    check_used(pair.model, *PASSES)


def test_a_copied_model_has_programs_of_its_own():
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe="fp8_current"), attached=False)
    for seed in range(3):
        pair.step(forward_backward, seed)
    other = copy.deepcopy(pair.model)
    check_used(other)
    for seed in range(3):
        assert_bit_equal(forward_backward(other, seed)["y0"], pair.model(values(seed, M, K)).detach())
        other.zero_grad()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", [N, (N, K)], ids=["alone", "siblings"])
def test_wgrads_that_wait_are_left_beside_launches(recipe: str, sizes: Any):
    """The operands of delayed wgrads are results of the captured backward, or views of its inputs."""

    def make() -> nn.Module:
        layer = dlp.Linear(K, sizes, recipe=recipe)
        layer.core.set_spec(replace(layer.core.spec, options=LayerOptions(delay_wgrad=True)))
        return layer

    def waiting(model: nn.Module, seed: int) -> Results:
        found = forward_backward(model, seed)
        waits = model[0].core.spec.options.delay_wgrad
        assert bool([name for name in found if "weight" in name]) != waits
        assert dlp.backward_dw(model) == (len(model[0].core.members) if waits else 0)
        return found | {f"d{name}": p.grad.clone() for name, p in model.named_parameters()}

    pair = PairedModels(make)
    core = pair.other[0].core
    core.set_spec(replace(core.spec, options=OFF))  # the compared model computes wgrads in backward
    for seed in range(5):
        pair.step(waiting, seed)
    check_used(pair.model, *PASSES)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_weights_in_fp32_are_rounded_by_a_launch(recipe: str):
    """Without a step boundary each pass rounds its fp32 weights, by a captured launch."""
    layer, found = dlp.Linear(K, N, False, recipe=recipe, dtype=torch.float32), []
    for off in (nullcontext(), without_programs()):
        with off:
            for seed in range(3):
                found.append(forward_backward(layer, seed))
                layer.zero_grad()
    for made, expected in zip(found[:3], found[3:], strict=True):
        assert_all_bit_equal(made, expected)
    check_used(layer, *PASSES)
    assert describe(layer) == ["forward: captured in 1 layers", "backward: captured in 1 layers"]


class _Own(CurrentScaling):
    """A user's quantizer without declarations, whose cast could run any code."""

    def cast(self, x: Tensor, amax: Tensor | None, **more: Any) -> Any:
        return super().cast(x, amax, **more)


@pytest.mark.parametrize("change", [{"x": both(_Own())}, {"y": _Own()}], ids=["x", "y"])
def test_layers_that_may_do_more_have_no_programs(change: dict[str, Any]):
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe=replace(load("fp8_current"), name="own", **change)))
    for seed in range(4):
        pair.step(forward_backward, seed)
    assert programs(pair.model) == {way: [] for way in PASSES}
    why = "launched one by one in 0: casts of _Own are not declared native (QuantizerCaps.native)"
    assert describe(pair.model) == [f"forward: {why}", f"backward: {why}"]


class _Pure(CurrentScaling):
    """A user's quantizer that declares that its methods run only dlp's operations."""

    caps: ClassVar[QuantizerCaps] = CurrentScaling.caps


def test_a_users_quantizer_that_declares_itself_pure_has_programs():
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe=replace(load("fp8_current"), name="own", x=both(_Pure()))))
    for seed in range(4):
        pair.step(forward_backward, seed)
    check_used(pair.model, *PASSES)


@pytest.mark.parametrize("cache", ["step", "forward"])
def test_programs_of_the_old_scales_go_with_them(cache: str):
    """A recipe change of one layer creates a new table of delayed scales; the captured launches of the other layer read
    the old table, so they are discarded."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            recipe = load("fp8_delayed", amax_history_len=2)
            self.first, self.second = (dlp.Linear(K, K, recipe=recipe) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    pair = PairedModels(Two, attached=False)
    for model, optimizer in zip((pair.model, pair.other), pair.optimizers, strict=True):
        dlp.attach(model, optimizer, weight_cache=cache)
    for seed in range(4):
        pair.step(forward_backward, seed)
    check_used(pair.model, *PASSES)
    for model in (pair.model, pair.other):
        dlp.set_recipe(model, "0.first", "fp8_current")
    for seed in range(4, 8):
        with torch.no_grad():
            for model in (pair.model, pair.other):
                model[0].second.weight.mul_(0.25)
            dlp.end_step(pair.model)
            dlp.end_step(pair.other)
        pair.step(forward_backward, seed)
    check_used(pair.model, *PASSES)


def test_a_backward_after_a_recipe_change_does_not_replay_launches_with_the_old_scales():
    """A backward that waited during the recipe change of another layer keeps its record of captured launches. The amax of
    dy belongs into the new table."""
    pair = PairedModels(lambda: nn.Sequential(*[dlp.Linear(K, K, recipe="fp8_delayed") for _ in range(2)]))

    def changed_between(model: nn.Module, seed: int) -> Results:
        x = values(seed, M, K).requires_grad_()
        y = model(x)
        dlp.set_recipe(model, "0.0", "fp8_current")
        (1e3 * y.float().square().mean()).backward()
        staged = model[0][1].core.session.scaling.slot("0.1.dy", True).staging
        return {"dx": x.grad, "amax of dy": staged.clone()}

    for seed in range(4):
        pair.step(forward_backward, seed)
    check_used(pair.model, *PASSES)
    for seed, run in enumerate((changed_between, forward_backward, forward_backward), 4):
        pair.step(run, seed)


def test_shapes_without_end_make_no_programs_without_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(autograd, "LIMIT", 2)
    pair = PairedModels(lambda: dlp.Linear(K, N, recipe="fp8_current"))
    for seed in range(12):
        pair.step(lambda m, s: forward_backward(m, s, (16 * (1 + s % 6),)), seed)
    assert len(pair.model[0].core.weights.parts.calls) == 2


def test_a_function_that_does_more_than_launch_is_no_program():
    x, foreign = values(0, 64, 64), values(1, 4)
    for run, says in (
        (lambda: [x + 1], "aten::add"),
        (lambda: [x.clone()], "aten::clone"),
        (lambda: [torch.empty(4), foreign], "a tensor from outside of the recording"),
        (lambda: [torch.zeros(4)], "aten::zeros"),
    ):
        with pytest.raises(NotPlain, match=says):
            captured.record(run, [x], [])  # type: ignore[arg-type]


def test_a_copy_is_no_view_though_its_operation_may_be_one():
    """`to`, `reshape` and `contiguous` may return a view or a copy. The recorder must recognize copies, also below
    autograd, where these operations are not decomposed and where the first call of a compiled graph runs."""
    x = values(0, 64, 64)

    def run(copied: Callable[[Tensor], Tensor]) -> list[Tensor]:
        out = torch.empty(())
        with torch._C._AutoDispatchBelowAutograd():
            cuda.amax(copied(x), out)
        return [out]

    for copied, op in (
        (lambda x: x.to(torch.float32), "aten::to.dtype"),
        (lambda x: x.t().reshape(32, 128), "aten::reshape"),
        (lambda x: x.t().contiguous(), "aten::contiguous"),
    ):
        with pytest.raises(NotPlain, match=f"copies by {op}"):
            captured.record(partial(run, copied), [x], [])
    kept = captured.record(partial(run, lambda x: x.to(torch.bfloat16).reshape(32, 128).contiguous()), [x], [])
    assert kept([x])[0] == x.abs().max()


@pytest.mark.slow
def test_a_compiled_layer_casts_fp32_weights_in_every_call():
    """Before the first step boundary, each forward of a compiled layer must round the fp32 weight again, also in the
    second microbatch, for which torch compiles another graph and runs its first call below autograd."""

    def microbatches(model: nn.Module, seed: int) -> Results:
        return [forward_backward(model, 10 * seed + i) for i in range(3)][-1]

    pair = PairedModels(lambda: dlp.Linear(K, N, recipe="fp8_current"), dtype=torch.float32)
    compiles(pair.model)
    for seed in range(2):
        pair.step(microbatches, seed)
    check_used(pair.model, *PASSES)


def test_a_result_may_be_a_view_of_what_is_given():
    first, second = values(0, 64, 64), values(1, 64, 64)

    def run() -> list[Tensor]:
        out = torch.empty(())
        cuda.amax(first, out)
        return [first[8:].t(), out, first]

    view, amax, whole = captured.record(run, [first], [])([second])
    assert whole.data_ptr() == second.data_ptr() and amax == second.abs().max()
    assert_bit_equal(view, second[8:].t())


def test_memory_that_nobody_declared_is_refused():
    x, foreign = values(0, 64, 64), torch.empty(())

    def run() -> list[Tensor]:
        out = torch.empty(())
        cuda.amax(x, foreign)
        return [out]

    made = captured.record(run, [x], [foreign])
    made([x])
    assert foreign == x.abs().max()
    with pytest.raises(ValueError, match="was not declared"):
        captured.record(run, [x], [])([x])


def test_memory_in_between_is_shared_by_what_is_not_used_together():
    x = values(0, 64, 64)

    def run() -> list[Tensor]:
        amaxes = [torch.empty(()) for _ in range(4)]
        for out in amaxes:  # no amax is used again
            cuda.amax(x, out)
        return amaxes[-1:]

    recorded = captured.record(run, [x], [])
    assert recorded([x])[0] == x.abs().max()
    assert recorded.between == captured.ALIGNMENT


def test_a_run_asks_no_operator_for_memory():
    """A replay allocates no memory through torch's dispatcher, because allocations through the dispatcher take
    host time."""
    x, asked = values(0, 64, 64), list[Any]()

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    def run() -> list[Tensor]:
        passing, amax = torch.empty(()), torch.empty(2, 3, dtype=torch.float32).t()
        cuda.amax(x, passing)
        cuda.amax(x, amax[0, 0])
        return [amax]

    recorded = captured.record(run, [x], [])
    with Asked():
        (found,) = recorded([x])
    assert torch.ops.aten.empty_strided.default not in asked and recorded.between
    assert (found.shape, found.stride(), found[0, 0]) == ((3, 2), (1, 3), x.abs().max())


TWICE = function.Passes(lambda ctx, run, tensors: (2 * tensors[0],), lambda ctx, run, grads: [2 * grads[0]])


def test_a_pass_is_refused_in_a_transform_and_differentiated_once():
    x = torch.ones(3, requires_grad=True)

    def called(x: Tensor) -> Tensor:
        function.refuse_transforms("a layer")
        return function.apply_pass(TWICE, None, x)[0].sum()  # type: ignore[no-any-return]

    (grad,) = torch.autograd.grad(called(x), x, create_graph=True)
    assert torch.equal(grad, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="trying to differentiate twice a function that was marked with @once"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="^a layer: transforms of torch.func"):
        torch.func.grad(called)(x)
