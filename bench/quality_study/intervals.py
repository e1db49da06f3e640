"""Statistics of the quality study: pure functions of losses. A block is one trunk with its branches.

    d[s, b] = loss[s, b] / (mean of the baselines' losses in block b) - 1      subject s, block b
    d[s, b] = effect of s + e[s, b],   sd(e) = sigma for all subjects of a family

All subjects of a block are compared with the same baselines, so the noise of the baselines is in all differences of the block.
With k baselines and equal noise in all branches, the differences of two subjects of a block have correlation rho = 1 / (k + 1).
rho is larger if some blocks raise the loss of a complete family, for example a seed with which 4 bits work badly. Correlation
leaves the mean of a subject and the pooled variance unbiased, but the pooled variance of S subjects and n blocks has fewer
degrees of freedom than S (n - 1):

    df = S (n - 1) / (1 + (S - 1) rho^2)          (Satterthwaite, from the variance of a sum of correlated squares)

rho is the maximum of 1 / (k + 1) and the estimate from the residuals. For a family whose common effect may differ between
blocks, rho = 1 and df = n - 1, as for a single subject. The two-sided 95 % interval of an effect is mean +- t(df) sigma /
sqrt(blocks). If the true effect of a subject is at or above the bar, its verdict is "within" in at most 2.5 % of studies; if it
is at or below the bar, its verdict is "outside" in at most 2.5 %. This holds for each subject, not for all subjects together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

ERROR = 0.05  # probability that an interval does not contain the effect
LEAST = 3  # minimum number of blocks for a verdict, since fewer blocks do not show the variance between blocks
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
    """Quantile of Student's t with `df` degrees of freedom, a positive real number."""
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
    """Confidence interval of the effect of one subject, mean +- half.

    differences    relative difference to the baselines in each block
    sd             standard deviation of a difference, pooled over the family
    df             degrees of freedom of `sd`; 0 if every subject has one block, and then the interval is infinite
    """

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
        """Compare the interval with the bar, the largest accepted effect.

        Args:
            bar: largest accepted effect.
            resolution: maximum of `half` for the verdict "within"; None: no maximum.

        Returns:
            "outside" if the interval lies above the bar; "within" if it lies below the bar and is narrow enough; otherwise, or
            with fewer than LEAST blocks, "not resolved".
        """
        if len(self.differences) < LEAST:
            return "not resolved"
        if self.mean - self.half > bar:
            return "outside"
        narrow = resolution is None or self.half <= resolution
        return "within" if self.mean + self.half <= bar and narrow else "not resolved"


Losses = Mapping[str, Mapping[Block, float]]  # subject -> block -> loss


def differences(losses: Losses[Block], baselines: Sequence[str]) -> dict[str, dict[Block, float]]:
    """Return the relative differences of every subject to the mean of the baselines, by block. Blocks without all baselines are
    left out."""
    blocks = [block for block in losses[baselines[0]] if all(block in losses[name] for name in baselines)]
    base = {block: statistics.fmean(losses[name][block] for name in baselines) for block in blocks}
    return {
        subject: {block: of[block] / base[block] - 1 for block in blocks if block in of}
        for subject, of in losses.items()
        if subject not in baselines
    }


def correlation(residuals: Sequence[Mapping[Block, float]]) -> float:
    """Estimate the correlation of the residuals of two subjects in the same block; 0 for one subject. `residuals`: for each
    subject, the residual in each block."""
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
    """Compute the intervals of the subjects of one family.

    Args:
        found: result of `differences`: subject -> block -> difference.
        baselines: number of baselines.
        common: whether a common effect of the family may differ between blocks (rho = 1).
    """
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
    """Compute the interval of the difference between the last and the first baseline; None if one of them is missing.

    The standard deviation is that of `other`, the intervals of a family, scaled from a difference to the mean of all baselines
    to a difference between two branches. If `other` is empty, the standard deviation is computed from the differences between
    both baselines."""
    first, last = losses[baselines[0]], losses[baselines[-1]]
    found = tuple(last[block] / first[block] - 1 for block in first if block in last)
    pooled = next(iter(other.values()), None)
    if len(baselines) < 2 or not found:
        return None
    if pooled is None:
        sd = statistics.stdev(found) if len(found) > 1 else math.nan
        return Interval(found, sd, len(found) - 1)
    return Interval(found, pooled.sd * math.sqrt(2 / (1 + 1 / len(baselines))), pooled.df)
