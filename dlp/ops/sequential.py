"""Sequential: run modules in order; each group of consecutive ops runs as one autograd function, by an `OperationFuser`.

A group ends before a plain module, an op with hooks or an overridden `forward`, and an op that is an FSDP unit. These modules
are called as modules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, overload

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dlp.ops.basic.arithmetic import Reshape
from dlp.ops.fuser import OperationFuser
from dlp.ops.linear import BasicLinear
from dlp.ops.op import FusibleOperation
from dlp.ops.plans import SequencePlan, group_plan
from dlp.ops.values import Tensors, one_tensor


class Sequential(nn.Module):
    """Run modules in order; consecutive operations run as one autograd function, with fusions.

    Plain modules, operations with hooks or an overridden `forward`, and operations that are FSDP units are called as modules
    and are not fused. `plan()` shows the fused operations.

    Args:
        *modules: modules, or one dict of modules by name, as for `torch.nn.Sequential`.

    Shape:
        - inputs: x, followed by the extra inputs of all operations in order
        - output: output of the last module; with extra outputs a tuple of the output and all extra outputs, in order

    Examples:
        >>> mlp = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, (128, 128)), ops.SwiGLU(), ops.Linear(128, 64))
        >>> mlp(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    def __init__(self, *modules: nn.Module | OrderedDict[str, nn.Module] | dict[str, nn.Module]) -> None:
        super().__init__()
        named = modules[0].items() if len(modules) == 1 and isinstance(modules[0], dict) else enumerate(modules)
        for name, module in named:
            self.add_module(str(name), module)  # type: ignore[arg-type]
        self._groups_now()  # created here, because torch.compile cannot trace the creation of groups

    # Methods of a list of modules, as in torch.nn.Sequential

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        vars(self).pop("_groups", None)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequential: ...
    def __getitem__(self, index: int | slice) -> nn.Module | Sequential:
        names = list(self._modules)
        if isinstance(index, slice):
            return Sequential(OrderedDict((name, self._modules[name]) for name in names[index]))  # type: ignore[misc]
        return self._modules[names[index]]  # type: ignore[return-value]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self.add_module(list(self._modules)[index], module)

    def __delitem__(self, index: int | slice) -> None:
        named = list(self._modules.items())
        del named[index]
        self._renumber(named)

    def append(self, module: nn.Module) -> Sequential:
        name = next(str(i) for i in count(len(self)) if str(i) not in self._modules)
        self.add_module(name, module)
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Sequential:
        for module in modules:
            self.append(module)
        return self

    def pop(self, index: int | slice) -> nn.Module:
        """Remove the module at `index` and return it; for a slice return the removed modules as a Sequential."""
        taken = self[index]
        del self[index]
        return taken

    def __iadd__(self, modules: Iterable[nn.Module]) -> Sequential:
        return self.extend(modules)

    def __add__(self, modules: Iterable[nn.Module]) -> Sequential:
        """Return a new Sequential of the modules of this Sequential, followed by `modules`. The names are "0", "1", ..."""
        return Sequential(*self, *modules)

    def insert(self, index: int, module: nn.Module) -> Sequential:
        """Insert a module before `index`. Modules whose names are numbers are renumbered; other names stay."""
        named: list[Any] = list(self._modules.items())
        named.insert(index, ("0", module))
        self._renumber(named)
        return self

    def _renumber(self, named: list[Any]) -> None:
        self._modules.clear()
        for place, (name, module) in enumerate(named):
            self.add_module(str(place) if name.isdigit() else name, module)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_groups"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._groups_now()

    # Forward, groups and plan

    def forward(self, x: Tensors, *extra_inputs: Tensor) -> Tensors:
        groups, at = self._groups_now(), 0
        if len(groups) == 1 and isinstance(groups[0], OperationFuser):
            return groups[0](x, *extra_inputs)
        wanted = self.num_extra_inputs
        if len(extra_inputs) != wanted:
            raise ValueError(
                f"Sequential: the ops take {wanted} extra inputs; got {len(extra_inputs)}: pass the extra inputs of "
                f"all ops, in order"
            )
        outputs: list[Tensor] = []
        for group in groups:
            num_inputs, num_outputs = _num_extra(group)
            x = group(x, *extra_inputs[at : at + num_inputs])
            at += num_inputs
            if num_outputs:
                x, *more = x
                outputs += more
        return (one_tensor(x), *outputs) if outputs else x

    @property
    def num_extra_inputs(self) -> int:
        """The total number of extra inputs of all ops, including nested sequences."""
        return sum(_num_extra(group)[0] for group in self._groups_now())

    @property
    def num_extra_outputs(self) -> int:
        """The total number of extra outputs of all ops, including nested sequences."""
        return sum(_num_extra(group)[1] for group in self._groups_now())

    def _groups_now(self) -> list[Any]:
        """Return the fusers and modules that forward calls, in order: an `OperationFuser` for each group of consecutive ops,
        and the other modules. The list is cached until modules, hooks or a `forward` change."""
        cached = vars(self).get("_groups")
        if cached is not None and cached.is_valid([*self._modules.values()]):
            return cached.groups
        reasons = [_why_called(module) for module in self]
        groups: list[Any] = []
        neighbours: list[tuple[str, FusibleOperation]] = []
        for (name, module), why in zip([*self._modules.items(), ("", None)], [*reasons, "the end"], strict=True):
            if why is None:
                neighbours.append((name, module))  # type: ignore[arg-type]
                continue
            if neighbours:
                groups.append(_fuser(neighbours))
                neighbours = []
            if module is not None:
                groups.append(module)
        vars(self)["_groups"] = _Groups(groups, self, reasons)
        return groups

    def plan(self) -> SequencePlan:
        """Return the plan: for each group the fused ops of forward and backward in the last call, and notes; for each module
        that ends a group, the reason. Before the first call fusions are applied without knowledge of recipes and gradients."""
        lines, at = [], iter(zip(self._modules.items(), [_why_called(module) for module in self], strict=True))
        for group in self._groups_now():
            if isinstance(group, OperationFuser):
                lines.append(group_plan(group))
                continue
            name, why = next((name, why) for (name, module), why in at if module is group)
            lines.append(f"{name} ({type(group).__name__}): {why}")
        return SequencePlan(lines)


class _Groups:
    """The groups of a Sequential, and the facts about its modules that decide the groups.

    groups      the fusers and modules that forward calls
    modules     the modules of the Sequential
    reasons     for each module: reason why it is called as a module; None: it runs in a fuser
    owners      modules of ops, each with its class. If a module gets hooks, another `forward` or another class (by FSDP), its
                op no longer runs in a fuser
    all_fused   whether all ops run in fusers, so that the fast check of `owners` is enough
    """

    def __init__(self, groups: list[Any], modules: Iterable[nn.Module], reasons: Sequence[str | None]) -> None:
        self.groups, self.reasons, self.modules = groups, list(reasons), list(modules)
        ops = [module for module in self.modules if isinstance(module, FusibleOperation)]
        self.owners = [(owner, type(owner)) for op in ops for owner in _called(op)]
        self.all_fused = all(why is None for module, why in zip(self.modules, reasons, strict=True) if module in ops)

    def is_valid(self, modules: Sequence[Any]) -> bool:
        """Whether grouping these modules now would give the same groups. Called in every forward, so it must be fast."""
        if modules != self.modules:
            return False
        if not self.all_fused:
            return [_why_called(module) for module in modules] == self.reasons
        for owner, kind in self.owners:
            if type(owner) is not kind or "forward" in owner.__dict__:
                return False
            if owner._forward_hooks or owner._forward_pre_hooks or owner._backward_hooks or owner._backward_pre_hooks:
                return False
        return True


def _num_extra(group: Any) -> tuple[int, int]:
    """Return the numbers of extra inputs and of extra outputs of a fuser or module."""
    if isinstance(group, OperationFuser | Sequential):
        return group.num_extra_inputs, group.num_extra_outputs
    return (group.basic_extra_inputs, group.basic_extra_outputs) if isinstance(group, FusibleOperation) else (0, 0)


def _hooks(owner: nn.Module) -> Any:
    """Return the first non-empty dict of hooks of a module, or an empty dict. A fuser would not call the hooks."""
    return owner._forward_hooks or owner._forward_pre_hooks or owner._backward_hooks or owner._backward_pre_hooks


def _why_called(module: Any) -> str | None:
    """Return the reason why a module is called and ends a group; None: it is an op that runs in a fuser."""
    if not isinstance(module, FusibleOperation):
        return "no op: it ends a group"
    for owner in _called(module):
        if isinstance(owner, FSDPModule):
            return "an FSDP unit ends a group; shard the Sequential, or an enclosing module"
        if _hooks(owner):
            return "a module with hooks ends a group"
        if "forward" in vars(owner) or not type(owner).forward.__module__.startswith("dlp."):
            return "a module with an overridden forward ends a group"
    return None


def _called(op: FusibleOperation) -> list[nn.Module]:
    """Return the op and its `owners`: the modules whose hooks or `forward` users may change."""
    return list(dict.fromkeys([op, *op.owners]))


def _fuser(neighbours: list[tuple[str, FusibleOperation]]) -> OperationFuser:
    """Create the fuser of consecutive ops, given as (name, op)."""
    names = [
        f"{name} ({type(op).__name__}{'' if basic is op else f': {type(basic).__name__}'})"
        for name, op in neighbours
        for basic in op.expanded
    ]
    ops = [op for _, op in neighbours]
    check_halves(ops, names)
    return OperationFuser(ops, names)


def _changes_features(op: FusibleOperation) -> bool:
    """Whether the last dimension of the output may differ from that of the input."""
    return isinstance(op, BasicLinear | Reshape) or hasattr(op, "halves")


def check_halves(ops: list[FusibleOperation], names: list[str]) -> None:
    """Raise ValueError for a gate that splits the output of a column-parallel linear into halves, gate and up: tp shards this
    output, so that the first ranks would hold only gate, and the other ranks only up."""
    for place, gate in enumerate(ops):
        if not hasattr(gate, "halves"):
            continue
        before = next((op for op in reversed(ops[:place]) if _changes_features(op)), None)
        spec = before.core.spec if isinstance(before, BasicLinear) else None
        if spec is not None and spec.style.cut_dy == 1 and spec.tp > 1 and len(spec.members) == 1:
            raise ValueError(
                f"{type(gate).__name__} after {type(before).__name__}: tp {spec.tp} shards the output, so that a rank "
                f"would hold either gate or up; construct siblings, Linear(in_features, (gate, up))"
            )
