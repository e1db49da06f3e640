"""Complete runs with scheduled recipe changes or with statistics: config, log, metrics, plots and resuming. Every
recipe trains, also a recipe from a user's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from launch import plot
from launch.config.run_config import Config
from launch.report.cast_statistics_plot import parts_of
from launch.settings.schema import ConfigError
from launch.train import plan_text
from launch.training import initial_scales
from launch.training.trainer import Step, Trainer
from tests import training
from tests.cases import RECIPES, few

pytestmark = pytest.mark.slow

SWAPS = '[{at_step = 2, recipe = "nvfp4"}, {at_step = 4, recipe = {name = "fp8_delayed", amax_history_len = 4}}]'


def config(folder: Path, data: Path, *overrides: str, groups: str = "") -> Config:
    """The small config with additional groups."""
    folder.mkdir(exist_ok=True)
    training.config(folder, data)
    path = folder / "small.toml"
    path.write_text(path.read_text() + groups)
    return training.load(path, overrides)


@pytest.mark.ranks(2)
def test_a_run_that_swaps_resumes_between_swaps_bit_for_bit_and_shows_them(ranks, tmp_path, data):
    settings = ("--groups.default.swap", SWAPS, "--train.steps=5", "--checkpoint.every=3")
    whole = config(tmp_path / "a", data, *settings)
    ranks(2).run(training.run, whole)
    first = Path(whole.run.dir) / "checkpoints" / "step-3"
    again = config(tmp_path / "b", data, *settings, f"--checkpoint.resume={first}")
    ranks(2).run(training.run, again)
    losses, resumed = training.metrics(whole), training.metrics(again)
    assert list(resumed) == [4, 5] and all(resumed[step] == losses[step] for step in resumed)
    assert training.metrics(whole, "swap") == {
        2: {"recipe": "nvfp4", "layers": 7},
        4: {"recipe": "fp8_delayed(amax_history_len=4)", "layers": 7},
    }
    lines = training.said(whole)
    assert "after step 2: nvfp4 for model.layers.0.self_attn.q_proj and 6 more layers" in lines
    assert "step 4: model.layers.0.self_attn.q_proj and 6 more layers now fp8_delayed(amax_history_len=4)" in lines
    assert not [line for line in training.said(again) if "step 2:" in line and "now" in line]
    plot.main([whole.run.dir, "--out", str(tmp_path / "loss.png")])
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.ranks(2)
def test_the_first_step_under_delayed_scales_keeps_its_gradients(ranks, tmp_path, data):
    run = config(tmp_path, data, "--recipe=fp8_delayed", "--train.steps=1", "--groups.default.stats=true")
    ranks(2).run(training.run, run)
    gradients = {name: cast for name, cast in training.metrics(run, "stats")[1].items() if name.endswith(".dy")}
    assert len(gradients) == 4, "of q, k and v, and of gate and up, those are one"
    assert all(cast["underflow"] < 1e-3 and cast["saturation"] == 0 for cast in gradients.values()), gradients


def passes(run: Config) -> list[str]:
    return [line for line in training.said(run) if "passes" in line]


@pytest.mark.ranks(2)
def test_scales_are_found_where_layers_get_delayed_ones_and_not_again(ranks, tmp_path, data):
    shorter = '{at_step = 3, recipe = {name = "fp8_delayed", amax_history_len = 4}}'
    swap = f'[{{at_step = 2, recipe = "fp8_delayed"}}, {shorter}, {{at_step = 4, recipe = "bf16"}}]'
    run = config(tmp_path, data, "--groups.default.swap", swap, "--train.steps=5", "--recipe=bf16")
    ranks(2).run(training.run, run)
    assert passes(run) == [f"step {n}: 3 passes without an update found 18 delayed scales" for n in (3, 4)]


@pytest.mark.ranks(2)
def test_a_resumed_run_finds_the_scales_that_its_checkpoint_has_not(ranks, tmp_path, data):
    at, found = tmp_path / "run" / "checkpoints", "3 passes without an update found 18 delayed scales"
    runs = [
        config(tmp_path, data, "--train.steps=2"),
        config(tmp_path, data, "--train.steps=4", "--recipe=fp8_delayed", f"--checkpoint.resume={at}/step-2"),
        config(tmp_path, data, "--train.steps=5", "--recipe=fp8_delayed", "--checkpoint.every=1"),
        config(tmp_path, data, "--train.steps=6", '--recipe={name = "fp8_delayed", amax_history_len = 4}'),
    ]
    said = []
    for run in runs:
        before = len(said)
        ranks(2).run(training.run, run)
        said = passes(run)
        assert len(said) - before == (run in (runs[1], runs[3])), run.train.steps
    assert said == [f"step 3: {found}", f"step 6: {found}"]


class BadPass(Trainer):
    """Trainer with an Inf in x of a layer on rank 1, in the first forward that computes initial delayed scales
    (`find_scales`)."""

    def find_scales(self, step: int) -> None:
        def spoil(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            handle.remove()
            x = args[0].clone()
            x.view(-1)[7] = torch.inf if dist.get_rank() == 1 else x.view(-1)[7]
            return (x,)

        handle = self.built.model.model.layers[0].mlp.down_proj.register_forward_pre_hook(spoil)
        with patch.object(self.stop, "beat") as beat:
            super().find_scales(step)
        assert beat.call_count == 3, "a boundary behind each pass, for SIGTERM's patience"


@pytest.mark.ranks(2)
def test_an_inf_in_a_pass_that_finds_scales_is_located_as_one_in_the_step(ranks, tmp_path, data):
    run = config(tmp_path, data, "--recipe=fp8_delayed", "--checkpoint.every=1")
    for message in ranks(2).run(training.stopped_by, run, BadPass):
        assert message.startswith("step 1: loss ")
        assert ": x of model.layers.0.mlp.down_proj held a NaN or Inf when it was cast on rank 1, " in message
    assert not list(Path(run.run.dir).glob("checkpoints/step-*"))


def left_by_passes(config: Config) -> tuple[int, list[str]]:
    """Run `find_scales`; return the number of delayed scales without an amax before, and the names of parameters that
    have a gradient afterwards."""
    trainer, done = training.trainer(config)
    unknown = initial_scales.without_amax(trainer.built.model)
    trainer.find_scales(done)
    training.end_determinism()
    return len(unknown), [name for name, p in trainer.built.model.named_parameters() if p.grad is not None]


@pytest.mark.ranks(2)
def test_passes_that_find_scales_leave_no_gradients(ranks, tmp_path, data):
    for unknown, left in ranks(2).run(left_by_passes, config(tmp_path, data, "--recipe=fp8_delayed")):
        assert unknown > 0 and not left


class AskedBefore(Trainer):
    """Trainer in which SIGTERM reaches rank 1 during the step whose boundary changes a recipe."""

    def train_step(self, step: int) -> Step:
        self.stop.requested = dist.get_rank() == 1
        return super().train_step(step)


def asked(config: Config) -> None:
    trainer, done = training.trainer(config, AskedBefore)
    trainer.train(done)


@pytest.mark.ranks(2)
@pytest.mark.full  # other tests stop a run at a step boundary, and compute initial scales
def test_a_run_that_is_asked_to_stop_saves_before_it_finds_scales(ranks, tmp_path, data):
    swap = '[{at_step = 1, recipe = "fp8_delayed"}]'
    run = config(tmp_path, data, "--recipe=bf16", "--groups.default.swap", swap, "--checkpoint.every=100")
    ranks(2).run(asked, run)
    assert not passes(run) and training.said(run)[-1].startswith("stopped by SIGTERM at step 1, ")
    settings = ("--recipe=bf16", "--groups.default.swap", swap, "--train.steps=2")
    again = config(tmp_path, data, *settings)
    ranks(2).run(training.run, again)
    whole = config(tmp_path, data, *settings, f"--run.dir={tmp_path}/whole")
    ranks(2).run(training.run, whole)
    assert passes(again) == passes(whole) == ["step 2: 3 passes without an update found 18 delayed scales"]
    assert training.metrics(again) == training.metrics(whole)


@pytest.mark.ranks(2)
def test_every_validation_has_scales(ranks, tmp_path, data):
    """A validation right after a recipe change: in a run that goes on, that is asked to stop, and that has done its last
    step; and the validation of a run that has nothing to do, with another recipe."""
    swap = ("--groups.default.swap", '[{at_step = 1, recipe = "fp8_delayed"}]')
    settings = ("--recipe=bf16", "--train.eval_every=1", "--train.schedule=constant", "--checkpoint.every=100")

    def validated(name: str, run: Any, *changes: str) -> float:
        made = config(tmp_path, data, *settings, f"--run.dir={tmp_path}/{name}", *changes)
        ranks(2).run(run, made)
        assert passes(made) == ["step 2: 3 passes without an update found 18 delayed scales"]
        return training.metrics(made, "validation_loss")[1]

    whole = validated("whole", training.run, *swap, "--train.steps=2")
    assert whole == validated("stopped", asked, *swap, "--train.steps=2")
    assert whole == validated("last", training.run, *swap, "--train.steps=1")
    ranks(2).run(training.run, config(tmp_path, data, *settings, f"--run.dir={tmp_path}/done", "--train.steps=1"))
    validated("done", training.run, "--recipe=fp8_delayed", "--train.steps=1")


BF16_SECOND = '\n[[groups]]\nname = "edges"\nmatch = ["layers.-1.**"]\nrecipe = "bf16"\n'


def test_the_last_group_with_a_recipe_or_swaps_decides_the_swaps(tmp_path, data):
    two = "--model.layers=2"
    made = config(tmp_path, data, two, "--groups.default.swap", SWAPS, groups=BF16_SECOND)
    text = plan_text(made, 2, "cpu")
    assert text.splitlines()[-3:-1] == [  # the last line is about saves
        "after step 2: nvfp4 for model.layers.0.self_attn.q_proj and 6 more layers",
        "after step 4: fp8_delayed(amax_history_len=4) for model.layers.0.self_attn.q_proj and 6 more layers",
    ]
    only_swaps = '\n[[groups]]\nname = "late"\nmatch = ["layers.-1.**"]\nswap = [{at_step = 9, recipe = "bf16"}]\n'
    text = plan_text(config(tmp_path, data, two, groups=only_swaps), 2, "cpu")
    assert text.splitlines()[-2] == "after step 9: bf16 for model.layers.1.self_attn.q_proj and 6 more layers"
    share = config(
        tmp_path, data, two, "--train.steps=5", "--groups.default.swap", "[{at_step = 0.5, recipe = 'nvfp4'}]"
    )
    assert "after step 2: nvfp4 for model.layers.0.self_attn.q_proj and 13 more layers" in plan_text(share, 2, "cpu")


@pytest.mark.parametrize(
    ("swap", "sentence"),
    [
        (
            "[{at_step = 0, recipe = 'bf16'}]",
            "expected a list of { at_step = an integer >= 1, or a number > 0 and < 1, recipe = as above }, got",
        ),
        ("[{recipe = 'bf16'}]", "expected a list of { at_step"),
        ("[{at_step = 1.0, recipe = 'bf16'}]", "expected a list of { at_step"),
        ("[{at_step = true, recipe = 'bf16'}]", "expected a list of { at_step"),
        ("[{at_step = 2, recipe = 'fp7'}]", "unknown recipe 'fp7'"),
        (
            "[{at_step = 2, recipe = 'bf16'}, {at_step = 2, recipe = 'nvfp4'}]",
            "swap: expected different steps, got 2 twice",
        ),
        (
            "[{at_step = 2, recipe = 'bf16'}, {at_step = 0.4, recipe = 'nvfp4'}]",
            "swap: expected different steps, got 2 twice",
        ),
    ],
)
def test_a_wrong_swap_is_refused(tmp_path, data, swap, sentence):
    with pytest.raises(ConfigError, match="default") as error:
        config(tmp_path, data, "--groups.default.swap", swap)
    assert sentence in str(error.value)


@pytest.mark.ranks(2)
def test_statistics_of_chosen_layers_are_in_the_metrics_and_on_a_page(ranks, tmp_path, data):
    group = '\n[[groups]]\nname = "look"\nmatch = ["layers.0.**"]\nstats = true\n'
    made = config(tmp_path, data, "--recipe=mxfp8", "--train.steps=2", groups=group)
    ranks(2).run(training.run, made)
    stats = training.metrics(made, "stats")
    assert list(stats) == [1, 2]
    layers = {parts_of(name)[0] for name in stats[1]}
    assert layers == {
        f"model.layers.0.{n}" for n in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    }
    assert all(25 < numbers["sqnr_db"] < 40 and numbers["saturation"] == 0 for numbers in stats[2].values())
    plot.main([made.run.dir, "--stats", "--out", str(tmp_path / "page.png")])
    assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG"
    (Path(made.run.dir) / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with pytest.raises(ValueError, match="no statistics found; set stats = true for a group of layers"):
        plot.main([made.run.dir, "--stats", "--out", str(tmp_path / "page.png")])


MINE = '''
"""mine: half of fp8_current's range."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dlp.quant.fp8 import CurrentScaling
from dlp.quant.recipe import Recipe, both
from dlp.quant.tensor import QuantizedTensor


@dataclass(frozen=True)
class Half(CurrentScaling):
    def cast(self, x: Tensor, amax: Tensor | None, **more: Any) -> QuantizedTensor:
        return super().cast(x, 2 * amax, **more)


def recipe(*, element: str = "e4m3") -> Recipe:
    return Recipe("mine", both(Half(element)), both(Half(element)), both(Half(element)))
'''


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", few([*RECIPES, "mine"], ()))
def test_every_recipe_trains_a_file_dropped_into_a_folder_too(ranks, tmp_path, data, name):
    recipe: Any = f'"{name}"'
    if name == "mine":
        (tmp_path / "mine.py").write_text(MINE)
        recipe = f'{{name = "mine", recipes_path = "{tmp_path}"}}'
    made = config(
        tmp_path, data, f"--recipe={recipe}", "--train.steps=4", "--train.eval_every=4", "--checkpoint.every=4"
    )
    ranks(2).run(training.run, made)
    losses = list(training.metrics(made).values())
    assert all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0] - 0.5, losses
    assert f", 2 {name} row" in training.said(made)[1]
