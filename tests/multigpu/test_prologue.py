"""A linear with a prologue gives the bits of what makes its x, `ops.rms_norm` and so on, followed by the same linear without
one: y and every gradient, for every recipe and style; and lies within a bound of fp64."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dlp
from bench.saved_bytes import saved
from dlp.kernels import lazy_matrix, ops
from dlp.parallel.linear import prologue
from dlp.parallel.linear.modules import ColumnParallelLinear, Linear, RowParallelLinear
from dlp.quant import recipe as recipes
from tests import pool as worker
from tests.cases import BY_SCALES
from tests.metrics import relative_error

EPS, TOKENS, WIDTH = 1e-5, 96, 64
CLASSES = {"local": Linear, "column": ColumnParallelLinear, "row": RowParallelLinear}
STYLES = {  # world, class, sequence parallelism
    "rms_norm": [(1, "local", False), (2, "column", False), (2, "column", True), (2, "local", True)],
    "swiglu": [(1, "local", False), (2, "row", False), (2, "row", True), (2, "column", True)],
}
MORE = {"layer_norm": [(1, "local", False), (2, "column", False)], "geglu": [(1, "local", False), (2, "row", False)]}
CASES = [(name, *style, recipe) for name, styles in STYLES.items() for style in styles for recipe in BY_SCALES]
CASES += [(name, *style, "fp8_current") for name, styles in MORE.items() for style in styles]
CASES += [
    (name, 2, kind, True, recipe) for name, kind in (("layer_norm", "column"), ("geglu", "row")) for recipe in BY_SCALES
]
GATES = {
    "swiglu": (ops.swiglu, ops.swiglu_backward),
    "geglu": (
        lambda gate, up: ops.gated(gate, up, "gelu"),
        lambda dh, gate, up: ops.gated_backward(dh, gate, up, "gelu"),
    ),
}


class Before(torch.autograd.Function):
    """The producer as a function of its own."""

    @staticmethod
    def forward(ctx: Any, name: str, first: Tensor, *beside: Tensor) -> Tensor:
        rows, kept = first.reshape(-1, first.shape[-1]), []
        if name in GATES:
            made = GATES[name][0](rows, beside[0].reshape(rows.shape))
        else:
            made, *kept = (ops.rms_norm if name == "rms_norm" else ops.layer_norm)(rows, *beside, EPS)
        ctx.name, ctx.dtypes, ctx.count = name, [each.dtype for each in beside], 1 + len(beside)
        ctx.save_for_backward(first, *beside, *kept)
        return made.view(first.shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        (first, *beside), kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        shape = (-1, first.shape[-1])
        dx, x = dx.reshape(shape), first.reshape(shape)
        if ctx.name in GATES:
            grads = GATES[ctx.name][1](dx, x, beside[0].reshape(shape))
        elif ctx.name == "rms_norm":
            grads = ops.rms_norm_backward(dx, x, beside[0], *kept)
        else:
            grads = ops.layer_norm_backward(dx, x, beside[0], *kept)
        more = [grad.to(each.dtype).view(each.shape) for grad, each in zip(grads[1:], beside, strict=True)]
        return None, grads[0].view(first.shape), *more


def inputs_of(name: str, tokens: int, dtype: torch.dtype, shard: int) -> list[Tensor]:
    """What the producer is given, of this rank: features that are whole, or its own."""
    generator = torch.Generator().manual_seed(3 + shard)
    first = 2 * torch.randn(tokens, WIDTH, generator=generator)
    beside, its = [torch.randn(tokens, WIDTH, generator=generator)], dtype
    if name not in GATES:
        beside, its = [torch.linspace(0.5, 1.5, WIDTH), torch.linspace(-1, 1, WIDTH)], torch.float32
    given = [first.to(dtype), *[each.to(its) for each in beside[: 1 + (name == "layer_norm")]]]
    return [each.to(worker.device()).requires_grad_() for each in given]


def layer_of(kind: str, sequence_parallel: bool, recipe: Any, dtype: torch.dtype, **options: Any) -> Linear:
    """With two siblings where it is column-parallel; a row-parallel one reads features that tp cuts."""
    torch.manual_seed(0)
    tp = worker.mesh(tp=dist.get_world_size())["tp"]
    width = WIDTH * tp.size() if kind == "row" else WIDTH
    sizes: Any = (64, 128) if kind == "column" else 128
    return CLASSES[kind](width, sizes, True, tp=tp, sequence_parallel=sequence_parallel, recipe=recipe,
                         device=worker.device(), dtype=dtype, **options)  # fmt: skip


def run(layer: Linear, given: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """y_i, and the gradients of the inputs and of the layer's parameters."""
    output = layer(*given)
    ys = output if isinstance(output, tuple) else (output,)
    torch.manual_seed(7)
    torch.autograd.backward(ys, [torch.randn_like(y) for y in ys])
    leaves = [*inputs, *layer.parameters()]
    grads = [getattr(leaf.grad, "_local_tensor", leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [*(y.detach() for y in ys), *grads]


def fused_and_before(
    name: str, kind: str, sequence_parallel: bool, recipe: str, tokens: int, mutation: str
) -> list[bool]:
    """Whether each result is equal."""
    found = []
    cut = 0 if kind == "column" and not sequence_parallel else dist.get_rank()  # there every rank has the same x
    mutations = {
        "none": contextlib.nullcontext,
        "rstd": lambda: patch.object(prologue.RmsNorm, "kept", lambda self, x: [x.matrix.rstd * 1.01]),
        "gradients": lambda: patch.object(
            type(prologue.load(name)), "gradients", lambda self, dx, kept, *given: [dx, *given[1:]]
        ),
    }
    for fused in (False, True):
        layer = layer_of(kind, sequence_parallel, recipe, torch.bfloat16, **({"prologue": name} if fused else {}))
        inputs = inputs_of(name, tokens, torch.bfloat16, cut)
        with mutations[mutation]():
            given = inputs if fused else [Before.apply(name, *inputs)]
            found.append(run(layer, given, inputs))
    return [torch.equal(a, b) for a, b in zip(*found, strict=True)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "world", "kind", "sequence_parallel", "recipe"), CASES)
def test_a_prologue_has_the_bits_of_its_producer(ranks, name, world, kind, sequence_parallel, recipe):
    """Also of tokens that no block holds."""
    for tokens in (TOKENS, 40):
        for equal in ranks(world).run(fused_and_before, name, kind, sequence_parallel, recipe, tokens, "none"):
            assert all(equal), (tokens, equal)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("name", "mutation"),
    [("rms_norm", "rstd"), *((name, "gradients") for name in ("rms_norm", "swiglu", "layer_norm", "geglu"))],
)
def test_the_comparison_notices_a_change(ranks, name, mutation):
    (equal,) = ranks(1).run(fused_and_before, name, "local", False, "fp8_current", TOKENS, mutation)
    assert not all(equal)


def against_fp64(name: str) -> list[float]:
    """Relative errors of y and all gradients, in fp32 without quantization."""
    layer, inputs = (
        layer_of("local", False, "bf16", torch.float32, prologue=name),
        inputs_of(name, 96, torch.float32, 0),
    )
    found = run(layer, inputs, inputs)
    plain = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in (*inputs, *layer.parameters())]
    wide = [tensor.double().requires_grad_() for tensor in plain]
    *given, weight, bias = wide
    plainly = {
        "rms_norm": lambda x, weight: F.rms_norm(x, (WIDTH,), weight, EPS),
        "layer_norm": lambda x, weight, bias: F.layer_norm(x, (WIDTH,), weight, bias, EPS),
        "swiglu": lambda gate, up: F.silu(gate) * up,
        "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    }
    made = plainly[name](*given)
    y = made @ weight.t() + bias
    torch.manual_seed(7)
    expected = torch.autograd.grad(y, wide, torch.randn_like(y, dtype=torch.float32).double())
    return [relative_error(a, b) for a, b in zip(found, [y, *expected], strict=True)]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", prologue.PROLOGUES)
def test_a_prologue_lies_within_a_bound_of_fp64(ranks, name):
    (errors,) = ranks(1).run(against_fp64, name)
    assert max(errors) <= 2e-6, errors


@pytest.mark.parametrize("name", prologue.PROLOGUES)
@pytest.mark.parametrize("recipe", BY_SCALES)
def test_a_prologue_saves_what_it_was_given_and_the_operand_of_x(name, recipe):
    def bytes_of(layer: Linear, inputs: Sequence[Tensor]) -> int:
        with saved(list(layer.parameters())) as found:
            kept = layer(*inputs)  # noqa: F841
            return sum(found.values())

    x, gate = (torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    alone = bytes_of(Linear(64, 64, recipe=recipe, dtype=torch.bfloat16), [x])
    vectors = [torch.ones(64, requires_grad=True) for _ in range(len(prologue.PROLOGUES[name].reads) - 1)]
    given = [x, *([gate] if name in GATES else vectors)]
    beside = 2 * x.nbytes if name in GATES else x.nbytes + len(vectors) * (128 * 4 + 64 * 4)
    assert bytes_of(Linear(64, 64, recipe=recipe, prologue=name, dtype=torch.bfloat16), given) - alone == beside


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "nvfp4"])
def test_only_those_gradients_are_made_that_are_wanted(recipe):
    x, weight = torch.randn(64, 64, dtype=torch.bfloat16), torch.ones(64, requires_grad=True)
    layer = Linear(64, 64, recipe=recipe, prologue="rms_norm", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x, weight)
    layer.weight.requires_grad_(False)
    y = layer(x, weight)
    y.sum().backward()
    assert torch.equal(y, expected) and weight.grad is not None and layer.weight.grad is None
    frozen = layer(x, weight.detach())
    assert not frozen.requires_grad


def test_bias_gradients_are_sums_of_columns():
    """Made of dy as it is, in a fixed order, and only where they are wanted."""
    layer, dy = Linear(32, 64, True, recipe="fp8_current"), torch.randn(300, 64)
    with patch.object(lazy_matrix.Summed, "sums", autospec=True, side_effect=lazy_matrix.Summed.sums) as sums:
        layer(torch.randn(300, 32)).backward(dy)
        assert torch.equal(layer.bias.grad, ops.column_sums(dy)) and sums.call_count == 1
        layer.bias.requires_grad_(False)
        layer(torch.randn(300, 32)).backward(dy)
        assert sums.call_count == 1


def test_what_a_prologue_refuses():
    norm, gated = Linear(8, 8, prologue="rms_norm"), Linear(8, 8, prologue="swiglu")
    x = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"it is called with x, weight \(prologue rms_norm\); got 1 tensors"):
        norm(x)
    with pytest.raises(ValueError, match="it is called with x; got 2 tensors"):
        Linear(8, 8)(x, x)
    with pytest.raises(
        ValueError, match=r"prologue rms_norm reads x \[..., 8\] and weight \[8\]; got a weight of shape"
    ):
        norm(x, x)
    with pytest.raises(
        ValueError, match=r"and weight \[8\] and bias \[8\], in one dtype; got a bias of shape \(8,\) in torch.bf"
    ):
        Linear(8, 8, prologue="layer_norm")(x, x[0], x[0].bfloat16())
    with pytest.raises(ValueError, match="prologue swiglu reads gate and up of one shape and dtype; got"):
        gated(x, x[:2])
    with pytest.raises(ValueError, match="unknown prologue 'silu': it is one of rms_norm, layer_norm, swiglu, geglu"):
        Linear(8, 8, prologue="silu")
    with pytest.raises(ValueError, match="prologue swiglu has no option eps"):
        Linear(8, 8, prologue={"name": "swiglu", "eps": 1e-5})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)


GROUPS: list[dict[str, Any]] = [
    {"name": "in", "match": ["gate", "up"], "style": "column", "siblings": True, "prologue": {"name": "rms_norm", "eps": 1e-6}},
    {"name": "out", "match": ["down"], "style": "row", "prologue": "swiglu"},
]  # fmt: skip


def test_the_plan_names_prologues():
    text = str(dlp.make_plan(Net(), GROUPS, 2))
    assert "prologue rms_norm(x, weight) runs apart, before x is cast [gate and 1 more]" in text
    assert "prologue swiglu(gate, up) runs apart, before x is cast [down]" in text
    with pytest.raises(
        ValueError, match="prologue rms_norm takes the mean over all features, and ROW cuts them over tp 2"
    ):
        dlp.make_plan(Net(), [*GROUPS, {"name": "norm", "match": ["down"], "prologue": "rms_norm"}], 2)
    with pytest.raises(ValueError, match="differ in prologue"):
        dlp.make_plan(Net(), [*GROUPS, {"name": "other", "match": ["up"], "prologue": "swiglu"}], 2)


def converted_and_by_hand(recipe: str) -> list[bool]:
    """Siblings of a converted model share their producer."""
    torch.manual_seed(0)
    net = Net().to(worker.device())
    dlp.convert(net, [*GROUPS, {"name": "all", "match": ["*"], "recipe": recipe}], worker.mesh(dp_shard=1))
    x, weight = (
        t[..., :32].contiguous().detach().requires_grad_() for t in inputs_of("rms_norm", TOKENS, torch.float32, 0)
    )
    gate, up = net.gate(x, weight), net.up(x, weight)
    with pytest.raises(ValueError, match="siblings must read the same tensor"):
        net.gate(x, weight)
        net.up(x, weight.clone())
    net.gate.core.shared.forget()
    normed = ops.rms_norm(x.detach(), weight.detach(), 1e-6)[0]
    alone = [
        ops.gemm_hp(normed, w.to_local(), out_dtype=torch.float32, bias=b.to_local())
        for w, b in ((module.weight, module.bias) for module in (net.gate, net.up))
    ]
    y = net.down(gate, up)
    y.sum().backward()
    equal = [recipe != "bf16" or torch.equal(a.view_as(b), b) for a, b in zip(alone, (gate, up), strict=True)]
    return [*equal, x.grad is not None]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_converted_siblings_share_a_prologue(ranks, recipe):
    assert all(ranks(1).run(converted_and_by_hand, recipe)[0])


def test_a_user_s_quantizer_is_given_a_tensor():
    class Watching(recipes.load("fp8_current").x.rowwise.__class__):  # type: ignore[misc]
        def cast(self, x: Tensor, amax: Any, **more: Any) -> Any:
            assert isinstance(x, Tensor)
            return super().cast(x, amax, **more)

        def both(self, x: Tensor, amaxes: Any, **more: Any) -> Any:
            assert isinstance(x, Tensor)
            return super().both(x, amaxes, **more)

    from dataclasses import replace

    from dlp.quant.recipe import both

    recipe = replace(recipes.load("fp8_current"), x=both(Watching()))
    layer = Linear(32, 32, prologue="rms_norm", recipe=recipe)
    layer(torch.randn(8, 32, requires_grad=True), torch.ones(32)).sum().backward()
