"""Reference implementations of all operations in plain torch: they define the bits of kernels, and run where no kernel runs.

Scale arithmetic is IEEE binary32 with rounding to nearest even and denormals, in the order of the code: one wrong ulp in a
scale changes codes at ties. Casts widen inputs to fp32 before the multiplication by the scale. An amax starts at 0, ignores NaN
and preserves Inf (the semantics of CUDA's fmax). Only `grouped_fp8_rowwise` copies values to the host.

    fp8.py      amax, blocks, scales, E4M3 and E5M2, casts per tensor and block, the update of delayed scales, sums over ranks
    mx.py       E8M0 scales and MXFP8
    fp4.py      E2M1: elements, packing, stochastic rounding and its Philox bits
    nvfp4.py    two-level scales over E2M1, the 16-point Hadamard transform
    producers.py  RMSNorm, its gradient, sums of columns
    activations.py  activations, gates, LayerNorm, their gradients
    loss.py     cross entropy of rows of logits, and its gradient
    checksums.py  sums of the bits of tensors
    layout.py   the scale layouts that GEMM kernels read
    gemm.py     the GEMM of every pair of formats
    wire.py     FP8 codes for contributions of a reduction, and their sum
"""

from dlp.kernels.reference.activations import (
    ACTIVATIONS,
    activation,
    activation_backward,
    gated,
    gated_backward,
    layer_norm,
    layer_norm_backward,
    swiglu,
    swiglu_backward,
)
from dlp.kernels.reference.checksums import checksums
from dlp.kernels.reference.fp4 import (
    PhiloxState,
    decode_e2m1,
    encode_e2m1,
    encode_e2m1_stochastic,
    pack_e2m1,
    philox_4x32,
    random_bytes,
    transpose_e2m1,
    unpack_e2m1,
)
from dlp.kernels.reference.fp8 import (
    AMAX_ALGORITHMS,
    FLT_MAX,
    FP8_MAX,
    Fp8Scale,
    amax,
    amax_lines,
    cast_fp8,
    cast_fp8_block,
    cast_fp8_block_both,
    cast_fp8_rowwise,
    cast_fp8_rowwise_both,
    cast_fp8_tensor,
    cast_fp8_tensor_both,
    decode_fp8,
    decode_fp8_block,
    delayed_scale,
    delayed_update,
    encode_fp8,
    scale_from_amax,
    sum_by_tree,
    sum_in_order,
    watched,
)
from dlp.kernels.reference.gemm import (
    finish,
    gemm_fp8_block,
    gemm_fp8_rowwise,
    gemm_fp8_tensor,
    gemm_fp8_tensor_sum,
    gemm_hp,
    gemm_int4_group,
    gemm_int8_rowwise,
    gemm_launch,
    gemm_mxfp8,
    gemm_nvfp4,
    grouped_fp8_rowwise,
    int8_sums,
    matmul_bf16_exact,
)
from dlp.kernels.reference.layout import (
    block_1d_layout,
    block_2d_layout,
    mx_from_block_scales,
    pad_scales,
    swizzle_128x4,
    unswizzle_128x4,
)
from dlp.kernels.reference.loss import log_sum_exp, softmax_gradient
from dlp.kernels.reference.mx import cast_mxfp8, cast_mxfp8_both, decode_e8m0, decode_mxfp8, encode_e8m0, mx_scale
from dlp.kernels.reference.nvfp4 import (
    RHT_SIGNS,
    cast_nvfp4,
    decode_nvfp4,
    nvfp4_alpha,
    nvfp4_block_scale,
    nvfp4_encode_scale,
    nvfp4_stored_amax,
    nvfp4_tensor_scale,
    rht16,
)
from dlp.kernels.reference.producers import (
    column_sums,
    rms_norm,
    rms_norm_backward,
    sum_parts,
    tile_sums,
)

__all__ = [
    "ACTIVATIONS", "AMAX_ALGORITHMS", "FLT_MAX", "FP8_MAX", "PhiloxState", "Fp8Scale", "RHT_SIGNS", "activation",
    "activation_backward", "amax", "amax_lines", "block_1d_layout", "block_2d_layout",
    "cast_fp8", "cast_fp8_block", "cast_fp8_block_both", "cast_fp8_rowwise", "cast_fp8_rowwise_both", "cast_fp8_tensor",
    "cast_fp8_tensor_both", "cast_mxfp8", "cast_mxfp8_both", "cast_nvfp4", "checksums", "column_sums", "decode_e2m1",
    "decode_e8m0", "decode_fp8", "decode_fp8_block", "decode_mxfp8", "decode_nvfp4", "delayed_scale", "delayed_update",
    "encode_e2m1", "encode_e2m1_stochastic", "encode_e8m0", "encode_fp8", "finish", "gated",
    "gated_backward", "gemm_fp8_block", "gemm_fp8_rowwise", "gemm_int4_group", "gemm_int8_rowwise", "gemm_launch", "int8_sums",
    "gemm_fp8_tensor", "gemm_fp8_tensor_sum", "gemm_hp", "gemm_mxfp8", "gemm_nvfp4", "grouped_fp8_rowwise", "layer_norm",
    "layer_norm_backward", "log_sum_exp", "matmul_bf16_exact",
    "mx_from_block_scales", "mx_scale", "nvfp4_alpha", "nvfp4_block_scale", "nvfp4_encode_scale", "nvfp4_stored_amax",
    "nvfp4_tensor_scale",
    "pack_e2m1", "pad_scales", "philox_4x32", "random_bytes", "rht16", "rms_norm", "rms_norm_backward",
    "scale_from_amax", "softmax_gradient", "sum_by_tree", "sum_in_order", "sum_parts", "swiglu", "swiglu_backward",
    "swizzle_128x4", "tile_sums", "transpose_e2m1", "unpack_e2m1", "unswizzle_128x4", "watched",
]  # fmt: skip
