"""A GEMM that waits inside for rows of A, on one Hopper GPU, beside GEMMs that begin when rows are here, in fp8_block.

    python -m bench.arrivals [--shapes 8192x4096x7168] [--json FILE]
    python -m bench.arrivals --within 0 4             is a copy within the GPU a kernel, for which such a GEMM leaves no room?

Shapes are M x K x N of a rank's GEMM over the rows of two ranks, of which the second half arrives. Microseconds, medians:

    whole     one GEMM, scales as it reads them          laid     the same, scales laid out first, as `serial` does
    chunks    a GEMM and scales for each half            inside   one GEMM that may wait, all rows here
    stored    one GEMM that stores rows in two places, as of two ranks, both on this GPU

and while a copy from memory of the host brings the second half, which takes `copied` by itself: `serial` behind it, `chunked`,
half before and half behind, and `fused`, inside. Of each of these

    less a tile   (time - tile) / max(whole, copied), to be 1.10 at most: the last tile of what comes last cannot be hidden
    of chunked    time / chunked: where `fused` is above 0.97, `chunked` is what `auto` should keep

The link to the host is slower than one between GPUs: it is an order that this shows, not what two GPUs gain
(`bench.operators`). A shape takes some ten seconds.

--within: the rows are brought by a copy within the GPU, that is started behind a GEMM that fills it but for so many
multiprocessors. Each in a process of its own, since a wait that ends, after three seconds, ends its program.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from bench.files import add_files, write_files
from bench.operators import BARS, OF_CHUNKED, waves_of
from dlp.comm.slots import RANKS
from dlp.kernels import gemm_sm90, gemms
from dlp.kernels.gemms import BLOCK_1D, BLOCK_2D, Scales
from dlp.kernels.launches import new_event
from dlp.kernels.table import Arriving, Sending, WhileArriving
from dlp.quant.recipe import load
from dlp.quant.tensor import QuantizedTensor
from launch.stop import refuse

SHAPES = ("8192x4096x7168", "8192x8192x14336", "8192x8192x8192", "4096x4096x7168")
ROUNDS, CALLS, STEADY, PATIENCE = 5, 60, 0.1, 3000  # STEADY in seconds, PATIENCE in milliseconds
SERIAL, FUSED = "serial", "fused"
Run = Callable[[], object]


class Arrivals:
    """Rows of A [world * rows, C] of which those of other ranks are poison until they are brought: by a copy, and a word
    behind it. `began` and `use`: the word of a rank before and then; `by_engine`: from memory of the host, else by what
    copies within a GPU, for which `spare` multiprocessors are left; `patience`: of the GEMM, in milliseconds."""

    def __init__(
        self, a: QuantizedTensor, world: int, rank: int, began: int, use: int, *, by_engine: bool = True, spare: int = 0,
        patience: int = 20_000,
    ) -> None:  # fmt: skip
        self.rank, self.world, self.use, self.rows = rank, world, use, len(a.payload) // world
        self.given = [part.contiguous().view(torch.uint8) for part in a.parts]
        self.parts = [torch.full_like(each, 0xFF) for each in self.given]  # NaN, as codes and as scales
        self.copy(rank, self.given)
        self.sources = [part.cpu().pin_memory() if by_engine else part for part in self.given]
        word = (began + 2**31) % 2**32 - 2**31
        self.words = torch.full((world,), word, dtype=torch.int32).cuda().view(torch.uint32)
        self.report = torch.zeros(8, dtype=torch.int32).pin_memory()
        self._said = torch.zeros((), dtype=torch.int32).cuda()
        waiting = (patience, self.report.data_ptr(), self._said.data_ptr(), rank, world, use)
        self.arriving = Arriving((self.words.data_ptr(), self.rows, new_event(), spare), waiting)
        torch.cuda.synchronize()

    def copy(self, rank: int, sources: Sequence[Tensor]) -> None:
        """The rows of a rank to their place, by the current stream."""
        rows = slice(rank * self.rows, (rank + 1) * self.rows)
        for part, source in zip(self.parts, sources, strict=True):
            part[rows].copy_(source[rows], non_blocking=True)

    def tell(self, rank: int, word: int) -> None:
        """Write the word of a rank, by the current stream."""
        _SymmetricMemory.stream_write_value32(self.words, rank, word % 2**32)

    def bring(self, delay: int = 0) -> None:
        """All that is missing, cycles later, by the current stream."""
        torch.cuda._sleep(delay)
        for turn in range(1, self.world):
            peer = (self.rank - turn) % self.world
            self.copy(peer, self.sources)
            self.tell(peer, self.use)

    def gemm(self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, **more: Tensor) -> WhileArriving:
        """The GEMM that waits for them."""
        codes, scales = self.parts[0].view(a.payload.dtype), self.parts[1].view(torch.float32)
        b_scale = gemms.block_scales(b.parts[1], tile=True)
        run = gemm_sm90.while_arriving(codes, b.payload, self.rows, out_dtype, (scales, b_scale), **more)  # type: ignore[arg-type]
        assert run is not None, f"{self.rows} rows of a rank are no whole pairs of tiles, or scales are not aligned"
        return run


def operands(m: int, k: int, n: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    """A [m, k] in blocks, B [n, k] in tiles."""
    recipe, generator = load("fp8_block"), torch.Generator("cuda").manual_seed(m + k + n)
    a, b = (torch.randn(lines, k, device="cuda", generator=generator).bfloat16() for lines in (m, n))
    return recipe.x.rowwise.cast(a, None), recipe.w.rowwise.cast(b, None)


def microseconds(runs: Mapping[str, Run]) -> dict[str, float]:
    """Of a call under a steady load, where power is the limit: they take turns, and each runs untimed before, since what waits
    for a copy leaves a cool GPU to the next."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in [*runs.items()] * ROUNDS:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.monotonic()
        while time.monotonic() - start < STEADY:
            for _ in range(CALLS):
                run()
            torch.cuda.synchronize()
        began.record()
        for _ in range(CALLS):
            run()
        ended.record()
        torch.cuda.synchronize()
        found[name].append(1e3 * began.elapsed_time(ended) / CALLS)
    return {name: statistics.median(times) for name, times in found.items()}


def stored_apart(a: Tensor, b: Tensor, scales: Scales) -> tuple[Run, list[Tensor]]:
    """A GEMM on codes that stores the halves of its rows as those of two ranks, this one the first; and where."""
    rows, cols = len(a) // 2, len(b)
    halves = [torch.empty((rows, cols), dtype=torch.bfloat16, device=a.device) for _ in range(2)]
    run = gemm_sm90.sending(a, b, rows, torch.bfloat16, scales)
    assert run is not None, f"{rows} rows of a rank are no whole pairs of tiles"
    to = Sending((*(half.data_ptr() for half in halves), *[0] * (RANKS - 2), 0, 2), (0, rows))
    return lambda: run(to), halves


def measure(m: int, k: int, n: int) -> dict[str, float]:
    """By name, as above."""
    a, b = operands(m, k, n)
    late = Arrivals(a, 2, 0, 1, 1)
    late.copy(1, late.given)
    codes, compact, side = (
        late.parts[0].view(a.payload.dtype),
        late.parts[1].view(torch.float32),
        torch.cuda.Stream(priority=-1),
    )
    here, tiles, inside = torch.cuda.Event(), gemms.block_scales(b.parts[1], tile=True), late.gemm(a, b, torch.bfloat16)

    def product(rows: slice, scales: Tensor) -> Tensor:
        some, how = codes[rows], Scales(scales, tiles, BLOCK_1D, BLOCK_2D)
        multiply = gemm_sm90.product if gemm_sm90.takes(some, b.payload, torch.bfloat16) else gemms.product_fp8
        return multiply(some, b.payload, torch.bfloat16, how)

    def laid(rows: slice) -> Tensor:
        return product(rows, gemms.block_scales(compact[rows], tile=False))

    first, second, both = slice(0, m // 2), slice(m // 2, m), slice(0, m)
    as_read = gemms.block_scales(compact, tile=False)
    own = gemm_sm90.product(codes, b.payload, torch.bfloat16, Scales(as_read, tiles, BLOCK_1D, BLOCK_2D))
    assert torch.equal(inside(late.arriving), own), "the bits of the kernel that does not wait"

    store, halves = stored_apart(codes, b.payload, Scales(as_read, tiles, BLOCK_1D, BLOCK_2D))
    store()
    assert torch.equal(torch.cat(halves), own), "the bits of the kernel that stores all rows together"

    def bring() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            late.copy(1, late.sources)
            late.tell(1, 1)
            here.record()

    def copied() -> None:
        bring()
        here.wait()

    def serial() -> None:
        copied()
        laid(both)

    def chunked() -> None:
        bring()
        laid(first)
        here.wait()
        laid(second)

    def fused() -> None:
        late.tell(1, 0)
        bring()
        inside(late.arriving)
        here.wait()

    runs: dict[str, Run] = {
        "whole": lambda: product(both, as_read), "laid": lambda: laid(both), "chunks": lambda: (laid(first), laid(second)),
        "inside": lambda: inside(late.arriving), "stored": store, "copied": copied, "serial": serial, "chunked": chunked,
        "fused": fused,
    }  # fmt: skip
    return microseconds(runs)


def shares(found: Mapping[str, float], waves: int) -> dict[str, tuple[float, float]]:
    """Of each strategy, its share of what is the least but for a tile, and of `chunked`."""
    tile, least = found["whole"] / waves, max(found["whole"], found["copied"])
    return {name: ((found[name] - tile) / least, found[name] / found["chunked"]) for name in (SERIAL, "chunked", FUSED)}


def show(shape: str, found: Mapping[str, float], waves: int) -> None:
    print(f"{shape:18} " + "  ".join(f"{name} {time:.1f}" for name, time in found.items()))
    for name, (less_a_tile, of_chunked) in shares(found, waves).items():
        said = ""
        if name == FUSED:
            said = f"  {'ok' if less_a_tile <= BARS['gather'] else 'MISSED'} ({BARS['gather']:.2f})"
            said += f"  {'pays beside' if of_chunked <= OF_CHUNKED else 'does not pay beside'} chunked ({OF_CHUNKED})"
        print(f"{'':18} {name:8} less a tile {less_a_tile:.3f}  of chunked {of_chunked:.3f}{said}", flush=True)


def copied_within(spare: int) -> str:
    """What becomes of rows that a copy within the GPU brings to a GEMM that fills all but so many multiprocessors."""
    a, b = operands(8192, 4096, 8192)
    late, side = (
        Arrivals(a, 2, 0, 0, 1, by_engine=False, spare=spare, patience=PATIENCE),
        torch.cuda.Stream(priority=-1),
    )
    run, began = late.gemm(a, b, torch.bfloat16), time.monotonic()
    run(late.arriving)
    time.sleep(0.05)
    with torch.cuda.stream(side):
        late.copy(1, late.sources)
        late.tell(1, 1)
    try:
        torch.cuda.synchronize()
        what = "they arrived"
    except RuntimeError as error:
        what = str(error).splitlines()[0]
    return f"{spare} multiprocessors left: {what} after {time.monotonic() - began:.2f} s, report {late.report.tolist()[:7]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.arrivals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxKxN")
    parser.add_argument("--within", nargs="+", type=int, metavar="SPARE", help="multiprocessors left to a copy")
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        refuse("the GEMM that waits inside is for Hopper GPUs, and here is none; run it where there is one", code=2)
    if options.within and len(options.within) > 1:
        command = [sys.executable, "-m", "bench.arrivals", "--within"]
        return max(subprocess.run([*command, str(spare)]).returncode for spare in options.within)
    if options.within:
        print(copied_within(options.within[0]), flush=True)
        return 0
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, microseconds", flush=True)
    every = {}
    for shape in options.shapes:
        m, k, n = map(int, shape.split("x"))
        if m % 512 or k % 512:
            refuse(f"{shape}: M of both ranks and K must be multiples of 512 for a GEMM that waits inside", code=2)
        every[shape] = measure(m, k, n)
        show(shape, every[shape], waves_of((m, k, n), "fp8_block", processors))
        write_files(options, every)  # as they are made: a later shape may fail
    return 0


if __name__ == "__main__":
    sys.exit(main())
