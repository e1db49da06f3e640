"""Program that measures one shape for `bench.linear`: `nn.Linear`, then every recipe and peer, one after the other.

    python -m bench.linear_shape 8192x4096x4096 [--recipes fp8_current] [--where] [--json FILE]

Subjects (`nn.Linear`, recipes, linears of other libraries) do not alternate: each subject is measured at the clocks that
settle under its load (`dlp.kernels.timing`). Between short turns the device would cool, which would favour the subject with the
highest load. If a subject fails, its row has the reason; if `nn.Linear` fails, the program ends.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial

import torch
from torch import Tensor

from bench.files import add_files, write_files
from bench.gemm import operand
from bench.kernel_profile import longest_kernels
from bench.linear import Failure, Line, Times, beside_peers, shape_of, show, show_peer, target_of, written
from bench.linear_subjects import (
    ALL_FAST,
    ALL_TUNED,
    BASE,
    PEERS,
    RECIPES,
    TUNED,
    Shape,
    Subject,
    import_peers,
    installed_peers,
    own_name,
    recipe_of,
    untuned,
)
from bench.quantize import copy_of, graph_of, replay
from dlp.kernels import loader
from dlp.kernels.gemms import GemmProblem
from dlp.kernels.timing import device_ms, host_ms, parts_ms, sustained_ms
from dlp.kernels.tune import by_candidates, fastest, in_bursts, sustained
from dlp.quant.gemm import DECODES, Gemm, kernel_name
from dlp.quant.recipe import GEMMS, Operand

# subject -> recipe with the same GEMMs
GEMMS_OF = {BASE: "bf16", "mxfp8": "bf16", "nvfp4": "bf16", "fp8_delayed": "fp8_current"}

BF16 = torch.bfloat16.itemsize
SAMPLE, BLOCK = (4096, 4096), (128, 128)  # shapes that every format divides into complete scaling blocks
LESS_SETTLING = 0.15  # seconds of load before a measurement that follows a similar load


def gemms_of(recipe: str, shape: Shape) -> list[Callable[[], Tensor]]:
    """Return a function for each GEMM (fprop, dgrad, wgrad) that runs it on quantized operands."""
    (tokens, k, n), of, calls = shape, recipe_of(recipe), list[Callable[[], Tensor]]()
    for which, (rows, cols, contraction) in zip(GEMMS, ((tokens, n, k), (tokens, k, n), (n, k, tokens)), strict=True):
        a, b = operand(of, which, 0, rows, contraction), operand(of, which, 1, cols, contraction)
        calls.append(partial(Gemm(which, b, torch.bfloat16, options=getattr(of, which)), a))
    return calls


@cache
def gemms_ms(recipe: str, shape: Shape) -> float:
    """Return the milliseconds of the three GEMMs in sequence, each with the candidate that is the fastest in bursts."""
    calls = gemms_of(recipe, shape)
    each = [fastest(call, in_bursts) for call in calls]
    with by_candidates({found.problem: found.best for found in each}):
        return device_ms(lambda: [call() for call in calls])


@cache
def tuned_choices(recipe: str, shape: Shape) -> dict[GemmProblem, int]:
    """Return the number of the candidate that `dlp.kernels.tune` chooses for each GEMM."""
    each = [fastest(call, sustained) for call in gemms_of(recipe, shape)]
    return {found.problem: found.choice for found in each}


@cache
def cast_bytes(recipe: str) -> tuple[float, float]:
    """Return the bytes that casts move per element of x (and dy), and per element of w.

    A cast reads the values, twice if a scale depends on all of them, and writes codes and scales of both orientations. If the
    GEMMs decode operands, codes and scales are read again, and decoded values are written."""
    of = recipe_of(recipe)
    pairs = [of.operands(which) for which in GEMMS]
    decoded = any(kernel_name(a.format, b.format, "cuda").startswith(DECODES) for a, b in pairs)

    def moved_by(operand: Operand) -> float:
        ways = operand.rowwise, operand.columnwise
        if operand.rowwise.format.keeps_source:
            return 0.0
        observed = any(way.observe(torch.zeros(BLOCK, dtype=torch.bfloat16)) is not None for way in ways)
        written = sum(way.format.nbytes(SAMPLE, torch.bfloat16, along=0) / math.prod(SAMPLE) for way in ways)
        return BF16 * (1 + observed) + written + (written + len(ways) * BF16 if decoded else 0.0)

    return moved_by(of.x), moved_by(of.w)


@cache
def copied_in_ms() -> float:
    """Return the number of bytes that a device copy reads and writes per millisecond."""
    launches = [copy_of(512 * 2**20) for _ in range(2)]
    graph = graph_of(launches)
    return launches[0].nbytes / statistics.median(replay(*graph) for _ in range(9)) * 1e3


def measure(recipe: str, shape: Shape, base: Line | None) -> Line:
    """Measure a subject. `base`: the line of nn.Linear; None for nn.Linear itself."""
    own, (tokens, k, n), casts = own_name(recipe), shape, recipe not in (BASE, *PEERS)
    same = untuned(recipe).replace(own, GEMMS_OF.get(own, own))  # a recipe with the same GEMMs
    with by_candidates(tuned_choices(same, shape)) if recipe.endswith(TUNED) else nullcontext():
        ms = times_of(Subject(recipe, shape))
    alone = 0.0 if recipe in PEERS else gemms_ms(same, shape)
    per_token, per_weight = cast_bytes(own) if casts else (0.0, 0.0)
    floor = alone + 1.15 * (per_token * tokens * (k + n) + per_weight * k * n) / copied_in_ms()
    shares = ms.shares(base.ms if base else ms)
    tflops = 6 * tokens * k * n / ms.device / 1e9
    of_floor = ms.device / floor if casts else None
    return Line(recipe, tokens, k, n, ms, shares, alone, floor, tflops, target_of(recipe, shape), of_floor)


def times_of(subject: Subject) -> Times:
    device = device_ms(subject.iteration)
    fwd, bwd, _ = parts_ms([subject.forward, subject.backward, subject.boundary], settling=LESS_SETTLING)
    sustained = sustained_ms(subject.iteration, settling=LESS_SETTLING)
    return Times(device, fwd, bwd, sustained, host_ms(subject.iteration, settling=LESS_SETTLING))


def where(recipe: str, shape: Shape) -> str:
    """Describe the kernels of one iteration, longest first."""
    subject = Subject(recipe, shape)
    for _ in range(3):
        subject.iteration()
    return "\n".join(longest_kernels(subject.iteration))


def measure_all(
    shape: Shape, recipes: Sequence[str], after: Callable[[str], None] = lambda recipe: None
) -> tuple[list[Line], list[Failure]]:
    """Measure nn.Linear and `recipes`, and print each result. `after` is called with the name of each measured subject."""
    lines: list[Line] = []
    failures: list[Failure] = []
    for recipe in (BASE, *recipes):
        try:
            lines.append(measure(recipe, shape, lines[0] if lines else None))
            show(lines[-1])
            after(recipe)
        except Exception as error:
            if recipe == BASE:  # no baseline to compare with
                raise
            traceback.print_exc()
            failures.append(Failure(recipe, *shape, f"{type(error).__name__}: {error}".split("\n")[0]))
            show(failures[-1])
        torch.cuda.empty_cache()
    return lines, failures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.linear_shape", description=__doc__.split("\n")[0])
    parser.add_argument("shape", help="tokens x in x out, as 8192x4096x4096")
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES, *ALL_FAST, *ALL_TUNED])
    parser.add_argument("--where", action="store_true", help="list the kernels of an iteration")
    parser.add_argument("--wait", action="store_true", help="import everything, then wait for a line on stdin")
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if code := loader.load_or_explain():
        return code
    shape, peers = shape_of(options.shape), installed_peers()
    import_peers(peers)
    if options.wait and not sys.stdin.readline():
        return 1  # the process that would send the line has ended

    def after(recipe: str) -> None:
        if options.where:
            print(where(recipe, shape), flush=True)

    lines, failures = measure_all(shape, [*options.recipes, *peers], after)
    lines = beside_peers(lines)
    for line in lines:
        show_peer(line)
    write_files(options, written(lines, failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
