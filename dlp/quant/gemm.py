"""GEMM as a value, and look-up of the kernel in the kernel table.

    D [rows, N] = alpha A [rows, C] @ B [N, C].T (+ bias, + accumulate)       contraction last in both operands

A `Gemm` holds all arguments except A, the token operand, so that a strategy may run the GEMM once, or in chunks of rows of A.

The kernel is looked up in `dlp.kernels.table` by the `gemm_kind` of both formats, once for each pair and device. A format with
a method `gemm` runs this method. A pair without a row in the table decodes both operands. The status "native" means the
device's own unit for the format, "emulated" means decoded values or the plain-torch reference, and "own" means the GEMM of a
user's format. The device "cuda" is a GPU on which the kernels of dlp cannot be built: GEMMs run torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dlp.kernels import table
from dlp.kernels.gemm_entries import DECODES, are_factored
from dlp.kernels.reference import finish as gemm_finish
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
    """Options of a recipe for one GEMM.

    fast_accumulation   sum FP8 products inside the tensor core only: faster, about 14 bits
    out_dtype           dtype of the result; None: the dtype of the activations
    wire                codec of contributions if the result is summed over ranks (`dlp.parallel.linear.plan`)
    tuned               run the algorithm that `dlp.kernels.tune` measured as the fastest, if measured
    allow_reference     allow the plain-torch reference on a GPU
    """

    fast_accumulation: bool = False
    out_dtype: torch.dtype | None = None
    wire: str = "hp"
    tuned: bool = True
    allow_reference: bool = False


@dataclass(frozen=True)
class Gemm:
    """GEMM D = alpha A @ B.T as a value; a call takes A [rows, C] and returns D.

    which        fprop, dgrad or wgrad
    b            operand B
    out_dtype    dtype of D
    bias         vector that is added to each row of D
    accumulate   fp32 or bf16 tensor to which D is added; the call returns this tensor
    out          tensor of `out_dtype` for D; the call returns this tensor
    sms          number of SMs, so that a collective can use the other SMs; 0: all
    rounds       allow rounding the product to bf16 before the sum with a bf16 accumulator
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
        launch, options = _launch_of(a.format, self.b.format, DEVICE_AT[a.parts[0].get_device()]), self.options
        if launch is None:
            y = _own(self, a)
        else:
            how = GemmLaunchOptions(
                options.fast_accumulation, options.tuned, options.allow_reference, self.sms, self.out, self.alpha, self.rounds
            )  # fmt: skip
            y = launch(a.parts, self.b.parts, self.out_dtype, self.bias, self.accumulate, how)
        if self.out is None or y is self.out:
            return y
        return self.out.copy_(y)


@table.remembered
def _launch_of(a: Format, b: Format, device: str) -> GemmLaunch | None:
    """Return the cached launch of the kernel that multiplies operands of these formats on a device; None if a format
    defines a method `gemm`."""
    return None if own_gemm(a, b) is not None else table.gemm_kernels(a, b, device).bind(a, b)


@cache
def _takes_options(own: Callable[..., Tensor]) -> bool:
    parameters = inspect.signature(own).parameters.values()
    return any(each.name == "options" or each.kind is each.VAR_KEYWORD for each in parameters)


def _own(gemm: Gemm, a: QuantizedTensor) -> Tensor:
    """Run the GEMM of a format."""
    own = own_gemm(a.format, gemm.b.format)
    assert own is not None
    finish: dict[str, Any] = {"out_dtype": gemm.out_dtype, "bias": gemm.bias, "accumulate": gemm.accumulate}
    if _takes_options(own):
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
    """Return the method `gemm` of the format of A, or else of B. None without such a method, and if one operand is in high
    precision: the other operand is then decoded."""
    if a.keeps_source or b.keeps_source:
        return None
    return getattr(a, "gemm", None) or getattr(b, "gemm", None)


def support(a: Format, b: Format, device: str) -> GemmKernels:
    """Return the kernels for operands of these formats on `device`, one of DEVICES."""
    if own_gemm(a, b) is None:
        return table.gemm_kernels(a, b, device)
    return GemmKernels((GemmEntry(name=f"{type(a if hasattr(a, 'gemm') else b).__name__}.gemm"),))


def kernel_name(a: Format, b: Format, device_type: str) -> str:
    """Return the printed name of the kernel for operands of these formats on a device type, "cpu" or "cuda"."""
    return support(a, b, device_kind(device_type)).kernel


def check_kernel(which: str, a: Format, b: Format, device_type: str, options: GemmOptions) -> None:
    """Raise ValueError if only the plain-torch reference could run GEMM `which` on a GPU, and the options do not allow the
    reference."""
    if device_type != "cpu" and not options.allow_reference and kernel_name(a, b, device_type) == REFERENCE:
        raise ValueError(
            f"{which}: {device_kind(device_type)} has no kernel for {a.name} x {b.name}, and the plain-torch reference is "
            f"slow; choose another option of the recipe, or set allow_reference = true"
        )


def check_pair(which: str, a: Format, b: Format) -> None:
    """Raise ValueError for two formats that GEMM `which` cannot multiply."""
    if a.basis != b.basis:
        raise ValueError(
            f"{which}: the operands have different transforms along the contraction ({a.name} x {b.name}); the transforms "
            f"cancel "
            f"only if both operands have the same transform with the same signs"
        )
    if a.element == b.element == "e5m2":
        raise ValueError(f"{which}: no unit multiplies E5M2 by E5M2 ({a.name} x {b.name}); make one operand E4M3")
    if a.gemm_kind == b.gemm_kind == "fp8_block_2d":
        raise ValueError(f"{which}: no unit multiplies 128x128 tiles by 128x128 tiles; give one operand block dim 1")
