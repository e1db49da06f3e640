"""Configuration of a training run: one TOML file, read into typed and checked dataclasses.

`load("tiny", ["--train.lr", "1e-3"])` finds `launch/configs/tiny.toml` (or takes a path), applies the overrides and
returns a `Config`. The range of a setting is in its field (sections.py), and rules across settings, also those that depend on
the number of ranks, are in rules.py. `to_toml` writes a file that loads as an equal `Config`.
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
    """All sections of a configuration, with recipes and layer groups that `dlp` accepts."""

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
        """Interface of the launcher to the model of this configuration."""
        return Pretrained(self.model) if isinstance(self.model, PretrainedModel) else Decoder(self.model)

    @property
    def family(self) -> Model:
        """Sizes of `[model]`. Raises ConfigError for a model of transformers, which programs other than training and
        evaluation do not run."""
        if isinstance(self.model, PretrainedModel):
            raise ConfigError(
                f"{self.source}: --model {self.model.folder} is a model of transformers, and this program expects the sizes of "
                f"a family in [model]; export a checkpoint by launch.convert_hf and use transformers"
            )
        return self.model


def _check_group(group: Group, source: str) -> None:
    """Construct the layer group and its recipes once, so that mistakes are found before any work starts."""
    layer_fields = group.layer_fields()
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


def parallel_dims(config: Config, world_size: int) -> ParallelDims:
    """Return the mesh sizes for `world_size` ranks; raise ConfigError if the mesh does not fit this number."""
    return ParallelDims.of(mesh_sizes(config, world_size))


def shards(config: Config, dp_size: int) -> bool:
    """Return whether FSDP manages the parameters: on several data-parallel ranks, or to cast to the dtype of activations."""
    return dp_size > 1 or (config.architecture.fsdp_casts and config.train.dtype != "fp32")


def load(name_or_path: str | Path = DEFAULT, arguments: Sequence[str] = ()) -> Config:
    """Return the checked config of a name under launch/configs or of a TOML file.

    arguments: overrides as on a command line, ["--train.lr", "1e-3", "--recipe", "bf16"]. Raises ConfigError.
    """
    rest, changes = overrides.split(arguments)
    if rest:
        raise ConfigError(f"{rest[0]}: expected overrides of the form --section.key value")
    return _load(name_or_path, changes)


def command_line(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Return a program's own arguments and its config, for a parser made by `make_parser`. Raises ConfigError."""
    options, changes = overrides.parse(parser, arguments, SCHEMA)
    options.config = files.chosen(options.config, arguments, changes)
    return options, _load(options.config, changes)


def count(text: str) -> int:
    """Parse an integer >= 1 from a command line, as the type of an argument."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with CONFIG, --print-config and a --help that lists every setting; programs add their own
    options."""
    return overrides.make_parser(program, description, DEFAULT, SCHEMA)


def _load(name_or_path: str | Path, changes: Sequence[tuple[str, str]]) -> Config:
    path = files.find(name_or_path)
    return from_text(files.read_text(path), path.name, changes)


def from_text(text: str, name: str, changes: Sequence[tuple[str, str]] = ()) -> Config:
    """Return the checked config of a TOML text. `name`: name in messages; `changes`: overrides. Raises ConfigError."""
    tables = files.parse(text, name)
    check_shape(tables, name)
    overrides.apply(tables, changes, SCHEMA)
    return build(Config, Group, tables, name)


def to_toml(config: Config) -> str:
    """Return a file that loads as an equal config. Every setting is written, except unset settings."""
    parts = []
    for name in SCHEMA:
        value = getattr(config, name)
        tables = [("[[groups]]", group) for group in value] if name == "groups" else [(f"[{name}]", value)]
        parts += ["\n".join([title, *toml_lines(section)]) for title, section in tables]
    return "\n\n".join(parts) + "\n"
