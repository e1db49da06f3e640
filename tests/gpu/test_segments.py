"""Canonical sums by tensor cores: the bits of an element do not depend on the other rows, columns and segments of the
product."""

from __future__ import annotations

import pytest
import torch

from dlp.kernels import reference, segments
from dlp.kernels.segments import Factored
from tests.metrics import assert_bit_equal

SIZES = ((1, 1), (7, 9), (33, 8), (130, 257), (257, 1000))


def operands(device: str, rows: int, cols: int, terms: int) -> tuple[Factored, Factored]:
    torch.manual_seed(terms)
    scales = torch.rand(2, device=device) + 0.5
    a, b = (torch.randn(lines, terms, device=device).bfloat16() for lines in (rows, cols))
    return Factored(a, scales[0]), Factored(b, scales[1])


@pytest.mark.parametrize("terms", [64, 512, 2048, 8192])
def test_a_product_has_the_bits_of_any_part_of_it(device, terms, monkeypatch):
    (a, scale), (b, other) = operands(device, 515, 771, terms)
    whole = segments.products([(Factored(a, scale), Factored(b, other))], 8)
    exact = a.double() @ b.double().t() * scale.double() * other.double()
    assert (whole - exact).abs().max() <= 2**-13 * (a.double().norm(dim=1).max() * b.double().norm(dim=1).max()).item()
    for rows, cols in SIZES:
        part = segments.products([(Factored(a[-rows:], scale), Factored(b[:cols], other))], 8)
        assert_bit_equal(part, whole[-rows:, :cols], f"{rows} {cols}")
    for ranks in (2, 4, 8):
        mine = [
            segments.products([(Factored(x, scale), Factored(y, other))], 8 // ranks)
            for x, y in zip(a.chunk(ranks, 1), b.chunk(ranks, 1), strict=True)
        ]
        assert_bit_equal(reference.sum_by_tree(torch.stack(mine)), whole, f"{ranks} ranks")
    assert_bit_equal(
        segments.products([(Factored(a, scale), Factored(b, other))], 8, torch.bfloat16), whole.bfloat16(), "rounded"
    )
    monkeypatch.setattr(segments, "ROOM", 8 * 771 * 100)
    assert_bit_equal(segments.products([(Factored(a, scale), Factored(b, other))], 8), whole, "100 rows at a time")


def test_siblings_are_added_segment_by_segment(device):
    pairs = [operands(device, 130, 72, 512), operands(device, 130, 72, 256)]
    whole, sums = segments.products(pairs, 8), sum(segments.products([pair], 8) for pair in pairs)
    assert torch.allclose(whole, sums, rtol=1e-4, atol=1e-3) and not torch.equal(whole, sums)
    halves = [
        [tuple(Factored(x.values.chunk(2, 1)[rank], x.scale) for x in pair) for pair in pairs] for rank in range(2)
    ]
    mine = [segments.products(half, 4) for half in halves]
    assert_bit_equal(mine[0] + mine[1], whole, "two ranks")


def test_operands_that_are_not_taken(device):
    (a, scale), (b, _) = operands(device, 8, 8, 64)
    assert segments.takes([(Factored(a, scale), Factored(b))], 8)
    assert not segments.takes([(Factored(a), Factored(b))], 16)  # segments of 4 terms
    assert not segments.takes([(Factored(a.float()), Factored(b))], 8)
    assert not segments.takes([(Factored(a, scale.expand(8)), Factored(b))], 8)
