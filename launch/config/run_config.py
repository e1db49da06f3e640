"""Configuration of a training run: one TOML file, read into typed and checked dataclasses.

`load("tiny", ["--train.lr", "1e-3"])` finds `launch/configs/tiny.toml` (or takes a path), applies the overrides and
returns a `Config`. The range of a setting is in its field (sections.py), rules across settings are in `_agreements`, and
rules that depend on the number of ranks in `validate_world`. `to_toml` writes a file that loads as an equal `Config`.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dlp
from dlp.comm.mesh import ParallelDims
from dlp.quant.recipe import as_recipe, source
from launch.config import files
from launch.config.sections import SCHEMA, Checkpoint, Data, Group, Mesh, Run, Train
from launch.models.settings import Model
from launch.settings import overrides
from launch.settings.schema import ConfigError, brief, read, toml_lines

DEFAULT = "tiny"
TABLES = {name: cls for name, cls in SCHEMA.items() if cls is not Group}


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections of a configuration. `source`: name of the file in messages; not compared."""

    mesh: Mesh
    model: Model
    data: Data
    train: Train
    checkpoint: Checkpoint
    run: Run
    groups: tuple[Group, ...]
    source: str = field(default="config", compare=False)

    def __post_init__(self) -> None:
        for holds, sentence in _agreements(self):
            if not holds:
                raise ConfigError(f"{self.source}: {sentence}")
        for group in self.groups:
            _check_group(group, self.source)


def _agreements(config: Config) -> Iterator[tuple[bool, str]]:
    """Yield (whether the rule holds, message) for each rule across settings that does not depend on the number of ranks."""
    mesh, model, train = config.mesh, config.model, config.train
    yield (mesh.dp_replicate, mesh.dp_shard) != (-1, -1), "[mesh] dp_replicate, dp_shard: expected one -1, got two"
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
    tokens = abs(train.micro_batch) * train.sequence
    yield (
        not mesh.sequence_parallel or tokens % mesh.tp == 0,
        f"[mesh] tp: expected a divisor of [train] micro_batch x sequence = {tokens} under sequence_parallel, "
        f"got {mesh.tp}",
    )
    yield (
        train.global_batch % train.micro_batch == 0,
        f"[train] global_batch: expected a multiple of micro_batch = {train.micro_batch}, got {train.global_batch}",
    )
    yield (
        train.recompute_every == 1 or train.checkpointing != "none",
        f'[train] recompute_every: expected 1 while checkpointing = "none" runs no block again, got {train.recompute_every}; '
        f'set checkpointing = "selective" or "full"',
    )
    yield (
        train.profile <= train.steps,
        f"[train] profile: expected one of the {train.steps} steps, or 0, got {train.profile}",
    )
    yield (
        not (model.fused and train.compile),
        "[model] fused: expected false with [train] compile = true, which fuses norms and gates by itself and keeps less "
        "memory, got true; set one of them to false",
    )
    why_not = cannot_capture(config)
    yield train.cuda_graph is not True or not why_not, f"[train] cuda_graph = true: {why_not}"
    names = [group.name for group in config.groups]
    yield len(set(names)) == len(names), f"[[groups]] name: expected names that differ, got {', '.join(names)}"


def cannot_capture(config: Config) -> str:
    """Return why steps cannot be captured as a CUDA graph, with the setting to change; "" if steps can be captured."""
    measured = [group.name for group in config.groups if group.stats]
    if measured:
        return f"statistics are read in each step of group {', '.join(measured)}; leave stats out of the group"
    if config.data.reset_attention:
        return "the number of documents changes with each step; set [data] reset_attention = false"
    if config.train.sentinel:
        return "the sentinel looks at each module of some steps; set [train] sentinel = 0"
    return ""


def _check_group(group: Group, source: str) -> None:
    """Construct the layer group and its recipes once, so that mistakes are found before any work starts."""
    layer_fields = group.layer_fields()
    steps = [entry["at_step"] for entry in group.swap or ()]
    if twice := next((step for step in steps if steps.count(step) > 1), None):
        raise ConfigError(f"{source}: {group.title()}: swap: expected steps that differ, got {twice} twice")
    try:
        if layer_fields or (group.swap is None and group.stats is None):
            dlp.LayerGroup(group.name, group.match, **layer_fields)
        for recipe in group.recipes():
            as_recipe(recipe)
    except ValueError as error:
        raise ConfigError(f"{source}: {group.title()}: {error}") from None


def recipe_files(config: Config) -> frozenset[Path]:
    """Return the Python files of recipes that the configuration names; a run may import only these."""
    found = (source(recipe) for group in config.groups for recipe in group.recipes())
    return frozenset(path for path in found if path is not None)


@dataclass(frozen=True)
class Batch:
    """Partition of the sequences of a step.

    micro      sequences of a microbatch
    num_micro  microbatches of each data-parallel rank
    dp_size    data-parallel ranks
    """

    micro: int
    num_micro: int
    dp_size: int


def parallel_dims(config: Config, world_size: int) -> ParallelDims:
    """Return the mesh sizes for `world_size` ranks; raise ConfigError if the mesh does not fit this number."""
    mesh = config.mesh
    try:
        return ParallelDims.build(world_size, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, tp=mesh.tp)
    except ValueError as error:
        raise ConfigError(f"{config.source}: [mesh] {error}") from None


def validate_world(config: Config, world_size: int) -> Batch:
    """Return the batch for `world_size` ranks; raise ConfigError if mesh or batch do not fit this number."""
    micro_batch, global_batch = config.train.micro_batch, config.train.global_batch
    dp_size = parallel_dims(config, world_size).dp_size
    least = abs(micro_batch)  # -1 stands for at least one sequence
    if global_batch % (least * dp_size):
        raise ConfigError(
            f"{config.source}: [train] global_batch: expected a multiple of micro_batch {least} x "
            f"{dp_size} data-parallel ranks, got {global_batch}"
        )
    micro = global_batch // dp_size if micro_batch == -1 else micro_batch
    return Batch(micro, global_batch // (micro * dp_size), dp_size)


def load(name_or_path: str | Path = DEFAULT, arguments: Sequence[str] = ()) -> Config:
    """The checked config of a name under launch/configs or of a TOML file.

    arguments: overrides as on a command line, ["--train.lr", "1e-3", "--recipe", "bf16"]. Raises ConfigError.
    """
    rest, changes = overrides.split(arguments)
    if rest:
        raise ConfigError(f"{rest[0]}: expected overrides of the form --section.key value")
    return _load(name_or_path, changes)


def command_line(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """A program's own arguments and its config, from a parser made by `make_parser`. Raises ConfigError."""
    options, changes = overrides.parse(parser, arguments, SCHEMA)
    return options, _load(options.config, changes)


def count(text: str) -> int:
    """An integer >= 1 as a command line has it, as the type of an argument."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser with CONFIG, --print-config and a --help that lists every setting; programs add their own options."""
    return overrides.make_parser(program, description, DEFAULT, SCHEMA)


def _load(name_or_path: str | Path, changes: Sequence[tuple[str, str]]) -> Config:
    path = files.find(name_or_path)
    return from_text(files.read_text(path), path.name, changes)


def from_text(text: str, name: str, changes: Sequence[tuple[str, str]] = ()) -> Config:
    """The checked config of a TOML file's text; `name`: what messages call it; `changes`: overrides. Raises ConfigError."""
    tables = files.parse(text, name)
    _check_shape(tables, name)
    overrides.apply(tables, changes, SCHEMA)
    try:
        sections: dict[str, Any] = {key: read(cls, tables.get(key, {}), f"[{key}]") for key, cls in TABLES.items()}
        groups = [read(Group, table, f"[[groups]] {place}") for place, table in enumerate(tables["groups"], start=1)]
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return Config(source=name, groups=tuple(groups), **sections)


def _check_shape(tables: dict[str, Any], source: str) -> None:
    """Known sections, each a table; at least one group."""
    for name, table in tables.items():
        if name not in SCHEMA:
            raise ConfigError(f"{source}: [{brief(name)}]: unknown section, expected one of {', '.join(SCHEMA)}")
        if name != "groups" and not isinstance(table, dict):
            raise ConfigError(f"{source}: {name}: expected a table, [{name}], got {brief(repr(table))}")
    groups = tables.get("groups")
    if not (isinstance(groups, list) and groups and all(isinstance(group, dict) for group in groups)):
        raise ConfigError(f"{source}: [[groups]]: expected one or more such tables, each a group of layers")


def to_toml(config: Config) -> str:
    """A file that loads as an equal config; every setting is written, except those that are unset."""
    parts = []
    for name in SCHEMA:
        value = getattr(config, name)
        tables = [("[[groups]]", group) for group in value] if name == "groups" else [(f"[{name}]", value)]
        parts += ["\n".join([title, *toml_lines(section)]) for title, section in tables]
    return "\n\n".join(parts) + "\n"
