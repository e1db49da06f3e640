"""tp-partial gradients that only some ranks have; and backwards that are refused, because partial gradients would not
be summed after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dlp
from tests import pool as worker
from tests.cases import nightly
from tests.metrics import assert_all_close, assert_close
from tests.multigpu.test_grads import (
    HIDDEN,
    Net,
    batch,
    gradients,
    loss_of,
    make,
    run,
    three_backwards,
    three_backwards_one_reduction,
)  # fmt: skip
from tests.refusals import may_raise


def gathered_between() -> dict[str, Tensor]:
    """Run three backwards with parameters that FSDP keeps gathered after forward; FSDP reduces the accumulated gradients
    only in the last backward. Return the gradients."""
    model, mesh = make(2), worker.mesh(tp=2)
    for module in (model.block, model):
        dlp.fully_shard(module, mesh=mesh, reshard_after_forward=False)
    parameters = dict(model.named_parameters())
    three_backwards_one_reduction(model)
    return gradients(parameters)


@pytest.mark.parametrize("world", [2, nightly(4)])
def test_gathered_parameters_have_no_part_in_the_sums(ranks, world):
    expected = ranks(1).run(run, three_backwards, 1, False)[0]
    for found in ranks(world).run(gathered_between, timeout=30):
        assert_all_close(found, expected, 1e-5)


class Choosing(nn.Module):
    """Three norms of the same size on token shards, of which each rank runs one (`choice`)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN, bias=False) for _ in range(3))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        rows: Tensor = self.norms[choice](x)
        return rows


def ranks_that_differ() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the gradients after two backwards, the gradient to which only this rank contributed, computed by torch, and
    the index of this rank."""
    model, mesh, rank = Choosing().to(worker.device()), worker.mesh(tp=2), dist.get_rank()
    dlp.convert(model, [{"name": "sp", "match": ["norms.*"], "sequence_parallel": True}], mesh, batch=(1, 8))
    rows = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(worker.device())
    weight = torch.ones(HIDDEN, requires_grad=True, device=rows.device)
    torch.nn.functional.layer_norm(rows, (HIDDEN,), weight).square().sum().backward()
    for _ in range(2):
        model(rows, rank).square().sum().backward()
    assert weight.grad is not None
    return gradients(dict(model.named_parameters())), 2 * weight.grad, torch.tensor(rank)


@pytest.mark.ranks(2)
def test_gradients_are_paired_by_name(ranks):
    """A rank without a gradient gets the gradient of the other rank. A parameter that no rank used has no gradient."""
    results = ranks(2).run(ranks_that_differ)
    for found, _, _ in results:
        assert found.keys() == {"norms.0.weight", "norms.1.weight"}
        for _, own, rank in results:
            assert_close(found[f"norms.{int(rank)}.weight"], own, 1e-5, str(int(rank)))


@dataclass
class Wrapped:
    """Output of a model. pytree treats the class as a leaf."""

    y: Tensor


class Wrapping(Net):
    def forward(self, x: Tensor) -> Wrapped:  # type: ignore[override]
        return Wrapped(super().forward(x))


def of_a_submodule(model: Net) -> None:
    assert model.tp is not None
    loss_of(model.block(dlp.scatter_tokens(batch(0), model.tp))).backward()


def of_the_forward_method(model: Net) -> None:
    loss_of(model.forward(batch(0))).backward()


def of_an_unknown_output(model: Net) -> None:
    model.__class__ = Wrapping
    loss_of(model(batch(0)).y).backward()


def beside_a_known_output(model: Net) -> None:
    """Run a complete backward, whose gradients are summed over tp, and then a backward of a submodule, in the same
    optimizer step."""
    loss_of(model(batch(0))).backward()
    of_a_submodule(model)


def by_autograd_grad(model: Net) -> None:
    torch.autograd.grad(loss_of(model(batch(0))), list(model.parameters()))


def by_autograd_grad_of_a_submodule(model: Net) -> None:
    assert model.tp is not None
    torch.autograd.grad(loss_of(model.block(dlp.scatter_tokens(batch(0), model.tp))), [model.block.norm.weight])


NOT_MADE = "(block.norm.weight, ...) were not summed over tp: the loss must be computed from"
TAKEN = "torch.autograd.grad returns the partial gradient of block.norm.weight on this rank, before the sum over tp"
REFUSED = {
    of_a_submodule: NOT_MADE, of_the_forward_method: NOT_MADE, of_an_unknown_output: NOT_MADE,
    beside_a_known_output: NOT_MADE, by_autograd_grad: TAKEN, by_autograd_grad_of_a_submodule: TAKEN,
}  # fmt: skip


def raised(fsdp: bool, *ways: Callable[[Net], None]) -> list[str]:
    found = []
    for way in ways:
        found.append(may_raise(RuntimeError, way, make(2, fsdp)) or f"{way.__name__}: no error")
    return found


@pytest.mark.ranks(2)
def test_a_backward_whose_sums_would_not_come_is_refused(ranks):
    for messages in ranks(2).run(raised, False, *REFUSED):
        for message, expected in zip(messages, REFUSED.values(), strict=True):
            assert expected in message


@pytest.mark.ranks(4)
def test_a_backward_whose_sums_would_not_come_is_refused_under_fsdp(ranks):
    for messages in ranks(4).run(raised, True, of_a_submodule):
        assert NOT_MADE in messages[0]


def of_inputs_only() -> tuple[float, list[str]]:
    """Compute only the gradient of x, from the output of a submodule; this is allowed. Return the norm of the gradient of
    x, and the names of parameters with gradients."""
    model, mesh = make(2), worker.mesh(tp=2)
    x = dlp.scatter_tokens(batch(0), mesh["tp"]).requires_grad_()
    (dx,) = torch.autograd.grad(loss_of(model.block(x)), [x])
    return float(dx.norm()), list(gradients(dict(model.named_parameters())))


@pytest.mark.ranks(2)
def test_gradients_of_inputs_are_nobodys_part(ranks):
    for norm, left in ranks(2).run(of_inputs_only):
        assert norm > 0 and left == []


def notes_of_an_explicit_layer() -> tuple[list[str], list[str]]:
    """Return the notes of a sequence-parallel layer after a backward: without and with `dlp.attach`."""
    found = []
    for attached in (False, True):
        layer = dlp.RowParallelLinear(32, 16, bias=True, tp=worker.mesh(tp=2)["tp"], sequence_parallel=True)
        model = torch.nn.Sequential(layer.to(worker.device()))
        if attached:
            dlp.attach(model, torch.optim.SGD(model.parameters()))
        model(torch.ones(8, 16, device=worker.device())).sum().backward()
        found.append(sorted(layer.core.session.noted))
    return found[0], found[1]


@pytest.mark.ranks(2)
def test_an_explicit_layer_without_attach_says_that_nothing_sums_its_gradients(ranks):
    said = "RowParallelLinear: the gradient of bias covers only the tokens of this tp rank: call dlp.attach"
    assert ranks(2).run(notes_of_an_explicit_layer) == [([said], [])] * 2
