"""LoRA over frozen base weights in bf16 and in low precision: tokens per second, planned and measured memory of a rank.

    python -m bench.lora                                                      llama3_8b, 8192 tokens, one GPU
    torchrun --nproc-per-node 2 -m bench.lora                                 FSDP2 over two GPUs
    python -m bench.lora --plan --config llama3_70b --world 2 --bases nvfp4   planned bytes of a rank; runs no step
    python -m bench.lora --config tiny --tokens 256 --steps 2                 on a CPU

Linears of blocks have adapters; embedding, norms and head stay in bf16. Each block is recomputed in backward and is an FSDP
unit; the root unit (embedding, norm, head) stays gathered. Weights and tokens are random. Printed ratios are relative to the
first of `--bases`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import dlp
from bench.files import add_files, write_files
from dlp.comm.mesh import init_process_group, shutdown
from launch.common.devices import BOARDS
from launch.config.run_config import Config, load
from launch.estimate.few_blocks import with_blocks
from launch.estimate.saved_activations import saved_by
from launch.models.initial_weights import init_weights
from launch.models.modules import Llama
from launch.ranks.process_exit import refuse
from launch.training.build import meta_model
from launch.training.recomputation import recompute

BF16 = "bf16"  # base weights that are not quantized
LAYERS = "model.layers.**"
GROWING = ("base", "adapters, gradients, AdamW", "inputs of blocks")  # rows that grow with the number of blocks
OPTIONS = ("--train.checkpointing=full", "--train.compile=false")


def adapters(model: nn.Module, base: str, rank: int) -> nn.Module:
    dlp.lora(model, rank, layers=LAYERS, base=None if base == BF16 else base)
    return model


def _bytes(parameters: Sequence[Tensor]) -> float:
    parts = [part for each in parameters for part in getattr(each, "parts", (each,))]
    return float(sum(part.numel() * part.element_size() for part in parts))


def planned(config: Config, base: str, rank: int, world: int, batch: tuple[int, int]) -> dict[str, float]:
    """Return the planned bytes of a rank at the peak of a step, by row.

    All blocks are equal, so the bytes are extrapolated from models with one and two blocks. The sum over rows counts the logits
    and a recomputed block as if they existed at the same time.

    The row `decoded` is the largest weight of a block in fp32 and in bf16, since forward decodes a weight from its codes.
    """
    few = [with_blocks(config, count) for count in (1, 2)]
    one, two = (_planned(each, base, rank, world, batch) for each in few)
    more = config.family.layers - 2
    return {row: size + (more * (size - one[row]) if row in GROWING else 0.0) for row, size in two.items()}


def _planned(config: Config, base: str, rank: int, world: int, batch: tuple[int, int]) -> dict[str, float]:
    model = adapters(meta_model(config).bfloat16(), base, rank)
    blocks: Sequence[nn.Module] = model.model.layers  # type: ignore[assignment,union-attr]
    inside = [list(block.parameters()) for block in blocks]
    trained = [p for p in model.parameters() if p.requires_grad]
    root = _bytes(list(model.parameters())) - sum(map(_bytes, inside))
    plain = adapters(meta_model(config).bfloat16(), BF16, rank)
    names = [f"model.layers.{i}" for i in range(len(blocks))]
    saved = saved_by(plain, names, [], 1, batch, torch.bfloat16)
    return {
        "base": _bytes([p for p in model.parameters() if not p.requires_grad]) / world,
        "adapters, gradients, AdamW": 4 * _bytes(trained) / world,
        "gathered": 0.0 if world == 1 else root + 2 * max(map(_bytes, inside)),
        "decoded": 0.0 if base == BF16 else 6.0 * max(p.numel() for each in inside for p in each),
        "inputs of blocks": float(sum(saved.inputs.values())),
        "a recomputed block": float(max(saved.eager[name] for name in names)),
        "logits and gradient": 2.0 * saved.logits,
    }


def built(config: Config, base: str, rank: int, device: torch.device) -> Llama:
    """Build the model on this rank, with adapters, recomputed blocks and FSDP units."""
    model = meta_model(config)
    assert isinstance(model, Llama)
    init_weights(model.to_empty(device=device), 0)
    adapters(model.to(torch.bfloat16), base, rank)
    recompute(model.model.layers, config.train)  # type: ignore[arg-type]
    if dist.get_world_size() > 1:
        mesh = dlp.build_mesh(dp_shard=dist.get_world_size(), device_type=device.type)["dp_shard"]
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def measured(
    config: Config, base: str, rank: int, batch: tuple[int, int], steps: int, device: torch.device
) -> tuple[float, float]:
    """Return the tokens per second of all ranks, from the median time of a step, and the peak memory of this rank in bytes
    (0 on a CPU)."""
    cuda = device.type == "cuda"
    model = built(config, base, rank, device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(config.family.vocab, (batch[0], batch[1] + 1), generator=generator).to(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        loss = dlp.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].contiguous()) / tokens[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.isfinite(), "the loss is not finite"  # waits for the device
        times.append(time.perf_counter() - start)
    peak = float(torch.cuda.max_memory_allocated()) if cuda else 0.0
    return batch[0] * batch[1] * dist.get_world_size() / statistics.median(times[2:]), peak


def said(base: str, rows: dict[str, float], usable: float | None) -> str:
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in rows.items())
    room = "" if usable is None else f"; usable {usable / 1e9:.1f}"
    return f"{base}: planned {sum(rows.values()) / 1e9:.2f} GB a rank ({parts}){room}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench.lora", description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="llama3_8b", help="shape of the model")
    parser.add_argument("--bases", nargs="+", default=[BF16, "nvfp4", "fp8_block"], help="bf16, or recipes")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank in a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plan", action="store_true", help="plan only; exit code 1 if a base does not fit")
    parser.add_argument("--world", type=int, default=1, help="number of ranks for --plan")
    parser.add_argument("--device", choices=sorted(BOARDS), default="h100", help="GPU model for --plan")
    add_files(parser, draws=False)
    asked = parser.parse_args(arguments)
    config = load(asked.config, OPTIONS)
    length = min(config.train.sequence, asked.tokens)
    batch, results, fits = (asked.tokens // length, length), list[dict[str, Any]](), True
    if not asked.plan:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        init_process_group(device.type)
    for base in asked.bases:
        world = asked.world if asked.plan else dist.get_world_size()
        rows = planned(config, base, asked.rank, world, batch)
        result: dict[str, Any] = {"base": base, "world": world, "planned": rows}
        line = said(base, rows, BOARDS[asked.device].usable if asked.plan else None)
        if asked.plan:
            fits &= sum(rows.values()) <= BOARDS[asked.device].usable
        else:
            rate, peak = measured(config, base, asked.rank, batch, asked.steps, device)
            result |= {"tokens_per_second": rate, "peak": peak}
            first = results[0] if results else result
            line += f"\n{base}: {rate:,.0f} tokens/s, {rate / first['tokens_per_second']:.3f}"
            line += f"; peak {peak / 1e9:.2f} GB" if peak else ""
        results.append(result)
        if asked.plan or dist.get_rank() == 0:
            print(line, flush=True)
    if asked.plan or dist.get_rank() == 0:
        write_files(asked, results)
    if not asked.plan:
        shutdown()
    return int(not fits)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        refuse(str(error), code=2)
