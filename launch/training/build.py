"""Build the model of a config on the ranks of a run: conversion, recomputation, compilation, FSDP, weights, optimizer.

The order matters: `dlp.convert` replaces modules on the meta device, FSDP shards the converted modules, and then each rank
allocates and fills only its shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

import dlp
from dlp import LayerGroup, Plan
from dlp.comm.mesh import ParallelDims
from dlp.kernels import loader
from dlp.kernels.table import device_kind
from dlp.parallel.model.invariant import check_mesh
from dlp.parallel.model.invariant import check_plan as check_invariant
from dlp.parallel.weight.fsdp2 import set_grad_wire
from launch.config.rules import Batch, validate_world
from launch.config.run_config import Config, parallel_dims, shards
from launch.config.sections import Mesh
from launch.models.attention import Choice
from launch.models.modules import DTYPES
from launch.ranks.links import transport_name
from launch.settings.schema import ConfigError
from launch.training import deterministic, recipe_schedule
from launch.training.attention_backend import choose
from launch.training.cuda_graph import replays_steps
from launch.training.gradient_accumulation import Accumulation, accumulation, gradient_wire, memory_here
from launch.training.optimizer import check_installed, make_optimizer
from launch.training.recomputation import recompute

# Recompile limit of torch.compile, for all blocks together: steps, validation and each recipe need a few graphs. Beyond the
# limit torch raises an error with the reason. With torch's default of 8, torch would run further blocks uncompiled without an
# error.
GRAPHS = 64


@dataclass(frozen=True)
class Built:
    """Model that is ready for training, with everything that the training loop needs.

    plan           layer plan, as returned by `dlp.convert`
    dims           sizes of the mesh axes and coordinates of this rank
    batch          partition of a global batch over the ranks
    accumulation   when FSDP reduces the gradients of microbatches
    swaps          scheduled recipe changes
    graph          whether steps are replayed as a CUDA graph
    context        this cp rank's shard of each sequence
    """

    model: nn.Module
    plan: Plan
    mesh: DeviceMesh
    device: torch.device
    optimizer: Optimizer
    dims: ParallelDims
    batch: Batch
    accumulation: Accumulation
    swaps: list[recipe_schedule.PlannedSwap]
    graph: bool
    context: dlp.Context


def layer_groups(config: Config) -> list[LayerGroup]:
    """Return the layer groups that shard the model over tp, followed by the layer groups of the config, which override them."""
    own = [
        LayerGroup(group.name, group.match, **layer_fields)
        for group in config.groups
        if (layer_fields := group.layer_fields())
    ]
    return config.architecture.groups(config.mesh.tp, config.mesh.sequence_parallel) + own


def meta_model(config: Config) -> nn.Module:
    return config.architecture.meta(DTYPES[config.train.dtype])


def attention_of(config: Config, kind: str) -> Choice:
    """Return the attention backend on a kind of device. Raises ConfigError if `[train] attention` names a backend that cannot
    run there."""
    head_dim = config.architecture.head_dim
    if head_dim is None:
        return Choice(None, "auto: scaled_dot_product_attention of torch, as the model of transformers calls it")
    try:
        return choose(config.train, head_dim, config.data.reset_attention, kind)
    except ValueError as error:
        raise ConfigError(f"{config.source}: {error}") from None


def plan_for(config: Config, world_size: int, device_type: str, board: str = "") -> Plan:
    """Return the layer plan of a config for `world_size` ranks, without starting ranks. The model stays on the meta device.

    device_type: kind of device, one of `dlp.kernels.table.DEVICES`. board: key of `launch.common.devices.BOARDS`, whose
    measured times decide overlap = "auto"; "": unknown.
    """
    batch = (validate_world(config, world_size).micro, config.own_sequence)
    groups = layer_groups(config)
    plan = dlp.make_plan(
        meta_model(config), groups, config.mesh.tp, device_type=device_type, batch=batch,
        overlap_table=config.mesh.overlap_table,
        transport=transport_name(config.mesh.transport, parallel_dims(config, world_size), device_type), board=board,
    )  # fmt: skip
    config.architecture.check(plan)
    if config.train.invariant:
        check_mesh(parallel_dims(config, world_size), "cpu" if device_type == "cpu" else "cuda", config.mesh.amax_group)
        plan = check_invariant(plan, meta_model(config), batch)
    return plan


def parallel_model(config: Config, mesh: DeviceMesh) -> tuple[nn.Module, Plan, Batch]:
    """Return the converted and sharded model on the meta device, its plan, and the partition of a batch. Raises ValueError if
    config, model and mesh do not fit together."""
    model = meta_model(config)
    batch = validate_world(config, mesh.size())
    tokens = (batch.micro, config.own_sequence)
    if config.mesh.cp > 1:
        config.architecture.share_sequences(model, dlp.Context.of(mesh))
    groups, shared = layer_groups(config), config.mesh.amax_group
    plan = dlp.convert(
        model, groups, mesh, batch=tokens, amax_group=shared, seed=config.train.seed,
        overlap_table=config.mesh.overlap_table, invariant=config.train.invariant,
    )  # fmt: skip
    config.architecture.check(plan)
    config.architecture.prepare(model, attention_of(config, device_kind(mesh.device_type)))
    blocks = config.architecture.block_modules(model)
    recompute(blocks, config.train)
    if config.train.compile:
        compile_blocks(blocks)
    if shards(config, batch.token_ranks):
        shard(model, blocks, mesh, None if config.train.invariant else DTYPES[config.train.dtype], config.mesh)
    return model, plan, batch


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block with torch.compile. torch raises an error in the first forward if it cannot compile a block."""
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = GRAPHS, True
    for block in blocks:
        block.compile()


def check_device(config: Config, device_type: str) -> bool:
    """Check settings that depend on the device, and return whether steps are replayed as a CUDA graph.

    device_type: "cpu", "cuda", or a kind of GPU. Raises ConfigError for a setting that needs another device or a missing
    package.
    """
    if config.train.profiler == "nvtx" and device_type == "cpu":
        raise ConfigError(f"{config.source}: [train] profiler: expected a GPU for nvtx, got a CPU: set it to torch")
    if config.train.sentinel and device_type != "cpu" and not config.train.deterministic:
        raise ConfigError(
            f"{config.source}: [train] sentinel: expected deterministic = true on GPUs, got false: a microbatch that runs "
            f"twice may otherwise differ in the bits of the backward of attention; set deterministic = true"
        )
    check_installed(config)
    check_kernels(config, device_type)
    return replays_steps(config, device_type)


def check_kernels(config: Config, device_type: str) -> None:
    """Raise ConfigError if [train] kernels = "required" and the native kernels are not available on this machine. Nothing is
    checked for a kind of GPU ("sm_90"), which is planned for another machine."""
    if config.train.kernels != "required" or device_type not in ("cpu", "cuda"):
        return
    try:
        loader.require()
    except loader.MissingError as error:
        raise ConfigError(f'{config.source}: [train] kernels = "required": {error}; or set kernels to auto') from None


def build(config: Config, mesh: DeviceMesh, device: torch.device) -> Built:
    """Build model and optimizer for the training loop. Raises ValueError if config, model and mesh do not fit together."""
    graph = check_device(config, device.type)
    if config.train.invariant:
        deterministic.fix_sums(device)
    model, plan, batch = parallel_model(config, mesh)
    config.architecture.allocate(model, device)
    if config.train.init_from is None:  # otherwise `Trainer.start_from_weights` loads the weights
        config.architecture.initialize(model, config.train.seed)
    optimizer = make_optimizer(model, config, device, capturable=graph)
    cache = config.train.weight_cache
    main_grads = config.train.main_grads
    # on_nonfinite = "ignore": the training loop checks for non-finite values itself
    dlp.attach(model, optimizer, weight_cache=cache, on_nonfinite="ignore", main_grads=main_grads)
    swaps = recipe_schedule.prepare(config.groups, config.train.steps, model, plan)
    dims = ParallelDims.from_mesh(mesh)
    memory = memory_here() if device.type == "cuda" else None
    waits = accumulation(config, plan, batch, dims.shards, memory)
    if batch.token_ranks > 1:
        carry_gradients(model, config, gradient_wire(config, batch.num_micro, waits.reductions))
    return Built(model, plan, mesh, device, optimizer, dims, batch, waits, swaps, graph, dlp.Context.of(mesh))


def carry_gradients(model: nn.Module, config: Config, wire: str) -> None:
    """Set the dtype in which FSDP sends gradients to `wire`: "fp32", "bf16" or "fp8"."""
    if wire == "fp32":
        return
    if config.mesh.grad_wire == "auto":
        set_grad_wire(model, "hp", torch.bfloat16)
    else:
        set_grad_wire(model, wire)


def shard(
    model: nn.Module, blocks: Collection[nn.Module], mesh: DeviceMesh, dtype: torch.dtype | None, asked: Mesh
) -> None:
    """Apply FSDP to each block, and to the rest of the model as the root unit. Gradients are reduced in fp32.

    dtype: dtype of gathered weights that are not quantized; None: the stored dtype, fp32. asked: `[mesh]`, whose
    reshard_after_forward applies to blocks; the root unit keeps its gathered weights for backward.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    gather = asked.quantized_gather
    for block in blocks:
        frees = asked.reshard_after_forward
        dlp.fully_shard(block, mesh=mesh, mp_policy=policy, quantized_gather=gather, reshard_after_forward=frees)
    dlp.fully_shard(model, mesh=mesh, mp_policy=policy, quantized_gather=gather)
