"""Run random training programs on a mesh and on one rank, and compare the results tensor by tensor: results must be bitwise
equal in invariant mode, and otherwise agree within error bounds.

    python -m bench.fuzz [--programs 500] [--first 0] [--ranks 2 4] [--out FILE]
    python -m bench.fuzz --only SEED                               one program, with the report

Program number s is drawn from seed s (`bench.fuzz_programs`). The result of a program is one of

    equal      all tensors are bitwise equal
    bounded    all differences are within the bounds, for programs without invariant mode
    refused    dlp raised a ValueError that says what to change
    defect     a tensor differs (without invariant mode: beyond the bounds), another exception was raised, or the ranks
               timed out

Each result is a line of `--out`; an interrupted command continues with the programs without a line. The exit code is 1 if there
are defects.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.fuzz_programs import program
from bench.ranks import start
from dlp.comm.mesh import AXES
from dlp.proof import run
from dlp.proof.cases import MeshCase, in_equal_pieces
from dlp.proof.report import Report

STEPS = 2
PATIENCE = timedelta(seconds=90)
REFUSED = (
    "invariant = true",
    "expected",
    "must be",
    "use ",
    "cannot",
    "does not divide",
    "set ",
    "needs",
    "multiple of",
)


@functools.cache
def _mesh(sizes: tuple[int, ...], device: str) -> DeviceMesh:
    return init_device_mesh(device, sizes, mesh_dim_names=("copies", *AXES))[AXES]


def cached_mesh(case: MeshCase, device: str) -> DeviceMesh:
    """Replacement for `run.mesh_of` that builds the mesh of each shape once, and returns the same mesh in later calls."""
    return _mesh((dist.get_world_size() // case.ranks, case.dp_replicate, case.dp_shard, case.tp), device)


def report_of(seed: int, ranks: int) -> Report:
    """Run the program of a seed, and return the report; all ranks call it."""
    drawn = program(seed, ranks)
    cases = [MeshCase.parse(drawn.mesh)]
    cases = in_equal_pieces(cases) if drawn.exact else cases
    pieces = cases[0].pieces if drawn.exact else 1
    given = run.Program(drawn.build, drawn.batch, drawn.loss, STEPS, drawn.exact, "mean", "cpu", None, pieces)
    with patch.object(run, "mesh_of", cached_mesh):
        return run.prove_here(given, cases)


def verdict(report: Report) -> tuple[str, str]:
    """Return the result of a program (refused, defect, equal or bounded), and a message about it."""
    (mesh,) = report.meshes
    if mesh.error:
        refused = mesh.error.startswith("ValueError") and any(word in mesh.error for word in REFUSED)
        return ("refused" if refused else "defect"), mesh.error
    if mesh.findings:
        return "defect", str(report)
    return ("equal" if report.exact else "bounded"), f"{mesh.compared} tensors, {mesh.equal} with equal bits"


def judged(seed: int, ranks: int) -> tuple[str, str]:
    try:
        return verdict(report_of(seed, ranks))
    except ValueError as error:  # raised by the reference run on one rank, before the run on the mesh
        return "refused", f"ValueError: {error}"
    except Exception:
        return "defect", traceback.format_exc()


def add_line(out: Path, seed: int, ranks: int, kind: str, said: str) -> None:
    line = {"seed": seed, "ranks": ranks, "kind": kind, "program": program(seed, ranks).text, "said": said}
    with out.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def judge_all(rank: int, ranks: int, running: Path, out: Path, seeds: Sequence[int], loud: bool) -> None:
    """Run programs one by one, and write their results to `out`; all ranks call it.

    `running`: file to which rank 0 writes the seed of the current program. `loud`: print complete messages."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for seed in seeds:
        if rank == 0:
            running.write_text(str(seed))
        kind, said = judged(seed, ranks)
        told: list[Any] = [None] * ranks
        dist.all_gather_object(told, (kind, said))
        kind, said = next((each for each in told if each[0] == "defect"), told[0])
        if rank == 0:
            add_line(out, seed, ranks, kind, said)
            print(f"{seed}: {kind}: {said if loud else said.splitlines()[-1][:160]}", flush=True)


def finished(out: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of a results file by seed."""
    lines = map(json.loads, out.read_text().splitlines() if out.exists() else ())
    return {line["seed"]: line for line in lines}


def run_seeds(seeds: Sequence[int], ranks: int, out: Path, loud: bool) -> None:
    """Run programs in one set of processes. A program that ends the processes is a defect; new processes run the remaining
    programs."""
    while left := [seed for seed in seeds if seed not in finished(out)]:
        with tempfile.TemporaryDirectory(prefix="dlp-fuzz-") as folder:
            running = Path(folder) / "seed"
            try:
                start(judge_all, ranks, running, out, left, loud, timeout=PATIENCE)
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                seed = int(running.read_text())
                add_line(out, seed, ranks, "defect", str(error))
                print(f"{seed}: the processes ended: {str(error).splitlines()[-1]}", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.fuzz", description="Random programs, compared with one rank.")
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        choices=(2, 4),
        default=[2, 4],
        help="numbers of ranks, which programs take in turn",
    )
    parser.add_argument("--only", type=int, help="run one program, and print the report")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz.jsonl"))
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.programs) if options.only is None else [options.only]
    with tempfile.TemporaryDirectory() as folder:
        out = options.out if options.only is None else Path(folder) / "only.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        for i, ranks in enumerate(options.ranks):
            mine = [seed for seed in seeds if seed % len(options.ranks) == i]
            run_seeds(mine, ranks, out, options.only is not None)
        lines = [line for seed, line in sorted(finished(out).items()) if seed in seeds]
    kinds = Counter(line["kind"] for line in lines)
    for line in lines:
        if line["kind"] == "defect":
            print(f"defect: program {line['seed']}: {line['program']}")
    print(f"{len(lines)} programs: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    return 1 if kinds["defect"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
