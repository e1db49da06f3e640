"""What users of dlp.ops get wrong, or do otherwise than expected: right results, or an error that says the way out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlp import ops
from tests.metrics import assert_bit_equal

H, M = 32, 8


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (M, H)), generator=torch.Generator().manual_seed(seed))


# Sequences


@pytest.mark.parametrize("put", ["setattr", "modules"])
def test_a_module_that_is_put_in_the_place_of_another_runs(put: str):
    """As whoever swaps layers of a model by name does it."""
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
    """They are those of the outer one; an extra output is not taken for a sibling."""
    inner = ops.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput())
    model, x, extra = ops.Sequential(ops.Identity(), inner, ops.SwiGLU()), values(0), values(1)
    y, kept = model(x, extra)
    assert_bit_equal(kept, x + extra)
    assert_bit_equal(y, ops.SwiGLU()(x + extra))
    with pytest.raises(ValueError, match="its ops take 1 extra inputs; got 0"):
        model(x)


# In place


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
@pytest.mark.parametrize("kept", ["0 (RMSNorm)", "0 (GELU)", "0 (Linear)"])
def test_an_extra_input_that_an_op_keeps_is_not_written_to(kept: str, recipe: str):
    """x + f(x), the sum in the place of x: backward would read it as the x of f. A linear that keeps codes may."""
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
    """It would read what it has written: the sum is then an op of its own, which rounds once more."""
    model, x = ops.Sequential(ops.Linear(H, H), ops.AddExtraInput(in_place=True)), values(0).bfloat16()
    with torch.no_grad():
        once, twice = model(x, x.clone()), model[0](x) + x
        assert not torch.equal(once, twice)
        assert_bit_equal(model(x, x), twice)
