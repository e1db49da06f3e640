"""Rotary embeddings (Su et al., arXiv 2104.09864) and their scalings for longer contexts.

A scaling is the table `rope_scaling` of Hugging Face's config.json; its `rope_type` is a key of `FREQUENCIES`:

    linear   all frequencies are divided by `factor`                                                  (arXiv 2306.15595)
    llama3   low frequencies are divided by `factor`, high frequencies are unchanged, with a linear
             transition in the number of turns within the original context                            (arXiv 2407.21783)
    yarn     as llama3, with the transition linear in the dimension; cosines and sines are scaled     (arXiv 2309.00071)
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
    """Return (cos, sin), fp32 [S, head_dim] each, for positions [S]. As in Hugging Face, element i of a head is rotated with
    element i + head_dim / 2."""
    dims = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies, scale = theta ** -(dims / head_dim), 1.0
    if scaling is not None:
        frequencies, scale = FREQUENCIES[scaling["rope_type"]](frequencies, theta, scaling)
    angles = torch.outer(positions.float(), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, S, head_dim] by the angles of `rotary_table`; cos, sin: [S, head_dim] or [B, 1, S, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


def _linear(frequencies: Tensor, theta: float, scaling: Scaling) -> tuple[Tensor, float]:
    return frequencies / scaling["factor"], 1.0


def _llama3(frequencies: Tensor, theta: float, scaling: Scaling) -> tuple[Tensor, float]:
    turns = (
        frequencies * scaling["original_max_position_embeddings"] / (2 * math.pi)
    )  # turns within the original context
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


# rope_type -> function (frequencies, theta, scaling) that returns the scaled frequencies and the factor of cosines and sines
FREQUENCIES: dict[str, Callable[[Tensor, float, Scaling], tuple[Tensor, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
