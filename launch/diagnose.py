"""Where a NaN came from: the first layer, in order of execution, whose output is not finite, on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@torch.no_grad()
def first_bad_layer(model: nn.Module, batches: Sequence[Tensor]) -> tuple[int, str] | None:
    """Run the model on `batches` again, uncompiled: (order, name) of the first leaf module whose output holds a NaN or
    Inf."""
    order: list[str] = []
    found: list[tuple[int, str]] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            order.append(name)
            tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
            if not found and not all(bool(torch.isfinite(t).all()) for t in tensors):
                found.append((len(order), name))

        return hook

    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code would not call the hooks
            for tokens in batches:
                model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def first_not_finite(model: nn.Module, batches: Sequence[Tensor], step: int, loss: float, norm: float) -> str:
    """One sentence for all ranks: step, rank and first layer. The optimizer skipped the step, so the weights that made
    it are still there and the forward can be repeated. Every rank calls it together."""
    reports: list[tuple[int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, first_bad_layer(model, batches))
    bad = [(report[0], rank, report[1]) for rank, report in enumerate(reports) if report is not None]
    what = f"step {step}: loss {loss}, gradient norm {norm}"
    if not bad:
        return f"{what}: not finite, but every layer's output is; it arose in the loss or in backward"
    _, rank, name = min(bad)
    return f"{what}: on rank {rank} the first layer whose output is not finite is {name}"
