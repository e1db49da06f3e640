"""The observer: a torch dispatch mode that counts the bytes that each collective sends.

    with Observer(dims.group_names()) as seen:         every collective passes through the dispatch mode
    seen.sent                                          Counter of bytes by Key

The observer reads the arguments of the collectives that torch executes, so that it also counts the collectives of FSDP,
DTensor, user code and opaque ops; it does not read the plan. Code that sends bytes without a collective calls `copies`
(copies into memory of a peer) or `agrees` (amax agreements by a kernel).

The count is the number of bytes that this rank sends if all data goes directly from the sender to each rank that needs it. For
R ranks and an input of n elements of s bytes:

    all_gather       (R-1) n s                the shard goes to every other rank
    reduce_scatter   n s - n s / R            all but this rank's part of the input
    all_to_all       n s - n s / R            all but this rank's part; with unequal splits, n s minus the part for this rank
    all_reduce       2 (R-1) ceil(n/R) s      a reduce-scatter and an all-gather of equal parts
    broadcast        (R-1) n s on the root, 0 on other ranks
    scatter          on the root, the parts for other ranks
    gather, reduce   n s on ranks other than the root
    send, copy       n s
    recv, barrier    0

Callers use `label` to name the layer, purpose and precision of a transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CHECKS = (
    # layer name of the transfers that compare replicas, or the next actions of ranks; plans do not include these bytes
    "replicas"
)
PURPOSES = ("fprop", "dgrad", "wgrad", "weights", "grads", "amax", "other")


class Label(NamedTuple):
    """Label of a transfer.

    layer       name of the layer; "": no layer
    purpose     one of PURPOSES; "": the purpose that the observer assumes for the group and kind (`Observer.unlabelled`)
    precision   precision under which the bytes are counted; "": the dtype of the sent tensors
    """

    layer: str = ""
    purpose: str = ""
    precision: str = ""


class Key(NamedTuple):
    """Key of a count of bytes or of launches.

    group       name of the process group, one of `dlp.comm.mesh.GROUPS`
    kind        collective: "all_gather", "reduce_scatter", ..., "send" or "copy"
    precision   precision or dtype of the elements; "" in counts of launches
    layer       name of the layer; "": no layer
    purpose     one of PURPOSES
    """

    group: str
    kind: str
    precision: str
    layer: str
    purpose: str


_NOBODY = Label()
_LABEL: ContextVar[Label] = ContextVar("dlp_observer_label", default=_NOBODY)


class _Uncounted:
    """A `nullcontext` that runs no Python code. Transfers enter this context while no dispatch mode, and so no observer, is
    active."""

    __enter__ = __exit__ = "".format  # a C function that accepts any arguments and returns "" (false)


UNCOUNTED: Any = _Uncounted()


# Return the number of active dispatch modes, one of which may be an observer. Transfers of layers enter
# `label(...) if counting() else UNCOUNTED`, which runs no Python code if there is no dispatch mode.
counting = torch._C._len_torch_dispatch_stack


def label(**fields: str) -> AbstractContextManager[None]:
    """Return a context manager that labels transfers with the given fields of `Label`. Other fields keep their values.

    Without an active dispatch mode the context manager does nothing."""
    return _labelled(fields) if counting() else UNCOUNTED


@contextmanager
def _labelled(fields: dict[str, str]) -> Iterator[None]:
    token = _LABEL.set(_LABEL.get()._replace(**fields))
    try:
        yield
    finally:
        _LABEL.reset(token)


def default_precision(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return a context manager in which transfers are counted with precision `dtype`, unless their label has a precision. The
    context manager is meant for tensors that are sent as bytes."""
    return label(precision=_LABEL.get().precision or dtype_name(dtype))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def gathered(nbytes: int, ranks: int) -> int:
    """Return the bytes that a rank sends in an all-gather of shards of `nbytes`."""
    return (ranks - 1) * nbytes


def scattered(nbytes: int, ranks: int) -> int:
    """Return the bytes that a rank sends in a reduce-scatter or all-to-all of an input of `nbytes`, in equal parts."""
    return nbytes - nbytes // ranks


def reduced(numel: int, itemsize: int, ranks: int) -> int:
    """Return the bytes that a rank sends in an all-reduce of `numel` elements: one part of its input to each other rank, then
    the sum of its part to every other rank."""
    return 2 * (ranks - 1) * -(-numel // ranks) * itemsize


class _At(NamedTuple):
    """One call of a collective.

    ranks       number of ranks of the group
    rank        index of this rank in the group
    arguments   arguments of the call, by name
    """

    ranks: int
    rank: int
    arguments: Mapping[str, Any]

    def root(self) -> bool:
        return bool(self.arguments.get("root_rank", self.arguments.get("src")) == self.rank)

    def own_part(self, whole: Tensor) -> int:
        """Return the bytes of the input `whole` of an all-to-all that stay on this rank."""
        splits = self.arguments.get("input_split_sizes")
        if not splits:
            return whole.nbytes // self.ranks
        return int(splits[self.rank]) * (whole.nbytes // len(whole) if len(whole) else 0)


Rule = Callable[[Tensor, _At], int]
_RULES: dict[str, Rule] = {
    "all_gather": lambda t, at: gathered(t.nbytes, at.ranks),
    "reduce_scatter": lambda t, at: scattered(t.nbytes, at.ranks),
    "all_to_all": lambda t, at: t.nbytes - at.own_part(t),
    "all_reduce": lambda t, at: reduced(t.numel(), t.itemsize, at.ranks),
    "broadcast": lambda t, at: gathered(t.nbytes, at.ranks) if at.root() else 0,
    "reduce": lambda t, at: 0 if at.root() else t.nbytes,
    "gather": lambda t, at: 0 if at.root() else t.nbytes,
    "send": lambda t, at: t.nbytes,
    "copy": lambda t, at: t.nbytes,
}
# op -> (kind, name of the argument that is sent). For a kind with the suffix [], the argument is a list with one part for each
# rank, or a list of such lists.
_OPS = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::allgather_": ("all_gather", "input_tensors"),
    "c10d::allgather_coalesced_": ("all_gather", "input_list"),
    "c10d::_allgather_base_": ("all_gather", "input_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "c10d::reduce_scatter_": ("reduce_scatter[]", "input_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::alltoall_": ("all_to_all[]", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "input_tensors"),
    "c10d::scatter_": ("scatter[]", "input_tensors"),
    "c10d::send": ("send", "tensors"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "inputs"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::isend": ("send", "tensor"),
    "_dtensor::shard_dim_alltoall": ("all_to_all", "input"),
    "dlp::copies": ("copy", "source"),
    "dlp::agrees": ("all_reduce", "source"),
}
_SILENT = {  # ops in _NAMESPACES that send no payload
    "c10d::recv_", "c10d::recv_any_source_", "c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan",
    "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::irecv",
}  # fmt: skip
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")

_LIBRARY = torch.library.Library("dlp", "FRAGMENT")
_LIBRARY.define("copies(Tensor source, str group_name) -> ()")
_LIBRARY.define("agrees(Tensor source, str group_name) -> ()")
for _told in ("copies", "agrees"):
    _LIBRARY.impl(_told, lambda source, group_name: None, "CompositeExplicitAutograd")


def copies(source: Tensor, group: ProcessGroup) -> None:
    """Count a copy of `source` into the memory of one peer of `group`. Such a copy is not a collective."""
    if counting():  # an observer may be active
        torch.ops.dlp.copies(source, group.group_name)


def agrees(numbers: int, group: ProcessGroup) -> None:
    """Count an amax agreement by a kernel over `group`, as an all-reduce of `numbers` fp32 values."""
    if counting():
        torch.ops.dlp.agrees(torch.empty(numbers, device="meta"), group.group_name)


class Observer(TorchDispatchMode):
    """Context manager that counts collectives.

    names        maps the global ranks of a group to the name of the group, see `ParallelDims.group_names`
    unlabelled   maps (group, kind) to the purpose of transfers without a purpose, such as the transfers of FSDP
    sent         number of bytes that this rank sent, by Key
    launches     number of calls of collectives, by Key

    Compiled code runs compiled, and gives the same bits as without an observer. Raises RuntimeError for a collective that the
    observer cannot count.
    """

    def __init__(
        self, names: Mapping[tuple[int, ...], str], unlabelled: Mapping[tuple[str, str], str] | None = None
    ) -> None:
        super().__init__()
        self.names, self.unlabelled = names, unlabelled or {}
        self.sent: Counter[Key] = Counter()
        self.launches: Counter[Key] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile to run compiled code in this context. By default torch runs the functions eagerly."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = func._schema.name
        if name in _OPS:
            self._count(func, args, kwargs or {})
        elif func.namespace in _NAMESPACES and name not in _SILENT:
            raise RuntimeError(
                f"the observer cannot count the collective {name}: add the collective to dlp/comm/observer.py"
            )
        elif _is_opaque(func):
            with self._inside():
                return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def _inside(self) -> Iterator[None]:
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        kind, source = _OPS[func._schema.name]
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        ranks, rank = _members(arguments)
        at = _At(len(ranks), rank, arguments)
        group, kind_name = self.names.get(ranks, "other"), kind.removesuffix("[]")
        said = _LABEL.get()
        purpose = said.purpose or self.unlabelled.get((group, kind_name), "other")
        for dtype, nbytes in _sent(kind, arguments[source], at):
            key = Key(group, kind_name, said.precision or dtype_name(dtype), said.layer, purpose)
            self.sent[key] += nbytes
        self.launches[Key(group, kind_name, "", said.layer, purpose)] += 1

    def replayed(self, captured: Observer, times: int) -> None:
        """Count `times` replays of a CUDA graph whose capture the observer `captured` counted. Replays do not reach the
        dispatcher."""
        for mine, its in ((self.sent, captured.sent), (self.launches, captured.launches)):
            for key, count in its.items():
                mine[key] += count * times


def _sent(kind: str, source: Any, at: _At) -> Iterator[tuple[torch.dtype, int]]:
    """Yield dtype and bytes of each tensor that a call sends."""
    if kind.endswith("[]"):  # lists of one part for each rank; in a scatter only the root has parts
        lists = source if source and isinstance(source[0], list | tuple) else [source]
        others = (part for parts in lists for i, part in enumerate(parts) if i != at.rank)
        yield from ((part.dtype, part.nbytes) for part in others)
        return
    yield from ((t.dtype, _RULES[kind](t, at)) for t in tree_leaves(source) if isinstance(t, Tensor))


def _members(arguments: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the global ranks of the group of a collective, and the index of this rank among them."""
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, torch.ScriptObject):
        group = ProcessGroup.unbox(group)
    elif isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]
    return tuple(dist.get_process_group_ranks(group)), group.rank()


@cache
def _is_opaque(func: Any) -> bool:
    """Return whether an op has one implementation for all devices, as custom ops of dlp and of users have. Collectives in such
    an op are counted only if the op runs inside of the observer."""
    if func.namespace in ("aten", "prims", "prim"):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeExplicitAutograd")


def totals(counts: Mapping[Any, int], *fields: str) -> dict[Any, int]:
    """Return the sums of counts with equal values of these fields of `Key`.

    For example, totals(seen.sent, "group", "purpose") has the key ("tp", "fprop"), and totals(seen.sent, "group") the key "tp".
    """
    sums: Counter[Any] = Counter()
    for key, count in counts.items():
        chosen = tuple(getattr(key, field) for field in fields)
        sums[chosen[0] if len(fields) == 1 else chosen] += count
    return dict(sums)
