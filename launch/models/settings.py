"""Settings of a model: the section `[model]` of a configuration."""

from dataclasses import dataclass
from typing import Any, ClassVar

from launch.models.families import FAMILIES
from launch.models.rope_scaling import SCALINGS, is_scaling
from launch.settings.schema import Rule, Section, choice, flag, integer, number, setting, text

SCALING = Rule(
    "a table { rope_type = " + " or ".join(f'"{kind}"' for kind in SCALINGS) + ", and the numbers of this type }",
    (dict,),
    is_scaling,
)


@dataclass(frozen=True, kw_only=True)
class PretrainedModel(Section):
    """Model of transformers. If `folder` is set, all other keys of `[model]` must be left out."""

    folder: str = setting(
        text("a folder"),
        "folder with config.json and *.safetensors of a causal language model of transformers; `--model FOLDER` for short",
    )

    def title(self) -> str:
        return "[model]"


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """Decoder with RMSNorm, RoPE, grouped-query attention and SwiGLU. Sizes have no defaults."""

    other_forms: ClassVar[tuple[type[Section], ...]] = (PretrainedModel,)

    family: str = setting(
        choice(*FAMILIES),
        "model family; qwen2 adds biases to q, k and v, qwen3 normalizes the heads of q and k",
        "llama",
    )

    layers: int = setting(integer(">= 1"), "number of transformer blocks")
    hidden: int = setting(integer(">= 1"), "size of the hidden states")
    ffn: int = setting(integer(">= 1"), "size inside the MLP; a multiple of tp")
    heads: int = setting(integer(">= 1"), "query heads; a multiple of tp and of kv_heads")
    kv_heads: int = setting(integer(">= 1"), "key and value heads; a multiple of tp")
    head_dim: int = setting(integer(">= 2"), "size of a head; even, for RoPE")
    vocab: int = setting(integer(">= 1"), "rows of the embedding, with padding; at least the vocabulary of the data")
    rope_theta: float = setting(number("> 0"), "base of the rotary frequencies", 10000.0)
    rope_scaling: dict[str, Any] | None = setting(
        SCALING,
        "scaling of rotary frequencies for longer contexts, as rope_scaling in config.json of Hugging Face",
        None,
    )
    sliding_window: int | None = setting(
        integer(">= 1"), "number of tokens that attention of the model spans; sequences must not be longer", None
    )
    norm_eps: float = setting(number("> 0"), "added to the mean square in RMSNorm", 1e-5)
    tie_embeddings: bool = setting(flag(), "the output head uses the weight of the embedding", False)
    fused: bool = setting(
        flag(),
        "run blocks as fused sequences of dlp.ops; equal parameters, different rounding",
        False,
    )
