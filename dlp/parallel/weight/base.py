"""Where w lives, what a layer reads of it, and what becomes of its gradient: `Weight`, and the weights of one layer.

    LocalWeight     (local.py)    values: cast at the step boundary into operands that passes only read, else by the pass
    ManagedWeight   (local.py)    the same, where FSDP manages the parameter on one rank and a layer may see a copy of it
    HeldWeight      (held.py)     codes and scales, which are all there is
    ShardedWeight   (sharded.py)  some rows on each rank, cast at the step boundary, gathered for the pass

The step boundary casts all weights of a model together (`refresh`): their values are rounded together (`Values`), then
observed, agreed on and cast in one `CastBatch`.

**Main gradients**: wgrad adds to a gradient itself, with beta = 1, where autograd would add a tensor of its own (`MainGrad`).

    off         autograd gets dw [N, K] of each backward and adds it to the parameter's `grad`
    grad        where the parameter has a `grad` already, in fp32, dw is added to it in the GEMM; the first one autograd leaves
    main_grad   dw is added to the parameter's `main_grad`, in fp32 or bf16, which the user made, as Megatron-LM does; where
                `overwrite_main_grad` is true it takes its place. `grad_added_to_main_grad` is set to True, and autograd gets
                zeros where `zero_out_wgrad` is true, for hooks that wait for a gradient

The bits of fp32 are those of autograd's sum: the same sums of products, added once; on a GPU, nvfp4 multiplies them by a scale
and adds in one rounding, where autograd has two. A backward that takes gradients otherwise than by leaving them in parameters
(`torch.autograd.grad`) gets them from autograd, as ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dlp.comm.amax import agree
from dlp.parallel.casts import Cast, CastBatch
from dlp.parallel.linear.spec import LinearSpec, check_blocks
from dlp.parallel.linear.state import BoundSpec
from dlp.quant.quantizer import Wanted
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import QuantizedTensor

_NUMBERS = itertools.count(1)
MAIN_GRADS = ("off", "grad", "main_grad")


class Member(NamedTuple):
    """One weight of a layer: the module that owns it, and the names of its weight and bias there."""

    module: nn.Module
    weight: str
    bias: str


class Layer(Protocol):
    """What weights know of their layer: its own spec, its members, and all specs that it runs under now."""

    bound: BoundSpec
    members: list[Member]

    @property
    def spec(self) -> LinearSpec: ...

    @property
    def session(self) -> Any: ...

    def bounds(self) -> list[BoundSpec]: ...

    def with_recipe(self, recipe: Recipe) -> LinearSpec: ...

    def set_spec(self, spec: LinearSpec) -> None: ...


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


class Target(NamedTuple):
    """What wgrad writes dw [N, K] to: added to what is there, or in its place."""

    tensor: Tensor
    overwrite: bool = False


class MainGrad:
    """The gradient of one parameter of layer `name`, in one of the modes but "off"."""

    def __init__(self, parameter: nn.Parameter, mode: str, name: str) -> None:
        self.parameter, self.mode, self.name = parameter, mode, name
        self._leaf = get_gradient_edge(parameter).node

    def target(self, value: Tensor) -> Target | None:
        """In a backward of a forward that read `value`, this rank's part of the parameter; None: dw is autograd's."""
        if value.data_ptr() != _local(self.parameter).data_ptr() or not self._leaves():
            return None
        return self.there()

    def _leaves(self) -> bool:
        """Whether the backward that is running leaves gradients in the parameter."""
        try:
            return torch._C._will_engine_execute_node(self._leaf)
        except RuntimeError:  # torch.autograd.grad takes it
            return False

    def there(self) -> Target | None:
        """ValueError for a `main_grad` that no dw can be added to."""
        parameter = self.parameter
        if self.mode == "grad":
            grad = None if parameter.grad is None else _local(parameter.grad)
            fits = grad is not None and grad.dtype == torch.float32 and grad.is_contiguous()
            return Target(grad) if fits and grad is not None else None
        buffer: Tensor | None = getattr(parameter, "main_grad", None)
        if buffer is None:
            return None
        main, shape = _local(buffer), _local(parameter).shape
        if main.shape != shape or main.dtype not in (torch.float32, torch.bfloat16) or not main.is_contiguous():
            raise ValueError(
                f"{self.name}: main_grad must be contiguous, fp32 or bf16, and {list(shape)} on this rank; got "
                f"{str(main.dtype).removeprefix('torch.')} {list(main.shape)}"
            )
        return Target(main, bool(getattr(parameter, "overwrite_main_grad", False)))

    def written(self) -> Tensor | None:
        """dw is there -> what autograd gets in its place."""
        if self.mode == "grad":
            return None
        self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        zeros = getattr(self.parameter, "zero_out_wgrad", False)
        return torch.zeros_like(_local(self.parameter)) if zeros else None


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class MemberWeight:
    """What every weight has of its layer, of which it is one member."""

    managed = gathered = fresh = False

    def __init__(self, owner: LayerWeights, index: int) -> None:
        self.owner, self.index = owner, index
        self.parts: list[Tensor] = []
        self.num_rowwise = 0
        self.why: str | None = None
        self.told: str | None = None

    @property
    def bound(self) -> BoundSpec:
        return self.owner.layer.bound

    @property
    def name(self) -> str:
        return self.bound.spec.members[self.index]

    @property
    def stored(self) -> Tensor | None:
        raise NotImplementedError

    def check(self, recipe: Recipe) -> None:
        """Values can be cast by any recipe, and travel where codes of them cannot; but see `check_blocks`."""
        spec, stored = self.bound.spec, self.stored
        if stored is not None:
            check_blocks(spec.name, recipe, spec.style, stored.shape, spec.tp)

    def serves(self, spec: LinearSpec) -> bool:
        return False

    def shown(self, *, written: bool) -> AbstractContextManager[None]:
        return nullcontext()


class WeightParts:
    """Flat parts of the persistent operands of a layer's weights, by orientation. `number`: no others have it; `calls`: what
    reads them and keeps to their addresses (see `dlp.parallel.linear.autograd`)."""

    def __init__(self, parts: Sequence[Tensor], sizes: tuple[int, int]) -> None:
        self.number = next(_NUMBERS)
        self.parts, self._sizes, both = parts, sizes, sum(sizes)
        self.rowwise = [part for i, part in enumerate(parts) if i % both < sizes[0]]
        self._columnwise = [part for i, part in enumerate(parts) if i % both >= sizes[0]]
        self.calls: dict[Any, Any] = {}

    @property
    def columnwise(self) -> list[Tensor]:
        """RuntimeError where the weights are held for forward passes alone."""
        if not self._sizes[1]:
            raise RuntimeError(
                "a backward reached a frozen layer, which holds no columnwise codes to make dx of: call its forward under "
                "torch.no_grad(), or leave the layer out of dlp.freeze"
            )
        return self._columnwise

    def both_of(self, used: Sequence[int]) -> list[Tensor]:
        """The parts of some of the weights, in both orientations."""
        size = sum(self._sizes)
        return [part for i in used for part in self.parts[i * size : (i + 1) * size]]

    def columnwise_of(self, used: Sequence[int]) -> list[Tensor]:
        """The columnwise parts of some of the weights."""
        size, columnwise = self._sizes[1], self.columnwise
        if len(used) * size == len(columnwise):
            return columnwise
        return [part for i in used for part in columnwise[i * size : (i + 1) * size]]


class LayerWeights:
    """The weights of one layer, in the order of its members.

    caches   the step boundary casts weights that are whole here; else passes do
    dtype    of x when the layer last ran: what values are rounded to before their cast
    parts    of all of them, where each has some
    main_grads  of each member, where a wgrad may add to its gradient itself; none: autograd adds all
    """

    def __init__(self, layer: Layer) -> None:
        self.layer, self.caches = layer, False
        self.main_grads: list[MainGrad | None] = []
        self.dtype: torch.dtype | None = None
        self.parts: WeightParts | None = None
        self.members: list[Weight] = []
        self._gathered = False

    def __getstate__(self) -> dict[str, Any]:
        """Those of a copied layer are cast by passes, until it is attached to an optimizer of its own."""
        return vars(self) | {"caches": False, "dtype": None, "parts": None, "main_grads": []}

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
            for weight in self.members:
                weight.drop(retyped=True)
            if not all(
                weight.parts for weight in self.members
            ):  # without `collect`: a trace would hold on to tensors by id
                self.parts = None
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

    def targets(self, used: Sequence[int], values: Sequence[Tensor]) -> list[Target | None]:
        """Where the wgrads of the `used` members, of which forward read these values, go in this backward; none: all to
        autograd."""
        mains = [self.main_grads[i] for i in used]
        found = [None if main is None else main.target(w) for main, w in zip(mains, values, strict=True)]
        return found if any(found) else []

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

    def drop(self) -> None:
        """Forget casts, see `Weight.drop`."""
        for weight in self.members:
            weight.drop()
        self.collect()
        tell(self.members)

    @contextmanager
    def shown(self, *, written: bool = False) -> Iterator[None]:
        """Inside, parameters have their values; `written`: which may be overwritten there."""
        with ExitStack() as stack:
            for weight in self.members:
                stack.enter_context(weight.shown(written=written))
            yield


def weights_in(model: nn.Module) -> Iterator[LayerWeights]:
    """Those of all layers of a model, each once."""
    found = (getattr(getattr(module, "core", None), "weights", None) for module in model.modules())
    yield from dict.fromkeys(weights for weights in found if isinstance(weights, LayerWeights))


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


class Values:
    """What these casts read: weights as they are stored, or copies in the dtype and of the size that casts want.

    The copies of one model, by the names of its weights, are kept from step to step, since launches know where they lie, and
    are renewed all at once: weights that are only rounded in one multi-tensor call, padded ones in another.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._asked: dict[str, tuple[Tensor, Tensor]] = {}  # this time: the copy, and what it is made from

    def of(self, name: str, weight: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        """The values of a weight [N, K] in `dtype`, with zeros appended up to `shape`: itself where it is that already,
        else a copy, which has them after the next `renew`."""
        if weight.dtype == dtype and weight.shape == shape:
            return weight
        kept = self._kept.get(name)
        if kept is None or (kept.dtype, kept.shape, kept.device) != (dtype, shape, weight.device):
            kept = torch.zeros(shape, dtype=dtype, device=weight.device)
        self._asked[name] = kept, weight
        return kept

    def renew(self) -> None:
        """Copy what was asked for since the last time, and forget what was not."""
        pairs = list(self._asked.values())
        for padded in (False, True):
            chosen = [(kept, weight) for kept, weight in pairs if (kept.shape != weight.shape) == padded]
            if chosen:
                torch._foreach_copy_([kept[: len(w), : w.shape[1]] for kept, w in chosen], [w for _, w in chosen])
        self._kept, self._asked = {name: kept for name, (kept, _) in self._asked.items()}, {}


class WeightBatch:
    """What one model keeps for this from step to step."""

    def __init__(self) -> None:
        self.values, self.casts = Values(), CastBatch()


@torch.inference_mode(False)  # later boundaries write into what this one has made
@torch.no_grad()
def refresh(session: Any, weights: Sequence[Weight]) -> None:
    """Cast these weights of a model; all ranks call it together."""
    session.weight_batch = batch = session.weight_batch or WeightBatch()
    wanted = [(weight, casts) for weight in weights if (casts := weight.casts(batch.values))]
    batch.values.renew()
    made = iter(batch.casts.make([cast for _, casts in wanted for cast in casts]))
    for weight, casts in wanted:
        weight.take([next(made) for _ in casts])
    _share([staged for weight, _ in wanted if (staged := weight.staged()) is not None])
    for weight in weights:
        weight.fresh = True
    session.stale.cast(list(dict.fromkeys(weight.owner for weight, _ in wanted)))


def _share(staged: Sequence[tuple[ProcessGroup, list[Tensor]]]) -> None:
    """Agree on what casts have staged, over these groups."""
    by_group: dict[ProcessGroup, list[Tensor]] = {}
    for group, its in staged:
        by_group.setdefault(group, []).extend(its)
    for group, amaxes in by_group.items():
        torch._foreach_copy_(amaxes, agree(amaxes, group))
