"""Calling a module inside an FSDP unit whose weights are resharded raises an error that names the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import dlp
from tests import pool as worker
from tests.refusals import may_raise
from tests.shardnet import BATCH, SEQUENCE, shardnet, train

RESHARDED = "FSDP has resharded the parameters, and a layer needs complete parameters"
FREED = "FSDP has freed the gathered weight that this backward reads"


class Tokens(nn.Module):
    """An embedding, a norm and a head that shares no parameter with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


def of_converted(recipe: str, replicate: int) -> dict[str, str]:
    mesh = worker.mesh(dp_replicate=replicate, dp_shard=2 // replicate)
    torch.manual_seed(0)
    model = Tokens().to(worker.device())
    groups = [
        {"name": "all", "match": ["**"], "recipe": recipe}, {"name": "cut", "match": ["embed"], "style": "column"},
    ]  # fmt: skip
    dlp.convert(model, groups, mesh)
    dlp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    tokens = torch.arange(64, device=worker.device())
    x = torch.randn(64, 64, device=worker.device(), requires_grad=True)  # x needs a gradient, as in training
    for _ in range(2):
        model(tokens).sum().backward()
        optimizer.step()
    model.unshard()
    model.head(x)  # unsharded weights: the call must work
    model.reshard()
    found = {name: may_raise(RuntimeError, model.get_submodule(name), x) for name in ("norm", "head")}
    found["embed"] = may_raise(RuntimeError, model.embed, tokens)
    with FlopCounterMode(display=False):  # under a dispatch mode, such as FlopCounterMode, the head runs as opaque ops
        found["head "] = may_raise(RuntimeError, model.head, x)
    model.unshard()
    assert model.head(x).shape == (64, 64)
    return found


@pytest.mark.parametrize(("recipe", "replicate"), [("bf16", 1), ("fp8_current", 1), ("fp8_current", 2)])
@pytest.mark.ranks(2)
def test_a_resharded_layer_is_named(ranks, recipe, replicate):
    """With replicate = 2 the shard is the full tensor, so the call could run, but its gradient would not be averaged
    over the replicas."""
    for found in ranks(2).run(of_converted, recipe, replicate):
        for name, message in found.items():
            assert message.startswith(f"{name.strip()}: {RESHARDED}"), (name, message)


def by_hand() -> list[str]:
    """Return the error messages of two calls after an FSDP unit was resharded: of a layer in the unit, which has no tp
    mesh, and of the unit ("" if there is no error)."""
    mesh = worker.mesh(dp_shard=2)
    model = nn.Sequential(dlp.Linear(64, 64, bias=True, recipe="fp8_current")).to(worker.device())
    dlp.fully_shard(model, mesh=mesh)
    x = torch.randn(32, 64, device=worker.device())
    model(x)
    model.reshard()
    return [may_raise(RuntimeError, model[0], x), may_raise(RuntimeError, model, x)]


@pytest.mark.ranks(2)
def test_a_resharded_layer_made_by_hand_is_named(ranks):
    for part, whole in ranks(2).run(by_hand):
        assert part.startswith(f"Linear: {RESHARDED}")
        assert whole == ""


def from_inside(recipe: str) -> str:
    """Return the message of a backward that starts at the output of a module inside an FSDP unit, after the unit has been
    resharded."""
    model = shardnet(recipe, worker.mesh(dp_shard=2))
    train(model, worker.mesh(dp_shard=2), range(2))
    kept: list[Tensor] = []
    model.blocks[0].up.register_forward_hook(lambda module, given, y: kept.append(y))
    x = torch.randn(BATCH // 2, SEQUENCE, model.size, device=worker.device(), dtype=torch.bfloat16).requires_grad_()
    model(x)
    return may_raise(RuntimeError, kept[0].float().sum().backward)


# Recipes whose weights FSDP gathers as values, as codes for both orientations, and as separate codes for each
# orientation
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "nvfp4"])
@pytest.mark.ranks(2)
def test_a_backward_that_begins_inside_a_unit_reads_no_freed_memory(ranks, recipe):
    for message in ranks(2).run(from_inside, recipe):
        assert message.startswith(f"blocks.0.up: {FREED}")


def refusal(make: Callable[..., nn.Module], reshard: int, **keywords: Any) -> str:
    mesh = worker.mesh(dp_shard=4)
    return may_raise(ValueError, dlp.fully_shard, make(), mesh=mesh, reshard_after_forward=reshard, **keywords)


def plain() -> nn.Module:
    return nn.Sequential(dlp.Linear(64, 64, recipe="fp8_current")).to(worker.device())


def converted() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64)).to(worker.device())
    dlp.convert(model, [{"name": "all", "match": ["*"], "recipe": "fp8_current"}], worker.mesh(dp_shard=4))
    return model


def integers() -> list[str]:
    master = {"quantize_from_master": True}
    return [
        refusal(converted, 2), refusal(plain, 2, **master), refusal(plain, 2), refusal(converted, 1), refusal(converted, 4),
        trained(2), trained(False),
    ]  # fmt: skip


def trained(reshard: bool | int) -> str:
    """Train two nested FSDP units with `reshard_after_forward` = `reshard` for two steps; return the last loss."""
    torch.manual_seed(0)
    mesh, model = worker.mesh(dp_shard=4), nn.Sequential(plain(), dlp.Linear(64, 64, device=worker.device()))
    dlp.fully_shard(model[0], mesh=mesh, reshard_after_forward=reshard)
    dlp.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer, mesh=mesh)
    for _ in range(2):
        loss = model(torch.ones(8, 64, device=worker.device())).square().mean()
        loss.backward()
        optimizer.step()
    return str(loss.item())


@pytest.mark.ranks(4)
def test_an_integer_reshard_after_forward_works_or_is_refused_by_name(ranks):
    for of_tp, of_master, by_hand, one, all_, some, none in ranks(4).run(integers):
        keeps = "reshard_after_forward=2 shards weights over 2 of 4 ranks after forward"
        assert keeps in of_tp and "0.weight is a DTensor on tp; set reshard_after_forward to True or False" in of_tp
        assert keeps in of_master and "quantize_from_master uses a gather of dlp" in of_master
        assert by_hand == one == all_ == ""
        assert some == none


def after_attach() -> str:
    model = plain()
    dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return may_raise(ValueError, dlp.fully_shard, model, mesh=worker.mesh(dp_shard=2))


@pytest.mark.ranks(2)
def test_sharding_comes_before_attaching(ranks):
    assert (
        ranks(2).run(after_attach)
        == ["0: dlp.fully_shard comes before dlp.attach, which has been called on this model"] * 2
    )
