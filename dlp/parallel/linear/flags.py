"""Flags: a number on the device for each tensor that a layer casts, which the cast sets to NaN where a value is not finite.

A cast can turn Inf into a finite value, which would hide the Inf from the loss and the gradients. The step boundary copies the
flags of a step and zeroes them; `dlp.parallel.model.checks` reads the copies one step later. Operands in high precision have
no flag: Inf and NaN stay in the operands, and show in the loss or in gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FORWARD = ("w", "x", "y")  # tensors that forward casts, in the order of a layer's flags
BACKWARD = ("dx", "dy")  # tensors that backward casts, from the last layer to the first


class CastName(NamedTuple):
    """A tensor of a layer that has a flag."""

    tensor: str
    member: str

    def __str__(self) -> str:
        return f"{self.tensor} of {self.member}"


class _Piece(NamedTuple):
    """A block of flags, fp32 [room]: flags of the running step, flags of the previous step, and the names of the flags in
    use."""

    now: Tensor
    closed: Tensor
    names: list[CastName]

    @property
    def left(self) -> int:
        return len(self.now) - len(self.names)


class Flags:
    """The flags of one model. Flags are allocated at the first cast of a layer, in the order of layers. The memory stays the
    same, since captured launches write to it."""

    def __init__(self) -> None:
        self.views: dict[tuple[str, str, torch.device], Tensor] = {}
        self._pieces: list[_Piece] = []

    def reserve(self, members: Sequence[str], device: torch.device, expected: int) -> None:
        """Allocate flags for all tensors of the layer with these members. `expected`: the number of members of all layers."""
        names = [
            CastName(tensor, member)
            for tensor in (*FORWARD, *BACKWARD)
            for member in (members[:1] if tensor in ("x", "dx") else members)
        ]
        piece = next((p for p in self._pieces if p.now.device == device and p.left >= len(names)), None)
        if piece is None:
            room = max(len(names), expected * len((*FORWARD, *BACKWARD)))
            with torch.inference_mode(False):  # flags are written outside of inference mode, too
                now, closed = torch.zeros(2, room, device=device).unbind()
            piece = _Piece(now, closed, [])
            self._pieces.append(piece)
        for name in names:
            self.views[name.member, name.tensor, device] = piece.now[len(piece.names)]
            piece.names.append(name)

    @torch.no_grad()
    def close(self) -> None:
        """End a step: copy the flags, and zero them for the next step."""
        for piece in self._pieces:
            piece.closed.copy_(piece.now)
            piece.now.zero_()

    @property
    def now(self) -> list[Tensor]:
        """The flags of the running step, which casts write to."""
        return [piece.now for piece in self._pieces]

    @property
    def names(self) -> list[CastName | None]:
        """The names of all flags, in the order of `now` and `closed`; None for a flag that is not in use."""
        return [name for piece in self._pieces for name in (*piece.names, *[None] * piece.left)]

    @property
    def closed(self) -> list[Tensor]:
        """The flags of the last step, on the device, until the next step ends."""
        return [piece.closed for piece in self._pieces]

    def bad_now(self) -> list[str]:
        """The names of tensors that were not finite in the last step or since the step boundary. Waits for the device."""
        both = [flag for now, closed in zip(self.now, self.closed, strict=True) for flag in (now + closed).tolist()]
        return [str(name) for _, name in bad_casts(self.names, both)]


def bad_casts(names: Sequence[CastName | None], flags: Sequence[float]) -> list[tuple[int, CastName]]:
    """The names of flags that are set, with their indices. `flags`: as `Flags.closed` returned them."""
    found = enumerate(zip(names, flags, strict=False))  # `names` may have grown since
    return [(place, name) for place, (name, flag) in found if name is not None and math.isnan(flag)]
