"""Classes for weights, independent of `LayerState`: cast operands, values that casts read, and destinations of gradients.

    rowwise     w [N, K]      operand of fprop
    columnwise  w.T [K, N]    operand of dgrad

**Main gradients** (`MainGrad`): instead of autograd, the wgrad GEMM accumulates dw into an existing gradient, with beta = 1.
The modes (`MAIN_GRADS`) are:

    off         the GEMM returns dw [N, K], and autograd adds dw to the parameter's `grad`
    grad        autograd sets the first dw as the parameter's `grad`; the GEMM adds each further dw to `grad`, if `grad` is fp32
                and contiguous and the parameter has no hooks
    main_grad   the GEMM adds dw to the parameter's `main_grad`, fp32 or bf16, which the user allocates, as in Megatron-LM, and
                the parameter's attribute `grad_added_to_main_grad` is set to True. If the parameter's attribute
                `overwrite_main_grad` is true, dw replaces `main_grad`. If `zero_out_wgrad` is true, autograd gets zeros, for
                hooks that wait for a gradient

An fp32 sum is bitwise equal to the sum that autograd computes, except for nvfp4 on a GPU, whose GEMM scales the product and
adds it with one rounding, while autograd rounds twice. `torch.autograd.grad` always returns dw, and accumulates nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dlp.comm.transport import agree
from dlp.parallel.casts import CastBatch
from dlp.parallel.linear.spec import LinearSpec
from dlp.quant.tensor import QuantizedTensor

_NUMBERS = itertools.count(1)
MAIN_GRADS = ("off", "grad", "main_grad")


class Member(NamedTuple):
    """One weight of a layer: the module that owns the weight, and the names of the weight and the bias in this module."""

    module: nn.Module
    weight: str
    bias: str


def accumulates(parameter: Tensor) -> bool:
    """Whether the running backward accumulates into the `grad` of a parameter. Raises RuntimeError if
    `torch.autograd.grad` returns the gradient.

    The AccumulateGrad node is looked up in each backward and not stored. A stored node would accumulate on the stream of its
    creation, even in steps on another stream, unordered with code that reads or frees gradients."""
    found: bool = torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    return found


class Target(NamedTuple):
    """The tensor [N, K] into which wgrad accumulates dw, or, with `overwrite`, writes dw."""

    tensor: Tensor
    overwrite: bool = False


class MainGrad:
    """Destination of the wgrads of one parameter. mode: "grad" or "main_grad"; name: name of the layer, for messages."""

    def __init__(self, parameter: nn.Parameter, mode: str, name: str) -> None:
        self.parameter, self.mode, self.name = parameter, mode, name

    def target(self, value: Tensor) -> Target | None:
        """Return the destination of wgrad in the running backward; None: autograd gets dw.

        `value`: the weight that forward read. If the weight has other memory than the parameter, it was computed from the
        parameter, and autograd needs dw to continue."""
        if value.data_ptr() != _local(self.parameter).data_ptr() or not self._accumulates():
            return None
        return self.buffer()

    def _accumulates(self) -> bool:
        """Whether the running backward accumulates into the parameter's `grad`."""
        try:
            return accumulates(self.parameter)
        except RuntimeError:  # raised by torch.autograd.grad, which returns the gradient
            return False

    def buffer(self) -> Target | None:
        """Return the existing gradient into which the GEMM can accumulate dw; None: autograd must take dw. Raises ValueError
        for an unsuitable `main_grad`."""
        parameter = self.parameter
        if self.mode == "grad":
            if parameter._backward_hooks:  # autograd must get dw, since it passes dw to the hooks
                return None
            grad = None if parameter.grad is None else _local(parameter.grad)
            fits = grad is not None and grad.dtype == torch.float32 and grad.is_contiguous()
            return Target(grad) if fits and grad is not None else None
        buffer: Tensor | None = getattr(parameter, "main_grad", None)
        if buffer is None:
            return None
        main, shape = _local(buffer), _local(parameter).shape
        if main.shape != shape or main.dtype not in (torch.float32, torch.bfloat16) or not main.is_contiguous():
            raise ValueError(
                f"{self.name}: main_grad must be contiguous, fp32 or bf16, and {list(shape)} on this rank; got "
                f"{str(main.dtype).removeprefix('torch.')} {list(main.shape)}"
            )
        return Target(main, bool(getattr(parameter, "overwrite_main_grad", False)))

    def written(self) -> Tensor | None:
        """Return the gradient that autograd gets after wgrad wrote dw: None, or in mode "main_grad" zeros if the parameter
        requests zeros. In mode "main_grad", also set `grad_added_to_main_grad`."""
        if self.mode == "grad":
            return None
        self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        zeros = getattr(self.parameter, "zero_out_wgrad", False)
        return torch.zeros_like(_local(self.parameter)) if zeros else None


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class WeightParts:
    """Parts of the operands that the step boundary cast, for all weights of a layer.

    number               a number that no other WeightParts has
    spec                 function that returns the spec of the layer; it is called late, since a layer that is being copied has
                         no spec yet
    parts                flat list: for each weight the parts of the rowwise operand, then the parts of the columnwise operand
    sizes                number of rowwise and number of columnwise parts of one weight; a frozen layer has 0 columnwise parts
    rowwise, columnwise  flat lists of the parts of one orientation
    operands             list of the rowwise operands of all weights, and list of the columnwise operands (empty if frozen)
    calls                `BoundCall`s whose captured launches contain the addresses of these parts
    """

    def __init__(self, spec: Callable[[], LinearSpec], parts: Sequence[Tensor], sizes: tuple[int, int]) -> None:
        self.number = next(_NUMBERS)
        self._spec, self.parts, self._sizes, both = spec, parts, sizes, sum(sizes)
        self.rowwise = [part for i, part in enumerate(parts) if i % both < sizes[0]]
        self._columnwise = [part for i, part in enumerate(parts) if i % both >= sizes[0]]
        self.calls: dict[Any, Any] = {}

    @cached_property
    def operands(self) -> tuple[list[QuantizedTensor], list[QuantizedTensor]]:
        spec = self._spec()
        columnwise = spec.weight_operands(self._columnwise, columnwise=True) if self._columnwise else []
        return spec.weight_operands(self.rowwise, columnwise=False), columnwise

    @property
    def columnwise(self) -> list[Tensor]:
        """Columnwise parts. Raises RuntimeError for a frozen layer."""
        self._check_not_frozen()
        return self._columnwise

    def _check_not_frozen(self) -> None:
        """Raise RuntimeError for a frozen layer, which has only rowwise operands."""
        if not self._sizes[1]:
            raise RuntimeError(
                "backward reached a frozen layer, which has no columnwise codes for dgrad: call the forward under "
                "torch.no_grad(), or leave the layer out of dlp.freeze"
            )

    def both_of(self, used: Sequence[int]) -> list[Tensor]:
        """Return the parts of the `used` weights, in both orientations, in the order of `parts`."""
        size = sum(self._sizes)
        return [part for i in used for part in self.parts[i * size : (i + 1) * size]]

    def columnwise_operands(self, used: Sequence[int]) -> list[QuantizedTensor]:
        """Return the columnwise operands of the `used` weights. Raises RuntimeError for a frozen layer."""
        operands = self.operands[1]
        if len(used) == len(operands):
            return operands
        self._check_not_frozen()
        return [operands[i] for i in used]


class Values:
    """Matrices that casts at the step boundary read: weights, or copies of weights in the dtype and shape that casts need.

    The same copy is reused in every step, since launches contain its address. All copies are written together: one multi-tensor
    call writes the copies that are only rounded, and another call the padded copies.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._requested: dict[str, tuple[Tensor, Tensor]] = {}  # since the last `renew`: (copy, weight)

    def of(self, name: str, weight: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        """Return the weight [N, K] in `dtype`, zero-padded to `shape`: the weight itself if it fits, else a copy, which the
        next `renew` fills."""
        if weight.dtype == dtype and weight.shape == shape:
            return weight
        copy = self._copies.get(name)
        if copy is None or (copy.dtype, copy.shape, copy.device) != (dtype, shape, weight.device):
            copy = torch.zeros(shape, dtype=dtype, device=weight.device)
        self._requested[name] = copy, weight
        return copy

    def renew(self) -> None:
        """Write the copies that were requested since the last `renew`, and discard all others."""
        pairs = list(self._requested.values())
        for padded in (False, True):
            chosen = [(copy, weight) for copy, weight in pairs if (copy.shape != weight.shape) == padded]
            if chosen:
                torch._foreach_copy_([copy[: len(w), : w.shape[1]] for copy, w in chosen], [w for _, w in chosen])
        self._copies, self._requested = {name: copy for name, (copy, _) in self._requested.items()}, {}


class WeightBatch:
    """State of one model that calls of `refresh` share: copies of weights (`values`) and prepared launches (`casts`)."""

    def __init__(self) -> None:
        self.values, self.casts = Values(), CastBatch()


def share_amaxes(staged: Sequence[tuple[ProcessGroup, list[Tensor]]]) -> None:
    """Agree on the amaxes of delayed scaling, by one all-reduce for each group. `staged`: groups, and the amaxes on which the
    group agrees; the amaxes are overwritten in place."""
    by_group: dict[ProcessGroup, list[Tensor]] = {}
    for group, its in staged:
        by_group.setdefault(group, []).extend(its)
    for group, amaxes in by_group.items():
        torch._foreach_copy_(amaxes, agree(amaxes, group))
