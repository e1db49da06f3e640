"""Bandwidth of the quantizers, compared with a device copy of the same number of bytes in the same run.

    python -m bench.quantize [--sizes 256 64 4] [--only block] [--json FILE] [--plot FILE.png]

Useful bytes are the bytes that a quantizer must move: the input is read once, codes and scales are written once. The copy moves
the same number of bytes, half read and half written, each rounded up to a multiple of COPY_UNIT, since an H200 copies other
sizes more slowly, which would be an unfair baseline. `share` is the bandwidth of the quantizer relative to the copy's.

Quantizer and copy are captured as CUDA graphs of many launches. Their buffers rotate over more than four times the L2 cache, so
that no launch finds its input in the cache. Replays of both graphs alternate, and medians are printed. Sizes are MB of input.
`host` is the host time of one call on a small input.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.files import add_files, write_files
from dlp.comm.observer import dtype_name
from dlp.kernels import cuda, cuda_codes, cuda_fp4, cuda_loss, cuda_rowwise, loader
from dlp.kernels.cuda import BlockJob, TensorJob, block_scale_shape, mx_scale_shape
from dlp.kernels.cuda_codes import DelayedJob
from dlp.kernels.cuda_fp4 import Nvfp4Job
from dlp.kernels.cuda_fp4 import scale_shape as fp4_scale_shape
from dlp.kernels.cuda_rowwise import RowwiseJob
from dlp.kernels.reference import PhiloxState

Run = Callable[[], Any]
E4M3 = torch.float8_e4m3fn
COLS = 8192
HISTORY = 1024  # length of the amax history of delayed scaling
COPY_UNIT = 1 << 16  # bytes; an H200 copies multiples of 4096 bytes faster than other sizes
REPLAYS = 15
DTYPES = ["bfloat16", "float32"]
# Minimum bandwidth relative to the copy's, for inputs of at least 256 MB.
TARGETS = {
    "amax": 0.90, "cast": 0.88, "cast + transpose": 0.88, "1x128 both": 0.88, "128x128 both": 0.88, "mxfp8 both": 0.88,
    "1x128 both, GEMM layout": 0.88, "mxfp8 both, blocks first": 0.88,
    "nvfp4 16x16 both": 0.75, "nvfp4 rht": 0.50, "nvfp4 rht + sr": 0.35,
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch, with the tensors that it reads and writes."""

    run: Run
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Line:
    """One printed line.

    name, dtype     name of the kernel, and dtype of the input
    megabytes       MB of the input
    microseconds    device time of a launch
    tb_s            TB/s of useful bytes
    copy_share      bandwidth relative to the copy's
    copy_tb_s       TB/s of the copy
    target          minimum of `copy_share`; None without a target
    host_us         host microseconds of a call on a small input
    """

    name: str
    dtype: str
    megabytes: float
    microseconds: float
    tb_s: float
    copy_share: float
    copy_tb_s: float
    target: float | None
    host_us: float


def _scalar(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device="cuda")


def amax(x: Tensor) -> Launch:
    out = _scalar(0)
    return Launch(lambda: cuda.amax(x, out), (x, out))


def amax_batch(x: Tensor) -> Launch:
    """Return a launch that computes the amaxes of up to 32 matrices of different sizes, which together have the bytes of x."""
    rows = x.shape[0]
    cuts = sorted({rows * (i * i + i) // (32 * 33) for i in range(33)})
    xs = [x[start:end] for start, end in zip(cuts[:-1], cuts[1:], strict=True)]
    out = torch.zeros(len(xs), device="cuda")
    return Launch(cuda.amax_batch(xs, out), (x, out))


def _tensor_outputs(x: Tensor, columnwise: bool) -> dict[str, Tensor]:
    rows, cols = x.shape
    out = {"codes": torch.empty(rows, cols, dtype=E4M3, device="cuda"), "scale_inv": _scalar(0)}
    return out | ({"codes_t": torch.empty(cols, rows, dtype=E4M3, device="cuda")} if columnwise else {})


def _tensor(x: Tensor, columnwise: bool = False, delayed: bool = False) -> Launch:
    out = _tensor_outputs(x, columnwise)
    scale = {"scale": _scalar(50.0), "staging": _scalar(0)} if delayed else {"amax": _scalar(5.0)}
    job = TensorJob(x, **scale, **out)
    return Launch(lambda: cuda.cast_tensor(job), (x, *out.values()))


def cast_transpose_batch(x: Tensor) -> Launch:
    """Return a launch that casts the rows of x as several weights with 1024 rows each."""
    weights = x.split(1024)
    outs = [_tensor_outputs(weight, True) for weight in weights]
    jobs = [TensorJob(weight, amax=_scalar(5.0), **out) for weight, out in zip(weights, outs, strict=True)]
    return Launch(cuda.cast_tensor_batch(jobs), (x, *(tensor for out in outs for tensor in out.values())))


def _block(x: Tensor, tile: bool, columnwise: bool = True, gemm_layout: bool = False) -> Launch:
    rows, cols = x.shape
    out = {}
    for name, lines, along in (("", rows, cols), ("_t", cols, rows))[: 1 + columnwise]:
        out[f"codes{name}"] = torch.empty(lines, along, dtype=E4M3, device="cuda")
        scales = block_scale_shape(lines, along, tile=tile, gemm_layout=gemm_layout)
        out[f"scale{name}"] = torch.empty(scales, device="cuda")
    job = BlockJob(x, **out)
    return Launch(lambda: cuda.cast_block(job, tile=tile, gemm_layout=gemm_layout), (x, *out.values()))


def _mxfp8(x: Tensor, tile: bool, blocks_first: bool = False) -> Launch:
    rows, cols = x.shape
    out = {}
    for name, lines, along in (("", rows, cols), ("_t", cols, rows)):
        out[f"codes{name}"] = torch.empty(lines, along, dtype=E4M3, device="cuda")
        scales = mx_scale_shape(lines, along, tile=tile, blocks_first=blocks_first)
        out[f"scale{name}"] = torch.empty(scales, dtype=torch.uint8, device="cuda")
    job = BlockJob(x, **out)
    return Launch(lambda: cuda.cast_mxfp8(job, tile=tile, blocks_first=blocks_first), (x, *out.values()))


def amax_lines(x: Tensor) -> Launch:
    rows, cols = (torch.zeros(size, device="cuda") for size in x.shape)
    return Launch(lambda: cuda_rowwise.amax_lines(x, rows, cols), (x, rows, cols))


def rowwise(x: Tensor) -> Launch:
    out = {}
    for name, lines, along in (("", *x.shape), ("_t", *x.shape[::-1])):
        out[f"codes{name}"] = torch.empty(lines, along, dtype=E4M3, device="cuda")
        out[f"amax{name}"], out[f"scale_inv{name}"] = torch.ones(2, lines, device="cuda")
    job = RowwiseJob(x, **out)
    return Launch(lambda: cuda_rowwise.cast_rowwise(job), (x, *out.values()))


def amax_rht(x: Tensor) -> Launch:
    out = torch.zeros(2, device="cuda")
    return Launch(lambda: cuda_fp4.amax_rht(x, out), (x, out))


def _nvfp4(x: Tensor, tile: bool, rht: bool = False, by_chance: bool = False) -> Launch:
    rows, cols = x.shape
    out = {}
    for name, lines, along in (("", rows, cols), ("_t", cols, rows)):
        out[f"codes{name}"] = torch.empty(lines, along // 2, dtype=torch.uint8, device="cuda")
        out[f"scale{name}"] = torch.empty(fp4_scale_shape(lines, along, tile=tile), dtype=E4M3, device="cuda")
        out[f"amax{name}"] = _scalar(5.0)
    job, counter = Nvfp4Job(x, **out), torch.zeros((), dtype=torch.int64, device="cuda")
    draws = (
        (PhiloxState(0, 0, cols, 0, counter, (1, 2)), PhiloxState(0, 0, rows, 1, counter, (1, 2)))
        if by_chance
        else (None, None)
    )
    if tile:
        return Launch(lambda: cuda_fp4.cast_nvfp4_tile(job), (x, *out.values()))
    return Launch(lambda: cuda_fp4.cast_nvfp4(job, rht=rht, draws=draws), (x, *out.values()))


def _decode(x: Tensor, codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Launch:
    """Return a launch that decodes codes to a matrix with the shape of x."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device="cuda")
    return Launch(lambda: cuda_codes.decode(codes, scale, block, out), (codes, scale, out))


def _bytes(rows: int, cols: int) -> Tensor:
    return torch.randint(0, 100, (rows, cols), dtype=torch.uint8, device="cuda")


def decode_mxfp8(x: Tensor) -> Launch:
    rows, cols = x.shape
    return _decode(x, _bytes(rows, cols).view(E4M3), _bytes(-(-cols // 32), rows).t(), (1, 32))


def decode_fp8_block(x: Tensor, tile: bool) -> Launch:
    rows, cols = x.shape
    scale = torch.ones(-(-rows // 128) if tile else rows, -(-cols // 128), device="cuda")
    return _decode(x, _bytes(rows, cols).view(E4M3), scale, (128 if tile else 1, 128))


def decode_nvfp4(x: Tensor) -> Launch:
    rows, cols = x.shape
    return _decode(x, _bytes(rows, cols // 2), _bytes(rows, cols // 16).view(E4M3), (1, 16))


def _transpose(codes: Tensor, out: Tensor) -> Launch:
    return Launch(lambda: cuda_codes.transpose(codes, out), (codes, out))


def transpose_codes(x: Tensor) -> Launch:
    rows, cols = x.shape
    return _transpose(_bytes(rows, cols).view(E4M3), torch.empty(cols, rows, dtype=E4M3, device="cuda"))


def transpose_nibbles(x: Tensor) -> Launch:
    rows, cols = x.shape
    return _transpose(_bytes(rows, cols // 2), torch.empty(cols, rows // 2, dtype=torch.uint8, device="cuda"))


def swizzle(x: Tensor) -> Launch:
    """Return a launch that converts MXFP8 scales for x from the layout of the cast to the swizzled layout of the GEMM."""
    rows, blocks = x.shape[0], -(-x.shape[1] // 32)
    scale = _bytes(blocks, rows).t()
    out = torch.empty(cuda_codes.swizzled_bytes(rows, blocks), dtype=torch.uint8, device="cuda")
    return Launch(lambda: cuda_codes.swizzle(scale, rows, 1, out), (scale, out))


def delayed_update(x: Tensor) -> Launch:
    """Return a launch that updates as many delayed scales as x has rows (more than a model has) from their amax histories."""
    slots = len(x)
    history, scale, target, staging = (torch.ones(*lines, slots, device="cuda") for lines in ((HISTORY,), (), (), ()))
    job = DelayedJob(history, scale, staging, target, staging, False)
    return Launch(cuda_codes.delayed_update_batch([job]), (history, scale, target, staging))


def sum_in_order(x: Tensor) -> Launch:
    contributions = x.view(8, x.shape[0] // 8, x.shape[1])
    out = torch.empty_like(contributions[0])
    return Launch(lambda: cuda_codes.sum_in_order(contributions, out), (x, out))


def _targets(x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.int64, device="cuda")


def log_sum_exp(x: Tensor) -> Launch:
    target, sums = _targets(x), torch.empty(2, len(x), device="cuda")
    return Launch(lambda: cuda_loss.log_sum_exp(x, target, sums[0], sums[1]), (x, target, sums))


def softmax_gradient(x: Tensor) -> Launch:
    target, rows, out = _targets(x), torch.ones(len(x), device="cuda"), torch.empty_like(x)
    return Launch(lambda: cuda_loss.softmax_gradient(x, target, rows, rows, out), (x, target, rows, out))


Make = Callable[[Tensor], Launch]
KERNELS: dict[str, Make] = {
    "amax": amax,
    "amax, 32 in a launch": amax_batch,
    "cast": _tensor,
    "cast, delayed + amax": lambda x: _tensor(x, delayed=True),
    "cast + transpose": lambda x: _tensor(x, columnwise=True),
    "cast + transpose, delayed + amax": lambda x: _tensor(x, columnwise=True, delayed=True),
    "cast + transpose, many in a launch": cast_transpose_batch,
    "1x128 both": lambda x: _block(x, tile=False),
    "1x128 both, GEMM layout": lambda x: _block(x, tile=False, gemm_layout=True),
    "1x128 rowwise": lambda x: _block(x, tile=False, columnwise=False),
    "128x128 both": lambda x: _block(x, tile=True),
    "amax of rows and columns": amax_lines,
    "rowwise both": rowwise,
    "mxfp8 both": lambda x: _mxfp8(x, tile=False),
    "mxfp8 both, blocks first": lambda x: _mxfp8(x, tile=False, blocks_first=True),
    "mxfp8 32x32 both": lambda x: _mxfp8(x, tile=True),
    "amax + amax after rht": amax_rht,
    "nvfp4": lambda x: _nvfp4(x, tile=False),
    "nvfp4 rht": lambda x: _nvfp4(x, tile=False, rht=True),
    "nvfp4 rht + sr": lambda x: _nvfp4(x, tile=False, rht=True, by_chance=True),
    "nvfp4 16x16 both": lambda x: _nvfp4(x, tile=True),
    "decode mxfp8": decode_mxfp8,
    "decode 1x128": lambda x: decode_fp8_block(x, tile=False),
    "decode 128x128": lambda x: decode_fp8_block(x, tile=True),
    "decode nvfp4": decode_nvfp4,
    "swizzle of mxfp8 scales": swizzle,
    "delayed update of a slot a row": delayed_update,
    "transpose codes": transpose_codes,
    "transpose nibbles": transpose_nibbles,
    "sum of 8 in order": sum_in_order,
    "log-sum-exp of rows": log_sum_exp,
    "softmax gradient": softmax_gradient,
}


def copy_of(nbytes: int) -> Launch:
    """Return the launch of a device copy that reads and writes nbytes / 2 each, rounded up to a multiple of COPY_UNIT."""
    half = -(-nbytes // (2 * COPY_UNIT)) * COPY_UNIT
    source, target = (torch.full((half,), i, dtype=torch.uint8, device="cuda") for i in (1, 2))

    def run() -> None:
        target.copy_(source)

    return Launch(run, (source, target))


def graph_of(launches: Sequence[Launch]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture the launches in one graph, repeated until there are at least thirty. Returns the graph and the number of launches
    in it."""
    rounds = -(-30 // len(launches))
    for launch in launches:
        launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch.run()
    return graph, rounds * len(launches)


def replay(graph: torch.cuda.CUDAGraph, launches: int) -> float:
    """Replay a graph, and return the microseconds per launch. `launches`: number of launches in the graph."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / launches


def rotation(make: Callable[[], Launch]) -> list[Launch]:
    """Return launches on different tensors, which together are larger than four times the L2 cache."""
    first = make()
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return [first, *(make() for _ in range(4 * cache // first.nbytes + 1))]


def measure(name: str, make: Make, dtype: torch.dtype, megabytes: float) -> Line:
    rows = int(megabytes * 2**20) // (COLS * dtype.itemsize)
    quantizers = rotation(lambda: make(torch.randn(rows, COLS, device="cuda").to(dtype)))
    copies = rotation(lambda: copy_of(quantizers[0].nbytes))
    graphs = [graph_of(quantizers), graph_of(copies)]
    times = [[replay(*graph) for graph in graphs] for _ in range(REPLAYS + 2)][2:]
    ours, copy = (statistics.median(column) for column in zip(*times, strict=True))
    tb_s, copy_tb_s = quantizers[0].nbytes / ours / 1e6, copies[0].nbytes / copy / 1e6
    target = TARGETS.get(name) if megabytes >= 256 else None
    return Line(name, dtype_name(dtype), megabytes, ours, tb_s, tb_s / copy_tb_s, copy_tb_s, target,
                host_us(make(torch.ones(1024, 64, device="cuda", dtype=dtype)).run))  # fmt: skip


def host_us(run: Run, count: int = 100, rounds: int = 5) -> float:
    """Return the microseconds that the host needs to queue a run: the median over rounds of the mean of `count` runs."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        times.append((time.perf_counter() - start) * 1e6 / count)
    torch.cuda.synchronize()
    return statistics.median(times)


def plot(lines: Sequence[Line], file: Path) -> None:
    """Plot the bandwidth relative to the copy's, with a bar for each kernel and a panel for each size and dtype of inputs."""
    from matplotlib.figure import Figure

    panels = sorted({(line.megabytes, line.dtype) for line in lines}, reverse=True)
    figure = Figure(figsize=(4 * len(panels) + 2, 5))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axis, (megabytes, dtype) in zip(axes[0], panels, strict=True):
        shown = [line for line in lines if (line.megabytes, line.dtype) == (megabytes, dtype)][::-1]
        axis.barh([line.name for line in shown], [line.copy_share for line in shown])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set(title=f"{megabytes:g} MB of {dtype}", xlabel="bandwidth / that of a copy", xlim=(0, 1.15))
    figure.suptitle(f"Useful bandwidth of the quantizers, {torch.cuda.get_device_name()}")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def show(line: Line) -> None:
    verdict = "" if line.target is None else f"  {'ok' if line.copy_share >= line.target else 'MISSED'} ({line.target})"
    print(f"{line.name:36} {line.dtype:9} {line.megabytes:5g} {line.microseconds:9.2f} {line.tb_s:7.2f} {line.copy_tb_s:7.2f}"
          f" {line.copy_share:6.3f} {line.host_us:6.1f}{verdict}", flush=True)  # fmt: skip


def main(
    arguments: Sequence[str] | None = None, kernels: Mapping[str, Make] = KERNELS, dtypes: Sequence[str] = DTYPES
) -> int:
    parser = argparse.ArgumentParser(description="Compares useful bandwidth with a copy that moves as many bytes.")
    parser.add_argument("--sizes", type=float, nargs="+", default=[256, 64, 4], help="MB of input")
    parser.add_argument("--dtypes", nargs="+", default=dtypes, choices=dtypes)
    parser.add_argument("--only", nargs="+", default=[""], help="kernels whose name contains one of these")
    add_files(parser)
    options = parser.parse_args(arguments)
    if code := loader.load_or_explain():
        return code
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'kernel':36} {'input':9} {'MB':>5} {'us':>9} {'TB/s':>7} {'copy':>7} {'share':>6} {'host':>6}")
    lines = []
    for megabytes in options.sizes:
        for dtype in options.dtypes:
            for name in (name for name in kernels if any(part in name for part in options.only)):
                lines.append(measure(name, kernels[name], getattr(torch, dtype), megabytes))
                show(lines[-1])
                torch.cuda.empty_cache()
    write_files(options, [asdict(line) for line in lines], partial(plot, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
