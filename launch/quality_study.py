"""Whether recipes cost quality: short trainings, paired by seed, of every recipe and bf16.

    python -m launch.quality_study FOLDER [--ranks N] [--seeds 3] [--megabytes 100] [--only RECIPE,SEED]
                                          [--section.key value ...]

    FOLDER/data                 the sources of the standard library and of installed packages, byte by byte
    FOLDER/data.txt             their hash, and the packages with their versions: another machine has other data
    FOLDER/runs/RECIPE-SEED     one run of launch/configs/quality.toml each; a finished one is not repeated, an
                                interrupted one resumes
    FOLDER/report.md            what the finished runs say

Runs with the same seed start from the same weights and read the same batches in the same order, so that most of the
noise between seeds cancels in the difference to bf16 of the same seed. Variants of nvfp4, by which its parts are judged, are
run where `--recipes` names them. The bars are 0.25 % of the smoothed final loss for 8-bit recipes and 1 % for nvfp4. A mean
of differences counts only if its standard error is at most half the bar; otherwise the report says "not resolved", which
is no pass.
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

from dlp.quant import recipe as recipes
from launch import local
from launch.config import count
from launch.data import stdlib_files
from launch.documents import walk
from launch.metrics import read_metrics
from launch.overrides import split
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
# What of nvfp4 costs quality: its name in the study -> what it changes
VARIANTS = {
    "nvfp4-last2": ["--recipe", "nvfp4", *_edges(-2, -1)],
    "nvfp4-first-last": ["--recipe", "nvfp4", *_edges(0, -1)],
    "nvfp4-all": ["--recipe", "nvfp4"],
    "nvfp4-1d": ["--recipe", '{ name = "nvfp4", disable_2d_quantization = true }', *_edges(-1)],
    "nvfp4-no-rht": ["--recipe", '{ name = "nvfp4", disable_rht = true }', *_edges(-1)],
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


def final_loss(run: Path) -> float | None:
    """The smoothed final loss of a finished run, one that was validated after its last step; else None."""
    if not (run / "metrics.jsonl").is_file():
        return None
    records = read_metrics(run / "metrics.jsonl")
    steps = tomllib.loads((run / "config.toml").read_text())["train"]["steps"]
    losses = [record["loss"] for record in records if "loss" in record]
    if not any(record["step"] == steps and "validation_loss" in record for record in records):
        return None
    return statistics.fmean(losses[-max(1, round(LAST * len(losses))) :])


def train_all(study: Study, only: tuple[str, int] | None, train: Train) -> None:
    """Every run that is not finished, or one. Raises RuntimeError for one that failed or was stopped."""
    for seed in study.seeds:
        for recipe in study.recipes:
            folder = study.run_folder(recipe, seed)
            if (only is not None and only != (recipe, seed)) or final_loss(folder) is not None:
                continue
            code = train(study.ranks, study.arguments(recipe, seed))
            if code or final_loss(folder) is None:
                raise RuntimeError(f"{folder}: the run ended early, with code {code}; the same command resumes it")


@dataclass(frozen=True)
class Verdict:
    """One recipe against bf16: relative differences by seed, their mean and its standard error (NaN for one seed)."""

    recipe: str
    differences: tuple[float, ...]

    @property
    def bar(self) -> float:
        return BARS.get(self.recipe.partition("-")[0], BAR)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def error(self) -> float:
        count = len(self.differences)
        return statistics.stdev(self.differences) / math.sqrt(count) if count > 1 else math.nan

    def __str__(self) -> str:
        if not self.error <= self.bar / 2:
            return "not resolved"
        return "within the bar" if abs(self.mean) <= self.bar else "MISSED"


def verdicts(study: Study) -> Iterator[Verdict]:
    """Of the recipes that have a finished run with a finished partner."""
    losses = {(r, seed): final_loss(study.run_folder(r, seed)) for r in study.recipes for seed in study.seeds}
    for recipe in (recipe for recipe in study.recipes if recipe != BASELINE):
        pairs = [(losses[recipe, seed], losses[BASELINE, seed]) for seed in study.seeds]
        differences = tuple(loss / base - 1 for loss, base in pairs if loss is not None and base is not None)
        if differences:
            yield Verdict(recipe, differences)


def report(study: Study) -> str:
    """As Markdown."""
    base = [loss for seed in study.seeds if (loss := final_loss(study.run_folder(BASELINE, seed))) is not None]
    spread = f", spread over seeds {statistics.stdev(base) / statistics.fmean(base):.2%}" if len(base) > 1 else ""
    lines = [(study.folder / "data.txt").read_text().splitlines()[0], ""]
    lines += [
        f"{BASELINE}: {len(base)} seeds, loss {statistics.fmean(base):.4f}{spread}" if base else f"no {BASELINE} yet"
    ]
    lines += ["", "| recipe | difference by seed | mean | standard error | bar | |", "|---|---|---|---|---|---|"]
    for found in verdicts(study):
        by_seed = ", ".join(f"{difference:+.2%}" for difference in found.differences)
        lines.append(
            f"| {found.recipe} | {by_seed} | {found.mean:+.2%} | {found.error:.2%} | {found.bar:.2%} | {found} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str], train: Train = local.train) -> int:
    parser = argparse.ArgumentParser(
        prog="launch.quality_study", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=count, default=1, help="of each run [1]")
    parser.add_argument("--seeds", type=count, default=3, help="so many, 0, 1, ... [3]")
    parser.add_argument(
        "--recipes", nargs="+", default=recipes.names(), choices=[*recipes.names(), *VARIANTS], metavar="RECIPE",
        help=f"all by default; {BASELINE} is always there; further ones: {', '.join(VARIANTS)}",
    )  # fmt: skip
    parser.add_argument("--megabytes", type=float, default=100.0, help="of sources to learn from")
    parser.add_argument("--only", metavar="RECIPE,SEED", help="this run alone")
    rest, overrides = split(arguments)
    known = parser.parse_args(rest)
    if known.seeds < 1:
        parser.error(f"--seeds {known.seeds}: a study has one seed or more; leave it away for 3")
    flat = tuple(text for name, value in overrides for text in (f"--{name}", value))
    chosen = tuple(dict.fromkeys([BASELINE, *known.recipes]))
    study = Study(known.folder.resolve(), chosen, tuple(range(known.seeds)), known.ranks, flat)
    recipe, _, seed = (known.only or "").partition(",")
    if known.only and not (recipe in chosen and seed.isdigit() and int(seed) < known.seeds):
        parser.error(
            f"--only {known.only}: expected RECIPE,SEED with one of {', '.join(chosen)} and {known.seeds} seeds"
        )
    make_data(study.folder, known.megabytes)
    try:
        train_all(study, (recipe, int(seed)) if known.only else None, train)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    text = report(study)
    (study.folder / "report.md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
