"""The shell commands in README.md and docs/*.md run.

    ```bash       every command except git and cd runs, in the order of the page, in one folder with the files that the page
                  presupposes
    ```bash gpus  the commands do not run, because they need GPUs or many ranks; the marks `hosts`, `network` and `minutes`
                  state that they need several hosts, a network or minutes

For blocks with a mark, the test checks that modules exist and settings are valid. A command runs in a fork
that has already imported torch. A training run ends after two steps, the commands of a make target run without
torchrun, and torchrun commands run on at most two ranks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import run as torchrun

from launch import convert_hf
from launch.checkpoint.manifest import complete, read_manifest, step_of, write_manifest
from launch.data.prepare import prepare
from launch.report import cast_statistics_plot, plots
from tests import training
from tests.command import command
from tests.pool import forking
from tests.test_convert_hf import published
from tests.test_docs import PAGES, ROOT
from tests.test_prepare import tokenizer
from tests.test_torchrun import free_port

LONG = 240.0  # seconds; ends a command that hangs
# Pages that run only with `--all-cases`, because test_prove.py and test_train_transformers.py run their programs
LONG_PAGES = ("prove.md", "from-transformers.md")
NEEDS = ("gpus", "hosts", "network", "minutes")
PROGRAMS = ("python", "make", "torchrun", "git", "pip", "nsys", "srun")
FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
MODEL = "def make():\n    from torch import nn\n    return nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16))\n"
SMALL = ["--train.global_batch", "2", "--train.eval_batches", "1", "--train.sequence", "64", "--train.log_every", "1"]
TINY = ["--model.layers", "1", "--model.hidden", "64", "--model.ffn", "128", "--model.head_dim", "16"]
SHORT = {  # shorter settings of programs that take minutes
    "launch.advise": ["--train.global_batch", "2", "--train.micro_batch", "1"],
    "launch.evaluate": ["--batches", "2"],
    "launch.generate": ["--tokens", "8"],
    "launch.prove": ["--meshes", "tp2", "--layers", "3", "--width", "64", "--steps", "1"],
}


def blocks(text: str) -> Iterator[tuple[list[str], str, int]]:
    """Yield (commands, mark, line) of each bash block. Raise ValueError for an unknown mark, and for commands in a block
    without a language."""
    for fence in FENCE.finditer(text):
        _, info, code = fence.groups()
        line = text.count("\n", 0, fence.start(3)) + 1
        language, _, mark = info.strip().partition(" ")
        typed = [each for each in code.replace("\\\n", " ").splitlines() if each.strip()]
        if language != "bash":
            if not language and any(each.split()[0] in PROGRAMS for each in typed):
                raise ValueError(f"line {line - 1}: commands in a block that is not marked bash")
            continue
        if mark and mark not in NEEDS:
            raise ValueError(f"line {line - 1}: ```{info} is none of: bash, bash {', bash '.join(NEEDS)}")
        commands = [part for each in typed for part in shlex_split(each)]
        yield commands, mark, line


def shlex_split(line: str) -> list[str]:
    """The commands of a line, without the comment."""
    words, commands = shlex.split(line, comments=True), [[]]
    for word in words:
        if word == "&&":
            commands.append([])
        else:
            commands[-1].append(word)
    return [shlex.join(each) for each in commands if each]


def statistics(records: Sequence[dict[str, Any]], title: str, out: Path) -> None:
    """Replacement for `write_stats`: check that the records have statistics, and draw nothing."""
    assert any("stats" in record for record in records), title


def program(output: Path, folder: Path, module: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Run `python -m module arguments` in a folder, and write stdout and stderr to `output`. Runs in a new process."""
    os.chdir(folder)
    sys.path[0:0] = [str(folder)]
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **environment)
    torch.set_num_threads(1)
    # runpy warns, because the module is imported already
    warnings.filterwarnings("ignore", "'.*' found in sys.modules after import of", RuntimeWarning)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [module, *arguments]
    torch.multiprocessing.start_processes = start_forks
    # Draw nothing: plotting takes as long as the steps, and test_launch_metrics.py and test_run_recipes.py draw
    plots.write_plot, cast_statistics_plot.write_stats = training._no_plot, statistics
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def start_forks(*given: Any, start: Any = torch.multiprocessing.start_processes, start_method: str = "") -> Any:
    """`torch.multiprocessing.start_processes` with forks instead of new interpreters, which would import torch and
    dlp."""
    return start(*given, start_method="fork")


def started(folder: Path, module: str, arguments: Sequence[str], ranks: int = 0) -> str:
    """Run a module in `folder`, on `ranks` ranks as under torchrun, or alone; return the output. Raises AssertionError
    if the module fails."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)} if ranks else {}
    runs = []
    for rank in range(max(ranks, 1)):
        environment = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
        output = folder / f"output-{rank}.txt"
        output.unlink(missing_ok=True)
        given = (output, folder, module, list(arguments), environment)
        runs.append((forking().Process(target=program, args=given), output))
    for process, _ in runs:
        process.start()
    for process, _ in runs:
        process.join(LONG)
    alive = [process for process, _ in runs if process.is_alive()]
    for process in alive:
        process.kill()
    said = "".join(output.read_text() for _, output in runs if output.exists())
    assert not alive and all(process.exitcode == 0 for process, _ in runs), f"{module} {shlex.join(arguments)}:\n{said}"
    return said


def setting(arguments: Sequence[str], name: str, default: str) -> str:
    """Return the value of `--name value` or `--name=value` in the arguments, or `default`."""
    for place, each in enumerate(arguments):
        if each == f"--{name}":
            return arguments[place + 1]
        if each.startswith(f"--{name}="):
            return each.partition("=")[2]
    return default


def shortened(folder: Path, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a training run, shortened: the batches are small, and the run ends two steps after the
    checkpoint from which it continues, or after two steps if there is no checkpoint."""
    before = complete(folder / setting(arguments, "run.dir", run_of(arguments)) / "checkpoints")
    done = step_of(before[-1]) if before and setting(arguments, "checkpoint.resume", "auto") == "auto" else 0
    profile = ["--train.profile", "0"] if setting(arguments, "train.profile", "0") != "0" else []
    model = [] if any(each.endswith(".toml") or each == "--model" for each in arguments) else TINY
    data = [] if setting(arguments, "data.path", "") else ["--data.path", "data/other"]  # instead of builtin:stdlib
    return [*arguments, *SMALL, *model, *data, *profile, "--train.steps", str(done + 2), "--train.eval_every", "1000"]


def run_module(folder: Path, module: str, arguments: list[str], ranks: int = 0) -> str:
    if module == "launch.local":  # run without ranks, because tests/test_torchrun.py tests ranks
        assert command(module, *arguments, "--print-config").code == 0
        arguments = arguments[2:] if arguments[:1] == ["--ranks"] else arguments
        return run_module(folder, "launch.train", arguments)
    if module == "launch.train" and "--plan" not in arguments:
        said = started(folder, module, shortened(folder, arguments), ranks)
        made = folder / setting(arguments, "run.dir", run_of(arguments)) / "checkpoints"
        if setting(arguments, "train.steps", "200") not in [path.name.removeprefix("step-") for path in complete(made)]:
            renumber(complete(made)[-1], int(setting(arguments, "train.steps", "200")))
        return said
    is_plan = module == "launch.train" and "--model" not in arguments
    layers = ["--model.layers", "3"] if is_plan else []
    return started(folder, module, [*arguments, *layers, *SHORT.get(module, [])], ranks)


def run_of(arguments: Sequence[str]) -> str:
    """Return the folder of a run as `launch.train` chooses it: named after the folder that contains the TOML file in the
    arguments; without a file, "transformers" with `--model`, else "tiny"."""
    default = "transformers" if "--model" in arguments else "tiny"
    return f"runs/{next((Path(each).parent.name for each in arguments if each.endswith('.toml')), default)}"


def renumber(made: Path, step: int) -> None:
    """Give a checkpoint of a shortened run the step at which the complete run would end, in its name and manifest."""
    whole = made.rename(made.with_name(f"step-{step}"))
    write_manifest(whole, {**read_manifest(whole), "step": step})


def by_make(folder: Path, arguments: list[str]) -> None:
    """Run the `python -m` commands that `make` would run. Commands that start pytest or check_env are skipped."""
    made = subprocess.run(
        ["make", "-n", *arguments, "PYTHON=python", "DEVICE=cpu"], cwd=ROOT, capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"]},  # variables of a `make test` that runs this test, such as ARGS, must not be inherited
    )  # fmt: skip
    recipe = made.stdout.replace("\\\n", " ").splitlines()
    found = [line for line in recipe if "check_env" not in line and " -m " in line]
    assert found, made.stdout
    for line in found:
        words = shlex.split(line.partition("python -m ")[2])
        if words[0] != "pytest":
            run_module(folder, words[0], words[1:])


def by_torchrun(folder: Path, arguments: list[str]) -> None:
    """Run two ranks if the command requests two ranks, else one rank, which needs no rendezvous."""
    asked = torchrun.parse_args(arguments)
    assert asked.module and asked.nnodes == "1:1"
    ranks = 2 if asked.nproc_per_node == "2" else 0
    run_module(folder, asked.training_script, asked.training_script_args, ranks)


def run_command(folder: Path, typed: str) -> None:
    words = shlex.split(typed)
    if words[:2] == ["python", "-m"]:
        expanded = [
            str(found.relative_to(folder)) if "*" in word else word
            for word in words[3:]
            for found in (sorted(folder.glob(word)) if "*" in word else [folder])
        ]
        run_module(folder, words[2], expanded)
    elif words[0] == "torchrun":
        by_torchrun(folder, words[1:])
    elif words[0] == "make":
        by_make(folder, words[1:])
    else:
        assert words[0] in ("git", "cd"), f"no test runs {typed}"


def check_settings(typed: str) -> None:
    """Check a command that cannot run here: the module exists and, for a training run, the settings are valid."""
    words = shlex.split(typed)
    if "-m" not in words:
        return
    module, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    assert importlib.util.find_spec(module) is not None, typed
    if module in ("launch.train", "launch.local") and "--plan" not in arguments:
        assert command("launch.config", *arguments).code == 0, typed


@pytest.fixture(scope="module")
def presupposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files that the pages presuppose: texts, data, a tokenizer, published weights, and a run of tiny
    at step 200."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("pages")
    rows = [f"a row of text with the number {number % 50}" for number in range(1200)]
    for name in ("notes", "texts", "models", "weights", "runs", "data", "docs", "my_package"):
        (folder / name).mkdir()
    for name in ("notes/one.txt", "notes/two.txt", "texts/one.txt", "book.txt", "prompts.txt"):
        (folder / name).write_text("a row of text\nwith the number 7\n" * (1 if name == "prompts.txt" else 400))
    pq.write_table(pa.table({"text": rows}), folder / "web-0.parquet")
    prepare({"book.txt": folder / "book.txt"}, folder / "data" / "other", validation=0.3)
    (folder / "my_package" / "models.py").write_text(MODEL)
    (folder / "bench").symlink_to(ROOT / "bench")
    tokenizer(folder / "models" / "mine", words=" ".join(rows))
    for name in ("Llama-3.2-1B", "Llama-3.1-8B"):
        published(folder / name, max_position_embeddings=4096)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / "models" / "mine" / file, folder / name / file)
    convert_hf.import_folder(folder / "Llama-3.1-8B", folder / "weights" / "llama3_8b")
    run_module(folder, "launch.train", ["tiny"])
    return folder


def pages() -> list[Any]:
    """Pages with commands. The commands of LONG_PAGES run only with `--all-cases`."""
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.full] if page.name in LONG_PAGES else [])
        for page in PAGES
        if list(blocks(page.read_text()))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages())
def test_the_commands_of_a_page(page: Path, presupposed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    for commands, mark, line in blocks(page.read_text()):
        if not mark and not folder.exists():
            shutil.copytree(presupposed, folder, symlinks=True)
        for typed in commands:
            try:
                check_settings(typed) if mark else run_command(folder, typed)
            except Exception as error:
                raise AssertionError(f"{page.name}:{line}: {typed}") from error


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_PAGES)
def test_the_settings_of_a_page_that_takes_long(name: str, presupposed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(presupposed)
    (page,) = [page for page in PAGES if page.name == name]
    for commands, _, _ in blocks(page.read_text()):
        for typed in commands:
            check_settings(typed)


PAGE = """\
```bash
git clone URL here && cd here   # a comment
make plan \\
    WORLD=8
```
```bash gpus
torchrun -m launch.train tiny
```
```
said by a program
```
"""


def test_blocks_are_taken_with_their_mark_and_line() -> None:
    assert list(blocks(PAGE)) == [
        (["git clone URL here", "cd here", "make plan WORLD=8"], "", 2), (["torchrun -m launch.train tiny"], "gpus", 7)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("```bash gpu\nmake plan\n```\n", "line 1: ```bash gpu is none of: bash, bash gpus, bash hosts, bash network"),
        ("text\n```\npython -m launch.train\n```\n", "line 2: commands in a block that is not marked bash"),
    ],
)
def test_a_misspelt_mark_and_an_unmarked_command_are_errors(page: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        list(blocks(page))


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed", ["python -m launch.train tiny --train.lr fast", "python -m launch.gone", "tar xf a", "make nothing"]
)
def test_a_command_that_fails_is_an_error(typed: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        run_command(tmp_path, typed)


@pytest.mark.parametrize("typed", ["torchrun -m launch.train tiny --train.lrr 1", "torchrun -m launch.gone"])
def test_settings_of_a_command_that_cannot_run_are_checked(typed: str) -> None:
    with pytest.raises(AssertionError):
        check_settings(typed)
