"""TransformerLayer, built from ops and torch's attention, with the names and keywords of `transformer_engine.pytorch`.

q, k, v = qkv(norm(x)); norm of q and k (optional) and rotary embedding (optional), in either order
h = x + dropout(proj(attention(q, k, v)))
y = h + dropout(mlp(norm(h))); output norm (optional, instead of the norm of x)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dlp.ops.attention import DotProductAttention
from dlp.ops.basic.arithmetic import AddExtraInput, Dropout
from dlp.ops.basic.norms import L2Normalization, LayerNorm, RMSNorm
from dlp.ops.linear import Linear
from dlp.ops.modules import LayerNormLinear, LayerNormMLP, _norm, linear_options, own_options
from dlp.ops.sequential import Sequential
from dlp.ops.te_names import Joined, TeNames, names_of
from dlp.te_arguments import FORWARD, keywords_of, refuse

QK_NORMS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm, "L2Normalization": L2Normalization}


class TransformerLayer(nn.Module):
    """Decoder layer, or encoder layer with self_attn_mask_type="no_mask", with the keywords of Transformer Engine.

    Computes h = x + proj(attention(qkv(norm(x)))), then y = h + mlp(norm(h)).

    Args:
        hidden_size: size of the last dimension of x and y.
        ffn_hidden_size: number of features between the linears of the MLP.
        num_attention_heads: number of query heads.
        num_gqa_groups: number of key and value heads; None: as many as query heads.
        layernorm_epsilon: number that the norms add to the variance or the mean square.
        hidden_dropout: probability of dropout of the outputs of attention and MLP.
        attention_dropout: probability of dropout of attention weights.
        kv_channels: features of a head; None: hidden_size / num_attention_heads.
        self_attn_mask_type: attn_mask_type of `ops.DotProductAttention`.
        window_size: as in `ops.DotProductAttention`.
        bottom_right_diagonal: as in `ops.DotProductAttention`.
        bias: whether the linears have biases.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: multiply by 1 + weight in the norms.
        activation: activation of the MLP, as in `ops.LayerNormMLP`.
        activation_params: keywords of the activation.
        set_parallel_mode: shard heads and the MLP over `tp_group`.
        attn_input_format: "bshd" for hidden states [B, S, H], "sbhd" for [S, B, H].
        qk_norm_type: norm of each head of q and k: "RMSNorm", "LayerNorm" or "L2Normalization"; None: no norm.
        qk_norm_eps: eps of the norm of q and k.
        qk_norm_before_rope: True: apply the norm of q and k before the rotary embedding; False: after it.
        rotary_pos_interleaved: True: the rotary embedding pairs features 2 * i and 2 * i + 1 of a head; False: features i and
            i + head / 2.
        output_layernorm: apply a norm after the layer instead of the norm before q, k and v.
        output_layer_init_method: init_method of proj and of the second linear of the MLP; None: init_method of
            the other linears.
        **options: tp_group, sequence_parallel, recipe, overlap, device, params_dtype and further options of
            `ops.LayerNormMLP`.

    Shape:
        - x, y: [B, S, hidden_size], or [S, B, hidden_size] for "sbhd"

    Raises:
        ValueError: if num_attention_heads does not divide hidden_size and kv_channels is None; if num_gqa_groups does not
            divide the heads or tp does not divide num_gqa_groups; and for a qk_norm_type with weights if tp shards the heads.
        TypeError: for an option of Transformer Engine that dlp does not support; the message names an alternative.

    Examples:
        >>> layer = ops.TransformerLayer(64, 128, 4, activation="swiglu", recipe="fp8_current")
        >>> layer(torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(  # noqa: PLR0913 (the parameters of the module of this name)
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None, *,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.0, attention_dropout: float = 0.0,
        kv_channels: int | None = None, self_attn_mask_type: str = "causal", window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None, bias: bool = True, normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False, activation: str = "gelu", activation_params: Any = None,
        set_parallel_mode: bool = False, attn_input_format: str = "bshd", qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6, qk_norm_before_rope: bool = False, rotary_pos_interleaved: bool = False,
        output_layernorm: bool = False, output_layer_init_method: Callable[[Tensor], Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        options = own_options("TransformerLayer", "transformer", options, TransformerLayer)
        head, groups, tp = _heads(
            hidden_size, num_attention_heads, num_gqa_groups, kv_channels, options, set_parallel_mode
        )
        self.head, self.eps = head, layernorm_epsilon
        self.interleaved, self.norm_first = rotary_pos_interleaved, qk_norm_before_rope
        out = options if output_layer_init_method is None else options | {"init_method": output_layer_init_method}
        row = linear_options("row" if set_parallel_mode else None, out)
        shared = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma, "bias": bias, **options}
        sizes = num_attention_heads * head, groups * head, groups * head
        column = "column" if set_parallel_mode else None
        self.qkv: Sequential = (
            Sequential(Linear(hidden_size, sizes, bias, **linear_options(column, options)))
            if output_layernorm
            else LayerNormLinear(hidden_size, sizes, layernorm_epsilon, parallel_mode=column, **shared)
        )
        self.attention = DotProductAttention(
            num_attention_heads // tp, head, groups // tp, attention_dropout=attention_dropout, qkv_format=attn_input_format,
            attn_mask_type=self_attn_mask_type, window_size=window_size, bottom_right_diagonal=bottom_right_diagonal,
        )  # fmt: skip
        norms = [_qk_norm(qk_norm_type, head, qk_norm_eps, options, tp) for _ in range(2)]
        self.q_norm, self.k_norm = norms
        drops = [Dropout(hidden_dropout)] if hidden_dropout else []
        self.proj = Sequential(Linear(num_attention_heads * head, hidden_size, bias, **row), *drops, AddExtraInput())
        mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, activation=activation, activation_params=activation_params,
            set_parallel_mode=set_parallel_mode, output_layer_init_method=output_layer_init_method, **shared,
        )  # fmt: skip
        self.mlp = Sequential(*mlp, *drops, AddExtraInput())
        self.layernorm = (
            _norm(normalization, hidden_size, layernorm_epsilon, zero_centered_gamma, options)
            if output_layernorm
            else None
        )

    def te_names(self, fused: bool = False) -> TeNames:
        """Return the names of Transformer Engine. fused: whether q, k and v are one tensor there."""
        mlp, names = "layernorm_mlp.", names_of(self, "proj.0", "self_attention.proj.")
        if self.layernorm is None:
            attention, linear = "self_attention.layernorm_qkv.", "qkv.1"
            names |= names_of(self, "qkv.0", f"{attention}layer_norm_")
        else:
            attention, linear = "self_attention.qkv.", "qkv.0"
        for name, joined in names_of(self, linear, "").items():
            one = {attention + name: Joined(joined.parts, self.head)}
            three = zip(("query_", "key_", "value_"), joined.parts, strict=True)
            names |= one if fused else {attention + which + name: Joined((part,)) for which, part in three}
        for path, prefix in (("mlp.0", "layer_norm_"), ("mlp.1", "fc1_"), ("mlp.3", "fc2_")):
            names |= names_of(self, path, mlp + prefix)
        for path in ("q_norm", "k_norm"):
            names |= names_of(self, path, f"self_attention.{path}.") if getattr(self, path) is not None else {}
        return names | (names_of(self, "layernorm", "layernorm.") if self.layernorm is not None else {})

    def forward(  # noqa: PLR0913 (the parameters of the module of this name)
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, batch: int | None = None,
        self_attn_mask_type: str | None = None, window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None, rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        checkpoint_core_attention: bool = False, core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Run the layer. Under sequence parallelism hidden_states holds this rank's shard of the tokens.

        Args:
            hidden_states: [B, S, H] or [S, B, H], according to attn_input_format; or tokens [B*S, H] with `batch`.
            batch: Number B of sequences, only for tokens [B*S, H].
            rotary_pos_emb: cos and sin, each [S, head]; or angles [S, 1, 1, head], as from Transformer Engine's
                `RotaryPositionEmbedding`; None: no rotary embedding.
            attention_mask, ...: As in `DotProductAttention.forward`.

        Shape: The output has the shape of hidden_states.

        Raises:
            ValueError: For tokens without `batch`, for a number of tokens that `batch` does not divide, and for cos and sin
                of another shape.
        """
        refuse("TransformerLayer.forward", FORWARD, options, keywords_of(TransformerLayer.forward))
        if (batch is None) != (hidden_states.dim() == 3):
            raise ValueError(
                f"TransformerLayer: got hidden_states of shape {tuple(hidden_states.shape)} and batch {batch}: pass "
                f"[B, S, H] without batch, or tokens [B*S, H] with batch=B"
            )
        batch_first = self.attention.qkv_format == "bshd"
        batch = hidden_states.shape[0 if batch_first else 1] if batch is None else batch
        ys = self.qkv(hidden_states)
        tokens = ys[0].numel() // ys[0].shape[-1]
        if tokens % batch:
            raise ValueError(f"TransformerLayer: {tokens} tokens are not {batch} sequences of equal length")
        leading = (batch, tokens // batch) if batch_first else (tokens // batch, batch)
        q, k, v = (y.reshape(*leading, y.shape[-1] // self.head, self.head) for y in ys)
        q, k = self._positioned(q, k, rotary_pos_emb, tokens // batch)
        attended = self.attention(
            q, k, v, attention_mask, attn_mask_type=self_attn_mask_type, window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal, checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type, core_attention_bias=core_attention_bias,
        )  # fmt: skip
        x = self.proj(attended if hidden_states.dim() == 3 else attended.flatten(0, 1), hidden_states)
        out: Tensor = self.mlp(x, x)
        return out if self.layernorm is None else self.layernorm(out)

    def _positioned(self, q: Tensor, k: Tensor, rotary: Any, length: int) -> tuple[Tensor, Tensor]:
        """Apply the norm of q and k, and the rotary embedding, in the configured order."""
        if self.norm_first:
            q, k = self._normed(q, k)
        if rotary is not None:
            cos, sin = _cos_and_sin(rotary, (length, self.head), self.interleaved)
            shape = (1, length, 1, self.head) if self.attention.qkv_format == "bshd" else (length, 1, 1, self.head)
            cos, sin = cos.reshape(shape), sin.reshape(shape)
            q, k = (_rotated(each, cos, sin, self.interleaved) for each in (q, k))
        return (q, k) if self.norm_first else self._normed(q, k)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))


def _heads(
    hidden_size: int,
    heads: int,
    gqa_groups: int | None,
    kv_channels: int | None,
    options: dict[str, Any],
    parallel: bool,
) -> tuple[int, int, int]:
    """Return (features of a head, number of groups of k and v, tp size). Raises ValueError if the heads do not divide
    hidden_size and kv_channels is None, if the groups do not divide the heads, or if tp does not divide the groups."""
    if kv_channels is None and hidden_size % heads:
        raise ValueError(
            f"TransformerLayer: {heads} heads do not divide hidden_size {hidden_size}: choose a number of heads that "
            f"divides hidden_size, or set kv_channels, the features of a head"
        )
    groups = heads if gqa_groups is None else gqa_groups
    group = options.get("tp_group") if parallel else None
    tp = 1 if group is None else group.size()
    if groups < 1 or heads % groups or groups % tp:
        raise ValueError(
            f"TransformerLayer: {groups} groups of k and v must divide {heads} heads, and tp {tp} must divide the "
            f"groups: choose num_gqa_groups that divides the heads and is a multiple of tp"
        )
    return hidden_size // heads if kv_channels is None else kv_channels, groups, tp


def _qk_norm(kind: str | None, head: int, eps: float, options: dict[str, Any], tp: int) -> nn.Module | None:
    """Return the norm for the heads of q or k; None: no norm. kind: `qk_norm_type`. Raises ValueError for an unknown norm, and
    for a norm with weights if tp shards the heads."""
    if kind is None:
        return None
    if kind not in QK_NORMS:
        raise ValueError(f"TransformerLayer: qk_norm_type must be one of {', '.join(QK_NORMS)}, or None; got {kind!r}")
    if kind == "L2Normalization":
        return L2Normalization(eps=eps)
    if tp > 1:
        raise ValueError(
            f"TransformerLayer: qk_norm_type {kind} has weights, whose gradients each of {tp} tp ranks would compute "
            f"from its own heads; pass L2Normalization, or convert a model of plain modules with dlp.convert, which "
            f"sums their gradients"
        )
    made: nn.Module = QK_NORMS[kind](head, eps=eps, device=options.get("device"), dtype=options.get("params_dtype"))
    return made


def _cos_and_sin(given: Any, shape: tuple[int, int], interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [S, head]: as given, or computed from angles [S, 1, 1, head]. shape: (S, head). Raises
    ValueError for other shapes."""
    if isinstance(given, Tensor) and tuple(given.shape) == (shape[0], 1, 1, shape[1]):
        angles = given.reshape(shape)
        return angles.cos(), angles.sin()
    if isinstance(given, Tensor) or [tuple(each.shape) for each in given] != [shape] * 2:
        tensors = [given] if isinstance(given, Tensor) else given
        raise ValueError(
            f"TransformerLayer: rotary_pos_emb must be cos and sin, each [S, head] = {list(shape)}, or angles "
            f"[{shape[0]}, 1, 1, {shape[1]}]; got {', '.join(str(list(each.shape)) for each in tensors)}"
        )
    return given[0], given[1]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Apply the rotary position embedding to heads x [..., head]. interleaved: see `rotary_pos_interleaved`."""
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)
