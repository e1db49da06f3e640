"""Layers of every kind, recipe and strategy over two meshes of one process, run in random order through mapped memory: forwards
wait for their backwards, some of which run them again, ranks fall behind at random. The bits are those of collectives."""

from __future__ import annotations

import functools
import random
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.comm import transport
from dlp.comm.transport import Transport
from tests import pool as worker
from tests.emulated import emulation
from tests.played_transport import PlayedLane, PlayedSlot
from tests.twins import values, without_programs

FEATURES = 256
RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_block")
STRATEGIES = ("serial", "chunked", "chunked:2")


@functools.cache
def another_group() -> ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())))


def layers(draw: random.Random, groups: list[ProcessGroup]) -> list[torch.nn.Module]:
    """Of each recipe and strategy one, of either kind and over one of the groups."""
    made = []
    for recipe in RECIPES:
        for strategy in STRATEGIES:
            kind = draw.choice((dlp.ColumnParallelLinear, dlp.RowParallelLinear))
            options = {"tp": draw.choice(groups), "sequence_parallel": True, "recipe": recipe, "overlap": strategy}
            layer = kind(FEATURES, FEATURES, dtype=torch.bfloat16, device=worker.device(), **options)
            layer.cut = kind is dlp.RowParallelLinear
            made.append(layer)
    return made


def in_random_order(seed: int, count: int, mapped: bool) -> list[Tensor]:
    """So many forwards, and their backwards; y and the gradients of x and w of each."""
    torch.manual_seed(0)
    on_cpu, world = worker.device().type == "cpu", dist.get_world_size()
    groups, lanes = [worker.mesh(tp=world)["tp"].get_group(), another_group()], [PlayedLane(0.002), PlayedLane()]
    draw, mine = random.Random(seed), random.Random(seed + 1 + dist.get_rank())
    found: list[Tensor] = []
    waiting: list[tuple[torch.nn.Module, Tensor, Tensor]] = []

    def differentiate() -> None:
        layer, x, y = waiting.pop(draw.randrange(len(waiting)))
        y.backward(values(len(found), *y.shape).to(y.device))
        found.extend([y.detach(), x.grad, layer.weight.grad._local_tensor])  # type: ignore[list-item, union-attr]
        layer.zero_grad()

    with emulation() if on_cpu else nullcontext():
        for group, lane in zip(groups, lanes, strict=True):
            if not mapped:
                transport.use(group, None)
            elif on_cpu:
                transport.use(group, Transport(group, worker.device(), PlayedSlot, lane))
            else:
                transport.ask_for(group)
        all_layers = layers(draw, groups)
        for turn in range(count):
            if mine.random() < 0.05:
                time.sleep(mine.random() / 50)
            layer, tokens = draw.choice(all_layers), draw.choice((128, 256))
            shape = (world * tokens, FEATURES // world) if layer.cut else (tokens, FEATURES)
            x = values(1000 * turn + dist.get_rank(), *shape).to(worker.device()).requires_grad_()
            again = draw.random() < 0.3
            waiting.append((layer, x, checkpoint(layer, x, use_reentrant=False) if again else layer(x)))
            while waiting and (len(waiting) > 4 or draw.random() < 0.4):
                differentiate()
        while waiting:
            differentiate()
        transport.destroy()
    for lane in lanes:
        lane.end()
    return found


def differences(seed: int, count: int) -> tuple[int, int]:
    """How many tensors were compared, and how many of them differ. Between GPUs chunks need mapped memory, so there what is
    captured is compared with what is not."""
    found = in_random_order(seed, count, True)
    on_gpu = worker.device().type == "cuda"
    with without_programs() if on_gpu else nullcontext():
        expected = in_random_order(seed, count, on_gpu)
    pairs = list(zip(found, expected, strict=True))
    return len(pairs), sum(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_random_layers_in_random_order(ranks, device_type):
    count = 40 if device_type == "cpu" else 3500
    for compared, different in ranks(2).run(differences, 1, count, timeout=600.0):
        assert compared == 3 * count and different == 0
