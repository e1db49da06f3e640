"""What a layer is called with: plain tensors, as many as it reads, in the dtype that torch.autocast asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlp.parallel.linear.spec import LinearSpec, num_inputs
from dlp.quant.tensor import QuantizedTensor

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)


def check_inputs(spec: LinearSpec, inputs: Sequence[Any]) -> None:
    """ValueError for another number of tensors than the layer reads, TypeError for what is no plain tensor."""
    prologue = spec.prologue
    reads = ("x",) if prologue is None else prologue.reads
    if len(inputs) != num_inputs(spec):
        said = "x" if prologue is None else f"{', '.join(reads)} (prologue {prologue.name})"
        raise ValueError(f"{spec.name}: it is called with {said}; got {len(inputs)} tensors")
    for name, given in zip(reads, inputs, strict=True):
        if isinstance(given, QuantizedTensor):
            raise TypeError(
                f"{spec.name}: {name} is a QuantizedTensor ({given.format.name}), but a layer quantizes {name} itself, as "
                f"its recipe says; pass the tensor it was made of, or its dequantize(dtype)"
            )
        if isinstance(given, DTensor):
            raise TypeError(
                f"{spec.name}: {name} is a DTensor, but layers read this rank's plain tensor; pass to_local() of it"
            )
        if not isinstance(given, Tensor):
            raise TypeError(f"{spec.name}: {name} must be a tensor; got {type(given).__name__}")


def check_features(spec: LinearSpec, x: Tensor, weight: Tensor) -> None:
    """ValueError for x [..., K] of another K than this rank's weight [N, K] has."""
    found, wanted = x.shape[-1] if x.dim() else 0, weight.shape[1]
    if found != wanted:
        part = f", a rank's part of {wanted * spec.tp}" if spec.style.cut_x == 1 and spec.tp > 1 else ""
        raise ValueError(
            f"{spec.name}: x of shape {tuple(x.shape)} ends in {found} features, and its weight takes {wanted}{part}; "
            f"{spec.style.name} reads {'what a column leaves' if part else 'whole features'}: check the style of what makes x"
        )


def autocasts(inputs: Sequence[Tensor]) -> bool:
    """Whether torch.autocast is on for the device of these tensors."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(inputs[0].device.type)


def in_autocast_dtype(inputs: Sequence[Tensor]) -> list[Tensor]:
    """What nn.Linear does under torch.autocast: activations in its dtype, in which y comes, too."""
    dtype = torch.get_autocast_dtype(inputs[0].device.type)
    return [given.to(dtype) if given.dtype in ACTIVATIONS else given for given in inputs]


def no_autocast(tensors: Sequence[Tensor | None]) -> torch.autocast:
    """Inside, torch.autocast does not touch the sums and products that a layer is made of."""
    return torch.autocast(next(tensor.device.type for tensor in tensors if tensor is not None), enabled=False)
