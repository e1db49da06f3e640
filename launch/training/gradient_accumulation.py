"""Choice when FSDP reduces the gradients of microbatches, `[train] reduce_gradients`.

    step          once per step: each rank keeps unsharded fp32 gradients until the last microbatch
    microbatch    after the backward of each microbatch: each rank keeps sharded gradients

"auto" chooses `step` if unsharded gradients and the shards of weights, gradients and optimizer states fit into half of the
memory of a rank; the other half is for activations, casts and gathered weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from dlp import Plan
from launch.common.units import said_bytes
from launch.config.rules import Batch
from launch.config.run_config import Config
from launch.training.optimizer import state_bytes

# Assumed memory of a rank in bytes, by kind of device, if the memory is not known: the smallest GPU of this kind; for CPUs,
# whose memory all ranks of a host share, a guess.
MEMORY = {"cpu": 8e9, "cuda": 40e9, "sm_90": 80e9, "sm_100": 180e9}
WEIGHT = 8  # bytes per parameter of a shard: fp32 weight and gradient


@dataclass(frozen=True)
class Accumulation:
    """Decision about `[train] reduce_gradients`.

    reductions    number of times per step that FSDP reduces gradients
    microbatches  number of microbatches of a rank per step
    whole, shard  bytes of unsharded and of sharded fp32 gradients on a rank; 0 if there is nothing to decide
    why           reason of the decision; "" if there is nothing to decide
    """

    reductions: int
    microbatches: int = 1
    whole: int = 0
    shard: int = 0
    why: str = ""


def memory_here() -> float:
    """Return the memory of the smallest GPU of all ranks, in bytes."""
    found = torch.tensor(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return float(found.item())


def gradient_wire(config: Config, microbatches: int, reductions: int) -> str:
    """Return the dtype in which FSDP sends gradients, "fp32", "bf16" or "fp8". `[mesh] grad_wire = "auto"` becomes bf16 if
    gradients are bf16 before the reduction; gradients of invariant runs, and gradients that FSDP accumulates over microbatches,
    are fp32."""
    asked = config.mesh.grad_wire
    if asked != "auto":
        return asked
    train = config.train
    return "bf16" if train.dtype == "bf16" and reductions == microbatches and not train.invariant else "fp32"


def accumulation(config: Config, plan: Plan, batch: Batch, dp_shard: int, memory: float | None = None) -> Accumulation:
    """Decide `[train] reduce_gradients`. `dp_shard`: number of ranks over which FSDP shards; `memory`: memory of a rank in
    bytes; None: unknown, `MEMORY` is assumed."""
    asked, micro = config.train.reduce_gradients, batch.num_micro
    if batch.token_ranks == 1 or micro == 1:
        return Accumulation(1, micro)
    shard = -(-plan.parameters // dp_shard)
    whole, there = 4 * plan.parameters, MEMORY[plan.device_type] if memory is None else memory
    states = (
        sum(prod(w.shape) * state_bytes(config.train.optimizer, w.name, w.shape, dp_shard) for w in plan.weights)
        / dp_shard
    )
    needed = whole + WEIGHT * shard + states
    if asked == "auto":
        fits = needed <= there / 2
        why = (
            f"with weights and optimizer {said_bytes(needed)}, {'no ' * fits}more than half of a rank's "
            f"{said_bytes(there)}{' (assumed)' * (memory is None)}"
        )
    else:
        fits, why = asked == "step", "as reduce_gradients asks"
    if config.train.invariant:
        fits, why = False, "[train] invariant = true adds microbatches by the tree, after their reductions"
    return Accumulation(1 if fits else micro, micro, whole, 4 * shard, why)
