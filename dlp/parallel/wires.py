"""What the contributions to a sum over ranks are carried as, by the name that recipes and settings use.

    hp      the dtype they have
    bf16    bf16
    fp8     E4M3 with an fp32 scale every 128 features (1.03 bytes an element)

All are exchanged once, summed in fp32 in rank order and rounded once, so a sum has the same bits on every run. A rank's
own contribution is rounded as those of others are: a sum does not depend on which rank adds it up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlp.comm.collectives import AS_IT_IS, Parts, ReduceCodec
from dlp.kernels.wire import pack_fp8, sum_fp8


def _pack_bf16(chunks: Tensor) -> Parts:
    return (chunks.bfloat16(),)


def _sum_fp8(parts: Parts, dtype: torch.dtype) -> Tensor:
    codes, scale_inv = parts
    return sum_fp8(codes, scale_inv, dtype)


WIRES = {"hp": AS_IT_IS, "bf16": ReduceCodec(_pack_bf16, AS_IT_IS.total), "fp8": ReduceCodec(pack_fp8, _sum_fp8)}
