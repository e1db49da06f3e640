"""Check that a checkpoint holds no NaN or Inf. The loss does not reveal every NaN: a NaN in an embedding row that no token
reads has no effect on the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CHECKED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def not_finite(tensors: Mapping[str, Any]) -> str | None:
    """Return a sentence about the first tensor with a NaN or Inf on this rank; None if all tensors are finite.

    `tensors` is a tree of dicts. If all tensors are finite, each is read once, and the host waits for the device once. Integer
    tensors, such as the codes of 8-bit optimizer states, are not checked.
    """
    names, extremes = [], []
    for name, tensor in _leaves(tensors):
        names.append((name, tensor))
        # torch.aminmax returns NaN for both if the tensor has a NaN
        extremes.append(torch.stack(torch.aminmax(tensor)).float().isfinite().all())
    if not extremes:
        return None
    finite = torch.stack(extremes).tolist()
    bad = next(((name, tensor) for (name, tensor), good in zip(names, finite, strict=True) if not good), None)
    return None if bad is None else f"{int((~bad[1].isfinite()).sum())} elements of {bad[0]} are NaN or Inf"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield name and local tensor of each floating-point tensor in a tree of dicts; names are joined by dots."""
    for name, value in tree.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        if isinstance(local, Mapping):
            yield from _leaves(local, f"{prefix}{name}.")
        elif isinstance(local, Tensor) and local.dtype in CHECKED and local.numel():
            yield f"{prefix}{name}", local.detach()
