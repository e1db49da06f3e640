"""Model of a checkpoint on these ranks, without the training state, for evaluation and generation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

import dlp
from dlp.comm.mesh import AXES, ParallelDims, world_size
from dlp.parallel.weight.local import local_values
from launch.checkpoint import save_load
from launch.checkpoint.manifest import CheckpointError, other_weights, read_manifest
from launch.config.rules import Batch
from launch.config.run_config import Config, count, from_text, recipe_files
from launch.models.modules import Llama
from launch.settings import overrides
from launch.settings.schema import ConfigError
from launch.training.build import parallel_model
from launch.training.initial_scales import without_amax
from launch.weights import weights_only as weights

MODES = ("weight_only", "dynamic", "static")  # of `dlp.freeze`
BLOCKS = "layers.**"
Changes = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Trained:
    """A model that is not trained further, `dims.dp_rank` of `batch.dp_size`, and what its checkpoint says. remarks: what is
    to be told of it."""

    config: Config
    model: Llama
    mesh: DeviceMesh
    device: torch.device
    dims: ParallelDims
    batch: Batch
    opened: save_load.Opened
    remarks: list[str]


def command_line(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Changes]:
    """A program's own options, those of `quantized`, and settings in place of those that the checkpoint was trained with."""
    parser.add_argument(
        "--quantize", metavar="RECIPE", help="hold the linears of all blocks as codes of this recipe only"
    )
    parser.add_argument("--mode", choices=MODES, help=f"what quantizing makes of x [{MODES[0]}]")
    parser.add_argument(
        "--calibration", type=count, metavar="N",
        help="--mode static: so many batches of the training data give x its scales [8]",
    )  # fmt: skip
    parser.epilog = "Settings of its config are changed as for a run: --recipe bf16, --train.sequence 512, --mesh.tp 2."
    rest, changes = overrides.split(arguments)
    options = parser.parse_args(rest)
    if options.mode and not options.quantize:
        parser.error(f"--mode {options.mode} says how weights are quantized, and nothing is: add --quantize RECIPE")
    if options.calibration and options.mode != "static":
        parser.error(f"--calibration {options.calibration} is for static scales: add --quantize RECIPE --mode static")
    options.mode, options.calibration = options.mode or MODES[0], options.calibration or 8
    return options, changes


def open_trained(path: Path, changes: Changes) -> Trained:
    """On all ranks of this run: the checkpoint's config, `changes`, and its weights. A single rank has a mesh of one, whatever
    the run had. Raises ValueError for what does not fit."""
    found = read_manifest(path, other_weights)
    alone = [(f"mesh.{axis}", "1") for axis in AXES] if world_size() == 1 else []
    settled = [("train.compile", "false"), ("train.checkpointing", "none"), ("train.cuda_graph", "false")]
    config = from_text(found["config"], f"{path}'s config", [*settled, *alone, *changes])
    sizes = config.mesh
    mesh = dlp.build_mesh(dp_replicate=sizes.dp_replicate, dp_shard=sizes.dp_shard, tp=sizes.tp)
    return fill(path, config, mesh)


def fill(path: Path, config: Config, mesh: DeviceMesh) -> Trained:
    """A model on a mesh, with the weights and the recipe state of a checkpoint. CheckpointError where that lacks delayed
    scales."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    model, _, batch = parallel_model(config, mesh)
    model.to_empty(device=device)
    opened, remarks = weights.load(path, model, weights.settings_of(config.model))
    remarks += weights.load_recipes(path, model, opened, recipe_files(config))
    if new := sorted(without_amax(model)):
        raise CheckpointError(
            f"{path} has none of {len(new)} delayed scales ({new[0]}, ...), and cast by scales of 1 a model is another; use "
            f"the recipes that it was trained in, or --recipe fp8_current"
        )
    model.requires_grad_(False)
    return Trained(config, model, mesh, device, ParallelDims.from_mesh(mesh), batch, opened, remarks)


def quantized(trained: Trained, recipe: str | None, mode: str, calibrate: Callable[[], object]) -> Trained:
    """The same, its blocks frozen (`dlp.freeze`), where a recipe is asked for; its remarks say how large they are. `calibrate`
    runs the model, for scales that are static. Raises ValueError for a recipe that does not serve the mode, and for weights
    that FSDP shards."""
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
        f"quantized: {len(names)} linears, {recipe}, {mode}: {codes / 1e6:.3f} MB a rank, of {values / 1e6:.3f} MB in bf16"
    )
    return trained


def check_length(config: Config, tokens: int) -> None:
    """ConfigError for more tokens than attention of the model may see."""
    window = config.model.sliding_window or tokens
    if tokens > window:
        raise ConfigError(f"{tokens} tokens are more than [model] sliding_window = {window}: ask for fewer")
