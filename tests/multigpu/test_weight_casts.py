"""Weights that the step boundary casts together train like weights that are cast at each use, bit for bit.

The tests cover all kinds of parameters and optimizers, fp32 weights with bf16 activations, and sizes that need padding.
Without a GPU the device is emulated (`tests.emulated`), so that the preparation of kernel arguments is tested, too.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import dlp
from dlp.parallel.model.session import session_of
from tests import pool as worker
from tests.cases import BY_SCALES, few, nightly
from tests.emulated import emulation
from tests.metrics import assert_all_bit_equal, assert_bit_equal, factor, relative_error
from tests.observe import Collectives
from tests.shardnet import whole

QUANTIZED = [name for name in BY_SCALES if name != "bf16"]
OPTIMIZERS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SIZES = [(96, 150), (150, 256), (256, 64)]  # K -> N of three linears; 150 is not a multiple of any block
Trained = tuple[list[Tensor], dict[str, Tensor]]


class Net(nn.Module):
    """Three linears, x [tokens, 96] -> [tokens, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n) for k, n in SIZES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def made(recipe: Any, held: str, optimizer: str, cached: bool) -> tuple[Net, torch.optim.Optimizer]:
    """Return the network and its optimizer. held: "plain" (replicas of fp32 weights), "dtensor" (sharded over tp) or
    "fsdp"."""
    torch.manual_seed(0)
    model = Net().to(worker.device())
    mesh = worker.mesh(**{"plain": {"dp_replicate": 2}, "dtensor": {"tp": 2}, "fsdp": {"dp_shard": 2}}[held])
    groups = [{"name": "all", "match": ["**"], "recipe": recipe}]
    if held == "dtensor":
        groups += [
            {"name": "column", "match": ["layers.0"], "style": "column"},
            {"name": "row", "match": ["layers.1"], "style": "row"},
        ]
    dlp.convert(model, groups, mesh)
    if held == "fsdp":
        dlp.fully_shard(model, mesh=mesh, mp_policy=BF16, quantized_gather=cached)
    chosen = torch.optim.AdamW(model.parameters(), lr=1e-2, **OPTIMIZERS[optimizer])
    dlp.attach(model, chosen, weight_cache="step" if cached else "forward")
    return model, chosen


def trained(recipe: Any, held: str, optimizer: str, cached: bool) -> Trained:
    """Return the losses of four steps and the weights afterwards. After the second step, a load scales all weights, and a
    further loss is computed before the next step boundary."""
    with ExitStack() as kernels:
        if worker.device().type == "cpu":
            kernels.enter_context(emulation(batches=True))
        model, chosen = made(recipe, held, optimizer, cached)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for step in range(4):
            x = torch.randn(64, SIZES[0][0], generator=generator).bfloat16().to(worker.device())
            loss = model(x).float().square().sum()
            loss.backward()
            losses.append(loss.detach().cpu())
            for parameter in model.parameters() if held == "plain" else ():  # replicas: average the gradients
                grad = parameter.grad.to_local()
                dist.all_reduce(grad)
                grad.div_(2)
            chosen.step()
            chosen.zero_grad()
            if step == 1:
                model.load_state_dict({name: value * 0.75 for name, value in model.state_dict().items()})
                with torch.no_grad():
                    losses.append(model(x).float().square().sum().cpu())
                dlp.end_step(model)
        batch = session_of(model).weight_batch
        assert bool(batch and batch.casts._prepared.launches) == cached, (
            "prepared where weights are cast at the boundary"
        )
        return losses, {name: whole(p).cpu() for name, p in model.named_parameters()}


def compared(recipe: Any, held: str, optimizer: str) -> tuple[Trained, Trained]:
    return trained(recipe, held, optimizer, True), trained(recipe, held, optimizer, False)


CASES = few(((recipe, "dtensor", "fused") for recipe in QUANTIZED), ("fp8_block",))  # each rank casts its shard
CASES += few(((recipe, "fsdp", "fused") for recipe in QUANTIZED), ("nvfp4",))
CASES += [nightly("fp8_block", "plain", "fused"), nightly("nvfp4", "plain", "fused")]
CASES += [
    nightly("fp8_current", "plain", "for-loop"),
    nightly("fp8_current", "fsdp", "for-loop"),
    nightly("fp8_current", "dtensor", "foreach"),
]
CASES += [nightly({"name": name, "amax_scope": "all"}, "dtensor", "fused") for name in ("fp8_current", "nvfp4")]
CASES += [nightly({"name": "fp8_rowwise", "amax_scope": "all"}, "dtensor", "fused")]
CASES += [nightly({"name": "nvfp4", "disable_2d_quantization": True}, "fsdp", "fused")]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("recipe", "held", "optimizer"), CASES, ids=str)
def test_training_on_weights_cast_at_the_boundary_is_training_on_weights_cast_at_use(ranks, recipe, held, optimizer):
    for cached, at_use in ranks(2).run(compared, recipe, held, optimizer):
        for step, (loss, expected) in enumerate(zip(cached[0], at_use[0], strict=True)):
            assert_bit_equal(loss, expected, f"loss of step {step}")
        assert len({float(loss) for loss in cached[0]}) == 5, "the weights change"
        assert_all_bit_equal(cached[1], at_use[1])


def kept(cache: str) -> tuple[int, list[str]]:
    """Return the number of parts of weight operands that layers keep after a step, and the notes about weight_cache
    under FSDP."""
    found = []
    for held in ("dtensor", "fsdp"):
        model, chosen = made("fp8_current", held, "fused", cache == "step")
        model(torch.ones(64, SIZES[0][0], device=worker.device()).bfloat16()).sum().backward()
        chosen.step()
        found.append(model)
    parts = sum(len(weight.parts) for weight in session_of(found[0]).weights())
    return parts, sorted(note for note in session_of(found[1]).noted if "weight_cache" in note)


@pytest.mark.ranks(2)
def test_what_is_cast_at_use_is_not_kept(ranks):
    assert ranks(2).run(kept, "step") == [(12, [])] * 2
    note = (
        "weight_cache = 'forward' does not affect FSDP shards, which stay quantized: set quantized_gather = false "
        "to keep no casts"
    )
    assert ranks(2).run(kept, "forward") == [(0, [note])] * 2


@pytest.mark.parametrize("used", [(1,), (0, 2), (2,)], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "nvfp4"])
@pytest.mark.parametrize("watched", [False, True], ids=["direct", "as ops"])
def test_dx_of_some_siblings_is_made_of_their_own_kept_weights(recipe, used, watched):
    torch.manual_seed(0)
    model = nn.Sequential(dlp.Linear(64, (32, 64, 32), recipe=recipe))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dlp.attach(model, optimizer)
    model(torch.ones(32, 64, requires_grad=True))[0].sum().backward()
    optimizer.step()
    assert model[0].core.weights.parts is not None, "weights are kept"
    x = torch.randn(32, 64, requires_grad=True)
    with Collectives() if watched else nullcontext():
        ys = model(x)
        sum(ys[i].sum() for i in used).backward()
    weights = [model[0].get_parameter(f"weight_{i}").detach() for i in used]
    expected = sum(torch.ones(32, len(w)) @ w for w in weights)
    assert relative_error(x.grad, expected) < 0.2 and factor(x.grad, expected) == pytest.approx(1, abs=0.05)


def test_another_cache_is_refused():
    model = nn.Sequential(dlp.Linear(16, 16))
    with pytest.raises(ValueError, match="weight_cache must be one of step, forward; got 'backward'"):
        dlp.attach(model, torch.optim.SGD(model.parameters()), weight_cache="backward")


def reductions(recipe: Any, held: str) -> int:
    """Return the number of amax reductions over ranks that a step boundary launches."""
    model, _ = made(recipe, held, "fused", True)
    model(torch.ones(64, SIZES[0][0], device=worker.device()).bfloat16()).sum().backward()
    with Collectives() as seen:
        dlp.end_step(model)
    return seen.count("reduce")


@pytest.mark.ranks(2)
def test_the_amaxes_of_all_weights_are_agreed_in_one_all_reduce(ranks):
    everywhere = {"name": "fp8_current", "amax_scope": "all"}
    assert ranks(2).run(reductions, everywhere, "dtensor") == [1, 1]
    assert ranks(2).run(reductions, "fp8_current", "fsdp") == [1, 1]
    assert ranks(2).run(reductions, "fp8_current", "dtensor") == [0, 0]
