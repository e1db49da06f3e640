"""Where w lives, what a layer reads of it, and what becomes of its gradient: `Weight`, and weights that are whole here.

    LocalWeight                   values: cast at the step boundary into operands that passes only read, else by the pass
    ManagedWeight                 the same, where FSDP manages the parameter on one rank and a layer may see a copy of it
    HeldWeight      (held.py)     codes and scales, which are all there is
    ShardedWeight   (sharded.py)  some rows on each rank, cast at the step boundary, gathered for the pass

Every parameter of a converted model is a DTensor on the mesh's tp axis (FSDP adds its own axes), so clipping and
checkpoints work by themselves. Layers compute on this rank's plain tensor, which `local` hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dlp.parallel.casts import COLUMNWISE, ROWWISE, Cast, operand_shape
from dlp.parallel.linear.operands import Operands, flatten, quantize, unflatten, weight_casts
from dlp.parallel.linear.spec import LinearSpec
from dlp.parallel.linear.state import BoundSpec
from dlp.parallel.weight.boundary import Values
from dlp.quant.quantizer import Wanted
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import QuantizedTensor


class Member(NamedTuple):
    """One weight of a layer: the module that owns it, and the names of its weight and bias there."""

    module: nn.Module
    weight: str
    bias: str


class Layer(Protocol):
    """What weights know of their layer: its own spec, its members, and all specs that it runs under now."""

    bound: BoundSpec
    members: list[Member]

    def bounds(self) -> list[BoundSpec]: ...


class Use(NamedTuple):
    """A pass that reads a weight. value [N, K]: of its parameter on this rank, now; dtype: of x; record: gradients are
    enabled, so amaxes count for delayed scales."""

    bound: BoundSpec
    value: Tensor
    dtype: torch.dtype
    record: bool


class Weight(Protocol):
    """One w [N, K] of a layer.

    owner      the weights of its layer
    name       of its member, under which scales are kept
    stored     the parameter that optimizers step on; None where a parametrization has taken its place
    parts      flat parts of operands that passes only read, `num_rowwise` of them of the rowwise one, which come first; none:
               there are no such operands now
    managed    FSDP has it, and the layer may see a copy of `stored`
    gathered   its operands come to be before a pass, not inside of it
    fresh      the casts in use, if there are some, are those of a step boundary
    why, told  why its operands do not travel as the recipe says, if so, and what the log has said of that
    """

    owner: LayerWeights
    parts: list[Tensor]
    num_rowwise: int
    managed: bool
    gathered: bool
    fresh: bool
    why: str | None
    told: str | None

    @property
    def bound(self) -> BoundSpec:
        """The spec of its layer."""

    @property
    def name(self) -> str: ...

    @property
    def stored(self) -> Tensor | None: ...

    def rowwise(self, use: Use) -> QuantizedTensor:
        """w [N, K], fprop's operand."""

    def columnwise(self, use: Use) -> QuantizedTensor:
        """w.T [K, N], dgrad's operand."""

    def take_grad(self, wgrad: Callable[[], Tensor], *, may_wait: bool) -> Tensor | None:
        """What autograd gets as dw [N, K] in this backward: that of `wgrad`; None where this one will come otherwise.
        `may_wait`: somebody else waits for this backward."""

    def casts(self, values: Values) -> list[Cast]:
        """Those that the step boundary makes of it."""

    def take(self, made: Sequence[Wanted]) -> None:
        """What those casts have made."""

    def staged(self) -> tuple[ProcessGroup, list[Tensor]] | None:
        """The amaxes that delayed scaling has recorded in those casts, and a group that must agree on them, where the update
        of scales does not see to that."""

    def check(self, recipe: Recipe) -> None:
        """ValueError for a recipe that its layer cannot run under."""

    def serves(self, spec: LinearSpec) -> bool:
        """Whether `parts` are operands under a spec that is not the layer's own. ValueError as of `check`."""

    def drop(self, *, retyped: bool = False) -> None:
        """Forget casts: the recipe or the values changed other than by a step, or, `retyped`, the dtype of x did."""

    def shown(self, *, written: bool) -> AbstractContextManager[None]:
        """Inside, the parameter has its values; `written`: they may be overwritten there."""


class WeightParts:
    """Flat parts of the persistent operands of a layer's weights, by orientation. `calls`: what reads them and keeps to their
    addresses (see `dlp.parallel.linear.autograd`)."""

    def __init__(self, parts: Sequence[Tensor], sizes: tuple[int, int]) -> None:
        self.parts, self._sizes, both = parts, sizes, sum(sizes)
        self.rowwise = [part for i, part in enumerate(parts) if i % both < sizes[0]]
        self.columnwise = [part for i, part in enumerate(parts) if i % both >= sizes[0]]
        self.calls: dict[Any, Any] = {}

    def both_of(self, used: Sequence[int]) -> list[Tensor]:
        """The parts of some of the weights, in both orientations."""
        size = sum(self._sizes)
        return [part for i in used for part in self.parts[i * size : (i + 1) * size]]

    def columnwise_of(self, used: Sequence[int]) -> list[Tensor]:
        """The columnwise parts of some of the weights."""
        size = self._sizes[1]
        if len(used) * size == len(self.columnwise):
            return self.columnwise
        return [part for i in used for part in self.columnwise[i * size : (i + 1) * size]]


class LayerWeights:
    """The weights of one layer, in the order of its members.

    caches   the step boundary casts weights that are whole here; else passes do
    dtype    of x when the layer last ran: what values are rounded to before their cast
    parts    of all of them, where each has some
    """

    def __init__(self, layer: Layer) -> None:
        self.layer, self.caches = layer, False
        self.dtype: torch.dtype | None = None
        self.parts: WeightParts | None = None
        self.set([LocalWeight(self, i) for i in range(len(layer.members))])

    def __getstate__(self) -> dict[str, Any]:
        """Those of a copied layer are cast by passes, until it is attached to an optimizer of its own."""
        return vars(self) | {"caches": False, "dtype": None, "parts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.collect()

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.members)

    def set(self, members: Sequence[Weight]) -> None:
        """They live elsewhere from now on."""
        self.members = list(members)
        self._gathered = any(weight.gathered for weight in members)
        self.collect()

    def collect(self) -> None:
        """The operands of a weight may be others, in other memory, than before."""
        found = [part for weight in self.members for part in weight.parts]
        if self.parts is None or list(map(id, found)) != list(map(id, self.parts.parts)):
            whole, rowwise = all(weight.parts for weight in self.members), self.members[0].num_rowwise
            sizes = rowwise, len(found) // len(self.members) - rowwise
            self.parts = WeightParts(found, sizes) if whole else None

    def kept(self, bound: BoundSpec, dtype: torch.dtype) -> WeightParts | None:
        """The operands that there are for activations of `dtype`; None: `read` says what there is."""
        if bound is not self.layer.bound:
            return self.parts if all([weight.serves(bound.spec) for weight in self.members]) else None
        if self.dtype != dtype:  # the next step boundary casts for it
            self.dtype = dtype
            self.drop(retyped=True)
        return self.parts

    def read(
        self, bound: BoundSpec, used: Sequence[int], values: Sequence[Tensor], dtype: torch.dtype, *, columnwise: bool,
        record: bool,
    ) -> Sequence[Tensor]:  # fmt: skip
        """The flat parts of one orientation of the `used` weights, made before the pass that reads them; none where that
        casts them all itself, with one agreement."""
        if not self._gathered:
            return ()
        found: list[Tensor] = []
        for i, value in zip(used, values, strict=True):
            weight, use = self.members[i], Use(bound, value, dtype, record)
            found += (weight.columnwise(use) if columnwise else weight.rowwise(use)).parts
        return found

    def stored(self) -> list[Tensor]:
        """The parameters that optimizers step on, without those that a parametrization has taken the place of."""
        return [stored for weight in self.members if (stored := weight.stored) is not None]

    def in_use(self) -> bool:
        """Whether passes compute with casts that a step boundary made."""
        return self.parts is not None or all(weight.gathered and weight.fresh for weight in self.members)

    def check(self, recipe: Recipe) -> None:
        """ValueError for a recipe that the layer cannot run under."""
        for weight in self.members:
            weight.check(recipe)

    def drop(self, *, retyped: bool = False) -> None:
        """Forget casts, see `Weight.drop`."""
        for weight in self.members:
            weight.drop(retyped=retyped)
        self.collect()
        tell(self.members)

    @contextmanager
    def shown(self, *, written: bool = False) -> Iterator[None]:
        """Inside, parameters have their values; `written`: which may be overwritten there."""
        with ExitStack() as stack:
            for weight in self.members:
                stack.enter_context(weight.shown(written=written))
            yield


def tell(weights: Sequence[Weight]) -> None:
    """Amend the plan by what travels otherwise than its recipe promises, once."""
    reasons: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.why not in (None, weight.told):
            reasons.setdefault(str(weight.why), []).append(weight)
        weight.told = weight.why
    for why, its in reasons.items():
        some = its[0].name if len(its) == 1 else f"{its[0].name} and {len(its) - 1} more"
        its[0].bound.session.note(f"w is gathered in high precision: {why} [{some}]")


class LocalWeight:
    """Values, whole on this rank."""

    managed = gathered = fresh = False
    why: str | None = None
    told: str | None = None

    def __init__(self, owner: LayerWeights, index: int) -> None:
        self.owner, self.index = owner, index
        self.parts: list[Tensor] = []
        self.num_rowwise = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"parts": []}

    @property
    def bound(self) -> BoundSpec:
        return self.owner.layer.bound

    @property
    def name(self) -> str:
        return self.bound.spec.members[self.index]

    @property
    def member(self) -> Member:
        return self.owner.layer.members[self.index]

    @property
    def stored(self) -> Tensor | None:
        return self.member.module._parameters.get(self.member.weight)

    @property
    def value(self) -> Tensor:
        """What the step boundary casts [N, K]."""
        spec = self.bound.spec
        return local(getattr(self.member.module, self.member.weight), spec.name, spec.num_axes).detach()

    def rowwise(self, use: Use) -> QuantizedTensor:
        return self._operand(use, columnwise=False)

    def columnwise(self, use: Use) -> QuantizedTensor:
        return self._operand(use, columnwise=True)

    def _operand(self, use: Use, *, columnwise: bool) -> QuantizedTensor:
        orientations = COLUMNWISE if columnwise else ROWWISE
        (made,) = quantize(
            use.bound, "w", [use.value.to(use.dtype)], orientations, members=[self.name], record=use.record
        )
        return made.at(columnwise=columnwise)

    def take_grad(self, wgrad: Callable[[], Tensor], *, may_wait: bool) -> Tensor | None:
        if not (self.bound.spec.options.delay_wgrad and may_wait):
            return wgrad()
        self.bound.session.waiting.append((self, wgrad))
        return None

    def casts(self, values: Values) -> list[Cast]:
        """Of the values, rounded to the dtype of activations first, in both orientations, into the operands there are; none
        before the layer has run, or where passes cast."""
        bound, dtype = self.bound, self.owner.dtype
        if dtype is None or not self.owner.caches:
            return []
        value = self.value
        read = values.of(self.name, value, dtype, operand_shape(bound.spec.recipe, "w", value.shape, False))
        into = unflatten(bound.spec.recipe.w, self.parts, 1)[0] if self.parts else Operands(None, None)
        return weight_casts(bound, self.name, value, read, into)

    def take(self, made: Sequence[Wanted]) -> None:
        row, col = ([q for q in orientation if q is not None] for orientation in zip(*made, strict=True))
        self.keep(Operands(row[0], col[0] if col else row[0].transpose()))

    def staged(self) -> None:
        """The update of scales sees to it."""

    def keep(self, operands: Operands) -> None:
        """Hold them: where some are held already, in their memory."""
        parts = flatten([operands])
        if not self.parts:  # both orientations may share a scale, but torch.compile takes no tensor twice
            self.parts = [part.detach() for part in parts]
            self.num_rowwise = len(operands.at(columnwise=False).parts)
            self.owner.collect()
            return
        moved = [(old, new) for old, new in zip(self.parts, parts, strict=True) if old.data_ptr() != new.data_ptr()]
        if moved:
            torch._foreach_copy_([old for old, _ in moved], [new for _, new in moved])

    def check(self, recipe: Recipe) -> None:
        """Values can be cast by any recipe."""

    def serves(self, spec: LinearSpec) -> bool:
        return False

    def drop(self, *, retyped: bool = False) -> None:
        self.parts = []

    def shown(self, *, written: bool) -> AbstractContextManager[None]:
        return nullcontext()


class Record(Protocol):
    """What FSDP has of a parameter: the one that optimizers step on, and what the copy that layers see is rounded to, None:
    not at all."""

    @property
    def stored(self) -> nn.Parameter: ...

    @property
    def dtype(self) -> torch.dtype | None: ...


class ManagedWeight(LocalWeight):
    """Of a parameter that FSDP manages and does not cut, since dp_shard is one rank. What the layer holds may be FSDP's copy
    of it, so the step boundary reads the one that the optimizer steps on."""

    managed = True

    def __init__(self, owner: LayerWeights, index: int, record: Record) -> None:
        super().__init__(owner, index)
        self._record = record

    @property
    def stored(self) -> Tensor:
        return self._record.stored

    @property
    def value(self) -> Tensor:
        return local_values(self.stored)

    def casts(self, values: Values) -> list[Cast]:
        """None where FSDP's copy is what the layer reads, and where it is rounded otherwise than for it."""
        w = self.bound.spec.recipe.w
        if w.keeps_source or self._record.dtype not in (None, self.owner.dtype):
            return []
        return super().casts(values)


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


def local_values(parameter: Tensor) -> Tensor:
    """What this rank has of a parameter, as a plain tensor that autograd does not follow."""
    return (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()


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
