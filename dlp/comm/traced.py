"""Collectives of one tensor over R ranks that also work under torch.compile.

    all_gather       x [m, ...]   -> [R*m, ...]
    reduce_scatter   x [R*m, ...] -> [m, ...]
    all_reduce       x [...]      -> [...]

In eager code the functions of this file call `dlp.comm.collectives`, which Dynamo cannot trace. In compiled code they call the
opaque op `dlp::collective`, which has a fake implementation and runs the same collectives.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from dlp.comm import collectives, observer


def all_gather(x: Tensor, group: ProcessGroup, layer: str = "", purpose: str = "") -> Tensor:
    """Gather x along its first dimension."""
    return _run("all_gather", x, group, layer, purpose)


def reduce_scatter(x: Tensor, group: ProcessGroup, layer: str = "", purpose: str = "") -> Tensor:
    """Sum x over ranks, and return this rank's rows of the sum. Raises ValueError if the number of rows is not divisible by
    the number of ranks."""
    return _run("reduce_scatter", x, group, layer, purpose)


def all_reduce(x: Tensor, group: ProcessGroup, layer: str = "", purpose: str = "") -> Tensor:
    """Sum x over ranks; the sum is equal on all ranks."""
    return _run("all_reduce", x, group, layer, purpose)


def _run(kind: str, x: Tensor, group: ProcessGroup, layer: str, purpose: str) -> Tensor:
    """Run the collective `kind`. layer, purpose: label of the transfer (`dlp.comm.observer.label`); "" keeps the current
    value."""
    if group.size() == 1:
        return x
    if torch.compiler.is_dynamo_compiling():
        result: Tensor = torch.ops.dlp.collective(x, kind, group.size(), group.group_name, layer, purpose)
        return result
    return _start(kind, x, group, layer, purpose)


def _start(kind: str, x: Tensor, group: ProcessGroup, layer: str, purpose: str) -> Tensor:
    fields = {name: value for name, value in (("layer", layer), ("purpose", purpose)) if value}
    with observer.label(**fields):
        if kind == "all_gather":
            return collectives.all_gather((x.contiguous(),), (0,), group).wait()[0]
        return getattr(collectives, kind)(x.contiguous(), group).wait()


def _collective(x: Tensor, kind: str, ranks: int, group_name: str, layer: str, purpose: str) -> Tensor:
    return _start(kind, x, _resolve_process_group(group_name), layer, purpose)  # type: ignore[arg-type]


def _fake(x: Tensor, kind: str, ranks: int, group_name: str, layer: str, purpose: str) -> Tensor:
    rows = {"all_gather": x.shape[0] * ranks, "reduce_scatter": x.shape[0] // ranks} if kind != "all_reduce" else {}
    return x.new_empty((rows[kind], *x.shape[1:]) if rows else x.shape)


_LIBRARY = torch.library.Library("dlp", "FRAGMENT")
_LIBRARY.define(
    "collective(Tensor x, str kind, int ranks, str group_name, str layer, str purpose) -> Tensor",
)
_LIBRARY.impl("collective", _collective, "CompositeExplicitAutograd")
torch.library.register_fake("dlp::collective", _fake, lib=_LIBRARY)
