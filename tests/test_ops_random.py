"""Random sequences of ops: fused they are what they are op by op, and where torch watches; also on token shards."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dlp import ops
from tests.kept import fusions_kept
from tests.metrics import relative_error
from tests.test_ops import H, M, Watched, values

Ops = list[nn.Module]
DRAWN: list[Callable[[], Ops]] = [  # of H features, all of them
    lambda: [ops.RMSNorm(H)], lambda: [ops.LayerNorm(H)], lambda: [ops.L2Normalization()], lambda: [ops.Dropout(0.0)],
    lambda: [ops.GELU()], lambda: [ops.SReLU()], lambda: [ops.Bias(H)], lambda: [ops.ConstantScale(0.5)],
    lambda: [ops.Identity()], lambda: [ops.Quantize(recipe="bf16")],
    lambda: [ops.AddExtraInput()], lambda: [ops.AddExtraInput(in_place=True)],
    lambda: [ops.MakeExtraOutput()], lambda: [ops.MakeExtraOutput(in_place=True)],
    lambda: [ops.Linear(H, H)], lambda: [ops.BasicLinear(H, H)], lambda: [ops.Linear(H, H, return_bias=True)],
    lambda: [ops.Linear(H, (H, H)), ops.SwiGLU()], lambda: [ops.Linear(H, (H, H), bias=False), ops.GEGLU()],
    lambda: [ops.Linear(H, 2 * H), ops.ReGLU()], lambda: [ops.Reshape((-1, 2, H)), ops.Reshape((-1, H))],
]  # fmt: skip


def drawn(draw: random.Random) -> ops.Sequential:
    """Up to six of these; some parameters do not learn."""
    model = ops.Sequential(*[op for _ in range(draw.randint(1, 6)) for op in draw.choice(DRAWN)()])
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.requires_grad_(draw.random() < 0.85)
    return model


def results(model: ops.Sequential, learns: bool, unused: Sequence[bool]) -> list[Tensor | None]:
    """Outputs that learn from some of them; gradients of x, of extra inputs and of parameters."""
    x = values(1, M, H).requires_grad_(learns)
    extra = [values(10 + i, M, H).requires_grad_() for i in range(sum(op.basic_extra_inputs for op in model))]  # type: ignore[misc]
    found = model(x, *[1.0 * each for each in extra])
    outputs = found if isinstance(found, tuple) else (found,)
    chosen = [y for y, left in zip(outputs, unused, strict=False) if not left and y.requires_grad]
    if chosen:
        torch.autograd.backward(chosen, [values(100 + i, *y.shape) for i, y in enumerate(chosen)])
    return [
        *[y.detach() for y in outputs],
        x.grad,
        *[each.grad for each in extra],
        *[p.grad for p in model.parameters()],
    ]


def test_fused_as_op_by_op():
    """None for a gradient is as good as zeros."""
    for seed in range(80):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        model, learns, unused = drawn(draw), draw.random() < 0.8, [draw.random() < 0.25 for _ in range(8)]
        ways: dict[str, Any] = {
            "fused": nullcontext(), "basic": fusions_kept(none=True), "watched": Watched(),
        }  # fmt: skip
        found = {}
        for way, inside in ways.items():
            with inside:
                found[way] = results(copy.deepcopy(model), learns, unused)
        for way in ("basic", "watched"):
            for place, (one, other) in enumerate(zip(found["fused"], found[way], strict=True)):
                if one is None or other is None:
                    rest = one if other is None else other
                    assert rest is None or not rest.any(), f"{seed} {way} {place}: {model}"
                else:
                    assert relative_error(one, other) < 1e-4 or not (one - other).any(), (
                        f"{seed} {way} {place}: {model}"
                    )
