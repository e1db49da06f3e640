"""Readers and writers of the files of torch.distributed.checkpoint (DCP): reading runs no code from the files, and a failed
write raises the OSError behind the failure.

The index `.metadata` of DCP is a pickle, and unpickling runs any code that the pickle names. The unpickler of this module
accepts only the classes of an index, paths, and dtypes, sizes and layouts of torch. Every entry must be a tensor in a file that
the manifest lists: DCP loads tensors by `torch.load` with weights_only=True, but other entries by an unrestricted `torch.load`.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import pickle
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import _get_layout, get_crc32_options, set_crc32_options

from launch.checkpoint import manifest
from launch.checkpoint.manifest import HashedFile

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
    """Read the index of a checkpoint without running code from the file. Raises ValueError with the reason if the file is not
    an index of tensors."""
    try:
        with (path / INDEX).open("rb") as file:
            found = _Unpickler(file).load()
    except Exception as error:  # a damaged pickle may raise any exception
        raise ValueError(f"{INDEX} is no index of tensors ({type(error).__name__}: {error})") from None
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise ValueError(f"{INDEX} is no index of tensors (it holds a {type(found).__name__})")
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{INDEX} is no index of tensors ({name!r} is not a tensor)")
    return found


def files_of(index: Metadata) -> set[str]:
    """Return the names of the files that hold the tensors of an index. Raises ValueError if the index lacks file names, or if
    DCP has transformed a file (for example, compressed it)."""
    places = list(index.storage_data.values()) if isinstance(index.storage_data, dict) else []
    known = [
        place for place in places if isinstance(place, filesystem._StorageInfo) and not place.transform_descriptors
    ]
    if not places or len(known) < len(places):
        raise ValueError(f"{INDEX} does not say in which files the tensors are")
    return {place.relative_path for place in known}


def check_index(path: Path, files: Collection[str]) -> Metadata:
    """Return the index of a checkpoint. Raises ValueError with the reason if the index is invalid, or if `files` (the names in
    the manifest) are not exactly the index and the files that the index names."""
    index = read_index(path)
    if differing := sorted((files_of(index) | {INDEX}).symmetric_difference(files), key=str):
        raise ValueError(f"{INDEX} and the manifest list different files, first {differing[0]!r}")
    return index


class Reader(dcp.FileSystemReader):
    """DCP reader that uses an index from `check_index` and does not unpickle `.metadata` again."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class _Files(filesystem.FileSystem):
    """DCP file system that hashes files while they are written. If writing fails, the OSError behind the failure is raised
    (a full disk, for example); torch's archive writer would hide it. `hashes`: size and hash of each finished file, by name."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        try:
            with HashedFile(path) as stream:
                yield stream
        except Exception as error:
            raise _cause(error) from None
        self.hashes[Path(path).name] = stream.entry()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.hashes[Path(new_path).name] = self.hashes.pop(Path(path).name)


def _cause(error: BaseException) -> BaseException:
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def threads_of_rank() -> int:
    """Return the number of threads that write the files of a rank: the cores per rank of this host, from 1 to 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, len(os.sched_getaffinity(0)) // ranks))


class Writer(dcp.FileSystemWriter):
    """DCP writer that writes one file per thread of a rank, and at most one file per 64 MiB of tensors.

    With `file_each` it writes one file per tensor, one after the other, because torch keeps all tensors of a file in memory
    until the file is complete. `hashes`: size and hash of each file of this rank, by name.

    Two features of torch's writer are not used: its threads, which lose errors, and its copies from a GPU ahead of the write,
    which allocate pinned memory. Archive records have no CRC-32 checksums: the manifest has stronger hashes of all files.
    """

    def __init__(self, path: Path, *, file_each: bool = False) -> None:
        super().__init__(path, single_file_per_rank=not file_each, per_thread_copy_ahead=0)
        self._files = _Files()
        self.fs: Any = self._files

    @property
    def hashes(self) -> dict[str, dict[str, Any]]:
        return self._files.hashes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        checksums = get_crc32_options()
        try:
            if not self.single_file_per_rank:
                return self._without_checksums(plan, planner)
            return self._in_threads(plan, planner)
        finally:
            set_crc32_options(checksums)

    def _without_checksums(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        set_crc32_options(False)  # applies to this thread in newer versions of torch, to the process in older versions
        return super().write_data(plan, planner)

    def _in_threads(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix, size = plan.storage_data.prefix, sum(map(_bytes, plan.items))
        shares = [
            replace(plan, items=items, storage_data=filesystem._StoragePrefix(f"{prefix}{i}_"))
            for i, items in enumerate(_shares(plan.items, min(threads_of_rank(), math.ceil(size / manifest.PIECE))))
        ]
        written: Future[list[WriteResult]] = Future()
        with ThreadPoolExecutor(len(shares) or 1, thread_name_prefix="write") as threads:
            parts = [threads.submit(self._without_checksums, share, planner) for share in shares]
            written.set_result([result for part in parts for result in part.result().wait()])
        return written


def _shares(items: list[WriteItem], count: int) -> list[list[WriteItem]]:
    """Divide items into at most `count` lists with similar numbers of bytes."""
    shares: list[tuple[int, int, list[WriteItem]]] = [(0, i, []) for i in range(min(max(count, 1), len(items)))]
    for item in sorted(items, key=_bytes, reverse=True):
        size, i, share = shares[0]
        share.append(item)
        heapq.heapreplace(shares, (size + _bytes(item), i, share))
    return [share for _, _, share in sorted(shares)]


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
