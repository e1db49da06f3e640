"""`Gemm`, a GEMM of quantized operands, and the look-up of its kernel in the kernel table.

    D [rows, N] = alpha A [rows, C] @ B [N, C].T (+ bias, + accumulate)       contraction C, last in both operands

A `Gemm` has all arguments except A, so that a strategy can call it once, or several times with chunks of rows of A.

The kernel is looked up in `dlp.kernels.table` by the `gemm_kind` of both formats, once for each pair of formats and device. If
a format has a method `gemm`, this method runs. Pairs without an entry in the table decode both operands. Status of a GEMM:
"native": the GEMM unit of the device reads the format; "emulated": decoded values, or the plain-torch reference; "own": the
method `gemm` of a format. The device "cuda" is a GPU for which the kernels of dlp cannot be built: its GEMMs run torch.
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

    fast_accumulation   True: sum FP8 products in the tensor core only, which is faster, but has about 14 bits. False: add
                        partial sums in fp32
    out_dtype           dtype of the result; None: the dtype of the activations
    wire                format in which ranks send contributions, if the result is summed over ranks: "hp", "bf16" or "fp8"
    tuned               run the algorithm that `dlp.kernels.tune` measured as the fastest, if measured
    allow_reference     allow the slow plain-torch reference on a GPU, if there is no kernel
    """

    fast_accumulation: bool = False
    out_dtype: torch.dtype | None = None
    wire: str = "hp"
    tuned: bool = True
    allow_reference: bool = False


@dataclass(frozen=True)
class Gemm:
    """GEMM D = alpha A @ B.T (+ bias) without A. A call takes A [rows, C] and returns D.

    which        "fprop", "dgrad" or "wgrad"
    b            operand B [N, C]
    out_dtype    dtype of D
    bias         vector [N] that is added to each row of D; None: no bias
    accumulate   fp32 or bf16 tensor to which D is added in place; the call returns this tensor. None: D is a new tensor
    options      options of the recipe
    sms          number of SMs that the kernel may use, so that a collective can use the other SMs; 0: all SMs
    out          tensor of `out_dtype` into which D is written; the call returns this tensor. None: D is allocated
    alpha        factor of the product
    rounds       allow rounding the product to bf16 before it is added to a bf16 `accumulate`
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
    """Return the launch function of the kernel for operands of these formats on a device; None if a format has a method `gemm`.
    Cached."""
    return None if own_gemm(a, b) is not None else table.gemm_kernels(a, b, device).bind(a, b)


@cache
def _takes_options(own: Callable[..., Tensor]) -> bool:
    parameters = inspect.signature(own).parameters.values()
    return any(each.name == "options" or each.kind is each.VAR_KEYWORD for each in parameters)


def _own(gemm: Gemm, a: QuantizedTensor) -> Tensor:
    """Run the method `gemm` of a format. The method has no argument alpha: an alpha other than 1 is applied to the fp32
    product, before bias and `accumulate` are added."""
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
    """Return the dtype in which a GEMM multiplies decoded operands: bf16 or fp32.

    bf16 is exact if both formats factor into bf16 values and scales (`are_factored`), and high-precision operands are in bf16.

    operands   (format, dtype of the payload) of each operand
    """
    narrow = all(not fmt.keeps_source or payload == torch.bfloat16 for fmt, payload in operands)
    return torch.bfloat16 if narrow and are_factored(*[fmt for fmt, _ in operands]) else torch.float32


def own_gemm(a: Format, b: Format) -> Callable[..., Tensor] | None:
    """Return the method `gemm` of the format `a`, or else of the format `b`. None if neither format has this method, or if one
    operand is in high precision: then the other operand is decoded."""
    if a.keeps_source or b.keeps_source:
        return None
    return getattr(a, "gemm", None) or getattr(b, "gemm", None)


def support(a: Format, b: Format, device: str) -> GemmKernels:
    """Return the kernels for operands of these formats on `device`, one of DEVICES."""
    if own_gemm(a, b) is None:
        return table.gemm_kernels(a, b, device)
    return GemmKernels((GemmEntry(name=f"{type(a if hasattr(a, 'gemm') else b).__name__}.gemm"),))


def kernel_name(a: Format, b: Format, device_type: str) -> str:
    """Return the name, as printed in plans, of the kernel for operands of these formats. device_type: "cpu" or "cuda"."""
    return support(a, b, device_kind(device_type)).kernel


def check_kernel(which: str, a: Format, b: Format, device_type: str, options: GemmOptions) -> None:
    """Raise ValueError if the GEMM `which` has no kernel on the GPU, and the options do not allow the plain-torch reference."""
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
            f"cancel only if they are equal: give both operands the same transform with the same signs"
        )
    if a.element == b.element == "e5m2":
        raise ValueError(f"{which}: no unit multiplies E5M2 by E5M2 ({a.name} x {b.name}); make one operand E4M3")
    if a.gemm_kind == b.gemm_kind == "fp8_block_2d":
        raise ValueError(f"{which}: no unit multiplies 128x128 tiles by 128x128 tiles; give one operand block dim 1")
