"""Save checkpoints in the background: tensors are copied at the end of a step, and a thread writes them during the next steps.

    step N ─► device copies of as many tensors as fit ─► thread: pinned copies, write, rename ─► settled at the next save
          └─► pinned copies of the others, during forward and backward of N + 1 ─► the update of N + 1 waits for both copies

To settle a save is to wait for its thread and to report the result; all ranks settle a save at the same step. A failed save is
reported, and the run continues. The run ends after two failed saves in a row, and if the last save fails.

Pinned memory is reused by the next save. Copies run on a side stream: the device waits for them before the next update and
before the next replay of a CUDA graph, the host does not wait. The thread communicates over a separate process group. The files
are the same as of a save in the foreground, and the folder is renamed when all ranks have written. No steps overlap with the
last save of a run; if no earlier save has allocated pinned memory, the last save writes without copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from launch.checkpoint import save_load
from launch.checkpoint.save_load import Saved, SaveError, Snapshot, Training
from launch.config.sections import Checkpoint

IN_A_ROW = 2  # the run ends after this number of failed saves in a row


class Copies:
    """Copier of the tensors of a checkpoint; each save reuses the host memory of the previous save. Call `take`, then `fetch`.

    On a GPU `take` copies tensors within device memory, which takes milliseconds, until the copies fill half of the free device
    memory; `take` copies the other tensors to the host. `fetch` then copies the device copies to the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pinned else None
        self._kept: dict[str, Tensor] = {}
        self._room = self._reserved = 0  # bytes left for device copies; bytes of the device copies of the last `take`
        self.done: torch.cuda.Event | None = None  # recorded after the copies of the last `take`

    @property
    def empty(self) -> bool:
        """Return whether no host memory is allocated yet."""
        return not self._kept

    def take(self, taken: Snapshot) -> Snapshot:
        """Return the snapshot with copies of all tensors, on the device or on the host. On a GPU the copies are complete after
        the event `done`."""
        if self._stream is None:
            return replace(taken, tensors=self._tree("", taken.tensors, self._to_host))
        self._room = room = (self._free_device_memory() + self._reserved) // 2
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copied = self._tree("", taken.tensors, self._apart)
            self.done = torch.cuda.Event()
            self.done.record()
        self._reserved = room - self._room
        return replace(taken, tensors=copied)

    def fetch(self, taken: Snapshot) -> None:
        """Replace the device copies in `taken` by host copies, and wait for the host copies. Called by the writing thread."""
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            copied = self._tree(
                "", taken.tensors, lambda name, each: self._to_host(name, each) if each.is_cuda else each
            )
        self._stream.synchronize()
        taken.tensors.update(copied)  # this frees the device copies

    def _free_device_memory(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def _tree(self, name: str, value: Any, copy: Callable[[str, Tensor], Tensor]) -> Any:
        if isinstance(value, dict):
            return {key: self._tree(f"{name}/{key}", each, copy) for key, each in value.items()}
        if isinstance(value, DTensor):
            return DTensor(copy(name, value._local_tensor), value._spec, requires_grad=False)
        return copy(name, value) if isinstance(value, Tensor) else value

    def _apart(self, name: str, source: Tensor) -> Tensor:
        if self._stream is None or not source.is_cuda or source.nbytes > self._room:
            return self._to_host(name, source)
        self._room -= source.nbytes
        source.record_stream(self._stream)
        return source.detach().clone()

    def _to_host(self, name: str, source: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (source.shape, source.dtype):
            kept = self._kept[name] = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pinned)
        if self._stream is not None and source.is_cuda:
            source.record_stream(self._stream)  # freed memory is then not reused before the copy ends
        return kept.copy_(source.detach(), non_blocking=True)


@dataclass
class Overhead:
    """Number of saves of a run, and seconds that training waited for saves.

    first    time in which the host made the copies of the first save, which allocates pinned memory; without asynchronous
             saves, the time of the first save
    last     time in which the host waited until the last save was written, while no steps run
    host     all other time in which the host copied tensors or waited for a save
    device   time in which the device waited for copies, before the update of the step after a save
    """

    asynchronous: bool
    saves: int = 0
    first: float = 0.0
    last: float = 0.0
    host: float = 0.0
    device: float = 0.0

    def said(self, took: float) -> str:
        """Describe the overhead. `took`: seconds of the complete training loop."""
        saves = f"{self.saves} save{'s' * (self.saves > 1)}: "
        if not self.asynchronous or self.saves == 1:
            waited = self.first + max(self.host, self.device) + self.last
            return f"{saves}training waited {waited:.2f} s, {waited / took:.2%} of the training time"
        between, steps = max(self.host, self.device), took - self.first - self.last
        share = between / steps if steps > 0 else 0.0
        return (
            f"{saves}training waited {self.first:.2f} s for the first save, which allocates pinned memory, "
            f"{self.last:.2f} s for the last save, and {between:.2f} s for the others, {share:.2%} of the time of the steps"
        )


def describe(settings: Checkpoint) -> str:
    """Return the line about saves for plan and log: when checkpoints are saved, and whether in the background."""
    if settings.none:
        return "saves: none ([checkpoint] every = 0 and at_end = false)"
    if not settings.every:
        return "saves: after the last step"
    end = " and after the last step" * settings.at_end
    how = "written while the next steps run" if settings.asynchronous else "training waits for each save"
    return f"saves: every {settings.every} steps{end}, {how}"


class Saver:
    """Saver of the checkpoints of one run; all ranks make the same calls. `saved`: step of the last checkpoint that this run
    has finished or resumed from; 0 if there is none."""

    def __init__(self, folder: Path, training: Training, keep: int, asynchronous: bool) -> None:
        self.folder, self.training, self.keep = folder, training, keep
        self.overhead, self._failed, self.saved = Overhead(asynchronous), 0, 0
        self._writing: Future[Saved] | None = None
        self._waits: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if asynchronous:
            self._group = dist.new_group(backend="gloo")
            self._copies = Copies(training.device)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self.asynchronous = asynchronous

    def save(self, step: int, final: bool) -> list[str]:
        """Settle the previous save, and save this step. A `final` save and a synchronous save are settled at once. Returns log
        lines about the settled saves. Raises SaveError on all ranks: see `settle`."""
        said = self.settle(final=False)
        began = time.perf_counter()
        self.overhead.saves += 1
        where = "first" if self.overhead.saves == 1 else "host"
        if self.asynchronous and not (final and self._copies.empty):
            taken = self._copies.take(save_load.snapshot(step, self.training))
            self._writing = self._thread.submit(self._write, taken)
        else:
            where, self._writing = "last" if final else where, Future()
            try:
                self._writing.set_result(save_load.save(self.folder, step, self.training, self.keep))
            except SaveError as error:
                self._writing.set_exception(error)
        self._count(time.perf_counter() - began, where)
        return said + (self.settle(final) if final or not self.asynchronous else [])

    def _write(self, taken: Snapshot) -> Saved:
        self._copies.fetch(taken)
        return save_load.write(self.folder, taken, self.keep, self._group)

    def before_update(self) -> None:
        """Make the current stream wait for the copies of the last save, since the update overwrites the copied tensors."""
        copied = self._copies.done if self.asynchronous else None
        if copied is None:
            return
        before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        torch.cuda.current_stream().wait_event(copied)
        behind.record()
        self._copies.done, self._waits = None, (before, behind)

    def settle(self, final: bool) -> list[str]:
        """Wait for the save in flight, if there is one, and return log lines about the result. Raises SaveError on all ranks
        after the second failure in a row, or if `final` and the save failed."""
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
        self._failed, self._waits, self.saved = 0, None, saved.step
        return [str(saved)]

    def unsaved(self, done: int) -> str:
        """Return the end of a log line about the steps that are in no checkpoint when a run ends after `done` steps; "" if
        there are no such steps."""
        if self.saved == done:
            return ""
        return f", nothing was saved after step {self.saved}" if self.saved else ", nothing was saved"

    def _count(self, seconds: float, where: str) -> None:
        setattr(self.overhead, where, getattr(self.overhead, where) + seconds)
