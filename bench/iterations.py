"""One iteration of a subject of `bench.tensor_parallel` (forward, backward, step boundary), run by calls or as a CUDA graph,
and its time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dlp
from bench.host_parallel import Run
from bench.transformer_engine import TransformerEngine
from dlp.parallel.model.graph import CapturedStep
from dlp.quant.recipe import names


class Iteration:
    """Forward and backward of a model on one batch, followed by `dlp.end_step` if the model is dlp's.

    Args:
        model: maps token shards to token shards.
        name: subject of the model; the name of a recipe denotes a model of dlp.
        shape: rows and columns of the token shard of this rank.
        device: device of this rank.
    """

    def __init__(self, model: nn.Module, name: str, shape: tuple[int, int], device: torch.device) -> None:
        self.model, self.ours = model, name in names()
        self.x, self.dy = (torch.randn(*shape, device=device).bfloat16() for _ in range(2))
        self.x.requires_grad_()
        self._learned = [self.x, *model.parameters()]

    def run(self) -> None:
        self.model(self.x).backward(self.dy)
        if self.ours:
            dlp.end_step(self.model)
        for tensor in self._learned:
            tensor.grad = None

    def capture(self) -> Run:
        """Return the iteration as a CUDA graph, captured as the launcher captures a step.

        For a model of Transformer Engine, `te.make_graphed_callables` captures one graph of the forward and one of the backward
        instead.
        """
        if isinstance(self.model, TransformerEngine):
            self.model.graph(self.x)
            self._learned = [self.x, *self.model.parameters()]
            self.run()
            return self.run

        def work(batches: Sequence[Tensor]) -> Tensor:
            self.run()
            return self.x.detach()

        captured = CapturedStep(work, [])

        def replay() -> None:
            captured([])

        return replay


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Make a new stream current inside of the context, since CUDA cannot capture the default stream; do nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    stream, before = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


def settle(device: torch.device) -> None:
    """Wait until every rank has arrived and every device is idle."""
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(run: Run, device: torch.device, count: int) -> tuple[list[float], float, float]:
    """Time `count` iterations one by one, then `count` iterations in a queue.

    Returns (single, queued, host).

        single    seconds of each iteration that is timed alone
        queued    mean seconds of an iteration in the queue
        host      mean seconds in which the host queues an iteration
    """
    done = torch.cuda.synchronize if device.type == "cuda" else bool
    single = []
    for _ in range(count):
        settle(device)
        start = time.perf_counter()
        run()
        done()
        single.append(time.perf_counter() - start)
    settle(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    host = (time.perf_counter() - start) / count
    done()
    return single, (time.perf_counter() - start) / count, host


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the maximum of each value over all ranks."""
    both = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return [float(value) for value in both]
