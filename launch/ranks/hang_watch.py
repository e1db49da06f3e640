"""Detect hangs: if no rank makes progress, the run ends with a report of the place of each rank.

The place of a rank is the number of completed steps, the last layer, and the innermost Python frame of the main thread. On each
rank a watch thread writes the place into the store of the run once a second, also while the main thread waits in a collective.
The entry of a stopped process is no longer updated.

A run hangs if every rank has stayed at one place for longer than `Place.patience`. One rank without progress is not enough: it
may be waiting for a rank that makes progress or compiles. With mapped memory (`dlp.comm.mapped`) the report also states which
rank waits for which peer.

Times are wall-clock times, since ranks on several hosts compare them. After a jump of the clock (clock set, process or machine
suspended) a rank starts counting again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from dlp.comm.watch import READING, frame_of_main, within

SLOW = 6.0  # factor by which the allowed time is longer at slow places
OF_A_STEP = 3.0  # allowed time without progress, as a multiple of the duration of the previous step
LATE = 5.0  # if more seconds lie between two calls of `look`, the clock is assumed to have jumped
# Entry of a rank in the store: time of the last progress, time of the entry, allowed seconds, place, waits for peers.
Told = tuple[float, float, float, str, str]


class Place(NamedTuple):
    """Place of a rank in the program.

    text   description for the report
    slow   whether work without visible progress is normal here, for example compilation or writing a file
    step   duration of the previous step in seconds; the host may wait that long for the device
    """

    text: str
    slow: bool
    step: float = 0.0

    def patience(self, after: float) -> float:
        return SLOW * after if self.slow else max(after, OF_A_STEP * self.step)


class HangWatch:
    """Thread that detects hangs.

    store   store of all ranks, through a connection that no other thread uses
    after   allowed seconds without progress in a step, `[run] hang_after`
    where   function that returns the place of this rank; called once a second
    end     function that ends the process; called in the watch thread with one line per rank
    waits   function that returns lines about the peers that this rank waits for; called after `Place.patience` seconds without
            progress
    """

    def __init__(
        self, store: dist.Store, after: float, where: Callable[[], Place], end: Callable[[list[str]], None],
        waits: Callable[[], list[str]] = list,
    ) -> None:  # fmt: skip
        self.store, self.after, self.where, self.end, self.waits = store, after, where, end, waits
        self._waits: str | None = None  # lines of `waits`, joined; None while this rank makes progress
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="hang-watch")
        self._over = threading.Event()
        self._place: Any = None
        self._moved = self._looked = time.time()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The process would abort if the interpreter ended while the thread is inside the C++ store."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while (told := self.look()) is None and not self._over.wait(min(1.0, self.after / 5)):
                pass
        except dist.DistError:  # the store is closed because torchrun has ended
            return
        if told is not None:
            self.end(told)

    def look(self) -> list[str] | None:
        """Write the place of this rank into the store. Returns one line per rank if the run hangs, else None."""
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
        if not (
            stands and asked
        ):  # entries are collected one call later, when other ranks have written their waits, too
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
        return "no report"
    moved, when, _, text, waits = told
    silent = f"; no report for {now - when:.0f} s" if now - when > 5 else ""
    return f"{text}, for {now - moved:.0f} s{silent}{waits}"
