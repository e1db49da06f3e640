"""bf16: no quantization. Operands keep the dtype of the source tensors; columnwise operands are strided views."""

from dlp.quant.quantizer import KeepHighPrecision
from dlp.quant.recipe import Recipe, both


def recipe() -> Recipe:
    """Return the recipe that keeps x, w and dy in high precision."""
    keep = both(KeepHighPrecision())
    return Recipe("bf16", x=keep, w=keep, dy=keep)
