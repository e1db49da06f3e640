"""Families of published models: features, and names of settings in config.json.

The parameters of `launch.models.modules` have the names of the tensors in Hugging Face folders.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Properties of one model family.

    architecture  class name in `transformers`
    optional      (key, default of `transformers`) of each key that config.json may omit
    nullable      keys of config.json that may be null
    fixed         (key, value) of each key of config.json for which only this value is supported
    qkv_bias      whether q, k and v have biases
    qk_norm       whether RMSNorm normalizes each head of q and k
    window        whether a sliding window may be set
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
UNSUPPORTED = ("quantization_config", "per_layer_config")  # tables of config.json that must be absent or null

# Key of [model] -> key of config.json. `launch/weights/hf_config.py` handles rope_theta and rope_scaling.
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

# Suffixes of tensor names that are ignored: tables of rotary frequencies in old folders, which are not weights.
UNREAD = ("rotary_emb.inv_freq",)
