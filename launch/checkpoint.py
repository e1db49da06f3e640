"""Checkpoints by torch.distributed.checkpoint: weights, optimizer, recipe state, RNG, and a manifest.

    runs/NAME/checkpoints/step-100/     complete: written as .step-100.tmp and renamed when every rank is done
        __0_0.distcp, ..., .metadata    torch's files; plain tensors and DTensors only, no subclass, no object of ours
        manifest.json                   format, step, ranks, model, recipes, data, config, and the size of every file

Names are the model's own parameter names, and tensors are whole to the reader, so a checkpoint loads on another mesh:
each rank reads its part. Learning rate and position in the data are functions of the step and the settings, and are not
stored twice. RNG states belong to ranks and are restored on the same number of ranks only.

A torn or foreign checkpoint is refused by name; an older one is used only when it is asked for. The road not taken:
`get_state_dict` and `set_state_dict`, which step the optimizer to make its state and put saved hyperparameters in the
place of the config's.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW

import dlp
from dlp.parallel.swap import recipes_of
from launch.stream import TokenStream

FORMAT = "dlp checkpoint 1"
MANIFEST = "manifest.json"
KEYS = {"format", "step", "world_size", "torch", "model", "recipes", "data", "config", "files"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names it, the reason and the way out."""


@dataclass(frozen=True)
class Training:
    """What a checkpoint saves and restores on this rank. `settings`: what the config says of the model, as a table;
    `config`: the whole file."""

    model: nn.Module
    optimizer: AdamW
    data: TokenStream
    device: torch.device
    settings: dict[str, Any]
    config: str


@dataclass(frozen=True)
class Loaded:
    """The steps that were done, what is to be told of the difference between that run and this one, and that run's config,
    a TOML file."""

    step: int
    remarks: list[str]
    config: str


def complete(folder: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest step first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def resolve(resume: str, folder: Path) -> Path | None:
    """What `[checkpoint] resume` names: "none": nothing, "auto": the newest finished one, else that path."""
    if resume == "none":
        return None
    if resume == "auto":
        return next(reversed(complete(folder)), None)
    if not Path(resume).is_dir():
        raise CheckpointError(f"--checkpoint.resume {resume}: no such checkpoint; expected auto, none or its folder")
    return Path(resume)


def read_manifest(path: Path) -> dict[str, Any]:
    """The checked manifest of a checkpoint. CheckpointError when it is foreign or torn."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is foreign: it has no {MANIFEST}; {_way_out(path)}")
    try:
        manifest: Any = json.loads((path / MANIFEST).read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is torn: {MANIFEST} is not JSON ({error}); {_way_out(path)}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path} is foreign: its format is {found!r}, expected {FORMAT!r}; {_way_out(path)}")
    if missing := sorted(KEYS - manifest.keys()):
        raise CheckpointError(f"{path} is torn: {MANIFEST} lacks {', '.join(missing)}; {_way_out(path)}")
    for name, size in manifest["files"].items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes"
            raise CheckpointError(f"{path} is torn: {name} {state}, expected {size} bytes; {_way_out(path)}")
    return dict(manifest)


def _way_out(path: Path) -> str:
    beside = complete(path.parent)
    older = beside[: beside.index(path)] if path in beside else []
    previous = f"--checkpoint.resume {older[-1]} to continue from that one, " if older else ""
    return f"use {previous}--checkpoint.resume none to start anew"


def _tensors(training: Training) -> dict[str, Any]:
    """The run's own tensors, by name; loading writes into them. A tied parameter is there once."""
    for module in training.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without backward the root still holds gathered parameters
    parameters = dict(training.model.named_parameters())
    states = training.optimizer.state
    return {
        "model": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer": {name: states[parameter] for name, parameter in parameters.items() if parameter in states},
    }


def _rng(device: torch.device) -> dict[str, Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _set_rng(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def save(folder: Path, step: int, training: Training, keep: int) -> Path:
    """Write checkpoint `step-N` under `folder`, all ranks together, then remove all but the newest `keep`.

    Raises RuntimeError when a rank could not write; what was there before stands.
    """
    final, temporary = folder / f"step-{step}", folder / f".step-{step}.tmp"
    leader = dist.get_rank() == 0
    if leader:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir()
    dist.barrier()
    recipes, rng = dlp.state_dict(training.model), {f"rank{dist.get_rank()}": _rng(training.device)}
    state = {**_tensors(training), "recipes": recipes, "rng": rng}
    try:
        dcp.save(state, checkpoint_id=temporary)
    except dcp.api.CheckpointException as error:
        raise RuntimeError(f"{final} could not be written: {_reason(error)}; what was saved before stands") from error
    if leader:
        _write_manifest(temporary, step, training)
        if final.exists():
            final.rename(folder / f".step-{step}.old.tmp")
        temporary.rename(final)
        for old in [*folder.glob(".step-*.tmp"), *complete(folder)[:-keep]]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def _write_manifest(folder: Path, step: int, training: Training) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {
        "format": FORMAT, "step": step, "world_size": dist.get_world_size(), "torch": torch.__version__,
        "model": training.settings, "recipes": recipes_of(training.model), "data": training.data.state_dict(),
        "config": training.config, "files": files,
    }  # fmt: skip
    assert manifest.keys() == KEYS, sorted(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _reason(error: dcp.api.CheckpointException) -> str:
    """The first failing rank's error, in one line."""
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank}: {type(failure).__name__}: {' '.join(str(failure).split())}"


def load(path: Path, training: Training) -> Loaded:
    """Restore everything from a checkpoint, on this or another mesh, into a model that has not run yet.

    Raises CheckpointError for a torn or foreign one, or one of another model or other data.
    """
    manifest = read_manifest(path)
    _check_fits(path, manifest, training)
    _make_state(training.optimizer)
    state, rank = {**_tensors(training), "recipes": _saved_recipes(path)}, f"rank{dist.get_rank()}"
    same_ranks = manifest["world_size"] == dist.get_world_size()
    if same_ranks:
        state["rng"] = {rank: _rng(training.device)}
    try:
        dcp.load(state, checkpoint_id=path)
        told = dlp.load_state_dict(training.model, state["recipes"])
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}; {_way_out(path)}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} does not fit this run's recipes: {error}") from error
    if same_ranks:
        _set_rng(state["rng"][rank], training.device)
    return Loaded(manifest["step"], changes(manifest["config"], training.config) + told, manifest["config"])


def _saved_recipes(path: Path) -> dict[str, Tensor]:
    """Room for the recipe state of a checkpoint, whose shapes are its own."""
    room = {}
    for key, entry in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if key.startswith("recipes.") and isinstance(entry, TensorStorageMetadata):
            room[key.removeprefix("recipes.")] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return room


def _check_fits(path: Path, manifest: dict[str, Any], training: Training) -> None:
    for key, now in training.settings.items():
        saved = manifest["model"].get(key)
        if saved != now:
            raise CheckpointError(
                f"{path} is of another model: its [model] {key} is {saved!r}, this run's is {now!r}; {_way_out(path)}"
            )
    try:
        training.data.load_state_dict(manifest["data"])
    except ValueError as error:
        raise CheckpointError(f"{path} is of another run: {error}") from None


def _make_state(optimizer: AdamW) -> None:
    """AdamW's state as it makes it itself in its first step, so that there is something to load into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": step, **averages}


def changes(before: str, now: str) -> list[str]:
    """How two configs differ in what makes the training, e.g. "changed since then: train.lr was 0.003, now 0.001"."""
    old, new = _settings(before), _settings(now)
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"changed since then: {key} was {old.get(key, 'unset')}, now {new.get(key, 'unset')}" for key in differing]


def _settings(config: str) -> dict[str, Any]:
    """The settings of a config file by dotted name, without where the run is and what it saves."""
    tables = tomllib.loads(config)
    groups = {f"groups.{group['name']}": group for group in tables.pop("groups")}
    chosen = {name: table for name, table in {**tables, **groups}.items() if name not in ("run", "checkpoint")}
    return {f"{name}.{key}": value for name, table in chosen.items() for key, value in table.items()}
