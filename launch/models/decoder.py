"""Architecture of the model families of `[model]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from dlp import Context, LayerGroup, Plan
from launch.models.architecture import Architecture
from launch.models.attention import Choice, Documents
from launch.models.initial_weights import init_weights
from launch.models.modules import Llama
from launch.models.parallel import check_plan, describe_fused, fuse, parallel_groups, set_attention, set_context
from launch.models.settings import Model


def settings_of(model: Model) -> dict[str, Any]:
    """Return the settings of `[model]` that define the parameters; they must be equal in checkpoint and run."""
    return {key: value for key, value in asdict(model).items() if key != "fused"}


def flops_per_token(model: Model, sequence: int) -> float:
    """Return the model FLOPs of one token, forward and backward, without recomputation: 6 x matmul parameters + attention.

    Each matmul parameter costs 2 FLOPs in forward and 4 in backward. The embedding is a lookup and does not count; the head
    counts, tied or not. Attention scores and their product with v cost 4 x sequence x heads x head_dim FLOPs per block in
    forward and twice as many in backward, together 12 x sequence x heads x head_dim. As in PaLM (arXiv 2204.02311, appendix B),
    masked positions are not subtracted, so that MFU is comparable with published numbers.
    """
    q_size, kv_size = model.heads * model.head_dim, model.kv_heads * model.head_dim
    block = model.hidden * (2 * q_size + 2 * kv_size + 3 * model.ffn)
    matmul = model.layers * block + model.vocab * model.hidden
    return 6.0 * matmul + 12.0 * model.layers * q_size * sequence


class Decoder(Architecture):
    """Architecture of a model family with the sizes of `[model]`; see `Architecture` for the methods."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def vocab(self) -> int:
        return self.model.vocab

    @property
    def head_dim(self) -> int:
        return self.model.head_dim

    @property
    def blocks(self) -> Sequence[str]:
        return [f"model.layers.{i}" for i in range(self.model.layers)]

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.model)

    def flops_per_token(self, sequence: int) -> float:
        return flops_per_token(self.model, sequence)

    def meta(self, dtype: torch.dtype) -> Llama:
        with torch.device("meta"):
            return Llama(self.model, dtype)

    def groups(self, tp: int, sequence_parallel: bool) -> list[LayerGroup]:
        return parallel_groups(self.model, sequence_parallel)

    def check(self, plan: Plan) -> None:
        check_plan(plan, self.model)

    def describe(self, tp: int) -> list[str]:
        return describe_fused(self.model)

    def prepare(self, model: nn.Module, attention: Choice) -> None:
        assert isinstance(model, Llama)
        set_attention(model, attention)
        fuse(model)

    def share_sequences(self, model: nn.Module, context: Context) -> None:
        assert isinstance(model, Llama)
        set_context(model, context)

    def allocate(self, model: nn.Module, device: torch.device) -> None:
        model.to_empty(device=device)

    def initialize(self, model: nn.Module, seed: int) -> None:
        assert isinstance(model, Llama)
        init_weights(model, seed)

    def logits(self, model: nn.Module, tokens: Tensor, documents: Documents | None = None) -> Tensor:
        found: Tensor = model(tokens, documents)
        return found

    def estimated(self, tp: int, layers: int, dtype: torch.dtype) -> tuple[nn.Module, Sequence[str]]:
        m = self.model
        own = replace(
            m, layers=layers, heads=m.heads // tp, kv_heads=m.kv_heads // tp, ffn=m.ffn // tp, vocab=m.vocab // tp
        )
        few = Decoder(own)
        return few.meta(dtype), few.blocks
