"""Settings of a model: the section `[model]` of a configuration."""

from dataclasses import dataclass
from typing import Any

from launch.models.families import FAMILIES
from launch.models.rope import SCALINGS, is_scaling
from launch.settings.schema import Rule, Section, choice, flag, integer, number, setting

SCALING = Rule(
    "a table { rope_type = " + " or ".join(f'"{kind}"' for kind in SCALINGS) + ", and its numbers }",
    (dict,),
    is_scaling,
)


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """A decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU. Its shape has no defaults."""

    family: str = setting(
        choice(*FAMILIES), "qwen2 has biases in q, k and v, qwen3 norms of the heads of q and k", "llama"
    )

    layers: int = setting(integer(">= 1"), "transformer blocks")
    hidden: int = setting(integer(">= 1"), "width of the residual stream")
    ffn: int = setting(integer(">= 1"), "width inside the MLP, a multiple of tp")
    heads: int = setting(integer(">= 1"), "query heads, a multiple of tp and of kv_heads")
    kv_heads: int = setting(integer(">= 1"), "key and value heads, a multiple of tp")
    head_dim: int = setting(integer(">= 2"), "width of one head, even for RoPE")
    vocab: int = setting(integer(">= 1"), "rows of the embedding, padded, not smaller than the data's vocabulary")
    rope_theta: float = setting(number("> 0"), "base of the rotary frequencies", 10000.0)
    rope_scaling: dict[str, Any] | None = setting(
        SCALING, "frequencies for longer contexts, as rope_scaling in Hugging Face's config.json", None
    )
    sliding_window: int | None = setting(
        integer(">= 1"), "tokens that attention of the model may see; a sequence may not be longer", None
    )
    norm_eps: float = setting(number("> 0"), "added to the mean square in RMSNorm", 1e-5)
    tie_embeddings: bool = setting(flag(), "the head reads the embedding's weight", False)
    fused: bool = setting(
        flag(),
        "blocks run as sequences of dlp.ops, forward and backward fused; same parameters, other roundings",
        False,
    )
