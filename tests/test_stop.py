"""End of a process: SIGTERM sets a flag, a time limit ends a process that reaches no step boundary, and a refusal is
one sentence and exit code 1. No ranks, no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    """Start a process, and wait for its first line."""
    program = [sys.executable, "-c", f"import sys, time\nfrom launch.ranks import process_exit as stop\n{code}"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        program, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str], number: int | None = None) -> tuple[str, str, int]:
    """Send the signal `number`, if there is one, and wait for the end of the process; return stdout, stderr and the exit
    code."""
    if number is not None:
        process.send_signal(number)
    out, err = process.communicate(timeout=20)
    return out, err, process.returncode


LOOP = """
flag = stop.StopFlag(patience=1.0, waits=lambda: ["rank 0 waits for rank 1"])
flag.watch()
print("ready", flush=True)
for _ in range({tenths}):
    time.sleep(0.1)
    if {beats}: flag.beat()
print(flag.requested)
"""


def test_a_run_that_reaches_its_boundaries_goes_on_and_knows():
    assert ended(start(LOOP.format(beats=True, tenths=16)), signal.SIGTERM) == ("True\n", "", 0)


def test_a_run_that_hangs_after_sigterm_is_ended():
    said = "no step boundary within 1 s of SIGTERM, for example because a peer has exited"
    expected = "", f"{said}; rank 0 waits for rank 1; leaving\n", 128 + signal.SIGTERM
    assert ended(start(LOOP.format(beats=False, tenths=100)), signal.SIGTERM) == expected


SAVING = """
flag = stop.StopFlag(patience=0.5)
flag.watch()
print("ready", flush=True)
with flag.saving():
    for _ in range(15): time.sleep(0.1)
print(flag.requested, flush=True)
for _ in range(100): time.sleep(0.1)
"""


def test_a_save_may_take_longer_and_what_follows_may_not():
    out, err, code = ended(start(SAVING), signal.SIGTERM)
    assert (out, code) == ("True\n", 128 + signal.SIGTERM)
    assert err.startswith("no step boundary within 0.5 s of SIGTERM, ")


def test_ctrl_c_ends_a_rank_without_a_word():
    assert ended(start(LOOP.format(beats=True, tenths=16)), signal.SIGINT) == ("", "", -signal.SIGINT)


def test_other_signals_do_not_count():
    code = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)" + LOOP.format(beats=False, tenths=16)
    assert ended(start(code), signal.SIGUSR1) == ("False\n", "", 0)


REFUSE = """
stop.RANK_0_FIRST = 0.5
stop.StopFlag().watch()
print("ready", flush=True)
stop.refuse("it does not fit")
"""


@pytest.mark.parametrize(("rank", "said"), [("0", "it does not fit\n"), ("1", "rank 1: it does not fit\n")])
def test_a_refusal_is_a_sentence_and_exit_code_1(rank, said):
    assert ended(start(REFUSE, RANK=rank)) == ("", said, 1)


def test_other_ranks_leave_the_sentence_to_rank_0_when_torchrun_ends_them():
    process = start(REFUSE.replace("0.5", "30"), RANK="1")
    time.sleep(0.3)
    assert ended(process, signal.SIGTERM) == ("", "", -signal.SIGTERM)


def test_an_exception_is_shown_and_ends_the_process_at_once():
    code = """
import threading
stop.leave_after_exceptions()
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
raise KeyError("seventeen")
"""
    out, err, returned = ended(start(code))
    assert returned == 1 and out == "" and err.startswith("Traceback") and err.endswith("'seventeen'\n")


HUNG = """
stop.RANK_0_FIRST = 0.5
flag = stop.StopFlag()
flag.watch()
print("ready", flush=True)
stop.end_hung(["rank 0: step 3", "rank 1: step 2"], 5.0, flag)
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_run_that_hangs_ends_with_the_place_of_each_rank(rank):
    said = "no rank has made progress within the allowed time ([run] hang_after = 5 s); the run hangs and ends here:"
    assert ended(start(HUNG, RANK=rank)) == ("", f"{said}\nrank 0: step 3\nrank 1: step 2\n", 1)


def test_a_hung_rank_leaves_the_words_to_rank_0_when_torchrun_ends_it():
    assert ended(start(HUNG.replace("0.5", "30"), RANK="1"), signal.SIGTERM) == ("", "", 1)
