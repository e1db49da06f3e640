"""CustomRecipe: a user's function chooses the quantizer of every tensor of a linear.

    CustomRecipe(lambda role: CurrentScaling("e5m2" if role == "linear_grad_output" else "e4m3"))

The function `qfactory` is called as `qfactory(role)`, once for each layer and role. If it has a second parameter without
default, or a second parameter named `layer` or `layer_name`, it is called as `qfactory(role, layer)`. It returns a quantizer
for both orientations, an `Operand` (rowwise, columnwise), or None for high precision. A layer that is constructed explicitly
has no name in a model yet: `layer` is "linear", or "linear_0", "linear_1", ... for siblings. `dlp.set_recipe` passes the names
in the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlp.quant.gemm import GemmOptions
from dlp.quant.quantizer import KeepHighPrecision
from dlp.quant.recipe import Operand, Recipe
from dlp.quant.tensor import Format

# roles of x, w, dy, y and dx
ROLES = ("linear_input", "linear_weight", "linear_grad_output", "linear_output", "linear_grad_input")
RESULTS = ROLES[3:]


@dataclass(frozen=True)
class CustomRecipe:
    """Recipe whose quantizers are chosen by a function, for each layer and tensor.

    Args:
        qfactory: function `qfactory(role)` or `qfactory(role, layer)` that returns a quantizer, an `Operand` of two quantizers,
            or None for high precision. The roles are "linear_input" (x), "linear_weight" (w), "linear_grad_output" (dy),
            "linear_output" (y) and "linear_grad_input" (dx). y and dx are cast and decoded.
        name: name in plans and checkpoints.
        fprop: options of the fprop GEMM.
        dgrad: options of the dgrad GEMM.
        wgrad: options of the wgrad GEMM.
        amax_scope: operands on whose amax tp ranks agree, if tp shards a dimension that a scale spans. "table": operands that
            are gathered; "all": all operands.
        reduce_amax: whether ranks agree on the amaxes of delayed scaling at the step boundary.

    Raises:
        ValueError: when a layer gets its recipe (`for_layer`), for a result of `qfactory` that is no quantizer, no `Operand`
            and not None, and for two operands that a GEMM cannot multiply.

    Examples:
        >>> from dlp.quant.fp8 import CurrentScaling
        >>> def forward_only(role):
        ...     return CurrentScaling() if role in ("linear_input", "linear_weight") else None
        >>> layer = dlp.Linear(64, 64, recipe=dlp.CustomRecipe(forward_only, name="fp8_forward"))
        >>> layer(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    qfactory: Callable[..., Any]
    name: str = "custom"
    fprop: GemmOptions = GemmOptions()
    dgrad: GemmOptions = GemmOptions()
    wgrad: GemmOptions = GemmOptions()
    amax_scope: str = "table"
    reduce_amax: bool = True

    def for_layer(self, layer: str) -> Recipe:
        """Return the recipe of the layer with this name. Raises ValueError for a result of `qfactory` that is no quantizer, no
        `Operand` and not None, and for operands that a GEMM cannot multiply."""
        x, w, dy, y, dx = (self._ask(role, layer) for role in ROLES)
        return Recipe(
            self.name, _operand(x), _operand(w), _operand(dy), self.fprop, self.dgrad, self.wgrad, self.amax_scope,
            self.reduce_amax, y, dx,
        )  # fmt: skip

    def _ask(self, role: str, layer: str) -> Any:
        answer = self.qfactory(role, layer) if _takes_layer(self.qfactory) else self.qfactory(role)
        for quantizer in (getattr(answer, "rowwise", answer), getattr(answer, "columnwise", answer)):
            if quantizer is not None and not isinstance(getattr(quantizer, "format", None), Format):
                raise ValueError(
                    f"{self}: qfactory returned {answer!r} for {role} in {layer!r}; "
                    f"return a quantizer, an Operand(rowwise, columnwise) of two, or None for high precision"
                )
        if role in RESULTS and isinstance(answer, Operand):
            raise ValueError(
                f"{self}: qfactory returned an Operand for {role} in {layer!r}, which is cast in one orientation: return a "
                f"quantizer, or None for high precision"
            )
        return answer

    def __str__(self) -> str:
        return f"{self.name}({getattr(self.qfactory, '__name__', type(self.qfactory).__name__)})"


def _operand(answer: Any) -> Operand:
    pair = getattr(answer, "rowwise", answer), getattr(answer, "columnwise", answer)
    return Operand(*(KeepHighPrecision() if quantizer is None else quantizer for quantizer in pair))


def _takes_layer(qfactory: Callable[..., Any]) -> bool:
    """Return whether `qfactory` takes the name of the layer: it has a second positional parameter, which has no default or is
    named layer or layer_name."""
    _, *others = inspect.signature(qfactory).parameters.values()
    positional = [p for p in others if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return any(p.default is p.empty or p.name in ("layer", "layer_name") for p in positional[:1])
