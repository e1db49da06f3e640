"""One linear, forward and backward, in each recipe beside bf16 `nn.Linear`, in the same run on one GPU.

    python -m launch.bench_linear [--shapes 8192x4096x14336] [--recipes fp8_current] [--json FILE] [--plot FILE.png]

An iteration is forward, backward with gradients of x and w, and the step boundary, which casts the weights anew: a step
of an optimizer without its arithmetic. Inputs rotate over more than four times the L2 cache.

    device     time on the device alone, of which `share` is the share of nn.Linear's: iterations are queued behind a kernel
               that keeps it busy meanwhile. Each subject runs alone until clocks have settled under its own load, as in
               a training that has no other linears; a device that takes turns is cooler for the one that heats it more
    host       with the host waiting for the device before each iteration, so that what it does counts
    gemms      the three GEMMs alone, by the algorithm that was the fastest of cuBLASLt's candidates
    floor      gemms + 1.15 x the bytes that casts read and write at least, at the bandwidth of a copy

and, once, what the host does at a shape whose device time is nothing. Shapes are tokens x in_features x out_features.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dlp
from dlp.kernels import loader
from dlp.kernels.tune import fastest
from dlp.parallel.step import end_step
from dlp.quant.gemm import Gemm
from dlp.quant.quantizer import Origin, ScaleSlot
from dlp.quant.recipe import GEMMS, Recipe
from launch.bench_files import add_files, write_files
from launch.bench_quantize import copy_of, graph_of, host_us, replay
from launch.where import longest_kernels

Run = Callable[[], None]
Shape = tuple[int, int, int]
BASE = "nn.Linear"
RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 8192), (8192, 8192, 28672), (16384, 8192, 8192))
TARGETS = {  # shares of nn.Linear's device time that must be reached, by shape
    "fp8_current": (0.87, 0.60, 0.55, 0.585, 0.54),
    "fp8_delayed": (0.82, 0.58, 0.53, 0.58, 0.52),
    "fp8_block": (0.96, 0.74, 0.69, 0.69, 0.675),
    "mxfp8": (1.35, 1.25, 1.20, 1.20, 1.20),
    "nvfp4": (1.35, 1.25, 1.20, 1.20, 1.20),
}
# Bytes that casts move for an element of (x, dy) and of w: read in bf16, both orientations written; current scaling reads
# twice, and where operands are decoded their codes and the decoded values, both ways, are moved as well.
CAST_BYTES = {"bf16": (0, 0), "fp8_current": (6, 6), "fp8_delayed": (4, 4), "fp8_block": (4.06, 4), "mxfp8": (10.1, 10.1),
              "nvfp4": (7.1, 7.1)}  # fmt: skip
DECODED = ("mxfp8", "nvfp4")  # whose GEMMs are bf16 ones
TINY = (128, 128, 128)
HOST_LIMIT = 2.0
ROUNDS = 7
SETTLING = 0.5  # seconds


@dataclass(frozen=True)
class Line:
    """One line of the table, times in milliseconds."""

    recipe: str
    tokens: int
    k: int
    n: int
    device: float
    share: float
    host: float
    gemms: float
    floor: float
    tflops: float
    target: float | None


def _torchao(linear: nn.Linear) -> nn.Module:
    float8 = importlib.import_module("torchao.float8")
    torch._dynamo.reset()  # it gives up after a few shapes
    compiled: Any = torch.compile(float8.convert_to_float8_training(nn.Sequential(linear)))
    module: nn.Module = compiled
    return module


class _TransformerEngine(nn.Module):
    """Its linear under one of its recipes."""

    def __init__(self, linear: nn.Linear, recipe: str) -> None:
        super().__init__()
        te, recipes = (importlib.import_module(f"transformer_engine.{name}") for name in ("pytorch", "common.recipe"))
        sizes = linear.in_features, linear.out_features
        self.linear = te.Linear(*sizes, bias=False, params_dtype=torch.bfloat16, device="cuda")
        self.region = lambda: te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipes, recipe)())

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            y: Tensor = self.linear(x)
        return y


# Other libraries, measured where they are installed: the package, and what makes a linear of theirs.
PEERS: dict[str, tuple[str, Callable[[nn.Linear], nn.Module]]] = {
    "torchao": ("torchao", _torchao),
    "te delayed": ("transformer_engine", lambda linear: _TransformerEngine(linear, "DelayedScaling")),
    "te current": ("transformer_engine", lambda linear: _TransformerEngine(linear, "Float8CurrentScaling")),
    "te block": ("transformer_engine", lambda linear: _TransformerEngine(linear, "Float8BlockScaling")),
}


class Subject:
    """A linear of some kind and what an iteration of it needs: inputs and gradients that rotate."""

    def __init__(self, recipe: str, shape: Shape) -> None:
        tokens, k, n = shape
        generator = torch.Generator("cuda").manual_seed(0)
        self.boundary: Run = lambda: None
        if recipe == BASE or recipe in PEERS:
            plain = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
            self.linear: nn.Module = plain if recipe == BASE else PEERS[recipe][1](plain)
        else:
            self.linear = nn.Sequential(dlp.Linear(k, n, recipe=recipe, device="cuda", dtype=torch.bfloat16))
            dlp.attach(self.linear, torch.optim.SGD(self.linear.parameters()))
            self.boundary = lambda: end_step(self.linear)
        self.parameters = list(self.linear.parameters())
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        count = min(64, 4 * cache // (2 * tokens * (k + n)) + 2)
        self.inputs = [
            tuple(torch.randn(tokens, size, device="cuda", generator=generator).bfloat16() for size in (k, n))
            for _ in range(count)
        ]
        self.turn = 0
        for x, _ in self.inputs:
            x.requires_grad_()

    def both(self) -> None:
        """Forward and backward."""
        x, dy = self.inputs[self.turn % len(self.inputs)]
        self.turn += 1
        self.linear(x).backward(dy)
        x.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def iteration(self) -> None:
        self.both()
        self.boundary()


def device_ms(run: Run, count: int = 8) -> float:
    """Milliseconds of device time of a run, on a device whose clocks have settled under it."""
    start = time.perf_counter()
    while time.perf_counter() - start < SETTLING:
        _queued_ms(run, count)
    return statistics.median(_queued_ms(run, count) for _ in range(ROUNDS))


def _queued_ms(run: Run, count: int) -> float:
    """Milliseconds of a run, of which `count` are queued while the device is busy with something else."""
    ahead = 10_000_000  # clocks
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(ahead)
        start.record()
        for _ in range(count):
            run()
        end.record()
        late = start.query()  # the device had nothing to do before all was queued
        end.synchronize()
        if not late or ahead > 2e9:
            return start.elapsed_time(end) / count
        ahead *= 2


def host_ms(run: Run, count: int = 15) -> float:
    """Milliseconds of a run that begins with an idle device, host included."""
    times = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def operand(recipe: Recipe, which: str, side: int, lines: int, contraction: int) -> Any:
    """A quantized operand of one GEMM; its values do not matter for time, but that they differ does."""
    quantizer = recipe.operands(which)[side]
    x = torch.randn(lines, contraction, device="cuda").bfloat16()
    slot = ScaleSlot(torch.ones((), device="cuda"), torch.zeros((), device="cuda"))
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    at = Origin(0, 0, lines, contraction, 0, 0, zero)
    return quantizer.cast(x, quantizer.observe(x), slot=slot, at=at)


def gemms_ms(recipe: Recipe, shape: Shape) -> float:
    """Milliseconds of fprop, dgrad and wgrad alone, each by the fastest candidate."""
    tokens, k, n = shape
    total = 0.0
    for which, (rows, cols, contraction) in zip(GEMMS, ((tokens, n, k), (tokens, k, n), (n, k, tokens)), strict=True):
        a, b = operand(recipe, which, 0, rows, contraction), operand(recipe, which, 1, cols, contraction)
        gemm = Gemm(which, b, torch.bfloat16, options=getattr(recipe, which))
        total += fastest(lambda gemm=gemm, a=a: gemm(a)).best_ms  # type: ignore[misc]
    return total


def copy_bytes_ms() -> float:
    """Bytes that a copy moves in a millisecond."""
    launches = [copy_of(512 * 2**20) for _ in range(2)]
    graph = graph_of(launches)
    return launches[0].nbytes / statistics.median(replay(*graph) for _ in range(9)) * 1e3


def measure(recipe: str, shape: Shape, base: float | None, bandwidth: float) -> Line:
    """`base`: milliseconds of nn.Linear, None for itself."""
    subject = Subject(recipe, shape)
    tokens, k, n = shape
    device = device_ms(subject.iteration)
    alone = (
        gemms_ms(dlp.recipe("bf16" if recipe in (BASE, *DECODED) else recipe), shape) if recipe not in PEERS else 0.0
    )
    per_token, per_weight = CAST_BYTES.get(recipe, (0, 0))
    floor = alone + 1.15 * (per_token * tokens * (k + n) + per_weight * k * n) / bandwidth
    target = TARGETS[recipe][SHAPES.index(shape)] if recipe in TARGETS and shape in SHAPES else None
    return Line(
        recipe, tokens, k, n, device, device / (base or device), host_ms(subject.iteration), alone, floor,
        6 * tokens * k * n / device / 1e9, target,
    )  # fmt: skip


def where(recipe: str, shape: Shape) -> str:
    """What one iteration does on the device, longest first."""
    subject = Subject(recipe, shape)
    for _ in range(3):
        subject.iteration()
    return "\n".join(longest_kernels(subject.iteration))


def show(line: Line) -> None:
    verdict = "" if line.target is None else f"  {'ok' if line.share <= line.target else 'MISSED'} ({line.target})"
    print(f"{line.recipe:12} {line.tokens:6} {line.k:6} {line.n:6} {line.device:8.3f} {line.share:6.3f} {line.host:8.3f}"
          f" {line.gemms:8.3f} {line.floor:8.3f} {line.tflops:7.0f}{verdict}", flush=True)  # fmt: skip


def show_hosts(recipes: Sequence[str]) -> dict[str, list[float]]:
    """What the host does for a tiny linear: forward + backward, its ratio to nn.Linear's, the step boundary."""
    print(f"\nhost, {'x'.join(map(str, TINY))}: microseconds of forward + backward, ratio to {BASE}, step boundary")
    found: dict[str, list[float]] = {}
    for recipe in (BASE, *recipes):
        subject = Subject(recipe, TINY)
        subject.iteration()
        times = [host_us(run, 200, ROUNDS) for run in (subject.both, subject.boundary)]
        found[recipe] = [times[0], times[0] / found.get(BASE, times)[0], times[1]]
        verdict = "" if not recipe.startswith("fp8") else "  ok" if found[recipe][1] <= HOST_LIMIT else "  MISSED (2.0)"
        print(
            f"{recipe:12} {found[recipe][0]:8.1f} {found[recipe][1]:6.2f} {found[recipe][2]:8.1f}{verdict}", flush=True
        )
    return found


def plot(lines: Sequence[Line], file: Path) -> None:
    """Device time as a share of nn.Linear's, a group of bars for each shape."""
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys((line.tokens, line.k, line.n) for line in lines))
    recipes = list(dict.fromkeys(line.recipe for line in lines))
    figure = Figure(figsize=(2.4 * len(shapes) + 2, 4.5))
    axis = figure.subplots()
    for i, recipe in enumerate(recipes):
        shown = {(line.tokens, line.k, line.n): line.share for line in lines if line.recipe == recipe}
        at = [j + (i - len(recipes) / 2) * 0.8 / len(recipes) for j, shape in enumerate(shapes) if shape in shown]
        axis.bar(at, list(shown.values()), width=0.75 / len(recipes), label=recipe, align="edge")
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(shapes)), [f"{m} x {k}\n-> {n}" for m, k, n in shapes])
    axis.set_ylabel(f"device time / {BASE}")
    axis.set_title(f"One linear, forward + backward, {torch.cuda.get_device_name()}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.bench_linear", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES],
                        help="tokens x in x out, as 8192x4096x4096")  # fmt: skip
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--where", action="store_true", help="list the kernels of an iteration")
    add_files(parser)
    options = parser.parse_args(arguments)
    if code := loader.load_or_explain():
        return code
    bandwidth = copy_bytes_ms()
    peers = [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package)]
    recipes = [*options.recipes, *peers]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e9:.2f} TB/s")
    print(f"peers installed: {', '.join(peers) or 'none'}")
    hosts = show_hosts(recipes)
    print(f"\n{'recipe':12} {'tokens':>6} {'in':>6} {'out':>6} {'device':>8} {'share':>6} {'host':>8} {'gemms':>8} {'floor':>8}"
          f" {'TFLOP/s':>7}")  # fmt: skip
    lines: list[Line] = []
    for text in options.shapes:
        tokens, k, n = map(int, text.split("x"))
        base: float | None = None
        for recipe in (BASE, *recipes):
            lines.append(measure(recipe, (tokens, k, n), base, bandwidth))
            base = base or lines[-1].device
            show(lines[-1])
            if options.where:
                print(where(recipe, (tokens, k, n)), flush=True)
            torch.cuda.empty_cache()
    write_files(options, {"lines": [asdict(line) for line in lines], "host_us": hosts}, partial(plot, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
