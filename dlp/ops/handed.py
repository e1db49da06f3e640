"""Handed: a quantized tensor [..., C], by which modules pass quantized activations and gradients to each other.

A `Handed` holds the rowwise and the columnwise operand of one matrix [M, C], their quantizers, and the group whose ranks
agreed on the scales. A linear whose recipe quantizes in the same way reads these operands; all other operations read the
decoded values. The gradient of a `Handed` is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from dlp.kernels.ops import LazyMatrix
from dlp.parallel.casts import BOTH, Operands, cast, cast_plan, operand_shape
from dlp.parallel.linear.active import active_region
from dlp.parallel.linear.codes import DRAWS, UNQUANTIZED, Reader, inside_only, no_context
from dlp.parallel.linear.plan import Route
from dlp.parallel.linear.quantize import as_matrix, cast_context, plan_of, trimmed
from dlp.parallel.linear.state import BoundSpec, LayerState
from dlp.parallel.style import COLUMN_SP, LOCAL, ROW_SP
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import Operand, Recipe


class CastRecord(NamedTuple):
    """How the operands of a `Handed` were quantized.

    quantizers   the rowwise and the columnwise quantizer
    group        the ranks that agreed on the scales; None: this rank computed the scales alone
    strict       whether a linear that cannot read the operands raises ValueError; False: it decodes and quantizes again
    bound        the spec of the only linear that may read the operands; None: any linear that casts in the same way
    """

    quantizers: Operand
    group: ProcessGroup | None = None
    strict: bool = False
    bound: BoundSpec | None = None


class Handed(Tensor):
    """Quantized tensor, by which modules pass quantized activations and gradients to each other.

    A linear whose recipe quantizes in the same way reads the operands; all other operations read decoded values. `ops.Quantize`
    returns a `Handed`. It is read-only.

    Args:
        operands: rowwise and columnwise operand of the matrix [M, C].
        cast_record: quantizers of the operands, and the ranks that agreed on the scales.
        shape: shape [..., C] of the tensor.
        dtype: dtype of decoded values.

    Shape:
        - decoded values: [..., C]

    Raises:
        TypeError: when an operation writes to the tensor.

    Examples:
        >>> handed = ops.Sequential(ops.LayerNorm(64), ops.Quantize(recipe="fp8_current"))(torch.randn(16, 64))
        >>> handed.tensor().shape  # decoded
        torch.Size([16, 64])
    """

    operands: Operands
    cast_record: CastRecord

    @staticmethod
    def __new__(cls, operands: Operands, cast_record: CastRecord, shape: Sequence[int], dtype: torch.dtype) -> Handed:
        device = operands.at(columnwise=False).payload.device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, operands: Operands, cast_record: CastRecord, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.operands, self.cast_record = operands, cast_record

    def rows(self) -> Handed:
        """Return a `Handed` [M, C] with the same operands."""
        shape = self.numel() // self.shape[-1], self.shape[-1]
        return Handed(self.operands, self.cast_record, shape, self.dtype)

    def tensor(self) -> Tensor:
        """Return the decoded values [..., C]."""
        decoded = self.operands.at(columnwise=False).dequantize(self.dtype)
        return trimmed(decoded, self.shape[-1]).reshape(self.shape)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"Handed({list(self.shape)}, {self.operands.at(columnwise=False).format.name})"

    def __setitem__(self, *where_and_what: Any) -> None:
        _refuse_written("__setitem__", [self])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation of torch. detach, alias, clone and view_as return a `Handed` with the same operands; all other
        operations run on the decoded values. Raises TypeError for an operation that would write to a `Handed`."""
        if func in _KEEPS_OPERANDS and isinstance(args[0], Handed):
            x = args[0]
            return Handed(x.operands, x.cast_record, x.shape, x.dtype)
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            named = {one.name: value for one, value in zip(arguments, args, strict=False)} | (kwargs or {})
            _refuse_written(func, [named.get(one.name) for one in arguments if one.is_write])
        plain = tree_map(lambda value: value.tensor() if isinstance(value, Handed) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


STYLE_THAT_GATHERS = {"x": COLUMN_SP, "dy": ROW_SP}
_KEEPS_OPERANDS = (
    torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view_as.default, torch.ops.aten.clone.default
)  # fmt: skip


def _refuse_written(func: Any, written: Sequence[Any]) -> None:
    if any(isinstance(one, Handed) for one in written):
        raise TypeError(f"{func}: a Handed is read-only: write to the result of tensor()")


def why_not(recipe: Recipe, tensor: str, shape: Sequence[int]) -> str | None:
    """Return the reason why no module besides the layer that reads `tensor` ("x" or "dy", of shape [..., C]) can quantize the
    tensor by this recipe, for example because the recipe does not quantize it. None: another module can quantize it."""
    operand = recipe.of(tensor)
    if operand is None or operand.keeps_source:
        return UNQUANTIZED
    caps = [caps_of(quantizer) for quantizer in (operand.rowwise, operand.columnwise)]
    if any(each.slot is not None for each in caps):
        return "delayed scales belong to the layer that reads the tensor"
    if any(each.origin for each in caps):
        return DRAWS
    matrix = torch.Size(shape[:-1]).numel(), shape[-1]
    if any(sorted(operand_shape(recipe, tensor, matrix, columnwise)) != sorted(matrix) for columnwise in (False, True)):
        return f"the layer that reads the tensor pads {list(matrix)} to complete blocks"
    return None


BIAS_SUMS = "the bias sums dy"


def quantized(
    rows: Tensor | LazyMatrix,
    shape: Sequence[int],
    recipe: Recipe,
    tensor: str,
    group: ProcessGroup | None,
    strict: bool,
) -> Handed:
    """Quantize `rows` [M, C] rowwise and columnwise, as `recipe` casts `tensor` ("x" or "dy"); return a `Handed` of `shape`
    [..., C].

    group    the ranks that hold the token shards, and agree on scales; None: this rank computes the scales alone
    strict   see `CastRecord`
    """
    row = LOCAL if group is None else STYLE_THAT_GATHERS[tensor]
    plan = cast_plan(row, recipe, tensor, BOTH, rows.shape[0], group=group)
    (operands,) = cast(plan, BOTH, [rows], [tensor], no_context)
    quantizers = recipe.of(tensor)
    assert quantizers is not None
    return Handed(operands, CastRecord(quantizers, group, strict), shape, rows.dtype)


@dataclass(frozen=True)
class LayerOperand(Operand):
    """Quantizers of x or dy of a linear. A neighbouring op casts its output or gradient with them, so that the linear need not
    cast this tensor.

    bound        the spec under which the linear reads the tensor
    tensor       "x" or "dy"
    wgrad        for dy: whether wgrad runs; for x: whether backward reads x, for wgrad or because x was clipped
    record       whether gradients are enabled, so that amaxes are recorded for delayed scales
    obstacle     reason why the linear must receive high precision; "": none is known yet, but `why_not` may find one
    """

    bound: BoundSpec
    tensor: str
    wgrad: bool
    record: bool
    obstacle: str = ""

    def cast(self, value: Any, strict: bool = False) -> Handed:
        """Cast x or dy [..., C] as the linear would. Call `cast` only if `why_not` returns "". strict: see `CastRecord`."""
        spec, rows, route = self.bound.spec, as_matrix(value), self._route(value)
        assert route.before is not None
        context = partial(cast_context, self.bound)
        member = spec.owners(self.tensor)[:1]
        (operands,) = cast(route.before, route.cast_before, [rows], member, context, record=self.record)
        record = CastRecord(Operand(self.rowwise, self.columnwise), strict=strict, bound=self.bound)
        return Handed(operands, record, value.shape, rows.dtype)

    def _route(self, value: Any) -> Route:
        """Return the `Route` (casts and gathers) of the tensor to the GEMMs of the linear. dy is always cast rowwise, too, so
        that a `Handed` can be decoded."""
        if self.tensor == "x":
            plan = self.bound.plans.get(value.shape) or plan_of(self.bound, value.shape)
            return plan.x[self.wgrad]
        rows = value.shape[:-1].numel()
        return (self.bound.plans_back.get(rows) or self.bound.plan_back(rows)).dys[True, self.wgrad]

    def why_not(self, value: Any) -> str:
        """Return the reason why only the linear itself can cast x or dy [..., C]; "": `cast` can cast the tensor."""
        if self.keeps_source:
            return UNQUANTIZED
        return self.obstacle or inside_only(self.bound.spec, self._route(value))


def bound_reader(layer: Any) -> BoundSpec:
    """Return the spec under which `layer`, a linear outside of the fuser, would run now: the spec of the layer or, in an
    autocast region, the spec that the region requires. Raises TypeError for a module that is no linear of dlp."""
    core = getattr(layer, "core", None)
    if not isinstance(core, LayerState):
        raise TypeError(
            f"reader must be a linear of dlp; got {type(layer).__name__}: pass the layer that reads the tensor, or pass "
            f"recipe= instead"
        )
    # torch.compile cannot trace the lookup of the autocast region
    region = None if torch.compiler.is_dynamo_compiling() else active_region()
    return core.bound if region is None else region.spec_for(core)


def reader_operand(layer: Any, bound: BoundSpec, tensor: str, record: bool) -> LayerOperand:
    """Return the quantizers with which `layer`, a linear outside of the fuser, casts `tensor` ("x" or "dy") under `bound`."""
    operand, core, obstacle = bound.spec.recipe.of(tensor), layer.core, ""
    assert operand is not None
    biased = not core.bias_apart and any(each.module._parameters.get(each.bias) is not None for each in core.members)
    if bound.spec.slots and not bound.session.attached:
        obstacle = "delayed scales without dlp.attach belong to the layer that reads the tensor"
    elif tensor == "dy" and biased:
        obstacle = BIAS_SUMS
    return LayerOperand(operand.rowwise, operand.columnwise, bound, tensor, True, record, obstacle)


def quantize_for(value: Tensor, quantizers: Operand | Reader | None) -> Tensor:
    """Quantize a tensor inside a user-defined op, as the neighbouring linear would.

    Args:
        value: output of the op, or gradient of the input of the op.
        quantizers: `next_op_input_quantizer` to quantize the output, `prev_op_grad_output_quantizer` to quantize the gradient.

    Shape:
        - value: [..., C]

    Returns:
        A `Handed`, which the linear reads without another cast; in traced calls a dense tensor with the operands as an
        attribute. The result is `value` itself if `value` is already quantized, if `quantizers` is None, if the recipe does not
        quantize the tensor, or if only the linear can cast it. In the last case the printed plan states the reason.

    Raises:
        TypeError: for quantizers that the fuser did not pass to the op.

    Examples:
        >>> class Half(ops.BasicOperation):
        ...     def op_forward(self, ctx, input_, *, next_op_input_quantizer, **others):
        ...         return ops.quantize_for(input_ / 2, next_op_input_quantizer)
        >>> ops.Sequential(Half(), ops.Linear(64, 64, recipe="fp8_current"))(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """
    if quantizers is None or isinstance(value, Handed):
        return value
    if isinstance(quantizers, Reader):
        return quantizers.cast(value)
    if not isinstance(quantizers, LayerOperand):
        raise TypeError(
            f"quantize_for takes the quantizers that op_forward receives from the fuser; got a {type(quantizers).__name__}: "
            f"to quantize by a recipe, use ops.Quantize"
        )
    why = quantizers.why_not(value)
    if why and why is not UNQUANTIZED:
        spec = quantizers.bound.spec
        quantizers.bound.session.note(f"{spec.name}: {quantizers.tensor} arrives in high precision: {why}")
    return value if why else quantizers.cast(value)
