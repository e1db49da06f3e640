"""Gradients of parameters that tp does not shard, and delayed wgrads.

**tp-partial gradients**: one coalesced sum over tp at the end of every backward (`PartialGradients`).

Norms and biases of a sequence-parallel region, and replicated linears on token shards, have on each rank the gradient of the
rank's tokens; norms on sharded features have the gradient of the rank's features. Summing each gradient where it is computed
would cost one small all-reduce per parameter. Instead, all partial gradients are sent as one buffer, after the last of them has
been computed (and after FSDP's reductions). Each parameter has the same offset in the buffer on all ranks; a rank without a
gradient of the parameter sends zeros.

Gradients may accumulate over several backwards. To sum only new contributions, every tp rank except the first clears its
gradients of these parameters when a backward begins:

    rank 0   T + p0 ┐
    rank 1   0 + p1 ┴ sum ──► T + p0 + p1 on both          T: the total so far, p: this backward's contributions

The sum is queued when a backward reaches an output of the model. If a backward reaches no output of the model, or
`torch.autograd.grad` returns the gradients, the backward raises RuntimeError.

All other replicated parameters should get equal gradients on all tp ranks; `dlp.parallel.model.replicas` compares them.

**Delayed wgrads**: layers with `delay_wgrad` queue their wgrads in backward, and `backward_dw` computes the queued wgrads.

    backward       computes dx of every such layer, and quantizes and gathers both operands of wgrad
    backward_dw    computes dw = dy.T @ x for all queued wgrads, in the order of the backwards, and adds dw to the gradients

A pipeline stage can thus send dx to the previous stage, and compute wgrads while the previous stage works. The queue holds the
operands dy and x of wgrad in the low precision of the recipe. The gradients are bitwise equal to gradients without delay.

**Main gradients**: `add_main_grads` decides which wgrad GEMMs may accumulate into gradients, and logs the reason why
other wgrad GEMMs may not.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dlp.comm import collectives, observer
from dlp.parallel.linear.state import Weight, cannot_pickle
from dlp.parallel.linear.step import in_backward
from dlp.parallel.model.session import Session, converted_root, session_of
from dlp.parallel.weight.base import MainGrad, accumulates
from dlp.parallel.weight.fsdp2 import Managed, managed
from dlp.parallel.weight.local import LocalWeight, local_tensor
from dlp.runtime.function import no_autocast

_ENGINE = torch.autograd.Variable._execution_engine


def local_grad(parameter: Tensor) -> Tensor | None:
    """Return this rank's shard of a parameter's gradient; None if there is no gradient."""
    grad: Tensor | None = local_tensor(parameter.grad)
    return grad


def set_grad(parameter: Tensor, grad: Tensor) -> None:
    """Set a parameter's first gradient from this rank's shard of the gradient."""
    spec = parameter._spec if isinstance(parameter, DTensor) else None
    parameter.grad = grad if spec is None else DTensor(grad, spec, requires_grad=False)


class Slot(NamedTuple):
    """A parameter with partial gradients: full name, module, and name in the module."""

    path: str
    module: nn.Module
    name: str


def call_in_backward(output: Any, begin: Callable[[Tensor], None]) -> None:
    """Call `begin` whenever a backward reaches a tensor in `output`, the return value of a model."""
    if torch.is_grad_enabled():
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(begin)


class PartialGradients:
    """Sum the partial gradients of a model over the tp group at the end of each backward.

    slots     parameters with partial gradients; the attribute `tp_sums` of their modules is this object
    fsdp      (id of the module, name of the parameter) -> `Managed`; filled by `dlp.fully_shard` or the first forward
    num_sums  number of backwards at whose end partial gradients were summed, even if there were none
    """

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self.group = group
        self.slots = [
            Slot(f"{path}.{name}".lstrip("."), module, name)
            for path, module in model.named_modules()
            for name in getattr(module, "tp_partial", ())
            if module._parameters[name] is not None
        ]
        self._begin_anew()
        for slot in self.slots:
            slot.module.tp_sums = self  # type: ignore[assignment]
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._watch)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialGradients:
        new = memo[id(self)] = object.__new__(PartialGradients)
        new.group = self.group
        new.slots = [slot._replace(module=copy.deepcopy(slot.module, memo)) for slot in self.slots]
        new._begin_anew()
        return new

    def __getstate__(self) -> dict[str, Any]:
        cannot_pickle(self.slots[0].path if self.slots else "dlp.convert")

    def _begin_anew(self) -> None:
        """Set the initial state: no sums, no FSDP records and no running backward."""
        self.num_sums = 0
        self.fsdp: dict[tuple[int, str], Managed] = {}
        self._called = False
        self._task: int | None = None  # id of the running backward after its sum was queued; else None
        self._due: list[Tensor] = []  # parameters whose gradients the queued sum adds
        self._there: dict[tuple[bool, ...], Tensor] = {}  # cache of `_words`

    @property
    def sums_any(self) -> bool:
        """Whether the model has partial gradients and tp has several ranks."""
        return bool(self.slots) and self.group.size() > 1

    def check_summed(self, since: int) -> int:
        """Check before an optimizer step that partial gradients are summed, and return `num_sums`.

        `since`: result of the previous check, 0 for the first. Raises RuntimeError if there are partial gradients and no
        backward has summed partial gradients since the previous check."""
        if self.group.size() > 1 and self.num_sums == since:
            waiting = [slot for slot in self.slots if self._stored(slot).grad is not None]
            if waiting:
                self._refuse(waiting)
        return self.num_sums

    def check_complete(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if an optimizer that steps inside a backward holds a parameter with partial gradients, which are
        summed only at the end of the backward."""
        if self.group.size() == 1:
            return
        held_by = {id(p) for group in optimizer.param_groups for p in group["params"]}
        slot = next((slot for slot in self.slots if id(self._stored(slot)) in held_by), None)
        if slot is not None:
            raise RuntimeError(
                f"an optimizer steps inside of a backward, before the gradient of {slot.path} is summed over tp: the "
                f"step would use only this rank's contribution, and ranks would diverge. Call optimizer.step() after "
                f"backward(), at least for the optimizer that holds this parameter"
            )

    def check_announced(self) -> None:
        """Raise RuntimeError if no sum is queued and the running backward accumulates into a parameter with partial gradients.
        Called when a partial gradient is computed."""
        if self._task is None and self.sums_any:
            taken = [slot for slot in self.slots if self._is_taken(slot)]
            if taken:
                self._refuse(taken)

    def _refuse(self, slots: Sequence[Slot]) -> NoReturn:
        raise RuntimeError(
            f"the gradients of {len(slots)} parameters ({slots[0].path}, ...) were not summed over tp: the loss must "
            f"be computed from the return value of the converted model itself, model(...), which may be a tensor, "
            f"list, tuple or dict"
        )

    def _is_taken(self, slot: Slot) -> bool:
        """Whether the running backward accumulates into `grad` of this parameter. Raises RuntimeError if `torch.autograd.grad`
        returns the gradient instead."""
        parameter = self._computed_with(slot)
        if not parameter.requires_grad:
            return False
        try:
            return accumulates(parameter)
        except RuntimeError:
            raise RuntimeError(
                f"torch.autograd.grad returns the partial gradient of {slot.path} on this rank, before the sum over "
                f"tp: call backward() and read the parameters' grad, which holds the sum"
            ) from None

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or in_backward():
            return
        self._task = None  # not None if an earlier backward raised
        if not self._called:  # torch's `fully_shard` may have replaced parameters since `__init__`
            self._called = True
            for module, name, record in managed(model):
                self.fsdp.setdefault((id(module), name), record)

    def _stored(self, slot: Slot) -> Tensor:
        """Return the parameter that an optimizer holds: with FSDP, the sharded parameter."""
        record, parameter = self.fsdp.get((id(slot.module), slot.name)), slot.module._parameters[slot.name]
        assert parameter is not None
        return parameter if record is None else record.stored

    def _computed_with(self, slot: Slot) -> Tensor:
        """Return the parameter that forward reads: with FSDP, the gathered parameter."""
        record = self.fsdp.get((id(slot.module), slot.name))
        return self._stored(slot) if record is None else record.gathered

    def _is_due(self, slot: Slot) -> bool:
        """Whether a backward that begins now must sum this parameter's gradient: the parameter requires a gradient, and FSDP,
        if used, reduces gradients in this backward. Equal on all tp ranks."""
        record = self.fsdp.get((id(slot.module), slot.name))
        return self._stored(slot).requires_grad and (record is None or record.reduces)

    def _watch(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.slots:
            call_in_backward(output, self._begin)

    def _begin(self, grad: Tensor) -> None:
        """Clear the partial gradients on all tp ranks but the first, and queue the sum. Runs once per backward, when the
        backward reaches an output of the model."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if self.group.size() > 1:
            for slot in self.slots:
                self._is_taken(slot)
        self._task = task
        due = [self._stored(slot) for slot in self.slots if self._is_due(slot)]
        self._due = list({id(parameter): parameter for parameter in due}.values())  # tied parameters occur once
        if self.group.rank() != 0:
            for parameter in self._due:
                kept = local_grad(parameter)
                if kept is not None:
                    kept.zero_()
        _ENGINE.queue_callback(self._after_fsdp)

    def _after_fsdp(self) -> None:
        """Queue the sum behind FSDP's final callback, which is already queued and writes the sharded gradients."""
        _ENGINE.queue_callback(self._sum)

    @torch.no_grad()
    def _sum(self) -> None:
        due, self._due, self._task = self._due, [], None
        self.num_sums += 1
        if not due or self.group.size() == 1:
            return
        grads = [local_grad(parameter) for parameter in due]
        there = tuple([grad is not None for grad in grads])
        parts = [
            torch.zeros(local_tensor(p).numel(), device=p.device) if grad is None else grad.reshape(-1).float()
            for p, grad in zip(due, grads, strict=True)
        ]
        flat = torch.cat([*parts, self._words(there, parts[0].device)])
        with observer.label(layer="", purpose="grads"):
            flat = collectives.all_reduce(flat, self.group).wait()
        *totals, having = flat.split([*(part.numel() for part in parts), len(parts)])
        elsewhere = there if all(there) else (having > 0).tolist()
        for parameter, grad, total, anywhere in zip(due, grads, totals, elsewhere, strict=True):
            if grad is not None:
                grad.copy_(total.view(grad.shape))
            elif anywhere:
                set_grad(parameter, total.view(local_tensor(parameter).shape).to(parameter.dtype))

    def _words(self, there: tuple[bool, ...], device: torch.device) -> Tensor:
        """Return fp32 flags on the device: 1 for each gradient that this rank has, else 0. Flags are cached, so that
        later backwards with the same gradients copy nothing to the device."""
        if there not in self._there:
            self._there[there] = torch.tensor(there, dtype=torch.float32, device=device)
        return self._there[there]


@torch.no_grad()
def backward_dw(model: nn.Module) -> int:
    """Compute all delayed wgrads of a model and accumulate them into `grad` or the main gradient.

    Call `backward_dw` after the backwards of one or several microbatches, and before gradients are clipped or read. Hooks of
    the parameters are not called with these gradients: autograd calls them in backward, with None. Delayed wgrads of a backward
    that raises an exception are dropped.

    Args:
        model: model whose layers delay wgrads (`delay_wgrad`).

    Returns:
        Number of computed wgrads.

    Raises:
        ValueError: for a model without layers of dlp.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> plan = dlp.convert(model, [dlp.LayerGroup("all", "**", delay_wgrad=True)], dlp.build_mesh())
        >>> model(torch.randn(32, 64, requires_grad=True)).sum().backward()
        >>> dlp.backward_dw(model)
        1
    """
    return sum(_run_delayed(session) for session in _sessions_of(model))


def _sessions_of(model: nn.Module) -> Sequence[Session]:
    """Return the session of a converted or attached model, or the sessions of explicitly constructed layers."""
    if converted_root(model) is None:
        cores = {id(core): core for module in model.modules() if (core := getattr(module, "core", None)) is not None}
        sessions = {id(core.session): core.session for core in cores.values()}
        if sessions:
            return list(sessions.values())
    return [session_of(model)]


def _run_delayed(session: Session) -> int:
    """Compute the delayed wgrads of one session, and return their number."""
    count = len(session.waiting)
    while session.waiting:
        weight, wgrad = session.waiting.popleft()
        parameter = getattr(weight.member.module, weight.member.weight)
        mains = weight.owner.main_grads
        main = mains[weight.index] if mains else None
        target = None if main is None else main.buffer()
        with no_autocast([parameter]):
            if main is None or target is None:
                _accumulate(parameter, wgrad())
            else:
                wgrad(target)
                main.written()
    return count


def _accumulate(parameter: Tensor, dw: Tensor) -> None:
    """Accumulate dw into `grad` as autograd does: store the first gradient, and add later gradients in place."""
    grad = local_grad(parameter)
    if grad is not None:
        grad.add_(dw)
    else:
        set_grad(parameter, dw)


def check_none_waits(session: Session) -> None:
    """Raise RuntimeError before an optimizer step if delayed wgrads have not been computed."""
    if session.waiting:
        raise RuntimeError(
            f"{len(session.waiting)} wgrads are still delayed, the first of {session.waiting[0][0].name} (delay_wgrad "
            f"= true): call "
            f"dlp.backward_dw(model) between backward and the optimizer's step"
        )


def add_main_grads(
    session: Session, model: nn.Module, records: Mapping[Any, Sequence[Managed | None]], mode: str
) -> None:
    """Let wgrad GEMMs accumulate into gradients where possible, and log the reason for each weight where it is not possible.

    `records`: layer -> FSDP's record of each weight, None without FSDP. `mode`: "grad" or "main_grad". Raises ValueError for
    invariant layers."""
    if any(core.spec.invariant for core in records):
        raise ValueError(
            'invariant = true: gradients of microbatches are added in a fixed order; set main_grads = "off"'
        )
    shared, left = _shared_parameters(model), dict[str, list[str]]()
    for core, its in records.items():
        found: list[MainGrad | None] = []
        for weight, record in zip(core.weights, its, strict=True):
            stored, why = weight.stored, _not_by_wgrad(weight, record, shared)
            if why is None and mode == "grad" and stored is not None and stored.dtype != torch.float32:
                why = f"the gradients are {str(stored.dtype).removeprefix('torch.')}, not fp32"
            if why is not None:
                left.setdefault(why, []).append(weight.name)
            found.append(MainGrad(stored, mode, weight.name) if why is None else None)
        core.weights.main_grads = found if any(found) else []
    if any(module._compiled_call_impl is not None for module in model.modules()):
        session.note(f"main_grads = {mode!r}: autograd accumulates the gradients of compiled code")
    for why, names in left.items():
        some = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        session.note(f"main_grads = {mode!r}: autograd accumulates the gradients of {some}: {why}")


def _not_by_wgrad(weight: Weight, record: Managed | None, shared: set[int]) -> str | None:
    """Return the reason why the wgrad GEMM cannot accumulate into the gradient of a weight; None if the GEMM can."""
    stored, style = weight.stored, weight.bound.spec.style
    if not isinstance(stored, nn.Parameter):
        return "a parametrization computes the weights"
    if record is not None:
        return "FSDP manages the weights"
    if type(weight) is not LocalWeight:
        return "the weights are quantized-only"
    if id(stored) in shared:
        return "several modules share the weights"
    if style.partial_weight_grad and weight.bound.spec.tp > 1:
        return "the gradients are partial sums over tp"
    return None if stored.requires_grad else "the weights do not require gradients"


def _shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters that are registered in several modules."""
    found = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {key for key, count in found.items() if count > 1}
