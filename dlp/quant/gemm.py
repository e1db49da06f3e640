"""A GEMM as a value, and the kernel that the table gives for its formats.

    D [rows, N] = alpha A [rows, C] @ B [N, C].T (+ bias, + accumulate)       contraction last in both operands

A `Gemm` holds everything but A, the token operand, so that a strategy may run it once, or chunk by chunk over rows of A.

The kernel is looked up in `dlp.kernels.table` by the kinds of the two formats, once for each pair and device. A format that has
its own `gemm` runs that; a pair without an entry decodes both operands. Support: "native" uses the device's own unit for the
format, "emulated" multiplies decoded values or runs the plain-torch reference, "own" runs the GEMM of a user's format. The
device "cuda" is a GPU on which this package's kernels cannot be built, so that GEMMs run torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import table
from dlp.kernels.gemm_entries import DECODES, are_factored
from dlp.kernels.gemms import finish as gemm_finish
from dlp.kernels.table import (
    DEVICE_AT,
    DEVICES,
    REFERENCE,
    GemmEntry,
    GemmKernels,
    GemmLaunch,
    GemmLaunchOptions,
    device_kind,
)
from dlp.quant.tensor import Format, QuantizedTensor

__all__ = [
    "DECODES", "DEVICES", "Gemm", "GemmOptions", "check_kernel", "check_pair", "decoded_dtype", "kernel_name", "own_gemm",
    "support",
]  # fmt: skip


@dataclass(frozen=True)
class GemmOptions:
    """The options of a recipe for one GEMM.

    fast_accumulation   FP8 products are summed inside the tensor core only: faster, about 14 bits
    out_dtype           of the result; None: the dtype that the caller works in
    wire                what contributions are carried as where the result is summed over ranks (`dlp.parallel.linear.plan`)
    tuned               run the algorithm that `dlp.kernels.tune` measured as the fastest, where it has measured
    allow_reference     the plain-torch reference may run on a GPU
    """

    fast_accumulation: bool = False
    out_dtype: torch.dtype | None = None
    wire: str = "hp"
    tuned: bool = True
    allow_reference: bool = False


@dataclass(frozen=True)
class Gemm:
    """D = alpha A @ B.T, called with A [rows, C].

    which        fprop, dgrad or wgrad
    b            the operand B
    out_dtype    of D
    bias         added to each row of D
    accumulate   an fp32 or bf16 tensor that D is added to, and which is then returned
    out          a tensor of `out_dtype` that D is written to, and which is then returned
    sms          run on this many multiprocessors, so that a collective has the others; 0: on all
    rounds       the product may be rounded to bf16 before it is added to a bf16 accumulator
    """

    which: str
    b: QuantizedTensor
    out_dtype: torch.dtype
    bias: Tensor | None = None
    accumulate: Tensor | None = None
    options: GemmOptions = GemmOptions()
    sms: int = 0
    out: Tensor | None = None
    alpha: float = 1.0
    rounds: bool = False

    def __call__(self, a: QuantizedTensor) -> Tensor:
        y = _multiply(a.format, self.b.format, DEVICE_AT[a.parts[0].get_device()])(self, a)
        if self.out is None or y is self.out:
            return y
        return self.out.copy_(y)


@table.remembered
def _multiply(a: Format, b: Format, device: str) -> Callable[[Gemm, QuantizedTensor], Tensor]:
    """The function that multiplies operands of these formats on a device, cached."""
    own = own_gemm(a, b)
    if own is not None:
        return partial(_own, own, _takes_options(own))
    return partial(_launch, table.gemm_kernels(a, b, device).bind(a, b))


def _launch(launch: GemmLaunch, gemm: Gemm, a: QuantizedTensor) -> Tensor:
    options = gemm.options
    how = GemmLaunchOptions(
        options.fast_accumulation, options.tuned, options.allow_reference, gemm.sms, gemm.out, gemm.alpha, gemm.rounds
    )  # fmt: skip
    return launch(a.parts, gemm.b.parts, gemm.out_dtype, gemm.bias, gemm.accumulate, how)


def _takes_options(own: Callable[..., Tensor]) -> bool:
    parameters = inspect.signature(own).parameters.values()
    return any(each.name == "options" or each.kind is each.VAR_KEYWORD for each in parameters)


def _own(own: Callable[..., Tensor], takes_options: bool, gemm: Gemm, a: QuantizedTensor) -> Tensor:
    finish: dict[str, Any] = {"out_dtype": gemm.out_dtype, "bias": gemm.bias, "accumulate": gemm.accumulate}
    if takes_options:
        finish["options"] = gemm.options
    if gemm.alpha == 1.0:
        result: Tensor = own(gemm.which, a, gemm.b, **finish)
        return result
    alone = finish | {"out_dtype": torch.float32, "bias": None, "accumulate": None}
    return gemm_finish(own(gemm.which, a, gemm.b, **alone) * gemm.alpha, gemm.out_dtype, gemm.bias, gemm.accumulate)


def decoded_dtype(*operands: tuple[Format, torch.dtype]) -> torch.dtype:
    """Return the dtype in which decoded operands are multiplied: bf16 if the formats `are_factored` and no operand is wider,
    else fp32.

    operands   format of each operand, and dtype of the payload
    """
    narrow = all(not fmt.keeps_source or payload == torch.bfloat16 for fmt, payload in operands)
    return torch.bfloat16 if narrow and are_factored(*[fmt for fmt, _ in operands]) else torch.float32


def own_gemm(a: Format, b: Format) -> Callable[..., Tensor] | None:
    """The `gemm` that one of the formats has, A's before B's. None where neither has one, or where one operand is in high
    precision, so that the other one is decoded."""
    if a.keeps_source or b.keeps_source:
        return None
    return getattr(a, "gemm", None) or getattr(b, "gemm", None)


def support(a: Format, b: Format, device: str) -> GemmKernels:
    """The kernels for operands of these formats on `device`, one of DEVICES; `status` says native, emulated or own, `kernel`
    the name."""
    if own_gemm(a, b) is None:
        return table.gemm_kernels(a, b, device)
    return GemmKernels((GemmEntry(name=f"{type(a if hasattr(a, 'gemm') else b).__name__}.gemm"),))


def kernel_name(a: Format, b: Format, device_type: str) -> str:
    """The name, as plans print it, of the kernel that multiplies operands of these formats on this device type ("cpu",
    "cuda")."""
    return support(a, b, device_kind(device_type)).kernel


def check_kernel(which: str, a: Format, b: Format, device_type: str, options: GemmOptions) -> None:
    """ValueError, naming GEMM `which`, where only the plain-torch reference could multiply on a GPU and the options do not
    allow it."""
    if device_type != "cpu" and not options.allow_reference and kernel_name(a, b, device_type) == REFERENCE:
        raise ValueError(
            f"{which}: {device_kind(device_type)} has no kernel for {a.name} x {b.name}, and the plain-torch reference is "
            f"slow; choose another option of the recipe, or set its allow_reference = true"
        )


def check_pair(which: str, a: Format, b: Format) -> None:
    """ValueError, naming GEMM `which`, for two formats that no GEMM may combine."""
    if a.basis != b.basis:
        raise ValueError(
            f"{which}: one operand is transformed along the contraction ({a.name} x {b.name}) and the other is not, or with "
            f"other signs; the transform cancels only if both are alike"
        )
    if a.element == b.element == "e5m2":
        raise ValueError(f"{which}: no unit multiplies E5M2 by E5M2 ({a.name} x {b.name}); make one operand E4M3")
    if a.gemm_kind == b.gemm_kind == "fp8_block_2d":
        raise ValueError(f"{which}: no unit multiplies 128x128 tiles by 128x128 tiles; give one operand block dim 1")
