"""tp-partial gradients: one coalesced sum over tp at the end of every backward.

Norms and biases of a sequence-parallel region, and replicated linears on token shards, have on each rank the gradient of
its own tokens; norms on features that tp cuts have that of their own features. Summing each where it is made would cost one
small all-reduce per parameter; here all of them travel as one buffer, after the last one (and after FSDP's reductions) has
been made.

Gradients may accumulate over several backwards. So that only new contributions are summed, every tp rank but the first
clears what is already there when a backward begins:

    rank 0   T + p0 ┐
    rank 1   0 + p1 ┴ sum ──► T + p0 + p1 on both          T: the total so far, p: this backward's contributions
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dlp.comm import collectives, wire

_ENGINE = torch.autograd.Variable._execution_engine


def local_grad(parameter: Tensor) -> Tensor | None:
    grad = parameter.grad
    return grad._local_tensor if isinstance(grad, DTensor) else grad


class Slot(NamedTuple):
    """Where a parameter with partial gradients lives: its full name, its module, its name there."""

    path: str
    module: nn.Module
    name: str


class PartialGradients:
    """Watches the outputs of a model and sums its partial gradients over the tp group when their backward is over."""

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self.group = group
        self.slots = [
            Slot(f"{path}.{name}".lstrip("."), module, name)
            for path, module in model.named_modules()
            for name in getattr(module, "tp_partial", ())
            if module._parameters[name] is not None
        ]
        self.num_sums = 0
        self._known: dict[int, tuple[str, Tensor]] = {}  # under FSDP both the sharded parameters and the gathered ones
        self._task: int | None = None
        model.register_forward_pre_hook(self._remember)
        model.register_forward_hook(self._watch)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialGradients:
        raise ValueError("a converted model cannot be deep-copied: copy it before dlp.convert")

    def check_summed(self, since: int) -> int:
        """Before an optimizer step: RuntimeError when there are gradients, and no backward has summed any since
        `since`, the result of the last check; 0 at first."""
        waiting = [path for path, parameter in self._parameters() if parameter.grad is not None]
        if waiting and self.num_sums == since and self.group.size() > 1:
            raise RuntimeError(
                f"the gradients of {len(waiting)} parameters ({waiting[0]}, ...) are parts of a sum over tp that was not made: "
                f"the loss must come from calling the converted model itself, as model(...)"
            )
        return self.num_sums

    def _remember(self, model: nn.Module, args: Any) -> None:
        self._parameters()

    def _parameters(self) -> list[tuple[str, Tensor]]:
        """All parameters with partial gradients seen so far. FSDP may leave the gathered ones in the modules, while
        gradients are with the sharded ones; before a forward it is the sharded ones that are there."""
        for path, module, name in self.slots:
            parameter = module._parameters[name]
            assert parameter is not None
            self._known[id(parameter)] = path, parameter
        return list(self._known.values())

    def _grads(self) -> list[Tensor]:
        """This rank's gradients, in an order that all tp ranks share."""
        return [g for _, parameter in self._parameters() if (g := local_grad(parameter)) is not None]

    def _watch(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and self.slots:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._begin)

    def _begin(self, grad: Tensor) -> None:
        """The backward reached an output of the model: once per backward, clear and queue the sum."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        if self.group.rank() != 0:
            for kept in self._grads():
                kept.zero_()
        _ENGINE.queue_callback(self._after_fsdp)

    def _after_fsdp(self) -> None:
        """FSDP has queued its own last callback by now; queue behind it, so that sharded gradients exist."""
        _ENGINE.queue_callback(self._sum)

    @torch.no_grad()
    def _sum(self) -> None:
        self._task = None
        self.num_sums += 1
        grads = self._grads()
        if not grads or self.group.size() == 1:
            return
        flat = torch.cat([g.reshape(-1).float() for g in grads])
        with wire.label(layer="", direction="grads"):
            (flat,) = collectives.all_reduce((flat,), self.group).wait()
        for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view(grad.shape))
