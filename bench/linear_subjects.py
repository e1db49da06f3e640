"""Linears that benchmarks compare: `nn.Linear`, dlp's linear with each recipe, and linears of other libraries."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dlp
from dlp.parallel.model.boundary import end_step
from dlp.quant.recipe import GEMMS

Run = Callable[[], None]
Shape = tuple[int, int, int]  # tokens, in_features, out_features
BASE = "nn.Linear"
RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
FAST = ":fast"  # suffix of a recipe: fast accumulation in all three GEMMs
TUNED = ":tuned"  # suffix of a recipe: algorithms chosen by `dlp.kernels.tune`
ALL_FAST = ("fp8_current:fast", "fp8_delayed:fast")
ALL_TUNED = ("fp8_current:tuned", "fp8_delayed:tuned", "fp8_block:tuned")
SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 8192), (8192, 8192, 28672), (16384, 8192, 8192))
TINY = (128, 128, 128)  # so small that the device is idle most of the time


def _torchao(recipe: str, linear: nn.Linear) -> nn.Module:
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    compiled: Any = torch.compile(float8.convert_to_float8_training(nn.Sequential(linear), config=config))
    module: nn.Module = compiled
    return module


class _TransformerEngine(nn.Module):
    """Linear of Transformer Engine with a recipe of Transformer Engine, given by the class name."""

    def __init__(self, recipe: str, linear: nn.Linear) -> None:
        super().__init__()
        te, recipes = (importlib.import_module(f"transformer_engine.{name}") for name in ("pytorch", "common.recipe"))
        sizes = linear.in_features, linear.out_features
        self.linear = te.Linear(*sizes, bias=False, params_dtype=torch.bfloat16, device="cuda")
        self.region = lambda: te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipes, recipe)())

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            y: Tensor = self.linear(x)
        return y


# Other libraries, measured if installed: module to import, and constructor of a linear.
PEERS: dict[str, tuple[str, Callable[[nn.Linear], nn.Module]]] = {
    "torchao": ("torchao.float8", partial(_torchao, "tensorwise")),
    "torchao rowwise": ("torchao.float8", partial(_torchao, "rowwise")),
    "te delayed": ("transformer_engine", partial(_TransformerEngine, "DelayedScaling")),
    "te current": ("transformer_engine", partial(_TransformerEngine, "Float8CurrentScaling")),
    "te block": ("transformer_engine", partial(_TransformerEngine, "Float8BlockScaling")),
}
# recipe -> peers that use the same quantization
PEERS_OF = {
    "fp8_current": ("torchao", "te current"),
    "fp8_delayed": ("torchao", "te delayed"),
    "fp8_rowwise": ("torchao rowwise",),
    "fp8_block": ("te block",),
}


def recipe_of(name: str) -> dlp.Recipe:
    """Return the recipe of a subject: a name of RECIPES, possibly with suffix FAST or TUNED."""
    if name.endswith(FAST):
        return dlp.recipe(own_name(name), accumulation=dict.fromkeys(GEMMS, "fast"))
    return dlp.recipe(own_name(name))


def own_name(name: str) -> str:
    """Return the name of a subject without suffixes FAST and TUNED."""
    return untuned(name).removesuffix(FAST)


def untuned(name: str) -> str:
    """Return the name of a subject without suffix TUNED. Targets are the same with and without this suffix."""
    return name.removesuffix(TUNED)


def installed_peers() -> list[str]:
    return [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package.split(".")[0])]


def import_peers(names: Sequence[str]) -> None:
    """Import libraries in advance. Errors are ignored here; they are raised when a linear of the library is constructed."""
    for package in dict.fromkeys(PEERS[name][0] for name in names):
        with contextlib.suppress(Exception):
            importlib.import_module(package)


class Subject:
    """A linear with its inputs and gradients of y, which rotate between iterations."""

    def __init__(self, recipe: str, shape: Shape) -> None:
        tokens, k, n = shape
        generator = torch.Generator("cuda").manual_seed(0)
        self.boundary: Run = lambda: None
        if recipe == BASE or recipe in PEERS:
            plain = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
            self.linear: nn.Module = plain if recipe == BASE else PEERS[recipe][1](plain)
        else:
            self.linear = nn.Sequential(dlp.Linear(k, n, recipe=recipe_of(recipe), device="cuda", dtype=torch.bfloat16))
            dlp.attach(self.linear, torch.optim.SGD(self.linear.parameters()))
            self.boundary = lambda: end_step(self.linear)
        self.parameters = list(self.linear.parameters())
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        count = min(64, 4 * cache // (2 * tokens * (k + n)) + 2)
        self.inputs = [
            tuple(torch.randn(tokens, size, device="cuda", generator=generator).bfloat16() for size in (k, n))
            for _ in range(count)
        ]
        self.turn = 0
        for x, _ in self.inputs:
            x.requires_grad_()
        self.x = self.y = self.dy = torch.empty(0)

    def forward(self) -> None:
        self.x, self.dy = self.inputs[self.turn % len(self.inputs)]
        self.turn += 1
        self.y = self.linear(self.x)

    def backward(self) -> None:
        """Run the backward of the last forward, and free the gradients."""
        self.y.backward(self.dy)
        self.y = self.dy
        for leaf in (self.x, *self.parameters):
            leaf.grad = None

    def both(self) -> None:
        self.forward()
        self.backward()

    def iteration(self) -> None:
        """Run forward, backward and the step boundary."""
        self.both()
        self.boundary()
