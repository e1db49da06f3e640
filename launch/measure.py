"""Measure speeds of this GPU; `launch.train --plan` and `launch.advise` predict seconds per step from these speeds.

    python -m launch.measure --overlap-table h100-2.json --out launch/estimate/tables/h100.json
    torchrun --nproc-per-node 2 -m launch.measure ...     also measures the bandwidth of NCCL between the ranks

First write the overlap table with `python -m dlp.parallel.tune`; that table holds the times of GEMMs and of mapped memory. This
program adds the bandwidth of pointwise kernels, of AdamW and of the gradient norm, the speed of causal attention in forward and
backward, the gap between two kernels of a CUDA graph, and the speed of a GEMM under a steady load relative to a short burst.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dlp.comm.mesh import shutdown, world_size
from dlp.kernels import timing
from dlp.parallel import auto
from launch.common.program import run_program

MEGABYTE = 2**20
LARGE = 1024 * MEGABYTE  # bytes of the tensors that bandwidths are measured on
# Shapes of attention: batch, sequence, heads, head_dim
SHAPES = (
    (2, 4096, 32, 64),
    (1, 8192, 32, 64),
    (2, 4096, 16, 128),
    (1, 8192, 16, 128),
)
KERNELS = 200  # kernels in the CUDA graph of `kernel_gap`
GEMM, BURST = 8192, 8  # M = N = K of the bf16 GEMM in `sustained`; number of GEMMs per measurement
PAUSE, LOAD = 1.0, 3.0  # seconds without work before the burst; seconds of GEMMs before the measurement under load
# Entries derived from training runs of llama3_1b on two H200 (bench/results/predict.json); this program cannot measure them.
FROM_RUNS = {"replay": 0.8e-3, "host": 6e-5, "host_collective": 1.7e-4, "host_spread": 1.5, "nccl_slowdown": 0.05}


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Return the seconds of one call of `run`: device time on a GPU; wall time on a CPU, for tests without a GPU."""
    if device == "cuda":
        return timing.device_ms(run, 4) * 1e-3
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def memory_bandwidth(device: str, nbytes: int) -> float:
    """Return the bytes per second of x + y in bf16, counting two reads and one write of `nbytes` each."""
    x, y = (torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(x)
    return 3 * nbytes / seconds_of(lambda: torch.add(x, y, out=out), device)


def optimizer_bandwidths(device: str, nbytes: int) -> tuple[float, float]:
    """Return the bytes per second of torch's fused AdamW (28 bytes per element) and of the gradient norm (4 per element)."""
    parameters = [torch.zeros(nbytes // 64, device=device, requires_grad=True) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    elements = sum(parameter.numel() for parameter in parameters)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    update = seconds_of(optimizer.step, device)
    norm = seconds_of(lambda: torch.nn.utils.get_total_norm(gradients), device)
    return 28 * elements / update, 4 * elements / norm


def attention_rate(device: str, batch: int, sequence: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Return the entry of the table for one shape: sequence, head_dim, and the FLOP/s of causal attention in forward and in
    backward. Backward counts 2.5 times the operations of forward."""
    shape = batch, heads, sequence, head_dim
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
    dy = torch.randn(shape, dtype=torch.bfloat16, device=device)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> object:
        return torch.autograd.grad(forward(), (q, k, v), dy)

    work = 2.0 * batch * heads * sequence * sequence * head_dim
    ahead = seconds_of(forward, device)
    back = max(seconds_of(both, device) - ahead, 1e-9)
    return {"sequence": sequence, "head_dim": head_dim, "forward": work / ahead, "backward": 2.5 * work / back}


def kernel_gap(device: str) -> float:
    """Return the seconds per small kernel in a CUDA graph of small kernels; on a CPU, without a graph."""
    x = torch.ones(1024, device=device)

    def launches() -> None:
        for _ in range(KERNELS):
            x.add_(1.0)

    if device != "cuda":
        return seconds_of(launches, device) / KERNELS
    graph = torch.cuda.CUDAGraph()
    launches()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launches()
    return seconds_of(graph.replay, device) / KERNELS


def sustained(device: str) -> float:
    """Return the speed of a bf16 GEMM after LOAD seconds of GEMMs, divided by its speed after a pause, at most 1; 1 on CPUs."""
    if device != "cuda":
        return 1.0
    a, b = (torch.randn(GEMM, GEMM, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        torch.mm(a, b, out=out)

    run()
    torch.cuda.synchronize()
    time.sleep(PAUSE)
    burst = timing.device_ms(run, BURST, settling=0.0, rounds=1)
    loaded = timing.sustained_ms(run, BURST, settling=LOAD)
    assert loaded is not None, "a GEMM of this size takes longer than its launch"
    return min(1.0, burst / loaded)


def nccl_bandwidth(device: str, nbytes: int) -> float:
    """Return the bytes per second that a rank sends to the other ranks in an all-gather of NCCL."""
    own = torch.ones(nbytes // world_size(), dtype=torch.uint8, device=device)
    out = torch.empty(own.numel() * world_size(), dtype=torch.uint8, device=device)
    seconds = seconds_of(lambda: dist.all_gather_into_tensor(out, own), device)
    return own.numel() * (world_size() - 1) / seconds


def measure(overlap_table: str, device: str, nbytes: int = LARGE) -> dict[str, Any]:
    """Return the content of a file of `launch/estimate/tables`."""
    update, norm = optimizer_bandwidths(device, nbytes)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    shapes = SHAPES if device == "cuda" else [(1, 64, 2, 16)]
    return {
        "about": {
            "device": name,
            "date": str(date.today()),
            "torch": torch.__version__,
            "command": shlex.join(["python", "-m", "launch.measure", *sys.argv[1:]]),
        },
        "overlap_table": overlap_table,
        "memory": memory_bandwidth(device, nbytes),
        "optimizer": update,
        "norm": norm,
        "gap": kernel_gap(device),
        **FROM_RUNS,
        "sustained": sustained(device),
        "nccl": nccl_bandwidth(device, nbytes) if world_size() > 1 else 0.0,
        "attention": [attention_rate(device, *shape) for shape in shapes],
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="launch.measure", description="Measure the speeds of this GPU.")
    parser.add_argument(
        "--overlap-table", required=True, help="name of a file in dlp/parallel/tables, written by dlp.parallel.tune"
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    auto.load(auto.TABLES / options.overlap_table)
    if not torch.cuda.is_available():
        raise ValueError(
            "launch.measure: expected a GPU, torch sees none: run this program on the board to be measured"
        )
    if world_size() > 1:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
    found = measure(options.overlap_table, "cuda")
    if world_size() == 1 or dist.get_rank() == 0:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written to {options.out}; compare predicted and measured steps with python -m bench.predict")
    if world_size() > 1:
        shutdown()


if __name__ == "__main__":
    run_program(main)
