"""Recomputation in backward of parts of the forward, whose activations are then not saved.

    full        a block keeps its input; all of it runs again
    selective   what GEMMs and attention made is kept, and what linears keep for wgrad; the pointwise rest runs again

Selective recomputation is torch's own: a dispatch mode asks at every operation. Under it a linear is the opaque op that
`dlp.parallel.linear.autograd` defines, so it is one such operation; it is not run again, and nothing is sent again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from launch.config.sections import Train

POINTS = frozenset({
    "dlp::linear_fwd", "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
})  # fmt: skip


def recomputed(train: Train, layers: int) -> list[int]:
    """The blocks that run again, wholly or in part: every n-th."""
    return [] if train.checkpointing == "none" else list(range(0, layers, train.recompute_every))


def recompute(blocks: Sequence[nn.Module], train: Train) -> None:
    """Let blocks run again in backward as `train` asks. They draw no random numbers: those of stochastic rounding are counted,
    not drawn."""
    asked: dict[str, Any] = {"context_fn": _contexts} if train.checkpointing == "selective" else {}
    for i in recomputed(train, len(blocks)):
        block = blocks[i]
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **asked
        )


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op._schema.name in POINTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
