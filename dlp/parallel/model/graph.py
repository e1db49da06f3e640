"""Training steps as a CUDA graph: captured once, replayed with new batches.

One call launches all device work of a step (forward, backward, collectives, clipping, the optimizer, the step boundary of the
recipes) instead of thousands of calls. Decisions of Python are made at capture, so they must be the same in every step. Numbers
that change, the batch and the learning rate, are read from memory.

    3 eager steps, capture, replay, replay, ..., one eager step (a recipe change at its boundary), 3 eager, capture, replay, ...

All steps, including eager steps, run on one side stream: torch's default stream cannot be captured, and autograd nodes run on
the stream on which they were created. The streams of FSDP, of transports and of NCCL fork from the side stream and join it in
every step, so they are captured, too. Collectives of NCCL can be captured once their communicators exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dlp.parallel.model.session import Session, stepping

# Eager steps before a capture: they create plans, buffers, communicators, optimizer state and captured passes.
WARM_UP = 3
Setting = tuple[str, Any]  # name and value of a setting of an optimizer
Result = TypeVar("Result")


class CapturedStep(Generic[Result]):
    """A step in a CUDA graph.

    Args:
        work: takes a batch (any nesting of tuples, lists and dicts of tensors) and returns tensors on the device.
        like: a batch with the shapes and dtypes of all later batches.
    """

    def __init__(self, work: Callable[[Any], Result], like: Any) -> None:
        leaves, self._form = tree_flatten(like)
        self._leaves = [each.clone() if isinstance(each, Tensor) else each for each in leaves]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        current = torch.cuda.current_stream()
        stream = None if current == torch.cuda.default_stream() else current  # None: torch uses a side stream
        mode = "thread_local"  # threads that watch process groups may call CUDA functions during the capture
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode=mode):
            self._result = work(tree_unflatten(self._leaves, self._form))

    def __call__(self, batch: Any) -> Result:
        """Run the step on `batch`. The returned tensors are overwritten by the next call."""
        leaves, form = tree_flatten(batch)
        if form != self._form or not all(map(_alike, self._leaves, leaves)):
            raise ValueError(
                f"a captured step accepts only batches like the batch of the capture, {_describe(self._leaves)}; got "
                f"{_describe(leaves)}; pad a smaller last batch, or use drop_last=True"
            )
        for into, each in zip(self._leaves, leaves, strict=True):
            if isinstance(into, Tensor):
                into.copy_(each, non_blocking=True)
        self._graph.replay()
        return self._result


def _alike(kept: Any, new: Any) -> bool:
    if isinstance(kept, Tensor):
        return isinstance(new, Tensor) and (kept.shape, kept.dtype) == (new.shape, new.dtype)
    return bool(kept == new)


def _describe(leaves: Sequence[Any]) -> str:
    return ", ".join(f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in leaves)


class Replays:
    """Decide which steps are replayed, and own the graph.

    A graph contains the kernels of the recipes at capture. The step whose boundary changes a recipe is eager, and so are the
    next WARM_UP steps; then the step is captured again.

    Args:
        sessions: sessions of the models that the step trains; more may be appended later.
        stream: the stream of all steps; None on a CPU.
    """

    capture: Any = CapturedStep

    def __init__(self, sessions: list[Session], stream: torch.cuda.Stream | None) -> None:
        self.sessions, self._stream = sessions, stream
        self._captured: Any = None
        self._advance: list[int] = []  # increase of the step count of each session in one step
        self._changes, self._warm = self._recipe_changes(), 0

    def _recipe_changes(self) -> list[int]:
        return [len(session.swaps) for session in self.sessions]

    def next(self) -> bool:
        """Begin a step, and return whether the step can be replayed, after a capture if there is no graph."""
        due, changes = any(session.swaps_next for session in self.sessions), self._recipe_changes()
        if due or changes[: len(self._changes)] != self._changes:
            self.drop()
        self._changes, self._warm = changes, self._warm + 1
        return self._warm > WARM_UP and not due

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._captured is not None

    def make(self, work: Callable[[Any], Any], like: Any) -> None:
        """Capture a step. The capture itself changes neither the model nor the step counts of sessions."""
        steps = [session.steps for session in self.sessions]
        self._captured = self.capture(work, like)
        self._advance = [session.steps - count for session, count in zip(self.sessions, steps, strict=True)]
        for session, count in zip(self.sessions, steps, strict=True):
            session.steps = count

    def __call__(self, batch: Any) -> Any:
        """Replay the captured step on `batch`, and add to the step counts of sessions."""
        assert self._captured is not None
        for session in self.sessions:
            session.look()
        result = self._captured(batch)
        for session, count in zip(self.sessions, self._advance, strict=True):
            session.steps += count
        return result

    def drop(self) -> None:
        """Free the graph and its memory. Call `drop` before NCCL communicators are destroyed: their destruction waits until the
        graph is freed."""
        self._captured, self._warm = None, 0
        for session in self.sessions:
            session.graphed.clear()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Context: run the body of the `with` block on the stream of all steps, after all earlier launches of the current
        stream. Later launches of the current stream wait for the body."""
        if self._stream is None:
            yield
            return
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            yield
        before.wait_stream(self._stream)


class GraphedStep(Generic[Result]):
    """A training step that is replayed as a CUDA graph; see `graphed_step`."""

    def __init__(self, step: Callable[..., Result], example_batch: Sequence[Any]) -> None:
        device = next((x.device for x in tree_flatten(example_batch)[0] if isinstance(x, Tensor)), torch.device("cpu"))
        if device.type != "cuda":
            raise ValueError(
                f"dlp.graphed_step: example_batch is on {device}, and a CUDA graph needs a batch on a GPU; call the "
                f"step without graphed_step on CPUs"
            )
        self._step, self._like = step, tuple(example_batch)
        self._replays = Replays([], torch.cuda.Stream(device))
        self._settings: list[Setting] = []

    def __call__(self, *batch: Any) -> Result:
        """Run one step on `batch`. Tensors of a replay's result are overwritten by the next call."""
        replays = self._replays
        with replays.stream():
            if not replays.next():
                with stepping(replays.sessions):
                    return self._step(*batch)
            if not replays.captured:
                replays.make(lambda given: self._step(*given), self._like)
                self._settings = self._constant_settings()
            elif (now := self._constant_settings()) != self._settings:
                old, new = next((old, new) for old, new in zip(self._settings, now, strict=True) if old != new)
                raise ValueError(
                    f"dlp.graphed_step: the graph holds {old[0]} = {old[1]}, and the optimizer now has {new[1]}: call reset() "
                    f"after a change; a rate that changes in each step is a CUDA tensor, given as lr and changed in place, and "
                    f"OneCycleLR needs cycle_momentum=False"
                )
            result: Result = replays(batch)
            return result

    @property
    def captured(self) -> bool:
        """Whether there is a graph. The next call replays the graph, unless a recipe change is due."""
        return self._replays.captured

    def reset(self) -> None:
        """Free the graph. The next calls warm up and capture anew. Call `reset` before `dlp.set_recipe`, before loading a
        checkpoint into other tensors, and before the process group is destroyed."""
        self._replays.drop()

    def _constant_settings(self) -> list[Setting]:
        """Return the settings of the optimizers' groups that are not tensors, which a graph contains as constants."""
        optimizers = [each for session in self._replays.sessions for each in list(session.optimizers)]
        found = [
            (name, group.get(name)) for each in optimizers for group in each.param_groups for name in each.defaults
        ]
        return [(name, value) for name, value in found if not any([isinstance(x, Tensor) for x in _each(value)])]


def _each(value: Any) -> tuple[Any, ...]:
    """Return the entries of a setting such as betas; another setting as a single entry."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def graphed_step(step: Callable[..., Result], example_batch: Sequence[Any]) -> GraphedStep[Result]:
    """Return a training step that is replayed as a CUDA graph, which removes host time from the step.

    The first three calls run `step` eagerly; the fourth call captures a graph, and all later calls replay the graph. Before
    a recipe changes (`dlp.set_recipe`), call `reset()`; the step is then captured again. Results are bitwise equal to results
    of eager steps.

    Inside `step`, Python must not depend on values on the device: no `.item()`, no printing of a tensor, no branch on a loss.
    Random numbers of torch's CUDA generator are drawn anew in each replay. The optimizer needs `capturable=True`, and a
    learning rate in a CUDA tensor if the rate changes. Validate, save and read losses outside `step`.

    Args:
        step: forward, backward, the optimizer's step and `zero_grad(set_to_none=True)`, called as `step(*batch)`. `step`
            returns tensors that stay on the device.
        example_batch: tensors on a GPU, with the shapes and dtypes of all later batches.

    Returns:
        A `GraphedStep`, called like `step`. `captured` tells whether a graph exists; `reset()` frees the graph.

    Raises:
        ValueError: if `example_batch` is not on a GPU; in a replay, for a batch of other shapes, dtypes or nesting, and if a
            setting of the optimizer that is not a tensor (a learning rate, betas, weight decay) has changed since the capture.

    Examples:
        On a GPU:

        >>> def step(x, target):  # doctest: +SKIP
        ...     loss = torch.nn.functional.mse_loss(model(x), target)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad(set_to_none=True)
        ...     return loss.detach()
        >>> step = dlp.graphed_step(step, example_batch=(x, target))  # doctest: +SKIP
        >>> for x, target in batches:  # doctest: +SKIP
        ...     loss = step(x, target)
    """
    return GraphedStep(step, example_batch)
