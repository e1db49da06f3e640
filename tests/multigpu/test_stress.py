"""Layers of every kind, recipe and strategy over two meshes of one process, run in random order through mapped memory,
compared bit for bit with collectives. With four ranks, the first mesh has one tp group of four ranks, and the second
mesh has two tp groups of two ranks.

Backwards run later than other forwards, some backwards recompute, and ranks are delayed at random.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.comm import transport
from dlp.comm.mapped import Transport
from dlp.quant.recipe import GEMMS, names
from tests import pool as worker
from tests.emulated import emulation
from tests.launch_order import in_order
from tests.paired_models import values, without_programs
from tests.simulated_transport import SimulatedLane, SimulatedSlot

FEATURES = 512
# Recipes that run on CPU ranks; GPUs run all recipes
EMULATED = (
    "bf16",
    "fp8_current",
    "fp8_delayed",
    "fp8_block",
    "fp8_rowwise",
    "mxfp8",
    "nvfp4",
)
STRATEGIES = ("serial", "chunked", "chunked:2")


@functools.cache
def another_mesh() -> DeviceMesh:
    """Return a second mesh over the same ranks: over two ranks, one group of two; over four ranks, two groups of two."""
    return dlp.build_mesh(tp=2, dp_shard=-1, device_type=worker.device().type)


def layers(draw: random.Random, meshes: list[DeviceMesh]) -> list[tuple[torch.nn.Module, int]]:
    """Draw two layers of every recipe: column- or row-parallel, with or without siblings and sequence parallelism, with a
    random strategy for each GEMM, on one of the meshes. Return each layer with the number of its tp ranks."""
    made = []
    for recipe in 2 * (EMULATED if worker.device().type == "cpu" else tuple(names())):
        kind, several = draw.choice((dlp.ColumnParallelLinear, dlp.RowParallelLinear)), draw.random() < 0.3
        tp = draw.choice(meshes)["tp"]
        options = {"tp": tp, "sequence_parallel": draw.random() < 0.7, "recipe": recipe,
                   "overlap": {gemm: draw.choice(STRATEGIES) for gemm in GEMMS}}  # fmt: skip
        outs = (FEATURES, 2 * FEATURES) if several and kind is dlp.ColumnParallelLinear else FEATURES
        made.append((kind(FEATURES, outs, dtype=torch.bfloat16, device=worker.device(), **options), tp.size()))
    return made


def input_shape(draw: random.Random, layer: torch.nn.Module, tp: int) -> tuple[int, int]:
    style = layer.core.spec.style
    tokens = draw.choice((128, 256)) * (1 if style.cut_x == 0 else tp)
    return tokens, FEATURES // tp if style.cut_x == 1 else FEATURES


def in_random_order(seed: int, count: int, mapped: bool) -> list[Tensor]:
    """Run forwards and the corresponding backwards in random order. Return, for one backward after the other, three
    tensors: all y of the layer, the gradient of x, and the gradients of all w."""
    torch.manual_seed(0)
    on_cpu, world = worker.device().type == "cpu", dist.get_world_size()
    meshes, lanes = [worker.mesh(tp=world), another_mesh()], [SimulatedLane(0.002), SimulatedLane()]
    draw, mine = random.Random(seed), random.Random(seed + 1 + dist.get_rank())
    found: list[Tensor] = []
    waiting: list[tuple[torch.nn.Module, Tensor, Sequence[Tensor]]] = []

    def differentiate() -> None:
        layer, x, ys = waiting.pop(draw.randrange(len(waiting)))
        torch.autograd.backward(ys, [values(len(found), *y.shape).to(y.device) for y in ys])
        grads = [weight.grad._local_tensor.flatten() for weight in layer.parameters()]  # type: ignore[union-attr]
        found.extend([torch.cat([y.detach().flatten() for y in ys]), x.grad, torch.cat(grads)])  # type: ignore[list-item]
        layer.zero_grad()

    with ExitStack() as checked:
        checked.enter_context(emulation() if on_cpu else nullcontext())
        for group, lane in zip([mesh["tp"].get_group() for mesh in meshes], lanes, strict=True):
            if not mapped:
                transport.use(group, None)
            elif on_cpu:
                transport.use(group, Transport(group, worker.device(), SimulatedSlot, lane))
            else:
                transport.ask_for(group, "cuda")
        if mapped and on_cpu and world == 2:  # the search for races requires transports with the same number of ranks
            both = [transport.transport_of(mesh["tp"].get_group()) for mesh in meshes]
            checked.enter_context(in_order(*both))  # type: ignore[arg-type]
        all_layers = layers(draw, meshes)
        for turn in range(count):
            if mine.random() < 0.05:
                time.sleep(mine.random() / 50)
            layer, tp = draw.choice(all_layers)
            shape = input_shape(draw, layer, tp)
            x = values(1000 * turn + dist.get_rank(), *shape).to(worker.device()).requires_grad_()
            again = draw.random() < 0.3
            y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            waiting.append((layer, x, [y] if isinstance(y, Tensor) else y))
            while waiting and (len(waiting) > 4 or draw.random() < 0.4):
                differentiate()
        while waiting:
            differentiate()
        transport.destroy()
    for lane in lanes:
        lane.end()
    return found


def differences(seed: int, count: int) -> tuple[int, int]:
    """Return the number of compared tensors, and the number of different tensors. On CPUs the comparison is between
    mapped memory and collectives. On GPUs `chunked` needs mapped memory, so the comparison is between captured and
    launched passes."""
    found = in_random_order(seed, count, True)
    on_gpu = worker.device().type == "cuda"
    with without_programs() if on_gpu else nullcontext():
        expected = in_random_order(seed, count, on_gpu)
    pairs = list(zip(found, expected, strict=True))
    return len(pairs), sum(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.full  # test_programs.py and test_transport.py have layers and transfers through mapped memory
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_layers_in_random_order(ranks, device_type, share_gpu, seed, world):
    count = 20 if device_type == "cpu" else 100 if share_gpu else 1750
    for compared, different in ranks(world).run(differences, seed, count, timeout=600.0):
        assert compared == 3 * count and different == 0
