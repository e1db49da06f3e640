"""GroupedLinear: E linears [N, K], one for each expert of a mixture of experts, for tokens that are sorted by expert.

    x [M, K]      rows of expert 0, then rows of expert 1, ...
    y [M, N]      each row of x, multiplied by the weight of its expert
    offsets [E]   index at which the rows of each expert end; an expert may have no rows

Each expert is a separate linear (`bank[e]`, with a parameter `e.weight` [N, K]). Recipes, tensor parallelism, quantized gathers
of FSDP, delayed scales, checkpoints and `dlp.quantize_` treat an expert like any other linear. If the experts run one after the
other, results are bitwise equal to separate calls of these linears, each with the rows of one expert. An expert without rows
also runs: it takes part in collectives and gets a gradient of zeros, which FSDP needs on every rank.

On a GPU, if x is bf16 and the experts are neither quantized nor sharded nor have a delayed wgrad, they run as one
`torch.nn.functional.grouped_mm`, which may round differently. On sm_90, with rowwise FP8, fprop of all experts is one
`torch.nn.functional.scaled_grouped_mm`, and dgrad another (`dlp.flows.grouped_fp8`); a note of the plan says so, or gives the
reason against it. Otherwise the experts run one after the other. Routing and the transfer of tokens between ranks are left to
the user.

    dlp.group_experts(model)     replaces the experts of Mixtral and Qwen3-MoE (transformers) by GroupedLinears
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlp.flows import grouped_fp8
from dlp.parallel.linear.modules import ColumnParallelLinear, Linear, ParallelLinear, RowParallelLinear
from dlp.quant.parameter import QuantizedParameter

STYLES: dict[str, type[Linear]] = {"local": Linear, "column": ColumnParallelLinear, "row": RowParallelLinear}


class GroupedLinear(nn.ModuleList):
    """Apply y = x @ weight[e].T + bias[e] to the rows of each expert e.

    Args:
        num_experts: number E of experts.
        in_features: size K of the last dimension of x.
        out_features: size N of the last dimension of y.
        bias: whether each expert has a bias.
        style: "local", "column" or "row": experts are `dlp.Linear`, `dlp.ColumnParallelLinear` or `dlp.RowParallelLinear`;
            None: experts are `nn.Linear`, which `dlp.convert` or `dlp.quantize_` can replace (names `NAME.0`, `NAME.1`, ...).
        **options: options of the linears, such as recipe, tp, device and dtype.

    Shape:
        - x: [M, K], rows sorted by expert
        - offsets: int32 or int64 [E], index at which the rows of each expert end; the last one is M
        - y: [M, N]

    Raises:
        ValueError: for an unknown style, for num_experts below 1, and for sequence parallelism, which shards tokens.

    Examples:
        >>> bank = dlp.GroupedLinear(4, 64, 128, style="local", recipe="fp8_current")
        >>> bank(torch.randn(10, 64), torch.tensor([3, 3, 9, 10])).shape
        torch.Size([10, 128])
    """

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, bias: bool = False, *, style: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        if num_experts < 1:
            raise ValueError(f"GroupedLinear needs at least 1 expert; got {num_experts}")
        if style is not None and style not in STYLES:
            raise ValueError(f"GroupedLinear: style must be one of {', '.join(STYLES)}, or None; got {style!r}")
        if options.get("sequence_parallel"):
            raise ValueError(
                "GroupedLinear reads complete rows of tokens, and sequence parallelism shards tokens; gather tokens "
                "before routing (dlp.gather_tokens), and leave sequence_parallel out"
            )
        kind: Callable[..., nn.Module] = nn.Linear if style is None else STYLES[style]
        super().__init__(kind(in_features, out_features, bias, **options) for _ in range(num_experts))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Compute y [M, N] from x [M, K] and offsets [E]."""
        if x.dim() != 2 or not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
            kind = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
            raise ValueError(
                f"a GroupedLinear reads x [M, K] and offsets, an int32 or int64 tensor [{len(self)}]; got x "
                f"{list(x.shape)} and offsets of {kind}: pass x.flatten(0, -2), sorted by expert, and a tensor"
            )
        if self.multiplies_grouped(x):
            return self._grouped(x, offsets)
        sizes = self._sizes(x, offsets)
        if self._multiplies_rowwise(x):
            return grouped_fp8.multiply([expert.core for expert in self], x, sizes, offsets)  # type: ignore[misc]
        return torch.cat([expert(rows) for expert, rows in zip(self, x.split(sizes), strict=True)])

    def _sizes(self, x: Tensor, offsets: Tensor) -> list[int]:
        """Return the number of rows of each expert. Raises ValueError for invalid offsets, and for sequence parallelism."""
        ends = offsets.flatten().tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        if offsets.dim() != 1 or len(sizes) != len(self) or min(sizes) < 0 or ends[-1] != x.shape[0]:
            raise ValueError(
                f"offsets must be {len(self)} ends of rows, one for each expert, not decreasing, the last one {x.shape[0]} "
                f"(the rows of x); got {offsets.tolist()}"
            )
        for spec in [expert.core.spec for expert in self if isinstance(expert, ParallelLinear)]:
            if spec.tp > 1 and spec.style.sequence_parallel:
                raise ValueError(
                    f"{spec.name}: an expert reads complete rows of tokens, and sequence parallelism shards tokens; "
                    f"set sequence_parallel = false for this layer group, and gather tokens before routing"
                )
        return sizes

    def multiplies_grouped(self, x: Tensor) -> bool:
        """Whether all experts run as one grouped GEMM: x is bf16 on a GPU, no hook and no region of autocast needs separate
        linears (not checked in compiled code), and `_groups` holds for all experts."""
        if not x.is_cuda or x.dtype is not torch.bfloat16 or not all(_groups(expert) for expert in self):
            return False
        if torch.compiler.is_dynamo_compiling():
            return True
        cores = [expert.core for expert in self if isinstance(expert, ParallelLinear)]
        return not self._hooked() and not (cores and grouped_fp8.region_decides(cores))

    def _hooked(self) -> bool:
        """Whether an expert has hooks, which a grouped GEMM would not call."""
        hooks = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
        return any(getattr(expert, each) for expert in self for each in hooks)

    def _multiplies_rowwise(self, x: Tensor) -> bool:
        """Whether fprop and dgrad run as grouped GEMMs of rowwise FP8; False in compiled code, because logging would break the
        graph. If all experts have a recipe of rowwise FP8, a note of the plan states the result and, if False, the reason."""
        cores = [expert.core for expert in self if isinstance(expert, ParallelLinear)]
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling or len(cores) < len(self) or not grouped_fp8.are_rowwise(cores):
            return False
        why = "experts have hooks" if self._hooked() else grouped_fp8.obstacle(cores, x)
        how = f"one after the other: {why}" if why else "as one grouped GEMM for fprop and one for dgrad"
        cores[0].session.note(f"experts of a GroupedLinear in {cores[0].spec.recipe} run {how}")
        return not why

    def _grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Run all experts as one grouped GEMM, on a stacked copy of the weights. torch's kernel may round differently than
        separate linears."""
        weights = torch.stack([_values(expert).to(x.dtype) for expert in self])
        offsets = offsets.to(x.device, torch.int32)
        y = F.grouped_mm(x, weights.transpose(1, 2), offs=offsets)
        if getattr(self[0], "bias", None) is None:
            return y
        biases = torch.stack([_local(expert.bias).to(x.dtype) for expert in self])  # type: ignore[arg-type]
        sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
        return y + biases.repeat_interleave(sizes, 0, output_size=x.shape[0])

    def stacked(self) -> Tensor:
        """Return the full weights [E, N, K] in high precision, gathered from any mesh. All ranks call `stacked`."""
        return torch.stack([_full(expert.weight.detach()) for expert in self])  # type: ignore[operator]

    @classmethod
    def of(cls, weights: Tensor) -> GroupedLinear:
        """Create a GroupedLinear of `nn.Linear`s with these weights [E, N, K]."""
        count, features, columns = weights.shape
        bank = cls(count, columns, features, device="meta", dtype=weights.dtype)
        for expert, weight in zip(bank, weights, strict=True):
            own = weight.detach().clone() if weight.device.type != "meta" else weight.detach()
            expert.weight = nn.Parameter(own, requires_grad=weights.requires_grad)
        return bank


def _groups(expert: nn.Module) -> bool:
    """Whether an expert can be part of a grouped GEMM in bf16: it is a linear that is neither quantized nor sharded, returns y
    alone and records no statistics, and autograd accumulates its gradient."""
    if isinstance(expert, ParallelLinear):
        spec, core = expert.core.spec, expert.core
        quantized = any(not quantizer.format.keeps_source for quantizer in spec.recipe.quantizers())
        by_wgrad = spec.options.delay_wgrad or any(
            each and each.mode == "main_grad" for each in core.weights.main_grads
        )
        return spec.tp == 1 and not (quantized or by_wgrad or spec.return_bias or core.stats is not None)
    return isinstance(expert, nn.Linear) and not isinstance(expert.weight, QuantizedParameter | DTensor)


def _values(expert: nn.Module) -> Tensor:
    if isinstance(expert, ParallelLinear):
        return expert.core.weight_tensors()[0]
    weight: Tensor = expert.weight  # type: ignore[assignment]
    return weight


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _full(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.dequantize() if isinstance(whole, QuantizedParameter) else whole


class GroupedExperts(nn.Module):
    """The experts of a mixture-of-experts block of transformers, as three `GroupedLinear`s.

    gate_proj, up_proj   hidden_size H -> intermediate_size I
    down_proj            I -> H
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        self.gate_proj, self.up_proj = GroupedLinear.of(gate), GroupedLinear.of(up)
        self.down_proj, self.act_fn = GroupedLinear.of(experts.down_proj), experts.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the output [T, H] from hidden_states [T, H], and from top_k_index and top_k_weights [T, k], for T tokens and
        k experts for each token. The index E (number of experts) means that no expert is chosen."""
        count, expert = len(self.gate_proj), top_k_index.flatten()
        order = expert.argsort(stable=True)
        offsets = torch.bincount(expert, minlength=count)[:count].cumsum(0)
        order = order[: int(offsets[-1])]
        token = order // top_k_index.shape[1]
        x = hidden_states[token]
        y = self.down_proj(self.act_fn(self.gate_proj(x, offsets)) * self.up_proj(x, offsets), offsets)
        y = y * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add_(0, token, y.to(hidden_states.dtype))


def group_experts(model: nn.Module) -> list[str]:
    """Replace the experts of Mixtral and Qwen3-MoE models of transformers by `dlp.GroupedLinear`s.

    Call `group_experts` before `dlp.convert` and `dlp.quantize_`. Layer groups then match the experts by
    `**.experts.gate_proj.*` and `**.experts.up_proj.*` (style "column") and `**.experts.down_proj.*` (style "row").

    Args:
        model: plain model, changed in place.

    Returns:
        Names of the replaced modules.

    Raises:
        ValueError: for a model without such experts.

    Examples:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
        >>> model = MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=2))
        >>> dlp.group_experts(model)
        ['model.layers.0.mlp.experts', 'model.layers.1.mlp.experts']
    """
    found = [name for name, module in model.named_modules() if are_experts(module)]
    if not found:
        raise ValueError(
            f"group_experts: {type(model).__name__} has no experts in the form of Mixtral and Qwen3-MoE of "
            f"transformers 5 (gate_up_proj [E, 2 I, H], down_proj [E, H, I], act_fn); construct dlp.GroupedLinear "
            f"explicitly"
        )
    for name in found:
        model.set_submodule(name, GroupedExperts(model.get_submodule(name)))
    return found


def are_experts(module: nn.Module) -> bool:
    """Return whether a module has the form of the experts of Mixtral and Qwen3-MoE in transformers 5: 3-D weights
    `gate_up_proj` and `down_proj`, no `gate_up_proj_bias`, and `act_fn`."""
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor) and hasattr(module, "act_fn")):
        return False
    biased = getattr(module, "gate_up_proj_bias", None) is not None
    return gate_up.dim() == down.dim() == 3 and gate_up.shape[1] == 2 * down.shape[2] and not biased
