"""Measure the passes of a config's layers under each overlap strategy, and write the table that "auto" reads.

    torchrun --nproc-per-node 2 -m dlp.parallel.tune CONFIG [--section.key value ...] --out overlap.json
                                [--recipes bf16 fp8_current] [--tokens 4096 8192] [--strategies serial chunked chunked:2]
                                [--rounds 5] [--add]

The config defines layers, tokens, tp and transport; `torchrun` starts the ranks, on GPUs if there are any. Each problem, a
linear or siblings, is measured under its recipe in the config, or under all recipes of --recipes:

    fprop    the forward of the layer under each strategy
    dgrad    the backward of the layer including wgrad, which may overlap the reduction of dx
    alone    each GEMM of the layer without a transfer; from these times `dlp.parallel.auto` predicts times at other sizes

On GPUs each pass is captured in a CUDA graph, so times are device times. A round replays the graph of each strategy several
times and takes the time of the slowest rank; the table has the median over rounds. After each problem rank 0 prints a line and
rewrites the file. `--add` keeps existing rows of the file, which must be from the same kind of machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dlp.comm import transport
from dlp.comm.mesh import TP, build_mesh, init_process_group, shutdown, world_size
from dlp.parallel import overlap as overlaps
from dlp.parallel.auto import CANDIDATES, SERIAL, Machine, Problem, Row, Times, load, machine, transport_name
from dlp.parallel.casts import BOTH, HP
from dlp.parallel.linear.modules import ColumnParallelLinear, Linear, RowParallelLinear
from dlp.parallel.linear.quantize import quantize
from dlp.parallel.model.boundary import attach, end_step
from dlp.parallel.model.graph import CapturedStep
from dlp.parallel.style import STYLES
from dlp.quant import recipe as recipes
from dlp.quant.gemm import Gemm
from dlp.quant.recipe import GEMMS
from dlp.quant.tensor import QuantizedTensor

Run = Callable[[], object]
WARM, COUNT, ROUNDS = 4, 8, 5  # runs before the first round, runs in each round, rounds
LINK = (
    (1 << 16, 1 << 20),
    (1 << 20, 1 << 25),
)  # bytes of the small and the large shard that `links` gathers: on CPUs, on GPUs


class Timed(NamedTuple):
    """Time of a run in seconds: the median over rounds, and as `noise` the median absolute deviation from the median."""

    seconds: float
    noise: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Timed:
        middle = statistics.median(rounds)
        return cls(middle, statistics.median(abs(each - middle) for each in rounds))


def timed(runs: Sequence[Run], device: torch.device, rounds: int, count: int = COUNT) -> list[Timed]:
    """Measure the time of each run: in each of `rounds` rounds the mean of `count` calls, on the slowest rank. All ranks call
    this function together."""
    for run in runs:
        for _ in range(WARM):
            run()
    if device.type == "cuda":
        runs = [_captured(run) for run in runs]
    found = []
    for _ in range(rounds):
        for run in runs:
            _settle(device)
            start = time.perf_counter()
            for _ in range(count):
                run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found.append((time.perf_counter() - start) / count)
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [Timed.of(column) for column in zip(*slowest.view(rounds, len(runs)).tolist(), strict=True)]


def _captured(run: Run) -> Run:
    """Capture the launches of a run as a CUDA graph. The current stream must not be torch's default stream."""
    step = CapturedStep(lambda nothing: run(), ())
    return lambda: step(())


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Context with a new current stream on CUDA, since torch's default stream cannot take part in captures."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
    torch.cuda.synchronize()


def _settle(device: torch.device) -> None:
    for _ in range(2 if device.type == "cuda" else 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


# ---- a layer


def layer_of(problem: Problem, overlap: str | Mapping[str, str], tp: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Construct a layer of this problem, with parameters of `dtype` whose casts are cached at the step boundary."""
    name, sequence_parallel = next(key for key, row in STYLES.items() if row is problem.style)
    options: dict[str, Any] = {
        "sequence_parallel": sequence_parallel, "recipe": problem.recipe, "overlap": overlap, "dtype": dtype,
        "device": tp.device_type,
    }  # fmt: skip
    outs = problem.out_features if len(problem.out_features) > 1 else problem.out_features[0]
    if name == "row":
        assert isinstance(outs, int)
        layer: Linear = RowParallelLinear(problem.in_features, outs, tp=tp, **options)
    else:
        layer = ColumnParallelLinear(problem.in_features, outs, tp=tp, **options)
    attach(layer, torch.optim.SGD(layer.parameters(), 0.0))
    return layer


def passes(layer: nn.Module, problem: Problem, ranks: int, dtype: torch.dtype, device: torch.device) -> tuple[Run, Run]:
    """Return two functions: one runs the forward of the layer, the other runs forward and backward. Before `passes`
    returns, one forward, one backward and the step boundary run, so that the weights are cast."""
    style = problem.style
    rows = problem.tokens // (ranks if style.cut_x == 0 else 1)
    columns = problem.in_features // (ranks if style.cut_x == 1 else 1)
    x = torch.randn(rows, columns, device=device, dtype=dtype).requires_grad_()
    learns = [x, *layer.parameters()]

    def forward() -> tuple[Tensor, ...]:
        ys = layer(x)
        return ys if isinstance(ys, tuple) else (ys,)

    dys = [torch.randn_like(y) for y in forward()]

    def both() -> None:
        torch.autograd.backward(forward(), dys)
        for tensor in learns:
            tensor.grad = None

    both()
    end_step(layer)
    return forward, both


def gemms_alone(problem: Problem, ranks: int, dtype: torch.dtype, device: torch.device) -> list[Run]:
    """Return functions that run fprop, dgrad and wgrad of one rank, each as one GEMM for all members, on cast operands."""
    tokens, columns, features = problem.sizes(ranks)
    bound = Linear(features, columns, recipe=problem.recipe, dtype=dtype, device=device).core.bound
    bound.session.begin_forward(bound.spec, True)
    shapes = {"x": (tokens, features), "w": (columns, features), "dy": (tokens, columns)}
    operands = {}
    for name, shape in shapes.items():
        ((operands[name]),) = quantize(bound, name, [torch.randn(shape, device=device).to(dtype)], BOTH)
    runs: list[Run] = []
    for which, a, b, flipped in (("fprop", "x", "w", (False, False)), ("dgrad", "dy", "w", (False, True)),
                                 ("wgrad", "dy", "x", (True, True))):  # fmt: skip
        options = getattr(problem.recipe, which)
        left, right = (
            operands[side].at(columnwise=columnwise) for side, columnwise in zip((a, b), flipped, strict=True)
        )
        gemm = Gemm(which, right, options.out_dtype or dtype, options=options)
        runs.append(partial(gemm, left))
    return runs


def measure(problem: Problem, strategies: Sequence[str], tp: DeviceMesh, dtype: torch.dtype, rounds: int) -> Row:
    """Measure one problem under each strategy, and return the row of the table. All ranks call this function together."""
    with own_stream(device_of(tp)):
        return _measure(problem, strategies, tp, dtype, rounds)


def _measure(problem: Problem, strategies: Sequence[str], tp: DeviceMesh, dtype: torch.dtype, rounds: int) -> Row:
    device = device_of(tp)
    pairs = []
    for name in strategies:
        layer = layer_of(problem, {"fprop": name, "dgrad": name, "wgrad": SERIAL}, tp, dtype)
        pairs.append(passes(layer, problem, tp.size(), dtype, device))
    runs = [run for pair in pairs for run in pair]
    found = timed(runs, device, rounds)
    forwards, boths = found[::2], found[1::2]
    pairs_of_times = zip(forwards, boths, strict=True)
    backwards = [Timed(both.seconds - forward.seconds, both.noise + forward.noise) for forward, both in pairs_of_times]
    by_gemm = {"fprop": forwards, "dgrad": backwards}
    seconds, noise = (
        {gemm: dict(zip(strategies, (each[i] for each in of), strict=True)) for gemm, of in by_gemm.items()}
        for i in range(2)
    )
    alone = [each.seconds for each in timed(gemms_alone(problem, tp.size(), dtype, device), device, rounds)]
    return Row(problem.key, problem.sizes(tp.size()), seconds, noise, dict(zip(GEMMS, alone, strict=True)))


def device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def empty_table(tp: DeviceMesh, by: str, link: tuple[float, float], about: Mapping[str, Any]) -> Times:
    """Return a table without rows for these ranks and this device.

    by      transport: "mapped", "nccl" or "gloo"
    link    result of `links`
    about   further entries of the file
    """
    here, device = machine(tp.device_type), device_of(tp)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    about = {**about, "torch": here.torch, "version": here.version}
    return Times(here.kind, here.device, tp.size(), by, processors, *link, rows=(), about=about)


# ---- links


def links(group: ProcessGroup, device: torch.device, rounds: int) -> tuple[float, float]:
    """Measure a small and a large gather. Return the bytes per second that each rank sends, and the latency in seconds."""
    few, many = LINK[device.type == "cuda"]

    def gather(nbytes: int) -> Run:
        shard = QuantizedTensor(HP, (torch.zeros(nbytes // 512, 256, dtype=torch.bfloat16, device=device),))

        def run() -> None:
            with transport.in_pass(group):
                overlaps.load(SERIAL).gather(shard, 0, group).whole()

        return run

    with own_stream(device):
        small, large = (each.seconds for each in timed([gather(few), gather(many)], device, rounds))
    peers = group.size() - 1
    speed = peers * (many - few) / max(large - small, 1e-9)
    return speed, max(small - peers * few / speed, 0.0)


# ---- a config


def layers_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Run `bench.shapes` on rank 0, and return its output on all ranks: number of tp ranks, transport, dtype and layers of a
    config.

    Raises SystemExit on all ranks if the config is rejected; rank 0 has then printed the reason."""
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "bench.shapes", *arguments, "--world", str(world_size()), "--layers"]
        done = subprocess.run(command, stdout=subprocess.PIPE)
        said = [None if done.returncode else json.loads(done.stdout)]
    dist.broadcast_object_list(said, 0)
    if said[0] is None:
        raise SystemExit(2)
    found: dict[str, Any] = said[0]
    return found


def _rows_to_keep(before: Times, now: Times) -> tuple[Row, ...]:
    """Return the rows of the existing table `before`, to which measurements are added. Raises ValueError if `before` was
    measured on another kind of machine than the table `now`."""
    here = Machine(now.kind, now.device, now.about["torch"], now.about["version"])
    why = before.obstacle(here, now.ranks, now.transport)
    if why is not None:
        raise ValueError(f"--add: {why}")
    return before.rows


def problems_of(
    found: Mapping[str, Any], names: Sequence[str] | None, tokens: Sequence[int] | None = None
) -> list[Problem]:  # fmt: skip
    """Return the problems of a config, each once, without problems whose style needs no choice of a strategy.

    found    result of `layers_of`
    names    recipes to measure each layer under; None: the recipe of the layer in the config
    tokens   values of M to measure each layer for; None: the tokens of the config
    """
    problems: dict[Any, Problem] = {}
    for each in found["layers"]:
        style, own = STYLES[each["style"], each["sequence_parallel"]], recipes.as_recipe(each["recipe"])
        for recipe, rows in product([own] if names is None else map(recipes.load, names), tokens or [each["tokens"]]):
            problem = Problem(style, rows, each["in_features"], tuple(each["out_features"]), recipe)
            if style.gathers is not None or style.fprop.reduce or style.dgrad.reduce:
                problems[problem.key] = problem
    return [problem for problem in problems.values() if problem.style.shard_dim is not None]


def said(problem: Problem, row: Row, count: str) -> str:
    """Format a line of progress: milliseconds of each pass by strategy, with noise. A star marks the choice of
    `auto`."""
    parts = []
    for gemm, of in row.passes.items():
        best, noise = row.fastest(gemm), row.noise[gemm]
        times = (f"{name} {1e3 * t:.3f}+-{1e3 * noise[name]:.3f}{'*' * (name == best)}" for name, t in of.items())
        parts.append(f"{gemm} " + "  ".join(times))
    style, tokens, features, outs, recipe = row.key
    return f"{count}  {style} {tokens} x {features} -> {'+'.join(map(str, outs))} {recipe}: {' | '.join(parts)}"


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m dlp.parallel.tune", usage="%(prog)s CONFIG [--section.key value ...] --out FILE",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("overlap.json"), help="file to write the table to [overlap.json]"
    )
    parser.add_argument(
        "--recipes", nargs="+", metavar="RECIPE", help="recipes to measure each layer under [the recipe in the config]"
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        type=_strategy,
        metavar="NAME",
        help=f"strategies to measure besides serial [{' '.join(CANDIDATES)}]",
    )
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        metavar="M",
        help="tokens of a microbatch to measure each layer for [those of the config]",
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"number of measurements, of which the median is stored [{ROUNDS}]"
    )
    parser.add_argument("--add", action="store_true", help="keep the rows of an existing file")
    known, rest = parser.parse_known_args(given)
    on_gpu = torch.cuda.is_available()
    init_process_group("cuda" if on_gpu else "cpu")
    found = layers_of(rest)
    if found["ranks"] == 1:
        _say(f"tp is 1: no layer of {rest[0]} communicates over tp; set --mesh.tp")
        shutdown()
        return 2
    mesh = build_mesh(tp=found["ranks"], transport=found["transport"])
    tp = mesh[TP]
    group, dtype = tp.get_group(), getattr(torch, found["dtype"])
    by = transport_name(group, mesh.device_type)
    strategies = [SERIAL, *(name for name in known.strategies or CANDIDATES if name != SERIAL)]
    problems = problems_of(found, known.recipes, known.tokens)
    command = f"torchrun --nproc-per-node {world_size()} -m dlp.parallel.tune {shlex.join(given)}"
    about = {"date": time.strftime("%Y-%m-%d"), "dtype": found["dtype"], "command": command}
    times = empty_table(tp, by, links(group, device_of(tp), known.rounds), about)
    if known.add and known.out.exists():
        times = replace(times, rows=_rows_to_keep(load(known.out, together=True), times))
    link = f"the link carries {times.speed / 1e9:.3g} GB/s with a latency of {1e6 * times.meeting:.3g} us"
    _say(f"{times.ranks} x {times.device} by {by}; {link}; milliseconds:")
    if dist.get_rank() == 0:
        known.out.write_text(times.text())  # raises here, not after the measurement, if the file cannot be written
    for number, problem in enumerate(problems, 1):
        row = measure(problem, strategies, tp, dtype, known.rounds)
        times = replace(times, rows=(*(each for each in times.rows if each.key != row.key), row))
        _say(said(problem, row, f"{number}/{len(problems)}"))
        if dist.get_rank() == 0:
            known.out.write_text(times.text())
    _say(f"written to {known.out}: [mesh] overlap_table = {str(known.out)!r}")
    shutdown()
    return 0


def _strategy(name: str) -> str:
    """Check a strategy's name on the command line. Raises ArgumentTypeError for an unknown name."""
    try:
        return overlaps.load(name).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
