"""One linear, forward and backward, in each recipe, compared with bf16 `nn.Linear` and other libraries on one GPU.

    python -m bench.linear [--shapes 8192x4096x14336] [--recipes fp8_current] [--json FILE] [--plot FILE.png]

An iteration is forward, backward with gradients of x and w, and the step boundary, which casts the weights; there is no
optimizer update. Inputs rotate over more than four times the L2 cache.

    device     device time: eight iterations at a time are queued behind a kernel that keeps the device busy
    fwd, bwd   device time of forward and of backward
    sustained  device time without pauses between iterations; "-" if the host cannot keep the device busy. Clocks are lower
               under sustained load (`dlp.kernels.timing`)
    host       wall time of an iteration that starts when the device is idle, so that host time counts
    gemms      the three GEMMs alone, with the fastest of cuBLASLt's candidates
    floor      gemms + 1.15 x the minimum bytes of casts / the bandwidth of a copy

Each time is followed by its ratio to nn.Linear's time. GEMMs run with the first algorithm of cuBLASLt's heuristic, the default
for users; `RECIPE:tuned` runs the algorithm that `python -m dlp.kernels.tune` chooses for the shape. `RECIPE:fast` accumulates
in the tensor core only (option `accumulation`) in all three GEMMs; targets apply to the recipe's default accumulation.

Device time is judged in up to three ways: its ratio to nn.Linear against a target, `ok (0.87)` or `MISSED (0.87)` at the end of
the row; against the floor, `floor ok` or `above floor by 1.0 %`; and, after all rows of a shape, against the fastest other
library with the same quantization, `0.950 of torchao`. A failed measurement makes the exit code 1, a missed limit does not.

Shapes are tokens x in_features x out_features. Each shape runs in a separate process (`bench.linear_shape`) with all
subjects, so that torch.compile, which torchao needs, sees one shape and does not make it dynamic. `bench.host`
measures host time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.files import add_files, write_files
from bench.linear_subjects import ALL_FAST, ALL_TUNED, BASE, PEERS_OF, RECIPES, SHAPES, Shape, installed_peers, untuned
from dlp.kernels import loader

TARGETS = {  # limits of the device time relative to nn.Linear's, for each of SHAPES
    "fp8_current": (0.87, 0.60, 0.55, 0.585, 0.54),
    "fp8_delayed": (0.82, 0.58, 0.53, 0.58, 0.52),
    "fp8_block": (0.96, 0.74, 0.69, 0.69, 0.675),
    "mxfp8": (1.35, 1.25, 1.20, 1.20, 1.20),
    "nvfp4": (1.35, 1.25, 1.20, 1.20, 1.20),
}
SUBJECT = "{:16} {:6} {:6} {:6}"


@dataclass(frozen=True)
class Times:
    """Times of an iteration in milliseconds, or relative to nn.Linear. The module docstring explains the names. `sustained` is
    None if the host cannot keep the device busy."""

    device: float
    fwd: float
    bwd: float
    sustained: float | None
    host: float

    def shares(self, base: Times) -> Times:
        sustained = self.sustained / base.sustained if self.sustained and base.sustained else None
        return Times(
            self.device / base.device, self.fwd / base.fwd, self.bwd / base.bwd, sustained, self.host / base.host
        )


@dataclass(frozen=True)
class Line:
    """One line of the table.

    ms, shares       milliseconds, and times relative to nn.Linear
    gemms, floor     milliseconds of the GEMMs alone, and of the floor; 0 for other libraries
    tflops           TFLOP/s of the three GEMMs in `ms.device`
    target           limit of `shares.device`; None without a target
    of_floor         device time relative to the floor; None for nn.Linear and other libraries
    peer, of_peer    the fastest library with the same quantization, and the device time relative to that library's; None if
                     no such library was measured
    """

    recipe: str
    tokens: int
    k: int
    n: int
    ms: Times
    shares: Times
    gemms: float
    floor: float
    tflops: float
    target: float | None
    of_floor: float | None = None
    peer: str | None = None
    of_peer: float | None = None

    def verdicts(self) -> dict[str, bool]:
        """Return whether the line keeps each limit that applies: "target", "floor", "peer"."""
        judged = {
            "target": (self.shares.device, self.target),
            "floor": (self.of_floor, 1.0),
            "peer": (self.of_peer, 1.0),
        }
        return {name: ratio <= most for name, (ratio, most) in judged.items() if ratio is not None and most is not None}


@dataclass(frozen=True)
class Failure:
    """Subject that could not be measured at a shape, and the reason `why`."""

    recipe: str
    tokens: int
    k: int
    n: int
    why: str


def shape_of(text: str) -> Shape:
    tokens, k, n = map(int, text.split("x"))
    return tokens, k, n


def target_of(recipe: str, shape: Shape) -> float | None:
    own = untuned(recipe)
    return TARGETS[own][SHAPES.index(shape)] if own in TARGETS and shape in SHAPES else None


def show(line: Line | Failure) -> None:
    subject = SUBJECT.format(line.recipe, line.tokens, line.k, line.n)
    if isinstance(line, Failure):
        print(f"{subject} FAILED: {line.why}", flush=True)
        return
    print(
        subject, *_times(line), f"{line.gemms:8.3f} {line.floor:8.3f} {line.tflops:7.0f}{_verdicts(line)}", flush=True
    )


def _verdicts(line: Line) -> str:
    """Describe the results for target and floor, for the end of a row."""
    met, said = line.verdicts(), ""
    if line.target is not None:
        said += f"  {'ok' if met['target'] else 'MISSED'} ({line.target})"
    if line.of_floor is not None:
        said += "  floor ok" if met["floor"] else f"  above floor by {100 * (line.of_floor - 1):.1f} %"
    return said


def beside_peers(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of one shape with `peer` and `of_peer` filled in."""
    times = {line.recipe: line.ms.device for line in lines}
    return [_beside(line, times) for line in lines]


def _beside(line: Line, times: Mapping[str, float]) -> Line:
    peers = [name for name in PEERS_OF.get(untuned(line.recipe), ()) if name in times]
    if not peers:
        return line
    peer = min(peers, key=times.__getitem__)
    return replace(line, peer=peer, of_peer=line.ms.device / times[peer])


def show_peer(line: Line) -> None:
    """Print the comparison with a peer in a separate row, since peers are measured last."""
    if line.of_peer is not None:
        met = "ok" if line.verdicts()["peer"] else "MISSED"
        print(
            f"{SUBJECT.format(line.recipe, line.tokens, line.k, line.n)} {line.of_peer:.3f} of {line.peer}  {met}",
            flush=True,
        )


def head() -> str:
    """Return the row with the names of the columns."""
    names = (f"{field.name:>9} {'share':>6}" for field in fields(Times))
    return " ".join(
        [f"{'recipe':16} {'tokens':>6} {'in':>6} {'out':>6}", *names, f"{'gemms':>8} {'floor':>8} {'TFLOP/s':>7}"]
    )


def _times(line: Line) -> list[str]:
    pairs = zip(astuple(line.ms), astuple(line.shares), strict=True)
    return [f"{_number(ms):>9} {_number(share):>6}" for ms, share in pairs]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def command_of(shape: str, options: argparse.Namespace, file: Path) -> list[str]:
    """Return the command of a process that waits for a line on stdin, then measures a shape and writes results to `file`."""
    command = [sys.executable, "-m", "bench.linear_shape", shape, "--wait", "--json", str(file)]
    return [*command, *(["--where"] if options.where else []), "--recipes", *options.recipes]


class Apart:
    """Separate process that measures all subjects of one shape.

    The constructor starts the process, which imports its modules and waits, since imports take long; `results` lets it
    measure."""

    def __init__(self, text: str, options: argparse.Namespace, folder: Path) -> None:
        self._shape, self._recipes = shape_of(text), (BASE, *options.recipes, *installed_peers())
        self._file = folder / f"{text}.json"
        self._process = subprocess.Popen(
            command_of(text, options, self._file), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )  # fmt: skip

    def results(self) -> tuple[list[Line], list[Failure]]:
        """Let the process measure, and return its results; its output is printed meanwhile. If the process writes no results,
        every subject fails, and the reason is the exit code and the last line on stderr."""
        ended = self._finish()
        if self._file.exists():
            found = json.loads(self._file.read_text())
            return [_line(line) for line in found["lines"]], [Failure(**failure) for failure in found["failures"]]
        failures = [Failure(recipe, *self._shape, ended) for recipe in self._recipes]
        for failure in failures:
            show(failure)
        return [], failures

    def _finish(self) -> str:
        """Let the process measure, and wait for its end. Returns a message with its exit code and the last line on stderr."""
        last, process = "", self._process
        assert process.stdin is not None and process.stderr is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # the process may have ended
            process.stdin.write("go\n")
        with process:
            for said in process.stderr:
                sys.stderr.write(said)
                last = said.strip() or last
        return f"the process ended with {process.returncode}: {last}"


def written(lines: Sequence[Line], failures: Sequence[Failure]) -> dict[str, Any]:
    """Convert lines and failures to a JSON object, with the verdicts of each line."""
    return {
        "lines": [asdict(line) | {"verdicts": line.verdicts()} for line in lines],
        "failures": [asdict(failure) for failure in failures],
    }


def _line(found: dict[str, Any]) -> Line:
    """Read a line that `written` converted."""
    kept = {field.name: found[field.name] for field in fields(Line)}
    return Line(**kept | {name: Times(**kept[name]) for name in ("ms", "shares")})


def measure_apart(
    texts: Sequence[str], options: argparse.Namespace, folder: Path
) -> Iterator[tuple[list[Line], list[Failure]]]:
    """Yield the results of each shape; the process of the next shape starts while a shape is measured."""
    following = Apart(texts[0], options, folder)
    for text in (*texts[1:], None):
        current = following
        if text is not None:
            following = Apart(text, options, folder)
        yield current.results()


def plot(lines: Sequence[Line], file: Path) -> None:
    """Plot device time relative to nn.Linear's, a group of bars for each shape."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys((line.tokens, line.k, line.n) for line in lines))
    recipes = list(dict.fromkeys(line.recipe for line in lines))
    figure = Figure(figsize=(2.4 * len(shapes) + 3, 4.5))
    axis = figure.subplots()
    for i, recipe in enumerate(recipes):
        shown = {(line.tokens, line.k, line.n): line.shares.device for line in lines if line.recipe == recipe}
        at = [j + (i - len(recipes) / 2) * 0.8 / len(recipes) for j, shape in enumerate(shapes) if shape in shown]
        axis.bar(at, list(shown.values()), width=0.75 / len(recipes), label=recipe, align="edge",
                 color=colormaps["tab20"](i % 20))  # fmt: skip
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(shapes)), [f"{m} x {k}\n-> {n}" for m, k, n in shapes])
    axis.set_ylabel(f"device time / {BASE}")
    axis.set_title(f"One linear, forward + backward, {torch.cuda.get_device_name()}")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.linear", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES],
                        help="tokens x in x out, as 8192x4096x4096")  # fmt: skip
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES, *ALL_FAST, *ALL_TUNED])
    parser.add_argument("--where", action="store_true", help="list the kernels of an iteration")
    add_files(parser)
    options = parser.parse_args(arguments)
    if code := loader.load_or_explain():
        return code
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"peers installed: {', '.join(installed_peers()) or 'none'}")
    print("\n" + head(), flush=True)
    lines: list[Line] = []
    failures: list[Failure] = []
    with tempfile.TemporaryDirectory() as folder:
        for found, failed in measure_apart(options.shapes, options, Path(folder)):
            lines, failures = lines + found, failures + failed
    write_files(options, written(lines, failures), partial(plot, lines))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
