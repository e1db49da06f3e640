"""With amax_scope="all" the numbers of a layer do not depend on the sharding.

The test runs the same x, w and dy on one rank and on 2 or 4 ranks, in every style. Codes and scales must have equal
bits, also with stochastic rounding, and y, dx and dw must be within the rounding of fp32 sums of the exact product of
the decoded operands.
"""

from __future__ import annotations

from math import lcm

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dlp
from dlp.comm import collectives
from dlp.parallel.linear.modules import ColumnParallelLinear, Linear, RowParallelLinear
from dlp.quant.gemm import device_kind, support
from dlp.quant.recipe import GEMM_OPERANDS, OPERANDS, load
from dlp.quant.tensor import QuantizedTensor
from tests import pool as worker
from tests.cases import IN_STYLES, in_styles, matrix, style_id
from tests.metrics import bit_difference
from tests.recorded_casts import Seen, recording

CLASSES: dict[str, type[Linear]] = {"local": Linear, "column": ColumnParallelLinear, "row": RowParallelLinear}
RANKS = 4


def size(name: str) -> int:
    """Return a number of features and tokens with which each of 4 ranks has complete scaling blocks."""
    recipe = load(name)
    quantizers = [getattr(getattr(recipe, operand), way) for operand in OPERANDS for way in ("rowwise", "columnwise")]
    return RANKS * lcm(16, *(b or 1 for q in quantizers for b in q.format.block))


def full(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, w and dy. The magnitude of rows grows, so that shards have very different amaxes."""
    n = size(name)
    return matrix("gauss", n, n, 1), matrix("gauss", n, n, 2).t() * 0.05, matrix("gauss", n, n, 3)


def cut(whole: Tensor, dim: int | None, tp: int) -> Tensor:
    return whole if dim is None or tp == 1 else whole.chunk(tp, dim)[dist.get_rank()].contiguous()


def run(name: str, style_key: tuple[str, bool], tp: int) -> tuple[dict[str, Tensor], Seen]:
    """Run a layer twice, with a step boundary in between so that delayed scales differ from 1; return y, dx, dw and the
    operands of the second run."""
    recipe, seen = recording(load(name, amax_scope="all"))
    x, w, dy = (tensor.to(worker.device()) for tensor in full(name))
    mesh = None if tp == 1 else worker.mesh(tp=tp)["tp"]
    layer = CLASSES[style_key[0]](
        len(w), len(w), tp=mesh, sequence_parallel=style_key[1], recipe=recipe, device=worker.device()
    )
    style = layer.core.spec.style
    with torch.no_grad():
        weight = getattr(layer.weight, "_local_tensor", layer.weight)
        weight.copy_(cut(w, style.shard_dim, tp))
    results = {}
    for _ in range(2):
        for made in seen.values():
            made.clear()
        mine = cut(x, style.cut_x, tp).requires_grad_()
        y = layer(mine)
        mine.grad = layer.weight.grad = None
        y.backward(cut(dy, style.cut_dy, tp))
        dw = getattr(layer.weight.grad, "_local_tensor", layer.weight.grad)
        if style.partial_weight_grad and tp > 1:
            dist.all_reduce(dw)
        results = {"y": y.detach(), "dx": mine.grad, "dw": dw}
        dlp.end_step(layer)
    return results, seen


def joined(q: QuantizedTensor, dim: int | None) -> QuantizedTensor:
    """Concatenate the shards of an operand on all ranks along the dimension `dim`."""
    stacked = collectives.all_gather([part[None] for part in q.parts], [0] * len(q.parts), dist.group.WORLD)
    parts = []
    for part, pieces in zip(q.format.parts, stacked.wait(), strict=True):
        along = None if dim is None else part.moves_along(dim)
        if along is None:
            assert all(bit_difference(piece, pieces[0]) is None for piece in pieces), f"{part.name} differs by rank"
        parts.append(pieces[0] if along is None else torch.cat(list(pieces), along))
    return QuantizedTensor(q.format, tuple(parts))


def differences(name: str, style_key: tuple[str, bool]) -> list[str]:
    """Return the differences of the layer on all ranks from one rank: operands with other bits, results beyond the bound."""
    tp = dist.get_world_size()
    results, seen = run(name, style_key, tp)
    _, expected = run(name, ("local", False), 1)
    style = dlp.parallel.style.style(*style_key)
    found = []
    for (operand, way), made in seen.items():
        whole = expected[operand, way]
        if not whole:
            continue
        dim = style.cut(operand)
        dim = dim if dim is None or way == "rowwise" else 1 - dim
        here = joined(made[0], dim)
        for part, mine, other in zip(here.format.parts, here.parts, whole[0].parts, strict=True):
            difference = bit_difference(mine, other)
            found += [f"{operand} {way} {part.name}: {difference}"] if difference else []
    cuts = {"y": style.cut_dy, "dx": style.cut_x, "dw": style.shard_dim}
    for gemm, result in (("fprop", "y"), ("dgrad", "dx"), ("wgrad", "dw")):
        found += outside_bound(gemm, cut_exact(expected, gemm, cuts[result], tp), results[result])
    return found


def decoded(seen: Seen, operand: str, way: str) -> Tensor:
    if seen[operand, way]:
        return seen[operand, way][0].dequantize(torch.float32).double()
    return seen[operand, "rowwise"][0].dequantize(torch.float32).double().t()


def cut_exact(seen: Seen, gemm: str, dim: int | None, tp: int) -> tuple[Tensor, Tensor]:
    """Return this rank's shard of the exact product of the decoded operands, and of the error bound."""
    a_name, a_way, b_name, b_way = GEMM_OPERANDS[gemm]
    a, b = decoded(seen, a_name, a_way), decoded(seen, b_name, b_way)
    formats = [seen[name, "rowwise"][0].format for name in (a_name, b_name)]
    kernel = support(*formats, device_kind(worker.device().type)).kernel
    native_fp8 = kernel.startswith(("torch._scaled_mm", "cublaslt fp8"))
    unit = 2.0**-14 if native_fp8 else 2.0**-24  # Hopper's FP8 units keep about 14 bits of sums
    return cut(a @ b.t(), dim, tp), cut(a.shape[1] * unit * (a.abs() @ b.abs().t()), dim, tp)


def outside_bound(gemm: str, exact_and_bound: tuple[Tensor, Tensor], actual: Tensor) -> list[str]:
    exact, bound = exact_and_bound
    excess = (actual.double() - exact).abs() - bound - 2.0**-24 * exact.abs()
    beyond = int((~(excess <= 0)).sum())  # a NaN counts as beyond the bound
    return [f"{gemm}: {beyond} elements beyond the bound"] if beyond else []


def test_a_nan_is_beyond_every_bound():
    exact, bound = torch.zeros(3).double(), torch.ones(3).double()
    assert outside_bound("fprop", (exact, bound), torch.tensor([0.5, -1.0, 1.0])) == []
    for wrong in (torch.nan, torch.inf, -1.5):
        found = outside_bound("fprop", (exact, bound), torch.tensor([0.5, wrong, 1.0]))
        assert found == ["fprop: 1 elements beyond the bound"]


@pytest.mark.parametrize(("world", "name", "style_key"), in_styles(IN_STYLES), ids=style_id)
def test_a_cut_layer_has_the_bits_of_the_whole_one(ranks, world, name, style_key):
    for rank, found in enumerate(ranks(world).run(differences, name, style_key)):
        assert not found, f"rank {rank}: {found}"
