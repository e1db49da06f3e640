"""The kernel table: which kernel runs an operation on a device, and the name that plans print for it.

    entry      a `KernelEntry`: one kernel of one operation: what it supports, as plain data, and the functions that launch it
    device     one of DEVICES: "cpu", "cuda" (a GPU on which this package's kernels cannot be built), "sm_90", "sm_100"
    look-up    the entries of an operation on a device, the last registered first; the first that supports a call runs

An operation is a function of `dlp.kernels.ops`. The decorator `operation` makes it from its reference, in plain torch, which is
its entry on every device; `kernel` adds further entries. All GEMMs are one operation, whose entries (`GemmEntry`) say which
pairs of operands they multiply; `gemm_kernels` looks those of a pair up once, and returns a launch that does not look into the
table again.

A kernel from outside is registered in the same way (`register`), for an operation or a format of dlp, or of a user:

    register(GemmEntry(name="int6 mm", run=int6_gemm, formats=(("int6", "int6"),), devices=("cpu",)))

The table knows no format: an operand is described by a string and sizes (`OperandLayout`).
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
    """The one of DEVICES for "cuda", the current one, or "cpu"; any other name is returned as it is."""
    if device_type != "cuda" or loader.missing():
        return device_type
    return _native(torch.cuda.get_device_capability())


def _native(capability: tuple[int, int]) -> str:
    return "sm_100" if capability >= (10, 0) else "sm_90"


class _Devices(dict[int, str]):
    """Index of a device, -1 for the CPU -> one of DEVICES; the driver is asked once."""

    def __missing__(self, index: int) -> str:
        if index < 0:
            kind = "cpu"
        else:
            kind = "cuda" if loader.missing() else _native(torch.cuda.get_device_capability(index))
        self[index] = kind
        return kind


DEVICE_AT = _Devices()


def runs_kernels(x: Tensor) -> bool:
    """Whether the kernels of this package run on the device of x."""
    return DEVICE_AT[x.get_device()] in NATIVE


def device_of(x: Tensor) -> str:
    """The one of DEVICES that x is on."""
    return DEVICE_AT[x.get_device()]


def kind_of(device: torch.device) -> str:
    """The one of DEVICES of a torch device."""
    if device.type != "cuda":
        return DEVICE_AT[-1]
    return DEVICE_AT[torch.cuda.current_device() if device.index is None else device.index]


# Entries


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelEntry:
    """One kernel of one operation.

    operation  the name of the function in `dlp.kernels.ops`
    name       as plans print it
    run        launches it; takes the operation's arguments
    devices    where it runs, of DEVICES
    reads      dtypes of the first argument, a matrix [rows, cols]; () for any tensor
    takes      called with the arguments: whether it supports them; None: all
    prepare    prepares a later launch: for casts one of many matrices, for GEMMs one for two layouts; None: it prepares nothing
    lazy       it takes a `LazyMatrix`, whose elements it computes
    captured   all its launches go through `dlp.kernels.launches` or torch, so that they may be captured; a direction of a layer
               that runs another kernel is launched step by step
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
    """What the table knows of an operand of a GEMM.

    gemm_kind    a name for the meaning of its parts
    block        the elements that share a scale along (rows, contraction); 0: the whole dimension
    bf16_exact   decoded values are exact in bf16
    factors      decoded values are values exact in bf16 times a scale of the "tensor" or of each "row", or "", no scale; None:
                 they are not
    """

    @property
    def gemm_kind(self) -> str: ...
    @property
    def block(self) -> tuple[int, int]: ...
    @property
    def bf16_exact(self) -> bool: ...
    @property
    def factors(self) -> str | None: ...


class GemmLaunchOptions(NamedTuple):
    """How a GEMM runs.

    fast_accumulation   FP8 products are summed inside the tensor core only; without effect on other operands
    tuned               by the measured algorithm, if there is one
    allow_reference     by the plain-torch reference on a GPU, if nothing else supports it
    sms                 on this many multiprocessors; 0: all
    out                 where the result may be written
    alpha               multiplies the sums
    rounds              the product may be rounded to bf16 before it is added to a bf16 accumulator
    """

    fast_accumulation: bool = False
    tuned: bool = True
    allow_reference: bool = False
    sms: int = 0
    out: Tensor | None = None
    alpha: float = 1.0
    rounds: bool = False


DEFAULT_OPTIONS = GemmLaunchOptions()


class GemmLaunch(Protocol):
    """D = A @ B.T, contraction last, of the parts `a` and `b` of two operands: D in `out_dtype`, plus bias [cols], which is
    added in fp32; or added to `accumulate` [rows, cols], which is returned."""

    def __call__(
        self, a: Sequence[Tensor], b: Sequence[Tensor], out_dtype: torch.dtype, bias: Tensor | None,
        accumulate: Tensor | None, options: GemmLaunchOptions, /,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class GemmEntry(KernelEntry):
    """A kernel of the operation "gemm". `run` is a `GemmLaunch`; where that depends on the layouts, `prepare(a, b)` makes one
    for two `OperandLayout`s. `takes` is called with the arguments of a launch.

    formats    the pairs of `gemm_kind` of A and B that it multiplies; () for any pair that no other entry names
    layouts    called with the layouts of such a pair: whether it multiplies them; None: all
    status     "native": by the device's own unit for the formats; "emulated": on decoded values or by plain torch; "own": from
               outside of dlp
    when       what `takes` requires, in a word, printed with the name
    cublaslt   what cuBLASLt multiplies in it, for `dlp.kernels.tune`: "values", "codes" with their scales, "sums" of codes
               without scales in fp32, or "tiles", codes and scales of a block-scaled unit; "" for nothing
    """

    operation: str = field(default=GEMM, init=False)
    run: Callable[..., Any] = field(default=None)  # type: ignore[assignment]  # where there is `prepare`
    formats: tuple[tuple[str, str], ...] = ()
    layouts: Callable[[OperandLayout, OperandLayout], bool] | None = None
    status: str = "own"
    when: str = ""
    cublaslt: str = ""

    def supports(self, a: OperandLayout, b: OperandLayout) -> bool:
        """Whether it multiplies a pair of these layouts, on its devices."""
        named = not self.formats or (a.gemm_kind, b.gemm_kind) in self.formats
        return named and (self.layouts is None or self.layouts(a, b))

    def launch(self, a: OperandLayout, b: OperandLayout) -> GemmLaunch:
        """The launch for operands of these layouts."""
        run = self.run if self.prepare is None else self.prepare(a, b)
        return run if self.captured else _never_recorded(self.name, run)


_ENTRIES: dict[str, list[KernelEntry]] = {}
_ON: dict[
    str, dict[str, tuple[KernelEntry, ...]]
] = {}  # operation -> device -> its entries in the order they are asked
_REMEMBERED: list[Callable[[], None]] = []  # what forgets answers that were read off the table


def remembered(function: Function) -> Function:
    """`functools.cache` of a function that reads the table; a registration clears it."""
    cached = functools.cache(function)
    _REMEMBERED.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


def register(entry: KernelEntry) -> KernelEntry:
    """Register a kernel, before those that are there. Register before layers run, since captured launches stay.

    Raises ValueError for unknown devices, for a name with a comma, and where the operation has a kernel of this name on one of
    its devices for the same pairs.
    """
    _check(entry)
    if not entry.captured and not isinstance(entry, GemmEntry):
        entry = replace(entry, run=_never_recorded(entry.name, entry.run))
    _ENTRIES.setdefault(entry.operation, []).append(entry)
    _changed(entry.operation)
    return entry


@contextmanager
def registered(entry: KernelEntry) -> Iterator[None]:
    """A context in which the kernel is registered."""
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
    """The kernel, but raising `NotPlain` inside a recording, since its launches cannot be captured."""

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
    """Make a function, in plain torch, the reference of the operation of its name. Returns the operation, which runs the first
    entry that supports its arguments, on the device of its first argument. ValueError for a name that is taken."""
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
    """Decorates a kernel of this package: registers it on the GPUs for which the package is compiled."""

    def enter(run: Function) -> Function:
        settings: dict[str, Any] = {"name": "kernel", "devices": NATIVE, "captured": True} | what
        register(KernelEntry(operation=operation, run=run, **settings))
        return run

    return enter


def choose(operation: str, x: Any, *arguments: Any, **options: Any) -> KernelEntry:
    """The entry that runs an operation with these arguments."""
    for entry in _ON[operation][DEVICE_AT[x.get_device()]]:
        if entry.reads and (x.dtype not in entry.reads or x.dim() != 2):
            continue
        if entry.takes is None or entry.takes(x, *arguments, **options):
            return entry
    raise AssertionError(f"{operation} has no reference")


def preparing(operation: str, x: Any, *arguments: Any, **options: Any) -> Callable[..., Any]:
    """The `prepare` of the entry that `choose` returns. ValueError where it has none."""
    entry = choose(operation, x, *arguments, **options)
    if entry.prepare is None:
        raise ValueError(
            f"{operation} by {entry.name} prepares nothing for {x.dtype} on {x.device}: cast matrix by matrix"
        )
    return entry.prepare


def entries(operation: str, device: str) -> tuple[KernelEntry, ...]:
    """The kernels of an operation on one of DEVICES, in the order of look-up; empty for an unknown operation."""
    return _ON.get(operation, {}).get(device, ())


def cast_kernel(operation: str, device_type: str) -> str:
    """What runs a cast on a device type, "cpu" or "cuda", as plans print it: the name of its kernel for matrices in bf16 or
    fp32, or "reference", with what is missing where kernels cannot be built. On CUDA this builds them, once a machine."""
    missing = loader.missing() if device_type == "cuda" else ""
    found = entries(operation, device_kind(device_type))
    name = found[0].name if found else REFERENCE
    return f"{name} ({missing})" if name == REFERENCE and missing else name


# GEMMs


@dataclass(frozen=True)
class GemmKernels:
    """The entries that multiply a pair of operands on a device, in the order of look-up; the last supports all problems that
    the others do not."""

    entries: tuple[GemmEntry, ...]

    @property
    def status(self) -> str:
        return self.entries[-1].status

    @property
    def kernel(self) -> str:
        """The printed name: that of the last entry, and when others run instead."""
        others = [f"{entry.when}: {entry.name}" for entry in self.entries[:-1]]
        return ", ".join([self.entries[-1].name, *others])

    def bind(self, a: OperandLayout, b: OperandLayout) -> GemmLaunch:
        """The launch for operands of these layouts: the first entry that takes a problem."""
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
    """The kernels that multiply operands of these layouts on one of DEVICES: entries that name the pair, then those for any
    pair, down to the first that takes every problem. ValueError where none does."""
    found = [each for each in entries(GEMM, device) if isinstance(each, GemmEntry) and each.supports(a, b)]
    found.sort(key=lambda entry: not entry.formats)
    for count, entry in enumerate(found, 1):
        if entry.takes is None:
            return GemmKernels(tuple(found[:count]))
    raise ValueError(
        f"no kernel multiplies {a.gemm_kind} by {b.gemm_kind} on {device}: register one (dlp.kernels.table)"
    )
