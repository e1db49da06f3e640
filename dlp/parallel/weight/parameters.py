"""Classes of parameters that restrict torch calls on sharded parameters and on placeholders.

    PlacedParameter       a DTensor on tp: `p.data = t` replaces the local tensor, while torch ignores it for a plain DTensor
    ShardedParameter      a DTensor that FSDP shards: `p.data = t` raises, since FSDP would still gather the old memory
    PlaceholderParameter  parameter in place of a weight that exists only as codes: reading or writing values raises
    PlaceholderDTensor    a PlaceholderParameter for a weight that is a DTensor on tp

`take_class` sets the class of an existing parameter, which stays the same object for optimizers and autograd. State dicts
contain plain parameters, without these classes.

The checks at the end apply to weights that are converted, loaded or quantized. `convert`, `quantized_model_init`, `freeze` and
`quantize_` each use some of these checks, so that the same fault has the same message in all of them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrize

from dlp.comm.transport import agree
from dlp.quant.parameter import QuantizedParameter
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import Recipe

_DATA: Any = torch._C.TensorBase.data


def _values(parameter: Tensor) -> Tensor:
    found: Tensor = _DATA.__get__(parameter)
    return found


class _SpreadParameter(DTensor):
    """Base class of DTensor parameters that define what `p.data = t` does."""

    def detach(self) -> Any:
        """Return a tensor of the same class, which `nn.Parameter(p)` requires."""
        return take_class(super().detach(), type(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _as_plain(self) as plain:
            made = copy.deepcopy(plain, memo)
        return take_class(made, type(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_plain(self) as plain:
            return plain.__reduce_ex__(protocol)

    @classmethod
    def __tensor_unflatten__(cls, *given: Any) -> Any:
        """Return a tensor of the same class, which torch.compile requires."""
        return take_class(DTensor.__tensor_unflatten__(*given), cls)


class PlacedParameter(_SpreadParameter):
    """Parameter on tp. `p.data = t` replaces the memory of p; t must be a DTensor with the same mesh and placements."""

    def _replace(self, value: Tensor) -> None:
        """Set `p.data`: replace the local tensor. Raises ValueError unless `value` is a DTensor with the same shape, mesh and
        placements."""
        like = isinstance(value, DTensor) and (value.device_mesh, value.placements) == (
            self.device_mesh,
            self.placements,
        )
        if not like or value.shape != self.shape:
            given = (
                f"has placements {value.placements}"
                if isinstance(value, DTensor)
                else f"is a plain {type(value).__name__}"
            )
            raise ValueError(
                f"p.data = t: the parameter is a DTensor {tuple(self.shape)} with placements {self.placements}; t has "
                f"the shape {tuple(value.shape)} and {given}: assign a DTensor with the same mesh and placements "
                f"(torch.distributed.tensor.distribute_tensor(t, p.device_mesh, p.placements))"
            )
        assert isinstance(value, DTensor)
        set_local(self, value._local_tensor)

    data = property(_values, _replace)


class ShardedParameter(_SpreadParameter):
    """Parameter that FSDP shards. Raises ValueError for `p.data = t`."""

    def _refuse(self, value: Tensor) -> None:
        raise ValueError(
            "p.data = t: FSDP gathers from the memory of the existing shard and would not read new memory; copy the "
            "values (with torch.no_grad(): p.copy_(t))"
        )

    data = property(_values, _refuse)


class Valueless(Protocol):
    """Weight that has a placeholder as its parameter.

    bound       the bound spec of the layer
    no_values   end of an error message: how the weight is stored, and what to do instead
    """

    @property
    def bound(self) -> Any: ...

    @property
    def no_values(self) -> str: ...


# torch calls that need no values: properties and methods about metadata, and the gradient
METADATA = frozenset({
    "__hash__", "__len__", "__repr__", "_is_view", "dim", "element_size", "data_ptr", "empty_like", "full_like", "get_device",
    "has_names", "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg", "is_pinned",
    "is_same_size", "is_shared", "is_signed", "isnan", "ndimension", "nelement", "new_empty", "new_full", "new_ones",
    "new_tensor", "new_zeros", "numel", "ones_like", "rand_like", "randn_like", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage_offset", "stride", "to_local_shape",
    "untyped_storage", "zeros_like",
})  # fmt: skip
# ops of dlp that accept placeholders, since they read the codes; compiled code calls the overloads `.default`
OURS = frozenset({"linear_fwd", "linear_bwd", "linear_fwd.default", "linear_bwd.default"})
VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # properties that are views of values


def _needs_values(function: Any, args: Sequence[Any]) -> str | None:
    """Return the name of a torch function or property if it reads or writes values, else None."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = str(function.__self__.__name__)
        return attribute if attribute in VALUES else None
    if name in METADATA or name in OURS:
        return None
    if (
        name in ("view_as", "expand_as") and args[0] is args[1]
    ):  # a call by which autograd looks up the node of a gradient
        return None
    return str(name)


class _Placeholder:
    """Tensor with the shape, dtype and gradient of a weight, but without values; its memory is one element.

    torch calls that read or write values raise ValueError. `dlp_weight`: the weight that has this placeholder; None: torch
    traces with a copy of a placeholder."""

    dlp_weight: Valueless | _Copy | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = _needs_values(func, args)
        if asked == "detach":  # activation checkpointing detaches saved tensors; the result has no values either
            with torch._C.DisableTorchFunctionSubclass():
                detached = func(*args, **(kwargs or {}))
            spread = isinstance(detached, DTensor)
            detached = take_class(detached, cls) if spread else detached.as_subclass(DetachedPlaceholder)
            detached.dlp_weight = args[0].dlp_weight
            return detached
        if asked is not None:
            _check_values(asked, (*args, *(kwargs or {}).values()))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def set_(self, *_: Any, **__: Any) -> None:
        """Raise ValueError. torch does not call `__torch_function__` for this method."""
        _check_values("set_", (self,))

    def __repr__(self, *_: Any, **__: Any) -> str:
        shape, dtype = tuple(self.shape), self.dtype  # type: ignore[attr-defined]
        return f"{type(self).__name__}({shape}, {dtype}, without values)"


class DetachedPlaceholder(_Placeholder, Tensor):  # type: ignore[misc]  # of __repr__, which torch types loosely
    """Result of `detach` on a placeholder that is not a DTensor."""

    def requires_grad_(self, requires_grad: bool = True) -> None:  # type: ignore[override]
        """Raise ValueError: `nn.Parameter(p)` calls this, and the new parameter would not be a weight of the layer."""
        _check_values("nn.Parameter", (self,))


class _Copy:
    """Value of `dlp_weight` in a copied placeholder, until the copied layer sets its own weight."""

    no_values = "was copied without the layer that holds its codes: copy or save the model, or its state_dict()"


_COPY = _Copy()


def _check_values(asked: str, given: Sequence[Any]) -> None:
    """Raise ValueError if an argument of the torch call `asked`, or an element of a list argument, is a placeholder.

    Placeholders without `dlp_weight` are accepted: torch.compile traces with such copies."""
    flat = [each for value in given for each in (value if isinstance(value, list | tuple) else (value,))]
    for each in flat:
        weight = each.dlp_weight if isinstance(each, _Placeholder) else None
        if weight is not None:
            name = "a copied parameter" if isinstance(weight, _Copy) else weight.bound.spec.name
            raise ValueError(f"{name}: {asked} needs values of a weight that {weight.no_values}")


class PlaceholderParameter(_Placeholder, nn.Parameter):  # type: ignore[misc]  # of __repr__, which torch types loosely
    """The placeholder of a plain parameter."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _placeholder_parameter(*_described(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _placeholder_parameter, _described(self)


class PlaceholderDTensor(_Placeholder, _SpreadParameter):  # type: ignore[misc]
    """The placeholder of a parameter on tp."""

    def full_tensor(self, **_: Any) -> Any:
        """Raise ValueError, like other methods of a DTensor that read values."""
        _check_values("full_tensor", (self,))

    def to_local(self, **options: Any) -> Any:
        _check_values("to_local", (self,))
        return super().to_local(**options)  # a copy without `dlp_weight`, with which torch.compile traces

    def redistribute(self, *layout: Any, **options: Any) -> Any:
        _check_values("redistribute", (self,))
        return super().redistribute(*layout, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            local = placeholder(self._local_tensor.shape, self.dtype, self._local_tensor.device)
            spread = DTensor(local, self._spec, requires_grad=False)
            memo[id(self)] = _copied(nn.Parameter(spread, self.requires_grad), PlaceholderDTensor)
        return memo[id(self)]


def _described(parameter: Tensor) -> tuple[Any, ...]:
    return tuple(parameter.shape), parameter.dtype, parameter.device, parameter.requires_grad


def _placeholder_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> nn.Parameter:
    return _copied(nn.Parameter(placeholder(shape, dtype, device), requires_grad), PlaceholderParameter)


def _copied(parameter: nn.Parameter, cls: type) -> Any:
    """Turn a parameter into the placeholder of a copied layer."""
    take_class(parameter, cls).dlp_weight = _COPY
    return parameter


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of this shape that has memory for one element, NaN, and stands for a weight without values."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(*shape)


def is_placeholder(parameter: Any) -> bool:
    return isinstance(parameter, _Placeholder)


def take_class(parameter: Any, cls: type) -> Any:
    """Set the class of a parameter, and return the parameter."""
    parameter.__class__ = cls
    return parameter


def show_values(parameter: Any, values: Tensor) -> None:
    """Replace the local tensor of a parameter by `values`. A placeholder gets its class from before `hide_values` again. The
    parameter object stays the same, since a pending backward may refer to this object."""
    spread = isinstance(parameter, DTensor)
    if is_placeholder(parameter):
        take_class(parameter, getattr(parameter, "dlp_class", PlacedParameter if spread else nn.Parameter))
    if spread:
        set_local(parameter, values)
    else:
        parameter.data = values


def hide_values(parameter: Any, weight: Valueless, values: Tensor) -> None:
    """Turn a parameter into a placeholder with the shape, dtype and device of `values`. `weight`: the weight that has this
    parameter."""
    show_values(parameter, placeholder(values.shape, values.dtype, values.device))
    parameter.dlp_class, parameter.dlp_weight = type(parameter), weight
    take_class(parameter, PlaceholderDTensor if isinstance(parameter, DTensor) else PlaceholderParameter)


def set_local(parameter: DTensor, local: Tensor) -> None:
    """Replace the local tensor of a DTensor parameter by a tensor of the same shape, of any dtype and on any device."""
    if (parameter.dtype, parameter.device) != (local.dtype, local.device):
        mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
        made = DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
        _DATA.__set__(parameter, made)
        parameter._spec = made._spec
    parameter._local_tensor = local


@contextmanager
def _as_plain(parameter: Any) -> Iterator[Any]:
    """Context in which a parameter on tp has the class DTensor."""
    cls = type(parameter)
    try:
        yield take_class(parameter, DTensor)
    finally:
        take_class(parameter, cls)


class SpreadModule(nn.Module):
    """Base class of modules with parameters on tp. It overrides the methods of nn.Module that convert, load and save
    parameters."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SpreadModule:
        """Apply `to`, `half` and the like, which replace DTensors by plain DTensors: parameters keep their class."""
        classes = {name: type(parameter) for name, parameter in self._parameters.items() if parameter is not None}
        super()._apply(fn, recurse)
        for name, parameter in self._parameters.items():
            if type(parameter) is DTensor and issubclass(classes[name], _SpreadParameter):
                take_class(parameter, classes[name])
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state dict. For a DTensor parameter, a full plain tensor is accepted: each rank loads its shard.

        Raises ValueError for codes of a quantized checkpoint, which torch would load as values."""
        for name, parameter in self._parameters.items():
            given = state_dict.get(f"{prefix}{name}")
            if parameter is not None and isinstance(given, Tensor) and type(given) in (Tensor, nn.Parameter):
                check_are_values(f"{prefix}{name}", given)
            whole = isinstance(given, Tensor) and not isinstance(given, DTensor)
            if isinstance(parameter, DTensor) and whole and given.shape == parameter.shape:
                mesh, values = parameter.device_mesh, given.detach().to(parameter.device)
                state_dict[f"{prefix}{name}"] = distribute_tensor(
                    values, mesh, parameter.placements, src_data_rank=None
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._parameters if not keep_vars else ():
            saved = destination.get(f"{prefix}{name}")
            if isinstance(saved, _SpreadParameter):
                take_class(saved, DTensor)

    @property
    def _fsdp_use_orig_params(self) -> bool:
        """Attribute that FSDP1 and FSDP2 set on the modules that they manage, for torch.compile."""
        marks = vars(self)
        if "_fsdp_use_orig_params" not in marks:
            raise AttributeError
        return bool(marks["_fsdp_use_orig_params"])

    @_fsdp_use_orig_params.setter
    def _fsdp_use_orig_params(self, value: bool) -> None:
        """Raise ValueError for FSDP1, which marks modules before it flattens their parameters, and cannot flatten
        DTensors."""
        by_fsdp1 = sys._getframe(2).f_code.co_name == "_annotate_modules_for_dynamo"  # frame 1: nn.Module.__setattr__
        if by_fsdp1 and any(isinstance(parameter, DTensor) for parameter in self._parameters.values()):
            raise ValueError(
                f"{type(self).__name__}: FullyShardedDataParallel (FSDP1) does not support converted models, whose "
                f"parameters are DTensors on tp: call dlp.fully_shard(model, mesh=mesh)"
            )
        vars(self)["_fsdp_use_orig_params"] = value


# ---- the active region of quantized_model_init


@dataclass(frozen=True)
class Region:
    """Region of `quantized_model_init`.

    recipe     recipe of the layers that are constructed in the region; None: the recipe of each layer
    preserve   whether initial values are stored in host memory (`preserve_high_precision_init_val`)
    made       for each layer that was constructed in the region, whether it is quantized-only
    """

    recipe: Any
    preserve: bool
    made: list[bool] = field(default_factory=list)


REGION: ContextVar[Region | None] = ContextVar("dlp_quantized_model_init", default=None)


def default_recipe() -> Any:
    """Return the recipe of the active `quantized_model_init`, which `convert` uses for linears without a recipe from layer
    groups. None: no region is active, or the region has no recipe."""
    region = REGION.get()
    return None if region is None else region.recipe


def holds(recipe: Recipe) -> bool:
    """Whether a linear with this recipe that is constructed now is quantized-only."""
    return REGION.get() is not None and not recipe.w.keeps_source


@contextmanager
def recipes_decided() -> Iterator[None]:
    """Context in which an active `quantized_model_init` does not change the recipes of layers."""
    region = REGION.get()
    token = REGION.set(None if region is None else replace(region, recipe=None))
    try:
        yield
    finally:
        REGION.reset(token)


# ---- checks of weights that are converted, loaded or quantized

LEAVE_OUT = "leave the layer out (convert = false in a layer group, filter_fn of dlp.quantize_)"


def check_is_parameter(name: str, linear: nn.Module) -> None:
    """Raise ValueError for a linear whose parameters are computed in each forward, by a parametrization or a hook."""
    if parametrize.is_parametrized(linear):
        which = ", ".join(linear.parametrizations)  # type: ignore[arg-type]
        raise ValueError(
            f"{name}: {which} is parametrized, for example by weight_norm; call "
            f"torch.nn.utils.parametrize.remove_parametrizations, or {LEAVE_OUT}"
        )
    if linear._parameters.get("weight") is None:
        raise ValueError(
            f"{name}: the weight is computed by a hook, for example of torch.nn.utils.weight_norm; remove the hook "
            f"before, or {LEAVE_OUT}"
        )


def check_plain(name: str, weight: Tensor) -> None:
    """Raise ValueError for a weight that is quantized already, is a DTensor, or is not a dense floating-point tensor of at
    least 16 bits."""
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    if isinstance(local, QuantizedParameter) or is_placeholder(weight):
        fmt = f"{local.use.format.name} codes" if isinstance(local, QuantizedParameter) else "codes"
        refuse_codes(name, fmt)
    if isinstance(weight, DTensor):
        raise ValueError(
            f"{name}: the weight is a DTensor already: call dlp.convert and dlp.quantize_ before fully_shard and other "
            f"parallelism"
        )
    if not weight.is_floating_point() or weight.dtype.itemsize == 1 or weight.layout != torch.strided:
        kind = weight.dtype if weight.layout == torch.strided else weight.layout
        raise ValueError(
            f"{name}: the weight is {kind}; layers take dense bf16, fp16 or fp32: convert the weight, or {LEAVE_OUT}"
        )


def refuse_codes(name: str, codes: str) -> None:
    """Raise ValueError for a quantized weight. `codes`: name of its codes, such as "mxfp8 codes"."""
    raise ValueError(
        f"{name}: the weight is quantized-only already ({codes}): quantize a layer once, from high-precision values"
    )


def check_has_values(name: str, weight: Tensor) -> None:
    """Raise ValueError for a weight on the meta device, which has no values to quantize, and for a weight that
    `check_finite` rejects."""
    if weight.is_meta:
        raise ValueError(
            f"{name}: the weight is on the meta device and has no values to quantize; name a device, or materialize "
            f"and initialize the model first"
        )
    check_finite(name, weight)


def check_finite(name: str, weight: Tensor) -> None:
    """Raise ValueError on all ranks that share the weight for NaN or Inf, which some casts turn into finite codes.
    Waits for the device."""
    local = (weight._local_tensor if isinstance(weight, DTensor) else weight).detach()
    wrong = local.isfinite().all().logical_not().float()
    for group in weight.device_mesh.get_all_groups() if isinstance(weight, DTensor) else ():
        (wrong,) = agree([wrong], group)
    if wrong:
        raise ValueError(
            f"{name}: the weight has NaN or Inf, which codes would hide: restore a checkpoint from before training diverged"
        )


def check_without_history(name: str, recipe: Recipe) -> None:
    """Raise ValueError for a recipe with delayed scaling of weights."""
    if any(caps_of(quantizer).slot for quantizer in (recipe.w.rowwise, recipe.w.columnwise)):
        raise ValueError(
            f"{name}: {recipe} uses delayed scaling for weights, and a quantized-only weight has no amax history: "
            f"choose fp8_current or another recipe with current or block scales"
        )


def check_are_values(name: str, given: Tensor) -> None:
    """Raise ValueError if the tensor `given`, which is loaded into parameter `name`, has codes or integers instead of
    values."""
    if not given.is_floating_point() or given.dtype.itemsize == 1:
        raise ValueError(
            f"{name}: the tensor to load has dtype {given.dtype}, and codes cannot be loaded without scales: "
            f"dequantize to bf16 or fp32 before load_state_dict"
        )


def check_unshared(model: nn.Module, linear: Any, key: str = "weight") -> None:
    """Raise ValueError if other modules share parameter `key` of `linear`, since they could not read its values any more."""
    names = [
        name
        for name, module in model.named_modules()
        if any(parameter is linear._parameters[key] for parameter in module._parameters.values())
    ]
    if len(names) > 1:
        raise ValueError(
            f"{names[0]} and {names[1]} share a parameter, which would become quantized-only for both: untie the "
            f"parameter, or leave both modules in high precision"
        )
