"""Bits and cost of `[train] invariant = true`: training runs on one rank and on meshes, for several shapes and recipes.

    python -m bench.invariant [--shapes tiny qwen3] [--recipes bf16 fp8_current ...] [--meshes tp2 dp2 ...] [--steps 20]
                              [--device cpu|cuda] [--cost] [--out FILE]

A run is `--steps` optimizer steps of AdamW on random tokens, with 8 microbatches in each step. The bits of a run are hashes of
the losses of all microbatches, of all gradient norms, of all weights and of all optimizer states. The table compares the bits
of each mesh with the bits of one rank, and the exit code is 1 if a mesh differs. With `--cost` each run is repeated without
invariant mode, and the column `cost` is the time of a step relative to that run.

Finished runs are lines of `--out`, and are not repeated: an interrupted command continues with the next run. Ranks are
processes on this machine; with `--device cuda` each rank has one GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import dlp
from bench.ranks import start
from dlp.comm.mesh import AXES
from dlp.proof.cases import MeshCase
from launch.config.run_config import Config, load
from launch.training.build import build
from launch.training.step_update import Update

ONE = "tp1"
PIECES = 8  # microbatches of a step, over all data-parallel ranks
SEQUENCE = {"wide": 2048}  # tokens of a sequence; 32 for all other shapes
SHAPES = {
    "tiny": "layers=2 hidden=128 ffn=256 heads=4 kv_heads=4 head_dim=64 vocab=128",
    "qwen3": "family=qwen3 layers=4 hidden=64 ffn=256 heads=16 kv_heads=8 head_dim=32 vocab=128",
    "wide": "family=qwen3 layers=4 hidden=2048 ffn=6144 heads=16 kv_heads=8 head_dim=128 vocab=32768",
}
# Sizes for fp8_block: tp of at most 4 (tiny) or 8 (qwen3) splits features at multiples of 128, the size of a scaling block
BLOCKS = {"tiny": "ffn=512 head_dim=128", "qwen3": "ffn=1024 heads=8 head_dim=128", "wide": ""}
MESHES = {
    "tiny": ("tp2", "tp2+sp", "tp4", "dp2", "dp4", "hsdp2x2", "tp2xdp2+sp", "dp8"),
    "qwen3": ("tp2+sp", "tp4+sp", "tp8+sp", "dp2", "dp8", "hsdp2x2", "tp2xdp2+sp", "tp2xhsdp2x2+sp"),
    "wide": ("tp2+sp", "dp2"),
}
WIDTHS = (6, 12, 16, 5, 16, 8, 6)
RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class Run:
    """Settings of one run.

    shape        shape of the model, a key of SHAPES
    recipe       recipe of all linears
    mesh         mesh by name, as "tp2+sp"
    steps        number of optimizer steps
    device       "cpu" or "cuda"
    invariant    whether the run is in invariant mode; False for the runs of `--cost`
    """

    shape: str
    recipe: str
    mesh: str
    steps: int
    device: str
    invariant: bool = True

    @property
    def case(self) -> MeshCase:
        return MeshCase.parse(self.mesh)

    @property
    def sizes(self) -> str:
        return f"{SHAPES[self.shape]} {BLOCKS[self.shape] if self.recipe == 'fp8_block' else ''}"

    def config(self) -> Config:
        """Return the configuration of the run."""
        case = self.case
        found = dict(f"model.{each}".split("=", 1) for each in self.sizes.split())
        found |= {f"mesh.{axis}": str(getattr(case, axis)) for axis in AXES}
        found |= {"mesh.sequence_parallel": str(case.sequence_parallel).lower(), "train.lr": "1e-2"}
        found |= {"train.invariant": str(self.invariant).lower(), "train.micro_batch": "1", "train.clip": "0.5"}
        found |= {"train.sequence": str(SEQUENCE.get(self.shape, 32)), "train.global_batch": str(PIECES)}
        arguments = [part for name, value in found.items() for part in (f"--{name}", value)]
        return load("tiny", [*arguments, "--recipe", self.recipe])


@dataclass(frozen=True)
class Result:
    """Result of a run.

    bits       four hashes, by name: "losses", "gradient norms", "weights", "optimizer states"
    seconds    median seconds of a step
    sizes      settings of the model (`Run.sizes`)
    """

    run: Run
    bits: dict[str, str]
    seconds: float
    sizes: str = ""

    def differs_from(self, other: Result) -> str:
        return ", ".join(name for name, bits in self.bits.items() if bits != other.bits[name])


def bits_of(tensors: Iterable[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        sha.update(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def trained(run: Run, device: torch.device) -> Result:
    """Train on all ranks of the process group, as many as the mesh of the run has. Returns the result."""
    config, case = run.config(), run.case
    mesh = dlp.build_mesh(dp_replicate=case.dp_replicate, dp_shard=case.dp_shard, tp=case.tp, device_type=run.device)
    built = build(config, mesh, device)
    update = Update(built.model, built.optimizer, config.train, device)
    losses, norms, times = dict[tuple[int, int], float](), list[Tensor](), list[float]()
    for step in range(run.steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, config.family.vocab, (PIECES, config.train.sequence + 1), generator=generator)
        began, parts = time.perf_counter(), []
        for micro in range(PIECES // case.dp):
            piece = micro * case.dp + built.dims.dp_rank
            batch = tokens[piece : piece + 1].to(device)
            logits, targets = built.model(batch[:, :-1]), batch[:, 1:]
            loss = dlp.cross_entropy(logits, targets, mesh, z_loss=1e-4, invariant=run.invariant) / tokens.numel()
            gain = 1 if run.invariant else case.dp
            (loss * gain).backward()
            parts.append((piece, loss.detach()))
        norms.append(update()[0].detach())
        built.optimizer.zero_grad(set_to_none=True)
        losses |= {(step, piece): loss.item() for piece, loss in parts}
        times.append(time.perf_counter() - began)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, losses)
    every = {place: loss for each in told for place, loss in each.items()}
    parameters = dict(built.model.named_parameters())
    states = [state for p in parameters.values() for state in built.optimizer.state[p].values()]
    bits = {
        "losses": hashlib.sha256(repr(sorted(every.items())).encode()).hexdigest()[:16],
        "gradient norms": bits_of(norms),
        "weights": bits_of(parameters.values()),
        "optimizer states": bits_of(states),
    }
    dist.all_gather_object(told, bits)
    odd = [rank for rank, each in enumerate(told) if each != told[0]]
    if odd:
        bits = {name: f"other bits on ranks {odd}" for name in bits}
    return Result(run, bits, statistics.median(times[len(times) // 4 :]), run.sizes)


def run_all(rank: int, ranks: int, out: Path, runs: Sequence[Run]) -> None:
    """Train `runs`, whose meshes have `ranks` ranks; rank 0 appends their results to `out`. All ranks call it."""
    device = torch.device("cuda", rank) if runs[0].device == "cuda" else torch.device("cpu")
    for run in runs:
        began = time.perf_counter()
        result = trained(run, device)
        torch.use_deterministic_algorithms(False)  # invariant runs turn this on
        if rank == 0:
            with out.open("a") as lines:
                lines.write(json.dumps(asdict(result)) + "\n")
            print(f"{run.shape} {run.recipe} {run.mesh}: {time.perf_counter() - began:.1f} s", flush=True)


def results(out: Path) -> dict[Run, Result]:
    """Read the results of a file, without results of runs whose `Run.sizes` have changed since."""
    found = {}
    for line in out.read_text().splitlines() if out.exists() else ():
        fields = json.loads(line)
        result = Result(Run(**fields.pop("run")), **fields)
        if result.sizes == result.run.sizes:
            found[result.run] = result
    return found


def wanted(options: argparse.Namespace) -> list[Run]:
    """Return the runs of a command; for each shape and recipe, the run on one rank comes first. With --cost, each run is
    followed by the same run without invariant mode."""
    runs = []
    for shape in options.shapes:
        for recipe in options.recipes:
            for mesh in (ONE, *(options.meshes or MESHES[shape])):
                run = Run(shape, recipe, mesh, options.steps, options.device)
                runs += [run, replace(run, invariant=False)][: 1 + options.cost]
    return runs


def rows(runs: Sequence[Run], found: dict[Run, Result]) -> list[list[str]]:
    """Return a row of the table for each finished run in invariant mode."""
    lines = []
    for run in runs:
        if not run.invariant or run not in found:
            continue
        one = found[replace(run, mesh=ONE)]
        differs, base = found[run].differs_from(one), found.get(replace(run, invariant=False))
        cost = "" if base is None else f"{found[run].seconds / base.seconds:.2f}x"
        said = "differs: " + differs if differs else "reference" if run.mesh == ONE else "equal"
        lines.append([
            run.shape, run.recipe, run.mesh, str(run.case.ranks), said, f"{1e3 * found[run].seconds:.1f}", cost
        ])  # fmt: skip
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.invariant", description="Bits and cost of invariant runs.")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["tiny", "qwen3"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--meshes", nargs="+", default=None, help="meshes of all shapes; default: those of MESHES")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cost", action="store_true", help="repeat each run without invariant")
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs, and run nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/invariant.jsonl"))
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    runs, found = wanted(options), results(options.out)
    for ranks in sorted({run.case.ranks for run in runs}):
        left = [run for run in runs if run.case.ranks == ranks and run not in found]
        if left and not options.table:
            print(f"{len(left)} runs on {ranks} ranks", flush=True)
            start(run_all, ranks, options.out, left, device_type=options.device)
    lines = rows(runs, results(options.out))
    for line in [["shape", "recipe", "mesh", "ranks", "bits", "ms/step", "cost"], *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, WIDTHS, strict=True)))
    equal = sum(line[4] != "reference" and not line[4].startswith("differs") for line in lines)
    compared = sum(line[4] != "reference" for line in lines)
    print(f"{equal} of {compared} runs on meshes have the bits of one rank")
    return 0 if equal == compared else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
