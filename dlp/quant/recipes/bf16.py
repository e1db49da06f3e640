"""bf16: no quantization. Operands keep the dtype of the tensors they come from; columnwise ones are strided views."""

from dlp.quant.quantizer import KeepHighPrecision
from dlp.quant.recipe import Recipe, both


def recipe() -> Recipe:
    """All three operands in high precision."""
    keep = both(KeepHighPrecision())
    return Recipe("bf16", x=keep, w=keep, dy=keep)
