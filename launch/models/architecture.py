"""Interface between the launcher and models.

`Decoder` implements the families of `[model]`, and `Pretrained` models of transformers; `Config.architecture` chooses.
Members of `Architecture`:

    from the settings alone       vocab, head_dim, blocks, settings, rules, flops_per_token
    for models on meta device     meta, groups, check, describe, estimated
    for the model of a rank       share_sequences, prepare, allocate, initialize, logits, loss, block_modules
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dlp
from dlp import Context, LayerGroup, Plan
from launch.models.attention import Choice, Documents


class Architecture(ABC):
    """Model of a `[model]` section. Three class attributes are constants of the implementation.

    fsdp_casts    whether FSDP casts parameters to the dtype of activations, even with one data-parallel rank
    cuts_logits   whether logits are sharded over tp in the vocabulary dimension
    equal_blocks  whether blocks with equal rows in the plan save equal activations
    """

    fsdp_casts = False
    cuts_logits = True
    equal_blocks = True

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Number of rows of the embedding."""

    @property
    @abstractmethod
    def head_dim(self) -> int | None:
        """Size of an attention head, from which the launcher chooses the attention backend; None if the model chooses it."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[str]:
        """Names of the transformer blocks in order. Each block is one FSDP unit, and is compiled and recomputed as one."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Settings that define the parameters, by name; a checkpoint with other values does not load."""

    def rules(self, config: Any) -> Iterator[tuple[bool, str]]:
        """Yield (whether the rule holds, message) for each rule that cannot be checked without torch. The other rules are in
        rules.py."""
        yield from ()

    @abstractmethod
    def flops_per_token(self, sequence: int) -> float:
        """Return the model FLOPs of one token, forward and backward, without recomputation."""

    @abstractmethod
    def meta(self, dtype: torch.dtype) -> nn.Module:
        """Return the model on the meta device, with fp32 parameters. `dtype`: dtype of activations."""

    @abstractmethod
    def groups(self, tp: int, sequence_parallel: bool) -> list[LayerGroup]:
        """Return the layer groups that shard the model over tp; layer groups of the config may override them."""

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raise ValueError if the model cannot run with the styles and sequence_parallel of `plan`."""

    @abstractmethod
    def describe(self, tp: int) -> list[str]:
        """Return lines about the model for the printed plan."""

    @abstractmethod
    def prepare(self, model: nn.Module, attention: Choice) -> None:
        """Set the attention backend of a converted model, and fuse its blocks if the settings say so."""

    def share_sequences(self, model: nn.Module, context: Context) -> None:
        """Restrict positions and attention to this rank's shard of each sequence. Called before conversion if cp > 1. This
        default raises ValueError, for models that do not support cp."""
        raise ValueError(
            f"cp = {context.ranks}: the attention of {type(model).__name__} reads whole sequences: use cp = 1"
        )

    @abstractmethod
    def allocate(self, model: nn.Module, device: torch.device) -> None:
        """Allocate the parameters and buffers of a converted and sharded model on `device`. Parameters are uninitialized,
        buffers have their values."""

    @abstractmethod
    def initialize(self, model: nn.Module, seed: int) -> None:
        """Set the initial weights of an allocated model."""

    @abstractmethod
    def logits(self, model: nn.Module, tokens: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the logits [B*S, V] of tokens [B, S]; [B*S, V/tp] if `cuts_logits`."""

    @abstractmethod
    def estimated(self, tp: int, layers: int, dtype: torch.dtype) -> tuple[nn.Module, Sequence[str]]:
        """Return an unconverted model on the meta device, and the names of its blocks, for the estimate of saved activations.

        tp      the model gets the heads, features and vocabulary of one of `tp` ranks, if the architecture supports it
        layers  number of blocks, if `equal_blocks`
        dtype   dtype of activations
        """

    def loss(
        self, model: nn.Module, batch: Sequence[Tensor], mesh: DeviceMesh, z_loss: float = 0.0, invariant: bool = False
    ) -> Tensor:
        """Return the loss of a microbatch, summed over its tokens. `batch`: tokens, targets, then the fields of `Documents` if
        attention restarts at documents."""
        tokens, targets, *documents = batch
        logits = self.logits(model, tokens, Documents(*documents) if documents else None)
        return dlp.cross_entropy(
            logits, targets, mesh if self.cuts_logits else None, z_loss=z_loss, invariant=invariant
        )

    def block_modules(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of a model in order."""
        return [model.get_submodule(name) for name in self.blocks]


def block_of(name: str, blocks: Collection[str]) -> str:
    """Return the name in `blocks` of the block that contains the module or parameter `name`; "" if no block does."""
    parts = name.split(".")
    return next((found for i in range(1, len(parts) + 1) if (found := ".".join(parts[:i])) in blocks), "")
