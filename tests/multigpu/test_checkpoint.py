"""Checkpoints on 1, 2 and 4 ranks.

Resumed runs have the bits of uninterrupted runs, other meshes load the same full tensors, checkpoints of another config
are refused, and saves that fail or are interrupted leave earlier checkpoints unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

import dlp
from dlp.quant import recipe
from launch.checkpoint import dcp_files, save_load
from launch.checkpoint.manifest import complete, damage, digest, hashed, read_manifest
from launch.checkpoint.save_load import CheckpointError
from launch.config.run_config import Config
from launch.report.run_dir import RunDir
from tests import training
from tests.cases import nightly
from tests.net import full
from tests.pool import RankError
from tests.refusals import may_raise, must_raise

pytestmark = pytest.mark.slow


def folder(config: Config) -> Path:
    return Path(config.run.dir) / "checkpoints"


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which `finished` trains the run that it copies."""
    return tmp_path_factory.mktemp("once")


@pytest.fixture
def finished(ranks, once: Path, tmp_path: Path, data: Path) -> Config:
    """Config of a run of two steps on two tp ranks. The run is trained once per module, and copied to
    `tmp_path`/run."""
    if not (once / "run").exists():
        ranks(2).run(training.run, training.config(once, data, "--train.steps=2"))
    shutil.copytree(once / "run", tmp_path / "run")
    return training.config(tmp_path, data, "--train.steps=2")


THERE_AND_BACK = "{at_step = 1, recipe = 'fp8_current'}, {at_step = 2, recipe = 'qat'}, {at_step = 3, recipe = 'mxfp8'}"
SWAPS = f"--groups.default.swap=[{THERE_AND_BACK}]"
MESHES = [
    nightly(2, ["--recipe=fp8_delayed"], id="tp2-sp-delayed"),
    # The ledger observes the third step of a process, so it observes only the uninterrupted run
    nightly(2, ["--model.fused=true"], id="tp2-sp-fused"),
    nightly(2, ["--mesh.tp=1", "--train.micro_batch=2"], id="dp2-accumulated"),
    pytest.param(
        2,
        ["--mesh.tp=1", "--train.checkpointing=full", "--train.micro_batch=2", "--recipe=qat", SWAPS],
        id="dp2-recomputed-qat-swapped-back",
    ),
    nightly(
        4,
        ["--train.checkpointing=full", "--train.micro_batch=2", "--recipe=qat", SWAPS],
        id="dp2-tp2-recomputed-qat-swapped-back",
    ),
    nightly(2, ["--mesh.tp=1", "--mesh.dp_replicate=2", "--recipe=bf16"], id="replicated2-bf16"),
]


@pytest.mark.parametrize(("world", "overrides"), MESHES)
def test_a_resumed_run_repeats_the_bits(ranks, tmp_path, data, world, overrides):
    overrides = [*overrides, "--train.steps=4"]
    whole = training.config(tmp_path, data, *overrides, f"--run.dir={tmp_path}/whole")
    ranks(world).run(training.run, whole)
    parts = [training.config(tmp_path, data, *overrides, f"--run.dir={tmp_path}/parts") for _ in range(2)]
    ranks(world).run(interrupted, parts[0], 3)
    assert [path.name for path in complete(folder(parts[0]))] == ["step-2"]
    ranks(world).run(training.run, parts[1])
    assert f"resuming from step 2 ({folder(parts[1])}/step-2)" in training.said(parts[1])
    for key in ("loss", "gradient_norm", "lr", "validation_loss"):
        assert training.metrics(parts[1], key) == training.metrics(whole, key)
    assert sorted(training.metrics(whole)) == [1, 2, 3, 4]
    assert ranks(world).run(equal_tensors, whole, parts[1]) == [True] * world


def interrupted(config: Config, steps: int) -> None:
    """Train a longer run until `steps` steps are done, and end without a final checkpoint."""
    trainer, done = training.trainer(config)
    trainer.recorder.begin(done)
    trainer.find_scales(done)
    for step in range(done, steps):
        trainer.read(trainer.train_step(step))
        if (step + 1) % config.checkpoint.every == 0:
            trainer.save(step + 1)


def restored(config: Config) -> dict[str, torch.Tensor]:
    """Return every tensor that the newest checkpoint restores, unsharded, by name."""
    trainer, done = training.trainer(config)
    assert done > 0
    flat = {}
    for kind, tensors in save_load._tensors(trainer.state).items():
        for name, value in tensors.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            flat |= {f"{kind}.{name}.{part}": full(tensor) for part, tensor in parts}
    return flat


def equal_tensors(one: Config, other: Config) -> bool:
    a, b = restored(one), restored(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


RESHAPED = [
    nightly(2, [], 1, ["--mesh.tp=1"], id="tp2-to-1"),
    nightly(2, ["--mesh.tp=1"], 4, ["--mesh.tp=1"], id="dp2-to-4"),
    nightly(4, ["--model.tie_embeddings=true"], 2, ["--model.tie_embeddings=true", "--mesh.tp=1"], id="tied"),
    pytest.param(2, ["--model.tie_embeddings=true"], 4, ["--model.tie_embeddings=true"], id="tied-tp2-to-dp2-tp2"),
    nightly(1, ["--mesh.tp=1"], 4, [], id="1-to-dp2-tp2"),
    pytest.param(2, ["--mesh.tp=1"], 2, ["--model.fused=true"], id="dp2-to-fused-tp2"),
    nightly(2, [], 2, ["--model.fused=true"], id="to-fused"),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("before", "settings", "after", "new_settings"), RESHAPED)
def test_another_mesh_restores_the_same_whole_tensors(ranks, tmp_path, data, before, settings, after, new_settings):
    saved = training.config(tmp_path, data, *settings, "--train.steps=2")
    ranks(before).run(training.run, saved)
    written = ranks(before).run(restored, saved)[0]
    loaded = training.config(tmp_path, data, *new_settings, "--train.steps=3")
    for read in ranks(after).run(restored, loaded):
        assert read.keys() == written.keys() and len(read) == 4 * len(list(model_names(read)))
        for name, tensor in written.items():
            assert torch.equal(read[name], tensor), name
    ranks(after).run(training.run, loaded)
    assert "changed since then: train.steps was 2, now 3" in training.said(loaded)
    assert sorted(training.metrics(loaded)) == [1, 2, 3]


def model_names(tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    return (name for name in tensors if name.startswith("model."))


@pytest.mark.ranks(2)
def test_a_checkpoint_holds_plain_tensors_and_says_what_it_is(ranks, tmp_path, data, finished):
    (path,) = complete(folder(finished))
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert {type(entry) for entry in entries.values()} == {TensorStorageMetadata}
    assert {"model.lm_head.weight", "optimizer.lm_head.weight.exp_avg", "rng.rank1.cpu"} <= entries.keys()
    manifest = read_manifest(path)
    assert manifest["recipes"]["model.layers.0.mlp.up_proj"] == "fp8_current"
    assert manifest["recipes"]["lm_head"] == "bf16" and manifest["step"] == 2 and manifest["world_size"] == 2
    assert sorted(manifest["files"]) == [".metadata", "__0_0_0.distcp", "__1_0_0.distcp"]


@pytest.mark.ranks(2)
def test_another_model_or_other_data_is_refused(ranks, tmp_path, data, finished):
    for override, message in (
        ("--model.ffn=256", r"/step-2 is of another model: its \[model\] ffn is 128, this run's is 256; use --chec"),
        ("--train.seed=1", r"/step-2 is of another run: the checkpoint was made with seed 0 and this run has 1, so"),
        ("--train.global_batch=16", r"another run: the checkpoint was made with global_batch 8 and this run has 16"),
    ):
        for refused in ranks(2).run(refusal, training.config(tmp_path, data, override)):
            assert re.search(message, refused)


def refusal(config: Config) -> str:
    return must_raise(CheckpointError, training.trainer, config)


@pytest.mark.ranks(2)
def test_a_torn_checkpoint_is_refused_and_the_one_before_is_used_when_asked(ranks, tmp_path, data):
    short = ["--train.steps=3", "--checkpoint.every=1"]
    config = training.config(tmp_path, data, *short)
    ranks(2).run(training.run, config)
    before = training.metrics(config)
    (folder(config) / "step-3" / "__1_0_0.distcp").write_bytes(b"torn")
    for refused in ranks(2).run(refusal, config):
        assert re.search(r"step-3 is torn: __1_0_0.distcp has 4 bytes, .* --checkpoint.resume \S+/step-2 ", refused)
    asked = training.config(tmp_path, data, *short, f"--checkpoint.resume={folder(config)}/step-2")
    ranks(2).run(training.run, asked)
    assert training.metrics(asked) == before
    assert any(f"it was moved to {folder(config)}/step-3.1" in line for line in training.said(asked))
    assert [path.name for path in complete(folder(config))] == ["step-1", "step-2", "step-3"]


def refusals(config: Config, paths: list[Path]) -> list[str]:
    """Return, for each checkpoint, the message of the refusal, or "" if the checkpoint loads."""
    recipe._import_file.cache_clear()
    trainer, _ = training.trainer(config)
    return [may_raise(CheckpointError, save_load.load, path, trainer.state) for path in paths]


def copies(path: Path, count: int) -> list[Path]:
    return [Path(shutil.copytree(path, path.with_name(f"step-{100 + i}"))) for i in range(count)]


@pytest.mark.ranks(2)
def test_every_flipped_bit_is_found_before_anything_is_used(ranks, tmp_path, data, finished):
    whole = folder(finished) / "step-2"
    places = [(name, part) for name in (".metadata", "__0_0_0.distcp", "__1_0_0.distcp") for part in (0.1, 0.5, 0.9)]
    flipped = copies(whole, len(places))
    for path, (name, part) in zip(flipped, places, strict=True):
        content = bytearray((path / name).read_bytes())
        content[int(part * len(content))] ^= 16
        (path / name).write_bytes(content)
    elsewhere = training.config(tmp_path, data, f"--run.dir={tmp_path}/other")
    for said in ranks(2).run(refusals, elsewhere, [*flipped, whole]):
        for path, (name, _), sentence in zip(flipped, places, said, strict=False):
            assert re.match(
                rf"{path} is torn: {name} has another hash than the manifest states \(found by rank [01]\); use ",
                sentence,
            )
        assert said[-1] == ""


class Planted:
    """Object whose pickle creates a folder when it is loaded."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def renew(path: Path) -> None:
    """Recompute the hashes of a checkpoint whose files were replaced: an attacker who replaces files can do the
    same."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {name: hashed(path / name) for name in manifest["files"]}
    (path / "manifest.json").write_text(json.dumps(manifest | {"digest": digest(manifest)}))


@pytest.mark.ranks(2)
def test_nothing_that_a_checkpoint_names_is_run(ranks, tmp_path, data, finished):
    planted = copies(folder(finished) / "step-2", 6)
    index = pickle.loads((planted[0] / ".metadata").read_bytes())
    made = [tmp_path / f"made-{i}" for i in range(len(planted))]
    first, place = next(iter(index.storage_data)), next(iter(index.storage_data.values()))
    indices: list[Any] = [
        Planted(made[0]),
        replace(index, planner_data=Planted(made[1])),
        replace(index, state_dict_metadata=index.state_dict_metadata | {first.fqn: BytesStorageMetadata()}),
        replace(
            index, storage_data=index.storage_data | {first: replace(place, relative_path="../step-2/__0_0_0.distcp")}
        ),
        replace(index, storage_data=index.storage_data | {first: replace(place, offset=10**9)}),
    ]
    for path, content in zip(planted, indices, strict=False):
        (path / ".metadata").write_bytes(pickle.dumps(content))
        renew(path)
    torch.save(Planted(made[5]), planted[5] / "__1_0_0.distcp")
    renew(planted[5])
    elsewhere = training.config(tmp_path, data, f"--run.dir={tmp_path}/other")
    for said in ranks(2).run(refusals, elsewhere, planted):
        for sentence, reason in zip(
            said,
            [
                "it names posix.mkdir, which no index of tensors has", "it names posix.mkdir, which no index of tensors has",
                f".metadata is no index of tensors (UnpicklingError: it names {BytesStorageMetadata.__module__}",
                ".metadata and the manifest list different files, first '../step-2/__0_0_0.distcp'", " rank ", " rank ",
            ],
            strict=True,
        ):  # fmt: skip
            assert " cannot be read: " in sentence and reason in sentence and "\n" not in sentence
    assert not any(path.exists() for path in made)


MINE = """
from pathlib import Path
import dlp

Path({made!r}).mkdir(exist_ok=True)

def recipe() -> dlp.Recipe:
    return dlp.recipe("bf16")
"""


@pytest.mark.ranks(2)
def test_a_recipe_file_that_only_the_checkpoint_names_is_not_imported(ranks, tmp_path, data):
    recipes, made = tmp_path / "recipes", tmp_path / "made"
    recipes.mkdir()
    (recipes / "mine.py").write_text(MINE.format(made=str(made)))
    swap = f'[{{at_step = 1, recipe = {{name = "mine", recipes_path = "{recipes}"}}}}]'
    named = training.config(tmp_path, data, "--train.steps=2", "--groups.default.swap", swap)
    ranks(2).run(training.run, named)
    made.rmdir()
    step = folder(named) / "step-2"
    for said in ranks(2).run(refusals, training.config(tmp_path, data, f"--run.dir={tmp_path}/other"), [step]):
        assert re.search(
            rf"was set to a recipe of {recipes}/mine.py at step 1, and files that only a checkpoint na", said[0]
        )
    assert not made.exists()
    for said in ranks(2).run(refusals, replace(named, run=replace(named.run, dir=f"{tmp_path}/named")), [step]):
        assert said == [""]
    assert made.exists()


def swapped_in_python(config: Config) -> None:
    """Change the recipe of one layer by `dlp.set_recipe`, a change that the config does not contain; train one step, and
    save a checkpoint."""
    trainer, _ = training.trainer(config)
    dlp.set_recipe(trainer.built.model, "layers.0.mlp.down_proj", dlp.recipe("mxfp8"))
    trainer.train_step(0)
    trainer.save(1)


@pytest.mark.ranks(2)
def test_a_recipe_made_in_python_cannot_be_resumed_by_settings(ranks, tmp_path, data):
    config = training.config(tmp_path, data)
    ranks(2).run(swapped_in_python, config)
    assert read_manifest(folder(config) / "step-1")["recipes"]["model.layers.0.mlp.down_proj"] == "mxfp8"
    for refused in ranks(2).run(refusal, config):
        assert (
            "/step-1 does not fit this run's recipes: model.layers.0.mlp.down_proj was set to mxfp8 at ste" in refused
        )


def killed_while_saving(config: Config) -> None:
    """Run a training in which rank 1 is killed in the second save, after it has written its file and before rank 0 has
    received its report."""
    write, calls = dcp.FileSystemWriter.write_data, iter((1, 2))

    def dying(*args: Any, **kwargs: Any) -> Any:
        written = write(*args, **kwargs)
        if next(calls) == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    dcp.FileSystemWriter.write_data = dying
    training.run(config)


@pytest.mark.ranks(2)
def test_a_rank_killed_during_a_save_leaves_the_checkpoint_before(ranks, tmp_path, data):
    short = ["--train.steps=3", "--checkpoint.every=1"]
    whole = training.config(tmp_path, data, *short, f"--run.dir={tmp_path}/whole")
    ranks(2).run(training.run, whole)
    config = training.config(tmp_path, data, *short)
    with pytest.raises(RankError, match="rank 1 of 2 died"):
        ranks(2).run(killed_while_saving, config)
    assert sorted(path.name for path in folder(config).iterdir()) == [".step-2.tmp", "step-1"]
    ranks(2).run(training.run, config)
    assert training.metrics(config) == training.metrics(whole)
    assert [path.name for path in sorted(folder(config).iterdir())] == ["step-1", "step-2", "step-3"]


class FullDisk:
    """Output stream to a disk that has space for `room` more bytes. A longer write fails with the OSError of Linux."""

    def __init__(self, stream: Any, room: int) -> None:
        self.stream, self.room = stream, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stream.close()

    def write(self, content: Any) -> Any:
        self.room -= len(content)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.stream.write(content)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


def save_without_room(config: Config) -> list[str]:
    """Save a complete checkpoint; then save three times on a disk that becomes full while one file is written: the tensors
    of rank 1, the index, the manifest. Return the three errors."""
    trainer, _ = training.trainer(config)
    trainer.train_step(0)
    trainer.save(1)
    said, create, opened = [], dcp_files._Files.create_stream, Path.open

    @contextlib.contextmanager
    def full(self: Any, path: Path, mode: str) -> Iterator[Any]:
        with create(self, path, mode) as stream:
            yield FullDisk(stream, 4096) if path.name.startswith(name) else stream

    def full_open(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return FullDisk(opened(self, mode), 64) if self.name == name else opened(self, mode, *args, **kwargs)

    dcp_files._Files.create_stream, Path.open = full, full_open
    try:
        for name in ("__1_0_0.distcp", ".metadata", "manifest.json"):  # noqa: B007 (read by `full` and `full_open`)
            with pytest.raises(save_load.SaveError) as caught:
                save_load.save(trainer.run.checkpoints, 2, trainer.state, keep=2)
            said.append(str(caught.value))
    finally:
        dcp_files._Files.create_stream, Path.open = create, opened
    return said


@pytest.mark.ranks(2)
def test_a_full_disk_is_said_and_leaves_what_was_there(ranks, tmp_path, data):
    config = training.config(tmp_path, data)
    for said in ranks(2).run(save_without_room, config):
        for rank, sentence in zip((1, 0, 0), said, strict=True):
            assert re.search(
                rf"/step-2 could not be written: rank {rank}: .*No space left on device; earlier checkpoints are not affected$",
                sentence,
            )
    assert [path.name for path in folder(config).iterdir()] == ["step-1"]


def saved_apart(config: Config) -> str:
    """Return the error of a save on ranks that have separate disks, which separate folders simulate."""
    trainer, _ = training.trainer(config)
    folder = Path(config.run.dir, f"rank{dist.get_rank()}")
    return must_raise(save_load.SaveError, save_load.save, folder, 1, trainer.state, keep=1)


@pytest.mark.ranks(2)
def test_files_that_do_not_reach_rank_0_are_no_checkpoint(ranks, tmp_path, data):
    for rank, said in enumerate(ranks(2).run(saved_apart, training.config(tmp_path, data))):
        reason = "rank 0: __1_0_0.distcp is missing, expected [0-9]+ bytes, as when ranks do not share this folder"
        assert re.search(
            rf"/rank{rank}/step-1 could not be written: {reason}; earlier checkpoints are not affected$", said
        )
    assert list((tmp_path / "run" / "rank0").iterdir()) == []


def rng_after(config: Config) -> list[float]:
    """Save a checkpoint if the run has none, else resume from it; return the next two random numbers that this rank draws."""
    trainer, done = training.trainer(config)
    if not done:
        trainer.train_step(0)
        torch.manual_seed(100 + dist.get_rank())
        torch.rand(7)
        trainer.save(1)
    return torch.rand(2).tolist()


@pytest.mark.ranks(2)
def test_random_states_are_restored_rank_by_rank(ranks, tmp_path, data):
    config = training.config(tmp_path, data)
    drawn, restored = (ranks(2).run(rng_after, config) for _ in range(2))
    assert drawn == restored and drawn[0] != drawn[1]


def killed_while_removing(config: Config) -> None:
    """Run a training in which rank 0 is killed after it has removed the first file of an old checkpoint."""

    def dying(path: Path, **options: Any) -> None:
        if "step-" in path.name:
            sorted(path.iterdir())[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    save_load.shutil.rmtree = dying
    training.run(config)


@pytest.mark.ranks(2)
def test_a_rank_killed_while_old_checkpoints_are_removed_leaves_whole_ones(ranks, tmp_path, data):
    config = training.config(tmp_path, data, "--checkpoint.every=1", "--checkpoint.keep=1", "--train.steps=3")
    with pytest.raises(RankError, match="rank 0 of 2 died"):
        ranks(2).run(killed_while_removing, config)
    left = complete(folder(config))
    assert [path.name for path in left] == ["step-2"]
    assert damage(left[0], (files := read_manifest(left[0])["files"]), share=files) is None
    ranks(2).run(training.run, config)
    assert [path.name for path in folder(config).iterdir()] == ["step-3"]


def trained_beside_what_stays(config: Config) -> None:
    """Run in a folder in which old checkpoints cannot be renamed for removal."""

    def stays(finished: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(finished))

    retire, save_load._retire = save_load._retire, stays
    try:
        training.run(config)
    finally:
        save_load._retire = retire


@pytest.mark.ranks(2)
def test_an_old_checkpoint_that_cannot_be_removed_is_named_and_fails_no_save(ranks, tmp_path, data):
    config = training.config(tmp_path, data, "--checkpoint.every=1", "--checkpoint.keep=1", "--train.steps=3")
    ranks(2).run(trained_beside_what_stays, config)
    assert [path.name for path in complete(folder(config))] == ["step-1", "step-2", "step-3"]
    saved = [line for line in training.said(config) if line.startswith("saved ")]
    assert [line.partition("; not yet removed, to be removed after the next save: ")[2] for line in saved] == [
        "", "step-1", "step-1, step-2",
    ]  # fmt: skip


@pytest.mark.ranks(2)
def test_a_line_of_the_metrics_that_is_no_record_is_named_before_the_run_goes_on(ranks, tmp_path, data, finished):
    path = Path(finished.run.dir, "metrics.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "\0" * 20, *lines[1:]]) + "\n")
    before = content(Path(finished.run.dir))
    for said in ranks(2).run(refused_folder, training.config(tmp_path, data, "--train.steps=3")):
        assert re.fullmatch(rf"{path}, line 2: not a record \(.*\); remove that line", said)
    assert content(Path(finished.run.dir)) == before
    path.unlink()
    path.mkdir()
    assert ranks(2).run(unread, training.config(tmp_path, data, "--train.steps=3")) == [str(path)] * 2
    ranks(2).run(training.run, training.config(tmp_path, data, "--train.steps=3", "--checkpoint.resume=none"))


def unread(config: Config) -> str:
    """Return the path in the IsADirectoryError with which a run fails to start on this rank."""
    with pytest.raises(IsADirectoryError) as caught:
        training.trainer(config)
    return str(caught.value.filename)


@pytest.mark.ranks(2)
def test_only_the_newest_are_kept(ranks, tmp_path, data):
    config = training.config(tmp_path, data, "--train.steps=4", "--checkpoint.every=1", "--checkpoint.keep=2")
    ranks(2).run(training.run, config)
    assert [path.name for path in sorted(folder(config).iterdir())] == ["step-3", "step-4"]


def content(run: Path) -> dict[str, bytes]:
    """Return the bytes of each file in the run's folder except the lock, by path."""
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".lock"}


@pytest.mark.ranks(2)
def test_a_refused_command_changes_nothing(ranks, tmp_path, data, finished):
    before = content(Path(finished.run.dir))
    for change in ("--model.ffn=256", "--train.seed=1", "--data.path=nowhere"):
        for more in ([], ["--checkpoint.resume=none"] if "data" in change else []):
            changed = training.config(tmp_path, data, "--train.steps=2", change, *more)
            ranks(2).run(refused, changed)
            assert content(Path(finished.run.dir)) == before, change
    ranks(2).run(refused, training.config(tmp_path, data, "--data.path=nowhere", f"--run.dir={tmp_path}/new/run"))
    ranks(2).run(unreadable, training.config(tmp_path, data, f"--run.dir={tmp_path}/new/run"))
    assert not (tmp_path / "new" / "run").exists()


def unreadable(config: Config) -> None:
    """Raise an OSError, as for an unreadable cache, in a run that has not yet created its folder."""
    run = RunDir(Path(config.run.dir))
    with pytest.raises(OSError), run.logged():
        raise OSError("no such cache")


def refused(config: Config) -> None:
    with pytest.raises(ValueError):
        training.trainer(config)


@pytest.mark.ranks(2)
def test_another_runs_checkpoint_begins_a_lineage_and_leaves_the_other(ranks, tmp_path, data):
    one = training.config(tmp_path, data, "--train.steps=2", f"--run.dir={tmp_path}/one", "--checkpoint.keep=2")
    ranks(2).run(training.run, one)
    two = training.config(tmp_path, data, "--train.steps=2", f"--run.dir={tmp_path}/two")
    ranks(2).run(training.run, two)
    before, first = content(tmp_path / "one"), folder(two) / "step-2"
    on = ["--train.steps=4", "--checkpoint.keep=2", f"--checkpoint.resume={first}"]
    continued = training.config(tmp_path, data, *on, f"--run.dir={tmp_path}/one")
    ranks(2).run(training.run, continued)
    assert [path.name for path in complete(folder(continued))] == ["step-4"]
    assert sorted(training.metrics(continued)) == [3, 4], "none of the other's"
    assert f"the run that was here is now in {tmp_path}/one.1" in training.said(continued)
    assert {name.replace("/one.1/", "/one/"): held for name, held in content(tmp_path / "one.1").items()} == before
    assert [path.name for path in complete(folder(two))] == ["step-2"]
    aside = folder(two) / "step-2.1"
    shutil.copytree(first, aside)
    for said in ranks(2).run(
        refusal, training.config(tmp_path, data, f"--run.dir={tmp_path}/two", f"--checkpoint.resume={aside}")
    ):
        assert said.startswith(f"--checkpoint.resume {aside}: not a finished checkpoint of this run")


def apart(config: Config) -> str:
    """Return the error with which a run refuses to start on ranks that have separate disks."""
    own = replace(config, run=replace(config.run, dir=f"{config.run.dir}{dist.get_rank()}"))
    return must_raise(ValueError, training.trainer, own)


@pytest.mark.ranks(2)
def test_ranks_without_a_common_folder_refuse_to_start(ranks, tmp_path, data):
    for said in ranks(2).run(apart, training.config(tmp_path, data)):
        assert re.search(
            r"^--run.dir \S+/run[01]: process [0-9]+ of \S+ does not see the file that process .* made in it \(No such file "
            r"or directory\), and a checkpoint needs .* mount$",
            said,
        )
    assert not (tmp_path / "run1").exists()


TAKE = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def second(config: Config) -> str:
    """Return, on rank 0, the error output of another process that requests the lock of an active run; "" on other ranks."""
    trainer, _ = training.trainer(config)
    if not trainer.run.leader:
        return ""
    lock = str(trainer.run.path / ".lock")
    return subprocess.run([sys.executable, "-c", TAKE, lock], capture_output=True, text=True).stderr


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "more", [[], ["--checkpoint.resume=none"]], ids=["a new folder", "another run was moved aside"]
)
def test_a_run_holds_its_folder_while_it_lasts(ranks, tmp_path, data, more):
    if more:
        ranks(2).run(begun, training.config(tmp_path, data))
    said, _ = ranks(2).run(second, training.config(tmp_path, data, *more))
    assert "BlockingIOError" in said
    assert (tmp_path / "run.1").exists() == bool(more)


def no_room(config: Config, name: str) -> str:
    """Return the error of a run that cannot start because the disk has no space for the named file."""
    opened = Path.open

    def full_open(self: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        stream = opened(self, mode, *given, **named)
        return FullDisk(stream, 8) if self.name == name and mode != "r" else stream

    Path.open = full_open
    try:
        return refused_folder(config)
    finally:
        Path.open = opened


@pytest.mark.ranks(2)
def test_a_full_disk_before_a_run_is_one_sentence_and_leaves_what_was_there(ranks, tmp_path, data):
    config = training.config(tmp_path, data, "--train.steps=2")
    said = "No space left on device; choose a "
    for found in ranks(2).run(no_room, config, ".lock"):
        assert found == f"--run.dir {tmp_path}/run: {said}folder that can be written"
    assert not (tmp_path / "run").exists()
    ranks(2).run(training.run, config)
    before = content(tmp_path / "run")
    for found in ranks(2).run(no_room, config, ".config.toml.new"):
        assert found == f"{tmp_path}/run/config.toml: {said}--run.dir that can be written"
    assert content(tmp_path / "run") == before
    for found in ranks(2).run(no_room, config, "rank1.txt"):
        assert found == f"{tmp_path}/run/log/rank1.txt: {said}--run.dir that can be written"
    anew = training.config(tmp_path, data, "--train.steps=2", "--checkpoint.resume=none")
    for found in ranks(2).run(no_room, anew, ".plan.txt.new"):
        found, moved = found.split("; the run that was here is now in ")
        assert found.endswith(f"plan.txt: {said}--run.dir that can be written") and moved == f"{tmp_path}/run.1"


HOLD = """
import fcntl, signal, sys
file = open(sys.argv[1], "w")
print("somebody", end="", file=file, flush=True)
fcntl.lockf(file, fcntl.LOCK_EX)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.ranks(2)
def test_a_folder_that_cannot_be_used_is_one_sentence(ranks, tmp_path, data):
    config = training.config(tmp_path, data)
    (tmp_path / "run").write_text("a file")
    for said in ranks(2).run(refused_folder, config):
        assert said == f"--run.dir {tmp_path}/run: the path is a file; expected a folder, or a path that does not exist"
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run" / ".lock")], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline()
    for said in ranks(2).run(refused_folder, config):
        assert said.startswith(
            f"--run.dir {tmp_path}/run: this folder is in use by somebody; wait for the end of that run, or choose"
        )
    holder.kill()
    holder.communicate()
    ranks(2).run(begun, config)
    (tmp_path / "unwritable" / "plan.txt").mkdir(parents=True)
    for said in ranks(2).run(refused_folder, training.config(tmp_path, data, f"--run.dir={tmp_path}/unwritable")):
        assert said.startswith(
            f"{tmp_path}/unwritable/plan.txt: Is a directory; choose a --run.dir that can be written"
        )
    read_only = training.config(tmp_path, data, f"--run.dir={tmp_path}/run/.lock/x")
    for said in ranks(2).run(refused_folder, read_only):
        assert said == f"--run.dir {tmp_path}/run/.lock/x: Not a directory; choose a folder that can be written"


def begun(config: Config) -> None:
    training.trainer(config)


def refused_folder(config: Config) -> str:
    return must_raise(ValueError, training.trainer, config)
