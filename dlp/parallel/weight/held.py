"""quantized_model_init: layers that hold their weights as codes and scales, and in no other form.

    with dlp.quantized_model_init(recipe="fp8_current", preserve_high_precision_init_val=True):
        model = Net()                                    # dlp's own layers, or dlp.convert of a model
    optimizer = dlp.with_master_weights(model, lambda parameters: AdamW(parameters, lr=1e-3))

The parameter that such a layer shows is a placeholder: shape, dtype and gradient of the weight, no memory, NaN where it
is read. State dicts hold the decoded values, and loading quantizes what is loaded. A step of plain optimizers on codes
would be lost in rounding, so `with_master_weights` (`dlp.parallel.weight.masters`) steps on fp32 weights beside these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlp.parallel.casts import BOTH, Cast
from dlp.parallel.linear.operands import quantize, unflatten
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.weight.local import CastWeights, placeholder, show
from dlp.parallel.weight.values import Values
from dlp.quant import recipe as recipes
from dlp.quant.quantizer import caps_of
from dlp.quant.recipe import Recipe

if TYPE_CHECKING:
    from dlp.parallel.linear.modules import LinearCore


@dataclass(frozen=True)
class _Asked:
    recipe: Any
    preserve: bool


_ASKED: ContextVar[_Asked | None] = ContextVar("dlp_quantized_model_init", default=None)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Linears made inside hold their weights quantized only.

    enabled                           False: as if it were not there
    recipe                            a name, a Recipe or a CustomRecipe, which the layers then run under; None: their own
    preserve_high_precision_init_val  keep the values that were quantized, in host memory, for `with_master_weights`

    A layer whose recipe quantizes no weights is left as it is. ValueError for weights without memory (meta device), for
    one that other modules share, and for recipes whose weight scales follow their history.
    """
    chosen = None if recipe is None else recipes.as_recipe(recipe)
    token = _ASKED.set(_Asked(chosen, preserve_high_precision_init_val) if enabled else None)
    try:
        yield
    finally:
        _ASKED.reset(token)


def hold_quantized(core: LinearCore) -> None:
    """A layer is being made: where a region asks for it, quantize its weights and let go of their values."""
    asked = _ASKED.get()
    if asked is None:
        return
    if asked.recipe is not None:
        core.set_spec(core.with_recipe(asked.recipe.for_layer(core.spec.members[0])))
    w = core.spec.recipe.w
    if not (w.rowwise.format.keeps_source or w.columnwise.format.keeps_source):
        core.cast_weights = QuantizedOnly(core, asked.preserve)


def check_untied(model: nn.Module) -> None:
    """Before a model is converted inside a region: ValueError for a linear's weight that another module needs too."""
    owners: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            first = owners.setdefault(id(parameter), name)
            linear = isinstance(module, nn.Linear) or isinstance(model.get_submodule(first), nn.Linear)
            if _ASKED.get() is not None and parameter is not None and first != name and linear:
                raise ValueError(
                    f"quantized_model_init: {first} and {name} share a parameter, of which codes would be all that is "
                    f"left; untie them, or convert this model outside of the region"
                )


class QuantizedOnly(CastWeights):
    """The weights of one layer. `parts`: as of `CastWeights`; `initial`: the values they were made from, on the host;
    `masters`: the fp32 weights that an optimizer steps on, whose codes they are."""

    def __init__(self, core: LinearCore, preserve: bool) -> None:
        super().__init__()
        self.core = core
        self.recipe = core.spec.recipe
        self.parameters = [getattr(member.module, member.weight) for member in core.members]
        self.masters: list[nn.Parameter] = []
        self._check_can_hold()
        values = [local_values(parameter) for parameter in self.parameters]
        self.write(values)
        self.initial = [value.cpu().clone() for value in values] if preserve else None
        self._show(None)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._show(None)

    def _check_can_hold(self) -> None:
        name = self.core.spec.name
        if any(parameter.is_meta for parameter in self.parameters):
            raise ValueError(
                f"{name}: quantized_model_init quantizes values, and the meta device has none; name a device"
            )
        if any(caps_of(quantizer).slot for quantizer in (self.recipe.w.rowwise, self.recipe.w.columnwise)):
            raise ValueError(
                f"{name}: {self.recipe} scales weights by their history, of which a held weight has none; choose a recipe "
                f"with current or block scales"
            )

    def check(self, recipe: Recipe) -> None:
        """ValueError for a recipe that reads other codes than those held."""
        if recipe.w != self.recipe.w:
            raise ValueError(
                f"{self.core.spec.name}: its weights are held as {self.recipe} only, from which {recipe} cannot be made; "
                f"make the layer outside of quantized_model_init to change its recipe"
            )

    def read(self, spec: LinearSpec) -> list[Tensor] | None:
        self.check(spec.recipe)
        return self.parts

    def retype(self) -> None:
        """Codes are all there is: they stay."""

    def drop(self) -> None:
        """They stay."""

    def casts(self, bound: BoundSpec, weights: Sequence[Tensor], dtype: torch.dtype, values: Values) -> list[Cast]:
        """None: what there is to cast is not here; `write` is called with it."""
        return []

    @torch.no_grad()
    def write(self, values: Sequence[Tensor]) -> None:
        """Quantize this rank's values [N, K] of all members, rounded to the dtype of the parameters, in place."""
        self.initial = None
        rounded = [v.detach().to(p.dtype) for v, p in zip(values, self.parameters, strict=True)]
        self.keep(quantize(self.core.bound, "w", rounded, BOTH))

    def decoded(self) -> list[Tensor]:
        """The values [N, K] that the codes stand for, in the dtype of the parameters."""
        held = unflatten(self.recipe.w, self.parts, len(self.parameters))
        return [
            operands.at(columnwise=False).dequantize(p.dtype)[: local_values(p).shape[0], : local_values(p).shape[1]]
            for operands, p in zip(held, self.parameters, strict=True)
        ]

    @contextmanager
    def shown(self, *, written: bool = False) -> Iterator[None]:
        """Inside, the parameters have the decoded values; `written`: they may be overwritten there."""
        self._show(self.decoded())
        try:
            yield
            if written:
                self._load([local_values(parameter) for parameter in self.parameters])
        finally:
            self._show(None)

    @torch.no_grad()
    def _load(self, values: Sequence[Tensor]) -> None:
        """What was loaded, of which masters are left as they are where it is what their codes stand for."""
        if self.masters:
            for master, old, new in zip(self.masters, self.decoded(), values, strict=True):
                if not torch.equal(old, new):
                    local_values(master).copy_(new)
            values = [local_values(master) for master in self.masters]
        self.write(values)

    def _show(self, values: Sequence[Tensor] | None) -> None:
        for i, parameter in enumerate(self.parameters):
            local = local_values(parameter)
            show(parameter, placeholder(local.shape, local.dtype, local.device) if values is None else values[i])


def local_values(parameter: Tensor) -> Tensor:
    """What this rank has of a parameter, as a plain tensor that autograd does not follow."""
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()
