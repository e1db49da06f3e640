"""What changes the recipes of chosen layers at a step boundary: `set_recipe`, by hand or on a schedule, and `record_stats`.

Only the chosen layers get a new spec, whose number the next forward uses; a forward whose backward is still to come
keeps the old one. The scales of the old recipe are dropped, those of the new one start anew, all others stay. What was
changed is kept in the session, from where checkpoints and logs take it.

Statistics of casts (`dlp.quant.stats`) are a recipe around the layer's own, whose quantizers measure as they cast:

dlp.record_stats(model, "layers.0.**")
...                                        steps
dlp.read_stats(model)                      {"layers.0.mlp.up_proj.x": {"amax": ..., "sqnr_db": ..., ...}, ...}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlp.parallel.linear.modules import ConvertedLinear, LinearCore, ParallelLinear
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.model.session import Session, Swap, session_of
from dlp.quant import recipe as recipes
from dlp.quant.patterns import must_match
from dlp.quant.recipe import Recipe
from dlp.quant.stats import StatsTable, names_of, plain, summary


def set_recipe(model: nn.Module, pattern: str, recipe: Any) -> Swap:
    """From here on the layers that `pattern` names, as in a layer group, run under this recipe.

    `recipe`: a name, a table {"name": ..., option: value}, a Recipe or a CustomRecipe. Call it between an optimizer step
    and the next forward, on all ranks. Raises ValueError, before anything is changed, for a pattern that matches no
    layer or only some of a set of siblings, and for a recipe that a layer cannot run under.
    """
    layers, made = match_layers(model, pattern, "set_recipe"), recipes.as_recipe(recipe)
    return _apply(model, _swap(layers, _session(model, layers).steps, recipe, made), made)


def schedule(model: nn.Module, layers: Sequence[str], at_step: int, recipe: Any) -> None:
    """`set_recipe` for layers by name, done by the step boundary after `at_step` optimizer steps. Raises ValueError now
    for what could not be done then."""
    made, session = recipes.as_recipe(recipe), _session(model, layers)
    if at_step <= session.steps:
        raise ValueError(f"a swap at step {at_step} is in the past: {session.steps} steps are done")
    _new_specs(model, layers, made)
    session.scheduled.append((_swap(layers, at_step, recipe, made), made))


def make_due_swaps(model: nn.Module, session: Session) -> None:
    """The step boundary: make the swaps whose step has come."""
    for swap, made in [entry for entry in session.scheduled if entry[0].step <= session.steps]:
        session.scheduled.remove((swap, made))
        _apply(model, swap, made)


def layer_modules(model: nn.Module) -> dict[str, ParallelLinear]:
    """The layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ParallelLinear)}


def match_layers(model: nn.Module, pattern: str, asked_by: str) -> list[str]:
    """The layers that a pattern names; ValueError, with the nearest names, if there are none."""
    names = list(layer_modules(model))
    lengths = {
        name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    return must_match(names, lengths, pattern, getattr(model, "base_model_prefix", ""), asked_by=asked_by)


def recipes_of(model: nn.Module) -> dict[str, str]:
    """The recipe of each layer, as it prints."""
    return {name: str(module.core.spec.recipe) for name, module in layer_modules(model).items()}


def repeat(model: nn.Module, session: Session, swaps: Sequence[Swap]) -> list[str]:
    """Bring a model as configured to where `swaps` had brought it. Returns what is to be told: scheduled swaps whose
    step is over and that were not made. Raises ValueError for a swap that cannot be repeated and was not anticipated."""
    for swap in swaps:
        if swap.asked is not None:
            _apply(model, swap, recipes.as_recipe(swap.asked))
    now = recipes_of(model)
    for swap in swaps:
        later = {layer for other in swaps[swaps.index(swap) + 1 :] for layer in other.layers}
        others = [layer for layer in swap.layers if layer not in later and now.get(layer) != swap.said]
        if swap.asked is None and others:
            raise ValueError(
                f"{others[0]} was set to {swap.said} at step {swap.step}, a recipe made in Python, which a checkpoint "
                f"cannot hold; set it with dlp.set_recipe before loading"
            )
    session.swaps = list(swaps)
    over = [swap for swap, _ in session.scheduled if swap.step <= session.steps]
    session.scheduled = [entry for entry in session.scheduled if entry[0].step > session.steps]
    made = {(swap.step, swap.layers) for swap in swaps}
    return [
        f"the swap of {swap.layers[0]}, ... to {swap.said} at step {swap.step} was not made: the step is over"
        for swap in over
        if (swap.step, swap.layers) not in made
    ]


def _session(model: nn.Module, layers: Sequence[str]) -> Session:
    return layer_modules(model)[layers[0]].core.session


def _new_specs(model: nn.Module, layers: Sequence[str], made: Any) -> list[tuple[LinearCore, LinearSpec]]:
    """The cores of these layers, with the specs they will get."""
    modules = layer_modules(model)
    found = list(dict.fromkeys(modules[name].core for name in layers))
    for core in found:
        _check_whole(core, layers)
    return [(core, core.with_recipe(_one_recipe(core.spec.members, made))) for core in found]


def _one_recipe(members: Sequence[str], made: Any) -> Recipe:
    first, *others = [made.for_layer(member) for member in members]
    if any(other != first for other in others):
        raise ValueError(f"{', '.join(members)} are siblings and run as one layer, but {made} differs for them")
    chosen: Recipe = first
    return chosen


def _check_whole(core: LinearCore, layers: Sequence[str]) -> None:
    siblings = [member.module.name for member in core.members if isinstance(member.module, ConvertedLinear)]
    missing = [name for name in siblings if name not in layers]
    if missing:
        raise ValueError(
            f"{', '.join(siblings)} are siblings and run as one layer, but {', '.join(missing)} would keep another recipe; "
            f"name all of them, or set siblings = false for their group"
        )


def _apply(model: nn.Module, swap: Swap, made: Any) -> Swap:
    specs, session = _new_specs(model, swap.layers, made), _session(model, swap.layers)
    for core, spec in specs:
        core.set_spec(spec)
    session.rebuild()
    session.swaps.append(swap)
    return swap


def _swap(layers: Sequence[str], step: int, recipe: Any, made: Any) -> Swap:
    asked = recipe if isinstance(recipe, str | dict) else None
    return Swap(step, tuple(layers), asked, str(made.for_layer(layers[0])))


def record_stats(model: nn.Module, *patterns: str) -> list[str]:
    """From now on measure every cast of the layers that these patterns name, and only theirs; none: stop. Returns them.

    Siblings are measured together, under the name of the first. Casts of forwards without gradients do not count. Call
    it on all ranks, at a step boundary. Raises ValueError for a pattern that matches no layer.
    """
    session, modules = session_of(model), layer_modules(model)
    names = [name for pattern in patterns for name in match_layers(model, pattern, "record_stats")]
    chosen = {modules[name].core for name in names}
    layers = [core.spec.members[0] for core in session.cores if core in chosen]
    tensors = [name for layer in layers for name in names_of(layer)]
    session.stats = StatsTable(tensors, session.counter.device) if layers else None
    for core in session.cores:
        core.stats = session.stats if core in chosen else None
        core.set_spec(core.with_recipe(plain(core.spec.recipe)))
    return layers


def read_stats(model: nn.Module) -> dict[str, dict[str, float | None]]:
    """The numbers of the last step, by tensor, over all ranks; tensors that were not cast are left out. All ranks call it
    together, after the step boundary. Waits for the device."""
    table = session_of(model).stats
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
