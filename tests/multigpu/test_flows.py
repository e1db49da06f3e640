"""Frozen layers over two ranks: column and row, codes that are those of the whole, on another mesh, and under FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dlp
from tests import pool as worker
from tests.metrics import assert_bit_equal
from tests.test_flows import batch, net

RECIPES = [("fp8_current", "static"), ("fp8_rowwise", "dynamic"), ("nvfp4", "weight_only")]


def on_mesh(sequence_parallel: bool, **sizes: int) -> nn.Module:
    mesh, options = worker.mesh(**sizes), {"sequence_parallel": sequence_parallel}
    model = net().to(worker.device())
    groups = [dlp.LayerGroup("up", "0", style="column", **options), dlp.LayerGroup("down", "2", style="row", **options)]
    dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="bf16"), *groups], mesh, batch=(1, 32))
    return model


@torch.no_grad()
def saved_and_loaded(recipe: str, mode: str, folder: str) -> None:
    x, file = batch().to(worker.device()), Path(folder, "codes.pt")
    model, other = on_mesh(False, tp=2), on_mesh(False, tp=1)
    expected = model(x)
    for each in (model, other):
        with dlp.calibrate(each):
            each(x if each is model else 2 * x)
        dlp.freeze(each, "**", recipe, mode)
    y = model(x)
    assert (y - expected).norm() < 0.25 * expected.norm()
    state = dlp.quantized_state_dict(model)
    if torch.distributed.get_rank() == 0:
        torch.save(state, file)
    torch.distributed.barrier()
    read = torch.load(file, weights_only=True, map_location=worker.device())
    plain = dlp.quantized_state_dict(other)
    for name, tensor in plain.items():  # quantized on one rank, and cut over two
        if not name.endswith("x_scale"):
            assert_bit_equal(state[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8), name)
    dlp.load_quantized_state_dict(other, read)
    found = other(x)
    assert (found - y).norm() < 1e-2 * y.norm()
    again = on_mesh(False, tp=2)
    with dlp.calibrate(again):
        again(3 * x)
    dlp.freeze(again, "**", recipe, mode)
    dlp.load_quantized_state_dict(again, dlp.quantized_state_dict(other))
    assert_bit_equal(again(x), y)


@pytest.mark.parametrize(("recipe", "mode"), RECIPES)
@pytest.mark.ranks(2)
def test_codes_go_from_one_mesh_to_another(ranks, tmp_path, recipe, mode):
    ranks(2).run(saved_and_loaded, recipe, mode, str(tmp_path))


@torch.no_grad()
def of_token_shards(recipe: str) -> None:
    x = batch().to(worker.device())
    model, plain = on_mesh(True, tp=2), on_mesh(False, tp=2)
    shard = dlp.scatter_tokens(x, worker.mesh(tp=2))
    for each in (model, plain):
        dlp.freeze(each, "**", recipe)
    y = dlp.gather_tokens(model(shard), worker.mesh(tp=2))
    expected = plain(x)
    assert (y - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
@pytest.mark.ranks(2)
def test_sequence_parallel(ranks, recipe):
    ranks(2).run(of_token_shards, recipe)


@torch.no_grad()
def sharded(recipe: str, mode: str) -> None:
    x = batch().to(worker.device())
    whole, model = net().to(worker.device()), net().to(worker.device())
    for each in (whole, model):
        if mode == "static":
            with dlp.calibrate(each):
                each(x)
        dlp.quantize_(each, recipe, mode=mode)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=worker.mesh()["dp_shard"])
    fully_shard(model, mesh=worker.mesh()["dp_shard"])
    assert_bit_equal(model(x), whole(x))


@pytest.mark.parametrize(("recipe", "mode"), RECIPES)
@pytest.mark.ranks(2)
def test_plain_models_under_fsdp(ranks, recipe, mode):
    ranks(2).run(sharded, recipe, mode)


def managed() -> str:
    model = on_mesh(False)
    dlp.fully_shard(model, mesh=worker.mesh())
    with pytest.raises(ValueError, match="FSDP has its weight; freeze before"):
        dlp.freeze(model, "**", "fp8_current")
    return "refused"


@pytest.mark.ranks(2)
def test_weights_of_fsdp_are_not_frozen(ranks):
    assert ranks(2).run(managed) == ["refused"] * 2


@torch.no_grad()
def compiled() -> None:
    model, x = on_mesh(False, tp=2), batch().to(worker.device())
    dlp.freeze(model, "**", "fp8_current")
    torch.compiler.reset()
    assert_bit_equal(torch.compile(model, backend="aot_eager")(x), model(x))
    torch.compiler.reset()


@pytest.mark.ranks(2)
def test_frozen_layers_compile(ranks):
    ranks(2).run(compiled)
