"""Record the measurements of a run: times of the parts of a step, metrics.jsonl and other sinks, progress display, plot."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import torch

from launch.common.units import said_seconds
from launch.config.run_config import Config
from launch.data.counting_baseline import Baseline
from launch.report import metric_sinks
from launch.report.exposed_communication import Exposure
from launch.report.metrics import Progress, append, drop_after, peak_flops, peak_memory, read_metrics
from launch.report.run_dir import RunDir

LINE = "\n"
COMPARED = 20  # number of steps after which measured and predicted seconds per step are compared, once per process
MEDIAN_OF = 10  # number of latest steps whose median is compared


class Stopwatch:
    """Times of the named parts of one step. On GPUs the times are from CUDA events; call `split` after the step has completed
    on the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, name: str) -> None:
        """End a part: add the time since the previous call, or since construction, to `name`."""
        self._marks.append((name, self._now()))

    def split(self) -> dict[str, float]:
        """Return the seconds of each part by name; parts with the same name are added."""
        seconds: dict[str, float] = defaultdict(float)
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] += before.elapsed_time(after) / 1e3 if self._on_device else after - before
        return {name: round(value, 6) for name, value in seconds.items()}


class Recorder:
    """Recorder of the metrics on rank 0; on other ranks the methods record nothing. Raises ValueError if the package of a sink
    is not installed."""

    def __init__(self, config: Config, run: RunDir, device: torch.device, world_size: int) -> None:
        self._config, self._run, self._device = config, run, device
        self._path = run.path / "metrics.jsonl"
        self._tokens = config.train.global_batch * config.train.sequence
        self._flops = config.architecture.flops_per_token(config.train.sequence)
        peak = peak_flops(device)
        self._peak = None if peak is None else peak * world_size
        self._progress: Progress | None = None
        self._sinks: dict[str, metric_sinks.Sink] = {}
        self.predicted: float | None = None  # predicted seconds per step, if there is a prediction
        self._seconds: list[float] = []  # seconds of the first steps of this process
        self._unwritten = ""  # records of metrics.jsonl that could not be written yet
        metric_sinks.check(config.run.metrics)

    def check(self) -> None:
        """Raise MetricsError if metrics.jsonl exists and cannot be read, since a resumed run appends to it."""
        if self._path.exists():
            read_metrics(self._path)

    def begin(self, step: int) -> None:
        """Start recording after `step` completed steps: remove records of later steps, open the sinks, and show progress."""
        if not self._run.leader:
            return
        drop_after(self._path, step)
        for name in self._config.run.metrics:
            try:
                self._sinks[name] = metric_sinks.SINKS[name](self._run.path, step)
            except OSError as error:
                self._say_left_out(name, error)
        self._progress = Progress(self._config.train.steps, step, self._config.train.log_every)

    def step(
        self, step: int, *, loss: float, norm: float, lr: float, seconds: float, split: dict[str, float],
        wire_bytes: dict[str, int], skipped: bool = False,
    ) -> None:  # fmt: skip
        """Record a completed step.

        loss: mean loss in nats per token; norm: gradient norm before clipping; seconds: duration; split: seconds of its parts;
        wire_bytes: planned bytes that one rank sends, by process group; skipped: whether the update was skipped."""
        if not self._run.leader:
            return
        rate = self._tokens / seconds
        flops = rate * self._flops
        self._write(
            step=step, loss=loss, gradient_norm=norm, lr=lr, tokens_per_second=round(rate, 1),
            model_flops_per_second=flops, mfu="n/a" if self._peak is None else round(flops / self._peak, 4),
            seconds=round(seconds, 6), split=split, wire_bytes=wire_bytes, peak_memory_bytes=peak_memory(self._device),
            **({"skipped": True} if skipped else {}),
        )  # fmt: skip
        if self._progress is not None:
            self._progress.show(step, f"loss {loss:.3f}, {rate:,.0f} tokens/s")
        self._compare(step, seconds)

    def _compare(self, step: int, seconds: float) -> None:
        """After `COMPARED` steps, record and print the relative error of the predicted seconds per step."""
        if self.predicted is None or len(self._seconds) == COMPARED:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < COMPARED:
            return
        measured = statistics.median(self._seconds[-MEDIAN_OF:])
        error = self.predicted / measured - 1
        self._write(step=step, prediction={"predicted": self.predicted, "measured": measured, "error": round(error, 4)})
        if self._progress is not None:
            took = f"a step takes {said_seconds(measured)} (median of {MEDIAN_OF})"
            self._progress.tell(step, f"{took}, predicted {said_seconds(self.predicted)} ({error:+.1%})")

    def validation(self, step: int, loss: float) -> None:
        self._write(step=step, validation_loss=loss)
        if self._progress is not None:
            self._progress.tell(step, f"validation {loss:.3f}")
        if self._run.leader:
            self._plot()

    def baseline(self, step: int, found: Baseline) -> None:
        """Record the loss of the baseline (`launch.data.counting_baseline`), unless metrics.jsonl already has this record."""
        if self._run.leader and not any("baseline" in record for record in read_metrics(self._path)):
            self._write(step=step, baseline=found._asdict())

    def swap(self, step: int, recipe: str, layers: int) -> None:
        """Record a recipe change after `step`. `layers`: number of changed layers."""
        self._write(step=step, swap={"recipe": recipe, "layers": layers})

    def ledger(self, step: int, account: list[dict[str, Any]]) -> None:
        """Record the counted bytes of a step, as returned by `WireWatch.account`."""
        self._write(step=step, ledger=account)

    def stats(self, step: int, numbers: dict[str, dict[str, float | None]]) -> None:
        """Record cast statistics, as returned by `dlp.read_stats`: tensor name -> statistic -> value."""
        self._write(step=step, stats=numbers)

    def exposure(self, step: int, found: Exposure) -> None:
        """Record the exposed communication of a profiled step."""
        self._write(step=step, exposure=asdict(found))

    @property
    def tokens_per_second(self) -> float:
        """Median tokens per second over all recorded steps of the run, including those before a resume. Only on rank 0."""
        rates = [record["tokens_per_second"] for record in read_metrics(self._path) if "tokens_per_second" in record]
        return statistics.median(rates) if rates else 0.0

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._plot()
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except OSError as error:
                self._run.say(f"WARNING: the last values for {name} could not be written ({error.strerror or error})")
        if self._unwritten:
            self._run.say(
                f"WARNING: {self._path} lacks the last {self._unwritten.count(LINE)} records, because the disk is full"
            )

    def _plot(self) -> None:
        """Draw loss.png. A failure is logged and does not end the run; `launch.plot` can draw the plot later."""
        from launch.report import plots  # matplotlib is slow to import, and only rank 0 needs it

        path = self._run.path / "loss.png"
        try:
            plots.write_plot([self._run.path], path)
        # ValueError: no step was recorded, for example because the metrics were deleted
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            self._run.say(f"{path} could not be written ({reason}); the run goes on without it")

    def _write(self, **record: Any) -> None:
        """Write a record to metrics.jsonl and all sinks. A failure, for example a full disk, does not end the run: records for
        metrics.jsonl are written later, a failing sink is no longer used."""
        if not self._run.leader:
            return
        waited = bool(self._unwritten)
        self._unwritten += json.dumps(record) + LINE
        try:
            append(self._path, self._unwritten)
            self._unwritten = ""
        except OSError as error:
            if not waited:
                self._run.say(
                    f"WARNING: {self._path} could not be written ({error.strerror}); the run goes on, and writes its "
                    f"records later"
                )
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(record)
            except OSError as error:
                del self._sinks[name]
                self._say_left_out(name, error)

    def _say_left_out(self, name: str, error: OSError) -> None:
        self._run.say(
            f"WARNING: {name} could not be written ({error.strerror}) and gets no further records until the run is "
            f"restarted; metrics.jsonl has all records"
        )
