"""Matrices that expose errors of quantizers: sizes that are not multiples of a block, odd strides, and values at every
limit.

The matrices are computed on the CPU from a seed, so the reference and the kernel read the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float32]
CODES = [torch.float8_e4m3fn, torch.float8_e5m2]


def random_sizes(count: int, rows: int = 1, cols: int = 1, most: int = 600) -> list[tuple[int, int]]:
    """Return random sizes, equal in every run: multiples of `rows` and of `cols`, up to the first multiple that is at
    least `most`."""
    generator = torch.Generator().manual_seed(rows + cols)
    drawn = torch.rand(count, 2, generator=generator).tolist()
    return [(rows * (1 + int(a * most / rows)), cols * (1 + int(b * most / cols))) for a, b in drawn]


SHAPES = [(128, 128), (256, 384), (1, 1), (1, 300), (300, 1), (77, 300), (129, 129), (136, 264), (0, 128), (128, 0),
          (0, 300), (300, 0), *random_sizes(3)]  # fmt: skip
STRIDES = ["contiguous", "strided", "misaligned"]
DATA = ["gauss", "zeros", "specials", "tiny", "huge"]

# Zeros, denormals, values around FP8 ties and maxima, the largest floats, Inf and NaN of both signs.
SPECIALS = [0.0, -0.0, 1e-40, -1e-45, 1.1754944e-38, 2.0**-9, 2.0**-10, 448.0, 464.0, -465.0, 57344.0, 61440.0, 3.0e38,
            -3.3895314e38, 1.0, -1.0625, float("inf"), float("-inf"), float("nan"), -float("nan")]  # fmt: skip


def values(data: str, rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values [rows, cols] on the CPU. gauss: magnitudes differ between rows and columns; specials: a few special values
    in an ordinary matrix."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    if data == "gauss":
        x *= torch.exp2(torch.arange(rows) % 17 - 8.0)[:, None] * torch.exp2(torch.arange(cols) % 13 - 6.0)
    elif data == "zeros":
        x = torch.copysign(torch.zeros(rows, cols), x)
    elif data == "tiny":
        x *= 1e-39
    elif data == "huge":
        x = (x * 1e38).clamp(-3.3e38, 3.3e38)
    else:
        special = torch.tensor(SPECIALS)[torch.randint(len(SPECIALS), (rows, cols), generator=generator)]
        x = torch.where(torch.rand(rows, cols, generator=generator) < 0.02, special, x)
    return x.to(dtype)


def place(x: Tensor, stride: str, device: str) -> Tensor:
    """Copy x to the device: contiguous, with a larger distance between rows, or at an unaligned address with an odd
    distance between rows."""
    if stride == "contiguous":
        return x.to(device)
    rows, cols = x.shape
    ahead, behind = (0, 24) if stride == "strided" else (1, 2)
    wide = torch.full((rows, ahead + cols + behind), 1e30, dtype=x.dtype, device=device)
    wide[:, ahead : ahead + cols] = x.to(device)
    return wide[:, ahead : ahead + cols]


def views(x: Tensor) -> dict[str, Tensor]:
    """Views of a matrix with every memory layout that layers pass to casts."""
    wide = torch.zeros(x.shape[0], x.shape[1] + 8, dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return {
        "contiguous": x, "transposed": x.t(), "strided": wide[:, : x.shape[1]], "strided, transposed": wide[:, :-8].t(),
        "equal rows": x[:1].expand(5, -1), "equal columns": x[:, :1].expand(-1, 7), "one value": x[:1, :1].expand(6, 9),
        "every other column": x[:, ::2], "one row": x[:1], "one column": x[:, :1],
    }  # fmt: skip
