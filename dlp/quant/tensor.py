"""Formats and quantized tensors: shapes, decoding and sharding of codes and scales.

A GEMM operand is a matrix [rows, contraction]. A `QuantizedTensor` holds the parts of this matrix: first the payload (codes, or
high-precision values), then scales and, in some formats, zero points or a mask. The `Format` defines the shapes and the
decoding of the parts, and whether the payload may be transposed. For an operand that is sharded along a dimension, the format
gives for each part the dimension along which the shards of the part are concatenated, or SHARED for a part that is equal on all
ranks.

Scales have compact shapes, without padding. On a GPU, `Format.empty` may allocate scales with the strides that kernels write or
read fastest. Other layouts of scales for GEMMs are computed right before the GEMM. Parts are made contiguous for transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHARED = None  # the part is equal on all ranks
UNSAID = -1  # the format does not define how the part is sharded
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Description of one tensor of a `QuantizedTensor`.

    Args:
        name: name of the tensor.
        dtype: dtype; None: the dtype of the source tensor.
        rows: dimension of this tensor along which shards are concatenated, if the operand is sharded along its rows; SHARED:
            the tensor is equal on all ranks; UNSAID: quantized shards of the operand cannot be gathered.
        contraction: the same for an operand that is sharded along the contraction.

    Examples:
        >>> from dlp.quant.tensor import SHARED
        >>> scale = dlp.quant.tensor.Part("scale_inv", torch.float32, rows=SHARED, contraction=SHARED)
    """

    name: str
    dtype: torch.dtype | None
    rows: int | None = UNSAID
    contraction: int | None = UNSAID

    def moves_along(self, dim: int) -> int | None:
        """Return the dimension of this part along which a gather of the operand along dimension `dim` concatenates the shards:
        the field `rows` for dim 0, the field `contraction` for dim 1; the result may be SHARED or UNSAID."""
        return (self.rows, self.contraction)[dim]


def as_bytes(part: Tensor) -> Tensor:
    """Return a part with one-byte elements as uint8, which gloo and pickle support; other parts are returned unchanged."""
    return part.view(torch.uint8) if part.dtype.itemsize == 1 else part


@dataclass(frozen=True)
class QuantizedTensor:
    """Quantized GEMM operand [rows, contraction]. The class is no torch.Tensor, and autograd does not track it.

    Args:
        format: format, which defines the parts and how they are decoded.
        parts: tensors in the order of `format.parts`.

    Examples:
        >>> from dlp.quant.fp8 import CurrentScaling
        >>> quantizer, x = CurrentScaling(), torch.randn(16, 64)
        >>> quantizer.cast(x, quantizer.observe(x)).dequantize(torch.float32).shape
        torch.Size([16, 64])
    """

    format: Format
    parts: tuple[Tensor, ...]

    @property
    def payload(self) -> Tensor:
        return self.parts[0]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.payload.shape
        return rows, self.format.elements(columns)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [rows, contraction], rounded once to `dtype`, in the basis of the format (`Format.basis`)."""
        return self.format.dequantize(self, dtype)

    def transpose(self) -> QuantizedTensor:
        """Return the operand [contraction, rows] with the same values. The format must be `transposable`."""
        return self.format.transpose(self)


class Format:
    """Base class of formats.

    A subclass is a frozen dataclass with `name`, `parts` and `block`, as attributes or properties, and with the methods
    `part_shapes` and `dequantize`.

    A format may define a GEMM D = A @ B.T as the method `gemm(which, a, b, *, out_dtype, bias=None, accumulate=None)`, with
    `which` "fprop", "dgrad" or "wgrad". This method then runs all GEMMs with an operand of this format, unless the other
    operand is in high precision, or this operand is B and the format of A also defines `gemm`. If the method has a parameter
    `options`, it receives the `GemmOptions` of the recipe.

    Examples:
        >>> from dlp.quant.fp8 import CurrentScaling
        >>> isinstance(CurrentScaling().format, dlp.quant.tensor.Format)
        True
    """

    @property
    def name(self) -> str:
        """Name in plans and logs."""
        raise NotImplementedError(f"{type(self).__name__} must define name")

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of a QuantizedTensor of this format."""
        raise NotImplementedError(f"{type(self).__name__} must define parts")

    @property
    def block(self) -> tuple[int, int]:
        """Number of elements that share a scale, along (rows, contraction); 0 means the full dimension."""
        raise NotImplementedError(f"{type(self).__name__} must define block")

    @property
    def multiple(self) -> tuple[int, int]:
        """Numbers that must divide rows and contraction."""
        return 1, 1

    @property
    def transposable(self) -> bool:
        """Whether the payload may be transposed without requantizing."""
        return False

    @property
    def gemm_kind(self) -> str:
        """Name of the format in the GEMM table (`dlp.kernels.table`)."""
        return "decode"

    @property
    def element(self) -> str:
        """Element type of the codes, such as "e4m3", "e5m2" or "int8"; "" if GEMMs do not depend on it."""
        return ""

    @property
    def basis(self) -> str:
        """Name of the transform of the values along the contraction, such as "rht"; "" for none. Both operands of a GEMM must
        have the same transform."""
        return ""

    @property
    def bf16_exact(self) -> bool:
        """Whether decoded values are exact in bf16, so that a GEMM may multiply decoded bf16 values."""
        return False

    @property
    def factors(self) -> str | None:
        """Kind of scale that `factored` returns: "": no scale; "tensor": one scale []; "row": scales [rows]. None if decoded
        values are not products of bf16 values and such a scale."""
        return "" if self.bf16_exact else None

    @property
    def landmarks(self) -> tuple[int, int] | None:
        """Payload bytes that encode 1 and the largest value, before scaling, for statistics of scales and saturation. None if
        the format has no such bytes."""
        return None

    @property
    def clips(self) -> bool:
        """Whether the last part is a mask of clipped values, bool in the shape of the values. Backward sets the gradient of
        clipped values to 0."""
        return False

    @property
    def elements_per_code(self) -> int:
        """Number of elements along the contraction in one entry of the payload."""
        return 1

    def elements(self, entries: int) -> int:
        """Return the number of elements along the contraction in this number of entries of the payload."""
        return entries * self.elements_per_code

    @property
    def keeps_source(self) -> bool:
        """Whether the payload is the source tensor in high precision."""
        return self.parts[0].dtype is None

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        """Return the shapes of the parts of an operand [rows, contraction]."""
        raise NotImplementedError(f"{type(self).__name__} must define part_shapes")

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define dequantize")

    def factored(self, q: QuantizedTensor) -> tuple[Tensor, Tensor | None]:
        """Return values [rows, contraction] that are exact in bf16, and their fp32 scale (None if `factors` is ""). GEMMs that
        decode multiply these values. `factors` must not be None."""
        return self.dequantize(q, torch.bfloat16), None

    def decode_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the fp32 values [rows, contraction] of an operand that is given as parts."""
        return self.dequantize(self.wrap(parts), torch.float32)

    def factor_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return `factored` of an operand that is given as parts."""
        return self.factored(self.wrap(parts))

    def transpose(self, q: QuantizedTensor) -> QuantizedTensor:
        raise ValueError(f"format {self.name} cannot be transposed: quantize the transposed tensor instead")

    def part_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the parts of an operand that is cast from a tensor of `dtype`."""
        return tuple([part.dtype or dtype for part in self.parts])

    @cached_property
    def moves(self) -> list[list[int | None]]:
        """`Part.moves_along` of all parts: moves[dim][i] for dimension `dim` (0 or 1) of the operand and part i."""
        return [[part.moves_along(dim) for part in self.parts] for dim in (0, 1)]

    def check(self, shape: tuple[int, int]) -> None:
        """Raise ValueError if the format does not support a matrix [rows, contraction] of this shape."""
        for what, size, multiple in zip(("rows", "contraction"), shape, self.multiple, strict=True):
            if size % multiple:
                raise ValueError(
                    f"{self.name} needs a {what} size that is a multiple of {multiple}; got {size} in {tuple(shape)}. "
                    f"Append zeros (Format.padded), or keep this operand in high precision"
                )

    def padded(self, x: Tensor) -> Tensor:
        """Return x [rows, contraction], zero-padded to multiples of `multiple`; x itself if no padding is needed."""
        rows, cols = (-size % multiple for size, multiple in zip(x.shape, self.multiple, strict=True))
        return F.pad(x, (0, cols, 0, rows)) if rows or cols else x

    def concatenates(self, dim: int, size: int) -> bool:
        """Return whether quantized shards of `size` rows (dim 0) or columns (dim 1), concatenated along `dim`, equal the
        quantized unsharded matrix, if ranks agree on amaxes. This holds if no part is UNSAID, and shards consist of
        complete blocks and complete units of `multiple`."""
        says = all(part.moves_along(dim) != UNSAID for part in self.parts)
        return says and (self.block[dim] == 0 or size % self.block[dim] == 0) and size % self.multiple[dim] == 0

    def empty(self, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device) -> QuantizedTensor:
        """Allocate an operand of `shape`. `dtype`: dtype of high-precision parts."""
        shapes = zip(self.parts, self.part_shapes(shape), strict=True)
        return QuantizedTensor(
            self, tuple(torch.empty(s, dtype=part.dtype or dtype, device=device) for part, s in shapes)
        )

    def wrap(self, parts: Any) -> QuantizedTensor:
        """Return a QuantizedTensor of the first parts in a sequence, which may be longer than `parts` of this format."""
        return QuantizedTensor(self, tuple(parts[: len(self.parts)]))

    def fill(self, out: QuantizedTensor | None, *parts: Tensor) -> QuantizedTensor:
        """Return a QuantizedTensor of these parts. With `out`, copy each part that is not yet a tensor of `out` into the
        tensor of `out`, and return `out`."""
        if out is None:
            return QuantizedTensor(self, parts)
        for destination, part in zip(out.parts, parts, strict=True):
            if destination is not part:
                destination.copy_(part)
        return out

    def nbytes(self, shape: tuple[int, int], dtype: torch.dtype, *, along: int | None = None) -> int:
        """Return the number of bytes of all parts of an operand of `shape`, or with `along` only of the parts that a gather
        along this dimension of the operand sends. `dtype`: dtype of high-precision parts."""
        return sum(
            torch.Size(size).numel() * (part.dtype or dtype).itemsize
            for part, size in zip(self.parts, self.part_shapes(shape), strict=True)
            if along is None or part.moves_along(along) is not SHARED
        )


@dataclass(frozen=True)
class HighPrecision(Format):
    """Format of values in high precision, in the dtype of the source tensor. The transpose is a strided view."""

    name = "hp"
    parts = (Part("values", None, rows=0, contraction=1),)
    block = (1, 1)
    transposable = True
    gemm_kind = "hp"

    def part_shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        return (shape,)

    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        return q.payload.to(dtype)

    def factored(self, q: QuantizedTensor) -> tuple[Tensor, Tensor | None]:
        """Return the values in their dtype, without scale. Only bf16 values are exact in bf16."""
        return q.payload, None

    def transpose(self, q: QuantizedTensor) -> QuantizedTensor:
        return QuantizedTensor(self, (q.payload.t(),))


def blocks(size: int, block: int) -> int:
    """Return the number of blocks that cover `size` elements; the last block may be partial."""
    return -(-size // block)
