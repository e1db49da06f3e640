"""Linear, ColumnParallelLinear and RowParallelLinear, and the class that `convert` gives to nn.Linear.

A module owns the parameters, and a `LinearCore` runs the layer: the core has the spec and accesses the weights. Siblings, which
are layers that read the same x, share one core and run as one layer. A forward calls

    modules.py      `LinearCore.__call__`   checks the inputs, finds the spec that applies and the operands of the weights
    autograd.py     `call_of`, `LINEAR`     the record that calls with equal shapes share; saves tensors for backward
    functional.py   `linear_forward`        cast, gather, GEMM, reduce
    casts.py        `cast`                  observe, agree, cast
    overlap/        the strategy            issues gathers, GEMMs and reductions
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dlp.comm.mesh import TP, tp_mesh_of
from dlp.parallel import auto
from dlp.parallel.linear.active import REGION, LayerRuns, active_region, saved_tensor_hooks, spec_among_others
from dlp.parallel.linear.autograd import LINEAR, call_of, forward
from dlp.parallel.linear.codes import Reader, codes_of
from dlp.parallel.linear.opaque import OpaqueLinearFn
from dlp.parallel.linear.plan import keeps_x
from dlp.parallel.linear.quantize import accepted
from dlp.parallel.linear.spec import LayerOptions, LinearSpec, Overlaps
from dlp.parallel.linear.state import BoundSpec, LayerState, StepState
from dlp.parallel.style import shard_sizes, style
from dlp.parallel.weight.base import Member
from dlp.parallel.weight.held import HeldWeight, hold_quantized
from dlp.parallel.weight.local import fill, local, place, set_local
from dlp.parallel.weight.parameters import SpreadModule, check_finite
from dlp.quant import recipe as recipes
from dlp.quant.recipe import Recipe
from dlp.quant.tensor import QuantizedTensor
from dlp.runtime.function import apply_pass, autocast_is_on, in_autocast_dtype, no_autocast, opaque, refuse_transforms
from dlp.te_arguments import ARGUMENTS as TE_ARGUMENTS
from dlp.te_arguments import keywords_of, refuse


def check_input(spec: LinearSpec, x: Any) -> None:
    """Raise TypeError if x is a QuantizedTensor, a DTensor or not a tensor."""
    if isinstance(x, QuantizedTensor):
        raise TypeError(
            f"{spec.name}: x is a QuantizedTensor ({x.format.name}), but a layer quantizes x by the recipe of the "
            f"layer; pass the high-precision tensor, or x.dequantize(dtype)"
        )
    if isinstance(x, DTensor):
        raise TypeError(f"{spec.name}: x is a DTensor, but layers read plain local tensors; pass x.to_local()")
    if not isinstance(x, Tensor):
        raise TypeError(f"{spec.name}: x must be a tensor; got {type(x).__name__}")


def calling_state(x: Tensor) -> tuple[Any, ...]:
    """Return the state, besides x itself, on which y depends: grad mode, torch's autocast, the autocast region of dlp, and the
    version counter of x (none for tensors of inference mode). While torch compiles, return only the first two."""
    modes = torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
    if torch.compiler.is_dynamo_compiling():
        return modes
    try:
        return *modes, active_region(), x._version
    except RuntimeError:  # tensors of inference mode have no version
        return *modes, active_region()


class SharedCall:
    """Outputs of siblings between their calls. The first sibling that is called with an x computes the y_i of all siblings; the
    other siblings are called with the same x and take their y_i. Each thread has separate outputs."""

    def __init__(self) -> None:
        self._of_thread: dict[int, SiblingOutputs] = {}

    def forget(self) -> None:
        """Discard outputs that were not taken, in all threads, because the weights changed."""
        self._of_thread = {}

    def find(self, index: int, state: tuple[Any, ...]) -> SiblingOutputs | None:
        """Return this thread's outputs, if they contain the y of this member and were computed in the same `calling_state`;
        else None."""
        found = self._of_thread.get(_thread())
        return found if found is not None and index in found.ys and state == found.state else None

    def keep(self, x: Tensor, state: tuple[Any, ...], ys: dict[int, Tensor]) -> None:
        self._of_thread[_thread()] = SiblingOutputs(x, state, ys)

    def take(self, index: int) -> Tensor:
        """Remove the y of a member from the outputs of this thread, and return it."""
        thread = _thread()
        ys = self._of_thread[thread].ys
        y = ys.pop(index)
        if not ys:
            del self._of_thread[thread]
        return y


def _thread() -> int:
    """Return the id of the running thread; 0 while torch.compile traces, which uses one thread."""
    return 0 if torch.compiler.is_dynamo_compiling() else threading.get_ident()


class SiblingOutputs(NamedTuple):
    """Outputs of one computation of siblings.

    x       the input of all siblings
    state   `calling_state` of the computation
    ys      y by member index, without the y that were taken
    """

    x: Tensor
    state: tuple[Any, ...]
    ys: dict[int, Tensor]

    def reads_alias(self, x: Tensor) -> bool:
        """Whether x is a view of the same memory as `self.x`; a full backward hook passes such a view to its module."""
        return _memory(x) == _memory(self.x)


def _memory(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device


class LinearCore(LayerState):
    """Compute y_i = x @ w_i.T + b_i for one linear (one member) or for siblings (several members).

    ran_under     record of forwards in autocast regions and activation checkpoints (`LayerRuns`)
    bias_apart    whether y_i is returned without b_i (`return_bias`)
    shared        outputs of siblings that were computed but not taken yet
    """

    def __init__(self, spec: LinearSpec, session: StepState, members: Sequence[Member]) -> None:
        super().__init__(spec, session, members)
        self.ran_under = LayerRuns()
        set_local(self)
        self.bias_apart = spec.return_bias
        self.shared = SharedCall()
        hold_quantized(self.weights)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"shared": SharedCall()}

    def parameters(self) -> list[Any]:
        """Return the parameters of the modules: the weights, then the biases that are added to y (None: no bias)."""
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
        """Return the bias [N] that `return_bias` returns with y: this rank's shard in the dtype of y, copied, since FSDP frees
        gathered memory. Autograd passes the gradient of this copy to the parameter; the gradient covers only the tokens of
        this rank's y."""
        bias = self._bias(self.members[index])
        return None if bias is None else bias.to(y.dtype, copy=True)

    def _local(self, parameter: Tensor) -> Tensor:
        return local(parameter, self.spec.name, self.spec.num_axes)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute y_i [..., N_i] from x [..., K]. Depending on the style, x or y is a token shard.

        Under torch.autocast x is cast to the dtype of autocast first, as in `nn.Linear`, and y has this dtype."""
        if type(x) is not Tensor:
            check_input(self.spec, x)
            if hasattr(x, "operands"):  # quantized already; decoded if this layer would cast x differently
                x = accepted(self.bound if opaque() else self.active_spec(), x, "x")
        if torch._C._is_any_autocast_enabled() and autocast_is_on(x):
            with no_autocast((x,)):
                return self(in_autocast_dtype(x))
        if opaque():
            return self.by_ops(x)
        if torch._C._are_functorch_transforms_active():  # `apply_pass` does not check for transforms
            refuse_transforms(self.spec.name)
        bound, record, weights = self.active_spec(), torch.is_grad_enabled(), self.weights
        if bound is self.bound and x.dtype == weights.dtype:
            cast_weights = weights.parts
        else:  # the spec of an autocast region or of an earlier forward, or another dtype than in the last call
            cast_weights = weights.operands_for(bound, x.dtype)
        parameters = self.parameters()
        if weights.held:
            weights.check_in_place(parameters)
        call = call_of(bound, record, x, parameters, cast_weights)
        if call.differentiable:
            results: tuple[Tensor, ...] = apply_pass(LINEAR, (call, cast_weights), x, *parameters)
            return results
        return forward(None, (call, cast_weights), (x, *parameters))

    def active_spec(self) -> BoundSpec:
        """Return the bound spec under which a forward of this layer runs now, and set the delayed scales of this forward in the
        session where they differ from the table."""
        own, session = self.bound, self.bound.session
        own_scales = not session.attached and own.spec.slots  # delayed scales that no step boundary updates
        in_region = REGION.get() is not None or session.regions
        if in_region or own_scales or self.ran_under.recipe_changed or saved_tensor_hooks() is not None:
            return spec_among_others(self)
        return own

    def by_ops(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run `__call__` through the opaque ops (`dlp.parallel.linear.opaque`), for traced or watched calls."""
        bound = self.traced_bound()
        cast_weights = self.weights.operands_for(bound, x.dtype)
        weights, biases = self.weight_tensors(), self.biases()
        if self.weights.held and not torch.compiler.is_dynamo_compiling():
            self.weights.check_in_place(self.parameters())
        cached = [] if cast_weights is None else cast_weights.parts
        record, trace_id = torch.is_grad_enabled(), bound.trace_id
        differentiable = record and any(t is not None and t.requires_grad for t in (x, *weights, *biases))
        save = differentiable and keeps_x(bound.spec.recipe, x.requires_grad, any(w.requires_grad for w in weights))
        rowwise, columnwise = self._codes_for(bound, x, save)
        if not differentiable:
            # the op without the autograd function: torch 2.11 miscompiles an autograd function that needs no gradient
            codes = [*rowwise, *columnwise]
            ys, _ = torch.ops.dlp.linear_fwd(x, weights, biases, cached, bound.spec_id, trace_id, False, record, codes)
            return tuple(ys)
        results: tuple[Tensor, ...] = OpaqueLinearFn.apply(
            x, bound.spec_id, trace_id, len(weights), (len(rowwise), len(columnwise)), save, record,
            bound.spec.options.delay_wgrad, *weights, *biases, *cached, *rowwise, *columnwise,
        )  # fmt: skip
        return results

    def traced_bound(self) -> BoundSpec:
        """Return the bound spec under which a traced or watched call runs."""
        return self.bound if torch.compiler.is_dynamo_compiling() else self.active_spec()

    def reader(self, bound: BoundSpec | None = None) -> Reader:
        """Return the `Reader` with which an op before this layer casts x, in a traced or watched call. `bound`: the bound spec
        of the call; None: `traced_bound`."""
        bound, record = bound or self.traced_bound(), torch.is_grad_enabled()
        trained = any(weight.requires_grad for weight in self.parameters()[: len(self.members)])
        return Reader(bound, bound.trace_id, record and keeps_x(bound.spec.recipe, True, trained), record)

    def _codes_for(self, bound: BoundSpec, x: Tensor, save: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the rowwise and the columnwise parts of an x that an earlier op cast for this layer; empty: this layer casts
        x."""
        codes = codes_of(x)
        return (codes.rowwise, codes.columnwise) if codes is not None and codes.reader.serves(bound, save) else ((), ())

    def sibling(self, index: int, x: Tensor) -> Tensor:
        """Return y of one member. The first sibling that is called with an x computes all y_i; the other siblings must be
        called with the same x, and take their y_i. If `calling_state` has changed since, for example by an in-place change of x
        or another grad mode, or if x is a view of the same memory, the y_i are computed again. Raises ValueError for another
        x."""
        if len(self.members) == 1:
            return self(x)[0]
        state = calling_state(x)
        waiting = self.shared.find(index, state)
        if waiting is None:
            self.shared.keep(x, state, dict(enumerate(self(x))))
        elif waiting.x is x:
            pass
        elif waiting.reads_alias(x):
            self.session.note(
                f"siblings of {self.spec.name} are called with different tensors over the same memory (a full backward "
                f"hook causes this): all siblings are computed for each tensor"
            )
            self.shared.keep(x, state, {i: y for i, y in enumerate(self(x)) if i in waiting.ys})
        else:
            names = ", ".join(repr(m.module.name) for m in self.members)
            raise ValueError(
                f"{self.members[index].module.name}: siblings must read the same tensor, but x differs from the tensor "
                f"that the siblings read ({names}); set siblings = false for this layer group"
            )
        return self.shared.take(index)


def parameter_is_gone(layer: str, parameter: str) -> NoReturn:
    """Raise ValueError for a parameter that is missing in its module."""
    raise ValueError(
        f"{layer}: {parameter} is no longer a parameter of the module (weight_norm and FSDP1 of torch remove "
        f"parameters); parametrize linears before dlp.convert and leave them out by a layer group with convert = "
        f"false; use dlp.fully_shard instead of FSDP1"
    ) from None


class ParallelLinear(SpreadModule):
    """Base of the linear layers: parameters `weight` [N, K] and `bias` [N] (or one pair per sibling), and a core.

    dlp_made     origin of the layer: "by hand" (constructed explicitly) or "by convert"
    core         the `LinearCore`, which siblings share
    tp_partial   names of parameters whose gradients on one rank are partial sums, to be summed over tp
    """

    dlp_made = "by hand"
    core: LinearCore
    tp_partial: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelLinear:
        """Apply `to`, `half`, `to_empty` and the like. Quantized-only weights, which torch cannot move, are moved here."""
        held = {weight.member.weight: weight for weight in self._held_weights()}
        for weight in held.values():
            weight.check_move(fn(torch.empty(0, device=self.core.device)).device)
        self._parameters.update(dict.fromkeys(held))
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update({name: weight.parameter for name, weight in held.items()})
        for weight in held.values():
            weight.move(fn)
        return self

    def extra_repr(self) -> str:
        spec = self.core.spec
        return f"{spec.style.name}, tp={spec.tp}, recipe={spec.recipe}"

    def _load_from_state_dict(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        state_dict, prefix = args[:2]
        for weight in self._held_weights():
            given = state_dict.get(f"{prefix}{weight.member.weight}")
            if isinstance(given, Tensor) and not given.is_meta and given.dtype.is_floating_point and given.itemsize > 1:
                check_finite(f"{prefix}{weight.member.weight}", given)
        with self.core.weights.shown(written=True):
            super()._load_from_state_dict(*args, **kwargs)
        self.core.weights.drop()
        self.core.shared.forget()

    def _save_to_state_dict(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        with self.core.weights.shown():
            super()._save_to_state_dict(*args, **kwargs)

    def _held_weights(self) -> list[HeldWeight]:
        """Return the weights of this module that exist as codes only."""
        held = [weight for weight in self.core.weights if isinstance(weight, HeldWeight)]
        return [weight for weight in held if weight.member.module is self]


def partial_names(spec: LinearSpec, members: Sequence[Member]) -> tuple[str, ...]:
    """Return the names of parameters whose gradients cover only the tokens of this rank and must be summed over tp at the end
    of backward. An invariant layer has no such names, since the layer sums these gradients within its backward."""
    if spec.invariant:
        return ()
    weights = [m.weight for m in members] if spec.style.partial_weight_grad else []
    biases = [m.bias for m in members] if spec.style.partial_bias_grad else []
    return tuple(weights + biases)


class ConvertedLinear(ParallelLinear, nn.Linear):
    """Class that `convert` assigns to an nn.Linear: the object with its hooks and references stays the same, and code that
    initializes every nn.Linear still finds the layer. Siblings share one core, in which this layer is member `index`."""

    dlp_made = "by convert"
    name: str
    index: int

    def forward(self, x: Tensor) -> Any:
        y = self.core.sibling(self.index, x)
        return (y, self.core.bias_for(self.index, y)) if self.core.bias_apart else y

    def reset_parameters(self) -> None:
        """Draw the initial values of an nn.Linear; each rank keeps a shard of the values of rank 0. The full weight is
        allocated temporarily."""
        device, dtype, biased = self.weight.device, self.weight.dtype, self.bias is not None
        drawn = nn.Linear(self.in_features, self.out_features, biased, device=device, dtype=dtype)
        with self.core.weights.shown(written=True):
            for parameter, whole in zip(self.parameters(False), drawn.parameters(), strict=True):
                fill(parameter, whole)
        self.core.weights.drop()


class Linear(ParallelLinear):
    """Apply y = x @ weight.T + bias, with quantized GEMM operands; every rank holds the complete weight.

    Args:
        in_features: size of the last dimension of x.
        out_features: size of the last dimension of y. A tuple creates sibling weights (`weight_0`, `weight_1`, ...) that
            read the same x; forward then returns a tuple.
        bias: whether to add a learnable bias.
        tp: tensor-parallel ranks: a DeviceMesh with one axis, such as `mesh["tp"]`, or a ProcessGroup. None: this rank
            alone.
        sequence_parallel: whether x is the token shard of this rank; after `dlp.attach` or `dlp.convert`, gradients of
            parameters are summed over tp.
        recipe: name of a recipe ("fp8_current"), or a `Recipe`.
        overlap: "auto", "serial" or "chunked", or a dict from "fprop", "dgrad" and "wgrad" to these names. "auto" chooses
            at construction from the tables in dlp/parallel/tables, for a total of 8192 tokens over the tp ranks; `dlp.convert`
            chooses for its `batch`.
        return_bias: return (y, bias) instead of adding the bias; tuples for siblings.
        save_original_input: save x in high precision for wgrad, and quantize x again in backward.
        delay_wgrad: compute wgrad in `dlp.backward_dw` instead of in backward.
        init_method: function that fills each complete weight in place; biases are then 0. None: the initialization of
            `torch.nn.Linear`.
        name: name of the layer in plans and messages; None: name of the class.
        device: device of the parameters.
        dtype: dtype of the parameters.
        **options: options of Transformer Engine. Values that do not change the layer are accepted; other values raise
            TypeError, and the message names the alternative.

    Shape:
        - x: [..., in_features]
        - y: [..., out_features]
        - weight: [out_features, in_features], bias: [out_features]

    Raises:
        ValueError: for an unknown recipe or overlap strategy, and for options that exclude each other.
        TypeError: for an unknown option, and for an option of Transformer Engine with a value that is not neutral.

    Examples:
        >>> layer = dlp.Linear(64, 128, bias=True, recipe="fp8_current")
        >>> layer(torch.randn(16, 64)).shape
        torch.Size([16, 128])
    """

    _style = "local"
    _te_family = "layer"  # a key of `dlp.te_arguments.ARGUMENTS`

    def __init__(  # noqa: PLR0913 (the parameters of nn.Linear, and of the layers of other tensor-parallel libraries)
        self, in_features: int, out_features: int | tuple[int, ...], bias: bool = False, *,
        tp: DeviceMesh | ProcessGroup | None = None, sequence_parallel: bool = False, recipe: str | Recipe = "bf16",
        overlap: str | Mapping[str, str] = "auto", return_bias: bool = False, save_original_input: bool = False,
        delay_wgrad: bool = False, init_method: Callable[[Tensor], Any] | None = None, name: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if options:
            refuse(type(self).__name__, TE_ARGUMENTS[self._te_family], options, keywords_of(Linear.__init__))
        self._init_method = init_method
        mesh = _as_mesh(tp, device)
        session = StepState(lone=True, amax_group=None if mesh is None else mesh.get_group())
        members = (
            ("linear",) if isinstance(out_features, int) else tuple(f"linear_{i}" for i in range(len(out_features)))
        )
        self.overlap: auto.Asked = dict(overlap) if isinstance(overlap, Mapping) else overlap
        row, made = style(self._style, sequence_parallel), recipes.as_recipe(recipe).for_layer(members[0])
        sizes = (out_features,) if isinstance(out_features, int) else out_features
        group, device_type = (None, "cpu") if mesh is None else (mesh.get_group(), mesh.device_type)
        for size in sizes:
            shard_sizes(row, size, in_features, 1 if group is None else group.size(), type(self).__name__)
        problem = auto.Problem(row, auto.NOMINAL, in_features, sizes, made)
        chosen = auto.at_construction(self.overlap, problem, group, device_type)
        asked = LayerOptions(save_original_input=save_original_input or None, delay_wgrad=delay_wgrad or None)
        spec = LinearSpec(
            name or type(self).__name__, row, made, Overlaps.named(chosen), group, members=members,
            options=asked.settled(row), return_bias=return_bias,
        )  # fmt: skip
        for reason in asked.refusals(row):
            session.note(f"{spec.name}: {reason}")
        self.in_features, self.out_features = in_features, out_features
        owners = [Member(self, *names) for names in self._parameter_names(len(sizes))]
        for member, size in zip(owners, sizes, strict=True):
            full = self._drawn(size, bias, device, dtype)
            bias_dim = 0 if spec.style.shard_dim == 0 else None
            self.register_parameter(member.weight, place(full.weight, mesh, spec.style.shard_dim))
            self.register_parameter(member.bias, place(full.bias, mesh, bias_dim) if bias else None)
        self.core = LinearCore(spec, session, owners)
        self.core.weights.check(self.core.spec.recipe)
        session.cores.append(self.core)
        self.tp_partial = partial_names(spec, owners)
        partials = [name for name in self.tp_partial if self._parameters[name] is not None]
        if partials and spec.tp > 1:
            names = " and ".join(partials)
            said = f"{spec.name}: the gradient of {names} covers only the tokens of this tp rank: call dlp.attach"
            session.check_gradients = partial(session.note, said)

    def _parameter_names(self, count: int) -> list[tuple[str, str]]:
        """Return the names of the weight and the bias of each sibling."""
        suffixes = [""] if isinstance(self.out_features, int) else [f"_{i}" for i in range(count)]
        return [(f"weight{suffix}", f"bias{suffix}") for suffix in suffixes]

    def _drawn(self, size: int, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Linear:
        """Create an unsharded nn.Linear with initial values. With an init_method the bias is 0."""
        full = nn.Linear(self.in_features, size, bias, device=device, dtype=dtype)
        if self._init_method is not None:
            with torch.no_grad():
                self._init_method(full.weight)
                if bias:
                    full.bias.zero_()
        return full

    def reset_parameters(self) -> None:
        """Draw initial values; each rank keeps a shard of the values of rank 0. The full weight is allocated temporarily."""
        sizes = (self.out_features,) if isinstance(self.out_features, int) else self.out_features
        with self.core.weights.shown(written=True):
            for member, size in zip(self.core.members, sizes, strict=True):
                weight, bias = getattr(self, member.weight), getattr(self, member.bias)
                drawn = self._drawn(size, bias is not None, weight.device, weight.dtype)
                fill(weight, drawn.weight)
                if bias is not None:
                    fill(bias, drawn.bias)
        self.core.weights.drop()

    def forward(self, x: Tensor) -> Any:
        """Return y, or a tuple of y_i for several weights; with `return_bias` the pair (y, bias)."""
        ys, one = self.core(x), isinstance(self.out_features, int)
        if not self.core.bias_apart:
            return ys[0] if one else ys
        biases = tuple([self.core.bias_for(i, y) for i, y in enumerate(ys)])
        return (ys[0], biases[0]) if one else (ys, biases)


class ColumnParallelLinear(Linear):
    """Linear whose out_features are sharded over tp: rank r computes features r*N/tp to (r+1)*N/tp of y.

    The arguments are those of `dlp.Linear`. Backward sums dx over tp; with sequence parallelism forward gathers the tokens of
    x, quantized, and backward reduce-scatters dx.

    Args:
        in_features: size K of the last dimension of x.
        out_features: number N of output features of all ranks; a tuple creates sibling weights that read the same x.
        bias: whether to add a learnable bias.
        tp: tensor-parallel ranks: a DeviceMesh with one axis, such as `mesh["tp"]`, or a ProcessGroup. None: this rank
            alone.
        sequence_parallel: whether x is the token shard of this rank.
        recipe: name of a recipe, or a `Recipe`.
        overlap: "auto", "serial" or "chunked", or a dict from "fprop", "dgrad" and "wgrad" to these names.
        return_bias: return (y, bias) instead of adding the bias.
        save_original_input: save x in high precision for wgrad, and quantize x again in backward.
        delay_wgrad: compute wgrad in `dlp.backward_dw` instead of in backward.
        init_method: function that fills each complete weight in place; biases are then 0. None: the initialization of
            `torch.nn.Linear`.
        name: name of the layer in plans and messages; None: name of the class.
        device: device of the parameters.
        dtype: dtype of the parameters.
        **options: options of Transformer Engine. Values that do not change the layer are accepted; other values raise
            TypeError, and the message names the alternative.

    Shape:
        - x: [..., K]; with sequence parallelism the token shard [M/tp, K]
        - y: [..., N/tp]; with sequence parallelism [M, N/tp]
        - weight on each rank: [N/tp, K]

    Raises:
        ValueError: when tp does not divide `out_features`.

    Examples:
        >>> up = dlp.ColumnParallelLinear(64, 128, tp=dlp.build_mesh()["tp"], recipe="fp8_current")
        >>> up(torch.randn(16, 64)).shape  # tp = 1
        torch.Size([16, 128])
    """

    _style = "column"


class RowParallelLinear(Linear):
    """Linear whose in_features are sharded over tp; forward sums the partial products of all tp ranks.

    With sequence parallelism the sum is a reduce-scatter over tokens, and backward gathers dy, quantized. The bias is added
    once, after the sum.

    Args:
        in_features: number K of input features of all ranks.
        out_features: size N of the last dimension of y.
        bias: whether to add a learnable bias.
        **options: tp, sequence_parallel, recipe, overlap, return_bias, save_original_input, delay_wgrad, init_method, name,
            device and dtype, as of `dlp.ColumnParallelLinear`.

    Shape:
        - x: [..., K/tp]
        - y: [..., N]; with sequence parallelism the token shard [M/tp, N]
        - weight on each rank: [N, K/tp]

    Raises:
        ValueError: when tp does not divide `in_features`, and for a tuple of `out_features`.

    Examples:
        >>> down = dlp.RowParallelLinear(128, 64, tp=dlp.build_mesh()["tp"], recipe="fp8_current")
        >>> down(torch.randn(16, 128)).shape  # tp = 1
        torch.Size([16, 64])
    """

    _style = "row"

    def __init__(self, in_features: int, out_features: int, bias: bool = False, **options: Any) -> None:
        if not isinstance(out_features, int):
            raise ValueError(
                f"RowParallelLinear takes one out_features; got {out_features!r}: siblings are column-parallel"
            )
        super().__init__(in_features, out_features, bias, **options)


def _as_mesh(tp: DeviceMesh | ProcessGroup | None, device: torch.device | str | None) -> DeviceMesh | None:
    if tp is None:
        return None
    if isinstance(tp, DeviceMesh):
        return tp_mesh_of(tp)
    device_type = torch.device(device).type if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    return DeviceMesh.from_group(tp, device_type, mesh_dim_names=(TP,))
