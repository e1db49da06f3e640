"""Captured launches: the kernel launches of a function, recorded once, and replayed on other tensors by one native call.

    captured = record(run, given, fixed)     records `run()`, which reads the tensors `given`, without launching
    results = captured(given)                replays the launches; bitwise equal to `run()` on these tensors

A replay is valid if only addresses differ between two calls of the function. This holds if (1) the function only allocates,
takes views, launches kernels of dlp and makes calls by `launches.call`, and (2) the decisions of the function depend only on
shapes, strides, dtypes and alignment of `given`. `record` checks the first condition, and raises `NotPlain` for other
operations. The caller is responsible for the second condition. A replay allocates each result separately, and all intermediate
tensors in one allocation, in which tensors that are not in use at the same time share memory.

`CapturedPasses` captures the forward and the backward of an autograd function, separately for each key of the inputs:

    first call      runs the function, which builds GEMM plans, workspaces and tables
    second call     records the launches of the function, and replays them
    further calls   replay the launches

Calls between launches (`launches.call`), such as collectives of NCCL, are repeated in every replay. Consecutive launches
with no such call between them are one native call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlp.kernels import gemms, loader
from dlp.kernels.launches import (
    ANSWER,
    AWAIT,
    CALL,
    CURRENT,
    GEMM,
    MARK,
    Call,
    Launched,
    NotPlain,
    recording,
    stream_of,
)
from dlp.kernels.ranges import named_range
from dlp.kernels.table import runs_kernels

ALIGNMENT = 512  # alignment of torch's allocations on CUDA, in bytes
_NEW = {"aten::empty.memory_format", "aten::empty_strided", "aten::new_empty", "aten::empty_like"}
# Functions (shape, strides, dtype) -> new tensor on the current device, by device type. Like compiled code of torch, they
# bypass the dispatcher.
_EMPTY = {kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")}
PASSES = FORWARD, BACKWARD = "forward", "backward"
LIMIT = 64  # maximum number of keys in one `CapturedPasses`; kernels for further keys are launched one by one
# Reasons why a pass is not captured, for plans and logs
SEEN = "waits for a second call with inputs of these shapes"
SHARED = "inputs share memory"
VARIES = f"more than {LIMIT} combinations of shapes, strides and alignments"
Run = Callable[[], list[Tensor]]
RunForward = Callable[[], tuple[list[Tensor], list[Tensor]]]
Key = tuple[Any, ...]
_FIXED = -1
Make = Callable[[], Tensor]
Range = tuple[int, int]  # address, and size in bytes
# Memory that a recording used: address; size in bytes; index of the tensor that replaces the memory in a replay (_FIXED: the
# memory is the same in every replay); offset of the memory in this tensor, in bytes.
Memory = tuple[int, int, int, int]
Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


class _Watch(TorchDispatchMode):
    """Dispatch mode of a recording, which raises `NotPlain` for an operation of torch that is neither an allocation nor a view.

    allocated   the allocated tensors; they stay alive, so that all of them have different addresses

    Operations that return either their argument or a copy, such as `to`, are declared as views by torch. Their results are
    therefore checked: a replay would not repeat the copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.name() not in _NEW:
            raise NotPlain(f"runs {func.name()}")
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.allocated.append(result)
        elif not all(_shares(args[0], each) for each in ([result] if isinstance(result, Tensor) else result)):
            raise NotPlain(f"copies by {func.name()}")
        return result


class CapturedLaunches:
    """Recorded launches of a function, which a call replays on other tensors.

    between    size in bytes of the allocation of all intermediate tensors
    segments   string with one letter for each segment: "L" for launches in one native call, "C" for the start of a call
               between launches, "A" for the wait for the end of this call
    """

    def __init__(self, launched: Launched, given: Sequence[Tensor], fixed: Sequence[Range], returned: Sequence[Tensor],
                 allocated: Sequence[Tensor]) -> None:  # fmt: skip
        # A result is a view of a tensor in `given`, or a new allocation. A replay takes the same view, or allocates again.
        wholes = {whole.data_ptr(): whole for whole in allocated}
        views = [None if result.data_ptr() in wholes else _view(result, given) for result in returned]
        results = [result for result, view in zip(returned, views, strict=True) if view is None]
        self._views = [(i, view) for i, view in enumerate(views) if view is not None]
        outs = [_whole(result, wholes) for result in results]
        between = [whole for whole in allocated if all(whole is not out for out in outs)]
        offsets, self.between = _share(between, launched)
        self._make = [_maker(result, whole) for result, whole in zip(results, outs, strict=True)]
        device = given[0].device
        if self.between:
            self._make.append(partial(_EMPTY[device.type], (self.between,), (1,), torch.uint8))
        self._count, self._multiplies = len(results), any(name == GEMM for name, _, _ in launched)
        # The tensors of a replay, by index: `given`, the allocated results, at index `arena` the allocation of all intermediate
        # tensors, at index `space` the workspace of GEMMs.
        arena, space = len(given) + len(outs), len(given) + len(self._make)
        memory = [(*_span(tensor), base, 0) for base, tensor in enumerate([*given, *outs])]
        memory += [(*_span(whole), arena, offset) for whole, offset in zip(between, offsets, strict=True)]
        memory += [(*span, _FIXED, 0) for span in fixed]
        if self._multiplies:
            memory.append((gemms.workspace(given[0].get_device(), stream_of(given[0])), gemms.WORKSPACE, space, 0))
            memory += [(*_span(constant), _FIXED, 0) for constant in gemms.constants(device)]
        count = space + self._multiplies
        try:
            segments = [*_segments(launched, memory, count)]
        except ValueError as error:
            raise NotPlain(str(error)) from None
        self.segments = "".join(letter for letter, _ in segments)
        self._steps: list[Any] = [step for _, step in segments]
        self._launch: Any = self._steps[0] if self.segments == "L" else None

    def __call__(self, given: Sequence[Tensor], addresses: Sequence[int] = ()) -> list[Tensor]:
        """Replay the launches on tensors of the recorded shapes, strides, dtypes and alignment; return the results.

        addresses   `data_ptr()` of each tensor in `given`; (): this call computes the addresses"""
        stream = stream_of(given[0])  # all tensors are on the current device
        allocated = [make() for make in self._make]
        bases = [*addresses] if addresses else [tensor.data_ptr() for tensor in given]
        bases += [tensor.data_ptr() for tensor in allocated]
        if self._multiplies:
            bases.append(gemms.workspace(given[0].get_device(), stream))
        if self._launch is not None:
            self._launch(bases, stream)
        else:
            self._run_all(bases, stream, [*given, *allocated])
        results = allocated[: self._count]
        for i, view in self._views:
            results.insert(i, view(given))
        return results

    def _run_all(self, bases: Sequence[int], stream: int, tensors: Sequence[Tensor]) -> None:
        works = dict[Call, list[Any]]()
        for letter, step in zip(self.segments, self._steps, strict=True):
            if letter == "L":
                step(bases, stream)
            elif letter == "C":
                call, places = step
                works[call] = call.start(*[_at(tensors[base], offset, kind) for base, offset, kind in places])
            else:
                for work in works[step]:
                    work.wait()


def _segments(launched: Launched, memory: Sequence[Memory], count: int) -> Iterator[tuple[str, Any]]:
    """Yield the segments of a recording as (letter, object).

    "L"   native function that runs consecutive launches
    "C"   a call between launches, and the positions of its tensors (`_place`)
    "A"   the call whose end is awaited

    count   number of tensors of a replay"""
    for are_calls, steps in groupby(launched, lambda step: step[0] in (CALL, ANSWER)):
        if not are_calls:
            yield "L", loader.load().Program(list(steps), memory, count).run
            continue
        for name, (call, *addresses), _ in steps:
            places = [_place(*each, memory) for each in zip(addresses, call.kinds, strict=True)]
            yield ("C", (call, places)) if name == CALL else ("A", call)


def _place(address: int, kind: Kind, memory: Sequence[Memory]) -> tuple[int, int, Kind]:
    """Return the position of an argument of a call in a replay: index of a tensor of the replay, offset from the first element
    of this tensor in bytes, and shape, strides and dtype of the argument. Raises NotPlain for fixed memory and for memory that
    the recording does not know."""
    for start, size, base, offset in memory:
        if start <= address < start + size and base != _FIXED:
            return base, address - start + offset, kind
    raise NotPlain("sends from memory that the recording does not know")


def _at(tensor: Tensor, offset: int, kind: Kind) -> Tensor:
    """Return a tensor of this kind in the memory of `tensor`, `offset` bytes after its first element."""
    shape, stride, dtype = kind
    first = (tensor.storage_offset() * tensor.itemsize + offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), first, shape, stride)


def record(run: Callable[[], Sequence[Tensor]], given: Sequence[Tensor], fixed: Sequence[Tensor]) -> CapturedLaunches:
    """Record the launches of `run`, without launching. `run` returns tensors that it allocated, or views of `given`.

    given     the tensors that `run` reads, which must be `disjoint`
    fixed     further tensors that kernels read or write; their addresses must not change as long as the returned object is used

    Raises NotPlain if `run` cannot be recorded.
    """
    with recording() as launched, _Watch() as watch:
        results = run()
    return CapturedLaunches(launched, given, [_span(t) for t in fixed], results, watch.allocated)


class CapturedPasses:
    """Captured launches of the forward and backward of a layer or of an `ops.Sequential`.

    A key is a tuple of the pass (FORWARD or BACKWARD) and all properties of the inputs that the launches depend on, except
    addresses.

    obstacle   function that returns the reason why the current call may not use captured launches; "": no reason
    memory     function that returns the tensors besides the inputs that launches read or write; their addresses must not change
    why        pass -> reason why the pass is never captured; "": it can be captured
    possible   pass -> whether the pass can be captured
    found      key -> captured launches, or the reason why there are none (SEEN after the first call)
    skipped    pass -> reason of the last call that could not use captured launches: the result of `obstacle`, VARIES or SHARED
    """

    def __init__(
        self,
        name: str,
        why: Mapping[str, str],
        x: Tensor,
        obstacle: Callable[[], str],
        memory: Callable[[], list[Tensor]],
    ) -> None:
        missing = "" if runs_kernels(x) else f"no kernels run on {x.device.type}"
        self.name, self.obstacle, self.memory = name, obstacle, memory
        self.why = {pass_name: missing or said for pass_name, said in why.items()}
        self.possible = {pass_name: not why for pass_name, why in self.why.items()}
        self.ranges = {pass_name: named_range(f"{name}.{pass_name}") for pass_name in PASSES}
        self.found: dict[Key, CapturedLaunches | str] = {}
        self.skipped: dict[str, str] = {}

    def forward(
        self, key: Key, run: RunForward, reads: Sequence[Tensor], count: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run a forward, by `run` or by captured launches. Return the results (`count` tensors) and the saved tensors.

        key     key of the inputs, without the pass
        run     function that runs the forward, and returns results and saved tensors
        reads   tensors that the launches read"""

        def flat() -> list[Tensor]:
            ys, kept = run()
            return [*ys, *kept]

        results = self.run((FORWARD, *key), reads, flat)
        return results[:count], results[count:]

    def backward(self, key: Key, run: Run, reads: Sequence[Tensor]) -> list[Tensor]:
        """Run a backward, by `run` or by captured launches, and return the results. `key`, `reads`: as in `forward`."""
        return self.run((BACKWARD, *key), reads, run)

    def run(self, key: Key, given: Sequence[Tensor], run: Run) -> list[Tensor]:
        """Call `run`, which reads `given`, or replay its captured launches. `key`: a pass and the key of the inputs."""
        pass_name, why = key[0], self.obstacle()
        if why:
            return self._launched(pass_name, why, run)
        found = self.found.get(key)
        if isinstance(found, CapturedLaunches):  # a third call, or a later one
            with self.ranges[pass_name]:
                return found(given)
        if not self.possible[pass_name]:
            return run()
        if found is None and len(self.found) >= LIMIT:
            return self._launched(pass_name, VARIES, run)
        if found is None:  # the first call
            self.found[key] = SEEN
        if found is not SEEN:  # the first call, or `found` is the reason why recording failed
            return run()
        if not disjoint(given):  # the second call
            return self._launched(pass_name, SHARED, run)
        try:
            launches = record(run, given, self.memory())
        except NotPlain as why:
            self.found[key] = str(why)
            return run()
        self.found[key] = launches
        return launches(given)

    def _launched(self, pass_name: str, why: str, run: Run) -> list[Tensor]:
        self.skipped[pass_name] = why
        return run()

    def states(self, pass_name: str) -> Iterator[str]:
        """Yield, for each key of this pass, the reason why the key is not captured, or "" if the key is captured. Also yield
        the reasons in `why` and `skipped` for the pass."""
        if self.why.get(pass_name):
            yield self.why[pass_name]
        for key, launches in self.found.items():
            if key[0] == pass_name:
                yield launches if isinstance(launches, str) else ""
        if pass_name in self.skipped:
            yield self.skipped[pass_name]


def disjoint(tensors: Sequence[Tensor]) -> bool:
    """Return whether no two of these tensors share memory, so that an address belongs to at most one tensor."""
    spans = sorted(map(_span, tensors))
    return all(at + size <= after for (at, size), (after, _) in zip(spans, spans[1:], strict=False))


def _shares(tensor: Tensor, view: Tensor) -> bool:
    """Return whether two tensors share a storage."""
    return bool(torch._C._is_alias_of(tensor, view))  # type: ignore[attr-defined]


def _span(tensor: Tensor) -> Range:
    """Return the address of the first element of a tensor, and the number of bytes up to the end of the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.itemsize if tensor.numel() else 0


def _whole(result: Tensor, wholes: dict[int, Tensor]) -> Tensor:
    """Return the allocation that starts at the address of a result, and remove it from `wholes` (address -> allocation). Raises
    NotPlain if another result used this allocation, or if the dtype differs."""
    whole = wholes.pop(result.data_ptr(), None)
    if whole is None or whole.dtype != result.dtype:
        raise NotPlain("returns two results that share memory")
    return whole


def _view(result: Tensor, given: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a function that takes the view `result` again from the tensors of a replay. Raises NotPlain if `result` is not a
    view of a tensor in `given`."""
    at, _ = _span(result)
    for i, tensor in enumerate(given):
        start, size = _span(tensor)
        offset, rest = divmod(at - start, tensor.itemsize)
        if 0 <= at - start < size and result.dtype == tensor.dtype and not rest:
            shape, stride = tuple(result.shape), result.stride()
            return lambda new: new[i].as_strided(shape, stride, new[i].storage_offset() + offset)
    raise NotPlain("returns a tensor from outside of the recording")


def _maker(result: Tensor, whole: Tensor) -> Make:
    """Return a function that allocates a tensor with shape, strides and dtype of `result`, in an allocation of the size of
    `whole`."""
    empty, shape, stride, dtype = _EMPTY[result.device.type], tuple(result.shape), result.stride(), result.dtype
    if _span(result) == _span(whole):
        return partial(empty, shape, stride, dtype)
    size = whole.numel()
    return lambda: empty((size,), (1,), dtype).as_strided(shape, stride)


def _share(tensors: Sequence[Tensor], launched: Launched) -> tuple[list[int], int]:
    """Return the offset in bytes of each intermediate tensor in one allocation, and the size of the allocation in bytes.

    Tensors that are in use at the same time do not overlap. A tensor is in use from the first to the last step at which a
    launch with an address of the tensor may run (`_windows`)."""
    windows = _windows(launched)
    uses = [
        [
            window
            for (_, arguments, _), window in zip(launched, windows, strict=True)
            if _mentions(arguments, _span(tensor))
        ]
        for tensor in tensors
    ]
    placed: list[tuple[int, int, int, int]] = []  # first and last step in use; begin and end in bytes
    offsets, size = [], 0
    for tensor, steps in zip(tensors, uses, strict=True):
        first, last = (min(steps)[0], max(end for _, end in steps)) if steps else (0, -1)
        need = -(-tensor.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT if steps else 0
        taken = sorted((begin, end) for a, b, begin, end in placed if a <= last and first <= b)
        at = 0
        for begin, end in taken:
            if begin - at >= need:
                break
            at = max(at, end)
        placed.append((first, last, at, at + need))
        offsets.append(at)
        size = max(size, at + need)
    return offsets, size


def _windows(launched: Launched) -> list[tuple[int, int]]:
    """Return, for each launch, the first and the last step of the recording at which its kernel may run.

    On the current stream, both are the step of the launch. On a side stream, the first is the step that recorded the event for
    which the side stream last waited; the last is the step at which the current stream waits for the next event that the side
    stream records after the launch, or the end of the recording if there is no such wait.
    """
    windows = [(step, step) for step in range(len(launched))]
    for lane in {lane for _, _, lane in launched} - {CURRENT}:
        begun = 0
        for step, (name, arguments, where) in enumerate(launched):
            if where != lane:
                continue
            if name == AWAIT:
                begun = _last(launched, step, (MARK, arguments, CURRENT))
            ends = (i for i, each in enumerate(launched) if each[0] == MARK and each[2] == lane and i >= step)
            event = next((launched[i][1] for i in ends), None)
            awaited = (i for i, each in enumerate(launched) if i > step and each == (AWAIT, event, CURRENT))
            windows[step] = (begun, next(awaited, len(launched)))
    return windows


def _last(launched: Launched, step: int, wanted: tuple[str, tuple[Any, ...], int]) -> int:
    """Return the last step before `step` that equals `wanted`; 0 if there is none."""
    return max((i for i in range(step) if launched[i] == wanted), default=0)


def _mentions(arguments: Any, span: Range) -> bool:
    """Return whether one of these arguments, which may be nested tuples, is an address in `span`."""
    if isinstance(arguments, tuple):
        return any(_mentions(argument, span) for argument in arguments)
    return isinstance(arguments, int) and span[0] <= arguments < span[0] + span[1]
