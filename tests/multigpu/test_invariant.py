"""`[train] invariant = true`: losses, gradient norms, weights and optimizer states with the same bits on every mesh."""

from __future__ import annotations

import functools
import hashlib
from math import prod
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import dlp
from dlp.comm.mesh import AXES
from dlp.proof.cases import MeshCase
from launch.config.run_config import load
from launch.training.build import build
from launch.training.step_update import Update

SMALL = ("layers=1", "hidden=128", "ffn=128", "heads=4", "kv_heads=4", "head_dim=32", "vocab=128")
QWEN3 = (
    "family=qwen3", "layers=2", "hidden=128", "ffn=128", "heads=8", "kv_heads=4", "head_dim=32", "vocab=128",
)  # fmt: skip
BLOCKS = (
    "layers=1",
    "hidden=512",
    "ffn=512",
    "heads=4",
    "kv_heads=4",
    "head_dim=128",
)  # whole blocks of 128 on 4 ranks


class Bits(NamedTuple):
    """What one rank tells of a run: hashes of tensors by name, and the losses of its microbatches by (step, piece)."""

    tensors: dict[str, str]
    losses: dict[tuple[int, int], float]


@functools.cache
def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """The mesh of these sizes, in equal copies."""
    return init_device_mesh("cpu", (dist.get_world_size() // prod(sizes), *sizes), mesh_dim_names=("copies", *AXES))[
        AXES
    ]


def bits(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def trained(name: str, recipe: str, model: tuple[str, ...], steps: int) -> Bits:
    """In a worker: a run on a mesh of that name."""
    case = MeshCase.parse(name)
    sizes = (case.dp_replicate, case.dp_shard, case.tp)
    settings = [f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True)]
    settings += [f"mesh.sequence_parallel={str(case.sequence_parallel).lower()}", *(f"model.{each}" for each in model)]
    settings += ["train.invariant=true", "train.global_batch=8", "train.sequence=32", "train.lr=1e-2", "train.clip=0.5"]
    arguments = [part for each in settings for part in f"--{each}".split("=", 1)]
    config = load("tiny", [*arguments, "--recipe", recipe])
    mesh = mesh_of(sizes)
    built = build(config, mesh, torch.device("cpu"))
    update = Update(built.model, built.optimizer, config.train, built.device)
    found = Bits({}, {})
    for step in range(steps):
        tokens = torch.randint(0, config.model.vocab, (8, 33), generator=torch.Generator().manual_seed(step))
        for micro in range(built.batch.num_micro):
            piece = micro * case.dp + built.dims.dp_rank
            batch = tokens.chunk(built.batch.num_micro * case.dp)[piece]
            loss = dlp.cross_entropy(built.model(batch[:, :-1]), batch[:, 1:], mesh, z_loss=1e-4, invariant=True) / (
                8 * 32
            )
            loss.backward()
            found.losses[step, piece] = float(loss)
        for key, parameter in built.model.named_parameters():
            found.tensors[f"gradient {key} {step}"] = bits(parameter.grad)
        found.tensors[f"norm {step}"] = bits(update()[0])
    for key, parameter in built.model.named_parameters():
        found.tensors[key] = bits(parameter)
        for state, value in built.optimizer.state[parameter].items():
            found.tensors[f"{state} {key}"] = bits(value)
    return found


def compare(expected: Bits, ranks: list[Bits], name: str) -> None:
    losses = {place: loss for each in ranks for place, loss in each.losses.items()}
    assert losses == expected.losses, name
    for each in ranks:
        different = [key for key, value in expected.tensors.items() if each.tensors[key] != value]
        assert not different, f"{name}: {len(different)} of {len(expected.tensors)}: {different[:40]}"


def run(names: tuple[str, ...], recipe: str, model: tuple[str, ...], steps: int) -> list[Bits]:
    return [trained(name, recipe, model, steps) for name in names]


TWO, FOUR = ("tp2", "tp2+sp", "dp2"), ("tp4+sp", "tp2xdp2", "tp2xdp2+sp", "hsdp2x2")


@pytest.mark.parametrize(
    ("recipe", "model", "names"),
    [
        ("fp8_current", SMALL, TWO),
        ("nvfp4", SMALL, ("tp2+sp", "dp2")),  # stochastic rounding
        ("fp8_delayed", QWEN3, FOUR),
    ],
    ids=str,
)
def test_every_mesh_has_the_bits_of_one_rank(ranks, recipe, model, names):
    world = max(MeshCase.parse(name).ranks for name in names)
    told = ranks(world).run(run, ("tp1", *names), recipe, model, 2)
    for i, name in enumerate(names, 1):
        compare(told[0][0], [each[i] for each in told], name)
