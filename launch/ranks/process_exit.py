"""End of a rank's process other than at the end of the run.

SIGTERM         sets a flag; ranks agree on the flag in the metrics reduction of a step, save together and exit 0
a refusal       an error that all ranks know (a setting, a checkpoint, a NaN), printed as one sentence by rank 0
an exception    traceback and immediate exit: an orderly exit of the process group may wait for a dead peer
a dead peer     torchrun sends SIGTERM to the surviving ranks, which can no longer agree on anything and may be inside a
                collective, where Python runs no handlers. A thread watches the wake-up pipe of the signal and ends the
                process if no step boundary follows within `patience` seconds; time for saving is not counted
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

PATIENCE = 20.0  # seconds; torchrun kills ranks after 30 s
RANK_0_FIRST = 5.0  # seconds
REFUSED = "refused"  # key that marks an error file of `tell_torchrun`
CAUSE_FIRST = 2.0  # seconds; torchrun orders failures by whole seconds


class StopFlag:
    """Flag that a SIGTERM sets, once `watch()` was called. Call `beat()` at every step boundary and after every save.
    `waits`: function that returns which peer this rank waits for in mapped memory, called if no step boundary follows a
    SIGTERM."""

    def __init__(self, patience: float = PATIENCE, waits: Callable[[], list[str]] = list) -> None:
        self.requested = False
        self.signalled = False  # wakes the watching thread even while the main thread waits in a collective
        self._patience, self._waits = patience, waits
        self._beat, self._saving = time.monotonic(), False

    def beat(self) -> None:
        """Record that the run is at a step boundary."""
        self._beat = time.monotonic()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context of a save, whose duration does not count after a SIGTERM."""
        self._saving = True
        try:
            yield
        finally:
            self.beat()
            self._saving = False

    def watch(self) -> None:
        """Install the handler of SIGTERM, and let Ctrl-C end the process without a traceback. Call once, on the main thread."""
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
    """End a run that cannot continue, with this exit code.

    Rank 0 prints the sentence, and torchrun then ends the other ranks. If rank 0 does not know the reason, the other ranks
    print the sentence after a few seconds. The report of torchrun ends with the sentence, too (`tell_torchrun`).
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
    """Write the error file from which torchrun reads the cause of a failure, if torchrun started this rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": sentence, "timestamp": int(time.time()), REFUSED: True}))


def is_refusal(report: Mapping[str, Any]) -> bool:
    """Return whether an error file was written by `tell_torchrun`, so that rank 0 has printed the sentence already."""
    return bool(report.get(REFUSED))


def end_hung(told: list[str], after: float, stop: StopFlag) -> NoReturn:
    """End a hanging run from a thread. Rank 0 prints where all ranks are; if rank 0 cannot, another rank does."""
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
    """End this rank after the loss of a peer, once torchrun has recorded the end of the peer as the first failure."""
    time.sleep(CAUSE_FIRST)
    print(
        f"rank {os.environ.get('RANK', 0)}: lost a peer; see the peer's error for the cause ({reason})", file=sys.stderr
    )
    leave(1)


def leave_after_exceptions() -> None:
    """Make uncaught exceptions end the process immediately after the traceback. Call after the process group exists,
    because torch installs a hook that adds the rank."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        leave(1)

    sys.excepthook = hook


def leave(code: int) -> NoReturn:
    """Exit without destructors, which may wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
