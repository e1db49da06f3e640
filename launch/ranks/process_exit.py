"""How a rank's process ends when the run is not simply over.

SIGTERM         a flag; ranks agree on it in the step's metrics reduction, save together and exit 0
a refusal       what every rank knows alike (a setting, a checkpoint, a NaN), in one sentence, from rank 0 alone
an exception    its traceback, and out at once: leaving a group in peace may wait for a peer that is gone
a dead peer     torchrun sends the survivors a SIGTERM, too; they can no longer agree on anything and may sit in a
                collective, where Python runs no handler. So a thread watches the signal's wake-up pipe, which is
                written at once, and ends the process when no step boundary comes within `patience` seconds, a save
                apart, which may take as long as it does
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

PATIENCE = 20.0  # seconds; torchrun kills after 30
RANK_0_FIRST = 5.0  # seconds
REFUSED = "refused"  # the key that marks a file of `tell_torchrun`
CAUSE_FIRST = 2.0  # seconds; torchrun tells first from second by whole ones


class StopFlag:
    """`requested` after a SIGTERM, once `watch()` was called; `beat()` at every step boundary, saves included. `waits`: who
    waits for whom in memory that GPUs map, asked where a run comes to no boundary any more; it returns in seconds."""

    def __init__(self, patience: float = PATIENCE, waits: Callable[[], list[str]] = list) -> None:
        self.requested = False
        self.signalled = False  # the same, without the main thread, which may wait in a collective
        self._patience, self._waits = patience, waits
        self._beat, self._saving = time.monotonic(), False

    def beat(self) -> None:
        """The run is alive and at a step boundary."""
        self._beat = time.monotonic()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What is written inside is what a SIGTERM leaves time for."""
        self._saving = True
        try:
            yield
        finally:
            self.beat()
            self._saving = False

    def watch(self) -> None:
        """Take over this process's SIGTERM, and let Ctrl-C end it without a word. On the main thread, once."""
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
        said = "; ".join(["as when a peer is gone", *self._waits()])
        print(f"no step boundary within {self._patience:g} s of SIGTERM, {said}; leaving", file=sys.stderr)
        leave(128 + signal.SIGTERM)


def refuse(sentence: str, code: int = 1) -> NoReturn:
    """End a run that cannot go on, with this exit code. Rank 0 says why, and torchrun then ends the others; only if that
    has not come after a few seconds, because rank 0 knows nothing of it, do they say it themselves. torchrun prints a report
    after the sentence, which ends with the sentence, too (`tell_torchrun`)."""
    rank = int(os.environ.get("RANK", 0))
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(RANK_0_FIRST)
        sentence = f"rank {rank}: {sentence}"
    print(sentence, file=sys.stderr)
    tell_torchrun(sentence)
    leave(code)


def tell_torchrun(sentence: str) -> None:
    """Write the file from which torchrun takes the cause of a failure, where torchrun started this rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": sentence, "timestamp": int(time.time()), REFUSED: True}))


def is_refusal(report: Mapping[str, Any]) -> bool:
    """Whether a file of a failure is one of `tell_torchrun`, of which rank 0 has said everything."""
    return bool(report.get(REFUSED))


def end_hung(told: list[str], after: float, stop: StopFlag) -> NoReturn:
    """End a run that hangs, from a thread. Rank 0 says where all ranks were; another rank does if rank 0 cannot."""
    rank = int(os.environ.get("RANK", 0))
    deadline = time.monotonic() + RANK_0_FIRST
    while rank and time.monotonic() < deadline:
        if stop.signalled:
            leave(1)
        time.sleep(0.1)
    print(
        f"no rank has moved for longer than it may ([run] hang_after = {after:g} s), the run hangs and ends here:",
        file=sys.stderr,
    )
    print("\n".join(told), file=sys.stderr)
    leave(1)


def leave_behind(reason: str) -> NoReturn:
    """End a run that lost a peer, after torchrun has noted the peer's own end as the first failure."""
    time.sleep(CAUSE_FIRST)
    print(f"rank {os.environ.get('RANK', 0)}: lost a peer, whose own end is the cause ({reason})", file=sys.stderr)
    leave(1)


def leave_after_exceptions() -> None:
    """From here on, an exception that nobody catches is shown as before and ends the process at once. Call it when the
    process group exists: torch installs a hook with it, which names the rank."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        leave(1)

    sys.excepthook = hook


def leave(code: int) -> NoReturn:
    """Out, without the destructors that wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
