"""Where parameters live and what a layer reads of them.

Every parameter of a converted model is a DTensor on the mesh's tp axis (FSDP adds its own axes), so clipping and
checkpoints work by themselves. Layers compute on this rank's plain tensor, which `local` hands out.

Weights that are whole on this rank are cast once per optimizer step, at the step boundary, into persistent operands
that microbatches and recomputation only read (`CastWeights`). Of weights that FSDP gathers, each rank casts its rows at
the step boundary (`dlp.parallel.weight.sharded`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dlp.parallel.casts import Cast, operand_shape
from dlp.parallel.linear.operands import Operands, flatten, unflatten, weight_casts
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.weight.values import Values
from dlp.quant.quantizer import Wanted
from dlp.quant.recipe import Recipe


class _Local(torch.autograd.Function):
    """DTensor -> this rank's tensor; the gradient is wrapped with the same placement. `DTensor.to_local` does this and
    more, at three times the host cost of a small linear."""

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


def num_axes(parameter: Any) -> int:
    """Over how many axes of a mesh a parameter is spread: none for a plain one, tp alone for one that conversion placed,
    and those of FSDP, too, for one that is resharded."""
    return len(parameter._spec.placements) if isinstance(parameter, DTensor) else 0


def check_whole(parameter: Any, axes: int, name: str) -> None:
    """RuntimeError for a parameter of which FSDP keeps a shard here now, where its layer has it on `axes` axes."""
    if num_axes(parameter) < axes:
        raise RuntimeError(
            f"{name}: a plain tensor stands in place of a parameter that was put on tp; copy values into parameters, do not "
            f"replace them"
        )
    if num_axes(parameter) != axes:
        raise RuntimeError(
            f"{name}: FSDP has resharded its parameters, and a layer must not compute with a shard; call the module that was "
            f"given to fully_shard, not a part of it (or another method of it, see torch's register_fsdp_forward_method), "
            f"or call its unshard() first"
        )


def held(parameter: Any) -> Any:
    """What this rank keeps of a parameter, if it is one: its part, or a shard of that. Nobody may compute y with it."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def local(parameter: Tensor, name: str, axes: int = 1, before: Callable[[], None] | None = None) -> Tensor:
    """This rank's part of a parameter, as a plain tensor that autograd follows back to it. RuntimeError, naming the layer
    `name`, where that is no more than a shard of FSDP's. `before`: called by backward before it hands on the gradient."""
    check_whole(parameter, axes, name)
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_dynamo_compiling():
        return parameter.to_local()
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter._local_tensor
    result: Tensor = _Local.apply(parameter, before)
    return result


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stands for a weight that is held in another form: no memory, NaN wherever it is read."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(*shape)


def show(parameter: Tensor, tensor: Tensor) -> None:
    """Let a parameter hold this tensor on this rank; the parameter itself stays, a backward may be on its way to it."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = tensor
    else:
        parameter.data = tensor


def place(tensor: Tensor, tp: DeviceMesh | None, shard_dim: int | None) -> nn.Parameter:
    """A full tensor, equal on all tp ranks (rank 0's counts) -> the parameter that keeps this rank's part of it, and what
    users have set on the tensor."""
    kept: Tensor = tensor.detach()
    if tp is not None:
        placement: Placement = Replicate() if shard_dim is None else Shard(shard_dim)
        kept = distribute_tensor(kept, tp, [placement])
    parameter = nn.Parameter(kept, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Overwrite a parameter, of which this rank may have a part, with a tensor of its full shape: rank 0's."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        replicated = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=True)
        whole = replicated.redistribute(placements=parameter.placements)
    parameter.copy_(whole)


class Sides:
    """Flat parts of persistent operands by orientation. `calls`: what reads them and keeps to their addresses (see
    `dlp.parallel.linear.direct`)."""

    def __init__(self, parts: Sequence[Tensor], sizes: tuple[int, int]) -> None:
        self.parts, self._sizes, both = parts, sizes, sum(sizes)
        self.row = [part for i, part in enumerate(parts) if i % both < sizes[0]]
        self.col = [part for i, part in enumerate(parts) if i % both >= sizes[0]]
        self.calls: dict[Any, Any] = {}

    def both_of(self, used: Sequence[int]) -> list[Tensor]:
        """The parts of some of the weights, in both orientations."""
        size = sum(self._sizes)
        return [part for i in used for part in self.parts[i * size : (i + 1) * size]]

    def col_of(self, used: Sequence[int]) -> list[Tensor]:
        """The columnwise parts of some of the weights."""
        size = self._sizes[1]
        if len(used) * size == len(self.col):
            return self.col
        return [part for i in used for part in self.col[i * size : (i + 1) * size]]


def _operands(made: Sequence[Wanted]) -> Operands:
    """Those of one weight, which one cast has made, or one each; a columnwise one that none has is the transposed other."""
    row, col = ([q for q in orientation if q is not None] for orientation in zip(*made, strict=True))
    return Operands(row[0], col[0] if col else row[0].transpose())


class CastWeights:
    """The persistent operands of one layer's weights, as flat parts; the step boundary makes `casts` and `take`s them."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copied layer casts its own."""
        return {"parts": []}

    def check(self, recipe: Recipe) -> None:
        """Whether the layer may run under this recipe: always, for weights that are there to be cast."""

    def read(self, spec: LinearSpec) -> list[Tensor] | None:
        """The operands for a spec that is not the layer's own; None: cast at use."""
        return None

    def shown(self, *, written: bool = False) -> AbstractContextManager[None]:
        """Inside, parameters have their values; `written`: which may be overwritten."""
        return nullcontext()

    def stored(self) -> list[Tensor]:
        """The parameters that an optimizer steps on, where the layer itself may have copies of them; else none."""
        return []

    def in_use(self) -> bool:
        """Whether layers compute with casts that a step boundary made."""
        return bool(self.parts)

    def retype(self) -> None:
        """Activations have another dtype than before."""
        self.parts = []

    def drop(self) -> None:
        """Forget the operands: the recipe or the weights changed other than by a step."""
        self.parts = []

    def casts(self, bound: BoundSpec, weights: Sequence[Tensor], dtype: torch.dtype, values: Values) -> list[Cast]:
        """Those of the weights, rounded to `dtype` first, in both orientations, into the operands there are."""
        spec, plain = bound.spec, [weight.detach() for weight in weights]
        read = [
            values.of(member, weight, dtype, operand_shape(spec.recipe, "w", weight.shape, False))
            for member, weight in zip(spec.members, plain, strict=True)
        ]
        into = unflatten(spec.recipe.w, self.parts, len(plain)) if self.parts else [Operands(None, None)] * len(plain)
        each = zip(spec.members, plain, read, into, strict=True)
        return [cast for member, w, value, out in each for cast in weight_casts(bound, member, w, value, out)]

    def take(self, made: Sequence[Wanted], count: int) -> None:
        """What those casts of `count` weights have made: one a weight that makes both orientations, or one for each."""
        each = len(made) // count
        self.keep([_operands(made[i : i + each]) for i in range(0, len(made), each)])

    def keep(self, operands: Sequence[Operands]) -> None:
        """Hold these operands: where some are held already, in their memory."""
        parts = flatten(operands)
        if not self.parts:  # both orientations may share a scale, but torch.compile takes no tensor twice
            self.parts = [part.detach() for part in parts]
            return
        moved = [(old, new) for old, new in zip(self.parts, parts, strict=True) if old.data_ptr() != new.data_ptr()]
        if moved:
            torch._foreach_copy_([old for old, _ in moved], [new for _, new in moved])
