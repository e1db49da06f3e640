"""Recomputation in backward of parts of the forward, whose activations are then not saved.

    full        a block saves its input and runs again completely
    selective   results of GEMMs and attention are saved, and operands of wgrad; pointwise operations run again

Blocks are compiled inside of the recomputation: `checkpoint` turns the compiler off for what it calls, unless the function is
compiled already. Selective recomputation looks at single operations, so its blocks run uncompiled, as the plan says.

Selective recomputation is the mechanism of torch: a dispatch mode decides for every operation. A linear is then one opaque
operation (`dlp.parallel.linear.opaque`), which is not run again, so nothing is sent again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launch.config.sections import Train

POINTS = frozenset({
    "dlp::linear_fwd", "dlp::quantize_x", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "torch_attn::_varlen_attn",
})  # fmt: skip


def recomputed(train: Train, layers: int) -> list[int]:
    """Return the blocks that are recomputed, completely or in part: every n-th."""
    return [] if train.checkpointing == "none" else list(range(0, layers, train.recompute_every))


def compiles_blocks(train: Train) -> bool:
    """Return whether all blocks are compiled."""
    return train.compile and train.checkpointing != "selective"


def describe(train: Train) -> list[str]:
    """Return the line of the plan about blocks that are not compiled although `[train] compile = true`."""
    if not train.compile or compiles_blocks(train):
        return []
    return [
        'compile: blocks with [train] checkpointing = "selective" run uncompiled, since selective recomputation looks at '
        'single operations; "full" and "none" keep them compiled'
    ]


def recompute(blocks: Sequence[nn.Module], train: Train) -> None:
    """Set up recomputation of blocks as `train` says, and compile the blocks that are recomputed completely if `train.compile`.
    Blocks draw no random numbers: stochastic rounding uses counters."""
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
