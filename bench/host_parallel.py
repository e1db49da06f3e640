"""Host time of a column- and a row-parallel linear, forward and backward, compared with the same pair in plain torch.

    python -m bench.host_parallel [--recipes bf16 fp8_current] [--ways chunked compiled] [--quick] [--json FILE]
                                                                                           two CPU ranks over gloo
    torchrun --nproc-per-node 2 -m bench.host_parallel                                     one rank per GPU, or CPU ranks

    x [M/R, K] ─ column (gather x, K -> N) ─► [M, N/R] ─ row (N -> K, scatter y) ─► y [M/R, K]    sequence parallel, R ranks

The plain pair is `all_gather`, `F.linear`, `F.linear`, `reduce_scatter`, with the mirrored collectives in backward. Subjects
take many short turns in rounds, and are compared with the plain pair's turn of the same round. Each recipe has one line, and
one more line for each of `--ways`:

    chunked     overlap strategy `chunked`
    compiled    under torch.compile
    fsdp        two linears without tp whose weights FSDP shards over the same ranks, compared with two `nn.Linear` under FSDP2

The columns:

    all       microseconds of forward + backward, including collectives
    host      the same over a group whose collectives return at once without a transfer: the host time outside of
              collectives; `fsdp` runs over the real ranks here as well
    calls     number of Python functions that forward + backward enter in the runs of column `host`, counted by cProfile

`calls` does not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # this import registers the backend "fake"
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard

import dlp
from bench.collectives import plain_gather, plain_reduce
from bench.files import add_files, write_files
from bench.host import in_turns
from dlp.comm import transport
from dlp.comm.mesh import init_process_group, shutdown
from dlp.quant.recipe import names

PLAIN, WAYS, FSDP = "plain torch", ("chunked", "compiled", "fsdp"), "fsdp"
# limits of `Line.all_ratio` on GPUs: LIMIT, or the largest one in LIMITS for a word in the name of the subject
LIMIT, LIMITS = 2.0, {"mxfp8": 2.5, "nvfp4": 2.5, "compiled": 2.5, FSDP: 2.5}
RANKS, WARM, COUNT, ROUNDS = 2, 5, 10, 41
Run = Callable[[], None]


@dataclass(frozen=True)
class Line:
    """Result of one subject.

    all      microseconds of forward + backward, including collectives
    host     microseconds of forward + backward without transfers; with transfers for subjects with FSDP
    calls    number of Python functions that forward + backward enter
    ..._ratio    value relative to the baseline of the subject
    """

    subject: str
    all: float
    all_ratio: float
    host: float
    host_ratio: float
    calls: int
    calls_ratio: float


class Gather(torch.autograd.Function):
    """All-gather token shards [M/R, K] -> [M, K]; backward reduce-scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.group), None


class Scatter(torch.autograd.Function):
    """Reduce-scatter contributions [M, K] -> this rank's tokens [M/R, K]; backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(y, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


# Under torch.compile functional collectives are used, because a graph of torch 2.11 drops the result of an in-place collective
# in an autograd function, and then also the GEMMs that depend on the result.
def _gathered(shard: Tensor, group: ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        gathered: Tensor = functional.all_gather_tensor(shard, 0, group)
        return gathered
    whole = shard.new_empty((group.size() * len(shard), *shard.shape[1:]))
    plain_gather(whole, shard, group=group)
    return whole


def _scattered(whole: Tensor, group: ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        scattered: Tensor = functional.reduce_scatter_tensor(whole, "sum", 0, group)
        return scattered
    shard = whole.new_empty((len(whole) // group.size(), *whole.shape[1:]))
    plain_reduce(shard, whole, group=group)
    return shard


class PlainPair(nn.Module):
    """A column- and a row-parallel linear in plain torch, features -> inner -> features, with sequence parallelism."""

    def __init__(self, features: int, inner: int, group: ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.group = group
        columns = inner // group.size()
        self.column = nn.Parameter(torch.randn(columns, features, device=device).bfloat16())
        self.row = nn.Parameter(torch.randn(features, columns, device=device).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(F.linear(Gather.apply(x, self.group), self.column), self.row)
        scattered: Tensor = Scatter.apply(y, self.group)
        return scattered


def baseline(subject: str) -> str:
    """Return the name of the subject with which `subject` is compared."""
    return f"{PLAIN} {FSDP}" if subject.endswith(FSDP) else PLAIN


def limit(subject: str) -> float:
    """Return the maximum of `all_ratio` for a subject."""
    return max((LIMITS[word] for word in subject.split() if word in LIMITS), default=LIMIT)


def sharded(subject: str, features: int, device: torch.device) -> nn.Module:
    """Build two linears, dlp's with a recipe or torch's, whose weights FSDP shards over all ranks."""
    mesh = dlp.build_mesh(dp_shard=dist.get_world_size(), device_type=device.type)
    kind: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
    if subject == baseline(subject):
        plain = nn.Sequential(*(nn.Linear(features, features, **kind) for _ in range(2)))
        fully_shard(plain, mesh=mesh["dp_shard"])
        return plain
    kind["recipe"] = subject.split()[0]
    model = nn.Sequential(*(dlp.Linear(features, features, **kind) for _ in range(2)))
    dlp.fully_shard(model, mesh=mesh)
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0), mesh=mesh)
    return model


def pair(subject: str, features: int, group: ProcessGroup, device: torch.device) -> nn.Module:
    """Build the model of a subject: the plain pair, `sharded`, or dlp's column- and row-parallel linear, attached to an
    optimizer, so that the step boundary casts the weights."""
    if subject.endswith(FSDP):
        return sharded(subject, features, device)
    if subject == PLAIN:
        return PlainPair(features, features, group, device)
    recipe, way, *_ = (*subject.split(), "serial")
    options: dict[str, Any] = {"tp": group, "sequence_parallel": True, "recipe": recipe, "device": device}
    options["overlap"] = "chunked" if way == "chunked" else "serial"
    made = [
        layer(features, features, dtype=torch.bfloat16, **options)
        for layer in (dlp.ColumnParallelLinear, dlp.RowParallelLinear)
    ]
    model = nn.Sequential(*made)
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
    if way == "compiled":
        model.compile()
    return model


def passes(subject: str, tokens: int, features: int, group: ProcessGroup, device: torch.device) -> Run:
    """Build the model of a subject, warm it up, and return a function that runs forward and backward."""
    model = pair(subject, features, group, device)
    x, dy = (torch.randn(tokens // group.size(), features, device=device).bfloat16() for _ in range(2))
    x.requires_grad_()
    learns = [x, *model.parameters()]

    def run() -> None:
        model(x).backward(dy)
        for tensor in learns:
            tensor.grad = None

    for _ in range(WARM):
        run()
        if subject != baseline(subject):
            dlp.end_step(model)
    return run


def microseconds(run: Run, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the microseconds of a call; on a GPU, the time that the host needs to queue a call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    run()
    start = clock()
    for _ in range(COUNT):
        run()
    return (clock() - start) * 1e6 / COUNT


def profiled(run: Run) -> pstats.Stats:
    """Profile COUNT calls of `run`; their backward runs on this thread, so that its functions are counted."""
    watch = cProfile.Profile(builtins=False)
    with torch.autograd.set_multithreading_enabled(False):
        run()
        watch.enable()
        for _ in range(COUNT):
            run()
        watch.disable()
    return pstats.Stats(watch)


def calls_of(run: Run) -> int:
    """Return the number of Python functions that one call of `run` enters."""
    return round(profiled(run).total_calls / COUNT)  # type: ignore[attr-defined]


def ratios(times: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Return, for each subject, the medians over rounds of the microseconds and of the ratio to the baseline."""
    return {
        name: (
            statistics.median(mine),
            statistics.median(m / p for m, p in zip(mine, times[baseline(name)], strict=True)),
        )
        for name, mine in times.items()
    }


def measure(
    recipes: Sequence[str], ways: Sequence[str], tokens: int, features: int, rounds: int, device: torch.device
) -> list[Line]:
    """Return a line for each baseline, for each recipe, and for each recipe in each of `ways`."""
    subjects = [PLAIN, *([baseline(FSDP)] if FSDP in ways else [])]
    subjects += [f"{name} {way}".strip() for name in recipes for way in ("", *ways)]
    ranks = list(range(dist.get_world_size()))
    real, alone = dist.group.WORLD, dist.new_group(ranks, backend="fake")
    assert real is not None
    transport.ask_for(real, device.type)
    moving = {name: passes(name, tokens, features, real, device) for name in subjects}
    whole = ratios(in_turns(moving, rounds, microseconds))
    still = {  # subjects with FSDP send over the groups of a mesh, so they cannot run over `alone`
        name: moving[name] if name.endswith(FSDP) else passes(name, tokens, features, alone, device)
        for name in subjects
    }
    # Without GPUs the ranks share cores, so process time is measured instead of wall time
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    host = ratios(in_turns(still, rounds, partial(microseconds, clock=clock)))
    calls = {name: calls_of(run) for name, run in still.items()}
    return [
        Line(name, *whole[name], *host[name], calls[name], calls[name] / calls[baseline(name)]) for name in subjects
    ]


def verdict(line: Line, on_gpu: bool) -> str:
    """Return whether a line keeps its limit, as "ok" or "MISSED"; "" on CPUs and for baselines."""
    if not on_gpu or line.subject == baseline(line.subject):
        return ""
    return f"  {'ok' if line.all_ratio <= limit(line.subject) else 'MISSED'} ({limit(line.subject)})"


def show(lines: Sequence[Line], tokens: int, features: int, on_gpu: bool) -> None:
    print(f"\n{tokens} tokens, {features} -> {features} -> {features}: forward + backward, and ratios to {PLAIN}")
    print(f"{'subject':20} {'all us':>9} {'ratio':>6} {'host us':>9} {'ratio':>6} {'calls':>6} {'ratio':>6}")
    for line in lines:
        print(
            f"{line.subject:20} {line.all:9.1f} {line.all_ratio:6.2f} {line.host:9.1f} {line.host_ratio:6.2f} "
            f"{line.calls:6} {line.calls_ratio:6.2f}{verdict(line, on_gpu)}",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.host_parallel", description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=names(), choices=names(), metavar="RECIPE")
    parser.add_argument("--ways", nargs="+", default=[], choices=WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--tokens", type=int, default=64, help="tokens of all ranks (64)")
    parser.add_argument("--features", type=int, default=128, help="in_features and out_features of both linears (128)")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument(
        "--profile", metavar="RECIPE", help="also list the functions that a pair with this recipe calls"
    )
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:  # otherwise torchrun has started the ranks
        given = sys.argv[1:] if arguments is None else list(arguments)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        return subprocess.call([sys.executable, *launcher, "-m", "bench.host_parallel", *given])
    on_gpu = torch.cuda.is_available()
    init_process_group("cuda" if on_gpu else "cpu")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    rounds = 3 if options.quick else ROUNDS
    lines = measure(options.recipes, options.ways, options.tokens, options.features, rounds, device)
    if dist.get_rank() == 0:
        show(lines, options.tokens, options.features, on_gpu)
        write_files(options, [asdict(line) for line in lines])
    if options.profile:
        alone = dist.new_group(list(range(dist.get_world_size())), backend="fake")
        stats = profiled(passes(options.profile, options.tokens, options.features, alone, device))
        if dist.get_rank() == 0:
            stats.sort_stats("tottime").print_stats(40)
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
