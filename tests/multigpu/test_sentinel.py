"""`[train] sentinel`: a run without faults has the bits of a run without the sentinel, and a flipped bit ends the run
before the update."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench import flips
from dlp.comm import exchange, observer, transport
from dlp.comm.mapped import LayerPass, Transport
from dlp.comm.slots import CudaSlot
from dlp.comm.wire_checks import WireChecks
from dlp.kernels.ops import checksums
from launch.config.run_config import Config, load
from launch.settings.schema import ConfigError
from launch.training import sentinel
from launch.training.build import build
from launch.training.sentinel import Sentinel, SentinelError
from launch.training.trainer import Trainer
from tests import pool as worker
from tests import training
from tests.cases import few, nightly
from tests.refusals import must_raise, refuses
from tests.shared_slot import SharedSlot

LAYER = "model.layers.0.mlp.up_proj"
QKV, OUT, GATE, DOWN = (
    f"model.layers.0.{name}_proj" for name in ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.down")
)


def flipped(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor with the lowest bit of one element flipped."""
    bits = tensor.detach().clone().contiguous()
    bits.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])[3] ^= 1
    return bits


def flipped_byte(part: Tensor) -> Tensor:
    """Return a copy of the part with one bit flipped."""
    bits = part.contiguous().clone()
    bits.view(-1).view(torch.uint8)[3] ^= 1
    return bits


def losses(folder: Path, data: Path, *overrides: str) -> dict[int, Any]:
    """Return the losses of a complete run, by step. Runs in a worker."""
    folder.mkdir(exist_ok=True)
    config = training.config(folder, data, *overrides)
    training.run(config)
    return training.metrics(config)


class Flip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return flipped(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def stopped(folder: Path, data: Path, where: str, *overrides: str) -> str:
    """Return the error of a run with a flipped bit (`flipping`). Runs in a worker."""
    trainer, done = flipping(training.config(folder, data, *overrides), where)
    return must_raise(SentinelError, Trainer.train, trainer, done)


def skipped(folder: Path, data: Path, *overrides: str) -> tuple[dict[int, Any], dict[int, Any], list[str]]:
    """Return the skipped steps, losses and log of a run in which a bit of y flips. Runs in a worker."""
    config = training.config(folder, data, *overrides)
    Trainer.train(*flipping(config, "y"))
    return training.metrics(config, "skipped"), training.metrics(config), training.said(config)


def flipping(config: Config, where: str) -> tuple[Trainer, int]:
    """Return the trainer of a run, and the number of steps done. Rank 1 flips a bit of y of LAYER, or of the gradient,
    the optimizer state or the value of the weight of LAYER (`where`), in the second of two runs of the first microbatch
    of step 3."""
    trainer, done = training.trainer(config)
    module, calls = trainer.built.model.get_submodule(LAYER), [0]
    rank = trainer.built.dims.rank("tp")
    calls_of_step = 1 + trainer.built.batch.num_micro  # the sentinel runs the first microbatch twice

    def now() -> bool:
        return rank == 1 and calls[0] == 2 * calls_of_step + 2

    def after(module: Any, args: Any, y: Tensor) -> Tensor | None:
        calls[0] += torch.is_grad_enabled()
        return Flip.apply(y) if where == "y" and torch.is_grad_enabled() and now() else None

    @torch.no_grad()
    def flip(weight: Any) -> None:
        if now():
            state = trainer.built.optimizer.state[weight].get("exp_avg_sq")
            held = {"gradient": weight.grad, "weight": weight, "state": state}[where]._local_tensor
            held.copy_(flipped(held))

    module.register_forward_hook(after)
    if where != "y":
        module.weight.register_post_accumulate_grad_hook(flip)
    return trainer, done


class Damaging(WireChecks):
    """Checks of transfers on damaged data: rank 1 flips one bit of the first tensor that it receives with the purpose
    `purpose`."""

    purpose = ""

    def arrived(self, tensor: Tensor) -> None:
        if dist.get_rank() == 1 and observer._LABEL.get().purpose == self.purpose:
            type(self).purpose = "none"
            tensor.view(-1).view(torch.uint8)[3] ^= 16


def damaged(folder: Path, data: Path, purpose: str, *overrides: str) -> str:
    """Return the error of a run in which a transfer is damaged while a microbatch of step 1 runs under `WireChecks`. Runs
    in a worker."""
    trainer, done = training.trainer(training.config(folder, data, *overrides))
    Damaging.purpose = purpose
    with pytest.raises(SentinelError) as error, patch.object(sentinel, "WireChecks", Damaging):
        Trainer.train(trainer, done)
    return str(error.value)


class DamagedSlots:
    """Context that damages one use of mapped memory while transfers are checked: call `number` of the slot's method `call`
    in pass `layer_pass`. Calls for agreements on amaxes do not count.

    call = "push"    sends from rank 0 to the last rank: flip a bit of the sent part in flight
    call = "wait"    waits on the last rank: flip a bit of the part of rank 0 in the slot, when the part has arrived
    """

    def __init__(self, moves: Transport, call: str, layer_pass: LayerPass, number: int) -> None:
        slot = CudaSlot if moves.device.type == "cuda" else SharedSlot
        self._moves, self._call, self._run = moves, call, getattr(slot, call)
        self._pass, self._number, self._kept = layer_pass, number, list[Tensor]()
        self._patch = patch.object(slot, call, lambda slot, *given: self._called(slot, *given))

    def __enter__(self) -> None:
        self._patch.start()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()

    def _called(self, slot: Any, *given: Any) -> None:
        last = self._moves.world - 1
        here = self._moves.rank == last if self._call == "wait" else self._moves.rank == 0 and given[1] == last
        label = observer._LABEL.get()  # on CPUs, agreements on amaxes call `push` as well
        if here and WireChecks.active is not None and label.purpose != "amax":
            self._number -= self._moves._pass == self._pass
        if not here or self._number:
            self._run(slot, *given)
            return
        self._number = -1
        if self._call == "wait":
            self._run(slot)
            slot.payload[3] ^= 1
            return
        self._kept = [flipped_byte(given[0])]
        slot.follow()
        self._run(slot, *self._kept, *given[1:])


def damaged_in_memory(folder: Path, data: Path, call: str, layer_pass: LayerPass, number: int, *overrides: str) -> str:
    """Return the error of a run in which mapped memory is damaged while a microbatch of step 1 runs under `WireChecks`. Runs
    in a worker."""
    trainer, done = training.trainer(training.config(folder, data, *overrides))
    group = trainer.built.mesh["tp"].get_group()
    if trainer.built.device.type == "cpu":
        transport.use(group, Transport(group, trainer.built.device, SharedSlot))
    else:
        transport.ask_for(group, "cuda")
    moves = transport.transport_of(group)
    assert moves is not None
    try:
        with pytest.raises(SentinelError) as error, DamagedSlots(moves, call, layer_pass, number):
            Trainer.train(trainer, done)
    finally:
        transport.destroy()
    return str(error.value)


def damaged_send(folder: Path, data: Path, *overrides: str) -> str:
    """Return the error of a run in which a send of rank 0 in fprop of gate and up is damaged while a microbatch of step 1
    runs under `WireChecks`. Runs in a worker."""
    trainer, done = training.trainer(training.config(folder, data, *overrides))
    start, kept = exchange._start_round, list[Tensor]()

    def damaging(group: Any, to: int, source: int, *tensors: Tensor) -> list[Any]:
        label = observer._LABEL.get()
        if WireChecks.active is None or dist.get_rank() or (label.layer, label.purpose) != (GATE, "fprop"):
            return start(group, to, source, *tensors)
        kept.append(flipped_byte(tensors[0]))
        return start(group, to, source, *kept, *tensors[1:])

    with pytest.raises(SentinelError) as error, patch.object(exchange, "_start_round", damaging):
        Trainer.train(trainer, done)
    return str(error.value)


def damaged_coalesced() -> list[str]:
    """Gather two parts in one call, and flip a bit of the second part on rank 1; return the transfers that the check
    reports. Runs in a worker."""
    device, group = worker.device(), dist.group.WORLD
    parts = [torch.arange(24, device=device), torch.ones(5, dtype=torch.uint8, device=device)]
    into = [part.new_empty(2 * len(part)) for part in parts]

    class Damaging(WireChecks):
        def arrived(self, tensor: Tensor) -> None:
            if tensor is into[1] and dist.get_rank() == 1:
                tensor[7] ^= 1

    with Damaging() as checks, observer.label(layer="up", purpose="fprop"):
        group.allgather_into_tensor_coalesced(into, parts).wait()
    return [str(each) for each in checks.damaged()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.shards(tmp_path_factory.mktemp("sentinel"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "compiled"),
    few([("fp8_delayed", "false"), ("nvfp4", "false"), ("fp8_current", "true")], ("nvfp4", "false")),
)
def test_a_clean_run_is_the_run_without_it(ranks, tmp_path, data, device_type, recipe, compiled):
    """The sentinel checks two steps of the run. On GPUs other steps (4 and 6 to 9) are replays of a graph, and steps 4
    and 8 are followed by a validation."""
    every = 5 if device_type == "cuda" else 2
    given = f"--recipe {recipe} --train.compile {compiled} --train.steps {2 * every} --train.ledger off".split()
    given += "--train.global_batch 2 --train.sequence 32 --checkpoint.every 20".split()
    plain = ranks(2).run(losses, tmp_path / "plain", data, *given, timeout=300.0)[0]
    watched = ranks(2).run(losses, tmp_path / "watched", data, *given, "--train.sentinel", str(every), timeout=300.0)[0]
    assert watched == plain and len(plain) == 2 * every


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("where", "said", "microbatches"),
    [
        nightly("y of fp8_delayed", f"y of {LAYER} in forward", 1),
        nightly("y", f"y of {LAYER} in forward", 1),
        ("gradient", f"the gradient of {LAYER}.weight in backward", 2),
        nightly("gradient", f"the gradient of {LAYER}.weight in backward", 1),
        nightly("weight", f"{LAYER}.weight itself in memory", 1),
        ("state", f"exp_avg_sq of {LAYER}.weight in memory", 1),
    ],
)
def test_a_flipped_bit_is_named_before_the_update(ranks, tmp_path, data, where, said, microbatches):
    given = ["--train.sentinel", "1", "--train.ledger", "off", "--train.sentinel_tensors", "true"]
    given += ["--train.micro_batch", str(8 // microbatches)]
    given += ["--recipe", where.partition(" of ")[2] or "fp8_current"]
    # A skipped update would not repair a weight, an optimizer state or a delayed scale, so the run must stop despite "skip"
    given += ["--train.sentinel_action", "stop" if where in ("y", "gradient") else "skip"]
    messages = ranks(2).run(stopped, tmp_path, data, where.partition(" of ")[0], *given)
    assert messages[0] == messages[1]
    step = 2 if "delayed" in where else 3  # computing initial scales also calls the module, so the flip is in step 2
    assert messages[0].startswith(f"step {step}: the first microbatch ran twice and gave other bits, first on ")
    assert re.search(rf"rank 1 \([^)]*\): {re.escape(said)}", messages[0])
    file = f"sentinel-step-{step}-rank1.pt"
    assert f"{file} has both tensors; start again from the last checkpoint" in messages[0]
    kept = torch.load(tmp_path / "run" / file)
    assert kept["tensor"] == said.rpartition(" in ")[0]
    assert (kept["first"] != kept["second"]).sum() == 1


@pytest.mark.ranks(2)
def test_a_difference_skips_the_update_by_setting(ranks, tmp_path, data):
    given = ("--train.sentinel", "1", "--train.ledger", "off", "--train.steps", "4")
    steps, losses, said = ranks(2).run(skipped, tmp_path, data, *given, "--train.sentinel_action", "skip")[0]
    assert steps == {3: True} and len(losses) == 4
    (line,) = (line for line in said if line.startswith("step 3: the first microbatch ran twice"))
    assert f"y of {LAYER} in forward" in line and line.endswith("failed; the update was skipped")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("purpose", "said", "mesh"),
    [
        ("fprop", "fprop of model.embed_tokens", ()),
        ("dgrad", "dgrad of lm_head", ()),
        ("", "weights or gradients of no single layer", ("--mesh.tp", "1")),
    ],
)
def test_a_damaged_transfer_is_named_with_its_sender(ranks, tmp_path, data, purpose, said, mesh):
    given = ("--train.sentinel", "1", "--train.ledger", "off", *mesh)
    messages = ranks(2).run(damaged, tmp_path, data, purpose, *given)
    assert messages[0] == messages[1]
    told = f"{said} from rank 0, which arrived with other bits than were sent"
    assert re.search(rf"first on rank 1 \([^)]*\): {re.escape(told)}", messages[0])


@pytest.mark.parametrize("world", [2, nightly(4)])
@pytest.mark.parametrize(
    ("call", "number", "layer_pass", "said", "overlap", "sequence_parallel"),
    [
        ("push", 1, (f"{QKV} and siblings", "forward"), f"fprop of {QKV}", "serial", "true"),  # a gather
        ("push", 1, (OUT, "forward"), f"fprop of {OUT}", "serial", "true"),  # a reduce-scatter
        ("push", 1, (DOWN, "backward"), f"dgrad of {DOWN}", "chunked:2", "true"),  # a piece of a gather
        # A piece of a reduce-scatter
        ("push", 2, (f"{GATE} and siblings", "backward"), f"dgrad of {GATE}", "chunked:2", "true"),
        ("push", 1, (f"{QKV} and siblings", "backward"), f"wgrad of {QKV}", "chunked", "true"),
        ("push", 2, (OUT, "forward"), f"fprop of {OUT}", "chunked", "false"),  # the sum of an all-reduce
        ("wait", 1, (f"{GATE} and siblings", "forward"), f"fprop of {GATE}", "chunked", "true"),
        ("wait", 1, (DOWN, "forward"), f"fprop of {DOWN}", "serial", "true"),
    ],
)
def test_damage_in_mapped_memory_is_named(
    ranks, tmp_path, data, world, call, number, layer_pass, said, overlap, sequence_parallel
):
    given = f"--train.sentinel 1 --train.ledger off --groups.default.overlap {overlap} --mesh.tp {world}".split()
    given += f"--mesh.sequence_parallel {sequence_parallel} --model.kv_heads 4".split()
    messages = ranks(world).run(damaged_in_memory, tmp_path, data, call, layer_pass, number, *given)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 1: ")
    told = f"{said} from rank 0, which arrived with other bits than were sent, 1 in all: "
    assert re.search(rf"first on rank {world - 1} \([^)]*\): {re.escape(told)}", messages[0])


@pytest.mark.ranks(2)
def test_a_damaged_send_of_chunked_is_named(ranks, tmp_path, data):
    given = ["--train.sentinel", "1", "--train.ledger", "off", "--mesh.transport", "nccl"]
    given += ["--groups.default.overlap", "chunked"]
    messages = ranks(2).run(damaged_send, tmp_path, data, *given)
    assert messages[0] == messages[1]
    assert re.search(rf"first on rank 1 \([^)]*\): fprop of {re.escape(GATE)} from rank 0, which arrived", messages[0])


@pytest.mark.ranks(2)
def test_parts_that_are_gathered_in_one_call_are_summed(ranks):
    assert ranks(2).run(damaged_coalesced) == [[], ["fprop of up from rank 1"]]


def with_flips(out: Path) -> None:
    """Inject a flip of each kind on each rank and mesh (`bench.flips`). Runs in a worker."""
    try:
        with warnings.catch_warnings():
            flips.flip_all(dist.get_rank(), 2, out, range(24), range(0))
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.ranks(2)
@pytest.mark.full  # the flips of other tests in this file represent these flips
def test_random_flips_are_named_by_rank_and_layer(ranks, tmp_path):
    out = tmp_path / "flips.csv"
    out.write_text(",".join(flips.COLUMNS) + "\n")
    ranks(2).run(with_flips, out)
    checked = [row for row in flips.rows_of(out) if row["kind"] != "activation gradient" and row["bit"] != "-1"]
    assert len(checked) >= 16 and {row["kind"] for row in checked} == {*flips.KINDS} - {"activation gradient"}
    missed = [row for row in checked if (row["found"], row["names rank"], row["names layer"]) != ("True",) * 3]
    assert not missed


def test_gpus_must_repeat_their_bits():
    config = load("tiny", ["--train.sentinel", "64"])
    with refuses("expected deterministic = true on GPUs, got false: a microbatch that runs", ConfigError):
        build(config, None, torch.device("cuda"))  # type: ignore[arg-type]


def test_a_tensor_that_cannot_be_written_does_not_hide_the_difference(tmp_path):
    watch = Sentinel(torch.nn.Identity(), 1, folder=tmp_path / "none")
    watch._copies["forward", "y"] = [torch.ones(2), torch.zeros(2)]
    with patch.object(sentinel.dist, "get_rank", lambda: 3):
        assert watch._keep(("forward", "y"), 8).startswith("sentinel-step-8-rank3.pt could not be written (")


def test_no_step_is_watched_with_0():
    watched = [[step for step in range(1, 9) if Sentinel(torch.nn.Identity(), every).due(step)] for every in (0, 4)]
    assert watched == [[], [4, 8]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checksum_sees_each_bit(dtype):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for bit in range(8 * dtype.itemsize):
        other = x.clone()
        other.view(whole)[5] ^= -(2**bit) if bit == 8 * dtype.itemsize - 1 else 2**bit
        assert checksums(other) != checksums(x)
    assert checksums(x.clone()) == checksums(x)


def test_a_checksum_is_the_weighted_sum_of_words():
    data = torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    for start, size in ((0, 0), (0, 1), (3, 9), (0, 8192), (8, 8193), (5, 16_384), (0, 20_000)):
        memory = bytes(data[start : start + size].tolist()) + bytes(-size % 8)
        words = [int.from_bytes(memory[at : at + 8], "little") for at in range(0, len(memory), 8)]
        expected = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
        assert checksums(data[start : start + size]).item() % 2**64 == expected


def test_a_checksum_sees_another_order():
    x = torch.arange(4096, dtype=torch.int32)
    swapped, balanced = x.clone(), x.clone()
    swapped[8:12], swapped[12:16] = x[12:16], x[8:12]
    balanced[0], balanced[4095] = x[0] + 1, x[4095] - 1
    assert len({checksums(each).item() for each in (x, x.flip(0), x.roll(4), swapped, balanced)}) == 5
    assert checksums(x[:0]) == 0
    assert checksums(x[1:9]) == checksums(x[1:9].clone())  # a checksum does not depend on the address
    parts = x.view(torch.uint8).split([1, 7, 9, 0, len(x) * 4 - 17])
    assert torch.equal(checksums(*parts), torch.cat([checksums(each) for each in parts]))
