"""Parameters that are placeholders for codes.

Torch calls that need values raise an error with the name of the call. Moves and casts keep the codes. If a user
replaces a parameter's values, for example through .data, the layer reads the new values.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import dlp
from tests import pool as worker
from tests.metrics import assert_bit_equal, relative_error
from tests.refusals import must_raise, refuses
from tests.shardnet import BF16

HELD = r"needs values of a weight that is quantized-only .* codes\): .* train with the optimizer of dlp.with_master_weights"
PUT = "a tensor was assigned in place of a weight that is quantized-only .* dlp.with_master_weights"


def x_of(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def held(recipe: str = "fp8_current", preserve: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    options: dict[str, Any] = {"recipe": recipe, "dtype": torch.bfloat16}
    with dlp.quantized_model_init(preserve_high_precision_init_val=preserve):
        return nn.Sequential(dlp.Linear(64, 128, True, **options), nn.ReLU(), dlp.Linear(128, 64, **options))


def averaged(model: nn.Module) -> None:
    average = AveragedModel(model)
    average.update_parameters(model)


def plain_step(model: nn.Module, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(x_of()).sum().backward()
    optimizer.step()


def new_data(model: nn.Module) -> None:
    model[0].weight.data = torch.zeros(128, 64, dtype=torch.bfloat16)


def by_functional_call(model: nn.Module) -> None:
    torch.func.functional_call(model, {"0.weight": torch.zeros(128, 64)}, x_of())


def another_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(128, 64))
    model(x_of())


def swapped_away(model: nn.Module) -> None:
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(128, 64)))
    model(x_of())


def other_memory(model: nn.Module) -> None:
    torch._C.TensorBase.set_(model[0].weight.requires_grad_(False), torch.zeros(128, 64, dtype=torch.bfloat16))
    model(x_of())


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    **{name: lambda m, name=name: getattr(nn.init, name)(m[0].weight) for name in (
        "zeros_", "ones_", "normal_", "uniform_", "xavier_uniform_", "kaiming_normal_", "trunc_normal_")},
    "constant_": lambda m: nn.init.constant_(m[0].weight, 1.0),
    "zero_": lambda m: m[0].weight.requires_grad_(False).zero_(),
    "data.fill_": lambda m: m[0].weight.data.fill_(0.0),
    "data = t": new_data,
    "detach().copy_": lambda m: m[0].weight.detach().copy_(torch.zeros(128, 64)),
    "index": lambda m: m[0].weight.requires_grad_(False)[0].zero_(),
    "setitem": lambda m: m[0].weight.requires_grad_(False).__setitem__(0, 0.0),
    "vector_to_parameters": lambda m: vector_to_parameters(torch.zeros(2 * 64 * 128 + 128), m.parameters()),
    "parameters_to_vector": lambda m: parameters_to_vector(m.parameters()),
    "penalty": lambda m: sum(p.square().sum() for p in m.parameters()),
    "norm": lambda m: torch.nn.utils.get_total_norm([*m.parameters()]),
    "average": averaged,
    "AdamW": plain_step,
    "AdamW foreach": lambda m: plain_step(m, foreach=True),
    "AdamW fused": lambda m: plain_step(m, fused=True),
    "matmul": lambda m: x_of() @ m[0].weight.T,
    "numpy": lambda m: m[0].weight.numpy(force=True),
    "out=": lambda m: torch.zeros(128, 64, out=m[0].weight.requires_grad_(False)),
    "set_": lambda m: m[0].weight.requires_grad_(False).set_(torch.zeros(128, 64, dtype=torch.bfloat16)),
    "nn.Parameter(p)": lambda m: nn.Parameter(m[0].weight),
    "nn.Parameter(p.detach())": lambda m: nn.Parameter(m[0].weight.detach()),
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m[0]),
}  # fmt: skip


def test_torch_calls_on_held_weights_are_refused():
    for name, call in WRITES.items():
        model = held()
        before = model(x_of())
        with pytest.raises(ValueError, match=HELD):
            call(model)
            pytest.fail(name)
        assert_bit_equal(model(x_of()), before, name)
    for call in (by_functional_call, another_parameter, swapped_away, other_memory):
        with pytest.raises(ValueError, match=PUT):
            call(held())


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_casts_and_moves_keep_the_codes(recipe, dtype):
    """After a cast the codes are unchanged, the parameter has the new dtype, and training continues."""
    model, other = held(recipe, True), held(recipe, True)
    expected = [part.clone() for part in model[0].core.weights.parts.parts]
    optimizer = dlp.with_master_weights(other, lambda parameters: torch.optim.SGD(parameters, lr=2**-10))
    dlp.attach(other, optimizer)
    masters = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    for each in (model, other):
        assert each.to(dtype)[0].weight.dtype == each.state_dict()["0.weight"].dtype == dtype
        for part, before in zip(each[0].core.weights.parts.parts, expected, strict=True):
            assert_bit_equal(part, before)
        assert each.to_empty(device="cpu")[0].core.weights.parts.parts[0] is not None
        with pytest.raises(ValueError, match="moving to the meta device would drop the codes"):
            each.to("meta")
    other[0].bias.data.zero_()  # `to_empty` leaves the bias uninitialized
    losses = []
    for _ in range(8):
        losses.append(other(x_of(dtype)).float().square().sum())
        losses[-1].backward()
        assert other[0].weight.grad.dtype == dtype
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    found = optimizer.param_groups[0]["params"]
    assert found[0].dtype == torch.float32 and not torch.equal(found[0], masters[0])


def test_a_gradient_is_cast_along():
    model = held()
    model(x_of()).sum().backward()
    before = model[0].weight.grad
    assert_bit_equal(model.float()[0].weight.grad, before.float())


def test_loading_decoded_values_changes_nothing():
    """Loading the decoded values keeps the codes. Quantizing the decoded rowwise codes again would change the columnwise
    codes, which come from the original values."""
    model = held("mxfp8", True)
    parts = [part.clone() for part in model[0].core.weights.parts.parts]
    initial = next(iter(model[0].core.weights)).initial
    model.load_state_dict(model.state_dict())
    for part, before in zip(model[0].core.weights.parts.parts, parts, strict=True):
        assert_bit_equal(part, before)
    assert next(iter(model[0].core.weights)).initial is initial


def test_assigned_values_are_quantized():
    model, other = held(), held()
    values = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    other.load_state_dict(values)
    assert_bit_equal(model(x_of()), other(x_of()))
    assert model[0].weight.isnan().all() and model[0].weight.requires_grad


def test_copies_of_placeholders_have_no_memory():
    model = held()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_bit_equal(other(x_of()), model(x_of()))
        assert type(other[0].weight) is type(model[0].weight) and other[0].weight.untyped_storage().size() == 2
        with pytest.raises(ValueError, match=HELD):
            other[0].weight.data.sum()
    for other in (copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))):
        alone = other(model[0].weight)
        with refuses("a copied parameter: lerp_ needs values of a weight that was copied without"):
            alone.requires_grad_(False).lerp_(torch.zeros(128, 64, dtype=torch.bfloat16), 0.5)


@pytest.mark.full  # test_fsdp_gather.py compiles blocks whose weights are placeholders
def test_held_weights_train_compiled():
    whole, model = held(), held()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, given = x_of().requires_grad_(), x_of().requires_grad_()
    whole(x).square().sum().backward()
    compiled(given).square().sum().backward()
    torch.compiler.reset()
    assert_bit_equal(given.grad, x.grad)
    assert_bit_equal(model[0].weight.grad, whole[0].weight.grad)


GATHERED = r"0: \w+ needs values of a weight that FSDP has gathered as codes only: call reshard\(\) of the modules"


def converted(fsdp: bool, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a converted model on two ranks (by FSDP or tp) after `dlp.attach` and one step, and its optimizer."""
    mesh = worker.mesh(tp=1 if fsdp else 2)
    groups = [dlp.LayerGroup(name="all", match="*", recipe="fp8_current")]
    groups += [
        dlp.LayerGroup(name="up", match="0", style="column"),
        dlp.LayerGroup(name="down", match="2", style="row"),
    ]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64)).to(worker.device())
    dlp.convert(model, groups, mesh)
    if fsdp:
        dlp.fully_shard(model, mesh=mesh, mp_policy=BF16, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dlp.attach(model, optimizer)
    with torch.enable_grad():
        model(x_of(torch.float32).to(worker.device())).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def gathered() -> tuple[bool, bool, bool]:
    """Check that calls which need values are refused while FSDP keeps the weights gathered as codes after forward.
    Return whether y is unchanged by the refused calls, and whether gradients and writes work after reshard()."""
    model, _ = converted(True)
    x = x_of().to(worker.device())
    with torch.no_grad():
        before = model(x)
    for call in (
        lambda: model[0].weight.data,
        lambda: model[0].weight.requires_grad_(False).zero_(),
        lambda: sum(p.square().sum() for p in model.parameters()),
    ):
        with pytest.raises(ValueError, match=GATHERED):
            call()
    model.reshard()
    with torch.no_grad():
        unchanged = torch.equal(model(x), before)
    model.reshard()
    sum(p.square().sum() for p in model.parameters()).full_tensor().backward()
    finite = all(p.grad.to_local().isfinite().all() for p in model.parameters())
    with torch.no_grad():
        model[0].weight.zero_()
        zeroed = not torch.equal(model(x), before)
    fresh, _ = converted(True)  # a new model refuses calls that need values also before the second gather
    with pytest.raises(ValueError, match=GATHERED):
        fresh(x)
        fresh[0].weight.square()
    return unchanged, finite, zeroed


@pytest.mark.ranks(2)
def test_gathered_codes_refuse_calls_that_need_values(ranks):
    assert ranks(2).run(gathered) == [(True, True, True)] * 2


def held_on_tp() -> list[str]:
    """Messages about calls that need the values of a quantized-only weight on tp."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64)).to(worker.device())
    with dlp.quantized_model_init():
        dlp.convert(
            model, [{"name": "up", "match": ["0"], "style": "column", "recipe": "fp8_current"}], worker.mesh(tp=2)
        )
    said = []
    for call in (
        lambda p: p.full_tensor(),
        lambda p: p.to_local(),
        lambda p: p.redistribute(placements=[Replicate()]),
        lambda p: p.detach().to_local(),
        lambda p: nn.Parameter(p).full_tensor(),
        lambda p: copy.deepcopy(p).to_local(),
        lambda p: averaged(model),
    ):
        said.append(must_raise(ValueError, call, model[0].weight))
    return said


@pytest.mark.ranks(2)
def test_values_of_held_weights_on_tp_are_refused(ranks):
    for said in ranks(2).run(held_on_tp):
        assert all(re.search(HELD, each) or "a copied parameter" in each for each in said), said


@torch.no_grad()
def swapped() -> tuple[bool, bool]:
    """Replace the parameters of a model on tp through .data, as for averaged weights, and restore them. Return whether
    the model used the new values, and whether a write to .data works after a cast to bf16."""
    model, _ = converted(False)
    x = x_of(torch.float32).to(worker.device())
    before, mine = model(x), [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = 0.5 * p.data
    other = copy.deepcopy(model)
    found, expected = model(x), other(x)
    for p, values in zip(model.parameters(), mine, strict=True):
        p.data = values
    dlp.end_step(model)
    for p in model.parameters():
        with refuses(r"p.data = t: the parameter is a DTensor .* and is a plain Tensor: assign a"):
            p.data = torch.zeros(p.shape)
    model.bfloat16()  # torch swaps parameters in this call
    model[0].weight.data = 0.5 * model[0].weight.data
    assert isinstance(model[0].weight, DTensor) and model[0].weight.dtype == torch.bfloat16
    half = relative_error(model[0].weight.to_local().float(), other[0].weight.to_local().float()) < 0.01
    fsdp, _ = converted(True)
    fsdp.reshard()
    with refuses(r"p.data = t: FSDP gathers from the memory of the existing shard .*: p.copy_\(t\)"):
        fsdp[0].weight.data = fsdp[0].weight.data * 2
    return torch.equal(found, expected) and not torch.equal(found, before), half


@pytest.mark.ranks(2)
def test_memory_that_is_put_in_is_read(ranks):
    assert ranks(2).run(swapped) == [(True, True)] * 2
