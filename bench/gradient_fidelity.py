"""Error of each recipe's gradients at one checkpoint, and their distance from a fake quantization by the recipe's definition.

    python -m bench.gradient_fidelity [CONFIG] [--section.key value ...]

The model is trained as the config says, launch/configs/fidelity.toml by default, or loaded from `--checkpoint.resume PATH`.
Then all linears of the blocks run under each recipe, and the gradient g of their weights over `--batches` batches is compared
with the bf16 gradient g0: relative error |g - g0| / |g0|, cosine, gain <g, g0> / <g0, g0>, and the change of the loss.

The error depends on the checkpoint. Therefore g is also compared with the gradient f of an independent fake quantization of the
same model on the same batches (`bench.fake_quantization`): `apart` = |g - f| / |f - g0|. This ratio must be at most LIMIT for
recipes, and larger for negative controls, which are recipes with a planted error. The exit code is 1 if one of these conditions
fails. With native GEMMs the limit is UNITS instead, because tensor cores keep about 14 bits of a sum, and such a small
difference can give an activation another code. The program runs on one rank, since a fake linear needs unsharded weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import dlp
from bench.fake_quantization import RECIPES, Amaxes, faked, hybrid, recording
from dlp.comm.mesh import shutdown, world_size
from dlp.kernels.table import device_kind
from dlp.parallel.model.session import session_of
from dlp.quant import recipe as recipes
from dlp.quant.gemm import support
from dlp.quant.quantizer import Wrapped
from dlp.quant.recipe import GEMMS, OPERANDS, Operand, Recipe
from dlp.quant.tensor import QuantizedTensor
from launch.config.groups import SCHEMA
from launch.config.run_config import Config, command_line, count
from launch.ranks.process_exit import StopFlag, refuse
from launch.settings import overrides
from launch.train import make_mesh, start
from launch.training.trainer import Trainer

LAYERS = "layers.**"
LIMIT, UNITS = 0.02, 0.2
JUDGED = ("fp8_delayed", *RECIPES)


@dataclass(frozen=True)
class Corrupted(Wrapped):
    """Quantizer whose casts are corrupted by `spoil`, as by a bug."""

    spoil: Callable[[QuantizedTensor], QuantizedTensor]

    def cast(self, x: Tensor, amax: Tensor | None, **more: Any) -> QuantizedTensor:
        return self.spoil(self.inner.cast(x, amax, **more))


def scaled(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[QuantizedTensor], QuantizedTensor]:
    """Return a function that applies `change` to the part named `part` of a quantized tensor, if the tensor has this part."""

    def spoil(q: QuantizedTensor) -> QuantizedTensor:
        changes = {named.name: change if named.name == part else lambda tensor: tensor for named in q.format.parts}
        parts = [changes[named.name](tensor) for named, tensor in zip(q.format.parts, q.parts, strict=True)]
        return QuantizedTensor(q.format, tuple(parts))

    return spoil


def scale_part(recipe: Recipe) -> str:
    """Return the name of the part that scales all values of a quantized weight."""
    names = {part.name for part in recipe.w.rowwise.format.parts}
    (found,) = names & {"scale_inv", "amax", "scale_e8m0"}
    return found


def double_scale(recipe: Recipe) -> Callable[[QuantizedTensor], QuantizedTensor]:
    """Return a function that doubles the scales of a quantized tensor."""
    part = scale_part(recipe)
    return scaled(part, (lambda tensor: tensor + 1) if part == "scale_e8m0" else (lambda tensor: tensor * 2))


def swap_nibbles(q: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(q.format, ((q.payload >> 4) | (q.payload << 4), *q.parts[1:]))


def spoiled(recipe: Recipe, spoil: Callable[[QuantizedTensor], QuantizedTensor], operands: tuple[str, ...]) -> Recipe:
    changes: dict[str, Any] = {}
    for name in operands:
        operand: Operand = getattr(recipe, name)
        changes[name] = Operand(Corrupted(operand.rowwise, spoil), Corrupted(operand.columnwise, spoil))
    return replace(recipe, **changes)


def rows() -> Iterator[tuple[str, Recipe]]:
    """Yield the name of each row, "RECIPE" or "RECIPE, CONTROL", and its recipe; a recipe precedes its negative controls."""
    for name in JUDGED:
        recipe = recipes.load(name)
        yield name, recipe
        yield f"{name}, dy scale off by one exponent", spoiled(recipe, double_scale(recipe), ("dy",))
        if scale_part(recipe) != "scale_e8m0":  # E8M0 scales are powers of two and cannot change by 1 %
            slightly = scaled(scale_part(recipe), lambda tensor: tensor * 1.01)
            yield f"{name}, w scale off by 1 %", spoiled(recipe, slightly, ("w",))
    nvfp4 = recipes.load("nvfp4")
    yield "nvfp4, nibbles swapped", spoiled(nvfp4, swap_nibbles, OPERANDS)
    yield "nvfp4, dy rounded to nearest", recipes.load("nvfp4", disable_stochastic_rounding=True)
    yield "nvfp4, no Hadamard transform", recipes.load("nvfp4", disable_rht=True)


@dataclass(frozen=True)
class Fidelity:
    """Comparison of the gradients of one row with bf16 and with the fake quantization.

    name           "RECIPE", or "RECIPE, CONTROL" for a negative control
    loss_change    relative change of the loss
    error          relative error of all gradients
    cosine, gain   cosine and gain of all gradients
    worst          largest relative error of one layer, and the name of the layer
    apart          distance from the fake quantization, relative to the error of the fake quantization
    limit          maximum of `apart` for a recipe, and minimum for a negative control
    """

    name: str
    loss_change: float
    error: float
    cosine: float
    gain: float
    worst: tuple[float, str]
    apart: float
    limit: float = LIMIT


Found = tuple[float, dict[str, Tensor]]  # mean loss, and gradients by layer


def gradients(trainer: Trainer, batches: int) -> Found:
    """Return the mean loss over batches, and the weight gradients of the blocks' linears by layer, summed over batches, in
    fp64. Random bits are the same in each call."""
    model, total = trainer.built.model, 0.0
    session_of(model).counter.zero_()
    for step in range(batches):
        for batch in trainer.batches(trainer.train_data, 10**6 + step):
            loss = trainer.loss(batch) / batch[1].numel()
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


def under(trainer: Trainer, recipe: Any, batches: int) -> Found:
    """Return `gradients` under a recipe. Delayed scales are calibrated on the same batches in high precision."""
    model = trainer.built.model
    dlp.set_recipe(model, LAYERS, recipe)
    if session_of(model).has_slots():
        with dlp.autocast(enabled=False, calibrating=True):
            gradients(trainer, batches)
    dlp.end_step(model)
    return gradients(trainer, batches)


def fake(trainer: Trainer, name: str, batches: int) -> Found:
    """Return `gradients` of the fake quantization of a recipe. Delayed scales are computed on the same batches in high
    precision."""
    model, amaxes = trainer.built.model, Amaxes()
    dlp.set_recipe(model, LAYERS, "bf16")
    if name == "fp8_delayed":
        with faked(model, recording(amaxes), in_a_block):
            gradients(trainer, batches)
    with faked(model, hybrid(amaxes) if name == "fp8_delayed" else RECIPES[name], in_a_block):
        return gradients(trainer, batches)


def in_a_block(name: str) -> bool:
    return ".layers." in name


def limit_of(recipe: Recipe, device: str) -> float:
    """Return the limit of `apart` for a recipe on `device`, one of `dlp.quant.gemm.DEVICES`."""
    pairs = [recipe.operands(which) for which in GEMMS]
    return UNITS if any(support(a.format, b.format, device).status == "native" for a, b in pairs) else LIMIT


def compare(name: str, of: Found, reference: Found, judge: Found, limit: float) -> Fidelity:
    (loss, grads), (loss_0, grads_0) = of, reference
    g, g_0, f = (torch.cat([grad.flatten() for grad in found.values()]) for found in (grads, grads_0, judge[1]))
    worst = max((((grads[layer] - g0).norm() / g0.norm()).item(), layer) for layer, g0 in grads_0.items())
    return Fidelity(
        name, loss / loss_0 - 1, ((g - g_0).norm() / g_0.norm()).item(), torch.cosine_similarity(g, g_0, dim=0).item(),
        (g @ g_0 / (g_0 @ g_0)).item(), worst, ((g - f).norm() / (f - g_0).norm()).item(), limit,
    )  # fmt: skip


def table(found: list[Fidelity]) -> str:
    """Format as a Markdown table."""
    lines = [
        "| recipe | loss change | gradient error | worst layer | cosine | gain | apart |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        worst = f"{row.worst[0]:.1%} {row.worst[1].removeprefix('model.')}"
        lines.append(
            f"| {row.name} | {row.loss_change:+.3%} | {row.error:.1%} | {worst} | {row.cosine:.4f} | {row.gain:.3f} | "
            f"{row.apart:.2%} |"
        )
    return "\n".join(lines)


def missed(found: list[Fidelity]) -> list[str]:
    """Return a message for each violated condition."""
    sentences = []
    for row in found:
        if "," in row.name and not row.apart > row.limit:
            sentences.append(
                f"{row.name}: {row.apart:.2%} of the error apart from the fake quantization: the control was not detected"
            )
        elif "," not in row.name and not row.apart <= row.limit:
            sentences.append(
                f"{row.name}: {row.apart:.2%} of the error apart from the fake quantization, more than {row.limit:.0%}"
            )
    return sentences


def judged(trainer: Trainer, batches: int) -> Iterator[Fidelity]:
    """Compare all rows at the current weights."""
    reference, device = under(trainer, "bf16", batches), device_kind(trainer.built.device.type)
    judges: dict[str, Found] = {}
    for name, recipe in rows():
        of = under(trainer, recipe, batches)
        kind = name.partition(",")[0]
        judges[kind] = judges.get(kind) or fake(trainer, kind, batches)
        yield compare(name, of, reference, judges[kind], limit_of(recipe, device))


def measure(config: Config, batches: int) -> list[Fidelity]:
    """Train the model that `config` describes, or load it, and compare all rows at its last step."""
    if world_size() > 1:
        raise ValueError(f"bench.gradient_fidelity needs one rank; got {world_size()}: start it without torchrun")
    if config.family.fused:
        raise ValueError(
            "fake quantization replaces separate linears, and this model is fused; set --model.fused=false"
        )
    trainer, done = start(config, make_mesh(config), StopFlag())
    if done < config.train.steps:
        trainer.train(done)
    found = []
    for row in judged(trainer, batches):
        found.append(row)
        trainer.run.say(table([row]).splitlines()[-1])
    return found


def main() -> None:
    description = (
        "Compares every recipe's gradients with bf16's, and with a fake quantization of it, at one checkpoint."
    )
    parser = overrides.make_parser("bench.gradient_fidelity", description, "fidelity", SCHEMA)
    parser.add_argument("--batches", type=count, default=4, help="global batches compared")
    try:
        options, config = command_line(parser, sys.argv[1:])
        found = measure(config, options.batches)
    except ValueError as error:
        refuse(str(error))
    problems = missed(found)
    print(table(found), *problems, sep="\n")
    shutdown()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
