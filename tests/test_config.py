"""Run configuration, without a device: files, overrides, every error message, the printed config and the
documentation."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dlp.comm.mesh import TP, TRANSPORTS, WORLD
from dlp.optim.encodings import ENCODINGS
from launch.config import early
from launch.config import run_config as configuration
from launch.config.__main__ import docs
from launch.config.files import CONFIGS, FOR_FOLDERS, chosen
from launch.config.groups import SCHEMA, Group
from launch.config.rules import validate_world
from launch.config.run_config import load, make_parser, to_toml
from launch.config.sections import Train
from launch.settings.schema import ConfigError, choice, rule_of
from launch.train import check_restarts
from launch.training.build import build, plan_for
from launch.training.cuda_graph import describe_graph, replays_steps
from tests.command import command
from tests.refusals import must_raise, refuses

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.toml") if path.stem != FOR_FOLDERS)
TINY = (CONFIGS / "tiny.toml").read_text()


def refused(arguments: list[str], name: str | Path = "tiny") -> str:
    return must_raise(ConfigError, load, name, arguments)


def refused_file(folder: Path, old: str, new: str) -> str:
    assert old in TINY
    path = folder / "mine.toml"
    path.write_text(TINY.replace(old, new))
    return refused([], path)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_load_and_fit_few_ranks(name: str) -> None:
    config = load(name)
    batch = validate_world(config, max(2, config.mesh.tp, config.mesh.dp_shard))
    assert batch.micro * batch.num_micro * batch.dp_size == config.train.global_batch
    assert batch.micro * config.train.sequence // config.mesh.tp % 128 == 0


def test_configs_of_one_model_agree_on_the_model() -> None:
    assert load("llama3_8b_nvfp4").model == load("llama3_8b").model


def test_tiny_is_what_the_documentation_says() -> None:
    model = load().model
    assert (model.layers, model.hidden, model.ffn, model.heads, model.kv_heads) == (4, 256, 1024, 4, 2)
    assert [(group.name, group.recipe) for group in load().groups] == [("default", "fp8_current"), ("edges", "bf16")]


@pytest.mark.parametrize("name", SHIPPED)
def test_printed_config_loads_as_an_equal_config(name: str, tmp_path: Path) -> None:
    awkward = ["--run.dir", 'runs/"a"\\b\x7fé', "--train.betas", "[0, 0.5]", "--groups.edges.siblings", "true"]
    config = load(name, awkward + ["--recipe", '{ name = "fp8_current", power_of_two = true }', "--train.eps", "1e-12"])
    (tmp_path / "printed.toml").write_text(to_toml(config))
    assert load(tmp_path / "printed.toml") == config
    assert load(name) != config


def test_numbers_are_stored_as_declared() -> None:
    config = load("tiny", ["--train.lr", "1", "--train.betas", "[0, 0.5]"])
    assert type(config.train.lr) is float and config.train.betas == (0.0, 0.5)


def test_overrides_reach_sections_and_groups() -> None:
    config = load("tiny", ["--train.steps=7", "--recipe", "bf16", "--groups.edges.match", '["a", "b"]'])
    assert config.train.steps == 7 and type(config.train.steps) is int
    assert config.groups[0].recipe == "bf16" and config.groups[1].match == ("a", "b")
    assert load("tiny", ["--run.dir", "2024"]).run.dir == "2024"
    assert load("tiny", ["--mesh.dp_shard", "-1", "--train.compile", "true"]).train.compile is True


def test_odd_tokens_fit_without_sequence_parallelism() -> None:
    odd = ["--train.micro_batch=1", "--train.sequence=255"]
    assert load("tiny", [*odd, "--mesh.sequence_parallel=false"]).train.sequence == 255


def test_recipe_options() -> None:
    chosen = load("tiny", ["--recipe", '{ name = "fp8_current", power_of_two = true }']).groups[0]
    assert chosen.recipes() == [{"name": "fp8_current", "power_of_two": True}]
    swap = [{"at_step": 2, "recipe": "nvfp4"}]
    assert Group(name="a", match=["b"], recipe="bf16", swap=swap).recipes() == ["bf16", "nvfp4"]
    assert Group(name="a", match=["b"]).recipes() == []
    late = Group(name="a", match=["b"], swap=[{"at_step": share, "recipe": "bf16"} for share in (0.82, 0.001, 7)])
    assert [step for step, _ in late.swaps(900)] == [738, 1, 7]


# Each entry is a line of arguments, followed by an indented line with the complete message, or with the beginning of the
# message and "...".
REFUSED = """
--train.lr fast
    --train.lr: expected a number > 0, got 'fast'
--train.lr 0
    --train.lr: expected a number > 0, got 0
--train.lr inf
    --train.lr: expected a number > 0, got inf
--train.lr
    --train.lr: expected a value after it, got nothing
--run.dir --plan
    --run.dir: expected a value after it, got --plan
--train.steps true
    --train.steps: expected an integer >= 1, got True
--train.steps 1.0
    --train.steps: expected an integer >= 1, got 1.0
--mesh.dp_shard 0
    --mesh.dp_shard: expected an integer >= 1, or -1, got 0
--train.compile 1
    --train.compile: expected true or false, got 1
--train.dtype fp16
    --train.dtype: expected "bf16" or "fp32", got 'fp16'
--train.min_lr 2
    --train.min_lr: expected a number >= 0 and <= 1, got 2
--train.betas [0.9]
    --train.betas: expected a list of 2 numbers >= 0 and < 1, got [0.9]
--run.dir ''
    --run.dir: expected a string that is not empty, got ''
--groups.edges.match []
    --groups.edges.match: expected a list of strings that is not empty, got []
--recipe '{ margin = 1 }'
    --groups.default.recipe: expected a recipe's name or { name = ..., its options }, got {'margin': 1}
--train.weigth_decay 0.1
    --train.weigth_decay: unknown option, the nearest are --train.weight_decay, ...
--trian.lr 1
    --trian.lr: unknown option, the nearest are --train.lr, ...
--groups.edges.recip bf16
    --groups.edges.recip: unknown option, the nearest are --groups.edges.recipe, ...
--groups.edge.recipe bf16
    --groups.edge.recipe: unknown option, the nearest are --groups.edges.recipe, ...
llama3_1b
    llama3_1b: expected overrides of the form --section.key value
--recipe fp8
    tiny.toml: [[groups]] 'default': unknown recipe 'fp8': the recipes are bf16, ...
--recipe '{ name = "bf16", margin = 1 }'
    tiny.toml: [[groups]] 'default': recipe bf16 has no option 'margin'...
--groups.edges.match '["layers.{0,1"]'
    tiny.toml: [[groups]] 'edges': ...
--groups.edges.overlap '{ fwd = "a" }'
    --groups.edges.overlap: expected auto, a strategy's name or { fprop = ..., dgrad = ..., wgrad = ... }, got {'fwd': 'a'}
--mesh.tp 3
    tiny.toml: [mesh] tp: expected a divisor of [model] heads = 4, got 3
--mesh.tp 4
    tiny.toml: [mesh] tp: expected a divisor of [model] kv_heads = 2, got 4
--model.ffn 1023
    tiny.toml: [mesh] tp: expected a divisor of [model] ffn = 1023, got 2
--model.vocab 385
    tiny.toml: [mesh] tp: expected a divisor of [model] vocab = 385, got 2
--model.kv_heads 3
    tiny.toml: [model] kv_heads: expected a divisor of heads = 4, got 3
--model.head_dim 63
    tiny.toml: [model] head_dim: expected an even number, got 63
--train.micro_batch 1 --train.sequence 255
    tiny.toml: [mesh] tp: expected a divisor of [train] micro_batch x sequence = 255 under sequence_parallel, got 2
--train.micro_batch 4 --train.global_batch 6
    tiny.toml: [train] global_batch: expected a multiple of micro_batch = 4, got 6
--mesh.dp_replicate -1
    tiny.toml: [mesh] dp_replicate, dp_shard: expected one -1, got two
--groups.edges.name default
    tiny.toml: [[groups]] name: expected different names, got default, default
--train.recompute_every 2
    tiny.toml: [train] recompute_every: expected 1 with checkpointing = "none", which recomputes no block, got 2; set...
--train.profile 6 --train.steps 5
    tiny.toml: [train] profile: expected one of the 5 steps, or 0, got 6
--train.sentinel 64 --train.ledger always
    tiny.toml: [train] sentinel: expected 0 with ledger = "always", since a step whose bytes are counted cannot run...
--train.sentinel_action skip
    tiny.toml: [train] sentinel_action, sentinel_tensors: expected a number of steps in sentinel, got 0; set...
--train.cuda_graph true --groups.default.stats true
    tiny.toml: [train] cuda_graph = true: statistics are read in each step of group default; leave stats out of the group
--train.invariant true --train.compile true
    tiny.toml: [train] invariant = true: compiled code adds in an order that depends on shapes; set [train] compile = false
--train.invariant true --model.fused true
    tiny.toml: [train] invariant = true: fused sequences add in another order; set [model] fused = false
--train.invariant true --train.optimizer muon
    tiny.toml: [train] invariant = true: muon computes on parts of matrices that depend on the mesh; set...
--train.invariant true --train.main_grads grad
    tiny.toml: [train] invariant = true: wgrad GEMMs would add microbatches in order, not by the tree; set...
--train.invariant true --train.reduce_gradients step
    tiny.toml: [train] invariant = true: FSDP would add microbatches in order, not by the tree; set...
--train.invariant true --train.sentinel 8
    tiny.toml: [train] invariant = true: the sentinel is not tested with sums by the tree; set [train] sentinel = 0
--train.invariant true --train.dtype fp32
    tiny.toml: [train] invariant = true: the bits of fp32 activations depend on how kernels vectorize a row; set...
--train.invariant true --train.ledger always
    tiny.toml: [train] invariant = true: the plan does not predict the bytes of partial sums in fp32; set...
--train.invariant true --data.reset_attention true
    tiny.toml: [train] invariant = true: attention within documents is not tested on parts of the heads; set...
--train.invariant true --mesh.grad_wire bf16
    tiny.toml: [train] invariant = true: gradients travel in fp32; set [mesh] grad_wire = "fp32", not "bf16"
--train.cuda_graph yes
    --train.cuda_graph: expected "auto", true or false, got 'yes'
"""
LONG_NAME = "x" * 5000
LONG_NUMBER = "1" + "0" * 400  # larger than every float


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--train.a\nb", "1"], "--train.a\\nb: unknown option, the nearest are --train."),
        (["--train.schedule", "a\nb"], "got 'a\\nb'"),
        ([f"--train.{LONG_NAME}", "1"], "x[... 4906 more ...]x"),
        (["--train.lr", LONG_NAME], "--train.lr: expected a number > 0, got 'x"),
        (["--recipe", LONG_NAME], "tiny.toml: [[groups]] 'default': unknown recipe 'xxx"),
        (["--groups.default.match", f'["{LONG_NAME}..a"]'], "tiny.toml: [[groups]] 'default': "),
        (["--run.dir", "[1, " + "2, " * 3000 + "3]"], "--run.dir: expected a string that is not empty, got [1, 2"),
        (["--train.lr", "1 " * 3000], "--train.lr: expected a number > 0, got '1 1"),
        (["--train.lr", LONG_NUMBER], "--train.lr: expected a number > 0, got 1000"),
        (["--train.steps", LONG_NUMBER], "--train.steps: expected an integer >= 1, got 1000"),
        (["--train.skip_spikes", LONG_NUMBER], "--train.skip_spikes: expected a number > 1, or 0, got 1000"),
        (
            ["--train.betas", f"[0, {LONG_NUMBER}]"],
            "--train.betas: expected a list of 2 numbers >= 0 and < 1, got [0, 1000",
        ),
        (
            ["--model.rope_scaling", f"{{ rope_type = 'linear', factor = {LONG_NUMBER} }}"],
            "--model.rope_scaling: expected a",
        ),
        (["--model.rope_scaling", "{ rope_type = 'linear', factor = inf }"], "--model.rope_scaling: expected a table"),
    ],
    ids=[
        "newline",
        "in a value",
        "option",
        "name",
        "recipe",
        "pattern",
        "list",
        "words",
        "number",
        "integer",
        "number or 0",
        "numbers",
        "table",
        "infinite",
    ],
)
def test_a_refusal_is_one_short_line_whatever_was_typed(arguments: list[str], said: str) -> None:
    message = refused(arguments)
    assert said in message and "\n" not in message and len(message) < 700


def test_the_default_config_depends_on_the_model_and_not_on_values_of_settings() -> None:
    folder = [("model.folder", "F")]
    assert chosen("tiny", ["--model", "F", "--run.dir", "tiny"], folder) == FOR_FOLDERS
    assert chosen("tiny", ["tiny", "--model", "F"], folder) == "tiny"
    assert chosen("tiny", ["--run.dir", "tiny"], []) == "tiny"


def test_a_config_of_an_endless_name_is_one_short_line() -> None:
    with pytest.raises(ConfigError, match=r"^x+\[\.\.\. 4900 more \.\.\.\]x+: no such config, expected a path"):
        load(LONG_NAME)


PAIRS = re.findall(r"^(\S.*)\n {4}(.*)$", REFUSED, re.MULTILINE)


@pytest.mark.parametrize(("arguments", "sentence"), PAIRS)
def test_refused_override(arguments: str, sentence: str) -> None:
    message = refused(shlex.split(arguments))
    beginning = sentence.removesuffix("...")
    assert message.startswith(beginning) and "\n" not in message
    assert message == beginning or sentence.endswith("...")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("lr = 3e-3", 'lr = "fast"', "mine.toml: [train] lr: expected a number > 0, got 'fast'"),
        ("lr = 3e-3", "lear_rate = 3e-3", "mine.toml: [train] lear_rate: unknown key, the nearest are "),
        ("steps = 200\n", "", "mine.toml: [train] steps: missing, expected an integer >= 1"),
        ('match = ["lm_head"]', 'match = "lm_head"', "mine.toml: [[groups]] 'edges' match: expected a list of strings"),
        ('match = ["lm_head"]', "", "mine.toml: [[groups]] 2 match: missing, expected a list of strings"),
        ("[data]", "[dat]", "mine.toml: [dat]: unknown section, expected one of mesh, model, data, train, checkpoint"),
        ("[data]", "[mesh]\n[data]", "mine.toml: not a TOML file: "),
        ("[data]", "[data", "mine.toml: not a TOML file: "),
        ("[[groups]]", "[[data.groups]]", "mine.toml: [[groups]]: expected one or more such tables"),
    ],
)
def test_refused_file(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    message = refused_file(tmp_path, old, new)
    assert message.startswith(sentence)
    assert "\n" not in message


def test_a_section_must_be_a_table(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("mesh = 3\n" + TINY.replace("[mesh]", "[run]").replace('[run]\ndir = "', "#"))
    assert refused([], tmp_path / "mine.toml") == "mine.toml: mesh: expected a table, [mesh], got 3"


def test_unknown_config_lists_the_shipped_ones() -> None:
    assert refused([], "tinny") == (
        "tinny: no such config, expected a path to a TOML file or one of bench_8b, fidelity, llama3_1b, "
        "llama3_70b, llama3_8b, llama3_8b_nvfp4, quality, qwen3_8b, tiny, transformers"
    )


def test_sections_built_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"^\[train\] steps: expected an integer >= 1, got 0$"):
        dataclasses.replace(load().train, steps=0)
    with pytest.raises(TypeError):
        Train(steps=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "world", "expected"),
    [("", 2, (8, 1, 1)), ("", 8, (2, 1, 4)), ("--train.micro_batch=2", 4, (2, 2, 2)), ("--mesh.tp=1", 2, (4, 1, 2))],
)
def test_batch_on_a_world(arguments: str, world: int, expected: tuple[int, int, int]) -> None:
    batch = validate_world(load("tiny", arguments.split()), world)
    assert (batch.micro, batch.num_micro, batch.dp_size) == expected


@pytest.mark.parametrize(
    ("arguments", "world", "sentence"),
    [
        (
            ["--mesh.dp_shard", "2"],
            6,
            "[mesh] world size 6 is not dp_replicate 1 x dp_shard 2 x tp 2: start 4 ranks, or set dp_shard or "
            "dp_replicate to -1",
        ),
        (
            [],
            3,
            "[mesh] world size 3 is not a multiple of dp_replicate 1 x tp 2 = 2, so dp_shard = -1 cannot be filled: "
            "start a multiple of that many ranks by torchrun --nproc-per-node, or choose a smaller axis",
        ),
        (
            [],
            1,
            "[mesh] world size 1 is not a multiple of dp_replicate 1 x tp 2 = 2, so dp_shard = -1 cannot be filled: "
            "start a multiple of that many ranks by torchrun --nproc-per-node, or choose a smaller axis",
        ),
        (
            ["--train.global_batch", "4"],
            16,
            "[train] global_batch: expected a multiple of micro_batch 1 x 8 data-parallel ranks, got 4",
        ),
    ],
)
def test_worlds_that_do_not_fit(arguments: list[str], world: int, sentence: str) -> None:
    assert must_raise(ConfigError, validate_world, load("tiny", arguments), world) == f"tiny.toml: {sentence}"


@pytest.mark.parametrize("resume", ["none", "runs/other/checkpoints/step-3"])
def test_restarts_that_would_begin_anew_are_refused(resume: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_restarts(load("tiny", [f"--checkpoint.resume={resume}"]))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    check_restarts(load("tiny"))
    assert must_raise(ConfigError, check_restarts, load("tiny", [f"--checkpoint.resume={resume}"])) == (
        f"--checkpoint.resume {resume}: expected auto under torchrun --max-restarts 3, since a restart after a failure "
        f"would begin at this checkpoint again and ignore later checkpoints; choose another --run.dir, or start "
        f"without restarts"
    )


def test_page_of_documentation_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == docs(), "run: python -m launch.config --docs > docs/config.md"
    assert refused(["--train.lr", "fast"]) in docs()


def test_help_lists_every_setting_and_default() -> None:
    text = make_parser("launch.train", "Trains.").format_help()
    for section, cls in SCHEMA.items():
        for each in dataclasses.fields(cls):
            assert f"--{'groups.NAME' if section == 'groups' else section}.{each.name}  [" in text
            assert each.metadata["doc"] in text and rule_of(each).words in text
    assert "--mesh.tp  [2]" in text and "--train.steps  [required]" in text


def test_command_line_splits_options_from_settings() -> None:
    parser = make_parser("launch.train", "Trains.")
    parser.add_argument("--plan", action="store_true")
    known, config = configuration.command_line(parser, ["--train.lr", "1e-3", "llama3_1b", "--plan"])
    assert known.plan and known.config == "llama3_1b" and config.train.lr == 1e-3 and config.source == "llama3_1b.toml"
    with pytest.raises(ConfigError, match="^--lr: unknown option, the nearest are --train.lr"):
        configuration.command_line(parser, ["--lr", "1e-3"])
    with pytest.raises(ConfigError, match="^other: only one config can be given, and 'tiny' is given already"):
        configuration.command_line(parser, ["tiny", "other"])


def test_as_a_program() -> None:
    refusal = "tiny.toml: [mesh] tp: expected a divisor of [model] kv_heads = 2, got 4\n"
    assert command("launch.config", "tiny", "--mesh.tp", "4") == (1, "", refusal)


def test_a_cuda_graph_needs_a_gpu() -> None:
    config = load("tiny", ["--mesh.tp", "1", "--train.cuda_graph", "true"])
    mesh: Any = None  # the refusal comes before the mesh is used
    with refuses(r"^tiny.toml: \[train\] cuda_graph = true: expected a GPU, got a CPU; set it to", ConfigError):
        build(config, mesh, torch.device("cpu"))


def test_steps_are_captured_on_gpus_wherever_nothing_forbids_it() -> None:
    config = load("tiny")
    assert config.train.cuda_graph == "auto" and replays_steps(config, "cuda") and not replays_steps(config, "cpu")
    assert describe_graph(config, "sm_90") == "cuda graph: steps are captured after 3 eager steps and replayed"
    assert describe_graph(config, "cpu").endswith("(the ranks are on CPUs)")
    documents = load("tiny", ["--data.reset_attention", "true"])
    assert not replays_steps(documents, "cuda")
    assert describe_graph(documents, "cuda").endswith("with each step; set [data] reset_attention = false)")
    off = load("tiny", ["--train.cuda_graph", "false"])
    assert not replays_steps(off, "cuda") and "[train] cuda_graph = false" in describe_graph(off, "cuda")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--groups.edges.sequence_parallel false",
            "lm_head: group 'vocabulary' chose sequence_parallel = True together",
        ),
        (
            "--groups.default.style column",
            "model.layers.0.self_attn.o_proj: group 'o_down' chose style = 'row' together",
        ),
        (
            "--groups.default.style local",
            "model.layers.0.self_attn.q_proj: group 'qkv' chose style = 'column' together",
        ),
        (
            "--groups.edges.sequence_parallel false --groups.edges.style column",
            "lm_head: its groups set sequence_parallel = False, others True, and a Llama shards tokens from embedding",
        ),
        (
            "--groups.edges.sequence_parallel true --groups.edges.style local",
            "lm_head: style = 'local', but the loss reads logits that are sharded over tp: remove style from its groups",
        ),
        (
            "--groups.edges.match FIRST --groups.edges.sequence_parallel true --groups.edges.style local",
            "model.layers.0.self_attn.q_proj: style = 'local' under sequence parallelism gives attention only a shard "
            "of the tokens",
        ),
    ],
)
def test_styles_that_a_llama_cannot_run_are_refused(arguments: str, sentence: str) -> None:
    given = ["--mesh.tp", "2", *shlex.split(arguments.replace("FIRST", """'["layers.0.{self_attn,mlp}.**"]'"""))]
    plan_for(load("tiny", ["--mesh.tp", "1", *given[2:]]), 1, "cpu")
    assert must_raise(ValueError, plan_for, load("tiny", given), 2, "cpu").startswith(sentence)


# Parts of messages that `early` cannot raise, because only `dlp` can check recipes and patterns
LATE = ("unknown recipe", "recipe bf16 has no option", "[[groups]] 'edges': ")


def test_settings_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """`early`, with which programs check the command line, raises the errors of `load` without importing torch. A
    module `torch` that raises on import replaces torch."""
    for arguments, sentence in PAIRS:
        if not any(late in sentence for late in LATE) and sentence.startswith(("--", "tiny.toml")):
            with pytest.raises(ConfigError, match=re.escape(sentence.removesuffix("..."))):
                early.check(shlex.split(arguments))
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    (tmp_path / "broken.toml").write_text("[train")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    cases = [
        ("nosuch --plan", "nosuch: no such config"),
        ("broken.toml", "broken.toml: not a TOML"),
        ("binary.toml", "binary.toml: not a TOML"),
        ("tiny --train.lr fast", "--train.lr: expected a number > 0, got 'fast'\n"),
    ]
    ranks = [
        ("tiny --mesh.tp 2", "tiny.toml: [mesh] world size 1 is not a multiple of dp_replicate 1 x tp 2 = 2, so"),
        ("tiny --plan --world 3", "tiny.toml: [mesh] world size 3 is not a multiple of"),
        ("RANK=0 WORLD_SIZE=3 tiny", "tiny.toml: [mesh] world size 3 is not a multiple of"),
        (
            "RANK=0 WORLD_SIZE=16 tiny --train.global_batch=4",
            "tiny.toml: [train] global_batch: expected a multiple of micro_",
        ),
    ]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    for program, asked in (("launch.train", [*cases, *ranks]), ("launch.local", cases)):
        for line, said in asked:
            given = dict(word.split("=") for word in line.split() if word[0].isupper())
            words = [word for word in line.split() if not word[0].isupper()]
            ended = subprocess.run(
                [sys.executable, "-m", program, *words], cwd=tmp_path, env=outside | path | given,
                capture_output=True, text=True,
            )  # fmt: skip
            assert ended.returncode == 1 and ended.stderr.startswith(said), (line, ended.stderr)


def test_choices_that_are_declared_without_torch_are_those_of_dlp() -> None:
    rules = {each.name: rule_of(each).words for cls in SCHEMA.values() for each in dataclasses.fields(cls)}
    assert rules["transport"] == choice(*TRANSPORTS).words
    assert rules["amax_group"] == choice("auto", TP, "tp+cp", "tp+dp", WORLD).words
    assert rules["optimizer"] == choice("adamw", "muon", *ENCODINGS).words
    plain, full = ([each.name for each in dataclasses.fields(cls)] for cls in (early.SCHEMA["groups"], Group))
    assert sorted(plain) == sorted(full)
