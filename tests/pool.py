"""Long-lived ranks for tests: a worker process per rank, kept between tests, so that a 2-rank test costs milliseconds.

`Pool(world).run(fn, *args)` calls `fn(*args)` on every rank and returns the ranks' results; `fn` must be a function at
the top level of a test module; it gets its rank from `torch.distributed`. Jobs and results are sent as pickles. Result
tensors are copied to the CPU and sent by value, so that no result refers to memory of a worker that may be killed.

After a job that failed or timed out, a rank may still wait in a collective, so the workers are killed, and the next job
starts new workers. Workers are forked from a server process, which imports torch, dlp and launch once (four seconds) and
starts no threads. (A fork of pytest itself may hang, because torch may have started threads there.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from dlp.comm.mesh import build_mesh
from tests import shared_gpu

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "shared": "cpu:gloo,cuda:gloo"}
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
MANY_THREADS = 60  # a worker with more threads is replaced between tests; a gloo group has three threads
GRACE = 0.5  # seconds for the other ranks to report, after one rank has failed


class RankError(RuntimeError):
    """A job failed on some rank. The message contains the traceback of the rank and the state of the other ranks."""


@dataclass(frozen=True)
class Reply:
    """Reply of one rank: a pickled result, a traceback, or the end of the process."""

    kind: str  # "result", "raised" or "died"
    when: float  # time.monotonic(), the same clock in all processes of a machine
    payload: bytes

    def __str__(self) -> str:
        return self.payload.decode()


@dataclass(frozen=True)
class Worker:
    process: multiprocessing.process.BaseProcess
    jobs: connection.Connection
    stacks: Path  # where the worker writes its Python stacks on SIGUSR1, and when a signal ends it


def device() -> torch.device:
    """Inside a worker: the device of this rank."""
    on_gpu = "cuda" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def mesh(*, dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1) -> DeviceMesh:
    """Inside a worker: the mesh of this shape. Each mesh is built once, because a gloo group never releases its
    threads."""
    return _mesh(dp_replicate, dp_shard, cp, tp)


@functools.cache
def _mesh(dp_replicate: int, dp_shard: int, cp: int, tp: int) -> DeviceMesh:
    axes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    return build_mesh(**axes, device_type=device().type, transport="nccl")  # default; a test can request mapped memory


def collect_garbage_seldom() -> None:
    """Exempt the objects of imports from garbage collection, and collect other objects less often. Otherwise tests that
    compile spend a tenth of their time in collections, which free little memory."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def forking() -> ForkServerContext:
    """Return the multiprocessing context of the workers, whose processes are forked from a server. If pytest runs in the
    repository, the server imports torch, its compilers, dlp and launch, and also transformers if a collected test needs
    models of transformers.

    On a machine with a GPU, the server imports neither the compilers nor transformers, because the import of the
    compilers initializes CUDA, which does not survive a fork.
    """
    context = multiprocessing.get_context("forkserver")
    # Without the preload, each process that compiles would need a second to import these modules
    compilers = ["torch._dynamo.backends.debugging", "torch._inductor.compile_fx"]
    models = ["tests.hf_models"] if "tests.hf_models" in sys.modules else []
    context.set_forkserver_preload(
        ["pytest", "tests.training", *([] if torch.cuda.is_available() else [*compilers, *models])]
    )
    return context


def start_forked(*given: Any, start: Any = torch.multiprocessing.start_processes, start_method: str = "") -> Any:
    """Replacement for `torch.multiprocessing.start_processes`: the processes are forks of the server, and not new
    interpreters, which would import torch and dlp."""
    forking()
    return start(*given, start_method="forkserver")


class Pool:
    """`world` ranks on gloo (device_type "cpu"), or on NCCL and gloo with one GPU per rank ("cuda"). `share_gpu`: on
    gloo, with one GPU for all ranks. The first job starts the ranks."""

    def __init__(self, world: int, device_type: str = "cpu", share_gpu: bool = False) -> None:
        self.world = world
        self.device_type = device_type
        self._backends = "shared" if share_gpu else device_type
        self._workers: list[Worker] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Run `fn(*args)` on every rank; return the results in rank order, with tensors detached and on the CPU.

        Raises RankError with the traceback of the rank that failed first or, after `timeout` seconds, with the stacks of
        the ranks that have not replied.
        """
        job = pickle.dumps((fn, args))
        if not self._workers or not all(worker.process.is_alive() for worker in self._workers):
            self._start()
        try:
            self._signal(signal.SIGCONT)
            for worker in self._workers:
                worker.jobs.send_bytes(job)
            replies = _collect(self._workers, timeout)
            if any(reply.kind != "result" for reply in replies.values()) or len(replies) < self.world:
                raise RankError(_report(self._workers, replies, timeout))
        except BaseException:
            self.kill()
            raise
        self._signal(signal.SIGSTOP)
        return [pickle.loads(replies[rank].payload) for rank in range(self.world)]

    def close(self) -> None:
        """Ask the workers to exit, and end workers that do not."""
        self._signal(signal.SIGCONT)
        for worker in self._workers:
            if worker.process.is_alive():
                worker.jobs.send_bytes(b"")
        for worker in self._workers:
            worker.process.join(timeout=5)
        self.kill()

    def refresh(self) -> None:
        """End the workers if one has more than MANY_THREADS threads, because each gloo group keeps threads that poll a
        hundred times a second. The next job starts new workers."""
        alive = [worker for worker in self._workers if worker.process.is_alive()]
        if any(len(os.listdir(f"/proc/{_pid(worker)}/task")) > MANY_THREADS for worker in alive):
            self.kill()

    def _signal(self, number: int) -> None:
        """Send a signal to each worker on CPUs. Workers are stopped between jobs, because the threads of gloo would take
        half of a core from other tests.

        Linux sends SIGHUP to all processes of a process group that becomes orphaned while a process of the group is
        stopped. So each worker is in a separate process group: when the server ends, only the workers get this signal,
        and not pytest."""
        if self.device_type == "cpu":
            for worker in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(_pid(worker), number)

    def kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.jobs.close()
        self._workers = []
        if self._directory:
            self._directory.cleanup()

    def _start(self) -> None:
        self.kill()
        self._directory = tempfile.TemporaryDirectory(prefix="dlp-ranks-")
        directory = Path(self._directory.name)
        context = forking()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            args = (rank, self.world, self._backends, directory, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, directory / f"stacks-{rank}"))


def _serve(rank: int, world: int, backends: str, directory: Path, jobs: connection.Connection) -> None:
    """Main function of a worker: set up the environment of a torchrun rank, and run jobs until an empty job or the end
    of pytest."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    collect_garbage_seldom()
    with open(directory / f"stacks-{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        faulthandler.enable(file=stacks)
        os.setpgid(0, 0)  # see `Pool._signal`
        if backends == "shared":
            shared_gpu.prepare()
        if backends != "cpu":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # code that uses "cuda" if available must use the CPU
        dist.init_process_group(
            BACKENDS[backends],
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world,
            timeout=COLLECTIVE_TIMEOUT,
        )
        while job := _next_job(jobs):
            jobs.send(_answer(job))
        dist.destroy_process_group()


def _next_job(jobs: connection.Connection) -> bytes:
    try:
        return jobs.recv_bytes()
    except EOFError:  # pytest has ended
        return b""


def _answer(job: bytes) -> Reply:
    torch.manual_seed(0)
    try:
        fn, args = pickle.loads(job)
        result = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), fn(*args))
        return Reply("result", time.monotonic(), pickle.dumps(result))
    except BaseException:
        return Reply("raised", time.monotonic(), traceback.format_exc().encode())


def _collect(workers: list[Worker], timeout: float) -> dict[int, Reply]:
    """Collect the replies by rank: all replies, or the available replies after the timeout or soon after a failure."""
    deadline = time.monotonic() + timeout
    waiting = {worker.jobs: rank for rank, worker in enumerate(workers)}
    replies: dict[int, Reply] = {}
    while waiting and (ready := connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
        for jobs in ready:
            assert isinstance(jobs, connection.Connection)
            rank = waiting.pop(jobs)
            replies[rank] = _receive(workers[rank])
            if replies[rank].kind != "result":
                deadline = min(deadline, time.monotonic() + GRACE)
    return replies


def _receive(worker: Worker) -> Reply:
    try:
        return worker.jobs.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        said = f"{worker.stacks.read_text()}the process ended with exit code {worker.process.exitcode}"
        return Reply("died", time.monotonic(), said.encode())


def _report(workers: list[Worker], replies: dict[int, Reply], timeout: float) -> str:
    """Report the first failure in full, and one line for each other rank that failed or was running. A death comes first,
    because it causes exceptions on other ranks. Without a failure, report the stacks of the ranks that did not reply."""
    failures = {rank: reply for rank, reply in replies.items() if reply.kind != "result"}
    silent = [rank for rank in range(len(workers)) if rank not in replies]
    if not failures:
        stacks = "".join(f"\nrank {rank} is at:\n{_stacks(workers[rank])}" for rank in silent)
        return f"ranks {silent} of {len(workers)} did not answer within {timeout:g} s{stacks}"
    first, *others = sorted(failures, key=lambda rank: (failures[rank].kind != "died", failures[rank].when))
    lines = [f"rank {first} of {len(workers)} {failures[first].kind}:", str(failures[first]).rstrip()]
    lines += [f"rank {rank} {failures[rank].kind}: {str(failures[rank]).rstrip().splitlines()[-1]}" for rank in others]
    lines += [f"rank {rank} was still running" for rank in silent]
    return "\n".join(lines)


def _pid(worker: Worker) -> int:
    assert worker.process.pid is not None
    return worker.process.pid


def _stacks(worker: Worker) -> str:
    os.kill(_pid(worker), signal.SIGUSR1)
    time.sleep(0.3)  # short, because the handler runs at once, even while Python waits inside a collective
    return worker.stacks.read_text()
