"""Modules that tp does not cut: norms, replicated embeddings, a user's own parameters.

Their parameters are DTensors, replicated on tp, but their code computes on plain tensors. Conversion gives such a module
a subclass of its own class whose forward sees this rank's tensors in place of the DTensors. In a sequence-parallel
region each rank sees its own tokens only, behind a column-parallel linear its own features: there the gradients are
partial (`tp_partial`) and are summed over tp at the end of backward (`dlp.parallel.model.grads`).

What layer groups leave out is replicated, too. There a module may read parameters of modules in it, so its forward sees
the tensors of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlp.parallel.weight.local import local, num_axes

if TYPE_CHECKING:
    from dlp.parallel.model.grads import PartialGradients


class ReplicatedMixin(nn.Module):
    """forward with `_parameters` swapped for local tensors; `tp_partial` names those with partial gradients."""

    tp_partial: tuple[str, ...] = ()
    on_shards = False
    tp_sums: PartialGradients | None = None
    token_rows: int | None = None
    layer_name: str = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_tokens(next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None))
        held, before = dict(self._parameters), None if self.tp_sums is None else self.tp_sums.check_announced
        for name, parameter in held.items():
            if isinstance(parameter, DTensor):  # no longer one where a module around this one is left out
                self._parameters[name] = local(parameter, self.layer_name, before=before)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name, parameter in held.items():
                self._parameters[name] = parameter

    def _check_tokens(self, x: Tensor | None) -> None:
        """A module outside the sequence-parallel groups must not see token shards, nor one inside whole tokens. x: the
        first tensor it is called with, features [M/tp, H] or, for embeddings, token ids [M/tp]."""
        if self.token_rows is None or x is None:
            return
        features = x.is_floating_point()
        shard = x.dim() == 1 + features and len(x) == self.token_rows
        if shard and features and not self.on_shards:
            raise ValueError(
                f"{self.layer_name}: it gets token shards {tuple(x.shape)}, so its gradients must be summed over tp; "
                f"add it to a layer group with sequence_parallel = true"
            )
        if not shard and self.on_shards:
            raise ValueError(
                f"{self.layer_name}: sequence parallelism expects token shards [{self.token_rows}{', H' * features}]; got x "
                f"of shape {tuple(x.shape)}. Split the tokens with dlp.scatter_tokens before it, or take it out of the group"
            )


class LeftOutMixin(ReplicatedMixin):
    """The same for a module with all that is in it. `inside`: the modules with parameters there, itself included."""

    inside: tuple[nn.Module, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = [(module, module._parameters) for module in self.inside]
        for module, parameters in held:
            _hold(module, {name: self._seen(module, p) for name, p in parameters.items()})
        try:
            return super().forward(*args, **kwargs)
        finally:
            for module, parameters in held:
                _hold(module, parameters)

    def _seen(self, module: nn.Module, parameter: Tensor | None) -> Tensor | None:
        """What a module has here now; shards of a unit of FSDP within stay until that gathers them."""
        if not isinstance(parameter, DTensor) or (module is not self and num_axes(parameter) > 1):
            return parameter
        sums: PartialGradients | None = getattr(module, "tp_sums", None)
        return local(parameter, self.layer_name, before=None if sums is None else sums.check_announced)


def _hold(module: nn.Module, parameters: Mapping[str, Any]) -> None:
    vars(module)["_parameters"] = parameters


_CLASSES: dict[tuple[type, type], type] = {}  # one subclass per class, so that equal modules stay of equal type


def _class_of(cls: type, whole: bool) -> type:
    mixin, prefix = (LeftOutMixin, "LeftOut") if whole else (ReplicatedMixin, "Replicated")
    made = type(f"{prefix}{cls.__name__}", (mixin, cls), {"__module__": cls.__module__})
    return _CLASSES.setdefault((mixin, cls), made)


def replicate(
    module: nn.Module, name: str, *, on_shards: bool = False, reads_cut: bool = False, token_rows: int | None = None,
    inside: tuple[nn.Module, ...] = (),
) -> None:  # fmt: skip
    """Let the module's forward see plain tensors in place of its parameters, in place.

    `on_shards`: it runs on token shards. `reads_cut`: it reads features that tp cuts. `token_rows`: tokens of a shard,
    checked at each call; None where tp is 1. `inside`: of a module that is left out, all modules with parameters in it.
    """
    module.__class__ = _class_of(type(module), bool(inside))
    module.inside = inside  # type: ignore[assignment]
    module.tp_partial = tuple(module._parameters) if on_shards or reads_cut else ()  # type: ignore[assignment]
    module.on_shards, module.layer_name = on_shards, name  # type: ignore[assignment]
    module.token_rows = None if reads_cut else token_rows  # type: ignore[assignment]
