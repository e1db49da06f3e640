"""Wrong and unusual uses of dlp.ops give correct results, or an error that names the remedy."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import dlp
from dlp import ops
from tests.metrics import assert_bit_equal, assert_close
from tests.ops_models import Watched
from tests.refusals import refuses
from tests.restored_tables import restored_fusions

H, M = 32, 8


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (M, H)), generator=torch.Generator().manual_seed(seed))


# Sequences


@pytest.mark.parametrize("put", ["setattr", "modules"])
def test_a_module_that_is_put_in_the_place_of_another_runs(put: str):
    """Users replace a layer of a model with setattr or in `_modules`. The new layer runs in place of the old one."""
    model, x = ops.Sequential(ops.GELU(), ops.Linear(H, H)), values(0)
    model(x)
    other = ops.Linear(H, H)
    if put == "setattr":
        setattr(model, "1", other)
    else:
        model._modules["1"] = other
    assert_bit_equal(model(x), ops.Sequential(ops.GELU(), other)(x))
    delattr(model, "1")
    assert_bit_equal(model(x), ops.GELU()(x))


def test_extra_tensors_of_a_sequence_in_a_sequence():
    """Extra inputs and outputs of an inner `ops.Sequential` are extra inputs and outputs of the outer
    `ops.Sequential`. An extra output is not mistaken for the second output of siblings."""
    inner = ops.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput())
    model, x, extra = ops.Sequential(ops.Identity(), inner, ops.SwiGLU()), values(0), values(1)
    y, kept = model(x, extra)
    assert_bit_equal(kept, x + extra)
    assert_bit_equal(y, ops.SwiGLU()(x + extra))
    with pytest.raises(ValueError, match="the ops take 1 extra inputs; got 0"):
        model(x)


def test_names_that_were_given_stay_and_no_module_is_lost():
    act = {"norm": ops.RMSNorm(H), "act": ops.GELU()}
    assert list(ops.Sequential(act).insert(1, ops.ReLU())._modules) == ["norm", "1", "act"]
    model = ops.Sequential(act).append(ops.ReLU())
    del model[0]
    assert list(model._modules) == ["act", "1"]
    assert [type(op) for op in ops.Sequential({"1": ops.GELU()}).append(ops.ReLU())] == [ops.GELU, ops.ReLU]
    numbered = ops.Sequential(*map(ops.ConstantScale, range(4)))
    del numbered[1:3]
    assert [(name, op.scale) for name, op in numbered.named_children()] == [("0", 0), ("1", 3)]


class Halved(ops.Linear):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) / 2  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["class", "instance"])
def test_an_op_with_a_forward_of_its_own_is_called(how: str):
    """A subclass can override `forward`, as adapters do, or a function can replace it, as hooks of other packages
    do."""
    model, x = ops.Sequential(ops.RMSNorm(H), (Halved if how == "class" else ops.Linear)(H, H), ops.GELU()), values(0)
    if how == "instance":
        model(x)
        whole = model[1].forward
        model[1].forward = lambda x: whole(x) / 2
    plain = ops.Linear(H, H)
    plain.load_state_dict(model[1].state_dict())
    assert_bit_equal(model(x), model[2](plain(model[0](x)) / 2))
    assert "1 (" + type(model[1]).__name__ + "): a module with an overridden forward ends a group" in str(model.plan())
    if how == "instance":
        del model[1].forward
        assert_bit_equal(model(x), ops.Sequential(model[0], plain, model[2])(x))


def test_sequences_are_added_and_taken_apart():
    """Sequences support the operators of lists of modules."""
    one, two = ops.Sequential(ops.GELU(), ops.RMSNorm(H)), ops.Sequential(ops.SiLU())
    both, x = one + two, values(0)
    assert [type(op) for op in both] == [ops.GELU, ops.RMSNorm, ops.SiLU] and len(one) == 2
    assert_bit_equal(both(x), two(one(x)))
    one += [ops.ReLU()]
    assert isinstance(one, ops.Sequential) and list(one._modules) == ["0", "1", "2"]
    taken = one.pop(1)
    assert isinstance(taken, ops.RMSNorm)
    assert_bit_equal(one(x), ops.ReLU()(ops.GELU()(x)))


def test_a_fuser_of_nothing_or_of_no_ops_is_refused():
    with pytest.raises(ValueError, match="OperationFuser: no operations given"):
        ops.OperationFuser([])
    with pytest.raises(TypeError, match="a Linear is not an operation: pass plain modules to ops.Sequential"):
        ops.OperationFuser([ops.GELU(), nn.Linear(H, H)])
    with pytest.raises(ValueError, match=r"RMSNorm normalizes the last dimension; got normalized_shape \(\)"):
        ops.RMSNorm(())


# In place


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
@pytest.mark.parametrize("kept", ["0 (RMSNorm)", "0 (GELU)", "0 (Linear)"])
def test_an_extra_input_that_an_op_keeps_is_not_written_to(kept: str, recipe: str):
    """In x + f(x) with an in-place sum, backward of f needs x, so the sum is not written into x. If f is a linear that
    saves codes, the sum may be written into x."""
    kind = {"RMSNorm": lambda: ops.RMSNorm(H), "GELU": ops.GELU, "Linear": lambda: ops.Linear(H, H, recipe=recipe)}
    torch.manual_seed(0)
    model = ops.Sequential(kind[kept[3:-1]](), ops.Linear(H, H, recipe=recipe), ops.AddExtraInput(in_place=True))
    leaf = values(0).requires_grad_()
    with torch.no_grad():
        expected = model(leaf, leaf.clone())
        assert_bit_equal(model(x := leaf.clone(), x), expected)
    x = 1 * leaf
    if kept == "0 (Linear)" and recipe != "bf16":
        assert_bit_equal(model(x, x), expected)
        return
    with pytest.raises(ValueError, match=rf"2 \(AddExtraInput\): .*{kept[:2]}\({kept[3:-1]}\).* in_place=False"):
        model(x, x)
    y = ops.Sequential(*model[:2], ops.AddExtraInput())(x, x)
    y.sum().backward()


def test_a_gemm_does_not_add_into_what_it_reads():
    """If x is also the extra input, a GEMM that adds into it would read values that it has already overwritten. The sum is
    therefore a separate op, which rounds once more."""
    model, x = ops.Sequential(ops.Linear(H, H), ops.AddExtraInput(in_place=True)), values(0).bfloat16()
    with torch.no_grad():
        once, twice = model(x, x.clone()), model[0](x) + x
        assert not torch.equal(once, twice)
        assert_bit_equal(model(x, x), twice)


def test_an_op_that_is_set_otherwise_is_fused_otherwise():
    """If a user sets in_place to False between two calls, the second call leaves the extra input unchanged."""
    model, x, extra = ops.Sequential(ops.Linear(H, H), ops.AddExtraInput(in_place=True)), values(0), values(1)
    given = extra.clone()
    with torch.no_grad():
        model(x, given)
        assert not torch.equal(given, extra)
        model[1].in_place = False
        model(x, extra)
    assert_bit_equal(extra, values(1))


# User-defined ops and fusions with errors


class Own(ops.BasicOperation):
    """User-defined op that doubles its input. The functions `forward` and `backward`, if given, replace its
    computations, for example by wrong ones."""

    def __init__(self, forward: Any = None, backward: Any = None) -> None:
        super().__init__()
        self.its_forward, self.its_backward, self.weight = forward, backward, nn.Parameter(torch.ones(H))

    def op_forward(self, ctx: Any, input_: Tensor, **quantizers: Any) -> Any:
        return self.its_forward(input_) if self.its_forward else 2 * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return self.its_backward(grad_output) if self.its_backward else (2 * grad_output, [None])


ERRORS = {
    "forward None": (lambda x: None, None, "the op returned a NoneType as output; expected a tensor"),
    "forward list": (lambda x: [x, x], None, "the op returned a list as output; expected a tensor"),
    "no pair": (None, lambda dy: dy, "op_backward must return the gradient of the input and a tuple"),
    "three": (None, lambda dy: (dy, [], []), "op_backward must return the gradient"),
    "dx None": (None, lambda dy: (None, [None]), "the op returned None as the gradient of the input"),
    "dx shape": (
        None,
        lambda dy: (dy[:3], [None]),
        r"the op returned a gradient of shape \(3, 32\) for an input of shape \(8, 32\)",
    ),
    "dx tuple": (None, lambda dy: ((dy, dy), [None]), r"the op returned a gradient of shape \(8, 32\), \(8, 32\) for"),
    "no tuple": (None, lambda dy: (dy, dy.sum(0)), "the op returned a Tensor; expected a tuple of gradients"),
    "None for a tuple": (None, lambda dy: (dy, None), "the op returned a NoneType; expected a tuple"),
    "too many": (None, lambda dy: (dy, [None, None]), "the op returned 2 gradients of parameters; expected 1"),
    "not summed": (
        None,
        lambda dy: (dy, [dy]),
        r"the op returned a gradient of shape \(8, 32\) for a parameter of shape \(32,\)",
    ),
}


# Errors whose message is the same under a dispatch mode. The messages of the other errors differ: under a dispatch mode
# autograd itself checks the shapes of gradients, and messages about results of op_backward name only the class of the op.
WATCHED = [
    error
    for error in ERRORS
    if error not in ("dx shape", "dx tuple", "not summed") and "op_backward" not in ERRORS[error][2]
]


@pytest.mark.parametrize(
    ("error", "watched"), [*[(error, False) for error in ERRORS], *[(error, True) for error in WATCHED]]
)
@pytest.mark.parametrize("first", [False, True], ids=["inside", "first"])
def test_an_op_that_returns_what_it_must_not_is_named(error: str, first: bool, watched: bool):
    forward, backward, said = ERRORS[error]
    before = [] if first else [ops.Linear(H, H), ops.GELU()]
    model = ops.Sequential(*before, Own(forward, backward), ops.Linear(H, H))
    with Watched() if watched else nullcontext(), pytest.raises(RuntimeError, match=rf"^{len(before)} \(Own\): {said}"):
        model(values(0).requires_grad_()).sum().backward()


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
def test_a_first_op_need_not_make_what_nobody_asks_for(watched: bool):
    model = ops.Sequential(Own(None, lambda dy: (None, [dy.sum(0)])), ops.ReLU())
    with Watched() if watched else nullcontext():
        model(values(0)).sum().backward()
    assert_bit_equal(model[0].weight.grad, (values(0) > 0).float().sum(0))


FUSED_ERRORS = {
    "output alone": ("forward", lambda ctxs, x, **rest: x, "the op returned a Tensor; expected a tuple of results"),
    "no extra outputs": ("forward", lambda ctxs, x, **rest: (x, None), "the op returned a NoneType; expected a tuple"),
    "of one op": (
        "forward",
        lambda ctxs, x, **rest: (x, [()]),
        "the op returned 1 tuples of extra outputs; expected 2",
    ),
    "None": ("forward", lambda ctxs, x, **rest: (x, [None, None]), "the op returned a NoneType; expected a tuple"),
    "two": ("backward", lambda ctxs, dy, **rest: (dy, [(), ()]), "the op returned 2 results, gradients of input"),
    "dx None": (
        "backward",
        lambda ctxs, dy, **rest: (None, [(), ()], [(), ()]),
        "the op returned None as the gradient",
    ),
    "a gradient": ("backward", lambda ctxs, dy, **rest: (dy, [(dy,), ()], [(), ()]), "the op returned 1 gradients"),
}


@restored_fusions()
@pytest.mark.parametrize("error", FUSED_ERRORS)
def test_a_fused_op_that_returns_what_it_must_not_is_named(error: str):
    pass_name, does, said = FUSED_ERRORS[error]
    methods = {f"fuser_{pass_name}": lambda self, *given, **rest: does(*given, **rest)}
    its = type("OwnFused", (ops.FusedOperation,), methods)

    def fuse(found: Any, *, recipe: Any) -> Any:
        return [found[0], its(found[1:3]), *found[3:]]

    {"forward": ops.register_forward_fusion, "backward": ops.register_backward_fusion}[pass_name](fuse, prepend=True)
    model = ops.Sequential(ops.GELU(), ops.ConstantScale(2.0), ops.Identity(), ops.ReLU())
    with pytest.raises(RuntimeError, match=rf"^1 \(ConstantScale\): {said}"):
        model(values(0).requires_grad_()).sum().backward()


@restored_fusions()
@pytest.mark.parametrize("returned", [[1, 2], [ops.GELU], None, 3])
def test_a_fusion_that_returns_no_ops_is_named(returned: Any):
    def fuse_nothing(found: Any, *, recipe: Any) -> Any:
        return returned

    ops.register_forward_fusion(fuse_nothing)
    with pytest.raises(RuntimeError, match="forward fusion fuse_nothing must return ops that expand to"):
        ops.Sequential(ops.GELU())(values(0))


@restored_fusions()
def test_a_fusion_that_fails_is_named():
    with pytest.raises(TypeError, match="a fusion is a function of ops; got int"):
        ops.register_forward_fusion(3)  # type: ignore[arg-type]
    ops.register_forward_fusion(lambda found: found)
    with pytest.raises(TypeError, match="unexpected keyword argument 'recipe'") as said:
        ops.Sequential(ops.GELU())(values(0))
    assert said.value.__notes__ == ["in forward fusion <lambda>"]


# Inputs


@pytest.mark.parametrize("given", [None, "x", [values(0)], (), 3.0], ids=repr)
def test_an_input_that_is_no_tensor_is_refused(given: Any):
    with pytest.raises(TypeError, match=rf"^0 \(GELU\): .* must be tensors; got {type(given).__name__}"):
        ops.Sequential(ops.GELU(), ops.Identity())(given)
    with pytest.raises(TypeError, match="extra inputs must be tensors"):
        ops.AddExtraInput()(values(0), given or None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_an_input_that_is_not_floating_point_is_refused(dtype: torch.dtype):
    """Ops of dlp refuse such an input, because they would round it or drop the imaginary part. A user-defined op may take
    indices."""

    class Embedding(ops.BasicOperation):
        takes = frozenset({"integers"})

        def op_forward(self, ctx: Any, input_: Tensor, **quantizers: Any) -> Tensor:
            return values(1, 4, H)[input_]

    for op in (ops.RMSNorm(H), ops.Linear(H, H), ops.GELU(), ops.Bias(H)):
        with pytest.raises(TypeError, match=rf"^0 \({type(op).__name__}\): x must be floating point; got {dtype}"):
            ops.Sequential(op, ops.Identity())(torch.ones(M, H, dtype=dtype))
        with Watched(), pytest.raises(TypeError, match="x must be floating point"):
            op(torch.ones(M, H, dtype=dtype))
    y = ops.Sequential(Embedding(), ops.ConstantScale(2.0))(torch.tensor([3, 0]))
    assert_bit_equal(y, 2 * values(1, 4, H)[[3, 0]])


def test_a_linear_in_a_sequence_takes_what_one_by_itself_takes():
    model = ops.Sequential(ops.RMSNorm(H), ops.Linear(H, H))
    with pytest.raises(ValueError, match=r"^1 \(Linear\).*x must be bf16, fp16 or fp32; got torch.float64"):
        model(values(0).double())
    with pytest.raises(ValueError, match="x is on meta and the parameters are on cpu"):
        ops.Sequential(ops.Linear(H, H))(values(0).to("meta"))
    with pytest.raises(ValueError, match=r"^0 \(Bias\): .* 32 features; got a tensor of shape \(8, 1\)"):
        ops.Sequential(ops.Bias(H), ops.Identity())(values(0, M, 1))


MISMATCHED = {
    "siblings": (lambda: [ops.Linear(H, (H, 2 * H)), ops.SwiGLU()], (),
        r"1 \(SwiGLU\): gate is \(8, 32\) and up \(8, 64\): pass siblings of equal shape"),
    "siblings of one feature": (lambda: [ops.Linear(H, (H, 1)), ops.GEGLU(), ops.Linear(H, H)], (), r"1 \(GEGLU\): gate is"),
    "bias": (lambda: [ops.BasicLinear(H, H), ops.Bias(1)], (),
        r"0 \(BasicLinear\), 1 \(Bias\): Bias: expected 1 features; got a tensor of shape \(8, 32\)"),
    "bias, added into": (lambda: [ops.BasicLinear(H, H), ops.Bias(1), ops.AddExtraInput(in_place=True)], ((M, H),),
        r"0 \(BasicLinear\), 1 \(Bias\), 2 \(AddExtraInput\): Bias: expected 1 features"),
    "sum": (lambda: [ops.GELU(), ops.AddExtraInput()], ((1, H),), r"1 \(AddExtraInput\): the input is \(8, 32\) and the extra"),
    "added into": (lambda: [ops.Linear(H, H), ops.AddExtraInput(in_place=True)], ((2, M // 2, H),),
        r"0 \(Linear\), .*1 \(AddExtraInput\): AddExtraInput: the input is \(8, 32\) and the extra input \(2, 4, 32\)"),
    "added into, features": (lambda: [ops.Linear(H, 2 * H), ops.AddExtraInput(in_place=True)], ((M, H),),
        r"0 \(Linear\), .*1 \(AddExtraInput\): AddExtraInput: the input is \(8, 64\) and the extra input \(8, 32\)"),
    "norm": (lambda: [ops.GELU(), ops.RMSNorm(1)], (), r"1 \(RMSNorm\): expected 1 features; got 32"),
}  # fmt: skip


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
@pytest.mark.parametrize("kind", MISMATCHED)
def test_shapes_that_do_not_fit_are_refused_by_the_op(kind: str, watched: bool):
    """A single feature or token is not broadcast to many; fused ops refuse as basic ops do."""
    make, extras, said = MISMATCHED[kind]
    if watched:
        said = r"\d \(.*(gate is|gate and up of one shape|expected 1 features|the input is)"
    model, given = ops.Sequential(*make()), [values(1, *shape) for shape in extras]
    with Watched() if watched else nullcontext(), torch.no_grad(), pytest.raises(ValueError, match="^" + said):
        model(values(0), *given)


@pytest.mark.parametrize(
    ("place", "name", "op"),
    [
        (0, "weight", r"0 \(RMSNorm\)"), (1, "bias_1", r"1 \(Linear: Bias\)"),
        (1, "weight_1", r"1 \(Linear\)"), (2, "weight", r"2 \(LayerNorm\)"),
        (2, "bias", r"2 \(LayerNorm\)"), (3, "bias", r"3 \(Bias\)"),
    ],
)  # fmt: skip
def test_a_parameter_that_was_set_to_none_is_named(place: int, name: str, op: str):
    model = ops.Sequential(ops.RMSNorm(H), ops.Linear(H, (H, H)), ops.LayerNorm(H), ops.Bias(H))
    setattr(model[place], name, None)
    with refuses(rf"^{op}: {name} was set to None .*: restore the parameter; .* with bias=False"):
        model(values(0))


def test_keywords_that_no_op_reads_are_refused():
    for op in (ops.GELU(), ops.Linear(H, H), ops.AddExtraInput()):
        with refuses(rf"op 0 \({type(op).__name__}\): the op takes no keywords; got recipe, scale", TypeError):
            op(*[values(0)] * (1 + op.basic_extra_inputs), recipe="bf16", scale=2)
    both = ops.OperationFuser([ops.GELU(), ops.ReLU()])
    with refuses(r"basic_op_kwargs has 1 entries; expected one entry for each of op 0 \(GELU\), op 1 \(ReLU\)"):
        both(values(0), basic_op_kwargs=[{}])
    with pytest.raises(TypeError, match="enabled must be True or False; got 'mxfp8': pass a recipe by the keyword"):
        dlp.autocast("mxfp8").__enter__()  # type: ignore[arg-type]


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("op", [lambda: ops.Linear(H, H), lambda: ops.RMSNorm(H)], ids=["linear", "norm"])
def test_an_op_whose_weight_is_computed_is_refused(op: Any):
    model = ops.Sequential(op(), ops.GELU())
    model(values(0))
    parametrize.register_parametrization(model[0], "weight", Double())
    with pytest.raises(ValueError, match="parametrize"):
        model(values(0))


@pytest.mark.parametrize("kind", [ops.RMSNorm, ops.LayerNorm])
@pytest.mark.parametrize("called", [False, True])
def test_a_pruned_norm_is_refused(kind: Any, called: bool):
    """The mask of `prune` is outside of the op, so that the gradient would lack the mask."""
    norm = kind(H)
    if called:
        norm(values(0))
    prune.random_unstructured(norm, "weight", 0.5)
    with refuses(rf"{kind.__name__}: weight is no longer a parameter of the op .*: use a module of torch"):
        norm(values(0))


# Derivatives


@pytest.mark.parametrize("make", [lambda: ops.Sequential(ops.RMSNorm(H), ops.Linear(H, H)), lambda: dlp.Linear(H, H)])
def test_a_penalty_on_a_gradient_is_refused(make: Any):
    """A second derivative is refused, because dx would be a constant in the graph, and the penalty on dx would have
    no effect. The loss also has the term y.sum(), with which backward would otherwise run without an error."""
    model, x = make(), values(0).requires_grad_()
    y = model(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (y.sum() + dx.square().sum()).backward()


@pytest.mark.parametrize("make", [lambda: ops.Sequential(ops.RMSNorm(H), ops.Linear(H, H)), lambda: dlp.Linear(H, H)])
def test_transforms_of_functions_are_refused(make: Any):
    model = make()
    for transformed in (torch.func.vmap(model), torch.func.grad(lambda x: model(x).sum())):
        with pytest.raises(RuntimeError, match="transforms of torch.func"):
            transformed(values(0, 2, M, H))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_sibling_that_nobody_used_gets_no_gradient(bias: bool, recipe: str):
    """An unused sibling has gradient None, like an unused torch linear, so that an optimizer skips its weight. With a zero
    gradient the optimizer would decay the weight."""
    norm, linear = ops.RMSNorm(H), ops.Linear(H, (H, H, H), bias=bias, recipe=recipe)
    model, x = ops.Sequential(norm, linear, ops.Identity()), values(0).requires_grad_()
    model(x)[1].square().sum().backward()
    alone = ops.Linear(H, H, bias=bias, recipe=recipe)
    alone.load_state_dict({name.removesuffix("_1"): p for name, p in linear.state_dict().items() if name.endswith("1")})
    other = values(0).requires_grad_()
    ops.Sequential(copy.deepcopy(norm), alone)(other).square().sum().backward()
    assert_bit_equal(x.grad, other.grad)  # type: ignore[arg-type]
    found = {name: p.grad for name, p in linear.named_parameters() if p.grad is not None}
    assert list(found) == ["weight_1", "bias_1"][: 1 + bias]
    for name, grad in found.items():
        assert_bit_equal(grad, alone.get_parameter(name.removesuffix("_1")).grad)  # type: ignore[arg-type]


# Modules with the names of Transformer Engine


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ops.LayerNormLinear(H, H, parallel_mode="colum"), "parallel_mode must be one of .*; got 'colum'"),
        (lambda: ops.LayerNormLinear(H, H, sequence_parallel=True), "have no effect without a mode: set parallel_mode"),
        (lambda: ops.LayerNormMLP(H, H, tp_group=object()), "have no effect without a mode"),
        (lambda: ops.TransformerLayer(H, H, 4, sequence_parallel=True), "or set_parallel_mode=True"),
        (lambda: ops.TransformerLayer(H, H, 3), "3 heads do not divide hidden_size 32.* set kv_channels"),
        (lambda: ops.TransformerLayer(H, H, 4, 0), "0 groups of k and v must divide 4 heads"),
    ],
)
def test_options_that_would_do_nothing_are_refused(make: Any, said: str):
    with pytest.raises(ValueError, match=said):
        make()


def test_an_option_of_another_place_is_refused():
    """Positional arguments are refused where TE has another order. Options of an inner layer are refused if the outer
    layer does not have them."""
    with pytest.raises(TypeError, match="positional"):
        ops.LayerNormMLP(H, H, 1e-5, True)  # type: ignore[misc]
    for name in ("return_bias", "eps", "parallel_mode", "causal"):
        with pytest.raises(TypeError, match=f"unknown option {name}; there are"):
            ops.TransformerLayer(H, H, 4, **{name: True})


def test_the_options_of_a_layer_reach_both_norms_and_heads_their_size():
    torch.manual_seed(0)
    layer = ops.TransformerLayer(H, H, 3, kv_channels=8, zero_centered_gamma=True, normalization="RMSNorm")
    assert [layer.qkv[0].zero_centered_gamma, layer.mlp[0].zero_centered_gamma] == [True, True]
    x = values(0, 2, 4, H)
    y = layer(x)
    assert_bit_equal(layer(x.flatten(0, 1), batch=2), y.flatten(0, 1))
    cos = sin = torch.ones(4, 8)
    for given, said in (
        ({"batch": 2}, "tokens .* with batch=B"),
        (
            {"rotary_pos_emb": torch.ones(3, 1, 1, 8)},
            r"cos and sin, each \[S, head\] = \[4, 8\], .*; got \[3, 1, 1, 8\]",
        ),
        ({"rotary_pos_emb": (cos[:3], sin[:3])}, r"got \[3, 8\], \[3, 8\]"),
    ):
        with pytest.raises(ValueError, match=said):
            layer(x, **given)
    with pytest.raises(ValueError, match="8 tokens are not 3 sequences"):
        layer(x.flatten(0, 1), batch=3)
    with pytest.raises(ValueError, match=r"shape \(8, 32\) and batch None"):
        layer(x.flatten(0, 1))


# Writing to outputs


OUTPUTS = {
    "norm": lambda: ops.Sequential(ops.RMSNorm(H)),
    "activation": lambda: ops.GELU(),
    "gate": lambda: ops.SwiGLU(),
    "linear": lambda: ops.Linear(H, H),
    "siblings": lambda: ops.Sequential(ops.Linear(H, (H, H))),
    "two": lambda: ops.Sequential(ops.RMSNorm(H), ops.MakeExtraOutput(), ops.ConstantScale(2.0)),
    "layer": lambda: dlp.Linear(H, H),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("shape", [(M, H), (2, M, H)], ids=["tokens", "sequences"])
def test_outputs_can_be_changed_in_place(kind: str, shape: tuple[int, ...]):
    """An in-place operation on an output, such as y *= 2, gives the results and gradients of an out-of-place
    operation."""
    model, x = OUTPUTS[kind](), values(0, *shape).requires_grad_()
    found = []
    for in_place in (False, True):
        ys = model(x)
        ys = list(ys) if isinstance(ys, tuple) else [ys]
        ys = [y.mul_(2) if in_place else 2 * y for y in ys]
        found.append([*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *model.parameters()])])
    for one, other in zip(*found, strict=True):
        assert_bit_equal(one, other)


@pytest.mark.parametrize("shape", [(M, H), (2, M, H)], ids=["tokens", "sequences"])
def test_a_sum_goes_into_the_extra_output_of_another_sequence(shape: tuple[int, ...]):
    """The sum is written into the extra output, because no op saves the extra output: the linear that reads it saves codes."""
    norm, linears = ops.RMSNorm(H), [ops.Linear(H, H, recipe="fp8_current") for _ in range(2)]
    x, found = values(0, *shape).requires_grad_(), []
    for in_place in (False, True):
        first = ops.Sequential(norm, ops.MakeExtraOutput(), linears[0])
        second = ops.Sequential(linears[1], ops.AddExtraInput(in_place=in_place))
        y, residual = first(x)
        y = second(y, residual)
        assert (y.data_ptr() == residual.data_ptr()) == in_place
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *first.parameters(), *second.parameters()])])
    for one, other in zip(*found, strict=True):
        assert_bit_equal(one, other)


@pytest.mark.parametrize("kind", ["norm", "activation", "gate", "linear"])
def test_an_input_that_was_written_to_is_named_as_by_torch(kind: str):
    """Inputs of three dimensions are saved as matrices, that is, as views made under no_grad."""
    x = 1 * values(0, 2, M, H).requires_grad_()
    y = OUTPUTS[kind]()(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", ["bias", "reshape"])
def test_two_leaves_do_not_share_a_gradient(kind: str):
    """A second backward adds to each `grad`. dy of both leaves is one tensor, and the first op passes a view of dy on."""
    shape = 2, M, H
    first = [ops.Bias(H)] if kind == "bias" else [ops.Reshape((2 * M, H)), ops.Reshape(shape)]
    model, leaves = ops.Sequential(*first, ops.AddExtraInput()), [values(i, *shape).requires_grad_() for i in range(2)]
    for _ in range(2):
        model(*leaves).square().sum().backward()
    for leaf in leaves:
        assert_close(leaf.grad, 4 * sum(leaves).detach(), 1e-6)


def test_two_outputs_in_one_place_are_not_written_to():
    y, extra = ops.Sequential(ops.RMSNorm(H), ops.MakeExtraOutput())(values(0).requires_grad_())
    for output in (y, extra):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            output.mul_(2)


def test_nothing_is_written_to_codes():
    """An in-place write to a quantized tensor (`ops.Handed`) is refused, because it would change only a decoded
    copy."""
    handed = ops.Sequential(ops.Quantize(recipe="fp8_current"))(values(0))
    before = handed.tensor()
    for write in (
        lambda: handed.mul_(2),
        lambda: handed.__setitem__(0, 1.0),
        lambda: torch.add(before, 1, out=handed),
        lambda: handed.copy_(before),
    ):
        with pytest.raises(TypeError, match="a Handed is read-only"):
            write()
    assert_bit_equal(copy.deepcopy(handed).tensor(), before)
    assert_bit_equal(before.add_(handed), 2 * handed.tensor())


# Compiled


def test_shapes_that_change_are_one_graph():
    """With dynamic=True one graph serves all shapes, although torch then also treats numbers in a module, such as eps,
    as variables."""
    model = ops.Sequential(ops.RMSNorm(H, eps=1e-3), ops.Linear(H, H))
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for tokens in (3, 8):
        assert_close(compiled(values(0, tokens, H)), model(values(0, tokens, H)), 1e-2)
    model[0].eps = 0.5
    assert_close(compiled(values(0)), model(values(0)), 1e-2)
