"""Check of the settings of an optimizer's groups, as torch's optimizers check theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def check_groups(name: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError for a learning rate, eps or weight decay below 0 or NaN, and for betas outside [0, 1). name: of the
    optimizer."""
    for group in groups:
        for key in ("lr", "eps", "weight_decay"):
            value = group.get(key, 0.0)
            if getattr(value, "is_meta", False):
                continue
            if not 0 <= float(value) < float("inf"):
                raise ValueError(f"{name}: {key} must be a finite number >= 0; got {float(value)}")
        betas = tuple(group["betas"])
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{name}: betas must be two numbers in [0, 1); got {betas}")
