"""Run small cases of the GPU tests under the tools of compute-sanitizer: memcheck, racecheck and initcheck.

    python -m tools.sanitize [TOOL ...] [--cases 8]

Each tool is first tried on this device: it must report nothing for a correct kernel, and an error for a faulty kernel
(tools/sanitize_probe.cu). A tool that fails this trial is reported and skipped, and the exit code is 3, unless another tool
finds something. initcheck takes the longest, since it must watch torch's kernels as well; with pytest-xdist,
`PYTEST_ADDOPTS="-n 8"` runs cases in parallel.

Exit codes:

    0   every tool works and found nothing           2   nvcc, compute-sanitizer or a GPU is missing
    1   a tool found something, or a test failed     3   a tool does not work on this device, or no test ran
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
# Check only kernels in the namespace of dlp (a substring of the mangled name), since checking torch's kernels takes time
OURS = ("--kernel-name", "kernel_substring=3dlp")
# initcheck must see all writes, including writes of torch's kernels
TOOLS = {"memcheck": OURS, "racecheck": OURS, "initcheck": ()}
CLOSING = re.compile(r"(\b\d+ (passed|failed|skipped|deselected|errors?)|no tests ran)\b.* in [\d.]+s\b")
FOUND = 99  # exit code of compute-sanitizer for a finding; without findings it returns the exit code of the program
# Tests that do not run under the tools: tests of GEMMs, because cuBLASLt's kernels are not part of dlp, take many minutes, and
# write memory in ways that initcheck does not see; tests of CUDA graphs, which cannot be captured under a tool; and tests with
# too large tensors (TOO_LARGE, a part of their names).
MULTIPLY = tuple(
    f"tests/gpu/test_{name}.py"
    for name in ("flagged_steps", "gemm_sm90", "gemm_sum_sm90", "gemms", "golden", "graph", "programs", "quantizers")
)
TOO_LARGE = "2_to_the_31"


def missing() -> str | None:
    """Return a message about a missing program or device; None if nothing is missing."""
    for program in ("nvcc", "compute-sanitizer"):
        if find_program(program) is None:
            return f"make sanitize needs {program}, which is not on PATH: install the CUDA toolkit"
    if not torch.cuda.is_available():
        return f"make sanitize needs a CUDA device; torch {torch.__version__} sees none"
    return None


class Done(NamedTuple):
    """Exit code and output of a command."""

    code: int
    output: str


def under(tool: str, command: Sequence[str], *, shown: bool) -> Done:
    """Run a command under a tool. Each tensor of torch gets a separate allocation, so that tools find accesses beyond its end.
    `shown`: print the output while the command runs."""
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
    """Try a tool on the correct and the faulty kernel of `probe`. Returns the reason why it cannot be used on this device; None
    if it works."""
    clean, bad = (under(tool, [probe, which], shown=False) for which in ("clean", tool))
    if clean.code or findings(clean.output):
        return f"it reports an error for a correct kernel, with exit code {clean.code}:\n{clean.output}"
    return None if bad.code == FOUND else f"it does not find the error of a faulty kernel:\n{bad.output}"


def small_cases(cases: int) -> list[str]:
    """Return the pytest command that runs a selection of the cases of each GPU test of dlp's kernels: at least `cases` cases,
    in which each parameter takes every value."""
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
    """Return the exit code of this program for a pytest run under a tool, and a description of the result. Findings count even
    if they are warnings, for which a tool returns 0. The exit code is 3 if no test passed or failed."""
    if found := findings(done.output):
        return 1, "; ".join(found)
    if done.code != FOUND and re.search(r"\b[1-9]\d* (passed|failed)", last_line(done.output)) is None:
        return 3, "no result"
    return (1, f"exit code {done.code}") if done.code else (0, "clean")


def findings(output: str) -> list[str]:
    """Return the summary lines of a tool that count errors or warnings."""
    summaries = re.findall(r"^=+ (\w+ SUMMARY: .*)$", output, re.MULTILINE)
    return [summary for summary in summaries if re.search(r"\b[1-9]", summary)]


def last_line(output: str) -> str:
    """Return the last line of pytest, which counts passed and failed tests."""
    lines = [line for line in output.splitlines() if CLOSING.search(line)]
    return lines[-1].strip("= ") if lines else "no summary by pytest"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tools", nargs="*", metavar="TOOL", default=list(TOOLS), help=f"some of {', '.join(TOOLS)}; default all"
    )
    parser.add_argument("--cases", type=int, default=8, help="minimum number of cases of each test (default 8)")
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
