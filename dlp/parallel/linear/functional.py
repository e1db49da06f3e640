"""The parallel linear, forward and backward, for every style, recipe and overlap strategy.

    y  [M, N] = x [M, K] @ w [N, K].T + b [N]     fprop    x rowwise [M, K]      w rowwise [N, K]
    dx [M, K] = dy [M, N] @ w [N, K]              dgrad    dy rowwise [M, N]     w columnwise [K, N]
    dw [N, K] = dy [M, N].T @ x [M, K]            wgrad    dy columnwise [N, M]  x columnwise [K, M]
    db [N]    = dy [M, N].sum(0)

    M     number of tokens; under sequence parallelism the tokens of all R tp ranks together, so that each rank has M/R
    N, K  out_features and in_features of w on this rank
    COLUMN_SP   forward gathers x [M/R, K]; backward reduce-scatters dx to [M/R, K]
    ROW_SP      forward reduce-scatters y to [M/R, N]; backward gathers dy [M/R, N]

    forward   quantize x, start the gather of x
              y = token_gemm(x rowwise, w rowwise)
              save x of this rank's tokens, in the form `LinearPlan.kept`
    backward  quantize dy, start the gathers: first the gather for dgrad, which runs before wgrad
              dx = token_gemm(dy rowwise, w columnwise); the reduction of dx runs under wgrad
              dw = contract_gemm(dy columnwise, x columnwise), now or in `backward_dw`

Several weights that read the same x (siblings) share one quantization, one amax agreement, one gather and one saved operand of
x, and the dgrads accumulate into one fp32 buffer that is reduced once, or are one GEMM (`dlp.quant.siblings`).

x and dy may be lazy (`ops.Produced`): the cast computes their values. The `LinearPlan` for the number of tokens defines the
casts, amax agreements, transfers and saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.comm.collectives import Pending
from dlp.kernels.ops import LazyMatrix, Summed, rounded
from dlp.parallel.casts import COLUMNWISE, ROWWISE
from dlp.parallel.linear import canonical
from dlp.parallel.linear.plan import WIRES, GradsWanted, LinearPlan, Reduction
from dlp.parallel.linear.quantize import (
    Columnwise,
    LayerInput,
    Rowwise,
    as_matrix,
    cast_weights,
    outliving,
    plan_of,
    quantize_route,
    saved_x,
    through_format,
    trimmed,
    whole,
)
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.overlap import Overlap
from dlp.parallel.weight.base import Target
from dlp.quant.gemm import Gemm
from dlp.quant.siblings import as_one
from dlp.quant.tensor import QuantizedTensor


class Finish(NamedTuple):
    """Epilogue of fprop or dgrad.

    alpha   factor of the product A @ B.T
    into    [rows, columns] to which the product is added, and which is the result; None: the product is the result
    run     called instead of `token_gemm`, with the same arguments; None: `token_gemm`
    """

    alpha: float = 1.0
    into: Tensor | None = None
    run: Callable[..., Tensor] | None = None


NO_FINISH = Finish()


def linear_forward(
    bound: BoundSpec, x: LayerInput, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    ws: Sequence[QuantizedTensor], save: bool, record: bool, finish: Finish = NO_FINISH,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Compute y_i = x @ w_i.T + b_i for every member i.

    x         [..., K]: stored, lazy, or quantized already
    weights   w_i [N_i, K] of this rank
    biases    b_i [N_i]; None: no bias
    ws        the rowwise operands of all w_i; empty: the weights are cast here
    save      whether backward will read x (`keeps_x`)
    record    whether gradients are enabled, so that amaxes are recorded for delayed scales
    finish    the epilogue; only for a layer with one member whose y is not reduced

    Returns a list of y_i [..., N_i] ([M, N_i] if x is gathered, [M/R, N_i] if y is scattered), and a list of the tensors of x
    for backward: the parts of an operand, or, if x itself is saved, the computed values of a lazy x; else nothing.
    """
    spec, values = bound.spec, as_matrix(x)
    plan = bound.plans.get(x.shape) or plan_of(bound, x.shape)
    with plan.scope["forward"]():
        # x: observe, agree, cast, start the gather
        with plan.scope["cast_x"]():
            (quantized,) = quantize_route(bound, plan, plan.x[save], [values], spec.members[:1], record)
        kept: list[Tensor] = []
        if save and plan.kept == "values":  # a stored x is saved by the caller (`to_save`)
            kept = [values.value] if isinstance(values, LazyMatrix) else []
        elif save:
            own = quantized.own[plan.kept == "columnwise"]
            assert own is not None, "x is saved in an orientation that was cast"
            kept = list(own.parts)

        ws = ws or cast_weights(bound, spec.members, weights, x.dtype, ROWWISE, record)

        # y: fprop, the reduction, then the bias, once
        options, dtype, ys = spec.recipe.fprop, spec.recipe.fprop.out_dtype or x.dtype, []
        for member, weight, w, bias in zip(spec.members, weights, ws, biases, strict=True):
            features, gemm_bias = weight.shape[0], None
            if bias is not None and plan.bias_in_gemm:  # else it is added once, after the sum over ranks
                appended = w.shape[0] - features  # zero rows of a padded operand
                gemm_bias = F.pad(bias, (0, appended)) if appended else bias
            gemm = Gemm("fprop", w, dtype, gemm_bias, finish.into, options, alpha=finish.alpha, rounds=True)
            with plan.scope["fprop"]():
                result = (finish.run or token_gemm)(spec, plan.fprop, [quantized.rowwise], [gemm], dtype)
                y = trimmed(result if isinstance(result, Tensor) else result.wait(), features)
            if bias is not None and not plan.bias_in_gemm:
                y = y + bias.to(y.dtype)
            if spec.recipe.y is not None:
                y = through_format(bound, "y", member, y, record)
            ys.append(y if x.dim() == 2 or spec.style.gathers is not None else y.view(*x.shape[:-1], features))
    return ys, kept


def linear_backward(
    bound: BoundSpec, dys: Sequence[LayerInput], saved: Sequence[Tensor], weights: Sequence[Tensor],
    ws: Sequence[QuantizedTensor], wanted: GradsWanted, finish: Finish = NO_FINISH, into: Sequence[Target | None] = (),
) -> list[Tensor]:  # fmt: skip
    """Compute dx = sum over i of dy_i @ w_i,   dw_i = dy_i.T @ x,   db_i = dy_i.sum(0),   for the used members i.

    dys       dy_i in the shape of y_i, or lazy [M, N_i]
    saved     the tensors of x that forward saved (`to_save`)
    weights   w_i [N_i, K] of the used members
    ws        the columnwise operands of w_i; empty: the weights are cast here if a gradient reads them
    wanted    the gradients to compute
    finish    the epilogue of dgrad; only for a layer whose dx is not reduced. `alpha` scales wgrad as well
    into      the target to which each dw_i is written or added; empty, or None for a member: dw_i is returned

    Returns the wanted gradients among dx [M, K], dw_i [N_i, K], db_i [N_i], in this order, without each dw_i that was written
    `into` a target. For delayed wgrads the end of the list has the parts of the operands instead of dw_i (`leave_wgrads`).
    """
    spec, any_dw = bound.spec, any(wanted.dw)
    members = spec.members if len(wanted.used) == len(spec.members) else [spec.members[i] for i in wanted.used]
    rows: list[Any] = list(map(as_matrix, dys))
    if any(wanted.db):  # the kernel that casts dy also sums db
        rows = [Summed(dy) if needed else dy for dy, needed in zip(rows, wanted.db, strict=True)]
    tokens = rows[0].shape[0]
    plan = bound.plans_back.get(tokens) or bound.plan_back(tokens)
    with plan.scope["backward"]():
        # x: if x is gathered again, the gather starts here and runs under the cast of dy
        x_col = saved_x(bound, plan, saved) if any_dw else None

        # dy: observe, agree, cast, start the gathers
        with plan.scope["cast_dy"]():
            quantized = quantize_route(bound, plan, plan.dys[wanted.dx, any_dw], rows, members)
        dy_rows, dy_cols, _ = zip(*quantized, strict=True)
        if wanted.reads_w and not ws:
            ws = cast_weights(bound, members, weights, wanted.dtype, COLUMNWISE, True)

        # dgrad first: the reduction of dx runs under wgrad
        dx = _dgrad(bound, plan, dy_rows, ws, wanted, finish) if wanted.dx else None
        grads: list[Tensor] = []
        operands: list[Tensor] = []  # operands of delayed wgrads
        if x_col is not None:
            if spec.options.delay_wgrad and wanted.dx:  # `waits`
                operands = _operands_of_wgrads(bound, dy_cols, x_col, wanted)
            else:
                with plan.scope["wgrad"]():
                    grads = _wgrads(bound, dy_cols, x_col, weights, ws, wanted, finish.alpha, into)
        sums = partial(canonical.token_sums, spec) if spec.invariant else Summed.sums
        grads += [rounded(sums(dy), w.dtype) for dy, w, db in zip(rows, weights, wanted.db, strict=True) if db]
        if dx is None:
            return grads  # without dx no wgrad is delayed (`waits`)
        dx = trimmed(dx if isinstance(dx, Tensor) else dx.wait(), weights[0].shape[1])
    if bound.changes_dx:
        dx = _changed_dx(bound, dx, saved)
    dx = dx if dx.dtype == wanted.dtype else rounded(dx, wanted.dtype)
    return [dx if wanted.shape is None else dx.view(wanted.shape), *grads, *operands]


def _dgrad(
    bound: BoundSpec, plan: LinearPlan, dy_rows: Sequence[Rowwise | None], ws: Sequence[QuantizedTensor],
    wanted: GradsWanted, finish: Finish,
) -> Tensor | Pending[Tensor]:  # fmt: skip
    """Compute dx [M, K], which may be padded, from dy_i rowwise [M, N_i] and w_i columnwise [K, N_i]; if dx is reduced over tp,
    return the reduction in flight. The dgrads of siblings are summed in fp32."""
    options = plan.recipe.dgrad
    dtype = options.out_dtype or wanted.dtype
    gemms = [Gemm("dgrad", w, dtype if len(ws) == 1 else torch.float32, options=options) for w in ws]
    if finish is not NO_FINISH:
        gemms[0] = replace(gemms[0], alpha=finish.alpha, accumulate=finish.into, rounds=True)
    with plan.scope["dgrad"]():
        return (finish.run or token_gemm)(bound.spec, plan.dgrad, dy_rows, gemms, dtype)


def _wgrads(
    bound: BoundSpec, dy_cols: Sequence[Columnwise | None], x_col: Columnwise, weights: Sequence[Tensor],
    ws: Sequence[QuantizedTensor], wanted: GradsWanted, alpha: float, into: Sequence[Target | None],
) -> list[Tensor]:  # fmt: skip
    """Compute the wanted dw_i [N_i, K] from dy_i columnwise [N_i, M] and x columnwise [K, M]. Return each dw_i without a target
    in `into`."""
    x, grads = whole(x_col), list[Tensor]()
    targets = into or [None] * len(weights)
    clips = [w.parts[-1].t() for w in ws] if bound.spec.recipe.w.clips else [None] * len(weights)
    for dy_col, w, needed, target, clipped in zip(dy_cols, weights, wanted.dw, targets, clips, strict=True):
        if needed:
            dw = contract_gemm(bound, whole(dy_col), x, w.shape, w.dtype, alpha, target, clipped)
            grads += [dw] if target is None else []
    return grads


def _operands_of_wgrads(
    bound: BoundSpec, dy_cols: Sequence[Columnwise | None], x_col: Columnwise, wanted: GradsWanted
) -> list[Tensor]:
    """Return the parts of the operands of delayed wgrads: each wanted dy_i, then x, in memory that later passes do not
    reuse."""
    x = outliving(x_col, bound.spec.group)
    dys = [outliving(dy_col, bound.spec.group) for dy_col, needed in zip(dy_cols, wanted.dw, strict=True) if needed]
    return [part for operand in (*dys, x) for part in operand.parts]


def _changed_dx(bound: BoundSpec, dx: Tensor, saved: Sequence[Tensor]) -> Tensor:
    """If the recipe clips x, set dx [M, K] to 0 where x was clipped. If the recipe has a quantizer of dx, round dx by this
    quantizer."""
    recipe = bound.spec.recipe
    if recipe.x.clips:
        clipped = recipe.x.rowwise.format.wrap(saved).parts[-1]
        dx = dx.masked_fill_(trimmed(clipped, dx.shape[1]), 0)
    if recipe.dx is not None:
        dx = through_format(bound, "dx", bound.spec.members[0], dx)
    return dx


def token_gemm(
    spec: LinearSpec, reduce: Reduction | None, operands: Sequence[Rowwise | None], gemms: Sequence[Gemm],
    dtype: torch.dtype,
) -> Tensor | Pending[Tensor]:  # fmt: skip
    """Compute the sum over i of gemm_i(operand_i) [M, features]: fprop or dgrad, where tokens are rows of the result.

    reduce     the reduction of the sum over tp; None: no reduction
    operands   operand A of each GEMM, which may be in a gather: then the overlap strategy of the gather schedules the GEMM
    dtype      dtype of the result, and of the contribution of each rank to a reduction before it is packed

    Returns the result, or the reduction in flight if `reduce` is given.
    """
    if spec.invariant:
        return canonical.token_gemm(spec, reduce, operands, gemms, dtype)
    if len(gemms) > 1:
        operands, gemms = as_one(operands, gemms, dtype)
    total: Tensor | None = None
    for i, (a, gemm) in enumerate(zip(operands, gemms, strict=True), 1):
        gemm = gemm if total is None else replace(gemm, accumulate=total)
        if reduce is not None and i == len(gemms):
            overlap: Overlap = getattr(spec.overlap, gemm.which)
            assert isinstance(a, QuantizedTensor) and spec.group is not None, "a style gathers and reduces in one GEMM"
            return overlap.gemm_reduce(a, gemm, spec.group, reduce=reduce.how, dtype=dtype, codec=WIRES[reduce.codec])
        assert a is not None, "this orientation was not requested"
        total = gemm(a) if isinstance(a, QuantizedTensor) else a.gemm(gemm)
    assert total is not None
    return total if total.dtype == dtype else rounded(total, dtype)


def contract_gemm(
    bound: BoundSpec, dy: QuantizedTensor, x: QuantizedTensor, shape: Sequence[int], dtype: torch.dtype,
    alpha: float = 1.0, into: Target | None = None, clipped: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute wgrad, dw [N, K] = dy.T @ x, as one GEMM that contracts all tokens.

    dy, x          columnwise operands [N, M] and [K, M], which may be padded
    shape, dtype   shape and dtype of the weight
    alpha          factor of dw
    into           the tensor to which dw is written or added; None: dw is returned
    clipped        bool [N, K], which may be padded: dw is set to 0 where the weight was clipped; None: dw is not masked
    """
    if bound.spec.invariant:
        return canonical.contract_gemm(bound.spec, dy, x, shape, dtype)
    options = bound.spec.recipe.wgrad
    gemm = Gemm("wgrad", x, options.out_dtype or dtype, options=options, alpha=alpha)
    exact = (dy.parts[0].shape[0], x.parts[0].shape[0]) == tuple(shape) and clipped is None
    if into is not None and exact and options.out_dtype in (None, into.tensor.dtype):  # the GEMM writes dw directly
        added, written = (None, into.tensor) if into.overwrite else (into.tensor, None)
        return replace(gemm, out_dtype=into.tensor.dtype, accumulate=added, out=written)(dy)
    dw = trimmed(gemm(dy), shape[1], shape[0])
    dw = dw if dw.dtype == dtype else rounded(dw, dtype)
    if clipped is not None:
        dw = dw.masked_fill_(trimmed(clipped, shape[1], shape[0]), 0)
    if into is None:
        return dw
    return into.tensor.copy_(dw) if into.overwrite else into.tensor.add_(dw)
