"""The step boundary: after each optimizer step, update delayed scales, apply scheduled recipe changes and cast weights.

    before a step   check that no backward is running; that no weight was changed since its cast without an increment of its
                    version counter; that no delayed wgrad waits; that partial gradients are summed; and that replicas of
                    parameters are equal
    step            if the optimizer gets a closure: cast the weights before each evaluation of the closure; all checks above
                    but the first then run after each evaluation, not before the step
    after a step    bump the version counters of parameters, so that a backward that still needs old values raises; then run the
                    boundary in this order:
      flags           copy the flags of non-finite values, which are read one step later
      statistics      keep the statistics of this step's casts for `read_stats`
      scales          all-reduce the amaxes of all microbatches once, then update all delayed scales
      recipe changes  apply all changes that are due; before the casts, so that no weight is cast for its old recipe
      casts           cast all weights in one batch, with one all-reduce of amaxes. A weight that FSDP
                      does not shard is cast in both orientations, into persistent operands; of other weights each rank casts
                      the FSDP shard

`attach` installs the boundary as a post-hook of the optimizer's step; `end_step` runs the boundary directly. Without a boundary
nothing is kept between calls, and each forward and backward casts the weights that it uses.

**Recipe changes**: `set_recipe` changes the recipes of layers at once; `schedule` at a later boundary. Only these layers get a
new spec, which the next forward uses; a forward whose backward has not run yet keeps the old spec. Delayed scales of the old
recipe are dropped, scales of the new recipe start without history, and all other scales stay. The session lists the changes
that were made, for checkpoints and logs.

**Statistics** of casts (`dlp.quant.stats`) are a recipe change as well: the new recipe wraps the layer's recipe, and the
quantizers of the new recipe measure while they cast:

    dlp.record_stats(model, "layers.0.**")
    ...                                        steps
    dlp.read_stats(model)                      {"layers.0.mlp.up_proj.x": {"amax": ..., "sqnr_db": ..., ...}, ...}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlp.comm.lockstep import WATCH, check_alike
from dlp.comm.mesh import TP, ParallelDims, shard_placement
from dlp.parallel.linear.modules import ConvertedLinear, LinearCore, ParallelLinear
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import StepState, Swap, cores, refresh
from dlp.parallel.linear.step import in_backward
from dlp.parallel.model.checks import ACTIONS, NonFiniteWatch, looks
from dlp.parallel.model.context import check_context
from dlp.parallel.model.grads import PartialGradients, add_main_grads, check_none_waits
from dlp.parallel.model.replicas import Replicas
from dlp.parallel.model.session import Session, converted_root, give_session, session_of
from dlp.parallel.model.survey import check_no_fsdp1, container_lengths, guard
from dlp.parallel.weight.base import MAIN_GRADS
from dlp.parallel.weight.fsdp2 import Managed, cast_managed, gather_quantized, managed
from dlp.parallel.weight.held import Arguments, around_closure, masters_of
from dlp.parallel.weight.local import num_axes
from dlp.parallel.weight.parameters import is_placeholder
from dlp.quant import recipe as recipes
from dlp.quant.patterns import must_match
from dlp.quant.recipe import Recipe
from dlp.quant.stats import StatsTable, names_of, plain, summary
from dlp.runtime.fused_steps import trace_without_running

WEIGHT_CACHES = ("step", "forward")


def end_step(model: nn.Module) -> None:
    """Run the step boundary: update delayed scales, apply scheduled recipe changes, cast weights.

    `dlp.attach` runs the step boundary after each optimizer step. Call `end_step` after weights were changed by
    anything but an attached optimizer.

    Args:
        model: converted model.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], dlp.build_mesh())
        >>> dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with torch.no_grad():
        ...     _ = model[0].weight.mul_(0.5)
        >>> dlp.end_step(model)
    """
    model = converted_root(model) or model
    layers = list(cores(model))
    for core in layers:
        core.shared.forget()
    sessions = list(dict.fromkeys(core.session for core in layers))
    for session in sessions:
        session.end_step()
        make_due_swaps(model, session)
    _cast_weights(model)


def _cast_weights(model: nn.Module) -> None:
    layers = list(cores(model))
    for session in dict.fromkeys(core.session for core in layers):
        refresh(session, [weight for core in layers if core.session is session for weight in core.weights])
        if session.stats is not None:
            session.stats.in_step = False


def cast_weights_first(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of an attached model before the first forward, for x of `dtype`. Compiled code then reads operands in
    the first step as in later steps, and is compiled once."""
    for core in cores(model):
        core.weights.dtype = dtype
    _cast_weights(model)


def attach(
    model: nn.Module, optimizer: Optimizer, *, mesh: DeviceMesh | None = None, seed: int = 0, weight_cache: str = "step",
    on_nonfinite: str = "raise", main_grads: str = "off",
) -> None:  # fmt: skip
    """Run the step boundary after every step of the optimizer, so that weights are cast once per step.

    Call `attach` after `dlp.convert` and `dlp.fully_shard`, once for each optimizer, when no parameter is on the meta device.
    Afterwards FSDP gathers weights as the step boundary quantized them (see `dlp.fully_shard`). A step raises RuntimeError
    inside a backward, when tp-partial gradients were not summed, and when delayed wgrads wait (see `dlp.backward_dw`). The
    first ten steps, and then every hundredth, also raise RuntimeError when replicas of a parameter differ between ranks, and
    when sampled values of a weight were changed in a way that torch's version counters do not show. In the first step all ranks
    must run the same forwards.

    Args:
        model: module that `dlp.convert` was called with, or a module around it.
        optimizer: optimizer of parameters of `model`.
        mesh: for a model of layers that were constructed explicitly: mesh of `dlp.build_mesh`, which defines the tokens of
            this rank.
        seed: for a model of layers that were constructed explicitly: seed of stochastic rounding.
        weight_cache: "step": weights are cast once per step in both orientations, and the operands are kept. "forward":
            weights are cast in each forward and backward, with equal bits and less memory. FSDP keeps quantized shards in
            either case, unless `quantized_gather` is False.
        on_nonfinite: action when a cast read a NaN or Inf. "raise": FloatingPointError at the end of the next step, with
            layer, tensor, rank and step; "warn": a line in the log; "ignore": nothing, see `dlp.not_finite`.
        main_grads: accumulation of weight gradients over microbatches. "off": by autograd. "grad": by the wgrad GEMM into
            existing fp32 gradients, with equal bits. "main_grad": by the wgrad GEMM into `weight.main_grad`, which the user
            allocates.

    Raises:
        ValueError: for an optimizer without parameters of `model`, with parameters from before `dlp.convert` or
            `dlp.fully_shard`, or that is attached already; for layers outside the converted model; and for an unknown
            value of `weight_cache`, `on_nonfinite` or `main_grads`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], dlp.build_mesh())
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> dlp.attach(model, optimizer)
        >>> model(torch.randn(32, 64)).square().mean().backward()
        >>> optimizer.step()  # then the step boundary
    """
    _check_choice("weight_cache", weight_cache, WEIGHT_CACHES)
    _check_choice("on_nonfinite", on_nonfinite, ACTIONS)
    _check_choice("main_grads", main_grads, MAIN_GRADS)
    root = converted_root(model)
    _check_attachable(model, root, optimizer)
    trace_without_running()
    session = _adopt_layers(model, mesh, seed) if root is None else session_of(root)
    root = root or model
    session.add_optimizer(optimizer)
    records = _records(model)
    _cache_weights(session, records, weight_cache)
    if main_grads != "off":
        add_main_grads(session, root, records, main_grads)
    gather_quantized(model)
    end = partial(_after_step, root, session, NonFiniteWatch(session.flags, on_nonfinite))
    fsdp = [record for _, _, record in managed(model)]
    AttachedOptimizer(optimizer, session, fsdp, partial(_cast_weights, root), end)
    session.attached = True
    if any(group.size() > 1 for group in session.groups.values()):
        WATCH.add(session)


def _check_choice(option: str, given: str, choices: Sequence[str]) -> None:
    if given not in choices:
        raise ValueError(f"{option} must be one of {', '.join(choices)}; got {given!r}")


def _check_attachable(model: nn.Module, root: nn.Module | None, optimizer: Optimizer) -> None:
    """Raise ValueError for a model or an optimizer that `attach` does not support. `root`: see `_check_whole`."""
    check_no_fsdp1(model)
    _check_whole(model, root)
    _check_owns(root or model, optimizer, list(masters_of(model).values()))
    _check_not_stale(root or model, optimizer)


def _cache_weights(session: Session, records: Mapping[LinearCore, Sequence[Managed | None]], weight_cache: str) -> None:
    """Decide for each layer whether operands of weights are kept between steps. `weight_cache` does not apply to weights that
    FSDP shards over several ranks."""
    for core, its in records.items():
        core.weights.caches = weight_cache == "step" and all(record is None or record.ranks == 1 for record in its)
        if core.weights.caches:
            cast_managed(core.weights, its)
    if weight_cache == "forward" and any(record and record.ranks > 1 for its in records.values() for record in its):
        session.note(
            "weight_cache = 'forward' does not affect FSDP shards, which stay quantized: set quantized_gather "
            "= false to keep no casts"
        )


def _after_step(model: nn.Module, session: Session, watch: NonFiniteWatch, first: bool) -> None:
    """Run the step boundary after the step of an optimizer. `first`: whether this is the first optimizer that steps in this
    step of the session. Only then are the flags of the step copied, before the boundary: a second copy would be empty. `watch`
    reads the flags of the previous step after the boundary."""
    if first:
        session.flags.close()
    end_step(model)
    watch.look(session.steps)


class AttachedOptimizer:
    """Step hooks of one attached optimizer.

    fsdp     one `Managed` for each parameter of the model that FSDP2 manages
    recast   function that casts the current weights of the model
    end      function that runs the step boundary, see `_after_step`; its argument is `first`
    """

    def __init__(
        self, optimizer: Optimizer, session: Session, fsdp: Sequence[Managed], recast: Callable[[], None],
        end: Callable[[bool], None],
    ) -> None:  # fmt: skip
        self._session, self._fsdp = session, fsdp
        self._recast, self._end = recast, end
        self._sums = 0 if session.sums is None else session.sums.num_sums
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if in_backward():
            raise RuntimeError(
                "an attached optimizer steps inside of a backward, while gradients are incomplete and layers still "
                "need the old weights: step after backward()"
            )
        return around_closure(args, kwargs, self._recast, self._check)

    def _check(self) -> None:
        """Run the checks before an update of the parameters; see the module docstring."""
        if looks(self._session.steps):
            self._session.stale.check_values()
        check_none_waits(self._session)
        if self._session.sums is not None:
            self._sums = self._session.sums.check_summed(self._sums)
        if self._session.replicas is not None:
            self._session.replicas.look(self._session.steps)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        changed = [p for group in optimizer.param_groups for p in group["params"]]
        known = {id(parameter) for parameter in changed}
        changed += [record.gathered for record in self._fsdp if id(record.stored) in known]
        torch.autograd.graph.increment_version([p._local_tensor if isinstance(p, DTensor) else p for p in changed])
        self._end(self._session.count_step(optimizer))


def _records(model: nn.Module) -> dict[LinearCore, list[Managed | None]]:
    """Map each layer to a list with one entry for each weight: its `Managed`, or None if FSDP2 does not manage the weight."""
    found = {(id(module), name): record for module, name, record in managed(model)}
    return {core: [found.get((id(m.module), m.weight)) for m in core.members] for core in cores(model)}


def _check_whole(model: nn.Module, root: nn.Module | None) -> None:
    """Raise ValueError for a layer in `model` whose weights the step boundary of `root` could not cast.

    Such a layer is outside of the converted module `root`, in another converted model, or sharded by a `fully_shard` of a
    module around `model`. `root` is None if all layers were constructed explicitly."""
    inside = set(cores(root or model))
    for core, records in _records(model).items():
        name = core.spec.members[0]
        if root is None and not core.session.lone:
            raise ValueError(
                f"dlp.attach: {name} is a layer of a larger model that was converted or attached: attach the larger "
                f"model"
            )
        if core not in inside:
            raise ValueError(
                f"dlp.attach: {name} is outside of the module that dlp.convert or dlp.attach was called with, so that "
                f"the step boundary would not cast its weights: convert the complete model, or attach the parts one by "
                f"one"
            )
        if None in records and shard_placement(core.parameters()[0]) is not None:
            raise ValueError(
                f"dlp.attach: {name} is sharded by a fully_shard of a module around this model: attach the outer module"
            )


def _check_owns(model: nn.Module, optimizer: Optimizer, held: Sequence[Tensor]) -> None:
    """Raise ValueError for an optimizer that holds no parameter of the model, or a quantized-only weight in place of its
    master weight. `held`: master weights that an optimizer may hold."""
    own = {id(parameter): name for name, parameter in model.named_parameters()} | {id(master): "" for master in held}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if is_placeholder(p) and p.requires_grad and id(p) in own:
            raise ValueError(
                f"dlp.attach: this {type(optimizer).__name__} holds {own[id(p)]}, which is a quantized-only weight, so "
                f"that the optimizer step would train nothing: create the optimizer with dlp.with_master_weights"
            )
    if own and not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"dlp.attach: this {type(optimizer).__name__} holds none of the model's {len(own)} parameters "
            f"({next(iter(own.values()))}, ...), so that the optimizer step trains nothing; dlp.convert and "
            f"dlp.fully_shard replace parameters: create the optimizer after them"
        )


def _check_not_stale(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that holds parameters from before dlp.convert or a fully_shard replaced them.

    A parameter counts as replaced if it is not in the model, and the model has a trainable parameter of equal shape, on more
    mesh axes, that the optimizer does not hold."""
    own = {id(p): name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    known, foreign = {id(p) for p in held}, [p for p in held if id(p) not in own]
    stale: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            old = next((p for p in foreign if p.shape == parameter.shape and num_axes(p) < num_axes(parameter)), None)
            if old is not None:
                stale.append(name)
                foreign = [p for p in foreign if p is not old]
    if stale:
        some = " and ".join(stale[:2]) + (f" and {len(stale) - 2} more" if len(stale) > 2 else "")
        raise ValueError(
            f"dlp.attach: this {type(optimizer).__name__} holds {some} from before dlp.fully_shard or dlp.convert "
            f"replaced these parameters, so that the optimizer step does not train them: create the optimizer after "
            f"dlp.convert and dlp.fully_shard"
        )


def _adopt_layers(model: nn.Module, mesh: DeviceMesh | None, seed: int) -> Session:
    """Give explicitly constructed layers a common session and their names in the model. Returns the session."""
    world = dist.group.WORLD if dist.is_initialized() else None
    dims = None if mesh is None else ParallelDims.from_mesh(mesh)
    check_context(model, 1 if dims is None else dims.cp)
    groups = {} if dims is None else dims.parameter_groups
    session = Session(
        seed=seed, amax_group=world, dp=(0, 1) if dims is None else (dims.token_rank, dims.token_ranks), groups=groups
    )
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear) and module.core not in session.cores:
            core, weights = module.core, [member.weight for member in module.core.members]
            members = (name,) if len(weights) == 1 else tuple(f"{name}.{weight}" for weight in weights)
            core.set_spec(replace(core.spec, name=name or core.spec.name, members=members), session)
            session.cores.append(core)
    give_session(model, session)
    guard(model, session)
    tp_groups = [core.spec.tp_group for core in session.cores if core.spec.tp > 1]
    if tp_groups:
        model.partial_gradients = session.sum_partial(PartialGradients(model, tp_groups[0]))
        groups[TP] = tp_groups[0]
        rows = {core.spec.name: f"{core.spec.style.name} in {core.spec.recipe}" for core in session.cores}
        check_alike(rows, tp_groups[0], "dlp.attach")
    session.replicas = Replicas(model, [slot.path for slot in session.sums.slots] if session.sums else (), groups)
    return session


# ---- recipe changes


def set_recipe(model: nn.Module, pattern: str, recipe: Any) -> Swap:
    """Change the recipe of matching layers.

    All ranks call `set_recipe` between an optimizer step and the next forward.

    Args:
        model: converted model.
        pattern: pattern of module names, as in a layer group.
        recipe: name of a recipe, a dict {"name": ..., option: value}, a `Recipe` or a `CustomRecipe`.

    Returns:
        The change as a `Swap`: step, layers and recipe.

    Raises:
        ValueError: before anything is changed, for a pattern that matches no layer or only some of a set of siblings, a recipe
            that a layer cannot run under, and recipes that differ between tp ranks.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], dlp.build_mesh())
        >>> dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> change = dlp.set_recipe(model, "0", "bf16")
    """
    resolved, modules = recipes.as_recipe(recipe), layer_modules(model)
    names = {id(module): name for name, module in _by_own_name(model).items()}
    layers = [names[id(modules[name])] for name in match_layers(model, pattern, "set_recipe")]
    asked = {layer: str(resolved.for_layer(layer)) for layer in layers}
    check_alike(asked, _session(model, layers).groups.get(TP), "dlp.set_recipe")
    return _apply(model, _swap(layers, _session(model, layers).steps, recipe, resolved), resolved)


def schedule(model: nn.Module, layers: Sequence[str], at_step: int, recipe: Any) -> None:
    """Schedule `set_recipe` for layers by name, at the step boundary after `at_step` optimizer steps.

    Raises ValueError at once for a step that is over, and for a change that `set_recipe` would reject."""
    resolved, session = recipes.as_recipe(recipe), _session(model, layers)
    if at_step <= session.steps:
        raise ValueError(f"a recipe change at step {at_step} is in the past: {session.steps} steps are done")
    _new_specs(model, layers, resolved)
    session.scheduled.append((_swap(layers, at_step, recipe, resolved), resolved))


def make_due_swaps(model: nn.Module, session: StepState) -> None:
    """Apply the scheduled recipe changes whose step is reached."""
    for swap, resolved in [entry for entry in session.scheduled if entry[0].step <= session.steps]:
        session.scheduled.remove((swap, resolved))
        _apply(model, swap, resolved)


def layer_modules(model: nn.Module) -> dict[str, ParallelLinear]:
    """Return the layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ParallelLinear)}


def _by_own_name(model: nn.Module) -> dict[str, ParallelLinear]:
    """Return the layers of a model by their names in the converted model, which may contain this model or be a part of it."""
    root = converted_root(model)
    inside = {} if root is None else {id(module): name for name, module in layer_modules(root).items()}
    return {
        module.name if isinstance(module, ConvertedLinear) else inside.get(id(module), name): module
        for name, module in layer_modules(model).items()
    }


def match_layers(model: nn.Module, pattern: str, asked_by: str) -> list[str]:
    """Return the layers that a pattern matches. Raises ValueError with similar names if no layer matches.

    `asked_by`: name of the caller, for the message."""
    names = list(layer_modules(model))
    lengths = container_lengths(model.named_modules())
    return must_match(names, lengths, pattern, getattr(model, "base_model_prefix", ""), asked_by=asked_by)


def recipes_of(model: nn.Module) -> dict[str, str]:
    """Return the recipe of each layer, as a string."""
    return {name: str(module.core.spec.recipe) for name, module in layer_modules(model).items()}


def repeat(model: nn.Module, session: StepState, swaps: Sequence[Swap]) -> list[str]:
    """Repeat the recipe changes of a checkpoint on a model that has the recipes of its configuration.

    Returns lines for the log about scheduled changes whose step is over and which the checkpoint does not list. Raises
    ValueError for a change to a recipe that was constructed in Python, which cannot be repeated, unless each layer already has
    this recipe or gets another recipe by a later change."""
    for swap in swaps:
        if swap.asked is not None:
            _apply(model, swap, recipes.as_recipe(swap.asked))
    now = recipes_of(model)
    for swap in swaps:
        later = {layer for other in swaps[swaps.index(swap) + 1 :] for layer in other.layers}
        others = [layer for layer in swap.layers if layer not in later and now.get(layer) != swap.said]
        if swap.asked is None and others:
            raise ValueError(
                f"{others[0]} was set to {swap.said} at step {swap.step}, a recipe constructed in Python, which a checkpoint "
                f"cannot hold; set it with dlp.set_recipe before loading"
            )
    session.swaps = list(swaps)
    over = [swap for swap, _ in session.scheduled if swap.step <= session.steps]
    session.scheduled = [entry for entry in session.scheduled if entry[0].step > session.steps]
    done = {(swap.step, swap.layers) for swap in swaps}
    return [
        f"the recipe change of {swap.layers[0]}, ... to {swap.said} at step {swap.step} was not made: the step is over"
        for swap in over
        if (swap.step, swap.layers) not in done
    ]


def _session(model: nn.Module, layers: Sequence[str]) -> StepState:
    return _by_own_name(model)[layers[0]].core.session


def _new_specs(model: nn.Module, layers: Sequence[str], resolved: Any) -> list[tuple[LinearCore, LinearSpec]]:
    """Return the cores of these layers, each with its new spec under the recipe `resolved`."""
    modules = _by_own_name(model)
    found = list(dict.fromkeys(modules[name].core for name in layers))
    for core in found:
        core.spec.check_recipe_may_change("set the recipe by the layer group")
        check_siblings(core, modules, layers)
    return [(core, core.with_recipe(_one_recipe(core.spec.members, resolved))) for core in found]


def _one_recipe(members: Sequence[str], resolved: Any) -> Recipe:
    """Return the recipe of siblings. Raises ValueError if a `CustomRecipe` differs among the siblings."""
    first, *others = [resolved.for_layer(member) for member in members]
    if any(other != first for other in others):
        raise ValueError(f"{', '.join(members)} are siblings and run as one layer, but {resolved} differs for them")
    chosen: Recipe = first
    return chosen


def check_siblings(core: LinearCore, modules: Mapping[str, ParallelLinear], chosen: Sequence[str]) -> None:
    """Raise ValueError if only some of the siblings that run as one layer are chosen. `modules`: all layers, by name."""
    owners = {id(member.module) for member in core.members}
    siblings = [name for name, module in modules.items() if id(module) in owners]
    missing = [name for name in siblings if name not in chosen]
    if missing:
        raise ValueError(
            f"{', '.join(siblings)} are siblings and run as one layer, but {', '.join(missing)} would keep another recipe; "
            f"match all of them, or set siblings = false for their group"
        )


def _apply(model: nn.Module, swap: Swap, resolved: Any) -> Swap:
    """Apply a recipe change now, and append the change to `session.swaps`."""
    specs, session = _new_specs(model, swap.layers, resolved), _session(model, swap.layers)
    session.check_not_graphed(core for core, _ in specs)
    for core, spec in specs:
        core.ran_under.recipe_changed = True
        core.set_spec(spec)
    session.rebuild()
    session.swaps.append(swap)
    return swap


def _swap(layers: Sequence[str], step: int, recipe: Any, resolved: Any) -> Swap:
    asked = recipe if isinstance(recipe, str | dict) else None
    return Swap(step, tuple(layers), asked, str(resolved.for_layer(layers[0])))


def record_stats(model: nn.Module, *patterns: str) -> list[str]:
    """Measure the casts of matching layers from now on, and stop measuring all other layers.

    Siblings are measured together under the name of the first. Casts of forwards without gradients do not count, unless no
    weight requires a gradient. All ranks call `record_stats` between two steps.

    Args:
        model: converted model.
        *patterns: patterns of module names; no pattern ends the measurement.

    Returns:
        Names of the measured layers.

    Raises:
        ValueError: for a pattern that matches no layer.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], dlp.build_mesh())
        >>> dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> dlp.record_stats(model, "**")
        ['0']
    """
    session, modules = session_of(model), layer_modules(model)
    names = [name for pattern in patterns for name in match_layers(model, pattern, "record_stats")]
    chosen = {modules[name].core for name in names}
    session.check_not_graphed(session.cores)
    layers = [core.spec.members[0] for core in session.cores if core in chosen]
    tensors = [name for layer in layers for name in names_of(layer)]
    session.stats = StatsTable(tensors, session.counter.device) if layers else None
    for core in session.cores:
        core.stats = session.stats if core in chosen else None
        core.set_spec(core.with_recipe(plain(core.spec.recipe)))
    return layers


def read_stats(model: nn.Module) -> dict[str, dict[str, float | None]]:
    """Return statistics of the casts of the last step, over all ranks.

    All ranks call `read_stats` together, after the step boundary. Waits for the device.

    Args:
        model: model with recorded statistics, see `dlp.record_stats`.

    Returns:
        Statistics by tensor; tensors that were not cast are left out.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], dlp.build_mesh())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> dlp.attach(model, optimizer)
        >>> measured = dlp.record_stats(model, "**")
        >>> model(torch.randn(32, 64)).sum().backward()
        >>> optimizer.step()
        >>> "amax" in dlp.read_stats(model)["0.x"]
        True
    """
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
