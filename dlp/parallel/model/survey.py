"""Survey: classify the modules of a model for conversion, and reject unsupported modules by name, without ranks.

    nn.Linear                    becomes a parallel linear
    subclass of nn.Linear        rejected by name, since its own forward would be lost, unless a group sets convert = true
    explicit layer of dlp        keeps its style; groups can change recipe and overlap
    other, with parameters       replicated on tp; its forward reads plain tensors
    convert = false              left out: the module and all modules in it are replicated, too

The attribute `dlp_made` of dlp's modules is "by hand" (constructed explicitly), "by convert", or "vocabulary" (a
`VocabParallelEmbedding`). This file reads the attribute and need not import the classes. A module that reads parameters of
another module would read DTensors. Known classes of such modules are rejected by name; for others, the error that a forward
raises gets a note (`explain`).

`guard` and `check_no_fsdp1` reject torch features that a converted or attached model does not support:

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
# Known classes of torch that read the parameters of their child modules
READ_OTHERS = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
)


@dataclass(frozen=True)
class Survey:
    """Modules of a model, by dotted name. A module that is registered several times has a first name and aliases.

    modules   first name -> module, for the modules that conversion treats because they own parameters
    aliases   further name -> first name, of these modules
    names     first names of all modules
    lengths   name of a ModuleList or Sequential -> number of children
    """

    modules: dict[str, nn.Module]
    aliases: dict[str, str]
    names: list[str]
    lengths: dict[str, int]


def survey(model: nn.Module) -> Survey:
    """Survey a model. Raises ValueError if the model, or a part of the model, is already converted or attached."""
    first: dict[int, str] = {}
    every = list(model.named_modules(remove_duplicate=False))
    for name, module in every:
        runtime = getattr(module, "dlp_session", None)
        part = f"module {name}" if name else "this model"
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
    """Return the number of children of each ModuleList and Sequential by name, for patterns (`dlp.quant.patterns`)."""
    return {name: len(module) for name, module in modules if isinstance(module, nn.ModuleList | nn.Sequential)}


def made_by_hand(module: nn.Module) -> bool:
    """Whether the module is an explicitly constructed linear of dlp; false for an explicitly constructed embedding."""
    return getattr(module, "dlp_made", None) == "by hand"


def _owns_parameters(module: nn.Module) -> bool:
    """Whether conversion treats a module: the module owns parameters, or is an nn.Linear, whose parameters a parametrization
    may compute. An explicitly constructed embedding of dlp is not treated."""
    if getattr(module, "dlp_made", None) == "vocabulary":
        return False
    return isinstance(module, nn.Linear) or any(parameter is not None for parameter in module._parameters.values())


def left_out(model: nn.Module, left: set[str], treated: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Map the name of each left-out module that has a forward to the names of this module and of all modules in it, as far as
    they have parameters. `left`: names of left-out modules with parameters; `treated`: all modules with parameters, by name."""
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
            f"{name}: an embedding with {what} cannot be a DTensor: replace the module by an embedding without "
            f"max_norm and sparse before dlp.convert"
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
    """Raise ValueError for a module of READ_OTHERS, unless the module is left out."""
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
    """Raise ValueError for an uninitialized or quantized parameter, for a DTensor, and for a parameter with a class, hooks or a
    gradient that conversion would lose. `converted`: whether the module is not left out."""
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
    """Return warnings about modules other than linears that have matrices and match a group with a recipe: the recipe applies
    only to linears.

    Raises ValueError for a group that sets fields of linears and matches no linear. `linears`: names of the linears."""
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
    """Return a forward hook of the model that adds a note to an error if a module has read a DTensor. Register the hook with
    `always_call=True`. `names`: names of modules by id."""

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
    """Yield the modules of the model whose methods are in the traceback of an error, innermost first. Modules that were called
    with a DTensor are left out."""
    traceback, frames = error.__traceback__, []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    called = {id(frame.f_locals.get("self")) for frame in frames if _is_given_a_dtensor(frame)}
    found = (frame.f_locals.get("self") for frame in reversed(frames))
    return (its for its in found if isinstance(its, nn.Module) and id(its) in names and id(its) not in called)


def _is_given_a_dtensor(frame: FrameType) -> bool:
    """Whether a DTensor is among the arguments of the function of a stack frame."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    given = [frame.f_locals.get(name) for name in names]
    flat = [each for value in given for each in (value if isinstance(value, tuple) else (value,))]
    return any(isinstance(each, DTensor) for each in flat)


class NotForDdp:
    """Stand-in for the list of parameters that DistributedDataParallel ignores: raises ValueError when DDP reads the list."""

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
    """Let unsupported torch features raise ValueError for this model: DDP and load_state_dict(assign=True)."""
    model.register_load_state_dict_pre_hook(_Assigned(model, session))
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model._ddp_params_and_buffers_to_ignore = NotForDdp(type(model).__name__)  # type: ignore[assignment]


class _Assigned:
    """Pre-hook of load_state_dict: raise ValueError if assign=True would replace parameters of an attached optimizer, or
    DTensors by plain tensors."""

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
