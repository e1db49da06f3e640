"""The files of torch.distributed.checkpoint, read as data and written with their cause when they cannot be.

DCP's index `.metadata` is a pickle, and unpickling runs what a pickle names. Here it may name only the classes of an
index, torch's dtypes and sizes; every entry must be a tensor (DCP loads other entries by an unrestricted `torch.load`;
tensors it loads with weights_only=True) in a file that the manifest lists.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Collection, Iterator
from io import IOBase
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.serialization import _get_layout

INDEX = ".metadata"
CLASSES: tuple[type, ...] = (
    metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorStorageMetadata,
    metadata.TensorProperties, metadata.ChunkStorageMetadata, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
)  # fmt: skip
NAMED: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__name__): cls for cls in CLASSES},
    **{("torch", str(each).removeprefix("torch.")): each for each in vars(torch).values() if type(each) is torch.dtype},
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors has")
        return NAMED[module, name]


def read_index(path: Path) -> Metadata:
    """The index of a checkpoint's tensors, of which nothing was run. ValueError with the reason for any other file."""
    try:
        with (path / INDEX).open("rb") as file:
            found = _Unpickler(file).load()
    except Exception as error:  # what damaged bytes raise in a virtual machine for pickles is anything
        raise ValueError(f"{INDEX} is no index of tensors ({type(error).__name__}: {error})") from None
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise ValueError(f"{INDEX} is no index of tensors (it holds a {type(found).__name__})")
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{INDEX} is no index of tensors ({name!r} is none)")
    return found


def files_of(index: Metadata) -> set[str]:
    """The files that an index says hold tensors. ValueError where it does not say that."""
    places = list(index.storage_data.values()) if isinstance(index.storage_data, dict) else []
    known = [
        place for place in places if isinstance(place, filesystem._StorageInfo) and not place.transform_descriptors
    ]
    if not places or len(known) < len(places):
        raise ValueError(f"{INDEX} does not say in which files the tensors are")
    return {place.relative_path for place in known}


def check_index(path: Path, files: Collection[str]) -> Metadata:
    """The index of a checkpoint that was written as exactly these files. ValueError with the reason otherwise."""
    index = read_index(path)
    if differing := sorted((files_of(index) | {INDEX}).symmetric_difference(files), key=str):
        raise ValueError(f"{INDEX} and the manifest list different files, first {differing[0]!r}")
    return index


class Reader(dcp.FileSystemReader):
    """Reads tensors of a checkpoint whose index was checked."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class _Files(filesystem.FileSystem):
    """Raises the OSError behind a failure, as of a full disk, for which torch's writer of archives has other words."""

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            raise _cause(error) from None


def _cause(error: BaseException) -> BaseException:
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


class Writer(dcp.FileSystemWriter):
    """A file for each rank, or for each tensor: torch keeps what it wrote to a file until that is complete."""

    def __init__(self, path: Path, *, file_each: bool = False) -> None:
        super().__init__(path, single_file_per_rank=not file_each)
        self.fs = _Files()
