"""Checkpoints of weights, without optimizer and data, written and read one tensor at a time; models filled from any checkpoint.

Such a checkpoint has the form of checkpoints of runs (checkpoint/save_load.py): files of torch, and a manifest with hashes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import dlp
from launch.checkpoint import dcp_files, save_load
from launch.checkpoint.manifest import CheckpointError, hashed, other_weights, write_manifest
from launch.common.atomic_io import new_folder, rewrite
from launch.models.decoder import settings_of
from launch.models.settings import Model

PREFIX = "model."


class _OneByOne(DefaultSavePlanner):
    """Save planner that plans with tensors without memory, and reads each tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.read = read

    def lookup_object(self, index: Any) -> Tensor:
        return self.read(index.fqn.removeprefix(PREFIX))


def write(
    folder: Path, model: Model, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], *, config: str,
    tokenizer: str | None,
) -> int:  # fmt: skip
    """Write a checkpoint of `tensors` (names, shapes, dtypes), each as `read` returns it, with config.toml.

    tokenizer  hash of the tokenizer file
    returns    bytes of the tensor files

    ValueError and OSError leave nothing behind.
    """
    with new_folder(folder) as work:
        with _cause():
            dcp.save(
                {"model": dict(tensors)},
                storage_writer=dcp_files.Writer(work, file_each=True),
                planner=_OneByOne(read),
                no_dist=True,
            )
        files = {path.name: hashed(path) for path in sorted(work.iterdir())}
        dcp_files.check_index(work, files)
        write_manifest(work, {
            "step": 0, "world_size": 1, "torch": torch.__version__, "model": settings_of(model), "recipes": {},
            "data": {} if tokenizer is None else {"tokenizer": tokenizer}, "config": config, "files": files,
        })  # fmt: skip
        rewrite(work / "config.toml", config)
    return sum(entry["bytes"] for entry in files.values())


@contextmanager
def _cause() -> Iterator[None]:
    """Raise the error of a rank in place of the report of torch."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # ranks are not needed
            yield
    except dcp.api.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class Reader:
    """Checkpoint whose tensors are read by name, without ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened = save_load.opened(path, other_weights)

    def model(self) -> Model:
        """Return `[model]` of the checkpoint. CheckpointError for a model that does not exist here."""
        try:
            return Model(**self.opened.manifest["model"])
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read: the model is unknown ({error}); use the version of dlp that saved the checkpoint"
            ) from None

    def dtypes(self, names: Collection[str]) -> set[torch.dtype]:
        """Return the stored dtypes of these tensors, as far as the checkpoint has them."""
        there = (self.opened.index.state_dict_metadata.get(PREFIX + name) for name in names)
        return {entry.properties.dtype for entry in there if isinstance(entry, TensorStorageMetadata)}

    def names(self) -> set[str]:
        """Return the names of all weights."""
        return {key.removeprefix(PREFIX) for key in self.opened.index.state_dict_metadata if key.startswith(PREFIX)}

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with these names, shapes and dtypes."""
        found = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
        fill(self.path, self.opened, found, no_dist=True)
        return found

    def recipe_state(self) -> dict[str, Tensor]:
        """Return the saved recipe state, such as delayed scales, by name."""
        state = save_load.saved_recipes(self.path, self.opened.index, other_weights)
        if state:
            with _cause():
                dcp.load(
                    {"recipes": state}, storage_reader=dcp_files.Reader(self.path, self.opened.index), no_dist=True
                )
        return state


def fill(path: Path, opened: save_load.Opened, tensors: Mapping[str, Tensor], *, no_dist: bool = False) -> None:
    """Copy weights of a checkpoint into tensors of any dtype, sharded or not; all ranks together, or one process without ranks.
    CheckpointError names a tensor that is missing or has another shape."""
    there = opened.index.state_dict_metadata
    for name, tensor in tensors.items():
        entry = there.get(PREFIX + name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{path}: no tensor {name}, which this model has; choose a checkpoint of this [model]"
            )
        if tuple(entry.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{path}: its tensor {name} is {list(entry.size)}, and this model's is {list(tensor.shape)}; choose a "
                f"checkpoint of this [model]"
            )
    with _cause():
        dcp.load({"model": dict(tensors)}, storage_reader=dcp_files.Reader(path, opened.index), no_dist=no_dist)


def load(path: Path, model: nn.Module, settings: Mapping[str, Any]) -> tuple[save_load.Opened, list[str]]:
    """Fill a model that has not run yet from a checkpoint of an equal model, on any mesh; all ranks together. Returns the
    opened checkpoint and remarks. CheckpointError on all ranks for a checkpoint that does not fit."""
    opened = save_load.opened(path, other_weights)
    save_load.check_model(path, opened.manifest, settings, other_weights)
    fill(path, opened, {name: parameter.detach() for name, parameter in model.named_parameters()})
    return opened, [opened.remark]


def load_recipes(path: Path, model: nn.Module, opened: save_load.Opened, recipe_files: Collection[Path]) -> list[str]:
    """Restore saved recipe state, such as delayed scales; all ranks together. Returns remarks on differences.
    CheckpointError if the state cannot be read."""
    state = save_load.saved_recipes(path, opened.index, other_weights)
    if not state:
        return []
    with _cause():
        dcp.load({"recipes": state}, storage_reader=dcp_files.Reader(path, opened.index))
    try:
        return list(dlp.load_state_dict(model, state, recipe_files=recipe_files))
    except ValueError as error:
        raise CheckpointError(f"{path} does not fit these recipes: {error}; set the recipes of the training") from error


def check_tokenizer(path: Path, manifest: Mapping[str, Any], folder: str, digest: str | None) -> None:
    """Raise CheckpointError if the tokenizer of the data differs from the tokenizer of the training, if both are known."""
    learned = manifest["data"].get("tokenizer")
    if learned is not None and digest is not None and learned != digest:
        raise CheckpointError(
            f"{folder} was prepared with another tokenizer than the training data of {path}: {_said(digest)} instead "
            f"of {_said(learned)}; prepare data with the tokenizer.json from the folder of the model's weights"
        )


def _said(digest: str) -> str:
    return f"a file whose SHA-256 begins {digest[:16]}" if digest else "bytes"
