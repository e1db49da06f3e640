"""Runs with one process per rank: a failure, a killed rank, SIGTERM, resume, a refusal.

One run fails on two "hosts". It resumes on one host and is killed, resumes and is stopped by SIGTERM, and then is
resumed by ranks without torchrun, which complete it. The losses must equal the losses of an uninterrupted run in the
pool of ranks. The ranks without torchrun use one store for several runs, like ranks that torchrun restarts. The
blocks of the model are `ops.Sequential`. Other tests of runs use the pool (tests/multigpu), where a run takes less
than a second. Here torchrun starts ranks as forks (`ForkedRank`), because a new interpreter needs seconds to import
torch, dlp and launch; with `--all-cases` the ranks on two "hosts" are new interpreters.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from launch.config.run_config import Config
from launch.report import plots
from tests import training
from tests.pool import forking

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
STEPS, EVERY = 20, 3
SETTINGS = [f"--train.steps={STEPS}", f"--checkpoint.every={EVERY}", "--train.eval_every=1000", "--model.fused=true"]
LONG = 240.0  # seconds; ends a test that hangs


def program(output: Path, module: str, arguments: list[str], environment: dict[str, str], fork_ranks: bool) -> None:
    """Run `python -m module arguments` in a separate session, without importing torch again. This function is the target
    of a forked process."""
    os.setsid()
    os.chdir(ROOT)
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **environment)
    torch.set_num_threads(1)  # torch was imported before the fork
    # runpy warns that the module was imported before the fork
    warnings.filterwarnings("ignore", "'.*' found in sys.modules after import of", RuntimeWarning)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    plots.write_plot = training._no_plot  # importing matplotlib and plotting take longer than the steps
    # torchrun's log of the rendezvous reads the source code of each caller, which takes seconds; no test reads this log
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    if fork_ranks:
        subprocess_handler.Popen = ForkedRank
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class ForkedRank:
    """Replacement for the `subprocess.Popen` with which torchrun starts a rank. The rank is a fork of torchrun, in a
    new session. torchrun has already imported torch; a new interpreter would need seconds to import torch and dlp."""

    def __init__(
        self, args: Sequence[str], env: dict[str, str], stdout: Any, stderr: Any, start_new_session: bool
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run(list(args[args.index("-u") + 1 :]), env, stdout, stderr))

    def _run(self, command: list[str], env: dict[str, str], stdout: Any, stderr: Any) -> int:
        """Run `-m module arguments` or `file arguments` as the interpreter does, and return the exit code. Runs in the
        fork."""
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        for stream, file in ((1, stdout), (2, stderr)):
            if file is not None:
                os.dup2(file.fileno(), stream)
        is_module = command[0] == "-m"
        sys.argv = command[is_module:]
        try:
            if is_module:
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(command[0], run_name="__main__")
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        threading._shutdown()  # waits for threads
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (LONG if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or LONG)
            time.sleep(0.02)
        return code


class Run:
    """A running program `python -m module arguments` in a separate session: torchrun with CPU ranks, or a single
    rank."""

    def __init__(
        self, folder: Path, module: str, *arguments: str, output: str = "output.txt", fork_ranks: bool = True,
        **environment: str,
    ) -> None:  # fmt: skip
        self.output_file = folder / output
        given = (self.output_file, module, list(arguments), environment, fork_ranks)
        self.process = forking().Process(target=program, args=given)
        self.process.start()

    @property
    def output(self) -> str:
        return self.output_file.read_text() if self.output_file.exists() else ""

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, rank 0 first. torchrun starts no other processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < deadline and self.process.is_alive(), self.output
            time.sleep(0.02)

    def end(self, seconds: float = LONG) -> tuple[int | None, str]:
        """Wait at most `seconds` for the program; return exit code and output. Processes of its session that are left are
        killed, and the test fails."""
        self.process.join(seconds)
        left = subprocess.run(["pgrep", "-s", str(self.process.pid)], capture_output=True, text=True).stdout.split()
        for pid in map(int, left):
            os.kill(pid, signal.SIGKILL)
        assert not left, f"{len(left)} processes were left after {seconds} s: {self.output}"
        return self.process.exitcode, self.output


def steps(config: Config) -> list[int]:
    """Return the steps of the existing checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in Path(config.run.dir, "checkpoints").glob("step-*")]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture(scope="module")
def agent() -> Iterator[dict[str, str]]:
    """The store of an agent of torchrun, with the environment of its ranks. The store outlives the ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def two_ranks(folder: Path, *arguments: str, **store: str) -> list[Run]:
    """Start two ranks with the environment that torchrun or srun sets, but without an agent. If one rank fails,
    nothing ends the other rank."""
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        **store,
    }
    command = ("launch.train", str(folder / "small.toml"), *arguments)
    return [Run(folder, *command, output=f"rank{r}.txt", RANK=r, LOCAL_RANK=r, **place) for r in ("0", "1")]


def hosts(folder: Path, fork_ranks: bool, *arguments: str) -> list[Run]:
    """Start two "hosts" with one rank each: two torchruns with a store on one of the hosts. Restarts are disabled,
    because the two agents might count restarts differently."""
    store = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    meeting = ["--rdzv-backend=c10d", store, "--rdzv-id=hosts", "--local-addr=127.0.0.1"]
    command = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", *meeting, *arguments]
    return [
        Run(folder, "torch.distributed.run", *command, output=f"host{i}.txt", fork_ranks=fork_ranks) for i in range(2)
    ]


def local(folder: Path) -> Run:
    """Start two ranks as `make pretrain` does."""
    return Run(folder, "launch.local", "--ranks=2", str(folder / "small.toml"), *SETTINGS)


FAULTY = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from launch import train
from launch.training import trainer

def train_step(self, step, original=trainer.Trainer.train_step):
    if step == {EVERY + 2} and os.environ["RANK"] == "1":
        raise KeyError("seventeen")
    return original(self, step)

trainer.Trainer.train_step = train_step
train.main()
"""


LINGERING = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from launch import train
from launch.training import trainer

def train_step(self, step, original=trainer.Trainer.train_step):
    if step == {EVERY + 2} and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, step)

trainer.Trainer.train_step = train_step
threading.Thread(target=time.sleep, args=({LONG},)).start()  # the interpreter's own end would wait for this thread
train.main()
"""


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process listens, in the format of /proc/net/tcp."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(fd))
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def failed(config: Config, folder: Path, fork_ranks: bool) -> None:
    """Rank 1, on a separate host, raises after the first checkpoint. The report names rank 1, and the other host ends
    as well."""
    (folder / "faulty.py").write_text(FAULTY)
    both = hosts(folder, fork_ranks, str(folder / "faulty.py"), str(folder / "small.toml"), *SETTINGS)
    codes, outputs = zip(*[each.end() for each in both], strict=True)
    output = "".join(outputs)
    assert codes == (1, 1), output
    assert "[rank1]: KeyError: 'seventeen'\n" in output and "[rank0]: " not in output
    assert "rank 0: lost a peer; see the peer's error for the cause (" in output
    (cause,) = [each.partition("Root Cause")[2] for each in outputs if "rank      : 1 " in each]
    assert "in train_step" in cause and "KeyError: 'seventeen'" in cause
    assert "KeyError: 'seventeen'" in Path(config.run.dir, "log", "rank1.txt").read_text()
    assert steps(config) == [EVERY]


def killed(config: Config, folder: Path) -> int:
    """Kill rank 0 after a new checkpoint, and return the step of the last checkpoint. All processes must end soon,
    without a later checkpoint. If rank 0 was writing a checkpoint, an incomplete `.step-N.tmp` remains."""
    run, before = local(folder), max(steps(config))
    run.wait_for(lambda: max(steps(config)) > before)
    pid = run.ranks()[0]
    assert run.process.pid is not None and listening(run.process.pid), "torchrun's store"
    for each in (run.process.pid, *run.ranks()):
        assert listening(each) <= {"0100007F"}, "127.0.0.1 alone"
    os.kill(pid, signal.SIGSTOP)  # so that no checkpoint is completed between the next two lines
    saved = steps(config)
    os.kill(pid, signal.SIGKILL)
    code, output = run.end(15.0)  # ranks that wait for a lost peer exit after 20 s
    assert code == 1 and f"resuming from step {before} " in output and "done:" not in output
    assert "rank 1: lost a peer; see the peer's error for the cause (" in output and "Traceback" not in output
    assert f"Signal 9 (SIGKILL) received by PID {pid}" in output.partition("Root Cause")[2]
    left = Path(config.run.dir, "checkpoints").glob(".step-*")
    assert steps(config) == saved and all(int(path.name[6:].removesuffix(".tmp")) > max(saved) for path in left)
    return max(saved)


def stopped(config: Config, folder: Path, before: int) -> int:
    """Resume the run, and send SIGTERM after a step that the previous run did not save. Return the step at which the
    run stopped."""
    run = local(folder)
    run.wait_for(lambda: f"resuming from step {before} " in run.output)
    run.wait_for(lambda: training.metrics(config).keys() > set(range(1, before + 2)))
    run.process.terminate()
    code, output = run.end()
    assert not list(Path(config.run.dir, "checkpoints").glob(".step-*")), (
        "what the run before left is removed by a save"
    )
    stop = re.search(r"stopped by SIGTERM at step (\d+), checkpoint (\S+)\n", output)
    assert stop is not None and code == 128 + signal.SIGTERM
    assert Path(stop[2]) == Path(config.run.dir, "checkpoints", f"step-{stop[1]}")
    assert max(steps(config)) == int(stop[1])
    return int(stop[1])


def to_the_end(folder: Path, agent: dict[str, str]) -> str:
    """Run two ranks to the last step, check that rank 1 prints nothing, and return the output of rank 0."""
    (code, output), other = [each.end() for each in two_ranks(folder, *SETTINGS, **agent)]
    assert code == 0 and other == (0, ""), output + other[1]
    assert f"done: steps {STEPS}, validation loss " in output
    return output


@pytest.mark.ranks(2)
def test_failed_killed_stopped_and_resumed_to_the_end(ranks, tmp_path, data, agent, request):
    whole = training.config(tmp_path, data, *SETTINGS, f"--run.dir={tmp_path}/whole")
    config = training.config(tmp_path, data)
    ranks(2).run(training.run, whole)
    failed(config, tmp_path, fork_ranks=not request.config.getoption("--all-cases"))
    second = killed(config, tmp_path)
    third = stopped(config, tmp_path, second)
    assert EVERY < second < third < STEPS

    assert f"resuming from step {third} " in to_the_end(tmp_path, agent)
    assert training.metrics(config) == training.metrics(whole)
    assert training.metrics(config, "validation_loss") == training.metrics(whole, "validation_loss")


def test_after_a_restart_all_processes_end_within_5_s_of_done(tmp_path, data):
    training.config(tmp_path, data)
    (tmp_path / "lingering.py").write_text(LINGERING)
    command = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", str(tmp_path / "lingering.py")]
    settings = [*SETTINGS, f"--train.steps={EVERY + 3}", "--checkpoint.asynchronous=true"]
    run = Run(tmp_path, "torch.distributed.run", *command, str(tmp_path / "small.toml"), *settings)
    run.wait_for(lambda: f"done: steps {EVERY + 3}, " in run.output)
    code, output = run.end(5.0)
    assert code == 0 and sum(line.startswith("plan: ") for line in output.splitlines()) == 2, output


def test_a_wrong_setting_is_said_once_by_all_ranks_together(tmp_path, data):
    """Rank 0 prints the message and ends. Rank 1 prints nothing and waits, until SIGTERM ends it. torchrun sends
    SIGTERM, as failed() and killed() show; here the test sends it."""
    training.config(tmp_path, data)
    first, other = two_ranks(tmp_path, "--mesh.dp_replicate=3")
    sentence = (
        "small.toml: [mesh] world size 2 is not a multiple of dp_replicate 3 x tp 2 = 6, so dp_shard = -1 cannot be"
    )
    code, output = first.end()
    while other.process.is_alive():  # the first SIGTERM may arrive just before the process makes SIGTERM a flag
        other.process.terminate()
        other.process.join(0.1)
    assert code == 1 and output.startswith(sentence) and output.count("\n") == 1
    assert other.end() == (-signal.SIGTERM, "")
    assert not (tmp_path / "run").exists()
