"""Attention on a GPU, compared with torch in fp32: torch's kernel for variable lengths with a mask of documents, and each
backend, eager and compiled, with causal attention of grouped heads."""

from __future__ import annotations

import pytest
import torch

from launch.models.attention import ORDERS, attend, mask
from tests.metrics import assert_close
from tests.test_attention import documents

pytestmark = pytest.mark.usefixtures("device")

LENGTHS = ((7, 1, 120), (128,), (64, 63, 1), (1,) * 128)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_lengths_give_what_the_mask_gives(kv_heads: int) -> None:
    torch.manual_seed(0)
    where = type(documents())(*(each.cuda() for each in documents(LENGTHS)))
    inputs = [torch.randn(4, heads, 128, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, kv_heads, kv_heads)]
    dy = torch.randn(4, 8, 128, 64, device="cuda", dtype=torch.bfloat16)
    found, expected = (
        [each.clone().requires_grad_() for each in inputs],
        [each.float().requires_grad_() for each in inputs],
    )
    out = attend(*found, where)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *expected, attn_mask=mask(where.positions), enable_gqa=True
    )
    out.backward(dy)
    exact.backward(dy.float())
    assert_close(out.float(), exact, at_most=1e-2)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert_close(mine.grad.float(), theirs.grad, at_most=2e-2)


@pytest.mark.parametrize("backend", list(ORDERS))
def test_a_backend_gives_what_plain_torch_gives_with_grouped_heads_and_compiled(backend: str) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, 256, heads, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for heads in (8, 2, 2)
    ]
    dy = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
    exact = [each.float().requires_grad_() for each in inputs]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    expected.backward(dy.float())
    compiled = torch.compile(lambda *qkv: attend(*qkv, backend=backend), fullgraph=True)
    for run in (lambda *qkv: attend(*qkv, backend=backend), compiled):
        found = [each.detach().requires_grad_() for each in inputs]
        y = run(*found)
        y.backward(dy)
        assert_close(y.float(), expected, at_most=1e-2)
        for mine, theirs in zip(found, exact, strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert_close(mine.grad.float(), theirs.grad, at_most=2e-2)
