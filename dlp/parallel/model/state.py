"""state_dict: the state that a checkpoint needs in addition to weights and optimizer, as plain tensors by name.

    steps, microbatch      int64 []       completed optimizer steps, and the counter of stochastic rounding
    swaps                  uint8 [bytes]  JSON: the recipe changes made so far
    slots.NAME.scale       fp32 []        delayed scale of a tensor; NAME is, for example, "layers.0.mlp.up_proj.x"
    slots.NAME.history     fp32 [L]       amaxes of the last L steps (amax_history_len)
    slots.NAME.target      fp32 []        the value onto which the scale maps the amax: fp8_max * 2^-margin
    masters.NAME           fp32 [N, K]    master weight of a quantized-only weight, if an optimizer updates master weights;
                                          a DTensor if the weight is a DTensor

Slots are equal on all ranks if all ranks share scales (the default), so that a checkpoint loads on any mesh. With a smaller
amax group, or a recipe with reduce_amax = False, slots have a leading dimension of ranks. With the same number of ranks each
rank then loads its own slots; otherwise all ranks load the maximum of the histories, and scales computed from the maximum.

A replicated value is saved once. `check_scales` and `check_replicas` first verify that its replicas are equal.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dlp.comm.collectives import all_gather
from dlp.comm.mesh import TP
from dlp.parallel.linear.quantize import unflatten, weights_agree
from dlp.parallel.linear.state import LayerState, StepState, Swap
from dlp.parallel.model.boundary import layer_modules, repeat
from dlp.parallel.model.checks import Named, compare, not_sent
from dlp.parallel.model.replicas import check_replicas
from dlp.parallel.model.session import converted_root, session_of
from dlp.parallel.weight.held import load_masters, masters_of
from dlp.parallel.weight.local import local_values
from dlp.parallel.weight.sharded import ShardedWeight
from dlp.quant.recipe import OPERANDS, RESULTS, source
from dlp.quant.state import SlotState, SlotTable
from dlp.quant.tensor import SHARED

PREFIX, MASTERS, TARGET = "slots.", "masters.", "target"
# Requirements on loaded values, by kind of tensor; part of error messages
RULES = {
    "scale": "finite floats above 0",
    TARGET: "finite floats above 0",
    "history": "floats of at least 0",
    "master": "finite floats",
}


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of recipes and scales of a model, as copies on the device of the model.

    All ranks call `state_dict` together. In a model that was neither converted nor attached, explicitly constructed layers have
    the names that `dlp.attach` would give them.

    Args:
        model: converted model, or model with explicitly constructed layers.

    Returns:
        Tensors by name: delayed scales and amax histories, recipe changes, master weights, number of steps, and the counter of
        stochastic rounding.

    Raises:
        ValueError: for a model without layers of dlp.
        RuntimeError: where ranks that share scales have different scales, or replicas of a parameter differ.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_delayed")], dlp.build_mesh())
        >>> dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state = dlp.state_dict(model)
    """
    sessions = _sessions(model)
    first = sessions[0].session
    for named in sessions:
        _check_scales(named.session)
    tp = {} if first.sum_group is None else {TP: first.sum_group}
    check_replicas(model, {**first.groups, **tp})
    swaps = json.dumps([asdict(swap) for named in sessions for swap in named.session.swaps]).encode()
    state = {
        "steps": torch.tensor(first.steps),
        "microbatch": torch.stack([named.session.counter for named in sessions]).amax(0),
        "swaps": torch.tensor(list(swaps), dtype=torch.uint8),
    }
    for named in sessions:
        slots = named.session.scaling.table.state_dict() if named.session.has_slots() else {}
        slots |= named.session.loaded
        if slots:
            flat = {
                f"{PREFIX}{named.saved_as(name)}.{key}": tensor
                for name, slot in slots.items()
                for key, tensor in slot.items()
            }
            state |= _by_rank(flat) if _differs_by_rank(named.session) else flat
    return state | {f"{MASTERS}{name}": master.detach().clone() for name, master in masters_of(model).items()}


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor], *, recipe_files: Collection[Path] = ()) -> list[str]:
    """Restore the result of `dlp.state_dict` on this or another mesh: recipe changes, then scales, master weights and counters.

    Args:
        model: converted model.
        state: tensors by name.
        recipe_files: resolved paths of Python files from which a saved recipe change may import a recipe; by default only
            recipes of dlp are imported.

    Returns:
        Lines for the log about scales that start without history, saved scales that no layer of the model reads, missing
        master weights, and scheduled recipe changes whose step is over and which the saved run did not make.

    Raises:
        ValueError: for a state that does not belong to this model, and for a recipe change that cannot be repeated.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_delayed")], dlp.build_mesh())
        >>> dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> dlp.load_state_dict(model, dlp.state_dict(model))
        []
    """
    model = converted_root(model) or model
    sessions = _sessions(model)
    if missing := [key for key in ("steps", "microbatch", "swaps") if key not in state]:
        raise ValueError(
            f"load_state_dict: the state lacks {missing[0]!r}: pass what dlp.state_dict returned (parameters are in "
            f"model.state_dict())"
        )
    swaps = _saved_swaps(state["swaps"], recipe_files)
    _check_numbers(state, masters_of(model))
    for named in sessions:
        named.session.steps = int(state["steps"])
        named.session.load_counter(state["microbatch"])
    remarks = repeat(model, sessions[0].session, swaps)
    slots: SlotState = {}
    for key, tensor in state.items():
        if key.startswith(PREFIX):
            name, _, part = key.removeprefix(PREFIX).rpartition(".")
            slots.setdefault(name, {})[part] = tensor.to(sessions[0].session.counter.device)
    for named in sessions:
        remarks += _load_slots(named, slots)
    remarks += _dropped(sessions, slots)
    saved_masters = {key.removeprefix(MASTERS): value for key, value in state.items() if key.startswith(MASTERS)}
    rounded = load_masters(model, saved_masters)
    if rounded:
        remarks.append(
            f"{len(rounded)} quantized-only weights ({rounded[0]}, ...) get master weights from their codes: the "
            f"checkpoint has no master weights for them"
        )
    return remarks


def _check_numbers(state: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
    """Raise ValueError for invalid scales and histories, and for master weights that are not finite floats or differ from
    the weight in shape. Nothing is loaded yet. A history may contain Inf: the amax of a skipped step."""
    for key, tensor in state.items():
        kind = "master" if key.startswith(MASTERS) else key.rpartition(".")[2] if key.startswith(PREFIX) else ""
        if not kind:
            continue
        if not _is_valid(local_values(tensor), kind):
            raise ValueError(
                f"load_state_dict: {key} must be {RULES[kind]}: load an earlier checkpoint, or remove this entry"
            )
    for name, master in masters.items():
        saved = state.get(f"{MASTERS}{name}", master)
        if saved.shape != master.shape:
            raise ValueError(
                f"load_state_dict: {MASTERS}{name} has shape {tuple(saved.shape)}, and the weight {tuple(master.shape)}: load "
                f"the state of this model"
            )


def _is_valid(values: Tensor, kind: str) -> bool:
    """Whether values meet RULES[kind]."""
    if not values.is_floating_point() or values.dtype.itemsize == 1:
        return False
    if kind == "history":
        return bool((values >= 0).all())
    return bool(values.isfinite().all()) and (kind == "master" or bool((values > 0).all()))


def without_changes(state: Mapping[str, Tensor], layers: Collection[str]) -> dict[str, Tensor]:
    """Return the result of `dlp.state_dict` without the recipe changes of `layers`, which keep the recipes of the model that
    loads it. Raises ValueError for recipe changes that are not JSON."""
    swaps = [
        replace(swap, layers=tuple(layer for layer in swap.layers if layer not in layers))
        for swap in _parsed(state["swaps"])
    ]
    kept = json.dumps([asdict(swap) for swap in swaps if swap.layers]).encode()
    return {**state, "swaps": torch.tensor(list(kept), dtype=torch.uint8)}


def _saved_swaps(saved: Tensor, recipe_files: Collection[Path]) -> list[Swap]:
    """Parse the saved recipe changes. Raises ValueError for bytes that are not JSON of recipe changes, and for a change to a
    recipe from a Python file that `recipe_files` does not list."""
    swaps = _parsed(saved)
    for swap in swaps:
        file = source(swap.asked)
        if file is not None and file not in recipe_files:
            raise ValueError(
                f"{', '.join(swap.layers[:1])} was set to a recipe of {file} at step {swap.step}, and files that only "
                f"a checkpoint names are not run; name this recipe in the config too, with recipes_path"
            )
    return swaps


def _parsed(saved: Tensor) -> list[Swap]:
    try:
        return [Swap(**{**each, "layers": tuple(each["layers"])}) for each in json.loads(bytes(saved.tolist()))]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"the saved recipe changes cannot be read ({type(error).__name__}: {error}); load another checkpoint"
        ) from None


class NamedSession(NamedTuple):
    """A session with the names of its layers in the state dict.

    `members`: name of a layer in the session -> name in the state dict; None: the names are equal."""

    session: StepState
    members: Mapping[str, str] | None = None

    def saved_as(self, slot: str) -> str:
        """Return the name of a slot in the state dict."""
        for own, name in (self.members or {}).items():
            if slot.startswith(f"{own}."):
                return name + slot.removeprefix(own)
        return slot


def _sessions(model: nn.Module) -> list[NamedSession]:
    """Return the session of a model, or the sessions of explicitly constructed layers if the model has no session.

    Raises ValueError for a model without layers of dlp, and for a part of a converted model."""
    lone = {} if converted_root(model) is not None else layer_modules(model)
    if not lone or not all(module.core.session.lone for module in lone.values()):
        return [NamedSession(session_of(model))]
    found = {}
    for name, module in lone.items():
        weights = [member.weight for member in module.core.members]
        called = (name,) if len(weights) == 1 else tuple(f"{name}.{weight}" for weight in weights)
        found[module.core.session] = NamedSession(
            module.core.session, dict(zip(module.core.spec.members, called, strict=True))
        )
    return list(found.values())


def _load_slots(named: NamedSession, state: SlotState) -> list[str]:
    """Load each slot of the session that the checkpoint has with equal options. Returns lines for the log about slots of the
    session that start without history, or for which the checkpoint has no target.

    Slots of autocast regions stay in `session.loaded` until a forward runs in the region."""
    session = named.session
    saved = state if named.members is None else _own(named, state)
    table = session.scaling.table if session.has_slots() else SlotTable({})
    fresh = table.state_dict()
    session.loaded = {name: slot for name, slot in saved.items() if name not in fresh and name.endswith("]")}
    if not fresh:
        return []
    there = {name for name in fresh if name in saved}
    known = {name for name in there if table.fits(name, saved[name])}
    ranks = max((slot["scale"].dim() and len(slot["scale"]) for slot in saved.values()), default=0)
    states = [saved] if not ranks else [_of_rank(saved, rank) for rank in range(ranks)]
    if ranks == _world() and _differs_by_rank(session):
        states = [states[dist.get_rank()]]
    table.load_merged([{name: state[name] if name in known else fresh[name] for name in fresh} for state in states])
    return [
        f"{len(names)} delayed scales ({min(names)}, ...) {said}"
        for names, said in (
            (fresh.keys() - there, "start without history: the checkpoint has no scales for them"),
            (there - known, "start without history: the checkpoint has scales for another amax_history_len, fp8_format "
                "or margin"),
            ({name for name in known if TARGET not in saved[name]}, "are loaded as scales of this recipe's fp8_format "
                "and margin: the checkpoint, from an earlier version, does not record them"),
        )
        if names
    ]  # fmt: skip


def _dropped(sessions: Collection[NamedSession], saved: SlotState) -> list[str]:
    """Return a line for the log if the checkpoint has slots that no layer of the model reads."""
    read = set[str]()
    for named in sessions:
        names = named.session.scaling.table.names if named.session.has_slots() else ()
        read |= {named.saved_as(name) for name in (*names, *named.session.loaded)}
    if not (left := sorted(saved.keys() - read)):
        return []
    return [
        f"{len(left)} delayed scales of the checkpoint ({left[0]}, ...) are dropped: the model has no layer of that name with "
        f"delayed scales"
    ]


def _own(named: NamedSession, state: SlotState) -> SlotState:
    """Return the slots in a state dict that belong to one session, by their names in the session."""
    members = {name: own for own, name in (named.members or {}).items()}
    found = {}
    for slot, value in state.items():
        for name, own in members.items():
            rest = slot.removeprefix(f"{name}.")
            if slot.startswith(f"{name}.") and rest.partition("[")[0].partition(".")[0] in (*OPERANDS, *RESULTS):
                found[f"{own}.{rest}"] = value
    return found


def _of_rank(slots: SlotState, rank: int) -> SlotState:
    """Return the slots of one rank from slots with a leading dimension of ranks."""
    return {name: {part: tensor[rank] for part, tensor in slot.items()} for name, slot in slots.items()}


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _differs_by_rank(session: StepState) -> bool:
    """Whether some ranks do not share delayed scales, so that each rank saves its own scales."""
    group = session.amax_group
    alone = any(spec.slots and not spec.recipe.reduce_amax for spec in session.specs())
    return _world() > 1 and (alone or group is None or group.size() < _world())


def _by_rank(flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather the tensors of all ranks in one all-gather; each gathered tensor has a new leading dimension of ranks."""
    mine = torch.cat([tensor.reshape(-1) for tensor in flat.values()])
    assert dist.group.WORLD is not None
    (everyone,) = all_gather((mine[None],), (0,), dist.group.WORLD).wait()
    pieces = everyone.split([tensor.numel() for tensor in flat.values()], dim=1)
    return {key: piece.reshape(-1, *tensor.shape) for (key, tensor), piece in zip(flat.items(), pieces, strict=True)}


def check_scales(model: nn.Module) -> int:
    """Compare quantization state that must be equal on all ranks.

    This state consists of delayed scales, of weight scales that ranks share, and of the parts of quantized FSDP shards that
    gathers do not send. All ranks call `check_scales` together.

    Args:
        model: converted model.

    Returns:
        Number of tensors that were compared.

    Raises:
        RuntimeError: on all ranks of the group, for a tensor that differs.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_delayed")], dlp.build_mesh())
        >>> dlp.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> dlp.check_scales(model) >= 0
        True
    """
    return _check_scales(session_of(model))


def _check_scales(session: StepState) -> int:
    by_group: dict[ProcessGroup, Named] = {}
    if session.amax_group is not None and session.has_slots():
        by_group.setdefault(session.amax_group, {}).update(_delayed(session))
    for core in session.cores:
        group = core.spec.amax_group or core.spec.group
        if group is not None and weights_agree(core.spec):
            by_group.setdefault(group, {}).update(_weights(core))
    for weight in session.weights():
        if isinstance(weight, ShardedWeight):
            by_group.setdefault(weight.rows.group, {}).update(_shards(weight))
    for group, scales in by_group.items():
        compare(scales, group)
    return sum(len(scales) for scales in by_group.values())


def _delayed(session: StepState) -> Named:
    """Return the delayed scales that the amax group shares, by name."""
    table, agreed = session.scaling.table, session.scaling.agreed.tolist()
    return {name: table.scale[i] for i, name in enumerate(table.names) if agreed[i]}


def _weights(core: LayerState) -> Named:
    """Return the scales of cast weights that are kept between steps, by name, if a scale covers the full weight."""
    found: Named = {}
    kept = core.weights.parts
    held = [] if kept is None else unflatten(core.spec.recipe.w, kept.parts, len(core.members))
    for member, operands in zip(core.spec.members if kept else (), held, strict=True):
        for columnwise, orientation in enumerate(("rowwise", "columnwise")):
            operand = operands.at(bool(columnwise))
            for part, tensor in zip(operand.format.parts, operand.parts, strict=True):
                if part.rows is SHARED and part.contraction is SHARED:
                    found[f"{member}.w {orientation} {part.name}"] = tensor
    return found


def _shards(weight: ShardedWeight) -> Named:
    """Return the parts of a sharded weight's operands that gathers do not send, since all ranks hold equal copies."""
    return {
        f"{weight.name}.w {name} of {operand.format.name}": tensor
        for layout, operand in weight.own.items()
        for name, tensor in not_sent(operand, int(layout.transposed)).items()
    }
