"""A GEMM as a value, and the table that says which kernel multiplies which formats on which device.

`Gemm` holds everything but the token operand, so that a scheduler may run it once, or chunk by chunk over the rows of
A. D = A @ B.T with the contraction last in both operands.

The kernel is looked up by the kinds of the two formats. A format that brings its own `gemm` runs that; a pair that is
not in the table decodes both operands. Support says what a device does: "native" uses its unit for the format,
"emulated" multiplies decoded values or runs the plain-torch reference, "own" runs the format's GEMM. The device "cuda"
is a GPU on which this package's kernels cannot be built, so that GEMMs run torch's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import ops
from dlp.kernels.gemms import device_kind
from dlp.quant.tensor import Format, QuantizedTensor

DEVICES = ("cpu", "cuda", "sm_90", "sm_100")
REFERENCE = "reference"


@dataclass(frozen=True)
class GemmOptions:
    """Options of one GEMM. `fast_accumulation`: FP8 products are summed inside the tensor core only (faster, ~14 bits).
    `out_dtype`: of its result, None for the dtype its caller works in. `wire`: what its contributions are carried as where
    its result is summed over ranks. `tuned`: the algorithm is the one measured to be the fastest, where
    `dlp.kernels.tune` has measured. `allow_reference`: the plain-torch reference may multiply on a GPU."""

    fast_accumulation: bool = False
    out_dtype: torch.dtype | None = None
    wire: str = "hp"
    tuned: bool = True
    allow_reference: bool = False


@dataclass(frozen=True)
class Gemm:
    """D = A @ B.T, waiting for A [rows, C]. `accumulate`: add into this fp32 or bf16 tensor and return it. `sms`: run on
    so many multiprocessors of a GPU, so that a collective can have the others; 0 for all."""

    which: str
    b: QuantizedTensor
    out_dtype: torch.dtype
    bias: Tensor | None = None
    accumulate: Tensor | None = None
    options: GemmOptions = GemmOptions()
    sms: int = 0

    def __call__(self, a: QuantizedTensor) -> Tensor:
        return _way(a.format, self.b.format)(self, a)


@dataclass(frozen=True)
class Support:
    """What a device does with a pair of formats: `status` native, emulated or own, and the kernel's name."""

    status: str
    kernel: str


@dataclass(frozen=True)
class Kernel:
    """How a pair of formats is multiplied, and what that is on each of DEVICES; `inexact`: the same where decoded values
    are not exact in bf16, if that makes a difference."""

    run: Callable[[Gemm, QuantizedTensor], Tensor]
    on: dict[str, Support]
    inexact: dict[str, Support] | None = None


@functools.cache
def _way(a: Format, b: Format) -> Callable[[Gemm, QuantizedTensor], Tensor]:
    """What multiplies operands of these formats."""
    own = own_gemm(a, b)
    return _kernel(a, b).run if own is None else partial(_own, own, _takes_options(own))


def _takes_options(own: Callable[..., Tensor]) -> bool:
    parameters = inspect.signature(own).parameters.values()
    return any(each.name == "options" or each.kind is each.VAR_KEYWORD for each in parameters)


def _own(own: Callable[..., Tensor], takes_options: bool, gemm: Gemm, a: QuantizedTensor) -> Tensor:
    finish: dict[str, Any] = {"out_dtype": gemm.out_dtype, "bias": gemm.bias, "accumulate": gemm.accumulate}
    if takes_options:
        finish["options"] = gemm.options
    return own(gemm.which, a, gemm.b, **finish)


def _finish(gemm: Gemm) -> dict[str, Any]:
    """What every kernel takes beside its operands."""
    options = gemm.options
    how = ops.How(options.fast_accumulation, options.tuned, options.allow_reference, gemm.sms)
    return {"out_dtype": gemm.out_dtype, "bias": gemm.bias, "accumulate": gemm.accumulate, "how": how}


def _hp(gemm: Gemm, a: QuantizedTensor) -> Tensor:
    return ops.gemm_hp(a.payload, gemm.b.payload, **_finish(gemm))


def decoded_dtype(*operands: tuple[Format, torch.dtype]) -> torch.dtype:
    """What operands, each a format and the dtype of its payload, are multiplied in once they are decoded: bf16 where that is
    exact for all."""
    exact = all(fmt.bf16_exact or payload == torch.bfloat16 for fmt, payload in operands)
    return torch.bfloat16 if exact else torch.float32


def _decode(gemm: Gemm, a: QuantizedTensor) -> Tensor:
    dtype = decoded_dtype(*((q.format, q.payload.dtype) for q in (a, gemm.b)))
    return ops.gemm_hp(a.dequantize(dtype), gemm.b.dequantize(dtype), **_finish(gemm))


def _fp8(op: Callable[..., Tensor], gemm: Gemm, a: QuantizedTensor) -> Tensor:
    return op(a.parts[0], gemm.b.parts[0], a.parts[1], gemm.b.parts[1], **_finish(gemm))


def _blocks(op: Callable[..., Tensor], gemm: Gemm, a: QuantizedTensor, **more: Any) -> Tensor:
    """A's and B's parts in turn (a_codes, b_codes, a_scale, b_scale, ...), then both blocks."""
    parts = [part for pair in zip(a.parts, gemm.b.parts, strict=True) for part in pair]
    return op(*parts, a.format.block, gemm.b.format.block, **_finish(gemm), **more)


def _fp8_block(gemm: Gemm, a: QuantizedTensor) -> Tensor:
    return _blocks(ops.gemm_fp8_block, gemm, a, power_of_two=a.format.bf16_exact and gemm.b.format.bf16_exact)


def _on(status: str, *kernels: str) -> dict[str, Support]:
    """The reference on a CPU, and `status` with a kernel for each other device."""
    gpus = (Support(status, kernel) for kernel in kernels)
    return dict(zip(DEVICES, (Support("emulated", REFERENCE), *gpus), strict=True))


_NATIVE_HP = {**_on("native", "cublas mm", "cublaslt hp", "cublaslt hp"), "cpu": Support("native", "torch mm")}
DECODES = "decode"  # how the names begin of kernels that decode their operands first
_DECODE_BF16 = _on("emulated", *[f"{DECODES} + bf16 mm"] * 3)
_FALLBACK = Kernel(_decode, {device: Support("emulated", f"{DECODES} + mm") for device in DEVICES})


_HOPPER_BLOCKS = {"sm_90": Support("native", "cublaslt fp8 blocks")}
_MX_BLOCKS = {"sm_100": Support("native", "cublaslt mxfp8 block-scaled")}
_NVFP4_BLOCKS = {"sm_100": Support("native", "cublaslt nvfp4 block-scaled")}
_BLOCK = Kernel(
    _fp8_block, _DECODE_BF16 | _HOPPER_BLOCKS | _MX_BLOCKS, _on("emulated", *[REFERENCE] * 3) | _HOPPER_BLOCKS
)
_BY_TILE = {"sm_90": Support("native", "cublaslt fp8 blocks, large: gemm_sm90")}
_BLOCK_BY_TILE = Kernel(_fp8_block, _BLOCK.on | _BY_TILE, (_BLOCK.inexact or {}) | _BY_TILE)
_TABLE: dict[tuple[str, str], Kernel] = {
    ("hp", "hp"): Kernel(_hp, _NATIVE_HP),
    ("fp8_tensor", "fp8_tensor"): Kernel(
        partial(_fp8, ops.gemm_fp8_tensor), _on("native", "torch._scaled_mm", "cublaslt fp8 tn", "cublaslt fp8 tn")
    ),
    ("fp8_rowwise", "fp8_rowwise"): Kernel(
        partial(_fp8, ops.gemm_fp8_rowwise),
        _on("native", "torch._scaled_mm + scales", "cublaslt fp8 rowwise", "cublaslt fp8 tn + scales"),
    ),
    ("fp8_block_1d", "fp8_block_1d"): _BLOCK,
    ("fp8_block_1d", "fp8_block_2d"): _BLOCK_BY_TILE,
    ("fp8_block_2d", "fp8_block_1d"): _BLOCK,
    ("mxfp8", "mxfp8"): Kernel(partial(_blocks, ops.gemm_mxfp8), _DECODE_BF16 | _MX_BLOCKS),
    ("nvfp4", "nvfp4"): Kernel(partial(_blocks, ops.gemm_nvfp4), _DECODE_BF16 | _NVFP4_BLOCKS),
}


def own_gemm(a: Format, b: Format) -> Callable[..., Tensor] | None:
    """The `gemm` that one of the formats brings, A's before B's; None where neither does, or where one operand is in high
    precision: the other one is decoded then."""
    if a.keeps_source or b.keeps_source:
        return None
    return getattr(a, "gemm", None) or getattr(b, "gemm", None)


def _kernel(a: Format, b: Format) -> Kernel:
    return _TABLE.get((a.gemm_kind, b.gemm_kind), _FALLBACK)


def support(a: Format, b: Format, device: str) -> Support:
    """What `device`, one of DEVICES, does with operands of these formats."""
    if own_gemm(a, b) is not None:
        return Support("own", f"{type(a if hasattr(a, 'gemm') else b).__name__}.gemm")
    kernel = _kernel(a, b)
    exact = a.bf16_exact and b.bf16_exact
    return (kernel.on if exact or kernel.inexact is None else kernel.inexact)[device]


def kernel_name(a: Format, b: Format, device_type: str) -> str:
    """The kernel that multiplies operands of these formats on this device ("cpu", "cuda"), as plans print it."""
    return support(a, b, device_kind(device_type)).kernel


def check_kernel(which: str, a: Format, b: Format, device_type: str, options: GemmOptions) -> None:
    """ValueError, naming GEMM `which`, where the plain-torch reference would multiply on a GPU and may not."""
    if device_type != "cpu" and not options.allow_reference and kernel_name(a, b, device_type) == REFERENCE:
        raise ValueError(
            f"{which}: {device_kind(device_type)} has no kernel for {a.name} x {b.name}, and the plain-torch reference is "
            f"slow; choose another option of the recipe, or set its allow_reference = true"
        )


def check_pair(which: str, a: Format, b: Format) -> None:
    """ValueError, naming GEMM `which`, for two formats that must not meet in one."""
    if a.basis != b.basis:
        raise ValueError(
            f"{which}: one operand is transformed along the contraction ({a.name} x {b.name}) and the other is not; "
            f"the transform cancels only if both are"
        )
    if a.element == b.element == "e5m2":
        raise ValueError(f"{which}: no unit multiplies E5M2 by E5M2 ({a.name} x {b.name}); make one operand E4M3")
    if a.gemm_kind == b.gemm_kind == "fp8_block_2d":
        raise ValueError(f"{which}: no unit multiplies 128x128 tiles by 128x128 tiles; give one operand block dim 1")
