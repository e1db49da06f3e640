"""Kernels other than casts, against the reference: decoding to bf16, transposes, swizzled scales, updates of delayed
scales, sums in order and in a tree, checksums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dlp
from dlp.kernels import canonical, cuda_codes, launches, ops, reference
from dlp.kernels.ops import DelayedSlots
from dlp.runtime import capture as captured
from tests.gpu.inputs import CODES, DTYPES, random_sizes, values
from tests.metrics import assert_bit_equal

SIZES = [(128, 128), (256, 384), (1, 16), (1, 300), (300, 1), (77, 304), (129, 131), (136, 264), (0, 128), (128, 0),
         *random_sizes(3)]  # fmt: skip


def some_bytes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, generator=generator, dtype=torch.int32).to(torch.uint8)


def without_nan(x: Tensor) -> Tensor:
    """Replace all NaNs by one value, because the bits of a NaN differ between devices."""
    return torch.where(x.isnan(), torch.tensor(torch.nan, dtype=x.dtype), x)


def decoded(
    poisoned, codes: Tensor, scale: Tensor, block: tuple[int, int], cols: int, amax: Tensor | None = None
) -> Tensor:
    """Decode codes with scales that are stored row by row. Assert that scales that are stored column by column give the
    same result."""
    out, other = (poisoned((codes.shape[0], cols), torch.bfloat16) for _ in range(2))
    cuda_codes.decode(codes.cuda(), scale.cuda(), block, out, amax)
    cuda_codes.decode(codes.cuda(), by_columns(scale.cuda()), block, other, amax)
    assert torch.equal(out.view(torch.int16), other.view(torch.int16))
    return without_nan(out.cpu())


def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("height", [1, 32])
def test_mxfp8_decodes_to_the_reference(device, poisoned, code, height):
    for rows, cols in [(32, 32), (64, 1024), (256, 96), (256, 8192), (0, 32), *random_sizes(3, 32, 32)]:
        codes, scale = some_bytes(rows, cols).view(code), some_bytes(rows // height, cols // 32, seed=1)
        want = without_nan(reference.decode_mxfp8(codes, scale, (height, 32)).bfloat16())
        assert_bit_equal(decoded(poisoned, codes, scale, (height, 32), cols), want, f"{rows} {cols}")


@pytest.mark.parametrize("height", [1, 16])
def test_nvfp4_decodes_to_the_reference(device, poisoned, height):
    for rows, cols in [(16, 16), (64, 1024), (256, 80), (256, 8192), (0, 16), *random_sizes(3, 16, 16)]:
        packed = some_bytes(rows, cols // 2)
        scale = some_bytes(rows // height, cols // 16, seed=1).view(torch.float8_e4m3fn)
        for amax in (None, torch.tensor(3.7), torch.tensor(1e-36), torch.tensor(torch.inf)):
            want = without_nan(reference.decode_nvfp4(packed, scale, (height, 16), amax).bfloat16())
            on = None if amax is None else amax.cuda()
            assert_bit_equal(decoded(poisoned, packed, scale, (height, 16), cols, on), want, f"{rows} {cols} {amax}")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("height", [1, 128])
def test_fp8_blocks_decode_to_the_reference(device, poisoned, code, height):
    for rows, cols in SIZES:
        codes = some_bytes(rows, cols).view(code)
        exponents = torch.randint(
            -60, 60, (-(-rows // height), -(-cols // 128)), generator=torch.Generator().manual_seed(2)
        )
        scale = torch.exp2(exponents.float())
        want = without_nan(reference.decode_fp8_block(codes, scale, (height, 128)).bfloat16())
        assert_bit_equal(decoded(poisoned, codes, scale, (height, 128), cols), want, f"{rows} {cols}")


def test_weights_decode_by_one_launch(device):
    """`dequantize` of a bf16 weight launches one kernel, which writes bf16 directly."""
    for name in ("nvfp4", "fp8_block"):
        weight = dlp.quantize_(torch.nn.Sequential(torch.nn.Linear(256, 128)).bfloat16().to(device), name)[0].weight
        want = weight.use.format.decode_parts([part.cpu() for part in weight.parts]).bfloat16()
        with launches.recording() as recorded:
            weight.dequantize()
        assert [kernel for kernel, *_ in recorded] == ["decode"], name
        assert_bit_equal(weight.dequantize().cpu(), want, name)


@pytest.mark.parametrize("each", [1, 16, 32, 128])
def test_scales_are_swizzled(device, poisoned, each):
    """The kernel writes scales in the swizzled layout of block-scaled GEMMs. Hopper, which has no such GEMMs, can run
    the kernel."""
    for lines, blocks in [(128, 4), (256, 512), (1, 1), (300, 7), (77, 6), (129, 33), (0, 4), *random_sizes(3)]:
        scale = some_bytes(-(-lines // each), blocks)
        want = reference.swizzle_128x4(scale, lines, each)
        out = poisoned((len(want),), torch.uint8)
        cuda_codes.swizzle(scale.cuda(), lines, each, out)
        assert_bit_equal(out.cpu(), want, f"{lines} {blocks}")
        tiles = ops.swizzle_128x4(by_columns(scale.cuda()), lines, each)
        assert torch.equal(ops.unswizzle_128x4(tiles, lines, blocks).cpu(), scale[torch.arange(lines) // each])


@pytest.mark.parametrize("offset", [0, 1])
def test_codes_transposed(device, poisoned, offset):
    for rows, cols in [*SIZES, (1000, 2000)]:
        codes, out = some_bytes(rows, cols).view(CODES[0]), poisoned((cols, rows), CODES[0], offset)
        cuda_codes.transpose(codes.cuda(), out)
        assert_bit_equal(out.cpu(), codes.t().contiguous(), f"{rows} {cols}")


@pytest.mark.parametrize("offset", [0, 1])
def test_nibbles_transposed(device, poisoned, offset):
    for rows, cols in [
        (128, 128),
        (256, 384),
        (2, 2),
        (2, 300),
        (300, 2),
        (78, 304),
        (130, 132),
        (0, 16),
        (1000, 2000),
        *random_sizes(3, 2, 2),
    ]:
        packed, out = some_bytes(rows, cols // 2), poisoned((cols, rows // 2), torch.uint8, offset)
        cuda_codes.transpose(packed.cuda(), out)
        assert_bit_equal(out.cpu(), reference.transpose_e2m1(packed), f"{rows} {cols}")


def slots(length: int, count: int, algorithm: str, device: str) -> DelayedSlots:
    """Return `count` delayed scales with a history of `length` steps: amaxes of 0 (unused), random amaxes, and special
    values (tiny, huge, Inf, NaN) in the history and in the current step."""
    generator = torch.Generator().manual_seed(length + count)
    history = torch.rand(length, count, generator=generator) * 10
    reduced = torch.rand(count, generator=generator) * 10
    special = torch.tensor([0.0, torch.inf, torch.nan, 1e-45, 3e38, 1e-38])
    for row in (history[0], history[-1], history[length // 2], reduced):
        drawn = special[torch.randint(len(special), (count,), generator=generator)]
        row.copy_(torch.where(torch.rand(count, generator=generator) < 0.4, drawn, row))
    history[0] *= torch.rand(count, generator=generator) < 0.3
    tensors = (history, torch.rand(count, generator=generator), reduced, torch.full((count,), 448.0), reduced.clone())
    return DelayedSlots(*(tensor.to(device) for tensor in tensors), algorithm)


def test_delayed_update_is_the_reference(device):
    kinds = [(1, 5, "max"), (2, 40, "most_recent"), (3, 33, "max"), (16, 300, "max"), (1024, 70, "max"), (1024, 1, "max"),
             (47, 64, "most_recent"), *((length, count, "max") for length, count in random_sizes(3))]  # fmt: skip
    mine, theirs = ([slots(*kind, where) for kind in kinds] for where in (device, "cpu"))
    update, expected = ops.delayed_updates(mine), ops.delayed_updates(theirs)
    for _ in range(3):
        update()
        expected()
        for kind, left, right in zip(kinds, mine, theirs, strict=True):
            for name in ("history", "scale", "staging"):
                assert_bit_equal(getattr(left, name).cpu(), getattr(right, name), f"{name} of {kind}")


def test_checksums_are_the_reference(device):
    """The tensors have aligned and unaligned addresses. There are more tensors than one launch accepts, and some tensors are
    larger than the part that one thread block processes."""
    data = some_bytes(300_000).to(device, copy=True)
    sizes = [0, 1, 7, 8, 9, 63, 64, 65, 4096, 65_535, 65_536, 65_544, 200_000]
    tensors = [data[start : start + size] for start in (0, 8, 13) for size in sizes] * 4
    tensors += [data[:64].view(torch.bfloat16).view(4, 8), data[:4].view(torch.float32)[0]]
    assert len(tensors) > 128

    def by_kernel() -> Tensor:
        out = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        cuda_codes.add_checksums(tensors, out)
        return out.cpu()

    expected = reference.checksums(*(tensor.cpu() for tensor in tensors))
    assert_bit_equal(by_kernel(), expected)
    data[200_011] ^= 1
    assert (by_kernel() != expected).sum() == 4, "the tensors with this byte"


def test_sums_are_divided_and_rounded_to_either_dtype(device, poisoned):
    x = torch.stack([values("gauss", 1, 1001, torch.bfloat16, seed)[0] for seed in range(3)])
    for dtype in DTYPES:
        out = poisoned((1001,), dtype)
        cuda_codes.sum_in_order(x.to(device), out, None, 3)
        assert_bit_equal(out.cpu(), reference.sum_in_order(x, dtype, None, 3), f"{dtype}")
        assert not torch.equal(out.cpu(), reference.sum_in_order(x, dtype)), "the divisor can be seen"


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_in_order(device, poisoned, dtype):
    for contributions in (1, 2, 3, 4, 5, 8, 17):
        for size in ((1,), (7,), (33, 8), (1000, 1001), (0, 4)):
            x = torch.stack(
                [values("gauss", 1, max(1, torch.Size(size).numel()), dtype, seed)[0] for seed in range(contributions)]
            )
            x = x[:, : torch.Size(size).numel()].reshape(contributions, *size)
            out = poisoned(size, dtype)
            cuda_codes.sum_in_order(x.to(device), out)
            assert_bit_equal(out.cpu(), reference.sum_in_order(x), f"{contributions} {size}")
            own, there = poisoned(size, dtype).copy_(x[-1].to(device)), x.to(device, copy=True)
            there[-1] = 7
            cuda_codes.sum_in_order(there, out, (contributions - 1, own))
            assert_bit_equal(out.cpu(), reference.sum_in_order(x), f"{contributions} {size}, the last apart")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_tree_has_the_bits_of_the_reference(device, poisoned, parts, dtype):
    for size in SIZES:
        x = torch.randn(parts, *size, generator=torch.Generator().manual_seed(parts))
        out = poisoned(size, dtype)
        cuda_codes.sum_by_tree(x.to(device), out)
        assert_bit_equal(out.cpu(), reference.sum_by_tree(x, dtype), f"{parts} {size}")
        assert_bit_equal(reference.sum_by_tree(x, dtype), canonical.tree(x.unbind()).to(dtype), f"{parts} {size}")


def test_copies_that_are_launched_again_go_where_results_lie_now(device):
    def rearranged(x: Tensor, whole: Tensor) -> list[Tensor]:
        rows = cuda_codes.end_to_end([x, whole])
        return [rows, cuda_codes.side_by_side(whole, 1), cuda_codes.copied_rows(x[:, :3])]

    given = [torch.full((4, 5), -1.0, device=device), torch.full((2, 3, 4), -1.0, device=device)]
    made = captured.record(lambda: rearranged(*given), given, [])
    for seed in range(2):
        x, whole = (torch.randn(each.shape, generator=torch.Generator().manual_seed(seed)).to(device) for each in given)
        want = [torch.cat([x.flatten(), whole.flatten()]), torch.cat([*whole], 1), x[:, :3]]
        for found, expected in zip(made([x, whole]), want, strict=True):
            assert torch.equal(found, expected)
