"""quantized_model_init: layers that hold their weights as codes and scales, and in no other form.

    with dlp.quantized_model_init(recipe="fp8_current", preserve_high_precision_init_val=True):
        model = Net()                                    # dlp's own layers, or dlp.convert of a model
    optimizer = dlp.with_master_weights(model, lambda parameters: AdamW(parameters, lr=1e-3))

The parameter that such a layer shows is a placeholder: shape, dtype and gradient of the weight, no memory, NaN where it
is read. State dicts hold the decoded values, and loading quantizes what is loaded. A step of plain optimizers on codes
would be lost in rounding, so `with_master_weights` keeps fp32 weights beside the optimizer's states, wherever these
live, steps on them and quantizes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlp.parallel.casts_together import Cast
from dlp.parallel.operands import quantize, unflatten
from dlp.parallel.spec import LinearSpec
from dlp.parallel.values import Values
from dlp.parallel.weight import CastWeights, placeholder, show
from dlp.quant import recipe as recipes
from dlp.quant.quantizer import slot_options
from dlp.quant.recipe import Recipe

if TYPE_CHECKING:
    from dlp.parallel.linear import LinearCore


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
    chosen = None if recipe is None else recipes.made(recipe)
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
    """The weights of one layer. `parts`: as of `CastWeights`; `initial`: the values they were made from, on the host."""

    def __init__(self, core: LinearCore, preserve: bool) -> None:
        super().__init__()
        self.core = core
        self.recipe = core.spec.recipe
        self.parameters = [getattr(member.module, member.weight) for member in core.members]
        self.initial: list[Tensor] | None = None
        self._check_can_hold()
        values = [_local(parameter) for parameter in self.parameters]
        if preserve:
            self.initial = [value.cpu().clone() for value in values]
        self.write(values)
        self._show(None)

    def _check_can_hold(self) -> None:
        name = self.core.spec.name
        if any(parameter.is_meta for parameter in self.parameters):
            raise ValueError(
                f"{name}: quantized_model_init quantizes values, and the meta device has none; name a device"
            )
        if any(slot_options(quantizer) for quantizer in (self.recipe.w.rowwise, self.recipe.w.columnwise)):
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

    def casts(self, spec: LinearSpec, weights: Sequence[Tensor], dtype: torch.dtype, values: Values) -> list[Cast]:
        """None: what there is to cast is not here; `write` is called with it."""
        return []

    @torch.no_grad()
    def write(self, values: Sequence[Tensor]) -> None:
        """Quantize this rank's values [N, K] of all members, rounded to the dtype of the parameters, in place."""
        rounded = [v.detach().to(p.dtype) for v, p in zip(values, self.parameters, strict=True)]
        self.keep(quantize(self.core.spec, "w", rounded, row=True, col=True))

    def decoded(self) -> list[Tensor]:
        """The values [N, K] that the codes stand for, in the dtype of the parameters."""
        pairs = unflatten(self.recipe.w, self.parts, len(self.parameters))
        return [
            pair.rowwise().dequantize(p.dtype)[: _local(p).shape[0], : _local(p).shape[1]]
            for pair, p in zip(pairs, self.parameters, strict=True)
        ]

    @contextmanager
    def shown(self, *, written: bool = False) -> Iterator[None]:
        """Inside, the parameters have the decoded values; `written`: they may be overwritten there."""
        self._show(self.decoded())
        try:
            yield
            if written:
                self.write([_local(parameter) for parameter in self.parameters])
        finally:
            self._show(None)

    def _show(self, values: Sequence[Tensor] | None) -> None:
        for i, parameter in enumerate(self.parameters):
            local = _local(parameter)
            show(parameter, placeholder(local.shape, local.dtype, local.device) if values is None else values[i])


def _local(parameter: Tensor) -> Tensor:
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()


def with_master_weights(model: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer:
    """`make`'s optimizer over the model's parameters, with fp32 weights of its own for those that are held quantized:
    the preserved initial values, or the decoded ones. Its step moves gradients there, and quantizes what comes out."""
    held = {id(p): (only, i) for only in _held(model) for i, p in enumerate(only.parameters)}
    masters = {id(p): _master(p, *held[id(p)]) for p in model.parameters() if id(p) in held}
    optimizer = make([masters.get(id(p), p) for p in model.parameters()])

    def before(*_: Any) -> None:
        for parameter in model.parameters():
            if id(parameter) in held and parameter.grad is not None:
                masters[id(parameter)].grad, parameter.grad = parameter.grad.float(), None

    def after(*_: Any) -> None:
        for only in _held(model):
            only.write([_local(masters[id(parameter)]) for parameter in only.parameters])

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def _held(model: nn.Module) -> list[QuantizedOnly]:
    found = (getattr(getattr(module, "core", None), "cast_weights", None) for module in model.modules())
    return list(dict.fromkeys(each for each in found if isinstance(each, QuantizedOnly)))


def _master(parameter: nn.Parameter, only: QuantizedOnly, index: int) -> nn.Parameter:
    values = (only.initial or only.decoded())[index].to(parameter.device, torch.float32)
    if not isinstance(parameter, DTensor):
        return nn.Parameter(values.clone())
    whole = DTensor.from_local(
        values.clone(), parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
    return nn.Parameter(whole)
