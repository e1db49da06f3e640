"""Quantize: return a quantized tensor (`dlp.ops.handed`), so that linears of the next module need not cast it.

Before a linear of the same fuser the op does nothing, since the linear casts its input. At the end of a sequence the op
quantizes as `reader` would; without a reader, by the recipe of the `dlp.autocast` region if there is one, else by `recipe`. The
op returns its input if there is neither a reader nor a recipe, or if only the layer that reads the tensor can cast it
(`handed.why_not`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dlp.ops.basic.communication import OfRanks
from dlp.ops.context import OperationContext
from dlp.ops.handed import Handed, bound_reader, quantized, reader_operand, why_not
from dlp.ops.values import HANDED, LAZY, Tensors, Value, rows_of
from dlp.parallel.linear.active import active_region
from dlp.parallel.linear.codes import Reader, recipe_reader, trace_reader
from dlp.quant import recipe as recipes
from dlp.quant.recipe import Operand, Recipe

DENSE_Y = "returns y in high precision: traced calls quantize by a recipe without process_group, or by a reader"
DENSE_DY = "passes dense dy: autograd passes dense gradients between traced ops"


class Quantize(OfRanks):
    """Quantize the output in forward, the gradient of the input in backward, or both.

    A linear reads the quantized tensor if its recipe quantizes in the same way. Otherwise the linear decodes the tensor and
    quantizes it again, with a note in the plan. Some tensors stay in high precision; the plan states the reason. With `recipe`
    these are tensors with delayed scales, padding or stochastic rounding. With `reader` these include tensors with stochastic
    rounding, and dy of a linear that has a bias or siblings.

    Args:
        forward: quantize the output.
        backward: quantize the gradient of the input.
        recipe: name of a recipe, or a `Recipe`, which the recipe of an enabled `dlp.autocast` region replaces; None: only the
            region has a recipe.
        strict: raise ValueError if the tensor cannot be quantized, or if a linear cannot read the quantized tensor.
        process_group: if the next linear gathers token shards: the ranks with these shards, which agree on scales; else None.
        reader: the linear of another module that reads the output (forward) or the gradient (backward). The tensor is cast as
            by this linear, including delayed scales (after `dlp.attach`), padding and agreement over ranks. The linear does not
            become a submodule of the op. None: the recipe decides.

    Shape:
        - input, output: [..., C]

    Raises:
        ValueError: for a reader together with a recipe, a process_group, or both forward and backward.
        TypeError: in forward, for a reader that is no linear of dlp.

    Examples:
        >>> quantize = ops.Sequential(ops.LayerNorm(64), ops.Quantize(recipe="fp8_current"))
        >>> isinstance(quantize(torch.randn(16, 64)), ops.Handed)
        True
    """

    takes = frozenset({LAZY, HANDED})
    passes_through = ("input_quantizer", "grad_output_quantizer")

    def __init__(
        self, forward: bool = True, backward: bool = False, *, recipe: str | Recipe | None = None, strict: bool = False,
        process_group: ProcessGroup | None = None, reader: nn.Module | None = None,
    ) -> None:  # fmt: skip
        if reader is not None and (recipe is not None or process_group is not None or (forward and backward)):
            raise ValueError(
                "Quantize(reader=...) takes recipe and ranks from the reader, which reads either the output or the gradient: "
                "omit recipe and process_group, and use one Quantize for each pass"
            )
        super().__init__(process_group)
        vars(self)["reader"] = reader  # not a submodule: the layer belongs to another module
        self._high_precision: dict[str, str] = {}  # "x" or "dy" -> reason why the last call did not quantize
        self.on_forward, self.on_backward, self.strict = forward, backward, strict
        self.recipe = None if recipe is None else recipes.as_recipe(recipe).for_layer("quantize")
        self._by_recipe = recipe_reader(self.recipe) if self.recipe is not None and process_group is None else None

    def own_recipe(self) -> Recipe | None:
        return self.recipe

    @property
    def traced_note(self) -> str:  # type: ignore[override]
        """Text for the plan: how traced calls differ; "": no difference."""
        dense_y = self.on_forward and self.reader is None and self._recipe_reader() is None
        return "; ".join([DENSE_Y] * dense_y + [DENSE_DY] * self.on_backward)

    @property
    def plan_notes(self) -> Sequence[str]:
        results = {"x": "y", "dy": "dx"}
        return [f"returns {results[tensor]} in high precision: {why}" for tensor, why in self._high_precision.items()]

    def active_recipe(self) -> Recipe | None:
        """Return the recipe of the enabled autocast region if it has one, else the recipe of this op; None: no recipe."""
        region = active_region()
        own = self.own_recipe()
        recipe = own if region is None or not region.enabled else region.recipe or own
        return None if recipe is None else recipe.for_layer("quantize")

    def _quantized(self, ctx: OperationContext, value: Value, tensor: str) -> Value:
        """Quantize the value as the recipe or the reader of this forward casts `tensor`, "x" or "dy". Return the value
        unchanged if it is already quantized, if there is neither recipe nor reader, or if it cannot be quantized; in the last
        case a strict op raises ValueError."""
        recipe, strict, group, bound = ctx.how
        if isinstance(value, Handed) or (recipe is None and bound is None):
            return value
        if bound is not None:
            operand = reader_operand(self.reader, bound, tensor, ctx.record)
            recipe, why, quantize = bound.spec.recipe, operand.why_not(value), partial(operand.cast, value, strict)
        else:
            why = why_not(recipe, tensor, value.shape) or ""
            quantize = partial(quantized, rows_of(value), value.shape, recipe, tensor, group, strict)
        if why and strict:
            raise ValueError(f"Quantize(strict=True): {recipe}: {why}; leave strict out")
        if why:
            self._high_precision[tensor] = f"{recipe}: {why}"
            return value
        self._high_precision.pop(tensor, None)
        return quantize()

    def op_forward(
        self, ctx: OperationContext, input_: Value, *, prev_op_grad_output_quantizer: Operand | None = None,
        next_op_input_quantizer: Operand | None = None, **kwargs: Any,
    ) -> Value:  # fmt: skip
        bound = None if self.reader is None else bound_reader(self.reader)
        # Backward uses the same settings, even if they change meanwhile
        ctx.how = self.active_recipe(), self.strict, self.process_group, bound
        ctx.quantizes_dx = self.on_backward and prev_op_grad_output_quantizer is None
        if not self.on_forward or next_op_input_quantizer is not None:
            return input_
        return self._quantized(ctx, input_, "x")

    def op_backward(self, ctx: OperationContext, grad_output: Value) -> tuple[Value, Sequence[Tensor | None]]:
        return (self._quantized(ctx, grad_output, "dy") if ctx.quantizes_dx else grad_output), ()

    def plain(self, x: Tensors, *extra_inputs: Tensor, **kwargs: Any) -> Tensors:
        """Return a view of x, to which the codes for the linear that reads x are attached; or x itself if x stays in high
        precision. The gradient is dense."""
        reader = self._traced_reader() if self.on_forward else None
        return x if reader is None or isinstance(x, tuple) else reader.cast(x)

    def _traced_reader(self) -> Reader | None:
        """Return the cast of the linear that reads x; None: x stays in high precision."""
        if self.reader is None:
            return self._recipe_reader()
        layer: Any = self.reader
        bound = bound_reader(layer)
        lone = bound.spec.slots and not bound.session.attached  # delayed scales without a step boundary
        return None if lone else layer.core.reader(bound)

    def _recipe_reader(self) -> Reader | None:
        """Return the cast by the recipe of this op, with scales of this rank alone; None: there is no recipe, or ranks agree on
        scales."""
        return self._by_recipe


class HandOver(Quantize):
    """The Quantize that follows a `Linear(output="quantized")`, or precedes a `Linear(grad_input="quantized")`.

    It quantizes by the recipe of the linear; for token shards the tp ranks agree on scales. which: "forward" to quantize y,
    "backward" to quantize dx.
    """

    def __init__(self, linear: Any, which: str) -> None:
        super().__init__(which == "forward", which == "backward")
        spec = linear.core.spec
        shards = (spec.style.cut_dy if which == "forward" else spec.style.cut_x) == 0 and spec.tp > 1
        self.process_group = spec.tp_group if shards else None
        vars(self)["linear"] = linear
        if which == "backward":
            vars(self)["traced_by"] = linear

    def _recipe_reader(self) -> Reader | None:
        return None if self.process_group is not None else trace_reader(vars(self)["linear"].core.bound.trace_id)

    def own_recipe(self) -> Recipe | None:
        recipe: Recipe = vars(self)["linear"].core.spec.recipe
        return recipe
