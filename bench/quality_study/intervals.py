"""Statistics of the quality study: pure functions of losses.

    d[s, b] = loss[s, b] / mean of the baselines' losses of block b - 1        subject s, block b (one trunk)
    d[s, b] = effect of s + e[s, b],   sd(e) = sigma for all subjects of a family

Every subject of a block is compared with the same baselines, so their noise is in all differences of the block. With k
baselines and equal noise in all branches, differences of two subjects of a block are correlated by rho = 1 / (k + 1); rho is
larger where a block as a whole suits a family less (a seed that is a bad one for 4 bits). Correlation leaves the mean of a
subject and the pooled variance unbiased, but the pooled variance of S subjects and n blocks has fewer degrees of freedom than
S (n - 1):

    df = S (n - 1) / (1 + (S - 1) rho^2)          (Satterthwaite, from the variance of a sum of correlated squares)

rho is the larger of 1 / (k + 1) and its estimate from the residuals, or 1 for a family whose effect may differ from block to
block as a whole: df = n - 1, as if all its subjects were one. The interval of an effect is its mean +- t(df) sigma /
sqrt(blocks). Two-sided 95 %: a subject whose effect is at the bar or above is said to be "within" in at most 2.5 % of studies,
one whose effect is at the bar or below "outside" in at most 2.5 %; this holds subject by subject, not for a table as a whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

ERROR = 0.05  # probability that an interval misses the effect
LEAST = 3  # minimum number of blocks for a verdict: fewer blocks do not show how much blocks differ
Block = TypeVar("Block")


def beta_fraction(a: float, b: float, x: float) -> float:
    """Regularized incomplete beta function I_x(a, b), by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_fraction(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    ) / a  # fmt: skip
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    product = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / (1 + term * d), 1 + term / c
            product *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * product


def t_cdf(t: float, df: float) -> float:
    """Probability that Student's t with `df` degrees of freedom is below t."""
    tail = 0.5 * beta_fraction(df / 2, 0.5, df / (df + t * t))
    return 1 - tail if t > 0 else tail


@cache
def t_quantile(probability: float, df: float) -> float:
    """Quantile of Student's t with `df` > 0 degrees of freedom, which may be a fraction."""
    if probability < 0.5:
        return -t_quantile(1 - probability, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < probability:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < probability else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Interval:
    """Effect of one subject: its differences by block, their mean, and half the width of the interval; infinite for one
    block. `df`: degrees of freedom of the pooled standard deviation `sd` of a difference."""

    differences: tuple[float, ...]
    sd: float
    df: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.sd / math.sqrt(len(self.differences))

    @property
    def half(self) -> float:
        return t_quantile(1 - ERROR / 2, self.df) * self.error if self.df > 0 else math.inf

    def verdict(self, bar: float, resolution: float | None = None) -> str:
        """Return "within" if the interval lies below the bar and is at most as wide as `resolution`, "outside" if the
        interval lies above the bar, else "not resolved". With fewer than LEAST blocks the verdict is always "not
        resolved"."""
        if len(self.differences) < LEAST:
            return "not resolved"
        if self.mean - self.half > bar:
            return "outside"
        narrow = resolution is None or self.half <= resolution
        return "within" if self.mean + self.half <= bar and narrow else "not resolved"


Losses = Mapping[str, Mapping[Block, float]]  # subject -> block -> loss


def differences(losses: Losses[Block], baselines: Sequence[str]) -> dict[str, dict[Block, float]]:
    """Relative differences of every subject to the mean of all baselines, in the blocks that contain all baselines."""
    blocks = [block for block in losses[baselines[0]] if all(block in losses[name] for name in baselines)]
    base = {block: statistics.fmean(losses[name][block] for name in baselines) for block in blocks}
    return {
        subject: {block: of[block] / base[block] - 1 for block in blocks if block in of}
        for subject, of in losses.items()
        if subject not in baselines
    }


def correlation(residuals: Sequence[Mapping[Block, float]]) -> float:
    """Mean correlation of the residuals of two subjects of one block; 0 for one subject."""
    squares, sums = 0.0, dict[Block, float]()
    for each in residuals:
        for block, residual in each.items():
            squares += residual**2
            sums[block] = sums.get(block, 0.0) + residual
    pairs = len(residuals) - 1
    return (sum(total**2 for total in sums.values()) - squares) / (pairs * squares) if pairs and squares else 0.0


def intervals(
    found: Mapping[str, Mapping[Block, float]], baselines: int, *, common: bool = False
) -> dict[str, Interval]:
    """Return the intervals of the subjects of one family, from the differences to the mean of `baselines` branches.
    `common`: the effect of the family as a whole may differ from block to block."""
    found = {subject: of for subject, of in found.items() if of}
    means = {subject: statistics.fmean(of.values()) for subject, of in found.items()}
    residuals = [{block: d - means[subject] for block, d in of.items()} for subject, of in found.items()]
    free = sum(len(each) - 1 for each in residuals)
    if not free:
        return {subject: Interval(tuple(of.values()), math.nan, 0) for subject, of in found.items()}
    variance = sum(residual**2 for each in residuals for residual in each.values()) / free
    rho = 1.0 if common else min(1.0, max(1 / (baselines + 1), correlation(residuals)))
    df = free / (1 + (len(residuals) - 1) * rho**2)
    return {subject: Interval(tuple(of.values()), math.sqrt(variance), df) for subject, of in found.items()}


def noise_floor(losses: Losses[Block], baselines: Sequence[str], other: Mapping[str, Interval]) -> Interval | None:
    """Interval of the difference between the last and the first baseline. The standard deviation is that of the family,
    scaled from differences to the mean of all baselines to differences between two branches. None if one of the two is
    missing."""
    first, last = losses[baselines[0]], losses[baselines[-1]]
    found = tuple(last[block] / first[block] - 1 for block in first if block in last)
    pooled = next(iter(other.values()), None)
    if len(baselines) < 2 or not found:
        return None
    if pooled is None:
        sd = statistics.stdev(found) if len(found) > 1 else math.nan
        return Interval(found, sd, len(found) - 1)
    return Interval(found, pooled.sd * math.sqrt(2 / (1 + 1 / len(baselines))), pooled.df)
