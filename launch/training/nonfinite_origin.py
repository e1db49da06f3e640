"""Origin of a NaN or Inf.

    by flags         of the step: casts that read a NaN or Inf (see `dlp.parallel.model.checks`)
    by repetition    if flags show nothing in forward: forward and backward are repeated with the current weights; the first
                     layer with a non-finite output, or in backward with a non-finite gradient of its output

All ranks call `origin` together and get the same sentence. A repetition also gives each rank statistics of the tensors of
its own first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dlp.parallel.linear.step import CastName, in_backward
from dlp.parallel.model.checks import first_bad


class Layer(NamedTuple):
    """First layer of a pass with a non-finite tensor: position in order of execution, and rank."""

    place: int
    rank: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank}"


def statistics(what: str, tensor: Tensor) -> dict[str, Any]:
    """Return statistics of a tensor: numbers of NaN and Inf, the position of the first, and the range of finite values."""
    values = tensor.detach().float()
    finite = values[torch.isfinite(values)]
    found: dict[str, Any] = {
        "tensor": what,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    found |= {"elements": values.numel(), "nan": int(values.isnan().sum()), "inf": int(values.isinf().sum())}
    if finite.numel() < values.numel():
        found["first"] = torch.isfinite(values).logical_not().nonzero()[0].tolist()
    if finite.numel():
        spread = finite.std(correction=0)
        found |= {
            "min": finite.min().item(),
            "max": finite.max().item(),
            "mean": finite.mean().item(),
            "std": spread.item(),
        }
        found["amax"] = finite.abs().max().item()
    return found


class _Pass:
    """Observations of one pass. `tensors`: statistics of the first layer with a non-finite tensor."""

    def __init__(self, made: str) -> None:
        self.made, self.seen = made, 0
        self.first: Layer | None = None
        self.tensors: list[dict[str, Any]] = []

    def see(self, name: str, tensors: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> None:
        self.seen += 1
        if self.first is None and not all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors):
            self.first = Layer(self.seen, dist.get_rank(), name)
            self.tensors = [statistics(self.made, each) for each in tensors]
            self.tensors += [statistics("input", each) for each in inputs]


def first_layers(model: nn.Module, repeat: Callable[[], object]) -> tuple[_Pass, _Pass]:
    """Repeat both passes, and return the first leaf modules of this rank with a non-finite output (forward) and gradient of
    the output (backward)."""
    forward, backward = _Pass("output"), _Pass("gradient of the output")

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():  # recomputed
                return
            tensors, inputs = _floats(output), _floats(args)
            forward.see(name, tensors, inputs)
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: backward.see(name, [grad]))

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code would not call the hooks
            repeat()
    finally:
        for handle in handles:
            handle.remove()
    return forward, backward


def _floats(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.is_floating_point()]


def _least(mine: Any) -> Any:
    """Return the smallest finding of all ranks; None if no rank found anything."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return min((each for each in found if each is not None), default=None)


def origin(
    names: Sequence[CastName | None], flags: Sequence[float], model: nn.Module, repeat: Callable[[], object], steps: int
) -> tuple[str, dict[str, Any]]:
    """Return a sentence about the origin, and statistics of the tensors of this rank's first layer in each pass.

    names   names of the tensors with flags
    flags   flags of this rank in the step
    repeat  runs forward and backward of the microbatches again
    steps   number of steps after which the current weights are
    """
    cast = _least(first_bad(names, flags, dist.get_rank()))
    passes = first_layers(model, repeat)
    numbers = {
        which: {"layer": each.first.name, "tensors": each.tensors}
        for which, each in zip(("forward", "backward"), passes, strict=True) if each.first is not None
    }  # fmt: skip
    if cast is not None and not cast.backward:
        return str(cast), numbers
    forward, backward = (_least(each.first) for each in passes)
    if forward is not None:
        found = f"the first layer whose output is not finite is {forward}"
    elif backward is not None:
        found = f"every layer's output is finite, and the first layer whose output gradient is not finite is {backward}"
    else:
        found = "the outputs and output gradients of all layers are finite: the NaN or Inf did not recur"
    seen = str(cast) if cast is not None else "all x, w and dy that were cast were finite" if any(names) else ""
    return f"{seen}{'; ' if seen else ''}repeated with the weights after step {steps}, {found}", numbers
