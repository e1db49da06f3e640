"""dlp.ops: models of small operations, which are fused differently in forward and in backward (docs/ops.md).

The names are those of `transformer_engine.pytorch.ops`. All names of `__all__` are public.
"""

from dlp.kernels.ops import Produced
from dlp.ops.basic.activations import GEGLU, GELU, GLU, ReGLU, ReLU, SiLU, SReLU, SwiGLU
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
from dlp.ops.handed import Handed
from dlp.ops.linear import BasicLinear, Linear
from dlp.ops.modules import LayerNormLinear, LayerNormMLP, TransformerLayer
from dlp.ops.op import BasicOperation, FusedOperation, FusibleOperation
from dlp.ops.sequential import Sequential
from dlp.ops.te_names import from_te, to_te

__all__ = [
    "AddExtraInput", "AllGather", "AllReduce", "BasicLinear", "BasicOperation", "Bias", "ConstantScale",
    "Converted", "Dropout",
    "FusedOperation", "FusibleOperation", "GEGLU", "GELU", "GLU", "Handed", "Identity", "L2Normalization", "LayerNorm",
    "LayerNormLinear", "LayerNormMLP", "Linear", "MakeExtraOutput", "OperationContext", "OperationFuser", "Produced",
    "Quantize", "RMSNorm", "ReGLU", "ReLU", "ReduceScatter", "Reshape", "SReLU", "Sequential", "SiLU", "SwiGLU",
    "TransformerLayer", "from_te", "register_backward_fusion", "register_forward_backward_fusion", "register_forward_fusion",
    "to_te",
]  # fmt: skip

load_shipped()  # the fusions in dlp/ops/fused
