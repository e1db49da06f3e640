"""Detection of hanging ranks: the run ends with a report of where each rank is.

A thread of each rank records once a second where the rank is (completed steps, last layer, innermost Python frame of the main
thread) and shares the record through the store of the run. The training thread only stores the name of the layer, and the
thread runs while the training thread waits in a collective. The record of a stopped process is no longer updated.

A run hangs when every rank has made no progress for longer than `Place.patience` allows at its place: if one rank makes
progress, or compiles, the other ranks may be waiting for that rank. With mapped memory (`dlp.comm.mapped`) the report also
says which rank waits for which peer.

Times are wall-clock times, which hosts share. After a jump of the clock (clock set, process or machine suspended) a rank
starts counting again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from dlp.comm.watch import READING, frame_of_main, within

SLOW = 6.0  # factor of the allowed time in slow phases
OF_A_STEP = 3.0  # multiple of previous steps that a step may take without visible progress
LATE = 5.0  # seconds between two looks after which the clock must have jumped
# Time of the last progress, and of this record; allowed time; place; the peers that wait for each other.
Told = tuple[float, float, float, str, str]


class Place(NamedTuple):
    """Place of a rank in the program.

    slow   the rank may stand still here, for example during compilation or while writing a file
    step   duration of the previous step in seconds; the host may wait for the device that long
    """

    text: str
    slow: bool
    step: float = 0.0

    def patience(self, after: float) -> float:
        return SLOW * after if self.slow else max(after, OF_A_STEP * self.step)


class HangWatch:
    """Thread that detects hangs.

    after   seconds that a rank may stand still in a step
    where   called once a second, returns the place of this rank
    end     called once, on the thread, with a line for each rank
    waits   called when this rank has stood still for too long, returns which peer this rank waits for
    store   store shared by all ranks, without another user at the same time
    """

    def __init__(
        self, store: dist.Store, after: float, where: Callable[[], Place], end: Callable[[list[str]], None],
        waits: Callable[[], list[str]] = list,
    ) -> None:  # fmt: skip
        self.store, self.after, self.where, self.end, self.waits = store, after, where, end, waits
        self._waits: str | None = None  # the last record shared while this rank made no progress
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="hang-watch")
        self._over = threading.Event()
        self._place: Any = None
        self._moved = self._looked = time.time()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. If the interpreter ended while the thread is inside the C++ store, the process would abort."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while (told := self.look()) is None and not self._over.wait(min(1.0, self.after / 5)):
                pass
        except dist.DistError:  # the store has closed, and torchrun has ended
            return
        if told is not None:
            self.end(told)

    def look(self) -> list[str] | None:
        """Share the place of this rank; return a line for each rank if all ranks have stood still for too long."""
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
        if not (stands and asked):  # other ranks also report their waits before one rank collects the reports
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
    silent = f"; no report for {now - when:.0f} s" if now - when > 5 else ""
    return f"{text}, for {now - moved:.0f} s{silent}{waits}"
