"""Copies of converted models, and torch's wrappers around models: each works, or raises an error that names the
module."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dlp
from dlp.parallel.linear.state import cores
from tests import pool as worker
from tests.cases import nightly
from tests.metrics import assert_bit_equal
from tests.net import batch, gradients, net, train
from tests.refusals import may_raise

said = partial(may_raise, (ValueError, TypeError, RuntimeError))


class Small(nn.Module):
    """A model with the kinds of modules that conversion replaces: an embedding, a norm, siblings, and a linear after
    the siblings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, 64), nn.LayerNorm(64)
        self.gate, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def save_pretrained(self, folder: str, is_main_process: bool = True, state_dict: Any = None) -> Tensor:
        """Stand-in for the method of transformers' models; returns the tensors that the method would write."""
        return state_dict["down.weight"]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        return self.down(self.gate(x) * self.up(x))


def small(recipe: str = "fp8_delayed") -> tuple[Small, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small().to(worker.device())
    groups = [
        {"name": "all", "match": ["**"], "recipe": recipe},
        {"name": "cut", "match": ["embed", "gate", "up"], "style": "column"},
        {"name": "pair", "match": ["{gate,up}"], "siblings": True},
        {"name": "back", "match": ["down"], "style": "row"},
    ]
    dlp.convert(model, groups, worker.mesh(tp=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    return model, optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[Tensor]:
    """Train some steps, and return the output before each step."""
    ys = []
    for i in range(count):
        tokens = torch.arange(16, device=worker.device()) + i
        ys.append(model(tokens))
        ys[-1].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [y.detach() for y in ys]


def copied(recipe: str) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of results that must be equal: of a copy and the original directly after the copy, of both after the
    same training with separate optimizers, and of a second copy after writes to its weights."""
    model, optimizer = small(recipe)
    steps(model, optimizer, 3)
    other, untouched = copy.deepcopy(model), copy.deepcopy(model)
    first = model.down.weight.full_tensor().clone()
    assert not {id(core) for core in cores(model)} & {id(core) for core in cores(other)}
    tokens = torch.arange(16, device=worker.device())
    found = [(other(tokens), model(tokens))]
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    dlp.attach(other, own)
    found += zip(steps(other, own, 3), steps(model, optimizer, 3), strict=True)
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        found.append((a.full_tensor(), b.full_tensor()))
    with torch.no_grad():
        untouched.down.weight.mul_(2)
    found.append((untouched.save_pretrained("folder"), 2 * first))
    with torch.no_grad():
        untouched.down.weight.mul_(0.5)
    third = torch.optim.SGD(untouched.parameters(), lr=0.1)
    dlp.attach(untouched, third)
    found.append((steps(untouched, third, 1)[0], found[1][1]))
    return found


# Recipes with state that a copy must have, too: a history of amaxes, a counter of microbatches
@pytest.mark.parametrize("recipe", ["fp8_delayed", nightly("nvfp4")])
@pytest.mark.ranks(2)
def test_a_deep_copy_goes_on_as_its_original(ranks, recipe):
    for pairs in ranks(2).run(copied, recipe):
        for i, (got, expected) in enumerate(pairs):
            assert_bit_equal(got, expected, f"pair {i}")


def averaged() -> tuple[list[Tensor], list[Tensor]]:
    """Average the weights of three steps with AveragedModel. Return the outputs of the average and of the model, and
    the output of a new model with the averaged weights."""
    model, optimizer = small("fp8_current")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    tokens = torch.arange(16, device=worker.device())
    for _ in range(3):
        steps(model, optimizer, 1)
        average.update_parameters(model)
        average(tokens)  # this forward casts the average, which the next update changes
    expected, _ = small("fp8_current")
    expected.load_state_dict(average.module.state_dict())
    with torch.no_grad():
        return [average(tokens), model(tokens)], [expected(tokens)]


@pytest.mark.ranks(2)
def test_torchs_averaged_model_computes_with_the_average(ranks):
    for (got, other), (expected,) in ranks(2).run(averaged):
        assert_bit_equal(got, expected)
        assert not torch.equal(got, other)


def copied_regions() -> list[bool]:
    """Train a sequence-parallel model, which sums partial gradients, and a copy of it, and assert that losses are equal;
    return whether each gradient of a further backward is equal."""
    mesh = worker.mesh(tp=2)
    model = net("fp8_current", mesh)
    other = copy.deepcopy(model)
    other.optimizer = torch.optim.SGD(other.parameters(), lr=2e-5)
    dlp.attach(other, other.optimizer)
    assert train(model, mesh, range(2)) == train(other, mesh, range(2))
    for each in (model, other):
        gradients(each, *batch(2, mesh))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return [torch.equal(a.grad.full_tensor(), b.grad.full_tensor()) for a, b in pairs]


@pytest.mark.ranks(2)
def test_a_copy_sums_its_partial_gradients(ranks):
    for equal in ranks(2).run(copied_regions):
        assert all(equal)


def replaced(model: Small) -> None:
    """Replace a parameter on tp by a plain parameter, and call the layer."""
    model.up.weight = nn.Parameter(torch.ones(64, 64, device=worker.device()))
    model.up(torch.zeros(8, 64, device=worker.device()))


def refusals() -> dict[str, str]:
    model, _ = small()
    plain = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    fresh = Small().to(worker.device())
    dlp.convert(fresh, [{"name": "all", "match": ["**"], "recipe": "bf16"}], worker.mesh(tp=2))
    flat = FullyShardedDataParallel(nn.Sequential(dlp.Linear(64, 64)).to(worker.device()), device_id=worker.device())
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    return {
        "pickle": said(pickle.dumps, model), "pickled layer": said(pickle.dumps, model.up),
        "ddp": said(DistributedDataParallel, model), "assign": said(model.load_state_dict, plain, assign=True),
        "plain": said(fresh.load_state_dict, plain, assign=True),
        "own": said(fresh.load_state_dict, dict(fresh.state_dict()), assign=True),
        "dtensor": said(model.down, model.norm.weight), "replaced": said(replaced, fresh),
        "fsdp1 converted": said(FullyShardedDataParallel, fresh, use_orig_params=True, device_id=worker.device()),
        "fsdp1": said(flat, torch.zeros(8, 64, device=worker.device())),
        "fsdp1 attached": said(dlp.attach, flat, optimizer),
    }  # fmt: skip


@pytest.mark.ranks(2)
def test_what_a_converted_model_cannot_bear_is_one_sentence(ranks):
    for found in ranks(2).run(refusals):
        spread = (
            "a model that is sharded over ranks cannot be pickled, since process groups cannot be pickled; save "
            "model.state_dict()"
        )
        assert spread in found["pickle"] and found["pickled layer"].startswith(f"gate and siblings: {spread}")
        assert found["ddp"].startswith("Small: DistributedDataParallel does not support converted models")
        assert found["assign"].startswith("embed.weight: load_state_dict(assign=True) would replace the parameters")
        assert found["plain"].startswith(
            "embed.weight: load_state_dict(assign=True) would put a plain tensor in place of"
        )
        assert found["own"] == ""
        assert found["dtensor"].startswith("down: x is a DTensor, but layers read plain local tensors")
        assert found["replaced"].startswith("up: a plain tensor replaces a parameter that is a DTensor on tp")
        assert re.match(
            r"\w+: FullyShardedDataParallel \(FSDP1\) does not support converted models.*fully_shard",
            found["fsdp1 converted"],
        )
        assert found["fsdp1"].startswith("Linear: weight is no longer a parameter of the module")
        assert found["fsdp1 attached"].startswith("dlp.attach: Sequential is sharded by FullyShardedDataParallel")


def with_ddp() -> list[Tensor]:
    """Return the gradients of explicitly constructed layers under DDP, and the gradients of the complete batch on one
    rank."""
    torch.manual_seed(0)
    model = nn.Sequential(dlp.Linear(64, 64, True), dlp.Linear(64, 32)).to(worker.device())
    alone = copy.deepcopy(model)
    x = torch.randn(2, 8, 64, device=worker.device())
    replicated = DistributedDataParallel(model)
    replicated(x[torch.distributed.get_rank()]).square().sum().backward()
    alone(x).square().sum().div(2).backward()
    return [p.grad for p in (*model.parameters(), *alone.parameters())]


@pytest.mark.ranks(2)
def test_layers_made_by_hand_run_under_ddp(ranks):
    for grads in ranks(2).run(with_ddp):
        for got, expected in zip(grads[:3], grads[3:], strict=True):
            torch.testing.assert_close(got, expected)
