"""convert: replace the nn.Linear modules of a model by parallel linears, by layer group, and return the plan.

    names and lengths of the model  ──►  groups.resolve  ──►  a Plan of rows  ──►  modules change in place

The plan is made and checked before the model changes; `dlp.make_plan` returns the same plan without ranks. Layers
that no group matches become local bf16 linears, and the plan lists them. Embeddings with style "column" are sharded along the
vocabulary; every other module that owns parameters is replicated on tp. `dlp.parallel.model.survey` describes how modules are
treated, and which modules raise ValueError. Converted modules remain the same objects with another class, so that hooks,
attributes and names remain.

**Replicated modules** are modules that tp does not shard: norms, embeddings, modules with user-defined parameters. Parameters
become DTensors, replicated on tp. The code of the module computes on plain tensors, so `replicate` derives a subclass of the
module's class, in which forward sees this rank's tensors instead of the DTensors. In a sequence-parallel region a rank sees
only its own tokens, after a column-parallel linear only its own features. In both cases gradients are partial (`tp_partial`),
and are summed over tp at the end of backward (`dlp.parallel.model.grads`).

**Left-out modules** (`convert = false`) are replicated, too. Such a module may read parameters of modules inside it, so the
forward sees the plain tensors of all these modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dlp.comm.lockstep import check_alike
from dlp.comm.mesh import CP_TP, TP, WORLD, ParallelDims
from dlp.parallel import auto
from dlp.parallel.auto import Times
from dlp.parallel.linear.modules import ConvertedLinear, LinearCore, ParallelLinear, partial_names
from dlp.parallel.linear.quantize import other_microbatch
from dlp.parallel.linear.spec import LinearSpec, Overlaps
from dlp.parallel.model.context import check_context
from dlp.parallel.model.embedding import cut_vocabulary
from dlp.parallel.model.grads import PartialGradients
from dlp.parallel.model.groups import LayerGroup
from dlp.parallel.model.invariant import (
    CHECKS,
    GradientTree,
    InvariantSession,
    Segments,
    check_mesh,
    check_plan,
    holds_vectors,
)
from dlp.parallel.model.plan import LayerPlan, OtherPlan, Plan, make_plan
from dlp.parallel.model.replicas import Replicas
from dlp.parallel.model.session import Session, give_session
from dlp.parallel.model.survey import explain, guard
from dlp.parallel.weight.base import Member
from dlp.parallel.weight.local import local, num_axes, place
from dlp.parallel.weight.parameters import SpreadModule, check_unshared, holds, recipes_decided


@dataclass(frozen=True)
class _Target:
    """State of one conversion.

    model       model that is converted
    tp          mesh of the tp axis
    amax_group  see `amax_process_group`
    tokens      tokens of a microbatch, B * S; None: not known
    session     session of the model
    invariant   see `convert`
    shared      id of an old parameter -> new parameter, so that tied parameters remain tied
    """

    model: nn.Module
    tp: DeviceMesh
    amax_group: ProcessGroup | None
    tokens: int | None
    session: Session
    invariant: bool = False
    shared: dict[int, nn.Parameter] = field(default_factory=dict)

    def move(self, module: nn.Module, key: str, shard_dim: int | None) -> None:
        """Replace parameter `key` of a module, if it exists, by a DTensor on tp. `shard_dim` None: replicated."""
        old = module._parameters.get(key)
        # There is no parameter, or a left-out module has a subclass of nn.Parameter, which stays
        if type(old) is not nn.Parameter:
            return
        if id(old) not in self.shared:
            self.shared[id(old)] = place(old, self.tp, shard_dim)
        module._parameters[key] = self.shared[id(old)]

    def inside(self, plan: Plan, name: str) -> tuple[nn.Module, ...]:
        """Return the left-out module `name` and all modules in it, as far as they have parameters; () for other modules."""
        return tuple(self.model.get_submodule(each) for each in plan.left_out.get(name, ()))


def amax_process_group(dims: ParallelDims, amax_group: str | ProcessGroup) -> ProcessGroup | None:
    """Return the process group that `amax_group` of `convert` names. None for "auto": the style of a layer determines the
    group. A ProcessGroup is returned unchanged. Raises ValueError for another name."""
    if not isinstance(amax_group, str):
        return amax_group
    if amax_group == "auto":
        return None
    if amax_group == TP:
        return dims.group(TP)
    if amax_group == "tp+cp":
        return dims.group(TP if dims.cp == 1 else CP_TP)
    if amax_group in ("tp+dp", WORLD):  # a mesh spans the world, so both groups have the same ranks
        return dist.group.WORLD
    raise ValueError(f"amax_group must be auto, tp, tp+cp, tp+dp, world or a process group; got {amax_group!r}")


def convert(
    model: nn.Module, groups: Sequence[LayerGroup | Mapping[str, Any]], mesh: DeviceMesh, *,
    batch: tuple[int, int] | None = None, amax_group: str | ProcessGroup = "auto", seed: int = 0,
    overlap_table: Times | str | Path | None = None, invariant: bool = False,
) -> Plan:  # fmt: skip
    """Make a model parallel over the tp axis of a mesh, in place, and quantize its linears by layer groups.

    Modules stay the same objects, with their hooks, names and attributes; their classes and parameters change. Explicitly
    constructed layers of dlp join the step boundary of the model. Also without `dlp.attach`, an optimizer step raises
    RuntimeError if replicas of a parameter differ between ranks, and inside a backward that has not summed partial gradients
    over tp.

    Args:
        model: plain modules, materialized with equal values on all ranks or on the meta device.
        groups: ordered layer groups; for each layer and option the last matching group wins.
        mesh: mesh of `dlp.build_mesh`.
        batch: (B, S) of a microbatch; required with sequence parallelism.
        amax_group: ranks that share scales: "auto" (the ranks that correctness needs; all ranks for delayed scaling), "tp",
            "tp+cp", "tp+dp", "world", or a process group.
        seed: seed of stochastic rounding.
        overlap_table: times from which overlap = "auto" is decided: a file of `dlp.parallel.tune`, which rank 0 reads, or
            `Times` that all ranks have read; None: the shipped table of the GPU.
        invariant: compute bitwise equal results on every mesh, see docs/prove.md. `dlp.fully_shard` then sums gradients instead
            of averaging. Pass `invariant=True` to `dlp.cross_entropy` as well.

    Returns:
        The printable `Plan`.

    Raises:
        ValueError: before anything is changed, for a group that matches no layer or has no effect, a size that tp does not
            divide, siblings that cannot run as one layer, sequence parallelism without `batch`, modules that would compute
            something else afterwards, ranks whose plans differ, and, with `invariant`, for operations without a fixed order of
            sums.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        >>> groups = [
        ...     dlp.LayerGroup("all", "**", recipe="fp8_current"),
        ...     dlp.LayerGroup("up", "0", style="column"),
        ...     dlp.LayerGroup("down", "2", style="row"),
        ... ]
        >>> plan = dlp.convert(model, groups, dlp.build_mesh())
        >>> model(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """
    dims = ParallelDims.from_mesh(mesh)
    check_context(model, dims.cp)
    if invariant:
        check_mesh(dims, mesh.device_type, amax_group)
        CHECKS[mesh.device_type]()
    plan = _agreed_plan(model, groups, dims, mesh.device_type, batch, overlap_table, invariant)
    group = amax_process_group(dims, amax_group)
    session = (InvariantSession if invariant else Session)(
        seed=seed, amax_group=group or dist.group.WORLD, dp=(dims.token_rank, dims.token_ranks), groups=dims.parameter_groups
    )  # fmt: skip
    target = _Target(model, dims.tp_mesh, group, None if batch is None else batch[0] * batch[1], session, invariant)
    names = {id(module): name for name, module in model.named_modules()}
    _change_modules(target, plan)
    _sum_gradients(target, mesh.device_type)
    model.register_forward_hook(explain(names), always_call=True)
    _hand_over(model, session, plan)
    return plan


def _agreed_plan(
    model: nn.Module, groups: Sequence[LayerGroup | Mapping[str, Any]], dims: ParallelDims, device_type: str,
    batch: tuple[int, int] | None, overlap_table: Times | str | Path | None, invariant: bool,
) -> Plan:  # fmt: skip
    """Make the plan, and check that all ranks have the same plan. For the arguments see `convert`."""
    times = auto.load(overlap_table, together=True) if isinstance(overlap_table, str | Path) else overlap_table
    transport = auto.transport_name(dims.group(TP), device_type)
    plan = make_plan(
        model, groups, dims.tp, device_type=device_type, batch=batch, overlap_table=times, transport=transport
    )
    if invariant:
        plan = check_plan(plan, model, batch)
    if plan.times is not None:
        auto.check_together(plan.choices())
    check_alike(_rows_of(plan), dist.group.WORLD, "dlp.convert")
    return plan


def _change_modules(target: _Target, plan: Plan) -> None:
    """Convert the modules of the model in place. All specs are built before the first change, so that errors leave the model
    unchanged."""
    sets = _layers_that_run_as_one(plan)
    specs = [_spec_of(target, rows) for rows in sets]
    for row in plan.layers:
        if not row.made_by_hand and holds(row.recipe):
            check_unshared(target.model, target.model.get_submodule(row.module))
    with recipes_decided():
        for spec, rows in zip(specs, sets, strict=True):
            _convert_linears(target, spec, rows)
    for other in plan.others:
        _convert_other(target, other, target.inside(plan, other.name))
    for name in plan.left_out.keys() - {other.name for other in plan.others}:
        replicate(target.model.get_submodule(name), name, inside=target.inside(plan, name))


def _sum_gradients(target: _Target, device_type: str) -> None:
    """Set up the sums of partial gradients over tp, the gradient tree of an invariant model, and the comparison of replicas."""
    model, session = target.model, target.session
    model.partial_gradients = session.sum_partial(PartialGradients(model, target.tp.get_group()))
    if target.invariant:
        for module in model.modules():
            vars(module)["dlp_invariant"] = True
        session.check_gradients = GradientTree(model, device_type).check_announced
    session.replicas = Replicas(model, [slot.path for slot in session.sums.slots], session.groups)


def _hand_over(model: nn.Module, session: Session, plan: Plan) -> None:
    """Give the converted model the session with the plan, and log the warnings of the plan."""
    session.plan = plan
    for warning in plan.warnings:
        session.note(warning)
    session.at_first_forward = partial(note_added, session)
    give_session(model, session)
    save_whole(model)
    guard(model, session)


def _rows_of(plan: Plan) -> dict[str, str]:
    """Return the descriptions, by module name, that must be equal on all ranks."""
    rows = {row.name: f"{row.style} {row.shape} in {row.recipe}, overlap {row.overlap}" for row in plan.layers}
    return rows | {row.name: f"{row.kind}, {row.style}" for row in plan.others}


def _layers_that_run_as_one(plan: Plan) -> list[list[LayerPlan]]:
    """Return the rows of each set of siblings, and of each linear without siblings."""
    rows = {row.name: row for row in plan.layers}
    return [
        [rows[name] for name in names] for names in dict.fromkeys(row.siblings or (row.name,) for row in plan.layers)
    ]


def _spec_of(target: _Target, rows: Sequence[LayerPlan]) -> LinearSpec:
    """Return the spec of one linear, or of several siblings."""
    first = rows[0]
    name = first.name if len(rows) == 1 else f"{first.name} and siblings"
    module = target.model.get_submodule(first.module)
    if isinstance(module, ParallelLinear):
        name = first.module
        module.core.weights.check(first.recipe)
    return LinearSpec(
        name, first.row, first.recipe, Overlaps.named(first.overlap), target.tp.get_group(), target.amax_group, target.tokens,
        tuple(row.name for row in rows), options=first.options, return_bias=first.return_bias,
        invariant=target.invariant,
    )  # fmt: skip


def _convert_linears(target: _Target, spec: LinearSpec, rows: Sequence[LayerPlan]) -> None:
    """Convert one linear, or several siblings with one common core. An explicitly constructed layer keeps its core."""
    modules = [target.model.get_submodule(row.module) for row in rows]
    if isinstance(modules[0], ParallelLinear):
        _adopt(target, spec, modules[0])
        return
    for index, (module, row) in enumerate(zip(modules, rows, strict=True)):
        target.move(module, "weight", spec.style.shard_dim)
        target.move(module, "bias", 0 if spec.style.shard_dim == 0 else None)
        module.__class__ = ConvertedLinear
        vars(module).update(name=row.name, index=index)
    members = [Member(module, "weight", "bias") for module in modules]
    core = LinearCore(spec, target.session, members)
    target.session.cores.append(core)
    for module in modules:
        vars(module).update(core=core, tp_partial=partial_names(spec, members[:1]))


def _adopt(target: _Target, spec: LinearSpec, module: ParallelLinear) -> None:
    """Give an explicitly constructed layer the session of the model. Parameters of a layer that was constructed without a mesh
    become DTensors."""
    module.core.set_spec(spec, target.session)
    target.session.cores.append(module.core)
    with module.core.weights.shown(written=True):
        for key in module._parameters:
            target.move(module, key, None)


def _convert_other(target: _Target, row: OtherPlan, inside: tuple[nn.Module, ...]) -> None:
    """Shard an embedding along the vocabulary, or replicate a module on tp. `inside`: see `replicate`."""
    module, vocab = target.model.get_submodule(row.name), row.style == "vocab"
    for key in module._parameters:
        target.move(module, key, 0 if vocab else None)
    if vocab:
        assert isinstance(module, nn.Embedding)
        cut_vocabulary(module, target.tp, row.sequence_parallel, row.name)
        return
    rows = None if target.tokens is None or target.tp.size() == 1 else target.tokens // target.tp.size()
    replicate(
        module, row.name, on_shards=row.sequence_parallel, reads_cut=row.reads_cut, token_rows=rows,
        tp_size=target.tp.size(), inside=inside,
    )  # fmt: skip
    if target.invariant and row.style == "replicated" and holds_vectors(module):
        shared = target.tp.get_group() if row.partial else None
        module.segments = Segments(row.name, -2 if row.reads_cut else 0, shared)  # type: ignore[assignment]
        module.tp_partial = ()  # type: ignore[assignment]


class ReplicatedMixin(SpreadModule):
    """Mixin that replaces the DTensors in `_parameters` by local tensors during forward.

    tp_partial   names of parameters with partial gradients over tp
    on_shards    whether the module runs on token shards
    tp_sums      `PartialGradients` of the model, if tp_partial is not empty
    token_rows   tokens of a shard, checked at each call; None: not checked
    tp_size      number of tp ranks
    layer_name   name of the module, for messages
    segments     segments in which an invariant model runs the module; None: the module runs once
    """

    dlp_made = "by convert"
    tp_partial: tuple[str, ...] = ()
    on_shards = False
    tp_sums: PartialGradients | None = None
    token_rows: int | None = None
    tp_size: int = 1
    layer_name: str = ""
    segments: Segments | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if isinstance(x, DTensor):
            raise TypeError(
                f"{self.layer_name}: the module is called with a DTensor, made from a parameter of another module, but "
                f"modules read plain local tensors; pass the result of to_local()"
            )
        self._check_tokens(x)
        held, before = dict(self._parameters), None if self.tp_sums is None else self.tp_sums.check_announced
        for name, parameter in held.items():
            if isinstance(parameter, DTensor):  # not a DTensor if a left-out module around this module has replaced it
                self._parameters[name] = local(parameter, self.layer_name, before=before)
        try:
            if self.segments is not None:
                plain = {name: self._parameters[name] for name in held}
                return self.segments.run(super().forward, self._parameters, plain, (*args, *kwargs.values()))
            return super().forward(*args, **kwargs)
        finally:
            for name, parameter in held.items():
                self._parameters[name] = parameter

    def _check_tokens(self, x: Tensor | None) -> None:
        """Raise ValueError if a module without sequence parallelism is called with features of token shards, or a module with
        sequence parallelism is not called with token shards.

        x: first tensor argument. A token shard of a microbatch of M tokens is [M/tp, H], or [M/tp] for token ids."""
        if self.token_rows is None or x is None:
            return
        features = x.is_floating_point()
        shard = x.dim() == 1 + features and len(x) == self.token_rows
        if shard and features and not self.on_shards:
            raise ValueError(
                f"{self.layer_name}: the module is called with token shards {tuple(x.shape)}, so its gradients must be "
                f"summed over tp; "
                f"add it to a layer group with sequence_parallel = true"
            )
        if not shard and self.on_shards:
            tokens = self.token_rows * self.tp_size
            other = x.dim() == 1 + features and len(x) != tokens
            remark = other_microbatch(len(x) * self.tp_size, tokens) if other else ""
            raise ValueError(
                f"{self.layer_name}: sequence parallelism expects token shards [{self.token_rows}{', H' * features}]; got x "
                f"of shape {tuple(x.shape)}. {remark}Split the tokens with dlp.scatter_tokens before this module, or "
                f"remove the module from the group"
            )


class LeftOutMixin(ReplicatedMixin):
    """`ReplicatedMixin` for a left-out module, whose forward may read the parameters of modules in it.

    `inside`: the module and the modules in it, if they have parameters."""

    inside: tuple[nn.Module, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = [(module, module._parameters) for module in self.inside]
        for module, parameters in held:
            _hold(module, {name: self._seen(module, p) for name, p in parameters.items()})
        try:
            return super().forward(*args, **kwargs)
        finally:
            for module, parameters in held:
                _hold(module, parameters)

    def _seen(self, module: nn.Module, parameter: Tensor | None) -> Tensor | None:
        """Return the tensor that forward reads in place of a parameter. If FSDP shards a parameter of an inner module,
        the parameter stays a DTensor until FSDP gathers it."""
        if not isinstance(parameter, DTensor) or (module is not self and num_axes(parameter) > 1):
            return parameter
        sums: PartialGradients | None = getattr(module, "tp_sums", None)
        return local(parameter, self.layer_name, before=None if sums is None else sums.check_announced)


def _hold(module: nn.Module, parameters: Mapping[str, Any]) -> None:
    """Replace the parameter dict of a module."""
    vars(module)["_parameters"] = parameters


# (mixin, class) -> subclass: modules of equal class have equal class after the conversion, too
_CLASSES: dict[tuple[type, type], type] = {}


def _class_of(cls: type, whole: bool) -> type:
    mixin, prefix = (LeftOutMixin, "LeftOut") if whole else (ReplicatedMixin, "Replicated")
    subclass = type(f"{prefix}{cls.__name__}", (mixin, cls), {"__module__": cls.__module__})
    return _CLASSES.setdefault((mixin, cls), subclass)


def replicate(
    module: nn.Module, name: str, *, on_shards: bool = False, reads_cut: bool = False, token_rows: int | None = None,
    tp_size: int = 1, inside: tuple[nn.Module, ...] = (),
) -> None:  # fmt: skip
    """Change the class of a module, so that forward reads local tensors in place of DTensor parameters.

    name         name of the module, for messages
    on_shards    whether the module runs on token shards
    reads_cut    whether the module reads features that are sharded over tp
    token_rows   number of tokens of a shard, checked at each call; None, or with reads_cut: not checked
    tp_size      number of tp ranks
    inside       for a left-out module: the module and the modules in it, if they have parameters; () for other modules
    """
    module.__class__ = _class_of(type(module), bool(inside))
    module.inside = inside  # type: ignore[assignment]
    module.tp_partial = tuple(module._parameters) if on_shards or reads_cut else ()  # type: ignore[assignment]
    module.on_shards, module.layer_name = on_shards, name  # type: ignore[assignment]
    module.token_rows, module.tp_size = None if reads_cut else token_rows, tp_size  # type: ignore[assignment]


def note_added(session: Session, model: nn.Module) -> None:
    """Log parameters that were added after `convert`. torch's functions over all gradients raise for plain tensors among
    DTensors."""
    plain = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if plain:
        session.note(
            f"{len(plain)} parameters ({plain[0]}, ...) were added after dlp.convert and are not DTensors, so that "
            f"torch's clip_grad_norm_ of all gradients raises 'got mixed torch.Tensor and DTensor': clip with "
            f"dlp.optim.clip_grad_norm_, or add modules before dlp.convert"
        )


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with full tensors in place of DTensors, and tied parameters as one tensor.

    All ranks call this function together, and each rank temporarily holds the complete model."""
    tied = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    whole: dict[Any, Tensor] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        key = tied.get(name, name)
        if key not in whole:
            whole[key] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return {name: whole[tied.get(name, name)] for name in state}


def save_whole(model: nn.Module) -> None:
    """Let the model's `save_pretrained`, if it exists, write full tensors on rank 0. All ranks call `save_pretrained`."""
    if hasattr(model, "save_pretrained"):
        # A partial: deepcopy of the model then also replaces `model` in the arguments by the copy
        model.save_pretrained = partial(_save_pretrained, model)  # type: ignore[assignment]


def _save_pretrained(
    model: nn.Module, folder: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **options: Any
) -> Any:
    if not args:
        options.setdefault("is_main_process", dist.get_rank() == 0)
    whole = whole_state_dict(model) if state_dict is None else state_dict
    _check_tied_head(model, whole)
    kind: Any = type(model)
    return kind.save_pretrained(model, folder, *args, state_dict=whole, **options)


def _check_tied_head(model: Any, whole: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a model whose configuration ties the head to the embedding although their values differ.

    A program that loads the folder would overwrite the head with the embedding."""
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    ends = [get() for get in (model.get_input_embeddings, model.get_output_embeddings)]
    names = {id(module): name for name, module in model.named_modules()}
    weights = [f"{names[id(module)]}.weight" for module in ends if module is not None and id(module) in names]
    there = [whole[name] for name in weights if name in whole]
    if len(there) == 2 and not torch.equal(*there):
        raise ValueError(
            f"save_pretrained: {weights[0]} and {weights[1]} differ, but the model's configuration has "
            f"tie_word_embeddings = True, so that loading the folder would overwrite the head; set "
            f"model.config.tie_word_embeddings = False"
        )
