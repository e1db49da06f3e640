"""DotProductAttention: `torch.nn.functional.scaled_dot_product_attention` under the names of Transformer Engine (TE).

Mask types, for Sq queries and Sk keys of B sequences and H heads:

    mask type            keys j that query i attends to; off = 0 for "causal" and "padding_causal", else Sk - Sq
    no_mask              all
    causal               j <= i + off
    padding              keys that are False in `attention_mask` [B, 1, 1, Sk]
    arbitrary            keys that are False in `attention_mask` [B or 1, H or 1, Sq, Sk]
    padding_causal       keys that both "padding" and "causal" allow
    window_size (l, r)   for each type only keys with i + off - l <= j <= i + off + r; -1: no bound

`bottom_right_diagonal` sets off to Sk - Sq (True) or 0 (False) for every type. For a causal mask with off = 0, and without
window, bias and padding, no mask tensor is built, since torch's kernels compute this mask (is_causal).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlp.te_arguments import ARGUMENTS, FORWARD, keywords_of, refuse

MASKS = (
    "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip
FORMATS = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}  # permutation to [B, H, S, D]
BACK = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}  # permutation from [B, H, S, D]
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias")
UNBOUNDED = -1


class DotProductAttention(nn.Module):
    """Compute softmax(mask(scale * q k^T + bias)) v by torch's `scaled_dot_product_attention`.

    The keywords are those of `DotProductAttention` of Transformer Engine.

    Args:
        num_attention_heads: number of query heads on this rank.
        kv_channels: number of features of a head; a pair (features of q and k, features of v) if these differ.
        num_gqa_groups: number of key and value heads on this rank; None: as many as query heads.
        attention_dropout: probability of dropout of attention weights in training.
        qkv_format: "bshd" or "sbhd".
        attn_mask_type: one of "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal",
            "padding_causal_bottom_right", "arbitrary".
        window_size: (l, r): a query attends to at most l keys to its left and r keys to its right; -1: no bound; None: no
            window.
        bottom_right_diagonal: whether the last query is aligned with the last key (True) or the first query with the first key
            (False) in causal masks and windows; None: the mask type decides.
        softmax_scale: factor of the scores; None: 1 / sqrt(kv_channels).
        **options: other options of Transformer Engine. Values that would have an effect raise TypeError; the message names an
            alternative.

    Shape:
        - q: [B, S, heads, D]; k, v: [B, S, groups, D]; or [S, B, ...] for "sbhd"
        - output: [B, S, heads * D], or [S, B, heads * D]

    Raises:
        ValueError: for an unknown format or mask type, and if num_gqa_groups does not divide num_attention_heads.
        TypeError: for an option of Transformer Engine that dlp does not support.

    Examples:
        >>> attention = ops.DotProductAttention(4, 16)
        >>> attention(*torch.randn(3, 2, 8, 4, 16)).shape
        torch.Size([2, 8, 64])
    """

    reads_sequences = True  # `dlp.convert` refuses this module on a mesh with cp > 1

    def __init__(  # noqa: PLR0913 (the parameters of Transformer Engine's module)
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None, *,
        attention_dropout: float = 0.0, qkv_format: str = "bshd", attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None,
        softmax_scale: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse(type(self).__name__, ARGUMENTS["attention"], options, keywords_of(DotProductAttention.__init__))
        if qkv_format not in FORMATS:
            raise ValueError(
                f"DotProductAttention: qkv_format must be one of {', '.join(FORMATS)}; got {qkv_format!r}. Packed "
                f"sequences (thd) are not supported: pad the sequences"
            )
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if groups < 1 or num_attention_heads % groups:
            raise ValueError(
                f"DotProductAttention: {groups} groups of k and v do not divide {num_attention_heads} heads: choose a "
                f"num_gqa_groups that divides the heads"
            )
        self.heads, self.groups, self.qkv_format = num_attention_heads, groups, qkv_format
        self.channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        self.attention_dropout, self.softmax_scale = attention_dropout, softmax_scale
        self.attn_mask_type, self.window_size = _checked_mask(attn_mask_type), window_size
        self.bottom_right_diagonal = bottom_right_diagonal

    def extra_repr(self) -> str:
        return f"{self.heads}, {self.channels[0]}, groups={self.groups}, {self.qkv_format}, {self.attn_mask_type}"

    def forward(  # noqa: PLR0913 (the parameters of Transformer Engine's method)
        self, query_layer: Tensor | None = None, key_layer: Tensor | None = None, value_layer: Tensor | None = None,
        attention_mask: Tensor | None = None, *, attn_mask_type: str | None = None, window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None, checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias", core_attention_bias: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the attention output.

        Args:
            query_layer, key_layer, value_layer: q, k and v, in `qkv_format`.
            attention_mask: Boolean; True: the query does not attend to the key.
            attn_mask_type, window_size, bottom_right_diagonal: Override the arguments of the constructor; None: no change.
            checkpoint_core_attention: Recompute attention in backward instead of saving intermediate tensors.
            core_attention_bias_type: "no_bias", "post_scale_bias" or "pre_scale_bias".
            core_attention_bias: [B or 1, H or 1, Sq, Sk], added to the scores after the scaling
                ("post_scale_bias") or before the scaling ("pre_scale_bias").

        Shape: [B, S, H, D] or [S, B, H, D] -> [B, S, H * D] or [S, B, H * D].

        Raises:
            ValueError: For inputs with another number or size of heads, and for a mask or bias that does not fit
                attn_mask_type or core_attention_bias_type.
            TypeError: For a missing input, and for an option of Transformer Engine that dlp does not support.
        """
        refuse("DotProductAttention.forward", FORWARD, options, keywords_of(DotProductAttention.forward))
        if query_layer is None or key_layer is None or value_layer is None:
            raise TypeError(
                "DotProductAttention.forward: query_layer, key_layer and value_layer are required: pass all three"
            )
        for name, given, heads, size in (
            ("query_layer", query_layer, self.heads, self.channels[0]),
            ("key_layer", key_layer, self.groups, self.channels[0]),
            ("value_layer", value_layer, self.groups, self.channels[1]),
        ):
            if given.dim() != 4 or tuple(given.shape[2:]) != (heads, size):
                raise ValueError(
                    f"DotProductAttention: {name} must be [., ., {heads}, {size}] in {self.qkv_format}; got "
                    f"{tuple(given.shape)}"
                )
        q, k, v = (each.permute(FORMATS[self.qkv_format]) for each in (query_layer, key_layer, value_layer))
        scale = self.channels[0] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        bias = _bias(core_attention_bias_type, core_attention_bias, scale)
        kind = _checked_mask(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
        window = self.window_size if window_size is None else window_size
        corner = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        mask, is_causal = seen_keys(kind, window, corner, (q, k), attention_mask, bias is not None)
        if bias is not None:
            bias = bias.to(q.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        attend = partial(
            F.scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal, scale=scale,
            dropout_p=self.attention_dropout if self.training else 0.0, enable_gqa=self.groups != self.heads,
        )  # fmt: skip
        out = checkpoint(attend, q, k, v, use_reentrant=False) if checkpoint_core_attention else attend(q, k, v)
        out = out.permute(BACK[self.qkv_format])
        return out.reshape(*out.shape[:2], self.heads * self.channels[1])


def _checked_mask(kind: str) -> str:
    """Return the mask type; raise ValueError for an unknown type."""
    if kind not in MASKS:
        raise ValueError(f"DotProductAttention: the mask type must be one of {', '.join(MASKS)}; got {kind!r}")
    return kind


def _bias(kind: str, bias: Tensor | None, scale: float) -> Tensor | None:
    """Return the bias to add to the scaled scores: a "pre_scale_bias" is multiplied by `scale`. Raises ValueError for an
    unknown type, for a type without its tensor, and for a tensor with "no_bias"."""
    if kind not in BIASES or (bias is None) != (kind == "no_bias"):
        raise ValueError(
            f"DotProductAttention: core_attention_bias_type must be one of {', '.join(BIASES)}, with core_attention_bias "
            f"unless no_bias; got {kind!r} and {'no tensor' if bias is None else tuple(bias.shape)}"
        )
    return bias * scale if bias is not None and kind == "pre_scale_bias" else bias


def seen_keys(
    kind: str, window: tuple[int, int] | None, corner: bool | None, heads: tuple[Tensor, Tensor], given: Tensor | None,
    explicit: bool,
) -> tuple[Tensor | None, bool]:  # fmt: skip
    """Return `attn_mask` (True: the query attends to the key; None: no mask tensor) and `is_causal` for torch's attention.

    Args:
        kind: Mask type.
        window: Numbers of keys to the left and to the right; None: no window.
        corner: Whether the last query is aligned with the last key; None: the mask type decides.
        heads: q and k, [B, H, S, D].
        given: The attention_mask of the caller (True: the query does not attend to the key); None: no mask.
        explicit: Whether a causal mask must be a tensor, since a bias is added to the mask; is_causal is then False.

    Raises ValueError if the mask type needs a mask and `given` is None, or takes no mask and `given` is a mask.
    """
    takes = kind.startswith("padding") or kind == "arbitrary"
    if takes != (given is not None):
        raise ValueError(
            f"DotProductAttention: mask type {kind} {'needs' if takes else 'takes no'} attention_mask; got "
            f"{'none' if given is None else tuple(given.shape)}: pass another attn_mask_type, or a mask that fits the "
            f"type"
        )
    queries, keys = heads[0].shape[2], heads[1].shape[2]
    causal, (left, right) = "causal" in kind, window or (UNBOUNDED, UNBOUNDED)
    right = 0 if causal else right
    if corner is None:
        corner = kind not in ("causal", "padding_causal")
    offset = keys - queries if corner else 0
    if causal and left == UNBOUNDED and not offset and given is None and not explicit:
        return None, True
    seen = None
    if left != UNBOUNDED or right != UNBOUNDED:
        ahead = torch.arange(keys, device=heads[0].device) - (
            torch.arange(queries, device=heads[0].device)[:, None] + offset
        )
        seen = (ahead >= -left) if left != UNBOUNDED else torch.ones_like(ahead, dtype=torch.bool)
        seen = seen & (ahead <= right) if right != UNBOUNDED else seen
    if given is not None:
        seen = ~given if seen is None else seen & ~given
    return seen, False
