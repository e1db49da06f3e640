"""Real runs by `python -m launch.local` (torchrun in its own process): killed ranks, SIGTERM, resume, a refusal.

One run is killed, resumed, killed again, stopped, and resumed to its end; its losses must be those of a run that was
left alone. The rest of what a run does is tested in the pool (tests/multigpu), where a run costs less than a second.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.config import Config
from tests import training

ROOT = Path(__file__).parents[1]
STEPS = 60


class Run:
    """A training run as a user starts it, in its own session; on 2 CPU ranks."""

    def __init__(self, config: Config) -> None:
        self.config, folder = config, Path(config.run.dir)
        self.checkpoints = folder / "checkpoints"
        self.output = folder.parent / "output.txt"
        settings = [f"--train.steps={STEPS}", "--checkpoint.every=10", "--train.eval_every=1000"]
        command = [sys.executable, "-m", "launch.local", "--ranks=2", str(folder.parent / "small.toml"), *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def ranks(self) -> list[int]:
        """The processes of the ranks, in order."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = {}
        for pid in map(int, children):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = next((entry[5:] for entry in environment if entry.startswith(b"RANK=")), None)
            if rank is not None:
                found[int(rank)] = pid
        return [found[rank] for rank in sorted(found)]

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.output.read_text()
            time.sleep(0.02)

    def end(self, seconds: float) -> str:
        """Wait for the end, of every process; the output."""
        try:
            self.process.wait(seconds)
        finally:
            left = subprocess.run(["pgrep", "-s", str(self.process.pid)], capture_output=True, text=True).stdout.split()
            for pid in map(int, left):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"{len(left)} processes were left after {seconds} s: {self.output.read_text()}"
        return self.output.read_text()

    def steps(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.shards(tmp_path_factory.mktemp("data"))


def killed(config: Config, rank: int) -> int:
    """Kill a rank once there is a new checkpoint; all are gone within 10 s, and nothing was saved after. Its step."""
    run = Run(config)
    before = max(run.steps(), default=0)
    run.wait_for(lambda: max(run.steps(), default=0) > before)
    pids = run.ranks()
    os.kill(pids[rank], signal.SIGKILL)
    saved = run.steps()
    output = run.end(10.0)
    assert run.process.returncode == 1 and "done:" not in output
    assert f"rank {1 - rank}: lost a peer, whose own end is the cause (" in output and "Traceback" not in output
    assert f"Signal 9 (SIGKILL) received by PID {pids[rank]}" in output.partition("Root Cause")[2]
    assert run.steps() == saved and not list(run.checkpoints.glob(".step-*"))
    return max(saved)


@pytest.mark.ranks(2)
def test_killed_resumed_stopped_resumed(tmp_path, data, ranks):
    whole = training.config(
        tmp_path, data, f"--run.dir={tmp_path}/whole", f"--train.steps={STEPS}", "--train.eval_every=1000"
    )
    ranks(2).run(training.run, whole)

    config = training.config(tmp_path, data)
    first = killed(config, rank=1)
    second = killed(config, rank=0)
    assert first < second < STEPS

    run = Run(config)
    run.wait_for(lambda: f"resuming from step {second} " in run.output.read_text())
    run.wait_for(lambda: training.metrics(config).keys() > set(range(1, second + 2)))
    run.process.terminate()
    output = run.end(30.0)
    stop = re.search(r"stopped by SIGTERM at step (\d+), checkpoint (\S+)\n", output)
    assert stop is not None and run.process.returncode == 128 + signal.SIGTERM
    assert Path(stop[2]) == run.checkpoints / f"step-{stop[1]}" and max(run.steps()) == int(stop[1]) < STEPS

    run = Run(config)
    output = run.end(90.0)
    assert run.process.returncode == 0 and f"resuming from step {stop[1]} " in output
    assert output.splitlines()[-1].startswith(f"done: steps {STEPS}, validation loss ")
    assert training.metrics(config) == training.metrics(whole)
    assert training.metrics(config, "validation_loss") == training.metrics(whole, "validation_loss")


def torchrun(*arguments: str) -> tuple[int, str]:
    """Exit code and output of two ranks under torchrun itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90
    )
    return done.returncode, done.stdout


def test_a_wrong_setting_is_said_once_by_all_ranks_together(tmp_path, data):
    training.config(tmp_path, data)
    code, output = torchrun("-m", "launch.train", str(tmp_path / "small.toml"), "--mesh.dp_replicate=3")
    sentence = (
        "small.toml: [mesh] world size 2 is not a multiple of dp_replicate 3 x tp 2 = 6, so dp_shard = -1 cannot be"
    )
    assert code == 1 and output.startswith(sentence) and output.count(sentence) == 1
    assert output.count("Traceback") == 1, "torchrun's own"
    assert not (tmp_path / "run").exists()


FAULTY = """
import os
from launch import train, trainer

def train_step(self, step, original=trainer.Trainer.train_step):
    if step == 3 and os.environ["RANK"] == "1":
        raise KeyError("seventeen")
    return original(self, step)

trainer.Trainer.train_step = train_step
train.main()
"""


def test_the_rank_that_failed_first_is_the_one_shown(tmp_path, data):
    training.config(tmp_path, data)
    (tmp_path / "faulty.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{FAULTY}")
    code, output = torchrun(str(tmp_path / "faulty.py"), str(tmp_path / "small.toml"))
    assert code == 1 and "[rank1]: KeyError: 'seventeen'\n" in output and "[rank0]: " not in output
    cause = output.partition("Root Cause")[2]
    assert "rank      : 1 " in cause and "in train_step" in cause and "KeyError: 'seventeen'" in cause
    assert "KeyError: 'seventeen'" in (tmp_path / "run" / "log" / "rank1.txt").read_text()
