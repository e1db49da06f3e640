"""Folders of checkpoints, without ranks: which checkpoint is loaded, and which folders are refused, for example incomplete or
damaged ones."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

import launch.checkpoint.manifest
from launch.checkpoint.dcp_files import check_index
from launch.checkpoint.manifest import (
    FORMAT,
    TYPES,
    CheckpointError,
    complete,
    damage,
    digest,
    hashed,
    read_manifest,
    resolve,
)
from launch.checkpoint.save_load import changes
from launch.config.run_config import load, to_toml
from launch.report.run_dir import move_aside
from tests.refusals import must_raise


def make(folder: Path, step: int, **differing: Any) -> Path:
    """Create a folder that looks like a finished checkpoint, and return it. `differing`: changed entries of the
    manifest."""
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"0123")
    manifest = {key: kind() for key, kind in TYPES.items()}
    manifest |= {"format": FORMAT, "step": step, "files": {"__0_0.distcp": hashed(path / "__0_0.distcp")}} | differing
    write(path, manifest)
    return path


def write(path: Path, manifest: dict[str, Any]) -> None:
    (path / "manifest.json").write_text(json.dumps(manifest | {"digest": digest(manifest)}))


def refusal(path: Path) -> str:
    said = must_raise(CheckpointError, read_manifest, path)
    assert "\n" not in said
    return said


def test_auto_is_the_finished_one_with_the_highest_step(tmp_path):
    assert resolve("auto", tmp_path) is None and resolve("auto", tmp_path / "none yet") is None
    for step in (100, 1000, 20):
        make(tmp_path, step)
    for leftover in (".step-2000.tmp", "step-1000.1", "step-", "step-best", "step-²", "step-0100"):
        (tmp_path / leftover).mkdir()
    (tmp_path / "step-30").write_text("no folder")
    assert [path.name for path in complete(tmp_path)] == ["step-20", "step-100", "step-1000"]
    assert resolve("auto", tmp_path) == tmp_path / "step-1000"
    assert resolve("none", tmp_path) is None
    assert resolve(str(tmp_path / "step-20"), Path("elsewhere")) == tmp_path / "step-20"
    with pytest.raises(CheckpointError, match=r"^--checkpoint.resume lost: no such checkpoint; expected auto, none or"):
        resolve("lost", tmp_path)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_stray_entry_that_is_named_like_the_newest_checkpoint_is_refused(tmp_path, kind):
    stray = tmp_path / "step-8"
    stray.write_text("") if kind == "file" else stray.symlink_to(tmp_path / "gone")
    sentence = f"^{stray} is foreign: a file with the name of the newest checkpoint; rename or remove it"
    with pytest.raises(CheckpointError, match=f"{sentence}$"):
        resolve("auto", tmp_path)
    six = make(tmp_path, 6)
    with pytest.raises(CheckpointError, match=f"{sentence}, or use --checkpoint.resume {six}$"):
        resolve("auto", tmp_path)
    assert resolve(str(six), tmp_path) == six
    make(tmp_path, 10)
    assert resolve("auto", tmp_path) == tmp_path / "step-10"


def test_a_whole_checkpoint_is_read(tmp_path):
    assert read_manifest(make(tmp_path, 3))["step"] == 3


def test_torn_ones_are_refused_by_name(tmp_path):
    path = make(tmp_path, 100)
    way_out = "use --checkpoint.resume none to start again"
    (path / "manifest.json").write_text('{"format": "dlp ch')
    assert refusal(path).startswith(f"{path} is torn: manifest.json is not JSON (Unterminated string")
    (path / "manifest.json").write_bytes(b"\xff")
    assert refusal(path).startswith(f"{path} is torn: manifest.json is not JSON ('utf-8' codec")
    (path / "manifest.json").write_text("[" * 100_000)
    assert refusal(path).startswith(f"{path} is torn: manifest.json is not JSON (maximum recursion")
    (path / "manifest.json").write_text(json.dumps({"format": FORMAT, "step": 1}))
    assert refusal(path).startswith(
        f"{path} is torn: manifest.json lacks config, data, digest, files, model, recipes, torch, wo"
    )
    assert refusal(path).endswith(f"; {way_out}")


def test_damaged_files_are_found_by_size_and_hash(tmp_path):
    path = make(tmp_path, 100)
    file, files = path / "__0_0.distcp", read_manifest(path)["files"]
    assert damage(path, files, files) is None
    file.write_bytes(b"0122")
    assert damage(path, files, files) == "__0_0.distcp has another hash than the manifest states"
    assert damage(path, files, ()) is None, "another rank's share"
    file.write_bytes(b"012")
    assert damage(path, files, ()) == "__0_0.distcp has 3 bytes, expected 4 bytes"
    file.unlink()
    assert damage(path, files, ()) == "__0_0.distcp is missing, expected 4 bytes"


def test_a_hash_has_every_byte_of_every_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.checkpoint.manifest, "PIECE", 1000)
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 12)
    whole = hashed(file)
    for place in (0, 999, 1000, 2999, 3000, 3071):
        flipped = bytearray(file.read_bytes())
        flipped[place] ^= 4
        (tmp_path / "flipped").write_bytes(flipped)
        assert hashed(tmp_path / "flipped")["sha256"] != whole["sha256"], place
    (tmp_path / "swapped").write_bytes(
        file.read_bytes()[1000:2000] + file.read_bytes()[:1000] + file.read_bytes()[2000:]
    )
    assert hashed(tmp_path / "swapped")["sha256"] != whole["sha256"]


@pytest.mark.parametrize("signed", [True, False], ids=["digest renewed", "as edited"])
def test_an_edited_manifest_is_one_sentence(tmp_path, signed):
    path = make(tmp_path, 100)
    good = json.loads((path / "manifest.json").read_text())
    values = [None, True, -1, 1.5, 10**40, "x", "", [], [1], {}, {"a": 1}, {"__0_0.distcp": 4}, {"../x": {}}, {"": {}}]
    values += [{"__0_0.distcp": {"bytes": "4", "sha256": ""}}, {"..": {"bytes": 4, "sha256": ""}}, {"a\0": {}}]
    said = 0
    for key, value in ((key, value) for key in good for value in values):
        if good[key] == value or (signed and type(value) is TYPES[key] and value != -1 and key != "files"):
            continue  # the manifest is valid; whether it fits a run is checked elsewhere
        if signed and key == "files" and value == {}:
            continue
        edited = {**good, key: value}
        (path / "manifest.json").write_text(json.dumps(edited))
        if signed and key != "digest":
            write(path, edited)
        assert re.match(rf"{path} is (torn: manifest.json|foreign: its format is) ", refusal(path))
        said += 1
    assert said > 100


def test_foreign_ones_are_refused_by_name(tmp_path):
    path = make(tmp_path, 100, format="dlp checkpoint 9")
    assert refusal(path).startswith(f"{path} is foreign: its format is 'dlp checkpoint 9', expected '{FORMAT}'; use ")
    (path / "manifest.json").write_text("[]")
    assert refusal(path).startswith(f"{path} is foreign: its format is None, expected")
    (path / "manifest.json").unlink()
    assert refusal(path).startswith(f"{path} is foreign: it has no manifest.json; use ")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refusal(empty).startswith(f"{empty} is foreign: it has no manifest.json; use --checkpoint.resume none")


def test_a_folder_of_checkpoints_and_a_step_that_is_not_there_are_told_where_some_are(tmp_path):
    steps = [tmp_path / "checkpoints" / f"step-{n}" for n in (8, 16)]
    for step in steps:
        step.mkdir(parents=True)
    assert refusal(tmp_path).startswith(
        f"{tmp_path} is the folder of a run, whose newest checkpoint is {steps[1]}; use "
    )
    assert refusal(steps[0].parent).startswith(f"{steps[0].parent} is the folder of its checkpoints, whose newest ")
    assert refusal(steps[0].with_name("step-9")).startswith(
        f"{steps[0].parent}/step-9 is not there, only step-8, step-16; "
    )
    assert refusal(tmp_path / "x").startswith(f"{tmp_path}/x is not there; ")


def test_the_way_out_names_the_checkpoint_before(tmp_path):
    for step in (20, 100, 1000):
        make(tmp_path, step, format="torn")
    assert f"use --checkpoint.resume {tmp_path}/step-100 to continue from that one, or" not in refusal(tmp_path)
    assert f"use --checkpoint.resume {tmp_path}/step-100 to continue" in refusal(tmp_path / "step-1000")
    assert f"use --checkpoint.resume {tmp_path}/step-20 to continue" in refusal(tmp_path / "step-100")
    assert "; use --checkpoint.resume none to start again" in refusal(tmp_path / "step-20")


def test_changed_settings_are_named_and_those_of_the_folder_are_not():
    before = to_toml(load("tiny"))
    now = to_toml(load("tiny", ["--train.lr=1e-4", "--recipe=bf16", "--run.dir=x", "--checkpoint.every=7"]))
    assert changes(before, before) == []
    assert changes(before, now) == [
        "changed since then: train.lr was 0.003, now 0.0001",
        "changed since then: groups.default.recipe was fp8_current, now bf16",
    ]
    fewer = to_toml(load("tiny", ["--groups.edges.siblings=false"]))
    assert changes(before, fewer) == ["changed since then: groups.edges.siblings was unset, now False"]


def test_moving_aside_never_replaces(tmp_path):
    for expected in ("run.1", "run.2"):
        (tmp_path / "run").mkdir()
        assert move_aside(tmp_path / "run") == tmp_path / expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.1", "run.2"]


def test_moving_aside_needs_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (Path(), Path("a", "..")):
        (tmp_path / "a").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=f"expected a path that ends in the name.*; use --run.dir {tmp_path}$"):
            move_aside(path)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (7, ".metadata is no index of tensors (it holds a int)"),
        (Metadata(state_dict_metadata={"a": 7}), ".metadata is no index of tensors ('a' is not a tensor)"),  # type: ignore[dict-item]
        (Metadata(state_dict_metadata={}), ".metadata does not say in which files the tensors are"),
        (
            Metadata(state_dict_metadata={}, storage_data={1: 2}),
            ".metadata does not say in which files the tensors are",
        ),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, index, reason):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="^" + re.escape(reason) + "$"):
        check_index(tmp_path, ["__0_0.distcp"])


def test_a_config_without_groups_is_refused():
    for config in ("", "groups = 3", "groups = [{}]"):
        with pytest.raises(ValueError, match=r"^\[\[groups\]\] of its config is invalid: "):
            changes(config, config)
