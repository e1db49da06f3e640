"""fully_shard: PyTorch's fully_shard on the data-parallel axes of the mesh, with quantized gathers of weights.

If the local tensor of a sharded parameter has the methods `fsdp_pre_all_gather` and `fsdp_post_all_gather`, FSDP2 gathers the
tensors that the first returns, and passes the gathered tensors to the second. `dlp.attach` sets both as attributes of a plain
tensor, so that state dicts, optimizers and checkpoints see plain DTensors under every recipe. (Usually a tensor subclass has
these methods, and state dicts, optimizers and checkpoints would have to unwrap the subclass.)

    with hooks      fsdp_pre_all_gather: the cast shard ─► one all-gather for each FSDP unit ─► fsdp_post_all_gather
    without hooks   FSDP gathers the values, in `mp_policy.param_dtype`

With hooks the gathered parameter of a layer is a placeholder: it has shape and dtype of the weight, and autograd accumulates
its gradient, but it has memory for one element only, and torch calls that need values raise (`dlp.parallel.weight.parameters`).
The layer reads codes and scales (`dlp.parallel.weight.sharded`). FSDP allocates and frees gathered memory, prefetches, reshards
and reduces gradients as it does without hooks.

`set_grad_wire` sets the format in which gradients are sent over dp_shard.

This is the only file that uses private attributes of FSDP2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from dlp.comm import collectives, observer
from dlp.comm.collectives import ReduceCodec
from dlp.comm.mesh import ParallelDims, shard_placement
from dlp.kernels.ops import sum_in_order
from dlp.parallel.casts import Cast
from dlp.parallel.linear.canonical import TREE
from dlp.parallel.linear.plan import WIRES
from dlp.parallel.linear.state import LayerWeights, StepState, Weight, note_reasons, refresh, weights_in
from dlp.parallel.linear.step import in_backward
from dlp.parallel.weight.base import Values
from dlp.parallel.weight.local import LocalWeight, local_values
from dlp.parallel.weight.parameters import (
    ShardedParameter,
    hide_values,
    is_placeholder,
    placeholder,
    show_values,
    take_class,
)
from dlp.parallel.weight.sharded import RowShards, ShardedWeight, ShardLayout


@dataclass(frozen=True)
class Gathering:
    """Settings of one FSDP unit, which `fully_shard` stores in the module for `dlp.attach`.

    group         the group over which parameters are sharded
    from_master   `quantize_from_master`
    refused       reason why the weights of the unit cannot be gathered quantized; None: they can
    early         handle of the forward pre-hook that logs that `dlp.attach` has not been called
    """

    group: ProcessGroup
    from_master: bool
    refused: str | None
    early: RemovableHandle


def fully_shard(
    module: nn.Module, *, mesh: DeviceMesh, quantized_gather: bool = True, quantize_from_master: bool = False,
    **fsdp2_keywords: Any,
) -> nn.Module:  # fmt: skip
    """Shard parameters of a module over dp_shard x cp by FSDP2, and replicate them over dp_replicate where dp_replicate > 1.

    Call `fully_shard` after `dlp.convert`, for each transformer block and then for the model. Gradients are averaged over
    data-parallel ranks, as by `torch.distributed.fsdp.fully_shard`; gradients of an invariant model are summed.

    Args:
        module: FSDP unit.
        mesh: mesh of `dlp.build_mesh`.
        quantized_gather: True: after `dlp.attach`, FSDP gathers codes and scales, which each rank casts from its shard after
            every optimizer step. The gathered operand is bitwise equal to the cast of the complete weight. Weights for which
            this is not possible are gathered in `mp_policy.param_dtype` and cast in each pass, and a log line states the
            reason. False: all weights are gathered in `mp_policy.param_dtype`.
        quantize_from_master: True: casts read parameters in the dtype in which they are stored. False: parameters are rounded
            to `mp_policy.param_dtype` before the casts.
        **fsdp2_keywords: keywords of `torch.distributed.fsdp.fully_shard`.

    Returns:
        `module`.

    Raises:
        ValueError: after `dlp.attach`, for a second call with this module, for quantized-only weights, and for keywords that
            dlp does not support with this model.

    Examples:
        >>> mesh = dlp.build_mesh()
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "0", recipe="fp8_current")], mesh)
        >>> model = dlp.fully_shard(model, mesh=mesh)
    """
    dims = ParallelDims.from_mesh(mesh)
    _check_order(module)
    _check_values(module, fsdp2_keywords.get("ignored_params") or ())
    invariant = getattr(module, "dlp_invariant", False)
    if invariant:
        _check_fp32(fsdp2_keywords.get("mp_policy"))
    fsdp2_keywords = _with_integer(module, dims.shards, quantize_from_master, fsdp2_keywords)
    for layer in [weights.layer for weights in weights_in(module)]:
        if layer.spec.options.delay_wgrad:
            layer.set_spec(replace(layer.spec, options=replace(layer.spec.options, delay_wgrad=False)))
            layer.session.note("wgrad is not delayed under FSDP, which reduces gradients within backward")
    sharded = fsdp.fully_shard(module, mesh=dims.fsdp_mesh, **fsdp2_keywords)
    state = vars(module).get("dlp_session")
    if state is not None:
        state.hook_first(module)  # FSDP has inserted its hook, which gathers parameters, before the hooks of dlp
    refused = _refused(fsdp2_keywords) if quantized_gather else "quantized_gather=False"
    if invariant:
        refused = "invariant = true casts values after the gather"
        for unit in module.modules():
            if isinstance(unit, fsdp.FSDPModule):
                _sum_by_tree(unit)
    early = module.register_forward_pre_hook(torch.compiler.disable(_before_attach))
    module.dlp_gathering = Gathering(dims.group(dims.shard_axis), quantize_from_master, refused, early)  # type: ignore[assignment]
    for owner, name, record in managed(module):
        if type(record.stored) is not ShardedParameter:
            take_class(record.stored, ShardedParameter)
        sums: Any = getattr(owner, "tp_sums", None)
        if sums is not None:
            sums.fsdp[id(owner), name] = record
    return cast(nn.Module, sharded)


def _check_fp32(policy: fsdp.MixedPrecisionPolicy | None) -> None:
    """Raise ValueError if the policy would round gradients of an invariant model before FSDP adds them."""
    dtypes = () if policy is None else (policy.param_dtype, policy.reduce_dtype)
    narrow = [dtype for dtype in dtypes if dtype not in (None, torch.float32)]
    if narrow:
        raise ValueError(
            f"invariant = true: FSDP would round gradients to {narrow[0]} on several ranks and not on one; leave param_dtype "
            f"and reduce_dtype out of mp_policy"
        )


def _sum_by_tree(unit: fsdp.FSDPModule) -> None:
    """Let FSDP add the gradients of a unit in the order of invariant sums (`TREE`), without a division, which would round
    denormals."""
    unit.set_custom_reduce_scatter(CodecReduceScatter(TREE))
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def _check_order(module: nn.Module) -> None:
    """Raise ValueError if `dlp.attach` has been called, or for a second `fully_shard` of the module."""
    if "dlp_gathering" in vars(module):
        raise ValueError(
            f"dlp.fully_shard was called on this {type(module).__name__} already; call this function once for each module"
        )
    layers = [weights.layer for weights in weights_in(module)]
    attached = next((layer.spec.name for layer in layers if layer.session.attached), None)
    if attached is not None:
        raise ValueError(f"{attached}: dlp.fully_shard comes before dlp.attach, which has been called on this model")


def _check_values(module: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Raise ValueError for a quantized-only weight. `ignored`: parameters that FSDP does not manage."""
    left = {*map(id, ignored)}
    for weights in weights_in(module):
        if any(is_placeholder(stored) and id(stored) not in left for stored in weights.stored()):
            raise ValueError(
                f"{weights.layer.spec.name}: the weight is quantized-only, and FSDP cannot shard codes; construct the "
                f"layer outside dlp.quantized_model_init, or replicate the weight by ignored_params"
            )


def _with_integer(module: nn.Module, ranks: int, from_master: bool, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords, in which `reshard_after_forward=1` is replaced by False, and `reshard_after_forward=ranks` by True.

    All other integers shard weights over some of the ranks after forward, which FSDP2 supports only for plain parameters
    without hooks. Raises ValueError for such an integer if `from_master` is True, or if a parameter is a DTensor that an
    earlier `fully_shard` has not sharded."""
    reshard = keywords.get("reshard_after_forward")
    if not _is_integer(reshard) or reshard in (1, ranks):
        return keywords | ({"reshard_after_forward": reshard != 1} if _is_integer(reshard) else {})
    placed = next(
        (name for name, p in module.named_parameters() if isinstance(p, DTensor) and not _is_sharded(p)), None
    )
    if placed is not None or from_master:
        why = "quantize_from_master uses a gather of dlp" if placed is None else f"{placed} is a DTensor on tp"
        raise ValueError(
            f"{type(module).__name__}: reshard_after_forward={reshard} shards weights over {reshard} of {ranks} ranks "
            f"after forward, which FSDP2 supports only for plain parameters, but {why}; set reshard_after_forward to "
            f"True or False"
        )
    return keywords


def _is_sharded(parameter: DTensor) -> bool:
    """Whether an earlier call of `fully_shard` has sharded the parameter."""
    return shard_placement(parameter) is not None


def _is_integer(reshard: Any) -> bool:
    return isinstance(reshard, int) and not isinstance(reshard, bool)


def _before_attach(module: nn.Module, args: Any) -> None:
    """Forward pre-hook until `dlp.attach` is called: log that weights are gathered in high precision. An evaluation under
    torch.no_grad logs nothing."""
    for weights in weights_in(module):
        if torch.is_grad_enabled() and not weights.layer.spec.recipe.w.keeps_source:
            weights.layer.session.note("w is gathered in high precision: dlp.attach has not been called")


def _refused(keywords: dict[str, Any]) -> str | None:
    """Return the reason why FSDP2 with these keywords cannot gather the tensors that hooks return; None: it can."""
    reshard = keywords.get("reshard_after_forward")
    if _is_integer(reshard):
        return f"reshard_after_forward={reshard} supports only gathers of values"
    return (
        "offload_policy offloads the shards"
        if isinstance(keywords.get("offload_policy"), fsdp.CPUOffloadPolicy)
        else None
    )


def gather_quantized(model: nn.Module) -> None:
    """Set hooks on the sharded weights of this model's layers, so that FSDP gathers codes and scales where this is possible."""
    owners = {
        (id(member.module), member.weight): (weights, i)
        for weights in weights_in(model)
        for i, member in enumerate(weights.layer.members)
    }
    gathers: list[_Gather] = []
    for module in model.modules():
        asked: Gathering | None = getattr(module, "dlp_gathering", None)
        if asked is not None:
            asked.early.remove()
        if asked is not None and asked.group.size() > 1:
            found = [(param, owner) for param in _fsdp_params(module) for owner in _owners(param) if owner in owners]
            gathers += [_Gather(module, param, *owners[owner], asked) for param, owner in found]
    for gather in gathers:
        gather.weight.drop()
    note_reasons([gather.weight for gather in gathers])


def cast_managed(weights: LayerWeights, records: Sequence[Managed | None]) -> None:
    """Replace each weight that FSDP manages and does not shard by a `ManagedWeight`, which is cast from the parameter that the
    optimizer steps on.

    `records`: FSDP's record of each weight; None: FSDP does not manage the weight."""
    weights.set([
        weight if record is None or type(weight) is not LocalWeight else ManagedWeight(weights, i, record)
        for i, (weight, record) in enumerate(zip(weights, records, strict=True))
    ])  # fmt: skip


class _Gather:
    """Hooks of one parameter. `_outputs`: the buffers into which FSDP2 gathers, by the layouts that are gathered together."""

    def __init__(self, module: nn.Module, param: Any, weights: LayerWeights, index: int, asked: Gathering) -> None:
        self._module, self._param = module, param
        self._outputs: dict[tuple[ShardLayout, ...], list[Tensor]] = {}
        whole, dtype = param._orig_size, param.mp_policy.param_dtype or param.sharded_param.dtype
        refused = asked.refused
        if len(_owners(param)) > 1:
            refused = "several modules share the weight"
        elif param.fsdp_placement.dim:
            refused = "dp_shard shards the in_features"
        rows = RowShards((whole[0], whole[1]), asked.group, self._shard, dtype, asked.from_master, refused)
        self._hooked = False
        self.weight = ShardedWeight(weights, index, rows, self._stored, self._update)
        weights.set([*weights.members[:index], self.weight, *weights.members[index + 1 :]])

    def _stored(self) -> Tensor:
        parameter: Tensor = self._param.sharded_param
        return parameter

    def _shard(self) -> Tensor:
        padded: Tensor = self._param._sharded_param_data.view(self._param.padded_sharded_param_size)
        return padded

    def _update(self, changed: bool) -> None:
        """Set the hooks if the weight has layouts, else remove the hooks. `changed`: whether the layouts have changed, so that
        FSDP2 must allocate new buffers."""
        hook = self.weight.layouts is not None
        if changed or hook != self._hooked:
            self._module.reshard()  # type: ignore[operator]
            self._outputs = {}
            self._param.all_gather_outputs, self._param._unsharded_inner_tensors = [], []
        local = self._param.sharded_param._local_tensor
        for name, method in (("fsdp_pre_all_gather", self._pre), ("fsdp_post_all_gather", self._post)):
            if hook:
                setattr(local, name, method)
            elif name in vars(local):
                delattr(local, name)
        self._param._init_extensions()
        self._hooked, before = hook, self._hooked
        self._param.init_unsharded_param = self._first_gather if hook else partial(_first_gather, self._param)
        if hook:
            self._hide()
        elif before and hasattr(self._param, "_unsharded_param"):
            show_values(self._param._unsharded_param, self._values())

    def _first_gather(self) -> None:
        """Replacement of FSDP2's `init_unsharded_param`, which creates the gathered parameter at the first gather."""
        _first_gather(self._param)
        self._hide()

    def _hide(self) -> None:
        """Make the gathered parameter reject torch calls that need its values."""
        gathered = getattr(self._param, "_unsharded_param", None)
        if gathered is not None and not is_placeholder(gathered):
            hide_values(gathered, self.weight, self._placeholder())

    def _placeholder(self) -> Tensor:
        return placeholder(self.weight.rows.shape, self.weight.rows.dtype, self._param.device)

    def _values(self) -> Tensor:
        """Create the gathered tensor as FSDP2 does without hooks: a view of a buffer that FSDP2 resizes."""
        size = self._param.padded_sharded_param_size.numel() * self.weight.rows.group.size()
        out = torch.empty(size, dtype=self.weight.rows.dtype, device=self._param.device)
        view = torch.as_strided(out, self._param._orig_size, self._param._contiguous_orig_stride, 0)
        self._param.all_gather_outputs = [out]
        out.untyped_storage().resize_(0)
        return view

    def _pre(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[ShardLayout, ...]]:
        """`fsdp_pre_all_gather`: return this rank's parts to gather, and their layouts, which are passed to `_post`.

        FSDP2 gathers into the buffers of these layouts."""
        session = self.weight.bound.session
        if not in_backward() and session.is_moved(self.weight.owner):
            self.weight.fresh = False
        if not self.weight.fresh:
            _cast_late(session)
        parts, layouts = self.weight.depart()
        self._param.all_gather_outputs = self._outputs.get(layouts, [])
        return parts, layouts

    def _post(
        self,
        outputs: tuple[Tensor, ...],
        layouts: tuple[ShardLayout, ...],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Any, tuple[Tensor, ...]] | None:
        """`fsdp_post_all_gather`: receive the gathered parts.

        At the first gather of a parameter, return the placeholder that layers see, and () as there are no further tensors that
        FSDP2 should free."""
        self._outputs[layouts] = self._param.all_gather_outputs
        self.weight.arrive(outputs, layouts)
        return None if out is not None else (_Strided(self._placeholder()), ())


class _Strided:
    """Wrapper of a placeholder for FSDP2's call of `torch.as_strided`, which torch rejects for memory of only one element."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        assert function is torch.as_strided and tuple(args[1]) == tuple(args[0].tensor.shape), function
        tensor: Tensor = args[0].tensor
        return tensor


def _first_gather(param: Any) -> None:
    """Call FSDP2's `init_unsharded_param`."""
    type(param).init_unsharded_param(param)


def _cast_late(session: StepState) -> None:
    """Cast all sharded weights that are not `fresh`, before a gather. Weights are not `fresh` if no step boundary has run yet,
    or if they were changed since.

    Amaxes that these casts record for delayed scaling replace the amaxes that the last boundary recorded."""
    stale: list[Weight] = [weight for weight in session.weights() if weight.gathered and not weight.fresh]
    if not session.has_slots():
        refresh(session, stale)
        return
    with session.scaling.restaging():
        refresh(session, stale)


class Managed:
    """Access to FSDP2's record of a parameter.

    stored     the sharded parameter, on which the optimizer steps
    gathered   the parameter that modules see in passes, to which autograd passes gradients
    """

    def __init__(self, param: Any, group: Any) -> None:
        self._param, self._group = param, group

    @property
    def stored(self) -> nn.Parameter:
        parameter: nn.Parameter = self._param.sharded_param
        return parameter

    @property
    def gathered(self) -> nn.Parameter:
        parameter: nn.Parameter = getattr(self._param, "_unsharded_param", self._param.sharded_param)
        return parameter

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype to which the gathered parameter is rounded; None: it is not rounded."""
        dtype: torch.dtype | None = self._param.mp_policy.param_dtype
        return dtype

    @property
    def ranks(self) -> int:
        """Number of ranks that share the parameter."""
        return int(self._param.mesh_info.shard_mesh_size)

    @property
    def reduces(self) -> bool:
        """Whether a backward reduces gradients into the sharded parameter; if not, it accumulates them in the gathered
        parameter."""
        return bool(self._group.reduce_grads)


class ManagedWeight(LocalWeight):
    """Weight whose parameter FSDP manages and does not shard, since dp_shard has one rank.

    The module may contain FSDP's copy of the parameter, so the step boundary casts the parameter that the optimizer steps
    on."""

    managed = True

    def __init__(self, owner: LayerWeights, index: int, record: Managed) -> None:
        super().__init__(owner, index)
        self._record = record

    @property
    def stored(self) -> Tensor:
        return self._record.stored

    @property
    def value(self) -> Tensor:
        return local_values(self.stored)

    def casts(self, values: Values) -> list[Cast]:
        """Return the casts of the step boundary. The list is empty, and passes read FSDP's copy, if the recipe does not
        quantize w, if FSDP rounds the copy to another dtype than the dtype of activations, or if `LocalWeight.casts` returns
        an empty list."""
        w = self.bound.spec.recipe.w
        if w.keeps_source or self._record.dtype not in (None, self.owner.dtype):
            return []
        return super().casts(values)


def managed(model: nn.Module) -> Iterator[tuple[nn.Module, str, Managed]]:
    """Yield (module, name in the module, record) for each module that contains a parameter which FSDP2 manages."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            for group in _groups(module):
                for param in group.fsdp_params:
                    for owner, name in _holders(param):
                        yield owner, name, Managed(param, group)


def _groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of a unit; the gradients of a group are reduced together."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _fsdp_params(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's objects for the parameters of a unit."""
    for group in _groups(module):
        yield from group.fsdp_params


def _holders(param: Any) -> list[tuple[nn.Module, str]]:
    """Return (module, name in the module) for each module that contains a parameter."""
    info = param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def _owners(param: Any) -> list[tuple[int, str]]:
    """Return (id of the module, name in the module) for each module that contains a parameter."""
    return [(id(module), name) for module, name in _holders(param)]


class CodecReduceScatter(ReduceScatter):
    """Replacement of FSDP2's reduce-scatter, in which ranks exchange contributions packed by `codec`, then sum them.

    FSDP passes the gradients of a unit as one flat tensor, with a part for each rank; a codec with blocks divides each part
    into blocks of 128 elements. Sums are computed in fp32, in rank order (`WIRES`) or by a tree (`TREE`), divided by the
    number of ranks if FSDP requests an average, and rounded to the dtype of the reduction (`reduce_dtype`).

    Args:
        codec: packs and sums the contributions.
        computed: dtype of all gradients, in which they are sent, without the codec; None: FSDP first converts gradients to the
            dtype of the reduction.
    """

    def __init__(self, codec: ReduceCodec, computed: torch.dtype | None = None) -> None:
        self.codec, self.computed = codec, computed
        self._has_input = False  # FSDP calls `allocate` for the input of a reduction, then for the output

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        is_input, self._has_input = not self._has_input, not self._has_input
        return torch.empty(*size, dtype=self.computed or dtype if is_input else dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """Run on the current stream, whatever `async_op` is. Raises ValueError for an op other than SUM and AVG."""
        self._has_input = False
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"a gradient wire supports SUM and AVG; got {op}: leave the gradient divide factor unset")
        divisor = group.size() if op == dist.ReduceOp.AVG else 1
        with observer.label(layer="", purpose="grads"):
            if self.computed is None:
                exact = divisor & (divisor - 1) == 0  # dividing a rounded sum by 2^n rounds denormals only
                dtype = output_tensor.dtype if exact else torch.float32
                sums = collectives.reduce_scatter(input_tensor, group, self.codec, dtype).wait()
                output_tensor.copy_(sums.div_(divisor))
                return
            assert input_tensor.numel() == group.size() * output_tensor.numel(), "FSDP allocates in another order"
            (arrived,) = collectives.all_to_all((input_tensor.view(group.size(), -1),), group).wait()
        sum_in_order(arrived, output_tensor.dtype, None, divisor, output_tensor)


def set_grad_wire(model: nn.Module, wire: str, computed: torch.dtype | None = None) -> None:
    """Set the format in which gradients of every FSDP unit of `model` are sent. Call this function after `fully_shard`.

    Args:
        model: model with FSDP units.
        wire: format of the contributions: "hp", "bf16" or "fp8".
        computed: with "hp", the dtype of all gradients when FSDP reduces them. Gradients are sent in this dtype and summed in
            fp32, in rank order. Over two ranks the sum is bitwise equal to FSDP's fp32 reduction. Not supported for gradients
            that FSDP accumulates over microbatches, which have the dtype of the reduction. None: the dtype of the reduction.

    Raises:
        ValueError: for another wire, for `computed` with another wire than "hp", and for an invariant model.
    """
    if computed is not None and wire != "hp":
        raise ValueError(f"computed requires the wire 'hp'; got {wire!r}: leave computed out")
    if wire not in WIRES:
        raise ValueError(f"unknown gradient wire {wire!r:.60}: the wires are {', '.join(WIRES)}")
    if getattr(model, "dlp_invariant", False):
        raise ValueError("invariant = true: gradients are sent in fp32 and added by the tree; leave set_grad_wire out")
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_custom_reduce_scatter(CodecReduceScatter(WIRES[wire], computed))
