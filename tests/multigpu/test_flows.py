"""Frozen layers on two ranks: column and row layers, codes of shards compared with codes of unsharded weights, loads on
another mesh, and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import dlp
from dlp.parallel.linear.modules import ParallelLinear
from dlp.quant.integers import IntScaling
from tests import pool as worker
from tests.cases import nightly
from tests.metrics import assert_all_bit_equal, assert_bit_equal
from tests.test_flows import FLOWS, LARGEST, batch, error, net

WIDTH = 256  # complete scaling blocks of every format on each of two ranks


def on_mesh(sequence_parallel: bool, **sizes: int) -> nn.Module:
    mesh, options = worker.mesh(**sizes), {"sequence_parallel": sequence_parallel}
    model = net(WIDTH).to(worker.device())
    groups = [dlp.LayerGroup("up", "0", style="column", **options), dlp.LayerGroup("down", "2", style="row", **options)]
    dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="bf16"), *groups], mesh, batch=(1, 32))
    return model


def quantized(model: nn.Module, recipe: Any, mode: str, x: torch.Tensor) -> nn.Module:
    """Freeze the model if it is converted, else quantize it. Static scales are calibrated on x."""
    if mode == "static":
        with dlp.calibrate(model):
            model(x)
    if isinstance(model[0], ParallelLinear):
        dlp.freeze(model, "**", recipe, mode)
        return model
    return dlp.quantize_(model, recipe, mode=mode)


def sharded(model: nn.Module) -> nn.Module:
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=worker.mesh()["dp_shard"])
    return model


@torch.no_grad()
def saved_and_loaded(recipe: Any, mode: str, folder: str) -> None:
    """Save on tp 2; load the state with FSDP over 2 ranks; load the state of the FSDP model unsharded; load the state of the
    unsharded model on tp 2. Before each load, the model has codes of other values, with other scales."""
    x, file = batch(width=WIDTH).to(worker.device()), Path(folder, "codes.pt")

    def other(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.mul_(0.5)
        return quantized(model, recipe, mode, 3 * x)

    first = quantized(on_mesh(False, tp=2), recipe, mode, x)
    y, exact = first(x), net(WIDTH).to(worker.device())(x)
    assert 0 < error(y, exact) < LARGEST.get(recipe, 0.06)
    state = dlp.quantized_state_dict(first)
    if torch.distributed.get_rank() == 0:
        torch.save(state, file)
    torch.distributed.barrier()
    read = torch.load(file, weights_only=True, map_location=worker.device())
    assert "0.weight" not in read and file.stat().st_size < 0.62 * sum(2 * p.numel() for p in net(WIDTH).parameters())
    alone = quantized(net(WIDTH).to(worker.device()), recipe, mode, x)  # unsharded
    for name, tensor in dlp.quantized_state_dict(alone).items():
        assert_bit_equal(read[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8), name)
    by_fsdp, one = sharded(other(net(WIDTH).to(worker.device()))), other(net(WIDTH).to(worker.device()))
    dlp.load_quantized_state_dict(by_fsdp, read)
    assert_bit_equal(by_fsdp(x), alone(x), "FSDP")
    dlp.load_quantized_state_dict(one, dlp.quantized_state_dict(by_fsdp))
    assert_bit_equal(one(x), alone(x), "one rank")
    assert error(y, one(x)) < 1e-2, "tp adds in another order"
    again = other(on_mesh(False, tp=2))
    dlp.load_quantized_state_dict(again, dlp.quantized_state_dict(one))
    assert_bit_equal(again(x), y, "tp")


# Cases without `--all-cases`: one scale per tensor, per tile, per block and per row; and each mode
CHOSEN = [("fp8_current", "static"), ("fp8_block", "dynamic"), ("nvfp4", "weight_only"), ("int8", "static")]


@pytest.mark.parametrize(("recipe", "mode"), [each if each in CHOSEN else nightly(*each) for each in FLOWS], ids=str)
@pytest.mark.ranks(2)
def test_codes_go_from_one_mesh_to_another(ranks, tmp_path, recipe, mode):
    ranks(2).run(saved_and_loaded, recipe, mode, str(tmp_path))


@torch.no_grad()
def rounded_outputs() -> None:
    """Check that the y of a frozen column-parallel layer, rounded with a static scale, has the bits of the unsharded layer's
    rounded y. Equal bits need equal static scales."""
    zeros, x = IntScaling(symmetric=False), batch(width=WIDTH).to(worker.device())
    recipe = dlp.CustomRecipe({"linear_input": zeros, "linear_weight": IntScaling(), "linear_output": zeros}.get)
    made = []
    for model in (on_mesh(False, tp=2), on_mesh(False)):
        with dlp.calibrate(model, observer="minmax", tensors=("x", "y")):
            model(x)
        dlp.freeze(model, "**", recipe, "static")
        made.append(model)
    y, expected = (model[0](x) for model in made)
    assert_bit_equal(y, expected.chunk(2, 1)[worker.mesh(tp=2)["tp"].get_local_rank()])
    assert y.unique().numel() <= 256


@pytest.mark.ranks(2)
def test_static_scales_of_y_are_those_of_the_unsharded_y(ranks):
    ranks(2).run(rounded_outputs)


@torch.no_grad()
def on_both_axes(recipe: str) -> list[str]:
    """Shard quantized weights over tp and then by FSDP. Return the names of tensors whose codes differ from the codes of
    the unsharded weights, before or after a load of these codes over other codes."""
    mesh, wrong = worker.mesh(tp=2, dp_shard=2), []
    whole = dlp.quantized_state_dict(dlp.quantize_(net(WIDTH), recipe))

    def differing(model: nn.Module) -> list[str]:
        state = dlp.quantized_state_dict(model)
        return [name for name, each in whole.items() if not torch.equal(as_bytes(state[name]), as_bytes(each))]

    model = dlp.quantize_(net(WIDTH).to(worker.device()), recipe)
    for i, dim in ((0, 0), (2, 1)):
        piece = model[i].weight.detach().chunk(2, dim)[mesh["tp"].get_local_rank()]
        spread = DTensor.from_local(piece, mesh["tp"], [Shard(dim)], run_check=False)
        model[i].weight = nn.Parameter(spread, requires_grad=False)
    fully_shard(model, mesh=mesh["dp_shard"])
    assert len(model[0].weight.placements) == 2
    wrong += differing(model)
    formats = {name: each for name, each in whole.items() if name.endswith(".format")}
    other = {name: as_bytes(each).flip(0).view(each.dtype).view(each.shape) for name, each in whole.items()} | formats
    dlp.load_quantized_state_dict(model, other)
    assert {"0.weight.codes", "2.weight.codes", "0.bias"} <= set(differing(model)), "in reverse"
    dlp.load_quantized_state_dict(model, whole)
    return wrong + differing(model)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1, 1).view(torch.uint8)


@torch.no_grad()
def of_uneven_values() -> bool:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10)).to(worker.device())
    dlp.quantize_(model, "fp8_current", lambda module, name: name == "0")
    state = {name: tensor.clone() for name, tensor in dlp.quantized_state_dict(model).items()}
    fully_shard(model, mesh=worker.mesh(dp_shard=4)["dp_shard"])
    model[1].weight.zero_()
    dlp.load_quantized_state_dict(model, state)
    return torch.equal(model[1].weight.full_tensor(), state["1.weight"])


@pytest.mark.ranks(4)
def test_codes_and_values_on_four_ranks(ranks):
    for recipe in ("fp8_current", "fp8_block"):
        assert ranks(4).run(on_both_axes, recipe) == [[]] * 4, recipe
    assert ranks(4).run(of_uneven_values) == [True] * 4


@torch.no_grad()
def of_token_shards(recipe: str) -> None:
    x = batch(width=WIDTH).to(worker.device())
    model, plain = on_mesh(True, tp=2), on_mesh(False, tp=2)
    shard = dlp.scatter_tokens(x, worker.mesh(tp=2))
    for each in (model, plain):
        dlp.freeze(each, "**", recipe)
    y = dlp.gather_tokens(model(shard), worker.mesh(tp=2))
    expected = plain(x)
    assert (y - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("recipe", [nightly("fp8_current"), "mxfp8"])
@pytest.mark.ranks(2)
def test_sequence_parallel(ranks, recipe):
    ranks(2).run(of_token_shards, recipe)


@torch.no_grad()
def managed() -> str:
    model, x = on_mesh(False), batch(width=WIDTH).to(worker.device())
    dlp.fully_shard(model, mesh=worker.mesh())
    with pytest.raises(ValueError, match="the weight is managed by FSDP; call dlp.freeze before"):
        dlp.freeze(model, "**", "fp8_current")
    model = on_mesh(False).append(nn.Linear(WIDTH, WIDTH).bfloat16().to(worker.device()))
    dlp.freeze(model, "**", "fp8_current")
    expected = model(x)
    dlp.fully_shard(model, mesh=worker.mesh(), ignored_params={*model[0].parameters(), *model[2].parameters()})
    assert_bit_equal(model(x), expected, "as the refusal advises")
    return "refused"


@pytest.mark.ranks(2)
def test_weights_of_fsdp_are_not_frozen(ranks):
    assert ranks(2).run(managed) == ["refused"] * 2


@torch.no_grad()
def compiled() -> None:
    model, x = on_mesh(False, tp=2), batch(width=WIDTH).to(worker.device())
    dlp.freeze(model, "**", "fp8_current")
    torch.compiler.reset()
    assert_bit_equal(torch.compile(model, backend="aot_eager")(x), model(x))
    torch.compiler.reset()
    hooks = model._forward_pre_hooks
    assert list(dict.keys(hooks)) == list(hooks), "torch 2.11 takes one hook for the other"


@pytest.mark.ranks(2)
def test_frozen_layers_compile(ranks):
    ranks(2).run(compiled)


@torch.no_grad()
def padded_codes() -> None:
    """Check padded codes (K = 48 in groups of 32). Under tp along N, the layer returns the shard of the unsharded layer's y
    and saves the codes of the unsharded layer. FSDP shards the decoded values of such codes: y agrees within 0.01."""

    def up() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(48, 64)).to(worker.device())

    model, alone, mesh = up(), dlp.quantize_(up(), "qat", mode="dynamic"), worker.mesh(tp=2)
    x = torch.randn(4, 48, device=worker.device())
    dlp.convert(model, [dlp.LayerGroup("up", "0", style="column", recipe="qat")], mesh)
    dlp.freeze(model, "**", "qat")
    y, state = alone(x), dlp.quantized_state_dict(model)
    torch.testing.assert_close(model(x), y.chunk(2, 1)[mesh["tp"].get_local_rank()], rtol=1e-6, atol=1e-6)
    assert_all_bit_equal(state, dlp.quantized_state_dict(alone))
    dlp.load_quantized_state_dict(model, state)
    fully_shard(alone, mesh=worker.mesh()["dp_shard"])
    torch.testing.assert_close(alone(x), y, rtol=1e-2, atol=1e-2)


@pytest.mark.ranks(2)
def test_padded_codes_of_a_column(ranks):
    ranks(2).run(padded_codes)
