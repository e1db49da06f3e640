"""Write checkpoints that hold only weights, one tensor at a time; read weights and recipe state of any checkpoint.

A checkpoint of weights has the same format as a checkpoint of a run (checkpoint/save_load.py): files of torch, and a manifest
with hashes. Its step is 0, and it has no optimizer states.
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
from dlp.parallel.model.state import without_changes
from launch.checkpoint import dcp_files, save_load
from launch.checkpoint.manifest import CheckpointError, hashed, other_weights, write_manifest
from launch.common.atomic_io import new_folder, rewrite
from launch.models.decoder import settings_of
from launch.models.settings import Model

PREFIX = "model."


class _OneByOne(DefaultSavePlanner):
    """DCP save planner that plans with meta tensors, and calls `read` for each tensor when the tensor is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.read = read

    def lookup_object(self, index: Any) -> Tensor:
        return self.read(index.fqn.removeprefix(PREFIX))


def write(
    folder: Path, model: Model, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], *, config: str,
    tokenizer: str | None,
) -> int:  # fmt: skip
    """Write config.toml and a checkpoint of weights. Return the number of bytes of DCP's files (tensors and index).

    model      settings of the model, for the manifest
    tensors    names, shapes and dtypes, as tensors on the meta device
    read       function that returns the tensor with a given name
    config     text of config.toml
    tokenizer  hash of the tokenizer file; None: unknown

    If an error is raised, no files are left.
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
    """Replace a CheckpointException of torch by the error that caused it on the first failing rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist is intended
            yield
    except dcp.api.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class Reader:
    """Reader of single tensors of a checkpoint, without a process group."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened = save_load.opened(path, other_weights)

    def model(self) -> Model:
        """Return `[model]` of the checkpoint. Raises CheckpointError if these settings are not valid in this version."""
        try:
            return Model(**self.opened.manifest["model"])
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read: the model is unknown ({error}); use the version of dlp that saved the checkpoint"
            ) from None

    def dtypes(self, names: Collection[str]) -> set[torch.dtype]:
        """Return the dtypes of the named tensors in the checkpoint; names that the checkpoint lacks are ignored."""
        there = (self.opened.index.state_dict_metadata.get(PREFIX + name) for name in names)
        return {entry.properties.dtype for entry in there if isinstance(entry, TensorStorageMetadata)}

    def names(self) -> set[str]:
        """Return the names of all weights in the checkpoint."""
        return {key.removeprefix(PREFIX) for key in self.opened.index.state_dict_metadata if key.startswith(PREFIX)}

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read tensors to the CPU. `tensors`: names, shapes and dtypes, as tensors on any device."""
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
    """Copy weights of a checkpoint into `tensors`, which may be DTensors and of any dtype. Collective unless `no_dist`.

    Raises CheckpointError for a tensor that the checkpoint lacks or stores with a different shape.
    """
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
    """Fill the parameters of a model that has not run yet from a checkpoint whose `[model]` equals `settings`. Collective.

    Returns the opened checkpoint and log lines. Raises CheckpointError on all ranks if the checkpoint is damaged or of another
    model.
    """
    opened = save_load.opened(path, other_weights)
    save_load.check_model(path, opened.manifest, settings, other_weights)
    fill(path, opened, {name: parameter.detach() for name, parameter in model.named_parameters()})
    return opened, [opened.remark]


def load_recipes(
    path: Path, model: nn.Module, opened: save_load.Opened, recipe_files: Collection[Path], unchanged: Collection[str] = ()
) -> list[str]:  # fmt: skip
    """Restore the recipe state of a checkpoint, such as delayed scales. Collective.

    unchanged: layers that keep the recipes of `model`; recipe changes of these layers during the training are not repeated.
    Returns log lines about differences; an empty list if the checkpoint has no recipe state. Raises CheckpointError if the
    state cannot be read or does not fit the recipes.
    """
    state = save_load.saved_recipes(path, opened.index, other_weights)
    if not state:
        return []
    with _cause():
        dcp.load({"recipes": state}, storage_reader=dcp_files.Reader(path, opened.index))
    try:
        state = without_changes(state, unchanged) if unchanged else state
        return list(dlp.load_state_dict(model, state, recipe_files=recipe_files))
    except ValueError as error:
        raise CheckpointError(f"{path} does not fit these recipes: {error}; set the recipes of the training") from error


def check_tokenizer(path: Path, manifest: Mapping[str, Any], folder: str, digest: str | None) -> None:
    """Raise CheckpointError if `digest`, the hash of the tokenizer of the data in `folder`, differs from the hash in the
    manifest. `digest` is "" for data whose tokens are bytes, and None for an unknown tokenizer, which is not checked."""
    learned = manifest["data"].get("tokenizer")
    if learned is not None and digest is not None and learned != digest:
        raise CheckpointError(
            f"{folder} was prepared with another tokenizer than the training data of {path}: {_said(digest)} instead "
            f"of {_said(learned)}; prepare data with the tokenizer.json from the folder of the model's weights"
        )


def _said(digest: str) -> str:
    return f"a file whose SHA-256 begins {digest[:16]}" if digest else "bytes"
