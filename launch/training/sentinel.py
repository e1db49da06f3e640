"""Sentinel against hardware faults: a microbatch that runs twice must give bitwise equal results.

    [train] sentinel = N     in every N-th step the first microbatch runs forward and backward once more, before the step

With equal weights, tokens and random state both runs are bitwise equal, unless a GPU, its memory or a transfer failed. The
sentinel compares the loss, the output y of each module without submodules and the gradient of each parameter, by checksums of
their bits (`dlp.kernels.ops.checksums`) that any flipped bit changes. A difference ends the run on all ranks before the update,
with a message that names rank, layer, pass, device and step; or it skips the update (`[train] sentinel_action`).

Weights and optimizer states must have equal bits before the first run and after the second; a difference of these always ends
the run. During the additional run, ranks also compare checksums of the data that they send each other (`dlp.comm.wire_checks`),
to distinguish a damaged transfer from a wrong computation.

Not checked: steps whose bytes the ledger counts, since the additional run would send bytes that are not in the plan; modules
inside of compiled blocks; gradients, if FSDP reduces them once per step and the step has several microbatches.

One launch computes the checksums of up to 128 weights, optimizer states or gradients. Each y has a separate launch, because
later modules may overwrite its memory.
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
from launch.ranks import rank_objects
from launch.ranks.links import OWN

# ("memory", "forward", "forward NUMBER" or "backward"; name of the tensor in messages)
Name = tuple[str, str]
Sums = list[tuple[list[Name], Tensor]]  # names of tensors, and one checksum per name, int64 [number of names]


class SentinelError(Exception):
    """Error for a microbatch whose two runs differed in bits. The message is equal on all ranks and names rank and layer."""


class Sentinel:
    """Checks of a run by microbatches that run twice. Order of calls: `rehearse`, `recording`, `close`, `compare`.

    every      `[train] sentinel`; 0: never
    optimizer  optimizer whose states are compared; None: only weights are compared
    skips      whether a difference skips the update instead of ending the run
    folder     folder for both versions of the first tensor that differs on a rank; None: tensors are not written
    """

    def __init__(
        self, model: nn.Module, every: int, optimizer: Optimizer | None = None, *, skips: bool = False,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._model, self.every, self._optimizer = model, every, optimizer
        self._skips, self._folder = skips, folder
        self._first: Sums = []
        self._copies: dict[Name, list[Tensor]] = {}  # copies of the tensors of both runs in host memory
        self._damaged: list[Damaged] = []

    def due(self, step: int) -> bool:
        """Return whether the sentinel checks step `step`, counted from 1."""
        return self.every > 0 and step % self.every == 0

    def rehearse(self, backward: Callable[[], Tensor], *, gradients: bool) -> None:
        """Do the additional run: call `backward`, which runs a microbatch forward and backward and returns the loss, and store
        the checksums. Gradients and changes of the recipe state are dropped. `gradients`: include gradients of parameters."""
        self._copies.clear()
        checks, memory = WireChecks(), self._memory()
        alone = dist.get_world_size() == 1  # then `WireChecks`, which slows the host down, has nothing to check
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
        """Append the checksums of tensors on one device to `sums`, and copy the tensors to the host if `folder` is set."""
        values = [local_values(tensor) for tensor in tensors.values()]
        if not values:
            return
        sums.append((list(tensors), unobserved_checksums(*values)))
        if self._folder is not None:
            for name, value in zip(tensors, values, strict=True):
                self._copies.setdefault(name, []).append(value.to("cpu", copy=True))

    def _memory(self) -> Sums:
        """Return the checksums of weights and optimizer states on this rank. Local tensors of a subclass are left out."""
        by_device: dict[torch.device, dict[Name, Tensor]] = {}  # step counters of the optimizer may be in host memory
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
        """Return a context that yields a list, and appends the checksum of the output y of each module to the list. Modules
        with submodules and modules inside of compiled blocks are left out."""
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
        """Append the checksum of the loss and, with `gradients`, one checksum for each gradient of a parameter, in about the
        order of backward."""
        self._add(sums, {("forward", "the loss"): loss})
        named = reversed(list(self._model.named_parameters())) if gradients else ()
        grads = {("backward", f"the gradient of {name}"): p.grad for name, p in named if p.grad is not None}
        self._add(sums, grads)

    def compare(self, sums: Sums, step: int, device: torch.device) -> str:
        """Compare the checksums `sums` of the microbatch in the step with those of the additional run; compare the checksums of
        weights and optimizer states as well. Collective; waits for the device.

        Returns "" if nothing differs, else a sentence about the difference; then the caller must skip the update. Raises
        SentinelError on all ranks if a difference must end the run.
        """
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
        # A skipped update does not remove these differences: damaged memory, and amaxes that enter the delayed scales
        delayed = (session := session_of(self._model)) is not None and session.has_slots()
        stays = not same or delayed or any(keys[i][0] == "memory" for i in own)
        kept = self._keep(keys[own[0]], step) if own and same else ""
        self._copies.clear()
        mine = said, kind, len(self._damaged), len(own), stays, kept
        return self._react(step, rank_objects.from_all(mine))

    def _keep(self, key: Name, step: int) -> str:
        """Write both versions of the tensor `key` into `folder`, and return a clause about the file; "" without `folder`."""
        if self._folder is None:
            return ""
        first, second = self._copies[key]
        name = f"sentinel-step-{step}-rank{dist.get_rank()}.pt"
        try:
            torch.save({"tensor": key[1], "first": first, "second": second}, self._folder / name)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the file cannot be written
            return f"{name} could not be written ({str(error).partition(chr(10))[0]})"
        return f"{name} has both tensors"

    def _react(self, step: int, told: list[Any]) -> str:
        """Return the sentence about a difference if the update can be skipped, else raise SentinelError.

        told: for each rank, a tuple (first difference, device, number of damaged transfers, number of differences, whether a
        difference would remain after a skipped update, clause about the file)
        """
        damaged = any(transfers for _, _, transfers, *_ in told)  # then all other differences follow from the transfer
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
