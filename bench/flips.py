"""Bit flips in training steps on two CPU ranks, and whether `[train] sentinel` reports them.

    python -m bench.flips [--flips 1000] [--clean 10000] [--first 0] [--clean-from 0] [--out FILE.csv]

A sentinel step runs forward and backward of a microbatch twice, and compares both runs. The program flips one random bit of one
random element on one rank, in a small Llama on the mesh tp2+sp or dp2:

    weight               a parameter, between the runs
    optimizer state      a moment of AdamW, between the runs
    activation           y of a module, in the second run
    gradient             the gradient of a parameter, in the second run
    activation gradient  the gradient of y of a module, in the second run
    wire                 a received tensor, in the first run, in which ranks compare checksums of transfers

The table counts, for each kind: flips, flips that the sentinel reported, reports that name the rank, and reports that name the
rank and the layer. Then follow clean steps, which have no flip: each report of the sentinel in a clean step is a false alarm.
Flips are rows of `--out`; an interrupted command continues with the flips that have no row.
"""

from __future__ import annotations

import argparse
import csv
import logging
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import dlp
from bench.ranks import start
from dlp.comm import observer
from dlp.comm.wire_checks import WireChecks
from dlp.parallel.weight.local import local_values
from launch.config.run_config import load
from launch.training import sentinel
from launch.training.build import Built, build
from launch.training.sentinel import Sentinel, SentinelError

OF_PARAMETERS = ("weight", "optimizer state", "gradient")
KINDS = ("weight", "optimizer state", "activation", "gradient", "activation gradient", "wire")
MESHES = {"tp2+sp": (1, 2, "true"), "dp2": (2, 1, "false")}
COLUMNS = ("flip", "mesh", "kind", "rank", "where", "bit", "found", "names rank", "names layer", "message")
SMALL = {"layers": 1, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 128}
WORLD, SEQUENCE = 2, 32
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(draw: random.Random, tensor: Tensor) -> tuple[Callable[[], None], int]:
    """Flip a random bit of a contiguous tensor without a change of torch's version counter, as a memory error does. Returns a
    function that flips the bit back, and the number of the bit in its element."""
    bits = tensor.detach().view(-1).view(INTEGERS[tensor.dtype.itemsize]).numpy()
    place, bit = draw.randrange(len(bits)), draw.randrange(8 * tensor.dtype.itemsize)
    mask = -(2**bit) if bit == 8 * tensor.dtype.itemsize - 1 and tensor.dtype.itemsize > 1 else 2**bit

    def change() -> None:
        bits[place] ^= mask

    change()
    return change, bit


class Damaging(WireChecks):
    """Wire checks that flip a bit of a received tensor.

    draw     random generator of the flip
    at       number of the tensor that is changed, in order of arrival; -1: no flip
    seen     number of tensors that have arrived
    bit      number of the flipped bit; -1 before the flip
    where    purpose and layer of the changed tensor
    """

    draw = random.Random(0)
    at, seen, bit, where = -1, 0, -1, ""

    def arrived(self, tensor: Tensor) -> None:
        kind = type(self)
        if kind.seen == kind.at:
            label = observer._LABEL.get()
            kind.where = f"{label.purpose} of {label.layer}"
            _, kind.bit = flip(kind.draw, tensor)
        kind.seen += 1


class Subject:
    """A small model on a mesh, with steps that a sentinel watches."""

    def __init__(self, name: str) -> None:
        dp, tp, sp = MESHES[name]
        settings: dict[str, Any] = {f"model.{key}": value for key, value in SMALL.items()}
        settings |= {"mesh.tp": tp, "mesh.dp_shard": dp}
        settings |= {"mesh.sequence_parallel": sp, "train.global_batch": 2, "train.sequence": SEQUENCE}
        settings |= {"train.sentinel": 1, "train.ledger": "off"}
        config = load("tiny", [part for key, value in settings.items() for part in (f"--{key}", str(value))])
        mesh = dlp.build_mesh(dp_replicate=1, dp_shard=dp, tp=tp, device_type="cpu")
        self.built: Built = build(config, mesh, torch.device("cpu"))
        self.sentinel = Sentinel(self.built.model, 1, self.built.optimizer)
        self.modules = {
            name: module
            for name, module in self.built.model.named_modules()
            if not any(True for _ in module.children())
        }
        self.steps, Damaging.seen = 0, 0
        self.step()
        self.transfers = Damaging.seen  # number of tensors that this rank receives in the first run of a step

    def backward(self) -> Tensor:
        built = self.built
        generator = torch.Generator().manual_seed(self.steps)
        tokens = torch.randint(0, SMALL["vocab"], (2, SEQUENCE + 1), generator=generator)
        tokens = tokens[built.dims.dp_rank :: built.batch.dp_size]
        loss = dlp.cross_entropy(built.model(tokens[:, :-1]), tokens[:, 1:], built.mesh) / tokens.numel()
        loss.backward()
        return loss.detach()

    def watched(self, before: Callable[[], None] = lambda: None, between: Callable[[], None] = lambda: None) -> str:
        """Run a sentinel step without the update. Returns the message of the sentinel, or "".

        `before`, `between`: functions that are called before the first run of the microbatch, and between both runs."""
        before()
        self.sentinel.rehearse(self.backward, gradients=True)
        between()
        with self.sentinel.recording() as sums:
            loss = self.backward()
        self.sentinel.close(sums, loss, gradients=True)
        try:
            self.sentinel.compare(sums, self.steps, self.built.device)
        except SentinelError as error:
            return str(error)
        return ""

    def drop(self) -> None:
        for parameter in self.built.model.parameters():
            parameter.grad = None

    def step(self) -> str:
        """Run a step with the update and without a flip. Returns the message of the sentinel, or ""."""
        said = self.watched()
        self.built.optimizer.step()
        self.drop()
        self.steps += 1
        return said


def injected(subject: Subject, kind: str, number: int) -> dict[str, Any]:
    """Run a step with a flip of this kind; all ranks call it. `number` determines the rank and the place of the flip. Returns
    the columns `message`, `where` and `bit`; `where` and `bit` are valid on the rank of the flip."""
    draw, hit = random.Random(number), dist.get_rank() == number // len(KINDS) % WORLD
    names, found = list(subject.modules), {"where": "", "bit": -1}
    undo: list[Callable[[], None]] = []
    named = {name: p for name, p in subject.built.model.named_parameters() if local_values(p).numel()}
    name, passes = draw.choice(list(named)), [0]
    handles: list[Any] = []

    def in_memory(tensor: Tensor) -> None:
        if hit:
            back, found["bit"] = flip(draw, local_values(tensor))
            undo.append(back)

    def on_gradient(parameter: Any) -> None:
        if passes[0] == 1 and hit:
            _, found["bit"] = flip(draw, local_values(parameter.grad))

    def on_y(module: Any, args: Any, y: Tensor) -> Tensor:
        if passes[0] != 1 or not hit or not torch.is_grad_enabled():
            return y
        if kind == "activation":
            _, found["bit"] = flip(draw, y.detach())
        else:
            y.register_hook(lambda grad: _flipped(draw, grad, found))
        return y

    if kind in OF_PARAMETERS:
        found["where"] = name
    if kind == "optimizer state":
        key = draw.choice(("exp_avg", "exp_avg_sq"))
    elif kind == "gradient":
        handles.append(named[name].register_post_accumulate_grad_hook(on_gradient))
    elif kind in ("activation", "activation gradient"):
        found["where"] = draw.choice(names)
        handles.append(subject.modules[found["where"]].register_forward_hook(on_y))

    def before() -> None:
        if kind == "wire":
            Damaging.draw, Damaging.seen, Damaging.bit = draw, 0, -1
            Damaging.at = draw.randrange(subject.transfers) if hit else -1

    def between() -> None:
        passes[0] = 1
        if kind == "weight":
            in_memory(named[name])
        elif kind == "optimizer state":
            in_memory(subject.built.optimizer.state[named[name]][key])

    said = subject.watched(before, between)
    for back in undo:
        back()
    for handle in handles:
        handle.remove()
    if kind == "wire" and hit:
        found |= {"where": Damaging.where, "bit": Damaging.bit}
        Damaging.at = -1
    subject.drop()
    return found | {"message": said}


def _flipped(draw: random.Random, grad: Tensor, found: dict[str, Any]) -> Tensor:
    changed = grad.contiguous().clone()
    _, found["bit"] = flip(draw, changed)
    return changed


def flip_all(rank: int, ranks: int, out: Path, numbers: Sequence[int], clean: range) -> None:
    """Run the flips `numbers`, then the clean steps `clean`; the number of a clean step determines the tokens. All ranks call
    this function."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    alarms = 0
    with patch.object(sentinel, "WireChecks", Damaging):
        subjects = {name: Subject(name) for name in MESHES}
        for number in numbers:
            kind, mesh = KINDS[number % len(KINDS)], list(MESHES)[number // (2 * len(KINDS)) % len(MESHES)]
            hit, row = number // len(KINDS) % WORLD, injected(subjects[mesh], kind, number)
            layer = row["where"].rpartition(".")[0] if kind in OF_PARAMETERS else row["where"]
            said = row["message"]
            row |= {"flip": number, "mesh": mesh, "kind": kind, "rank": hit, "found": bool(said) and row["bit"] >= 0}
            row |= {"names rank": f"rank {hit} (" in said, "names layer": bool(layer) and layer in said}
            if rank == hit:
                _append(out, row)
            if rank == 0 and number % 100 == 99:
                print(f"{number + 1} flips", flush=True)
    for subject in subjects.values():
        subject.steps += clean.start
    for done, step in enumerate(clean, 1):
        said = subjects[list(MESHES)[step % len(MESHES)]].step()
        alarms += bool(said)
        if rank == 0 and (said or done % 500 == 0 or done == len(clean)):
            print(f"{done} clean steps: {alarms} alarms {said}", flush=True)


def _append(out: Path, row: dict[str, Any]) -> None:
    with out.open("a", newline="") as file:
        csv.DictWriter(file, COLUMNS).writerow(row)


def rows_of(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(out.open(newline=""))) if out.exists() else []


def print_table(rows: Sequence[dict[str, str]]) -> None:
    print(f"{'kind':20} {'flips':>6} {'found':>6} {'rank named':>10} {'rank and layer':>14}")
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind and row["bit"] != "-1"]
        found = [row for row in mine if row["found"] == "True"]
        by_rank = [row for row in found if row["names rank"] == "True"]
        both = sum(row["names layer"] == "True" for row in by_rank)
        print(f"{kind:20} {len(mine):6} {len(found):6} {len(by_rank):10} {both:14}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.flips", description="Flips bits, and counts the flips that are reported."
    )
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--clean", type=int, default=10000, help="clean steps after the flips")
    parser.add_argument("--first", type=int, default=0, help="number of the first flip")
    parser.add_argument(
        "--clean-from", type=int, default=0, help="number of the first clean step, which determines its tokens"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/flips.csv"))
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not options.out.exists():
        with options.out.open("w", newline="") as file:
            csv.DictWriter(file, COLUMNS).writeheader()
    done = {int(row["flip"]) for row in rows_of(options.out)}
    numbers = [number for number in range(options.first, options.first + options.flips) if number not in done]
    clean = range(options.clean_from, options.clean_from + options.clean)
    start(flip_all, WORLD, options.out, numbers, clean)
    print_table(rows_of(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
