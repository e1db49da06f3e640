"""A column- and a row-parallel linear over the GPUs of a host, forward and backward, beside plain torch in bf16.

    torchrun --nproc-per-node 2 -m bench.tensor_parallel [--recipes fp8_delayed fp8_current] [--overlap serial chunked]
                                                         [--shapes 4096x14336] [--tokens 8192] [--json FILE]

    x [M/R, K] ─ column (gather x, K -> N) ─► [M, N/R] ─ row (N -> K, scatter y) ─► y [M/R, K]      sequence parallelism over R

`plain torch` is the pair of `bench.host_parallel`: all_gather, F.linear, F.linear, reduce_scatter, and what is symmetric to it
in backward. Ours sends through memory that the GPUs map, and its iterations end with the step boundary, which casts the
weights. By subject, milliseconds:

    alone     the host waits for the device before each iteration: what a step takes that the host cannot run ahead of
    queued    iterations one after the other
    host      what the host needs to queue one

Medians over iterations of the slowest rank. Subjects take turns by blocks of iterations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dlp
from bench.files import add_files, write_files
from bench.host_parallel import PLAIN, PlainPair, Run
from dlp.comm import transport
from dlp.comm.mesh import init_process_group, shutdown
from dlp.quant.recipe import names

WARM, COUNT, ROUNDS = 6, 10, 3


@dataclass(frozen=True)
class Line:
    """One subject at one shape; milliseconds, and what share of plain torch's time in the same run that is."""

    shape: str
    subject: str
    alone: float
    alone_share: float
    queued: float
    queued_share: float
    host: float


def subject(
    name: str, strategy: str, features: int, inner: int, group: dist.ProcessGroup, device: torch.device
) -> nn.Module:
    """The pair of a recipe, attached, or plain torch's."""
    if name == PLAIN:
        return PlainPair(features, inner, group, device)
    options: dict[str, Any] = {
        "tp": group,
        "sequence_parallel": True,
        "recipe": name,
        "overlap": strategy,
        "device": device,
    }
    model = nn.Sequential(
        dlp.ColumnParallelLinear(features, inner, dtype=torch.bfloat16, **options),
        dlp.RowParallelLinear(inner, features, dtype=torch.bfloat16, **options),
    )
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
    return model


def iteration(model: nn.Module, tokens: int, features: int, device: torch.device) -> Run:
    x, dy = (torch.randn(tokens, features, device=device).bfloat16() for _ in range(2))
    x.requires_grad_()
    learns, ours = [x, *model.parameters()], not isinstance(model, PlainPair)

    def run() -> None:
        model(x).backward(dy)
        if ours:
            dlp.end_step(model)
        for tensor in learns:
            tensor.grad = None

    return run


def timed(run: Run) -> tuple[list[float], float, float]:
    """Seconds: of single iterations, of one in a queue, and of the host for one."""
    single = []
    for _ in range(COUNT):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        single.append(time.perf_counter() - start)
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(COUNT):
        run()
    host = (time.perf_counter() - start) / COUNT
    torch.cuda.synchronize()
    return single, (time.perf_counter() - start) / COUNT, host


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The maximum over ranks of each."""
    both = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return [float(value) for value in both]


def measure(shape: str, tokens: int, subjects: Sequence[tuple[str, str]], device: torch.device) -> list[Line]:
    features, inner = (int(size) for size in shape.split("x"))
    group = dist.group.WORLD
    assert group is not None
    transport.ask_for(group)
    runs = {}
    for name, strategy in subjects:
        torch.manual_seed(0)
        model = subject(name, strategy, features, inner, group, device)
        runs[name, strategy] = run = iteration(model, tokens // group.size(), features, device)
        for _ in range(WARM):
            run()
    found: dict[tuple[str, str], list[list[float]]] = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, run in runs.items():
            single, queued, host = timed(run)
            found[key].append(slowest([statistics.median(single), queued, host], device))
    medians = {
        key: [1e3 * statistics.median(column) for column in zip(*rows, strict=True)] for key, rows in found.items()
    }
    alone, queued, _ = medians[PLAIN, ""]
    return [
        Line(shape, f"{name} {strategy}".strip(), times[0], times[0] / alone, times[1], times[1] / queued, times[2])
        for (name, strategy), times in medians.items()
    ]


def show(lines: Sequence[Line], tokens: int) -> None:
    print(f"\n{tokens} tokens; milliseconds, and shares of plain torch's in the same run")
    print(f"{'pair':12} {'subject':22} {'alone':>8} {'share':>6} {'queued':>8} {'share':>6} {'host':>8}")
    for line in lines:
        print(
            f"{line.shape:12} {line.subject:22} {line.alone:8.3f} {line.alone_share:6.3f} {line.queued:8.3f} "
            f"{line.queued_share:6.3f} {line.host:8.3f}",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tensor_parallel", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--recipes", nargs="+", default=["bf16", "fp8_delayed", "fp8_current", "fp8_block"], choices=names()
    )
    parser.add_argument("--overlap", nargs="+", default=["serial", "chunked"])
    parser.add_argument("--shapes", nargs="+", default=["4096x14336", "8192x28672"], metavar="KxN")
    parser.add_argument("--tokens", type=int, default=8192, help="of all ranks (8192)")
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "bench.tensor_parallel needs GPUs: torchrun --nproc-per-node gpu -m bench.tensor_parallel", file=sys.stderr
        )
        return 2
    init_process_group("cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    subjects = [(PLAIN, ""), *((recipe, strategy) for recipe in options.recipes for strategy in options.overlap)]
    lines = []
    for shape in options.shapes:
        lines += measure(shape, options.tokens, subjects, device)
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        show(lines, options.tokens)
        write_files(options, [asdict(line) for line in lines])
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
