"""Causal attention over cp by `dlp.Context.attention` and by torch's context parallelism, forward and forward + backward.

    torchrun --nproc-per-node 4 -m bench.context [--cp 2 4] [--tokens 8192 32768] [--backends flash cudnn] [--json FILE]

    q [1, 32, S / cp, 128], k and v [1, 8, S / cp, 128], bf16; both dlp and torch give chunks r and 2 * cp - 1 - r to rank r

Torch moves keys and values by "allgather" or by "alltoall", which is a ring. Torch's attention reads grouped heads, or copies
of k and v for every head ("repeated"; making the copies is timed). Milliseconds are medians on the slowest rank. TFLOP/s are
those of one rank in forward + backward, and count the causal half of the products. GB is the peak memory of rank 0. `error` is
the largest relative distance of y and the gradients from dlp's with the same backend. Torch's context parallelism needs GPUs:
on CPUs only dlp is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import sdpa_kernel

import dlp
from bench.attention import BACKENDS, attend, distance
from bench.files import add_files, write_files
from bench.ranks import refuse_one_rank
from dlp.comm.mesh import init_process_group, shutdown, world_size
from launch.ranks.process_exit import refuse

HEADS, KV_HEADS, DIM, WARM, COUNT = 32, 8, 128, 3, 10
ROW = "{cp:2} {tokens:6} {backend:7} {attention:24} "
TIMES = "{forward:10.3f} {both:9.3f} {tflops:8.1f} {peak:6.2f} {error:8.1e}"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median milliseconds of `run` on the slowest rank."""
    wait, times = torch.cuda.synchronize if device.type == "cuda" else dist.barrier, list[float]()
    for _ in range(WARM + COUNT):
        dist.barrier()
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    slowest = torch.tensor(statistics.median(times[WARM:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def variants(mesh: DeviceMesh, tokens: int, device: torch.device) -> Iterator[tuple[str, Attention, Any]]:
    """Yield the name of each variant, its attention function, and the context in which its forward and backward run."""
    yield "dlp", dlp.Context.of(mesh).attention, nullcontext()
    for method in ("allgather", "alltoall") if device.type == "cuda" else ():
        for repeated in (False, True):
            set_rotate_method(method)
            positions = torch.arange(tokens, device=device)  # not read, but context_parallel requires a buffer
            context = context_parallel(mesh["cp"], buffers=[positions], buffer_seq_dims=[0])
            yield f"torch {method}{' repeated' * repeated}", partial(attend, repeat=repeated), context


def measured(mesh: DeviceMesh, tokens: int, backend: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row of results for each variant; `refused` is the error of a variant that cannot run, else ""."""
    cp, on_gpu, expected = mesh["cp"].size(), device.type == "cuda", list[Tensor]()
    torch.manual_seed(dist.get_rank())
    shapes = [(1, heads, tokens // cp, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dy = (torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes)
    for name, attention, context in variants(mesh, tokens, device):

        def both(attention: Attention = attention) -> list[Tensor]:
            y = attention(q, k, v)
            return [y.detach(), *torch.autograd.grad(y, [q, k, v], dy.detach())]

        row: dict[str, Any] = {"cp": cp, "tokens": tokens, "backend": backend, "attention": name, "refused": ""}
        with context, sdpa_kernel(BACKENDS[backend]) if on_gpu else nullcontext():  # type: ignore[arg-type]
            try:  # `try` is inside of `with`, because torch does not close its context if an exception leaves it
                found = both()
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                row["both"] = milliseconds(both, device)
                row["peak"] = torch.cuda.max_memory_allocated() / 1e9
                row["forward"] = milliseconds(partial(attention, q, k, v), device)
                row["tflops"] = 3.5 * 2 * HEADS * tokens**2 * DIM / cp / row["both"] / 1e9
                row["error"] = max(map(distance, found, expected or found))
                expected = expected or found
            except (RuntimeError, AssertionError, ValueError) as refused:
                row["refused"] = f"cannot run: {type(refused).__name__}: {' '.join(str(refused).split())[:90]}"
        yield row


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("torchrun -m bench.context", description=__doc__.split("\n")[0])
    parser.add_argument("--cp", nargs="+", type=int, help="divisors >= 2 of the number of ranks; default: all ranks")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[8192, 32768], help="tokens of a sequence over all cp ranks"
    )
    parser.add_argument("--backends", nargs="+", default=["flash", "cudnn"], choices=[*BACKENDS][1:])
    add_files(parser, draws=False)
    asked, device = parser.parse_args(arguments), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    refuse_one_rank()
    if wrong := [cp for cp in asked.cp or () if cp < 2 or world_size() % cp]:
        refuse(f"--cp: expected divisors >= 2 of the {world_size()} ranks, got {wrong[0]}", code=2)
    init_process_group(device.type)
    meshes, rows = [dlp.build_mesh(cp=cp) for cp in asked.cp or [dist.get_world_size()]], list[dict[str, Any]]()
    say = partial(print, flush=True) if dist.get_rank() == 0 else lambda _: None
    say("cp tokens backend attention                  forward      both  TFLOP/s     GB    error  milliseconds")
    for mesh, tokens, backend in ((m, s, b) for m in meshes for s in asked.tokens for b in asked.backends):
        for row in measured(mesh, tokens, backend, device):
            rows.append(row)
            say((ROW + ("{refused}" if row["refused"] else TIMES)).format(**row))
    if dist.get_rank() == 0:
        write_files(asked, rows)
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
