"""Families of published models: features, and the mapping of names and settings of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Differences of a family.

    architecture  class of `transformers` that reads the family
    qkv_bias      q, k and v have biases
    qk_norm       RMSNorm over each head of q and k
    window        a sliding window may be set
    optional      keys of config.json that a file may omit, with the defaults of `transformers`
    nullable      keys of config.json that may be null
    fixed         keys of config.json for which only one value is supported
    """

    architecture: str
    optional: tuple[tuple[str, object], ...]
    nullable: tuple[str, ...]
    fixed: tuple[tuple[str, object], ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    window: bool = False


_ALL = (("rms_norm_eps", 1e-6), ("tie_word_embeddings", False))
_KV, _HEAD, _LONGEST = "num_key_value_heads", "head_dim", "max_position_embeddings"
_FIXED = (("hidden_act", "silu"), ("attention_dropout", 0.0))
_NO_BIAS, _NO_WINDOW = (("attention_bias", False), ("mlp_bias", False)), ("use_sliding_window", False)
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", (*_ALL, (_KV, None), (_HEAD, None), (_LONGEST, 2048)), nullable=(_KV, _HEAD),
        fixed=(*_FIXED, *_NO_BIAS),
    ),
    "mistral": Family(
        "MistralForCausalLM", (*_ALL, (_KV, 8), (_HEAD, None), ("sliding_window", 4096), (_LONGEST, 131072)),
        nullable=(_KV, _HEAD, "sliding_window"), fixed=_FIXED, window=True,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", (*_ALL, (_KV, 32), (_HEAD, None), (_LONGEST, 32768)), nullable=(_KV,),
        fixed=(*_FIXED, _NO_WINDOW), qkv_bias=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", (*_ALL, (_KV, 32), (_HEAD, 128), (_LONGEST, 32768)), nullable=(_KV,),
        fixed=(*_FIXED, _NO_WINDOW, ("attention_bias", False)), qk_norm=True,
    ),
}  # fmt: skip
UNSUPPORTED = ("quantization_config", "per_layer_config")  # tables that must be absent or null

# [model] key: config.json key. `launch/weights/hf_config.py` reads settings that are nested in tables or derived.
KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "sliding_window": "sliding_window",
}

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Parameter name here: name in Hugging Face folders. {i} is the number of a block.
NAMES = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": HEAD,
    **{
        f"model.layers.{{i}}.{name}": f"model.layers.{{i}}.{name}"
        for name in (
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            *(f"self_attn.{which}_proj.{part}" for which in "qkv" for part in ("weight", "bias")),
            "self_attn.o_proj.weight",
            *(f"self_attn.{which}_norm.weight" for which in "qk"),
            *(f"mlp.{which}_proj.weight" for which in ("gate", "up", "down")),
        )
    },
}

# Ends of names in folders that are no weights: tables of positions that old folders hold.
UNREAD = ("rotary_emb.inv_freq",)


def their_names(layers: int) -> Iterator[tuple[str, str]]:
    """Yield (our name, Hugging Face name) of all parameters that a model with `layers` blocks may have."""
    for ours, theirs in NAMES.items():
        for i in range(layers) if "{i}" in ours else (0,):
            yield ours.format(i=i), theirs.format(i=i)
