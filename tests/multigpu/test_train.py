"""Complete runs of the trainer on 1, 2 and 4 ranks: output files, stops, and failures."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlp import end_step
from dlp.parallel.auto import Problem
from dlp.parallel.style import ROW_SP
from dlp.quant import recipe as recipes
from launch.checkpoint.manifest import complete
from launch.checkpoint.save_load import SaveError
from launch.config.run_config import Config, load
from launch.training.trainer import NotFinite, Step, Trainer
from tests import test_auto, training
from tests.cases import nightly
from tests.pool import RankError
from tests.refusals import must_raise


def checkpoints(config: Config) -> list[str]:
    return [path.name for path in complete(Path(config.run.dir) / "checkpoints")]


def graphs_of_steps(config: Config) -> tuple[int, int]:
    """Train three steps; return the numbers of graphs that dynamo has compiled after the first and after the third
    step."""
    made: list[int] = []
    step, compiled = Trainer.train_step, nn.Module.compile

    def counted(self: Trainer, number: int) -> Step:
        done = step(self, number)
        made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return done

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cheaply = patch.object(nn.Module, "compile", lambda block: compiled(block, backend="aot_eager"))
    with patch.object(Trainer, "train_step", counted), cheaply:
        training.run(config)
    return made[0], made[2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [["--mesh.tp=2"], ["--mesh.tp=1", "--mesh.dp_shard=2"]], ids=["tp", "fsdp"])
def test_the_first_step_compiles_all_that_steps_run(ranks, tmp_path, data, options):
    """No graph is compiled after the first step. The trainer casts weights before the first step; otherwise this step
    would trace casts at use, and the second step would need other graphs."""
    config = training.config(tmp_path, data, "--train.compile=true", "--train.steps=3", "--checkpoint.every=0",
                             "--checkpoint.at_end=false", "--mesh.sequence_parallel=false", *options)  # fmt: skip
    for first, third in ranks(2).run(graphs_of_steps, config):
        assert first == third > 0


@pytest.mark.ranks(2)
def test_a_run_leaves_its_files(ranks, tmp_path, data, device_type):
    table, down = tmp_path / "times.json", Problem(ROW_SP, 512, 128, (64,), recipes.load("fp8_current"))
    table.write_text(test_auto.table(test_auto.row(down, (2.0, 1.0, 2.0, 2.0), (2.0,) * 4)).text())
    config = training.config(tmp_path, data, "--model.layers=2", "--train.steps=2", f"--mesh.overlap_table={table}")
    ranks(2).run(functools.partial(training.run, plots=True), config)
    folder = Path(config.run.dir)
    names = [
        ".lock",
        "checkpoints",
        "config.toml",
        "env.txt",
        "log",
        "loss.png",
        "metrics.jsonl",
        "overlap.json",
        "plan.txt",
    ]
    assert sorted(path.name for path in folder.iterdir()) == names
    chosen = json.loads((folder / "overlap.json").read_text())["choices"]
    assert [each["gemm"] for each in chosen if each["strategy"] == "chunked"] == ["fprop"] * 2 * (device_type == "cpu")
    assert load(folder / "config.toml") == config
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    plan = (folder / "plan.txt").read_text()
    assert plan.startswith("mesh: 2 ") and "model.layers.0:2.mlp.down_proj" in plan and "ROW_SP" in plan
    assert f"torch {torch.__version__}\n" in (folder / "env.txt").read_text()
    assert sorted(path.name for path in (folder / "log").iterdir()) == ["rank0.txt", "rank1.txt"]
    lines = training.said(config)
    assert lines[0].startswith("mesh: 2 ") and lines[1].startswith("plan: 15 linears (10 fp8_current column, ")
    (at,) = [i for i, line in enumerate(lines) if line.startswith("data: ")]
    assert [line.partition(":")[0] for line in lines[2:at]] in (
        ["attention", "cuda graph", "saves"], ["attention", "transport", "cuda graph", "saves"],
    )  # fmt: skip
    assert re.fullmatch(r"data: .* kB in 2 shards, hashes and tokens checked in .*s", lines[at]), lines[at]
    predicted = [line for line in lines[at + 1 :] if line.startswith("time: ")]
    assert len(predicted) == (device_type == "cuda") and lines[at + 1 + len(predicted)].startswith("deterministic: ")
    assert lines[-2].startswith("byte-bigram loss of the same split: ")
    loss = training.metrics(config, "validation_loss")[2]
    assert lines[-1].startswith(f"done: steps 2, validation loss {loss:.3f} nats/byte, ")
    assert lines[-1].endswith(f" tokens/s, run {folder}")
    assert checkpoints(config) == ["step-2"]


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_a_profiled_step_tells_its_exposed_communication(ranks, tmp_path, data):
    config = training.config(tmp_path, data, "--train.profile=3", "--train.steps=4")
    ranks(2).run(training.run, config)
    records = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    (found,) = [record for record in records if "exposure" in record]
    assert found["step"] == 3
    assert 0 < found["exposure"]["transfers"] < found["exposure"]["step"]
    assert 0 <= found["exposure"]["exposed"] <= found["exposure"]["transfers"]
    assert (Path(config.run.dir) / "trace-step-3.json").exists()
    assert any(line.startswith("step 3: transfers took ") for line in training.said(config))


@pytest.mark.ranks(2)
def test_metrics_have_every_number(ranks, tmp_path, data, device_type):
    config = training.config(tmp_path, data)
    ranks(2).run(training.run, config)
    first, *records = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    assert first["step"] == 0 and first["baseline"].keys() == {"name", "loss", "unit"}
    assert [(record["step"], "loss" in record) for record in records] == [
        (1, True), (2, True), (3, False), (3, True), (4, True), (4, False), (5, True), (6, True), (6, False),
    ]  # fmt: skip
    assert records[0].keys() == {
        "step", "loss", "gradient_norm", "lr", "tokens_per_second", "model_flops_per_second", "mfu", "seconds", "split",
        "wire_bytes", "peak_memory_bytes",
    }  # fmt: skip
    assert records[2].keys() == {"step", "ledger"}
    counted = sum(entry["bytes"] for entry in records[2]["ledger"])
    assert records[0]["wire_bytes"] == {"tp": counted} and counted > 0
    assert records[0]["split"].keys() == {"data", "forward", "backward", "optimizer"}
    assert [record["lr"] for record in records[:2]] == [0.005, 0.01]
    steps = [record for record in records if "split" in record]
    parts, seconds = ([sum(each["split"].values()) for each in steps], [each["seconds"] for each in steps])
    assert min(parts) > 0 and sum(parts) <= sum(seconds) * 1.1
    if device_type == "cpu":  # on a GPU the parts are device time, which is measured one step later
        assert all(part <= whole * 1.1 for part, whole in zip(parts, seconds, strict=True))
    for record in steps:
        assert record["tokens_per_second"] == pytest.approx(8 * 64 / record["seconds"], rel=1e-2)
    assert records[-2]["loss"] < records[0]["loss"] - 0.5


def printed(config: Config) -> str:
    """Return the output of this rank in a run whose output is not a terminal."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        training.run(config)
    return out.getvalue()


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_lines_of_a_pipe_are_in_order_and_say_each_validation_once(ranks, tmp_path, data):
    swap = "[{at_step = 2, recipe = 'bf16'}]"
    settings = ("--checkpoint.every=5", "--groups.default.swap", swap)
    config = training.config(tmp_path, data, "--train.steps=5", *settings)
    out, nothing = ranks(2).run(printed, config)
    steps = [re.split(r" [\d.]+(?:,| kB|$)", line)[0] for line in out.splitlines() if line.startswith("step ")]
    assert steps == [
        "step 1/5: loss", "step 2/5: loss", "step 2: model.layers.0.self_attn.q_proj and 6 more layers now bf16",
        "step 3/5: loss", "step 4/5: loss", "step 4/5: validation", "step 5/5: loss",
        "step 5: the bytes sent match the plan: from each rank tp", "step 5/5: validation",
    ]  # fmt: skip
    assert nothing == ""
    longer = training.config(tmp_path, data, "--train.steps=7", *settings)
    assert "WARNING: the learning rate goes from 0.001 in step 5 to " in ranks(2).run(printed, longer)[0]


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_a_finished_run_says_so_and_a_fresh_one_moves_it_aside(ranks, tmp_path, data):
    config = training.config(tmp_path, data, "--train.steps=2")
    ranks(2).run(training.run, config)
    first = training.said(config)[-1]
    ranks(2).run(training.run, config)
    lines = training.said(config)
    assert lines[-3].startswith(
        "nothing to do: 2 of 2 steps are done. To continue, raise --train.steps; to start again, use"
    )
    assert lines[-1] == first
    ranks(2).run(training.run, training.config(tmp_path, data, "--train.steps=2", "--checkpoint.resume=none"))
    lines = training.said(config)
    assert f"the run that was here is now in {config.run.dir}.1" in lines
    assert sum(line.startswith("mesh: ") for line in lines) == 1 and checkpoints(config) == ["step-2"]


@pytest.mark.ranks(4)
@pytest.mark.full  # test_raw_gradients.py compares gradients and norms of several meshes with those of one rank
def test_the_gradient_norm_is_that_of_one_rank_on_any_mesh(ranks, tmp_path, data):
    exact = ["--train.steps=1", "--train.dtype=fp32", "--recipe=bf16"]
    norms = []
    for world, mesh in [(1, ["--mesh.tp=1"]), (2, []), (2, ["--mesh.tp=1"]), (4, []), (4, ["--mesh.dp_replicate=2"])]:
        config = training.config(tmp_path, data, *exact, *mesh, f"--run.dir={tmp_path}/{len(norms)}")
        ranks(world).run(training.run, config)
        norms.append(training.metrics(config, "gradient_norm")[1])
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-5)


class AskedToStop(Trainer):
    """Trainer in which SIGTERM reaches only the last rank, during step 3."""

    def train_step(self, step: int) -> Step:
        self.stop.requested = step >= 2 and dist.get_rank() == dist.get_world_size() - 1
        return super().train_step(step)


class Placed(AskedToStop):
    """Trainer that records the phase reported to the hang watch whenever the trainer reads data or runs a
    microbatch."""

    said: ClassVar[list[str]]

    def on_device(self, tokens: torch.Tensor) -> torch.Tensor:
        self.said.append(f"data: {self.doing}")
        return super().on_device(tokens)

    def loss(self, batch: Any) -> torch.Tensor:
        self.said.append(f"{'step' if torch.is_grad_enabled() else 'evaluation'}: {self.doing}")
        return super().loss(batch)


def stopped(config: Config) -> list[str]:
    """Return the phases that a run reports to the hang watch, without repetitions. SETTLED = 1: only the first step may
    be slow because of compilation."""
    trainer, done = training.trainer(config, Placed)
    Placed.said = [f"before: {trainer.doing}"]
    save = trainer.saver.save
    trainer.saver.save = lambda *asked: Placed.said.append(f"save: {trainer.doing}") or save(*asked)
    with patch("launch.training.trainer.SETTLED", 1):
        trainer.train(done)
    assert trainer.place().slow and trainer.took > 0
    return [each for each, last in zip(Placed.said, ["", *Placed.said], strict=False) if each != last]


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_one_rank_asked_to_stop_stops_all_at_one_boundary(ranks, tmp_path, data):
    settings = ["--groups.default.swap=[{at_step = 2, recipe = 'bf16'}]", "--train.steps=5", "--checkpoint.every=100"]
    whole = training.config(tmp_path, data, *settings, f"--run.dir={tmp_path}/whole")
    ranks(2).run(training.run, whole)
    config = training.config(tmp_path, data, *settings)
    places = ranks(2).run(stopped, config)
    step, first = (["data: reading data", f"step: {what}"] for what in ("", "a first step, which compiles"))
    ends = ["data: validating", "evaluation: validating", "save: saving"]
    assert places == [["before: starting", *first, *step, *first, *step, *ends]] * 2, (
        "the swap behind step 2 compiles anew"
    )
    path = f"{config.run.dir}/checkpoints/step-4"
    for rank in range(2):
        assert training.said(config, rank)[-1] == f"stopped by SIGTERM at step 4, checkpoint {path}"
    assert checkpoints(config) == ["step-4"]
    ranks(2).run(training.run, config)
    assert training.metrics(config) == training.metrics(whole)
    assert training.metrics(config, "validation_loss") == training.metrics(whole, "validation_loss")


class Poisoned(Trainer):
    """Trainer with a NaN in the last rank's shard of a weight before step 4. FSDP sends this shard to all ranks with
    the same tp index."""

    def train_step(self, step: int) -> Step:
        if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            self.built.model.model.layers[0].mlp.up_proj.weight._local_tensor.view(-1)[5] = float("nan")
        if step == 3:
            end_step(self.built.model)
        return super().train_step(step)


UP_PROJ = "model.layers.0.mlp.up_proj"
CAST = f"w of {UP_PROJ} held a NaN or Inf when it was cast on rank {{}}, the first of [0-9]+ in forward"
REPEATED = (
    f"repeated with the weights after step [45], the first layer whose output is not finite is {UP_PROJ} on rank {{}}"
)


def poisoned(config: Config) -> tuple[str, int]:
    """Return the error of a run of `Poisoned`, and the number of optimizer steps before it."""
    trainer, done = training.trainer(config, Poisoned)
    with pytest.raises(NotFinite) as caught, trainer.run.logged():
        trainer.train(done)
    return str(caught.value), int(next(iter(trainer.built.optimizer.state.values()))["step"])


@pytest.mark.parametrize(
    ("world", "overrides", "where"),
    [
        nightly(2, [], CAST.format(1)),  # other tests of this file expect the same message
        (2, ["--train.checkpointing=full", "--recipe=bf16"], REPEATED.format(1)),
        nightly(4, [], CAST.format(3)),
        nightly(1, ["--mesh.tp=1"], CAST.format(0)),
    ],
)
def test_a_nan_names_step_rank_and_layer_and_saves_nothing(ranks, tmp_path, data, world, overrides, where):
    config = training.config(tmp_path, data, "--checkpoint.every=1", "--train.eval_every=100", *overrides)
    for message, steps in ranks(world).run(poisoned, config):
        assert re.fullmatch(f"step 4: loss nan, gradient norm nan: {where}", message), message
        assert steps == 3, "the optimizer skipped the bad step"
    assert checkpoints(config) == ["step-1", "step-2", "step-3"]
    described = json.loads(Path(config.run.dir, "log", f"not-finite-rank{world - 1}.json").read_text())
    forward = described["forward"]
    output, given = (next(t for t in forward["tensors"] if t["tensor"] == what) for what in ("output", "input"))
    assert described["step"] == 4 and forward["layer"] == UP_PROJ and output["nan"] > 0 == given["nan"] + given["inf"]
    assert output["first"][0] == 0 and 0 < given["std"] <= given["amax"] == max(-given["min"], given["max"])
    assert sorted(training.metrics(config)) == [1, 2, 3]
    assert "NotFinite: step 4: loss nan" in Path(config.run.dir, "log", "rank0.txt").read_text()


def poisoned_on_a_full_disk(config: Config) -> str:
    """Return the error of a run of `Poisoned` in which a save fails as well."""
    trainer, done = training.trainer(config, Poisoned)
    settle = trainer.saver.settle

    def fails(final: bool) -> list[str]:
        if trainer.recipes.steps < 4:
            return settle(final)
        raise SaveError("step-3 could not be written: no space")

    trainer.saver.settle = fails
    return must_raise(NotFinite, trainer.train, done)


@pytest.mark.ranks(2)
def test_a_save_that_fails_hides_no_nan(ranks, tmp_path, data):
    settings = ["--checkpoint.every=1", "--checkpoint.asynchronous=true", "--train.eval_every=100"]
    config = training.config(tmp_path, data, *settings)
    for message in ranks(2).run(poisoned_on_a_full_disk, config):
        assert message.startswith("step 4: loss nan, gradient norm nan: w of ")
    assert "WARNING: step-3 could not be written: no space" in training.said(config)


@pytest.mark.ranks(2)
def test_z_loss_is_trained_and_not_validated(ranks, tmp_path, data):
    once = ["--train.steps=1", "--train.lr=1e-9", "--train.eval_every=1", "--recipe=bf16"]
    seen = []
    for weight in ("0", "1"):
        config = training.config(tmp_path, data, *once, f"--train.z_loss={weight}", f"--run.dir={tmp_path}/{weight}")
        ranks(2).run(training.run, config)
        seen.append([training.metrics(config, key)[1] for key in ("loss", "validation_loss")])
    (loss, validated), (both, same) = seen
    assert both - loss > 30, "the square of the logarithm of 384, at least"
    assert same == pytest.approx(validated, abs=1e-4)


@pytest.mark.ranks(2)
def test_the_check_is_read_one_step_late(ranks, tmp_path, data):
    config = training.config(tmp_path, data, "--checkpoint.every=100", "--train.eval_every=100", "--train.steps=9")
    assert {steps for _, steps in ranks(2).run(begun, config)} == {5}


def begun(config: Config) -> tuple[str, int]:
    """Return the error about the NaN of step 4, and the number of steps that had begun when it was raised."""
    counted: list[int] = []

    class Counting(Poisoned):
        def train_step(self, step: int) -> Step:
            counted.append(step)
            return super().train_step(step)

    trainer, done = training.trainer(config, Counting)
    return must_raise(NotFinite, trainer.train, done), len(counted)


class Spikes(Trainer):
    """Trainer whose gradients in steps 4 and 5 are a thousand times too large."""

    def optimize(self) -> torch.Tensor:
        if self.recipes.steps in (3, 4):
            torch._foreach_mul_([p.grad._local_tensor for p in self.built.model.parameters()], 1000.0)
        return super().optimize()


def spiked(config: Config, steps: int | None = None) -> int:
    """Train until `steps` steps are done, and save (None: a complete run); return the number of updates. The median of
    gradient norms is defined after two steps."""
    with patch("launch.training.step_update.KNOWN", 2):
        trainer, done = training.trainer(config, Spikes)
        if steps is None:
            trainer.train(done)
        else:
            trainer.recorder.begin(done)
            while done < steps:
                trainer.read(trainer.train_step(done))
                done += 1
            trainer.save(done)
    return int(next(iter(trainer.built.optimizer.state.values()))["step"])


@pytest.mark.ranks(2)
def test_updates_with_spikes_are_skipped_and_a_resumed_run_skips_the_same(ranks, tmp_path, data):
    options = ["--train.skip_spikes=10", "--checkpoint.every=100", "--train.eval_every=100", "--train.cuda_graph=false"]
    whole, parts = (training.config(tmp_path, data, *options, f"--run.dir={tmp_path}/{n}") for n in ("whole", "parts"))
    assert ranks(2).run(spiked, whole) == [4, 4], "of six steps two are skipped"
    assert training.metrics(whole, "skipped") == {4: True, 5: True}
    (first, second) = (line for line in training.said(whole) if "was skipped" in line)
    assert re.fullmatch(
        r"step 4: the update was skipped, since the gradient norm of [\d.]+e?.* exceeds [\d.]+, 10 times the median "
        r"\(1 skipped since the start\)", first
    ) and second.endswith("(2 skipped since the start)")  # fmt: skip
    losses, norms = training.metrics(whole), training.metrics(whole, "gradient_norm")
    assert norms[4] > 100 * norms[3] and losses[6] < losses[1], "nothing of the spikes is left"
    ranks(2).run(spiked, parts, 4)
    ranks(2).run(spiked, parts)
    assert "resuming from step 4" in "\n".join(training.said(parts))
    assert training.metrics(parts) == losses and training.metrics(parts, "skipped") == {4: True, 5: True}


class BadGradient(Trainer):
    """Trainer in which one gradient element is Inf, while the loss is finite."""

    def optimize(self) -> torch.Tensor:
        next(self.built.model.parameters()).grad._local_tensor.view(-1)[0] = float("inf")
        return super().optimize()


@pytest.mark.ranks(2)
def test_a_gradient_that_is_not_finite_is_told_from_a_layer(ranks, tmp_path, data):
    (message, _) = ranks(2).run(training.stopped_by, training.config(tmp_path, data), BadGradient)
    assert message.startswith("step 1: loss 5.9") or message.startswith("step 1: loss 6.")
    assert message.endswith(
        "gradient norm inf: all x, w and dy that were cast were finite; repeated with the weights after step 2, the "
        "outputs and output gradients of all layers are finite: the NaN or Inf did not recur"
    )


class Swallowed(Trainer):
    """Trainer with an Inf on rank 1 in step 3 that does not affect the loss: in x or dy (`into`) of the first down_proj."""

    into: ClassVar[str]

    def train_step(self, step: int) -> Step:
        layer = self.built.model.model.layers[0].mlp.down_proj
        if step != 2 or dist.get_rank() == 0:
            return super().train_step(step)
        hook = layer.register_forward_pre_hook(of_x) if self.into == "x" else layer.register_forward_hook(of_y)
        current = super().train_step(step)
        hook.remove()
        return current


def of_x(module: Any, args: Any) -> None:
    args[0].data.view(-1)[7] = torch.inf


def of_y(module: Any, args: Any, y: torch.Tensor) -> None:
    y.register_hook(lambda dy: dy.index_fill(0, torch.tensor([7], device=dy.device), -torch.inf))


class InX(Swallowed):
    into = "x"


class InDy(Swallowed):
    into = "dy"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("cls", "way"), [nightly(InX, "forward"), (InDy, "backward")], ids=["x", "dy"])
def test_an_inf_that_a_scale_swallows_stops_the_run(ranks, tmp_path, data, cls, way):
    config = training.config(tmp_path, data, "--checkpoint.every=1", "--train.eval_every=100")
    for message in ranks(2).run(training.stopped_by, config, cls):
        assert re.match(r"step 3: loss \d\.\d+, gradient norm \d+\.\d+: ", message), "it shows nowhere else"
        assert f": {cls.into} of model.layers.0.mlp.down_proj held a NaN or Inf when it was cast on rank 1, " in message
        assert f" in {way}" in message
    assert checkpoints(config) == ["step-1", "step-2"]


class Raising(Trainer):
    def train_step(self, step: int) -> Step:
        if step == 2 and dist.get_rank() == 1:
            raise RuntimeError("the disk is on fire")
        return super().train_step(step)


def raising(config: Config) -> None:
    trainer, done = training.trainer(config, Raising)
    with trainer.run.logged():
        trainer.train(done)


@pytest.mark.ranks(2)
def test_an_exception_is_in_the_log_of_its_rank_and_no_checkpoint_follows(ranks, tmp_path, data):
    config = training.config(tmp_path, data, "--checkpoint.every=1")
    with pytest.raises(RankError, match="(?s)rank 1 of 2 raised:.*the disk is on fire"):
        ranks(2).run(raising, config)
    assert "the disk is on fire" in Path(config.run.dir, "log", "rank1.txt").read_text()
    assert checkpoints(config) == ["step-1", "step-2"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("switch", "more"),
    [("mesh.quantized_gather", ["--mesh.tp=1", "--recipe=fp8_current"]), ("groups.default.delay_wgrad", [])],
    ids=["how FSDP gathers weights", "when wgrads are made"],
)
@pytest.mark.slow
@pytest.mark.full  # test_fsdp_gather.py and test_delayed_wgrad.py compare losses and gradients of steps
def test_losses_do_not_depend_on(ranks, tmp_path, data, switch, more):
    seen = []
    for value in ("true", "false"):
        config = training.config(
            tmp_path, data, "--train.steps=3", *more, f"--{switch}={value}", f"--run.dir={tmp_path}/{value}"
        )
        ranks(2).run(training.run, config)
        seen.append([training.metrics(config, key) for key in ("loss", "gradient_norm")])
    assert seen[0] == seen[1]
