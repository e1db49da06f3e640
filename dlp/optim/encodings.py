"""Encodings of optimizer states in 8 or 4 bits by torchao: blocks of codes with one fp32 scale each.

    average of a parameter [.., K]
        codes   [.., K] or [.., K/2]  float8_e4m3fn or uint8; two codes of four bits share a byte
        scale   [.., K/block]         fp32
    or fp32 [.., K], for the reason that `Encoding.keeps_fp32` returns

These are plain tensors, or DTensors if the parameter is a DTensor, so that checkpoints hold codes and scales by name: encoding
decoded values again would give other codes. A block lies within a row of a rank's shard, so codes and scales are sharded like
the parameter, on every mesh whose shards have rows of complete blocks. torchao's tensors are views of them during an update.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dlp.parallel.weight.local import local_values, shards_of

SMALLEST = 4096  # minimum number of elements on a rank, as in torchao
AVERAGES = {"exp_avg": True, "exp_avg_sq": False}  # whether the average has a sign
Average = Tensor | dict[str, Tensor]
# makes torchao's tensor [n] from codes and scales of complete blocks, in the same memory
Wrap = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Encoding:
    """Encoding of an average by torchao.optim. `module`, `name`: tensor class; `block`: elements that share a scale;
    `packed`: number of
    codes in one element of `dtype`."""

    module: str
    name: str
    block: int
    dtype: torch.dtype = torch.uint8
    packed: int = 1

    @property
    def state_bytes(self) -> float:
        """Bytes of both averages per element of a parameter."""
        return 2 * (1 / self.packed + 4 / self.block)

    def keeps_fp32(self, shape: Sequence[int], shards: Sequence[int]) -> str | None:
        """The reason why the averages of a parameter of this shape, with this number of shards per dimension, stay
        fp32; None: encoded.

        Equal on all ranks."""
        if any(size % num for size, num in zip(shape, shards, strict=True)):
            return f"cut unevenly into {prod(shards)}"
        if prod(shape) // prod(shards) < SMALLEST:
            return f"fewer than {SMALLEST} elements on a rank"
        if (row := shape[-1] // shards[-1]) % self.block:
            return f"rows of {row} elements on a rank, not a multiple of {self.block}"
        return None

    def zeros(self, parameter: Tensor) -> Average:
        """Return an average before the first step."""
        if self.keeps_fp32(parameter.shape, shards_of(parameter)) is not None:
            return torch.zeros_like(parameter)
        codes = _zeros(parameter, self.packed, self.dtype)
        return {"codes": codes, "scale": _zeros(parameter, self.block, torch.float32)}

    def wrap(self, signed: bool, device: torch.device) -> Wrap:
        module = importlib.import_module(self.module)
        kind = getattr(module, self.name)
        if self.name == "OptimStateFp8":
            return lambda codes, scale: kind(codes, scale, torch.float32)
        table = torch.tensor(module.get_qmap_signed() if signed else module.get_qmap_unsigned(), device=device)
        if self.packed == 1:
            return lambda codes, scale: kind(codes, scale, table, signed, torch.float32)
        return lambda codes, scale: kind(codes, scale, table, signed, (self.packed * codes.numel(),), torch.float32)


ENCODINGS = {
    "adamw8bit": Encoding("torchao.optim.subclass_8bit", "OptimState8bit", 256),
    "adamw4bit": Encoding("torchao.optim.subclass_4bit", "OptimState4bit", 128, packed=2),
    "adamwfp8": Encoding("torchao.optim.subclass_fp8", "OptimStateFp8", 256, torch.float8_e4m3fn),
}


def _zeros(parameter: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
    """A zero tensor that is sharded like a parameter, with one element per `block` elements of a row."""
    *rows, columns = local_values(parameter).shape
    local = torch.zeros(*rows, columns // elements, dtype=dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    *rows, columns = parameter.shape
    whole = torch.empty(*rows, columns // elements, device="meta")
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def flat(average: Average) -> Average:
    """Flat part [n] of an average on this rank."""
    if isinstance(average, Tensor):
        return local_values(average).view(-1)
    return {name: local_values(part).view(-1) for name, part in average.items()}


def encoding_of(codes: Tensor, scale: Tensor) -> Encoding:
    """Find the encoding of codes and scales. Raises ValueError for codes of an unknown encoding."""
    for encoding in ENCODINGS.values():
        if codes.dtype == encoding.dtype and codes.numel() * encoding.packed == scale.numel() * encoding.block:
            return encoding
    raise ValueError(
        f"codes {list(codes.shape)} with scales {list(scale.shape)} match no encoding in {list(ENCODINGS)}; resume "
        f"with the version of dlp that saved the codes, or start again with --checkpoint.resume none"
    )


def decoded(parts: Mapping[str, Tensor], signed: bool) -> Tensor:
    """Decode an unsharded average to values [.., K]."""
    codes, scale = parts["codes"], parts["scale"]
    wrap = encoding_of(codes, scale).wrap(signed, codes.device)
    values: Tensor = wrap(codes.view(-1), scale.view(-1)).dequantize()
    return values.view(*codes.shape[:-1], -1)


@torch.no_grad()
def write(average: Average, values: Tensor, signed: bool) -> None:
    """Write this rank's part of unsharded values [.., K] into an average, encoded if the average is encoded."""
    like = average if isinstance(average, Tensor) else average["codes"]
    if isinstance(like, DTensor):
        values = distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)
    own, local = flat(average), local_values(values).reshape(-1).to(like.device)
    if not isinstance(own, Tensor):
        own = encoding_of(own["codes"], own["scale"]).wrap(signed, like.device)(own["codes"], own["scale"])
    own.copy_(local)
