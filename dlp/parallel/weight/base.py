"""Parts of weights that know no layer: operands from the step boundary, values that casts read, destinations of gradients.

    rowwise     w [N, K]      operand of fprop
    columnwise  w.T [K, N]    operand of dgrad

**Main gradients** (`MainGrad`): the wgrad GEMM accumulates dw into an existing gradient with beta = 1, instead of
autograd.

    off         autograd gets dw [N, K] of each backward and adds it to the parameter's `grad`
    grad        the first dw becomes the parameter's `grad`, by autograd; to a `grad` in fp32 further ones are added by the GEMM
    main_grad   dw is added to the parameter's `main_grad`, fp32 or bf16, which the user allocates, as in Megatron-LM; if
                `overwrite_main_grad` is true, dw replaces `main_grad`. `grad_added_to_main_grad` is then set to True, and
                autograd gets zeros where `zero_out_wgrad` is true, for hooks that wait for a gradient

In fp32 the result is bitwise equal to autograd's sum, except for nvfp4 on a GPU, which scales the sum of products and adds it
with one rounding, where autograd rounds twice. `torch.autograd.grad`, which leaves no gradients in parameters, always gets
gradients from autograd.
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
    """One weight of a layer: the module that owns it, and the names of its weight and bias there."""

    module: nn.Module
    weight: str
    bias: str


def accumulates(parameter: Tensor) -> bool:
    """Whether the running backward accumulates into the `grad` of a parameter. Raises RuntimeError if
    `torch.autograd.grad` returns the gradient.

    The AccumulateGrad node is looked up in each backward and never kept: a node that lives on stays on the stream of its
    creation, and steps on another stream would accumulate there, unordered with code that reads or frees gradients."""
    found: bool = torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    return found


class Target(NamedTuple):
    """The tensor [N, K] into which wgrad accumulates dw, or, with `overwrite`, writes dw."""

    tensor: Tensor
    overwrite: bool = False


class MainGrad:
    """Destination of the wgrads of one parameter of layer `name`, in mode "grad" or "main_grad"."""

    def __init__(self, parameter: nn.Parameter, mode: str, name: str) -> None:
        self.parameter, self.mode, self.name = parameter, mode, name

    def target(self, value: Tensor) -> Target | None:
        """Destination of wgrad in the running backward; None: autograd gets dw.

        `value`: the weight that forward read. If the memory is not the parameter's, the weight was computed from the
        parameter, and autograd continues from dw."""
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
        """The gradient into which dw can be accumulated; None: there is none. Raises ValueError for an unsuitable
        `main_grad`."""
        parameter = self.parameter
        if self.mode == "grad":
            if parameter._backward_hooks:  # hooks read the gradient that autograd passes on
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
        """The gradient for autograd after wgrad wrote dw."""
        if self.mode == "grad":
            return None
        self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        zeros = getattr(self.parameter, "zero_out_wgrad", False)
        return torch.zeros_like(_local(self.parameter)) if zeros else None


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class WeightParts:
    """Parts of the operands from the step boundary, for all weights of a layer, as flat lists.

    number               unique among all WeightParts
    spec                 returns the spec of the layer, which a layer that is being copied has not yet
    parts                for each weight, parts of the rowwise operand, then parts of the columnwise operand
    rowwise, columnwise  parts of one orientation
    operands             rowwise operands of all weights, then columnwise operands, which a frozen layer does not have
    calls                `BoundCall`s whose captured launches hold the addresses of these parts
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
        """Parts of some of the weights, in both orientations."""
        size = sum(self._sizes)
        return [part for i in used for part in self.parts[i * size : (i + 1) * size]]

    def columnwise_operands(self, used: Sequence[int]) -> list[QuantizedTensor]:
        """Columnwise operands of some of the weights. Raises RuntimeError for a frozen layer."""
        operands = self.operands[1]
        if len(used) == len(operands):
            return operands
        self._check_not_frozen()
        return [operands[i] for i in used]


class Values:
    """Matrices that casts at the step boundary read: weights, or copies in the dtype and size that casts need.

    The copies are kept from step to step, by name of the weight, since launches hold their addresses. All copies are
    renewed together:
    copies that are only rounded in one multi-tensor call, padded copies in another.
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
        """Write the copies that were requested since the last `renew`, and forget all others."""
        pairs = list(self._requested.values())
        for padded in (False, True):
            chosen = [(copy, weight) for copy, weight in pairs if (copy.shape != weight.shape) == padded]
            if chosen:
                torch._foreach_copy_([copy[: len(w), : w.shape[1]] for copy, w in chosen], [w for _, w in chosen])
        self._copies, self._requested = {name: copy for name, (copy, _) in self._requested.items()}, {}


class WeightBatch:
    """State of one model between calls of `refresh`: copies of values, prepared launches."""

    def __init__(self) -> None:
        self.values, self.casts = Values(), CastBatch()


def share_amaxes(staged: Sequence[tuple[ProcessGroup, list[Tensor]]]) -> None:
    """Agree on staged amaxes, once for each group."""
    by_group: dict[ProcessGroup, list[Tensor]] = {}
    for group, its in staged:
        by_group.setdefault(group, []).extend(its)
    for group, amaxes in by_group.items():
        torch._foreach_copy_(amaxes, agree(amaxes, group))
