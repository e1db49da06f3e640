"""A column- and a row-parallel linear, and a Llama layer, over the ranks of a host, forward and backward, beside plain torch in
bf16.

    torchrun --nproc-per-node 2 -m bench.tensor_parallel [--recipes fp8_delayed fp8_current] [--overlap serial chunked auto]
                                         [--shapes 4096x14336 4096x14336x32x8] [--tokens 8192] [--table FILE] [--json FILE]

    x [M/R, K] ─ column (gather x, K -> N) ─► [M, N/R] ─ row (N -> K, scatter y) ─► y [M/R, K]      sequence parallelism over R

Shapes and subjects are those of `bench.parallel_subjects`: plain torch (all_gather, F.linear, reduce_scatter), ours, and
Transformer Engine where it is installed. Ours sends through memory that GPUs map (--transport nccl: by NCCL), and its
iterations end with the step boundary, which casts the weights. `auto` chooses by --table, or by times that are measured first,
of the same linears. `--recipes fp8_block --overlap serial chunked fused` shows the GEMM that waits inside and
the one that sends, which `bench.operators` judges by themselves. By subject, milliseconds:

    alone     the host waits for the device before each iteration: what a step takes that the host cannot run ahead of
    queued    iterations one after the other
    host      what the host needs to queue one

and their shares of plain torch's, and of `serial` under the same recipe, which auto is not to exceed by more than noise.
Medians over iterations of the slowest rank. Subjects take turns by blocks of iterations. On CPUs it shows that all runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dlp
from bench.files import add_files, write_files
from bench.host_parallel import PLAIN, Run
from bench.parallel_subjects import TE_RECIPES, Shape, has_te, shape_of, subject, times_of
from dlp.comm.mesh import TP, TRANSPORTS, init_process_group, shutdown, world_size
from dlp.parallel import auto, tune
from dlp.parallel.auto import AUTO, SERIAL, Times
from dlp.quant.recipe import names
from launch.stop import refuse

WARM, COUNT, ROUNDS = 6, 10, 3
SHAPES = ("4096x14336", "8192x28672", "4096x14336x32x8", "8192x28672x64x8")
TARGETS = {  # shares of plain torch's time that `auto` must reach on two H200 with 8192 tokens, alone and queued
    "4096x14336": {"fp8_delayed": 0.66, "fp8_current": 0.70, "fp8_block": 0.78},
    "8192x28672": {"fp8_delayed": 0.575},
    "4096x14336x32x8": {"fp8_delayed": 0.66},
    "8192x28672x64x8": {"fp8_delayed": 0.63},
}
BF16 = 0.95  # of any of these in bf16
NOISE = 1.03  # of serial's time, which two runs of one program may differ by
TOKENS, SMALL, FEW = 8192, ("64x128", "64x128x4x2"), 64  # small ones and few where there is no GPU


@dataclass(frozen=True)
class Line:
    """One subject at one shape; milliseconds, and what share of plain torch's time in the same run that is; of_serial: what
    share of serial's, where it has run, alone and queued."""

    shape: str
    subject: str
    alone: float
    alone_share: float
    queued: float
    queued_share: float
    host: float
    of_serial: tuple[float, float] | None = None


def iteration(model: nn.Module, name: str, rows: int, features: int, device: torch.device) -> Run:
    x, dy = (torch.randn(rows, features, device=device).bfloat16() for _ in range(2))
    x.requires_grad_()
    learns, ours = [x, *model.parameters()], name in names()

    def run() -> None:
        model(x).backward(dy)
        if ours:
            dlp.end_step(model)
        for tensor in learns:
            tensor.grad = None

    return run


def settle(device: torch.device) -> None:
    """All ranks are here, and their devices have nothing to do."""
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(run: Run, device: torch.device, count: int) -> tuple[list[float], float, float]:
    """Seconds: of single iterations, of one in a queue, and of the host for one."""
    done = torch.cuda.synchronize if device.type == "cuda" else bool
    single = []
    for _ in range(count):
        settle(device)
        start = time.perf_counter()
        run()
        done()
        single.append(time.perf_counter() - start)
    settle(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    host = (time.perf_counter() - start) / count
    done()
    return single, (time.perf_counter() - start) / count, host


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The maximum over ranks of each."""
    both = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return [float(value) for value in both]


def measure(
    shape: Shape,
    tokens: int,
    subjects: Sequence[tuple[str, str]],
    mesh: DeviceMesh,
    table: Times | None,
    count: int = COUNT,
) -> list[Line]:
    """A line for each subject, plain torch's among them. `table`: what "auto" is chosen by; None: it is measured first."""
    device, runs = tune.device_of(mesh), {}
    for name, strategy in subjects:
        times = table
        if strategy == AUTO and times is None:
            times = times_of(shape, tokens, name, mesh, ROUNDS)
        torch.manual_seed(0)
        model = subject(name, strategy, shape, tokens, mesh, times)
        run = runs[name, strategy] = iteration(model, name, tokens // mesh.size(), shape.features, device)
        for _ in range(WARM if device.type == "cuda" else 1):
            run()
    found: dict[tuple[str, str], list[list[float]]] = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, run in runs.items():
            single, queued, host = timed(run, device, count)
            found[key].append(slowest([statistics.median(single), queued, host], device))
    medians = {
        key: [1e3 * statistics.median(column) for column in zip(*rows, strict=True)] for key, rows in found.items()
    }
    return lines_of(str(shape), medians)


def lines_of(shape: str, medians: dict[tuple[str, str], list[float]]) -> list[Line]:
    """Milliseconds alone, queued and of the host, by subject -> with their shares."""
    alone, queued, _ = medians[PLAIN, ""]
    lines = []
    for (name, strategy), times in medians.items():
        serial = medians.get((name, SERIAL)) if strategy != SERIAL else None
        of_serial = None if serial is None else (times[0] / serial[0], times[1] / serial[1])
        both = times[0], times[0] / alone, times[1], times[1] / queued
        lines.append(Line(shape, f"{name} {strategy}".strip(), *both, times[2], of_serial))
    return lines


def target(line: Line) -> float | None:
    """The share that a line must reach; None: it need not."""
    recipe, _, strategy = line.subject.partition(" ")
    if line.shape not in TARGETS or strategy != AUTO:
        return None
    return BF16 if recipe == "bf16" else TARGETS[line.shape].get(recipe)


def verdict(line: Line) -> str:
    most = target(line)
    if most is None:
        return ""
    return f"  {'ok' if max(line.alone_share, line.queued_share) <= most else 'MISSED'} ({most})"


def beside_serial(line: Line) -> str:
    """Of what `auto` chose: whether it is slower than serial by more than noise, in either way of running."""
    if line.of_serial is None or not line.subject.endswith(f" {AUTO}"):
        return ""
    return f"  {'SLOWER than serial' if max(line.of_serial) > NOISE else 'never slower than serial'}"


def show(lines: Sequence[Line], tokens: int, judged: bool = False) -> None:
    """`judged`: where targets are for."""
    print(
        f"\n{tokens} tokens; milliseconds, shares of plain torch's in the same run, and of serial's, alone and queued"
    )
    print(f"{'shape':16} {'subject':22} {'alone':>8} {'share':>6} {'queued':>8} {'share':>6} {'host':>8}  of serial")
    for line in lines:
        serial = "" if line.of_serial is None else "{:.3f} {:.3f}".format(*line.of_serial)
        print(
            f"{line.shape:16} {line.subject:22} {line.alone:8.3f} {line.alone_share:6.3f} {line.queued:8.3f} "
            f"{line.queued_share:6.3f} {line.host:8.3f}  {serial:11}{beside_serial(line)}"
            f"{verdict(line) if judged else ''}".rstrip(),
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="torchrun -m bench.tensor_parallel", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--recipes", nargs="+", default=["bf16", "fp8_delayed", "fp8_current", "fp8_block"], choices=names()
    )
    parser.add_argument("--overlap", nargs="+", default=[SERIAL, "chunked", AUTO])
    shapes = [shape_of(text) for text in (SHAPES if on_gpu else SMALL)]
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=shapes, metavar="KxN")
    parser.add_argument("--tokens", type=int, default=TOKENS if on_gpu else FEW, help=f"of all ranks ({TOKENS})")
    parser.add_argument("--transport", choices=TRANSPORTS, default=AUTO, help=f"carrier of our transfers ({AUTO})")
    parser.add_argument("--table", help="of dlp.parallel.tune, for auto; else it measures first")
    parser.add_argument("--peers", nargs="*", default=list(TE_RECIPES) if has_te() else [], choices=list(TE_RECIPES))
    parser.add_argument("--count", type=int, default=COUNT, help=f"iterations in a block ({COUNT})")
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if world_size() == 1:
        refuse("1 rank has nothing to send; start 2 or more, as torchrun --nproc-per-node 2 does", code=2)
    init_process_group("cuda" if on_gpu else "cpu")
    mesh = dlp.build_mesh(tp=dist.get_world_size(), transport=options.transport)
    table = None if options.table is None else auto.load(options.table, together=True)
    if table is not None:
        by = auto.transport_name(mesh[TP].get_group(), mesh.device_type)
        why = table.obstacle(auto.machine(mesh.device_type), mesh[TP].size(), by)
        if why is not None:
            refuse(f"--table {options.table}: {why}", code=2)
    subjects = [(PLAIN, ""), *((recipe, strategy) for recipe in options.recipes for strategy in options.overlap)]
    subjects += [(peer, "") for peer in options.peers]
    lines = []
    for shape in options.shapes:
        lines += measure(shape, options.tokens, subjects, mesh, table, options.count)
        if on_gpu:
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:  # as they are made: a later shape may fail
            judged = on_gpu and dist.get_world_size() == 2 and options.tokens == TOKENS
            show([line for line in lines if line.shape == str(shape)], options.tokens, judged)
            write_files(options, [asdict(line) for line in lines])
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
