"""Parallel styles of the model, checks of layer groups, and blocks as fused sequences of operations."""

from __future__ import annotations

from dlp import LayerGroup, Plan
from launch.models.attention import Choice
from launch.models.families import FAMILIES
from launch.models.modules import Llama
from launch.models.settings import Model


def parallel_groups(config: Model, sequence_parallel: bool) -> list[LayerGroup]:
    """How tp cuts a Llama; a run's own layer groups come after these and may override them."""
    sp = sequence_parallel
    qkv, gate_up = "layers.*.self_attn.{q,k,v}_proj", "layers.*.mlp.{gate,up}_proj"
    head_norms = [LayerGroup("norms of heads", ["layers.*.self_attn.{q,k}_norm"], style="column")]
    return [
        LayerGroup("vocabulary", ["embed_tokens", "lm_head"], style="column", sequence_parallel=sp),
        LayerGroup("norms", ["layers.*.*norm", "norm"], sequence_parallel=sp),
        *(head_norms if FAMILIES[config.family].qk_norm else []),
        LayerGroup("qkv", [qkv], style="column", siblings=True, sequence_parallel=sp),
        LayerGroup("gate_up", [gate_up], style="column", siblings=True, sequence_parallel=sp),
        LayerGroup("o_down", ["layers.*.{self_attn.o,mlp.down}_proj"], style="row", sequence_parallel=sp),
    ]


def fuse(model: Llama) -> None:
    """Behind conversion: the blocks run as sequences of ops, where `[model] fused` asks for it."""
    for block in model.model.layers if model.config.fused else ():
        block.fuse()  # type: ignore[operator]


def set_attention(model: Llama, choice: Choice) -> None:
    """Let every block run attention by the chosen backend."""
    for block in model.model.layers:
        block.self_attn.backend = choice.backend  # type: ignore[union-attr]


def describe_fused(config: Model) -> list[str]:
    """What a plan says of it."""
    if not config.fused:
        return []
    return [
        "",
        "[model] fused: blocks run as sequences of ops, each as one autograd function, forward and backward fused differently:",
        "  input_layernorm | q_proj, k_proj, v_proj",
        "  o_proj | + x | post_attention_layernorm | gate_proj, up_proj | SwiGLU | down_proj",
    ]


def check_plan(plan: Plan, config: Model) -> None:
    """ValueError for layer groups under which this model cannot run: it splits and joins no tokens itself, its attention reads
    whole sequences, its loss reads logits that tp cuts, and fused blocks are ops of linears as these groups have them."""
    if config.fused:
        _check_fused(plan)
    cut = next(row for row in plan.layers if row.name.endswith("o_proj")).sequence_parallel
    rows = [(row.name, row.style, row.sequence_parallel) for row in plan.layers]
    # norms of heads read features that tp cuts, of whole sequences, under sequence parallelism, too
    rows += [(other.name, other.style, other.sequence_parallel) for other in plan.others if not other.reads_cut]
    for name, style, on_shards in rows if plan.tp > 1 else ():
        if on_shards != cut:
            raise ValueError(
                f"{name}: its groups set sequence_parallel = {on_shards}, others {cut}, and a Llama's tokens are cut from its "
                f"embedding to its head, or nowhere: leave it to [mesh] sequence_parallel"
            )
        if name == "lm_head" and style != "column":
            raise ValueError(
                f"{name}: style = {style!r}, but the loss reads logits that tp cuts: leave style out of its groups"
            )
        if ".self_attn." in name and style == "local" and cut:
            raise ValueError(
                f"{name}: style = 'local' under sequence parallelism leaves attention a part of the tokens: set [mesh] "
                f"sequence_parallel = false, or leave style out of its groups"
            )


def _check_fused(plan: Plan) -> None:
    """ValueError for linears that read the same x and are not one op."""
    for row in plan.layers:
        if row.name.endswith(("q_proj", "gate_proj")) and not row.siblings:
            raise ValueError(
                f"{row.name}: its groups set siblings = false, and a fused block reads x once for all that read it: leave "
                f"siblings to its default, or set [model] fused = false"
            )
