"""dlp.ops: modules built from small operations, which are fused differently in forward and in backward (docs/ops.md).

The names follow `transformer_engine.pytorch.ops`. All names in `__all__` are public.
"""

from dlp.kernels.ops import Produced
from dlp.ops.attention import DotProductAttention
from dlp.ops.basic.activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from dlp.ops.basic.arithmetic import AddExtraInput, ConstantScale, Dropout, Identity, MakeExtraOutput, Reshape
from dlp.ops.basic.bias import Bias
from dlp.ops.basic.communication import AllGather, AllReduce, ReduceScatter
from dlp.ops.basic.norms import L2Normalization, LayerNorm, RMSNorm
from dlp.ops.basic.quantize import Quantize
from dlp.ops.context import OperationContext
from dlp.ops.converted import Converted
from dlp.ops.fuser import OperationFuser
from dlp.ops.fusions import (
    load_shipped,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from dlp.ops.handed import Handed, quantize_for
from dlp.ops.linear import BasicLinear, Linear
from dlp.ops.modules import LayerNormLinear, LayerNormMLP
from dlp.ops.op import BasicOperation, FusedOperation, FusibleOperation
from dlp.ops.sequential import Sequential
from dlp.ops.te_names import from_te, to_te
from dlp.ops.transformer import TransformerLayer

__all__ = [
    "AddExtraInput", "AllGather", "AllReduce", "BasicLinear", "BasicOperation", "Bias", "ClampedSwiGLU",
    "ConstantScale", "Converted", "DotProductAttention", "Dropout",
    "FusedOperation", "FusibleOperation", "GEGLU", "GELU", "GLU", "Handed", "Identity", "L2Normalization", "LayerNorm",
    "LayerNormLinear", "LayerNormMLP", "Linear", "MakeExtraOutput", "OperationContext", "OperationFuser", "Produced",
    "QGEGLU", "QGELU", "Quantize", "RMSNorm", "ReGLU", "ReLU", "ReduceScatter", "Reshape", "SReGLU", "SReLU", "Sequential",
    "SiLU", "SwiGLU",
    "TransformerLayer", "from_te", "quantize_for", "register_backward_fusion", "register_forward_backward_fusion",
    "register_forward_fusion", "to_te",
]  # fmt: skip

load_shipped()  # the fusions in dlp/ops/fused
