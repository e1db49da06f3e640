"""GEMMs and sums of an invariant linear, which are bitwise equal on every mesh (`dlp.kernels.canonical`).

The dimension of a sum is divided into fixed segments, whose sums are added in fp32 by a binary tree:

    fprop, dgrad   if tp shards the contraction dimension, each rank adds its segments; the fp32 sums of the ranks are sent,
                   added by the upper part of the tree, and rounded once
    wgrad, db      sums over tokens; if tp shards the tokens, the sums of the ranks are added within backward, not at its end

The products of siblings are added segment by segment, so that the order of additions does not depend on the shards of tp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.comm import collectives
from dlp.comm.collectives import AS_IT_IS, Own, Parts, ReduceCodec
from dlp.kernels import canonical
from dlp.kernels import segments as fixed_order
from dlp.kernels.ops import Summed, rounded, sum_by_tree
from dlp.kernels.segments import Factored
from dlp.parallel.linear.plan import Reduction
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.overlap import Gather
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import QuantizedTensor

RANKS = (1, 2, 4, 8)  # sizes of a mesh axis for which the segments of each rank are a subtree


def _total(parts: Parts, dtype: torch.dtype, own: Own | None = None) -> Tensor:
    assert own is None, "contributions through mapped memory are not added by the tree"
    return sum_by_tree(parts[0].contiguous(), dtype)


TREE = ReduceCodec(AS_IT_IS.pack, _total, AS_IT_IS.kinds)  # fp32 contributions, added by the tree over ranks


def all_reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum of the fp32 tensors x of all ranks of `group`, added by the tree; `group` None: return x."""
    return x if group is None else collectives.all_reduce(x, group, TREE).wait()


def token_gemm(
    spec: LinearSpec, reduce: Reduction | None, operands: Sequence[QuantizedTensor | Gather | None], gemms: Sequence[Gemm],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `dlp.parallel.linear.functional.token_gemm` in the canonical order. Raises ValueError for a GEMM that accumulates
    or has an alpha other than 1."""
    ranks, pairs = 1 if reduce is None else spec.tp, []
    for a, gemm in zip(operands, gemms, strict=True):
        assert a is not None, "this orientation was not requested"
        if gemm.accumulate is not None or gemm.alpha != 1.0:
            raise ValueError(
                f"{spec.name}: invariant = true: fused operations accumulate into a GEMM in another order; use plain modules"
            )
        pairs.append((a if isinstance(a, QuantizedTensor) else a.whole(), gemm.b))
    segments = min(canonical.segments_on_rank(a.shape[1], ranks) for a, _ in pairs)
    if reduce is None:
        return _products(pairs, segments, dtype)
    total = _products(pairs, segments, torch.float32)
    assert spec.group is not None
    if reduce.how == "all":
        return rounded(all_reduce(total, spec.group), dtype)
    return rounded(collectives.reduce_scatter(total, spec.group, TREE).wait(), dtype)


def contract_gemm(
    spec: LinearSpec, dy: QuantizedTensor, x: QuantizedTensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Compute dw [N, K] = dy.T @ x, summed over tp if dy and x have only the tokens of this rank.

    dy, x          columnwise operands [N, M] and [K, M], which may be padded
    shape, dtype   shape and dtype of the weight
    """
    partial = spec.style.partial_weight_grad
    segments = canonical.segments_on_rank(dy.shape[1], spec.tp if partial else 1)
    dw = _products([(dy, x)], segments, torch.float32)[: shape[0], : shape[1]].contiguous()
    return rounded(all_reduce(dw, spec.group if partial else None), dtype)


def token_sums(spec: LinearSpec, dy: Summed) -> Tensor:
    """Compute db [N] in fp32, the sum of dy [M, N] over tokens, summed over tp if tp shards the rows of dy."""
    partial = spec.style.partial_bias_grad
    db = canonical.row_sums(dy.matrix, canonical.segments_on_rank(len(dy.matrix), spec.tp if partial else 1))
    return all_reduce(db, spec.group if partial else None)


def _products(
    pairs: Sequence[tuple[QuantizedTensor, QuantizedTensor]], segments: int, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Return the sum [rows, cols] of a @ b.T over all pairs (a, b), in canonical order, rounded once to `dtype`. The GEMMs
    run on tensor cores if `fixed_order.takes` accepts the operands; otherwise the operands are decoded, rounded and
    multiplied in fp64 (`canonical.products`)."""
    factored = [(_factored(a), _factored(b)) for a, b in pairs]
    if fixed_order.takes(factored, segments):
        return fixed_order.products(factored, segments, dtype)
    exact = [(a.dequantize(torch.float32), b.dequantize(torch.float32)) for a, b in pairs]
    return rounded(canonical.products(exact, segments), dtype)


def _factored(operand: QuantizedTensor) -> Factored:
    """Split an operand into values that bf16 represents exactly, and scales, if the operand is on a GPU and its format allows
    this; else return the payload alone."""
    payload, known = operand.payload, operand.format
    if not payload.is_cuda or known.keeps_source or known.factors is None:
        return Factored(payload)
    return Factored(*known.factored(operand))
