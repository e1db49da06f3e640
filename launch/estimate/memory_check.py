"""Predict plan, traffic and memory of a config for a number of ranks and a device, without starting ranks, and check that the
memory of a board suffices.

A config that does not fit is rejected with a message that names the settings that would save most memory. Each setting is tried
separately, by the same prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dlp import Plan
from dlp.comm.mesh import DP_REPLICATE, DP_SHARD, TP, ParallelDims
from dlp.optim.encodings import ENCODINGS
from dlp.parallel.traffic.predict import Unpredictable, Workload
from dlp.quant.recipe import as_recipe
from launch.common.devices import BOARDS, kind_of
from launch.common.units import said_bytes
from launch.config.rules import validate_world
from launch.config.run_config import Config, parallel_dims
from launch.estimate.memory import Memory, memory
from launch.settings.schema import ConfigError
from launch.training import wire_bytes
from launch.training.build import meta_model, plan_for
from launch.training.gradient_accumulation import Accumulation, accumulation
from launch.training.recipe_schedule import planned_swaps

HELP_MOST = 3  # number of settings that the message names


@dataclass(frozen=True)
class Planned:
    """Predictions for a run.

    plan     layer plan
    dims     sizes of the mesh axes
    load     sizes that determine the bytes of a step
    waits    decision about gradient accumulation
    memory   memory of a rank with the recipes that need most, if recipes change during the run; or the reason why it cannot be
             predicted
    """

    plan: Plan
    dims: ParallelDims
    load: Workload
    waits: Accumulation
    memory: Memory | Unpredictable


def planned(config: Config, world: int, device: str, plan: Plan | None = None) -> Planned:
    """Predict a run on `world` ranks.

    device: a kind of device or a board (`launch.common.devices.NAMES`); plan: plan of the config, if already computed. Raises
    ValueError if the config does not fit the number of ranks."""
    board = device if device in BOARDS else ""
    plan, dims = plan or plan_for(config, world, kind_of(device), board), parallel_dims(config, world)
    there = BOARDS[device].memory if device in BOARDS else None
    waits = accumulation(config, plan, validate_world(config, world), dims.shards, there)
    load = wire_bytes.workload(config, world, waits.reductions)
    held: Memory | Unpredictable
    try:
        steps = [(0, plan), *_later_plans(config, plan)]
        held = max(
            (replace(memory(config, each, load, waits), after=step) for step, each in steps), key=lambda m: m.peak
        )
    except Unpredictable as why:
        held = why
    return Planned(plan, dims, load, waits, held)


def _later_plans(config: Config, plan: Plan) -> Iterator[tuple[int, Plan]]:
    """Yield (number of completed steps, plan with the recipes of the following steps) for each scheduled recipe change."""
    if not any(group.swap for group in config.groups):
        return
    for swap in planned_swaps(config.groups, config.train.steps, meta_model(config), plan):
        rows = (
            replace(row, recipe=as_recipe(swap.recipe).for_layer(row.name)) if row.name in swap.layers else row
            for row in plan.layers
        )
        plan = replace(plan, layers=tuple(rows))
        yield swap.at_step, plan


def check_fits(config: Config, world: int, device: str, found: Planned) -> None:
    """Raise ConfigError for a board whose memory does not suffice, or if the memory of the run cannot be predicted. Other
    devices are not checked."""
    if device not in BOARDS:
        return
    if isinstance(found.memory, Unpredictable):
        raise ConfigError(
            f"{config.source}: {found.memory}; to skip the memory check, pass --device {BOARDS[device].kind}"
        )
    if too_large := exceeded(config, world, device, found):
        raise ConfigError(f"{config.source}: {too_large}")


def exceeded(config: Config, world: int, device: str, found: Planned) -> str:
    """Return a sentence with the settings that would save most memory if `device` is a board whose memory does not suffice;
    otherwise ""."""
    board = BOARDS.get(device)
    if board is None or isinstance(found.memory, Unpredictable) or found.memory.peak <= board.usable:
        return ""
    helps = ", ".join(
        f"{settings} (saves {said_bytes(saves)})" for saves, settings in remedies(config, world, device, found.plan)
    )
    return (
        f"each of {world} ranks needs {said_bytes(found.memory.peak)} of tensors at once, and "
        f"{said_bytes(board.usable)} of the {said_bytes(board.memory)} of an {device} are usable; "
        f"{'most would help ' + helps if helps else 'no setting alone helps: take more ranks'}"
    )


def remedies(config: Config, world: int, device: str, plan: Plan) -> list[tuple[float, str]]:
    """Return up to `HELP_MOST` changes of settings that save most memory, as (saved bytes of the peak, options of the command
    line). Each change is tried alone."""
    before, found = _peak(config, world, device, plan), dict[str, tuple[float, str]]()
    for section, changes in _candidates(config):
        try:
            changed = replace(config, **{section: replace(getattr(config, section), **changes)})
            same = section == "train" and "micro_batch" not in changes
            saves = before - _peak(changed, world, device, plan if same else None)
        except ValueError:  # for example, tp does not divide the heads
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
    """Yield (section, changed settings) for each change that may save memory and does not change model or global batch."""
    mesh, train = config.mesh, config.train
    yield from (("train", {"checkpointing": kind}) for kind in ("selective", "full") if kind != train.checkpointing)
    yield "train", {"micro_batch": 1}
    yield "train", {"reduce_gradients": "microbatch"}
    yield "train", {"weight_cache": "forward"}
    yield from (("train", {"optimizer": name}) for name in ENCODINGS if train.optimizer in ("adamw", *ENCODINGS))
    yield "mesh", {TP: 2 * mesh.tp, DP_SHARD: -1}
    yield "mesh", {TP: 4 * mesh.tp, DP_SHARD: -1}
    yield "mesh", {DP_REPLICATE: 1, DP_SHARD: -1}
