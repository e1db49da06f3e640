"""GEMMs by cuBLASLt on plain CUDA tensors: D = A @ B.T, contraction last in both operands.

    product          any dtypes and scales that cuBLASLt supports, without padding (steps: prepare, plan_of, launch)
    product_fp8      FP8 codes of any size with fp32 scales; unaligned operands are padded
    product_blocks   FP8 or FP4 codes with scales per 32 or 16 elements; only on Blackwell
    segment_job      sums of parts of the contraction, each in a fixed order (`dlp.kernels.segments`)

A problem consists of types, sizes, strides, scale modes, epilogue and flags. A plan holds cuBLASLt's descriptors and algorithm
for one problem. Plans are created once, from cuBLASLt's heuristics, and cached. The algorithm is the first candidate of the
heuristics, or the candidate that `python -m dlp.kernels.tune` measured as the fastest on this model of GPU. A measured
algorithm may sum in another order; `GemmLaunchOptions.tuned = False` selects the first candidate. Every stream has a separate
workspace.
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
from dlp.kernels.reference import finish
from dlp.kernels.registry import DEFAULT_OPTIONS, GemmLaunchOptions

WORKSPACE = 32 * 2**20  # bytes, as cuBLAS recommends for Hopper
CANDIDATES = 8  # largest number of algorithms that `dlp.kernels.tune` measures per problem
ALIGNMENT = 16  # alignment of pointers and row strides, in bytes
BLOCK_UNIT = 32  # C and the number of rows of B of a block-scaled GEMM are zero-padded to multiples of this number
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
    segments: int = 0

    def __str__(self) -> str:
        names = {number: str(dtype).removeprefix("torch.") for dtype, number in TYPES.items()}
        scales = f", scale modes {self.a_scale} and {self.b_scale}" if self.a_scale != NONE else ""
        return (
            f"[{self.rows}, {self.contraction}] {names[self.a_type]} x [{self.cols}, {self.contraction}] {names[self.b_type]} "
            f"-> {names[self.d_type]}{scales}, strides {(self.a_stride, self.b_stride, self.d_stride)}"
            f"{', with bias' if self.bias_type != NONE else ''}{', accumulating' if self.accumulate else ''}, "
            f"{self.alignment} bytes aligned{f', {self.segments} segments' if self.segments else ''}"
        )


class Scales(NamedTuple):
    """Scales of the operands A and B, and the scale mode of each operand.

    The mode defines dtype and shape of the scales of an operand [lines, C]: lines are rows of A or of B, C is the contraction.

    TENSOR         fp32 []
    ROWWISE        fp32 [lines]
    BLOCK_1D       fp32 [C/128, lines], lines zero-padded to a multiple of 4
    BLOCK_2D       fp32 [lines/128, C/128], C/128 zero-padded to a multiple of 4
    NVFP4_BLOCKS   E4M3, one for each 16 elements along C, stored in tiles of 128 lines x 4 scales
    MX_BLOCKS      E8M0, one for each 32 elements along C, stored in tiles of 128 lines x 4 scales
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
    """Return names of the cuBLASLt library: the name under which torch loaded the library, and paths in the pip package."""
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
    """Return (x or a copy that cuBLASLt can read, its stride, 1 if it is stored by columns else 0), for x [lines, along]."""
    (lines, along), (stride, step) = x.shape, x.stride()
    if step == 1 and stride >= along:
        return x, stride, 0
    if stride == 1 and step >= lines:
        return x, step, 1
    return x.contiguous(), along, 0


def aligned_scale(scale: Tensor) -> Tensor:
    """Return scales at an address that is aligned for GEMM kernels; a slice of a longer vector may have to be copied."""
    return scale if scale.dim() == 0 or scale.data_ptr() % ALIGNMENT == 0 else scale.clone()


def _check_devices(a: Tensor, *others: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on the device of `a`: cuBLASLt receives plain addresses."""
    for other in others:
        if other is not None and other.device != a.device:
            raise ValueError(f"a GEMM has operands on {a.device} and {other.device}: move all operands to one device")


def tf32() -> bool:
    """Return whether torch's settings allow TF32 for GEMMs of fp32 operands."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def prepare(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: Scales | None = None, *, bias: Tensor | None = None,
    accumulate: Tensor | None = None, alpha: Tensor | None = None, options: GemmLaunchOptions = DEFAULT_OPTIONS,
) -> Job:  # fmt: skip
    """Return the job that multiplies A [rows, C] by B [cols, C] (FP4: two codes per entry) -> [rows, cols] of `out_dtype`, or
    that adds the product to `accumulate`.

    bias    [cols], in the dtype of the result, added to the result
    alpha   fp32 [], factor of the product
    """
    if options.alpha != 1.0:
        factor = number(a.device, options.alpha)
        alpha = factor if alpha is None else alpha * factor
    _check_devices(a, b, bias, accumulate, alpha, *(scales[:2] if scales else ()))
    (rows, contraction), cols = a.shape, b.shape[0]
    out = room_for(a, (rows, cols), out_dtype, options) if accumulate is None else accumulate
    a, a_stride, a_col_major = _lines(a)
    b, b_stride, b_col_major = _lines(b)
    a_scale, b_scale = (None, None) if scales is None else (aligned_scale(scales.a), aligned_scale(scales.b))
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
    """Return the constant 1, fp32 [], in the memory of a device."""
    return torch.ones((), device=device)


@functools.cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), device=device)


_NUMBERS: dict[tuple[torch.device, float], Tensor] = {}


def number(device: torch.device, value: float) -> Tensor:
    """Return a constant, fp32 [], in the memory of a device."""
    found = _NUMBERS.get((device, value))
    if found is None:
        found = _NUMBERS[device, value] = torch.full((), value, device=device)
    return found


def constants(device: torch.device) -> tuple[Tensor, ...]:
    """Return the constants that GEMMs on a device read besides operands; the constants are never freed."""
    return one(device), _zero(device), *[tensor for (place, _), tensor in _NUMBERS.items() if place == device]


def segment_job(a: Tensor, b: Tensor, sums: Tensor, *, adds: bool, alpha: Tensor | None = None) -> Job:
    """Return the job that computes a GEMM for each equal part of the contraction, in a fixed order of addition: A [rows, C], B
    [cols, C], both contiguous and aligned -> `sums`, fp32 [segments, rows, cols], or added to `sums`.

    The algorithm depends only on the dtypes and on C / segments, so that the bits of an element do not depend on the numbers of
    rows, columns and segments.
    """
    _check_devices(a, b, sums, alpha)
    (rows, contraction), (cols, _), segments = a.shape, b.shape, len(sums)
    zero = (one if adds else _zero)(a.device)
    addresses = (
        a.data_ptr(), b.data_ptr(), sums.data_ptr(), 0, 0, 0, _address(alpha), 0 if alpha is None else zero.data_ptr()
    )  # fmt: skip
    problem = GemmProblem(
        TYPES[a.dtype], TYPES[b.dtype], TYPES[sums.dtype], NONE, rows, cols, contraction // segments, contraction,
        contraction, sums.stride(1), 0, 0, NONE, NONE, int(adds), int(alpha is not None), 0, 0, 0, ALIGNMENT, segments,
    )  # fmt: skip
    return Job(problem, addresses, sums, (a, b, alpha))


# Plans

_PLANS: dict[tuple[GemmProblem, int, bool], Any] = {}
_WORKSPACES: dict[tuple[int, int], tuple[Tensor, int]] = {}


def plan_of(problem: GemmProblem, device: int, tuned: bool) -> Any:
    """Return the cached plan of a problem. Raises ValueError if cuBLASLt does not support the problem, or has no
    algorithm with the index of the measured choice."""
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
    """Return the cache of plans, for `dlp.kernels.tune`."""
    return _PLANS


def new_plan(problem: GemmProblem, device: int, candidates: int) -> Any:
    return _module().GemmPlan(problem, device, WORKSPACE, candidates)


def launch(job: Job, device: int, tuned: bool = True) -> Tensor:
    """Run a job on torch's current stream and return the result."""
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
    """Return the address of the workspace of GEMMs on this stream."""
    found = _WORKSPACES.get((device, stream))
    if found is None:
        memory = torch.empty(WORKSPACE, dtype=torch.uint8, device=torch.device("cuda", device))
        found = _WORKSPACES[device, stream] = memory, memory.data_ptr()
    return found[1]


# Measured choices


def key_of(problem: GemmProblem) -> str:
    """Return the key of a problem in the file of measured choices; problems with segments are not measured."""
    return " ".join(map(str, problem[: GemmProblem._fields.index("segments")]))


def choice_file(device: int) -> Path:
    return loader.cache_folder("gemms") / f"{torch.cuda.get_device_name(device).replace(' ', '_')}.json"


@functools.cache
def choices(device: int) -> dict[str, int]:
    """Return the measured choices, by problem, for this version of cuBLASLt."""
    return _saved(choice_file(device)).get(str(_module().cublaslt_version()), {})


def _saved(file: Path) -> dict[str, dict[str, int]]:
    """Return the measured choices by version of cuBLASLt; empty if there is no file. Raises ValueError for other contents."""
    try:
        found = json.loads(file.read_text()) if file.exists() else {}
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise ValueError(
            f"{file} cannot be read as measured choices of GEMMs; remove the file, and measure again with "
            f"python -m dlp.kernels.tune"
        )
    return found


def save_choices(device: int, measured: dict[str, int]) -> Path:
    """Add measured choices to the file of this device, and return the file; choices of other problems stay. Cached choices and
    plans are dropped."""
    file = choice_file(device)
    saved = _saved(file)
    saved.setdefault(str(_module().cublaslt_version()), {}).update(measured)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")  # two processes may write at the same time
    part.write_text(json.dumps(saved, indent=1))
    part.replace(file)
    choices.cache_clear()
    _PLANS.clear()
    return file


# Products


def room_for(a: Tensor, shape: tuple[int, int], dtype: torch.dtype, options: GemmLaunchOptions) -> Tensor:
    """Return the tensor for a result of this shape and dtype: `options.out` if shape, dtype and layout fit, else a new
    tensor. The result of a GEMM of codes must also be aligned."""
    out = options.out
    if out is not None and out.shape == shape and out.dtype == dtype and out.is_contiguous():
        if a.itemsize > 1 or out.data_ptr() % ALIGNMENT == 0:
            return out
    return a.new_empty(shape, dtype=dtype)


def product(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: Scales | None = None, *, bias: Tensor | None = None,
    accumulate: Tensor | None = None, alpha: Tensor | None = None, options: GemmLaunchOptions = DEFAULT_OPTIONS,
) -> Tensor:  # fmt: skip
    """Multiply A [rows, C] by B [cols, C], scaled and summed in fp32, plus bias [cols] -> [rows, cols], rounded once to
    `out_dtype`; or add the product to `accumulate` and return `accumulate`. A bias or accumulator that cuBLASLt does not
    support is added afterwards."""
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
    """Return whether cuBLASLt can add the bias: the bias has the 16-bit dtype of the result and is aligned. For other dtypes
    the product would be rounded before the sum."""
    aligned = (2 * bias.shape[0] | bias.data_ptr()) % ALIGNMENT == 0
    return bias.dtype == out_dtype != torch.float32 and bias.is_contiguous() and aligned


def _takes_output(out: Tensor, rounds: bool) -> bool:
    """Return whether cuBLASLt can add to the accumulator: rows are contiguous and aligned, and the dtype is fp32, or
    bf16 with `rounds`. With a bf16 accumulator the product is rounded before the sum, which only `rounds` allows."""
    stride, step = out.stride()
    aligned = (out.itemsize * stride | out.data_ptr()) % ALIGNMENT == 0
    fits = out.dtype == torch.float32 or (rounds and out.dtype == torch.bfloat16)
    return fits and step == 1 and stride >= out.shape[1] and aligned


def product_fp8(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, scales: Scales, *, bias: Tensor | None = None,
    accumulate: Tensor | None = None, options: GemmLaunchOptions = DEFAULT_OPTIONS,
) -> Tensor:  # fmt: skip
    """Return `product` of FP8 codes of any size and alignment; operands are zero-padded to the alignment of cuBLASLt."""
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
    """Return `product` of FP8 codes [rows, C] or packed FP4 codes [rows, C/2] of any size, with scales in tiles of 128x4. C
    and the rows of B are zero-padded to multiples of 32; the tiles hold zero scales for the padding."""
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
    """Return codes [lines, C] zero-padded for tensor cores: C to a multiple of `along`, the stride of lines to a multiple of
    16, the number of lines to a multiple of `lines`."""
    below, right = -codes.shape[0] % lines, -codes.shape[1] % along
    if below or right:
        return F.pad(codes.view(torch.uint8), (0, right, 0, below)).view(codes.dtype)
    stride, step = codes.stride()
    adjacent = step == 1 and stride >= codes.shape[1] and (stride | codes.data_ptr()) % ALIGNMENT == 0
    return codes if adjacent else codes.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(codes.dtype)


def _padded_scales(scales: Scales, a: Tensor, b: Tensor) -> Scales:
    """Return the scales, zero-padded to the number of lines of the padded operands."""

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
    """Return compact scales of 128x128 tiles, or of 1x128 blocks, in the layout of BLOCK_2D or BLOCK_1D; as a view if the
    scales have that layout."""
    lines, across = scale_inv.shape
    if tile and scale_inv.stride() == (across + -across % 4, 1):
        return scale_inv
    if tile:
        return reference.block_2d_layout(scale_inv)
    if scale_inv.stride() == (1, lines + -lines % 4):
        return scale_inv.t()
    if scale_inv.stride(0) == 1 and lines % 4 == 0:  # a slice of the lines of a larger operand
        return copied_rows(scale_inv.t())
    return transposed(scale_inv) if lines % 4 == 0 else reference.block_1d_layout(scale_inv)
