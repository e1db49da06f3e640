"""Table, CSV files and plot of the study, computed from finished branches."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.quality_study.branches import Branch
from bench.quality_study.intervals import Interval, differences, intervals, noise_floor
from bench.quality_study.subjects import BASELINES, BY_NAME, EIGHT, FOUR, Family
from launch.report.plots import smooth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST = 0.1  # fraction of all steps over which losses are averaged, at the end and before the decay
NAMES = tuple(subject.name for subject in BASELINES)
Losses = dict[str, dict[tuple[int, str], float]]


def measures(branch: Branch) -> dict[str, float]:
    """Return the losses of a branch that are compared: "end" and "early", the mean losses at the end and before the learning
    rate decays, and "validation"."""
    count, early = max(1, round(LAST * branch.steps)), branch.early - branch.branch_at
    before = branch.losses[max(0, early - count) : early]
    return {
        "end": statistics.fmean(branch.losses[-count:]),
        "early": statistics.fmean(before) if before else float("nan"),
        "validation": branch.validation,
    }


def losses_of(branches: Iterable[Branch], measure: str) -> Losses:
    """Return one measure ("end", "early" or "validation") of the branches, by subject and block."""
    found: Losses = {name: {} for name in NAMES}
    for branch in branches:
        found.setdefault(branch.subject, {})[branch.block] = measures(branch)[measure]
    return found


@dataclass(frozen=True)
class Row:
    """Effect of one subject on one measure, with the bar and the resolution (`Interval.verdict`) that apply."""

    subject: str
    measure: str
    effect: Interval
    bar: float
    resolution: float | None

    @property
    def verdict(self) -> str:
        return self.effect.verdict(self.bar, self.resolution)


def rows(branches: Sequence[Branch]) -> Iterator[Row]:
    """Yield a row for each measure and subject. The rows of a measure begin with the comparison of the second baseline with the
    first."""
    present = {branch.subject for branch in branches}
    names = tuple(name for name in NAMES if name in present)
    if not names or names[0] != NAMES[0]:
        return
    for measure in ("end", "early", "validation"):
        losses = losses_of(branches, measure)
        off = differences({name: of for name, of in losses.items() if of}, names)
        for family in (EIGHT, FOUR):
            members = {name: of for name, of in off.items() if BY_NAME[name].family is family}
            found = intervals(members, len(names), common=family.common)
            bar = family.early if measure == "early" else family.end
            if family is EIGHT and (floor := noise_floor(losses, names, found)):
                yield Row(NAMES[-1], measure, floor, bar, family.resolution)
            yield from (Row(name, measure, each, bar, family.resolution) for name, each in found.items())


def report(branches: Sequence[Branch]) -> str:
    """Format the table of all subjects in Markdown."""
    by_measure: dict[str, dict[str, Row]] = {}
    for row in rows(branches):
        by_measure.setdefault(row.measure, {})[row.subject] = row
    lines = list(_heading(branches))
    lines += ["| subject | seeds | difference by seed | at the end | bar | | before the decay | | validation |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for name in sorted(by_measure.get("end", {}), key=list(BY_NAME).index):
        end, early, validation = (by_measure[measure][name] for measure in ("end", "early", "validation"))
        by_seed = ", ".join(f"{each:+.2%}" for each in end.effect.differences)
        lines.append(
            f"| {name} | {len(end.effect.differences)} | {by_seed} | {_said(end.effect)} | {end.bar:+.2%} | {end.verdict} "
            f"| {_said(early.effect)} | {early.verdict} | {_said(validation.effect)} |"
        )
    return "\n".join(lines) + "\n"


def _said(effect: Interval) -> str:
    return f"{effect.mean:+.2%} ± {effect.half:.2%}" if effect.df > 0 else f"{effect.mean:+.2%}"


def _heading(branches: Sequence[Branch]) -> Iterator[str]:
    for device, torch, date in sorted({(b.device, b.torch, b.date) for b in branches}):
        yield f"{device}, torch {torch}, {date}"
    for branch in branches[:1]:
        yield (
            f"{len(branches)} branches, steps {branch.branch_at + 1} to {branch.steps}; means of {round(LAST * branch.steps)} "
            f"steps, the learning rate decays after step {branch.early}; intervals of 95 %, two-sided"
        )
    for family in (EIGHT, FOUR):
        pooled = _pooled(branches, family)
        if pooled is not None and pooled.df > 0:
            yield f"{family.name}: standard deviation of a difference {pooled.sd:.3%}, {pooled.df:.1f} degrees of freedom"
    yield ""


def _pooled(branches: Sequence[Branch], family: Family) -> Interval | None:
    ends = (row for row in rows(branches) if row.measure == "end" and row.subject not in NAMES)
    return next((row.effect for row in ends if BY_NAME[row.subject].family is family), None)


def branches_csv(branches: Sequence[Branch]) -> str:
    """Format a CSV table with one line per branch."""
    out = io.StringIO()
    columns = "subject,seed,end,early,validation,step_ms,seconds,branch_at,steps,device,torch,date,data,settings".split(
        ","
    )
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    for branch in sorted(branches, key=_order):
        numbers = {name: f"{value:.6f}" for name, value in measures(branch).items()}
        told = {name: getattr(branch, name) for name in columns if name not in numbers}
        writer.writerow({**told, **numbers})
    return out.getvalue()


def losses_csv(branches: Sequence[Branch]) -> str:
    """Format a CSV table of losses, with a column for each branch and a line for each step."""
    ordered = sorted(branches, key=_order)
    lines = [",".join(["step", *(f"{branch.subject}-{branch.seed}" for branch in ordered)])]
    first = ordered[0].branch_at + 1 if ordered else 1
    lines += [
        ",".join([str(first + step), *(f"{loss:.4f}" for loss in losses)])
        for step, losses in enumerate(zip(*(branch.losses for branch in ordered), strict=True))
    ]
    return "\n".join(lines) + "\n"


def _order(branch: Branch) -> tuple[int, int]:
    return list(BY_NAME).index(branch.subject), branch.seed


def curves(branches: Sequence[Branch]) -> Mapping[str, list[float]]:
    """Return, for each subject except the first baseline, the smoothed relative difference to the mean of the baselines by
    step, averaged over blocks."""
    smoothed = {(branch.subject, branch.block): smooth(branch.losses) for branch in branches}
    found: dict[str, list[float]] = {}
    for name in dict.fromkeys(branch.subject for branch in sorted(branches, key=_order)):
        by_block = []
        for branch in branches:
            bases = [smoothed[base, branch.block] for base in NAMES if (base, branch.block) in smoothed]
            if branch.subject == name and bases and name != NAMES[0]:
                means = [statistics.fmean(each) for each in zip(*bases, strict=True)]
                own = smoothed[name, branch.block]
                by_block.append([loss / base - 1 for loss, base in zip(own, means, strict=True)])
        if by_block:
            found[name] = [statistics.fmean(each) for each in zip(*by_block, strict=True)]
    return found


def draw(branches: Sequence[Branch]) -> Figure:
    """Plot, in a row for each family, the differences by step, and the intervals at the end with the bar of the family."""
    from matplotlib.figure import Figure

    found, drawn = list(rows(branches)), curves(branches)
    members = [(family, [name for name in drawn if BY_NAME[name].family is family]) for family in (EIGHT, FOUR)]
    shown = [(family, names) for family, names in members if names] or members[:1]
    figure = Figure(figsize=(11, 4.5 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 2, width_ratios=[3, 2], squeeze=False)
    for (left, right), (family, names) in zip(panels, shown, strict=True):
        for color, name in enumerate(names):
            steps = range(branches[0].branch_at + 1, branches[0].steps + 1)
            left.plot(steps, [100 * value for value in drawn[name]], color=f"C{color % 10}", label=name, linewidth=1)
        ends = {row.subject: row.effect for row in found if row.measure == "end" and row.subject in names}
        for place, (name, effect) in enumerate(ends.items()):
            half = 100 * effect.half if effect.df > 0 else 0
            right.errorbar(
                100 * effect.mean, place, xerr=half, marker="o", color=f"C{names.index(name) % 10}", capsize=3
            )
        right.set_yticks(range(len(ends)), list(ends), fontsize="small")
        right.axvline(100 * family.end, color="0.3", linestyle="--", linewidth=0.8)
        for axes, line in ((left, left.axhline), (right, right.axvline)):
            line(0, color="0.3", linewidth=0.8)
            axes.grid(alpha=0.3)
        left.set(xlabel="step", ylabel=f"{family.name}: loss above bf16, %")
        right.set(xlabel=f"at the end, %, 95 % interval\ndashed: the bar of {family.end:.2%}")
    return figure
