"""Checkpoints of weights, without optimizer and data, written and read one tensor at a time; models filled from any checkpoint.

A folder of them is a checkpoint like those of a run (checkpoint/save_load.py): torch's files, and a manifest with their hashes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
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
from launch.models.settings import Model

PREFIX = "model."


def settings_of(model: Model) -> dict[str, Any]:
    """What must be equal between a checkpoint and a run: all but how the same parameters are computed with."""
    return {key: value for key, value in asdict(model).items() if key != "fused"}


class _OneByOne(DefaultSavePlanner):
    """Plans by tensors without memory, and reads each when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.read = read

    def lookup_object(self, index: Any) -> Tensor:
        return self.read(index.fqn.removeprefix(PREFIX))


def write(
    folder: Path, model: Model, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], *, config: str,
    tokenizer: str | None,
) -> int:  # fmt: skip
    """Make a checkpoint of `tensors`, names with shapes and dtypes, each as `read` returns it, and beside them the file
    config.toml; returns the bytes of the tensors' files. tokenizer: the hash of its file. ValueError and OSError leave nothing
    behind."""
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
    """What a rank raised, in place of torch's report of it."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no ranks are meant
            yield
    except dcp.api.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class Reader:
    """A checkpoint whose tensors are read by name, without ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened = save_load.opened(path, other_weights)

    def model(self) -> Model:
        """ValueError for a checkpoint of a model that is not here."""
        try:
            return Model(**self.opened.manifest["model"])
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read: its model is none that is known here ({error}); use the version "
                f"of dlp that saved the checkpoint"
            ) from None

    def dtypes(self, names: Collection[str]) -> set[torch.dtype]:
        """The dtypes in which tensors are stored, as far as the checkpoint has them."""
        there = (self.opened.index.state_dict_metadata.get(PREFIX + name) for name in names)
        return {entry.properties.dtype for entry in there if isinstance(entry, TensorStorageMetadata)}

    def names(self) -> set[str]:
        """The names of its weights."""
        return {key.removeprefix(PREFIX) for key in self.opened.index.state_dict_metadata if key.startswith(PREFIX)}

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of these names, shapes and dtypes."""
        found = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
        fill(self.path, self.opened, found, no_dist=True)
        return found


def fill(path: Path, opened: save_load.Opened, tensors: Mapping[str, Tensor], *, no_dist: bool = False) -> None:
    """Write a checkpoint's weights into tensors of any dtype, sharded or whole; all ranks together, or one without others.
    CheckpointError naming a tensor that is not there or has another shape."""
    there = opened.index.state_dict_metadata
    for name, tensor in tensors.items():
        entry = there.get(PREFIX + name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{path}: it has no tensor {name}, which this model has; choose a checkpoint of this [model]"
            )
        if tuple(entry.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{path}: its tensor {name} is {list(entry.size)}, and this model's is {list(tensor.shape)}; choose a "
                f"checkpoint of this [model]"
            )
    with _cause():
        dcp.load({"model": dict(tensors)}, storage_reader=dcp_files.Reader(path, opened.index), no_dist=no_dist)


def load(path: Path, model: nn.Module, settings: Mapping[str, Any]) -> tuple[save_load.Opened, list[str]]:
    """Fill a model that has not run yet from any checkpoint of one like it, on any mesh; all ranks together. Returns what was
    found there, and remarks. CheckpointError, on all ranks, for what does not fit."""
    opened = save_load.opened(path, other_weights)
    save_load.check_model(path, opened.manifest, settings, other_weights)
    fill(path, opened, {name: parameter.detach() for name, parameter in model.named_parameters()})
    return opened, [opened.remark]


def load_recipes(path: Path, model: nn.Module, opened: save_load.Opened, recipe_files: Collection[Path]) -> list[str]:
    """Restore what a checkpoint has of the state of recipes, as delayed scales; all ranks together. Returns what was found
    to differ. CheckpointError where it cannot be read."""
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
    """CheckpointError where a model has learned tokens of another tokenizer than the data was made with, as far as both are
    known."""
    learned = manifest["data"].get("tokenizer")
    if learned is not None and digest is not None and learned != digest:
        raise CheckpointError(
            f"{folder} is of another tokenizer than the model of {path} has learned: {_said(digest)} in place of "
            f"{_said(learned)}; give the tokenizer.json that lay beside the model's weights, and prepare data with it"
        )


def _said(digest: str) -> str:
    return f"a file whose SHA-256 begins {digest[:16]}" if digest else "bytes"
