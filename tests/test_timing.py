"""`dlp.kernels.timing` on a simulated device: measured times equal the times of the device, whether or not the host is
faster."""

from __future__ import annotations

import time

import pytest
import torch

from dlp.kernels import timing


class Played:
    """A simulated device and its host. All times are in milliseconds. `now`: time of the host; `queued`: the time at
    which all queued work will have finished; `idle`: total time in which the device had no work."""

    def __init__(self) -> None:
        self.now = self.queued = self.idle = 0.0

    def work(self, host: float, device: float) -> None:
        self.now += host
        self.idle += max(0.0, self.now - self.queued)
        self.queued = max(self.queued, self.now) + device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(played.now, played.queued)

        def query(self) -> bool:
            return self.at <= played.now

        def synchronize(self) -> None:
            played.now = max(played.now, self.at)

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: played.work(0.0, clocks / 2e6))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(played, "now", max(played.now, played.queued)))
    monkeypatch.setattr(time, "perf_counter", lambda: played.now / 1e3)
    return played


@pytest.mark.parametrize("host", [0.01, 0.9])
def test_a_device_that_the_host_keeps_busy_never_waits(host: float, device: Played) -> None:
    assert timing.sustained_ms(lambda: device.work(host, 1.0)) == pytest.approx(1.0)
    assert device.idle == pytest.approx(host)  # before the first kernel


@pytest.mark.parametrize("host", [1.2, 40.0])
def test_with_a_slower_host_there_is_no_sustained_time(host: float, device: Played) -> None:
    assert timing.sustained_ms(lambda: device.work(host, 1.0)) is None


@pytest.mark.parametrize("host", [0.01, 1.2, 40.0])
def test_a_burst_waits_for_no_host(host: float, device: Played) -> None:
    assert timing.device_ms(lambda: device.work(host, 1.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("host", [0.01, 1.2, 40.0])
def test_each_part_of_a_burst_has_its_time(host: float, device: Played) -> None:
    parts = [lambda ms=ms: device.work(host, ms) for ms in (1.0, 3.0, 0.0)]
    assert timing.parts_ms(parts) == pytest.approx([1.0, 3.0, 0.0])


def test_the_hosts_time_counts_where_the_device_begins_idle(device: Played) -> None:
    assert timing.host_ms(lambda: device.work(0.3, 1.0)) == pytest.approx(1.3)


@pytest.mark.parametrize(("timed", "takes"), [("device_ms", 1.5), ("sustained_ms", 1.5), ("host_ms", 1.6)])
def test_clocks_settle_first(timed: str, takes: float, device: Played) -> None:
    def run() -> None:
        device.work(0.1, 1.0 if device.now < 200 else 1.5)

    assert getattr(timing, timed)(run) == pytest.approx(takes)
