"""Convert the weights of a Hugging Face folder into a checkpoint that a run can start from, and back, one tensor at a time.

    python -m launch.convert_hf import FOLDER CHECKPOINT              safetensors and config.json -> checkpoint, config.toml
    python -m launch.convert_hf export CHECKPOINT FOLDER [--dtype bf16]     checkpoint -> folder for `transformers`
    python -m launch.convert_hf export CHECKPOINT FOLDER --codes            checkpoint -> quantized weights, for vLLM

Parameters have the same names in checkpoint and folder. A checkpoint loads on any mesh, and keeps the dtype of each imported
tensor; an exported folder has one dtype, by default the dtype of the checkpoint. A tensor that is missing, has a wrong shape,
or belongs to no parameter is an error that names the tensor, raised before anything is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from dlp.flows.compressed import quantization_config
from launch.common.atomic_io import new_folder
from launch.common.program import run_program
from launch.common.units import said_bytes
from launch.config.run_config import count, from_text
from launch.models.families import EMBEDDING, HEAD, UNREAD
from launch.models.modules import Llama
from launch.models.rope_scaling import ORIGINAL
from launch.models.settings import Model
from launch.settings.schema import toml_lines
from launch.training.export_tensors import Source
from launch.training.trained_codes import coded_linears
from launch.weights import safetensors_folder, weights_only
from launch.weights.hf_config import CONFIG, config_json, read_config

TOKENIZER = "tokenizer.json"
FILE_BYTES = 4 << 30
NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}

START = """\
# Made from {folder}: set data, steps and learning rate, then
# torchrun --nproc-per-node 8 -m launch.train {out}/config.toml

[mesh]
tp = 1
sequence_parallel = false

{model}

[data]
path = "builtin:stdlib"           # or a folder made with the model's tokenizer: launch.data prepare --tokenizer

[train]
steps = 1000
micro_batch = 1
global_batch = 8
sequence = {sequence}
lr = 1e-5
warmup = 50
init_from = {init_from}

[run]
dir = {run}

[[groups]]
name = "default"
match = ["layers.**"]
recipe = "fp8_current"

[[groups]]
name = "edges"
match = {edges}
recipe = "bf16"
"""


def parameters_of(model: Model) -> dict[str, Tensor]:
    """Return all parameters of the model by name, on the meta device; a head that is tied to the embedding has no entry."""
    with torch.device("meta"):
        return {name: parameter.detach() for name, parameter in Llama(model).named_parameters()}


def import_folder(folder: Path, out: Path) -> str:
    """Convert the Hugging Face folder `folder` into the checkpoint `out`, and return one sentence about the result."""
    model, config = read_config(folder)
    found, tensors = safetensors_folder.entries(folder), {}
    for name, parameter in parameters_of(model).items():
        entry = found.get(name)
        if entry is None:
            raise ValueError(
                f"{folder}: no tensor {name} in the files, which a {model.family} with this {CONFIG} needs; "
                f"use the complete folder of one model, weights and {CONFIG}"
            )
        if entry.shape != tuple(parameter.shape):
            raise ValueError(
                f"{entry.file}: {name} is {list(entry.shape)}, and {CONFIG} makes it {list(parameter.shape)}"
            )
        tensors[name] = parameter.to(entry.dtype)
    used = tensors.keys() | ({HEAD} if model.tie_embeddings else set())
    if over := sorted(name for name in found.keys() - used if not name.endswith(UNREAD)):
        raise ValueError(
            f"{found[over[0]].file}: {over[0]} is not a tensor of {model.family} in dlp; choose a folder of a "
            f"supported family, and merge adapters into the weights first"
        )
    _check_tied(model, found)
    text = start_config(model, folder, out, config)
    digest = sha256(folder / TOKENIZER)
    with progress("import", tensors) as bar:

        def read(name: str) -> Tensor:
            tensor = finite(found[name], name)
            bar.update(tensor.nbytes)
            return tensor

        size = weights_only.write(out, model, tensors, read, config=text, tokenizer=digest)
    return (
        f"{len(tensors)} tensors, {said_bytes(size)}, of a {model.family} in {out}; {out}/config.toml starts from them"
    )


def progress(what: str, tensors: Mapping[str, Tensor]) -> tqdm[NoReturn]:
    """Return a progress bar of bytes, which is shown only on a terminal."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=None)


def _check_tied(model: Model, found: Mapping[str, safetensors_folder.Entry]) -> None:
    """Raise ValueError if config.json ties the head, but the folder has a head that differs from the embedding and would be
    lost."""
    if not (model.tie_embeddings and HEAD in found):
        return
    head, embedding = (safetensors_folder.read(found[name], name) for name in (HEAD, EMBEDDING))
    if not torch.equal(head, embedding):
        raise ValueError(
            f"{found[HEAD].file}: {HEAD} is not {EMBEDDING}, but {CONFIG} says tie_word_embeddings; set that to false, or "
            f"leave the tensor out"
        )


def finite(entry: safetensors_folder.Entry, name: str) -> Tensor:
    """Read the tensor `name` from a safetensors file. Raises ValueError if it holds a NaN or Inf, since no run can start from
    it."""
    tensor = safetensors_folder.read(entry, name)
    bad = tensor.numel() - int(tensor.isfinite().sum())
    if bad:
        raise ValueError(
            f"{entry.file}: {bad} of {tensor.numel()} elements of {name} are NaN or Inf; get the file again"
        )
    return tensor


def start_config(model: Model, folder: Path, out: Path, config: dict[str, object]) -> str:
    """Return the text of config.toml for a run that starts from the checkpoint `out`. `config`: parsed config.json."""
    positions = config.get("max_position_embeddings")
    sequence = min(2048, positions if isinstance(positions, int) else 2048, model.sliding_window or 2048)
    shape = "\n".join(["[model]", *toml_lines(model)])
    edges = ["layers.0.**", "layers.-1.**"] * (model.layers > 2) + [
        "lm_head"
    ]  # with 1 or 2 blocks, group default would match no layer
    paths = {"init_from": json.dumps(os.fspath(out.resolve())), "run": json.dumps(f"runs/{out.name}")}
    return START.format(folder=folder, out=out, sequence=sequence, model=shape, edges=json.dumps(edges), **paths)


def sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if the file does not exist."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def export(
    checkpoint: Path, folder: Path, dtype: str | None, positions: int | None, limit: int = FILE_BYTES, *, codes: bool = False
) -> str:  # fmt: skip
    """Write a folder for `transformers`.

    Args:
        checkpoint: A checkpoint of a run, or an imported one.
        folder: The folder to make.
        dtype: Key of `NAMES`; None: the dtype of the checkpoint, or fp32 if its tensors have different dtypes.
        positions: `max_position_embeddings` of config.json; None: see `longest`.
        limit: Largest size of one safetensors file in bytes; the tensors of one file are in memory at once.
        codes: For each linear whose recipe quantizes the weight, write codes and scales (compressed-tensors) instead of values.

    Returns:
        One sentence about the result.
    """
    reader = weights_only.Reader(checkpoint)
    if "model_type" in reader.opened.manifest["model"]:
        return export_pretrained(reader, folder, dtype)
    model = reader.model()
    parameters = parameters_of(model)
    if over := sorted(reader.names() - parameters.keys()):
        tied = " (tied head)" if model.tie_embeddings else ""
        raise ValueError(
            f"{checkpoint}: the checkpoint has a tensor {over[0]}, but the model of its manifest{tied} has no such "
            f"parameter, so the tensor would be lost; use a checkpoint whose files and manifest come from the same run"
        )
    dtype = dtype or _one_dtype(reader.dtypes(parameters))
    coded = coded_linears(reader, model) if codes else {}
    source = Source(reader, parameters, getattr(torch, NAMES[dtype]), coded)
    tensors = source.tensors
    if positions is None:
        positions = longest(model, reader.opened.manifest["config"])
    config = config_json(model, NAMES[dtype], positions)
    if coded:
        schemes = {name: linear.scheme() for name, linear in coded.items()}
        config["quantization_config"] = quantization_config(schemes, source.linears())
    with new_folder(folder) as work, progress("export", tensors) as bar:

        def load(names: Sequence[str]) -> dict[str, Tensor]:
            bar.update(sum(tensors[name].nbytes for name in names))
            return source.load(names)

        safetensors_folder.write(work, tensors, load, limit, source.header)
        (work / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    size = sum(tensor.nbytes for tensor in tensors.values())
    if not coded:
        return f"{len(tensors)} tensors, {said_bytes(size)} of {dtype}, of a {model.family} in {folder}"
    plain = sum(parameter.numel() for parameter in parameters.values()) * getattr(torch, NAMES[dtype]).itemsize
    formats = ", ".join(sorted({linear.quantizer.format.name for linear in coded.values()}))
    return (
        f"{len(coded)} linears as codes of {formats}, {said_bytes(size)} in all, of a {model.family} in {folder}; without "
        f"--codes {said_bytes(plain)} of {dtype}"
    )


def export_pretrained(reader: weights_only.Reader, folder: Path, dtype: str | None) -> str:
    """Export a model of the package transformers with its `save_pretrained`. The complete model must fit in host memory."""
    from dlp.pretrained import allocate, meta_model

    with new_folder(folder) as work:
        (work / CONFIG).write_text(json.dumps(reader.opened.manifest["model"], indent=2) + "\n")
        model = meta_model(work)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        dtype = dtype or _one_dtype(reader.dtypes(parameters))
        allocate(model, "cpu")
        weights_only.fill(
            reader.path, reader.opened, {name: each.detach() for name, each in model.named_parameters()}, no_dist=True
        )
        saved: Any = model.to(getattr(torch, NAMES[dtype]))
        saved.config.dtype = getattr(torch, NAMES[dtype])
        saved.save_pretrained(work)
    size = sum(tensor.nbytes for tensor in saved.parameters())
    return f"{len(parameters)} tensors, {said_bytes(size)} of {dtype}, of a {type(saved).__name__} in {folder}"


def _one_dtype(found: set[torch.dtype]) -> str:
    """Return the key of `NAMES` for the only dtype in `found`; "fp32" if there are several dtypes, or if `NAMES` lacks it."""
    names = {str(each).removeprefix("torch."): each for each in found}
    return next((short for short, name in NAMES.items() if names.keys() == {name}), "fp32")


def longest(model: Model, config: str) -> int:
    """Return the longest context for config.json, in tokens. This is the original context that `rope_scaling` states, times its
    factor; without such an entry, `[train] sequence` of `config`, the text of a config."""
    scaling = model.rope_scaling or {}
    if ORIGINAL in scaling:
        return int(scaling["factor"] * scaling[ORIGINAL])
    return from_text(config, "its config").train.sequence


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="launch.convert_hf", description="Convert weights between Hugging Face folders and checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("import", help="convert a folder of safetensors into a checkpoint")
    reading.add_argument("source", type=Path, metavar="FOLDER", help="folder with config.json and model*.safetensors")
    reading.add_argument("out", type=Path, metavar="CHECKPOINT", help="folder to create")
    writing = commands.add_parser("export", help="convert a checkpoint into a folder of safetensors")
    writing.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint of a run (checkpoints/step-N), or an imported one",
    )
    writing.add_argument("out", type=Path, metavar="FOLDER", help="folder to create")
    writing.add_argument(
        "--dtype", choices=NAMES, help="dtype of all tensors [dtype of the checkpoint; a run saves fp32]"
    )
    writing.add_argument(
        "--positions", type=count, help="longest context stated in config.json, in tokens [context of the training]"
    )
    writing.add_argument(
        "--codes",
        action="store_true",
        help="write weights as codes and scales, the same as in the training forward (compressed-tensors)",
    )
    options = parser.parse_args(arguments)
    if options.out.exists():
        raise ValueError(f"{options.out}: exists already; remove it or choose another folder")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.command == "import":
        print(import_folder(options.source, options.out))
    else:
        print(export(options.source, options.out, options.dtype, options.positions, codes=options.codes))


if __name__ == "__main__":
    run_program(main)
