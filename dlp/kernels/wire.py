"""FP8 codes for contributions of a reduction: CUDA kernels (csrc/wire.cu), or the plain-torch reference with the same bits,
except for the payload of a NaN."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from dlp.kernels import cuda
from dlp.kernels.launches import launch
from dlp.kernels.reference import wire as reference
from dlp.kernels.reference.wire import BLOCK, E4M3, LEAST_AMAX, Own
from dlp.kernels.registry import operation


def takes_pack_fp8(x: Tensor) -> bool:
    return x.dtype in cuda.INPUTS


def takes_sum_fp8(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype, own: Own | None = None) -> bool:
    return dtype in cuda.INPUTS


def _blocks(features: int) -> int:
    return -(-features // BLOCK)


pack_fp8 = operation(reference.pack_fp8)


def pack_fp8_kernel(x: Tensor) -> tuple[Tensor, Tensor]:
    x, (*lead, features) = x.contiguous(), x.shape
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale_inv = torch.empty((*lead, _blocks(features)), device=x.device)
    job = (x.data_ptr(), prod(lead), features, codes.data_ptr(), scale_inv.data_ptr())
    launch("pack_fp8_wire", x, job, LEAST_AMAX, x.dtype == torch.float32)
    return codes, scale_inv


sum_fp8 = operation(reference.sum_fp8)


def sum_fp8_kernel(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype, own: Own | None = None) -> Tensor:
    index, own_codes, own_scale = own or (0, codes[0], scale_inv[0])
    assert codes[0].is_contiguous() and scale_inv[0].is_contiguous()
    assert own_codes.is_contiguous() and own_scale.is_contiguous()
    ranks, *lead, features = codes.shape
    out = torch.empty((*lead, features), dtype=dtype, device=codes.device)
    job = (codes.data_ptr(), codes.stride(0), scale_inv.data_ptr(), scale_inv.stride(0), out.data_ptr(), ranks,
           prod(lead), features, own_codes.data_ptr(), own_scale.data_ptr(), index)  # fmt: skip
    launch("sum_fp8_wire", codes, job, dtype == torch.float32)
    return out
