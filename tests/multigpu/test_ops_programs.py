"""Captured passes of a fuser on tp ranks have the bits of passes without capture.

Through mapped memory a pass is one native call. With collectives a pass is a few native calls, and the collectives run
between these calls. On the CPU the device is emulated.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dlp
from dlp import ops
from dlp.runtime.capture import CapturedLaunches
from tests import pool as worker
from tests.cases import few
from tests.metrics import assert_bit_equal
from tests.multigpu.test_programs import device, moved_by
from tests.paired_models import K, M, values, without_programs
from tests.restored_tables import restored_fusions

pytestmark = pytest.mark.ranks(2)
SEGMENTS = {  # (recipe, delay) -> segments of each pass. L: launches, C: start of a collective, A: wait for the collective
    ("fp8_current", False): {"forward": ["LCALCLALCAL"], "backward": ["LCALCLALCLCALAL"]},
    ("bf16", True): {"forward": ["LCALCAL"], "backward": ["CALCLCAAL"]},
}
Found = tuple[dict[str, list[str]], str, list[Tensor]]


def mlp(recipe: str, group: Any, overlap: str) -> ops.Sequential:
    """Return an MLP of norm, gate and up, SwiGLU and down, with tp and sequence parallelism."""
    torch.manual_seed(0)
    more: dict[str, Any] = {
        "tensor_parallel_group": group,
        "sequence_parallel": True,
        "recipe": recipe,
        "overlap": overlap,
    }
    return ops.Sequential(
        ops.RMSNorm(K),
        ops.Linear(K, (2 * K, 2 * K), bias=False, tensor_parallel_mode="column", dtype=torch.bfloat16, **more),
        ops.SwiGLU(),
        ops.Linear(2 * K, K, bias=False, tensor_parallel_mode="row", dtype=torch.bfloat16, **more),
    )


def between_collectives(recipe: str, group: Any) -> ops.Sequential:
    """Return an MLP with explicit collectives before and after the linears, which have no process group, so that each
    rank runs unsharded linears."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"recipe": recipe, "dtype": torch.bfloat16, "bias": False}
    return ops.Sequential(
        ops.RMSNorm(K), ops.AllGather(group.get_group()), ops.BasicLinear(K, (2 * K, 2 * K), **more), ops.SwiGLU(),
        ops.BasicLinear(2 * K, K, **more), ops.ReduceScatter(group.get_group()),
    )  # fmt: skip


def states(model: ops.Sequential) -> dict[str, list[str]]:
    """Return, for each pass, the segments of captured launches, or the reason why the pass is not captured."""
    found: dict[str, list[str]] = {}
    for plan in model._groups_now()[0].plans.values():
        for plan_pass in plan.captured:
            made = plan_pass.captured.found.values()
            found.setdefault(plan_pass.name, []).extend(
                each.segments if isinstance(each, CapturedLaunches) else each for each in made
            )
    return found


def on_ranks(recipe: str, overlap: str, delay: bool, basic: bool, explicit: bool) -> list[Found]:
    """Run the model three times: with mapped memory, with collectives, and with collectives and no capture. Return the
    states of the passes, the plan and the results of each run."""
    mesh, found = worker.mesh(dp_shard=1, tp=2), list[Found]()
    for mapped, off in ((True, nullcontext()), (False, nullcontext()), (False, without_programs())):
        with device(), off, restored_fusions(none=basic), moved_by(mesh["tp"].get_group(), mapped):  # type: ignore[attr-defined]
            made = between_collectives(recipe, mesh["tp"]) if explicit else mlp(recipe, mesh["tp"], overlap)
            model = made.to(worker.device())
            linears = [each for each in model if isinstance(each, ops.BasicLinear)]
            for linear in linears:
                spec = linear.core.spec
                linear.core.set_spec(replace(spec, options=replace(spec.options, delay_wgrad=delay)))
            results = list[Tensor]()
            for seed in range(4):
                x = values(10 * seed + dist.get_rank(), M, K).to(worker.device()).requires_grad_()
                y = model(x)
                y.backward(values(100 + seed + dist.get_rank(), *y.shape).to(worker.device()))
                if delay:
                    for linear in linears:
                        # `backward_dw` expects the attribute that an explicitly constructed layer has
                        vars(linear)["dlp_session"] = linear.core.session
                        assert dlp.backward_dw(linear) == len(linear.core.members)
                results += [y.detach(), x.grad]
                for weight in model.parameters():
                    results.append(getattr(weight.grad, "_local_tensor", weight.grad))
                model.zero_grad()
            found.append((states(model), str(model.plan()), results))
    return found


def check(
    ranks: Any, recipe: str, overlap: str = "serial", delay: bool = False, basic: bool = False, explicit: bool = False
) -> Any:
    """Assert that all three runs have equal bits; return (states, plan) of the run with mapped memory and of the run
    with collectives."""
    for found in ranks(2).run(on_ranks, recipe, overlap, delay, basic, explicit):
        (*_, through_memory), (*_, by_calls), (*_, expected) = found
        for results in (through_memory, by_calls):
            for result, wanted in zip(results, expected, strict=True):
                assert_bit_equal(result, wanted)
    mapped, calling, none = ((states, plan) for states, plan, _ in found)
    assert not any(none[0].values())
    return mapped, calling


@pytest.mark.parametrize("delay", [False, True], ids=["now", "waiting"])
@pytest.mark.parametrize(
    "recipe", few(["bf16", "fp8_current", "fp8_delayed", "fp8_block"], ("fp8_delayed", "fp8_block"))
)
def test_a_fuser_that_communicates(ranks, recipe: str, delay: bool):
    """With mapped memory each pass is one native call. With collectives, forward gathers x before fprop and reduces the
    result of the row layer; backward gathers dy for dgrad of the row layer first. With fp8_current, an agreement on the
    amax comes before each of these gathers."""
    (mapped, said), (calling, by_calls) = check(ranks, recipe, delay=delay)
    assert "L" in mapped["forward"] and "L" in mapped["backward"], mapped
    assert "captured: forward, native calls: 1" in said and "captured: backward, native calls: 1" in said
    assert SEGMENTS.get((recipe, delay), calling) == calling, calling
    assert "others between" in by_calls and "op by op" not in by_calls


def test_chunks_are_captured_however_they_are_sent(ranks):
    (mapped, said), (calling, by_calls) = check(ranks, "fp8_current", "chunked")
    assert "L" in mapped["forward"] and "L" in mapped["backward"] and "op by op" not in said
    assert "others between" in by_calls and "op by op" not in by_calls


def test_ops_that_communicate_by_themselves(ranks):
    (mapped, said), (calling, by_calls) = check(ranks, "bf16", basic=True)
    assert "op by op" not in said + by_calls, said + by_calls


def test_collectives_of_the_users_send_through_mapped_memory(ranks):
    """The linears have no process group; the ops fused with collectives do."""
    (mapped, said), _ = check(ranks, "fp8_current", explicit=True)
    assert "L" in mapped["forward"] and "L" in mapped["backward"], mapped
    assert "GatheredLinear" in said and "ReducedLinear" in said
