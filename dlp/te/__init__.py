"""dlp.te: layers of dlp with the names, keywords and defaults of `transformer_engine.pytorch` (TE).

    import dlp.te as te                          in place of import transformer_engine.pytorch as te
    from dlp.te.recipe import DelayedScaling     in place of from transformer_engine.common.recipe import ...

An argument of TE without counterpart in dlp raises TypeError (`dlp.te_arguments`), and a name of TE without counterpart raises
AttributeError (`MISSING`). Both messages name the alternative. docs/from-transformer-engine.md has a row for each argument and
name. The names in `__all__` are public.
"""

from types import SimpleNamespace
from typing import NoReturn

from dlp import ops
from dlp.ops import DotProductAttention as _DotProductAttention
from dlp.ops import LayerNorm, RMSNorm
from dlp.te import recipe
from dlp.te.modules import LayerNormLinear, LayerNormMLP, Linear, TransformerLayer
from dlp.te.regions import (
    autocast,
    destroy_ub,
    fp8_autocast,
    fp8_model_init,
    initialize_ub,
    is_fp8_available,
    quantized_model_init,
)
from dlp.te.rope import RotaryPositionEmbedding

__all__ = [
    "DotProductAttention", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm", "RotaryPositionEmbedding",
    "TransformerLayer", "autocast", "common", "destroy_ub", "fp8_autocast", "fp8_model_init", "initialize_ub",
    "is_fp8_available", "ops", "quantized_model_init", "recipe",
]  # fmt: skip

common = SimpleNamespace(recipe=recipe)  # te.common.recipe.Format

MISSING = {
    "GroupedLinear": 'construct dlp.GroupedLinear(num_gemms, in_features, out_features, bias=True, style="local"), and pass '
    "torch.tensor(m_splits).cumsum(0) in place of m_splits",
    "MultiheadAttention": "build attention from dlp.te.LayerNormLinear, dlp.te.DotProductAttention and dlp.te.Linear",
    "InferenceParams": "generate with launch.generate, which has a cache of keys and values",
    "Fp8Padding": "leave the padding out: recipes pad operands themselves",
    "Fp8Unpadding": "leave the padding out: recipes pad operands themselves",
    "checkpoint": "call torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)",
    "make_graphed_callables": "call torch.cuda.make_graphed_callables inside of dlp.graphing(model)",
    "get_cpu_offload_context": "use torch.autograd.graph.save_on_cpu()",
    "CudaRNGStatesTracker": "give the ranks of a tp group equal seeds, or different seeds under sequence parallelism",
    "onnx_export": "export a frozen model with dlp.export",
    "moe_permute": "sort rows with torch.argsort(expert, stable=True), as dlp.GroupedLinear expects rows",
}


class DotProductAttention(_DotProductAttention):
    """`dlp.ops.DotProductAttention` with TE's default layout, [S, B, H, D]."""

    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, *, qkv_format="sbhd", **options) -> None:  # type: ignore[no-untyped-def]
        super().__init__(num_attention_heads, kv_channels, num_gqa_groups, qkv_format=qkv_format, **options)


def __getattr__(name: str) -> NoReturn:
    """Raise AttributeError for a name that this module does not have. For a name in `MISSING` the message names the
    alternative."""
    instead = f": {MISSING[name]}" if name in MISSING else ""
    raise AttributeError(f"module 'dlp.te' has no attribute {name!r}{instead}")
