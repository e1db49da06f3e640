"""Peak FLOP/s and peak memory of a device, the file metrics.jsonl, and the display of progress.

`metrics.jsonl` has one JSON object per line, each with the key "step". `Progress` shows the steps on rank 0: a bar on a
terminal, plain lines in a log file or a pipe. While a bar may be shown, print by `tell`.
"""

import errno
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from launch.common.atomic_io import rewrite
from launch.common.devices import BOARDS, board_of


def peak_of(device_name: str) -> float | None:
    """Return the peak dense bf16 FLOP/s for a device name of torch; None for an unknown device."""
    board = BOARDS.get(board_of(device_name))
    return None if board is None else board.bf16_peak


def peak_flops(device: torch.device) -> float | None:
    """Return the peak dense bf16 FLOP/s of a device; None for CPUs and unknown GPUs, for which MFU is "n/a"."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_memory(device: torch.device) -> int:
    """Return the peak of allocated GPU memory of this process in bytes; on a CPU, the peak resident set size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MetricsError(ValueError):
    """Error for a line of metrics.jsonl that is not a JSON object with a step."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl. An incomplete last line, which a killed run may leave, is ignored. Raises
    MetricsError for any other invalid line."""
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [_record(path, number, line) for number, line in enumerate(lines, start=1)]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise MetricsError(f"{path}, line {number}: not a record ({error}); remove that line") from None
    if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
        raise MetricsError(f"{path}, line {number}: not a record, it has no step; remove that line")
    return record


def append(path: Path, text: str) -> None:
    """Append `text` to a file. If writing fails, for example on a full disk, raise OSError and leave the file unchanged."""
    data = text.encode()
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(before)
            raise


def drop_after(path: Path, step: int) -> None:
    """Remove the records of steps after `step`. A run that resumes from `step` writes records of these steps again."""
    kept = [record for record in read_metrics(path) if record["step"] <= step] if path.exists() else []
    rewrite(path, "".join(json.dumps(record) + "\n" for record in kept))


def tell(text: str) -> None:
    """Print `text` on stdout, above the progress bar if there is one."""
    tqdm.write(text)
    sys.stdout.flush()


class Progress:
    """Display of the progress of a run from step `first` to `steps`, with the estimated remaining time.

    If stdout and stderr are terminals, the display is a bar. Otherwise it prints lines on stdout, for the first step, every
    `every`-th step and the last step."""

    def __init__(self, steps: int, first: int = 0, every: int = 1) -> None:
        self._steps, self._first, self._every, self._began = steps, first, every, time.monotonic()
        plain = None if sys.stdout.isatty() else True  # None: tqdm checks stderr, where the bar is shown
        self._bar = tqdm(total=steps, initial=first, unit="step", dynamic_ncols=True, mininterval=1.0, disable=plain)

    def show(self, step: int, text: str) -> None:
        """Show that `step` steps are complete. `text`: metrics to show."""
        if self._bar.disable:
            if step % self._every == 0 or step in (self._first + 1, self._steps):
                self.tell(step, f"{text}{self._left(step)}")
            return
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)

    def _left(self, step: int) -> str:
        """Return the estimated remaining time as text; "" after the first step of this process, which is not representative,
        and after the last step."""
        done, left = step - self._first, self._steps - step
        seconds = (time.monotonic() - self._began) / max(1, done) * left
        return f", {tqdm.format_interval(seconds)} left" if done > 1 and left else ""

    def tell(self, step: int, text: str) -> None:
        """Print a separate line about a step, even if a bar is shown."""
        tell(f"step {step}/{self._steps}: {text}")

    def close(self) -> None:
        self._bar.close()
