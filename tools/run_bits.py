"""Hashes of short training runs, for checking that two versions of the source train bitwise equal models.

    torchrun --nproc-per-node 1 -m tools.run_bits > before.txt      one rank: eager, compiled, recomputed
    torchrun --nproc-per-node 2 -m tools.run_bits > before.txt      two ranks: tp, tp with sequence parallelism, FSDP
    diff before.txt after.txt

A run is five steps of the config `tiny`, with two small transformer layers, on random tokens. The program prints a line for
every recipe and case (CASES), with a hash of all losses, parameters and optimizer states of all ranks. Command-line options are
overrides of the config, for example --model.layers 4.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import dlp
from dlp.comm.mesh import shutdown, world_size
from dlp.quant.recipe import names
from launch.config.groups import SCHEMA
from launch.config.run_config import Config, command_line
from launch.settings import overrides
from launch.train import make_mesh
from launch.training.build import Built, build

STEPS = 5
SMALL = """--model.layers 2 --model.hidden 128 --model.ffn 256 --model.heads 2 --model.kv_heads 2 --train.sequence 128
 --train.global_batch 4 --train.warmup 1"""
TP, SP, FSDP = (
    "--mesh.tp {} --mesh.sequence_parallel false",
    "--mesh.tp {} --mesh.sequence_parallel true",
    "--mesh.tp 1",
)
COMPILED, RECOMPUTED = "--train.compile true", "--train.checkpointing full"
CASES = {
    1: {"alone": TP, "compiled": f"{TP} {COMPILED}", "recomputed": f"{TP} {RECOMPUTED}"},
    2: {
        "tp": TP,
        "sp": SP,
        "sp chunked": f"{SP} --groups.default.overlap chunked",
        "sp compiled": f"{SP} {COMPILED}",
        "sp recomputed": f"{SP} {RECOMPUTED}",
        "fsdp": f"{FSDP} --mesh.sequence_parallel false",
        "fsdp recomputed": f"{FSDP} --mesh.sequence_parallel false {RECOMPUTED}",
    },
}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(config: Config, built: Built) -> Iterable[Tensor]:
    """Run five steps. Returns the losses, parameters and optimizer states of this rank."""
    tokens = torch.Generator().manual_seed(built.dims.dp_rank)
    losses = []
    for _ in range(STEPS):
        text = torch.randint(0, config.family.vocab, (built.batch.micro, config.train.sequence + 1), generator=tokens)
        targets = text[:, 1:].contiguous()
        loss = dlp.cross_entropy(built.model(text[:, :-1]), targets, built.mesh) / targets.numel()
        loss.backward()
        built.optimizer.step()
        built.optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    parameters = [local(parameter.detach()) for parameter in built.model.parameters()]
    states = [local(state) for states in built.optimizer.state.values() for state in states.values()]
    return [*losses, *parameters, *states]


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the tensors of all ranks; all ranks return the same hash."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sha.hexdigest())
    return hashlib.sha256(" ".join(map(str, found)).encode()).hexdigest()[:16]


def main(arguments: list[str]) -> None:
    parser = overrides.make_parser("tools.run_bits", "Prints a hash of short runs of every recipe.", "tiny", SCHEMA)
    world = world_size()
    for recipe in names():
        for case, options in CASES[world].items():
            torch._dynamo.reset()
            chosen = f"{SMALL} {options.format(world)} --groups.default.recipe {recipe}".split()
            _, config = command_line(parser, ["tiny", *chosen, *arguments])
            mesh = make_mesh(config)
            found = digest(train(config, build(config, mesh, torch.device(mesh.device_type))))
            if dist.get_rank() == 0:
                print(f"{recipe:12} {case:16} {found}", flush=True)
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
