"""GEMMs that one rank runs for a config (sizes, dtypes, kernel), and the linears of this rank as a `make bench-linear` command.

    python -m bench.shapes CONFIG [--world 8] [--section.key value ...]
    python -m bench.shapes CONFIG --json        GEMMs as JSON, for `python -m dlp.kernels.tune`
    python -m bench.shapes CONFIG --layers      unsharded linears as JSON, for `python -m dlp.parallel.tune`
    python -m bench.shapes --model package.module:factory [--input 4x2048]      linears of any model

A GEMM is D [rows, cols] = A [rows, contraction] @ B [cols, contraction].T. The shapes come from the plan; no ranks are started.
The model of --model runs once on the meta device, on int64 tokens of shape --input, or on the inputs that the factory returns.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from dlp.comm.observer import dtype_name
from dlp.kernels.gemm_entries import are_factored
from dlp.kernels.table import device_kind
from dlp.parallel.model.plan import LayerPlan
from dlp.parallel.style import shard_sizes
from dlp.quant.gemm import DECODES, decoded_dtype
from dlp.quant.recipe import GEMM_OPERANDS, GEMMS
from dlp.quant.tensor import Format
from launch.common.program import run_program
from launch.config.rules import validate_world
from launch.config.run_config import Config, command_line, count, make_parser
from launch.models.modules import DTYPES
from launch.training.build import plan_for

SIZES = {"fprop": "MNK", "dgrad": "MKN", "wgrad": "NKM"}  # rows, cols, contraction
Problem = dict[str, Any]


def linear_sizes(layer: LayerPlan, tp: int, tokens: int) -> tuple[int, int, int]:
    """Return M, K, N of the GEMMs of one rank. `tokens`: tokens of a microbatch."""
    n, k = shard_sizes(layer.row, *layer.shape, tp, layer.name)
    alone = layer.row.cut_x == layer.row.cut_dy == 0  # nothing is gathered, so each rank has different tokens
    return tokens // tp if alone else tokens, k, n


def decoded_to(kernel: str, formats: Sequence[Format], source: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which a kernel decodes both operands before the GEMM; None if the GEMM reads the codes."""
    if not kernel.startswith(DECODES):
        return None
    return decoded_dtype(*((fmt, fmt.parts[0].dtype or source) for fmt in formats))


def problems(
    layer: LayerPlan, sizes: tuple[int, int, int], dtype: torch.dtype, w_dtype: torch.dtype
) -> Iterator[Problem]:
    """Yield the GEMMs of one layer, with the keys that `dlp.kernels.tune` reads.

    For operand a (and b): `a_dtype`; `a_block`, rows and columns of a block that shares a scale; `a_flipped`, whether the
    operand is read as the transpose of a stored matrix."""
    of = dict(zip("MKN", sizes, strict=True))
    summed = len(layer.siblings) > 1 and not layer.one_dgrad  # the dgrad GEMMs of siblings add into one fp32 tensor
    for which, kernel in zip(GEMMS, layer.kernels, strict=True):
        options = getattr(layer.recipe, which)
        rows, cols, contraction = (of[letter] for letter in SIZES[which])
        out = options.out_dtype or (w_dtype if which == "wgrad" else dtype)
        problem = {"gemm": which, "rows": rows, "cols": cols, "contraction": contraction, "kernel": kernel,
                   "fast_accumulation": options.fast_accumulation, "accumulate": False, "alpha": False}  # fmt: skip
        orientations = GEMM_OPERANDS[which][1::2]
        formats = [quantizer.format for quantizer in layer.recipe.operands(which)]
        decoded = decoded_to(kernel, formats, dtype)
        factored = decoded is not None and are_factored(*formats)
        for side, orientation, fmt in zip("ab", orientations, formats, strict=True):
            problem[f"{side}_dtype"] = dtype_name(decoded or fmt.parts[0].dtype or dtype)
            problem[f"{side}_block"] = [1, 1] if decoded else list(fmt.block)
            problem[f"{side}_flipped"] = fmt.keeps_source and orientation == "columnwise"
            tiles = fmt.gemm_kind == "nvfp4" and kernel.startswith("cublaslt")
            problem["alpha"] |= tiles or (factored and fmt.factors == "tensor")
        if factored and any(fmt.factors == "row" for fmt in formats):
            out = torch.float32  # the scales of rows are applied to fp32 sums
        kept = [torch.float32, *[torch.float32] * summed] if which == "dgrad" and summed else [out]
        for turn, result in enumerate(kept):
            yield {**problem, "out_dtype": dtype_name(result), "accumulate": turn > 0}


def of_config(config: Config, world: int, device_type: str) -> tuple[Counter[str], Counter[str]]:
    """Return the GEMMs (JSON texts) and the linears ("MxKxN") of one rank, both with the number of layers that have them."""
    batch = validate_world(config, world)
    plan, dtype = plan_for(config, world, device_type), DTYPES[config.train.dtype]
    w_dtype = dtype if batch.dp_size > 1 else torch.float32  # FSDP gathers weights in the dtype of activations
    gemms, linears = Counter[str](), Counter[str]()
    for layer in plan.layers:
        sizes = linear_sizes(layer, plan.tp, batch.micro * config.own_sequence)
        linears["x".join(map(str, sizes))] += 1
        gemms.update(json.dumps(problem) for problem in problems(layer, sizes, dtype, w_dtype))
    return gemms, linears


def whole_layers(config: Config, world: int, device_type: str) -> dict[str, Any]:
    """Return the input of `dlp.parallel.tune`: number of tp ranks, transport, dtype, and for each layer (siblings are one
    layer) the style, the unsharded sizes, the recipe and the tokens of a microbatch."""
    batch, plan = validate_world(config, world), plan_for(config, world, device_type)
    rows, layers = {row.name: row for row in plan.layers}, []
    for names in dict.fromkeys(row.siblings or (row.name,) for row in plan.layers):
        row = rows[names[0]]
        recipe = {"name": row.recipe.name, **{key: thaw(value) for key, value in row.recipe.options}}
        layers.append({
            "name": names[0], "style": row.style, "sequence_parallel": row.sequence_parallel, "recipe": recipe,
            "tokens": batch.micro * config.own_sequence, "in_features": row.shape[1],
            "out_features": [rows[name].shape[0] for name in names],
        })  # fmt: skip
    return {"ranks": plan.tp, "transport": config.mesh.transport, "dtype": dtype_name(DTYPES[config.train.dtype]),
            "layers": layers}  # fmt: skip


def thaw(value: Any) -> Any:
    """Invert `dlp.quant.options.freeze` for an option of a recipe: a tuple of (string, value) pairs becomes a dict."""
    pairs = isinstance(value, tuple) and value and all(
        isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in value
    )  # fmt: skip
    return {key: thaw(entry) for key, entry in value} if pairs else value


class Linears(TorchFunctionMode):
    """Context that counts calls of F.linear, y [M, N] = x [M, K] w [N, K]^T, by sizes "MxKxN", in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, w = args[0], args[1] if len(args) > 1 else (kwargs or {})["weight"]
            self.found["x".join(map(str, (x.shape[:-1].numel(), *reversed(w.shape))))] += 1
        return func(*args, **(kwargs or {}))


def of_model(factory: str, tokens: Sequence[int]) -> Counter[str]:
    """Count the calls of F.linear by sizes, as "MxKxN", in one forward of a model on the meta device.

    Args:
        factory: "package.module:function"; the function returns a module, or (module, inputs).
        tokens: shape of the int64 tokens with which the module is called if the function returns no inputs.

    Raises:
        ValueError: there is no such function, the function returns no module, or the model does not run on the meta device.
    """
    package, _, name = factory.partition(":")
    try:
        make = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--model {factory}: expected package.module:function, and {error}") from None
    with torch.device("meta"), torch.no_grad(), Linears() as linears:
        made = make()
        model, inputs = made if isinstance(made, tuple) else (made, (torch.zeros(*tokens, dtype=torch.int64),))
        if not isinstance(model, nn.Module):
            raise ValueError(f"--model {factory}: expected a module or (module, inputs), got {type(model).__name__}")
        try:
            model(*(each.to("meta") for each in inputs))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            first = str(error).splitlines()[0]
            raise ValueError(
                f"--model {factory}: its forward does not run on the meta device: {first}: return (module, inputs) "
                f"with matching inputs"
            ) from error
    return linears.found


def print_model(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.shapes", description="Prints the linears of any model.")
    parser.add_argument("--model", required=True, help="package.module:function, which returns the model")
    parser.add_argument("--input", default="1x2048", help="shape of the tokens that the model reads [1x2048]")
    options = parser.parse_args(arguments)
    if not all(size.isdecimal() and int(size) for size in options.input.split("x")):
        raise ValueError(f"--input {options.input}: expected sizes as in 4x2048")
    found = of_model(options.model, [int(size) for size in options.input.split("x")])
    if not found:
        raise ValueError(
            f"--model {options.model}: its forward calls no torch.nn.functional.linear; give a model that does"
        )
    print(f"{'M':>8} {'K':>8} {'N':>8} {'calls':>6}")
    for sizes, calls in found.items():
        print("{:>8} {:>8} {:>8} {:>6}".format(*sizes.split("x"), calls))
    print(f'\nmake bench-linear ARGS="--shapes {" ".join(found)}"')


def main(arguments: Sequence[str]) -> None:
    if any(argument.partition("=")[0] == "--model" for argument in arguments):
        print_model(arguments)
        return
    parser = make_parser(
        "bench.shapes", "Prints the GEMMs of a config; with --model package.module:function, the linears of any model."
    )
    parser.add_argument("--world", type=count, default=8, help="the number of ranks [8]")
    parser.add_argument("--json", action="store_true", help="print the GEMMs as JSON")
    parser.add_argument("--layers", action="store_true", help="print the unsharded linears as JSON")
    options, config = command_line(parser, arguments)
    device = device_kind("cuda") if torch.cuda.is_available() else "sm_90"
    if options.layers:
        print(json.dumps(whole_layers(config, options.world, device), indent=1))
        return
    gemms, linears = of_config(config, options.world, device)
    if options.json:
        print(json.dumps([json.loads(text) for text in gemms], indent=1))
        return
    print(f"{'gemm':6} {'rows':>7} {'cols':>7} {'contraction':>11}  {'A':14} {'B':14} {'D':10} {'layers':>6}  kernel")
    for text, layers in gemms.items():
        each = json.loads(text)
        result = each["out_dtype"] + " +=" * each["accumulate"]
        print(f"{each['gemm']:6} {each['rows']:7} {each['cols']:7} {each['contraction']:11}  {each['a_dtype']:14} "
              f"{each['b_dtype']:14} {result:10} {layers:6}  {each['kernel']}")  # fmt: skip
    print(f'\nmake bench-linear ARGS="--shapes {" ".join(linears)}"')


if __name__ == "__main__":
    run_program(main)
