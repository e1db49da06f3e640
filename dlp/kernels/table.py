"""The kernel table: the one truth about which kernel runs what, on which device, and what a plan calls it.

    entry      a `KernelEntry`: one kernel of one operation, in plain data what it supports, and the functions that launch it
    device     one of DEVICES: "cpu", "cuda" (a GPU on which this package's kernels cannot be built), "sm_90", "sm_100"
    look-up    the entries of an operation on a device, the one registered last asked first; the first that supports a call runs

An operation is a function of `dlp.kernels.ops`. Its reference, in plain torch, is an entry on every device, which the decorator
`operation` makes; `kernel` adds the others. GEMMs are one operation whose entries say which pairs of operands they multiply
(`GemmEntry`): `gemm_kernels` finds those of a pair once, and what it binds runs without asking the table again.

A kernel from outside is registered in the same way (`register`), for a stock operation or format or for one of its own:

    register(GemmEntry("int6 mm", int6_gemm, formats=(("int6", "int6"),), devices=("cpu",)))

Nothing here knows a format: what operands are is a string and plain sizes (`OperandLayout`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from dlp.kernels import loader
from dlp.kernels.launches import NotPlain, is_recording

DEVICES = ("cpu", "cuda", "sm_90", "sm_100")
NATIVE = ("sm_90", "sm_100")  # where the kernels of this package run
REFERENCE = "reference"  # the printed name of plain torch
GEMM = "gemm"  # the operation of all GEMMs
Function = TypeVar("Function", bound=Callable[..., Any])


# Devices


def device_kind(device_type: str) -> str:
    """What a device is to kernels: one of DEVICES for "cuda", the current one, and "cpu"; other names stand for themselves."""
    if device_type != "cuda" or loader.missing():
        return device_type
    return _native(torch.cuda.get_device_capability())


def _native(capability: tuple[int, int]) -> str:
    return "sm_100" if capability >= (10, 0) else "sm_90"


class _Devices(dict[int, str]):
    """Index of a device, -1 for the CPU -> one of DEVICES; asked of the driver once."""

    def __missing__(self, index: int) -> str:
        if index < 0:
            kind = "cpu"
        else:
            kind = "cuda" if loader.missing() else _native(torch.cuda.get_device_capability(index))
        self[index] = kind
        return kind


DEVICE_AT = _Devices()


def runs_kernels(x: Tensor) -> bool:
    """Whether the kernels of this package run where x lies."""
    return DEVICE_AT[x.get_device()] in NATIVE


def device_of(x: Tensor) -> str:
    """The one of DEVICES that x lies on."""
    return DEVICE_AT[x.get_device()]


def kind_of(device: torch.device) -> str:
    """The same of a device of torch."""
    if device.type != "cuda":
        return DEVICE_AT[-1]
    return DEVICE_AT[torch.cuda.current_device() if device.index is None else device.index]


# Entries


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelEntry:
    """One kernel of one operation.

    operation  the function of `dlp.kernels.ops`, by name
    name       as plans print it
    run        launches it: takes what the operation takes
    devices    where it runs, of DEVICES
    reads      the dtypes of the matrix [rows, cols] that its first argument must be; () for any tensor
    takes      further asked, with the arguments of a call, whether it takes that; None for all
    prepare    makes something to launch later, where there is something to prepare: of casts those of many matrices in one
               launch, of GEMMs the launch for two layouts; None where there is not
    lazy       it makes a `LazyMatrix` on its way
    captured   all that it launches goes through `dlp.kernels.launches` or torch, so that it may be captured. A layer
               whose kernels are not runs as it is written, function by function
    """

    operation: str
    name: str
    run: Callable[..., Any]
    devices: tuple[str, ...] = DEVICES
    reads: tuple[torch.dtype, ...] = ()
    takes: Callable[..., bool] | None = None
    prepare: Callable[..., Any] | None = None
    lazy: bool = False
    captured: bool = False


class OperandLayout(Protocol):
    """What the table is told of an operand of a GEMM. `gemm_kind`: what its parts are, by a name; `block`: the elements that
    share a scale along (rows, contraction), 0 for all; `bf16_exact`: its decoded values are exact in bf16; `factors`: what is
    left to multiply by values that are, a scale of the "tensor" or of each "row", "" nothing; None where there are none."""

    @property
    def gemm_kind(self) -> str: ...
    @property
    def block(self) -> tuple[int, int]: ...
    @property
    def bf16_exact(self) -> bool: ...
    @property
    def factors(self) -> str | None: ...


class GemmLaunchOptions(NamedTuple):
    """How a GEMM runs. `fast_accumulation`: FP8 products are summed in the tensor core only; of others it says nothing.
    `tuned`: by the measured choice, if there is one. `allow_reference`: by the plain-torch reference on a GPU, where nothing
    else can. `sms`: on so many multiprocessors, 0 for all. `out`: the result may be written there. `alpha`: the sums are
    multiplied by it. `rounds`: a product may be rounded to bf16 before it is added to a bf16 accumulator."""

    fast_accumulation: bool = False
    tuned: bool = True
    allow_reference: bool = False
    sms: int = 0
    out: Tensor | None = None
    alpha: float = 1.0
    rounds: bool = False


DEFAULT_OPTIONS = GemmLaunchOptions()


class Arriving(NamedTuple):
    """Rows of A that other ranks send while a GEMM runs, as many of each rank: what csrc/kernels.h calls `ArrivingRows`, and
    whose wait it is (`Waiting`)."""

    rows: tuple[int, ...]
    waiting: tuple[int, ...]


WhileArriving = Callable[[Arriving], Tensor]  # runs a GEMM on them


class GemmLaunch(Protocol):
    """D = A @ B.T, the contraction last in both operands, whose parts are `a` and `b`: in `out_dtype`, plus bias [cols], which
    is added in fp32; or added to `accumulate` [rows, cols], which is returned."""

    def __call__(
        self, a: Sequence[Tensor], b: Sequence[Tensor], out_dtype: torch.dtype, bias: Tensor | None,
        accumulate: Tensor | None, options: GemmLaunchOptions, /,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class GemmEntry(KernelEntry):
    """A kernel of the operation "gemm"; `run` is a `GemmLaunch`, or `prepare(a, b)` makes one for two `OperandLayout`s, where
    it depends on them. `takes` is asked with the arguments of a launch.

    formats    the pairs of `gemm_kind` of A and B that it multiplies; () for any pair that no other entry names
    layouts    further asked, with the layouts of such a pair, whether it multiplies that; None for all
    status     "native" by a unit that the device has for the formats, "emulated" on decoded values or by plain torch,
               "own" where somebody brought it
    when       what `takes` asks for, in a word: it stands beside the name
    arriving   makes what runs it while rows of A arrive: takes the layouts, the rows of each rank and the arguments of a
               launch, for A as it will be; it returns None for rows that it does not wait for. None where it waits for none
    cublaslt   what cuBLASLt multiplies inside it, for `dlp.kernels.tune`: "values", "codes" with their scales, "sums" of
               codes without scales in fp32, or "tiles", codes and scales of a block-scaled unit; "" for nothing
    """

    operation: str = field(default=GEMM, init=False)
    run: Callable[..., Any] = field(default=None)  # type: ignore[assignment]  # where there is `prepare`
    formats: tuple[tuple[str, str], ...] = ()
    layouts: Callable[[OperandLayout, OperandLayout], bool] | None = None
    status: str = "own"
    when: str = ""
    arriving: Callable[..., WhileArriving | None] | None = None
    cublaslt: str = ""

    def supports(self, a: OperandLayout, b: OperandLayout) -> bool:
        """Whether it multiplies such a pair, on its devices."""
        named = not self.formats or (a.gemm_kind, b.gemm_kind) in self.formats
        return named and (self.layouts is None or self.layouts(a, b))

    def launch(self, a: OperandLayout, b: OperandLayout) -> GemmLaunch:
        """What runs it on operands of these layouts."""
        run = self.run if self.prepare is None else self.prepare(a, b)
        return run if self.captured else _never_recorded(self.name, run)


_ENTRIES: dict[str, list[KernelEntry]] = {}
_ON: dict[
    str, dict[str, tuple[KernelEntry, ...]]
] = {}  # operation -> device -> its entries in the order they are asked
_REMEMBERED: list[Callable[[], None]] = []  # what forgets answers that were read off the table


def remembered(function: Function) -> Function:
    """`functools.cache` of a function that reads the table: a registration forgets its answers."""
    cached = functools.cache(function)
    _REMEMBERED.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


def register(entry: KernelEntry) -> KernelEntry:
    """Puts a kernel in front of those that are there; register before layers run, since what they have captured stays.

    Raises ValueError for devices that there are not, for a name with a comma, and where its operation has a kernel of this
    name on one of its devices that takes the same pairs.
    """
    _check(entry)
    if not entry.captured and not isinstance(entry, GemmEntry):
        entry = replace(entry, run=_never_recorded(entry.name, entry.run))
    _ENTRIES.setdefault(entry.operation, []).append(entry)
    _changed(entry.operation)
    return entry


@contextmanager
def registered(entry: KernelEntry) -> Iterator[None]:
    """Inside, the kernel is registered."""
    entry = register(entry)
    try:
        yield
    finally:
        _ENTRIES[entry.operation].remove(entry)
        _changed(entry.operation)


def _check(entry: KernelEntry) -> None:
    if unknown := [device for device in entry.devices if device not in DEVICES]:
        raise ValueError(f"kernel {entry.name!r}: there is no device {unknown[0]!r}; name some of {', '.join(DEVICES)}")
    if "," in entry.name:
        raise ValueError(f"kernel {entry.name!r}: plans join names by commas; give it a name without one")
    for other in _ENTRIES.get(entry.operation, ()):
        shared = sorted(set(other.devices) & set(entry.devices))
        if other.name == entry.name and shared and _pairs(other) & _pairs(entry):
            raise ValueError(
                f"{entry.operation} has a kernel {entry.name!r} on {', '.join(shared)} already: give this one another name"
            )


def _pairs(entry: KernelEntry) -> set[tuple[str, str]]:
    return set(entry.formats or [("", "")]) if isinstance(entry, GemmEntry) else {("", "")}


def _never_recorded(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that cannot be captured, since it launches by itself."""

    @functools.wraps(run)
    def outside(*arguments: Any, **options: Any) -> Any:
        if is_recording():
            raise NotPlain(f"runs {name}, which is not captured")
        return run(*arguments, **options)

    return outside


def _changed(operation: str) -> None:
    chains, entries = _ON.setdefault(operation, {}), _ENTRIES[operation]
    for device in DEVICES:
        chains[device] = tuple(entry for entry in reversed(entries) if device in entry.devices)
    for forget in _REMEMBERED:
        forget()


# Operations


def operation(reference: Function) -> Function:
    """Makes a function, in plain torch, the reference of the operation of its name, and returns the operation: what runs the
    first entry that takes a call. Its first argument lies where that is looked up. ValueError for a name that is taken."""
    name = reference.__name__
    entry = KernelEntry(operation=name, name=REFERENCE, run=reference, captured=True)
    _check(entry)
    _ENTRIES.setdefault(name, []).insert(0, entry)
    _changed(name)
    on = _ON[name]

    @functools.wraps(reference)
    def launch(x: Any, *arguments: Any, **options: Any) -> Any:
        for entry in on[DEVICE_AT[x.get_device()]]:
            reads, takes = entry.reads, entry.takes
            if reads and (x.dtype not in reads or x.dim() != 2):
                continue
            if takes is None or takes(x, *arguments, **options):
                return entry.run(x, *arguments, **options)

    return launch  # type: ignore[return-value]


def kernel(operation: str, **what: Any) -> Callable[[Function], Function]:
    """Decorates a kernel of this package: an entry, on GPUs for which it is compiled."""

    def enter(run: Function) -> Function:
        settings: dict[str, Any] = {"name": "kernel", "devices": NATIVE, "captured": True} | what
        register(KernelEntry(operation=operation, run=run, **settings))
        return run

    return enter


def choose(operation: str, x: Any, *arguments: Any, **options: Any) -> KernelEntry:
    """The entry that runs an operation called with these arguments."""
    for entry in _ON[operation][DEVICE_AT[x.get_device()]]:
        if entry.reads and (x.dtype not in entry.reads or x.dim() != 2):
            continue
        if entry.takes is None or entry.takes(x, *arguments, **options):
            return entry
    raise AssertionError(f"{operation} has no reference")


def preparing(operation: str, x: Any, *arguments: Any, **options: Any) -> Callable[..., Any]:
    """The `prepare` of that entry. ValueError where it has none."""
    entry = choose(operation, x, *arguments, **options)
    if entry.prepare is None:
        raise ValueError(
            f"{operation} by {entry.name} prepares nothing for {x.dtype} on {x.device}: cast matrix by matrix"
        )
    return entry.prepare


def entries(operation: str, device: str) -> tuple[KernelEntry, ...]:
    """The kernels of an operation on one of DEVICES, in the order in which they are asked; none of one that there is not."""
    return _ON.get(operation, {}).get(device, ())


def cast_kernel(operation: str, device_type: str) -> str:
    """What runs a cast on a device, "cpu" or "cuda", as plans print it: the name of its kernel for matrices in bf16 or fp32,
    or "reference", with what is missing where kernels cannot be built. On CUDA this builds them, once a machine."""
    missing = loader.missing() if device_type == "cuda" else ""
    found = entries(operation, device_kind(device_type))
    name = found[0].name if found else REFERENCE
    return f"{name} ({missing})" if name == REFERENCE and missing else name


# GEMMs


@dataclass(frozen=True)
class GemmKernels:
    """What multiplies a pair of operands on a device: entries in the order in which they are asked, the last of which takes
    whatever the others do not."""

    entries: tuple[GemmEntry, ...]

    @property
    def status(self) -> str:
        return self.entries[-1].status

    @property
    def kernel(self) -> str:
        """The printed name: the last entry's, and when others run."""
        others = [f"{entry.when}: {entry.name}" for entry in self.entries[:-1]]
        return ", ".join([self.entries[-1].name, *others])

    def bind(self, a: OperandLayout, b: OperandLayout) -> GemmLaunch:
        """What multiplies operands of these layouts."""
        *some, (_, otherwise) = ((each.takes, each.launch(a, b)) for each in self.entries)
        if not some:
            return otherwise

        def launch(*problem: Any) -> Tensor:
            for takes, run in some:
                if takes is None or takes(*problem):
                    return run(*problem)
            return otherwise(*problem)

        return launch


def gemm_kernels(a: OperandLayout, b: OperandLayout, device: str) -> GemmKernels:
    """What multiplies operands of these layouts on one of DEVICES: the entries that name the pair, then those for any, down to
    the first that takes every problem. ValueError where nothing does."""
    found = [each for each in entries(GEMM, device) if isinstance(each, GemmEntry) and each.supports(a, b)]
    found.sort(key=lambda entry: not entry.formats)
    for count, entry in enumerate(found, 1):
        if entry.takes is None:
            return GemmKernels(tuple(found[:count]))
    raise ValueError(
        f"no kernel multiplies {a.gemm_kind} by {b.gemm_kind} on {device}: register one (dlp.kernels.table)"
    )
