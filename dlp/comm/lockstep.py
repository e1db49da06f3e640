"""Lockstep: ranks that share collectives must run the same forwards and steps.

A rank with fewer tokens, fewer microbatches or an empty batch leaves the other ranks waiting in a collective, without
an error.
Two checks detect this:

first step    before each forward of the model and before the first optimizer step, ranks exchange a description of the next
              action. If the descriptions differ, every rank raises RuntimeError that names the action of each rank
later steps   a thread watches the training threads. If a training thread stays at the same place inside of a pass for PATIENCE
              seconds, the log names this place and the layer that ran last

The exchange costs one small gather per forward and a wait for the device, in the first step only. The thread costs the training
thread nothing.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from dlp.comm import collectives, observer
from dlp.comm.mesh import TP
from dlp.comm.observer import CHECKS
from dlp.comm.watch import place_of

LOG = logging.getLogger("dlp")
MOST = 16  # forwards of the first step that are compared
PATIENCE = 60.0  # seconds
LOOKS = 12  # the thread looks this many times in PATIENCE seconds
# path components of files whose code runs inside of a pass
INSIDE = ("torch/distributed/", "torch/autograd/", "dlp/comm/", "dlp/parallel/")
FORWARD, STEP = 0, 1


class Lockstep:
    """Compare the actions of ranks in the first step of a model.

    `groups`: this rank's group on each mesh axis with more than one rank. On tp, the shapes of the inputs are compared
    as well."""

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        self._groups = {axis: group for axis, group in groups.items() if group.size() > 1}
        self._forwards, self.over = 0, not self._groups

    def forward(self, inputs: Any, device: torch.device, sharded: bool) -> None:
        """Compare ranks before a forward with gradients.

        `inputs`: arguments of the forward. `sharded`: FSDP shards the model, so that data-parallel ranks wait for each
            other as well.
        Raises RuntimeError on all ranks that would wait for each other."""
        if self._forwards == MOST:
            self.over = True
        if self.over:
            return
        self._forwards += 1
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        shapes = sha256(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode()).digest()
        numbers = [FORWARD, self._forwards, sum(t.numel() for t in tensors), int.from_bytes(shapes[:6], "little")]
        self._exchange(numbers, device, sharded)

    def step(self, device: torch.device, sharded: bool) -> None:
        """Compare ranks before the first optimizer step."""
        if not self.over and self._forwards:
            self._exchange([STEP, self._forwards, 0, 0], device, sharded)
        self.over = True

    def _exchange(self, numbers: list[int], device: torch.device, sharded: bool) -> None:
        for axis, group in self._groups.items():
            if axis != TP and not sharded:
                continue
            with observer.label(layer=CHECKS, purpose="other"):
                (seen,) = collectives.all_gather((torch.tensor([numbers], device=device),), (0,), group).wait()
            told = seen.view(-1, len(numbers)).tolist()
            if any(each[: 4 if axis == TP else 2] != told[0][: 4 if axis == TP else 2] for each in told):
                ranks = dist.get_process_group_ranks(group)
                does = "; ".join(f"rank {rank} {_said(each)}" for rank, each in zip(ranks, told, strict=True))
                raise RuntimeError(
                    f"ranks of {axis} do different things in the first step, and would wait for each other: {does}. They "
                    f"must run the same number of forwards and steps"
                    + (", on inputs of the same shapes" if axis == TP else "")
                    + ": give each of them as many batches (a sampler with drop_last, or the same steps per epoch)"
                )


def _said(numbers: list[int]) -> str:
    kind, forwards, values, _ = numbers
    if kind == STEP:
        return f"begins the optimizer's step after {forwards} forwards"
    return f"begins forward {forwards} of {values} values"


def check_alike(mine: Mapping[str, str], group: ProcessGroup | None, who: str) -> None:
    """Raise ValueError on all ranks of the group if ranks plan different things, since they would exchange operands in
    different formats.

    mine: this rank's plan by name of the layer. who: the caller's name, for the message."""
    if group is None or group.size() == 1:
        return
    # addresses differ between processes
    mine = {name: re.sub(r" at 0x[0-9a-f]+", "", said) for name, said in mine.items()}
    hashed, of_all = sha256(repr(mine).encode()).hexdigest(), [""] * group.size()
    dist.all_gather_object(of_all, hashed, group)
    place = next((place for place, its in enumerate(of_all) if its != of_all[0]), None)
    if place is None:
        return
    plans: list[dict[str, str]] = [{}] * len(of_all)
    dist.all_gather_object(plans, mine, group)
    first, other, ranks = plans[0], plans[place], dist.get_process_group_ranks(group)
    name = next((name for name in (*first, *other) if first.get(name) != other.get(name)), "the order of layers")
    raise ValueError(
        f"{who}: rank {ranks[place]} has another plan for {name} than rank {ranks[0]}: {other.get(name, 'nothing')}, "
        f"and rank {ranks[0]} has {first.get(name, 'nothing')}; call {who} on all ranks for the same model with the "
        f"same recipes"
    )


# ---- ranks that wait in later steps


class Watched(Protocol):
    """Attributes of a session that the thread reads."""

    last: Any
    last_pass: str
    steps: int


@dataclass
class _Stand:
    """The place of a thread, the time since which the thread is there, and whether this was logged."""

    place: Any
    since: float
    said: bool = False


class WaitWatch:
    """Watch the threads that train sessions, and call `say` with a line for a thread that waits for other ranks."""

    def __init__(self, say: Callable[[str], object] = LOG.warning) -> None:
        self._say = say
        self._sessions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._stands: weakref.WeakKeyDictionary[Any, _Stand] = weakref.WeakKeyDictionary()
        self._started = False

    def add(self, session: Watched) -> None:
        """Watch the calling thread while it trains `session`."""
        self._sessions[session] = threading.get_ident()
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, daemon=True, name="dlp-wait-watch").start()

    def _run(self) -> None:
        while True:
            time.sleep(PATIENCE / LOOKS)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Check all threads once, at time `now` in seconds."""
        for session, thread in list(self._sessions.items()):
            frame = sys._current_frames().get(thread)
            last = None if session.last is None else session.last.name
            place, offset = place_of(frame)
            stand = self._stands.get(session)
            if stand is None or stand.place != (place, offset, last, session.last_pass, session.steps):
                self._stands[session] = _Stand((place, offset, last, session.last_pass, session.steps), now)
            elif now - stand.since >= PATIENCE and not stand.said and last is not None and in_a_pass(frame):
                stand.said = True
                self._say(
                    f"rank {dist.get_rank() if dist.is_initialized() else 0} has waited for {now - stand.since:.0f} s in "
                    f"{place}, in step {session.steps + 1}; the last layer that ran is {last}, in {session.last_pass}. "
                    f"Another rank may run fewer tokens, microbatches or steps; py-spy dump shows where each rank is"
                )


def in_a_pass(frame: Any) -> bool:
    """Whether a thread is inside of a collective, autograd or a layer, not in the user's code."""
    if frame is None:
        return False
    path = frame.f_code.co_filename.replace("\\", "/")
    return any(part in path for part in INSIDE)


WATCH = WaitWatch()
