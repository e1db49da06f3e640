"""Encodings of optimizer states in 8 or 4 bits by torchao: blocks of codes with one fp32 scale each.

    average of a parameter [.., K]
        codes   [.., K] or [.., K/2]  float8_e4m3fn or uint8; two codes of four bits share a byte
        scale   [.., K/block]         fp32
    or fp32 [.., K], not encoded, see `Encoding.keeps_fp32`

Codes and scales are plain tensors, or DTensors if the parameter is a DTensor. Checkpoints store them by name, since encoding
decoded values again would give other codes. A block lies within a row of a rank's shard, so codes and scales are sharded like
the parameter if the rows of each shard consist of complete blocks. During an update, torchao's tensors are views of codes and
scales.
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

SMALLEST = 4096  # minimum number of elements on a rank for an encoded average, as in torchao
AVERAGES = {"exp_avg": True, "exp_avg_sq": False}  # name of an average -> whether its values may be negative
Average = Tensor | dict[str, Tensor]
# Function (codes, scale) -> torchao's tensor [n] in the same memory
Wrap = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Encoding:
    """Encoding of an average by torchao.optim.

    module, name   module and name of torchao's tensor class
    block          number of elements that share a scale
    dtype          dtype of the codes
    packed         number of codes in one element of `dtype`
    """

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
        """Return the reason why the averages of a parameter stay fp32; None: the averages are encoded. All ranks get the same
        result.

        shape    shape of the full parameter
        shards   number of shards along each dimension
        """
        if any(size % num for size, num in zip(shape, shards, strict=True)):
            return f"{prod(shards)} shards of unequal size"
        if prod(shape) // prod(shards) < SMALLEST:
            return f"fewer than {SMALLEST} elements on a rank"
        if (row := shape[-1] // shards[-1]) % self.block:
            return f"rows of {row} elements on a rank, not a multiple of {self.block}"
        return None

    def zeros(self, parameter: Tensor) -> Average:
        """Return an average of zeros, the state before the first step: encoded, or fp32 (`keeps_fp32`)."""
        if self.keeps_fp32(parameter.shape, shards_of(parameter)) is not None:
            return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        codes = _zeros(parameter, self.packed, self.dtype)
        return {"codes": codes, "scale": _zeros(parameter, self.block, torch.float32)}

    def wrap(self, signed: bool, device: torch.device) -> Wrap:
        """Return a function that builds torchao's tensor from codes and scales. `signed`: see AVERAGES."""
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
    """Return a zero tensor that is sharded like a parameter, with one element for every `elements` elements of a row."""
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
    """Return this rank's shard of an average: a flat tensor [n], or flat codes and scales."""
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
    """Write this rank's shard of unsharded values [.., K] into an average, and encode the values if the average is encoded."""
    like = average if isinstance(average, Tensor) else average["codes"]
    if isinstance(like, DTensor):
        values = distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)
    own, local = flat(average), local_values(values).reshape(-1).to(like.device)
    if not isinstance(own, Tensor):
        own = encoding_of(own["codes"], own["scale"]).wrap(signed, like.device)(own["codes"], own["scale"])
    own.copy_(local)
