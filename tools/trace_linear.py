"""Count the functions of dlp that a warm linear enters, so that the code of one linear stays short enough to read.

    python -m tools.trace_linear            print the table of figures
    python -m tools.trace_linear --write    also write the table into docs/architecture.md
    python -m tools.trace_linear --list     also print each entered function, by file

Two gloo ranks on this machine run with recipe fp8_current:

    forward, backward      a ColumnParallelLinear with sequence parallelism (COLUMN_SP), attached to an optimizer
    forward + backward     the sum of both
    step boundary          `dlp.end_step` of that layer
    FSDP forward           a Linear whose weight `dlp.fully_shard` shards over the two ranks
    ops forward            `ops.Sequential(ops.RMSNorm, ops.Linear)`, column-parallel with sequence parallelism

Each of these runs ten times, and the trace with the fewest calls counts, since the first runs make decisions that later runs
only look up. `sys.setprofile` reports the Python functions of package dlp. A comprehension counts as a part of its function.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dlp
from bench.ranks import start
from dlp import ops

PACKAGE = Path(dlp.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- tools.trace_linear -->", "<!-- end -->"
TOKENS, FEATURES, PASSES, WORLD = 256, 128, 10, 2
COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
Trace = dict[CodeType, int]  # how often each function was entered


class Figures(NamedTuple):
    """Counts of one trace.

    calls               function calls
    functions, files    distinct functions, and files that contain them
    classes             distinct classes whose methods were called
    lines               source lines of the distinct functions, without their docstrings
    """

    calls: int
    functions: int
    files: int
    classes: int
    lines: int


def figures(trace: Trace) -> Figures:
    """Compute the counts of a trace."""
    classes = {(code.co_filename, owner) for code in trace if (owner := class_of(code))}
    files = {code.co_filename for code in trace}
    return Figures(sum(trace.values()), len(trace), len(files), len(classes), sum(map(num_lines, trace)))


def class_of(code: CodeType) -> str:
    """Name of the class whose method `code` is; empty for a function outside of classes."""
    owner = code.co_qualname.rpartition(".")[0]
    return "" if owner.endswith("<locals>") else owner


def num_lines(code: CodeType) -> int:
    """Number of source lines of a function without its docstring, from the first, with decorators, to the last with code."""
    codes = [code, *(inner for inner in code.co_consts if isinstance(inner, CodeType))]
    last = max(line for each in codes for _, _, line in each.co_lines() if line)
    return last - code.co_firstlineno + 1 - num_doc_lines(code)


def num_doc_lines(code: CodeType) -> int:
    """Number of lines of the docstring of a function, which is the first constant of `code`; 0: no docstring."""
    flag = getattr(inspect, "CO_HAS_DOCSTRING", code.co_flags)  # Python 3.13 and newer
    first = code.co_consts[0] if code.co_consts and code.co_flags & flag else None
    return first.count("\n") + 1 if isinstance(first, str) else 0


@contextmanager
def traced(found: Trace) -> Iterator[None]:
    """Count in `found` the functions of dlp that this thread enters inside of the context."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in COMPREHENSIONS and Path(code.co_filename).is_relative_to(PACKAGE):
            found[code] = found.get(code, 0) + 1

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def trace_of(run: Callable[[], Any]) -> Trace:
    """Call `run`, and return the functions of dlp that it enters, with the number of calls."""
    found: Trace = {}
    with traced(found):
        run()
    return found


def traces() -> dict[str, Trace]:
    """Return the traces that the module docstring lists, by name. Both ranks of the default group call this function."""
    torch.manual_seed(0)
    mesh = dlp.build_mesh(tp=WORLD, dp_shard=1, device_type="cpu")
    options: dict[str, Any] = {"recipe": "fp8_current", "dtype": torch.bfloat16}
    layer = dlp.ColumnParallelLinear(FEATURES, FEATURES, tp=mesh["tp"], sequence_parallel=True, **options)
    linear = ops.Linear(
        FEATURES, FEATURES, bias=False, tensor_parallel_mode="column", tensor_parallel_group=mesh["tp"],
        sequence_parallel=True, **options,
    )  # fmt: skip
    sequence = ops.Sequential(ops.RMSNorm(FEATURES, dtype=torch.bfloat16), linear)
    sharded = torch.nn.Sequential(dlp.Linear(FEATURES, FEATURES, **options))
    dlp.fully_shard(sharded, mesh=dlp.build_mesh(dp_shard=WORLD, device_type="cpu"))

    found: dict[str, Trace] = {}
    for name, model in (("", torch.nn.Sequential(layer)), ("FSDP ", sharded), ("ops ", sequence)):
        dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
        called = layer if name == "" else model  # without the hooks of the model that contains the layer
        x = torch.randn(TOKENS // WORLD, FEATURES).bfloat16().requires_grad_()
        passes = [trace_step(model, called, x) for _ in range(PASSES)]
        forward, backward, boundary = (
            min(each, key=lambda trace: sum(trace.values())) for each in zip(*passes, strict=True)
        )
        found[f"{name}forward"] = forward
        if name == "":
            both = {code: forward.get(code, 0) + backward.get(code, 0) for code in forward | backward}
            found |= {"backward": backward, "forward + backward": both, "step boundary": boundary}
    return found


def trace_step(model: nn.Module, called: nn.Module, x: Tensor) -> tuple[Trace, Trace, Trace]:
    """Trace a forward, the backward and the step boundary. `called`: `model`, or the layer of `model` that is called with x."""
    ys: list[Tensor] = []
    forward = trace_of(lambda: ys.append(called(x)))
    backward = trace_of(lambda: ys[0].sum().backward())
    return forward, backward, trace_of(lambda: dlp.end_step(model))


def measured() -> dict[str, Figures]:
    """Return the counts of each trace by name."""
    return {name: figures(trace) for name, trace in traces().items()}


def table(rows: Mapping[str, Figures]) -> str:
    """Format the counts as a Markdown table."""
    lines = [f"| | {' | '.join(Figures._fields)} |", "|---" * (1 + len(Figures._fields)) + "|"]
    return "\n".join([*lines, *[f"| {name} | {' | '.join(map(str, each))} |" for name, each in rows.items()]])


def limits() -> dict[str, Figures]:
    """Read the counts from the table in docs/architecture.md."""
    rows = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].split("\n")[3:]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows if row]
    return {name: Figures(*map(int, numbers)) for name, *numbers in cells}


def write(text: str) -> None:
    """Put `text` between the markers in docs/architecture.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def listing(trace: Trace) -> Iterator[str]:
    """Yield a line for each file, with its entered functions, their numbers of source lines, and numbers of calls above 1."""
    by_file: dict[str, list[str]] = {}
    for code, count in trace.items():
        path = str(Path(code.co_filename).relative_to(PACKAGE.parent))
        by_file.setdefault(path, []).append(f"{code.co_qualname} ({num_lines(code)})" + f" x{count}" * (count > 1))
    for path, functions in sorted(by_file.items()):
        yield f"    {path:38} {', '.join(functions)}"


def run_rank(rank: int, ranks: int, options: argparse.Namespace) -> None:
    """Body of one of the two processes; rank 0 prints."""
    found = traces()
    if rank == 0:
        text = table({name: figures(trace) for name, trace in found.items()})
        print(text)
        for name, trace in found.items() if options.list else ():
            print(name, *listing(trace), sep="\n")
        if options.write:
            write(text)
    dist.barrier()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.trace_linear", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table into docs/architecture.md")
    parser.add_argument("--list", action="store_true", help="print the functions of every trace")
    options = parser.parse_args(arguments)
    start(run_rank, WORLD, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
