"""Read single tensors from a folder of safetensors files, and write such a folder with files of limited size.

Other weight files are not read: they are pickles, which run code when they are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlp.flows.compressed_models import INDEX, write_file
from launch.common.optional_packages import need

ONE = "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Entry:
    """File, shape and dtype of a tensor in a folder."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def entries(folder: Path) -> dict[str, Entry]:
    """Read the headers of all files, and return the entries of all tensors by name. Raises ValueError for a missing or damaged
    file, and for a dtype that is not in `DTYPES`."""
    found: dict[str, Entry] = {}
    for file, names in _files(folder).items():
        with _opened(file) as tensors:
            there = set(tensors.keys())
            for name in sorted(there) if names is None else names:
                if name not in there:
                    raise ValueError(
                        f"{file}: no tensor {name} in this file, although {INDEX} lists it; fetch the folder again"
                    )
                part = tensors.get_slice(name)
                dtype = part.get_dtype()
                if dtype not in DTYPES:
                    kinds = ", ".join(DTYPES)
                    raise ValueError(f"{file}: {name} is stored as {dtype}, expected one of {kinds}; convert it first")
                found[name] = Entry(file, tuple(part.get_shape()), DTYPES[dtype])
    return found


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files of a folder, with the names of the tensors to read from each file. If the folder has `ONE`, the result
    is this file with None, which means all tensors. Otherwise the index lists the files and names."""
    if (folder / ONE).is_file():
        return {folder / ONE: None}
    path = folder / INDEX
    if not path.is_file():
        others = ", ".join(sorted(each.name for each in folder.glob("*.bin"))) or "no *.bin file either"
        raise ValueError(
            f"{folder}: expected {ONE} or {INDEX}, found {others}: save the weights as safetensors, with transformers"
        )
    try:
        places = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        files: dict[Path, list[str] | None] = {}
        for name, file in places.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is no file beside it")
            files.setdefault(folder / file, []).append(name)  # type: ignore[union-attr]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not an index of safetensors ({type(error).__name__}: {error}); fetch the folder again"
        ) from None
    return files


def _opened(file: Path) -> Any:
    package = need("safetensors", "safetensors", f"{file}: a file of safetensors")
    if not file.is_file():
        raise ValueError(f"{file}: no such file, but {INDEX} names it; fetch the folder again")
    try:
        return package.safe_open(file, framework="pt")
    except Exception as error:  # SafetensorError, which cannot be named without the package
        raise ValueError(f"{file}: damaged or no safetensors ({error}); fetch it again") from None


def read(entry: Entry, name: str) -> Tensor:
    """Read the tensor `name` into memory."""
    with _opened(entry.file) as tensors:
        found: Tensor = tensors.get_tensor(name)
        return found


def write(
    folder: Path, tensors: Mapping[str, Tensor], load: Callable[[Sequence[str]], dict[str, Tensor]], limit: int,
    header: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write safetensors files into `folder`, and the index if there are several files.

    tensors  all tensors by name, on the meta device
    load     function that returns the tensors with the given names; called once per file
    limit    largest size of a file in bytes; a larger tensor gets a file of its own
    header   metadata for the headers of the files; read after `load` of each file, since `load` may add entries
    """
    need("safetensors.torch", "safetensors", f"{folder}: a folder of safetensors")
    parts = list(_split(tensors, limit))
    places = {}
    for number, names in enumerate(parts, start=1):
        file = ONE if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_file(folder / file, load(names), header or {})
        places.update(dict.fromkeys(names, file))
    if len(parts) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1))


def _split(tensors: Mapping[str, Tensor], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names
