"""Find the layer in which the first NaN or Inf of a step arose.

Forward and backward run again with the current weights, and hooks find the first layer with a non-finite output, and the first
layer with a non-finite gradient of its output. If a cast flag of the step (`dlp.parallel.model.checks`) shows that a cast in
forward has read a NaN or Inf, the message names this cast instead, since the flags are from the step itself.

All ranks call `origin` together and get the same sentence. Each rank also gets statistics of the tensors of the first such
layers on that rank.
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
from launch.ranks import rank_objects


class Layer(NamedTuple):
    """First layer with a non-finite tensor in a pass on one rank. `place`: position of the layer in the order of execution."""

    place: int
    rank: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank}"


def statistics(what: str, tensor: Tensor) -> dict[str, Any]:
    """Return statistics of a tensor: number of NaN and of Inf, index of the first such element, and min, max, mean, std and
    amax of the finite elements. `what`: description of the tensor."""
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
    """Observations of one pass on this rank.

    made      description of the observed tensors, "output" or "gradient of the output"
    seen      number of observed layers
    first     first layer with a non-finite tensor; None: no such layer yet
    tensors   statistics of the tensors of this layer
    """

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
    """Run forward and backward by `repeat`, and return the observations of forward and of backward on this rank, for all leaf
    modules."""
    forward, backward = _Pass("output"), _Pass("gradient of the output")

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():  # recomputation
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
    """Return the smallest value of `mine` over all ranks; None if it is None on all ranks."""
    return min((each for each in rank_objects.from_all(mine) if each is not None), default=None)


def origin(
    names: Sequence[CastName | None], flags: Sequence[float], model: nn.Module, repeat: Callable[[], object], steps: int
) -> tuple[str, dict[str, Any]]:
    """Return a sentence about the origin, and statistics of the first non-finite layer of this rank in each pass.

    names   names of the casts that have flags
    flags   flags of this rank in the step, in the order of `names`
    repeat  function that runs forward and backward of the microbatches again
    steps   number of completed steps, for the sentence; `repeat` runs with the weights after these steps
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
