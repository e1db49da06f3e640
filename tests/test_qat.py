"""Recipe qat on one rank: decoded values in forward, and zero gradients for clipped codes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dlp
from dlp.parallel.model.boundary import recipes_of
from dlp.quant import affine
from dlp.quant.fake import FakeQuantized
from dlp.quant.fp8 import DelayedScaling
from dlp.quant.integers import IntScaling
from dlp.quant.nvfp4 import Nvfp4Scaling
from tests.metrics import assert_all_bit_equal, assert_bit_equal, relative_error
from tests.refusals import refuses

K, N, M = 64, 48, 24
NAMES = ("y", "dx", "dw", "db")


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, w, b and dy. Rounding the zero point of token 0 shifts its codes by half a code, so that its largest
    value is clipped. In each group of w, the value of largest magnitude is clipped if it is positive, because symmetric
    codes have one more code below zero than above."""
    made = torch.Generator().manual_seed(0)
    x, w, b, dy = (torch.randn(shape, generator=made) for shape in ((M, K), (N, K), (N,), (M, N)))
    x[0] = x[0].clamp(-1, 1)
    x[0, :2] = torch.tensor([127.5, -127.5])
    return x.to(dtype), w.to(dtype), b.to(dtype), dy.to(dtype)


def layer(recipe: Any, w: Tensor, b: Tensor, **options: Any) -> dlp.Linear:
    made = dlp.Linear(K, N, True, recipe=recipe, dtype=w.dtype, **options)
    made.load_state_dict({"weight": w, "bias": b})
    return made


def results(module: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    return dict(zip(NAMES, (y.detach(), x.grad, module.weight.grad, module.bias.grad), strict=True))


def straight(t: Tensor, scaling: Any) -> Tensor:
    """Return the decoded values of t in its dtype. For integers, only the clamp is differentiated by autograd; for
    other formats, the gradient passes unchanged."""
    if not isinstance(scaling, IntScaling):
        padded = scaling.format.padded(t.detach())
        values = scaling.cast(padded, scaling.observe(padded)).dequantize(t.dtype)[: t.shape[0], : t.shape[1]]
        return t + (values - t).detach()
    padded = scaling.format.padded(t).float()
    blocks, codes = padded.unflatten(1, (-1, scaling.group or padded.shape[1])), scaling.codes
    scale, zero = affine.choose_qparams_affine(blocks.detach(), (1, 1, 0), codes, symmetric=scaling.symmetric)
    # Backward divides by scale here, which cancels the factor scale in the return statement
    raw = blocks / scale + zero
    rounded = raw + (torch.round(blocks.detach() * (1 / scale)) + zero - raw).detach()
    return ((rounded.clamp(*codes) - zero) * scale).flatten(1)[:, : t.shape[1]].to(t.dtype)


@pytest.mark.parametrize(
    ("weight", "activation", "clips"),
    [
        ("int4 group 32", "int8 token", (1, 40)),
        ("int3 group 24", "int8 token", (1, 40)),  # 64 columns are not a multiple of the group
        ("int8 channel", "none", (0, 10)),
        ("none", "int5 token", (1, 0)),
        ("mxfp8", "fp8_rowwise", (0, 0)),
        ("nvfp4", "nvfp4", (0, 0)),
        ("fp8_block", "fp8_current", (0, 0)),
    ],
)
def test_gradients_are_straight_through_but_where_a_code_is_clipped(weight, activation, clips):
    recipe = dlp.recipe("qat", weight=weight, activation=activation)
    x, w, b, dy = tensors()
    found = results(layer(recipe, w, b), x, dy)

    x, w, b = (t.requires_grad_() for t in (x, w, b))
    fake = [
        t if not isinstance(q, FakeQuantized) else straight(t, q.inner)
        for t, q in zip((x, w), recipe_casts(recipe), strict=True)
    ]
    y = nn.functional.linear(*fake, b)
    y.backward(dy)
    for name, expected in zip(NAMES, (y.detach(), x.grad, w.grad, b.grad), strict=True):
        torch.testing.assert_close(
            found[name], expected, rtol=2e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    for name, least in zip(("dx", "dw"), clips, strict=True):
        expected = {"dx": x, "dw": w}[name].grad == 0
        assert_bit_equal(found[name] == 0, expected, name)
        assert expected.sum() >= least and (least or not expected.any())


def recipe_casts(recipe: dlp.Recipe) -> tuple[Any, Any]:
    return recipe.x.rowwise, recipe.w.rowwise


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 0)])
def test_is_torchaos_fake_quantized_linear(bits, group):
    """y is bitwise equal to y of torchao. torchao computes gradients as (g * scale) * (1 / scale), so its gradients
    differ by rounding errors."""
    qat, configs = (
        pytest.importorskip("torchao.quantization.qat.linear"),
        pytest.importorskip("torchao.quantization.qat"),
    )
    of_w = {"group_size": group} if group else {"granularity": "per_channel"}
    theirs = qat.FakeQuantizedLinear(
        K, N, True, configs.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
        configs.IntxFakeQuantizeConfig(getattr(torch, f"int{bits}"), is_symmetric=True, **of_w),
    )  # fmt: skip
    x, w, b, dy = tensors()
    theirs.load_state_dict({"weight": w, "bias": b}, strict=False)
    weight = f"int{bits} group {group}" if group else f"int{bits} channel"
    ours = layer(dlp.recipe("qat", weight=weight), w, b)
    found, expected = results(ours, x, dy), results(theirs, x, dy)
    assert_bit_equal(found["y"], expected["y"])
    for name in ("dx", "dw", "db"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-5)
        assert_bit_equal(found[name] == 0, expected[name] == 0, name)
    assert (found["dw"] == 0).sum() >= 10 and (found["dx"] == 0).sum() == 1


def test_what_was_trained_is_what_torchao_converts():
    """The trained model has the y of the exported model after `quantize_` of dlp, and after `quantize_` of torchao."""
    x, w, b, dy = tensors()
    model, plain = nn.Sequential(layer("qat", w, b)), nn.Sequential(nn.Linear(K, N))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    dlp.attach(model, optimizer)
    model(x).backward(dy)
    optimizer.step()
    with torch.no_grad():
        y = model(x)
        for into, why in (
            (nn.Sequential(nn.Linear(K, N, bias=False)), "model has 0.bias, which into lacks"),
            (
                nn.Sequential(nn.Linear(K, N, dtype=torch.bfloat16)),
                r"0.weight is torch.float32 .*, and in `into` torch.bfloat16",
            ),
            (
                nn.Sequential(nn.Linear(K, N, device="meta")),
                "on meta: construct `into` with equal shapes and dtypes, and with memory",
            ),
            (nn.Sequential(layer("bf16", w, b)), "0 in `into` is a layer of dlp"),
        ):
            with pytest.raises(ValueError, match=why):
                dlp.export(model, into)
        assert dlp.export(model, plain) is plain
        assert_bit_equal(plain[0].weight, model[0].weight)
        ours = dlp.quantize_(copy.deepcopy(plain), "qat", mode="dynamic")
        with pytest.raises(ValueError, match=r"export: 0\.weight holds codes and no values"):
            dlp.export(ours, copy.deepcopy(plain))
        with refuses(r"export: 0\.weight in `into` holds codes; quantize `into` after the export"):
            dlp.export(model, copy.deepcopy(ours))
        assert_bit_equal(ours(x), y)
        dlp.freeze(model, "**", "qat", mode="dynamic")
        assert_bit_equal(model(x), y)
        ao = pytest.importorskip("torchao.quantization")
        config = ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=ao.PerGroup(32))
        assert_bit_equal(dlp.quantize_(plain, config)(x), y)


def test_values_that_differ_are_not_exported_into_one_parameter():
    def ends(model: nn.Module) -> nn.Module:
        model.append(nn.Linear(K, N))
        model[-1].weight = model[0].weight
        return model

    _, w, b, _ = tensors()
    model = nn.Sequential(layer("bf16", w, b), layer("bf16", 2 * w, b))
    into = ends(nn.Sequential(nn.Linear(K, N)))
    before = into[0].weight.clone()
    with refuses(r"export: 0\.weight and 1\.weight are one parameter in `into`, and differ in the"):
        dlp.export(model, into)
    assert_bit_equal(into[0].weight, before, "nothing is written")
    model.load_state_dict(into.state_dict())
    assert_bit_equal(dlp.export(model, into)[1].weight, before)


# Bound on the relative error of y, for GEMMs that scale the sums of codes
SCALED_LAST = {torch.float32: 3e-7, torch.bfloat16: 6e-3}


@pytest.mark.parametrize(
    ("weight", "activation", "exact"),
    [
        ("int4 group 32", "int8 token", (True, False)),
        ("int2 group 16", "none", (True, False)),
        ("int8 channel", "int6 token", (False, False)),
        ("int8", "int8", (False, False)),
        ("fp8_current", "fp8_current", (False, False)),
        ("fp8_rowwise", "none", (True, True)),
        ("fp8_rowwise", "fp8_rowwise", (True, True)),
        ("fp8_block", "fp8_block", (True, True)),
        ("mxfp8", "mxfp8", (True, True)),
        ("nvfp4", "nvfp4", (False, False)),
    ],
)
@torch.no_grad()
def test_every_format_is_exported(weight, activation, exact):
    """The exported model has the y of training. `exact` says for fp32 and for bf16 whether y is bitwise equal. In
    bf16 y can be equal only if scales are powers of two, because decoding then does not round."""
    recipe, mode = dlp.recipe("qat", weight=weight, activation=activation), "dynamic"
    if activation == "none":
        mode = "weight_only"
    for dtype, equal in zip(SCALED_LAST, exact, strict=True):
        x, w, b, _ = tensors(dtype)
        model, plain = nn.Sequential(layer(recipe, w, b)), nn.Sequential(nn.Linear(K, N, dtype=dtype))
        y = model(x)
        dlp.quantize_(dlp.export(model, plain), recipe, mode=mode)
        dlp.freeze(model, "**", recipe, mode=mode)
        for each in (plain, model):
            found = each(x)
            assert torch.equal(found, y) == equal and relative_error(found, y) < SCALED_LAST[dtype]
            assert relative_error(found, nn.functional.linear(x, w, b)) > 1.5 * SCALED_LAST[dtype], (
                "codes lose something"
            )


@pytest.mark.parametrize(
    ("weight", "columns", "rows"),
    [("int4 group 32", 48, N), ("int4 group 32", 33, 1), ("int4 channel", 33, N), ("mxfp8", 1, 40), ("nvfp4", 33, 40)],
)
@torch.no_grad()
def test_padded_groups_that_were_trained_are_quantized(weight, columns, rows, tmp_path):
    torch.manual_seed(0)
    recipe = dlp.recipe("qat", weight=weight, activation=weight if weight in ("mxfp8", "nvfp4") else "int8 token")
    plain, other = nn.Sequential(nn.Linear(columns, rows)), nn.Sequential(nn.Linear(columns, rows))
    trained = nn.Sequential(dlp.Linear(columns, rows, True, recipe=recipe))
    trained.load_state_dict(plain.state_dict())
    x, exact = torch.randn(4, columns), trained[0].weight.clone()
    y = trained(x)
    dlp.quantize_(plain, recipe, mode="dynamic")
    assert plain[0].weight.shape == (rows, columns)
    torch.testing.assert_close(plain(x), y, rtol=2e-6, atol=2e-6)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert plain(x).shape == y.shape, "shape on fake tensors, as in torch.compile"
    values = plain[0].weight.dequantize()
    assert values.shape == exact.shape and relative_error(values, exact) < 0.2
    assert_bit_equal(plain[0].weight[:, 1:], values[:, 1:])
    assert_bit_equal(copy.deepcopy(plain)(x), plain(x))
    torch.save(dlp.quantized_state_dict(plain), tmp_path / "codes.pt")
    state = torch.load(tmp_path / "codes.pt", weights_only=True)
    dlp.quantize_(other, recipe, mode="dynamic")
    dlp.load_quantized_state_dict(other, state)
    assert_bit_equal(other(x), plain(x))
    dlp.freeze(trained, "**", recipe, mode="dynamic")
    dlp.load_quantized_state_dict(trained, state)  # a frozen layer has the same codes
    torch.testing.assert_close(trained(x), y, rtol=2e-6, atol=2e-6)
    with pytest.raises(ValueError, match=f"x .* has 7 features, and the quantized weight .* takes {columns}"):
        plain(torch.randn(4, 7))


@torch.no_grad()
def test_padded_codes_are_not_those_of_a_weight_without_padding():
    state = dlp.quantized_state_dict(dlp.quantize_(nn.Sequential(nn.Linear(48, N)), "qat"))
    model = dlp.quantize_(nn.Sequential(nn.Linear(64, N)), "qat")
    with refuses(r"saved as codes of int4\[32\] of 48 x 48, and the model has codes of int4\[32\]"):
        dlp.load_quantized_state_dict(model, state)
    old = dlp.quantized_state_dict(model)
    kept = old.pop("0.weight.format")
    with refuses(r"lack '0.weight.format', as in files of older versions: .* add state\[") as found:
        dlp.load_quantized_state_dict(model, old)
    exec(str(found.value).split("add ")[1].split(", for each")[0], {"torch": torch, "state": old})
    assert_bit_equal(old["0.weight.format"], kept)
    dlp.load_quantized_state_dict(model, old)


@pytest.mark.parametrize("learns", ["x", "w"])
def test_one_of_the_gradients_alone(learns):
    x, w, b, dy = tensors()
    whole = results(layer("qat", w, b), x, dy)
    one = layer("qat", w, b)
    one.weight.requires_grad_(learns == "w")
    given = x.clone().requires_grad_(learns == "x")
    one(given).backward(dy)
    assert_bit_equal(given.grad if learns == "x" else one.weight.grad, whole["dx" if learns == "x" else "dw"])
    traced = layer("qat", w, b)
    traced.weight.requires_grad_(learns == "w")
    given = x.clone().requires_grad_(learns == "x")
    traced.core.by_ops(given)[0].backward(dy)
    assert_bit_equal(given.grad if learns == "x" else traced.weight.grad, whole["dx" if learns == "x" else "dw"])


@pytest.mark.parametrize("main_grads", ["off", "grad"])
def test_a_step_boundary_casts_and_microbatches_add_up(main_grads):
    x, w, b, dy = tensors()
    whole = results(layer("qat", w, b), x, dy)
    model = nn.Sequential(layer("qat", w, b))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    dlp.attach(model, optimizer, main_grads=main_grads)
    model(x)  # this forward determines the dtype in which weights are cast
    dlp.end_step(model)
    for _ in range(2):
        model(x).backward(dy)
    assert model[0].core.weights.parts is not None and model[0].core.weights.in_use()
    torch.testing.assert_close(model[0].weight.grad, 2 * whole["dw"], rtol=1e-6, atol=1e-5)
    assert_bit_equal(model[0].weight.grad == 0, whole["dw"] == 0)
    optimizer.step()
    optimizer.zero_grad()
    given = x.clone().requires_grad_()
    model(given).backward(dy)
    moved = results(layer("qat", model[0].weight.detach().clone(), model[0].bias.detach().clone()), x, dy)
    assert_bit_equal(given.grad, moved["dx"])
    assert_bit_equal(model[0].weight.grad, moved["dw"], "the casts are those of the weight that has moved")


def test_a_swap_back_and_a_resumed_swap_leave_what_qat_alone_computes():
    x, w, b, dy = tensors()

    def attached(recipe: str) -> nn.Sequential:
        model = nn.Sequential(layer(recipe, w, b))
        model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dlp.attach(model, model.optimizer)
        return model

    def step(model: nn.Sequential) -> None:
        model(x).backward(dy)
        model.optimizer.step()
        model.optimizer.zero_grad()

    alone, there_and_back, into, resumed = (attached(recipe) for recipe in ("qat", "qat", "fp8_current", "fp8_current"))
    dlp.set_recipe(into, "**", "qat")
    for model in (alone, there_and_back, into):
        step(model)
    dlp.set_recipe(there_and_back, "**", "fp8_current")
    assert recipes_of(there_and_back) == {"0": "fp8_current"}
    dlp.set_recipe(there_and_back, "**", "qat")
    resumed.load_state_dict(into.state_dict())
    assert dlp.load_state_dict(resumed, dlp.state_dict(into)) == []
    for model in (alone, there_and_back, resumed):
        step(model)
    expected = results(alone[0], x, dy)
    assert (expected["dw"] == 0).sum() >= 10, "the test needs clipped codes"
    for model in (there_and_back, resumed):
        assert_all_bit_equal(results(model[0], x, dy), expected)


def test_compiled_and_as_an_op():
    x, w, b, dy = tensors()
    whole = results(layer("qat", w, b), x, dy)
    torch.compiler.reset()
    model = layer("qat", w, b)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    given = x.clone().requires_grad_()
    compiled(given).backward(dy)
    torch.compiler.reset()
    assert_bit_equal(given.grad, whole["dx"])
    assert_bit_equal(model.weight.grad, whole["dw"])
    names = model.core.bound.spec_id, model.core.bound.trace_id
    _, kept = torch.ops.dlp.linear_fwd(x, [w], [b], [], *names, True, True, [])
    assert all(part.is_contiguous() for part in kept), "the fake implementation promises contiguous tensors"
    op, given = dlp.ops.Linear(K, N, recipe="qat"), x.clone().requires_grad_()
    op.load_state_dict({"weight": w, "bias": b})
    both = dlp.ops.Sequential(dlp.ops.MakeExtraOutput(in_place=True), op)
    y, residual = both(given)
    torch.autograd.backward((y, residual), (dy, torch.ones_like(x)))
    torch.testing.assert_close(given.grad, whole["dx"] + 1)
    assert_bit_equal(op.weight.grad, whole["dw"])


def test_what_cannot_be_done_is_refused():
    for scaling, why in (
        (DelayedScaling("e4m3"), "has delayed scales, and fake quantization needs current scales"),
        (Nvfp4Scaling(rht=True), "holds rotated values"),
    ):
        with pytest.raises(ValueError, match=why):
            FakeQuantized(scaling)
    with refuses(r'qat: weight must be "int4 group 32", .*none, or one of .*; got \'int4 token\''):
        dlp.recipe("qat", weight="int4 token")
    with pytest.raises(ValueError, match=r"qat: activation must be .*; got 'qat'"):
        dlp.recipe("qat", activation="qat")
    with pytest.raises(ValueError, match="Linear: qat needs the clip mask of x in backward"):
        dlp.Linear(K, N, recipe="qat", save_original_input=True)
    with pytest.raises(ValueError, match="0: qat needs the clip mask of w in backward, .*leave delay_wgrad out"):
        dlp.make_plan(
            nn.Sequential(nn.Linear(K, N)), [dlp.LayerGroup("all", "**", recipe="qat", delay_wgrad=True)], tp=1
        )
    with (
        pytest.raises(ValueError, match="Linear: qat trains high-precision weights, and a quantized-only"),
        dlp.quantized_model_init(),
    ):
        dlp.Linear(K, N, recipe="qat")
