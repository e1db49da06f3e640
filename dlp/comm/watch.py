"""A timeout for streams that wait for a peer in mapped memory: a watch thread that ends the process after PATIENCE seconds
without progress.

Waits of CUDA streams have no timeout. The watch thread reads the current Python frame of the main thread, which does not slow
the main thread down. If the frame has not changed for half of PATIENCE, the watch thread also reads for which peers this rank
waits in mapped memory. If there are such waits, and neither the frame nor the waits change for another half of PATIENCE, the
watch thread prints the waits and ends the process, as NCCL's watchdog does. While the main thread progresses, the watch thread
reads nothing from the GPU, in particular not while a CUDA graph is captured.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dlp.comm import slots
from dlp.comm.mapped import Transport

MAIN = threading.main_thread().ident
LOOKS = 60  # number of checks of the watch thread in PATIENCE seconds
READING = 5.0  # timeout in seconds for reading from a GPU, which may hang


def frame_of_main() -> tuple[str, int]:
    """Return `place_of` of the innermost Python frame of the main thread."""
    return place_of(sys._current_frames().get(MAIN or 0))


def place_of(frame: FrameType | None) -> tuple[str, int]:
    """Return a frame as text, "function (file:line)", and the offset of the current instruction in the function."""
    if frame is None:
        return "nowhere", 0
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})", frame.f_lasti


def within(seconds: float, ask: Callable[[], list[str]]) -> list[str]:
    """Call `ask` on another thread, and return its lines. If `ask` raises RuntimeError or takes longer than `seconds`, return
    one line that reports this."""
    found = [f"the waits of the GPUs could not be read within {seconds:g} s"]

    def read() -> None:
        try:
            found[:] = ask()
        except RuntimeError as error:
            found[:] = [f"the waits of the GPUs cannot be read: {str(error).splitlines()[0]}"]

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(seconds)
    return list(found)


def leave(said: str) -> NoReturn:
    """Print a message and end the process with exit code 1, even if its main thread waits inside CUDA."""
    print(said, file=sys.stderr, flush=True)
    os._exit(1)


class Watch:
    """Watch thread of a transport. The thread ends when the transport no longer exists.

    of    transport; the thread reads the `waits` of this rank
    end   function that is called with the message after PATIENCE seconds without progress
    """

    def __init__(self, of: Transport, end: Callable[[str], object] = leave) -> None:
        self._of, self._end = weakref.ref(of), end
        self._place, self._stood, self._waits, self._waited = ("", 0), 0.0, list[str](), 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="transfer-watch").start()

    def _run(self) -> None:
        while (of := self._of()) is not None and not self.look(of, time.monotonic()):
            del of
            time.sleep(slots.PATIENCE / LOOKS)

    def look(self, of: Transport, now: float) -> bool:
        """Check once, at time `now` in seconds. If this rank waits in mapped memory and has made no progress for PATIENCE
        seconds, call `end` and return True; else return False."""
        place = frame_of_main()
        if place != self._place:
            self._place, self._stood, self._waits = place, now, []
        if now - self._stood < slots.PATIENCE / 2:
            return False
        waits = within(READING, lambda: of.waits(own=True))
        if waits != self._waits:
            self._waits, self._waited = waits, now
        if not waits or now - self._waited < slots.PATIENCE / 2:
            return False
        self._end(f"no transfer has progressed for {slots.PATIENCE:g} s, in {place[0]}: {'; '.join(waits)}")
        return True
