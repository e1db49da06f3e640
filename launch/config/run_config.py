"""Config of a training run: one TOML file, read into typed and checked dataclasses.

`load("tiny", ["--train.lr", "1e-3"])` finds `launch/configs/tiny.toml` (or takes a path), applies the overrides and
returns a `Config`. The allowed values of a setting are declared with its field (sections.py); rules across settings, including
rules about the number of ranks, are in rules.py. `to_toml` returns a text that loads as an equal `Config`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import dlp
from dlp.comm.mesh import ParallelDims
from dlp.quant.recipe import as_recipe, source
from launch.config import files
from launch.config.files import DEFAULT
from launch.config.groups import SCHEMA, Group
from launch.config.rules import Settings, build, check_shape, mesh_sizes
from launch.models.architecture import Architecture
from launch.models.decoder import Decoder
from launch.models.pretrained import Pretrained
from launch.models.settings import Model, PretrainedModel
from launch.settings import overrides
from launch.settings.schema import ConfigError, toml_lines


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """All sections of a config, including checked recipes and layer groups."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for holds, sentence in self.architecture.rules(self):
            if not holds:
                raise ConfigError(f"{self.source}: {sentence}")
        for group in self.groups:
            _check_group(group, self.source)

    @cached_property
    def architecture(self) -> Architecture:
        """Model of this config, as the interface that the launcher uses."""
        return Pretrained(self.model) if isinstance(self.model, PretrainedModel) else Decoder(self.model)

    @property
    def family(self) -> Model:
        """Section `[model]` with the sizes of a family. Raises ConfigError for a model of transformers: only training and
        evaluation support such models."""
        if isinstance(self.model, PretrainedModel):
            raise ConfigError(
                f"{self.source}: --model {self.model.folder} is a model of transformers, and this program expects the sizes of "
                f"a family in [model]; export a checkpoint by launch.convert_hf and use transformers"
            )
        return self.model


def _check_group(group: Group, source: str) -> None:
    """Construct the layer group and its recipes; raise ConfigError if one of them is invalid."""
    layer_fields = group.layer_fields()
    try:
        if layer_fields or (group.swap is None and group.stats is None):
            dlp.LayerGroup(group.name, group.match, **layer_fields)
        for recipe in group.recipes():
            as_recipe(recipe)
    except ValueError as error:
        raise ConfigError(f"{source}: {group.title()}: {error}") from None


def recipe_files(config: Config) -> frozenset[Path]:
    """Return the Python files of the recipes in the config; a run may import recipes only from these files."""
    found = (source(recipe) for group in config.groups for recipe in group.recipes())
    return frozenset(path for path in found if path is not None)


def parallel_dims(config: Config, world_size: int) -> ParallelDims:
    """Return the mesh sizes for `world_size` ranks. Raises ConfigError if the mesh does not fit `world_size`."""
    return ParallelDims.of(mesh_sizes(config, world_size))


def shards(config: Config, dp_size: int) -> bool:
    """Return whether FSDP manages the parameters: if `dp_size`, the number of ranks with different tokens (dp and cp), is above
    1, or if FSDP must cast parameters to the dtype of activations."""
    return dp_size > 1 or (config.architecture.fsdp_casts and config.train.dtype != "fp32")


def load(name_or_path: str | Path = DEFAULT, arguments: Sequence[str] = ()) -> Config:
    """Load and check a config, given as a name under launch/configs or as the path of a TOML file.

    arguments: overrides as on a command line, ["--train.lr", "1e-3", "--recipe", "bf16"]. Raises ConfigError if the file or a
    setting is invalid.
    """
    rest, changes = overrides.split(arguments)
    if rest:
        raise ConfigError(f"{rest[0]}: expected overrides of the form --section.key value")
    return _load(name_or_path, changes)


def command_line(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Parse a command line with a parser from `make_parser`; return the options of the program, and the config with overrides.
    Raises ConfigError."""
    options, changes = overrides.parse(parser, arguments, SCHEMA)
    options.config = files.chosen(options.config, arguments, changes)
    return options, _load(options.config, changes)


def count(text: str) -> int:
    """Parse an integer >= 1; for `type=` of argparse."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with CONFIG, --print-config and a --help that lists every setting. Programs add further options."""
    return overrides.make_parser(program, description, DEFAULT, SCHEMA)


def _load(name_or_path: str | Path, changes: Sequence[tuple[str, str]]) -> Config:
    path = files.find(name_or_path)
    return from_text(files.read_text(path), path.name, changes)


def from_text(text: str, name: str, changes: Sequence[tuple[str, str]] = ()) -> Config:
    """Parse and check a config in TOML. Raises ConfigError.

    name: name of the config in messages; changes: overrides, (dotted name, text) each.
    """
    tables = files.parse(text, name)
    check_shape(tables, name)
    overrides.apply(tables, changes, SCHEMA)
    return build(Config, Group, tables, name)


def to_toml(config: Config) -> str:
    """Return the config as TOML text that loads as an equal config. All settings are written except unset ones."""
    parts = []
    for name in SCHEMA:
        value = getattr(config, name)
        tables = [("[[groups]]", group) for group in value] if name == "groups" else [(f"[{name}]", value)]
        parts += ["\n".join([title, *toml_lines(section)]) for title, section in tables]
    return "\n\n".join(parts) + "\n"
