"""Causal attention by backend of `scaled_dot_product_attention`, forward and forward + backward, on one GPU.

    python -m bench.attention [--shapes 1x8192x16x4x128 ...] [--backends flash cudnn] [--json FILE]

    q [B, heads, S, D], k and v [B, kv heads, S, D], bf16, transposed views of [B, S, heads, D] as in a transformer block

A shape is batch x sequence x heads x kv heads x head_dim. With backend `torch`, torch chooses the backend, and its name is
printed. Grouped heads are passed to the kernel (`enable_gqa`); `--repeat` also times a variant that copies k and v for every
head. Milliseconds are medians over iterations, and TFLOP/s count the causal half of the products. `error` is the relative
distance from the backend flash, the maximum over the output and the gradient of q.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.files import add_files, write_files
from dlp.runtime.causal import backend_of
from launch.ranks.process_exit import refuse

SHAPES = ("1x8192x16x4x128", "2x4096x16x4x128", "1x8192x32x8x64", "2x4096x32x8x64", "1x8192x32x8x128")
BACKENDS: dict[str, SDPBackend | None] = {
    "torch": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WARM, COUNT = 3, 10


@dataclass(frozen=True)
class Line:
    """Result of one backend at one shape.

    forward, both                  milliseconds of forward, and of forward + backward
    forward_tflops, both_tflops    TFLOP/s of forward, and of forward + backward
    error                          relative distance from the results of backend flash: the larger one of the distances of the
                                   output and of the gradient of q
    """

    shape: str
    backend: str
    forward: float
    both: float
    forward_tflops: float
    both_tflops: float
    error: float


Shape = tuple[int, int, int, int, int]


def shape_of(text: str) -> Shape:
    """Parse a shape. Raises ValueError unless there are 5 sizes."""
    batch, sequence, heads, kv_heads, dim = (int(size) for size in text.split("x"))
    return batch, sequence, heads, kv_heads, dim


def inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v with the strides that they have in a transformer block."""
    batch, sequence, heads, kv_heads, dim = shape
    q, k, v = (
        torch.randn(batch, sequence, each, dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for each in (heads, kv_heads, kv_heads)
    )
    for each in (q, k, v):
        each.requires_grad_()
    return q, k, v


def context(backend: str) -> AbstractContextManager[object]:
    chosen = BACKENDS[backend]
    return nullcontext() if chosen is None else sdpa_kernel(chosen)


def attend(q: Tensor, k: Tensor, v: Tensor, repeat: bool) -> Tensor:
    if repeat:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def milliseconds(run: Callable[[], object]) -> float:
    for _ in range(WARM):
        run()
    times = []
    for _ in range(COUNT):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(text: str, backends: Sequence[str], repeat: bool) -> Iterator[Line]:
    """Yield a line for each backend that can run the shape and, if `repeat`, a second line of the backend with copies of k and
    v for every head. Print the reason if a backend cannot run."""
    shape = shape_of(text)
    batch, sequence, heads, _, dim = shape
    torch.manual_seed(0)
    q, k, v = inputs(shape, "cuda")
    dy = torch.randn(batch, sequence, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = attend(q, k, v, False)
        (expected_dq,) = torch.autograd.grad(expected, [q], dy)
    forward_flops = 2 * batch * heads * sequence**2 * dim  # causal: half of 2 products with 2 S^2 D operations each
    for name in backends:
        for repeated in (False, True) if repeat else (False,):

            def forward(repeated: bool = repeated) -> Tensor:
                return attend(q, k, v, repeated)

            def both(repeated: bool = repeated) -> tuple[Tensor, ...]:
                return torch.autograd.grad(attend(q, k, v, repeated), [q, k, v], dy)

            label = f"{name} repeated" if repeated else name
            with context(name):
                try:
                    (dq, _, _), y = both(), forward()
                    times = milliseconds(forward), milliseconds(both)
                except RuntimeError as refused:
                    print(f"{text:18} {label:18} cannot run: {str(refused).splitlines()[0]}", flush=True)
                    continue
            error = max(distance(y, expected), distance(dq, expected_dq))
            rates = forward_flops / times[0] / 1e9, 3.5 * forward_flops / times[1] / 1e9
            yield Line(text, label, *times, *rates, error)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def chosen_by_torch(text: str) -> str:
    """Return the name of the backend that torch chooses by default."""
    q, k, v = inputs(shape_of(text), "cuda")
    return str(backend_of(q, k, v, q.shape[1] != k.shape[1])).rsplit(".", 1)[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="BxSxHxKVxD")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--repeat", action="store_true", help="time copies of k and v for every head as well")
    add_files(parser, draws=False)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        refuse("bench.attention times kernels of GPUs, and this host has no GPU that torch can use", code=2)
    versions = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    print(f"{torch.cuda.get_device_name()}, {versions}\n")
    print(
        f"{'shape':18} {'backend':18} {'forward':>8} {'TFLOP/s':>8} {'both':>8} {'TFLOP/s':>8} {'error':>8}  milliseconds"
    )
    lines = []
    for text in options.shapes:
        for line in measure(text, options.backends, options.repeat):
            lines.append(line)
            chosen = f"  ({chosen_by_torch(text)})" if line.backend == "torch" else ""
            print(
                f"{text:18} {line.backend:18} {line.forward:8.3f} {line.forward_tflops:8.0f} {line.both:8.3f} "
                f"{line.both_tflops:8.0f} {line.error:8.1e}{chosen}",
                flush=True,
            )
    write_files(options, [asdict(line) for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
