"""Weights that FSDP does not shard, and functions for parameters that are DTensors.

Every parameter of a converted model is a DTensor on the tp axis of the mesh. While FSDP shards a parameter, the DTensor has the
axes of FSDP as well. torch's gradient clipping and checkpoints support such parameters. Layers compute with this rank's plain
tensor (`local`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dlp.parallel.casts import COLUMNWISE, ROWWISE, Cast, Operands, operand_shape
from dlp.parallel.linear.quantize import cast_weights, flatten, unflatten, weight_casts
from dlp.parallel.linear.state import LayerState, Use, Weight
from dlp.parallel.weight.base import Values
from dlp.parallel.weight.parameters import PlacedParameter, take_class
from dlp.quant.quantizer import Wanted
from dlp.quant.tensor import QuantizedTensor


def set_local(layer: LayerState) -> None:
    """Give a layer that is being constructed weights of class `LocalWeight`."""
    layer.weights.set([LocalWeight(layer.weights, i) for i in range(len(layer.members))])


class LocalWeight(Weight):
    """A weight w [N, K] that FSDP does not shard: this rank has the complete weight, or the complete tp shard."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"parts": []}

    @property
    def stored(self) -> Tensor | None:
        # without the property `member`, to save time: this runs for each weight before each forward of a model
        member = self.owner.layer.members[self.index]
        return member.module._parameters.get(member.weight)

    @property
    def value(self) -> Tensor:
        """The values [N, K] that the step boundary casts."""
        spec = self.bound.spec
        return local(getattr(self.member.module, self.member.weight), spec.name, spec.num_axes).detach()

    def read(self, use: Use, *, columnwise: bool) -> QuantizedTensor:
        orientations = COLUMNWISE if columnwise else ROWWISE
        (operand,) = cast_weights(use.bound, [self.name], [use.value], use.dtype, orientations, use.record)
        return operand

    def casts(self, values: Values) -> list[Cast]:
        """Return the casts of both orientations. The casts read values that are rounded to the dtype of activations, and
        overwrite the operands that the last step boundary cast. The list is empty before the first forward, since this dtype
        is not known yet, and if each pass casts the weight."""
        bound, dtype = self.bound, self.owner.dtype
        if dtype is None or not self.owner.caches:
            return []
        value = self.value
        read = values.of(self.name, value, dtype, operand_shape(bound.spec.recipe, "w", value.shape, False))
        into = unflatten(bound.spec.recipe.w, self.parts, 1)[0] if self.parts else Operands(None, None)
        return weight_casts(bound, self.name, value, read, into)

    def take(self, operands: Sequence[Wanted]) -> None:
        row, col = ([q for q in orientation if q is not None] for orientation in zip(*operands, strict=True))
        self.keep(Operands(row[0], col[0] if col else row[0].transpose()))

    def staged(self) -> None:
        """Return None: `ScalingState` agrees on these amaxes."""

    def keep(self, operands: Operands) -> None:
        """Store these operands. Existing operands are overwritten in place, since launches contain their addresses."""
        parts = flatten([operands])
        if not self.parts:
            # detached, because both orientations may share one scale tensor, and torch.compile accepts a tensor only once
            self.parts = [part.detach() for part in parts]
            self.num_rowwise = len(operands.at(columnwise=False).parts)
            self.owner.collect()
            return
        moved = [(old, new) for old, new in zip(self.parts, parts, strict=True) if old.data_ptr() != new.data_ptr()]
        if moved:
            torch._foreach_copy_([old for old, _ in moved], [new for _, new in moved])

    def drop(self, *, retyped: bool = False) -> None:
        self.parts = []


class _Local(torch.autograd.Function):
    """Autograd function that returns the local tensor of a DTensor. The gradient becomes a DTensor with the same placements.

    `DTensor.to_local` has further features, but its host time is three times that of a small linear."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, before: Callable[[], None] | None) -> Tensor:
        ctx.spec, ctx.before = parameter._spec, before
        ctx.set_materialize_grads(False)
        tensor = parameter._local_tensor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[DTensor | None, None]:
        if ctx.before is not None:
            ctx.before()
        return None if grad is None else DTensor(grad, ctx.spec, requires_grad=False), None


def shards_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the number of shards along each dimension of a parameter."""
    shards = [1] * parameter.dim()
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                shards[placement.dim] *= parameter.device_mesh.size(axis)  # type: ignore[attr-defined]
    return tuple(shards)


def num_axes(parameter: Any) -> int:
    """Return the number of mesh axes of a parameter: 0 for a plain parameter, 1 (tp) after conversion, more while the parameter
    is sharded by FSDP."""
    return len(parameter._spec.placements) if isinstance(parameter, DTensor) else 0


def check_whole(parameter: Any, axes: int, name: str) -> None:
    """Raise RuntimeError unless a parameter has `axes` mesh axes (`num_axes`): with fewer axes, a plain tensor has replaced a
    DTensor; with more axes, FSDP shards the parameter, so that it is not complete on this tp rank."""
    if num_axes(parameter) < axes:
        raise RuntimeError(
            f"{name}: a plain tensor replaces a parameter that is a DTensor on tp; copy values into the parameter instead"
        )
    if num_axes(parameter) != axes:
        raise RuntimeError(
            f"{name}: FSDP has resharded the parameters, and a layer needs complete parameters; call the module that "
            f"was given to fully_shard, not a submodule (for another method than forward, see torch's "
            f"register_fsdp_forward_method), or call unshard() of this module first"
        )


def local_tensor(parameter: Any) -> Any:
    """Return the local tensor of a DTensor, else the parameter itself, which may be None. While a parameter is sharded by FSDP,
    its local tensor is incomplete and must not be used in computations (`check_whole`)."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def local_values(parameter: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, else the parameter itself, detached."""
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()


def local(parameter: Tensor, name: str, axes: int = 1, before: Callable[[], None] | None = None) -> Tensor:
    """Return this rank's tp shard of a parameter as a plain tensor, through which autograd passes gradients to the parameter.

    name     name of the layer, for messages
    axes     number of mesh axes that the parameter must have, else RuntimeError (`check_whole`)
    before   called in backward before the gradient is passed to the parameter; None: nothing is called
    """
    check_whole(parameter, axes, name)
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_dynamo_compiling():
        return parameter.to_local()
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter._local_tensor
    result: Tensor = _Local.apply(parameter, before)
    return result


def place(tensor: Tensor, tp: DeviceMesh | None, shard_dim: int | None) -> nn.Parameter:
    """Create a parameter from a full tensor: this rank's shard of rank 0's tensor. The Python attributes of the tensor become
    attributes of the parameter.

    tp          mesh with the tp axis; None: the parameter is a plain tensor
    shard_dim   dimension that is sharded over tp; None: replicated
    """
    part: Tensor = tensor.detach()
    if tp is not None:
        placement: Placement = Replicate() if shard_dim is None else Shard(shard_dim)
        part = distribute_tensor(part, tp, [placement])
    parameter = nn.Parameter(part, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter if tp is None else take_class(parameter, PlacedParameter)


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Overwrite a parameter, which may be sharded, with values of a tensor of the full shape. For a DTensor, all ranks use rank
    0's tensor; for a plain parameter, each rank uses its own tensor."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        replicated = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=True)
        whole = replicated.redistribute(placements=parameter.placements)
    parameter.copy_(whole)
