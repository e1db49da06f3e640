"""The parallel linear, forward and backward, for every style, recipe and overlap strategy.

    y  = x @ w.T (+ b)      fprop     x [M, K]   w [N, K]   y [M, N]      M tokens, K in_features, N out_features
    dx = dy @ w             dgrad     dy [M, N]
    dw = dy.T @ x           wgrad     db = sum of dy over its rows

A layer with a prologue (`dlp.parallel.linear.prologue`) is called with what x is made of, and returns the gradients of that.

Several weights that read the same x (siblings) share one quantization, one amax agreement, one gather and one saved
operand of x, and their dgrads accumulate into one fp32 buffer that is reduced once.

    forward   quantize x, y = token_gemm(x rowwise, w rowwise), save this rank's tokens of x in low precision
    backward  quantize dy; start the gathers in order of need (`dlp.parallel.linear.travel`)
              dx = token_gemm(dy rowwise, w columnwise); its reduction runs under wgrad
              dw = contract_gemm(dy columnwise, x columnwise); now, or in `backward_dw`

Autograd reaches these functions through `dlp.parallel.linear.direct`, and where something traces or watches through the opaque
ops of `dlp.parallel.linear.opaque`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.comm.collectives import Pending, done
from dlp.kernels.ops import Summed, rounded
from dlp.parallel.casts import COLUMNWISE, ROWWISE, Values
from dlp.parallel.linear.operands import quantize
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.linear.travel import Columnwise, dy_of_backward, x_of_backward, x_of_forward
from dlp.parallel.overlap import Gather, Overlap
from dlp.parallel.transfer import Reduction
from dlp.parallel.wires import WIRES
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import QuantizedTensor


def token_gemm(
    spec: LinearSpec, reduce: Reduction | None, overlap: Overlap, operands: Sequence[QuantizedTensor | Gather],
    gemms: Sequence[Gemm], dtype: torch.dtype,
) -> Pending[Tensor]:  # fmt: skip
    """fprop and dgrad, where tokens are rows of the result: the sum over i of GEMM i on operand i, reduced over tp once,
    where `reduce` says how.

    `dtype`: of the result, and of the contributions to a reduction before they are packed for its wire.
    """
    total: Tensor | None = None
    for a, gemm in zip(operands[:-1], gemms[:-1], strict=True):
        total = _run(a, gemm if total is None else replace(gemm, accumulate=total))
    a, last = operands[-1], gemms[-1] if total is None else replace(gemms[-1], accumulate=total)
    if reduce is None:
        return done(rounded(_run(a, last), dtype))
    assert isinstance(a, QuantizedTensor), "no style both gathers and reduces in one GEMM"
    return overlap.gemm_reduce(a, last, spec.tp_group, reduce=reduce.how, dtype=dtype, codec=WIRES[reduce.codec])


def _run(a: QuantizedTensor | Gather, gemm: Gemm) -> Tensor:
    """The GEMM on an operand that is here, or on its way."""
    return gemm(a) if isinstance(a, QuantizedTensor) else a.gemm(gemm)


def contract_gemm(bound: BoundSpec, dy: QuantizedTensor, x: QuantizedTensor, out_dtype: torch.dtype) -> Tensor:
    """wgrad, where tokens are contracted: dy columnwise [N, M], x columnwise [K, M] -> [N, K], one GEMM over all tokens."""
    options = bound.spec.recipe.wgrad
    return Gemm("wgrad", x, options.out_dtype or out_dtype, options=options)(dy)


def _matrix(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _part(values: Tensor, rows: int, columns: int) -> Tensor:
    """The values without what was appended to their operands; they are contiguous."""
    if values.shape[0] == rows and values.shape[1] == columns:
        return values.contiguous()
    return values[:rows, :columns].contiguous()


def _made(spec: LinearSpec, inputs: Sequence[Tensor]) -> Values:
    """What the layer is called with -> x [M, K]."""
    rows = _tokens_as_rows(spec, inputs[0])
    return rows if spec.prologue is None else spec.prologue.make(spec.name, rows, inputs[1])


def to_save(inputs: Sequence[Tensor], kept: Sequence[Tensor], save: bool) -> list[Tensor]:
    """What backward reads of a forward that was called with `inputs` and returned `kept`: parts of x, or x itself; where a
    prologue made x, then what that keeps, and what it was given."""
    if len(inputs) > 1:
        return [*kept, *inputs]
    return list(kept or inputs) if save else []


def _beside(spec: LinearSpec, saved: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """`to_save` -> what wgrad reads, what the prologue reads."""
    count = 0 if spec.prologue is None else spec.prologue.keeps + len(spec.prologue.reads)
    return saved[: len(saved) - count], saved[len(saved) - count :]


def _tokens_as_rows(spec: LinearSpec, x: Tensor) -> Tensor:
    """x [..., K] -> [M, K]. ValueError where sequence parallelism gets something else than equal token shards."""
    rows, style = _matrix(x), spec.style
    unsplit = spec.tokens is not None and len(rows) * spec.tp != spec.tokens
    if style.cut_x == 0 and (x.dim() != 2 or unsplit):
        expected = "B*S/tp" if spec.tokens is None else f"{spec.tokens // spec.tp}"
        raise ValueError(
            f"{spec.name}: sequence parallelism over tp {spec.tp} expects token shards [{expected}, K]; got x of shape "
            f"{tuple(x.shape)}. Split the tokens with dlp.scatter_tokens before the first sequence-parallel layer, join "
            f"them with dlp.gather_tokens after the last, and view heads with B and S from configuration"
        )
    if style.fprop.reduce == "scatter" and len(rows) % spec.tp:
        raise ValueError(
            f"{spec.name}: sequence parallelism cuts {len(rows)} tokens over tp {spec.tp}, which does not divide them; "
            f"choose micro_batch x sequence divisible by tp"
        )
    return rows


def y_shape(spec: LinearSpec, x: Tensor, out_features: int) -> tuple[int, ...]:
    """y of x [..., K]: token shards [M, N] where sequence parallelism gathers x or scatters y; else x's own shape."""
    if spec.style.gathers is None:
        return *x.shape[:-1], out_features
    return spec.transfers(x.numel() // x.shape[-1]).y_tokens, out_features


def _weight_operands(
    bound: BoundSpec, members: Sequence[str], weights: Sequence[Tensor], parts: Sequence[Tensor], dtype: torch.dtype,
    *, row: bool, record: bool,
) -> list[QuantizedTensor]:  # fmt: skip
    """One orientation of the weights: of flat parts that exist, or cast here."""
    if not parts:
        values, wanted = [w.to(dtype) for w in weights], ROWWISE if row else COLUMNWISE
        made = quantize(bound, "w", values, wanted, members=members, record=record)
        return [operands.at(columnwise=not row) for operands in made]
    formats, sizes = bound.spec.weight_formats
    fmt, size = formats[not row], sizes[not row]
    return [fmt.wrap(parts[i * size :]) for i in range(len(weights))]


def _rounded(bound: BoundSpec, tensor: str, member: str, values: Tensor, record: bool = True) -> Tensor:
    """The result y or dx, rounded by its quantizer where the recipe has one."""
    quantizers = bound.quantizers(tensor)
    if quantizers is None:
        return values
    padded = quantizers.rowwise.format.padded(values)
    (operands,) = quantize(bound, tensor, [padded], ROWWISE, members=[member], record=record)
    return _part(operands.at(columnwise=False).dequantize(values.dtype), *values.shape)


def run_forward(
    bound: BoundSpec, inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    parts: Sequence[Tensor], save: bool, record: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """`inputs`: x [..., K], or what the prologue reads; weights [N_i, K] -> (y_i, what is kept for backward: the parts of
    x, none where wgrad reads x itself, and what the prologue keeps).

    `parts`: of the rowwise weights; none: they are cast here. `save`: there will be a wgrad. `record`: gradients are
    enabled, so amaxes count for delayed scales.
    """
    spec, x = bound.spec, inputs[0]
    options, made = spec.recipe.fprop, _made(spec, inputs)
    reduce = bound.transfers(len(made)).fprop
    operand, kept = x_of_forward(bound, made, save, record)
    if spec.prologue is not None and record:
        kept += spec.prologue.kept(made)
    ws = _weight_operands(bound, spec.members, weights, parts, x.dtype, row=True, record=record)
    dtype = options.out_dtype or x.dtype
    ys = []
    for member, weight, w, bias in zip(spec.members, weights, ws, biases, strict=True):
        features, padded = weight.shape[0], w.shape[0]
        inside = None if bias is None or reduce else bias if padded == features else F.pad(bias, (0, padded - features))
        gemm = Gemm("fprop", w, dtype, bias=inside, options=options)
        y = token_gemm(spec, reduce, spec.overlap.fprop, [operand], [gemm], dtype).wait()
        y = _part(y, y.shape[0], features)
        y = y + bias.to(y.dtype) if bias is not None and reduce else y
        y = _rounded(bound, "y", member, y, record)
        ys.append(y if x.dim() == 2 else y.view(y_shape(spec, x, features)))
    return ys, kept


def run_backward(
    bound: BoundSpec, dys: Sequence[Tensor], saved: Sequence[Tensor], weights: Sequence[Tensor],
    parts: Sequence[Tensor], dtype: torch.dtype, used: Sequence[int], needs_dx: bool, needs_dw: Sequence[bool],
    needs_db: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """dy_i [..., N_i] of the `used` members and what forward saved (`to_save`) -> those gradients that are needed, in the
    order dx [M, K] in `dtype`, that of x (with a prologue: of what that read), dw_i, db_i. Without dw_i that its weight
    takes otherwise (`Weight.take_grad`). `parts`: of the columnwise weights of these members."""
    spec = bound.spec
    members = [spec.members[i] for i in used]
    saved, beside = _beside(spec, saved)
    rows = [Summed(_matrix(dy)) if need else _matrix(dy) for dy, need in zip(dys, needs_db, strict=True)]
    dy_rows, dy_cols = _start_dy(bound, members, rows, needs_dx, any(needs_dw))
    x_col = x_of_backward(bound, saved, len(rows[0])) if any(needs_dw) else None
    grads, dx = [], None
    if needs_dx:
        options = spec.recipe.dgrad
        out = options.out_dtype or dtype
        ws = _weight_operands(bound, members, weights, parts, dtype, row=False, record=True)
        gemms = [Gemm("dgrad", w, out if len(rows) == 1 else torch.float32, options=options) for w in ws]
        reduce = bound.transfers_back(len(rows[0])).dgrad
        dx = token_gemm(spec, reduce, spec.overlap.dgrad, dy_rows, gemms, out)
    if x_col is not None:
        x_whole = x_col()
        for i, dy_col, w, needed in zip(used, dy_cols, weights, needs_dw, strict=True):
            if needed:
                wgrad = partial(_wgrad, bound, dy_col(), x_whole, w.shape, w.dtype)
                dw = bound.weights.members[i].take_grad(wgrad, may_wait=needs_dx)
                grads += [] if dw is None else [dw]
    grads += [rounded(dy.sums(), w.dtype) for dy, w in zip(rows, weights, strict=True) if isinstance(dy, Summed)]
    if dx is None:
        return grads
    whole = dx.wait()
    whole = _part(whole, whole.shape[0], weights[0].shape[1])
    whole = _rounded(bound, "dx", spec.members[0], whole).to(dtype)
    return [*(_of_inputs(bound.spec, whole, beside) if beside else [whole]), *grads]


def _of_inputs(spec: LinearSpec, dx: Tensor, beside: Sequence[Tensor]) -> list[Tensor]:
    """dx -> the gradients of what the prologue was given."""
    assert spec.prologue is not None
    return spec.prologue.gradients(dx, beside[:-2], beside[-2], beside[-1])


def _wgrad(
    bound: BoundSpec, dy: QuantizedTensor, x: QuantizedTensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The gradient of a weight of this shape [N, K] and dtype, from operands that may be padded."""
    return _part(contract_gemm(bound, dy, x, dtype), shape[0], shape[1]).to(dtype)


def waits(delay: bool | None, needs_dx: bool) -> bool:
    """Whether wgrad is left to `backward_dw`. Nobody waits for a layer without dx, and an op without a result would be
    dropped from a compiled graph."""
    return bool(delay) and needs_dx


def _start_dy(
    bound: BoundSpec, members: Sequence[str], rows: Sequence[Values], row: bool, col: bool
) -> tuple[list[Any], list[Columnwise]]:
    """dgrad's operands, and wgrad's when they are asked for; a travelling dy starts here."""
    if bound.spec.style.gathers == "dy":
        (dy,) = rows
        rowwise, columnwise = dy_of_backward(bound, dy, row, col)
        return [rowwise], [columnwise]
    made = quantize(bound, "dy", rows, (row, col), members=members)
    return [operands.rowwise for operands in made], [partial(operands.at, columnwise=True) for operands in made]
