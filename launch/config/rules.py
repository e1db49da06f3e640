"""Rules that involve several settings, and checks that mesh and batch fit a number of ranks. This module does not import torch.

`Settings` is the config that programs check before they import torch. `run_config.Config` adds the checks of recipes and
layer groups, which import `dlp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

from launch.config.sections import AXES, CP, SECTIONS, Checkpoint, Data, Mesh, Run, Train
from launch.models.folder import check_folder
from launch.models.settings import Model, PretrainedModel
from launch.settings.schema import ConfigError, Section, brief, read

NAMES = (*SECTIONS, "groups")
# Microbatches of a step, over all ranks, in invariant mode with micro_batch = -1. If the global batch is not divisible by this
# number, the largest power of two that divides the global batch is used instead.
PIECES = 8
S = TypeVar("S", bound="Settings")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All sections of a config. `source`: name of the file in messages; ignored when configs are compared."""

    mesh: Mesh
    model: Model | PretrainedModel
    data: Data
    train: Train
    checkpoint: Checkpoint
    run: Run
    groups: tuple[Any, ...]
    source: str = field(default="config", compare=False)

    @property
    def own_sequence(self) -> int:
        """Number of tokens of a sequence on one cp rank."""
        return self.train.sequence // self.mesh.cp

    def __post_init__(self) -> None:
        for holds, sentence in _agreements(self):
            if not holds:
                raise ConfigError(f"{self.source}: {sentence}")


def build(kind: type[S], group: type[Section], tables: Mapping[str, Any], name: str) -> S:
    """Construct a config from the tables of a TOML file.

    Args:
        kind: `Settings` or a subclass.
        group: Class of an entry of [[groups]].
        tables: Tables of the file, with overrides applied.
        name: Name of the file in messages.

    Raises:
        ConfigError: A setting is invalid, or settings contradict each other.
    """
    try:
        forms = {**SECTIONS, "model": _form_of_model(tables.get("model", {}))}
        sections: dict[str, Any] = {key: read(cls, tables.get(key, {}), f"[{key}]") for key, cls in forms.items()}
        groups = [read(group, table, f"[[groups]] {place}") for place, table in enumerate(tables["groups"], start=1)]
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return kind(source=name, groups=tuple(groups), **sections)


def _form_of_model(table: Mapping[str, Any]) -> type[Section]:
    """Return the class of section `[model]`: `PretrainedModel` if it has the key folder, else `Model`. Raises ConfigError if
    folder and other keys are set."""
    if "folder" not in table:
        return Model
    if others := [key for key in table if key != "folder"]:
        raise ConfigError(
            f"[model] {', '.join(map(brief, others))}: given together with --model {table['folder']}, whose config.json has "
            f"all settings of the model: leave these out, or leave --model out"
        )
    return PretrainedModel


def _agreements(config: Settings) -> Iterator[tuple[bool, str]]:
    """Yield (whether the rule holds, message) for each rule across settings that does not depend on the number of ranks."""
    mesh, model, train = config.mesh, config.model, config.train
    yield (mesh.dp_replicate, mesh.dp_shard) != (-1, -1), "[mesh] dp_replicate, dp_shard: expected one -1, got two"
    yield from _of_family(config, model) if isinstance(model, Model) else _of_folder(config, model)
    yield from _of_context(config) if mesh.cp > 1 else ()
    tokens = abs(train.micro_batch) * config.own_sequence
    yield (
        not mesh.sequence_parallel or tokens % mesh.tp == 0,
        f"[mesh] tp: expected a divisor of [train] micro_batch x sequence {'/ cp ' * (mesh.cp > 1)}= {tokens} under "
        f"sequence_parallel, got {mesh.tp}",
    )
    yield (
        train.global_batch % train.micro_batch == 0,
        f"[train] global_batch: expected a multiple of micro_batch = {train.micro_batch}, got {train.global_batch}",
    )
    yield (
        train.recompute_every == 1 or train.checkpointing != "none",
        f'[train] recompute_every: expected 1 with checkpointing = "none", which recomputes no block, got '
        f'{train.recompute_every}; set checkpointing = "selective" or "full"',
    )
    yield (
        train.profile <= train.steps,
        f"[train] profile: expected one of the {train.steps} steps, or 0, got {train.profile}",
    )
    yield (
        not train.sentinel or train.ledger != "always",
        f'[train] sentinel: expected 0 with ledger = "always", since a step whose bytes are counted cannot run twice, got '
        f'{train.sentinel}; set ledger = "first" or "off"',
    )
    yield (
        train.sentinel > 0 or (train.sentinel_action, train.sentinel_tensors) == ("stop", False),
        "[train] sentinel_action, sentinel_tensors: expected a number of steps in sentinel, got 0; set [train] sentinel",
    )
    why_not = cannot_capture(config)
    yield train.cuda_graph is not True or not why_not, f"[train] cuda_graph = true: {why_not}"
    for sentence in _against_invariant(config) if train.invariant else ():
        yield False, f"[train] invariant = true: {sentence}"
    for group in config.groups:
        steps = [step for step, _ in group.swaps(train.steps)]
        twice = next((step for step in steps if steps.count(step) > 1), None)
        yield twice is None, f"{group.title()}: swap: expected different steps, got {twice} twice"
    names = [group.name for group in config.groups]
    yield len(set(names)) == len(names), f"[[groups]] name: expected different names, got {', '.join(names)}"


def _of_family(config: Settings, model: Model) -> Iterator[tuple[bool, str]]:
    """Yield (whether the rule holds, message) for each rule about a model family, `[model]` without folder."""
    mesh, train = config.mesh, config.train
    yield (
        model.heads % model.kv_heads == 0,
        f"[model] kv_heads: expected a divisor of heads = {model.heads}, got {model.kv_heads}",
    )
    yield model.head_dim % 2 == 0, f"[model] head_dim: expected an even number, got {model.head_dim}"
    window = model.sliding_window or train.sequence
    yield (
        train.sequence <= window,
        f"[train] sequence: expected at most [model] sliding_window = {window}, got {train.sequence}: attention here sees "
        f"all tokens of a sequence",
    )
    for name in ("heads", "kv_heads", "ffn", "vocab"):
        size = getattr(model, name)
        yield size % mesh.tp == 0, f"[mesh] tp: expected a divisor of [model] {name} = {size}, got {mesh.tp}"
    yield (
        not (model.fused and train.compile),
        "[model] fused: expected false with [train] compile = true, which fuses norms and gates by itself and keeps less "
        "memory, got true; set one of them to false",
    )


def _of_folder(config: Settings, model: PretrainedModel) -> Iterator[tuple[bool, str]]:
    """Yield (whether the rule holds, message) for each rule about `--model FOLDER` that does not depend on the architecture.
    `Config` checks the architecture, because that check imports transformers.

    Raises:
        ConfigError: The folder is incomplete.
    """
    check_folder(model.folder)
    folder, mesh, train = f"--model {model.folder}", config.mesh, config.train
    yield (
        mesh.tp == 1 or not mesh.sequence_parallel,
        f"[mesh] sequence_parallel: expected false with {folder} and tp = {mesh.tp}, got true: modules of transformers "
        f"compute all tokens",
    )
    yield (
        not config.data.reset_attention,
        f"[data] reset_attention: expected false with {folder}, got true: modules of transformers make their own masks",
    )
    yield mesh.cp == 1, f"[mesh] cp: expected 1 with {folder}, whose attention reads whole sequences, got {mesh.cp}"
    yield train.attention == "auto", f"[train] attention: expected auto with {folder}, got {train.attention}"
    yield (
        train.init_from is None,
        f"[train] init_from: expected none with {folder}, whose files are the initial weights, got {train.init_from}",
    )


def _of_context(config: Settings) -> Iterator[tuple[bool, str]]:
    """Yield (whether the rule holds, message) for each rule about a mesh with cp > 1."""
    cp, train = config.mesh.cp, config.train
    yield (
        train.sequence % (2 * cp) == 0,
        f"[mesh] cp: expected a divisor of half of [train] sequence = {train.sequence}, since each rank has two chunks of a "
        f"sequence, got {cp}",
    )
    yield (
        not config.data.reset_attention,
        f"[mesh] cp: expected 1 with [data] reset_attention = true, whose attention reads the documents of whole sequences, "
        f"got {cp}",
    )
    yield not train.invariant, f"[mesh] cp: expected 1 with [train] invariant = true, got {cp}"


def _against_invariant(config: Settings) -> Iterator[str]:
    """Yield a message for each setting that invariant mode does not support. `dlp.convert` checks recipes and layers."""
    mesh, model, train = config.mesh, config.model, config.train
    if train.compile:
        yield "compiled code adds in an order that depends on shapes; set [train] compile = false"
    if isinstance(model, PretrainedModel):
        yield f"norms and attention of --model {model.folder} add in another order; train a family of [model]"
    elif model.fused:
        yield "fused sequences add in another order; set [model] fused = false"
    if train.optimizer != "adamw":
        yield f'{train.optimizer} computes on parts of matrices that depend on the mesh; set [train] optimizer = "adamw"'
    if train.main_grads != "off":
        yield 'wgrad GEMMs would add microbatches in order, not by the tree; set [train] main_grads = "off"'
    if train.reduce_gradients == "step":
        yield 'FSDP would add microbatches in order, not by the tree; set [train] reduce_gradients = "microbatch"'
    if train.sentinel:
        yield "the sentinel is not tested with sums by the tree; set [train] sentinel = 0"
    if train.dtype != "bf16":
        yield 'the bits of fp32 activations depend on how kernels vectorize a row; set [train] dtype = "bf16"'
    if train.ledger == "always":
        yield 'the plan does not predict the bytes of partial sums in fp32; set [train] ledger = "off"'
    if config.data.reset_attention:
        yield "attention within documents is not tested on parts of the heads; set [data] reset_attention = false"
    if mesh.grad_wire not in ("auto", "fp32"):
        yield f'gradients travel in fp32; set [mesh] grad_wire = "fp32", not "{mesh.grad_wire}"'


def cannot_capture(config: Settings) -> str:
    """Return the reason why steps cannot be captured in a CUDA graph, and the setting to change; "" if there is none."""
    measured = [group.name for group in config.groups if group.stats]
    if measured:
        return f"statistics are read in each step of group {', '.join(measured)}; leave stats out of the group"
    if config.data.reset_attention:
        return "the number of documents changes with each step; set [data] reset_attention = false"
    if isinstance(config.model, PretrainedModel) and config.train.cuda_graph == "auto":
        return (
            "modules of transformers may read device memory on the host; [train] cuda_graph = true captures steps of modules "
            "that do not"
        )
    if config.train.invariant:
        return "the sums of invariant = true read checksums of gradients on the host; set [train] invariant = false"
    return ""


def check_shape(tables: dict[str, Any], source: str) -> None:
    """Raise ConfigError for an unknown section, a section that is not a table, or a file without groups."""
    for name, table in tables.items():
        if name not in NAMES:
            raise ConfigError(f"{source}: [{brief(name)}]: unknown section, expected one of {', '.join(NAMES)}")
        if name != "groups" and not isinstance(table, dict):
            raise ConfigError(f"{source}: {name}: expected a table, [{name}], got {brief(repr(table))}")
    groups = tables.get("groups")
    if not (isinstance(groups, list) and groups and all(isinstance(group, dict) for group in groups)):
        raise ConfigError(f"{source}: [[groups]]: expected one or more such tables, each a group of layers")


@dataclass(frozen=True)
class Batch:
    """Partition of the sequences of a step.

    micro      number of sequences of a microbatch
    num_micro  number of microbatches of each data-parallel rank
    dp_size    number of data-parallel ranks, dp_replicate x dp_shard
    cp         number of ranks over which each sequence is sharded
    """

    micro: int
    num_micro: int
    dp_size: int
    cp: int = 1

    @property
    def token_ranks(self) -> int:
        """Number of ranks with different tokens, dp_replicate x dp_shard x cp."""
        return self.dp_size * self.cp


def mesh_sizes(config: Settings, world_size: int) -> dict[str, int]:
    """Return the size of each mesh axis for `world_size` ranks; cp is included only if cp > 1. Raises ConfigError if the mesh
    does not fit `world_size`."""
    axes = AXES if config.mesh.cp == 1 else (*AXES[:-1], CP, AXES[-1])
    sizes: dict[str, int] = {axis: getattr(config.mesh, axis) for axis in axes}
    open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
    rest = {axis: size for axis, size in sizes.items() if size != -1}
    ranks, product = prod(rest.values()), " x ".join(f"{axis} {size}" for axis, size in rest.items())
    begin = f"{config.source}: [mesh] world size {world_size} is not"
    if open_axis is None and ranks != world_size:
        raise ConfigError(f"{begin} {product}: start {ranks} ranks, or set dp_shard or dp_replicate to -1")
    if open_axis is not None:
        if world_size % ranks:
            raise ConfigError(
                f"{begin} a multiple of {product} = {ranks}, so {open_axis} = -1 cannot be filled: start a multiple of that "
                f"many ranks by torchrun --nproc-per-node, or choose a smaller axis"
            )
        sizes[open_axis] = world_size // ranks
    return sizes


def validate_world(config: Settings, world_size: int) -> Batch:
    """Return the partition of a global batch over `world_size` ranks. Raises ConfigError if mesh or global batch do not fit
    `world_size`."""
    micro_batch, global_batch = config.train.micro_batch, config.train.global_batch
    if config.train.invariant and micro_batch == -1:  # the microbatch must be equal on every mesh
        micro_batch = global_batch // min(PIECES, global_batch & -global_batch)
    mesh_sizes(config, world_size)
    dp_size = world_size // (config.mesh.cp * config.mesh.tp)
    least = abs(micro_batch)  # micro_batch = -1 needs at least one sequence per rank
    if global_batch % (least * dp_size):
        raise ConfigError(
            f"{config.source}: [train] global_batch: expected a multiple of micro_batch {least} x "
            f"{dp_size} data-parallel ranks, got {global_batch}"
        )
    micro = global_batch // dp_size if micro_batch == -1 else micro_batch
    return Batch(micro, global_batch // (micro * dp_size), dp_size, config.mesh.cp)


def choose(config: Settings, ranks: Sequence[int], tps: Sequence[int]) -> tuple[int, int]:
    """Return the first pair (ranks, tp) that fits the config, in the order of `ranks`, then of `tps`. If no pair fits, raise
    the ConfigError of the first pair."""
    for each in ranks:
        for tp in tps:
            if not _misfit(config, each, tp):
                return each, tp
    raise _misfit(config, ranks[0], tps[0]) or AssertionError("it fits, and was not chosen")


def _misfit(config: Settings, ranks: int, tp: int) -> ValueError | None:
    try:
        validate_world(replace(config, mesh=replace(config.mesh, tp=tp)), ranks)
    except ValueError as error:
        return error
    return None


def sizes_of_tp(config: Settings, arguments: Sequence[str]) -> list[int]:
    """Return the tp sizes to try: only the size on the command line, if given; else the size in the config and its divisors,
    largest first."""
    tp = config.mesh.tp
    asked = any(each.partition("=")[0] == "--mesh.tp" for each in arguments)
    return [tp] if asked else [size for size in range(tp, 0, -1) if tp % size == 0]


def on_one_rank(config: S, arguments: Sequence[str]) -> tuple[S, list[str]]:
    """Return the config with tp = 1 for a process that torchrun did not start, and a line to print if tp was changed.

    Raises ConfigError if tp > 1 was set on the command line, or if another setting does not fit one rank.
    """
    _, tp = choose(config, [1], sizes_of_tp(config, arguments))
    if tp == config.mesh.tp:
        return config, []
    remark = (
        f"using tp = {tp} instead of {config.mesh.tp}: a process without torchrun is the only rank; make pretrain, or torchrun "
        f"--nproc-per-node {config.mesh.tp}, starts more"
    )
    return replace(config, mesh=replace(config.mesh, tp=tp)), [remark]
