"""Small cases of the GPU tests under compute-sanitizer: memcheck, racecheck and initcheck.

    python -m tools.sanitize [TOOL ...] [--cases 8]

A tool must first show on this device that it works: it reports nothing for a correct kernel, and an error for a faulty kernel
(tools/sanitize_probe.cu). A tool that does not is named and skipped, and the exit code is 3.

memcheck and racecheck take two minutes, initcheck, which must watch torch's kernels too, ten; with pytest-xdist installed,
`PYTEST_ADDOPTS="-n 8"` runs cases side by side, and initcheck takes a minute and a half.

    0   every tool works and found nothing           2   nvcc, compute-sanitizer or a GPU is missing
    1   a tool found something, or a test failed     3   a tool does not work on this device, or no test ran: nothing is known
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlp.kernels.loader import find_program

ROOT = Path(__file__).parent.parent
PROBE = ROOT / "tools" / "sanitize_probe.cu"
# Substring of the mangled namespace of dlp's kernels; checking torch's kernels would only take time
OURS = ("--kernel-name", "kernel_substring=3dlp")
# initcheck must see all writes, including writes of torch's kernels
TOOLS = {"memcheck": OURS, "racecheck": OURS, "initcheck": ()}
CLOSING = re.compile(r"(\b\d+ (passed|failed|skipped|deselected|errors?)|no tests ran)\b.* in [\d.]+s\b")
FOUND = 99  # exit code of the sanitizer for a finding; exit codes of the program are passed on
# Tests that are left out. Tests of GEMMs: cuBLASLt's kernels are not part of dlp (their stores are invisible to
# initcheck, and tools take many minutes for them). Tests of graphs: graphs cannot be captured under a tool. And tests
# that are too large for a tool.
MULTIPLY = tuple(
    f"tests/gpu/test_{name}.py"
    for name in ("flagged_steps", "gemm_sm90", "gemm_sum_sm90", "gemms", "golden", "graph", "programs", "quantizers")
)
TOO_LARGE = "2_to_the_31"


def missing() -> str | None:
    """A sentence about a missing program or device; "" if nothing is missing."""
    for program in ("nvcc", "compute-sanitizer"):
        if find_program(program) is None:
            return f"make sanitize needs {program}, which is not on PATH: it is part of the CUDA toolkit"
    if not torch.cuda.is_available():
        return f"make sanitize needs a CUDA device; torch {torch.__version__} sees none"
    return None


class Done(NamedTuple):
    """Exit code and output of a command."""

    code: int
    output: str


def under(tool: str, command: Sequence[str], *, shown: bool) -> Done:
    """Run a command under a tool, with a separate allocation for each tensor of torch. `shown`: print the output at
    once."""
    sanitizer = str(find_program("compute-sanitizer"))
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all", *TOOLS[tool]]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lines = []
    with subprocess.Popen([sanitizer, *options, *command], cwd=ROOT, env=environment, **pipes) as running:
        for line in running.stdout or ():
            lines.append(line)
            if shown:
                print(line, end="", flush=True)
    return Done(running.returncode, "".join(lines))


def obstacle(tool: str, probe: str) -> str | None:
    """The reason why this tool cannot be used here; None: it works."""
    clean, bad = (under(tool, [probe, which], shown=False) for which in ("clean", tool))
    if clean.code or findings(clean.output):
        return f"it fails on a clean kernel, with exit code {clean.code}:\n{clean.output}"
    return None if bad.code == FOUND else f"it does not find the defect of a bad kernel:\n{bad.output}"


def small_cases(cases: int) -> list[str]:
    """Command of pytest that runs at least this number of cases of each GPU test of dlp's kernels, and every value of
    its parameters."""
    ignored = [*(f"--ignore={file}" for file in MULTIPLY), "-k", f"not {TOO_LARGE}"]
    return [sys.executable, *f"-m pytest tests/gpu -q -p no:cacheprovider --cases {cases}".split(), *ignored]


def check(tool: str, probe: str, cases: int) -> int:
    """Run one tool, print its findings, and return the exit code."""
    why = obstacle(tool, probe)
    if why is not None:
        print(f"{tool}: does not work on {torch.cuda.get_device_name()}: {why}", file=sys.stderr)
        return 3
    done = under(tool, small_cases(cases), shown=True)
    code, found = verdict(done)
    print(f"{tool}: {found}, {last_line(done.output)}", flush=True)
    return code


def verdict(done: Done) -> tuple[int, str]:
    """Exit code of a run of pytest under a tool, and the findings. Some findings are warnings, for which a tool may have no
    exit code; a run in which no test ran has no findings to report."""
    if found := findings(done.output):
        return 1, "; ".join(found)
    if done.code != FOUND and re.search(r"\b[1-9]\d* (passed|failed)", last_line(done.output)) is None:
        return 3, "nothing is known"
    return (1, f"exit code {done.code}") if done.code else (0, "clean")


def findings(output: str) -> list[str]:
    """Summaries of a tool with nonzero counts, including warnings."""
    summaries = re.findall(r"^=+ (\w+ SUMMARY: .*)$", output, re.MULTILINE)
    return [summary for summary in summaries if re.search(r"\b[1-9]", summary)]


def last_line(output: str) -> str:
    """Closing line of pytest."""
    lines = [line for line in output.splitlines() if CLOSING.search(line)]
    return lines[-1].strip("= ") if lines else "pytest said nothing"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tools", nargs="*", metavar="TOOL", default=list(TOOLS), help=f"some of {', '.join(TOOLS)}; default all"
    )
    parser.add_argument("--cases", type=int, default=8, help="how many cases of each test at least (default 8)")
    known = parser.parse_args(arguments)
    if unknown := set(known.tools) - set(TOOLS):
        parser.error(f"unknown tool {', '.join(sorted(unknown))}: the tools are {', '.join(TOOLS)}")
    if (sentence := missing()) is not None:
        print(sentence, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        probe = f"{folder}/probe"
        subprocess.run([str(find_program("nvcc")), "-arch=native", "-lineinfo", "-o", probe, str(PROBE)], check=True)
        codes = [check(tool, probe, known.cases) for tool in known.tools]
    return min(filter(None, codes), default=0)  # a finding of one tool outranks a tool that does not work


if __name__ == "__main__":
    sys.exit(main())
