"""The recorder: hooks on every module without children, in the order of forward and backward.

    one rank   `Trace`      stores x, y, dy, dx, dw, db, weights, scales, loss and gradient norm, and changes no tensor
    a mesh     `Follower`   compares this rank's part of each tensor with the trace, and replaces this part by the trace's part

On a mesh, each module and the code between modules thus read the tensors of one rank, so differences do not accumulate: a
tensor that differs was computed wrongly in its own module, and its bound follows from the formats and the contraction of this
module (`dlp.proof.bounds`).

    x ──► [pre-hook] ──► module ──► [hook] ──► y
    dx ◄── [tensor hook] ◄── backward ◄── [tensor hook] ◄── dy

The hooks replace x and y by results of `_Replace`; tensor hooks on these results replace dx and dy. If several modules
read a tensor, each module gets a separate x, so that dx is the gradient of this module alone. Siblings, which must read the
same tensor, share one x.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dlp.parallel.linear.step import in_backward

GRADIENT_NAMES = {"weight": "dw", "bias": "db"}
WEIGHT_NAMES = {"weight": "w", "bias": "b"}
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class Key(NamedTuple):
    """Name of a tensor of a run.

    step     optimizer step from 0; -1 before the first step
    layer    name of the module; "" for the model
    tensor   "x", "y", "dx", "dw", "scale of x", ...
    call     index of the call, for a module that runs several times in a microbatch
    """

    step: int
    layer: str
    tensor: str
    call: int = 0


@dataclass
class Link:
    """Input or output of a module.

    value     key of the tensor
    grad      key of the gradient of the tensor
    readers   (module, call) of each reader of an input; siblings share an input
    """

    value: Key
    grad: Key
    readers: list[tuple[str, int]] = field(default_factory=list)


Take = Callable[[Key, Tensor], Tensor]  # receives a tensor, and returns the tensor with which the run continues


class _Replace(torch.autograd.Function):
    """Return a copy of `value` in place of `tensor`. Backward passes the gradient on to `tensor`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()  # a copy: FSDP would warn of a view

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Recorder:
    """Hooks of a model, which call `take` for each tensor, and `again` for tensors of recomputed forwards.

    step      current step; set by the caller
    inputs    (step, module, call) -> link of x
    outputs   (step, module, call) -> link of y
    """

    def __init__(self, model: nn.Module, take: Take, again: Take) -> None:
        self.take, self._again = take, again
        self.step = 0
        self.inputs: dict[tuple[int, str, int], Link] = {}
        self.outputs: dict[tuple[int, str, int], Link] = {}
        self._calls: Counter[tuple[bool, str]] = Counter()
        # Inputs of siblings, by ids of x and core: (x, replacement of x, link)
        self._shared: dict[tuple[int, int], tuple[Tensor, Tensor, Link]] = {}
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                plain = plain_name(name)
                before = module.register_forward_pre_hook(partial(self._before, plain), with_kwargs=True)
                self._handles += [before, module.register_forward_hook(partial(self._after, plain))]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def microbatch(self) -> None:
        """Begin the forward of a microbatch: calls of each module are counted from 0 again."""
        self._calls.clear()
        self._shared.clear()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = self._calls[in_backward(), name]
        names = iter(("x", *(f"x{i}" for i in range(1, 99))))
        core = getattr(module, "core", None)
        siblings = id(core) if core is not None and len(core.members) > 1 else 0

        def passed(x: Any) -> Any:
            return self._input(Key(self.step, name, next(names), call), x, siblings) if isinstance(x, Tensor) else x

        return tree_map(passed, (args, dict(kwargs)))

    def _input(self, key: Key, x: Tensor, siblings: int) -> Tensor:
        reader = key.layer, key.call
        known = self._shared.get((id(x), siblings))
        if known is not None:
            _, replacement, link = known
            link.readers.append(reader)
            self.inputs[key.step, key.layer, key.call] = link
            return replacement
        link = Link(key, key._replace(tensor=f"d{key.tensor}"), [reader])
        replacement = self._pass_on(x, link, self.inputs)
        if siblings:
            self._shared[id(x), siblings] = x, replacement, link
        return replacement

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        call = self._calls[in_backward(), name]
        self._calls[in_backward(), name] += 1
        names = iter(("y", *(f"y{i}" for i in range(1, 99))))

        def passed(y: Any) -> Any:
            if not (isinstance(y, Tensor) and y.is_floating_point()):
                return y
            key = Key(self.step, name, next(names), call)
            return self._pass_on(y, Link(key, key._replace(tensor=f"d{key.tensor}")), self.outputs)

        return tree_map(passed, output)

    def _pass_on(self, tensor: Tensor, link: Link, links: dict[tuple[int, str, int], Link]) -> Tensor:
        """Record `tensor`, and return the tensor with which the run continues. Integers are recorded and not replaced."""
        key = link.value
        if in_backward():
            again = self._again(key, tensor.detach())
            return _Replace.apply(tensor, again) if tensor.is_floating_point() else tensor
        if key.tensor in ("x", "y"):
            links[key.step, key.layer, key.call] = link
        value = self.take(key, tensor.detach())
        if not tensor.is_floating_point():
            return tensor
        replaced: Tensor = _Replace.apply(tensor, value)
        if replaced.requires_grad:
            replaced.register_hook(lambda grad: self.take(link.grad, grad))
        return replaced


def plain_name(name: str) -> str:
    """Return the name of a module or parameter without the names of wrappers (checkpointing, torch.compile)."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class Trace:
    """Tensors that one rank computed.

    values     key -> tensor; tensors of microbatches are concatenated
    modules    name -> module of the model
    tied       see `tied_parameters`
    recorder   hooks, and the links between tensors
    elements   number of elements of all parameters
    """

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[Key, Tensor] = {}
        self.modules = {plain_name(name): module for name, module in model.named_modules()}
        self.tied = tied_parameters(model)
        self.recorder = Recorder(model, self._take_piece, lambda key, tensor: tensor)
        self.elements = sum(parameter.numel() for parameter in model.parameters())
        self._order: dict[Key, int] = {}

    def _take_piece(self, key: Key, tensor: Tensor) -> Tensor:
        """Record a tensor of a module, concatenated with the tensors of earlier microbatches."""
        before = self.values.get(key)
        if before is None or not tensor.dim():
            return self.add(key, tensor)
        self.values[key] = torch.cat([before, tensor.detach()])
        return tensor

    def add(self, key: Key, value: Tensor) -> Tensor:
        """Record a tensor, such as the loss; an earlier value of the key is replaced."""
        self.values[key] = value.detach().clone()
        return value

    def parameter(self, key: Key, value: Tensor, parameter: Tensor) -> Tensor:
        """Record a parameter or a gradient of a parameter."""
        return self.add(key, value)

    def begin(self, key: Key, value: Tensor) -> None:
        """Reserve the position of a tensor in the order of recording; `add` later records the complete value."""
        self.values.setdefault(key, value.detach().clone())

    def input(self, step: int, layer: str, call: int) -> Tensor | None:
        """Return the recorded x of a module; None: the module has no x in this step and call."""
        link = self.recorder.inputs.get((step, layer, call))
        return None if link is None else self.values.get(link.value)

    def output(self, step: int, layer: str, call: int) -> Tensor | None:
        """Return the recorded y of a module, or None."""
        link = self.recorder.outputs.get((step, layer, call))
        return None if link is None else self.values.get(link.value)

    def output_grad(self, step: int, layer: str, call: int) -> Tensor | None:
        """Return the recorded dy of a module, or None."""
        link = self.recorder.outputs.get((step, layer, call))
        return None if link is None else self.values.get(link.grad)

    def readers(self, key: Key) -> list[tuple[str, int]]:
        """Return (module, call) of each module whose backward contributes to the gradient `key`, a dx."""
        link = self.recorder.inputs.get((key.step, key.layer, key.call))
        return link.readers if link is not None and link.grad == key else []

    def weight(self, step: int, layer: str, name: str = "weight") -> Tensor | None:
        """Return the recorded value of a parameter in the forward of a step, or None."""
        first = next((at for at, places in self.tied.items() if (layer, name) in places), (layer, name))
        return self.values.get(Key(step - 1, first[0], WEIGHT_NAMES.get(first[1], first[1])))

    def order(self, key: Key) -> float:
        """Return the position of a tensor in the order of forward and backward. Gradients of parameters follow dy of the layer;
        codes and scales precede y or dy of the layer."""
        if len(self._order) != len(self.values):
            self._order = {each: i for i, each in enumerate(self._in_order())}
        if key in self._order:
            return self._order[key]
        result = "dy" if key.tensor.endswith(("dgrad", "wgrad")) else "y"
        return self._order.get(Key(key.step, key.layer, result), len(self._order)) - 0.5

    def _in_order(self) -> Iterator[Key]:
        """Yield all keys in the order of recording, but gradients of parameters after dy of the layer."""
        behind: dict[Key, list[Key]] = {}
        moved = set()
        outputs = {(link_key[0], link_key[1]): link for link_key, link in self.recorder.outputs.items()}
        for key in self.values:
            link = outputs.get((key.step, key.layer))
            if link is not None and is_parameter_gradient(key) and link.grad in self.values:
                behind.setdefault(link.grad, []).append(key)
                moved.add(key)
        for key in self.values:
            if key not in moved:
                yield key
                yield from behind.get(key, ())


def is_parameter_gradient(key: Key) -> bool:
    """Whether a tensor is the gradient of a parameter, such as dw or db."""
    return key.tensor.startswith("d") and key.tensor[:2] not in ("dx", "dy")


def is_activation_gradient(key: Key) -> bool:
    """Whether a tensor is dx or dy of a module."""
    return key.tensor[:2] in ("dx", "dy")


def named_parameters(model: nn.Module) -> Mapping[tuple[str, str], nn.Parameter]:
    """Return the parameters of a model by (module, name in the module). A tied parameter occurs once, under its first name."""
    found = {}
    for name, parameter in model.named_parameters():
        layer, _, own = plain_name(name).rpartition(".")
        found[layer, own] = parameter
    return found


def tied_parameters(model: nn.Module) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Return a dict from the first name of each parameter to the list of all its names. A name is (module, name in the
    module); only tied parameters have several names."""
    places: dict[int, list[tuple[str, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer, _, own = plain_name(name).rpartition(".")
        places.setdefault(id(parameter), []).append((layer, own))
    return {its[0]: its for its in places.values()}


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Remove the hooks of `recorder` at the end of a `with` block."""
    try:
        yield
    finally:
        recorder.remove()
