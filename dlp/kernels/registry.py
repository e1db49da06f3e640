"""Look-up in the kernel table (`dlp.kernels.table`): which kernel runs an operation on a device, and the kernel's printed name.

    entry      `KernelEntry`: one kernel of one operation: the function that launches it, its devices, conditions on arguments
    device     one of DEVICES: "cpu", "cuda" (a GPU on which this package's kernels cannot be built), "sm_90", "sm_100"
    look-up    the entries of an operation on a device are tried from the newest registration to the oldest, and the first
               match, an entry that supports the arguments, runs

An operation is a function of `dlp.kernels.ops`. The decorator `operation` turns a function in plain torch, the reference, into
an operation; the reference is an entry on every device. All GEMMs are one operation, and each entry (`GemmEntry`) lists the
pairs of operands that it multiplies. `gemm_kernels` looks up the entries of a pair once; the launch that `GemmKernels.bind`
returns makes no further look-ups.
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
from dlp.kernels.reference.gemm import finish

DEVICES = ("cpu", "cuda", "sm_90", "sm_100")
NATIVE = ("sm_90", "sm_100")  # devices on which the kernels of this package run
REFERENCE = "reference"  # printed name of the plain-torch entries
GEMM = "gemm"  # name of the operation of all GEMMs
Function = TypeVar("Function", bound=Callable[..., Any])


# Devices


def device_kind(device_type: str) -> str:
    """Return the name in DEVICES for "cuda" (the current GPU) or "cpu"; any other name is returned unchanged."""
    if device_type != "cuda" or loader.missing():
        return device_type
    return _native(torch.cuda.get_device_capability())


def _native(capability: tuple[int, int]) -> str:
    return "sm_100" if capability >= (10, 0) else "sm_90"


class _Devices(dict[int, str]):
    """Cache: index of a device (-1: CPU) -> name in DEVICES."""

    def __missing__(self, index: int) -> str:
        if index < 0:
            kind = "cpu"
        else:
            kind = "cuda" if loader.missing() else _native(torch.cuda.get_device_capability(index))
        self[index] = kind
        return kind


DEVICE_AT = _Devices()


def runs_kernels(x: Tensor) -> bool:
    """Return whether the kernels of this package run on the device of x."""
    return DEVICE_AT[x.get_device()] in NATIVE


def device_of(x: Tensor) -> str:
    """Return the name in DEVICES of the device of x."""
    return DEVICE_AT[x.get_device()]


def kind_of(device: torch.device) -> str:
    """Return the name in DEVICES of a torch device."""
    if device.type != "cuda":
        return DEVICE_AT[-1]
    return DEVICE_AT[torch.cuda.current_device() if device.index is None else device.index]


# Entries


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelEntry:
    """One kernel of one operation.

    operation  name of the function in `dlp.kernels.ops`
    name       name of the kernel in printed plans
    run        function that launches the kernel, with the arguments of the operation
    devices    names in DEVICES of the devices on which the kernel runs
    reads      dtypes of the first argument, a matrix [rows, cols]; (): any tensor
    takes      condition on the arguments; None: all arguments
    prepare    function that prepares a later launch: for casts a launch for many matrices, for delayed scales an update of many
               slots, for GEMMs a launch for two layouts; None: not available
    captured   whether all launches go through `dlp.kernels.launches` or torch, where a recording sees them; a forward or
               backward that runs an entry with `captured=False` is not captured: its kernels are launched one by one
    """

    operation: str
    name: str
    run: Callable[..., Any]
    devices: tuple[str, ...] = DEVICES
    reads: tuple[torch.dtype, ...] = ()
    takes: Callable[..., bool] | None = None
    prepare: Callable[..., Any] | None = None
    captured: bool = False


class OperandLayout(Protocol):
    """Description of an operand of a GEMM.

    gemm_kind      name of the kind of operand, such as "fp8_block_1d", which defines the parts (list in `gemm_entries`)
    block          number of elements that share a scale along (rows, contraction); 0: the whole dimension
    bf16_exact     whether decoded values are exact in bf16
    factors        scale that `factor_parts` returns: one per "tensor", one per "row", or "" (no scale); None: `factor_parts`
                   is not available, because decoded values are not bf16 values times such a scale
    decode_parts   function: parts -> fp32 values [rows, contraction]
    factor_parts   function: parts -> values that are exact in bf16, and the scale, fp32 [] or [rows], or None
    """

    @property
    def gemm_kind(self) -> str: ...
    @property
    def block(self) -> tuple[int, int]: ...
    @property
    def bf16_exact(self) -> bool: ...
    @property
    def factors(self) -> str | None: ...
    def decode_parts(self, parts: Sequence[Tensor]) -> Tensor: ...
    def factor_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]: ...


class GemmLaunchOptions(NamedTuple):
    """Options of one launch of a GEMM.

    fast_accumulation   sum FP8 products inside the tensor core only; no effect on other operands
    tuned               run the algorithm that `dlp.kernels.tune` measured as the fastest, if a measurement exists
    allow_reference     allow the plain-torch reference on a GPU, if no kernel supports the GEMM
    sms                 number of SMs on which the GEMM runs; 0: all
    out                 tensor for the result; if None, or if shape, dtype, layout or alignment do not fit, the result is a new
                        tensor
    alpha               factor by which the sums of products are multiplied
    rounds              allow rounding the product to bf16 before the sum with a bf16 accumulator
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
    """Launch of D = A @ B.T, contraction last, on the parts `a` and `b` of two operands.

    Returns D plus bias [cols], added in fp32, in `out_dtype`. If `accumulate` [rows, cols] is given, the launch adds this sum
    to `accumulate` instead, and returns `accumulate`.
    """

    def __call__(
        self, a: Sequence[Tensor], b: Sequence[Tensor], out_dtype: torch.dtype, bias: Tensor | None,
        accumulate: Tensor | None, options: GemmLaunchOptions, /,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class GemmEntry(KernelEntry):
    """One kernel of the operation "gemm". `run` is a `GemmLaunch`; if the launch depends on the layouts, `prepare(a, b)`
    returns the launch for two `OperandLayout` objects. `takes` is a condition on the arguments of a launch.

    formats    pairs of `gemm_kind` of A and B; (): any pair for which no other entry applies
    layouts    condition on the layouts of A and B; None: all
    status     "native": a GEMM unit of the device reads the formats; "emulated": decoded values are multiplied, or plain
               torch runs; "own": user-defined
    when       short name of the condition `takes`, printed with the name of the kernel
    cublaslt   kind of operands that cuBLASLt multiplies, see `dlp.kernels.table.Gemm`
    """

    operation: str = field(default=GEMM, init=False)
    run: Callable[..., Any] = field(default=None)  # type: ignore[assignment]  # None if there is `prepare`
    formats: tuple[tuple[str, str], ...] = ()
    layouts: Callable[[OperandLayout, OperandLayout], bool] | None = None
    status: str = "own"
    when: str = ""
    cublaslt: str = ""

    def supports(self, a: OperandLayout, b: OperandLayout) -> bool:
        """Return whether the entry multiplies operands of these layouts."""
        named = not self.formats or (a.gemm_kind, b.gemm_kind) in self.formats
        return named and (self.layouts is None or self.layouts(a, b))

    def launch(self, a: OperandLayout, b: OperandLayout) -> GemmLaunch:
        """Return the launch for operands of these layouts."""
        run = self.run if self.prepare is None else self.prepare(a, b)
        return run if self.captured else _never_recorded(self.name, run)


_ENTRIES: dict[str, list[KernelEntry]] = {}
_ON: dict[str, dict[str, tuple[KernelEntry, ...]]] = {}  # operation -> device -> entries in the order of look-up
_REMEMBERED: list[Callable[[], None]] = []  # functions that clear caches of look-ups


def remembered(function: Function) -> Function:
    """`functools.cache` for a function that reads the table; a registration clears the cache."""
    cached = functools.cache(function)
    _REMEMBERED.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


def register(entry: KernelEntry) -> KernelEntry:
    """Register a kernel, which has priority over the kernels registered before. Register before layers run, because captured
    launches do not change.

    Raises ValueError for an unknown device, for a name with a comma, and for a name that a kernel of the operation already has
    on one of the devices for the same pairs.
    """
    _check(entry)
    if not entry.captured and not isinstance(entry, GemmEntry):
        entry = replace(entry, run=_never_recorded(entry.name, entry.run))
    _ENTRIES.setdefault(entry.operation, []).append(entry)
    _changed(entry.operation)
    return entry


@contextmanager
def registered(entry: KernelEntry) -> Iterator[None]:
    """Context manager that registers a kernel and removes the kernel afterwards."""
    entry = register(entry)
    try:
        yield
    finally:
        _ENTRIES[entry.operation].remove(entry)
        _changed(entry.operation)


def _check(entry: KernelEntry) -> None:
    if unknown := [device for device in entry.devices if device not in DEVICES]:
        raise ValueError(f"kernel {entry.name!r}: there is no device {unknown[0]!r}; choose from {', '.join(DEVICES)}")
    if "," in entry.name:
        raise ValueError(f"kernel {entry.name!r}: plans join names by commas; choose a name without a comma")
    for other in _ENTRIES.get(entry.operation, ()):
        shared = sorted(set(other.devices) & set(entry.devices))
        if other.name == entry.name and shared and _pairs(other) & _pairs(entry):
            raise ValueError(
                f"{entry.operation} has a kernel {entry.name!r} on {', '.join(shared)} already: choose another name"
            )


def _pairs(entry: KernelEntry) -> set[tuple[str, str]]:
    return set(entry.formats or [("", "")]) if isinstance(entry, GemmEntry) else {("", "")}


def _never_recorded(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs the kernel and raises `NotPlain` inside a recording: the launches cannot be captured."""

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
    """Decorator: make a function in plain torch the reference of the operation of the same name.

    The returned operation runs the first entry that supports the arguments, on the device of the first argument. The reference
    reads tensors: a `LazyMatrix` is computed and stored first. Raises ValueError if an operation of this name exists.
    """
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
                if entry.run is reference and not isinstance(x, Tensor):
                    x = getattr(x, "value", x)
                return entry.run(x, *arguments, **options)

    return launch  # type: ignore[return-value]


def choose(operation: str, x: Any, *arguments: Any, **options: Any) -> KernelEntry:
    """Return the entry that runs an operation with these arguments."""
    for entry in _ON[operation][DEVICE_AT[x.get_device()]]:
        if entry.reads and (x.dtype not in entry.reads or x.dim() != 2):
            continue
        if entry.takes is None or entry.takes(x, *arguments, **options):
            return entry
    raise AssertionError(f"{operation} has no reference")


def preparing(operation: str, x: Any, *arguments: Any, **options: Any) -> Callable[..., Any]:
    """Return `prepare` of the entry that `choose` returns. Raises ValueError for an entry without `prepare`."""
    entry = choose(operation, x, *arguments, **options)
    if entry.prepare is None:
        raise ValueError(
            f"{operation} by {entry.name} has no batched launch for {x.dtype} on {x.device}: cast matrix by matrix"
        )
    return entry.prepare


def entries(operation: str, device: str) -> tuple[KernelEntry, ...]:
    """Return the entries of an operation on one of DEVICES, in the order of look-up; empty for an unknown operation."""
    return _ON.get(operation, {}).get(device, ())


def cast_kernel(operation: str, device_type: str) -> str:
    """Return the printed name of the kernel of a cast on a device type, "cpu" or "cuda", for matrices in bf16 or fp32.

    If kernels cannot be built, the name is "reference" with the reason in parentheses. For "cuda" this function builds the
    kernels, once per machine.
    """
    missing = loader.missing() if device_type == "cuda" else ""
    found = entries(operation, device_kind(device_type))
    name = found[0].name if found else REFERENCE
    return f"{name} ({missing})" if name == REFERENCE and missing else name


# GEMMs


@dataclass(frozen=True)
class GemmKernels:
    """Entries that multiply a pair of operands on a device, in the order of look-up; the last entry has no condition."""

    entries: tuple[GemmEntry, ...]

    @property
    def status(self) -> str:
        return self.entries[-1].status

    @property
    def kernel(self) -> str:
        """Printed name: the name of the last entry, then conditions and names of the other entries."""
        others = [f"{entry.when}: {entry.name}" for entry in self.entries[:-1]]
        return ", ".join([self.entries[-1].name, *others])

    def bind(self, a: OperandLayout, b: OperandLayout) -> GemmLaunch:
        """Return the launch for operands of these layouts, which runs the first entry whose condition holds."""
        *some, (_, otherwise) = ((each.takes, each.launch(a, b)) for each in self.entries)
        if not some:
            return otherwise

        def launch(*problem: Any) -> Tensor:
            for takes, run in some:
                if takes is None or takes(*problem):
                    return run(*problem)
            return otherwise(*problem)

        return launch


def checked(run: GemmLaunch, scales_inside: bool = False) -> GemmLaunch:
    """Return a launch with checks: raise ValueError for operands with different contractions. Empty operands, which cuBLASLt
    refuses, give zero sums. `scales_inside`: whether `run` multiplies by `options.alpha`; if False, the returned launch
    multiplies."""

    @functools.wraps(run)
    def launch(
        a: Sequence[Tensor], b: Sequence[Tensor], out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None,
        options: GemmLaunchOptions, **more: Any,
    ) -> Tensor:  # fmt: skip
        left, right = a[0], b[0]
        if left.shape[-1] != right.shape[-1]:
            raise ValueError(
                f"GEMM operands must share their last dimension; got {tuple(left.shape)} and {tuple(right.shape)}"
            )
        if left.numel() and right.numel():
            if options.alpha == 1.0 or scales_inside:
                return run(a, b, out_dtype, bias, accumulate, options, **more)
            sums = run(a, b, torch.float32, None, None, options._replace(alpha=1.0, out=None), **more)
            return finish(sums * options.alpha, out_dtype, bias, accumulate)
        return finish(torch.zeros(len(left), len(right), device=left.device), out_dtype, bias, accumulate)

    return launch


def gemm_entries(device: str) -> list[GemmEntry]:
    """Return the entries of GEMMs on one of DEVICES, in the order of look-up."""
    return [each for each in entries(GEMM, device) if isinstance(each, GemmEntry)]


def gemm_kernels(a: OperandLayout, b: OperandLayout, device: str) -> GemmKernels:
    """Return the entries that multiply operands of these layouts on one of DEVICES: entries that name the pair, then entries
    for any pair, up to the first entry without a condition. Raises ValueError if there is no such entry."""
    found = [each for each in gemm_entries(device) if each.supports(a, b)]
    found.sort(key=lambda entry: not entry.formats)
    for count, entry in enumerate(found, 1):
        if entry.takes is None:
            return GemmKernels(tuple(found[:count]))
    raise ValueError(
        f"no kernel multiplies {a.gemm_kind} by {b.gemm_kind} on {device}: register a kernel (dlp.kernels.table.register)"
    )
