"""The GEMMs of the table: D = A @ B.T for each pair of operands, from plain torch to the units of a device.

    operand       parts                                                    block
    hp            values bf16 or fp32 [rows, C]                            -
    fp8_tensor    FP8 codes [rows, C], scale_inv fp32 []                   the whole
    fp8_rowwise   FP8 codes [rows, C], scale_inv fp32 [rows]               (1, 0)
    int8_rowwise  int8 codes [rows, C], scale_inv fp32 [rows]              (1, 0)
    fp8_block_1d  FP8 codes [rows, C], scale_inv fp32 [rows, C/128]        (1, 128)
    fp8_block_2d  FP8 codes [rows, C], scale_inv fp32 [rows/128, C/128]    (128, 128)
    mxfp8         FP8 codes [rows, C], E8M0 bytes, one a block             (1 or 32, 32)
    nvfp4         packed codes [rows, C/2], E4M3 scales, amax fp32 []      (1 or 16, 16)

Scales are compact; what a unit reads beyond that is laid out right before it. On Hopper and Blackwell GEMMs run cuBLASLt
(`gemms`), large ones of blocks on Hopper our own kernel (`gemm_sm90`). MXFP8 and NVFP4 run as they are where the GPU has units
for them (Blackwell), elsewhere on values decoded to bf16, which is exact. Where this package's kernels cannot be built, GEMMs
are torch's. Results and sums that a unit does not take are finished in fp32 (`gemms.finish`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import gemm_sm90, gemms, reference
from dlp.kernels.codes import decode_fp8_block, decode_mxfp8, decode_nvfp4, nvfp4_alpha, swizzle_128x4
from dlp.kernels.gemms import BLOCK_1D, BLOCK_2D, FP4, MX_BLOCKS, NVFP4_BLOCKS, ROWWISE, Scales, finish
from dlp.kernels.table import (
    DEVICES,
    GEMM,
    NATIVE,
    REFERENCE,
    GemmEntry,
    GemmLaunch,
    GemmLaunchOptions,
    OperandLayout,
    entries,
    register,
)

FP8_CORES = (8, 9)  # the least compute capability that has them
DECODES = "decode"  # how the names begin of kernels that decode their operands first
Parts = Sequence[Tensor]
Finish = tuple[torch.dtype, Tensor | None, Tensor | None, GemmLaunchOptions]  # out_dtype, bias, accumulate, options


class Layout(NamedTuple):
    """An `OperandLayout` in plain data."""

    gemm_kind: str
    block: tuple[int, int]
    bf16_exact: bool
    factors: str | None = None


HP = Layout("hp", (1, 1), False)
PAIRS = {kind: ((kind, kind),) for kind in ("hp", "fp8_tensor", "fp8_rowwise", "int8_rowwise", "mxfp8", "nvfp4")}
BY_TILE = (("fp8_block_1d", "fp8_block_2d"),)
BLOCKS = (*BY_TILE, ("fp8_block_1d", "fp8_block_1d"), ("fp8_block_2d", "fp8_block_1d"))


def _checked(run: GemmLaunch, scales_inside: bool = False) -> GemmLaunch:
    """The launch with checks: ValueError for operands with different contractions; empty ones, which cuBLASLt refuses, give
    sums of nothing here. `scales_inside`: it multiplies by `options.alpha` itself; else that is done here."""

    @functools.wraps(run)
    def checked(
        a: Parts, b: Parts, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None,
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

    return checked


def _gemm(name: str, devices: tuple[str, ...], formats: Any, status: str, **more: Any) -> Callable[[Any], Any]:
    """Registers a `GemmLaunch` of this package."""

    def enter(run: Any) -> Any:
        checked = _checked(run, bool(more.get("cublaslt")))
        register(
            GemmEntry(name=name, devices=devices, formats=formats, status=status, run=checked, captured=True, **more)
        )
        return run

    return enter


def _gemm_of_layouts(
    name: str, devices: tuple[str, ...], formats: Any, status: str, **more: Any
) -> Callable[[Any], Any]:
    """Registers a GEMM that takes the layouts of A and B before the arguments of a launch."""

    def enter(run: Any) -> Any:
        def prepare(a: OperandLayout, b: OperandLayout) -> GemmLaunch:
            return _checked(partial(run, a, b), bool(more.get("cublaslt")))

        register(
            GemmEntry(
                name=name, devices=devices, formats=formats, status=status, prepare=prepare, captured=True, **more
            )
        )
        return run

    return enter


# High precision


@_gemm("torch mm", ("cpu",), PAIRS["hp"], "native")
@_gemm("cublas mm", ("cuda",), PAIRS["hp"], "native")
def torch_mm(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None,
    options: GemmLaunchOptions, alpha: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`alpha` fp32 [] multiplies the sums."""
    wide = out_dtype if bias is None and accumulate is None and alpha is None else torch.float32
    product = reference.gemm_hp(a[0], b[0], wide)
    return finish(product if alpha is None else product * alpha, out_dtype, bias, accumulate)


@_gemm("cublaslt hp", NATIVE, PAIRS["hp"], "native", cublaslt="values")
def cublaslt_hp(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None,
    options: GemmLaunchOptions, alpha: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """cuBLASLt on operands in high precision: those of two dtypes are multiplied in the wider one; a result in another dtype
    than theirs or fp32 is rounded by a kernel of its own."""
    left, right = a[0], b[0]
    if left.dtype != right.dtype:
        dtype = torch.promote_types(left.dtype, right.dtype)
        left, right = left.to(dtype), right.to(dtype)
    result = out_dtype if accumulate is None else accumulate.dtype
    if result in (left.dtype, torch.float32):
        return gemms.product(left, right, out_dtype, bias=bias, accumulate=accumulate, alpha=alpha, options=options)
    return finish(gemms.product(left, right, torch.float32, alpha=alpha, options=options), out_dtype, bias, accumulate)


# Decoded operands that are exact in bf16 but for a scale


def _factored(
    multiply: Any, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None,
    options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Each operand is values [rows, C] that are exact in bf16, and maybe their scale, fp32 [] or [rows]: bf16 products are
    summed, then multiplied by the scales."""
    (left, *a_scale), (right, *b_scale) = a, b
    whole = [scale for scale in (*a_scale, *b_scale) if not scale.dim()]
    alpha = {"alpha": whole[0] if len(whole) == 1 else whole[0] * whole[1]} if whole else {}
    if len(whole) == len(a_scale) + len(b_scale):
        result: Tensor = multiply((left,), (right,), out_dtype, bias, accumulate, options, **alpha)
        return result
    sums = multiply((left,), (right,), torch.float32, None, None, options, **alpha)
    for scales in (scale[:, None] for scale in a_scale if scale.dim()):
        sums.mul_(scales)
    for scales in (scale for scale in b_scale if scale.dim()):
        sums.mul_(scales)
    return finish(sums, out_dtype, bias, accumulate)


FACTORED = {
    device: _checked(partial(_factored, cublaslt_hp if device in NATIVE else torch_mm), scales_inside=device in NATIVE)
    for device in DEVICES
}


# FP8, one scale a tensor or a row


@_gemm(REFERENCE, ("cpu",), PAIRS["fp8_tensor"], "emulated")
def _fp8_tensor(a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: Any) -> Tensor:
    return finish(reference.gemm_fp8_tensor(a[0], b[0], a[1], b[1]), out_dtype, bias, accumulate)


@_gemm("torch._scaled_mm", ("cuda",), PAIRS["fp8_tensor"], "native")
def _fp8_tensor_by_torch(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: GemmLaunchOptions
) -> Tensor:
    wide = torch.float32 if bias is not None or accumulate is not None else out_dtype
    result = _scaled_mm(a[0], b[0], a[1], b[1], wide, options.fast_accumulation)
    return finish(result, out_dtype, bias, accumulate)


def _scaled_mm(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, fast_accumulation: bool
) -> Tensor:
    """FP8 codes a [rows, C], b [cols, C], scalar scales -> [rows, cols] by the GPU's FP8 tensor cores, through torch; sizes are
    padded to multiples of 16 with zeros. ValueError for a GPU without such units."""
    if torch.cuda.get_device_capability(a.device) < FP8_CORES:
        raise ValueError(
            f"{torch.cuda.get_device_name(a.device)} has no FP8 tensor cores, which come with compute capability 8.9: use a "
            f"recipe that multiplies decoded values there, mxfp8 or nvfp4, or bf16"
        )
    result = torch._scaled_mm(
        _pad_to_16(a), _pad_to_16(b).t(), scale_a=a_scale_inv, scale_b=b_scale_inv, out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )  # fmt: skip
    return result[: a.shape[0], : b.shape[0]]


def _pad_to_16(codes: Tensor) -> Tensor:
    """Zero codes appended to both dimensions of [rows, C] up to multiples of 16; a zero code is the value 0."""
    rows, cols = (-size % 16 for size in codes.shape)
    if rows == cols == 0:
        return codes.contiguous()
    return F.pad(codes.view(torch.uint8), (0, cols, 0, rows)).view(codes.dtype)


@_gemm("cublaslt fp8 tn", NATIVE, PAIRS["fp8_tensor"], "native", cublaslt="codes")
def _fp8_tensor_by_cublaslt(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: GemmLaunchOptions
) -> Tensor:
    scales = Scales(a[1], b[1])
    return gemms.product_fp8(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


@_gemm(REFERENCE, ("cpu",), PAIRS["fp8_rowwise"], "emulated")
def _fp8_rowwise(a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: Any) -> Tensor:
    return finish(reference.gemm_fp8_rowwise(a[0], b[0], a[1], b[1]), out_dtype, bias, accumulate)


@_gemm("cublaslt fp8 rowwise", ("sm_90",), PAIRS["fp8_rowwise"], "native", cublaslt="codes")
def _fp8_rowwise_on_hopper(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: GemmLaunchOptions
) -> Tensor:
    """cuBLASLt applies the two vectors of scales itself."""
    scales = Scales(a[1], b[1], ROWWISE, ROWWISE)
    return gemms.product_fp8(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


def _fp8_rowwise_by_sums(
    multiply: GemmLaunch, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any,
    options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Tensor cores multiply the codes; the vectors of scales are applied to the fp32 result."""
    one = gemms.one(a[0].device)
    sums = multiply((a[0], one), (b[0], one), torch.float32, None, None, options)
    return finish(sums.mul_(a[1][:, None]).mul_(b[1]), out_dtype, bias, accumulate)


_gemm("torch._scaled_mm + scales", ("cuda",), PAIRS["fp8_rowwise"], "native")(
    partial(_fp8_rowwise_by_sums, _fp8_tensor_by_torch)
)
_gemm("cublaslt fp8 tn + scales", ("sm_100",), PAIRS["fp8_rowwise"], "native", cublaslt="sums")(
    partial(_fp8_rowwise_by_sums, _fp8_tensor_by_cublaslt)
)


# Integers, one scale a row


def _int8_rowwise(
    sums: Callable[[Tensor, Tensor], Tensor], a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any,
    options: Any,
) -> Tensor:  # fmt: skip
    return finish(reference.gemm_int8_rowwise(a[0], b[0], a[1], b[1], sums), out_dtype, bias, accumulate)


def _int8_sums_on_gpu(a: Tensor, b: Tensor) -> Tensor:
    """int32 sums by torch, which needs more than 16 rows, and columns and C in multiples of 8: padded with zero codes."""
    (rows, contraction), cols = a.shape, b.shape[0]
    along = -contraction % 8
    left = F.pad(a, (0, along, 0, max(17 - rows, 0))) if along or rows < 17 else a
    right = F.pad(b, (0, along, 0, -cols % 8)) if along or cols % 8 else b
    return reference.int8_sums(left, right)[:rows, :cols]


_gemm(REFERENCE, ("cpu",), PAIRS["int8_rowwise"], "emulated")(partial(_int8_rowwise, reference.int8_sums))
_gemm("torch._int_mm + scales", ("cuda", *NATIVE), PAIRS["int8_rowwise"], "native")(
    partial(_int8_rowwise, _int8_sums_on_gpu)
)


# Blocks: the reference, decoded values, then the units of Hopper and Blackwell


def _decoded(
    decode: Callable[..., Tensor], multiply: Any, a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts,
    *more: Any,
) -> Tensor:  # fmt: skip
    """Operands are decoded to bf16, which is exact but for the amaxes of NVFP4: these multiply the sums."""
    values = [decode(q[0], q[1], layout.block, dtype=torch.bfloat16) for q, layout in ((a, a_layout), (b, b_layout))]
    alpha = {"alpha": nvfp4_alpha(a[2], b[2])} if len(a) > 2 else {}
    return multiply(values[:1], values[1:], *more, **alpha)


def _are_exact(a: OperandLayout, b: OperandLayout) -> bool:
    return a.bf16_exact and b.bf16_exact


def _enter_decoded(formats: Any, decode: Callable[..., Tensor], devices: tuple[str, ...], **more: Any) -> None:
    for device in devices:
        multiply, tuned = (cublaslt_hp, "values") if device in NATIVE else (torch_mm, "")
        enter = _gemm_of_layouts(f"{DECODES} + bf16 mm", (device,), formats, "emulated", cublaslt=tuned, **more)
        enter(partial(_decoded, decode, multiply))


def _block_scaled(a: Parts, b: Parts, a_layout: OperandLayout, b_layout: OperandLayout, mode: int) -> Scales:
    """Compact scale bytes in the layout that the units of a block-scaled GEMM read."""
    a_tiles = swizzle_128x4(a[1], len(a[0]), a_layout.block[0])
    return Scales(a_tiles, swizzle_128x4(b[1], len(b[0]), b_layout.block[0]), mode, mode)


@_gemm_of_layouts(REFERENCE, ("cpu", "cuda", "sm_100"), BLOCKS, "emulated")
def _fp8_block(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    check_reference(a[0], options)
    result = reference.gemm_fp8_block(
        a[0], b[0], a[1], b[1], a_layout.block, b_layout.block,
        power_of_two=a_layout.bf16_exact and b_layout.bf16_exact,
    )  # fmt: skip
    return finish(result, out_dtype, bias, accumulate)


def check_reference(a: Tensor, options: GemmLaunchOptions) -> None:
    """ValueError where the reference would multiply on a GPU and `allow_reference` is not set."""
    if a.is_cuda and not options.allow_reference:
        raise ValueError(
            f"{torch.cuda.get_device_name(a.device)} has no kernel for this GEMM, and the plain-torch reference is slow: "
            f"give the recipe another option, or allow_reference = true"
        )


_enter_decoded(BLOCKS, decode_fp8_block, ("cuda",), layouts=_are_exact)


@_gemm_of_layouts("cublaslt mxfp8 block-scaled", ("sm_100",), BLOCKS, "native", layouts=_are_exact, cublaslt="tiles")
def _fp8_block_as_mxfp8(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Scales of blocks of 128, if they are powers of two, are MXFP8 scales of four blocks each."""
    left, right = ((q[0], reference.mx_from_block_scales(q[1], a[0].shape[1])) for q in (a, b))
    scales = _block_scaled(left, right, a_layout, b_layout, MX_BLOCKS)
    return gemms.product_blocks(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


def _hopper_scales(a: Parts, b: Parts, a_layout: OperandLayout, b_layout: OperandLayout) -> Scales:
    """Scales of blocks in the layout that Hopper's GEMMs read; most are in it already."""
    tiled = a_layout.block[0] > 1, b_layout.block[0] > 1
    modes = [BLOCK_2D if tile else BLOCK_1D for tile in tiled]
    return Scales(gemms.block_scales(a[1], tiled[0]), gemms.block_scales(b[1], tiled[1]), *modes)


@_gemm_of_layouts("cublaslt fp8 blocks", ("sm_90",), BLOCKS, "native", cublaslt="codes")
def _fp8_block_on_hopper(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Hopper's tensor cores sum 128 products to about 14 bits; every 128 of the contraction are promoted to fp32 with their
    scales."""
    scales = _hopper_scales(a, b, a_layout, b_layout)
    return gemms.product_fp8(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


def _is_large(a: Parts, b: Parts, *problem: Any) -> bool:
    return gemm_sm90.takes(a[0], b[0], *problem)


@_gemm_of_layouts("gemm_sm90", ("sm_90",), BY_TILE, "native", takes=_is_large, when="large")
def _fp8_block_by_tile(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    scales = _hopper_scales(a, b, a_layout, b_layout)
    return gemm_sm90.product(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


@_gemm_of_layouts(REFERENCE, ("cpu",), PAIRS["mxfp8"], "emulated")
def _mxfp8(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: Any,
) -> Tensor:  # fmt: skip
    result = reference.gemm_mxfp8(a[0], b[0], a[1], b[1], a_layout.block, b_layout.block)
    return finish(result, out_dtype, bias, accumulate)


_enter_decoded(PAIRS["mxfp8"], decode_mxfp8, ("cuda", "sm_90"))


@_gemm_of_layouts("cublaslt mxfp8 block-scaled", ("sm_100",), PAIRS["mxfp8"], "native", cublaslt="tiles")
def _mxfp8_on_blackwell(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    scales = _block_scaled(a, b, a_layout, b_layout, MX_BLOCKS)
    return gemms.product_blocks(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


@_gemm_of_layouts(REFERENCE, ("cpu",), PAIRS["nvfp4"], "emulated")
def _nvfp4(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: Any,
) -> Tensor:  # fmt: skip
    result = reference.gemm_nvfp4(a[0], b[0], a[1], b[1], a[2], b[2], a_layout.block, b_layout.block)
    return finish(result, out_dtype, bias, accumulate)


_enter_decoded(PAIRS["nvfp4"], decode_nvfp4, ("cuda", "sm_90"))


@_gemm_of_layouts("cublaslt nvfp4 block-scaled", ("sm_100",), PAIRS["nvfp4"], "native", cublaslt="tiles")
def _nvfp4_on_blackwell(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Block-scaled FP4 units; the amaxes are applied to the fp32 accumulator."""
    scales, alpha = _block_scaled(a, b, a_layout, b_layout, NVFP4_BLOCKS), nvfp4_alpha(a[2], b[2])
    return gemms.product_blocks(
        a[0].view(FP4), b[0].view(FP4), out_dtype, scales, bias=bias, accumulate=accumulate, alpha=alpha,
        options=options,
    )  # fmt: skip


def entry_named(printed: str) -> GemmEntry | None:
    """The entry that takes whatever others do not, by its printed name (`GemmKernels.kernel`) on a GPU with kernels; None for
    an unknown name."""
    name = printed.split(", ")[0]
    on_gpu = (each for device in NATIVE for each in entries(GEMM, device) if isinstance(each, GemmEntry))
    return next((each for each in on_gpu if each.name == name), None)
