"""Load the model of a checkpoint for evaluation and generation, without optimizer and training state."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dlp
from dlp.comm.mesh import AXES_WITH_CP, ParallelDims, world_size
from dlp.parallel.weight.local import local_values
from launch.checkpoint import save_load
from launch.checkpoint.manifest import CheckpointError, other_weights, read_manifest
from launch.config.rules import Batch
from launch.config.run_config import Config, count, from_text, recipe_files
from launch.settings import overrides
from launch.settings.schema import ConfigError
from launch.training.build import parallel_model
from launch.training.initial_scales import without_amax
from launch.training.recipe_schedule import deciding_groups
from launch.weights import weights_only as weights

MODES = ("weight_only", "dynamic", "static")  # modes of `dlp.freeze`
BLOCKS = "layers.**"
Changes = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Trained:
    """Model of a checkpoint on the mesh of this run.

    config    config of the checkpoint, with overrides
    batch     partition of a global batch over the ranks
    opened    manifest and index of the checkpoint
    remarks   lines to print
    """

    config: Config
    model: nn.Module
    mesh: DeviceMesh
    device: torch.device
    dims: ParallelDims
    batch: Batch
    opened: save_load.Opened
    remarks: list[str]


def command_line(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Changes]:
    """Parse the options of `parser`, the options --quantize, --mode and --calibration, and overrides of the saved config.

    Returns the options, and the overrides, (dotted name, text) each.
    """
    parser.add_argument(
        "--quantize",
        metavar="RECIPE",
        help="quantize the weights of all linears in blocks by this recipe, and keep only codes and scales",
    )
    parser.add_argument("--mode", choices=MODES, help=f"quantization of x [{MODES[0]}]")
    parser.add_argument(
        "--calibration", type=count, metavar="N",
        help="--mode static: number of batches of the training data that calibrate the scales of x [8]",
    )  # fmt: skip
    parser.epilog = "Settings of the config are changed as for a run: --recipe bf16, --train.sequence 512, --mesh.tp 2."
    rest, changes = overrides.split(arguments)
    options = parser.parse_args(rest)
    if options.mode and not options.quantize:
        parser.error(f"--mode {options.mode} has no effect without quantization: add --quantize RECIPE")
    if options.calibration and options.mode != "static":
        parser.error(f"--calibration {options.calibration} is for static scales: add --quantize RECIPE --mode static")
    options.mode, options.calibration = options.mode or MODES[0], options.calibration or 8
    return options, changes


def open_trained(path: Path, changes: Changes) -> Trained:
    """Load a checkpoint on all ranks of this run, with its saved config and the overrides `changes`.

    The mesh is the mesh of the saved config, or a mesh of one rank if this run has one rank; `changes` may override both.
    Raises ValueError for an invalid checkpoint, or for settings that do not fit the number of ranks."""
    found = read_manifest(path, other_weights)
    alone = [(f"mesh.{axis}", "1") for axis in AXES_WITH_CP] if world_size() == 1 else []
    settled = [("train.compile", "false"), ("train.checkpointing", "none"), ("train.cuda_graph", "false")]
    config = from_text(found["config"], f"{path}'s config", [*settled, *alone, *changes])
    sizes = config.mesh
    mesh = dlp.build_mesh(dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, cp=sizes.cp, tp=sizes.tp)
    chosen = [name.removeprefix("groups.").removesuffix(".recipe") for name, _ in changes if name.endswith(".recipe")]
    return fill(path, config, mesh, chosen)


def fill(path: Path, config: Config, mesh: DeviceMesh, chosen: Collection[str] = ()) -> Trained:
    """Build the model of `config` on a mesh, and load weights and recipe state from the checkpoint `path`.

    chosen: layer groups whose recipes differ from the training on request; recipe changes of their layers during the training
    are not repeated.
    Raises CheckpointError if a recipe uses delayed scales that the checkpoint lacks."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    model, plan, batch = parallel_model(config, mesh)
    config.architecture.allocate(model, device)
    opened, remarks = weights.load(path, model, config.architecture.settings)
    deciding = deciding_groups([group for group in config.groups if group.recipe is not None], model, plan)
    unchanged = [layer for layer, group in deciding.items() if group.name in chosen]
    remarks += weights.load_recipes(path, model, opened, recipe_files(config), unchanged)
    if new := sorted(without_amax(model)):
        raise CheckpointError(
            f"{path} has none of {len(new)} delayed scales ({new[0]}, ...), and scales of 1 would change the model; "
            f"use the recipes of the training, or --recipe fp8_current"
        )
    model.requires_grad_(False)
    return Trained(config, model, mesh, device, ParallelDims.from_mesh(mesh), batch, opened, remarks)


def quantized(trained: Trained, recipe: str | None, mode: str, calibrate: Callable[[], object]) -> Trained:
    """Freeze the linears in blocks (`dlp.freeze`) if `recipe` is not None, append a remark on their size, and return `trained`.

    `calibrate` runs the model on data, from which static scales are computed; used only if mode is "static". Raises ValueError
    if the recipe does not support the mode, or if FSDP shards the weights."""
    if recipe is None:
        return trained
    if mode == "static":
        with dlp.calibrate(trained.model, BLOCKS):
            calibrate()
    names = dlp.freeze(trained.model, BLOCKS, recipe, mode)  # type: ignore[arg-type]
    cores = {module.core: None for name, module in trained.model.named_modules() if name in names}
    weights = [weight for core in cores for weight in core.weights]
    codes = sum(part.nbytes for weight in weights for part in weight.parts)
    values = sum(2 * local_values(weight.parameter).numel() for weight in weights)
    trained.remarks.append(
        f"quantized: {len(names)} linears, {recipe}, {mode}: {codes / 1e6:.3f} MB per rank instead of "
        f"{values / 1e6:.3f} MB in bf16"
    )
    return trained


def check_tokens(config: Config, name: str, tokens: Iterable[int]) -> None:
    """Raise ConfigError if a token of the text `name` is outside of the vocabulary of the model."""
    largest, vocabulary = max(tokens, default=0), config.architecture.vocab
    if largest >= vocabulary:
        raise ConfigError(
            f"{name}: token {largest} is outside of the vocabulary of the model, [model] vocab = {vocabulary}; give the "
            f"tokenizer of the training with --tokenizer"
        )


def check_length(config: Config, tokens: int) -> None:
    """Raise ConfigError if `tokens` exceeds the sliding window of the model, or for a model of transformers."""
    window = config.family.sliding_window or tokens
    if tokens > window:
        raise ConfigError(f"{tokens} tokens are more than [model] sliding_window = {window}: ask for fewer")
