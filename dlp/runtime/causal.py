"""Causal attention of M queries at the last M of N key positions.

    q                [B, heads, M, D]
    k, v             [B, kv heads, N, D], N >= M; query i attends to keys 0 .. N - M + i

The causal mask of most backends of `scaled_dot_product_attention` assumes M = N. For M < N, this file calls cuDNN on
GPUs and the flash kernel of CPUs (`KERNELS`) twice, and merges the two results by the log-sum-exps (lse) of the scores:

    first keys       out_0, lse_0 = attention(q, k[:N-M], v[:N-M]), not causal
    last M keys      out_1, lse_1 = attention(q, k[N-M:], v[N-M:]), causal
    merge            lse = log(exp(lse_0) + exp(lse_1))
                     out = exp(lse_0 - lse) out_0 + exp(lse_1 - lse) out_1, in fp32
    backward         p = exp(q k^T - lse), ds = p (dy v^T - sum(dy out)): with the merged out and lse, the backward of
                     each call gives dk and dv of the keys of this call, and one of the two terms of dq

The flash kernel of GPUs aligns its causal mask with the last keys, and computes M < N in one call if D is a multiple of 8. In
all other cases, `scaled_dot_product_attention` gets the mask as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from dlp.runtime.function import autocast_is_on, in_autocast_dtype

aten = torch.ops.aten
Results = tuple[Tensor, ...]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of M queries at the last M of N key positions.

    For M < N, the backend that `scaled_dot_product_attention` chooses for the last M keys runs, if this file can call the
    backend. Otherwise `scaled_dot_product_attention` gets the mask as a tensor, and chooses again.

    Shape:
        - q: [B, heads, M, D]; k, v: [B, kv heads, N, D], N >= M
        - output: the shape of q
    """
    if autocast_is_on(q):  # the ops of the backends, which are called directly below, do not autocast
        q, k, v = map(in_autocast_dtype, (q, k, v))
    before, grouped = k.shape[2] - q.shape[2], q.shape[1] != k.shape[1]
    if before == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    own = k[:, :, before:], v[:, :, before:]
    backend = backend_of(q, *own, grouped)
    if (q.device.type, backend) == ("cuda", SDPBackend.FLASH_ATTENTION) and q.shape[3] % 8 == 0:
        # The kernel is called directly, because `scaled_dot_product_attention` aligns the mask with the last keys only for a
        # CausalBias, which torch cannot create in a dispatch mode
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return out
    if (q.device.type, backend) in KERNELS:
        merged: Tensor = Merged.apply(q, k, v, KERNELS[q.device.type, backend])
        return merged
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)


def backend_of(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> SDPBackend:
    """Return the backend that `scaled_dot_product_attention` chooses for causal attention of these tensors."""
    # Redispatch to the kernel of the tensor's device, as `scaled_dot_product_attention` does: for fake tensors the dispatcher
    # would call the kernel of the meta device
    key = torch._C._dispatch_key_parse(torch._C._dispatch_key_for_device(q.device.type))
    choose = aten._fused_sdp_choice.default.redispatch
    return SDPBackend(choose(torch._C.DispatchKeySet(key), q, k, v, None, 0.0, True, enable_gqa=grouped))


class Kernel(NamedTuple):
    """Attention kernel of torch, without mask or with the causal mask for equal numbers of queries and keys.

    forward   (q, k, v, causal) -> (out, lse, ...); further results are inputs of the backward
    backward  (dy, (q, k, v), results of the forward, causal) -> dq, dk, dv
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], Results]
    backward: Callable[[Tensor, Results, Results, bool], Results]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Results:
    found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return found[0], found[1], found[6], found[7]  # out, lse, and seed and offset of dropout


def _cudnn_backward(dy: Tensor, qkv: Results, forward: Results, causal: bool) -> Results:
    absent = None, None, None  # attn_bias, cum_seq_q, cum_seq_k
    lengths = qkv[0].shape[2], qkv[1].shape[2]
    run = aten._scaled_dot_product_cudnn_attention_backward
    found: Results = run(dy, *qkv, *forward, *absent, *lengths, 0.0, causal)
    return found


def _flash_for_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Results:
    found: Results = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return found


def _flash_for_cpu_backward(dy: Tensor, qkv: Results, forward: Results, causal: bool) -> Results:
    run = aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: Results = run(dy, *qkv, *forward, 0.0, causal)
    return found


KERNELS = {
    ("cuda", SDPBackend.CUDNN_ATTENTION): Kernel(_cudnn, _cudnn_backward),
    ("cpu", SDPBackend.FLASH_ATTENTION): Kernel(_flash_for_cpu, _flash_for_cpu_backward),
}


class Merged(torch.autograd.Function):
    """Attention by two calls of a `Kernel` and a merge. Shapes as for `causal`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
        (k_0, k_1), (v_0, v_1) = (_parts(each, q) for each in (k, v))
        first = kernel.forward(q, k_0, v_0, False)
        out, lse, *results = kernel.forward(q, k_1, v_1, True)
        out, lse = merge(first[0], first[1], out, lse)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, out, lse, *results)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *forward = ctx.saved_tensors
        (k_0, k_1), (v_0, v_1) = (_parts(each, q) for each in (k, v))
        dq_0, dk_0, dv_0 = ctx.kernel.backward(dy, (q, k_0, v_0), forward, False)
        dq_1, dk_1, dv_1 = ctx.kernel.backward(dy, (q, k_1, v_1), forward, True)
        return dq_0 + dq_1, torch.cat([dk_0, dk_1], 2), torch.cat([dv_0, dv_1], 2), None


def _parts(keys: Tensor, q: Tensor) -> Results:
    """Split keys (or values) [B, kv heads, N, D] into the first N - M and the last M, for M queries."""
    return keys.split((keys.shape[2] - q.shape[2], q.shape[2]), 2)


def merge(out_0: Tensor, lse_0: Tensor, out_1: Tensor, lse_1: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of attention to two disjoint sets of keys.

    Shape:
        - out_0, out_1: [B, heads, M, D]
        - lse_0, lse_1: [B, heads, M] or [B, heads, M, 1], in fp32, or fp64 for fp64 inputs; natural logarithms
        - output: out and lse, in the shapes of out_1 and lse_1; out in the dtype of out_0
    """
    lse = torch.logaddexp(lse_0, lse_1)
    weight_0, weight_1 = ((part - lse).exp().reshape(*out_0.shape[:3], 1) for part in (lse_0, lse_1))
    return torch.addcmul(out_0 * weight_0, out_1, weight_1).to(out_0.dtype), lse
