"""dlp.ops on tp ranks: an MLP of ops, with and without sequence parallelism, compared with one rank; FSDP;
conversion."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dlp
from dlp import ops
from dlp.ops.fusions import REGISTERED
from dlp.parallel.linear import quantize as quantization
from tests import pool as worker
from tests.cases import KINDS, RECIPES, few, nightly
from tests.metrics import assert_all_bit_equal, assert_all_close, assert_bit_equal, assert_close, factor, relative_error
from tests.net import full
from tests.ops_models import values
from tests.ops_programs import PROGRAMS, WIDTH, codes_only
from tests.refusals import may_raise, must_raise
from tests.restored_tables import restored_fusions
from tests.test_ops_handed import Halved

H, FFN, M = 64, 128, 64


def block(tp: Any = None, recipe: str = "bf16", sp: bool = False, siblings: bool = True) -> ops.Sequential:
    """Return an `ops.Sequential` of norm, gate and up, SwiGLU and down, with equal weights on all ranks. `siblings`:
    gate and up are two weights of one linear; otherwise the linear has one weight with FFN rows."""
    torch.manual_seed(0)
    column, row = (
        {} if tp is None else {"tensor_parallel_mode": mode, "tensor_parallel_group": tp, "sequence_parallel": sp}
        for mode in ("column", "row")
    )
    return ops.Sequential(
        ops.RMSNorm(H), ops.Linear(H, (FFN, FFN) if siblings else FFN, recipe=recipe, **column), ops.SwiGLU(),
        ops.Linear(FFN, H, recipe=recipe, **row),
    )  # fmt: skip


def step(model: nn.Module, tokens: slice = slice(None)) -> dict[str, Tensor]:
    x = values(1, M, H)[tokens].clone().requires_grad_()
    y = model(x)
    y.backward(values(2, M, H)[tokens])
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {
        f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def refused_batch() -> str:
    mesh = worker.mesh(dp_shard=1, tp=2)
    with pytest.raises(ValueError, match="expects token shards") as raised:
        block(mesh["tp"], sp=True)(values(1, 2, M // 4, H))
    return str(raised.value)


@pytest.mark.ranks(2)
def test_a_batch_behind_a_norm_is_no_token_shard(ranks: Any):
    """An `ops.Sequential` passes tensors with all their dimensions. The linear after the norm gets the 3-dimensional
    batch, and refuses it as a linear outside of an `ops.Sequential` does."""
    assert all("got x of shape (2, 16, 64)" in said for said in ranks(2).run(refused_batch))


def on_ranks(recipe: str, sp: bool, basic: bool) -> dict[str, Tensor]:
    mesh = worker.mesh(dp_shard=1, tp=2)
    with restored_fusions(none=basic):
        model = block(mesh["tp"], recipe, sp)
        rank = mesh["tp"].get_local_rank()
        found = step(model, slice(rank * M // 2, (rank + 1) * M // 2) if sp else slice(None))
        if not basic:
            assert "ReducedLinear[Linear" in str(model.plan())
    return {name: full(tensor) for name, tensor in found.items()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_block", "nvfp4"])
def test_a_block_is_that_of_one_rank_and_its_fusions_that_of_its_ops(recipe: str, sp: bool, ranks: Any):
    fused, basic = (ranks(2).run(on_ranks, recipe, sp, basic) for basic in (False, True))
    alone = step(block(None, recipe))
    bound = {"bf16": 1e-5, "nvfp4": 0.3}.get(recipe, 0.08)
    for rank in range(2):
        assert_all_close(fused[rank], basic[rank], 1e-6 if recipe in ("bf16", "fp8_current") else bound)
    for name, expected in alone.items():
        parts = [found[name] for found in fused]
        if sp and name in ("y", "dx"):
            parts = [torch.cat(parts)] * 2
        # Each of these gradients covers only the tokens of one rank. A converted model sums them over tp; here the test
        # sums them
        if sp and name in ("d0.weight", "d3.bias"):
            parts = [parts[0] + parts[1]] * 2
        for part in parts:
            assert_close(part, expected, bound, name)


def explicit(recipe: str, basic: bool) -> tuple[dict[str, Tensor], list[str], str]:
    """Run unsharded linears between explicit collectives, with x [M, 2, H] on each rank; return the results, the gathered
    operands and the plan. `basic`: collectives are not fused with GEMMs."""
    mesh = worker.mesh(dp_shard=1, tp=2)
    group, rank = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
    torch.manual_seed(rank)  # different weights on each rank
    model = ops.Sequential(
        ops.RMSNorm(H), ops.AllGather(group), ops.Linear(H, (FFN, FFN), recipe=recipe), ops.SwiGLU(),
        ops.BasicLinear(FFN, H, recipe=recipe), ops.ReduceScatter(group), ops.Bias(H),
        ops.AllGather(group), ops.BasicLinear(H, H, recipe=recipe), ops.AllReduce(group),
    )  # fmt: skip
    sent: list[str] = []
    start = quantization.start_gather
    quantization.start_gather = lambda bound, plan, tensor, gathered, mine, lease=None: [
        sent.append(f"{tensor} {mine.format.name}"), start(bound, plan, tensor, gathered, mine, lease)][1]  # fmt: skip
    try:
        with restored_fusions():
            for kept in (REGISTERED.forward, REGISTERED.backward) if basic else ():
                kept[:] = [its for its in kept if its.__name__ not in ("GatheredLinear", "ReducedLinear")]
            REGISTERED.version += 1
            x = values(3 + rank, M, 2, H).bfloat16().requires_grad_()
            model.bfloat16()
            y = model(x)
            y.backward(values(2, *y.shape).bfloat16())
            plan = str(model.plan())
    finally:
        quantization.start_gather = start
    assert x.grad is not None
    grads = {f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad} | grads, sent, plan


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", few(RECIPES, (*KINDS, "fp8_delayed")))
def test_collectives_of_the_users_are_those_of_the_linear_beside(recipe: str, ranks: Any):
    fused, basic = (ranks(2).run(explicit, recipe, basic) for basic in (False, True))
    for (found, sent, plan), (expected, nothing, _) in zip(fused, basic, strict=True):
        if recipe == "fp8_delayed":
            assert "AllReduce: delayed scales of a linear without tensor_parallel_group differ between ranks" in plan
        else:
            assert (
                "GatheredLinear[AllGather, Linear, Bias] | SwiGLU | ReducedLinear[BasicLinear, ReduceScatter, Bias]"
                in plan
            )
            assert "GatheredLinear[AllGather, BasicLinear] | AllReduce" in plan
            assert {name.split()[0] for name in sent} == {"x", "dy"} and not nothing
            assert recipe == "bf16" or not any("hp" in name for name in sent), "what travels is quantized"
        for name, tensor in expected.items():
            if recipe == "nvfp4" and name != "y":  # dy is rounded stochastically
                assert_close(found[name], tensor, 0.4, name)
                assert factor(found[name], tensor) == pytest.approx(1, abs=0.1), name
            else:
                assert_bit_equal(found[name], tensor, name)


def copied() -> list[list[str]]:
    """Copy `ops.Sequential` whose ops have process groups; return the class names of the copied ops. Check that a
    copied op shares only the process group with the original."""
    tp, found = worker.mesh(dp_shard=1, tp=2)["tp"], []
    row = {"tensor_parallel_mode": "row", "tensor_parallel_group": tp, "recipe": "fp8_current"}
    between = ops.Linear(H, H, sequence_parallel=True, output="quantized", grad_input="quantized", **row)
    for model in (
        ops.Sequential(ops.AllGather(tp.get_group()), ops.Quantize(recipe="fp8_current", process_group=tp.get_group())),
        ops.Sequential(between), ops.Sequential(ops.Linear(H, H, **row), ops.GELU()),
    ):  # fmt: skip
        its = [op for module in copy.deepcopy(model) for op in module.expanded]
        for op, mine in zip(its, (op for module in model for op in module.expanded), strict=True):
            assert op is not mine and vars(op).get("process_group") is vars(mine).get("process_group")
            assert op.traced_by is None or op.traced_by in its
        found.append([type(op).__name__ for op in its])
    x = values(1, M, H // 2).requires_grad_()
    one, other = model(x), copy.deepcopy(model)(x)
    assert_bit_equal(one, other)
    return found


@pytest.mark.ranks(2)
def test_copies_of_ops_are_of_the_same_ranks(ranks: Any):
    for found in ranks(2).run(copied):
        assert found == [
            ["AllGather", "Quantize"], ["HandOver", "Linear", "ReduceScatter", "Bias", "HandOver"],
            ["Linear", "AllReduce", "Bias", "GELU"],
        ]  # fmt: skip


def without_a_group() -> str:
    return must_raise(ValueError, ops.Linear, H, H, tensor_parallel_mode="row")


@pytest.mark.ranks(2)
def test_a_mode_without_a_group_is_refused_where_there_are_ranks(ranks: Any):
    """In TE a parallel mode without a group means all ranks. In dlp such a layer would silently be unsharded, so the
    mode is refused."""
    for said in ranks(2).run(without_a_group):
        assert said.startswith('tensor_parallel_mode "row" needs a tensor_parallel_group with 2 ranks: pass the ranks')


def returned_bias() -> tuple[Tensor, Tensor]:
    """Return y + bias of a row-parallel linear that returns the bias, and y of a row-parallel linear that adds the
    bias."""
    mesh, found = worker.mesh(dp_shard=1, tp=2), []
    for apart in (True, False):
        torch.manual_seed(0)
        linear = ops.Linear(H, H, tensor_parallel_mode="row", tensor_parallel_group=mesh["tp"], return_bias=apart)
        x = values(1, M, H).chunk(2, 1)[mesh["tp"].get_local_rank()]
        y = linear(x)
        found.append((sum(y) if apart else y).detach())
    return found[0], found[1]


@pytest.mark.ranks(2)
def test_a_row_parallel_linear_does_not_add_a_bias_that_it_returns(ranks: Any):
    for apart, added in ranks(2).run(returned_bias):
        assert_close(apart, added, 1e-6)


def handed_over(recipe: str, by_reader: bool) -> tuple[list[dict[str, Tensor]], str, list[str], list[list[str]]]:
    """Run a column- and a row-parallel linear on token shards: first with x and dy that Quantize has quantized with
    scales agreed over tp, then with x and dy in high precision. Return (gradients, message, sent, casts).

    gradients    weight gradients of each run
    message      error of the linear for an x with scales that the ranks have not agreed on; "" if there is no error
    sent         gathered operands of both runs, as "tensor format"
    casts        tensors that the linears cast in each run
    """
    mesh = worker.mesh(dp_shard=1, tp=2)
    group, rank, sent, found = mesh["tp"].get_group(), mesh["tp"].get_local_rank(), list[str](), list[Any]()
    casts: list[list[str]] = []
    more = {"tensor_parallel_group": mesh["tp"], "sequence_parallel": True, "recipe": recipe, "bias": False}
    start, cast = quantization.start_gather, quantization.cast
    quantization.cast = lambda plan, *given, **more: [casts[-1].append(plan.tensor), cast(plan, *given, **more)][1]
    quantization.start_gather = lambda bound, plan, tensor, gathered, mine, lease=None: [
        sent.append(f"{tensor} {mine.format.name}"), start(bound, plan, tensor, gathered, mine, lease)][1]  # fmt: skip
    try:
        for handed in (True, False):
            casts.append([])
            torch.manual_seed(0)
            column = ops.Linear(H, 2 * H, tensor_parallel_mode="column", **more)
            row = ops.Linear(2 * H, H, tensor_parallel_mode="row", **more)
            told = {"recipe": recipe, "process_group": group}
            before = ops.Quantize(strict=True, **({"reader": column} if by_reader else told))
            behind = ops.Quantize(False, True, strict=True, **({"reader": row} if by_reader else told))
            x = ((1 + rank) * values(1 + rank, 128, H)).requires_grad_()
            between = before(x) if handed else x
            y = row(column(between))
            seen = list[Any]()
            y.register_hook(lambda dy, seen=seen: seen.append(type(dy)))
            y = behind(y) if handed else y
            dy = (1 + rank) * values(3 + rank, 128, H)
            y.backward(dy)
            assert not handed or (type(between) is ops.Handed and seen == [ops.Handed])
            found.append({name: p.grad for name, p in (("dw", column.weight), ("dw'", row.weight))})
    finally:
        quantization.start_gather, quantization.cast = start, cast
    said = may_raise(ValueError, lambda: column(ops.Quantize(recipe=recipe, strict=True)(x)))
    return [{name: full(grad) for name, grad in grads.items()} for grads in found], said, sent, casts


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by_reader", [False, True], ids=["by recipe", "by reader"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_codes_that_came_are_gathered_as_they_are(recipe: str, by_reader: bool, ranks: Any):
    for (handed, plain), said, sent, casts in ranks(2).run(handed_over, recipe, by_reader):
        own = [[tensor for tensor in each if tensor in ("x", "dy")] for each in casts]
        assert own == [["x", "dy"], ["x", "x", "dy", "dy"]], "what came quantized is not cast again before a gather"
        assert_all_bit_equal(handed, plain)
        assert (
            len(set(sent)) == 2
            and sent[: len(sent) // 2] == sent[len(sent) // 2 :]
            and not any("hp" in s for s in sent)
        )
        if recipe == "fp8_current":
            assert "the ranks must share scales" in said and "give Quantize process_group=" in said
        else:  # ranks do not share block scales
            assert said == ""


def compiled(recipe: str, sp: bool) -> tuple[list[list[Tensor]], list[list[str]]]:
    """Run two compiled steps of a user-defined op, a column-parallel linear, a Quantize and a row-parallel linear,
    first so that the op and the Quantize quantize, then so that they do not. Return for both runs the results, and
    the casts of x and dy that the linears ran."""
    tp, rank = worker.mesh(dp_shard=1, tp=2)["tp"], torch.distributed.get_rank()
    more = {"tensor_parallel_group": tp, "sequence_parallel": sp, "recipe": recipe, "bias": False}
    tokens = slice(rank * M // 2, (rank + 1) * M // 2) if sp else slice(None)
    found, casts, cast = list[list[Tensor]](), list[list[str]](), quantization.cast
    quantization.cast = lambda plan, *given, **more: [casts[-1].append(plan.tensor), cast(plan, *given, **more)][1]
    try:
        for quantizes in (True, False):
            torch.manual_seed(0)
            column = ops.Linear(H, FFN, tensor_parallel_mode="column", **more)
            row = ops.Linear(FFN, H, tensor_parallel_mode="row", **more)
            model = nn.Sequential(ops.Sequential(Halved(quantizes), column, ops.Quantize(quantizes, reader=row)), row)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            dlp.attach(model, optimizer)
            torch._dynamo.reset()
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
            found.append([])
            casts.append([])
            for step in range(2):
                x = values(step, M, H)[tokens].clone().requires_grad_()
                y = run(x)
                y.backward(values(9 + step, M, H)[tokens])
                found[-1] += [y.detach(), x.grad, *[full(p.grad).clone() for p in model.parameters()]]
                optimizer.step()
                optimizer.zero_grad()
    finally:
        quantization.cast = cast
        torch._dynamo.reset()
    return found, [[tensor for tensor in each if tensor in ("x", "dy")] for each in casts]


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "sp"),
    [("fp8_current", True), ("fp8_delayed", True), ("mxfp8", True), nightly("nvfp4", True), nightly("fp8_block", False),
     nightly("fp8_current", False), ("fp8_delayed", False), nightly("nvfp4", False)],
)  # fmt: skip
def test_compiled_code_hands_over_x_on_tp_ranks(recipe: str, sp: bool, ranks: Any):
    """The op before a linear casts the shard of x, with scales that the ranks of the linear agree on."""
    for (handed, plain), casts in ranks(2).run(compiled, recipe, sp):
        for i, (mine, expected) in enumerate(zip(handed, plain, strict=True)):
            assert_bit_equal(mine, expected, f"{i}")
        assert casts == [["dy"] * 4, ["x", "x", "dy", "dy"] * 2]


def of_a_user(recipe: str, sp: bool, quantizes: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Run one step of a column- and a row-parallel linear, each after a user-defined op. Return the tensors of the step by
    name, and the class names of the tensors that the two ops returned in forward and backward."""
    torch.manual_seed(0)
    tp = {"tensor_parallel_group": worker.mesh(dp_shard=1, tp=2)["tp"], "sequence_parallel": sp, "recipe": recipe}
    first, last = Halved(quantizes), Halved(quantizes)
    sequence = ops.Sequential(
        first, ops.Linear(H, FFN, tensor_parallel_mode="column", **tp),
        last, ops.Linear(FFN, H, tensor_parallel_mode="row", **tp),
    )  # fmt: skip
    tokens = (
        slice(torch.distributed.get_rank() * M // 2, (torch.distributed.get_rank() + 1) * M // 2) if sp else slice(None)
    )
    found = {name: full(tensor) for name, tensor in step(sequence, tokens).items()}
    return found, [kind.__name__ for op in (first, last) for kind in op.returned]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp8"])
def test_an_op_of_a_user_casts_as_the_parallel_linear_behind_it(recipe: str, sp: bool, ranks: Any):
    """The user-defined op quantizes with scales on which the ranks agree, and its codes are gathered unchanged."""
    for (mine, returned), (expected, _) in zip(
        ranks(2).run(of_a_user, recipe, sp, True), ranks(2).run(of_a_user, recipe, sp, False), strict=True
    ):
        assert_all_bit_equal(mine, expected)
        assert returned[0] == returned[2] == "Handed", returned


def refused() -> list[str]:
    """Return the messages that refuse SwiGLU after a single column-parallel linear. The linear is a Linear or a
    BasicLinear, and is followed by SwiGLU directly or after ops that keep the number of features."""
    column = {"tensor_parallel_mode": "column", "tensor_parallel_group": worker.mesh(dp_shard=1, tp=2)["tp"]}
    said = []
    for linear in (ops.Linear, ops.BasicLinear):
        for between in ([], [ops.Identity(), ops.MakeExtraOutput()]):
            given = ops.RMSNorm(H), linear(H, FFN, **column), *between, ops.SwiGLU()
            said.append(must_raise(ValueError, ops.Sequential, *given))
    return said


@pytest.mark.ranks(2)
def test_one_tensor_in_halves_is_refused_where_tp_cuts_it(ranks: Any):
    for said in ranks(2).run(refused):
        assert all("construct siblings, Linear(in_features, (gate, up))" in each for each in said)


class Residual(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.inner = block(None, recipe)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


def sharded(recipe: str) -> dict[str, Tensor]:
    mesh = worker.mesh(dp_shard=2, tp=1)
    model = Residual(recipe)
    plan = dlp.convert(model, [dlp.LayerGroup("all", "inner.*", recipe=recipe)], mesh)
    assert [type(op).__name__.removeprefix("Replicated") for op in model.inner] == [
        "RMSNorm",
        "Linear",
        "SwiGLU",
        "Linear",
    ]
    assert {str(row.recipe) for row in plan.layers} == {recipe}
    dlp.fully_shard(model.inner, mesh=mesh)
    dlp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    dlp.attach(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        found = step(model)
        optimizer.step()
    return {name: full(tensor) for name, tensor in found.items()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_a_sharded_and_converted_sequence_trains(recipe: str, ranks: Any):
    found = ranks(2).run(sharded, recipe)
    alone = Residual(recipe)
    optimizer = torch.optim.SGD(alone.parameters(), 0.01)
    dlp.attach(alone, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        expected = step(alone)
        optimizer.step()
    for name, tensor in expected.items():
        assert_close(found[0][name], tensor, 1e-5 if recipe == "bf16" else 0.05, name)
        assert_bit_equal(found[0][name], found[1][name], name)


def programs_on_shards() -> list[str]:
    """Run models under FSDP with recomputation; return the names of results whose bits differ from the unsharded
    model without recomputation."""
    mesh, wrong = worker.mesh(dp_shard=2, tp=1), list[str]()
    for name, program in PROGRAMS.items():
        torch.manual_seed(0)
        model, alone = program(), program()
        alone.load_state_dict(model.state_dict())
        if codes_only(model):
            with pytest.raises(ValueError, match="Linear: the weight is quantized-only, .* by ignored_params"):
                dlp.fully_shard(model, mesh=mesh)
        for part in (*model.children(), model):
            dlp.fully_shard(part, mesh=mesh, ignored_params=codes_only(model))
        found = []
        for each in (model, alone):
            steps = [parameter for parameter in each.parameters() if parameter not in codes_only(each)]
            dlp.attach(each, optimizer := torch.optim.SGD(steps, 0.01))
            for _ in range(2):
                optimizer.zero_grad()
                x = values(1, M, WIDTH).requires_grad_()
                y = checkpoint(each, x, use_reentrant=False) if each is model else each(x)
                y.backward(values(2, *y.shape))
                optimizer.step()
            grads = {key: full(p.grad) for key, p in each.named_parameters() if p.grad is not None}
            found.append({"y": y.detach(), "dx": x.grad} | grads)
        its, expected = found
        plans = [str(part.plan()) for part in model.modules() if isinstance(part, ops.Sequential)]
        wrong += [] if name != "a_sequence" or "1 (FSDPLinear): an FSDP unit ends a group" in plans[0] else plans
        wrong += [f"{name} {key}" for key in expected if key not in its or not torch.equal(its[key], expected[key])]
    return wrong


@pytest.mark.ranks(2)
def test_programs_of_users_run_on_shards_and_again_in_backward(ranks: Any):
    assert ranks(2).run(programs_on_shards) == [[], []]


class OnShards(nn.Module):
    """Model that scatters its tokens over tp, runs a block on the token shards, and gathers the tokens."""

    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.inner = block(tp, sp=True)

    def forward(self, x: Tensor, mesh: Any) -> Tensor:
        return dlp.gather_tokens(self.inner(dlp.scatter_tokens(x, mesh)), mesh)


def converted(norm_on_shards: bool) -> dict[str, Tensor] | str:
    mesh = worker.mesh(dp_shard=1, tp=2)
    model = OnShards(mesh["tp"])
    groups = [dlp.LayerGroup("linears", "inner.*", sequence_parallel=True)]
    groups += [] if norm_on_shards else [dlp.LayerGroup("norm", "inner.0", sequence_parallel=False)]
    dlp.convert(model, groups, mesh, batch=(1, M))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    dlp.attach(model, optimizer)
    x = values(1, M, H).requires_grad_()
    if message := may_raise(ValueError, lambda: model(x, mesh).backward(values(2, M, H))):
        return message
    optimizer.step()
    return {
        f"d{name.removeprefix('inner.')}": full(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.ranks(2)
def test_a_converted_sequence_on_shards_sums_the_gradients_of_its_norms(ranks: Any):
    alone = step(block())
    for found in ranks(2).run(converted, True):
        assert found.keys() == alone.keys() - {"y", "dx"}
        for name, tensor in found.items():
            assert_close(tensor, alone[name], 1e-5, name)
    for said in ranks(2).run(converted, False):
        assert (
            "inner.0: the module is called with token shards (32, 64), so its gradients must be summed over tp" in said
        )


def adopted() -> tuple[list[Any], list[str], str, str]:
    """Convert a model whose linears were constructed with a style. Return (linears, types, plan, message).

    linears    (recipe, overlap, style) of each linear after conversion
    types      class names of the ops
    message    error of a conversion with a layer group that sets another style
    """
    mesh = worker.mesh(dp_shard=1, tp=2)
    model = OnShards(mesh["tp"])
    groups = [
        dlp.LayerGroup("up", "inner.1", recipe="fp8_current", overlap="chunked", sequence_parallel=True),
        dlp.LayerGroup("down", "inner.3", recipe="fp8_block", sequence_parallel=True),
        dlp.LayerGroup("norm", "inner.0", sequence_parallel=True),
    ]
    other = [dlp.LayerGroup("down", "inner.3", style="column")]
    said = must_raise(ValueError, dlp.convert, OnShards(mesh["tp"]), other, mesh, batch=(1, M))
    plan = dlp.convert(model, groups, mesh, batch=(1, M))
    model(values(1, M, H), mesh).sum().backward()
    specs = [op.core.spec for op in model.inner if isinstance(op, ops.Linear)]
    found = [(str(spec.recipe), spec.overlap.fprop.name, spec.style.name) for spec in specs]
    return found, [type(op).__name__ for op in model.inner], str(plan), said


@pytest.mark.ranks(2)
def test_groups_reach_recipe_and_overlap_of_ops_and_leave_their_types(ranks: Any):
    for found, types, plan, refused in ranks(2).run(adopted):
        assert found == [("fp8_current", "chunked", "COLUMN_SP"), ("fp8_block", "serial", "ROW_SP")]
        # Conversion replaces the norm by a subclass whose gradients are summed over tp
        assert types == ["ReplicatedRMSNorm", "Linear", "SwiGLU", "Linear"]
        assert "constructed explicitly: layer groups can change only recipe and overlap" in plan
        assert "was constructed with style = row, and a layer group sets style = column" in refused


# Every fusion on token shards, compared with its basic ops


class Shards(NamedTuple):
    """Case of a fusion on tp ranks. said: description in the plan; features: x is [M, H / 2], for a row-parallel
    linear, instead of token shards [M / 2, H]; bound: 0 requires equal bits."""

    make: Callable[[Any, Any], Sequence[nn.Module]]  # gets functions that make a column- and a row-parallel linear
    said: str
    features: bool = False
    bound: float = 0.0
    extra: tuple[int, int] | None = None  # shape of the extra input


ON_SHARDS = [
    Shards(lambda column, row: [ops.RMSNorm(H), column()], "ForwardLinearBias[Linear, Bias]", bound=4e-3),
    Shards(
        lambda column, row: [column(), ops.AddExtraInput(in_place=True)],
        "LinearIntoExtraInput[Linear, Bias, AddExtraInput]", bound=8e-3, extra=(M, H // 2),
    ),
    Shards(
        lambda column, row: [column(bias=False), ops.ConstantScale(-4.0), ops.AddExtraInput(in_place=True)],
        "LinearIntoExtraInput[Linear, ConstantScale, AddExtraInput]", bound=8e-3, extra=(M, H // 2),
    ),
    Shards(
        lambda column, row: [ops.AddExtraInput(), ops.MakeExtraOutput(), ops.RMSNorm(H), column(bias=False)],
        "ForwardAddNorm[AddExtraInput, MakeExtraOutput, RMSNorm]", extra=(M // 2, H),
    ),
    Shards(lambda column, row: [ops.GELU(), row()], "ReducedLinear[Linear, ReduceScatter, Bias]", features=True),
    Shards(
        lambda column, row: [ops.MakeExtraOutput(in_place=True), row(bias=False)],
        "MakeExtraOutput, Linear: the linear is fused with the sum over tp", features=True,
    ),
    Shards(
        lambda column, row: [ops.MakeExtraOutput(in_place=True), column(bias=False)],
        "MakeExtraOutput, Linear: dx is summed over tp before the gradient of the extra output is added",
    ),
    Shards(
        lambda column, row: [ops.MakeExtraOutput(), ops.RMSNorm(H), column(bias=False)],
        "BackwardNormResidual[MakeExtraOutput, RMSNorm]",
    ),
    Shards(
        lambda column, row: [column(bias=False), ops.ConstantScale(0.5)], "BackwardScaledLinear[Linear, ConstantScale]"
    ),
    Shards(
        lambda column, row: [column(bias=False), ops.Identity(), ops.Bias(H // 2), ops.GELU()],
        "BackwardBiasActivation[Bias, GELU]",
    ),
]  # fmt: skip


def shards_step(case: Shards, recipe: str, used: str, basic: bool) -> dict[str, Tensor]:
    """Return y, dx and the gradients of parameters and of the extra input. `used`: the outputs from which backward
    starts."""
    mesh = worker.mesh(dp_shard=1, tp=2)
    more = {"tensor_parallel_group": mesh["tp"], "sequence_parallel": True, "recipe": recipe}
    torch.manual_seed(mesh["tp"].get_local_rank())
    column, row = (partial(ops.Linear, H, H, tensor_parallel_mode=mode, **more) for mode in ("column", "row"))
    with restored_fusions(none=basic):
        model = ops.Sequential(*case.make(column, row)).bfloat16()
        rank = 10 * mesh["tp"].get_local_rank()
        x = values(rank, *((M, H // 2) if case.features else (M // 2, H))).bfloat16().requires_grad_()
        given = [] if case.extra is None else [values(rank + 1, *case.extra).bfloat16().requires_grad_()]
        outputs = model(x, *[1.0 * each for each in given])
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        chosen = {"both": outputs, "output": outputs[:1], "extra output": outputs[1:]}[used]
        torch.autograd.backward(chosen, [values(rank + 2 + i, *y.shape).bfloat16() for i, y in enumerate(chosen)])
        assert basic or case.said in str(model.plan()), str(model.plan())
    grads = {f"d{name}": full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    made = {f"y{i}": y.detach() for i, y in enumerate(outputs)} | {"dx": x.grad}
    return made | ({"dextra": given[0].grad} if given else {}) | grads  # type: ignore[return-value]


def fusions_on_shards(recipe: str) -> list[str]:
    """Return the results that differ from the results of the basic ops by more than the bound of the case."""
    wrong = list[str]()
    for case in ON_SHARDS:
        for used in ("both", "output", "extra output") if "MakeExtraOutput" in case.said else ("output",):
            found, expected = (shards_step(case, recipe, used, basic) for basic in (False, True))
            assert found.keys() == expected.keys() and found["dx"] is not None
            for name, tensor in expected.items():
                error = relative_error(found[name], tensor)
                if error > case.bound or (case.bound == 0.0 and not torch.equal(found[name], tensor)):
                    wrong.append(f"{case.said} {used} {name}: {error:.3g}")
    return wrong


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", few(RECIPES, ("nvfp4",)))
def test_every_fusion_on_token_shards_equals_its_basic_ops(recipe: str, ranks: Any):
    """The cases with an extra output also run backward from the output alone and from the extra output alone."""
    assert ranks(2).run(fusions_on_shards, recipe) == [[], []]


# Modules with the names of Transformer Engine

MODULES: dict[str, Any] = {
    "linear": lambda **more: ops.LayerNormLinear(H, (FFN, H), normalization="RMSNorm", parallel_mode="column", **more),
    "mlp": lambda **more: ops.LayerNormMLP(
        H, FFN, activation="swiglu", set_parallel_mode=True, return_bias=True, return_layernorm_output=True, **more
    ),
    "layer": lambda **more: ops.TransformerLayer(H, FFN, 4, 2, set_parallel_mode=True, **more),
}


def te_state(kind: str) -> dict[str, Tensor]:
    """Return a state dict with unsharded tensors, as Transformer Engine saves it without tensor parallelism."""
    shapes = {name: tensor.shape for name, tensor in ops.to_te(MODULES[kind]()).items()}
    return {name: values(i, *shape) / 8 for i, (name, shape) in enumerate(shapes.items())}


def cut(tensor: Tensor, shape: torch.Size, rank: int) -> Tensor:
    """Return the half of `tensor` for `rank`, along the first dimension in which `shape` differs; the full tensor if none
    does."""
    for dim, (all_of, half) in enumerate(zip(tensor.shape, shape, strict=True)):
        if all_of != half:
            return tensor.chunk(2, dim)[rank].clone()
    return tensor.clone()


def module_step(kind: str, model: nn.Module, rank: int | None = None) -> dict[str, Tensor]:
    x = values(1, M, H)
    x = (x if rank is None else x.chunk(2)[rank].clone()).requires_grad_()
    found = model(x, **({"batch": 2} if kind == "layer" else {}))
    ys = found[0] if kind == "linear" else found
    ys, total = ys if isinstance(ys, tuple) else (ys,), torch.zeros(())
    for i, y in enumerate(ys):
        if y.dim() == 2:  # y is not a returned bias
            dy = values(5 + i, M, (FFN, H)[i] if kind == "linear" else H)
            total = total + (y * cut(dy, y.shape, rank or 0)).sum()
    total.backward()
    made = {f"y{i}": y.detach() for i, y in enumerate(ys)} | {"dx": x.grad}
    return made | {f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}  # type: ignore[return-value]


def module_on_ranks(kind: str, recipe: str, compiled: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Load unsharded tensors into a module, save its shards, and load these shards again. Return the results of one
    step of the module, and the names of the shards that the second load changed."""
    mesh = worker.mesh(dp_shard=1, tp=2)
    model = MODULES[kind](tp_group=mesh["tp"], sequence_parallel=True, recipe=recipe)
    model.load_state_dict(ops.from_te(model, te_state(kind)))
    shards = {name: tensor.clone() for name, tensor in ops.to_te(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(ops.from_te(model, shards))
    wrong = [name for name, tensor in ops.to_te(model).items() if not torch.equal(tensor, shards[name])]
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="aot_eager", fullgraph=True)
    return {n: full(t) for n, t in module_step(kind, model, mesh["tp"].get_local_rank()).items()}, wrong


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [("bf16", False), ("fp8_current", False), pytest.param("bf16", True, marks=pytest.mark.slow)],
    ids=["bf16", "fp8_current", "compiled"],
)
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_on_token_shards_is_that_of_one_rank(kind: str, recipe: str, compiled: bool, ranks: Any):
    alone = MODULES[kind](recipe=recipe)
    alone.load_state_dict(ops.from_te(alone, te_state(kind)))
    expected = module_step(kind, alone)
    parts, wrong = zip(*ranks(2).run(module_on_ranks, kind, recipe, compiled), strict=True)
    assert wrong == ([], [])
    for name, tensor in expected.items():
        pair = [part[name] for part in parts]
        if name.startswith(("y", "dx")):
            dims = [dim for dim, size in enumerate(tensor.shape) if size != pair[0].shape[dim]]
            found = torch.cat(pair, dims[0]) if dims else pair[0]
        # A gradient that differs between ranks covers only the tokens of one rank. A converted model sums it over tp; here
        # the test sums it
        else:
            found = pair[0] if torch.equal(*pair) else pair[0] + pair[1]
        # Softmax ignores a bias that is equal for all keys, so the gradient is only rounding
        if name == "dqkv.1.bias_1":
            assert found.norm() < 1e-2 * expected["dqkv.1.bias_0"].norm()
        else:
            assert_close(found, tensor, 1e-5 if recipe == "bf16" else 0.1, name)


def begun_anew() -> dict[str, Tensor]:
    """Return the unsharded parameters after `reset_parameters`, on ranks that draw different random numbers."""
    mesh = worker.mesh(dp_shard=1, tp=2)
    mlp = ops.LayerNormMLP(H, FFN, activation="swiglu", set_parallel_mode=True, tp_group=mesh["tp"])
    torch.manual_seed(100 + torch.distributed.get_rank())
    before = {name: full(parameter).detach().clone() for name, parameter in mlp.named_parameters()}
    for module in mlp.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    found = {name: full(parameter).detach() for name, parameter in mlp.named_parameters()}
    assert not any(torch.equal(found[name], its) for name, its in before.items() if name[0] != "0")
    return found


@pytest.mark.ranks(2)
def test_parameters_that_begin_anew_are_those_of_one_rank(ranks: Any):
    first, second = ranks(2).run(begun_anew)
    assert_all_bit_equal(first, second)


def hooked() -> list[str]:
    """Return the names of the hooks that were called, in order. First `ops.Converted` has a hook ("op"), and then one
    of its two linears has a hook as well ("up")."""
    model, seen = nn.ModuleDict({"gate": nn.Linear(H, H), "up": nn.Linear(H, H)}), list[str]()
    dlp.convert(model, [dlp.LayerGroup("all", ["gate", "up"], siblings=True)], worker.mesh(dp_shard=1, tp=1))
    both = ops.Converted(model["gate"], model["up"])
    sequence = ops.Sequential(ops.RMSNorm(H), both, ops.SwiGLU())
    expected = sequence(values(1, M, H))
    both.register_forward_hook(lambda *args: seen.append("op"))
    assert_bit_equal(sequence(values(1, M, H)), expected)
    model["up"].register_forward_hook(lambda *args: seen.append("up"))
    assert_bit_equal(sequence(values(1, M, H)), expected)
    return seen


@pytest.mark.ranks(1)
def test_hooks_of_converted_linears_and_of_their_op_are_called(ranks: Any):
    assert ranks(1).run(hooked) == [["op", "up", "op"]]
