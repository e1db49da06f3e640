"""Handed: activations [..., C] that are quantized already, as a tensor, so that they travel between modules.

A linear whose recipe casts x like this reads the operands as they are; anything else reads the decoded values. Its gradient is
a plain tensor. Kept are both operands of one matrix [M, C], which quantizers made them, and which ranks agreed on its scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from dlp.kernels.ops import LazyMatrix
from dlp.parallel.casts import BOTH, CastContext, CastPlan, Operands, cast, cast_plan
from dlp.parallel.style import COLUMN_SP, LOCAL, ROW_SP
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import Operand, Recipe


class Making(NamedTuple):
    """What made operands: by which quantizers, with scales that these ranks agreed on, None: this one alone. `strict`: nobody
    may decode them to quantize once more."""

    quantizers: Operand
    group: ProcessGroup | None = None
    strict: bool = False


class Handed(Tensor):
    """operands of values [M, C], and how they were made."""

    operands: Operands
    making: Making

    @staticmethod
    def __new__(cls, operands: Operands, making: Making, shape: Sequence[int], dtype: torch.dtype) -> Handed:
        device = operands.at(columnwise=False).payload.device
        made: Handed = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.operands, made.making = operands, making
        return made

    def rows(self) -> Handed:
        """The same as [M, C]."""
        shape = self.numel() // self.shape[-1], self.shape[-1]
        return Handed(self.operands, self.making, shape, self.dtype)

    def tensor(self) -> Tensor:
        """The values, decoded."""
        return self.operands.at(columnwise=False).dequantize(self.dtype).reshape(self.shape)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"Handed({list(self.shape)}, {self.operands.at(columnwise=False).format.name})"

    def __setitem__(self, *where_and_what: Any) -> None:
        _refuse_written("__setitem__", [self])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """detach, alias, clone and views of the same shape keep the operands; whatever else reads the values decodes them.
        TypeError for what would write to it: nothing changes the codes."""
        if func in _SAME and isinstance(args[0], Handed):
            it = args[0]
            return Handed(it.operands, it.making, it.shape, it.dtype)
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            named = {one.name: its for one, its in zip(arguments, args, strict=False)} | (kwargs or {})
            _refuse_written(func, [named.get(one.name) for one in arguments if one.is_write])
        plain = tree_map(lambda value: value.tensor() if isinstance(value, Handed) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


STYLE_THAT_GATHERS = {"x": COLUMN_SP, "dy": ROW_SP}
_SAME = (
    torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view_as.default, torch.ops.aten.clone.default
)  # fmt: skip


def _refuse_written(func: Any, written: Sequence[Any]) -> None:
    if any(isinstance(one, Handed) for one in written):
        raise TypeError(f"{func}: a Handed holds codes, which nothing writes to: write to its tensor()")


def why_not(recipe: Recipe, tensor: str) -> str | None:
    """Why x or dy of this recipe is not quantized apart from its layer; None: it can be."""
    operand = recipe.of(tensor)
    if operand is None or operand.keeps_source:
        return "its recipe quantizes nothing"
    caps = [caps_of(quantizer) for quantizer in (operand.rowwise, operand.columnwise)]
    if any(each.slot is not None for each in caps):
        return "delayed scales belong to the layer that reads it"
    if any(each.origin for each in caps):
        return "it is rounded by chance, by its place in its layer"
    if recipe.units != (1, 1, 1):
        return "it is padded as its layer wants"
    return None


def quantized(
    rows: Tensor | LazyMatrix,
    shape: Sequence[int],
    recipe: Recipe,
    tensor: str,
    group: ProcessGroup | None,
    strict: bool,
) -> Handed:
    """Values [M, C] as a recipe casts x or dy, both orientations. `group`: the ranks that have the other tokens, and agree on
    scales as those that gather x or dy do; None: scales are this rank's."""
    row = LOCAL if group is None else STYLE_THAT_GATHERS[tensor]
    plan = cast_plan(row, recipe, tensor, BOTH, rows.shape[0], group=group)
    (made,) = cast(plan, BOTH, [rows], [tensor], _no_context)
    operand = recipe.of(tensor)
    assert operand is not None
    return Handed(made, Making(operand, group, strict), shape, rows.dtype)


def _no_context(plan: CastPlan, *asked: Any) -> CastContext:
    """Of a recipe without slots and origins (`why_not`)."""
    return CastContext(None, (None,) * len(plan.reads), ((),) * len(plan.reads))
