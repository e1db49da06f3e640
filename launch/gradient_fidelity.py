"""How faithful each recipe's gradients are at one checkpoint: same weights, same batches, compared with bf16.

    python -m launch.gradient_fidelity [CONFIG] [--section.key value ...]
    torchrun --nproc-per-node N -m launch.gradient_fidelity ...

The model is trained as the config says, launch/configs/fidelity.toml by default, or taken from `--checkpoint.resume PATH`.
Then every recipe gets all linears of the blocks, and the gradient of their weights, over `--batches` batches, is compared
with bf16's: relative error |g - g0| / |g0|, cosine, gain <g, g0> / <g0, g0>, and the change of the loss. A short training run
cannot tell recipes apart, its loss depends more on the seed; these numbers can, and they notice a bug. To prove it there
are negative controls: nibbles swapped, and the scales of dy off by one in the exponent. GATES are checked, and the exit
code is 1 if one is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import dlp
from dlp.comm.mesh import shutdown
from dlp.parallel.runtime import runtime_of
from dlp.quant import recipe as recipes
from dlp.quant.quantizer import Wrapped
from dlp.quant.recipe import OPERANDS, Operand, Recipe
from dlp.quant.tensor import QuantizedTensor
from launch import overrides
from launch.config import Config, command_line
from launch.sections import SCHEMA
from launch.stop import StopFlag, refuse
from launch.train import make_mesh, start
from launch.trainer import Trainer

LAYERS = "layers.**"
EIGHT_BIT = (0.025, 0.055)
GATES = {name: EIGHT_BIT for name in ("fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_block", "mxfp8")} | {
    "nvfp4": (0.09, 0.16)
}


@dataclass(frozen=True)
class Corrupted(Wrapped):
    """A quantizer whose casts are spoiled: what a bug looks like."""

    spoil: Callable[[QuantizedTensor], QuantizedTensor]

    def cast(self, x: Tensor, amax: Tensor | None, **more: Any) -> QuantizedTensor:
        return self.spoil(self.inner.cast(x, amax, **more))


def double_scale(q: QuantizedTensor) -> QuantizedTensor:
    """The scale of the values off by one in the exponent."""
    off = {"scale_inv": lambda part: part * 2, "amax": lambda part: part * 2, "scale_e8m0": lambda part: part + 1}
    parts = [
        off.get(part.name, lambda tensor: tensor)(tensor) for part, tensor in zip(q.format.parts, q.parts, strict=True)
    ]
    return QuantizedTensor(q.format, tuple(parts))


def swap_nibbles(q: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(q.format, ((q.payload >> 4) | (q.payload << 4), *q.parts[1:]))


def spoiled(recipe: Recipe, spoil: Callable[[QuantizedTensor], QuantizedTensor], operands: tuple[str, ...]) -> Recipe:
    changes: dict[str, Any] = {}
    for name in operands:
        operand: Operand = getattr(recipe, name)
        changes[name] = Operand(Corrupted(operand.rowwise, spoil), Corrupted(operand.columnwise, spoil))
    return replace(recipe, **changes)


def rows() -> Iterator[tuple[str, str, Recipe]]:
    """(what is printed, the recipe it belongs to, how it is run) of every recipe and control."""
    for name in recipes.names():
        if name in GATES:
            recipe = recipes.load(name)
            yield name, name, recipe
            yield f"{name}, dy scale off by one exponent", name, spoiled(recipe, double_scale, ("dy",))
    nvfp4 = recipes.load("nvfp4")
    yield "nvfp4, nibbles swapped", "nvfp4", spoiled(nvfp4, swap_nibbles, OPERANDS)


@dataclass(frozen=True)
class Fidelity:
    """Of one row, against bf16. `worst`: the largest error of one layer, and its name."""

    name: str
    loss_change: float
    error: float
    cosine: float
    gain: float
    worst: tuple[float, str]


def gradients(trainer: Trainer, batches: int) -> tuple[float, dict[str, Tensor]]:
    """Mean loss, and the weight gradients of the blocks' linears summed over batches, in fp64, by layer."""
    model, total = trainer.built.model, 0.0
    for step in range(batches):
        for tokens, targets in trainer.batches(trainer.train_data, 10**6 + step):
            loss = dlp.cross_entropy(model(tokens), targets, trainer.built.mesh) / targets.numel()
            loss.backward()
            total += loss.item() / batches
    found = {}
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.dim() == 2:
            grad = parameter.grad
            assert grad is not None
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            found[name.removesuffix(".weight")] = whole.double()
    trainer.built.optimizer.zero_grad(set_to_none=True)
    return total, found


def under(trainer: Trainer, recipe: Any, batches: int) -> tuple[float, dict[str, Tensor]]:
    """`gradients` under a recipe; delayed scales have seen the same batches before, in high precision."""
    model = trainer.built.model
    dlp.set_recipe(model, LAYERS, recipe)
    if runtime_of(model).has_slots():
        with dlp.autocast(enabled=False, calibrating=True):
            gradients(trainer, batches)
    dlp.end_step(model)
    return gradients(trainer, batches)


def compare(name: str, of: tuple[float, dict[str, Tensor]], reference: tuple[float, dict[str, Tensor]]) -> Fidelity:
    (loss, grads), (loss_0, grads_0) = of, reference
    g, g_0 = (torch.cat([grad.flatten() for grad in found.values()]) for found in (grads, grads_0))
    worst = max((((grads[layer] - g0).norm() / g0.norm()).item(), layer) for layer, g0 in grads_0.items())
    return Fidelity(
        name, loss / loss_0 - 1, ((g - g_0).norm() / g_0.norm()).item(), torch.cosine_similarity(g, g_0, dim=0).item(),
        (g @ g_0 / (g_0 @ g_0)).item(), worst,
    )  # fmt: skip


def table(found: list[Fidelity]) -> str:
    """As Markdown."""
    lines = ["| recipe | loss change | gradient error | worst layer | cosine | gain |", "|---|---|---|---|---|---|"]
    for row in found:
        worst = f"{row.worst[0]:.1%} {row.worst[1].removeprefix('model.')}"
        lines.append(
            f"| {row.name} | {row.loss_change:+.3%} | {row.error:.1%} | {worst} | {row.cosine:.4f} | {row.gain:.3f} |"
        )
    return "\n".join(lines)


def missed(found: list[Fidelity]) -> list[str]:
    """The gates that are not held, a sentence each."""
    errors, sentences = {row.name: row.error for row in found}, []
    for name, (low, high) in GATES.items():
        if not low <= errors[name] <= high:
            sentences.append(f"{name}: gradient error {errors[name]:.2%} is not within {low:.1%} and {high:.1%}")
        for control in (row for row in found if row.name.startswith(f"{name}, ")):
            if not control.error >= 2 * errors[name]:
                sentences.append(f"{control.name}: {control.error:.2%} is not twice the {errors[name]:.2%} of {name}")
    return sentences


def measure(config: Config, batches: int) -> list[Fidelity]:
    """Every row at the end of the run that `config` describes; what is done of it already is not repeated."""
    trainer, done = start(config, make_mesh(config), StopFlag())
    if done < config.train.steps:
        trainer.train(done)
    reference = under(trainer, "bf16", batches)
    found = []
    for name, _, recipe in rows():
        found.append(compare(name, under(trainer, recipe, batches), reference))
        trainer.run.say(table(found[-1:]).splitlines()[-1])
    return found


def main() -> None:
    description = "Compares every recipe's gradients with bf16's at one checkpoint."
    parser = overrides.make_parser("launch.gradient_fidelity", description, "fidelity", SCHEMA)
    parser.add_argument("--batches", type=int, default=16, help="global batches compared")
    try:
        known, config = command_line(parser, sys.argv[1:])
        found = measure(config, known.batches)
    except ValueError as error:
        refuse(str(error))
    problems = missed(found)
    print(table(found), *problems, sep="\n")
    shutdown()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
