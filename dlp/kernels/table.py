"""The kernel table: every kernel of this package, as two tables of rows.

    KERNELS    CUDA kernels of the operations of `dlp.kernels.ops`; where no row applies, the plain-torch reference runs
    GEMMS      GEMMs: pair of operands, devices, printed name, function, condition

The first row that applies to a call runs (`dlp.kernels.registry`). An operand of a GEMM is described by the string `gemm_kind`
and by sizes (`OperandLayout`), so that the table does not depend on the classes of formats.

A user registers a kernel in the same form, for an operation or format of dlp or for a user-defined one. Such a kernel has
priority over these rows:

    register(GemmEntry(name="int6 mm", run=int6_gemm, formats=(("int6", "int6"),), devices=("cpu",)))
"""

# ruff: noqa: E501 (a row is one line)

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from dlp.kernels import (
    activations,
    casts,
    casts_blocks,
    casts_fp4,
    codes,
    dispatch,
    gate_grads,
    grouped,
    loss,
    producers,
    wire,
)
from dlp.kernels import gemm_entries as gemm
from dlp.kernels.registry import *  # noqa: F403  (names for users of the table)
from dlp.kernels.registry import DEVICES, NATIVE, GemmEntry, KernelEntry, OperandLayout, checked, register


class Kernel(NamedTuple):
    """Row of KERNELS.

    operation   name of the function in `dlp.kernels.ops`
    run         function that launches the kernel
    takes       condition on the arguments; None: all arguments
    reads       dtypes of the first argument, a matrix; (): any tensor
    prepare     function that prepares one launch for many matrices; None: not available
    devices     names in DEVICES of the devices on which the kernel runs
    name        name of the kernel in printed plans
    """

    operation: str
    run: Callable[..., Any]
    takes: Callable[..., bool] | None = None
    reads: tuple[torch.dtype, ...] = ()
    prepare: Callable[..., Any] | None = None
    devices: tuple[str, ...] = NATIVE
    name: str = "kernel"


class Gemm(NamedTuple):
    """Row of GEMMS.

    pairs      `gemm_kind` of A and of B; ANY: all pairs for which no other row applies
    devices    names in DEVICES of the devices on which the kernel runs
    name       name of the kernel in printed plans
    status     "native": a GEMM unit of the device reads the formats; "emulated": decoded values are multiplied, or plain torch runs
    run        function of `dlp.kernels.gemm_entries`
    layouts    whether the layouts of A and B are the first two arguments of `run`
    exact      condition on the layouts of A and B; None: all
    takes      condition on the arguments of a launch; None: all
    when       short name of the condition `takes`, printed with the name of the kernel
    cublaslt   kind of operands that cuBLASLt multiplies, for `dlp.kernels.tune`: "values", "codes" (codes with scales), "sums" (codes without
               scales, summed in fp32) or "tiles" (codes and scales of a block-scaled tensor core); "": cuBLASLt does not run
    """

    pairs: tuple[tuple[str, str], ...]
    devices: tuple[str, ...]
    name: str
    status: str
    run: Callable[..., Any]
    layouts: bool = False
    exact: Callable[[OperandLayout, OperandLayout], bool] | None = None
    takes: Callable[..., bool] | None = None
    when: str = ""
    cublaslt: str = ""


FLOATS = (torch.bfloat16, torch.float32)
BF16 = (torch.bfloat16,)

# fmt: off
KERNELS = (
    #      operation                     function                                         condition                             dtypes  batch
    Kernel("amax",                       casts.amax_kernel,                               None,                                 FLOATS),
    Kernel("amax_lines",                 casts.amax_lines_kernel,                         None,                                 FLOATS),
    Kernel("cast_fp8_tensor",            casts.cast_fp8_tensor_kernel,                    None,                                 FLOATS, casts.prepare_tensor),
    Kernel("cast_fp8_tensor_both",       casts.cast_fp8_tensor_both_kernel,               None,                                 FLOATS),
    Kernel("cast_fp8_rowwise",           casts.cast_fp8_rowwise_kernel,                   None,                                 FLOATS, casts.prepare_rowwise),
    Kernel("cast_fp8_rowwise_both",      casts.cast_fp8_rowwise_both_kernel,              None,                                 FLOATS),
    Kernel("cast_fp8_block",             casts_blocks.cast_fp8_block_kernel,              casts_blocks.is_known_block,          FLOATS, casts_blocks.prepare_block),
    Kernel("cast_fp8_block_both",        casts_blocks.cast_fp8_block_both_kernel,         casts_blocks.is_known_block,          FLOATS),
    Kernel("cast_mxfp8",                 casts_blocks.cast_mxfp8_kernel,                  casts_blocks.is_known_mx_block,       FLOATS, casts_blocks.prepare_mx),
    Kernel("cast_mxfp8_both",            casts_blocks.cast_mxfp8_both_kernel,             casts_blocks.is_known_mx_block,       FLOATS),
    Kernel("amax_nvfp4",                 casts_fp4.amax_nvfp4_kernel,                     casts_fp4.takes_amax_nvfp4,           FLOATS),
    Kernel("amax_nvfp4_both",            casts_fp4.amax_nvfp4_both_kernel,                None,                                 FLOATS),
    Kernel("cast_nvfp4",                 casts_fp4.cast_nvfp4_kernel,                     casts_fp4.takes_nvfp4,                FLOATS, casts_fp4.prepare_nvfp4),
    Kernel("cast_nvfp4_both",            casts_fp4.cast_nvfp4_both_kernel,                casts_fp4.takes_nvfp4_both,           FLOATS),
    Kernel("amax_gate_grads",            gate_grads.amax_gate_grads_kernel,               gate_grads.takes_gate_grads,          BF16),
    Kernel("cast_gate_grads_fp8_tensor", gate_grads.cast_gate_grads_fp8_tensor_kernel,    gate_grads.takes_cast_tensor,         BF16),
    Kernel("cast_gate_grads_fp8_block",  gate_grads.cast_gate_grads_fp8_block_kernel,     gate_grads.takes_cast_block,          BF16),
    Kernel("decode_fp8_block",           codes.decode_to_bf16_kernel,                     codes.takes_decode),
    Kernel("decode_mxfp8",               codes.decode_to_bf16_kernel,                     codes.takes_decode),
    Kernel("decode_nvfp4",               codes.decode_nvfp4_kernel,                       codes.takes_decode_nvfp4),
    Kernel("transpose_codes",            codes.transpose_codes_kernel,                    codes.is_contiguous),
    Kernel("transpose_e2m1",             codes.transpose_e2m1_kernel,                     codes.is_contiguous),
    Kernel("transposed",                 codes.transposed_kernel,                         codes.takes_transposed),
    Kernel("nvfp4_alpha",                codes.nvfp4_alpha_kernel),
    Kernel("rounded",                    codes.rounded_kernel,                            codes.takes_rounded),
    Kernel("swizzle_128x4",              codes.swizzle_128x4_kernel),
    Kernel("delayed_update",             codes.delayed_update_kernel,                     codes.takes_delayed_update,           (),     codes.prepare_update),
    Kernel("sum_in_order",               codes.sum_in_order_kernel,                       codes.takes_sum_in_order),
    Kernel("sum_by_tree",                codes.sum_by_tree_kernel,                        codes.takes_sum_by_tree),
    Kernel("checksums",                  codes.checksums_kernel,                          codes.takes_checksums),
    Kernel("pack_fp8",                   wire.pack_fp8_kernel,                            wire.takes_pack_fp8),
    Kernel("sum_fp8",                    wire.sum_fp8_kernel,                             wire.takes_sum_fp8),
    Kernel("rms_norm",                   producers.rms_norm_kernel,                       dispatch.is_readable,                 FLOATS),
    Kernel("rms_norm_backward",          producers.rms_norm_backward_kernel,              producers.takes_rms_norm_backward,    FLOATS),
    Kernel("swiglu",                     producers.swiglu_kernel,                         producers.has_kernel,                 FLOATS),
    Kernel("swiglu_backward",            producers.swiglu_backward_kernel,                producers.has_kernel,                 FLOATS),
    Kernel("column_sums",                producers.column_sums_kernel,                    dispatch.is_readable,                 FLOATS),
    Kernel("activation",                 activations.activation_kernel,                   activations.are_readable,             FLOATS),
    Kernel("activation_backward",        activations.activation_backward_kernel,          activations.are_readable,             FLOATS),
    Kernel("gated",                      activations.gated_kernel,                        activations.are_readable,             FLOATS),
    Kernel("gated_backward",             activations.gated_backward_kernel,               activations.are_readable,             FLOATS),
    Kernel("layer_norm",                 activations.layer_norm_kernel,                   activations.takes_norm,               FLOATS),
    Kernel("layer_norm_backward",        activations.layer_norm_backward_kernel,          activations.takes_norm_backward,      FLOATS),
    Kernel("log_sum_exp",                loss.log_sum_exp_kernel,                         dispatch.is_readable,                 FLOATS),
    Kernel("softmax_gradient",           loss.softmax_gradient_kernel,                    dispatch.is_readable,                 FLOATS),
    Kernel("grouped_fp8_rowwise",        grouped.grouped_fp8_rowwise_kernel,              grouped.takes_grouped,                (),     None,                    ("sm_90",), "torch scaled_grouped_mm"),
)

HP, FP8_TENSOR, FP8_ROWWISE = (("hp", "hp"),), (("fp8_tensor", "fp8_tensor"),), (("fp8_rowwise", "fp8_rowwise"),)
INT8, MXFP8, NVFP4 = (("int8_rowwise", "int8_rowwise"),), (("mxfp8", "mxfp8"),), (("nvfp4", "nvfp4"),)
ZEROS = (("int8_zero_point", "int8_rowwise"), ("int8_rowwise", "int8_zero_point"), ("int8_zero_point", "int8_zero_point"))
SIBLINGS = (("fp8_tensor_siblings", "fp8_tensor_siblings"),)
TILES = (("fp8_block_1d", "fp8_block_2d"),)
BLOCKS = (("fp8_block_1d", "fp8_block_2d"), ("fp8_block_1d", "fp8_block_1d"), ("fp8_block_2d", "fp8_block_1d"))
ANY = ()

GEMMS = (
    #    pairs        devices                      printed name                  status      function                         condition, and how cuBLASLt takes part
    Gemm(HP,          ("cpu",),                    "torch mm",                   "native",   gemm.torch_mm),
    Gemm(HP,          ("cuda",),                   "cublas mm",                  "native",   gemm.torch_mm),
    Gemm(HP,          ("sm_90", "sm_100"),         "cublaslt hp",                "native",   gemm.cublaslt_hp,                cublaslt="values"),
    Gemm(FP8_TENSOR,  ("cpu",),                    "reference",                  "emulated", gemm.fp8_tensor_reference),
    Gemm(FP8_TENSOR,  ("cuda",),                   "torch._scaled_mm",           "native",   gemm.fp8_tensor_by_torch),
    Gemm(FP8_TENSOR,  ("sm_90", "sm_100"),         "cublaslt fp8 tn",            "native",   gemm.fp8_tensor_by_cublaslt,     cublaslt="codes"),
    Gemm(SIBLINGS,    ("sm_90",),                  "gemm_sum_sm90",             "native",   gemm.fp8_sum_in_registers,       takes=gemm.is_sum, when="aligned"),
    Gemm(SIBLINGS,    ("sm_90",),                  "cublaslt fp8 tn of each",   "native",   gemm.fp8_sum_in_memory),
    Gemm(FP8_ROWWISE, ("cpu",),                    "reference",                  "emulated", gemm.fp8_rowwise_reference),
    Gemm(FP8_ROWWISE, ("cuda",),                   "torch._scaled_mm + scales",  "native",   gemm.fp8_rowwise_by_torch),
    Gemm(FP8_ROWWISE, ("sm_90",),                  "cublaslt fp8 rowwise",       "native",   gemm.fp8_rowwise_on_hopper,      cublaslt="codes"),
    Gemm(FP8_ROWWISE, ("sm_100",),                 "cublaslt fp8 tn + scales",   "native",   gemm.fp8_rowwise_on_blackwell,   cublaslt="sums"),
    Gemm(INT8,        ("cpu",),                    "reference",                  "emulated", gemm.int8_rowwise_reference),
    Gemm(INT8,        ("cuda", "sm_90", "sm_100"), "torch._int_mm + scales",     "native",   gemm.int8_rowwise_by_torch),
    Gemm(ZEROS,       ("cpu",),                    "reference",                  "emulated", gemm.int8_rowwise_reference),
    Gemm(ZEROS,       ("cuda", "sm_90", "sm_100"), "torch._int_mm + zero points", "native",  gemm.int8_rowwise_by_torch),
    Gemm(TILES,       ("sm_90",),                  "gemm_sm90",                  "native",   gemm.fp8_block_by_tile,          layouts=True, takes=gemm.is_large, when="large"),
    Gemm(BLOCKS,      ("sm_90",),                  "cublaslt fp8 blocks",        "native",   gemm.fp8_block_on_hopper,        layouts=True, cublaslt="codes"),
    Gemm(BLOCKS,      ("sm_100",),                 "cublaslt mxfp8 block-scaled", "native",  gemm.fp8_block_as_mxfp8,         layouts=True, exact=gemm.are_exact, cublaslt="tiles"),
    Gemm(BLOCKS,      ("cuda",),                   "decode + bf16 mm",           "emulated", gemm.fp8_block_decoded_by_torch, layouts=True, exact=gemm.are_exact),
    Gemm(BLOCKS,      ("cpu", "cuda", "sm_100"),   "reference",                  "emulated", gemm.fp8_block_reference,        layouts=True),
    Gemm(MXFP8,       ("cpu",),                    "reference",                  "emulated", gemm.mxfp8_reference,            layouts=True),
    Gemm(MXFP8,       ("cuda",),                   "decode + bf16 mm",           "emulated", gemm.mxfp8_decoded_by_torch,     layouts=True),
    Gemm(MXFP8,       ("sm_90",),                  "decode + bf16 mm",           "emulated", gemm.mxfp8_decoded_by_cublaslt,  layouts=True, cublaslt="values"),
    Gemm(MXFP8,       ("sm_100",),                 "cublaslt mxfp8 block-scaled", "native",  gemm.mxfp8_on_blackwell,         layouts=True, cublaslt="tiles"),
    Gemm(NVFP4,       ("cpu",),                    "reference",                  "emulated", gemm.nvfp4_reference,            layouts=True),
    Gemm(NVFP4,       ("cuda",),                   "decode + bf16 mm",           "emulated", gemm.nvfp4_decoded_by_torch,     layouts=True),
    Gemm(NVFP4,       ("sm_90",),                  "decode + bf16 mm",           "emulated", gemm.nvfp4_decoded_by_cublaslt,  layouts=True, cublaslt="values"),
    Gemm(NVFP4,       ("sm_100",),                 "cublaslt nvfp4 block-scaled", "native",  gemm.nvfp4_on_blackwell,         layouts=True, cublaslt="tiles"),
    Gemm(ANY,         NATIVE,                      "int4 gemv",                 "native",   gemm.int4_group_gemv,            layouts=True, exact=gemm.is_int4_group, takes=gemm.are_few_tokens, when="at most 8 tokens"),
    Gemm(ANY,         ("cpu", "cuda"),             "decode one + mm",            "emulated", gemm.factored_by_torch,          layouts=True, exact=gemm.is_one_factored),
    Gemm(ANY,         ("sm_90", "sm_100"),         "decode one + mm",            "emulated", gemm.factored_by_cublaslt,       layouts=True, exact=gemm.is_one_factored, cublaslt="values"),
    Gemm(ANY,         ("cpu", "cuda"),             "decode + bf16 mm",           "emulated", gemm.factored_by_torch,          layouts=True, exact=gemm.are_factored),
    Gemm(ANY,         ("sm_90", "sm_100"),         "decode + bf16 mm",           "emulated", gemm.factored_by_cublaslt,       layouts=True, exact=gemm.are_factored, cublaslt="values"),
    Gemm(ANY,         DEVICES,                     "decode + fp32 mm",           "emulated", gemm.decoded_by_hp,              layouts=True),
)
# fmt: on


def _entry(row: Gemm) -> GemmEntry:
    check = partial(checked, scales_inside=bool(row.cublaslt))
    # functions for ANY pair are not wrapped in `check`, since they check the decoded operands
    prepare = gemm.of_layouts(row.run, check if row.pairs else None) if row.layouts else None
    return GemmEntry(
        name=row.name, devices=row.devices, formats=row.pairs, status=row.status, run=check(row.run), prepare=prepare,
        layouts=row.exact, takes=row.takes, when=row.when, cublaslt=row.cublaslt, captured=True,
    )  # fmt: skip


# The last row is registered first, because the registry prefers the entry that was registered later.
for entry in (
    *(KernelEntry(**row._asdict(), captured=True) for row in reversed(KERNELS)),
    *map(_entry, reversed(GEMMS)),
):
    register(entry)
