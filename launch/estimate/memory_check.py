"""A config on so many ranks of a device, without them: its plan, what it sends, what it holds; whether it fits a named board.

One that cannot is refused, with the settings that would help most. Each is tried alone, on the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dlp import Plan
from dlp.comm.mesh import DP_REPLICATE, DP_SHARD, TP, ParallelDims
from dlp.optim.encodings import ENCODINGS
from dlp.parallel.traffic.predict import Unpredictable, Workload
from launch.common.devices import BOARDS, kind_of
from launch.common.units import said_bytes
from launch.config.rules import validate_world
from launch.config.run_config import Config, parallel_dims
from launch.estimate.memory import Memory, memory
from launch.settings.schema import ConfigError
from launch.training import wire_bytes
from launch.training.build import plan_for
from launch.training.gradient_accumulation import Accumulation, accumulation

HELP_MOST = 3


@dataclass(frozen=True)
class Planned:
    """What is known of a run before it starts."""

    plan: Plan
    dims: ParallelDims
    load: Workload
    waits: Accumulation
    memory: Memory | Unpredictable


def planned(config: Config, world: int, device: str, plan: Plan | None = None) -> Planned:
    """`device`: a kind, or the name of a board; `plan`: that of the config, where it is there. Raises ValueError for what does
    not fit the number of ranks."""
    board = device if device in BOARDS else ""
    plan, dims = plan or plan_for(config, world, kind_of(device), board), parallel_dims(config, world)
    there = BOARDS[device].memory if device in BOARDS else None
    waits = accumulation(config, plan, validate_world(config, world), dims.dp_shard, there)
    load = wire_bytes.workload(config, world, waits.reductions)
    held: Memory | Unpredictable
    try:
        held = memory(config, plan, load, waits)
    except Unpredictable as why:
        held = why
    return Planned(plan, dims, load, waits, held)


def check_fits(config: Config, world: int, device: str, found: Planned) -> None:
    """ConfigError where tensors need more than a named board has for them, or nobody can tell."""
    if device not in BOARDS:
        return
    if isinstance(found.memory, Unpredictable):
        raise ConfigError(f"{config.source}: {found.memory}; give --device {BOARDS[device].kind} for a plan without it")
    if found.memory.peak <= BOARDS[device].usable:
        return
    board = BOARDS[device]
    helps = ", ".join(
        f"{settings} (saves {said_bytes(saves)})" for saves, settings in remedies(config, world, device, found.plan)
    )
    raise ConfigError(
        f"{config.source}: each of {world} ranks needs {said_bytes(found.memory.peak)} of tensors at once, and of an "
        f"{device}'s {said_bytes(board.memory)} {said_bytes(board.usable)} are there for them; "
        f"{'most would help ' + helps if helps else 'no setting alone helps: take more ranks'}"
    )


def remedies(config: Config, world: int, device: str, plan: Plan) -> list[tuple[float, str]]:
    """The settings that save most, each alone: bytes of the peak, and the setting as a command line has it."""
    before, found = _peak(config, world, device, plan), dict[str, tuple[float, str]]()
    for section, changes in _candidates(config):
        try:
            changed = replace(config, **{section: replace(getattr(config, section), **changes)})
            same = section == "train" and "micro_batch" not in changes
            saves = before - _peak(changed, world, device, plan if same else None)
        except ValueError:  # heads that tp does not divide, a batch that does not spread
            continue
        if saves > 0:
            said = " ".join(f"--{section}.{key} {value}" for key, value in changes.items())
            found[next(iter(changes))] = max(found.get(next(iter(changes)), (0.0, "")), (saves, said))
    return sorted(found.values(), reverse=True)[:HELP_MOST]


def _peak(config: Config, world: int, device: str, plan: Plan | None) -> float:
    found = planned(config, world, device, plan).memory
    if isinstance(found, Unpredictable):
        raise found
    return found.peak


def _candidates(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """What may be set otherwise, without another model or batch."""
    mesh, train = config.mesh, config.train
    yield from (("train", {"checkpointing": kind}) for kind in ("selective", "full") if kind != train.checkpointing)
    yield "train", {"micro_batch": 1}
    yield "train", {"reduce_gradients": "microbatch"}
    yield "train", {"weight_cache": "forward"}
    yield from (("train", {"optimizer": name}) for name in ENCODINGS if train.optimizer in ("adamw", *ENCODINGS))
    yield "mesh", {TP: 2 * mesh.tp, DP_SHARD: -1}
    yield "mesh", {TP: 4 * mesh.tp, DP_SHARD: -1}
    yield "mesh", {DP_REPLICATE: 1, DP_SHARD: -1}
