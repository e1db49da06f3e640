"""Diverging ranks: the checks that stop a run if replicas of a parameter differ, or if ranks run different
operations."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import dlp
from dlp.comm import lockstep
from dlp.parallel.model import replicas
from tests import pool as worker
from tests.multigpu.test_grads import Attention, batch, loss_of, make
from tests.refusals import may_raise

said_by = partial(may_raise, (RuntimeError, ValueError))


def two_layers(**sizes: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)).to(worker.device()), worker.mesh(**sizes)
    dlp.convert(model, [], mesh)
    return model, mesh


def x_of(seed: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(worker.device())


# ---- parameters that are replicated over data-parallel ranks


def without_fully_shard(sizes: dict[str, int], attached: bool, averages: bool) -> tuple[str, str]:
    """Train a model that is not sharded by FSDP on different data on each dp rank. Return the error of the steps and
    the error of `dlp.state_dict` ("" if there is none). `averages`: the user all-reduces the gradients."""
    model, _ = two_layers(**sizes)
    optimizer = SGD(model.parameters(), lr=0.1)
    if attached:
        dlp.attach(model, optimizer)

    def steps() -> None:
        for step in range(3):
            model(x_of(10 * step + dist.get_rank())).square().sum().backward()
            for parameter in model.parameters() if averages else ():
                dist.all_reduce(parameter.grad.to_local(), op=dist.ReduceOp.SUM)
            optimizer.step()
            optimizer.zero_grad()

    return said_by(steps), said_by(dlp.state_dict, model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("sizes", [{"tp": 1}, {"tp": 1, "dp_replicate": 2, "dp_shard": 1}], ids=["shard", "replicate"])
def test_dp_ranks_that_train_alone_are_stopped(ranks, sizes, attached):
    axis = "dp_replicate" if "dp_replicate" in sizes else "dp_shard"
    for steps, saved in ranks(2).run(without_fully_shard, sizes, attached, False):
        assert steps.startswith(f"0.weight is not sharded over {axis}, and its replicas on the ranks of {axis} ")
        assert "dlp.fully_shard(model, mesh=mesh)" in steps and "dlp.fully_shard(model, mesh=mesh)" in saved
    assert ranks(2).run(without_fully_shard, sizes, attached, True) == [("", "")] * 2


# ---- parameters that are replicated over tp


def partial_step(way: str) -> str:
    """Return the error of the first step of a model without `dlp.attach`. `way`: "norm behind columns": a norm reads
    features that are sharded over tp; "copy of a norm behind columns": the same, in a copy of the model; "steps in hooks":
    optimizers step inside of the backward; else they step after it."""
    torch.manual_seed(3)
    model: nn.Module
    if way.endswith("norm behind columns"):
        model = Attention()
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.5, 0.5)
        model.to(worker.device())
        groups = [{"name": "q", "match": ["q"], "style": "column"}, {"name": "o", "match": ["o"], "style": "row"}]
        dlp.convert(model, groups, worker.mesh(tp=2))
        model.tp = None
        model.o.register_forward_pre_hook(lambda _, args: (args[0].flatten(-2) if args[0].dim() > 3 else args[0],))
        model = copy.deepcopy(model) if way.startswith("copy") else model
    else:
        model = make(2)
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}
    if way == "steps in hooks":
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())

    def step() -> None:
        loss_of(model(batch(0))).backward()
        for optimizer in optimizers.values():
            optimizer.step()

    return said_by(step)


@pytest.mark.ranks(2)
def test_partial_gradients_stop_steps_without_attach(ranks):
    assert ranks(2).run(partial_step, "steps behind backward") == ["", ""]
    for way in ("norm behind columns", "copy of a norm behind columns"):
        for said in ranks(2).run(partial_step, way):
            assert said.startswith(
                "q_norm.weight is replicated on tp, but its gradient differs between tp ranks (norms "
            )
    for said in ranks(2).run(partial_step, "steps in hooks"):
        assert said.startswith("an optimizer steps inside of a backward, before the gradient of block.")
        assert "is summed over tp" in said


def apart(way: str) -> str:
    """Return the error that stops the steps of a model on tp after rank 1 has diverged as `way` says ("" if none)."""
    model, mesh = two_layers(tp=2)
    optimizer = SGD(model.parameters(), lr=1e-4)
    dlp.attach(model, optimizer)
    me = mesh["tp"].get_local_rank()

    def steps() -> None:
        for step in range(12):
            model(x_of(step)).square().sum().backward()
            if me and step == 3 and way == "skips a layer":
                model[0].weight.grad = None
            if me and step == 0 and way == "another pass":
                model[0].weight.grad.to_local().neg_()
            if me and step == 0 and way == "another order":
                grad = model[0].weight.grad.to_local()
                grad.copy_(grad.roll(8))
            if me and step == 0 and way == "no gradient":
                model[0].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            if me and step == 5 and way == "writes":
                with torch.no_grad():
                    model[1].bias.to_local().add_(1e-3)

    return said_by(steps)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("together", ""),
        (
            "skips a layer",
            "0.weight is replicated on tp, and its replicas on the ranks of tp diverged before step 5",
        ),
        ("writes", "1.bias is replicated on tp, and its replicas on the ranks of tp diverged before step 7"),
        ("another pass", "0.weight is replicated on tp, but its gradient differs between tp ranks"),
        ("another order", "0.weight is replicated on tp, but its gradient differs between tp ranks"),
        ("no gradient", "0.weight is replicated on tp, but its gradient differs between tp ranks"),
    ],
)
def test_tp_ranks_that_part_are_stopped(ranks, way, expected):
    for said in ranks(2).run(apart, way):
        assert said.startswith(expected) and bool(said) == bool(expected), said


def steps_that_compare() -> tuple[list[int], list[int]]:
    """Train 102 steps; return the steps in which ranks compare digests of parameters, and the steps in which ranks
    compare the operations that they run."""
    model, _ = two_layers(tp=2)
    optimizer = SGD(model.parameters(), lr=1e-4)
    dlp.attach(model, optimizer)
    digests, told = set[int](), set[int]()
    gather, all_gather = replicas.gather, lockstep.collectives.all_gather

    def counted_gather(*args: Any) -> Tensor:
        digests.add(step)
        return gather(*args)

    def counted_exchange(*args: Any) -> Any:
        told.add(step)
        return all_gather(*args)

    for step in range(102):
        with patch.object(lockstep.collectives, "all_gather", counted_exchange):
            loss = model(x_of(step)).square().sum()
        loss.backward()
        with patch.object(replicas, "gather", counted_gather):
            optimizer.step()
        optimizer.zero_grad()
    return sorted(digests), sorted(told)


@pytest.mark.ranks(2)
def test_warm_steps_compare_nothing(ranks):
    for digests, told in ranks(2).run(steps_that_compare):
        assert digests == [*range(10), 100] and told == [0]


def test_a_model_that_dies_inside_of_a_step_does_not_disturb_the_hooks_of_optimizers():
    """The garbage collector may delete an attached model while torch iterates over the global optimizer hooks. The
    deletion must not change the collection of hooks then."""
    models = [nn.Sequential(dlp.Linear(16, 16)) for _ in range(2)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        dlp.attach(model, optimizer)
    died = weakref.ref(models[1])

    def die(*_: Any) -> None:
        del models[1:], optimizers[1:]
        gc.collect()

    registers = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    # `die` is not the last hook, so that torch continues to iterate after it
    handles = [register(hook) for hook in (die, lambda *_: None) for register in registers]
    del model, optimizer
    models[0](torch.ones(4, 16)).sum().backward()
    optimizers[0].step()
    for handle in handles:
        handle.remove()
    assert died() is None


# ---- actions of ranks


def with_recipes(door: str, own: bool) -> str:
    mesh, recipe = worker.mesh(tp=2), "bf16" if own and dist.get_rank() == 1 else "fp8_current"
    model = nn.Sequential(nn.Linear(16, 16)).to(worker.device())
    if door == "attach":
        hand = dlp.ColumnParallelLinear(16, 16, tp=mesh["tp"], device=worker.device(), recipe=recipe)
        model = nn.Sequential(hand)
        return said_by(dlp.attach, model, SGD(model.parameters(), lr=0.1))
    if door == "convert":
        return said_by(dlp.convert, model, [{"name": "all", "match": ["**"], "recipe": recipe}], mesh)
    dlp.convert(model, [], mesh)
    return said_by(dlp.set_recipe, model, "0", recipe)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("door", ["convert", "attach", "set_recipe"])
def test_ranks_with_different_recipes_are_refused(ranks, door):
    assert ranks(2).run(with_recipes, door, False) == ["", ""]
    for said in ranks(2).run(with_recipes, door, True):
        assert said.startswith(f"dlp.{door}: rank 1 has another plan for 0 than rank 0: ") and "bf16" in said


def first_step(way: str, sizes: dict[str, int], attached: bool) -> str:
    model, mesh = two_layers(**sizes)
    if sizes["tp"] == 1:
        dlp.fully_shard(model, mesh=mesh)
    optimizer = SGD(model.parameters(), lr=1e-4)
    if attached:
        dlp.attach(model, optimizer)
    last = dist.get_rank() == 1

    def step() -> None:
        for micro in range(2 if last and way == "a microbatch fewer" else 3):
            rows = {"other tokens": 4, "an empty batch": 0}.get(way, 8) if last and micro == 1 else 8
            model(x_of(micro)[:rows]).square().sum().backward()
        optimizer.step()

    return said_by(step)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("attached", [True, False])
def test_what_ranks_do_is_compared_in_the_first_step(ranks, attached):
    tp, dp = {"tp": 2}, {"tp": 1}
    for sizes in (tp, dp):
        assert ranks(2).run(first_step, "alike", sizes, attached) == ["", ""]
        for said in ranks(2).run(first_step, "a microbatch fewer", sizes, attached):
            assert "rank 0 begins forward 3" in said and "rank 1 begins the optimizer's step after 2 forwards" in said
    for way, rows in (("other tokens", 4), ("an empty batch", 0)):
        for said in ranks(2).run(first_step, way, tp, attached):
            assert "rank 0 begins forward 2 of 128 values" in said
            assert f"rank 1 begins forward 2 of {16 * rows} values" in said
        # Data-parallel ranks may have different numbers of tokens
        assert ranks(2).run(first_step, "other tokens", dp, attached) == ["", ""]


def test_a_thread_that_waits_inside_of_a_pass_is_named_once():
    class Trains:
        last, last_pass, steps = SimpleNamespace(name="blocks.0.up"), "backward", 4

    session, said, release, inside = Trains(), list[str](), threading.Event(), threading.Event()
    watch = lockstep.WaitWatch(said.append)
    watch._started = True  # no thread starts: this test calls the check (`look`) directly

    def waits() -> None:
        watch.add(session)
        code = compile("inside.set(); release.wait(60)", "site-packages/torch/distributed/c10d.py", "exec")
        exec(code, {"inside": inside, "release": release})

    with patch.object(lockstep, "in_a_pass", lambda frame: True):
        thread = threading.Thread(target=waits)
        thread.start()
        assert inside.wait(10)
        time.sleep(0.2)
        for now in (0.0, lockstep.PATIENCE - 1, lockstep.PATIENCE, lockstep.PATIENCE + 1, 9 * lockstep.PATIENCE):
            watch.look(now)
    release.set()
    thread.join()
    assert len(said) == 1 and "in step 5; the last layer that ran is blocks.0.up, in backward" in said[0]


def test_only_a_thread_inside_of_collectives_autograd_or_layers_waits_for_ranks():
    def frame_in(file: str) -> Any:
        namespace: dict[str, Any] = {"sys": sys}
        exec(compile("frame = sys._getframe()", file, "exec"), namespace)
        return namespace["frame"]

    assert lockstep.in_a_pass(frame_in("/lib/torch/autograd/graph.py"))
    assert lockstep.in_a_pass(frame_in("/lib/dlp/comm/collectives.py"))
    assert not lockstep.in_a_pass(frame_in("/home/me/train.py")) and not lockstep.in_a_pass(None)


# ---- causes


class PartOfHeads(nn.Module):
    """Block that multiplies each head of q, 4 features, elementwise by the 4 features of k. With `gate`, k has one feature,
    which multiplies all of q."""

    def __init__(self, gate: bool, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(dropout)
        self.q, self.k, self.o = nn.Linear(8, 16), nn.Linear(8, 1 if gate else 4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(x))
        q = self.q(x)
        scaled = (q.view(*q.shape[:-1], -1, self.k.out_features) * self.k(x).unsqueeze(-2)).flatten(-2)
        return self.o(torch.tanh(scaled))


def cause(gate: bool, dropout: float, parts: bool) -> str:
    """Return the error of the first step. parts: q and o are sharded over tp and k is not, so the gradient of k on a rank
    covers only the heads of this rank."""
    torch.manual_seed(3)
    model, mesh = PartOfHeads(gate, dropout).to(worker.device()), worker.mesh(tp=2)
    groups = [{"name": "q", "match": ["q"], "style": "column"}, {"name": "o", "match": ["o"], "style": "row"}]
    dlp.convert(model, groups if parts else [], mesh)
    torch.manual_seed(dist.get_rank() if dropout else 0)
    optimizer = SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    loss_of(model(batch(0))).backward()
    return said_by(optimizer.step)


@pytest.mark.ranks(2)
def test_the_layer_that_makes_gradients_partial_is_named_with_its_remedy(ranks):
    assert ranks(2).run(cause, False, 0.0, False) == ["", ""]
    for gate in (False, True):
        for said in ranks(2).run(cause, gate, 0.0, True):
            assert said.startswith("k.weight is replicated on tp, but its gradient differs between tp ranks (norms ")
            assert (
                "output is combined with features that are sharded over tp" in said
                and "norm" not in said.split("norms")[1]
            )
    for said in ranks(2).run(cause, False, 0.5, False):
        assert "The random numbers of tp ranks differ, and drop drops values" in said
        assert "torch.manual_seed" in said
