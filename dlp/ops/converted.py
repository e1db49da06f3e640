"""Converted: linears that `dlp.convert` made, as an op. Their parameters, names and recipes stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from dlp.ops.linear import Linear
from dlp.parallel.linear.modules import ConvertedLinear


class Converted(Linear):
    """One linear, or siblings in their order, which return a tuple. A `Linear` in all else: row-parallel ones are summed over
    tp, then their bias is added. Made after conversion; where a linear has hooks, it is called as a module.

    Raises ValueError for modules that are no converted linears, some of several siblings, and linears with a prologue or
    `return_bias`, which are called otherwise than by an x.
    """

    def __init__(self, *modules: nn.Module) -> None:
        nn.Module.__init__(self)
        linears = [module for module in modules if isinstance(module, ConvertedLinear)]
        other = next((type(module).__name__ for module in modules if module not in linears), None)
        if other is not None or not linears:
            raise ValueError(f"ops.Converted: a {other} is no linear that dlp.convert made")
        core, names = linears[0].core, ", ".join(linear.name for linear in linears)
        if [member.module for member in core.members] != linears:
            raise ValueError(f"ops.Converted: {names} do not run as one: pass siblings, all of them, in their order")
        if core.spec.prologue is not None or core.bias_apart:
            what = "return_bias" if core.bias_apart else "a prologue"
            raise ValueError(
                f"ops.Converted: {names} with {what} is not called with x alone: leave that to ops around it"
            )
        biased = [linear.bias is not None for linear in linears]
        if any(biased) != all(biased):
            raise ValueError(f"ops.Converted: of {names} some have a bias, and some have none: give it to all")
        vars(self).update(core=core, biased=all(biased), _linears=tuple(linears))

    @property
    def owners(self) -> Sequence[nn.Module]:
        linears: Sequence[nn.Module] = vars(self)["_linears"]
        return linears

    def reset_parameters(self) -> None:
        """Nothing: its linears have their own."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        """The modules themselves."""
        ys = tuple([linear(x) for linear in self.owners])
        return ys if len(ys) > 1 else ys[0]
