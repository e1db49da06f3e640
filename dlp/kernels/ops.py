"""All operations of this package under one name. `dlp.kernels.table` lists the kernels of each operation.

On Hopper and Blackwell, amaxes, casts, decoding to bf16, transposes, norms, activations and losses run kernels of this package.
`reference` runs on other devices and for operands without a kernel, with the same bits except for activations and losses, whose
exponentials depend on the device. Casts are in casts.py, casts_blocks.py and casts_fp4.py, operations on codes in codes.py,
functions of GEMMs in gemm_entries.py.
"""

from __future__ import annotations

from dlp.kernels.activations import (
    activation,
    activation_backward,
    gated,
    gated_backward,
    layer_norm,
    layer_norm_backward,
)
from dlp.kernels.casts import (
    amax,
    amax_lines,
    cast_fp8_rowwise,
    cast_fp8_rowwise_batch,
    cast_fp8_rowwise_both,
    cast_fp8_tensor,
    cast_fp8_tensor_batch,
    cast_fp8_tensor_both,
    has_batches,
)
from dlp.kernels.casts_blocks import (
    cast_fp8_block,
    cast_fp8_block_batch,
    cast_fp8_block_both,
    cast_mxfp8,
    cast_mxfp8_batch,
    cast_mxfp8_both,
    empty_block_scales,
    empty_mx_scales,
)
from dlp.kernels.casts_fp4 import amax_nvfp4, amax_nvfp4_both, cast_nvfp4, cast_nvfp4_batch, cast_nvfp4_both
from dlp.kernels.codes import (
    DelayedSlots,
    checksums,
    decode_fp8_block,
    decode_mxfp8,
    decode_nvfp4,
    delayed_updates,
    nvfp4_alpha,
    rounded,
    sum_by_tree,
    sum_in_order,
    swizzle_128x4,
    transpose_codes,
    transpose_e2m1,
)
from dlp.kernels.dispatch import Flags, Launches, Wanted
from dlp.kernels.gate_grads import amax_gate_grads, cast_gate_grads_fp8_block, cast_gate_grads_fp8_tensor
from dlp.kernels.gemm_entries import gemm_hp
from dlp.kernels.grouped import grouped_fp8_rowwise
from dlp.kernels.lazy_activations import Activated, ActivationGrad, GatedBy, GatedGrad, GatedGrads, LayerNormed
from dlp.kernels.lazy_matrix import (
    ACTIVATION_CODES,
    FUSED_DTYPE,
    AddedNormed,
    Gated,
    LazyMatrix,
    Produced,
    RmsNormed,
    Summed,
    stored,
)
from dlp.kernels.loss import log_sum_exp, softmax_gradient
from dlp.kernels.producers import column_sums, rms_norm, rms_norm_backward, swiglu, swiglu_backward
from dlp.kernels.reference import (
    AMAX_ALGORITHMS,
    FLT_MAX,
    FP8_MAX,
    RHT_SIGNS,
    Fp8Scale,
    PhiloxState,
    block_1d_layout,
    block_2d_layout,
    cast_fp8,
    decode_e2m1,
    decode_e8m0,
    decode_fp8,
    delayed_scale,
    delayed_update,
    encode_e2m1,
    encode_e2m1_stochastic,
    encode_e8m0,
    encode_fp8,
    mx_scale,
    nvfp4_block_scale,
    nvfp4_encode_scale,
    nvfp4_stored_amax,
    nvfp4_tensor_scale,
    pack_e2m1,
    pad_scales,
    random_bytes,
    rht16,
    scale_from_amax,
    unpack_e2m1,
    unswizzle_128x4,
    watched,
)
from dlp.kernels.reference.fp8 import Outs, Parts
from dlp.kernels.table import DEFAULT_OPTIONS, GemmLaunchOptions

__all__ = [
    "ACTIVATION_CODES", "AMAX_ALGORITHMS", "Activated", "ActivationGrad", "AddedNormed", "DEFAULT_OPTIONS", "DelayedSlots",
    "FLT_MAX", "FP8_MAX", "FUSED_DTYPE",
    "Flags", "Fp8Scale", "Gated", "GatedBy", "GatedGrad", "GatedGrads", "GemmLaunchOptions", "Launches",
    "LayerNormed", "LazyMatrix", "Outs", "Parts", "PhiloxState", "Produced",
    "RHT_SIGNS", "RmsNormed", "Summed", "Wanted", "activation",
    "activation_backward", "amax", "amax_gate_grads", "amax_lines", "amax_nvfp4", "amax_nvfp4_both", "block_1d_layout",
    "block_2d_layout", "cast_fp8",
    "cast_fp8_block", "cast_fp8_block_batch", "cast_fp8_block_both", "cast_fp8_rowwise", "cast_fp8_rowwise_batch",
    "cast_fp8_rowwise_both", "cast_fp8_tensor", "cast_fp8_tensor_batch", "cast_fp8_tensor_both",
    "cast_gate_grads_fp8_block", "cast_gate_grads_fp8_tensor", "cast_mxfp8",
    "cast_mxfp8_batch", "cast_mxfp8_both", "cast_nvfp4", "cast_nvfp4_batch", "cast_nvfp4_both", "checksums", "column_sums",
    "decode_e2m1", "decode_e8m0", "decode_fp8", "decode_fp8_block", "decode_mxfp8", "decode_nvfp4", "delayed_scale",
    "delayed_update", "delayed_updates", "empty_block_scales", "empty_mx_scales", "encode_e2m1",
    "encode_e2m1_stochastic", "encode_e8m0", "encode_fp8", "gated", "gated_backward", "gemm_hp", "grouped_fp8_rowwise",
    "has_batches", "layer_norm", "layer_norm_backward", "log_sum_exp", "mx_scale",
    "nvfp4_alpha", "nvfp4_block_scale", "nvfp4_encode_scale", "nvfp4_stored_amax",
    "nvfp4_tensor_scale", "pack_e2m1", "pad_scales",
    "random_bytes", "rht16", "rms_norm", "rms_norm_backward", "rounded", "scale_from_amax", "softmax_gradient",
    "stored", "sum_by_tree", "sum_in_order", "swiglu", "swiglu_backward", "swizzle_128x4", "transpose_codes", "transpose_e2m1",
    "unpack_e2m1", "unswizzle_128x4", "watched",
]  # fmt: skip
