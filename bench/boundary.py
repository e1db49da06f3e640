"""Time of the step boundary for casting all weights of a model on one GPU: batched, and one by one.

    python -m bench.boundary [--recipes fp8_current] [--blocks 4] [--json FILE]

The weights are those of Llama blocks with the shapes of the 8B model; four blocks have 28 weights with 872 million
parameters. Weights are stored in bf16 or fp32 (column `held`). fp32 weights are rounded to bf16 before the cast, since
activations are bf16.

    device     median milliseconds of `end_step` on the device, which another kernel keeps busy until all launches are queued
    host       milliseconds in which the host queues the launches of `end_step`
    alone      the time in the column before, if casts are launched weight by weight
    TB/s       bytes of all weights, read once, and of all operands, written once, divided by `device`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import nn

import dlp
from bench.files import add_files, write_files
from bench.linear_subjects import RECIPES, Run
from bench.quantize import host_us
from dlp.kernels import loader
from dlp.kernels.timing import device_ms
from dlp.parallel.casts import make_casts
from dlp.parallel.linear.state import cores
from dlp.parallel.model.boundary import end_step
from dlp.parallel.model.session import session_of
from dlp.parallel.weight.base import Values

# (in_features, out_features of each sibling) of the linears of a block
LAYERS = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COUNT, ROUNDS = 4, 5


@dataclass(frozen=True)
class Line:
    """One line of the table.

    held             dtype of the stored weights, a key of DTYPES
    device, host     milliseconds of `end_step` on the device and on the host
    ..._alone        milliseconds of the same casts, launched weight by weight
    tb_s             TB/s of `end_step` on the device
    """

    recipe: str
    held: str
    device: float
    device_alone: float
    host: float
    host_alone: float
    tb_s: float


def model_of(recipe: str, held: str, blocks: int, layers: Sequence[tuple[int, tuple[int, ...]]] = LAYERS,
             device: str = "cuda") -> nn.Sequential:  # fmt: skip
    """Build linears, run each once, and run a first step boundary, which casts their weights.

    Args:
        recipe: name of a recipe.
        held: dtype of the weights, a key of DTYPES.
        blocks: number of copies of `layers`.
        layers: (in_features, out_features of each sibling) of each linear.
        device: device type.
    """
    model = nn.Sequential(
        *(
            dlp.Linear(k, out, recipe=recipe, device=device, dtype=DTYPES[held])
            for _ in range(blocks)
            for k, out in layers
        )
    )
    dlp.attach(model, torch.optim.SGD(model.parameters()))
    for layer, (k, _) in zip(model, [*layers] * blocks, strict=True):
        layer(torch.randn(128, k, device=device).bfloat16())
    end_step(model)
    return model


def boundary_alone(model: nn.Module) -> Run:
    """Return a function that runs the step boundary, and casts weights one by one."""
    runtime, kept = session_of(model), {core.weights: Values() for core in cores(model)}

    def run() -> None:
        runtime.end_step()
        for weights, values in kept.items():
            wanted = [(weight, weight.casts(values)) for weight in weights]
            values.renew()
            for weight, casts in wanted:
                weight.take(make_casts(casts))

    return run


def nbytes(model: nn.Module) -> int:
    """Return the number of bytes of all weights and their operands."""
    parts = [part for core in cores(model) for weight in core.weights for part in weight.parts]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *parts))


def measure(recipe: str, held: str, blocks: int) -> Line:
    model = model_of(recipe, held, blocks)
    together, alone = partial(end_step, model), boundary_alone(model)
    with torch.no_grad():
        device, device_alone = (device_ms(run, COUNT) for run in (together, alone))
        host, host_alone = (host_us(run, COUNT, ROUNDS) / 1e3 for run in (together, alone))
    return Line(recipe, held, device, device_alone, host, host_alone, nbytes(model) / device / 1e9)


def show(line: Line) -> None:
    print(f"{line.recipe:12} {line.held:5} {line.device:8.3f} {line.device_alone:8.3f} {line.host:8.3f} "
          f"{line.host_alone:8.3f} {line.tb_s:6.2f}", flush=True)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.boundary", description=__doc__.split("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=[recipe for recipe in RECIPES if recipe != "bf16"])
    parser.add_argument("--blocks", type=int, default=4)
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if code := loader.load_or_explain():
        return code
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {7 * options.blocks} weights")
    print(f"{'recipe':12} {'held':5} {'device':>8} {'alone':>8} {'host':>8} {'alone':>8} {'TB/s':>6}")
    lines = []
    for recipe in options.recipes:
        for held in DTYPES:
            lines.append(measure(recipe, held, options.blocks))
            show(lines[-1])
            torch.cuda.empty_cache()
    write_files(options, [asdict(line) for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
