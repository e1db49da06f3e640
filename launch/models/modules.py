"""Modules of the decoder: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, tied or untied head; biases of q, k and
v and norms of q and k in families that have them (families.py).

Parameter names are the same as in Hugging Face's Llama. The modules contain no code for tp: attention views heads as
`view(B, S, -1, head_dim)`, so each tp rank computes the heads of its weight shards. Hidden states are [B, S, H] or, with
sequence parallelism, the token shard [B*S/tp, H]. `parallel.py` defines the layer groups that shard the model over tp, and
fuses blocks into `dlp.ops.Sequential` for `[model] fused`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlp import Context, ops
from dlp.runtime.causal import causal
from launch.models.attention import Documents, attend, attend_by_head, prefer
from launch.models.families import FAMILIES
from launch.models.kv_cache import KeyValues
from launch.models.rope import rotary_table, rotate
from launch.models.settings import Model

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, x / rms(x) * weight, computed in fp32 from x and the weight in the dtype of x, and
    returned in this dtype (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention.

    backend   key of `attention.ORDERS`, set by `parallel.set_attention`; None: torch chooses
    by_head   whether to call the kernel for one head of k and v at a time
    context   this cp rank's shard of each sequence; None: complete sequences
    """

    backend: str | None = None
    by_head: bool = False
    context: Context | None = None

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        family = FAMILIES[config.family]
        self.q_proj = nn.Linear(config.hidden, q_size, bias=family.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, kv_size, bias=family.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, kv_size, bias=family.qkv_bias)
        if family.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.qk_norm = family.qk_norm
        self.o_proj = nn.Linear(q_size, config.hidden, bias=False)

    def forward(self, normed: Tensor, batch: int, *where: Any) -> Tensor:
        """Compute projections and attention of `normed`, [B, S, H] or a token shard, and return the same shape. `batch` is B;
        `where` are the further arguments of `attend`: cos, sin, documents, past."""
        y: Tensor = self.o_proj(self.attend([project(normed) for project in self.inputs], batch, *where))
        return y

    @property
    def inputs(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.q_proj, self.k_proj, self.v_proj

    def attend(
        self, projected: Sequence[Tensor], batch: int, cos: Tensor, sin: Tensor, documents: Documents | None,
        past: KeyValues | None,
    ) -> Tensor:  # fmt: skip
        """Compute attention, and return the input of o_proj, [B, S, heads * head_dim].

        projected: q, k and v of B*S tokens; cos, sin: rotary table; past: cache to which keys and values are appended."""
        q, k, v = (each.view(batch, cos.shape[-2], -1, self.head_dim) for each in projected)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = past.extend(k, v)
        if self.context is not None:
            return self.context.attention(q, k, v, self.attend_chunk).transpose(1, 2).flatten(2)
        run = attend_by_head if self.by_head else attend
        return run(q, k, v, documents, self.backend).transpose(1, 2).flatten(2)

    def attend_chunk(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention of a chunk of queries to all keys up to and including the chunk."""
        with prefer(self.backend):
            return causal(q, k, v)


class Gated(nn.Module):
    """Module that computes silu(gate) * up from the pair (gate, up)."""

    def forward(self, gate_up: tuple[Tensor, Tensor]) -> Tensor:
        gate, up = gate_up
        return F.silu(gate) * up


class MLP(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        self.gated = ops.SwiGLU() if config.fused else Gated()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, normed: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gated((self.gate_proj(normed), self.up_proj(normed))))
        return out


class Sequences(NamedTuple):
    """Fused operations of a block before and after attention.

    before   x -> (q, k, v), x
    behind   attention output, x -> MLP output, h, where h is the residual sum after attention
    """

    before: ops.Sequential
    behind: ops.Sequential


class Block(nn.Module):
    """Transformer block. After `fuse()` forward runs `sequences`, which use the parameters of the block and are not
    submodules."""

    sequences: Sequences | None = None

    def __init__(self, config: Model) -> None:
        super().__init__()
        norm = _fused_norm if config.fused else RMSNorm
        self.input_layernorm = norm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = norm(config.hidden, config.norm_eps)
        self.mlp = MLP(config)

    def fuse(self) -> None:
        """Build `sequences`, which forward then uses. The linears must have been converted by `dlp.convert`."""
        attention, mlp = self.self_attn, self.mlp
        before = {
            "x": ops.MakeExtraOutput(), "input_layernorm": self.input_layernorm,
            "q_proj, k_proj, v_proj": ops.Converted(*attention.inputs),
        }  # fmt: skip
        behind = {
            "o_proj": ops.Converted(attention.o_proj), "x +": ops.AddExtraInput(), "h": ops.MakeExtraOutput(),
            "post_attention_layernorm": self.post_attention_layernorm,
            "gate_proj, up_proj": ops.Converted(mlp.gate_proj, mlp.up_proj), "gated": mlp.gated,
            "down_proj": ops.Converted(mlp.down_proj),
        }  # fmt: skip
        vars(self)["sequences"] = Sequences(ops.Sequential(before), ops.Sequential(behind))

    def forward(
        self, x: Tensor, batch: int, cos: Tensor, sin: Tensor, documents: Documents | None = None,
        past: KeyValues | None = None,
    ) -> Tensor:  # fmt: skip
        if self.sequences is None:
            x = x + self.self_attn(self.input_layernorm(x), batch, cos, sin, documents, past)
            return x + self.mlp(self.post_attention_layernorm(x))
        projected, x = self.sequences.before(x)
        y, h = self.sequences.behind(self.self_attn.attend(projected, batch, cos, sin, documents, past), x)
        return h + y


def _fused_norm(size: int, eps: float) -> nn.Module:
    return ops.RMSNorm(size, eps=eps)


class LlamaModel(nn.Module):
    context: Context | None = None

    def __init__(self, config: Model, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.hidden, config.norm_eps)

    def forward(
        self, tokens: Tensor, documents: Documents | None = None, past: Sequence[KeyValues] | None = None
    ) -> Tensor:
        batch, sequence = tokens.shape
        first, config = past[0].length if past else 0, self.config
        if self.context is None:
            positions = torch.arange(first, first + sequence, device=tokens.device)
        else:
            positions = self.context.positions(sequence, tokens.device)
        cos, sin = rotary_table(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        if documents is not None:
            cos, sin = (table[documents.positions].unsqueeze(1) for table in (cos, sin))
        x = self.embed_tokens(tokens).to(self.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, batch, cos, sin, documents, past[i] if past else None)
        return self.norm(x)


class Llama(nn.Module):
    """Decoder: tokens int64 [B, S] -> logits [B*S, V], or [B*S, V/tp] after conversion, in `dtype`. Arguments of forward:

    documents  boundaries of documents, at which attention and positions restart; None: complete rows
    past       key-value cache of each block, for generation; None: no cache
    """

    base_model_prefix = "model"  # as in Hugging Face models; patterns of layer groups may omit this prefix

    def __init__(self, config: Model, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, dtype)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, tokens: Tensor, documents: Documents | None = None, past: Sequence[KeyValues] | None = None
    ) -> Tensor:
        # Flatten before the head, since FSDP warns if an output is a view
        return self.lm_head(self.model(tokens, documents, past).flatten(0, -2))
