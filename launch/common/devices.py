"""Table of GPUs by name: kind, memory and peak FLOP/s, for `--plan --device` and the model FLOPs utilization (MFU)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dlp.quant.gemm import DEVICES

USABLE = 0.92  # share of GPU memory for tensors; the rest is for the driver, NCCL and fragmentation


@dataclass(frozen=True)
class Board:
    """Properties of one GPU product.

    kind        compute capability, one of `dlp.quant.gemm.DEVICES`
    memory      total memory as torch reports it, in bytes
    bf16_peak   dense bf16 FLOP/s in the data sheet (SXM)
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
    """Return the kind of `device`. `device` is a key of `BOARDS` ("h200") or already a kind ("sm_90")."""
    return BOARDS[device].kind if device in BOARDS else device


def board_of(device_name: str) -> str:
    """Return the key of `BOARDS` for a device name of torch ("NVIDIA H200": "h200"); "" for an unknown device."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    return next((board for board in BOARDS if board in words), "")
