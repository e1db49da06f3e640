"""Linear, ColumnParallelLinear, RowParallelLinear, and the siblings that conversion makes.

A module owns parameters under their names; the computing is done by a `LinearCore`, which holds the frozen spec, knows
where the weights are, and is shared by siblings: layers that read the same x and run as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dlp.comm.mesh import TP
from dlp.parallel.linear import prologue as prologues
from dlp.parallel.linear.autograd import (
    ACTIVATIONS,
    OpaqueLinearFn,
    apply_directly,
    call_of,
    forward,
    no_autocast,
    opaque,
    refuse_transforms,
)
from dlp.parallel.linear.core import keeps_x
from dlp.parallel.linear.spec import LayerOptions, LinearSpec, Overlaps, num_inputs
from dlp.parallel.linear.state import LayerState, accepted, trace_with
from dlp.parallel.model.autocast import LayerRuns, active_region, active_spec
from dlp.parallel.model.session import Session
from dlp.parallel.style import shard_sizes, style
from dlp.parallel.weight.base import Member
from dlp.parallel.weight.held import hold_quantized
from dlp.parallel.weight.local import fill, local, local_weights, place
from dlp.quant import recipe as recipes
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import QuantizedTensor


def check_inputs(spec: LinearSpec, inputs: Sequence[Any]) -> None:
    """ValueError for another number of tensors than the layer reads, TypeError for what is no plain tensor."""
    prologue = spec.prologue
    reads = ("x",) if prologue is None else prologue.reads
    if len(inputs) != num_inputs(spec):
        said = "x" if prologue is None else f"{', '.join(reads)} (prologue {prologue.name})"
        raise ValueError(f"{spec.name}: it is called with {said}; got {len(inputs)} tensors")
    for name, given in zip(reads, inputs, strict=True):
        if isinstance(given, QuantizedTensor):
            raise TypeError(
                f"{spec.name}: {name} is a QuantizedTensor ({given.format.name}), but a layer quantizes {name} itself, as "
                f"its recipe says; pass the tensor it was made of, or its dequantize(dtype)"
            )
        if isinstance(given, DTensor):
            raise TypeError(
                f"{spec.name}: {name} is a DTensor, but layers read this rank's plain tensor; pass to_local() of it"
            )
        if not isinstance(given, Tensor):
            raise TypeError(f"{spec.name}: {name} must be a tensor; got {type(given).__name__}")


def autocasts(inputs: Sequence[Tensor]) -> bool:
    """Whether torch.autocast is on for the device of these tensors."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(inputs[0].device.type)


def in_autocast_dtype(inputs: Sequence[Tensor]) -> list[Tensor]:
    """What nn.Linear does under torch.autocast: activations in its dtype, in which y comes, too."""
    dtype = torch.get_autocast_dtype(inputs[0].device.type)
    return [given.to(dtype) if given.dtype in ACTIVATIONS else given for given in inputs]


def moment(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """What the y of these tensors depends on beside who they are: their values, as far as torch counts changes in place
    (it does not for tensors made in inference mode, nor in a graph that it compiles), and how a layer runs now."""
    now = torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
    if torch.compiler.is_dynamo_compiling():
        return now
    try:
        return *now, active_region(), *[given._version for given in inputs]
    except RuntimeError:  # of inference mode
        return *now, active_region()


class SharedCall:
    """What siblings share: the y_i that the first call with an x has made, and nobody has collected yet. The others bring the
    same x and collect theirs."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The weights changed: nobody may collect the rest."""
        self._inputs: tuple[Tensor, ...] = ()
        self._moment: tuple[Any, ...] = ()
        self._ys: dict[int, Tensor] = {}

    def holds(self, index: int, now: tuple[Any, ...]) -> bool:
        """Whether this member's y is there and would be the same if it were made now."""
        return index in self._ys and now == self._moment

    def reads(self, inputs: Sequence[Tensor]) -> bool:
        """Whether it was made of these tensors."""
        return all(given is first for given, first in zip(inputs, self._inputs, strict=True))

    def keep(self, inputs: tuple[Tensor, ...], now: tuple[Any, ...], ys: Sequence[Tensor]) -> None:
        self._inputs, self._moment, self._ys = inputs, now, dict(enumerate(ys))

    def collect(self, index: int) -> Tensor:
        y = self._ys.pop(index)
        if not self._ys:
            self.forget()
        return y


class LinearCore(LayerState):
    """Computes y_i = x @ w_i.T + b_i for its members."""

    def __init__(self, spec: LinearSpec, session: Session, members: Sequence[Member]) -> None:
        super().__init__(spec, session, members)
        self.ran_under = LayerRuns()
        self.weights = self.bound.weights = local_weights(self)
        self.bias_apart = spec.return_bias
        self.shared = SharedCall()
        hold_quantized(self.weights)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"shared": SharedCall()}

    def parameters(self) -> list[Any]:
        """The weights, then the biases that it adds, as modules hold them."""
        try:
            weights = [m.module._parameters[m.weight] for m in self.members]
            return weights + [None if self.bias_apart else m.module._parameters[m.bias] for m in self.members]
        except KeyError as missing:
            parameter_is_gone(self.spec.name, missing.args[0])

    def weight_tensors(self) -> list[Tensor]:
        return [self._local(getattr(m.module, m.weight)) for m in self.members]

    def biases(self) -> list[Tensor | None]:
        return [None if self.bias_apart else self._bias(member) for member in self.members]

    def _bias(self, member: Member) -> Tensor | None:
        bias = getattr(member.module, member.bias)
        return None if bias is None else self._local(bias)

    def bias_for(self, index: int, y: Tensor) -> Tensor | None:
        """What `return_bias` returns beside y: this rank's bias [N] in y's dtype, in memory of its own, as FSDP frees what it
        has gathered. Gradients go to the parameter; that of a row-parallel layer counts what this rank adds it to."""
        bias = self._bias(self.members[index])
        return None if bias is None else bias.to(y.dtype, copy=True)

    def _local(self, parameter: Tensor) -> Tensor:
        return local(parameter, self.spec.name, self.spec.num_axes)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """x [..., K], or what the prologue reads -> y_i [..., N_i] (token shards in or out as the style says).

        Under torch.autocast x is cast to its dtype first, as `nn.Linear` does, and y comes in it."""
        count = len(inputs)
        if (
            count != self.bound.num_inputs
            or count > 2
            or type(inputs[0]) is not Tensor
            or type(inputs[-1]) is not Tensor
        ):
            check_inputs(self.spec, inputs)
            inputs = self._accepted(inputs)
        if autocasts(inputs):
            with no_autocast(inputs):
                return self(*in_autocast_dtype(inputs))
        if opaque():
            return self.by_ops(inputs)
        refuse_transforms(self.spec.name)
        bound, record = active_spec(self), torch.is_grad_enabled()
        sides = self.weights.kept(bound, inputs[0].dtype)
        parameters = self.parameters()
        call = call_of(bound, record, inputs, parameters, sides)
        if call.differentiable:
            results: tuple[Tensor, ...] = apply_directly(call, sides, *inputs, *parameters)
            return results
        return tuple(forward(call, sides, inputs, parameters)[0])

    def _accepted(self, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Tensors, of which those that came quantized are as this layer can take them."""
        bound = self.bound if opaque() else active_spec(self)
        return tuple([accepted(bound, x, "x") if hasattr(x, "operands") else x for x in inputs])

    def by_ops(self, inputs: tuple[Tensor, ...], prologue: tuple[Any, ...] = ()) -> tuple[Tensor, ...]:
        """The same, for what traces or watches. `prologue`: in the place of the layer's own, as `trace_with` takes it."""
        bound = self.bound if torch.compiler.is_dynamo_compiling() else active_spec(self)
        trace = trace_with(bound.trace_id, *prologue) if prologue else bound.trace_id
        kept, weights, biases = self.weights.kept(bound, inputs[0].dtype), self.weight_tensors(), self.biases()
        cached = [] if kept is None else kept.parts
        record = torch.is_grad_enabled()
        if not (record and any(t is not None and t.requires_grad for t in (*inputs, *weights, *biases))):
            # no autograd function where there is nothing to differentiate: torch 2.11 compiles one wrongly there
            given = list(inputs)
            ys, _ = torch.ops.dlp.linear_fwd(given, weights, biases, cached, bound.spec_id, trace, False, record)
            return tuple(ys)
        needs_dx, learns = (any(t.requires_grad for t in given) for given in (inputs, weights))
        save = keeps_x(bound.spec.recipe, needs_dx, learns)
        results: tuple[Tensor, ...] = OpaqueLinearFn.apply(
            bound.spec_id, trace, len(inputs), len(weights), save, record, bound.spec.options.delay_wgrad, *inputs,
            *weights, *biases, *cached,
        )  # fmt: skip
        return results

    def sibling(self, index: int, *inputs: Tensor) -> Tensor:
        """y of one member. The first call with an x computes all; the others, which must bring the same x, collect. One
        for which anything has changed since, x in place or the grad mode, computes anew."""
        if len(self.members) == 1:
            return self(*inputs)[0]
        now = moment(inputs)
        if not self.shared.holds(index, now):
            self.shared.keep(inputs, now, self(*inputs))
        elif not self.shared.reads(inputs):
            names = ", ".join(repr(m.module.name) for m in self.members)
            raise ValueError(
                f"{self.members[index].module.name}: siblings must read the same tensor, but this one got another than "
                f"its siblings ({names}); set siblings = false for this layer group"
            )
        return self.shared.collect(index)


def parameter_is_gone(layer: str, parameter: str) -> NoReturn:
    """A layer has not found its parameter where modules keep them."""
    raise ValueError(
        f"{layer}: its {parameter} is no parameter of it any more, as after weight_norm, or under torch's FSDP1; parametrize "
        f"linears before dlp.convert and leave them out by a layer group with convert = false; instead of FSDP1 use "
        f"dlp.fully_shard"
    ) from None


class ParallelLinear(nn.Module):
    """Base of the linear layers: parameters `weight` [N, K] and `bias` [N] (or one pair per sibling), and a core."""

    dlp_made = "by hand"
    core: LinearCore
    tp_partial: tuple[str, ...] = ()

    def extra_repr(self) -> str:
        spec = self.core.spec
        return f"{spec.style.name}, tp={spec.tp}, recipe={spec.recipe}"

    def _load_from_state_dict(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        with self.core.weights.shown(written=True):
            super()._load_from_state_dict(*args, **kwargs)
        self.core.weights.drop()
        self.core.shared.forget()

    def _save_to_state_dict(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        with self.core.weights.shown():
            super()._save_to_state_dict(*args, **kwargs)


def partial_names(spec: LinearSpec, members: Sequence[Member]) -> tuple[str, ...]:
    """The parameters whose gradient on each rank covers its own tokens only."""
    weights = [m.weight for m in members] if spec.style.partial_weight_grad else []
    biases = [m.bias for m in members] if spec.style.partial_bias_grad else []
    return tuple(weights + biases)


class ConvertedLinear(ParallelLinear, nn.Linear):
    """An nn.Linear that conversion made parallel, in place: what was registered with it or refers to it stays, and code that
    initialises linears finds it. It owns its parameters; the core is its own, or that of siblings with the same x."""

    dlp_made = "by convert"
    name: str
    index: int

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        y = self.core.sibling(self.index, x, *more)
        return (y, self.core.bias_for(self.index, y)) if self.core.bias_apart else y

    def reset_parameters(self) -> None:
        """Those of an nn.Linear: rank 0 draws, each rank keeps its part. Needs memory for the whole weight for a moment."""
        device, dtype, biased = self.weight.device, self.weight.dtype, self.bias is not None
        drawn = nn.Linear(self.in_features, self.out_features, biased, device=device, dtype=dtype)
        with self.core.weights.shown(written=True):
            for mine, whole in zip(self.parameters(False), drawn.parameters(), strict=True):
                fill(mine, whole)
        self.core.weights.drop()


class Linear(ParallelLinear):
    """y = x @ weight.T + bias, whole on every rank. x [..., in_features] -> [..., out_features].

    `prologue`: what makes x in the cast of it: "rms_norm", or {"name": "rms_norm", "eps": ...}, of layer(x, weight);
    "layer_norm" of layer(x, weight, bias); "swiglu" and "geglu" of layer(gate, up). The gradients go to what it is called with.
    `return_bias`: forward returns (y, bias) where whoever is called next adds the bias; siblings a tuple of each.
    `save_original_input`: x itself is kept for wgrad, and quantized again in backward.
    """

    _style = "local"

    def __init__(
        self, in_features: int, out_features: int | tuple[int, ...], bias: bool = False, *,
        tp: DeviceMesh | ProcessGroup | None = None, sequence_parallel: bool = False, recipe: str | Recipe = "bf16",
        overlap: str = "serial", prologue: str | Mapping[str, Any] | None = None,
        return_bias: bool = False, save_original_input: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip  # many parameters: those of nn.Linear, and of the layers of other tensor-parallel libraries
        super().__init__()
        mesh = _as_mesh(tp, device)
        session = Session(lone=True, amax_group=None if mesh is None else mesh.get_group())
        members = (
            ("linear",) if isinstance(out_features, int) else tuple(f"linear_{i}" for i in range(len(out_features)))
        )
        spec = LinearSpec(
            type(self).__name__, style(self._style, sequence_parallel), recipes.as_recipe(recipe).for_layer(members[0]),
            Overlaps.named(overlap), None if mesh is None else mesh.get_group(), members=members,
            options=LayerOptions(save_original_input=save_original_input or None), prologue=prologues.load(prologue),
            return_bias=return_bias,
        )  # fmt: skip
        self.in_features, self.out_features = in_features, out_features
        sizes = (out_features,) if isinstance(out_features, int) else out_features
        suffixes = [""] if isinstance(out_features, int) else [f"_{i}" for i in range(len(sizes))]
        owners = [Member(self, f"weight{suffix}", f"bias{suffix}") for suffix in suffixes]
        for member, size in zip(owners, sizes, strict=True):
            shard_sizes(spec.style, size, in_features, spec.tp, spec.name)
            full = nn.Linear(in_features, size, bias, device=device, dtype=dtype)
            bias_dim = 0 if spec.style.shard_dim == 0 else None
            self.register_parameter(member.weight, place(full.weight, mesh, spec.style.shard_dim))
            self.register_parameter(member.bias, place(full.bias, mesh, bias_dim) if bias else None)
        self.core = LinearCore(spec, session, owners)
        self.core.weights.check(self.core.spec.recipe)
        session.cores.append(self.core)
        self.tp_partial = partial_names(spec, owners)

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        """`more`: what a prologue reads beside the first of its tensors."""
        ys, one = self.core(x, *more), isinstance(self.out_features, int)
        if not self.core.bias_apart:
            return ys[0] if one else ys
        biases = tuple([self.core.bias_for(i, y) for i, y in enumerate(ys)])
        return (ys[0], biases[0]) if one else (ys, biases)


class ColumnParallelLinear(Linear):
    """out_features are cut over tp: x [..., K] whole (or token shards [M/tp, K]) -> y [..., N/tp].

    `out_features` may be a tuple: several weights (`weight_0`, `weight_1`, ...) that read the same x; forward then
    returns a tuple. Raises ValueError when tp does not divide an out_features.
    """

    _style = "column"


class RowParallelLinear(Linear):
    """in_features are cut over tp: x [..., K/tp] -> y [..., N] whole (or token shards [M/tp, N]).

    Raises ValueError when tp does not divide in_features.
    """

    _style = "row"

    def __init__(self, in_features: int, out_features: int, bias: bool = False, **options) -> None:  # type: ignore[no-untyped-def]
        if not isinstance(out_features, int):
            raise ValueError(
                f"RowParallelLinear takes one out_features; got {out_features!r}: siblings are column-parallel"
            )
        super().__init__(in_features, out_features, bias, **options)


def _as_mesh(tp: DeviceMesh | ProcessGroup | None, device: torch.device | str | None) -> DeviceMesh | None:
    if tp is None or isinstance(tp, DeviceMesh):
        return tp
    kind = torch.device(device).type if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    return DeviceMesh.from_group(tp, kind, mesh_dim_names=(TP,))
