"""Checks that ranks that share collectives run the same forwards and steps.

If a rank has fewer tokens, fewer microbatches or an empty batch, the other ranks wait in a collective, without an error.
Two checks detect this:

first step    before the first MOST forwards of the model and before the first optimizer step, ranks exchange a description of
              their next action. If the descriptions differ, every rank raises RuntimeError, which names the action of each rank
later steps   a watch thread reads the stacks of the training threads. If a training thread does not move for PATIENCE seconds
              inside of a pass, the log names the function where it waits, and the layer that ran last

The exchange is one small all-gather per forward and group, with one wait for the device, in the first step only. The watch
thread does not slow the training threads down.
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
MOST = 16  # maximum number of forwards of the first step that are compared
PATIENCE = 60.0  # seconds until a training thread that does not move is reported
LOOKS = 12  # number of checks of the watch thread in PATIENCE seconds
# Parts of file paths; a thread whose innermost frame is in such a file is inside of a pass.
INSIDE = ("torch/distributed/", "torch/autograd/", "dlp/comm/", "dlp/parallel/")
FORWARD, STEP = 0, 1


class Lockstep:
    """Comparison of the actions of ranks in the first step of a model.

    groups   this rank's groups by mesh axis; groups of one rank are ignored. On tp, shapes and dtypes of the input tensors are
             compared too
    over     whether the comparison has ended
    """

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        self._groups = {axis: group for axis, group in groups.items() if group.size() > 1}
        self._forwards, self.over = 0, not self._groups

    def forward(self, inputs: Any, device: torch.device, sharded: bool) -> None:
        """Compare ranks before a forward with gradients. After MOST forwards, or after `step`, do nothing.

        Args:
            inputs: arguments of the forward.
            device: device of the exchange.
            sharded: whether FSDP shards the model. If not, only ranks of tp are compared, since data-parallel ranks do not
                wait for each other in a forward.

        Raises:
            RuntimeError: on all ranks of a group whose ranks describe different actions.
        """
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
        """Compare ranks before the first optimizer step, if `forward` was called, and end the comparison. `sharded`: as in
        `forward`."""
        if not self.over and self._forwards:
            self._exchange([STEP, self._forwards, 0, 0], device, sharded)
        self.over = True

    def _exchange(self, numbers: list[int], device: torch.device, sharded: bool) -> None:
        for axis, group in self._groups.items():
            if axis != TP and not sharded:
                continue
            told = gather_compared(torch.tensor(numbers, device=device), group).tolist()
            if any(each[: 4 if axis == TP else 2] != told[0][: 4 if axis == TP else 2] for each in told):
                ranks = dist.get_process_group_ranks(group)
                does = "; ".join(f"rank {rank} {_said(each)}" for rank, each in zip(ranks, told, strict=True))
                raise RuntimeError(
                    f"ranks of {axis} do different things in the first step, and would wait for each other: {does}. They "
                    f"must run the same number of forwards and steps"
                    + (", on inputs of the same shapes" if axis == TP else "")
                    + ": give each rank the same number of batches (a sampler with drop_last, or the same steps per epoch)"
                )


def gather_compared(values: Tensor, group: ProcessGroup) -> Tensor:
    """Gather values of all ranks for a comparison, [...] to [R, ...]. Observers count the bytes under the layer CHECKS."""
    with observer.label(layer=CHECKS, purpose="other"):
        (gathered,) = collectives.all_gather((values[None],), (0,), group).wait()
    return gathered


def _said(numbers: list[int]) -> str:
    kind, forwards, values, _ = numbers
    if kind == STEP:
        return f"begins the optimizer's step after {forwards} forwards"
    return f"begins forward {forwards} of {values} values"


def check_alike(mine: Mapping[str, str], group: ProcessGroup | None, who: str) -> None:
    """Raise ValueError on all ranks of the group if their plans differ, because the ranks would exchange operands in different
    formats.

    mine   plan of this rank: name of a layer -> description
    who    name of the public function that calls this check, for the message"""
    if group is None or group.size() == 1:
        return
    # memory addresses in descriptions differ between processes, and are removed
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


# ---- Watch thread of later steps


class Watched(Protocol):
    """Attributes of a session (`dlp.parallel.model.session`) that the watch thread reads.

    last        specification of the layer that ran last, with the attribute `name`; None before the first layer
    last_pass   pass of this layer, "forward" or "backward"
    steps       number of completed steps
    """

    last: Any
    last_pass: str
    steps: int


@dataclass
class _Stand:
    """Last observed state of a training thread.

    place   frame, instruction, layer, pass and step of the thread
    since   time in seconds at which the watch thread first saw this place
    said    whether the wait at this place was logged
    """

    place: Any
    since: float
    said: bool = False


class WaitWatch:
    """Watch thread for the training threads of sessions. `say`: function that logs a line about a training thread that seems to
    wait for other ranks."""

    def __init__(self, say: Callable[[str], object] = LOG.warning) -> None:
        self._say = say
        self._sessions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._stands: weakref.WeakKeyDictionary[Any, _Stand] = weakref.WeakKeyDictionary()
        self._started = False

    def add(self, session: Watched) -> None:
        """Watch the calling thread, which trains `session`, as long as `session` exists."""
        self._sessions[session] = threading.get_ident()
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, daemon=True, name="dlp-wait-watch").start()

    def _run(self) -> None:
        while True:
            time.sleep(PATIENCE / LOOKS)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Check all threads once, at time `now` in seconds. Log one line about each training thread that has been at the same
        place in a pass for PATIENCE seconds."""
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
    """Return whether the innermost frame of a thread belongs to a collective, autograd or a layer, not to the user's code."""
    if frame is None:
        return False
    path = frame.f_code.co_filename.replace("\\", "/")
    return any(part in path for part in INSIDE)


WATCH = WaitWatch()
