"""A Llama on several ranks compared with one rank, from bitwise equal weights: every gradient by name, the global norm,
the losses.

The model has biases, so that the backward needs every kind of gradient sum over ranks. The last tests remove one kind
of sum each, or the agreement on amaxes, and require that the comparison fails.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import dlp
from dlp import LayerGroup
from dlp.comm.collectives import Pending, done
from dlp.parallel import casts
from dlp.parallel.linear import functional as linear_fn
from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.model.grads import PartialGradients
from dlp.parallel.model.replicas import Replicas
from launch.models.initial_weights import this_ranks_part
from launch.models.modules import Llama
from launch.models.parallel import fuse, parallel_groups
from launch.models.settings import Model
from tests import pool as worker
from tests.cases import nightly
from tests.metrics import relative_error
from tests.net import full
from tests.pool import Pool

pytestmark = pytest.mark.slow

CONFIG = Model(layers=1, hidden=64, ffn=128, heads=4, kv_heads=4, head_dim=16, vocab=64)
BATCH, SEQUENCE, STEPS, FEW = 4, 32, 8, 2


class Kind(NamedTuple):
    """Dtype, recipe and amax group of a comparison, the allowed differences from one rank in gradients (relative
    Frobenius error) and losses (nats), whether the model is fused, and the model family."""

    dtype: torch.dtype
    recipe: str
    amax_group: str
    gradient: float
    loss: float
    fused: bool = False
    family: str = "llama"


# If all ranks share scales and activations are fp32, scales and codes equal those of one rank, and the bounds are
# small. Scales that are computed from shards, and bf16 activations, change codes; such a run may differ from one rank
# as much as one rank differs from fp32.
KINDS = {
    "fp32": Kind(torch.float32, "bf16", "auto", 1e-5, 1e-5),
    "bf16": Kind(torch.bfloat16, "bf16", "auto", 2e-2, 5e-3),
    "fp8_world": Kind(torch.float32, "fp8_current", "world", 6e-2, 1e-2),
    "fp8": Kind(torch.bfloat16, "fp8_current", "auto", 0.16, 1e-2),
    "fused": Kind(torch.float32, "bf16", "auto", 1e-5, 1e-5, fused=True),
    "fused fp8_world": Kind(torch.float32, "fp8_current", "world", 6e-2, 1e-2, fused=True),
    "qwen3": Kind(torch.float32, "bf16", "auto", 1e-5, 1e-5, family="qwen3"),
}


MANY = ("fp32", "fp8")  # kinds that are compared over all steps, in layout LONG; other kinds run a few steps


class Run(NamedTuple):
    """Results of a run: full gradients of the first step by name, the global norm of these gradients, the loss of each step."""

    gradients: dict[str, Tensor]
    norm: float
    losses: list[float]


class Layout(NamedTuple):
    """Sizes of the mesh axes, and whether sequence parallelism is on."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    sequence_parallel: bool = False

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    def __str__(self) -> str:
        axes = zip(("replicate", "shard", "tp"), self[:3], strict=True)
        return "-".join([f"{axis}{size}" for axis, size in axes if size > 1] + ["sp"] * self.sequence_parallel)


ONE = Layout()
# The layout that is compared over all steps; other layouts run a few steps
LONG = Layout(tp=2, dp_shard=2, sequence_parallel=True)
EVERY_KIND = [Layout(tp=2, sequence_parallel=True)]
# Layout -> kinds that run with `--all-cases`; fp32 and fp8 if the layout is not listed. fp32 has the strictest bounds. The
# fused model also runs without sequence parallelism, where gradients of unsharded tokens are summed over tp. With the amax
# group "world" (fp8_world) more ranks share scales than necessary. test_linear.py, test_fsdp_gather.py
# and test_hsdp.py check that gathers and sums keep the bits of fp8.
KINDS_OF = {
    Layout(tp=2): ("fp32", "fp8", "fused"),
    Layout(tp=4, sequence_parallel=True): ("fp32",),
    Layout(dp_shard=4): ("fp32", "bf16", "fp8_world"),
    Layout(dp_replicate=2, dp_shard=2): ("fp32",),
    LONG: ("fp32", "fp8", "fused fp8_world", "qwen3"),
}
# Layout -> kinds that run without `--all-cases`. No layout here has replicas, since test_raw_gradients.py and test_hsdp.py
# test replicas in every run.
CHOSEN = {
    Layout(tp=2): ("fused",),
    Layout(dp_shard=2): ("bf16",),
    Layout(tp=2, sequence_parallel=True): ("fp8", "qwen3"),
    LONG: ("fp32",),
}
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(dp_shard=2),
    Layout(tp=4, sequence_parallel=True),
    Layout(tp=2, dp_shard=2, sequence_parallel=True),
    Layout(dp_shard=4),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_replicate=2, tp=2, sequence_parallel=True),
]


def runs(layout: Layout, kind: str) -> bool:
    """Whether a layout runs with a kind if `--all-cases` is not given."""
    return kind in CHOSEN.get(layout, ())


def initial(name: str, shape: torch.Size) -> Tensor:
    """Return the full initial value of a parameter, which depends only on the name and the full shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    return noise * (0.1 if len(shape) == 1 else 1.0 if "embed" in name else 0.5 * shape[-1] ** -0.5)


def llama(kind: str) -> Llama:
    """Return the unconverted model with biases, on the meta device."""
    with torch.device("meta"):
        model = Llama(replace(CONFIG, fused=KINDS[kind].fused, family=KINDS[kind].family), KINDS[kind].dtype)
        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear):
                module.bias = nn.Parameter(torch.empty(module.out_features))
    return model


@torch.no_grad()
def materialise(model: nn.Module) -> None:
    model.to_empty(device=worker.device())
    for name, parameter in model.named_parameters():
        part = this_ranks_part(initial(name, parameter.shape), parameter)
        (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).copy_(part)


def build(layout: Layout, kind: str) -> tuple[nn.Module, Any]:
    """Return the converted, sharded and initialized model, and the mesh."""
    mesh = worker.mesh(dp_replicate=layout.dp_replicate, dp_shard=layout.dp_shard, tp=layout.tp)
    model = llama(kind)
    recipe = LayerGroup("recipe", ["layers.**.*_proj"], recipe=KINDS[kind].recipe)
    groups = [*parallel_groups(model.config, layout.sequence_parallel), recipe]
    batch = (BATCH // (layout.dp_replicate * layout.dp_shard), SEQUENCE)
    dlp.convert(model, groups, mesh, batch=batch, amax_group=KINDS[kind].amax_group)
    fuse(model)
    if layout.dp_replicate * layout.dp_shard > 1:
        policy = MixedPrecisionPolicy(param_dtype=KINDS[kind].dtype, reduce_dtype=torch.float32)
        for block in model.model.layers:
            dlp.fully_shard(block, mesh=mesh, mp_policy=policy)
        dlp.fully_shard(model, mesh=mesh, mp_policy=policy)
    materialise(model)
    return model, mesh


def batches(layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's tokens and targets [sequences, SEQUENCE] of each step, one microbatch per step."""
    generator = torch.Generator().manual_seed(5)
    dp = layout.dp_replicate * layout.dp_shard
    for _ in range(STEPS):
        text = torch.randint(0, CONFIG.vocab, (BATCH, SEQUENCE + 1), generator=generator)
        mine = text.chunk(dp)[dist.get_rank() // layout.tp].to(worker.device())
        yield mine[:, :-1], mine[:, 1:]


def train(layout: Layout, kind: str, mutation: str = "none", steps: int = STEPS) -> Run:
    model, mesh = build(layout, kind)
    dp, tokens = layout.dp_replicate * layout.dp_shard, BATCH * SEQUENCE
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    dlp.attach(model, optimizer)
    losses: list[float] = []
    with MUTATIONS[mutation](model):
        for _, (x, targets) in zip(range(steps), batches(layout), strict=False):
            loss = dlp.cross_entropy(model(x), targets.reshape(-1), mesh) / tokens
            (loss * dp).backward()
            if not losses:
                gradients = {name: full(p.grad).clone() for name, p in model.named_parameters()}
                norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)).item()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach() / layout.tp  # the sum over ranks counts the loss of a tp group tp times
            dist.all_reduce(total)
            losses.append(total.item())
    return Run(gradients, norm, losses)


def train_plain() -> Run:
    """Run one forward and backward of the unconverted fp32 model, without dlp."""
    model = llama("fp32")
    materialise(model)
    x, targets = next(batches(ONE))
    loss = F.cross_entropy(model(x), targets.reshape(-1))
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return Run(gradients, torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item(), [loss.item()])


@contextmanager
def without_sums(kind: type[nn.Module] | None, model: nn.Module) -> Iterator[None]:
    """Context without the sum over tp of some partial gradients: of linears if `kind` is ParallelLinear, of all other
    modules if `kind` is None. The check of replicas is off, because it would raise in the first step."""
    partial: PartialGradients = model.partial_gradients
    before = partial.slots
    partial.slots = [slot for slot in before if isinstance(slot.module, ParallelLinear) != (kind is ParallelLinear)]
    assert 0 < len(partial.slots) < len(before)
    with patch.object(Replicas, "look"):
        yield
    partial.slots = before


def without_reduction(model: nn.Module) -> Any:
    """Return a patch that removes the reduce-scatter of layers.0.self_attn.o_proj: of the partial result that a rank computed,
    the rank keeps the rows of its token shard."""
    name, original, skipped = "model.layers.0.self_attn.o_proj", linear_fn.token_gemm, []

    def token_gemm(spec: Any, reduce: Any, operands: Any, gemms: Any, wire: Any) -> Pending[Tensor]:
        if spec.name != name or reduce is None:
            return original(spec, reduce, operands, gemms, wire)
        skipped.append(name)
        return done(gemms[0](operands[0]).to(wire).chunk(spec.tp)[spec.tp_group.rank()].contiguous())

    return patch.object(linear_fn, "token_gemm", token_gemm)


def without_agreement(model: nn.Module) -> Any:
    return patch.object(casts, "agrees", lambda *_, **__: False)


MUTATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda model: nullcontext(),
    "norm gradients": functools.partial(without_sums, None),
    "bias gradients": functools.partial(without_sums, ParallelLinear),
    "one reduction": without_reduction,
    "amax group": without_agreement,
}


@pytest.fixture(scope="module")
def one_rank(pools: Any) -> Callable[[Any, str], Run]:
    """Return a cached function that runs a kind on one rank, with as many steps as the longest comparison needs."""

    def run(ranks_of_one: Pool, kind: str) -> Run:
        return ranks_of_one.run(train, ONE, kind, "none", STEPS if kind in MANY else FEW)[0]

    return functools.cache(run)


def errors(run: Run, expected: Run) -> dict[str, float]:
    assert run.gradients.keys() == expected.gradients.keys()
    found = {name: relative_error(gradient, expected.gradients[name]) for name, gradient in run.gradients.items()}
    return found | {"global norm": abs(run.norm / expected.norm - 1)}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["fp32", nightly("fused")])
def test_one_converted_rank_trains_as_the_plain_model(ranks, one_rank, kind):
    converted, plain = one_rank(ranks(1), kind), ranks(1).run(train_plain)[0]
    assert max(errors(converted, plain).values()) <= KINDS[kind].gradient
    assert abs(converted.losses[0] - plain.losses[0]) <= KINDS[kind].loss


@pytest.mark.parametrize(
    ("layout", "world", "kind"),
    [
        (layout, layout.world, kind) if runs(layout, kind) else nightly(layout, layout.world, kind)
        for layout in LAYOUTS
        for kind in KINDS
        if layout in EVERY_KIND or kind in KINDS_OF.get(layout, ("fp32", "fp8"))
    ],
    ids=str,
)
def test_many_ranks_train_as_one(ranks, one_rank, layout, world, kind):
    expected = one_rank(ranks(1), kind)
    runs = ranks(world).run(train, layout, kind, "none", STEPS if layout == LONG and kind in MANY else FEW)
    found = errors(runs[0], expected)
    worst = max(found, key=lambda name: found[name])
    differences = [abs(a - b) for a, b in zip(runs[0].losses, expected.losses, strict=False)]
    assert all(run.losses == runs[0].losses for run in runs)
    assert found[worst] <= KINDS[kind].gradient, f"{worst}: {found[worst]:.2e}"
    assert max(differences) <= KINDS[kind].loss, differences


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mutation", "kind", "damaged"),
    [
        ("norm gradients", "fp32", "norm.weight"),
        nightly("norm gradients", "fused", "norm.weight"),
        nightly("norm gradients", "qwen3", "norm.weight"),
        ("bias gradients", "fp32", "_proj.bias"),
        ("one reduction", "fp32", ""),
        ("amax group", "fp8", ""),
        nightly("amax group", "fp8_world", ""),
    ],
)
def test_the_comparison_notices_what_is_missing(ranks, one_rank, mutation, kind, damaged):
    layout = Layout(tp=2, sequence_parallel=True)
    found = errors(ranks(2).run(train, layout, kind, mutation, 1)[0], one_rank(ranks(1), kind))
    worst = max(found, key=lambda name: found[name])
    assert found[worst] > 1.5 * KINDS[kind].gradient and worst.endswith(damaged), f"{worst}: {found[worst]:.2e}"
