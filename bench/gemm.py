"""Speed of each recipe's three GEMMs, compared with bf16 and with torch's scaled GEMM in the same run.

    python -m bench.gemm [--shapes 8192x4096x14336] [--recipes fp8_current] [--json FILE]

Shapes are tokens x in_features x out_features. A GEMM reads quantized operands; its time includes the conversion of scales to
the layout of the kernel, and the decoding of operands. Operands rotate over more than four times the L2 cache. Launches are
captured as a CUDA graph, which is replayed until the clocks have settled under its load, and then timed.

    x bf16     speed relative to torch.mm in bf16
    x torch    speed relative to torch._scaled_mm on the same codes and scales with the same accumulation, if supported
    best       speed of the fastest of cuBLASLt's candidates relative to the selected kernel, both timed in bursts
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dlp
from bench.files import add_files, write_files
from bench.linear_subjects import RECIPES, SHAPES, Shape
from bench.quantize import Launch, graph_of, replay, rotation
from bench.shapes import SIZES
from dlp.kernels import gemms, loader
from dlp.kernels.timing import SETTLING
from dlp.kernels.tune import fastest, in_bursts, runs_cublaslt
from dlp.quant.gemm import Gemm, kernel_name
from dlp.quant.quantizer import Origin, ScaleSlot
from dlp.quant.recipe import GEMMS, Recipe
from dlp.quant.tensor import QuantizedTensor

REPLAYS = 9


@dataclass(frozen=True)
class Line:
    """Speed of one GEMM.

    rows, cols, contraction    sizes of D [rows, cols] = A [rows, contraction] B [cols, contraction]^T
    kernel                     name of the selected kernel
    microseconds, tflops       time and TFLOP/s
    bf16_tflops                TFLOP/s of torch.mm in bf16
    torch_tflops               TFLOP/s of torch._scaled_mm; None if it does not support the operands
    best                       speed of cuBLASLt's fastest candidate relative to `kernel`, which is cuBLASLt's or gemm_sm90;
                               None for other kernels
    """

    recipe: str
    gemm: str
    rows: int
    cols: int
    contraction: int
    kernel: str
    microseconds: float
    tflops: float
    bf16_tflops: float
    torch_tflops: float | None
    best: float | None


def operand(recipe: Recipe, which: str, side: int, lines: int, contraction: int) -> Any:
    """Quantize an operand of one GEMM. Values are random, because with constant values the GEMM draws less power and is faster.

    Args:
        recipe: recipe of the GEMM.
        which: fprop, dgrad or wgrad.
        side: 0 for the left operand, 1 for the right operand.
        lines: rows of the operand.
        contraction: columns of the operand.
    """
    quantizer = recipe.operands(which)[side]
    x = torch.randn(lines, contraction, device="cuda").bfloat16()
    slot = ScaleSlot(torch.ones((), device="cuda"), torch.zeros((), device="cuda"))
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    at = Origin(0, 0, lines, contraction, 0, 0, zero)
    return quantizer.cast(x, quantizer.observe(x), slot=slot, at=at)


def microseconds(make: Callable[[], Launch]) -> float:
    """Return the median microseconds of a launch, at the clocks that settle under its load."""
    graph = graph_of(rotation(make))
    until = time.perf_counter() + SETTLING
    while time.perf_counter() < until:
        replay(*graph)
    return statistics.median(replay(*graph) for _ in range(REPLAYS))


def bf16(rows: int, cols: int, contraction: int) -> Launch:
    a, b = (torch.randn(lines, contraction, device="cuda").bfloat16() for lines in (rows, cols))
    return Launch(lambda: torch.mm(a, b.t()), (a, b))


def ours(recipe: Recipe, which: str, sizes: tuple[int, int, int]) -> tuple[Launch, QuantizedTensor, QuantizedTensor]:
    rows, cols, contraction = sizes
    a, b = operand(recipe, which, 0, rows, contraction), operand(recipe, which, 1, cols, contraction)
    gemm = Gemm(which, b, torch.bfloat16, options=getattr(recipe, which))
    return Launch(lambda: gemm(a), (*a.parts, *b.parts)), a, b


def by_cublaslt(a: QuantizedTensor, b: QuantizedTensor) -> torch.Tensor:
    """Multiply operands with 1x128 and 128x128 blocks by cuBLASLt instead of dlp's kernel."""
    scales = gemms.block_scales(a.parts[1], tile=False), gemms.block_scales(b.parts[1], tile=True)
    modes = gemms.BLOCK_1D, gemms.BLOCK_2D
    return gemms.product_fp8(a.payload, b.payload, torch.bfloat16, gemms.Scales(*scales, *modes))


def torchs(recipe: Recipe, which: str, sizes: tuple[int, int, int]) -> Callable[[], Launch] | None:
    """Return a function that makes the launch of torch._scaled_mm; None for operands that are not FP8 or have block scales."""
    kinds = {quantizer.format.gemm_kind for quantizer in recipe.operands(which)}
    if kinds not in ({"fp8_tensor"}, {"fp8_rowwise"}):
        return None
    rowwise, fast = kinds == {"fp8_rowwise"}, getattr(recipe, which).fast_accumulation

    def make() -> Launch:
        launch, a, b = ours(recipe, which, sizes)
        by_row, by_col = a.parts[1], b.parts[1]
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        options["scale_a"] = by_row[:, None] if rowwise else by_row
        options["scale_b"] = by_col[None] if rowwise else by_col
        return Launch(lambda: torch._scaled_mm(a.payload, b.payload.t(), **options), launch.tensors)

    return make


def measure(recipe: Recipe, which: str, sizes: tuple[int, int, int], bf16_us: float) -> Line:
    """Measure one GEMM. `which`: fprop, dgrad or wgrad; `sizes`: rows, cols, contraction; `bf16_us`: microseconds of torch.mm
    in bf16."""
    work = 2 * sizes[0] * sizes[1] * sizes[2] / 1e6  # TFLOP/s times microseconds
    launch, a, b = ours(recipe, which, sizes)
    kernel = kernel_name(a.format, b.format, "cuda")
    best = None
    if kernel.startswith("cublaslt") and runs_cublaslt(launch.run):
        found = fastest(launch.run, in_bursts)
        best = found.times_ms[0] / found.best_ms
    elif kernel.startswith("cublaslt"):
        kernel = "gemm_sm90"
        best = in_bursts(launch.run) / fastest(partial(by_cublaslt, a, b), in_bursts).best_ms
    own = microseconds(lambda: ours(recipe, which, sizes)[0])
    theirs = torchs(recipe, which, sizes)
    other = None if theirs is None else work / microseconds(theirs)
    return Line(recipe.name, which, *sizes, kernel, own, work / own, work / bf16_us, other, best)


def show(line: Line) -> None:
    beside = "" if line.torch_tflops is None else f"{line.tflops / line.torch_tflops:.3f}"
    best = "" if line.best is None else f"{line.best:.3f}"
    sizes = f"{line.rows:6} {line.cols:6} {line.contraction:6}"
    print(f"{line.recipe:12} {line.gemm:6} {sizes} {line.microseconds:9.1f} {line.tflops:8.0f} "
          f"{line.tflops / line.bf16_tflops:7.3f} {beside:>8} {best:>6}  {line.kernel}", flush=True)  # fmt: skip


def of_shape(shape: Shape, recipes: Sequence[str]) -> list[Line]:
    of, lines = dict(zip("MKN", shape, strict=True)), []
    sizes = {which: (of[letters[0]], of[letters[1]], of[letters[2]]) for which, letters in SIZES.items()}
    base = {size: microseconds(lambda size=size: bf16(*size)) for size in dict.fromkeys(sizes.values())}  # type: ignore[misc]
    for name in recipes:
        for which in GEMMS:
            lines.append(measure(dlp.recipe(name), which, sizes[which], base[sizes[which]]))
            show(lines[-1])
            torch.cuda.empty_cache()
    return lines


def plot(lines: Sequence[Line], file: Path) -> None:
    """Plot TFLOP/s: a group of bars for each GEMM and size, with a bar for each recipe."""
    from matplotlib.figure import Figure

    problems = list(dict.fromkeys((line.gemm, line.rows, line.cols, line.contraction) for line in lines))
    recipes = list(dict.fromkeys(line.recipe for line in lines))
    figure = Figure(figsize=(10, 0.9 * len(problems) + 1.5), layout="constrained")
    axis, width = figure.subplots(), 0.8 / len(recipes)
    for i, recipe in enumerate(recipes):
        found = {
            (line.gemm, line.rows, line.cols, line.contraction): line.tflops for line in lines if line.recipe == recipe
        }
        axis.barh(
            [j + i * width for j, p in enumerate(problems) if p in found], list(found.values()), width, label=recipe
        )
    axis.set_yticks(
        [j + 0.4 for j in range(len(problems))], [f"{which} {m} x {n} x {c}" for which, m, n, c in problems]
    )
    axis.invert_yaxis()
    axis.set_xlabel(f"TFLOP/s, {torch.cuda.get_device_name()}")
    axis.legend()
    figure.savefig(file, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gemm", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES[:3]],
                        help="tokens x in x out, as 8192x4096x4096")  # fmt: skip
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES, "fp8_rowwise"])
    add_files(parser)
    options = parser.parse_args(arguments)
    if code := loader.load_or_explain():
        return code
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'recipe':12} {'gemm':6} {'rows':>6} {'cols':>6} {'contr.':>6} {'us':>9} {'TFLOP/s':>8} {'x bf16':>7} "
          f"{'x torch':>8} {'best':>6}  kernel")  # fmt: skip
    lines = []
    for text in options.shapes:
        tokens, k, n = (int(size) for size in text.split("x"))
        lines += of_shape((tokens, k, n), options.recipes)
    write_files(options, [asdict(line) for line in lines], partial(plot, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
