"""Converted: an op that runs linears of a converted model. The modules of the model keep parameters, names and recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from dlp.ops.linear import Linear
from dlp.parallel.linear.modules import ConvertedLinear


class Converted(Linear):
    """Run linears of a model after `dlp.convert` as one operation of a sequence.

    Names, layer groups and checkpoints of the model do not change. The output of a row-parallel linear is summed over tp
    before the bias is added. Linears with hooks are called as modules.

    Args:
        *modules: one converted linear, or all siblings in their order. For siblings the output is a tuple.

    Shape:
        - x: [..., in_features], of the linear on this rank
        - y: [..., out_features], of the linear on this rank

    Raises:
        ValueError: for modules that are not converted linears, for an incomplete set of siblings, for siblings of which only
            some have a bias, and for linears with `return_bias`.

    Examples:
        >>> model = nn.ModuleDict({"up": nn.Linear(64, 128)})
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", recipe="fp8_current")], dlp.build_mesh())
        >>> ops.Sequential(ops.Converted(model["up"]), ops.GELU())(torch.randn(16, 64)).shape
        torch.Size([16, 128])
    """

    def __init__(self, *modules: nn.Module) -> None:
        nn.Module.__init__(self)
        linears = [module for module in modules if isinstance(module, ConvertedLinear)]
        other = next((type(module).__name__ for module in modules if module not in linears), None)
        if other is not None or not linears:
            raise ValueError(
                f"ops.Converted: a {other} is not a converted linear: pass linears of a model after dlp.convert"
            )
        core, names = linears[0].core, ", ".join(linear.name for linear in linears)
        if [member.module for member in core.members] != linears:
            raise ValueError(f"ops.Converted: {names} do not run as one layer: pass all siblings, in their order")
        if core.bias_apart:
            raise ValueError(
                f"ops.Converted: {names} with return_bias returns more than y: leave return_bias out, and add ops.Bias "
                f"to the sequence"
            )
        biased = [linear.bias is not None for linear in linears]
        if any(biased) != all(biased):
            raise ValueError(
                f"ops.Converted: some of {names} have a bias, and others have none: give all of them a bias, or none"
            )
        vars(self).update(core=core, biased=all(biased), _linears=tuple(linears))

    @property
    def owners(self) -> Sequence[nn.Module]:
        linears: Sequence[nn.Module] = vars(self)["_linears"]
        return linears

    def reset_parameters(self) -> None:
        """Do nothing: call `reset_parameters` of the converted linears instead."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        """Call the converted linears as modules."""
        ys = tuple([linear(x) for linear in self.owners])
        return ys if len(ys) > 1 else ys[0]
