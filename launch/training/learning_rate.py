"""Learning rate of each step, and a warning if a resumed run has another schedule than the saved run."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace

from launch.config.sections import Train

# Settings of [train] that determine the learning rates
CURVE = ("steps", "lr", "min_lr", "warmup", "schedule", "decay")
# Schedule -> function of (completed share of the steps after the warm-up, share of these steps in which wsd decays) that
# returns 1 for the peak learning rate, 0 for min_lr
SHAPES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda done, decay: 0.5 * (1.0 + math.cos(math.pi * done)),
    "linear": lambda done, decay: 1.0 - done,
    "wsd": lambda done, decay: min(1.0, (1.0 - done) / decay),
    "constant": lambda done, decay: 1.0,
}


def learning_rate(step: int, train: Train) -> float:
    """Return the learning rate of step `step`, counted from 0: a linear warm-up to `lr`, then the curve of `schedule`, which
    ends at `min_lr` times `lr` in the last step; schedule "constant" stays at `lr`."""
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    behind = max(1, train.steps - 1 - train.warmup)
    done = min((step - train.warmup) / behind, 1.0)
    height = SHAPES[train.schedule](done, min(1.0, train.decay * train.steps / behind))
    return train.lr * (train.min_lr + (1.0 - train.min_lr) * height)


def rate_remarks(done: int, before: str, now: Train) -> Iterator[str]:
    """Yield a warning if the next step after `done` steps has a learning rate that differs from the one that follows from
    `before`, the config (TOML) of the saved run."""
    saved = tomllib.loads(before)["train"]
    old = replace(now, **{key: saved[key] for key in CURVE if key in saved})
    last, would, will = learning_rate(max(done - 1, 0), old), learning_rate(done, old), learning_rate(done, now)
    if not math.isclose(would, will, rel_tol=1e-6):
        bent = ", ".join(f"train.{key}" for key in CURVE if getattr(old, key) != getattr(now, key))
        keep = f"; to keep {would:.4g}: --train.lr {would:.4g} --train.min_lr 1 --train.warmup 0" * (would > 0)
        yield (
            f"WARNING: the learning rate goes from {last:.4g} in step {done} to {will:.4g} in step {done + 1}, where the "
            f"previous settings would give {would:.4g}, because {bent} changed the schedule{keep}"
        )
