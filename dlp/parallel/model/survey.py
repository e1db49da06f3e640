"""Survey: classify the modules of a model for conversion, and reject unsupported modules by name, without ranks.

    exactly nn.Linear            becomes parallel
    another class of linear      rejected by name, since its own forward would be lost; convert = true converts it
                                 nevertheless
    dlp's own layers             adopted: they keep their style; groups can change recipe and overlap
    anything with parameters     replicated on tp: its forward sees plain tensors
    convert = false              left out: replicated as well, for the module and all modules in it

The attribute `dlp_made` of dlp's modules tells their origin: "by hand" (constructed explicitly), "by convert", or "vocabulary"
for an embedding; so this file imports no layer. A module that reads parameters of another module would see DTensors. If the
class shows
this, the module is rejected by name; otherwise the error of the first forward gets a note (`explain`).

`guard` rejects torch features that a converted model does not support:

    DistributedDataParallel        broadcasts parameters and reduces gradients, which must not be DTensors
    FullyShardedDataParallel       (FSDP1) takes parameters out of their modules
    load_state_dict(assign=True)   replaces the parameters that an optimizer holds and that are sharded over tp
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from dlp.parallel.linear.state import StepState
from dlp.parallel.model.groups import OF_LINEARS, LayerGroup, Resolved
from dlp.parallel.weight.parameters import check_is_parameter, check_plain

LEAVE_OUT = "leave the module out by a layer group with convert = false"
MIXED = ("got mixed torch.Tensor and DTensor", "is a DTensor, but layers read", "is called with a DTensor")
# torch's module classes that read other modules' parameters; the first forward finds others
READ_OTHERS = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
)


@dataclass(frozen=True)
class Survey:
    """The modules of a model, as conversion sees them.

    modules   modules that conversion treats, since they own parameters, by first name
    aliases   further name -> first name
    names     first names of all modules
    lengths   dotted name -> number of children, for containers
    """

    modules: dict[str, nn.Module]
    aliases: dict[str, str]
    names: list[str]
    lengths: dict[str, int]


def survey(model: nn.Module) -> Survey:
    """Survey a model. Raises ValueError for a model of which a part is converted already."""
    first: dict[int, str] = {}
    every = list(model.named_modules(remove_duplicate=False))
    for name, module in every:
        runtime = getattr(module, "dlp_session", None)
        part = f"{name} of it" if name else "this model"
        if runtime is not None and runtime.plan is None:
            raise ValueError(f"dlp.attach has been called on {part} already: dlp.convert comes first")
        if runtime is not None or getattr(module, "dlp_made", None) == "by convert":
            raise ValueError(
                f"{part} is converted already: convert a plain model, once and as a whole (a layer group with convert = false "
                f"leaves parts out); dlp.set_recipe changes recipes of a converted model"
            )
        first.setdefault(id(module), name)
    modules = {name: module for name, module in model.named_modules() if _owns_parameters(module)}
    aliases = {name: first[id(module)] for name, module in every if first[id(module)] in modules}
    lengths = container_lengths(every)
    names = [name for name, _ in model.named_modules() if name]
    return Survey(modules, {name: its for name, its in aliases.items() if name != its}, names, lengths)


def container_lengths(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, int]:
    """Number of children of each ModuleList and Sequential by dotted name, for patterns (`dlp.quant.patterns`)."""
    return {name: len(module) for name, module in modules if isinstance(module, nn.ModuleList | nn.Sequential)}


def made_by_hand(module: nn.Module) -> bool:
    """Whether this is an explicitly constructed layer of dlp."""
    return getattr(module, "dlp_made", None) == "by hand"


def _owns_parameters(module: nn.Module) -> bool:
    """Whether conversion treats a module: the module owns parameters, or has a parameter that a parametrization computes, and
    is not an explicitly constructed embedding of dlp."""
    if getattr(module, "dlp_made", None) == "vocabulary":
        return False
    return isinstance(module, nn.Linear) or any(parameter is not None for parameter in module._parameters.values())


def left_out(model: nn.Module, left: set[str], treated: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Map each left-out module to the modules with parameters in it, including itself. `left`: names of left-out
    modules."""
    names = {id(module): name for name, module in treated.items()}
    found = {}
    for name, module in model.named_modules():
        inside = tuple(names[id(each)] for each in module.modules() if id(each) in names)
        if name and inside and _has_forward(module) and left.issuperset(inside):
            found[name] = inside
    return found


def check(name: str, module: nn.Module, convert: bool | None) -> None:
    """Raise ValueError for a module that cannot be converted. `convert`: the value that its groups set."""
    if made_by_hand(module):
        return
    _check_parameters(name, module, convert is not False)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (module.max_norm is not None or module.sparse):
        what = "sparse gradients" if module.max_norm is None else "max_norm, which rewrites its weight in forward,"
        raise ValueError(
            f"{name}: an embedding with {what} cannot be a DTensor: replace the module by an embedding without these "
            f"before dlp.convert"
        )
    if convert is False:
        return
    if isinstance(module, nn.Linear):
        _check_linear(name, module, convert)
    elif not _has_forward(module):
        raise ValueError(
            f"{name}: a {_kind(module)} has no forward, so that {name.rpartition('.')[0] or 'the model itself'} reads its "
            f"parameters, and would read DTensors: {LEAVE_OUT}, with the module that reads them"
        )
    if "forward" in vars(module):
        raise ValueError(
            f"{name}: its forward was replaced on the instance; replace it after dlp.convert, or {LEAVE_OUT}"
        )


def check_readers(model: nn.Module, left: Mapping[str, Any]) -> None:
    """Raise ValueError for a module whose forward reads the parameters of modules in it, unless the module is left out."""
    for name, module in model.named_modules():
        if isinstance(module, READ_OTHERS) and name not in left:
            kind = _kind(module)
            raise ValueError(
                f"{name or 'the model'}: a {kind} reads the weights of its linears instead of calling them, and would read "
                f"DTensors: {LEAVE_OUT}"
            )


def _check_linear(name: str, module: nn.Linear, convert: bool | None) -> None:
    check_is_parameter(name, module)
    if type(module) is not nn.Linear and not convert:
        raise ValueError(
            f"{name}: a {_kind(module)} is not exactly nn.Linear, and conversion would replace its own forward: "
            f"{LEAVE_OUT}, or convert it nevertheless with convert = true"
        )
    more = [key for key, _ in module.named_parameters() if key not in ("weight", "bias")]
    if more:
        raise ValueError(
            f"{name}: a {_kind(module)} has parameters other than weight and bias ({more[0]}); {LEAVE_OUT}"
        )


def _check_parameters(name: str, module: nn.Module, converted: bool) -> None:
    """Raise ValueError for a parameter with state that conversion to a DTensor would lose. `converted`: the module is
    not left out."""
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        path = f"{name}.{key}".lstrip(".")
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"{path}: the parameter has no shape yet: call the model once before dlp.convert")
        if key == "weight" and (converted or isinstance(parameter, DTensor)):
            check_plain(name, parameter)
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{path}: the parameter is a DTensor already: dlp.convert comes before fully_shard and other "
                f"parallelism"
            )
        if converted and type(parameter) is not nn.Parameter:
            raise ValueError(
                f"{path}: the parameter is a {type(parameter).__name__}, which conversion would replace by a plain "
                f"parameter; "
                f"{LEAVE_OUT}"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{path}: the parameter has gradient hooks, which would be lost; register them after dlp.convert"
            )
        if parameter.grad is not None:
            raise ValueError(
                f"{path}: the parameter has a gradient, which would be lost; call optimizer.zero_grad() before "
                f"dlp.convert"
            )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def unreached(
    groups: Sequence[LayerGroup],
    resolved: Mapping[str, Resolved],
    modules: Mapping[str, nn.Module],
    linears: Collection[str],
) -> tuple[str, ...]:
    """Warnings about matrices that a group's recipe matches but cannot change.

    Raises ValueError for a group that sets fields of linears and matches no linear. `linears`: names of modules that
    are linears."""
    warnings = []
    for group in groups:
        sets = [key for key in OF_LINEARS if key in group.fields()]
        matched = [name for name, chosen in resolved.items() if group.name in chosen.groups]
        if sets and not set(matched).intersection(linears):
            kinds = ", ".join(dict.fromkeys(_kind(modules[name]) for name in matched))
            raise ValueError(
                f"layer group {group.name!r}: {sets[0]} is for linears, and the group matches none: the matched "
                f"modules ({matched[0]}, ...) are {kinds}; replace these by nn.Linear, or remove {sets[0]} from the "
                f"group"
            )
        missed = [n for n in matched if n not in linears and group.recipe is not None and _multiplies(modules[n])]
        for kind in dict.fromkeys(_kind(modules[name]) for name in missed):
            names = [name for name in missed if _kind(modules[name]) == kind]
            some = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            warnings.append(
                f"the recipe of group {group.name!r} does not apply to {some}: a {kind} is not an nn.Linear"
            )
    return tuple(warnings)


def _multiplies(module: nn.Module) -> bool:
    """Whether a module has a matrix that is not an embedding table."""
    parameters = (parameter for parameter in module._parameters.values() if parameter is not None)
    return not isinstance(module, nn.Embedding | nn.EmbeddingBag) and any(p.dim() > 1 for p in parameters)


def explain(names: Mapping[int, str]) -> Callable[..., None]:
    """Forward hook of the model, also called for errors: add a note to the error of a module that has read a DTensor.

    `names`: names of modules by id."""

    def hook(model: nn.Module, args: Any, output: Any) -> None:
        error = sys.exc_info()[1]
        if output is None and isinstance(error, RuntimeError | TypeError) and any(said in str(error) for said in MIXED):
            reader = next(_modules_of(error, names), None)
            if reader is not None:
                name = names[id(reader)] or "the model"
                error.add_note(
                    f"{name}: a {_kind(reader)} reads parameters of other modules, which are DTensors now: {LEAVE_OUT}"
                )

    return hook


def _modules_of(error: BaseException, names: Mapping[int, str]) -> Iterator[nn.Module]:
    """The model's modules whose methods are in an error's traceback, innermost first, without modules that were called
    with the DTensor."""
    traceback, frames = error.__traceback__, []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    called = {id(frame.f_locals.get("self")) for frame in frames if _is_given_a_dtensor(frame)}
    found = (frame.f_locals.get("self") for frame in reversed(frames))
    return (its for its in found if isinstance(its, nn.Module) and id(its) in names and id(its) not in called)


def _is_given_a_dtensor(frame: FrameType) -> bool:
    """Whether a DTensor is among the arguments of a running function."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    given = [frame.f_locals.get(name) for name in names]
    flat = [each for value in given for each in (value if isinstance(value, tuple) else (value,))]
    return any(isinstance(each, DTensor) for each in flat)


class NotForDdp:
    """List of ignored parameters, which DistributedDataParallel reads first from a model; reading the list raises."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __iter__(self) -> Iterator[str]:
        raise ValueError(
            f"{self.model}: DistributedDataParallel does not support converted models, whose parameters are DTensors "
            f"on tp; build the mesh with dp_replicate = the number of replicas and call dlp.fully_shard(model, "
            f"mesh=mesh), which averages the gradients of replicas"
        )


def check_no_fsdp1(model: nn.Module) -> None:
    """Raise ValueError for layers whose weights FSDP1 keeps in one flat tensor, which a step boundary cannot cast."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and any(hasattr(each, "core") for each in module.modules()):
            raise ValueError(
                f"dlp.attach: {name or type(module.module).__name__} is sharded by FullyShardedDataParallel (FSDP1), whose "
                f"weights a step boundary cannot cast; use dlp.fully_shard, or omit dlp.attach (and set "
                f"use_orig_params=True)"
            )


def guard(model: nn.Module, session: StepState) -> None:
    """Reject torch features that this model does not support after conversion (see the module)."""
    model.register_load_state_dict_pre_hook(_Assigned(model, session))
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model._ddp_params_and_buffers_to_ignore = NotForDdp(type(model).__name__)  # type: ignore[assignment]


class _Assigned:
    """Hook before a model loads a state dict: reject assign=True if it would replace parameters that are needed."""

    def __init__(self, model: nn.Module, session: StepState) -> None:
        self.model, self.session = model, session

    def __call__(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *rest: Any
    ) -> None:
        if not metadata.get("assign_to_params_buffers"):
            return
        for name, parameter in self.model.named_parameters():
            given = state.get(f"{prefix}{name}")
            if given is None:
                continue
            if self.session.attached:
                raise ValueError(
                    f"{name}: load_state_dict(assign=True) would replace the parameters of the attached optimizer, "
                    f"which would then train nothing; omit assign=True, or load before the optimizer is created"
                )
            if isinstance(parameter, DTensor) and not isinstance(given, DTensor):
                raise ValueError(
                    f"{name}: load_state_dict(assign=True) would put a plain tensor in place of the DTensor that dlp.convert "
                    f"made; omit assign=True, or load the plain model before dlp.convert"
                )
