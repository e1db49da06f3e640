"""The parallel linear: one autograd function behind two opaque ops, for every style, recipe and overlap strategy.

    y  = x @ w.T (+ b)      fprop     x [M, K]   w [N, K]   y [M, N]      M tokens, K in_features, N out_features
    dx = dy @ w             dgrad     dy [M, N]
    dw = dy.T @ x           wgrad     db = sum of dy over its rows

Several weights that read the same x (siblings) share one quantization, one amax agreement, one gather and one saved
operand of x, and their dgrads accumulate into one fp32 buffer that is reduced once.

    forward   quantize x, y = token_gemm(x rowwise, w rowwise), save this rank's tokens of x in low precision
    backward  quantize dy; start the gathers in order of need (`dlp.parallel.travel`)
              dx = token_gemm(dy rowwise, w columnwise); its reduction runs under wgrad
              dw = contract_gemm(dy columnwise, x columnwise); now, or in `backward_dw`

To torch.compile a linear is the ops `dlp::linear_fwd` and `dlp::linear_bwd`: tensors plus the name of a frozen
`LinearSpec`. Streams, groups and collectives stay inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlp.comm import wire as ledger
from dlp.comm.collectives import Pending, done
from dlp.parallel.autocast import check_compiled
from dlp.parallel.operands import Pair, quantize
from dlp.parallel.overlap import Gather, Overlap
from dlp.parallel.spec import LinearSpec, remembered, spec_of
from dlp.parallel.style import GemmComm
from dlp.parallel.travel import Columnwise, dy_of_backward, x_of_backward, x_of_forward
from dlp.parallel.wires import WIRES
from dlp.quant.gemm import Gemm
from dlp.quant.tensor import Format, QuantizedTensor


def token_gemm(
    spec: LinearSpec, comm: GemmComm, overlap: Overlap, operands: Sequence[QuantizedTensor | Gather],
    gemms: Sequence[Gemm], dtype: torch.dtype,
) -> Pending[Tensor]:  # fmt: skip
    """fprop and dgrad, where tokens are rows of the result: the sum over i of GEMM i on operand i, reduced over tp once.

    `dtype`: of the result, and of the contributions to a reduction before they are packed for its wire.
    """
    total: Tensor | None = None
    for a, gemm in zip(operands[:-1], gemms[:-1], strict=True):
        total = _run(a, gemm if total is None else replace(gemm, accumulate=total))
    a, last = operands[-1], gemms[-1] if total is None else replace(gemms[-1], accumulate=total)
    if comm.reduce is None:
        return done(_run(a, last).to(dtype))
    assert isinstance(a, QuantizedTensor), "no style both gathers and reduces in one GEMM"
    wire = WIRES[last.options.wire]
    return overlap.gemm_reduce(a, last, spec.tp_group, reduce=comm.reduce, dtype=dtype, wire=wire)


def _run(a: QuantizedTensor | Gather, gemm: Gemm) -> Tensor:
    """The GEMM on an operand that is here, or on its way."""
    return gemm(a) if isinstance(a, QuantizedTensor) else a.gemm(gemm)


def contract_gemm(spec: LinearSpec, dy: QuantizedTensor, x: QuantizedTensor, out_dtype: torch.dtype) -> Tensor:
    """wgrad, where tokens are contracted: dy columnwise [N, M], x columnwise [K, M] -> [N, K], one GEMM over all tokens."""
    options = spec.recipe.wgrad
    return Gemm("wgrad", x, options.out_dtype or out_dtype, options=options)(dy)


def _matrix(x: Tensor) -> Tensor:
    """[..., K] -> [M, K]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _part(values: Tensor, rows: int, columns: int) -> Tensor:
    """The values without what was appended to their operands; they are contiguous."""
    if values.shape[0] == rows and values.shape[1] == columns:
        return values.contiguous()
    return values[:rows, :columns].contiguous()


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


def _y_shape(spec: LinearSpec, x: Tensor, out_features: int) -> tuple[int, ...]:
    """Tokens multiply by tp where x is gathered and divide by tp where y is scattered; other shapes keep theirs."""
    tokens = x.numel() // x.shape[-1]
    if spec.style.gathers == "x":
        return tokens * spec.tp, out_features
    if spec.style.fprop.reduce == "scatter":
        return tokens // spec.tp, out_features
    return *x.shape[:-1], out_features


def _weight_pairs(
    spec: LinearSpec, members: Sequence[str], weights: Sequence[Tensor], cached: Sequence[Tensor], dtype: torch.dtype,
    *, row: bool, col: bool, record: bool,
) -> list[Pair]:  # fmt: skip
    """The weights' operands as the last step boundary left them, as FSDP gathered them, or cast here."""
    if cached:
        return [_one_way(spec, row, cached, i) for i in range(len(weights))]
    shards = [spec.runtime.shards.get(member) for member in members]
    ways: dict[str, Any] = {"row": row, "col": col, "record": record}
    if not any(shards):
        return quantize(spec, "w", [w.to(dtype) for w in weights], members=members, **ways)
    return [
        shard.operands(spec, w, dtype, **ways)
        if shard
        else quantize(spec, "w", [w.to(dtype)], members=[name], **ways)[0]
        for name, shard, w in zip(members, shards, weights, strict=True)
    ]


def _one_way(spec: LinearSpec, row: bool, parts: Sequence[Tensor], i: int) -> Pair:
    """One orientation of operand `i` among flat parts (see `operands.unflatten`)."""
    formats, sizes = _weight_formats(spec)
    first = i * sum(sizes) + (0 if row else sizes[0])
    made = QuantizedTensor(formats[not row], tuple(parts[first : first + sizes[not row]]))
    return Pair(made, None) if row else Pair(None, made)


@remembered
def _weight_formats(spec: LinearSpec) -> tuple[tuple[Format, Format], tuple[int, int]]:
    """The formats of w, rowwise and columnwise, and how many parts they have."""
    formats = spec.recipe.w.rowwise.format, spec.recipe.w.columnwise.format
    return formats, (len(formats[0].parts), len(formats[1].parts))


def _rounded(spec: LinearSpec, tensor: str, member: str, values: Tensor, record: bool = True) -> Tensor:
    """The result y or dx, rounded by its quantizer where the recipe has one."""
    quantizers = spec.quantizers(tensor)
    if quantizers is None:
        return values
    padded = quantizers.rowwise.format.padded(values)
    (pair,) = quantize(spec, tensor, [padded], row=True, col=False, members=[member], record=record)
    return _part(pair.rowwise().dequantize(values.dtype), *values.shape)


def linear_fwd(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], cached: list[Tensor], ticket: Tensor, kind: int,
    save: bool, record: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """x [..., K], weights [N_i, K] -> (y_i, the parts of x kept for wgrad; none where wgrad reads x itself).

    `save`: there will be a wgrad. `record`: gradients are enabled, so amaxes count for delayed scales.
    """
    spec = spec_of(ticket)
    comm, options, rows = spec.style.fprop, spec.recipe.fprop, _tokens_as_rows(spec, x)
    check_compiled(spec)
    spec.runtime.begin_forward(spec, record)
    operand, kept = x_of_forward(spec, rows, save, record)
    pairs = _weight_pairs(spec, spec.members, weights, cached, x.dtype, row=True, col=False, record=record)
    dtype = options.out_dtype or x.dtype
    ys = []
    for member, weight, w, bias in zip(spec.members, weights, pairs, biases, strict=True):
        features, padded = weight.shape[0], w.rowwise().shape[0]
        inside = (
            None if bias is None or comm.reduce else bias if padded == features else F.pad(bias, (0, padded - features))
        )
        gemm = Gemm("fprop", w.rowwise(), dtype, bias=inside, options=options)
        y = token_gemm(spec, comm, spec.overlap.fprop, [operand], [gemm], dtype).wait()
        y = _part(y, y.shape[0], features)
        y = y + bias.to(y.dtype) if bias is not None and comm.reduce else y
        y = _rounded(spec, "y", member, y, record)
        ys.append(y if x.dim() == 2 else y.view(_y_shape(spec, x, features)))
    return ys, kept


def linear_bwd(
    dys: list[Tensor], saved: list[Tensor], weights: list[Tensor], cached: list[Tensor], ticket: Tensor, kind: int,
    dtype: torch.dtype, used: list[int], needs_dx: bool, needs_dw: list[bool], needs_db: list[bool],
) -> list[Tensor]:  # fmt: skip
    """dy_i [..., N_i] of the `used` members and what forward saved -> those gradients that are needed, in the order
    dx [M, K] in `dtype`, that of x, dw_i, db_i. Without dw_i where they wait (`delay_wgrad`)."""
    spec = spec_of(ticket)
    spec.runtime.in_layer_backward()
    members = [spec.members[i] for i in used]
    rows = [_matrix(dy) for dy in dys]
    dy_rows, dy_cols = _start_dy(spec, members, rows, needs_dx, any(needs_dw))
    x_col = x_of_backward(spec, saved, _x_tokens(spec, len(rows[0]))) if any(needs_dw) else None
    grads, dx = [], None
    if needs_dx:
        options = spec.recipe.dgrad
        out = options.out_dtype or dtype
        ws = _weight_pairs(spec, members, weights, cached, dtype, row=False, col=True, record=True)
        gemms = [Gemm("dgrad", w.columnwise(), out if len(rows) == 1 else torch.float32, options=options) for w in ws]
        dx = token_gemm(spec, spec.style.dgrad, spec.overlap.dgrad, dy_rows, gemms, out)
    if x_col is not None:
        x_whole = x_col()
        wgrads = (
            (member, partial(_wgrad, spec, dy_col(), x_whole, w.shape, w.dtype))
            for member, dy_col, w, needed in zip(members, dy_cols, weights, needs_dw, strict=True) if needed
        )  # fmt: skip
        if _waits(spec.delay_wgrad, needs_dx):
            spec.runtime.waiting.extend(wgrads)
        else:
            grads += [wgrad() for _, wgrad in wgrads]
    grads += [
        dy.sum(0, dtype=torch.float32).to(w.dtype) for dy, w, need in zip(rows, weights, needs_db, strict=True) if need
    ]
    if dx is None:
        return grads
    whole = dx.wait()
    whole = _part(whole, whole.shape[0], weights[0].shape[1])
    return [_rounded(spec, "dx", spec.members[0], whole).to(dtype), *grads]


def _wgrad(
    spec: LinearSpec, dy: QuantizedTensor, x: QuantizedTensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The gradient of a weight of this shape [N, K] and dtype, from operands that may be padded."""
    return _part(contract_gemm(spec, dy, x, dtype), shape[0], shape[1]).to(dtype)


def _waits(delay: bool, needs_dx: bool) -> bool:
    """Whether wgrad is left to `backward_dw`. Nobody waits for a layer without dx, and an op without a result would be
    dropped from a compiled graph."""
    return delay and needs_dx


def _start_dy(
    spec: LinearSpec, members: Sequence[str], rows: Sequence[Tensor], row: bool, col: bool
) -> tuple[list[Any], list[Columnwise]]:
    """dgrad's operands, and wgrad's when they are asked for; a travelling dy starts here."""
    if spec.style.gathers == "dy":
        (dy,) = rows
        rowwise, columnwise = dy_of_backward(spec, dy, row, col)
        return [rowwise], [columnwise]
    pairs = quantize(spec, "dy", rows, row=row, col=col, members=members)
    return [pair.row for pair in pairs], [pair.columnwise for pair in pairs]


def _x_tokens(spec: LinearSpec, dy_tokens: int) -> int:
    """The tokens of x on this rank, from those of dy."""
    return {"x": dy_tokens // spec.tp, "dy": dy_tokens * spec.tp, None: dy_tokens}[spec.style.gathers]


def _linear_fwd_fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], cached: list[Tensor], ticket: Tensor, kind: int,
    save: bool, record: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Shapes only, for torch.compile."""
    spec, tokens = spec_of(kind), x.numel() // x.shape[-1]
    dtype = spec.recipe.fprop.out_dtype or x.dtype
    ys = [x.new_empty(_y_shape(spec, x, w.shape[0]), dtype=dtype) for w in weights]
    if not save or spec.saves_x(tokens):
        return ys, []
    features = x.shape[-1] + -x.shape[-1] % spec.units[2]
    padded = tokens + -tokens % spec.units[0]
    shape = (tokens, features) if spec.saves_rowwise(tokens) else (features, padded)
    return ys, list(spec.recipe.x.columnwise.format.empty(shape, dtype=x.dtype, device=x.device).parts)


def _linear_bwd_fake(
    dys: list[Tensor], saved: list[Tensor], weights: list[Tensor], cached: list[Tensor], ticket: Tensor, kind: int,
    dtype: torch.dtype, used: list[int], needs_dx: bool, needs_dw: list[bool], needs_db: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Shapes only, for torch.compile."""
    spec, dy = spec_of(kind), dys[0]
    tokens, features = _x_tokens(spec, dy.numel() // dy.shape[-1]), weights[0].shape[1]
    grads = [dy.new_empty((tokens, features), dtype=dtype)] if needs_dx else []
    now = not _waits(spec.delay_wgrad, needs_dx)
    grads += [w.new_empty(w.shape) for w, needed in zip(weights, needs_dw, strict=True) if needed and now]
    return grads + [w.new_empty(w.shape[:1]) for w, needed in zip(weights, needs_db, strict=True) if needed]


def _labelled(op: Callable[..., Any], gemm: str) -> Callable[..., Any]:
    """The op, whose transfers belong to its layer and, where nothing finer is said, to this GEMM."""

    @wraps(op)
    def labelled(*args: Any) -> Any:
        with ledger.label(layer=spec_of(args[4]).members[0], direction=gemm):
            return op(*args)

    return labelled


_LIBRARY = torch.library.Library("dlp", "DEF")
_LIBRARY.define(
    "linear_fwd(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor[] cached, Tensor ticket, int kind, bool save,"
    " bool record) -> (Tensor[], Tensor[])"
)
_LIBRARY.define(
    "linear_bwd(Tensor[] dys, Tensor[] saved, Tensor[] weights, Tensor[] cached, Tensor ticket, int kind,"
    " ScalarType dtype, int[] used, bool needs_dx, bool[] needs_dw, bool[] needs_db) -> Tensor[]"
)
for _name, _real, _fake, _gemm in (
    ("linear_fwd", linear_fwd, _linear_fwd_fake, "fprop"), ("linear_bwd", linear_bwd, _linear_bwd_fake, "dgrad"),
):  # fmt: skip
    _LIBRARY.impl(_name, _labelled(_real, _gemm), "CompositeExplicitAutograd")
    torch.library.register_fake(f"dlp::{_name}", _fake, lib=_LIBRARY)


def opaque() -> bool:
    """Whether a linear has to be the opaque ops: where something traces or watches. Elsewhere the functions behind them
    are called as they are, which spares the host more than it needs for a tiny linear."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


class QuantizedLinearFn(torch.autograd.Function):
    """`apply(ticket, kind, count, save, record, delay, x, *weights, *biases, *cached)` -> a tuple of y_i; `count` weights
    and biases; `delay`: the spec's `delay_wgrad`."""

    @staticmethod
    def forward(
        ctx: Any, ticket: Tensor, kind: int, count: int, save: bool, record: bool, delay: bool, x: Tensor, *tensors: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights, biases, cached = list(tensors[:count]), list(tensors[count : 2 * count]), list(tensors[2 * count :])
        run = torch.ops.dlp.linear_fwd if opaque() else linear_fwd
        ys, saved = run(x, weights, biases, cached, ticket, kind, save, record)
        ctx.kind, ctx.count, ctx.delay, ctx.x_shape, ctx.x_dtype = kind, count, delay, x.shape, x.dtype
        ctx.num_saved = len(saved) or 1
        ctx.save_for_backward(ticket, *(saved or [x if save else None]), *weights, *cached)
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        count, (ticket, *tensors) = ctx.count, ctx.saved_tensors
        saved, weights = list(tensors[: ctx.num_saved]), list(tensors[ctx.num_saved : ctx.num_saved + count])
        cached = list(tensors[ctx.num_saved + count :])
        used = [i for i, dy in enumerate(dys) if dy is not None]  # a sibling whose y nobody used has no gradient
        needs = ctx.needs_input_grad[6:]
        needs_dw, needs_db = [needs[1 + i] for i in used], [needs[1 + count + i] for i in used]
        size = len(cached) // count
        run: Any = torch.ops.dlp.linear_bwd if opaque() else linear_bwd
        grads = iter(run(
            [dys[i] for i in used], [] if saved[0] is None else saved, [weights[i] for i in used],
            [part for i in used for part in cached[i * size : (i + 1) * size]], ticket, ctx.kind, ctx.x_dtype, used,
            needs[0], needs_dw, needs_db,
        ))  # fmt: skip
        dx = next(grads).view(ctx.x_shape) if needs[0] else None
        now = not _waits(ctx.delay, needs[0])
        dws = [next(grads) if i in used and needs[1 + i] and now else None for i in range(count)]
        dbs = [next(grads) if i in used and needs[1 + count + i] else None for i in range(count)]
        return None, None, None, None, None, None, dx, *dws, *dbs, *(None for _ in cached)
