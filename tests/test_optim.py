"""dlp.optim in a training loop of a user: clipping, skipping and resuming, on one rank and, with torch's checkpoints,
on shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dlp
from dlp.optim.encodings import ENCODINGS
from tests import pool as worker
from tests.cases import nightly
from tests.metrics import assert_all_bit_equal, assert_bit_equal

pytest.importorskip("torchao")
KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "InvariantAdamW", "Muon")


def made(kind: str, model: nn.Module) -> Any:
    if kind == "Muon":
        return dlp.optim.Muon(dlp.optim.muon_groups(model, weight_decay=0.1), lr=1e-2)
    return getattr(dlp.optim, kind)(model.parameters(), lr=1e-2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(256, 256) for _ in range(2)]), nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def model_of() -> Model:
    torch.manual_seed(0)
    return Model()


def give_gradients(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(seed))
    (factor * model(x).square().mean()).backward()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_clipped_to_a_norm(kind: str):
    """Clipping in the optimizer has the bits of dividing the gradients by `grad_scale` before the step."""
    models = [model_of() for _ in range(2)]
    optimizers = [made(kind, model) for model in models]
    give_gradients(models[0], 1)
    norm = dlp.optim.clip_(optimizers[0], 1e-3)
    assert norm > 1e-3 and float(optimizers[0].grad_scale) == pytest.approx(float(norm) / 1e-3)
    give_gradients(models[1], 1)
    for parameter in models[1].parameters():
        parameter.grad /= optimizers[0].grad_scale
    for optimizer in optimizers:
        optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert_bit_equal(one, other)
    assert not torch.equal(next(models[0].parameters()), next(model_of().parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_whose_gradients_are_not_finite_changes_nothing(kind: str):
    model = model_of()
    optimizer = made(kind, model)
    give_gradients(model, 1)
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    give_gradients(model, 2, float("inf"))
    assert not dlp.optim.clip_(optimizer, 1.0).isfinite()
    optimizer.step()
    assert_all_bit_equal(model.state_dict(), before[0])
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            for part, tensor in (value if isinstance(value, dict) else {"": value}).items():
                old = before[1][number][name]
                assert_bit_equal(tensor, old[part] if part else old, f"{name} {part}")


def test_a_model_that_is_a_list_of_blocks_has_matrices():
    matrices, vectors = dlp.optim.muon_groups(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)]))
    assert matrices["matrices"] and [p.shape for p in matrices["params"]] == [(4, 4), (8, 4)]
    assert len(vectors["params"]) == 2


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match="AdamW8bit: parameters must be fp32; got torch.bfloat16"):
        dlp.optim.AdamW8bit(nn.Linear(4, 4).bfloat16().parameters())
    with pytest.raises(ValueError, match="has no matrix in an nn.ModuleList: write the groups"):
        dlp.optim.muon_groups(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"holds 2-D parameters; got shape \(4,\)"):
        dlp.optim.Muon([{"params": nn.Linear(4, 4).bias, "matrices": True}])
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match="AdamW has no grad_scale: clip its gradients with dlp.optim.clip_grad_norm_"):
        dlp.optim.clip_(torch.optim.AdamW(model.parameters()), 1.0)
    for options, said in (
        ({"lr": -1.0}, "lr must be a finite number >= 0; got -1.0"),
        ({"lr": float("nan")}, "lr must be a finite number >= 0; got nan"),
        ({"eps": -1e-8}, "eps must be a finite number >= 0; got -1e-08"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\); got \(0.9, 1.0\)"),
    ):
        for kind in (dlp.optim.AdamW8bit, dlp.optim.AdamW4bit, dlp.optim.AdamWFp8):
            with pytest.raises(ValueError, match=f"{kind.__name__}: {said}"):
                kind(model.parameters(), **options)
        with pytest.raises(ValueError, match=f"Muon: {said}"):
            dlp.optim.Muon([{"params": model.parameters()}], **options)
    with pytest.raises(ValueError, match="AdamW8bit: weight_decay must be a finite number >= 0; got -1.0"):
        dlp.optim.AdamW8bit([{"params": model.parameters(), "weight_decay": -1.0}])
    with pytest.raises(ValueError, match="max_norm must be positive; got 0"):
        dlp.optim.clip_(dlp.optim.AdamWFp8(model.parameters()), 0)
    with pytest.raises(ValueError, match="clip_grad_norm_: max_norm must be positive; got nan"):
        dlp.optim.clip_grad_norm_(model, float("nan"))
    assert (
        dlp.optim.clip_grad_norm_(model, 1.0) == 0 and dlp.optim.clip_(dlp.optim.AdamWFp8(model.parameters()), 1.0) == 0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_an_optimizer_steps_as_the_optimizer(kind: str):
    """Model and optimizer are copied together, so that the copied optimizer updates the copied model."""
    model = model_of()
    optimizer = made(kind, model)
    give_gradients(model, 1)
    dlp.optim.clip_(optimizer, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    other, copied = copy.deepcopy((model, optimizer))
    assert copied.grad_scale == optimizer.grad_scale > 1
    for each in (model, other):
        give_gradients(each, 2)
    optimizer.step()
    copied.step()
    assert_all_bit_equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_scalars_are_fp32_for_every_default_dtype(kind: str):
    """In bf16, the number of steps would stay at 256."""
    model = model_of()
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = made(kind, model)
        optimizer.make_state()
    finally:
        torch.set_default_dtype(torch.float32)
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert {each.dtype for each in (optimizer.grad_scale, optimizer.found_inf, *steps)} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_step_is_fp32_on_the_device_of_the_parameters(kind: str):
    """torch leaves the step of a state dict as it is. On the CPU, the dtype shows that dlp converts it."""
    model = model_of()
    optimizer = made(kind, model)
    optimizer.make_state()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = state["step"].double()
    optimizer.load_state_dict(saved)
    assert all(state["step"].dtype == torch.float32 for state in optimizer.state.values() if "step" in state)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_codes_of_another_encoding_are_refused(kind: str):
    for other in KINDS[:3]:
        optimizer, saved = made(kind, model_of()), made(other, model_of())
        saved.make_state()
        if other == kind:
            optimizer.load_state_dict(saved.state_dict())
            continue
        with pytest.raises(ValueError, match=f"{kind}: the state dict has codes of {ENCODINGS[other.lower()].name}"):
            optimizer.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_is_added_later_is_checked(kind: str):
    optimizer = made(kind, model_of())
    with pytest.raises(ValueError, match=f"{kind}: lr must be a finite number >= 0; got -1.0"):
        optimizer.add_param_group({"params": nn.Linear(4, 4).weight, "lr": -1.0})
    if kind == "Muon":
        with pytest.raises(ValueError, match=r"holds 2-D parameters; got shape \(4,\)"):
            optimizer.add_param_group({"params": nn.Linear(4, 4).bias, "matrices": True})
    elif kind != "InvariantAdamW":
        with pytest.raises(ValueError, match=f"{kind}: parameters must be fp32; got torch.bfloat16"):
            optimizer.add_param_group({"params": nn.Linear(4, 4).bfloat16().weight})


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_step_of_low_bits_reads_the_learning_rate_as_a_tensor(kind: str, monkeypatch):
    """A number would compile the step on a GPU anew for each value: also in a group that is added later, after a load, and
    after an assignment to the group."""
    model, optimizer, rates = model_of(), None, list[Tensor]()
    optimizer = made(kind, model)
    monkeypatch.setattr(optimizer, "_step", lambda *arguments: rates.append(arguments[5][0]))
    optimizer.add_param_group({"params": nn.Parameter(torch.randn(4, 256))})
    assert all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    give_gradients(model, 1)
    optimizer.step()
    assert rates and all(isinstance(rate, Tensor) and rate == 0.25 for rate in rates)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_group_may_be_empty(kind: str):
    model = model_of()
    group = {"params": list(model.parameters())}
    optimizer = getattr(dlp.optim, kind)([{"params": []}, group], lr=1e-2)
    give_gradients(model, 1)
    optimizer.step()
    assert not torch.equal(model.head.weight, model_of().head.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_parameters_are_updated_as_contiguous_ones(kind: str):
    """One parameter has codes, the other has too few elements for codes."""
    for shape in ((256, 256), (4, 8)):
        values, grad = torch.randn(shape), torch.randn(shape)
        parameters = nn.Parameter(values.t().contiguous().t()), nn.Parameter(values.clone())
        for parameter in parameters:
            matrices = {"matrices": True} if kind == "Muon" else {}
            optimizer = getattr(dlp.optim, kind)([{"params": [parameter], **matrices}], lr=1e-2)
            for _ in range(2):
                parameter.grad = grad.clone()
                optimizer.step()
        assert_bit_equal(*parameters)
        assert not torch.equal(parameters[0], values)


def resumed_on_shards(folder: str, kind: str) -> list[str]:
    """Train on 2 FSDP ranks, once without interruption, and once with a save and a load by torch's checkpoint in the
    middle. Return the names of the parameters that differ between the two runs."""
    mesh, runs = worker.mesh(dp_shard=2, tp=1), []
    for resumes in (False, True):
        model = model_of()
        dlp.convert(model, [], mesh)
        dlp.fully_shard(model, mesh=mesh)
        optimizer = made(kind, model)
        for step in range(4):
            if resumes and step == 2:
                weights, states = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
                for parameter in model.parameters():
                    parameter.data.zero_()
                optimizer = made(kind, model)
                weights, states = get_state_dict(model, optimizer)
                dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
            give_gradients(model, step)
            dlp.optim.clip_(optimizer, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        runs.append({name: parameter.full_tensor() for name, parameter in model.named_parameters()})
    return [name for name, tensor in runs[0].items() if not torch.equal(tensor, runs[1][name])]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["AdamW4bit", nightly("Muon")])
def test_a_run_resumes_from_torchs_checkpoints_bit_for_bit(ranks, kind: str, tmp_path):
    assert ranks(2).run(resumed_on_shards, str(tmp_path), kind) == [[], []]


def test_the_update_of_an_element_does_not_depend_on_the_cut():
    """The update of an element has the same bits in shards of 1 to 13 elements. (torch's fused AdamW has other bits in
    shards of 4 elements.)"""

    def trained(kind: type[torch.optim.Optimizer], cut: int) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        parts = [nn.Parameter(part.clone()) for part in torch.randn(416, generator=draw).split(cut)]
        options = {"fused": True} if kind is torch.optim.AdamW else {}
        optimizer = kind(parts, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), **options)
        for _ in range(5):
            for part, grad in zip(parts, torch.randn(416, generator=draw).split(cut), strict=True):
                part.grad = grad.clone()
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    whole = trained(dlp.optim.InvariantAdamW, 416)
    for cut in (1, 2, 4, 8, 12, 13):
        assert_bit_equal(trained(dlp.optim.InvariantAdamW, cut), whole, f"shards of {cut}")
    fused = trained(torch.optim.AdamW, 416)
    torch.testing.assert_close(whole, fused, rtol=2e-6, atol=2e-6)
    assert not torch.equal(trained(torch.optim.AdamW, 4), fused), "then launch.train needs no optimizer of its own"
