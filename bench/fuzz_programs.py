"""Random programs for `bench.fuzz`: models, meshes, recipes and options, all drawn from one seed. Kinds of programs:

converted    plain modules that `dlp.convert` converts, in invariant mode
llama        a model of the package launch, built from the settings of a run, in invariant mode
constructed  dlp.ColumnParallelLinear and dlp.RowParallelLinear, constructed explicitly, with or without invariant mode
ops          a dlp.ops.Sequential, whose ops are fused, in invariant mode
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dlp
from dlp import LayerGroup, ops
from dlp.proof.cases import MeshCase
from launch import prove as launched
from launch.config.run_config import load
from launch.models.modules import RMSNorm
from launch.settings.schema import toml_value

BATCH, VOCABULARY = 8, 64
MESHES = {
    2: ("tp2", "tp2+sp", "dp2", "accumulate2", "tp2+accumulate2", "tp2+sp+accumulate4", "dp2+accumulate2"),
    4: ("tp4", "tp4+sp", "dp4", "hsdp2x2", "tp2xdp2", "tp2xdp2+sp", "tp2xdp2+sp+accumulate2", "hsdp2x2+accumulate2"),
}
RECIPES: tuple[tuple[str, dict[str, tuple[Any, ...]]], ...] = (
    ("bf16", {}),
    ("fp8_current", {"power_of_two": (True,), "fp8_format": ("E4M3",), "epsilon": (1e-3,)}),
    ("fp8_delayed", {"amax_history_len": (2, 16), "margin": (1,), "amax_compute_algo": ("most_recent",)}),
    ("fp8_rowwise", {"power_of_two": (False,)}),
    ("fp8_block", {"power_of_two": (False,), "fp8_format": ("HYBRID",)}),
    ("mxfp8", {}),
    ("nvfp4", {"disable_stochastic_rounding": (True,), "disable_rht": (True,), "disable_2d_quantization": (True,)}),
    ("int8", {}),
)
KINDS = ("converted",) * 6 + ("llama",) * 2 + ("constructed", "ops")
GATES: tuple[Callable[[], nn.Module], ...] = (nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh, nn.Identity)
NORMS: tuple[Callable[[int], nn.Module], ...] = (
    nn.LayerNorm, partial(nn.LayerNorm, bias=False), partial(RMSNorm, eps=1e-5), nn.RMSNorm,
)  # fmt: skip


class Program(NamedTuple):
    """A program in the form that `dlp.prove` takes.

    text                  description of the random choices
    mesh                  name of the mesh, as "tp2+sp"
    exact                 whether results must be bitwise equal to those on one rank (invariant mode)
    build, batch, loss    functions that build the model, make the batch of a step, and compute the loss
    """

    text: str
    mesh: str
    exact: bool
    build: Callable[..., Any]
    batch: Callable[[int], Any]
    loss: Callable[..., Tensor]


def drawn_recipe(draw: random.Random, blocks: bool) -> str | dict[str, Any]:
    """Draw a recipe, sometimes with options. `blocks`: whether the features of layers on each rank are multiples of 128, which
    fp8_block needs."""
    name, options = draw.choice([each for each in RECIPES if blocks or each[0] != "fp8_block"])
    given = {key: draw.choice(values) for key, values in options.items() if draw.random() < 0.25}
    return {"name": name, **given} if given else name


@dataclass(frozen=True)
class Net:
    """Random choices of a converted model.

    blocks           kind of each block, one letter each (class Block)
    biased           whether linears have a bias
    gate, norm       indices into GATES and NORMS
    tied, head       whether the head shares the weight of the embedding; whether there is a head
    frozen           whether the weight of the first norm is not trained
    recompute        whether blocks are recomputed in backward
    half             whether hidden states are bf16 instead of fp32
    sgd              whether the optimizer is SGD instead of AdamW
    recipe, second   recipe of all layers; recipe of the layers of the first block, None: `recipe`
    options          options of the layer group of column-parallel linears
    gather           options of `dlp.fully_shard`
    """

    blocks: str
    hidden: int
    ffn: int
    biased: bool
    gate: int
    norm: int
    tied: bool
    head: bool
    frozen: bool
    recompute: bool
    half: bool
    sgd: bool
    z_loss: float
    recipe: Any
    second: Any
    options: dict[str, Any]
    gather: dict[str, Any]
    seed: int


class Slope(nn.Module):
    """Activation with a learned slope for negative x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * self.weight.to(x.dtype))


class Block(nn.Module):
    """A residual block of kind m (MLP), g (gated MLP), l (local linear), n (norm only), or p (MLP with a learned slope, whose
    parameter is replicated)."""

    def __init__(self, kind: str, net: Net) -> None:
        super().__init__()
        self.kind = kind
        self.norm = NORMS[net.norm](net.hidden)
        linear = partial(nn.Linear, bias=net.biased)
        if kind in "mgp":
            self.up = linear(net.hidden, net.ffn)
            self.down = linear(net.ffn, net.hidden)
            self.act = Slope() if kind == "p" else GATES[net.gate]()
        if kind == "g":
            self.gate = linear(net.hidden, net.ffn)
        if kind == "l":
            self.local = linear(net.hidden, net.hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.kind == "l":
            y = self.local(y)
        elif self.kind == "g":
            y = self.down(self.act(self.gate(y)) * self.up(y))
        elif self.kind in "mp":
            y = self.down(self.act(self.up(y)))
        return x + y


class Drawn(nn.Module):
    """Embedding, blocks, norm and head; without a head the model returns the last hidden states."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.embed = nn.Embedding(VOCABULARY, net.hidden)
        self.blocks = nn.ModuleList([Block(kind, net) for kind in net.blocks])
        self.norm = NORMS[net.norm](net.hidden)
        if net.head:
            self.head = nn.Linear(net.hidden, VOCABULARY, bias=False)
            if net.tied:
                self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x.bfloat16() if self.net.half else x
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.net.recompute else block(x)
        x = self.norm(x).flatten(0, -2)
        return self.head(x) if self.net.head else x


def build_drawn(net: Net, mesh: DeviceMesh, case: MeshCase, *, sequence: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(net.seed)
    sp: dict[str, Any] = {"sequence_parallel": case.sequence_parallel}
    model = Drawn(net)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    norms = ["blocks.*.norm", "norm"]
    groups = [
        LayerGroup("recipe", "**", recipe=net.recipe),
        LayerGroup("vocabulary", ["embed", *(["head"] if net.head else [])], style="column", **sp),
        LayerGroup("norms", norms, **sp),
    ]
    if set(net.blocks) & set("mgp"):
        groups += [
            LayerGroup("up", "blocks.*.{up,gate}", style="column", **sp, **net.options),
            LayerGroup("down", "blocks.*.down", style="row", **sp),
        ]
    if "p" in net.blocks:
        slopes = [f"blocks.{i}.act" for i, kind in enumerate(net.blocks) if kind == "p"]
        groups.append(LayerGroup("slopes", slopes, style="column"))
    if "l" in net.blocks:
        groups.append(LayerGroup("local", "blocks.*.local", style="local", **sp))
    if net.second is not None:
        groups.append(LayerGroup("first", "blocks.0.*", recipe=net.second))
    dlp.convert(model, groups, mesh, batch=(BATCH // case.pieces, sequence), invariant=True, seed=net.seed)
    if net.frozen:
        model.blocks[0].norm.weight.requires_grad_(False)  # type: ignore[union-attr]
    if case.dp > 1:
        for block in model.blocks:
            dlp.fully_shard(block, mesh=mesh, **net.gather)
        dlp.fully_shard(model, mesh=mesh, **net.gather)
    learns = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learns, lr=0.1, momentum=0.9) if net.sgd else torch.optim.AdamW(learns, lr=1e-2)
    dlp.attach(model, optimizer)
    return model, optimizer


def tokens_of(sequence: int, seed: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randint(0, VOCABULARY, (BATCH, sequence + 1), generator=generator)


def loss_drawn(net: Net, model: nn.Module, text: Tensor, mesh: DeviceMesh) -> Tensor:
    y, targets = model(text[:, :-1]), text[:, 1:]
    if net.head:
        return dlp.cross_entropy(y, targets, mesh, z_loss=net.z_loss, invariant=True) / targets.numel()
    whole = y if len(y) == targets.numel() else dlp.gather_tokens(y, mesh)
    return whole.float().square().sum() / whole.numel()


def converted(draw: random.Random, mesh: str, seed: int) -> Program:
    blocks = draw.random() < 0.3
    net = Net(
        blocks="".join(draw.choice("mmgglnp" if draw.random() < 0.3 else "mgln") for _ in range(draw.randint(1, 3))),
        hidden=draw.choice((64, 96, 128)), ffn=512 if blocks else draw.choice((128, 256, 384)), biased=draw.random() < 0.5,
        gate=draw.randrange(len(GATES)), norm=draw.randrange(len(NORMS)), tied=draw.random() < 0.3,
        head=draw.random() < 0.8, frozen=draw.random() < 0.2, recompute=draw.random() < 0.25, half=draw.random() < 0.6,
        sgd=draw.random() < 0.3, z_loss=draw.choice((0.0, 1e-3)), recipe=drawn_recipe(draw, blocks),
        second=drawn_recipe(draw, blocks) if draw.random() < 0.3 else None,
        options={key: value for key, value in (("siblings", True), ("save_original_input", True)) if draw.random() < 0.3},
        gather={key: value for key, value in (("quantized_gather", False), ("reshard_after_forward", False))
                if draw.random() < 0.3},
        seed=seed,
    )  # fmt: skip
    if "g" not in net.blocks:
        net.options.pop("siblings", None)
    if not set(net.blocks) & set("mgp"):
        net = replace(net, options={})
    sequence = draw.choice((16, 32))
    build, batch = partial(build_drawn, net, sequence=sequence), partial(tokens_of, sequence, seed)
    return Program(f"{net}, sequence {sequence}", mesh, True, build, batch, partial(loss_drawn, net))


def llama(draw: random.Random, mesh: str, seed: int) -> Program:
    blocks, kv = draw.random() < 0.3, 4
    settings = {
        "model.family": draw.choice(("llama", "qwen2", "qwen3")), "model.layers": draw.randint(1, 2), "model.vocab": 64,
        "model.hidden": draw.choice((64, 128)), "model.ffn": 512 if blocks else draw.choice((128, 256)),
        "model.heads": kv * draw.choice((1, 2)), "model.kv_heads": kv, "model.head_dim": 128 if blocks else 32,
        "model.tie_embeddings": draw.random() < 0.3, "train.sequence": draw.choice((16, 32)), "train.seed": seed,
        "train.checkpointing": draw.choice(("none", "none", "selective", "full")), "train.clip": draw.choice((0.1, 100.0)),
        "train.z_loss": draw.choice((0.0, 1e-3)), "train.weight_cache": draw.choice(("step", "forward")),
        "mesh.reshard_after_forward": draw.random() < 0.7, "mesh.quantized_gather": draw.random() < 0.7,
    }  # fmt: skip
    drawn = drawn_recipe(draw, blocks)
    recipe = drawn if isinstance(drawn, str) else toml_value(drawn)
    arguments = [
        part
        for key, value in settings.items()
        for part in (f"--{key}", str(value).lower() if value in (True, False) else str(value))
    ]
    config = load("tiny", [*arguments, "--recipe", recipe])
    provable, _ = launched.provable(config, launched.Size(None, None), exact=True)
    return Program(
        f"{settings}, recipe {recipe}", mesh, True, partial(launched.model_on, provable),
        partial(launched.tokens_of, provable), partial(launched.loss, provable),
    )  # fmt: skip


class Constructed(nn.Module):
    """A column- and a row-parallel linear, constructed explicitly; or, if `fused`, a dlp.ops.Sequential with such linears."""

    def __init__(self, mesh: DeviceMesh, sp: bool, fused: bool, biased: bool, recipe: Any) -> None:
        super().__init__()
        self.mesh, self.sp = mesh, sp
        if fused:
            linear = partial(
                ops.Linear, tensor_parallel_group=mesh["tp"], sequence_parallel=sp, bias=biased, recipe=recipe
            )
            self.net: nn.Module = ops.Sequential(
                ops.RMSNorm(64), linear(64, (128, 128), tensor_parallel_mode="column"), ops.SwiGLU(),
                linear(128, 64, tensor_parallel_mode="row"),
            )  # fmt: skip
        else:
            more: dict[str, Any] = {"tp": mesh, "sequence_parallel": sp, "recipe": recipe}
            self.net = nn.Sequential(
                dlp.ColumnParallelLinear(64, 256, biased, **more),
                nn.SiLU(),
                dlp.RowParallelLinear(256, 64, biased, **more),
            )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(dlp.scatter_tokens(x, self.mesh) if self.sp else x.flatten(0, 1))
        return dlp.gather_tokens(y, self.mesh) if self.sp else y


def build_constructed(
    fused: bool, biased: bool, recipe: Any, invariant: bool, seed: int, mesh: DeviceMesh, case: MeshCase
) -> Any:  # fmt: skip
    torch.manual_seed(seed)
    model = Constructed(mesh, case.sequence_parallel, fused, biased, recipe)
    groups = [LayerGroup("all", "**", sequence_parallel=case.sequence_parallel)]
    dlp.convert(model, groups, mesh, batch=(BATCH // case.pieces, 16), invariant=invariant)
    if case.dp > 1:
        dlp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dlp.attach(model, optimizer)
    return model, optimizer


def values_of(seed: int, step: int) -> Tensor:
    return torch.randn(BATCH, 16, 64, generator=torch.Generator().manual_seed(1000 * seed + step))


def loss_constructed(model: nn.Module, x: Tensor, mesh: DeviceMesh) -> Tensor:
    y: Tensor = model(x)
    return F.mse_loss(y.float(), x.flatten(0, 1).float())


def constructed(draw: random.Random, mesh: str, seed: int) -> Program:
    biased, recipe, invariant = draw.random() < 0.5, drawn_recipe(draw, False), draw.random() < 0.5
    build = partial(build_constructed, False, biased, recipe, invariant, seed)
    text = f"bias {biased}, recipe {recipe}, invariant {invariant}"
    return Program(text, mesh, invariant, build, partial(values_of, seed), loss_constructed)


def fused(draw: random.Random, mesh: str, seed: int) -> Program:
    biased, recipe = draw.random() < 0.5, drawn_recipe(draw, False)
    build = partial(build_constructed, True, biased, recipe, True, seed)
    return Program(f"bias {biased}, recipe {recipe}", mesh, True, build, partial(values_of, seed), loss_constructed)


def program(seed: int, ranks: int) -> Program:
    """Draw the program of a seed, on a mesh of at most `ranks` ranks."""
    draw = random.Random(seed)
    mesh, kind = draw.choice(MESHES[ranks]), draw.choice(KINDS)
    drawing = {"converted": converted, "llama": llama, "constructed": constructed, "ops": fused}
    made = drawing[kind](draw, mesh, seed)
    return made._replace(text=f"{kind} on {mesh}: {made.text}")
