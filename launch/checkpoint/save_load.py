"""Save and load checkpoints by torch.distributed.checkpoint: weights, optimizer, recipe state, RNG, and a manifest.

    runs/NAME/checkpoints/step-100/     complete: written as .step-100.tmp and renamed when all ranks have written
        __0_0.distcp, ..., .metadata    files of torch: plain tensors and DTensors, no subclasses or pickled objects
        manifest.json                   description, size and hash of every file (manifest.py)

Tensors are stored under the parameter names of the model, and the reader sees unsharded tensors. Therefore a checkpoint loads
on any mesh: each rank reads its shards. Learning rate and position in the data are functions of step and settings, and are not
stored. RNG states belong to ranks and are restored only on the same number of ranks.

A torn checkpoint (incomplete or modified) or a foreign one (another format) is an error; an older checkpoint is used only if
the user names it. Rank 0 reads the manifest for all ranks, so that all ranks load the same checkpoint or raise the same error.
No code that a checkpoint names is run: the index is read as data (dcp_files.py), and the Python file of a recipe is imported
only if the config of the run names the same file. `get_state_dict` and `set_state_dict` of torch are not used: they step the
optimizer to create its state, and they replace hyperparameters of the config by saved ones.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

import dlp
from dlp.parallel.model.boundary import recipes_of
from launch.checkpoint import dcp_files, optimizer_conversion
from launch.checkpoint.finite_check import not_finite
from launch.checkpoint.initial_optimizer_state import make_state
from launch.checkpoint.manifest import CheckpointError, WayOut, complete, damage, read_manifest, way_out, write_manifest
from launch.data.token_stream import TokenStream
from launch.models.settings import Model
from launch.ranks import rank_objects

T = TypeVar("T")

# Defaults of `[model]`, for settings that did not exist when an older checkpoint was written.
MODEL_DEFAULTS = {each.name: each.default for each in fields(Model) if each.default is not MISSING}


class SaveError(RuntimeError):
    """Error for a checkpoint that could not be written, raised on all ranks; earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class Training:
    """State of a run that a checkpoint saves and restores on this rank.

    model         model with sharded parameters
    optimizer     optimizer of the model; its state exists after the first step
    data          token stream of the training data
    device        device of this rank
    settings      settings that define the parameters: `[model]` of the config, or config.json of a model of transformers
    config        complete config as TOML
    recipe_files  Python files of user-defined recipes that the config names
    tokenizer     hash of the tokenizer of the data; None if unknown
    update        tensors by name that decide which steps are skipped as spikes (recent gradient norms); equal on all ranks
    """

    model: nn.Module
    optimizer: Optimizer
    data: TokenStream
    device: torch.device
    settings: dict[str, Any]
    config: str
    recipe_files: Collection[Path] = ()
    tokenizer: str | None = None
    update: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """Result of `load`.

    step      number of completed steps
    remarks   log lines: the check of hashes, differences between the saved run and this run
    config    config of the saved run as TOML
    """

    step: int
    remarks: list[str]
    config: str


def _tensors(training: Training) -> dict[str, Any]:
    """Return parameters and optimizer states by parameter name; loading writes into them. A tied parameter appears once."""
    for module in training.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without backward the root FSDP unit still has unsharded parameters
    parameters = dict(training.model.named_parameters())
    states = training.optimizer.state
    return {
        "model": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer": {name: dict(states[parameter]) for name, parameter in parameters.items() if parameter in states},
    }


def _rng(device: torch.device) -> dict[str, Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _set_rng(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@dataclass(frozen=True)
class Saved:
    """Result of a save.

    size      bytes of all files of all ranks
    seconds   duration of the save on this rank
    left      names of older checkpoints that could not be removed
    """

    step: int
    path: Path
    size: int
    seconds: float
    left: list[str]

    def __str__(self) -> str:
        left = f"; not yet removed, to be removed after the next save: {', '.join(self.left)}" if self.left else ""
        return f"saved {self.path}: {_cost(self.size, self.seconds)}{left}"


def _cost(size: int, seconds: float) -> str:
    return f"{size / 1e6:,.1f} MB in {seconds:.2f} s"


@dataclass(frozen=True)
class Snapshot:
    """Content of the checkpoint of one step on this rank.

    tensors    tree of dicts with tensors; "model" and "optimizer" hold the tensors of the run, the other keys hold copies
    manifest   manifest without the key `files`
    """

    step: int
    tensors: dict[str, Any]
    manifest: dict[str, Any]


def snapshot(step: int, training: Training) -> Snapshot:
    """Return the snapshot of a run between two steps; all ranks call it together."""
    recipes, rng = dlp.state_dict(training.model), {f"rank{dist.get_rank()}": _rng(training.device)}
    data = {**training.data.state_dict(), "tokenizer": training.tokenizer}
    manifest = {
        "step": step, "world_size": dist.get_world_size(), "torch": torch.__version__, "model": training.settings,
        "recipes": recipes_of(training.model), "data": data, "config": training.config,
    }  # fmt: skip
    update = {name: tensor.clone() for name, tensor in training.update.items()}
    return Snapshot(step, {**_tensors(training), "recipes": recipes, "rng": rng, "update": update}, manifest)


def save(folder: Path, step: int, training: Training, keep: int) -> Saved:
    """Write a checkpoint of the current state of the run."""
    taken = snapshot(step, training)
    if training.device.type == "cuda":
        torch.cuda.synchronize(training.device)  # the threads of the writer read the tensors on other streams
    return write(folder, taken, keep)


def write(folder: Path, taken: Snapshot, keep: int, group: ProcessGroup | None = None) -> Saved:
    """Write checkpoint `step-N` under `folder`, then remove all but the newest `keep` checkpoints. Collective.

    `group`: process group of all ranks, which no other thread may use during the call; None: the default group. Raises
    SaveError on all ranks if one rank could not write or found a NaN or Inf; earlier checkpoints stay, and partial files are
    removed.
    """
    began, rank = time.perf_counter(), dist.get_rank()
    final, temporary = folder / f"step-{taken.step}", folder / f".step-{taken.step}.tmp"
    try:
        _check_finite(taken.tensors, group)
        _at_rank_0(lambda: _make_room(folder, temporary), group)
        try:
            dcp.save(taken.tensors, storage_writer=(writer := dcp_files.Writer(temporary)), process_group=group)
        except dcp.api.CheckpointException as error:
            raise SaveError(_reason(error)) from None
        files = {name: entry for each in rank_objects.from_all(writer.hashes, group) for name, entry in each.items()}
        left = _at_rank_0(lambda: _finish(temporary, final, {**taken.manifest, "files": files}, keep), group)
    except SaveError as error:
        if rank == 0:
            _remove(temporary)
        raise SaveError(f"{final} could not be written: {error}; earlier checkpoints are not affected") from None
    size = sum(entry["bytes"] for entry in files.values())
    return Saved(taken.step, final, size, time.perf_counter() - began, left)


def _check_finite(tensors: dict[str, Any], group: ProcessGroup | None) -> None:
    """Raise SaveError on all ranks if weights or optimizer states of a rank hold a NaN or Inf."""
    found = not_finite({name: tensors[name] for name in ("model", "optimizer")})
    for finder, reason in enumerate(rank_objects.from_all(found, group)):
        if reason is not None:
            raise SaveError(
                f"rank {finder}: {reason}, although every loss was finite; resume from an earlier checkpoint"
            )


def _at_rank_0(do: Callable[[], T], group: ProcessGroup | None) -> T:
    """Call `do` on rank 0; all ranks return the result, or raise SaveError if `do` fails."""

    def done() -> T:
        try:
            return do()
        except (OSError, ValueError) as error:
            raise SaveError(f"rank 0: {error}") from None

    return rank_objects.from_rank_0(done, group)


def _make_room(folder: Path, temporary: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*.tmp"):
        _remove(leftover)
    temporary.mkdir()


def _remove(path: Path) -> None:
    """Remove a folder or a file, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _finish(temporary: Path, final: Path, manifest: dict[str, Any], keep: int) -> list[str]:
    """Check that the index of torch and the hashes of all ranks list the same files, and that each file is in the folder with
    the right size; then write the manifest, rename the folder, and remove old checkpoints. Runs on rank 0.

    Returns the names of old checkpoints that could not be removed; that is not an error."""
    dcp_files.check_index(temporary, manifest["files"])
    if reason := damage(temporary, manifest["files"], share=()):
        raise ValueError(f"{reason}, as when ranks do not share this folder")
    write_manifest(temporary, manifest)
    if final.exists():
        _retire(final)
    temporary.rename(final)
    for old in complete(final.parent)[:-keep]:
        with contextlib.suppress(OSError):  # the older checkpoint remains
            _retire(old)
    for retired in final.parent.glob(".step-*.tmp"):
        _remove(retired)
    return [left.name for left in (*complete(final.parent)[:-keep], *final.parent.glob(".step-*.tmp"))]


def _retire(finished: Path) -> None:
    """Rename a checkpoint before its removal, so that no partly removed checkpoint keeps a valid name."""
    finished.rename(finished.with_name(f".{finished.name}.old.tmp"))


def _reason(error: dcp.api.CheckpointException) -> str:
    """Return the error of the first failing rank, on one line."""
    rank, (failure, _) = min(error.failures.items())
    return f"rank {rank}: {type(failure).__name__}: {' '.join(str(failure).split())}"


@dataclass(frozen=True)
class Opened:
    """Checkpoint whose files were checked: manifest, index of the tensors, and a log line about the check of hashes."""

    manifest: dict[str, Any]
    index: Metadata
    remark: str


def opened(path: Path, way_out: WayOut = way_out) -> Opened:
    """Check all files of a checkpoint, and return its manifest and index. Collective; also works without a process group.

    Raises CheckpointError on all ranks for a torn or foreign checkpoint, with the remedy of `way_out`.
    """
    manifest = rank_objects.from_rank_0(lambda: read_manifest(path, way_out))
    remark = _check_files(path, manifest["files"], way_out)
    try:
        index = dcp_files.check_index(path, manifest["files"])
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {way_out(path)}") from None
    return Opened(manifest, index, remark)


def load(path: Path, training: Training) -> Loaded:
    """Restore the state `training` from a checkpoint that was saved on this or another mesh. The model must not have run yet.

    Raises CheckpointError on all ranks for a torn or foreign checkpoint, and for a checkpoint of another model, other data,
    other recipes or another kind of optimizer.
    """
    found = opened(path)
    manifest, index = found.manifest, found.index
    try:
        differing = changes(manifest["config"], training.config)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {way_out(path)}") from None
    _check_fits(path, manifest, training)
    make_state(training.optimizer)
    state, rank = {**_tensors(training), "recipes": saved_recipes(path, index)}, f"rank{dist.get_rank()}"
    _check_states(path, index, state["optimizer"])
    differing_averages = optimizer_conversion.take_differing(state["optimizer"], index)
    kept = {name: each for name, each in training.update.items() if f"update.{name}" in index.state_dict_metadata}
    if kept:
        state["update"] = kept
    elif training.update:
        differing.append("the checkpoint has no gradient norms: spikes are not skipped until enough norms are recorded")
    same_ranks = manifest["world_size"] == dist.get_world_size()
    if same_ranks:
        state["rng"] = {rank: _rng(training.device)}
    try:
        dcp.load(state, storage_reader=dcp_files.Reader(path, index))
        optimizer_conversion.convert(
            differing_averages, index, lambda room: dcp.load(room, storage_reader=dcp_files.Reader(path, index))
        )
        told = dlp.load_state_dict(training.model, state["recipes"], recipe_files=training.recipe_files)
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}; {way_out(path)}") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} does not fit this run's recipes: {error}; set the layer groups of the checkpoint"
        ) from error
    if same_ranks:
        _set_rng(state["rng"][rank], training.device)
    return Loaded(manifest["step"], [found.remark, *differing, *told], manifest["config"])


def _check_files(path: Path, files: dict[str, Any], way_out: WayOut) -> str:
    """Check the sizes of all files, and the hashes of this rank's share of the files; return a log line with size and time.
    Raises CheckpointError on all ranks if one rank finds damage."""
    began, (rank, world) = time.perf_counter(), rank_objects.place()
    found = rank_objects.from_all(damage(path, files, share=sorted(files)[rank::world]))
    for finder, reason in enumerate(found):
        if reason is not None:
            seen = "" if all(each == reason for each in found) else f" (found by rank {finder})"
            raise CheckpointError(f"{path} is torn: {reason}{seen}; {way_out(path)}")
    size = sum(entry["bytes"] for entry in files.values())
    return f"hashes of {len(files)} files match the manifest: {_cost(size, time.perf_counter() - began)}"


def saved_recipes(path: Path, index: Metadata, way_out: WayOut = way_out) -> dict[str, Tensor]:
    """Return uninitialized tensors with the shapes and dtypes of the recipe state in a checkpoint, by name."""
    try:
        return {
            key.removeprefix("recipes."): torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in index.state_dict_metadata.items()
            if key.startswith("recipes.") and isinstance(entry, TensorStorageMetadata)
        }
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = f"its recipe state is invalid ({error})"
        raise CheckpointError(f"{path} cannot be read: {reason}; {way_out(path)}") from None


def check_model(
    path: Path, manifest: Mapping[str, Any], settings: Mapping[str, Any], way_out: WayOut = way_out
) -> None:
    """Raise CheckpointError if `[model]` of a checkpoint differs from `settings`, `[model]` of this run as a dict."""
    for key, now in settings.items():
        saved = manifest["model"].get(key, MODEL_DEFAULTS.get(key))
        if saved != now:
            raise CheckpointError(
                f"{path} is of another model: its [model] {key} is {saved!r}, this run's is {now!r}; {way_out(path)}"
            )


def _check_states(path: Path, index: Metadata, states: dict[str, dict[str, Any]]) -> None:
    """Raise CheckpointError if the checkpoint lacks an optimizer state of this run: the momentum of Muon, or an average of
    AdamW."""
    for name, state in states.items():
        for key in state.keys() - {"step"}:
            if not optimizer_conversion.saved_form(index, f"optimizer.{name}.{key}"):
                kind = "another kind of optimizer: Muon stores one momentum per matrix, AdamW two averages"
                raise CheckpointError(
                    f"{path} has no {key} of {name}; it is of {kind}; use [train] optimizer of the saved run, or "
                    f"start from the weights of the checkpoint by [train] init_from"
                )


def _check_fits(path: Path, manifest: dict[str, Any], training: Training) -> None:
    check_model(path, manifest, training.settings)
    if manifest["step"] == 0:
        raise CheckpointError(
            f"{path} has only weights: set [train] init_from to this path instead of [checkpoint] resume"
        )
    if missing := training.data.state_dict().keys() - manifest["data"].keys():
        reason = f"its data lacks {', '.join(sorted(missing))}"
        raise CheckpointError(f"{path} is torn: {reason}; {way_out(path)}")
    try:
        training.data.load_state_dict(manifest["data"])
    except ValueError as error:
        raise CheckpointError(f"{path} is of another run: {error}") from None


def changes(before: str, now: str) -> list[str]:
    """Return a log line for each setting that differs between two configs (TOML), without `[run]` and `[checkpoint]`:
    "changed since then: train.lr was 0.003, now 0.001"."""
    old, new = _settings(before), _settings(now)
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"changed since then: {key} was {old.get(key, 'unset')}, now {new.get(key, 'unset')}" for key in differing]


def _settings(config: str) -> dict[str, Any]:
    """Return the settings of a config (TOML) by dotted name, without `[run]` and `[checkpoint]`."""
    tables = tomllib.loads(config)
    try:
        groups = {f"groups.{group['name']}": group for group in tables.pop("groups")}
    except (KeyError, TypeError) as error:
        raise ValueError(f"[[groups]] of its config is invalid: {error}") from None
    chosen = {name: table for name, table in {**tables, **groups}.items() if name not in ("run", "checkpoint")}
    return {f"{name}.{key}": value for name, table in chosen.items() for key, value in table.items()}
