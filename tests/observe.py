"""Recorders of launched collectives and of allocated tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """Context that appends the name of each launched collective to `names`, such as "_allgather_base_" or
    "alltoall_base_". The context also records collectives inside dlp's ops, which other dispatch modes do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dlp":
            with self:
                return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.names.append(func._schema.name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))

    def count(self, kind: str) -> int:
        """Return the number of collectives whose name contains `kind`, such as "gather", "alltoall" or "reduce"."""
        return sum(kind in name for name in self.names)


class LargestTensor(TorchDispatchMode):
    """Context that records in `numel` the number of elements of the largest tensor of `dtype` that an operation
    returns."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and t.dtype == self.dtype]
        self.numel = max(self.numel, *sizes, 0)
        return result
