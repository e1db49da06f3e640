"""Functions of the GEMM table (`dlp.kernels.table`): D = A @ B.T for each pair of operands, from plain torch to tensor cores.

    operand          parts                                                 block
    hp               values bf16 or fp32 [rows, C]                         -
    fp8_tensor       FP8 codes [rows, C], scale_inv fp32 []                whole matrix
    fp8_tensor_siblings  codes and scale_inv of several fp8_tensor operands, one after another; the GEMM multiplies operand i
                     of A by operand i of B, and sums the products
    fp8_rowwise      FP8 codes [rows, C], scale_inv fp32 [rows]            (1, 0)
    int8_rowwise     int8 codes [rows, C], scale_inv fp32 [rows]           (1, 0)
    int8_zero_point  as int8_rowwise, and zero_point int8 [rows]           (1, 0)
    fp8_block_1d     FP8 codes [rows, C], scale_inv fp32 [rows, C/128]     (1, 128)
    fp8_block_2d     FP8 codes [rows, C], scale_inv fp32 [rows/128, C/128] (128, 128)
    mxfp8            FP8 codes [rows, C], E8M0 bytes, one per block        (1 or 32, 32)
    nvfp4            packed codes [rows, C/2], E4M3 scales, amax fp32 []   (1 or 16, 16)
    int4_group       packed codes [rows, C/2], scale_inv fp32 [rows, C/n],  (1, n), n = 32, 64, 128, ...
                     and zero_point int8 of the same shape, or none

A block is (rows, elements along C) with one scale; 0: the whole row. Scales are compact. If a tensor core reads another layout,
the GEMM rearranges the scales right before the launch. On Hopper and Blackwell most GEMMs run cuBLASLt (`gemms`); large GEMMs
of FP8 blocks on Hopper run `gemm_sm90`. Blackwell's tensor cores multiply MXFP8 and NVFP4 codes; other GPUs multiply values
decoded to bf16, which is exact. GEMMs run torch if the kernels of this package cannot be built. If the GEMM itself cannot add
the bias or the accumulator, `reference.finish` adds it in fp32.

A function takes the arguments of a `GemmLaunch`, which begin with the parts of A and B. If the row of the table has
`layouts=True`, the function takes two more arguments before these: the layouts of A and B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import cuda_codes, gemm_sm90, gemm_sum_sm90, gemms, reference
from dlp.kernels.codes import decode_fp8_block, decode_mxfp8, decode_nvfp4, nvfp4_alpha, rounded, swizzle_128x4
from dlp.kernels.gemms import BLOCK_1D, BLOCK_2D, FP4, MX_BLOCKS, NVFP4_BLOCKS, ROWWISE, Scales
from dlp.kernels.reference import finish
from dlp.kernels.registry import (
    DEFAULT_OPTIONS,
    GEMM,
    NATIVE,
    GemmEntry,
    GemmLaunch,
    GemmLaunchOptions,
    OperandLayout,
    checked,
    device_of,
    entries,
    gemm_kernels,
    remembered,
)

FP8_CORES = (8, 9)  # lowest compute capability with FP8 tensor cores
GEMV_TOKENS = 8  # largest number of rows of x for the kernel of int4 weights
DECODES = "decode"  # prefix of the printed names of kernels that decode operands first
Parts = Sequence[Tensor]
Finish = tuple[torch.dtype, Tensor | None, Tensor | None, GemmLaunchOptions]  # out_dtype, bias, accumulate, options


class Layout(NamedTuple):
    """`OperandLayout` of values in high precision."""

    gemm_kind: str
    block: tuple[int, int]
    bf16_exact: bool
    factors: str | None = None

    def decode_parts(self, parts: Parts) -> Tensor:
        return parts[0].float()

    def factor_parts(self, parts: Parts) -> tuple[Tensor, Tensor | None]:
        return parts[0], None


HP = Layout("hp", (1, 1), False)


def of_layouts(
    run: Callable[..., Tensor], wrap: Callable[[GemmLaunch], GemmLaunch] | None = None
) -> Callable[[OperandLayout, OperandLayout], GemmLaunch]:
    """Return a function that binds the layouts of A and B to a GEMM and returns the launch, wrapped by `wrap`."""

    def prepare(a: OperandLayout, b: OperandLayout) -> GemmLaunch:
        launch = partial(run, a, b)
        return launch if wrap is None else wrap(launch)

    return prepare


# High precision


def torch_mm(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None,
    options: GemmLaunchOptions, alpha: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply in high precision by torch; `alpha`, fp32 [], multiplies the sums. If operands, bias and result have one 16-bit
    dtype, and there is no accumulator and no alpha, torch.addmm adds the bias, in fp32 and with the bits of F.linear."""
    narrow = out_dtype in (torch.bfloat16, torch.float16)
    if narrow and bias is not None and accumulate is None and alpha is None:
        if a[0].dtype == b[0].dtype == bias.dtype == out_dtype:
            return torch.addmm(bias, a[0], b[0].t())
    wide = out_dtype if bias is None and accumulate is None and alpha is None else torch.float32
    product = reference.gemm_hp(a[0], b[0], wide)
    return finish(product if alpha is None else product * alpha, out_dtype, bias, accumulate)


def cublaslt_hp(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None,
    options: GemmLaunchOptions, alpha: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply in high precision by cuBLASLt. Operands with different dtypes are multiplied in the wider dtype; a separate
    kernel rounds a result whose dtype is neither the dtype of the operands nor fp32."""
    left, right = a[0], b[0]
    if left.dtype != right.dtype:
        dtype = torch.promote_types(left.dtype, right.dtype)
        left, right = left.to(dtype), right.to(dtype)
    result = out_dtype if accumulate is None else accumulate.dtype
    if result in (left.dtype, torch.float32):
        return gemms.product(left, right, out_dtype, bias=bias, accumulate=accumulate, alpha=alpha, options=options)
    return finish(gemms.product(left, right, torch.float32, alpha=alpha, options=options), out_dtype, bias, accumulate)


# Decoded operands: values that are exact in bf16, and a scale


def _factored(
    multiply: Any, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Tensor | None, accumulate: Tensor | None,
    options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Multiply operands that are given as values [rows, C], exact in bf16, and an optional scale, fp32 [] or [rows]: sum bf16
    products, then multiply by the scales."""
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


# Any pair: operands are decoded


def are_factored(*layouts: OperandLayout) -> bool:
    """Return whether each operand decodes to values that are exact in bf16, times a scale by which the sums can be multiplied
    afterwards. Operands in high precision are accepted too: they are not decoded."""
    return all(layout.gemm_kind == "hp" or layout.factors is not None for layout in layouts)


def is_one_factored(a: OperandLayout, b: OperandLayout) -> bool:
    """Return whether `are_factored` holds and at least one operand is in high precision."""
    return are_factored(a, b) and "hp" in (a.gemm_kind, b.gemm_kind)


def _decode_factored(
    multiply: GemmLaunch, a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, *problem: Any
) -> Tensor:
    """Decode operands for which `are_factored` holds to bf16 values and scales, and multiply these."""
    (left, a_scale), (right, b_scale) = a_layout.factor_parts(a), b_layout.factor_parts(b)
    a_factors = (left,) if a_scale is None else (left, a_scale)
    b_factors = (right,) if b_scale is None else (right, b_scale)
    return multiply(a_factors, b_factors, *problem)


factored_by_torch = partial(_decode_factored, checked(partial(_factored, torch_mm)))
factored_by_cublaslt = partial(_decode_factored, checked(partial(_factored, cublaslt_hp), scales_inside=True))


def decoded_by_hp(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Tensor | None,
    accumulate: Tensor | None, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Decode both operands to fp32 and multiply the values by `gemm_hp`."""
    left, right = a_layout.decode_parts(a), b_layout.decode_parts(b)
    return gemm_hp(left, right, out_dtype=out_dtype, bias=bias, accumulate=accumulate, options=options)


@remembered
def _hp_on(device: str) -> GemmLaunch:
    return gemm_kernels(HP, HP, device).bind(HP, HP)


def gemm_hp(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype, bias: Tensor | None = None, accumulate: Tensor | None = None,
    options: GemmLaunchOptions = DEFAULT_OPTIONS,
) -> Tensor:  # fmt: skip
    """Multiply a [rows, C] by b [cols, C], bf16 or fp32 -> [rows, cols] in `out_dtype`, plus bias [cols], added in fp32; or add
    the product to `accumulate` [rows, cols] and return `accumulate`.

    Raises ValueError for different contractions.
    """
    return _hp_on(device_of(a))((a,), (b,), out_dtype, bias, accumulate, options)


# References in plain torch

fp8_tensor_reference = reference.gemm_launch(reference.gemm_fp8_tensor)
fp8_rowwise_reference = reference.gemm_launch(reference.gemm_fp8_rowwise)
mxfp8_reference = reference.gemm_launch(reference.gemm_mxfp8)
nvfp4_reference = reference.gemm_launch(reference.gemm_nvfp4)


# FP8, one scale per tensor or per row


def fp8_tensor_by_torch(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: GemmLaunchOptions
) -> Tensor:
    wide = torch.float32 if bias is not None or accumulate is not None else out_dtype
    result = _scaled_mm(a[0], b[0], a[1], b[1], wide, options.fast_accumulation)
    return finish(result, out_dtype, bias, accumulate)


def _scaled_mm(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, fast_accumulation: bool
) -> Tensor:
    """Multiply FP8 codes a [rows, C] and b [cols, C] with scalar scales -> [rows, cols] by `torch._scaled_mm`, zero-padded to
    multiples of 16. Raises ValueError for a GPU without FP8 tensor cores."""
    if torch.cuda.get_device_capability(a.device) < FP8_CORES:
        raise ValueError(
            f"{torch.cuda.get_device_name(a.device)} has no FP8 tensor cores, which need compute capability 8.9: use a "
            f"recipe that multiplies decoded values on this GPU (mxfp8, nvfp4), or bf16"
        )
    result = torch._scaled_mm(
        _pad_to_16(a), _pad_to_16(b).t(), scale_a=a_scale_inv, scale_b=b_scale_inv, out_dtype=out_dtype,
        use_fast_accum=fast_accumulation,
    )  # fmt: skip
    return result[: a.shape[0], : b.shape[0]]


def _pad_to_16(codes: Tensor) -> Tensor:
    """Return codes [rows, C] zero-padded to multiples of 16 in both dimensions; a zero code is the value 0."""
    rows, cols = (-size % 16 for size in codes.shape)
    if rows == cols == 0:
        return codes.contiguous()
    return F.pad(codes.view(torch.uint8), (0, cols, 0, rows)).view(codes.dtype)


def fp8_tensor_by_cublaslt(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: GemmLaunchOptions
) -> Tensor:
    scales = Scales(a[1], b[1])
    return gemms.product_fp8(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


def is_sum(a: Parts, b: Parts, *problem: Any) -> bool:
    return gemm_sum_sm90.takes(a, b, *problem)


def fp8_sum_in_registers(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: GemmLaunchOptions
) -> Tensor:
    """Multiply fp8_tensor_siblings: sum the products in one launch."""
    return gemm_sum_sm90.product(a, b, out_dtype, options)


def fp8_sum_in_memory(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: GemmLaunchOptions
) -> Tensor:
    """Multiply fp8_tensor_siblings: multiply one pair after another by cuBLASLt, and accumulate in fp32."""
    total, each = None, options._replace(out=None)
    for i in range(0, len(a), 2):
        scales = Scales(a[i + 1], b[i + 1])
        total = gemms.product_fp8(a[i], b[i], torch.float32, scales, accumulate=total, options=each)
    assert total is not None
    return rounded(total, out_dtype) if bias is accumulate is None else finish(total, out_dtype, bias, accumulate)


def fp8_rowwise_on_hopper(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: GemmLaunchOptions
) -> Tensor:
    """Multiply rowwise FP8 by cuBLASLt, which applies both vectors of scales."""
    scales = Scales(a[1], b[1], ROWWISE, ROWWISE)
    return gemms.product_fp8(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


def _fp8_rowwise_by_sums(
    multiply: GemmLaunch, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any,
    options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Multiply codes by tensor cores, and apply the vectors of scales to the fp32 result."""
    one = gemms.one(a[0].device)
    sums = multiply((a[0], one), (b[0], one), torch.float32, None, None, options)
    return finish(sums.mul_(a[1][:, None]).mul_(b[1]), out_dtype, bias, accumulate)


fp8_rowwise_by_torch = partial(_fp8_rowwise_by_sums, fp8_tensor_by_torch)
fp8_rowwise_on_blackwell = partial(_fp8_rowwise_by_sums, fp8_tensor_by_cublaslt)


# Integers, one scale per row


def _int8_rowwise(
    sums: Callable[[Tensor, Tensor], Tensor], a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any,
    options: Any,
) -> Tensor:  # fmt: skip
    zeros = {name: part for name, parts in (("a_zero", a), ("b_zero", b)) for part in parts[2:]}
    product = reference.gemm_int8_rowwise(a[0], b[0], a[1], b[1], sums, **zeros)
    return finish(product, out_dtype, bias, accumulate)


def _int8_sums_on_gpu(a: Tensor, b: Tensor) -> Tensor:
    """Return int32 sums by torch, zero-padded: torch needs more than 16 rows, and multiples of 8 for columns and C."""
    (rows, contraction), cols = a.shape, b.shape[0]
    along = -contraction % 8
    left = F.pad(a, (0, along, 0, max(17 - rows, 0))) if along or rows < 17 else a
    right = F.pad(b, (0, along, 0, -cols % 8)) if along or cols % 8 else b
    return reference.int8_sums(left, right)[:rows, :cols]


int8_rowwise_reference = partial(_int8_rowwise, reference.int8_sums)
int8_rowwise_by_torch = partial(_int8_rowwise, _int8_sums_on_gpu)


# Few tokens, and integers of 4 bits with one scale per group


def is_int4_group(a: OperandLayout, b: OperandLayout) -> bool:
    return (a.gemm_kind, b.gemm_kind) == ("hp", "int4_group")


def are_few_tokens(
    a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any, accumulate: Any, options: GemmLaunchOptions
) -> bool:
    """Return whether `int4_group_gemv` supports these parts and options: 1 to 8 rows of bf16, K a multiple of 32, parts
    contiguous and aligned, default `alpha` and `sms`."""
    x, codes = a[0], b[0]
    few = 1 <= len(x) <= GEMV_TOKENS and x.dtype == torch.bfloat16 and x.shape[1] > 0 and x.shape[1] % 32 == 0
    lies = all(each.is_contiguous() for each in (x, *b)) and (x.data_ptr() | codes.data_ptr()) % 16 == 0
    return few and lies and len(codes) > 0 and options.alpha == 1.0 and not options.sms


def int4_group_gemv(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Tensor | None,
    accumulate: Tensor | None, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Multiply few tokens by packed int4 codes in one launch. The kernel writes bf16 if `out_dtype` is bf16 and there is no
    bias and no accumulator; otherwise the kernel writes fp32, and `finish` adds."""
    narrow = out_dtype == torch.bfloat16 and bias is None and accumulate is None
    y = torch.empty(len(a[0]), len(b[0]), dtype=torch.bfloat16 if narrow else torch.float32, device=a[0].device)
    cuda_codes.int4_gemv(a[0], b[0], b[1], b[2] if len(b) > 2 else None, y)
    return y if narrow else finish(y, out_dtype, bias, accumulate)


# Blocks: decoded values, the reference, then tensor cores of Hopper and Blackwell


def _decoded(
    decode: Callable[..., Tensor], multiply: Callable[..., Tensor], a_layout: OperandLayout, b_layout: OperandLayout, a: Parts,
    b: Parts, *more: Any,
) -> Tensor:  # fmt: skip
    """Decode operands to bf16, which is exact, and multiply. NVFP4 operands are decoded without their amaxes; the sums are
    multiplied by the factor `nvfp4_alpha` of both amaxes."""
    values = [decode(q[0], q[1], layout.block, dtype=torch.bfloat16) for q, layout in ((a, a_layout), (b, b_layout))]
    alpha = {"alpha": nvfp4_alpha(a[2], b[2])} if len(a) > 2 else {}
    return multiply(values[:1], values[1:], *more, **alpha)


fp8_block_decoded_by_torch = partial(_decoded, decode_fp8_block, torch_mm)
mxfp8_decoded_by_torch = partial(_decoded, decode_mxfp8, torch_mm)
mxfp8_decoded_by_cublaslt = partial(_decoded, decode_mxfp8, cublaslt_hp)
nvfp4_decoded_by_torch = partial(_decoded, decode_nvfp4, torch_mm)
nvfp4_decoded_by_cublaslt = partial(_decoded, decode_nvfp4, cublaslt_hp)


def are_exact(a: OperandLayout, b: OperandLayout) -> bool:
    return a.bf16_exact and b.bf16_exact


def _block_scaled(a: Parts, b: Parts, a_layout: OperandLayout, b_layout: OperandLayout, mode: int) -> Scales:
    """Rearrange compact scale bytes into the layout of block-scaled tensor cores. `mode`: scale mode of both operands."""
    a_tiles = swizzle_128x4(a[1], len(a[0]), a_layout.block[0])
    return Scales(a_tiles, swizzle_128x4(b[1], len(b[0]), b_layout.block[0]), mode, mode)


def fp8_block_reference(
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
    """Raise ValueError if the reference would multiply on a GPU without `allow_reference`."""
    if a.is_cuda and not options.allow_reference:
        raise ValueError(
            f"{torch.cuda.get_device_name(a.device)} has no kernel for this GEMM, and the plain-torch reference is slow: "
            f"choose another option of the recipe, or set allow_reference = true"
        )


def fp8_block_as_mxfp8(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Multiply FP8 blocks with power-of-two scales as MXFP8: a block of 128 is four MXFP8 blocks with the same scale."""
    left, right = ((q[0], reference.mx_from_block_scales(q[1], a[0].shape[1])) for q in (a, b))
    scales = _block_scaled(left, right, a_layout, b_layout, MX_BLOCKS)
    return gemms.product_blocks(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


def _hopper_scales(a: Parts, b: Parts, a_layout: OperandLayout, b_layout: OperandLayout) -> Scales:
    """Return scales of blocks in the layout of Hopper's GEMMs; most scales have this layout already."""
    tiled = a_layout.block[0] > 1, b_layout.block[0] > 1
    modes = [BLOCK_2D if tile else BLOCK_1D for tile in tiled]
    return Scales(gemms.block_scales(a[1], tiled[0]), gemms.block_scales(b[1], tiled[1]), *modes)


def fp8_block_on_hopper(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Multiply FP8 blocks by cuBLASLt: Hopper's tensor cores sum 128 products to about 14 bits, and each of these sums is
    scaled and added in fp32."""
    scales = _hopper_scales(a, b, a_layout, b_layout)
    return gemms.product_fp8(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


def is_large(a: Parts, b: Parts, *problem: Any) -> bool:
    return gemm_sm90.takes(a[0], b[0], *problem)


def fp8_block_by_tile(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    scales = _hopper_scales(a, b, a_layout, b_layout)
    return gemm_sm90.product(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


def mxfp8_on_blackwell(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    scales = _block_scaled(a, b, a_layout, b_layout, MX_BLOCKS)
    return gemms.product_blocks(a[0], b[0], out_dtype, scales, bias=bias, accumulate=accumulate, options=options)


def nvfp4_on_blackwell(
    a_layout: OperandLayout, b_layout: OperandLayout, a: Parts, b: Parts, out_dtype: torch.dtype, bias: Any,
    accumulate: Any, options: GemmLaunchOptions,
) -> Tensor:  # fmt: skip
    """Multiply NVFP4 by block-scaled tensor cores, and apply the amaxes to the fp32 accumulator."""
    scales, alpha = _block_scaled(a, b, a_layout, b_layout, NVFP4_BLOCKS), nvfp4_alpha(a[2], b[2])
    return gemms.product_blocks(
        a[0].view(FP4), b[0].view(FP4), out_dtype, scales, bias=bias, accumulate=accumulate, alpha=alpha,
        options=options,
    )  # fmt: skip


def entry_named(printed: str) -> GemmEntry | None:
    """Return the entry whose name is first in a printed name (`GemmKernels.kernel`): the entry without a condition, on a GPU
    with kernels. None for an unknown name."""
    name = printed.split(", ")[0]
    on_gpu = (each for device in NATIVE for each in entries(GEMM, device) if isinstance(each, GemmEntry))
    return next((each for each in on_gpu if each.name == name), None)
