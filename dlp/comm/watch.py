"""A limit for streams that wait for a peer, which have none of their own: a thread that looks where its process stands.

It looks where the main thread is, which costs that nothing. Once that has not moved for half of PATIENCE, it reads as well who
waits for whom in mapped memory. When neither has changed for the other half, this rank says whom it waits for and ends, as a
process ends by NCCL's own watch. It reads nothing while a program moves, least of all while a CUDA graph is captured.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from dlp.comm import slots

MAIN = threading.main_thread().ident
LOOKS = 60  # in PATIENCE
READING = 5.0  # seconds that reading what hangs may take


class Waiting(Protocol):
    def own_waits(self) -> list[str]: ...


def frame_of_main() -> tuple[str, int]:
    """The innermost Python frame of the main thread, in words, and its instruction."""
    frame = sys._current_frames().get(MAIN or 0)
    if frame is None:
        return "nowhere", 0
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})", frame.f_lasti


def within(seconds: float, ask: Callable[[], list[str]]) -> list[str]:
    """The lines that `ask` returns, called on a thread of its own; a line that says so if it fails or takes longer."""
    found = [f"what GPUs wait for could not be read in {seconds:g} s"]

    def read() -> None:
        try:
            found[:] = ask()
        except RuntimeError as error:
            found[:] = [f"what GPUs wait for cannot be read: {str(error).splitlines()[0]}"]

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(seconds)
    return list(found)


def leave(said: str) -> NoReturn:
    """End the process with a message, also if its main thread waits inside CUDA."""
    print(said, file=sys.stderr, flush=True)
    os._exit(1)


class Watch:
    """Watches the waits of an object, as long as it lives. of: whose waits are read; end: called with a message on those that
    are too long."""

    def __init__(self, of: Waiting, end: Callable[[str], object] = leave) -> None:
        self._of, self._end = weakref.ref(of), end
        self._place, self._stood, self._waits, self._waited = ("", 0), 0.0, list[str](), 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="transfer-watch").start()

    def _run(self) -> None:
        while (of := self._of()) is not None and not self.look(of, time.monotonic()):
            del of
            time.sleep(slots.PATIENCE / LOOKS)

    def look(self, of: Waiting, now: float) -> bool:
        """Whether this rank has waited for too long, and `end` was called."""
        place = frame_of_main()
        if place != self._place:
            self._place, self._stood, self._waits = place, now, []
        if now - self._stood < slots.PATIENCE / 2:
            return False
        waits = within(READING, of.own_waits)
        if waits != self._waits:
            self._waits, self._waited = waits, now
        if not waits or now - self._waited < slots.PATIENCE / 2:
            return False
        self._end(f"no transfer has moved for {slots.PATIENCE:g} s, in {place[0]}: {'; '.join(waits)}")
        return True
