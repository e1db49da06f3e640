"""Sentinel: a microbatch that runs twice must give equal bits.

    [train] sentinel = N     in every N-th step the first microbatch runs forward and backward once more, before the step

With equal weights, tokens and random state both passes give equal bits, unless a GPU, its memory or a transfer failed. Compared
are checksums of the loss, of y of each module and, if a step has one microbatch, of the gradient of each parameter. A
checksum is the sum of the bits of a tensor as integers, which any flipped bit changes. A difference ends the run before the
update, on all ranks, with rank, layer, direction, device and step. Weights and optimizer states, which a step reads before
writing, must have equal bits before the first pass and after the second. In the repeated pass, ranks also compare checksums of
what they send each other (`dlp.comm.wire_checks`), so that a damaged transfer is told from a wrong computation.

A step whose bytes the ledger counts has no sentinel, which would send twice. Modules inside compiled blocks are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlp.comm import observer, wire_checks
from dlp.comm.wire_checks import Damaged, WireChecks
from dlp.parallel.model.session import session_of, without_effects
from launch.ranks.links import OWN

Sums = dict[tuple[str, str], Tensor]  # (direction, name of the tensor or module) -> checksum


class SentinelError(Exception):
    """Error for a microbatch that gave different bits when it ran again; the message is equal on all ranks and names the
    place."""


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, as integers of the size of an element, modulo 2^64; int64 []."""
    return wire_checks.checksum(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


class Sentinel:
    """Runner and comparison of repeated microbatches. `every`: `[train] sentinel`; 0: never."""

    def __init__(self, model: nn.Module, every: int, optimizer: Optimizer | None = None) -> None:
        self._model, self.every, self._optimizer = model, every, optimizer
        self._first: Sums = {}
        self._damaged: list[Damaged] = []

    def due(self, step: int) -> bool:
        """Return whether step `step`, counted from 1, has a sentinel."""
        return self.every > 0 and step % self.every == 0

    def rehearse(self, backward: Callable[[], Tensor], *, gradients: bool) -> None:
        """Run a microbatch without side effects: `backward()` runs it and returns the loss; gradients and recipe state are
        dropped. `gradients`: compare gradients of parameters as well."""
        checks, memory = WireChecks(), self._memory()
        with without_effects(session_of(self._model)):
            with self.recording() as sums, checks:
                loss = backward()
            self.close(sums, loss, gradients=gradients)
        self._first = memory | sums
        with observer.label(**OWN):
            self._damaged = checks.damaged()
        for parameter in self._model.parameters():
            parameter.grad = None

    def _memory(self) -> Sums:
        """Checksums of weights and optimizer states on this rank, without states that are tensors of user-defined classes."""
        sums: Sums = {}
        for name, parameter in self._model.named_parameters():
            states = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
            for what, tensor in {
                f"{name} itself": parameter,
                **{f"{key} of {name}": x for key, x in states.items()},
            }.items():
                held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                if type(held) in (Tensor, nn.Parameter):
                    sums["memory", what] = checksum(held).to(parameter.device)
        return sums

    @contextmanager
    def recording(self) -> Iterator[Sums]:
        """Context in which y of each module is added to the checksums."""
        sums: Sums = {}

        def look(name: str, module: nn.Module, args: Any, y: Any) -> None:
            if torch.is_grad_enabled() and isinstance(y, Tensor) and torch._C._current_graph_task_id() == -1:
                sums[f"forward {len(sums)}", f"y of {name}"] = checksum(y)

        handles = []
        for name, module in self._model.named_modules():
            inside = any(True for _ in module.children()) or module._compiled_call_impl is not None
            if not inside and not self._is_compiled(name):
                handles.append(module.register_forward_hook(lambda *given, name=name: look(name, *given)))
        try:
            yield sums
        finally:
            for handle in handles:
                handle.remove()

    def _is_compiled(self, name: str) -> bool:
        parents = name.split(".")
        above = (self._model.get_submodule(".".join(parents[:i])) for i in range(1, len(parents)))
        return any(module._compiled_call_impl is not None for module in above)

    def close(self, sums: Sums, loss: Tensor, *, gradients: bool) -> None:
        """Add the checksums of the loss and, with `gradients`, of the gradients of all parameters in the order of backward."""
        sums["forward", "the loss"] = checksum(loss)
        named = reversed(list(self._model.named_parameters()))
        for name, parameter in named if gradients else ():
            if parameter.grad is not None:
                sums["backward", f"the gradient of {name}"] = checksum(parameter.grad)

    def compare(self, sums: Sums, step: int, device: torch.device) -> None:
        """Compare with the repeated microbatch, and the memory with the memory before; all ranks call it together. Waits for
        the device. SentinelError on all ranks."""
        sums, keys = self._memory() | sums, list(self._first)
        same = keys == list(sums)
        differs = torch.tensor([not same], device=device)
        if same and keys:
            first, again = (torch.stack([each[key] for key in keys]) for each in (self._first, sums))
            differs = first != again
        own = differs.nonzero().flatten().tolist()
        count = torch.tensor(len(own) + len(self._damaged), device=device)
        with observer.label(**OWN):
            dist.all_reduce(count, op=dist.ReduceOp.MAX)
        if not count.item():
            return
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        said = ""
        if self._damaged:
            said = f"{self._damaged[0]}, which arrived with other bits than were sent"
        elif own:
            said = f"{keys[own[0]][1]} in {keys[own[0]][0].split()[0]}" if same else "other modules ran"
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (said, kind, len(self._damaged), len(own)))
        damaged = any(transfers for _, _, transfers, _ in told)  # a damaged transfer causes all other differences
        where = [
            f"rank {rank} ({kind}): {said}, {transfers or differences} in all"
            for rank, (said, kind, transfers, differences) in enumerate(told)
            if said and bool(transfers) == damaged
        ]
        raise SentinelError(
            f"step {step}: the first microbatch ran twice and gave other bits, first on {'; on '.join(where)}: a device, its "
            f"memory or a transfer failed; start again from the last checkpoint without that device"
        )
