"""All benchmarks of one GPU in one command: host time, quantizers, producers, GEMMs, linears and the step boundary.

    python -m bench [PART ...] [--shapes 8192x4096x4096] [--out FOLDER] [--quick]

Parts run one after the other; each part prints a table and writes FOLDER/PART.json and, if it has a plot,
FOLDER/PART.png. A part that fails does not stop the other parts: the last line names the failed parts, and the exit
code is the largest exit code of all parts.
`--shapes` applies to gemm and linear, in the form that `python -m bench.shapes CONFIG` prints; `--quick` runs one size of each
part. The commands of the parts:

    host        bench.host        host time of one small linear; runs first, while the device is still idle
    quantize    bench.quantize    TB/s of casts and amaxes, compared with a device copy
    producers   bench.producers   norms, SwiGLU and column sums, fused into casts and separate
    gemm        bench.gemm        TFLOP/s of each recipe's GEMMs, compared with torch.mm and torch._scaled_mm
    linear      bench.linear      forward + backward in each recipe, compared with nn.Linear and installed libraries
    boundary    bench.boundary    casts of all weights of a model at the step boundary, batched and one by one
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import boundary, gemm, host, linear, producers, quantize
from dlp.kernels import loader


class Part(NamedTuple):
    """A benchmark program.

    main      function that takes command-line arguments and returns an exit code
    draws     whether the program accepts --plot
    quick     arguments of the program under --quick, which select one size
    shapes    whether the program accepts --shapes
    """

    main: Callable[[Sequence[str]], int]
    draws: bool
    quick: tuple[str, ...]
    shapes: bool = False


SHAPE = ("--shapes", "8192x4096x14336")
PARTS = {
    "host": Part(host.main, False, ("--recipes", "fp8_current")),
    "quantize": Part(quantize.main, True, ("--sizes", "256", "--dtypes", "bfloat16")),
    "producers": Part(producers.main, True, ("--sizes", "256", "--only", "> fp8_current")),
    "gemm": Part(gemm.main, True, SHAPE, True),
    "linear": Part(linear.main, True, SHAPE, True),
    "boundary": Part(boundary.main, False, ("--recipes", "fp8_current", "--blocks", "1")),
}


def arguments_of(name: str, folder: Path, quick: bool, shapes: Sequence[str]) -> list[str]:
    """Return the command-line arguments of a part: its result files in `folder`, then `shapes` if the part takes shapes and
    some are given, else the arguments for one size if `quick`."""
    part = PARTS[name]
    files = ["--json", str(folder / f"{name}.json"), *(["--plot", str(folder / f"{name}.png")] if part.draws else [])]
    if part.shapes and shapes:
        return [*files, "--shapes", *shapes]
    return [*files, *(part.quick if quick else ())]


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a part, and return its exit code; 1 if the part raised an exception."""
    print(f"\n== {name}", flush=True)
    try:
        return PARTS[name].main(arguments)
    except Exception:
        traceback.print_exc()
        return 1


def shape(text: str) -> str:
    """Return the text after checking that it is a shape."""
    linear.shape_of(text)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument(
        "--shapes", type=shape, nargs="+", default=[], metavar="MxKxN", help="shapes for gemm and linear"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of results (runs/bench)")
    parser.add_argument("--quick", action="store_true", help="run one size of each part")
    known = parser.parse_args(arguments)
    if unknown := [name for name in known.parts if name not in PARTS]:
        parser.error(f"unknown part {', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    if known.shapes and not any(PARTS[name].shapes for name in known.parts):
        parser.error(
            f"--shapes: none of {', '.join(known.parts)} takes shapes; leave --shapes out, or add gemm or linear"
        )
    if code := loader.load_or_explain():
        return code
    known.out.mkdir(parents=True, exist_ok=True)
    codes = {name: run(name, arguments_of(name, known.out, known.quick, known.shapes)) for name in known.parts}
    failed = [f"{name} ({code})" for name, code in codes.items() if code]
    print(f"\nresults in {known.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return max(codes.values())


if __name__ == "__main__":
    sys.exit(main())
