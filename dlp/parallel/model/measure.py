"""Statistics of casts, for chosen layers of a model: what `dlp.quant.stats` measures, step by step and over all ranks.

dlp.record_stats(model, "layers.0.**")
...                                        steps
dlp.read_stats(model)                      {"layers.0.mlp.up_proj.x": {"amax": ..., "sqnr_db": ..., ...}, ...}
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from dlp.parallel.model.runtime import runtime_of
from dlp.parallel.model.swap import layer_modules, match_layers
from dlp.quant.stats import StatsTable, names_of, plain, summary


def record_stats(model: nn.Module, *patterns: str) -> list[str]:
    """From now on measure every cast of the layers that these patterns name, and only theirs; none: stop. Returns them.

    Siblings are measured together, under the name of the first. Casts of forwards without gradients do not count. Call
    it on all ranks, at a step boundary. Raises ValueError for a pattern that matches no layer.
    """
    runtime, modules = runtime_of(model), layer_modules(model)
    names = [name for pattern in patterns for name in match_layers(model, pattern, "record_stats")]
    chosen = {modules[name].core for name in names}
    layers = [core.spec.members[0] for core in runtime.cores if core in chosen]
    tensors = [name for layer in layers for name in names_of(layer)]
    runtime.stats = StatsTable(tensors, runtime.counter.device) if layers else None
    for core in runtime.cores:
        core.stats = runtime.stats if core in chosen else None
        core.set_spec(core.with_recipe(plain(core.spec.recipe)))
    return layers


def read_stats(model: nn.Module) -> dict[str, dict[str, float | None]]:
    """The numbers of the last step, by tensor, over all ranks; tensors that were not cast are left out. All ranks call it
    together, after the step boundary. Waits for the device."""
    table = runtime_of(model).stats
    if table is None:
        return {}
    sums, maxima = (numbers.clone() for numbers in table.last)
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    sums, maxima = sums.cpu(), maxima.cpu()
    cast = torch.nonzero(maxima[:, 0]).flatten().tolist()
    names = list(table.names)
    return {names[row]: summary(sums[row], maxima[row]) for row in cast}
