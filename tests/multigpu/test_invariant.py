"""`[train] invariant = true`: losses, gradient norms, weights and optimizer states with the same bits on every mesh."""

from __future__ import annotations

import functools
import hashlib
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dlp
import dlp.ops
from dlp.comm.mesh import AXES, ParallelDims
from dlp.parallel.model.invariant import CHECKS, check_mesh
from dlp.parallel.weight.fsdp2 import set_grad_wire
from dlp.proof.cases import MeshCase
from launch.config.run_config import load
from launch.training.build import build
from launch.training.step_update import Update
from tests import pool as worker
from tests import training
from tests.net import full
from tests.refusals import may_raise

SMALL = ("layers=1", "hidden=128", "ffn=128", "heads=4", "kv_heads=4", "head_dim=32", "vocab=128")
QWEN3 = (
    "family=qwen3", "layers=1", "hidden=128", "ffn=128", "heads=8", "kv_heads=4", "head_dim=32", "vocab=128",
)  # fmt: skip
# Model whose shards on 4 ranks have complete scaling blocks of 128
BLOCKS = (
    "layers=1",
    "hidden=512",
    "ffn=512",
    "heads=4",
    "kv_heads=4",
    "head_dim=128",
)


EIGHTHS = (*QWEN3, "heads=8", "kv_heads=8")
BATCH = 4  # sequences of a step over all ranks, each a microbatch


class Bits(NamedTuple):
    """Report of one rank about a run: hashes of tensors by name, and the losses of the microbatches of this rank by
    (step, piece); `piece` numbers the microbatches of all data-parallel ranks in a step."""

    tensors: dict[str, str]
    losses: dict[tuple[int, int], float]


@functools.cache
def mesh_of(sizes: tuple[int, ...], kind: str = "") -> DeviceMesh:
    """Return the mesh with these sizes. If the world has more ranks than the mesh, the world is divided into copies of
    the mesh, and each rank gets the copy that contains the rank."""
    shape = (dist.get_world_size() // prod(sizes), *sizes)
    return init_device_mesh(kind or worker.device().type, shape, mesh_dim_names=("copies", *AXES))[AXES]


def bits(tensor: Tensor) -> str:
    stored = full(tensor).detach().contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.sha256(stored.numpy().tobytes()).hexdigest()[:16]


def trained(name: str, recipe: str, model: tuple[str, ...], steps: int) -> Bits:
    """Train on the mesh with this name, and return the report of this rank. Runs in a worker."""
    case = MeshCase.parse(name)
    sizes = (case.dp_replicate, case.dp_shard, case.tp)
    settings = [f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True)]
    settings += [f"mesh.sequence_parallel={str(case.sequence_parallel).lower()}", *(f"model.{each}" for each in model)]
    settings += [
        "train.invariant=true",
        f"train.global_batch={BATCH}",
        "train.sequence=32",
        "train.lr=1e-2",
        "train.clip=0.5",
    ]
    arguments = [part for each in settings for part in f"--{each}".split("=", 1)]
    config = load("tiny", [*arguments, "--recipe", recipe])
    mesh, device = mesh_of(sizes), worker.device()
    built = build(config, mesh, device)
    update = Update(built.model, built.optimizer, config.train, built.device)
    found = Bits({}, {})
    for step in range(steps):
        tokens = torch.randint(0, config.model.vocab, (BATCH, 33), generator=torch.Generator().manual_seed(step))
        tokens = tokens.to(device)
        for micro in range(built.batch.num_micro):
            piece = micro * case.dp + built.dims.dp_rank
            batch = tokens.chunk(built.batch.num_micro * case.dp)[piece]
            loss = dlp.cross_entropy(built.model(batch[:, :-1]), batch[:, 1:], mesh, z_loss=1e-4, invariant=True) / (
                8 * 32
            )
            loss.backward()
            found.losses[step, piece] = loss.item()
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
    try:
        return [trained(name, recipe, model, steps) for name in names]
    finally:
        training.end_determinism()


TWO, FOUR = ("tp2", "tp2+sp", "dp2"), ("tp4+sp", "tp2xdp2+sp", "hsdp2x2")
EIGHT = ("tp8+sp", "tp4xdp2+sp", "tp2xhsdp2x2+sp")


@pytest.mark.parametrize(
    ("recipe", "model", "world", "names"),
    [
        pytest.param("fp8_current", SMALL, 2, TWO, marks=pytest.mark.full),  # the cases below cover the same code
        pytest.param("bf16", QWEN3, 2, TWO, marks=pytest.mark.full),
        pytest.param("fp8_block", BLOCKS, 2, TWO, marks=pytest.mark.full),
        ("nvfp4", SMALL, 2, ("tp2+sp", "dp2")),  # stochastic rounding
        pytest.param("fp8_delayed", QWEN3, 4, FOUR, marks=pytest.mark.full),
        pytest.param("fp8_current", EIGHTHS, 8, EIGHT, marks=pytest.mark.full),
    ],
    ids=["fp8_current", "bf16", "fp8_block", "nvfp4", "fp8_delayed", "8 ranks"],
)
def test_every_mesh_has_the_bits_of_one_rank(ranks, recipe, model, world, names):
    told = ranks(world).run(run, ("tp1", *names), recipe, model, 2)
    for i, name in enumerate(names, 1):
        compare(told[0][0], [each[i] for each in told], name)


def recorded(folder: Path, data: Path, name: str, *overrides: str) -> tuple[dict[int, Any], ...]:
    """Return the losses, gradient norms and validation losses of a run of launch.train, by step. Runs in a worker."""
    config = training.config(folder / name, data, *overrides, "--train.invariant", "true")
    training.run(config)
    return tuple(training.metrics(config, key) for key in ("loss", "gradient_norm", "validation_loss"))


def runs(folder: Path, data: Path) -> list[tuple[dict[int, Any], ...]]:
    common = (
        "--train.steps",
        "3",
        "--train.eval_every",
        "3",
        "--checkpoint.every",
        "0",
        "--checkpoint.at_end",
        "false",
    )
    try:
        cut = recorded(folder, data, "tp", *common)
        return [cut, recorded(folder, data, "dp", *common, "--mesh.tp", "1", "--mesh.sequence_parallel", "false")]
    finally:
        training.end_determinism()


@pytest.mark.ranks(2)
@pytest.mark.full  # the next test compares runs on the same two meshes, one of which resumes on the other mesh
def test_runs_record_equal_numbers(ranks, tmp_path):
    for name in ("tp", "dp"):
        (tmp_path / name).mkdir()
    tp, dp = ranks(2).run(runs, tmp_path, training.shards(tmp_path))[0]
    assert tp == dp
    assert len(tp[0]) == len(tp[1]) == 3 and tp[2]


def resumed(folder: Path, data: Path) -> tuple[Any, Any, list[str]]:
    """Return the losses and norms of a run on a tp mesh; the losses and norms of a run that ends on a dp mesh after 1 step
    and continues on the tp mesh with recomputed blocks; and the log of the second run. Runs in a worker."""
    common = (
        "--train.steps",
        "2",
        "--train.eval_every",
        "2",
        "--train.invariant",
        "true",
        "--checkpoint.at_end",
        "false",
    )
    for name in ("whole", "parts"):
        (folder / name).mkdir(exist_ok=True)
    dp = ("--mesh.tp", "1", "--mesh.sequence_parallel", "false")
    try:
        whole = training.config(folder / "whole", data, *common, "--checkpoint.every", "0")
        training.run(whole)
        trainer, done = training.trainer(training.config(folder / "parts", data, *common, *dp))
        trainer.recorder.begin(done)
        trainer.read(trainer.train_step(0))
        trainer.save(1)
        parts = training.config(folder / "parts", data, *common, "--train.checkpointing", "full")
        training.run(parts)
    finally:
        training.end_determinism()
    keys = ("loss", "gradient_norm", "validation_loss")
    first, second = ([training.metrics(each, key) for key in keys] for each in (whole, parts))
    return first, second, training.said(parts)


@pytest.mark.ranks(2)
@pytest.mark.full  # the first test compares the bits of both meshes, and test_checkpoint.py has resumed runs
def test_a_run_continues_on_another_mesh_with_recomputed_blocks_and_keeps_its_bits(ranks, tmp_path):
    whole, parts, said = ranks(2).run(resumed, tmp_path, training.shards(tmp_path))[0]
    assert any(line.startswith("resuming from step 1 (") for line in said)
    assert whole == parts and sorted(whole[0]) == [1, 2] and whole[2]


class Mixes(nn.Module):
    """Cumulative sum over all tokens plus a vector: a module that cannot run on segments of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0) + self.weight


def net(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64), *between)


def converted(mesh: DeviceMesh, *between: nn.Module, **options: Any) -> nn.Module:
    choices = {key: options.pop(key) for key in ("overlap", "recipe", "delay_wgrad") if key in options}
    groups = [
        dlp.LayerGroup("all", "**", **({"recipe": "fp8_current"} | choices)),
        dlp.LayerGroup("up", "1", style="column"), dlp.LayerGroup("down", "3", style="row"),
    ]  # fmt: skip
    if options.pop("slopes", False):
        groups.append(dlp.LayerGroup("slopes", "4", style="column"))
    model = net(*between)
    dlp.convert(model, groups, mesh, invariant=True, **options)
    return model


def refused() -> dict[str, str]:
    """Return the message of each refused call. The key is the part of the message that the test expects. Runs in a
    worker."""
    tp, dp = mesh_of((1, 1, 2), "cpu"), mesh_of((1, 2, 1), "cpu")
    x = torch.randn(16, 64)

    def stepped(model: nn.Module, between: Any = lambda model: None) -> None:
        for _ in range(2):
            model(x).sum().backward()
            between(model)

    def cleared(model: nn.Module) -> None:
        torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)

    def sharded(**keywords: Any) -> nn.Module:
        return dlp.fully_shard(converted(dp), mesh=dp, **keywords)

    def attached(**keywords: Any) -> None:
        model = converted(tp)
        dlp.attach(model, torch.optim.SGD(model.parameters()), **keywords)

    def in_region() -> None:
        with dlp.autocast(recipe="bf16"):
            converted(tp)(x)

    def with_threads() -> None:
        torch.set_num_threads(2)
        try:
            converted(tp)
        finally:
            torch.set_num_threads(1)

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    calls = {
        "amax_group = 'world'": lambda: converted(tp, amax_group="world"),
        "torch runs 2 threads on each rank": with_threads,
        "1: recipe qat": lambda: converted(tp, recipe="qat"),
        "of fprop in another format than fp32": lambda: converted(
            tp, recipe={"name": "bf16", "wire": {"fprop": "fp8"}}
        ),
        "tp splits a block of fp8_block": lambda: converted(tp, recipe="fp8_block"),
        "delay_wgrad = true": lambda: converted(tp, delay_wgrad=True),
        "overlap = 'chunked'": lambda: converted(tp, overlap="chunked"),
        "4 is a RMSNorm of dlp.ops": lambda: converted(tp, dlp.ops.RMSNorm(64)),
        "4 draws masks of p = 0.5": lambda: converted(tp, nn.Dropout(0.5)),
        "4 does not compute tokens independently": lambda: converted(tp, Mixes())(x),
        "4 reads features that tp shards, and weight has 1 elements": lambda: converted(tp, nn.PReLU(), slopes=True)(x),
        "recipes do not change": lambda: dlp.set_recipe(converted(tp), "1", "bf16"),
        "leave recipe out of dlp.autocast": in_region,
        "main_grads": lambda: attached(main_grads="grad"),
        "leave set_grad_wire out": lambda: set_grad_wire(sharded(), "bf16"),
        "would round gradients to torch.bfloat16": lambda: sharded(mp_policy=half),
        "sharded by torch's fully_shard": lambda: fully_shard(converted(dp), mesh=dp["dp_shard"])(x),
        "leave set_requires_gradient_sync(False) out": lambda: stepped(
            sharded(), lambda model: model.set_requires_gradient_sync(False)
        ),
        "gradients were set or changed": lambda: stepped(converted(tp), cleared),
        "must come from calling the converted model itself": lambda: converted(tp)[1](x).sum().backward(),
    }
    return {expected: may_raise((ValueError, RuntimeError), call) for expected, call in calls.items()}


@pytest.mark.ranks(2)
def test_what_is_not_invariant_is_refused_by_name(ranks):
    told = ranks(2).run(refused)[0].items()
    wrong = {
        expected: message
        for expected, message in told
        if "invariant = true: " not in message or expected not in message
    }
    assert not wrong
    with pytest.raises(ValueError, match="tp = 3: each sum is a binary tree over 8 segments"):
        check_mesh(ParallelDims(tp=3), "cpu", "auto")
    with pytest.raises(ValueError, match="dp_replicate = 4: FSDP adds"):
        check_mesh(ParallelDims(dp_replicate=4), "cpu", "auto")
    with pytest.raises(ValueError, match="call torch.use_deterministic_algorithms"):
        CHECKS["cuda"]()
    with pytest.raises(ValueError, match="this mesh is on xpu"):
        check_mesh(ParallelDims(), "xpu", "auto")
