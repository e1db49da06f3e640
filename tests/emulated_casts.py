"""Kernels of the emulated device (`tests.emulated`) for rowwise FP8, MXFP8 and NVFP4, and for decoding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlp.kernels import reference
from tests import emulated
from tests.emulated import CODES, matrix, of_jobs, scalar
from tests.emulated import made as of_producer

E4M3 = torch.float8_e4m3fn


def put(address: int, values: Tensor) -> None:
    if address:
        emulated.at(address, values.shape, values.dtype).copy_(values)


def both(words: Any, wide: bool, source: Any, parts: int) -> list[tuple[Tensor, Any]]:
    """Return x and x.t(), each with the addresses of its outputs, `parts` addresses for each orientation. Leave out an
    orientation whose first address is 0. Set the flag in `words` to NaN if a value of x is not finite."""
    x = matrix(words, wide) if source is None else of_producer(words, wide, source)
    reference.watched(x, scalar(words[5 + 2 * parts]))
    found = (x, words[5 : 5 + parts]), (x.t(), words[5 + parts : 5 + 2 * parts])
    return [(each, its) for each, its in found if its[0]]


def set_zero(address: int, nbytes: int, stream: int) -> None:
    emulated.at(address, (nbytes,), torch.uint8).zero_()


@of_jobs
def amax_lines(words: Any, many: int, count: int, items: int, wide: bool, source: Any, stream: int) -> None:
    x = of_producer(words, wide, source)
    for address, dim in ((words[5], 1), (words[6], 0)):
        if address:
            amax = emulated.at(address, (x.shape[1 - dim],), torch.float32)
            amax.copy_(torch.maximum(amax, reference.amax(x, dim)))


@of_jobs
def cast_rowwise(
    words: Any, many: int, count: int, items: int, wide: bool, e5m2: bool, rule: Any, source: Any, stream: int
) -> None:
    for x, (codes, amax, scale_inv) in both(words, wide, source, 3):
        amaxes = emulated.at(amax, (len(x),), torch.float32)
        found = reference.cast_fp8_rowwise(x, amaxes, CODES[e5m2], power_of_two=rule[3], epsilon=rule[1])
        put(codes, found[0])
        put(scale_inv, found[1])


@of_jobs
def cast_mxfp8_1d(
    words: Any, many: int, count: int, items: int, wide: bool, e5m2: bool, floor: bool, blocks_first: bool, source: Any,
    stream: int,
) -> None:  # fmt: skip
    for x, (codes, scale) in both(words, wide, source, 2):
        found = reference.cast_mxfp8(x, (1, 32), CODES[e5m2], rule="floor" if floor else "ceil")
        put(codes, found[0])
        put(scale, F.pad(found[1].t(), (0, -len(x) % 4)) if blocks_first else found[1])


@of_jobs
def cast_mxfp8_2d(
    words: Any, many: int, count: int, items: int, wide: bool, e5m2: bool, floor: bool, stream: int
) -> None:
    for x, (codes, scale) in both(words, wide, None, 2):
        found = reference.cast_mxfp8(x, (32, 32), CODES[e5m2], rule="floor" if floor else "ceil")
        put(codes, found[0])
        put(scale, found[1])


def amax_rht(words: Any, tiles: int, wide: bool, stream: int) -> None:
    x = matrix(words, wide)
    put(words[5], reference.amax(x))
    put(words[6], reference.amax(reference.rht16(x.t())))


@of_jobs
def cast_nvfp4_1d(
    words: Any, many: int, count: int, items: int, wide: bool, rht: bool, four: bool, draw: Any, draw_t: Any, source: Any,
    stream: int,
) -> None:  # fmt: skip
    _nvfp4(words, wide, source, (1, 16), rht, (draw, draw_t), four)


@of_jobs
def cast_nvfp4_2d(words: Any, many: int, count: int, items: int, wide: bool, four: bool, stream: int) -> None:
    _nvfp4((*words[:11], words[7], *words[12:]), wide, None, (16, 16), False, ((0,), (0,)), four)


def _nvfp4(words: Any, wide: bool, source: Any, block: tuple[int, int], rht: bool, draws: Any, four: bool) -> None:  # fmt: skip
    for x, (codes, scale, amax, amax_out) in both(words, wide, source, 4):
        turned = codes == words[9]
        counter, *drawn = draws[turned]
        random = None
        if counter:
            row, first, across, orientation, seed, tensor = drawn
            place = row, 16 * first, 16 * across, orientation
            count = emulated.at(counter, (), torch.int64)
            random = reference.PhiloxState(*place, count, (seed, tensor)).bytes(*x.shape)
        largest = emulated.at(amax, (), torch.float32)
        values = reference.rht16(x) if rht and turned else x
        found = reference.cast_nvfp4(values, largest, block, random=random, four_over_six=four)
        put(codes, found[0])
        put(scale, found[1])
        put(amax_out, reference.nvfp4_stored_amax(largest, four_over_six=four))


def decode(words: Any, encoding: int, stream: int) -> None:
    codes, scale, out, rows, cols, down, along, *strides, amax = words
    blocks = -(-rows // down), -(-cols // along)
    to = emulated.at(out, (rows, cols), torch.bfloat16)
    if encoding == 4:
        packed = emulated.at(codes, (rows, cols // 2), torch.uint8)
        largest = None if amax == 0 else emulated.at(amax, (), torch.float32)
        found = reference.decode_nvfp4(packed, emulated.at(scale, blocks, E4M3, strides), (down, along), largest)
    else:
        values = emulated.at(codes, (rows, cols), CODES[encoding % 2])
        kind, decoded = (
            (torch.uint8, reference.decode_mxfp8) if encoding > 1 else (torch.float32, reference.decode_fp8_block)
        )
        found = decoded(values, emulated.at(scale, blocks, kind, strides), (down, along))
    to.copy_(found)


def nvfp4_alpha(words: Any, stream: int) -> None:
    a, b, out = words
    put(out, reference.nvfp4_alpha(*(emulated.at(each, (), torch.float32) for each in (a, b))))


def transpose_nibbles(words: Any, tiles: int, stream: int) -> None:
    put(words[5], reference.transpose_e2m1(emulated.at(words[0], (words[1], words[2] // 2), torch.uint8)))


CASTS = {
    each.__name__: staticmethod(each)
    for each in (
        set_zero, amax_lines, cast_rowwise, cast_mxfp8_1d, cast_mxfp8_2d, amax_rht, cast_nvfp4_1d, cast_nvfp4_2d, decode,
        nvfp4_alpha, transpose_nibbles,
    )
}  # fmt: skip
