"""Arguments of `dlp.attach`, checks in the steps of attached optimizers, and backwards that run after weights have
changed since the forward."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import dlp
from dlp.parallel.model.session import session_of
from tests import pool as worker
from tests.metrics import assert_all_close
from tests.multigpu.test_grads import Attention, batch, gradients, loss_of, make, run
from tests.refusals import may_raise, must_raise, refuses


class Around(nn.Module):
    """A user's module that contains a converted model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def wrapped() -> dict[str, Tensor]:
    """Attach the module that contains a converted model; return the gradients of the converted model before the
    optimizer step."""
    model = make(2)
    outer = Around(model)
    optimizer = SGD(outer.parameters(), lr=0.1)
    dlp.attach(outer, optimizer)
    loss_of(outer(batch(0))).backward()
    found = gradients(dict(model.named_parameters()))
    optimizer.step()
    assert session_of(outer) is model.dlp_session and model.dlp_session.steps == 1
    assert dlp.state_dict(outer).keys() == dlp.state_dict(model).keys()
    return found


def one_backward(model: nn.Module) -> None:
    loss_of(model(batch(0))).backward()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_wrapper_attaches_the_converted_model_inside(ranks):
    expected = ranks(1).run(run, one_backward, 1, False)[0]
    for found in ranks(2).run(wrapped):
        assert_all_close(found, expected, 1e-5)


def mlp(recipe: str = "fp8_current", size: int = 64, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [dlp.Linear(size, size, True, recipe=recipe), nn.Tanh(), dlp.Linear(size, size, recipe=recipe)]
    return nn.Sequential(*layers).to(dtype)


def x_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_an_attachment_that_would_not_hold_is_refused():
    model, other = mlp(), mlp()
    with refuses(re.escape("this AdamW holds none of the model's 3 parameters (0.weight, ...)")):
        dlp.attach(model, AdamW(other.parameters()))
    optimizer = SGD(model.parameters(), 0.1)
    dlp.attach(model, optimizer)
    with pytest.raises(ValueError, match="this optimizer is attached to this model already"):
        dlp.attach(model, optimizer)
    with pytest.raises(ValueError, match=re.escape("dlp.attach: 0 is a layer of a larger model that was converted or")):
        dlp.attach(model[0], SGD(model[0].parameters()))
    with refuses(re.escape("dlp.attach: linear is outside of the module that dlp.convert or dlp.attach")):
        dlp.attach(nn.Sequential(model, dlp.Linear(64, 64)), SGD(model.parameters()))
    dlp.attach(other, SGD(other.parameters()))
    with pytest.raises(ValueError, match="0 and 1 are separate converted models"):
        dlp.attach(nn.Sequential(model, other), SGD(model.parameters()))


def of_before_convert(fsdp: bool) -> str:
    model, mesh = nn.Sequential(nn.Linear(8, 8)).to(worker.device()), worker.mesh(tp=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    dlp.convert(model, [], mesh)
    if fsdp:
        optimizer = SGD(model.parameters(), lr=0.1)
        dlp.fully_shard(model, mesh=mesh)
    return must_raise(ValueError, dlp.attach, model, optimizer)


@pytest.mark.ranks(2)
def test_an_optimizer_from_before_convert_is_refused(ranks):
    for fsdp in (False, True):
        for message in ranks(2).run(of_before_convert, fsdp):
            assert "holds none of the model's 2 parameters (0.weight, ...)" in message
            assert message.endswith(
                "dlp.convert and dlp.fully_shard replace parameters: create the optimizer after them"
            )


def stale_in_part(by: str) -> str:
    """Return the message of `dlp.attach` ("" if there is none) for an optimizer that was created after `dlp.fully_shard` of
    one layer, and before `fully_shard` of the model replaces the parameters of the other layer. `by`: the library whose
    `fully_shard` shards the model, "dlp" or "torch"; "nothing": the model is not sharded."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(worker.device()), worker.mesh(tp=1)
    dlp.convert(model, [], mesh)
    dlp.fully_shard(model[0], mesh=mesh)
    optimizer = SGD(model.parameters(), lr=0.1)
    if by == "dlp":
        dlp.fully_shard(model, mesh=mesh)
    elif by == "torch":
        torch.distributed.fsdp.fully_shard(model, mesh=mesh["dp_shard"])
    return may_raise(ValueError, dlp.attach, model, optimizer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["dlp", "torch", "nothing"])
def test_an_optimizer_that_is_stale_in_part_is_refused(ranks, by):
    for message in ranks(2).run(stale_in_part, by):
        if by == "nothing":
            assert message == ""
        else:
            assert message.startswith("dlp.attach: this SGD holds 1.weight and 1.bias from before dlp.fully_shard")
            assert "create the optimizer after dlp.convert and dlp.fully_shard" in message


def sharded_from_outside() -> str:
    model, mesh = nn.Sequential(nn.Linear(8, 8)).to(worker.device()), worker.mesh(tp=1)
    dlp.convert(model, [], mesh)
    outer = Around(model)
    dlp.fully_shard(outer, mesh=mesh)
    optimizer = SGD(outer.parameters(), lr=0.1)
    said = must_raise(ValueError, dlp.attach, model, optimizer)
    dlp.attach(outer, optimizer)
    outer(torch.randn(4, 8, device=worker.device())).sum().backward()
    optimizer.step()
    return said


@pytest.mark.ranks(2)
def test_fsdp_from_outside_of_what_is_attached_is_refused(ranks):
    for message in ranks(2).run(sharded_from_outside):
        assert (
            message
            == "dlp.attach: 0 is sharded by a fully_shard of a module around this model: attach the outer module"
        )


def test_steps_are_counted_after_an_optimizer_was_replaced():
    model = mlp()
    first, second = (SGD(model.parameters(), 0.1) for _ in range(2))
    dlp.attach(model, first)
    dlp.attach(model, second)
    counted = []
    for optimizer in (first, second, first, second, second, second):
        model(x_of(0)).sum().backward()
        optimizer.step()
        counted.append(model.dlp_session.steps)
    assert counted == [1, 1, 2, 2, 3, 4]


def test_a_step_inside_of_a_backward_is_refused():
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    dlp.attach(model, optimizer)
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    with pytest.raises(RuntimeError, match="an attached optimizer steps inside of a backward, while gradients are"):
        model(x_of(0)).sum().backward()


Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def plain(**options: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(dtype=torch.float32)
    return model, AdamW(model.parameters(), lr=0.1, **options)


def held() -> tuple[nn.Module, torch.optim.Optimizer]:
    with dlp.quantized_model_init():
        model = mlp()
    return model, dlp.with_master_weights(model, lambda parameters: SGD(parameters, lr=0.1))


@pytest.mark.parametrize("make", [plain, lambda: plain(fused=True), held], ids=["foreach", "fused", "held"])
def test_a_step_between_forward_and_backward_raises_as_in_torch(make: Make):
    model, optimizer = make()
    dlp.attach(model, optimizer)
    x = x_of(0, next(model.parameters()).dtype)
    model(x).sum().backward()
    waiting = model(x).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        waiting.backward()
    optimizer.zero_grad()
    model(x).sum().backward()


def step_between(fsdp: bool) -> str:
    model, mesh = (
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).to(worker.device()),
        worker.mesh(tp=1 + (not fsdp)),
    )
    groups = [
        {"name": "all", "match": ["**"], "recipe": "fp8_current"},
        {"name": "up", "match": ["0"], "style": "column"},
    ]
    dlp.convert(model, [*groups, {"name": "down", "match": ["1"], "style": "row"}], mesh)
    if fsdp:
        dlp.fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), fused=True)
    dlp.attach(model, optimizer)
    x = torch.randn(32, 64, device=worker.device())
    for _ in range(2):
        waiting = model(x).sum()
        model(x).sum().backward()
        optimizer.step()
    return must_raise(RuntimeError, waiting.backward)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fsdp", [False, True], ids=["tp", "fsdp"])
def test_a_step_between_forward_and_backward_raises_for_distributed_parameters(ranks, fsdp):
    for message in ranks(2).run(step_between, fsdp):
        assert "has been modified by an inplace operation" in message


def test_an_optimizer_that_evaluates_a_closure_sees_the_weights_as_they_are():
    """LBFGS changes the weights and evaluates the closure again, many times in a step. Each evaluation reads the
    current weights."""
    losses = {}
    for attached in (False, True):
        model = mlp(dtype=torch.float32)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=8)
        if attached:
            dlp.attach(model, optimizer)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x_of(0, torch.float32)), x_of(1, torch.float32))
            loss.backward()
            return loss

        losses[attached] = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses[True] == losses[False]
    assert losses[True][-1] < losses[True][0]


class Ahead(torch.optim.SGD):
    """Optimizer that halves the weights through .data, which torch's version counter does not count, evaluates the
    closure, restores the weights and then updates them."""

    def step(self, closure: Any = None) -> float:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p in parameters:
            p.data.mul_(0.5)
        with torch.enable_grad():
            loss = closure()
        for p in parameters:
            p.data.mul_(2).sub_(p.grad, alpha=0.01)
        return float(loss.detach())


def test_weights_are_cast_before_each_evaluation_of_a_closure():
    found = {}
    for attached in (False, True):
        model = mlp(dtype=torch.float32)
        optimizer = Ahead(model.parameters(), lr=0.1)
        if attached:
            dlp.attach(model, optimizer)

        def closure(model: nn.Module = model) -> Tensor:
            model.zero_grad()
            loss = model(x_of(0, torch.float32)).square().mean()
            loss.backward()
            return loss

        closure()
        found[attached] = [optimizer.step(closure) for _ in range(3)]
    assert found[True] == found[False]


def forgotten_norm(closure: bool, zero: bool, steps: int) -> str:
    """Train a model whose q_norm reads features that are sharded over tp, although no layer group declares this; return
    the step and message of the first RuntimeError, or "no error". `closure`: the optimizer calls forward and backward
    as its closure. `zero`: the weight of o is initially zero, so that the gradients of q and q_norm are zero in the
    first step."""
    torch.manual_seed(3)
    model = Attention()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5, 0.5)
    if zero:
        nn.init.zeros_(model.o.weight)
    model.to(worker.device())
    groups = [{"name": "q", "match": ["q"], "style": "column"}, {"name": "o", "match": ["o"], "style": "row"}]
    dlp.convert(model, groups, worker.mesh(tp=2))
    model.tp = None
    model.o.register_forward_pre_hook(lambda module, args: (args[0].flatten(-2) if args[0].dim() > 3 else args[0],))
    optimizer = SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch(0)))
        loss.backward()
        return loss

    for step in range(steps):
        try:
            optimizer.step(evaluate) if closure else (evaluate(), optimizer.step())
        except RuntimeError as error:
            return f"step {step}: {error}"
    return "no error"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("closure", "zero"), [(False, True), (True, False), (True, True)])
def test_replicas_are_looked_at_when_they_first_have_gradients(ranks, closure, zero):
    for said in ranks(2).run(forgotten_norm, closure, zero, 3):
        assert said.startswith(f"step {int(zero)}: q_norm.weight is replicated on tp, but its gradient differs")


def drifted() -> tuple[str, str]:
    """Call `dlp.state_dict` twice: with equal replicas, and after one replica has changed. Return, for each call, the
    number of tensors or the error message."""
    model, mesh = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).to(worker.device()), worker.mesh(tp=2)
    dlp.convert(model, [], mesh)
    said = []
    for _ in range(2):
        try:
            said.append(str(len(dlp.state_dict(model))))
        except RuntimeError as error:
            said.append(str(error))
        with torch.no_grad():
            model[0].weight.to_local().mul_(1 + 0.05 * mesh["tp"].get_local_rank())
    return said[0], said[1]


@pytest.mark.ranks(2)
def test_replicas_that_drifted_apart_are_not_saved(ranks):
    for equal, apart in ranks(2).run(drifted):
        assert equal == "3"
        assert apart.startswith(
            "0.weight is replicated on tp, and its replicas on the ranks of tp have drifted 4.76% apart"
        )
