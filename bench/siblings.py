"""GEMMs of siblings (q, k and v; gate and up), one GEMM for each sibling and one GEMM for all siblings, on one GPU.

    python -m bench.siblings [--shapes 8192x4096x2048+512+512 8192x4096x7168+7168] [--recipes bf16 fp8_delayed] [--json FILE]

A shape is tokens x in_features x out_features of each sibling, on one rank.

            operands                         one GEMM per sibling                      one GEMM
    fprop   x [M, K], w_i [N_i, K]           y_i with N_i columns                      y with all columns
    dgrad   dy_i [M, N_i], w_i [K, N_i]      added in fp32, then rounded to bf16       contraction over all N_i
    wgrad   dy_i [N_i, M], x [K, M]          dw_i with N_i rows                        dw with all rows

The single GEMM for all siblings is run in up to three ways:

    shared     siblings are concatenated before the cast, and share scales
    vectors    for recipes with one scale per tensor: codes are concatenated after the cast, and cuBLASLt reads a vector of
               scales, so that each sibling keeps its scale; not for dgrad
    sum        for dgrad: the kernel of dlp that adds the dgrads of siblings, without concatenation and with the scales of each
               sibling

Columns: microseconds of one GEMM per sibling (`separate`) and of one GEMM (`one`), medians of bursts on a busy device; `equal`,
the fraction of elements that are bitwise equal in both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import dlp
from bench.files import add_files, write_files
from dlp.kernels import gemms
from dlp.kernels.ops import rounded
from dlp.kernels.timing import device_ms
from dlp.quant.gemm import Gemm
from dlp.quant.quantizer import Origin, ScaleSlot
from dlp.quant.recipe import GEMMS, Recipe, names
from dlp.quant.siblings import as_one
from dlp.quant.tensor import QuantizedTensor
from launch.ranks.process_exit import refuse

SHAPES = ("8192x4096x2048+512+512", "8192x4096x7168+7168")
RECIPES = ("bf16", "fp8_delayed", "fp8_rowwise", "fp8_block")
Results = list[Tensor]


@dataclass(frozen=True)
class Line:
    """Result of one GEMM of siblings.

    gemm        fprop, dgrad or wgrad
    way         "shared", "vectors" or "sum"
    separate    microseconds of one GEMM per sibling
    one         microseconds of one GEMM in this way
    equal       fraction of elements that are bitwise equal in both results
    """

    shape: str
    recipe: str
    gemm: str
    way: str
    separate: float
    one: float
    equal: float


class Siblings:
    """Operands of the GEMMs of siblings in bf16, and functions that run the GEMMs.

    values    w (fprop) or dy (dgrad, wgrad) of each sibling
    shared    [x] for fprop and wgrad, where siblings read the same x; w of each sibling for dgrad
    """

    def __init__(self, recipe: Recipe, which: str, tokens: int, features: int, outs: Sequence[int]) -> None:
        self.recipe, self.which = recipe, which
        of_sibling, shared = {  # (rows, contraction); contraction 0: the out_features of the sibling
            "fprop": ([(out, features) for out in outs], (tokens, features)),
            "dgrad": ([(tokens, out) for out in outs], (features, 0)),
            "wgrad": ([(out, tokens) for out in outs], (features, tokens)),
        }[which]
        self.values = [matrix(*size, 1.0 + i) for i, size in enumerate(of_sibling)]
        self.shared = [matrix(shared[0], out, 1.0 / (1 + i)) for i, out in enumerate(outs)] if which == "dgrad" else [
            matrix(*shared, 1.0)
        ]  # fmt: skip

    def separate(self) -> Callable[[], Results]:
        recipe, which, options = self.recipe, self.which, getattr(self.recipe, self.which)
        if which == "fprop":
            a, bs = cast(recipe, which, 0, self.shared[0]), [cast(recipe, which, 1, w) for w in self.values]
            return lambda: [Gemm(which, b, torch.bfloat16, options=options)(a) for b in bs]
        rows = [cast(recipe, which, 0, dy) for dy in self.values]
        if which == "wgrad":
            gemm = Gemm(which, cast(recipe, which, 1, self.shared[0]), torch.bfloat16, options=options)
            return lambda: [gemm(a) for a in rows]
        columns = [cast(recipe, which, 1, w) for w in self.shared]

        def added() -> Results:
            total = None
            for a, b in zip(rows, columns, strict=True):
                total = Gemm(which, b, torch.float32, accumulate=total, options=options)(a)
            assert total is not None
            return [rounded(total, torch.bfloat16)]

        return added

    def as_one(self) -> Callable[[], Results]:
        """Cast the concatenated operands of siblings, and return a function that runs one GEMM on them (way "shared")."""
        recipe, which, options = self.recipe, self.which, getattr(self.recipe, self.which)
        if which == "fprop":
            a, b = cast(recipe, which, 0, self.shared[0]), cast(recipe, which, 1, torch.cat(self.values))
        elif which == "wgrad":
            a, b = cast(recipe, which, 0, torch.cat(self.values)), cast(recipe, which, 1, self.shared[0])
        else:
            a, b = (cast(recipe, which, i, torch.cat(each, 1)) for i, each in enumerate((self.values, self.shared)))
        gemm = Gemm(which, b, torch.bfloat16, options=options)
        return lambda: self.split(gemm(a))

    def by_vectors(self) -> Callable[[], Results] | None:
        """Cast each sibling, concatenate the codes, and return a function that runs one GEMM with a vector of scales (way
        "vectors"). None for dgrad, which contracts over siblings, and for recipes without a scale per tensor."""
        recipe, which = self.recipe, self.which
        if which == "dgrad" or {each.format.gemm_kind for each in recipe.operands(which)} != {"fp8_tensor"}:
            return None
        side = 1 if which == "fprop" else 0
        parts = [cast(recipe, which, side, each).parts for each in self.values]
        codes = torch.cat([each.view(torch.uint8) for each, _ in parts]).view(parts[0][0].dtype)
        scales = torch.cat([scale.expand(len(each)) for each, scale in parts]).contiguous()
        other_codes, other_scale = cast(recipe, which, 1 - side, self.shared[0]).parts
        ones = torch.ones(len(other_codes), device=codes.device)
        options = gemms.GemmLaunchOptions(fast_accumulation=getattr(recipe, which).fast_accumulation)
        left, right = ((other_codes, ones), (codes, other_scale * scales))[:: 1 if side else -1]
        given = gemms.Scales(left[1], right[1], gemms.ROWWISE, gemms.ROWWISE)
        return lambda: self.split(gemms.product_fp8(left[0], right[0], torch.bfloat16, given, options=options))

    def by_sum(self) -> Callable[[], Results] | None:
        """Return a function that runs the kernel that adds the dgrads of siblings (way "sum"). None for fprop and wgrad, and if
        there is no such kernel for the recipe."""
        if self.which != "dgrad":
            return None
        rows, columns = (
            [cast(self.recipe, "dgrad", i, each) for each in of] for i, of in enumerate((self.values, self.shared))
        )
        gemms_of = [Gemm("dgrad", b, torch.float32, options=self.recipe.dgrad) for b in columns]
        (a, *others), (gemm, *_) = as_one(rows, gemms_of, torch.bfloat16)
        return None if others else lambda: [gemm(a)]

    def split(self, result: Tensor) -> Results:
        if self.which == "dgrad":
            return [result]
        return list(result.split([len(each) for each in self.values], 1 if self.which == "fprop" else 0))


def matrix(rows: int, columns: int, size: float) -> Tensor:
    return (size * torch.randn(rows, columns, device="cuda")).bfloat16()


def cast(recipe: Recipe, which: str, side: int, x: Tensor) -> QuantizedTensor:
    quantizer: Any = recipe.operands(which)[side]
    # a delayed scale, as if the amax of earlier steps were 1.3 times the amax of x
    slot = ScaleSlot(448.0 / x.abs().amax().float() / 1.3, torch.zeros((), device="cuda"))
    at = Origin(0, 0, x.shape[0], x.shape[1], 0, 0, torch.zeros((), dtype=torch.int64, device="cuda"))
    made: QuantizedTensor = quantizer.cast(x, quantizer.observe(x), slot=slot, at=at)
    return made


def measure(text: str, name: str) -> Iterator[Line]:
    tokens, features, outs = text.split("x")
    sizes = [int(out) for out in outs.split("+")]
    for which in GEMMS:
        torch.manual_seed(0)
        siblings = Siblings(dlp.recipe(name), which, int(tokens), int(features), sizes)
        separate = siblings.separate()
        expected, microseconds = separate(), 1e3 * device_ms(separate)
        for way, made in (
            ("shared", siblings.as_one()),
            ("vectors", siblings.by_vectors()),
            ("sum", siblings.by_sum()),
        ):
            if made is None:
                continue
            try:
                found = made()
            except (RuntimeError, ValueError) as refused:
                print(
                    f"{text:24} {name:12} {which:6} {way:8} cannot run: {str(refused).splitlines()[0][:90]}", flush=True
                )
                continue
            same = [float((mine == theirs).float().mean()) for mine, theirs in zip(found, expected, strict=True)]
            yield Line(text, name, which, way, microseconds, 1e3 * device_ms(made), sum(same) / len(same))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.siblings", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="MxKxN+N")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=names())
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        refuse("bench.siblings times GEMMs of GPUs, and this host has no GPU that torch can use", code=2)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(f"{'shape':24} {'recipe':12} {'gemm':6} {'way':8} {'separate':>9} {'one':>8} {'ratio':>6} {'equal':>7}  us")
    lines = []
    for text in options.shapes:
        for name in options.recipes:
            for line in measure(text, name):
                lines.append(line)
                print(
                    f"{text:24} {name:12} {line.gemm:6} {line.way:8} {line.separate:9.1f} {line.one:8.1f} "
                    f"{line.one / line.separate:6.3f} {line.equal:7.4f}",
                    flush=True,
                )
    write_files(options, [asdict(line) for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
