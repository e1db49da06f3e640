"""Basic ops, under torch.compile and under dispatch modes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import dlp
from dlp import ops
from dlp.parallel.linear import spec
from dlp.parallel.linear.codes import codes_of
from tests.cases import few, nightly, of_these
from tests.ops_models import FFN, H, M, Watched, linear, mlp, run, same, values
from tests.ops_programs import PROGRAMS, LearnableScale, fuse_scale_add
from tests.restored_tables import restored_fusions


def test_codes_are_not_copied_and_need_a_counter_of_writes():
    """A copy of a tensor that Quantize returned has no codes, since they are bound to the reading layer. In inference
    mode there are no codes either, because torch does not count writes."""
    quantize = ops.Quantize(reader=linear("fp8_current"))
    with Watched(), torch.no_grad():
        handed = quantize(values(0, M, H))
    assert codes_of(handed) is not None
    file = io.BytesIO()
    torch.save(handed, file)
    file.seek(0)
    for other in (copy.deepcopy(handed), torch.load(file, weights_only=False)):
        assert vars(other) == {"dlp_codes": None}
        same({"x": other}, {"x": handed}, 0)
    with Watched(), torch.inference_mode():
        assert codes_of(quantize(values(0, M, H))) is None


def test_a_copied_quantize_hands_over_in_traced_calls():
    """Unpickling a Quantize registers its recipe for traced calls, because the process that loads the module may not
    know it."""
    quantize = ops.Quantize(recipe="fp8_current")
    trace_id = quantize._by_recipe.trace_id
    saved = pickle.dumps(quantize)
    spec._TRACES.clear()
    kept = spec._SPEC_OF_TRACE.pop(trace_id)
    try:
        with Watched():
            assert codes_of(pickle.loads(saved)(values(0, M, H))) is not None
        assert spec.spec_of(trace_id).recipe == kept.recipe
    finally:
        spec._SPEC_OF_TRACE[trace_id] = kept


def test_watched_code_hands_over_a_dense_tensor_with_codes():
    split = PROGRAMS["Split"]()
    with Watched():
        handed = split.norm(values(0, M, H))  # type: ignore[operator]
        assert type(handed) is Tensor and codes_of(handed) is not None
        handed.detach().mul_(2)  # counts as a write to `handed`
        assert codes_of(handed) is None
        assert codes_of(ops.Quantize()(values(0, M, H))) is None
    for part in (split.norm, split.fc1):
        assert "under torch.compile or a dispatch mode" not in str(part.plan())  # type: ignore[operator]
    dense = "0 (Quantize) returns y in high precision: traced calls quantize by a recipe without process_group, or by a reader"
    assert f"under torch.compile or a dispatch mode, {dense}" in str(ops.Sequential(ops.Quantize()).plan())


def mlp_like(model: nn.Module) -> ops.Sequential:
    """Return an uncompiled model with the bf16 recipe and the state of `model`."""
    made = ops.Sequential(ops.RMSNorm(H), ops.Linear(H, (FFN, FFN)), ops.SwiGLU(), ops.Linear(FFN, H), ops.GELU())
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.slow
@pytest.mark.parametrize("program", of_these(("Quantized", "Branching", "OwnOp", "OwnFusion"), PROGRAMS))
@restored_fusions()
def test_programs_of_users_compile(program: str):
    """The compiled model gives the results of the eager model. dlp.autocast inside of compiled code is refused."""
    ops.register_forward_fusion(fuse_scale_add, prepend=True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = PROGRAMS[program]()
    expected = run(model)
    model.compile(backend="aot_eager", fullgraph=True)
    if program == "Quantized":
        with pytest.raises(Exception, match="dlp.autocast has no effect on compiled code"):
            run(model)
    else:
        same(run(model), expected, 1e-6)


@pytest.mark.slow
def test_compiled_code_refuses_what_was_quantized_outside_of_it():
    split = PROGRAMS["Split"]()
    handed = split.norm(values(0, M, H))  # type: ignore[operator]
    split.fc1.compile(backend="aot_eager", fullgraph=True)  # type: ignore[operator]
    with pytest.raises(Exception, match=r"0 \(Linear\): compiled code reads plain tensors; got a Handed"):
        split.fc1(handed)  # type: ignore[operator]
    split.fc1(handed.tensor())  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: ops.BasicLinear(H, H, recipe="fp8_current"), nightly(lambda: ops.Linear(H, H)), lambda: ops.RMSNorm(H),
             nightly(ops.GELU), LearnableScale], ids=["basic", "linear", "norm", "activation", "own"]
)  # fmt: skip
def test_an_op_by_itself_compiles_before_it_has_run(make: Any):
    torch._dynamo.reset()
    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    models[0].compile(backend="aot_eager", fullgraph=True)
    same(run(models[0]), run(models[1]), 0.02)


def _appended() -> nn.Module:
    return ops.Sequential().append(ops.RMSNorm(H)).append(linear("bf16"))


def _hooked() -> nn.Module:
    model = ops.Sequential(ops.RMSNorm(H), linear("bf16"), ops.GELU())
    model[1].register_forward_hook(lambda *args: None)
    return model


def _put() -> nn.Module:
    model = ops.Sequential(ops.RMSNorm(H), ops.Identity(), ops.GELU())
    setattr(model, "1", linear("bf16"))
    return model


CHANGED = {"appended": _appended, "hooked": _hooked, "put": _put, "copied": lambda: copy.deepcopy(linear("bf16"))}


@pytest.mark.parametrize("how", CHANGED)
def test_what_was_changed_compiles_before_it_has_run(how: str):
    """A model compiles although it has not run since the change: an op appended to or replaced in an
    `ops.Sequential`, a hook added to an op, or a copy of an op."""
    torch._dynamo.reset()
    model = CHANGED[how]()
    other = copy.deepcopy(model)
    model.compile(backend="aot_eager", fullgraph=True)
    same(run(model), run(other), 1e-5)


@pytest.mark.parametrize("recipe", [nightly("bf16"), "fp8_current"])
def test_ops_are_recomputed_inside_of_compiled_code(recipe: str):
    """Compiled code can recompute ops. torch traces a checkpoint only if the traced code has no side effects, so ops
    must have none in tracing."""
    torch._dynamo.reset()
    model = mlp(recipe)
    expected = run(model)

    def recomputed(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]

    x = values(1, M, H).requires_grad_()
    model.zero_grad()
    y = torch.compile(recomputed, backend="aot_eager", fullgraph=True)(x)
    y.backward(values(2, M, H))
    found = {"y": y.detach(), "dx": x.grad} | {f"d{name}": p.grad for name, p in model.named_parameters()}
    same(found, expected, 1e-5)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", few(["bf16", "fp8_current", "nvfp4"], ("fp8_current",)))
def test_frozen_linears_compile(recipe: str):
    """Frozen linears compile although they have not run before. Their backward computes only dx."""
    torch._dynamo.reset()
    for before in ([], [ops.RMSNorm(H)]):
        model = ops.Sequential(*before, linear(recipe), ops.GELU())
        model.requires_grad_(False)
        fresh = copy.deepcopy(model)
        fresh.compile(backend="aot_eager", fullgraph=True)
        same(run(fresh), run(model), 0.02 if recipe == "fp8_current" else 1e-5)


@pytest.mark.slow
def test_compiled_code_is_one_graph():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ops.Sequential(
        ops.RMSNorm(H), ops.Linear(H, (FFN, FFN), recipe="fp8_current"), ops.SwiGLU(),
        ops.Linear(FFN, H, recipe="fp8_current"), ops.GELU(),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    dlp.attach(model, optimizer)
    other = copy.deepcopy(model)
    model.compile(backend="aot_eager", fullgraph=True)
    same(run(model), run(other), 0.02)
    dlp.set_recipe(model, "*", "bf16")
    optimizer.step()
    same(run(model), run(mlp_like(model)), 1e-5)


def test_equal_blocks_share_a_graph():
    """Equal blocks share graphs: three blocks have at most three graphs, although the first step needs another graph than
    later steps, whose weights the step boundary has cast."""
    torch.compiler.reset()
    counters.clear()
    blocks = [ops.Sequential(ops.RMSNorm(H), ops.Linear(H, H, recipe="fp8_delayed")) for _ in range(3)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dlp.attach(model, optimizer)
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(3):
        run(model)
        optimizer.step()
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [nightly("bf16"), "fp8_block"])
def test_compiled_code_is_given_the_dtype_of_torch_autocast(recipe: str):
    model = mlp(recipe)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(model)
        model.compile(backend="aot_eager", fullgraph=True)
        found = run(model)
    assert expected["y"].dtype == found["y"].dtype == torch.bfloat16
    same(found, expected, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("needs_dx", [nightly(False), True])
def test_compiled_code_names_the_linear_that_takes_other_features(needs_dx: bool):
    """The error is raised during tracing. Otherwise backward's view of dx would fail without naming the linear."""
    for model in (dlp.Linear(32, 16), ops.Sequential(ops.Linear(48, (24, 24)), ops.SwiGLU(), ops.Linear(32, 16))):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(RuntimeError, match="Linear: x of shape .* has (48|24) features, and the weight takes 32"):
            compiled(torch.randn(2, 4, 48, requires_grad=needs_dx))
        torch._dynamo.reset()
