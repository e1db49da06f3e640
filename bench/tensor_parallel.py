"""A column- and a row-parallel linear, and a Llama layer, over the tp ranks of a host, forward and backward, compared with
plain torch in bf16.

    torchrun --nproc-per-node 2 -m bench.tensor_parallel [--recipes fp8_delayed fp8_current] [--overlap serial chunked auto]
                                         [--shapes 4096x14336 4096x14336x32x8] [--tokens 8192] [--table FILE] [--json FILE]

    x [M/R, K] ─ column (gather x, K -> N) ─► [M, N/R] ─ row (N -> K, scatter y) ─► y [M/R, K]    sequence parallel, R ranks

`bench.parallel_subjects` defines shapes and subjects: plain torch (all_gather, F.linear, reduce_scatter), dlp, and
Transformer Engine if it is installed. dlp sends through mapped memory if the GPUs support it, or as --transport says. An
iteration of dlp ends with the step boundary, which casts the weights. `auto` chooses a strategy by --table, or by the shipped
tables. Milliseconds by subject:

    alone     an iteration that starts when the device is idle, as in a step in which the host cannot run ahead
    queued    an iteration in a queue of iterations
    host      time in which the host queues an iteration

Each time is measured with calls from Python, and with a CUDA graph of the iteration including the step boundary. Layers of dlp
and of plain torch are compiled block by block, as by `launch.train`, except with --eager. Graphs of Transformer Engine are made
by `te.make_graphed_callables`, and "userbuffers" subjects overlap transfers with GEMMs. --profile lists the kernels of a
subject on rank 0, in the CUDA graph if there is one.

Shares are relative to the time of plain torch, and to the time of `serial` with the same recipe, which `auto` must not exceed
by more than the factor NOISE. Times are medians over iterations on the slowest rank. Subjects take turns, with several
iterations in each turn. On CPUs the program only shows that everything runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dlp
from bench import kernel_profile
from bench.files import add_files, write_files
from bench.host_parallel import PLAIN, Run
from bench.iterations import Iteration, settle, side_stream, slowest, timed
from bench.parallel_subjects import OneLayer, Shape, shape_of, subject
from bench.ranks import refuse_one_rank
from bench.transformer_engine import COUNTERPARTS, PEERS, USERBUFFERS_OF_PROCESS, installed, is_peer
from dlp.comm.mesh import TP, TRANSPORTS, init_process_group, shutdown
from dlp.parallel import auto, tune
from dlp.parallel.auto import AUTO, SERIAL, Times
from dlp.quant.recipe import names
from launch.models.attention import ORDERS
from launch.ranks.process_exit import refuse
from launch.training.attention_backend import FASTEST
from launch.training.build import compile_blocks

WARM, COUNT, ROUNDS, PROFILED = 6, 10, 3, 5
Medians = dict[tuple[str, str], list[float]]
SHAPES = ("4096x14336", "8192x28672", "4096x14336x32x8", "8192x28672x64x8")
TARGETS = {  # limits for `auto` relative to plain torch, alone and queued, on two H200 with 8192 tokens
    "4096x14336": {"fp8_delayed": 0.66, "fp8_current": 0.70, "fp8_block": 0.78},
    "8192x28672": {"fp8_delayed": 0.575},
    "4096x14336x32x8": {"fp8_delayed": 0.66},
    "8192x28672x64x8": {"fp8_delayed": 0.63},
}
BF16 = 0.95  # limit for `auto` with recipe bf16, at all shapes of TARGETS
NOISE = 1.03  # factor by which the times of two runs of one program may differ
TOKENS, SMALL, FEW = 8192, ("64x128", "64x128x4x2"), 64  # defaults: tokens on GPUs; shapes and tokens without a GPU


@dataclass(frozen=True)
class Line:
    """Result of one subject at one shape.

    alone, queued, host    milliseconds of an iteration by calls
    graph_...              milliseconds of an iteration as a CUDA graph; None if no graph was captured
    ..._share              milliseconds relative to plain torch in the same run
    of_serial              milliseconds relative to strategy serial: alone and queued by calls, then alone and queued as a CUDA
                           graph if captured; None for subjects without a serial counterpart
    """

    shape: str
    subject: str
    alone: float
    alone_share: float
    queued: float
    queued_share: float
    host: float
    graph_alone: float | None = None
    graph_alone_share: float | None = None
    graph_queued: float | None = None
    graph_queued_share: float | None = None
    of_serial: tuple[float, ...] | None = None

    @property
    def best(self) -> tuple[float, float]:
        """Milliseconds alone and queued, by calls or as a CUDA graph, whichever is faster."""
        graph = self.graph_alone, self.graph_queued
        alone, queued = (
            value if other is None else min(value, other)
            for value, other in zip((self.alone, self.queued), graph, strict=True)
        )
        return alone, queued


@dataclass(frozen=True)
class Asked:
    """Options of the measurement.

    count        iterations of a subject in one turn
    compiled     whether the blocks of layers are compiled, as by `launch.train`
    graphs       whether iterations are also captured as CUDA graphs
    profiled     subjects whose kernels are listed
    attention    attention backend in layers of dlp, a key of `launch.models.attention.ORDERS`; None: torch chooses, as in
                 layers of plain torch
    """

    count: int = COUNT
    compiled: bool = False
    graphs: bool = False
    profiled: tuple[str, ...] = ()
    attention: str | None = None


def measure(
    shape: Shape,
    tokens: int,
    subjects: Sequence[tuple[str, str]],
    mesh: DeviceMesh,
    table: Times | None,
    asked: Asked = Asked(),
) -> list[Line]:
    """Measure the subjects (name, strategy) at one shape. Returns a line for each subject, including plain torch. `table`:
    times by which "auto" chooses; None: the shipped tables."""
    device = tune.device_of(mesh)
    torch._dynamo.reset()  # otherwise the sizes of the next shape would become dynamic
    with side_stream(device):
        calls: dict[tuple[str, str], Iteration] = {}
        for name, strategy in subjects:
            with attempt(f"{name} {strategy}".strip(), is_peer(name)):
                model = made(shape, tokens, (name, strategy), mesh, table, asked)
                iteration = Iteration(model, name, (tokens // mesh.size(), shape.features), device)
                for _ in range(WARM if device.type == "cuda" else 1):
                    iteration.run()
                calls[name, strategy] = iteration
        medians = turns({key: each.run for key, each in calls.items()}, device, asked.count)
        graphs: dict[tuple[str, str], Run] = {}
        for key, iteration in calls.items() if asked.graphs else ():
            with attempt(f"{' '.join(key).strip()} in a CUDA graph", is_peer(key[0]) or key[0] == PLAIN):
                graphs[key] = iteration.capture()
        in_graphs = turns(graphs, device, asked.count)
        for key in calls:
            if " ".join(key).strip() in asked.profiled:
                profiled(shape, key, graphs.get(key), calls[key].run, device)
    return lines_of(str(shape), medians, in_graphs)


def made(
    shape: Shape, tokens: int, key: tuple[str, str], mesh: DeviceMesh, times: Times | None, asked: Asked
) -> nn.Module:
    """Build the model of a subject (name, strategy). Layers of dlp get the attention backend of `asked`; layers of dlp and
    plain torch are compiled block by block if `asked.compiled`."""
    name, strategy = key
    torch.manual_seed(0)
    model = subject(name, strategy, shape, tokens, mesh, times)
    if isinstance(model, OneLayer) and name != PLAIN:
        model.layers[0].self_attn.backend = asked.attention  # type: ignore[union-attr]
    if asked.compiled and isinstance(model, OneLayer):
        compile_blocks(model.layers)
    return model


@contextmanager
def attempt(name: str, optional: bool) -> Iterator[None]:
    """Context that prints an exception of an optional subject and suppresses it; other exceptions end the benchmark."""
    try:
        yield
    except Exception as error:
        if not optional:
            raise
        if dist.get_rank() == 0:
            print(f"left out: {name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)


def turns(runs: dict[tuple[str, str], Run], device: torch.device, count: int) -> Medians:
    """Run subjects in turn, `count` iterations in each turn. Returns the milliseconds alone, queued and of the host of each
    subject, medians over rounds."""
    found: dict[tuple[str, str], list[list[float]]] = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, run in runs.items():
            single, queued, host = timed(run, device, count)
            found[key].append(slowest([statistics.median(single), queued, host], device))
    return {key: [1e3 * statistics.median(column) for column in zip(*rows, strict=True)] for key, rows in found.items()}


def profiled(shape: Shape, key: tuple[str, str], graph: Run | None, run: Run, device: torch.device) -> None:
    """Print the kernels of one subject on rank 0, in its CUDA graph if there is one, else by calls."""
    settle(device)
    found = kernel_profile.record(graph or run, PROFILED, device, dist.get_rank() == 0)
    settle(device)
    if found is not None:
        way = "as calls" if graph is None else "in a CUDA graph"
        kernel_profile.show(f"{shape} {' '.join(key).strip()} {way}", found)


def lines_of(shape: str, medians: Medians, graphs: Medians) -> list[Line]:
    """Compute lines from the milliseconds of each subject by calls and as CUDA graphs, both in the order of `turns`."""
    lines = []
    for (name, strategy), calls in medians.items():
        times, plain, serial = (
            [*found[:3], *graphs.get(key, ())[:2]]
            for key, found in (
                ((name, strategy), calls),
                ((PLAIN, ""), medians[PLAIN, ""]),
                ((name, SERIAL), medians.get((name, SERIAL), [])),
            )
        )
        of_serial = None if strategy == SERIAL or not serial else _ratios(times, serial)
        shares = _ratios(times, plain)
        line = Line(
            shape, f"{name} {strategy}".strip(), times[0], shares[0], times[1], shares[1], times[2], of_serial=of_serial
        )
        if len(times) == 5:
            line = replace(line, graph_alone=times[3], graph_queued=times[4])
        if len(times) == len(plain) == 5:
            line = replace(line, graph_alone_share=shares[2], graph_queued_share=shares[3])
        lines.append(line)
    return lines


def _ratios(times: list[float], others: list[float]) -> tuple[float, ...]:
    """Return the ratios alone and queued by calls and, if both have them, as CUDA graphs; without the ratio of host times."""
    pairs = list(zip(times, others, strict=False))
    return tuple(mine / theirs for i, (mine, theirs) in enumerate(pairs) if i != 2)


def target(line: Line) -> float | None:
    """Return the limit of `alone_share` and `queued_share` of a line; None without a target."""
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
    """Describe whether a line of "auto" is slower than serial by more than NOISE, by calls or as a CUDA graph; "" for other
    lines."""
    if line.of_serial is None or not line.subject.endswith(f" {AUTO}"):
        return ""
    return f"  {'SLOWER than serial' if max(line.of_serial) > NOISE else 'never slower than serial'}"


def show(lines: Sequence[Line], tokens: int, judged: bool = False) -> None:
    """Print lines. `judged`: whether targets apply."""
    print(f"\n{tokens} tokens; milliseconds and shares of plain torch's in the same run; of serial's")
    print(f"{'':39}{'as calls':31}as a CUDA graph")
    print(
        f"{'shape':16} {'subject':22} {'alone':>8} {'share':>6} {'queued':>8} {'share':>6} {'host':>8} "
        f"{'alone':>8} {'share':>6} {'queued':>8} {'share':>6}  of serial"
    )
    for line in lines:
        serial = "" if line.of_serial is None else " ".join(f"{ratio:.3f}" for ratio in line.of_serial)
        graph = f"{'-':>8} {'':6} {'-':>8} {'':6}"
        if line.graph_alone is not None:
            nan = float("nan")  # no graph of plain torch
            graph = (
                f"{line.graph_alone:8.3f} {line.graph_alone_share or nan:6.3f} {line.graph_queued:8.3f} "
                f"{line.graph_queued_share or nan:6.3f}"
            )
        print(
            f"{line.shape:16} {line.subject:22} {line.alone:8.3f} {line.alone_share:6.3f} {line.queued:8.3f} "
            f"{line.queued_share:6.3f} {line.host:8.3f} {graph}  {serial:11}{beside_serial(line)}"
            f"{verdict(line) if judged else ''}".rstrip(),
            flush=True,
        )
    for text in beside_peers(lines):
        print(text, flush=True)


def beside_peers(lines: Sequence[Line]) -> Iterator[str]:
    """Compare, for each recipe, the fastest time of dlp (over strategies, by calls or as a CUDA graph) with the fastest time of
    Transformer Engine."""
    for recipe, peer in COUNTERPARTS.items():
        ours = [line for line in lines if line.subject.startswith(f"{recipe} ")]
        theirs = [line for line in lines if line.subject.startswith(peer)]
        if not ours or not theirs:
            continue
        ratios = []
        for i, way in enumerate(("alone", "queued")):
            mine, other = (min(group, key=lambda line: line.best[i]) for group in (ours, theirs))
            ratio = mine.best[i] / other.best[i]
            ratios.append(
                f"{way} {mine.best[i]:.3f} / {other.best[i]:.3f} = {ratio:.3f} ({mine.subject} / {other.subject})"
            )
        yield f"best of {recipe} / best of {peer}: {'; '.join(ratios)}"


def main(arguments: Sequence[str] | None = None) -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="torchrun -m bench.tensor_parallel", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--recipes", nargs="+", default=["bf16", "fp8_delayed", "fp8_current", "fp8_block"], choices=names()
    )
    parser.add_argument("--overlap", nargs="+", default=[SERIAL, "chunked", AUTO])
    shapes = [shape_of(text) for text in (SHAPES if on_gpu else SMALL)]
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=shapes, metavar="KxN")
    parser.add_argument("--tokens", type=int, default=TOKENS if on_gpu else FEW, help=f"tokens of all ranks ({TOKENS})")
    parser.add_argument("--transport", choices=TRANSPORTS, default=AUTO, help=f"carrier of dlp's transfers ({AUTO})")
    parser.add_argument("--table", help="file of dlp.parallel.tune, by which auto chooses [the shipped tables]")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--count", type=int, default=COUNT, help=f"iterations in a block ({COUNT})")
    parser.add_argument("--eager", action="store_true", help="layers run without torch.compile, as on CPUs")
    backends = ("torch", *ORDERS)
    parser.add_argument("--attention", choices=backends, default=FASTEST, help=f"backend in layers of dlp ({FASTEST})")
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--profile", nargs="+", default=[], metavar="SUBJECT", help='list kernels of "fp8_delayed chunked"'
    )
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    refuse_one_rank()
    init_process_group("cuda" if on_gpu else "cpu")
    mesh = dlp.build_mesh(tp=dist.get_world_size(), transport=options.transport)
    table = None if options.table is None else auto.load(options.table, together=True)
    if table is not None:
        by = auto.transport_name(mesh[TP].get_group(), mesh.device_type)
        why = table.obstacle(auto.machine(mesh.device_type), mesh[TP].size(), by)
        if why is not None:
            refuse(f"--table {options.table}: {why}", code=2)
    subjects = [(PLAIN, ""), *((recipe, strategy) for recipe in options.recipes for strategy in options.overlap)]
    subjects += [(peer, "") for peer in options.peers if installed()]
    if options.peers and not installed() and dist.get_rank() == 0:
        print("left out: Transformer Engine is not installed", flush=True)
    asked = Asked(
        options.count, on_gpu and not options.eager, on_gpu and not options.no_graph, tuple(options.profile),
        options.attention if on_gpu and options.attention != "torch" else None,
    )  # fmt: skip
    lines = []
    for shape in options.shapes:
        lines += measure(shape, options.tokens, subjects, mesh, table, asked)
        if on_gpu:
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:  # printed at once, because a later shape may fail
            judged = on_gpu and dist.get_world_size() == 2 and options.tokens == TOKENS
            show([line for line in lines if line.shape == str(shape)], options.tokens, judged)
            write_files(options, [asdict(line) for line in lines])
    USERBUFFERS_OF_PROCESS.destroy()
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
