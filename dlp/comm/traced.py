"""Collectives of one tensor for code that torch.compile enters: each is one op to the compiler, with a fake implementation.

    all_gather       x [m, ...]   -> [R*m, ...]
    reduce_scatter   x [R*m, ...] -> [m, ...]
    all_reduce       x [...]      -> [...]

dynamo cannot trace what `dlp.comm.collectives` calls. Eager code calls the collectives, compiled code `dlp::collective`, which
calls the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from dlp.comm import collectives, observer


def all_gather(x: Tensor, group: ProcessGroup, layer: str = "", direction: str = "") -> Tensor:
    """Gather x along its first dimension."""
    return _run("all_gather", x, group, layer, direction)


def reduce_scatter(x: Tensor, group: ProcessGroup, layer: str = "", direction: str = "") -> Tensor:
    """The sum over ranks of this rank's rows. Raises ValueError for rows that the ranks do not divide."""
    return _run("reduce_scatter", x, group, layer, direction)


def all_reduce(x: Tensor, group: ProcessGroup, layer: str = "", direction: str = "") -> Tensor:
    """The sum over ranks, equal on all of them."""
    return _run("all_reduce", x, group, layer, direction)


def _run(kind: str, x: Tensor, group: ProcessGroup, layer: str, direction: str) -> Tensor:
    """layer, direction: the label of the transfer (`dlp.comm.observer.label`); "": the label that is set."""
    if group.size() == 1:
        return x
    if torch.compiler.is_dynamo_compiling():
        result: Tensor = torch.ops.dlp.collective(x, kind, group.size(), group.group_name, layer, direction)
        return result
    return _start(kind, x, group, layer, direction)


def _start(kind: str, x: Tensor, group: ProcessGroup, layer: str, direction: str) -> Tensor:
    fields = {name: value for name, value in (("layer", layer), ("direction", direction)) if value}
    with observer.label(**fields):
        if kind == "all_gather":
            return collectives.all_gather((x.contiguous(),), (0,), group).wait()[0]
        return getattr(collectives, kind)(x.contiguous(), group).wait()


def _collective(x: Tensor, kind: str, ranks: int, group_name: str, layer: str, direction: str) -> Tensor:
    return _start(kind, x, _resolve_process_group(group_name), layer, direction)  # type: ignore[arg-type]


def _fake(x: Tensor, kind: str, ranks: int, group_name: str, layer: str, direction: str) -> Tensor:
    rows = {"all_gather": x.shape[0] * ranks, "reduce_scatter": x.shape[0] // ranks} if kind != "all_reduce" else {}
    return x.new_empty((rows[kind], *x.shape[1:]) if rows else x.shape)


_LIBRARY = torch.library.Library("dlp", "FRAGMENT")
_LIBRARY.define(
    "collective(Tensor x, str kind, int ranks, str group_name, str layer, str direction) -> Tensor",
)
_LIBRARY.impl("collective", _collective, "CompositeExplicitAutograd")
torch.library.register_fake("dlp::collective", _fake, lib=_LIBRARY)
