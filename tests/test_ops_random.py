"""Random `ops.Sequential`: with fusions their results equal the results of the basic ops, also under a dispatch mode
and on token shards."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlp import ops
from tests import pool as worker
from tests.emulated import emulation
from tests.metrics import assert_bit_equal, relative_error
from tests.ops_models import H, M, Watched, values
from tests.paired_models import without_programs
from tests.restored_tables import restored_fusions

Ops = list[nn.Module]
DRAWN: list[Callable[[], Ops]] = [  # functions that make ops on H features; some make a group of ops that can be fused
    lambda: [ops.RMSNorm(H)], lambda: [ops.LayerNorm(H)], lambda: [ops.L2Normalization()], lambda: [ops.Dropout(0.0)],
    lambda: [ops.GELU()], lambda: [ops.SReLU()], lambda: [ops.Bias(H)], lambda: [ops.ConstantScale(0.5)],
    lambda: [ops.Identity()], lambda: [ops.Quantize(recipe="bf16")],
    lambda: [ops.AddExtraInput()], lambda: [ops.AddExtraInput(in_place=True)],
    lambda: [ops.MakeExtraOutput()], lambda: [ops.MakeExtraOutput(in_place=True)],
    lambda: [ops.AddExtraInput(), ops.MakeExtraOutput(), ops.RMSNorm(H)], lambda: [ops.MakeExtraOutput(), ops.RMSNorm(H)],
]  # fmt: skip
LINEARS: list[Callable[[], Ops]] = [
    lambda: [ops.Linear(H, H)], lambda: [ops.BasicLinear(H, H)], lambda: [ops.Linear(H, H, return_bias=True)],
    lambda: [ops.Linear(H, (H, H)), ops.SwiGLU()], lambda: [ops.Linear(H, (H, H), bias=False), ops.GEGLU()],
    lambda: [ops.Linear(H, 2 * H), ops.ReGLU()], lambda: [ops.Reshape((-1, 2, H)), ops.Reshape((-1, H))],
    lambda: [ops.Linear(H, H), ops.AddExtraInput(in_place=True)], lambda: [ops.Linear(H, H), ops.SiLU()],
    lambda: [ops.BasicLinear(H, H), ops.ConstantScale(0.3), ops.AddExtraInput(in_place=True)],
    lambda: [ops.MakeExtraOutput(in_place=True), ops.BasicLinear(H, H)],
]  # fmt: skip


def on_shards(tp: Any) -> list[Callable[[], Ops]]:
    """Return functions that make ops from token shards to token shards: column- and row-parallel linears, or linears
    with explicit collectives."""
    more = {"tensor_parallel_group": tp, "sequence_parallel": True}
    column, row = (partial(ops.Linear, tensor_parallel_mode=mode, **more) for mode in ("column", "row"))
    group = tp.get_group()
    return [
        lambda: [column(H, (H, H)), ops.SwiGLU(), row(H, H)], lambda: [column(H, H, bias=False), ops.GELU(), row(H, H)],
        lambda: [column(H, H), ops.MakeExtraOutput(in_place=True), row(H, H)],
        lambda: [column(H, H, bias=False), ops.ConstantScale(0.3), row(H, H, bias=False)],
        lambda: [ops.MakeExtraOutput(in_place=True), column(H, H), ops.SReLU(), row(H, H, return_bias=True)],
        lambda: [ops.AllGather(group), ops.Linear(H, (H, H)), ops.SwiGLU(), ops.BasicLinear(H, H), ops.ReduceScatter(group)],
        lambda: [ops.BasicLinear(H, H), ops.AllReduce(group), ops.Bias(H)],
    ]  # fmt: skip


def drawn(draw: random.Random, those: Sequence[Callable[[], Ops]]) -> ops.Sequential:
    """Draw an `ops.Sequential` of one to six entries of `those` (each entry is an op or a group of ops), and freeze
    some of the parameters."""
    model = ops.Sequential(*[op for _ in range(draw.randint(1, 6)) for op in draw.choice(those)()])
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.requires_grad_(draw.random() < 0.85)
    return model


def results(
    model: ops.Sequential, learns: bool, unused: Sequence[bool], seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Tensor | None]:
    """Run forward, and backward from the outputs that are not `unused`; return the outputs, and the gradients of x, of extra
    inputs and of parameters."""
    model.zero_grad()
    x = values(1 + seed, M, H).to(dtype).requires_grad_(learns)
    extra = [
        values(10 + seed + i, M, H).to(dtype).requires_grad_()
        for i in range(sum(op.basic_extra_inputs for op in model))
    ]  # type: ignore[misc]
    found = model(x, *[1.0 * each for each in extra])
    outputs = found if isinstance(found, tuple) else (found,)
    chosen = [y for y, left in zip(outputs, unused, strict=False) if not left and y.requires_grad]
    if chosen:
        torch.autograd.backward(chosen, [values(100 + i, *y.shape).to(dtype) for i, y in enumerate(chosen)])
    return [
        *[y.detach() for y in outputs],
        x.grad,
        *[each.grad for each in extra],
        *[p.grad for p in model.parameters()],
    ]


def differences(seeds: range, those: Sequence[Callable[[], Ops]], watched: bool, shift: int = 0) -> list[str]:
    """Return the results in which basic ops or, if `watched`, ops under a dispatch mode differ from fused ops, by a
    relative error above 1e-4. A gradient of None is compared as zero."""
    wrong = list[str]()
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed + shift)
        model, learns, unused = drawn(draw, those), draw.random() < 0.8, [draw.random() < 0.25 for _ in range(12)]
        ways = {
            "fused": nullcontext(),
            "basic": restored_fusions(none=True),
            **({"watched": Watched()} if watched else {}),
        }
        found = {}
        for way, inside in ways.items():
            with inside:
                found[way] = results(copy.deepcopy(model), learns, unused)
        for way, its in found.items():
            for place, (one, other) in enumerate(zip(found["fused"], its, strict=True)):
                one, other = (torch.zeros(()) if each is None else each for each in (one, other))
                if (one - other).any() and relative_error(one, other.expand_as(one)) > 1e-4:
                    wrong.append(f"seed {seed}, {way}, result {place}: {model}")
    return wrong


@pytest.fixture
def share(request: pytest.FixtureRequest) -> int:
    """Divisor of the number of models that a test draws: 1 with `--all-cases`, else 3."""
    return 1 if request.config.getoption("--all-cases") else 3


def test_fused_as_op_by_op(share: int):
    assert not differences(range(120 // share), DRAWN + LINEARS, watched=True)


def test_captured_as_launched_one_by_one(share: int):
    """Forward and backward run four times on an emulated device, and at least a third of the models capture launches. All
    results have the bits of a model that launches kernels one by one."""
    captured = 0
    with emulation():
        for seed in range(30 // share):
            draw = random.Random(seed)
            torch.manual_seed(seed)
            model, learns, unused = drawn(draw, DRAWN + LINEARS).bfloat16(), draw.random() < 0.8, [False] * 12
            other = copy.deepcopy(model)
            for step in range(4):
                found = results(model, learns, unused, 1000 * step, torch.bfloat16)
                with without_programs():
                    expected = results(other, learns, unused, 1000 * step, torch.bfloat16)
                for place, (one, its) in enumerate(zip(found, expected, strict=True)):
                    assert (one is None) == (its is None), f"{seed} {step} {place}: {model}"
                    assert one is None or its is None or torch.equal(one, its), f"{seed} {step} {place}: {model}"
            captured += "captured: " in str(model.plan())
    assert captured >= 10 // share


def differences_on_shards(count: int) -> list[str]:
    tp = worker.mesh(dp_shard=1, tp=2)["tp"]
    return differences(range(count), DRAWN + 3 * on_shards(tp), watched=False, shift=1000 * tp.get_local_rank())


@pytest.mark.ranks(2)
def test_fused_as_op_by_op_on_token_shards(ranks: Any, share: int):
    assert ranks(2).run(differences_on_shards, 40 // share) == [[], []]


def only_a_bias(way: str) -> list[Tensor]:
    """Return the gradients of the biases of two linears whose weights are frozen and whose outputs are summed over ranks. If
    `way` is "basic", nothing is fused."""
    tp = worker.mesh(dp_shard=1, tp=2)["tp"]
    found = []
    for ops_of in (on_shards(tp)[-1], lambda: [on_shards(tp)[0]()[-1]]):
        torch.manual_seed(0)
        model = ops.Sequential(*ops_of())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name)
        with restored_fusions(none=way == "basic"):
            weight = next(parameter for name, parameter in model.named_parameters() if name.endswith("weight"))
            y = model(values(tp.get_local_rank(), M, getattr(weight, "_local_tensor", weight).shape[1]))
            y.backward(values(2, *y.shape))
        found += [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.requires_grad]
        assert weight.grad is None
    return found


@pytest.mark.ranks(2)
def test_a_bias_may_learn_alone(ranks: Any):
    for fused, basic in zip(*(ranks(2).run(only_a_bias, way) for way in ("fused", "basic")), strict=True):
        assert len(fused) == 2
        for one, other in zip(fused, basic, strict=True):
            assert_bit_equal(one, other)
