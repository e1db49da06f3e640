"""Canonical sums.

The bits of a result do not depend on the other rows and columns, on the number of ranks that share the segments, or on
the kernel that adds. Results are as accurate as fp32 sums.
"""

from __future__ import annotations

import pytest
import torch

from dlp.kernels import canonical
from dlp.kernels.canonical import (
    CHUNK,
    pairwise,
    products,
    row_sums,
    segments_on_rank,
    square_sums,
    sums_by_index,
    tree,
)


def operands(terms: int, rows: int = 48, cols: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(terms)
    return torch.randn(rows, terms) * torch.logspace(-6, 6, rows)[:, None], torch.randn(cols, terms).exp()


@pytest.mark.parametrize("terms", [1, 2, 24, 8 * CHUNK - 8, 8 * CHUNK, 8 * CHUNK + 8])
def test_a_product_has_the_bits_of_any_part_of_it(terms, monkeypatch):
    a, b = operands(terms)
    count = segments_on_rank(terms)
    whole = products([(a, b)], count)
    sizes = a.abs().double(), b.abs().double()
    bound = sizes[0].amax(1)[:, None] * sizes[1].sum(1) + sizes[0].sum(1)[:, None] * sizes[1].amax(1)
    assert ((whole - a.double() @ b.double().t()).abs() <= 2**-21 * bound).all()
    for rows in (1, 2, 15, 16, 17):
        assert torch.equal(products([(a[:rows], b[-rows:])], count), whole[:rows, -rows:])
    monkeypatch.setattr(canonical, "ROOM", 1)
    assert torch.equal(products([(a, b)], count), whole)
    order = torch.cat([part[torch.randperm(len(part))] for part in torch.arange(terms).chunk(count)])
    if terms // count <= CHUNK:  # equal bits in every order of the terms of a segment
        assert torch.equal(products([(a[:, order], b[:, order])], count), whole)


def test_ranks_that_own_subtrees_give_the_bits_of_one():
    pairs = [operands(96), operands(64)]  # siblings
    count = min(segments_on_rank(a.shape[1]) for a, _ in pairs)
    whole = products(pairs, count)
    x = torch.randn(96, 7)
    for ranks in (2, 4, 8):
        shards = [[(a.chunk(ranks, 1)[r], b.chunk(ranks, 1)[r]) for a, b in pairs] for r in range(ranks)]
        assert torch.equal(tree([products(shard, count // ranks) for shard in shards]), whole)
        sums = [row_sums(part, segments_on_rank(96 // ranks, ranks)) for part in x.chunk(ranks)]
        assert torch.equal(tree(sums), row_sums(x, 8))
    assert torch.allclose(row_sums(x, 8), x.sum(0), atol=1e-5)
    with pytest.raises(ValueError, match="3 ranks cannot share"):
        segments_on_rank(32, 3)


@pytest.mark.parametrize("order", ["given", "reversed"])
def test_sums_of_equal_indices_have_no_order_and_no_trace_of_rows_that_do_not_count(order):
    torch.manual_seed(0)
    x = torch.randn(5000, 6) * torch.logspace(-3, 3, 6)
    index, counts = torch.randint(7, (5000,)), torch.rand(5000) < 0.7
    found = sums_by_index(x, index, counts, 7)
    exact = torch.zeros(7, 6, dtype=torch.float64).index_add_(0, index[counts], x[counts].double())
    assert ((found - exact).abs() <= 2**-24 * exact.abs() + 2**-30 * x.abs().amax(0)).all()
    places = torch.arange(5000) if order == "given" else torch.arange(5000).flip(0)
    half = index[places] < 3  # a rank that has only the rows with these indices
    other = torch.where(half, index[places], 0)
    assert torch.equal(sums_by_index(x[places], other, counts[places] & half, 3), found[:3])


def test_sums_of_pieces_that_ranks_share_nest():
    parts = list(torch.randn(12, 5).unbind())
    for ranks in (1, 2, 4):
        inner = [tree(parts[i : i + ranks]) for i in range(0, 12, ranks)]
        assert torch.equal(pairwise(inner), pairwise(parts))


def test_a_norm_is_exact_and_has_no_order():
    x = torch.randn(1000) * torch.logspace(-20, 3, 1000)
    largest = x.abs().amax()[None]
    parts = sum(square_sums([part], largest) for part in x.split(37))
    norm = canonical.norm_of(parts, largest)
    assert torch.equal(norm, canonical.norm_of(square_sums([x.flip(0)], largest), largest))
    assert torch.equal(norm, x.double().norm().float())
    assert not canonical.norm_of(parts, torch.tensor([torch.inf])).isfinite()
