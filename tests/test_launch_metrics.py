"""Metrics and plots of a run, without a device: FLOPs, peaks, the file, the progress bar, the picture."""

import json
import os
import pty
import sys
import termios
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from launch.config.run_config import load
from launch.models.decoder import flops_per_token
from launch.models.settings import Model
from launch.plot import main
from launch.report import metrics
from launch.report.metrics import (
    MetricsError,
    Progress,
    drop_after,
    peak_flops,
    peak_memory,
    peak_of,
    read_metrics,
    tell,
)
from launch.report.plots import draw, labels, series, smooth, write_plot
from launch.report.recorder import Recorder
from launch.report.run_dir import RunDir
from tests.command import command

CPU = torch.device("cpu")


def test_flops_of_matmuls_are_six_per_parameter_and_of_attention_by_hand() -> None:
    model = Model(layers=3, hidden=8, ffn=20, heads=4, kv_heads=2, head_dim=6, vocab=32)
    shapes = [(8, 24), (8, 12), (8, 12), (24, 8), (8, 20), (8, 20), (20, 8)]
    matmul = 3 * sum(nn.Linear(*shape, bias=False).weight.numel() for shape in shapes) + 32 * 8
    scores = 2 * 4 * 6 * 100  # FLOPs of q k^T for one query, 100 keys and all heads; the product with v takes as many
    assert flops_per_token(model, 100) == 6 * matmul + 3 * 3 * (scores + scores)


def test_flops_of_the_billion_parameter_model() -> None:
    """All 1.236 billion parameters except the norms are in matrix products: the embedding is tied to the head."""
    config = load("llama3_1b")
    assert flops_per_token(config.model, 0) / 6 == pytest.approx(1.2358e9, rel=1e-3)
    assert flops_per_token(config.model, 4096) == pytest.approx(7.41e9 + 12 * 16 * 2048 * 4096, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_peak_by_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_a_cpu_has_memory_and_no_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
    before = peak_memory(torch.device("cpu"))
    filled = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_memory(torch.device("cpu")) >= before > filled.numel()
    assert before < 64 << 30, "bytes, not kilobytes of bytes"


def test_a_torn_last_line_is_not_a_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    path.write_text("")
    assert read_metrics(path) == []


@pytest.mark.parametrize("line", ["", "[1]", '{"loss": 1.0}', '{"step": "7"}', "\0\0", "\udcff"])
def test_another_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n'.encode(errors="surrogateescape"))
    with pytest.raises(MetricsError, match=r"/metrics.jsonl, line 2: not a record.*; remove that line$"):
        read_metrics(path)


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    drop_after(path, 0)
    assert path.read_text() == ""
    path.write_text("".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 6)) + '{"step": 6')
    drop_after(path, 3)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(path)[2]["loss"] == 1 / 3 and path.read_text().endswith("\n")
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_progress_prints_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(10, first=3)
    progress.show(4, "loss 2.1")
    progress.tell(4, "validation 2.3")
    tell("step 4: said")
    progress.show(10, "loss 2.0")
    progress.close()
    lines = ["step 4/10: loss 2.1", "step 4/10: validation 2.3", "step 4: said", "step 10/10: loss 2.0"]
    assert capsys.readouterr() == ("".join(f"{line}\n" for line in lines), "")


def test_lines_are_few_without_a_terminal_and_say_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter(range(0, 10**6, 60))  # one minute between two reads of the clock
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(now))
    progress = Progress(35, 2, every=10)
    for step in range(3, 36):
        progress.show(step, f"loss {step}")
    lines = ["step 3/35: loss 3", "step 10/35: loss 10, 06:15 left", "step 20/35: loss 20, 02:30 left"]
    lines += ["step 30/35: loss 30, 00:42 left", "step 35/35: loss 35"]
    assert capsys.readouterr().out.splitlines() == lines


def pieces(terminal: int) -> Iterator[bytes]:
    """Yield the output written to a terminal, piece by piece, until the other side closes the terminal."""
    with suppress(OSError):  # an OSError signals the end
        while piece := os.read(terminal, 1 << 16):
            yield piece


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(sys, "stdout", terminal)
        progress = Progress(10, 3)
        progress.show(6, "loss 2.1")
        tell("a line of the log")
        progress.tell(6, "validation 2.3")
        progress.close()
    shown = b"".join(pieces(ours)).decode()
    os.close(ours)
    assert " 30%|" in shown and " 6/10 [" in shown and "loss 2.1" in shown
    lines = [line.rpartition("\r")[2] for line in shown.split("\r\n")]
    assert "a line of the log" in lines and "step 6/10: validation 2.3" in lines, "nothing sticks to the bar"


def test_a_pipe_gets_lines_though_stderr_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        Progress(10).show(1, "loss 2.1")
    os.close(ours)
    assert capsys.readouterr().out == "step 1/10: loss 2.1\n"


def make_run(folder: Path, steps: int) -> Path:
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [
        {"step": step, "loss": 5 / step, "tokens_per_second": 1000 + step, "gradient_norm": 1 / step, "lr": 1e-3}
        for step in range(1, steps + 1)
    ]
    records.insert(steps // 2, {"step": steps // 2, "validation_loss": 3.0})
    for step in (1, steps // 2, steps):
        records.append({"step": step, "swap": {"recipe": "fp8_delayed(amax_history_len=4)", "layers": 28}})
    records.insert(0, {"step": 0, "baseline": {"name": "byte-bigram", "loss": 2.432, "unit": "nats/byte"}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_plot_shows_what_a_run_is_judged_by(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 100)
    (run / "config.toml").write_text(
        '[[groups]]\nname = "default"\nrecipe = "nvfp4"\n[[groups]]\nname = "edges"\nrecipe = {name = "bf16"}\n'
    )
    figure = draw([run])
    figure.canvas.draw()
    assert figure.get_suptitle() == "run: nvfp4 (default), bf16 (edges)"
    loss, *below = figure.axes
    assert [axes.get_ylabel() for axes in below] == ["gradient norm", "learning rate", "tokens/s"]
    assert loss.get_ylabel() == "loss, nats/byte"
    (bigram,) = (line for line in loss.lines if line.get_label() == "byte-bigram, 2.432")
    assert list(bigram.get_ydata()) == [2.432, 2.432]
    bottom, top = loss.get_ylim()
    assert -0.2 < bottom < 0.05 and 3.0 < top < 3.5, "the first losses, of 5, are left out"


def test_a_plot_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 20)
    (run / "loss.png").mkdir()
    said: list[str] = []
    recorder = Recorder(load("tiny"), cast(RunDir, Namespace(path=run, leader=True, say=said.append)), CPU, 1)
    recorder.validation(20, 1.5)
    assert said == [f"{run / 'loss.png'} could not be written (Is a directory); the run goes on without it"]
    assert read_metrics(run / "metrics.jsonl")[-1]["validation_loss"] == 1.5


def test_swap_labels_and_legend_lie_where_nothing_is_hidden(tmp_path: Path) -> None:
    figure = draw([make_run(tmp_path / name, 100) for name in ("a", "b")])
    figure.axes[0].set_xlim(1, 100)  # no margin: the first and the last swap are on the frame
    figure.canvas.draw()
    loss, differences, *_ = figure.axes
    frame = loss.get_window_extent()
    assert len(loss.texts) == 6
    for text in loss.texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
    (legend,) = figure.legends
    assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert differences.get_ylabel() == "loss - loss of\na"


def test_plot_of_several_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, steps) for name, steps in (("bf16", 20), ("fp8", 30))]
    sizes = set()
    for chosen in (runs[:1], runs):
        write_plot(chosen, tmp_path / "loss.png")
        picture = (tmp_path / "loss.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
        sizes.add(len(picture))
    assert len(sizes) == 2


def test_plot_program(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 5)
    main([str(run), "--out", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").exists()
    with pytest.raises(ValueError, match=r"none/metrics.jsonl: no metrics found, expected the folder of a run"):
        main([str(tmp_path / "none"), "--out", str(tmp_path / "b.png")])
    assert not (tmp_path / "b.png").exists()
    missing = tmp_path / "nowhere" / "a.png"
    refused = command("launch.plot", str(run), "--out", str(missing))
    assert refused == (1, "", f"{missing}: No such file or directory; choose another file or folder\n")


def test_series_and_labels(tmp_path: Path) -> None:
    records = read_metrics(make_run(tmp_path / "a" / "run", 4) / "metrics.jsonl")
    assert series(records, "loss") == ([1, 2, 3, 4], [5.0, 2.5, 5 / 3, 1.25])
    assert series(records, "validation_loss") == ([2], [3.0])
    assert labels([Path("x/a"), Path("x/b")]) == ["a", "b"]
    assert labels([Path("x/a"), Path("y/a")]) == ["x/a", "y/a"]


def test_smoothing_keeps_straight_lines_and_follows_a_change_without_lag() -> None:
    assert smooth([2.0] * 30) == pytest.approx([2.0] * 30)
    assert smooth([1.0, 5.0]) == [1.0, 5.0]
    falling = [5 - 0.01 * step for step in range(200)]
    assert smooth(falling) == pytest.approx(falling)
    smoothed = smooth([2.0] * 100 + [1.0] * 100)
    assert (
        smoothed[90] == pytest.approx(2)
        and smoothed[99] + smoothed[100] == pytest.approx(3.0)
        and smoothed[110] == pytest.approx(1)
    )
    noisy = [2.0 + (-1) ** step for step in range(200)]
    assert max(abs(value - 2) for value in smooth(noisy)) < 0.5, "at the ends too"
