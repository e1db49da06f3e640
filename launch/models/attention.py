"""Causal attention over complete rows, or within the documents of a row.

    row        a a a a | b b | c c c c c c       row of tokens packed from three documents
    positions  0 1 2 3   0 1   0 1 2 3 4 5       restart at each document
    starts     0         4     6            12   first token of each document in the flattened rows; last: number of tokens

Within documents, GPUs use `varlen_attn` of torch, which takes `starts` and computes no masked scores, but needs copies of k and
v for grouped heads; CPUs use a mask. Over complete rows, GPUs use a backend of `scaled_dot_product_attention`
(`launch.training.attention_backend`), which accepts grouped heads without copies of k and v.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# torch uses the first backend of a list that supports the shapes. Generation needs the later backends, for example for a prompt
# of one token.
_REST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ORDERS = {"flash": _REST, "cudnn": [SDPBackend.CUDNN_ATTENTION, *_REST]}


class Documents(NamedTuple):
    """Boundaries of documents in tokens [B, S]. A row always begins a new document.

    positions  int64 [B, S], position of each token in its document
    starts     int32 [documents + 1], index of the first token of each document in the flattened tokens, then B*S
    """

    positions: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Choice:
    """Decision about the attention backend over complete rows.

    backend   key of `ORDERS`; None: torch chooses
    reason    reason of the decision, for the plan
    by_head   call the kernel for one head of k and v at a time (see `attend_by_head`)
    """

    backend: str | None
    reason: str
    by_head: bool = False

    def describe(self) -> str:
        """Return the line about attention in the plan."""
        return f"attention: {self.backend or 'chosen by torch'} ({self.reason})"


def attend_by_head(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, backend: str | None) -> Tensor:
    """Compute `attend` with one kernel call per head of k and v. The order of sums in CUDA kernels depends on the number of
    heads; with one head it does not depend on tp."""
    heads = zip(q.chunk(k.shape[1], 1), k.split(1, 1), v.split(1, 1), strict=True)
    return torch.cat([attend(*each, documents, backend) for each in heads], 1)


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None, backend: str | None = None) -> Tensor:
    """Compute causal attention; with `documents`, tokens attend only to tokens of the same document.

    q          [B, heads, S, D]
    k, v       [B, kv heads, S or more, D]; if there are more keys than queries, the queries are the last S tokens
    documents  documents of the tokens; None: complete rows. Ignored if there are more keys than queries
    backend    key of ORDERS, for attention over complete rows; None: torch chooses
    returns    [B, heads, S, D]
    """
    grouped, before = q.shape[1] != k.shape[1], k.shape[2] - q.shape[2]
    if before:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen if len(seen) > 1 else None, enable_gqa=grouped)
    if documents is None:
        with prefer(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if q.is_cuda:
        return _by_lengths(q, k, v, documents.starts)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(documents.positions), enable_gqa=grouped)


def prefer(backend: str | None) -> AbstractContextManager[None]:
    """Return a context in which torch tries the backends of `ORDERS[backend]` in order; None: torch's default order."""
    return nullcontext() if backend is None else sdpa_kernel(ORDERS[backend], set_priority=True)


def mask(positions: Tensor) -> Tensor:
    """Return the mask of causal attention within documents, bool [B, 1, S, S]: True where query i attends to key j."""
    document = (positions == 0).cumsum(-1)
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    return same.tril().unsqueeze(1)


def _by_lengths(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # the import needs the CUDA libraries

    batch, heads, sequence, _ = q.shape
    group = heads // k.shape[1]
    # varlen_attn of torch 2.11 does not support grouped heads
    k, v = (each.repeat_interleave(group, 1) if group > 1 else each for each in (k, v))
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
    out = varlen_attn(q, k, v, starts, starts, sequence, sequence, window_size=(-1, 0))  # window (-1, 0): causal
    assert isinstance(out, Tensor)  # a tuple is returned only if further results are requested
    return out.unflatten(0, (batch, sequence)).transpose(1, 2)
