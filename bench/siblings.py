"""dgrad of siblings (q, k and v; gate and up), one GEMM for each sibling and one kernel for all siblings, on one GPU.

    python -m bench.siblings [--shapes 8192x4096x2048+512+512 8192x4096x7168+7168] [--recipes fp8_delayed] [--json FILE]

A shape is tokens x in_features x out_features of each sibling, on one rank. The operands are dy_i [M, N_i] and w_i [K, N_i].

Columns: microseconds of one GEMM per sibling, added in fp32 and then rounded to bf16 (`separate`), and of the kernel of dlp
that adds the dgrads of siblings (`one`), medians of bursts on a busy device; `equal`, the fraction of elements that are bitwise
equal in both.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import dlp
from bench.files import add_files, write_files
from dlp.kernels.ops import rounded
from dlp.kernels.timing import device_ms
from dlp.quant.gemm import Gemm
from dlp.quant.quantizer import Origin, ScaleSlot
from dlp.quant.recipe import Recipe, names
from dlp.quant.siblings import as_one
from dlp.quant.tensor import QuantizedTensor
from launch.ranks.process_exit import refuse

SHAPES = ("8192x4096x2048+512+512", "8192x4096x7168+7168")
RECIPES = ("fp8_current", "fp8_delayed")  # recipes for whose formats the kernel exists
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Line:
    """Result of one shape and recipe.

    separate    microseconds of one GEMM per sibling
    one         microseconds of the kernel for all siblings
    equal       fraction of elements that are bitwise equal in both results
    """

    shape: str
    recipe: str
    separate: float
    one: float
    equal: float


def dgrads(recipe: Recipe, tokens: int, features: int, outs: Sequence[int]) -> tuple[Run, Run | None]:
    """Return (separate, one), functions that compute dx: `separate` by one GEMM per sibling, `one` by the kernel for all
    siblings; `one` is None if there is no such kernel for the recipe."""
    dys = [cast(recipe, 0, matrix(tokens, out, 1.0 + i)) for i, out in enumerate(outs)]
    ws = [cast(recipe, 1, matrix(features, out, 1.0 / (1 + i))) for i, out in enumerate(outs)]

    def separate() -> Tensor:
        total = None
        for dy, w in zip(dys, ws, strict=True):
            total = Gemm("dgrad", w, torch.float32, accumulate=total, options=recipe.dgrad)(dy)
        assert total is not None
        return rounded(total, torch.bfloat16)

    gemms = [Gemm("dgrad", w, torch.float32, options=recipe.dgrad) for w in ws]
    (dy, *others), (gemm, *_) = as_one(dys, gemms, torch.bfloat16)
    return separate, None if others else lambda: gemm(dy)


def matrix(rows: int, columns: int, size: float) -> Tensor:
    return (size * torch.randn(rows, columns, device="cuda")).bfloat16()


def cast(recipe: Recipe, side: int, x: Tensor) -> QuantizedTensor:
    quantizer: Any = recipe.operands("dgrad")[side]
    # a delayed scale, as if the amax of earlier steps were 1.3 times the amax of x
    slot = ScaleSlot(448.0 / x.abs().amax().float() / 1.3, torch.zeros((), device="cuda"))
    at = Origin(0, 0, x.shape[0], x.shape[1], 0, 0, torch.zeros((), dtype=torch.int64, device="cuda"))
    made: QuantizedTensor = quantizer.cast(x, quantizer.observe(x), slot=slot, at=at)
    return made


def measure(text: str, name: str) -> Line | None:
    """Measure one shape and recipe. None if there is no kernel for the recipe."""
    tokens, features, outs = text.split("x")
    torch.manual_seed(0)
    separate, one = dgrads(dlp.recipe(name), int(tokens), int(features), [int(out) for out in outs.split("+")])
    if one is None:
        return None
    equal = float((one() == separate()).float().mean())
    return Line(text, name, 1e3 * device_ms(separate), 1e3 * device_ms(one), equal)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.siblings", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="MxKxN+N")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=names())
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        refuse("bench.siblings times GEMMs of GPUs, and this host has no GPU that torch can use", code=2)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(f"{'shape':24} {'recipe':12} {'separate':>9} {'one':>8} {'ratio':>6} {'equal':>7}  us")
    lines = []
    for text, name in itertools.product(options.shapes, options.recipes):
        line = measure(text, name)
        if line is None:
            print(f"{text:24} {name:12} no kernel adds the dgrads of siblings in these formats", flush=True)
            continue
        lines.append(line)
        ratio = line.one / line.separate
        print(f"{text:24} {name:12} {line.separate:9.1f} {line.one:8.1f} {ratio:6.3f} {line.equal:7.4f}", flush=True)
    write_files(options, [asdict(line) for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
