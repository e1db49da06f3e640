"""Tokens per second of forwards of a Llama in bf16, and frozen with dynamic and with static scales, eager and compiled.

    python -m bench.inference                                               llama3_1b, 8192 tokens, one GPU
    python -m bench.inference --layers "**"                                 the head frozen as well
    python -m bench.inference --config tiny --tokens 256 --repeats 2 --ways eager          on a CPU

By default `dlp.freeze` freezes the linears of blocks in FP8, without the head. `compiled` compiles block by block.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

import dlp
from dlp.comm.mesh import init_process_group, shutdown
from launch.common.program import run_program
from launch.config.run_config import Config, load
from launch.models.initial_weights import init_weights
from launch.models.modules import Llama
from launch.models.parallel import parallel_groups
from launch.training.build import meta_model

WAYS = ["eager", "compiled"]


def make(config: Config, device: torch.device) -> Llama:
    """Build the model in bf16 and convert it on one rank, so that siblings share the cast of x."""
    model, mesh = meta_model(config), dlp.build_mesh(device_type=device.type)
    assert isinstance(model, Llama)
    dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="bf16"), *parallel_groups(config.family, False)], mesh)
    model.to_empty(device=device)
    init_weights(model, 0)
    model.to(torch.bfloat16).eval()
    return model


def tokens_per_second(model: Llama, tokens: Tensor, repeats: int) -> float:
    """Return the tokens per second, from the median time of forwards after two warm-up forwards."""
    times = []
    for _ in range(repeats + 2):
        _wait(tokens.device)
        start = time.perf_counter()
        model(tokens)
        _wait(tokens.device)
        times.append(time.perf_counter() - start)
    return tokens.numel() / statistics.median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def measure(config: Config, mode: str, asked: argparse.Namespace, tokens: Tensor) -> list[float]:
    model, rates = make(config, tokens.device), []
    if mode == "static":
        with dlp.calibrate(model, asked.layers):
            model(tokens)
    if mode != "bf16":
        dlp.freeze(model, asked.layers, asked.recipe, mode)  # type: ignore[arg-type]
    for way in WAYS:
        if way not in asked.ways:
            continue
        if way == "compiled":
            for block in model.model.layers:
                block.compile()
        rates.append(tokens_per_second(model, tokens, asked.repeats))
    return rates


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.inference", description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="llama3_1b")
    parser.add_argument("--recipe", default="fp8_current")
    parser.add_argument(
        "--layers", default="layers.**", help="pattern of the names of frozen layers; **: also the head"
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=0, help="tokens of a sequence; 0: as in the config")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    asked = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = load(asked.config)
    init_process_group(device.type)
    length = min(asked.sequence or config.train.sequence, asked.tokens)
    tokens = torch.randint(config.family.vocab, (asked.tokens // length, length), device=device)
    ways = [way for way in WAYS if way in asked.ways]
    rates = {}
    for mode in ("bf16", "dynamic", "static"):
        rates[mode] = measure(config, mode, asked, tokens)
        shares = [mine / bf16 for mine, bf16 in zip(rates[mode], rates["bf16"], strict=True)]
        said = (
            f"{way} {rate:12,.0f} tokens/s {share:.2f}"
            for way, rate, share in zip(ways, rates[mode], shares, strict=True)
        )
        print(f"{mode:8}" + "  ".join(said), flush=True)
    shutdown()


if __name__ == "__main__":
    run_program(main)
