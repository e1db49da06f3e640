"""What the host does for one tiny linear, forward and backward, beside `nn.Linear`, in the same run on one GPU.

    python -m launch.bench_host [--recipes fp8_current] [--profile fp8_current]

The first table is of a layer alone, weights cast at the step boundary. The second is of ColumnParallelLinear with a DTensor
weight under FSDP2, in a world of one rank: weights are cast where they are used. FSDP2's own work is the same for both
layers, so `excess` leaves it out: (layer under FSDP2 - nn.Linear under FSDP2 + nn.Linear) / nn.Linear.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dlp
from dlp.kernels import loader
from launch.bench_linear import BASE, RECIPES, ROUNDS, TINY, Subject, show_hosts
from launch.bench_quantize import Run, host_us

SHARDED_LIMIT = 2.5


def sharded(recipe: str) -> Run:
    """Forward and backward of a tiny layer under FSDP2."""
    tokens, k, n = TINY
    mesh = dlp.build_mesh(device_type="cuda")
    if recipe == BASE:
        model: nn.Module = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        fully_shard(model, mesh=mesh["dp_shard"])
    else:
        layer = dlp.ColumnParallelLinear(k, n, tp=mesh["tp"], recipe=recipe, device="cuda", dtype=torch.bfloat16)
        model = dlp.fully_shard(nn.Sequential(layer), mesh=mesh)
        dlp.attach(model, torch.optim.SGD(model.parameters()), mesh=mesh)
    x, dy = (torch.randn(tokens, size, device="cuda").bfloat16() for size in (k, n))
    x.requires_grad_()
    parameters = list(model.parameters())

    def both() -> None:
        model(x).backward(dy)
        for tensor in (x, *parameters):
            tensor.grad = None

    return both


def show_sharded(recipes: Sequence[str], alone: float) -> dict[str, list[float]]:
    """The second table; `alone`: microseconds of nn.Linear by itself."""
    shape = "x".join(map(str, TINY))
    print(f"\nhost under FSDP2, {shape}: microseconds, ratio to {BASE} there, excess (limit {SHARDED_LIMIT})")
    found: dict[str, list[float]] = {}
    for recipe in (BASE, *recipes):
        both = sharded(recipe)
        for _ in range(3):
            both()
        took = host_us(both, 200, ROUNDS)
        base = found[BASE][0] if found else took
        found[recipe] = [took, took / base, (took - base + alone) / alone]
        print(f"{recipe:12} {took:8.1f} {took / base:6.2f} {found[recipe][2]:6.2f}", flush=True)
    return found


def profile(recipe: str) -> None:
    """Which functions the host spends its time in; backward's are on another thread, and not among them."""
    subject = Subject(recipe, TINY)
    for _ in range(8):
        subject.iteration()
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(500):
        subject.both()
    watch.disable()
    pstats.Stats(watch).sort_stats("tottime").print_stats(20)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.bench_host", description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--profile", metavar="RECIPE", help="list the functions of forward, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if code := loader.load_or_explain():
        return code
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    hosts = show_hosts(options.recipes)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    fsdp2 = show_sharded(options.recipes, hosts[BASE][0])
    dist.destroy_process_group()
    if options.profile:
        profile(options.profile)
    if options.json:
        options.json.write_text(json.dumps({"alone": hosts, "fsdp2": fsdp2}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
