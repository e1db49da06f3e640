"""Amaxes and FP8 casts of a matrix: by the CUDA kernels where its device has them, else by the reference, same bits.

The kernels read rows of adjacent elements, in bf16 or fp32. The transposed view of such a matrix costs nothing: the
kernel reads the matrix itself and is asked for the other orientation. A matrix that is neither is copied first, in its
own dtype. Other dtypes, amaxes along a dimension and blocks of other sizes have no kernel and run the reference.

    amax                    max |x|
    cast_fp8_tensor         one scale a tensor, made from an amax or given         cast_fp8_tensor_both
    cast_fp8_block          one scale 128 elements or 128x128 tile                 cast_fp8_block_both

The `_both` of a cast makes the operands of x and of x.t() in one read: the bits of two casts. Its `_batch` prepares that
for many matrices in one launch, into given outputs, and exists on CUDA only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dlp.kernels import cuda, loader, reference
from dlp.kernels.cuda import BlockJob, TensorJob
from dlp.kernels.reference import Fp8Scale
from dlp.kernels.reference.scales import Block

WITH_KERNELS = ("amax", "cast_fp8_tensor", "cast_fp8_block")
TILE_OF = {(1, 128): False, (128, 128): True}  # the blocks that kernels know
Way = tuple[bool, bool]
Launch = Callable[[], None]


def quantizer_kernels(op: str, device_type: str) -> str:
    """What runs `op`, a cast of `dlp.kernels.ops` by name, on a device, as plans print it: "kernel", or "reference",
    with what is missing where kernels cannot be built. On CUDA this builds them, once a machine."""
    if device_type != "cuda" or op not in WITH_KERNELS:
        return "reference"
    missing = loader.missing()
    return f"reference ({missing})" if missing else "kernel"


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dim() == 2 and x.dtype in cuda.INPUTS and not loader.missing()


def _adjacent(x: Tensor) -> tuple[Tensor, bool]:
    """A matrix that kernels can read, and whether it is the transpose of x."""
    if cuda.readable(x):
        return x, False
    return (x.t(), True) if cuda.readable(x.t()) else (x.contiguous(), False)


def amax(x: Tensor, dim: int | None = None) -> Tensor:
    """max |x| as fp32, over the whole tensor (shape []) or along `dim`; NaN is ignored, an empty tensor gives 0."""
    if dim is not None or not _has_kernel(x):
        return reference.amax(x, dim)
    out = torch.empty((), device=x.device)
    cuda.amax(_adjacent(x)[0], out)
    return out


def _cast_tensor(x: Tensor, dtype: torch.dtype, source: Fp8Scale, wanted: Way) -> TensorJob:
    """The kernel's job, done: `codes` of x and `codes_t` of x.t(), those of the two that are wanted."""
    matrix, flipped = _adjacent(x)
    ways = wanted[::-1] if flipped else wanted
    codes, codes_t = (
        torch.empty(shape, dtype=dtype, device=x.device) if want else None
        for shape, want in zip((matrix.shape, matrix.shape[::-1]), ways, strict=True)
    )
    scale_inv = torch.empty((), device=x.device)
    job = TensorJob(matrix, scale_inv, codes, codes_t, source.amax, source.scale, source.staging)
    cuda.cast_tensor(job, power_of_two=source.power_of_two, epsilon=source.epsilon)
    return job._replace(codes=codes_t, codes_t=codes) if flipped else job


def cast_fp8_tensor(x: Tensor, dtype: torch.dtype, source: Fp8Scale) -> tuple[Tensor, Tensor]:
    """x [rows, C] -> codes [rows, C] of `dtype` and fp32 scale_inv []; `source` says where the scale comes from."""
    if not _has_kernel(x):
        return reference.cast_fp8_tensor(x, dtype, source)
    job = _cast_tensor(x, dtype, source, (True, False))
    assert job.codes is not None
    return job.codes, job.scale_inv


def cast_fp8_tensor_both(x: Tensor, dtype: torch.dtype, source: Fp8Scale) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, C] -> codes [rows, C], their transpose [C, rows], and the scale_inv [] of both."""
    if not _has_kernel(x):
        codes, scale_inv = reference.cast_fp8_tensor(x, dtype, source)
        return codes, codes.t().contiguous(), scale_inv
    job = _cast_tensor(x, dtype, source, (True, True))
    assert job.codes is not None and job.codes_t is not None
    return job.codes, job.codes_t, job.scale_inv


def _cast_block(
    x: Tensor, tile: bool, dtype: torch.dtype, power_of_two: bool, epsilon: float, wanted: Way
) -> list[tuple[Tensor, Tensor]]:
    """The wanted ones of (codes, scale_inv) of x and of x.t(), by the kernel."""
    matrix, flipped = _adjacent(x)
    ways, shapes = wanted[::-1] if flipped else wanted, (matrix.shape, matrix.shape[::-1])
    made = [_block_outputs(matrix, shape, tile, dtype) for shape, want in zip(shapes, ways, strict=True) if want]
    parts = iter(made)
    (codes, scale), (codes_t, scale_t) = (next(parts) if want else (None, None) for want in ways)
    job = BlockJob(matrix, codes, scale, codes_t, scale_t)
    cuda.cast_block(job, tile=tile, power_of_two=power_of_two, epsilon=epsilon)
    return made[::-1] if flipped else made


def _block_outputs(x: Tensor, shape: Sequence[int], tile: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Storage for codes [lines, contraction] and their scales, where x is."""
    scales = cuda.block_scale_shape(*shape, tile=tile, gemm_layout=False)
    return torch.empty(shape, dtype=dtype, device=x.device), torch.empty(scales, device=x.device)


def cast_fp8_block(
    x: Tensor, block: Block, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """x [rows, C] -> codes [rows, C] of `dtype` and fp32 scale_inv [row blocks, C blocks]; edge blocks may be partial.

    A quotient max/amax that overflows becomes the largest finite value of x's dtype.
    """
    if block not in TILE_OF or not _has_kernel(x):
        return reference.cast_fp8_block(x, block, dtype, power_of_two=power_of_two, epsilon=epsilon)
    (made,) = _cast_block(x, TILE_OF[block], dtype, power_of_two, epsilon, (True, False))
    return made


def cast_fp8_block_both(
    x: Tensor, block: Block, dtype: torch.dtype, *, power_of_two: bool, epsilon: float = 0.0
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`cast_fp8_block` of x and of x.t()."""
    if block not in TILE_OF or not _has_kernel(x):
        cast = partial(reference.cast_fp8_block, block=block, dtype=dtype, power_of_two=power_of_two, epsilon=epsilon)
        return cast(x), cast(x.t())
    row, col = _cast_block(x, TILE_OF[block], dtype, power_of_two, epsilon, (True, True))
    return row, col


def has_batches(x: Tensor) -> bool:
    """Whether matrices like x can be cast in place by the batched casts: kernels, which read it as it lies."""
    return _has_kernel(x) and cuda.readable(x)


def cast_fp8_tensor_batch(
    xs: Sequence[Tensor], outs: Sequence[tuple[Tensor, Tensor, Tensor]], sources: Sequence[Fp8Scale]
) -> list[Launch]:
    """Prepares `cast_fp8_tensor_both` of many matrices that `has_batches`, into (codes, codes_t, scale_inv) each. A
    source without amax or scale takes the amax of its matrix, of all in one more launch. Call the launches in order."""
    launches: list[Launch] = []
    if sources[0].scale is None:
        amaxes = torch.empty(len(xs), device=xs[0].device)
        launches.append(cuda.amax_batch(xs, amaxes))
        sources = [source._replace(amax=amax) for source, amax in zip(sources, amaxes.unbind(), strict=True)]
    jobs = [
        TensorJob(x, scale_inv, codes, codes_t, source.amax, source.scale, source.staging)
        for x, (codes, codes_t, scale_inv), source in zip(xs, outs, sources, strict=True)
    ]
    options = sources[0]
    launches.append(cuda.cast_tensor_batch(jobs, power_of_two=options.power_of_two, epsilon=options.epsilon))
    return launches


def cast_fp8_block_batch(
    xs: Sequence[Tensor], outs: Sequence[Sequence[Tensor]], block: Block, *, power_of_two: bool, epsilon: float = 0.0
) -> list[Launch]:
    """Prepares `cast_fp8_block_both` of many matrices, into (codes, scale_inv, codes_t, scale_inv_t) each."""
    jobs = [BlockJob(x, *out) for x, out in zip(xs, outs, strict=True)]
    return [cuda.cast_block_batch(jobs, tile=TILE_OF[block], power_of_two=power_of_two, epsilon=epsilon)]
