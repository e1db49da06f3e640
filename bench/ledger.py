"""Planned and counted bytes of one training step of config `tiny`, with each recipe on each mesh of CPU ranks.

    python -m bench.ledger [--only RECIPE] [--section.key value ...]

The output is tab-separated, with a header and one row for each recipe, mesh and process group:

    recipe  mesh  group  planned  counted  amax  share_of_bf16  gathers_of_bf16

    planned, counted   bytes that one rank sends in a step, without amax agreements
    amax               bytes of amax agreements; "PLANNED!=COUNTED" if planned and counted bytes differ
    share_of_bf16      planned bytes, including amax agreements, relative to the same plan in bf16
    gathers_of_bf16    ratio of the bytes of a gather of quantized x, dy or w to the bytes in bf16, the maximum over gathers;
                       "-": no such gather

The exit code is 1 if planned and counted bytes of any group, layer and purpose differ, or if a mesh failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dlp.comm import observer
from dlp.comm.mesh import shutdown
from dlp.parallel.traffic.ledger import LedgerError, plan_of
from dlp.parallel.traffic.predict import Traffic, in_bf16
from dlp.quant import recipe as recipes
from dlp.quant.recipe import GEMMS
from launch.config.run_config import Config, load
from launch.ranks.process_exit import StopFlag
from launch.train import make_mesh, start
from launch.training.trainer import Trainer
from launch.training.wire_bytes import WARM, by_group, planned

COLUMNS = ("recipe", "mesh", "group", "planned", "counted", "amax", "share_of_bf16", "gathers_of_bf16")
MESHES = {"tp=2": (1, 2), "dp_shard=2": (2, 1), "tp=2,dp_shard=2": (2, 2)}  # (dp_shard, tp)
SMALL = [  # fewer blocks and tokens than tiny, so that the program takes about a minute
    "--model.layers", "2", "--train.sequence", "128", "--train.global_batch", "4", "--checkpoint.resume", "none",
]  # fmt: skip
# For recipes whose two quantized orientations of dy are larger than dy in bf16, the gather of dy in high precision runs as well
VARIANTS = {
    f"{name}+gather_dy": f'{{name = "{name}", gather_dy = "high_precision"}}' for name in ("fp8_block", "mxfp8")
}


def choices() -> dict[str, str]:
    """Map the name of a recipe in a row to its value in the config."""
    return {name: name for name in recipes.names()} | VARIANTS


def config_of(recipe: str, mesh: str, folder: Path, overrides: Sequence[str]) -> Config:
    dp_shard, tp = MESHES[mesh]
    sizes = ["--mesh.dp_shard", str(dp_shard), "--mesh.tp", str(tp)]
    chosen = ["--groups.default.recipe", choices()[recipe], "--run.dir", str(folder / f"{recipe}-{mesh}")]
    return load("tiny", [*SMALL, *sizes, *chosen, *overrides])


def watch(trainer: Trainer) -> str:
    """Train up to and including the counted step. Returns the message about a difference from the plan, or ""."""
    try:
        for step in range(WARM + 1):
            trainer.watched_step(step)
    except LedgerError as error:
        return str(error)
    return ""


def rows(recipe: str, mesh: str, trainer: Trainer) -> Iterator[str]:
    """Yield the table rows of a run after its counted step. Raises Unpredictable if bytes cannot be planned."""
    seen, plan, load = trainer.wire.seen(), plan_of(trainer.built.model), trainer.wire.load()
    ours, bf16 = planned(plan, load), planned(in_bf16(plan), load)
    for group in by_group({**seen.sent, **ours}):
        plans, counts = ({amax: _in(sent, group, amax) for amax in (True, False)} for sent in (ours, seen.sent))
        amax = str(counts[True]) if plans[True] == counts[True] else f"{plans[True]}!={counts[True]}"
        base = _in(bf16, group, True) + _in(bf16, group, False)
        share = f"{sum(plans.values()) / base:.4f}" if base else "-"
        shares = [*gather_shares(seen, bf16, group), *weight_share(seen, ours, bf16, group)]
        gathers = f"{max(shares):.4f}" if shares else "-"
        yield "\t".join((recipe, mesh, group, str(plans[False]), str(counts[False]), amax, share, gathers))


def _in(sent: Mapping[Any, int], group: str, amax: bool) -> int:
    """Return the bytes of one group: of amax agreements if `amax`, else of all other transfers."""
    return sum(n for key, n in sent.items() if key.group == group and (key.purpose == "amax") == amax)


HIGH_PRECISION = [observer.dtype_name(dtype) for dtype in (torch.bfloat16, torch.float32)]


def weight_share(seen: observer.Observer, ours: Traffic, bf16: Traffic, group: str) -> list[float]:
    """Return the bytes of the gathers of quantized weights relative to bf16, as a list of one number; [] without such gathers.

    FSDP gathers all parameters of a unit together, so the planned bytes of unquantized weights are subtracted.
    """
    base = sum(n for sent, n in bf16.items() if (sent.group, sent.purpose) == (group, "weights"))
    counted = sum(n for key, n in seen.sent.items() if (key.group, key.purpose) == (group, "weights"))
    values = sum(n for sent, n in ours.items() if sent.purpose == "weights" and sent.precision in HIGH_PRECISION)
    return [(counted - values) / (base - values)] if base > values else []


def gather_shares(seen: observer.Observer, bf16: Traffic, group: str) -> list[float]:
    """Return the bytes of each gather of a quantized x or dy, relative to bf16. In bf16 a layer sends the same bytes in each
    pass, since it gathers in one pass and reduces as many values in the other."""
    shares = []
    for key, nbytes in seen.sent.items():
        quantized = key.purpose in GEMMS and key.kind == "all_gather" and key.precision not in HIGH_PRECISION
        base = [n for sent, n in bf16.items() if (sent.layer, sent.group) == (key.layer, group)]
        if quantized and key.group == group:
            shares.append(nbytes / max(base))
    return shares


def on_ranks(mesh: str, folder: Path, only: Sequence[str], overrides: Sequence[str]) -> None:
    """Body of a rank: run the recipes of `only` ([]: all) on one mesh in turn; rank 0 writes MESH.tsv and differences.txt."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    built: DeviceMesh | None = None
    for recipe in only or choices():
        config = config_of(recipe, mesh, folder, overrides)
        built = built or make_mesh(config)
        trainer, _ = start(config, built, StopFlag())
        differs = watch(trainer)
        if trainer.run.leader:
            with (folder / f"{mesh}.tsv").open("a") as file:
                file.writelines(f"{row}\n" for row in rows(recipe, mesh, trainer))
            with (folder / "differences.txt").open("a") as file:
                file.write(f"{recipe} {mesh}: {differs}\n" if differs else "")
    shutdown()


def run(mesh: str, folder: Path, arguments: Sequence[str]) -> bool:
    """Start the ranks of one mesh with the arguments of this command, and print the rows. Returns whether all ranks succeeded
    and all bytes were as planned."""
    ranks = MESHES[mesh][0] * MESHES[mesh][1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "bench.ledger",
    ]
    done = subprocess.run(
        [*command, "--mesh", mesh, "--folder", str(folder), *arguments], capture_output=True, text=True
    )
    table, differences = folder / f"{mesh}.tsv", folder / "differences.txt"
    print(table.read_text() if table.exists() else "", end="", flush=True)
    told = differences.read_text() if differences.exists() else ""
    if done.returncode:
        told += done.stderr
    print(told, end="", file=sys.stderr, flush=True)
    return not told


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.ledger", description="Planned and counted bytes of every recipe and mesh."
    )
    parser.add_argument(
        "--only", action="append", choices=list(choices()), default=[], help="a recipe to run; may be repeated [all]"
    )
    parser.add_argument("--mesh", choices=list(MESHES), help=argparse.SUPPRESS)  # set in the processes of ranks
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    if options.mesh:
        on_ranks(options.mesh, options.folder, options.only, overrides)
        return 0
    print("\t".join(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory(prefix="dlp-ledger-") as folder:
        ok = [run(mesh, Path(tempfile.mkdtemp(dir=folder)), sys.argv[1:]) for mesh in MESHES]
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
