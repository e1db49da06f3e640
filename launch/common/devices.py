"""GPUs by name, for `--plan --device` and MFU: kind, memory and peak."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dlp.quant.gemm import DEVICES

USABLE = 0.92  # usable share of a board's memory; the driver and NCCL need the rest, or it is lost between tensors


@dataclass(frozen=True)
class Board:
    """Facts of one kind of board.

    kind        one of `dlp.quant.gemm.DEVICES`
    memory      bytes that torch reports as total
    bf16_peak   dense bf16 FLOP/s of the maker's data sheet (SXM)
    """

    kind: str
    memory: float
    bf16_peak: float

    @property
    def usable(self) -> float:
        return USABLE * self.memory


BOARDS = {
    "h100": Board("sm_90", 84.9e9, 989e12),
    "h200": Board("sm_90", 150.0e9, 989e12),
    "b200": Board("sm_100", 191.5e9, 2250e12),
}
NAMES = (*DEVICES, *BOARDS)


def kind_of(device: str) -> str:
    """Return the kind of a device that is given as a kind or as a board."""
    return BOARDS[device].kind if device in BOARDS else device


def board_of(device_name: str) -> str:
    """Return the board of a device name as torch reports it ("NVIDIA H200": "h200"), or "" for an unknown device."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    return next((board for board in BOARDS if board in words), "")
