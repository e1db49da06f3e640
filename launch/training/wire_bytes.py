"""Bytes that a rank sends in a training step: planned bytes of layers, loss, gradient norm and metrics, and the check of the
plan against counted bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from dlp import Plan
from dlp.comm import observer
from dlp.comm.mesh import CP_TP, GROUPS, TP, WORLD
from dlp.optim.muon import MUON, is_matrix_of_block
from dlp.optim.muon import OWN as MUONS
from dlp.parallel.model.plan import table
from dlp.parallel.model.session import session_of
from dlp.parallel.traffic.ledger import Ledger, activation_dtypes, plan_of
from dlp.parallel.traffic.predict import (
    Sent,
    Traffic,
    Unpredictable,
    Workload,
    cross_entropy,
    fsdp_gradients,
    in_bf16,
    linear_weights,
    step_traffic,
)
from launch.common.units import said_bytes, said_seconds
from launch.config.rules import validate_world
from launch.config.run_config import Config, parallel_dims, shards
from launch.models.modules import DTYPES
from launch.ranks.links import OWN, link_of, slow_tp
from launch.training.build import Built
from launch.training.gradient_accumulation import Accumulation, gradient_wire
from launch.training.recomputation import recomputed

WARM = 2  # number of steps that the ledger does not count: the first steps also compile, and cast weights in forward
# Sizes, in fp32 numbers, of the all-reduces over all ranks in a step: valid targets; squared norm; loss, stop request and
# flags.
SHARED_NUMBERS = (1, 1, 3)


def workload(config: Config, world: int, reductions: int) -> Workload:
    """Return the sizes that determine the bytes of a step on `world` ranks. `reductions`: number of times per step that FSDP
    reduces gradients. Raises ConfigError if the config does not fit `world`."""
    batch, mesh = validate_world(config, world), config.mesh
    blocks = tuple(config.architecture.blocks)
    dtype, sharded = DTYPES[config.train.dtype], shards(config, batch.token_ranks)
    invariant = config.train.invariant  # then FSDP gathers the stored values, fp32, and passes cast these
    again = tuple(blocks[i] for i in recomputed(config.train, len(blocks)))
    wire = gradient_wire(config, batch.num_micro, reductions)
    keys = 2 * config.family.kv_heads // mesh.tp * config.family.head_dim if mesh.cp > 1 else 0
    return Workload(
        parallel_dims(config, world).sizes, batch.micro * config.own_sequence,
        batch.num_micro, dtype, weight_dtype=dtype if sharded and not invariant else torch.float32,
        units=(*blocks, "") if sharded else (), gather=mesh.quantized_gather and not invariant,
        weight_cache=config.train.weight_cache, reductions=reductions, grad_wire=None if wire == "fp32" else wire,
        recomputed=again if config.train.checkpointing == "full" else (), resharded=mesh.reshard_after_forward,
        amax_group={"auto": None, TP: TP, "tp+cp": TP if mesh.cp == 1 else CP_TP}.get(mesh.amax_group, WORLD),
        keys_gathered=keys * (len(blocks) + len(again)), keys_reduced=keys * len(blocks),
    )  # fmt: skip


def planned(
    plan: Plan, load: Workload, optimizer: str = "adamw", shared_numbers: Sequence[int] = SHARED_NUMBERS
) -> dict[Sent, int]:
    """Return the planned bytes that a rank sends in a step, by group, layer, purpose and precision.

    optimizer: `[train] optimizer`; Muon sends bytes, too. shared_numbers: sizes of the all-reduces of the training loop over
    all ranks, in fp32 numbers. Raises Unpredictable if a user-defined format or strategy does not state sizes.
    """
    total = Counter(step_traffic(plan, load))
    if any(row.name.rpartition(".")[2] == "lm_head" and row.style == "column" for row in plan.layers):
        total.update(cross_entropy(load))
    shared = sum(observer.reduced(numel, 4, load.ranks(WORLD)) for numel in shared_numbers)
    total[Sent(load.named(WORLD), OWN["layer"], OWN["purpose"], "float32")] += shared
    if optimizer == MUON:
        total.update(_gathers_of_muon(plan, load))
    return {sent: nbytes for sent, nbytes in total.items() if nbytes}


def _gathers_of_muon(plan: Plan, load: Workload) -> Counter[Sent]:
    """Return the bytes that Muon sends: it gathers every matrix of a block in bf16, over the FSDP axis, then over tp if
    the matrix is sharded over tp."""
    total, cut_by_tp = (
        Counter[Sent](),
        {name for name, (row, _) in linear_weights(plan).items() if row.row.shard_dim is not None},
    )
    for parameter in plan.weights:
        if not is_matrix_of_block(parameter.name, parameter.shape):
            continue
        gathered = {load.dims.shard_axis: prod(load.shard(parameter.shape, padded=True)) if load.units else 0}
        gathered |= {TP: prod(parameter.shape)} if parameter.name in cut_by_tp else {}
        for group, elements in gathered.items():
            sent = Sent(load.named(group), MUONS["layer"], MUONS["purpose"], "bfloat16")
            total[sent] += observer.gathered(2 * elements, load.ranks(group))
    return total


def by_group(sent: Mapping[Any, int]) -> dict[str, int]:
    """Return the sums of bytes by process group, without groups that send nothing."""
    sums = observer.totals(sent, "group")
    return {group: sums[group] for group in GROUPS if sums.get(group)}


COLUMNS = ("group", "purpose", "bytes", "of bf16", "seconds", "over", "as")


def describe(plan: Plan, load: Workload, optimizer: str = "adamw") -> list[str]:
    """Return the lines of the plan about the wire: bytes that a rank sends in a step, by group and purpose; the ratio to the
    bytes of the same plan in bf16; and seconds at the nominal speed of the link."""
    try:
        ours, bf16 = planned(plan, load, optimizer), planned(in_bf16(plan), load, optimizer)
    except Unpredictable as why:
        return [f"wire: {why}"]
    if not ours:
        return ["wire: one rank, nothing is sent"]
    keys = dict.fromkeys((sent.group, sent.purpose) for sent in (*ours, *bf16))
    rows, seconds = [], 0.0
    for group, purpose in sorted(keys, key=lambda key: (key[0], observer.PURPOSES.index(key[1]))):
        mine, other = ({s: n for s, n in t.items() if s[::2] == (group, purpose)} for t in (ours, bf16))
        nbytes, link = sum(mine.values()), link_of(group, load.dims, plan.device_type)
        takes = nbytes / link.speed
        seconds += takes
        precisions = ", ".join(dict.fromkeys(sent.precision for sent in mine)) or "nothing"
        rows.append(
            (group, purpose, said_bytes(nbytes), _share(mine, other), said_seconds(takes), str(link), precisions)
        )  # fmt: skip
    total = f"{said_bytes(sum(ours.values()))} a step, {_share(ours, bf16)} of bf16, {said_seconds(seconds)}"
    lines = [f"wire: each rank sends {total} at the nominal speed of the links without overlap", ""]
    return [*lines, *table(COLUMNS, rows), *slow_tp(load.dims, plan.device_type, by_group(ours).get(TP, 0))]


def warn_of_tp(plan: Plan, load: Workload, optimizer: str, host: int) -> list[str]:
    """Return the warning of `slow_tp` if tp spans several hosts of `host` GPUs, else an empty list; if the bytes cannot be
    predicted, a line with the reason."""
    try:
        return slow_tp(load.dims, plan.device_type, by_group(planned(plan, load, optimizer)).get(TP, 0), host)
    except Unpredictable as why:
        return [f"wire: {why}"]


def describe_gradients(plan: Plan, load: Workload, waits: Accumulation) -> list[str]:
    """Return the line of the plan about `[train] reduce_gradients`: memory and bytes of both options. Empty if there is only
    one microbatch or one rank."""
    if not waits.whole:
        return []
    kept = {
        1: f"unsharded, in fp32: {said_bytes(waits.whole)}",
        waits.microbatches: f"as shards: {said_bytes(waits.shard)}",
    }
    try:
        sends = {n: sum(fsdp_gradients(plan, replace(load, reductions=n)).values()) for n in kept}
    except Unpredictable as why:
        return [f"gradients: {why}"]
    choices = {n: f"{kept[n]} a rank, {n} reduction{'s' * (n > 1)} a step, {said_bytes(sends[n])} sent" for n in kept}
    (other,) = choices.keys() - {waits.reductions}
    asked = "step" if other == 1 else "microbatch"
    return [
        f"gradients of {waits.microbatches} microbatches are accumulated {choices[waits.reductions]} ({waits.why}); "
        f"with reduce_gradients = {asked!r} {choices[other]}"
    ]


def _share(ours: Mapping[Sent, int], bf16: Mapping[Sent, int]) -> str:
    other = sum(bf16.values())
    return f"{sum(ours.values()) / other:.3f}" if other else "-"


class WireWatch:
    """Ledger of a run: planned bytes of each step, and counts of the bytes in the steps that `[train] ledger` selects."""

    def __init__(self, config: Config, built: Built) -> None:
        world = dist.get_world_size()
        self._mode, self._model = config.train.ledger if world > 1 else "off", built.model
        if config.train.invariant:
            self._mode = "off"  # the plan does not predict partial sums in fp32
        self._optimizer = config.train.optimizer
        self._load = replace(
            workload(config, world, built.accumulation.reductions),
            dp_shard_rank=built.dims.rank(built.dims.shard_axis),
        )
        self._runtime, self._ledger = session_of(built.model), Ledger(built.mesh)
        self._ran = self._swaps = 0
        self.watches = False  # whether bytes of the current or last step are counted
        self._counts: observer.Observer | None = None  # counts of the current or last counted step
        self._captured: observer.Observer | None = None  # counts of the transfers in the CUDA graph
        self._told = False  # whether `_traffic` is up to date
        self._traffic: Traffic | None = None  # planned bytes of a step; None: not predictable
        self.unforeseen = ""  # reason why the bytes of a step cannot be predicted; "": predictable

    @contextmanager
    def step(self) -> Iterator[bool]:
        """Return the context of one step; it yields whether the bytes of the step are counted. At the end, counted bytes are
        compared with the plan, if the plan predicts them. Raises LedgerError on all ranks if they differ.

        A recipe change restarts the `WARM` steps. A step that ends with a recipe change is not counted, because its casts at
        the step boundary already use the new recipe.
        """
        if len(self._runtime.swaps) != self._swaps:
            self._ran, self._swaps, self._told = 0, len(self._runtime.swaps), False
        self._ran += 1
        if self._ran == WARM + 1:
            self._told = False  # the dtypes of the inputs of layers are known only now
        asked = self._ran == WARM + 1 if self._mode == "first" else self._mode == "always"
        self.watches = asked and self._ran > WARM and not self._runtime.swaps_next
        with self._ledger.step(self.planned()) if self.watches else nullcontext() as self._counts:
            yield self.watches

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Return the context of a CUDA graph capture. If `[train] ledger` is always, the recorded transfers are counted for
        `replayed`, although the capture itself sends nothing."""
        if self._mode != "always":  # then no replayed step is counted
            yield
            return
        with _disable_current_modes(), self._ledger.counter() as self._captured:
            yield

    def replayed(self) -> None:
        """Add the transfers of one graph replay to the counts of the current step, since the observer cannot see replays."""
        if self._counts is not None:
            assert self._captured is not None
            self._counts.replayed(self._captured, 1)

    def planned(self) -> Traffic | None:
        """Return the planned bytes of a step with the current recipes; None if they cannot be predicted, and `unforeseen` is
        then the reason."""
        if not self._told:
            self._told = True
            try:
                self._traffic, self.unforeseen = planned(plan_of(self._model), self.load(), self._optimizer), ""
            except Unpredictable as why:
                self._traffic, self.unforeseen = None, str(why)
        return self._traffic

    def load(self) -> Workload:
        return replace(self._load, dtypes=activation_dtypes(self._model))

    def seen(self) -> observer.Observer:
        """Return the counts of the last counted step."""
        assert self._ledger.last is not None, "no step was watched yet"
        return self._ledger.last

    def bytes(self) -> dict[str, int]:
        """Return the planned bytes of a step by group; empty if they cannot be predicted."""
        return by_group(self.planned() or {})

    def account(self) -> list[dict[str, Any]]:
        """Return the record of the counted step: counted bytes by group, purpose, kind of collective and precision."""
        fields = ("group", "purpose", "kind", "precision")
        sums = observer.totals(self.seen().sent, *fields)
        return [{**dict(zip(fields, key, strict=True)), "bytes": n} for key, n in sorted(sums.items()) if n]

    def said(self) -> str:
        """Return a log line about the comparison of the last counted step with the plan."""
        ours = self.planned()
        if ours is None:
            return f"WARNING: bytes on the wire were counted, but not compared with the plan: {self.unforeseen}"
        bf16 = planned(in_bf16(plan_of(self._model)), self.load(), self._optimizer)
        groups = ", ".join(f"{group} {said_bytes(nbytes)}" for group, nbytes in by_group(ours).items()) or "nothing"
        return f"the bytes sent match the plan: from each rank {groups}; {_share(ours, bf16)} of bf16"
