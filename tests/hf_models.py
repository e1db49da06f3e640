"""Tiny models of any architecture of the library transformers, with random weights, and the losses of training steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH = 64, 2, 8
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "dropout": 0.0, "attn_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def small(config_class: type, **more: Any) -> Any:
    """Return a config with the settings in `more`, and the sizes in SMALL that the config class accepts."""
    known = config_class()
    settings = {name: value for name, value in SMALL.items() if hasattr(known, name)}
    return config_class(**settings | more)


def make(architecture: str, **more: Any) -> nn.Module:
    """Return an fp32 model on the CPU, with the same random weights in each call."""
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, architecture)
    model = cls(small(cls.config_class, **more))
    model.config.use_cache = False
    return model.train()


def losses(model: nn.Module, steps: int = 5) -> list[float]:
    """Run steps of AdamW, each step on different tokens; return the loss of each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    found = []
    for step in range(steps):
        loss = loss_of(model, tokens(step).to(next(model.parameters()).device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
