"""Context parallelism compared with one rank: shards of sequences, attention, gradients, losses, weights after steps,
FP8 codes.

The runs use the training loop, with uneven targets, a z-loss and the ledger. Some tests plant faults, such as a
missing sum over cp or a missing last key, and require that the comparison fails.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dlp
from bench import context as bench_context
from dlp import Context
from dlp.comm import traced
from dlp.comm.mesh import DP_SHARD, ParallelDims
from dlp.parallel.model import context as contexts
from dlp.quant.recipe import load
from launch import evaluate
from launch.config.run_config import Config
from launch.config.run_config import load as load_config
from launch.estimate import memory_check
from launch.inference.trained_model import open_trained
from launch.settings.schema import ConfigError
from launch.train import plan_text
from launch.training import wire_bytes
from launch.training.gradient_norm import GradientNorm
from tests import pool as worker
from tests import training
from tests.cases import nightly
from tests.metrics import relative_error
from tests.pool import Pool
from tests.recorded_casts import recording
from tests.shardnet import whole

LENGTH, SEQUENCES, STEPS = 16, 8, 3  # three steps, because the ledger compares from the third step on
IGNORED = -100


def test_ranks_share_a_sequence_in_equal_parts():
    sequence = torch.arange(24)[None]
    for ranks in (1, 2, 3, 4):
        parts = [Context(ranks, rank).split(sequence) for rank in range(ranks)]
        for rank, part in enumerate(parts):
            assert torch.equal(part[0], Context(ranks, rank).positions(len(part[0])))
        assert torch.equal(torch.cat(parts, 1).sort().values, sequence)
        keys = [sum(Context(ranks, rank).chunks) for rank in range(ranks)]
        assert len(set(keys)) == 1, "every rank attends to as many keys"
    with pytest.raises(ValueError, match="cp = 2 needs sequences of a multiple of 4 tokens, .*; got 6: pad"):
        Context(2, 0).split(sequence[:, :6])


# Faults


def own_contribution(x: Tensor, group: Any, layer: str = "", purpose: str = "") -> Tensor:
    """Faulty reduce-scatter: return this rank's rows without summing them over the ranks."""
    return x.chunk(group.size())[group.rank()].contiguous()


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "gradients of keys are not summed": lambda: patch.object(traced, "reduce_scatter", own_contribution),
    "keys end a chunk early": lambda: patch.object(contexts, "AFTER", 0),
    "positions of contiguous parts": lambda: patch.object(
        Context, "positions", lambda self, length, device=None: torch.arange(length, device=device) + self.rank * length
    ),
    "gradients of weights are not summed": lambda: patch.object(ParallelDims, "shard_axis", DP_SHARD),
}


# Attention alone


def attended(fault: str, dtype: torch.dtype = torch.float64) -> float:
    """Largest relative error of attention over cp, forward and backward, compared with attention over full
    sequences."""
    context = Context.of(worker.mesh(cp=dist.get_world_size()))
    generator, worst = torch.Generator().manual_seed(0), 0.0
    made = [torch.randn(2, heads, 24, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    q, k, v, dy = (each.to(worker.device(), dtype) for each in made)
    whole = [each.double().clone().requires_grad_() for each in (q, k, v)]
    y = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    y.backward(dy.double())
    own = [context.split(each, 2).requires_grad_() for each in (q, k, v)]
    with FAULTS[fault]():
        found = context.attention(*own)
        found.backward(context.split(dy, 2))
    for mine, expected in zip((found, *(each.grad for each in own)), (y, *(each.grad for each in whole)), strict=True):
        worst = max(worst, relative_error(mine, context.split(expected, 2)))
    assert torch.equal(context.gather(context.split(q, 2), 2), q)
    return worst


@pytest.mark.ranks(2)
def test_attention_over_cp_is_attention_over_sequences(ranks):
    assert max(ranks(2).run(attended, "none")) < 1e-6  # sums over ranks are in fp32
    assert max(ranks(2).run(attended, "none", torch.bfloat16)) < 1e-2
    for fault in ("gradients of keys are not summed", "keys end a chunk early"):
        assert max(ranks(2).run(attended, fault)) > 0.1, fault


# Training


class Found(NamedTuple):
    """Results of a run: gradients of the first step and their norm, losses of all steps, weights after the last
    step."""

    gradients: dict[str, Tensor]
    norm: float
    losses: list[float]
    weights: dict[str, Tensor]


def uneven(batch: Callable[..., tuple[Tensor, Tensor]], *place: Any) -> tuple[Tensor, Tensor]:
    """Return a batch in which 0, 8 or all 16 targets of a sequence count; the other targets are ignored."""
    tokens, targets = batch(*place)
    counted = tokens.sum(1, keepdim=True) % 3 * (LENGTH // 2)
    return tokens, torch.where(torch.arange(LENGTH) < counted, targets, IGNORED)


def trained(config: Config, fault: str = "none", steps: int = STEPS) -> Found:
    losses: list[float] = []
    backend = functools.partialmethod(nn.Module.compile, backend="aot_eager")  # inductor would compile for a minute
    with FAULTS[fault](), patch.object(nn.Module, "compile", backend):
        trainer, _ = training.trainer(config)
        trainer.train_data.batch = functools.partial(uneven, trainer.train_data.batch)  # type: ignore[method-assign]
        model = trainer.built.model
        trainer.forward_backward(list(trainer.batches(trainer.train_data, 0)))
        gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        norm = GradientNorm(model.parameters())().item()
        trainer.built.optimizer.zero_grad()
        for step in range(steps):
            losses.append(trainer.watched_step(step).numbers.read()[0] / trainer.built.dims.tp)
        if steps == STEPS and trainer.built.dims.cp > 1:
            counted = {row["purpose"] for row in trainer.wire.account() if row["group"] == "cp"}
            assert trainer.wire.watches and {"fprop", "dgrad"} <= counted, "keys, values and their gradients"
    training.end_determinism()
    return Found(gradients, norm, losses, {name: whole(p) for name, p in model.named_parameters()})


BF16, FP8 = ["--recipe=bf16"], ["--recipe=fp8_current"]


def config(folder: Path, data: Path, *options: str) -> Config:
    fixed = [
        f"--train.sequence={LENGTH}", f"--train.global_batch={SEQUENCES}", "--train.z_loss=0.05", "--train.dtype=fp32",
        "--train.ledger=always", "--checkpoint.resume=none",
    ]  # fmt: skip
    return training.config(folder, data, *fixed, *options, f"--run.dir={folder}/{len(list(folder.iterdir()))}")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[..., Found]:
    def run(pool: Pool, *options: str) -> Found:
        return pool.run(trained, config(tmp_path_factory.mktemp("one"), data, "--mesh.tp=1", *options))[0]

    return functools.cache(run)


SMALL = ["--train.micro_batch=2"]  # several microbatches
MESHES = {
    "cp2": (2, ["--mesh.tp=1"], [*BF16, *SMALL, "--train.reduce_gradients=microbatch"]),
    "cp2, recomputed": (2, ["--mesh.tp=1", "--train.checkpointing=full", "--model.fused=true"], BF16),
    "cp2, recomputed in part": (2, ["--mesh.tp=1", "--train.checkpointing=selective"], BF16),
    "cp2 compiled": (2, ["--mesh.tp=1", "--train.compile=true"], BF16),
    "cp2 tp2": (4, ["--mesh.tp=2", "--mesh.sequence_parallel=false"], BF16),
    "cp2 tp2 sp": (4, ["--mesh.tp=2", "--model.family=qwen3"], BF16),
    "cp2 dp_shard2": (4, ["--mesh.tp=1"], [*BF16, *SMALL, "--train.reduce_gradients=step"]),
    "cp2 dp_replicate2": (4, ["--mesh.tp=1", "--mesh.dp_replicate=2"], BF16),
    "cp2 fp8": (2, ["--mesh.tp=1", "--mesh.amax_group=tp+cp"], FP8),
    "cp2 tp2 sp fp8": (4, ["--mesh.tp=2", "--mesh.amax_group=tp+cp"], FP8),
    "cp2 dp_shard2 fp8": (4, ["--mesh.tp=1", "--mesh.amax_group=world"], FP8),
}
# Meshes that run without `--all-cases`; none runs FP8, because another test of this file compares codes of fp8_current
DEFAULT = ("cp2", "cp2 tp2 sp", "cp2 dp_shard2")
FOR_ONE = ("--model.family",)


def errors(found: Found, expected: Found) -> dict[str, float]:
    gradients = max(relative_error(found.gradients[name], each) for name, each in expected.gradients.items())
    weights = max(relative_error(found.weights[name], each) for name, each in expected.weights.items())
    losses = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    return {"gradients": gradients, "norm": abs(found.norm / expected.norm - 1), "losses": losses, "weights": weights}


@pytest.mark.parametrize(
    ("name", "world"),
    [(name, world) if name in DEFAULT else nightly(name, world) for name, (world, _, _) in MESHES.items()],
)
def test_a_mesh_with_cp_trains_as_one_rank(ranks, one_rank, tmp_path, data, device_type, name, world):
    """The bound for FP8 is larger, because another order of additions changes some codes, and a changed E5M2 code
    differs by up to a quarter of the value. The bound is largest on GPUs, because their FP8 units keep about 14 bits of
    a sum, while CPUs sum in fp32."""
    _, mesh, options = MESHES[name]
    own = [option for option in options if option in (*BF16, *FP8)] + [o for o in mesh if o.startswith(FOR_ONE)]
    expected = one_rank(ranks(1), *own)
    bound = (4e-2 if device_type == "cuda" else 1e-2) if options == FP8 else 1e-5
    for found in ranks(world).run(trained, config(tmp_path, data, "--mesh.cp=2", *mesh, *options)):
        differ = errors(found, expected)
        assert max(differ[what] for what in ("gradients", "norm", "losses")) < bound, differ
        assert differ["weights"] < 2 * bound, differ  # AdamW amplifies errors of small gradients


@pytest.mark.ranks(2)
def test_the_comparison_notices_a_fault_over_cp(ranks, one_rank, tmp_path, data):
    expected = one_rank(ranks(1), *BF16)
    asked = config(tmp_path, data, "--mesh.cp=2", "--mesh.tp=1", *BF16)
    for fault in FAULTS.keys() - {"none"}:
        found = ranks(2).run(trained, asked, fault, 0)[0]
        worst = max(relative_error(found.gradients[name], each) for name, each in expected.gradients.items())
        assert worst > 0.05, f"{fault}: {worst:.1e}"


def evaluated(path: Path) -> evaluate.Perplexity:
    found = open_trained(path, [])
    return evaluate.perplexity(found, evaluate.read_data(found, path), "validation", 1)


@pytest.mark.ranks(2)
def test_a_checkpoint_goes_on_without_cp(ranks, tmp_path, data):
    options = [*BF16, "--mesh.tp=1", "--train.steps=4", "--train.eval_every=4"]
    first = config(tmp_path, data, *options, "--mesh.cp=2")
    ranks(2).run(training.run, first)
    saved = Path(first.run.dir) / "checkpoints" / "step-2"
    then = config(tmp_path, data, *options, f"--checkpoint.resume={saved}")
    ranks(1).run(training.run, then)
    losses = training.metrics(first), training.metrics(then)
    assert losses[1].keys() == {3, 4}
    for step, loss in losses[1].items():
        assert loss == pytest.approx(losses[0][step], abs=1e-5)
    found = [ranks(world).run(evaluated, saved)[0] for world in (1, 2)]
    assert found[0].loss == pytest.approx(found[1].loss, abs=1e-5) and found[0].tokens == found[1].tokens


# Codes


WIDTH = 64


def codes(cp: int, amax_group: str) -> dict[str, Tensor]:
    """Codes and scales of x, w and dy in one step of two fp8_current layers, with tokens in the order of the
    sequence."""
    recipe, seen = recording(load("fp8_current"))
    mesh = worker.mesh(cp=cp, tp=1)
    context = Context.of(mesh)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        x, dy = torch.randn(2, 32, WIDTH).cumsum(1), torch.randn(2, 32, WIDTH).cumsum(1)
    x, dy = x.to(worker.device()), dy.to(worker.device())
    model.to(worker.device()).context = context  # type: ignore[assignment]
    dlp.convert(model, [dlp.LayerGroup("all", "**", recipe=recipe)], mesh, amax_group=amax_group)
    model(context.split(x)).backward(context.split(dy))
    found = {}
    for tensor in ("x", "w", "dy"):
        for layer, made in enumerate(seen[tensor, "rowwise"]):
            payload, scale = made.parts[0].view(torch.uint8), made.parts[1]
            if tensor != "w":
                payload = context.gather(payload.view(2, -1, WIDTH).int())
            found[f"{layer}.{tensor}"], found[f"{layer}.{tensor} scale"] = payload.flatten(), scale.clone()
    return found


@pytest.mark.ranks(2)
def test_codes_over_cp_are_those_of_one_rank_where_scales_are_agreed(ranks):
    (expected,) = ranks(1).run(codes, 1, "tp")
    assert {"0.x", "1.x", "0.w", "1.w", "0.dy", "1.dy"} <= expected.keys()
    for found in ranks(2).run(codes, 2, "tp+cp"):
        for name, one in expected.items():
            assert torch.equal(found[name], one.to(found[name].dtype)), name
    alone = ranks(2).run(codes, 2, "auto")[0]
    assert not torch.equal(alone["0.x"], expected["0.x"].to(alone["0.x"].dtype)), "scales of parts of the tokens"


# Refusals and plans


class WithAttention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.proj, self.attention = nn.Linear(16, 16), attention


def refused() -> list[str]:
    mesh, said = worker.mesh(cp=2), []
    for attention, invariant in (
        (nn.Identity(), False), (nn.MultiheadAttention(16, 2), False), (dlp.ops.DotProductAttention(2, 8), False),
        (Holds(Context.of(mesh)), True),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            dlp.convert(
                WithAttention(attention), [dlp.LayerGroup("all", "proj", recipe="bf16")], mesh, invariant=invariant
            )
        said.append(str(error.value))
    return said


class Holds(nn.Module):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context


@pytest.mark.ranks(2)
def test_what_cp_does_not_support_is_refused_by_name(ranks):
    nothing, torchs, ops, invariant = ranks(2).run(refused)[0]
    assert nothing.startswith("cp = 2, but no module of the model holds a dlp.Context")
    assert torchs.startswith("attention: MultiheadAttention reads whole sequences")
    assert ops.startswith("attention: DotProductAttention reads whole sequences")
    assert invariant.startswith("invariant = true: cp = 2: attention sums gradients of keys")
    for options, sentence in (
        (["--train.sequence=510"], r"\[mesh\] cp: expected a divisor of half of \[train\] sequence = 510"),
        (["--data.reset_attention=true"], r"\[mesh\] cp: expected 1 with \[data\] reset_attention = true"),
        (["--train.invariant=true"], r"\[mesh\] cp: expected 1 with \[train\] invariant = true"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load_config("tiny", ["--mesh.cp=2", *options])


def test_the_plan_counts_tokens_keys_and_memory_of_a_rank():
    sizes = ["--train.micro_batch=2", "--mesh.sequence_parallel=false"]
    one, two = (
        memory_check.planned(load_config("tiny", [*sizes, f"--mesh.cp={cp}"]), 2 * cp, "sm_90") for cp in (1, 2)
    )
    assert two.load.tokens * 2 == one.load.tokens
    assert (two.load.shards, two.dims.shard_axis) == (2, "dp_shard_cp")
    saved = [found.memory.rows["saved activations"]["loss"] for found in (one, two)]
    assert 0.5 < saved[1] / saved[0] < 0.75, "half of the tokens, and the keys of all"
    sent = wire_bytes.by_group(wire_bytes.planned(two.plan, two.load))
    assert sent["cp"] > 0 and "dp_shard_cp" not in sent, "FSDP's ranks are those of cp"
    text = plan_text(load_config("tiny", [*sizes, "--mesh.cp=2"]), 8, "sm_90")
    assert text.startswith("mesh: 8 sm_90 ranks = dp_replicate 1 x dp_shard 2 x cp 2 x tp 2")
    assert "cp 2: NCCL (keys and values of attention); dp_shard_cp 4: NCCL (FSDP's collectives)" in text


def timed(file: str) -> None:
    with patch.multiple(bench_context, init_process_group=lambda device_type: None, shutdown=lambda: None, COUNT=1):
        bench_context.main(["--tokens", "128", "256", "--backends", "flash", "--json", file])


@pytest.mark.ranks(2)
def test_attention_over_cp_is_timed_beside_torchs(ranks, tmp_path):
    ranks(2).run(timed, str(tmp_path / "context.json"))
    rows = json.loads((tmp_path / "context.json").read_text())
    assert {(row["cp"], row["tokens"]) for row in rows if row["attention"] == "dlp"} == {(2, 128), (2, 256)}
    assert all(row["both"] > 0 and row["error"] < 2**-6 for row in rows if not row["refused"])
    assert not any(row["refused"] for row in rows if row["attention"] == "dlp" or "repeated" in row["attention"])
    assert {row["attention"] for row in rows} >= ({"dlp", "torch alltoall"} if torch.cuda.is_available() else {"dlp"})
