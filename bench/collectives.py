"""Time of gathering an operand and of reducing a result, compared with bf16 in the same run.

    torchrun --nproc-per-node 4 -m bench.collectives [--sizes 8192x8192] [--only gather] [--json FILE] [--plot FILE]

    gather    bf16 tokens of each rank -> the operand of all tokens that fprop reads: agree on an amax, quantize, gather;
              compared with torch's all_gather of the same tokens in bf16
    reduce    bf16 contributions [tokens, features] of each rank -> this rank's rows of their sum, in each wire format, by
              NCCL, and ("mapped") through memory that the GPUs map from each other; compared with torch's
              reduce_scatter in bf16

Sizes are tokens of all ranks x features. Times are device times: the host queues all calls while a kernel keeps the device
asleep. Variants alternate, inputs rotate, and the printed time is the median over repetitions of the slowest rank's time. On
CPUs (gloo) times are wall times, which only show that everything runs. Bytes are the bytes that a rank receives.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dlp
from bench.files import add_files, write_files
from bench.ranks import refuse_one_rank
from dlp.comm import collectives, transport
from dlp.comm.mesh import ParallelDims, init_process_group, shutdown
from dlp.parallel.casts import ROWWISE
from dlp.parallel.linear.plan import WIRES
from dlp.parallel.linear.quantize import quantize, quantize_route
from dlp.parallel.linear.state import BoundSpec
from dlp.quant.recipe import names as recipe_names
from dlp.quant.tensor import QuantizedTensor

Run = Callable[[], Any]
# torch 2.13 renamed these functions: its old names warn, and older versions lack the new names
plain_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
plain_reduce: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
BUFFERS = 4  # number of inputs that rotate; at the sizes of interest all together exceed the L2 cache
REPETITIONS, WARM = 9, 2  # the first WARM repetitions are not counted
SLEEP = 60_000_000  # cycles that the device sleeps while the host runs ahead, about 30 ms
# Limit for 2 GPUs and size 8192x8192: time of a reduction through mapped memory relative to torch's reduce_scatter in bf16
MOST = 1.05
# Limits for 4 GPUs and size 8192x8192, by recipe: time of a gather relative to torch's all_gather in bf16
TARGETS = {"fp8_delayed": 0.72, "fp8_block": 0.72, "fp8_current": 0.80, "nvfp4": 0.60}


@dataclass(frozen=True)
class Line:
    """One printed line.

    kind, name, size    operation (a key of KINDS), variant, and tokens x features
    microseconds        time of the variant
    share               time relative to the baseline of this kind and size
    megabytes           MB that a rank receives
    bytes_share         bytes relative to bf16
    quantize_us         microseconds of the cast alone, which precedes the gather; None for the baseline and other kinds
    target              limit of `share`; None if no limit applies
    """

    kind: str
    name: str
    size: str
    microseconds: float
    share: float
    megabytes: float
    bytes_share: float
    quantize_us: float | None = None
    target: float | None = None


@dataclass(frozen=True)
class Bench:
    """Mesh of the ranks, device of this rank, and `calls`, the number of calls that are timed together."""

    mesh: DeviceMesh
    device: torch.device
    calls: int

    @property
    def world(self) -> int:
        return self.mesh.size()

    def once(self, run: Run, calls: int) -> float:
        """Return the mean microseconds of a call of `run` on this rank, over `calls` successive calls."""
        dist.barrier()
        if self.device.type == "cpu":
            start = time.perf_counter()
            for _ in range(calls):
                run()
            return (time.perf_counter() - start) * 1e6 / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        dist.all_reduce(torch.ones(1, device=self.device))  # synchronizes the devices
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    def times(self, runs: Sequence[Run]) -> list[float]:
        """Return the time of each run: the median over repetitions of the time of the slowest rank."""
        rows = [[self.once(run, self.calls) for run in runs] for _ in range(REPETITIONS + WARM)][WARM:]
        slowest = torch.tensor(rows, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return [statistics.median(column) for column in slowest.t().tolist()]

    def inputs(self, rows: int, columns: int) -> Callable[[], Tensor]:
        """Return a function whose calls return BUFFERS random bf16 matrices [rows, columns] in turn."""
        torch.manual_seed(dist.get_rank())
        made = (torch.randn(rows, columns, device=self.device, dtype=torch.bfloat16) for _ in range(BUFFERS))
        turn = itertools.cycle(list(made))
        return lambda: next(turn)


def column(bench: Bench, recipe: str, features: int) -> BoundSpec:
    """Return the bound spec of a sequence-parallel, column-parallel linear with this recipe."""
    options: dict[str, Any] = {"tp": bench.mesh, "sequence_parallel": True, "device": bench.device}
    return dlp.ColumnParallelLinear(features, 16 * bench.world, recipe=recipe, **options).core.bound


def gathered(bound: BoundSpec, x: Tensor) -> QuantizedTensor:
    """Cast and gather x as a linear does before fprop."""
    plan = bound.plan(len(x))
    operand = quantize_route(bound, plan, plan.x[False], [x], bound.spec.owners("x"))[0].rowwise
    assert operand is not None
    assert not isinstance(operand, QuantizedTensor)
    return operand.whole()


def received(bench: Bench, bound: BoundSpec, shape: tuple[int, int]) -> float:
    """Return the bytes of quantized x that a rank receives in a gather, if every rank has x of `shape`."""
    return bound.spec.recipe.x.rowwise.format.nbytes(shape, torch.bfloat16, along=0) * (bench.world - 1)


def bench_gathers(bench: Bench, tokens: int, features: int) -> list[Line]:
    rows, size = tokens // bench.world, f"{tokens}x{features}"
    x = bench.inputs(rows, features)
    whole = torch.empty(tokens, features, dtype=torch.bfloat16, device=bench.device)
    specs = {recipe: column(bench, recipe, features) for recipe in recipe_names()}
    for spec in specs.values():
        spec.session.begin_forward(spec.spec, True)
    full: list[Run] = [lambda spec=spec: gathered(spec, x()) for spec in specs.values()]  # type: ignore[misc]
    casts: list[Run] = [
        lambda spec=spec: quantize(spec, "x", [x()], ROWWISE)  # type: ignore[misc]
        for spec in specs.values()
    ]
    baseline, *times = bench.times([lambda: plain_gather(whole, x()), *full, *casts])
    plain = 2.0 * rows * features * (bench.world - 1)
    lines = [Line("gather", "torch bf16", size, baseline, 1.0, plain / 1e6, 1.0)]
    judged = bench.world == 4 and bench.device.type == "cuda" and size == "8192x8192"
    for (recipe, spec), took, cast in zip(specs.items(), times, times[len(specs) :], strict=False):
        nbytes = received(bench, spec, (rows, features))
        target = TARGETS.get(recipe) if judged else None
        lines.append(Line("gather", recipe, size, took, took / baseline, nbytes / 1e6, nbytes / plain, cast, target))
    return lines


def bench_reductions(bench: Bench, tokens: int, features: int) -> list[Line]:
    rows, size, group = tokens // bench.world, f"{tokens}x{features}", bench.mesh.get_group()
    y = bench.inputs(tokens, features)
    mine = torch.empty(rows, features, dtype=torch.bfloat16, device=bench.device)
    runs: list[Run] = [
        lambda wire=wire: collectives.reduce_scatter(y(), group, wire).wait()  # type: ignore[misc]
        for wire in WIRES.values()
    ]
    named, moves = list(WIRES.items()), transport.transport_of(group)
    if moves is not None:
        named += [(f"mapped {name}", wire) for name, wire in WIRES.items()]
        runs += [lambda wire=wire: summed(moves, y(), wire) for wire in WIRES.values()]  # type: ignore[misc]
    baseline, *times = bench.times([lambda: plain_reduce(mine, y()), *runs])
    plain = 2.0 * rows * features * (bench.world - 1)
    lines = [Line("reduce", "torch bf16", size, baseline, 1.0, plain / 1e6, 1.0)]
    judged = bench.world == 2 and bench.device.type == "cuda" and size == "8192x8192"
    for (name, wire), took in zip(named, times, strict=True):
        nbytes = sum(part.nbytes for part in wire.pack(y()[None, :rows])) * (bench.world - 1)
        target = MOST if judged and name.startswith("mapped") else None
        lines.append(Line("reduce", name, size, took, took / baseline, nbytes / 1e6, nbytes / plain, target=target))
    return lines


def summed(moves: transport.Transport, y: Tensor, wire: collectives.ReduceCodec) -> Tensor:
    """Sum the contributions y [M, N] of all ranks through `moves`, and return this rank's rows of the sum, as a row-parallel
    linear does."""
    moves.start("bench")
    chunks = y.unflatten(0, (moves.world, -1))
    exchange, packed = moves.open(*wire.kinds(tuple(chunks.shape), y.dtype)), wire.pack(chunks)
    own = moves.rank, tuple(part[moves.rank] for part in packed)
    total = wire.total(exchange.send_all(packed, own=False).wait(), y.dtype, own)
    moves.finish()
    return total


KINDS: dict[str, Callable[[Bench, int, int], list[Line]]] = {
    "gather": bench_gathers,
    "reduce": bench_reductions,
}


def show(line: Line) -> None:
    cast = "" if line.quantize_us is None else f"{line.quantize_us:9.1f}"
    verdict = "" if line.target is None else f"  {'ok' if line.share <= line.target else 'MISSED'} ({line.target})"
    print(f"{line.kind:7} {line.name:20} {line.size:11} {line.microseconds:10.1f} {line.share:6.3f} {cast:>9}"
          f" {line.megabytes:9.2f} {line.bytes_share:6.3f}{verdict}", flush=True)  # fmt: skip


def plot(lines: Sequence[Line], title: str, file: Path) -> None:
    """Plot times relative to the baseline, with a bar for each variant and a panel for each kind and size."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((line.kind, line.size) for line in lines))
    figure = Figure(figsize=(4 * len(panels) + 1, 4.5))
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        shown = [line for line in lines if (line.kind, line.size) == panel][::-1]
        axis.barh([line.name for line in shown], [line.share for line in shown])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set(title=" ".join(panel), xlabel=f"time / that of {shown[-1].name}")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def sizes(text: str) -> tuple[int, int]:
    tokens, features = map(int, text.split("x"))
    return tokens, features


def main(arguments: Sequence[str] | None = None) -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="torchrun -m bench.collectives", description=__doc__.split("\n")[0])
    default = [(8192, 8192), (8192, 4096), (2048, 4096)] if on_gpu else [(256, 256)]
    parser.add_argument("--sizes", type=sizes, nargs="+", default=default, help="tokens of all ranks x features")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    add_files(parser)
    options = parser.parse_args(arguments)
    refuse_one_rank()
    init_process_group("cuda" if on_gpu else "cpu")
    mesh = ParallelDims.from_mesh(dlp.build_mesh(dp_shard=1, tp=dist.get_world_size(), transport="auto")).tp_mesh
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    bench, lines = Bench(mesh, device, calls=8 if on_gpu else 1), []
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    title = f"{bench.world} x {where}, torch {torch.__version__}"
    if dist.get_rank() == 0:
        print(title)
        print(f"{'':7} {'':20} {'size':11} {'us':>10} {'share':>6} {'quantize':>9} {'MB':>9} {'bytes':>6}")
    for (tokens, features), kind in itertools.product(options.sizes, options.only):
        for line in KINDS[kind](bench, tokens, features):
            lines.append(line)
            if dist.get_rank() == 0:
                show(line)
    if dist.get_rank() == 0:
        write_files(options, [asdict(line) for line in lines], partial(plot, lines, title))
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
