"""LayerNormLinear, LayerNormMLP, TransformerLayer of ops, with the names and keywords of `transformer_engine.pytorch`.

The first two are `Sequential`s, and fuse as such. Their parameters have the names of a `Sequential`; `te_names` maps the
names of Transformer Engine to these (`dlp.ops.te_names`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlp.ops.basic.activations import GEGLU, GELU, GLU, ReGLU, ReLU, SiLU, SReLU, SwiGLU
from dlp.ops.basic.arithmetic import AddExtraInput, Dropout, MakeExtraOutput
from dlp.ops.basic.norms import LayerNorm, RMSNorm
from dlp.ops.linear import MODES, Linear
from dlp.ops.sequential import Sequential
from dlp.ops.te_names import Joined, TeNames, names_of

NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
ACTIVATIONS = {
    "gelu": GELU, "relu": ReLU, "silu": SiLU, "srelu": SReLU, "geglu": GEGLU, "reglu": ReGLU, "swiglu": SwiGLU, "glu": GLU,
}  # fmt: skip
GATES = (GEGLU, ReGLU, SwiGLU, GLU)
OPTIONS = ("tp_group", "sequence_parallel", "recipe", "overlap", "device", "params_dtype")


def _chosen(what: str, table: dict[str, Any], name: str) -> Any:
    """The class of this name. ValueError for a name that is not in the table."""
    if name not in table:
        raise ValueError(f"unknown {what} {name!r:.60}: it is one of {', '.join(table)}")
    return table[name]


def _linear(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a `Linear`, from a parallel mode and further options of a module.

    Raises TypeError for an unknown option, ValueError for an unknown mode, or for tp options without a mode.
    """
    if unknown := options.keys() - set(OPTIONS):
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(OPTIONS)}")
    keywords: dict[str, Any] = {name: options[name] for name in ("recipe", "overlap", "device") if name in options}
    if options.get("params_dtype") is not None:
        keywords["dtype"] = options["params_dtype"]
    group = options.get("tp_group")
    if mode not in MODES:
        raise ValueError(f"parallel_mode must be one of {MODES}; got {mode!r}")
    if mode is None and (group is not None or options.get("sequence_parallel")):
        raise ValueError(
            "tp_group and sequence_parallel without a mode cut nothing: set parallel_mode, or set_parallel_mode=True"
        )
    if mode is None or group is None:
        return keywords
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_group": group}
    return keywords | parallel | {"sequence_parallel": options.get("sequence_parallel", False)}


def _norm(normalization: str, size: int, eps: float, zero_centered_gamma: bool, options: dict[str, Any]) -> nn.Module:
    own = {"device": options.get("device"), "dtype": options.get("params_dtype")}
    norm: nn.Module = _chosen("normalization", NORMS, normalization)(
        size, eps=eps, zero_centered_gamma=zero_centered_gamma, **own
    )
    return norm


class _WithNorm(Sequential):
    """A Sequential that begins with a norm. returns_norm: the output of the norm is returned, too, as the last result."""

    returns_norm = False

    def forward(self, x: Any, *extra_inputs: Tensor) -> Any:
        results = super().forward(x, *extra_inputs)
        if not self.returns_norm:
            return results
        y, normed, *biases = results
        return (y, *biases, normed)


class LayerNormLinear(_WithNorm):
    """x -> Linear(norm(x)).

    parallel_mode             None, "column" or "row" over `tp_group`
    return_bias               the bias is not added but returned behind y, one for each sibling
    return_layernorm_output   norm(x) is returned, too, as the last result
    further options           tp_group, sequence_parallel, recipe, overlap, device, params_dtype
    """

    def __init__(
        self, in_features: int, out_features: int | tuple[int, ...], eps: float = 1e-5, *, bias: bool = True,
        normalization: str = "LayerNorm", zero_centered_gamma: bool = False, parallel_mode: str | None = None,
        return_bias: bool = False, return_layernorm_output: bool = False, **options: Any,
    ) -> None:  # fmt: skip  # many parameters: those of the module of this name
        linear = Linear(in_features, out_features, bias, return_bias=return_bias, **_linear(parallel_mode, options))
        norm = _norm(normalization, in_features, eps, zero_centered_gamma, options)
        super().__init__(norm, *([MakeExtraOutput()] if return_layernorm_output else []), linear)
        self.returns_norm = return_layernorm_output

    def te_names(self, fused: bool = False) -> TeNames:
        return names_of(self, "0", "layer_norm_") | names_of(self, str(1 + self.returns_norm), "")


class LayerNormMLP(_WithNorm):
    """x -> Linear(act(Linear(norm(x)))). A gate such as swiglu reads two siblings of ffn_hidden_size features each.

    set_parallel_mode   the first linear is column-parallel over `tp_group`, the second one row-parallel
    return_bias         of the second linear
    further options     as of `LayerNormLinear`
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, *, bias: bool = True, normalization: str = "LayerNorm",
        activation: str = "gelu", zero_centered_gamma: bool = False, set_parallel_mode: bool = False,
        return_bias: bool = False, return_layernorm_output: bool = False, **options: Any,
    ) -> None:  # fmt: skip  # many parameters: those of the module of this name
        act = _chosen("activation", ACTIVATIONS, activation)
        wide: Any = (ffn_hidden_size, ffn_hidden_size) if act in GATES else ffn_hidden_size
        column, row = ("column", "row") if set_parallel_mode else (None, None)
        super().__init__(
            _norm(normalization, hidden_size, eps, zero_centered_gamma, options),
            *([MakeExtraOutput()] if return_layernorm_output else []),
            Linear(hidden_size, wide, bias, **_linear(column, options)), act(),
            Linear(ffn_hidden_size, hidden_size, bias, return_bias=return_bias, **_linear(row, options)),
        )  # fmt: skip
        self.returns_norm = return_layernorm_output

    def te_names(self, fused: bool = False) -> TeNames:
        first = 1 + self.returns_norm
        linears = names_of(self, str(first), "fc1_") | names_of(self, str(first + 2), "fc2_")
        return names_of(self, "0", "layer_norm_") | linears


class TransformerLayer(nn.Module):
    """A layer of a decoder: x + proj(attention(qkv(norm(x)))), then x + mlp(norm(x)).

    num_gqa_groups   heads of k and v, as many as of q by default
    kv_channels      features of a head; hidden_size / num_attention_heads by default
    further options  normalization, zero_centered_gamma, bias, activation, and those of `LayerNormMLP`

    Raises ValueError for heads that do not divide hidden_size, or that tp or the groups do not divide.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None, *,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.0, kv_channels: int | None = None, bias: bool = True,
        normalization: str = "LayerNorm", zero_centered_gamma: bool = False, activation: str = "gelu",
        set_parallel_mode: bool = False, causal: bool = True, **options: Any,
    ) -> None:  # fmt: skip  # many parameters: those of the module of this name
        super().__init__()
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"TransformerLayer: {num_attention_heads} heads do not divide hidden_size {hidden_size}: choose heads that "
                f"do, or set kv_channels, the features of a head"
            )
        head = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        group = options.get("tp_group") if set_parallel_mode else None
        tp = 1 if group is None else group.size()
        if groups < 1 or num_attention_heads % groups or groups % tp:
            raise ValueError(
                f"TransformerLayer: {num_attention_heads} heads share {groups} groups of k and v over tp {tp}, which must "
                f"divide: choose num_gqa_groups that divides the heads and is a multiple of tp"
            )
        self.head, self.causal, self.eps = head, causal, layernorm_epsilon
        row = _linear("row" if set_parallel_mode else None, options)
        shared = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma, "bias": bias, **options}
        sizes = num_attention_heads * head, groups * head, groups * head
        self.qkv = LayerNormLinear(
            hidden_size, sizes, layernorm_epsilon, parallel_mode="column" if set_parallel_mode else None, **shared
        )
        drops = [Dropout(hidden_dropout)] if hidden_dropout else []
        self.proj = Sequential(Linear(num_attention_heads * head, hidden_size, bias, **row), *drops, AddExtraInput())
        mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, activation=activation, set_parallel_mode=set_parallel_mode,
            **shared,
        )  # fmt: skip
        self.mlp = Sequential(*mlp, *drops, AddExtraInput())

    def te_names(self, fused: bool = False) -> TeNames:
        """fused: q, k and v are one tensor of TE."""
        attention, mlp = "self_attention.layernorm_qkv.", "layernorm_mlp."
        names = names_of(self, "qkv.0", f"{attention}layer_norm_") | names_of(self, "proj.0", "self_attention.proj.")
        for name, joined in names_of(self, "qkv.1", "").items():
            one = {attention + name: Joined(joined.parts, self.head)}
            three = zip(("query_", "key_", "value_"), joined.parts, strict=True)
            names |= one if fused else {attention + which + name: Joined((part,)) for which, part in three}
        for path, prefix in (("mlp.0", "layer_norm_"), ("mlp.1", "fc1_"), ("mlp.3", "fc2_")):
            names |= names_of(self, path, mlp + prefix)
        return names

    def forward(
        self, hidden_states: Tensor, *, batch: int | None = None, rotary_pos_emb: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """hidden_states [B, S, H], or tokens [B*S, H] with `batch` = B -> the same shape. Under sequence parallelism tokens are
        this rank's shard. rotary_pos_emb: cos and sin [S, head]; the halves of a head are rotated together.

        Raises ValueError for tokens without `batch`, tokens that are not B sequences of one length, and other shapes of cos,
        sin.
        """
        if (batch is None) != (hidden_states.dim() == 3):
            raise ValueError(
                f"TransformerLayer: it is given {tuple(hidden_states.shape)} and batch {batch}: of [B, S, H] it knows the "
                f"batch, of tokens [B*S, H] pass batch=B"
            )
        batch = hidden_states.shape[0] if batch is None else batch
        ys = self.qkv(hidden_states)
        tokens = ys[0].numel() // ys[0].shape[-1]
        if tokens % batch:
            raise ValueError(f"TransformerLayer: {tokens} tokens are no {batch} sequences of one length")
        q, k, v = (y.reshape(batch, -1, y.shape[-1] // self.head, self.head).transpose(1, 2) for y in ys)
        if rotary_pos_emb is not None:
            _check_rotary(rotary_pos_emb, (tokens // batch, self.head))
            q, k = (_rotated(each, *rotary_pos_emb) for each in (q, k))
        shared = q.shape[1] != k.shape[1]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=shared).transpose(1, 2)
        flat = attended.reshape(batch, -1, q.shape[1] * self.head)
        x = self.proj(flat if hidden_states.dim() == 3 else flat.flatten(0, 1), hidden_states)
        out: Tensor = self.mlp(x, x)
        return out


def _check_rotary(given: Any, shape: tuple[int, int]) -> None:
    """ValueError unless `given` is a pair of tensors, cos and sin, of this shape."""
    if isinstance(given, Tensor) or [tuple(each.shape) for each in given] != [shape] * 2:
        tensors = [given] if isinstance(given, Tensor) else given
        raise ValueError(
            f"TransformerLayer: rotary_pos_emb must be cos and sin, each [S, head] = {list(shape)}; got "
            f"{', '.join(str(list(each.shape)) for each in tensors)}"
        )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, heads, S, head], with cos and sin [S, head]."""
    rotated_half = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], dim=-1)
    return x * cos.to(x.dtype) + rotated_half * sin.to(x.dtype)
