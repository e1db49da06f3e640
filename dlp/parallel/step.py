"""end_step: the one place where anything changes between steps; forward and backward only read.

    delayed scales are updated, all together, after one all-reduce of the amaxes of all microbatches
    recipe swaps that are due are made
    weights that are whole on this rank are cast, in both orientations, into their persistent operands, and of weights that
    FSDP gathers this rank's rows, all together, with one agreement on all their amaxes

Swaps come before the casts, so that no weight is cast for a recipe it is about to leave.

`attach` installs it behind the optimizer's step. Without it nothing is kept between calls: weights are cast where they
are used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dlp.parallel.delayed_wgrad import check_none_waits
from dlp.parallel.fsdp import gather_quantized
from dlp.parallel.grads import PartialGradients
from dlp.parallel.linear import ParallelLinear, cores
from dlp.parallel.replicas import check_replicas
from dlp.parallel.runtime import Runtime, data_parallel, give_runtime
from dlp.parallel.swap import make_due_swaps
from dlp.parallel.weight_batch import refresh


def end_step(model: nn.Module) -> None:
    """Run the step boundary now. Call it yourself after anything but an optimizer step has changed the weights."""
    layers = list(cores(model))
    for core in layers:
        core.shared.forget()
    runtimes = list(dict.fromkeys(core.spec.runtime for core in layers))
    for runtime in runtimes:
        runtime.end_step()
        make_due_swaps(model, runtime)
    for runtime in runtimes:
        own = [core for core in layers if core.spec.runtime is runtime]
        refresh(runtime, own, list(runtime.shards.values()))


WEIGHT_CACHES = ("step", "forward")


def attach(
    model: nn.Module, optimizer: Optimizer, *, mesh: DeviceMesh | None = None, seed: int = 0, weight_cache: str = "step"
) -> None:
    """Run `end_step(model)` after every step of the optimizer; weights are then cast once per step.

    Call it after `convert` and `fully_shard`, with parameters in memory. From here on FSDP gathers weights as the step
    boundary quantized them (see `fully_shard`). RuntimeError for a step whose tp-partial gradients were not summed (the
    model was not called as `model(...)`) or whose wgrads still wait (see `backward_dw`), and for the first one if the
    gradients of replicated parameters differ between tp ranks.

    weight_cache   "step": weights are cast once a step, both orientations, and kept. "forward": for want of memory nothing
                   is kept, and they are cast wherever they are used, rowwise in forward and columnwise in backward, with
                   the same bits. Of weights that FSDP gathers casts are kept unless its `quantized_gather` is False.

    For a model of layers made by hand, not by `convert`: `mesh`, from `build_mesh`, says which tokens of a global batch
    this rank has, and `seed` is that of stochastic rounding; delayed scales are shared by all ranks. ValueError for another
    `weight_cache`.
    """
    if weight_cache not in WEIGHT_CACHES:
        raise ValueError(f"weight_cache must be one of {', '.join(WEIGHT_CACHES)}; got {weight_cache!r}")
    runtime: Runtime | None = getattr(model, "dlp_runtime", None)
    if runtime is None:
        runtime = _adopt_layers(model, mesh, seed)
    sharded = {id(core) for m in model.modules() if isinstance(m, FSDPModule) for core in cores(m)}
    for core in cores(model):
        core.caches = weight_cache == "step" and id(core) not in sharded
    if weight_cache == "forward" and sharded:
        runtime.note("weight_cache = 'forward' leaves casts of shards as they are: quantized_gather = false keeps none")
    gather_quantized(model, runtime)
    optimizer.register_step_pre_hook(lambda *_: check_none_waits(runtime))
    partial: PartialGradients | None = getattr(model, "partial_gradients", None)
    if partial is not None:
        _check_before_step(model, optimizer, partial)
    first, runtime.attached = not runtime.attached, True  # of several optimizers, one counts the steps
    optimizer.register_step_post_hook(lambda *_: _after_step(model, runtime, first))


def _after_step(model: nn.Module, runtime: Runtime, counts: bool) -> None:
    runtime.steps += counts
    end_step(model)


def _adopt_layers(model: nn.Module, mesh: DeviceMesh | None, seed: int) -> Runtime:
    """One runtime for layers made by hand, which go by their names in the model from now on."""
    world = dist.group.WORLD if dist.is_initialized() else None
    runtime = Runtime(seed=seed, amax_group=world, dp=(0, 1) if mesh is None else data_parallel(mesh))
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear) and module.core not in runtime.cores:
            core, weights = module.core, [member.weight for member in module.core.members]
            members = (name,) if len(weights) == 1 else tuple(f"{name}.{weight}" for weight in weights)
            core.set_spec(replace(core.spec, name=name or core.spec.name, runtime=runtime, members=members))
            runtime.cores.append(core)
    give_runtime(model, runtime)
    tp_groups = [core.spec.tp_group for core in runtime.cores if core.spec.tp > 1]
    if tp_groups:
        model.partial_gradients = runtime.sums = PartialGradients(model, tp_groups[0])  # type: ignore[assignment]
    return runtime


def _check_before_step(model: nn.Module, optimizer: Optimizer, partial: PartialGradients) -> None:
    """Each optimizer remembers what it has seen, since several may share a model."""
    seen = partial.num_sums
    compared = False

    def check(*_: Any) -> None:
        nonlocal seen, compared
        seen = partial.check_summed(seen)
        if not compared:
            check_replicas(model, {slot.path for slot in partial.slots}, partial.group)
            compared = True

    optimizer.register_step_pre_hook(check)
