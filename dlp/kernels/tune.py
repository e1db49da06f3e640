"""Measure the fastest algorithm of cuBLASLt for each GEMM of a config, and store the choices.

    python -m dlp.kernels.tune CONFIG [--world N] [--section.key value ...]      arguments of `python -m bench.shapes`
    python -m dlp.kernels.tune FILE.json                                         output of `python -m bench.shapes ... --json`

Candidates are timed under continuous load, as in a training run. The choices are stored in the user's cache, in a file for
this model of GPU, by version of cuBLASLt and problem; later GEMMs of all processes use the choices. The recipe option
`tuned = false` ignores the choices.

The exit status is 2, with a message, if the config or a file cannot be used or a requirement of the kernels is missing, and 1
if the kernels do not compile. After a failure, the choices that were measured before stay stored.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlp.kernels import gemm_entries, gemms, loader
from dlp.kernels.registry import GemmLaunchOptions
from dlp.kernels.timing import device_ms, sustained_ms

BURST, BATCH, ROUNDS = 3, 8, 5  # calls per burst, calls per batch, number of measurements for a median
SETTLING = 0.1  # seconds of load before the first measurement
BETTER = 0.98  # a candidate is chosen only if it takes less than this share of the time of the first candidate


class Fastest(NamedTuple):
    """Measured times of the candidates for one problem."""

    problem: gemms.GemmProblem
    times_ms: list[float]

    @property
    def best(self) -> int:
        return self.times_ms.index(self.best_ms)

    @property
    def best_ms(self) -> float:
        return min(self.times_ms)

    @property
    def choice(self) -> int:
        return self.best if self.best_ms < BETTER * self.times_ms[0] else 0


def in_bursts(call: Callable[[], Tensor]) -> float:
    """Return the milliseconds of a call in bursts (`dlp.kernels.timing`)."""
    return device_ms(call, BURST, settling=0.0, rounds=ROUNDS)


def sustained(call: Callable[[], Tensor]) -> float:
    """Return the milliseconds of a call under continuous load, as in a training run; in bursts if the host is too slow."""
    found = sustained_ms(call, BATCH, settling=SETTLING, rounds=ROUNDS)
    return in_bursts(call) if found is None else found


def runs_cublaslt(call: Callable[[], Tensor]) -> bool:
    """Return whether a call runs a GEMM by cuBLASLt."""
    with _other_plans() as plans:
        call()
        return bool(plans)


def fastest(call: Callable[[], Tensor], timed: Callable[[Callable[[], Tensor]], float]) -> Fastest:
    """Time `call`, which runs one GEMM by cuBLASLt, with each candidate in turn; the time includes all work of the call.

    timed   function that returns the time of a call, such as `sustained`
    """
    with _other_plans() as plans:
        call()
        ((problem, device, tuned),) = plans
        plans[problem, device, tuned] = plan = gemms.new_plan(problem, device, gemms.CANDIDATES)
        timed(call)  # warm-up, so that the first candidate is measured like the others
        times = []
        for candidate in range(plan.candidates):
            plan.choose(candidate)
            times.append(timed(call))
    return Fastest(problem, times)


@contextmanager
def _other_plans() -> Iterator[dict[tuple[gemms.GemmProblem, int, bool], Any]]:
    """Context manager with an empty cache of plans; the previous plans are restored afterwards."""
    plans = gemms.plans()
    before = dict(plans)
    plans.clear()
    try:
        yield plans
    finally:
        plans.clear()
        plans.update(before)


@contextmanager
def by_candidates(chosen: Mapping[gemms.GemmProblem, int]) -> Iterator[None]:
    """Context manager in which GEMMs run with the given candidates on the current device; `chosen`: problem -> index of the
    candidate. Raises RuntimeError at the end if a GEMM of another problem has run."""
    device = torch.cuda.current_device()
    with _other_plans() as plans:
        for problem, candidate in chosen.items():
            plans[problem, device, True] = plan = gemms.new_plan(problem, device, gemms.CANDIDATES)
            plan.choose(candidate)
        yield
        if others := [str(problem) for problem, *_ in plans if problem not in chosen]:
            raise RuntimeError(f"no candidate was chosen for {', '.join(others)}, which ran inside the context")


# GEMMs of a config, as calls to be timed

READ = ("gemm", "kernel", "rows", "cols", "contraction", "a_dtype", "b_dtype", "out_dtype", "a_block", "b_block",
        "a_flipped", "b_flipped", "fast_accumulation", "accumulate", "alpha")  # fmt: skip
FROM_SHAPES = "write one with python -m bench.shapes CONFIG --json"
MODES = {(0, 0): gemms.TENSOR, (1, 0): gemms.ROWWISE, (1, 128): gemms.BLOCK_1D, (128, 128): gemms.BLOCK_2D}
FP8 = ("float8_e4m3fn", "float8_e5m2")


def _operand(problem: Mapping[str, Any], side: str, lines: int) -> tuple[Tensor, Tensor | None, int]:
    """Return operand `side` ("a" or "b") of a problem: random values [lines, contraction], scales of 1 (None for an operand
    without scales), and the scale mode."""
    along, name = problem["contraction"], problem[f"{side}_dtype"]
    shape = (along, lines) if problem[f"{side}_flipped"] else (lines, along)
    x = torch.randn(shape, device="cuda").clamp(-4, 4).to(getattr(torch, name))
    matrix = x.t() if problem[f"{side}_flipped"] else x
    if name not in FP8:
        return matrix, None, gemms.NONE
    mode = MODES[tuple(problem[f"{side}_block"])]
    across = -(-along // 128)
    sizes = {gemms.TENSOR: (), gemms.ROWWISE: (lines,), gemms.BLOCK_1D: (lines, across),
             gemms.BLOCK_2D: (-(-lines // 128), across)}  # fmt: skip
    scales = torch.ones(sizes[mode], device="cuda")
    return matrix, gemms.block_scales(scales, mode == gemms.BLOCK_2D) if scales.dim() == 2 else scales, mode


def _block_scaled(problem: Mapping[str, Any], side: str, lines: int) -> tuple[Tensor, Tensor, int]:
    """Return operand `side` ("a" or "b") of a block-scaled GEMM: random codes, scales of 1 in tiles, and the scale mode."""
    fp8, along = problem[f"{side}_dtype"] in FP8, problem["contraction"]
    mode, block, one = (gemms.MX_BLOCKS, 32, 0x7F) if fp8 else (gemms.NVFP4_BLOCKS, 16, 0x38)
    codes = torch.randint(0, 0x70, (lines, along if fp8 else along // 2), dtype=torch.uint8, device="cuda")
    tiles = -(-lines // 128) * -(-along // (4 * block))
    scales = torch.full((tiles * 512,), one, dtype=torch.uint8, device="cuda")
    return codes.view(getattr(torch, problem[f"{side}_dtype"]) if fp8 else gemms.FP4), scales, mode


def by_cublaslt(problem: Mapping[str, Any]) -> bool:
    """Return whether cuBLASLt runs this GEMM."""
    return bool(multiplied(problem))


def multiplied(problem: Mapping[str, Any]) -> str:
    """Return the kind of operands that cuBLASLt multiplies in this GEMM (`cublaslt` in the kernel table); "" without
    cuBLASLt."""
    entry = gemm_entries.entry_named(problem["kernel"])
    return "" if entry is None else entry.cublaslt


def _inside(problem: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the problem that cuBLASLt runs. If separate kernels apply vectors of scales to the result, cuBLASLt computes fp32
    sums with one scale per operand. If a separate kernel rounds the result of fp32 operands, cuBLASLt computes fp32."""
    if multiplied(problem) == "sums":
        return {**problem, "a_block": [0, 0], "b_block": [0, 0], "out_dtype": "float32", "accumulate": False}
    if problem["a_dtype"] == "float32" != problem["out_dtype"]:
        return {**problem, "out_dtype": "float32", "accumulate": False}
    return problem


def problem_call(problem: Mapping[str, Any]) -> Callable[[], Tensor]:
    """Return a call that runs one GEMM of `python -m bench.shapes --json` on random operands; `by_cublaslt` must hold."""
    problem = _inside(problem)
    rows, cols, out_dtype = problem["rows"], problem["cols"], getattr(torch, problem["out_dtype"])
    make = _block_scaled if multiplied(problem) == "tiles" else _operand
    (a, a_scale, a_mode), (b, b_scale, b_mode) = make(problem, "a", rows), make(problem, "b", cols)
    into = torch.zeros(rows, cols, dtype=out_dtype, device="cuda") if problem["accumulate"] else None
    options = GemmLaunchOptions(problem["fast_accumulation"])
    alpha = torch.ones((), device="cuda") if problem["alpha"] else None
    if a_scale is None or b_scale is None:
        return lambda: gemms.product(a, b, out_dtype, accumulate=into, alpha=alpha, options=options)
    scales = gemms.Scales(a_scale, b_scale, a_mode, b_mode)
    if make is _block_scaled:
        return lambda: gemms.product_blocks(a, b, out_dtype, scales, accumulate=into, alpha=alpha, options=options)
    return lambda: gemms.product_fp8(a, b, out_dtype, scales, accumulate=into, options=options)


def problems_of(arguments: Sequence[str], world: int | None) -> list[dict[str, Any]]:
    """Return the GEMMs of a config, which `python -m bench.shapes` computes, or the GEMMs in a JSON file.

    Args:
        arguments: the config with options, or a file.
        world: number of ranks; None: number of this machine's GPUs.

    Raises:
        ValueError: for a file that is not a list of GEMMs.
        SystemExit: for a config that `bench.shapes` refuses, which prints the reason.
    """
    if arguments and arguments[0].endswith(".json"):
        return _of_file(Path(arguments[0]))
    ranks = str(torch.cuda.device_count() if world is None else world)
    command = [sys.executable, "-m", "bench.shapes", *arguments, "--world", ranks, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(2)
    return json.loads(done.stdout)


def _of_file(file: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as JSON ({error}); {FROM_SHAPES}") from None
    if not isinstance(found, list) or not all(isinstance(each, dict) and each.keys() >= set(READ) for each in found):
        raise ValueError(f"{file}: is not a list of GEMMs with the keys {', '.join(READ)}; {FROM_SHAPES}")
    return found


def _options(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    """Return the arguments of `bench.shapes`, and the number of ranks if given. Exits 0 after --help."""
    parser = argparse.ArgumentParser(
        prog="python -m dlp.kernels.tune", usage="%(prog)s {CONFIG [--section.key value ...] | FILE.json} [--world N]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--world", type=int, help="number of ranks of the run [number of GPUs of this machine]")
    known, rest = parser.parse_known_args(arguments)
    return rest, known.world


def main(arguments: Sequence[str]) -> int:
    rest, world = _options(arguments)
    if code := loader.load_or_explain():
        return code
    device = torch.cuda.current_device()
    try:
        gemms.choices(device)  # check that the file can be read
        problems = [each for each in problems_of(rest, world) if by_cublaslt(each)]
        gemms.save_choices(device, {})  # check that the file can be written
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    measure(problems, device)
    print(f"{len(problems)} choices stored in {gemms.choice_file(device)}")
    return 0


def measure(problems: Sequence[Mapping[str, Any]], device: int) -> None:
    """Time the candidates of each problem, print one line per problem, and store each choice at once."""
    print(
        f"{torch.cuda.get_device_name()}: microseconds of the first candidate and of the fastest, index of the fastest"
    )
    for problem in problems:
        found = fastest(problem_call(problem), sustained)
        gemms.save_choices(device, {gemms.key_of(found.problem): found.choice})
        print(f"{found.times_ms[0] * 1e3:9.1f} {found.times_ms[found.choice] * 1e3:9.1f} {found.choice:3}  "
              f"{problem['gemm']} {found.problem}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
