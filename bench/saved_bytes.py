"""Bytes that the linears of one Llama block save for backward, by recipe, and relative to bf16.

    python -m bench.saved_bytes [CONFIG] [--section.key value ...]        tiny by default; one sequence, without tp

Saved-tensor hooks count the tensors that autograd saves, each storage once, without parameters and without the operands that
the step boundary casts from parameters. Tensors are fake, so that nothing is allocated or computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlp.parallel.linear.modules import Linear
from dlp.quant import recipe as recipes
from launch.common.program import run_program
from launch.config.run_config import Config, command_line, make_parser
from launch.models.modules import DTYPES
from launch.models.settings import Model

LAYERS = ("q, k, v", "o", "gate, up", "down")


def linears(model: Model, recipe: Any, dtype: torch.dtype) -> dict[str, Linear]:
    """Build the linears of a block; siblings (q, k, v; gate, up) are one linear with several outputs."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sizes: Sequence[tuple[int, Any]] = [
        (model.hidden, (q, kv, kv)), (q, model.hidden), (model.hidden, (model.ffn, model.ffn)), (model.ffn, model.hidden)
    ]  # fmt: skip
    return {
        name: Linear(inputs, outputs, recipe=recipe, dtype=dtype)
        for name, (inputs, outputs) in zip(LAYERS, sizes, strict=True)
    }


@contextmanager
def saved(parameters: Sequence[Tensor]) -> Iterator[dict[Any, int]]:
    """Yield a dict that collects the bytes of each storage that autograd saves inside of the context, without `parameters`."""
    found: dict[Any, int] = {}
    known = {parameter.untyped_storage()._cdata for parameter in parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            found[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def of_layer(layer: nn.Module, x: Tensor) -> int:
    """Return the bytes that the forward of a layer saves for backward."""
    with saved(list(layer.parameters())) as found:
        kept = layer(x)  # noqa: F841  (y keeps the saved tensors alive while they are counted)
        return sum(found.values())


def of_block(model: Model, recipe: Any, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the saved bytes of each linear of a block, for `tokens` tokens of activations of `dtype`."""
    with FakeTensorMode():
        return {
            name: of_layer(layer, torch.empty(tokens, layer.in_features, dtype=dtype, requires_grad=True))
            for name, layer in linears(model, recipe, dtype).items()
        }


def table(config: Config) -> str:
    """Format the saved bytes of a block with each recipe as a Markdown table."""
    tokens, dtype = config.train.sequence, DTYPES[config.train.dtype]
    found = {name: of_block(config.family, name, tokens, dtype) for name in recipes.names()}
    whole = sum(found["bf16"].values())
    lines = [f"| recipe | {' | '.join(LAYERS)} | MiB of a block | of bf16 |", "|---" * (len(LAYERS) + 3) + "|"]
    for name, layers in found.items():
        cells = [f"{nbytes / 2**20:.2f}" for nbytes in (*layers.values(), sum(layers.values()))]
        lines.append(f"| {name} | {' | '.join(cells)} | {sum(layers.values()) / whole:.3f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser(
        "bench.saved_bytes", "Prints the bytes that the linears of a block save for backward, by recipe."
    )
    print(table(command_line(parser, arguments)[1]))


if __name__ == "__main__":
    run_program(main)
