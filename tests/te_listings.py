"""Programs from the documentation of Transformer Engine (TE), with imports of dlp.te in place of TE.

`run` replaces the device if there is no GPU. Sizes are small.
"""

from __future__ import annotations

import torch

IMPORTS = """
import torch
import dlp.te as te
from dlp.te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, NVFP4BlockScaling
"""

LISTINGS = {
    "a linear in FP8": """
fp8_recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
my_linear = te.Linear(64, 64, bias=True)
inp = torch.rand((32, 64)).cuda()
with te.autocast(enabled=True, recipe=fp8_recipe):
    out_fp8 = my_linear(inp)
out_fp8.mean().backward()
out_fp32 = my_linear(inp)
out_fp32.mean().backward()
assert my_linear.bias.grad is not None and not torch.equal(out_fp8, out_fp32)
""",
    "current scaling": """
recipe = Float8CurrentScaling(fp8_format=Format.HYBRID)
layer = te.Linear(64, 64, params_dtype=torch.bfloat16)
inp = torch.randn(4, 8, 64, dtype=torch.bfloat16, device="cuda")
with te.autocast(enabled=True, recipe=recipe):
    output = layer(inp)
output.sum().backward()
assert layer.weight.grad.dtype == torch.bfloat16
""",
    "block scaling": """
recipe = Float8BlockScaling(
    fp8_format=te.common.recipe.Format.E4M3, x_block_scaling_dim=1, w_block_scaling_dim=2, grad_block_scaling_dim=1,
)
layer = te.Linear(128, 128, params_dtype=torch.bfloat16)
inp = torch.randn(2, 64, 128, dtype=torch.bfloat16, device="cuda")
with te.autocast(enabled=True, recipe=recipe):
    loss = layer(inp).sum()
loss.backward()
""",
    "a recipe in another": """
first, second = (te.Linear(64, 64).bfloat16() for _ in range(2))
inp = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda")
with te.autocast(recipe=NVFP4BlockScaling()):
    y = first(inp)
    with te.autocast(recipe=MXFP8BlockScaling(fp8_format=Format.E4M3)):
        out = second(y)
out.mean().backward()
assert first.weight.grad is not None and second.weight.grad is not None
""",
    "a transformer layer": """
layer = te.TransformerLayer(64, 128, 4)
layer.to(dtype=torch.bfloat16).cuda()
x, dy = (torch.rand(16, 2, 64).cuda().to(dtype=torch.bfloat16) for _ in range(2))
with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=16)):
    y = layer(x, attention_mask=None)
y.backward(dy)
assert y.shape == x.shape
""",
    "weights of several microbatches": """
layer = te.TransformerLayer(64, 128, 4, fuse_qkv_params=False)
x, dy = (torch.rand(16, 2, 64).cuda() for _ in range(2))
for first in (True, False):
    with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        y = layer(x, attention_mask=None, is_first_microbatch=first)
    y.backward(dy)
""",
    "torch's autocast": """
def run_forward_backward(params_dtype, autocast_precision):
    layer = te.TransformerLayer(
        hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, params_dtype=params_dtype,
    )
    x = torch.randn(8, 2, 64, dtype=params_dtype, device="cuda")
    with torch.autocast(device_type="cuda", dtype=autocast_precision):
        output = layer(x)
    output.sum().backward()
run_forward_backward(torch.float32, torch.bfloat16)
run_forward_backward(torch.bfloat16, torch.bfloat16)
""",
    "FP8 weights": """
with te.quantized_model_init(enabled=True), torch.no_grad():
    layer_fp8 = te.Linear(64, 64, params_dtype=torch.bfloat16)
with torch.no_grad():
    inp = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda")
    with te.autocast(enabled=True):
        out = layer_fp8(inp)
assert out.shape == inp.shape
""",
    "a residual block": """
def residual_block(layer, inp):
    return layer(inp) + inp

for use_save_original in (False, True):
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16, save_original_input=use_save_original)
    inp = torch.randn(32, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        out = residual_block(layer, inp)
    out.sum().backward()
""",
    "a layer of parts": """
class Layer(torch.nn.Module):
    def __init__(self, hidden_size, ffn_hidden_size, num_attention_heads):
        super().__init__()
        self.heads, self.channels = num_attention_heads, hidden_size // num_attention_heads
        self.ln_qkv = te.LayerNormLinear(hidden_size, 3 * hidden_size, bias=True)
        self.attention = te.DotProductAttention(num_attention_heads, self.channels, attn_mask_type="causal")
        self.projection = te.Linear(hidden_size, hidden_size, bias=True)
        self.dropout = torch.nn.Dropout(0.1)
        self.ln_mlp = te.LayerNormMLP(hidden_size, ffn_hidden_size)

    def forward(self, x, attention_mask=None):
        qkv = self.ln_qkv(x)
        qkv = qkv.view(qkv.size(0), qkv.size(1), self.heads, 3 * self.channels)
        q, k, v = torch.split(qkv, qkv.size(3) // 3, dim=3)
        x = x + self.dropout(self.projection(self.attention(q, k, v, attention_mask)))
        return x + self.ln_mlp(x)

x = torch.rand(16, 2, 64).cuda()
with te.autocast(enabled=True, recipe=DelayedScaling(fp8_format=Format.HYBRID)):
    y = Layer(64, 128, 4)(x)
y.backward(torch.rand_like(y))
""",
    "ops": """
mlp = te.ops.Sequential(
    te.ops.LayerNorm(64), te.ops.Linear(64, 256), te.ops.SwiGLU(), te.ops.Linear(256 // 2, 64),
)
x = torch.randn(32, 64, device="cuda")
y = mlp(x)
""",
    "ops with branches": """
fc1 = te.ops.Sequential(
    te.ops.LayerNorm(64), te.ops.MakeExtraOutput(), te.ops.Linear(64, 256), te.ops.SwiGLU(),
)
fc2 = te.ops.Sequential(te.ops.Linear(128, 64), te.ops.AddExtraInput())
x = torch.randn(32, 64, device="cuda")
y, residual = fc1(x)
y = fc2(y, residual)
""",
    "ops that hand over": """
with te.quantized_model_init():
    norm = te.ops.Sequential(te.ops.LayerNorm(64), te.ops.Quantize())
    fc1 = te.ops.Sequential(te.ops.Linear(64, 128))
x = torch.randn(32, 64, device="cuda")
with te.autocast():
    y = norm(x)
    z = fc1(y)
assert isinstance(y, te.ops.Handed)
""",
}  # fmt: skip


def run(name: str) -> None:
    """Run a listing, on the GPU if there is one. New modules and tensors are created on the same device."""
    code = LISTINGS[name]
    if not torch.cuda.is_available():
        code = code.replace(".cuda()", "").replace('"cuda"', '"cpu"')
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        exec(compile(IMPORTS + code, name, "exec"), {"__name__": "__main__"})
