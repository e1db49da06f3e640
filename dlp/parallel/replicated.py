"""Modules that tp does not cut: norms, replicated embeddings, a user's own parameters.

Their parameters are DTensors, replicated on tp, but their code computes on plain tensors. Conversion gives such a module
a subclass of its own class whose forward sees this rank's tensors in place of the DTensors. In a sequence-parallel
region each rank sees its own tokens only, behind a column-parallel linear its own features: there the gradients are
partial (`tp_partial`) and are summed over tp at the end of backward (`dlp.parallel.grads`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dlp.parallel.weight import local, place

if TYPE_CHECKING:
    from dlp.parallel.grads import PartialGradients


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
            if parameter is not None:
                self._parameters[name] = local(parameter, self.layer_name, before=before)  # type: ignore[assignment]
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


_CLASSES: dict[type, type] = {}  # one replicated subclass per class, so that equal modules stay of equal type


def _replicated_class(cls: type) -> type:
    return _CLASSES.setdefault(
        cls, type(f"Replicated{cls.__name__}", (ReplicatedMixin, cls), {"__module__": cls.__module__})
    )


def replicate(
    module: nn.Module,
    name: str,
    tp: DeviceMesh,
    shared: dict[int, nn.Parameter],
    *,
    on_shards: bool,
    reads_cut: bool,
    token_rows: int | None,
) -> None:
    """Make the module's own parameters replicated DTensors, in place. `shared` keeps tied parameters tied.

    `on_shards`: it runs on token shards. `reads_cut`: it reads features that tp cuts. `token_rows`: tokens of a shard,
    checked at each call; None where tp is 1.
    """
    for parameter_name, parameter in list(module._parameters.items()):
        if parameter is not None:
            if id(parameter) not in shared:
                shared[id(parameter)] = place(parameter, tp, None)
            module._parameters[parameter_name] = shared[id(parameter)]
    module.__class__ = _replicated_class(type(module))
    module.tp_partial = tuple(module._parameters) if on_shards or reads_cut else ()  # type: ignore[assignment]
    module.on_shards, module.layer_name = on_shards, name  # type: ignore[assignment]
    module.token_rows = None if reads_cut else token_rows  # type: ignore[assignment]
