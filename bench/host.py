"""Host time of one small linear, forward and backward, compared with `nn.Linear` in the same run on one GPU.

    python -m bench.host [--recipes fp8_current] [--profile fp8_current] [--json FILE]

The first table shows a single layer with weights cast at the step boundary, and layers of installed libraries.

The second table shows ColumnParallelLinear with a DTensor weight under FSDP2 on one rank, where each forward casts the weight.
FSDP2 and its collectives take several times as long as a layer, so only the time inside of the layer counts: its forward, and
its node of the autograd graph in backward.

The third table shows the layer of the first table under torch.compile, where a linear of dlp is an opaque op and nn.Linear is
compiled.

Subjects take many short turns in rounds, and each turn is compared with nn.Linear's turn of the same round, so that temporary
slowdowns of the machine affect all subjects. The tables show medians and quartiles over rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dlp
from bench.files import add_files, write_files
from bench.linear_subjects import BASE, RECIPES, TINY, Run, Subject, installed_peers
from dlp.kernels import loader

LIMITS = {"alone": 2.0, "under FSDP2": 2.5}  # limits of `Line.ratio` for FP8 recipes, by table
ROUNDS, COUNT, WARM = 61, 10, 3
SHAPE = "x".join(map(str, TINY))
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """Host time of one subject.

    recipe          name of the subject
    microseconds    median microseconds of forward + backward; under FSDP2 only the time inside of the layer
    ratio           median over rounds of the time relative to nn.Linear
    low, high       quartiles of this ratio
    boundary        microseconds of the step boundary; 0 except in the first table
    whole           microseconds of forward + backward, including FSDP2
    """

    recipe: str
    microseconds: float
    ratio: float
    low: float
    high: float
    boundary: float = 0.0
    whole: float = 0.0


class Turn(NamedTuple):
    """Function that runs a subject (forward and backward, or the step boundary), and the clock of the time that counts; None:
    all host time counts."""

    run: Run
    inside: Inside | None = None


class Inside:
    """Clock that runs during the forward of a layer, and in backward during the autograd node of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.seconds, self._since, self._forward = 0.0, 0.0, layer.forward
        layer.forward = self._timed

    def _timed(self, x: Tensor) -> Tensor:
        self._start()
        y: Tensor = self._forward(x)
        self._stop()
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(self._start)
        y.grad_fn.register_hook(self._stop)
        return y

    def _start(self, *_: Any) -> None:
        self._since = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._since


def in_turns(subjects: Mapping[str, S], rounds: int, one: Callable[[S], T]) -> dict[str, list[T]]:
    """Measure subjects in turn, without the garbage collector. Returns, for each subject, the results of `one` by round; a
    first round, which warms up, does not count."""
    found: dict[str, list[T]] = {name: [] for name in subjects}
    gc.collect()
    gc.disable()
    try:
        for _ in range(1 + rounds):
            for name, subject in subjects.items():
                found[name].append(one(subject))
    finally:
        gc.enable()
    return {name: results[1:] for name, results in found.items()}


def one_turn(turn: Turn) -> tuple[float, float]:
    """Time one turn of a subject, after WARM runs that warm up the device and the caches of the host. Returns the microseconds
    of a run that count, and all microseconds that the host needs to queue a run."""
    torch.cuda.synchronize()
    for _ in range(WARM):
        turn.run()
    inside, start = turn.inside.seconds if turn.inside else 0.0, time.perf_counter()
    for _ in range(COUNT):
        turn.run()
    whole = time.perf_counter() - start
    counts = turn.inside.seconds - inside if turn.inside else whole
    return counts * 1e6 / COUNT, whole * 1e6 / COUNT


def measured(turns: Mapping[str, Turn]) -> list[Line]:
    """Run subjects in turn, and return a line for each subject, including nn.Linear."""
    return compared(in_turns(turns, ROUNDS, one_turn))


def compared(found: Mapping[str, Sequence[tuple[float, float]]]) -> list[Line]:
    """Return a line for each subject, from the results of `one_turn` by round."""
    lines = []
    for recipe, times in found.items():
        ratios = [took / base for (took, _), (base, _) in zip(times, found[BASE], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        took, whole = (statistics.median(column) for column in zip(*times, strict=True))
        lines.append(Line(recipe, took, ratio, low, high, whole=whole))
    return lines


def show(line: Line, limit: float | None = None, more: float | None = None) -> None:
    row = f"{line.recipe:15} {line.microseconds:8.1f} {line.ratio:6.2f} {line.low:6.2f} .. {line.high:4.2f}"
    if more is not None:
        row += f" {more:8.1f}"
    if limit is not None and line.recipe.startswith("fp8"):
        row += f"  {'ok' if line.ratio <= limit else 'MISSED'} ({limit})"
    print(row, flush=True)


def alone(recipes: Sequence[str]) -> list[Line]:
    """Measure and print the first table."""
    print(f"\nhost, {SHAPE}: microseconds of forward + backward, ratio to {BASE}, its quartiles, step boundary")
    subjects = {recipe: Subject(recipe, TINY) for recipe in (BASE, *recipes)}
    for subject in subjects.values():
        subject.iteration()
    lines = measured({name: Turn(subject.both) for name, subject in subjects.items()})
    boundaries = measured({name: Turn(subject.boundary) for name, subject in subjects.items()})
    lines = [replace(line, boundary=at.microseconds) for line, at in zip(lines, boundaries, strict=True)]
    for line in lines:
        show(line, LIMITS["alone"], line.boundary)
    return lines


def sharded(recipe: str) -> Turn:
    """Return the turn of a small layer under FSDP2."""
    tokens, k, n = TINY
    mesh = dlp.build_mesh(device_type="cuda")
    if recipe == BASE:
        layer: nn.Module = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        model = nn.Sequential(layer)
        fully_shard(model, mesh=mesh["dp_shard"])
    else:
        layer = dlp.ColumnParallelLinear(k, n, tp=mesh["tp"], recipe=recipe, device="cuda", dtype=torch.bfloat16)
        model = nn.Sequential(layer)
        dlp.fully_shard(model, mesh=mesh)
        dlp.attach(model, torch.optim.SGD(model.parameters()), mesh=mesh)
    x, dy = (torch.randn(tokens, size, device="cuda").bfloat16() for size in (k, n))
    x.requires_grad_()
    parameters = list(model.parameters())

    def both() -> None:
        model(x).backward(dy)
        for tensor in (x, *parameters):
            tensor.grad = None

    for _ in range(3):  # in these runs the launches of both passes are captured
        both()
    return Turn(both, Inside(layer))


def under_fsdp2(recipes: Sequence[str]) -> list[Line]:
    """Measure and print the second table."""
    print(
        f"\nhost under FSDP2, {SHAPE}: microseconds inside the layer, ratio, its quartiles, microseconds including FSDP2"
    )
    lines = measured({recipe: sharded(recipe) for recipe in (BASE, *recipes)})
    for line in lines:
        show(line, LIMITS["under FSDP2"], line.whole)
    return lines


def _compile(subject: Subject) -> None:
    """Compile the layer only. The nn.Sequential around dlp's layer is not compiled, because hooks of the nn.Sequential count
    microbatches."""
    if isinstance(subject.linear, nn.Sequential):
        subject.linear[0] = torch.compile(subject.linear[0], fullgraph=True)  # type: ignore[assignment]
    else:
        subject.linear = torch.compile(subject.linear, fullgraph=True)  # type: ignore[assignment]


def compiled(recipes: Sequence[str]) -> list[Line]:
    """Measure and print the third table."""
    print(f"\nhost under torch.compile, {SHAPE}: microseconds of forward + backward, ratio, its quartiles")
    subjects = {recipe: Subject(recipe, TINY) for recipe in (BASE, *recipes)}
    graphs = 2 * len(subjects)  # torch compiles two graphs per subject, and counts all graphs together
    with torch._dynamo.config.patch(recompile_limit=graphs):
        for subject in subjects.values():
            _compile(subject)
            for _ in range(3):  # in these runs the launches of both passes are captured
                subject.iteration()
        lines = measured({name: Turn(subject.both) for name, subject in subjects.items()})
    for line in lines:
        show(line)
    return lines


def profile(recipe: str) -> None:
    """Print the functions in which the host spends most time. Functions of backward are missing, since autograd runs them on
    another thread."""
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
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--profile", metavar="RECIPE", help="also list the functions of forward")
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if code := loader.load_or_explain():
        return code
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    hosts = alone([*options.recipes, *installed_peers()])
    traced = compiled(options.recipes)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    fsdp2 = under_fsdp2(options.recipes)
    dist.destroy_process_group()
    if options.profile:
        profile(options.profile)
    tables = {"alone": hosts, "fsdp2": fsdp2, "compiled": traced}
    write_files(options, {name: [asdict(line) for line in lines] for name, lines in tables.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
