"""Attention: packed rows against separate documents, attention by head, and the choice of the attention backend."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import _cur_sdpa_kernel_backends

from launch.config.run_config import load
from launch.config.sections import Train
from launch.models.attention import ORDERS, Documents, attend, attend_by_head, mask
from launch.models.initial_weights import init_weights
from launch.models.modules import Llama
from launch.models.settings import Model
from launch.settings.schema import ConfigError
from launch.training.attention_backend import choose

SHAPE = Model(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=64)
# Lengths of the documents in three rows. The last row has five documents, of which one begins at the second token.
LENGTHS = (
    (7, 1, 4),
    (12,),
    (1, 1, 2, 3, 5),
)


def documents(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Documents:
    flat = [length for row in lengths for length in row]
    positions = torch.cat([torch.arange(length) for length in flat]).view(len(lengths), -1)
    return Documents(positions, torch.tensor([0, *flat]).cumsum(0).to(torch.int32))


def test_a_packed_row_gives_what_its_documents_give_alone() -> None:
    model = Llama(SHAPE, torch.float32)
    init_weights(model, 0)
    tokens = torch.randint(64, (3, 12), generator=torch.Generator().manual_seed(0))
    packed = model(tokens, documents()).unflatten(0, (3, 12))
    assert not torch.allclose(packed, model(tokens).unflatten(0, (3, 12)), atol=1e-4), "documents have no effect"
    for row, lengths in enumerate(LENGTHS):
        for alone, together in zip(tokens[row].split(lengths), packed[row].split(lengths), strict=True):
            torch.testing.assert_close(model(alone.unsqueeze(0)), together, atol=1e-5, rtol=1e-5)


def test_gradients_do_not_cross_documents() -> None:
    q, k, v = (torch.randn(1, heads, 12, 8, requires_grad=True) for heads in (4, 2, 2))
    attend(q, k, v, documents(((7, 5),)))[..., 7:, :].sum().backward()
    for each in (q, k, v):
        assert each.grad is not None
        assert not each.grad[..., :7, :].any() and each.grad[..., 7:, :].any()


def test_a_mask_of_one_document_is_the_causal_one() -> None:
    assert torch.equal(mask(torch.arange(5).unsqueeze(0))[0, 0], torch.ones(5, 5, dtype=torch.bool).tril())


def test_a_cuda_graph_refuses_documents() -> None:
    with pytest.raises(
        ConfigError,
        match=r"cuda_graph = true: the number of documents changes with each step; set \[data\] reset_attention",
    ):
        load("tiny", ["--train.cuda_graph", "true", "--data.reset_attention", "true"])


def test_attention_by_head_is_attention_with_groups_in_place() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 8, requires_grad=True) for heads in (6, 3, 3))
    for expected, found in zip(
        (y := attend(q, k, v), *torch.autograd.grad(y.square().sum(), (q, k, v))),
        (y := attend_by_head(q, k, v, None, None), *torch.autograd.grad(y.square().sum(), (q, k, v))),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_invariant_runs_name_the_backend_that_they_need() -> None:
    assert choose(train(invariant=True), 128, False, "sm_90").by_head
    assert not choose(train(invariant=True), 128, False, "cpu").by_head
    with pytest.raises(ValueError, match=r'expected attention = "flash".*backward of cudnn is not deterministic'):
        choose(train(invariant=True, attention="cudnn"), 128, False, "sm_90")


def train(**settings: Any) -> Train:
    return Train(steps=1, global_batch=1, sequence=8, lr=1e-3, **settings)


@pytest.mark.parametrize(
    ("settings", "head_dim", "documents", "kind", "backend", "reason"),
    [
        ({}, 128, False, "sm_90", "cudnn", "fastest backend in measurements"),
        ({"attention": "flash", "deterministic": True}, 128, False, "sm_90", "flash", "as set"),
        ({}, 128, False, "cpu", None, "on GPUs only"),
        ({}, 128, True, "sm_90", None, "reset_attention"),
        ({"dtype": "fp32"}, 128, False, "sm_90", None, "dtype is fp32"),
        ({"deterministic": True}, 128, False, "sm_90", None, "not deterministic"),
        ({}, 256, False, "sm_90", None, "head_dim is 256"),
    ],
)
def test_auto_takes_the_fastest_backend_that_fits(
    settings: dict[str, Any], head_dim: int, documents: bool, kind: str, backend: str | None, reason: str
) -> None:
    choice = choose(train(**settings), head_dim, documents, kind)
    assert choice.backend == backend and reason in choice.reason
    assert (backend or "chosen by torch") in choice.describe()


def test_a_named_backend_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[train\] attention: expected auto, got cudnn: backends are chosen on GPUs"):
        choose(train(attention="cudnn"), 128, False, "cpu")


@pytest.mark.parametrize("backend", list(ORDERS))
def test_a_backend_leaves_compiled_code_whole_and_settings_of_torch_as_they_were(backend: str) -> None:
    chosen: list[list[Any]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def seen(*args: Any, **kwargs: Any) -> torch.Tensor:
        chosen.append(_cur_sdpa_kernel_backends(True)[: len(ORDERS[backend])])
        return sdpa(*args, **kwargs)

    before = _cur_sdpa_kernel_backends(True)
    q, k, v = (torch.randn(1, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", seen):
        expected = attend(q, k, v, backend=backend)
    assert chosen == [ORDERS[backend]] and _cur_sdpa_kernel_backends(True) == before
    compiled = torch.compile(lambda *qkv: attend(*qkv, backend=backend), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected) and _cur_sdpa_kernel_backends(True) == before
