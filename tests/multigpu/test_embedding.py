"""Vocabulary-parallel embedding and cross entropy compared with torch on the full vocabulary.

The tests run on 1, 2 and 4 ranks. Every rank builds the full tensors from seeds, and compares its shard of the
vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dlp
from dlp.kernels.reference.loss import CHUNK
from dlp.parallel.model.embedding import IGNORED, VocabParallelEmbedding
from dlp.parallel.weight.local import place
from tests import pool as worker
from tests.metrics import assert_bit_equal, assert_close, relative_error
from tests.observe import LargestTensor
from tests.refusals import may_raise

VOCABULARY, HIDDEN = 32, 8
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 4e-3}


class Loss(NamedTuple):
    """The loss and the loss of torch; the relative error of this rank's shard of the gradient [tokens, vocabulary], compared
    with torch, and the dtype of this shard."""

    value: float
    expected: float
    gradient_error: float
    gradient_dtype: torch.dtype


def logits_and_targets(tokens: int, dtype: torch.dtype, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Logits far from zero, so that a missing subtraction of the maximum overflows. Every fourth target is ignored."""
    generator = torch.Generator().manual_seed(tokens)
    logits = (torch.randn(tokens, vocabulary, generator=generator) * 4 + 100).to(worker.device(), dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(worker.device())
    targets[::4] = IGNORED
    return logits, targets


def columns_of_rank(full: Tensor) -> Tensor:
    return full.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def cross_entropy(tokens: int, dtype: torch.dtype, z_loss: float = 0.0) -> Loss:
    logits, targets = logits_and_targets(tokens, dtype)
    whole, mine = logits.float().clone().requires_grad_(), columns_of_rank(logits).clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, ignore_index=IGNORED, reduction="sum")
    expected = expected + z_loss * whole.logsumexp(1)[targets != IGNORED].square().sum()
    loss = dlp.cross_entropy(mine, targets, dist.group.WORLD, z_loss=z_loss)
    (expected / 7).backward()
    (loss / 7).backward()
    assert mine.grad is not None and whole.grad is not None and loss.dtype == torch.float32
    return Loss(loss.item(), expected.item(), relative_error(mine.grad, columns_of_rank(whole.grad)), mine.grad.dtype)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 37, 2 * CHUNK + 5])
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_cross_entropy_equals_torch(ranks, world, tokens, dtype):
    results = ranks(world).run(cross_entropy, tokens, dtype)
    for result in results:
        assert result.value == pytest.approx(result.expected, rel=2e-6, abs=1e-6)
        assert result.gradient_error <= ROUNDING[dtype]
        assert result.gradient_dtype == dtype
    assert len({result.value for result in results}) == 1, "tp ranks disagree about the loss"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_z_loss_keeps_logits_from_drifting(ranks, world, dtype):
    for result in ranks(world).run(cross_entropy, 37, dtype, 1e-3):
        assert result.value == pytest.approx(result.expected, rel=2e-6)
        assert result.gradient_error <= 2 * ROUNDING[dtype]  # both results round the gradient, one of them twice
        assert result.gradient_dtype == dtype


def compiled() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, targets = logits_and_targets(37, torch.float32)
    eager, traced = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    losses = (
        dlp.cross_entropy(eager, targets),
        torch.compile(dlp.cross_entropy, fullgraph=True, backend="aot_eager")(traced, targets),
    )
    for loss in losses:
        loss.backward()
    assert eager.grad is not None and traced.grad is not None
    return *losses, eager.grad, traced.grad


@pytest.mark.ranks(1)
def test_torch_compile_traces_cross_entropy(ranks):
    for eager, traced, gradient, traced_gradient in ranks(1).run(compiled):
        assert_close(traced, eager, 1e-6)
        assert_close(traced_gradient, gradient, 1e-6)


def without_group() -> tuple[Tensor, Tensor]:
    logits, targets = logits_and_targets(37, torch.float32)
    return dlp.cross_entropy(logits, targets), F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


@pytest.mark.ranks(1)
def test_cross_entropy_works_without_a_group(ranks):
    for loss, expected in ranks(1).run(without_group):
        assert_close(loss, expected, 1e-6)


def all_ignored() -> tuple[Tensor, Tensor]:
    logits, targets = logits_and_targets(5, torch.float32)
    mine = columns_of_rank(logits).clone().requires_grad_()
    loss = dlp.cross_entropy(mine, torch.full_like(targets, IGNORED), dist.group.WORLD)
    loss.backward()
    assert mine.grad is not None
    return loss, mine.grad


@pytest.mark.ranks(2)
def test_ignored_targets_count_for_nothing(ranks):
    for loss, gradient in ranks(2).run(all_ignored):
        assert loss.item() == 0 and not gradient.any()


def refused(function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except (IndexError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def out_of_range(token: int) -> list[str]:
    """Messages about an out-of-range token, from the cross entropy over tp, the cross entropy on one rank, and the
    embedding."""
    logits, targets = logits_and_targets(8, torch.float32)
    targets[3] = token
    tp = worker.mesh(tp=dist.get_world_size())["tp"]
    module = VocabParallelEmbedding(place(torch.zeros(VOCABULARY, HIDDEN, device=worker.device()), tp, 0), tp, False)
    with mock.patch("dlp.parallel.model.embedding._reads_at_once", lambda tokens: True):
        return [
            refused(dlp.cross_entropy, columns_of_rank(logits), targets, tp),
            refused(dlp.cross_entropy, logits, targets),
            refused(module, targets.clamp(min=min(token, 0)).view(2, 4)),
        ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("token", [-1, VOCABULARY, -101, VOCABULARY + 7])
def test_tokens_outside_of_the_vocabulary_are_refused(ranks, token):
    (over_tp, alone, embedding), other = ranks(2).run(out_of_range, token)
    said = f"IndexError: cross_entropy: {token} is out of range: targets must be in [0, 32), or ignore_index (-100)"
    assert over_tp.startswith(said) and alone == over_tp and other[0] == over_tp
    assert embedding.startswith("IndexError: embedding: -") == (token < 0)
    assert "is out of range: token ids must be in [0, 32)" in embedding


def read_late() -> tuple[list[str], list[bool]]:
    """Let the check of token ids report one call late, as on a GPU. Return the messages of the next three calls, and
    whether the results for the invalid token are NaN: the loss; row 3, and no other row, of gradient and embedding."""
    logits, targets = logits_and_targets(8, torch.float32)
    group, mine = dist.group.WORLD, columns_of_rank(logits).requires_grad_()
    tp = worker.mesh(tp=dist.get_world_size())["tp"]
    module = VocabParallelEmbedding(place(torch.ones(VOCABULARY, HIDDEN, device=worker.device()), tp, 0), tp, False)
    bad = targets.clone()
    bad[3] = VOCABULARY
    with mock.patch("dlp.parallel.model.embedding._reads_at_once", lambda tokens: False):
        loss = dlp.cross_entropy(mine, bad, group)
        loss.backward()
        rows = module(bad.clamp(min=0)).isnan().all(-1)
        late = [refused(dlp.cross_entropy, mine, targets, group), refused(module, targets.clamp(min=0))]
        again = refused(dlp.cross_entropy, mine, targets, group)
    assert mine.grad is not None
    gradient = mine.grad.isnan().all(-1).tolist()
    return [*late, again], [bool(loss.isnan()), gradient == rows.tolist() == [i == 3 for i in range(8)]]


@pytest.mark.ranks(2)
def test_a_gpu_refuses_them_one_call_late(ranks):
    for (loss, embedding, again), nan in ranks(2).run(read_late):
        assert loss.startswith("IndexError: cross_entropy: 32 is out of range in the previous call: targets must be in")
        assert embedding.startswith(
            "IndexError: embedding: 32 is out of range in the previous call: token ids must be in"
        )
        assert again == "no error" and all(nan)


def ignored_rows(z_loss: float) -> tuple[float, float, Tensor, Tensor]:
    """Return the loss with NaN and Inf logits in ignored rows, the loss of torch on the other rows alone, and this rank's
    shards of both gradients."""
    logits, targets = logits_and_targets(9, torch.float32)
    targets[targets == IGNORED] = 7
    logits[targets == 7] = torch.nan
    logits[targets == 7, 0] = torch.inf
    kept = targets != 7
    whole, mine = logits[kept].clone().requires_grad_(), columns_of_rank(logits).clone().requires_grad_()
    expected = F.cross_entropy(whole, targets[kept], reduction="sum") + z_loss * whole.logsumexp(1).square().sum()
    loss = dlp.cross_entropy(mine, targets, dist.group.WORLD, ignore_index=7, z_loss=z_loss)
    expected.backward()
    loss.backward()
    assert whole.grad is not None and mine.grad is not None
    gradient = torch.zeros_like(logits)
    gradient[kept] = whole.grad
    return loss.item(), expected.item(), mine.grad, columns_of_rank(gradient)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_logits_of_ignored_rows_may_be_anything(ranks, z_loss):
    for loss, expected, gradient, expected_gradient in ranks(2).run(ignored_rows, z_loss):
        assert loss == pytest.approx(expected, rel=2e-6)
        assert_close(gradient, expected_gradient, 1e-5)


def other_rows_are_nan() -> Tensor:
    """Return the output of an embedding with a NaN in row 0 of this rank's shard, which no token reads."""
    tp = worker.mesh(tp=2)["tp"]
    weight = torch.ones(VOCABULARY, HIDDEN, device=worker.device())
    weight[:: VOCABULARY // 2] = torch.nan
    return VocabParallelEmbedding(place(weight, tp, 0), tp, False)(torch.arange(1, 9, device=worker.device())[None])


@pytest.mark.ranks(2)
def test_a_row_that_no_token_reads_may_be_nan(ranks):
    for rows in ranks(2).run(other_rows_are_nan):
        assert torch.equal(rows, torch.ones_like(rows))


def wrong_dtype() -> str:
    logits, targets = logits_and_targets(8, torch.float32)
    return refused(dlp.cross_entropy, logits, targets.float())


@pytest.mark.ranks(1)
def test_cross_entropy_wants_token_numbers(ranks):
    assert "targets are token numbers, int64; got torch.float32" in ranks(1).run(wrong_dtype)[0]


def wrong_length() -> str:
    logits, targets = logits_and_targets(8, torch.float32)
    return may_raise(ValueError, dlp.cross_entropy, logits[:4], targets)


@pytest.mark.ranks(1)
def test_cross_entropy_wants_a_target_for_each_row(ranks):
    assert ranks(1).run(wrong_length) == ["cross_entropy: 4 rows of logits, but 8 targets"]


def largest_fp32(tokens: int, vocabulary: int) -> int:
    logits, targets = logits_and_targets(tokens, torch.bfloat16, vocabulary)
    mine = columns_of_rank(logits).clone().requires_grad_()
    with LargestTensor(torch.float32) as seen:
        dlp.cross_entropy(mine, targets, dist.group.WORLD).backward()
    return seen.numel


@pytest.mark.ranks(2)
def test_fp32_logits_exist_for_a_chunk_only(ranks, device_type):
    tokens, vocabulary = 3 * CHUNK, 64
    of_both_ranks = 2 * 2 * tokens  # the kernel stores two numbers per row
    largest = CHUNK * vocabulary // 2 if device_type == "cpu" else of_both_ranks
    assert ranks(2).run(largest_fp32, tokens, vocabulary) == [largest] * 2


class Embedded(NamedTuple):
    """Output and weight gradient of the vocabulary-parallel embedding on this rank, and the corresponding rows of torch's
    output and gradient."""

    y: Tensor
    expected_y: Tensor
    dw: Tensor
    expected_dw: Tensor


def embed(sequence_parallel: bool, dtype: torch.dtype) -> Embedded:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(worker.device(), dtype)
    tokens = torch.randint(0, VOCABULARY, (4, 50), generator=generator).to(worker.device())
    dy = torch.randn(4, 50, HIDDEN, generator=generator).to(worker.device(), dtype)
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = nn.Parameter(weight.float())
    expected = F.embedding(tokens, whole)
    expected.backward(dy.float())
    tp = worker.mesh(tp=world)["tp"]
    module = VocabParallelEmbedding(place(nn.Parameter(weight), tp, 0), tp, sequence_parallel)
    y = module(tokens)
    rows = (lambda t: t.reshape(-1, HIDDEN).chunk(world)[rank]) if sequence_parallel else (lambda t: t)
    y.backward(rows(dy))
    assert whole.grad is not None and module.weight.grad is not None
    return Embedded(y, rows(expected).to(dtype), module.weight.grad._local_tensor, whole.grad.chunk(world)[rank])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_embedding_equals_torch(ranks, world, sequence_parallel, dtype):
    for result in ranks(world).run(embed, sequence_parallel, dtype):
        assert_bit_equal(result.y, result.expected_y, "y")
        assert result.dw.dtype == dtype
        assert_close(result.dw, result.expected_dw, ROUNDING[dtype], "dw")


def repeated_token() -> Tensor:
    tp = worker.mesh(tp=dist.get_world_size())["tp"]
    weight = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device=worker.device())
    module = VocabParallelEmbedding(place(nn.Parameter(weight), tp, 0), tp, False)
    module(torch.zeros(1, 1000, dtype=torch.int64, device=worker.device())).sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad.full_tensor()[0]


@pytest.mark.ranks(2)
def test_gradients_of_a_repeated_token_are_summed_in_fp32(ranks):
    """A bf16 sum of ones would stop at 256."""
    for gradient in ranks(2).run(repeated_token):
        assert gradient.tolist() == [1000.0] * HIDDEN


def uneven_tokens() -> str:
    tp = worker.mesh(tp=2)["tp"]
    module = VocabParallelEmbedding(place(torch.zeros(VOCABULARY, HIDDEN), tp, 0), tp, True)
    return may_raise(ValueError, module, torch.zeros(3, 5, dtype=torch.int64, device=worker.device()))


@pytest.mark.ranks(2)
def test_uneven_tokens_are_refused(ranks):
    for message in ranks(2).run(uneven_tokens):
        assert "2" in message and "15" in message
