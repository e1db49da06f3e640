"""pack_int4: convert int4 weights to the layout of torch's int4 GEMM, for fast forward passes on a CPU.

    dlp.quantize_(model, dlp.recipe("qat", weight="int4 group 128"))     int4 codes. A GPU kernel for few tokens reads them; a
                                                                         CPU decodes the weights in each forward
    dlp.pack_int4(model)                                                 torch's CPU kernel reads the codes

    y = x @ ((codes - 8) * scale + zero).T      codes are 0 to 15; each group along K has a bf16 scale and zero

The kernel reads bf16 scales and rounds decoded weights to bf16. Results therefore differ from those of `dlp.quantize_` by bf16
rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlp.quant.integers import Int, unpack
from dlp.quant.parameter import QuantizedParameter

GROUPS = (32, 64, 128, 256)  # group sizes that torch's kernel supports


class PackedInt4Linear(nn.Module):
    """Linear with int4 weights in the layout of torch's CPU kernel, for forward passes in bf16. `dlp.pack_int4` creates it.

    packed            codes, in the layout of torch's CPU kernel
    scale_and_zero    scale and zero of each group, bf16 [K / group, N, 2]
    """

    packed: Tensor
    scale_and_zero: Tensor

    def __init__(self, weight: QuantizedParameter, bias: Tensor | None) -> None:
        super().__init__()
        fmt = weight.use.format
        assert isinstance(fmt, Int)
        self.out_features, self.in_features, self.group = weight.shape[0], weight.shape[1], fmt.group
        codes, scale_inv, *zero = weight.parts
        scale = scale_inv.bfloat16()
        zeros = -zero[0].float() * scale.float() if zero else torch.zeros_like(scale_inv)
        counted = (unpack(codes, 4).to(torch.int32) + 8).contiguous()
        self.register_buffer("packed", torch._convert_weight_to_int4pack_for_cpu(counted, 1))
        self.register_buffer("scale_and_zero", torch.stack([scale, zeros.bfloat16()], -1).transpose(0, 1).contiguous())
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [..., N] from x [..., K] in bf16."""
        if x.dtype is not torch.bfloat16 or x.is_cuda or self.packed.is_cuda:
            raise ValueError(
                f"x of packed int4 weights must be bf16 on a CPU; got {x.dtype} on {x.device}, and weights on "
                f"{self.packed.device}: convert x; on a GPU run the model of dlp.quantize_ without dlp.pack_int4"
            )
        rows = x.reshape(-1, self.in_features).contiguous()
        y = torch._weight_int4pack_mm_for_cpu(rows, self.packed, self.group, self.scale_and_zero).view(
            *x.shape[:-1], self.out_features
        )
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group}"


@torch.no_grad()
def pack_int4(model: nn.Module) -> list[str]:
    """Replace linears with int4 weights in groups by linears that run torch's int4 GEMM on a CPU.

    Packed linears run forward only, in bf16. Call `pack_int4` after `dlp.quantize_` in mode "weight_only" or after
    `dlp.load_quantized_state_dict`; save codes before, since packed models cannot be saved as codes. On a GPU `pack_int4` is
    not needed: there the kernel for up to 8 tokens reads the codes of `dlp.quantize_` directly.

    Args:
        model: plain model after `dlp.quantize_`, changed in place.

    Returns:
        Names of the packed linears. Linears with weights of other formats stay as they are.

    Raises:
        ValueError: before anything is changed, if no linear has int4 weights in groups; for weights on a GPU, for a group size
            that the kernel does not support, for an N that is no multiple of 16, and if x is also quantized.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 64)).bfloat16()
        >>> model = dlp.quantize_(model, dlp.recipe("qat", weight="int4 group 64"))
        >>> dlp.pack_int4(model)
        ['0']
    """
    found = {name: module for name, module in model.named_modules() if _is_int4(module)}
    if not found:
        raise ValueError(
            "pack_int4: no nn.Linear has int4 weights in groups; call dlp.quantize_ with dlp.recipe('qat', weight='int4 group "
            "128') first"
        )
    if on_gpu := [name for name, module in found.items() if module.weight.is_cuda]:
        raise ValueError(
            f"pack_int4: {on_gpu[0]} is on a GPU, where linears of dlp.quantize_ multiply int4 codes without a second layout: "
            f"leave pack_int4 out, or move the model to a CPU first"
        )
    for name, module in found.items():
        use, (rows, columns) = module.weight.use, module.weight.shape
        if use.format.group not in GROUPS or rows % 16 or use.shape is not None or use.activation is not None:
            raise ValueError(
                f"pack_int4: {name} has a weight [{rows}, {columns}] in groups of {use.format.group}"
                f"{', and its x is quantized' if use.activation is not None else ''}; torch's kernel takes groups of "
                f"{', '.join(map(str, GROUPS))} that divide K, N in multiples of 16, and x in bf16: quantize with another "
                f"group or in mode 'weight_only', or exclude the layer with filter_fn"
            )
    for name, module in found.items():
        model.set_submodule(name, PackedInt4Linear(module.weight, module.bias))
    return list(found)


def _is_int4(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if not (isinstance(module, nn.Linear) and isinstance(weight, QuantizedParameter)):
        return False
    return isinstance(weight.use.format, Int) and weight.use.format.bits == 4 and weight.use.format.group > 0
