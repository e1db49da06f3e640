"""Replicas: a parameter that every rank of a mesh axis holds must stay equal on these ranks.

    axis                        replicated parameters
    tp                          parameters that tp does not shard: norms, replicated biases, local linears
    dp_shard, dp_replicate      parameters that FSDP does not shard over the axis

Before the first ten optimizer steps, and then before every hundredth (`dlp.parallel.model.checks.looks`), ranks compare:

    gradients over tp    until each parameter has had a nonzero gradient. A difference usually means that the module of the
                         parameter reads sharded activations
    values, all axes     changes of a digest since the last comparison. A difference usually means that a rank skipped a layer
                         or a step, or that nothing averages the gradients of dp ranks

A digest consists of the norm of a tensor and of sums of its parts, in fp64. A comparison reads all parameters once, and costs
a few small collectives and a wait for the device for each axis; steps between comparisons cost nothing. Ledgers count the
bytes of comparisons under the layer name CHECKS, and do not compare these bytes with a plan.

`check_replicas` compares samples of the values before a checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from dlp.comm import observer
from dlp.comm.lockstep import gather_compared
from dlp.comm.mesh import TP, placement_on
from dlp.comm.observer import CHECKS
from dlp.comm.transport import agree
from dlp.parallel.model.checks import evenly, looks
from dlp.parallel.weight.held import masters_of
from dlp.parallel.weight.local import local_tensor, local_values
from dlp.parallel.weight.parameters import is_placeholder

Groups = Mapping[str, ProcessGroup]
PARTS = 8  # number of consecutive parts, and of interleaved parts, whose sums a digest holds
# Minimum number of values of a parameter that are compared before a checkpoint; smaller parameters are compared completely
SAMPLE = 1024
TOLERANCE = 1e-2  # for gradients, and for samples before a checkpoint: largest accepted difference relative to the norm
DRIFT = 1e-3  # for values: largest accepted difference relative to the change since the last comparison
# Differences that rounding explains, relative to the root mean square of the values
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-12}
COARSE = 1e-4  # value for dtypes that are not in ROUNDING


def wide(groups: Groups) -> dict[str, ProcessGroup]:
    """Return the axes with more than one rank."""
    return {axis: group for axis, group in groups.items() if group.size() > 1}


class Replicas:
    """Compare replicas of a model's parameters.

    partial  names of parameters whose gradients are partial sums over tp; only the values of these parameters are compared
    groups   mesh axis -> this rank's process group on the axis
    """

    def __init__(self, model: nn.Module, partial: Iterable[str], groups: Groups) -> None:
        self.model, self._partial, self.groups = model, set(partial), wide(groups)
        self._unseen: dict[str, None] | None = None  # parameters that have not had a nonzero gradient
        self._before: dict[str, Tensor] = {}  # digests at the last comparison
        self._own: set[tuple[str, str]] = set()  # (axis, name) of plain parameters that the user has sharded
        self._steps = 0  # steps of optimizers that are not attached

    def of_copy(self, model: nn.Module) -> Replicas:
        """Return the object that compares replicas of `model`, a copy of the model of this object."""
        return Replicas(model, self._partial, self.groups)

    def holds_some(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds a parameter of the model, or the master weight of one."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = itertools.chain(self.model.parameters(), masters_of(self.model).values())
        return any(id(p) in held for p in own)

    def look_unattached(self) -> None:
        """Compare replicas before a step of an optimizer that is not attached, and count the step."""
        self.look(self._steps)
        self._steps += 1

    def look(self, step: int) -> None:
        """Compare replicas before step number `step`, counted from 0, if a comparison is due. All ranks call this method.

        Raises RuntimeError that names a differing parameter and likely causes: on all ranks if values differ, on the ranks of
        the tp group if gradients differ."""
        if not self.groups or not looks(step):
            return
        parameters = values_of(self.model)
        digests = dict(zip(parameters, digest(parameters.values()).unbind(), strict=True)) if parameters else {}
        first = not self._before
        if first:
            self._find_own(parameters, digests)
        if TP in self.groups:
            self._compare_gradients(parameters, self.groups[TP])
        changes = {name: now if first else now - self._before.get(name, now) for name, now in digests.items()}
        self._before = digests
        self._compare_values(parameters, digests, changes, step, first)

    def _find_own(self, parameters: Mapping[str, Tensor], digests: Mapping[str, Tensor]) -> None:
        """Find plain parameters whose initial values differ between the ranks of an axis. They count as sharded by the user."""
        for axis, group in self.groups.items():
            names = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
            if names:
                seen = gather([digests[name] for name in names], group)
                equal = (seen == seen[:1]).all(2).all(0).tolist()
                self._own |= {(axis, name) for name, is_equal in zip(names, equal, strict=True) if not is_equal}

    def _on(self, axis: str, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the parameters that are replicated on the ranks of an axis."""
        return [name for name, p in parameters.items() if is_replicated(p, axis) and (axis, name) not in self._own]

    def _compare_gradients(self, parameters: Mapping[str, Tensor], group: ProcessGroup) -> None:
        """Compare over tp the gradients of parameters that have not had a nonzero gradient before. Raises RuntimeError if
        gradients differ."""
        if self._unseen is None:
            self._unseen = dict.fromkeys(n for n in self._on(TP, parameters) if n not in self._partial)
        found = {n: parameters[n] for n in self._unseen if n in parameters and parameters[n].requires_grad}
        if not found:
            return
        seen = gather(list(digest([p if p.grad is None else p.grad for p in found.values()],
                                  [p.grad is None for p in found.values()])), group)  # fmt: skip
        spread, norms = seen.amax(0) - seen.amin(0), seen[..., 0]
        differ = (spread > TOLERANCE * norms.amax(0)[:, None]).any(1).tolist()
        by_name = dict(zip(found, norms.t().tolist(), strict=True))
        bad = [name for name, differs in zip(found, differ, strict=True) if differs]
        if bad:
            raise RuntimeError(gradients_differ(self.model, bad, by_name, group))
        for name, norm in by_name.items():
            if max(norm) > 0:
                del self._unseen[name]

    def _compare_values(
        self, parameters: Mapping[str, Tensor], digests: Mapping[str, Tensor], changes: Mapping[str, Tensor], step: int,
        first: bool,
    ) -> None:  # fmt: skip
        """Compare the changes of digests since the last comparison; the first comparison compares the digests. Raises
        RuntimeError on all ranks if the digests or changes of a parameter differ."""
        for axis, group in self.groups.items():
            names = self._on(axis, parameters)
            if not names:
                continue
            seen = gather([changes[name] for name in names], group)
            spread = (seen.amax(0) - seen.amin(0)).amax(1)
            moved = torch.zeros_like(spread) if first else seen.abs().amax(0).amax(1)
            rounding = torch.stack([_rounding(parameters[name], digests[name]) for name in names])
            drifts = (spread > torch.maximum(DRIFT * moved, rounding)).float()
            with observer.label(layer=CHECKS):
                for each in self.groups.values():  # so that ranks that hold other shards raise as well
                    (drifts,) = agree([drifts], each)
            worst = next((name for name, drift in zip(names, drifts.tolist(), strict=True) if drift), None)
            if worst is not None:
                raise RuntimeError(values_differ(worst, axis, None if first else step))


def _rounding(parameter: Tensor, digested: Tensor) -> Tensor:
    """Return the largest difference of digests that rounding explains, fp32 []."""
    count = max(1, local_tensor(parameter).numel())
    return digested[0].float() * (ROUNDING.get(parameter.dtype, COARSE) / count**0.5)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters in high precision by name, and the master weights of quantized-only weights."""
    found: dict[str, Tensor] = {
        name: p
        for name, p in model.named_parameters()
        if p.is_floating_point()
        and not p.is_meta
        and (type(p) is nn.Parameter or isinstance(p, DTensor))
        and not is_placeholder(p)
    }
    return found | dict(masters_of(model))


def is_replicated(parameter: Tensor, axis: str) -> bool:
    """Whether the ranks of an axis hold the same values of the parameter. Plain parameters, and DTensors on a mesh without
    this axis, count as replicated."""
    placement = placement_on(axis, parameter)
    return placement is None or isinstance(placement, Replicate)


@torch.no_grad()
def digest(tensors: Iterable[Tensor], absent: Sequence[bool] | None = None) -> Tensor:
    """Return digests of tensors, or of this rank's shards of DTensors, fp64 [tensors, 2 + 2 * PARTS].

    A digest holds the norm, the sums of PARTS consecutive and of PARTS interleaved parts, each divided by the square root of
    the number of elements in the part, and the sum of the remaining elements. `absent`: for each tensor, whether its
    digest is all zeros."""
    rows = []
    for place, tensor in enumerate(tensors):
        flat = local_values(tensor).reshape(-1)
        if absent is not None and absent[place]:
            rows.append(torch.zeros(2 + 2 * PARTS, dtype=torch.float64, device=flat.device))
            continue
        each = len(flat) // PARTS
        cut, rest = flat[: each * PARTS], flat[each * PARTS :]
        sums = (
            cut.view(PARTS, each).sum(1, dtype=torch.float64),
            cut.view(each, PARTS).sum(0, dtype=torch.float64),
        )
        norm = torch.linalg.vector_norm(flat, dtype=torch.float32).double()[None]
        rows.append(
            torch.cat([norm, *(part / max(each, 1) ** 0.5 for part in sums), rest.sum(dtype=torch.float64)[None]])
        )
    return torch.stack(rows)


@torch.no_grad()
def gather(rows: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """Return the rows of all R ranks of the group, one row of numbers for each tensor, fp32 [R, tensors, numbers]."""
    return gather_compared(torch.stack(list(rows)).float(), group)


@torch.no_grad()
def check_replicas(model: nn.Module, groups: Groups) -> None:
    """Compare samples of each replicated DTensor (`evenly` with SAMPLE) over each axis. All ranks call this function.

    Raises RuntimeError naming the first parameter whose replicas differ by more than TOLERANCE of the norm."""
    for axis, group in wide(groups).items():
        found = dict(replicated(model, axis))
        if not found:
            continue
        samples = [evenly(parameter, SAMPLE).float() for parameter in found.values()]
        pieces = gather_compared(torch.cat(samples), group).split([len(sample) for sample in samples], 1)
        distances = [(its - its[:1]).norm(dim=1).amax() / its.norm(dim=1).amax().clamp(min=1e-30) for its in pieces]
        for name, drift in zip(found, torch.stack(distances).tolist(), strict=True):
            if drift > TOLERANCE:
                raise RuntimeError(f"{_kind_of(name, axis)} have drifted {drift:.2%} apart: {_remedy(axis)}")


def replicated(model: nn.Module, axis: str) -> Iterator[tuple[str, DTensor]]:
    """Yield name and parameter of each DTensor that is replicated on an axis."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and is_replicated(parameter, axis):
            yield name, parameter


# ---- messages


def _kind_of(name: str, axis: str) -> str:
    if axis == TP:
        return f"{name} is replicated on tp, and its replicas on the ranks of tp"
    return f"{name} is not sharded over {axis}, and its replicas on the ranks of {axis}"


def _remedy(axis: str) -> str:
    if axis == TP:
        return (
            "gradients differed between tp ranks, or a rank skipped a layer or a step (for example after a caught "
            "exception), or only one rank changed the parameter, or an optimizer rounds with different random numbers "
            "on the ranks. All tp ranks must run the same "
            "microbatches and steps. If the module reads features that are sharded over tp, add the module to a layer "
            "group with style = 'column'; then restart from a checkpoint in which replicas are equal"
        )
    return (
        "these ranks read different data, and nothing averages their gradients, so that each rank trains separately: "
        "call "
        "dlp.fully_shard(model, mesh=mesh) after dlp.convert and before the optimizer is created, or average gradients "
        "over "
        "the data-parallel ranks before each step"
    )


def values_differ(name: str, axis: str, step: int | None) -> str:
    """Return the message for a parameter whose values differ. `step`: number of completed steps; None: initial values."""
    if step is None:
        return (
            f"{_kind_of(name, axis)} begin with different values: initialize the model with the same torch.manual_seed "
            f"on all ranks, or load the same checkpoint on all ranks"
        )
    return f"{_kind_of(name, axis)} diverged before step {step + 1}: {_remedy(axis)}"


def gradients_differ(
    model: nn.Module, bad: Sequence[str], norms: Mapping[str, list[float]], group: ProcessGroup
) -> str:
    """Return the message for parameters `bad` whose gradients differ. All tp ranks call this function.

    The message is about the module of the last of these parameters, because backward reaches this module first."""
    path = bad[-1].rpartition(".")[0]
    name = next(each for each in bad if each.rpartition(".")[0] == path)
    said = (
        f"{name} is replicated on tp, but its gradient differs between tp ranks (norms "
        f"{', '.join(f'{value:.4g}' for value in norms[name])}), so that the replicas would diverge. "
    )
    dropout = next((at for at, module in model.named_modules() if _drops(module)), None)
    if dropout is not None and not _same_random_numbers(group, next(model.parameters()).device):
        said += (
            f"The random numbers of tp ranks differ, and {dropout} drops values: replicated tensors need the same "
            f"dropout mask on all tp ranks, so call torch.manual_seed with one seed on all tp ranks of a data-parallel "
            f"rank. If the seeds are equal already: "
        )
    tokens = (
        "to a layer group with sequence_parallel = True (dlp.convert also accepts models of explicitly constructed "
        "layers)"
    )
    if hasattr(model.get_submodule(path), "core"):  # a linear
        return said + (
            f"{path} is a linear that tp does not shard. If the output is combined with features that are sharded over "
            f"tp (k and v with fewer heads than tp, or a gate with one column), each rank has only the gradient of its "
            f"own features: give the linear a multiple of tp output features (k and v: as many heads as tp, by "
            f"repeating heads) and a layer "
            f"group with style = 'column', or choose a smaller tp. If the linear reads token shards, add the linear "
            f"{tokens}"
        )
    return said + (
        f"If the module reads features that are sharded over tp, for example a norm after a column-parallel q, add the "
        f"module to a layer group with style = 'column'; if the module reads token shards, {tokens}: its gradients are "
        f"then summed over tp"
    )


def _drops(module: nn.Module) -> bool:
    """Whether a module is a dropout that is active in training."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


def _same_random_numbers(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the next random numbers are equal on all ranks of a group."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    mine = int.from_bytes(sha256(state.numpy().tobytes()).digest()[:6], "little")
    return len(set(gather_compared(torch.tensor(mine, device=device), group).tolist())) == 1
