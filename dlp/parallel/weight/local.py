"""Weights without FSDP sharding, and the parameters that hold them.

Every parameter of a converted model is a DTensor on the mesh's tp axis, to which FSDP adds its own axes; so gradient clipping
and checkpoints work by themselves. Layers compute on this rank's plain tensor (`local`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dlp.kernels.ops import rounded
from dlp.parallel.casts import COLUMNWISE, ROWWISE, Cast, Operands, operand_shape
from dlp.parallel.linear.quantize import flatten, quantize, unflatten, weight_casts
from dlp.parallel.linear.state import LayerState, Use, Weight
from dlp.parallel.weight.base import Values
from dlp.parallel.weight.parameters import PlacedParameter, take_class
from dlp.quant.quantizer import Wanted
from dlp.quant.tensor import QuantizedTensor


def set_local(layer: LayerState) -> None:
    """Give a layer that is being constructed weights whose complete values are on this rank."""
    layer.weights.set([LocalWeight(layer.weights, i) for i in range(len(layer.members))])


class LocalWeight(Weight):
    """A weight whose complete values are on this rank."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"parts": []}

    @property
    def stored(self) -> Tensor | None:
        # Not via `member`, since this runs for each weight before a model's forward
        member = self.owner.layer.members[self.index]
        return member.module._parameters.get(member.weight)

    @property
    def value(self) -> Tensor:
        """Values [N, K], which the step boundary casts."""
        spec = self.bound.spec
        return local(getattr(self.member.module, self.member.weight), spec.name, spec.num_axes).detach()

    def rowwise(self, use: Use) -> QuantizedTensor:
        return self._operand(use, columnwise=False)

    def columnwise(self, use: Use) -> QuantizedTensor:
        return self._operand(use, columnwise=True)

    def _operand(self, use: Use, *, columnwise: bool) -> QuantizedTensor:
        orientations = COLUMNWISE if columnwise else ROWWISE
        (operands,) = quantize(
            use.bound, "w", [rounded(use.value, use.dtype)], orientations, members=[self.name], record=use.record
        )
        return operands.at(columnwise=columnwise)

    def casts(self, values: Values) -> list[Cast]:
        """Casts of both orientations, of values rounded to the dtype of activations, into the operands of the last
        boundary.

        Empty before the layer has run, since the dtype is not known, and if passes cast the weight."""
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
        """None: `ScalingState` agrees on these amaxes."""

    def keep(self, operands: Operands) -> None:
        """Store these operands. Existing operands are overwritten in place, since launches hold their addresses."""
        parts = flatten([operands])
        if not self.parts:  # both orientations may share a scale, but torch.compile accepts a tensor only once
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
    """DTensor -> this rank's tensor; the gradient is wrapped with the same placement.

    `DTensor.to_local` has further features, at three times the host cost of a small linear."""

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
    """Number of shards along each dimension of a parameter."""
    shards = [1] * parameter.dim()
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                shards[placement.dim] *= parameter.device_mesh.size(axis)  # type: ignore[attr-defined]
    return tuple(shards)


def num_axes(parameter: Any) -> int:
    """Number of mesh axes of a parameter: 0 for a plain parameter, 1 (tp) after conversion, more while FSDP has the
    parameter resharded."""
    return len(parameter._spec.placements) if isinstance(parameter, DTensor) else 0


def check_whole(parameter: Any, axes: int, name: str) -> None:
    """Raise RuntimeError for a parameter that does not have `axes` mesh axes, as it has while its layer may compute
    with it."""
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


def held(parameter: Any) -> Any:
    """This rank's tensor of a parameter, or None: the tp shard or, while FSDP has the parameter resharded, a shard of it, which
    must not be used in computations (`check_whole`)."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def local_values(parameter: Tensor) -> Tensor:
    """This rank's tensor of a parameter, detached."""
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()


def local(parameter: Tensor, name: str, axes: int = 1, before: Callable[[], None] | None = None) -> Tensor:
    """This rank's tp shard of a parameter, as a plain tensor whose gradient goes to the parameter.

    name     name of the layer, for messages
    axes     see `check_whole`, whose RuntimeError this raises
    before   called in backward before the gradient is passed on
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
    """Create the parameter on tp from a full tensor (rank 0's is used): this rank keeps a shard, and the tensor's
    attributes."""
    part: Tensor = tensor.detach()
    if tp is not None:
        placement: Placement = Replicate() if shard_dim is None else Shard(shard_dim)
        part = distribute_tensor(part, tp, [placement])
    parameter = nn.Parameter(part, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter if tp is None else take_class(parameter, PlacedParameter)


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Overwrite a parameter, which may be sharded, from a tensor of the full shape; rank 0's tensor is used."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        replicated = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=True)
        whole = replicated.redistribute(placements=parameter.placements)
    parameter.copy_(whole)
