"""Weights that other code than the attached optimizer has changed: dlp drops the casts of the old values, or an error
names the layer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.optimizer import _global_optimizer_post_hooks

import dlp
from dlp.parallel.model import session
from tests import pool as worker
from tests.metrics import assert_bit_equal
from tests.shardnet import BF16

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def mlp(recipe: str = "fp8_current") -> nn.Sequential:
    """Return a model with fp32 weights. The tests run it on bf16 activations, so that a cast of a weight is a copy with
    every recipe."""
    torch.manual_seed(0)
    return nn.Sequential(dlp.Linear(64, 64, recipe=recipe), nn.Tanh(), dlp.Linear(64, 64, recipe=recipe))


def loss_of(model: nn.Module) -> Tensor:
    y: Tensor = model(X.bfloat16().to(next(model.parameters()).device))
    return y.float().square().mean()


def trained(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = AdamW(model.parameters(), lr=1e-2, **options)
    dlp.attach(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return optimizer


def second_optimizer(model: nn.Module) -> None:
    loss_of(model).backward()
    AdamW(model.parameters(), lr=1e-2, fused=True).step()


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    model[0].weight.mul_(2)


def by_init(model: nn.Module) -> None:
    nn.init.normal_(model[2].weight)


def into_the_state_dict(model: nn.Module) -> None:
    model.state_dict()["0.weight"].mul_(3)


def new_memory(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data * 2


def swapped(model: nn.Module) -> None:
    with torch.no_grad():
        for average in copy.deepcopy([parameter.detach() for parameter in model.parameters()]):
            average.mul_(0.5)
            next(p for p in model.parameters() if p.shape == average.shape).copy_(average)


CHANGES = [second_optimizer, in_place, by_init, into_the_state_dict, new_memory, swapped]


@pytest.mark.parametrize("recipe", ["fp8_current", "bf16"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_torch_counts_are_seen(change: Callable[[nn.Module], None], recipe: str):
    model = mlp(recipe)
    optimizer = trained(model)
    before = loss_of(model)
    change(model)
    optimizer.zero_grad()
    other = mlp(recipe)  # a model without an attached optimizer casts its weights at each use
    with torch.no_grad():
        for theirs, ours in zip(other.parameters(), model.parameters(), strict=True):
            theirs.copy_(ours)
    assert_bit_equal(loss_of(model), loss_of(other))
    assert not torch.equal(loss_of(other), before)
    loss_of(model).backward()
    optimizer.step()
    assert model[0].core.weights.parts is not None, "the next step boundary casts again"


def test_a_call_with_other_parameters_computes_with_those():
    model = mlp()
    trained(model)
    others = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    expected = loss_of(mlp_with(others))
    found = torch.func.functional_call(model, others, X.bfloat16()).float().square().mean()
    assert_bit_equal(found, expected)


def mlp_with(values: dict[str, Tensor]) -> nn.Module:
    model = mlp()
    model.load_state_dict(values)
    return model


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def test_writes_that_torch_does_not_count_are_refused():
    said = "0: the weight was changed without torch's version counter, for example by writing into .data"
    model = mlp()
    optimizer = trained(model)
    through_data(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match=said):
        loss_of(model)
    dlp.end_step(model)
    with torch.no_grad():
        loss_of(model)
    loss_of(model).backward()
    through_data(model)
    with pytest.raises(RuntimeError, match=said):
        optimizer.step()
    model.load_state_dict(model.state_dict())  # this call makes the model cast again
    with torch.no_grad():
        loss_of(model)


def test_samples_of_weights_keep_their_memory():
    """The samples of weights, by which dlp detects changes, must keep their addresses: a CUDA graph writes to the
    addresses of the capture, and an eager step between replays must write there, too."""
    model = mlp()
    optimizer = trained(model)
    stale = session.session_of(model).stale
    before, values = [seen.data_ptr() for seen in stale._seen], [seen.clone() for seen in stale._seen]
    loss_of(model).backward()
    optimizer.step()
    assert before == [seen.data_ptr() for seen in stale._seen] and before
    assert not all(torch.equal(old, new) for old, new in zip(values, stale._seen, strict=True))


def test_sessions_that_optimizers_call_go_with_the_model():
    gc.collect()
    before = len(session._WATCHING)
    model = mlp()
    trained(model)
    hooks = len(_global_optimizer_post_hooks)
    assert len(session._WATCHING) == before + 1
    del model
    gc.collect()
    assert len(session._WATCHING) == before
    trained(mlp())
    assert len(_global_optimizer_post_hooks) == hooks, "one hook, however many models there were"


def distributed(fsdp: bool) -> tuple[list[Tensor], list[Tensor], str]:
    """Change a model with an attached optimizer in several ways; return the losses after each change, the losses of a
    model that casts at each use, and the error of a forward after a write that bypasses torch's version counter."""
    mesh = worker.mesh(tp=1 if fsdp else 2)
    groups = [dlp.LayerGroup("all", "**", recipe="fp8_current")]
    groups += [dlp.LayerGroup("up", "0", style="column"), dlp.LayerGroup("down", "2", style="row")]
    losses: list[list[Tensor]] = []
    for cached in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(worker.device())
        dlp.convert(model, groups, mesh)
        if fsdp:
            for layer in (model[0], model[2], model):
                dlp.fully_shard(layer, mesh=mesh, quantized_gather=cached, mp_policy=BF16)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        dlp.attach(model, optimizer, weight_cache="step" if cached else "forward")
        losses.append([])
        for change in (lambda model: None, in_place, second_optimizer, lambda model: None):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            change(model)
            losses[-1].append(loss_of(model))
        if cached:
            local = (
                model[0].weight.detach().to_local() if isinstance(model[0].weight, DTensor) else model[0].weight.data
            )
            local.mul_(2)  # dcp.load writes into a state dict like this
            with torch.no_grad(), pytest.raises(RuntimeError) as error:
                loss_of(model)
    return losses[0], losses[1], str(error.value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fsdp", [False, True], ids=["tp", "fsdp"])
def test_changes_of_distributed_weights_are_seen(ranks, fsdp):
    for cached, at_use, said in ranks(2).run(distributed, fsdp):
        assert_bit_equal(torch.stack(cached), torch.stack(at_use))
        assert said.startswith("0: the weight was changed without torch's version counter")


def test_a_model_whose_weights_were_taken_breaks_no_other_ones_step():
    model, other = mlp(), mlp()
    trained(model)
    optimizer = AdamW(other.parameters())
    torch.nn.utils.parametrizations.weight_norm(model[0])
    assert model[0].core.weights.stored() == [] and len(model[-1].core.weights.stored()) == 1
    with pytest.raises(ValueError, match="0: weight is no longer a parameter of the module"):
        loss_of(model)
    loss_of(other).backward()
    optimizer.step()
