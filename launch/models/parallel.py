"""Layer groups that shard the decoder over tp, checks of the plan, attention backend, and fused blocks."""

from __future__ import annotations

from dlp import Context, LayerGroup, Plan
from launch.models.attention import Choice
from launch.models.families import FAMILIES
from launch.models.modules import Attention, Llama
from launch.models.settings import Model


def parallel_groups(config: Model, sequence_parallel: bool) -> list[LayerGroup]:
    """Return the layer groups that shard the decoder over tp. The layer groups of the config follow and may override them."""
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
    """Fuse converted blocks into `dlp.ops.Sequential`, if `[model] fused` is set."""
    for block in model.model.layers if model.config.fused else ():
        block.fuse()  # type: ignore[operator]


def set_attention(model: Llama, choice: Choice) -> None:
    """Set the attention backend of every block."""
    for block in model.model.layers:
        attention: Attention = block.self_attn  # type: ignore[assignment]
        attention.backend, attention.by_head = choice.backend, choice.by_head


def set_context(model: Llama, context: Context) -> None:
    """Restrict positions and attention to this cp rank's shard of each sequence."""
    for module in (model.model, *(block.self_attn for block in model.model.layers)):
        vars(module)["context"] = context


def describe_fused(config: Model) -> list[str]:
    """Return the lines of the plan about fused blocks; empty unless `[model] fused` is set."""
    if not config.fused:
        return []
    return [
        "",
        "[model] fused: blocks run as sequences of ops, each as one autograd function, forward and backward fused differently:",
        "  input_layernorm | q_proj, k_proj, v_proj",
        "  o_proj | + x | post_attention_layernorm | gate_proj, up_proj | SwiGLU | down_proj",
    ]


def check_plan(plan: Plan, config: Model) -> None:
    """Raise ValueError for styles or sequence_parallel of layer groups that this model cannot run.

    All layers must agree on sequence_parallel, attention needs complete sequences, the loss needs logits that are sharded in
    the vocabulary dimension, and fused blocks need q, k, v and gate, up as siblings."""
    if config.fused:
        _check_fused(plan)
    cut = next(row for row in plan.layers if row.name.endswith("o_proj")).sequence_parallel
    rows = [(row.name, row.style, row.sequence_parallel) for row in plan.layers]
    # `reads_cut`: q_norm and k_norm, which are not compared, since they read this rank's heads of all tokens in any case
    rows += [(other.name, other.style, other.sequence_parallel) for other in plan.others if not other.reads_cut]
    for name, style, on_shards in rows if plan.tp > 1 else ():
        if on_shards != cut:
            raise ValueError(
                f"{name}: its groups set sequence_parallel = {on_shards}, others {cut}, and a Llama shards tokens from "
                f"embedding to head, or nowhere: remove sequence_parallel from the groups, and set [mesh] "
                f"sequence_parallel"
            )
        if name == "lm_head" and style != "column":
            raise ValueError(
                f"{name}: style = {style!r}, but the loss reads logits that are sharded over tp: remove style from its "
                f"groups"
            )
        if ".self_attn." in name and style == "local" and cut:
            raise ValueError(
                f"{name}: style = 'local' under sequence parallelism gives attention only a shard of the tokens: set "
                f"[mesh] sequence_parallel = false, or remove style from its groups"
            )


def _check_fused(plan: Plan) -> None:
    """Raise ValueError if q, k, v or gate, up of a block are not siblings."""
    for row in plan.layers:
        if row.name.endswith(("q_proj", "gate_proj")) and not row.siblings:
            raise ValueError(
                f"{row.name}: its groups set siblings = false, and a fused block quantizes x once for all siblings: "
                f"remove siblings from the groups, or set [model] fused = false"
            )
