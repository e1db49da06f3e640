"""Causal attention on a GPU, where the queries belong to the last keys. Each backend is compared with masked attention in
float64. Other tests check the ops that run, compiled code and deterministic runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.runtime.causal import causal
from launch.models.attention import prefer
from tests.metrics import assert_close
from tests.test_causal import Calls

pytestmark = pytest.mark.usefixtures("device")

OPS = {
    "cudnn": ["_scaled_dot_product_cudnn_attention"] * 2 + ["_scaled_dot_product_cudnn_attention_backward"] * 2,
    "flash": ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"],
}
VALUES, GRADIENTS = 1e-2, 2e-2  # bounds of bf16


def inputs(length: int, chunks: int, size: int = 128, kv_heads: int = 2) -> list[Tensor]:
    """Return q and dy of the last chunk, and k and v of all chunks. As in `Context.attention`, all four are views: of
    tensors with more chunks (q, dy), and of a longer gathered tensor (k, v)."""
    generator = torch.Generator("cuda").manual_seed(chunks)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, dy = (made(2, 2 * length, 8, size).transpose(1, 2)[:, :, length:] for _ in range(2))
    k, v = made(2, 2, kv_heads, (chunks + 1) * length, size)[:, :, :, : chunks * length]
    return [q, k, v, dy]


def expected(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> list[Tensor]:
    leaves = [each.double().requires_grad_() for each in (q, k, v)]
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cuda").tril(k.shape[2] - q.shape[2])
    y = F.scaled_dot_product_attention(*leaves, attn_mask=seen, enable_gqa=True)
    return [y, *torch.autograd.grad(y, leaves, dy.double())]


def by(backend: str | None, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, compiled: bool = False) -> list[Tensor]:
    def attend(*qkv: Tensor) -> Tensor:
        with prefer(backend):
            return causal(*qkv)

    torch._dynamo.reset()  # torch would compile later shapes with dynamic sizes, and stop at its limit of graphs
    torch.compiler.allow_in_graph(causal)  # a `dlp.Context` of several ranks does the same
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    y = (torch.compile(attend, fullgraph=True) if compiled else attend)(*leaves)
    return [y, *torch.autograd.grad(y, leaves, dy)]


def assert_equal_up_to_rounding(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, each, at_most in zip(found, wanted, (VALUES, *[GRADIENTS] * 3), strict=True):
        assert_close(mine, each, at_most=at_most)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", list(OPS))
@pytest.mark.parametrize(
    ("length", "chunks", "size", "kv_heads"),
    [(256, 2, 128, 2), (256, 8, 128, 2), (200, 3, 64, 1), (1024, 4, 128, 8), (64, 5, 96, 4), (2, 3, 64, 2)],
)
def test_a_backend_gives_what_a_mask_gives(
    length: int, chunks: int, size: int, kv_heads: int, backend: str, compiled: bool
) -> None:
    made = inputs(length, chunks, size, kv_heads)
    assert_equal_up_to_rounding(by(backend, *made, compiled=compiled), expected(*made))


@pytest.mark.parametrize("backend", list(OPS))
def test_the_backend_of_the_square_runs(backend: str) -> None:
    with Calls() as calls:
        by(backend, *inputs(256, 3))
    assert calls.attention == OPS[backend]


@pytest.mark.parametrize("size", [12, 264])
def test_head_sizes_of_no_kernel_run_with_a_mask(size: int) -> None:
    made = inputs(128, 3, size)
    with Calls() as calls:
        found = by("cudnn", *made)
    assert not {*OPS["cudnn"], *OPS["flash"]} & {*calls.names}
    assert_equal_up_to_rounding(found, expected(*made))


def test_the_lse_of_cudnn_is_a_natural_logarithm() -> None:
    q, k, v, _ = inputs(256, 2)
    _, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    scores = q.double() @ k.double().repeat_interleave(4, 1).transpose(2, 3) / q.shape[3] ** 0.5
    assert_close(lse.reshape(q.shape[:3]), scores.logsumexp(3), at_most=1e-3)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_runs_repeat_their_bits_by_the_flash_kernel() -> None:
    made = inputs(512, 4)
    with Calls() as calls:
        first = by("cudnn", *made)
    assert calls.attention == OPS["flash"]
    for _ in range(3):
        assert all(torch.equal(mine, each) for mine, each in zip(by(None, *made), first, strict=True))
