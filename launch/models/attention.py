"""Causal attention, over whole rows or within the documents that a row holds.

    row        a a a a | b b | c c c c c c       a row of tokens packed from three documents
    positions  0 1 2 3   0 1   0 1 2 3 4 5       begin anew with each
    starts     0         4     6            12   where documents begin in the flattened rows, and the end of all

Within documents, on GPUs: torch's kernel for sequences of differing lengths, which takes `starts` and computes nothing that
is masked. On CPUs: a mask.

Over whole rows, on GPUs, `[train] attention` chooses between the backends of `scaled_dot_product_attention`;
`launch.training.attention_backend` decides "auto", and the plan names the backend. All of them take grouped heads without
copies of k and v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# The first backend that can run the shapes is taken, so that shapes of generation, such as a prompt of one token, run as well.
_REST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ORDERS = {"flash": _REST, "cudnn": [SDPBackend.CUDNN_ATTENTION, *_REST]}


class Documents(NamedTuple):
    """Where the documents of tokens [B, S] lie. positions: int64 [B, S]; starts: int32 [documents + 1]. What a row begins
    with counts as the beginning of a document."""

    positions: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Choice:
    """Backend of attention over whole rows: a key of ORDERS, or None, which leaves the choice to torch; and the reason."""

    backend: str | None
    reason: str

    def describe(self) -> str:
        """Line of the plan."""
        return f"attention: {self.backend or 'chosen by torch'} ({self.reason})"


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None, backend: str | None = None) -> Tensor:
    """q [B, heads, S, D], k and v [B, kv heads, S or more, D] -> [B, heads, S, D]. No token sees a later one, nor, where
    `documents` are given, one of another document. Fewer queries than keys are those of the last tokens. backend: a key of
    ORDERS for attention over whole rows; None: torch chooses."""
    grouped, before = q.shape[1] != k.shape[1], k.shape[2] - q.shape[2]
    if before:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen if len(seen) > 1 else None, enable_gqa=grouped)
    if documents is None and backend is not None:
        with sdpa_kernel(ORDERS[backend], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if q.is_cuda:
        return _by_lengths(q, k, v, documents.starts)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(documents.positions), enable_gqa=grouped)


def mask(positions: Tensor) -> Tensor:
    """Which token sees which: bool [B, 1, S, S]."""
    document = (positions == 0).cumsum(-1)
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    return same.tril().unsqueeze(1)


def _by_lengths(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # needs CUDA's libraries

    batch, heads, sequence, _ = q.shape
    group = heads // k.shape[1]
    k, v = (
        each.repeat_interleave(group, 1) if group > 1 else each for each in (k, v)
    )  # torch 2.11 has no grouped heads here
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
    out = varlen_attn(q, k, v, starts, starts, sequence, sequence, window_size=(-1, 0))  # (-1, 0): causal
    assert isinstance(out, Tensor)  # a pair where more was asked for
    return out.unflatten(0, (batch, sequence)).transpose(1, 2)
