"""Exit of a rank before the end of the run. The causes, and what the rank does:

SIGTERM       The handler sets a flag. Ranks exchange the flag with the metrics of a step, save together and exit with code 0.
refusal       Error that a user can correct (a setting, a checkpoint), or that all ranks detect (NaN). Rank 0 prints a sentence.
exception     Traceback and immediate exit. An orderly exit of the process group could wait for a dead peer.
dead peer     torchrun sends SIGTERM to the other ranks. They may be blocked in a collective, where Python runs no signal
              handlers, so a thread watches the wake-up pipe of the signal. The thread ends the process if no step boundary
              follows within `patience` seconds; time for saving is not counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

PATIENCE = 20.0  # seconds from SIGTERM to the next step boundary; torchrun kills ranks after 30 s
RANK_0_FIRST = 5.0  # seconds that other ranks wait before they print, so that usually only rank 0 prints
REFUSED = "refused"  # key that marks an error file of `tell_torchrun`
CAUSE_FIRST = 2.0  # seconds that a rank waits after the loss of a peer; torchrun orders failures by whole seconds


class StopFlag:
    """Flag `requested`, which SIGTERM sets after `watch()` was called. Call `beat()` at every step boundary.

    patience: seconds from SIGTERM to the next step boundary, after which the process ends. waits: function that returns lines
    about the peers that this rank waits for in mapped memory, for the message of that exit.
    """

    def __init__(self, patience: float = PATIENCE, waits: Callable[[], list[str]] = list) -> None:
        self.requested = False
        self.signalled = False  # set by the watch thread, even while the main thread is blocked in a collective
        self._patience, self._waits = patience, waits
        self._beat, self._saving = time.monotonic(), False

    def beat(self) -> None:
        """Record that the run is at a step boundary."""
        self._beat = time.monotonic()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context for saving a checkpoint; time in this context does not count as patience."""
        self._saving = True
        try:
            yield
        finally:
            self.beat()
            self._saving = False

    def watch(self) -> None:
        """Install the handler of SIGTERM; make Ctrl-C end the process without a traceback. Call once, in the main thread."""
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        threading.Thread(target=self._wait, args=(read_end,), daemon=True, name="stop-watch").start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _wait(self, read_end: int) -> None:
        while os.read(read_end, 1)[0] != signal.SIGTERM:
            pass
        self.signalled = True
        self.beat()
        while self._saving or time.monotonic() - self._beat < self._patience:
            time.sleep(0.2)
        said = "; ".join(["for example because a peer has exited", *self._waits()])
        print(f"no step boundary within {self._patience:g} s of SIGTERM, {said}; leaving", file=sys.stderr)
        leave(128 + signal.SIGTERM)


def refuse(sentence: str, code: int = 1) -> NoReturn:
    """Print `sentence`, the reason why the run cannot continue, and exit with `code`.

    Rank 0 prints at once, and torchrun then ends the other ranks. A rank other than 0 that calls `refuse` prints after
    `RANK_0_FIRST` seconds, if it still runs. The failure report of torchrun contains the sentence, too (`tell_torchrun`).
    """
    rank = int(os.environ.get("RANK", 0))
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(RANK_0_FIRST)
        sentence = f"rank {rank}: {sentence}"
    print(sentence, file=sys.stderr)
    tell_torchrun(sentence)
    leave(code)


def tell_torchrun(sentence: str) -> None:
    """Write `sentence` into the error file from which torchrun reads the cause of a failure; do nothing without torchrun."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": sentence, "timestamp": int(time.time()), REFUSED: True}))


def is_refusal(report: Mapping[str, Any]) -> bool:
    """Return whether `report`, the content of an error file, is from `tell_torchrun`: then a rank has printed the sentence."""
    return bool(report.get(REFUSED))


def end_hung(told: list[str], after: float, stop: StopFlag) -> NoReturn:
    """End a hanging run, called in the watch thread of `HangWatch`. Rank 0 prints the lines `told`, one per rank; the other
    ranks print after `RANK_0_FIRST` seconds if they still run and have not received SIGTERM."""
    rank = int(os.environ.get("RANK", 0))
    deadline = time.monotonic() + RANK_0_FIRST
    while rank and time.monotonic() < deadline:
        if stop.signalled:
            leave(1)
        time.sleep(0.1)
    print(
        f"no rank has made progress within the allowed time ([run] hang_after = {after:g} s); the run hangs and ends "
        f"here:",
        file=sys.stderr,
    )
    print("\n".join(told), file=sys.stderr)
    leave(1)


def leave_behind(reason: str) -> NoReturn:
    """Exit after the loss of a peer. Waits first, so that torchrun records the exit of the peer as the first failure."""
    time.sleep(CAUSE_FIRST)
    print(
        f"rank {os.environ.get('RANK', 0)}: lost a peer; see the peer's error for the cause ({reason})", file=sys.stderr
    )
    leave(1)


def leave_after_exceptions() -> None:
    """Make the process exit immediately after the traceback of an uncaught exception. Call after the process group was
    created, because torch then replaces sys.excepthook by a hook that adds the rank to a traceback."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        leave(1)

    sys.excepthook = hook


def leave(code: int) -> NoReturn:
    """Flush the output and exit without destructors, since destructors may wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
