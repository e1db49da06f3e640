"""Quantize: hands a quantized tensor to the next module, so that nothing is cast twice.

Before a linear of the same fuser it does nothing: that casts what it is given. At the end of a sequence it casts by `recipe`,
or by that of the `dlp.autocast` region around it; with neither, or where a layer must cast itself, the values go on as they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from dlp.ops.handed import Handed, quantized, why_not
from dlp.ops.op import BasicOperation
from dlp.ops.values import HANDED, LAZY, Value, rows_of
from dlp.parallel.model.autocast import active_region
from dlp.quant import recipe as recipes
from dlp.quant.recipe import Recipe


class Quantize(BasicOperation):
    """forward, backward: what is quantized, the output, the gradient of the input; `strict`: a linear that cannot read it as
    it is raises ValueError, where else it is decoded and quantized once more, with a note. `process_group`: the ranks that have
    the other tokens, where a linear gathers them: they agree on scales as it would."""

    takes = frozenset({LAZY, HANDED})
    looked_through = ("input_quantizer", "grad_output_quantizer")
    traced_otherwise = "hands on values, which the linear that reads them casts: its traced ops take dense x and dy"

    def __init__(
        self, forward: bool = True, backward: bool = False, *, recipe: str | Recipe | None = None, strict: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.on_forward, self.on_backward, self.strict = forward, backward, strict
        self.group = process_group
        self.recipe = None if recipe is None else recipes.as_recipe(recipe).for_layer("quantize")

    def own_recipe(self) -> Recipe | None:
        return self.recipe

    def chosen(self) -> Recipe | None:
        region = active_region()
        own = self.own_recipe()
        asked = own if region is None or not region.enabled else region.recipe or own
        return None if asked is None else asked.for_layer("quantize")

    def _handed(self, value: Value, recipe: Recipe | None, tensor: str) -> Value:
        if recipe is None or isinstance(value, Handed) or why_not(recipe, tensor) is not None:
            if self.strict and recipe is not None and not isinstance(value, Handed):
                raise ValueError(f"Quantize(strict=True): {recipe}: {why_not(recipe, tensor)}; leave strict away")
            return value
        return quantized(rows_of(value), value.shape, recipe, tensor, self.group, self.strict)

    def op_forward(
        self, ctx: Any, input_: Value, *, prev_op_grad_output_quantizer: Any = None, next_op_input_quantizer: Any = None,
        **kwargs: Any,
    ) -> Value:  # fmt: skip
        ctx.recipe = self.chosen()
        ctx.hands_back = self.on_backward and prev_op_grad_output_quantizer is None
        if not self.on_forward or next_op_input_quantizer is not None:
            return input_
        return self._handed(input_, ctx.recipe, "x")

    def op_backward(self, ctx: Any, grad_output: Value) -> tuple[Value, Sequence[Any]]:
        return (self._handed(grad_output, ctx.recipe, "dy") if ctx.hands_back else grad_output), ()

    def plain(self, x: Any, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """The values, which a linear that is traced casts: nothing is cast twice there."""
        return x


class HandOver(Quantize):
    """That of a `Linear(output="quantized")` or `grad_input="quantized"`: by its recipe. Of token shards, over its tp ranks."""

    def __init__(self, linear: Any, which: str) -> None:
        super().__init__(which == "forward", which == "backward")
        spec = linear.core.spec
        shards = (spec.style.cut_dy if which == "forward" else spec.style.cut_x) == 0 and spec.tp > 1
        self.group = spec.tp_group if shards else None
        vars(self)["part_of"] = vars(self)["linear"] = linear

    def own_recipe(self) -> Recipe | None:
        recipe: Recipe = vars(self)["linear"].core.spec.recipe
        return recipe
