"""The writer of a rank's files: threads, hashes taken while files are written, and errors of a thread."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from launch.checkpoint import dcp_files, manifest
from launch.checkpoint.dcp_files import INDEX, Reader, Writer, check_index
from launch.checkpoint.manifest import hashed

TENSORS = {f"w{i}": torch.arange(1000.0 * (i + 1)) for i in range(5)}


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    monkeypatch.setattr(dcp_files, "threads_of_rank", lambda: 4)
    monkeypatch.setattr(manifest, "PIECE", 4096)  # several pieces per file, the last of which is incomplete


def save(path: Path) -> Writer:
    writer = Writer(path)
    dcp.save(dict(TENSORS), storage_writer=writer, no_dist=True)
    return writer


def test_threads_write_shares_of_about_equal_size_and_hash_them(tmp_path):
    writer = save(tmp_path / "a")
    assert torch.serialization.get_crc32_options(), "the process's own setting is restored"
    for path in (tmp_path / "a").glob("*.distcp"):
        assert {entry.CRC for entry in zipfile.ZipFile(path).infolist()} == {0}, (
            "the last tensor of the file has no checksum"
        )
    names = {f"__0_{i}_0.distcp" for i in range(4)} | {INDEX}
    assert writer.hashes == {path.name: hashed(path) for path in (tmp_path / "a").iterdir()}
    assert writer.hashes.keys() == names
    index = check_index(tmp_path / "a", names)
    read = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(read, storage_reader=Reader(tmp_path / "a", index), no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    sizes = sorted(entry["bytes"] for name, entry in writer.hashes.items() if name != INDEX)
    assert sizes[-1] < 2 * sizes[0], "w0 and w1 share a file"


def test_an_error_of_one_thread_is_the_error_of_the_save(tmp_path, monkeypatch):
    write = manifest.HashedFile.write

    def fails(self, data):
        if Path(self.name).name == "__0_2_0.distcp":
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(manifest.HashedFile, "write", fails)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(tmp_path / "a")
    assert isinstance(caught.value.failures[0][0], OSError)


@pytest.mark.parametrize("sizes", [[], [1], [4096], [4095, 2, 9000], [8192, 1]])
def test_a_hashed_file_has_the_hash_of_the_closed_file(tmp_path, sizes):
    with manifest.HashedFile(tmp_path / "a") as file:
        for size in sizes:
            assert file.write(bytes(range(256)) * (size // 256) + bytes(size % 256)) == size
        assert file.tell() == sum(sizes)
    assert file.entry() == hashed(tmp_path / "a")
