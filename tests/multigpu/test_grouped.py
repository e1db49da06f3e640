"""GroupedLinear has the bits of a loop of linears for every recipe, on tp and FSDP, with empty experts; conversion of
the experts of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import dlp
from dlp.kernels import reference
from dlp.kernels.table import KernelEntry, registered
from dlp.quant import recipe as recipes
from dlp.quant.parameter import QuantizedParameter
from tests import hf_models
from tests import pool as worker
from tests.cases import nightly, of_these
from tests.multigpu.test_fsdp_gather import GatheredBytes
from tests.ops_models import Watched
from tests.refusals import refuses

RECIPES = recipes.names()
SIZES = (5, 0, 1, 64, 0, 33)
K, N = 64, 128


def ends(sizes: tuple[int, ...] = SIZES) -> Tensor:
    return torch.tensor(sizes).cumsum(0)


def tokens(sizes: tuple[int, ...] = SIZES, features: int = K, seed: int = 1) -> Tensor:
    return torch.randn(sum(sizes), features, generator=torch.Generator().manual_seed(seed)).bfloat16()


def loop(experts: Any, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.cat([expert(rows) for expert, rows in zip(experts, x.split(list(sizes)), strict=True)])


def run(call: Any, parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return y, dx and the gradient of each parameter."""
    x = x.clone().requires_grad_()
    y = call(x)
    grads = torch.autograd.grad(y, [x, *parameters], torch.ones_like(y) / 8)
    return [y.detach(), *(grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads)]


def by_hand(style: str, recipe: str, tp: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of results: of a bank of experts, and of linears that are called one after the other. With tp > 1 this
    runs inside a worker."""
    mesh, device = (worker.mesh(tp=tp)["tp"], worker.device()) if tp > 1 else (None, torch.device("cpu"))
    torch.manual_seed(0)
    bank = dlp.GroupedLinear(len(SIZES), K, N, True, style=style, recipe=recipe, tp=mesh).to(device)
    linears = [copy.deepcopy(expert) for expert in bank]
    x = tokens(features=bank[0].weight.shape[1] if tp == 1 or style != "row" else K // tp).to(device)
    found = run(lambda x: bank(x, ends()), list(bank.parameters()), x)
    expected = run(lambda x: loop(linears, x, SIZES), [p for each in linears for p in each.parameters()], x)
    return list(zip(found, expected, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_expert_has_the_bits_of_a_linear(recipe: str) -> None:
    pairs = by_hand("local", recipe, 1)
    assert all(torch.equal(a, b) for a, b in pairs)
    y, grads = pairs[0][0], [pair[0] for pair in pairs[2:]]
    assert y.shape == (sum(SIZES), N) and len(grads) == 2 * len(SIZES)
    for size, weight, bias in zip(SIZES, grads[::2], grads[1::2], strict=True):
        assert bool(weight.any()) == bool(bias.any()) == (size > 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", of_these(["fp8_block", "nvfp4"], RECIPES))
@pytest.mark.parametrize("style", ["column", "row"])
def test_tp_shards_have_the_bits_of_linears(ranks: Any, style: str, recipe: str) -> None:
    for pairs in ranks(2).run(by_hand, style, recipe, 2):
        assert all(torch.equal(a, b) for a, b in pairs)


class Net(nn.Module):
    """A bank of experts after a linear, or the same experts called one after the other."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bank, self.grouped = nn.Linear(K, K), dlp.GroupedLinear(len(SIZES), K, N), grouped

    def forward(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        return self.bank(x, ends(sizes)) if self.grouped else loop(self.bank, x, sizes)


def trained(recipe: str, grouped: bool) -> list[Tensor]:
    """Return the unsharded parameters after three steps under FSDP. In each step the two ranks have different empty
    experts. Runs inside a worker."""
    mesh, model = worker.mesh(dp_shard=2), Net(grouped).to(worker.device())
    dlp.convert(
        model,
        [dlp.LayerGroup("experts", "bank.*", recipe=recipe), dlp.LayerGroup("first", "first", recipe="bf16")],
        mesh,
    )
    dlp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dlp.attach(model, optimizer)
    rank = torch.distributed.get_rank()
    for step in range(3):
        sizes = SIZES if (step + rank) % 2 else SIZES[::-1]
        model(tokens(sizes, seed=step).to(worker.device()), sizes).float().square().mean().backward()
        optimizer.step()
        dlp.end_step(model)
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", [nightly("fp8_block"), "nvfp4", nightly("bf16")])
def test_fsdp_trains_experts_as_it_trains_linears(ranks: Any, recipe: str) -> None:
    found, other = ranks(2).run(trained, recipe, True)
    expected = ranks(2).run(trained, recipe, False)[0]
    assert all(map(torch.equal, found, expected)) and all(map(torch.equal, found, other))


def gathered(recipe: str) -> int:
    """Return the bytes that FSDP gathers for the bank in three steps. Runs inside a worker."""
    with GatheredBytes(least=K * K * 4) as counted:  # leaves out the linear before the bank
        trained(recipe, True)
    return counted.total


@pytest.mark.ranks(2)
def test_fsdp_gathers_codes_of_experts(ranks: Any) -> None:
    codes, values = (ranks(2).run(gathered, recipe)[0] for recipe in ("nvfp4", "bf16"))
    assert 0 < codes < values / 2


def test_the_grouped_gemm_computes_what_the_loop_computes() -> None:
    torch.manual_seed(0)
    bank = dlp.GroupedLinear(len(SIZES), K, N, True, dtype=torch.bfloat16)
    assert not bank.multiplies_grouped(tokens())  # no GPU
    parameters = list(bank.parameters())
    found = run(lambda x: bank._grouped(x, ends()), parameters, tokens())
    expected = run(lambda x: bank(x, ends()), parameters, tokens())
    for a, b in zip(found, expected, strict=True):
        assert (a - b).float().norm() <= 2**-7 * b.float().norm()


def test_the_grouped_gemm_takes_offsets_of_the_host() -> None:
    """x and the experts are fake tensors of a GPU, with which an operation on two devices raises."""
    with FakeTensorMode(), torch.no_grad():
        for bias in (False, True):
            bank = dlp.GroupedLinear(2, K, N, bias, device="meta", dtype=torch.bfloat16)
            for expert in bank:
                for name, parameter in list(expert.named_parameters()):
                    setattr(expert, name, nn.Parameter(torch.empty_like(parameter, device="cuda")))
            x = torch.empty(10, K, device="cuda", dtype=torch.bfloat16)
            assert bank.multiplies_grouped(x)
            assert bank(x, torch.tensor([3, 10])).shape == (10, N)


@pytest.mark.parametrize("way", ["region", "recomputation", "hook", "main grads", "statistics", "return bias"])
def test_a_grouped_gemm_in_bf16_leaves_nothing_out(way: str) -> None:
    """Regions, hooks, main gradients, statistics and returned biases need separate linears."""
    bank = dlp.GroupedLinear(2, K, N, True, style="local", dtype=torch.bfloat16, return_bias=way == "return bias")
    with FakeTensorMode():
        x = torch.empty(10, K, device="cuda", dtype=torch.bfloat16)
    seen = list[bool]()

    def ask(*_: Any) -> None:
        seen.append(bank.multiplies_grouped(x))

    if way == "region":
        with dlp.autocast(recipe="fp8_current"):
            ask()
    if way == "recomputation":
        values = torch.randn(10, K, dtype=torch.bfloat16, requires_grad=True)
        with dlp.autocast(recipe="fp8_current"):
            y = bank(values, ends((4, 6)))
        y.register_hook(ask)
        y.sum().backward()
    if way == "hook":
        bank[1].register_forward_hook(lambda *_: None)
    if way == "main grads":
        dlp.attach(bank, torch.optim.SGD(bank.parameters()), main_grads="main_grad")
    if way == "statistics":
        dlp.attach(bank, torch.optim.SGD(bank.parameters()))
        assert dlp.record_stats(bank, "**")
    ask()
    assert seen == ([False, True] if way in ("region", "recomputation") else [False])


@contextmanager
def grouped_gemms() -> Iterator[list[int]]:
    """Register the reference of the grouped GEMM as a kernel for the CPU. Yield a list to which each launch appends its
    number of rows."""
    rows: list[int] = []

    def launched(a: Tensor, *more: Any) -> Tensor:
        rows.append(len(a))
        return reference.grouped_fp8_rowwise(a, *more)

    entry = KernelEntry(operation="grouped_fp8_rowwise", name="grouped", run=launched, devices=("cpu",))
    with registered(entry):
        yield rows


def rowwise(sizes: tuple[int, ...] = SIZES, **options: Any) -> list[Tensor]:
    """Return y, dx and the weight gradients of a bank in fp8_rowwise."""
    torch.manual_seed(0)
    bank = dlp.GroupedLinear(len(sizes), K, N, style="local", recipe="fp8_rowwise", dtype=torch.bfloat16, **options)
    found = run(lambda x: bank(x, ends(sizes)), list(bank.parameters()), tokens(sizes))
    return found


@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 7), (16, 16, 16)], ids=str)
@pytest.mark.parametrize("options", [{}, {"save_original_input": True}], ids=["", "save_original_input"])
def test_grouped_gemms_of_rowwise_fp8_have_the_bits_of_linears(sizes: tuple[int, ...], options: Any) -> None:
    expected = rowwise(sizes, **options)
    with grouped_gemms() as launches:
        found = rowwise(sizes, **options)
    assert launches == [sum(sizes)] * 2, "one launch for fprop and one for dgrad"
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("way", ["no grad", "frozen x", "frozen expert", "checkpoint", "mode", "delayed", "main grads"])
def test_passes_of_a_bank_with_grouped_gemms(way: str) -> None:
    def passes() -> list[Tensor]:
        torch.manual_seed(0)
        bank = dlp.GroupedLinear(
            len(SIZES), K, N, style="local", recipe="fp8_rowwise", dtype=torch.bfloat16, delay_wgrad=way == "delayed"
        )
        bank[0].weight.requires_grad_(way != "frozen expert")
        x = tokens().requires_grad_(way not in ("frozen x", "frozen expert"))
        if way == "main grads":
            dlp.attach(bank, torch.optim.SGD(bank.parameters()), main_grads="main_grad")
            for parameter in bank.parameters():
                parameter.main_grad = torch.ones(parameter.shape)
        with torch.set_grad_enabled(way != "no grad"):
            y = checkpoint(bank, x, ends(), use_reentrant=False) if way == "checkpoint" else bank(x, ends())
        if way != "no grad":
            with Watched() if way == "mode" else nullcontext():
                y.float().square().mean().backward()
        if way == "delayed":
            dlp.backward_dw(bank)
        grads = [getattr(p, "main_grad", p.grad) for p in bank.parameters()]
        return [tensor.detach() for tensor in (y, x.grad, *grads) if tensor is not None]

    expected = passes()
    with grouped_gemms() as launches:
        found = passes()
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert len(launches) == {"checkpoint": 3, "no grad": 1, "frozen x": 1, "frozen expert": 1, "mode": 1}.get(way, 2)


def grouped_over_fsdp() -> tuple[int | None, list[Tensor]]:
    """Return the number of launches of grouped GEMMs (None on a GPU), and the result of `trained`."""
    with grouped_gemms() as launches:
        found = trained("fp8_rowwise", True)
    return len(launches) if worker.device().type == "cpu" else None, found


@pytest.mark.ranks(2)
def test_fsdp_trains_experts_by_grouped_gemms(ranks: Any) -> None:
    expected = ranks(2).run(trained, "fp8_rowwise", False)[0]
    for launches, found in ranks(2).run(grouped_over_fsdp):
        if launches is None:  # torch's kernel sums in another order
            assert all((a - b).norm() <= 2**-6 * b.norm() for a, b in zip(found, expected, strict=True))
        else:
            assert launches == 2 * 3 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "reason, options, x",
    [
        ("the grouped GEMM adds no bias", {"bias": True}, {}),
        ("the grouped GEMM multiplies E4M3", {"recipe": {"name": "fp8_rowwise", "fp8_format": "HYBRID"}}, {}),
        ("the grouped GEMM returns bf16", {}, {"dtype": torch.float32}),
        ("features that are multiples of 16; got 24 x 64", {"out_features": 24}, {}),
        ("x has no rows", {}, {"sizes": (0, 0)}),
        ("experts have hooks", {"hooked": True}, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_plan_says_why_experts_of_rowwise_fp8_run_one_after_the_other(
    reason: str, options: dict[str, Any], x: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sizes, hooked = x.get("sizes", (3, 5)), options.pop("hooked", False)
    options = {"in_features": K, "out_features": N, "recipe": "fp8_rowwise", "style": "local"} | options
    bank = dlp.GroupedLinear(len(sizes), **options)
    if hooked:
        bank[0].register_full_backward_hook(lambda *_: None)
    with grouped_gemms() as launches:
        bank(tokens(sizes).to(x.get("dtype", torch.bfloat16)), ends(sizes))
    assert not launches and f"run one after the other: {'' if 'features' in reason else reason}" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize(
    "sizes, rows",
    [((5, 0, 1), 6), ((5, 0, 1, 64, 0, 34), 103), ((5, -1, 2, 64, 0, 33), 103)],
    ids=["few", "more", "back"],
)
def test_wrong_offsets_are_refused(sizes: tuple[int, ...], rows: int) -> None:
    with refuses("offsets must be 6 ends of rows, one for each expert, not decreasing, the last one"):
        dlp.GroupedLinear(6, K, N)(torch.randn(rows, K), ends(sizes))


@pytest.mark.parametrize(
    "x, offsets, got",
    [
        (torch.randn(2, 5, K), ends((5, 5)), r"x \[2, 5, 64\] and offsets of torch.int64"),
        (torch.randn(10, K), ends((5, 5)).float(), "offsets of torch.float32"),
        (torch.randn(10, K), [5, 10], "offsets of list"),
    ],
    ids=["sequences", "floats", "list"],
)
def test_what_is_no_sorted_matrix_is_refused(x: Tensor, offsets: Any, got: str) -> None:
    bank = dlp.GroupedLinear(2, K, N)
    with pytest.raises(ValueError, match=f"offsets, an int32 or int64 tensor .2.; got .*{got}: pass x.flatten"):
        bank(x, offsets)
    with pytest.raises(ValueError, match=r"offsets must be 2 ends of rows.* got \[\[5, 10\]\]"):
        bank(torch.randn(10, K), ends((5, 5))[None])


ARCHITECTURES: dict[str, dict[str, int]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 32},
}


def logits(architecture: str, tp: int, recipe: str) -> list[Tensor]:
    """Return the logits of a model of transformers, and of the same model after `group_experts` and conversion. Runs inside
    a worker."""
    made = hf_models.make(architecture, num_experts_per_tok=2, **ARCHITECTURES[architecture]).eval().to(worker.device())
    ids = hf_models.tokens(0).to(worker.device())
    with torch.no_grad():
        before = made(input_ids=ids).logits
        weights = made.model.layers[0].mlp.experts.gate_up_proj.clone()
        names = dlp.group_experts(made)
        assert len(names) == 2
        experts = made.model.layers[0].mlp.experts
        assert torch.equal(torch.cat([experts.gate_proj.stacked(), experts.up_proj.stacked()], 1), weights)
        groups = [
            dlp.LayerGroup("in", "**.experts.{gate,up}_proj.*", style="column", recipe=recipe),
            dlp.LayerGroup("out", "**.experts.down_proj.*", style="row", recipe=recipe),
            dlp.LayerGroup("rest", ["**.self_attn.*", "lm_head"], convert=False),
        ]
        dlp.convert(made, groups, worker.mesh(tp=tp))
        return [before, made(input_ids=ids).logits]


@pytest.mark.parametrize("architecture", of_these(["MixtralForCausalLM"], ARCHITECTURES))
@torch.no_grad()
def test_quantize_reaches_expert_weights(architecture: str) -> None:
    pytest.importorskip("transformers")
    models = []
    for grouped_before in (True, False):
        torch.manual_seed(0)
        made = hf_models.make(architecture, num_experts_per_tok=2, **ARCHITECTURES[architecture]).eval()
        if grouped_before:
            dlp.group_experts(made)
        models.append(dlp.quantize_(made, "fp8_block", lambda module, name: ".experts." in name, mode="dynamic"))
    expected, found = (dict(model.named_parameters()) for model in models)
    assert (
        expected.keys() == found.keys() and sum(isinstance(p, QuantizedParameter) for p in found.values()) == 2 * 3 * 4
    )
    ids = hf_models.tokens(0)
    assert torch.equal(models[0](input_ids=ids).logits, models[1](input_ids=ids).logits)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("architecture", of_these(["Qwen3MoeForCausalLM"], ARCHITECTURES))
def test_experts_of_transformers_convert(ranks: Any, architecture: str) -> None:
    pytest.importorskip("transformers")
    for recipe, bound in (("bf16", 1e-5), ("fp8_block", 0.1)):
        for before, after in ranks(2).run(logits, architecture, 2, recipe):
            assert (before - after).norm() <= bound * before.norm(), recipe
    with refuses("Linear has no experts in the form of Mixtral and Qwen3-MoE of transformers 5"):
        dlp.group_experts(nn.Linear(4, 4))
