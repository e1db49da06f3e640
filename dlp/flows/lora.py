"""LoRA: fine-tune low-rank adapters of frozen linears, whose weights may be quantized-only.

    y = base(x) + alpha / rank * lora_B(lora_A(x))      trained: lora_A [rank, K], lora_B [N, rank]; frozen: base [N, K]

    dlp.lora(model, rank=16, layers="**.{q,v}_proj", base="nvfp4")       quantized base; for one GPU, FSDP2, tp of torch
    dlp.lora(model, ...); dlp.convert(model, dlp.lora_groups(model, groups), mesh)      for tp and sequence parallelism of dlp

Under tp an adapter is sharded like its base, so that the collectives of the adapter transfer only `rank` features of each
token. If the base is column-parallel, lora_A is local and lora_B column-parallel. If the base is row-parallel, lora_A is
row-parallel and lora_B local.

Adapters are saved in the file format of Hugging Face's PEFT (adapter_config.json, adapter_model.safetensors).

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlp.flows.compressed_models import write_file
from dlp.flows.plain import quantize_
from dlp.parallel.linear.modules import ParallelLinear
from dlp.parallel.model.groups import LayerGroup
from dlp.parallel.model.survey import container_lengths, survey
from dlp.parallel.weight.local import fill
from dlp.quant import recipe as recipes
from dlp.quant.parameter import QuantizedParameter
from dlp.quant.patterns import must_match

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # prefix of every name in a PEFT file
INTEGERS = re.compile("int[2-7]")  # values of `base` that mean the recipe qat with integer weights in groups of 32


class LoRALinear(nn.Module):
    """A linear with a low-rank adapter. `dlp.lora` replaces an `nn.Linear` by this module.

    base      the frozen linear K -> N
    lora_A    nn.Linear K -> rank without bias
    lora_B    nn.Linear rank -> N without bias, initialized with zeros, so that the model starts unchanged
    dropout   applied to x before lora_A; None: no dropout
    """

    trained_linears = ("lora_A", "lora_B")  # `dlp.quantize_` leaves these linears in high precision

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        factory = {"device": base.weight.device, "dtype": _dtype(base)}
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **factory)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **factory)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.rank, self.alpha, self.scaling = rank, alpha, alpha / rank
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [..., N] from x [..., K]."""
        dropped = x if self.dropout is None else self.dropout(x)
        y: Tensor = self.base(x)
        return y + self.lora_B(self.lora_A(dropped)) * self.scaling

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}"


def _dtype(base: nn.Linear) -> torch.dtype:
    """Return the dtype of the adapter: the dtype of the base weight if it is floating-point, else bf16."""
    return base.weight.dtype if base.weight.dtype.is_floating_point else torch.bfloat16


def lora(
    model: nn.Module, rank: int = 8, alpha: float | None = None, layers: str | Sequence[str] = "**", *,
    base: Any = None, dropout: float = 0.0,
) -> list[str]:  # fmt: skip
    """Freeze a model, and add trainable low-rank adapters to matching linears.

    Call `lora` before `dlp.convert`, `fully_shard`, `torch.compile` and the construction of the optimizer.

    Args:
        model: plain model, changed in place. All its parameters are frozen.
        rank: rank of the adapters.
        alpha: the output of an adapter is multiplied by alpha / rank; None: alpha = rank.
        layers: pattern of module names, as in a layer group, or several patterns.
        base: recipe by which `dlp.quantize_` quantizes the weights of the matching linears ("nvfp4", "fp8_block", "int8",
            ...); "int4" means `dlp.recipe("qat", weight="int4 group 32")`, and so on for "int2" to "int7"; None: weights are
            not quantized.
        dropout: probability of dropout of x before the adapter.

    Returns:
        Names of the linears that got an adapter.

    Raises:
        ValueError: before anything is changed, for an invalid rank, alpha or dropout, for patterns that match no `nn.Linear`,
            for layers of `dlp.convert` or with adapters, and for weights that `base` cannot quantize.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> dlp.lora(model, rank=4, layers="0", base="fp8_current")
        ['0']
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
        512
    """
    if type(rank) is not int or rank < 1:
        raise ValueError(f"lora: rank must be an integer of at least 1; got {rank!r}: choose 4 to 64")
    if alpha is not None and (not isinstance(alpha, int | float) or not 0 < alpha < math.inf):
        raise ValueError(
            f"lora: alpha must be a finite number above 0; got {alpha!r}: choose the rank or twice the rank"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"lora: dropout must be a number in [0, 1); got {dropout}")
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear | LoRALinear):
            kind = "has an adapter already" if isinstance(module, LoRALinear) else "is a layer of dlp.convert"
            raise ValueError(f"lora: {name} {kind}; call dlp.lora once, on the plain model, before dlp.convert")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    patterns, lengths = [layers] if isinstance(layers, str) else layers, container_lengths(model.named_modules())
    prefix = getattr(model, "base_model_prefix", "")
    chosen = [
        name for pattern in patterns for name in must_match(list(linears), lengths, pattern, prefix, asked_by="lora")
    ]
    chosen = list(dict.fromkeys(chosen))
    if not chosen or "" in chosen:
        raise ValueError(
            f"lora: layers must be patterns of names of linears inside the model; got {layers!r} for a "
            f"{type(model).__name__}: choose '**', or pass the module that contains the linear"
        )
    if base is not None:
        integers = isinstance(base, str) and INTEGERS.fullmatch(base)
        config = recipes.load("qat", weight=f"{base} group 32") if integers else base
        quantize_(model, config, lambda module, name: name in chosen)
    model.requires_grad_(False)
    for name in chosen:
        model.set_submodule(name, LoRALinear(linears[name], rank, rank if alpha is None else alpha, dropout))
    return chosen


def adapted(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Yield the name and the module of each linear with an adapter."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))


def lora_groups(model: nn.Module, groups: Sequence[LayerGroup], recipe: Any = "bf16") -> list[LayerGroup]:
    """Return layer groups with which `dlp.convert` converts a model with adapters.

    Args:
        model: plain model after `dlp.lora`.
        groups: layer groups for the model without adapters.
        recipe: recipe of lora_A and lora_B.

    Returns:
        The given groups, with the names of the matching modules, the new names of the base linears (`NAME.base`) and without
        siblings; then groups for lora_A and lora_B.

    Raises:
        ValueError: for a pattern that matches no layer, as of groups for the names `NAME.base` of the model with adapters.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        >>> names = dlp.lora(model, rank=4, layers="0")
        >>> groups = dlp.lora_groups(model, [dlp.LayerGroup("all", "**", style="column", recipe="fp8_current")])
        >>> [group.match for group in groups]
        [('0.base', '1'), ('0.lora_A',), ('0.lora_B',)]
    """
    seen, with_adapter = survey(model), dict(adapted(model))
    inner = tuple(f"{name}." for name in with_adapter)
    names = [*with_adapter, *(name for name in (*seen.modules, *seen.aliases) if not name.startswith(inner))]
    prefix = getattr(model, "base_model_prefix", "")
    made, cut = list[LayerGroup](), dict[str, tuple[str | None, bool | None]]()
    for group in groups:
        if group.convert is False:  # matches modules, with all layers in them
            made.append(group)
            continue
        asked_by = f"lora_groups: group {group.name!r}"
        matched = [
            name
            for pattern in group.match
            for name in must_match(names, seen.lengths, pattern, prefix, asked_by=asked_by)
        ]
        renamed = [f"{name}.base" if name in with_adapter else name for name in dict.fromkeys(matched)]
        siblings = None if group.siblings is None else False
        made.append(replace(group, match=renamed, siblings=siblings))
        for name in matched:
            style, sequence = cut.get(name, (None, None))
            cut[name] = (group.style or style, sequence if group.sequence_parallel is None else group.sequence_parallel)
    for side, beside in (("lora_A", "row"), ("lora_B", "column")):
        by_cut: dict[tuple[str, bool | None], list[str]] = {}
        for name in with_adapter:
            style, sequence = cut.get(name, (None, None))
            own = style if style == beside else "local"
            by_cut.setdefault((own or "local", sequence), []).append(f"{name}.{side}")
        for (style, sequence), match in by_cut.items():
            made.append(LayerGroup(f"{side}-{style}", match, recipe=recipe, style=style, sequence_parallel=sequence))
    return made


@torch.no_grad()
def merge_lora(model: nn.Module) -> list[str]:
    """Add each adapter to the weight of its base, and put the plain linear back into the model.

    A quantized weight is decoded first. The merged weight has the dtype of the adapter; call `dlp.quantize_` afterwards to
    quantize it.

    Args:
        model: model after `dlp.lora`, not converted and not sharded.

    Returns:
        Names of the merged linears.

    Raises:
        ValueError: for a model without adapters, and for a converted or sharded model (save the adapters, and load them into a
            plain model).

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> names = dlp.lora(model, rank=4)
        >>> dlp.merge_lora(model)
        ['0']
    """
    found = list(adapted(model))
    if not found:
        raise ValueError("merge_lora: the model has no adapter; call dlp.lora first")
    for name, module in found:
        if isinstance(module.base, ParallelLinear) or isinstance(module.lora_A.weight, DTensor):
            raise ValueError(
                f"merge_lora: {name} is converted or sharded; call dlp.save_lora, then dlp.load_lora into a plain model with "
                f"adapters, and merge there"
            )
    for name, module in found:
        a, b, base = module.lora_A.weight, module.lora_B.weight, module.base
        weight = base.weight.dequantize() if isinstance(base.weight, QuantizedParameter) else base.weight
        added = (b.float() @ a.float()) * module.scaling
        base.weight = nn.Parameter((weight.float() + added).to(a.dtype), requires_grad=False)
        model.set_submodule(name, base)
    return [name for name, _ in found]


# Files of PEFT


def _whole(parameter: Tensor) -> Tensor:
    """Return the full values of a parameter, gathered from any mesh, on the CPU."""
    values = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return values.detach().cpu().contiguous()


def save_lora(model: nn.Module, folder: str | Path, base_model: str = "") -> None:
    """Write the adapters in the file format of PEFT: adapter_config.json and adapter_model.safetensors.

    The model may be on any mesh. All ranks call `save_lora`; rank 0 writes the full adapters.

    Args:
        model: model with adapters.
        folder: folder, created if it does not exist.
        base_model: name or path of the base model, which PEFT reads from adapter_config.json.

    Raises:
        ValueError: for a model without adapters.
        ImportError: without the package safetensors.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> names = dlp.lora(model, rank=4)
        >>> dlp.save_lora(model, "adapter")
    """
    found = list(adapted(model))
    if not found:
        raise ValueError("save_lora: the model has no adapter; call dlp.lora first")
    tensors = {
        f"{PREFIX}{name}.{side}.weight": _whole(getattr(module, side).weight)
        for name, module in found
        for side in ("lora_A", "lora_B")
    }
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    first = found[0][1]
    config = {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": base_model, "r": first.rank,
        "lora_alpha": first.alpha, "lora_dropout": 0.0 if first.dropout is None else first.dropout.p, "bias": "none",
        "target_modules": sorted(name for name, _ in found), "fan_in_fan_out": False, "use_rslora": False,
        "use_dora": False, "inference_mode": True,
    }  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_file(Path(folder) / WEIGHTS, tensors, {})
    (Path(folder) / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


# Entries of adapter_config.json that `load_lora` supports with these values only
UNSUPPORTED = {
    "use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "bias": "none", "modules_to_save": None,
    "rank_pattern": {}, "alpha_pattern": {}, "alora_invocation_tokens": None,
}  # fmt: skip
# Values of `init_lora_weights` that leave the weights of the base unchanged
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


@torch.no_grad()
def load_lora(model: nn.Module, folder: str | Path) -> None:
    """Load adapters that `save_lora` or PEFT wrote.

    Args:
        model: model after `dlp.lora` with the same layers, rank and alpha; plain, or sharded by FSDP2.
        folder: folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        ValueError: before anything is loaded, for missing or unreadable files, for adapters of another kind (DoRA, rsLoRA,
            aLoRA, trained biases) or of a changed base (PiSSA, OLoRA, LoftQ), for adapters with another rank, alpha or set of
            layers, and for values that are not finite.
        ImportError: without the package safetensors.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> names = dlp.lora(model, rank=4)
        >>> dlp.save_lora(model, "adapter"); dlp.load_lora(model, "adapter")
    """
    from safetensors.torch import load_file

    for file in (CONFIG, WEIGHTS):
        if not (Path(folder) / file).is_file():
            raise ValueError(f"load_lora: {folder} has no {file}; pass a folder that dlp.save_lora or PEFT wrote")
    try:
        config: Mapping[str, Any] = json.loads((Path(folder) / CONFIG).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"load_lora: {folder}/{CONFIG} is not valid JSON: {error}; copy the file again") from None
    if lacking := [key for key in ("r", "lora_alpha") if key not in config]:
        raise ValueError(f"load_lora: {folder}/{CONFIG} has no {lacking[0]}; pass a folder of LoRA adapters")
    for key, plain in UNSUPPORTED.items():
        if config.get(key, plain) not in (plain, None) and config[key]:
            raise ValueError(
                f"load_lora: {folder} has {key} = {config[key]!r}, which dlp does not support; train the adapters without {key}"
            )
    if (initial := config.get("init_lora_weights")) not in INITIAL:
        raise ValueError(
            f"load_lora: {folder} has init_lora_weights = {initial!r}, which changed the weights of the base; save the "
            f"adapters with path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    tensors = {name.removeprefix(PREFIX): value for name, value in load_file(str(Path(folder) / WEIGHTS)).items()}
    found = dict(adapted(model))
    wanted = {f"{name}.{side}.weight" for name in found for side in ("lora_A", "lora_B")}
    if tensors.keys() != wanted:
        missing, other = sorted(wanted - tensors.keys()), sorted(tensors.keys() - wanted)
        raise ValueError(
            f"load_lora: {folder} has adapters of other layers: {len(missing)} missing ({', '.join(missing[:3])}), "
            f"{len(other)} unknown ({', '.join(other[:3])}); call dlp.lora with layers = {config.get('target_modules')}"
        )
    for name, module in found.items():
        if (config["r"], config["lora_alpha"]) != (module.rank, module.alpha):
            raise ValueError(
                f"load_lora: {folder} has r = {config['r']} and lora_alpha = {config['lora_alpha']}, and {name} has rank "
                f"{module.rank} and alpha {module.alpha}; pass these values to dlp.lora"
            )
        for side in ("lora_A", "lora_B"):
            value, shape = tensors[f"{name}.{side}.weight"], getattr(module, side).weight.shape
            if value.shape != shape or not value.is_floating_point() or not value.isfinite().all():
                raise ValueError(
                    f"load_lora: {name}.{side} in {folder} must be finite floats of shape {tuple(shape)}; got {value.dtype} of "
                    f"shape {tuple(value.shape)}: load the adapters of this model"
                )
    for name, module in found.items():
        for side in ("lora_A", "lora_B"):
            parameter, value = getattr(module, side).weight, tensors[f"{name}.{side}.weight"]
            fill(parameter, value.to(parameter.device, parameter.dtype))
