"""Recomputation of blocks in backward (activation checkpointing), by torch.utils.checkpoint. Values of `[train] checkpointing`:

    full        a block saves its input, and its complete forward runs again in backward
    selective   results of GEMMs and attention, and operands of wgrad, are saved; pointwise operations run again

`checkpoint` disables the compiler for the functions that it calls, unless they are compiled already. Blocks with full
recomputation are therefore compiled first, and then passed to `checkpoint`.

Selective recomputation uses a dispatch mode of torch that decides for every operation, so its blocks cannot be compiled. A
linear is one opaque operation there (`dlp.parallel.linear.opaque`) that does not run again, so its transfers do not run again
either.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launch.config.sections import Train

# Operations whose results selective recomputation saves
POINTS = frozenset({
    "dlp::linear_fwd", "dlp::quantize_x", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "torch_attn::_varlen_attn",
})  # fmt: skip


def recomputed(train: Train, layers: int) -> list[int]:
    """Return the indices of the recomputed blocks among `layers` blocks: every `recompute_every`-th, or none."""
    return [] if train.checkpointing == "none" else list(range(0, layers, train.recompute_every))


def compiles_blocks(train: Train) -> bool:
    """Return whether all blocks are compiled."""
    return train.compile and train.checkpointing != "selective"


def describe(train: Train) -> list[str]:
    """Return the line of the plan if blocks are not compiled although `[train] compile = true`; otherwise an empty list."""
    if not train.compile or compiles_blocks(train):
        return []
    return [
        'compile: blocks with [train] checkpointing = "selective" run uncompiled, since selective recomputation decides for '
        'every single operation; with "full" and "none" they are compiled'
    ]


def recompute(blocks: Sequence[nn.Module], train: Train) -> None:
    """Set up `train.checkpointing` for every `train.recompute_every`-th block; compile these blocks if
    `compiles_blocks(train)`.

    RNG states are not saved: blocks draw no random numbers, since stochastic rounding uses counters.
    """
    asked: dict[str, Any] = {"context_fn": _contexts} if train.checkpointing == "selective" else {}
    for i in recomputed(train, len(blocks)):
        block = blocks[i]
        forward = torch.compile(block.forward) if compiles_blocks(train) else block.forward
        block.forward = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **asked)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op._schema.name in POINTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
