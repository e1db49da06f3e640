"""Independent implementation of every recipe in plain torch, from the definitions of the formats: the reference for
gradients.

    with faked(model, RECIPES["mxfp8"]):      linears multiply quantized and dequantized values in fp32
        ...

This module uses no casts, formats or GEMMs of dlp, only the random bits of stochastic rounding. Its functions take a matrix
whose last dimension is the contraction, and return the dequantized values. Both operands of NVFP4's wgrad stay in the Hadamard
basis, which is orthogonal and cancels in the product. Weights must be unsharded (tp = 1).

Scales and sums are computed in fp32 in the order that the formats define, because with FP4 the last bit of a tensor's scale
changes many codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dlp.kernels.reference import random_bytes
from dlp.parallel.linear.plan import Result
from dlp.parallel.model.boundary import layer_modules
from dlp.parallel.model.session import session_of
from dlp.parallel.weight.local import local

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
Element = tuple[torch.dtype, float]
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
Amaxes = dict[tuple[str, str], Tensor]  # largest absolute values by layer and operand


@dataclass(frozen=True)
class Matrix:
    """An operand of a GEMM in high precision, and the inputs of its random bits.

    values     [rows, contraction]
    layer      name of the layer
    operand    "x", "w" or "dy"
    flipped    whether `values` is the transpose of the operand as stored
    seed       seed of the run
    counter    number of the microbatch, int64 []
    """

    values: Tensor
    layer: str
    operand: str
    flipped: bool
    seed: int
    counter: Tensor

    def bits(self) -> Tensor:
        """Return a random byte for each value."""
        key = int.from_bytes(sha256(f"{self.layer}.{self.operand}".encode()).digest()[:4], "little")
        rows, columns = self.values.shape
        place: dict[str, Any] = {"row": 0, "column": 0, "total_columns": columns, "orientation": int(self.flipped)}
        return random_bytes(rows, columns, **place, counter=self.counter, key=(self.seed, key))


class Rounded(NamedTuple):
    """Rounded values, and a factor that `product` applies to the sums.

    scale    amax of the tensor (NVFP4), fp32 []; None for other formats
    steps    size of an integer step in each row (int8), fp32 [rows]; None for other formats
    """

    values: Tensor
    scale: Tensor | None = None
    steps: Tensor | None = None


Round = Callable[[Matrix], Rounded]
Rounds = Mapping[str, Round]  # by operand


def divided(number: float, x: Tensor) -> Tensor:
    """Return number / x, rounded once. `number` is made a tensor, because torch would otherwise multiply it by the reciprocal
    of x."""
    return torch.full_like(x, number) / x


def element(x: Tensor, kind: Element) -> Tensor:
    """Round to the nearest value of an FP8 format, saturating at its largest value. `kind`: E4M3 or E5M2."""
    return x.clamp(-kind[1], kind[1]).to(kind[0]).float()


def by_tensor(m: Matrix, kind: Element, amax: Tensor | None = None) -> Rounded:
    """Quantize with one scale for the tensor, computed from `amax`; None: from the largest absolute value."""
    scale = divided(kind[1], m.values.abs().max() if amax is None else amax)
    return Rounded(element(m.values * scale, kind) / scale)


def by_row(m: Matrix) -> Rounded:
    return in_blocks(m, (1, m.values.shape[1]))


def in_blocks(m: Matrix, block: tuple[int, int], kind: Element = E4M3) -> Rounded:
    """Quantize with one scale per block: the largest power of two that does not saturate the block."""

    def rounded(blocks: Tensor, amax: Tensor) -> Tensor:
        scale = torch.where(
            amax > 0, torch.ldexp(torch.ones_like(amax), torch.frexp(divided(kind[1], amax)).exponent - 1), 1.0
        )
        return element(blocks * scale, kind) / scale

    return Rounded(blockwise(m.values, block, rounded))


def integers(m: Matrix) -> Rounded:
    """Quantize each row to integers from -127 to 127, rounded to nearest; `product` applies the step of the row."""
    amax = m.values.abs().amax(1)
    steps = torch.where(amax > 0, amax / 127.0, 1.0)
    return Rounded((m.values * divided(1.0, steps)[:, None]).round(), steps=steps)


def blockwise(x: Tensor, block: tuple[int, int], rounded: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Split x into zero-padded blocks, round them by `rounded`, and return a matrix with the shape of x.

    Args:
        x: matrix.
        block: height and width of a block.
        rounded: maps blocks [block rows, height, block columns, width] and their amaxes [block rows, 1, block columns, 1] to
            dequantized blocks.
    """
    (rows, columns), (height, width) = x.shape, block
    whole = nn.functional.pad(x, (0, -columns % width, 0, -rows % height))
    blocks = whole.view(whole.shape[0] // height, height, whole.shape[1] // width, width)
    return rounded(blocks, blocks.abs().amax((1, 3), keepdim=True)).reshape(whole.shape)[:rows, :columns]


def nvfp4(m: Matrix, block: tuple[int, int] = (1, 16), transform: bool = False, draw: bool = False) -> Rounded:
    """Quantize to FP4 with an FP8 scale per block; `product` applies the scale of the tensor.

    `transform`: apply the Hadamard transform first. `draw`: round stochastically."""
    x = transformed(m.values) if transform else m.values
    whole = x.abs().max()
    largest = divided(448.0 * 6.0, whole)
    bits = m.bits() if draw else None

    def rounded(blocks: Tensor, amax: Tensor) -> Tensor:
        scale = element(amax * (largest * torch.tensor(1 / 6)), E4M3)
        steps = blocks * torch.where(scale > 0, 1 / (scale * (1 / largest)), 0.0)
        return fp4(steps, None if bits is None else bits.view(blocks.shape)) * scale

    return Rounded(blockwise(x, block, rounded), whole)


def fp4(x: Tensor, bits: Tensor | None) -> Tensor:
    """Round to +-0, 0.5, 1, 1.5, 2, 3, 4 or 6: to nearest if `bits` is None, else stochastically by a random byte per value."""
    size = x.abs().clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    if bits is None:
        return (size / step).round() * step * x.sign()
    down = (size / step).floor()
    up = ((size / step - down) * 256).floor() + bits.float() >= 256
    return ((down + up) * step).clamp(max=6.0) * x.sign()


def transformed(x: Tensor) -> Tensor:
    """Apply the randomized Hadamard transform to every 16 neighbours, from bf16 to bf16.

    Sums are computed in fp32 in four stages: over neighbours, then over pairs, groups of four and groups of eight."""
    groups = x.bfloat16().float().view(-1, 16) * torch.tensor(SIGNS, dtype=torch.float32, device=x.device)
    for stride in (1, 2, 4, 8):
        low, high = groups.view(-1, 8 // stride, 2, stride).unbind(2)
        groups = torch.stack([low + high, low - high], 2).reshape(-1, 16)
    return (groups / 4).bfloat16().float().view(x.shape)


def hybrid(amaxes: Amaxes | None = None) -> Rounds:
    """Return functions that round x and w to E4M3 and dy to E5M2, with current scales, or with scales from `amaxes` (delayed
    scaling)."""

    def rounds(kind: Element) -> Round:
        return lambda m: by_tensor(m, kind, None if amaxes is None else amaxes[m.layer, m.operand])

    return {"x": rounds(E4M3), "w": rounds(E4M3), "dy": rounds(E5M2)}


def recording(amaxes: Amaxes) -> Rounds:
    """Return functions that round nothing, but record the largest absolute value of each operand in `amaxes`."""

    def record(m: Matrix) -> Rounded:
        key, amax = (m.layer, m.operand), m.values.abs().max()
        amaxes[key] = torch.maximum(amaxes.get(key, amax), amax)
        return Rounded(m.values)

    return dict.fromkeys(("x", "w", "dy"), record)


def _blocks(w: tuple[int, int], others: tuple[int, int]) -> Rounds:
    return {name: partial(in_blocks, block=w if name == "w" else others) for name in ("x", "w", "dy")}


RECIPES: Mapping[str, Rounds] = {
    "fp8_current": hybrid(),
    "fp8_rowwise": dict.fromkeys(("x", "w", "dy"), by_row),
    "int8": dict.fromkeys(("x", "w", "dy"), integers),
    "fp8_block": _blocks((128, 128), (1, 128)),
    "mxfp8": _blocks((1, 32), (1, 32)),
    "nvfp4": {
        "x": lambda m: nvfp4(m, transform=m.flipped),
        "w": lambda m: nvfp4(m, (16, 16)),
        "dy": lambda m: nvfp4(m, transform=m.flipped, draw=True),
    },
}


def product(a: Rounded, b: Rounded) -> Tensor:
    """Return a b^T, including the `scale` or `steps` of both. For NVFP4, scale / (6 x 448) is the scale of a tensor."""
    sums = a.values @ b.values.t()
    if a.steps is not None and b.steps is not None:
        return sums * a.steps[:, None] * b.steps
    return sums if a.scale is None or b.scale is None else sums * (a.scale * b.scale * torch.tensor(1 / (6 * 448) ** 2))


class _Linear(torch.autograd.Function):
    """Linear y = x w^T whose three products read rounded operands; `rounded(values, operand, flipped)` rounds an operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rounded: Callable[[Tensor, str, bool], Rounded]) -> Tensor:
        ctx.rounded = rounded
        ctx.save_for_backward(x, w)
        return product(rounded(x, "x", False), rounded(w, "w", False))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w), rounded = ctx.saved_tensors, ctx.rounded
        dx = product(rounded(dy, "dy", False), rounded(w.t(), "w", True))
        return dx, product(rounded(dy.t(), "dy", True), rounded(x.t(), "x", True)), None


@contextmanager
def faked(model: nn.Module, rounds: Rounds, layers: Callable[[str], bool] = lambda name: True) -> Iterator[None]:
    """Run linears of a converted model with fake quantization inside of the context.

    Args:
        model: model that `dlp.convert` converted.
        rounds: for each operand, the function that rounds the operand.
        layers: whether the layer with this name is replaced; by default all are.
    """
    runtime = session_of(model)

    def forward(module: Any, x: Tensor) -> Tensor:
        def rounded(values: Tensor, operand: str, flipped: bool) -> Rounded:
            found = Matrix(values.contiguous(), module.name, operand, flipped, runtime.seed, runtime.counter)
            return rounds[operand](found)

        y: Tensor = _Linear.apply(
            x.reshape(-1, x.shape[-1]).float(), local(module.weight, module.name).float(), rounded
        )
        plan = module.core.bound.plan(x.numel() // x.shape[-1])
        return y.view(plan.y(Result(x.shape, x.dtype), y.shape[1]).shape).to(x.dtype)

    chosen = [module for name, module in layer_modules(model).items() if layers(name)]
    for module in chosen:
        module.forward = partial(forward, module)
    try:
        yield
    finally:
        for module in chosen:
            del module.forward
