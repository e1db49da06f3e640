"""dlp.te: Transformer Engine's names, keywords and defaults; no device, and two ranks for tensor parallelism."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dlp
import dlp.te as te
from dlp import ops
from dlp.ops.modules import OPTIONS
from dlp.te import recipe as te_recipe
from dlp.te_arguments import ARGUMENTS, FORWARD, INITIALIZE_UB, Argument, keywords_of
from tests import pool as worker
from tests import te_listings, te_rows, te_signatures
from tests.metrics import assert_bit_equal, assert_close
from tests.ops_models import FFN, H, M, values

PAGE = (Path(__file__).parent.parent / "docs" / "from-transformer-engine.md").read_text()
FAMILIES = {
    "Linear": "module", "LayerNormLinear": "module", "LayerNormMLP": "module", "TransformerLayer": "transformer",
    "DotProductAttention": "attention",
}  # fmt: skip
MAKE: dict[str, Any] = {
    "Linear": lambda **more: te.Linear(H, H, **more),
    "LayerNormLinear": lambda **more: te.LayerNormLinear(H, H, **more),
    "LayerNormMLP": lambda **more: te.LayerNormMLP(H, FFN, **more),
    "TransformerLayer": lambda **more: te.TransformerLayer(H, FFN, 4, **more),
    "DotProductAttention": lambda **more: te.DotProductAttention(4, 8, **more),
}  # fmt: skip


def taken(layer: str, method: str) -> set[str]:
    """Return the names of the arguments of `method` of a layer of dlp.te, including those of its base classes in
    dlp."""
    found: set[str] = set(OPTIONS) if method == "__init__" and layer != "DotProductAttention" else set()
    for cls in getattr(te, layer).__mro__:
        if method in vars(cls) and cls.__module__.startswith(("dlp.te", "dlp.ops.")):
            signature = inspect.signature(vars(cls)[method])
            found |= {name for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
    return found


def rows(heading: str) -> dict[str, list[str]]:
    """Return the rows of the table under a heading of the page, by the argument in the first cell."""
    section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "|" in line]
    found = {}
    for row in cells:
        for name in re.findall(r"`(\w+)`", row[0]):
            found[name] = row[1:]
    return found


@pytest.mark.parametrize("heading", te_rows.ROWS)
def test_rows_have_tests(heading: str):
    """Each table row of the page under `heading` is listed in te_rows.ROWS with a test, and this test exists."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    heads = {section.splitlines()[i - 1] for i, line in enumerate(section.splitlines()) if line.startswith("|---")}
    assert [line[2:].partition(" | ")[0] for line in lines if line not in heads] == list(te_rows.ROWS[heading])
    for place in te_rows.ROWS[heading].values():
        file, _, name = place.partition("::")
        assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text(), place


@pytest.mark.parametrize("name", ["GroupedLinear", "AdaptiveLayerNorm", "ScaledSwiGLU"])
def test_ops_without_counterpart_are_missing(name: str):
    assert not hasattr(ops, name) and not hasattr(ops.MakeExtraOutput(), "set_extra_output_channel")


def test_dropouts_are_those_of_the_page():
    for layer, expected in ((te.TransformerLayer(H, FFN, 4), 0.1), (ops.TransformerLayer(H, FFN, 4), 0.0)):
        drops = [each.p for each in layer.modules() if isinstance(each, ops.Dropout)]
        assert layer.attention.attention_dropout == expected and drops == [expected] * (expected > 0)


def requested(argument: Argument) -> Any:
    """Return a value of the argument that dlp refuses: a value that is not in `neutral`. dlp ignores the argument if its
    value is in `neutral`."""
    assert argument.neutral is not None
    return next(value for value in (True, "mxfp8", 3) if value not in argument.neutral)


@pytest.mark.parametrize("layer", te_signatures.CONSTRUCTORS)
def test_each_argument_of_a_constructor_is_taken_or_refused_by_its_sentence(layer: str):
    table, page = ARGUMENTS[FAMILIES[layer]], rows("Constructors")
    for name in te_signatures.CONSTRUCTORS[layer]:
        assert name in page, f"no row for {name}"
        if name in taken(layer, "__init__") and not (layer == "TransformerLayer" and name in table):
            assert "the same" in page[name][1] or name == "tp_size", f"the row of {name} says another sentence"
            continue
        argument = table[name]
        for neutral in argument.neutral or ([] if argument.neutral is not None else ["anything"]):
            MAKE[layer](**{name: neutral})
        if argument.neutral is not None:
            with pytest.raises(TypeError, match=f"{name}: {re.escape(argument.sentence)}"):
                MAKE[layer](**{name: requested(argument)})
        assert argument.sentence in " ".join(page[name]), f"the row of {name} says another sentence"
    with pytest.raises(TypeError, match="unknown option tp_grup; there are ") as error:
        MAKE[layer](tp_grup=None)
    there = str(error.value).partition("; there are ")[2].split(", ")
    assert set(there) >= set(te_signatures.CONSTRUCTORS[layer]) - table.keys() and len(set(there)) == len(there)


@pytest.mark.parametrize("layer", te_signatures.FORWARDS)
def test_each_argument_of_a_forward_is_taken_or_refused_by_its_sentence(layer: str):
    made, page = MAKE[layer](), rows("Forward")
    x = [values(0, 4, 2, 4, 8)] * 3 if layer == "DotProductAttention" else [values(0, 4, 2, H)]
    for name in te_signatures.FORWARDS[layer]:
        assert name in page, f"no row for {name}"
        if name in taken(layer, "forward") - {"is_first_microbatch", "fp8_grad"}:
            continue
        if name == "fp8_grad" and layer == "Linear":
            continue
        for neutral in FORWARD[name].neutral or []:
            made(*x, **{name: neutral})
        if FORWARD[name].neutral is not None:
            with pytest.raises(TypeError, match=f"{name}: {re.escape(FORWARD[name].sentence)}"):
                made(*x, **{name: 5 if name == "is_first_microbatch" else requested(FORWARD[name])})
        assert FORWARD[name].sentence in " ".join(page[name]), f"the row of {name} says another sentence"


def test_attention_takes_query_key_and_value_apart():
    attention, x = te.DotProductAttention(4, 8), values(0, 4, 2, 4, 8)
    with pytest.raises(TypeError, match="qkv_layer: pass query_layer, key_layer and value_layer, such as views"):
        attention(qkv_layer=x)
    with pytest.raises(TypeError, match="query_layer, key_layer and value_layer are required"):
        attention(x, x)


OWN = {"layer": dlp.Linear, "op": ops.Linear}


@pytest.mark.parametrize("family", OWN)
def test_layers_of_dlp_say_what_replaces_an_argument(family: str):
    """Each argument of Transformer Engine that a layer of dlp does not have raises a TypeError that names the
    replacement, such as "tp_group: pass tp=...". For `family` "layer", the page has the same sentence."""
    page = rows("Constructors")
    for name, argument in ARGUMENTS[family].items():
        if argument.neutral is not None:
            with pytest.raises(TypeError, match=f"Linear: {name}: {re.escape(argument.sentence)}"):
                OWN[family](H, H, **{name: requested(argument)})
        if family == "layer":
            assert argument.sentence in " ".join(page[name]), f"the row of {name} says another sentence"
    known = {*keywords_of(dlp.Linear.__init__), *ARGUMENTS["layer"]}
    assert not [name for name in te_signatures.CONSTRUCTORS["Linear"] if name not in known]
    with pytest.raises(TypeError, match="ColumnParallelLinear: tp_group: pass tp="):
        dlp.ColumnParallelLinear(H, H, tp_group=object())
    with pytest.raises(TypeError, match="Linear: tp_group: pass tp=.*; params_dtype: pass dtype="):
        dlp.Linear(H, H, tp_group=object(), params_dtype=torch.bfloat16)


def test_user_buffers_are_no_call():
    page = rows("initialize_ub")
    assert list(INITIALIZE_UB) == te_signatures.INITIALIZE_UB
    for name, argument in INITIALIZE_UB.items():
        assert argument.sentence in " ".join(page[name])
        with pytest.raises(RuntimeError, match=f"^initialize_ub: remove the call; .*{re.escape(argument.sentence)}"):
            te.initialize_ub(**{name: 1})
    with pytest.raises(RuntimeError, match="shape: leave the argument out.*tp_size: leave"):
        te.initialize_ub([64, 32], 2)
    te.destroy_ub()


def test_names_that_are_missing_say_what_to_do():
    for name, sentence in te.MISSING.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': {re.escape(sentence)}"):
            getattr(te, name)
        assert f"| `{name}` | {sentence} " in PAGE, f"the row of {name} says another sentence"
    assert not hasattr(te, "Lineer")


def test_the_advice_for_experts_runs():
    """The code in the advice runs: it sorts rows by expert, in the order of TE's `moe_permute`, and applies to each
    row the linear of its expert."""
    names: dict[str, Any] = {"dlp": dlp, "torch": torch, "num_gemms": 3, "in_features": H, "out_features": FFN}
    names |= {"expert": torch.tensor([2, 0, 2, 0, 2]), "m_splits": [2, 0, 3]}
    make, ends = re.search(r"construct (.*), and pass (.*) in place of m_splits", te.MISSING["GroupedLinear"]).groups()
    order = eval(re.search(r"torch\.argsort\(.*?\)", te.MISSING["moe_permute"])[0], names)
    assert order.tolist() == [1, 3, 0, 2, 4]
    layer, x = eval(make, names), values(0, 5, H)[order]
    nn.init.normal_(layer[2].bias)
    y = layer(x, eval(ends, names))
    assert_close(y[2:], F.linear(x[2:], layer[2].weight, layer[2].bias), 1e-6)
    assert_close(y[:2], F.linear(x[:2], layer[0].weight, layer[0].bias), 1e-6)


@pytest.mark.parametrize("name", te_listings.LISTINGS)
def test_a_listing_runs(name: str):
    te_listings.run(name)


def test_recipes_of_the_page_are_equal():
    """In the first table of recipes, each row that names a recipe of Transformer Engine also gives a recipe of dlp
    that is equal to it."""
    rows_of_recipes = re.findall(r"^\| `(\w+)\(\)` \| `(dlp.recipe\(.*?\))` \|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows_of_recipes] == [
        "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling",
    ]  # fmt: skip
    for name, ours in rows_of_recipes:
        one, other = getattr(te_recipe, name)(), eval(ours, {"dlp": dlp})
        for field in ("x", "w", "dy", "fprop", "dgrad", "wgrad"):
            assert getattr(one, field) == getattr(other, field), (name, field)


def test_recipes_have_the_options_of_the_same_names():
    assert te_recipe.DelayedScaling(margin=1, amax_history_len=4) == dlp.recipe(
        "fp8_delayed", margin=1, amax_history_len=4
    )
    params = te_recipe.QParams(power_2_scale=True, amax_epsilon=1e-6)
    by_tensor = dict.fromkeys(te_recipe.PARAMS, params)
    assert te_recipe.Float8CurrentScaling(
        **by_tensor, fp8_gemm_fprop=te_recipe.MMParams(use_split_accumulator=True)
    ) == dlp.recipe("fp8_current", power_of_two=True, epsilon=1e-6, accumulation={"fprop": "split"})
    assert te_recipe.Float8BlockScaling(x_block_scaling_dim=1) == dlp.recipe(
        "fp8_block", fp8_format="E4M3", x_block_dim=1, w_block_dim=2, dy_block_dim=1
    )
    assert te_recipe.NVFP4BlockScaling(disable_rht=True) == dlp.recipe("nvfp4", disable_rht=True)
    with pytest.raises(ValueError, match="must be equal, and given together; use dlp.CustomRecipe"):
        te_recipe.Float8CurrentScaling(fp8_quant_fwd_inp=params)
    with pytest.raises(ValueError, match="MXFP8BlockScaling: margin must be 0; got 1"):
        te_recipe.MXFP8BlockScaling(margin=1)
    assert te_recipe.MXFP8BlockScaling(enable_2d_quantization=True) == dlp.recipe("mxfp8", enable_2d_quantization=True)
    for name, argument in te_recipe.ARGUMENTS.items():
        assert f"`{name}`" in PAGE
        for neutral in argument.neutral or ("all",):
            te_recipe.NVFP4BlockScaling(**{name: neutral})
        if argument.neutral is not None:
            with pytest.raises(TypeError, match=f"NVFP4BlockScaling: {name}: {re.escape(argument.sentence)}"):
                te_recipe.NVFP4BlockScaling(**{name: True})


# Arguments of layers


def test_weights_begin_as_init_method_draws_them():
    def halves(weight: Tensor) -> None:
        weight.fill_(0.5)

    for layer in (dlp.Linear(H, H, init_method=halves), te.Linear(H, H, init_method=halves)):
        assert bool((layer.weight == 0.5).all())
        with torch.no_grad():
            layer.weight.zero_()
        layer.reset_parameters()
        assert bool((layer.weight == 0.5).all())
    layer = te.TransformerLayer(H, FFN, 4, init_method=halves, output_layer_init_method=nn.init.ones_)
    found = {name: each.detach().flatten()[0].item() for name, each in layer.named_parameters() if each.dim() == 2}
    assert found == {
        "qkv.1.weight_0": 0.5, "qkv.1.weight_1": 0.5, "qkv.1.weight_2": 0.5, "proj.0.weight": 1.0, "mlp.1.weight": 0.5,
        "mlp.3.weight": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("init", [None, partial(nn.init.normal_, std=0.1)], ids=["default", "init_method"])
def test_initial_values_are_those_of_transformer_engine(init: Any):
    """Weights have a standard deviation of 0.023 unless an init_method draws them, and biases are 0. The init_method does not
    reach output layers, which have their own."""
    torch.manual_seed(0)
    layers = [
        te.Linear(512, 512, init_method=init), te.Linear(512, 512, parameters_split=("a", "b"), init_method=init),
        te.LayerNormLinear(512, 512, init_method=init), te.LayerNormMLP(512, 512, activation="swiglu", init_method=init),
        te.TransformerLayer(512, 512, 4, init_method=init),
    ]  # fmt: skip
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if parameter.dim() == 2:
                output = name in ("mlp.3.weight", "proj.0.weight") or (layer is layers[3] and name == "3.weight")
                expected = 0.023 if init is None or output else 0.1
                assert abs(parameter.std().item() / expected - 1) < 0.02, f"{type(layer).__name__}.{name}"
            elif "bias" in name:
                assert not parameter.any(), f"{type(layer).__name__}.{name}"


def test_a_returned_bias_that_is_missing_is_none():
    x, options = values(0, M, H), {"bias": False, "return_bias": True}
    y, bias = te.Linear(H, H, **options)(x)
    assert bias is None and y.shape == x.shape
    y, bias, normed = te.LayerNormLinear(H, H, return_layernorm_output=True, **options)(x)
    assert bias is None and y.shape == normed.shape == x.shape
    y, bias = te.LayerNormLinear(H, H, parameters_split=("a", "b"), **options)(x)
    assert bias is None and y.shape == x.shape
    y, bias = te.LayerNormMLP(H, FFN, **options)(x)
    assert bias is None and y.shape == x.shape


def test_a_tp_size_needs_its_group():
    for made in (
        lambda: te.Linear(H, H, parallel_mode="column", tp_size=2),
        lambda: te.TransformerLayer(H, FFN, 4, set_parallel_mode=True, tp_size=2),
    ):
        with pytest.raises(ValueError, match="tp_size is 2, but tp_group is None.*: pass tp_group to the constructor"):
            made()


def test_a_name_stands_in_messages():
    for layer in (dlp.Linear(H, H, name="router"), te.Linear(H, H, name="router")):
        with pytest.raises(ValueError, match="router: x of shape"):
            layer(values(0, M, H + 1))
    assert te.LayerNormMLP(H, FFN, name="mlp")[1].core.spec.name == "mlp.fc1"


@pytest.mark.parametrize("split", [("query", "key_"), {"query_": 24, "key": 8}])
def test_parameters_are_split_by_name(split: Any):
    """A linear with `parameters_split` has one weight and one bias for each name, with the parameter names of
    Transformer Engine. y equals y of a linear with the concatenated parameters."""
    sizes = (16, 16) if isinstance(split, tuple) else (24, 8)
    x = values(0, M, H)
    for layer in (te.Linear(H, 32, parameters_split=split), te.LayerNormLinear(H, 32, parameters_split=split)):
        linear = layer if isinstance(layer, te.Linear) else layer[1]
        names = dict(linear.named_parameters())
        assert {name: tuple(each.shape) for name, each in names.items()} == {
            "query_weight": (sizes[0], H), "query_bias": (sizes[0],), "key_weight": (sizes[1], H), "key_bias": (sizes[1],),
        }  # fmt: skip
        read = x if layer is linear else F.layer_norm(x, (H,))
        weight, bias = (torch.cat([names[f"query_{what}"], names[f"key_{what}"]]) for what in ("weight", "bias"))
        assert_close(layer(x), F.linear(read, weight, bias), 1e-6)
        assert {name for name in ops.to_te(layer) if "norm" not in name} == set(names)
        layer.load_state_dict(ops.from_te(layer, ops.to_te(layer)))
    y, bias = te.Linear(H, 32, parameters_split=split, return_bias=True)(x)
    assert y.shape == (M, 32) and bias.shape == (32,)
    with pytest.raises(ValueError, match="does not add up to out_features 33"):
        te.Linear(H, 33, parameters_split=split)


def test_a_bias_is_returned_and_not_added():
    x, layer = values(0, M, H), te.Linear(H, FFN, return_bias=True)
    y, bias = layer(x)
    assert_close(y, F.linear(x, layer.weight), 1e-6)
    assert_bit_equal(bias, layer.bias)


@pytest.mark.parametrize("make", [
    lambda delay: dlp.Linear(H, H, recipe="fp8_current", delay_wgrad=delay),
    lambda delay: te.Linear(H, H, recipe="fp8_current", delay_wgrad_compute=delay),
    lambda delay: te.LayerNormMLP(H, FFN, recipe="fp8_current", delay_wgrad_compute=delay),
], ids=["dlp", "te", "mlp"])  # fmt: skip
def test_weight_gradients_wait_for_backward_dw(make: Any):
    """Delayed weight gradients have the bits of ordinary weight gradients."""
    now, later = make(False), make(True)
    later.load_state_dict(now.state_dict())
    for model in (now, later):
        model(values(1, M, H).requires_grad_()).backward(values(2, M, H))
    weights = [name for name, each in later.named_parameters() if each.dim() == 2]
    assert weights and all(later.get_parameter(name).grad is None for name in weights)
    assert dlp.backward_dw(later) == len(weights) and dlp.backward_dw(later) == 0
    for name, parameter in now.named_parameters():
        assert_bit_equal(later.get_parameter(name).grad, parameter.grad, name)
    if hasattr(later, "backward_dw"):
        later.backward_dw()


def test_outputs_and_gradients_are_handed_over():
    first, second = (te.Linear(H, H, recipe="fp8_current") for _ in range(2))
    x = values(0, M, H).requires_grad_()
    expected = second(first(x))
    handed = first(x, fp8_output=True)
    assert isinstance(handed, ops.Handed)
    y = second(handed, fp8_grad=True)
    assert_bit_equal(y, expected)
    y.sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    handed = te.LayerNormLinear(H, H, recipe="fp8_current")(x, fp8_output=True)
    assert isinstance(handed, ops.Handed)
    with pytest.raises(ValueError, match="several tensors: leave one of the two out"):
        te.Linear(H, H, parameters_split=("a", "b"))(x, fp8_output=True)


# Attention and the transformer layer


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Compute attention in fp64. q, k and v are [batch, heads, tokens, head size]; `seen` is True for the keys that a
    query reads; the result is [batch, tokens, heads * head size]."""
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.double()
    return out.transpose(1, 2).flatten(2)


LENGTHS = 5, 7
ROWS, COLUMNS = torch.arange(5)[:, None], torch.arange(7)
PADDED = torch.zeros(2, 1, 1, 7, dtype=torch.bool)
PADDED[1, ..., 6:] = True
FREE = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(3)) < 0.3
FREE[..., 0] = False
SEEN: dict[str, tuple[dict[str, Any], Tensor]] = {
    "no_mask": ({"attn_mask_type": "no_mask"}, torch.ones(5, 7, dtype=torch.bool)),
    "causal": ({}, COLUMNS <= ROWS),
    "causal_bottom_right": ({"attn_mask_type": "causal_bottom_right"}, COLUMNS <= ROWS + 2),
    "padding": ({"attn_mask_type": "padding", "attention_mask": PADDED}, ~PADDED),
    "padding_causal": ({"attn_mask_type": "padding_causal", "attention_mask": PADDED}, ~PADDED & (COLUMNS <= ROWS)),
    "padding_causal_bottom_right": (
        {"attn_mask_type": "padding_causal_bottom_right", "attention_mask": PADDED}, ~PADDED & (COLUMNS <= ROWS + 2)),
    "arbitrary": ({"attn_mask_type": "arbitrary", "attention_mask": FREE}, ~FREE),
    "window": ({"window_size": (2, 0)}, (COLUMNS <= ROWS) & (COLUMNS >= ROWS - 2)),
    "window of both sides": (
        {"attn_mask_type": "no_mask", "window_size": (1, 2)}, (COLUMNS >= ROWS + 1) & (COLUMNS <= ROWS + 4)),
    "window, top left": ({"attn_mask_type": "no_mask", "window_size": (1, -1), "bottom_right_diagonal": False},
                         ROWS - 1 <= COLUMNS),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("case", SEEN)
def test_attention_sees_what_the_mask_shows(case: str, layout: str):
    options, seen = SEEN[case]
    q, k, v = (values(seed, 2, heads, length, 8) for seed, heads, length in ((0, 4, 5), (1, 2, 7), (2, 2, 7)))
    order = (0, 2, 1, 3) if layout == "bshd" else (2, 0, 1, 3)
    module = te.DotProductAttention(4, 8, 2, qkv_format=layout)
    out = module(*(each.permute(order) for each in (q, k, v)), **options)
    out = out if layout == "bshd" else out.transpose(0, 1)
    both = [each.repeat_interleave(2, dim=1) for each in (k, v)]
    assert_close(out, attention_by_hand(q, *both, seen), 1e-6)


def test_attention_has_the_scale_and_the_channels_of_its_arguments():
    q, k, v = values(0, 2, 5, 4, 8), values(1, 2, 5, 4, 8), values(2, 2, 5, 4, 6)
    module = te.DotProductAttention(4, (8, 6), qkv_format="bshd", attn_mask_type="no_mask", softmax_scale=0.7)
    heads = [each.transpose(1, 2) for each in (q * 0.7 * 8**0.5, k, v)]
    assert_close(module(q, k, v), attention_by_hand(*heads, torch.ones(5, 5, dtype=torch.bool)), 1e-6)


def test_norms_of_modules_have_the_epsilon_and_the_gamma_of_their_arguments():
    x, options = values(0, M, H), {"zero_centered_gamma": True, "bias": False}
    linear, mlp = te.LayerNormLinear(H, FFN, 0.5, **options), te.LayerNormMLP(H, FFN, 0.5, activation="relu", **options)
    for layer in (linear, mlp):
        nn.init.normal_(layer[0].weight)
    first, second = (F.layer_norm(x, (H,), 1 + layer[0].weight, eps=0.5) for layer in (linear, mlp))
    assert_close(linear(x), F.linear(first, linear[1].weight), 1e-6)
    assert_close(mlp(x), F.linear(F.linear(second, mlp[1].weight).relu(), mlp[3].weight), 1e-6)


def test_attention_adds_a_bias_drops_weights_and_computes_again():
    q, k, v = (values(seed, 2, 5, 4, 8).requires_grad_() for seed in range(3))
    bias, module = values(4, 1, 4, 5, 5), te.DotProductAttention(4, 8, qkv_format="bshd")
    heads = [each.transpose(1, 2) for each in (q, k, v)]
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for kind, factor in (("post_scale_bias", 1.0), ("pre_scale_bias", 8**-0.5)):
        out = module(q, k, v, core_attention_bias_type=kind, core_attention_bias=bias)
        assert_close(out, attention_by_hand(*heads, causal, bias * factor), 1e-6)
    module = te.DotProductAttention(4, 8, qkv_format="bshd", attention_dropout=0.5)
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        out = module(q, k, v, checkpoint_core_attention=again)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    for one, other in zip(*results, strict=True):
        assert_bit_equal(one, other)
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=0.5)
    assert_bit_equal(results[0][0], expected.transpose(1, 2).flatten(2))
    assert_close(module.eval()(q, k, v), attention_by_hand(*heads, causal), 1e-6)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: te.DotProductAttention(4, 8, 3), "3 groups of k and v do not divide 4 heads"),
    (lambda: te.DotProductAttention(4, 8, qkv_format="thd"), "qkv_format must be one of bshd, sbhd"),
    (lambda: te.DotProductAttention(4, 8, attn_mask_type="diagonal"), "must be one of no_mask, causal"),
    (lambda: te.DotProductAttention(4, 8)(*values(0, 3, 5, 2, 4, 7)), r"query_layer must be \[., ., 4, 8\]"),
    (lambda: te.DotProductAttention(4, 8)(*values(0, 3, 5, 2, 4, 8), PADDED), "causal takes no attention_mask"),
    (lambda: te.DotProductAttention(4, 8, attn_mask_type="padding")(*values(0, 3, 5, 2, 4, 8)), "needs attention_mask"),
    (lambda: te.DotProductAttention(4, 8)(*values(0, 3, 5, 2, 4, 8), core_attention_bias_type="alibi"), "with core_att"),
    (lambda: te.TransformerLayer(H, FFN, 4, qk_norm_type="Norm"), "qk_norm_type must be one of RMSNorm"),
    (lambda: ops.ClampedSwiGLU(limit=0.0), "limit must be positive"),
    (lambda: te.RotaryPositionEmbedding(5), "dim must be even; got 5"),
])  # fmt: skip
def test_what_attention_cannot_do_is_refused(call: Any, says: str):
    with pytest.raises(ValueError, match=says):
        call()


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [tokens, batch, heads, head size] by rotary angles, computed with complex numbers."""
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    theta = angles[..., ::2] if interleaved else angles[..., :half]
    made = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(theta), theta))
    return (made if interleaved else made.transpose(-1, -2)).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_a_transformer_layer_norms_and_rotates_heads(interleaved: bool, norm_first: bool):
    """The test compares a layer on x [tokens, batch, H] with plain torch. The settings differ from their defaults: 2 groups of
    keys and values, heads of 16 features, a window, norms of q and k, a norm after the layer, with which Transformer Engine
    has no norm before q, k and v, and clamped SwiGLU."""
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        H, FFN, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="no_mask", window_size=(3, 1),
        kv_channels=16, layernorm_epsilon=0.1, qk_norm_type="RMSNorm", qk_norm_eps=0.2, qk_norm_before_rope=norm_first,
        rotary_pos_interleaved=interleaved, output_layernorm=True, bias=False, normalization="RMSNorm",
        zero_centered_gamma=True, activation="clamped_swiglu", activation_params={"limit": 0.2},
    )  # fmt: skip
    for norm in (layer.q_norm, layer.k_norm, layer.layernorm, layer.mlp[0]):
        nn.init.normal_(norm.weight)
    x, angles = values(0, 6, 2, H), te.RotaryPositionEmbedding(16, interleaved=interleaved)(6)
    p = dict(layer.named_parameters())

    def norm_of(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (H,), 1 + p[f"{name}.weight"], 0.1)

    def normed(each: Tensor, name: str) -> Tensor:
        return F.rms_norm(each, (16,), p[f"{name}.weight"], 0.2)

    q, k, v = (F.linear(x, p[f"qkv.0.weight_{i}"]).view(6, 2, -1, 16) for i in range(3))

    if norm_first:
        q, k = (turned(normed(each, name), angles, interleaved) for each, name in ((q, "q_norm"), (k, "k_norm")))
    else:
        q, k = (normed(turned(each, angles, interleaved), name) for each, name in ((q, "q_norm"), (k, "k_norm")))
    places = torch.arange(6)
    seen = (places <= places[:, None] + 1) & (places >= places[:, None] - 3)
    q, k, v = (each.permute(1, 2, 0, 3).repeat_interleave(4 // each.shape[2], dim=1) for each in (q, k, v))
    attended = attention_by_hand(q, k, v, seen).transpose(0, 1).float()
    h = x + F.linear(attended, p["proj.0.weight"])
    m = norm_of(h, "mlp.0")
    g, u = F.linear(m, p["mlp.1.weight_0"]).clamp(max=0.2), F.linear(m, p["mlp.1.weight_1"]).clamp(-0.2, 0.2)
    h = h + F.linear(g * torch.sigmoid(1.702 * g) * (u + 1), p["mlp.3.weight"])
    assert_close(layer(x, rotary_pos_emb=angles), norm_of(h, "layernorm"), 1e-5)
    expected = {"self_attention.q_norm.weight", "self_attention.qkv.query_weight", "layernorm.weight"}
    assert expected <= ops.to_te(layer).keys()
    layer.load_state_dict(ops.from_te(layer, ops.to_te(layer)))


def test_a_layer_is_the_same_on_both_layouts():
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    one = te.TransformerLayer(H, FFN, 4, **options)
    other = te.TransformerLayer(H, FFN, 4, attn_input_format="bshd", **options)
    other.load_state_dict(one.state_dict())
    x = values(0, 6, 2, H)
    assert_close(one(x), other(x.transpose(0, 1)).transpose(0, 1), 1e-6)
    padding = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    padding[0, ..., 4:] = True
    y = one(x, padding, self_attn_mask_type="padding_causal")
    assert_close(y[:4, 0], one(x[:4])[:4, 0], 1e-6)


GATES: dict[str, Any] = {
    "qgelu": lambda g: g * torch.sigmoid(1.702 * g), "sreglu": lambda g, u: F.relu(g) ** 2 * u,
    "qgeglu": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "clamped_swiglu": lambda g, u: (
        g.clamp(max=0.5) * torch.sigmoid(1.702 * g.clamp(max=0.5)) * (u.clamp(-0.5, 0.5) + 1)),
}  # fmt: skip


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "siblings"])
@pytest.mark.parametrize("name", GATES)
def test_activations_and_their_gradients_are_those_of_float64(name: str, alone: bool):
    op = ops.modules.ACTIVATIONS[name](**({"limit": 0.5} if name == "clamped_swiglu" else {}))
    count = 1 if name == "qgelu" else 2
    given = [values(seed, M, H).requires_grad_() for seed in range(count)]
    wide = [each.detach().double().requires_grad_() for each in given]
    y, expected = op(torch.cat(given, -1) if alone else tuple(given) if count > 1 else given[0]), GATES[name](*wide)
    assert_close(y, expected, 1e-6)
    dy = values(9, M, H)
    for one, other in zip(
        torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, wide, dy.double()), strict=True
    ):
        assert_close(one, other, 1e-6)


def parallel_layers() -> list[Tensor]:
    """Return y of a TransformerLayer of dlp.te that is sharded over tp, and y of an unsharded one with equal
    parameters. Both y are for the tokens of this rank."""
    mesh = worker.mesh(dp_shard=1, tp=2)
    group = mesh["tp"].get_group()
    torch.manual_seed(0)
    cut = te.TransformerLayer(
        H, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True, tp_group=group, tp_size=2,
        sequence_parallel=True, init_method=lambda weight: nn.init.normal_(weight, std=0.1), device=mesh.device_type,
    )  # fmt: skip
    full = te.TransformerLayer(H, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, device=mesh.device_type)
    full.load_state_dict({name: each.full_tensor() if isinstance(each, DTensor) else each
                          for name, each in cut.state_dict().items()})  # fmt: skip
    x, rank = values(0, 6, 2, H).to(mesh.device_type), mesh["tp"].get_local_rank()
    return [cut(x[3 * rank : 3 * rank + 3]).detach(), full(x)[3 * rank : 3 * rank + 3].detach()]


@pytest.mark.ranks(2)
def test_a_parallel_layer_takes_shards_of_the_sequence(ranks):
    for cut, full in ranks(2).run(parallel_layers):
        assert_close(cut, full, 1e-6)
