"""A sharded linear compared with the same layer on one rank: y, dx, dw, db, for every style and recipe.

Each worker builds the unsharded LOCAL layer from the same seeds, runs the layer on the full tensors, and compares the
local shards. With `lattice` data all products and sums are exact and all scales equal, so results that are not sums
over ranks must have equal bits. With `gauss` data the difference is bounded by the error of the recipe against high
precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlp.comm import collectives
from dlp.parallel import casts
from dlp.parallel.casts import BOTH
from dlp.parallel.linear import plan
from dlp.parallel.linear import quantize as operands
from dlp.parallel.linear.modules import ColumnParallelLinear, Linear, RowParallelLinear
from dlp.quant.integers import IntScaling
from dlp.quant.recipe import Recipe, both
from tests import pool as worker
from tests.cases import (
    BY_SCALES,
    EPSILON,
    IN_STYLES,
    KINDS,
    STYLE_KEYS,
    LinearCase,
    few,
    in_styles,
    linear_cases,
    matrix,
    rounds_by_chance,
    style_id,
)
from tests.metrics import bit_difference, relative_error
from tests.observe import Collectives
from tests.refusals import may_raise

CLASSES: dict[str, type[Linear]] = {"local": Linear, "column": ColumnParallelLinear, "row": RowParallelLinear}


class Full(NamedTuple):
    """The unsharded tensors of a case."""

    x: Tensor
    ws: list[Tensor]
    bs: list[Tensor]
    dys: list[Tensor]


class Error(NamedTuple):
    """Error of one result on one rank. `equal`: whether the bits are equal; `squared`: sum of squares of the
    difference; `norm`: sum of squares of the expected result."""

    equal: bool
    squared: float
    norm: float


def make_full(case: LinearCase) -> Full:
    def made(rows: int, columns: int, seed: int, scale: float = 1.0) -> Tensor:
        return (matrix(case.data, rows, columns, seed) * scale).to(worker.device(), case.dtype)

    small = 1.0 if case.data == "lattice" else 0.125
    return Full(
        made(case.tokens, case.in_features, 1),
        [made(n, case.in_features, 10 + i, small) for i, n in enumerate(case.out_features)],
        [made(1, n, 20 + i)[0] for i, n in enumerate(case.out_features)],
        [made(case.tokens, n, 30 + i) for i, n in enumerate(case.out_features)],
    )


def cut(full: Tensor, dim: int | None, tp: int) -> Tensor:
    """Return this rank's shard of a tensor that is sharded over tp along `dim`; None: the full tensor."""
    return full if dim is None or tp == 1 else full.chunk(tp, dim)[dist.get_rank()].contiguous()


def build(case: LinearCase, tp: Any, full: Full) -> Linear:
    """Return the layer of a case (`tp` None: unsharded LOCAL) with this rank's shards of the full weights."""
    style_name, sequence_parallel = case.style_key if tp is not None else ("local", False)
    sizes = case.out_features[0] if case.siblings == 1 else case.out_features
    layer = CLASSES[style_name](
        case.in_features, sizes, case.bias, tp=tp, sequence_parallel=sequence_parallel,
        recipe=case.load(), device=worker.device(), dtype=case.dtype,
    )  # fmt: skip
    ranks, shard_dim = (1, None) if tp is None else (tp.size(), case.style.shard_dim)
    with torch.no_grad():
        for member, w, b in zip(layer.core.members, full.ws, full.bs, strict=True):
            plain(getattr(layer, member.weight)).copy_(cut(w, shard_dim, ranks))
            if case.bias:
                plain(getattr(layer, member.bias)).copy_(cut(b, 0 if shard_dim == 0 else None, ranks))
    return layer


def plain(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def run(layer: Linear, x: Tensor, dys: list[Tensor], *, recompute: bool = False) -> dict[str, Tensor]:
    """Run forward and backward; return y_i, dx, dw_i and db_i by name."""
    x = x.detach().clone().requires_grad_()
    output = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    ys = output if isinstance(output, tuple) else (output,)
    torch.autograd.backward(ys, [dy.view(y.shape) for dy, y in zip(dys, ys, strict=True)])
    assert x.grad is not None
    results = {f"y{i}": y.detach() for i, y in enumerate(ys)} | {"dx": x.grad}
    for i, member in enumerate(layer.core.members):
        for name, parameter in (("dw", member.weight), ("db", member.bias)):
            if getattr(layer, parameter) is not None:
                results[f"{name}{i}"] = plain(getattr(layer, parameter).grad)
    return results


def whole_partials(layer: Linear, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum the partial gradients of the layer over tp, as at the end of a converted model's backward."""
    names = {m.weight: f"dw{i}" for i, m in enumerate(layer.core.members)}
    names |= {m.bias: f"db{i}" for i, m in enumerate(layer.core.members)}
    for parameter in layer.tp_partial:
        if names[parameter] in results:
            total = collectives.all_reduce(results[names[parameter]].float(), dist.group.WORLD).wait()
            results[names[parameter]] = total.to(results[names[parameter]].dtype)
    return results


def dimension_cut(case: LinearCase, result: str) -> int | None:
    """Return the dimension along which y, dx, dw or db is sharded over tp; None if it is not sharded."""
    style = case.style
    cuts = {"y": style.cut_dy, "dx": style.cut_x, "dw": style.shard_dim, "db": 0 if style.shard_dim == 0 else None}
    return cuts[result.rstrip("012")]


def sharded(case: LinearCase, full: Full, **options: Any) -> dict[str, Tensor]:
    mesh = worker.mesh(tp=dist.get_world_size())["tp"]
    layer = build(case, mesh, full)
    shape = (case.batch, case.sequence, -1)
    x = cut(full.x, case.style.cut_x, mesh.size())
    x = x if case.style.cut_x == 0 else x.view(shape)
    return whole_partials(layer, run(layer, x, [cut(dy, case.style.cut_dy, mesh.size()) for dy in full.dys], **options))


def unsharded(case: LinearCase, full: Full) -> dict[str, Tensor]:
    return run(build(case, None, full), full.x.view(case.batch, case.sequence, -1), full.dys)


def by_hand(case: LinearCase, full: Full) -> dict[str, Tensor]:
    """Return the expected results in fp64, computed by plain matrix products."""
    x, ws, bs, dys = full.x.double(), *([t.double() for t in ts] for ts in full[1:])
    results = {"dx": sum((dy @ w for dy, w in zip(dys, ws, strict=True)), torch.zeros_like(x))}
    for i, (w, b, dy) in enumerate(zip(ws, bs, dys, strict=True)):
        results |= {f"y{i}": x @ w.t() + b * case.bias, f"dw{i}": dy.t() @ x, f"db{i}": dy.sum(0)}
    return results


def compare(case: LinearCase, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Error]:
    errors = {}
    for name, value in actual.items():
        whole = (
            expected[name].reshape(-1, expected[name].shape[-1]) if name[0] != "d" or name == "dx" else expected[name]
        )
        part = cut(whole, dimension_cut(case, name), dist.get_world_size()).reshape(value.shape)
        difference = value.double() - part.double()
        errors[name] = Error(
            torch.equal(value, part), difference.square().sum().item(), part.double().square().sum().item()
        )
    assert actual.keys() == expected.keys()
    return errors


def against_one_rank(cases: list[LinearCase]) -> list[tuple[dict[str, Error], dict[str, float]]]:
    """Return, for each case, the error of each result compared with the unsharded layer, and the relative error of the
    unsharded layer compared with fp64."""
    results = []
    for case in cases:
        full = make_full(case)
        expected, exact = unsharded(case, full), by_hand(case, full)
        own = {name: relative_error(value.view(exact[name].shape), exact[name]) for name, value in expected.items()}
        results.append((compare(case, sharded(case, full), expected), own))
    return results


def over_ranks(errors: list[Error]) -> float:
    """Combine the errors of all ranks to the relative Frobenius error of the full result."""
    return math.sqrt(sum(error.squared for error in errors) / sum(error.norm for error in errors))


def crosses_ranks(case: LinearCase, result: str) -> bool:
    """Return whether this result is a sum over ranks."""
    style, kind = case.style, result.rstrip("012")
    comm = {"y": style.fprop, "dx": style.dgrad, "dw": style.wgrad}
    return style.partial_bias_grad if kind == "db" else comm[kind].reduce is not None


@pytest.mark.parametrize(
    ("world", "recipe", "style_key"),
    [
        *in_styles(IN_STYLES),
        *((1, "fp8_block", key) for key in STYLE_KEYS),
        (2, "int8", ("column", True)),
        (2, "int8", ("row", True)),
    ],
    ids=style_id,
)
def test_sharded_equals_unsharded(ranks, world, recipe, style_key):
    cases = list(linear_cases(style_key, recipe))
    for case, of_ranks in zip(cases, zip(*ranks(world).run(against_one_rank, cases), strict=True), strict=True):
        for name in of_ranks[0][0]:
            errors, own = [errors[name] for errors, _ in of_ranks], of_ranks[0][1][name]
            if case.data == "lattice" and not crosses_ranks(case, name):
                assert all(error.equal for error in errors), (
                    f"{case} {name}: bits differ, error {over_ranks(errors):.2e}"
                )
            assert own <= (EPSILON[case.dtype] if recipe == "bf16" else 0.3), (
                f"{case} {name}: one rank is off by {own:.2e}"
            )
            bound = 1.6 * own + EPSILON[case.dtype]
            assert over_ranks(errors) <= bound, f"{case} {name}: {over_ranks(errors):.2e} is over {bound:.2e}"


def gathered_operands(recipe: str | Recipe, tokens: int) -> list[tuple[bool, list[str | None]]]:
    """Compare x of COLUMN_SP and dy of ROW_SP, quantized on each rank and gathered, with the quantized unsharded
    tensor. Return, for each orientation that can be gathered quantized, whether it is columnwise, and the difference of
    each part. The tokens of rank 0 are all zero, and the magnitude of other rows grows, so that the amaxes of ranks
    differ."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = worker.mesh(tp=world)["tp"]
    full = matrix("gauss", tokens, 64, 3).to(worker.device(), torch.bfloat16)
    full[: tokens // world] = 0
    found = []
    for layer, operand in ((ColumnParallelLinear, "x"), (RowParallelLinear, "dy")):
        bound = layer(64, 64, tp=mesh, sequence_parallel=True, recipe=recipe, device=worker.device()).core.bound
        (mine,) = operands.quantize(bound, operand, [cut(full, 0, world)], BOTH)
        alone, spec = Linear(64, 64, recipe=recipe, device=worker.device()).core.bound, bound.spec
        (whole,) = operands.quantize(alone, operand, [full], BOTH)
        for columnwise, (part, expected) in enumerate(zip(mine, whole, strict=True)):
            if plan.obstacle(spec.recipe, operand, bool(columnwise), tokens // world) is None:
                gathered = spec.overlap.fprop.gather(part, columnwise, spec.tp_group).whole()
                differences = [bit_difference(a, b) for a, b in zip(gathered.parts, expected.parts, strict=True)]
                found.append((bool(columnwise), differences))
    assert rank == dist.get_rank()
    return found


GATHERED = few(
    ((world, name) for name in BY_SCALES if not rounds_by_chance(name) for world in (2, 4)), (*KINDS, "mxfp8")
)
GATHERED += [
    (2, Recipe(str(ints), *[both(ints)] * 3)) for ints in (IntScaling(symmetric=False), IntScaling(4, 32, False))
]


@pytest.mark.parametrize(("world", "recipe"), GATHERED, ids=str)
def test_gathered_codes_are_the_codes_of_the_whole(ranks, world, recipe):
    for found in ranks(world).run(gathered_operands, recipe, 128 * world):
        assert len(found) == 4, "with whole blocks everything travels quantized"
        for columnwise, differences in found:
            assert not any(differences), f"columnwise={columnwise}: {differences}"


def forget_the_group(recipe: str) -> tuple[float, float]:
    """Return the errors of y compared with one rank: if ranks agree on amaxes, and if they do not."""
    case = LinearCase(("column", True), recipe, torch.bfloat16)
    full = make_full(case)
    expected = unsharded(case, full)
    right = compare(case, sharded(case, full), expected)["y0"]
    with patch.object(casts, "agrees", lambda *_, **__: False):
        wrong = compare(case, sharded(case, full), expected)["y0"]
    return math.sqrt(right.squared / right.norm), math.sqrt(wrong.squared / wrong.norm)


@pytest.mark.parametrize("world", [2, 4])
def test_a_forgotten_amax_group_is_noticed(ranks, world):
    for rank, (right, wrong) in enumerate(ranks(world).run(forget_the_group, "fp8_current")):
        assert right < 0.05
        assert wrong > 0.5, f"rank {rank}: {wrong}"


class Counts(NamedTuple):
    """Number of collectives in each pass: (all-gathers, all-to-alls, amax agreements). An all-reduce counts as an
    all-to-all and an all-gather."""

    forward: tuple[int, int, int]
    backward: tuple[int, int, int]


TRAIN_ALL, FREEZE_WEIGHT, FREEZE_INPUT, BIAS_ONLY = "all", "frozen weight", "frozen input", "bias only"
# (style, sequence parallelism) -> (all-gathers, all-to-alls) of: the forward; the backward if all tensors need gradients,
# with a frozen weight, with a frozen input, and if only the bias needs a gradient
COMMUNICATION = {
    ("local", False): ((0, 0), (0, 0), (0, 0), (0, 0), (0, 0)),
    ("local", True): ((0, 0), (0, 0), (0, 0), (0, 0), (0, 0)),
    ("column", False): ((0, 0), (1, 1), (1, 1), (0, 0), (0, 0)),
    ("row", False): ((1, 1), (0, 0), (0, 0), (0, 0), (0, 0)),
    ("column", True): ((1, 0), (1, 1), (0, 1), (1, 0), (0, 0)),
    ("row", True): ((0, 1), (1, 0), (1, 0), (1, 0), (0, 0)),
}
# fp8_current agrees on x of COLUMN_SP in forward, and on dy of ROW_SP in backward unless no GEMM reads dy.
AGREES_FORWARD, AGREES_BACKWARD = ("column", True), ("row", True)


def count_collectives(case: LinearCase, what: str) -> tuple[Counts, dict[str, bool]]:
    """Return the collectives of a layer if only some tensors (`what`) need gradients, and for each parameter and x whether
    a gradient was computed."""
    mesh = worker.mesh(tp=dist.get_world_size())["tp"]
    full = make_full(case)
    layer = build(case, mesh, full)
    for member in layer.core.members:
        getattr(layer, member.weight).requires_grad_(what in (TRAIN_ALL, FREEZE_INPUT))
    x = cut(full.x, case.style.cut_x, mesh.size()).requires_grad_(what in (TRAIN_ALL, FREEZE_WEIGHT))
    with Collectives() as forward:
        output = layer(x)
    ys = output if isinstance(output, tuple) else (output,)
    with Collectives() as backward:
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    seen = [(c.count("gather"), c.count("alltoall"), c.count("reduce")) for c in (forward, backward)]
    grads = {name: parameter.grad is not None for name, parameter in layer.named_parameters()}
    return Counts(*seen), grads | {"x": x.grad is not None}


@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
@pytest.mark.parametrize("what", [TRAIN_ALL, FREEZE_WEIGHT, FREEZE_INPUT, BIAS_ONLY])
@pytest.mark.ranks(2)
def test_only_what_is_needed_is_communicated(ranks, what, recipe, siblings):
    for key, (forward, *backwards) in COMMUNICATION.items():
        if siblings > 1 and key[0] == "row":
            continue
        backward = backwards[[TRAIN_ALL, FREEZE_WEIGHT, FREEZE_INPUT, BIAS_ONLY].index(what)]
        quantized = recipe == "fp8_current"
        expected = Counts(
            (*forward, int(quantized and key == AGREES_FORWARD)),
            (*backward, int(quantized and key == AGREES_BACKWARD and what != BIAS_ONLY)),
        )
        case = LinearCase(key, recipe, torch.bfloat16, bias=True, siblings=siblings)
        for counts, grads in ranks(2).run(count_collectives, case, what):
            assert counts == expected, case
            for name, present in grads.items():
                trained = {"w": (TRAIN_ALL, FREEZE_INPUT), "x": (TRAIN_ALL, FREEZE_WEIGHT)}.get(name[0])
                assert present == (trained is None or what in trained), f"{case} {name}"


def recompute(cases: list[LinearCase]) -> list[dict[str, Error]]:
    results = []
    for case in cases:
        full = make_full(case)
        results.append({
            name: Error(torch.equal(value, again), 0, 0)
            for (name, value), again in zip(
                sharded(case, full).items(), sharded(case, full, recompute=True).values(), strict=True
            )
        })  # fmt: skip
    return results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", few(BY_SCALES, ("fp8_current", "nvfp4")))
def test_recomputation_repeats_the_bits(ranks, recipe):
    cases = [
        LinearCase(key, recipe, torch.bfloat16, bias=True, siblings=1 if key[0] == "row" else 3) for key in STYLE_KEYS
    ]
    for results in ranks(2).run(recompute, cases):
        for case, errors in zip(cases, results, strict=True):
            assert all(error.equal for error in errors.values()), case


def unused_sibling() -> dict[str, bool]:
    """Run q, k and v in a layer of siblings whose k is not used, and assert that the weight of k has no gradient. Return
    whether dx and dw of v have the bits of a run in which dy of k is zero."""
    case = LinearCase(("column", True), "fp8_current", torch.bfloat16, bias=True, siblings=3)
    full = make_full(case)
    mesh = worker.mesh(tp=dist.get_world_size())["tp"]
    layer = build(case, mesh, full)
    x = cut(full.x, 0, mesh.size()).requires_grad_()
    q, _, v = layer(x)
    (q.sum() + v.sum()).backward()
    alone = build(case, mesh, full)
    x_again = x.detach().clone().requires_grad_()
    ys = alone(x_again)
    (ys[0].sum() + 0 * ys[1].sum() + ys[2].sum()).backward()
    assert layer.weight_1.grad is None and layer.bias_1.grad is None
    assert x.grad is not None and x_again.grad is not None
    return {
        "dx": torch.equal(x.grad, x_again.grad),
        "dw": torch.equal(layer.weight_2.grad._local_tensor, alone.weight_2.grad._local_tensor),
    }


@pytest.mark.ranks(2)
def test_a_sibling_nobody_used_has_no_gradient(ranks):
    assert ranks(2).run(unused_sibling) == [{"dx": True, "dw": True}] * 2


def refusals() -> dict[str, str]:
    tp = worker.mesh(tp=2)["tp"]
    options: dict[str, Any] = {"tp": tp, "device": worker.device()}

    def build_and_run(
        layer: Callable[..., nn.Module], sizes: tuple[Any, Any], shape: tuple[int, ...], **more: Any
    ) -> str:
        x = torch.zeros(shape, device=worker.device())
        return may_raise(ValueError, lambda: layer(*sizes, **options, **more)(x))

    return {
        "out": build_and_run(ColumnParallelLinear, (8, 7), (4, 8)),
        "in": build_and_run(RowParallelLinear, (7, 8), (4, 8)),
        "siblings": build_and_run(RowParallelLinear, (8, (8, 8)), (4, 8)),
        "whole tokens": build_and_run(ColumnParallelLinear, (8, 8), (2, 3, 8), sequence_parallel=True),
        "odd tokens": build_and_run(RowParallelLinear, (8, 8), (5, 4), sequence_parallel=True),
        "recipe": build_and_run(ColumnParallelLinear, (8, 8), (4, 8), recipe="fp9"),
        "overlap": build_and_run(ColumnParallelLinear, (8, 8), (4, 8), overlap="never"),
    }


@pytest.mark.ranks(2)
def test_impossible_layers_and_inputs_are_refused(ranks):
    for messages in ranks(2).run(refusals):
        assert messages["out"].startswith(
            "ColumnParallelLinear: COLUMN shards out_features over tp 2, which does not divide 7"
        )
        assert messages["in"].startswith("RowParallelLinear: ROW shards in_features over tp 2, which does not divide 7")
        assert messages["siblings"].startswith("RowParallelLinear takes one out_features; got (8, 8)")
        assert "expects token shards [B*S/tp, K]; got x of shape (2, 3, 8)" in messages["whole tokens"]
        assert "shards 5 tokens over tp 2, which does not divide this number" in messages["odd tokens"]
        assert messages["recipe"].startswith("unknown recipe 'fp9'")
        assert messages["overlap"].startswith("unknown overlap strategy 'never'")


def made_on_meta() -> list[str]:
    """Construct a layer under torch.device("meta"), allocate it, and fill it with 0.5; return the initial devices of its
    parameters, and the shape and the first element of y."""
    tp = worker.mesh(tp=2)["tp"]
    with torch.device("meta"):
        layer = ColumnParallelLinear(8, 8, bias=True, tp=tp, recipe="fp8_current")
    kinds = [parameter._local_tensor.device.type for parameter in layer.parameters()]
    layer.to_empty(device=worker.device())
    with torch.no_grad():
        for parameter in layer.parameters():
            plain(parameter).fill_(0.5)
    y = layer(torch.ones(4, 8, device=worker.device()))
    return [*kinds, str(tuple(y.shape)), f"{y[0, 0].item():.1f}"]


@pytest.mark.ranks(2)
def test_layers_may_be_made_on_meta(ranks):
    assert ranks(2).run(made_on_meta) == [["meta", "meta", "(4, 4)", "4.5"]] * 2


def without_tokens(recipe: str) -> list[tuple[str, bool]]:
    """Run forward and backward without tokens. Return, for each style, whether shapes are right and gradients zero."""
    tp = worker.mesh(tp=dist.get_world_size())["tp"]
    found = []
    for key in STYLE_KEYS:
        case = LinearCase(key, recipe, torch.float32, bias=True)
        layer = build(case, tp, make_full(case))
        x = cut(make_full(case).x, 1 if case.style.cut_x == 1 else None, tp.size())[:0].requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert x.grad is not None
        zero = all(not plain(parameter.grad).any() for parameter in layer.parameters())
        found.append((case.style.name, zero and len(y) == 0 and x.grad.shape == x.shape))
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_no_tokens_are_no_trouble(ranks, recipe):
    """Ranks that have no tokens run every collective, with empty tensors."""
    for found in ranks(2).run(without_tokens, recipe):
        assert all(right for _, right in found), found
