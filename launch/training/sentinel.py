"""Sentinel: a microbatch that runs twice must give equal bits.

    [train] sentinel = N     in every N-th step the first microbatch runs forward and backward once more, before the step

With equal weights, tokens and random state both passes give equal bits, unless a GPU, its memory or a transfer failed. Compared
are the loss, y of each module and the gradient of each parameter, by checksums of the bits (`dlp.kernels.ops.checksums`), which
any flipped bit changes. A difference ends the run before the update, on all ranks, with rank, layer, pass, device and
step, or skips the update. Under FSDP that reduces gradients once a step, the gradients of a step with several microbatches are
not compared. Weights, optimizer states and gradients take one launch for 128 tensors; each y takes one launch, because later
modules may write to its memory.

Weights and optimizer states, which a step reads before writing, must have equal bits before the first pass and after the
second; a difference of these always ends the run. In the repeated pass, ranks also compare checksums of what they send each
other (`dlp.comm.wire_checks`), so that a damaged transfer is told from a wrong computation.

A step whose bytes the ledger counts has no sentinel, which would send twice. Modules inside compiled blocks are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dlp.comm import observer
from dlp.comm.wire_checks import Damaged, WireChecks, unobserved_checksums
from dlp.parallel.model.session import session_of, without_effects
from dlp.parallel.weight.local import local_values
from launch.ranks.links import OWN

Name = tuple[str, str]  # pass, and tensor or module
Sums = list[tuple[list[Name], Tensor]]  # names of tensors, and the checksum of each, int64 [number of names]


class SentinelError(Exception):
    """Error for a microbatch that gave different bits when it ran again; the message is equal on all ranks and names the
    place."""


class Sentinel:
    """Runner and comparison of repeated microbatches.

    every     `[train] sentinel`; 0: never
    skips     whether a difference skips the update instead of ending the run
    folder    folder for both tensors of the first difference on a rank; None: tensors are not kept
    """

    def __init__(
        self, model: nn.Module, every: int, optimizer: Optimizer | None = None, *, skips: bool = False,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._model, self.every, self._optimizer = model, every, optimizer
        self._skips, self._folder = skips, folder
        self._first: Sums = []
        self._copies: dict[Name, list[Tensor]] = {}  # copies of both passes in host memory
        self._damaged: list[Damaged] = []

    def due(self, step: int) -> bool:
        """Return whether step `step`, counted from 1, has a sentinel."""
        return self.every > 0 and step % self.every == 0

    def rehearse(self, backward: Callable[[], Tensor], *, gradients: bool) -> None:
        """Run a microbatch without side effects: `backward()` runs it and returns the loss; gradients and recipe state are
        dropped. `gradients`: compare gradients of parameters as well."""
        self._copies.clear()
        checks, memory = WireChecks(), self._memory()
        alone = dist.get_world_size() == 1  # observing each operation costs the host as much as running it
        with without_effects(session_of(self._model)):
            with self.recording() as sums, nullcontext() if alone else checks:
                loss = backward()
            self.close(sums, loss, gradients=gradients)
        self._first = memory + sums
        with observer.label(**OWN):
            self._damaged = checks.damaged()
        for parameter in self._model.parameters():
            parameter.grad = None

    def _add(self, sums: Sums, tensors: Mapping[Name, Tensor]) -> None:
        """Add the checksums of tensors on one device, and keep copies of the tensors if the run has a folder for tensors."""
        values = [local_values(tensor) for tensor in tensors.values()]
        if not values:
            return
        sums.append((list(tensors), unobserved_checksums(*values)))
        if self._folder is not None:
            for name, value in zip(tensors, values, strict=True):
                self._copies.setdefault(name, []).append(value.to("cpu", copy=True))

    def _memory(self) -> Sums:
        """Checksums of weights and optimizer states on this rank, without states that are tensors of user-defined classes."""
        by_device: dict[torch.device, dict[Name, Tensor]] = {}  # counters of steps may be in host memory
        for name, parameter in self._model.named_parameters():
            states = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
            held = {f"{name} itself": parameter, **{f"{key} of {name}": x for key, x in states.items()}}
            for what, tensor in held.items():
                if type(local_values(tensor)) in (Tensor, nn.Parameter):
                    by_device.setdefault(tensor.device, {})["memory", what] = tensor
        sums: Sums = []
        for tensors in by_device.values():
            self._add(sums, tensors)
        return sums

    @contextmanager
    def recording(self) -> Iterator[Sums]:
        """Context in which y of each module is added to the sums."""
        sums: Sums = []

        def look(name: str, module: nn.Module, args: Any, y: Any) -> None:
            if torch.is_grad_enabled() and isinstance(y, Tensor) and torch._C._current_graph_task_id() == -1:
                self._add(sums, {(f"forward {len(sums)}", f"y of {name}"): y})

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
        """Add the sums of the loss and, with `gradients`, of the gradients of all parameters in the order of backward."""
        self._add(sums, {("forward", "the loss"): loss})
        named = reversed(list(self._model.named_parameters())) if gradients else ()
        grads = {("backward", f"the gradient of {name}"): p.grad for name, p in named if p.grad is not None}
        self._add(sums, grads)

    def compare(self, sums: Sums, step: int, device: torch.device) -> str:
        """Compare with the repeated microbatch, and the memory with the memory before; all ranks call it together. Waits for
        the device. Returns the difference for which the update must be skipped; "": no difference. SentinelError on all
        ranks."""
        sums = self._memory() + sums
        keys, names = ([name for names, _ in each for name in names] for each in (self._first, sums))
        same, own = keys == names, [0]
        if same:
            first, again = (torch.cat([found.to(device) for _, found in each]) for each in (self._first, sums))
            own = (first != again).nonzero().flatten().tolist()
        count = torch.tensor(len(own) + len(self._damaged), device=device)
        with observer.label(**OWN):
            dist.all_reduce(count, op=dist.ReduceOp.MAX)
        if not count.item():
            self._copies.clear()
            return ""
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        said = ""
        if self._damaged:
            said = f"{self._damaged[0]}, which arrived with other bits than were sent"
        elif own:
            said = f"{keys[own[0]][1]} in {keys[own[0]][0].split()[0]}" if same else "other modules ran"
        # The next step would read the difference; the step boundary of a skipped update takes its amaxes into delayed scales
        delayed = (session := session_of(self._model)) is not None and session.has_slots()
        stays = not same or delayed or any(keys[i][0] == "memory" for i in own)
        kept = self._keep(keys[own[0]], step) if own and same else ""
        self._copies.clear()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (said, kind, len(self._damaged), len(own), stays, kept))
        return self._react(step, told)

    def _keep(self, key: Name, step: int) -> str:
        """Write both tensors of a difference; return a clause about the file, "" if no file was asked for."""
        if self._folder is None:
            return ""
        first, second = self._copies[key]
        name = f"sentinel-step-{step}-rank{dist.get_rank()}.pt"
        try:
            torch.save({"tensor": key[1], "first": first, "second": second}, self._folder / name)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError where a file cannot be written
            return f"{name} could not be written ({str(error).partition(chr(10))[0]})"
        return f"{name} has both tensors"

    def _react(self, step: int, told: list[Any]) -> str:
        """Return the sentence about a difference if the update can be skipped, else raise SentinelError.

        told: from each rank, the first difference, the device, the numbers of damaged transfers and of differences, whether a
        difference stays after the step, and the file with both tensors
        """
        damaged = any(transfers for _, _, transfers, *_ in told)  # a damaged transfer causes all other differences
        where = [
            f"rank {rank} ({kind}): {said}, {transfers or differences} in all"
            for rank, (said, kind, transfers, differences, _, _) in enumerate(told)
            if said and bool(transfers) == damaged
        ]
        files = "".join(f"; {kept}" for *_, kept in told if kept)
        found = (
            f"step {step}: the first microbatch ran twice and gave other bits, first on {'; on '.join(where)}: a device, its "
            f"memory or a transfer failed{files}"
        )
        if self._skips and not any(stays for *_, stays, _ in told):
            return f"{found}; the update was skipped"
        raise SentinelError(f"{found}; start again from the last checkpoint without that device")
