"""GPUs by name, for `--plan --device`: kind and memory."""

from __future__ import annotations

from dataclasses import dataclass

from dlp.quant.gemm import DEVICES

USABLE = 0.92  # usable share of a board's memory; the rest is used by the driver and NCCL, and lost to fragmentation


@dataclass(frozen=True)
class Board:
    """A GPU board. kind: one of `dlp.quant.gemm.DEVICES`. memory: total bytes as torch reports them."""

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
    """The kind of a device given by kind or by board."""
    return BOARDS[device].kind if device in BOARDS else device


def board_of(device_name: str) -> str:
    """The board for a device name as torch reports it ("NVIDIA H200": "h200"); "" for a device that is not in the
    table."""
    words = device_name.lower().split()
    return next((board for board in BOARDS if board in words), "")
