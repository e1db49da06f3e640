"""Flags: which tensors of which layers were not finite when they were cast.

A scale makes something finite of an Inf, so a run may go on with it and nothing shows. Hence a number on the device for
each tensor that a layer casts, 0, which the cast itself turns into NaN where a value is NaN or Inf: no launch more, and
nobody waits.

    Flags            of a model; casts write to them
    step boundary    sets those of the step aside, and begins anew with 0
    NonFiniteWatch   reads them one step later, so that nobody waits, and raises or warns (`dlp.attach(on_nonfinite=...)`)

Operands in high precision have no flag: they hand Inf and NaN on, which the loss or the gradients then show.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ACTIONS = ("raise", "warn", "ignore")
LOG = logging.getLogger("dlp")

FORWARD = ("w", "x", "y")  # tensors that forward casts, in the order in which a layer's flags lie
BACKWARD = ("dx", "dy")  # as backward finds them when it goes from the last to the first
SHARED = ("x", "dx")  # by the members of a layer


class Name(NamedTuple):
    """A tensor of a layer, as flags tell it."""

    tensor: str
    member: str

    def __str__(self) -> str:
        return f"{self.tensor} of {self.member}"


class _Piece(NamedTuple):
    """Some flags, fp32 [room]: those of the step that runs, and of the one before; and what the first of them are of."""

    now: Tensor
    closed: Tensor
    names: list[Name]

    @property
    def left(self) -> int:
        return len(self.now) - len(self.names)


class Flags:
    """Those of a model. They are made when a layer first casts, layer after layer in that order, and stay where they are:
    launches that were taken down or captured keep writing to them."""

    def __init__(self) -> None:
        self.views: dict[tuple[str, str, torch.device], Tensor] = {}
        self._pieces: list[_Piece] = []

    def reserve(self, members: Sequence[str], device: torch.device, expected: int) -> None:
        """Flags for all tensors of a layer of these members, of `expected` in the whole model."""
        names = [
            Name(tensor, member)
            for tensor in (*FORWARD, *BACKWARD)
            for member in (members[:1] if tensor in SHARED else members)
        ]
        piece = next((p for p in self._pieces if p.now.device == device and p.left >= len(names)), None)
        if piece is None:
            room = max(len(names), expected * len((*FORWARD, *BACKWARD)))
            with torch.inference_mode(False):  # whatever runs first, others will write to them
                now, closed = torch.zeros(2, room, device=device).unbind()
            piece = _Piece(now, closed, [])
            self._pieces.append(piece)
        for name in names:
            self.views[name.member, name.tensor, device] = piece.now[len(piece.names)]
            piece.names.append(name)

    @torch.no_grad()
    def close(self) -> None:
        """A step ends: its flags are set aside, those of the next are 0."""
        for piece in self._pieces:
            piece.closed.copy_(piece.now)
            piece.now.zero_()

    @property
    def now(self) -> list[Tensor]:
        """The flags of the step that runs, which casts write to."""
        return [piece.now for piece in self._pieces]

    @property
    def names(self) -> list[Name | None]:
        """What the flags are of, in the order of `now` and `closed`; None for those that are of nothing yet."""
        return [name for piece in self._pieces for name in (*piece.names, *[None] * piece.left)]

    @property
    def closed(self) -> list[Tensor]:
        """The flags of the last step, on the device until the next one ends."""
        return [piece.closed for piece in self._pieces]

    def bad_now(self) -> list[str]:
        """What was not finite in the last step or since its boundary. Waits for the device."""
        both = [flag for now, closed in zip(self.now, self.closed, strict=True) for flag in (now + closed).tolist()]
        return [str(name) for _, name in bad(self.names, both)]


class First(NamedTuple):
    """Of the casts of a step that met a NaN or Inf, the first: in forward, if one did there, else in backward. The least of
    several ranks' comes first. `place`: among all tensors in the order of that pass; `total`: how many there are."""

    backward: bool
    place: int
    rank: int
    name: Name
    total: int

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        others = f", the first of {self.total} in {way}" if self.total > 1 else f", in {way}"
        before = "; every x and w that was cast was finite" if self.backward else ""
        return f"{self.name} held a NaN or Inf when it was cast on rank {self.rank}{others}{before}"


def bad(names: Sequence[Name | None], flags: Sequence[float]) -> list[tuple[int, Name]]:
    """Those that were not finite, with their places. `flags`: of `names`, as `Flags.closed` had them."""
    found = enumerate(zip(names, flags, strict=False))  # `names` may have grown since
    return [(place, name) for place, (name, flag) in found if name is not None and math.isnan(flag)]


def first(names: Sequence[Name | None], flags: Sequence[float], rank: int) -> First | None:
    """The first of those that were `bad`, None where there are none."""
    found = bad(names, flags)
    forward = [(place, name) for place, name in found if name.tensor in FORWARD]
    if forward:
        return First(False, forward[0][0], rank, forward[0][1], len(forward))
    return First(True, len(flags) - found[-1][0], rank, found[-1][1], len(found)) if found else None


class OnTheWay:
    """A few numbers, as they are now, that start for the host and are read later: `read` waits for them, and for nothing
    launched after them (`tensor.tolist()` would wait for all that was launched since)."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrival: torch.cuda.Event | None = None
        if not numbers.is_cuda:
            self._host = numbers.clone()
        else:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def read(self) -> list[float]:
        if self._arrival is not None:
            self._arrival.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


class NonFiniteWatch:
    """Reads the flags of a model at step boundaries. `action`: one of ACTIONS."""

    def __init__(self, flags: Flags, action: str) -> None:
        self._flags, self._action = flags, action
        self._coming: tuple[int, list[OnTheWay]] | None = None

    def close(self) -> None:
        """A step is over."""
        self._flags.close()

    def look(self, steps: int) -> None:
        """After the boundary of step number `steps`: look at the flags of the one before. Raises FloatingPointError. Where
        the boundary is being captured nothing is read, as nothing could be in a replay."""
        if self._action == "ignore" or _capturing():
            return
        before = self._coming
        self._coming = steps, [OnTheWay(closed) for closed in self._flags.closed]
        if before is not None:
            step, coming = before
            self._tell(step, [flag for part in coming for flag in part.read()])

    def _tell(self, step: int, flags: list[float]) -> None:
        found = first(self._flags.names, flags, dist.get_rank() if dist.is_initialized() else 0)
        if found is None:
            return
        if self._action == "raise":
            raise FloatingPointError(f"step {step}: {found}; to go on after it, dlp.attach(..., on_nonfinite='warn')")
        LOG.warning("step %d: %s", step, found)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
