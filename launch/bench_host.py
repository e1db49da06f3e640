"""What the host does for one tiny linear, forward and backward, beside `nn.Linear`, in the same run on one GPU.

    python -m launch.bench_host [--recipes fp8_current] [--profile fp8_current] [--json FILE]

The first table is of a layer alone, weights cast at the step boundary, and of other libraries' where they are installed.
The second is of ColumnParallelLinear with a DTensor weight under FSDP2, in a world of one rank: weights are cast where they
are used. FSDP2's own work is the same for both layers and larger than either, so `excess` leaves it out:
(layer under FSDP2 - nn.Linear under FSDP2 + nn.Linear) / nn.Linear.

Subjects take turns, many short ones, and each turn is compared with nn.Linear's turns of the same round, so that what slows
the machine for a while slows all of them. Shown are medians over rounds, and the quartiles between which half of them lie.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dlp
from dlp.kernels import loader
from launch.linear_subjects import BASE, RECIPES, TINY, Run, Subject, installed_peers

LIMITS = {"alone": 2.0, "under FSDP2": 2.5}  # of FP8 recipes
ROUNDS, COUNT, WARM = 41, 25, 5
SHAPE = "x".join(map(str, TINY))


@dataclass(frozen=True)
class Line:
    """Host time of one subject. ratio: what the limit is for; low, high: its quartiles."""

    recipe: str
    microseconds: float
    ratio: float
    low: float
    high: float
    boundary: float = 0.0


def in_turns(runs: Mapping[str, Run]) -> dict[str, list[float]]:
    """Microseconds that the host needs to queue each, by round."""
    for run in runs.values():
        for _ in range(WARM):
            run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            for name, run in runs.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(COUNT):
                    run()
                found[name].append((time.perf_counter() - start) * 1e6 / COUNT)
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return found


def line_of(recipe: str, times: Sequence[float], ratios: Sequence[float], boundary: Sequence[float] = (0.0,)) -> Line:
    """`times` and `ratios` of each round."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Line(recipe, statistics.median(times), middle, low, high, statistics.median(boundary))


def show(line: Line, limit: float) -> None:
    verdict = "" if not line.recipe.startswith("fp8") else f"  {'ok' if line.ratio <= limit else 'MISSED'} ({limit})"
    print(f"{line.recipe:15} {line.microseconds:8.1f} {line.ratio:6.2f} {line.low:6.2f} .. {line.high:4.2f} "
          f"{line.boundary:8.1f}{verdict}", flush=True)  # fmt: skip


def alone(recipes: Sequence[str]) -> list[Line]:
    """The first table."""
    print(f"\nhost, {SHAPE}: microseconds of forward + backward, ratio to {BASE}, its quartiles, step boundary")
    subjects = {recipe: Subject(recipe, TINY) for recipe in (BASE, *recipes)}
    for subject in subjects.values():
        subject.iteration()
    both = in_turns({name: subject.both for name, subject in subjects.items()})
    boundary = in_turns({name: subject.boundary for name, subject in subjects.items()})
    lines = []
    for name, times in both.items():
        ratios = [took / base for took, base in zip(times, both[BASE], strict=True)]
        lines.append(line_of(name, times, ratios, boundary[name]))
        show(lines[-1], LIMITS["alone"])
    return lines


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


def under_fsdp2(recipes: Sequence[str]) -> list[Line]:
    """The second table."""
    print(f"\nhost under FSDP2, {SHAPE}: microseconds, excess, its quartiles")
    plain = f"{BASE} alone"
    runs = {plain: Subject(BASE, TINY).both} | {recipe: sharded(recipe) for recipe in (BASE, *recipes)}
    found = in_turns(runs)
    lines = []
    for recipe in (BASE, *recipes):
        rounds = zip(found[recipe], found[BASE], found[plain], strict=True)
        excess = [(took - base) / one + 1 for took, base, one in rounds]
        lines.append(line_of(recipe, found[recipe], excess))
        show(lines[-1], LIMITS["under FSDP2"])
    return lines


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
    hosts = alone([*options.recipes, *installed_peers()])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    fsdp2 = under_fsdp2(options.recipes)
    dist.destroy_process_group()
    if options.profile:
        profile(options.profile)
    if options.json:
        tables = {"alone": hosts, "fsdp2": fsdp2}
        options.json.write_text(
            json.dumps({name: [asdict(line) for line in lines] for name, lines in tables.items()}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
