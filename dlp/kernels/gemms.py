"""GEMMs by cuBLASLt on plain CUDA tensors: D = A @ B.T, contraction last in both operands.

    product          any pair of dtypes and scales that cuBLASLt takes as it lies     its pieces: prepare, plan_of, launch
    product_fp8      FP8 codes with fp32 scales, of any size: what is not aligned is padded
    product_blocks   FP8 or FP4 codes with scales of 32 or 16 elements, which only Blackwell multiplies

A plan is cuBLASLt's descriptors and its algorithm for one problem: types, sizes, strides, scale modes, epilogue, flags.
Plans are made once, by asking the heuristics, and kept; which of their candidates runs is the first, or the one that
`python -m dlp.kernels.tune` measured to be the fastest on a device of this name. A measured choice may sum in another
order, so it can be declined (`GemmLaunchOptions.tuned`). Every stream has a workspace of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import operator
import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import loader, reference
from dlp.kernels.codes import transposed
from dlp.kernels.cuda_codes import copied_rows
from dlp.kernels.launches import run_plan
from dlp.kernels.registry import DEFAULT_OPTIONS, GemmLaunchOptions

WORKSPACE = 32 * 2**20  # bytes, what cuBLAS advises for Hopper
CANDIDATES = 8  # algorithms a choice is made among
ALIGNMENT = 16  # bytes: FP8 pointers and rows lie at multiples of it
BLOCK_UNIT = 32  # elements: sizes of block-scaled operands are multiples of it
FP4 = torch.float4_e2m1fn_x2
TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
    FP4: 33,
}
NONE, TENSOR, NVFP4_BLOCKS, MX_BLOCKS, ROWWISE, BLOCK_1D, BLOCK_2D = -1, 0, 1, 2, 3, 4, 5  # scale modes


class GemmProblem(NamedTuple):
    """Key of a plan of cuBLASLt (struct GemmProblem of csrc/cublaslt.h)."""

    a_type: int
    b_type: int
    d_type: int
    bias_type: int
    rows: int
    cols: int
    contraction: int
    a_stride: int
    b_stride: int
    d_stride: int
    a_col_major: int
    b_col_major: int
    a_scale: int
    b_scale: int
    accumulate: int
    device_alpha: int
    fast_accumulation: int
    tf32: int
    sms: int
    alignment: int

    def __str__(self) -> str:
        names = {number: str(dtype).removeprefix("torch.") for dtype, number in TYPES.items()}
        scales = f", scale modes {self.a_scale} and {self.b_scale}" if self.a_scale != NONE else ""
        return (
            f"[{self.rows}, {self.contraction}] {names[self.a_type]} x [{self.cols}, {self.contraction}] {names[self.b_type]} "
            f"-> {names[self.d_type]}{scales}, strides {(self.a_stride, self.b_stride, self.d_stride)}"
            f"{', with bias' if self.bias_type != NONE else ''}{', accumulating' if self.accumulate else ''}, "
            f"{self.alignment} bytes aligned"
        )


class Scales(NamedTuple):
    """The scales of A and B, and their modes.

    TENSOR         fp32 []
    ROWWISE        fp32 [lines]
    BLOCK_1D       fp32 [C/128, lines padded to 4]
    BLOCK_2D       fp32 [lines/128, C/128 padded to 4]
    NVFP4_BLOCKS   E4M3 bytes of blocks of 16, in tiles of 128x4
    MX_BLOCKS      E8M0 bytes of blocks of 32, in tiles of 128x4
    """

    a: Tensor
    b: Tensor
    a_mode: int = TENSOR
    b_mode: int = TENSOR


class Job(NamedTuple):
    """GEMM that is ready to run.

    problem     key of the plan
    addresses   arguments of a launch (struct GemmPointers of csrc/cublaslt.h)
    out         result
    reads       operands and scales, whose memory must not be reused before the launch
    """

    problem: GemmProblem
    addresses: tuple[int, ...]
    out: Tensor
    reads: tuple[Tensor | None, ...]


def library_names() -> list[str]:
    """The names under which cuBLASLt may be loaded: as torch has loaded it, or in the package that pip installs with torch."""
    name = f"libcublasLt.so.{(torch.version.cuda or '13').split('.')[0]}"
    package = importlib.util.find_spec("nvidia")
    folders = list(package.submodule_search_locations or ()) if package else []
    return [name, *(str(file) for folder in folders for file in sorted(Path(folder).glob(f"*/lib/{name}")))]


@functools.cache
def _module() -> ModuleType:
    module = loader.load()
    module.open_cublaslt(library_names())
    return module


# Problems


def _lines(x: Tensor) -> tuple[Tensor, int, int]:
    """A matrix [lines, along] that cuBLASLt can read, its stride, and 1 if its lines are adjacent, 0 if its columns are."""
    (lines, along), (stride, step) = x.shape, x.stride()
    if step == 1 and stride >= along:
        return x, stride, 0
    if stride == 1 and step >= lines:
        return x, step, 1
    return x.contiguous(), along, 0


def _aligned(scale: Tensor) -> Tensor:
    """Scales of lines, aligned as cuBLASLt needs them; they may be a slice of a longer vector."""
    return scale if scale.dim() == 0 or scale.data_ptr() % ALIGNMENT == 0 else scale.clone()


def _check_devices(a: Tensor, *others: Tensor | None) -> None:
    """ValueError unless all tensors are on the device of `a`, since cuBLASLt gets addresses."""
    for other in others:
        if other is not None and other.device != a.device:
            raise ValueError(f"a GEMM reads {a.device} and {other.device}: move all its operands to one device")


def tf32() -> bool:
    """Whether torch may round fp32 operands of GEMMs to TF32, by any of its settings."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def prepare(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: Scales | None = None, *, bias: Tensor | None = None,
    accumulate: Tensor | None = None, alpha: Tensor | None = None, options: GemmLaunchOptions = DEFAULT_OPTIONS,
) -> Job:  # fmt: skip
    """A [rows, C], B [cols, C] (FP4: two codes an entry) -> the job that writes [rows, cols] of `out_dtype`, or adds to
    `accumulate`.

    bias [cols] in the dtype of the result is added to it; `alpha` fp32 [] multiplies the product.
    """
    if options.alpha != 1.0:
        factor = number(a.device, options.alpha)
        alpha = factor if alpha is None else alpha * factor
    _check_devices(a, b, bias, accumulate, alpha, *(scales[:2] if scales else ()))
    (rows, contraction), cols = a.shape, b.shape[0]
    out = room_for(a, (rows, cols), out_dtype, options) if accumulate is None else accumulate
    a, a_stride, a_col_major = _lines(a)
    b, b_stride, b_col_major = _lines(b)
    a_scale, b_scale = (None, None) if scales is None else (_aligned(scales.a), _aligned(scales.b))
    pointers = a.data_ptr(), b.data_ptr(), out.data_ptr()
    addresses = (
        *pointers, _address(a_scale), _address(b_scale), _address(bias), _address(alpha),
        0 if alpha is None else _address((_zero if accumulate is None else one)(a.device)),
    )  # fmt: skip
    aligned = functools.reduce(operator.or_, pointers, 256)  # the lowest set bit is the alignment of all pointers
    if a.dtype is FP4:
        contraction, a_stride, b_stride = 2 * contraction, 2 * a_stride, 2 * b_stride
    problem = GemmProblem(
        TYPES[a.dtype], TYPES[b.dtype], TYPES[out.dtype], NONE if bias is None else TYPES[bias.dtype], rows, cols,
        contraction, a_stride, b_stride, out.stride(0), a_col_major, b_col_major,
        scales.a_mode if scales else NONE, scales.b_mode if scales else NONE,
        int(accumulate is not None), int(alpha is not None), int(options.fast_accumulation and scales is not None),
        int(a.dtype == torch.float32 and tf32()), options.sms, aligned & -aligned,
    )  # fmt: skip
    return Job(problem, addresses, out, (a, b, a_scale, b_scale))


@functools.cache
def one(device: torch.device) -> Tensor:
    """1 in the memory of a device, fp32 []."""
    return torch.ones((), device=device)


@functools.cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), device=device)


_NUMBERS: dict[tuple[torch.device, float], Tensor] = {}


def number(device: torch.device, value: float) -> Tensor:
    """A number in the memory of a device, fp32 []."""
    found = _NUMBERS.get((device, value))
    if found is None:
        found = _NUMBERS[device, value] = torch.full((), value, device=device)
    return found


def constants(device: torch.device) -> tuple[Tensor, ...]:
    """The constants that GEMMs on a device read besides their operands, which are never freed."""
    return one(device), _zero(device), *[kept for (where, _), kept in _NUMBERS.items() if where == device]


# Plans

_PLANS: dict[tuple[GemmProblem, int, bool], Any] = {}
_WORKSPACES: dict[tuple[int, int], tuple[Tensor, int]] = {}


def plan_of(problem: GemmProblem, device: int, tuned: bool) -> Any:
    """The plan of a problem, cached. ValueError where cuBLASLt has none."""
    plan = _PLANS.get((problem, device, tuned))
    if plan is None:
        choice = choices(device).get(key_of(problem), 0) if tuned else 0
        plan = new_plan(problem, device, choice + 1)
        if plan.candidates <= choice:
            raise ValueError(
                f"cuBLASLt {_module().cublaslt_version()} has no algorithm {choice} for the GEMM {problem}"
                + (f"; remove {choice_file(device)}" if choice else "")
            )
        plan.choose(choice)
        _PLANS[problem, device, tuned] = plan
    return plan


def plans() -> dict[tuple[GemmProblem, int, bool], Any]:
    """The cache of plans, for `dlp.kernels.tune`."""
    return _PLANS


def new_plan(problem: GemmProblem, device: int, candidates: int) -> Any:
    return _module().GemmPlan(problem, device, WORKSPACE, candidates)


def launch(job: Job, device: int, tuned: bool = True) -> Tensor:
    """Run a job on torch's current stream; returns its result."""
    if device != torch._C._cuda_getDevice():
        raise ValueError(
            f"GEMMs run on the current device, cuda:{torch.cuda.current_device()}, and got operands on cuda:{device}; call "
            f"inside torch.cuda.device({device})"
        )
    stream = torch._C._cuda_getCurrentRawStream(device)
    plan = _PLANS.get((job.problem, device, tuned)) or plan_of(job.problem, device, tuned)
    run_plan(plan, (*job.addresses, workspace(device, stream)), stream)
    return job.out


def workspace(device: int, stream: int) -> int:
    """The address of the memory that GEMMs on this stream may use."""
    found = _WORKSPACES.get((device, stream))
    if found is None:
        memory = torch.empty(WORKSPACE, dtype=torch.uint8, device=torch.device("cuda", device))
        found = _WORKSPACES[device, stream] = memory, memory.data_ptr()
    return found[1]


# Measured choices


def key_of(problem: GemmProblem) -> str:
    """Return the key of a problem in the file of measured choices."""
    return " ".join(map(str, problem))


def choice_file(device: int) -> Path:
    return loader.cache_folder("gemms") / f"{torch.cuda.get_device_name(device).replace(' ', '_')}.json"


@functools.cache
def choices(device: int) -> dict[str, int]:
    """Problem -> the fastest of CANDIDATES, as far as measured with this version of cuBLASLt."""
    return _saved(choice_file(device)).get(str(_module().cublaslt_version()), {})


def _saved(file: Path) -> dict[str, dict[str, int]]:
    """Version of cuBLASLt -> its measured choices; none where there is no such file. Raises ValueError for another file."""
    try:
        found = json.loads(file.read_text()) if file.exists() else {}
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise ValueError(
            f"{file} cannot be read as measured choices of GEMMs; remove it, and tune again with "
            f"python -m dlp.kernels.tune if there shall be some"
        )
    return found


def save_choices(device: int, measured: dict[str, int]) -> Path:
    """Add to the measured choices of this device and version; those of other problems stay."""
    file = choice_file(device)
    saved = _saved(file)
    saved.setdefault(str(_module().cublaslt_version()), {}).update(measured)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")  # of this process, should another one write, too
    part.write_text(json.dumps(saved, indent=1))
    part.replace(file)
    choices.cache_clear()
    _PLANS.clear()
    return file


# Products


def room_for(a: Tensor, shape: tuple[int, int], dtype: torch.dtype, options: GemmLaunchOptions) -> Tensor:
    """The tensor that a result of this shape and dtype is written to: `options.out`, if it fits."""
    out = options.out
    if out is not None and out.shape == shape and out.dtype == dtype and out.is_contiguous():
        return out
    return a.new_empty(shape, dtype=dtype)


def product(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: Scales | None = None, *, bias: Tensor | None = None,
    accumulate: Tensor | None = None, alpha: Tensor | None = None, options: GemmLaunchOptions = DEFAULT_OPTIONS,
) -> Tensor:  # fmt: skip
    """A [rows, C] @ B [cols, C].T, scaled, summed in fp32, plus bias [cols] -> [rows, cols], rounded once to `out_dtype`;
    or added to `accumulate`, which is returned. Bias and accumulator that cuBLASLt does not take are added afterwards."""
    if bias is None and accumulate is None:
        return launch(prepare(a, b, out_dtype, scales, alpha=alpha, options=options), a.get_device(), options.tuned)
    inside = bias is None or _takes_bias(bias, out_dtype if accumulate is None else accumulate.dtype)
    direct = accumulate is None or _takes_output(accumulate, options.rounds)
    if inside and direct:
        job = prepare(a, b, out_dtype, scales, bias=bias, accumulate=accumulate, alpha=alpha, options=options)
        return launch(job, a.get_device(), options.tuned)
    wide = launch(prepare(a, b, torch.float32, scales, alpha=alpha, options=options), a.get_device(), options.tuned)
    return finish(wide, out_dtype, bias, accumulate)


def _takes_bias(bias: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the GEMM adds the bias itself: it has the result's own 16-bit dtype, and whole rows are aligned. Elsewhere the
    product would be rounded before the sum."""
    aligned = (2 * bias.shape[0] | bias.data_ptr()) % ALIGNMENT == 0
    return bias.dtype == out_dtype != torch.float32 and bias.is_contiguous() and aligned


def _takes_output(out: Tensor, rounds: bool) -> bool:
    """Whether the GEMM adds to an accumulator itself: to an fp32 one. With a bf16 one the product would be rounded before the
    sum, which `rounds` may allow."""
    stride, step = out.stride()
    aligned = (out.itemsize * stride | out.data_ptr()) % ALIGNMENT == 0
    fits = out.dtype == torch.float32 or (rounds and out.dtype == torch.bfloat16)
    return fits and step == 1 and stride >= out.shape[1] and aligned


def finish(result: Tensor, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None) -> Tensor:
    """Add the bias in fp32, round once to `out_dtype`; or add into `accumulate`, in its dtype, and return it."""
    if bias is not None:
        result = result.float() + bias.float()
    if accumulate is not None:
        return accumulate.add_(result)
    return result.to(out_dtype)


def product_fp8(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: Scales, *, bias: Tensor | None = None,
    accumulate: Tensor | None = None, options: GemmLaunchOptions = DEFAULT_OPTIONS,
) -> Tensor:  # fmt: skip
    """`product` of FP8 codes of any size and alignment: zero codes are appended where cuBLASLt needs more."""
    (rows, contraction), cols = a.shape, b.shape[0]
    unit = 1 if scales.a_mode <= ROWWISE else 8
    (a_stride, a_step), (b_stride, b_step) = a.stride(), b.stride()
    together = contraction | cols | a_stride | b_stride | a.data_ptr() | b.data_ptr()
    if together % ALIGNMENT == rows % unit == 0 and a_step == b_step == 1 and min(a_stride, b_stride) >= contraction:
        if bias is None and accumulate is None:
            return launch(prepare(a, b, out_dtype, scales, options=options), a.get_device(), options.tuned)
        return product(a, b, out_dtype, scales, bias=bias, accumulate=accumulate, options=options)
    whole_a, whole_b = _padded(a, unit), _padded(b, ALIGNMENT)
    if whole_a.shape[0] == rows and whole_b.shape[0] == cols:
        return product(whole_a, whole_b, out_dtype, scales, bias=bias, accumulate=accumulate, options=options)
    wide = out_dtype if bias is None and accumulate is None else torch.float32
    result = product(whole_a, whole_b, wide, _padded_scales(scales, whole_a, whole_b), options=options)
    return finish(result[:rows, :cols], out_dtype, bias, accumulate)


def product_blocks(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: Scales, *, bias: Tensor | None = None,
    accumulate: Tensor | None = None, alpha: Tensor | None = None, options: GemmLaunchOptions = DEFAULT_OPTIONS,
) -> Tensor:  # fmt: skip
    """`product` of FP8 codes [lines, C] or packed FP4 codes [lines, C/2] with scales in tiles of 128x4, of any size: C and
    the lines of B are filled up with zero codes to multiples of 32. The tiles hold scales for them, and these are 0."""
    cols, along = b.shape[0], BLOCK_UNIT // (2 if a.dtype is FP4 else 1)
    whole_a, whole_b = _padded(a, 1, along), _padded(b, BLOCK_UNIT, along)
    if whole_b.shape[0] == cols:
        return product(
            whole_a, whole_b, out_dtype, scales, bias=bias, accumulate=accumulate, alpha=alpha, options=options
        )
    wide = out_dtype if bias is None and accumulate is None else torch.float32
    return finish(
        product(whole_a, whole_b, wide, scales, alpha=alpha, options=options)[:, :cols], out_dtype, bias, accumulate
    )


def _padded(codes: Tensor, lines: int, along: int = ALIGNMENT) -> Tensor:
    """Codes [lines, C] as tensor cores read them: C padded to a multiple of `along`, the distance of lines to one of 16, the
    number of lines to one of `lines`."""
    below, right = -codes.shape[0] % lines, -codes.shape[1] % along
    if below or right:
        return F.pad(codes.view(torch.uint8), (0, right, 0, below)).view(codes.dtype)
    stride, step = codes.stride()
    adjacent = step == 1 and stride >= codes.shape[1] and (stride | codes.data_ptr()) % ALIGNMENT == 0
    return codes if adjacent else codes.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(codes.dtype)


def _padded_scales(scales: Scales, a: Tensor, b: Tensor) -> Scales:
    """Scales for the lines of the padded operands; what the new ones scale is 0."""

    def grown(scale: Tensor, mode: int, lines: int) -> Tensor:
        missing = lines - scale.shape[-1] if mode in (ROWWISE, BLOCK_1D) else 0
        return F.pad(scale, (0, missing)) if missing > 0 else scale

    return Scales(
        grown(scales.a, scales.a_mode, a.shape[0]),
        grown(scales.b, scales.b_mode, b.shape[0]),
        scales.a_mode,
        scales.b_mode,
    )


def block_scales(scale_inv: Tensor, tile: bool) -> Tensor:
    """Compact scales of 128x128 tiles, or of 1x128 blocks, in the layout of BLOCK_2D or BLOCK_1D; a view if they are in it
    already."""
    lines, across = scale_inv.shape
    if tile and scale_inv.stride() == (across + -across % 4, 1):
        return scale_inv
    if tile:
        return reference.block_2d_layout(scale_inv)
    if scale_inv.stride() == (1, lines + -lines % 4):
        return scale_inv.t()
    if scale_inv.stride(0) == 1 and lines % 4 == 0:  # some of the lines of a larger operand
        return copied_rows(scale_inv.t())
    return transposed(scale_inv) if lines % 4 == 0 else reference.block_1d_layout(scale_inv)
