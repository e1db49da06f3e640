"""Rotary embeddings (Su et al., arXiv 2104.09864) and the ways to stretch them over longer contexts.

A scaling is the table of Hugging Face's config.json, whose `rope_type` names a row of `SCALINGS`:

    linear   every frequency divided by `factor`                                                  (arXiv 2306.15595)
    llama3   waves longer than the original context divided, short ones kept, a ramp between      (arXiv 2407.21783)
    yarn     the same with the ramp over dimensions, and cosines and sines scaled                 (arXiv 2309.00071)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Scaling = Mapping[str, Any]


def rotary_table(
    positions: Tensor, head_dim: int, theta: float, scaling: Scaling | None = None
) -> tuple[Tensor, Tensor]:
    """positions [S] -> cos, sin [S, head_dim] fp32 in Hugging Face's half-split order."""
    dims = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies, scale = theta ** -(dims / head_dim), 1.0
    if scaling is not None:
        frequencies, scale = SCALINGS[scaling["rope_type"]][0](frequencies, theta, scaling)
    angles = torch.outer(positions.float(), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, S, head_dim] turned by its position; cos, sin [S, head_dim] or [B, 1, S, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


def _linear(frequencies: Tensor, theta: float, scaling: Scaling) -> tuple[Tensor, float]:
    return frequencies / scaling["factor"], 1.0


def _llama3(frequencies: Tensor, theta: float, scaling: Scaling) -> tuple[Tensor, float]:
    turns = frequencies * scaling["original_max_position_embeddings"] / (2 * math.pi)  # within the original context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"]), 1.0


def _yarn(frequencies: Tensor, theta: float, scaling: Scaling) -> tuple[Tensor, float]:
    original, pairs, factor = scaling["original_max_position_embeddings"], len(frequencies), scaling["factor"]

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32.0))), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1.0))), 2 * pairs - 1)
    ramp = (torch.arange(pairs, device=frequencies.device) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    scale = scaling.get("attention_factor", 0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return frequencies * (kept + (1 - kept) / factor), scale


ORIGINAL = "original_max_position_embeddings"
SCALINGS: dict[str, tuple[Callable[[Tensor, float, Scaling], tuple[Tensor, float]], set[str], set[str]]] = {
    "linear": (_linear, {"factor"}, set()),
    "llama3": (_llama3, {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL}, set()),
    "yarn": (_yarn, {"factor", ORIGINAL}, {"beta_fast", "beta_slow", "attention_factor"}),
}  # its frequencies and the scale of cosines and sines; the keys it needs; those it may have


def is_scaling(value: Any) -> bool:
    """Whether a table is one of these, with numbers > 0."""
    kind = value.get("rope_type")
    if kind not in SCALINGS:
        return False
    _, needed, allowed = SCALINGS[kind]
    keys = value.keys() - {"rope_type"}
    return needed <= keys <= needed | allowed and all(
        type(value[key]) in (int, float) and value[key] > 0 for key in keys
    )
