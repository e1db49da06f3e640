"""The ledger: compare the planned bytes of a step with the counted bytes, and raise on every rank if they differ.

    predict.step_traffic(plan, load)   planned bytes, computed from the plan               by group, layer, purpose
    observer.Observer                  counted bytes, of the collectives that torch runs   by group, layer, purpose

    ledger = Ledger(mesh)
    with ledger.step(planned):          forward, backward, optimizer step with its boundary
        ...

The check runs one small all-reduce, by which each rank learns whether any rank has a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dlp.comm import observer
from dlp.comm.mesh import CP, DP_REPLICATE, DP_SHARD, DP_SHARD_CP, ParallelDims
from dlp.parallel.linear.state import cores
from dlp.parallel.model.plan import Plan
from dlp.parallel.model.session import session_of
from dlp.parallel.traffic.predict import Traffic, Workload, step_traffic

# (mesh axis, collective) -> purpose of an FSDP collective, since FSDP's collectives have no label
FSDP = {
    **{(axis, "all_gather"): "weights" for axis in (DP_SHARD, CP, DP_SHARD_CP)},
    **{(axis, "reduce_scatter"): "grads" for axis in (DP_SHARD, CP, DP_SHARD_CP)},
    (DP_REPLICATE, "all_reduce"): "grads",
}
FIELDS = ("group", "layer", "purpose")

Account = dict[tuple[str, str, str], int]


class LedgerError(RuntimeError):
    """Raised if the number of bytes that a step sent differs from the planned number. The message contains
    both numbers, and is equal on all ranks."""


class Ledger:
    """Count the bytes of steps on a mesh of `build_mesh`. `last`: the observer of the last step."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._device = mesh.device_type
        self._names = ParallelDims.from_mesh(mesh).group_names()
        self.last: observer.Observer | None = None

    @contextmanager
    def step(self, planned: Traffic | None) -> Iterator[observer.Observer]:
        """Return a context that counts transfers, and compares them with `planned` at its end. All ranks must enter the
        context. If `planned` is None, this rank compares nothing.

        Raises LedgerError on all ranks if the bytes of any rank differ."""
        with self.counter() as seen:
            yield seen
        for key in [key for key in seen.sent if key.layer == observer.CHECKS]:  # not predicted, so not compared
            del seen.sent[key]
        self.last = seen
        counted = _account(seen.sent)
        self._compare(counted if planned is None else _account(planned), counted)

    def counter(self) -> observer.Observer:
        """Return an observer for the groups of this mesh, whose counts are not compared with a plan."""
        return observer.Observer(self._names, FSDP)

    def _compare(self, planned: Account, counted: Account) -> None:
        wrong = {key: (planned.get(key, 0), counted.get(key, 0)) for key in planned.keys() | counted.keys()}
        wrong = {key: both for key, both in wrong.items() if both[0] != both[1]}
        found = torch.tensor(len(wrong), device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if found.item():
            by_rank: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(by_rank, wrong)
            rank = next(rank for rank, its in enumerate(by_rank) if its)
            raise LedgerError(f"counted bytes differ from planned bytes: on rank {rank}, {_difference(by_rank[rank])}")


def _account(counts: Mapping[Any, int]) -> Account:
    """Sum the bytes by group, layer and purpose."""
    return {key: nbytes for key, nbytes in observer.totals(counts, *FIELDS).items() if nbytes}


def _difference(wrong: Mapping[tuple[str, str, str], tuple[int, int]]) -> str:
    """Format the difference: planned and counted bytes for each group and purpose, and the first layer that differs."""
    sums: dict[tuple[str, str], list[int]] = {}
    example: dict[tuple[str, str], str] = {}
    for (group, layer, purpose), (planned, counted) in sorted(wrong.items()):
        line = sums.setdefault((group, purpose), [0, 0])
        line[0], line[1] = line[0] + planned, line[1] + counted
        example.setdefault((group, purpose), layer or "no single layer")
    return "; ".join(
        f"{group} {purpose}: planned {planned:,} bytes, counted {counted:,} (first in {example[group, purpose]})"
        for (group, purpose), (planned, counted) in sums.items()
    )


def plan_of(model: nn.Module) -> Plan:
    """Return the plan of `convert` with the current recipes of the layers. Raises ValueError for a model that was not
    converted."""
    plan = session_of(model).plan
    if plan is None:
        raise ValueError(
            "this model has no plan: the layers were constructed explicitly; call dlp.convert on a plain model"
        )
    recipes = {name: core.spec.recipe for core in cores(model) for name in core.spec.members}
    return replace(plan, layers=tuple(replace(row, recipe=recipes[row.name]) for row in plan.layers))


def activation_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of the last x of each layer that has run, by name of the layer; siblings have one entry, under the first
    name."""
    dtypes = {core.spec.members[0]: core.weights.dtype for core in cores(model)}
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


def wire_report(model: nn.Module | Plan, load: Workload) -> dict[str, dict[str, int]]:
    """Return the planned bytes that a rank sends in a step.

    Args:
        model: a `Plan`, or a converted model with its current recipes.
        load: sizes of the step.

    Returns:
        Bytes by layer and purpose, such as {"layers.0.mlp.up_proj": {"fprop": ...}}. The layer "" has the bytes that belong to
        no single layer: weights, gradients, delayed scales.

    Examples:
        >>> plan = dlp.make_plan(nn.Sequential(nn.Linear(64, 64)), [dlp.LayerGroup("all", "**", style="row")], tp=2)
        >>> report = dlp.wire_report(plan, dlp.Workload({"dp_replicate": 1, "dp_shard": 1, "tp": 2}, tokens=32))
        >>> report["0"]["fprop"] > 0
        True
    """
    report: dict[str, Counter[str]] = {}
    for sent, nbytes in step_traffic(model if isinstance(model, Plan) else plan_of(model), load).items():
        report.setdefault(sent.layer, Counter())[sent.purpose] += nbytes
    return {layer: dict(purposes) for layer, purposes in report.items()}
