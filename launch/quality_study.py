"""Whether recipes cost quality: short trainings, paired by seed, of every recipe and bf16.

    python -m launch.quality_study FOLDER [--ranks N] [--seeds 3] [--megabytes 100] [--only RECIPE,SEED]
                                          [--section.key value ...]

    FOLDER/data                 the sources of the standard library and of installed packages, byte by byte
    FOLDER/data.txt             their hash, and the packages with their versions: another machine has other data
    FOLDER/runs/RECIPE-SEED     one run of launch/configs/quality.toml each; a finished one is not repeated, an
                                interrupted one resumes
    FOLDER/report.md, .png      what the finished runs say, and their differences to bf16 step by step

Runs with the same seed start from the same weights and read the same batches in the same order, so that most of the
noise between seeds cancels in the difference to bf16 of the same seed. Variants, by which the parts of a recipe are judged,
are run where `--recipes` names them. The bars are 0.25 % of the smoothed final loss for 8-bit recipes and 1 % for nvfp4. A
mean of differences counts if its standard error is at most half the bar, or if it is beyond the bar by two of them; otherwise
the report says "not resolved", which is no pass.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import math
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dlp.quant import recipe as recipes
from launch import local
from launch.checkpoint import changes
from launch.config import count, load, to_toml
from launch.data import stdlib_files
from launch.documents import walk
from launch.metrics import read_metrics
from launch.overrides import split
from launch.plot import series, smooth
from launch.prepare import prepare

BASELINE = "bf16"
BARS = {"nvfp4": 0.01}
BAR = 0.0025


def _edges(*blocks: int) -> list[str]:
    """These of the six blocks in bf16, and the head."""
    kept = ", ".join(f'"layers.{block}.**"' for block in blocks)
    return ["--groups.edges.match", f'[{kept}, "lm_head"]']


# nvfp4 keeps the last of the six blocks in bf16, as its authors do
EXTRA = {"nvfp4": _edges(-1)}
LATE = '[{ at_step = 1300, recipe = "bf16" }]'  # the last seventh of the steps, as the authors of nvfp4 pretraining do
# What of a recipe costs quality: its name in the study -> what it changes
VARIANTS = {
    "fp8_delayed-16": ["--recipe", '{ name = "fp8_delayed", amax_history_len = 16 }'],
    "fp8_delayed-recent": ["--recipe", '{ name = "fp8_delayed", amax_compute_algo = "most_recent" }'],
    "nvfp4-last2": ["--recipe", "nvfp4", *_edges(-2, -1)],
    "nvfp4-first-last": ["--recipe", "nvfp4", *_edges(0, -1)],
    "nvfp4-all": ["--recipe", "nvfp4"],
    "nvfp4-1d": ["--recipe", '{ name = "nvfp4", disable_2d_quantization = true }', *_edges(-1)],
    "nvfp4-no-rht": ["--recipe", '{ name = "nvfp4", disable_rht = true }', *_edges(-1)],
    "nvfp4-then-bf16": ["--recipe", "nvfp4", *_edges(-1), "--groups.default.swap", LATE],
    "nvfp4-nearest": ["--recipe", '{ name = "nvfp4", disable_stochastic_rounding = true }', *_edges(-1)],
}
LAST = 0.1  # of the steps, whose mean loss is the smoothed final loss

Train = Callable[[int, Sequence[str]], int]


@dataclass(frozen=True)
class Study:
    """What is studied: where, on how many ranks, with which recipes and seeds; `overrides` of the config of every run."""

    folder: Path
    recipes: tuple[str, ...]
    seeds: tuple[int, ...]
    ranks: int
    overrides: tuple[str, ...]

    def run_folder(self, recipe: str, seed: int) -> Path:
        return self.folder / "runs" / f"{recipe}-{seed}"

    def arguments(self, recipe: str, seed: int) -> list[str]:
        """Of `launch.train`."""
        return [
            "quality", *self.overrides, *settings_of(recipe), "--train.seed", str(seed),
            "--data.path", str(self.folder / "data"), "--run.dir", str(self.run_folder(recipe, seed)),
        ]  # fmt: skip


def settings_of(recipe: str) -> list[str]:
    """Of a recipe or a variant of one, for `launch.train`."""
    return VARIANTS.get(recipe) or ["--recipe", recipe, *EXTRA.get(recipe, [])]


def sources(megabytes: float) -> dict[str, Path]:
    """Python sources by name, up to so many bytes: the standard library's, then those of installed packages, in the
    order of their hashed names so that a part of them is a fair sample."""
    files = stdlib_files()
    for distribution in importlib.metadata.distributions():
        for top in (distribution.read_text("top_level.txt") or "").split():
            folder = Path(str(distribution.locate_file(top)))
            if folder.is_dir():
                files |= {f"{top}/{name}": path for name, path in walk(folder).items() if name.endswith(".py")}
    chosen, size = {}, 0
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if size < megabytes * 1e6:
            chosen[name] = files[name]
            size += files[name].stat().st_size
    return dict(sorted(chosen.items()))


def make_data(folder: Path, megabytes: float) -> None:
    """The shards of the study, once, and a page that says what they are."""
    if (folder / "data").exists():
        return
    files = sources(megabytes)
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    folder.mkdir(parents=True, exist_ok=True)
    packages = sorted({f"{each.name} {each.version}" for each in importlib.metadata.distributions()})
    size = sum(path.stat().st_size for path in files.values())
    lines = [f"sha256 {digest.hexdigest()}", f"{len(files)} files, {size} bytes", f"python {sys.version.split()[0]}"]
    (folder / "data.txt").write_text("\n".join([*lines, *packages]) + "\n")
    prepare(files, folder / "data", validation=0.02)


@dataclass(frozen=True)
class Final:
    """Losses of a finished run: the mean of its last steps, and of the validation after the last one."""

    smoothed: float
    validation: float


def final(run: Path) -> Final | None:
    """Of a finished run, one that was validated after its last step; else None."""
    if not (run / "metrics.jsonl").is_file():
        return None
    records = read_metrics(run / "metrics.jsonl")
    steps = tomllib.loads((run / "config.toml").read_text())["train"]["steps"]
    losses = [record["loss"] for record in records if "loss" in record]
    for record in records:
        if record["step"] == steps and "validation_loss" in record:
            last = losses[-max(1, round(LAST * len(losses))) :]
            return Final(statistics.fmean(last), record["validation_loss"])
    return None


def train_all(study: Study, only: tuple[str, int] | None, train: Train) -> None:
    """Every run that is not finished, or one. Raises RuntimeError for one that failed or was stopped, and for one that was
    finished with other settings."""
    for seed in study.seeds:
        for recipe in study.recipes:
            folder = study.run_folder(recipe, seed)
            if only is not None and only != (recipe, seed):
                continue
            if final(folder) is not None:
                check_same(study, recipe, seed)
                continue
            code = train(study.ranks, study.arguments(recipe, seed))
            if code or final(folder) is None:
                raise RuntimeError(f"{folder}: the run ended early, with code {code}; the same command resumes it")


def check_same(study: Study, recipe: str, seed: int) -> None:
    """RuntimeError where a finished run had other settings than this study asks for; its mesh may be another."""
    folder, (name, *arguments) = study.run_folder(recipe, seed), study.arguments(recipe, seed)
    asked = to_toml(load(name, arguments))
    differing = [each for each in changes((folder / "config.toml").read_text(), asked) if ": mesh." not in each]
    if differing:
        raise RuntimeError(
            f"{folder}: finished with other settings, {differing[0]}; choose another folder for this study, or remove the run"
        )


@dataclass(frozen=True)
class Difference:
    """Of a loss to bf16's, relative, one number for each seed."""

    by_seed: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed)

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for one seed."""
        seeds = len(self.by_seed)
        return statistics.stdev(self.by_seed) / math.sqrt(seeds) if seeds > 1 else math.nan


@dataclass(frozen=True)
class Verdict:
    """One recipe against bf16."""

    recipe: str
    smoothed: Difference
    validation: Difference

    @property
    def bar(self) -> float:
        return BARS.get(self.recipe.partition("-")[0], BAR)

    def __str__(self) -> str:
        off, error = abs(self.smoothed.mean), self.smoothed.error
        if off - 2 * error > self.bar or (error <= self.bar / 2 and off > self.bar):
            return "MISSED"
        return "within the bar" if error <= self.bar / 2 else "not resolved"


def verdicts(study: Study) -> Iterator[Verdict]:
    """Of the recipes that have a finished run with a finished partner."""
    ends = {(r, seed): final(study.run_folder(r, seed)) for r in study.recipes for seed in study.seeds}
    for recipe in (recipe for recipe in study.recipes if recipe != BASELINE):
        pairs = [(end, base) for seed in study.seeds if (end := ends[recipe, seed]) and (base := ends[BASELINE, seed])]
        if pairs:
            smoothed = Difference(tuple(end.smoothed / base.smoothed - 1 for end, base in pairs))
            yield Verdict(
                recipe, smoothed, Difference(tuple(end.validation / base.validation - 1 for end, base in pairs))
            )


def report(study: Study) -> str:
    """As Markdown."""
    ends = [end for seed in study.seeds if (end := final(study.run_folder(BASELINE, seed)))]
    base = [end.smoothed for end in ends]
    spread = f", spread over seeds {statistics.stdev(base) / statistics.fmean(base):.2%}" if len(base) > 1 else ""
    lines = [(study.folder / "data.txt").read_text().splitlines()[0], ""]
    lines += [
        f"{BASELINE}: {len(base)} seeds, loss {statistics.fmean(base):.4f}{spread}" if base else f"no {BASELINE} yet"
    ]
    lines += ["", "| recipe | difference by seed | mean | standard error | bar | | validation, mean | standard error |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for found in verdicts(study):
        loss, validation = found.smoothed, found.validation
        by_seed = ", ".join(f"{difference:+.2%}" for difference in loss.by_seed)
        lines.append(
            f"| {found.recipe} | {by_seed} | {loss.mean:+.2%} | {loss.error:.2%} | {found.bar:.2%} | {found} "
            f"| {validation.mean:+.2%} | {validation.error:.2%} |"
        )
    return "\n".join(lines) + "\n"


def draw(study: Study) -> Figure:
    """Smoothed loss over that of bf16 with the same seed, step by step: the mean over seeds, and its standard error as a
    band. The axis is that of the second half, where recipes differ less than runs do at first."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    seen = [BAR]
    for color, found in enumerate(verdicts(study)):
        curves = [curve for seed in study.seeds if (curve := _differences(study, found.recipe, seed))]
        mean = np.mean([values for _, values in curves], axis=0)
        error = np.std([values for _, values in curves], axis=0, ddof=len(curves) > 1) / math.sqrt(len(curves))
        steps = curves[0][0]
        axes.plot(
            steps, 100 * mean, color=f"C{color}", label=f"{found.recipe}, {len(curves)} seed{'s' * (len(curves) > 1)}"
        )
        axes.fill_between(steps, 100 * (mean - error), 100 * (mean + error), color=f"C{color}", alpha=0.15, linewidth=0)
        seen.append(np.abs(mean[len(mean) // 2 :]).max())
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set(xlabel="step", ylabel=f"loss against {BASELINE}, %", ylim=(-150 * max(seen), 150 * max(seen)))
    axes.grid(alpha=0.3)
    if len(seen) > 1:
        axes.legend(ncols=2, fontsize="small")
    return figure


def _differences(study: Study, recipe: str, seed: int) -> tuple[list[int], list[float]] | None:
    """Steps and relative differences of smoothed losses, of two finished runs."""
    folders = study.run_folder(recipe, seed), study.run_folder(BASELINE, seed)
    if not all(final(folder) for folder in folders):
        return None
    (steps, losses), (_, base) = (series(read_metrics(folder / "metrics.jsonl"), "loss") for folder in folders)
    return steps, [loss / other - 1 for loss, other in zip(smooth(losses), smooth(base), strict=True)]


def main(arguments: Sequence[str], train: Train = local.train) -> int:
    parser = argparse.ArgumentParser(
        prog="launch.quality_study", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="for data, runs and report; what is there is not repeated")
    parser.add_argument("--ranks", type=count, default=1, help="of each run [1]")
    parser.add_argument("--seeds", type=count, default=3, help="so many, 0, 1, ... [3]")
    parser.add_argument(
        "--recipes", nargs="+", default=recipes.names(), choices=[*recipes.names(), *VARIANTS], metavar="RECIPE",
        help=f"all by default; {BASELINE} is always there; further ones: {', '.join(VARIANTS)}",
    )  # fmt: skip
    parser.add_argument("--megabytes", type=float, default=100.0, help="of sources to learn from [100]")
    parser.add_argument("--only", metavar="RECIPE,SEED", help="this run alone")
    rest, overrides = split(arguments)
    options = parser.parse_args(rest)
    flat = tuple(text for name, value in overrides for text in (f"--{name}", value))
    chosen = tuple(dict.fromkeys([BASELINE, *options.recipes]))
    study = Study(options.folder.resolve(), chosen, tuple(range(options.seeds)), options.ranks, flat)
    recipe, _, seed = (options.only or "").partition(",")
    if options.only and not (recipe in chosen and seed.isdigit() and int(seed) < options.seeds):
        parser.error(
            f"--only {options.only}: expected RECIPE,SEED with one of {', '.join(chosen)} and {options.seeds} seeds"
        )
    make_data(study.folder, options.megabytes)
    try:
        train_all(study, (recipe, int(seed)) if options.only else None, train)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    text = report(study)
    (study.folder / "report.md").write_text(text)
    draw(study).savefig(study.folder / "report.png", dpi=120)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
