"""Subjects of `bench.tensor_parallel`: a column- and a row-parallel linear, and a Llama layer, over tp with sequence
parallelism, in plain torch, in dlp with a recipe and an overlap strategy, and in Transformer Engine if it is installed. The two
kinds of shapes, with an example of each:

    pair     4096x14336          K -> N -> K
    layer    4096x14336x32x8     hidden, ffn, heads, kv heads: RMSNorm, attention, RMSNorm, SwiGLU MLP; one sequence

All subjects map token shards [M/R, K] to token shards, in bf16. The plain layer is the block of `launch.models` with the
weights of one rank: its norms are followed by an all_gather, and o and down by a reduce_scatter. Each rank computes the
gradients of norms from the tokens of its shard; only dlp's model sums these gradients over tp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import dlp
from bench import transformer_engine
from bench.host_parallel import PLAIN, Gather, PlainPair, Scatter
from dlp.comm.mesh import TP
from dlp.parallel import auto, tune
from dlp.parallel.auto import AUTO, Problem, Times
from dlp.parallel.style import COLUMN_SP, ROW_SP
from dlp.quant import recipe as recipes
from launch.models.modules import Block
from launch.models.parallel import parallel_groups
from launch.models.rope import rotary_table
from launch.models.settings import Model


@dataclass(frozen=True)
class Shape:
    """Shape of a pair (`features` = K, `inner` = N) or of a layer (`features` = hidden, `inner` = ffn); a pair has 0 heads."""

    features: int
    inner: int
    heads: int = 0
    kv_heads: int = 0

    def __str__(self) -> str:
        return "x".join(str(size) for size in (self.features, self.inner, self.heads, self.kv_heads) if size)

    def problems(self, tokens: int, recipe: str) -> list[Problem]:
        """Return a `Problem` for each column- and row-parallel linear of this shape; siblings share one problem."""
        made, head = recipes.load(recipe), self.features // self.heads if self.heads else 0
        columns, rows = [(self.inner,) * (2 if self.heads else 1)], [self.inner]
        if self.heads:
            columns.append((self.features, self.kv_heads * head, self.kv_heads * head))
            rows.append(self.features)
        found = [Problem(COLUMN_SP, tokens, self.features, outs, made) for outs in columns]
        return found + [Problem(ROW_SP, tokens, size, (self.features,), made) for size in rows]

    def config(self, ranks: int = 1) -> Model:
        """Return the settings of a model with one block, or of the shard that one of `ranks` ranks has."""
        return Model(
            layers=1, hidden=self.features, ffn=self.inner // ranks, heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks, head_dim=self.features // self.heads, vocab=1,
        )  # fmt: skip


def shape_of(text: str) -> Shape:
    """Parse a shape. Raises ValueError unless there are 2 or 4 sizes."""
    sizes = [int(size) for size in text.split("x")]
    if len(sizes) not in (2, 4):
        raise ValueError(f"{text}: give 2 sizes for a pair, 4 for a layer")
    return Shape(*sizes)


class _Gathered(nn.Module):
    """A norm followed by an all_gather over tokens."""

    def __init__(self, norm: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.norm, self.group = norm, group

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = Gather.apply(self.norm(x), self.group)
        return whole


class _Scattered(nn.Module):
    """A linear with result [..., H], followed by a reduce_scatter over tokens to [M/R, H]."""

    def __init__(self, linear: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.linear, self.group = linear, group

    def forward(self, x: Tensor) -> Tensor:
        shard: Tensor = Scatter.apply(self.linear(x).flatten(0, -2), self.group)
        return shard


class OneLayer(nn.Module):
    """A block of `launch.models` on one sequence: token shards [S/R, H] -> [S/R, H]."""

    def __init__(self, config: Model, tokens: int, device: torch.device) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList([Block(config).bfloat16()])
        self.tables = rotary_table(torch.arange(tokens, device=device), config.head_dim, config.rope_theta)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x, 1, *self.tables)
        return y


def filled(model: nn.Module, device: torch.device) -> nn.Module:
    """Allocate a model on the meta device, and initialize its parameters: matrices randomly, vectors with ones."""
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            values: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            values.normal_(0, 0.02) if values.dim() > 1 else values.fill_(1.0)
    return model


def plain_layer(shape: Shape, tokens: int, group: ProcessGroup, device: torch.device) -> nn.Module:
    model = OneLayer(shape.config(group.size()), tokens, device)
    block: Any = model.layers[0]
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(block, name, _Gathered(getattr(block, name), group))
    block.self_attn.o_proj = _Scattered(block.self_attn.o_proj, group)
    block.mlp.down_proj = _Scattered(block.mlp.down_proj, group)
    return filled(model, device)


def our_layer(
    shape: Shape, recipe: str, strategy: str, tokens: int, mesh: DeviceMesh, times: Times | None
) -> nn.Module:
    device, config = tune.device_of(mesh), shape.config()
    model = OneLayer(config, tokens, device)
    groups: list[Any] = [replace(each, match=("layers.*.*norm",)) if each.name == "norms" else each
                         for each in parallel_groups(config, True) if each.name != "vocabulary"]  # fmt: skip
    groups.append(dlp.LayerGroup("linears", "layers.*.*.*_proj", recipe=recipe, overlap=strategy))
    dlp.convert(model, groups, mesh, batch=(1, tokens), overlap_table=times)
    return attached(filled(model, device))


def our_pair(shape: Shape, recipe: str, strategy: str, tokens: int, tp: DeviceMesh, times: Times | None) -> nn.Module:
    layers = (dlp.ColumnParallelLinear, dlp.RowParallelLinear)
    sizes = ((shape.features, shape.inner), (shape.inner, shape.features))
    made = []
    for layer, (features, outs), problem in zip(layers, sizes, shape.problems(tokens, recipe), strict=True):
        chosen: Any = strategy
        if strategy == AUTO and times is None:  # chosen by the shipped tables
            chosen = auto.at_construction(AUTO, problem, tp.get_group(), tp.device_type)
        elif strategy == AUTO:
            chosen = auto.choose(AUTO, problem, times, auto.NO_TABLE)[0]
        options: dict[str, Any] = {"tp": tp, "recipe": recipe, "overlap": chosen, "device": tp.device_type}
        made.append(layer(features, outs, sequence_parallel=True, dtype=torch.bfloat16, **options))
    return attached(nn.Sequential(*made))


def attached(model: nn.Module) -> nn.Module:
    dlp.attach(model, torch.optim.SGD(model.parameters(), 0.0))
    return model


def subject(name: str, strategy: str, shape: Shape, tokens: int, mesh: DeviceMesh, times: Times | None) -> nn.Module:
    """Construct the model of a subject.

    Args:
        name: PLAIN, a peer of `bench.transformer_engine`, or a recipe of dlp.
        strategy: overlap strategy of dlp's linears; ignored for other subjects.
        shape: shape of a pair or of a layer.
        tokens: tokens of all ranks.
        mesh: mesh with axis tp.
        times: measured times by which "auto" chooses a strategy; None: the shipped tables.
    """
    group, device = mesh[TP].get_group(), tune.device_of(mesh)
    if name == PLAIN:
        if shape.heads:
            return plain_layer(shape, tokens, group, device)
        return PlainPair(shape.features, shape.inner, group, device)
    if transformer_engine.is_peer(name):
        return transformer_engine.TransformerEngine(name, shape, tokens, group)
    if shape.heads:
        return our_layer(shape, name, strategy, tokens, mesh, times)
    return our_pair(shape, name, strategy, tokens, mesh[TP], times)
