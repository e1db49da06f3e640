"""quantized_model_init: layers whose weights exist as codes and scales only.

    with dlp.quantized_model_init(recipe="fp8_current", preserve_high_precision_init_val=True):
        model = Net()                                    # dlp's own layers, or dlp.convert of a model
    optimizer = dlp.with_master_weights(model, lambda parameters: AdamW(parameters, lr=1e-3))

The parameter of such a layer is a placeholder (`dlp.parallel.weight.parameters`): it has shape, dtype and gradient of the
weight, but memory for one element only, and torch calls that need values raise. `Module.to`, `bfloat16` and the like move the
codes to the device and change only the dtype in which values are read. State dicts contain the decoded values, and loading
quantizes the loaded values. An optimizer step that is smaller than the spacing of the codes would be lost, so the optimizer of
`with_master_weights` steps on separate fp32 weights, the masters:

    before a step   gradients move from the placeholders to the masters
    step            the optimizer steps on the masters
    after a step    the masters are quantized into the layers

Loaded weights become the masters, from which the next step starts. `dlp.state_dict` contains the masters in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from dlp.parallel.casts import BOTH, Cast
from dlp.parallel.linear.quantize import quantize, unflatten
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import LayerWeights, weights_in
from dlp.parallel.weight.base import Values
from dlp.parallel.weight.local import LocalWeight, local_tensor, local_values
from dlp.parallel.weight.parameters import (
    REGION,
    Region,
    check_has_values,
    check_without_history,
    hide_values,
    holds,
    show_values,
)
from dlp.quant import recipe as recipes
from dlp.quant.fake import is_fake
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import as_bytes

LOG = logging.getLogger("dlp")


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Context manager in which linears are constructed with quantized weights only, without high-precision weights.

    A layer whose recipe does not quantize weights is constructed with high-precision weights.

    Args:
        enabled: False: the region has no effect.
        recipe: name of a recipe, a `Recipe` or a `CustomRecipe`, under which the layers then run; None: the recipe of each
            layer. `dlp.convert` uses this recipe for linears without a recipe from layer groups.
        preserve_high_precision_init_val: keep the initial values in host memory for `dlp.with_master_weights`.

    Yields:
        None.

    Raises:
        ValueError: for weights on the meta device, with NaN or Inf, or that other modules share; for recipes of
            quantization-aware training, and for recipes with delayed scales of weights.

    Examples:
        >>> with dlp.quantized_model_init(recipe="fp8_current"):
        ...     layer = dlp.Linear(64, 64)
        >>> layer(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """
    chosen = None if recipe is None else recipes.as_recipe(recipe)
    region = Region(chosen, preserve_high_precision_init_val) if enabled else None
    token = REGION.set(region)
    try:
        yield
    finally:
        REGION.reset(token)
    if region is not None and region.made and not any(region.made):
        LOG.warning(
            "quantized_model_init: no weight is quantized, since no recipe of the %d layers constructed inside "
            "quantizes weights; pass recipe=..., or give the layers a recipe",
            len(region.made),
        )


def hold_quantized(weights: LayerWeights) -> None:
    """If a `quantized_model_init` is active and has a recipe, set this recipe for the layer that is being constructed. If the
    recipe of the layer then quantizes w, quantize the weights and free their values. Do nothing outside of regions."""
    layer, region = weights.layer, REGION.get()
    if region is None:
        return
    if region.recipe is not None:
        layer.set_spec(layer.with_recipe(region.recipe.for_layer(layer.spec.members[0])))
    region.made.append(holds(layer.spec.recipe))
    if region.made[-1]:
        weights.set([HeldWeight(weights, i, region.preserve) for i in range(len(layer.members))])


class HeldWeight(LocalWeight):
    """Quantized-only weight, with codes and scales in `parts`.

    recipe      recipe that quantized the weight
    parameter   the placeholder
    initial     values before the quantization, in host memory; None: not preserved, or the weight was written since
    master      fp32 weight on which an optimizer steps (`with_master_weights`); None: there is no such optimizer
    """

    held = True

    def __init__(self, owner: LayerWeights, index: int, preserve: bool) -> None:
        super().__init__(owner, index)
        self.recipe = self.bound.spec.recipe
        self.parameter = getattr(self.member.module, self.member.weight)
        self.master: nn.Parameter | None = None
        self._check_can_hold()
        values = local_values(self.parameter)
        self.write(values)
        self.initial = values.cpu().clone() if preserve else None
        self._hide(values)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"parts": [(as_bytes(part), part.dtype) for part in self.parts]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.parts = [part.view(dtype) for part, dtype in state["parts"]]
        self._hide(self._local)

    def _check_can_hold(self) -> None:
        name = self.bound.spec.name
        check_has_values(name, self.parameter)
        if is_fake(self.recipe):
            raise ValueError(
                f"{name}: {self.recipe} trains high-precision weights, and a quantized-only weight has codes alone; "
                f"leave quantized_model_init out, or quantize after training (dlp.freeze)"
            )
        check_without_history(name, self.recipe)

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError for a recipe with another quantizer of w."""
        if recipe.w != self.recipe.w:
            raise ValueError(
                f"{self.bound.spec.name}: the weights are quantized-only codes of {self.recipe}, which cannot be "
                f"requantized to {recipe}; construct the layer outside quantized_model_init, or call dlp.freeze with "
                f"{recipe} on a model with high-precision weights"
            )

    @property
    def no_values(self) -> str:
        """End of the error message of a placeholder, see `Valueless`."""
        return (
            f"is quantized-only ({self.recipe} codes): read values from model.state_dict(), write values by "
            f"load_state_dict() or reset_parameters(), and train with the optimizer of dlp.with_master_weights"
        )

    def check_in_place(self, parameter: Any) -> None:
        """Raise ValueError unless the module's `parameter` is a placeholder, which has a stride of 0, or a plain view of a
        placeholder."""
        if 0 not in local_tensor(parameter).stride():
            raise ValueError(
                f"{self.bound.spec.name}: a tensor was assigned in place of a weight that {self.no_values}"
            )

    def serves(self, spec: LinearSpec) -> bool:
        self.check(spec.recipe)
        return True

    def drop(self, *, retyped: bool = False) -> None:
        """Do nothing: the codes are the only form of the weight."""

    def casts(self, values: Values) -> list[Cast]:
        """Return no casts: there are no values that the step boundary could cast; `write` quantizes new values."""
        return []

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Round this rank's values [N, K] to the dtype of the parameter, and quantize them into `parts`, in place."""
        self.initial = None
        rounded = values.detach().to(self.parameter.dtype)
        (operands,) = quantize(self.bound, "w", [rounded], BOTH, members=[self.name])
        self.keep(operands)

    @property
    def _local(self) -> Tensor:
        """The local tensor of the parameter."""
        return local_tensor(self.parameter)

    def decoded(self) -> Tensor:
        """Decode the codes to values [N, K] in the dtype of the parameter."""
        (operands,) = unflatten(self.recipe.w, self.parts, 1)
        rows, columns = self._local.shape
        return operands.at(columnwise=False).dequantize(self.parameter.dtype)[:rows, :columns]

    @contextmanager
    def shown(self, *, written: bool) -> Iterator[None]:
        show_values(self.parameter, self.decoded())
        try:
            yield
            if written:
                self._follow()
                self._load(local_values(self.parameter))
        finally:
            self._hide(self._local)

    def _follow(self) -> None:
        """If `load_state_dict(assign=True)` has assigned a new parameter to the module, use the new parameter from now on."""
        put, before = getattr(self.member.module, self.member.weight), self.parameter
        if put is not before:
            put.requires_grad_(before.requires_grad)
            self.parameter = put
            hide_values(before, self, local_values(before))

    @torch.no_grad()
    def _load(self, values: Tensor) -> None:
        """Quantize loaded values, and write them to the master if there is one. If the values equal the decoded codes, do
        nothing, since master and `initial` may be more precise."""
        decoded = self.decoded()
        if decoded.dtype == values.dtype and torch.equal(decoded, values):
            return
        if self.master is not None:
            local_values(self.master).copy_(values)
            values = local_values(self.master)
        self.write(values)

    def check_move(self, device: torch.device) -> None:
        """Raise ValueError for the meta device, on which the codes would be lost."""
        if device.type == "meta":
            raise ValueError(
                f"{self.bound.spec.name}: the weight is quantized-only ({self.recipe} codes), and moving to the meta "
                f"device would drop the codes; move the model to a device with memory"
            )

    @torch.no_grad()
    def move(self, apply: Callable[[Tensor], Tensor]) -> None:
        """Apply `Module.to`, `half`, `to_empty` and the like: the codes move to the new device unchanged, and values are
        decoded to the new dtype from then on. `apply`: function that returns a tensor on the new device in the new dtype."""
        now, grad = apply(self._local.new_empty(0)), self.parameter.grad
        self.parts = [part.to(now.device) for part in self.parts]
        self.owner.collect()
        self.parameter.grad = None
        self._hide(now.new_empty(()).expand(self._local.shape))
        if grad is not None:
            self.parameter.grad = apply(grad)
        if self.master is not None:
            show_values(self.master, local_values(self.master).to(now.device))

    def take_master(self) -> nn.Parameter:
        """Return the master. If there is none, create it from the preserved initial values or, without these, from the decoded
        values."""
        if self.master is None:
            values = self.decoded() if self.initial is None else self.initial
            values, parameter = values.to(self.parameter.device, torch.float32).clone(), self.parameter
            if isinstance(parameter, DTensor):
                values = DTensor.from_local(
                    values, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                    stride=parameter.stride(),
                )  # fmt: skip
            self.master = nn.Parameter(values)
        return self.master

    def _hide(self, values: Tensor) -> None:
        hide_values(self.parameter, self, values)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def around_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], before: Callable[[], None], after: Callable[[], None]
) -> Arguments | None:
    """Call functions around the closure of `step`. An optimizer may call the closure several times in a step, with different
    weights.

    args, kwargs   arguments of `step` that a pre-hook of an optimizer gets
    before         function that is called before each evaluation of the closure
    after          function that is called after each evaluation; called once, now, if `step` has no closure

    Returns the result of the pre-hook: the arguments with the new closure; None if `step` has no closure."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        after()
        return None

    def evaluate() -> Any:
        before()
        loss = closure()
        after()
        return loss

    if len(args) > 1:
        return (args[0], evaluate, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluate}


def with_master_weights(model: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer:
    """Create an optimizer for a model with quantized-only weights, which steps on fp32 copies of these weights, the masters.

    A master starts from the preserved initial values, or from the decoded values. A step moves gradients to the masters, steps,
    and quantizes the masters into the layers. Masters are part of `dlp.state_dict`. If weights are loaded without masters, the
    masters are set to the loaded weights. `zero_grad` of the optimizer also clears the gradients of the quantized-only
    parameters.

    Args:
        model: model with layers of `dlp.quantized_model_init`.
        make: function that returns the optimizer for a list of parameters, in which masters replace quantized-only parameters.

    Returns:
        The optimizer.

    Examples:
        >>> with dlp.quantized_model_init(recipe="fp8_current"):
        ...     model = nn.Sequential(dlp.Linear(64, 64))
        >>> optimizer = dlp.with_master_weights(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    """
    held = [weight for weight in _held(model) if weight.parameter.requires_grad]  # frozen weights have no master
    pairs = [(weight, weight.take_master()) for weight in held]
    masters = {id(weight.parameter): master for weight, master in pairs}
    optimizer = make([masters.get(id(p), p) for p in model.parameters()])
    _MasterSteps(optimizer, pairs)
    return optimizer


class _MasterSteps:
    """Hooks of an optimizer that steps on the masters of quantized-only weights."""

    def __init__(self, optimizer: Optimizer, pairs: Sequence[tuple[HeldWeight, nn.Parameter]]) -> None:
        self._pairs, self._clear = pairs, optimizer.zero_grad
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def _move(self) -> None:
        for weight, master in self._pairs:
            grad, weight.parameter.grad = weight.parameter.grad, None
            master.grad = None if grad is None else grad.float()

    def _write(self) -> None:
        for weight, master in self._pairs:
            weight.write(local_values(master))

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        return around_closure(args, kwargs, self._write, self._move)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._write()
        for weight, master in self._pairs:
            master.grad = None
            torch.autograd.graph.increment_version(weight.parameter)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._clear(set_to_none)
        for weight, _ in self._pairs:
            if set_to_none:
                weight.parameter.grad = None
            elif weight.parameter.grad is not None:
                weight.parameter.grad.zero_()


def masters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the masters of quantized-only weights, by name of the weight."""
    return {weight.name: weight.master for weight in _held(model) if weight.master is not None}


@torch.no_grad()
def load_masters(model: nn.Module, saved: Mapping[str, Tensor]) -> list[str]:
    """Load masters that `masters_of` returned, on this or another mesh, and quantize them into the layers. Returns the names of
    masters that `saved` lacks."""
    lacking = []
    for weight in _held(model):
        master = weight.master
        if master is None:
            continue
        if weight.name not in saved:
            lacking.append(weight.name)
            continue
        whole = saved[weight.name]
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if isinstance(master, DTensor):
            whole = distribute_tensor(whole, master.device_mesh, master.placements)
        master.copy_(whole)
        weight.write(local_values(master))
    return lacking


def _held(model: nn.Module) -> list[HeldWeight]:
    return [weight for weights in weights_in(model) for weight in weights if isinstance(weight, HeldWeight)]
