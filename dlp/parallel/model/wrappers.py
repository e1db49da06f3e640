"""What torch does to a model from outside that a converted one cannot bear: refused by name, before anything is changed.

DistributedDataParallel        broadcasts parameters, and reduces gradients, that must not be DTensors
FullyShardedDataParallel       (FSDP1) takes parameters out of their modules
load_state_dict(assign=True)   puts other parameters in the place of those that an optimizer holds, and that lie on tp
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dlp.parallel.model.runtime import Runtime


class NotForDdp:
    """Stands for the names of parameters that DistributedDataParallel shall leave out, which it asks a model for first."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __iter__(self) -> Iterator[str]:
        raise ValueError(
            f"{self.model}: DistributedDataParallel takes no model that dlp.convert made, whose parameters are DTensors on tp; "
            f"build the mesh with dp_replicate = the number of replicas and call dlp.fully_shard(model, mesh=mesh), which "
            f"averages their gradients"
        )


def parameter_is_gone(layer: str, parameter: str) -> NoReturn:
    """A layer has not found its parameter where modules keep them."""
    raise ValueError(
        f"{layer}: its {parameter} is no parameter of it any more, as after weight_norm, or under torch's FSDP1; parametrize "
        f"linears before dlp.convert and leave them out by a layer group with convert = false; instead of FSDP1 use "
        f"dlp.fully_shard"
    ) from None


def check_no_fsdp1(model: nn.Module) -> None:
    """ValueError for layers whose weights FSDP1 keeps in one flat tensor, of which a step boundary casts nothing."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and any(hasattr(each, "core") for each in module.modules()):
            raise ValueError(
                f"dlp.attach: {name or type(module.module).__name__} is sharded by FullyShardedDataParallel (FSDP1), whose "
                f"weights a step boundary cannot cast; use dlp.fully_shard, or leave dlp.attach away (use_orig_params=True)"
            )


def guard(model: nn.Module, runtime: Runtime) -> None:
    """Refuse for this model, whose layers have this runtime, what torch would do to it otherwise."""
    model.register_load_state_dict_pre_hook(_Assigned(model, runtime))
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model._ddp_params_and_buffers_to_ignore = NotForDdp(type(model).__name__)  # type: ignore[assignment]


class _Assigned:
    """The hook of a model that is about to be loaded."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self.model, self.runtime = model, runtime

    def __call__(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *rest: Any
    ) -> None:
        if not metadata.get("assign_to_params_buffers"):
            return
        for name, parameter in self.model.named_parameters():
            given = state.get(f"{prefix}{name}")
            if given is None:
                continue
            if self.runtime.attached:
                raise ValueError(
                    f"{name}: load_state_dict(assign=True) would replace the parameters that the optimizer given to dlp.attach "
                    f"holds, which then trains nothing; leave assign away, or load before the optimizer is made"
                )
            if isinstance(parameter, DTensor) and not isinstance(given, DTensor):
                raise ValueError(
                    f"{name}: load_state_dict(assign=True) would put a plain tensor in place of the DTensor that dlp.convert "
                    f"made; leave assign away, or load the plain model before dlp.convert"
                )
