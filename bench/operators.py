"""Overlap of a gather with the GEMM that follows, and of a GEMM with the reduction that follows, compared with serial runs.

    torchrun --nproc-per-node 2 -m bench.operators [--shapes 8192x8192x14336] [--recipes bf16 fp8_current] [--json FILE]

    gather   quantized x [M/R, K] of each rank -> [M, K], times w [N, K].T
    sum      x [M, N] times w [K, N].T -> contributions [M, K] in bf16; each rank keeps its rows [M/R, K] of their sum

M is the number of tokens of all R ranks, K the hidden size of an MLP that is sharded over the ranks, and N one rank's share of
the ffn size. The columns, in microseconds:

    time         the strategy (--strategies): `serial`, `chunked`, or for example chunked:2; it includes signals and sums, but
                 not the cast and the agreement on an amax
    gemm         the GEMM alone, on the gathered operand
    transfer     the collective alone: the minimum of NCCL and, for a gather, `serial`
    sequential   the minimum of NCCL's collective plus GEMM, and `serial`

and for each strategy

    of seq.     time / sequential: above 1, overlap makes the operator slower
    ideal       max(gemm, transfer) / time
    hidden      (sequential - time) / min(gemm, transfer): 1 means that everything that can overlap is hidden
    exposed     time - gemm
    -tile       (time - tile) / max(gemm, transfer), where tile = gemm / number of output-tile waves, since the last wave
                cannot be hidden. The limits for FP8 recipes are 1.10 in a gather and 1.15 in a sum

The default arguments take 484 repetitions of eight calls; the first printed line estimates the duration.

Times are device times, as in `bench.collectives`: operators alternate, inputs rotate, and the printed time is the median over
repetitions of the slowest rank's time. On CPUs (gloo) times are wall times, which only show that everything runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

import dlp
from bench import collectives
from bench.collectives import Bench, plain_gather, plain_reduce
from bench.files import add_files, write_files
from bench.ranks import refuse_one_rank
from dlp.comm import transport
from dlp.comm.mesh import AUTO, TP, TRANSPORTS, init_process_group, shutdown
from dlp.kernels import gemm_sm90
from dlp.parallel import overlap as overlaps
from dlp.parallel import tune
from dlp.parallel.auto import SERIAL
from dlp.parallel.casts import ROWWISE
from dlp.parallel.linear.plan import WIRES
from dlp.parallel.linear.quantize import quantize
from dlp.quant.gemm import Gemm
from dlp.quant.recipe import names as recipe_names
from dlp.quant.tensor import QuantizedTensor

Run = Callable[[], object]
Shape = tuple[int, int, int]
MODELS = ((8192, 8192, 28672), (16384, 8192, 28672), (8192, 4096, 14336), (4096, 4096, 14336))  # M, K, N of all ranks
TILE = 128, 256  # rows and columns of the result tile that one SM computes at a time in a large GEMM of cuBLASLt
BARS = {"gather": 1.10, "sum": 1.15}  # limits of (time - tile) / max(gemm, transfer) for FP8 recipes
RECIPES, STRATEGIES = ("fp8_current",), (SERIAL, "chunked")  # defaults
REPETITION = 0.07  # seconds of a repetition of eight calls on 2 H200 in FP8
TURNS = 3  # number of operands that rotate; at the sizes of interest all together exceed the L2 cache


@dataclass(frozen=True)
class Line:
    """One strategy of one operator: times in microseconds and ratios, as in the module docstring."""

    operator: str
    shape: str
    recipe: str
    strategy: str
    microseconds: float
    gemm: float
    transfer: float
    sequential: float
    of_sequential: float
    of_ideal: float
    hidden: float
    exposed: float
    less_a_tile: float


def line(
    operator: str, shape: Shape, recipe: str, strategy: str, time: float, parts: tuple[float, float, float],
    waves: int = 1,
) -> Line:  # fmt: skip
    """Compute a line. `time` is in microseconds; `parts`: microseconds of gemm, transfer, sequential; `waves`: number of
    output-tile waves of the GEMM."""
    gemm, transfer, sequential = parts
    return Line(
        operator, "x".join(map(str, shape)), recipe, strategy, time, *parts, time / sequential, max(gemm, transfer) / time,
        (sequential - time) / min(gemm, transfer), time - gemm, (time - gemm / waves) / max(gemm, transfer),
    )  # fmt: skip


def waves_of(shape: Shape, recipe: str, processors: int) -> int:
    """Return the number of output-tile waves of a GEMM with shape (M, K, N) and contraction K on `processors` SMs."""
    rows, along, columns = shape
    own = recipe == "fp8_block" and processors > 1 and gemm_sm90.is_large(rows, columns, along, processors)
    tall, wide = gemm_sm90.PAIR if own else TILE
    return -(-(-(-rows // tall) * -(-columns // wide)) // (processors // 2 if own else processors))


def repetitions(shapes: int, recipes: int, strategies: int) -> int:
    """Return the number of repetitions, including warm-up. Each shape and recipe has 3 runs per operator, 1 run per operator
    and strategy, and 1 run of the serial gather alone."""
    return shapes * recipes * (7 + 2 * strategies) * (collectives.REPETITIONS + collectives.WARM)


def verdict(found: Line) -> str:
    """Return whether a line of an FP8 recipe keeps the limit of `less_a_tile`, as text; "" for other recipes."""
    if "fp8" not in found.recipe:
        return ""
    bar = BARS[found.operator]
    return f"  {'ok' if found.less_a_tile <= bar else 'MISSED'} ({bar:.2f})"


class Operators:
    """Both operators at one shape with one recipe, and the GEMM and the collective of each operator alone. Operands rotate."""

    def __init__(self, bench: Bench, recipe: str, shape: Shape) -> None:
        self.bench, self.group, (tokens, features, columns) = bench, bench.mesh.get_group(), shape
        self.rows, dtype = tokens // bench.world, torch.bfloat16
        options = {
            "tp": bench.mesh,
            "sequence_parallel": True,
            "recipe": recipe,
            "device": bench.device,
            "dtype": dtype,
        }
        up = dlp.ColumnParallelLinear(features, columns * bench.world, **options)  # type: ignore[arg-type]
        down = dlp.RowParallelLinear(columns * bench.world, features, **options)  # type: ignore[arg-type]
        weights, inputs = [], []
        for layer, (rows, width) in ((up, (self.rows, features)), (down, (tokens, columns))):
            bound = layer.core.bound
            bound.session.begin_forward(bound.spec, True)
            (w,) = quantize(bound, "w", layer.core.weight_tensors(), ROWWISE)
            made = [quantize(bound, "x", [torch.randn(rows, width, device=bench.device).to(dtype)], ROWWISE)[0]
                    for _ in range(TURNS)]  # fmt: skip
            weights.append(Gemm("fprop", w.at(columnwise=False), dtype, options=bound.spec.recipe.fprop))
            inputs.append([each.at(columnwise=False) for each in made])
        (self.up, self.down), (shards, wholes) = weights, inputs
        self.shards, self.wholes = cycle(shards), cycle(wholes)
        with transport.in_pass(self.group, SERIAL):
            gathered = self._gather(SERIAL).whole()
            self.gathered = gathered.format.wrap([part.clone() for part in gathered.parts])
        self.partial = self.down(wholes[0]).to(dtype)
        self.mine = torch.empty((self.rows, features), dtype=dtype, device=bench.device)

    def _gather(self, strategy: str) -> overlaps.Gather:
        return overlaps.load(strategy).gather(next(self.shards), 0, self.group)

    def gather(self, strategy: str) -> None:
        with transport.in_pass(self.group, strategy):
            self._gather(strategy).gemm(self.up)

    def gather_alone(self) -> None:
        with transport.in_pass(self.group, SERIAL):
            self._gather(SERIAL).whole()

    def plain_gather(self) -> QuantizedTensor:
        """Gather the next operand by NCCL; parts that are equal on all ranks are not gathered."""
        shard = next(self.shards)
        parts = []
        for part, dim in zip(shard.parts, shard.format.moves[0], strict=True):
            if dim is None:
                parts.append(part)
                continue
            whole = torch.empty((self.bench.world, *part.shape), dtype=part.dtype, device=part.device)
            sent = part.contiguous().view(-1).view(torch.uint8)
            plain_gather(whole.view(-1).view(torch.uint8), sent, group=self.group)
            parts.append(whole.movedim(0, dim).flatten(dim, dim + 1))
        return shard.format.wrap(parts)

    def sum(self, strategy: str) -> None:
        with transport.in_pass(self.group, strategy):
            overlaps.load(strategy).gemm_reduce(
                next(self.wholes), self.down, self.group, reduce="scatter", dtype=torch.bfloat16, codec=WIRES["hp"]
            ).wait()

    def plain_sum(self, y: Tensor) -> None:
        plain_reduce(self.mine, y, group=self.group)


def measure(bench: Bench, recipe: str, shape: Shape, strategies: Sequence[str]) -> list[Line]:
    made, lines = Operators(bench, recipe, shape), []
    for operator, alone, plain, both, run in (
        ("gather", lambda: made.up(made.gathered), made.plain_gather, lambda: made.up(made.plain_gather()), made.gather),
        ("sum", lambda: made.down(next(made.wholes)), lambda: made.plain_sum(made.partial),
         lambda: made.plain_sum(made.down(next(made.wholes)).bfloat16()), made.sum),
    ):  # fmt: skip
        ours: list[Run] = [lambda run=run, name=name: run(name) for name in strategies]  # type: ignore[misc]
        moved = [made.gather_alone] if operator == "gather" else []
        gemm, plainly, sequential, *times = bench.times([alone, plain, both, *moved, *ours])
        own, times = times[: len(moved)], times[len(moved) :]
        parts = gemm, min(plainly, *own) if own else plainly, min(sequential, times[strategies.index(SERIAL)])
        tokens, features, columns = shape  # in a sum, the contraction is a rank's share of the columns
        waves = waves_of(
            shape if operator == "gather" else (tokens, columns, features), recipe, processors_of(bench.device)
        )
        lines += [
            line(operator, shape, recipe, name, t, parts, waves) for name, t in zip(strategies, times, strict=True)
        ]
    return lines


def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def show(found: Line, judged: bool = False) -> None:
    """Print a line. `judged`: whether targets apply."""
    print(f"{found.operator:7} {found.shape:18} {found.recipe:12} {found.strategy:10} {found.microseconds:9.1f} "
          f"{found.gemm:9.1f} {found.transfer:9.1f} {found.sequential:10.1f} {found.of_sequential:7.3f} {found.of_ideal:7.3f} "
          f"{found.hidden:7.2f} {found.exposed:9.1f} {found.less_a_tile:7.3f}"
          f"{verdict(found) if judged else ''}", flush=True)  # fmt: skip


def sizes(text: str) -> Shape:
    tokens, features, columns = map(int, text.split("x"))
    return tokens, features, columns


def main(arguments: Sequence[str] | None = None) -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 2 -m bench.operators", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--shapes", type=sizes, nargs="+", help="M x K x N, with N of one rank [MLPs of 8B and 70B models]"
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=recipe_names())
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--transport", choices=TRANSPORTS, default=AUTO, help=f"carrier of chunks ({AUTO})")
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    refuse_one_rank()
    init_process_group("cuda" if on_gpu else "cpu")
    mesh = dlp.build_mesh(tp=dist.get_world_size(), transport=options.transport)
    bench, lines = Bench(mesh[TP], tune.device_of(mesh), calls=8 if on_gpu else 1), []
    cut = [(m, k, n // bench.world) for m, k, n in MODELS] if on_gpu else [(64, 64, 64)]
    strategies = [SERIAL, *(name for name in options.strategies if name != SERIAL)]
    if dist.get_rank() == 0:
        count = repetitions(len(options.shapes or cut), len(options.recipes), len(strategies))
        print(f"{count} repetitions{f', about {count * REPETITION:.0f} s' if on_gpu else ''}", flush=True)
        print(f"{bench.world} x {torch.cuda.get_device_name() if on_gpu else 'CPU'}, torch {torch.__version__}, "
              f"{transport.describe(TP, bench.mesh.get_group())}; microseconds\n{'':7} {'M x K x N':18} {'recipe':12} "
              f"{'strategy':10} {'time':>9} {'gemm':>9} {'transfer':>9} {'sequential':>10} {'of seq.':>7} {'ideal':>7} "
              f"{'hidden':>7} {'exposed':>9} {'-tile':>7}")  # fmt: skip
    for shape in options.shapes or cut:
        for recipe in options.recipes:
            found = measure(bench, recipe, shape, strategies)
            lines += found
            if dist.get_rank() == 0:
                for each in found:
                    show(each, on_gpu)
                write_files(options, [asdict(each) for each in lines])
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
