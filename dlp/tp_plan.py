"""groups_for: derive layer groups from the tensor-parallel plan of a model of Hugging Face transformers.

    entry of `base_model_tp_plan`        layer group
    colwise                              style = "column"
    rowwise                              style = "row"
    replicated_with_grad_allreduce       style = "column" for a norm of heads, whose gradient is summed over tp
    replicate, all_reduce                no group: the module is replicated
    sequence_parallel                    no group: each rank computes all tokens, with the same results
    all others                           no group: all linears of the parent stay local (`TpPlan.local`)

The linears of a parent, such as an attention module, are either all sharded or all local: if one linear stayed local because
its entry has no equivalent style, the sharded linears of this parent would get inputs with the wrong number of features. In a
model without a plan all linears are local.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dlp.parallel.model.groups import LayerGroup

STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "column"}
HARMLESS = ("replicate", "all_reduce", "sequence_parallel")  # entries that need no layer group
NO_PLAN = "the model has no base_model_tp_plan"


@dataclass(frozen=True)
class TpPlan:
    """Tensor-parallel plan of a model.

    groups   layer groups for `dlp.convert`
    local    pattern of modules -> reason why these modules stay local
    blocks   class names of the model's blocks (transformer layers). Each block is an FSDP unit and is compiled separately
    """

    groups: tuple[LayerGroup, ...]
    local: Mapping[str, str]
    blocks: tuple[str, ...]

    def describe(self) -> list[str]:
        """Return lines for a printed plan: modules that stay local, with the reasons."""
        return [f"{pattern}: local on every tp rank: {reason}" for pattern, reason in self.local.items()]


def groups_for(model: nn.Module, *, tp: int = 1, recipe: Any = None) -> list[LayerGroup]:
    """Return layer groups for a model of Hugging Face transformers, derived from its tensor-parallel plan.

    Args:
        model: model with a `config`, such as `AutoModelForCausalLM.from_config(config)`.
        tp: number of tensor-parallel ranks; with 1 rank nothing is sharded.
        recipe: recipe of all linears in the model's blocks (transformer layers); None: bf16. The head stays in bf16.

    Returns:
        Groups for `dlp.convert`; empty if no module of the plan can be sharded and no recipe is given.

    Raises:
        ValueError: for a model without config. If tp > 1, also for a model without a plan, a plan of which no module can be
            sharded, and a number of heads or an intermediate size that tp does not divide. If a recipe is given, also for
            blocks without linears.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
        >>> config = LlamaConfig(**sizes, num_hidden_layers=2)
        >>> model = LlamaForCausalLM(config)
        >>> groups = dlp.groups_for(model, tp=2, recipe="fp8_current")
        >>> print(dlp.make_plan(model, groups, tp=2))
        plan: 15 linears (10 fp8_current column, 4 fp8_current row, 1 bf16 local)...
    """
    return list(tp_plan(model, tp=tp, recipe=recipe).groups)


def tp_plan(model: nn.Module, *, tp: int = 1, recipe: Any = None) -> TpPlan:
    """Return the layer groups of `groups_for`, the reasons why modules stay local, and the blocks of the model."""
    names = [name for name, _ in model.named_modules()]
    prefix = _base_prefix(model)
    entries = {f"{prefix}{pattern}": style for pattern, style in _entries(model).items()}
    entries = {pattern: style for pattern, style in entries.items() if _matches(pattern, names)}
    local = _local(entries)
    entries |= _activations(model, entries, local)
    cut = {pattern: STYLES[style] for pattern, style in entries.items() if style in STYLES and pattern not in local}
    if tp > 1:
        _check(model, tp, cut, local, entries)
    blocks = blocks_of(model)
    groups = [
        LayerGroup(
            f"{style} of {type(model).__name__}", tuple(p for p, its in cut.items() if its == style), style=style
        )
        for style in dict.fromkeys(cut.values())
    ]
    if recipe is not None:
        groups.append(LayerGroup("recipe", tuple(_linears_of_blocks(model, blocks)), recipe=recipe))
    return TpPlan(tuple(groups), local if entries else {"**": NO_PLAN}, blocks)


def _entries(model: nn.Module) -> dict[str, str]:
    """Return the plan of the base model: pattern of modules -> entry; empty without a plan. Raises ValueError for a model
    without config."""
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"groups_for reads the config of a model of transformers, and {type(model).__name__} has none: write layer groups "
            f"(dlp.LayerGroup)"
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return dict(getattr(text, "base_model_tp_plan", None) or {})


def _base_prefix(model: nn.Module) -> str:
    """Return the path of the base model in the complete model, such as "model."; "" if the model is the base model."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and name in dict(model.named_children()) else ""


def _expression(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a plan pattern, in which "*" matches one component of a name."""
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _matches(pattern: str, names: Sequence[str]) -> bool:
    expression = _expression(pattern)
    return any(expression.fullmatch(name) for name in names)


def _local(entries: Mapping[str, str]) -> dict[str, str]:
    """Return the patterns of modules that stay local, each with the reason: the plan entry of the module, or of another module
    of the same parent, has no equivalent style."""
    found = {
        pattern: f"{style} has no counterpart"
        for pattern, style in entries.items()
        if style not in STYLES and style not in HARMLESS
    }
    for pattern in entries:
        parent = pattern.rpartition(".")[0]
        cause = next(
            (each for each in found if each.rpartition(".")[0] == parent and entries[each] not in HARMLESS), None
        )
        if cause is not None and pattern not in found and entries[pattern] in STYLES:
            found[pattern] = f"{cause.rpartition('.')[2]} of the same parent is {entries[cause]}"
    return found


def _activations(model: nn.Module, entries: Mapping[str, str], local: Mapping[str, str]) -> dict[str, str]:
    """Return plan entries for activation modules with parameters, such as xIELU, whose parent has a column-parallel linear.
    Plans of transformers do not list these modules. The gradients of their parameters are partial sums over tp, like the
    gradients of norms of heads."""
    parents = {
        pattern.rpartition(".")[0] for pattern, style in entries.items() if style == "colwise" and pattern not in local
    }
    found = {}
    for name, module in model.named_modules():
        parent, _, own = name.rpartition(".")
        if own == "act_fn" and any(True for _ in module.parameters()):
            pattern = next((each for each in parents if each and _expression(each).fullmatch(parent)), None)
            if pattern is not None:
                found[f"{pattern}.{own}"] = "replicated_with_grad_allreduce"
    return found


def _check(
    model: nn.Module, tp: int, cut: Mapping[str, str], local: Mapping[str, str], entries: Mapping[str, str]
) -> None:
    """Raise ValueError for a model without a plan, for a plan of which no module can be sharded, and for a number of heads or
    an intermediate size that tp does not divide."""
    name = type(model).__name__
    if not entries:
        raise ValueError(f"{name}: {NO_PLAN}, so tp {tp} would shard nothing: use tp 1, or write layer groups")
    if not cut:
        reasons = "; ".join(f"{pattern}: {reason}" for pattern, reason in local.items())
        raise ValueError(f"{name}: tp {tp} can shard no module of the plan: {reasons}: use tp 1, or write layer groups")
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, key, None)
        if isinstance(size, int) and size % tp:
            raise ValueError(f"{name}: tp {tp} does not divide {key} {size}: choose a tp that divides it")


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Return the class names of the blocks of a model: the classes in `_no_split_modules` that occur in the model, or if there
    are none the classes of the modules in the longest ModuleList."""
    present = {type(module).__name__ for module in model.modules()}
    named = tuple(name for name in (getattr(model, "_no_split_modules", None) or ()) if name in present)
    if named:
        return tuple(sorted(named))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    longest = max(lists, key=len, default=None)
    return () if longest is None else tuple(sorted({type(each).__name__ for each in longest}))


def block_modules(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model in order. Of nested blocks, only the outermost is returned."""
    return list(named_blocks(model).values())


def named_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in order. Of nested blocks, only the outermost is returned.

    A module that shares a parameter with modules outside of it is not returned: as an FSDP unit, it would get a separate copy
    of the parameter. An example is the embeddings of BERT, whose weight the head also reads."""
    classes, found = set(blocks_of(model)), dict[str, nn.Module]()
    readers = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if type(module).__name__ in classes and not inside and not _shares(module, readers):
            found[name] = module
    return found


def _shares(module: nn.Module, readers: Mapping[nn.Parameter, int]) -> bool:
    """Whether a module shares a parameter with modules outside of it. `readers`: parameter -> number of names of the
    parameter in the model."""
    own = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    return any(count < readers[parameter] for parameter, count in own.items())


def _linears_of_blocks(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return the names of all linears in blocks. `blocks`: class names of blocks. Raises ValueError if there are no linears."""
    outer = [name for name, module in model.named_modules() if type(module).__name__ in blocks]
    names = [
        name for name, module in model.named_modules()
        if type(module) is nn.Linear and any(name.startswith(f"{block}.") for block in outer)
    ]  # fmt: skip
    if not names:
        raise ValueError(f"{type(model).__name__}: no linear was found in the blocks ({', '.join(blocks) or 'none'})")
    return names
