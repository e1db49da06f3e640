"""Build the model of a configuration on its ranks: mesh, conversion, recomputation, compilation, FSDP, weights, optimizer.

The order matters: conversion replaces modules on the meta device, FSDP shards the converted modules, and only then is memory
allocated and filled, on each rank with its shard.
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

# Maximum number of graphs of a block's code: a few for steps, validation and each recipe of a recipe change. Beyond
# this number torch raises an error with the reason. The default of torch is 8, after which torch runs the remaining
# blocks uncompiled.
GRAPHS = 64


@dataclass(frozen=True)
class Built:
    """Model that is ready for training. `dims.dp_rank` of `batch.dp_size`: sequences of the global batch that this rank reads;
    `context`: part of each sequence."""

    model: nn.Module
    plan: Plan
    mesh: DeviceMesh
    device: torch.device
    optimizer: Optimizer
    dims: ParallelDims
    batch: Batch
    accumulation: Accumulation
    swaps: list[recipe_schedule.PlannedSwap]
    graph: bool  # whether steps are replayed as a CUDA graph
    context: dlp.Context


def layer_groups(config: Config) -> list[LayerGroup]:
    """Return the layer groups of the model's parallel styles, followed by the groups of the configuration."""
    own = [
        LayerGroup(group.name, group.match, **layer_fields)
        for group in config.groups
        if (layer_fields := group.layer_fields())
    ]
    return config.architecture.groups(config.mesh.tp, config.mesh.sequence_parallel) + own


def meta_model(config: Config) -> nn.Module:
    return config.architecture.meta(DTYPES[config.train.dtype])


def attention_of(config: Config, kind: str) -> Choice:
    """Backend of attention on a kind of device. Raises ConfigError for a named backend that cannot run there."""
    head_dim = config.architecture.head_dim
    if head_dim is None:
        return Choice(None, "auto: scaled_dot_product_attention of torch, as the model of transformers calls it")
    try:
        return choose(config.train, head_dim, config.data.reset_attention, kind)
    except ValueError as error:
        raise ConfigError(f"{config.source}: {error}") from None


def plan_for(config: Config, world_size: int, device_type: str, board: str = "") -> Plan:
    """Return the layer plan of a configuration, without ranks or memory. `board`: name of a GPU in
    `launch.common.devices`."""
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
    """Return model, plan and batch on these ranks, without memory. Raises ValueError if configuration, model and mesh do
    not fit."""
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
    """Compile each block with torch.compile; raise if torch cannot compile a block."""
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = GRAPHS, True
    for block in blocks:
        block.compile()


def check_device(config: Config, device_type: str) -> bool:
    """Return whether steps run as a CUDA graph on this device. Raises ConfigError for settings that need another device
    or a missing package. `device_type`: "cpu", "cuda", or a kind of GPU."""
    if config.train.profiler == "nvtx" and device_type == "cpu":
        raise ConfigError(f"{config.source}: [train] profiler: expected a GPU for nvtx, got a CPU: set it to torch")
    if config.train.sentinel and device_type != "cpu" and not config.train.deterministic:
        raise ConfigError(
            f"{config.source}: [train] sentinel: expected deterministic = true on GPUs, where attention's backward gives other "
            f"bits in each pass, got false"
        )
    check_installed(config)
    check_kernels(config, device_type)
    return replays_steps(config, device_type)


def check_kernels(config: Config, device_type: str) -> None:
    """Raise ConfigError where [train] kernels = "required" and the native kernels do not run on this device."""
    if config.train.kernels != "required" or device_type not in ("cpu", "cuda"):
        return
    try:
        loader.require()
    except loader.MissingError as error:
        raise ConfigError(f'{config.source}: [train] kernels = "required": {error}; or set kernels to auto') from None


def build(config: Config, mesh: DeviceMesh, device: torch.device) -> Built:
    """Build everything that a training loop needs. Raises ValueError if configuration, model and mesh do not fit."""
    graph = check_device(config, device.type)
    if config.train.invariant:
        deterministic.fix_sums(device)
    model, plan, batch = parallel_model(config, mesh)
    config.architecture.allocate(model, device)
    if config.train.init_from is None:  # otherwise weights are loaded
        config.architecture.initialize(model, config.train.seed)
    optimizer = make_optimizer(model, config, device, capturable=graph)
    cache = config.train.weight_cache
    main_grads = config.train.main_grads
    # The training loop checks for non-finite values
    dlp.attach(model, optimizer, weight_cache=cache, on_nonfinite="ignore", main_grads=main_grads)
    swaps = recipe_schedule.prepare(config.groups, config.train.steps, model, plan)
    dims = ParallelDims.from_mesh(mesh)
    memory = memory_here() if device.type == "cuda" else None
    waits = accumulation(config, plan, batch, dims.shards, memory)
    if batch.token_ranks > 1 and not config.train.invariant:
        carry_gradients(model, config, gradient_wire(config, batch.num_micro, waits.reductions))
    return Built(model, plan, mesh, device, optimizer, dims, batch, waits, swaps, graph, dlp.Context.of(mesh))


def carry_gradients(model: nn.Module, config: Config, wire: str) -> None:
    """Set the dtype in which FSDP sends gradients. With "auto", bf16 gradients are sent as bf16."""
    if wire == "fp32":
        return
    if config.mesh.grad_wire == "auto":
        set_grad_wire(model, "hp", torch.bfloat16)
    else:
        set_grad_wire(model, wire)


def shard(
    model: nn.Module, blocks: Collection[nn.Module], mesh: DeviceMesh, dtype: torch.dtype | None, asked: Mesh
) -> None:
    """Apply FSDP to each block and to the rest of the model: weights are gathered quantized, or in `dtype` (None: in
    the stored dtype, fp32); gradients are reduced in fp32. Blocks free gathered weights after forward if `asked`; the
    rest keeps gathered weights for backward."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    gather = asked.quantized_gather
    for block in blocks:
        frees = asked.reshard_after_forward
        dlp.fully_shard(block, mesh=mesh, mp_policy=policy, quantized_gather=gather, reshard_after_forward=frees)
    dlp.fully_shard(model, mesh=mesh, mp_policy=policy, quantized_gather=gather)
