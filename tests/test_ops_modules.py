"""Modules built from ops, with the names of Transformer Engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlp import ops
from tests.metrics import assert_all_bit_equal, assert_bit_equal, assert_close
from tests.ops_models import FFN, H, M, same, values


def test_a_transformer_layer_is_that_of_torch():
    torch.manual_seed(0)
    layer = ops.TransformerLayer(H, FFN, 4, 2, normalization="RMSNorm", activation="swiglu", bias=False)
    x = values(1, 2, 16, H).requires_grad_()
    y = layer(x)
    y.backward(values(2, 2, 16, H))
    p = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    other = x.detach().clone().requires_grad_()
    n = F.rms_norm(other, (H,), p["qkv.0.weight"], 1e-5)
    q, k, v = (
        F.linear(n, p[f"qkv.1.weight_{i}"]).view(2, 16, heads, 8).transpose(1, 2) for i, heads in enumerate((4, 2, 2))
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    h = other + F.linear(attended, p["proj.0.weight"])
    m = F.rms_norm(h, (H,), p["mlp.0.weight"], 1e-5)
    gated = F.silu(F.linear(m, p["mlp.1.weight_0"])) * F.linear(m, p["mlp.1.weight_1"])
    expected = h + F.linear(gated, p["mlp.3.weight"])
    expected.backward(values(2, 2, 16, H))
    same({"y": y, "dx": x.grad}, {"y": expected, "dx": other.grad})  # type: ignore[dict-item]
    assert_close(layer(x.flatten(0, 1), batch=2), y.flatten(0, 1), 1e-6)
    with pytest.raises(ValueError, match="with batch=B"):
        layer(x.flatten(0, 1))
    with pytest.raises(ValueError, match="choose num_gqa_groups"):
        ops.TransformerLayer(H, FFN, 4, 3)


def test_modules_return_the_norm_and_the_bias_where_asked():
    """Results are y, then the biases that were not added, then the output of the norm. LayerNormMLP returns only the
    bias of its last linear, and adds the other biases."""
    x, both = values(1, M, H), {"return_layernorm_output": True, "return_bias": True}
    for out in (FFN, (FFN, H)):
        module = ops.LayerNormLinear(H, out, **both)
        y, *biases, normed = module(x)
        assert_close(normed, F.layer_norm(x, (H,)), 1e-6)
        for i, (one, bias) in enumerate(zip(y if isinstance(y, tuple) else (y,), biases, strict=True)):
            weight, its = ((f"{name}_{i}" if isinstance(y, tuple) else name) for name in ("weight", "bias"))
            assert_close(one, F.linear(normed, getattr(module[2], weight)), 1e-6)
            assert_bit_equal(bias, getattr(module[2], its))
    plain = ops.LayerNormMLP(H, FFN, activation="swiglu", normalization="RMSNorm")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
    module = ops.LayerNormMLP(H, FFN, activation="swiglu", normalization="RMSNorm", **both)
    module.load_state_dict({_behind(name): tensor for name, tensor in plain.state_dict().items()})
    y, bias, normed = module(x)
    assert_close(y + bias, plain(x), 1e-6)
    assert_close(normed, F.rms_norm(x, (H,), plain[0].weight, 1e-5), 1e-6)
    y, bias = ops.LayerNormMLP(H, FFN, return_bias=True)(x)
    assert y.shape == x.shape and bias.shape == (H,)
    y, normed = ops.LayerNormLinear(H, FFN, return_layernorm_output=True)(x)
    assert y.shape == (M, FFN) and normed.shape == x.shape


def _behind(name: str) -> str:
    """Map the name of a parameter to its name in a module with a MakeExtraOutput inserted after the norm."""
    place, _, rest = name.partition(".")
    return f"{int(place) + (place != '0')}.{rest}"


TE = [
    (lambda: ops.LayerNormLinear(H, FFN), "layer_norm_weight layer_norm_bias weight bias"),
    (lambda: ops.LayerNormLinear(H, (H, FFN), normalization="RMSNorm", return_layernorm_output=True, bias=False),
        "layer_norm_weight weight"),
    (lambda: ops.LayerNormMLP(H, FFN, activation="swiglu", return_layernorm_output=True),
        "layer_norm_weight layer_norm_bias fc1_weight fc1_bias fc2_weight fc2_bias"),
    (lambda: ops.TransformerLayer(H, FFN, 4, 2, hidden_dropout=0.1),
        "self_attention.layernorm_qkv.layer_norm_weight self_attention.layernorm_qkv.layer_norm_bias "
        "self_attention.layernorm_qkv.query_weight self_attention.layernorm_qkv.key_weight "
        "self_attention.layernorm_qkv.value_weight self_attention.layernorm_qkv.query_bias "
        "self_attention.layernorm_qkv.key_bias self_attention.layernorm_qkv.value_bias "
        "self_attention.proj.weight self_attention.proj.bias layernorm_mlp.layer_norm_weight "
        "layernorm_mlp.layer_norm_bias layernorm_mlp.fc1_weight layernorm_mlp.fc1_bias "
        "layernorm_mlp.fc2_weight layernorm_mlp.fc2_bias"),
]  # fmt: skip


@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize(("make", "names"), TE, ids=["linear", "siblings", "mlp", "layer"])
def test_states_of_transformer_engine_load_and_go_back(make: Any, names: str, nested: bool):
    """`from_te` converts a state with the names of Transformer Engine to a state that loads, and `to_te` then returns the
    original state bit for bit."""
    models = [nn.ModuleDict({"a": make(), "b": nn.Linear(2, 2)}) if nested else make() for _ in range(2)]
    prefix = "a." if nested else ""
    state = {name: torch.randn_like(tensor) for name, tensor in ops.to_te(models[0]).items()}
    assert {name for name in state if not name.startswith("b.")} == {prefix + name for name in names.split()}
    found = ops.from_te(models[0], state | {f"{prefix}_extra_state": torch.zeros(1)})
    models[0].load_state_dict(found)
    assert_all_bit_equal(ops.to_te(models[0]), state)
    models[1].load_state_dict(ops.from_te(models[1], ops.to_te(models[0])))
    assert_all_bit_equal(models[1].state_dict(), models[0].state_dict())
    weight = prefix + next(
        name for name in names.split() if not name.endswith("layer_norm_weight") and "bias" not in name
    )
    with pytest.raises(ValueError, match=rf"^{weight} has shape \(3, 2\); expected \(\d+, 32\)"):
        ops.from_te(models[0], state | {weight: torch.zeros(3, 2)})


@pytest.mark.parametrize("siblings", [False, True], ids=["", "siblings"])
def test_states_of_sequences_of_ops_load_and_go_back(siblings: bool):
    """In the state of TE a Linear is two basic ops, each op has an `_extra_state`, and siblings are one tensor."""
    model = nn.ModuleDict({"mlp": ops.Sequential(
        ops.LayerNorm(H), ops.Linear(H, (FFN, FFN) if siblings else 2 * FFN), ops.SwiGLU(),
        ops.BasicLinear(FFN, (H, H) if siblings else 2 * H), ops.GLU(),
    )})  # fmt: skip
    shapes = {
        "0.weight": (H,), "0.bias": (H,), "1.basic_ops.0.weight": (2 * FFN, H), "1.basic_ops.1.bias": (2 * FFN,),
        "3.weight": (2 * H, FFN),
    }  # fmt: skip
    state = {f"mlp.{name}": values(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    extra = {f"mlp.{op}._extra_state": torch.zeros(1) for op in ("0", "1.basic_ops.0", "1.basic_ops.1", "2", "3", "4")}
    model.load_state_dict(ops.from_te(model, state | extra))
    assert_all_bit_equal(ops.to_te(model), state)
    x = values(9, M, H)
    p = {name.removeprefix("mlp."): tensor for name, tensor in state.items()}
    h = F.linear(F.layer_norm(x, (H,), p["0.weight"], p["0.bias"]), p["1.basic_ops.0.weight"], p["1.basic_ops.1.bias"])
    gate, up = F.linear(F.silu(h[:, :FFN]) * h[:, FFN:], p["3.weight"]).chunk(2, -1)
    assert_close(model["mlp"](x), gate.sigmoid() * up, 1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_q_k_and_v_of_transformer_engine_may_be_one_tensor(interleaved: bool):
    """The layer has 4 heads of 8 features in 2 groups. Interleaved, the tensor has q, k and v of each group in turn;
    otherwise it has all q, then all k, then all v."""
    layer, qkv = ops.TransformerLayer(H, FFN, 4, 2, bias=False), "self_attention.layernorm_qkv.weight"
    state = ops.to_te(layer, fuse_qkv_params=True, qkv_weight_interleaved=interleaved)
    q, k, v = (getattr(layer.qkv[1], f"weight_{i}").detach() for i in range(3))
    pairs = ((q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]), (q, k, v))
    assert_bit_equal(state[qkv], torch.cat(pairs[0 if interleaved else 1]))
    for which, part in (("query", q), ("key", k), ("value", v)):
        assert_bit_equal(ops.to_te(layer)[qkv.replace("weight", f"{which}_weight")], part, which)
    other = ops.TransformerLayer(H, FFN, 4, 2, bias=False)
    other.load_state_dict(ops.from_te(other, state, qkv_weight_interleaved=interleaved))
    assert_all_bit_equal(other.state_dict(), layer.state_dict())


def test_options_that_modules_do_not_have_are_refused():
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        ops.LayerNormMLP(H, FFN, activation="tanh")
    with pytest.raises(TypeError, match="unknown option ub_overlap"):
        ops.LayerNormMLP(H, FFN, ub_overlap=True)
