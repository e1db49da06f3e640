"""The observer: counts every byte that a process group sends, at the collective that sends it.

    with Observer(dims.group_names()) as seen:         a torch dispatch mode: each collective passes through it
        ...                                            forward, backward (autograd's threads too), clipping, optimizer
    seen.sent                                          Counter of bytes by Key

The observer knows no plan. It reads the arguments of the collectives that torch executes, so that those of FSDP, DTensor and
users are counted as well, inside of opaque ops, too. Code that moves bytes by other means (copies into memory of a peer) calls
`copies`.

Bytes are those that this rank sends to others, R ranks, n elements of s bytes, as the least traffic of each kind:

    all_gather       (R-1) n s                the shard goes to every other rank
    reduce_scatter   n s - n s / R            n: the whole tensor; a part goes to each other rank
    all_to_all       n s - own part
    all_reduce       2 (R-1) ceil(n/R) s      a reduce-scatter and an all-gather of equal parts
    broadcast        (R-1) n s on the root, 0 elsewhere; scatter, gather and reduce alike
    send, copy       n s; recv and barriers 0

Callers say by `label` what a transfer belongs to (layer, direction, precision).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    "replicas"  # the layer of what ranks exchange to compare replicas and what they do; no plan predicts these bytes
)
DIRECTIONS = ("fprop", "dgrad", "wgrad", "weights", "grads", "amax", "other")


class Label(NamedTuple):
    """What a transfer belongs to. `direction`: one of DIRECTIONS, "" for none; `precision`: "" for the dtype that is sent."""

    layer: str = ""
    direction: str = ""
    precision: str = ""


class Key(NamedTuple):
    """What bytes are counted by. `group`: one of `dlp.comm.mesh.GROUPS`."""

    group: str
    kind: str
    precision: str
    layer: str
    direction: str


_NOBODY = Label()
_LABEL: ContextVar[Label] = ContextVar("dlp_observer_label", default=_NOBODY)


class _Unwatched:
    """A `nullcontext` whose two methods are C functions: every transfer enters it where no observer counts."""

    __enter__ = __exit__ = "".format  # a false value, whatever it is given


_UNWATCHED: Any = _Unwatched()


# how many dispatch modes, of which one may be an observer, are active here
counting = torch._C._len_torch_dispatch_stack


def label(**fields: str) -> AbstractContextManager[None]:
    """A context whose transfers belong to this layer, direction or precision; fields that are not passed keep their value.
    Costs next to nothing where no observer counts."""
    return _labelled(fields) if counting() else _UNWATCHED


@contextmanager
def _labelled(fields: dict[str, str]) -> Iterator[None]:
    token = _LABEL.set(_LABEL.get()._replace(**fields))
    try:
        yield
    finally:
        _LABEL.reset(token)


def default_precision(dtype: torch.dtype) -> AbstractContextManager[None]:
    """A context in which transfers of bytes count as this dtype, unless their label has a precision."""
    return label(precision=_LABEL.get().precision or dtype_name(dtype)) if counting() else _UNWATCHED


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def gathered(nbytes: int, ranks: int) -> int:
    """The bytes that a rank sends so that all ranks get its `nbytes`."""
    return (ranks - 1) * nbytes


def scattered(nbytes: int, ranks: int) -> int:
    """The bytes that a rank sends of `nbytes` of which each rank gets an equal part."""
    return nbytes - nbytes // ranks


def reduced(numel: int, itemsize: int, ranks: int) -> int:
    """The bytes that a rank sends in an all-reduce: a part to each other rank, and the sum of its own part to each other
    rank."""
    return 2 * (ranks - 1) * -(-numel // ranks) * itemsize


class _At(NamedTuple):
    """One call of a collective: the size of its group, this rank's place in it, its arguments by name."""

    ranks: int
    rank: int
    arguments: Mapping[str, Any]

    def root(self) -> bool:
        return bool(self.arguments.get("root_rank", self.arguments.get("src")) == self.rank)

    def own_part(self, whole: Tensor) -> int:
        """The bytes of an all-to-all's input that stay on this rank."""
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
# op -> (kind, the argument that is sent); a kind with [] gets a list of parts per result, one for each rank
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
_SILENT = {  # ops of these namespaces that send nothing a rank's peers must wait for bytes of
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
    """Count a copy of `source` into the memory of one peer of `group`, which is no collective."""
    if counting():  # somebody may be counting
        torch.ops.dlp.copies(source, group.group_name)


def agrees(numbers: int, group: ProcessGroup) -> None:
    """Count a maximum of this many fp32 numbers over `group` that is no collective, as an all-reduce of them."""
    if counting():
        torch.ops.dlp.agrees(torch.empty(numbers, device="meta"), group.group_name)


class Observer(TorchDispatchMode):
    """A context that counts `sent` bytes and `launches` of collectives, by Key.

    names        ranks of a group -> its name, see `ParallelDims.group_names`
    unlabelled   (group, kind) -> the direction of transfers without a label, such as FSDP's

    Compiled code that exists runs as it is; what would be compiled inside runs eagerly. RuntimeError for a collective that it
    cannot count.
    """

    def __init__(
        self, names: Mapping[tuple[int, ...], str], unlabelled: Mapping[tuple[str, str], str] | None = None
    ) -> None:
        super().__init__()
        self.names, self.unlabelled = names, unlabelled or {}
        self.sent: Counter[Key] = Counter()
        self.launches: Counter[Key] = Counter()

    def __enter__(self) -> Observer:
        self._stance = torch.compiler.set_stance("eager_on_recompile")
        self._stance.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stance.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = func._schema.name
        if name in _OPS:
            self._count(func, args, kwargs or {})
        elif func.namespace in _NAMESPACES and name not in _SILENT:
            raise RuntimeError(f"the observer cannot count {name}: add it to dlp/comm/observer.py")
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
        direction = said.direction or self.unlabelled.get((group, kind_name), "other")
        for dtype, nbytes in _sent(kind, arguments[source], at):
            key = Key(group, kind_name, said.precision or dtype_name(dtype), said.layer, direction)
            self.sent[key] += nbytes
        self.launches[Key(group, kind_name, "", said.layer, direction)] += 1

    def replayed(self, captured: Observer, times: int) -> None:
        """Count `times` replays of a CUDA graph whose capture `captured` counted; a replay does not reach the dispatcher."""
        for mine, its in ((self.sent, captured.sent), (self.launches, captured.launches)):
            for key, count in its.items():
                mine[key] += count * times


def _sent(kind: str, source: Any, at: _At) -> Iterator[tuple[torch.dtype, int]]:
    """(dtype, bytes) of each tensor that one call sends."""
    if kind.endswith("[]"):  # parts, one for each rank; in a scatter only the root has some
        lists = source if source and isinstance(source[0], list | tuple) else [source]
        others = (part for parts in lists for i, part in enumerate(parts) if i != at.rank)
        yield from ((part.dtype, part.nbytes) for part in others)
        return
    yield from ((t.dtype, _RULES[kind](t, at)) for t in tree_leaves(source) if isinstance(t, Tensor))


def _members(arguments: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """The global ranks of the group that a collective runs on, and this rank's place among them."""
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, torch.ScriptObject):
        group = ProcessGroup.unbox(group)
    elif isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]
    return tuple(dist.get_process_group_ranks(group)), group.rank()


@cache
def _is_opaque(func: Any) -> bool:
    """Whether an op runs Python below the dispatcher, as those of our and users' libraries do."""
    if func.namespace in ("aten", "prims", "prim"):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeExplicitAutograd")


def totals(counts: Mapping[Any, int], *fields: str) -> dict[Any, int]:
    """Counts summed by these fields of their keys: totals(seen.sent, "group", "direction")[("tp", "fprop")]."""
    sums: Counter[Any] = Counter()
    for key, count in counts.items():
        chosen = tuple(getattr(key, field) for field in fields)
        sums[chosen[0] if len(fields) == 1 else chosen] += count
    return dict(sums)


def merged(counts: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    """The sum of several counts."""
    total: Counter[Any] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
