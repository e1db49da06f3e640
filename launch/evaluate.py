"""Evaluate the perplexity of a checkpoint on prepared data.

    python -m launch.evaluate CHECKPOINT [--data FOLDER] [--split train] [--batches N] [--section.key value ...]

The program also runs under torchrun. The model uses the recipes of its training unless `--recipe` is given. The split is read
once, in batches of `global_batch` sequences of `[train] sequence` tokens; the last sequences are left out if they do not fill a
batch. With `--batches N` the program reads only the first N batches.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from dlp import Context
from dlp.comm.mesh import shutdown
from dlp.parallel.model.embedding import IGNORED
from launch.common.program import run_program
from launch.config.run_config import count
from launch.data.sources import Data, described, open_sources
from launch.data.token_stream import TokenStream
from launch.inference.trained_model import Trained, command_line, open_trained, quantized
from launch.settings.schema import ConfigError
from launch.weights import weights_only


@dataclass(frozen=True)
class Perplexity:
    """Result of an evaluation. loss: mean cross entropy, in nats per token; tokens: number of predicted tokens."""

    loss: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.loss:.4f} nats per token, perplexity {math.exp(self.loss):.3f}, over {self.tokens:,} tokens"


def read_data(trained: Trained, path: Path) -> Data:
    """Open `[data] path` of the config of `trained`. Raises ValueError if the data were prepared with a tokenizer that differs
    from the tokenizer of the training of the checkpoint `path`."""
    config = trained.config
    data = open_sources(config.data.path, config.architecture.vocab, config.data.validation)
    folder = str(data.train[0].path.parent)
    weights_only.check_tokenizer(path, trained.opened.manifest, folder, data.tokenizer)
    return data


@torch.no_grad()
def perplexity(trained: Trained, data: Data, split: str, batches: int | None) -> Perplexity:
    """Return the perplexity of the first `batches` global batches of a split; None: of all complete global batches. The result
    is equal on all ranks."""
    train, batch = trained.config.train, trained.batch
    stream = TokenStream(
        getattr(data, split), split=split, sequence=train.sequence, global_batch=train.global_batch,
        micro_batch=batch.micro, seed=0,
    )  # fmt: skip
    there = stream.num_windows // train.global_batch
    if there == 0 or (batches or 0) > there:
        raise ConfigError(
            f"{data.train[0].path.parent}: the {split} split has {stream.num_windows} sequences of {train.sequence} "
            f"tokens, so "
            f"{there} batches of {train.global_batch}: ask for fewer --batches, or a smaller --train.global_batch"
        )
    context = Context.of(trained.mesh)
    totals = torch.zeros(2, dtype=torch.float64, device=trained.device)
    hidden = None if dist.get_rank() == 0 else True  # None: tqdm shows the bar on a terminal only
    for step in tqdm(range(batches or there), desc=split, unit="batch", disable=hidden):
        for micro in range(batch.num_micro):
            place = (step, micro, trained.dims.dp_rank, batch.dp_size)
            lying = stream.documents(*place) if trained.config.data.reset_attention else ()
            own = map(context.split, stream.batch(*place))
            microbatch = [each.to(trained.device) for each in (*own, *lying)]
            totals[0] += trained.config.architecture.loss(trained.model, microbatch, trained.mesh)
            totals[1] += (microbatch[1] != IGNORED).sum()
    dist.all_reduce(totals)
    loss, tokens = totals.tolist()
    return Perplexity(loss / tokens, round(tokens) // trained.dims.tp)


def as_asked(trained: Trained, options: argparse.Namespace) -> Trained:
    """Quantize the model as `--quantize` and `--mode` of the command line say. Static scales are calibrated on the first
    `--calibration` batches of the training data."""

    def calibrate() -> None:
        perplexity(trained, read_data(trained, options.checkpoint), "train", options.calibration)

    return quantized(trained, options.quantize, options.mode, calibrate)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="launch.evaluate", description="Compute the perplexity of a checkpoint on prepared data."
    )
    parser.add_argument("checkpoint", type=Path, help="checkpoint of a run (checkpoints/step-N), or an imported one")
    parser.add_argument("--data", help="builtin:stdlib or a prepared folder [data of the run]")
    parser.add_argument("--split", choices=("validation", "train"), default="validation")
    parser.add_argument("--batches", type=count, help="number of global batches [the complete split]")
    options, changes = command_line(parser, arguments)
    trained = open_trained(options.checkpoint, [*changes, *[("data.path", options.data)] * bool(options.data)])
    trained = as_asked(trained, options)
    found = perplexity(trained, read_data(trained, options.checkpoint), options.split, options.batches)
    if dist.get_rank() == 0:
        print(*trained.remarks, f"{options.split} of {described(trained.config.data.path)}: {found}", sep="\n")
    shutdown()


if __name__ == "__main__":
    run_program(main)
