"""tp-partial gradients are summed over tp exactly once per backward, in one all-reduce, for every kind of gradient
accumulation.

The model is sequence-parallel and has each kind of partial gradient: a norm, the bias of a row-parallel linear, and the
weight and bias of a local linear on token shards. The expected gradients are from the same model on one rank, without
conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

import dlp
from dlp.comm import collectives
from dlp.parallel.model import grads
from tests import pool as worker
from tests.metrics import assert_all_close
from tests.net import full
from tests.refusals import may_raise

HIDDEN, BATCH, SEQUENCE = 8, 2, 6
GROUPS = [
    {"name": "up", "match": ["block.up"], "style": "column"},
    {"name": "down", "match": ["block.down"], "style": "row"},
    {"name": "sp", "match": ["block.**"], "sequence_parallel": True},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A block: x [B, S, H] -> [B, S, H]. `tp` is set if the block works on token shards."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.tp: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is None:
            return self.block(x)
        return dlp.gather_tokens(self.block(dlp.scatter_tokens(x, self.tp)), self.tp).view(x.shape)


def make(world_tp: int = 1, fsdp: bool = False, frozen: tuple[str, ...] = ()) -> Net:
    torch.manual_seed(3)
    model = Net()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5, 0.5)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    model.to(worker.device())
    if world_tp == 1:
        return model
    mesh = worker.mesh(tp=world_tp)
    dlp.convert(model, GROUPS, mesh, batch=(BATCH, SEQUENCE))
    model.tp = mesh["tp"]
    if fsdp:
        dlp.fully_shard(model.block, mesh=mesh)
        dlp.fully_shard(model, mesh=mesh)
    return model


def batch(index: int) -> Tensor:
    """Microbatch `index`, equal on all ranks, so that FSDP's average over ranks equals the gradient of the batch."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator).to(worker.device())


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def gradients(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return {name: full(g).clone() for name, g in found.items()}


def three_backwards(model: nn.Module) -> None:
    for i in range(3):
        loss_of(model(batch(i))).backward()


def three_backwards_one_reduction(model: nn.Module) -> None:
    """Run three backwards. FSDP reduces the accumulated gradients only in the last."""
    assert isinstance(model, FSDPModule)
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        loss_of(model(batch(i))).backward()


def three_backwards_unsharded(model: nn.Module) -> None:
    """Run `three_backwards_one_reduction` with parameters that stay gathered between the backwards."""
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)
    three_backwards_one_reduction(model)


def three_forwards_one_backward(model: nn.Module) -> None:
    sum(loss_of(model(batch(i))) for i in range(3)).backward()  # type: ignore[union-attr]


def after_zeroing(model: nn.Module) -> None:
    """Run three backwards, set the gradients to zero, not to None, and run three more."""
    three_backwards(model)
    model.zero_grad(set_to_none=False)
    three_backwards(model)


def with_evaluations_between(model: nn.Module) -> None:
    for i in range(3):
        loss = loss_of(model(batch(i)))
        with torch.no_grad():
            model(batch(9))
        loss_of(model(batch(8)))  # a forward without a backward
        loss.backward()


def twice_through_one_graph(model: nn.Module) -> None:
    loss = loss_of(model(batch(0)))
    loss.backward(retain_graph=True)
    loss.backward()
    loss_of(model(batch(1))).backward()


WAYS = [three_backwards, three_forwards_one_backward, after_zeroing, with_evaluations_between, twice_through_one_graph]
FSDP_WAYS = [three_backwards, three_backwards_one_reduction, three_backwards_unsharded, after_zeroing]


def run(way: Callable[[nn.Module], None], tp: int, fsdp: bool, frozen: tuple[str, ...] = ()) -> dict[str, Tensor]:
    model = make(tp, fsdp, frozen)
    parameters = dict(model.named_parameters())  # the parameters that an optimizer would hold
    way(model)
    return gradients(parameters)


def one_rank_way(way: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    return three_backwards if way in (three_backwards_one_reduction, three_backwards_unsharded) else way


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_partial_gradients_are_summed_once(ranks, world, way):
    expected = ranks(1).run(run, one_rank_way(way), 1, False)[0]
    for found in ranks(world).run(run, way, world, False):
        assert_all_close(found, expected, 1e-5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", FSDP_WAYS)
def test_partial_gradients_are_summed_once_under_fsdp(ranks, way):
    expected = ranks(1).run(run, one_rank_way(way), 1, False)[0]
    for found in ranks(4).run(run, way, 2, True):
        assert_all_close(found, expected, 1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("frozen", [("block.norm.weight",), ("block.down.bias", "block.mix.weight", "block.mix.bias")])
def test_frozen_parameters_have_no_gradient(ranks, frozen):
    expected = ranks(1).run(run, three_backwards, 1, False, frozen)[0]
    for found in ranks(2).run(run, three_backwards, 2, False, frozen):
        assert not set(frozen) & found.keys()
        assert_all_close(found, expected, 1e-5)


def count_sums() -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that are summed over tp in two backwards."""
    model, shapes = make(2), []

    def all_reduce(x: Tensor, group: Any) -> Any:
        shapes.append(tuple(x.shape))
        return collectives_all_reduce(x, group)

    collectives_all_reduce = collectives.all_reduce
    with patch.object(grads.collectives, "all_reduce", all_reduce):
        for i in range(2):
            loss_of(model(batch(i))).backward()
    return shapes


@pytest.mark.ranks(2)
def test_all_partial_gradients_travel_in_one_all_reduce(ranks):
    norm, down_bias, mix = 2 * HIDDEN, HIDDEN, HIDDEN * HIDDEN + HIDDEN
    for shapes in ranks(2).run(count_sums):
        # The last 5 numbers state for each parameter whether this rank has a gradient
        assert shapes == [(norm + down_bias + mix + 5,)] * 2


class OnSomeTokens(nn.Module):
    """A norm that is applied only to the first half of the tokens: with two token shards, only rank 0 calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rest = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.tp: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is None:
            rows = x.view(-1, HIDDEN)
            half = len(rows) // 2
            return self.rest(torch.cat([self.norm(rows[:half]), rows[half:]])).view(x.shape)
        rows = dlp.scatter_tokens(x, self.tp)
        rows = self.norm(rows) if self.tp.get_local_rank() == 0 else rows
        return dlp.gather_tokens(self.rest(rows), self.tp).view(x.shape)


def nodes_that_outlive_a_backward() -> list[str]:
    """Return the names of parameters whose AccumulateGrad node survives a backward, although no graph refers to the
    node."""
    model = make(2)
    for step in range(2):
        loss_of(model(batch(step))).backward()
        for parameter in model.parameters():
            if step == 0:
                get_gradient_edge(parameter).node.metadata["first"] = True
    return [name for name, p in model.named_parameters() if "first" in get_gradient_edge(p).node.metadata]


@pytest.mark.ranks(2)
def test_no_node_outlives_a_backward(ranks):
    """An AccumulateGrad node accumulates on the stream on which it was created. A node that survives its backward can
    race with later steps on another stream."""
    assert ranks(2).run(nodes_that_outlive_a_backward) == [[], []]


def on_some_tokens(tp: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = OnSomeTokens()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5, 0.5)
    model.to(worker.device())
    if tp > 1:
        mesh = worker.mesh(tp=tp)
        dlp.convert(model, [{"name": "sp", "match": ["**"], "sequence_parallel": True}], mesh, batch=(BATCH, SEQUENCE))
        model.tp = mesh["tp"]
    for i in range(2):
        loss_of(model(batch(i))).backward()
    return gradients(dict(model.named_parameters()))


@pytest.mark.ranks(2)
def test_a_rank_without_a_gradient_of_its_own_gets_the_sum(ranks):
    expected = ranks(1).run(on_some_tokens, 1)[0]
    for found in ranks(2).run(on_some_tokens, 2):
        assert_all_close(found, expected, 1e-5)


def from_elsewhere() -> str:
    model = make(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    loss_of(model(batch(0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # a gradient that was not computed by a backward of this model
    return may_raise(RuntimeError, optimizer.step)


@pytest.mark.ranks(2)
def test_a_step_on_gradients_that_no_backward_summed_raises(ranks):
    for message in ranks(2).run(from_elsewhere):
        assert "the gradients of 5 parameters (block.norm.weight, ...) were not summed over tp" in message
        assert "model(...)" in message


def two_optimizers() -> None:
    model = make(2)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:3], parameters[3:])]
    for optimizer in optimizers:
        dlp.attach(model, optimizer)
    for i in range(2):
        loss_of(model(batch(i))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_two_optimizers_may_share_a_model(ranks):
    ranks(2).run(two_optimizers)


class Attention(nn.Module):
    """A block, x [B, S, H] -> [B, S, H], with a norm over the features of each head after q, as in Qwen3."""

    heads, head_dim = 4, 4

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, self.heads * self.head_dim)
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.o = nn.Linear(self.heads * self.head_dim, HIDDEN)
        self.tp: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x if self.tp is None else dlp.scatter_tokens(x, self.tp)
        q = self.q_norm(self.q(rows).view(BATCH, SEQUENCE, -1, self.head_dim))
        y = self.o(torch.tanh(q).flatten(-2) if self.tp is None else torch.tanh(q).view(BATCH * SEQUENCE, -1))
        return y if self.tp is None else dlp.gather_tokens(y, self.tp).view(x.shape)


def head_norm(tp: int, sequence_parallel: bool, told: bool) -> tuple[str, dict[str, Tensor]]:
    """Return the error of the first step ("" if there is none), and the gradients before the step. told: a layer group
    declares that the norm reads sharded features."""
    torch.manual_seed(3)
    model = Attention()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5, 0.5)
    model.to(worker.device())
    if tp > 1:
        mesh = worker.mesh(tp=tp)
        groups = [
            {"name": "sp", "match": ["q", "o"], "sequence_parallel": sequence_parallel},
            {"name": "q", "match": ["q"], "style": "column"},
            {"name": "o", "match": ["o"], "style": "row"},
        ] + [{"name": "norm", "match": ["q_norm"], "style": "column"}] * told
        plan = dlp.convert(model, groups, mesh, batch=(BATCH, SEQUENCE))
        assert ("replicated on sharded features" in str(plan)) == told
        model.tp = mesh["tp"] if sequence_parallel else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    loss_of(model(batch(0))).backward()
    found = gradients(dict(model.named_parameters()))
    return may_raise(RuntimeError, optimizer.step), found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_a_norm_on_cut_features_is_summed_where_its_group_says_so(ranks, world, sequence_parallel):
    _, expected = ranks(1).run(head_norm, 1, False, True)[0]
    for said, found in ranks(world).run(head_norm, world, sequence_parallel, True):
        assert said == ""
        assert_all_close(found, expected, 1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_a_norm_on_cut_features_that_nobody_declared_stops_the_first_step(ranks, world):
    for said, _ in ranks(world).run(head_norm, world, True, False):
        assert said.startswith("q_norm.weight is replicated on tp, but its gradient differs between tp ranks (norms ")
        assert "style = 'column'" in said


class CutByHand(nn.Module):
    """A plain norm and two explicitly constructed layers. Between the layers is a plain parameter that the user sharded
    over tp."""

    def __init__(self, tp: DeviceMesh, cut: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.RMSNorm(16, device=worker.device())
        self.up = dlp.ColumnParallelLinear(16, 32, tp=tp, device=worker.device())
        self.scale = nn.Parameter(torch.full((32 // tp.size(),), cut, device=worker.device()))
        self.down = dlp.RowParallelLinear(32, 16, tp=tp, device=worker.device())

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)) * self.scale)


def cut_by_hand(values: Sequence[float]) -> str:
    tp = worker.mesh(tp=2)["tp"]
    model = CutByHand(tp, values[tp.get_local_rank()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    dlp.attach(model, optimizer)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(worker.device())
    model(x).square().sum().backward()
    return may_raise(RuntimeError, optimizer.step)


@pytest.mark.ranks(2)
def test_plain_parameters_beside_layers_made_by_hand_are_compared_where_ranks_begin_with_equal_ones(ranks):
    """Initial values that differ between ranks show that the user sharded the scale over tp, so its gradients are not
    compared. With equal initial values the scale counts as replicated, and its gradients must be equal."""
    assert ranks(2).run(cut_by_hand, (1.0, 0.5)) == ["", ""]
    for said in ranks(2).run(cut_by_hand, (1.0, 1.0)):
        assert said.startswith("scale is replicated on tp, but its gradient differs between tp ranks (norms ")
