"""A Llama from plain modules: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, tied or untied head.

Parameter names are Hugging Face's. The model knows nothing of ranks: attention views its heads as
`view(B, S, -1, head_dim)`, so each tp rank computes the heads its weights make, and hidden states may be [B, S, H] or,
under sequence parallelism, this rank's token shard [B*S/tp, H]. `parallel_groups` says how tp cuts it.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlp import LayerGroup, Plan
from dlp.comm.mesh import DP_SHARD, TP, placement_on
from launch.attention import Documents, attend
from launch.sections import Model

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


Inputs = Tensor | tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32, in the dtype of x (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class LaterRMSNorm(RMSNorm):
    """Hands on x and the weight, for linears with the prologue rms_norm: they compute it in their cast."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, self.weight


def rotary_table(sequence: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [sequence, head_dim] fp32 in Hugging Face's half-split order (Su et al., arXiv 2104.09864)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(sequence, device=device, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, S, head_dim] turned by its position; cos, sin [S, head_dim] or [B, 1, S, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden, bias=False)

    def forward(self, normed: Inputs, batch: int, cos: Tensor, sin: Tensor, documents: Documents | None) -> Tensor:
        """What a norm returns, of x [B, S, H] or of a token shard -> the same shape; `batch` is B."""
        inputs = normed if isinstance(normed, tuple) else (normed,)
        q, k, v = (
            projection(*inputs).view(batch, cos.shape[-2], -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, documents)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        self.fused = config.fused
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, normed: Inputs) -> Tensor:
        inputs = normed if isinstance(normed, tuple) else (normed,)
        gate, up = self.gate_proj(*inputs), self.up_proj(*inputs)
        out: Tensor = self.down_proj(gate, up) if self.fused else self.down_proj(F.silu(gate) * up)
        return out


class Block(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        norm = LaterRMSNorm if config.fused else RMSNorm
        self.input_layernorm = norm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = norm(config.hidden, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, batch: int, cos: Tensor, sin: Tensor, documents: Documents | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), batch, cos, sin, documents)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def __init__(self, config: Model, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.hidden, config.norm_eps)

    def forward(self, tokens: Tensor, documents: Documents | None = None) -> Tensor:
        batch, sequence = tokens.shape
        cos, sin = rotary_table(sequence, self.config.head_dim, self.config.rope_theta, tokens.device)
        if documents is not None:
            cos, sin = (table[documents.positions].unsqueeze(1) for table in (cos, sin))
        x = self.embed_tokens(tokens).to(self.dtype)
        for layer in self.layers:
            x = layer(x, batch, cos, sin, documents)
        return self.norm(x)


class Llama(nn.Module):
    """tokens [B, S] int64 -> logits [B*S, V] (V/tp per rank once converted), in `dtype`. Attention and positions end and begin
    anew with each of `documents`, where they are given."""

    base_model_prefix = "model"  # Hugging Face's attribute: layer groups may leave this prefix out

    def __init__(self, config: Model, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, dtype)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, documents: Documents | None = None) -> Tensor:
        return self.lm_head(self.model(tokens, documents).flatten(0, -2))  # the head's own result: FSDP warns of a view


def parallel_groups(config: Model, sequence_parallel: bool) -> list[LayerGroup]:
    """How tp cuts a Llama, and which of its linears have a prologue; a run's own layer groups come after these and may
    override them."""
    sp = sequence_parallel
    qkv, gate_up = "layers.*.self_attn.{q,k,v}_proj", "layers.*.mlp.{gate,up}_proj"
    return [
        LayerGroup("vocabulary", ["embed_tokens", "lm_head"], style="column", sequence_parallel=sp),
        LayerGroup("norms", ["layers.*.*norm", "norm"], sequence_parallel=sp),
        LayerGroup("qkv", [qkv], style="column", siblings=True, sequence_parallel=sp),
        LayerGroup("gate_up", [gate_up], style="column", siblings=True, sequence_parallel=sp),
        LayerGroup("o_down", ["layers.*.{self_attn.o,mlp.down}_proj"], style="row", sequence_parallel=sp),
        *(_prologues(config, [qkv, gate_up]) if config.fused else []),
    ]


def _prologues(config: Model, behind_norms: list[str]) -> list[LayerGroup]:
    norm = {"name": "rms_norm", "eps": config.norm_eps}
    return [
        LayerGroup("norm in the cast", behind_norms, prologue=norm),
        LayerGroup("swiglu in the cast", ["layers.*.mlp.down_proj"], prologue="swiglu"),
    ]


def check_plan(plan: Plan) -> None:
    """ValueError for layer groups under which this model cannot run: it splits and joins no tokens itself, its attention reads
    whole sequences, and its loss reads logits that tp cuts."""
    cut = next(row for row in plan.layers if row.name.endswith("o_proj")).sequence_parallel
    rows = [(row.name, row.style, row.sequence_parallel) for row in plan.layers]
    rows += [(other.name, other.style, other.sequence_parallel) for other in plan.others]
    for name, style, on_shards in rows if plan.tp > 1 else ():
        if on_shards != cut:
            raise ValueError(
                f"{name}: its groups set sequence_parallel = {on_shards}, others {cut}, and a Llama's tokens are cut from its "
                f"embedding to its head, or nowhere: leave it to [mesh] sequence_parallel"
            )
        if name == "lm_head" and style != "column":
            raise ValueError(
                f"{name}: style = {style!r}, but the loss reads logits that tp cuts: leave style out of its groups"
            )
        if ".self_attn." in name and style == "local" and cut:
            raise ValueError(
                f"{name}: style = 'local' under sequence parallelism leaves attention a part of the tokens: set [mesh] "
                f"sequence_parallel = false, or leave style out of its groups"
            )


def initial_value(name: str, shape: torch.Size, config: Model, seed: int) -> Tensor:
    """The full initial tensor of a parameter, fp32 on the CPU: a function of (seed, name, shape) alone, so that any mesh
    starts from the same weights. Matrices are N(0, 0.02), those that write to the residual stream 1/sqrt(2L) of it."""
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = 0.02 / math.sqrt(2 * config.layers) if writes_residual else 0.02
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def this_ranks_part(full: Tensor, parameter: Tensor) -> Tensor:
    """The slice of `full` that a parameter keeps: cut by tp first, then what is left by dp_shard, as FSDP does."""
    if not isinstance(parameter, DTensor):
        return full
    for axis in (TP, DP_SHARD):
        dim = getattr(placement_on(axis, parameter), "dim", None)
        if dim is not None:
            group = parameter.device_mesh.get_group(axis)
            chunks, rank = full.chunk(group.size(), dim), group.rank()
            full = chunks[rank] if rank < len(chunks) else full.narrow(dim, 0, 0)
    return full


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Fill the parameters of a materialised model, one full tensor at a time; each rank keeps its slice."""
    for name, parameter in model.named_parameters():
        full = initial_value(name, parameter.shape, model.config, seed)
        kept = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        kept.copy_(this_ranks_part(full, parameter))
