"""A rank that hangs is noticed by the others, which say where every rank was and end the run.

A thread of each rank looks once a second where its rank is: steps done, the layer that ran last, the innermost Python frame
of the main thread. It tells the others through the run's store. That costs the training thread nothing but a note of the
layer, and goes on while that thread waits in a collective. A process that is stopped tells nothing any more, so its last
word grows old.

The run hangs when every rank has stood still for longer than it may where it is (`Place.patience`): one rank that moves, or
compiles, is what the others wait for. Then each rank also tells who waits for whom in memory that GPUs map
(`dlp.comm.mapped`), which it reads beside what hangs.

Times are wall-clock times, which hosts share. Where one has jumped between two looks, because the clock was set or the process
or its machine was stopped for a while, a rank counts anew.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from dlp.comm.watch import READING, frame_of_main, within

SLOW = 6.0  # times as long may a rank stand still in what is known to be slow
OF_A_STEP = 3.0  # of the steps before, may one take in which nothing is seen to move
LATE = 5.0  # seconds from one look to the next, after which the clock has jumped
# When a rank moved, and told; how long it may stand still; where; who waits for whom.
Told = tuple[float, float, float, str, str]


class Place(NamedTuple):
    """Where a rank is. `slow`: it may stand still there for good reason, as where code is compiled or a file is written;
    `step`: seconds of the step before, all of which the host may wait for the device."""

    text: str
    slow: bool
    step: float = 0.0

    def patience(self, after: float) -> float:
        return SLOW * after if self.slow else max(after, OF_A_STEP * self.step)


class HangWatch:
    """`after`: seconds that a rank may stand still in a step. `where`: asked once a second; `end`: called once, on the watching
    thread, with a line for each rank; `waits`: who waits for whom here, asked when this rank has stood still for too long.
    `store`: shared by all ranks, used by nobody else at the same time."""

    def __init__(
        self, store: dist.Store, after: float, where: Callable[[], Place], end: Callable[[list[str]], None],
        waits: Callable[[], list[str]] = list,
    ) -> None:  # fmt: skip
        self.store, self.after, self.where, self.end, self.waits = store, after, where, end, waits
        self._waits: str | None = None  # as told, since this rank stands still
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="hang-watch")
        self._over = threading.Event()
        self._place: Any = None
        self._moved = self._looked = time.time()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. An interpreter that ends while it is in the store's C++ aborts the process."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while (told := self.look()) is None and not self._over.wait(min(1.0, self.after / 5)):
                pass
        except dist.DistError:  # the store is gone, and torchrun with it
            return
        if told is not None:
            self.end(told)

    def look(self) -> list[str] | None:
        """Tell the others where this rank is; a line for each rank if all have stood still for too long."""
        frame, instruction = frame_of_main()
        where, now = self.where(), time.time()
        text, patience = f"{where.text}, in {frame}", where.patience(self.after)
        jumped = not 0 <= now - self._looked <= LATE
        if self._place != (text, instruction) or jumped:
            self._place, self._moved, self._waits = (text, instruction), now, None
        stands = now - self._moved >= patience
        asked = self._waits is not None
        if stands and not asked:
            self._waits = "".join(f"; {said}" for said in within(READING, self.waits))
        self._looked = time.time()
        self.store.set(f"hang/{self.rank}", json.dumps((self._moved, self._looked, patience, text, self._waits or "")))
        if not (stands and asked):  # the others, too, tell who waits for whom before one of them collects it
            return None
        told = [self._told(rank) for rank in range(self.world)]
        now = time.time()
        if any(each is not None and now - each[0] < each[2] for each in told):
            return None
        return [f"rank {rank}: {_said(each, now)}" for rank, each in enumerate(told)]

    def _told(self, rank: int) -> Told | None:
        key = f"hang/{rank}"
        if not self.store.check([key]):
            return None
        moved, when, patience, text, waits = json.loads(self.store.get(key))
        return moved, when, patience, text, waits


def _said(told: Told | None, now: float) -> str:
    if told is None:
        return "never heard of"
    moved, when, _, text, waits = told
    silent = f"; it has told nothing for {now - when:.0f} s" if now - when > 5 else ""
    return f"{text}, for {now - moved:.0f} s{silent}{waits}"
