"""The parameters of a plan: their names, what a tp rank keeps of each, and which gradients are partial there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from dlp.parallel.style import ParallelStyle


@dataclass(frozen=True)
class ParameterPlan:
    """A parameter by its first name; `shape` on a tp rank, before FSDP; `partial`: its gradient there covers the rank's
    own tokens only; `shared`: several modules have it."""

    name: str
    shape: tuple[int, ...]
    partial: bool
    shared: bool = False


def plan_parameters(
    modules: Mapping[str, nn.Module], linears: Mapping[str, ParallelStyle], vocabulary: set[str], partial: set[str],
    tp: int,
) -> tuple[ParameterPlan, ...]:  # fmt: skip
    """Each parameter of these modules once. `linears`: the style of each; `vocabulary`: embeddings that tp cuts;
    `partial`: other modules whose gradients on each tp rank are parts of a sum."""
    found: dict[int, ParameterPlan] = {}
    for name, module in modules.items():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            cut, in_parts = _treatment(name, key, linears.get(name), vocabulary, partial)
            shape = tuple(size // tp if dim == cut else size for dim, size in enumerate(parameter.shape))
            first = found.get(id(parameter))
            found[id(parameter)] = (
                ParameterPlan(f"{name}.{key}", shape, in_parts)
                if first is None
                else replace(first, partial=first.partial or in_parts, shared=True)
            )
    return tuple(found.values())


def _treatment(
    name: str, key: str, style: ParallelStyle | None, vocabulary: set[str], partial: set[str]
) -> tuple[int | None, bool]:
    """The dimension of a parameter that tp cuts, and whether its gradient is partial."""
    if style is None:
        return (0, False) if name in vocabulary else (None, name in partial)
    if key.startswith("weight"):  # of several, each has a number
        return style.shard_dim, style.partial_weight_grad
    return (0 if style.shard_dim == 0 else None), style.partial_bias_grad
