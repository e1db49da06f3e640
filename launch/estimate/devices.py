"""GPUs by name, for `--plan --device`: kind and memory."""

from __future__ import annotations

from dataclasses import dataclass

from dlp.quant.gemm import DEVICES

USABLE = 0.92  # of a board's memory: the rest is the driver's, NCCL's, and lost between tensors


@dataclass(frozen=True)
class Board:
    """kind: one of `dlp.quant.gemm.DEVICES`. memory: bytes that torch reports as total."""

    kind: str
    memory: float

    @property
    def usable(self) -> float:
        return USABLE * self.memory


BOARDS = {
    "h100": Board("sm_90", 84.9e9), "h200": Board("sm_90", 150.0e9), "b200": Board("sm_100", 191.5e9),
}  # fmt: skip
NAMES = (*DEVICES, *BOARDS)


def kind_of(device: str) -> str:
    """Of a kind of device, or a board."""
    return BOARDS[device].kind if device in BOARDS else device


def board_of(device_name: str) -> str:
    """The board of a device's name as torch reports it ("NVIDIA H200": "h200"); empty for a device that is not in the table."""
    words = device_name.lower().split()
    return next((board for board in BOARDS if board in words), "")
