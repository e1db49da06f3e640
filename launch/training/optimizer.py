"""Optimizer of a run, by the name in `[train] optimizer`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from dlp import Plan
from dlp.optim.encodings import ENCODINGS, Encoding
from dlp.optim.invariant_adamw import InvariantAdamW
from dlp.optim.low_bit_adamw import LowBitAdamW
from dlp.optim.muon import MUON, Muon, is_matrix_of_block
from launch.config.run_config import Config
from launch.config.sections import Train
from launch.settings.schema import ConfigError

Groups = list[dict[str, Any]]
FP32 = 8.0  # bytes of optimizer state per element, if exp_avg and exp_avg_sq are fp32


Rate = float | torch.Tensor  # learning rate; a tensor on the device if a CUDA graph reads it


def adamw(groups: Groups, train: Train, lr: Rate) -> Optimizer:
    """Return the fused AdamW of torch; for invariant runs on CPUs, an AdamW whose results do not depend on the sharding."""
    if train.invariant and groups[0]["params"][0].device.type == "cpu":
        return InvariantAdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    capturable = isinstance(lr, torch.Tensor)
    return AdamW(groups, lr=lr, betas=train.betas, eps=train.eps, fused=True, capturable=capturable)


def low_bit(encoding: Encoding, groups: Groups, train: Train, lr: Rate) -> LowBitAdamW:
    return LowBitAdamW(groups, encoding, lr=train.lr, betas=train.betas, eps=train.eps)


def muon(groups: Groups, train: Train, lr: Rate) -> Muon:
    return Muon(groups, lr=lr, betas=train.betas, eps=train.eps)


OPTIMIZERS: dict[str, Callable[[Groups, Train, Rate], Optimizer]] = {
    "adamw": adamw,
    MUON: muon,
    **{name: partial(low_bit, encoding) for name, encoding in ENCODINGS.items()},
}


def state_bytes(name: str, parameter: str, shape: Sequence[int], dp_shard: int) -> float:
    """Return the bytes of optimizer state per element of a parameter.

    name: `[train] optimizer`. shape: shape before FSDP shards the parameter. dp_shard: number of ranks over which FSDP shards.
    """
    if name == MUON and is_matrix_of_block(parameter, shape):
        return FP32 / 2
    encoding = ENCODINGS.get(name)
    if encoding is None or encoding.keeps_fp32(shape, fsdp_shards(shape, dp_shard)) is not None:
        return FP32
    return encoding.state_bytes


def fsdp_shards(shape: Sequence[int], dp_shard: int) -> tuple[int, ...]:
    return dp_shard, *(1 for _ in shape[1:])


def check_installed(config: Config) -> None:
    """Raise ConfigError if the package of the optimizer is not installed."""
    if config.train.optimizer in ENCODINGS and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{config.source}: [train] optimizer: {config.train.optimizer!r} stores averages in encodings of torchao, "
            f"which is not installed: pip install 'dlp[ao]', or, to leave torch as it is, pip install --no-deps "
            f"'torchao>=0.18,<0.19'"
        )


def make_optimizer(model: nn.Module, config: Config, device: torch.device, *, capturable: bool = False) -> Optimizer:
    """Return the optimizer of all parameters that require gradients. Only matrices have weight decay.

    `optimizer.step()` divides gradients by the attribute `grad_scale`, and does nothing if the attribute `found_inf` is 1; both
    are fp32 []. `capturable`: the step can be captured in a CUDA graph, and reads the learning rate from the device.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    by_muon = {n for n, p in named if config.train.optimizer == MUON and is_matrix_of_block(n, p.shape)}
    decay = config.train.weight_decay
    groups: Groups = [
        {"params": [p for n, p in named if n in by_muon], "weight_decay": decay, "matrices": True},
        {"params": [p for n, p in named if n not in by_muon and p.dim() >= 2], "weight_decay": decay},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    lr = torch.tensor(config.train.lr, device=device) if capturable else config.train.lr
    return OPTIMIZERS[config.train.optimizer]([group for group in groups if group["params"]], config.train, lr)


def describe(config: Config, plan: Plan, dp_shard: int) -> Iterator[str]:
    """Yield lines of the plan about a low-bit optimizer: number of parameters on a rank whose averages (exp_avg, exp_avg_sq)
    are encoded, bytes of all averages on a rank, and parameters whose averages stay in fp32, with the reason. Yields nothing
    for other optimizers."""
    encoding = ENCODINGS.get(config.train.optimizer)
    if encoding is None:
        return
    encoded, total, fp32 = 0, 0, dict[str, list[str]]()
    for row in plan.weights:
        elements = prod(row.shape) // dp_shard
        reason = encoding.keeps_fp32(row.shape, fsdp_shards(row.shape, dp_shard))
        total += elements
        encoded += elements if reason is None else 0
        if reason is not None:
            fp32.setdefault(reason, []).append(row.name)
    size = encoding.state_bytes * encoded + FP32 * (total - encoded)
    yield (
        f"{config.train.optimizer}: averages of {encoded:,} of a rank's {total:,} parameters in blocks of {encoding.block}; "
        f"{size / 1e6:,.1f} MB, where fp32 takes {FP32 * total / 1e6:,.1f} MB"
    )
    for reason, names in fp32.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{config.train.optimizer}: fp32 averages for {names[0]}{more}: {reason}"
