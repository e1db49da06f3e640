"""Checkpoints beside the training: copied at a step's end, written by a thread while the next steps run.

    step N ─► copy, beside forward and backward of N + 1 ─► its update waits for the copy
                  └─► a thread writes, hashes, renames, over a process group of its own ─► settled at the next save

Copies lie in memory of this host that is kept from save to save, pinned where they come from a GPU, on a stream of their own.
What a checkpoint is, and when it counts, is as of one that is waited for: a rename when every rank is done.

Ranks agree on how a save ended when they settle it, all at the same step. One that fails is said, and the run goes on with
what was saved before; the second in a row ends the run, as does the one that a run ends with.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from launch import checkpoint
from launch.checkpoint import Saved, SaveError, Snapshot, Training

IN_A_ROW = 2  # saves that fail, before the run ends


class Copies:
    """This host's copies of a run's tensors, kept from one save to the next."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pinned else None
        self._kept: dict[str, Tensor] = {}
        self.done: torch.cuda.Event | None = None  # behind what was copied last

    def take(self, taken: Snapshot) -> Snapshot:
        """The same of copies; on a GPU they are there once `done` is."""
        if self._stream is None:
            return replace(taken, tensors=self._tree("", taken.tensors))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copied = self._tree("", taken.tensors)
            self.done = torch.cuda.Event()
            self.done.record()
        return replace(taken, tensors=copied)

    def _tree(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._tree(f"{name}/{key}", each) for key, each in value.items()}
        if isinstance(value, DTensor):
            return DTensor(self._copy(name, value._local_tensor), value._spec, requires_grad=False)
        return self._copy(name, value) if isinstance(value, Tensor) else value

    def _copy(self, name: str, source: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (source.shape, source.dtype):
            kept = self._kept[name] = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pinned)
        if self._stream is not None and source.is_cuda:
            source.record_stream(self._stream)  # a copy that the run lets go of must outlive this one
        return kept.copy_(source.detach(), non_blocking=True)


@dataclass
class Overhead:
    """Seconds that the training waited for saves. Of asynchronous ones apart: for the first, which takes its memory; for the
    last, which a run ends with and nothing runs beside; and for all others, on its host and, on a GPU, on its device."""

    asynchronous: bool
    saves: int = 0
    first: float = 0.0
    last: float = 0.0
    host: float = 0.0
    device: float = 0.0

    def said(self, took: float) -> str:
        """`took`: seconds of the whole loop."""
        saves = f"{self.saves} save{'s' * (self.saves > 1)}: "
        if not self.asynchronous:
            waited = self.first + self.host + self.last
            return f"{saves}training waited {waited:.2f} s, {waited / took:.2%} of its time"
        between, steps = max(self.host, self.device), took - self.first - self.last
        share = between / steps if steps > 0 else 0.0
        return (
            f"{saves}{self.first:.2f} s for the first, which takes its memory, "
            f"{self.last:.2f} s for the last, which the run ends with; for the others training waited {between:.2f} s, "
            f"{share:.2%} of the steps' time"
        )


class Saver:
    """The saves of one run on this rank; all ranks make and call it alike."""

    def __init__(self, folder: Path, training: Training, keep: int, asynchronous: bool) -> None:
        self.folder, self.training, self.keep = folder, training, keep
        self.overhead, self._failed = Overhead(asynchronous), 0
        self._writing: Future[Saved] | None = None
        self._waits: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if asynchronous:
            self._group = dist.new_group(backend="gloo")
            self._copies = Copies(training.device)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self.asynchronous = asynchronous

    def save(self, step: int, final: bool) -> list[str]:
        """Save this step, and settle the save before; `final`: settle this one as well. What is to be said of those that
        are settled. Raises SaveError on all ranks."""
        said = self.settle(final=False)
        began = time.perf_counter()
        self.overhead.saves += 1
        if self.asynchronous:
            taken = self._copies.take(checkpoint.snapshot(step, self.training))
            self._writing = self._thread.submit(self._write, taken, self._copies.done)
        else:
            self._writing = Future()
            try:
                self._writing.set_result(checkpoint.save(self.folder, step, self.training, self.keep))
            except SaveError as error:
                self._writing.set_exception(error)
        self._count(time.perf_counter() - began, "first" if self.overhead.saves == 1 else "host")
        return said + (self.settle(final) if final or not self.asynchronous else [])

    def _write(self, taken: Snapshot, copied: torch.cuda.Event | None) -> Saved:
        if copied is not None:
            copied.synchronize()
        return checkpoint.write(self.folder, taken, self.keep, self._group)

    def before_update(self) -> None:
        """What is being copied is about to change: the device waits for the copy, the host does not."""
        copied = self._copies.done if self.asynchronous else None
        if copied is None:
            return
        before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        torch.cuda.current_stream().wait_event(copied)
        behind.record()
        self._copies.done, self._waits = None, (before, behind)

    def settle(self, final: bool) -> list[str]:
        """Wait for the save in flight, if there is one -> what is to be said of it. Raises SaveError on all ranks, of one
        that failed after another, or was to be the last."""
        if self._writing is None:
            return []
        began, writing, self._writing = time.perf_counter(), self._writing, None
        try:
            saved = writing.result()
        except SaveError as error:
            self._failed += 1
            if final or self._failed == IN_A_ROW:
                raise
            return [f"WARNING: {error}; the run goes on, and ends if the next save fails, too"]
        self._count(time.perf_counter() - began, "last" if final else "host")
        if self._waits is not None:
            self.overhead.device += self._waits[0].elapsed_time(self._waits[1]) / 1e3
        self._failed, self._waits = 0, None
        return [str(saved)]

    def _count(self, seconds: float, where: str) -> None:
        setattr(self.overhead, where, getattr(self.overhead, where) + seconds)
