"""LoRA compared with one rank: under dlp's tp with sequence parallelism, and with a quantized base under torch's tp and
FSDP2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dlp
from dlp.flows.lora import adapted
from dlp.quant.parameter import QuantizedParameter
from tests import pool as worker
from tests.net import full
from tests.test_lora import INT4, with_adapters

TOKENS = 32


class Block(nn.Module):
    def __init__(self, sequence_parallel: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.mesh = nn.Linear(64, 128), nn.Linear(128, 64), None
        self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence_parallel:
            x = dlp.scatter_tokens(x, self.mesh)
        y = self.down(torch.relu(self.up(x)))
        return dlp.gather_tokens(y, self.mesh) if self.sequence_parallel else y


def inputs() -> Tensor:
    return torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(3)).to(worker.device())


def trained(model: nn.Module, x: Tensor, steps: int = 3) -> dict[str, Tensor]:
    """Train adapters; return the gradients of the first step, and the adapters after the last step."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # One parameter group for DTensors and one for plain tensors, because foreach, torch's default on GPUs, accepts no mixture
    by_kind: dict[type, list[Tensor]] = {}
    for parameter in parameters.values():
        by_kind.setdefault(type(parameter), []).append(parameter)
    optimizer = torch.optim.SGD([{"params": each} for each in by_kind.values()], lr=0.1, foreach=True)
    if any(hasattr(module, "core") for module in model.modules()):
        dlp.attach(model, optimizer)
    found: dict[str, Tensor] = {}
    for i in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if i == 0:
            found |= {f"grad.{name}": whole(p.grad) for name, p in parameters.items()}
        optimizer.step()
    return found | {name: whole(p) for name, p in parameters.items()}


def whole(value: Tensor) -> Tensor:
    return full(value).detach().float()


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a tensor. Raises AssertionError for a tensor that is not finite or is
    all zero."""
    assert found.keys() == expected.keys()
    assert all(bool(each.isfinite().all()) and float(each.norm()) > 0 for each in [*found.values(), *expected.values()])
    return max(float((found[k] - expected[k]).norm() / expected[k].norm()) for k in expected)


def cut(sequence_parallel: bool, recipe: str) -> float:
    """Train a model with adapters on tp ranks and on one rank; return the largest relative difference of a tensor."""
    mesh = dlp.build_mesh(tp=dist.get_world_size())
    expected = trained(with_adapters(Block()).to(worker.device()), inputs())
    model = with_adapters(Block(sequence_parallel))
    groups = [
        dlp.LayerGroup("all", "**", recipe=recipe, sequence_parallel=sequence_parallel),
        dlp.LayerGroup("up", "up", style="column"),
        dlp.LayerGroup("down", "down", style="row"),
    ]
    dlp.convert(model, dlp.lora_groups(model, groups), mesh, batch=(1, TOKENS))
    model.mesh = mesh["tp"]
    found = trained(model, inputs())
    return difference(found, expected)


@pytest.mark.parametrize("recipe, bound", [("bf16", 1e-5), ("fp8_current", 0.1)])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.ranks(2)
def test_tensor_parallel_adapters_train_as_on_one_rank(ranks, sequence_parallel, recipe, bound):
    assert max(ranks(2).run(cut, sequence_parallel, recipe)) < bound


TOKEN_SHARDS = {
    "up.base": ColwiseParallel(input_layouts=Shard(0)), "up.lora_A": ColwiseParallel(input_layouts=Shard(0)),
    "up.lora_B": RowwiseParallel(output_layouts=Shard(-1)), "down.base": RowwiseParallel(output_layouts=Shard(0)),
    "down.lora_A": RowwiseParallel(), "down.lora_B": ColwiseParallel(output_layouts=Shard(0)),
}  # fmt: skip
TORCHS = {
    "tp": {"up.base": ColwiseParallel(), "up.lora_B": ColwiseParallel(),
           "down.base": RowwiseParallel(), "down.lora_A": RowwiseParallel()},
    "sp": TOKEN_SHARDS,
}  # fmt: skip


def by_torchs_tp(base: Any, how: str, folder: str) -> float:
    """Train adapters over a quantized base, under torch's tensor parallelism and on one rank; return the largest
    relative difference of a tensor. Also assert that saved adapters load into an unsharded model unchanged."""
    one = with_adapters(Block(), base=base).to(worker.device())
    model, mesh = copy.deepcopy(one), worker.mesh(tp=dist.get_world_size())["tp"]
    parallelize_module(model, mesh, TORCHS[how])
    for each in (model.up, model.down):
        assert isinstance(each.base.weight.to_local(), QuantizedParameter)
    if how == "sp":
        model.register_forward_pre_hook(lambda _, given: given[0].chunk(mesh.size())[mesh.get_local_rank()])
        model.register_forward_hook(lambda _, given, y: dlp.gather_tokens(y, mesh))
    found, expected = trained(model, inputs()), trained(one, inputs())
    dlp.save_lora(model, folder)
    dist.barrier()
    again = Block().to(worker.device())
    dlp.lora(again, rank=8, alpha=16)
    dlp.load_lora(again, folder)
    for name, module in adapted(again):
        assert torch.equal(module.lora_A.weight, found[f"{name}.lora_A.weight"])
    return difference(found, expected)


@pytest.mark.parametrize("base", ["nvfp4", "fp8_current", "mxfp8", INT4], ids=str)
@pytest.mark.parametrize("how", TORCHS)
@pytest.mark.ranks(2)
def test_torchs_tensor_parallelism_shards_the_codes_of_the_base(ranks, base, how, tmp_path):
    assert max(ranks(2).run(by_torchs_tp, base, how, str(tmp_path))) < 1e-5


def by_fsdp(base: Any, folder: str) -> float:
    model = with_adapters(Block(), base=base).to(worker.device())
    one = copy.deepcopy(model)
    mesh = dlp.build_mesh(dp_shard=dist.get_world_size())
    fully_shard(model, mesh=mesh["dp_shard"])
    found, expected = trained(model, inputs()), trained(one, inputs())
    dlp.save_lora(model, folder)
    dist.barrier()
    again = Block().to(worker.device())
    dlp.lora(again, rank=8, alpha=16)
    dlp.load_lora(again, folder)
    for name, module in adapted(again):
        assert torch.equal(module.lora_A.weight, found[f"{name}.lora_A.weight"])
    return difference(found, expected)


@pytest.mark.parametrize("base", [None, "nvfp4", "fp8_current", INT4], ids=str)
@pytest.mark.ranks(2)
def test_fsdp_gathers_the_codes_of_the_base_and_trains_alike(ranks, base, tmp_path):
    assert max(ranks(2).run(by_fsdp, base, str(tmp_path))) < 1e-5
